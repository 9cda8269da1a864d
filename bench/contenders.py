"""`python -m bench.contenders NAME DIR`: one contender on the material in DIR; prints its speeds and loss as JSON.

What is common is given to each alike: weights, batch, length, steps, learning rate, threads, the device and in what
products are computed. The rest is each one's own default.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.measure import Case

IGNORE = -100


class Clock:
    """Notes the time and this process's CPU time at the end of each step."""

    def __init__(self, case: Case):
        self.case = case
        self.ends: list[tuple[float, float]] = []

    def tick(self) -> None:
        if on_gpu(self.case):
            torch.cuda.synchronize()
        self.ends.append((time.perf_counter(), time.process_time()))

    def speeds(self, tokens: list[int]) -> dict[str, float]:
        """The speeds over the timed steps; `tokens` with a loss, of each step."""
        first, last = self.case.untimed, self.case.steps
        timed = sum(tokens[first:last])
        seconds, cpu = (b - a for a, b in zip(self.ends[first - 1], self.ends[last - 1], strict=True))
        return {"speed": timed / seconds, "cpu_speed": timed / cpu}


def on_gpu(case: Case) -> bool:
    """Whether the contenders train on the first GPU."""
    return case.device != "cpu" and torch.cuda.is_available()


def ours(case: Case, folder: Path, *settings: str) -> dict:
    """`trainer train`, as an operator runs it: metrics, checkpoint and model are written."""
    from trainer import cli, metrics

    clock, steps = Clock(case), []
    write = metrics.Metrics.write

    def noted(self, record):
        write(self, record)
        if record["kind"] == "train":
            clock.tick()
            steps.append(record)

    metrics.Metrics.write = noted
    os.environ["TRAINYARD_RUN_DIR"] = tempfile.mkdtemp(prefix="run-", dir=folder)
    os.environ["TRAINYARD_CACHE_DIR"] = str(folder / "cache")
    code = cli.main(["train", str(folder / "run.yaml"), f"dtype={case.dtype}", *settings])
    if code:
        sys.exit(code)
    return {**clock.speeds([one["tokens"] for one in steps]), "loss": steps[: case.compared][-1]["loss"]}


def ours_compiled(case: Case, folder: Path) -> dict:
    return ours(case, folder, "compile=true")


def watched(case: Case, folder: Path) -> dict:
    """The same with a page for Prometheus, read each second: Prometheus itself does so each 15 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reader = subprocess.Popen([sys.executable, "-c", READER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        result = ours(case, folder, f"metrics_port={port}")
    finally:
        reader.terminate()
        pages = len(reader.communicate()[0].split())
    if pages == 0:
        sys.exit("nobody could read the page")
    return result


READER = """
import sys, time, urllib.request
while True:
    time.sleep(1)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=5).read()
    except OSError:
        continue
    if b"trainyard_train_loss" in page:
        print(len(page), flush=True)
"""


def bare(case: Case, folder: Path, compiled: bool = False) -> dict:
    """The limit: a loop of a few lines, with all batches ready in memory."""
    device = torch.device("cuda" if on_gpu(case) else "cpu")
    batches = np.load(folder / "batches.npz")
    inputs, labels, positions = (
        torch.from_numpy(batches[n]).to(device) for n in ("inputs", "labels", "positions")
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).train()
    if compiled:
        model.compile()
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bfloat16")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), fused=True)
    clock, losses = Clock(case), []
    for step in range(case.steps):
        with narrow:
            output = model(input_ids=inputs[step], position_ids=positions[step], use_cache=False)
        loss = torch.nn.functional.cross_entropy(output.logits.float().flatten(0, 1), labels[step].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        clock.tick()
    return {**clock.speeds((labels != IGNORE).sum((1, 2)).tolist()), "loss": losses[: case.compared][-1]}


def bare_compiled(case: Case, folder: Path) -> dict:
    return bare(case, folder, compiled=True)


def hf_compiled(case: Case, folder: Path) -> dict:
    return hf_trainer(case, folder, torch_compile=True)


def hf_trainer(case: Case, folder: Path, **settings) -> dict:
    """transformers' Trainer, on the packed sequences where there are no records, else on padded records."""
    from transformers import (
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if case.data == "records":
        texts = [json.loads(line)["text"] for line in (folder / "records.jsonl").open()]
        data = [tokenizer(text, truncation=True, max_length=case.sequence_length) for text in texts]
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    else:
        data, collate = _shifted(np.load(folder / "batches.npz")), default_data_collator
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = TrainingArguments(**_arguments(case, folder), **settings)
    trainer = Trainer(model, arguments, collate, data)
    return _clocked(case, trainer)


def sft(case: Case, folder: Path) -> dict:
    """TRL's SFTTrainer as it is: it computes activations again in backward, and pads records."""
    return _sft(case, folder)


def sft_kept(case: Case, folder: Path) -> dict:
    """TRL's SFTTrainer with activations kept, as ours are."""
    return _sft(case, folder, gradient_checkpointing=False)


def sft_packed(case: Case, folder: Path) -> dict:
    """The same with packing."""
    return _sft(case, folder, packing=True, gradient_checkpointing=False)


def _sft(case: Case, folder: Path, **settings) -> dict:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if case.data == "records":
        data = [json.loads(line) for line in (folder / "records.jsonl").open()]
    else:  # packed already; where a document begins it does not want to know
        inputs = np.load(folder / "batches.npz")["inputs"]
        data = [{"input_ids": row} for row in inputs.reshape(-1, inputs.shape[-1]).tolist()]
    arguments = SFTConfig(**_arguments(case, folder), max_length=case.sequence_length, **settings)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    return _clocked(case, trainer)


def _arguments(case: Case, folder: Path) -> dict:
    return {
        "output_dir": str(folder / "peer"),
        "per_device_train_batch_size": case.batch_size,
        "max_steps": case.steps,
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": case.steps,  # one checkpoint, at the end, as ours
        "save_total_limit": 1,
        "use_cpu": not on_gpu(case),
        "bf16": case.dtype == "bfloat16",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _shifted(batches) -> list[dict]:
    """The packed sequences as transformers' models shift them: the label of a token is the token itself."""
    rows = [batches[name].reshape(-1, batches[name].shape[-1]) for name in ("inputs", "labels", "positions")]
    found = []
    for inputs, labels, positions in zip(*rows, strict=True):
        own = np.full_like(labels, IGNORE)
        own[1:] = labels[:-1]
        found.append({"input_ids": inputs, "labels": own, "position_ids": positions})
    return found


def _clocked(case: Case, trainer) -> dict:
    """Train, counting the tokens with a loss in each batch and the time at each step's end."""
    from transformers import TrainerCallback

    tokens, clock = [], Clock(case)
    collate = trainer.data_collator

    def counted(rows):
        batch = collate(rows)
        tokens.append(int((batch["labels"][:, 1:] != IGNORE).sum()))
        return batch

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.tick()

    trainer.data_collator = counted
    trainer.add_callback(Tick())
    trainer.train()
    return {**clock.speeds(tokens), "loss": trainer.state.log_history[-1]["train_loss"]}


CONTENDERS = {
    "bare": bare,
    "bare-compiled": bare_compiled,
    "ours": ours,
    "ours-compiled": ours_compiled,
    "watched": watched,
    "hf": hf_trainer,
    "hf-compiled": hf_compiled,
    "sft": sft,
    "sft-kept": sft_kept,
    "sft-packed": sft_packed,
}


def main(name: str, folder: Path) -> None:
    case = Case(**json.loads((folder / "case.json").read_text()))
    torch.set_num_threads(case.threads)
    found = CONTENDERS[name](case, folder)
    if on_gpu(case):
        found["peak"] = torch.cuda.max_memory_allocated()
    print(json.dumps(found))


main(sys.argv[1], Path(sys.argv[2]))
