"""Where a file of the controller grows until it is whole, beside its place: one of each process that brings it.

Two may bring the same run at once. What one that was killed has left is removed by whoever brings that file next.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

ABANDONED = (
    86400.0  # seconds without a byte, after which another machine's, on a disk of the network, is nobody's
)


def beside(path: str) -> str:
    """Where `path` grows for this process."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{os.uname().nodename}-{os.getpid()}.part")


def sweep(path: str) -> None:
    """Remove what processes that are gone have left of `path`."""
    folder, name = os.path.split(path)
    left = re.compile(rf"\.{re.escape(name)}(?:\.(.+)-(\d+))?\.part")  # without: of a release before
    with contextlib.suppress(
        OSError
    ):  # what another one removes meanwhile, and a folder that is not there yet
        for entry in os.scandir(folder or "."):
            if (found := left.fullmatch(entry.name)) and _gone(entry, *found.groups()):
                os.unlink(entry.path)


def _gone(entry: os.DirEntry, host: str | None, pid: str | None) -> bool:
    if host != os.uname().nodename:
        return entry.stat().st_mtime < time.time() - ABANDONED
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's
        return False
    return False
