"""The guides' configurations are what the trainer takes, and their inventories are there."""

import re
from pathlib import Path

import pytest
import yaml

from trainer import config

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=path.stem)
    for path in GUIDES
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.S | re.M)
]


def test_each_has_one():
    assert len(BLOCKS) == len(GUIDES) == 4


@pytest.mark.parametrize("block", BLOCKS)
def test_a_configuration_is_valid(block):
    config.check_together(config.from_mapping(yaml.safe_load(block)))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_an_inventory_that_is_copied_is_there(path):
    copied = re.findall(r"^    cp -r (\S+) (inventory/\w+)$", path.read_text(), re.M)
    used = set(re.findall(r"-i (inventory/\w+)", path.read_text()))
    assert len(copied) == 1 and (ROOT / copied[0][0] / "hosts.yml").is_file()
    assert used == {copied[0][1]}
