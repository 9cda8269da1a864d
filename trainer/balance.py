"""Who does how much of a step.

Each rank's time for a sequence is learnt from the steps themselves: all ranks know all ranks' times (loop.exchange), so
that all come to the same shares without another word. The loss does not depend on them (loop.py).
"""

import statistics
from collections import deque

from trainer.errors import BadInput

SETTLE = 2  # steps after a change that say nothing: caches fill, memory is found
WINDOW = 8  # steps whose median counts; a single slow one moves nothing
INERTIA = 0.5  # how much what was learnt before counts beside a window
GAIN = 0.05  # by what part the slowest rank's time must fall for shares to be changed


def shares(batch_size: int, world_size: int) -> list[int]:
    """How many of a step's sequences each rank computes: equal shares, the remainder to the first ranks.

    Raises BadInput where a rank would have nothing to do.
    """
    if batch_size < world_size:
        raise BadInput(
            f"batch_size {batch_size} is less than the {world_size} ranks, so that some would have no work; "
            f"set batch_size to {world_size} or more, or use fewer processes"
        )
    whole, rest = divmod(batch_size, world_size)
    return [whole + (rank < rest) for rank in range(world_size)]


def given(balance: str) -> list[int] | None:
    """The shares that the key `balance` lists; None for a word. Raises ValueError."""
    if balance in ("auto", "even"):
        return None
    listed = [int(part) for part in balance.split(",")]
    if min(listed) < 1:
        raise ValueError
    return listed


def solve(batch_size: int, seconds: list[float], grain: int = 1) -> list[int]:
    """The shares, of at least one sequence, with which the last rank is done as early as can be.

    seconds: of each rank for a sequence. grain: sequences that are given out at once; what is left over goes, in ones,
    to whoever is done with them first. Greedy, which is exact for times that grow with the share: a sequence more
    always goes where it ends earliest.
    """
    split = [1] * len(seconds)
    if grain > 1 and batch_size >= grain * len(seconds):
        split = [grain] * len(seconds)
    while (left := batch_size - sum(split)) > 0:
        more = grain if left >= grain else 1
        rank = min(range(len(seconds)), key=lambda rank: (split[rank] + more) * seconds[rank])
        split[rank] += more
    return split


class Balance:
    """The shares of the next step, `split`, learnt from those before."""

    def __init__(self, batch_size: int, world_size: int, balance: str = "auto", grain: int = 1):
        self.batch_size, self.grain = batch_size, grain
        even = shares(batch_size, world_size)
        listed = given(balance)
        self.split = listed or even
        self.learns = balance == "auto" and world_size > 1
        self.expected = 1.0  # how many times as fast as before the last change was to make the slowest rank
        self._skip = SETTLE
        self._seconds: list[float] = []  # a sequence's, by rank, smoothed
        self._times: deque[list[float]] = deque(maxlen=WINDOW)  # seconds a sequence, by rank

    @property
    def gain(self) -> float:
        """How many times as soon as with even shares the slowest rank should be done, by what is known of all."""
        if not self._seconds:
            return 1.0
        even = shares(self.batch_size, len(self.split))
        return self._longest(even) / self._longest(self.split)

    def _longest(self, split: list[int]) -> float:
        return max(own * share for own, share in zip(self._seconds, split, strict=True))

    def learn(self, rank_seconds: list[float]) -> bool:
        """Take in each rank's own seconds of a step of these shares; whether the shares are others now."""
        if not self.learns:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._times.append([own / share for own, share in zip(rank_seconds, self.split, strict=True)])
        if len(self._times) < WINDOW:
            return False
        seconds = [statistics.median(times) for times in zip(*self._times, strict=True)]
        self._times.clear()
        if self._seconds:
            pairs = zip(self._seconds, seconds, strict=True)
            seconds = [INERTIA * old + (1 - INERTIA) * new for old, new in pairs]
        self._seconds = seconds
        found = solve(self.batch_size, seconds, self.grain)
        now, then = self._longest(self.split), self._longest(found)
        if then > (1 - GAIN) * now:
            return False
        self.split, self.expected = found, now / then
        self._skip = SETTLE
        return True
