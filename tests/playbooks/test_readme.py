"""README's commands, as they stand there, one after the other, for two nodes of this machine.

`make demo` is run by test_house_demo.py; site.yml and what needs SSH, by tests/lab.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from yard import SMALL, Yard

ROOT = Path(__file__).resolve().parents[2]
# README's playbooks, in an order that a cluster would meet them in, and what each says there.
EXPECTED = {
    "playbooks/preflight.yml": "of 2 hosts",
    "train.yml": "Run first finished: 4 steps",
    "playbooks/status.yml": "first  finished  4/4 (100 %)",
    "playbooks/logs.yml": "node1/r0 | saved",
    "playbooks/diagnose.yml": "Run first is not active; its last word is finished.",
    "playbooks/generate.yml": "\nShe",
    "playbooks/stop.yml": "there was nothing to stop",
}
COMMAND = re.compile(r"ansible-playbook -i inventory/home ((?:(?!  |`).)+)")


def words(playbook):
    """The words of README's commands with that playbook after the inventory; without placeholders, such as DIR."""
    found = [command.strip() for command in COMMAND.findall((ROOT / "README.md").read_text())]
    return [shlex.split(one) for one in found if one.split()[0] == playbook and "=DIR" not in one]


@pytest.fixture(scope="module")
def yard(tmp_path_factory):
    """Two nodes, on which a run is small unless it says otherwise."""
    yard = Yard(tmp_path_factory.mktemp("readme"))
    inventory = yaml.safe_load(yard.inventory.read_text())
    inventory["all"]["children"]["cluster"]["vars"]["trainer_config"] = SMALL
    yard.inventory.write_text(yaml.safe_dump(inventory, sort_keys=False))
    yield yard
    yard.clear()


@pytest.mark.full
@pytest.mark.parametrize("playbook", EXPECTED)
def test_a_command_of_readme_does_what_it_says(yard, playbook):
    (command,) = words(playbook)
    done = subprocess.run(
        ["ansible-playbook", "-i", yard.inventory, *command],
        cwd=ROOT,
        env=yard.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0 and EXPECTED[playbook] in done.stdout, done.stdout[-3000:] + done.stderr


def test_no_command_of_readme_is_left_out():
    listed = {command.split()[0] for command in COMMAND.findall((ROOT / "README.md").read_text())}
    assert listed == set(EXPECTED) | {"site.yml"}
