"""What every check of the inventory is given, an `Inventory`, and what it answers with: problems.

Beside them what several of the checks ask of it, and the words in which several tell the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARED_PREFIXES = ("cluster", "trainyard")  # ours, though no role has that name
GROUPS = ("all", "cluster", "head", "workers", "monitoring", "opensm", "rdma", "storage_server")  # read here
GROUP_KEYS = ("children", "hosts", "vars")  # of a group in a YAML inventory


class Undefined:
    """A value that cannot be worked out, such as a template over facts not gathered yet; `str` says why."""

    def __init__(self, reason: str):
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `where` is a host, group or file; `key` the variable, or empty.

    `found` alone, without `expected` and `cure`, is a sentence that says all three.
    """

    where: str
    key: str
    found: str
    expected: str
    cure: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        if not self.expected:
            return f"{self.where}: {self.found}"
        return f"{self.where}: {key}found {self.found}; expected {self.expected}. {self.cure}"


@dataclass(frozen=True)
class Inventory:
    """What the checks look at.

    `groups`: group to hosts, in inventory order. `hosts`: host to its variables, templates resolved.
    `specs`: variable to its option in a role's argument spec. `roles`: names of the roles. `source`: the
    inventory as the user named it. `origins`: (host, variable) to "file:line", where it is known. `left_out`:
    ("file:line", group, key) of what Ansible passes over in YAML files.
    """

    groups: Mapping[str, list[str]]
    hosts: Mapping[str, Mapping[str, Any]]
    specs: Mapping[str, Mapping[str, Any]]
    roles: Iterable[str] = ()
    source: str = "the inventory"
    origins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    left_out: Iterable[tuple[str, str, str]] = ()

    def members(self) -> list[str]:
        """The cluster's hosts; the group's name is the contract with the playbooks."""
        return list(self.groups.get("cluster", []))

    def local(self) -> bool:
        """True if the hosts are directories of this machine: they share its name and its addresses."""
        return bool(self.members()) and all(
            is_true(self.hosts[host].get("local_mode")) for host in self.members()
        )

    def where(self, host: str, key: str = "") -> str:
        """The host, and the file and line where its `key` is set, if known."""
        origin = self._origin(host, key)
        return f"{host} ({origin})" if origin else host

    def place(self, host: str, key: str) -> str:
        """Where `key` is set: its file and line if known, else the host."""
        return self._origin(host, key) or host

    def place_of_all(self, hosts: list[str], key: str) -> str:
        """Where several hosts have `key` from: the file and line of the first one's if known."""
        return self._origin(hosts[0], key) or (hosts[0] if len(hosts) == 1 else self.source)

    def _origin(self, host: str, key: str) -> str:
        return self.origins.get((host, key), "")

    def hosts_by_variable(self) -> dict[str, list[str]]:
        """Variable to the hosts that have it, hosts outside of the cluster left out."""
        found: dict[str, list[str]] = {}
        for host in self.members():
            for key in self.hosts[host]:
                found.setdefault(str(key), []).append(host)
        return found


def prefixes(roles: Iterable[str]) -> tuple[str, ...]:
    """How names of variables of ours begin."""
    return tuple(f"{name}_" for name in {*SHARED_PREFIXES, *roles})


def hosts_by_value(said: Mapping[str, str]) -> dict[str, list[str]]:
    """Value to the hosts that have it. said: host to value."""
    found: dict[str, list[str]] = {}
    for host, value in said.items():
        found.setdefault(value, []).append(host)
    return found


def several_values(found: Mapping[str, list[str]]) -> str:
    """That hosts differ where all are to have one value. found: hosts_by_value's."""
    return "several values: " + "; ".join(f"{value} ({', '.join(hosts)})" for value, hosts in found.items())


def is_true(value: Any) -> bool:
    """Whether a boolean's value, or what of it is a word as yet, says yes."""
    return str(value).lower() in ("true", "yes")


def is_slip(name: str, known: str) -> bool:
    """True if `name` is `known` with one character missing, doubled, changed, or two neighbours swapped."""
    if name == known or abs(len(name) - len(known)) > 1 or len(known) < 8:
        return False
    common = 0
    while name[common : common + 1] == known[common : common + 1]:
        common += 1
    rest, known_rest = name[common:], known[common:]
    return (
        rest[1:] == known_rest[1:]
        or rest[1:] == known_rest
        or rest == known_rest[1:]
        or (rest[:2] == known_rest[:2][::-1] and rest[2:] == known_rest[2:])
    )
