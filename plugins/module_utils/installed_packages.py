"""What is installed in a Python environment, read off its files: nothing of it is imported or run."""

from __future__ import annotations

import glob
import hashlib
import os
import re


def installed_versions(path: str) -> dict[str, str]:
    """Name -> version of what is installed in an environment, read off the names of its metadata directories.

    pip is left out: it comes with the distribution's Python, not with the lock.
    """
    versions = {}
    for metadata in glob.glob(f"{glob.escape(path)}/lib/python*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(metadata).removesuffix(".dist-info").rpartition("-")
        versions[re.sub(r"[-_.]+", "-", name).lower()] = version
    versions.pop("pip", None)
    return dict(sorted(versions.items()))


def versions_digest(versions: dict[str, str]) -> str:
    """SHA-256 over the sorted name==version lines."""
    return hashlib.sha256("\n".join(f"{n}=={v}" for n, v in sorted(versions.items())).encode()).hexdigest()


def installed_torch(path: str) -> str:
    """torch's version with its build, such as 2.13.0+cu128, as importing it would say; "" where there is none.

    Its metadata may lack the build: that of the package index does.
    """
    for file in glob.glob(f"{glob.escape(path)}/lib/python*/site-packages/torch/version.py"):
        try:
            with open(file, encoding="utf-8") as stream:
                told = re.search(r"(?m)^__version__ = ['\"](.+)['\"]", stream.read())
        except (OSError, ValueError):
            continue
        if told:
            return told[1]
    return installed_versions(path).get("torch", "")
