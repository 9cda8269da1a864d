"""Whether packet filters other than ours let the cluster's hosts in, by their rules as nft and iptables write them, and
what goes to them out.

A chain may let a peer in, shut it out, or do either by a match that is not read here: then nothing is said for sure.
"""

from __future__ import annotations

import fnmatch
import functools
import ipaddress
import json
import re

# The words of iptables-save: -A INPUT -s 10.0.0.0/24 ! -i lo -p tcp -m comment --comment "some words" -j ACCEPT
IPTABLES = re.compile(r'"(?:\\.|[^"\\])*"|\S+')
# Of its matches, those whose options tell all that they look at.
READ_MATCHES = ("addrtype", "comment", "conntrack", "iprange", "multiport", "pkttype", "state", "tcp", "udp")
VERDICTS = ("accept", "drop", "reject", "queue", "jump", "goto", "return")  # nft's
# iptables' targets that are verdicts. What is queued some program lets in, or does not.
TARGETS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "reject",
    "RETURN": "return",
    "NFQUEUE": "queue",
    "QUEUE": "queue",
}
# The hooks by which what a peer says gets here, and what this host says to it goes; by iptables' words the chains.
INWARD, OUTWARD = ("ingress", "prerouting", "input"), ("output", "postrouting", "egress")
# What is let in, or not, by these is but a part of what a peer says: some ports, kinds of packets, or so many of them.
IN_PART = re.compile(
    r"-f$|--(?:[ds]?ports?|ct\w+port|tcp-|syn|icmp|limit(?!-iface)|hashlimit|connlimit|quota|rcheck|update)"
)
NFT_IN_PART = {"limit", "quota", "ct count", "xt"}  # the last is iptables', which says better what it is
# The ports from which the kernel takes those that nobody names, as ranks have them; and how iptables calls ports.
UNNAMED = (32768, 60999)
PORTS = re.compile("--(destination-|source-|[ds])?ports?$")
# The headers before those of ports; ip6 is none of a peer's, whose address is IPv4's.
BEFORE_PORTS = {"ip", "ether", "vlan", "nh", "ll"}


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


def network_of(value):
    """A network, by itself or as nft has it in JSON; raises KeyError, TypeError or ValueError of what is none."""
    if isinstance(value, dict):
        value = f"{value['prefix']['addr']}/{value['prefix']['len']}"
    return ipaddress.ip_network(value, strict=False)


def among(address, value):
    """Whether an address is `value`, or in it: a range or a network."""
    try:
        one = ipaddress.ip_address(address)
        if isinstance(value, dict) and "range" in value:
            first, last = map(ipaddress.ip_address, value["range"])
            return first.version == one.version and first <= one <= last
        return one in network_of(value)
    except (KeyError, TypeError, ValueError):  # what no address is, as the name of a host
        return False


def to_a_group(value):
    """Whether what goes to that address, or network, goes to many hosts, or to the sender itself."""
    try:
        network = network_of(value)
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


def ports_met(ranges, negated):
    """Whether a match of ports, or of all others, is met by what a peer says; None where by most of it."""
    most = any(first <= UNNAMED[0] and last >= UNNAMED[1] for first, last in ranges)
    return (None, False)[negated] if most else negated


def nft_ports_met(match, sets):
    """The same of a rule's match, in nft's words."""
    op, values = match.get("op"), members(match.get("right"), sets)
    if op in (">", ">=", "<", "<=") and isinstance(values[0], int):
        return ports_met([(values[0], 65535) if op[0] == ">" else (0, values[0])], negated=False)
    ranges = [one["range"] if isinstance(one, dict) and "range" in one else [one, one] for one in values]
    if op not in ("==", "!=") or not all(isinstance(port, int) for pair in ranges for port in pair):
        return False
    return ports_met(ranges, negated=op == "!=")


def has(left, value, peer, links, out=False):
    """Whether what a match looks at, `left`, has that value as a peer begins to speak; None where it is not known.

    out: as this host begins to speak to the peer.
    """
    if isinstance(value, dict) and value.keys().isdisjoint(("concat", "prefix", "range")):
        return None
    if "concat" in left:
        values = value.get("concat", []) if isinstance(value, dict) else []
        if len(values) != len(left["concat"]):
            return None
        pairs = zip(left["concat"], values, strict=True)
        return all_of(has(part, one, peer, links, out) for part, one in pairs)
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
    if key in (("oif", "oifname") if out else ("iif", "iifname")):
        return any(fnmatch.fnmatchcase(link, str(value)) for link in links)
    if key in ("iif", "iifname"):
        return False  # it comes by none
    if key == "pkttype" and not out:
        return value in ("host", "unicast")
    if field == ("ip", "daddr" if out else "saddr"):
        return among(peer, value)
    if field == ("ip", "daddr") and to_a_group(value):
        return False
    if fib.get("result") == "type" and fib.get("flags") in ("daddr", ["daddr"]):
        return value == ("unicast" if out else "local")
    return None


def is_state(match):
    return isinstance(match.get("left"), dict) and match["left"].get("ct", {}).get("key") == "state"


def is_syn(match):
    """Whether a match is for what opens a connection of TCP: of some flags SYN alone."""
    masked = match["left"].get("&", [None]) if isinstance(match.get("left"), dict) else [None]
    flags = masked[0].get("payload", {}) if isinstance(masked[0], dict) else {}
    field = flags.get("protocol"), flags.get("field")
    return (field, match.get("op"), match.get("right")) == (("tcp", "flags"), "==", "syn")


def concerns(words, peer, links, sets, out=False):
    """Whether a rule's matches are met by all that a peer, which comes by one of `links`, begins to say; or, `out`, by
    all that is said to it.

    None where that is not known, as of a mark.
    """
    opens = False

    def met(word):
        if "match" not in word:
            return False if word.keys() & NFT_IN_PART else None
        match = word["match"]
        left, op = match.get("left", {}), match.get("op")
        if opens and is_syn(match):
            return True
        payload = left.get("payload", {}) if isinstance(left, dict) else {}
        if (
            "of_map" not in match  # in which each port has its own verdict
            and payload.get("protocol") in ("tcp", "th")
            and payload.get("field") in ("dport", "sport")
        ):
            return nft_ports_met(match, sets)
        if in_part(left):
            return False
        if op not in ("==", "!=", "in"):
            return None
        is_one = any_of(has(left, one, peer, links, out) for one in members(match.get("right"), sets))
        return is_one if is_one is None or op != "!=" else not is_one

    opens = any(is_state(word.get("match", {})) and met(word) for word in words)
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
    """Whether a chain lets a peer in; None where only a rule of which that is not known could, or a program (queue)."""
    surely = {one or policy for one in verdicts(rules, chain, lambda rule: met(rule) is True)}
    if "accept" in surely:
        return True
    perhaps = surely | {one or policy for one in verdicts(rules, chain, met)}
    return False if perhaps.isdisjoint(("accept", "queue")) else None


def goes_on(word):
    """Whether a statement only notes something: what meets the rule up to there meets it."""
    noted = word.get("set")
    return bool(word.keys() & {"counter", "log", "mangle", "notrack"}) or (
        bool(noted) and "stmt" not in noted
    )


def nft_rules(words, place, maps):
    """(word, target, matches) of a rule, by its words in JSON: one for each element of a verdict map."""
    word = next(iter(words[-1]), "") if words else ""
    if word == "vmap":
        key, data = words[-1]["vmap"]["key"], words[-1]["vmap"]["data"]
        pairs = maps.get(data[1:], []) if isinstance(data, str) else data.get("set", [])
        others = [value for value, _ in pairs if members(value, {}) != ["*"]]
        for value, verdict in pairs:
            op, right = ("==", value) if value in others else ("!=", others)
            match = {"match": {"op": op, "left": key, "right": right, "of_map": True}}
            yield from nft_rules([*words[:-1], match, verdict], place, maps)
    elif word in VERDICTS:
        target = (*place, words[-1][word]["target"]) if word in ("jump", "goto") else None
        yield word, target, words[:-1]


def shut_by_nft(text, peers):
    """What `nft -j list ruleset` has for each chain of others: [(chain, peers shut out, peers that may be)].

    peers: by address the interfaces by which it comes. Of IPv4's, in and out: what one such chain drops no other can
    let through.
    """
    parts = json.loads(text or "{}").get("nftables", [])
    bases, rules, sets, maps = {}, {}, {}, {}
    for chain in (part["chain"] for part in parts if "chain" in part):
        ours = (chain["family"], chain["table"]) == ("inet", "trainyard")
        judged = chain.get("hook") in INWARD + OUTWARD and chain["family"] in ("ip", "inet", "netdev")
        if judged and not ours:
            bases[chain["family"], chain["table"], chain["name"]] = chain
    for kind, known in (("set", sets), ("map", maps)):
        for one in (part[kind] for part in parts if kind in part):
            known.setdefault((one["family"], one["table"]), {})[one["name"]] = one.get("elem", [])
    for rule in (part["rule"] for part in parts if "rule" in part):
        words = [word for word in rule.get("expr", []) if not goes_on(word)]
        place = rule["family"], rule["table"]
        rules.setdefault((*place, rule["chain"]), []).extend(nft_rules(words, place, maps.get(place, {})))

    def judged(place, peer):
        known, base = sets.get(place[:2], {}), bases[place]
        devices = base.get("dev", [])
        if devices and peers[peer].isdisjoint([devices] if isinstance(devices, str) else devices):
            return True  # it sees another card
        out = base["hook"] in OUTWARD
        met = functools.partial(concerns, peer=peer, links=peers[peer], sets=known, out=out)
        return lets_in(rules, place, base.get("policy", "accept"), met)

    return [
        (
            f"nftables' chain {place[2]} of table {place[0]} {place[1]}"
            + ("" if base["hook"] == "input" else f" (hook {base['hook']})"),
            *sorted_out(peers, functools.partial(judged, place)),
        )
        for place, base in bases.items()
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


def iptables_concerns(options, peer, links, out=False):
    """As `concerns`, of a rule of iptables'."""
    opens = False

    def has_it(option, value):
        if option == ("-d" if out else "-s"):
            return among(peer, value)
        if option == "-d":
            return False if to_a_group(value) else None
        if option == ("-o" if out else "-i"):
            return any(fnmatch.fnmatchcase(link, value.replace("+", "*")) for link in links)
        if option == "-p":
            return value in ("all", "tcp")  # by which the ranks speak
        if option in ("--ctstate", "--state"):
            return "NEW" in value.split(",")
        if option == "--ctstatus":
            return False
        if option == "--src-range" and not out:
            return among(peer, {"range": value.split("-")})
        if option == "--dst-range" and out:
            return among(peer, {"range": value.split("-")})
        if option == "--dst-type":
            return ("UNICAST" if out else "LOCAL") in value.split(",")
        if option == "--pkt-type" and not out:
            return value == "unicast"
        return None

    def met(negated, option, arguments):
        value = arguments[0] if arguments else ""
        if PORTS.match(option):
            ranges = [one.split(":") for one in value.split(",")]
            told = all(port.isdigit() for pair in ranges for port in pair)
            return told and ports_met([(int(pair[0]), int(pair[-1])) for pair in ranges], negated)
        if opens and (option == "--syn" or (option == "--tcp-flags" and arguments[1:] == ["SYN"])):
            return not negated
        if IN_PART.match(option):
            return False
        if option == "--comment" or (option == "-m" and value in READ_MATCHES):
            return True
        found = has_it(option, value)
        return found if found is None or not negated else not found

    opens = any(
        option in ("--ctstate", "--state") and met(no, option, words) for no, option, words in options
    )
    return all_of(met(*one) for one in options)


def iptables_chains(text):
    """{(table, chain): policy} of those that have one, in what `iptables-save` says; of no table's name, filter."""
    found, table = {}, "filter"
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif told := re.match(r":(\S+) (ACCEPT|DROP)\b", line):
            found[table, told[1]] = told[2].lower()
    return found


def shut_by_iptables(text, peers, whose="iptables'"):
    """The same of `iptables-save`; whose: of which of the two that may be there."""
    policies = {("filter", "INPUT"): "accept", **iptables_chains(text)}
    rules, table = {}, "filter"
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        (_, first, chain), *options = iptables_options(line) or [(False, "", [])]
        ends = [place for place, (_, option, _) in enumerate(options) if option in ("-j", "-g")]
        if first != "-A" or not ends:
            continue
        _, how, (target, *_) = options[ends[0]]
        word = TARGETS.get(target, {"-j": "jump", "-g": "goto"}[how])
        rules.setdefault((table, chain[0]), []).append((word, (table, target), options[: ends[0]]))

    def judged(place, peer):
        out = place[1].lower() in OUTWARD
        met = functools.partial(iptables_concerns, peer=peer, links=peers[peer], out=out)
        return lets_in(rules, place, policies[place], met)

    return [
        (
            f"{whose} chain {chain}" + (f" of table {table}" if table != "filter" else ""),
            *sorted_out(peers, functools.partial(judged, (table, chain))),
        )
        for table, chain in policies
        if chain.lower() in INWARD + OUTWARD
    ]
