"""By what a host is known: its peers' names, its machine-id, its service user's SSH key. Looked at by one module, and
made by others where it is not as it shall be.
"""

from __future__ import annotations

import os
import pwd
import re

from ansible.module_utils.managed_block import join, read, split

# What cloud-init writes /etc/hosts from at each boot, where the user-data of the machine asks for that.
TEMPLATE = "/etc/cloud/templates/hosts.debian.tmpl"
TEMPLATE_NAMES = ("{{fqdn}}", "{{hostname}}")  # the machine's own, as they stand there
NOTE = "the cluster's hosts, written by the role identity"
HOST = {  # of the modules' option hosts
    "name": {"type": "str"},
    "address": {"type": "str", "required": True},
    "names": {"type": "list", "elements": "str", "required": True},
}


def without_loopback_names(line: str, names: set[str]) -> str | None:
    """`line`, an owner's line, without the cluster's `names` on 127.0.1.1; None if nothing is left of it."""
    entry, _, comment = line.partition("#")
    words = entry.split()
    if not words or words[0] != "127.0.1.1" or not names & set(words[1:]):
        return line
    left = [word for word in words[1:] if word not in names]
    if not left:
        return None
    return " ".join([words[0], *left]) + (f"  #{comment}" if comment else "")


def conflicts(lines: list[str], hosts: list[dict]) -> list[str]:
    """Owner's lines that give a host's name another IPv4 address, in words."""
    wanted = {name: host["address"] for host in hosts for name in host["names"]}
    found = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        found += [
            f"{line.strip()!r}; the cluster has {wanted[name]} for {name}"
            for name in names
            if name in wanted and address != wanted[name] and "." in address
        ]
    return found


def hosts_file(text: str, hosts: list[dict]) -> tuple[str, list[str]]:
    """The file's new text from its old one, and the conflicts in it."""
    names = {name for host in hosts for name in host["names"]} | {*TEMPLATE_NAMES}
    outside, _ = split(text)
    kept = [line for line in (without_loopback_names(line, names) for line in outside) if line is not None]
    block = [" ".join([host["address"], *host["names"]]) for host in hosts]
    return join(kept, block, NOTE), conflicts(kept, hosts)


def needs_new(current: str, taken: list[str]) -> bool:
    """True if `current` is no machine-id at all, or another host's."""
    return not re.fullmatch("[0-9a-f]{32}", current) or current in taken


def stale_copy(dbus: str, machine_id: str) -> bool:
    """Whether D-Bus has another machine-id in a file of its own."""
    return os.path.exists(dbus) and not os.path.islink(dbus) and read(dbus).strip() != machine_id


def key_of(user: str) -> str:
    """The path of the user's private key. Raises KeyError without such a user."""
    return os.path.join(pwd.getpwnam(user).pw_dir, ".ssh", "id_ed25519")


def public_key(run_as_user, key: str) -> str:
    """Type and base64, from the private key itself: the file beside it may be another's."""
    return " ".join(run_as_user("ssh-keygen", "-y", "-P", "", "-f", key).split()[:2])
