"""What a step of a model needs, counted without weights."""

import dataclasses
import types

import pytest
import torch
from small_models import make

from trainer import checkpoint
from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model import footprint, load, packing, senses

torch.set_num_threads(1)


def test_what_is_foreseen_of_a_large_model_takes_no_memory(monkeypatch):
    """A layer of each kind alone is gone through, and weights of 8 GB are a few numbers."""
    from transformers import JambaConfig

    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 1 << 17,
        "num_hidden_layers": 32,
        "vocab_size": 1 << 17,
    }
    model = packing._stand_in(from_mapping({}), JambaConfig(**sizes, num_attention_heads=8, num_experts=2))
    kinds = [type(layer).__name__ for layer in model.model.layers]
    assert len(kinds) == 5 and len(set(kinds)) == 2  # of 32: the first with attention is the fifth
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()
    }
    assert sum(one.numel() for one in model.parameters()) > 2e9 and sum(storages.values()) < 1 << 26


def test_a_model_that_cannot_checkpoint_its_activations_is_refused():
    from transformers import CTRLConfig, CTRLLMHeadModel

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=20, n_positions=8, n_embd=8, dff=8, n_layer=1, n_head=1))
    load._check_trained(from_mapping({}), model)
    with pytest.raises(
        BadInput, match="gradient_checkpointing: model tiny does not support it; set it to false"
    ):
        load._check_trained(from_mapping({"gradient_checkpointing": True}), model)


def test_a_layer_that_shares_a_weight_with_the_head_is_no_block():
    """FSDP gathers a weight in one place; BERT's embeddings are among what transformers does not split."""
    from transformers import BertConfig, BertLMHeadModel

    from trainer.strategies.sharded import blocks

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = BertLMHeadModel(BertConfig(vocab_size=96, is_decoder=True, **sizes))
    assert {type(one).__name__ for one in blocks(model)} == {"BertLayer"}
    assert len(blocks(make("llama"))) == 2


def seeing():
    """A small Gemma 3 with a vision tower, as it is trained."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **heads}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    chosen = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    return senses.freeze(AutoModelForCausalLM.from_config(chosen))


def test_what_no_text_reaches_is_counted_where_it_is():
    """Whole on each rank, and in a checkpoint; it is trained nowhere, and shared out nowhere."""
    model = seeing()
    assert senses.found(model) == ["model.vision_tower", "model.multi_modal_projector"]
    assert senses.found(make("llama")) == []
    frozen = 4 * sum(one.numel() for one in model.parameters() if not one.requires_grad)
    trained = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    counted = footprint._sums(from_mapping({}), model, (0, 0, 0), (0, 0), False)
    buffers = sum(one.numel() * one.element_size() for one in model.buffers())
    assert frozen > 0 and counted.weights == frozen + trained + buffers
    assert (counted.shared, counted.gradients, counted.packs) == (trained, trained, 0)
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    strategy = types.SimpleNamespace(
        trainable=named, shape=lambda name: named[name].shape, keeps=(), model=model
    )
    assert checkpoint.tensor_bytes(strategy) == 3 * trained + frozen


def test_of_a_paged_optimizer_the_host_holds_what_the_card_has_no_room_for():
    from transformers import GPT2Config

    from trainer.plan import memory
    from trainer.plan.resources import Place

    config = from_mapping({"optimizer": "paged_adamw", "vocab_size": 300})
    found = footprint.measure(config, GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300))
    whole = Place(1, 1, 1, torch.device("cuda"), 1 << 40, 1 << 40, 1e9)
    moments = memory.budget("ddp", config, found, whole, 0).device["optimizer"]
    needs = sum(memory.budget("ddp", config, found, whole, 0).device.values())
    assert moments == 8 * found.trainable
    for lacks, on_host in ((0, 0), (1000, 1000), (2 * moments, moments)):
        place = dataclasses.replace(whole, memory=needs - lacks)
        one = memory.budget("ddp", config, found, place, 0)
        assert one.host["optimizer"] == on_host and one.device["optimizer"] == moments - on_host
        assert one.fits(place) is (lacks <= moments)
        other = memory.budget("ddp", dataclasses.replace(config, optimizer="adamw"), found, place, 0)
        assert other.fits(place) is (lacks == 0)
