"""float16 with a scaled loss: near float32's curve, no batch lost to an overflow, the scale kept in checkpoints."""

import json

import pytest
import ranks

pytestmark = pytest.mark.distributed

TOO_LARGE = 2.0**70


@pytest.mark.parametrize(
    "chosen", [["strategy=fsdp"], pytest.param(["adapter=lora", "lr=0.01"], marks=pytest.mark.full)]
)
def test_the_curve_is_near_that_of_float32(material, tmp_path, chosen):
    expected = ranks.run(tmp_path / "whole", 2, material / "run.yaml", *chosen)
    found = ranks.run(tmp_path / "half", 2, material / "run.yaml", *chosen, "dtype=float16")
    assert found == pytest.approx(expected, rel=1e-2) and found != expected


def test_an_overflow_costs_time_and_no_batch(material, whole, tmp_path):
    """The scale is too large at first: the first step is tried again, until its gradients are numbers."""
    patch = {("trainer.loop", "SCALE"): TOO_LARGE}
    found = ranks.run(tmp_path, 2, material / "run.yaml", "dtype=float16", patch=patch)
    assert found == pytest.approx(whole, rel=1e-2)
    assert 1 < _scale(tmp_path / "node0") < TOO_LARGE


def test_a_resumed_run_goes_on_with_its_scale(material, tmp_path):
    patch = {("trainer.loop", "SCALE"): 4.0}
    ranks.run(tmp_path, 1, material / "run.yaml", "dtype=float16", "steps=4", patch=patch)
    ranks.run(tmp_path, 1, material / "run.yaml", "dtype=float16", "steps=6")
    assert _scale(tmp_path / "node0") == 4


def _scale(run_dir) -> float:
    """What the newest checkpoint of a run says of the scale."""
    newest = max((run_dir / "checkpoints").glob("step-*/manifest.json"))
    return json.loads(newest.read_text())["progress"]["loss_scale"]
