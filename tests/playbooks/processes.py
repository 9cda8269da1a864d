"""Ansible's processes, as a kill meets them. For the lab's tests, too."""

import contextlib
import os
import signal
from pathlib import Path


def descendants(pid):
    """Pids of all children of `pid`, and theirs."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = stat.read_text().partition(" (")
            children.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(number))
    found = children.get(pid, [])
    return found + [below for child in found for below in descendants(child)]


def kill_all(process):
    """kill -9 `process` and its children, which have sessions of their own; the runs that they started go on."""
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
