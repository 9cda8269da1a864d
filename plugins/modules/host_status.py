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
    minute), C(cpus), C(memory_bytes) and C(memory_free_bytes), C(free_bytes) below O(state_dir), C(gpus)
    (null where nvidia-smi gives no answer).
  type: dict
  returned: always
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import free_bytes, gpus, known_runs, release


def memory() -> tuple[int, int]:
    """Bytes of memory there are, and that may be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))


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
        known = known_runs(module.run_command, p["keeper"], p["state_dir"])
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user that Ansible logs in as. site.yml puts it "
            "into the group of trainer_user; that counts from its next login on."
        )
    module.exit_json(
        changed=False,
        host_status={
            **known,
            "release": release(p["opt_dir"]),
            "load": os.getloadavg()[0],
            "cpus": os.cpu_count() or 1,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "free_bytes": free_bytes(p["state_dir"]),
            "gpus": gpus(),
        },
    )


if __name__ == "__main__":
    main()
