"""Ways for gradients to travel, and when one is proposed."""

import pytest

from trainer import config as configuration
from trainer import ways
from trainer.errors import BadInput

SENT = ways.sent(4_000_000, 200_000, 3, 50)


def parts(wire, compute=1.0, optimizer=0.0):
    return {
        "compute": [compute - optimizer, 0.5 - optimizer],
        "compression": [0.0, 0.0],
        "optimizer": [optimizer, optimizer],
        "waiting": [0.0, compute - 0.5],
        "wire": wire,
    }


def test_what_each_way_sends():
    """A ring of three: each rank sends 4/3 of all; a block of 1,024 values in 8 bits has a scale of 4 bytes."""
    assert SENT["exact"] == 5_333_333 and SENT["16bit"] == 2_666_666
    assert SENT["8bit"] == pytest.approx(5_333_333 * 1028 / 4096, abs=1)
    assert SENT["powersgd"] == 266_666 and SENT["diloco"] == SENT["8bit"] // 50


def test_what_checkpoints_send():
    """Sums in float32 by two ranks, once in 500 steps: of what is left out, and with diloco of both moments."""
    every = ways.saved(4_000_000, 2, 500)
    assert every == {"exact": 0, "16bit": 8000, "8bit": 8000, "powersgd": 8000, "diloco": 24_000}
    assert set(ways.saved(4_000_000, 2, 0).values()) == {0}
    # An exact step of three ranks takes 5.3 MB and 40 s: diloco 1/199 of that, and three such steps in 500.
    told = ways.proposal(parts(40.0), SENT, 50, ways.saved(4_000_000, 3, 500))
    assert "comm: diloco sends 1.1% of the bytes" in told and "28.5 times as fast" in told


@pytest.mark.parametrize(
    ("wire", "way", "faster"),
    [(0.9, "16bit", "1.3"), (1.9, "8bit", "2.0"), (5.0, "powersgd", "4.8"), (40.0, "diloco", "34.1")],
)
def test_the_cheapest_way_that_is_enough_is_proposed(wire, way, faster):
    text = ways.proposal(parts(wire), SENT, 50)
    assert f"comm: {way} sends" in text and f"{faster} times as fast" in text and ways.PRICE[way] in text
    assert f"-e resume=true -e comm={way}" in text
    held = ways.proposal(parts(wire), SENT, 50, trained=[1 << 30, 3 << 20])
    assert f"; {3 * 1027 if way == 'diloco' else 1027:,} MiB more on each rank. " in held


def test_where_the_network_takes_little_nothing_is_said():
    assert ways.proposal(parts(0.5), SENT, 50) is None and ways.proposal(parts(0.0), SENT, 50) is None


def test_what_backward_hides_of_exact_gradients_other_ways_would_not():
    """Of ten buckets nine travel within the 2/3 of a micro-batch's 3 s that are backward: 1.8 s, which come on top of
    the 2 s that are seen. Half of 3.8 s would be 1.9 s, and is more than a way may take of 3 s; a quarter is less.
    """
    behind = ways.behind_backward(3.0, 10)
    assert behind == pytest.approx(1.8) and ways.behind_backward(3.0, 1) == 0
    assert "comm: 16bit" in ways.proposal(parts(2.0, 3.0), SENT, 50)
    text = ways.proposal(parts(2.0, 3.0), SENT, 50, behind=behind)
    assert "comm: 8bit sends 25.1% of the bytes" in text and "1.3 times as fast" in text


def test_a_way_whose_coding_takes_longer_than_what_it_saves_is_not_proposed():
    """An optimizer of 0.2 s: 16bit takes 0.4 s to code on a CPU and saves 0.6 of 1.2 s, powersgd takes 2 s."""
    text = ways.proposal(parts(1.2, 1.4, 0.2), SENT, 50)
    assert "comm: diloco sends" in text and "1.8 times as fast" in text
    only = ways.proposal(parts(1.2, 1.4, 0.2), SENT, 50, allowed=("powersgd",))
    assert ways.LARGER in only and "comm:" not in only
    on_gpu = ways.proposal(parts(1.2, 1.4, 0.2), SENT, 50, allowed=("powersgd",), device="cuda")
    assert "comm: powersgd" in on_gpu


@pytest.mark.parametrize(
    ("keys", "way"),
    [({"dtype": "float16"}, None), ({"router_aux_loss_coef": 0.01}, "powersgd"), ({}, "diloco")],
)
def test_what_a_run_would_be_refused_for_is_not_proposed(keys, way):
    """A slow wire, for which only diloco sends little enough, and the configuration's own refusals."""
    asked = configuration.from_mapping(keys)
    allowed = ways.open_to(asked.dtype, bool(asked.router_aux_loss_coef))
    for one in ways.PRICE:
        if one in allowed:
            configuration.check_together(configuration.from_mapping({**keys, "comm": one}))
        else:
            with pytest.raises(BadInput, match=f"{one}"):
                configuration.check_together(configuration.from_mapping({**keys, "comm": one}))
    text = ways.proposal(parts(40.0), SENT, 50, allowed=allowed)
    assert (
        "a larger batch_size makes that less of a step and stays exact, but is another optimisation" in text
    )
    assert (f"comm: {way} sends" in text) if way else ("comm" not in text)
    # From random weights diloco ends too far off to be told of as a cure.
    allowed = ways.advised(asked.dtype, bool(asked.router_aux_loss_coef), True)
    text = ways.proposal(parts(40.0), SENT, 50, allowed=allowed)
    assert "diloco" not in text and ("comm: powersgd sends" in text) == bool(way)


@pytest.mark.parametrize(
    ("strategy", "passes", "cure"),
    [
        ("zero1", 4, ways.LARGER),
        ("split", 1, ways.LARGER),
        (
            "zero2",
            4,
            "sends gradients for each of 4 micro-batches, so that a larger micro_batch_size, for which",
        ),
        (
            "fsdp",
            1,
            "sends weights and gradients for each of 1 micro-batches, so that a larger batch_size with as",
        ),
    ],
)
def test_of_a_strategy_that_no_other_way_is_open_to_the_right_cure_is_told(strategy, passes, cure):
    """What travels for each micro-batch is no less of a step that has more of them."""
    text = ways.proposal_of_others(parts(2.0, 3.0), strategy, passes)
    assert text.startswith("the network takes 40% of a step (2 of 5 s); ") and cure in text
    assert "strategy: ddp, where it has room" in text
    assert ways.proposal_of_others(parts(1.4, 3.0), strategy, passes) is None


def test_a_model_without_matrices_gains_nothing_by_powersgd():
    flat = {**SENT, "powersgd": SENT["exact"]}
    assert "comm: diloco" in ways.proposal(parts(5.0), flat, 50)


def test_what_goes_by_host():
    """Four ranks on two hosts: each host sends what a rank of two would; on one host nothing is coded."""
    four, two = ways.sent(4_000_000, 200_000, 4, 50, hosts=2), ways.sent(4_000_000, 200_000, 2, 50)
    assert four == two and four["exact"] == 4_000_000
    assert ways.saved(4_000_000, 4, 50, hosts=2) == ways.saved(4_000_000, 2, 50)
    row = ways.sent(4_000_000, 200_000, 4, 50, hosts=2, row=True)
    assert row == {**two, "exact": 6_000_000}
    assert ways.saved(4_000_000, 4, 50, hosts=2, row=True) == ways.saved(4_000_000, 4, 50)
    alone = ways.sent(4_000_000, 200_000, 4, 50, hosts=1)
    assert alone["diloco"] == 120_000 and {alone[way] for way in alone if way != "diloco"} == {6_000_000}
    kept = ways.saved(4_000_000, 4, 500, hosts=1)
    assert kept["diloco"] == 36_000 and not any(kept[way] for way in kept if way != "diloco")


@pytest.mark.parametrize(
    ("sizes", "count", "ends"),
    [
        ([5, 5, 5, 5], 1, [4]),
        ([5, 5, 5, 5], 2, [2, 4]),
        ([5, 5, 5, 5], 4, [1, 2, 3, 4]),
        ([100, 1, 1, 1], 3, [1, 3, 4]),
        ([1, 1, 1, 100], 3, [2, 3, 4]),
        ([9, 30, 15, 15, 20], 3, [2, 4, 5]),
    ],
)
def test_fragments_are_neighbours_and_about_as_large(sizes, count, ends):
    found = ways.fragments(sizes, count)
    assert [one.start for one in found] == [0, *ends[:-1]] and [one.stop for one in found] == ends


def gone_through(steps, sync_every, early, fragments, last=None):
    """(meetings of fragments, ends of rounds that something asks for), by the schedule of strategies/local.py."""
    phases = [number * sync_every // fragments for number in range(1, fragments + 1)]
    met, settled, step, since = 0, 0, 0, [0] * fragments
    for now in range(1, steps + 1):
        step, since = step + 1, [one + 1 for one in since]
        for number, phase in enumerate(phases):
            if (step - phase) % sync_every == 0:
                met, since[number] = met + 1, 0
        asked = any(one and now % one == 0 for one in early)
        if asked or now == last:
            met, since, step = met + sum(map(bool, since)), [0] * fragments, 0
        settled += asked
    return met, settled


@pytest.mark.parametrize(
    ("sync_every", "early", "fragments", "meetings", "early_ones", "steps"),
    [
        (50, (), 1, 1, 0, 50),
        (50, (500, 0), 1, 10, 1, 500),
        (1000, (500,), 1, 1, 1, 500),  # a checkpoint ends the round
        (60, (500,), 1, 9, 1, 500),  # eight of 60 steps, and one of 20
        (50, (500, 50), 1, 10, 10, 500),
        (50, (500, 300), 1, 10 + 10 + 10, 5 + 3 - 1, 1500),
        (50, (500, 130), 1, None, 13 + 50 - 1, 6500),
        (50, (100,), 4, 2.75, 1, 100),  # the last one of the four twice, the others once more at the end
    ],
)
def test_how_often_all_meet(sync_every, early, fragments, meetings, early_ones, steps):
    """By hand, or by going through the schedule step by step."""
    met, settled = gone_through(steps, sync_every, early, fragments)
    assert meetings is None or met == fragments * meetings
    assert settled == early_ones
    between, apart = ways.rhythm(sync_every, *early, fragments=fragments)
    assert between == pytest.approx(steps * fragments / met)
    assert apart == (pytest.approx(steps / settled) if settled else 0)


@pytest.mark.parametrize(
    ("last", "sync_every", "early", "fragments", "meetings", "early_ones"),
    [
        (60, 50, (), 1, 2, 0),  # after 50, and after the last
        (50, 50, (), 1, 1, 0),
        (501, 500, (0,), 1, 2, 0),
        (30, 50, (500,), 1, 1, 0),
        (1_000_000, 50, (), 1, 20_000, 0),
        (700, 50, (500,), 1, 10 + 4, 1),
        (1500, 50, (500, 130), 1, None, 14),  # of which one is after the last step
        (1501, 50, (500, 130), 1, None, 14),
        (60, 50, (), 4, 2, 0),
        (60, 50, (25,), 4, None, 2),
    ],
)
def test_how_often_all_meet_in_a_run_of_known_length(
    last, sync_every, early, fragments, meetings, early_ones
):
    met, settled = gone_through(last, sync_every, early, fragments, last)
    assert meetings is None or met == pytest.approx(fragments * meetings)
    assert settled == early_ones
    between, apart = ways.rhythm(sync_every, *early, fragments=fragments, last=last)
    assert between == pytest.approx(last * fragments / met)
    assert apart == (pytest.approx(last / settled) if settled else 0)


def test_more_fragments_than_parameters():
    with pytest.raises(BadInput, match="diloco_fragments: found 3; expected no more than the 2 parameters"):
        ways.fragments([1, 1], 3)


def test_what_diloco_waits_for():
    """A meeting of 8 s each 50 steps of 1 s; a quarter of it takes 2 s, which two steps hide."""
    assert ways.waiting(8.0, 1.0, 1, 0, 50) == ways.waiting(8.0, 1.0, 4, 0, 50) == pytest.approx(8 / 50)
    assert ways.waiting(8.0, 1.0, 4, 1, 50) == pytest.approx(4 / 50)
    assert ways.waiting(8.0, 1.0, 4, 2, 50) == ways.waiting(8.0, 1.0, 1, 9, 50) == 0


def test_the_advice_hides_meetings_where_that_can_be():
    """40 s of exact sending are 10 s of a meeting: a quarter of it takes three steps of a second."""
    assert ways.hidden(10.0, 1.0, 50) == (4, 3)
    text = ways.proposal(parts(40.0), SENT, 50)
    assert "takes 10 s" in text and "-e diloco_fragments=4 -e diloco_overlap=3" in text
    assert ways.hidden(10.0, 1.0, 50, tensors=2) == (2, 5)  # each goes whole
    assert (
        ways.hidden(10.0, 1.0, 13) == (4, 3) and ways.hidden(10.0, 1.0, 12) is None
    )  # one travels at a time
    text = ways.proposal(parts(40.0), SENT, 50, trained=[1, 1])
    assert "-e diloco_fragments=2 -e diloco_overlap=6" in text
    assert ways.hidden(60.0, 1.0, 50) is None  # more than the steps between two meetings
    assert "diloco_fragments" not in ways.proposal(parts(240.0), SENT, 50)
    assert "diloco_fragments" not in ways.proposal(parts(5.0), SENT, 50)  # powersgd is enough
