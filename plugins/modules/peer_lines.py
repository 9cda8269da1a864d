#!/usr/bin/python
"""Lines about peers, in a block of a file that otherwise belongs to the machine's owner."""

from __future__ import annotations

DOCUMENTATION = """
module: peer_lines
short_description: Lines about peers, in a block of a file that otherwise belongs to the machine's owner
description:
  - Each line belongs to a peer and ends with C(trainyard@PEER), so that a run over some of the hosts can
    tell whose lines it must leave.
  - Lines of peers in O(keep) that O(lines) does not name stay as they are; lines of all other peers go.
  - With O(owner), all is done with no more rights than that user has, so that a link in its home leads root nowhere.
options:
  path:
    description: The file. It, and the directory it lies in, are made if they are not there.
    type: path
    required: true
  lines:
    description: Peer to its lines, each of which ends with C(trainyard@PEER).
    type: dict
    required: true
  keep:
    description: All peers, in the order of their lines.
    type: list
    elements: str
    required: true
  directory_mode:
    description: The mode of the directory, if it must have a certain one.
    type: raw
extends_documentation_fragment: [files]
"""

EXAMPLES = """
- name: Let the peers in
  peer_lines:
    path: /var/lib/trainyard/.ssh/authorized_keys
    lines:
      node2: ["restrict ssh-ed25519 AAAA trainyard@node2"]
    keep: [node1, node2]
    owner: trainyard
    group: trainyard
    mode: "0600"
"""

import contextlib
import os

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import join, read, split, write

NOTE = "written by the role ssh_mesh"


def merge(old: list[str], lines: dict[str, list[str]], keep: list[str]) -> list[str]:
    """The block's new lines: those of `lines`, and the `old` ones of the other peers in `keep`."""
    merged = []
    for peer in keep:
        mine = [line for line in old if line.split()[-1:] == [f"trainyard@{peer}"]]
        merged += lines.get(peer, mine)
    return merged


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "lines": {"type": "dict", "required": True},
            "keep": {"type": "list", "elements": "str", "required": True},
            "directory_mode": {"type": "raw"},
        },
        add_file_common_args=True,
        supports_check_mode=True,
    )
    owner = module.params["owner"]
    try:
        with acting_as(owner) if owner else contextlib.nullcontext():
            result = have(module)
    except KeyError:
        if not module.check_mode:
            module.fail_json(msg=f"There is no user {owner} on this host; the role identity makes it.")
        result = {"changed": True}  # an untouched host has neither the file nor its owner yet
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user {owner or 'that Ansible logs in as'}. "
            f"See whose it is, and whether a link leads elsewhere: namei -l {error.filename}"
        )
    module.exit_json(**result)


def have(module: AnsibleModule) -> dict:
    """Have the lines in the file; the module's result. Raises OSError."""
    path = module.params["path"]
    folder = os.path.dirname(path)
    before = read(path)
    outside, inside = split(before)
    after = join(outside, merge(inside, module.params["lines"], module.params["keep"]), NOTE)
    changed = after != before
    attributes = module.load_file_common_arguments(module.params, path)
    if not module.check_mode:
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o755)
        if changed:
            write(module, path, after, beside=os.geteuid() != os.getuid())
    if module.params["directory_mode"] and os.path.isdir(folder):
        own = {**attributes, "path": folder, "mode": module.params["directory_mode"]}
        changed = module.set_fs_attributes_if_different(own, changed)
    if os.path.exists(path):
        changed = module.set_fs_attributes_if_different(attributes, changed)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    return {"changed": changed, "diff": diff}


if __name__ == "__main__":
    main()
