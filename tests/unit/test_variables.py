"""docs/variables.md says what the roles and the trainer take, all of it, as it is today."""

import importlib.util
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("write_variables", ROOT / "scripts/write_variables.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_it_is_what_make_docs_writes(script):
    assert script.TARGET.read_text() == script.render(), (
        "docs/variables.md is stale. Write it anew: make docs"
    )


def test_every_variable_and_key_has_a_row(script):
    rows = {line.split("`")[1] for line in script.render().splitlines() if line.startswith("| `")}
    for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            assert set(entry.get("options") or {}) <= rows
    assert set(script.FIELDS) <= rows and set(script.SWITCHES) <= rows
    assert "network_interfaces[].addresses" in rows


def test_a_row_is_one_line_that_a_table_can_hold(script):
    option = {"type": "str", "choices": ["a|b"], "description": ["C(one) word.", "Two\nlines."]}
    ((name, kind, default, words),) = script.option_rows("x", option)
    assert (name, kind, default) == ("`x`", "str", "")
    assert words == "`one` word. Two lines. One of `a\\|b`."


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((None, None), ""),
        ((1, None), "1 or more."),
        ((0, 0.5), "From 0 to 0.5."),
        ((1, 2**40), "1 or more."),
        ((None, None, 0), "More than 0."),
        ((None, 7), "At most 7."),
    ],
)
def test_a_range_in_words(script, ends, words):
    assert script.limits(*ends) == words
