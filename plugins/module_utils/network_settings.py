"""What the managers' files say of a card beside its addresses: what an entry has to say, too, lest it be lost.

Pure functions: nothing here reads a file or talks to a host. Each returns [(key, where, value)]: netplan's key for the
setting, where it stands in the file, and what netplan would have there, None where that is not to be told or not known.
The key is None where systemd-networkd alone has such a thing, "" where netplan has none of NetworkManager's.
"""

import re

import yaml
from network_entries import DEFAULT_ROUTES, ROUTE_KEYS, WORD
from network_files import parts
from network_yaml import WORDS

# systemd-networkd's keys for what takes an interface in or lies on it, with our kind of it where there is one.
NETWORKD_DEVICES = {
    **{"Bond": "bonds", "Bridge": "bridges", "VLAN": "vlans"},
    **dict.fromkeys(("BatmanAdvanced", "IPoIB", "IPVLAN", "IPVTAP", "MACsec", "MACVLAN", "MACVTAP")),
    **dict.fromkeys(("Tunnel", "VRF", "VXLAN", "Xfrm")),
}
USUAL_WAKING = ("", "0", "1", "32768")  # NetworkManager's: not at all, as it is set up for all, as it is
USUAL_MTU = "1500"  # which a card has by itself
ADVERTS = "accept-ra"  # routers', which a card listens to unless it is told not to
# What an entry's own addresses take the place of, or what is for netplan alone.
REPLACED = {
    *(ADVERTS, "activation-mode", "addresses", "critical", "dhcp-identifier", "dhcp4"),
    *("dhcp4-overrides", "dhcp6", "dhcp6-overrides", "gateway4", "gateway6", "ignore-carrier"),
    *("ipv6-address-generation", "ipv6-address-token", "ipv6-privacy", "link-local", "match"),
    *("nameservers", "networkmanager", "optional", "optional-addresses", "ra-overrides"),
    *("renderer", "set-name"),
}
NETWORKD_REPLACED = {
    **dict.fromkeys(("Match", "Address", "DHCP", "DHCPv4", "DHCPv6", "IPv6AcceptRA"), None),  # all of it
    "Link": {"ActivationPolicy", "RequiredFamilyForOnline", "RequiredForOnline", "Unmanaged"},
    "Network": {
        *NETWORKD_DEVICES,
        *("ActiveSlave", "Address", "ConfigureWithoutCarrier", "DHCP", "DNS", "DNSDefaultRoute"),
        *("DNSOverTLS", "DNSSEC", "DNSSECNegativeTrustAnchors", "DefaultRouteOnDevice"),
        *("Description", "Domains", "EmitLLDP", "Gateway", "IPv4LLRoute", "IPv4LLStartAddress"),
        *("IPv6AcceptRA", "IPv6DuplicateAddressDetection", "IPv6LinkLocalAddressGenerationMode"),
        *("IPv6PrivacyExtensions", "IPv6StableSecretAddress", "IPv6Token", "IgnoreCarrierLoss"),
        *("KeepConfiguration", "LLDP", "LLMNR", "LinkLocalAddressing", "MulticastDNS"),
        *("NTP", "PrimarySlave"),
    },
}
NETWORKD_KEYS = {("Link", "MTUBytes"): "mtu", ("Link", "MACAddress"): "macaddress"}
# systemd-networkd's words for what netplan's routes can say, and netplan's.
ROUTE_WORDS = {
    **{"Destination": "to", "Gateway": "via", "GatewayOnLink": "on-link", "GatewayOnlink": "on-link"},
    **{"Metric": "metric", "Table": "table", "Type": "type", "Scope": "scope", "PreferredSource": "from"},
    **{"Source": "source", "MTUBytes": "mtu", "InitialCongestionWindow": "congestion-window"},
    **{"InitialAdvertisedReceiveWindow": "advertised-receive-window"},
    **{"TCPAdvertisedMaximumSegmentSize": "advmss"},
    **{"Protocol": "", "IPv6Preference": "", "QuickAck": ""},
}
# NetworkManager's words in routeN_options=.
ROUTE_OPTIONS = {
    **{"advmss": "advmss", "cwnd": "congestion-window", "initrwnd": "advertised-receive-window"},
    **{"mtu": "mtu", "onlink": "on-link", "scope": "scope", "src": "from", "table": "table", "type": "type"},
}
PROFILE_SECTIONS = {
    **{"802-1x": "auth", "bond": "parameters", "bridge": "parameters", "sriov": "virtual-function-count"},
    **dict.fromkeys(("dcb", "ethtool", "tc"), ""),
}
STANZA_OPTIONS = {"mtu": "mtu", "hwaddress": "macaddress", "ethernet-wol": "wakeonlan"}
# Of a bridge that knows VLANs, which netplan has no word for (ifupdown2, as Proxmox has it).
OF_NO_KEY = re.compile("bridge-(vlan-.+|(port-)?p?vids?|access|allow-untagged)")
# What ethtool sets (Debian's package of it, and ifupdown2); netplan has words for these alone.
OF_ETHTOOL = re.compile(
    "(driver|ethernet|ethtool|hardware|offload)-.+|link-(autoneg|duplex|fec|speed)|.+-offload"
)
# Lines that say what is so without them; that a bridge knows VLANs another one says.
BY_DEFAULT = {
    **dict.fromkeys(("ethernet-autoneg", "link-autoneg", "bridge-allow-untagged"), ("on", "yes")),
    "bridge-pvid": ("1",),
}
OFFLOADS = {
    **{"rx": "receive-checksum-offload", "tx": "transmit-checksum-offload"},
    **{"gso": "generic-segmentation-offload", "tso": "tcp-segmentation-offload"},
    **{"gro": "generic-receive-offload", "lro": "large-receive-offload"},
}
OF_CARDS = {"wakeonlan", *OFFLOADS.values()}  # which netplan takes of no bridge, bond or VLAN
SEARCH = "nameservers.search"
NO_TREE = ("stp", False)  # of a bridge's parameters; what systemd-networkd has where there are none
OFF = ("", "0", "no", "n", "f", "false", "off", "none")


def of_netplan(definition):
    """Of a definition in a netplan file, what it passes through to NetworkManager included."""
    found, routes = [], []
    for key, value in definition.items():
        if key == "routes":
            listed = value if isinstance(value, list) else []
            routes = [route(one) for one in listed if isinstance(one, dict) and not is_default(one)]
        elif key == "mtu":
            found += size(key, value)
        elif key == "nameservers" and isinstance(value, dict) and isinstance(value.get("search"), list):
            found += search("nameservers.search", value["search"])
        elif key == "wakeonlan" and isinstance(definition.get("networkmanager"), dict):
            pass  # true in each profile that NetworkManager stores and that does not say no; what it says is below
        elif key == "parameters" and isinstance(value, dict) and value.keys() <= {"stp", "forward-delay"}:
            tree = (
                str(value.get("stp", True)).lower() not in OFF
            )  # which netplan has on beside other parameters
            found += [(key, key, None if tree else NO_TREE)] if value else []
        elif value is False and key in OFFLOADS.values():  # which most cards have on by themselves
            found.append((key, key, value))
        elif key == ADVERTS and str(value).lower() in ("false", "no", "n", "off"):  # netplan takes words, too
            found.append((key, key, False))
        elif key not in REPLACED and value not in (None, False, {}, []):
            plain = isinstance(value, WORDS) and WORD.fullmatch(str(value))
            found.append((key, key, value if plain else None))
    known = {key for key, _, value in found if value != NO_TREE}
    for key, where, value in of_profile(passed_through(definition)):
        if (
            key == "routes"
        ):  # those that netplan does not understand as a whole; it may have the rest of them, too
            routes += [one for one in value if one not in routes]
        elif key not in known:
            found.append((key, f"{where} in networkmanager.passthrough", value))
    return found + ([("routes", "routes", routes)] if routes else [])


def passed_through(definition):
    """{(section, key): value} of what NetworkManager stored and netplan has no word of its own for."""
    stored = definition.get("networkmanager")
    kept = stored.get("passthrough") if isinstance(stored, dict) else None
    # What stands for an empty section, as `proxy._`, is empty, too.
    words = {str(key): str(value) for key, value in (kept if isinstance(kept, dict) else {}).items()}
    return {key.partition(".")[::2]: value for key, value in words.items()}


def of_networkd(text):
    """Of a .network file, but for what it makes on the card or joins it to."""
    found, routes = [], []
    for section, pairs in parts(text):
        if section == "Route":
            known = {ROUTE_WORDS.get(key): value for key, value in pairs if value}
            if None in known:
                others = [key for key, _ in pairs if key not in ROUTE_WORDS]
                found += [(None, f"[Route] {key}=", None) for key in others]
            elif known and not is_default({"to": "default", **known}):
                by_lease = known.get("via", "").startswith("_")  # _dhcp4, whatever that is
                routes.append(None if by_lease else route(known))
        elif section == "RoutingPolicyRule":
            found.append(("routing-policy", f"[{section}]", None))
        elif section in NETWORKD_REPLACED:
            replaced = NETWORKD_REPLACED[section]
            for key, value in pairs if replaced is not None else ():
                if key == "IPv6AcceptRA" and section == "Network":
                    found += (
                        [(ADVERTS, f"[{section}] {key}=", False)] if value and value.lower() in OFF else []
                    )
                elif key == "MTUBytes" and section == "Link":
                    found += size(f"{key}=", value)
                elif key == "Domains":
                    found += search(f"{key}=", value.split())
                elif key not in replaced and value.lower() not in OFF:
                    value = value if WORD.fullmatch(value) else None
                    found.append((NETWORKD_KEYS.get((section, key)), f"[{section}] {key}=", value))
        elif pairs:
            found.append((None, f"[{section}]", None))
    return found + ([("routes", "[Route]", routes)] if routes else [])


def of_profile(said):
    """Of a profile of NetworkManager's; `said`: {(section, key): value}."""
    found, routes = [], []
    for (section, key), value in said.items():
        whole = (PROFILE_SECTIONS.get(section), f"[{section}]", None)
        if (section, key) == ("bridge", "vlan-filtering"):
            found += [("", f"[{section}] {key}=", None)] if value.lower() not in OFF else []
        elif section in PROFILE_SECTIONS:
            found += [whole] if value and whole not in found else []
        elif (key, value) == ("method", "shared"):
            found.append(("", f"[{section}] method=shared", None))
        elif key == "mtu" and value != "0" and section not in ("connection", "ipv6"):
            found += size("mtu=", value)
        elif key == "dns-search":
            found += search(f"{key}=", value.split(";"))
        elif key == "cloned-mac-address" and ":" in value:
            found.append(("macaddress", f"{key}=", value if WORD.fullmatch(value) else None))
        elif section in ("ipv4", "ipv6") and re.fullmatch(r"routes?\d+", key):
            to, via, metric = [*re.split("[,;]", value), "", ""][:3]
            one = {"to": to, **({"via": via} if via else {}), **({"metric": metric} if metric else {})}
            options = said.get((section, f"{key}_options"), "").split(",")
            for word, _, option in (text.partition("=") for text in options if text):
                one[ROUTE_OPTIONS.get(word, word)] = option
            if not is_default(one):
                routes.append(route(one))
        elif (section, key, value) == ("infiniband", "transport-mode", "connected"):
            found.append(("infiniband-mode", f"{key}=", value))
        elif key == "wake-on-lan" and value not in USUAL_WAKING:
            by_packet = True if value == "64" else None  # as netplan has it
            found.append(("wakeonlan", f"{key}=", by_packet))
        elif section in ("ipv4", "ipv6") and re.fullmatch(r"routing-rule\d+", key):
            found.append(("routing-policy", f"[{section}] {key}=", None))
    return found + ([("routes", "the routes", routes)] if routes else [])


def of_stanza(option, words):
    """Of a line of a stanza of ifupdown's; `option` with - for _."""
    value = words[-1] if words else ""
    if option == "mtu":
        return size(option, value)
    if option == "dns-search":
        return search(option, words)
    if option in STANZA_OPTIONS:
        return [(STANZA_OPTIONS[option], option, None)]
    if option.startswith("wpa-"):
        return [("auth", option, None)]
    if OF_ETHTOOL.fullmatch(option) and value not in BY_DEFAULT.get(option, ()):
        key = OFFLOADS.get(option.removeprefix("offload-").removesuffix("-offload"), "")
        return [(key, option, {"on": True, "off": False}.get(value))]
    if value in BY_DEFAULT.get(option, ()):
        return []
    if OF_NO_KEY.fullmatch(option):
        return [("", option, None)] if value.lower() not in OFF else []
    if option in ("bridge-maxwait", "bridge-waitport") or (option, value) == ("bridge-fd", "0"):
        return []  # how long ifup waits; and no delay, which a bridge without a spanning tree has anyway
    if option == "bridge-stp":
        return [("parameters", option, NO_TREE if value.lower() in OFF else ("stp", True))]
    if re.fullmatch("(bond|bridge)-(?!ports|slaves|master|primary).+", option):
        return [("parameters", option, None)]
    return []


def size(where, value):
    """An MTU, if it is not the one that a card has by itself."""
    word = "" if value is None else str(value)
    return [] if word == USUAL_MTU or not word else [("mtu", where, word if word.isdecimal() else None)]


def search(where, domains):
    """The domains in which short names are looked for; ~DOMAIN, which netplan takes too, says but whom to ask."""
    words = [str(domain) for domain in domains if domain]
    return [(SEARCH, where, words if all(map(WORD.fullmatch, words)) else None)] if words else []


def is_default(route):
    to = str(route.get("to") or "default")
    return to in (*DEFAULT_ROUTES, "0.0.0.0", "::") and not route.get("table")


def route(one):
    """A route as an entry has it; None where it says more than that, or what is no word."""
    one = {key: number_or_word(key, value) for key, value in one.items() if key}
    if not one.keys() & {"scope", "type", "via"}:
        one["scope"] = "link"  # which netplan has to be told
    plain = all(isinstance(value, WORDS) and WORD.fullmatch(str(value)) for value in one.values())
    known = plain and set(one) <= {*ROUTE_KEYS}
    return {key: one[key] for key in ROUTE_KEYS if key in one} if known else None


def number_or_word(key, value):
    if key == "on-link":
        return str(value).lower() not in OFF
    return int(value) if str(value).isdecimal() else value


def cure(key, value):
    """What to write into the entry for a setting."""
    if key == SEARCH:
        return f"nameservers: {{addresses: […], search: [{', '.join(value or ['…'])}]}}"
    if isinstance(value, tuple):  # one of several
        return f"options: {{{key}: {{{value[0]}: {shown(value[1])}, …}}}}"
    if isinstance(value, list) and None not in value:
        return f"{key}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()}"
    if value is None or isinstance(value, list):
        return f"{key} {'' if key in ('routes', 'mtu') else 'under options '}in netplan's words"
    return f"mtu: {value}" if key == "mtu" else f"options: {{{key}: {shown(value)}}}"


def shown(value):
    return str(value).lower() if isinstance(value, bool) else f"'{value}'" if ":" in str(value) else value
