"""The data sets of a run, and their samples: memory does not grow with the data.

The controller imports this to read data before any host is touched: neither numpy, pyarrow nor transformers here.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer import words
from trainer.config import Config
from trainer.data import files, hub, index, records
from trainer.data.records import Sample
from trainer.errors import BadInput

SHIPPED = Path(__file__).parent / "texts"
ON_SAMPLES = ("text_field", "data_format")  # what samples are made of, beside the files


@dataclass(frozen=True)
class Dataset:
    """One set: the files that one name means."""

    key: str  # dataset or validation
    name: str
    files: tuple[Path, ...]
    limit: int | None  # the first so many samples


@dataclass(frozen=True)
class Taken:
    """What a set was taken for: so many text, instruction or chat records; unread: what of their fields is not read."""

    dataset: Dataset
    number: int
    kind: str
    unread: tuple[str, ...]

    def __str__(self) -> str:
        key, name, paths = self.dataset.key, self.dataset.name, self.dataset.files
        what = "paragraph" if all(path.suffix == ".txt" for path in paths) else self.kind
        within = f" of {records.listed([path.name for path in paths])}" if len(paths) > 1 else ""
        left = f"; not read: {records.listed(self.unread)}" if self.unread else ""
        return f"{key}: {name}: {words.count(self.number, what)}{within}{left}"


def names(value: str) -> list[str]:
    """The entries of a comma-separated list; a path that is there and has a comma is one entry."""
    with contextlib.suppress(BadInput):  # what may not be looked at is refused where it is to be read
        if files.found(value):
            return [value]
    return [part.strip() for part in value.split(",")]


def training(config: Config) -> list[Dataset]:
    """The sets of `dataset`, in order; raises BadInput where one is not there."""
    found = [_dataset("dataset", name, config.max_samples) for name in names(config.dataset)]
    weights(config)
    return found


def validation(config: Config) -> Dataset | None:
    """The set of `validation`, if it is given."""
    return _dataset("validation", config.validation, None) if config.validation else None


def everything(config: Config) -> list[Dataset]:
    """The sets of `dataset`, then that of `validation`."""
    found = [*training(config), *filter(None, [validation(config)])]
    _apart(found)
    return found


def _apart(sets: Collection[Dataset]) -> None:
    """Refuse to evaluate on what is trained on: the same files, or others of the same content, as brought ones are."""
    trained = [(path, one.name) for one in sets if one.key == "dataset" for path in one.files]
    for one in sets:
        for path in one.files if one.key == "validation" else ():
            for other, name in trained:
                if _same(path, other):
                    raise BadInput(
                        f"validation: {path}: dataset {name} has this file, too, so that it would be trained on; name "
                        "the files of one of them, or hold out a share: validation_split"
                    )


def _same(one: Path, other: Path) -> bool:
    """Whether two files are one, or have the same content; only those of one size are read for that."""
    sizes = one.stat(), other.stat()
    if os.path.samestat(*sizes) or sizes[0].st_size != sizes[1].st_size or one.suffix != other.suffix:
        return os.path.samestat(*sizes)
    return _sha256(one) == _sha256(other)


def _hash(path: Path) -> bytes:
    with files.opened(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:  # which does not say of what
            raise files.unreadable(path, error) from None


_sha256 = functools.cache(_hash)


def weights(config: Config) -> list[float]:
    """A weight for every set of `dataset`; none where they are simply taken together. Raises BadInput."""
    if not config.dataset_weights:
        return []
    sets = names(config.dataset)
    try:
        found = [float(part) for part in config.dataset_weights.split(",")]
        good = len(found) == len(sets) and all(math.isfinite(one) and one > 0 for one in found)
    except ValueError:
        good = False
    if not good:
        raise BadInput(
            f"dataset_weights: {config.dataset_weights}: expected a number above 0 for each of the {len(sets)} sets "
            f"({', '.join(sets)}), separated by commas, such as {','.join(['1'] * len(sets))}"
        )
    if min(found) / sum(found) < 1e-3:
        raise BadInput(
            f"dataset_weights: {config.dataset_weights}: a share below a thousandth; leave that set out"
        )
    return found


def kind(dataset: Dataset, config: Config) -> str:
    """What the set's records are: text, instruction or chat, by `data_format` or its first record."""
    kinds = {path.suffix for path in dataset.files}
    if config.data_format not in ("auto", "text") and ".txt" in kinds:
        raise BadInput(
            f"{dataset.key}: {dataset.name}: data_format is {config.data_format}, and a .txt file has no records; "
            "give .jsonl or .parquet"
        )
    for path in dataset.files:
        if path.suffix != ".txt":
            if config.data_format != "auto":
                return config.data_format
            for _, record in files.records(path, besides=records.telling(config)):
                return records.kind(record, config)
    return "text"


def samples(dataset: Dataset, config: Config, unread: dict[str, None] | None = None) -> Iterator[Sample]:
    """Yield the set's samples, its `limit` at most; empty texts are passed over.

    A JSONL line or a parquet row is a document; so is a text file, which comes paragraph by paragraph. unread: takes
    up the names of fields that hold something and are not read. Raises BadInput that names file and line: not UTF-8,
    not JSON, no such field, nothing there.
    """
    what = kind(dataset, config)
    count = 0
    for path in dataset.files:
        for sample in _texts(path) if path.suffix == ".txt" else _records(path, what, config, unread):
            count += 1
            last = count == dataset.limit
            yield sample._replace(ends=True) if last else sample
            if last:
                return
    if count == 0:
        raise BadInput(f"{dataset.key}: {dataset.name}: no text in it; give a file with at least one sample")


def digest(dataset: Dataset, config: Config) -> str:
    """A hash of the set's samples: its files' content and the settings that they are made with."""
    settings = [getattr(config, name) for name in ON_SAMPLES]
    total = hashlib.sha256(json.dumps([dataset.limit, *settings]).encode())
    for path in dataset.files:
        total.update(path.suffix.encode() + _hash(path))
    return total.hexdigest()


def digests(config: Config) -> list[str]:
    """The hashes of `everything`."""
    return [digest(dataset, config) for dataset in everything(config)]


def placed(config: dict, places: list[dict]) -> dict:
    """The keys of a configuration, with names replaced by where they lie: `places` have key, name and place."""
    placed = dict(config)
    for key in {one["key"] for one in places}:
        found = {one["name"]: one["place"] for one in places if one["key"] == key}
        entries = [config[key]] if config[key] in found else names(config[key])
        placed[key] = ",".join(found.get(name, name) for name in entries)
    return placed


def origins(settings: dict) -> dict[str, str]:
    """By places on the hosts the names of what train.yml has brought there from the hub or elsewhere."""
    try:
        found = json.loads(settings.get("origins") or "{}")
    except (TypeError, ValueError):
        found = {}
    return {place: str(name) for place, name in found.items()} if isinstance(found, dict) else {}


def named(settings: dict) -> dict:
    """`settings` with these names instead of the places."""
    back = [
        {"key": key, "name": place, "place": name}
        for place, name in origins(settings).items()
        for key in ("model", "dataset", "validation")
        if settings.get(key)
    ]
    return {key: value for key, value in placed(settings, back).items() if key != "origins"}


def check(
    config: Config,
    keys: Collection[str] = ("dataset", "validation"),
    controller: bool = False,
    shared: Collection[str] = (),
    tell: Callable[[Taken], None] = lambda taken: None,
) -> tuple[int, int]:
    """Read the data of `keys` to its end: (samples, characters). Raises BadInput with the first fault of each set.

    tell: is told what each set was taken for. The controller leaves names of the hub to the hosts, `shared` ones, and
    parquet files where it has no pyarrow.
    """
    weights(config)
    asked = [("dataset", name, config.max_samples) for name in names(config.dataset)]
    asked += [("validation", config.validation, None)] if config.validation else []
    count = letters = 0
    problems, sets, kinds, whole = [], [], set(), "dataset" in keys
    for key, name, limit in asked:
        if key not in keys:
            continue
        try:
            there = controller and (name in shared or is_remote(name))
            dataset = None if there else _dataset(key, name, limit)
            if not dataset or (controller and not _readable(dataset)):
                whole = False
                continue
            sets.append(dataset)
            what = kind(dataset, config)
            kinds.add(what)
            held_out = number = 0
            unread: dict[str, None] = {}
            share = (config.validation_split or 0) if key == "dataset" else 0
            for number, sample in enumerate(samples(dataset, config, unread), 1):
                letters += len(sample.words)
                held_out += index.chosen(config.seed, number - 1, share)
            count += number
            tell(Taken(dataset, number, what, tuple(unread)))
            if share and held_out in (0, number):
                raise BadInput(
                    f"{key}: {name}: validation_split {share} of its {number} documents leaves none "
                    f"{'to train on' if held_out else 'held out'}; change it, or give a validation file"
                )
        except BadInput as error:
            problems.append(str(error))
    if not problems:
        _apart(sets)
    if not problems and whole:
        answers_exist(kinds, config)
    if problems:
        raise BadInput("\n".join(problems))
    return count, letters


def of_records(config: Config) -> bool:
    """Whether what is trained on is records alone, and no running text."""
    return not any(path.suffix == ".txt" for one in training(config) for path in one.files)


def answers_exist(kinds: set[str], config: Config) -> None:
    """Refuse a loss on answers where no set has any."""
    if config.loss_on == "answers" and kinds == {"text"}:
        raise BadInput(
            "loss_on: answers, but the data is plain text, which has none; set loss_on to all, or give records with "
            "instruction and output, or with messages"
        )


def is_remote(name: str) -> bool:
    """Whether `name` is one of the hub's, and nothing on this machine has it."""
    return hub.is_name(name) and not files.found(name)


def _dataset(key: str, name: str, limit: int | None) -> Dataset:
    found = hub.fetch(name, key=key) if is_remote(name) else _resolved(key, name)
    return Dataset(key, name, tuple(found), limit)


def _resolved(key: str, name: str) -> list[Path]:
    """The files that a name means on this machine; raises BadInput where there are none."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.txt"))
    path = files.found(name)
    if path is None:
        if name in shipped:
            return [SHIPPED / f"{name}.txt"]
        raise BadInput(
            f"{key}: {name}: no such file or directory; give a {files.KINDS} file, a directory of those, a "
            f"name on the Hugging Face hub (org/name), or a text that ships with the trainer ({', '.join(shipped)})"
        )
    what = files.kind(path.stat().st_mode)
    if what not in ("a file", "a directory"):
        raise BadInput(
            f"{key}: {name}: expected a file or directory, found {what}; write its content into a file first"
        )
    if what == "a file":
        if path.suffix not in files.SUFFIXES:
            raise BadInput(
                f"{key}: {name}: expected a name that ends in {files.KINDS}; convert the file{files.converted(path)}"
            )
        return [path]
    found = files.below(path)
    if not found:
        every = list(path.iterdir())
        there = ", ".join(sorted(file.name for file in every)[:5]) or "nothing"
        largest = max(filter(Path.is_file, every), key=lambda file: file.stat().st_size, default=path)
        raise BadInput(
            f"{key}: {name}: no {files.KINDS} file in this directory; found {there}; convert them"
            f"{files.converted(largest)}"
        )
    return found


def _texts(path: Path) -> Iterator[Sample]:
    for number, text, ends in files.paragraphs(path):
        yield Sample(path, number, text, ends=ends, running=True)


def _records(path: Path, what: str, config: Config, unread: dict[str, None] | None) -> Iterator[Sample]:
    is_table = path.suffix == ".parquet"
    for number, record in files.records(path, *records.columns(what, config)):
        if unread is not None:
            # Of a table not all columns come with its rows.
            others = dict.fromkeys(files.columns(path), "…") if is_table and number == 1 else {}
            unread.update(dict.fromkeys(records.unread({**others, **record}, what, config)))
        sample = records.sample(path, number, record, what, config)
        if sample.text or sample.messages:
            yield sample


def _readable(dataset: Dataset) -> bool:
    """Whether this machine has what it takes to read the set's files."""
    parquet = any(path.suffix == ".parquet" for path in dataset.files)
    return not parquet or importlib.util.find_spec("pyarrow") is not None
