"""A host leaves a cluster and comes back: reset.yml, and site.yml on the others.

The tests follow one lab through its life, in this order. What reset.yml leaves on a host is held against a list of its
files from before site.yml.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from plays import ROOT, Play, Plays

pytestmark = pytest.mark.full

HOSTS = ("node1", "node2", "node3")
SMALL = {"steps": 3, "sequence_length": 32, "batch_size": 4, "vocab_size": 300, "max_samples": 40}
LIST = (
    "find /etc /opt /var/lib /usr/local /root /home -xdev \\( -path /var/lib/apt/lists -o -path /var/lib/dpkg "
    "-o -path /var/lib/systemd \\) -prune -o \\( -type f -o -type l -o -type d \\) -print"
)
# What reset.yml says that stays; packages' own files are asked of dpkg.
STAYS = re.compile(
    r"/etc/(hostname|machine-id|machine-info|alternatives/.*|ld\.so\.cache|rc.\.d/.*|systemd/system/.*\.wants/nftables\.service"
    r"|ssh/ssh_config\.d/.*|default/.*|mailcap|python3.*|ca-certificates.*|ssl/.*|mime\.types)"
    r"|/var/lib/(apt|dpkg|python|ucf|systemd|dbus|etcd)(/.*)?|/home/[a-z]+/\.ansible(/.*)?|/root/\.ansible(/.*)?"
    r"|/home/[a-z]+/\.sudo_as_admin_successful"
    r"|.*/__pycache__(/.*)?|.*-"
)
KEPT = "/etc/systemd/network/10-eth0.network.before-trainyard"  # what the lab's hosts had before static addresses
# As Debian's installer writes it where the network has a domain.
INSTALLERS = (
    "127.0.0.1\tlocalhost\n127.0.1.1\tnode3.example.com\tnode3\n\n# ours\n::1     localhost ip6-localhost\n"
)
# A run that does nothing but live.
BUSY = """
d=/run/systemd/system/trainyard@busy.service.d; mkdir -p $d
printf '[Service]\\nEnvironmentFile=\\nExecStart=\\nExecStart=/bin/sleep 600\\nExecStop=\\n' > $d/busy.conf
systemctl daemon-reload; systemctl start trainyard@busy
"""


@pytest.fixture(scope="module")
def lab(make_lab):
    lab = make_lab("t-reset", hosts=3)
    yield lab
    lab.down()


@pytest.fixture(scope="module")
def play(lab, tmp_path_factory):
    """`play(playbook, *arguments)` on the lab, or with `inventory=` another."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    environment = Plays(lab, tmp_path_factory.mktemp("plays")).environment()
    results = tmp_path_factory.mktemp("results")
    eth0 = {"name": "eth0", "addresses": ["{{ cluster_address }}/24"], "gateway": lab.network.gateway}
    static = json.dumps({"network_interfaces": [eth0]})

    def run(playbook, *arguments, inventory=lab.inventory, **extra):
        words = [word for key, value in extra.items() for word in ("-e", f"{key}={value}")]
        if playbook == "site.yml":
            words += ["-e", static]
        command = [
            program,
            "-i",
            str(inventory),
            playbook,
            *arguments,
            *words,
            "-e",
            f"trainer_results_dir={results}",
        ]
        if playbook.startswith("playbooks/"):
            command = command[:-2]  # they know no other words
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        return Play(done.returncode, done.stdout + done.stderr, 0)

    return run


@pytest.fixture(scope="module")
def two(lab, tmp_path_factory):
    """The lab's inventory without node3."""
    (file,) = (file for file in lab.inventory.iterdir() if "ansible_password" in file.read_text())
    inventory = yaml.safe_load(file.read_text())
    del inventory["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node3"]
    path = tmp_path_factory.mktemp("two") / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory))
    return path


def files(lab, host):
    return set(lab.exec(host, "sh", "-c", LIST).splitlines())


def packaged(lab, host, paths):
    """Which of the paths belong to an installed package."""
    said = subprocess.run(
        lab.host(host).enter("xargs", "-d", "\\n", "dpkg-query", "--search"),
        input="\n".join(sorted(paths)),
        capture_output=True,
        text=True,
    ).stdout
    return {line.split(": ", 1)[1] for line in said.splitlines() if ": " in line}


def token(lab, host):
    """The etcd whose member a host is: one that answers for itself, and knows a leader."""
    ask = "import urllib.request as u; print(u.urlopen('http://ADDRESS:2389/health', timeout=5).read().decode())"
    assert "true" in lab.exec(host, "python3", "-c", ask.replace("ADDRESS", lab.host(host).address)), host
    (found,) = lab.exec(host, "ls", "/var/lib/trainyard-etcd").split()
    return found


@pytest.fixture(scope="module")
def before(lab):
    """Its owner has masked two units on node3, beside which ours come, or nothing does."""
    for unit in ("etcd", "opensm"):
        lab.exec("node3", "ln", "-s", "/dev/null", f"/etc/systemd/system/{unit}.service")
    return {host: files(lab, host) for host in HOSTS}


@pytest.fixture(scope="module")
def names(lab):
    """What /etc/hosts was on each host."""
    lab.exec("node3", "sh", "-c", 'printf %s "$1" > /etc/hosts', "sh", INSTALLERS)
    return {host: lab.exec(host, "cat", "/etc/hosts") for host in HOSTS}


def test_a_cluster_of_three_trains(lab, play, before, names):
    site = play("site.yml")
    assert site.rc == 0, site.text
    assert lab.exec("node3", "hostname", "--fqdn").strip() == "node3.example.com"
    for name in ("node3", "node3.example.com"):
        found = {line.split()[0] for line in lab.exec("node3", "getent", "ahostsv4", name).splitlines()}
        assert found == {lab.host("node3").address}
    run = play("train.yml", run="first", **SMALL)
    assert run.rc == 0, run.text
    text = play("playbooks/generate.yml", run="first", prompt="She $HOME 'was'", tokens=4)
    assert text.rc == 0 and "\nShe $HOME 'was'" in text.text, text.text
    assert set(text.changed.values()) == {0}
    assert KEPT in files(lab, "node3") - before["node3"]
    assert lab.exec("node2", "readlink", "/etc/systemd/system/etcd.service").strip() == "/dev/null"


def test_it_refuses_while_a_run_is_active_and_without_consent(lab, play):
    state = files(lab, "node3")
    lab.exec("node3", "sh", "-ec", BUSY)
    refused = play("playbooks/reset.yml", "-l", "node3", reset="node3", sure="true")
    assert refused.rc != 0
    assert "run busy: found it active on node3; expected no run there. Stop it first:" in refused.words
    lab.exec(
        "node3",
        "sh",
        "-ec",
        "systemctl stop trainyard@busy; rm -r /run/systemd/system/trainyard@busy.service.d",
    )
    unasked = play("playbooks/reset.yml", "-l", "node3")
    assert unasked.rc != 0 and "-e reset=node3 -e sure=true. Nothing was changed." in unasked.words
    once = play("playbooks/reset.yml", "-l", "node3", reset="node3")
    assert once.rc != 0 and "-e reset=node3 -e sure=true. Nothing was changed." in once.words
    wrong = play("playbooks/reset.yml", reset="node3", sure="true")
    assert wrong.rc != 0 and "expected just the hosts of this play: node1,node2,node3." in wrong.words
    told = play("playbooks/reset.yml", "-l", "node3", "--check")
    assert told.rc == 0 and told.changed["node3"] > 5, told.text
    assert re.search(r"/var/lib/trainyard/runs +\d", told.text)
    assert files(lab, "node3") == state


def test_nothing_of_ours_is_left_and_nobody_is_locked_out(lab, play, before, names):
    play_ = play("playbooks/reset.yml", "-l", "node3", reset="node3", sure="true")
    assert play_.rc == 0, play_.text
    new = files(lab, "node3") - before["node3"]
    new = {path for path in new - packaged(lab, "node3", new) if not STAYS.fullmatch(path)}
    assert new == set()
    assert before["node3"] - files(lab, "node3") <= {"/var/lib/dbus/machine-id"}
    assert "trainyard" not in lab.exec(
        "node3", "sh", "-c", "getent passwd; getent group; cat /etc/hosts; nft list tables"
    )
    assert lab.exec("node3", "systemctl", "list-units", "--all", "--no-legend", "trainyard*").strip() == ""
    assert lab.exec("node3", "systemctl", "is-system-running").strip() == "running"
    assert lab.exec("node3", "getent", "hosts", "node3")  # or sudo complains
    assert lab.exec("node3", "cat", "/etc/hosts") == names["node3"] == INSTALLERS
    again = play("playbooks/reset.yml", "-l", "node3")
    assert again.rc == 0 and again.changed == {"node3": 0}
    assert "nothing of Trainyard's is there" in again.words


def test_the_others_go_on_and_forget_it(lab, play, two):
    site = play("site.yml", inventory=two)
    assert site.rc == 0, site.text
    # It is no member any more.
    assert lab.exec("node2", "sh", "-c", "systemctl is-enabled etcd || true").strip() == "disabled"
    for host in ("node1", "node2"):
        said = lab.exec(
            host,
            "sh",
            "-c",
            "cat /etc/hosts /etc/ssh/ssh_known_hosts /var/lib/trainyard/.ssh/*; nft list ruleset",
        )
        assert "node3" not in said and lab.host("node3").address not in said
    assert "active" not in lab.exec("node2", "sh", "-c", "systemctl is-active trainyard-etcd || true").split()
    again = play("site.yml", inventory=two)
    assert again.rc == 0 and set(again.changed.values()) == {0}, again.text
    run = play("train.yml", inventory=two, run="second", **SMALL)
    assert run.rc == 0, run.text


def test_it_becomes_a_member_again(lab, play):
    alone = play("site.yml", "-l", "node3")
    assert alone.rc == 0, alone.text
    site = play("site.yml")
    assert site.rc == 0, site.text
    run = play("train.yml", run="third", **SMALL)
    assert run.rc == 0, run.text
    again = play("site.yml")
    assert again.rc == 0 and set(again.changed.values()) == {0}, again.text


def test_runs_stay_where_that_is_asked_for(lab, play):
    reset = play("playbooks/reset.yml", "-l", "node2", reset="node2", sure="true", keep_runs="true")
    assert reset.rc == 0, reset.text
    kept = lab.exec(
        "node2", "sh", "-c", "ls /var/lib/trainyard /etc/trainyard; stat -c %U /var/lib/trainyard/runs/third"
    )
    assert kept.split() == ["/etc/trainyard:", "runs", "/var/lib/trainyard:", "runs", "trainyard"]
    again = play("playbooks/reset.yml", "-l", "node2", keep_runs="true")
    assert again.rc == 0 and again.changed == {"node2": 0}, again.text
    old = token(lab, "node1")
    site = play("site.yml")
    assert site.rc == 0, site.text
    (new,) = {token(lab, host) for host in HOSTS}  # it has lost its part of the memory: all begin anew
    assert new != old
    run = play("train.yml", run="third", resume="true", steps=5)
    assert run.rc == 0, run.text


# A run's host has its record there.
RECORD = """
import base64, json, sys, urllib.request as u
message = {name: base64.b64encode(word.encode()).decode() for name, word in json.loads(sys.argv[2]).items()}
u.urlopen(u.Request(f"http://{sys.argv[1]}:2389/v3/kv/{sys.argv[3]}", json.dumps(message).encode()))
"""
DAMAGE = """
systemctl stop trainyard-etcd
dd if=/dev/urandom of="$(ls /var/lib/trainyard-etcd/*/member/snap/db)" bs=4096 count=8 conv=notrunc status=none
systemctl start trainyard-etcd
"""


def test_a_member_whose_data_is_damaged_is_told_of_beside_a_run_and_comes_back_after_it(lab, play):
    old, address = token(lab, "node1"), lab.host("node1").address
    lab.exec("node3", "sh", "-ec", DAMAGE)
    key = "/trainyard/busy.20261126T200000000000/hosts/0"
    lab.exec("node1", "python3", "-c", RECORD, address, json.dumps({"key": key, "value": "{}"}), "put")
    busy = play("site.yml")
    assert busy.rc == 0 and set(busy.changed.values()) == {0}, busy.text
    assert "WARNING: etcd, the memory by which runs go on, is not well on node3" in busy.words
    assert "site.yml again once no run is active" in busy.words and token(lab, "node2") == old
    lab.exec("node1", "python3", "-c", RECORD, address, json.dumps({"key": key}), "deleterange")
    alone = play("site.yml", "-l", "node3")
    assert alone.rc == 0 and "WARNING: etcd" in alone.words and token(lab, "node2") == old, alone.text
    site = play("site.yml")
    assert site.rc == 0, site.text
    (new,) = {token(lab, host) for host in HOSTS}
    assert new != old
    again = play("site.yml")
    assert again.rc == 0 and set(again.changed.values()) == {0}, again.text


def test_a_whole_cluster_goes_but_for_addresses_without_which_a_host_would_not_answer(lab, play, names):
    address = lab.host("node2").address
    lab.exec("node2", "sed", "-i", f"s/{address}/192.0.2.7/", KEPT)
    reset = play("playbooks/reset.yml", reset="node1,node2,node3", sure="true")
    assert reset.rc == 0, reset.text
    stays = "node2: /etc/netplan/90-trainyard.yaml stays. The change was undone; the host answers at"
    assert f"{stays} {address} as before." in reset.words and "node1: /etc" not in reset.words, reset.text
    lab.exec("node2", "sed", "-i", f"s/192.0.2.7/{address}/", KEPT)
    other = play("playbooks/reset.yml", "-l", "node2", reset="node2", sure="true")
    assert other.rc == 0 and " stays. " not in other.words, other.text
    again = play("playbooks/reset.yml")
    assert again.rc == 0 and again.changed == dict.fromkeys(HOSTS, 0)
    assert not any(
        "trainyard" in path for host in HOSTS for path in files(lab, host) if path.startswith("/etc/")
    )
    # The lab's hosts were called otherwise before; without a line for its new name sudo would complain.
    loopback = "127.0.0.1\tlocalhost\n"
    for host in ("node1", "node2"):
        names[host] = names[host].replace(loopback, f"{loopback}127.0.1.1 {host}\n")
    assert {host: lab.exec(host, "cat", "/etc/hosts") for host in HOSTS} == names
