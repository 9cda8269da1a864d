"""Data sets by their names on the Hugging Face hub: `org/name`, `org/name@revision`, `org/name@revision:pattern`."""

import fnmatch
import functools
import os
import re
from pathlib import Path

from trainer.data import files
from trainer.errors import BadInput

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([^:]+))?")
OTHER_PARTS = re.compile(r"(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)


def is_name(value: str) -> bool:
    """Whether `value` can be a name on the hub: one slash, and not the path of a file that we would read."""
    match = NAME.fullmatch(value)
    return bool(match) and (match[3] is not None or Path(value).suffix not in files.SUFFIXES)


@functools.cache  # once in a process, so that it sees one state of the repository
def fetch(value: str) -> tuple[Path, ...]:
    """The files of a data set, downloaded to huggingface_hub's cache unless they are there; raises BadInput.

    Without a pattern: all files of our kinds but those of a test or validation part.
    """
    name, revision, pattern = NAME.fullmatch(value).groups()
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[pattern] if pattern else [f"*{suffix}" for suffix in files.SUFFIXES],
            )
        )
    except Exception as error:  # whatever a network and a library may raise
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        text = " ".join(str(error).split())[:200]
        raise BadInput(
            f"dataset: {value}: neither a file here nor to be had from the Hugging Face hub: "
            f"{type(error).__name__}: {text}.{offline} Check the name; without internet, download it elsewhere "
            f"(hf download {name} --repo-type dataset --local-dir DIR) and give that directory"
        ) from None
    found = sorted(path for path in folder.rglob("*") if path.suffix in files.SUFFIXES and path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in found}
    if pattern:
        chosen = [path for path in found if fnmatch.fnmatch(names[path], pattern)]
    else:
        chosen = [path for path in found if not OTHER_PARTS.search(names[path])]
    if not chosen:
        there = ", ".join(list(names.values())[:5]) or "no file of these kinds"
        raise BadInput(
            f"dataset: {value}: found {there}; expected {files.KINDS}. Name them: {name}:PATTERN, or take the hub's "
            f"own conversion: {name}@refs/convert/parquet"
        )
    return tuple(chosen)
