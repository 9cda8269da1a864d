"""Make sure of the SSH host key of every host before anything logs in.

Known keys pass in silence. Keys that this controller has never seen are shown, all in one table, and
pinned after one `yes`. A key that differs from the pinned one, or that is revoked, is refused. A host that
does not answer is named within seconds.

ssh itself fetches and judges the keys, with the arguments that Ansible's connection has, so that jump
hosts, ports, aliases, certificates and every known_hosts file count as they will count later. No login is
tried.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ansible import context
from ansible.errors import AnsibleError, AnsiblePromptInterrupt, AnsiblePromptNoninteractive
from ansible.module_utils.common.text.converters import to_text
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import connection_loader
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from known_hosts import first_file, pin

CONNECT_SECONDS = 10
GIVE_UP_SECONDS = 25  # a proxy may hang where ConnectTimeout does not reach
AT_ONCE = 32

# The host key is checked, then "none" is the only way in that is tried, and refused. No master connection
# is shared: it would answer for a machine that is long gone.
PROBE = {
    "ControlMaster": "no",
    "ControlPath": "none",
    "BatchMode": "yes",
    "PreferredAuthentications": "none",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ConnectionAttempts": "1",
    "UpdateHostKeys": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}

Run = Callable[..., subprocess.CompletedProcess]


@dataclass
class Host:
    """A host as its connection reaches it, and what was found out about its key.

    `state`: known, unknown, changed, revoked or unreachable. `lines`: its key as lines of a known_hosts file.
    `fingerprint`: that of the key it shows. `old`: that of the pinned key, which stands in `file`, line
    `line`. `reason`: ssh's own words.
    """

    name: str
    executable: str
    arguments: list[str]
    address: str
    state: str = ""
    lines: list[str] = field(default_factory=list)
    fingerprint: str = ""
    old: str = ""
    file: str = ""
    line: int = 0
    reason: str = ""

    def command(self, options: Mapping[str, str], *flags: str) -> list[str]:
        """ssh with `options` before all others, because ssh takes the first value that it meets."""
        given = [item for pair in options.items() for item in ("-o", "=".join(pair))]
        return [self.executable, *flags, *given, *self.arguments, self.address]


def run_ssh(command: list[str], **more) -> subprocess.CompletedProcess:
    """Run `command` without a terminal: neither it nor a jump host's ssh below it may ask anything."""
    environment = {**os.environ, "LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.run(
            command,
            stdin=None if "input" in more else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIVE_UP_SECONDS,
            start_new_session=True,
            env=environment,
            **more,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 255, "", f"no answer within {GIVE_UP_SECONDS} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 255, "", f"{command[0]}: {error.strerror}")


def look(host: Host, run: Run = run_ssh) -> Host:
    """Find out how `host`'s key stands to the known_hosts files; fills in `state` and what belongs to it."""
    answer = run([*host.command({**PROBE, "StrictHostKeyChecking": "yes"}, "-T"), "true"])
    if answer.returncode == 0 or "Permission denied (" in answer.stderr:
        host.state = "known"
        return host
    if offending := re.search(r"Offending \S+ key in (.+):(\d+)", answer.stderr):
        host.state, host.file, host.line = "changed", offending[1], int(offending[2])
        host.fingerprint = "".join(re.findall(r"SHA256:[\w+/=]+", answer.stderr)[:1])
        host.old = fingerprint_of(line_of(host.file, host.line), run)
        return host
    # In a known_hosts file (@revoked), or in one of ssh's RevokedHostKeys, which must be there, too.
    if revoked := re.search(r".*(?:marked as revoked|revoked by file|in revoked keys file).*", answer.stderr):
        host.state, host.reason = "revoked", revoked[0].strip()
        return host
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        file = Path(folder, "known_hosts")
        fresh = {"StrictHostKeyChecking": "accept-new", "UserKnownHostsFile": str(file)}
        again = run([*host.command({**PROBE, **fresh, "GlobalKnownHostsFile": "/dev/null"}, "-T"), "true"])
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text:
        host.state, host.lines, host.fingerprint = "unknown", text.splitlines(), fingerprint_of(text, run)
    else:
        host.state, host.reason = "unreachable", last_line(again.stderr) or last_line(answer.stderr)
    return host


def fingerprint_of(lines: str, run: Run = run_ssh) -> str:
    """Type and SHA256 of the first key in known_hosts `lines`, as `ssh-keygen -l` shows it there."""
    words = run(["ssh-keygen", "-lf", "-"], input=lines).stdout.partition("\n")[0].split()
    if len(words) < 3 or not words[1].startswith("SHA256:"):
        return "an unreadable key"
    return f"{words[-1].strip('()')} {words[1]}"


def line_of(file: str, number: int) -> str:
    """Line `number`, counted from 1, of `file`; empty if there is none."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()[number - 1] + "\n"
    except (OSError, IndexError):
        return ""


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


CURES = {
    "resolve hostname": "Correct ansible_host: the name is not known to this controller",
    "refused": "It is up, but no SSH server listens: install openssh-server, or correct ansible_port",
    "timed out": "Is it switched on, on the network, and its address right (ansible_host)?",
    "no answer": "Is it switched on, on the network, and its address right (ansible_host)?",
    "No route to host": "Is it switched on, on the network, and its address right (ansible_host)?",
    "unreachable": "No route leads there: correct ansible_host, or this controller's own network",
    "Host key verification failed": "A jump host's key is not known: log in to the jump host once by hand",
}


def report_unreachable(hosts: list[Host]) -> list[str]:
    lines = []
    for host in hosts:
        cure = next((cure for words, cure in CURES.items() if words in host.reason), "")
        by_hand = shlex.join([host.executable, *host.arguments, host.address])
        lines.append(f"  - {host.name} ({host.address}) does not answer: {host.reason or 'no reason given'}.")
        lines.append(f"    {cure + '. ' if cure else ''}Try it by hand: {by_hand}")
    return [*lines, "    To go on without a host for now: -l 'all:!NAME'"] if lines else []


def forget(file: str, line: int) -> str:
    """The command that takes a pinned key away; where root keeps the file, all of the host's: it has one of a type."""
    names = line_of(file, line).partition(" ")[0]
    if os.access(file, os.W_OK) or not names or names.startswith(("|", "@")):  # hashed, or of an authority
        return f"{'' if os.access(file, os.W_OK) else 'sudo '}sed -i {line}d {shlex.quote(file)}"
    return f"sudo ssh-keygen -R {shlex.quote(names.partition(',')[0])} -f {shlex.quote(file)}"


def report_changed(hosts: list[Host]) -> list[str]:
    lines = []
    for host in hosts:
        lines += [
            f"  - {host.name} ({host.address}) shows another host key than the one that is pinned. Refused.",
            f"    pinned: {host.old} ({host.file}, line {host.line})",
            f"    shown:  {host.fingerprint}",
            "    If the machine was reinstalled, forget the old key and run this again:",
            f"      {forget(host.file, host.line)}",
            "    If it was not, another machine answers in its place: find out which before you log in.",
        ]
    return lines


def report_revoked(hosts: list[Host]) -> list[str]:
    lines = []
    for host in hosts:
        lines += [
            f"  - {host.name} ({host.address}) shows a host key that is not to be trusted any more. Refused.",
            f"    ssh says: {host.reason}",
            "    Give the machine a new key, there: rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh",
            "    If the key was revoked in error, take it out of what revokes it: a line with @revoked in a",
            "    known_hosts file, or the file that RevokedHostKeys names (ssh -G shows them all).",
        ]
    return lines


def table(hosts: list[Host]) -> list[str]:
    rows = [("host", "reached at", "key"), *((host.name, host.address, host.fingerprint) for host in hosts)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows]


def known_hosts_file(host: Host, run: Run = run_ssh) -> Path | None:
    """The first of the user's known_hosts files, where ssh would write; None if there is none."""
    return first_file(run(host.command({}, "-G")).stdout)


def _words(key: str, options: str) -> list[str]:
    """ssh's options as words; raises ValueError that names the variable."""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ValueError(f"ansible_{key}: found {options!r}: {error}") from None


class ActionModule(ActionBase):
    """`hosts`: names. `accept`: pin unknown keys without asking."""

    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            {
                "hosts": {"type": "list", "elements": "str", "required": True},
                "accept": {"type": "bool", "default": False},
            }
        )
        hosts, odd = [], []
        for name in arguments["hosts"]:
            try:
                hosts.append(self._host(name, task_vars["hostvars"][name]))
            except (AnsibleError, ValueError) as error:  # a template that fails, a quote that is not closed
                odd.append(
                    f"  - {name}: how to reach it (ansible_host, ansible_ssh_common_args, …): {error}. Correct it."
                )
        if odd:
            return {"failed": True, "msg": "\n".join(["Nothing was changed.", *odd])}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            hosts = list(pool.map(look, (host for host in hosts if host)))
        changed, revoked, unreachable, unknown = (
            [host for host in hosts if host.state == state]
            for state in ("changed", "revoked", "unreachable", "unknown")
        )
        refused = report_changed(changed) + report_revoked(revoked) + report_unreachable(unreachable)
        if refused:
            return {"failed": True, "msg": "\n".join(["Nothing was changed.", *refused])}
        if not unknown:
            return {"changed": False}
        return self._accept(unknown, arguments["accept"])

    def _host(self, name: str, variables: Mapping) -> Host | None:
        """`name` as Ansible's own ssh connection would reach it; None if another kind of connection does."""
        # Not the play context's: this task itself is delegated to localhost.
        kind = variables.get("ansible_connection") or context.CLIARGS.get("connection") or "ssh"
        if kind.rpartition(".")[2] not in ("ssh", "smart"):
            return None
        connection = connection_loader.get("ssh", self._play_context)
        connection.set_options(var_options=variables)
        option = connection.get_option
        arguments = [
            word
            for key in ("ssh_args", "ssh_common_args", "ssh_extra_args")
            for word in _words(key, option(key) or "")
        ]
        if option("port"):
            arguments += ["-p", str(option("port"))]
        if option("remote_user"):
            arguments += ["-o", f"User={option('remote_user')}"]
        return Host(name, option("ssh_executable"), arguments, option("host"))

    def _accept(self, unknown: list[Host], accepted: bool):
        shown = [
            "These hosts are new to this controller; their keys:",
            *table(unknown),
            "To be sure, compare with what each machine shows on its own screen:",
            "  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        ]
        if self._task.check_mode:
            how = "A check run pins nothing. First, the same with --tags first_contact instead of --check."
            return {"failed": True, "msg": "\n".join([*shown, how])}
        if not accepted:
            try:
                answer = Display().prompt_until("\n".join([*shown, "Trust and pin them all? (yes/no) "]))
                accepted = to_text(answer).strip().lower() == "yes"
            except AnsiblePromptInterrupt:
                accepted = False
            except AnsiblePromptNoninteractive:
                how = "There is no terminal to ask at. To trust them: -e accept_new_host_keys=true"
                return {"failed": True, "msg": "\n".join([*shown, how])}
            if not accepted:
                return {"failed": True, "msg": "The hosts' keys were not accepted; nothing was changed."}
        for host in unknown:
            file = known_hosts_file(host)
            if file is None:
                how = f"{host.name}: its key cannot be pinned, since UserKnownHostsFile names no file"
                return {
                    "failed": True,
                    "msg": f"{how}. Correct ansible_ssh_common_args or ~/.ssh/config.",
                }
            try:
                pin(file, host.lines)
            except OSError as error:
                return {
                    "failed": True,
                    "msg": f"{host.name}: its key cannot be pinned in {file}: {error.strerror}.",
                }
        return {"changed": True, "msg": f"Pinned the keys of {', '.join(host.name for host in unknown)}."}
