#!/usr/bin/python
"""A machine-id of this machine's own."""

from __future__ import annotations

DOCUMENTATION = """
module: machine_id
short_description: A machine-id that no other host of the cluster has
description:
  - A machine that was cloned from another has its machine-id, and so, where addresses come by DHCP,
    perhaps its address.
  - A machine without an id, or with one that is C(taken), gets a new random one. All else is left alone.
  - systemd reads the id at boot; journald and others keep to the old one until then.
options:
  taken:
    description: Ids that other hosts have a better claim to.
    type: list
    elements: str
    default: []
  path:
    description: The file with the id.
    type: path
    default: /etc/machine-id
  dbus_path:
    description: Where D-Bus looks. A link to C(path), or a copy that must say the same.
    type: path
    default: /var/lib/dbus/machine-id
"""

EXAMPLES = """
- name: Have an id of our own
  machine_id:
    taken: [0123456789abcdef0123456789abcdef]
"""

RETURN = """
machine_id:
  description: The id after the change; empty in check mode if a new one would be made.
  type: str
  returned: always
previous:
  description: The id before.
  type: str
  returned: always
"""

import uuid

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_identity import needs_new, stale_copy
from ansible.module_utils.managed_block import read, write


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "taken": {"type": "list", "elements": "str", "default": []},
            "path": {"type": "path", "default": "/etc/machine-id"},
            "dbus_path": {"type": "path", "default": "/var/lib/dbus/machine-id"},
        },
        supports_check_mode=True,
    )
    path, dbus = module.params["path"], module.params["dbus_path"]
    current = read(path).strip()
    new = needs_new(current, module.params["taken"])
    machine_id = current
    if new:
        machine_id = "" if module.check_mode else uuid.uuid4().hex
        module.warn(
            f"machine-id {current or '(none)'} is missing or another host's, too: a new one is made. "
            "Reboot this host when it suits you, so that all services take it up."
        )
    stale = stale_copy(dbus, machine_id)
    if not module.check_mode:
        if new:
            write(module, path, f"{machine_id}\n")
            module.set_mode_if_different(path, "0444", False)
        if stale:
            write(module, dbus, f"{machine_id}\n")
    module.exit_json(changed=new or stale, machine_id=machine_id, previous=current)


if __name__ == "__main__":
    main()
