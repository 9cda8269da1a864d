"""Directories that appear complete or not at all, also after a power cut, files on a disk that somebody fills, hashes.

No torch here.
"""

import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: Exception) -> bool:
    """Whether it says that a disk, or a user's part of it, has no room left."""
    return getattr(error, "errno", None) in FULL


class Growing(io.RawIOBase):
    """A file that is written to at its end. What a full disk does not take is kept, and comes before what comes later.

    So the words of a process never end it. Other failures of a disk are raised, as everywhere.
    """

    def __init__(self, file: io.FileIO):
        """`file` is opened to append."""
        self._file, self._held = file, bytearray()
        self._lock = threading.RLock()  # a sink's and a save's thread have their say, too

    @property
    def held(self) -> int:
        """Bytes that the disk has not taken yet."""
        return len(self._held)

    def lines(self) -> Iterator[bytes]:
        """What has been written, with what is yet held; each line with its end, if it has one."""
        last = b""
        with open(self._file.name, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
                else:
                    last = line
        yield from io.BytesIO(last + self._held)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, data) -> int:
        """Take all of `data` (bytes); returns its length."""
        with self._lock:
            self._held += data
            try:
                while self._held:
                    del self._held[: self._file.write(self._held)]
            except OSError as error:
                if not is_full(error):
                    raise
        return len(data)

    def flush(self) -> None:
        """Try again to write what is held."""
        if not self.closed:
            self.write(b"")

    def truncate(self, size: int) -> int:
        """Forget all but the first `size` bytes of what has been written and what is held."""
        with self._lock:
            there = os.fstat(self.fileno()).st_size
            if size < there:
                self._file.truncate(size)
            del self._held[max(0, size - there) :]
        return size


def overwrite(file: Path, text: str) -> bool:
    """Write `text` where the content of `file` lies, if that has the room: on a full disk there is no other place.

    A power cut, or a reader at just this moment, may find a part. Returns whether it was done.
    """
    data = text.encode()
    try:
        with open(file, "r+b", buffering=0) as handle:
            if os.fstat(handle.fileno()).st_blocks * 512 < len(
                data
            ):  # the unit of st_blocks, whatever the disk's is
                return False
            handle.write(data)
            handle.truncate()
    except FileNotFoundError:
        return False
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


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
