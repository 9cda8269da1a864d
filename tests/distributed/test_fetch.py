"""trainer fetch, from a hub of this machine: what comes is laid out by its content, once, with a token where asked."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from ranks import ROOT

COMMIT = "0" * 39 + "1"
FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"pickled",
    "original/consolidated.safetensors": b"the same again",
    "modeling_own.py": b"print('code')",
}
ROWS = {"data/train.jsonl": b'{"text": "one"}\n' * 50, "data/test.jsonl": b'{"text": "two"}\n'}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's HTTP as huggingface_hub asks for. `token`: whom it answers."""

    protocol_version = "HTTP/1.1"
    token = ""
    asked: list = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(
                401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"}
            )
        kind, files = ("datasets", ROWS) if "/org/rows" in self.path else ("models", FILES)
        name = "org/rows" if kind == "datasets" else "org/model"
        if self.path.startswith(f"/api/{kind}/{name}/tree/"):
            tree = [
                {"type": "file", "path": one, "size": len(data), "oid": "0"} for one, data in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if self.path.startswith(f"/api/{kind}/{name}"):
            found = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}
            return self.answer(200, json.dumps(found).encode())
        _, resolved, place = self.path.partition(f"/resolve/{COMMIT}/")
        if resolved and place in files:
            etag = hashlib.sha1(files[place]).hexdigest()
            return self.answer(200, files[place], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def fetch(tmp_path):
    """`fetch(kind, name, …, token=…)`: (exit code, what it printed, what it complained of); fetch.hub: the server."""
    handler = type("Handler", (Hub,), {"asked": []})
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


def test_code_comes_only_where_it_is_asked_for(fetch):
    code, said, complaint = fetch("model", "org/model", "--code")
    assert code == 0, complaint
    assert any(one["path"].endswith("modeling_own.py") for one in json.loads(said)["files"])


def test_of_a_data_set_its_training_part(fetch):
    code, said, complaint = fetch("dataset", "org/rows")
    assert code == 0, complaint
    answer = json.loads(said)
    assert answer["path"].startswith("data/")
    assert [one["path"].removeprefix(answer["path"]) for one in answer["files"]] == ["/data/train.jsonl"]


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
