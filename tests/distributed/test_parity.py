"""One loss curve: a plain loop's, on any number of ranks, with any micro-batch."""

import functools
import itertools
import json
import math
import os

import numpy as np
import peft
import pytest
import ranks
import torch

from trainer import config as configuration
from trainer.data import pack, read
from trainer.data.index import Index
from trainer.model.loss import IGNORE

pytestmark = pytest.mark.distributed


STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "offload", "infinity")


def documents(material):
    """The tokens of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    lines = (material / "data.jsonl").read_text().splitlines()
    return [[*tokenizer(json.loads(line)["text"]).input_ids, tokenizer.eos_token_id] for line in lines]


def in_pieces(material, length):
    """The sequences, each as the pieces of documents in it, where those go on in the next one."""
    stream = [(token, n == 0) for ids in documents(material) for n, token in enumerate(ids)]
    for begin in range(0, len(stream) - 1, length):
        pieces = [[]]
        for token, begins in stream[begin : begin + length + 1]:
            if begins and pieces[-1]:
                pieces.append([])
            pieces[-1].append(token)
        yield pieces


def kept_whole(material, folder, length):
    """The sequences of whole documents, each cut to one at most: which go together is the trainer's to say."""
    from transformers import AutoTokenizer

    chosen = [f"dataset={material}/data.jsonl", f"sequence_length={length}", "overlong=cut"]
    config = configuration.load(material / "run.yaml", chosen)
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    tokenizer.pad_token = tokenizer.eos_token
    packed, _ = pack.prepare(config, read.digests(config), tokenizer, folder)
    for inputs, labels, positions in (packed[k] for k in range(len(packed))):
        begins = [*np.flatnonzero(positions == 0), length]
        pieces = []
        for begin, end in itertools.pairwise(begins):
            count = int((labels[begin:end] != IGNORE).sum())
            if count:
                pieces.append([*inputs[begin : begin + count].tolist(), int(labels[begin + count - 1])])
        yield pieces


def plain_loop(material, steps=12, batch_size=7, length=32, adapter="none", rows=None):
    """What the trainer must equal: no ranks, no micro-batches, no packing: every document's piece runs alone.

    rows: the sequences, as lists of pieces.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    windows = rows or list(in_pieces(material, length))
    torch.manual_seed(0)
    model_config = AutoConfig.from_pretrained(material / "model", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="eager")
    if adapter == "lora":
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(model, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    samples = Index(0, len(windows)).batch(0, steps * batch_size)
    curve = []
    for step in range(steps):
        total, count = 0.0, 0
        for k in samples[step * batch_size : (step + 1) * batch_size]:
            for piece in (torch.tensor(p) for p in windows[k] if len(p) > 1):
                logits = model(piece[None, :-1]).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum")
                count += len(piece) - 1
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        done = (step - 3) / (steps - 3)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * ((step + 1) / 3 if step < 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        optimizer.step()
        curve.append((total / count).item())
    return curve


@pytest.fixture(scope="module")
def reference(material):
    return plain_loop(material)


def test_one_process_equals_a_plain_loop(reference, whole):
    assert whole == pytest.approx(reference, rel=1e-5)
    assert whole[-1] < whole[0] - 1  # it learns


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks(material, reference, tmp_path, size):
    """7 sequences on 2 and 3 ranks are uneven shares: 4 + 3, 3 + 2 + 2."""
    assert ranks.run(tmp_path, size, material / "run.yaml") == pytest.approx(reference, rel=1e-5)
    record = ranks.records(tmp_path / "node1")[0]
    assert record["shares"] == {2: [4, 3], 3: [3, 2, 2]}[size]
    assert record["wire_bytes"] > 0


def test_any_micro_batch(material, reference, tmp_path):
    found = ranks.run(tmp_path, 2, material / "run.yaml", "micro_batch_size=1", one_host=True)
    assert found == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "offload", "infinity"])
@pytest.mark.parametrize(
    ("size", "micro_batch"), [pytest.param(2, 1, marks=pytest.mark.full), (2, 4), (3, 2)]
)
def test_any_strategy(material, reference, tmp_path, strategy, size, micro_batch):
    """Accumulation over 4, 1 and 2 micro-batches; of the 4 the second rank has 3, and one that counts nothing."""
    chosen = (f"strategy={strategy}", f"micro_batch_size={micro_batch}")
    assert ranks.run(tmp_path, size, material / "run.yaml", *chosen) == pytest.approx(reference, rel=1e-5)
    record = ranks.records(tmp_path / "node1")[0]
    found = record["wire_bytes"] / (4 * 37120 * (size - 1) / size)  # in units of all weights
    accumulated = -(-record["shares"][0] // micro_batch)
    gathers = {"zero1": 1, "zero2": 1}.get(strategy, 2 * accumulated)
    reductions = 1 if strategy == "zero1" else accumulated
    if gathers > 1:  # what is outside of the blocks is gathered once a micro-batch
        gathers -= accumulated * (300 * 32 + 64 * 32 + 2 * 32) / 37120
    assert found == pytest.approx(gathers + reductions, rel=0.03)  # parts are padded to one size


@pytest.fixture(scope="module")
def references(material):
    """Eight sequences a step, by adapter."""
    return {adapter: plain_loop(material, batch_size=8, adapter=adapter) for adapter in ("none", "lora")}


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "fsdp"),
        *(
            pytest.param(3, one, marks=pytest.mark.full)
            for one in ("ddp", "fsdp", "zero1", "zero2", "offload", "infinity")
        ),
    ],
)
def test_uneven_shares_of_an_adapter(material, tmp_path, size, strategy):
    """Each rank's part of the sum counts by its tokens, in gradients that are the adapter's alone.

    Of its 4 rows two of three ranks hold 2, and the third none.
    """
    expected = plain_loop(material, adapter="lora")
    chosen = (
        f"strategy={strategy}",
        "adapter=lora",
        "lora_rank=4",
        "balance=" + {2: "5,2", 3: "4,1,2"}[size],
    )
    assert ranks.run(tmp_path, size, material / "run.yaml", *chosen) == pytest.approx(expected, rel=1e-5)
    assert abs(expected[-1] - expected[0]) > 0.01
    assert ranks.records(tmp_path / "node1")[0]["shares"] == {2: [5, 2], 3: [4, 1, 2]}[size]


@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [
        ("none", "ddp"),
        *(
            pytest.param(adapter, strategy, marks=pytest.mark.full)
            for adapter, strategy in itertools.product(("none", "lora"), STRATEGIES)
            if (adapter, strategy) != ("none", "ddp")
        ),
    ],
)
def test_documents_that_are_kept_whole_on_four_unlike_ranks(material, tmp_path, adapter, strategy):
    """Each accumulates as many single sequences as its share has."""
    rows = list(kept_whole(material, tmp_path, 32))
    cut = [ids[:32] for ids in documents(material)]
    assert sorted(itertools.chain(*rows)) == sorted(cut) and max(map(len, cut)) == 32
    expected = plain_loop(material, batch_size=8, adapter=adapter, rows=rows)
    chosen = (f"strategy={strategy}", f"adapter={adapter}", "lora_rank=4", "overlong=cut", "batch_size=8")
    found = ranks.run(tmp_path, 4, material / "run.yaml", *chosen, "balance=4,2,1,1", "micro_batch_size=1")
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[-1] - found[0]) > 0.01


@pytest.fixture(scope="module")
def references_alone(material):
    """Eight documents of up to 64 tokens a step, or parts of them, each for itself."""
    parts = [[ids[at : at + 65]] for ids in documents(material) for at in range(0, len(ids) - 1, 64)]
    assert max(map(len, documents(material))) > 65 > 10 > min(map(len, documents(material)))
    return {
        adapter: plain_loop(material, batch_size=8, adapter=adapter, rows=parts)
        for adapter in ("none", "lora")
    }


@pytest.mark.parametrize(
    ("adapter", "strategy", "size"),
    [
        ("none", "ddp", 1),
        ("none", "fsdp", 3),
        ("lora", "ddp", 4),
        *(
            pytest.param(*chosen, marks=pytest.mark.full)
            for chosen in itertools.product(("none", "lora"), STRATEGIES, (1, 2, 4))
            if chosen not in (("none", "ddp", 1), ("lora", "ddp", 4))
        ),
    ],
)
def test_documents_that_are_not_packed(material, references_alone, tmp_path, adapter, strategy, size):
    """Steps are as wide as their longest document; shares are uneven, accumulated over 4 to 8 micro-batches."""
    shares = {1: "8", 2: "5,3", 3: "4,1,3", 4: "4,2,1,1"}[size]
    chosen = (f"strategy={strategy}", f"adapter={adapter}", "lora_rank=4", "packing=false", "batch_size=8")
    chosen += ("sequence_length=64", f"balance={shares}", "micro_batch_size=1")
    patch = {("trainer.data.pack", "STRIDE"): 8}
    found = ranks.run(tmp_path, size, material / "run.yaml", *chosen, patch=patch)
    assert found == pytest.approx(references_alone[adapter], rel=1e-5)
    assert abs(found[-1] - found[0]) > 0.01


@pytest.mark.parametrize("most", [3, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_are_many_connect_when_they_first_talk(material, references, tmp_path, most):
    """And learn the same; of fewer each has met all the others before the first step."""
    patch = {
        ("trainer.world", "ALL_TO_ALL"): most,
        ("torch.distributed", "init_process_group"): functools.partial(_noted, tmp_path / "lazy"),
    }
    chosen = ("strategy=ddp", "adapter=none", "batch_size=8")
    found = ranks.run(tmp_path, 4, material / "run.yaml", *chosen, patch=patch)
    assert found == pytest.approx(references["none"], rel=1e-5)
    assert (tmp_path / "lazy").read_text() == ("1" * 4 if most == 3 else "")


def _noted(file, *how, **more):
    from torch import distributed

    with file.open("a") as out:
        out.write(os.environ.get("TORCH_GLOO_LAZY_INIT", ""))
    return distributed.init_process_group_really(*how, **more)


def test_a_step_is_as_wide_as_its_longest_document_on_all_ranks(material, tmp_path):
    chosen = ("packing=false", "sequence_length=64", "batch_size=3", "balance=auto")
    patch = {
        ("trainer.data.pack", "STRIDE"): 8,
        ("trainer.loop", "train_step"): functools.partial(_looked_at, tmp_path),
    }
    ranks.run(tmp_path, 2, material / "run.yaml", *chosen, patch=patch)
    told = [(tmp_path / f"widths-{rank}").read_text().split() for rank in range(2)]
    assert told[0] == told[1] and len(set(told[0])) > 2


def _looked_at(folder, run, observer):
    """A step, of which the balance is told what whole sequences would have taken."""
    from trainer import loop

    learnt, learn = [], run.balance.learn
    run.balance.learn = lambda *told: learnt.append(told) or learn(*told)
    report = loop.train_step_really(run, observer)
    del run.balance.learn
    before = run.progress.cursor - run.config.batch_size
    lengths = run.packed.lengths(run.index.batch(before, run.config.batch_size))
    assert report.computed == sum(lengths)
    assert run.width == min(64, math.ceil(max(lengths) / 8) * 8)
    own = report.rank_compression_seconds, report.rank_optimizer_seconds
    besides = [sum(both) for both in zip(*own, strict=True)]
    expected = [[seconds * 64 / run.width for seconds in some] for some in (report.rank_seconds, besides)]
    assert learnt == [tuple(map(pytest.approx, expected))]
    with (folder / f"widths-{run.world.rank}").open("a") as file:
        file.write(f"{run.width}\n")
    return report


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "micro_batch"), [(1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_the_whole_matrix(material, references, tmp_path, adapter, strategy, size, micro_batch):
    """Even shares on 1, 2, 2, 4, 4 ranks, accumulated over 4, 1, 4, 1, 2 micro-batches; all weights, and an adapter."""
    chosen = (f"strategy={strategy}", f"adapter={adapter}", "lora_rank=4", "batch_size=8")
    found = ranks.run(tmp_path, size, material / "run.yaml", *chosen, f"micro_batch_size={micro_batch}")
    assert found == pytest.approx(references[adapter], rel=1e-5)
    assert abs(found[-1] - found[0]) > 0.01
    assert ranks.records(tmp_path / "node0")[0]["shares"] == [8 // size] * size


@pytest.mark.parametrize("strategy", ["offload", "infinity"])
def test_any_strategy_on_one_rank(material, whole, tmp_path, strategy):
    assert ranks.run(tmp_path, 1, material / "run.yaml", f"strategy={strategy}") == pytest.approx(
        whole, rel=1e-5
    )


def test_gradients_travel_in_several_buckets(material, reference, tmp_path):
    """The small model fits one bucket; with buckets of a few kB several are under way at once."""
    patch = {("trainer.strategies.ddp", "BUCKET_BYTES"): 4096}
    assert ranks.run(tmp_path, 2, material / "run.yaml", patch=patch) == pytest.approx(reference, rel=1e-5)


def test_model_loads_in_plain_transformers(material, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ranks.run(tmp_path, 1, material / "run.yaml", "steps=2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "node0" / "model", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "node0" / "model")
    ids = tokenizer("the ship sails", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "the ship sails"
    assert torch.isfinite(model(ids).logits).all()
    summary = json.loads((tmp_path / "node0" / "summary.json").read_text())
    assert summary["state"] == "finished" and len(summary["losses"]) == 2 and summary["world"]["size"] == 1
