"""Has one host measure the ways to its peers, and tries meanwhile whether its ports are open to the controller.

While the module of this name listens on the host, whoever gets its greeting has come through; the controller, unless
it is a peer or does not reach the host by its cluster address, must not. It goes the way that its SSH goes, through a
ProxyCommand, too, and to no address that SSH does not go to.
"""

from __future__ import annotations

import contextlib
import select
import shlex
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, replace

from ansible.plugins.action import ActionBase

GREETING = b"trainyard preflight\n"  # as in the module
TRY_SECONDS = 2.0
PAUSE = 0.3
ANSWER_SECONDS = 0.5  # that Ansible may take to bring the module's answer


@dataclass(frozen=True)
class Way:
    """How SSH goes to a host: an address, and a ProxyCommand with its tokens, or ""."""

    address: str
    user: str = ""
    proxy: str = ""

    def command(self, port: int) -> str:
        tokens = {"%%": "%", "%h": self.address, "%p": str(port), "%r": self.user, "%n": self.address}
        command = self.proxy
        for token, value in tokens.items():
            command = command.replace(token, value)
        return f"exec {command}"


def way_of(settings: str) -> Way | str:
    """The way in the output of `ssh -G`, or why it is none that can be gone."""
    found = dict(line.split(" ", 1) for line in settings.splitlines() if " " in line)
    if found.get("proxyjump", "none") != "none":
        return "the controller goes through a jump host (ProxyJump)"
    proxy = found.get("proxycommand", "none")
    return Way(found.get("hostname", ""), found.get("user", ""), "" if proxy == "none" else proxy)


def to_cluster(way: Way, address: str) -> Way:
    """`way`, by the cluster address where its name leads there; a name behind a proxy is the proxy's to look up."""
    with contextlib.suppress(OSError, ValueError):
        if not way.proxy and any(place[0] == address for *_, place in socket.getaddrinfo(way.address, None)):
            return replace(way, address=address)
    return way


def note_for(way: Way, address: str, client: str, peers: list[str]) -> str:
    """Why the controller's view of a host says nothing; "" where it does.

    client: where the host's SSH session comes from. peers: the addresses of all hosts.
    """
    # The module listens on the cluster address alone. From here that may be another machine's: it is not tried.
    if way.address != address:
        return f"the controller reaches the hosts by {way.address}, not by the cluster's address {address}"
    if client in peers:
        return "the controller, or its jump host, is a peer"
    if not client:
        return "where the controller's connection comes from is unknown"
    return ""


def is_open(way: Way, port: int) -> bool:
    """Whether the port lets a connection in; through a ProxyCommand, which may say nothing, whether it is answered."""
    if way.proxy:
        return _by_proxy(way.command(port))
    with contextlib.suppress(OSError), socket.create_connection((way.address, port), TRY_SECONDS):
        return True
    return False


def _by_proxy(command: str) -> bool:
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if not select.select([process.stdout], [], [], TRY_SECONDS)[0]:
            return False
        return GREETING.startswith(process.stdout.read1(len(GREETING)) or b"-")
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


class Watch(threading.Thread):
    """Tries a port again and again until it is open, or told to stop. Each has its own: a silent one takes its time."""

    def __init__(self, way: Way, port: int):
        super().__init__(daemon=True)
        self.way, self.port, self.over = way, port, threading.Event()
        self.found = "closed"

    def run(self) -> None:
        while self.found == "closed" and not self.over.wait(PAUSE):
            if is_open(self.way, self.port):
                self.found = "open"


def outcome(watches: list[Watch]) -> dict[str, str]:
    """{port: open | closed}, when all have been told to stop."""
    for watch in watches:
        watch.over.set()
    end = time.monotonic() + 2 * TRY_SECONDS
    for watch in watches:
        watch.join(max(0.0, end - time.monotonic()))
    return {str(watch.port): watch.found for watch in watches}


class ActionModule(ActionBase):
    """The module's arguments, and client: where the host's SSH session comes from.

    Returns the module's answer with outside: {port: open | closed} or why that is unknown; and clock: (s that the
    host is ahead of the controller, uncertainty).
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = dict(self._task.args)
        client = str(args.pop("client", ""))
        places = {str(host["name"]): host for host in args["hosts"]}
        own = places[str(args["host"])]
        way = self._way()
        peers = [str(host["address"]) for host in places.values()]
        if isinstance(way, Way):
            way = to_cluster(way, str(own["address"]))
        note = way if isinstance(way, str) else note_for(way, str(own["address"]), client, peers)
        watches = [] if note else [Watch(way, int(port)) for port in (args["port"], own["port"])]
        for watch in watches:
            watch.start()
        try:
            answer = self._execute_module("preflight_pair", module_args=args, task_vars=task_vars)
        finally:
            outside = note or outcome(watches)
        if "time" in answer:
            # It was taken before the answer was on its way.
            answer["clock"] = [answer["time"] - time.time() + ANSWER_SECONDS / 2, ANSWER_SECONDS / 2]
        return {**result, **answer, "outside": outside}

    def _way(self) -> Way | str:
        """How the connection of this task goes."""
        if self._connection.transport not in ("ssh", "smart"):
            return "the controller is on the host itself"
        option = self._connection.get_option
        words = [option("ssh_executable"), "-G"]
        for key in ("ssh_args", "ssh_common_args", "ssh_extra_args"):
            words += shlex.split(option(key) or "")
        if option("remote_user"):
            words += ["-l", option("remote_user")]
        try:
            done = subprocess.run([*words, option("host")], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"ssh -G: {error}"
        return way_of(done.stdout) if done.returncode == 0 else f"ssh -G: {done.stderr.strip()[-200:]}"
