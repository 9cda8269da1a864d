"""The role storage's units on a host, and what is mounted by them."""

from __future__ import annotations

import os
import re
import stat

FOLDER = "/etc/systemd/system"
MARK = "# Written by Trainyard (the role storage)"  # the first words of each of its units


def mount_table(table: str = "/proc/self/mountinfo") -> list[dict]:
    """What is mounted, {at, type, source}, of one place the last one on top; nothing is asked of what is mounted."""
    found = []
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, source, *_ = [*right.split(" "), ""]
            found.append({"at": unescaped(left.split()[4]), "type": kind, "source": unescaped(source)})
    return found


def mounts_at(path: str, table: str = "/proc/self/mountinfo") -> list[dict]:
    """What is mounted at just `path`, as `mount_table` has it."""
    return [mount for mount in mount_table(table) if mount["at"] == path]


def unescaped(path: str) -> str:
    r"""A path of the kernel's, of /etc/exports or /etc/fstab, in which a blank is \040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)


def our_units(folder: str = FOLDER) -> dict[str, str]:
    """The mount and automount units that the role has written, whatever their path: name to text."""
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith((".automount", ".mount")) and is_ours(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                found[name] = file.read()
    return found


def is_ours(path: str) -> bool:
    """Whether the role has written that file."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(len(MARK)) == MARK


def storage_unit(path: str) -> str:
    """What systemd calls the units of a mount at `path`, without their kind; as systemd-escape --path has it."""
    name = path.strip("/").replace("/", "\0")
    # A name cannot begin with a dot. "\0" is what was a slash; a hyphen of the path's own is written out.
    escaped = re.sub(r"^\.|[^\0A-Za-z0-9:_.]", lambda found: f"\\x{ord(found[0]):02x}", name)
    return escaped.replace("\0", "-")


def is_roles(directory: str, gid: int | None) -> bool:
    """Whether the role made the directory around the shared one: root's, with the service group `gid`."""
    try:
        found = os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(found.st_mode) and (found.st_uid, found.st_gid) == (0, gid)


def where(text: str) -> str:
    """The mount point that a unit names."""
    lines = (line.partition("=") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key == "Where"), "")
