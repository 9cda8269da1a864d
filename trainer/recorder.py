"""What happens around the steps: metrics, status, log lines, checkpoints, and requests to stop."""

import dataclasses
import resource
import time

import torch

from trainer import checkpoint
from trainer.config import Config
from trainer.environment import StopSignal
from trainer.loop import Progress, Run, StepReport
from trainer.metrics import Metrics, Status
from trainer.world import World, log

LOG_EVERY = 10.0  # seconds between lines in the log


class Recorder:
    """The loop's observer. Writes files on the first rank of each host; logs on rank 0."""

    def __init__(self, run: Run, tokenizer, identity: dict, status: Status | None, stop_signal: StopSignal):
        self.run, self.tokenizer, self.identity, self.status = run, tokenizer, identity, status
        self.environment = run.world.environment
        self.stop_signal = stop_signal
        self.metrics = (
            Metrics(self.environment.run_dir, run.progress.step) if run.world.first_on_host else None
        )
        self.saved_step = run.progress.step
        self._seconds = 0.0  # a step's, smoothed
        self._logged = 0.0
        resumed = {"last_checkpoint": run.progress.step} if run.progress.step else {}
        self.show(state="running", step=run.progress.step, steps=run.steps, **resumed)

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked: by a signal, or by the stop file on its host."""
        return self.stop_signal.received or (
            self.run.world.first_on_host and self.environment.stop_file.exists()
        )

    def after_step(self, report: StepReport) -> None:
        """Write down one step."""
        run, progress = self.run, self.run.progress
        self._seconds = (
            0.9 * self._seconds + 0.1 * report.step_seconds if self._seconds else report.step_seconds
        )
        speed = report.tokens / self._seconds
        eta = (run.steps - progress.step) * self._seconds
        slowest = max(range(run.world.size), key=report.rank_seconds.__getitem__)
        progress.epoch_loss += report.loss * report.tokens
        progress.epoch_tokens += report.tokens
        if self.metrics:
            self.metrics.write(
                "train",
                step=progress.step,
                epoch=report.epoch,
                loss=report.loss,
                lr=report.lr,
                grad_norm=report.grad_norm,
                tokens=report.tokens,
                tokens_total=progress.tokens,
                tokens_per_second=report.tokens / report.step_seconds,
                step_seconds=report.step_seconds,
                compute_seconds=report.compute_seconds,
                comm_seconds=report.comm_seconds,
                wire_bytes=run.strategy.wire_bytes,
                world_size=run.world.size,
                shares=report.shares,
                **memory(run.world.device),
            )
        self.show(
            step=progress.step,
            loss=report.loss,
            tokens_per_second=speed,
            eta_seconds=eta,
            compute_seconds=report.rank_seconds,
            slowest={
                "rank": slowest,
                "host": run.world.hosts[slowest],
                "seconds": report.rank_seconds[slowest],
            },
        )
        if progress.cursor // run.index.sequences > report.epoch or progress.step == run.steps:
            self._end_epoch(report.epoch)
        now = time.monotonic()
        if run.world.first and (now - self._logged >= LOG_EVERY or progress.step == run.steps):
            self._logged = now
            log(
                f"step {progress.step}/{run.steps}  loss {report.loss:.4f}  lr {report.lr:.2e}  "
                f"{speed:,.0f} tokens/s  {eta:.0f} s left"
            )

    def _end_epoch(self, epoch: int) -> None:
        """Write the mean loss of the epoch's tokens; a last, unfinished epoch has its line too."""
        progress = self.run.progress
        if self.metrics and progress.epoch_tokens:
            mean = progress.epoch_loss / progress.epoch_tokens
            self.metrics.write("epoch", epoch=epoch, step=progress.step, loss=mean)
        progress.epoch_loss, progress.epoch_tokens = 0.0, 0

    def save(self) -> None:
        """Write a checkpoint; all ranks must call."""
        run, step = self.run, self.run.progress.step
        if step == self.saved_step:
            return
        self.show(state="saving")
        begin = time.perf_counter()
        path = checkpoint.save(
            self.environment.run_dir,
            run.world,
            run.strategy.model,
            run.optimizer,
            self.tokenizer,
            facts(run.config, run.progress, self.identity),
            run.config.checkpoint_keep,
        )
        self.saved_step = step
        seconds = time.perf_counter() - begin
        if self.metrics:
            self.metrics.write("event", step=step, event="checkpoint", path=str(path), seconds=seconds)
        if run.world.first:
            log(f"saved {path} in {seconds:.1f} s")
        self.show(state="running", last_checkpoint=step)

    def show(self, **facts) -> None:
        """Bring status.json up to date."""
        if self.status:
            self.status.update(**facts)


def facts(config: Config, progress: Progress, identity: dict) -> dict:
    """What a manifest says of the run."""
    return {
        "step": progress.step,
        "progress": dataclasses.asdict(progress),
        "identity": identity,
        "settings": dataclasses.asdict(config),
    }


def memory(device: torch.device) -> dict:
    """This rank's memory in bytes: the accelerator's, or the process's where it computes on the CPU."""
    if device.type == "cuda":
        return {
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {
        "memory_allocated_bytes": resident,
        "memory_reserved_bytes": None,
        "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def hosts(world: World) -> dict:
    """The run's members, for a summary."""
    return {"size": world.size, "hosts": list(dict.fromkeys(world.hosts)), "device": str(world.device)}
