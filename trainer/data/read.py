"""Text files to samples, a line at a time: memory does not grow with the data."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from trainer.config import Config
from trainer.errors import BadInput

SHIPPED = Path(__file__).parent / "texts"
LONGEST_PARAGRAPH = (
    1 << 16
)  # bytes; a text without blank lines is cut at line ends into pieces of about this size


def resolve(config: Config) -> list[Path]:
    """The files that `dataset` means, in order. Raises BadInput where there are none."""
    name = config.dataset
    shipped = sorted(path.stem for path in SHIPPED.glob("*.txt"))
    path = Path(name).expanduser()
    if not path.exists():
        if name in shipped:
            return [SHIPPED / f"{name}.txt"]
        raise BadInput(
            f"dataset: {name}: no such file or directory; give a .txt or .jsonl file, a directory of those, "
            f"or a text that ships with the trainer ({', '.join(shipped) or 'none'})"
        )
    if path.is_file():
        if path.suffix not in (".txt", ".jsonl"):
            raise BadInput(
                f"dataset: {name}: expected a name that ends in .txt or .jsonl; rename or convert the file"
            )
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".jsonl") and file.is_file())
    if not files:
        found = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        raise BadInput(f"dataset: {name}: no .txt or .jsonl file in this directory; found {found}")
    return files


def digest(config: Config) -> str:
    """A hash of the samples that `dataset` means: the files' content and the settings that choose from it."""
    total = hashlib.sha256(json.dumps([config.text_field, config.max_samples]).encode())
    for path in resolve(config):
        with _opened(path) as file:
            total.update(path.suffix.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def samples(config: Config) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it), `max_samples` at most.

    A JSONL line is a document; so is a text file, which comes paragraph by paragraph, each with its blank
    lines. Raises BadInput that names file and line: not UTF-8, not JSON, no such field, nothing there.
    """
    count = 0
    for path in resolve(config):
        read = _jsonl(path, config.text_field) if path.suffix == ".jsonl" else _paragraphs(path)
        for text, ends in read:
            count += 1
            last = count == config.max_samples
            yield text, ends or last
            if last:
                return
    if count == 0:
        raise BadInput(f"dataset: {config.dataset}: no text in it; give a file with at least one sample")


def _paragraphs(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield a text's paragraphs; the last one ends the document."""
    waiting = None  # held back by one, to know which is the last
    lines: list[str] = []
    size = 0
    for _, line in _lines(path):
        begins = bool(line.strip()) and bool(lines) and (not lines[-1].strip() or size >= LONGEST_PARAGRAPH)
        if begins and any(held.strip() for held in lines):
            if waiting is not None:
                yield waiting, False
            waiting, lines, size = "".join(lines), [], 0
        lines.append(line)
        size += len(line)
    rest = "".join(lines)
    if rest.strip():
        if waiting is not None:
            yield waiting, False
        yield rest, True
    elif waiting is not None:
        yield waiting, True


def _jsonl(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    """Yield the text of each line; blank lines and empty texts are passed over."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise BadInput(f"{path}:{number}: not JSON: {reason}; expected one JSON object a line") from None
        if not isinstance(record, dict):
            raise BadInput(
                f'{path}:{number}: expected a JSON object like {{"{field}": "…"}}, found {line.strip()[:40]}'
            )
        if field not in record:
            there = ", ".join(list(record)[:10]) or "none"
            raise BadInput(
                f"{path}:{number}: no field '{field}'; its fields are: {there}. Set text_field to one of them"
            )
        text = record[field]
        if not isinstance(text, str):
            raise BadInput(
                f"{path}:{number}: field '{field}': expected a text, found {json.dumps(text)[:40]}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput(
                f"{path}:{number}: field '{field}': half a character (a lone surrogate \\u escape)"
            ) from None
        if text:
            yield text, True


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line with its end)."""
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; "
                    f"convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name}"
                ) from None


def _opened(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read: {error.strerror}; the run's user must be allowed to read it"
        ) from None
