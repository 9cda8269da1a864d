"""A model by its name on a hub: one host of three fetches it, once, with a token that is seen nowhere."""

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
def plays(cluster, tmp_path_factory):
    plays = Plays(cluster, tmp_path_factory.mktemp("hub"))
    done = plays.book("site.yml", seconds=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return plays


@pytest.fixture
def hub(plays, tmp_path):
    """On node1, which alone reaches it: the firewall keeps nobody but peers out, and its hosts file names nobody."""
    folder = tmp_path / "model"
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], cwd=ROOT, check=True)
    for file in [*folder.iterdir(), ROOT / "tests/distributed/hub.py"]:
        where = "/root/hub.py" if file.name == "hub.py" else f"/root/model/{file.name}"
        command = plays.lab.host("node1").enter("sh", "-c", f"mkdir -p /root/model; cat > {where}")
        subprocess.run(command, input=file.read_bytes(), check=True)
    plays.sh(
        "node1",
        f"systemd-run --unit=hub --collect --property=StandardOutput=file:{SHOWN} "
        f"python3 /root/hub.py {PORT} /root/model {TOKEN} 3",
    )
    yield f"http://127.0.0.1:{PORT}"
    plays.sh("node1", "systemctl stop hub")


def test_one_host_fetches_and_the_others_have_it_from_there(plays, hub, tmp_path):
    secrets = tmp_path / "secrets.json"
    secrets.write_text(json.dumps({"trainer_hub_token": TOKEN}))
    keys = {"model": "org/model", "sequence_length": 32, "steps": 4, "batch_size": 6, "max_samples": 60}
    keys |= {"trainer_hub_endpoint": hub, "trainer_results_dir": tmp_path / "results"}
    refused = plays.book("train.yml", run="gated", **keys)
    assert refused.returncode != 0 and "trainer_hub_token" in refused.stdout, refused.stdout
    done = plays.book("train.yml", "-vvv", "-e", f"@{secrets}", run="fetched", **keys)
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
    assert f"model: {places.pop()}" in config
