"""A Python for hosts whose own is too old, as the controller fetches it."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import plugins.action.python_env  # which puts module_utils on the path
from plugins.filter.python_env import python_env_brought

ROOT = Path(__file__).resolve().parents[2]
brought_python = sys.modules[plugins.action.python_env.archive.__module__]
sha256 = brought_python.sha256


@pytest.fixture
def wanted(tmp_path):
    """The archive, in a folder that stands for where they are published."""
    file = tmp_path / "published" / "cpython+1.tar.gz"
    file.parent.mkdir()
    file.write_bytes(b"a Python" * 1000)
    url = f"file://{file.parent}/cpython%2B1.tar.gz"
    return {"name": file.name, "url": url, "sha256": sha256(file)}


def test_it_is_fetched_once_by_whoever_comes_first(wanted, tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(brought_python.archive(wanted, tmp_path / "kept")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "kept" / wanted["name"]] * 4
    assert found[0].read_bytes() == b"a Python" * 1000
    (tmp_path / "published" / wanted["name"]).unlink()
    assert (
        brought_python.archive(wanted, tmp_path / "kept") == found[0]
    )  # it is there, whatever becomes of its source


def test_what_is_kept_but_damaged_is_fetched_anew(wanted, tmp_path):
    file = brought_python.archive(wanted, tmp_path)
    file.write_bytes(b"half of it")
    assert brought_python.archive(wanted, tmp_path).read_bytes() == b"a Python" * 1000


def test_another_content_is_refused(wanted, tmp_path):
    with pytest.raises(brought_python.Failure, match="expected 0123"):
        brought_python.archive({**wanted, "sha256": "0123"}, tmp_path / "kept")
    assert not (tmp_path / "kept" / wanted["name"]).exists()


@pytest.mark.parametrize("url", ["file:///no/such/file", "http://127.0.0.1:9/file", "no url"])
def test_one_that_cannot_be_had_is_named_with_both_cures(wanted, tmp_path, url):
    with pytest.raises(brought_python.Failure, match=r"python_env_python_url.*python_env_python\."):
        brought_python.archive({**wanted, "url": url}, tmp_path)


def test_those_that_waited_for_one_that_failed_do_not_try_again(wanted, tmp_path, monkeypatch):
    """Sixteen hosts' workers would else give up one minute after another."""
    tried, refused = [], []

    def download(url, file):
        tried.append(url)
        time.sleep(0.5)
        raise brought_python.Failure("no way there")

    def ask():
        with pytest.raises(brought_python.Failure, match="no way there"):
            brought_python.archive(wanted, tmp_path)
        refused.append(True)

    monkeypatch.setattr(brought_python, "_download", download)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(tried), len(refused)) == (1, 4)
    ask()
    assert len(tried) == 2  # a later run does


@pytest.fixture
def action(wanted, tmp_path, monkeypatch):
    """The action on the controller, without a host."""
    monkeypatch.setattr(plugins.action.python_env, "ROOT", tmp_path)
    task = SimpleNamespace(args={"brought": {"x86_64": wanted}}, check_mode=False)
    module = object.__new__(plugins.action.python_env.ActionModule)
    module._task = task
    return module


def test_the_action_has_it_brought_under_its_hash_and_in_check_mode_only_fetched(action, wanted, tmp_path):
    said = []
    action._task.check_mode = True
    answer = {"bring_python": "x86_64", "changed": True}
    assert action._with_python(answer, said.append) == answer
    assert (tmp_path / ".trainyard/pythons" / wanted["name"]).exists() and len(said) == 1
    action._task.check_mode = False
    result, key = action._with_python(answer, said.append), wanted["sha256"][:16]
    assert result["archive"] == f"{key}/{wanted['name']}"
    (file,) = result["files"]
    assert (file["path"], file["sha256"]) == (f"wheels/{result['archive']}", wanted["sha256"])


def test_what_is_fetched_says_the_role_and_not_the_host(action):
    for told in ("riscv64", {"name": "/etc/passwd", "url": "file:///x", "sha256": "0"}):
        with pytest.raises(brought_python.Failure, match="no Python to bring"):
            action._with_python({"bring_python": told}, print)
    for key in ("../..", "/etc", ""):
        with pytest.raises(brought_python.Failure, match="16 hexadecimal digits"):
            action._with_wheels({"key": key, "target": {}}, "node1", print)


def test_no_file_that_a_host_names_is_brought(action, monkeypatch):
    """One in other hands would have it read here, and sent to itself."""
    said = {"changed": False, "archive": "a/b", "files": [{"source": "/root/.ssh/id"}]}
    monkeypatch.setattr(action, "_execute_module", lambda **_: said, raising=False)
    monkeypatch.setattr(plugins.action.python_env, "file_on_host", lambda *_: lambda: "")
    monkeypatch.setattr(plugins.action.python_env.ActionBase, "run", lambda *_: None)
    action._task.args["dir"] = "/opt/trainyard"
    assert action.run(None, {"inventory_hostname": "node1"}) == {"changed": False}


def test_the_role_names_one_for_each_machine_with_its_hash():
    lock = (ROOT / "requirements/python.sha256").read_text()
    folder = yaml.safe_load((ROOT / "roles/python_env/defaults/main.yml").read_text())[
        "python_env_python_url"
    ]
    brought = python_env_brought(lock, folder)
    assert brought.keys() == {"x86_64", "aarch64"} and len(brought) == len(lock.splitlines())
    for machine, one in brought.items():
        assert f"-{machine}-" in one["name"] and one["url"] == f"{folder}/{one['name'].replace('+', '%2B')}"
        assert f"+{folder.split('/')[-1]}-" in one["name"] and f"{one['sha256']}  {one['name']}\n" in lock
