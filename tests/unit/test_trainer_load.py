"""Weights from files into a model: their shapes and names, and what is made up."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import ARCHITECTURES, CORRECTED, SMALL, lay, make, small

from trainer.config import from_mapping
from trainer.data import tokenizer
from trainer.errors import BadInput
from trainer.model import load, saved, stored

torch.set_num_threads(1)


def test_padding_the_model_has_no_embedding_for_is_left_alone(tmp_path):
    """As where [PAD] was added to a tokenizer and the model's embedding never made larger."""
    from transformers import GPT2Config

    (tmp_path / "a.txt").write_text("words to read\n" * 9)
    config = from_mapping({"dataset": str(tmp_path / "a.txt"), "vocab_size": 257, "sequence_length": 8})
    text = tokenizer.train(config)
    for added, size, pads in (
        (True, 257, "<|endoftext|>"),
        (True, 258, "[PAD]"),
        (False, 257, "<|endoftext|>"),
    ):
        tokens = tokenizer.wrap(text)
        tokens.pad_token = None
        if added:
            tokens.add_special_tokens({"pad_token": "[PAD]"})
        settings = GPT2Config(vocab_size=size, bos_token_id=0, eos_token_id=0)
        load._check(config, load.Source(settings, tokens, None, {}))
        assert tokens.pad_token == pads and tokens.pad_token_id < size


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_in_the_files_are_not_made_up(tied, world, tmp_path):
    """transformers makes them up, and says so where nobody looks; tied ones are one weight."""
    from transformers import LlamaConfig, LlamaModel

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(**small, vocab_size=300, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    found = load.Source(LlamaConfig.from_pretrained(tmp_path), None, str(tmp_path), {})
    config = from_mapping({"model": str(tmp_path)})
    for opened in (
        lambda: load._weights(config, found, world),
        lambda: saved._weights(str(tmp_path), "auto", False),
    ):
        if tied:
            opened()
            continue
        with pytest.raises(
            BadInput, match=r"found no lm_head\.weight in its safetensors; expected all weights of Ll"
        ):
            opened()


@pytest.mark.parametrize("kind", ARCHITECTURES | CORRECTED)
def test_what_an_architecture_saves_fits_it_and_nothing_is_left_out(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    assert stored.misfits(tmp_path, model) == ([], [])
    found = stored.find(tmp_path, model)
    assert found is None or model.left_out == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vocab_size": 128},
            r"lm_head.weight is \(96, 32\) in its safetensors, and \(128, 32\) by its config.json",
        ),
        (
            {"num_hidden_layers": 3},
            r"found no model\.layers\.2\.input_layernorm\.weight, .* and 6 more in its safete",
        ),
    ],
)
def test_weights_of_another_shape_or_number_are_refused_before_they_are_read(changes, said, world, tmp_path):
    """As where tokens were added and config.json was left as it was. transformers names them in a log alone."""
    config, found = small(tmp_path, **changes)
    for opened in (
        lambda: load.rehearse(config, found),
        lambda: load._weights(config, found, world),
        lambda: saved._weights(str(tmp_path), "auto", False),
    ):
        with pytest.raises(BadInput, match=said):
            opened()


def test_that_weights_are_random_is_told(world, tmp_path, capsys):
    """As where a copy has left them out."""
    config, _ = small(tmp_path)
    words = " ".join(chr(97 + n) for n in range(26))
    text = tokenizer.train(from_mapping({"dataset": str(lay(tmp_path, {"a.txt": words.encode()}) / "a.txt")}))
    tokenizer.wrap(text).save_pretrained(tmp_path)
    for lacks in (False, True):
        if lacks:
            (tmp_path / "model.safetensors").unlink()
        assert (load.source(dataclasses.replace(config, sequence_length=8), world).weights is None) == lacks
        assert (
            f"no weights are in {tmp_path}: they begin as random ones" in capsys.readouterr().out
        ) == lacks


@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_that_the_model_has_no_place_for_are_told(in_parts, world, tmp_path, capsys):
    config, found = small(tmp_path, num_hidden_layers=1)
    load.build(config, found, world, in_parts=in_parts)
    said = "no place for are left out: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
    assert said in (printed := capsys.readouterr().out) and "and 6 more: they are for images" in printed


@pytest.mark.parametrize("same", [True, False])
def test_weights_that_are_said_to_be_tied_and_differ_stay_two_whoever_reads_them(same, world, tmp_path):
    """By transformers they do. Read in parts, the head would else be lost."""
    config, found = small(tmp_path, tie_word_embeddings=True)
    if same:
        there = load_file(tmp_path / "model.safetensors")
        there["lm_head.weight"] = there["model.embed_tokens.weight"].clone()
        save_file(there, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = load.build(config, found, world)
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == same
    model = load.build(config, found, world, in_parts=True)
    assert (getattr(model, "stored", None) is not None) == same
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_the_attention_that_a_model_was_made_with_is_no_part_of_it(key, world, tmp_path):
    config, found = small(tmp_path, **{key: "flash_attention_2"})
    assert load.rehearse(config, found).config._attn_implementation == "sdpa"
    assert saved._weights(str(tmp_path), "auto", False).config._attn_implementation == "sdpa"


def test_a_configuration_that_transformers_does_not_know_is_told_by_its_word(tmp_path):
    config, found = small(tmp_path, hidden_act="swigluoai9")
    with pytest.raises(
        BadInput, match=r"transformers does not know 'swigluoai9', which its config.json names"
    ):
        load.rehearse(config, found)
    for error, cure in (
        (
            AttributeError("module 'torch' has no attribute 'bf16'"),
            "set dtype in its config.json to float32, bfl",
        ),
        (
            Exception("data did not match any variant of untagged enum ModelUntagged"),
            "newer than tokenizers ",
        ),
    ):
        with pytest.raises(BadInput, match=cure), load._explained(config, "tokenizer"):
            raise error


def test_a_frozen_base_of_random_weights_keeps_the_frequencies_of_positions():
    """As a base that is read does: rounded to 16 bits, far positions would turn by other angles."""
    from transformers import LlamaConfig

    config = from_mapping({"adapter": "lora", "dtype": "bfloat16"})
    found = load.Source(LlamaConfig(**SMALL), None, None, {})
    model = load._weights(config, found, None)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
