"""What a host says of itself before a run: the module run_host, on directories of the test's own."""

import json

import pytest


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
    built.mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/one")
    assert environment(str(tmp_path)) is None
    (release / "environment").write_text(f"{built}\n")
    assert environment(str(tmp_path)) is None
    record = {"torch": "2.9.9+cpu", "digest": "abc", "versions": {"torch": "2.9.9+cpu"}}
    (built / ".complete").write_text(json.dumps(record))
    assert environment(str(tmp_path)) == {"torch": "2.9.9+cpu", "digest": "abc"}
    (built / ".complete").write_text("{}")
    assert environment(str(tmp_path)) is None


def test_a_relative_path_has_free_space_too(load_module):
    assert load_module("run_host").free_bytes("no/such/directory") > 0


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_is_none_is_refused(run_module, arguments, port):
    result = run_module("run_host", **{**arguments, "port": port})
    assert f"trainer_port: found {port}" in result["msg"]
    assert "Traceback" not in result["output"]
