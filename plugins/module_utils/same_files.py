"""Whether machines see the very same files at a path, on a disk that they share over the network; nothing is written.

A server tells all its clients the same of a file: its number, its size and when it was changed, to the nanosecond.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal

NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "glusterfs", "fuse.glusterfs", "fuse.ceph"),
    *("fuse.sshfs", "9p", "gpfs", "afs", "orangefs", "fuse.juicefs", "weka", "wekafs"),
    *("fuse.ceph-fuse", "fuse.mfs", "pvfs2", "gfs2", "ocfs2"),
)
UNSEEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # by a run's unit (ProtectHome, PrivateTmp)
SECONDS = 10.0  # that a server may take


def names_below(path: str) -> list[str]:
    """The files below a directory, or "" for a file's own; hidden ones are neither data nor a model's.

    Where a directory of them cannot be read, OSError.
    """
    if not os.path.isdir(path):
        return [""]
    found = []
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = (name for name in sorted(files) if not name.startswith("."))
        found += [os.path.relpath(os.path.join(folder, name), path) for name in names]
    return found


def content_hash(hashes: dict[str, str]) -> str:
    """One SHA-256 (hex) of those of `names_below`: a file's own, or that of a directory's names and contents."""
    listing = "".join(f"{name}\0{digest}\n" for name, digest in hashes.items())
    return hashes.get("") or hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()


def mark(path: str) -> str:
    """A hash of the numbers, sizes and times of a file, or of all below a directory; raises OSError."""
    lines = []
    for name in sorted(names_below(path)):
        found = os.stat(os.path.join(path, name) if name else path)
        lines.append(f"{name}\0{found.st_ino}\0{found.st_size}\0{found.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _raise(error: OSError) -> None:
    raise error


def filesystem(path: str, table: str = "/proc/self/mountinfo") -> tuple[str, str]:
    """The type of the file system on which `path`, without links in it, lies, and where there; no server is asked."""
    best, found = "", ("", "")
    with open(table, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words, _, rest = line.partition(" - ")
            root, place = (word.replace("\\040", " ") for word in words.split()[3:5])
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            # Of two mounts at one place the later one is seen.
            if inside and len(place) >= len(best):
                kind, source = rest.split()[:2]
                below = os.path.normpath(f"{root}/{path[len(place) :]}").lstrip("/")
                best, found = place, (kind, f"{source.rstrip('/')}/{below}")
    return found


def on_network(path: str, table: str = "/proc/self/mountinfo") -> str:
    """What `path` is on a disk of the network, as the server's name and the path there; "" where it is on another."""
    kind, where = filesystem(os.path.realpath(path), table)
    return where if kind in NETWORK else ""


def shared_mark(path: str) -> str:
    """`mark` of what lies on a disk of the network, where a run's unit may read it; else ""."""
    real = os.path.realpath(path)
    if any(f"{place}/".startswith(f"{hidden}/") for hidden in UNSEEN for place in (path, real)):
        return ""
    os.stat(real)  # an automount has it mounted by that
    if filesystem(real)[0] not in NETWORK or not _readable(real):
        return ""
    return mark(real)


def _readable(path: str) -> bool:
    def may(place: str) -> bool:
        return os.access(place, os.R_OK, effective_ids=True)

    return may(path) and all(
        may(os.path.join(folder, name)) for folder, _, files in os.walk(path) for name in files
    )


def shared_marks(paths: list[str], user: str, seconds: float = SECONDS) -> dict[str, str]:
    """`shared_mark` of each path as `user` sees it, those without one left out; who waits for a dead server is left."""
    from ansible.module_utils.as_user import acting_as  # on hosts alone

    found = {}
    for path in paths:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            said = ""
            try:
                with acting_as(user):
                    said = shared_mark(path)
            except (OSError, KeyError):
                pass
            finally:  # whatever it was, this process must not go on as the module
                os.write(send, said.encode())
                os._exit(0)
        os.close(send)
        try:
            if not select.select([receive], [], [], seconds)[0]:
                os.kill(child, signal.SIGKILL)  # it may stay until the kernel gives up on the server
                continue
            said = os.read(receive, 100).decode()
            os.waitpid(child, 0)
        finally:
            os.close(receive)
        if said:
            found[path] = said
    return found


def sizes(path: str) -> list[tuple[str, int]]:
    """A file, or all below a directory, with their bytes; of a link that leads nowhere, nothing."""
    below = [os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files]
    found = []
    for one in [path] if os.path.isfile(path) else below:
        with contextlib.suppress(OSError):
            found.append(
                (one, os.path.getsize(one))
            )  # of what a link leads to, as a hub's snapshot is made of
    return found
