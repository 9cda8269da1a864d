"""Whether a rank of this host hangs: no error, and no progress.

In a step the others miss it, after `timeout_seconds`. Elsewhere they wait for hours, since one that fetches, loads or
saves may take its time; and one that trains alone is missed by nobody. There its launcher looks at what its processes
do. It ends them where

    any of them was stopped (SIGSTOP) for longer than the others wait for it in a step;
    of several ranks, those of this host gave no sign of life for half an hour, in an evaluation for twice as long as
    others wait in a step, however busy (nothing was written, nothing read), nor do all of them wait for others
    (trainer/waiting.py);
    one that trains alone used no processor for as long as others would wait for it (half an hour where it loads or
    saves), or, since a GPU that does not answer may make it spin, gave no sign of life for far longer than ever before.
    It may take its time for its first step, and for a disk, for which nobody else could do any better.
"""

import math

from trainer.cluster.attempt import Attempt, Work
from trainer.config import Config

LOOK = 5.0  # seconds between two looks for SIGSTOP, at most; else a twentieth of timeout_seconds
IDLE = 0.01  # of a processor, or less: what a rank uses that makes no progress
MISSED = 5.0  # seconds after `timeout_seconds`, in which the others miss a rank
SLOW = 1800.0  # seconds that a rank has at least for what may take long without a word: loading, saving, compiling
SLOWER = 30  # times its longest silence in an attempt, which a rank is left to: float16 tries a step two dozen times
JUDGED = ("starting", "running", "evaluating", "saving")


class Pulse:
    """What an attempt's ranks on this host were seen to do; times in seconds, of a clock that only goes on."""

    def __init__(self, config: Config):
        self._config = config
        self._looked: float | None = None
        self._looked_for_stopped: float | None = None
        self._stopped_since: float | None = None
        self._state: str | None = None
        # Since when they do nothing, and what they had used of processors by then.
        self._idle: tuple[float, float] = (0.0, 0.0)
        # Their last sign of life: when, and what they had written by then.
        self._sign: tuple[float, int | None] = (0.0, None)
        self._longest = 0.0  # silence between two signs

    def hangs(self, attempt: Attempt, known: dict, now: float) -> str | None:
        """Why one of them must have hung; None where all may be well. known: the host's status.json."""
        patience = self._config.timeout_seconds
        apart, since = (
            now - then if then is not None else math.inf for then in (self._looked, self._looked_for_stopped)
        )
        # These take longer than all the rest of a launcher's look.
        if since >= min(patience / 20, LOOK):
            self._looked_for_stopped = now
            self._stopped_since = (self._stopped_since or now) if attempt.stopped() else None
        if self._stopped_since and now - self._stopped_since > patience + MISSED:
            return f"it was stopped (SIGSTOP) for {now - self._stopped_since:.0f} s"
        if apart < patience / 20:
            return None
        self._looked = now
        state = known.get("state") if known.get("attempt") == attempt.plan.attempt else None
        if state not in JUDGED:
            self._state = None
            return None
        work = attempt.work()
        if self._state is None or apart > max(patience / 2, 0.5):  # the launcher itself stood still
            self._idle, self._sign, self._state = (now, work.used), (now, work.signs), state
            return None
        if state != self._state:  # a sign of life, too
            self._note_sign(work, now)
            self._idle, self._state = (now, work.used), state
        if sum(member.processes for member in attempt.plan.members) > 1:
            return self._some_of_several(work, now)
        return self._alone(work, now, stepped=bool(known.get("slowest")))

    def _some_of_several(self, work: Work, now: float) -> str | None:
        if work.waiting or work.signs is None or work.signs != self._sign[1]:
            self._sign = now, work.signs
        limit = 2 * self._config.timeout_seconds  # in a step the others have missed it by then
        # At the end of an evaluation they wait for it, however long it takes, and it gives signs all the time.
        if self._state != "evaluating" or self._config.compile:
            limit = max(limit, SLOW)
        if (silent := now - self._sign[0]) <= limit:
            return None
        disk = ", and waits for a disk: see there `journalctl -k`" if work.disk else ""
        return f"it gave no sign of life for {silent:.0f} s{disk}"

    def _alone(self, work: Work, now: float, stepped: bool) -> str | None:
        silent = work.signs is not None and work.signs == self._sign[1] and not work.disk
        if not silent:
            self._note_sign(work, now)
        since, before = self._idle
        # A compiler's processes may have ended, with what they had used.
        idle = before <= work.used <= before + IDLE * max(1.0, now - since)
        # A file may be on its way by the network.
        if work.disk or not idle or (self._state != "running" and not silent):
            self._idle = now, work.used
        limit = self._config.timeout_seconds
        if self._state in ("starting", "saving"):
            limit = max(limit, SLOW)
        if now - self._idle[0] > limit:
            return f"it did nothing for {limit:.0f} s"
        limit = max(limit, SLOWER * self._longest, SLOW if self._config.compile else 0.0)
        # Before its first step it may compile, and what a profiler has noted takes its time.
        may_take_long = self._state != "starting" and (not stepped or self._config.profile_steps)
        if not may_take_long and now - self._sign[0] > limit:
            return (
                f"it computed for {limit:.0f} s without a step or any other sign of life, far longer than ever "
                "before; a GPU that does not answer any more does so: see there `journalctl -k` and `nvidia-smi`"
            )
        return None

    def _note_sign(self, work: Work, now: float) -> None:
        if self._state != "starting":
            self._longest = max(self._longest, now - self._sign[0])  # from look to look: rather too long
        self._sign = now, work.signs
