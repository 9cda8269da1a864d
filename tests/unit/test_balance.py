"""Who does how much of a step: the solver, and what it is told by steps."""

import itertools
import random

import pytest

from trainer import config
from trainer.balance import SETTLE, WINDOW, Balance, given, shares, solve
from trainer.errors import BadInput


def slowest(split, seconds):
    return max(own * share for own, share in zip(seconds, split, strict=True))


def test_what_uneven_shares_are_good_for():
    balance = Balance(12, 3)
    assert balance.gain == 1.0
    for _ in range(WINDOW + SETTLE):
        balance.learn([own * share for own, share in zip((1.0, 1.0, 4.0), balance.split, strict=True)])
    assert balance.split == [6, 5, 1] and balance.gain == pytest.approx(16 / 6)


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


def test_speeds_of_two_to_one_to_one():
    assert solve(16, [1.0, 2.0, 2.0]) == [8, 4, 4]
    assert solve(28, [1.0, 2.0, 4.0]) == [16, 8, 4]


def test_whole_micro_batches_where_another_size_would_be_compiled_anew():
    found = solve(34, [1.0, 2.0, 2.0], grain=4)
    assert sum(found) == 34 and sorted(share % 4 for share in found)[:2] == [0, 0]


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


@pytest.mark.parametrize("balance", ["8,4", "8,x", "16,0", "fast", "8;8", "-1,17"])
def test_shares_that_cannot_be_are_refused(balance):
    with pytest.raises(
        BadInput, match=r"balance: found .*; expected auto, even, or whole numbers .* batch_size, 16"
    ):
        config.check_together(config.from_mapping({"balance": balance, "batch_size": 16}))
