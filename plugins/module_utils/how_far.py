"""How far a module's long command is, on a host: read off what apt, pip and DKMS show, and left in a small file.

The controller reads that file now and then (meanwhile.py). Nothing here may fail a command: what is not understood
is not told.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable
from urllib.parse import unquote

PACKAGES = "/run/trainyard-packages"  # where the modules that are root's leave their word
BRINGING = "/run/trainyard-bring"  # where bring_host does
ENVIRONMENT = ".progress"  # where python_env does, in its directory
DKMS = "/var/lib/dkms"
LOOK = 1.0  # seconds
LARGE = 20e6  # bytes of a file whose own share is told
UNITS = {"bytes": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class Note:
    """The file in which a module says what it does now, as one line that everybody may read; "" is no file.

    Its directory must be one in which nobody else can write.
    """

    def __init__(self, path: str = "") -> None:
        self.path, self.said = path, ""

    def say(self, words: str) -> None:
        if not self.path or not words or words == self.said:
            return
        with contextlib.suppress(OSError):  # a full disk, say
            new = f"{self.path}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            with open(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8"
            ) as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(words)
            os.rename(new, self.path)
            self.said = words

    def close(self) -> None:
        for path in (self.path, f"{self.path}.new") if self.path else ():
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.said = ""


def followed(
    process: subprocess.Popen, hear: Callable[[str], None], look: Callable[[], None], more: Iterable[int] = ()
) -> tuple[int, str]:
    """(exit status, all that it printed) of a process whose standard output is a pipe.

    hear: gets each line of that and of `more`, descriptors of other pipes from it; look: called each second.
    """
    printed = process.stdout.fileno()
    rests = dict.fromkeys((printed, *more), b"")
    output, looked = [], time.monotonic()
    with selectors.DefaultSelector() as selector:
        for one in rests:
            os.set_blocking(one, False)
            selector.register(one, selectors.EVENT_READ)
        over = False
        while not over:
            # A daemon that it has started may hold its pipes for ever: what matters is that the process has ended.
            over = process.poll() is not None
            ready = [key.fd for key, _ in selector.select(0 if over else LOOK)]
            for one in ready:
                while piece := _read(one):
                    if one == printed:
                        output.append(piece)
                    *lines, rests[one] = (rests[one] + piece).replace(b"\r", b"\n").split(b"\n")
                    for line in lines:
                        hear(line.decode(errors="replace"))
                    over = False
                if piece == b"":
                    selector.unregister(one)
            if not over and not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
            if time.monotonic() - looked >= LOOK:
                looked = time.monotonic()
                look()
    return process.returncode, b"".join(output).decode(errors="replace").replace("\r\n", "\n")


def _read(descriptor: int) -> bytes | None:
    """What is there; empty at its end, None where nothing is there yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def size(number: str, unit: str) -> float:
    """Bytes of a size in apt's words or pip's."""
    return float(number.replace(",", "")) * UNITS[unit]


def share(done: float, total: float) -> str:
    """Bytes of bytes, as the controller makes a bar of them (live_frame.share)."""
    return f"{min(done, total) / 1e6:,.0f} of {total / 1e6:,.0f} MB"


class Counted:
    """Bytes that come, of `total`, in a note; `here` are there before."""

    def __init__(self, note: Note, here: int, total: int) -> None:
        self.note, self.here, self.total, self.told = note, here, total, -LOOK

    def came(self, count: int) -> None:
        """So many more are here."""
        self.here += count
        if time.monotonic() - self.told >= LOOK:
            self.told = time.monotonic()
            self.note.say(f"{share(self.here, self.total)} have come")


class Apt:
    """What one apt-get does, by its output and by the lines that it writes to APT::Status-Fd."""

    NEED = re.compile(r"Need to get ([\d.,]+) ([kMG]?B)[ /]")
    WAITS = re.compile(r"Waiting for cache lock: .*held by process (\d+ \([^)]*\))")

    def __init__(self, first: str, dkms: str = DKMS) -> None:
        self.words, self.dkms = first, dkms
        self.total, self.began = 0.0, time.time()

    def hear(self, line: str) -> None:
        kind, *rest = line.split(":", 3)
        if need := self.NEED.match(line):
            self.total = size(*need.groups())
        elif waits := self.WAITS.search(line):
            self.words = f"waiting for process {waits[1]}, which holds apt's lock"
        elif kind in ("dlstatus", "pmstatus") and len(rest) == 3:
            with contextlib.suppress(ValueError):
                percent = float(rest[1])
                if kind == "pmstatus":
                    self.words = f"{percent:.0f} %, {rest[2][:1].lower()}{rest[2][1:]}"
                elif self.total:
                    self.words = f"downloading, {share(self.total * percent / 100, self.total)}"

    def now(self) -> str:
        """What it does; of a package that has DKMS compile, what that does."""
        return compiling(self.dkms, self.began) or self.words


def compiling(root: str, since: float) -> str:
    """What DKMS compiles below `root`; empty where it does not. since: an older build is one that failed (time.time).

    Each file of C in a build becomes an object beside it, but those that the kernel's make writes itself.
    """
    for log in glob.glob(f"{glob.escape(root)}/*/*/build/make.log"):
        with contextlib.suppress(OSError):
            if os.stat(log).st_mtime < since - 1:  # a file's clock ticks seldom
                continue
            build = os.path.dirname(log)
            made = wanted = 0
            for _, _, files in os.walk(build):
                there = set(files)
                sources = [name for name in files if name.endswith(".c") and not name.endswith(".mod.c")]
                wanted += len(sources)
                made += sum(f"{name[:-2]}.o" in there for name in sources)
            name, version = build.split(os.sep)[-3:-1]
            # Before the first object the modules' makefiles look at the kernel, for as long as they like.
            return f"compiling {name} {version}" + (f", {made} of {wanted} files" if made else "")
    return ""


def apt_get(command: list[str], first: str, say: Callable[[str], None], **options) -> tuple[int, str]:
    """(exit status, output) of an apt-get, or where `first` is empty of a program that calls none.

    first: what it begins with. say: gets, each second, what it does. options: as subprocess takes them.
    """
    apt = Apt(first)
    reading, writing = os.pipe()
    with open(reading, "rb") as status, open(writing, "wb") as end:
        process = subprocess.Popen(
            [*command, *(["-o", f"APT::Status-Fd={writing}"] if first else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            **options,
        )
        end.close()
        return followed(process, apt.hear, lambda: say(apt.now()), [status.fileno()])


class Pip:
    """What one pip install does, by its output, and by what grows on the disk meanwhile.

    temporary: its TMPDIR. installed: says the names of what is installed. wanted: how many packages it is asked for, or
    0 where nobody knows.
    """

    WHEEL = re.compile(
        r"\s*(Downloading|Using cached|Processing) (.+?\.whl)(?: \(([\d.]+) (bytes|[kM]B)\))?(?: \(from .*)?$"
    )
    LIST = "Installing collected packages: "

    def __init__(self, temporary: str, installed: Callable[[], Iterable[str]], wanted: int = 0) -> None:
        self.temporary, self.installed, self.wanted = temporary, installed, wanted
        self.have, self.verb, self.wheel, self.total = 0, "", "", 0.0
        self.list: list[str] = []

    def hear(self, line: str) -> None:
        if found := self.WHEEL.match(line):
            self.have += 1
            self.verb = "downloading" if found[1] == "Downloading" else "taking"
            self.wheel = unquote(found[2].rpartition("/")[2])
            self.total = size(found[3], found[4]) if found[3] else 0.0
        elif line.startswith("Ignoring "):  # a line of the lock for other machines
            self.wanted -= 1
        elif line.startswith(self.LIST):
            self.list = [re.sub(r"[-_.]+", "-", name).lower() for name in line[len(self.LIST) :].split(", ")]

    def now(self) -> str:
        if self.list:
            there = set(self.installed())
            rest = [name for name in self.list if name not in there]
            many = len(self.list) > 1
            done = f"{len(self.list) - len(rest)} of {len(self.list)} packages, " if many else ""
            return f"{done}installing {rest[0]}" if rest else f"{done}installed"
        if not self.wheel:
            return "asking the package index"
        name = self.wheel.split("-")[0].replace("_", "-")
        if self.total >= LARGE:
            places = glob.glob(f"{glob.escape(self.temporary)}/pip-unpack-*/{glob.escape(self.wheel)}")
            with contextlib.suppress(OSError, ValueError):
                return f"{name}: {share(max(map(os.path.getsize, places)), self.total)}"
        done = f"{self.have - 1} of {self.wanted} packages, " if 0 < self.have <= self.wanted > 1 else ""
        return f"{done}{self.verb} {name}"
