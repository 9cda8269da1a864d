"""Reading, packing and indexing."""

import json

import numpy as np
import pytest

from trainer.config import from_mapping
from trainer.data import index, pack, read, tokenizer
from trainer.errors import BadInput

REFUSED = {
    "not JSON": ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
    "not an object": ("a.jsonl", "[1]\n", 'a.jsonl:1: expected a JSON object like {"text"'),
    "no such field": (
        "a.jsonl",
        '\n{"body": "x", "id": 1}\n',
        "a.jsonl:2: no field 'text'; its fields are: body, id. Set text_field",
    ),
    "no fields": ("a.jsonl", "{}\n", "its fields are: none"),
    "not a text": ("a.jsonl", '{"text": null}\n', "a.jsonl:1: field 'text': expected a text, found null"),
    "half a character": ("a.jsonl", '{"text": "\\ud800"}\n', "half a character"),
    "too deep": ("a.jsonl", "[" * 100000 + "\n", "a.jsonl:1: not JSON"),
    "not UTF-8": ("a.txt", b"good\nand caf\xe9\n", "a.txt:2: not UTF-8: byte 0xe9 at column 8"),
    "not UTF-8 either": ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8"),
    "empty text": ("a.txt", "", "no text in it"),
    "blank text": ("a.txt", " \n\n", "no text in it"),
    "empty JSONL": ("a.jsonl", "\n", "no text in it"),
    "another kind of file": ("a.csv", "x", "ends in .txt or .jsonl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    file, content, message = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as refused:
        list(read.samples(from_mapping({"dataset": str(path)})))
    assert message in str(refused.value)


def test_missing_datasets_name_the_shipped_ones(tmp_path):
    for name in ("nothing", str(tmp_path / "none.txt")):
        with pytest.raises(BadInput, match=r"no such file or directory.*austen"):
            read.resolve(from_mapping({"dataset": name}))
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(BadInput, match=r"no \.txt or \.jsonl file in this directory; found notes.md"):
        read.resolve(from_mapping({"dataset": str(tmp_path)}))


def test_samples_of_texts_and_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"t": "one"}\n\n{"t": ""}\n{"t": "two"}\n')
    (tmp_path / "b.txt").write_text("\ufefffirst\nstill first\n\n\nsecond\n", encoding="utf-8")
    config = from_mapping({"dataset": str(tmp_path), "text_field": "t"})
    found = list(read.samples(config))
    assert found == [("one", True), ("two", True), ("first\nstill first\n\n\n", False), ("second\n", True)]
    limited = from_mapping({"dataset": str(tmp_path), "text_field": "t", "max_samples": 3})
    assert list(read.samples(limited)) == [*found[:2], (found[2][0], True)]
    assert read.digest(config) != read.digest(limited)


def test_a_text_without_blank_lines_is_cut_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"line number {n} of many\n" for n in range(20000))
    path.write_text(text)
    found = list(read.samples(from_mapping({"dataset": str(path)})))
    assert "".join(piece for piece, _ in found) == text
    assert max(len(piece) for piece, _ in found) < read.LONGEST_PARAGRAPH + 100
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Documents of 1 to 40 words in sequences of 16; (Packed, documents as ids with their end token)."""
    folder = tmp_path_factory.mktemp("packed")
    texts = [" ".join(f"w{(n * k) % 23}" for k in range(1 + (n * 7) % 40)) for n in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = from_mapping({"dataset": str(folder / "a.jsonl"), "vocab_size": 300, "sequence_length": 16})
    tokens = tokenizer.wrap(tokenizer.train(config))
    documents = [[*tokens(text).input_ids, tokens.eos_token_id] for text in texts]
    return pack.prepare(config, read.digest(config), tokens, folder / "cache"), documents


def test_no_token_is_dropped_and_each_is_predicted_once(packed):
    packed, documents = packed
    stream = [token for document in documents for token in document]
    inputs = np.concatenate([packed[k][0] for k in range(len(packed))])
    labels = np.concatenate([packed[k][1] for k in range(len(packed))])
    assert inputs[: len(stream) - 1].tolist() == stream[:-1]
    expected = [token if n else pack.IGNORE for document in documents for n, token in enumerate(document)][1:]
    assert labels.tolist() == expected + [pack.IGNORE] * (len(labels) - len(expected))


def test_positions_begin_anew_at_documents_and_sequences(packed):
    packed, documents = packed
    whole = [n for document in documents for n in range(len(document))]
    for k in range(len(packed)):
        _, _, positions = packed[k]
        begin = k * 16
        count = min(16, len(whole) - 1 - begin)
        first = whole[begin]
        expected = [
            p - first if p >= first and n < 16 and p - first == n else p
            for n, p in enumerate(whole[begin : begin + count])
        ]
        assert positions[:count].tolist() == expected
        assert positions[count:].tolist() == list(range(16 - count))


def test_valid_tokens_are_counted_from_the_index(packed):
    packed, _ = packed
    counted = [int((packed[k][1] != pack.IGNORE).sum()) for k in range(len(packed))]
    assert packed.valid.tolist() == counted


def test_a_neighbour_document_changes_nothing(packed):
    """Attention stays within a document: perturbing its neighbours leaves its logits as they were, to the bit."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    packed, _ = packed
    k = next(k for k in range(len(packed)) if (packed[k][2] == 0).sum() >= 3)
    inputs, _, positions = (torch.from_numpy(array)[None] for array in packed[k])
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    begin, end = starts[1], starts[2]
    changed = inputs.clone()
    changed[0, :begin] = (changed[0, :begin] + 7) % 250
    changed[0, end:] = (changed[0, end:] + 7) % 250
    for model_config in (
        GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=2, n_head=2),
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").eval()
        before, after = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, begin:end]
            for ids in (inputs, changed)
        )
        alone = model(input_ids=inputs[:, begin:end], use_cache=False).logits[0]
        assert torch.equal(before, after)
        assert torch.allclose(before, alone, atol=1e-5)


def test_the_cache_is_used_and_a_broken_one_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some words to learn from, and some more\n" * 20)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 8})
    tokens = tokenizer.wrap(tokenizer.train(config))
    first = pack.prepare(config, read.digest(config), tokens, tmp_path / "cache")
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    made = directory.stat().st_mtime_ns
    pack.prepare(config, read.digest(config), tokens, tmp_path / "cache")
    assert directory.stat().st_mtime_ns == made
    interrupted = directory.with_name(directory.name + ".tmp")  # as a kill leaves it
    directory.rename(interrupted)
    again = pack.prepare(config, read.digest(config), tokens, tmp_path / "cache")
    assert np.array_equal(first.tokens, again.tokens) and not interrupted.exists()


def test_the_tokenizer_is_the_same_each_time_and_loses_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße, 世界!  Two  spaces\tand a tab.\r\n\r\n" * 9, newline="")
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 300})
    text = tokenizer.train(config)
    assert text == tokenizer.train(config)
    tokens = tokenizer.wrap(text)
    for sample in ("Grüße, 世界!  Two  spaces\tand\r\n", "never seen: Ω ñ 🙂"):
        assert tokens.decode(tokens(sample).input_ids) == sample


def test_index_is_a_permutation_an_epoch():
    order = index.Index(seed=3, sequences=11)
    run = order.batch(0, 33)
    for epoch in range(3):
        assert sorted(run[11 * epoch : 11 * epoch + 11]) == list(range(11))
    assert run[:11] != run[11:22]
    assert index.Index(seed=3, sequences=11).batch(9, 5) == run[9:14]  # across an epoch's end, from anywhere
    assert index.Index(seed=4, sequences=11).batch(0, 11) != run[:11]


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
    ],
)
def test_last_step(settings, done, last):
    assert index.last_step(from_mapping({"batch_size": 4, **settings}), 100, *done) == last
