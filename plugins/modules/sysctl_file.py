#!/usr/bin/python
"""Kernel settings, in a file of sysctl.d and in the running kernel."""

from __future__ import annotations

DOCUMENTATION = """
module: sysctl_file
short_description: Kernel settings, in a file of sysctl.d and in the running kernel
description:
  - The file holds every setting with its reason. The running kernel gets those that differ, in the same run.
  - In a container, some keys are not there or read-only, because the kernel is another's. They are
    reported in C(unavailable); on a machine of its own, a key that cannot be set is a failure, and all stay as they
    were.
  - A key that another file sets after this one, at each boot, is that file's, and stays as it is in the running kernel.
options:
  path:
    description: The file.
    type: path
    required: true
  settings:
    description: The settings, in the order of the file.
    type: list
    elements: dict
    required: true
    options:
      key: {type: str, required: true, description: "Name, with dots"}
      value: {type: str, required: true, description: "Value; a list of numbers is separated by blanks"}
      why: {type: str, description: "The reason, a comment in the file"}
  only_look:
    description: >-
      Fail where the kernel has not got one of the settings, and change nothing. One that comes with the role
      firewall's rules is let pass, and so it is in check mode.
    type: bool
    default: false
"""

EXAMPLES = """
- name: Swap late
  sysctl_file:
    path: /etc/sysctl.d/90-trainyard.conf
    settings:
      - {key: vm.swappiness, value: "10", why: Memory in use is worth more than cached files.}
"""

RETURN = """
applied:
  description: Keys whose value in the running kernel was changed.
  type: list
  returned: always
unavailable:
  description: Keys that this container may not set, with the reason.
  type: dict
  returned: always
"""

import errno
import os
import textwrap
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import in_container
from ansible.module_utils.managed_block import read, write

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
LATER = ("net.netfilter.nf_conntrack_", "net.nf_conntrack_max")  # they come with the role firewall's rules
# What the kernel of another answers: no such key in this namespace, mounted read-only, not permitted.
NOT_OURS = (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM)


def render(settings: list[dict]) -> str:
    """The file's text."""
    lines = ["# Written by the role tuning; change tuning_sysctl in the inventory instead."]
    for setting in settings:
        lines += ["", *textwrap.wrap(setting["why"] or "", 100, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{setting['key']} = {setting['value']}")
    return "".join(f"{line}\n" for line in lines)


def set_later(path: str, folders: tuple[str, ...] = FOLDERS) -> dict[str, tuple[str, str]]:
    """Key to (value, file) of what sysctl.d's files that are read after `path` set at boot (sysctl.d(5))."""
    files = {}
    for folder in reversed(folders):  # of one name, the first folder's counts
        files |= {file.name: file for file in Path(folder).glob("*.conf")}
    found = {}
    for name in sorted(files):
        if name <= os.path.basename(path):
            continue
        try:
            lines = files[name].read_text(errors="replace").splitlines()
        except OSError:
            continue  # a link to nowhere
        for line in lines:
            key, is_one, value = line.strip().lstrip("-").partition("=")
            if is_one and not key.startswith(("#", ";")):
                # Where a slash comes first, slashes stand between a name's parts, else dots.
                separator = next((sign for sign in key if sign in "./"), ".")
                found[key.strip().replace(separator, ".")] = (value.strip(), str(files[name]))
    return found


def apply(settings: list[dict], root: str, write_it: bool) -> tuple[dict[str, str], dict[str, OSError]]:
    """Give the kernel below `root` (/proc/sys) the values that differ; only look if not `write_it`.

    Returns the keys that differed, with what they had, and the keys that failed with their errors.
    """
    differed, failed = {}, {}
    for setting in settings:
        key = setting["key"]
        path = os.path.join(root, key.replace(".", "/"))
        try:
            with open(path, encoding="ascii") as file:
                had = file.read()
            if had.split() == setting["value"].split():
                continue
            if not os.access(path, os.W_OK):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if write_it:
                with open(path, "w", encoding="ascii") as file:
                    file.write(setting["value"])
            differed[key] = had
        except OSError as error:
            failed[key] = error
    return differed, failed


def not_taken(failed: dict[str, OSError], container: bool) -> str:
    """Which keys failed and are not just a container's that is not to have them, and why; "" if none."""
    hard = {key: error for key, error in failed.items() if not (container and error.errno in NOT_OURS)}
    return "; ".join(f"{key}: {error.strerror}" for key, error in hard.items())


def take(settings: list[dict], root: str, write_it: bool, container: bool) -> tuple[dict, dict, str]:
    """As `apply`, but all or nothing; and `not_taken`.

    What the kernel has not got is seen before anything is written; what it refuses to take, by trying alone.
    """
    differed, failed = apply(settings, root, False)
    if write_it and not not_taken(failed, container):
        differed, failed = apply(settings, root, True)
        if not_taken(failed, container):
            apply([{"key": key, "value": had} for key, had in differed.items()], root, True)
    return differed, failed, not_taken(failed, container)


def may_come(key: str, root: str) -> bool:
    """Whether a key is not there, and may be brought by a module of the kernel that an earlier role of ours loads."""
    return key.startswith(LATER) and not os.path.exists(os.path.join(root, key.replace(".", "/")))


def main() -> None:
    setting = {
        "key": {"type": "str", "required": True, "no_log": False},
        "value": {"type": "str", "required": True},
        "why": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "settings": {"type": "list", "elements": "dict", "required": True, "options": setting},
            "only_look": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path, settings = module.params["path"], module.params["settings"]
    before, after = read(path), render(settings)
    later = set_later(path)
    write_it = not (module.check_mode or module.params["only_look"])
    own = [setting for setting in settings if setting["key"] not in later]
    if not write_it:  # on an untouched host
        own = [setting for setting in own if not may_come(setting["key"], "/proc/sys")]
    applied, failed, refused = take(own, "/proc/sys", write_it, in_container())
    if refused:
        module.fail_json(
            msg=f"The kernel does not take these settings: {refused}. Correct the value in tuning_sysctl, "
            "or leave the key alone with an empty value. All settings are as they were."
        )
    if module.params["only_look"]:
        module.exit_json(changed=False)
    for setting in settings:
        value, file = later.get(setting["key"], (setting["value"], ""))
        if value.split() != setting["value"].split():
            module.warn(
                f"{setting['key']} stays {value}, not {setting['value']}: {file} sets it at each boot. Take it out "
                "there, or give tuning_sysctl the same value"
            )
    unavailable = {key: error.strerror for key, error in failed.items()}
    if unavailable:
        module.warn(f"This container's kernel is not its own; left as they are: {', '.join(unavailable)}")
    if before != after and not module.check_mode:
        write(module, path, after)
        module.set_mode_if_different(path, "0644", False)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    changed = before != after or bool(applied)
    module.exit_json(changed=changed, applied=list(applied), unavailable=unavailable, diff=diff)


if __name__ == "__main__":
    main()
