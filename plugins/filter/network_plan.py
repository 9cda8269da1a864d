"""From what a host's network is (module network_survey) and what it shall be to the change that leads there.

Pure functions: nothing here reads a file or talks to a host.
"""

import fnmatch
import ipaddress
import itertools
import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from network_entries import DEFAULT_ROUTES, KINDS, Refused, below, check_together, entry, gateway_of, plain
from network_files import (
    AFTER_NETPLAN,
    ASIDE,
    CLOUD_INIT_OFF,
    GUARD,
    HEADER,
    IFUPDOWN_MARK,
    IFUPDOWN_RECORD,
    MADE,
    OUR_FILE,
    PROFILES,
    READ_BY,
    RESOLV_CONF,
    WORDS,
    bare,
    beneath,
    form_fault,
    is_a_packages,
    keyed,
    made_by,
    netplan_after,
    network_of,
    profile_for,
    read_at,
    read_by_netplan,
    read_netplan,
    settings,
    yaml_fault,
)
from network_settings import (
    NETWORKD_DEVICES,
    NO_TREE,
    OF_CARDS,
    SEARCH,
    cure,
    of_netplan,
    of_networkd,
    of_profile,
    of_stanza,
)

STANZA = re.compile(
    r"\s*(auto|allow-\S+|iface|mapping|rename|source|source-directory|no-auto-down|no-scripts)\b"
)
# ifupdown's words for what a device takes in. What a VLAN lies on (vlan-raw-device) keeps its addresses, and is not.
TAKEN_IN = {"bridge-ports": "bridges", "bond-slaves": "bonds", "slaves": "bonds"}
# By which ifupdown runs a command.
HOOKS = ("pre-up", "up", "post-up", "pre-down", "down", "post-down")
# What images bring: Vagrant's boxes wait for dhclient (chef/bento, debian/scripts/networking.sh), and cloud-init sets
# default routes (cloudinit/net/eni.py, _render_route), to which check_default_route sees.
HARMLESS = re.compile(r"sleep [\d.]+|route (add|del) (-A inet6 )?default gw [\da-fA-F.:]+( \|\| true)?")
# What a .network file can ask of a wireless card alone.
OF_WIRELESS = {"SSID", "BSSID", "WLANInterfaceType"}
# NetworkManager's words for what a port belongs to.
PORT_TYPES = {"bond": "bonds", "bridge": "bridges"}
# And for what it makes.
DEVICE_TYPES = {
    **PORT_TYPES,
    "vlan": "vlans",
    **dict.fromkeys(("dummy", "ip-tunnel", "macvlan", "team", "tun", "veth", "vrf", "vxlan", "wireguard")),
}
UUID = ("connection", "uuid")


def network_plan(survey, wanted, renderer="auto"):
    """The change that makes `wanted` (network_interfaces of one host) true.

    Returns {errors: [str]} alone, or also {files, netplan, stands, live, apply, verify, undo, addresses, summary}:
    arguments of guarded_change, `netplan` {name: text} for the check in a directory of its own, and `stands`: netplan's
    files are as they shall be, and checked when they were written.
    """
    survey, wanted = plain(survey), plain(wanted)
    try:
        entries = [entry(number, item, survey["interfaces"]) for number, item in enumerate(wanted)]
        before = network_of(survey["files"]["netplan"].get(OUR_FILE, {}).get("text", ""))
        check_together(entries, survey["interfaces"])
        check_mtu(entries, survey["interfaces"])
        check_ipv6(entries, survey["interfaces"], before)
        check_further(entries, survey["interfaces"], before, survey["session"])
        renderer = choose_renderer(renderer, survey["active"])
        check_bridges(entries, survey["interfaces"], renderer)
        return {"errors": [], **plan(survey, entries, wanted, renderer, before)}
    except Refused as refusal:
        return {"errors": [str(refusal)]}


def check_mtu(entries, present):
    """A size that a card does not take is refused: networkd would set another, and each run would set it again.

    What a bond takes in, or a VLAN lies on, has to take its size, too; the device itself takes any.
    """
    links = {link["name"]: link["mtu_range"] for link in present}
    now = {item["name"]: item["now"] for item in entries}
    for item in entries:
        mtu = str(item["definition"].get("mtu"))
        others = below(item["kind"], item["definition"]) if item["kind"] in ("bonds", "vlans") else []
        for name in [item["now"], *(now.get(name, name) for name in others)] if mtu.isdecimal() else ():
            least, most = links.get(name, (0, 0))
            small = int(mtu) < least and (name == item["now"] or item["kind"] == "bonds")
            if small or 0 < most < int(mtu):
                raise Refused(
                    f"{item['where']}.mtu is {mtu}: {name} takes {least} to {most or 65535} bytes (`ip -details link "
                    f"show {name}`): write a number of these"
                )


def check_ipv6(entries, present, before):
    """An interface's fixed IPv6 addresses do not go unsaid; what a router or a lease gives it comes again.

    `before`: our last file, whose addresses may be taken back.
    """
    if any(":" in str(address) for item in entries for address in item["definition"].get("addresses", [])):
        return
    ours = addresses_in(before)
    for item in entries:
        link = next((link for link in present if link["name"] == item["now"]), None)
        for address in link["addresses"] if link else []:
            if ":" in address and address not in link["dynamic"] and address not in ours:
                raise Refused(
                    f"{item['where']}: {item['now']} has the fixed address {address}, and network_interfaces has no "
                    "IPv6 address, so it would be lost: write it under addresses, or give it up first by "
                    f"`ip address del {address} dev {item['now']}`"
                )


def check_further(entries, present, before, session):
    """Of several fixed IPv4 addresses none goes unsaid as we take an interface over; one for one they are replaced.

    What comes besides later is another program's, as is mostly a /32, which moves from host to host. session: by which
    the controller is there, or None; its own address is replaced first.
    """
    own_address = session["address"] if session else ""
    ours = addresses_in(before)
    since_long = {
        name
        for found in before.values()
        for name, definition in found.items()
        if definition.get("addresses") or definition.get("dhcp4")
    }
    held = {link["name"]: link for link in present if link["name"] not in since_long}
    wanted = {address.ip for item in entries for address in item["addresses"]}
    standing = {ipaddress.ip_interface(text).ip for link in present for text in link["addresses"]}
    # What goes, by the entry that is to have it.
    fixed: dict[str, list] = {item["now"]: [] for item in entries}
    leases = dict.fromkeys(fixed, 0)
    for item in entries:
        link, at = held.get(item["now"], {"addresses": []}), receiver(entries, item["now"])
        for text in link["addresses"]:
            stays = text in ours or ipaddress.ip_interface(text).ip in wanted
            if stays or ":" in text or text.endswith("/32"):
                continue
            if text in link["dynamic"]:
                leases[at] += 1
            else:
                fixed[at].append((item["now"], text))
    for item in entries:
        own = {one.ip for one in item["addresses"] if one.version == 4}
        leased = bool(item["definition"].get("dhcp4"))
        going = sorted(fixed[item["now"]], key=lambda one: one[1].partition("/")[0] != own_address)
        lost = going[max(0, len(own - standing) + leased - leases[item["now"]]) :]
        if lost and (own or leased):  # without, none are meant
            name, text = lost[0]
            is_own = text.partition("/")[0] == own_address
            first = "log in by another first (ansible_host) and then " * is_own
            raise Refused(
                f"{item['where']}: {name} has the fixed address {text}, too, which would be lost: write it under "
                f"addresses, or {first}give it up by `ip address del {text} dev {name}`, and by whatever sets it "
                "(keepalived, say)"
            )


def receiver(entries, name):
    """The entry's device that an interface's addresses go to: the bond or bridge that has it in, and so on."""
    for _ in entries:
        name = next((one["now"] for one in entries if takes_in(one, name)), name)
    return name


def addresses_in(before):
    """All addresses that our last file has, as they are written."""
    return {
        str(address)
        for definitions in before.values()
        for definition in definitions.values()
        for address in definition.get("addresses") or []
    }


def check_default_route(routes, entries, said, gone):
    """A host does not lose its way out unsaid; what routers advertise comes again.

    said: the entries as the inventory has them; `gateway: none` says that none is meant. gone: devices that the change
    does without.
    """
    if any("gateway" in item and gateway_of(item) is None for item in said):
        return
    ours = {item["now"]: item["where"] for item in entries}
    definitions = [item["definition"] for item in entries]
    addresses = [str(address) for one in definitions for address in one.get("addresses") or []]
    defaults = [one for one in routes if one["to"] == "default"]
    for version in {6 if ":" in address else 4 for address in addresses} or {4}:
        held = [one for one in defaults if one["version"] == version and not one["told"]]
        going = ours.keys() | gone  # a route that has several ways goes as a whole
        lost = [one for one in held if going & {one["interface"], *one["beside"]}]
        by_others = [one.get("dhcp4") if version == 4 else "accept-ra" in one for one in definitions]
        if not lost or len(lost) < len(held) or any(by_others):
            continue
        if any(version in default_versions(one) for one in definitions):
            continue
        first = min(lost, key=lambda one: one["interface"] not in going)
        via, interface = first["via"] or "ADDRESS", first["interface"]
        write = f"gateway: {via}, or gateway: none where none is meant"
        if version == 6:  # beside which there may be a gateway for IPv4
            write = (
                f"routes: [{{to: '::/0', via: '{via}'}}], or accept-ra under options: true where a router advertises "
                "it, false where none is meant"
            )
        raise Refused(
            f"{ours.get(interface, 'network_interfaces')}: the default route of this host, "
            f"{f'via {via} ' * bool(first['via'])}on {interface}, "
            f"would be lost, since no entry of network_interfaces gives it one: write {write}"
        )


def check_nameservers(survey, spoken, entries, said, gone):
    """A host does not lose its name servers unsaid: a lease's go with it, a file's when that gives way.

    spoken: as `speaking` has it. said: the entries as the inventory has them; an empty list of servers says that none
    is meant. gone: as above.
    """
    if any("nameservers" in item or "nameservers" in (item.get("options") or {}) for item in said):
        return
    ours = {item["now"]: item["where"] for item in entries}
    fixed = [item for item in entries if not item["definition"].get("dhcp4")]
    taken = {name for item in entries for name in item["definition"].get("interfaces") or []}
    leased = {link["name"] for link in survey["interfaces"] if any(":" not in one for one in link["dynamic"])}
    told = [one for one in in_charge(spoken) if one.names and one.servers]
    lost = [one for one in told if one.path == OUR_FILE or set(one.names) <= ours.keys() | gone]
    if len(lost) < len(told) or leased - {item["now"] for item in fixed} - taken - gone:
        return  # others tell them still
    if survey["active"]["systemd-resolved"] and resolved_servers(survey["files"]["resolved"]):
        return  # whatever an interface's are
    outward = next((item for item in fixed if default_versions(item["definition"])), None)
    if outward and leased:
        raise Refused(
            f"{outward['where']}: {', '.join(sorted(leased))} has its address by a lease (DHCP), which tells "
            "this host its name servers, too, and network_interfaces names none: write nameservers: [ADDRESS], "
            "mostly the gateway's (see `resolvectl dns` or /etc/resolv.conf), or nameservers: [] where "
            "it needs none"
        )
    if lost and len(fixed) == len(entries) and not resolved_by_hand(survey):
        path, _, names, servers, _ = lost[0]
        listed = ", ".join(server.partition("#")[0] for server in servers)
        raise Refused(
            f"{ours.get(names[0], 'network_interfaces')}: {path} tells this host its name servers ({listed}), which "
            "would be lost, since network_interfaces names none: "
            f"write nameservers: [{listed}], or nameservers: [] where it needs none"
        )


def check_left_out(survey, spoken, entries, before):
    """A card that our last file sets up does not lose that with its entry, unless a file of another's has it.

    What set it up before lies aside. Devices that we made, and nobody names any more, are removed. spoken: as
    `speaking` has it.
    """
    ours = {name for item in entries for name in (item["now"], item["name"])}
    spoken_for = {name for one in spoken if one.path != OUR_FILE for name in one.names}
    for link in survey["interfaces"]:
        name = link["name"]
        definitions = [found[name] for kind, found in before.items() if kind not in MADE and name in found]
        # Nothing is lost with what only took it over, as for a port of a bond.
        if name in ours | spoken_for or not any(set(one) - {"renderer", "match"} for one in definitions):
            continue
        marks = re.compile(rf"\b({re.escape(name)}|{re.escape(link['mac'] or name)})\b", re.IGNORECASE)
        kept = [
            f"{path}, as {read_at(path)}"
            for path, file in survey["files"].get("kept", {}).items()
            if os.path.dirname(path) in READ_BY and marks.search(file["text"])
        ]
        kept += [
            f"the lines of {path} that begin with '{IFUPDOWN_MARK.strip()}', without that"
            for path, file in survey["files"]["ifupdown"].items()
            if f"{IFUPDOWN_MARK}iface {name} " in file["text"]
        ]
        back = f", or put back first what set it up before: {' and '.join(kept)}" if kept else ""
        raise Refused(
            f"network_interfaces no longer names {name}, which {OUR_FILE} sets up, and nothing else would: keep its "
            f"entry ({{name: {name}}} alone gives it no addresses){back}"
        )


def check_settings(spoken, entries, said, claims, links, renderer):
    """What a file that gives way says of a card beside its addresses does not go unsaid: 802.1X, MTU, routes and such.

    spoken, said: as above. claims: the changes by which files give way.
    """
    ours = {item["now"]: number for number, item in enumerate(entries)}
    going = {change["path"] for change in claims}
    for one in in_charge(spoken):
        hit = [name for name in one.names if name in ours]
        stays = "/systemd/network/" in one.path and one.path not in going  # hidden by netplan's since long
        if not hit or one.path == OUR_FILE or stays:
            continue
        of_networkd_alone = [place for key, place, _ in one.settings if key is None]
        if of_networkd_alone:
            base = os.path.basename(one.path).removesuffix(".network")
            out = f", or have its [Match] fit {hit[0]} no more" * bool(others(one.names, ours, links))
            beside = f"/etc/systemd/network/10-netplan-{entries[ours[hit[0]]]['name']}.network.d/{base}.conf"
            raise Refused(
                f"{one.path}: {', '.join(dict.fromkeys(of_networkd_alone))} for {hit[0]} would be lost, since "
                f"network_interfaces has {hit[0]}, and netplan no word for it: move it, below the names of its "
                f"sections, into {beside}, which is read besides{out}"
            )
        for name, (key, place, value) in itertools.product(hit, one.settings):
            if value == NO_TREE and entries[ours[name]]["definition"].get("renderer", renderer) == "networkd":
                continue  # it has none unless an entry's parameters say so
            if not any(says(*pair, key, name) for pair in zip(entries, said, strict=True)):
                own = entries[ours[name]]
                if own["kind"] in MADE and key in OF_CARDS:  # netplan knows these of a card alone
                    key = ""
                write = f"write {cure(key, value)}" if key else f"leave {name} out of network_interfaces"
                of = next((item for item in entries if key == "parameters" and takes_in(item, name)), own)
                whose = "its entry" if of is own else f"the entry of {of['name']}"
                out = (
                    "" if one.path.startswith(("/usr/", "/lib/")) else ", or take it out there"
                )  # a package's
                raise Refused(
                    f"{of['where']}: {one.path} has {place} for {name}, which would be lost, since {whose} has none: "
                    f"{write}{out}"
                )


def says(item, said, key, name):
    """Whether an entry says a setting of the interface `name`; said: the entry as the inventory has it."""
    if key == SEARCH:
        named = said.get("nameservers", (said.get("options") or {}).get("nameservers"))
        return named == [] or (isinstance(named, dict) and "search" in named)
    own = item["now"] == name
    if own and key == "auth" and item["kind"] == "wifis":
        return True  # with its access-points
    # A bond's size is its ports', whose stanzas may say what it is to be (ifenslave).
    of_device = takes_in(item, name) and (key == "parameters" or (key == "mtu" and item["kind"] == "bonds"))
    if not (own or of_device or key in ("routes", "routing-policy")):
        return False
    match = key == "macaddress" and item["kind"] not in MADE  # by which the card is known
    return key in (said.get("options") or {}) or (key in said and not match)


def takes_in(item, name):
    """Whether an entry makes a bond or a bridge that has the interface `name` for a port."""
    return item["kind"] != "vlans" and name in below(item["kind"], item["definition"])


def resolved_by_hand(survey):
    """Whether /etc/resolv.conf names servers and is its owner's: no manager writes it, nor a lease's client."""
    text = survey["resolv_conf"] or ""
    servers = re.search(r"(?m)^\s*nameserver\s+\S", text)
    return bool(servers and not survey["resolv_link"] and not re.search("(?i)generated by", text))


def resolved_servers(files):
    """The servers that systemd-resolved's own files name (resolved.conf(5)); of two of one name, the last counts."""
    named = {os.path.basename(path): file["text"] for path, file in files.items()}
    servers = []
    for base in sorted(named, key=lambda base: (base != "resolved.conf", base)):
        for section, key, value in settings(named[base]):
            if (section, key) == ("Resolve", "DNS"):
                servers = [*servers, *value.split()] if value else []
    return servers


def default_versions(definition):
    """The IP versions of the default routes that a netplan definition gives by itself."""
    routes = [
        one for one in definition.get("routes", []) if one["to"] in DEFAULT_ROUTES and "table" not in one
    ]
    found = {6 if ":" in f"{one['to']} {one.get('via')}" else 4 for one in routes}
    return found | {version for version in (4, 6) if f"gateway{version}" in definition}


def choose_renderer(renderer, active):
    """The manager that the machine uses stays."""
    if renderer != "auto":
        return renderer
    return "NetworkManager" if active["NetworkManager"] and not active["systemd-networkd"] else "networkd"


def check_bridges(entries, present, renderer):
    """A new bridge carries something before the guard gives up waiting.

    With the spanning tree, that is after twice forward-delay (15 s). Unless the parameters say stp, NetworkManager has
    it on, and networkd once there are parameters.
    """
    for item in entries:
        parameters = item["definition"].get("parameters") or {}
        tree = parameters.get("stp", renderer == "NetworkManager" or bool(parameters))
        there = item["name"] in [link["name"] for link in present]
        if (
            item["kind"] == "bridges"
            and not there
            and tree
            and str(parameters.get("forward-delay", 15)) not in ("2", "3", "4")
        ):
            raise Refused(
                f"{item['where']}.options: a new bridge with the spanning tree carries nothing for 30 s, so the change "
                "would be undone: write parameters: {stp: false}, or keep the tree with {stp: true, forward-delay: 4}"
            )


# What is there now and speaks for the same interfaces.


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
    present, found = {"lo", *(link["name"] for link in links)}, []
    for path, file in read_by_netplan(files["netplan"]).items():
        for kind, definitions in network_of(file["text"]).items():
            for identifier, one in definitions.items():
                servers = one.get("nameservers")
                servers = servers.get("addresses") if isinstance(servers, dict) else []
                servers = [str(server) for server in servers] if isinstance(servers, list) else []
                meant = matches(kind, identifier, one, links)
                # One that is empty keeps a name for what refers to it, and sets up nothing.
                unit = f"10-netplan-{identifier}.network"
                found.append(Spoken(path, unit, meant if one else [], servers, of_netplan(one)))
                found.append(Spoken(path, None, below(kind, one) if kind != "vlans" else [], [], []))
    for path, file in files["networkd"].items() if active["systemd-networkd"] else ():
        said = settings(whole(file))
        servers = " ".join(value for section, key, value in said if (section, key) == ("Network", "DNS"))
        meant = networkd_matches(said, links)
        drop_ins = [(key, f"{place} in {path}.d", value) for key, place, value in of_networkd(file["more"])]
        settings_ = [*of_networkd(file["text"]), *drop_ins]
        found.append(Spoken(path, os.path.basename(path), meant, servers.split(), settings_))
    for path, file in files["networkmanager"].items() if active["NetworkManager"] else ():
        said = keyed(file["text"])
        if is_read(path, said, survey["hidden_profiles"]):
            servers = " ".join(said.get((kind, "dns"), "") for kind in ("ipv4", "ipv6"))
            servers = servers.replace(";", " ").split()
            found.append(Spoken(path, None, profile_for(said, links), servers, of_profile(said)))
    for path, file in files["ifupdown"].items():
        for device, option, words, _ in ifupdown_options(file["text"]):
            servers = words if option in ("dns-nameservers", "dns-nameserver") else []
            names = taken_in(words, present) if option in TAKEN_IN else [card_of(device)]
            found.append(Spoken(path, None, names, servers, of_stanza(option, words)))
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


def aside(path, taken):
    """A name beside `path` under which no manager reads it."""
    name, number = f"{path}{ASIDE}", 1
    while name in taken:
        number += 1
        name = f"{path}{ASIDE}.{number}"
    return name


def others(meant, ours, links):
    """What of the names `meant` is a card and not in `ours`.

    Devices that software makes do not count: their makers set them up. The end of a wire is a container's card, unless
    a bridge has it: then its other end is.
    """
    cards = [link for link in links if link["kind"] in (None, "wlan") or is_wire(link)]
    return [link["name"] for link in cards if link["name"] in meant and link["name"] not in ours]


def own_cards(rest, hit, links):
    """Of the names `rest` those of the host's own cards: no ends of wires, which are its pods' (Calico, Cilium) unless
    it is a container itself, whose cards in `hit` are such, too.
    """
    wires = {link["name"] for link in links if is_wire(link)}
    return rest if wires & {*hit} else [name for name in rest if name not in wires]


def is_wire(link):
    return link["kind"] == "veth" and not link["master"]


def matches(kind, identifier, definition, links):
    """The names of `links` that a netplan definition speaks for; an empty match is for all of its kind."""
    match = definition.get("match") if isinstance(definition, dict) else None
    if match is None:
        return [link["name"] for link in links if identifier in (link["name"], *link["altnames"])]
    found = []
    named = [
        link["name"]
        for link in links
        if any(
            fnmatch.fnmatchcase(name, str(match.get("name", "*")))
            for name in (link["name"], *link["altnames"])
        )
    ]
    # A card that has got its set-name has lost the name by which it was known.
    named = named or [definition.get("set-name")]
    for link in links:
        if (link["kind"] == "wlan") != (kind == "wifis"):
            continue
        by_name = link["name"] in named
        by_mac = "macaddress" not in match or str(match["macaddress"]).lower() == link["mac"]
        drivers = match.get("driver", "*")
        drivers = drivers if isinstance(drivers, list) else [drivers]
        by_driver = any(fnmatch.fnmatchcase(link["driver"] or "", str(driver)) for driver in drivers)
        if by_name and by_mac and by_driver:
            found.append(link["name"])
    return found


def names_given(files, links):
    """{interface: {match, set-name}} of the cards that have their present name from netplan's files, ours included.

    Whoever takes such a definition away takes these two over: at the next boot the card would have the kernel's name,
    and nothing would configure it.
    """
    merged = {}  # as netplan does: by the files' names, what comes later goes over what came before
    for _, text in sorted(netplan_after(files, []).items()):
        for kind, definitions in network_of(text).items():
            for identifier, one in definitions.items():
                before = merged.setdefault((kind, identifier), {})
                if isinstance(before.get("match"), dict) and isinstance(one.get("match"), dict):
                    one["match"] = before["match"] | one["match"]
                before.update(one)
    given = {}
    for (kind, identifier), one in merged.items():
        name, match = one.get("set-name"), one.get("match")
        if kind not in MADE and isinstance(match, dict) and name in matches(kind, identifier, one, links):
            given[name] = {"match": match, "set-name": name}
    return given


def keeping_name(item, given):
    """The definition of an entry, with what gives the card its present name; but the inventory's own word counts."""
    definition = item["definition"]
    by_other_marks = set(definition.get("match", {})) - {
        "macaddress"
    }  # from options; perhaps of several cards
    if item["kind"] in MADE or "set-name" in definition or by_other_marks:
        return definition
    return {**given.get(item["name"], {}), **definition}


def check_taken_in(path, name, kind, ours):
    """Refuse a bond or a bridge that stays and has some of ours in."""
    if ours:
        wish = f"put {name} into network_interfaces too (kind: {kind}), or " if kind else ""
        raise Refused(f"{path}: '{name}' takes in {', '.join(ours)}: {wish}take {', '.join(ours)} out there")


def check_made(path, name, kind, made):
    """Refuse to have a device's maker give way to an entry that makes none: it would be gone at the next boot.

    kind: netplan's for it, or None. made: the devices that network_interfaces makes.
    """
    if name not in made:
        cure = (
            f"write kind: {kind} in its entry, and what it says of {name} under options"
            if kind
            else "leave it out"
        )
        raise Refused(
            f"{path} makes {name}, and would give way to network_interfaces, in which {name} is no device that is "
            f"made, so that the next boot would be without it: {cure}"
        )


def netplan_documents(files):
    """{path: what it holds} of the other files that netplan reads; refused where it could not read one."""
    documents = {}
    for path, file in read_by_netplan(files).items():
        if path == OUR_FILE:
            continue
        try:
            document = read_netplan(file["text"]) or {}
        except yaml.YAMLError as error:
            fault = yaml_fault(error)
            raise Refused(f"{path} is no valid YAML, so netplan cannot work on this host: {fault}") from None
        network = (document.get("network") or {}) if isinstance(document, dict) else None
        if not isinstance(network, dict) or not all(
            isinstance(network.get(kind) or {}, dict) for kind in KINDS
        ):
            raise Refused(
                f"{path}: network, or a kind in it, is no mapping, so netplan cannot work on this host: correct it"
            )
        for kind in KINDS:
            for identifier, definition in definitions_in(network, kind).items():
                if fault := form_fault(definition or {}):
                    place = ".".join(filter(None, ("network", kind, str(identifier), fault[0])))
                    raise Refused(
                        f"{path}: {place} is no {fault[1]}, so netplan cannot work on this host: correct it"
                    )
        documents[path] = document
    return documents


def definitions_in(network, kind):
    """{identifier: definition} of a kind; a renderer may stand beside them, as a word."""
    found = network.get(kind) or {}
    return {key: one for key, one in found.items() if key != "renderer" or not isinstance(one, str)}


def netplan_claims(files, documents, ours, links, taken, made):
    """Changes to other netplan files so that none of them speaks for a name in `ours`; `made`: as `check_made`.

    documents: as `netplan_documents` has them; what gives way is taken out of them.
    """
    changes = []
    going = netplan_hits(documents, ours, links, made)
    referring = referring_to(documents, going)
    for path, document in documents.items():
        file, network = files[path], document.get("network") or {}
        claimed = False
        for kind, identifier, hit in going.get(path, []):
            definition = network[kind][identifier]
            if identifier not in referring:
                del network[kind][identifier]
                claimed = True
                continue
            names = [ours.get(name, name) for name in hit]
            check_name_stays(path, kind, identifier, names, *referring[identifier])
            network[kind][identifier] = bare(kind, definition or {})
            claimed = claimed or definition != network[kind][identifier]
        for kind in KINDS:
            if kind in network and not definitions_in(network, kind):
                del network[kind]
        if not claimed:
            continue
        if path.startswith("/run/"):
            cards = ", ".join(dict.fromkeys(name for _, _, hit in going[path] for name in hit))
            raise Refused(
                f"{path} configures {cards}: netplan reads that before a file of the same name in /etc, and what wrote "
                "it does so again at the next boot, mostly for ip= in the kernel's command line (`cat /proc/cmdline`): "
                f"take that out there, then delete {path}; or leave {cards} out of network_interfaces"
            )
        left = yaml.safe_dump(document, sort_keys=False)
        if not path.startswith(
            "/etc/"
        ):  # a file of the same name in /etc hides the one that we must not touch
            changes.append(
                {"path": f"/etc/netplan/{os.path.basename(path)}", "content": left, "mode": "0600"}
            )
        elif set(network) <= {"version"} and not beneath(path, files):
            changes.append({"path": path, "move_to": aside(path, taken)})
        else:
            if not is_a_packages(path, file["text"], files):
                changes.append({"path": aside(path, taken), "content": file["text"], "mode": "0600"})
            changes.append({"path": path, "content": left, "mode": file["mode"]})
    return changes


def netplan_hits(documents, ours, links, made):
    """{path: [(kind, identifier, names in `ours`)]} of the definitions that speak for those; refused where for others,
    too, or where they take one of ours in.
    """
    every = [
        (path, kind, identifier, definition, matches(kind, identifier, definition, links))
        for path, document in documents.items()
        for kind in KINDS
        for identifier, definition in definitions_in(document.get("network") or {}, kind).items()
    ]
    found = {}
    for path, kind, identifier, definition, meant in every:
        hit = [name for name in meant if name in ours] or [
            name for name in (identifier,) if name in ours or name in ours.values()
        ]
        if hit and meant and not any(name in ours for name in meant):
            raise Refused(
                f"{path}: '{identifier}' is {', '.join(meant)} by its match, and netplan would take it for "
                f"{identifier} of network_interfaces, too: call it {meant[0]} there, and what refers to it, too"
            )
        if not hit:
            # By the interface's name, or by that of a definition which matches it.
            members = below(kind, definition or {}) if kind != "vlans" else []
            meant = {
                *members,
                *(name for _, _, other, _, names in every if other in members for name in names),
            }
            check_taken_in(path, identifier, kind, [name for name in ours if name in meant])
            continue
        rest = others(meant, ours, links)
        if rest:
            theirs = own_cards(rest, hit, links)
            wish = f"put {', '.join(theirs)} into network_interfaces too, or " if theirs else ""
            raise Refused(
                f"{path}: '{identifier}' configures {', '.join(hit)} together with {', '.join(rest)}: "
                f"{wish}narrow the match in that file{'' if theirs else f' to {hit[0]}'}"
            )
        if kind in MADE:
            check_made(path, identifier, kind, made)
        found.setdefault(path, []).append((kind, identifier, hit))
    return found


def referring_to(documents, going):
    """{identifier: (path, kind, name)} of what lies on a definition in the files that netplan reads before ours.

    It takes a name only from the same file or an earlier one, and ours is among the last: a definition that gives way
    has to leave its name there. going: as `netplan_hits` has them; these refer to nothing any more.
    """
    found = {}
    for path, document in documents.items():
        gone = {(kind, identifier) for kind, identifier, _ in going.get(path, [])}
        for kind, definitions in (document.get("network") or {}).items():
            for name, one in definitions.items() if isinstance(definitions, dict) else ():
                if not isinstance(one, dict) or (kind, name) in gone or is_after_ours(path):
                    continue
                inside = one.get("interfaces") if isinstance(one.get("interfaces"), list) else []
                for identifier in [one.get("link"), *inside]:
                    if isinstance(identifier, WORDS):
                        found.setdefault(identifier, (path, kind, name))
    return found


def is_after_ours(path):
    return os.path.basename(path) > os.path.basename(OUR_FILE)


def join_link(item, network, documents, ours, links):
    """Have netplan know what a VLAN of ours lies on: in our file, by its name; in another, by that of the definition.

    network: what our file will have. A definition that comes after it has to have its name here, too.
    """
    link = item["definition"]["link"]
    if link in ours or link in ours.values():
        network[item["kind"]][item["name"]]["link"] = ours.get(link, link)
        return
    found = [
        (identifier != link, is_after_ours(path), identifier, kind, definition)
        for path, document in documents.items()
        for kind, definitions in (document.get("network") or {}).items()
        for identifier, definition in (definitions.items() if isinstance(definitions, dict) else ())
        if identifier == link or (kind in KINDS and link in matches(kind, identifier, definition, links))
    ]
    if not found:
        raise Refused(
            f"{item['where']}.options.link: no netplan file has {link}, so netplan takes no VLAN on it: put {link} "
            "into network_interfaces too, with the addresses that it has"
        )
    _, after, identifier, kind, definition = min(found, key=lambda one: one[:2])
    network[item["kind"]][item["name"]]["link"] = identifier
    if after and kind == "wifis":
        raise Refused(
            f"{item['where']}.options.link: {link} is wireless, and stands in a netplan file that comes after "
            f"{OUR_FILE}, in which netplan does not take its name alone: put {link} into network_interfaces too (kind: "
            f"wifis), or give that file a name that comes before {os.path.basename(OUR_FILE)}"
        )
    if after and kind in KINDS:
        network.setdefault(kind, {}).setdefault(identifier, bare(kind, definition or {}))


def check_name_stays(path, kind, identifier, names, place, other_kind, other):
    """Refuse to leave nothing but a definition's name where our file has the interface by another one, or where netplan
    takes no name alone: of what is wireless.
    """
    wish = f"put {other} into network_interfaces too (kind: {other_kind}), or " if other_kind in KINDS else ""
    if identifier not in names:
        raise Refused(
            f"{place}: '{other}' lies on '{identifier}', which is {', '.join(names)} in network_interfaces, so that it "
            f"would lie on nothing: {wish}have {path} call '{identifier}' {names[0]}, and what refers to it, too"
        )
    if kind == "wifis":
        raise Refused(
            f"{place}: '{other}' lies on '{identifier}', of whose definition in {path} network_interfaces would leave "
            f"nothing but the name, which netplan does not take of what is wireless: {wish}take '{other}' out there"
        )


def networkd_matches(said, links):
    """The names of `links` that a .network file of systemd-networkd speaks for; `said`: its settings.

    What it asks of the host (Host=, KernelVersion=, …) counts as given: no harm comes to a file that is for another.
    """
    asked = {}
    for section, key, value in said:
        if section == "Match":  # an empty word takes back what stood there before
            asked[key] = [*asked.get(key, []), *patterns(value)] if value else []
    asked = {key: found for key, found in asked.items() if found}
    macs = {mac_address(word) for key in ("MACAddress", "PermanentMACAddress") for word in asked.get(key, [])}
    return [
        link["name"]
        for link in links
        if asked
        and any(fits(asked.get("Name"), name) for name in (link["name"], *link["altnames"]))
        and (not macs or link["mac"] in macs)
        and fits(asked.get("Driver"), link["driver"] or "")
        and fits(asked.get("Type"), networkd_type(link))
        and fits(asked.get("Kind"), kernel_kind(link) or "")
        and fits(asked.get("Path"), link["properties"].get("ID_PATH", ""))
        and all(has_property(word, link["properties"]) for word in asked.get("Property", []))
        and (link["kind"] == "wlan" or not asked.keys() & OF_WIRELESS)
    ]


def patterns(value):
    """The words of a setting under [Match]; a ! before the first is before each."""
    but = "!" * value.startswith("!")
    try:
        words = shlex.split(value.removeprefix("!"), comments=False)
    except ValueError:  # a quote that nothing ends
        words = value.removeprefix("!").split()
    return [but + word for word in words]


def whole(file):
    """A .network file's text, with that of its drop-ins."""
    return f"{file['text']}\n{file['more']}"


def fits(wanted, word):
    """Whether a word is one of systemd's patterns, and none of those after a !; any where there are none."""
    unwanted = [pattern[1:] for pattern in wanted or () if pattern.startswith("!")]
    rest = [pattern for pattern in wanted or () if not pattern.startswith("!")] or ["*"]
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in rest) and not any(
        fnmatch.fnmatchcase(word, pattern) for pattern in unwanted
    )


def has_property(wanted, properties):
    """Whether udev says KEY=PATTERN of an interface, or does not, where a ! comes first."""
    key, _, pattern = wanted.removeprefix("!").partition("=")
    return wanted.startswith("!") is not (key in properties and fnmatch.fnmatchcase(properties[key], pattern))


def kernel_kind(link):
    """The kernel's word for what software makes; None for a card."""
    return None if link["kind"] == "wlan" else link["kind"]


def networkd_type(link):
    """systemd-networkd's word for what an interface is (`networkctl`)."""
    known = link["properties"] or link["kind"] is None  # the kernel tells the type of all that have one
    return link["properties"].get("DEVTYPE") or (link["link_type"] if known else link["kind"])


def mac_address(word):
    """A hardware address of systemd's as we have it: 525400123456 by twos, whatever stands between them."""
    digits = re.sub(r"[-:.]", "", word.lower())
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))


def check_networkd_devices(files, ours, links, made):
    """Refuse files that have systemd-networkd join one of `ours` to a device, or make one on it, that is not `made`.

    Also those that netplan's files hide, while the device is there: what networkd made before is so until the next
    boot, and not after it.
    """
    there = {link["name"] for link in links}
    for path, file in files.items():
        meant = networkd_matches(settings(whole(file)), links)
        hit = [name for name in meant if name in ours]
        hidden = all(os.path.basename(path) > f"10-netplan-{ours[name]}.network" for name in hit)
        devices = [
            (place, key, value)
            for place, text in ((path, file["text"]), (f"{path}.d", file["more"]))
            for section, key, value in settings(text)
            if section == "Network" and key in NETWORKD_DEVICES and value
        ]
        for place, key, device in devices if hit else []:
            kind = NETWORKD_DEVICES[key]
            if (kind and device in made) or (hidden and device not in there):
                continue
            beside = f"/etc/systemd/network/10-netplan-{ours[hit[0]]}.network.d/{device}.conf"
            out = (
                f"have its [Match] fit {', '.join(hit)} no more"
                if others(meant, ours, links)
                else "take that line out there"
            )
            cure = (
                f"put {device} into network_interfaces too (kind: {kind}), or {out}"
                if kind
                else f"move that line, below a line [Network], into {beside}, which is read besides"
            )
            raise Refused(
                f"{place}: {key}={device} would be lost at the next boot, since network_interfaces has "
                f"{', '.join(hit)} and this file counts no more for that: {cure}"
            )


def check_networkd_elsewhere(files, ours, links):
    """Refuse files outside /etc that systemd-networkd would prefer to netplan's for a name in `ours`."""
    for path, file in files.items():
        base = os.path.basename(path)
        meant = networkd_matches(settings(whole(file)), links)
        hit = [name for name in meant if name in ours and base < f"10-netplan-{ours[name]}.network"]
        if hit:
            raise Refused(
                f"{path} sets {', '.join(hit)} up, and systemd-networkd reads it before netplan's; it is a package's, "
                f"or written at each boot: hide it by `ln -s /dev/null /etc/systemd/network/{base}`, or put a copy of "
                f"your own there that fits {', '.join(hit)} no more"
            )


def networkd_claims(files, ours, links, taken):
    """Changes to .network files that systemd-networkd would prefer to netplan's for a name in `ours`.

    `ours` maps an interface's present name to netplan's for it.
    """
    changes = []
    for path, file in files.items():
        base = os.path.basename(path)
        meant = networkd_matches(settings(whole(file)), links)
        hit = [name for name in meant if name in ours]
        if not any(base < f"10-netplan-{ours[name]}.network" for name in hit):
            continue
        if set(meant) - set(ours):  # it configures others too: let it come after netplan's
            if file["more"].strip():
                raise Refused(
                    f"{path} is for {', '.join(name for name in meant if name not in ours)} as well as for "
                    f"{', '.join(hit)}, so that it would get a name that comes after netplan's, and what is in "
                    f"{path}.d would count for none of them: write that into {path} itself, or have its [Match] fit "
                    f"{', '.join(hit)} no more"
                )
            changes.append({"path": path, "move_to": f"{os.path.dirname(path)}/{AFTER_NETPLAN}{base}"})
        else:
            changes.append({"path": path, "move_to": aside(path, taken)})
    return changes


def ifupdown_lines(text):
    """[(number, line)] of a file of ifupdown's: one that ends in a backslash goes on in the next, unless a comment."""
    found, open_ = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if open_:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
        else:
            found.append((number, line))
        open_ = line.endswith("\\") and (open_ or not line.lstrip().startswith("#"))
    return found


def ifupdown_words(line):
    return line.replace("\\\n", " ").split()


def ifupdown_options(text):
    """[(device, option, words, line)] of ifupdown's stanzas; the first of each is `iface`.

    line: its number; options may have _ for -.
    """
    found, device = [], None
    for number, line in ifupdown_lines(text):
        words = ifupdown_words(line)
        if STANZA.match(line):
            device = words[1] if words[0] == "iface" and len(words) > 1 else None
        if device and words and not words[0].startswith("#"):
            found.append((device, words[0].replace("_", "-"), words[1:], number))
    return found


def taken_in(words, names):
    """Those of `names` that a bridge or a bond of ifupdown's takes in: by name, all, those that fit an expression
    (bridge-utils-interfaces(5)), or a range of them, as ifupdown2 has it.
    """
    found, way = set(), None
    for word in words:
        if word in ("regex", "noregex", "glob"):
            way = word
        elif word == "all":
            found |= set(names)
        elif way == "regex":
            found |= {name for name in names if fits_expression(word, name)}
        elif way == "glob" and (span := re.fullmatch(r"(.*?)(\d+)-(\d+)", word)):
            found |= {f"{span[1]}{number}" for number in range(int(span[2]), min(int(span[3]), 4095) + 1)}
        else:
            found.add(word)
    return [name for name in names if name in found]


def fits_expression(pattern, name):
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # of another kind than ours: perhaps
        return True


def card_of(device):
    """The card that a stanza of ifupdown's is for: eth0:1 is but a label of some of eth0's addresses."""
    return device.partition(":")[0]


def inherited(record, texts):
    """The stanzas that those in `record` inherit from, those first that others of them need.

    texts: ifupdown's files as they will be. Without these it reads none of the record.
    """
    stanzas, wanted = {}, []
    for line in [line for text in texts for _, line in ifupdown_lines(text)]:
        words = ifupdown_words(line)
        if STANZA.match(line):
            stanza = stanzas.setdefault(words[1], []) if words[0] == "iface" and len(words) > 1 else []
        if words and stanzas and not words[0].startswith("#"):
            stanza.append(line)
    look = [record]
    while look:
        names = re.findall(r"(?m)^\s*iface .*\binherits\s+(\S+)", "\n".join(look.pop()))
        for name in names:
            if name in stanzas and name not in wanted:
                wanted.insert(0, name)
                look.append(stanzas[name])
    return [line for name in wanted for line in stanzas[name]]


def check_named_otherwise(path, number, words, ours, links):
    """Refuse lines by which ifupdown sets up one of `ours` as another stanza says, or another card as one of these."""
    if words[0] == "iface":
        parent = words[words.index("inherits") + 1] if "inherits" in words[:-1] else ""
        if card_of(parent) in ours and card_of(words[1]) not in ours:
            raise Refused(
                f"{path}, line {number}: {words[1]} inherits from {parent}, whose lines give way to "
                "network_interfaces, so that ifupdown could read none of its files any more: write those lines out for "
                f"{words[1]}"
            )
        return
    macs = {link["mac"]: link["name"] for link in links if link["name"] in ours}
    for word in words[1:]:
        pattern, _, other = word.partition("=")
        kind, slash, value = pattern.partition("/")
        if words[0] == "mapping":
            hit = [name for name in ours if fnmatch.fnmatchcase(name, pattern)]
        elif not other or other in ours:
            hit = []
        elif slash:
            value = value.partition("/")[0]
            by_mac = macs.get(value.lower()) if kind == "mac" else None
            hit = [name for name in ours if name == by_mac or (not kind and fnmatch.fnmatchcase(name, value))]
        else:
            hit = [name for name in ours if name == pattern]
        if hit:
            raise Refused(
                f"{path}, line {number}: by '{words[0]} {word}' ifupdown sets {', '.join(hit)} up as a stanza of "
                f"another name says, and would go on to: call that stanza `iface {hit[0]}`, and write `auto {hit[0]}` "
                f"for this line; or leave {', '.join(hit)} out of network_interfaces"
            )


def check_hook(path, number, device, hook, command):
    """Refuse a command that ifupdown runs for one of ours; only its program is named, for there may be a key in it."""
    if HARMLESS.fullmatch(" ".join(command)):
        return
    program = command[0] if command and re.fullmatch(r"[\w./-]+", command[0]) else "a command"
    raise Refused(
        f"{path}, line {number}: {hook} of {device} runs {program}, which nothing would any more, since "
        f"network_interfaces has {device}: put it into a systemd unit of its own, or a route under routes: of the "
        "entry, an open port into firewall_allow; then take the line out there"
    )


def ifupdown_claims(files, ours, links, made):
    """Changes that comment the stanzas of `ours` out, and the names that ifupdown has configured.

    The stanzas taken out, by earlier runs too, are kept together in one file, from which ifdown can take the interfaces
    down. made: as `check_made` has it.
    """
    changes, record, names = [], [], []
    # What a name alone makes, as eth0.7.
    vlans = [link["name"] for link in links if link["kind"] == "vlan"]
    texts = []
    for path, file in files.items():
        for device, option, words, number in ifupdown_options(file["text"]):
            kind = "vlans" if option == "iface" and device in vlans else TAKEN_IN.get(option)
            if kind and device in ours:
                check_made(path, device, kind, made)
            if option in TAKEN_IN and device not in ours:
                check_taken_in(path, device, TAKEN_IN[option], taken_in(words, ours))
            if option == "bond-master" and device in ours and words and words[0] not in (*made, "none"):
                check_taken_in(path, words[0], "bonds", [device])
            if option in HOOKS and card_of(device) in ours:
                check_hook(path, number, device, option, words)
        kept, drop = [], False
        for number, line in ifupdown_lines(file["text"]):
            words = ifupdown_words(line)
            gone = line.removeprefix(IFUPDOWN_MARK)
            if gone != line and gone.split()[:1] != ["auto"] and not gone.startswith("allow-"):
                record.append(gone)
            if STANZA.match(line):
                keyword, mine = words[0], [word for word in words[1:] if card_of(word) in ours]
                if keyword in ("auto", "mapping", "iface") or keyword.startswith("allow-"):
                    check_named_otherwise(path, number, words, ours, links)
                drop = keyword == "iface" and len(words) > 1 and card_of(words[1]) in ours
                if drop:
                    names += [words[1]] if words[1] not in names else []
                elif (keyword == "auto" or keyword.startswith("allow-")) and mine:
                    others = [word for word in words[1:] if card_of(word) not in ours]
                    whole = line if "\n" not in line else " ".join(words)
                    kept.append(f"{IFUPDOWN_MARK}{whole}")
                    kept += [" ".join([keyword, *others])] if others else []
                    continue
            parts = line.split("\n")
            if drop and words and not words[0].startswith("#"):
                record += parts
                parts = [f"{IFUPDOWN_MARK}{part}" for part in parts]
            kept += parts
        text = "\n".join(kept) + "\n" * (not file["text"] or file["text"].endswith("\n"))
        texts.append(text)
        if kept != file["text"].splitlines():
            if path.startswith("/run/"):
                words = {card_of(word) for word in file["text"].split()}
                cards = ", ".join(name for name in ours if name in words)
                raise Refused(
                    f"{path} configures {cards}: what wrote it does so again at the next boot, mostly "
                    "/etc/network/cloud-ifupdown-helper, and ifupdown reads it then: write its lines into "
                    "/etc/network/interfaces, for the one there by which it is read (source, source-directory); or "
                    f"leave {cards} out of network_interfaces"
                )
            changes.append({"path": path, "content": text, "mode": file["mode"]})
    if names:
        record = [*inherited(record, texts), *record]
        changes.append({"path": IFUPDOWN_RECORD, "content": "\n".join(record) + "\n", "mode": "0600"})
    return changes, names


def port_of(said, profiles):
    """(device, netplan's kind of it) that a profile makes its interface a port of; (None, None) where of none.

    A profile names the device, or the uuid of the device's own one among `profiles`.
    """
    device, kind = (
        next((said[("connection", key)] for key in keys if ("connection", key) in said), None)
        for keys in (("controller", "master"), ("port-type", "slave-type"))
    )
    named = (one.get(("connection", "interface-name")) for one in profiles if one.get(UUID) == device)
    return (next(filter(None, named), device), PORT_TYPES.get(kind)) if device else (None, None)


def is_read(path, said, hidden):
    """Whether a profile is somebody's own that NetworkManager reads.

    Not netplan's; not NetworkManager's picture of what others set up; not what is out of sight already.
    """
    generated = os.path.basename(path).startswith("netplan-") or (".nmmeta", "nm-generated") in said
    return not generated and said.get(UUID, "") not in hidden


def networkmanager_claims(files, ours, links, taken, hidden, made):
    """Changes after which NetworkManager reads no profile for a name in `ours`.

    A package's profile stays where it is, and is hidden by its uuid: `hidden` has those that are. A port of what is not
    `made` is refused.
    """
    changes = []
    profiles = [keyed(file["text"]) for file in files.values()]
    for path, file in files.items():
        said = keyed(file["text"])
        uuid = said.get(UUID, "")
        if not is_read(path, said, hidden):
            continue
        meant = profile_for(said, links)
        hit = [name for name in meant if name in ours or name in ours.values()]
        if not hit:
            continue
        if (type_ := said.get(("connection", "type"))) in DEVICE_TYPES:
            check_made(path, hit[0], DEVICE_TYPES[type_], made)
        device, kind = port_of(said, profiles)
        if device and device not in made:
            check_taken_in(path, device, kind, hit)
        rest = others(meant, ours, links)
        name = said.get(("connection", "id"), os.path.basename(path))
        if rest:
            theirs = own_cards(rest, hit, links)
            wish = (
                f"put {', '.join(theirs)} into network_interfaces too, or tie it to one by " if theirs else ""
            )
            raise Refused(
                f"{path}: the profile '{name}' names no interface, so it is for {', '.join(hit)} as well as for "
                f"{', '.join(rest)}: {wish or 'tie it to the card that is meant by '}"
                f'`nmcli connection modify "{name}" connection.interface-name {(theirs or hit)[0]}`'
            )
        if path.startswith("/usr/lib/") and not uuid:
            raise Refused(
                f"{path} is a package's profile for {', '.join(hit)}, and without a uuid it cannot be hidden: take the "
                "package off, or give its profile a line uuid= (`uuidgen` prints one) under [connection]"
            )
        if path.startswith("/usr/lib/"):
            changes.append({"path": f"{PROFILES}/{uuid}.nmmeta", "link_to": "/dev/null"})
        else:  # into the directory above, which NetworkManager does not read for profiles
            beside = os.path.join(os.path.dirname(os.path.dirname(path)), os.path.basename(path))
            changes.append({"path": path, "move_to": aside(beside, taken)})
    return changes


# The change.


def plan(survey, entries, said, renderer, before):
    """The change, unless something is lost by it unsaid. said: the entries as the inventory has them."""
    ours = {item["now"]: item["name"] for item in entries}
    links, files, active = survey["interfaces"], survey["files"], survey["active"]
    taken = survey["asides"]
    network = {"version": 2}
    documents = netplan_documents(files["netplan"])
    given = names_given(files["netplan"], links)
    for item in entries:
        definition = {"renderer": renderer, **keeping_name(item, given)}
        network.setdefault(item["kind"], {})[item["name"]] = definition
    for item in entries:
        if item["kind"] == "vlans":
            join_link(item, network, documents, ours, links)
    text = HEADER + yaml.safe_dump({"network": network}, sort_keys=False)
    devices = {item["name"] for item in entries if item["kind"] in MADE}
    stanzas, ifupdown = ifupdown_claims(files["ifupdown"], ours, links, devices)
    if active["systemd-networkd"]:
        check_networkd_devices(files["networkd"], ours, links, devices)
        check_networkd_elsewhere(files["networkd_elsewhere"], ours, links)
    profiles = []
    if active["NetworkManager"] or renderer == "NetworkManager":
        profiles = networkmanager_claims(
            files["networkmanager"], ours, links, taken, survey["hidden_profiles"], devices
        )
    claims = [
        *netplan_claims(files["netplan"], documents, ours, links, taken, devices),
        *networkd_claims(files["networkd"], ours, links, taken),
        *stanzas,
        *profiles,
    ]
    wanted = [{"path": OUR_FILE, "content": text, "mode": "0600"}]
    if survey["cloud_init"]:
        wanted.append({"path": CLOUD_INIT_OFF, "content": "network: {config: disabled}\n", "mode": "0644"})
    servers = nameservers(survey["resolv_conf"], entries, active, bool(ifupdown))
    if servers:
        kept = aside(RESOLV_CONF, [])
        if kept not in taken and survey["resolv_link"]:
            wanted.append({"path": kept, "link_to": survey["resolv_link"]})
        elif kept not in taken and survey["resolv_conf"]:
            wanted.append({"path": kept, "content": survey["resolv_conf"], "mode": "0644"})
        wanted.append({"path": RESOLV_CONF, "content": servers, "mode": "0644"})
    after = netplan_after(files["netplan"], wanted + claims)
    made, present = (
        set().union(*map(made_by, map(network_of, after.values()))),
        {link["name"] for link in links},
    )
    gone = (made_by(before) - made) & present
    spoken = speaking(survey)
    check_left_out(survey, spoken, entries, before)
    check_default_route(survey["routes"], entries, said, gone)
    check_nameservers(survey, spoken, entries, said, gone)
    check_settings(spoken, entries, said, claims, links, renderer)
    return {
        "files": wanted + claims,
        "netplan": after,
        "stands": not claims and files["netplan"].get(OUR_FILE, {}).get("text") == text,
        "live": all(in_force(item, links, survey["routes"]) for item in entries),
        "addresses": new_addresses(survey["session"], entries, links, before),
        "summary": summary(entries, claims),
        **commands(
            entries,
            ifupdown,
            active,
            reload_profiles=bool(profiles) and active["NetworkManager"],
            new=[item["name"] for item in entries if item["kind"] in MADE and item["name"] not in present],
            gone=sorted(gone),
            servers=servers,
        ),
    }


def in_force(item, links, routes):
    """Whether an interface has its name, addresses, MTU and routes; without a carrier, no manager gives it any."""
    link = next((link for link in links if link["name"] == item["name"]), None)
    if link is None:
        return False
    held = {ipaddress.ip_interface(text) for text in link["addresses"]}
    wanted = {
        address for address in item["addresses"] if not address.ip.is_link_local
    }  # the survey leaves those out
    if by_hand(item) or (link["enabled"] and not link["up"]):
        return True
    mtu = item["definition"].get("mtu", link["mtu"])
    return wanted <= held and link["mtu"] == mtu and routed(item, routes)


def routed(item, routes):
    """Whether the kernel has an interface's plain routes; those of other tables and kinds are not asked for."""
    held = {(destination(one["to"]), one["via"]) for one in routes if one["interface"] == item["name"]}
    return all(
        (destination(one["to"]), str(ipaddress.ip_address(str(one["via"])))) in held
        for one in item["definition"].get("routes", [])
        if set(one) <= {"to", "via", "metric", "on-link"} and "via" in one
    )


def destination(target):
    """A route's target as `ip route` writes it."""
    text = str(target)
    if text in DEFAULT_ROUTES:
        return "default"
    network = ipaddress.ip_network(text)
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def by_hand(item):
    """Whether the interface gets its addresses only when somebody brings it up."""
    return "activation-mode" in item["definition"]


def nameservers(resolv_conf, entries, active, taken_down):
    """The text of a plain /etc/resolv.conf where nothing but that file tells this host its name servers, else None.

    resolv_conf: what stands there now, where it is a plain file or resolvconf's.
    taken_down: whether ifdown is to take down what had its addresses from ifupdown; a lease's servers go with it.
    """
    wanted = [
        server
        for item in entries
        for server in item["definition"].get("nameservers", {}).get("addresses") or []
    ]
    if resolv_conf is None or active["systemd-resolved"] or active["NetworkManager"] or not wanted:
        return None
    there = set(re.findall(r"(?m)^\s*nameserver\s+(\S+)", resolv_conf))
    if set(wanted) <= there and not taken_down:
        return None
    search = [
        name for item in entries for name in item["definition"].get("nameservers", {}).get("search") or []
    ]
    lines = [HEADER.rstrip("\n"), *([f"search {' '.join(search)}"] if search else [])]
    return "\n".join([*lines, *(f"nameserver {server}" for server in wanted)]) + "\n"


def new_addresses(session, entries, links, before):
    """Where to reach the host afterwards, most likely first; [] where it is at the address that is in use now.

    `before`: our last file. An interface without an address of its own any more is reached by what takes it in or lies
    on it, and what came out of a bond or a bridge for itself.
    """
    if session is None:
        return []
    now = ipaddress.ip_address(session["address"])
    if any(address.ip == now for item in entries for address in item["addresses"]):
        return []
    in_use = next(
        (link for link in links if str(now) in (text.split("/")[0] for text in link["addresses"])), None
    )
    if in_use is None:
        return []
    prefix = next(text for text in in_use["addresses"] if text.split("/")[0] == str(now))
    network = ipaddress.ip_interface(prefix).network
    same = [address for address in carried(in_use["name"], entries, before) if address.version == now.version]
    return [str(address.ip) for address in sorted(same, key=lambda address: address.ip not in network)]


def carried(interface, entries, before):
    """The addresses of the entry for `interface` (its present name), or of the nearest ones that are joined to it.

    None where it has none any more, or gets its address by DHCP, or is nobody's.
    """
    joined = {}
    pairs = [(item["name"], item["kind"], item["definition"]) for item in entries]
    pairs += [(name, kind, one) for kind, found in before.items() for name, one in found.items()]
    for name, kind, definition in pairs:
        for other in below(kind, definition):
            joined.setdefault(name, set()).add(other)
            joined.setdefault(other, set()).add(name)
    near, seen = {next((item["name"] for item in entries if item["now"] == interface), interface)}, set()
    while near:
        here = [item for item in entries if item["name"] in near]
        addresses = [address for item in here for address in item["addresses"]]
        if addresses:
            return addresses
        if any(item["definition"].get(key) is True for item in here for key in ("dhcp4", "dhcp6")):
            return []
        seen |= near
        near = set().union(*(joined.get(name, ()) for name in near)) - seen
    return []


def commands(entries, ifupdown, active, reload_profiles, new, gone, servers=None):
    """{apply, verify, undo}: lists of commands. `new`, `gone`: the devices that the change makes, and does without.

    servers: the text of /etc/resolv.conf, where that is ours to write.
    """
    # Netplan makes devices, but leaves those that it does not know any more, with their members and addresses. They go
    # first: what a bond lets go of is down until netplan brings it up.
    apply = [*([GUARD, "remove", name] for name in gone), ["netplan", "apply"]]
    undo = [["netplan", "apply"]]
    if ifupdown:
        # dhcpcd, by which Debian 13's ifupdown leases, empties the file as it lets go of an interface.
        again = [["sh", "-c", f'printf %s "$1" > {RESOLV_CONF}', "sh", servers]] if servers else []
        apply = [["ifdown", "--force", f"--interfaces={IFUPDOWN_RECORD}", *ifupdown], *again, *apply]
        undo = [["netplan", "generate"]]
        if not active["systemd-networkd"]:
            undo.append(["systemctl", "stop", "systemd-networkd.socket", "systemd-networkd.service"])
        undo += [
            ["ip", "address", "flush", "dev", name, "scope", "global"] for name in ifupdown if ":" not in name
        ]
        undo.append(["ifup", "--force", *ifupdown])
    if reload_profiles:
        apply = [["nmcli", "connection", "reload"], *apply]
        undo = [["nmcli", "connection", "reload"], *undo]
    undo = [
        # An old netplan file knows the interface by its old name.
        *([GUARD, "rename", item["name"], item["now"]] for item in entries if item["name"] != item["now"]),
        *([GUARD, "remove", name] for name in reversed(new)),
        *undo,
    ]
    verify = []
    for item in entries:
        if not by_hand(item):
            verify += [[GUARD, "holds", str(address), item["name"]] for address in item["addresses"]]
        for route in item["definition"].get("routes", []):
            if route["to"] in DEFAULT_ROUTES and "via" in route and "table" not in route:
                verify.append([GUARD, "reachable", str(route["via"]), item["name"]])
    return {"apply": apply, "verify": verify, "undo": undo}


def summary(entries, claims):
    """One line for people: what the interfaces get, and which files give way."""
    parts = [f"{item['name']} {', '.join(map(str, item['addresses'])) or item['kind']}" for item in entries]
    moved = [
        change["path"]
        for change in claims
        if "move_to" in change or not change["path"].endswith("-trainyard")
    ]
    return "; ".join(parts) + (f" (instead of {', '.join(moved)})" if moved else "")


class FilterModule:
    def filters(self):
        return {"network_plan": network_plan}
