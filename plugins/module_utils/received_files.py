"""Take files that the controller sent as one tar archive, each only if its hash is right."""

from __future__ import annotations

import hashlib
import os
import tarfile


class Damaged(Exception):
    """A file is not what the controller sent."""


def sha256(path: str) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def unpack(archive: str, directory: str, digests: dict[str, str]) -> None:
    """Unpack plain files into `directory`, readable by all; `digests` is SHA-256 by name, and names nothing else."""
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name
            content = members.extractfile(member)
            if content is None or name not in digests or os.path.basename(name) != name:
                raise Damaged(
                    f"{os.path.basename(archive)} holds {name!r}, which was not announced. Run again."
                )
            part = os.path.join(directory, f".{name}.part")
            digest = hashlib.sha256()
            with content, open(part, "wb") as stream:
                while block := content.read(1 << 20):
                    digest.update(block)
                    stream.write(block)
            if digest.hexdigest() != digests[name]:
                os.unlink(part)
                raise Damaged(
                    f"{name} arrived damaged: SHA-256 {digest.hexdigest()}, expected {digests[name]}. Run again."
                )
            os.chmod(part, 0o644)
            os.rename(part, os.path.join(directory, name))
