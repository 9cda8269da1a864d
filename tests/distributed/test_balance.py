"""Shares that follow the ranks' speeds: the steps get shorter, and the losses stay what they were."""

import platform

import pytest
import ranks
import torch

import trainer

pytestmark = pytest.mark.distributed
LONG = ("batch_size=16", "steps=24", "lr=0.003", "checkpoint_every=0", "balance=auto")
RECOVERS = 8  # the step after which rank 1 is as fast as the other


def _slow(run, packed, sequences):
    """Rank 1 takes its time over every token that it computes, of a micro-batch without sequences, too."""
    import time

    from trainer.loop import tensors_really

    found = tensors_really(run, packed, sequences)
    slow = run.world.rank == 1 and run.progress.step < 8  # RECOVERS
    time.sleep((0.03 if slow else 0.01) * found[0].numel() / run.config.sequence_length)
    return found


def _tried(run, size):
    """A pass with a made-up time, so that no other program counts. Rank 0 makes two: nobody waits for anybody."""
    from trainer.calibrate import _pass_really

    for _ in range(2 - run.world.rank):
        assert _pass_really(run, size) > 0
    slow = run.world.rank == 1 and run.progress.step < 8
    return size * (0.03 if slow else 0.01)


SLOW = {("trainer.loop", "tensors"): _slow, ("trainer.calibrate", "_pass"): _tried}


@pytest.fixture(scope="module")
def alone(material, tmp_path_factory):
    """The losses of one process, which has nobody to be compared with."""
    folder = tmp_path_factory.mktemp("alone")
    found = ranks.run(folder, 1, material / "run.yaml", *LONG)
    assert [one["event"] for one in ranks.records(folder / "node0", "event")] == ["start", "checkpoint"]
    return found


# The sharded ones keep step: there are no more micro-batches than with even shares, a faster rank's are larger.
@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"),
    [("ddp", 2), pytest.param("zero1", 2, marks=pytest.mark.full), ("zero3", 8)],
)
def test_a_slow_rank_has_less_from_the_first_step_on(material, tmp_path, alone, strategy, micro_batch_size):
    words = (*LONG, f"strategy={strategy}", f"micro_batch_size={micro_batch_size}")
    found = ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=SLOW)
    assert found == pytest.approx(alone, rel=1e-5)
    steps = ranks.records(tmp_path / "node0")
    assert len({step["wire_bytes"] for step in steps}) == 1
    assert steps[0]["shares"] == [12, 4]
    tried, *changes = ranks.records(tmp_path / "node0", "event")[1:]
    assert tried["event"] == "calibration" and tried["step"] == 0
    fast, slow = tried["micro_batch_seconds"]
    assert list(fast) == list(slow) == ["1", str(micro_batch_size)] and slow["1"] == 3 * fast["1"]
    first, *later = [one for one in changes if one["event"] == "shares"]
    assert first["step"] == 0 and first["before"] == [8, 8] and first["expected"] == pytest.approx(2)
    assert max(steps[-1]["shares"]) <= 11 and later and later[-1]["step"] > RECOVERS


def _always(run, packed, sequences):
    """Rank 1 is slow to the end."""
    import time

    from trainer.loop import tensors_really

    found = tensors_really(run, packed, sequences)
    time.sleep((0.06 if run.world.rank else 0.02) * found[0].numel() / run.config.sequence_length)
    return found


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"), [("ddp", 2), pytest.param("zero2", 8, marks=pytest.mark.full)]
)
def test_how_much_faster_steps_have_become_is_told_without_an_even_one(
    material, tmp_path, strategy, micro_batch_size
):
    """And it is what a run with even shares takes, although this one never has such a step."""
    patch = {("trainer.loop", "tensors"): _always, ("trainer.calibrate", "_pass"): _tried}
    words = (*LONG, "steps=6", f"strategy={strategy}", f"micro_batch_size={micro_batch_size}")
    seconds = {}
    for name in ("auto", "even"):
        ranks.run(tmp_path / name, 2, material / "run.yaml", *words, f"balance={name}", patch=patch)
        steps = ranks.records(tmp_path / name / "node0")
        assert {tuple(step["shares"]) for step in steps} == {(12, 4) if name == "auto" else (8, 8)}
        seconds[name] = sum(step["step_seconds"] for step in steps)
    told = ranks.status(tmp_path / "auto/node0")["speed_up"]
    assert told["expected"] == pytest.approx(2)
    assert told["got"] > 1.2 and told["got"] == pytest.approx(seconds["even"] / seconds["auto"], rel=0.25)
    assert ranks.status(tmp_path / "even/node0")["speed_up"] is None
    # And what the faster rank waits is what the other sleeps longer.
    went = ranks.status(tmp_path / "even/node0")["parts"]
    assert went["waiting"][0] == pytest.approx(8 * (0.06 - 0.02), rel=0.4)
    assert went["waiting"][1] < went["waiting"][0] / 3 and went["compute"][1] > 8 * 0.06


def test_diloco_s_ranks_have_work_by_their_speeds_too(material, tmp_path):
    """And it is the run that has those shares by a list, to the bit."""
    patch = {("trainer.loop", "tensors"): _always, ("trainer.calibrate", "_pass"): _tried}
    words = (*LONG, "steps=6", "micro_batch_size=2", "comm=diloco", "sync_every=4")
    found = {}
    for balance in ("auto", "12,4"):
        folder = tmp_path / balance
        found[balance] = ranks.run(
            folder, 2, material / "run.yaml", *words, f"balance={balance}", patch=patch
        )
        assert all(step["shares"] == [12, 4] for step in ranks.records(folder / "node0"))
    assert found["auto"] == found["12,4"]


def test_what_listed_shares_are_good_for_is_told_once_the_speeds_are_known(material, tmp_path):
    words = (*LONG, "steps=14", "micro_batch_size=2", "balance=12,4")
    ranks.run(tmp_path, 2, material / "run.yaml", *words, patch={("trainer.loop", "tensors"): _always})
    assert all(step["shares"] == [12, 4] for step in ranks.records(tmp_path / "node0"))
    told = ranks.status(tmp_path / "node0")["speed_up"]
    assert told["expected"] > 1.5 and told["got"] > 1.2 and len(told["speeds"]) == 2


def _one_is_missing(config, world):
    """As a launcher says it."""
    import os

    from trainer.commands.train import _shares_really

    os.environ["TRAINYARD_REASON"] = "one host is missing"
    try:
        return _shares_really(config, world)
    finally:
        del os.environ["TRAINYARD_REASON"]


def test_listed_shares_of_which_a_host_is_missing_follow_the_speeds_as_found_ones_do(material, tmp_path):
    """What a rank computes at once is what it has room for then, too, and not what the list had asked for."""
    words = (*LONG, "steps=2", "strategy=zero1", "micro_batch_size=2", "balance=8,4,4")
    patch = {**SLOW, ("trainer.commands.train", "_shares"): _one_is_missing}
    ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch)
    assert all(step["shares"] == [12, 4] for step in ranks.records(tmp_path / "node0"))
    assert ranks.status(tmp_path / "node0")["advice"] is None


def _eight(config, world):
    return 8


def test_shares_that_memory_has_no_room_for_stay_even_and_that_is_told(material, tmp_path):
    """By speed rank 0 would have 12 of 16 sequences, which zero3 computes at once, as it would 8."""
    patch = {**SLOW, ("trainer.room", "_most"): _eight}
    words = (*LONG, "steps=2", "strategy=zero3", "micro_batch_size=8")
    ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch)
    assert all(step["shares"] == [8, 8] for step in ranks.records(tmp_path / "node0"))
    told = ranks.status(tmp_path / "node0")["advice"]
    assert "with zero3 all ranks go through as many" in told and "has no memory for so many" in told


def _unwatched(*arguments, **keys):
    from trainer.commands.train import Balance_really

    return Balance_really(*arguments, **{**keys, "watched": False})


@pytest.mark.full
def test_ranks_that_no_step_tells_of_are_tried_anew(material, tmp_path, alone):
    """As on GPUs under a sharded strategy: rank 1 recovers, which shows in none of the steps' times."""
    patch = {
        **SLOW,
        ("trainer.commands.train", "Balance"): _unwatched,
        ("trainer.balance", "AGAIN"): 0.5,
        ("trainer.balance", "REST"): 0,
    }
    words = (*LONG, "strategy=zero3", "micro_batch_size=8")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch) == pytest.approx(
        alone, rel=1e-5
    )
    steps = ranks.records(tmp_path / "node0")
    assert steps[0]["shares"] == [12, 4] and steps[-1]["shares"] == [8, 8]
    events = ranks.records(tmp_path / "node0", "event")
    assert sum(one["event"] == "calibration" for one in events) >= 2
    assert not events[0]["watched"] and not ranks.status(tmp_path / "node0")["parts"]["watched"]


def _full(run, packed, sequences, routed=None):
    """Rank 1 has memory for two sequences at once, which it learns in the middle of a pass."""
    import torch

    from trainer.loop import summed_loss

    loss = summed_loss(run, packed, sequences, routed)
    if run.world.rank == 1 and len(sequences) > 2:
        raise torch.OutOfMemoryError
    return loss


def _yes(device):
    return True


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_memory_that_is_less_than_was_counted(material, tmp_path, alone, strategy):
    patch = {
        ("trainer.calibrate", "summed_loss"): _full,
        ("trainer.calibrate", "tries_memory"): _yes,
    }
    words = (*LONG, f"strategy={strategy}", "micro_batch_size=8")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch) == pytest.approx(
        alone, rel=1e-5
    )
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert "memory was tried, and is less than was counted. At once computes: rank 1 on node1 2" in log


def _full_late(run, packed, sequences, routed=None):
    """Rank 1 has memory for two sequences at once, which it learns at the end of a pass: its gradients are made."""
    import torch

    from trainer.loop import summed_loss

    def full(gradient):
        raise torch.OutOfMemoryError

    def watched(part, given, made):
        (made[0] if isinstance(made, tuple) else made).register_hook(full)

    if run.world.rank == 0 or len(sequences) <= 2:
        return summed_loss(run, packed, sequences, routed)
    # FSDP gives a layer's class another name.
    hook = run.strategy.model.get_submodule("transformer.h.0").register_forward_hook(watched)
    try:
        return summed_loss(run, packed, sequences, routed)
    finally:
        hook.remove()


def _roomy(*arguments, **keys):
    """By what was counted, each rank has room for eight sequences at once."""
    from trainer.commands.train import Balance_really

    return Balance_really(*arguments, **{**keys, "at_once": [8, 8]})


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_trial_that_failed_leaves_no_gradient_to_the_first_step(material, tmp_path, alone, strategy):
    """Of 4 sequences, as the share wants, where two are known to have room: no other pass follows."""
    patch = {
        ("trainer.commands.train", "Balance"): _roomy,
        ("trainer.calibrate", "summed_loss"): _full_late,
        ("trainer.calibrate", "tries_memory"): _yes,
    }
    words = (*LONG, "balance=3,13", f"strategy={strategy}", "micro_batch_size=2")
    assert ranks.run(tmp_path, 2, material / "run.yaml", *words, patch=patch) == pytest.approx(
        alone, rel=1e-5
    )
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert "At once computes: rank 1 on node1 2" in log


def test_shares_that_are_set(material, tmp_path):
    alone = ranks.run(tmp_path / "alone", 1, material / "run.yaml", "batch_size=7", "steps=6")
    found = ranks.run(tmp_path / "both", 2, material / "run.yaml", "steps=6", "balance=5,2")
    assert found == pytest.approx(alone, rel=1e-5)
    assert [one["shares"] for one in ranks.records(tmp_path / "both/node1")] == [[5, 2]] * 6
    went = ranks.status(tmp_path / "both/node0")["parts"]
    assert min(went["compute"]) > 0 and len(went["ranks"]) == 2
    mean = sum(one["step_seconds"] for one in ranks.records(tmp_path / "both/node0")) / 6
    by_rank = ("compute", "compression", "optimizer", "waiting")
    assert went["wire"] + sum(went[name][1] for name in by_rank) == pytest.approx(mean, rel=0.2)
    assert went["compression"] == [0, 0] and min(went["optimizer"]) > 0
    (start,) = ranks.records(tmp_path / "both/node0", "event")[:1]
    assert start["event"] == "start" and start["ranks"] == went["ranks"]
    assert start["watched"] and went["watched"]
    (both,) = start["machines"]  # two hosts that are one machine are alike
    assert both["hosts"] == ["node0", "node1"] and both["cards"] == [] and both["driver"] is None
    assert both["kernel"] == platform.release() and both["python"] == platform.python_version()
    assert both["torch"] == torch.__version__ and both["trainer"].startswith(trainer.__version__)
    assert both["cpu"] and both["cores"] >= 1 and both["memory_bytes"] > 1e8


def test_shares_for_other_ranks_are_refused(material, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", "balance=3,2,2", codes=[2, 2])
    assert (
        "found 3 shares (3,2,2); expected one for each of the 2 ranks"
        in ranks.status(tmp_path / "node0")["reason"]
    )
