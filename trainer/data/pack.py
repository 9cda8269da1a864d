"""Documents to packed sequences, in a memory-mapped cache.

All documents, each followed by the end-of-text token, make one stream of tokens. Sequence k reads tokens k*S to k*S+S-1
and predicts tokens k*S+1 to k*S+S, so that no token is dropped and each is predicted once; except a
document's first one, which no other document can foretell. Positions begin anew at every document (and
sequence): that is what keeps attention within a document.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import shutil
from array import array
from pathlib import Path

import numpy as np

from trainer import disk
from trainer.config import Config
from trainer.data import read
from trainer.errors import BadInput, TrainerError

IGNORE = -100  # the label of a position without a loss
BATCH = 1 << 20  # characters tokenised at once


class Packed:
    """The packed sequences of a dataset; a view of the cache.

    tokens: (T,) uint32, the stream. starts: (D,) int64, where each document begins. valid: (N,) int64, how
    many tokens of each sequence carry a loss.
    """

    def __init__(self, directory: Path, sequence_length: int, pad_id: int):
        facts = json.loads((directory / "facts.json").read_text())
        self.length, self.pad_id = sequence_length, pad_id
        self.documents, self.largest_id = facts["documents"], facts["largest_id"]
        self.unigram_entropy = facts["unigram_entropy"]
        self.tokens = np.memmap(directory / "tokens.bin", dtype=np.uint32, mode="r")
        self.starts = np.memmap(directory / "starts.bin", dtype=np.int64, mode="r")
        total = len(self.tokens)
        edges = np.minimum(np.arange(0, total - 1 + sequence_length, sequence_length), total - 1)
        first_tokens = np.searchsorted(
            self.starts, edges, side="right"
        )  # documents that begin up to each edge
        self.valid = np.diff(edges) - np.diff(first_tokens)

    def __len__(self) -> int:
        return len(self.valid)

    def __getitem__(self, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sequence k: inputs, labels, positions; each (sequence_length,) int64.

        Labels without a loss are IGNORE.
        """
        begin = k * self.length
        window = np.asarray(self.tokens[begin : begin + self.length + 1], dtype=np.int64)
        count = len(window) - 1
        inputs = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORE, dtype=np.int64)
        inputs[:count], labels[:count] = window[:-1], window[1:]

        low, high = np.searchsorted(self.starts, [begin + 1, begin + count + 1])
        starts = np.asarray(self.starts[low:high]) - begin  # in the window, its first token left out
        labels[starts - 1] = IGNORE
        position = np.arange(self.length, dtype=np.int64)
        origin = np.zeros(self.length, dtype=np.int64)
        inner = np.append(starts, count)  # the padding is a document of its own
        inner = inner[inner < self.length]
        origin[inner] = inner
        return inputs, labels, position - np.maximum.accumulate(origin)


def prepare(config: Config, data_digest: str, tokenizer, cache_dir: Path) -> Packed:
    """The packed dataset, from the cache. The host's first rank to come tokenises it, while the others wait."""
    tokenizer_digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    name = hashlib.sha256(f"4 {data_digest} {tokenizer_digest}".encode()).hexdigest()[:32]
    directory = cache_dir / name
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{name}.lock"):
            if not (directory / "facts.json").exists():
                _tokenise(config, tokenizer, directory)
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "make it writable for the run's user"
        raise TrainerError(f"{cache_dir}: cannot hold the tokenised data: {error.strerror}; {cure}") from None
    return Packed(directory, config.sequence_length, tokenizer.pad_token_id)


def _tokenise(config: Config, tokenizer, directory: Path) -> None:
    """Write tokens.bin, starts.bin and facts.json; the directory appears complete or not at all."""
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    total = largest = 0
    starts = array("q")
    at_start = True
    with (temporary / "tokens.bin").open("wb") as file:
        for batch in _batches(read.samples(config)):
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(
                [text for text, _ in batch], add_special_tokens=False
            )
            for encoding, (_, ends) in zip(encoded, batch, strict=True):
                ids = encoding.ids + [tokenizer.eos_token_id] * ends
                if at_start:
                    starts.append(total)
                np.asarray(ids, dtype=np.uint32).tofile(file)
                total += len(ids)
                largest = max(largest, max(ids, default=0))
                at_start = ends
    if total < 2:
        raise BadInput(f"dataset: {config.dataset}: {total} tokens are too few to learn from; give more text")
    (temporary / "starts.bin").write_bytes(starts.tobytes())
    facts = {"documents": len(starts), "tokens": total, "largest_id": largest}
    facts["unigram_entropy"] = _entropy(np.memmap(temporary / "tokens.bin", dtype=np.uint32, mode="r"))
    (temporary / "facts.json").write_text(json.dumps(facts))
    disk.publish(temporary, directory)


def _entropy(tokens: np.ndarray) -> float:
    """The entropy of the frequencies of tokens (T,), in nats; by pieces, as T may not fit into memory."""
    counts = np.zeros(int(tokens.max()) + 1, dtype=np.int64)
    for begin in range(0, len(tokens), BATCH):
        counts += np.bincount(tokens[begin : begin + BATCH], minlength=len(counts))
    frequencies = counts[counts > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())


def _batches(samples):
    """Group samples into lists of about BATCH characters."""
    batch, size = [], 0
    for sample in samples:
        batch.append(sample)
        size += len(sample[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _locked(path: Path):
    """Hold an exclusive lock between the processes of this host; it ends with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
