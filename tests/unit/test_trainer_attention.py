"""Attention that is asked for by name: documents of all rows stay apart in it, or it is refused."""

import copy
import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from small_models import ARCHITECTURES, make

from trainer.config import from_mapping
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model import footprint, load, lora, packing
from trainer.model.loss import TokenLoss

torch.set_num_threads(1)
ROWS, LENGTH = 3, 24
MORE = {
    "persimmon": {},  # its layers are told the borders, and not the positions
    "stablelm": {},  # the positions, and not the borders
}


@pytest.fixture
def flash(monkeypatch):
    """flash-attn for the CPU: its functions, each document by SDPA; what calls them is transformers' own.

    Returns the numbers of tokens that it was called with.
    """
    from transformers import modeling_flash_attention_utils as utils

    calls = []

    def alone(query, key, value, scale, causal):
        """(S, H, D) each."""
        calls.append(len(query))
        query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
        found = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
    ):
        lengths = cu_seqlens_q.diff().tolist()
        assert cu_seqlens_k.tolist() == cu_seqlens_q.tolist() and max_seqlen_q == max_seqlen_k >= max(lengths)
        documents = zip(*(one.split(lengths) for one in (q, k, v)), strict=True)
        return torch.cat([alone(*document, softmax_scale, causal) for document in documents])

    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal):
        return torch.stack([alone(*row, softmax_scale, causal) for row in zip(q, k, v, strict=True)])

    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    package.flash_attn_with_kvcache = None
    padding = types.SimpleNamespace(pad_input=None, unpad_input=None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    second = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(second, "general_availability_check", lambda: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    return calls


def twin(model, attention):
    """`model` with another attention, and as its own weights three times as large, so that attention tells."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        for one in model.parameters():
            one.mul_(3 if one.ndim > 1 else 1)
    other = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=attention)
    other.load_state_dict(model.state_dict())
    return other.train()


def batch():
    """Rows of documents of 10, 10 and 4 tokens, the last row's of 24."""
    inputs, labels = torch.randint(2, 96, (2, ROWS, LENGTH))
    labels[0, 5:9] = IGNORE
    positions = torch.arange(LENGTH).remainder(10).repeat(ROWS, 1)
    positions[-1] = torch.arange(LENGTH)
    return inputs, labels, positions


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "qwen3_moe", *MORE])
def test_flash_attention_keeps_the_documents_of_all_rows_apart(kind, flash, world, monkeypatch):
    """Losses, logits and gradients are SDPA's, by transformers' own way to the kernels."""
    monkeypatch.setitem(ARCHITECTURES, kind, MORE.get(kind, ARCHITECTURES.get(kind)))
    model = make(kind)
    inputs, labels, positions = batch()
    found = []
    for one in (model, twin(model, "flash_attention_2")):
        for chunk in (0, 16):
            module = TokenLoss(one, chunk)
            one.zero_grad()
            loss = module(inputs, labels, positions)
            loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
            found.append((loss.item(), gradient, module(inputs, None, positions)))
    assert set(flash) == {10, 4, LENGTH}
    for loss, gradient, logits in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert torch.allclose(gradient, found[0][1], rtol=1e-3, atol=1e-4 * found[0][1].abs().max().item())
        assert logits.shape == (ROWS, LENGTH, 96)
        assert torch.allclose(logits, found[0][2], atol=1e-4 * found[0][2].abs().max().item())
    asked = from_mapping({"attention": "flash_attention_2", "dtype": "bfloat16"})
    packing.check(asked, TokenLoss(twin(model, "flash_attention_2")), world)


def test_an_adapters_dropout_is_the_same_with_flash_attention(flash):
    """It is keyed by the sequence, of which flash attention gets several in one row."""
    inputs, labels, positions = batch()
    model = make("llama")
    found = []
    for one in (twin(model, "flash_attention_2"), model):
        wrapped = lora.add(one, from_mapping({"adapter": "lora", "lora_rank": 2, "lora_dropout": 0.5}))
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if "lora_B" in name:
                    weight.fill_(0.1)
        module = TokenLoss(wrapped, 16)
        for keys in ([1, 2, 3], [1, 2, 4]):
            lora.key_dropout(module, keys)
            found.append(module(inputs, labels, positions).item())
    assert found[:2] == pytest.approx(found[2:], rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=1e-4)


def test_rows_whose_documents_run_together_are_refused(flash, world):
    """As transformers has flash attention compute several rows, unless it is told; a single one it would pack."""
    asked = from_mapping({"attention": "flash_attention_2", "dtype": "bfloat16"})
    module = TokenLoss(twin(make("llama"), "flash_attention_2"))
    packing.check(asked, module, world)
    module.flash = False
    with pytest.raises(BadInput, match="see other documents in a packed sequence"):
        packing.check(asked, module, world)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_rows_of_one_document_stay_rows_with_flash_attention(kind, flash, world):
    """Recurrent layers beside it would else go on from one to the next."""
    model = make(kind)
    inputs, labels, _ = batch()
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    other = twin(model, "flash_attention_2")
    expected, found = (TokenLoss(one, 16, packed=False)(inputs, labels, positions) for one in (model, other))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(flash) == {LENGTH}
    asked = from_mapping({"attention": "flash_attention_2", "dtype": "bfloat16", "packing": False})
    packing.check(asked, TokenLoss(other, packed=False), world)


def test_no_pass_is_made_before_a_strategy_has_the_weights_where_they_compute(flash, world):
    asked = from_mapping({"model": "small", "attention": "flash_attention_2", "dtype": "bfloat16"})
    model = load.build(asked, load.Source(make("llama").config, None, None, {}), world)
    assert not flash
    packing.check(asked, TokenLoss(model), world)
    assert flash


def test_what_a_model_or_a_kernel_refuses_is_told_with_a_cure(world):
    class Refusing(torch.nn.Module):
        model, packed = types.SimpleNamespace(config=make("llama").config), True

        def forward(self, inputs, labels, positions):
            raise ValueError("it cannot keep\npacked sequences")

    with pytest.raises(BadInput, match="it cannot keep packed sequences; choose another model or attention"):
        packing.check(from_mapping({}), Refusing(), world)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2"])
def test_flex_attention_keeps_documents_apart(kind):
    """Its loss, as it computes uncompiled, is SDPA's or, where logits are capped, eager's."""
    model = make(kind)
    inputs, labels, positions = batch()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        other = TokenLoss(twin(model, "flex_attention"), 16)
        assert other.model.config._attn_implementation == "flex_attention"
        expected = TokenLoss(model, 16)(inputs, labels, positions).item()
        assert other(inputs, labels, positions).item() == pytest.approx(expected, rel=1e-5)
        together = other(inputs, labels, torch.arange(LENGTH).repeat(ROWS, 1)).item()
        assert together != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "attention", "said"),
    [
        (
            "llama",
            "flash_attention_2",
            r"the package for FlashAttention2 doesn't seem to be installed; install it",
        ),
        (
            "llama",
            "flash_attention_3",
            r"FlashAttention3 .* installed; install it beside .*, or set attention to auto",
        ),
        ("gpt2", "flex_attention", r"GPT2LMHeadModel does not support .*; set attention to auto"),
        (
            "llama",
            "flex_attention",
            r"flex_attention has no backward pass for a CPU.*; set attention to auto",
        ),
    ],
)
def test_an_attention_that_is_not_to_be_had_is_refused(kind, attention, said, world):
    found = load.Source(make(kind).config, None, None, {})
    with pytest.raises(BadInput, match=f"^attention: .*{said}"):
        load._check_attention(from_mapping({"attention": attention}), found, world.device)
    for fine in ("auto", "sdpa", "eager"):
        load._check_attention(from_mapping({"attention": fine}), found, world.device)


def test_flash_attention_is_refused_on_a_cpu_where_its_package_is_there(flash, world):
    found = load.Source(make("llama").config, None, None, {})
    asked = from_mapping({"attention": "flash_attention_2"})
    with pytest.raises(
        BadInput, match="flash_attention_2 has no form for a CPU, and this run computes on one"
    ):
        load._check_attention(asked, found, world.device)
    load._check_attention(asked, found, torch.device("cuda"))


def test_flex_attention_is_refused_where_nothing_can_compile_it(monkeypatch):
    found = load.Source(make("llama").config, None, None, {})
    asked = from_mapping({"attention": "flex_attention"})
    monkeypatch.setattr(load.shutil, "which", lambda name: f"/usr/bin/{name}")
    load._check_attention(asked, found, torch.device("cuda"))
    monkeypatch.setattr(load.shutil, "which", lambda name: None)
    with pytest.raises(
        BadInput, match=r"attention: flex_attention: there is no compiler .*set attention to auto"
    ):
        load._check_attention(asked, found, torch.device("cuda"))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_memory_is_counted_where_the_attention_cannot_run(attention):
    """trainer plan's count, which the CPU makes without data; with `auto` it is as much."""
    keys = {"sequence_length": LENGTH, "micro_batch_size": 2, "dtype": "bfloat16"}
    config = make("llama").config
    expected = footprint.measure(from_mapping(keys), config)
    assert footprint.measure(from_mapping({**keys, "attention": attention}), config) == expected
