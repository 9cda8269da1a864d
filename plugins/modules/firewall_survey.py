"""What listens on a host, and which firewall it has: the input of the filter firewall_plan."""

import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import active, ssh_session

DOCUMENTATION = r"""
module: firewall_survey
short_description: Read what listens on this host and which firewalls are active
description: Reads only.
options: {}
"""


def listening(module):
    """[{proto, port, address, process}] of the sockets that other machines could reach."""
    rc, out, err = module.run_command(
        ["ss", "--no-header", "--listening", "--numeric", "--processes", "--tcp", "--udp"]
    )
    if rc:
        raise OSError(f"`ss` failed: {err.strip()}")
    sockets = []
    for line in out.splitlines():
        fields = line.split(None, 6)
        if len(fields) < 6:
            continue
        address, _, port = fields[4].rpartition(":")
        address = address.strip("[]").partition("%")[0].removeprefix("::ffff:")
        if address.startswith("127.") or address == "::1" or not port.isdigit():
            continue
        process = re.search(r'\(\("([^"]+)"', fields[6] if len(fields) > 6 else "")
        sockets.append(
            {
                "proto": fields[0],
                "port": int(port),
                "address": address,
                "process": process.group(1) if process else "an unknown process",
            }
        )
    return sockets


def ufw_enabled():
    """Whether ufw is set to be on: its unit is active on machines where it does nothing, too."""
    try:
        with open("/etc/ufw/ufw.conf") as source:
            return any(line.strip().lower() == "enabled=yes" for line in source)
    except OSError:
        return False


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        survey = {
            "listening": listening(module),
            "session": ssh_session(),
            "ufw": ufw_enabled(),
            "firewalld": active(module.run_command, ["firewalld"])["firewalld"],
            "nft": bool(module.get_bin_path("nft")),
            "rules": os.path.exists("/etc/nftables.d/trainyard.nft"),
        }
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"this host's sockets cannot be read: {error}")
    module.exit_json(changed=False, survey=survey)


if __name__ == "__main__":
    main()
