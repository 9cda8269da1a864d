"""The role storage: two machines share a directory by their kernels' NFS, also when the server is dead; refusals.

Containers have this machine's kernel, virtual machines their own. The tests follow one lab through its life, in this
order.
"""

import json
from pathlib import Path

import pytest
import yaml
from plays import Plays, playground, wait_for

from lab.lab import Lab, Options

pytestmark = pytest.mark.timeout(3 * 3600)  # emulated, a fixture's start alone takes minutes
SHARED = "/srv/trainyard/shared"
UNIT = "srv-trainyard-shared"
PATIENCE = 150  # seconds: softerr gives up after two minutes
MADE = (
    f"ls -d /etc/systemd/system/*{UNIT}* /etc/systemd/system/rpc* /etc/exports.d /etc/nfs.conf.d/trainyard.conf "
    f"/var/lib/trainyard-units {SHARED} 2>/dev/null || true"
)
MASK = "/etc/systemd/system/rpc-statd.service"


def group(plays, *hosts):
    """An inventory beside the lab's: the group storage_server with `hosts`."""
    path = plays.directory / f"storage-{'-'.join(hosts) or 'none'}.yml"
    path.write_text(
        yaml.safe_dump({"all": {"children": {"storage_server": {"hosts": {h: {} for h in hosts}}}}})
    )
    return str(path)


def site(plays, *arguments, server="node1", tags="storage", host="cluster", **variables):
    """site.yml's part, with `server` in the group (nobody with "")."""
    names = [server] if server else []
    return plays.run(tags, host, variables, "-i", group(plays, *names), *arguments)


# ---- a kernel without NFS ----


@pytest.fixture(scope="module")
def containers(able, tmp_path_factory):
    with playground("t-store", 2, tmp_path_factory.mktemp("storage")) as plays:
        yield plays


def test_without_the_group_nothing_is_shared(containers):
    play = site(containers, server="")
    assert play.rc == 0 and play.changed == {"node1": 0, "node2": 0}, play.text


@pytest.mark.skipif("nfsd" in Path("/proc/filesystems").read_text(), reason="this machine's kernel has nfsd")
@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_a_kernel_without_nfs_is_refused_and_nothing_is_changed(containers, arguments):
    play = site(containers, *arguments)
    assert play.rc != 0 and play.changed == {"node1": 0, "node2": 0}, play.text
    assert "node1: storage_server: found a kernel" in play.words and "has no nfsd" in play.words
    assert "leave the group storage_server empty" in play.words
    for host in ("node1", "node2"):
        assert containers.sh(host, MADE) == ""


# ---- two machines ----


@pytest.fixture(scope="module")
def plays(able_to_emulate, tmp_path_factory):
    lab = Lab("t-storevm")
    try:
        lab.up(Options(name="t-storevm", hosts=2, vms=True), replace=True)
        plays = Plays(lab, tmp_path_factory.mktemp("storage-vm"))
        plays.sh(
            "node2", "useradd --system one; useradd --system two"
        )  # its service user gets another number
        yield plays
    finally:
        lab.down()


def mounted(plays, host="node2"):
    return plays.sh(host, f"grep ' {SHARED} nfs4 ' /proc/mounts || true")


@pytest.mark.full
def test_check_mode_on_untouched_machines_changes_nothing(plays):
    play = site(plays, "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0 and play.changed["node2"] > 0
    for host in ("node1", "node2"):
        assert plays.sh(host, MADE) == ""


@pytest.mark.full
def test_files_in_the_way_are_refused_before_anything_is_changed(plays):
    plays.sh("node2", f"mkdir -p {SHARED}; echo mine > {SHARED}/file")
    play = site(plays)
    assert play.rc != 0 and play.changed == {"node1": 0, "node2": 0}, play.text
    assert (
        f"node2: storage_path: found files in {SHARED}" in play.words and "Move them to node1" in play.words
    )
    plays.sh("node2", f"rm -r /srv/trainyard; mkdir -p {SHARED}; mount -t tmpfs mine {SHARED}")
    play = site(plays)
    assert play.rc != 0 and play.changed == {"node1": 0, "node2": 0}, play.text
    assert f"found mine (tmpfs) mounted at {SHARED}" in play.words
    plays.sh("node2", f"umount {SHARED}; rm -r /srv/trainyard")


@pytest.mark.full
def test_what_the_server_writes_the_others_read(plays):
    plays.sh("node2", f"ln -s /dev/null {MASK}")  # its owner's, which reset is to leave
    play = site(plays, tags="identity,firewall,storage")
    assert play.rc == 0, play.text
    assert "Read it on every other host" in play.text
    line = mounted(plays)
    for option in ("vers=4.2", "softerr", "lookupcache=pos", "nosuid", "nodev"):
        assert option in line, line
    again = site(plays)
    assert again.rc == 0 and again.changed == {"node1": 0, "node2": 0}, again.text
    assert plays.sh("node1", f"ls -A {SHARED}") == ""  # no word is left


@pytest.mark.full
def test_all_hosts_act_as_the_service_user_whatever_its_number(plays):
    """Root and the login user of node2 write as node1's service user."""
    numbers = {plays.sh(host, "id -u trainyard") for host in ("node1", "node2")}
    assert len(numbers) == 2
    plays.sh("node2", f"echo a > {SHARED}/root; su ops -c 'echo b > {SHARED}/ops'")
    assert plays.sh("node1", f"stat -c %U {SHARED}/root {SHARED}/ops").split() == ["trainyard"] * 2
    plays.sh("node1", f"su trainyard -s /bin/sh -c 'echo c > {SHARED}/own'")
    plays.sh("node2", f"su trainyard -s /bin/sh -c 'cat {SHARED}/own && echo d > {SHARED}/own'")
    assert plays.sh("node1", f"cat {SHARED}/own") == "d\n"
    # Nobody else gets that far.
    for host in ("node1", "node2"):
        assert "denied" in plays.sh(host, f"su nobody -s /bin/sh -c 'ls {SHARED}' 2>&1 || true")


@pytest.mark.full
def test_a_run_may_read_it_in_its_sandbox(plays):
    """By the first look into it since a boot of the client: the mount comes into the unit's own namespace."""
    plays.sh("node2", f"systemctl stop {UNIT}.mount")
    assert mounted(plays) == ""
    words = [
        "User=trainyard",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "RestrictNamespaces=yes",
    ]
    options = " ".join(f"-p {word}" for word in words)
    assert plays.sh("node2", f"systemd-run --wait --pipe --quiet {options} cat {SHARED}/own") == "d\n"


@pytest.mark.full
def test_one_port_answers_and_only_the_cluster(plays):
    listens = "ss -Htlunp; ss -Htlun | awk '{print $5}' | sed 's/.*://' | sort -un | xargs"
    for host, ports in (("node1", {"22", "2049"}), ("node2", {"22"})):
        shown = plays.sh(host, listens)
        assert set(shown.splitlines()[-1].split()) == ports, shown
    (line,) = plays.sh("node1", "cat /var/lib/nfs/etab").splitlines()
    assert line.startswith(f"{SHARED}\t{plays.lab.host('node2').address}(") and "all_squash" in line
    knock = f"import socket; socket.create_connection(('{plays.lab.host('node1').address}', 2049), 5)"
    assert plays.lab.stranger("python3", "-c", knock).returncode != 0
    assert plays.lab.exec("node2", "python3", "-c", knock) == ""


def probe(plays):
    """What the role's last look says on node2, with a word that node1 has written."""
    common = {"path": SHARED, "user": "trainyard"}
    read = {
        "state": "read",
        "word": "{{ hostvars.node1.written.word }}",
        "unit": f"{UNIT}.mount",
        "seconds": 60,
    }
    read |= {"server": "node1", "address": plays.lab.host("node1").address}
    tasks = [
        {
            "storage_probe": {**common, "state": "written"},
            "register": "written",
            "when": "'node1' in inventory_hostname",
        },
        {"storage_probe": {**common, **read}, "when": "'node2' in inventory_hostname"},
    ]
    return plays.run([{"name": "Probe", "become": True, **task} for task in tasks])


@pytest.mark.full
def test_a_client_that_reads_nothing_is_told_why(plays):
    node2 = plays.lab.host("node2").address
    well = probe(plays)
    assert well.rc == 0, well.text
    plays.sh("node2", f"systemctl stop {UNIT}.mount")
    plays.sh("node1", f"sed -i s/{node2}/192.0.2.9/ /etc/exports.d/trainyard.exports; exportfs -ra")
    play = probe(plays)
    assert play.rc != 0 and f"This host comes from {node2}" in play.words, play.text
    plays.sh("node1", "systemctl stop nfs-server")
    play = probe(plays)
    assert play.rc != 0 and "port 2049: refused" in play.words, play.text
    assert "On node1, `systemctl status nfs-server`" in play.words
    mended = site(plays)
    assert mended.rc == 0 and mended.changed["node1"] > 0 and mended.changed["node2"] == 0, mended.text


# How the server's file system answers, and how a write fares: [[error or "", seconds], …]
ASK = f"""
import json, os, time
def tried(work):
    started = time.monotonic()
    try:
        work(); said = ""
    except OSError as error:
        said = error.strerror
    return [said, time.monotonic() - started]
def write():
    with open("{SHARED}/late", "w") as file:
        file.write("x" * 100_000)
        file.flush()
        os.fsync(file.fileno())
print(json.dumps([tried(lambda: os.statvfs({SHARED!r})), tried(write)]))
"""


@pytest.mark.full
def test_a_dead_server_gives_errors_and_no_hang_and_comes_back(plays):
    plays.sh("node2", f"cat {SHARED}/own")
    plays.lab.power("node1", on=False)
    for said, took in json.loads(plays.lab.exec("node2", "python3", "-c", ASK)):
        assert said == "Connection timed out" and took < PATIENCE
    # Neither the end of the host nor its start waits for it.
    plays.sh("node2", "systemctl reboot")
    wait_for(
        lambda: plays.sh("node2", "cut -d. -f1 /proc/uptime; systemctl is-system-running --wait") and True,
        400,
    )
    plays.lab.power("node1", on=True)
    wait_for(lambda: plays.sh("node2", f"cat {SHARED}/own") == "d\n", 240)


@pytest.mark.full
def test_reset_leaves_the_files_and_nothing_else(plays):
    inventory = ("-i", group(plays, "node1"))
    reset = plays.book("playbooks/reset.yml", *inventory, seconds=2400, reset="node1,node2", sure="true")
    assert reset.returncode == 0, reset.stdout + reset.stderr
    assert sorted(plays.sh("node1", f"ls {SHARED}").split()) == ["ops", "own", "root"]
    assert plays.sh("node1", MADE).split() == [SHARED]
    assert plays.sh("node2", MADE).split() == [MASK] and mounted(plays) == ""
    for host in ("node1", "node2"):  # its package stays
        assert plays.sh(host, "systemctl is-enabled rpcbind.socket || true").strip() == "disabled"
    again = plays.book("playbooks/reset.yml", *inventory, seconds=2400)
    assert "nothing of Trainyard's is there" in " ".join(again.stdout.split()), again.stdout
