"""From the inventory and what listens on a host (module firewall_survey) to its nftables rules.

Pure functions: nothing here reads a file or talks to a host.
"""

import collections
import contextlib
import ipaddress
import re
from fnmatch import fnmatch

ANY = ("0.0.0.0/0", "::/0")
RULES = """\
#!/usr/sbin/nft -f
# Written by Trainyard's role firewall; a change here is lost at the next run. firewall_allow opens more.
# The two lines before the table make loading it a replacement in one step.
table inet trainyard
delete table inet trainyard

table inet trainyard {{
{sets}
	chain known {{
		ct state established,related accept
		iif "lo" accept
		ct state invalid drop

		# Errors, path MTU and neighbour discovery: without them even allowed traffic breaks.
		meta l4proto {{ icmp, icmpv6 }} accept
		# Answers to the machine's own DHCP client.
		udp sport 67 udp dport 68 accept
		ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept

{rules}
	}}

	chain input {{
		type filter hook input priority filter; policy drop;

		jump known
{redirected}
		# Names and addresses for the host's own guests, by their bridges.
{served}
	}}

	# Docker and its like pass what comes to a published port on to a container: it never gets to the hook input.
	chain published {{
		type filter hook prerouting priority dstnat - 10; policy accept;

		fib daddr type != local accept
{inside}
		jump known
		drop
	}}
}}
"""
# The interfaces of containers and virtual machines on the host itself, by the names that their programs give them.
INSIDE = (
    *("docker*", "br-*", "podman*", "cni*", "cali*", "cilium*"),
    *("lxc*", "lxdbr*", "incusbr*", "ve-*", "vz-*"),  # lxc* are Cilium's pods, too
    *("virbr*", "mpqemubr*", "vboxnet*", "vmnet*", "waydroid*"),
)
# What libvirt's, LXD's and Docker's guests ask the host for before they have an address to be let in by: DHCP and DNS.
SERVED = ("udp dport { 53, 67, 547 }", "tcp dport 53")
# Questions for names in .local, which the host itself answers: where the controller knows it by such a name alone, it
# would lose the host as soon as it had forgotten the last answer.
MDNS = ("ip daddr 224.0.0.251 udp dport 5353 accept", "ip6 daddr ff02::fb udp dport 5353 accept")
# Kubernetes' programs that take in pods and other nodes, at ports that are the same everywhere.
KUBELETS, KUBELET_PORT = ("kubelet", "k3s-server", "k3s-agent", "kubelite"), 10250
API_SERVERS, API_PORTS = ("kube-apiserver", "k3s-server", "kubelite"), (6443, 16443)
FLANNEL = 8472
PODS = {"k3s-server": "10.42.0.0/16", "k3s-agent": "10.42.0.0/16", "kubelite": "10.1.0.0/16"}  # as these come
COROSYNC, COROSYNC_PORTS = "5404-5412", range(5404, 5413)  # one for each of its links
IPSEC = (500, 4500)  # IKE's, and that of IPsec through gateways that translate addresses
# Docker names a network's bridge by its id. nft knows no pattern for that, so other bridges that there are, such as
# br-lan, are taken out by name; to name Docker's instead would change the rules with each network that it makes.
DOCKER = re.compile(r"br-[0-9a-f]{12}")


class Refused(Exception):
    """A setting that cannot be carried out; the message says which, why, and what to write."""


def firewall_peers(hostvars, names, own):
    """The sorted addresses of the hosts `names` except `own`: cluster_address, ansible_host, network_interfaces.

    An ansible_host that several hosts share is a gateway's, which forwards ports to them: no peer. Nor is one beside a
    cluster_address that the host's facts do not have, where it has any: those that -l leaves out have none.
    """
    reached = {name: str(hostvars[name].get("ansible_host") or name) for name in {*names, own}}
    shared = {text for text, hosts in collections.Counter(reached.values()).items() if hosts > 1}
    found = set()
    for name in names:
        if name == own:
            continue
        variables = hostvars[name]
        cluster = str(variables.get("cluster_address") or "")
        given = [cluster] if cluster not in shared else []
        there = own_addresses(variables)
        if reached[name] not in shared and (not cluster or not there or address_of(reached[name]) in there):
            given.append(reached[name])
        given += [text for _, text in given_addresses(variables)]
        for text in given:
            try:
                found.add(ipaddress.ip_interface(text).ip)
            except ValueError:
                continue  # a name, not an address; firewall_plan refuses a peer of which nothing else is known
    return [str(address) for address in sorted(found, key=lambda address: (address.version, address))]


def cluster_ways(hostvars, names, own):
    """{address: [interface]}: one address of each host, cluster_address or that by which Ansible reaches it.

    Interfaces: those by which the host `own` will have it in one of their networks, as far as its variables tell. What
    is a name is left out.
    """
    given = (
        hostvars[name].get("cluster_address") or hostvars[name].get("ansible_host") or name for name in names
    )
    found = [one for one in map(address_of, map(str, given)) if not isinstance(one, str)]
    networks = []
    for interface, text in given_addresses(hostvars[own]):
        if interface.get("name"):  # it may be known by its macaddress alone
            with contextlib.suppress(ValueError):  # the role network refuses it
                networks.append((ipaddress.ip_interface(text).network, str(interface["name"])))
    return {str(one): sorted({name for network, name in networks if one in network}) for one in found}


def given_addresses(variables):
    """(interface, address as it is written) of each that the role network is to give a host."""
    for interface in listed(variables.get("network_interfaces")):
        if isinstance(interface, dict):
            for address in listed(interface.get("addresses")):
                yield interface, str(address)


def own_addresses(variables):
    """The addresses that a host's interfaces have, by its facts; none where it was not asked."""
    facts = variables.get("ansible_facts") or {}
    return {
        address_of(text)
        for name in ("all_ipv4_addresses", "all_ipv6_addresses")
        for text in facts.get(name, ())
    }


def address_of(text):
    """The address that `text` is, however it is written; else `text`, as of a name."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text


def listed(value):
    """`value` where it is a list: what else it is, that host's own role network refuses."""
    return value if isinstance(value, list) else []


def firewall_plan(survey, peers, allow, ssh_from, expected_peers=0, reached="", names=()):
    """The rules of one host.

    peers: addresses; allow: [{port, proto, from}]; ssh_from: networks, empty for everyone; expected_peers: how many
    other hosts the cluster has; reached: the name or address by which the controller reaches the host; names: those of
    the inventory's hosts. Returns
    {errors: [str]} alone, or {errors, doubt, rules (nftables text), ssh_ports, closes, live}: `doubt` says what of
    others' rules could not be read, "" where nothing; `closes` names each listening socket that others reach now and
    only peers will, `live` is whether rules of ours are loaded.
    """
    try:
        if survey["ufw"] or survey["firewalld"]:
            name = "ufw" if survey["ufw"] else "firewalld"
            off = "ufw disable" if name == "ufw" else "systemctl disable --now firewalld"
            raise Refused(
                f"{name} is active on this host, and two firewalls would contradict each other; nothing was changed. "
                f"Either turn it off (sudo {off}), or keep it and set firewall_manage: false for this host "
                "(then open to the peers, in it, all TCP and UDP ports yourself)."
            )
        if survey["shut"]:
            raise Refused(
                f"On this host {' and '.join(survey['shut'])}: what one firewall drops another cannot let in; nothing "
                "was changed. Either let the peers in there, too (all that comes from their addresses, and what goes "
                "to them out; of a ban: sudo fail2ban-client unban ADDRESS, or sudo cscli decisions delete --ip "
                "ADDRESS); or take it away, at boot, too (sudo systemctl disable --now nftables, or "
                "netfilter-persistent, where it comes from their files; what is in force: sudo nft 'chain FAMILY TABLE "
                "CHAIN { policy accept; }' and then sudo nft flush chain FAMILY TABLE CHAIN, or sudo iptables, or "
                "iptables-legacy, -t TABLE -P CHAIN ACCEPT, and then -F CHAIN); "
                "or keep it and set firewall_manage: false for this host (then open to the peers, in it, all TCP and "
                "UDP ports yourself)."
            )
        if expected_peers and not peers:
            raise Refused(
                "no peer of this host has an IP address in the inventory: give each host its cluster_address"
            )
        if not isinstance(allow, list):
            raise Refused(f"firewall_allow is {allow!r}: write a list of mappings such as - port: 9100")
        if not isinstance(ssh_from, list):
            raise Refused(f"firewall_ssh_from is {ssh_from!r}: write a list such as [192.168.1.0/24]")
        allowed = [allowance(number, item) for number, item in enumerate(allow)]
        check_tunnels(survey["tunnels"], allowed)
        check_slurm(survey, {*peers, *names}, allowed)
        check_members(survey, {*peers}, allowed)
        ports = ssh_ports(survey)
        # Whoever has none of their keys gets no further there.
        tunnels = [port for tunnel in survey["tunnels"] for port in tunnel["ports"] or []]
        tunnels += [{"proto": "udp", "port": port} for port in IPSEC if survey["ipsec"]]
        allowed += [allowance(0, port) for port in tunnels if not is_ssh(port, ports)]
        sources = [network(f"firewall_ssh_from[{number}]", text) for number, text in enumerate(ssh_from)]
        check_clients(survey["clients"], sources)
    except Refused as refusal:
        return {"errors": [str(refusal)]}
    addresses = [ipaddress.ip_address(peer) for peer in peers]
    rules = [f"\t\t{rule}" for rule in ssh_rules(ports, sources)]
    for version, family, kind in ((4, "ip", "ipv4"), (6, "ip6", "ipv6")):
        if any(address.version == version for address in addresses):
            # Any port: NCCL and gloo take random ones. fib: it came by an interface that leads back to the peer.
            rules.append(f"\t\t{family} saddr @peers_{kind} fib saddr . iif oif exists accept")
    rules += [f"\t\t{rule}" for item in allowed for rule in allow_rules(item)]
    if survey["ipsec"]:  # what it carries comes out of it here, and is asked after once more by itself
        rules.append("\t\tmeta l4proto esp accept")
    # Who asks it for an address has none yet, and is no peer by it.
    serves = any(map(gives_addresses, survey["listening"]))
    if serves:
        rules.append("\t\tudp sport 68 udp dport 67 accept")
    if str(reached).lower().endswith(".local"):
        rules += [f"\t\t{rule}" for rule in MDNS]
    sets = "".join(
        peer_set(kind, [address for address in addresses if address.version == version])
        for version, kind in ((4, "ipv4"), (6, "ipv6"))
    )
    inside = inside_words(survey["bridges"])
    live = is_live(survey)
    closes = [
        f"{item['proto']} port {item['port']} ({item['process']})"
        for item in survey["listening"] + survey["published"]
        if not is_ssh(item, ports)
        and closed_now(survey, item, allowed)
        and not (serves and (item["proto"], item["port"]) == ("udp", 67))
    ]
    return {
        "errors": [],
        "doubt": doubt(survey["may_shut"]),
        "rules": RULES.format(
            sets=sets,
            rules="\n".join(rules),
            redirected=redirected(allowed),
            inside="\n".join(f"\t\t{guests} accept" for guests in inside),
            served="\n".join(f"\t\t{guests} {port} accept" for guests in inside for port in SERVED),
        ),
        "ssh_ports": ports,
        "closes": list(dict.fromkeys(closes)),
        "live": live,
    }


def doubt(may_shut):
    """What is warned of where a packet filter of somebody's own lets peers in by what is not read."""
    if not may_shut:
        return ""
    return (
        f"{' and '.join(may_shut)}: what could let that in there goes by something that is not read here (a set of "
        "ipset's, an address of this host's own, a mark, a program). If the hosts do not reach each other, let in "
        "there all that comes from the peers' addresses, by these alone"
    )


def network(where, text):
    try:
        return ipaddress.ip_network(str(text), strict=False)
    except ValueError:
        raise Refused(f"{where} is '{text}': write an address or a network such as 192.168.1.0/24") from None


def allowance(number, item):
    """A checked item of firewall_allow: {ports (nft's words), first, last, proto, sources}."""
    where = f"firewall_allow[{number}]"
    if not isinstance(item, dict):
        raise Refused(f"{where} is {item!r}: write a mapping such as {{port: 9100, from: [192.168.1.0/24]}}")
    unknown = set(item) - {"port", "proto", "from"}
    if unknown:
        raise Refused(f"{where}: unknown key '{sorted(unknown)[0]}'; there are port, proto and from")
    first, _, last = str(item.get("port", "")).partition("-")
    if not (first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first) <= 65535):
        raise Refused(
            f"{where}.port is '{item.get('port', '')}': write a port such as 9100, or a range such as 8000-8010"
        )
    proto = item.get("proto") or "tcp"
    if proto not in ("tcp", "udp"):
        raise Refused(f"{where}.proto is '{proto}': write tcp or udp")
    sources = item.get("from") or []
    sources = [
        network(f"{where}.from", text) for text in (sources if isinstance(sources, list) else [sources])
    ]
    ports = first if not last else f"{first}-{last}"
    return {
        "ports": ports,
        "first": int(first),
        "last": int(last or first),
        "proto": proto,
        "sources": sources,
    }


def ssh_ports(survey):
    """The ports on which SSH really answers: that of this very session, and sshd's own."""
    ports = set(survey["ssh_ports"])
    if survey["session"]:
        ports.add(survey["session"]["port"])
    if not ports:
        raise Refused(
            "nobody seems to listen for SSH on this host, so its port cannot be kept open, nor could its peers come. "
            "Have one (sudo apt install openssh-server; a desktop has none), or start it: sudo systemctl start ssh"
        )
    return sorted(ports)


def is_ssh(socket, ports):
    return socket["proto"] == "tcp" and socket["port"] in ports


def gives_addresses(item):
    """Whether it is a DHCP server's socket, of one that serves others than the host's own guests."""
    link = item.get("link", "")
    guests = any(fnmatch(link, one) for one in INSIDE) and (
        DOCKER.fullmatch(link) or not link.startswith("br-")
    )
    return (item["proto"], item["port"]) == ("udp", 67) and not guests


def unknown(machines, known):
    """An address of each of the machines that is none of `known`, names and addresses."""
    return [
        found["addresses"][0]
        for found in machines
        if not {found["name"], found["name"].partition(".")[0], *found["addresses"]} & known
    ]


def check_members(survey, known, allowed):
    """Refuse rules that would newly shut what a cluster of another kind stands on, whose other members are not known.

    Pods come to the host's API server from addresses of their own. A node that corosync does not hear of has no quorum;
    where it keeps machines available (Proxmox VE), its watchdog resets it.
    """
    for item in survey["listening"]:
        if not closed_now(survey, item, allowed):
            continue
        process, port = item["process"], item["port"]
        if process in KUBELETS and port == KUBELET_PORT:
            also = sorted(
                (other["proto"], other["port"])
                for other in survey["listening"]
                if (other["process"] in API_SERVERS and other["port"] in API_PORTS)
                or (other["proto"], other["port"]) == ("udp", FLANNEL)
            )
            others = "".join(f", {proto} port {number}" for proto, number in dict.fromkeys(also))
            pods = PODS.get(process, "NETWORK OF THE PODS")
            raise Refused(
                f"{process} listens on tcp port {port}, as a node of Kubernetes: its pods, and nodes that are no hosts "
                f"of the inventory, would not reach this host any more (tcp port {port}{others}). Let them in: "
                f"firewall_allow: [{{port: {port}, from: [{pods}, OTHER NODES]}}, …] for this host, and so for the "
                "other ports (by udp with proto: udp); or set firewall_manage: false for it (then open to the peers "
                "all TCP and UDP ports yourself, where anything shuts them)"
            )
    check_corosync(survey, known, allowed)


def check_corosync(survey, known, allowed):
    """As above, of corosync, whose members its settings list, mostly.

    By addresses alone: those of its rings may be others than the cluster's, of hosts that have the very names.
    """
    sockets = [
        item for item in survey["listening"] if (item["process"], item["proto"]) == ("corosync", "udp")
    ]
    listed = survey["corosync_members"]
    strangers = None if listed is None else unknown(listed, known)
    # It sends by ports of chance, which nobody comes to: where one is named, it is that at which it listens.
    if strangers == [] or not sockets or not all(closed_now(survey, item, allowed) for item in sockets):
        return
    port = min(item["port"] for item in sockets)
    told = ", ".join(strangers or ["THEIR NETWORK"])
    raise Refused(
        f"corosync listens on udp port {port}: members of its cluster (Proxmox VE, Pacemaker) that are no hosts of the "
        f"inventory{'' if listed is None else f' ({told})'} would lose this one, which may reset itself then. Let them "
        f"in: firewall_allow: [{{port: {COROSYNC if port in COROSYNC_PORTS else port}, proto: udp, from: [{told}]}}] "
        "for this host" + (", where all of them are hosts of the inventory, too" if listed is None else "")
    )


def closed_now(survey, item, allowed):
    """Whether others than peers reach a socket, and will not by these rules."""
    live = is_live(survey)
    return not kept(item, allowed) and (not live or kept(item, survey["loaded"]["opened"]))


def is_live(survey):
    """Whether rules of ours are in force, and will be after a boot."""
    return all(survey["loaded"][what] for what in ("table", "unit", "as_written"))


def check_slurm(survey, known, allowed):
    """Refuse rules that would take a node from a Slurm whose controller is none of `known`, names and addresses; or
    from a controller its nodes.

    It ends what runs on a node that it has not reached for five minutes, whoever started that.
    """
    strangers = unknown(survey["slurm_controllers"], known)
    nodes = unknown(survey["slurm_nodes"], known)
    for item in survey["listening"]:
        if nodes and item["process"] == "slurmctld" and closed_now(survey, item, allowed):
            listed = ", ".join([*nodes[:4], *(["…"] if len(nodes) > 4 else [])])
            raise Refused(
                f"slurmctld listens on tcp port {item['port']}, and of Slurm's nodes {len(nodes)} ({listed}) are no "
                "hosts of the inventory: without that port their jobs would not end, and nobody there could submit "
                "any. Let them in, and the machines that people log in to: firewall_allow: "
                f"[{{port: {item['port']}, from: [{listed}]}}] for this host"
            )
        if strangers and item["process"] == "slurmd" and not kept(item, allowed):
            listed, port = ", ".join(strangers), item["port"]
            raise Refused(
                f"slurmd listens on tcp port {port}, and Slurm's controller ({listed}) is no host of the inventory: "
                "without that port it would take this node down, and end its jobs. Let it in: "
                f"firewall_allow: [{{port: {port}, from: [{listed}]}}] for this host; jobs that speak to other "
                "machines (srun) need their ports, too"
            )


def check_tunnels(tunnels, allowed):
    """Refuse rules that would shut a tunnel by which SSH or a peer comes, where nobody tells its port."""
    for tunnel in tunnels:
        wireguard = tunnel["kind"] == "wireguard"  # of UDP alone
        named = [
            item for item in allowed if not item["sources"] and (item["proto"] == "udp" or not wireguard)
        ]
        if tunnel["ports"] is None and not named:
            raise Refused(
                f"SSH, or a peer, comes by {tunnel['link']}, a tunnel to this host ({tunnel['kind']}) whose port was "
                f"not found and would be shut: {'install wireguard-tools there, or ' if wireguard else ''}name it in "
                f"firewall_allow, without from: {{port: …, proto: udp{'' if wireguard else ' or tcp'}}}"
            )


def check_clients(clients, sources):
    """Refuse rules that would shut out the controller, or whoever works on this machine by SSH."""
    for client in map(ipaddress.ip_address, clients if sources else []):
        if not any(client in source for source in sources if source.version == client.version):
            raise Refused(
                f"firewall_ssh_from ({', '.join(map(str, sources))}) leaves out {client}, from where SSH is in use at "
                "this moment: add it, or a network that holds it"
            )


def by_family(sources, match):
    """nft rules that accept `match` from `sources`, or from everywhere."""
    if not sources or {str(source) for source in sources} >= set(ANY):
        return [f"{match} accept"]
    rules = []
    for version, family in ((4, "ip"), (6, "ip6")):
        listed = ", ".join(str(source) for source in sources if source.version == version)
        if listed:
            rules.append(f"{family} saddr {{ {listed} }} {match} accept")
    return rules


def ssh_rules(ports, sources):
    return by_family(sources, f"tcp dport {{ {', '.join(map(str, ports))} }}")


def allow_rules(item):
    return by_family(item["sources"], f"{item['proto']} dport {item['ports']}")


def redirected(allowed):
    """The rules for what came to an open port, and was redirected to another of the host's own on its way to the input.

    By the port at which it came: `ct status dnat` alone would let in what somebody sends to an address elsewhere by way
    of this host, which the chain published passes over.
    """
    rules = [
        rule
        for item in allowed
        for rule in by_family(
            item["sources"],
            f"meta l4proto {item['proto']} ct status dnat ct original proto-dst {item['ports']}",
        )
    ]
    return "".join(f"\t\t{rule}\n" for rule in rules)


def inside_words(bridges):
    """nft's words for what comes from the host's own guests; `bridges`: interfaces named br-…."""
    others = ", ".join(f'"{name}"' for name in bridges if not DOCKER.fullmatch(name))
    return [
        f'{f"iifname != {{ {others} }} " if others and name == "br-*" else ""}iifname "{name}"'
        for name in INSIDE
    ]


def peer_set(kind, addresses):
    if not addresses:
        return ""
    listed = ",\n".join(f"\t\t\t{address}" for address in addresses)
    return f"\tset peers_{kind} {{\n\t\ttype {kind}_addr\n\t\telements = {{\n{listed}\n\t\t}}\n\t}}\n\n"


def kept(socket, allowed):
    return any(
        item["proto"] == socket["proto"] and item["first"] <= socket["port"] <= item["last"]
        for item in allowed
    )


class FilterModule:
    def filters(self):
        return {
            "firewall_peers": firewall_peers,
            "firewall_plan": firewall_plan,
            "cluster_ways": cluster_ways,
        }
