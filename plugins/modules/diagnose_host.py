#!/usr/bin/python
"""What one host's ranks of a run are doing, and what its machine says. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: diagnose_host
short_description: Gather what the ranks of a run on this host are doing
description:
  - Looks twice, O(seconds) apart, at every rank's process (state, time on the CPU, Python stack), at the run's status,
    and at the counters of the interface that holds the cluster address and of RDMA's ports; and once at the kernel's
    log and the GPUs.
  - Stacks are read by py-spy, which does not stop the process. Changes nothing.
  - What may hang (py-spy, the kernel's log, the GPUs, NCCL) is asked all at once; what has not answered within
    O(budget) is named in C(late), and the rest is there.
options:
  run: {type: str, default: "", description: "The run's name; else the one that is active here, or the newest here."}
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  opt_dir: {type: path, required: true, description: Where releases are deployed.}
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  address: {type: str, required: true, description: The host's IPv4 address on the cluster network.}
  seconds: {type: float, default: 2, description: Between the two looks.}
  budget: {type: float, default: 4, description: "For all of it, in seconds."}
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
host_status:
  description: C(time), C(active) and C(runs), as host_status has them.
  type: dict
  returned: always
diagnosis:
  description: >-
    C(run) (which was looked at; "" where none is known, or several are active and none was named), C(late) (what had no
    answer), C(budget), C(active), C(status) (status.json), C(steps) (before and after), C(age) (s since status.json was
    written), C(seconds) (between the looks), C(ranks) (each with rank, pid, state, cpu (of a core), rss_bytes, stack
    (frames, innermost first), threads (those of others, by name), said (the log's last line), silent_seconds, groups
    (of trainer/collectives.py)), C(interface) (name, and what its counters grew by), C(rdma) (of each port the same,
    and its state), C(kernel) (lines), C(ras) (lines of NCCL's RAS), C(flights) (dumps of torch's flight recorder),
    C(gpus), C(busy) (other processes that took the CPU), C(load), C(cpus).
  type: dict
  returned: always
"""

import contextlib
import glob
import json
import os
import re
import socket
import sys
import threading
import time
from functools import partial

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import (
    NO_ANSWER,
    cards,
    chosen_run,
    environment_dir,
    gpus,
    interfaces,
    known_runs,
    opened,
    run_processes,
    run_status,
    within,
)
from ansible.module_utils.rdma_ports import rdma_counters, rdma_ports

COUNTERS = tuple(
    f"{way}_{what}" for what in ("bytes", "packets", "errors", "dropped") for way in ("rx", "tx")
)
# What the kernel says of memory, disks and GPUs that explains a run that does not go on; of each boot it says more.
TELLING = re.compile(
    r"oom-kill|Out of memory|I/O error|blocked for more than|NVRM: Xid|Hardware Error|EXT4-fs error"
    r"|nfs: server .* not responding|soft lockup|temperature above threshold|critical temperature",
    re.IGNORECASE,
)
LINK = re.compile(r"kernel: (.*?)(?:NIC )?(?<!SATA )\blink (?:is )?(up|down)\b", re.IGNORECASE)
KERNEL_LINES = 10
# nvidia-smi -q -d PERFORMANCE: HW Thermal Slowdown : Active
SLOWED = re.compile(r"^\s+((?:HW|SW) [\w ]*Slowdown)\s*: Active", re.MULTILINE)
RAS = "127.0.0.1:28028"  # where NCCL answers on each host of a run unless NCCL_RAS_ADDR says otherwise
RAS_BYTES = 1 << 20
GROUPS_BYTES = 1 << 20  # of what a rank writes, read at most
WATCHES = (
    "collectives",
    "log",
)  # threads of each rank that only look (trainer/collectives.py, environment.py)
BUSY = 0.3  # of a core, for a process that is named
OF_KERNEL = 0x00200000  # PF_KTHREAD (linux/sched.h), in a process's flags: nobody can end it


def process(pid: int) -> dict | None:
    """state, ticks on the CPU, memory and name of a process, and whether it is the kernel's own; None without one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(") ")
    except OSError:
        return None
    fields = rest.split()
    return {
        "name": head.split("(", 1)[1],
        "state": fields[0],
        "of_kernel": bool(int(fields[6]) & OF_KERNEL),
        "ticks": int(fields[11]) + int(fields[12]),
        "rss_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    }


def environment_of(pid: int) -> dict[bytes, bytes]:
    """The environment that a process began with. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(one.partition(b"=")[::2] for one in file.read().split(b"\0"))


def ras_place(pids) -> tuple[str, int]:
    """Where the NCCL of these ranks answers: each run has a port of its own (trainer/cluster/attempt.py)."""
    told = ""
    for pid in pids:
        with contextlib.suppress(OSError):
            told = told or environment_of(pid).get(b"NCCL_RAS_ADDR", b"").decode(errors="replace")
    host, _, port = (told if re.fullmatch(r"[^:]+:\d+", told) else RAS).partition(":")
    return host, int(port)


def rank_of(pid: int) -> int | None:
    """The rank that a process is, by its environment and its command; None if it is none."""
    try:
        environment = environment_of(pid)
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    # The ranks' own children (compilers, loaders) have their environment, too.
    if not environment.get(b"RANK", b"").isdigit() or b"train" not in words:
        return None
    return int(environment[b"RANK"])


def stacks(spy: str, pid: int, seconds: float) -> tuple[list[str], dict[str, list[str]]] | None:
    """The main thread's Python frames, innermost first, as "function (file:line)"; and by their names those of other
    threads that are at the trainer's work, as saving is. Empty where they cannot be read; None where that takes longer.
    """
    if not os.access(spy, os.X_OK):
        return [], {}
    rc, out, _ = within(seconds, [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)])
    if rc == NO_ANSWER:
        return None
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
    others = [one for number, one in enumerate(found) if number != main and one[0] not in WATCHES]
    at_work = {name: frames for name, frames in others if any("(trainer/" in frame for frame in frames)}
    return (found[main][1] if found else []), at_work


def last_words(path: str) -> tuple[str, float | None]:
    """A log's last line, and the seconds since it was written."""
    try:
        with opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read(4096).decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else ""), time.time() - os.path.getmtime(path)
    except OSError:
        return "", None


def groups_of(run_dir: str, rank: int, pid: int) -> list[dict]:
    """What the rank itself has written of its groups (trainer/collectives.py); empty where it has not."""
    try:
        path = os.path.join(run_dir, "logs", f"collectives-{rank}.json")
        with opened(path) as file:
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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


def link_speed(interface: str | None) -> int | None:
    """The interface's speed in Mbit/s, where it says one."""
    try:
        with open(f"/sys/class/net/{interface}/speed", encoding="ascii") as file:
            speed = int(file.read())
    except (OSError, ValueError):  # EINVAL of one that is down
        return None
    return speed if speed > 0 else None


def grown(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What counters grew by; not of one that was not there before, or began anew."""
    return {
        name: after[name] - before[name] for name in after if after[name] >= before.get(name, sys.maxsize)
    }


def processes() -> dict[int, dict]:
    """Every process of the machine, by pid."""
    pids = [int(path[6:]) for path in glob.glob("/proc/[0-9]*")]
    found = {pid: process(pid) for pid in pids}
    return {pid: one for pid, one in found.items() if one}


def kernel_lines(seconds: float) -> list[str] | None:
    """What the kernel said in the last hour that may explain something; None where that takes longer."""
    words = ["journalctl", "-k", "--quiet", "--since=-1h", "--lines=2000", "--output=short-iso"]
    rc, out, _ = within(seconds, words)
    if rc == NO_ANSWER:
        return None
    return telling(out.splitlines())[-KERNEL_LINES:]


def telling(lines: list[str]) -> list[str]:
    """Those of the kernel's lines that may explain something: not that a link went down which came up again."""
    found, down = [], {}
    for line in lines:
        link = LINK.search(line)
        if link:
            if earlier := down.pop(link[1], None):
                found.remove(earlier)
            if link[2].lower() == "down":
                down[link[1]] = line
        if (link and link[2].lower() == "down") or TELLING.search(line):
            found.append(line)
    return found


def ras(seconds: float, place: tuple[str, int]) -> list[str] | None:
    """What NCCL's own watch says of all ranks, line by line; empty where NCCL is older than 2.24; None without a word.

    It asks all ranks, and is told to wait for those that are silent a second less than there is.
    """
    text, end = b"", time.monotonic() + seconds
    try:
        with socket.create_connection(place, timeout=0.5) as connection:
            connection.sendall(f"timeout {max(1, int(seconds) - 1)}\nverbose status\n".encode())
            while len(text) < RAS_BYTES:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (more := connection.recv(65536)):
                    break
                text += more
    except OSError:
        pass
    return None if not text and time.monotonic() >= end else text.decode(errors="replace").splitlines()


def slowed(seconds: float) -> list[str]:
    """Why cards are slower than they could be: heat, the power supply; by nvidia-smi's own words."""
    status, out, _ = within(seconds, ["nvidia-smi", "-q", "-d", "PERFORMANCE"])
    return list(dict.fromkeys(SLOWED.findall(out))) if status == 0 else []


def others_on_cards(seconds: float) -> list[dict]:
    """[{pid, name, memory}], the programs that compute on cards."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    status, out, _ = within(seconds, query)
    rows = [[value.strip() for value in line.split(",")] for line in out.splitlines()] if status == 0 else []
    return [
        {"pid": int(pid), "name": os.path.basename(name), "memory": memory}
        for pid, name, memory in (row for row in rows if len(row) == 3 and row[0].isdigit())
    ]


def at_once(looks: dict, seconds: float) -> dict:
    """What each of `looks` finds, all side by side, by its key; None of one that takes longer than `seconds`."""
    found, faults = dict.fromkeys(looks), []

    def look(key) -> None:
        try:
            found[key] = looks[key]()
        except Exception as fault:
            faults.append(fault)

    # A thread that hangs must not keep the module from its end.
    threads = [threading.Thread(target=look, args=(key,), daemon=True) for key in looks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if faults:
        raise faults[0]
    return dict(found)


def chosen(known: dict, asked: str) -> str:
    """The run to look at, of this host's alone."""
    runs, active = known["runs"], known["active"]
    newest = sorted(runs, key=lambda run: -(runs[run].get("updated") or 0))
    return chosen_run(asked, active, list(dict.fromkeys([*active, *newest])))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "str", "default": ""},
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "opt_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "address": {"type": "str", "required": True},
            "seconds": {"type": "float", "default": 2},
            "budget": {"type": "float", "default": 4},
        },
        supports_check_mode=True,
    )
    p, end = module.params, time.monotonic() + module.params["budget"]
    try:
        known = known_runs(module.run_command, p["keeper"], p["state_dir"], p["budget"] / 2)
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror} for the user that looks at runs")
    run = chosen(known, p["run"])
    run_dir = os.path.join(p["state_dir"], "runs", run)
    ranks = {pid: rank_of(pid) for pid in (run_processes(run_dir) if run else ())}
    ranks = {pid: rank for pid, rank in ranks.items() if rank is not None}
    interface = next((name for name, held in interfaces(module).items() if p["address"] in held), None)
    spy = os.path.join(environment_dir(p["opt_dir"]), "bin", "py-spy")

    begin, before, sent, rdma = time.monotonic(), processes(), counters(interface), rdma_counters()
    first = (run_status(run_dir) if run else None) or {}
    left = max(0.5, end - time.monotonic())
    looks = {pid: partial(stacks, spy, pid, left) for pid in ranks}
    looks |= {"the kernel's log": partial(kernel_lines, left), "the GPUs": partial(gpus, left)}
    if cards():
        looks |= {"slowed": partial(slowed, left), "who is on the GPUs": partial(others_on_cards, left)}
    if ranks and cards():
        looks["NCCL's own watch"] = partial(ras, left, ras_place(ranks))
    seen = at_once(looks, left + 0.2)  # each ends by itself, and what it has started with it
    late = [f"rank {ranks[key]}'s stack" if key in ranks else key for key in looks if seen[key] is None]
    time.sleep(max(0.0, p["seconds"] - (time.monotonic() - begin)))
    after, received, rdma_after = processes(), counters(interface), rdma_counters()
    status = (run_status(run_dir) if run else None) or {}
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
        stack, threads = seen[pid] or ([], {})
        told.append(
            {
                "rank": rank,
                "pid": pid,
                "state": now["state"] if now else "gone",
                "cpu": share(pid),
                "rss_bytes": now["rss_bytes"] if now else 0,
                "stack": stack,
                "threads": threads,
                "said": said,
                "silent_seconds": silent,
                "groups": groups_of(run_dir, rank, pid),
            }
        )
    places = run_processes()
    # By its name: where the nodes are one machine, each has a directory of its own.
    ours = {pid for pid, place in places.items() if run and os.path.basename(place) == run}
    ours |= {os.getpid(), os.getppid()}
    # Another run's are told by its name: who ends a rank of it sees it come back.
    runs = {pid: os.path.basename(place) for pid, place in places.items() if pid not in ours}
    others = [pid for pid, one in after.items() if pid not in ours and not one["of_kernel"]]
    busy = sorted(((share(pid), after[pid]["name"], pid) for pid in others), reverse=True)
    module.exit_json(
        changed=False,
        host_status=known,
        diagnosis={
            "run": run,
            "late": sorted(late),
            "budget": p["budget"],
            "active": run in known["active"],
            "status": status,
            "steps": [first.get("step"), status.get("step")],
            "age": time.time() - (status.get("updated") or 0),
            "seconds": seconds,
            "ranks": told,
            "interface": {
                "name": interface,
                "speed": link_speed(interface),
                **grown(received, sent),
            },
            "rdma": [
                {"name": name, "state": state, **grown(rdma_after.get(name, {}), rdma.get(name, {}))}
                for name, state in (
                    (f"{one['device']} port {one['port']}", one["state"]) for one in rdma_ports()
                )
            ],
            "kernel": seen["the kernel's log"] or [],
            "ras": seen.get("NCCL's own watch") or [],
            "flights": sorted(glob.glob(os.path.join(glob.escape(run_dir), "logs", "flight-*"))),
            "gpus": seen["the GPUs"] or [],
            "slowed": seen.get("slowed") or [],
            "on_cards": [
                {**one, "run": runs.get(one["pid"], "")}
                for one in seen.get("who is on the GPUs") or []
                if one["pid"] not in ours
            ],
            "busy": [
                {"cpu": cpu, "name": name, "pid": pid, "run": runs.get(pid, "")}
                for cpu, name, pid in busy[:3]
                if cpu >= BUSY
            ],
            "load": os.getloadavg()[0],
            "cpus": os.cpu_count() or 1,
        },
    )


if __name__ == "__main__":
    main()
