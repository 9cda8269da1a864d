"""Raw records to samples: plain text, an instruction with its answer, or a chat. Imported by the controller."""

import functools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from trainer.config import Config
from trainer.data import files
from trainer.errors import BadInput
from trainer.words import some


class Sample(NamedTuple):
    """One record, or one paragraph of a text file; `messages` (role, content) where it is an exchange."""

    path: Path
    number: int  # its line or row
    text: str = ""
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    ends: bool = True  # whether a document ends with it
    running: bool = False  # a piece of running text, which may go on in the next sequence whatever its length

    @property
    def place(self) -> str:
        return files.place(self.path, self.number)

    @property
    def words(self) -> str:
        """All its text, without a template."""
        return self.text if self.messages is None else "\n".join(one["content"] for one in self.messages)

    @property
    def size(self) -> int:
        """About how many characters it has: calls of tools and what describes these are text, too, in a template."""
        return len(self.text) + sum(len(str(one)) for one in (*(self.messages or ()), *(self.tools or ())))


# By which names instructions come with their answers: Alpaca's, Dolly's, TRL's and others'; and what they are about.
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
)
ABOUT = ("input", "context")
CHATS = ("messages", "conversations", "conversation")
LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
SYSTEMS = ("system", "system_prompt")
# An answer's thoughts, by the names of a message's field; transformers takes one for another.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Who speaks in ShareGPT's conversations, and in what came of them.
SPEAKERS = {
    "system": ("system",),
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "assistant", "chatgpt", "bot", "chatbot", "ai", "model", "bing", "bard"),
    "tool": ("tool", "observation", "function_response", "tool_response"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
# What of a message says whether its answer is learnt: OpenAI's and ms-swift's.
LEARNT = {"weight": "1, or 0", "loss": "true, or false"}
CALLERS = ("function_call", "tool_call")  # an assistant, who says nothing but the call


def kind(record: dict, config: Config) -> str:
    """What records like this one are: text, instruction or chat; `data_format`, or told by the fields."""
    return _told(record, config) if config.data_format == "auto" else config.data_format


def _told(record: dict, config: Config) -> str:
    if _is_chat(record, CHATS[0], config):
        return "chat"
    is_half = _pair(record) is None and all(name in record for name in PAIRS[0])
    if _pair(record) == PAIRS[0] or (is_half and any(record[name] is not None for name in PAIRS[0])):
        return "instruction"
    if record.get(config.text_field) is not None:
        return "text"
    if any(_is_chat(record, name, config) for name in CHATS[:2]) or _pair_of_messages(record):
        return "chat"
    if _pair(record):  # beside which a `conversation` is mostly where it comes from
        return "instruction"
    return "chat" if _is_chat(record, CHATS[2], config) else "text"


def _is_chat(record: dict, name: str, config: Config) -> bool:
    """Whether a field holds messages, or JSON that does: parquet has no free form. Of what is none, reading says so."""
    value = record.get(name)
    if isinstance(value, str):
        return name != config.text_field and bool(LIST_OF_OBJECTS.match(value))
    return isinstance(value, list | dict)


def _pair(record: dict) -> tuple[str, str] | None:
    """By which of PAIRS the record has its instruction and its answer."""
    for asks, answers in PAIRS:  # of each record: a generator takes twice as long
        if record.get(asks) is not None and record.get(answers) is not None:
            return asks, answers
    return None


def _pair_of_messages(record: dict) -> list | None:
    """The messages of a record that has those which ask, and those that answer, apart, as TRL's may, or a text."""
    said = [record[name] for name in _pair(record) or ()]
    if not any(isinstance(one, list) and all(isinstance(part, dict) for part in one) for one in said):
        return None
    roles = ("user", "assistant")
    turns = [
        [_said(role, one)] if isinstance(one, str) else one for role, one in zip(roles, said, strict=True)
    ]
    return [*turns[0], *turns[1]] if all(isinstance(one, list) and one for one in turns) else None


CALL = '{"function": {"name": "…", "arguments": {…}}}'
BESIDE = ("name", "arguments", "id", "type", "index")  # what says nothing of what a tool is given
AROUND = ("function", "name", "id", "type", "index")  # the same of a call around its function
NAMES = 10  # of fields or files, listed
OF_PAIRS = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
JUDGED = ("label", "kto_tag")  # TRL's and LLaMA-Factory's word on an answer, true or false


def telling(config: Config) -> tuple[str, ...]:
    """The fields by which `kind` tells."""
    return (*CHATS, *OF_PAIRS, config.text_field)


def columns(kind: str, config: Config) -> tuple[list[str], list[str]]:
    """The fields that such records are read for: those that each has, and those that it may have."""
    return {
        "text": ([config.text_field], []),
        "instruction": (
            ["instruction", "output"],
            [*OF_PAIRS, *ABOUT, *SYSTEMS, "history", *THOUGHTS, *JUDGED],
        ),
        "chat": (["messages"], ["tools", *CHATS[1:], *SYSTEMS, *JUDGED]),
    }[kind]


@functools.cache
def _read(kind: str, text_field: str) -> frozenset[str]:
    needed, besides = columns(kind, Config(text_field=text_field))
    return frozenset([*needed, *besides])


def unread(record: dict, kind: str, config: Config) -> list[str]:
    """Its fields that are not read for its sample though they hold something."""
    read = _read(kind, config.text_field)
    if kind != "text":  # of several that would do, one is taken
        field = next((name for name in CHATS if record.get(name) is not None), "") if kind == "chat" else ""
        read = read.difference(CHATS, OF_PAIRS).union([field] if field else _pair(record) or ())
    return [name for name, value in record.items() if name not in read and value not in (None, "", [], {})]


def sample(path: Path, number: int, record: dict, kind: str, config: Config) -> Sample:
    """The record as a sample; raises BadInput that names its place and field."""
    where = files.place(path, number)
    try:
        made = {"text": _text, "instruction": _instruction, "chat": _chat}[kind](where, record, config)
        # Of parquet, values beside the texts may be dates or bytes.
        made_text = made.get("text") or json.dumps(made, ensure_ascii=False, default=str)
        made_text.encode()
    except UnicodeEncodeError:
        field = f"field '{config.text_field}': " if kind == "text" else ""
        raise BadInput(f"{where}: {field}half a character (a lone surrogate \\u escape)") from None
    except RecursionError:
        raise BadInput(f"{where}: nested too deeply") from None
    except TypeError as error:  # of parquet, a map's keys may be anything
        raise BadInput(f"{where}: what JSON has not: {error}; write such keys as texts") from None
    return Sample(path, number, **made)


def _is_wanted(where: str, record: dict) -> None:
    """Raise BadInput for an answer that is there for being bad."""
    for name in JUDGED:
        if record.get(name) is False:
            raise BadInput(
                f"{where}: field '{name}': found false, which says that the answer is bad, and it would be "
                "learnt; leave away such records, or the field"
            )


MISLED = "; data_format says what records are where the first one misleads"


def _apart(record: dict, config: Config, expected: str) -> str:
    """What helps where a record is of another kind than its set; "" where it is of none that is known."""
    told = expected if config.data_format != "auto" else _told(record, config)
    if told == expected or (told == "text" and config.text_field not in record):
        return ""
    article = "an" if told == "instruction" else "a"
    return f". This is {article} {told} record: give those of each kind as a set of their own: dataset: ONE,OTHER"


def _text(where: str, record: dict, config: Config) -> dict:
    if config.text_field not in record:
        cure = (
            ". Set text_field to one of them, or give records with instruction and output, or with messages"
        )
        raise BadInput(
            f"{where}: no field '{config.text_field}'; {_there(record)}{_apart(record, config, 'text') or cure}"
        )
    return {"text": _string(where, record, config.text_field)}


def _instruction(where: str, record: dict, config: Config) -> dict:
    asks, answers = _pair(record) or PAIRS[0]
    for field in (asks, answers):
        if field not in record:
            raise BadInput(
                f"{where}: no field '{field}'; {_there(record)}. An instruction record has instruction, output "
                f"and, if need be, input{_apart(record, config, 'instruction') or MISLED}"
            )
    _is_wanted(where, record)
    question, answer = _string(where, record, asks), _string(where, record, answers)
    for name in ABOUT:
        if record.get(name) not in (None, ""):
            question = f"{question}\n\n{_string(where, record, name)}"
    # Beside others a `prompt` is mostly the question once more, with a template, and an `answer` the result in short.
    for name in OF_PAIRS:
        other = record.get(name)
        is_beside = isinstance(other, str) and name not in (asks, answers, "prompt", "answer")
        if is_beside and other not in question and other not in answer:
            raise BadInput(
                f"{where}: field '{name}': found {_short(other)}; it may be meant instead of '{asks}' or '{answers}', "
                "or with them: leave away what is not to be learnt, or write such records as messages"
            )
    said = [
        *_history(where, record),
        _said("user", question),
        {**_said("assistant", answer), **_thoughts(where, record)},
    ]
    return {"messages": _led(where, record, said)}


def _said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _history(where: str, record: dict) -> list[dict]:
    """What was asked and answered before, in pairs: as LLaMA-Factory has it, whose answers are learnt, too."""
    turns, said = record.get("history") or [], []
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
            raise BadInput(
                f"{where}: field 'history': expected pairs of texts, what was asked and answered, found "
                f"{_short(turn)}; write such records as messages, or leave the field away"
            )
        if any(turn):
            said += [_said("user", turn[0]), _said("assistant", turn[1])]
    return said


def _thoughts(where: str, record: dict) -> dict:
    """What the answer's model has thought, where a field is surely that."""
    if record.get("reasoning"):
        raise BadInput(
            f"{where}: field 'reasoning': found {_short(record['reasoning'])}; call it {THOUGHTS[0]} if "
            "the model is to think so before it answers, else leave it away"
        )
    return {name: _string(where, record, name) for name in THOUGHTS if record.get(name)}


def _led(where: str, record: dict, messages: list[dict]) -> list[dict]:
    """The messages, led by the system prompt that the record has beside them."""
    for name in SYSTEMS:
        if record.get(name) in (None, ""):
            continue
        prompt, first = _string(where, record, name), messages[0]
        if first["role"] not in ("system", "developer"):
            messages = [_said("system", prompt), *messages]
        elif first["content"].strip() != prompt.strip():
            raise BadInput(
                f"{where}: field '{name}': found {_short(prompt)}, and another system prompt: "
                f"{_short(first['content'])}; leave one of them away"
            )
    return messages


def _chat(where: str, record: dict, config: Config) -> dict:
    field = next((name for name in CHATS if record.get(name) is not None), CHATS[0])
    messages = _from_json(f"{where}: field '{field}'", record.get(field), "a list of messages")
    messages = _pair_of_messages(record) if messages is None else messages
    if messages is None and "messages" not in record:
        raise BadInput(
            f"{where}: no field 'messages'; {_there(record)}. A chat record has messages, each with role and "
            f"content{_apart(record, config, 'chat') or MISLED}"
        )
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"{where}: field '{field}': expected a list of messages, found {_short(messages)}")
    _is_wanted(where, record)
    said = [_message(f"{where}: {field}[{n}]", one) for n, one in enumerate(messages)]
    if field != CHATS[0] and record.get("chosen") and said[-1]["role"] != "assistant":
        raise BadInput(
            f"{where}: field 'chosen': found {_short(record['chosen'])}, and no answer at the end of '{field}'; "
            "only what is in there is learnt: write the answer into it"
        )
    return {
        "messages": _led(where, record, said),
        "tools": _tools(where, record.get("tools")),
    }


def _named(where: str, message: dict) -> dict:
    """The message with `role` and `content`, ShareGPT's `from` and `value`, and with a role that templates know."""
    said = {name: value for name, value in message.items() if value is not None}  # as parquet fills gaps
    is_turn = "role" not in said and "from" in said
    role = said.pop("from") if is_turn else said.get("role")
    known = role.lower() if isinstance(role, str) else None
    if is_turn and known not in (*ROLES, *CALLERS):
        raise BadInput(
            f"{where}: from: found {_short(role)}; expected one of: {', '.join((*ROLES, *CALLERS))}"
        )
    what = "value" if "value" in said and (is_turn or "content" not in said) else "content"
    if what == "value":
        said["content"] = said.pop("value")
    if known in CALLERS:
        calls = _from_json(f"{where}: {what}", said.get("content"), "a call of a tool")
        calls = calls if isinstance(calls, list) else [calls]
        return {**said, "role": "assistant", "content": "", "tool_calls": calls}
    if known in ROLES and (is_turn or known != "observation"):  # GLM's templates know this one as a role
        said["role"] = ROLES[known]
    return said


def _message(where: str, message) -> dict:
    found = message if isinstance(message, dict) else {}
    message = _named(where, message) if found else message
    if not found or not isinstance(message.get("role"), str):
        raise BadInput(
            f'{where}: expected an object like {{"role": "user", "content": "…"}}, found {_short(message)}'
        )
    if message.get("function_call"):
        raise BadInput(
            f"{where}: function_call: found {_short(message['function_call'])}; expected tool_calls, a list such as "
            f"[{CALL}], which is what templates read"
        )
    for name in LEARNT:
        if message.get(name, 1) not in (0, 1):  # as true and false are
            raise BadInput(
                f"{where}: {name}: found {_short(message[name])}; expected {LEARNT[name]} for an answer that is not "
                "to be learnt"
            )
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{where}: tool_calls", message["tool_calls"])
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        parts = [_part(one) for one in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadInput(
                f"{where}: content: expected text or parts of text, found {_short(content)}; only text is trained on"
            )
        content = "".join(parts)
    if not isinstance(content, str):
        cure = (
            f"{_there(found)}. Name so what is said, or leave such records away"
            if content is None
            else "write it as JSON in a text"
        )
        raise BadInput(f"{where}: content: expected a text, found {_short(content)}; {cure}")
    message["content"] = content  # of a copy
    return message


def _part(part):
    """The text of one of a content's parts; None where it is another thing, or a thought, which is no answer."""
    kinds = ("text", "input_text", "output_text")
    return part.get("text") if isinstance(part, dict) and (part.get("type") or "text") in kinds else None


def _tool_calls(where: str, calls) -> list[dict]:
    calls = _from_json(where, calls, "a list of calls") or []
    if not isinstance(calls, list):
        raise BadInput(f"{where}: expected a list such as [{CALL}], found {_short(calls)}")
    return [_call(f"{where}[{n}]", one) for n, one in enumerate(calls)]


def _call(where: str, call) -> dict:
    """A tool's call with its arguments as an object, which templates write out; OpenAI's are a text of JSON.

    None are an empty object: parquet has nothing there then.
    """
    wrapped = isinstance(call, dict) and isinstance(call.get("function"), dict)
    function = call["function"] if wrapped else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput(f"{where}: expected a call with its name, such as {CALL}, found {_short(call)}")
    said = function.get("arguments")
    arguments = _from_json(f"{where}: arguments", "{}" if said in (None, "") else said, "a JSON object")
    # What is there beside may well be the arguments, and no template would write it out.
    around = {name: call[name] for name in call if wrapped and name not in AROUND and call[name]}
    others = [name for name in function if name not in BESIDE and function[name] is not None]
    if (said is None and (others or around)) or (arguments == {} and "arguments" in around):
        there = _there({**function, **around})
        raise BadInput(
            f"{where}: no field 'arguments'; {there}. A call is such as {CALL}; name so what it is given"
        )
    if not isinstance(arguments, dict):
        raise BadInput(f"{where}: arguments: expected a JSON object, found {_short(arguments)}")
    _is_json(f"{where}: arguments", arguments)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if wrapped else function


def _tools(where: str, tools) -> list[dict] | None:
    """The tools that a chat may call, as JSON schemas."""
    where = f"{where}: field 'tools'"
    found = _from_json(where, tools, "a list of JSON schemas")
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadInput(f"{where}: expected a list of JSON schemas, found {_short(tools)}")
    _is_json(where, found)
    return found


def _from_json(where: str, value, expected: str):
    """The value; a text is read as JSON, for parquet has no free form."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: not JSON: {_piece(value)}; expected {expected}") from None


def _is_json(where: str, value) -> None:
    """Raise BadInput for what JSON has not, such as parquet's dates: a template would write something else for it."""

    def refuse(one):
        raise BadInput(
            f"{where}: a value of type {type(one).__name__}, which JSON has not; write it as a text"
        )

    json.dumps(value, default=refuse)


def _string(where: str, record: dict, field: str) -> str:
    if not isinstance(record[field], str):
        cure = "leave such records away" if record[field] is None else "write it as a text"
        raise BadInput(f"{where}: field '{field}': expected a text, found {_short(record[field])}; {cure}")
    return record[field]


def _there(record: dict) -> str:
    return f"its fields are: {listed(record) or 'none'}"


def listed(names: Collection[str]) -> str:
    """The first of some fields' or files' names, and how many more there are."""
    return some([*map(_piece, names)], NAMES)


def _piece(text: str) -> str:
    """The beginning of a text, as it is where a terminal can show it."""
    return text[:40] if text[:40].isprintable() else _short(text)


def _short(value) -> str:
    """The beginning of a value, as JSON would write it."""
    try:
        return json.dumps(value, default=str, ensure_ascii=True)[:40]
    except (RecursionError, ValueError, TypeError):
        return repr(type(value).__name__)
