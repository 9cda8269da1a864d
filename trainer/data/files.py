"""Files to raw records, a line or a batch at a time: memory does not grow with the data.

The controller imports this: what is not in Python itself is imported where it is needed.
"""

import codecs
import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import BadInput

SUFFIXES = (".txt", ".jsonl", ".parquet")
KINDS = ".txt, .jsonl or .parquet"
LONGEST_LINE = 64 << 20  # bytes; a line is held in memory whole
LONGEST_PARAGRAPH = 1 << 16  # bytes; a text without blank lines is cut at line ends about here
ROWS = 256  # of a parquet file, read at once
A_LINE_EACH = "jq -c 'arrays[], objects'"  # of a list of records, and of such as go over several lines
A_CHAT_EACH = "jq -c '{messages: .}'"  # of lists of messages
PACKED = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".zip": "unzip"}
# How a file of another kind becomes one of ours, by the end of its name.
CONVERTED = {
    ".json": f"{A_LINE_EACH} {{0}} > {{1}}.jsonl",
    ".ndjson": "mv {0} {1}.jsonl",
    ".csv": "python3 -c 'import csv, json; "
    """[print(json.dumps(row)) for row in csv.DictReader(open(0, encoding="utf-8-sig", newline=""))]' """
    "< {0} > {1}.jsonl",
    **{name: f"{command} {{0}}" for name, command in PACKED.items()},
}
# How a file begins that is no UTF-8, what it is then, and the command that makes it some; two letters in UTF-16, too.
BEGINNINGS = (
    (re.compile(rb"\xff\xfe|[^\0]\0"), "UTF-16", "iconv -f UTF-16LE -t UTF-8"),
    (re.compile(rb"\xfe\xff|\0[^\0]"), "UTF-16", "iconv -f UTF-16BE -t UTF-8"),
    (re.compile(rb"\x1f\x8b"), "compressed by gzip", PACKED[".gz"]),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "compressed by zstd", PACKED[".zst"]),
)


def place(path: Path, number: int) -> str:
    """What an error calls record `number` of a file: its line, or a parquet file's row, from 1."""
    return f"{path}: row {number}" if path.suffix == ".parquet" else f"{path}:{number}"


def records(
    path: Path, columns: Sequence[str] = (), besides: Sequence[str] = ()
) -> Iterator[tuple[int, dict]]:
    """Yield (number, record) of a .jsonl or .parquet file.

    columns: those needed, where that saves reading; besides: those read with them where they are there. Of besides
    alone the others are not read.
    Raises BadInput with file and line or row.
    """
    return _parquet(path, columns, besides) if path.suffix == ".parquet" else _jsonl(path)


def columns(path: Path) -> list[str]:
    """The fields of a parquet file that can be read, of whose rows `records` has those that are needed."""
    import pyarrow.parquet

    with opened(path) as file:
        return pyarrow.parquet.read_schema(file).names


def converted(path: Path) -> str:
    """By what command a file of another kind becomes one of ours; "" where none is known."""
    command = CONVERTED.get(path.suffix.lower(), "")
    return command and f", for example: {command.format(shlex.quote(path.name), shlex.quote(path.stem))}"


def length(path: Path) -> int:
    """How many lines or rows it has, at least 1; quick beside reading them. Raises as `opened` does."""
    with opened(path) as file:
        if path.suffix == ".parquet":
            try:
                import pyarrow.parquet

                return max(1, pyarrow.parquet.read_metadata(file).num_rows)
            # Arrow's own are ValueErrors, too. What is wrong with the file, reading it says.
            except (ImportError, NotImplementedError, OSError, ValueError):
                return 1
        try:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
        except OSError as error:
            raise unreadable(path, error) from None


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
            others = _a_line_each(path) if line.strip() in ("[", "{") else ""
            raise BadInput(
                f"{where}: not JSON: {error.msg}; expected one JSON object a line{others}"
            ) from None
        except RecursionError:
            raise BadInput(f"{where}: not JSON: nested too deeply; expected one JSON object a line") from None
        except ValueError as error:
            raise BadInput(f"{where}: not JSON: {error}; expected one JSON object a line") from None
        if not isinstance(record, dict):
            others = ""
            objects = [one for one in record if isinstance(one, dict)] if isinstance(record, list) else []
            if any({"role", "from"} & set(one) for one in objects):
                others = f"; a list of messages becomes a chat by: {A_CHAT_EACH} {shlex.quote(path.name)} > NEW.jsonl"
            elif objects:
                others = _a_line_each(path)
            raise BadInput(
                f'{where}: expected a JSON object like {{"text": "…"}}, found {line.strip()[:40]}{others}'
            )
        yield number, record


def _a_line_each(path: Path) -> str:
    return f"; a list, or records over several lines, become so by: {A_LINE_EACH} {shlex.quote(path.name)} > NEW.jsonl"


def _parquet(path: Path, columns: Sequence[str], besides: Sequence[str]) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(f"{path}: parquet files are read by pyarrow, which is not installed here") from None
    with opened(path) as file:
        number = 0
        try:
            # Arrow would keep what it has read ahead, and a row group's columns whole, for as long as the file is open.
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            there = table.schema_arrow.names
            needed = columns and set(columns) <= set(there)
            wanted = [name for name in (*columns, *besides) if name in there]
            if besides and not columns and not wanted:  # pyarrow has no rows without columns
                yield from ((1, {}) for _ in range(min(1, table.metadata.num_rows)))
                return
            wanted = wanted if needed or (besides and not columns) else None
            for batch in table.iter_batches(ROWS, columns=wanted, use_threads=False):
                for record in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield number, {name: _as_written(value) for name, value in record.items()}
        except (
            pyarrow.ArrowException,
            OSError,
            ValueError,
            KeyError,
            OverflowError,
            NotImplementedError,
        ) as error:
            text = " ".join(str(error).split())[:200]
            raise BadInput(
                f"{place(path, number + 1)}: cannot be read as parquet: {text}; write the file anew"
            ) from None


def _as_written(value):
    """A parquet column's value without the nulls that stand, in one row's objects, for the fields of other rows'."""
    if isinstance(value, dict):
        return {name: _as_written(one) for name, one in value.items() if one is not None}
    return [_as_written(one) for one in value] if isinstance(value, list) else value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line with its end)."""
    with opened(path) as file:
        number = 0
        while raw := _line(file, path):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise BadInput(
                    f"{path}:{number}: a line longer than {LONGEST_LINE >> 20} MiB; break it into several"
                )
            for begins, what, command in BEGINNINGS if number == 1 else ():
                if begins.match(raw):
                    raise BadInput(
                        f"{path}:1: not UTF-8: it is {what}; convert it, for example: "
                        f"{command} < {shlex.quote(path.name)} > NEW{path.suffix}"
                    )
            raw = raw.removeprefix(codecs.BOM_UTF8)  # which files put together have within, too
            try:
                yield number, raw.decode()  # "utf-8-sig" takes several times as long
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; "
                    f"convert it, for example: iconv -f LATIN1 -t UTF-8 {shlex.quote(path.name)}"
                ) from None


def _line(file, path: Path) -> bytes:
    try:
        return file.readline(LONGEST_LINE + 1)
    except OSError as error:  # of a server's disk
        raise unreadable(path, error) from None


def opened(path: Path):
    """The file, open for reading; raises BadInput where that is not allowed, or it is no file."""
    try:
        # Without waiting: a pipe would have us wait for somebody who writes into it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from None
    what = kind(os.fstat(handle).st_mode)
    if what != "a file":
        os.close(handle)
        raise BadInput(f"{path}: expected a file, found {what}; write its content into a file first")
    return os.fdopen(handle, "rb")


def expanded(name: Path | str, of: str = "") -> Path:
    """The path that a user means by `name`, where ~ is a home; raises BadInput where it cannot be one.

    of: what an error begins with, such as a key's name.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise BadInput(
            f"{of}{str(name)!r}: cannot be a path: that user's home directory is not known here; "
            "write it out, from / on"
        ) from None
    try:
        if b"\0" not in os.fsencode(path):
            return path
        fault = "a null character"
    except UnicodeEncodeError:
        fault = "half a character (a lone surrogate)"
    raise BadInput(f"{of}{str(name)!r}: cannot be a path: found {fault} in it; leave that away")


def found(name: str) -> Path | None:
    """The file or directory that a user calls `name`, or None; raises BadInput where that cannot be told."""
    if not name:  # which Path takes for the current directory
        return None
    path = expanded(name)
    try:
        path.stat()
        return path
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise unreadable(name, error) from None


def below(folder: Path) -> list[Path]:
    """The files of our kinds in `folder` and in directories below it, sorted; hidden ones are no data.

    Raises BadInput where a directory cannot be read, or is a link that nobody would follow, and where what is called so
    is no file, is called so in capitals, or is compressed: some data would be missing.
    """

    def refuse(error: OSError):
        raise unreadable(error.filename, error) from None

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in (Path(place, name) for name in folders):
            if link.is_symlink() and _leads_to_more(link, folder):
                raise BadInput(
                    f"{link}: expected files or directories, found a link to a directory with data; links are not "
                    "followed: take it out, and name what it leads to besides"
                )
        every = [Path(place, name) for name in names if not name.startswith(".")]
        for path in every:
            if path.suffix not in SUFFIXES and path.suffix.lower() in SUFFIXES:
                raise BadInput(
                    f"{path}: expected a name that ends in {path.suffix.lower()}; rename it, or take it out"
                )
            if path.suffix in PACKED and Path(path.stem).suffix in (*SUFFIXES, ".json"):
                raise BadInput(
                    f"{path}: expected a name that ends in {KINDS}; take it out, or convert it{converted(path)}"
                )
        found += [path for path in every if path.suffix in SUFFIXES]
    found.sort()
    for path in found:
        try:
            what = kind(path.stat().st_mode)
        except OSError as error:  # a link that leads nowhere
            raise unreadable(path, error) from None
        if what != "a file":
            raise BadInput(f"{path}: expected a file, found {what}; take it out of the directory")
    return found


def _leads_to_more(link: Path, folder: Path) -> bool:
    """Whether there is a file of our kinds behind a link to a directory, that is not read at its own place.

    Links below it, which may lead anywhere, are not followed, and what cannot be read there is nobody's.
    """
    target, root = link.resolve(), folder.resolve()
    if target.is_relative_to(root) or root.is_relative_to(target):  # a loop, too
        return False
    return any(Path(name).suffix.lower() in SUFFIXES for _, _, names in os.walk(target) for name in names)


def unreadable(path: Path | str, error: OSError) -> BadInput:
    refused = error.errno in (errno.EACCES, errno.EPERM)
    cure = "the run's user must be allowed to read it" if refused else "see its disk, or the server of it"
    return BadInput(f"{path}: cannot be read: {error.strerror}; {cure}")


def kind(mode: int) -> str:
    """What a file of this mode is."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
