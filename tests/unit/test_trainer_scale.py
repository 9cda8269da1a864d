"""The loss's scale in float16: halved at an overflow, doubled after many good steps; a loss that is none is harm."""

import math

import pytest

from trainer import loop


def test_it_grows_in_time_up_to_a_limit():
    progress = loop.Progress()
    assert progress.loss_scale == 2.0**16
    for _ in range(loop.GROWTH - 1):
        loop.keep_scale(progress, 1.0, 1.0)
    assert progress.loss_scale == 2.0**16
    loop.keep_scale(progress, 1.0, 1.0)
    assert (progress.loss_scale, progress.scaled_steps) == (2.0**17, 0)
    for _ in range(20 * loop.GROWTH):
        loop.keep_scale(progress, 1.0, 1.0)
    assert progress.loss_scale == loop.LARGEST_SCALE


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_gradients_that_are_too_large(norm):
    with pytest.raises(loop.Overflow):
        loop.keep_scale(loop.Progress(), 1.0, norm)
    loop.keep_scale(loop.Progress(), math.nan, norm)  # no scale would help: refuse_harm says so
    loop.keep_scale(loop.Progress(loss_scale=1.0), 1.0, norm)
