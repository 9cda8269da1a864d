"""Run the system's tools, and say plainly what failed."""

import contextlib
import ctypes
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

CLONE_NEWNET = 0x40000000


class LabError(Exception):
    """What a user must know or do; printed as it stands, exit status 2."""


def run(*argv: str | Path, stdin: str | None = None, check: bool = True) -> str:
    """Run a tool to its end and return its standard output. Raises LabError with the tool's own words."""
    done = subprocess.run([str(a) for a in argv], input=stdin, capture_output=True, text=True)
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise LabError(f"{' '.join(map(str, argv))}: exit status {done.returncode}: {said}")
    return done.stdout


def wait_until(true: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Ask again and again; False when it did not come true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold a lock that the kernel frees when the process ends, however it ends. The file goes with the block."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("w")
        except FileNotFoundError:  # the last holder has just removed the directory
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(waiting, flush=True)
                waiting = ""
            fcntl.flock(file, fcntl.LOCK_EX)
        if _same_file(file, path):
            break
        file.close()  # the last holder removed it while this one waited: the lock is on a new file now
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else is in it
                path.parent.rmdir()


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def inside_netns(name: str) -> Iterator[None]:
    """This thread's sockets belong to the network namespace NAME until the block ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")

    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        enter(there)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(there)
        os.close(home)
