"""Reading, packing, holding out, mixing and indexing."""

import collections
import csv
import datetime
import errno
import gzip
import io
import itertools
import json
import random
import re
import shutil
import subprocess
import types
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trainer.config import check_together, from_mapping
from trainer.data import cache, files, hub, index, pack, read, tokenizer
from trainer.data import records as fields
from trainer.errors import BadInput
from trainer.plan import work


def sampled(config):
    return [sample for one in read.everything(config) for sample in read.samples(one, config)]


def pairs(config):
    return [(sample.text, sample.ends) for sample in sampled(config)]


def prepared(config, folder):
    """(training set, held-out set) with a tokenizer trained on it."""
    tokens = tokenizer.wrap(tokenizer.train(config))
    return pack.prepare(config, read.digests(config), tokens, folder)


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


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


CHAT = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
CALL = (
    '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]}\n'
)
CALLS = '{"messages": [{"role": "assistant", "tool_calls": %s}]}\n'

REFUSED = {
    "not JSON": ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
    "not an object": ("a.jsonl", "[1]\n", 'a.jsonl:1: expected a JSON object like {"text"'),
    "no such field": (
        "a.jsonl",
        '\n{"body": "x", "id": 1}\n',
        "a.jsonl:2: no field 'text'; its fields are: body, id. Set text_field",
    ),
    "no fields": ("a.jsonl", "{}\n", "its fields are: none"),
    "not a text": ("a.jsonl", '{"text": null}\n', "a.jsonl:1: field 'text': expected a text, found null"),
    "half a character": ("a.jsonl", '{"text": "\\ud800"}\n', "field 'text': half a character"),
    "too deep": ("a.jsonl", "[" * 100000 + "\n", "a.jsonl:1: not JSON"),
    "a number without end": ("a.jsonl", '{"text": ' + "9" * 5000 + "}\n", "a.jsonl:1: not JSON: Exceeds"),
    "not UTF-8": ("a.txt", b"good\nand caf\xe9\n", "a.txt:2: not UTF-8: byte 0xe9 at column 8"),
    "not UTF-8 either": ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8"),
    "empty text": ("a.txt", "", "no text in it"),
    "blank text": ("a.txt", " \n\n", "no text in it"),
    "empty JSONL": ("a.jsonl", "\n", "no text in it"),
    "another kind of file": ("a.csv", "x", "ends in .txt, .jsonl or .parquet"),
    "a list of records": (
        "a.jsonl",
        '[{"text": "x"}]\n',
        'found [{"text": "x"}]; a list, or records over several lines, become so by: jq -c',
    ),
    "a list of many lines": (
        "a.jsonl",
        '[\n{"text": "x"}\n]\n',
        "a.jsonl:1: not JSON: Expecting value; expected one JSON object a line; a list, or records over",
    ),
    "a record of many lines": (
        "a.jsonl",
        '{\n"text": "x"}\n',
        "; a list, or records over several lines, become so by: jq -c 'arrays[], objects' a.jsonl > NEW.jsonl",
    ),
    "UTF-16": (
        "a.txt",
        b"\xff\xfex\0\n\0",
        "a.txt:1: not UTF-8: it is UTF-16; convert it, for example: iconv -f UTF-16LE -t UTF-8 < a.txt > NEW.txt",
    ),
    "UTF-16 without a mark": ("a.txt", b"x\0\n\0", "it is UTF-16; convert it, for example: iconv -f UTF-16LE"),
    "UTF-16, the other way": ("a.jsonl", b"\0{\0}\0\n", "it is UTF-16; convert it, for example: iconv -f UTF-16BE"),
    "gzip by another name": (
        "a.jsonl",
        b"\x1f\x8b\x08\0",
        "a.jsonl:1: not UTF-8: it is compressed by gzip; convert it, for example: gunzip < a.jsonl > NEW.jsonl",
    ),
    "zstd by another name": ("a.jsonl", b"\x28\xb5\x2f\xfd\0", "it is compressed by zstd; convert it, for example: un"),
    "JSON": ("a b.json", "[]", "convert the file, for example: jq -c 'arrays[], objects' 'a b.json' > 'a b'.jsonl"),
    "compressed": ("a.jsonl.gz", b"\x1f\x8b", "convert the file, for example: gunzip a.jsonl.gz"),
    "no parquet": ("a.parquet", "x" * 99, "a.parquet: row 1: cannot be read as parquet"),
    "a later record without messages": (
        "a.jsonl",
        CHAT + '{"text": "x"}\n',
        "a.jsonl:2: no field 'messages'; its fields are: text",
    ),
    "no messages": ("a.jsonl", CHAT + '{"messages": []}\n', "a.jsonl:2: field 'messages': expected a list"),
    "no role": ("a.jsonl", '{"messages": [{"author": "me"}]}\n', "a.jsonl:1: messages[0]: expected an object"),
    "no content": ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "messages[0]: content: expected a text"),
    "a picture": (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "only text is trained on",
    ),
    "half a character said": (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": "\\udcff"}]}\n',
        "a.jsonl:1: half a character",
    ),
    "arguments that are not JSON": (
        "a.jsonl",
        CHAT + CALL % '{"city": Paris}'.replace('"', '\\"'),
        'a.jsonl:2: messages[0]: tool_calls[0]: arguments: not JSON: {"city": Paris}; expected a JSON object',
    ),
    "arguments that are a number": (
        "a.jsonl",
        CALL % "7",
        "a.jsonl:1: messages[0]: tool_calls[0]: arguments: expected a JSON object, found 7",
    ),
    "calls that are no list": (
        "a.jsonl",
        CHAT + CALLS % '{"name": "f"}',
        'a.jsonl:2: messages[0]: tool_calls: expected a list such as [{"function": {"name": "…", "arguments": {…}}}], '
        'found {"name": "f"}',
    ),
    "calls in bad JSON": (
        "a.jsonl",
        CALLS % '"[{"',
        "a.jsonl:1: messages[0]: tool_calls: not JSON: [{; expected a list of calls",
    ),
    "calls that are none": (
        "a.jsonl",
        CALLS % '[{"name": "f"}, 1]',
        'messages[0]: tool_calls[1]: expected a call with its name, such as {"function": {"name": "…"',
    ),
    "a call without a name": (
        "a.jsonl",
        CALLS % '[{"function": {"arguments": "{}"}}]',
        'tool_calls[0]: expected a call with its name, such as {"function": {"name": "…", "arguments": {…}}}, found {',
    ),
    "arguments by another name": (
        "a.jsonl",
        CALLS % '[{"id": "1", "name": "f", "args": {"a": 1}}]',
        "tool_calls[0]: no field 'arguments'; its fields are: id, name, args. A call is such as",
    ),
    "arguments beside the function": (
        "a.jsonl",
        CALLS % '[{"id": "1", "function": {"name": "f"}, "arguments": {"a": 1}}]',
        "tool_calls[0]: no field 'arguments'; its fields are: name, arguments. A call is such as",
    ),
    "arguments beside the function's empty ones": (
        "a.jsonl",
        CALLS % '[{"function": {"name": "f", "arguments": "{}"}, "arguments": {"a": 1}}]',
        "tool_calls[0]: no field 'arguments'; its fields",
    ),
    "arguments by another name beside the function": (
        "a.jsonl",
        CALLS % '[{"function": {"name": "f"}, "input": {"a": 1}}]',
        "tool_calls[0]: no field 'arguments'; its fields are: name, input. A call is such as",
    ),
    "a call as OpenAI's API once had it": (
        "a.jsonl",
        '{"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]}\n',
        'messages[0]: function_call: found {"name": "f", "arguments": "{}"}; expected tool_calls, a list such as [{"f',
    ),
    "tools that are none": ("a.jsonl", CHAT[:-2] + ', "tools": [1]}\n', "field 'tools': expected a list of JSON"),
    "tools in bad JSON": ("a.jsonl", CHAT[:-2] + ', "tools": "[{"}\n', "field 'tools': not JSON: [{"),
    "a later record without output": (
        "a.jsonl",
        '{"instruction": "i", "output": "o"}\n{"instruction": "i"}\n',
        "a.jsonl:2: no field 'output'; its fields are: instruction",
    ),
    "two system prompts": (
        "a.jsonl",
        '{"system": "Be brief.", "messages": [{"role": "system", "content": "Sing."}]}\n',
        "a.jsonl:1: field 'system': found \"Be brief.\", and another system prompt: \"Sing.\"; leave one of them away",
    ),
    "a system prompt that is no text": (
        "a.jsonl",
        '{"system": ["x"], "prompt": "Hi", "response": "Arr"}\n',
        "a.jsonl:1: field 'system': expected a text, found [\"x\"]",
    ),
    "a history that is none": (
        "a.jsonl",
        '{"instruction": "Why?", "output": "So.", "history": [["Why?"]]}\n',
        "a.jsonl:1: field 'history': expected pairs of texts, what was asked and answered, found [\"Why?\"]; write",
    ),
    "a history that is a number": (
        "a.jsonl",
        '{"instruction": "Why?", "output": "So.", "history": 7}\n',
        "field 'history': expected pairs of texts, what was asked and answered, found 7",
    ),
    "a reasoning that may be anything": (
        "a.jsonl",
        '{"prompt": "Why?", "response": "So.", "reasoning": "on"}\n',
        "field 'reasoning': found \"on\"; call it reasoning_content if the model is to think so before it answers",
    ),
    "two answers": (
        "a.jsonl",
        '{"question": "Why?", "answer": "42", "solution": "As 6 times 7 is 42."}\n',
        "field 'solution': found \"As 6 times 7 is 42.\"; it may be meant instead of 'question' or 'answer'",
    ),
    "two answers, both long": (
        "a.jsonl",
        '{"instruction": "Why?", "output": "So.", "response": "Because."}\n',
        "a.jsonl:1: field 'response': found \"Because.\"; it may be meant instead of 'instruction' or 'output', or",
    ),
    "a question beside an instruction": (
        "a.jsonl",
        '{"instruction": "Be a doctor.", "question": "Why?", "response": "So."}\n',
        "a.jsonl:1: field 'question': found \"Why?\"; it may be meant instead of 'instruction' or 'response', or",
    ),
    "an answer that is bad": (
        "a.jsonl",
        '{"prompt": "?", "completion": "So.", "label": true}\n{"prompt": "?", "completion": "No.", "label": false}\n',
        "a.jsonl:2: field 'label': found false, which says that the answer is bad, and it would be learnt; leave",
    ),
    "a chat that is bad": ("a.jsonl", CHAT[:-2] + ', "kto_tag": false}\n', "field 'kto_tag': found false, which"),
    "a preference": (
        "a.jsonl",
        '{"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"value": "So."}, "rejected": 1}\n',
        "field 'chosen': found {\"value\": \"So.\"}, and no answer at the end of 'conversations'; only what is in",
    ),
    "a chat among texts": (
        "a.jsonl",
        '{"text": "x"}\n' + CHAT,
        "a.jsonl:2: no field 'text'; its fields are: messages. This is a chat record: give those of each kind as a",
    ),
    "a text among chats": ("a.jsonl", CHAT + '{"text": "x"}\n', "content. This is a text record: give those"),
    "an answer that is a number": (
        "a.jsonl",
        '{"question": "6 times 7?", "answer": 42}\n',
        "a.jsonl:1: field 'answer': expected a text, found 42; write it as a text",
    ),
    "a speaker that nobody knows": (
        "a.jsonl",
        '{"conversations": [{"from": "narrator", "value": "hi"}]}\n',
        'a.jsonl:1: conversations[0]: from: found "narrator"; expected one of: system, human, user, prompter, gpt,',
    ),
    "a speaker that is none": (
        "a.jsonl",
        '{"conversations": [{"from": ["gpt"], "value": "hi"}]}\n',
        'conversations[0]: from: found ["gpt"]; expected one of: system,',
    ),
    "a turn without a word": (
        "a.jsonl",
        '{"conversations": [{"from": "human", "text": "hi"}]}\n',
        "conversations[0]: content: expected a text, found null; its fields are: from, text. Name so what is said, or",
    ),
    "a tool's result that is an object": (
        "a.jsonl",
        '{"messages": [{"role": "tool", "content": {"degrees": 3}}]}\n',
        'messages[0]: content: expected a text, found {"degrees": 3}; write it as JSON in a text',
    ),
    "half a weight": (
        "a.jsonl",
        '{"messages": [{"role": "assistant", "content": "So.", "weight": 0.5}]}\n',
        "messages[0]: weight: found 0.5; expected 1, or 0 for an answer that is not to be learnt",
    ),
    "half a loss": (
        "a.jsonl",
        '{"messages": [{"role": "assistant", "content": "So.", "loss": "false"}]}\n',
        'messages[0]: loss: found "false"; expected true, or false for an answer that is not to be learnt',
    ),
    "a part that is a thought": (
        "a.jsonl",
        '{"messages": [{"role": "assistant", "content": [{"type": "reasoning", "text": "Hm."}]}]}\n',
        "messages[0]: content: expected text or parts of text, found [",
    ),
    "messages that are columns": (
        "a.jsonl",
        '{"messages": {"role": ["user"], "content": ["hi"]}}\n',
        "a.jsonl:1: field 'messages': expected a list of messages, found {",
    ),
    "messages in bad JSON": (
        "a.jsonl",
        '{"conversations": "[{"}\n',
        "a.jsonl:1: field 'conversations': not JSON: [{; expected a list of messages",
    ),
    "a function_call that is no JSON": (
        "a.jsonl",
        '{"conversations": [{"from": "function_call", "value": "find(cat)"}]}\n',
        "conversations[0]: value: not JSON: find(cat); expected a call of a tool",
    ),
    "a conversation of nothing": (
        "a.jsonl",
        '{"conversations": []}\n',
        "a.jsonl:1: field 'conversations': expected a list of messages, found []",
    ),
    "a later record without a completion": (
        "a.jsonl",
        '{"prompt": "i", "completion": "o"}\n{"prompt": "i"}\n',
        "a.jsonl:2: no field 'instruction'; its fields are: prompt",
    ),
    "a response of two texts": (
        "a.jsonl",
        '{"prompt": "Why?", "response": ["So.", "No."]}\n',
        'a.jsonl:1: field \'response\': expected a text, found ["So.", "No."]; write it as a text',
    ),
    "a prompt of messages and a completion that is a number": (
        "a.jsonl",
        '{"prompt": [{"role": "user", "content": "i"}], "completion": 3}\n',
        "a.jsonl:1: field 'prompt': expected a text, found [{",
    ),
    "an input that is no text": (
        "a.jsonl",
        '{"instruction": "i", "input": 3, "output": "o"}\n',
        "a.jsonl:1: field 'input': expected a text, found 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    file, content, message = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as refused:
        sampled(from_mapping({"dataset": str(path)}))
    assert message in str(refused.value)


def test_missing_datasets_name_the_shipped_ones(tmp_path):
    for name in ("nothing", str(tmp_path / "none.txt"), "data/none.jsonl"):
        with pytest.raises(BadInput, match=r"no such file or directory.*austen"):
            read.training(from_mapping({"dataset": name}))
    with pytest.raises(BadInput, match=r"^validation: nothing: no such file"):
        read.validation(from_mapping({"validation": "nothing"}))
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(
        BadInput, match=r"no .*\.parquet file in this directory; found notes.md; convert them$"
    ):
        read.training(from_mapping({"dataset": str(tmp_path)}))
    (tmp_path / "train.json").write_text("[1, 2]")
    with pytest.raises(
        BadInput, match=r"found notes.md, train.json; convert them, for example: jq .* > train.jsonl$"
    ):
        read.training(from_mapping({"dataset": str(tmp_path)}))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert read.training(from_mapping({"dataset": str(tmp_path)}))
    (tmp_path / "b.jsonl.zst").write_bytes(b"x")  # some of the data, perhaps
    with pytest.raises(BadInput, match=r"b\.jsonl\.zst: expected a name .*: unzstd b\.jsonl\.zst$"):
        read.training(from_mapping({"dataset": str(tmp_path)}))


@pytest.mark.skipif(not shutil.which("jq"), reason="without jq")
def test_what_a_refusal_says_makes_a_set_of_a_file(tmp_path):
    records = [{"text": "one, two", "n": "1"}, {"text": "drei\n\u00fc", "n": "2"}]
    table = io.StringIO(newline="")
    made = csv.DictWriter(table, ["text", "n"])
    made.writeheader()
    made.writerows(records)
    for name, content in {
        "list.json": json.dumps(records, indent=2).encode(),
        "lines.json": "\n".join(map(json.dumps, records)).encode(),
        "objects.json": b"".join(json.dumps(one, indent=2).encode() for one in records),
        "table.csv": b"\xef\xbb\xbf" + table.getvalue().encode(),
        "other.jsonl.gz": gzip.compress("\n".join(map(json.dumps, records)).encode()),
        "list.jsonl": json.dumps(records, indent=2).encode(),
        "wide.jsonl": "\n".join(map(json.dumps, records)).encode("utf-16"),
        "small.jsonl": gzip.compress("\n".join(map(json.dumps, records)).encode()),
    }.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(BadInput) as refused:
            sampled(from_mapping({"dataset": str(folder / name)}))
        command = re.search(r"(?:for example|so by): (.*)", str(refused.value))[1]
        subprocess.run(command, shell=True, cwd=folder, check=True)
        (made,) = [one for one in folder.glob("*.jsonl") if one.name != name]
        found = sampled(from_mapping({"dataset": str(made)}))
        assert [one.text for one in found] == [one["text"] for one in records], name


def test_files_put_together_have_marks_within(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n\xef\xbb\xbf{"text": "y"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    found = sampled(from_mapping({"dataset": str(tmp_path)}))
    assert [one.text for one in found] == ["x", "y", "one\ntwo\n"]


def test_samples_of_texts_and_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"t": "one"}\n\n{"t": ""}\n{"t": "two"}\n')
    (tmp_path / "b.txt").write_text("\ufefffirst\nstill first\n\n\nsecond\n", encoding="utf-8")
    config = from_mapping({"dataset": str(tmp_path), "text_field": "t"})
    found = pairs(config)
    assert found == [("one", True), ("two", True), ("first\nstill first\n\n\n", False), ("second\n", True)]
    limited = from_mapping({"dataset": str(tmp_path), "text_field": "t", "max_samples": 3})
    assert pairs(limited) == [*found[:2], (found[2][0], True)]
    assert read.digests(config) != read.digests(limited)
    assert [sample.place for sample in sampled(config)][1:] == [
        f"{tmp_path}/a.jsonl:4",
        f"{tmp_path}/b.txt:1",
        f"{tmp_path}/b.txt:5",
    ]


def test_a_text_without_blank_lines_is_cut_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"line number {n} of many\n" for n in range(20000))
    path.write_text(text)
    found = pairs(from_mapping({"dataset": str(path)}))
    assert "".join(piece for piece, _ in found) == text
    assert max(len(piece) for piece, _ in found) < files.LONGEST_PARAGRAPH + 100
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * (2 << 20))
    with pytest.raises(BadInput, match=r"a\.txt:2: a line longer than 1 MiB; break it"):
        sampled(from_mapping({"dataset": str(path)}))


RECORDS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(600)
]


def test_what_lies_beside_the_data_is_none(tmp_path):
    """A comma too many is not the current directory; hidden files are old copies, and other systems' notes."""
    (tmp_path / "set/.ipynb_checkpoints").mkdir(parents=True)
    for name in ("set/a", "set/.ipynb_checkpoints/a-checkpoint", "set/._a"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert [one.text for one in sampled(from_mapping({"dataset": str(tmp_path / "set")}))] == ["set/a"]
    with pytest.raises(BadInput, match="dataset: : no such file or directory"):
        sampled(from_mapping({"dataset": f"{tmp_path}/set,"}))


@pytest.mark.parametrize("data_format", ["auto", "text"])
def test_a_column_of_parquet_that_nobody_asks_for_is_not_read(tmp_path, data_format):
    """Python has no time of a nanosecond."""
    at = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"], "at": at}), tmp_path / "a.parquet")
    config = from_mapping({"dataset": str(tmp_path / "a.parquet"), "data_format": data_format})
    assert [one.text for one in sampled(config)] == ["one", "two"]


def test_a_date_in_a_chat_of_parquet_is_no_fault(tmp_path):
    said = [{"role": "user", "content": "when?"}, {"role": "assistant", "content": "now"}]
    rows = [{"messages": [{**one, "at": datetime.datetime(2026, 1, 1), "raw": b"x"} for one in said]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (found,) = sampled(from_mapping({"dataset": str(tmp_path / "a.parquet")}))
    assert [one["content"] for one in found.messages] == ["when?", "now"]


def test_a_calls_arguments_are_an_object_of_json(tmp_path):
    """A template would write a date as something else, and a map as a list of pairs."""

    def talk(arguments, **beside):
        call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": said, **beside}

    def read_rows(rows, schema=None):
        table = pyarrow.Table.from_pylist(rows, schema=schema)
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        return sampled(from_mapping({"dataset": str(tmp_path / "a.parquet")}))

    today = datetime.datetime(2026, 1, 1)
    with pytest.raises(
        BadInput, match=r"row 1: messages\[1\]: tool_calls\[0\]: arguments: a value of type datetime"
    ):
        read_rows([talk({"when": today})])
    with pytest.raises(BadInput, match=r"row 1: field 'tools': a value of type datetime, which JSON has not"):
        read_rows([talk({"what": "cat"}, tools=[{"name": "find", "since": today}])])
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct([("name", pyarrow.string()), ("arguments", pairs)])
    call = pyarrow.struct([("type", pyarrow.string()), ("function", function)])
    fields = [("role", pyarrow.string()), ("content", pyarrow.string()), ("tool_calls", pyarrow.list_(call))]
    schema = pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct(fields)))])
    (found,) = read_rows([talk([("what", "cat")])], schema)
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"what": "cat"}
    with pytest.raises(BadInput, match=r"row 1: cannot be read as parquet: .*duplicate field names"):
        read_rows([talk([("what", "cat"), ("what", "dog")])], schema)
    days = pyarrow.map_(pyarrow.date32(), pyarrow.string())
    odd = pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct([*fields, ("at", days)])))])
    when = {"messages": [{"role": "user", "content": "?", "at": [(datetime.date(2026, 1, 1), "x")]}]}
    with pytest.raises(BadInput, match=r"row 1: what JSON has not: keys must be str"):
        read_rows([when], odd)
    for wrong in ([1], 3):
        write_lines(tmp_path / "b.jsonl", [talk(wrong)])
        with pytest.raises(BadInput, match=r"tool_calls\[0\]: arguments: expected a JSON object, found "):
            sampled(from_mapping({"dataset": str(tmp_path / "b.jsonl")}))


def test_parquet_equals_jsonl(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [{**one, "tools": json.dumps([{"name": "f"}]), "other": 1} for one in RECORDS]
        ),
        tmp_path / "a.parquet",
        row_group_size=100,
    )
    write_lines(tmp_path / "b.jsonl", [{**one, "tools": [{"name": "f"}]} for one in RECORDS])
    rows, lines = (
        sampled(from_mapping({"dataset": str(tmp_path / name)})) for name in ("a.parquet", "b.jsonl")
    )
    assert [(one.messages, one.tools) for one in rows] == [(one.messages, one.tools) for one in lines]
    assert rows[299].place.endswith("a.parquet: row 300") and lines[299].place.endswith("b.jsonl:300")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "c.parquet")
    with pytest.raises(BadInput, match=r"c\.parquet: row 2: field 'text': expected a text, found null"):
        sampled(from_mapping({"dataset": str(tmp_path / "c.parquet")}))


ASKED, ANSWERED = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
FOUND = {"name": "find", "arguments": {"what": "cat"}}
FORMS = {  # as the sets of others have it
    "Dolly": ({"instruction": "Why?", "context": "", "response": "So.", "category": "x"}, [ASKED, ANSWERED]),
    "Dolly, with a context": (
        {"instruction": "Why?", "context": "It rains.", "response": "So."},
        [{"role": "user", "content": "Why?\n\nIt rains."}, ANSWERED],
    ),
    "an input beside a response": (
        {"instruction": "Why?", "input": "It rains.", "response": "So."},
        [{"role": "user", "content": "Why?\n\nIt rains."}, ANSWERED],
    ),
    "a prompt with a context": (
        {"prompt": "Why?", "context": "It rains.", "response": "So."},
        [{"role": "user", "content": "Why?\n\nIt rains."}, ANSWERED],
    ),
    "an instruction with a context, and an input": (
        {"instruction": "Why?", "input": "It rains.", "context": "It is May.", "output": "So."},
        [{"role": "user", "content": "Why?\n\nIt rains.\n\nIt is May."}, ANSWERED],
    ),
    "an instruction with a system": (
        {"instruction": "Why?", "output": "So.", "system": "Be brief.", "history": []},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "an instruction with what was said before": (
        {"instruction": "Why?", "output": "So.", "system": "", "history": [["", ""], ["Is it?", "It is."]]},
        [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}, ASKED, ANSWERED],
    ),
    "a prompt with a system": (
        {"prompt": "Why?", "response": "So.", "system_prompt": "Be brief."},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "an answer's thoughts": (
        {"instruction": "Why?", "reasoning_content": "Hm.", "output": "So.", "reasoning": None},
        [ASKED, {**ANSWERED, "reasoning_content": "Hm."}],
    ),
    "a response's thoughts": (
        {"prompt": "Why?", "thinking": "Hm.", "response": "So."},
        [ASKED, {**ANSWERED, "thinking": "Hm."}],
    ),
    "TRL, with a system": (
        {"system": "Be brief.", "prompt": [ASKED], "completion": [ANSWERED]},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "ShareGPT, with the same system twice": (
        {"system_prompt": "Be brief.", "conversations": [{"from": "system", "value": "Be brief.\n"}, *TURNS]},
        [{**SYSTEM, "content": "Be brief.\n"}, ASKED, ANSWERED],
    ),
    "messages that are none, and conversations": (
        {"messages": None, "conversations": TURNS},
        [ASKED, ANSWERED],
    ),
    "TRL": ({"prompt": "Why?", "completion": "So."}, [ASKED, ANSWERED]),
    "TRL, messages": ({"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
    "a prompt of messages and a text that answers": (
        {"prompt": [SYSTEM, ASKED], "completion": "So."},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "a text that asks, and messages": ({"prompt": "Why?", "response": [ANSWERED]}, [ASKED, ANSWERED]),
    "a prompt and a response": ({"prompt": "Why?", "response": "So."}, [ASKED, ANSWERED]),
    "a question and an answer": ({"question": "Why?", "answer": "So."}, [ASKED, ANSWERED]),
    "OpenOrca": ({"system_prompt": "", "question": "Why?", "response": "So."}, [ASKED, ANSWERED]),
    "a query and a response": (
        {
            "query": "Why?",
            "response": "So.",
            "original_question": "?",
            "system": "Be brief.",
            "history": None,
        },
        [SYSTEM, ASKED, ANSWERED],
    ),
    "a problem with its solution, and the result": (
        {"problem": "Why?", "solution": "So.", "answer": "42", "level": "5"},
        [ASKED, ANSWERED],
    ),
    "an instruction in a template, and a result": (
        {"instruction": "Why?", "input": "", "output": "So.", "prompt": "### Why? ### So.", "answer": "42"},
        [ASKED, ANSWERED],
    ),
    "what is there already, once more": (
        {"instruction": "Why?", "response": "So.", "question": "Why", "solution": "So"},
        [ASKED, ANSWERED],
    ),
    "TRL, judged good": ({"prompt": "Why?", "completion": "So.", "label": True}, [ASKED, ANSWERED]),
    "a preference with its answer": (
        {"conversations": TURNS, "chosen": TURNS[1], "rejected": TURNS[1]},
        [ASKED, ANSWERED],
    ),
    "ShareGPT": ({"id": 3, "conversations": TURNS}, [ASKED, ANSWERED]),
    "ShareGPT, with a system": ({"system": "Be brief.", "conversations": TURNS}, [SYSTEM, ASKED, ANSWERED]),
    "ShareGPT, with a system's turn": (
        {"system": None, "conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "a conversation of messages": (
        {"conversation_id": "1", "conversation": [{**ASKED, "toxic": False}, {**ANSWERED, "toxic": False}]},
        [{**ASKED, "toxic": False}, {**ANSWERED, "toxic": False}],
    ),
    "turns that are JSON": ({"conversations": json.dumps(TURNS)}, [ASKED, ANSWERED]),
    "turns in capitals": (
        {"conversations": [{"from": "Human", "value": "Why?"}, {"from": "GPT", "value": "So."}]},
        [ASKED, ANSWERED],
    ),
    "turns by half of their names": (
        {"conversations": [{"from": "human", "content": "Why?"}, {"role": "assistant", "value": "So."}]},
        [ASKED, ANSWERED],
    ),
    "a turn with thoughts, and one with a call": (
        {
            "conversations": [
                TURNS[0],
                {"from": "gpt", "tool_calls": [FOUND], "weight": 1},
                {**TURNS[1], "reasoning_content": "Hm."},
            ]
        },
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [FOUND], "weight": 1},
            {**ANSWERED, "reasoning_content": "Hm."},
        ],
    ),
    "a text that is none, and a conversation": ({"text": None, "conversations": TURNS}, [ASKED, ANSWERED]),
    "an instruction that is none, and a question": (
        {"instruction": None, "output": None, "question": "Why?", "answer": "So."},
        [ASKED, ANSWERED],
    ),
    "conversations of messages": ({"conversations": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
    "ShareGPT, with tools": (
        {
            "conversations": [
                TURNS[0],
                {"from": "function_call", "value": json.dumps(FOUND)},
                {"from": "observation", "value": "mat"},
                TURNS[1],
            ]
        },
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [FOUND]},
            {"role": "tool", "content": "mat"},
            ANSWERED,
        ],
    ),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_others_are_read_as_they_are(tmp_path, name, suffix):
    record, messages = FORMS[name]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_lines(path, [record])
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    (sample,) = sampled(from_mapping({"dataset": str(path)}))
    assert sample.messages == messages
    # A field that holds a plain text goes before them, but for Alpaca's.
    write_lines(tmp_path / "b.jsonl", [{**record, "text": "plain"}])
    (sample,) = sampled(from_mapping({"dataset": str(tmp_path / "b.jsonl")}))
    assert sample.text == ("" if record.get("instruction") and record.get("output") else "plain")


def test_the_first_record_or_the_setting_says_what_records_are(tmp_path):
    record = {"text": "plain", "instruction": "say", "input": "it", "output": "so", **RECORDS[0]}

    def kind(*fields, **settings):
        path = write_lines(tmp_path / "a.jsonl", [{name: record[name] for name in fields}])
        config = from_mapping({"dataset": path, **settings})
        (sample,) = sampled(config)
        return sample

    assert kind("text").text == "plain"
    assert kind("text", "instruction", "output").messages[0]["content"] == "say"
    assert kind("text", "instruction").text == "plain"
    assert kind("instruction", "input", "output").messages == [
        {"role": "user", "content": "say\n\nit"},
        {"role": "assistant", "content": "so"},
    ]
    for nothing in ("", None):
        record["input"] = nothing
        assert kind("instruction", "input", "output").messages[0]["content"] == "say"
    assert kind("text", "instruction", "output", "messages").messages[0]["content"] == "q0"
    assert kind("text", "instruction", "output", "messages", data_format="text").text == "plain"
    (tmp_path / "b.txt").write_text("words")
    with pytest.raises(BadInput, match=r"data_format is chat, and a \.txt file has no records"):
        sampled(from_mapping({"dataset": str(tmp_path / "b.txt"), "data_format": "chat"}))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_messages_are_led_by_the_system_prompt_beside_them(tmp_path, name, suffix):
    record = {"messages": [ASKED, ANSWERED], name: "Be brief."}
    write_lines(tmp_path / "a.jsonl", [record])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    (sample,) = sampled(from_mapping({"dataset": str(tmp_path / f"a.{suffix}")}))
    assert sample.messages == [SYSTEM, ASKED, ANSWERED]


MESSAGES = {  # as others have them
    "Cohere": [
        {"role": "System", "content": "Be brief."},
        {"role": "User", "content": "Why?"},
        {"role": "Chatbot", "content": "So."},
    ],
    "ShareGPT's roles": [SYSTEM, {"role": "human", "content": "Why?"}, {"role": "gpt", "content": "So."}],
    "ShareGPT": [{"from": "system", "value": "Be brief."}, *TURNS],
    "Gemini's role": [SYSTEM, ASKED, {"role": "model", "content": "So."}],
    "LangChain": [SYSTEM, {"role": "human", "content": "Why?"}, {"role": "ai", "content": "So."}],
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("as_text", [False, True])
def test_messages_of_others_have_the_roles_that_templates_know(tmp_path, name, as_text):
    """By another name an answer would not be learnt as one, and the template would write that name out."""
    found = json.dumps(MESSAGES[name]) if as_text else MESSAGES[name]
    config = from_mapping({"dataset": write_lines(tmp_path / "a.jsonl", [{"messages": found}])})
    assert [one.messages for one in sampled(config)] == [[SYSTEM, ASKED, ANSWERED]]


def test_roles_of_tools(tmp_path):
    """A call that is a message of its own, as ms-swift has it; what a template may know by its name stays so."""
    call = {"role": "tool_call", "content": json.dumps(FOUND)}
    said = [
        ASKED,
        call,
        {"role": "tool_response", "content": "mat"},
        {"role": "observation", "content": "hat"},
    ]
    config = from_mapping({"dataset": write_lines(tmp_path / "a.jsonl", [{"messages": said}])})
    (sample,) = sampled(config)
    assert sample.messages == [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [FOUND]},
        {"role": "tool", "content": "mat"},
        {"role": "observation", "content": "hat"},
    ]


def test_a_text_may_be_called_messages(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": "[{ words"}, {"messages": "[]"}])
    found = sampled(from_mapping({"dataset": path, "text_field": "messages"}))
    assert [one.text for one in found] == ["[{ words", "[]"]


def test_messages_are_as_templates_want_them(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None},
    ]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    (sample,) = sampled(from_mapping({"dataset": path}))
    assert sample.messages == [
        {"role": "user", "content": "two parts"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]


def test_arguments_of_calls_are_objects_as_templates_want_them(tmp_path):
    """OpenAI's format has them as JSON in a text; parquet fills one call's with the names of the others'."""
    arguments = [{"city": "Paris", "at": {"hour": 3}}, {"query": ["cats", None]}, {}]

    def record(n, given):
        call = {"name": f"f{n}", "arguments": given}
        asked = {"role": "user", "content": "q"}
        called = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        }
        schema = {
            "name": f"f{n}",
            "parameters": {"type": "object", "properties": {f"p{n}": {"type": "string"}}},
        }
        return {"messages": [asked, called], "tools": [schema]}

    as_objects = [record(n, one) for n, one in enumerate(arguments)]
    as_texts = [record(n, json.dumps(one) if one else "") for n, one in enumerate(arguments)]
    flat = [{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": null}'}]}]}]
    for name, records in (("objects", as_objects), ("texts", as_texts)):
        write_lines(tmp_path / f"{name}.jsonl", records)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / f"{name}.parquet")
    for name in ("objects.jsonl", "objects.parquet", "texts.jsonl", "texts.parquet"):
        found = sampled(from_mapping({"dataset": str(tmp_path / name)}))
        calls = [one.messages[1]["tool_calls"][0]["function"] for one in found]
        assert calls == [{"name": f"f{n}", "arguments": one} for n, one in enumerate(arguments)], name
        assert [one.tools for one in found] == [one["tools"] for one in as_objects], name
    (sample,) = sampled(from_mapping({"dataset": write_lines(tmp_path / "flat.jsonl", flat)}))
    assert sample.messages[0]["tool_calls"] == [{"name": "f", "arguments": {"a": None}}]


def test_calls_that_are_a_text_of_json_are_read(tmp_path):
    """As columns of parquet have them, whose calls have arguments of all kinds."""
    for text, calls in (
        ('[{"name": "f"}]', [{"name": "f", "arguments": {}}]),
        ('[{"name": "f", "arguments": {"a": 1}}]', [{"name": "f", "arguments": {"a": 1}}]),
        ("[]", []),
        ("", []),
    ):
        record = {"messages": [{"role": "assistant", "content": "a", "tool_calls": text}]}
        (sample,) = sampled(from_mapping({"dataset": write_lines(tmp_path / "a.jsonl", [record])}))
        assert sample.messages == [{"role": "assistant", "content": "a", "tool_calls": calls}]


def test_parquets_calls_without_arguments_are_calls(tmp_path):
    """It has nothing where one's arguments are null, or are none while others' are an object."""
    calls = [
        {"function": {"name": name, "arguments": given}} for name, given in (("f", None), ("g", {"a": 1}))
    ]
    said = [{"role": "assistant", "content": "", "tool_calls": calls, "function_call": {"name": None}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": said}]), tmp_path / "a.parquet")
    (sample,) = sampled(from_mapping({"dataset": str(tmp_path / "a.parquet")}))
    found = [one["function"]["arguments"] for one in sample.messages[0]["tool_calls"]]
    assert found == [{}, {"a": 1}]


# ---- packing ----


@pytest.fixture(scope="module", params=["split", "refuse"])
def packed(tmp_path_factory, request):
    """Documents of up to 40 words, or 6, in sequences of 16: (Packed, documents as ids, overlong)."""
    folder = tmp_path_factory.mktemp("packed")
    longest = 40 if request.param == "split" else 6
    texts = [" ".join(f"w{(n * k) % 23}" for k in range(1 + (n * 7) % longest)) for n in range(160)]
    path = write_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    config = from_mapping(
        {"dataset": path, "vocab_size": 330, "sequence_length": 16, "overlong": request.param}
    )
    tokens = tokenizer.wrap(tokenizer.train(config))
    documents = [[*tokens(text).input_ids, tokens.eos_token_id] for text in texts]
    found, held_out = pack.prepare(config, read.digests(config), tokens, folder / "cache")
    assert held_out is None and found.token_count == sum(map(len, documents))
    return found, documents, request.param


def test_no_token_is_dropped_and_each_is_predicted_once(packed):
    packed, documents, overlong = packed
    if overlong == "split":
        stream = [token for document in documents for token in document]
        inputs = np.concatenate([packed[k][0] for k in range(len(packed))])
        labels = np.concatenate([packed[k][1] for k in range(len(packed))])
        assert inputs[: len(stream) - 1].tolist() == stream[:-1]
        expected = [token if n else pack.IGNORE for one in documents for n, token in enumerate(one)][1:]
        assert labels.tolist() == expected + [pack.IGNORE] * (len(labels) - len(expected))
        return
    found = []
    for k in range(len(packed)):
        inputs, labels, positions = packed[k]
        for begin, end in spans(positions):
            found.append(tuple(inputs[begin:end].tolist()))
            assert labels[begin:end].tolist() in (
                [*inputs[begin + 1 : end].tolist(), pack.IGNORE],
                [pack.IGNORE] * (end - begin),  # the padding
            )
    wanted = collections.Counter(map(tuple, documents))
    left = collections.Counter(found) - wanted
    assert not wanted - collections.Counter(found)
    assert all(set(one) == {packed._sets[0].pad_id} for one in left)


def spans(positions):
    starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    return list(itertools.pairwise(starts))


def test_whole_documents_leave_little_padding(packed):
    packed, documents, overlong = packed
    if overlong == "refuse":
        assert len(packed) * 16 < 1.05 * sum(map(len, documents))


def test_positions_begin_anew_at_documents_and_sequences(packed):
    packed, documents, overlong = packed
    if overlong == "refuse":
        return  # its documents are found by their positions
    whole = [n for document in documents for n in range(len(document))]
    for k in range(len(packed)):
        _, _, positions = packed[k]
        begin = k * 16
        count = min(16, len(whole) - 1 - begin)
        first = whole[begin]
        expected = [
            p - first if p >= first and n < 16 and p - first == n else p
            for n, p in enumerate(whole[begin : begin + count])
        ]
        assert positions[:count].tolist() == expected
        assert positions[count:].tolist() == list(range(16 - count))


def test_valid_tokens_are_counted_from_the_index(packed):
    packed, documents, _ = packed
    counted = [int((packed[k][1] != pack.IGNORE).sum()) for k in range(len(packed))]
    assert packed.valid.dtype == np.int64 and packed.valid.tolist() == counted
    assert sum(counted) == sum(len(document) - 1 for document in documents)


def test_a_neighbour_document_changes_nothing(packed):
    """Attention stays within a document: perturbing its neighbours leaves its logits as they were, to the bit."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    packed = packed[0]
    k = next(k for k in range(len(packed)) if (packed[k][2] == 0).sum() >= 3)
    inputs, _, positions = (torch.from_numpy(array)[None] for array in packed[k])
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    begin, end = starts[1], starts[2]
    changed = inputs.clone()
    changed[0, :begin] = (changed[0, :begin] + 7) % 250
    changed[0, end:] = (changed[0, end:] + 7) % 250
    for model_config in (
        GPT2Config(vocab_size=330, n_positions=16, n_embd=32, n_layer=2, n_head=2),
        LlamaConfig(
            vocab_size=330,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").eval()
        before, after = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, begin:end]
            for ids in (inputs, changed)
        )
        alone = model(input_ids=inputs[:, begin:end], use_cache=False).logits[0]
        assert torch.equal(before, after)
        assert torch.allclose(before, alone, atol=1e-5)


@pytest.mark.parametrize("overlong", ["split", "cut"])
def test_a_document_has_sequences_of_its_own_where_nothing_is_packed(tmp_path, monkeypatch, overlong):
    """What the next one is no document tells; a part in which nothing is learnt is no sequence."""
    monkeypatch.setattr("trainer.data.pack.WINDOW", 7)
    texts = [" ".join(f"w{(n * k) % 23}" for k in range(1 + (n * 7) % 40)) for n in range(60)] + ["é" * 8]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = {"dataset": path, "vocab_size": 330, "sequence_length": 16, "overlong": overlong}
    config = from_mapping({**settings, "packing": False})
    tokens = tokenizer.wrap(tokenizer.train(config))
    documents = [[*tokens(text).input_ids, tokens.eos_token_id] for text in texts]
    assert 17 in map(len, documents), "its last part would have a single token"
    found, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    expected = [
        (one[at : at + 16], one[at + 1 : at + 17])
        for one in (one[:16] if overlong == "cut" else one for one in documents)
        for at in range(0, len(one) - 1, 16)
    ]
    assert len(found) == len(expected) and found.layout == "alone"
    for k, (ids, following) in enumerate(expected):
        inputs, labels, positions = found[k]
        assert inputs.tolist() == ids + [tokens.pad_token_id] * (16 - len(ids))
        assert labels.tolist() == following + [pack.IGNORE] * (16 - len(following))
        assert positions.tolist() == [*range(len(ids)), *range(16 - len(ids))]
        assert (found.valid[k], found.lengths([k])) == (len(following), [len(ids)])
    other, _ = pack.prepare(from_mapping(settings), read.digests(config), tokens, tmp_path / "cache")
    assert other.digest != found.digest
    assert (other.lengths([0, 1]), other.width([0])) == ([16, 16], 16)


def test_a_part_in_which_nothing_is_learnt_is_no_sequence(tmp_path, monkeypatch):
    """Of long questions with short answers; each answer is predicted once, wherever parts end."""
    records = [{"instruction": "say " * (3 + n * 2), "output": f"yes {n}"} for n in range(20)]
    path = write_lines(tmp_path / "a.jsonl", records)
    settings = {"dataset": path, "vocab_size": 300, "sequence_length": 16, "loss_on": "answers"}
    packed, _ = prepared(from_mapping(settings), tmp_path / "cache")
    for together in (1 << 20, 32):
        monkeypatch.setattr("trainer.data.pack.TOGETHER", together)
        found, _ = prepared(from_mapping({**settings, "packing": False}), tmp_path / f"cache-{together}")
        assert found.valid.min() > 0 and found.valid.sum() == packed.valid.sum()
        assert 20 <= len(found) < found.token_count / 16
        assert found.kept == sum(found.lengths(range(len(found)))) < found.token_count
        for k in range(len(found)):
            _, labels, positions = found[k]
            assert (labels[found.lengths([k])[0] :] == pack.IGNORE).all() and positions[0] == 0


def test_a_running_text_is_laid_out_in_pieces(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n} of a text that goes on\n\n" for n in range(200)))
    settings = {"dataset": str(path), "vocab_size": 300, "sequence_length": 16, "packing": False}
    found, _ = prepared(from_mapping(settings), tmp_path / "cache")
    monkeypatch.setattr("trainer.data.pack.TOGETHER", 100)
    other, _ = prepared(from_mapping(settings), tmp_path / "other")
    assert len(found) == len(other) == -(-(found.token_count - 1) // 16) and found.lengths([0, 1]) == [16, 16]
    for k in range(len(found)):
        assert all(np.array_equal(a, b) for a, b in zip(found[k], other[k], strict=True))
    stream, _ = prepared(from_mapping({**settings, "packing": True}), tmp_path / "cache")
    assert found[3][0].tolist() == stream[3][0].tolist() and found[3][1].tolist() == stream[3][1].tolist()


def test_of_padding_no_more_is_computed_than_the_longest_document_wants(tmp_path):
    texts = ["b" * n for n in (3, 70, 200)]
    paths = [write_lines(tmp_path / f"{n}.jsonl", [{"text": one}] * 2) for n, one in enumerate(texts)]
    settings = {"dataset": ",".join(paths), "vocab_size": 257, "sequence_length": 256, "packing": False}
    found, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert found.lengths(range(6)) == [4, 4, 71, 71, 201, 201]
    assert [found.width(some) for some in ([0], [1, 2], [0, 5, 1])] == [64, 128, 256]
    short, _ = prepared(from_mapping({**settings, "sequence_length": 210}), tmp_path / "cache")
    assert short.width([4]) == 210
    for fixed in ({"compile": True}, {"attention": "flex_attention"}):
        found, _ = prepared(from_mapping({**settings, **fixed}), tmp_path / "cache")
        assert found.width([0]) == 256, "another width would be compiled anew"


def test_best_fit_loses_nothing_and_fits():
    chance = random.Random(5)
    lengths = [chance.randint(1, 50) for _ in range(300)] + [50, 1]
    bins = pack.best_fit(lengths, 50)
    assert sorted(n for one in bins for n in one) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in one) <= 50 for one in bins)
    assert len(bins) <= 1.1 * sum(lengths) / 50


def test_running_text_goes_on_whatever_overlong_says(tmp_path):
    (tmp_path / "a.txt").write_text("some words to learn from, and some more\n" * 20)
    settings = {"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 16}
    whole, _ = prepared(from_mapping({**settings, "overlong": "refuse"}), tmp_path / "cache")
    split, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert whole.token_count == split.token_count and whole.valid.sum() == split.valid.sum()


def test_documents_longer_than_a_sequence(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a b c d e f g h" * (n + 1)} for n in range(9)])
    settings = {"dataset": path, "vocab_size": 257, "sequence_length": 32}
    with pytest.raises(BadInput) as refused:
        prepared(from_mapping({**settings, "overlong": "refuse"}), tmp_path / "cache")
    text = str(refused.value)
    assert "7 documents are longer than sequence_length 32" in text and "and 2 more" in text
    assert f"{path}:3: 46 tokens" in text and "overlong to split or cut" in text
    cut, _ = prepared(from_mapping({**settings, "overlong": "cut"}), tmp_path / "cache")
    assert (cut.shortened, cut.dropped) == (7, sum(15 * (n + 1) + 1 - 32 for n in range(2, 9)))
    assert cut.token_count == 16 + 31 + 7 * 32 and len(cut) == 9
    split, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert (split.longer, split.shortened, split.dropped) == (7, 0, 0)
    assert split.token_count == cut.token_count + cut.dropped
    path = write_lines(tmp_path / "b.jsonl", [{"text": "a" * 31}, {"text": "b" * 31}])  # with their ends, 32
    for overlong in ("refuse", "cut", "split"):
        fits, _ = prepared(
            from_mapping({**settings, "dataset": path, "overlong": overlong}), tmp_path / "cache"
        )
        assert (fits.token_count, fits.longer, fits.shortened, fits.dropped) == (64, 0, 0, 0)


def spaced(how):
    """A tokenizer that puts a space before every text, as Llama 2's and the first of Mistral's do."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    byte = [f"<0x{n:02X}>" for n in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if how == "prepended":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif how == "byte-level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif how == "looks ahead":  # as GPT-2's
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how, split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", tokenizer.END_OF_TEXT, *byte],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if how in ("byte-level", "looks ahead") else [],
        show_progress=False,
    )
    ends = ["\n\n", "\n\n  "] if how == "looks ahead" else []
    made.train_from_iterator(["first words", "of second ones", "the third", *ends] * 9, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.END_OF_TEXT} $A", special_tokens=[(tokenizer.END_OF_TEXT, 1)]
    )
    return tokenizer.wrap(made.to_str())


@pytest.mark.parametrize("piece", [1, 60, 1 << 16])
@pytest.mark.parametrize("how", ["first", "always", "never", "prepended", "byte-level", "looks ahead"])
def test_a_paragraph_is_tokenised_as_in_its_text(tmp_path, monkeypatch, how, piece):
    monkeypatch.setattr(cache, "PIECE", piece)
    text = "first words\nof second\n\n\nsecond words, Ω\n\n  the third\n\n" * 3
    (tmp_path / "a.txt").write_text(text)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8})
    tokens = spaced(how)
    packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    assert packed._sets[0].tokens.tolist() == [*tokens(text).input_ids, tokens.eos_token_id]


def test_an_indented_paragraph_is_tokenised_as_in_its_text(tmp_path):
    """Code has such: a token may have the blank line and the indent."""
    text = "first words\n\n    of second\n\n\n  words\n\n" * 3
    (tmp_path / "a.txt").write_text(text)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8})
    tokens = spaced("looks ahead")
    packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    assert packed._sets[0].tokens.tolist() == [*tokens(text).input_ids, tokens.eos_token_id]


def test_after_a_held_out_paragraph_a_text_begins(tmp_path):
    (tmp_path / "a.txt").write_text("first words\n\n" * 40)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8, "validation_split": 0.3})
    tokens = spaced("first")
    at_start, *_ = tokens("first words\n\n", add_special_tokens=False).input_ids
    for part in pack.prepare(config, read.digests(config), tokens, tmp_path / "cache"):
        (one,) = part._sets
        starts = one.starts.tolist()
        assert len(starts) > 3
        for begin, end in itertools.pairwise([*starts, len(one.tokens)]):
            assert one.tokens[begin : begin + 2].tolist() == [tokens.bos_token_id, at_start]
            assert (one.tokens[begin:end] == at_start).sum() == 1


# ---- the cache ----


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


# ---- held-out data ----


def texts_of(packed, tokens):
    """The documents of a Packed of whole documents, as texts."""
    found = []
    for k in range(len(packed)):
        inputs, _, positions = packed[k]
        found += [
            tokens.decode(inputs[begin:end], skip_special_tokens=True) for begin, end in spans(positions)
        ]
    return [text for text in found if text]


def test_the_split_is_disjoint_complete_and_chosen_by_the_seed(tmp_path):
    texts = [f"text number {n}" for n in range(200)]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])

    def parts(**settings):
        config = from_mapping(
            {"dataset": path, "vocab_size": 300, "sequence_length": 32, "overlong": "refuse", **settings}
        )
        tokens = tokenizer.wrap(tokenizer.train(config))
        train, held_out = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
        return texts_of(train, tokens), texts_of(held_out, tokens)

    train, held_out = parts(validation_split=0.2)
    assert sorted(train + held_out) == sorted(texts)
    assert 20 < len(held_out) < 60
    assert set(parts(validation_split=0.2, seed=1)[1]) != set(held_out)
    assert set(parts(validation_split=0.2, sequence_length=64)[1]) == set(held_out)
    assert set(held_out) < set(parts(validation_split=0.4)[1])
    with pytest.raises(BadInput, match=r"validation_split 0.01 of its 3 documents leaves none held out"):
        parts(validation_split=0.01, max_samples=3)


def test_of_a_text_paragraphs_are_held_out_and_nothing_is_predicted_across_the_gap(tmp_path):
    paragraphs = [f"paragraph {n} of the text\n\n" for n in range(60)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    settings = {"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 32}
    everything, _ = prepared(from_mapping(settings), tmp_path / "cache")
    train, held_out = prepared(from_mapping({**settings, "validation_split": 0.25}), tmp_path / "cache")
    assert train.token_count + held_out.token_count == everything.token_count
    runs = [index.chosen(0, n, 0.25) for n in range(60)]
    changes = sum(a != b for a, b in itertools.pairwise(runs))
    assert train.documents + held_out.documents == changes + 1
    lost = train.documents + held_out.documents  # the first tokens of each
    assert train.valid.sum() + held_out.valid.sum() == everything.token_count - lost


def test_a_validation_file_is_packed_alike(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(50)])
    other = write_lines(tmp_path / "b.jsonl", [{"text": f"other {n}"} for n in range(7)])
    settings = {"dataset": path, "validation": other, "vocab_size": 300, "sequence_length": 16}
    train, held_out = prepared(from_mapping({**settings, "max_samples": 5}), tmp_path / "cache")
    assert (train.documents, held_out.documents) == (5, 7)
    with pytest.raises(BadInput, match="both say what is held out"):
        check_together(from_mapping({**settings, "validation_split": 0.1}))


# ---- several sets ----


@pytest.fixture
def three(tmp_path):
    """Three sets: 40 short documents, 10 long ones, and a text."""
    names = [
        write_lines(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(40)]),
        write_lines(tmp_path / "b.jsonl", [{"text": "b" * 60} for n in range(10)]),
    ]
    (tmp_path / "c.txt").write_text("c d e f g\n" * 20)
    return {
        "dataset": ", ".join([*names, str(tmp_path / "c.txt")]),
        "vocab_size": 257,
        "sequence_length": 16,
    }


def test_several_sets_are_one(three, tmp_path):
    packed, _ = prepared(from_mapping(three), tmp_path / "cache")
    alone = [
        prepared(from_mapping({**three, "dataset": name}), tmp_path / "cache")[0]
        for name in read.names(three["dataset"])
    ]
    assert packed.sizes == [len(one) for one in alone] and len(packed) == sum(packed.sizes)
    assert packed.token_count == sum(one.token_count for one in alone)
    assert packed.valid.tolist() == [count for one in alone for count in one.valid]
    k = packed.sizes[0] + packed.sizes[1]
    assert all(np.array_equal(a, b) for a, b in zip(packed[k], alone[2][0], strict=True))
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_weights_are_kept_at_any_world_size(three, tmp_path):
    packed, _ = prepared(from_mapping({**three, "dataset_weights": "6,3,1"}), tmp_path / "cache")
    order = index.Index(7, packed.sizes, packed.weights)
    bounds = np.cumsum([0, *packed.sizes])

    def shares(sequences):
        return np.histogram(sequences, bounds)[0]

    assert order.sequences == len(packed)
    assert shares(order.batch(0, 1000)).tolist() == [600, 300, 100]
    assert shares(order.batch(5000, 1000)).tolist() == [600, 300, 100]
    assert abs(shares(order.batch(0, 100)) - [60, 30, 10]).max() < 20  # mixed within, too
    seen = order.batch(0, 3000)
    for number, size in enumerate(packed.sizes):
        # Each set goes through all of its own before one comes again.
        own = [k for k in seen if bounds[number] <= k < bounds[number + 1]]
        for whole in range(0, len(own) - size, size):
            assert len(set(own[whole : whole + size])) == size
    again = index.Index(7, packed.sizes, packed.weights)
    assert [k for cursor in range(0, 60, 7) for k in again.batch(cursor, 7)] == seen[:63]
    assert index.Index(8, packed.sizes, packed.weights).batch(0, 50) != seen[:50]
    other, _ = prepared(from_mapping({**three, "dataset_weights": "6,3,2"}), tmp_path / "cache")
    without, _ = prepared(from_mapping(three), tmp_path / "cache")
    assert other.sizes == without.sizes == packed.sizes  # and yet a run of one does not go on with another
    assert len({packed.digest, other.digest, without.digest}) == 3


def test_neither_blocks_nor_sets_go_through_their_samples_in_the_same_order():
    order = index.Index(7, [50, 50], [1, 1])
    blocks = [order.batch(1000 * number, 1000) for number in range(2)]
    whose = [[k // 50 for k in block] for block in blocks]
    assert whose[0] != whose[1] and sum(whose[0]) == sum(whose[1]) == 500
    first, second = ([k % 50 for k in blocks[0] if k // 50 == number][:50] for number in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_what_rounding_leaves_of_a_block_is_the_largest_remainders():
    for weights, shares in (
        ([1, 1, 1], [334, 333, 333]),
        ([33.31, 33.33, 33.36], [333, 333, 334]),
        ([33.36, 33.31, 33.33], [334, 333, 333]),
        ([1.6, 1.6, 996.8], [2, 1, 997]),
    ):
        assert index.Index(7, [9, 9, 9], weights).shares == shares and sum(shares) == 1000


@pytest.mark.parametrize("weights", ["1,2", "1,2,x", "1,2,0", "1,2,nan", "1,1,1000000"])
def test_weights_that_do_not_fit_are_refused(three, weights):
    with pytest.raises(BadInput, match=r"dataset_weights: 1,"):
        read.training(from_mapping({**three, "dataset_weights": f"'{weights}'"[1:-1]}))


def test_a_path_with_a_comma_is_one_name(tmp_path):
    path = tmp_path / "one, two.txt"
    path.write_text("words")
    assert read.names(str(path)) == [str(path)]
    assert read.names("a , b") == ["a", "b"]
    config = {"dataset": "x.txt, austen", "validation": "y.txt", "model": "m"}
    places = [
        {"key": "dataset", "name": "x.txt", "place": "/d/x.txt"},
        {"key": "model", "name": "m", "place": "/m"},
    ]
    assert read.placed(config, places) == {"dataset": "/d/x.txt,austen", "validation": "y.txt", "model": "/m"}


# ---- names of the hub ----


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository on the hub, as it lies on disk after a download; what was asked for is in `.asked`."""
    import huggingface_hub

    folder = tmp_path / "snapshot"
    (folder / "data").mkdir(parents=True)
    names = (
        "data/train-0.jsonl",
        "data/train-1.jsonl",
        "data/test-0.jsonl",
        "data/dev.jsonl",
        "latest.jsonl",
    )
    for name in names:
        write_lines(folder / name, [{"text": name}])
    (folder / "LICENSE.txt").write_text("You may.")  # beside records a text is about them
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((*a, k)) or str(folder)
    )
    hub.fetch.cache_clear()
    return asked


def test_a_name_of_the_hub_is_fetched_at_its_revision(repository):
    def texts(name):
        return [text for text, _ in pairs(from_mapping({"dataset": name}))]

    assert texts("org/set") == ["data/train-0.jsonl", "data/train-1.jsonl", "latest.jsonl"]
    assert texts("org/set@0123abc:data/test-*.jsonl") == ["data/test-0.jsonl"]
    name, asked = repository[1]
    assert name == "org/set" and asked["repo_type"] == "dataset"
    assert (asked["revision"], asked["allow_patterns"]) == ("0123abc", ["data/test-*.jsonl"])
    with pytest.raises(BadInput, match=r"org/set@refs/convert/parquet"):
        texts("org/set:*.parquet")
    assert texts("org/set") and len(repository) == 3  # once in a process


def test_an_epoch_is_what_is_trained_on(tmp_path):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name * 100}] * 10)
    data = {"dataset": str(tmp_path / "a.jsonl")}
    for held_out, letters in (
        ({}, 1000),
        ({"validation_split": 0.2}, 800),
        ({"validation": str(tmp_path / "b.jsonl")}, 1000),
    ):
        assert work.trained_on(from_mapping({**data, **held_out})) == (letters, letters // 100)
    for packing, file, steps in ((True, "a.jsonl", 1), (False, "a.jsonl", 5), (False, "a.txt", 1)):
        (tmp_path / "a.txt").write_text("a line\n\n" * 10)
        config = from_mapping({"dataset": str(tmp_path / file), "packing": packing, "batch_size": 2})
        assert work.steps_of_epoch(config, *work.trained_on(config)) == steps
    with pytest.raises(BadInput, match=r"validation: .*no such file"):
        work.trained_on(from_mapping({**data, "validation": "none.jsonl"}))


@pytest.mark.parametrize(
    ("rows", "split", "fault"), [(6, 0.02, "held out"), (1, 0.5, "to train on"), (10, 0.2, "")]
)
def test_a_share_that_leaves_nothing_is_refused_before_any_host_is_touched(tmp_path, rows, split, fault):
    write_lines(tmp_path / "a.jsonl", [{"text": "words"}] * 500)
    write_lines(tmp_path / "b.jsonl", [{"text": "words"}] * rows)
    config = from_mapping({"dataset": f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "validation_split": split})
    if not fault:
        assert read.check(config)[0] == 510
        return
    with pytest.raises(
        BadInput, match=f"b.jsonl: validation_split {split} of its {rows} documents .* none {fault}"
    ):
        read.check(config)


TAKEN = {
    "chats, and what is about them": (
        [
            {
                "messages": [{"role": "user", "content": "a"}],
                "context": "c",
                "id": 0,
                "source": "",
                "tools": None,
            }
        ]
        * 2,
        "2 chats; not read: context, id",
    ),
    "of two fields with a chat one": (
        [
            {
                "messages": [{"role": "user", "content": "a"}],
                "conversations": [{"from": "human", "value": "b"}],
            }
        ],
        "1 chat; not read: conversations",
    ),
    "messages that ask and answer apart": (
        [{"prompt": [{"role": "user", "content": "a"}], "completion": "b", "thinking": "c", "score": 1}],
        "1 chat; not read: thinking, score",
    ),
    "what stands beside a pair": (
        [{"question": "a", "answer": "b", "system": "c", "context": "d", "prompt": "a", "rejected": "e"}],
        "1 instruction; not read: prompt, rejected",
    ),
    "fields of some records only": (
        [{"text": "a"}, {"text": "b", "meta": {}, "of": "c"}, {"text": "d", "of": "e", "more": 1}],
        "3 texts; not read: of, more",
    ),
    "many": (
        [{"text": "a", **{f"f{n}": n for n in range(12)}}],
        "1 text; not read: f0, f1, f2, f3, f4, f5, f6, f7, f8, f9 and 2 more",
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_set_is_told_as_what_it_is_taken_with_what_is_not_read(tmp_path, case):
    rows, expected = TAKEN[case]
    write_lines(tmp_path / "a.jsonl", rows)
    taken = []
    read.check(from_mapping({"dataset": f"{tmp_path}/a.jsonl"}), tell=taken.append)
    assert str(*taken) == f"dataset: {tmp_path}/a.jsonl: {expected}"


def test_the_columns_of_a_table_that_are_not_read_are_told_whatever_they_hold(tmp_path):
    """They do not come with the rows."""
    rows, _ = TAKEN["chats, and what is about them"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    taken = []
    read.check(from_mapping({"dataset": f"{tmp_path}/a.parquet"}), tell=taken.append)
    assert str(*taken).endswith("a.parquet: 2 chats; not read: context, id, source")


def test_a_directory_is_told_with_its_files_and_texts_are_paragraphs(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/LICENSE.txt").write_text("Do.\n\nDo not.\n")
    (tmp_path / "set/a.txt").write_text("words\n")
    taken = []
    read.check(from_mapping({"dataset": f"{tmp_path}/set"}), tell=taken.append)
    write_lines(tmp_path / "set/b.jsonl", [{"text": "words"}])
    read.check(from_mapping({"dataset": f"{tmp_path}/set"}), tell=taken.append)
    assert [str(one).removeprefix(f"dataset: {tmp_path}/set: ") for one in taken] == [
        "3 paragraphs of LICENSE.txt, a.txt",
        "4 texts of LICENSE.txt, a.txt, b.jsonl",
    ]


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", [{"text": "words"}])

    class Failing(io.BytesIO):
        def readline(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "opened", lambda path: Failing())
    with pytest.raises(BadInput, match=r"a\.jsonl: cannot be read: Input/output error; see its disk"):
        sampled(from_mapping({"dataset": str(tmp_path / "a.jsonl"), "data_format": "text"}))


def test_what_is_held_out_is_no_part_of_what_is_trained_on(repository, tmp_path):
    def held_out(name, dataset="org/set"):
        return read.everything(from_mapping({"dataset": dataset, "validation": name}))[-1].files

    assert [path.name for path in held_out("org/set")] == ["dev.jsonl"]
    assert [path.name for path in held_out("org/set:data/test-*.jsonl")] == ["test-0.jsonl"]
    with pytest.raises(BadInput, match=r"validation: .*train-0\.jsonl: dataset org/set has this file, too"):
        held_out("org/set:data/train-*.jsonl")
    own = tmp_path / "own"
    (own / "below").mkdir(parents=True)
    for name in ("a.jsonl", "below/b.jsonl"):
        write_lines(own / name, [{"text": name}])
    (tmp_path / "link.jsonl").symlink_to(own / "below/b.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((own / "a.jsonl").read_bytes())  # as what is brought to a host is
    for name in (own / "below/b.jsonl", own / "below", tmp_path / "link.jsonl", tmp_path / "copy.jsonl"):
        with pytest.raises(BadInput, match=f"dataset {own} has this file, too.*validation_split"):
            held_out(str(name), str(own))
        config = from_mapping({"dataset": str(own), "validation": str(name)})
        with pytest.raises(BadInput, match=f"dataset {own} has this file, too"):
            read.check(config, controller=True)
    assert held_out(str(own / "below"), str(own / "a.jsonl")) == (own / "below/b.jsonl",)
    (tmp_path / "snapshot/data/dev.jsonl").unlink()
    hub.fetch.cache_clear()
    with pytest.raises(
        BadInput, match=r"validation: org/set: found .*; expected .*, called validation, dev or eval"
    ):
        held_out("org/set")


def test_without_a_network_a_name_of_the_hub_is_one_message(monkeypatch):
    import huggingface_hub

    def no_network(*_, **__):
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.fetch.cache_clear()
    with pytest.raises(BadInput) as refused:
        read.training(from_mapping({"dataset": "org/set"}))
    for part in (
        "org/set",
        "neither a file here",
        "HF_HUB_OFFLINE is set",
        "hf download org/set --repo-type dataset",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room where what is fetched is kept"),
        (OSError("Cannot access gated repo for url X"), "accept its terms on the hub"),
    ],
)
def test_what_helps_against_the_hub_goes_by_what_it_said(monkeypatch, error, cure):
    import huggingface_hub

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    hub.fetch.cache_clear()
    with pytest.raises(BadInput, match=cure) as refused:
        read.training(from_mapping({"dataset": "org/set"}))
    assert "Check the name" not in str(refused.value)


def test_the_controller_leaves_to_the_hosts_what_it_cannot_read(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "fetch", None)  # would fail
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    config = from_mapping({"dataset": f"org/set,{tmp_path}/a.parquet,austen", "loss_on": "answers"})
    with pytest.raises(BadInput, match="cannot be read as parquet"):
        read.check(config, controller=True)
    monkeypatch.setattr(read.importlib.util, "find_spec", lambda name: None)
    samples, letters = read.check(config, controller=True)
    assert samples > 500 and letters > 300_000
    with pytest.raises(BadInput, match="loss_on: answers, but the data is plain text"):
        read.check(from_mapping({"loss_on": "answers"}), controller=True)


# ---- the tokenizer and the index ----


def test_the_tokenizer_is_the_same_each_time_and_loses_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße, 世界!  Two  spaces\tand a tab.\r\n\r\n" * 9, newline="")
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300})
    text = tokenizer.train(config)
    assert text == tokenizer.train(config)
    tokens = tokenizer.wrap(text)
    for sample in ("Grüße, 世界!  Two  spaces\tand\r\n", "never seen: Ω ñ 🙂"):
        assert tokens.decode(tokens(sample).input_ids) == sample


@pytest.mark.parametrize("size", [1, 2, 3, 11, 64, 65, 1000])
def test_an_epoch_is_every_sequence_once(size):
    order = index.Index(seed=3, sequences=size)
    run = order.batch(0, 3 * size)
    for epoch in range(3):
        assert sorted(run[size * epoch : size * (epoch + 1)]) == list(range(size))
    assert index.Index(seed=3, sequences=size).batch(size - 1, 5) == order.batch(0, size + 4)[-5:]
    if size > 10:
        assert run[:size] != run[size : 2 * size]
        assert index.Index(seed=4, sequences=size).batch(0, size) != run[:size]


def test_every_order_is_as_likely():
    """Where the first of 11 goes, and what follows it, over many seeds: chi-squared with 10 degrees of freedom."""
    for what in (lambda run: run[0], lambda run: run[5], lambda run: (run[1] - run[0]) % 11):
        found = np.bincount([what(index.Index(seed, 11).batch(0, 6)) for seed in range(4400)], minlength=11)
        assert ((found[found > 0] - 400) ** 2 / 400).sum() < 60


@pytest.mark.parametrize(
    ("settings", "done", "last"),
    [
        ({}, (0, 0), 25),  # one epoch of 100 sequences, 4 a step
        ({"epochs": 2.5}, (0, 0), 63),
        ({"steps": 7}, (0, 0), 7),
        ({"steps": 1000}, (0, 0), 1000),
        ({"steps": 1000, "epochs": 1}, (0, 0), 25),
        ({"steps": 10, "epochs": 1}, (0, 0), 10),
        ({"epochs": 1}, (10, 80), 15),  # ten steps of 8 before; 20 sequences are left
        ({"epochs": 1}, (25, 100), 25),
        ({"epochs": 1}, (13, 104), 13),  # the last step of 8 before went beyond the end
        ({"epochs": 1}, (15, 120), 15),
    ],
)
def test_last_step(settings, done, last):
    assert index.last_step(from_mapping({"batch_size": 4, **settings}), 100, *done) == last


def test_the_number_of_steps_is_that_of_the_decimal_fraction():
    """Not of the nearest binary one, whose product may be more than a whole number, by its rounding."""
    for hundredths, sequences in itertools.product(range(1, 301), (1, 7, 50, 100, 300, 12_345, 10**9 + 100)):
        config = from_mapping({"batch_size": 1, "epochs": f"{hundredths / 100:.2f}"})
        assert index.last_step(config, sequences) == -(-hundredths * sequences // 100)
    for epochs, sequences, last in ((5 / 3, 3, 5), (1 + 1e-9, 100, 101), (1e-9, 100, 1), (1e6, 1, 10**6)):
        config = from_mapping({"batch_size": 1, "epochs": epochs})
        assert index.last_step(config, sequences) == last


@pytest.mark.parametrize(("overlong", "packing"), [("split", True), ("refuse", True), ("split", False)])
def test_how_much_is_done_at_once_changes_nothing(tmp_path, monkeypatch, overlong, packing):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "word " * (n % 3 + 1)} for n in range(90)])
    settings = {"dataset": path, "vocab_size": 257, "sequence_length": 19}
    config = from_mapping({**settings, "overlong": overlong, "packing": packing})
    at_once, _ = prepared(config, tmp_path / "cache")
    monkeypatch.setattr("trainer.data.cache.BATCH", 37)
    monkeypatch.setattr("trainer.data.pack.TOGETHER", 40)
    monkeypatch.setattr("trainer.data.pack.WINDOW", 7)
    in_pieces, _ = prepared(config, tmp_path / "other")
    assert in_pieces.token_count == at_once.token_count and in_pieces.documents == at_once.documents
    assert in_pieces.unigram_entropy == pytest.approx(at_once.unigram_entropy)
    assert in_pieces.valid.sum() == at_once.valid.sum()
    counted = [int((in_pieces[k][1] != pack.IGNORE).sum()) for k in range(len(in_pieces))]
    assert in_pieces.valid.tolist() == counted
    if overlong == "split":
        assert len(in_pieces) == len(at_once)
        for k in range(len(at_once)):
            assert all(np.array_equal(a, b) for a, b in zip(in_pieces[k], at_once[k], strict=True))


def test_of_a_parquet_file_what_nobody_asks_for_is_not_read(tmp_path):
    rows = {"instruction": ["say"], "output": ["yes"], "picture": [b"x" * 1000]}
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    asked = fields.columns("instruction", from_mapping({}))
    assert list(files.records(path, *asked)) == [(1, {"instruction": "say", "output": "yes"})]
    assert list(files.records(path, ["messages"], ["tools"])) == [
        (1, {key: one for key, (one,) in rows.items()})
    ]


def test_behind_a_mark_the_byte_that_is_no_utf_8_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood\n\xef\xbb\xbfcaf\xe9\n")
    with pytest.raises(BadInput, match=r"a\.txt:2: not UTF-8: byte 0xe9 at column 4"):
        sampled(from_mapping({"dataset": str(tmp_path / "a.txt")}))


def test_words_on_a_message_are_made_only_where_it_is_refused(tmp_path, monkeypatch):
    """They took a third of the time that reading takes."""
    monkeypatch.setattr(fields, "_there", None)
    talk = [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    assert [len(one.messages) for one in sampled(from_mapping({"dataset": path}))] == [2]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "answer": []},
        {"question": [], "answer": "a"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": []},
    ],
)
def test_a_question_without_an_answer_is_no_chat(tmp_path, record):
    with pytest.raises(BadInput, match=r"a\.jsonl:1: field '\w+': expected a text, found \["):
        sampled(from_mapping({"dataset": write_lines(tmp_path / "a.jsonl", [record])}))


@pytest.mark.parametrize(
    "beside", [[], ["hello", "goodbye"], {"id": 1}, [{"role": "user", "content": "of another"}]]
)
def test_a_conversation_beside_a_question_and_its_answer_is_not_read_for_them(tmp_path, beside):
    record = {"question": "q", "answer": "a", "conversation": beside}
    (one,) = sampled(from_mapping({"dataset": write_lines(tmp_path / "a.jsonl", [record])}))
    assert [said["content"] for said in one.messages] == ["q", "a"]


def test_what_a_turn_says_is_its_value_whatever_stands_beside(tmp_path):
    turns = [{"from": "human", "value": "q", "content": ""}, {"from": "gpt", "value": "a", "content": "b"}]
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": turns}])
    (one,) = sampled(from_mapping({"dataset": path}))
    assert [said["content"] for said in one.messages] == ["q", "a"]


def test_a_part_whose_type_is_null_is_text(tmp_path):
    talk = [{"role": "user", "content": [{"type": None, "text": "q"}]}, {"role": "assistant", "content": "a"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    (one,) = sampled(from_mapping({"dataset": path}))
    assert one.words == "q\na"


def test_a_record_of_another_kind_is_called_by_its_name(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t"}, {"question": "q", "answer": "a"}])
    with pytest.raises(BadInput, match=r"a\.jsonl:2: .*This is an instruction record: give"):
        sampled(from_mapping({"dataset": path}))


def test_a_chat_that_is_a_list_alone_is_not_to_be_taken_apart(tmp_path):
    """A message a line would be taken for a document."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = Path(write_lines(tmp_path / "a.jsonl", [talk, talk]))
    with pytest.raises(BadInput, match=r"a\.jsonl:1: .*becomes a chat by: ") as refused:
        sampled(from_mapping({"dataset": str(path)}))
    command = str(refused.value).partition("becomes a chat by: ")[2]
    assert command == "jq -c '{messages: .}' a.jsonl > NEW.jsonl"
    if shutil.which("jq"):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        found = sampled(from_mapping({"dataset": str(tmp_path / "NEW.jsonl")}))
        assert [one.words for one in found] == ["q\na"] * 2


@pytest.mark.parametrize("beside", [{}, {"text": "all of it"}])
def test_an_instruction_whose_answer_is_null_is_no_text(tmp_path, beside):
    good = {"instruction": "q", "output": "a", **beside}
    path = write_lines(tmp_path / "a.jsonl", [{**good, "output": None}, good])
    with pytest.raises(BadInput, match=r"a\.jsonl:1: field 'output': expected a text, found null"):
        sampled(from_mapping({"dataset": path}))
