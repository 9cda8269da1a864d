"""What happens around the steps: metrics, status, log lines, checkpoints, and requests to stop."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time

import torch
from tqdm import tqdm

from trainer import advice, calibrate, checkpoint, machine, metrics
from trainer.config import Config
from trainer.data.index import last_step
from trainer.environment import StopSignal
from trainer.errors import Diverged, Stopped, TrainerError
from trainer.evaluate import evaluate
from trainer.loop import (
    Harmful,
    Progress,
    Run,
    StepReport,
    Wordless,
    epoch_has_ended,
    evaluation_is_due,
)
from trainer.metrics import Metrics, Status
from trainer.pace import Pace, recent_steps
from trainer.profiler import Profiler
from trainer.sinks import Sinks
from trainer.words import span
from trainer.world import World, log

LOG_EVERY = 10.0  # seconds between lines in the log
SIGN_EVERY = 60.0  # seconds between signs of life in a step
UNSAVED = 3  # checkpoints in a row that cannot be saved, after which a run ends over it
RECENT_STEPS = 20  # whose mean says where a step's time goes
SETTLED_STEPS = 2 * RECENT_STEPS  # of an attempt, after which those are as they will be: shares are found
# Of the progress in a manifest: a release from before they were there reads the rest.
APART = ("launch", "evaluated_step", "held_out", "best_saved")
PASSED_OVER = 10  # batches in a row, and ways back to one checkpoint, before a run is called diverged
CURE = "Cure: a lower lr, more warmup_steps, a grad_clip; then start again from the last checkpoint"


class Recorder:
    """The loop's observer. Writes files on one rank of each run directory (`World.keeps`); logs on rank 0."""

    def __init__(self, run: Run, tokenizer, identity: dict, status: Status | None, stop_signal: StopSignal):
        self.run, self.identity, self.status = run, identity, status
        self.environment = run.world.environment
        self.stop_signal = stop_signal
        at = run.progress.step, run.progress.evaluated_step
        self.metrics = Metrics(self.environment.run_dir, *at) if run.world.keeps else None
        share_history(run.world, self.metrics)
        self.bar = _bar(run)
        before = map(json.loads, self.metrics.lines()) if self.metrics else ()
        marks = (one.get("launch") or one.get("begun") for one in before)
        # Without a launcher no start has a name: the moment of the first one is as good.
        self.begun = next(filter(None, marks), run.progress.launch or time.strftime("%Y%m%dT%H%M%S"))
        settings = dataclasses.asdict(run.config)
        self.sinks = Sinks(run.config, self.environment, settings, self._say, self.begun)
        self.profiler = Profiler(run.config.profile_steps, self.environment.run_dir, run.world.rank)
        self.pace = Pace(run)
        self.saver = checkpoint.Saver(
            self.environment.run_dir,
            run.strategy,
            run.optimizer,
            tokenizer,
            keep=run.config.checkpoint_keep,
            background=run.config.checkpoint_async and run.strategy.copies,
            before=self.metrics.settle if self.metrics else lambda: None,
        )
        self.saved_step = run.progress.step
        self.saved_at = time.monotonic()
        self._saving_bytes = 0  # sent for the checkpoint that was begun last
        self._unsaved = 0  # checkpoints in a row that could not be saved
        self._returned_to = None  # the step of the checkpoint last gone back to
        self._returns = 0  # how often to that one
        self._warnings: dict[str, str] = {}  # by what they are about
        self._full: list[str] = []  # hosts whose disks take no lines
        self._signed = time.monotonic()  # when the last sign of life in a step was given
        self._steps = 0  # of this attempt
        self._went = metrics.Went(recent_steps(run, RECENT_STEPS))
        proposes = run.world.size > 1 and run.config.comm == "auto"
        self._steps_to_proposal = SETTLED_STEPS if proposes else 0
        before = map(json.loads, self.metrics.lines()) if self.metrics else ()
        self._trend = metrics.Trend(one["loss"] for one in before if one["kind"] == "train")
        self._logged = 0.0
        self._advice: list[str] = []  # of this attempt
        self._told_wants = False
        self._told_shares = run.balance.split
        resumed = {"last_checkpoint": run.progress.step or None}
        cleared = {"warning": None, "reason": None}
        self.show(state="running", step=run.progress.step, steps=run.steps, **cleared, **resumed)
        for about, text in advice.at_the_start(run).items():
            if text:
                self._warn(about, text)
        self._tell_attempt()

    def _tell_attempt(self) -> None:
        """Write down that an attempt begins: by whom, on what, and why."""
        reason = os.environ.get("TRAINYARD_REASON")  # the launcher's, of an attempt after the first
        what = "restart" if reason else "resume" if self.run.progress.step else "start"
        hosts, attempt = self.run.world.hosts, self.environment.attempt
        on = machine.machines(self.run.world)
        watched = self.run.balance.watched
        self._tell(
            "event",
            event=what,
            launch=self.run.progress.launch,
            begun=self.begun,
            attempt=attempt,
            reason=reason,
            ranks=hosts,
            machines=on,
            watched=watched,
        )
        if reason and self.run.world.first:
            self._say(f"attempt {attempt}: {reason}")

    def tell_damaged(self, found: checkpoint.Found | None) -> None:
        """Write down which copies of checkpoints were passed over for this one."""
        for problem in found.damaged if found else ():
            self._tell("event", event="damaged checkpoint", reason=problem)
            if self.run.world.first:
                self._say(f"passed over a damaged checkpoint: {problem}")

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked: by a signal, or by a file on its host."""
        return self.environment.asked_to_stop(self.stop_signal)

    def save_is_due(self) -> bool:
        """Whether the minutes between checkpoints are over, by the first rank's clock."""
        minutes = self.run.config.checkpoint_minutes
        return bool(minutes) and self.run.world.first and time.monotonic() - self.saved_at >= 60 * minutes

    def alive(self) -> None:
        """Give a sign of life within a step, which may take longer than a launcher waits for one (cluster/hang.py)."""
        now = time.monotonic()
        if now - self._signed >= SIGN_EVERY:
            self._signed = now
            self._sign("running")

    def _sign(self, state: str) -> None:
        """Show that it is in this state, and at work."""
        self.show(state=state)
        if not self.status:  # another rank keeps it, which may be done by then
            with open(os.devnull, "wb", buffering=0) as nothing:
                nothing.write(b".")  # what is looked at are calls (Attempt.work)

    def after_harm(self, harm: Harmful) -> None:
        """A batch that would have done harm: end the run, pass it over, or go back and pass over all since then."""
        run, progress = self.run, self.run.progress
        what = run.config.on_nan
        progress.passed_over += 1
        if what == "stop" or progress.passed_over > PASSED_OVER:
            times = f" ({PASSED_OVER} batches before it, too)" if what != "stop" else ""
            raise Diverged(f"diverged at {harm}{times}; this step was not taken. {CURE}")
        behind = progress.cursor + run.config.batch_size
        count = progress.passed_over
        if what == "rollback":
            self.roll_back(harm)
        progress.passed_over = count
        self._pass_over(behind, harm, what)

    def after_wordless(self, empty: Wordless) -> None:
        """A batch that has nothing to learn."""
        self._pass_over(self.run.progress.cursor + self.run.config.batch_size, empty, "skip")

    def _pass_over(self, behind: int, why: Exception, what: str) -> None:
        """Go on with the batch at `behind`."""
        run, progress = self.run, self.run.progress
        progress.cursor = behind
        run.steps = last_step(run.config, len(run.packed), progress.step, progress.cursor)
        self.show(steps=run.steps)
        if self.bar is not None:
            self.bar.total = run.steps
        if epoch_has_ended(run):
            self._end_epoch((behind - run.config.batch_size) // run.index.sequences)
        self._tell("event", event="passed over", reason=str(why), action=what)
        if run.world.first:
            self._say(
                f"{why}: passed over" + (f", back to step {progress.step}" if what == "rollback" else "")
            )

    def roll_back(self, harm: Harmful) -> None:
        """Take weights, optimizer and progress from the newest checkpoint; not from the same one for ever."""
        run = self.run
        self.settle()
        found = checkpoint.find(self.environment.run_dir, run.world)
        if not found:
            raise Diverged(
                "diverged, and there is no checkpoint to go back to; set checkpoint_every to fewer steps, or a lower lr"
            )
        step = found.manifest["step"]
        self._returns = self._returns + 1 if self._returned_to == step else 1
        self._returned_to = step
        if self._returns > PASSED_OVER:
            raise Diverged(
                f"diverged at {harm}: the run went back to step {step} {PASSED_OVER} times and came to no newer "
                f"checkpoint. {CURE}"
            )
        checkpoint.load(found, run.strategy, run.optimizer)
        back = dataclasses.replace(progress_in(found.manifest), launch=run.progress.launch)
        vars(run.progress).update(vars(back))
        # Newer ones are damaged: their steps are saved anew.
        self.saved_step = step
        self.judge()
        if self.metrics:
            self.metrics.cut(run.progress.step, run.progress.evaluated_step)
        self.tell_damaged(found)
        # That of an epoch's end is here alone: what comes is behind the bad batches.
        if evaluation_is_due(run):
            self.evaluate()

    def judge(self) -> None:
        """Compare evaluations with none that was made on other data."""
        other = self.run.held_out and self.run.progress.judge_by(self.run.held_out.digest)
        if other and self.run.world.first:
            self._say("what is held out has changed: the best evaluation so far is forgotten")

    def evaluate(self) -> None:
        """The loss on the held-out data; whether it is the best so far is noted in the run's progress."""
        run, progress = self.run, self.run.progress
        self.show(state="evaluating")
        run.strategy.settle()
        begin = time.perf_counter()
        # The launcher of a rank that trains alone takes a long silence for a hang.
        loss = evaluate(run, run.held_out, lambda: self._sign("evaluating"), self.asked_to_stop)
        if loss is None:
            self.save_last()
            raise Stopped(
                f"stopped on request in the evaluation after step {progress.step} of {run.steps}; start it again to go "
                "on, with that evaluation"
            )
        finite = math.isfinite(loss)  # else nothing would ever be better
        better = finite and (progress.best_loss is None or loss < progress.best_loss)
        progress.evaluated_step = progress.step
        if better:
            progress.best_loss, progress.best_step, progress.no_better = loss, progress.step, 0
        else:
            progress.no_better += 1
        seconds = self.pace.evaluation_seconds = time.perf_counter() - begin
        self._tell("eval", loss=loss if finite else None, best=better, seconds=seconds)
        if run.world.first:
            known = progress.best_loss is not None
            best = f"; the best is {progress.best_loss:.4f}, of step {progress.best_step}" if known else ""
            perplexity = f", perplexity {math.exp(min(loss, 700)):,.2f}" if finite else ", which is no number"
            self._say(
                f"step {progress.step}: loss {loss:.4f} on the held-out data{perplexity}{'' if better else best}"
            )
        self.show(
            state="running",
            eval_loss=loss if finite else None,
            best_eval={"step": progress.best_step, "loss": progress.best_loss},
        )
        if better:
            self.save()
            if self.saved_step == progress.step and (self.saver.told or not self.saver.under_way):
                progress.best_saved = progress.step  # it was there before the evaluation

    def after_step(self, report: StepReport) -> None:
        """Write down one step, and what it is the occasion for."""
        run, progress = self.run, self.run.progress
        self._tell_saved()
        self._tell_full(report)
        self.pace.add(report)
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            self._warn("far apart", advice.far_apart(self.pace))
        speed, left = self.pace.speed(), self.pace.left()
        progress.epoch_loss += report.loss * report.tokens
        progress.epoch_tokens += report.tokens
        self.profiler.step()
        self._tell_shares()
        self._propose()
        self._tell_step(report, speed, left)
        if epoch_has_ended(run):
            self._end_epoch(report.epoch)
        self._say_how_far(report, speed, left)
        if run.balance.stale and progress.step < run.steps:
            self.calibrate()

    def _tell_step(self, report: StepReport, speed: float, left: float) -> None:
        """Write its line, and what status.json has of the last ones; speed: tokens a second, left: seconds."""
        run, progress = self.run, self.run.progress
        figures = {
            "rank_seconds": report.rank_seconds,
            "rank_compression_seconds": report.rank_compression_seconds,
            "rank_optimizer_seconds": report.rank_optimizer_seconds,
            "rank_memory_peak_bytes": report.rank_memory_peak_bytes,
            "shares": report.shares,
        }
        told = self._tell(
            "train",
            epoch=report.epoch,
            loss=report.loss,
            router_loss=report.router_loss,
            lr=report.lr,
            grad_norm=report.grad_norm,
            tokens=report.tokens,
            tokens_total=progress.tokens,
            tokens_per_second=report.tokens / report.step_seconds,
            mfu=self.pace.mfu(report),
            step_seconds=report.step_seconds,
            compute_seconds=report.compute_seconds,
            comm_seconds=report.comm_seconds,
            wire_bytes=run.strategy.wire_bytes,
            world_size=run.world.size,
            **metrics.by_rank(progress.step, self._steps == 1 or progress.step == run.steps, **figures),
            **machine.memory(run.world.devices),
        )
        self._went.add({**told, **figures})
        self._trend.add(report.loss)
        slowest = max(range(run.world.size), key=report.rank_seconds.__getitem__)
        self.show(
            step=progress.step,
            loss=report.loss,
            tokens_per_second=speed,
            eta_seconds=left,
            shares=report.shares,
            speed_up=self.pace.speed_up(report),
            parts=lambda: {
                **self._went.means(),
                "ranks": run.world.hosts,
                "watched": run.balance.watched,
            },
            losses=self._trend.means,
            compute_seconds=report.rank_seconds,
            slowest={
                "rank": slowest,
                "host": run.world.hosts[slowest],
                "seconds": report.rank_seconds[slowest],
            },
        )

    def _say_how_far(self, report: StepReport, speed: float, left: float) -> None:
        """By the progress bar, or by a line now and then."""
        run, progress = self.run, self.run.progress
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {report.loss:.4f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update(progress.step - self.bar.n)
        elif run.world.first and (now - self._logged >= LOG_EVERY or progress.step == run.steps):
            self._logged = now
            self._say(
                f"step {progress.step}/{run.steps}  loss {report.loss:.4f}  lr {report.lr:.2e}  "
                f"{speed:,.0f} tokens/s  {span(left)} left"
            )

    def calibrate(self) -> None:
        """Try the ranks' memory, and their speeds, which the next step's shares follow, unless these are set.

        All ranks must call.
        """
        balance = self.run.balance
        start = time.perf_counter()
        seconds = calibrate.begin(self.run)
        if not seconds:
            return
        took = time.perf_counter() - start
        shown = ", ".join(f"{one:.2f}" for one in balance.speeds[:16])
        more = ", …" if len(balance.speeds) > 16 else ""
        text = f"the ranks' speeds, tried for {took:.1f} s: {shown}{more} of the fastest one's"
        self._tell("event", event="calibration", reason=text, micro_batch_seconds=seconds)
        if self.run.world.first:
            self._say(text)
        self._tell_shares()

    def _tell_shares(self) -> None:
        """Write down that the next step's shares are others than those told last."""
        balance, before = self.run.balance, self._told_shares
        if not self._told_wants and (text := advice.larger_micro_batches(self.run)):
            self._told_wants = True
            self._advise(text)
        if balance.split == before:
            return
        self._told_shares = balance.split
        self._tell("event", event="shares", shares=balance.split, before=before, expected=balance.expected)
        if self.run.world.first:
            shown = ", ".join(map(str, balance.split[:16])) + (", …" if len(balance.split) > 16 else "")
            self._say(
                f"shares are now {shown}: the slowest rank's part should take {1 / balance.expected:.0%} of its time"
            )

    def _propose(self) -> None:
        """Once an attempt: say whether gradients had better travel another way."""
        self._steps_to_proposal -= 1
        if self._steps_to_proposal != 0:
            return
        self._advise(advice.another_way(self.pace, self._went.means()))

    def _advise(self, text: str | None) -> None:
        """Say what would be faster, if anything."""
        if text:
            self._advice.append(text)
            self._tell("event", event="advice", reason=text)
            if self.run.world.first:
                self._say(text)
        self.show(advice=". ".join(self._advice) or None)

    def _end_epoch(self, epoch: int) -> None:
        """Write the mean loss of the epoch's tokens; a last, unfinished epoch has its line too."""
        progress = self.run.progress
        if progress.epoch_tokens:
            self._tell("epoch", epoch=epoch, loss=progress.epoch_loss / progress.epoch_tokens)
        progress.epoch_loss, progress.epoch_tokens = 0.0, 0

    def save(self) -> None:
        """Begin a checkpoint, once the one before is there; all ranks must call.

        One that cannot be saved is told, and training goes on without: the next one may fit.
        """
        if self.run.progress.step == self.saved_step:
            return  # it may still be under way: nobody waits for it
        before = time.perf_counter()
        self.settle()
        with self._may_fail():
            self._begin(time.perf_counter() - before)
        self._tell_saved()

    def save_last(self) -> None:
        """Have the checkpoint of the last step; all ranks must call. Raises TrainerError on all where it cannot be."""
        self.settle()
        with self._fatal():
            self._begin()
            self.saver.settle()
        self._tell_saved()

    def _begin(self, waited: float = 0.0) -> None:
        """Begin the present step's checkpoint, if there is none; one is not under way.

        waited: seconds that the step has waited for that.
        """
        run, step = self.run, self.run.progress.step
        if step == self.saved_step:
            return
        self.show(state="saving")
        run.strategy.settle()
        self.saved_step, self.saved_at = step, time.monotonic()
        known = facts(run.config, run.progress, self.identity)
        self.saver.save(known, spare=run.progress.best_saved, waited=waited)
        self._saving_bytes = run.strategy.uncounted_bytes
        self._tell_passed_over()
        self.show(state="running")

    def _tell_passed_over(self) -> None:
        """Warn of hosts without room for a copy of the checkpoint under way, which others have instead."""
        text = self.saver.passed_over
        if text == self._warnings.get("room", ""):
            return
        self._warn("room", text)
        if text:
            self._tell("event", event="checkpoint elsewhere", reason=text)
        if self.run.world.first:
            self._say(f"warning: {text}" if text else "there is room for checkpoints again where they belong")

    def held_bytes(self) -> int:
        """What this rank has to say, and its disk has no room for, in bytes."""
        return getattr(self.metrics, "held", 0) + getattr(getattr(sys.stdout, "buffer", None), "held", 0)

    def _tell_full(self, report: StepReport) -> None:
        """Warn of disks without room for what their ranks say, on the others' hosts, too; and say when it is over."""
        hosts = self.run.world.hosts
        full = list(dict.fromkeys(hosts[rank] for rank, held in enumerate(report.rank_held_bytes) if held))
        if full == self._full:
            return
        self._full = full
        text = None
        if full:
            text = (
                f"{', '.join(full)}: no space left for metrics.jsonl, status.json or logs in "
                f"{self.environment.run_dir}; training goes on, and its lines are kept until there is room: free some "
                "space there"
            )
        self._warn("full", text)
        self._tell("event", event="disk full" if full else "disk has room", reason=text)
        if self.run.world.first:
            self._say(f"warning: {text}" if full else "there is room again for what all ranks say")

    def _warn(self, about: str, text: str | None) -> None:
        """Show a warning beside those about other things, or that it is over."""
        self._warnings.pop(about, None)
        if text:
            self._warnings[about] = text
        self.show(warning="; ".join(self._warnings.values()) or None)

    def save_has_failed(self) -> bool:
        """Whether this rank knows that the checkpoint under way will not come to be."""
        return self.saver.failed

    def settle(self) -> None:
        """Wait for the checkpoint under way; all ranks must call."""
        with self._may_fail():
            self.saver.settle()
        self._tell_saved()

    @contextlib.contextmanager
    def _may_fail(self):
        """A save that fails on all ranks alike is told, and no more, unless it is one of too many in a row."""
        try:
            with self._fatal():
                yield
        except TrainerError as failure:
            self._unsaved += 1
            if failure.code != TrainerError.code or self._unsaved >= UNSAVED:
                raise
            self.saved_step = None
            self._tell("event", event="checkpoint failed", reason=str(failure.__cause__))
            if self.run.world.first:
                self._say(f"warning: {failure.__cause__}; training goes on, and the next checkpoint is tried")
            self._warn("checkpoint", str(failure.__cause__))
            self.show(state="running")

    @contextlib.contextmanager
    def _fatal(self):
        """A save whose failure ends the run: what is to be done then."""
        try:
            yield
        except TrainerError as failure:
            if failure.code != TrainerError.code:  # a peer was lost over it
                raise
            text = (
                f"{failure}, then start the run again. It goes on from its last checkpoint, which is intact"
            )
            raise TrainerError(text) from failure

    def _tell_saved(self) -> None:
        """Write down a checkpoint that is now there."""
        saved = self.saver.news()
        if saved is None:
            return
        self._tell(
            "event",
            step=saved.step,
            event="checkpoint",
            path=str(saved.path),
            hosts=saved.hosts,
            copy_seconds=saved.copy_seconds,
            seconds=saved.seconds,
            wire_bytes=self._saving_bytes,
        )
        if self.run.world.first:
            self._say(
                f"saved {saved.path} in {saved.seconds:.1f} s; training waited {saved.copy_seconds:.2f} s"
            )
        self._unsaved = 0
        if saved.step == self.run.progress.best_step:
            self.run.progress.best_saved = saved.step
        self._warn("checkpoint", saved.warning)
        if saved.warning and self.run.world.first:
            self._say(f"warning: {saved.warning}")
        self.show(last_checkpoint=saved.step)

    def _tell(self, kind: str, **record) -> dict:
        """Write one line of metrics.jsonl (on a rank that keeps one), and give it to the sinks; returns it."""
        record = {"kind": kind, "step": self.run.progress.step, **record, "time": time.time()}
        if self.metrics:
            self.metrics.write(record)
        self.sinks.write(record)
        return record

    def _say(self, message: str) -> None:
        """One line for the operator, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.clear()
        log(message)
        if self.bar is not None:
            self.bar.refresh()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """End what watches the run; what it holds back is written."""
        self.profiler.close()
        self.sinks.close(
            "finished"
            if error is None
            else "stopped"
            if isinstance(error, Stopped | KeyboardInterrupt)
            else "failed"
        )
        if self.bar is not None:
            self.bar.close()

    def show(self, **facts) -> None:
        """Bring status.json up to date."""
        if self.status:
            self.status.update(**facts)


def share_history(world: World, own: Metrics | None) -> None:
    """Give hosts that were not there for all steps so far the metrics of one that was; all ranks must call.

    own: cut back to the step that the run goes on from; None on ranks that write none.
    So the loss of any host, the first one too, loses none of the run's history. Of two starts of the run that went on
    apart, the later one's counts.
    """
    known = ["", 0]  # as a message brings it
    for one in map(json.loads, own.lines() if own else ()):
        known = [max(known[0], one.get("launch") or ""), known[1] + (one["kind"] == "train")]
    counts = world.gather(known)
    most = max(counts)
    if all(counts[rank] == most for rank in world.keepers):
        return
    source = counts.index(most)
    data = torch.empty(0, dtype=torch.uint8)
    if world.rank == source:
        data = torch.frombuffer(bytearray(b"".join(own.lines())), dtype=torch.uint8)
    size = world.share(len(data), source)
    if world.rank != source:
        data = torch.empty(size, dtype=torch.uint8)
    world.broadcast(data, source)
    if own and known < most:
        own.replace(data.numpy().tobytes())


def _bar(run: Run) -> tqdm | None:
    """A progress bar where the run was started by hand, at a terminal; its log lines stand above it."""
    by_hand = run.world.first and "TRAINYARD_LAUNCHER" not in os.environ
    if not (by_hand and sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    file = getattr(sys.stderr, "terminal", sys.stderr)  # and not a log beside it
    return tqdm(total=run.steps, initial=run.progress.step, unit=" steps", dynamic_ncols=True, file=file)


def facts(config: Config, progress: Progress, identity: dict) -> dict:
    """What a manifest says of the run."""
    known = dataclasses.asdict(progress)
    return {
        "step": progress.step,
        **{name: known.pop(name) for name in APART},
        # Where there is a manifest, there is its checkpoint.
        "best_saved": progress.step if progress.step == progress.best_step else progress.best_saved,
        "progress": known,
        "identity": identity,
        "settings": dataclasses.asdict(config),
    }


def progress_in(manifest: dict) -> Progress:
    """How far the run was, by a checkpoint's manifest."""
    # What was due before its step was noted had been done before a checkpoint was begun.
    apart = {"launch": "", "evaluated_step": manifest["step"], "held_out": None}
    apart["best_saved"] = manifest["progress"]["best_step"]
    return Progress(**manifest["progress"], **{name: manifest.get(name, apart[name]) for name in APART})


def hosts(world: World) -> dict:
    """The run's members, for a summary."""
    return {"size": world.size, "hosts": list(dict.fromkeys(world.hosts)), "device": str(world.device)}
