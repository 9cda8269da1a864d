#!/usr/bin/python
"""Directories of an unprivileged user, made by root with no more rights than that user has."""

from __future__ import annotations

DOCUMENTATION = """
module: user_directories
short_description: Directories of an unprivileged user, made with no more rights than that user has
description:
  - Makes each directory with mode C(0750), as the user itself. So a link that the user has put in its place cannot
    have root hand over the directory that it leads to.
  - A link to another directory of the user is followed.
options:
  user:
    description: The user. In check mode it need not be there yet.
    type: str
    required: true
  paths:
    description: The directories, in this order; the one that holds them is there.
    type: list
    elements: path
    required: true
"""

EXAMPLES = """
- name: Have a run's directories
  user_directories:
    user: trainyard
    paths: [/var/lib/trainyard/runs/first, /var/lib/trainyard/runs/first/logs]
"""

import os
import stat

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule

MODE = 0o750


class Failure(Exception):
    """What the user is told: what was found, and the cure."""


def have(path: str, uid: int, check_mode: bool) -> bool:
    """Have the directory `path` of the user `uid`, who is acting; whether that is a change. Raises Failure, OSError."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise Failure(
                f"{path}: found a link to {os.readlink(path)}, which is not there; expected a directory. "
                "Find out who made the link, and remove it."
            ) from None
        if not check_mode:
            os.mkdir(path, MODE)
            os.chmod(path, MODE)  # whatever the umask
        return True
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "something"
        leads = f" (it leads to {os.path.realpath(path)})" if os.path.realpath(path) != path else ""
        raise Failure(
            f"{path}: found {what} of the uid {found.st_uid}{leads}; expected a directory of the uid {uid}. "
            "Find out who put it there, and move it away."
        )
    if stat.S_IMODE(found.st_mode) == MODE:
        return False
    if not check_mode:
        os.chmod(path, MODE)
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "paths": {"type": "list", "elements": "path", "required": True},
        },
        supports_check_mode=True,
    )
    user, paths = module.params["user"], module.params["paths"]
    try:
        with acting_as(user) as entry:
            changed = [have(path, entry.pw_uid, module.check_mode) for path in paths]
    except KeyError:
        if module.check_mode:
            module.exit_json(changed=True)
        module.fail_json(msg=f"There is no user {user} on this host; the role identity makes it.")
    except Failure as failure:
        module.fail_json(msg=str(failure))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the user {user}, whose directory it shall be. "
            "See whose it is, and whether a link leads elsewhere: namei -l " + str(error.filename)
        )
    module.exit_json(changed=any(changed))


if __name__ == "__main__":
    main()
