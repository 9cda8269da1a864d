#!/usr/bin/python
"""Submits the job that keeps a run under Slurm, or stops it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slurm_job
short_description: Submit a run's job to Slurm, or stop it
description:
  - Submits the script job.sbatch of the run's directory as the service user, unless Slurm holds such a job.
  - Stops the run as the command C(trainer stop) does, by a file that its ranks see. A job that has not begun is
    cancelled, and so is one that has not ended after O(patience) seconds.
options:
  state: {type: str, choices: [submitted, stopped], default: submitted, description: Whether Slurm shall hold the job.}
  run: {type: str, required: true, description: The run's name.}
  state_dir: {type: path, required: true, description: "Where runs/RUN lies."}
  user: {type: str, required: true, description: The service user.}
  patience: {type: int, default: 120, description: Seconds that the ranks have to save and end.}
attributes:
  check_mode: {support: full, description: Says what would change.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Submit the run's job
  slurm_job:
    run: first
    state_dir: /var/lib/trainyard
    user: trainyard
"""

RETURN = r"""
job: {description: "Slurm's number of the job; empty where it holds none.", type: str, returned: always}
"""

import json
import os
import re
import time

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import ENDED, JOB_AT_WORK, JOB_SCRIPT, run_status, slurm_jobs

LOOK = 2.0  # seconds between two looks at the queue
# What sbatch says where the user lacks an account, a quality of service, or the right to a partition.
RIGHTS = re.compile(r"account|qos|policy|permi(tted|ssion)|user id", re.IGNORECASE)
KILLED = 60.0  # seconds that Slurm has to end what was cancelled: its own KillWait is 30


def as_user(user: str, *command: str) -> list[str]:
    """The command line that runs `command` as the user, with nothing in the environment that a job would inherit."""
    kept = [f"{name}={os.environ[name]}" for name in ("PATH", "SLURM_CONF") if name in os.environ]
    return ["runuser", "-u", user, "--", "env", "-i", *kept, *command]


def told(text: str) -> str:
    """What a command of Slurm's said, each line once."""
    lines = [
        line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in text.strip().splitlines()
    ]
    return "; ".join(dict.fromkeys(filter(None, lines)))


def submit(module: AnsibleModule) -> str:
    """The number of the new job; ends the module where Slurm refuses it."""
    p = module.params
    script = os.path.join(p["state_dir"], "runs", p["run"], JOB_SCRIPT)
    rc, out, error = module.run_command(as_user(p["user"], "sbatch", "--parsable", script))
    if rc != 0:
        said = told(error or out)
        user = ""
        if RIGHTS.search(said):
            user = (
                f" Slurm knows the run as the user {p['user']}: where it keeps accounts, that one must be in one "
                f"(sacctmgr add user {p['user']} account=NAME), known by the same "
                "number where slurmctld is, and in a group that the partition lets in."
            )
        module.fail_json(
            msg=f"Slurm refused the job of run {p['run']}: {said}. Correct trainer_slurm_partition, "
            f"trainer_slurm_account or trainer_slurm_options, and start the run again.{user}"
        )
    return out.strip().split(";")[0]


def stop(module: AnsibleModule, job: dict[str, str]) -> None:
    """Ask the run to end, and wait until Slurm holds its job no more; cancel what has not begun, or does not end."""
    p = module.params
    run_dir = os.path.join(p["state_dir"], "runs", p["run"])
    begin, cancelled = time.monotonic(), False
    while job and time.monotonic() - begin < p["patience"] + KILLED:
        waits = job["state"] not in JOB_AT_WORK
        if not cancelled and (waits or time.monotonic() - begin > p["patience"]):
            module.run_command(as_user(p["user"], "scancel", job["id"]))  # another host may have been first
            cancelled = True
        elif not cancelled:
            # Again and again: a launcher that begins takes an older word for an earlier one's.
            with acting_as(p["user"]), open(os.path.join(run_dir, "stop"), "a", encoding="ascii"):
                pass
        time.sleep(LOOK)
        job = slurm_jobs(module.run_command, p["state_dir"]).get(p["run"])
    if job:
        module.fail_json(
            msg=f"Slurm still holds the job {job['id']} of run {p['run']}. See scontrol show job {job['id']}"
        )
    note_end(p["user"], run_dir)


def left(run: str, state_dir: str) -> bool:
    """Whether a run that Slurm holds no more has not said here how it ended."""
    run_dir = os.path.join(state_dir, "runs", run)
    state = (run_status(run_dir) or {}).get("state")
    if os.path.exists(os.path.join(run_dir, "exit")):  # its launcher has
        return False
    return os.path.exists(os.path.join(run_dir, JOB_SCRIPT)) and state not in ENDED


def note_end(user: str, run_dir: str) -> None:
    """Have the last word of a run whose launcher could not: its job was cancelled before it began."""
    status = run_status(run_dir) or {}
    if status.get("state") in ENDED:
        return
    status = {**status, "state": "stopped", "reason": "stopped on request while Slurm had not started it"}
    with acting_as(user):
        for name, text in (("status.json", json.dumps(status) + "\n"), ("exit", "75\n")):
            with open(os.path.join(run_dir, f".{name}"), "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(os.path.join(run_dir, f".{name}"), os.path.join(run_dir, name))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["submitted", "stopped"], "default": "submitted"},
            "run": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "patience": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    p = module.params
    job = slurm_jobs(module.run_command, p["state_dir"]).get(p["run"], {})
    number = job.get("id", "")
    if job.get("state") == "UNKNOWN":
        module.fail_json(
            msg=f"Slurm does not answer ({job['reason']}), so that nobody knows whether run {p['run']} has a job. "
            "See to slurmctld and munge (systemctl status slurmctld munge), and try again."
        )
    changed = bool(job) == (p["state"] == "stopped")
    if p["state"] == "stopped" and not job and left(p["run"], p["state_dir"]):
        # Another host cancelled it before this one looked.
        if not module.check_mode:
            note_end(p["user"], os.path.join(p["state_dir"], "runs", p["run"]))
        module.exit_json(changed=True, job="")
    if changed and not module.check_mode:
        if p["state"] == "submitted":
            number = submit(module)
        else:
            stop(module, job)
            number = ""
    module.exit_json(changed=changed, job=number)


if __name__ == "__main__":
    main()
