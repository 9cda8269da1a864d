"""Tokens that are kept: what they depend on, who makes them, and how far that is."""

import re
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpora import prepared, spans, write_lines

from trainer.config import from_mapping
from trainer.data import cache, pack, read, tokenizer
from trainer.data import records as fields


def test_what_describes_tools_counts_as_text_that_is_tokenised_at_once():
    tools = [{"type": "function", "function": {"name": "look", "description": "x" * 4000}}]
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": tools}]
    one = fields.Sample(Path("a"), 1, messages=asked, tools=tools)
    placed = [types.SimpleNamespace(sample=one)] * 1000
    batches = list(cache._batches(placed))
    assert (
        sum(map(len, batches)) == 1000 and cache.BATCH > 8000 and len(batches[0]) <= cache.BATCH // 8000 + 1
    )


def test_how_far_the_tokenising_is_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BATCH", 40)
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        write_lines(tmp_path / f"set/{name}.jsonl", [{"text": f"the text of number {n}"} for n in range(10)])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words"] * 20}), tmp_path / "set/c.parquet")
    config = from_mapping({"dataset": str(tmp_path / "set"), "vocab_size": 300, "sequence_length": 8})
    tokens = tokenizer.wrap(tokenizer.train(config))
    told = []
    pack.prepare(config, read.digests(config), tokens, tmp_path / "cache", told.append)
    found = [re.fullmatch(r"tokenising set: (\d+) %, \d+ s left", words) for words in told]
    percents = [int(one[1]) for one in found]
    assert len(percents) > 5 and percents == sorted(percents) and percents[-1] == 100
    assert any(20 <= percent <= 30 for percent in percents) and any(
        45 <= percent <= 55 for percent in percents
    )

    told.clear()
    few = from_mapping({**vars(config), "max_samples": 10})
    pack.prepare(few, read.digests(few), tokens, tmp_path / "cache", told.append)
    assert "100 %" in told[-1] and any(" 50 %" in words or " 40 %" in words for words in told)
    told.clear()
    pack.prepare(few, read.digests(few), tokens, tmp_path / "cache", told.append)
    assert told == []  # it is there


def test_the_cache_is_used_and_a_broken_one_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some words to learn from, and some more\n" * 20)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 8})
    first, _ = prepared(config, tmp_path / "cache")
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    made = directory.stat().st_mtime_ns
    prepared(config, tmp_path / "cache")
    assert directory.stat().st_mtime_ns == made
    interrupted = directory.with_name(directory.name + ".tmp")  # as a kill leaves it
    directory.rename(interrupted)
    again, _ = prepared(config, tmp_path / "cache")
    assert first.digest == again.digest and not interrupted.exists()
    assert [len(list(directory.glob(kind))) for kind in ("held_out", "train/stream-8")] == [0, 1]


def test_what_another_host_has_made_is_seen_late_and_taken(tmp_path, monkeypatch):
    """As over NFS, where a name that was not there seems not to be for a while, until the folder changes."""
    final, mkdir = tmp_path / "tokens", Path.mkdir

    def changes(path, *words, **more):
        mkdir(path, *words, **more)
        if path.suffix == ".tmp":
            mkdir(final)

    monkeypatch.setattr(Path, "mkdir", changes)
    assert cache.made(final, lambda temporary: pytest.fail("made twice")) == final
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"sequence_length": 16}, False),
        ({"seed": 3}, False),
        ({"epochs": 2}, False),
        ({"overlong": "cut"}, True),
        ({"max_samples": 3}, True),
        ({"validation_split": 0.3}, True),
        ({"text_field": "other"}, True),
        ({"packing": False}, False),
    ],
)
def test_what_the_tokens_depend_on_is_in_their_name(tmp_path, changes, anew):
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": f"words {n}", "other": "more words"} for n in range(20)]
    )
    config = {"dataset": path, "sequence_length": 8}
    tokens = tokenizer.wrap(tokenizer.train(from_mapping({**config, "vocab_size": 300})))
    for settings in (config, {**config, **changes}):
        asked = from_mapping(settings)
        pack.prepare(asked, read.digests(asked), tokens, tmp_path / "cache")
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == (2 if anew else 1)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"overlong": "cut"}, {"sequence_length": 16}),  # what was cut off is there again
        ({"validation_split": 0.3}, {"seed": 3}),
        ({"loss_on": "all"}, {"loss_on": "answers"}),
    ],
)
def test_so_is_what_they_depend_on_only_with_another_setting(tmp_path, settings, change):
    records = [{"instruction": f"say {n}", "output": f"so it is said, and at length, {n}"} for n in range(20)]
    config = {"dataset": write_lines(tmp_path / "a.jsonl", records), "sequence_length": 8, **settings}
    tokens = tokenizer.wrap(tokenizer.train(from_mapping({**config, "vocab_size": 300})))
    found = []
    for keys in (config, {**config, **change}):
        asked = from_mapping(keys)
        found.append(pack.prepare(asked, read.digests(asked), tokens, tmp_path / "cache")[0])
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == 2
    assert found[0].digest != found[1].digest


def test_a_tokenizer_that_begins_every_text_keeps_to_it(tmp_path):
    from tokenizers.processors import TemplateProcessing

    path = write_lines(tmp_path / "a.jsonl", [{"text": f"words {n}"} for n in range(9)])
    config = from_mapping({"dataset": path, "vocab_size": 300, "sequence_length": 16, "overlong": "refuse"})
    tokens = tokenizer.wrap(tokenizer.train(config))
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.END_OF_TEXT} $A", special_tokens=[(tokenizer.END_OF_TEXT, 0)]
    )
    assert tokens("x").input_ids[0] == tokens.bos_token_id
    packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    inputs, _, positions = packed[0]
    assert all(inputs[begin] == tokens.bos_token_id for begin, _ in spans(positions))
    assert packed.token_count == sum(len(tokens(f"words {n}").input_ids) + 1 for n in range(9))
