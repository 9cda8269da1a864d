"""Where the cluster's hosts are: their network, their addresses in it, and the place where Ansible gets in.

Given an `Inventory`; each check answers with what is wrong. No host is asked: what facts tell is in inventory_facts.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from inventory_base import Inventory, Problem, Undefined, hosts_by_value, several_values
from inventory_values import value_fault
from network_entries import gateway_of, refusals


def check_network(inventory: Inventory) -> Iterable[Problem]:
    """One cluster_network for all, a real IPv4 network with room for the hosts."""
    if inventory.local():
        return
    said = {host: inventory.hosts[host].get("cluster_network") for host in inventory.members()}
    found = hosts_by_value({host: str(value) for host, value in said.items()})
    if len(found) > 1:
        yield Problem(
            inventory.source,
            "cluster_network",
            several_values(found),
            "one for the whole cluster",
            "Set it once, under all: vars:",
        )
    for host, *_ in found.values():
        value = said[host]
        if fault := network_fault(value):
            yield Problem(
                inventory.where(host, "cluster_network") if value is not None else inventory.source,
                "cluster_network",
                "nothing" if value is None else f"{value} ({fault})",
                "the hosts' IPv4 network in CIDR form, such as 192.168.1.0/24",
                network_cure(value),
            )


def network_fault(value: Any) -> str:
    """What is wrong with a cluster_network; empty if nothing is."""
    if value is None:
        return "not set"
    if not isinstance(value, str) or "/" not in value:
        return str(value) if isinstance(value, Undefined) else "no prefix length such as /24"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        return str(error)
    if network.is_loopback or network.is_multicast or network.network_address.is_unspecified:
        return "no network between machines"
    if network.prefixlen == 32:
        return "a single address"
    return ""


def network_cure(value: Any) -> str:
    with contextlib.suppress(ValueError):
        near = str(ipaddress.IPv4Network(value, strict=False))
        if not network_fault(near):
            return f"Write cluster_network: {near}"
    return "Set it under all: vars:"


def check_addresses(inventory: Inventory) -> Iterable[Problem]:
    """Each host has an address of its own in the cluster's network, and is reached at a place of its own."""
    if inventory.local():
        return
    owners: dict[str, str] = {}
    reached: dict[tuple, str] = {}
    for host in inventory.members():
        yield from _address(inventory, host, owners)
        yield from _way_in(inventory, host, reached)


def address_key(variables: Mapping[str, Any]) -> str:
    """The variable that has a host's address in the cluster's network."""
    return "cluster_address" if variables.get("cluster_address") is not None else "ansible_host"


def _address(inventory: Inventory, host: str, owners: dict[str, str]) -> Iterable[Problem]:
    """What is wrong with a host's address. owners: address to the host that has it; this host's is added."""
    variables = inventory.hosts[host]
    key = address_key(variables)
    value = variables.get(key)
    network = network_of(variables.get("cluster_network"))
    if value is None and variables.get("ansible_ssh_host"):
        return  # check_connections tells its name of today
    if fault := address_fault(value, network):
        expected = f"an IPv4 address of a host in {network}" if network else "an IPv4 address"
        cure = "Correct it, or cluster_network" if network else "Write it in the form 192.168.1.101"
        if value is None:
            cure = "Write its address; or, where the host is reached by its name, set cluster_address"
        elif key == "ansible_host":
            cure = "Correct it; or, if the controller does reach the host by it, set cluster_address"
        yield Problem(inventory.where(host, key), key, fault, expected, cure)
    elif (other := owners.setdefault(str(value), host)) != host:
        yield Problem(
            inventory.where(host, key),
            key,
            f"{value}, which {other} has, too",
            "an address of its own for every host",
            "Correct one of the two",
        )


def network_of(value: Any) -> ipaddress.IPv4Network | None:
    return None if network_fault(value) else ipaddress.IPv4Network(value)


def address_fault(value: Any, network: ipaddress.IPv4Network | None) -> str:
    """What was found where a host's address in `network` should be; empty if it is one."""
    if value is None:
        return "nothing"
    if not is_ipv4(value):
        return f"{value!s:.80}, which is not an IPv4 address"
    address = ipaddress.IPv4Address(value)
    if network is None:
        return ""
    if address not in network:
        return f"{value}, which is outside of cluster_network {network}"
    if network.prefixlen < 31 and address == network.network_address:
        return f"{value}, which is the address of the network itself"
    if network.prefixlen < 31 and address == network.broadcast_address:
        return f"{value}, which is the network's broadcast address"
    return ""


def is_ipv4(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


def _way_in(inventory: Inventory, host: str, reached: dict[tuple, str]) -> Iterable[Problem]:
    """Another host at a host's place. reached: place to the host that Ansible finds there; this host's is added."""
    variables = inventory.hosts[host]
    name, port, arguments = (
        str(variables.get(key, default))
        for key, default in (
            ("ansible_host", host),
            ("ansible_port", 22),
            ("ansible_ssh_common_args", ""),
        )
    )
    here = str(variables.get("ansible_connection")).rpartition(".")[2] == "local"
    other = reached.setdefault(("here",) if here else (name, port, arguments), host)
    if other != host and here:
        yield Problem(
            inventory.where(host, "ansible_connection"),
            "ansible_connection",
            f"local, which {other} has, too",
            "one host at most that is this controller itself",
            "Remove it where the host is another machine",
        )
    elif other != host and address_key(variables) != "ansible_host":  # else _address tells it
        yield Problem(
            inventory.where(host, "ansible_host"),
            "ansible_host",
            f"{name} port {port}, where {other} is reached, too",
            "every host at a place of its own",
            "Correct one of the two, or tell them apart by ansible_port",
        )


def check_connections(inventory: Inventory) -> Iterable[Problem]:
    """Of what says how Ansible gets in, nothing overrules the roles, and nothing has a name that is not read here."""
    for host in inventory.members():
        values = inventory.hosts[host]
        for key, (fault, expected, cure) in CONNECTIONS.items():
            if key in values and fault(values[key]):
                yield Problem(inventory.place(host, key), key, f"{values[key]!s:.80}", expected, cure)


def no_port(value: Any) -> bool:
    return not re.fullmatch(r"\d{1,5}(\.0)?", str(value)) or not 0 < float(value) < 65536


# Variable to what is wrong with a value, what is expected, and the cure. ansible_become and ansible_become_user would
# overrule the roles, task by task.
CONNECTIONS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "ansible_become": (
        lambda value: value is not None,
        "nothing: Trainyard becomes root itself where it must, and only there",
        "Remove it; ansible_become_password, or -K, is enough",
    ),
    "ansible_become_user": (
        lambda value: value not in (None, "root"),
        "nothing, or root, who tasks become: who logs in is ansible_user",
        "Remove it",
    ),
    "ansible_port": (
        lambda value: value is not None and no_port(value),
        "a port, 1 to 65535",
        "Correct it, or leave it out: SSH's own is 22",
    ),
    "ansible_ssh_host": (lambda _: True, "its name of today, ansible_host", "Rename it, or remove it"),
    "ansible_ssh_port": (lambda _: True, "its name of today, ansible_port", "Rename it, or remove it"),
}


def check_network_interfaces(inventory: Inventory) -> Iterable[Problem]:
    """What the role network would refuse whatever the host is like; what its interfaces decide, it tells itself."""
    key = "network_interfaces"
    if inventory.local():
        return
    for host in inventory.members():
        value = inventory.hosts[host].get(key)
        # What has not even its types, check_types has told.
        if not value or isinstance(value, Undefined) or value_fault(key, value, inventory.specs[key], False):
            continue
        for refusal in refusals(value):
            yield Problem(inventory.where(host, key), key, refusal, "", "")


def check_given_addresses(inventory: Inventory) -> Iterable[Problem]:
    """No address that the role network is to give is another host's, and peers are within what it makes reachable."""
    key = "network_interfaces"
    if inventory.local():
        return
    peers = {host: _ip(inventory.hosts[host].get("cluster_address")) for host in inventory.members()}
    owners = _owners(inventory, peers)
    for host in inventory.members():
        made = list(_given(inventory.hosts[host].get(key)))
        leads_on = any(_leads_on(item) for item, _ in made)
        for _, given in made:
            other = owners.setdefault(given.ip, host)
            if other != host:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{given}, an address that {other} has, too",
                    "an address of its own for every host",
                    "Correct one of the two",
                )
            same = [one for one in peers.values() if one and one.version == given.version]
            beyond = [one for one in same if not any(one in other.network for _, other in made)]
            if given.ip == peers[host] and beyond and not leads_on:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{given}, and {beyond[0]}, {owners[beyond[0]]}'s address, is not in that network",
                    "a prefix length with which the host reaches its peers",
                    "Correct it, or give a gateway or routes",
                )


def _owners(inventory: Inventory, peers: Mapping[str, Any]) -> dict[Any, str]:
    """Address to the host that has it already. peers: host to its cluster_address."""
    # Another port than SSH's may be a gateway's, which forwards to a host that has a cluster_address.
    reached = {
        host: _ip(inventory.hosts[host].get("ansible_host"))
        for host in inventory.members()
        if str(inventory.hosts[host].get("ansible_port", 22)) == "22" or not peers[host]
    }
    shared = [one for one, count in collections.Counter(reached.values()).items() if count > 1]  # a gateway's
    return {one: host for host, one in reached.items() if one not in shared} | {
        one: host for host, one in peers.items()
    }


def _ip(value: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(str(value))
    except ValueError:
        return None


def _given(value: Any) -> Iterable[tuple[Mapping, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """(entry, address) of network_interfaces, of those that others on the wire see."""
    for item in list_of(value):
        if not isinstance(item, Mapping):
            continue
        within = item.get("kind") == "bridges" and not options_of(item).get("interfaces")
        for text in [] if within else list_of(item.get("addresses")):
            with contextlib.suppress(ValueError):
                found = ipaddress.ip_interface(str(text))
                if not (found.is_link_local or found.is_loopback):
                    yield item, found


def options_of(item: Mapping) -> Mapping:
    """The further keys of an entry of network_interfaces; none where they are no mapping, which is told elsewhere."""
    options = item.get("options")
    return options if isinstance(options, Mapping) else {}


def list_of(value: Any) -> list:
    """It, where it is a list: of a host that -l leaves out a template over its facts has no value."""
    return list(value) if isinstance(value, list | tuple) else []


def _leads_on(item: Mapping) -> bool:
    """Whether an entry of network_interfaces makes more reachable than the networks of its addresses."""
    more = options_of(item)
    keys = ("routes", "gateway4", "gateway6", "dhcp4", "dhcp6")
    return bool(gateway_of(item) or item.get("routes") or any(more.get(key) for key in keys))
