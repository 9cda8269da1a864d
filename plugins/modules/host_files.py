#!/usr/bin/python
"""Several files of ours on a host, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_files
short_description: Have several files, links and directories
description:
  - What ansible.builtin.copy and ansible.builtin.file do one by one. Each call of a module costs a host a third of a
    second, whatever it does.
  - A file is written whole, by rename.
options:
  files:
    description: What to have, in this order.
    type: list
    elements: dict
    required: true
    options:
      path: {type: path, required: true, description: Where. Directories above it are made as it is owned.}
      content: {type: str, description: A file's text.}
      link_to: {type: path, description: What a link leads to.}
      directory: {type: bool, default: false, description: Whether it is a directory.}
      owner: {type: str, default: root, description: Whose it is.}
      group: {type: str, default: root, description: Its group.}
      mode: {type: raw, default: "0644", description: Its mode.}
      validate: {type: str, description: "A command that must end well first; C(%s) is the new file's place."}
      where: {type: path, description: "Only on a host that has this."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Have a unit that starts at boot
  host_files:
    files:
      - path: /etc/systemd/system/ours.service
        content: "{{ unit }}"
      - path: /etc/systemd/system/multi-user.target.wants/ours.service
        link_to: /etc/systemd/system/ours.service
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import read


def have(module: AnsibleModule, file: dict) -> tuple[bool, dict]:
    """Have one of them: whether that is a change, and its diff. Raises OSError."""
    path, before = file["path"], ""
    if file["link_to"]:
        before = os.readlink(path) if os.path.islink(path) else ""
        changed, after = before != file["link_to"], file["link_to"]
        if changed and not module.check_mode:
            above(module, file)
            new = f"{path}.new"
            if os.path.lexists(new):
                os.unlink(new)
            os.symlink(file["link_to"], new)
            os.rename(new, path)
    elif file["directory"]:
        changed, after = not os.path.isdir(path), ""
        if changed and not module.check_mode:
            above(module, file)
            os.mkdir(path)
    else:
        before, after = read(path), file["content"]
        changed = before != after or not os.path.isfile(path) or os.path.islink(path)
        if changed and not module.check_mode:
            above(module, file)
            write(module, file)
    if not file["link_to"] and os.path.exists(path):
        changed = module.set_fs_attributes_if_different(
            module.load_file_common_arguments(file, path), changed
        )
    return changed, {"before_header": path, "after_header": path, "before": before, "after": after}


def above(module: AnsibleModule, file: dict) -> None:
    """Have the directories above: a directory's own are as it is, others everybody's to read."""
    folder = os.path.dirname(file["path"])
    if os.path.isdir(folder):
        return
    one = {**file, "path": folder, "mode": file["mode"] if file["directory"] else "0755"}
    above(module, one)
    os.mkdir(folder)
    module.set_fs_attributes_if_different(module.load_file_common_arguments(one, folder), True)


def write(module: AnsibleModule, file: dict) -> None:
    """Put the text there; the command `validate` says first whether it may."""
    path = file["path"]
    descriptor, new = tempfile.mkstemp(dir=module.tmpdir, prefix=".trainyard-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(file["content"])
    if file["validate"]:
        rc, said, errors = module.run_command(file["validate"].replace("%s", new))
        if rc:
            module.fail_json(
                msg=f"{path}: the new text was refused, and the old one stays: {(errors or said).strip()}"
            )
    if os.path.islink(path):
        os.unlink(path)
    module.atomic_move(new, path)


def main() -> None:
    file = {
        "path": {"type": "path", "required": True},
        "content": {"type": "str"},
        "link_to": {"type": "path"},
        "directory": {"type": "bool", "default": False},
        "owner": {"type": "str", "default": "root"},
        "group": {"type": "str", "default": "root"},
        "mode": {"type": "raw", "default": "0644"},
        "validate": {"type": "str"},
        "where": {"type": "path"},
    }
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "required": True, "options": file}},
        supports_check_mode=True,
    )
    changed, diffs = [], []
    for one in module.params["files"]:
        if sum([one["content"] is not None, bool(one["link_to"]), one["directory"]]) != 1:
            module.fail_json(msg=f"{one['path']}: say one of content, link_to and directory")
        if one["where"] and not os.path.exists(one["where"]):
            continue
        try:
            differs, diff = have(module, one)
        except OSError as error:
            module.fail_json(msg=f"{error.filename or one['path']}: {error.strerror}")
        if differs:
            changed.append(one["path"])
            diffs.append(diff)
    module.exit_json(changed=bool(changed), paths=changed, diff=diffs)


if __name__ == "__main__":
    main()
