"""What listens on a host, and which firewall it has: the input of the filter firewall_plan."""

import contextlib
import fnmatch
import functools
import glob
import ipaddress
import json
import os
import re
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import (
    active,
    from_elsewhere,
    interfaces,
    sockets,
    ssh_logins,
    ssh_ports,
    ssh_session,
)

DOCUMENTATION = r"""
module: firewall_survey
short_description: Read what listens on this host and which firewalls are active
description: Reads only.
options:
  peers:
    description: Addresses of the cluster's other hosts; a tunnel by which one of them is reached is to stay open.
    type: list
    elements: str
    default: []
  hosts:
    description: >-
      One address of each of those hosts, the cluster's, with the interfaces by which it will come, where they are
      known; a packet filter of somebody's own that shuts one out is told.
    type: dict
    default: {}
"""


FILE = "/etc/nftables.d/trainyard.nft"
GUARD = "/var/lib/trainyard-guard"  # where the guard keeps what is not confirmed yet
OTHERS_OF_THE_KERNEL = {4789, 4791, 8472}  # VXLAN, RoCE, Linux' older VXLAN
# iptables-save: -p tcp … --dport 80 -j DNAT --to-destination 172.17.0.2:80; nft: tcp dport 80 … dnat to 172.17.0.2:80
# To another port of the host: -p tcp … --dport 80 -j REDIRECT --to-ports 8080; tcp dport 80 … redirect to :8080
PASSED_ON = re.compile(
    r"\b(tcp|udp)\b[^\n]*?\bdport (\d+)\b[^\n]*?"
    r"(?:--to-destination|dnat (?:ip6? )?to|-j REDIRECT --to-ports|redirect to) (\S+)"
)
# The words of iptables-save: -A INPUT -s 10.0.0.0/24 ! -i lo -p tcp -m comment --comment "some words" -j ACCEPT
IPTABLES = re.compile(r'"(?:\\.|[^"\\])*"|\S+')
# Of its matches, those whose options tell all that they look at.
READ_MATCHES = ("addrtype", "comment", "conntrack", "iprange", "pkttype", "state", "tcp", "udp")
VERDICTS = ("accept", "drop", "reject", "jump", "goto", "return")  # nft's
# What is let in, or not, by these is but a part of what a peer says: some ports, kinds of packets, or so many of them.
IN_PART = re.compile(
    r"-f$|--(?:[ds]?ports?|ct\w+port|tcp-|syn|icmp|limit|hashlimit|connlimit|quota|rcheck|update)"
)
NFT_IN_PART = {"limit", "quota", "ct count", "xt"}  # the last is iptables', which says better what it is
# The headers before those of ports; ip6 is none of a peer's, whose address is IPv4's.
BEFORE_PORTS = {"ip", "ether", "vlan", "nh", "ll"}
# What firewall_allow has opened, as `nft list` writes the rules of firewall_plan.
OPENED = re.compile(
    r"^\s*(?:ip6? saddr (?:\{[^}]*\}|\S+) )?(tcp|udp) dport (\d+)(?:-(\d+))? accept$", re.MULTILINE
)


# Where slurmd has its settings: Debian's, Ubuntu's of old, and what the controller itself hands out.
SLURM = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
    "/var/lib/slurm/slurmd/conf-cache/slurm.conf",
)
CONTROLLER = re.compile(
    r"^\s*(?:SlurmctldHost|ControlMachine)\s*=\s*([^\s(#]+)(?:\(([^)\s]+)\))?", re.MULTILINE | re.IGNORECASE
)


def listening(found):
    """[{proto, port, address, link, process}] of those of the host's sockets() that other machines could reach."""
    return [
        {
            **{key: item[key] for key in ("proto", "port", "address", "link")},
            "process": item["owners"][0][0] if item["owners"] else "an unknown process",
        }
        for item in found
        if item["state"] in ("LISTEN", "UNCONN")
        and not item["address"].startswith("127.")
        and item["address"] != "::1"
    ]


def slurm_controllers(texts):
    """{name, addresses} of each other machine on which Slurm's controller may be, by its settings (`texts`)."""
    found = []
    for name, address in (one for text in texts for one in CONTROLLER.findall(text)):
        with contextlib.suppress(OSError):  # a name that nobody knows
            told = socket.getaddrinfo(address or name, None, type=socket.SOCK_STREAM)
            addresses = sorted({one[4][0] for one in told})
            one = {"name": name, "addresses": addresses}
            if one not in found and not any(map(is_own, addresses)):
                found.append(one)
    return found


def is_own(address):
    """Whether this host has that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:  # as where there is no IPv6
        return False
    return True


def slurm_settings():
    """What is in those of Slurm's files that are there."""
    for path in SLURM:
        with contextlib.suppress(OSError), open(path, errors="replace") as source:
            yield source.read()


def published(module):
    """[{proto, port, process}] of the ports that are passed on to containers, or to other ports of the host."""
    found = {}
    for command in ("iptables-save -t nat", "ip6tables-save -t nat", "nft list ruleset"):
        if module.get_bin_path(command.split()[0]):
            _, out, _ = module.run_command(command.split())
            for proto, port, target in PASSED_ON.findall(out):
                target = re.sub(r"^:?(?=[\d-]+$)", "port ", target)  # 8080 or, as nft has it, :8080
                found.setdefault((proto, int(port)), f"passed on to {target}")
    return [{"proto": proto, "port": port, "process": name} for (proto, port), name in sorted(found.items())]


def loaded(module):
    """Our rules in the kernel: {table, unit (active, so that they come again with a restart of nftables), as_written,
    opened}.

    as_written: whether they are what our file yields, in a network of its own; somebody may have added one by hand.
    opened: [{proto, first, last}], the ports that they open to others than the peers, besides SSH's.
    """
    if not module.get_bin_path("nft"):
        return {"table": False, "unit": False, "as_written": False, "opened": []}
    rc, out, _ = module.run_command(["nft", "list", "table", "inet", "trainyard"])
    unit = active(module.run_command, ["trainyard-firewall"])["trainyard-firewall"]
    opened = [
        {"proto": proto, "first": int(first), "last": int(last or first)}
        for proto, first, last in OPENED.findall(out)
    ]
    again = ["unshare", "--net", "sh", "-c", f"nft -f {FILE} && nft list table inet trainyard"]
    failed, yields, _ = module.run_command(again) if module.get_bin_path("unshare") else (1, "", "")
    return {
        "table": rc == 0 and "policy drop" in out,
        "unit": unit,
        "as_written": bool(failed) or words(yields) == words(out),
        "opened": opened,
    }


def words(rules):
    """The words of listed rules, without an order: that of a set's elements is nobody's."""
    return sorted(re.findall(r"[^\s,]+", rules))


def ways(module, session, clients):
    """Those of the host's interfaces() by which `clients` come, with what is in them where they are bridges.

    The way back to a client leads there, or it has the session's address.
    """
    back = set().union(*(links_to(module, client) for client in clients))
    links = interfaces(module.run_command)
    back |= {link["name"] for link in links if session and session["address"] in own_addresses(link)}
    return [link for link in links if back & {link["name"], link["master"]}]


def own_addresses(link):
    return [address.partition("/")[0] for address in link["addresses"]]


def tunnels(module, session, clients, found):
    """[{link, kind, ports: [{proto, port}]}] of the tunnels to this host by which `clients` come, SSH's or peers;
    `ports`: where it takes in who comes by it, None where that is not known.

    The way to them would be shut with those ports: at first unnoticed, as long as what was said before is remembered.
    """
    come = []
    for link in ways(module, session, clients):
        if link["kind"] == "wireguard":
            ports = wireguard_ports(module, link["name"], found)
        elif link["kind"] == "tun" or str(link["kind"]).startswith("ovpn"):  # ovpn: OpenVPN's, in the kernel
            ports = served_ports(link, found)
        else:
            continue
        if ports is not None or not link["master"]:  # what tells none in a bridge is a virtual machine's
            come.append({"link": link["name"], "kind": link["kind"], "ports": ports})
    return come


def wireguard_ports(module, link, found):
    if module.get_bin_path("wg"):
        rc, out, _ = module.run_command(["wg", "show", link, "listen-port"])
        if rc == 0 and out.strip().isdigit():
            return [{"proto": "udp", "port": int(out)}]
    # networkd and NetworkManager do without that program: the kernel's own sockets belong to no process.
    kernels = {
        one["port"] for one in found if one["proto"] == "udp" and not one["owners"]
    } - OTHERS_OF_THE_KERNEL
    return [{"proto": "udp", "port": port} for port in kernels] if len(kernels) == 1 else None


def served_ports(link, found, proc="/proc"):
    """The ports at which the program behind a tun or tap device is spoken to; None where it has no socket.

    Of TCP only where somebody is in: it may listen elsewhere for those who manage it. A program that goes to a VPN's
    server elsewhere needs no port: it speaks first, and answers are let in. (If it uses UDP, its own shows, and stays.)
    """
    holders = device_holders(link["name"], proc)
    outside = [one for one in found if not own_to_host(one["address"], link)]
    mine = [
        one
        for one in outside
        if any(
            pid in holders if link["kind"] == "tun" else name == "openvpn"
            for name, pid in one["owners"]
            if not name.startswith("qemu")
        )
    ]
    listened = {(one["proto"], one["port"]) for one in outside if one["state"] in ("LISTEN", "UNCONN")}
    ports = {
        (one["proto"], one["port"])
        for one in mine
        if one["state"] == "UNCONN" or (one["state"] == "ESTAB" and (one["proto"], one["port"]) in listened)
    }
    return [{"proto": proto, "port": port} for proto, port in sorted(ports)] if mine else None


def own_to_host(address, link):
    """Whether nobody from outside speaks to that address but by the tunnel itself."""
    return address.startswith("127.") or address == "::1" or address in own_addresses(link)


def device_holders(link, proc):
    """The ids of the processes that have a tun or tap device open, as the kernel tells of their files."""
    pids = set()
    for path in glob.glob(f"{proc}/[0-9]*/fd/*"):
        pid, number = path.split("/")[-3], path.split("/")[-1]
        with contextlib.suppress(OSError):  # it ends, or closes it, meanwhile
            if os.readlink(path) == "/dev/net/tun":
                with open(f"{proc}/{pid}/fdinfo/{number}") as source:
                    if f"iff:\t{link}" in source.read().splitlines():
                        pids.add(int(pid))
    return pids


def ipsec(module, found):
    """Whether the host has IPsec: keys in the kernel, or somebody who listens to agree on some.

    Which addresses it carries does not show from these; a port above 1023 (4500) anybody could take.
    """
    _, out, _ = module.run_command(["ip", "xfrm", "state", "count"])
    return bool(re.search(r"SAD count [1-9]", out)) or any(
        (one["proto"], one["state"], one["port"]) == ("udp", "UNCONN", 500) for one in found
    )


def ufw_enabled(module):
    """Whether ufw is there and set to be on: its unit is active on machines where it does nothing, too.

    Its settings stay where apt has removed it.
    """
    if not module.get_bin_path("ufw"):
        return False
    try:
        with open("/etc/ufw/ufw.conf") as source:
            return any(line.strip().lower() == "enabled=yes" for line in source)
    except OSError:
        return False


def members(right, sets):
    """The single values that the right side of a rule's match names, as nft has them in JSON.

    sets: elements by a set's name.
    """
    if isinstance(right, dict) and "elem" in right:
        return members(right["elem"]["val"], sets)
    if isinstance(right, dict) and ("set" in right or "|" in right):
        return members(right["set" if "set" in right else "|"], sets)
    if isinstance(right, str) and right.startswith("@"):
        return members(sets.get(right[1:], []), sets)
    if isinstance(right, list):
        return [value for one in right for value in members(one, sets)]
    return [right]


def among(address, value):
    """Whether an address is `value`, or in it: a range or a network."""
    try:
        one = ipaddress.ip_address(address)
        if isinstance(value, dict) and "range" in value:
            first, last = map(ipaddress.ip_address, value["range"])
            return first.version == one.version and first <= one <= last
        if isinstance(value, dict):
            value = f"{value['prefix']['addr']}/{value['prefix']['len']}"
        return one in ipaddress.ip_network(value, strict=False)
    except (KeyError, TypeError, ValueError):  # what no address is, as the name of a host
        return False


def to_a_group(value):
    """Whether what goes to that address, or network, goes to many hosts, or to the sender itself."""
    try:
        if isinstance(value, dict):
            value = f"{value['prefix']['addr']}/{value['prefix']['len']}"
        network = ipaddress.ip_network(value, strict=False)
    except (KeyError, TypeError, ValueError):
        return False
    return network.is_multicast or network.is_loopback or str(network) == "255.255.255.255/32"


def all_of(found):
    """True where all of them are, False where one is not; else None: not known."""
    found = list(found)
    return False if False in found else None if None in found else True


def any_of(found):
    """True where one of them is, False where none is; else None: not known."""
    none = all_of(one if one is None else not one for one in found)
    return none if none is None else not none


def in_part(left):
    """Whether a match is for some of what a peer says, or none of it, whatever its right side is."""
    if isinstance(left, list):
        return any(map(in_part, left))
    if not isinstance(left, dict):
        return False
    payload = left.get("payload")
    if payload is not None and BEFORE_PORTS.isdisjoint((payload.get("protocol"), payload.get("base"))):
        return True
    return str(left.get("ct", {}).get("key")).startswith("proto-") or any(map(in_part, left.values()))


def has(left, value, peer, links):
    """Whether what a match looks at, `left`, has that value as a peer begins to speak; None where it is not known."""
    if isinstance(value, dict) and value.keys().isdisjoint(("concat", "prefix", "range")):
        return None
    if "concat" in left:
        values = value.get("concat", []) if isinstance(value, dict) else []
        if len(values) != len(left["concat"]):
            return None
        pairs = zip(left["concat"], values, strict=True)
        return all_of(has(part, one, peer, links) for part, one in pairs)
    ct, key = left.get("ct", {}).get("key"), left.get("meta", {}).get("key")
    payload, fib = left.get("payload", {}), left.get("fib", {})
    field = payload.get("protocol"), payload.get("field")
    if ct == "state":
        return value == "new"
    if ct == "status":
        return False  # as dnat, seen-reply: of what goes on
    if key == "l4proto" or field == ("ip", "protocol"):
        return value == "tcp"  # by which the ranks speak
    if key == "nfproto":
        return value == "ipv4"
    if key == "protocol" or field == ("ether", "type"):
        return value == "ip"
    if key in ("iif", "iifname"):
        return any(fnmatch.fnmatchcase(link, str(value)) for link in links)
    if key == "pkttype":
        return value in ("host", "unicast")
    if field == ("ip", "saddr"):
        return among(peer, value)
    if field == ("ip", "daddr") and to_a_group(value):
        return False
    if fib.get("result") == "type" and fib.get("flags") in ("daddr", ["daddr"]):
        return value == "local"
    return None


def concerns(words, peer, links, sets):
    """Whether a rule's matches are met by all that a peer, which comes by one of `links`, begins to say.

    None where that is not known, as of a mark.
    """

    def met(word):
        if "match" not in word:
            return False if word.keys() & NFT_IN_PART else None
        match = word["match"]
        left, op = match.get("left", {}), match.get("op")
        if in_part(left):
            return False
        if op not in ("==", "!=", "in"):
            return None
        is_one = any_of(has(left, one, peer, links) for one in members(match.get("right"), sets))
        return is_one if is_one is None or op != "!=" else not is_one

    return all_of(map(met, words))


def verdicts(rules, start, met):
    """What a chain may come to, of the verdicts of its rules; None where its end is reached.

    rules: by chain (word, target, rule), word being one of VERDICTS; what is no chain of theirs has no verdict. met:
    whether a rule is met; None where that is not known.
    """
    known = {}

    def of(chain):
        if chain not in known:
            known[chain] = set(walked(chain))
        return known[chain]

    def walked(chain):
        for word, target, rule in rules.get(chain, []):
            is_met = met(rule)
            if is_met is False:
                continue
            led = of(target) if word in ("jump", "goto") else {None if word == "return" else word}
            back = word == "jump" and None in led
            yield from led - {None} if back else led
            if is_met and not back:
                return
        yield None

    return of(start)


def lets_in(rules, chain, policy, met):
    """Whether a chain lets a peer in; None where only a rule of which that is not known could."""
    for told, surely in ((True, lambda rule: met(rule) is True), (None, met)):
        if "accept" in {one or policy for one in verdicts(rules, chain, surely)}:
            return told
    return False


def nft_rules(words, place, maps):
    """(word, target, matches) of a rule, by its words in JSON: one for each element of a verdict map."""
    word = next(iter(words[-1]), "") if words else ""
    if word == "vmap":
        key, data = words[-1]["vmap"]["key"], words[-1]["vmap"]["data"]
        pairs = maps.get(data[1:], []) if isinstance(data, str) else data.get("set", [])
        others = [value for value, _ in pairs if members(value, {}) != ["*"]]
        for value, verdict in pairs:
            op, right = ("==", value) if value in others else ("!=", others)
            match = {"match": {"op": op, "left": key, "right": right}}
            yield from nft_rules([*words[:-1], match, verdict], place, maps)
    elif word in VERDICTS:
        target = (*place, words[-1][word]["target"]) if word in ("jump", "goto") else None
        yield word, target, words[:-1]


def shut_by_nft(text, peers):
    """What `nft -j list ruleset` has for each chain of others: [(chain, peers shut out, peers that may be)].

    peers: by address the interfaces by which it comes. Of IPv4's input: what one such chain drops no other can let in.
    """
    parts = json.loads(text or "{}").get("nftables", [])
    policies, rules, sets, maps = {}, {}, {}, {}
    for chain in (part["chain"] for part in parts if "chain" in part):
        ours = (chain["family"], chain["table"]) == ("inet", "trainyard")
        if chain.get("hook") == "input" and chain["family"] in ("ip", "inet") and not ours:
            policies[chain["family"], chain["table"], chain["name"]] = chain.get("policy", "accept")
    for kind, known in (("set", sets), ("map", maps)):
        for one in (part[kind] for part in parts if kind in part):
            known.setdefault((one["family"], one["table"]), {})[one["name"]] = one.get("elem", [])
    for rule in (part["rule"] for part in parts if "rule" in part):
        words = [word for word in rule.get("expr", []) if not word.keys() & {"counter", "log"}]
        place = rule["family"], rule["table"]
        rules.setdefault((*place, rule["chain"]), []).extend(nft_rules(words, place, maps.get(place, {})))

    def judged(chain, peer):
        known = sets.get(chain[:2], {})
        return lets_in(rules, chain, policies[chain], lambda words: concerns(words, peer, peers[peer], known))

    return [
        (
            f"nftables' chain {chain[2]} of table {chain[0]} {chain[1]}",
            *sorted_out(peers, functools.partial(judged, chain)),
        )
        for chain in policies
    ]


def sorted_out(peers, judged):
    """(peers that are shut out, peers that may be), as lets_in says."""
    found = {peer: judged(peer) for peer in peers}
    return tuple([peer for peer in peers if found[peer] is outcome] for outcome in (False, None))


def iptables_options(line):
    """[(whether it is negated, option, arguments)] of a rule as iptables-save writes it."""
    found, negated = [], False
    for word in IPTABLES.findall(line):
        if word == "!":
            negated = True
        elif word.startswith("-"):
            found.append((negated, word, []))
            negated = False
        elif found:
            found[-1][2].append(word)
    return found


def iptables_concerns(options, peer, links):
    """As `concerns`, of a rule of iptables'."""

    def has_it(option, value):
        if option == "-s":
            return among(peer, value)
        if option == "-d":
            return False if to_a_group(value) else None
        if option == "-i":
            return any(fnmatch.fnmatchcase(link, value.replace("+", "*")) for link in links)
        if option == "-p":
            return value in ("all", "tcp")  # by which the ranks speak
        if option in ("--ctstate", "--state"):
            return "NEW" in value.split(",")
        if option == "--ctstatus":
            return False
        if option == "--src-range":
            return among(peer, {"range": value.split("-")})
        if option == "--dst-type":
            return "LOCAL" in value.split(",")
        if option == "--pkt-type":
            return value == "unicast"
        return None

    def met(negated, option, arguments):
        value = arguments[0] if arguments else ""
        if IN_PART.match(option):
            return False
        if option == "--comment" or (option == "-m" and value in READ_MATCHES):
            return True
        found = has_it(option, value)
        return found if found is None or not negated else not found

    return all_of(met(*one) for one in options)


def shut_by_iptables(text, peers):
    """The same of `iptables-save -t filter`."""
    policy = (re.search(r"^:INPUT (\w+)", text, re.MULTILINE) or ["", "ACCEPT"])[1].lower()
    rules = {}
    for line in text.splitlines():
        (_, first, chain), *options = iptables_options(line) or [(False, "", [])]
        ends = [place for place, (_, option, _) in enumerate(options) if option in ("-j", "-g")]
        if first != "-A" or not ends:
            continue
        _, how, (target, *_) = options[ends[0]]
        word = {"-j": "jump", "-g": "goto"}[how]
        if target in ("ACCEPT", "DROP", "REJECT", "RETURN"):
            word = target.lower()
        rules.setdefault(chain[0], []).append((word, target, options[: ends[0]]))

    def judged(peer):
        met = functools.partial(iptables_concerns, peer=peer, links=peers[peer])
        return lets_in(rules, "INPUT", policy, met)

    return [("iptables' chain INPUT", *sorted_out(peers, judged))]


def links_to(module, peer):
    """The names of the interfaces by which the host reaches an address, and so by which it comes."""
    rc, out, _ = module.run_command(["ip", "-json", "route", "get", peer])
    return {one.get("dev", "") for one in json.loads(out)} if rc == 0 else set()


def shut(module, hosts):
    """What packet filters other than ours shut out of the cluster's other hosts: {shut: [words], may_shut: [words]}.

    Of whichever program they are. hosts: by address the interfaces by which it will come, as far as that is known; else
    the way to it tells. may_shut: what lets it in at most by a match that is not read here.
    """
    told = {"shut": [], "may_shut": []}
    if not hosts:
        return told
    peers = {host: set(links) or links_to(module, host) for host, links in hosts.items()}
    found, shown = [], ""
    if module.get_bin_path("iptables-save"):
        shown = module.run_command(["iptables-save", "-t", "filter"])[1]
        found += shut_by_iptables(shown, peers)
    if module.get_bin_path("nft"):
        # nft shows what iptables has made, too, as ip filter, and not all of it in words of its own.
        found += [
            one
            for one in shut_by_nft(module.run_command(["nft", "-j", "list", "ruleset"])[1], peers)
            if not (":INPUT " in shown and one[0].endswith(" INPUT of table ip filter"))
        ]
    for chain, *outs in found:
        for key, does, out in zip(told, ("shuts out", "may shut out"), outs, strict=True):
            if out:
                told[key].append(f"{chain} {does} {out[0]}" + f" and {len(out) - 1} more" * (len(out) > 1))
    return told


def main():
    spec = {
        "peers": {"type": "list", "elements": "str", "default": []},
        "hosts": {"type": "dict", "default": {}},
    }
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    try:
        found = sockets(module.run_command)
        ports = ssh_ports(module.run_command, found)
        session = ssh_session()
        # Who must not be shut out: the controller; where that is this machine itself, whoever is logged in to it.
        outside = session and from_elsewhere(session["client"], session["address"])
        clients = [session["client"]] if outside else ssh_logins(found, ports)
        survey = {
            "listening": listening(found),
            "published": published(module),
            "slurm_controllers": slurm_controllers(slurm_settings()),
            "ssh_ports": ports,
            "session": session,
            "tunnels": tunnels(module, session, [*clients, *module.params["peers"]], found),
            "ipsec": ipsec(module, found),
            "clients": clients,
            "ufw": ufw_enabled(module),
            "firewalld": active(module.run_command, ["firewalld"])["firewalld"],
            **shut(module, module.params["hosts"]),
            "bridges": sorted(name for name in os.listdir("/sys/class/net") if name.startswith("br-")),
            "nft": bool(module.get_bin_path("nft")),
            "loaded": loaded(module),
            "armed": sorted(glob.glob(f"{GUARD}/[a-z]*/manifest.json")),
        }
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"this host's sockets cannot be read: {error}")
    module.exit_json(changed=False, survey=survey)


if __name__ == "__main__":
    main()
