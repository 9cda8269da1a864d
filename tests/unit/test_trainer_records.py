"""What is in a record: text, instruction or chat, in the forms that others' sets have."""

import datetime
import json
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpora import sampled, write_lines

from trainer.config import from_mapping
from trainer.data import records as fields
from trainer.errors import BadInput

RECORDS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(600)
]


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
