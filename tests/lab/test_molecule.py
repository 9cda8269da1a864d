"""Each scenario of molecule/: check, converge, idempotence and verify on fresh hosts. Then verify fails once break.yml
has broken what it looks at."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
IN_SHORT = "tuning"  # the one that is tried without FULL=1, for the machinery
ON_VMS = [
    name for name in SCENARIOS if "create_vms" in (ROOT / "molecule" / name / "molecule.yml").read_text()
]
BIN = Path(sys.executable).parent


def molecule(*words, ok=True):
    done = subprocess.run(
        [str(BIN / "molecule"), *words],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5400,  # virtual machines without KVM are slow
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "name", [name if name == IN_SHORT else pytest.param(name, marks=pytest.mark.full) for name in SCENARIOS]
)
def test_a_scenario(able, request, name):
    if name in ON_VMS:
        request.getfixturevalue("able_to_emulate")
    molecule("destroy", "-s", name)  # it remembers hosts that a killed run has left
    try:
        said = molecule("test", "--destroy", "never", "-s", name)
        for step in ("create", "check", "converge", "idempotence", "verify"):
            assert f"{name} > {step}: Executed: Successful" in said, said
        inventory = ROOT / ".trainyard/labs/molecule/inventory"
        subprocess.run(
            [str(BIN / "ansible-playbook"), "-i", str(inventory), f"molecule/{name}/break.yml"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        said = molecule("verify", "-s", name, ok=False)
        # At what it was to see, and nothing else: the task before the first failure.
        task = re.findall(
            r"TASK \[(.*?)\]", said[: re.search(r"(?m)^(\[ERROR\]|fatal:|failed:)", said).start()]
        )[-1]
        breaking = yaml.safe_load((ROOT / f"molecule/{name}/break.yml").read_text())
        assert task == breaking[0]["vars"]["verify_stops_at"], said
    finally:
        molecule("destroy", "-s", name)
