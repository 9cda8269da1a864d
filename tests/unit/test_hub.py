"""Names of the hub in a run's configuration, and the token on its way."""

import errno
import http.server
import importlib.util
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError

from plugins.filter import hub
from trainer import cli
from trainer.commands import fetch as fetching
from trainer.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    {"kind": "model", "key": "model", "name": "org/model", "folder": "models--org--model"},
    {"kind": "dataset", "key": "dataset", "name": "org/rows@main:*", "folder": "datasets--org--rows"},
]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model": "tiny", "dataset": "austen"}, []),
        ({"model": "/var/lib/trainyard/models/1/m", "dataset": "/data/x.jsonl"}, []),
        ({"model": "org/model", "dataset": "austen"}, ["org/model"]),
        ({"model": "gpt2", "dataset": "org/rows@main:*.jsonl,austen"}, ["gpt2", "org/rows@main:*.jsonl"]),
        ({"model": "tiny", "dataset": "texts/mine.jsonl", "validation": "org/held"}, ["org/held"]),
    ],
)
def test_which_names_are_the_hubs(config, found):
    assert [one["name"] for one in hub.hub_names(config)] == found


def test_a_set_to_evaluate_on_is_asked_for_as_one():
    (one,) = hub.hub_names({"model": "tiny", "dataset": "austen", "validation": "org/held"})
    assert one == {
        "kind": "dataset",
        "key": "validation",
        "name": "org/held",
        "folder": "datasets--org--held",
    }
    # As roles/trainer/tasks/fetch.yml asks for it.
    assert cli._parser().parse_args(["fetch", one["key"], one["name"], "dir"]).kind == "validation"


def test_what_is_brought_from_the_controller_is_not_fetched():
    uploads = [{"key": "dataset", "name": "org/rows"}]
    assert hub.hub_names({"model": "tiny", "dataset": "org/rows"}, uploads) == []


def test_the_first_host_that_reaches_the_hub_fetches():
    hosts = {"a": {"__trainer_hub": {"status": -1}}, "b": {"__trainer_hub": {"status": 404}}, "c": {}}
    assert hub.hub_host(["a", "b", "c"], hosts, NAMES, "https://hub.example") == "b"
    with pytest.raises(
        AnsibleFilterError, match=r"no host reaches https://hub\.example.*hf download org/model"
    ):
        hub.hub_host(["a", "c"], hosts, NAMES, "https://hub.example")


def found(*there):
    """What a host that does not reach the hub has of NAMES in its cache, as Ansible keeps it."""
    results = [{"item": one, "stat": {"exists": one["folder"] in there}} for one in NAMES]
    return {"__trainer_hub": {"status": -1}, "__trainer_cached": {"results": results}}


BOTH = [one["folder"] for one in NAMES]
REACHES = {  # as one that was not asked for its cache
    "__trainer_hub": {"status": 200},
    "__trainer_cached": {"results": [{"item": one, "skipped": True} for one in NAMES]},
}


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [
        ([found(), found(*BOTH), found(*BOTH)], "b"),
        ([found(BOTH[0]), {}, found(*BOTH)], "c"),
        ([found(*BOTH), REACHES], "b"),  # which may have a newer one
        (
            [found(), found(BOTH[0])],
            r"^dataset: org/rows@main:\*: no host.*cache.*hf download org/rows --repo-type d",
        ),
        (
            [found(BOTH[1]), {}],
            r"^model: org/model: no host.*cache.*hf download org/model --local-dir DIR.*model=DIR",
        ),
        ([REACHES | {"__trainer_hub": {"status": -1}}], "^model: org/model: no host"),
    ],
)
def test_where_none_reaches_the_hub_one_that_has_it_all_cached_is_taken(hosts, chosen):
    hosts = dict(zip("abc", hosts, strict=False))
    if chosen in hosts:
        assert hub.hub_host(list(hosts), hosts, NAMES, "https://hub.example") == chosen
    else:
        with pytest.raises(AnsibleFilterError, match=chosen):
            hub.hub_host(list(hosts), hosts, NAMES, "https://hub.example")


def test_what_was_fetched_looks_like_an_upload():
    results = [{"text": 'a warning\n{"path": "models/1/org--model", "files": []}\n'}]
    (one,) = hub.hub_fetched(NAMES[:1], results)
    was = {"path": "models/1/org--model", "files": [], "key": "model", "name": "org/model"}
    assert one == {**was, "cached": ""}


def test_what_a_host_fetched_is_no_file_of_the_controllers():
    """A host in other hands would have it read, and sent to itself."""
    file = {"path": "models/1/org--model/config.json", "bytes": 2, "sha256": "aa"}
    said = {
        "path": "models/1/org--model",
        "source": "/root/.ssh/id",
        "files": [{**file, "source": "/root/.ssh/id"}],
    }
    (one,) = hub.hub_fetched(NAMES[:1], [{"text": json.dumps(said)}])
    assert one["files"] == [file] and "source" not in one


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    """`gone(kind, name, …)`: what `trainer fetch` says (code, answer, complaint) once its hub has gone: gone.fetched is
    what it answered before, gone.cache where that lies.
    """
    spec = importlib.util.spec_from_file_location("stand_in", ROOT / "tests/distributed/hub.py")
    spec.loader.exec_module(stand_in := importlib.util.module_from_spec(spec))
    stand_in.Hub.models = {
        "org/model": {"config.json": b"{}", "model.safetensors": b"weights", "own.py": b""}
    }
    stand_in.Hub.datasets = {"org/rows": {"data/train.jsonl": b'{"text": "one"}\n', "data/more.txt": b"two"}}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), stand_in.Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path_factory.mktemp("gone")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    kept |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HOME": str(folder / "home")}

    def fetch(*words):
        command = [sys.executable, "-m", "trainer", "fetch", *words[:2], str(folder / "state"), *words[2:]]
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120)
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    answers = [fetch(one["kind"], one["name"].replace("*", "*.jsonl")) for one in NAMES]
    server.shutdown()
    server.server_close()
    assert [code for code, _, _ in answers] == [0, 0], answers
    fetch.fetched = dict(zip(("model", "dataset"), [answer for _, answer, _ in answers], strict=True))
    fetch.commit, fetch.cache = stand_in.COMMIT, folder / "state/cache/hub"
    return fetch


def test_an_adapter_that_is_asked_for_as_a_model_is_told_as_one(monkeypatch, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr("trainer.data.hub.snapshot", lambda *_, **__: tmp_path)
    with pytest.raises(
        BadInput, match=r"has no config\.json; .*this is an adapter: merge it into its model first"
    ):
        fetching._model("org/adapter", False, tmp_path / "progress")


@pytest.mark.parametrize(("kind", "name"), [("model", "org/model"), ("dataset", "org/rows@main:*.jsonl")])
def test_what_came_before_is_taken_from_the_cache_once_the_hub_is_gone(gone, kind, name):
    (one,) = hub.hub_names({"model": "tiny", kind: name})
    assert one["folder"] in os.listdir(gone.cache)
    assert gone.fetched[kind]["cached"] == "" and gone.fetched[kind]["files"]
    code, answer, complaint = gone(kind, name, "--cached")
    assert (code, complaint) == (0, "")  # nobody was asked, nor waited for
    assert answer == {**gone.fetched[kind], "cached": gone.commit}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "org/model", "--code"], "is incomplete: 1 file(s) are missing (own.py) of revision 0000"),
        (["dataset", "org/rows"], "is incomplete: 1 file(s) are missing (data/more.txt) of revision 0000"),
        (["dataset", "org/rows@v2"], "has no revision v2 of it"),
        (["model", "org/other"], "has no revision main of it"),
    ],
)
def test_a_cache_that_lacks_something_says_what_and_what_to_do(gone, words, said):
    code, answer, complaint = gone(*words, "--cached")
    assert (code, answer) == (2, {}) and said in complaint and "Traceback" not in complaint, complaint
    option = " --repo-type dataset" if words[0] == "dataset" else ""
    name = words[1].split("@")[0]
    assert complaint.startswith(f"error: {words[0]}: {name}: the hub does not answer")
    assert "Run train.yml again once the hub answers" in complaint
    assert f"hf download {name}{option} --local-dir DIR" in complaint


def test_a_secret_is_in_a_file_of_its_users_alone_and_in_no_command_line(load_module):
    module = load_module("trainer_command")
    with module.secret_files({"hub_token": "hf_secret"}) as paths:
        assert Path(paths["hub_token"]).read_text() == "hf_secret"
        assert stat.S_IMODE(os.stat(paths["hub_token"]).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(paths["hub_token"])).st_mode) == 0o700
        words = module.as_unit(
            ["trainer", "fetch"], "trainyard", "/var/lib/trainyard", False, {"A": "b"}, paths
        )
        assert (
            f"--property=LoadCredential=hub_token:{paths['hub_token']}" in words and "--setenv=A=b" in words
        )
        assert not any("hf_secret" in word for word in words)
    assert not os.path.exists(paths["hub_token"])


def test_a_new_run_has_yesterdays_model_where_no_host_reaches_the_hub(gone, tmp_path):
    """roles/trainer's fetch.yml, on hosts that are names of this machine: node2 has the cache."""
    program = tmp_path / "opt/current/bin/trainer"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m trainer "$@"\n')
    program.chmod(0o755)
    hosts = {
        "node1": {"trainer_state_dir": str(tmp_path)},
        "node2": {"trainer_state_dir": str(gone.cache.parents[1])},
    }
    variables = {"ansible_connection": "local", "ansible_become": False, "local_mode": True}
    variables |= {"ansible_python_interpreter": sys.executable, "trainer_opt_dir": str(tmp_path / "opt")}
    variables["trainer_hub_endpoint"] = "http://127.0.0.1:9"
    variables["trainer_results_dir"] = str(tmp_path / "results")
    variables["__trainer_asked"] = {"config": {"model": "org/model"}, "uploads": [], "elsewhere": []}
    (tmp_path / "hosts.yml").write_text(
        json.dumps({"all": {"children": {"cluster": {"hosts": hosts}}, "vars": variables}})
    )
    role = {"name": str(ROOT / "roles/trainer"), "tasks_from": "fetch", "rolespec_validate": False}
    tasks = [{"ansible.builtin.import_role": role}]
    tasks += [{"ansible.builtin.debug": {"msg": "Fetched {{ __trainer_fetched[0].path }}"}}]
    tasks += [{"ansible.builtin.debug": {"msg": "Called {{ _trainer_run_config.origins | from_json }}"}}]
    (tmp_path / "play.yml").write_text(
        json.dumps([{"hosts": "cluster", "gather_facts": False, "tasks": tasks}])
    )
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", tmp_path / "hosts.yml"]
    done = subprocess.run(
        [*command, tmp_path / "play.yml"],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Fetched {gone.fetched['model']['path']}" in said, said
    assert f"Called {{'{tmp_path}/{gone.fetched['model']['path']}': 'org/model'}}" in said, said
    assert (
        f"model: org/model: no host reaches http://127.0.0.1:9; its revision {gone.commit} is taken" in said
    ), said


def test_what_became_roots_for_another_place_is_copied(tmp_path, monkeypatch):
    """One blob of the cache is both's, and Linux lets nobody link what is another's (protected_hardlinks)."""

    def refused(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "blob").write_text("weights")
    one = {"path": "models/0123/org--name/model.safetensors", "bytes": 7}
    monkeypatch.setattr(fetching.os, "link", refused)
    fetching._lay_out(tmp_path / "blob", tmp_path / "state", one)
    assert (tmp_path / "state/incoming" / one["path"]).read_text() == "weights"
