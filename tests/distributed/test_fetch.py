"""trainer fetch, from a hub of this machine: what comes is laid out by its content, once, with a token where asked."""

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from hub import Hub
from ranks import ROOT

FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"pickled",
    "original/consolidated.safetensors": b"the same again",
    "modeling_own.py": b"print('code')",
}
ROWS = {"data/train.jsonl": b'{"text": "one"}\n' * 50, "data/test.jsonl": b'{"text": "two"}\n'}


@pytest.fixture
def fetch(tmp_path):
    """`fetch(kind, name, …, token=…)`: (exit code, what it printed, what it complained of); fetch.hub: the server."""
    handler = type(
        "Handler", (Hub,), {"asked": [], "models": {"org/model": FILES}, "datasets": {"org/rows": ROWS}}
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(kind, name, *arguments, token=None):
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HOME": str(tmp_path / "home")}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        if token:
            (tmp_path / "credentials").mkdir(exist_ok=True)
            (tmp_path / "credentials/hub_token").write_text(token + "\n")
            variables["CREDENTIALS_DIRECTORY"] = str(tmp_path / "credentials")
        words = [sys.executable, "-m", "trainer", "fetch", kind, name, str(tmp_path / "state"), *arguments]
        done = subprocess.run(
            words, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    run.hub, run.state = handler, tmp_path / "state"
    yield run
    server.shutdown()
    server.server_close()


def test_a_models_files_come_once_and_lie_by_their_content(fetch):
    code, said, complaint = fetch("model", "org/model")
    assert code == 0, complaint
    answer = json.loads(said)
    assert answer["path"].startswith("models/") and answer["path"].endswith("/org--model")
    names = {one["path"].removeprefix(answer["path"] + "/") for one in answer["files"]}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    for one in answer["files"]:
        data = (fetch.state / "incoming" / one["path"]).read_bytes()
        assert len(data) == one["bytes"] and hashlib.sha256(data).hexdigest() == one["sha256"]
    assert answer["bytes"] == sum(one["bytes"] for one in answer["files"])
    weights = [path for path in fetch.hub.asked if "model.safetensors" in path]
    assert json.loads(fetch("model", "org/model")[1]) == answer
    later = [path for path in fetch.hub.asked if "model.safetensors" in path]
    assert len(later) <= len(weights) + 1  # asked for its state at most, not fetched again


def test_meanwhile_a_file_says_how_far_it_is(fetch):
    fetch.hub.slow = 2  # 6 s for one, 2 for the other: the library writes pieces larger than either
    fetch.hub.models = {"org/model": {**FILES, "second.safetensors": os.urandom(90_000)}}
    done, told = [], set()
    fetching = threading.Thread(target=lambda: done.append(fetch("model", "org/model")))
    fetching.start()
    while fetching.is_alive():
        with contextlib.suppress(OSError, ValueError):
            told.add(tuple(map(int, (fetch.state / "cache/fetching").read_text().split())))
        time.sleep(0.2)
    assert done[0][0] == 0, done
    assert {total for _, total in told} == {json.loads(done[0][1])["bytes"]}, told
    assert [part for part, total in told if 90_000 <= part < total], told
    assert not (fetch.state / "cache/fetching").exists()


def test_code_comes_only_where_it_is_asked_for(fetch):
    code, said, complaint = fetch("model", "org/model", "--code")
    assert code == 0, complaint
    assert any(one["path"].endswith("modeling_own.py") for one in json.loads(said)["files"])


@pytest.mark.parametrize("lacks", ["model.safetensors", "config.json"])
def test_a_model_without_its_weights_is_refused(fetch, lacks):
    """Pickled ones do not come: what is left would be trained from random weights."""
    fetch.hub.models = {"org/model": {name: data for name, data in FILES.items() if name != lacks}}
    code, _, complaint = fetch("model", "org/model")
    assert code == 2 and ("safetensors" if lacks.startswith("model") else lacks) in complaint
    assert "pickled" in complaint or lacks == "config.json"


def test_of_a_data_set_its_training_part(fetch):
    code, said, complaint = fetch("dataset", "org/rows")
    assert code == 0, complaint
    answer = json.loads(said)
    assert answer["path"].startswith("data/")
    assert [one["path"].removeprefix(answer["path"]) for one in answer["files"]] == ["/data/train.jsonl"]
    code, _, complaint = fetch("validation", "org/rows")
    assert (
        code == 2 and "validation: org/rows: found data/test.jsonl, data/train.jsonl; expected" in complaint
    )
    fetch.hub.datasets = {"org/more": {**ROWS, "data/dev.jsonl": b'{"text": "three"}\n'}}
    code, said, complaint = fetch("validation", "org/more@main")
    assert code == 0, complaint
    answer = json.loads(said)
    assert [one["path"].removeprefix(answer["path"]) for one in answer["files"]] == ["/data/dev.jsonl"]


def test_a_gated_model_wants_the_credential(fetch):
    fetch.hub.token = "hf_secret"
    code, said, complaint = fetch("model", "org/model")
    assert code == 2 and "trainer_hub_token" in complaint and "Traceback" not in complaint, complaint
    code, said, complaint = fetch("model", "org/model", token="hf_secret")
    assert code == 0, complaint
    assert "hf_secret" not in said + complaint


def test_what_the_hub_does_not_have_is_refused_with_a_cure(fetch):
    code, _, complaint = fetch("model", "org/other")
    assert code == 2 and "org/other" in complaint and "Traceback" not in complaint, complaint


def test_what_has_no_room_is_refused_before_it_fills_the_disk(tmp_path, monkeypatch):
    import huggingface_hub

    from trainer.commands import fetch as command
    from trainer.data import hub
    from trainer.errors import BadInput

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or tmp_path
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_blobs", lambda name, options: {"a": 5_000_000_000_000, "b": 1})
    there = tmp_path / "cache/models--org--model/blobs"
    with pytest.raises(BadInput, match=r"5,000\.0 GB are to be fetched.*trainer_state_dir"):
        command._model("org/model", False, tmp_path / "progress")
    with pytest.raises(BadInput, match="5,000"):
        hub.fetch("org/rows", tmp_path / "progress")
    assert asked == []
    there.mkdir(parents=True)
    (there / "a").touch()  # what has come already needs no room
    assert hub.snapshot("org/model", tmp_path / "progress") == tmp_path and asked == ["org/model"]
