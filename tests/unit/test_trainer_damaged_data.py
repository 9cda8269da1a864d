"""Damaged data files are refused with a message, or trained on: never a traceback, never a hang."""

import io
import json
import random

import pyarrow
import pyarrow.parquet
import pytest

from trainer.config import from_mapping
from trainer.data import pack, read, tokenizer
from trainer.errors import BadInput

FILES = 100
TALK = [
    {
        "messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "a " * n}],
        "tools": [],
    }
    for n in range(1, 30)
]
ORDERS = [{"instruction": f"say {n}", "input": "x" * (n % 3), "output": "y " * n} for n in range(1, 30)]
TEXTS = [{"text": f"words of {n}", "id": n} for n in range(1, 30)]
ODD = [None, True, 3, -1e308, "", "\ud800", "\x00", [], {}, [[]], {"role": 1}, "9" * 5000, "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def sound(chance: random.Random) -> tuple[str, bytes]:
    """A file as it should be: (its suffix, content)."""
    records = chance.choice((TALK, ORDERS, TEXTS))
    kind = chance.choice((".jsonl", ".jsonl", ".txt", ".parquet"))
    if kind == ".txt":
        return kind, "".join(f"{one}\n\n" for one in records).encode()
    if kind == ".parquet":
        file = io.BytesIO()
        plain = [{name: value for name, value in one.items() if name != "tools"} for one in records]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), file, row_group_size=7)
        return kind, file.getvalue()
    return kind, b"".join(json.dumps(odd(one, chance)).encode() + b"\n" for one in records)


def odd(value, chance: random.Random):
    """The value with, now and then, something else in a place of it."""
    if chance.random() < 0.004:
        return chance.choice(ODD)
    if isinstance(value, dict):
        return {name: odd(one, chance) for name, one in value.items() if chance.random() > 0.002}
    return [odd(one, chance) for one in value] if isinstance(value, list) else value


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content after up to three accidents."""
    data = bytearray(content)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        place = chance.randrange(len(data) or 1)
        length = chance.choice((1, 1, 2, 8, 100))
        accident = chance.randrange(6)
        if accident == 0:
            data[place : place + length] = chance.randbytes(length)
        elif accident == 1:
            del data[place : place + length]
        elif accident == 2:
            data[place:place] = data[place : place + length] * 3
        elif accident == 3:
            del data[place:]
        elif accident == 4:
            data[place:place] = chance.choice(
                (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b"[" * 3000)
            )
        else:
            data[place : place + 1] = bytes([(data[place] if data else 0) ^ (1 << chance.randrange(8))])
    return bytes(data)


@pytest.mark.timeout(240)
def test_damaged_files_are_refused_or_trained_on(tmp_path):
    (tmp_path / "words.txt").write_text("words to say of it\n" * 9)
    tokens = tokenizer.wrap(
        tokenizer.train(from_mapping({"dataset": str(tmp_path / "words.txt"), "vocab_size": 260}))
    )
    tokens.chat_template = TEMPLATE
    refused = []
    for number in range(FILES):
        chance = random.Random(number)
        suffix, content = sound(chance)
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(damaged(content, chance))
        settings = {
            "dataset": str(path),
            "sequence_length": chance.choice((8, 64)),
            "overlong": chance.choice(("split", "cut", "refuse")),
            "loss_on": chance.choice(("all", "answers")),
            "data_format": chance.choice(("auto", "auto", "auto", "chat")),
        }
        if chance.random() < 0.3:
            settings["validation_split"] = 0.2
        config = from_mapping(settings)
        try:
            packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
        except BadInput as error:
            refused.append(str(error))
            assert str(path) in str(error) or "loss_on" in str(error), f"{number}: {error}"
            continue
        for k in range(len(packed)):
            _, labels, _ = packed[k]
            assert (labels != pack.IGNORE).sum() == packed.valid[k], number
    assert FILES * 0.3 < len(refused) < FILES * 0.9
