#!/usr/bin/python
"""A word that the server of the shared directory writes, and that every other host reads through its mount."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_probe
short_description: Write a word into the shared directory, read it on another host, or remove it
description:
  - All is done as the service user, in a process of its own, so that a mount that hangs cannot hold this one.
  - A host that reads also writes a file of its own, brings it to the server's disk, and removes it.
options:
  path: {type: path, required: true, description: The shared directory.}
  user: {type: str, required: true, description: The service user.}
  state: {type: str, required: true, choices: [written, read, removed], description: What to do.}
  word: {type: str, description: With O(state=read), what was written. Its file bears its name.}
  server: {type: str, description: "With O(state=read), the server's name in the inventory."}
  address: {type: str, description: "With O(state=read), the server's address."}
  unit: {type: str, description: "With O(state=read), the mount unit, whose journal says why it does not mount."}
  seconds: {type: float, default: 180, description: How long it may take. Longer than mount.nfs tries.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Write a word
  storage_probe: {path: /srv/trainyard/shared, user: trainyard, state: written}
"""

RETURN = r"""
word: {description: The word., type: str, returned: always}
seconds: {description: How long it took., type: float, returned: always}
"""

import glob
import os
import secrets
import select
import signal
import socket
import time

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule

PORT = 2049
KNOCK_SECONDS = 10
FILE = ".trainyard-probe-"


def write(path: str, word: str) -> None:
    """A file of the word, on the disk once this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660), "w", encoding="ascii") as file:
        file.write(word)
        file.flush()
        os.fsync(file.fileno())


def written(path: str, word: str) -> str:
    """The server's part; what an interrupted run left goes first."""
    removed(path, word)
    write(f"{path}/{FILE}{word}", word)
    return ""


def removed(path: str, word: str) -> str:
    for left in glob.glob(f"{glob.escape(path)}/{FILE}*"):
        os.unlink(left)
    return ""


def readable(path: str, word: str) -> str:
    """Another host's part. Returns what it found where the word should be."""
    with open(f"{path}/{FILE}{word}", encoding="ascii", errors="replace") as file:
        found = file.read(100)
    if found != word:
        return f"{found!r} in it"
    own = f"{path}/{FILE}{word}-{secrets.token_hex(4)}"
    write(own, word)
    os.unlink(own)
    return ""


def aside(work, user: str, path: str, word: str, seconds: float) -> str:
    """What `work` returns, done as `user` in a process that may hang; its error, as text, or that it did."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        said = "a fault of this module"
        try:
            with acting_as(user):
                said = work(path, word)
        except OSError as error:
            said = f"{error.strerror} ({error.filename or path})"
        except KeyError:
            said = f"no user {user}"
        finally:  # whatever it was, this process must not go on as the module
            os.write(send, said.encode()[:4000])
            os._exit(0)
    os.close(send)
    try:
        if not select.select([receive], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)  # it may stay until the kernel gives up on the server
            return f"no answer within {seconds:.0f} s"
        said = os.read(receive, 4000).decode()
        os.waitpid(child, 0)
        return said
    finally:
        os.close(receive)


def knock(address: str, seconds: float = KNOCK_SECONDS) -> tuple[str, str]:
    """(own address, fault) of a connection to the server's port: one of them is empty."""
    try:
        with socket.create_connection((address, PORT), seconds) as connection:
            return connection.getsockname()[0], ""
    except ConnectionRefusedError:
        return "", "refused"
    except OSError as error:
        return "", "no answer" if isinstance(error, TimeoutError) else str(error.strerror)


def unreachable(fault: str, server: str, address: str) -> str:
    """The message where the server's port does not answer."""
    cure = (
        f"On {server}, `systemctl status nfs-server` says why it does not run; then run site.yml on all hosts."
        if fault == "refused"
        else f"playbooks/preflight.yml tells of the way to {server}; site.yml, run on it, lets its peers in."
    )
    return f"storage_server: found no way to {server} ({address}), port {PORT}: {fault}; expected it to answer. {cure}"


def unreadable(found: str, own: str, server: str, address: str, path: str, journal: str) -> str:
    """The message where it answers, and the word is not there."""
    said = f" (mount: {journal})" if journal else ""
    if "denied" in f"{found} {journal}".lower():
        cure = (
            f"This host comes from {own}, and {server} lets in the cluster addresses of its peers: set this host's "
            f"cluster_address to that, and run site.yml on all hosts; else see who may do what in {path} on {server}."
        )
    else:
        cure = f"See `mount | grep {path}` here and `exportfs -v` on {server}."
    return (
        f"storage_path: found {found}{said}; expected to read in {path} what {server} ({address}) has written there, "
        f"and to write. {cure}"
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "state": {"type": "str", "required": True, "choices": ["written", "read", "removed"]},
            **{name: {"type": "str"} for name in ("word", "server", "address", "unit")},
            "seconds": {"type": "float", "default": 180},
        },
        required_if=[("state", "read", ("word", "server", "address", "unit"))],
    )
    asked, started = module.params, time.monotonic()
    path, user, word = asked["path"], asked["user"], asked["word"] or secrets.token_hex(8)
    if asked["state"] == "read":
        own, fault = knock(asked["address"])
        if fault:
            module.fail_json(msg=unreachable(fault, asked["server"], asked["address"]))
        if found := aside(readable, user, path, word, asked["seconds"]):
            _, journal, _ = module.run_command(
                ["journalctl", "-u", asked["unit"], "-t", "mount", "-n", "1", "-o", "cat", "--no-pager"]
            )
            words = (found, own, asked["server"], asked["address"], path, journal.strip())
            module.fail_json(msg=unreadable(*words))
    else:
        work = written if asked["state"] == "written" else removed
        if found := aside(work, user, path, word, asked["seconds"]):
            module.fail_json(
                msg=f"storage_path: found {found}; expected {user} to write in {path}. Give it to that user: "
                f"chgrp {user} {path} && chmod g+rwxs {path}, and let it through the directories above."
            )
    module.exit_json(changed=False, word=word, seconds=round(time.monotonic() - started, 2))


if __name__ == "__main__":
    main()
