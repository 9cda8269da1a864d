"""Opens the way to the page of the role monitoring: scripts/dashboard.py [-i INVENTORY] [--port PORT]

Prometheus, and Grafana where there is one, listen on the loopback of their host alone. This is an SSH tunnel there,
with the address, user, key and options that the inventory has for that host; SSH asks for what it needs beyond that.
It lasts until Ctrl-C. Where the group has several hosts, the next one serves when one does not answer.
"""

import argparse
import contextlib
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT, GRAFANA = 9090, 3001  # roles/monitoring/defaults/main.yml
LOOPBACK = "127.0.0.1"
# What Ansible would log in with, templates and vaults resolved by itself.
ASKED = {
    "address": "ansible_host | default(inventory_hostname)",
    "connection": "ansible_connection | default('ssh')",
    "port": "ansible_port | default('')",
    "user": "ansible_user | default('')",
    "key": "ansible_ssh_private_key_file | default('')",
    "options": "ansible_ssh_common_args | default('') ~ ' ' ~ ansible_ssh_extra_args | default('')",
    "there": f"monitoring_port | default({PORT})",
    "grafana": f"monitoring_grafana_port | default({GRAFANA})",
}


class Fault(Exception):
    """Why there is no page, and the cure."""


def ask(inventory: str | None) -> list[dict[str, str]]:
    """ASKED of each host of the group monitoring, in its order, and its `name`."""
    asked = {**ASKED, "name": "inventory_hostname", "place": "groups['monitoring'].index(inventory_hostname)"}
    template = ", ".join(f"'{name}': {value}" for name, value in asked.items())
    command = [str(Path(sys.executable).with_name("ansible")), *(["-i", inventory] if inventory else [])]
    command += ["-o", "monitoring", "-m", "ansible.builtin.debug", "-a", f"msg={{{{ {{{template}}} }}}}"]
    environment = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **os.environ, "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        command, cwd=os.getcwd(), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    answers = [line.partition(" | SUCCESS => ")[2] for line in done.stdout.splitlines()]
    hosts = [json.loads(answer)["msg"] for answer in answers if answer]
    if not hosts:
        what = done.stderr.strip().splitlines()
        raise Fault(
            f"{inventory or 'the inventory'}: found no host in the group monitoring; expected one, mostly the head. "
            "Write monitoring: {hosts: {HEAD: {}}} beside cluster, and run site.yml"
            + (f"\nAnsible said: {what[-1]}" if what and done.returncode else "")
        )
    hosts.sort(key=lambda host: int(host["place"]))
    return [{name: str(value) for name, value in host.items()} for host in hosts]


def tunnel(host: dict[str, str], port: int, grafana: int) -> list[str]:
    """The command that leads `port` of this machine to Prometheus, and `grafana` to Grafana."""
    return [
        *("ssh", "-N", "-L", f"{LOOPBACK}:{port}:{LOOPBACK}:{host['there']}"),
        *("-L", f"{LOOPBACK}:{grafana}:{LOOPBACK}:{host['grafana']}"),
        # That nobody answers at Grafana's port is no fault to be told.
        *("-o", "LogLevel=ERROR"),
        # A connection of its own, which ends with it.
        *("-o", "ExitOnForwardFailure=yes", "-o", "ControlMaster=no", "-o", "ControlPath=none"),
        *("-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=15"),
        *shlex.split(host["options"]),
        *(["-p", host["port"]] if host["port"] else []),
        *(["-l", host["user"]] if host["user"] else []),
        *(["-i", host["key"]] if host["key"] else []),
        host["address"],
    ]


def free(wanted: int, taken: int = 0) -> int:
    """`wanted` if nobody has it here, and it is not `taken`, else any port that nobody has."""
    for port in (0 if wanted == taken else wanted, 0):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)) as door:
            return door.getsockname()[1]
    raise Fault(f"no port is free on {LOOPBACK}")


def listens(port: int) -> bool:
    """Whether SSH has logged in, and lets in what comes to `port`."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
        return True
    return False


def answers(port: int, path: str) -> bool:
    """Whether `path` is answered at `port`; no proxy that this machine may have is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{LOOPBACK}:{port}{path}", timeout=10) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # the second: one that is not HTTP's
        return False


def tell_of_grafana(port: int) -> None:
    """Say where Grafana is, if one answers."""
    if answers(port, "/api/health"):
        print(f"http://{LOOPBACK}:{port}/dashboards shows it in Grafana.", flush=True)


def show(host: dict[str, str], wanted: int) -> None:
    """Say where the page of `host` is, and lead there until it ends; wanted: this machine's port."""
    if host["connection"].rpartition(".")[2] == "local":
        print(
            f"http://{LOOPBACK}:{host['there']}/user/ shows the cluster: it is this machine that serves it."
        )
        tell_of_grafana(int(host["grafana"]))
    else:
        port = free(wanted)
        lead(host, port, free(GRAFANA, port))


def lead(host: dict[str, str], port: int, grafana: int) -> None:
    """Hold the tunnel until it ends."""
    process = subprocess.Popen(tunnel(host, port, grafana))
    try:
        while process.poll() is None and not listens(port):
            time.sleep(0.2)
        if process.poll() is None:
            if not answers(port, "/-/ready"):
                raise Fault(
                    f"{host['name']}: Prometheus does not answer at its port {host['there']}; expected what site.yml "
                    "sets up. Run site.yml --tags monitoring, or there: systemctl status trainyard-prometheus"
                )
            print(
                f"http://{LOOPBACK}:{port}/user/ shows the cluster, from {host['name']}, until Ctrl-C.",
                flush=True,
            )
            tell_of_grafana(grafana)
        if process.wait():
            raise Fault(f"{host['name']} ({host['address']}): SSH ended, as it says above")
    finally:
        process.terminate()
        process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--inventory", help="as ansible-playbook takes it")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"on this machine (default: {PORT}, or a free one)"
    )
    asked = parser.parse_args(arguments)
    try:
        *others, last = ask(asked.inventory)
        for host in others:
            try:
                show(host, asked.port)
                return 0
            except Fault as fault:
                print(f"{fault}; the next host of the group is asked", file=sys.stderr, flush=True)
        show(last, asked.port)
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
