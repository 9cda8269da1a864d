"""Hundreds of configurations with something wrong in them: accepted, or refused with a message; never a traceback."""

import random

import pytest
import yaml

from trainer import config
from trainer.errors import BadInput

SEED = 20261121
COUNT = 500
STRANGE = (
    *(
        "",
        "~",
        "null",
        "yes",
        "no",
        "on",
        "0",
        "-1",
        "1",
        "1e400",
        "-1e-9",
        ".nan",
        ".inf",
        "0x1F",
        "0o17",
        "1:30",
    ),
    *(
        "1_000",
        "9" * 400,
        "2026-13-45",
        "2026-11-21",
        "[1, 2]",
        "{a: 1}",
        "[",
        "{",
        "'",
        '"',
        "!!binary x",
        "!x y",
    ),
    *(
        "!!python/object/apply:os.system [ls]",
        "&a *a",
        "*b",
        "|",
        ">",
        "- a",
        "? a",
        "%",
        "@",
        "`",
        "\t",
        "\x00",
    ),
    *(
        "!!timestamp x",
        "[" * 2000,
        "caf\udce9",
        "\u202e",
        "\U0001f600",
        "ä" * 70,
        "../..",
        "/",
        "a/b",
        "~nobody",
        "none",
        "auto",
        "lora",
        "4bit",
        "zero3",
    ),
)


def mutated(generator: random.Random) -> str:
    """A configuration of some keys with their defaults or other values, changed in a few places."""
    keys = generator.sample(list(config.FIELDS), generator.randint(1, 6))
    lines = []
    for key in keys:
        field = config.FIELDS[key]
        choices = field.metadata["choices"]
        value = generator.choice(choices) if choices else field.default
        lines.append(f"{key}: {yaml.safe_dump(value).splitlines()[0]}")
    for _ in range(generator.choice([0, 1, 1, 1, 2, 3])):
        number = generator.randrange(len(lines))
        key, _, value = lines[number].partition(": ")
        match generator.randrange(7):
            case 0:
                lines[number] = f"{key}: {generator.choice(STRANGE)}"
            case 1:  # a letter too few, too many, or another
                cut = generator.randrange(len(key) + 1)
                lines[number] = f"{key[:cut]}{generator.choice(['', 'x', '.', ':'])}{key[cut + 1 :]}: {value}"
            case 2:
                lines.append(lines[number])
            case 3:
                lines[number] = generator.choice([" ", "  ", "\t", "- "]) + lines[number]
            case 4:
                lines[number] = f"{key}:{value}"
            case 5:
                lines[number] = f"{key}: {generator.choice([1, 2, 0.5, -3, 1e12])}"
            case 6:
                cut = generator.randrange(len(lines[number]) + 1)
                lines[number] = lines[number][:cut]
    return "\n".join(lines) + generator.choice(["", "\n", "\n", "\n...\n", "\n---\nrun: b\n", "\r\n"])


def test_each_is_accepted_or_refused_with_a_message(tmp_path):
    generator = random.Random(SEED)
    path = tmp_path / "run.yaml"
    outcomes = {"accepted": 0, "refused": 0}
    for number in range(COUNT):
        text = mutated(generator)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        overrides = [
            f"{generator.choice(list(config.FIELDS))}={generator.choice(STRANGE)}"
            for _ in range(generator.choice([0, 0, 1]))
        ]
        try:
            found = config.check_together(config.load(path, overrides))
        except BadInput as refusal:
            outcomes["refused"] += 1
            assert len(str(refusal)) > 10 and "Traceback" not in str(refusal)
            continue
        except Exception as error:
            pytest.fail(f"configuration {number}: {type(error).__name__}: {error}\n{text!r} {overrides}")
        outcomes["accepted"] += 1
        for name, field in config.FIELDS.items():  # what is accepted is in its range
            value, rules = getattr(found, name), field.metadata
            assert value is not None or field.default is None
            assert not rules["choices"] or value in rules["choices"]
            assert rules["most"] is None or value is None or value <= rules["most"]
            assert rules["least"] is None or value is None or value >= rules["least"]
    assert min(outcomes.values()) > 5, outcomes
