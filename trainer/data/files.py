"""Files to raw records, a line or a batch at a time: memory does not grow with the data.

The controller imports this: what is not in Python itself is imported where it is needed.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import BadInput

SUFFIXES = (".txt", ".jsonl", ".parquet")
KINDS = ".txt, .jsonl or .parquet"
LONGEST_LINE = 64 << 20  # bytes; a line is held in memory whole
LONGEST_PARAGRAPH = 1 << 16  # bytes; a text without blank lines is cut at line ends about here
ROWS = 256  # of a parquet file, read at once


def place(path: Path, number: int) -> str:
    """What an error calls record `number` of a file: its line, or a parquet file's row, from 1."""
    return f"{path}: row {number}" if path.suffix == ".parquet" else f"{path}:{number}"


def records(path: Path, columns: list[str] | None = None) -> Iterator[tuple[int, dict]]:
    """Yield (number, record) of a .jsonl or .parquet file; `columns`: those needed, where that saves reading.

    Raises BadInput with file and line or row.
    """
    return _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path)


def paragraphs(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, paragraph with the blank lines after it, whether it is the text's last)."""
    waiting = None  # held back by one, to know which is the last
    lines: list[str] = []
    first = size = 0
    for number, line in _lines(path):
        begins = bool(line.strip()) and bool(lines) and (not lines[-1].strip() or size >= LONGEST_PARAGRAPH)
        if begins and any(held.strip() for held in lines):
            if waiting is not None:
                yield *waiting, False
            waiting, lines, size = (first, "".join(lines)), [], 0
        if not lines:
            first = number
        lines.append(line)
        size += len(line)
        if size >= LONGEST_PARAGRAPH and not any(held.strip() for held in lines):
            lines, size = [], 0  # nothing but blank lines, and many of them
    rest = "".join(lines)
    if rest.strip():
        if waiting is not None:
            yield *waiting, False
        yield first, rest, True
    elif waiting is not None:
        yield *waiting, True


def _jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = place(path, number)
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON: {error.msg}; expected one JSON object a line") from None
        except RecursionError:
            raise BadInput(f"{where}: not JSON: nested too deeply; expected one JSON object a line") from None
        except ValueError as error:
            raise BadInput(f"{where}: not JSON: {error}; expected one JSON object a line") from None
        if not isinstance(record, dict):
            raise BadInput(f'{where}: expected a JSON object like {{"text": "…"}}, found {line.strip()[:40]}')
        yield number, record


def _parquet(path: Path, columns: list[str] | None) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(f"{path}: parquet files are read by pyarrow, which is not installed here") from None
    with opened(path) as file:
        number = 0
        try:
            table = pyarrow.parquet.ParquetFile(file)
            there = table.schema_arrow.names
            wanted = columns if columns and set(columns) <= set(there) else None
            for batch in table.iter_batches(ROWS, columns=wanted, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:200]
            raise BadInput(
                f"{place(path, number + 1)}: cannot be read as parquet: {text}; write the file anew"
            ) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line with its end)."""
    with opened(path) as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise BadInput(
                    f"{path}:{number}: a line longer than {LONGEST_LINE >> 20} MiB; break it into several"
                )
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; "
                    f"convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name}"
                ) from None


def opened(path: Path):
    """The file, open for reading; raises BadInput where that is not allowed."""
    try:
        return path.open("rb")
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read: {error.strerror}; the run's user must be allowed to read it"
        ) from None
