#!/usr/bin/python
"""What a host says of its RDMA ports, of the kernel's modules for them, and of who manages its InfiniBand."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_survey
short_description: Read a host's RDMA ports, kernel modules and subnet managers
description: Reads only. Waits, if asked to, until InfiniBand's ports have been set up.
options:
  modules: {type: list, elements: str, default: [], description: Modules of the kernel that there should be.}
  managers: {type: bool, default: false, description: Whether to ask each InfiniBand port for its subnet manager.}
  wait: {type: int, default: 0, description: Seconds to wait until no InfiniBand port with a cable lacks a manager.}
  sys_root: {type: str, default: "", description: "A directory with the C(/sys) to read; for tests."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Look at the RDMA ports
  rdma_survey:
    modules: [ib_uverbs]
  become: true
"""

RETURN = r"""
survey:
  description: >-
    C(ports), as module_utils/rdma_ports.py has them, with C(manager) ({guid, state} or null) where that was asked for;
    C(missing) (modules); C(container) (whether the kernel is another machine's).
  type: dict
  returned: always
"""

import os
import re
import shlex
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import in_container
from ansible.module_utils.rdma_ports import INFINIBAND, rdma_ports

UNOPENED = re.compile(r"umad|open", re.IGNORECASE)  # what it says of a port that it cannot ask by
PATIENCE = 10  # seconds; sminfo itself gives up after three of one
SMINFO = re.compile(r"sm lid \d+ sm guid 0x([0-9a-f]+), .*\bSMINFO_(\w+)")


class Unasked(Exception):
    """Whether somebody manages a fabric could not be asked: that is not to be taken for a no."""


def manager(port: dict) -> dict | None:
    """The subnet manager that a port's fabric has: {guid (16 digits), state (MASTER, …)}; None where it has none."""
    command = ["sminfo", "-C", port["device"], "-P", str(port["port"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except OSError as error:
        raise Unasked(
            f"sminfo: {error.strerror}; expected it, to ask for the subnet manager of {port['device']}: it comes with "
            "infiniband-diags, which the role rdma installs (site.yml --tags rdma)"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unasked(
            f"{shlex.join(command)}: found no answer within {PATIENCE} s; expected the subnet manager, or that there "
            "is none. See what it says there, and `dmesg | grep -i mad`"
        ) from None
    if UNOPENED.search(done.stderr):
        raise Unasked(
            f"{shlex.join(command)}: found {done.stderr.strip().splitlines()[-1]}; expected the subnet manager, or "
            "that there is none. The role rdma loads what that takes (site.yml --tags rdma)"
        )
    found = SMINFO.search(done.stdout)
    return {"guid": found[1].zfill(16), "state": found[2]} if found and done.returncode == 0 else None


def unmanaged(port: dict) -> bool:
    """Whether it has a cable, and nobody has set it up."""
    return port["layer"] == INFINIBAND and port["state"] in ("INIT", "ARMED")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "modules": {"type": "list", "elements": "str", "default": []},
            "managers": {"type": "bool", "default": False},
            "wait": {"type": "int", "default": 0},
            "sys_root": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    root = p["sys_root"].rstrip("/")
    deadline = time.monotonic() + p["wait"]
    while any(map(unmanaged, ports := rdma_ports(root))) and time.monotonic() < deadline:
        time.sleep(0.5)
    if p["managers"]:
        try:
            for port in ports:
                port["manager"] = manager(port) if port["layer"] == INFINIBAND else None
        except Unasked as fault:
            if not module.check_mode:  # in which its program may not have been installed
                module.fail_json(msg=str(fault))
    missing = [name for name in p["modules"] if not os.path.isdir(f"{root}/sys/module/{name}")]
    module.exit_json(changed=False, survey={"ports": ports, "missing": missing, "container": in_container()})


if __name__ == "__main__":
    main()
