"""Where metrics go beside metrics.jsonl; what counts as work; checkpoints looked at from outside."""

import contextlib
import fcntl
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import shown

from trainer import advice, checkpoint, cli, evaluate, metrics, pace, recorder, sinks
from trainer.balance import Balance
from trainer.commands import train
from trainer.config import cut_rounds, early, few_steps, from_mapping
from trainer.environment import Environment
from trainer.errors import BadInput
from trainer.model import flops

RECORD = {
    "kind": "train",
    "step": 7,
    "loss": 2.5,
    "shares": [1, 2],
    "mfu": None,
    "world_size": 2,
    "time": 1e9,
}


def place(run_dir: Path, rank: int = 0) -> Environment:
    return Environment(run_dir, run_dir / "cache", "node1", 1, rank, 2, rank, 2, 0)


@pytest.fixture
def said():
    return []


def fed(tmp_path, said, rank=0, records=(RECORD,), begun="first", ended="finished", **settings):
    """Sinks of `rank` that have had the records and are closed."""
    config = from_mapping({"tensorboard": False, **settings})
    watched = sinks.Sinks(config, place(tmp_path, rank), settings, said.append, begun)
    for record in records:
        watched.write(record)
    watched.close(ended)
    return watched


def test_tensorboard_gets_the_numbers_on_the_first_rank(tmp_path, said):
    fed(tmp_path, said, tensorboard=True, records=[RECORD, {**RECORD, "step": 8, "loss": 2.0}])
    assert said == []
    found = shown(tmp_path / "tensorboard")
    assert (7, "train/loss", 2.5) in found and (8, "train/loss", 2.0) in found
    assert {name for _, name, _ in found} == {"train/loss", "train/world_size"}
    fed(tmp_path / "other", said, rank=1, tensorboard=True)
    assert not (tmp_path / "other").exists()


def test_what_was_said_of_the_step_that_a_run_goes_on_from_stays(tmp_path, said):
    """A reader of the files drops what earlier ones hold of the steps from a file's beginning on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    def begins() -> list[int]:
        found = []
        for file in sorted((tmp_path / "tensorboard").iterdir(), key=lambda one: one.stat().st_mtime_ns):
            data = file.read_bytes()
            while data:
                (length,) = struct.unpack("<Q", data[:8])
                event = Event.FromString(data[12 : 12 + length])
                found += [event.step] if event.session_log.status == SessionLog.START else []
                data = data[16 + length :]
        return found

    event = {"kind": "event", "step": 7, "event": "resume", "time": 1.0}
    first, second, third = ({**RECORD, "step": step} for step in (8, 9, 10))
    late = {**event, "event": "checkpoint", "step": 8, "seconds": 0.1}  # told once it is on the disk
    records = [
        event,
        first,
        second,
        late,
        {**event, "event": "damaged checkpoint"},
        first,
        second,
        late,
        third,
    ]
    fed(tmp_path, said, tensorboard=True, records=records)
    assert said == [] and begins() == [8, 8]
    steps = [step for step, name, _ in shown(tmp_path / "tensorboard") if name == "train/loss"]
    assert steps == [8, 9, 8, 9, 10]


def test_prometheus_reads_a_port_a_rank(tmp_path, said, monkeypatch):
    monkeypatch.setenv("CLUSTER_ADDRESS", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    watched = sinks.Sinks(
        from_mapping({"metrics_port": port - 1, "tensorboard": False, "run": "r"}),
        place(tmp_path, rank=1),
        {},
        said.append,
    )
    watched.write(RECORD)
    for _ in range(200):  # the server answers from its own thread
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:
            page = ""
        if "train_loss" in page:
            break
        time.sleep(0.05)
    watched.close("finished")
    assert 'trainyard_train_loss{host="node1",rank="1",run="r"} 2.5' in page
    assert 'trainyard_step{host="node1",rank="1",run="r"} 7.0' in page
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


# The numbers of a step's line; the lists beside them are not given to Prometheus.
NUMBERS = (
    "epoch loss lr grad_norm tokens tokens_total tokens_per_second mfu step_seconds compute_seconds comm_seconds"
    " wire_bytes world_size memory_allocated_bytes memory_reserved_bytes memory_peak_bytes time"
)


def test_a_records_way_to_the_ranks_page_costs_little(tmp_path, said, monkeypatch):
    """CPU of all threads, the server's start and two readers a second included; 1 ms is 1 % of a step of 0.1 s."""
    monkeypatch.setenv("CLUSTER_ADDRESS", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    steps, page, until = 2000, "", time.monotonic() + 120
    began = time.process_time()
    watched = sinks.Sinks(
        from_mapping({"metrics_port": port, "tensorboard": False}), place(tmp_path), {}, said.append
    )
    for step in range(1, steps + 1):
        watched.write({**RECORD, **dict.fromkeys(NUMBERS.split(), step / 7), "step": step})
    while not re.search(rf"^trainyard_step{{.*}} {steps}\.0$", page, re.M):
        assert time.monotonic() < until, (said, page[-500:])
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # the server answers from its own thread
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    watched.close("finished")
    each = (time.process_time() - began) / steps
    print(f"a record's way to the page of metrics_port: {1000 * each:.3f} ms of CPU")
    assert "trainyard_train_grad_norm{" in page and said == []
    assert each < 0.001


def test_a_port_that_is_taken_ends_nothing(tmp_path, said, monkeypatch):
    monkeypatch.delenv("CLUSTER_ADDRESS", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fed(tmp_path, said, metrics_port=taken.getsockname()[1])
    assert len(said) == 1 and "Prometheus gets no metrics" in said[0] and "the run goes on" in said[0]


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(tmp_path, said, monkeypatch):
    def broken(config, settings, begun):
        def write(record):
            raise ConnectionError("no route to the service")

        return write, lambda ended: None

    monkeypatch.setattr(sinks, "mlflow", broken)
    records = [{**RECORD, "step": step} for step in (1, 2, 3)]
    fed(tmp_path, said, tensorboard=True, report_to="mlflow", records=records)
    assert len(said) == 1 and "MLflow gets no metrics: ConnectionError: no route to the service" in said[0]
    assert {step for step, *_ in shown(tmp_path / "tensorboard")} >= {1, 2, 3}


def test_services_are_told_by_their_own_packages(tmp_path, said, monkeypatch):
    told = []
    run = types.SimpleNamespace(
        define_metric=lambda which, step_metric: told.append((which, step_metric)),
        log=lambda numbers: told.append(("log", numbers)),
        finish=lambda exit_code: told.append(("finish", exit_code)),
    )
    wandb = types.SimpleNamespace(init=lambda **asked: told.append((asked["name"], asked["id"])) or run)
    mlflow = types.SimpleNamespace(
        search_runs=lambda **asked: [],
        start_run=lambda run_name, tags: told.append(("start", run_name, tags)),
        log_params=lambda settings: told.append(("params", settings)),
        log_metrics=lambda numbers, step: told.append(("metrics", step, numbers)),
        end_run=lambda status: told.append(status),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    wanted = {"train/loss": 2.5, "train/world_size": 2.0}
    logged = ("log", {**wanted, "step": 7})
    fed(tmp_path, said, report_to="wandb", run="r")
    assert told == [("r", "r-first"), ("*", "step"), logged, ("finish", 0)]
    told.clear()
    for ended, code, status in (("failed", 1, "FAILED"), ("stopped", 0, "KILLED")):
        fed(tmp_path, said, ended=ended, report_to="wandb", run="r")
        fed(tmp_path, said, ended=ended, report_to="mlflow", run="r")
        assert told[3] == ("finish", code) and told[-1] == status
        told.clear()
    # One that is begun anew under an old name is another run: that one's steps are higher.
    fed(tmp_path, said, begun="20260102T03", report_to="wandb", run="r")
    assert told[0] == ("r", "r-20260102T03")
    told.clear()
    fed(tmp_path, said, begun="20260102T03", report_to="mlflow", run="r")
    assert told[0] == ("start", "r", {"trainyard_begun": "20260102T03"}) and told[2:] == [
        ("metrics", 7, wanted),
        "FINISHED",
    ]
    assert said == []


class Server:
    """MLflow's functions, as far as they are asked: runs by id, newest first, of one experiment."""

    def __init__(self):
        self.runs, self.now = {}, None

    def start_run(self, run_id=None, run_name=None, tags=None):
        self.now = run_id or f"id{len(self.runs)}"
        assert run_id is None or run_id in self.runs
        self.runs.setdefault(self.now, {"name": run_name, "tags": tags, "params": {}, "steps": []})

    def search_runs(self, filter_string, max_results, output_format):
        assert output_format == "list"
        name, tag, begun = re.fullmatch(
            "attributes.run_name = '(.*)' and tags.(.*) = '(.*)'", filter_string
        ).groups()
        wanted = {"name": name, "tags": {tag: begun}}
        found = [one for one in reversed(self.runs) if wanted.items() <= self.runs[one].items()][:max_results]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=one)) for one in found]

    def log_params(self, params):
        known = self.runs[self.now]["params"]
        for key, value in params.items():
            if known.setdefault(key, value) != value:
                raise ValueError(f"Changing param values is not allowed: {key}")

    def log_metrics(self, numbers, step):
        self.runs[self.now]["steps"].append(step)

    def end_run(self, status):
        self.now = None


def test_a_run_that_goes_on_is_the_same_one_of_mlflow(tmp_path, said, monkeypatch):
    server = Server()
    monkeypatch.setitem(sys.modules, "mlflow", server)
    for step, name, steps in ((1, "r", 5), (2, "other", 5), (3, "r", 9)):
        records = [{**RECORD, "step": step}]
        fed(tmp_path, said, 0, records, "now", report_to="mlflow", run=name, steps=steps)
    assert {one["name"]: one["steps"] for one in server.runs.values()} == {"r": [1, 3], "other": [2]}
    for step in (1, 2):  # begun anew
        fed(tmp_path, said, 0, [{**RECORD, "step": step}], "later", report_to="mlflow", run="r")
    assert [one["steps"] for one in server.runs.values()] == [[1, 3], [2], [1, 2]] and said == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(BadInput, match=f"pip install {name}"):
        sinks.check(from_mapping({"report_to": name}))
    sinks.check(from_mapping({}))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 4070", 58),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", None),
        ("NVIDIA GeForce RTX 3070 with Max-Q Design", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", 65),
        ("NVIDIA H2000", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peaks_by_name(name, tflops):
    assert flops.peak_of(name, "bfloat16") == (tflops and tflops * 1e12)
    assert flops.peak([torch.device("cpu")], "float32") is None


@pytest.mark.parametrize("width", [256, 32])
def test_what_shares_gain_does_not_depend_on_how_wide_a_step_is(width):
    """The balance knows of whole sequences, of which a step computes as much as its documents want."""
    balance = Balance(8, 2)
    full = 256 / width
    balance.begin([0.1 * full, 0.2 * full])
    balance._fixed = [0.05 * full, 0.1 * full]
    run = types.SimpleNamespace(balance=balance, width=width, config=from_mapping({"sequence_length": 256}))
    own = types.SimpleNamespace(run=run, _saving=[])
    report = types.SimpleNamespace(shares=[6, 2], rank_seconds=[0.6, 0.4], step_seconds=1.0)
    found = pace.Pace.speed_up(own, report)
    assert found["got"] == pytest.approx(1 + (4 * 0.2 + 0.1) - (6 * 0.1 + 0.05))


def test_mfu_counts_the_tokens_that_carry_no_loss():
    """A question is computed as an answer is."""
    own = types.SimpleNamespace(
        peak=1.5e12,  # of an older card and a newer one
        flops=1e9,
        run=types.SimpleNamespace(
            config=from_mapping({"batch_size": 4, "sequence_length": 500}),
            world=types.SimpleNamespace(size=2),
        ),
    )
    report = types.SimpleNamespace(tokens=10, computed=4 * 500, step_seconds=2.0)
    assert pace.Pace.mfu(own, report) == pytest.approx(4 * 500 * 1e9 / (2.0 * 1.5e12))


@pytest.mark.parametrize(
    ("settings", "seconds", "words"),
    [
        ({}, 60, "checkpoints are 8 h 20 min apart"),
        ({}, 5, None),
        ({"checkpoint_minutes": 30}, 60, None),
        ({"checkpoint_every": 0}, 60, "checkpoints are 16 h 40 min apart"),
        ({"checkpoint_every": 50}, 60, None),
        ({"checkpoint_epochs": True, "batch_size": 16}, 60, "checkpoints are 1 h 40 min apart"),
        ({"checkpoint_epochs": True, "batch_size": 16}, 10, None),
    ],
)
def test_checkpoints_that_are_hours_apart_are_warned_of(settings, seconds, words):
    progress = types.SimpleNamespace(step=40)
    index = types.SimpleNamespace(sequences=1600)
    run = types.SimpleNamespace(config=from_mapping(settings), steps=1040, progress=progress, index=index)
    found = advice.far_apart(types.SimpleNamespace(run=run, seconds=lambda: seconds))
    assert (found and found.partition(",")[0]) == words


@pytest.mark.parametrize(
    ("sync_every", "cure"),
    [
        (50, "checkpoint_every=50 makes one every 50 min 0 s"),
        (7, "checkpoint_every=28 makes one every half hour"),
    ],
)
def test_a_checkpoint_by_the_clock_would_end_diloco_s_rounds(sync_every, cure):
    config = from_mapping({"comm": "diloco", "sync_every": sync_every, "checkpoint_every": 0})
    run = types.SimpleNamespace(config=config, steps=1040, progress=types.SimpleNamespace(step=40))
    found = advice.far_apart(types.SimpleNamespace(run=run, seconds=lambda: 60))
    assert found.endswith(cure)


def test_what_ends_rounds_early_is_told():
    def cut(**keys):
        settings = {"comm": "diloco", "sync_every": 60, "validation_split": 0.1, "eval_every": 60, **keys}
        return cut_rounds(from_mapping(settings), 3000, 1000)

    assert cut() == (
        "all meet early, and begin a round anew: checkpoint_every is 500, no multiple of sync_every, 60: "
        "480 or 540 would be"
    )
    assert "eval_every is 50, no multiple of sync_every, 60: 60 would be" in cut(eval_every=50)
    for every in (480, 0, 5000):
        assert cut(checkpoint_every=every) == ""
    assert cut(comm="8bit") == ""
    assert "goes by the clock" in cut(checkpoint_every=0, checkpoint_minutes=30)
    assert "checkpoint_epochs, by" in cut(checkpoint_every=0, checkpoint_epochs=True)
    assert "eval_every is 0, for an evaluation at each epoch's end" in cut(checkpoint_every=0, eval_every=0)
    assert cut_rounds(from_mapping({"comm": "diloco", "checkpoint_epochs": True}), 900, 1000) == ""


def test_data_that_makes_a_handful_of_steps_is_warned_of():
    """300 short answers, packed, with the defaults."""
    config = from_mapping({"epochs": 3, "sequence_length": 1024})
    said = few_steps(config, 30, 6)
    assert said.startswith("the data is 30 sequences of 1024 tokens, and 3 epochs are 6 steps of 16, too few")
    assert "each of which stands more than once in a batch" in few_steps(config, 9, 100)
    alone = few_steps(from_mapping({"epochs": 3, "packing": False}), 30, 6)
    assert "30 sequences of up to 256 tokens" in alone and alone.endswith(": a smaller batch_size makes more")
    assert few_steps(config, 3000, 564) == "" == few_steps(from_mapping({"steps": 6}), 30, 6)


def test_what_has_all_ranks_of_diloco_meet_early():
    def every(**keys):
        return early(from_mapping({"checkpoint_every": 500, **keys}), 20, 4.0)

    assert every() == (500, 0, 0, 0)
    assert every(validation_split=0.1) == (500, 20, 0, 0)  # at each epoch's end
    assert every(validation_split=0.1, eval_every=50) == (500, 50, 0, 0)
    assert every(checkpoint_epochs=True, checkpoint_every=0) == (0, 0, 20, 0)
    assert every(checkpoint_minutes=15) == (500, 0, 0, 60) and every(checkpoint_minutes=0.01)[3] == 1
    assert early(from_mapping({"checkpoint_epochs": True, "checkpoint_minutes": 15})) == (500, 0, 0, 0)


def test_the_convention_of_flops():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM
    from transformers.models.llama import LlamaConfig
    from transformers.models.mixtral import MixtralConfig

    from trainer.model import lora

    shape = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    # A layer: q and o 32 x 32, k and v 32 x 16, three of 32 x 64. The head 32 x 100; the embedding is looked up.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 100
    model = LlamaForCausalLM(LlamaConfig(**shape))
    assert flops.per_token(model) == 6 * weights
    tied = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    assert flops.per_token(tied) == 6 * weights
    adapted = lora.add(model, from_mapping({"adapter": "lora", "lora_rank": 4, "lora_targets": "q_proj"}))
    assert flops.per_token(adapted) == 4 * weights + 6 * 2 * 4 * (32 + 32)
    # Positions are looked up, as tokens are, whose table is the head here.
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=1, n_head=2))
    assert flops.per_token(gpt) == 6 * (32 * 96 + 32 * 32 + 2 * 32 * 128 + 32 * 100)
    sees, text = torch.nn.Module(), LlamaForCausalLM(LlamaConfig(**shape))
    sees.vision_tower, sees.text = torch.nn.Linear(1000, 1000), text
    sees.get_output_embeddings, sees.config = text.get_output_embeddings, text.config
    assert flops.per_token(sees) == 6 * weights
    experts = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    # Of four experts a token meets two; and the router, 32 x 4.
    met = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 32 * 64 + 32 * 4) + 32 * 100
    assert flops.per_token(experts) == 6 * met


def stored(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        (path / name).write_bytes(b"weights")
        files[name] = checkpoint._settled(path / name)
    (path / "manifest.json").write_text(
        json.dumps({"format": 1, "step": step, "files": files, "copies": [{"host": "node1", "files": files}]})
    )
    return path


def test_checkpoints_are_checked_one_by_one(tmp_path, capsys):
    good, bad = (stored(tmp_path / "checkpoints", step) for step in (3, 9))
    assert cli.main(["check", str(tmp_path)]) == 0
    assert "step 9" in capsys.readouterr().out
    (bad / "model.safetensors").write_bytes(b"weightz")
    assert cli.main(["check", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "step-00000003: good; step 3" in told.out and "sha256 differs" in told.err
    assert cli.main(["check", str(good)]) == 0
    good.rename(tmp_path / "kept")  # whatever its name
    assert cli.main(["check", str(tmp_path / "kept")]) == 0
    (tmp_path / "kept").rename(good.with_name("step-00000004"))
    assert cli.main(["check", str(good.with_name("step-00000004"))]) == 2
    good.with_name("step-00000004").rename(good)
    (bad / "manifest.json").unlink()
    assert cli.main(["check", str(bad)]) == 2
    (tmp_path / "empty").mkdir()
    assert cli.main(["check", str(tmp_path / "empty")]) == 2
    assert "neither a checkpoint" in capsys.readouterr().err


def test_a_log_that_has_grown_large_goes_aside_at_the_start_of_an_attempt(tmp_path):
    script = (
        "import sys; from pathlib import Path; from trainer import environment as e; "
        "e.LOG_BYTES = 10; d = Path(sys.argv[1]); "
        "e.log_to(e.Environment(d, d, 'node1', 1, 0, 2, 0, 2, 0), 'a')"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    for name in ("rank-0.log", "rank-0.log.1"):
        lines = (tmp_path / "logs" / name).read_text().splitlines()
        assert len(lines) == 1 and lines[0].startswith("=== run a, attempt 1, rank 0 of 2 on node1")


def test_a_log_that_grows_large_in_an_attempt_goes_aside_and_no_word_is_lost(tmp_path):
    """Whoever says it: Python, or a library by the descriptor, also one that has only a copy of it."""
    script = """
import os, sys, time
from pathlib import Path
from trainer import environment

environment.LOG_BYTES, environment.LOG_SECONDS, d = 6000, 0.05, Path(sys.argv[1])
environment.log_to(environment.Environment(d, d, "node1", 1, 0, 2, 0, 2, 0), "a")
for number in range(100):
    print("said", number, flush=True)
    os.write(2, b"library %d\\n" % number)
aside, end = d / "logs/rank-0.log.1", time.monotonic() + 20
for number in range(100, 400):
    print("said", number, flush=True)
    os.write(1, b"library %d\\n" % number)
    while number == 300 and not aside.exists() and time.monotonic() < end:
        time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    before, now = ((tmp_path / "logs" / name).read_text() for name in ("rank-0.log.1", "rank-0.log"))
    assert now.startswith("=== run a, attempt 1, rank 0 of 2 on node1, what was before is in rank-0.log.1, ")
    lines = [line for line in (before + now).splitlines() if not line.startswith("===")]
    assert lines == [word for number in range(400) for word in (f"said {number}", f"library {number}")]
    assert not list((tmp_path / "logs").glob("*.new"))


def test_what_a_rank_says_on_a_full_disk_stands_in_its_log_later(tmp_path):
    """More of it than any buffer of Python's holds; and the rank's end is its own, not that of its words."""
    script = """
import errno, io, sys
from pathlib import Path
from trainer import environment

class Filling(io.FileIO):
    full = False
    def write(self, data):
        if Filling.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)

io.FileIO, d = Filling, Path(sys.argv[1])
environment.log_to(environment.Environment(d, d, "node1", 1, 0, 2, 0, 2, 0), "a")
Filling.full = True
for number in range(3000):
    print("line", number, file=sys.stderr if number % 2 else sys.stdout, flush=True)
Filling.full = False
print("room")
Filling.full = True
print("never written")
sys.exit(5)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 5
    lines = (tmp_path / "logs/rank-0.log").read_text().splitlines()
    assert lines[1:] == [*(f"line {number}" for number in range(3000)), "room"]


def test_an_evaluation_shows_that_it_goes_on(monkeypatch):
    """Each micro-batch: a long one must not look like a hang to the launcher."""
    held_out = type("HeldOut", (), {"__len__": lambda _: 7, "valid": np.ones(7)})()
    strategy = types.SimpleNamespace(
        module=None, lockstep=False, sum=lambda total: total, settle=lambda: None
    )
    world = types.SimpleNamespace(rank=0, size=1, device="cpu", first=False, gather=lambda message: [message])
    progress = types.SimpleNamespace(best_loss=0.0, no_better=0, best_step=0, step=4)
    run = types.SimpleNamespace(
        world=world,
        strategy=strategy,
        progress=progress,
        held_out=held_out,
        micro_batch_size=2,
        config=types.SimpleNamespace(micro_batch_size=2),
        balance=Balance(2, 1),
    )
    monkeypatch.setattr(evaluate, "key_dropout", lambda *_: None)
    monkeypatch.setattr(evaluate, "summed_loss", lambda *_: 14.0)
    shown = []
    observer = recorder.Recorder.__new__(recorder.Recorder)
    observer.run, observer.metrics, observer.status = run, None, object()
    observer.pace = types.SimpleNamespace()
    observer.show = lambda **facts: shown.append(facts["state"])
    observer.asked_to_stop = lambda: False
    observer._tell = lambda *_, **told: shown.append(told["loss"])
    observer.evaluate()
    assert shown == ["evaluating"] * 5 + [8.0, "running"]
    # A rank whose status another one writes gives its signs, too: calls of its own, which its launcher counts.
    written = []
    observer.status, shown[:] = None, []
    monkeypatch.setattr(
        recorder, "open", lambda *file, **_: written.append(file[0]) or io.BytesIO(), raising=False
    )
    observer.evaluate()
    assert written == [os.devnull] * 4 and shown[-1] == "running"


@pytest.mark.parametrize(
    ("expected", "left_out", "wanted"),
    [(1, (), ["a"]), (3, (), []), (2, (), ["a"]), (4, ("a", "d"), ["a", "d"])],
)
def test_nobody_waits_for_a_copy_that_cannot_come(expected, left_out, wanted):
    """Without a launcher, where it is not known on which host, where all are there, or where those are left out."""
    absent = checkpoint.Absent("step 9 is on a", wanted)
    place = types.SimpleNamespace(expected=expected, left_out=left_out)
    world = types.SimpleNamespace(environment=place, firsts=[0, 1])
    with pytest.raises(checkpoint.Absent) as raised:
        train._wait_for_a_copy(absent, from_mapping({}), world, None, None)
    assert raised.value is absent


@pytest.mark.parametrize(
    ("settings", "ranks", "steps"),
    [
        ({}, 2, 10),
        ({"comm": "diloco", "sync_every": 60}, 2, 60),  # one of them takes much longer
        ({"comm": "diloco", "sync_every": 60}, 1, 10),  # which meets nobody
        ({"comm": "diloco", "sync_every": 5}, 2, 10),
        ({"comm": "diloco", "sync_every": 100_000}, 2, 500),
    ],
)
def test_the_speed_is_that_of_a_whole_round(settings, ranks, steps):
    run = types.SimpleNamespace(config=from_mapping(settings), world=types.SimpleNamespace(size=ranks))
    assert pace.recent_steps(run, 10) == steps


def test_where_the_time_of_the_last_steps_went():
    def step(number):
        seconds = {"step_seconds": 2.0 + number, "compute_seconds": 0.0, "comm_seconds": 0.0}
        own = [0.5 + number / 3, 1.0]
        return {
            **seconds,
            "rank_seconds": own,
            "rank_compression_seconds": [0.1, 0.0],
            "rank_optimizer_seconds": [0.0, 0.2],
        }

    steps = [step(number % 7) for number in range(1000)]
    went = metrics.Went(10)
    for one in steps:
        went.add(one)
    found, wanted = went.means(), metrics.parts(steps[-10:])
    assert found.keys() == wanted.keys()
    assert all(found[name] == pytest.approx(wanted[name], abs=1e-9) for name in wanted)


# ---- a run's metrics sent from its results ----


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The directory of a run, as train.yml brings it, with two steps, and a server for MLflow's functions."""
    server = Server()
    monkeypatch.setitem(sys.modules, "mlflow", server)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    origins = {"/var/lib/trainyard/data/1/a.jsonl": "a.jsonl"}
    settings = {"run": "r", "dataset": next(iter(origins)), "origins": json.dumps(origins)}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    told(tmp_path, start("20260102T03"), 1, 2)
    return tmp_path, server


def start(launch, event="start", step=0):
    return {"kind": "event", "event": event, "launch": launch, "begun": "b", "step": step}


def told(folder, *records):
    """Have these be all lines of metrics.jsonl; a number is a step, and its decimals tell it from another time's."""
    whole = [
        {**one, "time": 0} if isinstance(one, dict) else {**RECORD, "step": int(one), "loss": one}
        for one in records
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in whole))


def test_what_a_run_has_told_is_sent_once(results, capsys):
    folder, server = results
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    (run,) = server.runs.values()
    assert run["steps"] == [0, 1, 2] and run["tags"] == {"trainyard_begun": "20260102T03"}
    assert run["params"]["dataset"] == "a.jsonl" and "origins" not in run["params"]
    told(folder, start("20260102T03"), 1, 2, start("20260103T03", "resume", 2), 3)
    (folder / "metrics.jsonl").open("a").write('{"kind": "train", "st')  # being written
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert run["steps"] == [0, 1, 2, 2, 3]
    back = start("20260104T03", "resume", 1)  # behind what was sent
    told(folder, start("20260102T03"), 1, back, 2.1, 3.1, 4, 5, 6)
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert run["steps"][5:] == [1, 2, 3, 4, 5, 6] and len(server.runs) == 1
    told(folder, start("20260105T03"), 1)  # another run of this name
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert [one["steps"] for one in server.runs.values()][1:] == [[0, 1]]
    said = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said.pop(1) == "mlflow has all 3 lines"
    assert said == [f"{number} lines sent to mlflow" for number in (3, 2, 6, 2)]


def test_sending_that_breaks_off_goes_on_there(results, capsys, monkeypatch):
    folder, server = results
    whole = server.log_metrics

    def broken(numbers, step):
        if step == 2:
            raise ConnectionError("no route to the service")
        whole(numbers, step)

    monkeypatch.setattr(server, "log_metrics", broken)
    assert cli.main(["send", str(folder), "mlflow"]) == 1
    said = capsys.readouterr().err
    assert (
        "mlflow: ConnectionError: no route to the service; 2 lines of" in said and "Type this again" in said
    )
    monkeypatch.setattr(server, "log_metrics", whole)
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert [one["steps"] for one in server.runs.values()] == [[0, 1, 2]]


def test_nothing_is_sent_that_could_not_be_noted_or_that_another_sends(results, capsys):
    folder, server = results
    kept = folder / "sent-mlflow.json"
    kept.mkdir()
    assert cli.main(["send", str(folder), "mlflow"]) == 2
    assert f"{kept}: Is a directory; expected a file that takes down" in capsys.readouterr().err
    kept.rmdir()
    with kept.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cli.main(["send", str(folder), "mlflow"]) == 2
    assert "another `trainer send` is at work" in capsys.readouterr().err
    assert not server.runs
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert [one["steps"] for one in server.runs.values()] == [[0, 1, 2]]


def test_what_lies_beside_the_metrics_may_be_anything(results, capsys):
    folder, server = results
    os.mkfifo(folder / "summary.json")  # which would be waited for
    (folder / "config.yaml").write_text("[" * 5000)
    (folder / "sent-mlflow.json").write_text('{"begun": "b", "lines": "two"}')
    beginning = start("")
    del beginning["launch"]
    told(folder, beginning, 1)
    assert cli.main(["send", str(folder), "mlflow"]) == 0
    assert [one["steps"] for one in server.runs.values()] == [[0, 1]]
    (folder / "metrics.jsonl").write_text("[" * 200_000 + "\n")
    assert cli.main(["send", str(folder), "mlflow"]) == 2
    assert "metrics.jsonl:1: expected an object" in capsys.readouterr().err


def test_what_is_no_runs_directory_or_no_metrics_is_refused(results, capsys, monkeypatch):
    folder, server = results
    for lines in ("[]\n", '{"kind": "train"}\n', "words\n"):
        (folder / "metrics.jsonl").write_text(lines)
        assert cli.main(["send", str(folder), "mlflow"]) == 2
        assert f"{folder}/metrics.jsonl:1: expected an object with kind" in capsys.readouterr().err
    assert cli.main(["send", str(folder / "none"), "mlflow"]) == 2
    assert "found no metrics.jsonl in it" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert cli.main(["send", str(folder), "wandb"]) == 2
    assert (
        "error: wandb: the package wandb is not installed beside the trainer; install"
        in capsys.readouterr().err
    )
    assert not server.runs
