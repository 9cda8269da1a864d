#!/usr/bin/python
"""How one host and its runs are. Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_status
short_description: Gather how a host is and how its runs are
description:
  - Reads, in one trip, every run's status.json, which runs are active, load, memory, disk and GPUs.
  - A run that Slurm keeps has besides, as C(job), how Slurm's job is, and the state C(queued) until that begins.
  - Changes nothing, and asks nothing that could hang.
options:
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  opt_dir: {type: path, required: true, description: Where releases are deployed.}
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: See how the host is
  host_status:
    keeper: systemd
    opt_dir: /opt/trainyard
    state_dir: /var/lib/trainyard
"""

RETURN = r"""
host_status:
  description: >-
    C(time) (s since the epoch), C(release), C(active) (names of runs), C(runs) ({name: status.json}), C(load) (of one
    minute), C(cpus), C(memory_bytes) and C(memory_free_bytes), C(free_bytes) below O(state_dir), C(gpus).
  type: dict
  returned: always
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import (
    JOB_AT_WORK,
    active_runs,
    free_bytes,
    gpus,
    job_words,
    release,
    run_status,
    slurm_jobs,
)


def memory() -> tuple[int, int]:
    """Bytes of memory there are, and that may be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))


def runs(state_dir: str) -> dict[str, dict]:
    """Every run's status, by name. Raises OSError."""
    try:
        names = sorted(os.listdir(os.path.join(state_dir, "runs")))
    except FileNotFoundError:
        return {}
    found = {name: run_status(os.path.join(state_dir, "runs", name)) for name in names}
    return {name: status for name, status in found.items() if status}


def with_job(status: dict, job: dict[str, str]) -> dict:
    """A run's status with what Slurm says of its job."""
    waits = {} if job["state"] in JOB_AT_WORK else {"state": "queued", "reason": None}
    return {**status, **waits, "job": job_words(job)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "opt_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    total, free = memory()
    try:
        found = runs(p["state_dir"])
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user that Ansible logs in as. site.yml puts it "
            "into the group of trainer_user; that counts from its next login on."
        )
    jobs = slurm_jobs(module.run_command, p["state_dir"]) if p["keeper"] == "systemd" else {}
    module.exit_json(
        changed=False,
        host_status={
            "time": time.time(),
            "release": release(p["opt_dir"]),
            "active": active_runs(module.run_command, p["keeper"], p["state_dir"], jobs),
            "runs": {
                **found,
                **{run: with_job(found[run], job) for run, job in jobs.items() if run in found},
            },
            "load": os.getloadavg()[0],
            "cpus": os.cpu_count() or 1,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "free_bytes": free_bytes(p["state_dir"]),
            "gpus": gpus(module.run_command),
        },
    )


if __name__ == "__main__":
    main()
