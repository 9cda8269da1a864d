"""The loss's scale in float16: halved at an overflow, doubled after many good steps; a loss that is none is harm."""

import math
from types import SimpleNamespace

import pytest

from trainer import config, loop


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


def test_a_batch_that_no_scale_would_do_for_leaves_it_to_the_next_as_it_was(monkeypatch):
    """With on_nan: skip; one that a smaller scale does for leaves that."""
    said = (
        [loop.Overflow] * 3
        + [loop.Harmful("step 1")]
        + [loop.Overflow, SimpleNamespace(save_failed=False, stop=False)]
    )
    scales = []

    def step(run, observer):
        scales.append(math.log2(run.progress.loss_scale))
        word = said[len(scales) - 1]
        if not isinstance(word, SimpleNamespace):
            raise word
        run.progress.step += 1
        word.save = False
        return word

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(loop, "evaluation_is_due", lambda run: False)
    passed = []
    observer = SimpleNamespace(after_harm=passed.append, after_step=lambda report: None)
    keys = config.from_mapping({"checkpoint_every": 0})
    run = SimpleNamespace(config=keys, progress=loop.Progress(), steps=1)
    loop.train(run, observer)
    assert scales == [16, 15, 14, 13, 16, 15] and len(passed) == 1 and run.progress.loss_scale == 2.0**15
