#!/usr/bin/python
"""Limits of login sessions, in a file of limits.d, but only those that this machine can grant."""

from __future__ import annotations

DOCUMENTATION = """
module: limits_file
short_description: Limits of login sessions, in a file of limits.d, but only those that this machine can grant
description:
  - PAM passes over a limit that the kernel does not grant, with a line in the log alone, or refuses the whole login,
    where it is not Debian's or Ubuntu's. So each limit is tried first, in a process of its own. One that fails, as in a
    container without CAP_SYS_RESOURCE, is left out and reported; on a machine of its own, it is a failure.
options:
  path:
    description: The file.
    type: path
    required: true
  limits:
    description: The limits, each soft and hard.
    type: list
    elements: dict
    required: true
    options:
      domain: {type: str, required: true, description: "A user, or a group with @"}
      item: {type: str, required: true, choices: [memlock, nofile], description: "memlock counts KiB"}
      value: {type: str, required: true, description: "A number, or unlimited"}
      why: {type: str, description: "The reason, a comment in the file"}
  nr_open:
    description: What the kernel's C(fs.nr_open), the most for nofile, is to become, where it is not set yet.
    type: int
  only_look:
    description: Say whether the file differs, fail where a limit cannot be granted, and change nothing.
    type: bool
    default: false
"""

EXAMPLES = """
- name: Let the service group pin memory
  limits_file:
    path: /etc/security/limits.d/90-trainyard.conf
    limits:
      - {domain: "@trainyard", item: memlock, value: unlimited}
"""

RETURN = """
left_out:
  description: Items that this container cannot grant.
  type: list
  returned: without O(only_look)
differs:
  description: Whether the file is to be written.
  type: bool
  returned: with O(only_look)
"""

import os
import resource

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import in_container
from ansible.module_utils.managed_block import read, write
from ansible.module_utils.sysctl_folders import set_elsewhere

ITEMS = {"memlock": (resource.RLIMIT_MEMLOCK, 1024), "nofile": (resource.RLIMIT_NOFILE, 1)}


def most_files() -> int:
    """How many open files the kernel grants now, root, too."""
    with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
        return int(file.read())


def not_yet(wanted: int) -> str:
    """What is said where a file of the host's own has the kernel grant so many files, and has not been read yet."""
    earlier, later = set_elsewhere("")
    value, file = {**earlier, **later}.get("fs.nr_open", ("", ""))
    if not value.isdecimal() or int(value) < wanted:
        return ""
    return f"{file} sets it to {value}, which is not in force yet. Have that read: sudo sysctl --system"


def number(limit: dict) -> int:
    """The limit in setrlimit's unit."""
    _, unit = ITEMS[limit["item"]]
    return resource.RLIM_INFINITY if limit["value"] == "unlimited" else int(limit["value"]) * unit


def grantable(limit: dict, most: int | None = None) -> bool:
    """True if a process of root can take the limit, as PAM will for a login; tried in a child.

    most: the open files that the kernel is to grant, where it does not yet; so many are tried as it does.
    """
    wanted = number(limit)
    if limit["item"] == "nofile" and most is not None:
        if wanted > most:
            return False
        wanted = min(wanted, most_files())
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(ITEMS[limit["item"]][0], (wanted, wanted))
        except (OSError, ValueError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def render(limits: list[dict]) -> str:
    lines = ["# Written by the role tuning; limits of login sessions. Units of systemd have their own."]
    for limit in limits:
        lines += ["", *([f"# {limit['why']}"] if limit["why"] else [])]
        lines.append(f"{limit['domain']} - {limit['item']} {limit['value']}")
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    limit = {
        "domain": {"type": "str", "required": True},
        "item": {"type": "str", "required": True, "choices": list(ITEMS)},
        "value": {"type": "str", "required": True},
        "why": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "limits": {"type": "list", "elements": "dict", "required": True, "options": limit},
            "nr_open": {"type": "int"},
            "only_look": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path, limits = module.params["path"], module.params["limits"]
    most = module.params["nr_open"] or most_files()
    beyond = [limit["value"] for limit in limits if limit["item"] == "nofile" and number(limit) > most]
    if beyond and not in_container():
        cure = (
            not_yet(int(beyond[0]))
            or f'Lower it, or raise that, too: tuning_sysctl: {{fs.nr_open: "{beyond[0]}"}}'
        )
        module.fail_json(
            msg=f"tuning_nofile: found {beyond[0]}; expected at most {most}, fs.nr_open: this machine cannot grant "
            f"nofile beyond it. {cure}"
        )
    granted = [limit for limit in limits if grantable(limit, most)]
    left_out = [limit["item"] for limit in limits if limit not in granted]
    if left_out:
        if not in_container():
            module.fail_json(msg=f"This machine cannot grant {', '.join(left_out)}: root itself is refused.")
        module.warn(f"This container may not raise limits; left as they are: {', '.join(left_out)}")
    before, after = read(path), render(granted)
    if module.params["only_look"]:
        module.exit_json(changed=False, differs=before != after)
    if before != after and not module.check_mode:
        write(module, path, after)
        module.set_mode_if_different(path, "0644", False)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    module.exit_json(changed=before != after, left_out=left_out, diff=diff)


if __name__ == "__main__":
    main()
