#!/usr/bin/python
"""The cluster's hosts in /etc/hosts."""

from __future__ import annotations

DOCUMENTATION = """
module: etc_hosts
short_description: The cluster's hosts in /etc/hosts, in a block of their own
description:
  - Lines outside of the block stay as they are, with one exception. The line that Debian and Ubuntu write
    for a machine's own name, C(127.0.1.1 NAME), and Vagrant with the next such address, becomes a comment where it has
    names of the cluster's hosts; what else it has is in the block. With it, a machine believes that its own name is a
    loopback address, tells that to its peers, and they cannot connect.
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
from ansible.module_utils.host_identity import HOST, hosts_file, written_at_start
from ansible.module_utils.managed_block import endless, read, through_links, write


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "hosts": {"type": "list", "elements": "dict", "required": True, "options": HOST},
            "path": {"type": "path", "default": "/etc/hosts"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    before = read(path)
    if fault := endless(path, before):
        module.fail_json(msg=fault)
    after, found = hosts_file(before, module.params["hosts"])
    for conflict in found:
        module.warn(f"{path} has the line {conflict}. The first line wins; remove yours if it is stale.")
    if words := written_at_start(before, read("/etc/wsl.conf")):
        module.warn(words)
    if after != before and not module.check_mode:
        write(module, through_links(path), after)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    module.exit_json(changed=after != before, conflicts=found, diff=diff)


if __name__ == "__main__":
    main()
