"""How long some of what a rank does takes, without waiting for its GPU."""

import time

import torch


class Clock:
    """Counts the seconds of its `with` blocks; a GPU's are those of its own stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self._spans: list[tuple] = []

    def __enter__(self) -> None:
        self._begin = self._mark()

    def __exit__(self, *_) -> None:
        self._spans.append((self._begin, self._mark()))

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def take(self) -> float:
        """Seconds since the last call; by now the stream must have done what it was given."""
        spans, self._spans = self._spans, []
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1000
