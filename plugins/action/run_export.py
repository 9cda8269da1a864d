"""A directory of a host, here: only what differs, each file whole and of the right hash, and nothing of another's lost.

A record beside the files names what an export has put there. Files that it does not name, or that were changed since,
are the user's. A large file comes in pieces, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from meanwhile import Coming, told

RECORD = ".trainyard-export.json"
PIECE = 256 << 20  # bytes that come at once
ELSEWHERE = "Name another directory: -e to=DIR"


class Refused(Exception):
    """What is wrong, and the cure."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_record(directory: Path) -> dict:
    """What an earlier export has put there: about, complete, files and (of one before that) before; {} without one."""
    try:
        found = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        return {
            "about": dict(found["about"]),
            "complete": bool(found["complete"]),
            **{key: {str(name): str(one) for name, one in found[key].items()} for key in ("files", "before")},
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Refused(
            f"to: found {directory / RECORD}, which cannot be read; expected an export's record. {ELSEWHERE}"
        ) from None


def present(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below it, by its path there; without the record and what was not finished."""
    return {str(path.relative_to(directory)): content(path) for path in files_below(directory)}


def files_below(directory: Path) -> list[Path]:
    return [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or not (path.is_dir() or path.name == RECORD or is_part(path))
    ]


def content(path: Path) -> str:
    """SHA-256 of a file; of what is none, a word."""
    if path.is_symlink():
        return "a link"
    return sha256(path) if path.is_file() else "no plain file"


def part_of(target: Path, expected: str) -> Path:
    """Where `target` grows until it has the SHA-256 `expected`."""
    return target.with_name(f".{target.name}.part-{expected[:16]}")


def is_part(path: Path) -> bool:
    return path.name.startswith(".") and ".part-" in path.name


def piece_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.piece")


def look(directory: Path, about: dict) -> dict:
    """What is there: stands (nothing is left to do), own ({name: sha256} of what is ours). Raises Refused, OSError."""
    if not os.path.lexists(directory):
        return {"stands": False, "own": {}}
    if not directory.is_dir():
        raise Refused(f"to: found {directory}, which is no directory; expected one, or nothing. {ELSEWHERE}")
    record = read_record(directory)
    known = [record.get("files", {}), record.get("before", {})]
    names = [str(path.relative_to(directory)) for path in files_below(directory)]
    others = [name for name in names if not any(name in files for files in known)]
    there = {} if others else present(directory)  # what is not ours may be much, and is not read
    others += [name for name, one in there.items() if one not in [files.get(name) for files in known]]
    if others:
        listed = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        made = "that were changed since the export before" if record else "that no export has put there"
        raise Refused(
            f"to: found {directory} with files {made} ({listed}); expected a new directory, or an export as it was. "
            + ELSEWHERE
        )
    stands = bool(record) and record["complete"] and record["about"] == about and there == record["files"]
    return {"stands": stands, "own": there}


class ActionModule(ActionBase):
    """Arguments: to (a path here), about (what the export is of), and to bring it: source (on the host), files (of
    ansible.builtin.find there, with their SHA-256). Returns stands, without files; else names (what was brought).
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True
    coming = Coming()

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = json.loads(json.dumps(self._task.args))  # without Ansible's marks
        to = Path(args["to"])
        try:
            found = look(to, args["about"])
            if "files" not in args:
                return {**result, "changed": False, "stands": found["stands"]}
            with told(task_vars["inventory_hostname"], lambda: self.coming.words()):
                brought = self._bring(to, args["about"], Path(args["source"]), args["files"], found["own"])
            return {**result, **brought}
        except Refused as refusal:
            raise AnsibleActionFail(str(refusal)) from None
        except OSError as error:
            raise AnsibleActionFail(
                f"to: {error.filename or to}: {error.strerror}. Correct it, or name another directory: -e to=DIR"
            ) from None

    def _bring(self, to: Path, about: dict, source: Path, listed: list, own: dict[str, str]) -> dict:
        files = {os.path.relpath(one["path"], source): one for one in listed}
        if outside := [name for name in files if name.split(os.sep)[0] == os.pardir]:
            raise Refused(
                f"{source}: the host named {outside[0]}, which is outside of it; nothing was brought."
            )
        hashes = {name: one["checksum"] for name, one in files.items()}
        lacking = [name for name, one in hashes.items() if own.get(name) != one]
        size = sum(files[name]["size"] for name in lacking)
        parts = [part_of(to / name, hashes[name]) for name in lacking]
        came = sum(part.stat().st_size for part in parts if part.exists())  # when an earlier run was cut off
        to.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(to).free
        needed = size - came + min(PIECE, size - came)
        if free < needed:
            raise Refused(
                f"to: found {free / 1e9:.1f} GB free at {to}; expected {needed / 1e9:.1f} GB. Free some, or: -e to=DIR"
            )
        self._write(to, {"about": about, "complete": False, "files": hashes, "before": own})
        self.coming = Coming(size)
        for name in lacking:
            self._fetch(files[name]["path"], to / name, files[name]["size"], hashes[name])
        for name in own.keys() - hashes.keys():
            (to / name).unlink()
        for path in [path for path in to.rglob("*") if is_part(path)]:
            path.unlink()
        self._write(to, {"about": about, "complete": True, "files": hashes, "before": {}})
        return {"changed": True, "names": lacking, "bytes": size}

    @staticmethod
    def _write(to: Path, record: dict) -> None:
        new = to / f".record.part-{os.getpid()}"
        new.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        new.rename(to / RECORD)

    def _fetch(self, source: str, target: Path, size: int, expected: str) -> None:
        """Have the host's file `source` at `target`, from where an earlier run was."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = part_of(target, expected)
        part.touch()
        self.coming.done += part.stat().st_size
        while (have := part.stat().st_size) < size:
            self.coming.growing = piece_of(part)
            self._append(source, part, have)
            came = part.stat().st_size - have
            self.coming.growing, self.coming.done = None, self.coming.done + came
            if not came:
                raise Refused(f"{source}: found it to end after {have} bytes; expected {size}. Run it again.")
        if (found := sha256(part)) != expected:
            part.unlink()
            raise Refused(
                f"{source}: found SHA-256 {found} after the way here; expected {expected}. Run it again."
            )
        part.rename(target)

    def _append(self, source: str, part: Path, have: int) -> None:
        """The next piece of the host's file, to the end of `part`."""
        piece = piece_of(part)
        temporary = self._make_tmp_path()
        try:
            there = self._connection._shell.join_path(temporary, "piece")
            cut = f"tail -c +{have + 1} {shlex.quote(source)} | head -c {PIECE} > {shlex.quote(there)}"
            answer = self._low_level_execute_command(cut, sudoable=False)
            if answer["rc"]:
                raise Refused(f"{source}: cannot be read there: {answer['stderr'].strip()[-200:]}")
            self._connection.fetch_file(there, str(piece))
        finally:
            self._remove_tmp_path(temporary)
        with piece.open("rb") as new, part.open("ab") as whole:
            shutil.copyfileobj(new, whole, 1 << 20)
        piece.unlink()
