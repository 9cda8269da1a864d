#!/usr/bin/python
"""Log in to every peer by SSH, without a password, as a user of this host."""

from __future__ import annotations

DOCUMENTATION = """
module: peer_login
short_description: Log in to every peer by SSH, without a password, as a user of this host
description:
  - Changes nothing. Fails with every peer that does not let the user in, and ssh's own reason.
options:
  user:
    description: The user, on both ends.
    type: str
    required: true
  peers:
    description: The peers' names.
    type: list
    elements: str
    required: true
  timeout:
    description: Seconds for one connection.
    type: int
    default: 10
"""

EXAMPLES = """
- name: Show that the mesh holds
  peer_login:
    user: trainyard
    peers: [node2, node3]
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

AT_ONCE = 4  # an SSH server begins to drop logins when ten are under way


def log_in(user: str, peer: str, timeout: int) -> str:
    """ssh's last words if `user` cannot log in to `peer`; empty if it can."""
    options = ["BatchMode=yes", "ControlPath=none", f"ConnectTimeout={timeout}"]
    options = [word for option in options for word in ("-o", option)]
    command = ["runuser", "-u", user, "--", "ssh", *options, peer, "true"]
    reason = ""
    for _ in range(2):
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=2 * timeout,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {2 * timeout} s"
            continue
        if done.returncode == 0:
            return ""
        words = [line for line in done.stderr.splitlines() if line.strip()]
        refused = [
            line for line in words if "denied" in line.lower()
        ]  # PAM's word stands before sshd's last one
        reason = (refused or words or [f"ssh ended with {done.returncode}"])[-1]
    return reason


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "peers": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    user, peers, timeout = (module.params[key] for key in ("user", "peers", "timeout"))
    if module.check_mode:
        module.exit_json(changed=False, skipped=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reasons = pool.map(lambda peer: log_in(user, peer, timeout), peers)
    failed = {peer: reason for peer, reason in zip(peers, reasons, strict=True) if reason}
    if failed:
        listed = "; ".join(f"to {peer}: {reason}" for peer, reason in failed.items())
        module.fail_json(
            msg=f"The user {user} cannot log in without a password {listed}. Look at AllowUsers, "
            "AllowGroups and AuthorizedKeysFile in the peer's sshd settings (sshd -T), at who else PAM lets in there "
            "(/etc/pam.d/sshd: pam_slurm_adopt, pam_access), and at firewalls "
            f"between the hosts. By hand: runuser -u {user} -- ssh -v {next(iter(failed))} true",
            failed_peers=failed,
        )
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
