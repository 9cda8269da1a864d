"""`python -m bench.material DIR`: what the contenders of one table need, into DIR, by its case.json.

model/ (random weights and a tokenizer), run.yaml (the trainer's configuration), cache/ (the tokens), batches.npz (the
packed sequences of every step, as the trainer takes them), and records.jsonl where the case is about records.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measure import Case
from trainer import config as configuration
from trainer.data import index, pack, read
from trainer.data import tokenizer as own_tokenizer

TOKENS = 2048  # of the tokenizer


def main(folder: Path) -> None:
    case = Case(**json.loads((folder / "case.json").read_text()))
    dataset = "austen"
    if case.data == "records":
        dataset = str(folder / "records.jsonl")
        text = (read.SHIPPED / "austen.txt").read_text(encoding="utf-8")
        records = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
        Path(dataset).write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    config = configuration.from_mapping(
        {
            "model": str(folder / "model"),
            "dataset": dataset,
            "device": case.device,
            "threads": case.threads,
            "sequence_length": case.sequence_length,
            "batch_size": case.batch_size,
            "micro_batch_size": case.batch_size,
            "steps": case.steps,
            "lr": case.lr,
            "lr_schedule": "constant",
            "checkpoint_every": 0,
        }
    )
    names = ("model", "dataset", "device", "threads", "sequence_length", "batch_size", "micro_batch_size")
    names += ("steps", "lr", "lr_schedule", "checkpoint_every")
    (folder / "run.yaml").write_text("".join(f"{name}: {getattr(config, name)}\n" for name in names))

    tokenizer = own_tokenizer.wrap(own_tokenizer.train(configuration.from_mapping({"vocab_size": TOKENS})))
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.width,
            intermediate_size=case.width * 11 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=case.width // 64,
            max_position_embeddings=case.sequence_length,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            use_cache=False,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    packed, _ = pack.prepare(config, read.digests(config), tokenizer, folder / "cache")
    order = index.Index(config.seed, packed.sizes).batch(0, case.steps * case.batch_size)
    arrays = zip(*(packed[k] for k in order), strict=True)
    inputs, labels, positions = (np.stack(one).reshape(case.steps, case.batch_size, -1) for one in arrays)
    np.savez(folder / "batches.npz", inputs=inputs, labels=labels, positions=positions)


main(Path(sys.argv[1]))
