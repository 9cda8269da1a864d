"""torch's profiler over some steps, on request."""

from pathlib import Path

import torch

from trainer.world import log

SKIPPED = (
    2  # first steps, in which torch loads and tunes its kernels; the profiler warms up in the last of them
)


class Profiler:
    """Traces `steps` steps of this rank, from the third on, into `run_dir`/profile/rank-N.json.gz; 0: none."""

    def __init__(self, steps: int, run_dir: Path, rank: int):
        self.path = run_dir / "profile" / f"rank-{rank}.json.gz"
        self._profiler = None
        if steps:
            self._profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(
                    wait=SKIPPED - 1, warmup=1, active=steps, repeat=1, skip_first=0
                ),
                on_trace_ready=self._write,
                profile_memory=True,
            )
            self._profiler.start()

    def step(self) -> None:
        """A step has ended."""
        if self._profiler:
            self._profiler.step()

    def close(self) -> None:
        """Write what there is, if the run ends before the last of the steps."""
        if self._profiler:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
            log(f"profile in {self.path}; open it in Perfetto or chrome://tracing")
        except OSError as error:
            log(f"warning: {self.path}: the profile cannot be written: {error}; the run goes on")
