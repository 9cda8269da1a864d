"""The processes of a run on a host without systemd, found by their environment.

torchrun starts every rank in a session of its own, so neither a pid file nor a process group holds the whole
run. What all of them inherit is TRAINYARD_RUN_DIR: it serves as the control group that systemd would give.
"""

from __future__ import annotations

import os

VARIABLE = "TRAINYARD_RUN_DIR"


def run_processes(run_dir: str | None = None) -> dict[int, str]:
    """Live processes of this user that belong to a run, as {pid: run directory}; of one run if `run_dir` is
    given.

    A process that ended and was not waited for has an empty environment, so it does not count.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # another user's, or gone since the listing
            continue
        for entry in environment.split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key == VARIABLE.encode():
                directory = os.fsdecode(value)
                if run_dir is None or directory == run_dir:
                    found[int(name)] = directory
    return found
