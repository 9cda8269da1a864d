"""What a host would lose by the change without anybody having said so: each is refused, with the line to write.

Given what the host has and its files say (survey, links, Spoken) and `entries`, what is to be; `said` are these as the
inventory has them, `before` is our last file, `gone` the devices that the change does without.
"""

import ipaddress
import itertools
import os
import re

from network_claims import others
from network_entries import DEFAULT_ROUTES, Refused, below, gateway_of
from network_files import IFUPDOWN_MARK, MADE, OUR_FILE, READ_BY, read_at, settings
from network_networkd import drop_in
from network_settings import NO_TREE, OF_CARDS, SEARCH, cure
from network_spoken import in_charge, speaking


def check_addresses(entries, present, before, session):
    """Refuse to lose fixed addresses; what needs no more than the host's interfaces is asked before all else."""
    check_ipv6(entries, present, before)
    check_further(entries, present, before, session)


def check_losses(survey, entries, said, before, claims, gone, renderer):
    """Refuse to lose what files say that give way, and what comes with it. claims: the changes by which they do."""
    spoken = speaking(survey)
    check_left_out(survey, spoken, entries, before)
    check_default_route(survey["routes"], entries, said, gone)
    check_nameservers(survey, spoken, entries, said, gone)
    check_settings(spoken, entries, said, claims, survey["interfaces"], renderer)


# Addresses.


def check_ipv6(entries, present, before):
    """An interface's fixed IPv6 addresses do not go unsaid; what a router or a lease gives it comes again.

    Those of our last file may be taken back.
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

    session: by which the controller is there, or None; its own address is replaced first.
    """
    own_address = session["address"] if session else ""
    fixed, leases = given_up(entries, present, before)
    standing = {ipaddress.ip_interface(text).ip for link in present for text in link["addresses"]}
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


def given_up(entries, present, before):
    """({name: [(interface, address)]}, {name: how many leases}): the IPv4 addresses that no entry has, by the present
    name of the one that is to have what they are replaced by.

    Only of interfaces that we take over: what comes besides later is another program's, as is mostly a /32, which moves
    from host to host.
    """
    ours = addresses_in(before)
    since_long = {
        name
        for found in before.values()
        for name, definition in found.items()
        if definition.get("addresses") or definition.get("dhcp4")
    }
    held = {link["name"]: link for link in present if link["name"] not in since_long}
    wanted = {address.ip for item in entries for address in item["addresses"]}
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
    return fixed, leases


def receiver(entries, name):
    """The entry's device that an interface's addresses go to: the bond or bridge that has it in, and so on."""
    for _ in entries:
        name = next((one["now"] for one in entries if takes_in(one, name)), name)
    return name


def takes_in(item, name):
    """Whether an entry makes a bond or a bridge that has the interface `name` for a port."""
    return item["kind"] != "vlans" and name in below(item["kind"], item["definition"])


def addresses_in(before):
    """All addresses that our last file has, as they are written."""
    return {
        str(address)
        for definitions in before.values()
        for definition in definitions.values()
        for address in definition.get("addresses") or []
    }


# What sets a card up whose entry was taken out.


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


# The way out, and the name servers.


def check_default_route(routes, entries, said, gone):
    """A host does not lose its way out unsaid; what routers advertise comes again.

    `gateway: none` says that none is meant.
    """
    if any("gateway" in item and gateway_of(item) is None for item in said):
        return
    ours = {item["now"]: item["where"] for item in entries}
    going = ours.keys() | gone
    definitions = [item["definition"] for item in entries]
    addresses = [str(address) for one in definitions for address in one.get("addresses") or []]
    defaults = [one for one in routes if one["to"] == "default"]
    for version in {6 if ":" in address else 4 for address in addresses} or {4}:
        held = [one for one in defaults if one["version"] == version and not one["told"]]
        # A route that has several ways goes as a whole.
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


def default_versions(definition):
    """The IP versions of the default routes that a netplan definition gives by itself."""
    routes = [
        one for one in definition.get("routes", []) if one["to"] in DEFAULT_ROUTES and "table" not in one
    ]
    found = {6 if ":" in f"{one['to']} {one.get('via')}" else 4 for one in routes}
    return found | {version for version in (4, 6) if f"gateway{version}" in definition}


def check_nameservers(survey, spoken, entries, said, gone):
    """A host does not lose its name servers unsaid: a lease's go with it, a file's when that gives way.

    An empty list of servers says that none is meant.
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


def resolved_servers(files):
    """The servers that systemd-resolved's own files name (resolved.conf(5)); of two of one name, the last counts."""
    named = {os.path.basename(path): file["text"] for path, file in files.items()}
    servers = []
    for base in sorted(named, key=lambda base: (base != "resolved.conf", base)):
        for section, key, value in settings(named[base]):
            if (section, key) == ("Resolve", "DNS"):
                servers = [*servers, *value.split()] if value else []
    return servers


def resolved_by_hand(survey):
    """Whether /etc/resolv.conf names servers and is its owner's: no manager writes it, nor a lease's client."""
    text = survey["resolv_conf"] or ""
    servers = re.search(r"(?m)^\s*nameserver\s+\S", text)
    return bool(servers and not survey["resolv_link"] and not re.search("(?i)generated by", text))


# What a file says beside addresses.


def check_settings(spoken, entries, said, claims, links, renderer):
    """What a file that gives way says of a card beside its addresses does not go unsaid: 802.1X, MTU, routes, …"""
    ours = {item["now"]: item for item in entries}
    going = {change["path"] for change in claims}
    for one in in_charge(spoken):
        hit = [name for name in one.names if name in ours]
        stays = "/systemd/network/" in one.path and one.path not in going  # hidden by netplan's since long
        if not hit or one.path == OUR_FILE or stays:
            continue
        check_networkd_alone(one, hit, ours, links)
        for name, (key, place, value) in itertools.product(hit, one.settings):
            if value == NO_TREE and ours[name]["definition"].get("renderer", renderer) == "networkd":
                continue  # it has none unless an entry's parameters say so
            if not any(says(*pair, key, name) for pair in zip(entries, said, strict=True)):
                refuse_setting(one.path, entries, ours[name], key, place, value)


def check_networkd_alone(one, hit, ours, links):
    """Refuse to lose what netplan has no word for; systemd-networkd reads it beside netplan's file, too."""
    places = [place for key, place, _ in one.settings if key is None]
    if places:
        out = f", or have its [Match] fit {hit[0]} no more" * bool(others(one.names, ours, links))
        beside = drop_in(ours[hit[0]]["name"], os.path.basename(one.path).removesuffix(".network"))
        raise Refused(
            f"{one.path}: {', '.join(dict.fromkeys(places))} for {hit[0]} would be lost, since "
            f"network_interfaces has {hit[0]}, and netplan no word for it: move it, below the names of its "
            f"sections, into {beside}, which is read besides{out}"
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


def refuse_setting(path, entries, own, key, place, value):
    """Refuse to lose a setting that a file has of the interface of the entry `own`."""
    name = own["now"]
    if own["kind"] in MADE and key in OF_CARDS:  # netplan knows these of a card alone
        key = ""
    write = f"write {cure(key, value)}" if key else f"leave {name} out of network_interfaces"
    of = next((item for item in entries if key == "parameters" and takes_in(item, name)), own)
    whose = "its entry" if of is own else f"the entry of {of['name']}"
    of_a_package = path.startswith(("/usr/", "/lib/"))
    out = "" if of_a_package else ", or take it out there"
    raise Refused(
        f"{of['where']}: {path} has {place} for {name}, which would be lost, since {whose} has none: {write}{out}"
    )
