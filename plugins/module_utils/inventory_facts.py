"""What only the hosts' facts tell of an inventory: interfaces and addresses that there are, keys of cloned machines.

Given an `Inventory` whose hosts have `ansible_facts`; those without, which -l left out, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inventory_addresses import address_key, list_of, options_of
from inventory_base import Inventory, Problem


def check_facts(inventory: Inventory) -> list[Problem]:
    """All problems of hosts whose facts are known."""
    if inventory.local():
        return []
    checks = (check_interfaces, check_own_addresses, check_cluster_interface, check_clones)
    return [problem for one in checks for problem in one(inventory)]


def check_interfaces(inventory: Inventory) -> Iterable[Problem]:
    """The interfaces that the inventory names exist."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        there = _facts(variables).get("interfaces")
        if not there:
            continue
        made, wanted = interfaces_of(variables)
        for key, name in wanted:
            if name not in there and name not in made:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{name}, which the host has not got",
                    f"one of {', '.join(sorted(there))}",
                    "Correct the name; `ip -brief link` on the host lists them",
                )


def interfaces_of(variables: Mapping[str, Any]) -> tuple[set[str], list[tuple[str, str]]]:
    """The interfaces that the role network makes or names, and (variable, interface) for those that must exist."""
    made: set[str] = set()
    wanted = (
        [("cluster_interface", str(variables["cluster_interface"]))]
        if variables.get("cluster_interface")
        else []
    )
    for item in list_of(variables.get("network_interfaces")):
        name = item.get("name")
        virtual = item.get("kind") in ("bonds", "bridges", "vlans")
        if name and (virtual or item.get("macaddress")):
            made.add(str(name))
        elif name:
            wanted.append(("network_interfaces", str(name)))
    return made, wanted


def check_own_addresses(inventory: Inventory) -> Iterable[Problem]:
    """Every host has the address that its peers will use, or gets it from the role network."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        there = _facts(variables).get("all_ipv4_addresses")
        key = address_key(variables)
        address = str(variables.get(key))
        given = [text for item in _entries(variables) for text in _addresses_given(item)]
        if there and address not in there and address not in given:
            yield Problem(
                inventory.where(host, key),
                key,
                f"{address}, which no interface of the host has",
                f"one of {', '.join(map(str, there))}",
                "Set cluster_address to the one that its peers reach, or give it this one in network_interfaces",
            )
        about, instead = _given_up(address, variables) if key == "ansible_host" else ("", "")
        if about and address in (there or ()) and address not in given:
            yield Problem(
                inventory.where(host, "ansible_host"),
                "ansible_host",
                f"{address}, which {about} will not have any more, for network_interfaces gives it others",
                "the address by which its peers are to know it",
                f"Set cluster_address: {instead}; it is still reached at {address}, this once",
            )


def _given_up(address: str, variables: Mapping[str, Any]) -> tuple[str, str]:
    """The interface that has the address now and gets static ones instead, and the first of these; else two "".

    Known by its name; by its hardware address alone where it is no VLAN's, bridge's or bond's, which have it, too.
    """
    facts = _facts(variables)
    for item in _entries(variables):
        static = [text for text in _addresses_given(item) if ":" not in text]
        if not static or options_of(item).get("dhcp4"):
            continue
        for name in facts.get("interfaces") or ():
            link = _about(facts, name)
            means = item.get("name") == name or (
                str(item.get("macaddress")).lower() == link.get("macaddress")
                and link.get("type", "ether") == "ether"
                and "." not in str(name)
            )
            if means and address in _addresses_of(facts, name):
                return str(name), static[0]
    return "", ""


def check_cluster_interface(inventory: Inventory) -> Iterable[Problem]:
    """Where the interface of the training is named, it is the one that holds the address, for that one is used."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        facts, named = _facts(variables), variables.get("cluster_interface")
        address = str(variables.get("cluster_address") or variables.get("ansible_host"))
        given = [item.get("name") for item in _entries(variables) if address in _addresses_given(item)]
        holders = given or [
            name for name in facts.get("interfaces") or () if address in _addresses_of(facts, name)
        ]
        # One that network_interfaces knows by its hardware address has a name that only the host knows.
        if named and holders and not {named, None} & set(holders):
            yield Problem(
                inventory.where(host, "cluster_interface"),
                "cluster_interface",
                f"{named}, where {holders[0]} {'gets' if given else 'has'} {address}",
                "the interface that holds the host's cluster address",
                f"Set cluster_address to one of {named}'s, over which the training is to go; or name {holders[0]}",
            )


def check_clones(inventory: Inventory) -> Iterable[Problem]:
    """Every host has an SSH host key of its own: equal keys are one machine named twice, or clones of one disk."""
    owners: dict[str, str] = {}
    for host in inventory.members():
        key = _facts(inventory.hosts[host]).get("ssh_host_key_ed25519_public")
        if key and (other := owners.setdefault(key, host)) != host:
            yield Problem(
                inventory.where(host, "ansible_host"),
                "SSH host key",
                f"the one that {other} has, too",
                "a key of its own for every machine",
                "If both names lead to one machine, remove one. If one was cloned from the other, give it new keys: "
                "rm /etc/ssh/ssh_host_*, dpkg-reconfigure openssh-server, and then ssh-keygen -R for it here",
            )


def _facts(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    return variables.get("ansible_facts") or {}


def _entries(variables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of network_interfaces."""
    return [item for item in list_of(variables.get("network_interfaces")) if isinstance(item, Mapping)]


def _addresses_given(item: Mapping[str, Any]) -> list[str]:
    """The addresses that an entry of network_interfaces gives, without their prefixes."""
    return [str(text).partition("/")[0] for text in list_of(item.get("addresses"))]


def _addresses_of(facts: Mapping[str, Any], name: str) -> list[str]:
    """The IPv4 addresses of an interface, by the host's facts."""
    link = _about(facts, name)
    return [
        str(one.get("address")) for one in (link.get("ipv4") or {}, *(link.get("ipv4_secondaries") or ()))
    ]


def _about(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What the host's facts say of an interface."""
    return facts.get(str(name).replace("-", "_").replace(".", "_")) or {}
