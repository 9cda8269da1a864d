"""Tell what a module does on a host while it works: it leaves a line in a file there (how_far.py), which is read now
and then by a command beside it, over the connection that there is.

Where the callback live has its region, the host's row has it, every few seconds; elsewhere, and in a log, a line each
minute at most. A task that is done at once costs nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.utils.display import Display

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "plugins/module_utils"), str(ROOT)]

from how_far import LARGE, share
from live_frame import cut
from telling import row

display = Display()

SHOWN = 3.0  # seconds between two looks where the region shows what they find
TOLD = 60.0  # seconds between two lines that stay
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Teller:
    """Reads and tells, in a thread of its own, until `over`. read: what the host says; empty where it says nothing."""

    def __init__(self, host: str, read: Callable[[], str]) -> None:
        self.host, self.read = host, read
        self.led = getattr(display, "led_by_region", False)
        self.over = threading.Event()
        self.printing = threading.Lock()
        self.told, self.told_at = "", time.monotonic()

    def run(self) -> None:
        while not self.over.wait(SHOWN if self.led else TOLD):
            with contextlib.suppress(AnsibleError, OSError):  # the next look may succeed
                if words := cut(self.read().strip(), 200):
                    self.tell(words, time.monotonic())

    def tell(self, words: str, now: float) -> None:
        with self.printing:
            if self.over.is_set():
                return
            if self.led:
                display.display(row(self.host, words), newline=False, screen_only=True)
            if words != self.told and now - self.told_at >= TOLD - SHOWN:
                self.told, self.told_at = words, now
                display.display(f"{self.host}: {words}", log_only=self.led)


class Said:
    """What was said last, of work on the controller itself, for `told`."""

    def __init__(self) -> None:
        self.words = ""

    def say(self, words: str) -> None:
        self.words = words

    def read(self) -> str:
        return self.words


class Coming:
    """How many of `total` bytes are here, for `told`: `done` of them, and as many as the file `growing` has by now."""

    def __init__(self, total: int = 0) -> None:
        self.total, self.done, self.since = total, 0, time.time()
        self.growing: Path | None = None  # what it was before `since` is another one's

    def words(self) -> str:
        here = self.done
        if self.growing:
            with contextlib.suppress(FileNotFoundError):
                facts = self.growing.stat()
                here += facts.st_size if facts.st_mtime > self.since - 1 else 0  # files have a coarser clock
        return f"{share(here, self.total)} have come" if self.total >= LARGE else ""


@contextlib.contextmanager
def told(host: str, read: Callable[[], str]) -> Iterator[None]:
    """Tell what `read` finds of a host for as long as the block takes. For the main thread of a worker."""
    teller = Teller(host, read)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(teller.run,), daemon=True)
    with _unharmed(teller.printing):
        thread.start()
        try:
            yield
        finally:
            teller.over.set()
            thread.join(2 * SHOWN)


@contextlib.contextmanager
def _unharmed(printing: threading.Lock) -> Iterator[None]:
    """While a thread prints, no signal ends this process.

    Ansible ends its workers by signals, in their main thread; one that ended while another thread holds the queue to
    the main process would hang that for ever.
    """
    before = {one: signal.getsignal(one) for one in SIGNALS}

    def wait(number, frame) -> None:
        printing.acquire(timeout=2)
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        else:
            signal.signal(number, handler or signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for one in SIGNALS:
        signal.signal(one, wait)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler or signal.SIG_DFL)


def file_on_host(action, path: str) -> Callable[[], str]:
    """Reads a file of an action's host that its user may read, by a connection like the action's own.

    Where another command would need another login, because nothing keeps the connection, it reads nothing.
    """

    def read() -> str:
        # A connection keeps what belongs to one command at a time; and no password is asked for beside the module's.
        connection = copy.copy(action._connection)
        if connection.transport == "ssh" and not getattr(connection, "_persistent", False):
            return ""
        status, said, _ = connection.exec_command(f"cat {shlex.quote(path)} 2>/dev/null", sudoable=False)
        return said.decode(errors="replace") if status == 0 else ""

    return read
