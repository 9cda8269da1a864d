"""Ways for gradients to travel, and when one is proposed."""

import pytest

from trainer import ways

SENT = ways.sent(4_000_000, 200_000, 3, 50)


def parts(wire, compute=1.0):
    return {"compute": [compute, 0.5], "waiting": [0.0, compute - 0.5], "wire": wire, "rest": 0.0}


def test_what_each_way_sends():
    """A ring of three: each rank sends 4/3 of all; a block of 1,024 values in 8 bits has a scale of 4 bytes."""
    assert SENT["exact"] == 5_333_333 and SENT["16bit"] == 2_666_666
    assert SENT["8bit"] == pytest.approx(5_333_333 * 1028 / 4096, abs=1)
    assert SENT["powersgd"] == 266_666 and SENT["diloco"] == SENT["8bit"] // 50


@pytest.mark.parametrize(
    ("wire", "way", "faster"),
    [(0.9, "16bit", "1.3"), (1.9, "8bit", "2.0"), (5.0, "powersgd", "4.8"), (40.0, "diloco", "34.1")],
)
def test_the_cheapest_way_that_is_enough_is_proposed(wire, way, faster):
    text = ways.proposal(parts(wire), SENT)
    assert f"comm: {way} sends" in text and f"{faster} times as fast" in text and ways.PRICE[way] in text
    assert f"-e resume=true -e comm={way}" in text


def test_where_the_network_takes_little_nothing_is_said():
    assert ways.proposal(parts(0.5), SENT) is None and ways.proposal(parts(0.0), SENT) is None


def test_a_model_without_matrices_gains_nothing_by_powersgd():
    flat = {**SENT, "powersgd": SENT["exact"]}
    assert "comm: diloco" in ways.proposal(parts(5.0), flat)
