"""Documents in sequences: none is lost, none changes its neighbour."""

import collections
import itertools
import random

import numpy as np
import pytest
from corpora import prepared, spans, write_lines

from trainer.config import from_mapping
from trainer.data import cache, pack, read, tokenizer
from trainer.errors import BadInput


@pytest.fixture(scope="module", params=["split", "refuse"])
def packed(tmp_path_factory, request):
    """Documents of up to 40 words, or 6, in sequences of 16: (Packed, documents as ids, overlong)."""
    folder = tmp_path_factory.mktemp("packed")
    longest = 40 if request.param == "split" else 6
    texts = [" ".join(f"w{(n * k) % 23}" for k in range(1 + (n * 7) % longest)) for n in range(160)]
    path = write_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    config = from_mapping(
        {"dataset": path, "vocab_size": 330, "sequence_length": 16, "overlong": request.param}
    )
    tokens = tokenizer.wrap(tokenizer.train(config))
    documents = [[*tokens(text).input_ids, tokens.eos_token_id] for text in texts]
    found, held_out = pack.prepare(config, read.digests(config), tokens, folder / "cache")
    assert held_out is None and found.token_count == sum(map(len, documents))
    return found, documents, request.param


def test_no_token_is_dropped_and_each_is_predicted_once(packed):
    packed, documents, overlong = packed
    if overlong == "split":
        stream = [token for document in documents for token in document]
        inputs = np.concatenate([packed[k][0] for k in range(len(packed))])
        labels = np.concatenate([packed[k][1] for k in range(len(packed))])
        assert inputs[: len(stream) - 1].tolist() == stream[:-1]
        expected = [token if n else pack.IGNORE for one in documents for n, token in enumerate(one)][1:]
        assert labels.tolist() == expected + [pack.IGNORE] * (len(labels) - len(expected))
        return
    found = []
    for k in range(len(packed)):
        inputs, labels, positions = packed[k]
        for begin, end in spans(positions):
            found.append(tuple(inputs[begin:end].tolist()))
            assert labels[begin:end].tolist() in (
                [*inputs[begin + 1 : end].tolist(), pack.IGNORE],
                [pack.IGNORE] * (end - begin),  # the padding
            )
    wanted = collections.Counter(map(tuple, documents))
    left = collections.Counter(found) - wanted
    assert not wanted - collections.Counter(found)
    assert all(set(one) == {packed._sets[0].pad_id} for one in left)


def test_whole_documents_leave_little_padding(packed):
    packed, documents, overlong = packed
    if overlong == "refuse":
        assert len(packed) * 16 < 1.05 * sum(map(len, documents))


def test_positions_begin_anew_at_documents_and_sequences(packed):
    packed, documents, overlong = packed
    if overlong == "refuse":
        return  # its documents are found by their positions
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
    packed, documents, _ = packed
    counted = [int((packed[k][1] != pack.IGNORE).sum()) for k in range(len(packed))]
    assert packed.valid.dtype == np.int64 and packed.valid.tolist() == counted
    assert sum(counted) == sum(len(document) - 1 for document in documents)


def test_a_neighbour_document_changes_nothing(packed):
    """Attention stays within a document: perturbing its neighbours leaves its logits as they were, to the bit."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    packed = packed[0]
    k = next(k for k in range(len(packed)) if (packed[k][2] == 0).sum() >= 3)
    inputs, _, positions = (torch.from_numpy(array)[None] for array in packed[k])
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    begin, end = starts[1], starts[2]
    changed = inputs.clone()
    changed[0, :begin] = (changed[0, :begin] + 7) % 250
    changed[0, end:] = (changed[0, end:] + 7) % 250
    for model_config in (
        GPT2Config(vocab_size=330, n_positions=16, n_embd=32, n_layer=2, n_head=2),
        LlamaConfig(
            vocab_size=330,
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


@pytest.mark.parametrize("overlong", ["split", "cut"])
def test_a_document_has_sequences_of_its_own_where_nothing_is_packed(tmp_path, monkeypatch, overlong):
    """What the next one is no document tells; a part in which nothing is learnt is no sequence."""
    monkeypatch.setattr("trainer.data.pack.WINDOW", 7)
    texts = [" ".join(f"w{(n * k) % 23}" for k in range(1 + (n * 7) % 40)) for n in range(60)] + ["é" * 8]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = {"dataset": path, "vocab_size": 330, "sequence_length": 16, "overlong": overlong}
    config = from_mapping({**settings, "packing": False})
    tokens = tokenizer.wrap(tokenizer.train(config))
    documents = [[*tokens(text).input_ids, tokens.eos_token_id] for text in texts]
    assert 17 in map(len, documents), "its last part would have a single token"
    found, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    expected = [
        (one[at : at + 16], one[at + 1 : at + 17])
        for one in (one[:16] if overlong == "cut" else one for one in documents)
        for at in range(0, len(one) - 1, 16)
    ]
    assert len(found) == len(expected) and found.layout == "alone"
    for k, (ids, following) in enumerate(expected):
        inputs, labels, positions = found[k]
        assert inputs.tolist() == ids + [tokens.pad_token_id] * (16 - len(ids))
        assert labels.tolist() == following + [pack.IGNORE] * (16 - len(following))
        assert positions.tolist() == [*range(len(ids)), *range(16 - len(ids))]
        assert (found.valid[k], found.lengths([k])) == (len(following), [len(ids)])
    other, _ = pack.prepare(from_mapping(settings), read.digests(config), tokens, tmp_path / "cache")
    assert other.digest != found.digest
    assert (other.lengths([0, 1]), other.width([0])) == ([16, 16], 16)


def test_a_part_in_which_nothing_is_learnt_is_no_sequence(tmp_path, monkeypatch):
    """Of long questions with short answers; each answer is predicted once, wherever parts end."""
    records = [{"instruction": "say " * (3 + n * 2), "output": f"yes {n}"} for n in range(20)]
    path = write_lines(tmp_path / "a.jsonl", records)
    settings = {"dataset": path, "vocab_size": 300, "sequence_length": 16, "loss_on": "answers"}
    packed, _ = prepared(from_mapping(settings), tmp_path / "cache")
    for together in (1 << 20, 32):
        monkeypatch.setattr("trainer.data.pack.TOGETHER", together)
        found, _ = prepared(from_mapping({**settings, "packing": False}), tmp_path / f"cache-{together}")
        assert found.valid.min() > 0 and found.valid.sum() == packed.valid.sum()
        assert 20 <= len(found) < found.token_count / 16
        assert found.kept == sum(found.lengths(range(len(found)))) < found.token_count
        for k in range(len(found)):
            _, labels, positions = found[k]
            assert (labels[found.lengths([k])[0] :] == pack.IGNORE).all() and positions[0] == 0


def test_a_running_text_is_laid_out_in_pieces(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n} of a text that goes on\n\n" for n in range(200)))
    settings = {"dataset": str(path), "vocab_size": 300, "sequence_length": 16, "packing": False}
    found, _ = prepared(from_mapping(settings), tmp_path / "cache")
    monkeypatch.setattr("trainer.data.pack.TOGETHER", 100)
    other, _ = prepared(from_mapping(settings), tmp_path / "other")
    assert len(found) == len(other) == -(-(found.token_count - 1) // 16) and found.lengths([0, 1]) == [16, 16]
    for k in range(len(found)):
        assert all(np.array_equal(a, b) for a, b in zip(found[k], other[k], strict=True))
    stream, _ = prepared(from_mapping({**settings, "packing": True}), tmp_path / "cache")
    assert found[3][0].tolist() == stream[3][0].tolist() and found[3][1].tolist() == stream[3][1].tolist()


def test_of_padding_no_more_is_computed_than_the_longest_document_wants(tmp_path):
    texts = ["b" * n for n in (3, 70, 200)]
    paths = [write_lines(tmp_path / f"{n}.jsonl", [{"text": one}] * 2) for n, one in enumerate(texts)]
    settings = {"dataset": ",".join(paths), "vocab_size": 257, "sequence_length": 256, "packing": False}
    found, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert found.lengths(range(6)) == [4, 4, 71, 71, 201, 201]
    assert [found.width(some) for some in ([0], [1, 2], [0, 5, 1])] == [64, 128, 256]
    short, _ = prepared(from_mapping({**settings, "sequence_length": 210}), tmp_path / "cache")
    assert short.width([4]) == 210
    for fixed in ({"compile": True}, {"attention": "flex_attention"}):
        found, _ = prepared(from_mapping({**settings, **fixed}), tmp_path / "cache")
        assert found.width([0]) == 256, "another width would be compiled anew"


def test_best_fit_loses_nothing_and_fits():
    chance = random.Random(5)
    lengths = [chance.randint(1, 50) for _ in range(300)] + [50, 1]
    bins = pack.best_fit(lengths, 50)
    assert sorted(n for one in bins for n in one) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in one) <= 50 for one in bins)
    assert len(bins) <= 1.1 * sum(lengths) / 50


def test_running_text_goes_on_whatever_overlong_says(tmp_path):
    (tmp_path / "a.txt").write_text("some words to learn from, and some more\n" * 20)
    settings = {"dataset": str(tmp_path / "a.txt"), "vocab_size": 300, "sequence_length": 16}
    whole, _ = prepared(from_mapping({**settings, "overlong": "refuse"}), tmp_path / "cache")
    split, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert whole.token_count == split.token_count and whole.valid.sum() == split.valid.sum()


def test_documents_longer_than_a_sequence(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a b c d e f g h" * (n + 1)} for n in range(9)])
    settings = {"dataset": path, "vocab_size": 257, "sequence_length": 32}
    with pytest.raises(BadInput) as refused:
        prepared(from_mapping({**settings, "overlong": "refuse"}), tmp_path / "cache")
    text = str(refused.value)
    assert "7 documents are longer than sequence_length 32" in text and "and 2 more" in text
    assert f"{path}:3: 46 tokens" in text and "overlong to split or cut" in text
    cut, _ = prepared(from_mapping({**settings, "overlong": "cut"}), tmp_path / "cache")
    assert (cut.shortened, cut.dropped) == (7, sum(15 * (n + 1) + 1 - 32 for n in range(2, 9)))
    assert cut.token_count == 16 + 31 + 7 * 32 and len(cut) == 9
    split, _ = prepared(from_mapping(settings), tmp_path / "cache")
    assert (split.longer, split.shortened, split.dropped) == (7, 0, 0)
    assert split.token_count == cut.token_count + cut.dropped
    path = write_lines(tmp_path / "b.jsonl", [{"text": "a" * 31}, {"text": "b" * 31}])  # with their ends, 32
    for overlong in ("refuse", "cut", "split"):
        fits, _ = prepared(
            from_mapping({**settings, "dataset": path, "overlong": overlong}), tmp_path / "cache"
        )
        assert (fits.token_count, fits.longer, fits.shortened, fits.dropped) == (64, 0, 0, 0)


def spaced(how):
    """A tokenizer that puts a space before every text, as Llama 2's and the first of Mistral's do."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    byte = [f"<0x{n:02X}>" for n in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if how == "prepended":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif how == "byte-level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif how == "looks ahead":  # as GPT-2's
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how, split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", tokenizer.END_OF_TEXT, *byte],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if how in ("byte-level", "looks ahead") else [],
        show_progress=False,
    )
    ends = ["\n\n", "\n\n  "] if how == "looks ahead" else []
    made.train_from_iterator(["first words", "of second ones", "the third", *ends] * 9, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.END_OF_TEXT} $A", special_tokens=[(tokenizer.END_OF_TEXT, 1)]
    )
    return tokenizer.wrap(made.to_str())


@pytest.mark.parametrize("piece", [1, 60, 1 << 16])
@pytest.mark.parametrize("how", ["first", "always", "never", "prepended", "byte-level", "looks ahead"])
def test_a_paragraph_is_tokenised_as_in_its_text(tmp_path, monkeypatch, how, piece):
    monkeypatch.setattr(cache, "PIECE", piece)
    text = "first words\nof second\n\n\nsecond words, Ω\n\n  the third\n\n" * 3
    (tmp_path / "a.txt").write_text(text)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8})
    tokens = spaced(how)
    packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    assert packed._sets[0].tokens.tolist() == [*tokens(text).input_ids, tokens.eos_token_id]


def test_an_indented_paragraph_is_tokenised_as_in_its_text(tmp_path):
    """Code has such: a token may have the blank line and the indent."""
    text = "first words\n\n    of second\n\n\n  words\n\n" * 3
    (tmp_path / "a.txt").write_text(text)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8})
    tokens = spaced("looks ahead")
    packed, _ = pack.prepare(config, read.digests(config), tokens, tmp_path / "cache")
    assert packed._sets[0].tokens.tolist() == [*tokens(text).input_ids, tokens.eos_token_id]


def test_after_a_held_out_paragraph_a_text_begins(tmp_path):
    (tmp_path / "a.txt").write_text("first words\n\n" * 40)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "sequence_length": 8, "validation_split": 0.3})
    tokens = spaced("first")
    at_start, *_ = tokens("first words\n\n", add_special_tokens=False).input_ids
    for part in pack.prepare(config, read.digests(config), tokens, tmp_path / "cache"):
        (one,) = part._sets
        starts = one.starts.tolist()
        assert len(starts) > 3
        for begin, end in itertools.pairwise([*starts, len(one.tokens)]):
            assert one.tokens[begin : begin + 2].tolist() == [tokens.bos_token_id, at_start]
            assert (one.tokens[begin:end] == at_start).sum() == 1


@pytest.mark.parametrize(("overlong", "packing"), [("split", True), ("refuse", True), ("split", False)])
def test_how_much_is_done_at_once_changes_nothing(tmp_path, monkeypatch, overlong, packing):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "word " * (n % 3 + 1)} for n in range(90)])
    settings = {"dataset": path, "vocab_size": 257, "sequence_length": 19}
    config = from_mapping({**settings, "overlong": overlong, "packing": packing})
    at_once, _ = prepared(config, tmp_path / "cache")
    monkeypatch.setattr("trainer.data.cache.BATCH", 37)
    monkeypatch.setattr("trainer.data.pack.TOGETHER", 40)
    monkeypatch.setattr("trainer.data.pack.WINDOW", 7)
    in_pieces, _ = prepared(config, tmp_path / "other")
    assert in_pieces.token_count == at_once.token_count and in_pieces.documents == at_once.documents
    assert in_pieces.unigram_entropy == pytest.approx(at_once.unigram_entropy)
    assert in_pieces.valid.sum() == at_once.valid.sum()
    counted = [int((in_pieces[k][1] != pack.IGNORE).sum()) for k in range(len(in_pieces))]
    assert in_pieces.valid.tolist() == counted
    if overlong == "split":
        assert len(in_pieces) == len(at_once)
        for k in range(len(at_once)):
            assert all(np.array_equal(a, b) for a, b in zip(in_pieces[k], at_once[k], strict=True))
