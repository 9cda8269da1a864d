"""Damaged configurations and data through the real command: trained, or refused with a message; no traceback, no hang.

With FULL=1 a hundred of each. CI has hundreds in one process (tests/unit/test_trainer_damaged_*.py), a sample here.
"""

import os
import random

import pytest
import ranks

from tests.unit.test_trainer_damaged_config import mutated
from tests.unit.test_trainer_damaged_data import damaged, sound

pytestmark = pytest.mark.distributed

SAMPLES = 100 if os.environ.get("TRAINYARD_FULL") else 10
SMALL = {
    **{
        "steps": 2,
        "epochs": 1,
        "sequence_length": 16,
        "batch_size": 2,
        "micro_batch_size": 2,
        "vocab_size": 260,
    },
    **{"threads": 1, "device": "cpu", "lora_rank": 2, "loss_chunk": 0, "compile": False},
    **{"checkpoint_every": 0, "metrics_port": 0},
}
OVERRIDES = [f"{key}={value}" for key, value in SMALL.items()]


def code_of(one: ranks.Ranks) -> int:
    """The exit code of a run of one rank, which must have said why it ended."""
    (code,) = one.codes(60)
    said = one.log()
    assert code in (0, 2, 3) and "Traceback" not in said, f"{code}: {said}"
    if said:  # what cannot be read as a configuration is refused before there is a log
        assert ("finished: " if code == 0 else "error: ") in said
    return code


@pytest.mark.timeout(1800)
def test_configurations(tmp_path):
    codes = []
    for number in range(SAMPLES):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = folder / "run.yaml"
        config.write_bytes(mutated(random.Random(number)).encode("utf-8", "surrogatepass"))
        one = ranks.Ranks(folder, 1, config, "dataset=austen", "max_samples=5", "model=tiny", *OVERRIDES)
        codes.append(code_of(one))
    assert {0, 2} <= set(codes)


@pytest.mark.timeout(1800)
def test_data(tmp_path):
    codes = []
    for number in range(SAMPLES):
        chance = random.Random(number)
        suffix, content = sound(chance)
        path = tmp_path / f"data{number}{suffix}"
        path.write_bytes(damaged(content, chance))
        config = tmp_path / f"{number}.yaml"
        config.write_text(f"model: tiny\ndataset: {path}\nloss_on: {chance.choice(('all', 'answers'))}\n")
        codes.append(code_of(ranks.Ranks(tmp_path / str(number), 1, config, *OVERRIDES)))
    assert {0, 2} <= set(codes)
