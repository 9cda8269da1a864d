#!/usr/bin/python
"""What roles have made on a host: found, with its size, and removed where that is asked for."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_made
short_description: Find, or remove, what roles have made on a host
description:
  - Takes only what roles name. What else lies in their directories stays, and so do the directories then.
  - A mount below one of them is refused, since what is on it may be other hosts', too.
  - The root of a tree may be an unprivileged user's. Links are removed, and never followed.
  - Units are stopped before their files go, and systemd forgets them then.
options:
  made:
    description: What there may be, in the order in which it is removed.
    type: list
    elements: dict
    required: true
    options:
      what: {type: str, required: true, description: "It, in words"}
      path: {type: str, description: A path; it may have wildcards.}
      inside: {type: list, elements: str, description: "Of a directory, what is ours in it; then it, if empty."}
      user: {type: str, description: "With O(made[].inside): what else in it is this user's is ours, too."}
      block: {type: bool, default: false, description: Our block of lines in the file.}
      own_name:
        description: "The host's own name shall stay in the file, as it is or as cloud-init's template has it."
        type: str
        default: ""
        choices: ["", host, template]
      account: {type: str, description: "A user and its group, if the role identity made it."}
  keep: {type: list, elements: path, default: [], description: What stays nevertheless.}
  remove: {type: bool, default: false, description: Whether it goes.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Remove what the role tuning has written
  host_made:
    made: [{what: kernel settings, path: /etc/sysctl.d/90-trainyard.conf}]
    remove: true
"""

RETURN = r"""
found: {description: "What there is, or was: C(what), C(path), C(bytes).", type: list, elements: dict, returned: always}
left: {description: Directories that stay because there is more in them., type: list, elements: str, returned: always}
mounts: {description: What is mounted below what was found., type: list, elements: str, returned: always}
"""

import contextlib
import fnmatch
import glob
import grp
import os
import pwd
import re
import shutil
import socket
import stat

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_identity import TEMPLATE_NAMES, unmarked
from ansible.module_utils.managed_block import (
    BEGIN,
    endless,
    join,
    read,
    split,
    strangers,
    through_links,
    write,
)

COMMENT = "Trainyard"  # in passwd, by which the role identity knows the user that it made
USER_BUSY = 8  # userdel's exit code
UNITS = "/etc/systemd/system"


def size(path: str) -> int:
    """Bytes of a file, or of all below a directory; links are not followed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(found.st_mode):
        return found.st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
        if os.path.lexists(os.path.join(folder, name))
    )


def mounts_below(path: str, table: str = "/proc/self/mountinfo") -> list[str]:
    """Where something is mounted at `path` or below it."""
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        places = [line.split()[4].replace("\\040", " ") for line in file]
    real = os.path.realpath(path)
    return sorted({place for place in places if place == real or place.startswith(f"{real}/")})


def account_of(name: str) -> pwd.struct_passwd | None:
    """The user, if it is ours."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    return found if found.pw_gecos.split(",")[0] == COMMENT and found.pw_uid else None


def group_there(name: str) -> bool:
    """Whether the group is there without its user, as a removal that broke off leaves it."""
    with contextlib.suppress(KeyError):
        pwd.getpwnam(name)
        return False
    with contextlib.suppress(KeyError):
        return 0 < grp.getgrnam(name).gr_gid < 1000
    return False


def paths_of(item: dict, keep: list[str]) -> list[str]:
    """The paths there are of an item, without what stays."""
    found = [path for path in sorted(glob.glob(item["path"])) or [item["path"]] if os.path.lexists(path)]
    if item["inside"] is not None:
        uid = None
        with contextlib.suppress(KeyError):
            uid = pwd.getpwnam(item["user"]).pw_uid if item["user"] else None
        found = [
            os.path.join(folder, name)
            for folder in found
            if os.path.isdir(folder) and not os.path.islink(folder)
            for name in sorted(os.listdir(folder))
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in item["inside"])
            or (uid is not None and os.lstat(os.path.join(folder, name)).st_uid == uid)
        ]
    return [path for path in found if path not in keep]


def own_name(kind: str) -> str:
    """The host's own name or names in a file: "" for the `kind` "" of files that shall have none."""
    return {"host": socket.gethostname(), "template": " ".join(TEMPLATE_NAMES)}.get(kind, "")


def without_block(path: str, own_name: str) -> str:
    """The file's text as it was before our block; with `own_name`, so that the host knows itself, as Debian has it.

    An earlier release left nothing of the line from which it took that name, or the name with a domain alone.
    """
    outside, inside = split(read(path))
    others = strangers(inside)
    marked = len(others) < len(inside)  # as lines of peers are, and hosts' in /etc/hosts are not
    outside = [*unmarked(outside), *(others if marked and not own_name else [])]
    name = own_name.split()[-1] if own_name else ""
    if name and not any(name.lower() in line.partition("#")[0].lower().split()[1:] for line in outside):
        full = re.compile(rf"^(127\.0\.1\.1(\s+){re.escape(name)}\.\S+)")
        after = next((n for n, line in enumerate(outside) if line.split()[:1] == ["127.0.0.1"]), -1)
        if any(map(full.match, outside)):
            outside = [full.sub(rf"\g<1>\g<2>{name}", line) for line in outside]
        else:
            outside.insert(after + 1, f"127.0.1.1 {own_name}")
    return join(outside, [])


class Host:
    """One module call: what was found, and how it goes."""

    def __init__(self, module: AnsibleModule):
        self.module, self.keep = module, module.params["keep"]
        self.found: list[dict] = []
        self.left: list[str] = []
        self.mounts: list[str] = []

    def look(self, items: list[dict]) -> None:
        """Note what there is."""
        for item in items:
            if item["account"]:
                there = (
                    [item["account"]] if account_of(item["account"]) or group_there(item["account"]) else []
                )
            elif item["block"]:
                lines = read(item["path"]).splitlines()
                there = [item["path"]] if any(line.startswith(BEGIN) for line in lines) else []
                if item["own_name"] and (fault := endless(item["path"], read(item["path"]))):
                    self.module.fail_json(msg=fault)
            else:
                there = [path for path in paths_of(item, self.keep) if not self._known(path)]
                for path in there:
                    if os.path.isdir(path) and not os.path.islink(path):
                        self.mounts += mounts_below(path)
            self.found += [
                {"what": item["what"], "path": path, "bytes": 0 if item["block"] else size(path)}
                for path in there
            ]
        for item in items:
            folder = item["path"]
            if (
                item["inside"] is None
                or not os.path.isdir(folder)
                or os.path.islink(folder)
                or self._known(folder)
            ):
                continue
            if not all(self._known(os.path.join(folder, name)) for name in os.listdir(folder)):
                self.left.append(folder)
            elif not os.path.ismount(folder):
                self.found.append({"what": item["what"], "path": folder, "bytes": 0})

    def _known(self, path: str) -> bool:
        """Whether it was found already, itself or a directory that holds it."""
        return any(path == one["path"] or path.startswith(f"{one['path']}/") for one in self.found)

    def remove(self, item: dict) -> None:
        """Have an item gone."""
        if item["account"]:
            self._remove_account(item["account"])
        elif item["block"]:
            text = read(item["path"])
            if any(line.startswith(BEGIN) for line in text.splitlines()):
                after = without_block(item["path"], own_name(item["own_name"]))
                if after:
                    write(self.module, through_links(item["path"]), after)
                else:
                    os.unlink(item["path"])
        else:
            for path in paths_of(item, self.keep):
                self._remove_path(path)
            if item["inside"] is not None and not os.path.islink(item["path"]):
                with contextlib.suppress(OSError):  # there is more in it, or it is a mount
                    os.rmdir(item["path"])

    def _remove_path(self, path: str) -> None:
        if os.path.dirname(path) == UNITS and not os.path.islink(path):
            unit = os.path.basename(path).replace("@.", "@*.")
            self.module.run_command(["systemctl", "stop", unit])
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onerror=gone_is_well)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def forget_units(self) -> None:
        """Have systemd know that units are gone."""
        if any(one["path"].startswith(f"{UNITS}/") for one in self.found):
            self.module.run_command(["systemctl", "daemon-reload"])
            self.module.run_command(["systemctl", "reset-failed", "trainyard*"])

    def _remove_account(self, name: str) -> None:
        if account_of(name):
            rc, _, err = self.module.run_command(["userdel", name])
            if rc == USER_BUSY:
                self.module.fail_json(
                    msg=f"user {name}: found processes of it ({err.strip()}); expected none. See them with "
                    f"`ps -u {name}`, end them, and run it again."
                )
            if rc:
                self.module.fail_json(msg=f"user {name}: userdel: {err.strip()}")
        if group_there(name):
            rc, _, err = self.module.run_command(["groupdel", name])
            if rc:
                self.module.fail_json(msg=f"group {name}: groupdel: {err.strip()}")


def gone_is_well(function, path, info) -> None:
    """For rmtree: what another has removed meanwhile is as it should be."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def main() -> None:
    item = {
        **{name: {"type": "str"} for name in ("path", "user", "account")},
        "what": {"type": "str", "required": True},
        "inside": {"type": "list", "elements": "str"},
        "block": {"type": "bool", "default": False},
        "own_name": {"type": "str", "default": "", "choices": ["", "host", "template"]},
    }
    module = AnsibleModule(
        argument_spec={
            "made": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": item,
                "required_one_of": [("path", "account")],
            },
            "keep": {"type": "list", "elements": "path", "default": []},
            "remove": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    host = Host(module)
    try:
        host.look(module.params["made"])
        if module.params["remove"] and host.mounts:
            module.fail_json(
                msg=f"found mounted: {', '.join(host.mounts)}; expected nothing there, since what is on it may be "
                "other hosts', too. Unmount it, and run it again."
            )
        if module.params["remove"] and not module.check_mode:
            for one in module.params["made"]:
                host.remove(one)
            host.forget_units()
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    changed = module.params["remove"] and bool(host.found)
    module.exit_json(changed=changed, found=host.found, left=host.left, mounts=host.mounts)


if __name__ == "__main__":
    main()
