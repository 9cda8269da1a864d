"""A Python for hosts whose own is too old, as the controller fetches it."""

import threading
from pathlib import Path

import pytest
import yaml

import plugins.action.python_env  # noqa: F401 - it puts module_utils on the path
from plugins.module_utils import brought_python
from plugins.module_utils.offline_wheels import sha256

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_role_names_one_for_each_machine_with_its_hash():
    brought = yaml.safe_load((ROOT / "roles/python_env/vars/main.yml").read_text())["_python_env_brought"]
    assert brought.keys() == {"x86_64", "aarch64"}
    for machine, one in brought.items():
        assert machine in one["name"] and one["url"].endswith("/" + one["name"].replace("+", "%2B"))
        assert len(one["sha256"]) == 64
