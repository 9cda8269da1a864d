"""CONTRIBUTING.md's patches: they apply to this checkout, are as short as they say, and what they add works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import yaml

ROOT = Path(__file__).resolve().parents[2]
PATCHES = dict(
    re.findall(r"^## (A \w+).*?```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M)
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A copy of this checkout with all patches applied, and docs written anew."""
    copy = tmp_path_factory.mktemp("contributing") / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # the house's rules are for what git knows
    for patch in PATCHES.values():
        subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=copy, input=patch, text=True, check=True)
    for script in ("write_variables.py", "write_checks.py"):
        run(copy, [f"scripts/{script}"])
    return copy


def run(copy, words, seconds=300, **more):
    """Run this environment's Python in the copy, which it imports from, with `more` in its environment."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "TRAINYARD_FULL": "",
        **more,
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_each_is_under_thirty_lines():
    assert list(PATCHES) == ["A strategy", "A check", "A role", "A scenario"]
    for patch in PATCHES.values():
        assert len(re.findall(r"^\+(?!\+\+ )", patch, re.M)) < 30


def test_they_apply_and_the_documents_name_what_they_add(patched):
    assert "`containers`" in (patched / "docs/preflight.md").read_text()
    assert "motd_text" in (patched / "docs/variables.md").read_text()


def python_files(patch):
    return re.findall(r"^\+\+\+ b/(.+\.py)$", patch, re.M)


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_the_linters_have_nothing_against_them(patched, words):
    files = [file for patch in PATCHES.values() for file in python_files(patch)]
    assert len(files) == 5
    run(patched, ["-m", "ruff", *words, "--no-cache", *files])


@pytest.mark.parametrize(
    "words", [["house_rules", "variables"], pytest.param(["reset", "preflight"], marks=pytest.mark.full)]
)
def test_the_check_and_the_role_hold_with_what_is_asked_of_every_one(patched, words):
    files = [f"tests/unit/test_{word}.py" for word in words]
    said = run(patched, ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *files])
    assert " passed" in said
    if "house_rules" in words:
        assert "has_a_scenario_in_which_each_assertion_is_broken_once[motd]" in said


# Of this machine nothing changes: where the role writes, it finds an empty directory of this test's own.
PLAY = r"""
mount -t tmpfs tmpfs /etc/profile.d
play() { "$1" -m ansible playbook -i localhost, -c local motd.yml "${@:2}"; }
told() { printf "\n== %s\n" "$1"; sh -c '. /etc/profile.d/trainyard.sh' 2>&1 || true; }
play "$1" --check; told checked
play "$1"; told first
scenario() { "$1" -m ansible playbook -i hosts.yml -c local -e ansible_become=false "molecule/motd/$2.yml" >>said.txt; }
scenario "$1" verify; scenario "$1" break; if scenario "$1" verify; then exit 1; fi
play "$1" -e '{"motd_text": "Mind $HOME"}'; told other
play "$1" -e '{"motd_text": "Mind $HOME"}'; told again
play "$1" -e '{"gone": true}'; told removed
play "$1" -e '{"gone": true}'; told gone
"""


@pytest.mark.full
def test_the_role_is_played_as_every_one_is(patched):
    """Check mode on a host that was never touched, the first time, its scenario's verify, and again once it is broken;
    another text, the second time, and its removal."""
    role = {"import_role": {"name": "motd"}, "when": "not gone | default(false)"}
    removed = {"import_role": {"name": "motd", "tasks_from": "remove"}, "when": "gone | default(false)"}
    tasks = [{"name": "It", **one} for one in (role, removed)]
    play = {"name": "A play", "hosts": "all", "gather_facts": False, "tasks": tasks}
    play["vars"] = {"ansible_python_interpreter": sys.executable}
    (patched / "motd.yml").write_text(yaml.safe_dump([play]))
    host = {"localhost": {"ansible_python_interpreter": sys.executable}}
    (patched / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": host}}))
    own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    done = subprocess.run(
        [*own, "bash", "-euc", PLAY, "bash", sys.executable],
        cwd=patched,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(patched / "ansible.cfg"),
            "ANSIBLE_STDOUT_CALLBACK": "default",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    plays = [int(found) for found in re.findall(r"changed=(\d+)", done.stdout)]
    assert plays == [1, 1, 1, 0, 1, 0], done.stdout
    scenario = (patched / "said.txt").read_text()
    before, broken = re.split(r"(?=fatal:)", scenario)
    assert re.findall(r"TASK \[(.*?)\]", before)[-1] == "See the line" and "failed=1" in broken, scenario
    said = [text.split("PLAY [")[0].strip() for text in done.stdout.split("\n== ")[1:]]
    assert [one.partition("\n")[2] for one in said[1:4]] == [
        "A host of a Trainyard cluster",
        "Mind $HOME",
        "Mind $HOME",
    ]
    assert all("No such file" in said[at] or "can't open" in said[at] for at in (0, 4, 5)), said


@pytest.mark.full
def test_the_strategy_trains_as_ddp_does(patched, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "{model: tiny, dataset: austen, steps: 4, vocab_size: 300, sequence_length: 64, batch_size: 4}"
    )
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "trainer"]
    curves = []
    for strategy in ("ddp", "late"):
        place = tmp_path / strategy
        words = ["train", str(tmp_path / "run.yaml"), f"run={strategy}", f"strategy={strategy}"]
        run(
            patched,
            [*launch, *words],
            TRAINYARD_RUN_DIR=str(place),
            TRAINYARD_CACHE_DIR=str(tmp_path / "cache"),
        )
        curves.append(ranks.losses(place))
    assert curves[0] == curves[1] and len(curves[0]) == 4
