"""What is held out, several sets at once, and how much an epoch is."""

import itertools

import numpy as np
import pytest
from corpora import prepared, spans, write_lines

from trainer.config import check_together, from_mapping
from trainer.data import index, pack, read, tokenizer
from trainer.errors import BadInput
from trainer.plan import work


def texts_of(packed, tokens):
    """The documents of a Packed of whole documents, as texts."""
    found = []
    for k in range(len(packed)):
        inputs, _, positions = packed[k]
        found += [
            tokens.decode(inputs[begin:end], skip_special_tokens=True) for begin, end in spans(positions)
        ]
    return [text for text in found if text]


def test_the_split_is_disjoint_complete_and_chosen_by_the_seed(tmp_path):
    texts = [f"text number {n}" for n in range(200)]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])

    def parts(**settings):
        config = from_mapping(
            {"dataset": path, "vocab_size": 300, "sequence_length": 32, "overlong": "refuse", **settings}
        )
        tokens = tokenizer.wrap(tokenizer.train(config))
        train, held_out = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
        return texts_of(train, tokens), texts_of(held_out, tokens)

    train, held_out = parts(validation_split=0.2)
    assert sorted(train + held_out) == sorted(texts)
    assert 20 < len(held_out) < 60
    assert set(parts(validation_split=0.2, seed=1)[1]) != set(held_out)
    assert set(parts(validation_split=0.2, sequence_length=64)[1]) == set(held_out)
    assert set(held_out) < set(parts(validation_split=0.4)[1])
    with pytest.raises(BadInput, match=r"validation_split 0.01 of its 3 documents leaves none held out"):
        parts(validation_split=0.01, max_samples=3)


def test_of_a_text_paragraphs_are_held_out_and_nothing_is_predicted_across_the_gap(tmp_path):
    paragraphs = [f"paragraph {n} of the text\n\n" for n in range(60)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    settings = {"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 32}
    everything, _ = prepared(from_mapping(settings), tmp_path / "cache")
    train, held_out = prepared(from_mapping({**settings, "validation_split": 0.25}), tmp_path / "cache")
    assert train.token_count + held_out.token_count == everything.token_count
    runs = [index.chosen(0, n, 0.25) for n in range(60)]
    changes = sum(a != b for a, b in itertools.pairwise(runs))
    assert train.documents + held_out.documents == changes + 1
    lost = train.documents + held_out.documents  # the first tokens of each
    assert train.valid.sum() + held_out.valid.sum() == everything.token_count - lost


def test_a_validation_file_is_packed_alike(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(50)])
    other = write_lines(tmp_path / "b.jsonl", [{"text": f"other {n}"} for n in range(7)])
    settings = {"dataset": path, "validation": other, "vocab_size": 300, "sequence_length": 16}
    train, held_out = prepared(from_mapping({**settings, "max_samples": 5}), tmp_path / "cache")
    assert (train.documents, held_out.documents) == (5, 7)
    with pytest.raises(BadInput, match="both say what is held out"):
        check_together(from_mapping({**settings, "validation_split": 0.1}))


@pytest.fixture
def three(tmp_path):
    """Three sets: 40 short documents, 10 long ones, and a text."""
    names = [
        write_lines(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(40)]),
        write_lines(tmp_path / "b.jsonl", [{"text": "b" * 60} for n in range(10)]),
    ]
    (tmp_path / "c.txt").write_text("c d e f g\n" * 20)
    return {
        "dataset": ", ".join([*names, str(tmp_path / "c.txt")]),
        "vocab_size": 257,
        "sequence_length": 16,
    }


def test_several_sets_are_one(three, tmp_path):
    packed, _ = prepared(from_mapping(three), tmp_path / "cache")
    alone = [
        prepared(from_mapping({**three, "dataset": name}), tmp_path / "cache")[0]
        for name in read.names(three["dataset"])
    ]
    assert packed.sizes == [len(one) for one in alone] and len(packed) == sum(packed.sizes)
    assert packed.token_count == sum(one.token_count for one in alone)
    assert packed.valid.tolist() == [count for one in alone for count in one.valid]
    k = packed.sizes[0] + packed.sizes[1]
    assert all(np.array_equal(a, b) for a, b in zip(packed[k], alone[2][0], strict=True))
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_weights_are_kept_at_any_world_size(three, tmp_path):
    packed, _ = prepared(from_mapping({**three, "dataset_weights": "6,3,1"}), tmp_path / "cache")
    order = index.Index(7, packed.sizes, packed.weights)
    bounds = np.cumsum([0, *packed.sizes])

    def shares(sequences):
        return np.histogram(sequences, bounds)[0]

    assert order.sequences == len(packed)
    assert shares(order.batch(0, 1000)).tolist() == [600, 300, 100]
    assert shares(order.batch(5000, 1000)).tolist() == [600, 300, 100]
    assert abs(shares(order.batch(0, 100)) - [60, 30, 10]).max() < 20  # mixed within, too
    seen = order.batch(0, 3000)
    for number, size in enumerate(packed.sizes):
        # Each set goes through all of its own before one comes again.
        own = [k for k in seen if bounds[number] <= k < bounds[number + 1]]
        for whole in range(0, len(own) - size, size):
            assert len(set(own[whole : whole + size])) == size
    again = index.Index(7, packed.sizes, packed.weights)
    assert [k for cursor in range(0, 60, 7) for k in again.batch(cursor, 7)] == seen[:63]
    assert index.Index(8, packed.sizes, packed.weights).batch(0, 50) != seen[:50]
    other, _ = prepared(from_mapping({**three, "dataset_weights": "6,3,2"}), tmp_path / "cache")
    without, _ = prepared(from_mapping(three), tmp_path / "cache")
    assert other.sizes == without.sizes == packed.sizes  # and yet a run of one does not go on with another
    assert len({packed.digest, other.digest, without.digest}) == 3


def test_neither_blocks_nor_sets_go_through_their_samples_in_the_same_order():
    order = index.Index(7, [50, 50], [1, 1])
    blocks = [order.batch(1000 * number, 1000) for number in range(2)]
    whose = [[k // 50 for k in block] for block in blocks]
    assert whose[0] != whose[1] and sum(whose[0]) == sum(whose[1]) == 500
    first, second = ([k % 50 for k in blocks[0] if k // 50 == number][:50] for number in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_what_rounding_leaves_of_a_block_is_the_largest_remainders():
    for weights, shares in (
        ([1, 1, 1], [334, 333, 333]),
        ([33.31, 33.33, 33.36], [333, 333, 334]),
        ([33.36, 33.31, 33.33], [334, 333, 333]),
        ([1.6, 1.6, 996.8], [2, 1, 997]),
    ):
        assert index.Index(7, [9, 9, 9], weights).shares == shares and sum(shares) == 1000


@pytest.mark.parametrize("weights", ["1,2", "1,2,x", "1,2,0", "1,2,nan", "1,1,1000000"])
def test_weights_that_do_not_fit_are_refused(three, weights):
    with pytest.raises(BadInput, match=r"dataset_weights: 1,"):
        read.training(from_mapping({**three, "dataset_weights": f"'{weights}'"[1:-1]}))


def test_a_path_with_a_comma_is_one_name(tmp_path):
    path = tmp_path / "one, two.txt"
    path.write_text("words")
    assert read.names(str(path)) == [str(path)]
    assert read.names("a , b") == ["a", "b"]
    config = {"dataset": "x.txt, austen", "validation": "y.txt", "model": "m"}
    places = [
        {"key": "dataset", "name": "x.txt", "place": "/d/x.txt"},
        {"key": "model", "name": "m", "place": "/m"},
    ]
    assert read.placed(config, places) == {"dataset": "/d/x.txt,austen", "validation": "y.txt", "model": "/m"}


def test_an_epoch_is_what_is_trained_on(tmp_path):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name * 100}] * 10)
    data = {"dataset": str(tmp_path / "a.jsonl")}
    for held_out, letters in (
        ({}, 1000),
        ({"validation_split": 0.2}, 800),
        ({"validation": str(tmp_path / "b.jsonl")}, 1000),
    ):
        assert work.trained_on(from_mapping({**data, **held_out})) == (letters, letters // 100)
    for packing, file, steps in ((True, "a.jsonl", 1), (False, "a.jsonl", 5), (False, "a.txt", 1)):
        (tmp_path / "a.txt").write_text("a line\n\n" * 10)
        config = from_mapping({"dataset": str(tmp_path / file), "packing": packing, "batch_size": 2})
        assert work.steps_of_epoch(config, *work.trained_on(config)) == steps
    with pytest.raises(BadInput, match=r"validation: .*no such file"):
        work.trained_on(from_mapping({**data, "validation": "none.jsonl"}))


@pytest.mark.parametrize(
    ("rows", "split", "fault"), [(6, 0.02, "held out"), (1, 0.5, "to train on"), (10, 0.2, "")]
)
def test_a_share_that_leaves_nothing_is_refused_before_any_host_is_touched(tmp_path, rows, split, fault):
    write_lines(tmp_path / "a.jsonl", [{"text": "words"}] * 500)
    write_lines(tmp_path / "b.jsonl", [{"text": "words"}] * rows)
    config = from_mapping({"dataset": f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "validation_split": split})
    if not fault:
        assert read.check(config)[0] == 510
        return
    with pytest.raises(
        BadInput, match=f"b.jsonl: validation_split {split} of its {rows} documents .* none {fault}"
    ):
        read.check(config)
