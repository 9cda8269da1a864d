"""Bring files from the controller to a host, through the connection that Ansible has."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def shipped(action, paths: list[Path], scratch: Path) -> Iterator[str]:
    """Send files as one archive to the action's host, for the login user alone; yields its path, removes it at the end.

    One archive, because a transfer of its own for each of fifty files takes longer than what is in them. It is packed
    in `scratch`, a directory on the controller.
    """
    remote = action._make_tmp_path()
    target = action._connection._shell.join_path(remote, "files.tar")
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            packed = Path(directory) / "files.tar"
            with tarfile.open(packed, "w") as archive:
                for path in paths:
                    archive.add(path, arcname=path.name, recursive=False)
            action._connection.put_file(str(packed), target)
        yield target
    finally:
        action._remove_tmp_path(remote, force=True)
