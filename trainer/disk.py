"""Directories that appear complete or not at all, also after a power cut, and files' hashes. No torch here."""

import hashlib
import os
from pathlib import Path


def sha256(file: Path) -> str:
    """A file's SHA-256, in hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def settle(path: Path) -> None:
    """Have the content of a file, or the names in a directory, safe on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, final: Path) -> None:
    """Give the directory `temporary`, once all below it is safe on disk, its name `final`, which must be free."""
    for folder, _, files in os.walk(temporary):
        for name in files:
            settle(Path(folder, name))
        settle(Path(folder))
    os.rename(temporary, final)
    settle(final.parent)
