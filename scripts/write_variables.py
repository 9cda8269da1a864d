#!/usr/bin/env python3
"""Writes docs/variables.md from the roles' argument specs and the trainer's configuration: `make docs`.

What it says is nowhere else to be edited: a variable's words stand in roles/ROLE/meta/argument_specs.yml, a key's in
trainer/config.py.
"""

import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/module_utils")]

from inventory_values import LIMITS  # noqa: E402 - it is on the path only now

from plugins.action.run_config import SWITCHES  # noqa: E402
from trainer.config import FIELDS, describe  # noqa: E402

TARGET = ROOT / "docs" / "variables.md"
HEAD = """\
# Variables

<!-- Written by `make docs`. Change the roles' meta/argument_specs.yml and trainer/config.py instead. -->

Everything that can be set, with its default. A variable of the inventory stands under `all: vars:`, or with the group
or host that it is for; [architecture.md](architecture.md#the-inventory) shows an inventory. After `-e`, what is neither
a word nor a number is written as JSON: `-e '{"firewall_manage": false}'`. What is unknown, or of another type, is
refused before any host is contacted.
"""


def render() -> str:
    """The whole text of docs/variables.md."""
    parts = [HEAD]
    for role in roles():
        spec = yaml.safe_load((ROOT / "roles" / role / "meta/argument_specs.yml").read_text())[
            "argument_specs"
        ]
        options: dict[str, dict] = {}
        for entry in spec.values():
            options |= entry.get("options") or {}
        if options:
            title = "The cluster" if role == "inventory_check" else f"Role {role}"
            rows = [row for name, option in options.items() for row in option_rows(name, option)]
            parts.append(section(title, plain(spec["main"]["short_description"]) + ".", "Variable", rows))
    switches = [(f"`{name}`", "", "", text(sentence(words))) for name, words in SWITCHES.items()]
    parts.append(
        section("train.yml", "Words after `-e` that are no keys of the run itself.", "Word", switches)
    )
    words = "Keys of a run: `-e KEY=VALUE`, else `-e config=FILE`, else `trainer_config` in the inventory."
    parts.append(section("Keys of the trainer", words, "Key", [key_row(key) for key in describe()]))
    return "\n".join(parts).rstrip("\n") + "\n"


def roles() -> list[str]:
    """The roles with an argument spec, in the order in which site.yml calls them; then those that others call."""
    site = (ROOT / "playbooks/site.yml").read_text()
    names = sorted(path.parts[-3] for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
    called = {}
    for name in names:  # where it does its work: what is refused first stands before all of that
        if found := re.search(rf"\bname: {name}\b(?!,?\s+tasks_from: (look|precheck|hold))", site):
            called[name] = found.start()
    return sorted(names, key=lambda name: (called.get(name, len(site)), name))


def section(title: str, words: str, first: str, rows: list[tuple[str, ...]]) -> str:
    """A heading, a sentence and a table of (name, type, default, description) rows."""
    lines = [
        f"## {title}",
        "",
        words,
        "",
        f"| {first} | Type | Default | What it is |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def option_rows(name: str, option: dict) -> list[tuple[str, ...]]:
    """The row of an option of an argument spec, and those of the keys that its items have."""
    kind = option.get("type", "str")
    shown = f"{kind} of {option['elements']}" if option.get("elements") else kind
    words = option["description"] if isinstance(option["description"], list) else [option["description"]]
    told = " ".join(
        [*map(plain, words), choices(option.get("choices") or []), limits(*LIMITS.get(name, (None, None)))]
    )
    default = (
        "required" if option.get("required") else value(option["default"]) if "default" in option else ""
    )
    rows = [(f"`{name}`", shown, default, text(told))]
    inside = f"{name}[]" if kind == "list" else name
    for key, inner in (option.get("options") or {}).items():
        rows += option_rows(f"{inside}.{key}", inner)
    return rows


def key_row(key: dict) -> tuple[str, ...]:
    """The row of a key of the trainer."""
    rules = FIELDS[key["name"]].metadata
    told = [
        sentence(key["doc"]),
        choices(key["choices"]),
        limits(rules["least"], rules["most"], rules["above"]),
    ]
    return f"`{key['name']}`", key["type"], value(key["default"]), text(" ".join(told))


def choices(values: list) -> str:
    return f"One of {', '.join(f'`{value}`' for value in values)}." if values else ""


def limits(least: float | None, most: float | None, above: float | None = None) -> str:
    """A range in words; an upper end that nobody comes near is left out."""
    most = None if most is not None and most >= 10**6 else most
    low = f"more than {above}" if above is not None else least
    if low is None:
        return f"At most {most}." if most is not None else ""
    if most is not None:
        return f"From {low} to {most}."
    return f"More than {above}." if above is not None else f"{least} or more."


def plain(words: str) -> str:
    """Ansible's marks, such as C(word), as Markdown's."""
    return re.sub(r"\b[CIOV]\(([^)]*)\)", r"`\1`", words)


def sentence(words: str) -> str:
    return words + ("" if words.endswith(".") else ".")


def value(default: object) -> str:
    """A default as it is written in YAML, in a line."""
    if default is None:
        return ""
    return f"`{text(default if isinstance(default, str) and default else json.dumps(default))}`"


def text(words: str) -> str:
    """Words as a table's cell holds them: in one line, no bar."""
    return " ".join(words.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(render())
