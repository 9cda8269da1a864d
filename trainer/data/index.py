"""Which sequences a step trains on: a pure function of the seed and of how many samples came before.

So it is the same at any world size, and a resumed run goes on with the sample after its last.

- One set, or several without weights: sample number i of the run is sequence `shuffled(i mod n)` of all n, in an
  order of its own each epoch: an epoch is every sequence once.
- With weights: of each BLOCK samples every set has its share, to the rounding, in shuffled order; a set's own samples
  go through all its sequences before one comes again. An epoch is still n samples, n being the sequences of all
  sets: a set with more weight than size comes more often than once, another not wholly.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence

from trainer.config import Config

BLOCK = 1000  # samples in which the shares of the sets are exact
WORD = (1 << 64) - 1


class Index:
    """The order of the samples.

    sequences: how many there are, of one set or of each. weights: relative shares of the sets; none: all are one.
    """

    def __init__(self, seed: int, sequences: int | Sequence[int], weights: Sequence[float] = ()):
        self.seed = seed
        self.sizes = [sequences] if isinstance(sequences, int) else list(sequences)
        self.sequences = sum(self.sizes)
        self.shares = _shares(weights)
        self._block = functools.lru_cache(maxsize=2)(self._lay_block)

    def sequence(self, sample: int) -> int:
        """The sequence that is sample number `sample`."""
        if not self.shares:
            epoch, position = divmod(sample, self.sequences)
            return shuffled(_hash(self.seed, epoch), position, self.sequences)
        block, position = divmod(sample, BLOCK)
        number, before = self._block(block)[position]
        epoch, position = divmod(block * self.shares[number] + before, self.sizes[number])
        first = sum(self.sizes[:number])
        return first + shuffled(_hash(self.seed, epoch, number, BLOCK), position, self.sizes[number])

    def _lay_block(self, block: int) -> list[tuple[int, int]]:
        """Of each of BLOCK samples its set, and how many of the same set come before it in the block."""
        ends = list(itertools.accumulate(self.shares))
        key = _hash(self.seed, block, BLOCK)
        sets = [bisect.bisect_right(ends, shuffled(key, position, BLOCK)) for position in range(BLOCK)]
        counts = [itertools.count() for _ in self.shares]
        return [(number, next(counts[number])) for number in sets]

    def batch(self, cursor: int, size: int) -> list[int]:
        """The sequences of `size` samples, after `cursor` samples of the run."""
        return [self.sequence(sample) for sample in range(cursor, cursor + size)]


def last_step(config: Config, sequences: int, step: int = 0, cursor: int = 0) -> int:
    """The number of the run's last step, when `step` steps and `cursor` samples are done."""
    epochs = config.epochs if config.epochs or config.steps else 1.0
    if not epochs:
        return config.steps
    samples = math.ceil(epochs * sequences)
    samples -= (samples - 1) / sequences >= epochs  # 0.07 * 100 is more than 7, by the last of its bits
    by_epochs = step + max(0, math.ceil((samples - cursor) / config.batch_size))
    return min(by_epochs, config.steps or by_epochs)


def shuffled(key: int, position: int, size: int) -> int:
    """Where the permutation of range(size) that `key` chooses sends `position`.

    A Feistel network over the next power of four, walked until it is below `size`: it needs no memory, however
    large the data is, and no library whose random numbers may change.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(6):
            left, right = right, left ^ (_mixed(key + (right << 3) + turn) & mask)
        position = left << half | right
        if position < size:
            return position


def chosen(seed: int, number: int, fraction: float) -> bool:
    """Whether sample `number` of a set is one of the `fraction` that is held out."""
    return _hash(seed, number, 2) < fraction * (WORD + 1)


def _shares(weights: Sequence[float]) -> list[int]:
    """How many of BLOCK samples each set has: the rounded weights, the largest remainders rounded up."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: shares[n] - exact[n])
    for n in by_remainder[: BLOCK - sum(shares) if weights else 0]:
        shares[n] += 1
    return shares


def _hash(*words: int) -> int:
    return functools.reduce(lambda state, word: _mixed(state ^ (word & WORD)), words, 0x9E3779B97F4A7C15)


def _mixed(word: int) -> int:
    """64 bits to 64 well-mixed ones (splitmix64's finaliser)."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
