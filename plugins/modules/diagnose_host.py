#!/usr/bin/python
"""What one host's ranks of a run are doing, and what its machine says. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: diagnose_host
short_description: Gather what the ranks of a run on this host are doing
description:
  - Looks twice, O(seconds) apart, at every rank's process (state, time on the CPU, Python stack), at the run's status,
    and at the counters of the interface that holds the cluster address; and once at the kernel's log and the GPUs.
  - Stacks are read by py-spy, which does not stop the process. Changes nothing.
options:
  run: {type: str, required: true, description: The run's name.}
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  opt_dir: {type: path, required: true, description: Where releases are deployed.}
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  address: {type: str, required: true, description: The host's IPv4 address on the cluster network.}
  seconds: {type: float, default: 2, description: Between the two looks.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: See what the ranks are doing
  diagnose_host:
    run: first
    keeper: systemd
    opt_dir: /opt/trainyard
    state_dir: /var/lib/trainyard
    address: 10.77.0.11
"""

RETURN = r"""
diagnosis:
  description: >-
    C(active), C(status) (status.json), C(steps) (before and after), C(age) (s since status.json was written),
    C(seconds) (between the looks), C(ranks) (each with rank, pid, state, cpu (of a core), rss_bytes, stack (frames,
    innermost first), threads (those of others, by name), said (the log's last line), silent_seconds, groups (of
    trainer/collectives.py)), C(interface) (name, and what its counters grew by), C(kernel) (lines), C(ras) (lines of
    NCCL's RAS), C(flights) (dumps of torch's
    flight recorder), C(gpus), C(busy) (other processes that took the CPU), C(load), C(cpus).
  type: dict
  returned: always
"""

import glob
import json
import os
import re
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import (
    active_runs,
    environment_dir,
    gpus,
    interfaces,
    run_processes,
    run_status,
)

COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
# What the kernel says of memory, disks, links and GPUs that explains a run that does not go on.
TELLING = re.compile(
    r"oom-kill|Out of memory|I/O error|blocked for more than|NVRM: Xid|Link is Down|NIC Link is|link down|mce: "
    r"|EXT4-fs error|nfs: server .* not responding|thermal|soft lockup",
    re.IGNORECASE,
)
KERNEL_LINES = 10
RAS = ("127.0.0.1", 28028)  # where NCCL answers on each host of a run (NCCL_RAS_ADDR)
RAS_SECONDS = 5.0  # it asks all ranks, and waits as long for those that are silent
RAS_BYTES = 1 << 20
GROUPS_BYTES = 1 << 20  # of what a rank writes, read at most
WATCHES = "collectives"  # a thread of each rank that only looks (trainer/collectives.py)
BUSY = 0.3  # of a core, for a process that is named


def process(pid: int) -> dict | None:
    """state, ticks on the CPU, and name of a process; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(") ")
    except OSError:
        return None
    fields = rest.split()
    return {
        "name": head.split("(", 1)[1],
        "state": fields[0],
        "ticks": int(fields[11]) + int(fields[12]),
        "rss_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    }


def rank_of(pid: int) -> int | None:
    """The rank that a process is, by its environment and its command; None if it is none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = dict(one.partition(b"=")[::2] for one in file.read().split(b"\0"))
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    # The ranks' own children (compilers, loaders) have their environment, too.
    if not environment.get(b"RANK", b"").isdigit() or b"train" not in words:
        return None
    return int(environment[b"RANK"])


def stacks(run_command, spy: str, pid: int) -> tuple[list[str], dict[str, list[str]]]:
    """The main thread's Python frames, innermost first, as "function (file:line)"; and by their names those of other
    threads that are at the trainer's work, as saving is. Empty where they cannot be read.
    """
    if not os.access(spy, os.X_OK):
        return [], {}
    rc, out, _ = run_command(["timeout", "5", spy, "dump", "--nonblocking", "--json", "--pid", str(pid)])
    try:
        threads = json.loads(out) if rc == 0 else []
    except ValueError:
        threads = []
    found = [
        (
            one.get("thread_name") or "a thread",
            [f"{frame['name']} ({frame['short_filename']}:{frame['line']})" for frame in one["frames"]],
        )
        for one in threads
    ]
    main = next((number for number, (name, _) in enumerate(found) if name == "MainThread"), 0)
    others = [one for number, one in enumerate(found) if number != main and one[0] != WATCHES]
    at_work = {name: frames for name, frames in others if any("(trainer/" in frame for frame in frames)}
    return (found[main][1] if found else []), at_work


def last_words(path: str) -> tuple[str, float | None]:
    """A log's last line, and the seconds since it was written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else ""), time.time() - os.path.getmtime(path)
    except OSError:
        return "", None


def groups_of(run_dir: str, rank: int, pid: int) -> list[dict]:
    """What the rank itself has written of its groups (trainer/collectives.py); empty where it has not."""
    try:
        path = os.path.join(run_dir, "logs", f"collectives-{rank}.json")
        # The directory is the service user's: neither a link nor a pipe there shall hold this up.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            word = json.loads(file.read(GROUPS_BYTES))
        if word["pid"] != pid:
            return []
        return [
            {
                "name": str(one["name"]),
                "desc": str(one["desc"])[:50],
                "ranks": [int(number) for number in one["ranks"]],
                "sequence": int(one["sequence"]),
                "started": int(one.get("started", -1)),
                "op": str(one.get("op", ""))[:50],
                "sizes": [[int(size) for size in sizes] for sizes in one.get("sizes", [])][:4],
            }
            for one in word["groups"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def counters(interface: str | None) -> dict[str, int]:
    """The interface's counters; empty without one."""
    found = {}
    for name in COUNTERS if interface else ():
        try:
            with open(f"/sys/class/net/{interface}/statistics/{name}", encoding="ascii") as file:
                found[name] = int(file.read())
        except (OSError, ValueError):
            continue
    return found


def processes() -> dict[int, dict]:
    """Every process of the machine, by pid."""
    pids = [int(path[6:]) for path in glob.glob("/proc/[0-9]*")]
    found = {pid: process(pid) for pid in pids}
    return {pid: one for pid, one in found.items() if one}


def kernel_lines(run_command) -> list[str]:
    """What the kernel said in the last hour that may explain something."""
    _, out, _ = run_command(
        ["timeout", "5", "journalctl", "-k", "--quiet", "--since=-1h", "--lines=2000", "--output=short-iso"]
    )
    return [line for line in out.splitlines() if TELLING.search(line)][-KERNEL_LINES:]


def ras(place: tuple[str, int] = RAS) -> list[str]:
    """What NCCL's own watch says of all ranks, line by line; empty without GPUs, or where NCCL is older than 2.24."""
    text, end = b"", time.monotonic() + 2 * RAS_SECONDS
    try:
        with socket.create_connection(place, timeout=0.5) as connection:
            connection.settimeout(RAS_SECONDS + 1)
            connection.sendall(f"timeout {RAS_SECONDS:.0f}\nverbose status\n".encode())
            while len(text) < RAS_BYTES and time.monotonic() < end and (more := connection.recv(65536)):
                text += more
    except OSError:
        pass
    return text.decode(errors="replace").splitlines()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "str", "required": True},
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "opt_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "address": {"type": "str", "required": True},
            "seconds": {"type": "float", "default": 2},
        },
        supports_check_mode=True,
    )
    p, ask = module.params, module.run_command
    run_dir = os.path.join(p["state_dir"], "runs", p["run"])
    ranks = {pid: rank_of(pid) for pid in run_processes(run_dir)}
    ranks = {pid: rank for pid, rank in ranks.items() if rank is not None}
    interface = next((name for name, held in interfaces(module).items() if p["address"] in held), None)
    spy = os.path.join(environment_dir(p["opt_dir"]), "bin", "py-spy")

    begin, before, sent = time.monotonic(), processes(), counters(interface)
    first = run_status(run_dir) or {}
    seen = {pid: stacks(ask, spy, pid) for pid in ranks}
    kernel, cards = kernel_lines(ask), gpus(ask)
    watched = ras() if ranks and cards else []
    time.sleep(max(0.0, p["seconds"] - (time.monotonic() - begin)))
    after, received = processes(), counters(interface)
    status = run_status(run_dir) or {}
    seconds = time.monotonic() - begin

    def share(pid: int) -> float:
        """Of one core, in the time between the looks."""
        if pid not in before or pid not in after:
            return 0.0
        return (after[pid]["ticks"] - before[pid]["ticks"]) / os.sysconf("SC_CLK_TCK") / seconds

    told = []
    for pid, rank in sorted(ranks.items(), key=lambda item: item[1]):
        said, silent = last_words(os.path.join(run_dir, "logs", f"rank-{rank}.log"))
        now = after.get(pid)
        told.append(
            {
                "rank": rank,
                "pid": pid,
                "state": now["state"] if now else "gone",
                "cpu": share(pid),
                "rss_bytes": now["rss_bytes"] if now else 0,
                "stack": seen[pid][0],
                "threads": seen[pid][1],
                "said": said,
                "silent_seconds": silent,
                "groups": groups_of(run_dir, rank, pid),
            }
        )
    ours = set(run_processes(run_dir)) | {os.getpid(), os.getppid()}
    busy = sorted(
        ((share(pid), one["name"], pid) for pid, one in after.items() if pid not in ours), reverse=True
    )
    module.exit_json(
        changed=False,
        diagnosis={
            "active": p["run"] in active_runs(ask, p["keeper"], p["state_dir"]),
            "status": status,
            "steps": [first.get("step"), status.get("step")],
            "age": time.time() - (status.get("updated") or 0),
            "seconds": seconds,
            "ranks": told,
            "interface": {"name": interface, **{key: received[key] - sent.get(key, 0) for key in received}},
            "kernel": kernel,
            "ras": watched,
            "flights": sorted(glob.glob(os.path.join(glob.escape(run_dir), "logs", "flight-*"))),
            "gpus": cards,
            "busy": [{"cpu": cpu, "name": name, "pid": pid} for cpu, name, pid in busy[:3] if cpu >= BUSY],
            "load": os.getloadavg()[0],
            "cpus": os.cpu_count() or 1,
        },
    )


if __name__ == "__main__":
    main()
