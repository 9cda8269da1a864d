"""What a host says of itself before a run: the module run_host, on directories of the test's own."""

import getpass
import hashlib
import json
import shutil
import time

import pytest
import yaml

from plugins.module_utils import same_files


@pytest.fixture
def arguments(tmp_path):
    return {
        "run": "first",
        "keeper": "process",
        "opt_dir": str(tmp_path / "opt"),
        "etc_dir": str(tmp_path / "etc"),
        "state_dir": str(tmp_path / "var"),
        "address": "127.0.0.1",
        "port": 29500,
    }


def test_the_environment_is_the_releases_own(load_module, tmp_path):
    environment = load_module("run_host").environment
    release, built = tmp_path / "releases/one", tmp_path / "env/KEY"
    release.mkdir(parents=True)
    packages = built / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/one")
    assert environment(str(tmp_path)) is None
    (release / "environment").write_text(f"{built}\n")
    assert environment(str(tmp_path)) is None
    (packages / "torch-2.9.9+cpu.dist-info").mkdir()
    first = environment(str(tmp_path))
    assert first == {"torch": "2.9.9+cpu", "digest": hashlib.sha256(b"torch==2.9.9+cpu").hexdigest()}


def test_what_somebody_installed_by_hand_is_told_whatever_the_record_says(load_module, tmp_path):
    environment = load_module("run_host").environment
    packages = tmp_path / "env/lib/python3.12/site-packages"
    (tmp_path / "current").mkdir()
    (tmp_path / "current/environment").write_text(f"{tmp_path}/env\n")
    (packages / "torch-2.9.9+cpu.dist-info").mkdir(parents=True)
    before = environment(str(tmp_path))
    (tmp_path / "env/.complete").write_text(json.dumps({**before, "versions": {"torch": "2.9.9+cpu"}}))
    (packages / "torch-2.9.9+cpu.dist-info").rename(packages / "torch-2.8.0.dist-info")
    after = environment(str(tmp_path))
    assert after["torch"] == "2.8.0" and after["digest"] != before["digest"]


def test_a_relative_path_has_free_space_too(load_module):
    assert load_module("run_host").free_bytes("no/such/directory") > 0


def test_what_was_brought_is_counted_once_and_as_far_as_it_came(load_module, tmp_path):
    count = load_module("run_host").brought_bytes
    model, coming = tmp_path / "models/0a/big", tmp_path / "incoming/models/0a/big"
    (model / "more").mkdir(parents=True)
    coming.mkdir(parents=True)
    (model / "config.json").write_bytes(b"x" * 10)
    (model / "more/one.bin").write_bytes(b"x" * 100)
    (coming / "config.json").hardlink_to(model / "config.json")
    (coming / "two.bin").write_bytes(b"x" * 7)
    (coming / "link").symlink_to("/etc/passwd")
    (tmp_path / "data/1b").mkdir(parents=True)
    (tmp_path / "data/1b/text.txt").write_bytes(b"x" * 1000)
    assert count(str(tmp_path), ["models/0a/big"]) == 117
    assert count(str(tmp_path), ["models/0a/big", "data/1b/text.txt", "data/none"]) == 1117


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_is_none_is_refused(run_module, arguments, port):
    result = run_module("run_host", **{**arguments, "port": port})
    assert f"trainer_port: found {port}" in result["msg"]
    assert "Traceback" not in result["output"]


# ---- files that all hosts share ----

TABLE = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:50 / /mnt/my\\040disk rw shared:1 - nfs4 server:/export rw
3 1 0:51 / /mnt/my\\040disk/local rw - ext4 /dev/sdb1 rw
4 1 0:52 / /net rw - autofs /etc/auto.net rw
5 4 0:53 /part /net rw - nfs server:/net rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/mnt/my disk/set/a.jsonl", "nfs4", "server:/export/set/a.jsonl"),
        ("/mnt/my disk", "nfs4", "server:/export/"),
        ("/mnt/my disk/local/a", "ext4", ""),
        ("/mnt/my diskette", "ext4", ""),
        ("/net/a", "nfs", "server:/net/part/a"),
        ("/srv", "ext4", ""),
    ],
)
def test_of_what_kind_a_disk_is(tmp_path, path, kind, shared):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert same_files.filesystem(path, str(table))[0] == kind
    assert same_files.on_network(path, str(table)) == shared


@pytest.fixture
def network(load_module, monkeypatch):
    """Every disk is one of the network, and units see the test's directory."""
    load_module("run_host")  # its helpers, where a host has them
    monkeypatch.setattr(same_files, "filesystem", lambda path: ("nfs4", ""))
    monkeypatch.setattr(same_files, "UNSEEN", ())


def test_the_same_file_has_one_mark_and_a_copy_another(tmp_path, network):
    for folder in ("a", "b"):
        (tmp_path / folder / "sub").mkdir(parents=True)
    (tmp_path / "a/sub/x").write_text("x")
    shutil.copy2(tmp_path / "a/sub/x", tmp_path / "b/sub/x")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    found = same_files.shared_marks([a, b, str(tmp_path / "none")], getpass.getuser())
    assert list(found) == [a, b] and found[a] == same_files.mark(a) != found[b]
    (tmp_path / "a/sub/x").write_text("y")
    assert same_files.mark(a) != found[a]
    (tmp_path / "link").symlink_to("a")
    assert same_files.mark(str(tmp_path / "link")) == same_files.mark(a)


def test_what_lies_on_a_hosts_own_disk_or_where_no_unit_reads_has_none(tmp_path, network, monkeypatch):
    file = tmp_path / "x"
    file.write_text("x")
    assert same_files.shared_mark(str(file))
    monkeypatch.setattr(same_files, "UNSEEN", (str(tmp_path),))
    assert same_files.shared_mark(str(file)) == ""
    monkeypatch.undo()
    monkeypatch.setattr(same_files, "UNSEEN", ())
    assert same_files.filesystem(str(tmp_path))[0] not in same_files.NETWORK
    assert same_files.shared_mark(str(file)) == ""


def test_what_the_service_user_may_not_read_has_none(tmp_path, network, monkeypatch):
    (tmp_path / "x").write_text("x")
    monkeypatch.setattr(same_files.os, "access", lambda path, *_, **__: not path.endswith("/x"))
    assert same_files.shared_mark(str(tmp_path)) == ""


def test_a_server_that_is_dead_is_not_waited_for(tmp_path, network, monkeypatch):
    monkeypatch.setattr(same_files, "shared_mark", lambda path: time.sleep(60))
    begin = time.monotonic()
    assert same_files.shared_marks([str(tmp_path)], getpass.getuser(), seconds=0.2) == {}
    assert time.monotonic() - begin < 30


def test_a_host_tells_of_its_own_disk_nothing(run_module, arguments, tmp_path):
    told = run_module("run_host", **arguments, sources=[str(tmp_path)], user=getpass.getuser())
    assert told["host_facts"]["shared"] == {}


@pytest.mark.parametrize(
    ("asked", "processes"),
    [
        ({}, 0),  # as many as there are GPUs
        ({"__trainer_asked": {"config": {}}}, 0),
        ({"__trainer_asked": {"config": {"strategy": "fsdp"}}}, 0),
        ({"__trainer_asked": {"config": {"strategy": "split"}}}, 1),
        ({"__trainer_asked": {"config": {"strategy": "split"}}, "nproc_per_node": 2}, 2),
    ],
)
def test_a_run_whose_layers_are_split_gets_one_process_for_all_gpus(repository, asked, processes):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    (task,) = yaml.safe_load((repository / "roles/trainer/tasks/ask_hosts.yml").read_text())
    words = trust_as_template(task["run_host"]["processes"])
    assert int(Templar(loader=DataLoader(), variables=asked).template(words)) == processes
