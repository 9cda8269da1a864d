"""The trainer's own tokenizer, the order of an epoch, and the last step."""

import itertools

import numpy as np
import pytest

from trainer.config import from_mapping
from trainer.data import index, tokenizer


def test_the_tokenizer_is_the_same_each_time_and_loses_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße, 世界!  Two  spaces\tand a tab.\r\n\r\n" * 9, newline="")
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300})
    text = tokenizer.train(config)
    assert text == tokenizer.train(config)
    tokens = tokenizer.wrap(text)
    for sample in ("Grüße, 世界!  Two  spaces\tand\r\n", "never seen: Ω ñ 🙂"):
        assert tokens.decode(tokens(sample).input_ids) == sample


@pytest.mark.parametrize("size", [1, 2, 3, 11, 64, 65, 1000])
def test_an_epoch_is_every_sequence_once(size):
    order = index.Index(seed=3, sequences=size)
    run = order.batch(0, 3 * size)
    for epoch in range(3):
        assert sorted(run[size * epoch : size * (epoch + 1)]) == list(range(size))
    assert index.Index(seed=3, sequences=size).batch(size - 1, 5) == order.batch(0, size + 4)[-5:]
    if size > 10:
        assert run[:size] != run[size : 2 * size]
        assert index.Index(seed=4, sequences=size).batch(0, size) != run[:size]


def test_every_order_is_as_likely():
    """Where the first of 11 goes, and what follows it, over many seeds: chi-squared with 10 degrees of freedom."""
    for what in (lambda run: run[0], lambda run: run[5], lambda run: (run[1] - run[0]) % 11):
        found = np.bincount([what(index.Index(seed, 11).batch(0, 6)) for seed in range(4400)], minlength=11)
        assert ((found[found > 0] - 400) ** 2 / 400).sum() < 60


@pytest.mark.parametrize(
    ("settings", "done", "last"),
    [
        ({}, (0, 0), 25),  # one epoch of 100 sequences, 4 a step
        ({"epochs": 2.5}, (0, 0), 63),
        ({"steps": 7}, (0, 0), 7),
        ({"steps": 1000}, (0, 0), 1000),
        ({"steps": 1000, "epochs": 1}, (0, 0), 25),
        ({"steps": 10, "epochs": 1}, (0, 0), 10),
        ({"epochs": 1}, (10, 80), 15),  # ten steps of 8 before; 20 sequences are left
        ({"epochs": 1}, (25, 100), 25),
        ({"epochs": 1}, (13, 104), 13),  # the last step of 8 before went beyond the end
        ({"epochs": 1}, (15, 120), 15),
    ],
)
def test_last_step(settings, done, last):
    assert index.last_step(from_mapping({"batch_size": 4, **settings}), 100, *done) == last


def test_the_number_of_steps_is_that_of_the_decimal_fraction():
    """Not of the nearest binary one, whose product may be more than a whole number, by its rounding."""
    for hundredths, sequences in itertools.product(range(1, 301), (1, 7, 50, 100, 300, 12_345, 10**9 + 100)):
        config = from_mapping({"batch_size": 1, "epochs": f"{hundredths / 100:.2f}"})
        assert index.last_step(config, sequences) == -(-hundredths * sequences // 100)
    for epochs, sequences, last in ((5 / 3, 3, 5), (1 + 1e-9, 100, 101), (1e-9, 100, 1), (1e6, 1, 10**6)):
        config = from_mapping({"batch_size": 1, "epochs": epochs})
        assert index.last_step(config, sequences) == last
