"""Chats, answers, mixes and held-out data, on any number of ranks."""

import contextlib
import datetime
import json
import os
import shutil
import time

import pytest
import ranks
import torch

from trainer.errors import BadInput

pytestmark = pytest.mark.distributed

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": "where will " + "the ship " * (n % 4) + "land"},
        {"role": "assistant", "content": "nobody on board knows " * (n % 3 + 1)},
    ]
    for n in range(40)
]


@pytest.fixture(scope="module")
def chats(material, tmp_path_factory):
    """The overrides for chats and texts, and a model with a template."""
    folder = tmp_path_factory.mktemp("chats")
    shutil.copytree(material / "model", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in CHATS))
    return [
        f"model={folder}/model",
        f"dataset={folder}/chats.jsonl",
        "loss_on=answers",
        "overlong=refuse",
        "sequence_length=64",
    ]


def test_the_loss_of_answers_equals_a_plain_model_s(chats, material, tmp_path):
    """A step over all sequences: the mean over the answers' tokens, every chat run alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = chats[0].partition("=")[2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model_config = AutoConfig.from_pretrained(folder, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = AutoModelForCausalLM.from_config(model_config)
    total = count = 0
    for question, answer in CHATS:
        begin = tokenizer(f"user: {question['content']}</s>assistant: ").input_ids
        ids = begin + tokenizer(f"{answer['content']}</s>").input_ids
        logits = model(torch.tensor([ids])).logits[0, len(begin) - 1 : -1]
        labels = torch.tensor(ids[len(begin) :])
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    ranks.run(tmp_path / "count", 1, material / "run.yaml", *chats, "steps=1")
    sequences = json.loads((tmp_path / "count" / "node0" / "summary.json").read_text())["sequences"]
    for size in (1, 3):
        (loss,) = ranks.run(
            tmp_path / str(size), size, material / "run.yaml", *chats, "steps=1", f"batch_size={sequences}"
        )
        assert loss == pytest.approx(total / count, rel=1e-5)
        record = ranks.records(tmp_path / str(size) / "node0")[0]
        assert record["tokens"] == count


def test_the_speed_that_is_shown_is_that_of_the_last_steps_together(chats, material, tmp_path):
    """Some batches have more tokens of answers than others, in steps that take as long."""
    ranks.run(tmp_path, 1, material / "run.yaml", *chats, "steps=14", "batch_size=1", "micro_batch_size=1")
    rows = ranks.records(tmp_path / "node0")[-10:]
    tokens, seconds = (sum(row[name] for row in rows) for name in ("tokens", "step_seconds"))
    assert abs(rows[-1]["tokens"] - tokens / 10) > 0.02 * tokens / 10
    assert ranks.status(tmp_path / "node0")["tokens_per_second"] == pytest.approx(tokens / seconds)
    line = next(
        one for one in (tmp_path / "node0/logs/rank-0.log").read_text().splitlines() if "step 14/14" in one
    )
    assert f"{tokens / seconds:,.0f} tokens/s" in line


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_mix_is_the_same_on_any_number_of_ranks_and_after_a_stop(chats, material, tmp_path, packing):
    mix = [
        f"packing={packing}",
        *(one for one in chats if not one.startswith("dataset")),
        f"{chats[1]},{material}/data.jsonl",
        "dataset_weights=2,1",
        "validation_split=0.2",
        "overlong=split",
        "steps=6",
        "checkpoint_every=0",
    ]
    curve = ranks.run(tmp_path / "1", 1, material / "run.yaml", *mix)
    assert ranks.run(tmp_path / "2", 2, material / "run.yaml", *mix) == pytest.approx(curve, rel=1e-5)
    ranks.run(tmp_path / "3", 1, material / "run.yaml", *mix, codes=[75], stop_in=3)
    assert ranks.run(tmp_path / "3", 1, material / "run.yaml", *mix) == curve
    evaluations = [
        [record["loss"] for record in ranks.records(tmp_path / name / "node0", "eval")]
        for name in ("1", "2", "3")
    ]
    assert evaluations[0] and evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    assert evaluations[0] == evaluations[2]


def slow_on_the_second_host(*words):
    from trainer.data.pack import prepare_really

    if os.environ["TRAINYARD_HOST"] == "node1":
        time.sleep(8)
        if os.environ.get("TRAINYARD_LAUNCH") == "refuses":
            raise BadInput("data.jsonl:3: no field 'text'")
    return prepare_really(*words)


@pytest.mark.parametrize("launch", ["", "refuses"])
def test_a_host_that_tokenises_far_longer_than_the_others_is_waited_for(material, tmp_path, launch):
    """It would be lost each time, and all that it had done. What it refuses at last all say."""
    pair = ranks.Ranks(
        tmp_path,
        2,
        material / "run.yaml",
        "steps=1",
        patch={
            ("trainer.world", "PATIENCE"): datetime.timedelta(seconds=4),
            ("trainer.data.pack", "prepare"): slow_on_the_second_host,
        },
        launch=launch,
    )
    assert pair.codes() == ([2, 2] if launch else [0, 0]), pair.log()
    if launch:
        assert "error: node1: data.jsonl:3: no field 'text'" in pair.log()


def patience(world, config):
    """In days: of each wait, of those for data under plain torchrun and under a launcher, and afterwards."""

    def days():
        options = world.control._get_backend(torch.device("cpu")).options
        return options._timeout / datetime.timedelta(days=1)

    found = [days()]
    for launcher in ({}, {"TRAINYARD_LAUNCHER": "1"}):
        os.environ.update(launcher)
        with world.unhurried():
            found.append(days())
    with contextlib.suppress(BadInput), world.unhurried():
        raise BadInput("")
    return [*found, days()]


def test_hosts_are_waited_for_so_long_for_their_data_alone(tmp_path):
    assert ranks.together(tmp_path, patience, [0, 1]) == [[1 / 12, 1, 7, 1 / 12]] * 2


def test_the_model_card_says_what_was_cut(material, tmp_path):
    for overlong in ("cut", "split"):
        ranks.run(tmp_path / overlong, 1, material / "run.yaml", "steps=1", f"overlong={overlong}")
    cut, split = (tmp_path / one / "node0" / "model" / "README.md" for one in ("cut", "split"))
    facts = json.loads((cut.parents[1] / "summary.json").read_text())
    documents, tokens = facts["documents_cut"], facts["tokens_cut"]
    assert f"- cut to 32 tokens: {documents} documents; {tokens:,} tokens left out\n" in cut.read_text()
    assert documents > 9 and tokens > 999 and "- cut to" not in split.read_text()
    assert "held-out" not in cut.read_text()

    ranks.run(tmp_path / "held", 1, material / "run.yaml", "steps=1", "overlong=cut", "validation_split=0.3")
    held = tmp_path / "held" / "node0"
    facts = json.loads((held / "summary.json").read_text())
    others, lost = facts["held_out_documents_cut"], facts["held_out_tokens_cut"]
    assert (facts["documents_cut"] + others, facts["tokens_cut"] + lost) == (documents, tokens) and others > 3
    said = f"- of the held-out data, cut to 32 tokens: {others} documents; {lost:,} tokens left out\n"
    assert said in (held / "model" / "README.md").read_text()
    said = f"{others} held-out documents were cut to 32 tokens; {lost:,} are lost"
    assert said in (held / "logs" / "rank-0.log").read_text()


def test_fields_that_are_not_read_are_told_by_the_log_of_the_first_rank(material, tmp_path):
    rows = [json.dumps({"text": "the ship sails on " * 20, "source": "a"})] * 9
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    ranks.run(tmp_path / "run", 1, material / "run.yaml", "steps=1", f"dataset={tmp_path}/a.jsonl")
    said = (tmp_path / "run" / "node0" / "logs" / "rank-0.log").read_text()
    assert "not read of the data: source\n" in said
