"""RDMA's roles on real hosts: OpenSM against a simulated fabric (ibsim), with its master and standby; refusals."""

import json
import re

import pytest
import yaml
from plays import ROOT, playground, wait_for

pytestmark = pytest.mark.full  # eight minutes; tests/unit/test_rdma.py has the decisions
HOSTS = ("node1", "node2")
PRELOAD = "/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so"
# Two hosts at one switch, as ibnetdiscover writes it; and what writes below /opt/simulated/sys what its programs see.
FABRIC = (ROOT / "molecule/opensm/fabric").read_text()
MIRROR = (ROOT / "molecule/opensm/mirror").read_text()
DCB = (ROOT / "molecule/roce_qos/dcb").read_text()


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-rdma", 2, tmp_path_factory.mktemp("rdma")) as plays:
        for host in HOSTS:
            plays.sh(
                host,
                "apt-get -qq update; apt-get -qq install -y infiniband-diags ibsim-utils >/dev/null 2>&1",
            )
        yield plays


@pytest.fixture(scope="module")
def fabric(plays):
    """The simulated fabric, on node1; what opensm and sminfo need to see it."""
    server = plays.lab.host("node1").address
    plays.sh(
        "node1",
        f"printf '%s' '{FABRIC}' > /root/net; "
        "systemd-run --quiet --unit=fabric sh -c 'sleep infinity | ibsim -r -s /root/net'",
    )
    for host in HOSTS:
        seen = f"LD_PRELOAD={PRELOAD} SIM_HOST={host} IBSIM_SERVER_NAME={server}"
        plays.sh(
            host,
            "mkdir -p '/etc/systemd/system/trainyard-opensm@.service.d'; "
            "printf '[Service]\\nEnvironment=%s\\nRestrictAddressFamilies=AF_INET\\nWorkingDirectory=/tmp\\n' "
            f"'{seen}' > '/etc/systemd/system/trainyard-opensm@.service.d/fabric.conf'",
        )
        plays.sh(
            host,
            f"mkdir -p /opt/simulated; printf '%s' '{MIRROR}' > /root/mirror; "
            f"cd /tmp; systemd-run --quiet --unit=mirror env {seen} python3 /root/mirror",
        )
    return {
        "LD_PRELOAD": PRELOAD,
        "SIM_HOST": "{{ inventory_hostname }}",
        "IBSIM_SERVER_NAME": server,
    }


def groups(plays, **members):
    """An inventory beside the lab's: its groups."""
    path = plays.directory / f"groups-{len(list(plays.directory.iterdir()))}.yml"
    path.write_text(
        yaml.safe_dump({name: {"hosts": {host: {} for host in hosts}} for name, hosts in members.items()})
    )
    return "-i", str(path)


def sminfo(plays, fabric, host):
    words = " ".join(f"{name}={value}" for name, value in fabric.items() if name != "SIM_HOST")
    return plays.sh(host, f"cd /tmp; {words} SIM_HOST={host} sminfo || true")


def master(plays, fabric):
    """The GUID of the port whose subnet manager reigns."""
    found = re.search(r"sm guid 0x([0-9a-f]+),.* SMINFO_MASTER", sminfo(plays, fabric, "node2"))
    return int(found[1], 16) if found else None


def site(plays, fabric, beside, *arguments):
    """site.yml's part for RDMA."""
    given = {"_rdma_sys_root": "/opt/simulated", "_opensm_environment": fabric}
    return plays.finish(plays.command("rdma", "cluster", given, *beside, *arguments))


def test_check_mode_on_untouched_hosts(plays, fabric):
    beside = groups(plays, rdma=HOSTS, opensm=HOSTS)
    before = plays.sh("node1", "find /etc | sort")
    play = site(plays, fabric, beside, "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0 and plays.sh("node1", "find /etc | sort") == before


def test_a_host_whose_ports_nobody_manages_is_refused(plays, fabric):
    play = site(plays, fabric, groups(plays, rdma=HOSTS))
    assert play.rc != 0
    assert "node1: ibsim0/1: found INIT, no subnet manager; expected ACTIVE" in play.words


def test_opensm_sets_the_fabric_up_and_its_standby_takes_over(plays, fabric):
    beside = groups(plays, rdma=HOSTS, opensm=HOSTS)
    play = site(plays, fabric, beside)
    assert play.rc == 0, play.text
    assert "ibsim0/1: InfiniBand, ACTIVE at 10 Gbit/s" in play.words
    # A card's that was there before.
    old = "/etc/systemd/system/trainyard-opensm@0123456789abcdef.service"
    plays.sh(
        "node1", f"cp $(ls -d {old.rpartition('@')[0]}@*.service | head -1) {old}; systemctl enable {old}"
    )
    assert site(plays, fabric, beside).changed == {"node1": 1, "node2": 0}
    assert plays.sh("node1", "find /etc/systemd -name '*0123456789abcdef*'") == ""
    assert site(plays, fabric, beside).changed == {"node1": 0, "node2": 0}

    assert plays.sh("node1", "systemctl is-enabled opensm || true").strip() == "masked"
    owner = {}
    for host in HOSTS:
        (unit,) = plays.sh(host, "ls /etc/systemd/system | grep trainyard-opensm@.*.service$").split()
        owner[int(unit[len("trainyard-opensm@") :].removesuffix(".service"), 16)] = host, unit
    wait_for(lambda: master(plays, fabric) in owner, 60)
    first = master(plays, fabric)
    host, unit = owner.pop(first)
    plays.sh(host, f"systemctl stop {unit}")
    wait_for(lambda: master(plays, fabric) in owner, 90)
    second = master(plays, fabric)
    plays.sh(host, f"systemctl start {unit}")
    # The one that comes back stands by: what is handed over may be nobody's.
    wait_for(lambda: "STANDBY" in plays.sh(host, f"journalctl --no-pager -n 20 -u {unit}"), 60)
    assert master(plays, fabric) == second and "--priority 13" in plays.sh(host, "ps -C opensm -o args=")


def test_the_group_moves_to_another_host_in_one_run(plays, fabric):
    play = site(plays, fabric, groups(plays, rdma=HOSTS, opensm=["node2"]))
    assert play.rc == 0, play.text
    assert plays.sh("node1", "ls /etc/systemd/system | grep -c trainyard-opensm@0 || true").strip() == "0"
    assert plays.sh("node2", "systemctl is-active 'trainyard-opensm@*'").strip() == "active"


def test_none_is_started_where_a_strange_one_reigns(plays, fabric):
    """One that somebody started by hand on a host that is not of the group."""
    assert site(plays, fabric, groups(plays, rdma=HOSTS, opensm=[])).rc == 0
    seen = " ".join(f"{name}={value}" for name, value in fabric.items() if name != "SIM_HOST")
    plays.sh(
        "node1",
        f"cd /tmp; systemd-run --quiet --unit=strange env {seen} SIM_HOST=node1 OSM_CACHE_DIR=/tmp opensm -f stdout",
    )
    wait_for(lambda: "SMINFO_MASTER" in sminfo(plays, fabric, "node2"), 60)
    play = site(plays, fabric, groups(plays, rdma=HOSTS, opensm=["node2"]))
    plays.sh("node1", "systemctl stop strange")
    assert play.rc == 0, play.text
    assert "node2: a subnet manager reigns here already (GUID 0" in play.words
    assert plays.sh("node2", "ls /etc/systemd/system | grep -c trainyard-opensm@0 || true").strip() == "0"


# Debian's unit, but for a card's device, which it asks for, and for the instances that it starts by the card's ports.
THEIRS = """
d=/etc/systemd/system/opensm.service.d; mkdir -p $d
printf '%s\\n' '[Unit]' ConditionPathExists= '[Service]' Type=exec ExecCondition= ExecStart= \\
  'ExecStart=/usr/sbin/opensm --log_file stdout' WorkingDirectory=/tmp 'Environment=@seen@ OSM_CACHE_DIR=/tmp' \\
  > $d/lab.conf
systemctl daemon-reload; systemctl enable --quiet --now opensm
"""


def test_the_owners_own_gives_way_and_runs_again(plays, fabric):
    """It runs on node1 before ours comes. The owner of node2, which is in no group, keeps his from starting."""
    state = "systemctl is-enabled opensm || true; systemctl is-active opensm || true"
    seen = " ".join(f"{name}={value}" for name, value in fabric.items() if name != "SIM_HOST")
    mask = "/etc/systemd/system/opensm.service"
    plays.sh("node2", f"ln -s /dev/null {mask}")
    plays.sh("node1", THEIRS.replace("@seen@", f"{seen} SIM_HOST=node1"))
    wait_for(lambda: master(plays, fabric) is not None, 60)
    beside = groups(plays, rdma=HOSTS, opensm=["node1"])
    assert site(plays, fabric, beside, "--check").rc == 0
    assert plays.sh("node1", state).split() == ["enabled", "active"]
    play = site(plays, fabric, beside)
    assert play.rc == 0, play.text
    assert plays.sh("node1", state).split() == ["masked", "inactive"]
    assert plays.sh("node1", "systemctl is-active 'trainyard-opensm@*'").strip() == "active"
    assert site(plays, fabric, beside).changed == {"node1": 0, "node2": 0}
    wait_for(lambda: master(plays, fabric) is not None, 60)
    beside = groups(plays, rdma=HOSTS, opensm=[])
    play = site(plays, fabric, beside)
    assert play.rc == 0, play.text
    assert plays.sh("node1", state).split() == ["enabled", "active"]
    assert plays.sh("node1", "pgrep -cx opensm").strip() == "1"
    wait_for(lambda: master(plays, fabric) is not None, 60)
    assert site(plays, fabric, beside).changed == {"node1": 0, "node2": 0}
    assert plays.sh("node2", f"readlink {mask}").strip() == "/dev/null"
    plays.sh("node1", f"systemctl disable --quiet --now opensm; rm -r {mask}.d; systemctl daemon-reload")
    plays.sh("node2", f"rm {mask}")


def test_roce_has_no_subnet_manager(plays, fabric):
    port = "/opt/roce/sys/class/infiniband/rocep1s0/ports/1"
    plays.sh(
        "node1", f"mkdir -p {port}/gids; echo '4: ACTIVE' > {port}/state; echo Ethernet > {port}/link_layer"
    )
    beside = groups(plays, rdma=["node1"], opensm=["node1"])
    command = plays.command("opensm", "cluster", {"_rdma_sys_root": "/opt/roce"}, *beside)
    play = plays.finish(command)
    assert play.rc != 0 and play.changed.get("node1") == 0
    assert "rocep1s0/1 is Ethernet; expected an InfiniBand port" in play.words


@pytest.fixture(scope="module")
def card(plays):
    """A RoCE card on node2: what /sys would say of it, and a stand-in for `dcb`."""
    device = "/opt/card/sys/class/infiniband/rocep11s0/ports/1"
    files = {
        "state": "4: ACTIVE",
        "link_layer": "Ethernet",
        "rate": "100 Gb/sec",
        "sm_lid": "0x0",
        "gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        "gid_attrs/types/0": "RoCE v2",
        "gid_attrs/ndevs/0": "ens192",
    }
    write = [f"mkdir -p {device}/gids {device}/gid_attrs/types {device}/gid_attrs/ndevs"]
    write += [f"echo '{text}' > {device}/{name}" for name, text in files.items()]
    write += ["mkdir -p /opt/card/sys/class/net/ens192", "echo 9000 > /opt/card/sys/class/net/ens192/mtu"]
    configured = "/sys/kernel/config/rdma_cm/rocep11s0/ports/1"
    write += [f"mount -t tmpfs none /sys/kernel && mkdir -p {configured}"]
    write += ["ip link add ens192 type veth peer name ens192p"]  # of one that is gone nothing is cleared
    plays.sh("node2", " && ".join(write))
    plays.sh("node2", f"cat > /usr/local/sbin/dcb <<'END'\n{DCB}END\nchmod +x /usr/local/sbin/dcb")


def test_a_class_of_service_for_roce(plays, card):
    """The whole role, on a card that is made up: check mode, twice, another mark, a boot, a card without DCB, none."""
    beside = groups(plays, rdma=["node2"], opensm=[])
    lossless = {"roce_qos_mode": "lossless", "roce_qos_switch_confirmed": True, "_rdma_sys_root": "/opt/card"}
    unit = "trainyard-roce-qos.service"

    def site(**given):
        return plays.finish(plays.command("rdma", "node2", {**lossless, **given}, *beside))

    def classes():
        return json.loads(plays.sh("node2", "cat /run/dcb"))["app"]

    play = plays.finish(plays.command("rdma", "node2", lossless, *beside, "--check", "--diff"))
    assert play.rc == 0, play.text
    assert plays.sh("node2", "ls /etc/trainyard-roce-qos.json 2>/dev/null || true") == ""
    play = site()
    assert play.rc == 0, play.text
    assert classes() == {"26": "3", "48": "6"}
    assert plays.sh("node2", f"systemctl is-enabled {unit}; systemctl is-active {unit}").split() == [
        "enabled",
        "active",
    ]
    assert site().changed == {"node2": 0}
    play = site(roce_qos_dscp=34)
    assert play.rc == 0 and classes() == {"34": "3", "48": "6"}, play.text

    # A card knows nothing of it after a boot: the unit tells it anew.
    plays.sh(
        "node2",
        f"systemctl stop {unit}; rm -f /run/dcb /run/trainyard-roce-qos*; [ ! -e /run/dcb ]; systemctl start {unit}",
    )
    assert classes() == {"34": "3", "48": "6"}

    plays.sh("node2", "sed -i 's/ens192\"/ens999\"/' /usr/local/sbin/dcb")
    play = site(roce_qos_dscp=26)
    assert play.rc != 0 and "driver knows no DCB (RTNETLINK answers" in play.words, play.text
    assert play.changed.get("node2") == 0 and classes() == {"34": "3", "48": "6"}
    plays.sh("node2", "sed -i 's/ens999\"/ens192\"/' /usr/local/sbin/dcb")

    assert site(roce_qos_mode="none").rc == 0
    assert classes() == {}
    assert plays.sh("node2", f"systemctl is-enabled {unit} 2>/dev/null || true").strip() in ("", "not-found")


def test_empty_groups_take_it_away_again(plays, fabric):
    play = site(plays, fabric, groups(plays, rdma=[], opensm=[]))
    assert play.rc == 0, play.text
    left = plays.sh("node2", "find /etc /var/cache -path '*trainyard-opensm*' -o -name '*trainyard-rdma*'")
    assert [line for line in left.split() if "fabric" not in line and not line.endswith(".d")] == []
    assert site(plays, fabric, groups(plays, rdma=[], opensm=[])).changed == {"node1": 0, "node2": 0}
