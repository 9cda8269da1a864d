"""Data and models on their way to many hosts over slow links: the time of one host is nearly that of eight."""

import hashlib
import json
import os
import subprocess

import pytest
from plays import Plays

pytestmark = pytest.mark.full
HOSTS = [f"node{number}" for number in range(1, 9)]
BYTES = 200_000_000


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    lab = make_lab("bring", hosts=len(HOSTS), rate=dict.fromkeys(HOSTS, "100mbit"))
    # The controller's own wire: what leaves it does so by the switch's own device.
    shaping = "tc qdisc replace dev br0 root tbf rate 100mbit burst 128kb limit 512kb"
    subprocess.run(lab.network.enter(*shaping.split()), check=True)
    plays = Plays(lab, tmp_path_factory.mktemp("plays"))
    play = plays.run("identity,ssh_mesh", "cluster")
    assert play.rc == 0, play.text
    yield plays
    lab.down()


def bringing(source, name, hosts):
    """(the tasks that have the file below data/NAME on the hosts, its path there, its digest)."""
    digest = hashlib.file_digest(source.open("rb"), "sha256").hexdigest()
    path = f"data/{name}/model.safetensors"
    files = [{"source": str(source), "path": path, "bytes": source.stat().st_size, "sha256": digest}]
    place = {"state_dir": "/var/lib/trainyard", "user": "trainyard"}
    tasks = [
        {"bring": {"files": files, "hosts": hosts, **place}, "become": True},
        {
            "bring_host": {"step": "tidy", "files": "{{ files | bring_files }}", **place},
            "become": True,
            "vars": {"files": files},
        },
    ]
    return tasks, path, digest


def bring(plays, source, name, hosts):
    """Have the file below data/NAME on the hosts; the play's seconds."""
    tasks, path, digest = bringing(source, name, hosts)
    play = plays.run(tasks, ",".join(hosts))
    assert play.rc == 0, play.text
    assert play.changed == dict.fromkeys(hosts, 1)
    for host in hosts:
        there = f"/var/lib/trainyard/{path}"
        assert plays.sh(host, f"sha256sum {there}").split()[0] == digest
        assert plays.sh(host, f"stat -c %U:%G:%a {there}").strip() == "root:trainyard:640"
        assert plays.sh(host, "ls /var/lib/trainyard").split() == ["data"]
    return play.seconds


def test_whoever_has_the_content_passes_it_on(plays, tmp_path):
    """node3 alone has it, under another name; the controller has lost it."""
    source = tmp_path / "model.safetensors"
    source.write_bytes(os.urandom(1_000_000))
    bring(plays, source, "old", ["node3"])
    digest, state_dir = hashlib.sha256(source.read_bytes()).hexdigest(), "/var/lib/trainyard"
    source.unlink()
    files = [{"source": str(source), "path": "data/new/renamed", "bytes": 1_000_000, "sha256": digest}]
    members, place = HOSTS[:4], {"state_dir": state_dir, "user": "trainyard"}
    chain = "{{ members | bring_order(files, hostvars) }}"
    tasks = [
        {
            "bring_host": {"step": "have", "files": "{{ files | bring_files }}", **place},
            "register": "__trainer_here",
        },
        {"bring": {"files": "{{ files }}", "hosts": chain, **place}},
        {"bring_host": {"step": "tidy", "files": "{{ files | bring_files }}", **place}},
    ]
    tasks = [{**task, "become": True, "vars": {"files": files, "members": members}} for task in tasks]
    play = plays.run(tasks, ",".join(members))
    assert play.rc == 0, play.text
    for host in members:
        assert plays.sh(host, f"sha256sum {state_dir}/data/new/renamed").split()[0] == digest
    again = plays.run(tasks, ",".join(members))
    assert again.rc == 0 and set(again.changed.values()) == {0}, again.text


def test_eight_hosts_take_little_longer_than_one(plays, tmp_path):
    source = tmp_path / "model.safetensors"
    source.write_bytes(os.urandom(BYTES))
    alone = bring(plays, source, "alone", HOSTS[:1])
    before = sent_by_the_controller(plays.lab)
    together = bring(plays, source, "together", HOSTS)
    sent = sent_by_the_controller(plays.lab) - before
    print(
        f"200 MB over 100 Mbit/s: one host {alone:.0f} s, eight {together:.0f} s, {together / alone:.2f} of it; "
        f"{sent / 1e6:.0f} MB left the controller"
    )
    assert together < 1.5 * alone
    assert BYTES < sent < 1.3 * BYTES, "each host has it from the one before"


def test_what_has_come_before_the_controller_was_killed_is_not_sent_again(plays, tmp_path):
    """Nor by the first host to the second."""
    source = tmp_path / "model.safetensors"
    source.write_bytes(os.urandom(BYTES // 2))
    hosts = HOSTS[:2]
    tasks, path, digest = bringing(source, "killed", hosts)

    def come(host):
        """Bytes that a host has of it."""
        return int(
            plays.sh(host, "du -sbc /var/lib/trainyard/incoming 2>/dev/null | tail -1 || true").split()[0]
        )

    plays.kill_when(lambda: min(map(come, hosts)) > BYTES // 8, tasks, ",".join(hosts))
    there, before = min(map(come, hosts)), sent_by_the_controller(plays.lab)
    assert BYTES // 8 < there < BYTES // 2
    play = plays.run(tasks, ",".join(hosts))
    assert play.rc == 0, play.text
    # What was at work on the second goes on by itself, and may have all before it is asked again.
    for host in hosts:
        assert plays.sh(host, f"sha256sum /var/lib/trainyard/{path}").split()[0] == digest
    sent = sent_by_the_controller(plays.lab) - before
    print(
        f"of {BYTES // 2 / 1e6:.0f} MB {there / 1e6:.0f} had come; {sent / 1e6:.0f} MB left the controller then"
    )
    assert sent < 1.3 * (BYTES // 2 - there) + 2e6


def sent_by_the_controller(lab):
    """Bytes so far."""
    (link,) = json.loads(lab.network.ip("-statistics", "-json", "link", "show", "dev", "br0"))
    return link["stats64"]["tx"]["bytes"]
