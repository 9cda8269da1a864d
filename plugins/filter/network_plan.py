"""From what a host's network is (module network_survey) and what it shall be to the change that leads there.

Pure functions: nothing here reads a file or talks to a host. What each manager's files say of the same interfaces, and
how they give way, is in network_netplan, network_networkd, network_ifupdown and network_networkmanager.
"""

import ipaddress
import re
import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from network_entries import DEFAULT_ROUTES, Refused, below, check_together, entry, plain
from network_files import (
    ASIDE,
    CLOUD_INIT_OFF,
    GUARD,
    HEADER,
    IFUPDOWN_RECORD,
    MADE,
    OUR_FILE,
    RESOLV_CONF,
    aside,
)
from network_ifupdown import ifupdown_claims
from network_losses import check_addresses, check_losses
from network_netplan import join_link, keeping_name, names_given, netplan_claims, netplan_documents
from network_networkd import check_networkd_devices, check_networkd_elsewhere, networkd_claims
from network_networkmanager import networkmanager_claims
from network_yaml import made_by, netplan_after, network_of


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
        check_addresses(entries, survey["interfaces"], before, survey["session"])
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
    there = {link["name"] for link in present}
    for item in entries:
        if item["kind"] != "bridges" or item["name"] in there:
            continue
        parameters = item["definition"].get("parameters") or {}
        tree = parameters.get("stp", renderer == "NetworkManager" or bool(parameters))
        if tree and str(parameters.get("forward-delay", 15)) not in ("2", "3", "4"):
            raise Refused(
                f"{item['where']}.options: a new bridge with the spanning tree carries nothing for 30 s, so the change "
                "would be undone: write parameters: {stp: false}, or keep the tree with {stp: true, forward-delay: 4}"
            )


# The change.


def plan(survey, entries, said, renderer, before):
    """The change, unless something is lost by it unsaid. said: the entries as the inventory has them."""
    links, files, active = survey["interfaces"], survey["files"], survey["active"]
    ours = {item["now"]: item["name"] for item in entries}
    made = {item["name"] for item in entries if item["kind"] in MADE}
    documents = netplan_documents(files["netplan"])
    text = our_file(entries, renderer, files["netplan"], documents, ours, links)
    claims, ifupdown, profiles = giving_way(survey, documents, ours, made, renderer)
    servers = nameservers(survey["resolv_conf"], entries, active, bool(ifupdown))
    wanted = our_files(survey, text, servers)
    after = netplan_after(files["netplan"], wanted + claims)
    present = {link["name"] for link in links}
    made_after = set().union(*map(made_by, map(network_of, after.values())))
    gone = (made_by(before) - made_after) & present
    check_losses(survey, entries, said, before, claims, gone, renderer)
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


def our_file(entries, renderer, files, documents, ours, links):
    """The text of our netplan file. documents: the others', as `netplan_documents` has them."""
    network = {"version": 2}
    given = names_given(files, links)
    for item in entries:
        definition = {"renderer": renderer, **keeping_name(item, given)}
        network.setdefault(item["kind"], {})[item["name"]] = definition
    for item in entries:
        if item["kind"] == "vlans":
            join_link(item, network, documents, ours, links)
    return HEADER + yaml.safe_dump({"network": network}, sort_keys=False)


def giving_way(survey, documents, ours, made, renderer):
    """(changes by which other files give way, the names that ifupdown has configured, NetworkManager's changes).

    ours: {present name: name that it shall have}; made: the devices that network_interfaces makes.
    """
    links, files, active = survey["interfaces"], survey["files"], survey["active"]
    taken = survey["asides"]
    stanzas, ifupdown = ifupdown_claims(files["ifupdown"], ours, links, made)
    if active["systemd-networkd"]:
        check_networkd_devices(files["networkd"], ours, links, made)
        check_networkd_elsewhere(files["networkd_elsewhere"], ours, links)
    profiles = []
    if active["NetworkManager"] or renderer == "NetworkManager":
        hidden = survey["hidden_profiles"]
        profiles = networkmanager_claims(files["networkmanager"], ours, links, taken, hidden, made)
    netplans = netplan_claims(files["netplan"], documents, ours, links, taken, made)
    units = networkd_claims(files["networkd"], ours, links, taken)
    return [*netplans, *units, *stanzas, *profiles], ifupdown, profiles


def our_files(survey, text, servers):
    """The changes that write our files, and keep what was in /etc/resolv.conf where its text, `servers`, is ours."""
    changes = [{"path": OUR_FILE, "content": text, "mode": "0600"}]
    if survey["cloud_init"]:
        changes.append({"path": CLOUD_INIT_OFF, "content": "network: {config: disabled}\n", "mode": "0644"})
    if servers:
        kept = aside(RESOLV_CONF, [])
        if kept not in survey["asides"] and survey["resolv_link"]:
            changes.append({"path": kept, "link_to": survey["resolv_link"]})
        elif kept not in survey["asides"] and survey["resolv_conf"]:
            changes.append({"path": kept, "content": survey["resolv_conf"], "mode": "0644"})
        changes.append({"path": RESOLV_CONF, "content": servers, "mode": "0644"})
    return changes


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


# Whether it is in force, and where the host answers afterwards.


def in_force(item, links, routes):
    """Whether an interface has its name, addresses, MTU and routes; without a carrier, no manager gives it any."""
    link = next((link for link in links if link["name"] == item["name"]), None)
    if link is None:
        return False
    if by_hand(item) or (link["enabled"] and not link["up"]):
        return True
    held = {ipaddress.ip_interface(text) for text in link["addresses"]}
    # The survey leaves link-local ones out.
    wanted = {address for address in item["addresses"] if not address.ip.is_link_local}
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


# How it comes about.


def commands(entries, ifupdown, active, reload_profiles, new, gone, servers):
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
        undo = back_to_ifupdown(ifupdown, active)
    if reload_profiles:
        apply = [["nmcli", "connection", "reload"], *apply]
        undo = [["nmcli", "connection", "reload"], *undo]
    undo = [
        # An old netplan file knows the interface by its old name.
        *([GUARD, "rename", item["name"], item["now"]] for item in entries if item["name"] != item["now"]),
        *([GUARD, "remove", name] for name in reversed(new)),
        *undo,
    ]
    return {"apply": apply, "verify": verification(entries), "undo": undo}


def back_to_ifupdown(names, active):
    """The commands after which ifupdown has its interfaces again."""
    stop = [["systemctl", "stop", "systemd-networkd.socket", "systemd-networkd.service"]]
    return [
        ["netplan", "generate"],
        *(stop if not active["systemd-networkd"] else []),
        *(["ip", "address", "flush", "dev", name, "scope", "global"] for name in names if ":" not in name),
        ["ifup", "--force", *names],
    ]


def verification(entries):
    """The commands that tell whether the addresses are held, and the gateways reached."""
    found = []
    for item in entries:
        if not by_hand(item):
            found += [[GUARD, "holds", str(address), item["name"]] for address in item["addresses"]]
        for route in item["definition"].get("routes", []):
            if route["to"] in DEFAULT_ROUTES and "via" in route and "table" not in route:
                found.append([GUARD, "reachable", str(route["via"]), item["name"]])
    return found


def summary(entries, claims):
    """One line for people: what the interfaces get, and which files give way."""
    parts = [f"{item['name']} {', '.join(map(str, item['addresses'])) or item['kind']}" for item in entries]
    moved = [one["path"] for one in claims if "move_to" in one or ASIDE not in one["path"]]
    return "; ".join(parts) + (f" (instead of {', '.join(moved)})" if moved else "")


class FilterModule:
    def filters(self):
        return {"network_plan": network_plan}
