"""Shares that follow the ranks' speeds: the steps get shorter, and the losses stay what they were."""

import json
import statistics

import pytest
import ranks

pytestmark = pytest.mark.distributed
LONG = ("batch_size=16", "micro_batch_size=2", "steps=30", "lr=0.003", "checkpoint_every=0")


def _slow(run, sequences, routed=None):
    """Rank 1 takes its time over every sequence."""
    import time

    from trainer.loop import token_loss_really

    time.sleep((0.06 if run.world.rank == 1 else 0.02) * len(sequences))
    return token_loss_really(run, sequences, routed)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_slow_rank_gets_less_and_the_losses_stay(material, tmp_path, strategy):
    alone = ranks.run(tmp_path / "alone", 1, material / "run.yaml", *LONG)
    patch = {("trainer.loop", "token_loss"): _slow}
    words = (*LONG, "balance=auto", f"strategy={strategy}")
    found = ranks.run(tmp_path / "both", 2, material / "run.yaml", *words, patch=patch)
    assert found == pytest.approx(alone, rel=1e-5)
    lines = (tmp_path / "both/node0/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["kind"] == "train"]
    assert steps[0]["shares"] == [8, 8]
    mine, others = steps[-1]["shares"]
    assert mine + others == 16 and 10 <= mine <= 14
    changes = [record for record in records if record.get("event") == "shares"]
    (first, *_) = changes
    assert first["before"] == [8, 8] and first["expected"] > 1.05
    even = [step["step_seconds"] for step in steps[1:] if step["step"] <= first["step"]]
    uneven = [step["step_seconds"] for step in steps if step["step"] > changes[-1]["step"]]
    assert statistics.median(uneven) < statistics.median(even)
    told = ranks.status(tmp_path / "both/node0")
    assert told["shares"] == steps[-1]["shares"] and told["speed_up"]["expected"] > 1.05


def test_shares_that_are_set(material, tmp_path):
    alone = ranks.run(tmp_path / "alone", 1, material / "run.yaml", "batch_size=7", "steps=6")
    found = ranks.run(tmp_path / "both", 2, material / "run.yaml", "steps=6", "balance=5,2")
    assert found == pytest.approx(alone, rel=1e-5)
    last = (tmp_path / "both/node1/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last).get("shares", [5, 2]) == [5, 2]


def test_shares_for_other_ranks_are_refused(material, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", "balance=3,2,2", codes=[2, 2])
    assert (
        "found 3 shares (3,2,2); expected one for each of the 2 ranks"
        in ranks.status(tmp_path / "node0")["reason"]
    )
