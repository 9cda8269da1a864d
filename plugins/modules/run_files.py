#!/usr/bin/python
"""Files of a run in its directory, which is the service user's: written and removed with that user's rights."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_files
short_description: Have files in the directory of a run
description:
  - Who runs as the service user may put a link, or another directory, where root is about to write. With the user's
    own rights nothing is written that it could not write itself. A reader sees the old file or the new one.
options:
  directory: {type: path, required: true, description: The run's.}
  files:
    description: Content by name; C(null) for one that is not to be there.
    type: dict
    required: true
  user: {type: str, description: "The service user; whoever Ansible is unless set."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Keep what the run is told beside it
  run_files:
    directory: /var/lib/trainyard/runs/first
    files: {config.yaml: "run: first\n", exit: null}
    user: trainyard
"""

RETURN = r"""
names: {description: "The files that were not so.", type: list, returned: always}
"""

import contextlib
import os
import socket

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule


def says(handle: int, name: str, wanted: str) -> bool:
    """Whether a plain file of a directory says this. No more than that is read: the directory is the service user's."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read(len(wanted) + 1) == wanted
    except OSError:
        return False


def is_there(handle: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def have(handle: int, name: str, text: str | None) -> None:
    """Have the file so. Raises OSError."""
    if text is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
        return
    part = f".{name}.{socket.gethostname()}-{os.getpid()}"  # hosts may share the directory
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640, dir_fd=handle)
    try:
        with open(file, "w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fchmod(file, 0o640)
            os.fsync(file)
        os.replace(part, name, src_dir_fd=handle, dst_dir_fd=handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=handle)
        raise


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "user": {"type": "str"},
        },
        supports_check_mode=True,
    )
    p = module.params
    for name in p["files"]:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            module.fail_json(msg=f"{name}: expected the name of a file in {p['directory']}")
    names: list[str] = []
    try:
        with acting_as(p["user"]) if p["user"] else contextlib.nullcontext():
            handle = os.open(p["directory"], os.O_RDONLY | os.O_DIRECTORY)
            for name, text in p["files"].items():
                if is_there(handle, name) if text is None else not says(handle, name, text):
                    names.append(name)
                    if not module.check_mode:
                        have(handle, name, text)
    except KeyError:
        if module.check_mode:  # an untouched host
            module.exit_json(changed=True, names=list(p["files"]))
        module.fail_json(msg=f"There is no user {p['user']} on this host; run site.yml, which makes it.")
    except OSError as error:
        if not (module.check_mode and isinstance(error, FileNotFoundError)):
            module.fail_json(
                msg=f"{p['directory']}: {error.strerror} for the service user ({error.filename}). See whose it is, and "
                f"whether there is room: namei -l {p['directory']}"
            )
        names = list(p["files"])  # the directory is yet to be made
    module.exit_json(changed=bool(names), names=names)


if __name__ == "__main__":
    main()
