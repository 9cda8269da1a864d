#!/usr/bin/python
"""Lines about peers, in a block of files that otherwise belong to the machine's owner."""

from __future__ import annotations

DOCUMENTATION = """
module: peer_lines
short_description: Lines about peers, in a block of files that otherwise belong to the machine's owner
description:
  - Each line belongs to a peer and ends with C(trainyard@PEER), so that a run over some of the hosts can
    tell whose lines it must leave.
  - A line in the block that has no such end is its owner's, and goes before the block.
  - Lines of peers in O(keep) that O(files[].lines) does not name stay as they are; lines of all other peers go.
options:
  files:
    description: What to have. All in one call, since each costs a host a third of a second.
    type: list
    elements: dict
    required: true
    options:
      path: {type: path, required: true, description: "The file; it and its directory are made where need be."}
      lines: {type: dict, required: true, description: "Peer to its lines, each of which ends with C(trainyard@PEER)."}
      owner:
        type: str
        description: Whose it is. All is done with no more rights than he has, so that a link there leads root nowhere.
      group: {type: str, description: Its group.}
      mode: {type: raw, required: true, description: Its mode.}
      directory_mode: {type: raw, description: "The mode of its directory, if that must have a certain one."}
  keep:
    description: All peers, in the order of their lines.
    type: list
    elements: str
    required: true
"""

EXAMPLES = """
- name: Let the peers in
  peer_lines:
    files:
      - path: /var/lib/trainyard/.ssh/authorized_keys
        lines:
          node2: ["restrict ssh-ed25519 AAAA trainyard@node2"]
        owner: trainyard
        group: trainyard
        mode: "0600"
    keep: [node1, node2]
"""

import contextlib
import os

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import join, read, split, strangers, through_links, write

NOTE = "written by the role ssh_mesh"


def merge(old: list[str], lines: dict[str, list[str]], keep: list[str]) -> list[str]:
    """The block's new lines: those of `lines`, and the `old` ones of the other peers in `keep`."""
    merged = []
    for peer in keep:
        mine = [line for line in old if line.split()[-1:] == [f"trainyard@{peer}"]]
        merged += lines.get(peer, mine)
    return merged


def main() -> None:
    file = {
        "path": {"type": "path", "required": True},
        "lines": {"type": "dict", "required": True},
        "owner": {"type": "str"},
        "group": {"type": "str"},
        "mode": {"type": "raw", "required": True},
        "directory_mode": {"type": "raw"},
    }
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": file},
            "keep": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    results = [have_as_owner(module, one) for one in module.params["files"]]
    module.exit_json(
        changed=any(one["changed"] for one in results), diff=[one["diff"] for one in results if "diff" in one]
    )


def have_as_owner(module: AnsibleModule, file: dict) -> dict:
    """As `have`, with its owner's rights."""
    owner = file["owner"]
    try:
        with acting_as(owner) if owner else contextlib.nullcontext():
            return have(module, file)
    except KeyError:
        if not module.check_mode:
            module.fail_json(msg=f"There is no user {owner} on this host; the role identity makes it.")
        return {"changed": True}  # an untouched host has neither the file nor its owner yet
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user {owner or 'that Ansible logs in as'}. "
            f"See whose it is, and whether a link leads elsewhere: namei -l {error.filename}"
        )


def have(module: AnsibleModule, file: dict) -> dict:
    """Have the lines in the file: {changed, diff}. Raises OSError."""
    # The login user's own links lead where he may write; the service user's lead nowhere.
    path = file["path"] if file["owner"] else through_links(file["path"])
    for peer, lines in file["lines"].items():
        if any(len(line.splitlines()) > 1 for line in lines):
            module.fail_json(
                msg=f"{path}: found a line of {peer}'s with an end of line in it; expected none."
            )
    folder = os.path.dirname(file["path"])
    before = read(path)
    outside, inside = split(before)
    after = join([*outside, *strangers(inside)], merge(inside, file["lines"], module.params["keep"]), NOTE)
    changed = after != before
    attributes = module.load_file_common_arguments(file, path)
    if not module.check_mode:
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o755)
        if changed:
            write(module, path, after, beside=os.geteuid() != os.getuid())
    if file["directory_mode"] and os.path.isdir(folder):
        own = {**attributes, "path": folder, "mode": file["directory_mode"]}
        changed = module.set_fs_attributes_if_different(own, changed)
    if os.path.exists(path):
        changed = module.set_fs_attributes_if_different(attributes, changed)
    diff = {"before_header": path, "after_header": path, "before": before, "after": after}
    return {"changed": changed, "diff": diff}


if __name__ == "__main__":
    main()
