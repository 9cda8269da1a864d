"""The entries of network_interfaces, checked: what the filter network_plan and the action inventory_check share.

Pure functions: nothing here reads a file or talks to a host.
"""

import difflib
import ipaddress
import re

KINDS = ("ethernets", "bonds", "bridges", "vlans", "wifis")
KEYS = ("name", "macaddress", "kind", "addresses", "gateway", "routes", "nameservers", "mtu", "options")
ROUTE_KEYS = (
    *("to", "via", "metric", "on-link", "table", "type", "scope", "from", "mtu"),
    *("congestion-window", "advertised-receive-window", "advmss"),
)
IPV6_LEAST = 1280  # of a link's MTU: RFC 8200, section 5
DEFAULT_ROUTES = ("default", "0.0.0.0/0", "::/0")
# No space, bracket or quote, as a structure has them that was written as a text.
WORD = re.compile(r"[^\s{}\[\]\"']{0,80}")


class Refused(Exception):
    """A setting that cannot be carried out; the message says which, why, and what to write."""


def refusals(wanted):
    """[str]: what is wrong with network_interfaces of one host, whatever interfaces that has; it is not asked."""
    entries, said = [], []
    for number, item in enumerate(plain(wanted)):
        try:
            entries.append(entry(number, item, None))
        except Refused as refusal:
            said.append(str(refusal))
    if not said:
        try:
            check_together(entries, None)
        except Refused as refusal:
            said.append(str(refusal))
    return said


def plain(value):
    """`value` without Ansible's tags, which YAML's safe dumper refuses."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value


def shown(value):
    """`value` as a message may have it: words as they are; of more, which may have a wireless key in it, the kind."""
    parts = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    )
    words = all(not isinstance(one, (dict, list, tuple)) and WORD.fullmatch(str(one)) for one in parts)
    if words and (not isinstance(value, dict) or set(value) <= {*ROUTE_KEYS}):
        return repr(value)
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return "a mapping" if isinstance(value, dict) else "a list"


# What is wanted.


def entry(number, item, present):
    """One checked item of network_interfaces: {where, now, name, kind, addresses, definition (netplan's)}.

    `now` is the interface's present name, `name` the one that it shall have; netplan, too, knows it by that.
    `present`: the host's interfaces; None where they are not known, and `now` may be a hardware address then.
    """
    where = f"network_interfaces[{number}]"
    check_keys(where, item)
    kind = item.get("kind", "ethernets")
    if kind not in KINDS:
        raise Refused(f"{where}.kind is '{kind}': write one of {', '.join(KINDS)}")
    name, mac = marks(where, item, present)
    there = kind in ("ethernets", "wifis")
    given = bool(mac and name and kind == "ethernets")  # the interface is known by mac, and gets the name
    if (given or not there) and not re.fullmatch(r"[^\s/:]{1,15}", name):
        what = "it" if given else f"a new {kind[:-1]}"
        raise Refused(f"{where}.name is '{name}': {what} needs a name of at most 15 characters")
    now = find_interface(where, name, mac, present) if there else name
    name = name if given or not there else now
    check_wired(where, kind, now, present)

    definition = {"match": {"macaddress": mac}} if mac and there else {"macaddress": mac} if mac else {}
    if given:
        definition["set-name"] = name
        check_free(where, name, now, present)
    addresses = [interface_address(where, text) for text in as_list(where, "addresses", item)]
    definition.update(by_own_keys(where, item, addresses))
    options = checked_options(where, item.get("options") or {}, [address.network for address in addresses])
    for key in options:
        if key in definition and key not in ("dhcp4", "dhcp6"):
            raise Refused(f"{where}.options says '{key}', which the entry itself says too: write it once")
    definition.update(options)
    return {
        "where": where,
        "now": now,
        "name": name,
        "kind": kind,
        "addresses": addresses,
        "definition": definition,
    }


def check_keys(where, item):
    if not isinstance(item, dict):
        raise Refused(f"{where} is {shown(item)}: write a mapping with name (or macaddress) and addresses")
    for key in item:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else "raw netplan keys go under options."
            raise Refused(f"{where}: unknown key '{key}'; {hint} There are {', '.join(KEYS)}")


def marks(where, item, present):
    """(name, hardware address) by which an item names its interface, "" where it does not say one."""
    name, mac = item.get("name") or "", str(item.get("macaddress") or "").lower()
    if not isinstance(name, str):
        raise Refused(f"{where}.name is {shown(name)}: write the interface's name, such as eth0")
    if not name and not mac:
        raise Refused(
            f"{where} says neither name nor macaddress: write one of them. {there_are(present)}".rstrip()
        )
    if mac and not re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac):
        quotes = " (in quotes: YAML takes some for numbers)" if mac.isdigit() else ""
        raise Refused(f"{where}.macaddress is '{mac}': write it like '52:54:00:12:34:56'{quotes}")
    return name, mac


def check_wired(where, kind, now, present):
    link = next((one for one in present or () if one["name"] == now), {})
    if kind == "ethernets" and link.get("kind") == "wlan":
        raise Refused(
            f"{where}: {now} is wireless: write kind: wifis, with its access-points under options; or leave it out"
        )


def check_free(where, name, now, present):
    if name != now and name in [link["name"] for link in present or ()]:
        raise Refused(f"{where}.name: another interface has the name '{name}'. {there_are(present)}")


def by_own_keys(where, item, addresses):
    """The part of netplan's definition that an item says by keys of its own, checked."""
    definition = {}
    if addresses:
        # Static means static: a lease beside it would bring a second default route.
        definition.update(addresses=[str(address) for address in addresses], dhcp4=False, dhcp6=False)
    if routes := checked_routes(where, item, addresses):
        definition["routes"] = routes
    if item.get("nameservers"):
        definition["nameservers"] = checked_nameservers(where, item["nameservers"])
    if item.get("mtu") is not None:
        mtu = item["mtu"]
        if isinstance(mtu, bool) or not str(mtu).isdigit() or not 68 <= int(mtu) <= 65535:
            raise Refused(f"{where}.mtu is {shown(mtu)}: write a number of bytes from 68 to 65535")
        definition["mtu"] = int(mtu)
    return definition


def checked_routes(where, item, addresses):
    """An item's routes as netplan has them, first the one by its gateway."""
    networks = [address.network for address in addresses]
    routes = [checked_route(where, route, networks) for route in as_list(where, "routes", item)]
    if (router := gateway_of(item)) is not None:
        gateway = ip_address(f"{where}.gateway", router)
        if gateway in [address.ip for address in addresses]:
            raise Refused(f"{where}.gateway {gateway} is the interface's own address: write the router's")
        on_link(f"{where}.gateway", gateway, networks)
        routes.insert(0, {"to": "default" if gateway.version == 4 else "::/0", "via": str(gateway)})
    return routes


def gateway_of(item):
    """The router that an item names; None where it names none, or says `none`."""
    return None if item.get("gateway") == "none" else item.get("gateway")


def there_are(present):
    if present is None:
        return ""
    listed = ", ".join(
        f"{link['name']} ({link['mac']}{', ' if link['addresses'] else ''}{', '.join(link['addresses'])})"
        for link in present
    )
    return f"The host has: {listed or 'no interface but loopback'}"


def find_interface(where, name, mac, present):
    """The present name of the interface that an item means."""
    if present is None:
        return mac or name
    if mac:
        found = [
            link["name"]
            for link in present
            if link["mac"] == mac and link["kind"] not in ("vlan", "bridge", "bond")
        ]
        if not found:
            raise Refused(f"{where}: no interface has the macaddress {mac}. {there_are(present)}")
        return found[0]
    if name not in [link["name"] for link in present]:
        raise Refused(f"{where}: the host has no interface '{name}'. {there_are(present)}")
    return name


def as_list(where, key, item):
    value = item.get(key) or []
    if not isinstance(value, list):
        raise Refused(f"{where}.{key} is {shown(value)}: write a list")
    return value


def ip_address(where, text):
    try:
        return ipaddress.ip_address(str(text))
    except ValueError:
        raise Refused(f"{where} is '{text}': write an IP address such as 192.168.1.1") from None


def interface_address(where, text):
    try:
        address = ipaddress.ip_interface(str(text))
    except ValueError:
        raise Refused(
            f"{where}.addresses: '{text}' is no address with a prefix such as 192.168.1.100/24"
        ) from None
    if "/" not in str(text):
        raise Refused(f"{where}.addresses: '{text}' has no prefix length: write it like {text}/24")
    network = address.network
    if (
        address.version == 4
        and network.prefixlen < 31
        and address.ip in (network.network_address, network.broadcast_address)
    ):
        what = "network" if address.ip == network.network_address else "broadcast"
        raise Refused(
            f"{where}.addresses: {address} is the {what} address of {network}, which no host can have"
        )
    if address.ip.is_multicast or address.ip.is_loopback or address.ip.is_unspecified:
        raise Refused(f"{where}.addresses: {address} is not an address that an interface can have")
    return address


def on_link(where, address, networks):
    if address.version == 6 and address.is_link_local:
        return  # a router's own on every link: fe80::1, as providers have it
    if networks and not any(address in network for network in networks if network.version == address.version):
        raise Refused(
            f"{where} {address} lies in none of the interface's networks ({', '.join(map(str, networks))}), so it "
            "cannot be reached: correct it, or write it under routes with on-link: true"
        )


def checked_route(where, route, networks):
    if not isinstance(route, dict) or "to" not in route:
        raise Refused(f"{where}.routes: {shown(route)} is no mapping with 'to' (and 'via')")
    for key in route:
        if key not in ROUTE_KEYS:
            raise Refused(f"{where}.routes: unknown key '{key}'; there are {', '.join(ROUTE_KEYS)}")
    if route["to"] != "default":
        try:
            ipaddress.ip_network(str(route["to"]))
        except ValueError:
            raise Refused(
                f"{where}.routes: 'to: {route['to']}' is neither default nor a network such as 10.0.0.0/8"
            ) from None
    if "via" in route:
        via = ip_address(f"{where}.routes: via", route["via"])
        if not route.get("on-link"):
            on_link(f"{where}.routes: via", via, networks)
    return dict(route)


def checked_nameservers(where, given):
    given = given if isinstance(given, dict) else {"addresses": given}
    if set(given) - {"addresses", "search"}:
        raise Refused(
            f"{where}.nameservers: write a list of addresses, or a mapping with addresses and search"
        )
    addresses = as_list(f"{where}.nameservers", "addresses", given)
    as_list(f"{where}.nameservers", "search", given)
    return {**given, "addresses": [str(ip_address(f"{where}.nameservers", address)) for address in addresses]}


# Netplan's keys that are read here, too; what else stands under options, netplan itself checks.
OPTION_KINDS = {
    "addresses": (list, "a list"),
    "interfaces": (list, "a list of names"),
    "link": (str, "a name"),
    "match": (dict, "a mapping such as {macaddress: …}"),
    "nameservers": (dict, "a mapping such as {addresses: [192.168.1.1]}"),
    "parameters": (dict, "a mapping such as {mode: active-backup}"),
    "routes": (list, "a list of mappings such as {to: default, via: 192.168.1.1}"),
}


def checked_options(where, options, networks):
    """`options` of an entry, netplan's own words, if the parts that count for the plan have their form.

    `networks`: those of the entry's addresses. A lease, or a router, may bring others.
    """
    where = f"{where}.options"
    if not isinstance(options, dict):
        raise Refused(f"{where} is {shown(options)}: write netplan's own keys as a mapping")
    for key, (kind, form) in OPTION_KINDS.items():
        if key in options and not isinstance(options[key], kind):
            raise Refused(f"{where}.{key} is {shown(options[key])}: write {form}")
    for member in options.get("interfaces", []):
        if not isinstance(member, str):
            raise Refused(f"{where}.interfaces: {shown(member)} is not the name of an interface")
    more = any(options.get(key) for key in ("dhcp4", "dhcp6", "accept-ra"))
    for route in options.get("routes", []):
        checked_route(where, route, [] if more else networks)
    if "nameservers" in options:
        checked_nameservers(where, options["nameservers"])
    return options


# What no entry alone can show.


def check_together(entries, present):
    """Names and addresses said twice, two default routes, missing members, small MTUs. `present`: as of `entry`."""
    names = check_said_once(entries)
    known = set(names) | {link["name"] for link in present or ()}
    # An interface that is known by its hardware address may be any of those that are named.
    nameless = present is None and any(
        "macaddress" in item["definition"].get("match", {}) for item in entries
    )
    own = {item["name"]: item for item in entries}
    ports = {
        name
        for item in entries
        if item["kind"] != "vlans"
        for name in below(item["kind"], item["definition"])
    }
    for item in entries:
        if item["kind"] == "vlans" and not {"id", "link"} <= set(item["definition"]):
            raise Refused(f"{item['where']}.options needs id and link, as netplan's vlans do")
        if not nameless and ports.isdisjoint((item["now"], item["name"])):
            check_ipv6_fits(item)
        for member in below(item["kind"], item["definition"]):
            if present is not None and member not in known:
                raise Refused(
                    f"{item['where']}.options names '{member}', no interface of the host. {there_are(present)}"
                )
            if item["kind"] == "vlans":
                continue
            if member not in names and not nameless:
                raise Refused(
                    f"{item['where']}.options takes in '{member}', which has no entry: write {{name: {member}}} into "
                    "network_interfaces too, so that what configures it now gives way"
                )
            if member in own and own[member]["addresses"]:
                raise Refused(
                    f"{own[member]['where']}.addresses: {item['name']} takes {member} in, so nobody would reach the "
                    f"host there: write the addresses (and gateway, routes, nameservers) for {item['name']}"
                )


def check_said_once(entries):
    """{name: where it stands} of all entries; refused where two have one name, address or default route."""
    names, addresses, defaults = {}, {}, {}
    for item in entries:
        for name in dict.fromkeys((item["now"], item["name"])):
            if name in names:
                raise Refused(f"{item['where']} and {names[name]} are both for {name}: write one entry")
            names[name] = item["where"]
        for address in item["addresses"]:
            if address.ip in addresses:
                raise Refused(
                    f"{item['where']}.addresses: {address.ip} stands in {addresses[address.ip]} already"
                )
            addresses[address.ip] = item["where"]
        for route in item["definition"].get("routes", []):
            if route["to"] in DEFAULT_ROUTES and "table" not in route:
                key = (":" in str(route.get("via", "")), str(route.get("metric")))
                if key in defaults:
                    raise Refused(
                        f"{item['where']} and {defaults[key]} both have a default route: "
                        "keep one, or give them different metrics (routes: to, via, metric)"
                    )
                defaults[key] = item["where"]
    return names


def check_ipv6_fits(item):
    """Refuse an MTU below IPv6's least, which that would raise. A port has no IPv6 of its own, and is not asked."""
    mtu = str(item["definition"].get("mtu"))
    if mtu.isdecimal() and int(mtu) < IPV6_LEAST and has_ipv6(item["definition"]):
        raise Refused(
            f"{item['where']}.mtu is {mtu}: IPv6 needs {IPV6_LEAST} bytes, so it would become that: write a number "
            "from there on, or have no IPv6 there, by options: {link-local: []}"
        )


def has_ipv6(definition):
    """Whether netplan's definition leaves IPv6 on: by its link-local address, unless that is said otherwise."""
    addresses = [str(address) for address in definition.get("addresses") or []]
    return "ipv6" in str(definition.get("link-local", "ipv6")) or any(":" in address for address in addresses)


def below(kind, definition):
    """The names of what a bond or a bridge takes in, and of what a VLAN lies on."""
    if kind in ("bonds", "bridges"):
        return definition.get("interfaces") or []
    return [definition.get("link")] if kind == "vlans" else []
