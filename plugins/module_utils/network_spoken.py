"""What the files on a host say now of its interfaces, whichever manager reads them.

Given a survey of the host (module network_survey), it answers with one Spoken a definition.
"""

import os
from typing import NamedTuple

from network_entries import below
from network_files import keyed, settings
from network_ifupdown import TAKEN_IN, card_of, ifupdown_options, taken_in
from network_netplan import matches
from network_networkd import netplans_unit, networkd_matches, whole
from network_networkmanager import is_read, profile_for
from network_settings import of_netplan, of_networkd, of_profile, of_stanza
from network_yaml import network_of, read_by_netplan


class Spoken(NamedTuple):
    """A definition in a host's files."""

    path: str
    unit: str | None  # the name of the .network file that systemd-networkd has of it
    names: list  # of the present interfaces, those that it is for
    servers: list  # the name servers that it tells
    settings: list  # what it says beside addresses, as network_settings has it


def speaking(survey):
    """[Spoken] of all definitions in a host's files."""
    files, links, active = survey["files"], survey["interfaces"], survey["active"]
    present = {"lo", *(link["name"] for link in links)}
    found = in_netplan(files["netplan"], links)
    if active["systemd-networkd"]:
        found += in_networkd(files["networkd"], links)
    if active["NetworkManager"]:
        found += in_profiles(files["networkmanager"], links, survey["hidden_profiles"])
    found += in_ifupdown(files["ifupdown"], present)
    return [one._replace(names=[name for name in one.names if name in present]) for one in found]


def in_charge(found):
    """`found`, as `speaking` has it, of which systemd-networkd goes by the first file for an interface."""
    first = {}
    for one in found:
        for name in one.names if one.unit else ():
            first[name] = min(one.unit, first.get(name, one.unit))
    return [
        one._replace(names=[name for name in one.names if one.unit in (None, first.get(name))])
        for one in found
    ]


def in_netplan(files, links):
    found = []
    for path, file in read_by_netplan(files).items():
        for kind, definitions in network_of(file["text"]).items():
            for identifier, one in definitions.items():
                servers = one.get("nameservers")
                servers = servers.get("addresses") if isinstance(servers, dict) else []
                servers = [str(server) for server in servers] if isinstance(servers, list) else []
                # One that is empty keeps a name for what refers to it, and sets up nothing.
                meant = matches(kind, identifier, one, links) if one else []
                found.append(Spoken(path, netplans_unit(identifier), meant, servers, of_netplan(one)))
                found.append(Spoken(path, None, below(kind, one) if kind != "vlans" else [], [], []))
    return found


def in_networkd(files, links):
    found = []
    for path, file in files.items():
        said = settings(whole(file))
        servers = " ".join(value for section, key, value in said if (section, key) == ("Network", "DNS"))
        drop_ins = [(key, f"{place} in {path}.d", value) for key, place, value in of_networkd(file["more"])]
        beside = [*of_networkd(file["text"]), *drop_ins]
        meant = networkd_matches(said, links)
        found.append(Spoken(path, os.path.basename(path), meant, servers.split(), beside))
    return found


def in_profiles(files, links, hidden):
    found = []
    for path, file in files.items():
        said = keyed(file["text"])
        if is_read(path, said, hidden):
            servers = " ".join(said.get((kind, "dns"), "") for kind in ("ipv4", "ipv6"))
            servers = servers.replace(";", " ").split()
            found.append(Spoken(path, None, profile_for(said, links), servers, of_profile(said)))
    return found


def in_ifupdown(files, present):
    found = []
    for path, file in files.items():
        for device, option, words, _ in ifupdown_options(file["text"]):
            servers = words if option in ("dns-nameservers", "dns-nameserver") else []
            names = taken_in(words, present) if option in TAKEN_IN else [card_of(device)]
            found.append(Spoken(path, None, names, servers, of_stanza(option, words)))
    return found
