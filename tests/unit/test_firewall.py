"""From the inventory and a host's sockets to its nftables rules (plugins/filter/firewall_plan.py). Sends nothing."""

import shutil
import subprocess

import pytest

from plugins.filter.firewall_plan import firewall_peers, firewall_plan

SSHD = {"proto": "tcp", "port": 22, "address": "0.0.0.0", "process": "sshd"}
SESSION = {"client": "192.168.1.9", "address": "192.168.1.50", "port": 22}


def survey(**more):
    return {
        "listening": [SSHD],
        "session": SESSION,
        "ufw": False,
        "firewalld": False,
        "nft": True,
        "rules": False,
        **more,
    }


def planned(peers=("192.168.1.101",), allow=(), ssh_from=(), **more):
    plan = firewall_plan(survey(**more), list(peers), list(allow), list(ssh_from), len(peers))
    assert plan["errors"] == []
    return plan


def rules(plan):
    """The rules of the chain, without the comments."""
    lines = plan["rules"].split("policy drop;")[1].splitlines()
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
    assert "forward" not in plan["rules"]  # containers' traffic is not ours


def test_a_lone_machine_has_no_rule_for_peers():
    assert not any("peers" in rule for rule in rules(planned(peers=())))


@pytest.mark.parametrize(
    ("listening", "session", "ports"),
    [
        ([SSHD], SESSION, [22]),
        ([], {**SESSION, "port": 2222}, [2222]),  # ssh.socket: systemd listens, not sshd
        ([{**SSHD, "port": 22022}], None, [22022]),  # a local connection
        ([SSHD], {**SESSION, "port": 2222}, [22, 2222]),
    ],
)
def test_ssh_is_open_where_it_really_answers(listening, session, ports):
    plan = planned(listening=listening, session=session)
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
    plan = planned(listening=listening, allow=[{"port": "9000-9200"}])
    assert plan["closes"] == ["tcp port 3000 (grafana)"]


@pytest.mark.parametrize(
    ("more", "arguments", "said"),
    [
        ({"ufw": True}, {}, "ufw is active on this host"),
        ({"firewalld": True}, {}, "sudo systemctl disable --now firewalld"),
        ({}, {"allow": [{"port": "0"}]}, "firewall_allow[0].port is '0'"),
        ({}, {"allow": [{"port": "90-80"}]}, "firewall_allow[0].port is '90-80'"),
        ({}, {"allow": [{"proto": "tcp"}]}, "firewall_allow[0].port is ''"),
        ({}, {"allow": [{"port": "80", "proto": "sctp"}]}, "firewall_allow[0].proto is 'sctp'"),
        ({}, {"allow": [{"port": "80", "source": "x"}]}, "unknown key 'source'"),
        ({}, {"allow": [{"port": "80", "from": ["lan"]}]}, "firewall_allow[0].from is 'lan'"),
        ({}, {"ssh_from": ["lan"]}, "firewall_ssh_from[0] is 'lan'"),
        ({}, {"ssh_from": ["10.0.0.0/8"]}, "leaves out 192.168.1.9, from where this very connection comes"),
        ({"session": None, "listening": []}, {}, "is sshd running?"),
        ({}, {"peers": [], "expected_peers": 2}, "give each host its cluster_address"),
    ],
)
def test_what_would_go_wrong_is_refused(more, arguments, said):
    given = {"peers": ["192.168.1.101"], "allow": [], "ssh_from": [], **arguments}
    found = firewall_plan(survey(**more), **given)
    assert set(found) == {"errors"}
    assert said in found["errors"][0]


def test_peers_are_all_others_of_the_group_by_all_their_addresses():
    hostvars = {
        "node1": {"ansible_host": "192.168.1.100"},
        "node2": {"ansible_host": "192.168.1.101", "cluster_address": "10.0.0.2"},
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


@pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed")
def test_nft_accepts_the_rules(tmp_path):
    allow = [{"port": "9100", "from": ["192.168.1.0/24", "fd00::/8"]}, {"port": "8000-8010", "proto": "udp"}]
    plan = planned(peers=["192.168.1.101", "fd00::3"], allow=allow, ssh_from=["192.168.1.0/24"])
    file = tmp_path / "rules.nft"
    file.write_text(plan["rules"])
    # In a network namespace of its own: --check asks the kernel, but changes nothing.
    done = subprocess.run(
        ["unshare", "--net", "nft", "--check", "--file", str(file)], capture_output=True, text=True
    )
    if "unshare" in done.stderr:
        pytest.skip("this user cannot make a network namespace")
    assert done.returncode == 0, done.stderr
