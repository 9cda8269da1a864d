"""Documents to packed sequences; a view of the token cache.

With `overlong: split` all documents of a set make one stream: sequence k reads tokens k*S to k*S+S-1 and predicts
tokens k*S+1 to k*S+S. With cut and refuse every record stays whole within a sequence, and sequences are filled with
the records that fit best. Either way no token is dropped (but by cut, which counts them) and each is predicted once,
except a document's first one, which no other document can foretell. Positions begin anew at every document (and
sequence): that is what keeps attention within a document.

With `packing: false` each document, or each part of one that is longer, has a sequence of its own, and the rest of that
is padding, of which a step computes as much as its longest document wants. A part without a loss is left out.
"""

import bisect
import hashlib
import itertools
import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.config import Config
from trainer.data import cache, chat, read

IGNORE = -100  # the label of a position without a loss
WINDOW = 4096  # documents among which those that fill a sequence best are looked for
TOGETHER = 1 << 20  # tokens whose losses are counted at once
STRIDE = 64  # widths that are no multiple of it would be too many: each is memory of its own size


class Packed:
    """The packed sequences of one or several sets, numbered through.

    sizes: sequences of each set. valid: (N,) int64, how many tokens of each sequence carry a loss.
    token_count, documents, longer, shortened, dropped: how many there are, are longer than a sequence, were cut, and
    how many tokens that took. unread: fields of the records that hold something and are not read. kept: tokens of the
    sequences, without parts that teach nothing. unigram_entropy: of the tokens with a loss, by the sets' weights, in
    nats. digest: a hash of all that `packed[k]` can give.
    """

    def __init__(self, sets: list["_Set"], weights: Sequence[float], cache_dir: Path):
        self._sets = sets
        self.length = sets[0].length
        self.sizes = [len(one) for one in sets]
        self.weights = list(weights)
        self._ends = np.cumsum(self.sizes)
        facts = [one.facts for one in sets]
        self.token_count = sum(one["tokens"] for one in facts)
        self.documents = sum(one["documents"] for one in facts)
        self.longer = sum(one["longer"] for one in facts)
        self.shortened = sum(one["shortened"] for one in facts)
        self.dropped = sum(one["dropped"] for one in facts)
        self.unread = list(dict.fromkeys(itertools.chain(*(one.get("unread", ()) for one in facts))))
        self.kept = sum(one.get("kept", one["tokens"]) for one in facts)
        self.largest_id = max(one["largest_id"] for one in facts)
        self.unigram_entropy = _entropy([one.counts for one in sets], weights)
        self.layout = sets[0].layout
        how = "alone" if self.layout == "alone" else self.layout == "whole"  # as earlier releases wrote it
        whole = [[one["digest"] for one in facts], self.sizes, self.weights, how]
        self.digest = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
        self.valid = (
            sets[0].valid
            if len(sets) == 1
            else _joined(sets, cache_dir / f"sets-{self.digest[:32]}-{self.length}")
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sequence k: inputs, labels, positions; each (sequence_length,) int64.

        Labels without a loss are IGNORE.
        """
        one, k = self._at(k)
        return one[k]

    def _at(self, k: int) -> tuple["_Set", int]:
        """The set that has sequence k, and which of its own that is."""
        number = int(np.searchsorted(self._ends, k, side="right"))
        return self._sets[number], k - (int(self._ends[number - 1]) if number else 0)

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        """How many tokens each of these has before its padding; packed ones count as full."""
        if self.layout != "alone":
            return [self.length] * len(sequences)
        return [one.tokens_of(k) for one, k in map(self._at, sequences)]

    def width(self, sequences: Sequence[int]) -> int:
        """Tokens of a sequence that are to be computed where these are computed together: what is beyond is padding."""
        if self._sets[0].fixed_width:
            return self.length
        return min(self.length, -(-max(self.lengths(sequences)) // STRIDE) * STRIDE)


def prepare(
    config: Config, digests: list[str], tokenizer, cache_dir: Path, tell: cache.Tell = lambda words: None
) -> tuple[Packed, Packed | None]:
    """The training set and the held-out one, from the cache; tokenised now where they are not in it.

    digests: those of `read.digests`. tell: called with words on how far that is, now and then. The tokenizer gets a
    chat template where instruction records need one.
    """
    training, validation = read.training(config), read.validation(config)
    everything = [*training, *filter(None, [validation])]
    kinds = {read.kind(one, config) for one in everything}
    read.answers_exist(kinds, config)
    chat.settle_template(tokenizer, kinds, config.model)
    folders = [
        cache.directory(config, dataset, digest, tokenizer, cache_dir, tell)
        for dataset, digest in zip(everything, digests, strict=True)
    ]

    def packed(parts: list[Path], weights: Sequence[float] = ()) -> Packed:
        return Packed([_Set(part, config, tokenizer.pad_token_id) for part in parts], weights, cache_dir)

    weights = read.weights(config)
    train = packed([folder / "train" for folder in folders[: len(training)]], weights)
    if validation:
        return train, packed([folders[-1] / "train"])
    if config.validation_split:
        return train, packed([folder / "held_out" for folder in folders], weights)
    return train, None


class _Set:
    """One part of the cache in sequences."""

    def __init__(self, part: Path, config: Config, pad_id: int):
        self.length, self.pad_id = config.sequence_length, pad_id
        self.facts = json.loads((part / "facts.json").read_text())
        self.counts = np.fromfile(part / "counts.bin", dtype=np.int64)
        self._maps: list[mmap.mmap] = []
        self._reads = 0
        self.tokens = self._mapped(part / "tokens.bin", np.uint32)
        self.starts = self._mapped(part / "starts.bin", np.int64)
        self.loss = self._mapped(part / "loss.bin", np.uint8)
        lays = {"stream": self._lay_stream, "whole": self._lay_whole, "alone": self._lay_alone}
        self.layout = "stream" if config.overlong == "split" else "whole"
        if not config.packing:
            self.layout = "alone"
        # What is compiled for one width would be compiled anew for another.
        self.fixed_width = config.packing or config.compile or config.attention == "flex_attention"
        layout = cache.made(part / f"{self.layout}-{self.length}", lays[self.layout])
        self.facts |= json.loads((layout / "facts.json").read_text())
        self.valid = self._mapped(layout / "valid.bin", np.int64)
        if self.layout != "stream":
            self.pieces = self._mapped(layout / "pieces.bin", np.int64).reshape(-1, 2)
        if self.layout == "whole":
            self.edges = self._mapped(layout / "edges.bin", np.int64)

    def __len__(self) -> int:
        return len(self.valid)

    def __getitem__(self, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORE, dtype=np.int64)
        positions = np.empty(self.length, dtype=np.int64)
        at = 0
        for begin, end in self._pieces_of(k):
            count = end - begin
            inputs[at : at + count] = self.tokens[begin:end]
            following = self.tokens[begin + 1 : end + 1].astype(np.int64)
            carries = self._carries(begin + 1, end + 1)
            labels[at : at + len(following)] = np.where(carries, following, IGNORE)
            positions[at : at + count] = np.arange(count)
            at += count
        positions[at:] = np.arange(self.length - at)  # the padding is a document of its own
        self._forget()
        return inputs, labels, positions

    def tokens_of(self, k: int) -> int:
        """Tokens of sequence k before its padding."""
        return sum(end - begin for begin, end in self._pieces_of(k))

    def _pieces_of(self, k: int) -> list[tuple[int, int]]:
        """The documents, or parts of such, of sequence k, as [begin, end) in the stream."""
        if self.layout == "whole":
            return self.pieces[self.edges[k] : self.edges[k + 1]].tolist()
        if self.layout == "alone":
            return [self.pieces[k].tolist()]
        begin = k * self.length
        end = min(begin + self.length, len(self.tokens) - 1)
        low, high = np.searchsorted(self.starts, [begin + 1, end])
        cuts = [begin, *self.starts[low:high].tolist(), end]
        return list(itertools.pairwise(cuts))

    def _carries(self, begin: int, end: int) -> np.ndarray:
        """Whether tokens [begin, end) carry a loss; shorter at the stream's end."""
        end = min(end, len(self.tokens))
        bits = np.unpackbits(self.loss[begin // 8 : (end + 7) // 8], bitorder="little")
        return bits[begin % 8 : begin % 8 + end - begin].astype(bool)

    def _lay_stream(self, folder: Path) -> None:
        """Write valid.bin: the tokens with a loss that each sequence of the stream predicts."""
        last = len(self.tokens) - 1
        step = max(1, TOGETHER // self.length) * self.length
        with (folder / "valid.bin").open("wb") as file:
            for begin in range(0, last, step):
                carries = self._carries(begin + 1, min(begin + step, last) + 1)
                edges = np.arange(0, len(carries), self.length)
                np.add.reduceat(carries, edges, dtype=np.int64).tofile(file)
                self._forget(now=True)
        self._write_facts(folder)

    def _lay_whole(self, folder: Path) -> None:
        """Write pieces.bin (begin, end), edges.bin (the first piece of each sequence, and the end) and valid.bin."""
        pieces_before = 0
        with (
            (folder / "pieces.bin").open("wb") as pieces_file,
            (folder / "edges.bin").open("wb") as edges_file,
            (folder / "valid.bin").open("wb") as valid_file,
        ):
            np.zeros(1, dtype=np.int64).tofile(edges_file)
            for first in range(0, len(self.starts), WINDOW):
                bounds = [*self.starts[first : first + WINDOW + 1].tolist(), len(self.tokens)][: WINDOW + 1]
                pieces = [
                    (at, min(at + self.length, end))
                    for begin, end in itertools.pairwise(bounds)
                    for at in range(begin, end, self.length)
                ]
                sequences = best_fit([end - begin for begin, end in pieces], self.length)
                inside = [[pieces[n] for n in sequence] for sequence in sequences]
                np.array([piece for one in inside for piece in one], dtype=np.int64).tofile(pieces_file)
                edges = pieces_before + np.cumsum([len(one) for one in inside])
                edges.astype(np.int64).tofile(edges_file)
                pieces_before = int(edges[-1])
                valid = [sum(int(self._carries(b + 1, e + 1).sum()) for b, e in one) for one in inside]
                np.array(valid, dtype=np.int64).tofile(valid_file)
                self._forget(now=True)
        self._write_facts(folder)

    def _lay_alone(self, folder: Path) -> None:
        """Write pieces.bin and valid.bin, a piece a sequence: those of which something is learnt."""
        step, kept = max(1, TOGETHER // self.length) * self.length, 0
        with (
            (folder / "pieces.bin").open("wb") as pieces_file,
            (folder / "valid.bin").open("wb") as valid_file,
        ):
            for first in range(0, len(self.starts), WINDOW):
                bounds = [*self.starts[first : first + WINDOW + 1].tolist(), len(self.tokens)][: WINDOW + 1]
                for begin, end in itertools.pairwise(bounds):
                    for at in range(
                        begin, end, step
                    ):  # of a running text's document, which may be all there is
                        begins = np.arange(at, min(at + step, end), self.length)
                        ends = np.minimum(begins + self.length, end)
                        carries = self._carries(at + 1, int(ends[-1]) + 1)
                        sums = np.concatenate([[0], np.cumsum(carries, dtype=np.int64)])
                        valid = sums[np.minimum(ends - at, len(carries))] - sums[begins - at]
                        pieces = np.stack([begins, ends], 1)[valid > 0]
                        kept += int((pieces[:, 1] - pieces[:, 0]).sum())
                        pieces.tofile(pieces_file)
                        valid[valid > 0].tofile(valid_file)
                self._forget(now=True)
        self._write_facts(folder, kept=kept)

    def _write_facts(self, folder: Path, **more: int) -> None:
        longer = 0
        for first in range(0, len(self.starts), TOGETHER):
            bounds = np.append(self.starts[first : first + TOGETHER + 1], len(self.tokens))[: TOGETHER + 1]
            longer += int((np.diff(bounds) > self.length).sum())
        (folder / "facts.json").write_text(json.dumps({"longer": longer, **more}))

    def _mapped(self, path: Path, kind: type) -> np.ndarray:
        with path.open("rb") as file:
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return np.frombuffer(self._maps[-1], dtype=kind)

    def _forget(self, now: bool = False) -> None:
        """Let go of the pages that were read: they stay in the system's cache, and no longer count as ours."""
        self._reads += 1
        if now or self._reads % 64 == 0:
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Fill bins of `room` with items of these lengths, each 1 to `room`: the longest first, each into the fullest
    bin that takes it. Returns the items' numbers by bin.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, bin), ascending
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect.bisect_left(left, (lengths[n], -1))
        if place == len(left):
            bins.append([n])
            rest, number = room - lengths[n], len(bins) - 1
        else:
            rest, number = left.pop(place)
            rest -= lengths[n]
            bins[number].append(n)
        if rest:
            bisect.insort(left, (rest, number))
    return bins


def _entropy(counts: list[np.ndarray], weights: Sequence[float]) -> float:
    """The entropy of the tokens' frequencies, of sets taken together or by weights, in nats."""
    total = np.zeros(max(len(one) for one in counts))
    for n, one in enumerate(counts):
        total[: len(one)] += one * (weights[n] / one.sum() if weights else 1)
    frequencies = total[total > 0] / total.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def _joined(sets: list[_Set], folder: Path) -> np.ndarray:
    """The sets' `valid`, one after the other, mapped from a file of the cache."""

    def make(temporary: Path) -> None:
        with (temporary / "valid.bin").open("wb") as file:
            for one in sets:
                one.valid.tofile(file)

    return np.memmap(cache.made(folder, make) / "valid.bin", dtype=np.int64, mode="r")
