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
MARK = "# trainyard: "  # before an owner's line that gave way to the block
NOTE = "the cluster's hosts, written by the role identity"
HOST = {  # of the modules' option hosts
    "name": {"type": "str"},  # the inventory's
    "address": {"type": "str", "required": True},
    "names": {"type": "list", "elements": "str", "required": True},
}


def without_loopback_names(line: str, names: set[str]) -> str | None:
    """`line`, an owner's line, without the cluster's `names` on 127.0.1.1; None if nothing is left of it.

    `names` are in small letters: Node1 there is found by who asks for node1, and before what comes after it.
    """
    entry, _, comment = line.partition("#")
    words = entry.split()
    if not words or words[0] != "127.0.1.1" or not names & {word.lower() for word in words[1:]}:
        return line
    left = [word for word in words[1:] if word.lower() not in names]
    if not left:
        return None
    return " ".join([words[0], *left]) + (f"  #{comment}" if comment else "")


def unmarked(lines: list[str]) -> list[str]:
    """The owner's `lines` as they were; one that somebody has written anew beside the marked one is the same."""
    return [
        line[len(MARK) :] if line.startswith(MARK) else line
        for line in lines
        if not (line.startswith(MARK) and line[len(MARK) :] in lines)
    ]


def with_full_name(hosts: list[dict], own: str, text: str) -> list[dict]:
    """`hosts`, of which the one that is named `own` has its full name first, as its hosts file (`text`) has it.

    That is the first name of Debian's line for it, or of its line in our block, where the inventory leaves the domain
    out. Peers do not know it, nor need they.
    """
    outside, inside = (
        [line.partition("#")[0].split() for line in lines]
        for lines in (unmarked(split(text)[0]), split(text)[1])
    )
    loopback = [words[1] for words in outside if words[:1] == ["127.0.1.1"] and len(words) > 1]
    taken = {name.lower() for host in hosts if host["name"] != own for name in host["names"]}

    def full(host: dict) -> list[str]:
        name = host["names"][0]
        ours = [words[1] for words in inside if name in words[2:]]  # another line is a peer's, or was
        fitting = [one for one in loopback + ours if one.lower().startswith(f"{name.lower()}.")]
        return [one for one in fitting if one.lower() not in taken][:1]

    return [
        {**host, "names": list(dict.fromkeys([*full(host), *host["names"]]))} if host["name"] == own else host
        for host in hosts
    ]


def conflicts(lines: list[str], hosts: list[dict]) -> list[str]:
    """Owner's lines that give a host's name another IPv4 address, in words."""
    wanted = {name.lower(): host["address"] for host in hosts for name in host["names"]}
    found = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        found += [
            f"{line.strip()!r}; the cluster has {wanted[name.lower()]} for {name}"
            for name in names
            if name.lower() in wanted and address != wanted[name.lower()] and "." in address
        ]
    return found


def hosts_file(text: str, hosts: list[dict]) -> tuple[str, list[str]]:
    """The file's new text from its old one, and the conflicts in it.

    An owner's line that loses names stays in its place as a comment, so that it can come back as it was.
    """
    names = {name.lower() for host in hosts for name in host["names"]} | {*TEMPLATE_NAMES}
    kept, rest = [], []
    for line in unmarked(split(text)[0]):
        left = without_loopback_names(line, names)
        if left != line and "{{" not in line:  # cloud-init's own comes back otherwise (the module host_made)
            kept.append(MARK + line)
        if left is not None:
            (kept if left == line or "{{" in line else rest).append(left)
    block = [" ".join([host["address"], *host["names"]]) for host in hosts]
    return join(kept, block + rest, NOTE), conflicts(kept, hosts)


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
