"""From the inventory and a host's sockets to its nftables rules (plugins/filter/firewall_plan.py). Sends nothing."""

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import jinja2
import pytest
import yaml

from plugins.filter.firewall_plan import cluster_ways, firewall_peers, firewall_plan
from plugins.module_utils import host_survey

ROLE = Path(__file__).resolve().parents[2] / "roles/firewall"
LOADED = {"table": True, "unit": True, "as_written": True, "opened": []}
UNLOADED = {"table": False, "unit": False, "as_written": False, "opened": []}
SSHD = {"proto": "tcp", "port": 22, "address": "0.0.0.0", "process": "sshd"}
SESSION = {"client": "192.168.1.9", "address": "192.168.1.50", "port": 22}


def survey(**more):
    return {
        "listening": [SSHD],
        "published": [],
        "slurm_controllers": [],
        "slurm_nodes": [],
        "corosync_members": None,
        "ssh_ports": [22],
        "session": SESSION,
        "clients": [SESSION["client"]],
        "tunnels": [],
        "ipsec": False,
        "ufw": False,
        "firewalld": False,
        "shut": [],
        "may_shut": [],
        "bridges": [],
        "nft": True,
        "loaded": LOADED,
        **more,
    }


def planned(peers=("192.168.1.101",), allow=(), ssh_from=(), **more):
    plan = firewall_plan(survey(**more), list(peers), list(allow), list(ssh_from), len(peers))
    assert plan["errors"] == []
    return plan


def rules(plan):
    """The rules of the chain that says who is known, without the comments."""
    lines = plan["rules"].split("chain known {")[1].split("\t}\n")[0].splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith(("#", "}"))]


def test_peers_ssh_and_nothing_else():
    plan = planned()
    assert rules(plan) == [
        "ct state established,related accept",
        'iif "lo" accept',
        "ct state invalid drop",
        "meta l4proto { icmp, icmpv6 } accept",
        "udp sport 67 udp dport 68 accept",
        "ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept",
        "tcp dport { 22 } accept",
        "ip saddr @peers_ipv4 fib saddr . iif oif exists accept",
    ]
    assert "192.168.1.101" in plan["rules"]
    assert "forward" not in plan["rules"]  # containers' own traffic is not ours
    assert (
        plan["rules"].count("jump known") == 2
    )  # what comes to the host, and what is passed on from its ports


def test_what_no_rule_lets_in_is_dropped_and_loading_leaves_no_moment_without_rules():
    lines = [line.strip() for line in planned()["rules"].splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    # Once loaded, it makes way for what follows in the same step, and is not added to.
    assert lines[:3] == ["table inet trainyard", "delete table inet trainyard", "table inet trainyard {"]
    begin = lines.index("chain input {")
    assert lines[begin + 1 : begin + 3] == [
        "type filter hook input priority filter; policy drop;",
        "jump known",
    ]
    # Only what is the host's own and gets as far as this is dropped here: the rest is passed on as it was.
    published = lines[lines.index("chain published {") :]
    assert published[1].startswith("type filter hook prerouting priority dstnat - 10; policy accept;")
    assert published[2] == "fib daddr type != local accept"
    assert published[-4:] == ["jump known", "drop", "}", "}"]


def test_a_host_that_gives_others_their_addresses_goes_on_with_it():
    """Who asks for one has none yet, and comes from 0.0.0.0: a peer, too, at its next boot."""
    ask = "udp sport 68 udp dport 67 accept"
    server = {"proto": "udp", "port": 67, "address": "0.0.0.0", "process": "dnsmasq"}
    for link, serves in (
        *(("", True), ("eth1", True), ("br-lan", True)),
        *(("virbr0", False), ("lxdbr0", False), ("br-0123456789ab", False)),
    ):
        plan = planned(listening=[SSHD, {**server, "link": link}], loaded=UNLOADED)
        assert (ask in rules(plan)) is serves
        assert (plan["closes"] == []) is serves
    assert ask not in rules(planned())


CONTROLLER = {"name": "ctl.lan", "addresses": ["10.9.0.1", "fd00::1"]}
SLURMD = {"proto": "tcp", "port": 6818, "address": "0.0.0.0", "link": "", "process": "slurmd"}


def test_a_node_of_somebody_elses_slurm_is_not_taken_from_it():
    facts = survey(listening=[SSHD, SLURMD], slurm_controllers=[CONTROLLER])
    (error,) = firewall_plan(facts, ["192.168.1.101"], [], [], 1)["errors"]
    assert (
        "slurmd listens on tcp port 6818, and Slurm's controller (10.9.0.1) is no host of the inventory"
        in error
    )
    assert "firewall_allow: [{port: 6818, from: [10.9.0.1]}]" in error
    allow = [{"port": 6818, "from": ["10.9.0.1"]}]
    assert firewall_plan(facts, ["192.168.1.101"], allow, [], 1)["errors"] == []
    # One that is a peer comes in, and where nobody knows who it is, the warning has the port.
    planned(peers=["10.9.0.1"], listening=[SSHD, SLURMD], slurm_controllers=[CONTROLLER])
    for name, errors in (
        ("ctl", 0),
        ("ctl.lan", 0),
        ("other", 1),
    ):  # by another of its addresses, before site.yml
        plan = firewall_plan(facts, ["192.168.1.101"], [], [], 1, "", [name])
        assert len(plan["errors"]) == errors
    assert planned(listening=[SSHD, SLURMD], loaded=UNLOADED)["closes"] == ["tcp port 6818 (slurmd)"]
    planned(listening=[SSHD], slurm_controllers=[CONTROLLER])


def test_the_nodes_of_a_slurm_whose_controller_a_host_is_are_not_shut_out():
    ctld = {"proto": "tcp", "port": 6817, "address": "0.0.0.0", "link": "", "process": "slurmctld"}
    nodes = [{"name": f"gpu{n}", "addresses": [f"10.9.0.{n}"]} for n in range(1, 8)]
    facts = survey(listening=[SSHD, ctld], slurm_nodes=nodes, loaded=UNLOADED)

    def errors(allow=(), names=(), **more):
        return firewall_plan({**facts, **more}, ["10.9.0.1"], list(allow), [], 1, "", names)["errors"]

    (error,) = errors(names=["gpu2"])
    assert "of Slurm's nodes 5 (10.9.0.3, 10.9.0.4, 10.9.0.5, 10.9.0.6, …) are no hosts" in error
    assert "firewall_allow: [{port: 6817" in error
    assert errors(allow=[{"port": 6817, "from": ["10.9.0.0/24"]}]) == []
    assert errors(names=[f"gpu{n}" for n in range(2, 8)]) == []
    assert errors(loaded=LOADED) == []  # it was shut by an earlier run


def test_slurms_nodes_are_asked_of_its_controller_alone(load_module, monkeypatch):
    module = load_module("firewall_survey")
    monkeypatch.setattr(module, "is_own", lambda address: address == "10.9.0.1")
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (name, 0))])
    answer = "gpu1|10.9.0.1\ngpu2|10.9.0.2\ngpu2|10.9.0.2\nlogin|10.9.0.9\nCLUSTER: a\n"
    asked = type("Asked", (), {"run_command": lambda self, command: (0, answer, "")})()
    assert module.slurm_nodes(asked) == [
        {"name": "gpu2", "addresses": ["10.9.0.2"]},
        {"name": "login", "addresses": ["10.9.0.9"]},
    ]
    ctld = {
        "proto": "tcp",
        "state": "LISTEN",
        "address": "0.0.0.0",
        "link": "",
        "port": 6817,
        "owners": [("slurmctld", 7)],
    }
    assert module.listens([ctld], "slurmctld") and not module.listens([ctld], "slurmd")


def at(port, process, proto="tcp"):
    return {"proto": proto, "port": port, "address": "0.0.0.0", "link": "", "process": process}


@pytest.mark.parametrize(
    ("there", "allow", "words"),
    [
        # k3s on one machine: CoreDNS asks the API server from 10.42.0.3.
        ([at(6443, "k3s-server"), at(10250, "k3s-server"), at(8472, "an unknown process", "udp")], [],
         "k3s-server listens on tcp port 10250, as a node of Kubernetes"),
        ([at(6443, "k3s-server"), at(10250, "k3s-server"), at(8472, "an unknown process", "udp")], [],
         "(tcp port 10250, tcp port 6443, udp port 8472)"),
        ([at(6443, "kube-apiserver"), at(10250, "kubelet")], [], "(tcp port 10250, tcp port 6443)"),
        ([at(10250, "k3s-agent")], [], "(tcp port 10250)"),
        ([at(10250, "k3s-agent")], [], "[{port: 10250, from: [10.42.0.0/16, OTHER NODES]}, …]"),
        ([at(10250, "kubelet")], [], "[{port: 10250, from: [NETWORK OF THE PODS, OTHER NODES]}, …]"),
        ([at(16443, "kubelite"), at(10250, "kubelite")], [], "tcp port 16443"),
        ([at(10250, "kubelet")], [{"port": 10250, "from": ["10.42.0.0/16"]}], ""),
        ([at(5405, "corosync", "udp")], [], "corosync listens on udp port 5405"),
        ([at(5405, "corosync", "udp")], [{"port": "5404-5412", "proto": "udp"}], ""),
        # What is only closed is warned of.
        ([at(2377, "dockerd"), at(11434, "ollama"), at(8888, "jupyter-lab"), at(8006, "pveproxy")], [], ""),
        ([at(2379, "etcd"), at(2380, "etcd"), at(6379, "redis"), at(8265, "ray"), at(4646, "nomad")], [], ""),
    ],
)  # fmt: skip
def test_a_member_of_another_kind_of_cluster_is_not_taken_from_it(there, allow, words):
    facts = survey(listening=[SSHD, *there], loaded=UNLOADED)
    errors = firewall_plan(facts, ["192.168.1.101"], allow, [], 1)["errors"]
    assert bool(errors) == bool(words) and words in "".join(errors)
    # Where it was shut by an earlier run, that is as it is.
    assert firewall_plan({**facts, "loaded": LOADED}, ["192.168.1.101"], allow, [], 1)["errors"] == []


def test_a_member_of_corosyncs_keeps_the_members_that_are_no_hosts(load_module, monkeypatch, tmp_path):
    # With `transport: udpu` it sends by ports of chance, which no cure need name.
    there = [SSHD, at(41234, "corosync", "udp"), at(5405, "corosync", "udp")]
    others = [{"name": f"10.9.0.{n}", "addresses": [f"10.9.0.{n}"]} for n in (2, 3)]

    def errors(members=others, peers=("10.9.0.2",), allow=(), there=there):
        facts = survey(listening=there, corosync_members=members, loaded=UNLOADED)
        return firewall_plan(facts, list(peers), list(allow), [], len(peers), "", ["pve3"])["errors"]

    # The name of a host at an address of its own for this.
    assert "(10.8.0.3)" in errors([{"name": "pve3", "addresses": ["10.8.0.3"]}], ["10.9.0.3"])[0]
    (error,) = errors()
    assert "corosync listens on udp port 5405" in error and "inventory (10.9.0.3) would lose" in error
    assert "firewall_allow: [{port: 5404-5412, proto: udp, from: [10.9.0.3]}] for this host" in error
    assert errors(allow=[{"port": "5404-5412", "proto": "udp", "from": ["10.9.0.3"]}]) == []
    assert errors(peers=["10.9.0.2", "10.9.0.3"]) == []  # all of them are hosts: peers come to any port
    assert errors(members=[]) == []  # a cluster of this one alone
    assert "{port: 6000, proto: udp" in errors(there=[SSHD, at(6000, "corosync", "udp")])[0]
    assert "from: [THEIR NETWORK]" in errors(members=None)[0]

    module, file = load_module("firewall_survey"), tmp_path / "corosync.conf"
    monkeypatch.setattr(module, "is_own", lambda address: address == "10.9.0.1")
    file.write_text(
        "nodelist {\n" + "".join(f"  node {{\n    ring0_addr: 10.9.0.{n}\n  }}\n" for n in (1, 2)) + "}\n"
    )
    assert module.corosync_members(file) == [{"name": "10.9.0.2", "addresses": ["10.9.0.2"]}]
    file.write_text("totem {\n  interface {\n    bindnetaddr: 10.9.0.0\n  }\n}\n")
    assert module.corosync_members(file) is None and module.corosync_members(tmp_path / "none") is None


def test_slurms_controllers_are_read_from_its_settings(load_module, monkeypatch):
    module = load_module("firewall_survey")
    known = {
        "ctl": ["10.9.0.1", "fd00::1"],
        "10.9.0.2": ["10.9.0.2"],
        "old": ["10.9.0.3"],
        "me": ["127.0.1.1"],
    }

    def addresses(name, *_, **__):
        if name not in known:
            raise OSError(name)
        return [(0, 0, 0, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(module.socket, "getaddrinfo", addresses)
    text = """ClusterName=x
SlurmctldHost=ctl
slurmctldhost = backup(10.9.0.2)   # the second
#SlurmctldHost=nobody
SlurmctldHost=me
SlurmctldHost=unknown
"""
    found = module.slurm_controllers([text, "ControlMachine=old\n", text])
    assert [(one["name"], one["addresses"]) for one in found] == [
        ("ctl", ["10.9.0.1", "fd00::1"]),
        ("backup", ["10.9.0.2"]),
        ("old", ["10.9.0.3"]),
    ]
    assert module.slurm_controllers([]) == []


def test_a_host_that_is_reached_by_a_name_of_its_own_is_asked_for_it():
    """Else the name is gone minutes after the rules came, and with it the way to the host."""
    asked = "udp dport 5353 accept"
    for name, there in (("a.local", True), ("A.Local", True), ("a.lan", False), ("192.168.1.101", False)):
        plan = firewall_plan(survey(), [], [], [], 0, name)
        assert sum(asked in rule for rule in rules(plan)) == (2 if there else 0), name
    assert all(
        "daddr" in rule for rule in rules(firewall_plan(survey(), [], [], [], 0, "a.local")) if asked in rule
    )


def test_guests_get_addresses_and_names_from_the_host():
    """A question for an address comes from 0.0.0.0, so that no `from` of firewall_allow would fit it."""
    own = planned(bridges=["br-lan"])["rules"].split("chain input {")[1].split("\t}\n")[0]
    assert 'iifname "virbr*" udp dport { 53, 67, 547 } accept' in own
    assert 'iifname "lxdbr*" tcp dport 53 accept' in own
    assert 'iifname != { "br-lan" } iifname "br-*" tcp dport 53 accept' in own
    assert not any(line.strip().endswith('*" accept') for line in own.splitlines())


def test_a_lone_machine_has_no_rule_for_peers():
    assert not any("peers" in rule for rule in rules(planned(peers=())))


@pytest.mark.parametrize(
    ("own", "session", "ports"),
    [
        ([22], SESSION, [22]),
        ([], {**SESSION, "port": 2222}, [2222]),
        ([22022], None, [22022]),  # a local connection
        ([22], {**SESSION, "port": 2222}, [22, 2222]),
    ],
)
def test_ssh_is_open_where_it_really_answers(own, session, ports):
    plan = planned(ssh_ports=own, session=session)
    assert plan["ssh_ports"] == ports
    assert f"tcp dport {{ {', '.join(map(str, ports))} }} accept" in rules(plan)


def test_ssh_from_some_networks_alone():
    found = rules(planned(ssh_from=["192.168.1.0/24", "fd00::/8"]))
    assert "ip saddr { 192.168.1.0/24 } tcp dport { 22 } accept" in found
    assert "ip6 saddr { fd00::/8 } tcp dport { 22 } accept" in found
    assert "tcp dport { 22 } accept" not in found


def test_what_is_allowed_besides():
    allow = [{"port": "9100", "from": ["192.168.1.0/24"]}, {"port": "8000-8010", "proto": "udp"}]
    found = rules(planned(allow=allow))
    assert "ip saddr { 192.168.1.0/24 } tcp dport 9100 accept" in found
    assert "udp dport 8000-8010 accept" in found


def test_what_only_peers_will_reach_is_named_once():
    grafana = {"proto": "tcp", "port": 3000, "address": "0.0.0.0", "process": "grafana"}
    exporter = {"proto": "tcp", "port": 9100, "address": "::", "process": "node_exporter"}
    listening = [SSHD, grafana, {**grafana, "address": "::"}, exporter]
    plan = planned(loaded=UNLOADED, listening=listening, allow=[{"port": "9000-9200"}])
    assert plan["closes"] == ["tcp port 3000 (grafana)"]
    udp = {**SSHD, "proto": "udp", "process": "wg"}  # which is no SSH, whatever its port
    assert planned(loaded=UNLOADED, listening=[SSHD, udp])["closes"] == ["udp port 22 (wg)"]


@pytest.mark.parametrize(
    ("allow", "closes"),
    [
        ([], ["tcp port 3000 (grafana)", "tcp port 9100 (node_exporter)"]),
        ([{"port": 3000}], ["tcp port 9100 (node_exporter)"]),
        ([{"port": 3000}, {"port": "9000-9200"}], []),
    ],
)
def test_what_the_rules_that_are_loaded_let_others_reach_is_named_where_the_new_ones_do_not(allow, closes):
    grafana = {"proto": "tcp", "port": 3000, "address": "0.0.0.0", "process": "grafana"}
    exporter = {"proto": "tcp", "port": 9100, "address": "::", "process": "node_exporter"}
    closed = {"proto": "udp", "port": 3000, "address": "::", "process": "closed before"}
    opened = [{"proto": "tcp", "first": 3000, "last": 3000}, {"proto": "tcp", "first": 9000, "last": 9200}]
    loaded = {**LOADED, "opened": opened}
    plan = planned(loaded=loaded, listening=[SSHD, grafana, exporter, closed], allow=allow)
    assert plan["closes"] == closes


NFT_LIST = """\
table inet trainyard {
	set peers_ipv4 {
		type ipv4_addr
		elements = { 10.77.0.12 }
	}

	chain known {
		ct state established,related accept
		udp sport 67 udp dport 68 accept
		ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept
		tcp dport { 22, 2222 } accept
		ip saddr @peers_ipv4 fib saddr . iif oif exists accept
		tcp dport 8000-8010 accept
		ip saddr { 10.0.0.0/8, 192.168.1.0/24 } tcp dport 9100 accept
		ip6 saddr fd00::/8 udp dport 53 accept
	}

	chain input {
		type filter hook input priority filter; policy drop;
		jump known
	}
}
"""


def test_which_ports_the_loaded_rules_open(load_module):
    class Module:
        def get_bin_path(self, name):
            return f"/usr/sbin/{name}"

        def run_command(self, command):
            return 0, NFT_LIST if command[0] == "nft" else "active\n", ""

    assert load_module("firewall_survey").loaded(Module()) == {
        "table": True,
        "unit": True,
        "as_written": False,  # what the stand-in's file yields is another word
        "opened": [
            {"proto": "tcp", "first": 8000, "last": 8010},
            {"proto": "tcp", "first": 9100, "last": 9100},
            {"proto": "udp", "first": 53, "last": 53},
        ],
    }


@pytest.mark.parametrize(
    ("yields", "known", "as_written"),
    [
        (
            (0, "table inet trainyard {\n  elements = { 10.0.0.3, 10.0.0.2 }\n}\n"),
            True,
            True,
        ),  # a set has no order
        ((0, "table inet trainyard {\n  elements = { 10.0.0.2 }\n}\n"), True, False),
        ((1, ""), True, True),  # nothing to compare with
        ((0, "else"), False, True),
    ],
)
def test_a_rule_that_somebody_added_is_seen(load_module, yields, known, as_written):
    listed = "table inet trainyard {\n\telements = { 10.0.0.2,\n\t\t10.0.0.3 }\n}\n"

    class Module:
        def get_bin_path(self, name):
            return f"/usr/bin/{name}" if known or name != "unshare" else None

        def run_command(self, command):
            return (
                *(yields if command[0] == "unshare" else (0, listed if command[0] == "nft" else "active\n")),
                "",
            )

    assert load_module("firewall_survey").loaded(Module())["as_written"] is as_written


def test_whose_guests_go_on_and_who_is_no_guest():
    """Each program's own name for its host's end; names of cards, tunnels and a LAN's bridge are others'."""
    accepted = re.findall(r'iifname "(\S+)" accept', planned()["rules"])
    guests = (
        "docker0 docker_gwbridge br-0f3e5a9b1c2d podman0 cni0 cni-podman0 cali0a1b2c virbr0 lxdbr0 incusbr0 "
    )
    guests += "lxcbr0 lxc9f3e cilium_host mpqemubr0 vboxnet0 vmnet8 waydroid0 ve-guest vz-zone"
    others = "eth0 enp1s0 ens1f0np0 wlan0 wlp2s0 bond0 vmbr0 br0 bridge0 vlan100 ib0 ib0.8001 wg0 zt5u4 tun0 "
    others += "tailscale0 flannel.1 vxlan.calico veth1 tap0 macvlan0 dummy0 usb0 team0"
    taken = {name for name in f"{guests} {others}".split() if any(fnmatch(name, one) for one in accepted)}
    assert taken == set(guests.split())


def test_a_bridge_of_the_lan_is_none_of_dockers():
    alone = planned(bridges=["br-0f3e5a9b1c2d"])["rules"]
    assert '\t\tiifname "br-*" accept\n' in alone
    beside = planned(bridges=["br-0f3e5a9b1c2d", "br-dead", "br-lan"])["rules"]
    assert '\t\tiifname != { "br-dead", "br-lan" } iifname "br-*" accept\n' in beside
    assert '\t\tiifname "docker*" accept\n' in beside


def test_what_came_to_an_open_port_and_was_redirected_gets_in_by_that_port():
    """A rule for all that was redirected would let in what is sent elsewhere by way of this host."""
    plan = planned(allow=[{"port": 80}, {"port": "8000-8010", "proto": "udp", "from": ["10.0.0.0/8"]}])
    own = [line.strip() for line in plan["rules"].split("chain input {")[1].split("\t}\n")[0].splitlines()]
    assert own[3:6] == [
        "jump known",
        "meta l4proto tcp ct status dnat ct original proto-dst 80 accept",
        "ip saddr { 10.0.0.0/8 } meta l4proto udp ct status dnat ct original proto-dst 8000-8010 accept",
    ]
    assert "dnat" not in planned()["rules"].replace("priority dstnat", "")


def test_what_is_passed_on_to_containers_is_closed_and_named_like_the_rest():
    web = {"proto": "tcp", "port": 8080, "process": "passed on to 172.17.0.2:80"}
    proxy = {"proto": "tcp", "port": 8443, "address": "0.0.0.0", "process": "docker-proxy"}
    plan = planned(
        loaded=UNLOADED,
        listening=[SSHD, proxy],
        published=[web, {**web, "port": 9100}],
        allow=[{"port": 9100}],
    )
    assert plan["closes"] == ["tcp port 8443 (docker-proxy)", "tcp port 8080 (passed on to 172.17.0.2:80)"]


@pytest.mark.parametrize(
    ("more", "arguments", "said"),
    [
        ({"ufw": True}, {}, "ufw is active on this host"),
        ({"firewalld": True}, {}, "sudo systemctl disable --now firewalld"),
        (
            {"shut": ["a shuts out x", "b shuts out y"]},
            {},
            "On this host a shuts out x and b shuts out y: what one",
        ),
        # A peer that fail2ban has banned: its chain need not be flushed.
        ({"shut": ["iptables' chain INPUT shuts out x"]}, {}, "sudo fail2ban-client unban ADDRESS"),
        ({}, {"allow": [{"port": "0"}]}, "firewall_allow[0].port is '0'"),
        ({}, {"allow": [{"port": "90-80"}]}, "firewall_allow[0].port is '90-80'"),
        ({}, {"allow": [{"proto": "tcp"}]}, "firewall_allow[0].port is ''"),
        ({}, {"allow": [{"port": "80", "proto": "sctp"}]}, "firewall_allow[0].proto is 'sctp'"),
        ({}, {"allow": [{"port": "80", "source": "x"}]}, "unknown key 'source'"),
        ({}, {"allow": [{"port": "80", "from": ["lan"]}]}, "firewall_allow[0].from is 'lan'"),
        ({}, {"ssh_from": ["lan"]}, "firewall_ssh_from[0] is 'lan'"),
        ({}, {"allow": ["port=9100"]}, "firewall_allow[0] is 'port=9100': write a mapping"),
        ({}, {"allow": {"port": 9100}}, "firewall_allow is {'port': 9100}: write a list of mappings"),
        ({}, {"ssh_from": "10.0.0.0/8"}, "firewall_ssh_from is '10.0.0.0/8': write a list"),
        ({}, {"ssh_from": ["10.0.0.0/8"]}, "leaves out 192.168.1.9, from where SSH is in use at this moment"),
        (
            {"session": None, "clients": ["10.1.1.1", "192.168.1.9"]},
            {"ssh_from": ["10.0.0.0/8"]},
            "leaves out 192.168.1.9",
        ),
        ({"session": None, "ssh_ports": []}, {}, "Have one (sudo apt install openssh-server;"),
        ({}, {"peers": [], "expected_peers": 2}, "give each host its cluster_address"),
    ],
)
def test_what_would_go_wrong_is_refused(more, arguments, said):
    given = {
        "peers": ["192.168.1.101"],
        "allow": [],
        "ssh_from": [],
        **arguments,
    }  # as they come, odd types too
    found = firewall_plan(survey(**more), **given)
    assert set(found) == {"errors"}
    assert said in found["errors"][0]


def test_peers_are_all_others_of_the_group_by_all_their_addresses():
    hostvars = {
        "node1": {"ansible_host": "192.168.1.100"},
        "node2": {
            "ansible_host": "192.168.1.101",
            "cluster_address": "10.0.0.2",
            "ansible_facts": {"all_ipv4_addresses": ["10.0.0.2", "192.168.1.101"], "all_ipv6_addresses": []},
        },
        "node3": {
            "ansible_host": "gpu3.lan",
            "network_interfaces": [{"name": "e", "addresses": ["10.0.0.3/24", "fd00::3/64"]}],
        },
    }
    assert firewall_peers(hostvars, list(hostvars), "node1") == [
        "10.0.0.2",
        "10.0.0.3",
        "192.168.1.101",
        "fd00::3",
    ]
    # Wherever in the group it stands itself.
    assert firewall_peers(hostvars, list(hostvars), "node3") == ["10.0.0.2", "192.168.1.100", "192.168.1.101"]


def test_a_gateway_that_forwards_ports_to_several_hosts_is_no_peer():
    hostvars = {
        "node1": {"ansible_host": "203.0.113.1", "ansible_port": 2201, "cluster_address": "10.0.0.1"},
        "node2": {"ansible_host": "203.0.113.1", "ansible_port": 2202, "cluster_address": "10.0.0.2"},
        "node3": {"ansible_host": "203.0.113.1", "ansible_port": 2203, "cluster_address": "10.0.0.3"},
    }
    assert firewall_peers(hostvars, list(hostvars), "node1") == ["10.0.0.2", "10.0.0.3"]
    assert firewall_peers(hostvars, ["node2"], "node1") == ["10.0.0.2"]
    hostvars["node2"]["cluster_address"] = "203.0.113.1"  # nor where somebody took it for the cluster's
    assert firewall_peers(hostvars, list(hostvars), "node1") == ["10.0.0.3"]


@pytest.mark.parametrize(
    ("more", "peers"),
    [
        ({"ansible_facts": {"all_ipv4_addresses": ["10.0.0.2"]}}, ["10.0.0.2"]),
        ({}, ["10.0.0.2", "203.0.113.5"]),  # left out by -l, and not asked: its second interface's, perhaps
        (
            {"ansible_host": "FD00:0::5", "ansible_facts": {"all_ipv6_addresses": ["fd00::5"]}},
            ["10.0.0.2", "fd00::5"],
        ),
        ({"ansible_facts": {"all_ipv4_addresses": ["10.0.0.2", "203.0.113.5"]}}, ["10.0.0.2", "203.0.113.5"]),
        ({"cluster_address": None}, ["203.0.113.5"]),  # all that is known of it
    ],
)
def test_a_gateway_that_forwards_ports_to_one_host_is_no_peer(more, peers):
    node2 = {"ansible_host": "203.0.113.5", "cluster_address": "10.0.0.2", **more}
    hostvars = {"node1": {"cluster_address": "10.0.0.1"}, "node2": node2}
    assert firewall_peers(hostvars, list(hostvars), "node1") == peers


@pytest.mark.parametrize("odd", [["name=eth0"], "eth0", {"name": "eth0"}, [{"addresses": "10.0.0.9/24"}], 5])
def test_odd_network_interfaces_of_a_peer_are_for_its_own_role_to_refuse(odd):
    hostvars = {"node1": {}, "node2": {"cluster_address": "10.0.0.2", "network_interfaces": odd}}
    assert firewall_peers(hostvars, list(hostvars), "node1") == ["10.0.0.2"]


@pytest.mark.parametrize(
    ("loaded", "live"),
    [
        (LOADED, True),
        ({**LOADED, "table": False}, False),  # nft flush ruleset
        ({**LOADED, "unit": False}, False),  # by hand: it would not come again with nftables
        ({**LOADED, "as_written": False}, False),  # nft insert rule …
    ],
)
def test_rules_that_are_not_in_force_are_loaded_again(loaded, live):
    assert planned(loaded=loaded)["live"] is live


SS = """\
udp UNCONN 0 0 127.0.0.1:323 0.0.0.0:* users:(("chronyd",pid=7,fd=5))
udp UNCONN 0 0 10.0.0.5%eth0:68 0.0.0.0:* users:(("systemd-network",pid=8,fd=5))
tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=50,fd=3),("systemd",pid=1,fd=60))
tcp LISTEN 0 128 0.0.0.0:8888 0.0.0.0:* users:(("sshd",pid=61,fd=9))
tcp LISTEN 0 128 0.0.0.0:6010 0.0.0.0:* users:(("sshd",pid=62,fd=9))
tcp LISTEN 0 128 0.0.0.0:7777 0.0.0.0:* users:(("sshd",pid=63,fd=9))
tcp LISTEN 0 128 [::1]:631 [::]:* users:(("cupsd",pid=9,fd=4))
tcp LISTEN 0 128 *:3000 *:*
tcp ESTAB 0 0 [::ffff:192.168.1.50]:22 [::ffff:192.168.1.9]:40000 users:(("sshd-session",pid=70,fd=4))
tcp ESTAB 0 0 127.0.0.1:22 127.0.0.1:40001 users:(("sshd",pid=71,fd=4))
tcp ESTAB 0 0 192.168.1.50:22 192.168.1.50:40002 users:(("sshd",pid=72,fd=4))
tcp ESTAB 0 0 192.168.1.50:8888 192.168.1.77:40003 users:(("sshd",pid=61,fd=11))
tcp ESTAB 0 0 192.168.1.50:40004 192.168.1.78:22 users:(("ssh",pid=80,fd=3))
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`run_command` of a host with the sockets SS; its processes lie in tmp_path."""
    titles = {
        50: "sshd: /usr/sbin/sshd -D [listener] 0 of 10-100",
        61: "sshd: root@pts/0",
        62: "sshd: root [priv]",
    }
    for pid, title in titles.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(title)
        (tmp_path / str(pid) / "status").write_text("Name:\tsshd\nUid:\t0\t0\t0\t0\n")
    (tmp_path / "63").mkdir()
    (tmp_path / "63" / "cmdline").write_text("anybody's own program, called sshd")
    (tmp_path / "63" / "status").write_text("Name:\tsshd\nUid:\t1000\t1000\t1000\t1000\n")
    answers = {
        "ss": (0, SS, ""),
        "sshd": (0, "port 22\nlistenaddress [::]:22\nlistenaddress 0.0.0.0:2222\n", ""),
        "systemctl": (0, "Listen=[::]:22022 (Stream)\nActiveState=inactive\n", ""),
    }
    monkeypatch.setattr(host_survey.shutil, "which", lambda name, path: name)
    return answers, lambda command: answers[command[0]]


def test_only_sshds_own_ports_are_sshs_not_what_a_login_holds_open(host, tmp_path):
    answers, run_command = host
    found = host_survey.sockets(run_command)
    assert host_survey.ssh_ports(run_command, found, str(tmp_path)) == [22, 2222]
    answers["systemctl"] = (0, "Listen=[::]:22022 (Stream)\nActiveState=active\n", "")
    assert host_survey.ssh_ports(run_command, found, str(tmp_path)) == [22, 2222, 22022]
    answers["sshd"] = (1, "", "no host key")
    assert host_survey.ssh_ports(run_command, found, str(tmp_path)) == [22, 22022]


def test_sshd_is_asked_for_its_ports_as_of_a_whole_connection(host, tmp_path):
    """With `Match LocalPort` in its file it tells nothing else; the rules would shut a port that it is yet to take."""
    answers, run_command = host

    def ask(command):
        if command[0] == "sshd" and "lport=22" not in command[-1]:
            return (
                255,
                "",
                "'Match LocalPort' in configuration but 'lport' not in connection test specification.",
            )
        return run_command(command)

    answers["sshd"] = (0, "listenaddress [::]:2222\nlistenaddress 10.0.0.1:2200 rdomain vrf1\n", "")
    assert host_survey.ssh_ports(ask, [], str(tmp_path)) == [2200, 2222]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("192.168.1.9 40000 192.168.1.50 22", ("192.168.1.9", "192.168.1.50", 22)),
        ("::ffff:10.0.0.9 40000 ::ffff:10.0.0.5 2222", ("10.0.0.9", "10.0.0.5", 2222)),
        ("fe80::9%eth0 40000 fe80::5%eth0 22", ("fe80::9", "fe80::5", 22)),
        ("UNKNOWN 65535 UNKNOWN 65535", None),  # from the machine whose guest this is: port 65535 is nobody's
        ("", None),
    ],
)
def test_by_what_connection_the_controller_came(tmp_path, monkeypatch, said, found):
    monkeypatch.setattr(host_survey.os, "getpid", lambda: 7)
    for pid, parent, environment in ((7, 6, "A=1"), (6, 1, f"B=2\0SSH_CONNECTION={said}\0C=3")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/environ").write_text(environment)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) b) S {parent} 1")
    session = host_survey.ssh_session(str(tmp_path))
    assert (session and (session["client"], session["address"], session["port"])) == found


@pytest.mark.parametrize(
    ("end", "address"),
    [
        ("[fe80::1824:99ff:fee5:70e]%eth0:546", "fe80::1824:99ff:fee5:70e"),
        ("[::ffff:10.0.0.1]:22", "10.0.0.1"),
        ("0.0.0.0%eth0:67", "0.0.0.0"),
        ("*%eth0:547", "*"),
        ("[::1]:631", "::1"),
    ],
)
def test_an_address_is_plain_whatever_it_is_bound_to(end, address):
    """As ss writes it, which has an interface behind the bracket; a login to oneself by one was another machine's."""
    assert host_survey.plain(end)[0] == address


def test_who_is_logged_in_from_elsewhere(host):
    found = host_survey.sockets(host[1])
    assert host_survey.ssh_logins(found, [22]) == ["192.168.1.9"]


def tunnel(link, kind, *ports):
    """One of those that the survey tells; without ports, they are not known."""
    told = [{"proto": proto, "port": port} for proto, port in ports]
    return {"link": link, "kind": kind, "ports": told or None}


def test_the_tunnel_by_which_the_controller_came_stays_open():
    listens = {"proto": "udp", "port": 51820, "address": "0.0.0.0", "process": "an unknown process"}
    known = [tunnel("wg0", "wireguard", ("udp", 51820)), tunnel("tun0", "tun", ("tcp", 443), ("tcp", 22))]
    plan = planned(tunnels=known, listening=[SSHD, listens], loaded=UNLOADED, ssh_from=["192.168.1.0/24"])
    assert {"udp dport 51820 accept", "tcp dport 443 accept"} < set(rules(plan)) and plan["closes"] == []
    assert "tcp dport 22 accept" not in rules(plan)  # ssh -w: where SSH comes from, firewall_ssh_from says
    other = planned(listening=[SSHD, listens], loaded=UNLOADED)
    assert "51820" not in other["rules"] and other["closes"] == ["udp port 51820 (an unknown process)"]


@pytest.mark.parametrize(
    ("kind", "proto", "said"),
    [("wireguard", "udp", "install wireguard-tools"), ("tun", "tcp", "proto: udp or tcp}")],
)
def test_a_tunnel_whose_port_is_not_known_is_refused_until_it_is_named(kind, proto, said):
    unknown = [tunnel("vpn0", kind)]
    (refused,) = firewall_plan(survey(tunnels=unknown), ["192.168.1.101"], [], [], 1)["errors"]
    assert f"SSH, or a peer, comes by vpn0, a tunnel to this host ({kind})" in refused and said in refused
    assert planned(tunnels=unknown, allow=[{"port": 1194, "proto": proto}])
    # What is open to some alone is no VPN's.
    some = [{"port": 9100, "proto": proto, "from": ["192.168.1.5"]}]
    assert firewall_plan(survey(tunnels=unknown), ["192.168.1.101"], some, [], 1)["errors"] == [refused]


def test_ipsec_stays_open():
    listens = {"proto": "udp", "port": 4500, "address": "0.0.0.0", "process": "charon"}
    opened = {"udp dport 500 accept", "udp dport 4500 accept", "meta l4proto esp accept"}
    plan = planned(ipsec=True, listening=[SSHD, listens], loaded=UNLOADED)
    assert opened < set(rules(plan)) and plan["closes"] == []
    assert not opened & set(rules(planned(listening=[SSHD, listens])))


WG0 = {"name": "wg0", "kind": "wireguard", "master": None, "addresses": ["10.9.0.1/24"]}
TUN0 = {"name": "tun0", "kind": "tun", "master": None, "addresses": ["10.8.0.1/24"]}
OVPN0 = {**TUN0, "name": "ovpn0", "kind": "ovpn-dco"}
LINKS = [{"name": "eth0", "kind": None, "master": None, "addresses": ["192.168.1.50/24"]}, WG0]


class Tunnelled:
    """A host with the program wg, or without; `back`: the interface that leads to every client."""

    def __init__(self, wg=True, back="eth0"):
        self.wg, self.back = wg, back

    def get_bin_path(self, name):
        return "/usr/bin/wg" if self.wg else None

    def run_command(self, words):
        if words[:4] == ["ip", "-json", "route", "get"]:
            return 0, f'[{{"dst": "{words[4]}", "dev": "{self.back}"}}]', ""
        assert words == ["wg", "show", "wg0", "listen-port"]
        return 0, "51820\n", ""


def udp(port, *owners, address="0.0.0.0", state="UNCONN"):
    return {
        **{"proto": "udp", "state": state, "address": address, "link": "", "port": port},
        "owners": list(owners),
    }


def tcp(port, *owners, address="0.0.0.0", state="LISTEN"):
    return {**udp(port, *owners, address=address, state=state), "proto": "tcp"}


@pytest.mark.parametrize("program", [True, False])
def test_which_wireguard_the_controller_came_by(load_module, monkeypatch, program):
    module = load_module("firewall_survey")
    monkeypatch.setattr(module, "interfaces", lambda _: LINKS)
    sockets = [udp(4791), udp(51820), udp(5353, ("avahi-daemon", 7)), tcp(2049)]
    by_tunnel, host = {**SESSION, "address": "10.9.0.1"}, Tunnelled(program)
    known = [tunnel("wg0", "wireguard", ("udp", 51820))]
    assert module.tunnels(host, by_tunnel, ["10.9.0.2"], sockets) == known
    assert module.tunnels(host, SESSION, ["192.168.1.9"], sockets) == []
    assert module.tunnels(host, None, [], sockets) == []
    # The LAN's address, or one who types on the host itself and is in from elsewhere: the way back tells.
    assert module.tunnels(Tunnelled(program, "wg0"), SESSION, ["10.9.0.2"], sockets) == known
    assert module.tunnels(Tunnelled(program, "wg0"), None, ["10.9.0.2"], sockets) == known
    more = [*sockets, udp(40000)]  # NFS' lockd, say
    assert module.tunnels(host, by_tunnel, [], more) == (known if program else [tunnel("wg0", "wireguard")])


VPN, OTHER, ADMIN = ("openvpn", 20), ("openvpn", 21), "127.0.0.1"


@pytest.mark.parametrize(
    ("sockets", "ports"),
    [
        ([udp(1194, VPN), udp(1195, OTHER), tcp(7505, VPN), tcp(22, ("sshd", 9))], [("udp", 1194)]),
        # Of TCP, where somebody is in; not where it is managed, nor the guests' own end.
        ([tcp(443, VPN), tcp(443, VPN, state="ESTAB"), tcp(7505, VPN, address=ADMIN)], [("tcp", 443)]),
        ([udp(1194, VPN), udp(53, VPN, address="10.8.0.1")], [("udp", 1194)]),
        # The listener is another process of the same program's, or sshd's (ssh -w).
        ([tcp(22, ("sshd", 9)), tcp(22, ("sshd", 20), state="ESTAB")], [("tcp", 22)]),
        # It goes to a server elsewhere.
        ([tcp(40000, VPN, state="ESTAB"), udp(40001, VPN, state="ESTAB")], []),
        # Somebody else takes them in for it, or it is in another's name.
        ([tcp(1194, VPN, address=ADMIN), tcp(1194, VPN, address=ADMIN, state="ESTAB")], None),
        ([udp(1195, OTHER)], None),
    ],
)
def test_where_the_program_behind_a_tun_device_is_spoken_to(load_module, tmp_path, sockets, ports):
    for pid, device in ((20, "tun0"), (21, "tun1")):
        for folder in ("fd", "fdinfo"):
            (tmp_path / f"{pid}/{folder}").mkdir(parents=True)
        (tmp_path / f"{pid}/fd/4").symlink_to("/dev/net/tun")
        (tmp_path / f"{pid}/fdinfo/4").write_text(f"pos:\t0\nflags:\t0100002\niff:\t{device}\n")
    found = load_module("firewall_survey").served_ports(TUN0, sockets, str(tmp_path))
    assert found == (ports if ports is None else [{"proto": proto, "port": port} for proto, port in ports])


def test_which_openvpn_the_controller_came_by(load_module, monkeypatch):
    """In a bridge, too, where a virtual machine's device counts for nothing; and the kernel's own, held by nobody."""
    module = load_module("firewall_survey")
    bridge = {"name": "br0", "kind": "bridge", "master": None, "addresses": ["192.168.1.50/24"]}
    tap0, guest = ({**TUN0, "name": name, "master": "br0", "addresses": []} for name in ("tap0", "vnet0"))
    monkeypatch.setattr(module, "device_holders", lambda link, proc: {"tap0": {20}, "vnet0": {30}}.get(link))
    screen = [tcp(5900, ("qemu-system-x86", 30), state=state) for state in ("LISTEN", "ESTAB")]
    sockets = [udp(1194, VPN), *screen]
    for links, back, known in (
        ([bridge, tap0, guest], "br0", [tunnel("tap0", "tun", ("udp", 1194))]),
        ([*LINKS, OVPN0], "ovpn0", [tunnel("ovpn0", "ovpn-dco", ("udp", 1194))]),
        ([*LINKS, OVPN0], "eth0", []),
    ):
        monkeypatch.setattr(module, "interfaces", lambda _, links=links: links)
        assert module.tunnels(Tunnelled(back=back), SESSION, [SESSION["client"]], sockets) == known


@pytest.mark.parametrize(
    ("count", "sockets", "there"),
    [("0", [udp(4500)], False), ("2", [], True), ("0", [udp(500, ("charon", 7))], True)],
)
def test_whether_the_host_has_ipsec(load_module, count, sockets, there):
    class Module:
        def run_command(self, words):
            assert words == ["ip", "xfrm", "state", "count"]  # more would show keys
            return 0, f"\t SAD count {count}\n", ""

    assert load_module("firewall_survey").ipsec(Module(), sockets) is there


def test_what_others_could_reach(host, load_module):
    found = load_module("firewall_survey").listening(host_survey.sockets(host[1]))
    assert {(item["proto"], item["port"], item["process"]) for item in found} == {
        ("udp", 68, "systemd-network"),
        ("tcp", 22, "sshd"),
        ("tcp", 8888, "sshd"),
        ("tcp", 6010, "sshd"),
        ("tcp", 7777, "sshd"),
        ("tcp", 3000, "an unknown process"),
    }


IPTABLES = """
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER -d 127.0.0.1/32 ! -i docker0 -p tcp -m tcp --dport 11434 -j DNAT --to-destination 172.17.0.2:11434
-A DOCKER -d 10.0.0.1/32 ! -i docker0 -p udp -m udp --dport 53 -j DNAT --to-destination 172.17.0.3:53
-A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080
-A POSTROUTING -p tcp -m tcp --dport 25 -j MASQUERADE --to-ports 1024-31000
-A PREROUTING -p tcp -m multiport --dports 81,8000:8010 -j DNAT --to-destination 172.17.0.5
-A PREROUTING -p tcp -m tcp --dport 8100:8110 -j DNAT --to-destination 172.17.0.2:8100-8110
-A PREROUTING -p tcp -m tcp --dport 82 -j REDIRECT
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web:http" -m tcp --dport 30080 -j KUBE-EXT-V7WHPSTR7G6YHTBY
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/api" -m tcp --dport 443 -j KUBE-SVC-NPX
-A KUBE-SEP-2 -p tcp -m comment --comment "default/web:http" -m tcp -j DNAT --to-destination 10.244.0.5:8080
"""
NFT = """
		iifname != "docker0" tcp dport 8080 counter packets 0 bytes 0 dnat to 172.17.0.2:80
		tcp dport 9443 dnat ip to 172.17.0.4:443
		tcp dport 443 counter packets 0 bytes 0 redirect to :8443
		ip saddr 172.17.0.2 tcp dport 80 counter packets 0 bytes 0 masquerade
		udp dport { 83, 5000-5010 } redirect to :6000
		dnat to tcp dport map { 90 : 10.0.0.2, 91 : 10.0.0.3 . 8080 }
		tcp dport 92 redirect
	map service-nodeports {
		elements = { udp . 30053 : goto external-ABC-dns,
			tcp . 30081 : goto external-ULMVA6XW-ns1/svc1/tcp/p80 }
	map service-ips {
		elements = { 10.96.0.1 . tcp . 444 : goto external-ULMVA6XW-ns1/svc1/tcp/p80 }
"""


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("# a comment: ENABLED=yes\nENABLED=no\nLOGLEVEL=low\n", False),
        ("ENABLED=yes\n", True),
        ('ENABLED="yes"\n', True),
        ("ENABLED='YES' # by hand\n", True),
        ("ENABLED=yes\nENABLED=no\n", False),
        ("", False),
        (None, False),
    ],
)
def test_whether_ufw_is_on_is_read_as_it_reads_it(load_module, tmp_path, text, on):
    survey, file = load_module("firewall_survey"), tmp_path / "ufw.conf"
    if text is not None:
        file.write_text(text)
    assert survey.ufw_enabled(Programs(ufw=""), str(file)) is on
    assert survey.ufw_enabled(Programs(), str(file)) is False


def test_which_ports_are_passed_on(load_module):
    class Module:
        def get_bin_path(self, name):
            return name != "ip6tables-save"

        def run_command(self, command):
            return 0, {"iptables-save": IPTABLES, "nft": NFT}[command[0]], ""

    assert [tuple(one.values()) for one in load_module("firewall_survey").published(Module())] == [
        ("tcp", 80, "passed on to port 8080"),
        ("tcp", 81, "passed on to 172.17.0.5"),
        ("tcp", 82, "passed on to port 82"),
        ("tcp", 90, "passed on to 10.0.0.2"),
        ("tcp", 91, "passed on to 10.0.0.3:8080"),
        ("tcp", 92, "passed on to port 92"),
        ("tcp", 443, "passed on to port 8443"),
        ("tcp", 8000, "with those up to 8010 passed on to 172.17.0.5"),
        ("tcp", 8080, "passed on to 172.17.0.2:80"),
        ("tcp", 8100, "with those up to 8110 passed on to 172.17.0.2:8100-8110"),
        ("tcp", 9443, "passed on to 172.17.0.4:443"),
        ("tcp", 30080, "passed on to a service of Kubernetes"),
        ("tcp", 30081, "passed on to a service of Kubernetes"),
        ("udp", 53, "passed on to 172.17.0.3:53"),
        ("udp", 83, "passed on to port 6000"),
        ("udp", 5000, "with those up to 5010 passed on to port 6000"),
        ("udp", 30053, "passed on to a service of Kubernetes"),
    ]


AFTER = "-A PREROUTING -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 8081\n"  # that it is still read


@pytest.mark.parametrize(
    "rules",
    [
        '-A INPUT -p tcp -m tcp --dport 80 -m comment --comment "http redirect" -j ACCEPT\n',
        '-A INPUT -p tcp -m tcp --dport 80 -m comment --comment "a \\"b\\" redirect" -j ACCEPT\n',
        '-A INPUT -p tcp -m tcp --dport 80 -m comment --comment "was -j REDIRECT" -j ACCEPT\n',
        "-A INPUT -p tcp -m tcp --dport 80 -m comment --comment redirect -j ACCEPT\n",
        "-A INPUT -p tcp -m tcp --dport 80 -j REDIRECT-LOG\n",
        '\t\ttcp dport 80 accept comment "http, for the redirect"\n',
        "\t\ttcp dport 80 counter packets 0 bytes 0 jump http-redirect\n",
        "\t\ttcp dport 80 counter packets 0 bytes 0 jump redirect_http\n",
        "-A OUTPUT -p tcp -m tcp --dport 443 -j REDIRECT --to-ports 15001\n",
        "-A OUTPUT -d 127.0.0.1/32 -p tcp -m tcp --dport 5432 -j DNAT --to-destination 10.0.0.9:5432\n",
        "\tchain OUTPUT {\n\t\ttype nat hook output priority -100; policy accept;\n"
        "\t\tip daddr { 10.0.0.1, 10.0.0.2 } tcp dport 443 redirect to :15001\n"
        "\t\tdnat to tcp dport map { 90 : 10.0.0.2 }\n\t}\n",
    ],
)
def test_what_is_only_said_or_for_the_hosts_own_connections_passes_no_port_on(load_module, rules):
    """Else a port that is open stood in the plan as one that was passed on, and was shut for it."""
    passed_on = load_module("firewall_survey").passed_on
    assert list(passed_on(rules + AFTER)) == [("tcp", "81", "8081")]
    chain = "\tchain PREROUTING {\n\t\ttype nat hook prerouting priority -100; policy accept;\n"
    assert list(passed_on(f"{rules}{chain}\t\ttcp dport 82 redirect to :8082\n\t}}\n")) == [
        ("tcp", "82", ":8082")
    ]


@pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed")
def test_nft_accepts_the_rules(tmp_path):
    allow = [{"port": "9100", "from": ["192.168.1.0/24", "fd00::/8"]}, {"port": "8000-8010", "proto": "udp"}]
    plan = planned(
        peers=["192.168.1.101", "fd00::3"],
        allow=allow,
        ssh_from=["192.168.1.0/24"],
        bridges=["br-lan", "br-x"],
        ipsec=True,
    )
    file = tmp_path / "rules.nft"
    file.write_text(plan["rules"])
    # In a network namespace of its own: --check asks the kernel, but changes nothing.
    done = subprocess.run(
        ["unshare", "--net", "nft", "--check", "--file", str(file)], capture_output=True, text=True
    )
    if "unshare" in done.stderr:
        pytest.skip("this user cannot make a network namespace")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("manage", "found", "included", "said"),
    [
        (True, None, ["rules.yml"], None),
        (False, [], [], "stays as it is."),
        (
            False,
            [{"path": "/etc/nftables.d/trainyard.nft"}],
            ["remove.yml"],
            "stays as it is, and the rules that an",
        ),
    ],
)
def test_rules_of_an_earlier_run_go_from_a_host_whose_firewall_is_not_ours(manage, found, included, said):
    """Else the owner's own firewall would stand beside them."""
    look, tell, *includes = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    assert look["host_made"] == {"made": "{{ _firewall_made[:-1] }}"} and look["when"] == tell["when"]
    given = {"firewall_manage": manage, look["register"]: {"found": found} if found is not None else {}}
    environment = jinja2.Environment()
    assert [
        task["ansible.builtin.include_tasks"]
        for task in includes
        if environment.compile_expression(task["when"])(**given)
    ] == included
    if said:
        assert said in environment.from_string(tell["ansible.builtin.debug"]["msg"]).render(given)


def test_the_survey_is_told_of_the_peers(repository):
    """By a tunnel that no login came by, the cluster's own traffic may come."""
    (block,) = yaml.safe_load((repository / "roles/firewall/tasks/precheck.yml").read_text())
    (survey,) = [task["firewall_survey"] for task in block["block"] if "firewall_survey" in task]
    assert survey == {
        "peers": "{{ __firewall_peers }}",
        "hosts": "{{ hostvars | cluster_ways(__firewall_others, inventory_hostname) }}",
    }
    assert "firewall_peers" in block["vars"]["__firewall_peers"]


def ruleset(rules, policy="accept", family="inet", table="filter", hook="input"):
    chain = {
        "family": family,
        "table": table,
        "name": "in",
        "type": "filter",
        "hook": hook,
        "prio": 0,
        "policy": policy,
    }
    made = [{"rule": {"family": family, "table": table, "chain": "in", "expr": rule}} for rule in rules]
    known = {
        "family": family,
        "table": table,
        "name": "known",
        "elem": [{"elem": {"val": "10.0.0.2"}}, "10.0.0.7"],
    }
    lan = {"family": family, "table": table, "name": "lan", "elem": ["wlan0", {"elem": {"val": "eth0"}}]}
    ways = [["ipv6", {"drop": None}], ["ipv4", {"jump": {"target": "known"}}]]
    doors = {"family": family, "table": table, "name": "doors", "map": "verdict", "elem": ways}
    sets = [{"set": known}, {"set": lan}, {"map": doors}]
    others = {
        "known": source("@known"),
        "other": source("10.9.0.1"),
        "back": [{"return": None}],
        "shut": REST,
    }
    made += [
        {"rule": {"family": family, "table": table, "chain": name, "expr": rule}}
        for name, rule in others.items()
    ]
    return json.dumps({"nftables": [{"metainfo": {}}, {"table": {}}, *sets, {"chain": chain}, *made]})


def source(right, op="=="):
    left = {"payload": {"protocol": "ip", "field": "saddr"}}
    return [{"match": {"op": op, "left": left, "right": right}}, {"counter": {}}, {"accept": None}]


def by(*links):
    right = links[0] if len(links) == 1 else {"set": list(links)}
    return [{"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": right}}, {"accept": None}]


def states(*names):
    right = names[0] if len(names) == 1 else list(names)
    return {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": right}}


PEERS = {"10.0.0.2": {"eth0"}, "10.0.0.7": {"eth0"}}
SSH_ALONE = [{"match": {"op": "==", "left": {"payload": {}}, "right": 22}}, {"accept": None}]
REST = [{"counter": {"packets": 3, "bytes": 4}}, {"reject": {"type": "icmpx", "expr": "admin-prohibited"}}]


NEAR = source({"prefix": {"addr": "10.0.0.0", "len": 24}})[:1]
ACCEPT = {"accept": None}


@pytest.mark.parametrize(
    ("rules", "more", "shuts"),
    [
        ([SSH_ALONE], {"policy": "drop"}, True),
        ([SSH_ALONE, REST], {}, True),
        ([SSH_ALONE, [{"log": {"prefix": "x"}}, {"drop": None}]], {"family": "ip"}, True),
        ([], {}, False),
        ([SSH_ALONE], {}, False),
        # fail2ban's, and the like: of some addresses.
        ([[SSH_ALONE[0], {"match": {"right": "@banned"}}, {"reject": None}]], {}, False),
        ([[{"accept": None}], REST], {"policy": "drop"}, False),
        ([SSH_ALONE, REST], {"hook": "forward"}, False),
        # What the cluster's network sends is let in, or all that comes by an interface.
        ([source({"prefix": {"addr": "10.0.0.0", "len": 24}}), REST], {"policy": "drop"}, False),
        ([source({"set": ["10.9.0.1", {"range": ["10.0.0.1", "10.0.0.9"]}]})], {"policy": "drop"}, False),
        ([source("@known")], {"policy": "drop"}, False),
        ([source("@unknown")], {"policy": "drop"}, True),
        ([[states("new"), *source({"prefix": {"addr": "10.0.0.0", "len": 24}})]], {"policy": "drop"}, False),
        ([[states("established", "related"), {"accept": None}], SSH_ALONE], {"policy": "drop"}, True),
        ([by("eth0")], {"policy": "drop"}, False),
        ([by("eth*")], {"policy": "drop"}, False),
        ([by("wlan0", "eth0")], {"policy": "drop"}, False),
        # By another interface, as of containers and tunnels, no peer comes.
        ([by("docker0")], {"policy": "drop"}, True),
        ([by("tun*")], {"policy": "drop"}, True),
        ([by("lo")], {"policy": "drop"}, True),
        ([by("@lan")], {"policy": "drop"}, False),
        ([by("@none")], {"policy": "drop"}, True),
        ([[states("new", "established"), {"accept": None}]], {"policy": "drop"}, False),
        ([[states({"set": ["new", "established"]}), {"accept": None}]], {"policy": "drop"}, False),
        # What drops all that one of them begins to say.
        ([[by("eth0")[0], {"drop": None}]], {}, True),
        ([[states("established"), {"accept": None}], [states("new"), {"drop": None}]], {}, True),
        ([[states("invalid"), {"drop": None}], [by("docker0")[0], {"drop": None}]], {}, False),
        ([[source("10.0.0.7")[0], {"reject": None}]], {}, True),
        # Each of them is to be let in, not just one.
        ([source("10.0.0.2")], {"policy": "drop"}, True),
        ([source("10.0.0.2"), source("10.0.0.7")], {"policy": "drop"}, False),
        ([source("10.0.0.3")], {"policy": "drop"}, True),
        ([REST, source({"prefix": {"addr": "10.0.0.0", "len": 24}})], {}, True),
        ([source("10.0.0.3", "!=")], {"policy": "drop"}, False),
        ([source("10.0.0.2", "!=")], {"policy": "drop"}, True),
        ([[{"match": {**by("lo")[0]["match"], "op": "!="}}, {"drop": None}]], {}, True),
        ([[by("eth0")[0], {"jump": {"target": "known"}}], [by("eth0")[0], {"drop": None}]], {}, False),
        ([[by("eth0")[0], {"jump": {"target": "other"}}], [by("eth0")[0], {"drop": None}]], {}, True),
        ([[{"jump": {"target": "back"}}], SSH_ALONE], {"policy": "drop"}, True),
        ([[{"goto": {"target": "back"}}], [{"accept": None}]], {"policy": "drop"}, True),
        ([[{"jump": {"target": "shut"}}]], {}, True),
        (
            [
                [
                    {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "tcp"}},
                    {"accept": None},
                ],
                REST,
            ],
            {},
            False,
        ),
        ([[*source({"prefix": {"addr": "10.0.0.0", "len": 24}})[:1], *SSH_ALONE]], {"policy": "drop"}, True),
        (
            [[*NEAR, {"mangle": {"key": {"meta": {"key": "mark"}}, "value": 1}}, ACCEPT]],
            {"policy": "drop"},
            False,
        ),
        ([[*NEAR, {"notrack": None}, ACCEPT]], {"policy": "drop"}, False),
        ([[*NEAR, {"set": {"op": "add", "elem": "a", "set": "@s"}}, ACCEPT]], {"policy": "drop"}, False),
        ([SSH_ALONE], {"policy": "drop", "table": "trainyard"}, False),
        ([SSH_ALONE], {"policy": "drop", "family": "ip6"}, False),
    ],
)
def test_somebody_s_own_packet_filter_is_seen_where_it_shuts_out_whom_it_does_not_know(
    load_module, rules, more, shuts
):
    found = load_module("firewall_survey").shut_by_nft(ruleset(rules, **more), PEERS)
    named = f"nftables' chain in of table {more.get('family', 'inet')} {more.get('table', 'filter')}"
    assert [(chain, bool(out), maybe) for chain, out, maybe in found if out or maybe] == [
        (named, True, [])
    ] * shuts


def left_of(text):
    """What `nft -j` has for the left side of a match."""
    if " . " in text:
        return {"concat": [left_of(one) for one in text.split(" . ")]}
    kind, word = text.split()
    if kind in ("meta", "ct"):
        return {kind: {"key": word}}
    if kind == "fib":
        return {"fib": {"result": "type", "flags": [word]}}
    return {"payload": {"protocol": kind, "field": word}}


def where(text, right, does="accept", op="=="):
    """A rule of one match."""
    verdict = {does: None} if does in ("accept", "drop", "return") else {"jump": {"target": does}}
    return [{"match": {"op": op, "left": left_of(text), "right": right}}, verdict]


def by_value(text, *pairs):
    """A rule that has a verdict, or a chain to jump to, for each value."""
    ways = [[value, where(text, value, does)[1]] for value, does in pairs]
    return [{"vmap": {"key": left_of(text), "data": {"set": ways}}}]


LAN = {"prefix": {"addr": "10.0.0.0", "len": 24}}
BY_ETH0 = {"set": [{"concat": [{"elem": {"val": "10.9.0.1"}}, "eth0"]}, {"concat": [LAN, "eth0"]}]}
OUT, MAYBE = ([*PEERS], []), ([], [*PEERS])


@pytest.mark.parametrize(
    ("rules", "policy", "judged"),
    [
        # As the nftables of many guides begin, and as others write it.
        ([by_value("ct state", ("invalid", "drop"), ("established", "accept")),
          by_value("meta protocol", ("ip", "known"), ("ip6", "back"))], "drop", ([], [])),
        ([where("meta nfproto", "ipv4", "known")], "drop", ([], [])),
        ([[{"vmap": {"key": left_of("meta nfproto"), "data": "@doors"}}]], "drop", ([], [])),
        ([where("ip saddr . meta iifname", BY_ETH0)], "drop", ([], [])),
        ([by_value("ip saddr", ("*", "drop"), (LAN, "accept"))], "accept", ([], [])),
        ([by_value("ct state", ("*", "drop"), ({"elem": {"val": "new"}}, "known"))], "drop", ([], [])),
        ([where("meta pkttype", {"set": ["broadcast", "multicast"]}, "drop"), where("fib daddr", "local")], "drop",
         ([], [])),
        # Surely out.
        ([by_value("meta protocol", ("ip6", "known"))], "drop", OUT),
        ([where("meta nfproto", "ipv6", "known")], "drop", OUT),
        ([where("ip6 saddr", {"prefix": {"addr": "fe80::", "len": 10}}, op="!=")], "drop", OUT),
        ([where("ip saddr . meta iifname", {"set": [{"concat": [LAN, "eth1"]}]})], "drop", OUT),
        ([by_value("ip saddr", ("10.0.0.2", "accept"), ("*", "drop"))], "accept", (["10.0.0.7"], [])),
        ([by_value("meta nfproto", ("ipv4", "drop"))], "accept", OUT),
        ([where("meta l4proto . th dport", {"set": [{"concat": ["tcp", 22]}]})], "drop", OUT),
        ([by_value("tcp dport", (22, "accept"), ("*", "accept"))], "drop", OUT),
        ([where("tcp flags", "syn", op="in"), where("ct proto-dst", 22), where("ct status", "dnat")], "drop", OUT),
        ([where("ip daddr", {"prefix": {"addr": "224.0.0.0", "len": 4}}), where("meta pkttype", "multicast")],
         "drop", OUT),
        ([[{"limit": {"rate": 10, "per": "second"}}, {"accept": None}]], "drop", OUT),
        ([where("meta mark", 1, "shut")], "drop", OUT),
        ([where("meta mark", 1, "drop")], "drop", OUT),
        # What is not read may let them in; what is not read, and would shut them out, as some banned ones, counts not.
        ([[where("ip daddr", "10.0.0.1")[0], *where("ip saddr", LAN)]], "drop", MAYBE),
        ([where("meta mark", 1), REST], "accept", MAYBE),
        ([where("meta mark", 1, "known"), REST], "accept", MAYBE),
        ([where("meta mark", 1, "return"), REST], "accept", MAYBE),
        ([by_value("ct mark", (1, "accept"), (2, "drop"))], "drop", MAYBE),
        ([where("ip saddr", "10.0.0.9", op="<")], "drop", MAYBE),
        ([where("ether saddr", "00:11:22:33:44:55")], "drop", MAYBE),
        ([[{"match": {"op": "==", "left": {"fib": {"result": "oif", "flags": ["saddr", "iif"]}}, "right": True}},
           {"accept": None}]], "drop", MAYBE),
        ([where("ip saddr", "10.0.0.2"), where("meta mark", 1)], "drop", ([], ["10.0.0.7"])),
        ([[where("meta mark", 1)[0], *where("ip saddr", "10.0.0.2")]], "drop", (["10.0.0.7"], ["10.0.0.2"])),
        ([where("meta mark", 1, "drop"), where("ip saddr", LAN)], "drop", ([], [])),
        ([where("meta mark", 1, "shut")], "accept", ([], [])),
    ],
)  # fmt: skip
def test_what_lets_the_peers_in_is_read_or_doubted(load_module, rules, policy, judged):
    ((_, *found),) = load_module("firewall_survey").shut_by_nft(ruleset(rules, policy), PEERS)
    assert tuple(found) == judged


@pytest.mark.parametrize(
    ("lines", "judged"),
    [
        ("-A INPUT -s 10.0.0.0/24 -p tcp -m tcp -j ACCEPT", ([], [])),
        ("-A INPUT -m iprange --src-range 10.0.0.1-10.0.0.9 -j ACCEPT", ([], [])),
        ("-A INPUT -m conntrack ! --ctstate INVALID -j ACCEPT", ([], [])),
        ("-A INPUT -m addrtype --dst-type LOCAL -j ACCEPT", ([], [])),
        ("-A INPUT -m pkttype ! --pkt-type multicast -j ACCEPT", ([], [])),
        (r'-A INPUT -m comment --comment "say \"-j DROP\" -s 1.2.3.4" -i eth0 -j ACCEPT', ([], [])),
        ("-A INPUT -s 10.0.0.0/24 -d 10.0.0.1/32 -j ACCEPT", MAYBE),
        ("-A INPUT -m set --match-set peers src -j ACCEPT", MAYBE),
        ("-A INPUT -m set ! --match-set banned src -j MINE\n-A MINE -s 10.0.0.2/32 -j ACCEPT",
         (["10.0.0.7"], ["10.0.0.2"])),
        ("-A INPUT -m rpfilter -j ACCEPT", MAYBE),
        ("-A INPUT -m addrtype --dst-type LOCAL --limit-iface-in -j ACCEPT", MAYBE),
        ("-A INPUT -m set --match-set banned src -j DROP\n-A INPUT -i eth0 -j ACCEPT", ([], [])),
        ("-A INPUT -m set --match-set banned src -j DROP", OUT),
        ("-A INPUT -s 10.0.0.0/24 -d 224.0.0.0/4 -j ACCEPT\n-A INPUT -d 127.0.0.0/8 -j ACCEPT", OUT),
        ("-A INPUT -m iprange --src-range 10.9.0.1-10.9.0.9 -j ACCEPT", OUT),
        ("-A INPUT -m set --match-set peers src -p tcp -m tcp --dport 22 -j ACCEPT", OUT),
        ("-A INPUT -p tcp -m multiport --dports 22 -j ACCEPT\n-A INPUT -p icmp -m icmp --icmp-type 8 -j ACCEPT", OUT),
        ("-A INPUT -p tcp -m limit --limit 3/min -j ACCEPT\n-A INPUT -m conntrack --ctstatus DNAT -j ACCEPT", OUT),
        ("-A INPUT -m recent --rcheck --seconds 60 --name knocked --rsource -j ACCEPT\n-A INPUT -f -j ACCEPT", OUT),
    ],
)  # fmt: skip
def test_and_of_iptables(load_module, lines, judged):
    text = f"# Generated by iptables-save\n*filter\n:INPUT DROP [0:0]\n:MINE - [0:0]\n{lines}\nCOMMIT\n"
    ((_, *found),) = load_module("firewall_survey").shut_by_iptables(text, PEERS)
    assert tuple(found) == judged


@pytest.mark.parametrize(
    ("port", "policy", "does", "judged"),
    [
        ("!22", "accept", "drop", OUT),
        ("!22,80", "accept", "drop", OUT),
        ("!22", "drop", "accept", ([], [])),
        ("22,80", "drop", "accept", OUT),
        ("22", "accept", "drop", ([], [])),
        # Most of what ranks say, and perhaps not all.
        ("1024:65535", "drop", "accept", MAYBE),
        ("22,1024:65535", "drop", "accept", MAYBE),
        ("!1024:65535", "drop", "accept", OUT),
        ("!1024:65535", "accept", "drop", ([], [])),
        ("29500:29600", "drop", "accept", OUT),
    ],
)
def test_all_ports_but_some_are_what_peers_speak_to(load_module, port, policy, does, judged):
    survey, (no, ports) = load_module("firewall_survey"), ("!" * port.startswith("!"), port.lstrip("!"))
    text = f":INPUT {policy.upper()} [0:0]\n-A INPUT -p tcp -m multiport {no} --dports {ports} -j {does.upper()}\n"
    ((_, *found),) = survey.shut_by_iptables(text, PEERS)
    assert tuple(found) == judged
    ((_, *found),) = survey.shut_by_iptables(text.replace("-p tcp", "-p udp"), PEERS)
    assert tuple(found) == (OUT if policy == "drop" else ([], []))
    ranges = [[int(end) for end in one.split(":")] for one in ports.split(",")]
    right = {"set": [one[0] if len(one) == 1 else {"range": one} for one in ranges]}
    for kind in ("tcp", "th"):
        rules = ruleset([where(f"{kind} dport", right, does, "!=" if no else "==")], policy)
        ((_, *found),) = survey.shut_by_nft(rules, PEERS)
        assert tuple(found) == judged


@pytest.mark.parametrize(
    ("op", "port", "judged"),
    [(">", 1023, MAYBE), (">=", 1024, MAYBE), (">", 60000, OUT), ("<", 1024, OUT), ("<=", 65535, MAYBE)],
)
def test_ports_from_one_on(load_module, op, port, judged):
    ((_, *found),) = load_module("firewall_survey").shut_by_nft(
        ruleset([where("tcp dport", port, op=op)], "drop"), PEERS
    )
    assert tuple(found) == judged


def test_what_may_shut_peers_out_is_a_warning(load_module, repository):
    """Where it does, the check of the ways between the hosts finds it."""

    class Module:
        def get_bin_path(self, name):
            return name == "iptables-save"

        def run_command(self, words):
            return 0, ":INPUT DROP [0:0]\n-A INPUT -m set --match-set peers src -j ACCEPT\n", ""

    told = load_module("firewall_survey").shut(Module(), {"10.0.0.2": ["eth0"], "10.0.0.3": ["eth0"]})
    assert told == {"shut": [], "may_shut": ["iptables' chain INPUT may shut out 10.0.0.2 and 1 more"]}
    doubt = planned(**told)["doubt"]
    assert doubt.startswith(f"{told['may_shut'][0]}: what could let that in there goes by")
    assert planned()["doubt"] == ""
    tasks = yaml.safe_load((repository / "roles/firewall/tasks/rules.yml").read_text())
    (said,) = [task for task in tasks if "doubt" in task.get("when", "")]
    assert (
        said["ansible.builtin.debug"]["msg"]
        == "WARNING: {{ inventory_hostname }}: {{ __firewall_plan.doubt }}"
    )


@pytest.mark.parametrize(
    ("text", "shuts"),
    [
        # As the images of one cloud have it.
        ("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n"
         "-A INPUT -j REJECT --reject-with icmp-host-prohibited\nCOMMIT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n", True),
        (':INPUT ACCEPT [0:0]\n-A INPUT -m comment --comment "the rest" -j DROP\n', True),
        (":INPUT DROP [0:0]\n-A INPUT -j ACCEPT\n", False),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.0/24 -j ACCEPT\n-A INPUT -j DROP\n", False),
        (':INPUT DROP [0:0]\n-A INPUT -i eth0 -m comment --comment "the lan" -j ACCEPT\n', False),
        (":INPUT DROP [0:0]\n-A INPUT -i eth+ -j ACCEPT\n", False),
        (":INPUT DROP [0:0]\n-A INPUT -i tun+ -j ACCEPT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.2/32 -j ACCEPT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.2/32 -j ACCEPT\n-A INPUT -s 10.0.0.7/32 -j ACCEPT\n", False),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.0/24 -m conntrack --ctstate NEW -j ACCEPT\n", False),
        (":INPUT ACCEPT [0:0]\n-A INPUT -i eth0 -m state --state RELATED,ESTABLISHED -j ACCEPT\n"
         "-A INPUT -i eth0 -j DROP\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT -m conntrack --ctstate NEW -j DROP\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT ! -i lo -j DROP\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT ! -s 10.0.0.0/24 -j DROP\n", False),
        (":INPUT ACCEPT [0:0]\n-A INPUT -i eth0 -j MINE\n-A INPUT -i eth0 -j DROP\n"
         "-A MINE -s 10.0.0.0/24 -j ACCEPT\n", False),
        (":INPUT ACCEPT [0:0]\n-A INPUT -i eth0 -g MINE\n-A INPUT -j ACCEPT\n-A MINE -s 10.0.0.2/32 -j DROP\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -j MINE\n-A MINE -j RETURN\n-A MINE -j ACCEPT\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT -p tcp -j ACCEPT\n-A INPUT -p udp -j ACCEPT\n-A INPUT -j DROP\n", False),
        (":INPUT ACCEPT [0:0]\n-A INPUT -i docker0 -j DROP\n-A INPUT -s 10.9.0.0/24 -j DROP\n", False),
        (":INPUT DROP [0:0]\n-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.1.0.0/24 -j ACCEPT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.0/24 -m limit --limit 5/sec -j ACCEPT\n", True),
        (":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.0/24 -p tcp -m tcp --dport 22 -j ACCEPT\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT -j DROP\n-A INPUT -s 10.0.0.0/24 -j ACCEPT\n", True),
        (":INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n-A FORWARD -j DOCKER-USER\n", False),
        (":INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m multiport --dports 22 -j f2b-sshd\n-A f2b-sshd -j REJECT\n", False),
        ("", False),
    ],
)  # fmt: skip
def test_and_one_by_iptables(load_module, text, shuts):
    ((chain, out, maybe),) = load_module("firewall_survey").shut_by_iptables(text, PEERS)
    assert (chain, bool(out), maybe) == ("iptables' chain INPUT", shuts, [])


def test_each_host_s_address_in_the_cluster_and_by_what_it_will_come():
    hostvars = {
        "own": {
            "network_interfaces": [
                {"name": "ens1", "addresses": ["10.0.0.9/24", "odd"]},
                {"name": "ens2"},
                7,
                {"macaddress": "02:00:00:00:00:01", "addresses": ["10.0.1.9/24"]},
            ]
        },
        "a": {"cluster_address": "10.0.0.1", "ansible_host": "192.0.2.1"},
        "b": {"ansible_host": "10.0.1.2"},
        "10.0.0.3": {},
        "c.lan": {"cluster_address": None},
    }
    assert cluster_ways(hostvars, ["a", "b", "10.0.0.3", "c.lan"], "own") == {
        "10.0.0.1": ["ens1"],
        "10.0.1.2": [],
        "10.0.0.3": ["ens1"],
    }


def test_what_iptables_has_made_is_read_as_iptables_says_it(load_module):
    """Its `-m conntrack` is nothing that nft has words for."""
    made = ruleset([[{"xt": None}, *source({"prefix": {"addr": "10.0.0.0", "len": 24}})]], "drop", "ip")
    text = ":INPUT DROP [0:0]\n-A INPUT -s 10.0.0.0/24 -m conntrack --ctstate NEW -j ACCEPT\n"

    class Module:
        def __init__(self, saved):
            self.saved = saved

        def get_bin_path(self, name):
            return name

        def run_command(self, words):
            if words[0] == "ip":
                return 0, json.dumps([{"dev": "eth7"}]), ""
            return 0, self.saved if words[0] == "iptables-save" else made.replace('"in"', '"INPUT"'), ""

    def shut(module, hosts):
        found = load_module("firewall_survey").shut(module, hosts)
        assert found.pop("may_shut") == []
        return found["shut"]

    hosts = {"10.0.0.2": ["eth0"], "10.0.0.3": []}
    assert shut(Module(text), hosts) == []
    assert shut(Module(text.replace("-m ", "-i eth7 -m ")), hosts) == [
        "iptables' chain INPUT shuts out 10.0.0.2"
    ]
    native = ["nftables' chain INPUT of table ip filter shuts out 10.0.0.2 and 1 more"]
    assert shut(Module("# Table `filter' is incompatible, use 'nft' tool.\n"), hosts) == native
    assert shut(Module(text), {}) == []


def hooked(hook, rules, policy="accept", **more):
    """A ruleset whose chain is at another hook than input."""
    parts = json.loads(ruleset(rules, policy, hook=hook))
    (chain,) = [part["chain"] for part in parts["nftables"] if "chain" in part]
    chain.update(more)
    return json.dumps(parts)


TO_LAN = where("ip daddr", LAN)


@pytest.mark.parametrize(
    ("hook", "rules", "policy", "more", "judged"),
    [
        ("prerouting", [where("ip saddr", LAN, "drop")], "accept", {}, OUT),
        ("prerouting", [where("ip saddr", "10.9.0.0", "drop"), where("meta iifname", "eth0", "return")], "accept", {},
         ([], [])),
        ("prerouting", [where("ip daddr", LAN, "drop")], "accept", {}, ([], [])),  # not of the host's own address alone
        ("ingress", [where("ip saddr", LAN, "drop")], "accept", {"family": "netdev", "dev": "eth0"}, OUT),
        ("ingress", [where("ip saddr", LAN, "drop")], "accept", {"family": "netdev", "dev": ["eth1", "eth0"]}, OUT),
        ("ingress", [where("ip saddr", LAN, "drop")], "accept", {"family": "netdev", "dev": "eth1"}, ([], [])),
        ("ingress", [], "drop", {"dev": "eth0"}, OUT),
        ("output", [where("tcp dport", {"set": [22, 443]})], "drop", {}, OUT),
        ("output", [TO_LAN], "drop", {}, ([], [])),
        ("output", [where("ip daddr", "10.0.0.2")], "drop", {}, (["10.0.0.7"], [])),
        ("output", [where("ip saddr", LAN)], "drop", {}, MAYBE),
        ("output", [where("meta oifname", {"set": ["lo", "eth*"]})], "drop", {}, ([], [])),
        ("output", [where("meta oifname", "lo"), where("meta iifname", "eth0")], "drop", {}, OUT),
        ("output", [where("fib daddr", "local")], "drop", {}, OUT),
        ("output", [where("meta skuid", 0)], "drop", {}, MAYBE),
        ("postrouting", [where("meta oifname", "eth0", "drop")], "accept", {}, OUT),
        ("egress", [where("ip daddr", LAN, "drop")], "accept", {"family": "netdev", "dev": "eth0"}, OUT),
        ("input", [[{"queue": {"num": 0, "flags": ["bypass"]}}]], "accept", {}, MAYBE),
        ("input", [[{"queue": None}]], "drop", {}, MAYBE),
        ("input", [[where("tcp dport", 80)[0], {"queue": {"num": 0}}]], "accept", {}, ([], [])),
        ("output", [[states("new", "related"), {"queue": {"num": 0}}]], "accept", {"type": "route"}, MAYBE),
    ],
)  # fmt: skip
def test_what_no_other_hook_lets_through_is_seen_too(load_module, hook, rules, policy, more, judged):
    text = hooked(hook, rules, policy, **more)
    if "family" in more:  # its rules and sets, too
        text = text.replace('"inet"', f'"{more["family"]}"')
    ((chain, *found),) = load_module("firewall_survey").shut_by_nft(text, PEERS)
    assert tuple(found) == judged
    assert chain.endswith("table inet filter" if hook == "input" else f"filter (hook {hook})")


def test_what_opens_a_connection_is_what_peers_begin_with(load_module):
    """As in the Arch Linux wiki's rules, by which the peers do get in."""
    survey = load_module("firewall_survey")
    flags = {"payload": {"protocol": "tcp", "field": "flags"}}
    masked = {"&": [flags, ["fin", "syn", "rst", "ack"]]}
    for left in (masked, {"&": [flags, {"|": ["fin", {"|": ["syn", "ack"]}]}]}):
        syn = {"match": {"op": "==", "left": left, "right": "syn"}}
        for rule, judged in (
            ([syn, states("new")], ([], [])),
            ([syn], OUT),
            ([syn, states("established")], OUT),
        ):
            ((_, *found),) = survey.shut_by_nft(
                ruleset([[*rule, {"jump": {"target": "known"}}]], "drop"), PEERS
            )
            assert tuple(found) == judged
    rule = "-A INPUT -p tcp -m tcp {} -j ACCEPT"
    for words, judged in (
        ("--tcp-flags FIN,SYN,RST,ACK SYN -m conntrack --ctstate NEW", ([], [])),
        ("--syn -m state --state NEW", ([], [])),
        ("! --syn -m state --state NEW", OUT),
        ("--syn", OUT),
        ("--tcp-flags FIN,SYN FIN,SYN -m state --state NEW", OUT),
        ("--syn -m conntrack ! --ctstate NEW", OUT),
    ):
        ((_, *found),) = survey.shut_by_iptables(f":INPUT DROP [0:0]\n{rule.format(words)}\n", PEERS)
        assert tuple(found) == judged, words


SAVED = """*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
{raw}
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:HERE - [0:0]
{mangle}
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT {policy} [0:0]
{filter}
COMMIT
"""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ({}, {}),
        ({"raw": "-A PREROUTING -s 10.0.0.0/8 -i eth0 -j DROP"}, {"PREROUTING of table raw": OUT}),
        ({"raw": "-A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP"}, {}),  # Docker's
        ({"mangle": "-A PREROUTING -j HERE\n-A HERE -s 10.0.0.2 -j DROP"},
         {"PREROUTING of table mangle": (["10.0.0.2"], [])}),
        ({"raw": "-A PREROUTING -j HERE", "mangle": "-A HERE -j DROP"}, {}),  # another table's chain of that name
        ({"mangle": "-A POSTROUTING -o eth0 -d 10.0.0.7 -j DROP"}, {"POSTROUTING of table mangle": (["10.0.0.7"], [])}),
        ({"policy": "DROP", "filter": "-A OUTPUT -o lo -j ACCEPT\n-A OUTPUT -p udp --dport 53 -j ACCEPT"},
         {"OUTPUT": OUT}),
        ({"policy": "DROP", "filter": "-A OUTPUT -d 10.0.0.0/24 -o eth+ -j ACCEPT"}, {}),
        ({"policy": "DROP", "filter": "-A OUTPUT -m iprange --dst-range 10.0.0.1-10.0.0.9 -j ACCEPT"}, {}),
        ({"policy": "DROP", "filter": "-A OUTPUT -s 10.0.0.1/32 -j ACCEPT"}, {"OUTPUT": MAYBE}),
        ({"policy": "DROP", "filter": "-A OUTPUT -m owner --uid-owner 0 -j ACCEPT"}, {"OUTPUT": MAYBE}),
        ({"policy": "DROP", "filter": "-A OUTPUT -m addrtype --dst-type LOCAL -j ACCEPT"}, {"OUTPUT": OUT}),
        ({"filter": "-A INPUT -j NFQUEUE --queue-num 0 --queue-bypass"}, {"INPUT": MAYBE}),
        ({"filter": "-A INPUT -p tcp -m tcp --dport 2222 -j NFQUEUE --queue-num 0"}, {}),
        ({"filter": "-A FORWARD -j NFQUEUE --queue-num 0"}, {}),
    ],
)  # fmt: skip
def test_and_what_no_other_chain_of_iptables(load_module, lines, told):
    text = SAVED.format(**{"raw": "", "mangle": "", "filter": "", "policy": "ACCEPT", **lines})
    found = load_module("firewall_survey").shut_by_iptables(text, PEERS)
    assert {
        chain.removeprefix("iptables' chain "): tuple(outs) for chain, *outs in found if any(outs)
    } == told


class Programs:
    """A host's programs: `answers` by the words of their commands."""

    def __init__(self, **answers):
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.asked = []

    def get_bin_path(self, name):
        return name if name in self.answers else None

    def run_command(self, words):
        self.asked.append(words)
        answer = self.answers[words[0]]
        return 0, answer[words[-1] == "--version"] if isinstance(answer, tuple) else answer, ""


SHUT = "*filter\n:INPUT DROP [0:0]\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n"


def test_what_iptables_legacy_has_made_is_judged_though_nft_shows_it_not(load_module, tmp_path, monkeypatch):
    survey = load_module("firewall_survey")
    names = tmp_path / "names"
    monkeypatch.setattr(survey.shut_by_legacy, "__defaults__", (str(names),))
    open_, hosts = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n", {"10.0.0.2": ["eth0"], "10.0.0.3": ["eth0"]}
    nft, legacy = (f"iptables-save v1.8.9 ({kind})\n" for kind in ("nf_tables", "legacy"))
    host = Programs(iptables_save=(open_, nft), iptables_legacy_save=SHUT)
    assert survey.shut(host, hosts) == {"shut": [], "may_shut": []}
    # To ask for a table that is not there would make it.
    assert not any(words[0] == "iptables-legacy-save" for words in host.asked)
    names.write_text("")
    assert survey.shut(host, hosts)["shut"] == []
    names.write_text("filter\n")
    assert survey.shut(host, hosts)["shut"] == ["iptables-legacy's chain INPUT shuts out 10.0.0.2 and 1 more"]
    assert host.asked[-1] == ["iptables-legacy-save", "-t", "filter"]
    # Where iptables itself is that one, it is told once.
    both = Programs(iptables_save=(SHUT, legacy), iptables_legacy_save=SHUT)
    assert survey.shut(both, hosts)["shut"] == ["iptables' chain INPUT shuts out 10.0.0.2 and 1 more"]
    # And what nft has of the same name is another's.
    native = ruleset([SSH_ALONE], "drop", "ip").replace('"in"', '"INPUT"')
    both = Programs(iptables_save=(open_, legacy), nft=native)
    assert survey.shut(both, hosts)["shut"] == [
        "nftables' chain INPUT of table ip filter shuts out 10.0.0.2 and 1 more"
    ]
    names.write_text("nat\nfilter\n")
    told = survey.shut(Programs(nft=""), hosts)
    assert told["shut"] == [] and told["may_shut"] == [
        "iptables-legacy's filter and nat, which no program here shows (iptables-legacy-save), may shut out 10.0.0.2 "
        "and 1 more"
    ]


def test_rules_that_nft_does_not_show_are_a_doubt(load_module):
    class Host(Programs):
        def run_command(self, words):
            return 1, "", "Error: JSON support not compiled-in\n"

    told = load_module("firewall_survey").shut(Host(nft=""), {"10.0.0.2": ["eth0"]})
    assert told["shut"] == [] and told["may_shut"] == [
        "nftables' rules, which nft does not show (Error: JSON support not compiled-in), may shut out 10.0.0.2"
    ]
