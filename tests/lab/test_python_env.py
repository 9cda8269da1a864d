"""python_env and trainer on a host that has no internet and nothing preinstalled: all comes from the controller."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plays import ROOT, Play, Plays, include

pytestmark = (
    pytest.mark.full
)  # the short form has test_main_job: the whole site.yml, killed, and without internet

FACTS = {"name": "Facts", "ansible.builtin.setup": {"gather_subset": ["!all"]}}
ROLES = [FACTS, include("python_env"), include("trainer")]
STATE = "ls -d /opt/trainyard /etc/trainyard /var/lib/trainyard 2>/dev/null || true; dpkg-query --show; cat /etc/passwd"
PIP_AT_WORK = "ls -d /opt/trainyard/env/*/lib/python3*/site-packages/numpy"


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    lab = make_lab("t-env", hosts=1, offline=True)
    yield Plays(lab, tmp_path_factory.mktemp("python env"))
    lab.down()


def run(plays, *arguments, checkout=ROOT):
    """Both roles on the host, from a checkout; the first time takes minutes."""
    book = checkout / "play of the test.yml"
    command = plays.command(ROLES, "node1", None, *arguments)
    given = Path(command[3])
    command[3] = str(book if checkout != ROOT else given)
    if checkout != ROOT:
        shutil.copy(given, book)
    environment = {**plays.environment(), "ANSIBLE_CONFIG": str(checkout / "ansible.cfg")}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=800)
    return Play(done.returncode, done.stdout + done.stderr, 0)


def current(plays):
    return plays.sh("node1", "readlink -f /opt/trainyard/current").strip()


def test_check_mode_on_an_untouched_host_changes_nothing(plays):
    before = plays.sh("node1", STATE)
    play = run(plays, "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0
    assert plays.sh("node1", STATE) == before


def test_killed_in_the_middle_and_run_again_it_is_whole_and_a_third_run_changes_nothing(plays):
    assert plays.run("identity", "node1").rc == 0  # wheels arrive in the service user's home
    plays.kill_when(lambda: plays.sh("node1", PIP_AT_WORK), ROLES, "node1")
    # The power of the host fails, too: neither pip nor its lock is left.
    plays.lab.power("node1", on=False)
    plays.lab.power("node1", on=True)
    assert plays.sh("node1", "ls /opt/trainyard/env/*/.complete 2>/dev/null || true") == ""
    play = run(plays)
    assert play.rc == 0, play.text
    assert "reaches no package index; bringing" in play.text
    usage = plays.sh("node1", "runuser -u trainyard -- /opt/trainyard/current/bin/trainer --help")
    assert usage.startswith("usage: trainer")
    left = "/var/lib/trainyard/wheels /var/lib/trainyard/incoming /opt/trainyard/env/.tmp"
    assert plays.sh("node1", f"ls -d {left} 2>/dev/null || true") == ""
    play = run(plays)
    assert play.rc == 0, play.text
    assert play.changed == {"node1": 0}


def test_dependencies_that_were_brought_are_marked_as_such(plays):
    manual = plays.sh("node1", "apt-mark showmanual").split()
    assert "python3-venv" in manual
    assert "python3-pip-whl" not in manual


def test_the_unit_is_tight_and_its_files_are_not_for_everyone(plays):
    level = plays.sh("node1", "systemd-analyze security --no-pager trainyard@x.service | tail -1")
    assert float(level.split(":")[1].split()[0]) <= 3, level
    places = "/etc/trainyard /etc/trainyard/runs /var/lib/trainyard/runs /opt/trainyard/env"
    modes = plays.sh("node1", f"stat -c '%a %U %G' {places}")
    assert modes.splitlines() == ["750 root trainyard"] * 2 + ["750 trainyard trainyard", "755 root root"]


def copy_of_checkout(target):
    """What a deploy needs of the checkout, at a path with a space."""
    for name in ("roles", "plugins", "requirements", "trainer"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ansible.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, target / name)
    return target


def test_a_trainer_that_does_not_run_leaves_the_old_one_in_use(plays, tmp_path):
    old = current(plays)
    checkout = copy_of_checkout(tmp_path / "another checkout")
    cli = checkout / "trainer" / "__main__.py"
    good = cli.read_text()
    cli.write_text("import no_such_module\n")
    play = run(plays, checkout=checkout)
    assert play.rc != 0
    assert "does not run" in play.words
    assert f"{Path(old).name} stays in use" in play.words
    assert current(plays) == old
    cli.write_text(good + "# newer\n")
    play = run(plays, checkout=checkout)
    assert play.rc == 0, play.text
    assert current(plays) != old
    assert play.changed["node1"] == 1
    assert plays.sh("node1", f"test -x {old}/bin/trainer && echo kept").strip() == "kept"


def test_a_host_whose_environment_differs_is_named(tmp_path):
    """The comparison alone, on what two hosts would have registered."""
    versions = {"numpy": "2.4.6", "torch": "2.13.0+cpu"}
    odd = {**versions, "torch": "2.13.0+cu128"}
    book = tmp_path / "play.yml"
    book.write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.include_role: {name: python_env, tasks_from: compare}\n"
    )
    hosts = {
        name: {"ansible_connection": "local", "__python_env": {"python": "3.11.2", "versions": found}}
        for name, found in (("node1", versions), ("node2", versions), ("node3", odd))
    }
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(book)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "node3: torch 2.13.0+cu128 (most have 2.13.0+cpu, such as node1)" in " ".join(done.stdout.split())
    hosts["node3"]["__python_env"]["versions"] = versions
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
