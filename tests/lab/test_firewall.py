"""The role firewall on real hosts: a stranger finds SSH and nothing else, a peer reaches everything."""

import json

import pytest
from plays import NFTABLES, include, playground, wait_for

# Which TCP ports of those named answer, and whether UDP port 4791 does.
SCAN = """
import asyncio, json, socket, sys
host, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.settimeout(3)
probe.sendto(b"ping", (host, 4791))
try:
    udp = probe.recv(16).decode()
except OSError:
    udp = None
async def answers(port, gate):
    async with gate:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
            writer.close()
            return port
        except (OSError, asyncio.TimeoutError):
            return None
async def scan():
    gate = asyncio.Semaphore(250)
    return [port for port in await asyncio.gather(*(answers(port, gate) for port in ports)) if port]
print(json.dumps({"tcp": asyncio.run(scan()), "udp": udp}))
"""
PORTS = [*range(1, 1025), 2222, 3000, 5000, 8000, 8080, 9100, 29500, 29600]
ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 4791))
while True:
    data, peer = s.recvfrom(16)
    s.sendto(data, peer)
"""


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-fire", 2, tmp_path_factory.mktemp("firewall")) as plays:
        plays.sh("node1", "systemd-run --unit=web python3 -m http.server 8000 --directory /usr/share/doc")
        plays.lab.exec("node1", "systemd-run", "--unit=echo", "python3", "-c", ECHO)
        yield plays


def rules(plays, host="node1"):
    return plays.sh(host, "command -v nft >/dev/null && nft list ruleset || true")


def test_check_mode_on_an_untouched_host_changes_nothing(plays):
    play = plays.role("firewall", "node1", None, "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0
    assert (
        plays.sh("node1", "ls -d /etc/nftables.d /usr/local/lib/trainyard /usr/sbin/nft 2>/dev/null || true")
        == ""
    )


def test_ufw_is_not_joined(plays):
    plays.sh("node1", "mkdir -p /etc/ufw; echo ENABLED=yes > /etc/ufw/ufw.conf")
    plays.sh("node1", "install -m 755 /bin/true /usr/sbin/ufw")
    play = plays.role("firewall", "node1")
    plays.sh("node1", "rm /usr/sbin/ufw")  # as apt does, which leaves its settings
    assert play.rc != 0 and play.changed["node1"] == 0
    assert "ufw disable" in play.words and "firewall_manage: false" in play.words


def test_rules_of_somebodys_own_that_shut_peers_out_are_not_joined(plays):
    plays.sh("node1", NFTABLES)
    own = (
        "add table inet own; add chain inet own input { type filter hook input priority 0; policy accept; };"
        "add rule inet own input ct state established accept; add rule inet own input tcp dport 22 accept;"
        "add rule inet own input counter reject"
    )
    plays.sh("node1", f"nft '{own}'")
    try:
        play = plays.role("firewall", "node1")
        assert play.rc != 0 and play.changed["node1"] == 0, play.text
        assert (
            f"nftables' chain input of table inet own shuts out {plays.lab.host('node2').address}"
            in play.words
        )
        assert "firewall_manage: false" in play.words
    finally:
        plays.sh("node1", "nft delete table inet own; apt-get -qq purge -y nftables >/dev/null")


def test_a_disk_without_room_is_named_with_the_cure(plays):
    plays.sh("node2", "apt-get -qq update; mount -t tmpfs -o size=64k full /var/cache/apt/archives")
    try:
        play = plays.role("firewall", "node2")
    finally:
        plays.sh("node2", "umount /var/cache/apt/archives")
    assert play.rc != 0 and play.changed["node2"] == 0
    assert "The disk is full (" in play.words and "`apt-get clean`" in play.words, play.text
    assert rules(plays, "node2") == ""


def test_limited_to_one_host_it_lets_the_peers_in_and_names_what_it_closes(plays):
    play = plays.role("firewall", "node1", None, "-l", "node1")
    assert play.rc == 0, play.text
    assert "tcp port 8000 (python3)" in play.words and "udp port 4791 (python3)" in play.words
    assert plays.role("firewall", "node1").changed == {"node1": 0}


def test_a_stranger_finds_ssh_and_nothing_else(plays):
    node1 = plays.lab.host("node1").address
    done = plays.lab.stranger("python3", "-c", SCAN, node1, *map(str, PORTS))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tcp": [22], "udp": None}


def test_a_peer_reaches_any_listening_port(plays):
    node1 = plays.lab.host("node1").address
    found = plays.lab.exec("node2", "python3", "-c", SCAN, node1, "22", "8000", "8001")
    assert json.loads(found) == {"tcp": [22, 8000], "udp": "ping"}


@pytest.mark.full
def test_a_narrowed_firewall_allow_is_told_before_it_is_in_force(plays):
    allow = {"firewall_allow": [{"port": 8000, "from": ["192.0.2.0/24", "198.51.100.7"]}]}
    play = plays.role("firewall", "node1", allow)
    assert play.rc == 0 and play.changed == {"node1": 1} and "WARNING" not in play.text, play.text
    play = plays.role("firewall", "node1")
    assert play.rc == 0 and play.changed == {"node1": 1}, play.text
    told = "will answer only its peers on tcp port 8000 (python3). To keep"
    assert play.words.index(told) < play.words.index("Let in nobody but the peers")
    assert play.text.count("WARNING") == 1, play.text


# What Docker makes of `-p 8080:80`, with the tools of the kernel.
CONTAINER = """
ip netns add box; ip link add docker0 type veth peer name eth0 netns box; ip addr add 10.99.0.1/30 dev docker0
ip link set docker0 up; ip -n box addr add 10.99.0.2/30 dev eth0; ip -n box link set eth0 up
ip -n box route add default via 10.99.0.1; sysctl -qw net.ipv4.ip_forward=1
nft 'table ip box {
  chain pre {
    type nat hook prerouting priority dstnat
    fib daddr type local tcp dport 8080 dnat to 10.99.0.2:80
  }
}'
systemd-run --quiet --unit=box ip netns exec box python3 -m http.server 80 --directory /usr/share/doc
"""
# Two bridges on the host, each with a machine behind it: one of Docker's, and one that is the LAN's.
BRIDGES = """
n=0; for bridge in br-0f3e5a9b1c2d br-lan; do
  n=$((n + 1)); ip link add $bridge type bridge; ip addr add 10.98.$n.1/30 dev $bridge; ip link set $bridge up
  ip netns add behind$n; ip link add port$n type veth peer name eth0 netns behind$n
  ip link set port$n master $bridge up
  ip -n behind$n addr add 10.98.$n.2/30 dev eth0; ip -n behind$n link set eth0 up
  ip -n behind$n route add default via 10.98.$n.1
done
"""


@pytest.mark.full
def test_a_container_s_published_port_is_closed_too_unless_it_is_allowed(plays):
    plays.sh("node2", NFTABLES)
    plays.sh("node2", CONTAINER)
    node2 = plays.lab.host("node2").address

    def answers():
        """Whether a stranger, and whether a peer, gets to it."""
        scan = ("python3", "-c", SCAN, node2, "8080")
        stranger = plays.lab.stranger(*scan)
        assert stranger.returncode == 0, stranger.stderr
        return [
            json.loads(found)["tcp"] == [8080] for found in (stranger.stdout, plays.lab.exec("node1", *scan))
        ]

    try:
        wait_for(lambda: answers() == [True, True], 30)
        play = plays.role("firewall", "node2")
        assert play.rc == 0, play.text
        assert "will answer only its peers on tcp port 8080 (passed on to 10.99.0.2:80)" in play.words
        assert answers() == [False, True]
        assert plays.role("firewall", "node2", {"firewall_allow": [{"port": 8080}]}).rc == 0
        assert answers() == [True, True]
        plays.sh("node2", BRIDGES)
        assert plays.role("firewall", "node2").rc == 0
        knock = "ip netns exec behind{0} python3 -c '{1}' 10.98.{0}.1 8080"
        behind = [json.loads(plays.sh("node2", knock.format(number, SCAN)))["tcp"] for number in (1, 2)]
        assert behind == [[8080], []]
    finally:
        plays.sh("node2", "systemctl stop box; ip netns del box; nft delete table ip box")
        plays.sh("node2", "for name in br-0f3e5a9b1c2d br-lan; do ip link del $name || true; done")
        plays.sh("node2", "for name in behind1 behind2; do ip netns del $name || true; done")
        away = {"name": "firewall", "tasks_from": "remove"}
        plays.run([{"name": "Away with it", "ansible.builtin.include_role": away}], "node2")
    assert rules(plays, "node2") == ""


def test_leaving_the_controller_out_is_refused(plays):
    before = rules(plays)
    play = plays.role("firewall", "node1", {"firewall_ssh_from": ["192.0.2.0/24"]})
    assert play.rc != 0 and play.changed["node1"] == 0
    assert "from where SSH is in use at this moment" in play.words
    assert rules(plays) == before


def test_rules_that_drop_ssh_are_undone(plays):
    before = rules(plays)
    path = "/etc/nftables.d/trainyard.nft"
    bad = plays.sh("node1", f"sed '/dport {{ 22 }}/d' {path}")
    task = {
        "name": "Drop SSH",
        "become": True,
        "guarded_change": {
            "name": "firewall",
            "why": "rules without SSH",
            "files": [{"path": path, "content": bad}],
            "apply": [["systemctl", "reload-or-restart", "trainyard-firewall.service"]],
            "timeout": 20,
        },
    }
    play = plays.run([task], "node1")
    assert play.rc != 0
    assert f"{path} put back" in play.words and "no new connection" in play.words
    assert rules(plays) == before
    assert plays.answers("node1")


def test_the_rules_outlive_the_distributions_own_and_a_restart_of_the_host(plays):
    before = rules(plays)
    plays.sh("node1", "systemctl restart nftables")  # its file begins with flush ruleset
    wait_for(lambda: "inet trainyard" in rules(plays), 10)
    plays.lab.power("node1", on=False)
    plays.lab.power("node1", on=True)
    assert rules(plays) == before


def test_a_host_whose_firewall_is_not_ours_stays_as_it_is(plays):
    play = plays.run([include("firewall")], "node2", {"firewall_manage": False})
    assert play.rc == 0 and play.changed == {"node2": 0}
    assert rules(plays, "node2") == ""
    # Its owner has it back after a run that made rules.
    assert plays.run([include("firewall")], "node2").rc == 0
    assert "inet trainyard" in rules(plays, "node2")
    play = plays.run([include("firewall")], "node2", {"firewall_manage": False})
    assert play.rc == 0 and "the rules that an earlier run has made are taken away" in play.words, play.text
    assert rules(plays, "node2") == ""
    assert plays.run([include("firewall")], "node2", {"firewall_manage": False}).changed == {"node2": 0}


def waiting(plays, host):
    """{state, token, …} of the host's unconfirmed change of the firewall; {} if there is none."""
    shown = json.loads(plays.sh(host, "/usr/local/lib/trainyard/guard status 2>/dev/null || echo '{}'"))
    return shown.get("armed", {}).get("firewall", {})


@pytest.mark.full
def test_rules_that_somebody_flushed_come_back(plays):
    before = rules(plays)
    plays.sh("node1", "nft flush ruleset")
    play = plays.role("firewall", "node1")
    assert play.rc == 0 and play.changed == {"node1": 1}, play.text
    assert rules(plays) == before
    # In the kernel, but not by the unit: a restart of nftables would lose them.
    plays.sh("node1", "systemctl stop trainyard-firewall; nft -f /etc/nftables.d/trainyard.nft")
    assert plays.role("firewall", "node1").changed == {"node1": 1}
    assert plays.sh("node1", "systemctl is-active trainyard-firewall").strip() == "active"
    assert plays.role("firewall", "node1").changed == {"node1": 0}


@pytest.mark.full
def test_killed_twice_before_it_was_confirmed_nothing_stays_loaded(plays):
    """The second run must not take the first one's rules, which it undoes, for those to go back to."""
    plays.kill_when(lambda: waiting(plays, "node2"), "firewall", "node2", {"guard_timeout": 300})
    wait_for(lambda: waiting(plays, "node2")["state"] == "applied", 30)
    assert "table inet trainyard" in rules(plays, "node2")
    first = waiting(plays, "node2")["token"]
    plays.kill_when(
        lambda: waiting(plays, "node2").get("token", first) != first,
        "firewall",
        "node2",
        {"guard_timeout": 20},
    )
    wait_for(lambda: not waiting(plays, "node2"), 60)
    report = json.loads(plays.sh("node2", "cat /var/lib/trainyard-guard/firewall.report.json"))
    assert "no new connection from the controller" in report["why"]
    assert {done["rc"] for done in report["commands"]} == {0}
    assert rules(plays, "node2") == ""
    assert plays.answers("node2")


@pytest.mark.full
def test_killed_before_it_was_confirmed_the_next_run_passes(plays):
    plays.kill_when(lambda: waiting(plays, "node2"), "firewall", "node2", {"guard_timeout": 300})
    wait_for(lambda: waiting(plays, "node2")["state"] == "applied", 30)
    play = plays.run("firewall", "node2")
    assert play.rc == 0, play.text
    assert "this was put back first: firewall rules" in play.words
    assert "table inet trainyard" in rules(plays, "node2") and not waiting(plays, "node2")
    assert plays.answers("node2")
    assert plays.run("firewall", "node2").changed["node2"] == 0
