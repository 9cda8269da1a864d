#!/usr/bin/python
"""One host's part in a chain: files go from the controller to the first host, and from each host to the next."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bring_host
short_description: Take part in bringing files from host to host
description:
  - C(begin) says which files are not there yet, and how much of each has come before; what is there is laid out
    for the next host.
  - C(pull) fetches them from the host before, while they still grow there, by rsync over SSH, as the service user.
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
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule

INCOMING = "incoming"  # below the state directory: files that grow, and links to those that are there
PAUSE = 0.2  # seconds between two looks at a file that has not grown
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


RSYNC = ["rsync", "--append", "--ignore-missing-args", "--no-motd", "--files-from=-"]


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
            # The user that Ansible logs in as is in the group, and appends.
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o660)
            try:
                os.fchmod(descriptor, 0o660)
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
    """Fetch what is missing from `source` until it is whole, however often that takes. Raises Failure."""
    incoming = os.path.join(state_dir, INCOMING)
    wanted = missing(files, state_dir)
    become = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
    with connection(source, user, become) as ssh:
        follow(wanted, incoming, source, [*become, *RSYNC, "-e", ssh], patience)


@contextlib.contextmanager
def connection(source: str, user: str, become: list[str]):
    """The ssh command that reaches `source` over one connection: to log in anew for each look costs more than a piece
    does. Where that connection breaks, the command makes one of its own. It ends with this process, however that ends:
    then `cat` reads no more.
    """
    with acting_as(user):
        folder = tempfile.mkdtemp(prefix="trainyard-bring-")
    shared = [*SSH.split(), "-o", f"ControlPath={folder}/ssh"]
    nothing = subprocess.DEVNULL
    command = [*become, *shared, "-o", "ControlMaster=yes", source, "cat"]
    master = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing)
    try:
        yield " ".join(shared)
    finally:
        subprocess.run([*become, *shared, "-O", "exit", source], capture_output=True, check=False)
        master.stdin.close()
        master.terminate()
        master.wait()
        shutil.rmtree(folder, ignore_errors=True)


def follow(wanted: list[dict], incoming: str, source: str, command: list[str], patience: float) -> None:
    """Have `command` fetch the files, while they grow at the source, until all are whole. Raises Failure."""
    command = [*command, f"{source}:{incoming}/", f"{incoming}/"]
    came, since, said = -1, time.monotonic(), ""
    while True:
        sizes = {one["path"]: size(os.path.join(incoming, one["path"])) or 0 for one in wanted}
        rest = [one["path"] for one in wanted if sizes[one["path"]] < one["bytes"]]
        if not rest:
            return
        if sum(sizes.values()) > came:
            came, since = sum(sizes.values()), time.monotonic()
        elif time.monotonic() - since > patience:
            raise Failure(
                f"nothing has come from {source} for {patience:.0f} s, and {len(rest)} files are not whole: "
                f"{said or rest[0]}. See whether it answers, and run train.yml again: what has come stays."
            )
        else:
            time.sleep(PAUSE)
        done = subprocess.run(command, input="\n".join(rest), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = lines[0] if lines else f"rsync ended with {done.returncode}"


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
