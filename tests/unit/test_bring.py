"""Files on their way from host to host: hosts are directories of this machine, and ssh is a script that stays here."""

import contextlib
import errno
import getpass
import hashlib
import multiprocessing
import os
import pwd
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from plugins.action.bring import writing
from plugins.action.run_config import upload
from plugins.filter.bring import bring_files, bring_order, offered
from plugins.module_utils import as_user

USER = getpass.getuser()
ROOT = Path(__file__).resolve().parents[2]


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


DATA = random.Random(1).randbytes(300_000)  # no run of the tests differs from another
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
        module.settle(FILES, str(node), USER)
    assert state(node) == {FILES[0]["path"]: DATA}
    assert module.begin(FILES, str(node), USER) == {FILES[1]["path"]: 0}
    (node / "incoming" / FILES[1]["path"]).write_bytes(MORE)
    assert module.settle(FILES, str(node), USER)
    assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    assert (node / FILES[1]["path"]).stat().st_mode & 0o777 == 0o640
    assert module.begin(FILES, str(node), USER) == {}
    assert not module.settle(FILES, str(node), USER)
    # What is there is laid out for the next host.
    assert (node / "incoming" / FILES[0]["path"]).read_bytes() == DATA


def placed(node, files, contents):
    """Give files their places, as `settle` does."""
    for one, content in zip(files, contents, strict=True):
        path = node / one["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o640)


def test_of_a_directory_only_what_differs_travels(host):
    """Another version of a directory, with one file changed, one renamed and one as it was."""
    module, node1, node2 = host.module, host("node1"), host("node2")
    old = [entry(f"data/0a/set/{name}", data) for name, data in (("a", DATA), ("b", MORE), ("c", b"third"))]
    placed(node1, old, [DATA, MORE, b"third"])
    new = [
        entry(f"data/1b/set/{name}", data)
        for name, data in (("a", DATA), ("b", b"a second FILE"), ("d", b"third"))
    ]
    assert module.have(new, str(node1), os.getgid())
    assert not module.have(new, str(node1), os.getgid())
    assert module.here(new, str(node1)) == {new[0]["path"]: len(DATA), new[2]["path"]: 5}
    # A link, so that it takes no room, either.
    assert (node1 / new[0]["path"]).stat().st_ino == (node1 / old[0]["path"]).stat().st_ino
    assert module.begin(new, str(node1), USER) == {new[1]["path"]: 0}
    assert not module.have(new, str(node2), os.getgid()) and module.here(new, str(node2)) == {}


def test_only_roots_own_and_unchanged_files_are_taken_over(host, monkeypatch):
    module, node = host.module, host("node1")
    old, new = entry("data/0a/x", DATA), entry("data/1b/x", DATA)
    placed(node, [old], [DATA[:-1] + b"!"])
    assert not module.have([new], str(node), os.getgid())  # of the same size, and not the same
    placed(node, [old], [DATA])
    (node / old["path"]).rename(node / "data/0a/aside")
    (node / old["path"]).symlink_to("aside")
    (node / "data/0a/aside").rename(node / "aside")
    assert not module.have([new], str(node), os.getgid())  # a link, and a file outside
    (node / old["path"]).unlink()
    placed(node, [old], [DATA])
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    assert not module.have([new], str(node), os.getgid())  # somebody's who may change it
    monkeypatch.undo()
    assert module.have([new], str(node), os.getgid())


def test_whoever_has_it_is_the_first_of_the_chain():
    files = [{"path": "a", "bytes": 10, "source": "/a"}, {"path": "b", "bytes": 5, "source": "/b"}]
    nodes = ["n1", "n2", "n3"]

    def order(files=files, **here):
        answers = {node: {"__trainer_here": {"here": here.get(node, {})}} for node in nodes}
        return bring_order(nodes, files, answers)

    assert order() == nodes
    assert order(n2={"a": 10}, n3={"b": 5}) == ["n2", "n1", "n3"]
    assert order(n1={"a": 3}, n3={"a": 10, "b": 5}) == ["n3", "n1", "n2"]
    # What the controller has not must be there, however much else another has.
    fetched = [*files, {"path": "c", "bytes": 1}]
    assert order(fetched, n1={"a": 10, "b": 5}, n3={"c": 1}) == ["n3", "n1", "n2"]
    assert bring_order(nodes, files, {node: {} for node in nodes}) == nodes
    assert bring_files([{**FILES[0], "source": "/secret/place"}]) == [FILES[0]]


def test_what_one_host_has_gets_a_place_that_its_content_names(host, tmp_path):
    """As the controller's would, so that each is known by the other."""
    module, node, source = host.module, host("node1"), tmp_path / "glm"
    for below, data in (("config.json", MORE), ("a/b/x", b"x"), ("a-b/y", b"y"), ("a/z.safetensors", DATA)):
        (source / below).parent.mkdir(parents=True, exist_ok=True)
        (source / below).write_bytes(data)
    found = module.offer(f"{source}/", "models", USER)
    expected = upload("model", str(source), str(source))
    for one in expected["files"]:
        one["here"] = one.pop("source")
    assert found == {key: expected[key] for key in ("path", "directory", "bytes", "files")}
    assert state(node) == {}
    files = found["files"]
    begun = module.begin(files, str(node), USER)
    assert set(begun.values()) == {0}
    (node / "incoming" / found["path"] / "a/z.safetensors").write_bytes(DATA[:100_000])  # has come before
    module.fill(files, str(node), USER)
    assert module.settle(files, str(node), USER)
    assert state(node)[f"{found['path']}/a/z.safetensors"] == DATA and len(state(node)) == 4
    assert module.missing(files, str(node)) == []
    # It is the first of the chain, whoever has more of it by then.
    answer = {"offered": found}
    brought = offered(answer, {"key": "model", "name": f"{source}/"}, "node2")
    assert bring_order(["node1", "node2"], brought["files"], {}) == ["node2", "node1"]
    assert (brought["name"], brought["path"]) == (f"{source}/", found["path"])
    # A host in other hands would have a file of the controller's read, and sent to itself.
    for one in (found, *found["files"]):
        one["source"] = "/root/.ssh/id"
    assert offered(answer, {"key": "model", "name": f"{source}/"}, "node2") == brought


def test_one_file_of_a_host_is_offered_too(host, tmp_path):
    module, source = host.module, tmp_path / "a.jsonl"
    source.write_bytes(DATA)
    found = module.offer(str(source), "data", USER)
    assert found["path"] == f"data/{hashlib.sha256(DATA).hexdigest()}/a.jsonl"
    assert found["files"] == [{**entry(found["path"], DATA), "here": str(source)}]
    with pytest.raises(
        module.Failure, match=r"a\.jsonl: found no config\.json in it; expected a directory of a model"
    ):
        module.offer(str(source), "models", USER)


def test_what_a_host_cannot_offer(host, tmp_path, run_module):
    module, source = host.module, tmp_path / "set"
    source.mkdir()
    with pytest.raises(
        module.Failure, match=r"set: found no file in it; expected a file or directory of a data"
    ):
        module.offer(str(source), "data", USER)
    os.mkfifo(source / "pipe")
    with pytest.raises(module.Failure, match=r"pipe: found no plain file"):
        module.offer(str(source), "data", USER)
    (source / "pipe").unlink()
    (source / "gone").symlink_to(tmp_path / "nothing")
    options = {"step": "offer", "source": str(source), "state_dir": str(tmp_path), "user": USER}
    assert run_module("bring_host", **options)["msg"] == f"{source}/gone: No such file or directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights need root")
def test_of_a_host_only_what_the_service_user_may_read_is_offered(run_module):
    """Somebody who may write there leads root to what is nobody's business but root's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        secret, source = Path(folder, "secret"), Path(folder, "set")
        secret.write_text("of root alone")
        secret.chmod(0o600)
        source.symlink_to(secret)
        options = {"step": "offer", "source": str(source), "state_dir": folder, "user": "nobody"}
        said = run_module("bring_host", **options)["msg"]
        assert said.startswith(
            f"{source}: Permission denied; nobody may not read it: let others do (chmod o+rX"
        )
        secret.chmod(0o644)
        assert run_module("bring_host", **options)["offered"]["bytes"] == 13


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
        module.settle(FILES, str(node), USER)
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
        assert module.settle(FILES, str(node), USER)
        assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    assert sorted((node1.parent / "logins").read_text().split()) == ["node1", "node2"]


def test_what_came_before_is_not_sent_again_and_counts(host, monkeypatch):
    said = []
    monkeypatch.setattr(host.module.Note, "say", lambda note, words: said.append(words))
    monkeypatch.setattr(
        sys.modules[host.module.Counted.__module__], "share", lambda *sizes: "{} of {}".format(*sizes)
    )
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    (node1 / "incoming" / FILES[0]["path"]).write_bytes(b"?" * 250_000 + DATA[250_000:])
    (node1 / "incoming" / FILES[1]["path"]).write_bytes(MORE)
    (node2 / "incoming" / FILES[0]["path"]).write_bytes(DATA[:250_000])
    module.pull(FILES, str(node2), USER, "node1", 20)
    assert module.settle(FILES, str(node2), USER)
    found = re.fullmatch(r"(\d+) of (\d+) have come", said[0])
    assert 250_000 < int(found[1]) <= int(found[2]) == len(DATA) + len(MORE)


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
    assert module.settle(FILES, str(node2), USER)
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


def test_what_has_no_room_is_not_begun(host, monkeypatch):
    module, node = host.module, host("node1")
    wanted = sum(one["bytes"] for one in FILES)
    monkeypatch.setattr(module, "free_bytes", lambda _: module.SPARE + wanted - 1)
    module.check_room(FILES, str(node))
    module.check_room([*FILES, *FILES], str(node))  # a dataset that is the validation's, too
    monkeypatch.setattr(module, "free_bytes", lambda _: 2 * wanted - 1)
    with pytest.raises(module.Failure, match=r"GB are still to come, and there are 0\.0 GB free"):
        module.check_room(FILES, str(node))
    large = [{**FILES[0], "path": "models/1c/large", "bytes": 5 * module.SPARE}]
    for spare, fits in ((module.SPARE - 1, False), (module.SPARE, True)):
        monkeypatch.setattr(module, "free_bytes", lambda _, spare=spare: 5 * module.SPARE + spare)
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(module.Failure, match=r"of which 1\.0 GB stay")
        ):
            module.check_room(large, str(node))
    placed(node, FILES[:1], [DATA])
    module.check_room(FILES, str(node))  # what is here needs none
    monkeypatch.setattr(module, "free_bytes", lambda _: 0)
    placed(node, FILES[1:], [MORE])
    module.check_room(FILES, str(node))


@pytest.mark.parametrize("step", ["have", "begin", "fill", "pull"])
def test_each_step_that_brings_something_asks_for_room(run_module, tmp_path, step):
    huge = {
        "path": "models/0a/big/model.safetensors",
        "bytes": 1 << 60,
        "sha256": "0" * 64,
        "here": "/etc/hostname",
    }
    answer = run_module(
        "bring_host", step=step, files=[huge], source="node0", state_dir=str(tmp_path), user=USER
    )
    assert "remove old runs, data or models there" in answer["msg"]
    assert not (tmp_path / "incoming").exists()


@pytest.mark.parametrize("below", ["data", "models", "incoming"])
def test_a_part_of_the_state_directory_on_another_disk_is_refused_with_the_cure(host, monkeypatch, below):
    """A file cannot be linked from one to the other."""
    module, node = host.module, host("node2")
    module.check_one_disk(FILES, str(node))
    place = node / below
    place.mkdir()
    module.check_one_disk(FILES, str(node))
    monkeypatch.setattr(module, "device", lambda path: path == str(place))
    with pytest.raises(
        module.Failure, match=f"^{place}: found another file system .* Mount the disk at {node} "
    ):
        module.check_one_disk(FILES, str(node))
    # What needs none of it does not mind.
    module.check_one_disk([], str(node))
    if below != "incoming":
        module.check_one_disk([{**FILES[0], "path": "wheels/0a/one.whl"}], str(node))


@pytest.mark.parametrize("step", ["have", "begin", "fill", "pull"])
def test_each_step_that_brings_something_asks_for_one_disk(run_module, tmp_path, step):
    (tmp_path / "data").symlink_to("/proc")
    one = {**FILES[0], "here": "/etc/hostname"}
    answer = run_module(
        "bring_host", step=step, files=[one], source="node0", state_dir=str(tmp_path), user=USER
    )
    assert f"{tmp_path}/data: found another file system there" in answer["msg"]


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
    run_module("bring_host", step="tidy", files=FILES, **place)
    assert not (tmp_path / "incoming").exists()
    assert state(tmp_path) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}


def test_what_another_play_brings_is_left_to_it(host, monkeypatch):
    """Unless it has broken off, long ago."""
    module, node = host.module, host("node1")
    others = [entry("data/1c/other.jsonl", DATA), entry("data/1d/given/up.jsonl", DATA)]
    placed(node, FILES, [DATA, MORE])
    module.begin([*FILES, *others], str(node), USER)
    growing = node / "incoming" / others[0]["path"]
    growing.write_bytes(DATA[:1000])
    old, really = node / "incoming" / others[1]["path"], os.lstat

    def lstat(path, dir_fd=None):
        found = really(path, dir_fd=dir_fd)
        if found.st_ino == old_inode:
            return os.stat_result((*found[:9], found.st_ctime - module.STALE - 60))
        return found

    old_inode = old.stat().st_ino
    monkeypatch.setattr(module.os, "lstat", lstat)
    module.tidy(FILES, str(node))
    monkeypatch.undo()
    assert [path for path in (node / "incoming").rglob("*") if path.is_file()] == [growing]
    assert not old.parent.exists() and not (node / "incoming/models").exists()
    assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    module.tidy(others, str(node))
    assert not (node / "incoming").exists()


@pytest.mark.parametrize("tasks", ["trainer/tasks/upload.yml", "python_env/tasks/bring.yml"])
def test_a_role_tidies_up_what_it_has_brought_and_no_more(tasks):
    given = {}
    for task in yaml.safe_load((ROOT / "roles" / tasks).read_text()):
        for module in {"bring", "bring_host"} & set(task):
            given[task[module].get("step", module)] = task[module]["files"]
    assert given["tidy"] == given["bring"].replace(" }}", " | bring_files }}")


def test_two_plays_may_bring_the_same_files(host):
    """One is done, and has tidied up on all hosts, before the other has fetched anything."""
    module, node1, node2 = host.module, host("node1"), host("node2")
    for node in (node1, node2):
        module.begin(FILES, str(node), USER)
    placed(node1, FILES, [DATA, MORE])
    module.tidy(FILES, str(node1))
    module.pull(FILES, str(node2), USER, "node1", 20)
    (node2 / "incoming" / FILES[0]["path"]).unlink()
    second = threading.Thread(target=module.pull, args=(FILES, str(node2), USER, "node1", 20))
    second.start()
    time.sleep(1)
    placed(node2, FILES, [DATA, MORE])
    second.join(20)
    assert not second.is_alive() and not module.settle(FILES, str(node2), USER)


@pytest.mark.parametrize("second", ["begin", "settle"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_one_play_is_checking_is_left_to_it_by_another(host, monkeypatch, second, damaged):
    """It is root's then, and has no place yet: the other waits, and neither loses it."""
    module, node = host.module, host("node1")
    file = FILES[:1]
    module.begin(file, str(node), USER)
    incoming = node / "incoming" / file[0]["path"]
    incoming.write_bytes(b"?" + DATA[1:] if damaged else DATA)
    monkeypatch.setattr(module.os, "access", lambda *_, **__: False)  # the service user's to root's file
    checking, checked, digests = threading.Event(), threading.Event(), []
    really = module.sha256

    def sha256(file):
        digests.append(really(file))
        checking.set()
        assert checked.wait(20)
        return digests[-1]

    monkeypatch.setattr(module, "sha256", sha256)
    said = {}

    def play(name, step):
        try:
            said[name] = getattr(module, step)(file, str(node), USER)
        except module.Failure as failure:
            said[name] = str(failure)

    one = threading.Thread(target=play, args=("one", "settle"))
    one.start()
    assert checking.wait(20)
    other = threading.Thread(target=play, args=("other", second))
    other.start()
    other.join(0.5)
    assert other.is_alive() and incoming.exists() and len(digests) == 1
    checked.set()
    one.join(20)
    other.join(20)
    if damaged:
        assert "arrived damaged and was removed" in said["one"] and state(node) == {}
        assert said["other"] == {file[0]["path"]: 0} or "arrived damaged and was removed" in said["other"]
    else:
        assert said == {"one": True, "other": {} if second == "begin" else False}
        assert state(node) == {file[0]["path"]: DATA} and incoming.read_bytes() == DATA and len(digests) == 1


def test_what_was_checked_and_got_no_place_comes_anew(host, monkeypatch):
    """The play that checked it was killed; and nobody's other file goes with it."""
    module, node = host.module, host("node1")
    module.begin(FILES, str(node), USER)
    incoming = node / "incoming" / FILES[0]["path"]
    incoming.write_bytes(DATA)
    with incoming.open("rb") as old:
        monkeypatch.setattr(module.os, "access", lambda *_, **__: False)
        assert module.begin(FILES, str(node), USER)[FILES[0]["path"]] == 0
        incoming.write_bytes(DATA[:1000])  # of a third play
        module.remove(str(incoming), old.fileno())
        assert incoming.read_bytes() == DATA[:1000]


def test_another_play_that_has_placed_a_file_and_tidied_up_is_no_failure(host, monkeypatch):
    module, node = host.module, host("node1")
    module.begin(FILES, str(node), USER)
    for one, data in zip(FILES, (DATA, MORE), strict=True):
        (node / "incoming" / one["path"]).write_bytes(data)
    really = module.sha256

    def sha256(file):
        placed(node, FILES[1:], [MORE])
        (node / "incoming" / FILES[1]["path"]).unlink(missing_ok=True)
        return really(file)

    monkeypatch.setattr(module, "sha256", sha256)
    assert module.settle(FILES, str(node), USER)
    assert state(node) == {FILES[0]["path"]: DATA, FILES[1]["path"]: MORE}
    (node / FILES[1]["path"]).unlink()
    with pytest.raises(
        module.Failure, match=r"config\.json: found no file; expected one of 13 bytes\. Another play"
    ):
        module.settle(FILES, str(node), USER)


def test_two_names_that_get_one_place_at_once_are_no_failure(host, monkeypatch):
    module, node = host.module, host("node1")
    for name, data in (("a", DATA), ("b", DATA[:-1])):
        (node / name).write_bytes(data)
    now = lambda *_, **__: (node / "data/0a/x").write_bytes(DATA)  # noqa: E731
    monkeypatch.setattr(module.os, "unlink", now)
    for name, fails in (("a", False), ("b", True)):
        with (node / name).open("rb") as file:
            if fails:
                with pytest.raises(FileExistsError):
                    module.place(file.fileno(), str(node), "data/0a/x", os.getgid())
            else:
                module.place(file.fileno(), str(node), "data/0a/x", os.getgid())
    assert (node / "data/0a/x").read_bytes() == DATA


def test_two_controllers_write_the_same_into_one_file(tmp_path):
    target = tmp_path / "a file"
    target.touch()
    for at in (0, 0, 100_000, 50_000):
        piece = DATA[at : at + 100_000]
        subprocess.run(["sh", "-c", writing(str(target), at)], input=piece, check=True)
    assert target.read_bytes() == DATA[:200_000]
    target.unlink()  # the other one has given it its place
    assert subprocess.run(["sh", "-c", writing(str(target), 0)], input=b"x", check=False).returncode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another group")
def test_the_service_user_may_enter_what_is_made_where_somebody_has_removed_it(load_module, tmp_path):
    """`rm -r /var/lib/trainyard/data`, say; site.yml makes it anew, and train.yml comes first."""
    file = tmp_path / "file"
    file.write_text("content")
    with file.open("rb") as content:
        load_module("bring_host").place(content.fileno(), str(tmp_path), "data/0a/model/file", 54321)
    for below in ("data", "data/0a", "data/0a/model"):
        found = (tmp_path / below).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o050) == (0, 54321, 0o050), below
    assert tmp_path.stat().st_gid != 54321


@pytest.fixture
def shared_state():
    """A state directory of the user nobody's, where others may go, and one of root's beside it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        state, roots = Path(folder, "state"), Path(folder, "roots")
        for path in (state, roots):
            path.mkdir()
            path.chmod(0o755)
        os.chown(state, pwd.getpwnam("nobody").pw_uid, -1)
        yield state, roots


def facts_of(path):
    found = path.lstat()
    return (
        found.st_mode,
        found.st_uid,
        found.st_gid,
        found.st_nlink,
        sorted(path.iterdir()) if path.is_dir() else b"",
    )


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights need root")


@AS_ROOT
@pytest.mark.parametrize("link", ["data", "data/0a", "incoming", "incoming/data", "incoming/data/0a"])
def test_no_link_on_the_way_has_root_change_what_lies_elsewhere(load_module, shared_state, link):
    """Who runs as the service user owns the state directory, and may put anything there before root comes."""
    module, (state, roots) = load_module("bring_host"), shared_state
    nobody = pwd.getpwnam("nobody")
    (one, _), name = FILES, "text.jsonl"
    (roots / name).write_bytes(DATA[::-1])
    (roots / "data/0a").mkdir(parents=True)
    (roots / "data/0a" / name).write_bytes(DATA[::-1])
    (roots / "0a").mkdir()
    (roots / "0a" / name).write_bytes(DATA[::-1])
    watched = [roots, *roots.rglob("*")]
    before = [facts_of(path) for path in watched]
    with as_user.acting_as("nobody"):
        (state / link).parent.mkdir(parents=True, exist_ok=True)
        (state / link).symlink_to(roots)
        if not link.startswith("incoming"):
            place = state / "incoming" / one["path"]
            place.parent.mkdir(parents=True)
            place.write_bytes(DATA)
    if link == "data/0a":  # the uppermost is root's by now, and what is in it was there before
        os.chown(state / "data", 0, nobody.pw_gid)
    for step in (
        lambda: module.begin([one], str(state), "nobody"),
        lambda: module.settle([one], str(state), "nobody"),
        lambda: module.tidy([one], str(state)),
    ):
        with contextlib.suppress(module.Failure, OSError):
            step()
    assert [facts_of(path) for path in watched] == before
    assert [path.read_bytes() for path in watched if path.is_file()] == [DATA[::-1]] * 3


@AS_ROOT
def test_what_the_service_user_owned_before_is_roots(load_module, shared_state):
    module, (state, roots) = load_module("bring_host"), shared_state
    nobody = pwd.getpwnam("nobody")
    (state / "data").mkdir()  # as an earlier release made it
    os.chown(state / "data", nobody.pw_uid, nobody.pw_gid)
    assert module.begin(FILES, str(state), "nobody") == {one["path"]: 0 for one in FILES}
    for one, data in zip(FILES, (DATA, MORE), strict=True):
        (state / "incoming" / one["path"]).write_bytes(data)
    assert module.settle(FILES, str(state), "nobody")
    assert (state / FILES[0]["path"]).read_bytes() == DATA
    assert (state / FILES[1]["path"]).read_bytes() == MORE and not list(roots.iterdir())
    assert (state / "data").stat().st_uid == 0


@pytest.mark.parametrize(
    "path",
    ["../x/y", "data/../../x", "/etc/passwd", "data", "runs/a/model", ".ssh/authorized_keys", "data//x"],
)
def test_what_another_host_names_as_a_place_is_one(run_module, tmp_path, path):
    files = [{"path": path, "bytes": 1, "sha256": "0" * 64}]
    told = run_module("bring_host", step="begin", files=files, state_dir=str(tmp_path), user=USER)
    assert told["failed"] and "found no place for what is brought" in told["msg"]
    assert not list(tmp_path.iterdir())


def test_hidden_files_are_neither_brought_nor_counted(tmp_path):
    """A clone's .git has the model once more."""
    for name in ("model/config.json", "model/.git/lfs/weights", "model/.gitattributes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10)
    made = upload("model", "model", str(tmp_path / "model"))
    assert [one["path"].rpartition("/")[2] for one in made["files"]] == ["config.json"] and made[
        "bytes"
    ] == 10
    (tmp_path / "model/.git/more").write_bytes(b"y")
    assert upload("model", "model", str(tmp_path / "model")) == made
