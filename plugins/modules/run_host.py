#!/usr/bin/python
"""What one host says about itself before a run is planned on it. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_host
short_description: Gather what a run's plan needs to know of a host
description:
  - Reads, in one trip, the deployed release, the runs that are active, what else of ours is at work, the state of the
    named run, the GPUs, the interface that holds the cluster address, the holder of the master port and the free disk
    space.
  - Changes nothing.
options:
  run: {type: str, required: true, description: The run's name.}
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  opt_dir: {type: path, required: true, description: Where releases are deployed.}
  etc_dir: {type: path, required: true, description: "Where runs/RUN.yaml is kept."}
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  address: {type: str, required: true, description: The host's IPv4 address on the cluster network.}
  port: {type: int, required: true, description: The port that the run's master would listen on.}
  processes: {type: int, default: 0, description: Processes to start here; 0 means one a GPU, or one without.}
  paths: {type: list, elements: str, default: [], description: Paths whose presence is asked for.}
  brought: {type: list, elements: str, default: [], description: Paths below O(state_dir) of what is brought there.}
  sources:
    description: Paths of the controller; what lies at them here, on a disk of the network, gets a mark.
    type: list
    elements: str
    default: []
  slurm: {type: bool, default: false, description: "Whether Slurm is asked for its nodes, too."}
  user: {type: str, default: "", description: The service user.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Ask the host
  run_host:
    run: first
    keeper: systemd
    opt_dir: /opt/trainyard
    etc_dir: /etc/trainyard
    state_dir: /var/lib/trainyard
    address: 10.77.0.11
    port: 29500
"""

RETURN = r"""
host_facts:
  description: The answers; see docs/architecture.md, "A run's files".
  type: dict
  returned: always
"""

import contextlib
import glob
import os
import pwd
import shutil
import socket
import stat

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import (
    active_runs,
    environment_dir,
    free_bytes,
    interfaces,
    release,
    run_status,
    slurm_jobs,
    work_units,
)
from ansible.module_utils.installed_packages import installed_torch, installed_versions, versions_digest
from ansible.module_utils.same_files import shared_marks

SLURM = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
QUESTION = ("timeout", "20", "sinfo", "--all", "--Node", "--noheader", "--format=%N|%n|%o|%R|%G")
NODES = ("name", "hostname", "address", "partition", "gres")  # as sinfo is asked for them


def environment(opt_dir: str) -> dict[str, str] | None:
    """`torch` (its version and build) and `digest` (of all versions) of what is installed in the release's Python
    environment; None where nothing is.
    """
    path = environment_dir(opt_dir)
    versions = installed_versions(path) if path else {}
    return {"torch": installed_torch(path), "digest": versions_digest(versions)} if versions else None


def run_config(path: str) -> str | None:
    """The text of the run's configuration; None if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def port_holder(port: int) -> str | None:
    """Who listens on the TCP port, in words; None if it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no obstacle
        try:
            probe.bind(("", port))
            return None
        except OSError:
            pass
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        # Columns: local address (hex:hex), state 0A = listening, inode.
        inodes |= {r[9] for r in rows if r[3] == "0A" and int(r[1].rsplit(":", 1)[1], 16) == port}
    for descriptor in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            pid = descriptor.split("/")[2]
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().decode(errors="replace").split("\0")
            except OSError:
                words = []
            return f"process {pid} ({' '.join(words).strip()[:80] or 'unnamed'})"
    return "a process of another user"


def brought_bytes(state_dir: str, paths: list[str]) -> int:
    """Bytes that are here of files and directories `paths` below `state_dir`, in their place or as far as they came."""
    found = {}  # by file: one that waits for the next host has two names
    for path in paths:
        for top in (os.path.join(state_dir, path), os.path.join(state_dir, "incoming", path)):
            below = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
            for one in below or [top]:
                with contextlib.suppress(OSError):
                    seen = os.lstat(one)
                    found[seen.st_dev, seen.st_ino] = seen.st_size if stat.S_ISREG(seen.st_mode) else 0
    return sum(found.values())


def slurm(run_command, user: str) -> dict:
    """What Slurm says here: `lacking` (commands), `fault` (why it does not answer, or ""), `nodes` (NODES of each node
    in each partition); and of the host `hostname` and `uid` (the service user's, None without one).
    """
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        uid = None
    found = {"lacking": [name for name in SLURM if not shutil.which(name)], "fault": "", "nodes": []}
    if not found["lacking"]:
        rc, out, error = run_command(list(QUESTION))
        rows = [line.strip().split("|") for line in out.splitlines()]
        found["nodes"] = [dict(zip(NODES, row, strict=True)) for row in rows if len(row) == len(NODES)]
        if rc != 0:
            found["fault"] = ((error or out).strip().splitlines() or ["no word within 20 s"])[-1]
    return {**found, "hostname": socket.gethostname().split(".")[0], "uid": uid}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "str", "required": True},
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "opt_dir": {"type": "path", "required": True},
            "etc_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "processes": {"type": "int", "default": 0},
            "paths": {"type": "list", "elements": "str", "default": []},
            "brought": {"type": "list", "elements": "str", "default": []},
            "sources": {"type": "list", "elements": "str", "default": []},
            "slurm": {"type": "bool", "default": False},
            "user": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    if not 0 < p["port"] < 65536:
        module.fail_json(msg=f"trainer_port: found {p['port']}; expected 1024 to 65535. Correct it.")
    run_dir = os.path.join(p["state_dir"], "runs", p["run"])
    links = interfaces(module)
    status = run_status(run_dir)
    gpus = len(glob.glob("/proc/driver/nvidia/gpus/*"))
    jobs = slurm_jobs(module.run_command, p["state_dir"]) if p["keeper"] == "systemd" else {}
    module.exit_json(
        changed=False,
        host_facts={
            "release": release(p["opt_dir"]),
            "environment": environment(p["opt_dir"]),
            "active": active_runs(module.run_command, p["keeper"], p["state_dir"], jobs),
            "jobs": jobs,
            "at_work": work_units(module.run_command, p["keeper"]),
            "slurm": slurm(module.run_command, p["user"]) if p["slurm"] else None,
            "run_dir": run_dir,
            "run_status": status,
            "run_state": status and status["state"],
            "run_config": run_config(os.path.join(p["etc_dir"], "runs", p["run"] + ".yaml")),
            "address": p["address"],
            "interface": next((name for name, held in links.items() if p["address"] in held), None),
            "interfaces": links,
            "gpus": gpus,
            "processes": p["processes"] or gpus or 1,
            "port_holder": port_holder(p["port"]),
            "free_bytes": free_bytes(p["state_dir"]),
            "brought_bytes": brought_bytes(p["state_dir"], p["brought"]),
            "shared": shared_marks(p["sources"], p["user"]) if p["user"] else {},
            "missing_paths": [path for path in p["paths"] if not os.path.exists(path)],
        },
    )


if __name__ == "__main__":
    main()
