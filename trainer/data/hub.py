"""Data sets by their names on the Hugging Face hub: `org/name`, `org/name@revision`, `org/name@revision:pattern`."""

import contextlib
import fnmatch
import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from trainer import disk, waiting
from trainer.data import files
from trainer.errors import BadInput

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([^:]+))?")
SPARE = 1_000_000_000  # bytes that a fetch leaves free
ONLY = ", with nothing in it that is not to be trained on"  # of a directory, which is taken as a whole
# Files of a set by what they are for: what is held out, and all that is not for training.
HELD_OUT = re.compile(r"(?<![a-z])(valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
OTHER_PARTS = re.compile(rf"(?<![a-z])test(?![a-z])|{HELD_OUT.pattern}", re.IGNORECASE)
NOT_OURS = (
    "original/*",
    "consolidated*",
    "onnx/*",
    "*/*.safetensors",
)  # a model's weights in other formats, too


def is_name(value: str) -> bool:
    """Whether `value` can be a name on the hub: one slash, and not the path of a file that we would read."""
    match = NAME.fullmatch(value)
    return bool(match) and (match[3] is not None or Path(value).suffix not in files.SUFFIXES)


def snapshot(name: str, progress: Path | None = None, **options) -> Path:
    """The folder of a repository, downloaded to huggingface_hub's cache unless it is there; raises what that raises.

    progress: a file that says "DONE TOTAL" (bytes) meanwhile. options: snapshot_download's; with local_files_only the
    cache is all there is, and BadInput says what it lacks.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached = options.get("local_files_only", False)
    tells = _told(progress, name, options) if progress and not cached else contextlib.nullcontext()
    # It may wait for another process that downloads the same, and for the hub.
    with tells, waiting.for_others():
        try:
            return Path(huggingface_hub.snapshot_download(name, **options))
        except LocalEntryNotFoundError as error:
            if not cached:
                raise
            raise BadInput(_lacking(name, options, error)) from None


def cure(error: Exception, text: str) -> str:
    """What helps where the hub did not give something, as `error` says in `text`; "" where that says nothing of it."""
    if disk.is_full(error) or "No space left on device" in text:
        return (
            "make room where what is fetched is kept (~/.cache/huggingface, or what HF_HOME says), or move it"
        )
    if type(error).__name__ == "GatedRepoError" or "gated repo" in text.lower():
        return "accept its terms on the hub, and log in with a token (hf auth login, or HF_TOKEN)"
    return ""


def offline() -> str:
    """A sentence where the environment keeps the hub from being asked, else nothing."""
    return "HF_HUB_OFFLINE is set. " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""


def _lacking(name: str, options: dict, error: Exception) -> str:
    """What the cache lacks of a repository, with the cure; `error`: as the library said it."""
    kind = options.get("repo_type", "model")
    have = f"has no revision {options.get('revision') or 'main'} of it"
    if found := re.search(r"commit (\w+)\) is incomplete: (.*?\))\.", str(error)):
        have = f"is incomplete: {found[2]} of revision {found[1]}"
    option, only = (" --repo-type dataset", ONLY) if kind == "dataset" else ("", "")
    return (
        f"{kind}: {name}: the hub does not answer, and this host's cache {have}. Run train.yml again once the hub "
        f"answers: what has come stays. Or download it elsewhere (hf download {name}{option} --local-dir DIR) and give "
        f"that directory{only}"
    )


@contextlib.contextmanager
def _told(progress: Path, name: str, options: dict) -> Iterator[None]:
    """Write to `progress` once a second how many of its bytes are in the cache."""
    from filelock import FileLock, Timeout
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    progress.unlink(missing_ok=True)
    blobs = _blobs(name, options)
    repository = repo_folder_name(repo_id=name, repo_type=options.get("repo_type", "model"))
    folder = Path(HF_HUB_CACHE, repository, "blobs")
    over, new = threading.Event(), progress.with_name(f"{progress.name}.new")
    _check_room(name, folder, sum(size for blob, size in blobs.items() if not (folder / blob).exists()))
    for blob in blobs:  # what a fetch that was killed left: the library begins a new one beside it
        lock = Path(HF_HUB_CACHE, ".locks", repository, f"{blob}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout), FileLock(lock, timeout=0, mode=0o664):  # else it is being fetched
            for part in folder.glob(f"{blob}.*"):
                part.unlink(missing_ok=True)

    def tell() -> None:
        while blobs and not over.wait(1):
            with contextlib.suppress(OSError):  # one that becomes complete changes its name
                done = sum(file.stat().st_size for blob in blobs for file in folder.glob(f"{blob}*"))
                new.write_text(f"{done} {sum(blobs.values())}\n", encoding="ascii")
                new.replace(progress)  # who reads meanwhile sees the one before, not none

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        for file in (new, progress):
            file.unlink(missing_ok=True)


def _check_room(name: str, folder: Path, needed: int) -> None:
    """Raise BadInput where a disk has no room for so many bytes more, before it is filled with half of them."""
    there = next(one for one in folder.parents if one.exists())
    free = shutil.disk_usage(there).free
    if needed + SPARE > free:
        raise BadInput(
            f"{name}: {needed / 1e9:,.1f} GB are to be fetched, and {there} has {free / 1e9:,.1f} GB free, of which "
            f"{SPARE / 1e9:.0f} stay for logs and the system; free some space there, or put trainer_state_dir on "
            "another disk"
        )


def _blobs(name: str, options: dict) -> dict[str, int]:
    """What snapshot_download with `options` brings: bytes by the names that they have in the cache; {} if unknown."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    where = {key: options.get(key) for key in ("repo_type", "revision")}
    which = {key: options.get(key) for key in ("allow_patterns", "ignore_patterns")}
    try:
        tree = list(huggingface_hub.HfApi().list_repo_tree(name, recursive=True, **where))
    except Exception:  # snapshot_download will say it
        return {}
    found = [entry for entry in tree if isinstance(entry, huggingface_hub.hf_api.RepoFile)]
    found = filter_repo_objects(found, key=lambda entry: entry.path, **which)
    return {entry.lfs.sha256 if entry.lfs else entry.blob_id: entry.size for entry in found}


@functools.cache  # once in a process, so that it sees one state of the repository
def fetch(
    value: str, progress: Path | None = None, cached: bool = False, key: str = "dataset"
) -> tuple[Path, ...]:
    """The files of a data set, downloaded to huggingface_hub's cache unless they are there; raises BadInput.

    Without a pattern: all files of our kinds but those of a test or validation part, and texts beside records, which
    tell of the set; for the key `validation`, those of a validation part. progress: as snapshot has it. cached: the hub
    is not asked.
    """
    name, revision, pattern = NAME.fullmatch(value).groups()
    try:
        folder = snapshot(
            name,
            progress,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[pattern] if pattern else [f"*{suffix}" for suffix in files.SUFFIXES],
            local_files_only=cached,
        )
    except BadInput:
        raise
    except Exception as error:  # whatever a network and a library may raise
        text = " ".join(str(error).split())[:200].rstrip(".")
        helps = cure(error, text) or (
            f"{offline()}Check the name; without internet, download it elsewhere "
            f"(hf download {name} --repo-type dataset --local-dir DIR) and give that directory{ONLY}"
        )
        raise BadInput(
            f"{key}: {value}: neither a file here nor to be had from the Hugging Face hub: "
            f"{type(error).__name__}: {text}. {helps}"
        ) from None
    found = sorted(path for path in folder.rglob("*") if path.suffix in files.SUFFIXES and path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in found}
    if not pattern and {path.suffix for path in found} - {".txt"}:
        found = [path for path in found if path.suffix != ".txt"]
    if pattern:
        chosen = [path for path in found if fnmatch.fnmatch(names[path], pattern)]
    elif key == "validation":
        chosen = [path for path in found if HELD_OUT.search(names[path])]
    else:
        chosen = [path for path in found if not OTHER_PARTS.search(names[path])]
    if not chosen:
        there = ", ".join(list(names.values())[:5]) or "no file of these kinds"
        wanted = f"{files.KINDS}{', called validation, dev or eval' if key == 'validation' else ''}"
        raise BadInput(
            f"{key}: {value}: found {there}; expected {wanted}. Name them: {name}:PATTERN, or take the hub's own "
            f"conversion: {name}@refs/convert/parquet"
        )
    return tuple(chosen)
