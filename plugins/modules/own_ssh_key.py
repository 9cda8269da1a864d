#!/usr/bin/python
"""An SSH key of a user's own, which never leaves the host."""

from __future__ import annotations

DOCUMENTATION = """
module: own_ssh_key
short_description: An SSH key of a user's own, which never leaves the host
description:
  - Makes ~/.ssh/id_ed25519 as the user itself, without a passphrase, if there is none.
  - A key that is there is never replaced.
options:
  user:
    description: The user. In check mode it need not be there yet.
    type: str
    required: true
  comment:
    description: A comment for a new key.
    type: str
    required: true
"""

EXAMPLES = """
- name: Have a key
  own_ssh_key:
    user: trainyard
    comment: trainyard@node1
"""

RETURN = """
public_key:
  description: The public key, as type and base64; empty in check mode if there is none yet.
  type: str
  returned: always
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_identity import key_of, public_key


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "comment": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    user = module.params["user"]
    try:
        key = key_of(user)
    except KeyError:
        if module.check_mode:
            module.exit_json(changed=True, public_key="")
        module.fail_json(msg=f"There is no user {user} on this host; the role identity makes it.")
    missing = not os.path.exists(key)
    if missing and module.check_mode:
        module.exit_json(changed=True, public_key="")

    def as_user(*command: str) -> str:
        return module.run_command(["runuser", "-u", user, "--", *command], check_rc=True, cwd="/")[1]

    if missing:
        new = f"{key}.new"  # whole or not at all: the run may be killed while the key is written
        as_user("mkdir", "-p", "-m", "0700", os.path.dirname(key))
        as_user("rm", "-f", new, f"{new}.pub")
        as_user("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", module.params["comment"], "-f", new)
        as_user("mv", f"{new}.pub", f"{key}.pub")
        as_user("mv", new, key)
    module.exit_json(changed=missing, public_key=public_key(as_user, key))


if __name__ == "__main__":
    main()
