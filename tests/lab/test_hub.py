"""A model by its name on a hub, which one host of three fetches, once, with a token that is seen nowhere; and one that
lies on one host alone.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plays import Plays

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("node1", "node2", "node3")
TOKEN, PORT, SHOWN = "hf_secretsecret", 8099, "/root/asked"
MAKE = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
from trainer.config import from_mapping
from trainer.data import tokenizer
own = tokenizer.wrap(tokenizer.train(from_mapping({"vocab_size": 300})))
own.save_pretrained(sys.argv[1])
GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=2)).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def plays(deployed, tmp_path_factory):
    return Plays(deployed, tmp_path_factory.mktemp("hub"))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], cwd=ROOT, check=True)
    return folder


def put(plays, host, file, where):
    command = plays.lab.host(host).enter("sh", "-c", f"mkdir -p {Path(where).parent}; cat > {where}")
    subprocess.run(command, input=file.read_bytes(), check=True)


@pytest.fixture
def hub(plays, model):
    """On node1, which alone reaches it: the firewall keeps nobody but peers out, and its hosts file names nobody."""
    put(plays, "node1", ROOT / "tests/distributed/hub.py", "/root/hub.py")
    for file in model.iterdir():
        put(plays, "node1", file, f"/root/model/{file.name}")
    plays.sh(
        "node1",
        f"systemd-run --unit=hub --collect --property=StandardOutput=file:{SHOWN} "
        f"python3 /root/hub.py {PORT} /root/model {TOKEN} 3",
    )
    yield f"http://127.0.0.1:{PORT}"
    plays.sh("node1", "systemctl stop hub || true")  # a test may have


def test_one_host_fetches_and_the_others_have_it_from_there(plays, hub, tmp_path):
    password, secrets = tmp_path / "password", tmp_path / "secrets.yml"
    password.write_text("of the vault")
    vault = [
        Path(sys.executable).with_name("ansible-vault"),
        "encrypt_string",
        "--stdin-name",
        "trainer_hub_token",
    ]
    encrypted = subprocess.run(
        [*vault, "--vault-password-file", password], input=TOKEN, capture_output=True, text=True, check=True
    )
    secrets.write_text(encrypted.stdout)
    assert "!vault" in encrypted.stdout and TOKEN not in encrypted.stdout
    keys = {"model": "org/model", "sequence_length": 32, "steps": 4, "batch_size": 6, "max_samples": 60}
    keys |= {"trainer_hub_endpoint": hub, "trainer_results_dir": tmp_path / "results"}
    refused = plays.book("train.yml", run="gated", **keys)
    assert refused.returncode != 0 and "trainer_hub_token" in refused.stdout, refused.stdout
    vaulted = ("-e", f"@{secrets}", "--vault-password-file", str(password))
    done = plays.book("train.yml", "-vvv", *vaulted, run="fetched", **keys)
    assert done.returncode == 0, done.stdout[-4000:]
    assert TOKEN not in done.stdout + done.stderr
    assert re.search(r"node1: [\d,]+ of [\d,]+ MB have come", done.stdout), done.stdout[-4000:]
    asked = plays.sh("node1", f"grep -c 'resolve/.*model.safetensors' {SHOWN}")
    assert 1 <= int(asked) <= 2  # its state, and itself
    places = {plays.sh(host, "ls -d /var/lib/trainyard/models/*/org--model").strip() for host in HOSTS}
    assert len(places) == 1
    for host in HOSTS:
        assert (
            plays.sh(
                host,
                f"grep -rlF --exclude=hub.service {TOKEN} /etc /var/lib/trainyard /run /tmp 2>/dev/null || true",
            ).strip()
            == ""
        )
        assert TOKEN not in plays.sh(
            host, "journalctl --no-pager -o cat | grep -v 'root/hub.py' | tail -5000"
        )
    config = plays.sh("node2", "cat /etc/trainyard/runs/fetched.yaml")
    assert f"model: {(place := places.pop())}" in config
    card = (tmp_path / "results/fetched/model/README.md").read_text()
    assert "base_model: org/model\n" in card and "/var/lib/trainyard" not in card
    # The internet is gone: a new run has what node1 fetched, and nobody brings it anew.
    plays.sh("node1", "systemctl stop hub")
    done = plays.book("train.yml", run="later", **keys)
    assert done.returncode == 0, done.stdout[-4000:]
    told = " ".join(done.stdout.split())
    assert f"no host reaches {hub}; its revision {'0' * 39}1 is taken, which node1 fetched" in told, (
        done.stdout
    )
    assert f"model: {place}" in plays.sh("node3", "cat /etc/trainyard/runs/later.yaml")
    refused = plays.book("train.yml", run="none", **{**keys, "model": "org/other"})
    assert refused.returncode != 0 and f"no host reaches {hub}" in refused.stdout, refused.stdout


def test_what_one_host_alone_has_comes_to_the_others_from_there(plays, model, tmp_path):
    """A model on node2, a data set on node3: the losses are those of a run that had both from the controller."""
    data = tmp_path / "talk.jsonl"
    data.write_text("".join(json.dumps({"text": f"Sentence number {n} of many."}) + "\n" for n in range(300)))
    for file in model.iterdir():
        put(plays, "node2", file, f"/srv/mine/glm/{file.name}")
    put(plays, "node3", data, "/srv/mine/talk.jsonl")
    mine = {"model": "/srv/mine/glm", "dataset": "/srv/mine/talk.jsonl"}
    keys = {"sequence_length": 32, "steps": 4, "batch_size": 6, "trainer_results_dir": tmp_path / "results"}
    keys["balance"] = "even"  # by speeds each run has its own, and sums of another order
    refused = plays.book("train.yml", run="nowhere", **{**keys, **mine, "model": "/srv/mine/gml"})
    assert refused.returncode != 0 and "on this controller as on node1, node2, node3" in refused.stdout
    done = plays.book("train.yml", run="mine", **keys, **mine)
    assert done.returncode == 0, done.stdout[-4000:]
    for name in ("models/*/glm/config.json", "models/*/glm/model.safetensors", "data/*/talk.jsonl"):
        sums = {plays.sh(host, f"sha256sum /var/lib/trainyard/{name}") for host in HOSTS}
        assert len(sums) == 1 and len(sums.pop().splitlines()) == 1
    for host in HOSTS:
        assert plays.sh(host, "stat -c %U:%G:%a /var/lib/trainyard/models/*/glm/*").split() == [
            "root:trainyard:640"
        ] * len(list(model.iterdir()))
        assert plays.sh(host, "ls /var/lib/trainyard").split().count("incoming") == 0
    done = plays.book("train.yml", run="theirs", **keys, model=model, dataset=data)
    assert done.returncode == 0, done.stdout[-4000:]
    mine, theirs = (
        [json.loads(line) for line in (tmp_path / f"results/{run}/metrics.jsonl").read_text().splitlines()]
        for run in ("mine", "theirs")
    )
    losses = [[row["loss"] for row in rows if row["kind"] == "train"] for rows in (mine, theirs)]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-6)
    site = plays.book("site.yml", seconds=1500)  # whose directories data and models are is still right
    assert site.returncode == 0 and not re.search(r"changed=[1-9]", site.stdout), site.stdout[-4000:]
