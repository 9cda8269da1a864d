#!/usr/bin/python
"""Have DKMS build and install its modules for a kernel, and say meanwhile how far the compiler is."""

from __future__ import annotations

import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.how_far import DKMS, PACKAGES, Note, compiling, followed

DOCUMENTATION = r"""
module: dkms_build
short_description: Have DKMS build its modules for a kernel
description:
  - Calls C(dkms autoinstall). Whether what was wanted came of it is for the caller to see.
options:
  kernel: {type: str, required: true, description: "A release, such as C(6.12.41+deb13-amd64)."}
attributes:
  check_mode: {support: full, description: Builds nothing.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Build the modules
  dkms_build:
    kernel: 6.12.41+deb13-amd64
"""

RETURN = r"""
rc: {description: "Its exit status.", type: int, returned: when it ran}
stdout: {description: "All that it printed.", type: str, returned: when it ran}
"""


def build(kernel: str, note: Note, root: str = DKMS) -> tuple[int, str]:
    """(exit status, output) of DKMS, which works below `root`."""
    began = time.time()
    process = subprocess.Popen(
        ["dkms", "autoinstall", "-k", kernel],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return followed(process, lambda line: None, lambda: note.say(compiling(root, began)))


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={"kernel": {"type": "str", "required": True}}, supports_check_mode=True
    )
    if module.check_mode:
        module.exit_json(changed=True)
    note = Note(PACKAGES)
    try:
        code, output = build(module.params["kernel"], note)
    except FileNotFoundError:
        module.fail_json(msg="there is no dkms on this host; the packages of the driver's modules bring it.")
    finally:
        note.close()
    module.exit_json(changed=True, rc=code, stdout=output)


if __name__ == "__main__":
    main()
