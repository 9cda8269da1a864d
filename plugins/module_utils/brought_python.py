"""A Python for hosts whose own is too old, downloaded once on the controller, and known by its hash."""

from __future__ import annotations

import fcntl
import http.client
import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from offline_wheels import Failure, sha256

WAIT = 60  # seconds without a byte after which a download is given up


def archive(wanted: dict, directory: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """The file `wanted` (name, url, sha256) in `directory`, downloaded where it is not there yet; raises Failure.

    Several hosts' workers may ask at once: one downloads, the others wait for it, and for how it failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file, failed = directory / wanted["name"], directory / ".failed"
    asked = time.time()
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists() and sha256(file) == wanted["sha256"]:
            return file
        if failed.exists() and failed.stat().st_mtime > asked:
            raise Failure(failed.read_text())
        say(f"its own Python is not for the environment; fetching {wanted['url']}")
        new = file.with_name(f"{file.name}.new")
        try:
            _download(wanted["url"], new)
            if (found := sha256(new)) != wanted["sha256"]:
                raise Failure(
                    f"{wanted['url']} hashes to {found}; expected {wanted['sha256']}. Find out which proxy or mirror "
                    "alters it, or name another in python_env_python_url."
                )
        except Failure as failure:
            failed.write_text(str(failure))
            raise
        os.replace(new, file)
        return file


def _download(url: str, file: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer, file.open("wb") as stream:
            while piece := answer.read(1 << 20):
                stream.write(piece)
            announced = answer.headers.get("Content-Length")
        if announced and file.stat().st_size != int(announced):
            raise OSError(f"it broke off after {file.stat().st_size} of {announced} bytes")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Failure(
            "this host's own Python is none of 3.11 to 3.13, or its python_env_python is bring, and the controller "
            f"cannot fetch one for it: {url}: {reason}. Put that file where the controller reaches it and name its "
            "folder in python_env_python_url (file:///… does), or install a Python on the host and name it in its "
            "python_env_python."
        ) from None
