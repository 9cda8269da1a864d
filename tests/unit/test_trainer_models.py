"""Architectures: each one's packing, routers and adapter; and what is refused of them."""

import types

import pytest
import torch
from small_models import ARCHITECTURES, CORRECTED, EXPERTS, MASKED, SMALL, make

from trainer.config import from_mapping
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model import load, lora, packing, router
from trainer.model.loss import TokenLoss

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture(kind, world):
    """Loss and gradients in chunks equal the whole way's; packing is accepted; auto finds layers for an adapter."""
    model = make(kind)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    labels[0, 5:9] = IGNORE
    positions = torch.arange(24).remainder(10).expand(2, 24)
    found = []
    for chunk in (0, 16):
        module = TokenLoss(model, chunk)
        model.zero_grad()
        loss = module(inputs, labels, positions)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient, module.chunk))
    assert found[1][2] == 16
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert torch.allclose(found[1][1], found[0][1], rtol=1e-4, atol=1e-5 * found[0][1].abs().max().item())

    checked = TokenLoss(model, 16)
    packing.check(from_mapping({}), checked, world)
    assert (checked.headless, checked.chunk) == (True, 16)
    wrapped = lora.add(model, from_mapping({"adapter": "lora", "lora_rank": 2}))
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert len(trained) >= 4 and all("lora_" in name for name in trained)
    assert TokenLoss(wrapped, 16)(inputs, labels, positions).item() == pytest.approx(found[0][0], rel=1e-5)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_documents_in_a_packed_sequence_are_computed_as_each_alone(kind, world):
    """GPT-OSS with its windows, of 6 tokens here; MPT with a bias by distance."""
    model = make(kind)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(3 if one.ndim > 1 else 1)  # so that attention tells
    lengths = (9, 7, 8)
    inputs = torch.randint(2, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(one) for one in lengths]).repeat(2, 1)
    module = TokenLoss(model)
    packing.check(from_mapping({}), module, world)
    assert module.masked == (kind in MASKED)
    packing.foresee(from_mapping({}), model.config)
    with torch.no_grad():
        alone = [model(input_ids=one, use_cache=False).logits for one in inputs.split(lengths, 1)]
        assert torch.allclose(module(inputs, None, positions), torch.cat(alone, 1), rtol=0, atol=1e-5)


def test_what_draws_by_lot_is_off_in_a_configurations_parts_too(world):
    from transformers import AutoConfig

    for kind, settings, off in (
        ("opt", {"layerdrop": 0.5, "dropout": 0.1}, {"layerdrop": 0.5, "dropout": 0.1}),
        ("mpt", {"attn_config": {"attn_pdrop": 1}}, {"attn_pdrop": 1}),
    ):
        found = load.Source(AutoConfig.for_model(kind, **settings), None, None, {})
        load._without_dropout(found, world)
        assert found.dropout.items() >= off.items() and not set(found.dropout.values()) & {0}
    assert found.config.attn_config.attn_pdrop == 0


@pytest.mark.parametrize("kind", ["phimoe", "mixtral"])
def test_routers_draw_no_lots_in_training(kind, world):
    """Neither which expert a token goes to nor what it brings there is a matter of chance, and of who computes."""
    from transformers import AutoConfig

    noise = {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3}
    config = AutoConfig.for_model(kind, **SMALL, **EXPERTS, **noise)
    found = load.Source(config, None, None, {})
    load._without_dropout(found, world)
    threshold = kind == "phimoe"  # there it is none
    assert config.router_jitter_noise == (0.3 if threshold else 0) and config.input_jitter_noise == 0
    assert noise | found.dropout == noise and set(noise) - set(found.dropout) == (
        {"router_jitter_noise"} if threshold else set()
    )
    torch.manual_seed(0)
    model = load.in_training(load.unloaded(from_mapping({}), config))
    model.eval()
    model.train()  # as after an evaluation
    inputs = torch.randint(2, 96, (2, 24))
    first, second = (model(input_ids=inputs).logits for _ in range(2))
    assert torch.equal(first, second)
    second.sum().backward()
    assert any(
        one.grad.abs().max() > 0
        for name, one in model.named_parameters()
        if "router" in name or "gate" in name
    )


TINY = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}


MIXING = {
    "bloom": TINY,  # its bias takes a mask of tokens alone
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    | {"vocab_size": 96},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96},
    # It takes masks, and counts its positions by itself, through the whole sequence.
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "vocab_size": 96,
        "dropout": 0.0,
    },
}


@pytest.mark.parametrize("kind", MIXING)
def test_an_architecture_that_cannot_keep_documents_apart_is_refused(kind, world):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MIXING[kind]))
    said = r"see other documents in a packed sequence .* set packing to false.* or choose another model"
    with pytest.raises(BadInput, match=said):
        packing.check(from_mapping({}), TokenLoss(model), world)
    with pytest.raises(BadInput, match=said):
        packing.foresee(from_mapping({}), model.config)


@pytest.mark.parametrize("kind", [*MIXING, "jamba"])
def test_it_is_trained_where_each_document_has_a_row(kind, world):
    """Its loss is that of each document alone, whatever is computed beside it, and behind it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = MIXING.get(kind) or {**SMALL, **EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(3 if one.ndim > 1 else 1)
    unpacked = from_mapping({"packing": False})
    module = TokenLoss(load.in_training(model), 16, packed=False)
    packing.check(unpacked, module, world)
    packing.foresee(unpacked, model.config)
    lengths = (3, 12, 9)
    inputs, labels = torch.randint(2, 96, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    expected = 0.0
    with torch.no_grad():
        for row, length in enumerate(lengths):
            logits = model(input_ids=inputs[row : row + 1, :length], use_cache=False).logits[0]
            expected += torch.nn.functional.cross_entropy(
                logits, labels[row, :length], reduction="sum"
            ).item()
            inputs[row, length:], labels[row, length:] = 0, IGNORE
    positions = torch.stack([torch.cat([torch.arange(one), torch.arange(12 - one)]) for one in lengths])
    assert module(inputs, labels, positions).item() == pytest.approx(expected, rel=1e-6)


def test_rows_that_change_each_other_are_refused_though_each_is_one_document(world):
    class Crowded(torch.nn.Module):
        """As experts with room for so many tokens of a batch would."""

        def __init__(self):
            super().__init__()
            self.config, self.base_model_prefix = make("llama").config, "model"
            self.head = torch.nn.Embedding(96, 96)

        def get_output_embeddings(self):
            return None

        def forward(self, input_ids, use_cache):
            some = self.head(input_ids)
            return types.SimpleNamespace(logits=some + some.mean(0))

    with pytest.raises(BadInput, match="depends on the others that are computed at once"):
        packing.check(from_mapping({"packing": False}), TokenLoss(Crowded(), packed=False), world)


@pytest.mark.parametrize("decoder", [False, True])
def test_an_encoder_is_refused(decoder, world):
    """Masks would keep its documents apart and hide later tokens, in training alone; as a decoder it may have them."""
    from transformers import AutoModelForCausalLM, BertConfig

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    chosen = BertConfig(**SMALL, **off, is_decoder=decoder)
    torch.manual_seed(0)
    module = TokenLoss(AutoModelForCausalLM.from_config(chosen).train())
    if decoder:
        packing.check(from_mapping({}), module, world)
        packing.foresee(from_mapping({}), chosen)
        assert module.masked
        return
    for look in (
        lambda: packing.check(from_mapping({}), module, world),
        lambda: packing.foresee(from_mapping({}), chosen),
    ):
        with pytest.raises(BadInput, match="its tokens see those that come after them, as an encoder's do"):
            look()


@pytest.mark.parametrize("chunk", [0, 16])
def test_routers_of_a_model_that_gets_masks_are_asked(chunk, world):
    """GPT-OSS's: transformers' own auxiliary loss cannot be had with such masks."""
    model = make("gpt_oss")
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    positions = torch.arange(24).repeat(2, 1)  # whole documents, which need no masks
    module = TokenLoss(model, chunk)
    loss, counts = module(inputs, labels, positions, router.Ask(2))
    module.masked = True
    found = module(inputs, labels, positions, router.Ask(2))
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(found[1], counts) and counts.sum() == 2 * 24 * 2 * 2


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_layers_that_see_other_documents_are_refused(kind, world, monkeypatch):
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    monkeypatch.setitem(ARCHITECTURES, kind, {"state_size": 4, **periods, **EXPERTS})
    model = make(kind)
    with pytest.raises(BadInput, match=r"see other documents|does not take what tells documents apart"):
        packing.check(from_mapping({"model": kind}), TokenLoss(model), world)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        *((one, True) for one in ("glm4_moe", *CORRECTED)),
        ("qwen3_moe", False),
        ("mixtral", False),
    ],
)
def test_routers_that_choose_by_a_correction_of_their_own_are_not_balanced(kind, refused):
    asked = from_mapping({"router_aux_loss_coef": 0.01, "model": kind})
    if refused:
        with pytest.raises(BadInput, match="choose experts by a correction of their own"):
            router.coefficient(asked, make(kind))
    else:
        assert router.coefficient(asked, make(kind)) == 0.01
    assert router.coefficient(from_mapping({}), make(kind, output_router_logits=True)) == (
        0.0 if refused else 0.001
    )


def test_a_router_that_could_be_corrected_and_is_not_is_balanced():
    asked = from_mapping({"router_aux_loss_coef": 0.01, "model": "lfm2_moe"})
    assert router.coefficient(asked, make("lfm2_moe", use_expert_bias=False)) == 0.01


@pytest.mark.parametrize(
    ("settings", "ranks", "one_by_one"),
    [
        ({}, 2, True),
        ({"strategy": "fsdp"}, 1, True),
        ({"strategy": "fsdp"}, 2, False),  # whose weights come in 16 bits
        ({"adapter": "lora"}, 2, False),  # whose base is held so
        ({"dtype": "float32"}, 2, False),
    ],
)
def test_experts_that_are_trained_whole_compute_in_16_bits(settings, ranks, one_by_one):
    from transformers import Qwen3MoeConfig

    config = from_mapping({"dtype": "bfloat16", **settings})
    model = load.unloaded(config, Qwen3MoeConfig(**SMALL, **EXPERTS))
    load.settle_experts(config, model, ranks)
    assert (model.config._experts_implementation == "eager") is one_by_one
    types, linear = set(), torch.nn.functional.linear
    experts = model.model.layers[0].mlp.experts
    sizes = (4 * 2, SMALL["hidden_size"])
    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional, "linear", lambda *args: types.add((out := linear(*args)).dtype) or out
        )
        chosen = torch.arange(sizes[0])[:, None] % 4
        experts(torch.randn(sizes), chosen, torch.ones(sizes[0], 1))
    assert types == ({torch.bfloat16} if one_by_one else set())
