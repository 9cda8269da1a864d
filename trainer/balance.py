"""Who does how much of a step.

Each rank's time for a sequence is tried before the first step (calibrate.py), and then learnt from the steps
themselves: all ranks know all ranks' times (loop.exchange), so that all come to the same shares without another word.
The loss does not depend on them (loop.py).
"""

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from trainer.errors import BadInput

SETTLE = 2  # steps after a change that say nothing: caches fill, memory is found
WINDOW = 8  # steps whose median counts; a single slow one moves nothing
INERTIA = 0.5  # how much what was learnt before counts beside a window that says about the same
JUMP = 0.15  # by what part a rank's time must differ from what was learnt for the window alone to count
GAIN = 0.03  # by what part the slowest rank's time must fall for shares to be changed
AGAIN = 600.0  # seconds of steps after which ranks that no step tells of are tried anew: one may have become faster
# Times as long as a trial that ranks go through steps before the next one: on a network whose own speed comes and goes,
# all of a step tells of other ranks again and again.
REST = 50
TRIAL = 0.1  # the same of the first shares: a trial is shorter than a window, and as easily disturbed


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


def miscounted(balance: str, ranks: int) -> BadInput | None:
    """What is wrong with shares that are listed, and not for so many ranks; None where nothing is."""
    listed = given(balance)
    if not listed or len(listed) == ranks:
        return None
    return BadInput(
        f"balance: found {len(listed)} shares ({balance}); expected one for each of the {ranks} ranks. "
        "Correct them, or write auto"
    )


def solve(
    batch_size: int,
    seconds: list[float],
    grain: int = 1,
    most: Sequence[int] | None = None,
    fixed: Sequence[float] | None = None,
    work: Callable[[int, int], float] = lambda rank, share: share,
) -> list[int]:
    """The shares, of at least one sequence, with which the last rank is done as early as can be.

    seconds: of each rank for a sequence. grain: sequences that are given out at once; what is left over goes, in ones,
    to whoever is done with them first. most: each rank's share at most; together they are to be enough for the batch.
    fixed: seconds that each rank needs besides, whatever its share; none unless given. work: for how many sequences a
    rank's share counts, which is to grow with it; as many as there are unless given.
    Greedy, which is exact for times that grow with the share: a sequence more always goes where it ends earliest.
    """
    most, fixed = most or [batch_size] * len(seconds), fixed or [0.0] * len(seconds)
    split = [1] * len(seconds)
    if grain > 1 and batch_size >= grain * len(seconds) and min(most) >= grain:
        split = [grain] * len(seconds)
    left = batch_size - sum(split)
    for more in (grain, 1):  # in ones, too, where nobody has room for as many as the grain
        # (when a rank would be done with so many more, rank): of several that would be at once, the first has them.
        ends = [
            (fixed[rank] + seconds[rank] * work(rank, share + more), rank)
            for rank, share in enumerate(split)
            if share + more <= most[rank]
        ]
        heapq.heapify(ends)
        while left >= more and ends:
            _, rank = heapq.heappop(ends)
            split[rank] += more
            left -= more
            if split[rank] + more <= most[rank]:
                heapq.heappush(ends, (fixed[rank] + seconds[rank] * work(rank, split[rank] + more), rank))
    return split


def passes(split: Sequence[int], at_once: Sequence[int]) -> int:
    """Micro-batches in which every rank is through with its share; at_once: sequences of one at most, by rank."""
    return max(-(-share // most) for share, most in zip(split, at_once, strict=True))


def sizes(share: int, count: int) -> list[int]:
    """`share` sequences in `count` micro-batches as even as can be; the larger ones, and those with any, come first."""
    whole, rest = divmod(share, count)
    return [whole + (number < rest) for number in range(count)]


def line(times: dict[int, float]) -> tuple[float, float]:
    """(seconds of a pass whatever its size, seconds that each sequence adds), neither below 0.

    times: seconds of passes, by their size. It is the line through the least and the largest one; of a single size,
    and where a sequence takes longer in a larger pass, the one from 0 to the largest.
    """
    least, most = min(times), max(times)
    if most > least:
        each = max(0.0, (times[most] - times[least]) / (most - least))
        if (alone := times[most] - most * each) > 0:
            return alone, each
    return 0.0, times[most] / most


class Balance:
    """The shares of the next step, `split`, learnt from those before.

    lockstep: the size of a micro-batch where every rank goes through as many, each as long as its slowest rank takes;
    0 where each rank has its own number of them. Each has its own price, on the wire or, of a small model, in passes
    over nothing, which would be taken for slowness. So their number is that of even shares, or what memory needs,
    whatever the shares are: a faster rank's micro-batches are larger instead. at_once: sequences of one at most, by
    rank; as lockstep has it unless given.
    watched: whether a rank's seconds of a step are its own. Where they hold its waiting for others, all of a step is
    watched instead: `stale` says that it takes another time than it did, or that the last trial is long ago, so that
    ranks are to be tried anew; but not before the last trial is a fiftieth of the time since (REST).
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        balance: str = "auto",
        grain: int = 1,
        lockstep: int = 0,
        at_once: Sequence[int] | None = None,
        watched: bool = True,
    ):
        self.batch_size, self.grain, self.lockstep = batch_size, grain, lockstep
        self.at_once = list(at_once or [lockstep or batch_size] * world_size)
        self.even = shares(batch_size, world_size)
        listed = given(balance)
        self.split = listed or self.even
        self.learns = balance == "auto" and world_size > 1
        self.watched, self.stale = watched, False
        self.expected = 1.0  # how many times as fast as before the last change was to make the slowest rank
        self.wants: int | None = (
            None  # sequences that a rank would compute at once, and may not, with shares by speed
        )
        self._skip = SETTLE
        self._seconds: list[float] = []  # a sequence's, by rank, smoothed
        # What a rank's pass takes whatever its size, and what each sequence adds, in its seconds of a sequence.
        self._lines = [(0.0, 1.0)] * world_size
        self._fixed = [0.0] * world_size  # seconds of a step that no share makes shorter, by rank
        self._times: deque[list[float]] = deque(maxlen=WINDOW)  # seconds a sequence, by rank
        self._besides: deque[list[float]] = deque(maxlen=WINDOW)  # what is fixed, by rank
        self._steps: list[float] = []  # the slowest rank's seconds, where no rank's own are known
        self._usual: float | None = None
        self._since = 0.0  # seconds of steps since the last trial
        self._took = 0.0  # seconds of that trial

    @property
    def passes(self) -> int:
        """Micro-batches of a step that every rank goes through, where they keep step."""
        return max(self._passes(), passes(self.split, self.at_once))

    def _passes(self) -> int:
        """As many as even shares of the size that is set need, or more where memory does not hold that."""
        return max(-(-max(self.even) // self.lockstep), -(-self.batch_size // sum(self.at_once)))

    def largest(self, rank: int) -> int:
        """Sequences of a rank's largest micro-batch, where ranks keep step."""
        return -(-self.split[rank] // self.passes)

    def parts(self, count: int) -> list[range]:
        """Which of `count` sequences that are no step's each rank computes: by the shares; by even ones, in turns."""
        ranks = len(self.split)
        if self.split == self.even:
            return [range(rank, count, ranks) for rank in range(ranks)]
        ends = [count * end // self.batch_size for end in itertools.accumulate(self.split, initial=0)]
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    @property
    def gain(self) -> float:
        """How many times as soon as with even shares the slowest rank should be done, by what is known of all."""
        return self._longest(self.even) / self._longest(self.split) if self._seconds else 1.0

    def saved(self, rank_seconds: list[float], split: list[int]) -> float | None:
        """Seconds of computing by which a step of shares `split` was shorter than one of even ones.

        By the same step: rank_seconds are those that each rank needed for its share, of which an even share needs as
        many a sequence. None where they are not a rank's own.
        """
        if not self.watched:
            return None
        seconds = self._each(rank_seconds, split)
        return self._longest(self.even, seconds) - self._longest(split, seconds)

    def _longest(self, split: list[int], seconds: list[float] | None = None) -> float:
        """Seconds of computing that a step of these shares takes; seconds: a sequence's, by rank, if not as known."""
        seconds = seconds or self._seconds
        if not self.lockstep:
            return _last(seconds, self._works(split), self._fixed)
        count = max(self._passes(), passes(split, self.at_once))
        by_pass = zip(*(sizes(share, count) for share in split), strict=True)
        return sum(_last(seconds, own) for own in by_pass)

    def _work(self, rank: int, share: int) -> float:
        """For how many sequences a rank's share counts: each of its micro-batches takes something, full or not."""
        alone, each = self._lines[rank]
        return alone * -(-share // self.at_once[rank]) + each * share

    def _works(self, split: list[int]) -> list[float]:
        """As `_work`, of all ranks."""
        return list(itertools.starmap(self._work, enumerate(split)))

    def _each(self, rank_seconds: list[float], split: list[int]) -> list[float]:
        """Seconds of a sequence, by rank, of a step of these shares."""
        return [own / work for own, work in zip(rank_seconds, self._works(split), strict=True)]

    def _solve(self) -> list[int]:
        """The best shares by what is known of all."""
        self.wants = None
        if not self.lockstep:
            return solve(self.batch_size, self._seconds, self.grain, fixed=self._fixed, work=self._work)
        found = solve(self.batch_size, self._seconds, self.grain)
        count = self._passes()
        if passes(found, self.at_once) <= count:
            return found
        within = self._within(count)
        for more in range(
            count + 1, passes(self.even, self.at_once) + 1
        ):  # where memory is less than was set
            other = self._within(more)
            if self._longest(other) <= (1 - GAIN) * self._longest(within):
                within = other
        if _last(self._seconds, found) <= (1 - GAIN) * _last(self._seconds, within):
            self.wants = -(-max(found) // count)
        return within

    def _within(self, count: int) -> list[int]:
        """The best shares that need no more than so many micro-batches."""
        return solve(self.batch_size, self._seconds, self.grain, [count * one for one in self.at_once])

    def begin(self, seconds: list[float], tried: Sequence[dict[int, float]] = ()) -> None:
        """Have the shares of ranks that were tried and take so long for a sequence; even ones if these are as good.

        tried: seconds of each rank's passes, by their size; `seconds` are those of the largest. Where ranks keep step,
        all go through as many whatever the shares, and what a pass takes by itself changes nothing.
        """
        self._seconds, self.stale, self._usual = list(seconds), False, None
        if tried and not self.lockstep:
            lines = zip(map(line, tried), seconds, strict=True)
            self._lines = [(alone / own, each / own) for (alone, each), own in lines]
        self._steps.clear()
        self._skip, self._since = SETTLE, 0.0
        before, self.split = self._longest(self.split), self.even
        self._change(TRIAL)
        self.expected = before / self._longest(self.split)

    def tried(self, seconds: float) -> None:
        """The trial that led to `begin` took so long; the same on all ranks."""
        self._took = seconds

    @property
    def speeds(self) -> list[float] | None:
        """What is known of the ranks' speeds, as parts of the fastest one's; None: nothing."""
        return [min(self._seconds) / own for own in self._seconds] or None

    def _change(self, gain: float) -> bool:
        """Take the best shares where they make the slowest rank's time shorter by such a part."""
        found = self._solve()
        now, then = self._longest(self.split), self._longest(found)
        if then > (1 - gain) * now:
            return False
        self.split, self.expected = found, now / then
        self._skip = SETTLE
        return True

    def foresee(self, seconds: list[float]) -> None:
        """Have the shares to which ranks with these times for a sequence, in any unit, would lead."""
        self._seconds = list(seconds)
        if self.learns:
            self._change(TRIAL)

    def learn(self, rank_seconds: list[float], fixed: Sequence[float] = ()) -> bool:
        """Take in each rank's own seconds of a step of these shares; whether the shares are others now.

        fixed: what each needs in a step besides, whatever its share: the optimizer, compression. Listed shares stay;
        what they are good for is learnt all the same.
        """
        if not self.learns and (self.split == self.even or not self.watched):
            return False
        if self._skip:
            self._skip -= 1
            return False
        if not self.watched:
            self._watch(max(rank_seconds))
            return False
        self._times.append(self._each(rank_seconds, self.split))
        self._besides.append(fixed or self._fixed)
        if len(self._times) < WINDOW:
            return False
        seconds = [statistics.median(times) for times in zip(*self._times, strict=True)]
        self._times.clear()
        self._fixed = [statistics.median(own) for own in zip(*self._besides, strict=True)]
        if self._seconds:
            seconds = list(map(_known, self._seconds, seconds))
        self._seconds = seconds
        return self.learns and self._change(GAIN)

    def _watch(self, seconds: float) -> None:
        """Take in all of a step's seconds, and see whether they are still what they were after the last trial."""
        self._steps.append(seconds)
        self._since += seconds
        if len(self._steps) < WINDOW:
            return
        median = statistics.median(self._steps)
        self._steps.clear()
        self._usual = self._usual or median
        due = abs(median - self._usual) > JUMP * self._usual or self._since >= AGAIN
        self.stale = due and self._since >= REST * self._took


def _known(old: float, new: float) -> float:
    """A rank's time by what was learnt of it and the newest window: noise is evened out, another speed is believed."""
    return new if abs(new - old) > JUMP * old else INERTIA * old + (1 - INERTIA) * new


def _last(seconds: list[float], split: Sequence[float], fixed: Sequence[float] | None = None) -> float:
    """When the last rank is done with its part of `split`, and what is fixed, in seconds."""
    fixed = fixed or [0.0] * len(seconds)
    return max(own * share + more for own, share, more in zip(seconds, split, fixed, strict=True))
