#!/usr/bin/python
"""One host's part in a chain: files go from the controller to the first host, and from each host to the next."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bring_host
short_description: Take part in bringing files from host to host
description:
  - C(have) gives files their place that are here under another name, in another version of the same directory; so
    that of a directory only the files that differ travel. It says how much there is of each, which tells who shall
    be the first of the chain. It fails where there is no room for the rest, and so do C(begin), C(fill) and C(pull).
  - C(offer) says what the file or directory O(source) of this host is, and which place below O(below) its content
    gives it.
  - C(begin) says which files are not there yet, and how much of each has come before; what is there is laid out
    for the next host.
  - C(fill) begins, copies what is missing from where O(files) say that it is on this host, and settles.
  - C(pull) begins, fetches from the host before what is missing, while it still grows there, over SSH as the service
    user, and settles.
  - C(settle) checks every file's SHA-256 and gives it its place, where root alone can change it.
  - C(tidy) removes what was laid out of these files, and what others' transfers have left a day ago. Another play may
    bring files meanwhile.
options:
  step: {type: str, choices: [have, offer, begin, fill, pull, settle, tidy], required: true, description: See above.}
  files:
    description:
      - Each with C(path) (below O(state_dir)), C(bytes) and C(sha256), and C(here) with C(fill); of all but C(offer).
    type: list
    elements: dict
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  user: {type: str, required: true, description: "The service user, who may log in to its peers."}
  source: {type: str, description: "The host before, with C(pull); a path of this host, with C(offer)."}
  below: {type: str, choices: [data, models], default: data, description: "With C(offer): where."}
  patience: {type: float, default: 120, description: "Seconds without a byte after which C(pull) gives up."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Fetch what is not here from the host before
  bring_host:
    step: pull
    source: node1
    files: [{path: data/0a1b/text.jsonl, bytes: 1200, sha256: 9f86…}]
    state_dir: /var/lib/trainyard
    user: trainyard
"""

RETURN = r"""
here:
  description: C(have)'s answer, path to the bytes that are here.
  type: dict
  returned: with C(have)
offered:
  description: C(offer)'s answer, with C(path), C(directory) (both below O(state_dir)), C(bytes) and C(files).
  type: dict
  returned: with C(offer)
missing:
  description: C(begin)'s answer, path to the bytes that have come before.
  type: dict
  returned: with C(begin)
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import free_bytes
from ansible.module_utils.how_far import BRINGING, Counted, Note
from ansible.module_utils.same_files import content_hash, names_below

STEPS = ("have", "offer", "begin", "fill", "pull", "settle", "tidy")
KEPT = ("data", "models")  # below the state directory, where files have their place
PLACES = (*KEPT, "wheels")  # with the role python_env's
INCOMING = "incoming"  # below the state directory: files that grow, and links to those that are there
# Seconds for which what came of a transfer that broke off is kept, for the next one to go on.
STALE = 24 * 60 * 60
SPARE = 1_000_000_000  # bytes that stay free for logs, the system, and what other runs write
AT_ONCE = 1 << 20  # bytes of a read, and of a pipe: the fewer turns, the less they cost
F_SETPIPE_SZ = 1031  # Linux's; Python has a name for it from 3.10 on
# Seconds in which more comes to the source, where little has; and between two looks at a file that has not grown.
PAUSE = 0.05
# The cipher that costs a processor of today the least; where the other end does not have it, its own choice.
SSH = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o Ciphers=^aes128-gcm@openssh.com"
)

# Runs on the host before: reads which bytes of which files are asked for, and writes them out as they come to be there.
# When nobody listens any more, its input ends, and so does it.
SENDER = f"""
import fcntl, json, os, select, sys
try:
    fcntl.fcntl(1, {F_SETPIPE_SZ}, {AT_ONCE})
except OSError:
    pass
folder, pause = sys.argv[1], {PAUSE}
def more(seconds):
    if select.select([0], [], [], seconds)[0]:
        sys.exit()
for path, at, whole in json.loads(sys.stdin.buffer.raw.readline()):
    file = None
    while at < whole:
        if file is None:
            # In its place it is whole: another play may have brought it, and tidied up.
            for place in (folder, os.path.dirname(folder)):
                try:
                    file = os.open(os.path.join(place, path), os.O_RDONLY)
                    break
                except FileNotFoundError:
                    pass
            else:
                more(pause)
                continue
        there = min(os.fstat(file).st_size, whole)
        if there < whole and there - at < {AT_ONCE // 4}:
            more(pause)
            there = min(os.fstat(file).st_size, whole)
        if there > at:
            at += os.sendfile(1, file, at, there - at)
    if file is not None:
        os.close(file)
"""


class Failure(Exception):
    """What the user is told."""


def size(path: str) -> int | None:
    """Bytes of a plain file, None where there is none."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def missing(files: list[dict], state_dir: str) -> list[dict]:
    """The files that have not got their place yet; root alone puts them there, so that their size says enough."""
    return [one for one in files if size(os.path.join(state_dir, one["path"])) != one["bytes"]]


def have(files: list[dict], state_dir: str, group: int) -> bool:
    """Give those files their place that are here already, elsewhere below `data` or `models`; whether there were any.

    Who has a byte less or more is not even read, and a file of the same name is read before others of its size.
    """
    wanted = missing(files, state_dir)
    sizes: dict[int, list[str]] = {one["bytes"]: [] for one in wanted if one["bytes"]}
    for top in KEPT if sizes else ():
        for folder, _, names in os.walk(os.path.join(state_dir, top)):
            for path in (os.path.join(folder, name) for name in sorted(names)):
                if (found := size(path)) in sizes:
                    sizes[found].append(path)
    digests: dict[str, str] = {}
    placed = False
    for one in wanted:
        name = os.path.basename(one["path"])
        for path in sorted(sizes.get(one["bytes"], ()), key=lambda path: os.path.basename(path) != name):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            with open(descriptor, "rb") as file:
                # Whoever owns it could change it later.
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                if path not in digests:
                    digests[path] = sha256(file)
                if digests[path] == one["sha256"]:
                    place(descriptor, state_dir, one["path"], group)
                    placed = True
                    break
    return placed


def here(files: list[dict], state_dir: str) -> dict[str, int]:
    """The bytes that there are of each file, in its place or as far as it has come; files of none are left out."""
    found = {}
    for one in files:
        count = size(os.path.join(state_dir, one["path"]))
        if count != one["bytes"]:
            count = size(os.path.join(state_dir, INCOMING, one["path"])) or 0
        if 0 < count <= one["bytes"]:
            found[one["path"]] = count
    return found


def check_room(files: list[dict], state_dir: str) -> None:
    """Raises Failure where the disk has no room for what is still to come, before it is filled with half of it."""
    whole = {one["path"]: one["bytes"] for one in files}
    coming = sum(whole.values()) - sum(here(files, state_dir).values())
    free, spare = free_bytes(state_dir), min(coming, SPARE)  # of a small file as much again is enough
    if coming and coming + spare > free:
        raise Failure(
            f"{state_dir}: {coming / 1e9:,.1f} GB are still to come, and there are {free / 1e9:,.1f} GB free, of which "
            f"{spare / 1e9:.1f} GB stay for logs and the system; remove old runs, data or models there, or put "
            "trainer_state_dir on another disk"
        )


def check_one_disk(files: list[dict], state_dir: str) -> None:
    """Raises Failure where a part of the state directory that `files` need is another file system.

    They come to one of its directories, and get their place in another by a link.
    """
    tops = {one["path"].split("/")[0] for one in missing(files, state_dir)}
    tops |= {*KEPT} if tops & {*KEPT} else set()  # what is in one of these is taken for the other, too
    for below in sorted(tops | {INCOMING} if tops else ()):
        path = os.path.join(state_dir, below)
        with contextlib.suppress(FileNotFoundError):
            if device(path) != device(state_dir):
                raise Failure(
                    f"{path}: found another file system there; expected that of {state_dir}, for what has come to "
                    f"{INCOMING}/ gets its place by a link. Mount the disk at {state_dir} (or have trainer_state_dir "
                    "lead to it), and move there what is in it"
                )


def device(path: str) -> int:
    """The number of the file system that a path is on."""
    return os.stat(path).st_dev


def offer(source: str, below: str, user: str) -> dict:
    """RETURN's `offered`. Raises Failure, OSError.

    Read with the rights of the service user: what that may not read, no link of somebody else's gets out.
    """
    source = os.path.normpath(source)
    hashes, sizes = {}, {}
    with acting_as(user):
        for name in names_below(source):
            with opened(os.path.join(source, name) if name else source) as file:
                hashes[name], sizes[name] = sha256(file), os.fstat(file.fileno()).st_size
    if not hashes or (below == "models" and "config.json" not in hashes):
        raise Failure(
            f"{source}: found no {'config.json' if hashes else 'file'} in it; expected a "
            f"{'directory' if below == 'models' else 'file or directory'} of a {below.rstrip('s')}"
        )
    directory = f"{below}/{content_hash(hashes)}"
    path = f"{directory}/{os.path.basename(source)}"
    files = [
        {
            "path": os.path.join(path, name) if name else path,
            "bytes": sizes[name],
            "sha256": digest,
            "here": os.path.join(source, name) if name else source,
        }
        for name, digest in hashes.items()
    ]
    return {"path": path, "directory": directory, "bytes": sum(sizes.values()), "files": files}


def opened(path: str):
    """The file at `path`, unless it is a pipe, a device or the like. Raises Failure, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Failure(f"{path}: found no plain file; expected one")
    return os.fdopen(descriptor, "rb", buffering=0)


def fill(files: list[dict], state_dir: str, user: str) -> None:
    """Write the rest of each file that is missing, of its path `here`, behind what has come before. Raises OSError.

    Copied, for whose file it is could change it while a run reads it. In its place, so that another play which brings
    the same writes the same.
    """
    for one in missing(files, state_dir):
        with acting_as(user), opened(one["here"]) as file:
            try:
                target = os.open(os.path.join(state_dir, INCOMING, one["path"]), os.O_WRONLY | os.O_NOFOLLOW)
            except (FileNotFoundError, PermissionError):
                continue  # another play has brought it, and gives it its place
            with os.fdopen(target, "wb", buffering=0) as copy:
                at = min(os.fstat(target).st_size, one["bytes"])
                file.seek(at)
                copy.seek(at)
                shutil.copyfileobj(file, copy, AT_ONCE)


@contextlib.contextmanager
def folder(state_dir: str, below: str, owner: int, group: int | None = None) -> Iterator[int]:
    """The directory `below` of the state directory, open (a descriptor); with a group, made for it if it is not there.

    The state directory is the service user's, who may put a link anywhere on the way, or swap a directory for one, to
    have root change what lies elsewhere. So each step goes from the one before, follows no link, and ends where
    something is not the `owner`'s. Raises Failure, OSError.
    """
    handle, way = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY), state_dir
    try:
        for depth, name in enumerate(below.split("/")):
            way = f"{way}/{name}"
            if group is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o750, dir_fd=handle)
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise OSError(error.errno, error.strerror, way) from None
                raise Failure(
                    f"{way}: found no directory there; expected one, or nothing. See what it is. Another disk is "
                    "mounted there, or holds all of trainer_state_dir"
                ) from None
            os.close(handle)
            handle = inner
            if os.fstat(handle).st_uid != owner:
                # A release before had the service user own the uppermost, as it does the state directory.
                if depth or group is None or os.fstat(handle).st_uid != os.stat(state_dir).st_uid:
                    raise Failure(
                        f"{way}: found a directory of another user's; expected none. See whose it is"
                    )
                os.fchown(handle, owner, group)
                os.fchmod(handle, 0o750)
            elif group is not None:
                os.fchown(handle, -1, group)
        yield handle
    finally:
        os.close(handle)


def place(descriptor: int, state_dir: str, path: str, group: int) -> None:
    """Give an open file its place below the state directory, besides the one that it may have."""
    above, name = os.path.split(path)
    os.fsync(descriptor)  # what a power cut would take of it, nobody would miss: it is known by its size
    with folder(state_dir, above, os.geteuid(), group) as at:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)  # cut short by something else
        try:
            # Of this very file, whatever its path leads to by now; only with a directory does Python follow the link.
            source = f"/proc/self/fd/{descriptor}"
            os.link(source, name, src_dir_fd=descriptor, dst_dir_fd=at, follow_symlinks=True)
        except FileExistsError:
            # Another play has had the same file under another name.
            there = os.stat(name, dir_fd=at, follow_symlinks=False)
            if not stat.S_ISREG(there.st_mode) or there.st_size != os.fstat(descriptor).st_size:
                raise
        os.fsync(at)


def remove(path: str, descriptor: int) -> None:
    """Remove an open file from its path, unless another play has put another one there, or nothing."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            os.unlink(path)


def abandoned(path: str, one: dict, state_dir: str) -> None:
    """Remove a file that was checked and got no place then. Waits for another play that is about to give it one."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        if missing([one], state_dir):
            remove(path, file.fileno())


def begin(files: list[dict], state_dir: str, user: str) -> dict[str, int]:
    """Lay out what is there for the next host, and make room for the rest; path to its bytes that have come before."""
    incoming = os.path.join(state_dir, INCOMING)
    wanted = missing(files, state_dir)
    growing = {}
    with acting_as(user) as entry:
        for one in files:
            os.makedirs(os.path.dirname(os.path.join(incoming, one["path"])), mode=0o750, exist_ok=True)
        for one in wanted:
            path = os.path.join(incoming, one["path"])
            if (size(path) or 0) and not os.access(path, os.W_OK, effective_ids=True):
                abandoned(path, one, state_dir)
            if not missing([one], state_dir):
                continue  # another play has brought it meanwhile
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o640)
            try:
                if os.fstat(descriptor).st_size > one["bytes"]:
                    os.ftruncate(descriptor, 0)
                growing[one["path"]] = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    for one in files:
        if one["path"] not in growing:
            # Where another play has tidied up, the next host finds it in its place.
            above, name = os.path.split(one["path"])
            with (
                contextlib.suppress(FileExistsError, FileNotFoundError),
                folder(state_dir, above, os.geteuid(), entry.pw_gid) as there,
                folder(state_dir, f"{INCOMING}/{above}", entry.pw_uid) as laid,
            ):
                os.link(name, name, src_dir_fd=there, dst_dir_fd=laid)
    return growing


def pull(
    files: list[dict], state_dir: str, user: str, source: str, patience: float, note: Note | None = None
) -> None:
    """Fetch what is missing from `source` until it is whole, however often that takes. Raises Failure.

    note: where it says how far it is.

    In one stream, byte after byte in the order of the files, which is that in which they come to the source. A tool
    that looks at a file, sends what is there and looks again (rsync) has more to send at each look than at the one
    before, because more has come meanwhile: the last of eight hosts then lags behind by as much as the whole takes.
    """
    incoming = os.path.join(state_dir, INCOMING)
    since, said = time.monotonic(), ""
    while rest := [
        one
        for one in missing(files, state_dir)  # another play may have brought one meanwhile
        if (size(os.path.join(incoming, one["path"])) or 0) < one["bytes"]
    ]:
        left = max(0.0, since + patience - time.monotonic())
        came, words = stream(rest, incoming, user, source, left, note or Note())
        said = words or said
        if came:
            since = time.monotonic()
        elif time.monotonic() - since >= patience:
            raise Failure(
                f"nothing has come from {source} for {patience:.0f} s, and {len(rest)} files are not whole: "
                f"{said or rest[0]['path']}. See whether it answers, and run train.yml again: what has come stays."
            )
        else:
            time.sleep(1)


def stream(
    rest: list[dict], incoming: str, user: str, source: str, patience: float, note: Note
) -> tuple[int, str]:
    """Fetch the files over one connection, until all are whole, it breaks, or nothing comes for `patience` seconds.

    Returns how many bytes came, and what ssh said where it failed.
    """
    become = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
    sender = f"exec python3 -I -c {shlex.quote(SENDER)} {shlex.quote(incoming)}"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*become, *SSH.split(), source, sender], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
    )
    os.set_blocking(process.stderr.fileno(), False)
    with contextlib.suppress(OSError):  # more than this user may
        fcntl.fcntl(process.stdout, F_SETPIPE_SZ, AT_ONCE)
    asked = [(one["path"], size(os.path.join(incoming, one["path"])) or 0, one["bytes"]) for one in rest]
    counted = Counted(note, sum(at for _, at, _ in asked), sum(whole for _, _, whole in asked))
    came = 0
    try:
        with contextlib.suppress(BrokenPipeError):  # why stands in what ssh says
            process.stdin.write(json.dumps(asked).encode() + b"\n")
        for path, at, whole in asked:
            try:
                with acting_as(user):
                    file = os.open(os.path.join(incoming, path), os.O_WRONLY | os.O_NOFOLLOW)
            except (FileNotFoundError, PermissionError):
                break  # another play has brought it, and gives it its place
            try:
                got = take(process.stdout.fileno(), file, at, whole, patience, counted.came)
            finally:
                os.close(file)
            came += got
            if at + got < whole:
                break
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    said = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
    process.stderr.close()
    return came, (said or [f"ssh ended with {process.returncode}"])[-1] if process.returncode else ""


def take(pipe: int, file: int, at: int, whole: int, patience: float, came: Callable[[int], None]) -> int:
    """Write what comes from `pipe` into `file`, from byte `at` to byte `whole`; how many bytes came.

    came: is told of each piece's.
    """
    start, room = at, memoryview(bytearray(AT_ONCE))
    while at < whole and select.select([pipe], [], [], patience)[0]:
        data = room[: os.readv(pipe, [room[: whole - at]])]
        if not data:
            break
        while data:
            # In its place, so that whoever else writes the same file writes the same.
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written
            came(written)
    return at - start


def settle(files: list[dict], state_dir: str, user: str) -> bool:
    """Check what has come, and give it its place; whether anything was. Raises Failure.

    It is opened, and removed if need be, with the service user's rights: a link of its leads no further than these.

    A file is locked from before it becomes root's until it has its place, so that another play which meets it between
    waits (`abandoned`, or here), and does not take it for one that nobody wants.
    """
    placed = False
    for one in missing(files, state_dir):
        path = os.path.join(state_dir, INCOMING, one["path"])
        try:
            with acting_as(user) as entry:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not missing([one], state_dir):
                continue  # another play has brought it, and tidied up
            raise Failure(
                f"{path}: found no file; expected one of {one['bytes']} bytes. Another play has removed it, because it "
                "arrived damaged, or somebody has; run train.yml again."
            ) from None
        with open(descriptor, "rb") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not missing([one], state_dir):
                continue  # another play has brought it meanwhile
            if os.fstat(descriptor).st_uid == entry.pw_uid:  # else a play before has come so far
                os.fchown(descriptor, os.geteuid(), entry.pw_gid)
                os.fchmod(descriptor, 0o640)
            digest = sha256(file)
            if digest != one["sha256"]:
                with acting_as(user):
                    remove(path, descriptor)
                raise Failure(
                    f"{one['path']}: found a SHA-256 of {digest[:12]}…; expected {one['sha256'][:12]}…. It arrived "
                    "damaged and was removed; run train.yml again."
                )
            place(descriptor, state_dir, one["path"], entry.pw_gid)
            placed = True
    return placed


def tidy(files: list[dict], state_dir: str) -> None:
    """Remove what was laid out or has come of `files`, what is STALE, and the directories that are empty by that.

    Whatever else is there, another play is bringing. The service user may have put links there: none is followed.
    """
    incoming = os.path.join(state_dir, INCOMING)
    ours, emptied, old = {os.path.normpath(one["path"]) for one in files}, set(), time.time() - STALE
    for path in ours:
        emptied.update(parents(path))
    with contextlib.suppress(FileNotFoundError):
        for folder, folders, names, handle in os.fwalk(incoming, topdown=False):
            below = os.path.relpath(folder, incoming)
            for name in names:
                path = os.path.normpath(os.path.join(below, name))
                with contextlib.suppress(FileNotFoundError):
                    # Of a link to a file of long ago, too, this is when it was made.
                    if path in ours or os.lstat(name, dir_fd=handle).st_ctime < old:
                        os.unlink(name, dir_fd=handle)
                        emptied.update(parents(path))
            for name in folders:
                with contextlib.suppress(OSError):  # not empty
                    if os.path.normpath(os.path.join(below, name)) in emptied:
                        os.rmdir(name, dir_fd=handle)
    with contextlib.suppress(OSError):
        os.rmdir(incoming)


def parents(path: str) -> list[str]:
    """The directories above a relative path."""
    found = []
    while path := os.path.dirname(path):
        found.append(path)
    return found


def sha256(file) -> str:
    """SHA-256 of an open file, in hex."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "choices": list(STEPS), "required": True},
            "files": {"type": "list", "elements": "dict"},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "source": {"type": "str"},
            "below": {"type": "str", "choices": list(KEPT), "default": KEPT[0]},
            "patience": {"type": "float", "default": 120},
        },
        required_if=[
            ("step", "pull", ["source"]),
            *(("step", step, ["source" if step == "offer" else "files"]) for step in STEPS),
        ],
        supports_check_mode=True,
    )
    p = module.params
    files, state_dir, user = p["files"], p["state_dir"], p["user"]
    for path in (one["path"] for one in files or ()):
        # Where another host has it from (hub_fetched, offered) it is that host's word.
        words = path.split("/")
        if len(words) < 2 or words[0] not in PLACES or {"", ".", ".."} & {*words}:
            module.fail_json(
                msg=f"{path}: found no place for what is brought; expected {'/…, '.join(PLACES)}/…"
            )
    if module.check_mode and p["step"] != "offer":
        changed = p["step"] != "have" and bool(missing(files, state_dir))
        module.exit_json(changed=changed, missing={}, here=here(files, state_dir))
    os.umask(0o027)
    try:
        with acting_as(user) as entry:
            group = entry.pw_gid
        if p["step"] in ("have", "begin", "fill", "pull"):
            check_one_disk(files, state_dir)
        if p["step"] == "have":
            placed = have(files, state_dir, group)
            check_room(files, state_dir)
            module.exit_json(changed=placed, here=here(files, state_dir))
        if p["step"] in ("begin", "fill", "pull"):
            check_room(files, state_dir)
        if p["step"] == "offer":
            module.exit_json(changed=False, offered=offer(p["source"], p["below"], user))
        if p["step"] == "begin":
            module.exit_json(changed=False, missing=begin(files, state_dir, user))
        if p["step"] == "tidy":
            tidy(files, state_dir)
            module.exit_json(changed=False)
        if p["step"] == "fill":
            begin(files, state_dir, user)
            fill(files, state_dir, user)
        if p["step"] == "pull":
            begin(files, state_dir, user)
            note = Note(BRINGING)
            try:
                pull(files, state_dir, user, p["source"], p["patience"], note)
            finally:
                note.close()
        module.exit_json(changed=settle(files, state_dir, user))
    except KeyError:
        module.fail_json(msg=f"There is no user {user} on this host; the role identity makes it.")
    except Failure as failure:
        module.fail_json(msg=str(failure))
    except PermissionError as error:
        cure = f"; {user} may not read it: let others do (chmod o+rX, of the directories above, too)"
        module.fail_json(msg=f"{error.filename}: {error.strerror}{cure if p['step'] == 'offer' else ''}")
    except OSError as error:
        module.fail_json(msg=f"{error.filename or state_dir}: {error.strerror}")


if __name__ == "__main__":
    main()
