"""Hosts as others install them: ifupdown's stanzas, NetworkManager's profiles, cloud-init's netplan, Debian 13."""

import re

import pytest
from plays import Plays, changed_tasks, playground, wait_for

pytestmark = pytest.mark.full  # minutes: each boots several times

IFUPDOWN = """
apt-get -qq update; apt-get -qq install -y ifupdown >/dev/null 2>&1
printf '%s\\n' 'auto lo' 'iface lo inet loopback' '' '# the installer wrote this' 'auto eth0' \\
  'iface eth0 inet static' '  address {address}/24' '  gateway {gateway}' > /etc/network/interfaces
rm /etc/systemd/network/10-eth0.network
systemctl disable --quiet systemd-networkd.socket systemd-networkd
systemctl enable --quiet networking
"""

# NetworkManager leaves the kind of interface that a container has to others, unless it is told.
NETWORK_MANAGER = """
apt-get -qq update; apt-get -qq install -y --no-install-recommends network-manager >/dev/null 2>&1
printf '%s\\n' '[device-veth]' 'match-device=driver:veth' 'managed=1' > /etc/NetworkManager/conf.d/veth.conf
cd /etc/NetworkManager/system-connections
printf '%s\\n' '[connection]' 'id=Wired' 'type=ethernet' 'interface-name=eth0' '[ipv4]' 'method=manual' \\
  'address1={address}/24,{gateway}' '[ipv6]' 'method=disabled' > Wired.nmconnection
chmod 600 Wired.nmconnection
rm /etc/systemd/network/10-eth0.network
systemctl disable --quiet systemd-networkd.socket systemd-networkd
systemctl enable --quiet NetworkManager
"""

# As on Ubuntu's server, where cloud-init would write it again at the next boot.
NETPLAN = """
apt-get -qq update; apt-get -qq install -y --no-install-recommends netplan.io >/dev/null 2>&1
mkdir -p /etc/netplan /etc/cloud/cloud.cfg.d
printf '%s\\n' 'network:' '  version: 2' '  ethernets:' '    eth0:' '      addresses: [{address}/24]' \\
  '      routes: [{{to: default, via: {gateway}}}]' > /etc/netplan/50-cloud-init.yaml
chmod 600 /etc/netplan/50-cloud-init.yaml
rm /etc/systemd/network/10-eth0.network
netplan generate
"""

KINDS = {"node1": IFUPDOWN, "node2": NETWORK_MANAGER, "node3": NETPLAN}
STATE = (
    "ip -brief address show dev eth0 | sed 's/@if[0-9]*//'; ip route; "  # its other end is new after a boot
    "cd /etc; find netplan network/interfaces* NetworkManager/system-connections -type f 2>/dev/null | xargs sha256sum"
)
LISTED = (
    "find /etc/network /etc/netplan /etc/NetworkManager /etc/systemd/network /etc/cloud /etc/resolv.conf "
    "! -type d 2>/dev/null || true"
)
BACK = {
    "name": "Back",
    "ansible.builtin.include_role": {"name": "network", "tasks_from": "remove", "rolespec_validate": False},
}
STAYS = {
    "name": "Stays",
    "ansible.builtin.debug": {"msg": "stays: {{ _network_stays | default('nothing') }}"},
}


def boot(plays, host):
    plays.lab.power(host, False)
    plays.lab.power(host, True)
    wait_for(lambda: plays.answers(host), 60)


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    """Three hosts, each with a network that another set up."""
    with playground("t-stock", 3, tmp_path_factory.mktemp("stock")) as plays:
        gateway = plays.lab.network.gateway
        for host, script in KINDS.items():
            plays.sh(host, script.format(address=plays.lab.host(host).address, gateway=gateway))
            boot(plays, host)
        yield plays


@pytest.fixture(scope="module")
def stock(plays):
    """The hosts' state before the first change."""
    return {host: state(plays, host) for host in KINDS}


def state(plays, host):
    """Its addresses, without the kernel's own, its routes, what configures them, and all files of that kind."""
    return re.sub(r" fe80::\S+", "", plays.sh(host, f"{STATE}; {LISTED}"))


def wanted(plays, host, **more):
    entry = {"name": "eth0", "addresses": [f"{plays.lab.host(host).address}/24"]}
    return {"network_interfaces": [{**entry, "gateway": plays.lab.network.gateway, **more}]}


@pytest.mark.parametrize("host", KINDS)
def test_a_setting_that_cuts_it_off_is_undone(plays, stock, host):
    before = plays.sh(host, STATE)
    wrong = {"name": "eth0", "addresses": ["192.0.2.7/24"], "gateway": "none"}
    wrong = {"network_interfaces": [wrong], "guard_timeout": 30}
    play = plays.role("network", host, wrong)
    assert play.rc != 0
    assert "no new connection from the controller" in play.words, play.text
    assert plays.answers(host)
    assert plays.sh(host, STATE) == before
    boot(plays, host)
    assert plays.sh(host, STATE) == before


@pytest.mark.parametrize("host", KINDS)
def test_it_becomes_netplans_in_one_run_and_stays_so(plays, host):
    play = plays.role("network", host, wanted(plays, host))
    assert play.rc == 0, play.text
    assert play.changed[host] > 0
    for booted in (False, True):
        if booted:
            boot(plays, host)
        address = plays.lab.host(host).address
        assert plays.sh(host, "ip -4 -brief address show dev eth0").split()[2:] == [f"{address}/24"]
        routes = plays.sh(host, "ip -4 route show default").splitlines()
        assert [route.split()[2] for route in routes] == [plays.lab.network.gateway]
        assert plays.role("network", host, wanted(plays, host)).changed == {host: 0}


def test_what_gave_way_is_kept(plays):
    left = plays.sh("node1", "cat /etc/network/interfaces")
    assert "iface lo inet loopback" in left
    assert not [line for line in left.splitlines() if "eth0" in line and not line.startswith("#")]
    assert "iface eth0 inet static" in plays.sh("node1", "cat /etc/network/interfaces.before-trainyard")
    # Not where NetworkManager would read it.
    profiles = plays.sh("node2", "cd /etc/NetworkManager; find . -name 'Wired*'")
    assert profiles.split() == ["./Wired.nmconnection.before-trainyard"]
    assert plays.sh("node3", "ls /etc/netplan").split() == [
        "50-cloud-init.yaml.before-trainyard",
        "90-trainyard.yaml",
    ]
    off = plays.sh("node3", "cat /etc/cloud/cloud.cfg.d/99-trainyard-network.cfg")
    assert off == "network: {config: disabled}\n"


@pytest.mark.parametrize("host", KINDS)
def test_what_gave_way_comes_back_unless_the_host_is_cut_off(plays, stock, host):
    """As reset.yml does it; first with what would cut it off, were there no guard."""
    ours = state(plays, host)
    kept = {
        "node1": "/etc/network/interfaces",
        "node2": "/etc/NetworkManager/Wired.nmconnection.before-trainyard",
        "node3": "/etc/netplan/50-cloud-init.yaml.before-trainyard",
    }[host]
    address = plays.lab.host(host).address
    plays.sh(host, f"cp -a {kept} /root/kept; sed -i 's/{address}/192.0.2.7/' {kept}")
    broken = state(plays, host)
    play = plays.run([BACK, STAYS], host, {"guard_timeout": 30})
    assert play.rc == 0, play.text
    assert "stays: The change was undone; the host answers at" in play.words, play.text
    assert plays.answers(host) and state(plays, host) == broken
    plays.sh(host, f"cp -a /root/kept {kept}")
    assert state(plays, host) == ours

    told = plays.run([BACK, STAYS], host, None, "--check")
    assert told.rc == 0 and told.changed[host] > 0, told.text
    assert state(plays, host) == ours
    play = plays.run([BACK, STAYS], host)
    assert play.rc == 0 and "stays: nothing" in play.words, play.text
    for booted in (False, True):
        if booted:
            boot(plays, host)
        assert plays.answers(host)
        assert state(plays, host) == stock[host]
    assert plays.run([BACK, STAYS], host).changed == {host: 0}


def test_one_host_that_keeps_its_addresses_holds_no_other_up(plays, stock):
    """As in reset.yml, where any error ends the play for all."""
    for host in ("node1", "node3"):
        assert plays.role("network", host, wanted(plays, host)).rc == 0
    kept, address = "/etc/netplan/50-cloud-init.yaml.before-trainyard", plays.lab.host("node3").address
    plays.sh("node3", f"sed -i 's/{address}/192.0.2.7/' {kept}")
    play = plays.run([BACK, STAYS], "node1:node3", {"guard_timeout": 30}, fatal=True)
    assert play.rc == 0 and play.words.count("stays: nothing") == 1, play.text
    assert "stays: The change was undone; the host answers at" in play.words
    assert plays.answers("node3") and state(plays, "node1") == stock["node1"]


@pytest.mark.timeout(1800)
def test_debian_13(make_lab, tmp_path):
    """All roles but the trainer and its environment: what its wheels are is the matter of the Python there."""
    lab = make_lab("t-trixie", hosts=2, suite="trixie")
    plays = Plays(lab, tmp_path)
    words = ("--skip-tags", "python_env,trainer")
    looked = plays.book("site.yml", *words, "--check")
    assert looked.returncode == 0, looked.stdout + looked.stderr
    changed = plays.site_twice(*words)
    for host in lab.hosts:
        assert 'VERSION_ID="13"' in plays.sh(host, "cat /etc/os-release")
        assert plays.sh(host, "systemctl is-active trainyard-firewall").strip() == "active"
        boot(plays, host)
    after = plays.book("site.yml", *words)
    assert after.returncode == 0, after.stdout + after.stderr
    assert changed_tasks(after.stdout) == dict.fromkeys(changed, 0)
