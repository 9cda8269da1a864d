"""Have netplan itself check a set of files in a directory of their own."""

import os
import re
import tempfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: netplan_check
short_description: Check netplan files without installing them
options:
  files:
    description: The files that would lie below /etc/netplan, as name and content.
    type: dict
    required: true
"""


def without_lines(text):
    """netplan's words without the lines of files that it shows, with a mark below: they may have a key in them."""
    return re.sub(r"\n[^\n]*\n *\^", "", text)


def main():
    module = AnsibleModule(
        # Not in the journal either: they may hold the keys of wireless networks.
        argument_spec={"files": {"type": "dict", "required": True, "no_log": True}},
        supports_check_mode=True,
    )
    program = module.get_bin_path("netplan")
    if not program:
        module.fail_json(msg="netplan is not installed on this host")
    with tempfile.TemporaryDirectory(prefix="trainyard-netplan-") as root:
        directory = os.path.join(root, "etc", "netplan")
        os.makedirs(directory)
        for name, content in module.params["files"].items():
            path = os.path.join(directory, os.path.basename(name))
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
                out.write(content)
        rc, out, err = module.run_command([program, "generate", "--root-dir", root])
        said = " ".join(without_lines(err or out).replace(root, "").split())
    if rc:
        module.fail_json(msg=f"netplan refuses the configuration; nothing was changed: {said}")
    module.exit_json(changed=False, said=said)


if __name__ == "__main__":
    main()
