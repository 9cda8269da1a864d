#!/usr/bin/python
"""Refuse a host whose disks have no room for what is to be installed on it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: disk_room
short_description: Hold the free space of a host's disks against what an installation needs
description: Reads only.
options:
  first:
    description: >-
      What a first installation needs, as a list of C(path), C(bytes) and C(what) it is for. A path need not be there
      yet; of paths on one disk, the sum must be free, but for what an installation that broke off has left of it in
      C(left), directories.
    type: list
    elements: dict
    required: true
    options: &need
      path: {description: A directory, type: path, required: true}
      bytes: {description: What must be free there, type: int, required: true}
      what: {description: "What for, in words", type: str, required: true}
      left: {description: Directories whose content is a part of it, type: list, elements: path, default: []}
  later:
    description: What any other needs.
    type: list
    elements: dict
    required: true
    options: *need
  environment:
    description: Directory of the Python environments. With one in use there, this installation is not the first.
    type: path
    required: true
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Refuse a full disk
  disk_room:
    first: [{path: /var, bytes: 400000000, what: apt's lists and archives}]
    later: []
    environment: /opt/trainyard/env
"""

RETURN = r"""
first: {description: Whether this is the first installation, type: bool, returned: success}
"""

import contextlib
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import nearest

NEED = {
    "path": {"type": "path", "required": True},
    "bytes": {"type": "int", "required": True},
    "what": {"type": "str", "required": True},
    "left": {"type": "list", "elements": "path", "default": []},
}


# That an installation may make on each of its disks: without a free inode a disk is full, whatever its bytes. The
# Python environment alone has some 20,000.
FILES = {"first": 30_000, "later": 1000}


def size(path: str) -> int:
    """Bytes of disk that all below a directory takes; of what has several names, once."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(folder, name))
                found[about.st_ino] = about.st_blocks * 512
    return sum(found.values())


def volume(number: int, sys: str = "/sys") -> str:
    """The path of the logical volume that a disk (st_dev) is; "" where it is none."""
    place = f"{sys}/dev/block/{os.major(number)}:{os.minor(number)}/dm"
    try:
        with open(f"{place}/uuid", encoding="utf-8") as uuid, open(f"{place}/name", encoding="utf-8") as name:
            return f"/dev/mapper/{name.read().strip()}" if uuid.read().startswith("LVM-") else ""
    except OSError:
        return ""


def read_only(needs: list[dict]) -> list[str]:
    """The paths among `needs` where nothing can be written."""
    paths = [need["path"] for need in needs]
    return [path for path in paths if os.statvfs(nearest(path)).f_flag & os.ST_RDONLY]


def faults(needs: list[dict], files: int = 0) -> list[str]:
    """A sentence for each disk that has less room than what lies there needs together, besides what is there of it.

    files: how many there must be inodes for.
    """
    disks: dict[int, list[dict]] = {}
    for need in needs:
        need = {**need, "bytes": max(0, need["bytes"] - sum(map(size, need.get("left", []))))}
        disks.setdefault(os.stat(nearest(need["path"])).st_dev, []).append(need)
    said = []
    for number, together in disks.items():
        disk = os.statvfs(nearest(together[0]["path"]))
        free, needed = disk.f_bavail * disk.f_frsize, sum(need["bytes"] for need in together)
        paths = ", ".join(need["path"] for need in together)
        if disk.f_files and disk.f_favail < files:  # btrfs and others count none
            said.append(f"{paths}: found {disk.f_favail} inodes free; expected {files}, for as many files.")
        if free < needed:
            what = ", ".join(f"{need['what']} ({need['bytes'] / 1e9:.2f})" for need in together)
            said.append(
                f"{paths}: found {free / 1e9:.2f} GB free; expected {needed / 1e9:.2f} GB, for {what}."
            )
            # Ubuntu's installer for servers leaves half of a disk to no volume, or more.
            if device := volume(number):
                said[-1] += f" Where `sudo vgs` shows room: sudo lvextend -r -l +100%FREE {device}."
    return said


def installed(environments: str) -> bool:
    """Whether an environment is in use there."""
    return os.path.exists(os.path.join(environments, "current", ".complete"))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "first": {"type": "list", "elements": "dict", "options": NEED, "required": True},
            "later": {"type": "list", "elements": "dict", "options": NEED, "required": True},
            "environment": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    there = installed(p["environment"])
    which = "later" if there else "first"
    if paths := read_only(p[which]):
        module.fail_json(
            msg=f"{', '.join(paths)}: found a disk that is mounted for reading alone; expected one to write to. The "
            "kernel does so with a disk whose file system has faults: `dmesg --level=err,crit` says that, and a boot "
            "checks it; else see /etc/fstab."
        )
    if said := faults(p[which], FILES[which]):
        cure = "Make room there (`df -h`, `df -i`, `apt-get clean`, `journalctl --vacuum-size=200M`), and run again."
        if not there:
            cure += " python_env_dir places the environment on another disk."
        module.fail_json(msg=" ".join([*said, cure]))
    module.exit_json(changed=False, first=not there)


if __name__ == "__main__":
    main()
