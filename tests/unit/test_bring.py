"""Files on their way from host to host: hosts are directories of this machine, and ssh is a script that stays here."""

import errno
import getpass
import hashlib
import multiprocessing
import os
import subprocess
import threading
import time

import pytest

USER = getpass.getuser()


@pytest.fixture
def host(load_module, tmp_path, monkeypatch):
    """`host(name)`: the state directory of a host; the module's ssh to it ends there."""
    module = load_module("bring_host")
    script = tmp_path / "ssh"
    # From here each host's state directory has another path; on hosts it has one and the same.
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\necho "$1" >> {tmp_path}/logins\nsource=$1\nshift\n'
        f'exec sh -c "$(echo "$*" | sed "s#{tmp_path}/node[0-9]#{tmp_path}/$source#")"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(module, "SSH", module.SSH.replace("ssh", str(script), 1))

    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    make.module = module
    return make


def entry(path, data):
    return {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


DATA = os.urandom(300_000)
MORE = b"a second file"
FILES = [entry("data/0a/text.jsonl", DATA), entry("models/0b/tiny/config.json", MORE)]


def state(path):
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in path.rglob("*")
        if one.is_file() and "incoming" not in one.parts
    }


def test_what_is_whole_gets_its_place_and_what_is_damaged_goes(host):
    module, node = host.module, host("node1")
    assert module.begin(FILES, str(node), USER) == {FILES[0]["path"]: 0, FILES[1]["path"]: 0}
    (node / "incoming" / FILES[0]["path"]).write_bytes(DATA)
    (node / "incoming" / FILES[1]["path"]).write_bytes(b"a second fil!")
    with pytest.raises(module.Failure, match=r"models/0b/tiny/config\.json: found a SHA-256 of .*; expected"):
        module.settle(FILES, str(node), os.getgid())
    assert state(node) == {FILES[0]["path"]: DATA}
    assert module.begin(FILES, str(node), USER) == {FILES[1]["path"]: 0}
    (node / "incoming" / FILES[1]["path"]).write_bytes(MORE)
    assert module.settle(FILES, str(node), os.getgid())
    assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    assert (node / FILES[1]["path"]).stat().st_mode & 0o777 == 0o640
    assert module.begin(FILES, str(node), USER) == {}
    assert not module.settle(FILES, str(node), os.getgid())
    # What is there is laid out for the next host.
    assert (node / "incoming" / FILES[0]["path"]).read_bytes() == DATA


def test_what_has_come_before_stays_and_a_file_that_is_too_long_begins_anew(host):
    module, node = host.module, host("node1")
    module.begin(FILES, str(node), USER)
    (node / "incoming" / FILES[0]["path"]).write_bytes(DATA[:1000])
    (node / "incoming" / FILES[1]["path"]).write_bytes(MORE * 2)
    assert module.begin(FILES, str(node), USER) == {FILES[0]["path"]: 1000, FILES[1]["path"]: 0}


def test_a_link_in_the_users_directory_leads_root_nowhere(host, tmp_path):
    module, node = host.module, host("node1")
    (tmp_path / "secret").write_bytes(DATA)
    module.begin(FILES, str(node), USER)
    place = node / "incoming" / FILES[0]["path"]
    place.unlink()
    place.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        module.settle(FILES, str(node), os.getgid())
    with pytest.raises(OSError):
        module.begin(FILES, str(node), USER)
    assert (tmp_path / "secret").read_bytes() == DATA


def test_a_file_is_fetched_while_it_grows(host):
    """node2 fetches from node1, into which somebody writes; node3 from node2. Each logs in once."""
    module, node1, node2, node3 = host.module, host("node1"), host("node2"), host("node3")
    for node in (node1, node2, node3):
        module.begin(FILES, str(node), USER)

    def grow():
        for begin in range(0, len(DATA), 100_000):
            time.sleep(0.5)
            with (node1 / "incoming" / FILES[0]["path"]).open("ab") as file:
                file.write(DATA[begin : begin + 100_000])
        (node1 / "incoming" / FILES[1]["path"]).write_bytes(MORE)

    writer = threading.Thread(target=grow)
    second = threading.Thread(target=module.pull, args=(FILES, str(node2), USER, "node1", 20))
    writer.start()
    second.start()
    module.pull(FILES, str(node3), USER, "node2", 20)
    writer.join()
    second.join()
    for node in (node2, node3):
        assert module.settle(FILES, str(node), os.getgid())
        assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    assert sorted((node1.parent / "logins").read_text().split()) == ["node1", "node2"]


def test_what_came_before_is_not_sent_again(host):
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    (node1 / "incoming" / FILES[0]["path"]).write_bytes(b"?" * 100_000 + DATA[100_000:])
    (node1 / "incoming" / FILES[1]["path"]).write_bytes(MORE)
    (node2 / "incoming" / FILES[0]["path"]).write_bytes(DATA[:100_000])
    module.pull(FILES, str(node2), USER, "node1", 20)
    assert module.settle(FILES, str(node2), os.getgid())


def test_a_connection_that_breaks_is_made_anew(host):
    """The source's sender is killed when half of the file has come."""
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    source, target = node1 / "incoming" / FILES[0]["path"], node2 / "incoming" / FILES[0]["path"]
    source.write_bytes(DATA[:150_000])
    puller = threading.Thread(target=module.pull, args=(FILES, str(node2), USER, "node1", 20))
    puller.start()
    while target.stat().st_size < 150_000:
        time.sleep(0.05)
    assert subprocess.run(["pkill", "-f", f"{node1}/incoming$"], check=False).returncode == 0
    source.write_bytes(DATA)
    (node1 / "incoming" / FILES[1]["path"]).write_bytes(MORE)
    puller.join()
    assert module.settle(FILES, str(node2), os.getgid())
    assert (node1.parent / "logins").read_text().split() == ["node1", "node1"]


def test_nothing_is_left_on_the_source_when_the_module_is_killed(host):
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    puller = multiprocessing.get_context("fork").Process(
        target=module.pull, args=(FILES, str(node2), USER, "node1", 60)
    )
    puller.start()
    sender = ["pgrep", "-f", f"{node1}/incoming$"]
    wait_for(lambda: subprocess.run(sender, capture_output=True, check=False).returncode == 0)
    puller.kill()
    wait_for(lambda: subprocess.run(sender, capture_output=True, check=False).returncode == 1)


def wait_for(happens, seconds=20):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_full_disk_is_told_as_one(host, monkeypatch):
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    (node1 / "incoming" / FILES[0]["path"]).write_bytes(DATA)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        module.pull(FILES, str(node2), USER, "node1", 20)


def test_a_host_before_that_says_nothing_is_named(host):
    module, node = host.module, host("node2")
    module.begin(FILES, str(node), USER)
    with pytest.raises(
        module.Failure, match=r"nothing has come from node1 for 1 s, and 2 files are not whole: data"
    ):
        module.pull(FILES, str(node), USER, "node1", 1)


def test_what_ssh_says_is_told(host, tmp_path, monkeypatch):
    module, node = host.module, host("node2")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho node1: Permission denied >&2\nexit 255\n")
    module.begin(FILES, str(node), USER)
    with pytest.raises(module.Failure, match=r"are not whole: node1: Permission denied\. See"):
        module.pull(FILES, str(node), USER, "node1", 1)


def test_all_steps_run_as_a_module(run_module, tmp_path):
    place = {"state_dir": str(tmp_path), "user": USER}
    assert run_module("bring_host", step="begin", files=FILES, **place)["missing"] == {
        one["path"]: 0 for one in FILES
    }
    for one, data in zip(FILES, (DATA, MORE), strict=True):
        (tmp_path / "incoming" / one["path"]).write_bytes(data)
    assert run_module("bring_host", step="settle", files=FILES, **place)["changed"]
    assert not run_module("bring_host", step="settle", files=FILES, **place)["changed"]
    assert not run_module("bring_host", step="begin", check=True, files=FILES, **place)["changed"]
    run_module("bring_host", step="tidy", files=[], **place)
    assert not (tmp_path / "incoming").exists()
    assert state(tmp_path) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
