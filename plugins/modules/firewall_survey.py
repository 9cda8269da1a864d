"""What listens on a host, and which firewall it has: the input of the filter firewall_plan."""

import contextlib
import glob
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
from ansible.module_utils.packet_filters import iptables_chains, shut_by_iptables, shut_by_nft

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
LEGACY = "/proc/net/ip_tables_names"  # the tables that iptables has made by itself, not by nftables; none without it
GUARD = "/var/lib/trainyard-guard"  # where the guard keeps what is not confirmed yet
OTHERS_OF_THE_KERNEL = {4789, 4791, 8472}  # VXLAN, RoCE, Linux' older VXLAN
# iptables-save: -p tcp … --dport 80 -j DNAT --to-destination 172.17.0.2:80; nft: tcp dport 80 … dnat to 172.17.0.2:80
# To another port of the host: -p tcp … --dport 80 -j REDIRECT --to-ports 8080; tcp dport 80 … redirect to :8080
# Of several ports: --dports 80,8000:8010; tcp dport { 80, 8000-8010 }
PASSED_ON = re.compile(
    r"\b(tcp|udp)\b[^\n]*?\bdports? (\{[^}\n]*\}|[\d,:-]+)\s[^\n]*?"
    r"(?:--to-destination (\S+)|\bdnat (?:ip6? )?to (\S+)"
    r"|-j REDIRECT(?![-\w])(?: --to-ports (\S+))?|(?<![-\w])redirect(?![-\w])(?: to (\S+))?)"
)
# What passes nothing on for others: a comment's words, and what holds for the host's own connections. iptables-save:
# -A OUTPUT …, -d 127.0.0.1/32 …; nft: ip daddr 127.0.0.1 …, a chain that begins with type nat hook output …
ASIDE = re.compile(
    r'"(?:[^"\\\n]|\\[^\n])*"|--comment [^"\s]\S*|^-A OUTPUT [^\n]*'
    r"|^[^\n]*(?:(?<!! )-d |ip daddr )127\.[^\n]*"
    r"|^\s*type \w+ hook output\b.*?^\s*\}$",
    re.MULTILINE | re.DOTALL,
)
# nft: dnat to tcp dport map { 80 : 172.17.0.2, 81 : 172.17.0.3 . 8080 }
MAPPED = re.compile(r"\bdnat (?:ip6? )?to (tcp|udp) dport map \{([^}\n]*)\}")
# Kubernetes' node ports lead to chains of its own: -A KUBE-NODEPORTS -p tcp … --dport 30080 -j KUBE-EXT-…; in nft's
# words they are elements of a map, tcp . 30080 : goto external-…
NODE_PORT = re.compile(
    r"^-A KUBE-NODEPORTS -p (tcp|udp)\b.* --dport (\d+) .*-j|(?<!\. )\b(tcp|udp) \. (\d+) : goto external-",
    re.MULTILINE,
)
# What firewall_allow has opened, as `nft list` writes the rules of firewall_plan.
OPENED = re.compile(
    r"^\s*(?:ip6? saddr (?:\{[^}]*\}|\S+) )?(tcp|udp) dport (\d+)(?:-(\d+))? accept$", re.MULTILINE
)


# Where slurmd has its settings: Debian's, Ubuntu's of old, one's own build, and what the controller itself hands out.
SLURM = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
    "/var/lib/slurm/slurmd/conf-cache/slurm.conf",
)
# Where corosync has its members, and how each of their addresses stands there.
COROSYNC = "/etc/corosync/corosync.conf"
MEMBER = re.compile(r"^\s*ring\d_addr\s*:\s*(\S+)", re.MULTILINE)
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


def listens(found, process):
    """Whether others reach a program of that name."""
    return any(item["process"] == process for item in listening(found))


def slurm_controllers(texts):
    """{name, addresses} of each other machine on which Slurm's controller may be, by its settings (`texts`)."""
    return other_machines(one for text in texts for one in CONTROLLER.findall(text))


def slurm_nodes(module):
    """The same of Slurm's nodes, asked where its controller is; none where it does not answer."""
    _, out, _ = module.run_command(
        ["timeout", "20", "sinfo", "--all", "--Node", "--noheader", "--format=%N|%o"]
    )
    lines = dict.fromkeys(map(str.strip, out.splitlines()))  # a node is told once for each of its partitions
    return other_machines(line.split("|") for line in lines if line.count("|") == 1)


def corosync_members(path=COROSYNC):
    """The same of corosync's members; None where its settings do not list them."""
    try:
        with open(path, errors="replace") as source:
            named = MEMBER.findall(source.read())
    except OSError:
        return None
    return other_machines((one, "") for one in named) if named else None


def other_machines(named):
    """{name, addresses} of each that is not this one; named: pairs of a name, and an address or another name, or ""."""
    found = []
    for name, address in named:
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
    for command in ("iptables-save", "ip6tables-save", "nft list ruleset"):
        if module.get_bin_path(command.split()[0]):
            for proto, ports, target in passed_on(module.run_command(command.split())[1]):
                first, _, last = re.sub("[:-]", " ", ports).partition(" ")
                target = re.sub(r"^:?(?=[\d-]+$)", "port ", target or ports)  # 8080 or, as nft has it, :8080
                also = f"with those up to {last} " if last else ""
                found.setdefault((proto, int(first)), f"{also}passed on to {target}")
    return [{"proto": proto, "port": port, "process": name} for (proto, port), name in sorted(found.items())]


def passed_on(rules):
    """(proto, port or range of ports, to what) of what is passed on, "" where that is the same port of the host's."""
    rules = ASIDE.sub("", rules)
    for proto, ports, *targets in PASSED_ON.findall(rules):
        for one in re.findall(r"[\d:-]+", ports):
            yield proto, one, "".join(targets)
    for proto, pairs in MAPPED.findall(rules):
        for one, target in re.findall(r"([\d-]+) : ([^,]+)", pairs):
            yield proto, one, target.strip().replace(" . ", ":")
    for words in NODE_PORT.findall(rules):
        proto, port = filter(None, words)
        yield proto, port, "a service of Kubernetes"


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


def ufw_enabled(module, path="/etc/ufw/ufw.conf"):
    """Whether ufw is there and set to be on: its unit is active on machines where it does nothing, too.

    Its settings, which it reads as a shell does, stay where apt has removed it.
    """
    if not module.get_bin_path("ufw"):
        return False
    try:
        with open(path, errors="replace") as source:
            said = re.findall(r"(?im)^\s*enabled=[\"']?(\w*)", source.read())
    except OSError:
        return False
    return bool(said) and said[-1].lower() == "yes"


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
    found, shown, legacy = [], "", False
    if module.get_bin_path("iptables-save"):
        shown = module.run_command(["iptables-save"])[1]
        legacy = "(legacy)" in module.run_command(["iptables-save", "--version"])[1]
        found += shut_by_iptables(shown, peers)
    if not legacy:
        found += shut_by_legacy(module, peers)
    if module.get_bin_path("nft"):
        # nft shows what iptables has made, too, as ip filter and the like, and not all of it in words of its own.
        made = [] if legacy else iptables_chains(shown)
        known = tuple(f" chain {chain} of table ip {table}" for table, chain in made)
        code, listed, said = module.run_command(["nft", "-j", "list", "ruleset"])
        if code:
            found.append((f"nftables' rules, which nft does not show ({said.strip()[:80]}),", [], [*peers]))
        found += [
            one
            for one in shut_by_nft("" if code else listed, peers)
            if not one[0].partition(" (hook ")[0].endswith(known)
        ]
    for chain, *outs in found:
        for key, does, out in zip(told, ("shuts out", "may shut out"), outs, strict=True):
            if out:
                told[key].append(f"{chain} {does} {out[0]}" + f" and {len(out) - 1} more" * (len(out) > 1))
    return told


def shut_by_legacy(module, peers, names=LEGACY):
    """As shut_by_iptables, of the tables that neither nft nor its iptables shows.

    None is asked for that is not there: that would make it. Where nobody shows them, they may shut out all.
    """
    try:
        with open(names) as source:
            tables = sorted(source.read().split())
    except OSError:
        return []
    if tables and not module.get_bin_path("iptables-legacy-save"):
        listed = " and ".join(tables)
        return [
            (f"iptables-legacy's {listed}, which no program here shows (iptables-legacy-save),", [], [*peers])
        ]
    shown = "".join(module.run_command(["iptables-legacy-save", "-t", table])[1] for table in tables)
    return shut_by_iptables(shown, peers, "iptables-legacy's")


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
            "corosync_members": corosync_members(),
            "slurm_nodes": slurm_nodes(module) if listens(found, "slurmctld") else [],
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
