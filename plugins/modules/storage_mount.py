#!/usr/bin/python
"""Have the shared directory mounted when it is used, by one pair of units, or by none."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_mount
short_description: Have just this mount of the role storage on a host, or none
description:
  - Writes a mount unit and the automount unit that calls for it, and removes every other one of the role's, which
    are known by their first line.
  - What is mounted by a unit that goes or changes is unmounted first, and not by force, so that nothing that was
    written gets lost. Where that fails because it is in use, nothing is changed, and the processes are named.
options:
  unit:
    description: The units' name without its kind; left out, none shall be there.
    type: str
  mount:
    description: The text of the mount unit.
    type: str
  automount:
    description: The text of the automount unit.
    type: str
  group:
    description: The service group, by which an empty parent directory is known as the role's.
    type: str
    required: true
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Have nothing mounted
  storage_mount: {group: trainyard}
"""

RETURN = r"""
removed: {description: Units that went., type: list, elements: str, returned: always}
"""

import contextlib
import grp
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import read, write
from ansible.module_utils.storage_units import FOLDER, is_roles, mounts_at, our_units, where

WANTS = f"{FOLDER}/multi-user.target.wants"


def users_of(path: str, proc: str = "/proc") -> list[str]:
    """Processes that stand in `path` or hold a file below it open, as "name (pid)"; the files are not looked at."""
    found = []
    for pid in filter(str.isdigit, os.listdir(proc)):
        links = [f"{proc}/{pid}/{name}" for name in ("cwd", "root", "exe")]
        for folder in ("fd", "map_files"):
            with contextlib.suppress(OSError):
                links += [f"{proc}/{pid}/{folder}/{name}" for name in os.listdir(f"{proc}/{pid}/{folder}")]
        for link in links:
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target == path or target.startswith(f"{path}/"):
                    with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
                        found.append(f"{file.read().strip()} ({pid})")
                    break
    return found


class Mounts:
    """The role's units on this host."""

    def __init__(self, module: AnsibleModule):
        self.module = module

    def systemctl(self, *words: str) -> int:
        return self.module.run_command(["systemctl", *words])[0]

    def unmount(self, unit: str, path: str) -> None:
        """Stop the mount, and only then its automount: that would let go of what is still in use."""
        self.systemctl("stop", f"{unit}.mount")
        if any(mount["type"] != "autofs" for mount in mounts_at(path)):
            users = users_of(path)
            self.module.fail_json(
                msg=f"storage_path: found {path} in use{f' by {chr(44).join(users[:8])}' if users else ''}; "
                "expected it to be unmounted. End that (a run: playbooks/stop.yml), and run it again."
            )
        self.systemctl("stop", f"{unit}.automount")
        if mounts_at(path):
            self.module.fail_json(
                msg=f"storage_path: found {path} still mounted; expected it to be unmounted. See `systemctl status` "
                f"of '{unit}.automount' on the host, and run it again."
            )

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{WANTS}/{name}")
        os.unlink(f"{FOLDER}/{name}")

    def remove_places(self, path: str) -> None:
        """The mount point, and its parent, where they are empty and the role's."""
        with contextlib.suppress(OSError):
            os.rmdir(path)
        with contextlib.suppress(OSError, KeyError):
            if is_roles(os.path.dirname(path), grp.getgrnam(self.module.params["group"]).gr_gid):
                os.rmdir(os.path.dirname(path))


def main() -> None:
    texts = ("mount", "automount")
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            **{name: {"type": "str"} for name in ("unit", *texts)},
        },
        required_by={"unit": texts},
        supports_check_mode=True,
    )
    unit = module.params["unit"]
    wanted = {f"{unit}.{kind}": module.params[kind] for kind in texts} if unit else {}
    before = {name: read(f"{FOLDER}/{name}") for name in {*our_units(), *wanted}}
    differing = {name for name, text in before.items() if text != wanted.get(name, "")}
    removed = sorted(name for name in differing if name not in wanted)
    mounts = Mounts(module)
    active = not wanted or mounts.systemctl("is-active", "--quiet", f"{unit}.automount") == 0
    enabled = not wanted or mounts.systemctl("is-enabled", "--quiet", f"{unit}.automount") == 0
    changed = bool(differing) or not active or not enabled
    if changed and not module.check_mode:
        places = {name.rpartition(".")[0]: where(before[name]) for name in differing if before[name]}
        for stem, path in places.items():
            mounts.unmount(stem, path)
        for name in removed:
            mounts.remove(name)
        for name in differing & wanted.keys():
            write(module, f"{FOLDER}/{name}", wanted[name])
            module.set_mode_if_different(f"{FOLDER}/{name}", "0644", False)
        mounts.systemctl("daemon-reload")
        for stem, path in places.items():
            if stem != unit:
                mounts.remove_places(path)
        if wanted:
            rc, _, err = module.run_command(["systemctl", "enable", "--now", f"{unit}.automount"])
            if rc:
                module.fail_json(msg=f"{unit}.automount: it does not start: {err.strip()}")
    diff = [
        {
            "before_header": f"{FOLDER}/{name}",
            "after_header": f"{FOLDER}/{name}",
            "before": before[name],
            "after": wanted.get(name, ""),
        }
        for name in sorted(differing)
    ]
    module.exit_json(changed=changed, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
