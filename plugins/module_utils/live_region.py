"""Lines at the bottom of a terminal that are written over, while all else scrolls above them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable

TICK = 0.5  # seconds between two frames


class Region:
    """`lines()`, each narrower than the terminal, below all that is printed within `aside`.

    lock: what whoever prints to `out` holds, and whoever forks: a thread of its own draws. The cursor is never hidden,
    and stands behind the last line, so that nothing needs to be restored, however the program ends. What goes wrong
    here ends the drawing, and nothing else.
    """

    def __init__(self, out, lock, lines: Callable[[], list[str]]) -> None:
        self.out, self.lock, self.lines = out, lock, lines
        self.shown: list[str] = []
        self.held = 0
        self.over = threading.Event()

    def begin(self) -> None:
        atexit.register(self.end)
        threading.Thread(target=self._tick, daemon=True).start()

    def end(self) -> None:
        """Wipe it, for good."""
        free = self.lock.acquire(timeout=2)  # at exit, nobody waits for ever
        self._write([])
        self.over.set()
        if free:
            self.lock.release()

    @contextlib.contextmanager
    def aside(self):
        """While something else is printed, whole lines, or asked: the region is not there. May be nested."""
        with self.lock:
            self._write([])
            self.held += 1
            try:
                yield
            finally:
                self.held -= 1
                self.draw()

    def draw(self) -> None:
        """Show what `lines` says now. Hold the lock."""
        if self.held or self.over.is_set():
            return
        try:
            lines = self.lines()
        except Exception:
            self._write([])
            self.over.set()
            return
        self._write(lines)

    def lead(self, display, takes: Callable[..., bool]) -> None:
        """From now on what Ansible's Display prints or asks is aside, and what `takes` takes is not printed."""
        owner = os.getpid()

        def around(shown):
            @functools.wraps(shown)
            def call(*args, **kwargs):
                # A worker only sends it to the process that has the terminal.
                if os.getpid() != owner:
                    return shown(*args, **kwargs)
                text = args[0] if args else kwargs.get("msg", "")
                if self.over.is_set():
                    if not kwargs.get("newline", True):  # one line can be written over, more cannot
                        kwargs.pop("msg", None)
                        args = (text.partition("\n")[0], *args[1:])
                    return shown(*args, **kwargs)
                if shown.__name__ == "display" and takes(text, kwargs.get("newline", True)):
                    with self.lock:
                        self.draw()
                    return None if kwargs.get("screen_only") else shown(text, log_only=True)
                with self.aside():
                    return shown(*args, **kwargs)

            return call

        display.led_by_region = True  # workers, which inherit it, may send rows of hosts
        for name in ("display", "prompt_until", "do_var_prompt"):
            setattr(display, name, around(getattr(display, name)))

    def _tick(self) -> None:
        while not self.over.wait(TICK):
            with self.lock:
                self.draw()

    def _write(self, lines: list[str]) -> None:
        """Put `lines` in the place of those that are shown."""
        if lines == self.shown or self.over.is_set():
            return
        up = f"\x1b[{len(self.shown) - 1}A" if len(self.shown) > 1 else ""
        try:
            self.out.write(f"\r{up}" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
            self.out.flush()
        except Exception:
            self.over.set()
        self.shown = lines
