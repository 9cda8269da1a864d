"""Samples to tokens on disk, once: a directory named by the content and by every setting that has a say in it.

A part (the training or the held-out documents of a set) is `tokens.bin` (uint32), `starts.bin` (int64, where
documents begin), `loss.bin` (a bit a token, lowest first: whether it is to be predicted; a document's first token
never is), `counts.bin` (int64, how often each id is to be predicted) and `facts.json`.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer import disk, waiting
from trainer.config import Config
from trainer.data import files, index, read
from trainer.data.chat import Renderer, first_token
from trainer.data.exchange import TODAY, Span
from trainer.data.records import Sample
from trainer.errors import BadInput, TrainerError
from trainer.words import span

VERSION = 6  # of what is written here
BATCH = 1 << 20  # characters tokenised, or tokens written, at once
PIECE = 1 << 16  # characters of a running text that are tokenised as one
Tell = Callable[[str], None]
NAMED = 5  # overlong documents that a refusal names


def directory(
    config: Config,
    dataset: read.Dataset,
    digest: str,
    tokenizer,
    cache_dir: Path,
    tell: Tell = lambda words: None,
) -> Path:
    """Where the set's tokens are, in `train` and, with a validation_split, `held_out`; made if they are not.

    The host's first process to come tokenises, while the others wait. tell: called with words on how far it is.
    """
    settings = {
        "version": VERSION,
        "data": digest,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "template": tokenizer.chat_template,
        "loss_on": config.loss_on,
        "overlong": config.overlong,
        "sequence_length": config.sequence_length if config.overlong != "split" else None,
        "held_out": [config.validation_split, config.seed] if _splits(config, dataset) else None,
    }
    # What came to change only some data's tokens is named only there: all other data keeps its place.
    if read.kind(dataset, config) == "chat":
        settings["calls"] = "whole, as the template takes them"
    if read.kind(dataset, config) != "text":
        settings["records"] = "with what stands beside, by all its names"
    if read.kind(dataset, config) != "text" and re.search("think|reason", str(tokenizer.chat_template)):
        settings["thoughts"] = "where the template has them"
    if any(path.suffix == ".txt" for path in dataset.files):
        backend = _placing(tokenizer)
        if _marks_beginnings(backend):
            settings["paragraphs"] = "as in the whole text"
        if _looks_ahead(backend):
            settings["paragraph_ends"] = "as in the whole text"
    placed = config.loss_on == "answers" and read.kind(dataset, config) != "text"
    if (placed or "paragraphs" in settings) and _trims(tokenizer):
        settings["spaces"] = "in their place"
    if "strftime_now" in str(tokenizer.chat_template):
        settings["today"] = str(TODAY)
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    return made(cache_dir / name, lambda temporary: _tokenise(config, dataset, tokenizer, temporary, tell))


def made(final: Path, make) -> Path:
    """The directory `final`, which `make(directory)` fills once; it appears complete or not at all."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(final.name + ".lock")):
            if not final.exists():
                temporary = final.with_name(final.name + ".tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                try:
                    # On a server's disk what another host has just made may be seen only now, since the folder changed.
                    if final.exists():
                        temporary.rmdir()
                        return final
                    make(temporary)
                    disk.publish(temporary, final)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "make it writable for the run's user"
        raise TrainerError(
            f"{final.parent}: cannot hold the tokenised data: {error.strerror}; {cure}"
        ) from None
    return final


def _splits(config: Config, dataset: read.Dataset) -> bool:
    return bool(config.validation_split) and dataset.key == "dataset"


def _tokenise(config: Config, dataset: read.Dataset, tokenizer, folder: Path, tell: Tell) -> None:
    """Write the set's parts below `folder`."""
    progress = _Progress(dataset, tell)
    splits = _splits(config, dataset)
    parts = {side: _Part(folder / side) for side in (("train", "held_out") if splits else ("train",))}
    encode = _Encoder(config, tokenizer)
    begin = np.array(first_token(tokenizer), dtype=np.int64)
    limit = config.sequence_length if config.overlong != "split" else None
    number = 0
    overlong: list[str] = []
    unread: dict[str, None] = {}
    too_long = 0
    placed = _placed(read.samples(dataset, config, unread), config, splits)
    for batch in _batches(_joined(placed) if encode.looks_ahead else placed):
        for (sample, side, starts, _), (ids, loss) in zip(batch, encode(batch), strict=True):
            if starts and sample.messages is None:
                ids, loss = np.concatenate([begin, ids]), np.concatenate([begin > 0, loss])
            if limit and len(ids) > limit and not sample.running:
                too_long += 1
                if len(overlong) < NAMED:
                    overlong.append(f"{sample.place}: {len(ids)} tokens")
                parts[side].cut(len(ids) - limit)
                ids, loss = ids[:limit], loss[:limit]
            parts[side].add(ids, loss, starts)
        number += sum(one.count for one in batch)
        progress.after(batch[-1].sample, number)
    if too_long and config.overlong == "refuse":
        more = f", and {too_long - len(overlong)} more" if too_long > len(overlong) else ""
        raise BadInput(
            f"{too_long} documents are longer than sequence_length {limit}: {'; '.join(overlong)}{more}. Set "
            "sequence_length to the longest, or overlong to split or cut"
        )
    for side, part in parts.items():
        part.close(list(unread))
        if part.total >= 2 and part.answers:
            continue
        what = f"{dataset.key}: {dataset.name}"
        if splits and part.total < 2:
            raise BadInput(
                f"{what}: validation_split {config.validation_split} of its {number} documents leaves none "
                f"{'to train on' if side == 'train' else 'held out'}; change it, or give a validation file"
            )
        if part.total < 2:
            raise BadInput(f"{what}: {part.total} tokens are too few to learn from; give more text")
        raise BadInput(
            f"{what}: none of its tokens is an answer's; set loss_on to all, or look at the roles, and "
            "at what says that an answer is not to be learnt (weight, loss, train)"
        )


class _Placed(NamedTuple):
    """A sample, the part that it goes to, whether a text begins with it, and how many are in it (`_joined`)."""

    sample: Sample
    side: str
    starts: bool
    count: int = 1


def _placed(samples: Iterable[Sample], config: Config, splits: bool) -> Iterator[_Placed]:
    side, at_start = "train", True
    for number, sample in enumerate(samples):
        previous, side = side, "train"
        if splits and index.chosen(config.seed, number, config.validation_split):
            side = "held_out"
        starts = at_start or side != previous  # where a paragraph was held out, a text begins anew
        yield _Placed(sample, side, starts)
        at_start = sample.ends


def _joined(placed: Iterable[_Placed]) -> Iterator[_Placed]:
    """A running text's paragraphs as one where they stand behind each other in a part, up to about PIECE characters.

    Tokenizers look at what is around: GPT-2's makes other tokens of two line ends where a word follows, or its indent.
    """
    held: list[_Placed] = []
    size = 0

    def piece():
        text = "".join(one.sample.text for one in held)
        return held[0]._replace(sample=held[-1].sample._replace(text=text), count=len(held))

    for one in placed:
        if held and (one.starts or not one.sample.running or size >= PIECE):
            yield piece()
            held, size = [], 0
        held.append(one)
        size += len(one.sample.text)
    if held:
        yield piece()


class _Progress:
    """Tells how far into a set the tokenising is, by lines, and how long the rest takes at that pace."""

    def __init__(self, dataset: read.Dataset, tell: Tell):
        lengths = [files.length(path) for path in dataset.files]
        self.before = dict(zip(dataset.files, itertools.accumulate([0, *lengths]), strict=False))
        self.total, self.limit = sum(lengths), dataset.limit
        self.name, self.tell, self.begin = Path(dataset.name).name, tell, time.monotonic()

    def after(self, sample: Sample, number: int) -> None:
        """`sample`, the set's `number`th, is done."""
        done = (self.before[sample.path] + sample.number) / self.total
        done = min(1.0, max(done, number / self.limit if self.limit else 0.0))
        left = (time.monotonic() - self.begin) * (1 / done - 1)
        self.tell(f"tokenising {self.name}: {100 * done:.0f} %, {span(left)} left")


class _Encoder:
    """Samples to (ids (n,) int64, loss (n,) bool) each; an end-of-text token closes a document of plain text."""

    def __init__(self, config: Config, tokenizer):
        self.tokenizer = tokenizer
        self.answers = config.loss_on == "answers"
        self.render = Renderer(tokenizer, self.answers)
        self.end = np.array([tokenizer.eos_token_id])
        self.backend = _placing(tokenizer)
        self.marks_beginnings, self.looks_ahead = _marks_beginnings(self.backend), _looks_ahead(self.backend)

    def __call__(self, batch: list[_Placed]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rendered = [
            self.render(one.sample) if one.sample.messages else (one.sample.text, []) for one in batch
        ]
        backend = self.backend
        before = ["\n" if self.marks_beginnings and not one.starts else "" for one in batch]
        after = ["a" if self.looks_ahead and not one.sample.ends else "" for one in batch]
        # The fast way gives no offsets, which tell where the answers are, and what stands around.
        encode = backend.encode_batch if self.answers or any((*before, *after)) else backend.encode_batch_fast
        texts = [
            line_end + text + word for line_end, (text, _), word in zip(before, rendered, after, strict=True)
        ]
        encoded = encode(texts, add_special_tokens=False)
        for one, line_end, word, encoding, (text, spans) in zip(
            batch, before, after, encoded, rendered, strict=True
        ):
            sample = one.sample
            found = encoding.ids
            if line_end or word:
                found = _within(encoding, len(line_end), len(line_end) + len(text))
            if found is None:
                found = backend.encode(text, add_special_tokens=False).ids
            ids = np.array(found, dtype=np.int64)
            loss = np.ones(len(ids), dtype=bool)
            if sample.messages is None:
                if sample.ends:
                    ids, loss = np.concatenate([ids, self.end]), np.append(loss, True)
            elif self.answers:
                ids, loss = self._answers(sample, encoding, text, spans)
            yield ids, loss

    def _answers(self, sample: Sample, whole, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text`, encoded as `whole`, and which of them are the spans'.

        Where a token would reach over a border, the text is encoded in parts, as it is when a model answers: the
        prompt's tokens are then there before the answer's first one.
        """
        ids = np.array(whole.ids, dtype=np.int64)
        begins, ends = np.array(whole.offsets, dtype=np.int64).reshape(-1, 2).T
        borders = [border for span in spans for border in span]
        if not any(((begins < border) & (border < ends)).any() for border in borders):
            loss = np.zeros(len(ids), dtype=bool)
            for first, last in spans:
                loss |= (first <= begins) & (ends <= last) & (begins < ends)
            return ids, loss
        backend = self.backend
        cuts = list(itertools.pairwise([0, *borders, len(text)]))
        parts = backend.encode_batch_fast([text[a:b] for a, b in cuts], add_special_tokens=False)
        lengths = [len(part.ids) for part in parts]
        ids = np.array([one for part in parts for one in part.ids], dtype=np.int64)
        said, meant = (backend.decode(one, skip_special_tokens=False) for one in (ids, whole.ids))
        if said != meant:
            raise BadInput(
                f"{sample.place}: the tokenizer makes one token of a prompt's end and an answer's beginning; set "
                "loss_on to all, or have the chat template's prompt end in a special token"
            )
        return ids, np.repeat([n % 2 == 1 for n in range(len(parts))], lengths)


def _trims(tokenizer) -> bool:
    """Whether it says that a token of spaces stands nowhere, and that others begin behind theirs."""
    behind = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    return '"trim_offsets": true' in json.dumps(behind)


def _placing(tokenizer):
    """Its backend; without what comes behind it where that moves tokens: they stand where they do. Special tokens,
    which that adds, are not asked for."""
    from tokenizers import Tokenizer

    if not _trims(tokenizer):
        return tokenizer.backend_tokenizer
    made = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    made.post_processor = None
    return made


def _marks_beginnings(backend) -> bool:
    """Whether it begins a text otherwise than what follows a line's end: some put a space before every text."""
    alone, follows = (backend.encode(text, add_special_tokens=False) for text in ("a", "\na"))
    return _within(follows, 1, 2) not in (None, alone.ids)


def _looks_ahead(backend) -> bool:
    """Whether it ends a text otherwise than a paragraph that another one follows."""
    alone, goes_on = (backend.encode(text, add_special_tokens=False) for text in ("a\n\n", "a\n\na"))
    return _within(goes_on, 0, 3) not in (None, alone.ids)


def _within(encoding, begin: int, end: int) -> list[int] | None:
    """The ids of the text's characters from `begin` to `end`; None where a token reaches over one of these."""
    first, last = 0, len(encoding.ids)
    # What some put before every text stands nowhere.
    while begin and first < last and encoding.token_to_chars(first)[1] <= begin:
        first += 1
    while first < last and encoding.token_to_chars(last - 1)[0] >= end:
        last -= 1
    if first < last and (
        encoding.token_to_chars(first)[0] < begin or encoding.token_to_chars(last - 1)[1] > end
    ):
        return None
    return encoding.ids[first:last]


class _Part:
    """Writes one part; holds no more than BATCH tokens."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.files = {name: (folder / f"{name}.bin").open("wb") for name in ("tokens", "starts", "loss")}
        self.hash = hashlib.sha256()
        self.total = self.documents = self.answers = self.shortened = self.dropped = 0
        self.counts = np.zeros(0, dtype=np.int64)
        self.largest = 0
        self._ids: list[np.ndarray] = []
        self._loss: list[np.ndarray] = []
        self._starts: list[int] = []
        self._held = 0

    def add(self, ids: np.ndarray, loss: np.ndarray, starts: bool) -> None:
        """Append tokens; `starts`: a document begins with them."""
        if not len(ids):
            return
        if starts or not self.total:
            self._starts.append(self.total)
            self.documents += 1
            loss = loss.copy()
            loss[0] = False
        self._ids.append(ids)
        self._loss.append(loss)
        self.total += len(ids)
        self._held += len(ids)
        if self._held >= BATCH:
            self._flush()

    def cut(self, dropped: int) -> None:
        """Count a document that loses `dropped` tokens."""
        self.shortened += 1
        self.dropped += dropped

    def _flush(self, last: bool = False) -> None:
        ids, loss = np.concatenate(self._ids), np.concatenate(self._loss)
        whole = len(ids) if last else len(ids) // 8 * 8  # the bits of a byte stay together
        self._write("tokens", ids[:whole].astype(np.uint32))
        self._write("loss", np.packbits(loss[:whole], bitorder="little"))
        self._write("starts", np.array(self._starts, dtype=np.int64))
        self.largest = max(self.largest, int(ids.max(initial=0)))
        counts = np.bincount(ids[:whole][loss[:whole]], minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        self.answers = int(counts.sum())
        self._ids, self._loss, self._starts = [ids[whole:]], [loss[whole:]], []
        self._held = len(ids) - whole

    def _write(self, name: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self.files[name].write(data)
        self.hash.update(data)

    def close(self, unread: list[str]) -> None:
        """Write what is left, and the facts."""
        if self._ids:
            self._flush(last=True)
        for file in self.files.values():
            file.close()
        self.counts.tofile(self.folder / "counts.bin")
        facts = {
            "documents": self.documents,
            "tokens": self.total,
            "answers": self.answers,
            "largest_id": self.largest,
            "shortened": self.shortened,
            "dropped": self.dropped,
            "unread": unread,
            "digest": self.hash.hexdigest(),
        }
        (self.folder / "facts.json").write_text(json.dumps(facts))


def _batches(placed: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    """Group samples into lists of about BATCH characters."""
    batch, size = [], 0
    for one in placed:
        batch.append(one)
        size += one.sample.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _locked(path: Path):
    """Hold an exclusive lock between the processes of this host; it ends with its holder."""
    with path.open("w") as file:
        with waiting.for_others():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
