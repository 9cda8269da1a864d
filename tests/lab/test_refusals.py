"""What it takes a look at a host to refuse is refused by the whole of site.yml before any host is changed."""

import pytest
import yaml
from plays import RIVAL, playground

CARD = "/opt/fake/sys/bus/pci/devices/0000:01:00.0"
# A host that is no container, and whose kernel has no modules, as Ansible's PATH finds them.
VIRT, NO_CONTAINER = "/usr/local/bin/systemd-detect-virt", "#!/bin/sh\\nexit 1\\n"
MODPROBE = "/usr/local/sbin/modprobe"
NO_MODULES = "#!/bin/sh\\necho modprobe: Module ib_core not found >&2\\nexit 1\\n"
LOCK = "/var/lib/dpkg/lock-frontend"
HOLDS = f'import fcntl, time; f = open("{LOCK}", "w"); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(900)'
PORT = "/opt/roce/sys/class/infiniband/rocep1s0/ports/1"


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-refuse", 2, tmp_path_factory.mktemp("refusals")) as plays:
        yield plays


# What node2 is given, and loses again; the groups that it is in besides; what is set; what is said of it.
REFUSED = {
    "ufw": (
        "mkdir -p /etc/ufw; echo ENABLED=yes > /etc/ufw/ufw.conf; install -m 755 /bin/true /usr/sbin/ufw",
        "rm -r /etc/ufw /usr/sbin/ufw",
        (),
        {},
        "ufw is active on this host",
    ),
    "a rival": (
        RIVAL,
        "dpkg --remove openntpd",
        (),
        {"_time_sync_container": False},
        "openntpd keeps the time of this host",
    ),
    "an unknown card": (
        f"mkdir -p {CARD}; cd {CARD}; echo 0x10de > vendor; echo 0x030000 > class; echo 0x3f01 > device",
        "rm -r /opt/fake",
        (),
        {"_nvidia_sys_root": "/opt/fake", "_nvidia_kernel": "6.1.0-1-amd64"},
        "10de:3f01) is none that Trainyard knows",
    ),
    "no room": (
        "mkdir -p /opt/trainyard/env; mount -t tmpfs -o size=64m full /opt/trainyard/env",
        "umount /opt/trainyard/env; rm -r /opt/trainyard",
        (),
        {},
        "/opt/trainyard/env: found 0.07 GB free; expected 3.00 GB",
    ),
    "an apt at work": (
        f"setsid -f python3 -c '{HOLDS}' >/dev/null 2>&1; sleep 1",
        "pkill -f [l]ock-frontend",
        (),
        {"packages_lock_timeout": 3},
        f"holds {LOCK}, for more than 3 s now",
    ),
    "a kernel without RDMA": (
        f"printf '{NO_CONTAINER}' > {VIRT}; printf '{NO_MODULES}' > {MODPROBE}; chmod +x {VIRT} {MODPROBE}",
        f"rm {VIRT} {MODPROBE}",
        ("rdma",),
        {"_rdma_sys_root": "/opt/none", "_nvidia_sys_root": "/opt/none"},
        "node2: found a kernel without RDMA (modprobe: Module ib_core not found); expected one with",
    ),
    "OpenSM on RoCE": (
        f"mkdir -p {PORT}/gids; cd {PORT}; echo '4: ACTIVE' > state; echo Ethernet > link_layer",
        "rm -r /opt/roce",
        ("rdma", "opensm"),
        {"_rdma_sys_root": "/opt/roce"},
        "rocep1s0/1 is Ethernet; expected an InfiniBand port",
    ),
    "an OpenSM of the host's own": (
        f"mkdir -p {PORT}/gids; cd {PORT}; echo '4: ACTIVE' > state; echo InfiniBand > link_layer; echo 0x1 > lid; "
        "echo '[Service]' > /etc/systemd/system/opensm.service",
        "rm -r /opt/roce /etc/systemd/system/opensm.service",
        ("rdma", "opensm"),
        {"_rdma_sys_root": "/opt/roce"},
        "opensm.service: found a unit of this host's own; expected nothing",
    ),
    "an sshd for few": (
        "echo 'AllowUsers root lab' > /etc/ssh/sshd_config.d/few.conf",
        "rm /etc/ssh/sshd_config.d/few.conf",
        (),
        {},
        "node2: sshd's AllowUsers: found root lab, by which trainyard of the other hosts does not get in here",
    ),
    "a class for InfiniBand": (
        f"mkdir -p {PORT}/gids; cd {PORT}; echo '4: ACTIVE' > state; echo InfiniBand > link_layer",
        "rm -r /opt/roce",
        ("rdma",),
        {"_rdma_sys_root": "/opt/roce", "roce_qos_mode": "lossy"},
        "roce_qos_mode: found lossy, and no RoCE port",
    ),
    "a broken netplan file": (
        "mkdir -p /etc/netplan; echo 'network: [' > /etc/netplan/01-broken.yaml",
        "rm /etc/netplan/01-broken.yaml",
        (),
        {
            "network_interfaces": [
                {"name": "eth0", "addresses": ["{{ cluster_address }}/24"], "gateway": "none"}
            ]
        },
        "/etc/netplan/01-broken.yaml is no valid YAML",
    ),
    "an exporter of its own": (
        "systemd-run --unit=other python3 -m http.server 9100; while ! ss -Hltn | grep :9100; do sleep 0.1; done",
        "systemctl stop other",
        ("monitoring",),
        {},
        "other.service) listening at ",
    ),
    # Whatever this machine's kernel has of NFS: without it that is refused, too.
    "a file to share": (
        "mkdir -p /srv/trainyard; touch /srv/trainyard/shared",
        "rm -r /srv/trainyard",
        ("storage_server",),
        {},
        "node2: storage_",
    ),
}


# Each takes the looks of the whole of site.yml; of the others, how a look is refused is the same.
SHORT = ("ufw", "an unknown card", "no room", "a broken netplan file")


@pytest.mark.parametrize(
    "what", [what if what in SHORT else pytest.param(what, marks=pytest.mark.full) for what in REFUSED]
)
def test_before_any_host_is_changed(plays, what):
    given, taken, groups, variables, words = REFUSED[what]
    beside = plays.directory / f"{len(list(plays.directory.iterdir()))}.yml"
    beside.write_text(yaml.safe_dump({name: {"hosts": {"node2": {}}} for name in groups} or {"all": {}}))
    plays.sh("node2", given)
    try:
        play = plays.site(variables, "-i", str(beside))
    finally:
        plays.sh("node2", taken)
    assert play.rc != 0 and words in play.words, play.text
    assert play.changed["node1"] == play.changed["node2"] == 0, play.text


@pytest.mark.full
def test_a_port_of_etcds_that_another_program_has(plays):
    """On the head: of two hosts that alone keeps the memory of runs."""
    plays.sh("node1", "systemd-run --unit=other python3 -m http.server 2390; sleep 2")
    try:
        play = plays.site({})
    finally:
        plays.sh("node1", "systemctl stop other")
    assert play.rc != 0 and "etcd_peer_port: found python3 (process" in play.words, play.text
    assert "sudo systemctl disable --now other.service" in play.words
    assert play.changed["node1"] == play.changed["node2"] == 0, play.text
