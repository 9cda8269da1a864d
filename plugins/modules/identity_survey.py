#!/usr/bin/python
"""What the role identity wants to know of a host, by one look."""

from __future__ import annotations

DOCUMENTATION = """
module: identity_survey
short_description: A host's name, its service user and what lies at that user's home
description:
  - Changes nothing. Where all is as it is wanted, the role has one look to take instead of eight tasks.
options:
  user:
    description: The service user's name, which is its group's, too.
    type: str
    required: true
  home:
    description: The service user's home.
    type: path
    required: true
  login:
    description: The user that Ansible logs in as.
    type: str
    required: true
"""

EXAMPLES = """
- name: See what the host has
  identity_survey:
    user: trainyard
    home: /var/lib/trainyard
    login: "{{ ansible_facts['user_id'] }}"
  register: __identity_survey
"""

RETURN = """
survey:
  description: What was found.
  returned: always
  type: dict
  contains:
    account: {description: "The user's uid, gid, comment, home and shell; null without one.", type: dict}
    group: {description: "The gid of the user's group; null without one.", type: int}
    login_may: {description: Whether the login user is in that group or root., type: bool}
    place:
      description: >-
        What lies at the home: whether that is a directory, its owner (its uid where that has no name), uid, gid
        and mode; null where nothing is.
      type: dict
    host_names: {description: "The host's name now, and at its next boot.", type: list}
    cloud_init: {description: Whether cloud-init is there., type: bool}
"""

import grp
import os
import pwd
import socket
import stat

from ansible.module_utils.basic import AnsibleModule


def account(user: str) -> dict | None:
    """The user's line in passwd, wherever that comes from."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return None
    return {
        "uid": entry.pw_uid,
        "gid": entry.pw_gid,
        "comment": entry.pw_gecos,
        "home": entry.pw_dir,
        "shell": entry.pw_shell,
    }


def place(path: str) -> dict | None:
    """What lies at `path`; a link is none of the things that a home can be."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return {
        "directory": stat.S_ISDIR(found.st_mode),
        "owner": owner,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
    }


def group_of(user: str, login: str) -> tuple[int | None, bool]:
    """The gid of the group `user`, None without one, and whether `login` may what the group may, as root may anyway."""
    try:
        group = grp.getgrnam(user)
    except KeyError:
        return None, False
    return group.gr_gid, login == "root" or login in group.gr_mem or pwd.getpwnam(
        login
    ).pw_gid == group.gr_gid


def name_at_boot() -> str:
    """What /etc/hostname says, "" where it says nothing."""
    try:
        with open("/etc/hostname", encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    except FileNotFoundError:
        lines = []
    return lines[0] if lines else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "home": {"type": "path", "required": True},
            "login": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    user, home, login = (module.params[name] for name in ("user", "home", "login"))
    group, login_may = group_of(user, login)
    module.exit_json(
        changed=False,
        survey={
            "account": account(user),
            "group": group,
            "login_may": login_may,
            "place": place(home),
            "host_names": [socket.gethostname(), name_at_boot()],
            "cloud_init": os.path.isdir("/etc/cloud/cloud.cfg.d"),
        },
    )


if __name__ == "__main__":
    main()
