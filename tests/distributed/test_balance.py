"""Shares that follow the ranks' speeds: the steps get shorter, and the losses stay what they were."""

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
    steps = ranks.records(tmp_path / "both/node0")
    assert steps[0]["shares"] == [8, 8]
    mine, others = steps[-1]["shares"]
    assert mine + others == 16 and 10 <= mine <= 14
    changes = [one for one in ranks.records(tmp_path / "both/node0", "event") if one["event"] == "shares"]
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
    assert [one["shares"] for one in ranks.records(tmp_path / "both/node1")] == [[5, 2]] * 6
    went = ranks.status(tmp_path / "both/node0")["parts"]
    assert min(went["waiting"]) >= 0 and min(went["compute"]) > 0 and len(went["ranks"]) == 2
    mean = sum(one["step_seconds"] for one in ranks.records(tmp_path / "both/node0")) / 6
    assert went["compute"][1] + went["waiting"][1] + went["wire"] + went["rest"] == pytest.approx(
        mean, rel=0.2
    )
    (start,) = ranks.records(tmp_path / "both/node0", "event")[:1]
    assert start["event"] == "start" and start["ranks"] == went["ranks"]


def test_shares_for_other_ranks_are_refused(material, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", "balance=3,2,2", codes=[2, 2])
    assert (
        "found 3 shares (3,2,2); expected one for each of the 2 ranks"
        in ranks.status(tmp_path / "node0")["reason"]
    )
