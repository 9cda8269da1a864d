"""A Python for hosts whose own is too old, downloaded once on the controller, and known by its hash."""

from __future__ import annotations

import fcntl
import os
import urllib.error
import urllib.request
from pathlib import Path

from offline_wheels import Failure, sha256

WAIT = 60  # seconds without a byte after which a download is given up


def archive(wanted: dict, directory: Path) -> Path:
    """The file `wanted` (name, url, sha256) in `directory`, downloaded where it is not there yet; raises Failure.

    Several hosts' workers may ask at once: one downloads, the others wait for it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / wanted["name"]
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists() and sha256(file) == wanted["sha256"]:
            return file
        new = file.with_name(f"{file.name}.new")
        try:
            with urllib.request.urlopen(wanted["url"], timeout=WAIT) as answer, new.open("wb") as stream:
                while piece := answer.read(1 << 20):
                    stream.write(piece)
        except (OSError, ValueError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            raise Failure(
                f"this host's own Python is none of 3.11 to 3.13, and the controller cannot fetch one for it: "
                f"{wanted['url']}: {reason}. Put that file where the controller reaches it and name its folder in "
                "python_env_python_url (file:///… does), or install a Python on the host and name it in its "
                "python_env_python."
            ) from None
        if (found := sha256(new)) != wanted["sha256"]:
            raise Failure(
                f"{wanted['url']} hashes to {found}; expected {wanted['sha256']}. Find out which proxy or mirror "
                "alters it, or name another in python_env_python_url."
            )
        os.replace(new, file)
        return file
