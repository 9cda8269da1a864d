"""Who does how much of a step: the solver, and what it is told by steps."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch

from trainer import config
from trainer.balance import AGAIN, REST, SETTLE, WINDOW, Balance, given, line, shares, solve
from trainer.commands import train
from trainer.errors import BadInput
from trainer.plan import wire, work
from trainer.plan.resources import Place


def slowest(split, seconds):
    return max(own * share for own, share in zip(seconds, split, strict=True))


def test_what_uneven_shares_are_good_for():
    balance = Balance(12, 3)
    assert balance.gain == 1.0
    for _ in range(WINDOW + SETTLE):
        balance.learn([own * share for own, share in zip((1.0, 1.0, 4.0), balance.split, strict=True)])
    assert balance.split == [6, 5, 1] and balance.gain == pytest.approx(16 / 6)


def test_what_even_shares_would_have_taken_is_known_of_steps_with_others():
    """The second of two equal ranks becomes slow: nothing is held against what it once was."""
    balance = Balance(16, 2)
    assert balance.saved([12.0, 12.0], [12, 4]) == pytest.approx(24 - 12)
    assert balance.saved([12.0, 4.0], [12, 4]) == pytest.approx(
        8 - 12
    )  # it is as fast again: even ones are better
    keeping_step = Balance(16, 2, lockstep=4, at_once=[16, 16])  # 2 passes of 4 and 4, or of 6 and 2
    assert keeping_step.saved([12.0, 12.0], [12, 4]) == pytest.approx(24 - 12)
    assert Balance(16, 2, watched=False).saved([12.0, 12.0], [12, 4]) is None


PASSES = [{1: 1.0, 4: 1.0}, {1: 1.2, 4: 1.2}]  # seconds of micro-batches, whatever their size


def by_passes(split, tried=PASSES, size=4):
    """Each rank's seconds of a step, by hand: of its passes, and of their sequences."""
    times = []
    for share, one in zip(split, tried, strict=True):
        each = (one[4] - one[1]) / 3
        times.append(-(-share // size) * (one[1] - each) + share * each)
    return times


def test_a_micro_batch_more_takes_its_time_whatever_its_size():
    """12 and 12 are three passes each, 3.6 s. As if sequences took the time, 13 and 11 were sooner: four are 4 s."""
    balance = Balance(24, 2, at_once=[4, 4])
    balance.begin([1.0 / 4, 1.2 / 4], PASSES)
    assert balance.split == [12, 12]
    assert not any(balance.learn(by_passes(balance.split)) for _ in range(60)) and balance.split == [12, 12]
    assert balance.saved([4.0, 3.6], [13, 11]) == pytest.approx(-0.4)
    linear = Balance(24, 2, at_once=[4, 4])
    linear.begin([1.0 / 4, 1.2 / 4])
    assert any(linear.learn(by_passes(linear.split)) for _ in range(60))
    for _ in range(SETTLE + 2 * WINDOW):  # the second takes three times as long now
        balance.learn([own * times for own, times in zip(by_passes(balance.split), (1, 3), strict=True)])
    assert balance.split == [20, 4] and balance.gain == pytest.approx(3 * 3.6 / 5)


@pytest.mark.parametrize("seed", range(20))
def test_with_passes_that_take_something_no_other_shares_are_done_earlier(seed):
    chance = random.Random(seed)
    tried = [
        {1: (least := chance.uniform(0.5, 2)), 4: least + chance.choice((0, 1, 3 * least))} for _ in "abc"
    ]
    balance = Balance(20, 3, at_once=[4, 4, 4])
    balance.begin([one[4] / 4 for one in tried], tried)
    every = (split for split in itertools.product(range(1, 19), repeat=3) if sum(split) == 20)
    least = min(max(by_passes(split, tried)) for split in every)
    assert max(by_passes(balance._solve(), tried)) == pytest.approx(least)


def test_what_two_sizes_tell_of_a_pass():
    assert line({1: 3.0, 4: 6.0}) == (2.0, 1.0)
    assert line({1: 3.0, 4: 2.0}) == (2.0, 0.0)  # never less for a sequence more
    assert line({1: 1.0, 4: 6.0}) == (0.0, 1.5) and line({4: 6.0}) == (0.0, 1.5)


def test_what_listed_shares_are_good_for_is_learnt():
    balance = Balance(16, 2, "12,4")
    assert balance.speeds is None and balance.gain == 1.0
    assert steps(balance, [1.0, 3.0], SETTLE + WINDOW) == 0 and balance.split == [12, 4]
    assert balance.speeds == pytest.approx([1, 1 / 3]) and balance.gain == pytest.approx(24 / 12)
    for other in (Balance(16, 2, "even"), Balance(16, 2, "12,4", lockstep=4, watched=False)):
        steps(other, [1.0, 3.0], 60)
        assert other.speeds is None and not other.stale


def test_what_is_no_step_is_dealt_out_by_the_shares():
    balance = Balance(8, 3)
    assert balance.parts(7) == [range(0, 7, 3), range(1, 7, 3), range(2, 7, 3)]
    balance.split = [5, 2, 1]
    for count in (0, 1, 7, 8, 1000):
        parts = balance.parts(count)
        assert [one for part in parts for one in part] == list(range(count))
        assert all(
            abs(len(part) - count * share / 8) < 1 for part, share in zip(parts, balance.split, strict=True)
        )


def test_even_shares():
    assert shares(7, 3) == [3, 2, 2]
    with pytest.raises(BadInput, match="batch_size 3 is less than the 4 ranks"):
        shares(3, 4)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_shares_are_done_earlier(seed):
    chance = random.Random(seed)
    ranks, batch = chance.randint(1, 4), chance.randint(4, 12)
    seconds = [chance.uniform(0.1, 5) for _ in range(ranks)]
    found = solve(batch, seconds)
    assert sum(found) == batch and min(found) >= 1
    every = (split for split in itertools.product(range(1, batch + 1), repeat=ranks) if sum(split) == batch)
    assert slowest(found, seconds) == pytest.approx(min(slowest(split, seconds) for split in every))


@pytest.mark.parametrize("seed", range(30))
def test_what_no_share_makes_shorter_counts_and_where_it_is_nothing_changes_nothing(seed):
    chance = random.Random(seed)
    ranks, batch = chance.randint(1, 4), chance.randint(4, 12)
    seconds, fixed = ([chance.uniform(0.1, 5) for _ in range(ranks)] for _ in range(2))
    found = solve(batch, seconds, fixed=fixed)
    every = (split for split in itertools.product(range(1, batch + 1), repeat=ranks) if sum(split) == batch)

    def last(split):
        return max(own + share * each for own, share, each in zip(fixed, split, seconds, strict=True))

    assert sum(found) == batch and last(found) == pytest.approx(min(map(last, every)))
    assert solve(batch, seconds, fixed=[0.0] * ranks) == solve(batch, seconds)


def test_a_rank_whose_optimizer_takes_longer_computes_less():
    """Both take 1 s a sequence, and the second 4 s for its optimizer: 10 and 10 s instead of 8 and 12."""
    balance = Balance(16, 2)
    for _ in range(SETTLE + WINDOW):
        balance.learn([float(share) for share in balance.split], [0.0, 4.0])
    assert balance.split == [10, 6] and balance.gain == balance.expected == pytest.approx(12 / 10)
    assert balance.saved([10.0, 6.0], [10, 6]) == pytest.approx(2.0)
    alike = Balance(16, 2)
    for _ in range(SETTLE + WINDOW):
        alike.learn([float(share) for share in alike.split], [4.0, 4.0])
    assert alike.split == [8, 8]


def test_speeds_of_two_to_one_to_one():
    assert solve(16, [1.0, 2.0, 2.0]) == [8, 4, 4]
    assert solve(28, [1.0, 2.0, 4.0]) == [16, 8, 4]


def test_whole_micro_batches_where_another_size_would_be_compiled_anew():
    found = solve(34, [1.0, 2.0, 2.0], grain=4)
    assert sum(found) == 34 and sorted(share % 4 for share in found)[:2] == [0, 0]
    assert solve(8, [1.0, 1.0], grain=4) == [4, 4]  # one for each, and none left over


def steps(balance, seconds, count):
    """So many steps of ranks that take `seconds` a sequence; how often the shares changed."""
    return sum(
        balance.learn([own * share for own, share in zip(seconds, balance.split, strict=True)])
        for _ in range(count)
    )


def test_shares_follow_the_speeds_and_then_stay():
    balance = Balance(16, 3)
    assert balance.split == [6, 5, 5]
    assert steps(balance, [1.0, 2.0, 2.0], SETTLE + WINDOW - 1) == 0
    assert steps(balance, [1.0, 2.0, 2.0], 1) == 1
    assert balance.split == [8, 4, 4] and balance.expected == pytest.approx(10 / 8)
    assert steps(balance, [1.0, 2.0, 2.0], 50) == 0


def test_a_window_is_of_steps_of_its_own_and_those_just_after_a_change_say_nothing():
    balance = Balance(16, 2)
    for seconds in ([1.0, 3.0], [3.0, 1.0], [1.0, 3.0]):
        assert steps(balance, seconds, SETTLE + WINDOW - 1) == 0
        assert steps(balance, seconds, 1) == 1
    steps(balance, [1.0, 3.0], SETTLE + WINDOW)  # of which nothing changes
    assert steps(balance, [3.0, 1.0], WINDOW - 1) == 0 and steps(balance, [3.0, 1.0], 1) == 1


def test_a_machine_that_slows_down_and_returns():
    """Step by step: half of what was known before still counts."""
    balance, a_while = Balance(16, 2), 3 * (SETTLE + WINDOW)
    assert steps(balance, [1.0, 1.0], SETTLE + WINDOW) == 0
    assert steps(balance, [1.0, 2.0], a_while) >= 1
    assert balance.split == [11, 5] or balance.split == [10, 6]
    total = 1 + 1 / 2  # of both machines' speeds
    assert 16 / max(balance.split[0], 2 * balance.split[1]) > 0.88 * total
    assert steps(balance, [1.0, 1.0], a_while) >= 1
    assert max(balance.split) <= 9


@pytest.mark.parametrize("phase", range(2 * WINDOW))
def test_half_of_a_machines_speed_is_made_up_for_within_thirty_steps(phase):
    """1:2:2 becomes 2:2:2, whichever step of a window it is that meets it first."""
    balance = Balance(48, 3)
    steps(balance, [1.0, 2.0, 2.0], SETTLE + WINDOW + phase)
    assert balance.split == [24, 12, 12]
    steps(balance, [2.0, 2.0, 2.0], 20)
    assert balance.split == [16, 16, 16]
    steps(balance, [1.0, 2.0, 2.0], 30)  # and when it is back
    assert balance.split == [24, 12, 12]


def lockstep_seconds(split, seconds, size):
    """A step's computing, by hand: each pass as long as its slowest rank, a rank without sequences costs nothing."""
    count, total = -(-max(split) // size), 0.0
    for number in range(count):
        mine = [share // count + (number < share % count) for share in split]
        total += max(own * one for own, one in zip(seconds, mine, strict=True))
    return total


@pytest.mark.parametrize("seconds", [[1.0, 3.0], [1.0, 2.0, 2.0], [1.0, 2.2, 2.0], [1.0, 1.0, 9.0]])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_that_keep_step_are_never_slower_than_with_even_shares(seconds, size):
    balance = Balance(24, len(seconds), lockstep=size)
    even = balance.split
    steps(balance, seconds, 60)
    now, then = (lockstep_seconds(split, seconds, size) for split in (balance.split, even))
    assert now <= then and balance.gain == pytest.approx(then / now)


def test_ranks_that_keep_step_need_no_more_passes_than_with_even_shares():
    balance = Balance(16, 2, lockstep=8)
    assert steps(balance, [1.0, 3.0], 60) == 0 and balance.split == [8, 8]
    assert balance.wants == 12
    balance = Balance(16, 2, lockstep=10)
    assert steps(balance, [1.0, 3.0], 60) == 1 and balance.split == [10, 6]
    balance = Balance(16, 2, lockstep=12)
    assert steps(balance, [1.0, 3.0], 60) == 1 and balance.split == [12, 4] and balance.wants is None
    balance = Balance(16, 2, lockstep=8)
    assert steps(balance, [1.0, 1.01], 60) == 0 and balance.wants is None
    balance = Balance(16, 2, lockstep=4)
    balance.begin([1.0, 4.0])  # 13 and 3 in two passes
    assert balance.split == [8, 8] and balance.wants == 7
    balance.begin([1.0, 1.0])
    assert balance.wants is None


def test_a_faster_rank_that_keeps_step_computes_more_at_once_where_it_has_room():
    balance = Balance(16, 2, lockstep=2, at_once=[16, 16])
    assert balance.passes == 4
    balance.begin([1.0, 3.0])
    assert balance.split == [12, 4] and balance.passes == 4 and balance.wants is None
    assert [balance.largest(rank) for rank in (0, 1)] == [3, 1]
    balance = Balance(16, 2, lockstep=8, at_once=[10, 16])
    balance.begin([1.0, 3.0])
    assert balance.split == [10, 6] and balance.passes == 1 and balance.wants == 12


def test_ranks_that_keep_step_make_do_with_what_memory_one_has():
    """Even shares of 8 are 3 micro-batches of what the second has room for; by speed, as many as are worth it."""
    balance = Balance(16, 2, "even", lockstep=8, at_once=[8, 3])
    assert balance.split == [8, 8] and balance.passes == 3 and balance.largest(1) == 3
    balance = Balance(16, 2, lockstep=8, at_once=[8, 3])
    balance.begin([1.0, 3.0])
    assert balance.split == [12, 4] and balance.passes == 2
    balance = Balance(16, 2, lockstep=8, at_once=[16, 3])
    balance.begin([1.0, 1.0])  # 13 and 3 at once would take longer
    assert balance.split == [8, 8] and balance.passes == 3
    balance.begin([1.0, 4.0])
    assert balance.split == [13, 3] and balance.passes == 1 and balance.wants is None
    balance = Balance(200, 2, lockstep=100, at_once=[102, 98])
    balance.begin([1.0, 1.0])
    assert balance._solve() == [102, 98]  # a pass more, for a step of 100 instead of 102, is not worth it
    balance = Balance(200, 2, lockstep=100, at_once=[110, 98])
    balance.begin([1.0, 1.0])
    assert balance._solve() == [102, 98]
    balance = Balance(200, 2, lockstep=100, at_once=[150, 60])
    balance.begin([1.0, 1.0])
    assert balance._solve() == [100, 100]


def test_first_shares_are_even_where_others_are_hardly_better():
    balance = Balance(16, 2)
    balance.begin([1.0, 1.15])
    assert balance.split == [8, 8] and balance.speeds == pytest.approx([1, 1 / 1.15])
    balance.begin([1.0, 3.0])
    assert balance.split == [12, 4] and balance.expected == pytest.approx(2)
    balance.begin([1.0, 1.0])  # tried anew, in mid-run
    assert balance.split == [8, 8] and balance.expected == pytest.approx(12 / 8)


def test_where_no_ranks_seconds_are_its_own_all_of_a_step_is_watched():
    balance = Balance(16, 2, lockstep=4, at_once=[16, 16], watched=False)
    balance.begin([1.0, 3.0])
    for seconds, stale in ((12.0, False), (13.0, False), (15.0, True), (12.0, False), (9.0, True)):
        for _ in range(SETTLE + WINDOW):
            assert not balance.learn([seconds, seconds])
        assert balance.split == [12, 4] and balance.stale == stale
    balance.begin([1.0, 1.0])
    assert balance.split == [8, 8] and not balance.stale
    assert steps(balance, [1.0, 9.0], SETTLE + WINDOW) == 0 and not balance.stale
    balance.begin([1.0, 3.0])  # the second may become faster, and a step takes as long as ever
    several = int(AGAIN / 12 / WINDOW)
    assert steps(balance, [1.0, 3.0], SETTLE + several * WINDOW) == 0 and not balance.stale
    assert steps(balance, [1.0, 3.0], WINDOW) == 0 and balance.stale


def test_ranks_are_not_tried_again_before_the_last_trial_has_paid():
    """On a wire whose speed comes and goes all of a step takes another time in every other window."""
    balance, took = Balance(16, 2, lockstep=4, at_once=[16, 16], watched=False), 20.0
    for _ in range(3):
        balance.begin([1.0, 3.0])
        balance.tried(took)
        since = 0.0
        for number in itertools.count():
            seconds = 8.0 if number // WINDOW % 2 else 4.0
            assert not balance.learn([seconds, seconds])
            since += seconds if number >= SETTLE else 0
            if balance.stale:
                break
            assert since < (REST + 10) * took
        assert since >= REST * took
    balance.begin([1.0, 3.0])
    balance.tried(2 * AGAIN / REST)  # ten minutes are too soon after such a trial
    steps(balance, [1.0, 3.0], SETTLE + int(AGAIN / 12) + WINDOW)
    assert not balance.stale
    steps(balance, [1.0, 3.0], int(AGAIN / 12) + WINDOW)
    assert balance.stale


@pytest.mark.parametrize(
    ("keys", "speeds", "split", "faster"),
    [
        ({}, "2,1,1", [24, 12, 12], 16 / 12),
        ({"balance": "even"}, "2,1,1", [16, 16, 16], 1.0),
        ({"balance": "28,10,10"}, "2,1,1", [28, 10, 10], 16 / 14),
        (
            {"strategy": "fsdp", "micro_batch_size": 4},
            "2,1,1",
            [24, 12, 12],
            16 / 12,
        ),  # in 4 micro-batches of 6
        ({"strategy": "fsdp", "micro_batch_size": 4, "compile": True}, "2,1,1", [16, 16, 16], 1.0),
        ({"strategy": "fsdp", "micro_batch_size": 24}, "2,1,1", [24, 12, 12], 16 / 12),
        # In whole micro-batches of 20 there is nothing better than even shares: a run stays with those.
        ({"micro_batch_size": 20, "compile": True}, "1,1,1", [16, 16, 16], 1.0),
        ({"micro_batch_size": 4, "compile": True}, "2,1,1", [24, 12, 12], 16 / 12),
        ({}, None, [16, 16, 16], None),
    ],
)
def test_plan_tells_the_shares_that_speeds_will_lead_to(keys, speeds, split, faster):
    found = work.share(config.from_mapping({"batch_size": 48, **keys}), 3, speeds)
    assert found["split"] == split and found["speed_up"] == (faster and pytest.approx(faster))


@pytest.mark.parametrize(
    ("shares", "more", "passes", "at_once"),
    [("16,16,16", {}, 4, 4), ("28,10,10", {}, 4, 7), ("28,10,10", {"compile": True}, 7, 4)],
)
def test_plan_counts_the_passes_that_listed_shares_take(shares, more, passes, at_once):
    """Ranks that keep step go through as many as by even shares; a larger share's are larger, but for compiled ones."""
    keys = {"batch_size": 48, "micro_batch_size": 4, "strategy": "fsdp", "balance": shares, **more}
    asked = config.from_mapping(keys)
    assert work.share(asked, 3, None)["at_once"] == at_once
    place = Place(3, 3, 1, torch.device("cpu"), 0, 0, 1e9)
    assert wire.by_strategy("fsdp", asked, place, 0, 0, 300) == passes * 300 * 2 // 3


@pytest.mark.parametrize("speeds", ["2,1", "2,1,0", "fast", "1,1,inf", ""])
def test_speeds_that_cannot_be_are_refused(speeds):
    with pytest.raises(BadInput, match=r"--speeds: .*for each of the 3 ranks, by commas, such as 2,1,1"):
        work.share(config.from_mapping({"batch_size": 48}), 3, speeds)


@pytest.mark.parametrize("grain", [1, 3])
def test_no_share_is_larger_than_the_most(grain):
    assert solve(16, [1.0, 9.0], grain, most=[9, 9]) == [9, 7]
    assert solve(16, [1.0, 9.0], grain, most=[8, 8]) == [8, 8]
    assert solve(6, [1.0, 1.0], grain, most=[5, 1]) == [5, 1]  # less than a whole grain, too


def one_by_one(batch_size, seconds, grain, most):
    """What `solve` comes to, by looking at every rank for each sequence."""
    split = [1] * len(seconds)
    if grain > 1 and batch_size >= grain * len(seconds) and min(most) >= grain:
        split = [grain] * len(seconds)
    while (left := batch_size - sum(split)) > 0:
        more = grain if left >= grain else 1
        if not (free := [rank for rank, share in enumerate(split) if share + more <= most[rank]]):
            more, free = 1, [rank for rank, share in enumerate(split) if share < most[rank]]
        split[min(free, key=lambda rank: (split[rank] + more) * seconds[rank])] += more
    return split


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_those_of_a_look_at_every_rank(seed):
    """Ranks as fast as each other, too: the first ones have what is left over."""
    chance = random.Random(seed)
    ranks, grain = chance.randint(1, 12), chance.choice((1, 1, 2, 5))
    batch = ranks * chance.randint(1, 30) + chance.randint(0, ranks - 1)
    seconds = [chance.choice((1.0, 2.0, 2.1, chance.uniform(0.1, 5))) for _ in range(ranks)]
    even = -(-batch // ranks)
    most = [chance.choice((even, even + grain, batch)) for _ in range(ranks)]
    assert solve(batch, seconds, grain, most) == one_by_one(batch, seconds, grain, most)


def test_a_thousand_ranks_are_shared_out_in_no_time():
    """On each of them, again and again; by a look at all for each sequence it was more than a second."""
    chance = random.Random(3)
    seconds = [chance.uniform(0.5, 2.0) for _ in range(1000)]
    begin = time.process_time()
    found = solve(8000, seconds)
    assert time.process_time() - begin < 0.2
    assert sum(found) == 8000 and min(found) >= 1


def test_a_single_slow_step_and_a_little_noise_move_nothing():
    balance, chance = Balance(16, 2), random.Random(0)
    for number in range(200):
        noise = [chance.uniform(0.98, 1.02) * share for share in balance.split]
        if number % 20 == 7:
            noise[number % 2] *= 30
        assert not balance.learn(noise)


@pytest.mark.parametrize(("balance", "split"), [("even", [8, 8]), ("12,4", [12, 4])])
def test_what_is_set_stays(balance, split):
    found = Balance(16, 2, balance)
    assert steps(found, [1.0, 9.0], 50) == 0 and found.split == split


def test_words_and_lists():
    assert given("auto") is given("even") is None
    assert given("8, 4,4") == [8, 4, 4]


@pytest.mark.parametrize(
    ("attempt", "reason", "refused"),
    [(1, "", True), (1, "started on node1, node2 alone", False), (2, "node3 is gone", False)],
)
def test_listed_shares_are_for_when_all_hosts_are_there(monkeypatch, attempt, reason, refused):
    """A host that comes late must not find the run ended: until then, shares are learnt."""
    monkeypatch.setenv("TRAINYARD_REASON", reason)
    environment = SimpleNamespace(attempt=attempt)
    found = config.from_mapping({"balance": "24,12,12", "batch_size": 48})
    two, three = (SimpleNamespace(size=size, environment=environment) for size in (2, 3))
    assert train._shares(found, three) == "24,12,12"
    if refused:
        with pytest.raises(BadInput, match="found 3 shares"):
            train._shares(found, two)
    else:
        assert train._shares(found, two) == "auto"


@pytest.mark.parametrize("balance", ["8,4", "8,x", "16,0", "fast", "8;8", "-1,17"])
def test_shares_that_cannot_be_are_refused(balance):
    with pytest.raises(
        BadInput, match=r"balance: found .*; expected auto, even, or whole numbers .* batch_size, 16"
    ):
        config.check_together(config.from_mapping({"balance": balance, "batch_size": 16}))
