"""Which files are data, which samples are in them, and how a set that cannot be read is refused."""

import csv
import errno
import gzip
import io
import json
import re
import shutil
import subprocess

import pyarrow
import pyarrow.parquet
import pytest
from corpora import pairs, sampled, write_lines

from trainer.config import from_mapping
from trainer.data import files, read
from trainer.data import records as fields
from trainer.errors import BadInput

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
