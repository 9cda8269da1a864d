"""The user's known_hosts file on the controller: which one ssh would write to, and how keys get into it."""

from __future__ import annotations

import os
import re
from pathlib import Path


def first_file(settings: str) -> Path | None:
    """The first of the user's known_hosts files in what `ssh -G` shows; None where ssh is to have none."""
    found = re.search(r"^userknownhostsfile (.+)$", settings, re.MULTILINE)
    # ssh lists the files without quotes; each begins anew with / or ~.
    first = re.split(r" (?=[/~])", found[1])[0] if found else "~/.ssh/known_hosts"
    return None if first in ("none", "/dev/null") else Path(first).expanduser()


def public_key(text: str) -> str | None:
    """Kind and key of a public key as ssh-keygen writes it, without its comment; None where it is anything else.

    It is a host that says so: a second line in known_hosts would make it believed in others' names.
    """
    found = re.fullmatch(r"([a-z0-9@.-]+ [A-Za-z0-9+/]+={0,3})( [^\r\n]*)?\n?", text)
    return found[1] if found else None


def pin(file: Path, lines: list[str]) -> None:
    """Append `lines` to `file`, in one write, so that it is whole at any moment; makes it if needed. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "rb+", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - 1, 0))
        gap = "\n" if size and stream.read(1) != b"\n" else ""
        stream.write((gap + "".join(f"{line}\n" for line in lines)).encode())
