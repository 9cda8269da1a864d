"""Who the cluster's hosts are: the groups that they are in, and their names.

Given an `Inventory`; each check answers with what is wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from inventory_addresses import is_ipv4
from inventory_base import GROUP_KEYS, GROUPS, Inventory, Problem, is_slip

HOST_NAME_MAX = 64  # Linux; each label between dots has at most 63 characters (RFC 1123)
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def check_left_out(inventory: Inventory) -> Iterable[Problem]:
    """Nothing stands where Ansible passes over it: a host would be none of the cluster's, a feature be off."""
    for where, group, key in inventory.left_out:
        yield Problem(
            where,
            group,
            f"{key}, which Ansible leaves out",
            f"{', '.join(GROUP_KEYS[:-1])} or {GROUP_KEYS[-1]} alone below a group",
            "Put a host below hosts:, a variable below vars:, a group, with its own hosts:, below children:",
        )
    for name in inventory.groups:
        plain = name.replace("-", "_")
        known = next((one for one in GROUPS if plain == one or is_slip(plain, one)), name)
        if known != name and inventory.groups[name]:
            yield Problem(
                inventory.source, name, "a group that nothing here reads", known, f"Rename it to {known}"
            )


def check_groups(inventory: Inventory) -> Iterable[Problem]:
    """Exactly one head; every host of the cluster is the head or a worker, never both."""
    if not any(inventory.groups.get(name) for name in ("cluster", "head", "workers")):
        yield _no_host(inventory)
        return
    yield from _one_head(inventory)
    yield from _one_place_each(inventory)
    yield from _workers_misnamed(inventory)


def _no_host(inventory: Inventory) -> Problem:
    groups = inventory.groups
    near = [name for name in groups if name not in ("all", "ungrouped") and groups[name]]
    found = "no host in it" if not near else f"no host in it, but in: {', '.join(sorted(near))}"
    return Problem(
        inventory.source,
        "cluster",
        found,
        "at least one host, in the group head below the group cluster",
        "Begin with a copy of one of inventory/examples, and name it with -i",
    )


def _one_head(inventory: Inventory) -> Iterable[Problem]:
    head = inventory.groups.get("head", [])
    if len(head) != 1:
        yield Problem(
            inventory.source,
            "head",
            f"{len(head)} hosts ({', '.join(head)})" if head else "no host",
            "exactly one host: it is node 0, where a run's ranks meet",
            f"Move {'all but one of them' if head else 'one of the workers'} to the group "
            f"{'workers' if head else 'head'}",
        )


def _one_place_each(inventory: Inventory) -> Iterable[Problem]:
    """The head and the workers are two, and together the cluster."""
    head, workers = (inventory.groups.get(name, []) for name in ("head", "workers"))
    members = inventory.members()
    for host in sorted(set(head) & set(workers)):
        yield Problem(
            inventory.where(host),
            "head, workers",
            "the host in both groups",
            "each host in one of them",
            "Remove it from workers",
        )
    for host in [host for host in [*head, *workers] if host not in members]:
        yield Problem(
            inventory.where(host),
            "cluster",
            "the host in head or workers, but not in cluster",
            "head and workers to be children of the group cluster",
            "Write cluster: {children: {head: …, workers: …}}",
        )
    for host in [host for host in members if host not in head and host not in workers]:
        yield Problem(
            inventory.where(host),
            "cluster",
            "the host in cluster, but neither in head nor in workers",
            "it to have its place in the order of the ranks",
            "Put it into head or workers",
        )


def _workers_misnamed(inventory: Inventory) -> Iterable[Problem]:
    groups, members = inventory.groups, inventory.members()
    apart = [name for name, hosts in groups.items() if name != "workers" and set(hosts) - set(members)]
    for name in difflib.get_close_matches("workers", apart, 1, 0.85) if not groups.get("workers") else ():
        yield Problem(
            inventory.source,
            name,
            f"{', '.join(groups[name])} in it, and no host in workers",
            "the other hosts of the cluster in the group workers",
            f"Rename {name} to workers, and have it below cluster, as head is",
        )


def check_names(inventory: Inventory) -> Iterable[Problem]:
    """Every name can be a machine's host name, and no two machines share one."""
    if inventory.local():
        return
    taken: dict[str, str] = {}
    for host in inventory.members():
        own = inventory.hosts[host].get("identity_hostname") or host
        for key, name in ({"": host} | ({"identity_hostname": own} if own != host else {})).items():
            if fault := name_fault(str(name)):
                cure = f"Rename it, for instance to {proper_name(str(name), len(taken) + 1)}"
                if not key and is_ipv4(host):
                    cure += f", and give it ansible_host: {host}"
                yield Problem(
                    inventory.where(host, key),
                    key or "host name",
                    f"{name!s:.80} ({fault})",
                    "letters, digits and hyphens, as RFC 1123 has it",
                    cure,
                )
        other = taken.setdefault(str(own).lower(), host)
        if other != host:
            yield Problem(
                inventory.where(host, "identity_hostname"),
                "host name",
                f"{own}, which {other} has, too",
                "one name a machine: ranks with equal names believe that they share a machine",
                "Give one of them another name",
            )


def name_fault(name: str) -> str:
    """What makes `name` unfit as a host name; empty if nothing does."""
    if name.lower().split(".")[0] == "localhost":
        return "this name means every machine itself"
    if is_ipv4(name) or name.rpartition(".")[2].isdigit():
        return "it reads as an address"
    if len(name) > HOST_NAME_MAX:
        return f"{len(name)} characters, {HOST_NAME_MAX} are allowed"
    if "_" in name:
        return "an underscore"
    for label in name.split("."):
        if len(label) > 63:
            return f"a part of {len(label)} characters, 63 are allowed"
        if not LABEL.fullmatch(label):
            return f"the part {label!r}"
    return ""


def proper_name(name: str, number: int) -> str:
    """A fit name near `name`, to propose."""
    near = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63].strip("-")
    return near if near and not name_fault(near) and near != name else f"node{number}"
