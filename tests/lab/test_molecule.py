"""Each scenario of molecule/: check, converge, idempotence and verify on fresh hosts. Then each play of break.yml
breaks one thing, and verify must fail at the task that looks at it; converge, or a play that follows, mends it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
IN_SHORT = "identity"  # the one that is tried without FULL=1, for the machinery
ON_VMS = [
    name for name in SCENARIOS if "create_vms" in (ROOT / "molecule" / name / "molecule.yml").read_text()
]
BIN = Path(sys.executable).parent
INVENTORY = ROOT / ".trainyard/labs/molecule/inventory"
LIMIT = 5400  # s for one command: virtual machines without KVM are slow


def run(*words, ok=True, **environment):
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode == 0) == ok, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def molecule(command, name, *words, ok=True):
    return run("molecule", command, "-s", name, *words, ok=ok)


def play(name, tag):
    """One play of a scenario's break.yml."""
    groups = ROOT / "molecule" / name / "inventory"
    more = ["-i", str(groups)] if groups.exists() else []
    run("ansible-playbook", "-i", str(INVENTORY), *more, f"molecule/{name}/break.yml", "--tags", tag)


def failed_at(said):
    """The tasks at which a playbook failed, but for the one that a play of it rescues, which comes first."""
    failures = re.finditer(r"(?m)^(\[ERROR\]|fatal:|failed:)", said)
    tasks = [re.findall(r"TASK \[(.*?)\]", said[: one.start()])[-1] for one in failures]
    assert tasks, said
    return list(dict.fromkeys(tasks))[bool(re.search(r"rescued=[1-9]", said)) :]


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize(
    "name", [name if name == IN_SHORT else pytest.param(name, marks=pytest.mark.full) for name in SCENARIOS]
)
def test_a_scenario(able, request, name):
    if name in ON_VMS:
        request.getfixturevalue("able_to_emulate")
    plays = {one["tags"]: one for one in yaml.safe_load((ROOT / f"molecule/{name}/break.yml").read_text())}
    if not os.environ.get("TRAINYARD_FULL"):  # the first break alone
        plays = dict(list(plays.items())[:1])
    molecule("destroy", name)  # it remembers hosts that a killed run has left
    try:
        said = molecule("test", name, "--destroy", "never")
        for step in ("create", "check", "converge", "idempotence", "verify"):
            assert f"{name} > {step}: Executed: Successful" in said, said
        for tag, broken in plays.items():
            if tag.endswith("-mended"):
                continue
            play(name, tag)
            said = molecule("verify", name, ok=False)
            # At what it was to see, and nothing else.
            assert failed_at(said) == [broken["vars"]["verify_stops_at"]], f"{tag}:\n{said}"
            if f"{tag}-mended" in plays:
                play(name, f"{tag}-mended")
            else:
                molecule("converge", name)
        molecule("verify", name)
    finally:
        molecule("destroy", name)
