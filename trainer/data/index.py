"""Which sequences a step trains on: a pure function of the seed and of how many samples came before."""

import functools
import math

import numpy as np

from trainer.config import Config


class Index:
    """Sample number i of the run is sequence `permutation(seed, i // n)[i % n]` of the dataset's n."""

    def __init__(self, seed: int, sequences: int):
        self.seed, self.sequences = seed, sequences
        self._permutation = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.sequences)

    def sequence(self, sample: int) -> int:
        """The sequence that is sample number `sample`."""
        epoch, position = divmod(sample, self.sequences)
        return int(self._permutation(epoch)[position])

    def batch(self, cursor: int, size: int) -> list[int]:
        """The sequences of `size` samples, after `cursor` samples of the run."""
        return [self.sequence(sample) for sample in range(cursor, cursor + size)]


def last_step(config: Config, sequences: int, step: int = 0, cursor: int = 0) -> int:
    """The number of the run's last step, when `step` steps and `cursor` samples are done."""
    epochs = config.epochs if config.epochs or config.steps else 1.0
    if not epochs:
        return config.steps
    remaining = math.ceil(epochs * sequences) - cursor
    by_epochs = step + max(0, math.ceil(remaining / config.batch_size))
    return min(by_epochs, config.steps or by_epochs)
