"""A block of lines of ours in a file that otherwise belongs to the machine's owner."""

from __future__ import annotations

import os
import tempfile

BEGIN = "# BEGIN trainyard"
END = "# END trainyard"


def split(text: str) -> tuple[list[str], list[str]]:
    """The lines of `text` outside and inside of our block. A block without an end goes to the last line."""
    outside: list[str] = []
    inside: list[str] = []
    within = False
    for line in text.removesuffix("\n").split("\n") if text else []:
        if line.startswith((BEGIN, END)):
            within = line.startswith(BEGIN)
        else:
            (inside if within else outside).append(line)
    return outside, inside


def strangers(inside: list[str]) -> list[str]:
    """Of the lines of a block in which each of ours ends with its peer's mark, those that somebody else wrote there.

    As where an editor took the end of the block with it: what an owner has added since, a key of his own, stays his.
    """
    # By its last word, white space after it or none: else what an editor left there made a peer's key its owner's.
    return [line for line in inside if line.strip() and not line.split()[-1].startswith("trainyard@")]


def endless(path: str, text: str) -> str:
    """What is said of a file whose lines have no mark, and whose block has no end: whose they are cannot be told."""
    begun = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith((BEGIN, END)):
            begun = number if line.startswith(BEGIN) else 0
    if not begun:
        return ""
    return (
        f"{path}, line {begun}: found '{BEGIN}' without '{END}' below it; expected both, since what stands between "
        f"them is Trainyard's to replace, and what comes after is not. Nothing was changed. Write '{END}' below "
        "the last of Trainyard's lines, and run it again."
    )


def join(outside: list[str], inside: list[str], note: str = "") -> str:
    """A file's text: the owner's lines as they are, then our block; no block if there is nothing in it."""
    block = [f"{BEGIN}{note and ': '}{note}", *inside, END] if inside else []
    lines = [*outside, *block]
    return "".join(f"{line}\n" for line in lines)


def read(path: str) -> str:
    """The file's text; empty if it is not there."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def through_links(path: str) -> str:
    """The file itself, where its owner has a link in its place to one that he keeps elsewhere.

    By `write` the link would go, and what he changes there later had no effect. Only for a path where nobody else could
    have put the link.
    """
    file = os.path.realpath(path)
    return file if os.path.isfile(file) else path


def write(module, path: str, text: str, beside: bool = False) -> None:
    """Put `text` into `path` whole, by rename, with the old one's mode and owner.

    `beside`: by a file in the same directory, for a user who may not write where the module has its files.
    """
    place = os.path.dirname(path) if beside else module.tmpdir
    descriptor, temporary = tempfile.mkstemp(dir=place, prefix=".trainyard-")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    # Hosts in containers have some of these files as mounts, which cannot be renamed over.
    module.atomic_move(temporary, path, unsafe_writes=True)
