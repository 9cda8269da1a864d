#!/usr/bin/python
"""One host's part in a chain: files go from the controller to the first host, and from each host to the next."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bring_host
short_description: Take part in bringing files from host to host
description:
  - C(begin) says which files are not there yet, and how much of each has come before; what is there is laid out
    for the next host.
  - C(pull) begins, fetches from the host before what is missing, while it still grows there, over SSH as the service
    user, and settles.
  - C(settle) checks every file's SHA-256 and gives it its place, where root alone can change it.
  - C(tidy) removes what was laid out.
options:
  step: {type: str, choices: [begin, pull, settle, tidy], required: true, description: See above.}
  files:
    description: "Each with C(path) (below O(state_dir)), C(bytes) and C(sha256)."
    type: list
    elements: dict
    required: true
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  user: {type: str, required: true, description: "The service user, who may log in to its peers."}
  source: {type: str, description: The host before; with C(pull).}
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
missing:
  description: C(begin)'s answer, path to the bytes that have come before.
  type: dict
  returned: with C(begin)
"""

import contextlib
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

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule

INCOMING = "incoming"  # below the state directory: files that grow, and links to those that are there
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
            try:
                file = os.open(os.path.join(folder, path), os.O_RDONLY)
            except FileNotFoundError:
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


def begin(files: list[dict], state_dir: str, user: str) -> dict[str, int]:
    """Lay out what is there for the next host, and make room for the rest; path to its bytes that have come before."""
    incoming = os.path.join(state_dir, INCOMING)
    wanted = missing(files, state_dir)
    growing = {}
    with acting_as(user):
        for one in files:
            os.makedirs(os.path.dirname(os.path.join(incoming, one["path"])), mode=0o750, exist_ok=True)
        for one in wanted:
            path = os.path.join(incoming, one["path"])
            if (size(path) or 0) and not os.access(path, os.W_OK, effective_ids=True):
                os.unlink(path)  # checked already, and then it got no place
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o640)
            try:
                if os.fstat(descriptor).st_size > one["bytes"]:
                    os.ftruncate(descriptor, 0)
                growing[one["path"]] = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    for one in files:
        if one["path"] not in growing:
            with contextlib.suppress(FileExistsError):
                os.link(os.path.join(state_dir, one["path"]), os.path.join(incoming, one["path"]))
    return growing


def pull(files: list[dict], state_dir: str, user: str, source: str, patience: float) -> None:
    """Fetch what is missing from `source` until it is whole, however often that takes. Raises Failure.

    In one stream, byte after byte in the order of the files, which is that in which they come to the source. A tool
    that looks at a file, sends what is there and looks again (rsync) has more to send at each look than at the one
    before, because more has come meanwhile: the last of eight hosts then lags behind by as much as the whole takes.
    """
    incoming = os.path.join(state_dir, INCOMING)
    wanted = missing(files, state_dir)
    since, said = time.monotonic(), ""
    while rest := [one for one in wanted if (size(os.path.join(incoming, one["path"])) or 0) < one["bytes"]]:
        left = max(0.0, since + patience - time.monotonic())
        came, words = stream(rest, incoming, user, source, left)
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


def stream(rest: list[dict], incoming: str, user: str, source: str, patience: float) -> tuple[int, str]:
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
    came = 0
    try:
        with contextlib.suppress(BrokenPipeError):  # why stands in what ssh says
            process.stdin.write(json.dumps(asked).encode() + b"\n")
        for path, at, whole in asked:
            with acting_as(user):
                file = os.open(os.path.join(incoming, path), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                got = take(process.stdout.fileno(), file, at, whole, patience)
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


def take(pipe: int, file: int, at: int, whole: int, patience: float) -> int:
    """Write what comes from `pipe` into `file`, from byte `at` to byte `whole`; how many bytes came."""
    start, room = at, memoryview(bytearray(AT_ONCE))
    while at < whole and select.select([pipe], [], [], patience)[0]:
        data = room[: os.readv(pipe, [room[: whole - at]])]
        if not data:
            break
        while data:
            # In its place, so that whoever else writes the same file writes the same.
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written
    return at - start


def settle(files: list[dict], state_dir: str, group: int) -> bool:
    """Check what has come, and give it its place; whether anything was. Raises Failure."""
    wanted = missing(files, state_dir)
    for one in wanted:
        path = os.path.join(state_dir, INCOMING, one["path"])
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            os.fchown(descriptor, os.geteuid(), group)
            os.fchmod(descriptor, 0o640)
            digest = sha256(file)
            if digest != one["sha256"]:
                os.unlink(path)
                raise Failure(
                    f"{one['path']}: found a SHA-256 of {digest[:12]}…; expected {one['sha256'][:12]}…. It arrived "
                    "damaged and was removed; run train.yml again."
                )
            final = os.path.join(state_dir, one["path"])
            os.makedirs(os.path.dirname(final), mode=0o750, exist_ok=True)
            os.chown(os.path.dirname(final), -1, group)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(final)  # cut short by something else
            # Of this very file, whatever its path leads to by now; only with a directory does Python follow the link.
            os.link(f"/proc/self/fd/{descriptor}", final, src_dir_fd=descriptor, follow_symlinks=True)
    return bool(wanted)


def sha256(file) -> str:
    """SHA-256 of an open file, in hex."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "choices": ["begin", "pull", "settle", "tidy"], "required": True},
            "files": {"type": "list", "elements": "dict", "required": True},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "source": {"type": "str"},
            "patience": {"type": "float", "default": 120},
        },
        required_if=[("step", "pull", ["source"])],
        supports_check_mode=True,
    )
    p = module.params
    files, state_dir, user = p["files"], p["state_dir"], p["user"]
    if module.check_mode:
        module.exit_json(changed=bool(missing(files, state_dir)), missing={})
    os.umask(0o027)
    try:
        with acting_as(user) as entry:
            group = entry.pw_gid
        if p["step"] == "begin":
            module.exit_json(changed=False, missing=begin(files, state_dir, user))
        if p["step"] == "tidy":
            shutil.rmtree(os.path.join(state_dir, INCOMING), ignore_errors=True)
            module.exit_json(changed=False)
        if p["step"] == "pull":
            begin(files, state_dir, user)
            pull(files, state_dir, user, p["source"], p["patience"])
        module.exit_json(changed=settle(files, state_dir, group))
    except KeyError:
        module.fail_json(msg=f"There is no user {user} on this host; the role identity makes it.")
    except Failure as failure:
        module.fail_json(msg=str(failure))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or state_dir}: {error.strerror}")


if __name__ == "__main__":
    main()
