"""Files on their way from host to host: hosts are directories of this machine, and ssh is a script that stays here."""

import getpass
import hashlib
import os
import re
import threading
import time

import installed
import pytest

USER = getpass.getuser()


@pytest.fixture(autouse=True)
def rsync():
    installed.have("rsync", "rsync")


@pytest.fixture
def host(load_module, tmp_path, monkeypatch):
    """`host(name)`: the state directory of a host; the module's ssh to it ends there."""
    module = load_module("bring_host")
    script = tmp_path / "ssh"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/logins\nwhile [ "$1" = -o ]; do shift 2; done\n'
        '[ "$1" != -O ] || exit 0\nshift; exec "$@"\n'
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


def other_places(module, monkeypatch, mine, other):
    """rsync is told that the state directory there is `other`, since it differs here from the one that is `mine`."""
    real, calls = module.subprocess.run, []

    def run(command, **how):
        if "rsync" not in command:
            return real(command, **how)
        calls.append(command)
        command = command[command.index("rsync") :]
        return real([*command[:-2], command[-2].replace(str(mine), str(other)), command[-1]], **how)

    monkeypatch.setattr(module.subprocess, "run", run)
    return calls


def test_a_file_is_fetched_while_it_grows(host, monkeypatch):
    """node2 fetches from node1, into which somebody writes."""
    module, node1, node2 = host.module, host("node1"), host("node2")
    module.begin(FILES, str(node1), USER)
    module.begin(FILES, str(node2), USER)
    calls = other_places(module, monkeypatch, node2, node1)

    def grow():
        for begin in range(0, len(DATA), 100_000):
            time.sleep(0.5)
            with (node1 / "incoming" / FILES[0]["path"]).open("ab") as file:
                file.write(DATA[begin : begin + 100_000])
        (node1 / "incoming" / FILES[1]["path"]).write_bytes(MORE)

    writer = threading.Thread(target=grow)
    writer.start()
    module.pull(FILES, str(node2), USER, "node1", 20)
    writer.join()
    assert module.settle(FILES, str(node2), os.getgid())
    assert state(node2) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    assert len(calls) > 2

    # All over one connection, of which nothing is left.
    logins = (node1.parent / "logins").read_text().splitlines()
    (path,) = {re.search(r"ControlPath=(\S+)", login)[1] for login in logins}
    assert ["ControlMaster=yes node1 cat" in login for login in logins].count(True) == 1
    assert logins[-1].endswith("-O exit node1") and not os.path.exists(os.path.dirname(path))


def test_a_host_before_that_says_nothing_is_named(host, monkeypatch):
    module, node = host.module, host("node2")
    module.begin(FILES, str(node), USER)
    other_places(module, monkeypatch, node, node.with_name("node1"))
    with pytest.raises(
        module.Failure, match=r"nothing has come from node1 for 1 s, and 2 files are not whole: rsync"
    ):
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
