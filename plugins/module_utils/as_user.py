"""Root's modules in directories that belong to an unprivileged user.

What runs as that user may have put links there, to have root change a file that only root may. Done as the user, the
kernel refuses what the user may not do, whatever the path leads to.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator


@contextlib.contextmanager
def acting_as(name: str) -> Iterator[pwd.struct_passwd]:
    """Act with the rights of the user `name` on files; yields its entry in passwd. Raises KeyError without such a user.

    For root, or for the user itself.
    """
    user = pwd.getpwnam(name)
    if os.geteuid() == user.pw_uid:
        yield user
        return
    uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    os.initgroups(name, user.pw_gid)
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield user
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)
