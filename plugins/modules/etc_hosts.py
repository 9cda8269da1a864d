#!/usr/bin/python
"""The cluster's hosts in /etc/hosts."""

from __future__ import annotations

DOCUMENTATION = """
module: etc_hosts
short_description: The cluster's hosts in /etc/hosts, in a block of their own
description:
  - Lines outside of the block stay as they are, with one exception. The line that Debian and Ubuntu write
    for a machine's own name, C(127.0.1.1 NAME), loses the names of the cluster's hosts. With it, a machine
    believes that its own name is a loopback address, tells that to its peers, and they cannot connect.
options:
  hosts:
    description: One item a host, in order; each with C(address) and C(names).
    type: list
    elements: dict
    required: true
    options:
      name: {type: str, description: "The inventory's name for it, of no matter here"}
      address: {type: str, required: true, description: IPv4 address}
      names: {type: list, elements: str, required: true, description: "The names, the canonical one first"}
  path:
    description: The file.
    type: path
    default: /etc/hosts
"""

EXAMPLES = """
- name: Know the peers by name
  etc_hosts:
    hosts:
      - {address: 192.168.1.100, names: [node1]}
"""

RETURN = """
conflicts:
  description: Lines of the machine's owner that give one of the names another address, as text.
  type: list
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import join, read, split, write

NOTE = "the cluster's hosts, written by the role identity"


def without_loopback_names(line: str, names: set[str]) -> str | None:
    """`line`, an owner's line, without the cluster's `names` on 127.0.1.1; None if nothing is left of it."""
    entry, _, comment = line.partition("#")
    words = entry.split()
    if not words or words[0] != "127.0.1.1" or not names & set(words[1:]):
        return line
    left = [word for word in words[1:] if word not in names]
    if not left:
        return None
    return " ".join([words[0], *left]) + (f"  #{comment}" if comment else "")


def conflicts(lines: list[str], hosts: list[dict]) -> list[str]:
    """Owner's lines that give a host's name another IPv4 address, in words."""
    wanted = {name: host["address"] for host in hosts for name in host["names"]}
    found = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        found += [
            f"{line.strip()!r}; the cluster has {wanted[name]} for {name}"
            for name in names
            if name in wanted and address != wanted[name] and "." in address
        ]
    return found


def render(text: str, hosts: list[dict]) -> tuple[str, list[str]]:
    """The file's new text from its old one, and the conflicts in it."""
    names = {name for host in hosts for name in host["names"]}
    outside, _ = split(text)
    kept = [line for line in (without_loopback_names(line, names) for line in outside) if line is not None]
    block = [" ".join([host["address"], *host["names"]]) for host in hosts]
    return join(kept, block, NOTE), conflicts(kept, hosts)


def main() -> None:
    host = {
        "name": {"type": "str"},
        "address": {"type": "str", "required": True},
        "names": {"type": "list", "elements": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "hosts": {"type": "list", "elements": "dict", "required": True, "options": host},
            "path": {"type": "path", "default": "/etc/hosts"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    before = read(path)
    after, found = render(before, module.params["hosts"])
    for conflict in found:
        module.warn(f"{path} has the line {conflict}. The first line wins; remove yours if it is stale.")
    if after != before and not module.check_mode:
        write(module, path, after)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    module.exit_json(changed=after != before, conflicts=found, diff=diff)


if __name__ == "__main__":
    main()
