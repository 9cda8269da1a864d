"""Preflight's checks of the network between the hosts, and of all of it together."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable

from host_runs import busy
from preflight_base import FAIL, PASS, SKIP, WARN, Cluster, Said, blamed, check, named, odd, shown_pairs
from rdma_ports import found_and_expected, port_fault, roce_gid

SLOWEST_FULL_TCP = 10_000  # Mbit/s; beyond it a processor, not the wire, may limit what TCP carries
GIGABIT = 1000  # Mbit/s


@check(
    "The interface of the cluster address is fast, and full duplex",
    "warn under {link_mbit:g} Mbit/s, and under 1000 where another host has as much",
    "preflight_link_mbit; with a broken pair in its cable a gigabit card agrees on 100 Mbit/s",
    True,
)
def link(cluster: Cluster) -> Iterable[Said]:
    well, told = True, []
    links = [survey["link"] for survey in cluster.survey().values() if survey["link"]]
    fastest = max((wire["speed"] or 0 for wire in links), default=0)
    for host, survey in cluster.survey().items():
        wire = survey["link"]
        if not wire:
            continue
        look = cluster.on([host], f"ip -s -s link show {wire['name']}") + "   then change cable, port or card"
        if wire["speed"] is not None and wire["speed"] < cluster.limits.link_mbit:
            well = False
            yield Said(WARN, [host], f"{wire['name']} has {wire['speed']} Mbit/s", look)
        elif wire["speed"] is not None and wire["speed"] < GIGABIT <= fastest:
            well = False
            yield Said(
                WARN,
                [host],
                f"{wire['name']} has {wire['speed']} Mbit/s, where others have up to {fastest}",
                look,
            )
        elif wire["duplex"] == "half":
            well = False
            yield Said(WARN, [host], f"{wire['name']} is half duplex", look)
        told.append(f"{host} {wire['speed'] or 'unknown'}")
    if well:
        yield Said(PASS, cluster.alive, f"Mbit/s: {named(told)}")


@check(
    "Packets of the interface's size arrive whole, and all interfaces have the same",
    "the interface's MTU, unfragmented",
    "RFC 1191; a larger packet vanishes, and a run hangs",
    True,
)
def mtu(cluster: Cluster) -> Iterable[Said]:
    sizes = {host: survey["link"]["mtu"] for host, survey in cluster.survey().items() if survey["link"]}
    lost = [
        pair
        for pair, found in cluster.pairs().items()
        if found.get("mtu_arrives") is False and arrives(found)
    ]
    others, common = odd(sizes) if sizes else ([], 0)
    interfaces = {host: survey["link"]["name"] for host, survey in cluster.survey().items() if survey["link"]}
    for host in others:
        bad = [f"{a} to {b}" for a, b in lost if host in (a, b)]
        vanish = f"; whole packets do not arrive from {', '.join(bad)}" if bad else ""
        text = f"{interfaces[host]} has {sizes[host]} bytes, the others {common}{vanish}"
        cure = (
            cluster.on([host], f"ip link set {interfaces[host]} mtu {common}")
            + "   and mtu in network_interfaces"
        )
        yield Said(FAIL if bad else WARN, [host], text, cure)
    rest = [pair for pair in lost if not set(pair) & set(others)]
    for hosts, pairs in blamed(rest).items():
        told = ", ".join(f"{a} to {b}" for a, b in pairs[:4])
        text = f"packets of {sizes[pairs[0][0]]} bytes do not arrive from {told}"
        most = [cluster.pairs()[pair].get("mtu_most") for pair in rest]
        cure = f"set what is between them, a switch or a tunnel, to {sizes[pairs[0][0]]} bytes"
        if all(most):
            text += f", those of {min(most)} do"
            less = _on_each(cluster, list(sizes), f"ip link set {{interface}} mtu {min(most)}")
            cure = f"{less}   and mtu in network_interfaces; or {cure}"
        yield Said(FAIL, list(hosts), text, cure)
    if not lost and not others:
        measured = any("mtu_arrives" in found for found in cluster.pairs().values())
        yield Said(
            PASS if measured else SKIP,
            cluster.alive,
            f"{common} bytes" if measured else "no way was measured",
        )


def _on_each(cluster: Cluster, hosts: list[str], command: str) -> str:
    """The command that has root run another, about its own `{interface}`, on each of these hosts."""
    by_name: dict[str, list[str]] = {}
    for host in hosts:
        link = (cluster.facts[host]["survey"] or {}).get("link") or {}
        by_name.setdefault(link.get("name", "eth0"), []).append(host)
    return "; ".join(cluster.on(some, command.format(interface=name)) for name, some in by_name.items())


def arrives(found: dict) -> bool:
    """Whether small packets arrive: else a larger one says nothing."""
    return found.get("sent", 0) > found.get("lost", 0)


@check(
    "Every port of a host is open to its peers",
    "{port} and a port of the kernel's choice",
    "gloo and NCCL listen on any port",
    True,
)
def ways(cluster: Cluster) -> Iterable[Said]:
    pairs = cluster.pairs()
    dumb = {host: fault for host in cluster.alive if (fault := cluster.facts[host].get("unmeasured"))}
    for host, fault in dumb.items():
        yield Said(FAIL, [host], fault, f"{cluster.on([host], 'ip -brief address')}   and do as it says")
    if not pairs and not dumb:
        yield Said(SKIP, cluster.alive, not_measured(cluster))
        return
    shut: dict[str, dict[str, list[str]]] = {}
    for (host, peer), found in pairs.items():
        if peer in dumb:
            continue  # nobody listened there
        for number_, state in found["ports"].items():
            held = int(number_) == cluster.limits.port and cluster.facts[peer]["run"]["port_holder"]
            if state not in ("open", "other") and not (held and state == "refused"):
                what = "the ranks' port" if int(number_) == cluster.limits.port else "any port"
                shut.setdefault(peer, {}).setdefault(f"{what} ({number_}): {state}", []).append(host)
    for host, faults in shut.items():
        told = "; ".join(f"{fault} from {named(askers)}" for fault, askers in faults.items())
        yield Said(FAIL, [host], told, cluster.opening(host))
    if not shut and not dumb:
        yield Said(PASS, cluster.alive, f"{len(pairs)} ways are open")


def not_measured(cluster: Cluster) -> str:
    if len(cluster.alive) < 2:
        return "a host alone has no peer"
    if found := busy([cluster.facts[host]["run"] for host in cluster.alive]):
        return f"{found[0]} is active, and is not disturbed"
    return "no way was measured"


@check(
    "No packet is lost",
    "warn over {loss_percent:g} %, fail over {loss_fail_percent:g} %",
    "ours: TCP loses half its speed at about 1 % (Mathis et al. 1997)",
    True,
)
def loss(cluster: Cluster) -> Iterable[Said]:
    rates = {
        pair: round(100 * found["lost"] / found["sent"], 1)
        for pair, found in cluster.pairs().items()
        if found.get("sent")
    }
    yield from _bad_pairs(
        cluster,
        rates,
        lambda rate: (
            FAIL
            if rate > cluster.limits.loss_fail_percent
            else WARN
            if rate > cluster.limits.loss_percent
            else PASS
        ),
        " %",
        "ip -s -s link show {interface}",
        max,
    )


@check(
    "Latency is that of a local network",
    "warn over {latency_ms:g} ms",
    "preflight_latency_ms; a step waits for it some dozens of times",
    True,
)
def latency(cluster: Cluster) -> Iterable[Said]:
    times = {
        pair: found["rtt_ms"] for pair, found in cluster.pairs().items() if found.get("rtt_ms") is not None
    }
    yield from _bad_pairs(
        cluster,
        times,
        lambda value: WARN if value > cluster.limits.latency_ms else PASS,
        " ms",
        "ip -s link show {interface}",
        max,
    )


@check(
    "Bandwidth is that of the links",
    "{bandwidth_percent:g} % of the slower link's, up to 10 Gbit/s, and of {link_mbit:g} Mbit/s",
    "preflight_bandwidth_percent; TCP carries 94 % of Ethernet's",
    True,
)
def bandwidth(cluster: Cluster) -> Iterable[Said]:
    links = {host: survey["link"] or {} for host, survey in cluster.survey().items()}
    rates = {pair: found["mbit"] for pair, found in cluster.pairs().items() if "mbit" in found}

    def least(pair: tuple[str, str]) -> float:
        speeds = [links[h].get("speed") for h in pair if h in links and links[h].get("physical")]
        known = [speed for speed in speeds if speed]
        slower = min([*known, SLOWEST_FULL_TCP]) if len(known) == 2 else 0
        # A link that is slow by name is another check's.
        floor = cluster.limits.link_mbit if not known or min(known) >= cluster.limits.link_mbit else 0
        return max(slower, floor) * cluster.limits.bandwidth_percent / 100

    bad = {pair for pair, rate in rates.items() if rate < least(pair)}
    none = [pair for pair, found in cluster.pairs().items() if found.get("no_stream")]
    look = "ip -s -s link show {interface}"
    for hosts, pairs in blamed(none).items():
        told = ", ".join(f"{a} to {b}" for a, b in pairs[:4])
        cure = (
            _on_each(cluster, list(hosts), look)
            + "   run it again, and if it stays, change cable, port or switch"
        )
        yield Said(WARN, list(hosts), f"{told}: the ports are open, and no stream came through", cure)
    if bad or not none:
        yield from _bad_pairs(cluster, rates, None, " Mbit/s", look, min, bad)


def _bad_pairs(cluster, values, judge, unit, command, worst, bad=None) -> Iterable[Said]:
    """What is said of values by pair: `judge` gives each its result, or `bad` are those to warn of."""
    if not values:
        yield Said(SKIP, cluster.alive, not_measured(cluster))
        return
    results = {
        pair: (WARN if pair in bad else PASS) if judge is None else judge(value)
        for pair, value in values.items()
    }
    wrong = [pair for pair, result in results.items() if result != PASS]
    for hosts, pairs in blamed(wrong).items():
        result = FAIL if any(results[pair] == FAIL for pair in pairs) else WARN
        cure = _on_each(cluster, list(hosts), command) + "   then change cable, port or switch"
        yield Said(result, list(hosts), shown_pairs(pairs, values, unit), cure)
    if not wrong:
        word = "at most" if worst is max else "at least"
        yield Said(PASS, cluster.alive, f"{word} {worst(values.values())}{unit} over {len(values)} ways")


@check(
    "Nothing but SSH answers who is no peer",
    "the hosts' measured ports are shut",
    "PyTorch's SECURITY.md: its ports know no passwords",
    True,
)
def firewall(cluster: Cluster) -> Iterable[Said]:
    well, tried, notes = True, [], []
    for host in cluster.alive:
        outside = cluster.facts[host].get("outside")
        if not isinstance(outside, dict):
            notes.append(outside or not_measured(cluster))
            continue
        tried.append(host)
        reached = [number_ for number_, state in outside.items() if state == "open"]
        if reached:
            well = False
            cure = cluster.site("firewall", [host])
            if not cluster.facts[host]["expected"]["firewall"]:
                cure = (
                    f"{cluster.on([host], 'nft list ruleset')}   and shut it in the firewall that you keep there "
                    "(firewall_manage is false)"
                )
            yield Said(
                FAIL, [host], f"port {', '.join(reached)} is open to the controller, which is no peer", cure
            )
    if not tried:
        yield Said(SKIP, cluster.alive, next(iter(dict.fromkeys(notes)), not_measured(cluster)))
    elif well:
        yield Said(PASS, tried, "shut to the controller")


# ---- RDMA ----


@check(
    "The RDMA ports are up",
    "a port that can carry a run on each host of the group rdma, of one kind; none idle that others have; one rate",
    "InfiniBand Architecture: only then a subnet manager has set it up",
    True,
)
def rdma(cluster: Cluster) -> Iterable[Said]:
    wanted = [host for host in cluster.alive if cluster.facts[host]["expected"]["rdma"]]
    if not wanted:
        yield Said(SKIP, cluster.alive, "the group rdma is empty")
        return
    well = True
    found = {host: cluster.facts[host]["survey"]["rdma"] for host in wanted}
    good = {host: [one for one in ports if not port_fault(one)] for host, ports in found.items()}
    for host in wanted:
        if not good[host]:
            well = False
            yield Said(
                FAIL, [host], _states(found[host]) or "no RDMA device", _cure_of(cluster, host, found[host])
            )
    kinds = {host: {one["layer"] for one in ports} for host, ports in good.items() if ports}
    if kinds and not set.intersection(*kinds.values()):
        well = False
        told = "; ".join(f"{host} {' and '.join(sorted(layers))}" for host, layers in kinds.items())
        cure = f"Have one kind on all; or a run on those alone that share one: {cluster.limits.train} -l"
        yield Said(FAIL, list(kinds), f"ports of no common kind, so that a run goes by TCP: {told}", cure)
    up = {host: [one["gbit"] for one in ports] for host, ports in good.items()}
    rates = {host: max(up[host]) for host in wanted if up[host]}
    slow = [host for host, rate in rates.items() if rate < max(rates.values())]
    most = max(len(up[host]) for host in wanted)
    for host in wanted:
        idle = [one for one in found[host] if up[host] and one not in good[host] and not one["guests"]]
        others = f", on others {most}" if len(up[host]) < most else ""
        if not others:  # what has a cable, and is no slower, was meant to carry something
            idle = [one for one in idle if one["state"] == "ACTIVE" and one["gbit"] >= max(up[host])]
        if idle:
            well = False
            text = f"{len(up[host])} can carry a run{others}; {_states(idle)}"
            yield Said(WARN, [host], text, _cure_of(cluster, host, idle))
    for host, lone in _lone(cluster, good).items():
        well = False
        yield Said(
            WARN,
            [host],
            f"{', '.join(lone)}: in a network that no other host's ports are in, which NCCL may have them speak to",
            "give them addresses in the others' network, or none; or name the other ports: "
            "trainer_environment: {NCCL_IB_HCA: …} in the inventory",
        )
    if slow:
        well = False
        text = f"{rates[slow[0]]:g} Gbit/s, others {max(rates.values()):g}"
        yield Said(WARN, slow, text, cluster.on(slow, "rdma link show") + "   then change the cable")
    if well:
        yield Said(PASS, wanted, f"ACTIVE at {min(rates.values()):g} Gbit/s or more")


def _lone(cluster: Cluster, good: dict[str, list[dict]]) -> dict[str, list[str]]:
    """By host the ports, with their networks, that no other host has a port in, beside one that all hosts have.

    Where there is none that all have, each port may have a network of its own, and routers between them.
    """
    nets: dict[str, dict[str, ipaddress.IPv4Network]] = {}
    for host, ports in good.items():
        held = [text for one in cluster.facts[host]["survey"]["interfaces"] for text in one["addresses"]]
        known = {str(one.ip): one.network for one in map(ipaddress.ip_interface, held)}
        gids = {f"{one['device']}/{one['port']}": roce_gid(one) for one in ports}
        nets[host] = {
            name: known[gid["address"]] for name, gid in gids.items() if gid and gid["address"] in known
        }
        # Of a port and its switch's alone, as in a fabric that routes, whatever management network is beside it.
        nets[host] = {name: net for name, net in nets[host].items() if net.prefixlen < 31}
    count = Counter(net for own in nets.values() for net in set(own.values()))
    if len(nets) < 2 or len(nets) not in count.values():
        return {}
    lone = {
        host: [f"{name} ({net})" for name, net in own.items() if count[net] == 1]
        for host, own in nets.items()
    }
    return {host: names for host, names in lone.items() if names}


def _states(ports: list[dict]) -> str:
    """What was found of ports that can carry no run."""
    return ", ".join(found_and_expected(one)[0] for one in ports)


def _cure_of(cluster: Cluster, host: str, idle: list[dict]) -> str:
    """What has these RDMA ports carry a run."""
    if not idle:
        return f"Load the card's driver: {cluster.on([host], 'rdma link show')}"
    cures = dict.fromkeys(found_and_expected(one)[1] for one in idle)
    return f"Expected {'; '.join(cures)}. Then {cluster.site('rdma', [host])}"


@check(
    "RDMA carries what its ports promise",
    "warn under {rdma_warn_percent:g} %, fail under {rdma_fail_percent:g} % of the port's rate",
    "Azure's node health checks hold 90 to 95 %; depth full",
    True,
)
def rdma_bandwidth(cluster: Cluster) -> Iterable[Said]:
    rates = {
        pair: found["rdma_gbit"]
        for pair, found in cluster.pairs().items()
        if found.get("rdma_gbit") is not None
    }
    notes = [found["rdma_note"] for found in cluster.pairs().values() if found.get("rdma_note")]
    if not rates:
        yield Said(
            SKIP, cluster.alive, notes[0] if notes else "measured with depth full, between ACTIVE ports"
        )
        return
    ports = {
        host: max((one["gbit"] for one in survey["rdma"] if not port_fault(one)), default=0.0)
        for host, survey in cluster.survey().items()
    }

    shares = {
        pair: round(100 * rate / max(min(ports[h] for h in pair), 0.1), 1) for pair, rate in rates.items()
    }
    yield from _bad_pairs(
        cluster,
        shares,
        lambda share: (
            FAIL
            if share < cluster.limits.rdma_fail_percent
            else WARN
            if share < cluster.limits.rdma_warn_percent
            else PASS
        ),
        " % of the port's rate",
        "rdma link show",
        min,
    )


# ---- all of it together ----


@check("A tiny model trains on all hosts together", "every step ends", "trainer/loop.py; preflight_steps")
def steps(cluster: Cluster) -> Iterable[Said]:
    result, message = cluster.steps["result"], cluster.steps.get("message", "")
    if result == FAIL:
        yield Said(
            FAIL,
            cluster.steps.get("hosts") or cluster.alive,
            message,
            f"{cluster.limits.train} -e smoke=true",
        )
    else:
        yield Said(result, cluster.alive, message)
