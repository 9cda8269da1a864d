"""The guides' configurations are what the trainer takes, and their inventories, and README's, are there."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from trainer import config, metrics

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=path.stem)
    for path in GUIDES
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.S | re.M)
]


def test_each_has_one():
    assert len(BLOCKS) == len(GUIDES) == 5


@pytest.mark.parametrize("block", BLOCKS)
def test_a_configuration_is_valid(block):
    config.check_together(config.from_mapping(yaml.safe_load(block)))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_an_inventory_that_is_copied_is_there(path):
    copied = re.findall(r"^    cp -r (\S+) (inventory/\w+)$", path.read_text(), re.M)
    used = set(re.findall(r"-i (inventory/\w+)", path.read_text()))
    if path.stem == "at-night":  # of a cluster that is there
        assert not copied and used == {"inventory/home"}
        return
    assert len(copied) == 1 and (ROOT / copied[0][0] / "hosts.yml").is_file()
    assert used == {copied[0][1]}


def test_readmes_inventory_is_the_one_that_it_says_to_copy():
    step = (ROOT / "README.md").read_text().split("\n1. ")[1].split("\n2. ")[0]
    shown = textwrap.dedent(re.search(r"^        all:\n(?:        .*\n)+", step, re.M)[0])
    (copied,) = re.findall(r"cp -r (\S+) inventory/home", step)
    lines = (ROOT / copied / "hosts.yml").read_text().splitlines(keepends=True)
    assert shown == "".join(line for line in lines if not line.startswith(("---", "#")))


def test_the_states_of_a_run_are_all_told_at_night():
    """What status.yml may show has its row, so that nobody looks for it in vain."""
    text = (ROOT / "docs/guides/at-night.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    states = {*metrics.STATES, "interrupted"} - {"ending"}  # for a few seconds
    assert states == set(re.findall(r"`([a-z]+)`", rows))
