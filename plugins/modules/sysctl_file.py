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
    One that the owner's file sets before this one is told, unless the inventory asks for it.
  - What would take away the address by which somebody is logged in is refused.
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
      at_least: {type: bool, default: false, description: "A file that is read before may have set more, which stays"}
      asked: {type: bool, default: false, description: "By the inventory: no warning where a file before has another"}
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
  description: Keys whose value in the running kernel was changed, or would be, with what they were given.
  type: dict
  returned: always
unavailable:
  description: Keys that this container may not set, with the reason.
  type: dict
  returned: always
"""

import errno
import ipaddress
import os
import re
import textwrap
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import in_container, ssh_session
from ansible.module_utils.managed_block import read, write
from ansible.module_utils.sysctl_folders import FOLDERS, dotted, place, set_elsewhere

PROC = "/proc/sys"
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


def kept(setting: dict, before: dict[str, tuple[str, str]]) -> dict:
    """The setting; one that is to be so much at least with the value of a file that is read before, if that is more."""
    value, file = before.get(dotted(setting["key"]), ("", ""))
    theirs, ours = value.split(), setting["value"].split()
    if not setting.get("at_least") or len(theirs) != len(ours) or not all(map(str.isdecimal, theirs)):
        return setting
    if int(theirs[-1]) <= int(ours[-1]):
        return setting
    why = f"{setting['why']} Trainyard's is {setting['value']}; {file} sets more, and that stays."
    return {**setting, "value": " ".join(theirs), "why": why}


def cuts_off(settings: list[dict], address: str, links: str = "/proc/net/if_inet6") -> str:
    """The key of a setting that takes away IPv6 where `address` is, by which somebody is logged in; "" without one."""
    if ":" not in address:
        return ""
    number = f"{int(ipaddress.ip_address(address)):032x}"
    holders = [line.split()[-1] for line in Path(links).read_text().splitlines() if line.startswith(number)]
    for setting in settings:
        named = re.fullmatch("net.ipv6.conf.(.+).disable_ipv6", setting["key"])
        if named and setting["value"] != "0" and named[1].replace("/", ".") in ("all", "default", *holders):
            return setting["key"]
    return ""


def canonical(value: str) -> list:
    """A value as words; of a list of ports or processors its numbers, since the kernel writes 1,2 as 1-2."""
    value = value.strip()
    if not re.search("[,-]", value) or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", value):
        return value.split()
    spans = [part.partition("-") for part in value.split(",")]
    return sorted({n for low, _, high in spans for n in range(int(low), int(high or low) + 1)})


def apply(settings: list[dict], root: str, write_it: bool) -> tuple[dict[str, str], dict[str, OSError]]:
    """Give the kernel below `root` (/proc/sys) the values that differ; only look if not `write_it`.

    Returns the keys that differed, with what they had, and the keys that failed with their errors. One that is the same
    once it is written did not differ: the kernel has a form of its own.
    """
    differed, failed = {}, {}
    for setting in settings:
        key = setting["key"]
        path = os.path.join(root, place(key))
        try:
            with open(path, encoding="ascii") as file:
                had = file.read()
            if canonical(had) == canonical(setting["value"]):
                continue
            if not os.access(path, os.W_OK):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if write_it:
                with open(path, "w", encoding="ascii") as file:
                    file.write(setting["value"])
                with open(path, encoding="ascii") as file:
                    if file.read() == had:
                        continue
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
    return key.startswith(LATER) and not os.path.exists(os.path.join(root, place(key)))


def main() -> None:
    setting = {
        "key": {"type": "str", "required": True, "no_log": False},
        "value": {"type": "str", "required": True},
        "why": {"type": "str"},
        "at_least": {"type": "bool", "default": False},
        "asked": {"type": "bool", "default": False},
    }
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "settings": {"type": "list", "elements": "dict", "required": True, "options": setting},
            "only_look": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    earlier, later = set_elsewhere(path)
    settings = [kept(setting, earlier) for setting in module.params["settings"]]
    before, after = read(path), render(settings)
    write_it = not (module.check_mode or module.params["only_look"])
    own = [setting for setting in settings if dotted(setting["key"]) not in later]
    address = (ssh_session() or {"address": ""})["address"]
    if key := cuts_off(own, address):
        module.fail_json(
            msg=f"tuning_sysctl: found {key} turned on; expected IPv6 to stay, as SSH comes to this host's address "
            f"{address}, and would not get in any more. Leave the key out, or reach the host by IPv4 (ansible_host). "
            "All settings are as they were."
        )
    if not write_it:  # on an untouched host
        own = [setting for setting in own if not may_come(setting["key"], PROC)]
    differed, failed, refused = take(own, PROC, write_it, in_container())
    if refused:
        module.fail_json(
            msg=f"The kernel does not take these settings: {refused}. Correct the value in tuning_sysctl, "
            "or leave the key alone with an empty value. All settings are as they were."
        )
    applied = {setting["key"]: setting["value"] for setting in own if setting["key"] in differed}
    if module.params["only_look"]:
        module.exit_json(changed=False, applied=applied)
    for setting in settings:
        key, ours = setting["key"], setting["value"]
        value, file = later.get(dotted(key), (ours, ""))
        if canonical(value) != canonical(ours):
            module.warn(
                f"{key} stays {value}, not {ours}: {file} sets it at each boot. Take it out "
                "there, or give tuning_sysctl the same value"
            )
        value, file = earlier.get(dotted(key), (ours, ""))
        told = os.path.dirname(file) == FOLDERS[0] and not setting["asked"] and dotted(key) not in later
        if told and canonical(value) != canonical(ours):
            module.warn(
                f"{key} is {ours}, not {value} as {file} says, which is read before {path}. For that value set "
                f'tuning_sysctl: {{{key}: "{value}"}}; if {ours} is right, take it out there'
            )
    unavailable = {key: error.strerror for key, error in failed.items()}
    if unavailable:
        module.warn(f"This container's kernel is not its own; left as they are: {', '.join(unavailable)}")
    if before != after and not module.check_mode:
        write(module, path, after)
        module.set_mode_if_different(path, "0644", False)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    changed = before != after or bool(applied)
    module.exit_json(changed=changed, applied=applied, unavailable=unavailable, diff=diff)


if __name__ == "__main__":
    main()
