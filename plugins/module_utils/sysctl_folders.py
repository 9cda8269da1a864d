"""What the files of sysctl.d set at each boot, and how their names of keys are read."""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
SWAPPED = str.maketrans("./", "/.")


def separator(key: str) -> str:
    """What stands between a name's parts: slashes where one comes first, else dots."""
    return next((sign for sign in key if sign in "./"), ".")


def dotted(key: str) -> str:
    """A key's name with dots between its parts, and a slash for the dot of a name, so that each has one."""
    return key.translate(SWAPPED) if separator(key) == "/" else key


def place(key: str) -> str:
    """Where a key is below /proc/sys: between dots a slash stands for the dot of a name, as of the VLAN eth0/100."""
    return key if separator(key) == "/" else key.translate(SWAPPED)


def set_elsewhere(path: str, folders: tuple[str, ...] = FOLDERS) -> tuple[dict, dict]:
    """What files of sysctl.d set at boot that are read before `path`, and after it: key to (value, file)."""
    files = {}
    for folder in reversed(folders):  # of one name, the first folder's counts
        files |= {file.name: file for file in Path(folder).glob("*.conf")}
    own = os.path.basename(path)
    before, after = {}, {}
    for name in sorted(files.keys() - {own}):
        try:
            lines = files[name].read_text(errors="replace").splitlines()
        except OSError:
            continue  # a link to nowhere
        for line in lines:
            key, is_one, value = line.strip().lstrip("-").partition("=")
            if is_one and not key.startswith(("#", ";")):
                found = before if name < own else after
                found[dotted(key.strip())] = (value.strip(), str(files[name]))
    return before, after
