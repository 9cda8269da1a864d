"""The lab itself: its hosts are real and stock, what one does to them happens, nothing gets out, and nothing stays."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lab import base, machine, playbook
from lab import lab as lab_module
from lab.__main__ import main
from lab.cgroup import Group
from lab.lab import DISK, STATE, Lab, LabError, Options
from lab.shell import wait_until

ROOT = Path(__file__).resolve().parents[2]

# A listener that notes how many bytes came and how long that took, and a sender. No package needed.
RECEIVE = """
import socket, time
server = socket.create_server(("", 7000))
print("ready", flush=True)
peer, _ = server.accept()
got, start = len(peer.recv(1 << 16)), time.monotonic()
while data := peer.recv(1 << 16):
    got += len(data)
print(got * 8 / (time.monotonic() - start) / 1e6, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000))
peer.sendall(bytes(int(sys.argv[2])))
"""
SPIN = """
import sys, time
begin, end = time.process_time(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
print(time.process_time() - begin)
"""
# Prints what it hears from the other side of a connection: "nothing", or how it ended.
LISTEN = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 22), timeout=10)
peer.recv(100)
print("connected", flush=True)
peer.settimeout(float(sys.argv[2]))
try:
    print("closed" if peer.recv(1) == b"" else "data")
except TimeoutError:
    print("nothing")
except OSError as error:
    print(error)
"""


def start(lab, node, script, *arguments):
    """A Python script on a host, running; its first line of output has been read."""
    process = subprocess.Popen(
        lab.host(node).enter("python3", "-c", script, *arguments), stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return process


def traces(name):
    """Everything on this machine that belongs to the lab NAME, by kind."""

    def lines(*argv):
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

    def processes():
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace")
                groups = (process / "cgroup").read_text()
            except OSError:
                continue
            if not words:  # dead, and not yet reaped by its parent, number 1
                continue
            if f"/trainyard-lab/{name}/" in groups or f"/trainyard-{name}\0" in words:
                yield words.replace("\0", " ")

    everywhere = [
        *Path("/sys/fs/cgroup").glob("*/trainyard-lab/*"),
        *Path("/sys/fs/cgroup/trainyard-lab").glob("*"),
    ]
    files = [STATE / name, STATE / f".lock-{name}", DISK / name, Lab(name).inventory]
    kinds = {
        "namespaces": [
            line for line in lines("ip", "netns") if line.split()[0].startswith(f"trainyard-{name}")
        ],
        "links": [line for line in lines("ip", "-brief", "link") if line.startswith(f"ty-{name}@")],
        "tables": [line for line in lines("nft", "list", "tables") if line.endswith(f" trainyard_{name}")],
        "mounts": [
            line for line in lines("cat", "/proc/self/mounts") if f"/{name}/" in line or f"-{name} " in line
        ],
        "groups": [str(group) for group in everywhere if group.name == name],
        "processes": list(processes()),
        "files": [str(file) for file in files if file.exists()],
    }
    return {kind: found for kind, found in kinds.items() if found}


# --- the hosts -------------------------------------------------------------------------------------------------------


def test_ansible_reaches_every_host_with_a_password_and_becomes_root_with_one(lab3):
    play = playbook.run(
        lab3,
        [
            {
                "hosts": "all",
                "gather_facts": False,
                "tasks": [
                    {"name": "Ping", "ansible.builtin.ping": {}},
                    {"name": "Root", "ansible.builtin.command": "id -u", "become": True},
                    {"name": "User", "ansible.builtin.command": "sudo -n id -u", "ignore_errors": True},
                ],
            }
        ],
    )
    assert play.rc == 0, play.text
    assert set(play.stats) == {"node1", "node2", "node3"}
    assert {result["ping"] for result in play.results("Ping").values()} == {"pong"}
    assert {result["stdout"] for result in play.results("Root").values()} == {"0"}
    assert all("password is required" in result["stderr"] for result in play.results("User").values())


def test_the_inventory_keeps_its_secrets_and_has_the_groups_of_the_contract(lab3):
    command = [str(Path(sys.executable).with_name("ansible-inventory")), "-i", str(lab3.inventory), "--graph"]
    graph = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = graph.replace("|", " ").replace("--", " ").split()
    assert words == ["@all:", "@ungrouped:", "@cluster:", "@head:", "node1", "@workers:", "node2", "node3"]
    assert stat.S_IMODE(lab3.inventory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in lab3.inventory.iterdir()] == [0o600]
    assert stat.S_IMODE(lab3.state.stat().st_mode) == 0o700
    # No user of this machine reaches the hosts' files, whose setuid programs nobody updates.
    for directory in (base.CACHE, *(host.disk for host in lab3.hosts.values())):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    running = b"".join(file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())
    assert lab3.password.encode() not in running


def test_no_key_opens_a_host_and_a_changed_host_key_is_refused(lab3, tmp_path):
    def ssh(known_hosts):
        relay = f"nsenter --net=/run/netns/{lab3.network.netns} python3 {lab3.state}/relay.py %h %p"
        command = ["ssh", "-F", "/dev/null", "-o", "BatchMode=yes", "-o", f"ProxyCommand={relay}"]
        command += ["-o", f"UserKnownHostsFile={known_hosts}", f"ops@{lab3.host('node1').address}", "true"]
        return subprocess.run(command, capture_output=True, text=True).stderr

    assert "Permission denied (publickey,password)" in ssh(lab3.known_hosts)
    other = tmp_path / "known_hosts"
    key = next(
        line.split()[1:] for line in (lab3.state / "host_keys").read_text().splitlines() if ".12 " in line
    )
    other.write_text(f"{lab3.host('node1').address} {' '.join(key)}\n")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(other)


def test_hosts_are_stock_and_no_two_are_alike(lab3):
    identity = []
    for node in lab3.hosts:
        assert lab3.exec(node, "systemctl", "is-system-running").strip() == "running"
        assert lab3.exec(node, "systemctl", "list-units", "--failed", "--quiet", "--plain").strip() == ""
        assert lab3.exec(node, "hostname").strip() == "debian"
        present = lab3.exec(
            node, "sh", "-c", "command -v pip pip3 nft netplan git rsync chronyd gcc", check=False
        )
        assert present == ""
        assert "No module named" in lab3.exec(
            node, "sh", "-c", "python3 -m ensurepip 2>&1; python3 -m pip 2>&1", check=False
        )
        identity += [
            lab3.exec(node, "cat", "/etc/machine-id"),
            lab3.exec(node, "cat", "/etc/ssh/ssh_host_ed25519_key.pub"),
        ]
    assert len(set(identity)) == 2 * len(lab3.hosts)


def test_a_host_cannot_change_the_machine_but_its_own_network(lab3):
    before = Path("/proc/sys/vm/swappiness").read_text()
    script = "echo 99 > /proc/sys/vm/swappiness; echo never > /sys/kernel/mm/transparent_hugepage/enabled"
    lab3.exec("node1", "sh", "-c", script, check=False)
    assert Path("/proc/sys/vm/swappiness").read_text() == before
    with pytest.raises(LabError, match="Read-only file system"):
        lab3.exec("node1", "sh", "-c", "echo 99 > /proc/sys/vm/swappiness")
    retries = "/proc/sys/net/ipv4/tcp_retries2"
    lab3.exec("node1", "sh", "-c", f"echo 9 > {retries}; echo change > /sys/class/net/eth0/uevent")
    assert lab3.exec("node1", "cat", retries).strip() == "9"
    assert lab3.exec("node2", "cat", retries) == Path(retries).read_text()


def test_a_reboot_by_ansible_comes_back_with_its_files(lab3):
    lab3.exec("node2", "touch", "/root/kept", "/run/forgotten")
    boot = lab3.exec("node2", "cat", "/proc/sys/kernel/random/boot_id")
    tasks = [{"name": "Reboot", "ansible.builtin.reboot": {"reboot_timeout": 120}}]
    play = playbook.run(lab3, [{"hosts": "node2", "gather_facts": False, "become": True, "tasks": tasks}])
    assert play.rc == 0, play.text
    assert play.results("Reboot")["node2"]["rebooted"] is True
    assert lab3.exec("node2", "cat", "/proc/sys/kernel/random/boot_id") != boot
    assert lab3.exec("node2", "ls", "/root/kept").strip() == "/root/kept"
    assert lab3.exec("node2", "ls", "/run/forgotten", check=False) == ""


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_power_cut_is_silent_and_the_host_comes_back(lab3):
    listening = start(lab3, "node1", LISTEN, lab3.host("node3").address, "2")
    lab3.power("node3", on=False)
    assert listening.communicate(timeout=30)[0].strip() == "nothing"
    assert not lab3.host("node3").running()
    with pytest.raises(LabError, match=r"node3 is off: .*power --name lab3 node3 on"):
        lab3.exec("node3", "true")
    lab3.power("node3", on=True)
    assert lab3.exec("node3", "hostname").strip() == "debian"
    # What a clean shutdown by the host itself looks like, for comparison: its peers hear of it.
    listening = start(lab3, "node1", LISTEN, lab3.host("node3").address, "20")
    lab3.exec("node3", "systemctl", "stop", "ssh")
    lab3.exec("node3", "sh", "-c", "pkill sshd || kill $(pidof sshd)", check=False)
    assert listening.communicate(timeout=30)[0].strip() != "nothing"
    lab3.exec("node3", "systemctl", "start", "ssh")


def test_a_cut_wire_and_a_frozen_host(lab3):
    def reaches():
        script = f"import socket; socket.create_connection(('{lab3.host('node2').address}', 22), 1).recv(4)"
        return (
            lab3.exec(
                "node1", "sh", "-c", f'timeout 3 python3 -c "{script}" && echo yes', check=False
            ).strip()
            == "yes"
        )

    assert reaches()
    lab3.cut("node2")
    assert not reaches()
    lab3.join("node2")
    assert wait_until(reaches, 10)
    lab3.freeze("node2")
    assert not reaches()
    lab3.freeze("node2", frozen=False)
    assert wait_until(reaches, 10)


def test_a_quota_slows_a_host_in_proportion(lab3):
    # Small shares: also a machine with much else to do can give them in full.
    lab3.set_cpus("node1", 0.08)
    lab3.set_cpus("node2", 0.04)
    spinning = [
        subprocess.Popen(lab3.host(n).enter("python3", "-c", SPIN, "4"), stdout=subprocess.PIPE, text=True)
        for n in ("node1", "node2")
    ]
    fast, slow = (float(process.communicate(timeout=60)[0]) for process in spinning)
    for node in ("node1", "node2"):
        lab3.set_cpus(node, None)
    # A machine with much else to do may give them less, never more.
    assert fast < 1.3 * 0.08 * 4 and slow < 1.3 * 0.04 * 4 and slow < fast, (fast, slow)


@pytest.mark.parametrize(("sender", "receiver"), [("node1", "node2"), ("node2", "node1")])
def test_a_rate_holds_in_each_direction(lab3, sender, receiver):
    def mbits(size):
        receiving = start(lab3, receiver, RECEIVE)
        lab3.exec(sender, "python3", "-c", SEND, lab3.host(receiver).address, str(size))
        return float(receiving.communicate(timeout=60)[0])

    lab3.set_rate("node2", "20mbit")
    slow = mbits(4_000_000)
    lab3.set_rate("node2", None)
    assert 12 < slow < 24
    assert mbits(40_000_000) > 60


# --- the network -----------------------------------------------------------------------------------------------------


def test_the_stranger_reaches_the_hosts_and_nothing_else(lab3):
    probe = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), 5).recv(4))"
    assert "SSH-" in lab3.stranger("python3", "-c", probe, lab3.host("node1").address).stdout
    routes = lab3.stranger("ip", "route").stdout.splitlines()
    assert [route.split()[0] for route in routes] == [str(lab3.network.subnet)]


def test_private_addresses_have_no_way_out(lab3):
    # Asked of the routing tables: a test that sent such a packet would be the leak that it looks for.
    for address in ("10.1.2.3", "172.16.0.1", "192.168.250.10", "169.254.169.254", "100.64.0.1"):
        with pytest.raises(LabError, match="No route to host"):
            lab3.network.ip("route", "get", address)
    rules = subprocess.run(
        ["nft", "list", "table", "ip", lab3.network.table], capture_output=True, text=True
    ).stdout
    for network in machine.PRIVATE:
        assert network in rules
    own_routes = subprocess.run(["ip", "route"], capture_output=True, text=True).stdout
    assert "10.77." not in own_routes


def test_packages_come_as_they_do_on_this_machine(lab3):
    update = lab3.exec("node1", "sh", "-c", "apt-get update 2>&1; echo status=$?")
    assert "status=0" in update and "Failed" not in update, update
    sources = lab3.exec("node1", "sh", "-c", "cat /etc/apt/sources.list.d/*")
    for stanza in machine.distribution_sources(lab3.options.suite):
        assert stanza["URIs"] in sources and stanza["Suites"] in sources
    assert lab3.exec("node1", "cat", "/etc/pip.conf") == machine.pip_configuration().text
    for (
        path
    ) in machine.pip_configuration().folders:  # a file of constraints or certificates may be among them
        if path.is_dir():
            assert lab3.exec("node1", "ls", str(path)).split() == sorted(os.listdir(path))
        else:
            assert lab3.exec("node1", "cat", str(path)) == path.read_text()
        with pytest.raises(LabError, match="Read-only"):
            lab3.exec("node1", "touch", str(path / "written" if path.is_dir() else path))


@pytest.mark.full
def test_offline_with_odd_names_on_another_release_and_unknown_keys(make_lab):
    lab = make_lab(
        "odd",
        hosts=2,
        offline=True,
        suite="trixie",
        hostnames=["Büro-PC"],
        interfaces={"node1": "enp5s0", "node2": "wlp0s20f3.7"},
        unpinned=True,
    )
    assert "trixie" in lab.exec("node1", "cat", "/etc/os-release")
    assert lab.exec("node1", "cat", "/etc/hostname").strip() == "Büro-PC"
    assert lab.exec("node2", "cat", "/etc/hostname").strip() == "debian"
    assert lab.host("node2").address in lab.exec(
        "node2", "ip", "-brief", "address", "show", "dev", "wlp0s20f3.7"
    )
    assert lab.exec("node1", "ip", "route", "show", "default") == ""
    assert lab.exec("node1", "sh", "-c", "cat /etc/pip.conf 2>&1", check=False).endswith(
        "No such file or directory\n"
    )
    assert "status=0" not in lab.exec(
        "node1", "sh", "-c", "apt-get update -o APT::Update::Error-Mode=any; echo status=$?"
    )
    assert lab.known_hosts.read_text() == ""
    assert not any(kind in traces("odd") for kind in ("links", "tables"))
    lab.down()
    assert traces("odd") == {}


# --- up and down -----------------------------------------------------------------------------------------------------


def test_down_leaves_nothing_and_the_root_is_used_again(make_lab):
    lab = make_lab("gone", hosts=1)
    playbook.run(lab, [{"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.ping": {}}]}])
    held = subprocess.Popen(lab.stranger_command("sleep", "600"))
    seen = traces("gone")
    assert set(seen) == {"namespaces", "links", "tables", "mounts", "groups", "processes", "files"}
    lab.down()
    assert held.wait(timeout=10) == -signal.SIGKILL
    assert wait_until(lambda: traces("gone") == {}, 5), traces("gone")
    lab.down()  # nothing there: says nothing
    started = time.monotonic()
    base.ready(lab_suite())
    assert time.monotonic() - started < 10


def lab_suite():
    return Options().suite


def up_in_background(name, *options):
    """`python3 -m lab up`, its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "lab", "up", "--name", name, "--hosts", "2", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


STAGES = {
    "the state is written": lambda name: (STATE / name / "state.json").exists(),
    "the namespace is there": lambda name: "namespaces" in traces(name),
    "a host is booting": lambda name: (
        Group(name, "node1").trees["v2"].exists() and Group(name, "node1").pids()
    ),
}


SIGNALS = (signal.SIGINT, signal.SIGKILL, signal.SIGHUP)


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        pytest.param(stage, number, marks=() if SIGNALS[at] == number else pytest.mark.full)
        for at, stage in enumerate(STAGES)
        for number in SIGNALS
    ],
)
def test_an_interrupted_up_is_cleared_away(able, stage, number):
    process = up_in_background("broken")
    try:
        assert wait_until(lambda: STAGES[stage]("broken"), 60, 0.001)
        assert process.poll() is None
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert traces("broken")
            with pytest.raises(LabError, match=r"did not come up whole: .*down --name broken"):
                Lab("broken").record()
            Lab("broken").down()
        else:
            assert process.returncode == 130, output
            assert "interrupted" in output
    finally:
        process.kill()
        Lab("broken").down() if traces("broken") and process.returncode is None else None
    assert wait_until(lambda: traces("broken") == {}, 5), traces("broken")


def test_up_clears_away_what_a_killed_up_left(make_lab):
    process = up_in_background("broken")
    assert wait_until(lambda: STAGES["a host is booting"]("broken"), 60, 0.001)
    process.kill()
    process.wait()
    lab = make_lab("broken", hosts=1)
    assert list(lab.hosts) == ["node1"]
    with pytest.raises(LabError, match="is up already"):
        lab.up(Options(name="broken"))
    assert lab.exec("node1", "hostname").strip() == "debian"
    lab.down()


def test_two_ups_of_one_name_take_turns(make_lab):
    failures = []

    def second():
        try:
            Lab("twice").up(Options(name="twice", hosts=1))
        except LabError as error:
            failures.append(str(error))

    first = threading.Thread(target=lambda: make_lab("twice", hosts=1))
    first.start()
    assert wait_until(lambda: (STATE / "twice").exists(), 60)
    second()
    first.join()
    assert len(failures) == 1 and "is up already" in failures[0]
    Lab("twice").down()


# --- what needs no root ----------------------------------------------------------------------------------------------


def test_without_root_it_says_what_to_type(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["lab", "up"])
    monkeypatch.setenv("LAB_TYPED", "make lab HOSTS=3")
    assert main() == 2
    assert "Type: sudo make lab HOSTS=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "Mine"}, "--name Mine: 1 to 12 small letters"),
        ({"name": "a/../b"}, "--name a/../b"),
        ({"hosts": 33}, "--hosts 33: a lab has 1 to 32 hosts"),
        ({"quota": {"node9": 1.0}}, "--quota node9=…: there is no such host; they are node1, node2, node3"),
        ({"quota": {"node1": 0.0}}, "--quota node1=0.0: a number of CPUs"),
        ({"rate": {"node1": "fast"}}, "--rate node1=fast: a number and kbit, mbit or gbit"),
        ({"interfaces": {"node1": "a-name-beyond-15"}}, "--interfaces node1=a-name-beyond-15: 1 to 15"),
        ({"hostnames": list("abcd")}, "--hostnames names 4 hosts, but --hosts is 3"),
        ({"suite": "../x"}, "--suite ../x"),
        ({"suite": "noble", "vms": True}, "--suite noble: virtual machines boot Debian's kernel"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(LabError) as refusal:
        Options(**options)
    assert words in str(refusal.value)


def test_the_last_lab_gives_the_machine_its_settings_back(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_module, "STATE", tmp_path / "state")
    switch, limit, high = (tmp_path / name for name in ("switch", "limit", "high"))
    for file, value in ((switch, "0\n"), (limit, "128\n"), (high, "9000\n")):
        file.write_text(value)
    (tmp_path / "state/a").mkdir(parents=True)
    (tmp_path / "state/a/state.json").write_text("{}")
    for _ in range(2):  # the second lab must not take the first one's values for the machine's
        lab_module._set_on_machine({switch: "1"})
        lab_module._set_on_machine({limit: "8192", high: "8192"}, at_least=True)
    assert [file.read_text().strip() for file in (switch, limit, high)] == ["1", "8192", "9000"]
    lab_module._restore_machine()
    assert switch.read_text() == "1"  # a lab is still up
    (tmp_path / "state/a/state.json").unlink()
    lab_module._restore_machine()
    assert [file.read_text().strip() for file in (switch, limit, high)] == ["0", "128", "9000"]


def test_apt_sources_of_both_formats_are_read():
    one_line = (
        "# deb http://off/ x main\n"
        "deb [arch=amd64,arm64 signed-by=/k.gpg] http://mirror/debian bookworm main contrib # why\n"
    )
    assert machine.parse_sources(one_line, one_line=True) == [
        {
            "Types": "deb",
            "URIs": "http://mirror/debian",
            "Suites": "bookworm",
            "Components": "main contrib",
            "Architectures": "amd64 arm64",
            "Signed-By": "/k.gpg",
        }
    ]
    deb822 = (
        "Types: deb deb-src\nURIs: http://m\n# a comment\nSuites: trixie\nSigned-By:\n -----BEGIN\n .\n"
        "\nEnabled: no\nTypes: deb\n"
    )
    assert machine.parse_sources(deb822, one_line=False) == [
        {"Types": "deb", "URIs": "http://m", "Suites": "trixie", "Signed-By": "\n -----BEGIN\n ."}
    ]


@pytest.mark.parametrize(
    ("sources", "named", "found"),
    [
        ("deb http://mirror/pub/debian/ bookworm main", None, "http://mirror/pub/ubuntu"),
        ("deb http://security/debian-security bookworm-security main", "http://u/ubuntu", "http://u/ubuntu"),
        ("deb http://mirror/packages bookworm main", None, None),
    ],
)
def test_ubuntu_is_looked_for_beside_debian(sources, named, found, tmp_path, monkeypatch):
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (folder / "own.list").write_text(f"{sources}\n")
    places = {"/etc/apt/sources.list": tmp_path / "none", "/etc/apt/sources.list.d": folder}
    monkeypatch.setattr(machine, "Path", lambda path: places.get(path, Path(path)))
    monkeypatch.setattr(machine, "os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "bookworm"})
    monkeypatch.setenv("TRAINYARD_LAB_UBUNTU", named or "")
    if found is None:
        with pytest.raises(LabError, match="TRAINYARD_LAB_UBUNTU"):
            machine.distribution_sources("noble")
        return
    (stanza,) = machine.distribution_sources("noble")
    assert (stanza["URIs"], stanza["Suites"]) == (found, "noble noble-updates noble-security")
    assert stanza["Signed-By"] == machine.UBUNTU_KEYRING
    (own,) = machine.distribution_sources("trixie")
    assert own["Suites"].startswith("trixie")


def test_pip_settings_become_one_file_and_its_folders(tmp_path, monkeypatch):
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(variable, raising=False)
    index = tmp_path / "an index/simple"
    index.mkdir(parents=True)
    elsewhere = "https://packages.example"
    pip = machine.render_pip(
        {
            ":env:.timeout": "7",
            "global.timeout": "5",
            "global.extra-index-url": f"{elsewhere}\nfile://{str(index).replace(' ', '%20')}",
            "install.no-compile": "true",
            "global.find-links": "/nowhere/at/all",
        }
    )
    assert "timeout = 7\n" in pip.text and "timeout = 5" not in pip.text
    assert "[install]\nno-compile = true\n" in pip.text
    assert pip.folders == [index.parent]
    assert pip.urls == [elsewhere]
