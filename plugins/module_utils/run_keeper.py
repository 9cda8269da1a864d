"""What keeps a run on a host (systemd, Slurm, or a group of processes), asked by a shell command over a connection."""

from __future__ import annotations

import re
import shlex

from host_runs import HIDDEN, JOB, JOB_AT_WORK, JOB_QUESTION, JOB_SCRIPT, MOST, job_words, read_jobs

# How a line of launch.log begins: trainer/environment.py, Stamped.
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ")
# Where journald keeps what the system's own users say. journalctl shows who may not read it nothing, and no fault.
JOURNALS = "/var/log/journal/*/system.journal /run/log/journal/*/system.journal"
# Of a unit that has not run since the boot, or that it has unloaded, systemd shows the exit code 0, and this as 0, too.
RAN = "ExecMainExitTimestampMonotonic"
UNREAD = (
    "the user that Ansible logs in as may not read the journal. site.yml puts it into the group systemd-journal; that "
    "counts from its next login on"
)


def shown(name: str, most: int = MOST, skip: str = "0") -> str:
    """The shell command that shows at most so many bytes of a file of a run's directory, which is named for the shell.

    The directory is the service user's: no link is followed, no pipe is waited at, and no file fills our memory.
    """
    flags = "nofollow,nonblock,fullblock,skip_bytes,count_bytes"
    return f"dd if={name} iflag={flags} bs=65536 skip={skip} count={most} status=none 2>/dev/null"


def state_command(keeper: str, run: str, run_dir: str) -> str:
    """The shell command, in `run_dir`, that shows the run's ActiveState, Result and ExecMainStatus as systemd does."""
    if keeper == "systemd":
        unit = shlex.quote(f"trainyard@{run}.service")
        show = f"systemctl show {unit} --property=ActiveState,Result,ExecMainStatus,{RAN},Job"
        return f"if [ -e {JOB_SCRIPT} ]; then {_job_command(run)}; else {show}; fi"
    variable = shlex.quote(f"TRAINYARD_RUN_DIR={run_dir}")
    return (
        f"if grep -qszxF {variable} /proc/[0-9]*/environ; then echo ActiveState=active; "
        f"else echo ActiveState=inactive; echo ExecMainStatus=$({shown('exit', 16)}); fi"
    )


def journal_command(run: str, options: str, unread: str, journals: str = JOURNALS) -> str:
    """The shell command that shows what the run's launcher said to the journal; where that is closed, runs `unread`."""
    unit = shlex.quote(f"trainyard@{run}.service")
    return (
        f'may=; for journal in {journals}; do [ ! -r "$journal" ] || may=yes; done; if [ "$may" ]; then '
        f"journalctl --quiet --unit {unit} {options} 2>/dev/null; else {unread}; fi"
    )


def _job_command(run: str) -> str:
    """As above, of a run that Slurm keeps: it is active while Slurm holds the job, however this host's part ended.

    squeue may warn of something beside its answer. Where users see their own jobs alone, an empty one says nothing:
    then the job is there until the launcher has said how it ended.
    """
    name, exit_file = shlex.quote(JOB + run), shown("exit", 16)
    ask = f"{shlex.join(JOB_QUESTION)} --name={name} --user=$(stat -c %U .)"
    hidden = (
        '[ ! -e exit ] && [ "$(id -u)" != 0 ] && [ "$(id -un)" != "$(stat -c %U .)" ] && '
        "scontrol show config 2>/dev/null | grep -Eq '^PrivateData .*jobs'"
    )
    return (
        f"unknown='Job=|UNKNOWN|'{name}'|'; "
        f'if job=$({ask} 2>&1); then if row=$(echo "$job" | grep -F "|"{name}"|"); '
        'then echo ActiveState=active; echo "Job=$row"; '
        f'elif {hidden}; then echo ActiveState=active; echo "$unknown"{shlex.quote(HIDDEN)}; '
        f"else echo ActiveState=inactive; echo ExecMainStatus=$({exit_file}); fi; "
        'else echo ActiveState=active; echo "$unknown$(echo "$job" | tail -n 1)"; fi'
    )


def read_state(output: str) -> dict:
    """The answer to `state_command`, with `state`: active or ended, and `queued`: why Slurm lets it wait, or "".

    `waits`: systemd has yet to start the unit, as after a boot until the network is there; that is active. `forgotten`:
    it does not run, and systemd does not know how it ended, if it ever ran; ExecMainStatus is "" then.
    """
    found = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    job = next(iter(read_jobs(found.get("Job", "")).values()), None)
    queued = job_words(job) if job and job["state"] not in JOB_AT_WORK else ""
    rests = found.get("ActiveState") in ("inactive", "failed")
    waits = rests and found.get("Job", "").isdigit() and found["Job"] != "0"
    if rests and found.get(RAN) == "0":
        found["ExecMainStatus"] = ""
    forgotten = found.get("ActiveState") == "inactive" and found.get(RAN) == "0"
    state = "ended" if rests and not waits else "active"
    return {**found, "state": state, "queued": queued, "waits": waits, "forgotten": forgotten}
