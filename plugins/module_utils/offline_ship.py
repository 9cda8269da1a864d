"""Bring files from the controller to a host's directory, through the connection that Ansible has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def shipped(action, paths: list[Path]) -> Iterator[str]:
    """Send files to a new directory of the login user on the host; yields it, and removes it at the end."""
    remote = action._make_tmp_path()
    try:
        for path in paths:
            action._connection.put_file(str(path), action._connection._shell.join_path(remote, path.name))
        yield remote
    finally:
        action._remove_tmp_path(remote, force=True)


def in_batches(paths: list[Path], size: int) -> Iterator[list[Path]]:
    """Files in groups of at most `size` bytes, or one file; a transfer that is cut off loses one group."""
    batch: list[Path] = []
    total = 0
    for path in paths:
        length = path.stat().st_size
        if batch and total + length > size:
            yield batch
            batch, total = [], 0
        batch.append(path)
        total += length
    if batch:
        yield batch
