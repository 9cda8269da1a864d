"""How fast a run is of late: seconds of a step, tokens a second, the time to its end, and what its shares gain.

Given what each step told (loop.StepReport), on every rank.
"""

from collections import deque

from trainer.loop import Run, StepReport, as_whole, evaluations_left
from trainer.model import flops

RATE_STEPS = 10  # whose mean is the speed that is shown, and the time left goes by
LONGEST_ROUND = 500  # steps between two meetings of diloco's that these means go over
SAVING_STEPS = 8  # the last ones of the same shares, which tell how much faster these are than even ones


def recent_steps(run: Run, least: int) -> int:
    """How many of the last steps a mean goes over: where not each of them sends, those of a whole round."""
    rounds = run.config.comm == "diloco" and run.world.size > 1
    return max(least, min(run.config.sync_every, LONGEST_ROUND) if rounds else 1)


class Pace:
    """Of the last steps of this attempt, of which `add` is told; all ranks must make it."""

    def __init__(self, run: Run):
        self.run = run
        self.evaluation_seconds = 0.0  # the last one's
        self.flops = flops.per_token(run.strategy.model)
        peaks = run.world.gather(flops.peak(run.world.devices, run.config.dtype))
        self.peak = None if None in peaks else sum(peaks)  # of all ranks, whose cards may differ
        # (tokens, seconds)
        self._lasted: deque[tuple[int, float]] = deque(maxlen=recent_steps(run, RATE_STEPS))
        # (shares, seconds, how many more even ones would have taken) of steps.
        self._saving: deque[tuple[list[int], float, float]] = deque(maxlen=SAVING_STEPS)

    def add(self, report: StepReport) -> None:
        """A step is done."""
        self._lasted.append((report.tokens, report.step_seconds))

    def seconds(self) -> float:
        """What a step takes, of late."""
        return sum(seconds for _, seconds in self._lasted) / len(self._lasted) if self._lasted else 0.0

    def speed(self) -> float:
        """Tokens a second, of late: of all these steps, for one may have far more with a loss than the next."""
        tokens, seconds = map(sum, zip(*self._lasted, strict=True))
        return tokens / seconds

    def left(self) -> float:
        """Seconds to the end of the run, by what steps and evaluations have taken."""
        steps = self.run.steps - self.run.progress.step
        return steps * self.seconds() + evaluations_left(self.run) * self.evaluation_seconds

    def mfu(self, report: StepReport) -> float | None:
        """The share of all ranks' peak that the model's work makes (model/flops.py).

        Tokens without a loss are computed, too.
        """
        if self.peak is None:
            return None
        return report.computed * self.flops / (report.step_seconds * self.peak)

    def speed_up(self, report: StepReport) -> dict | None:
        """How much faster the steps are than with even shares; None if they are.

        {expected, got, speeds}: by what is known of the ranks' speeds; by the last steps of these shares, of which each
        tells what even ones would have taken (Balance.saved), None where steps do not; and those speeds.
        """
        balance = self.run.balance
        if list(report.shares) == balance.even or not balance.speeds:
            return None
        full = as_whole(self.run)  # the balance counts whole sequences
        saved = balance.saved([seconds * full for seconds in report.rank_seconds], report.shares)
        if saved is not None:
            self._saving.append((report.shares, report.step_seconds, saved / full))
        alike = [(seconds, more) for shares, seconds, more in self._saving if shares == report.shares]
        taken = sum(seconds for seconds, _ in alike)
        got = (taken + sum(more for _, more in alike)) / taken if alike else None
        return {"expected": balance.gain, "got": got, "speeds": balance.speeds}
