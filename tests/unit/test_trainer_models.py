"""Architectures: each one's loss in chunks, its packing, its adapter; and what is refused of them."""

import dataclasses
import json
import sys
import types

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from trainer import checkpoint, environment
from trainer.commands import export
from trainer.config import from_mapping
from trainer.data import tokenizer
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model import files, footprint, load, lora, packing, quantize, router, saved, senses, stored
from trainer.model.loss import HALF, TokenLoss, autocast
from trainer.world import World

torch.set_num_threads(1)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 0.05, "sliding_window": 6},
    "gemma3_text": {"final_logit_softcapping": 0.05, "sliding_window": 6},
    "phi3": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "phimoe": EXPERTS,
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": EXPERTS | {"sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mpt": {"max_seq_len": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
}
CORRECTED = {  # for their routers alone
    "afmoe": EXPERTS | {"num_dense_layers": 1},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
# These do not take a packed sequence's borders from its positions: masks tell them.
MASKED = ("gpt_oss", "opt", "mpt", "falcon")
CHANGES_LOGITS = {"gemma2", "gemma3_text", "granite", "cohere"}


def make(kind, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = (ARCHITECTURES | CORRECTED)[kind]
    settings = chosen if "vocab_size" in chosen else {**SMALL, **chosen}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**settings, **changes})
    return load.in_training(AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="module")
def world():
    config = from_mapping({})
    return World(config, environment.read("run"))


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


def test_torch_is_told_how_many_logits_may_be_there_at_once(monkeypatch):
    """loss_chunk, or as many as make 128 MiB, on a CPU 16 MiB, 256 at least."""
    seen = []
    really = torch.nn.functional.linear_cross_entropy

    def noted(*args, **kwargs):
        seen.append(kwargs["options"])
        return really(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", noted)
    inputs, labels = torch.randint(2, 96, (2, 20, 24))
    for chunk in (None, 7, 479, 480, 0):
        TokenLoss(make("llama"), chunk)(inputs, labels, torch.arange(24).expand(20, 24))
    assert [one.batch_chunk_size for one in seen] == [
        7,
        479,
    ]  # 480 tokens fit what 96 words are given at once
    assert TokenLoss(make("llama", vocab_size=1 << 13)).chunk == 512
    assert TokenLoss(make("llama", vocab_size=1 << 15), device="cuda").chunk == 1024
    assert TokenLoss(make("llama", vocab_size=1 << 18)).chunk == 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(
    "kind", ["llama", "phi", "granite"]
)  # phi's head has a bias; granite scales its logits
def test_in_half_precision_the_head_multiplies_so_and_its_sums_are_float32(kind, adapter, dtype, monkeypatch):
    """Also of weights that autocast alone brings to it. Loss and gradients in chunks are the whole way's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    half = HALF[dtype]

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products, self.softmaxes, self.count = set(), set(), 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if name in ("mm", "addmm") and any(97 in one.shape for one in tensors):
                self.products |= {one.dtype for one in tensors}
                self.count += 1
            if name in ("_log_softmax", "exp_") and result.shape[-1] == 97:
                self.softmaxes.add(result.dtype)
            return result

    monkeypatch.setitem(ARCHITECTURES, "phi", {"num_key_value_heads": 4})
    model = make(kind, vocab_size=97)
    if adapter == "lora":
        model = lora.add(model.to(half), from_mapping({"adapter": "lora", "lora_rank": 2}))
    inputs, labels = torch.randint(2, 96, (2, 40, 24))
    labels[0, 5:9] = IGNORE
    positions = torch.arange(24).expand(40, 24)
    found = []
    for chunk in (0, 100):
        module = TokenLoss(model, chunk)
        model.zero_grad()
        with Seen() as seen, autocast(torch.device("cpu"), dtype):
            loss = module(inputs, labels, positions)
            (loss / 1000).backward()
        assert seen.products == {half} and seen.softmaxes == {torch.float32} and loss.dtype == torch.float32
        with Seen() as evaluated, torch.no_grad(), autocast(torch.device("cpu"), dtype):
            assert module(inputs, labels, positions).item() == pytest.approx(loss.item(), rel=1e-6)
        assert evaluated.count == (10 if chunk else 1)  # no gradients
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert (found[1][1] - found[0][1]).norm() < 0.02 * found[0][1].norm()


@pytest.mark.parametrize("kind", sorted(CHANGES_LOGITS))
@pytest.mark.parametrize("chunk", [5, 16])
def test_no_more_changed_logits_than_asked_for_are_there_at_once(kind, chunk):
    """By the tensors of a vocabulary's width that a pass makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Widest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in tree_leaves(result):
                if (
                    isinstance(one, torch.Tensor) and one.shape[-1:] == (97,) and one.shape[0] != 32
                ):  # the head's
                    self.rows = max(self.rows, one.numel() // 97)
            return result

    model = make(kind, vocab_size=97, tie_word_embeddings=False)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    with Widest() as seen:
        TokenLoss(model, chunk)(inputs, labels, torch.arange(24).expand(2, 24)).backward()
    assert 0 < seen.rows <= chunk


def test_a_head_whose_logits_are_changed_in_an_unknown_way_takes_the_whole_way():
    """Of architectures that have the same key, some multiply where Granite divides, or do more."""
    for model in (make("llama"), make("granite", logits_scaling=2.0, final_logit_softcapping=3.0)):
        if model.config.model_type == "llama":
            model.config.logits_scaling = 2.0
        assert TokenLoss(model, 16).chunk == 0
    assert TokenLoss(make("granite", logits_scaling=1.0), 16).chunk == 16


@pytest.mark.parametrize("kernel", ["torch", "liger"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_with_layers_of_its_own_takes_the_whole_way(kernel, dtype, world, monkeypatch):
    """ModernBERT's decoder has a layer and a norm before the matrix, which would get no gradient in chunks."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(
        ARCHITECTURES, "modernbert-decoder", {**sizes, "intermediate_size": 48, "pad_token_id": 0}
    )
    module = TokenLoss(make("modernbert-decoder"), 16)
    assert module.headless
    if kernel == "liger":
        module.fused = lambda weight, hidden, labels, bias: torch.nn.functional.cross_entropy(
            torch.nn.functional.linear(hidden, weight, bias), labels, reduction="sum"
        )
        with pytest.raises(
            BadInput, match=r"that of ModernBertDecoderForCausalLM is not; set loss_kernel to torch"
        ):
            packing.check(from_mapping({"dtype": dtype}), module, world)
        return
    packing.check(from_mapping({"dtype": dtype}), module, world)
    assert (module.headless, module.chunk) == (False, 0)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    module(inputs, labels, torch.arange(24).expand(2, 24)).backward()
    assert all(one.grad is not None for one in module.model.lm_head.parameters())


def test_liger_computes_the_loss_where_that_is_asked_for(monkeypatch):
    """With a stand-in for its kernel, which wants a GPU: what it is given, and what is refused."""
    from trainer.model import loss

    class Fused:
        def __init__(self, ignore_index, reduction):
            self.how = {"ignore_index": ignore_index, "reduction": reduction}

        def __call__(self, weight, hidden, labels, bias):
            return torch.nn.functional.cross_entropy(
                torch.nn.functional.linear(hidden, weight, bias), labels, **self.how
            )

    package = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Fused)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    labels[0, 5:9] = IGNORE
    model, positions = make("llama"), torch.arange(24).expand(2, 24)
    module = TokenLoss(model, None, "liger")
    assert module(inputs, labels, positions).item() == pytest.approx(
        TokenLoss(model, 0)(inputs, labels, positions).item(), rel=1e-6
    )
    assert isinstance(module.fused, Fused)
    with pytest.raises(BadInput, match=r"that of Gemma2ForCausalLM is not; set loss_kernel to torch"):
        TokenLoss(make("gemma2"), None, "liger")
    asked = from_mapping({"loss_kernel": "liger"})
    with pytest.raises(BadInput, match="liger runs on GPUs alone"):
        loss.check(asked, torch.device("cpu"))
    monkeypatch.setattr(loss.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="liger-kernel is not installed beside the trainer"):
        loss.check(asked, torch.device("cuda"))
    loss.check(from_mapping({}), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_layers_that_see_other_documents_are_refused(kind, world, monkeypatch):
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    monkeypatch.setitem(ARCHITECTURES, kind, {"state_size": 4, **periods, **EXPERTS})
    model = make(kind)
    with pytest.raises(BadInput, match=r"see other documents|does not take what tells documents apart"):
        packing.check(from_mapping({"model": kind}), TokenLoss(model), world)


def test_adapters_go_where_they_are_wanted():
    config = from_mapping({"adapter": "lora", "lora_targets": "q_proj, down_proj"})
    names = [name for name, _ in lora.add(make("llama"), config).named_parameters() if "lora_A" in name]
    assert len(names) == 4 and all("q_proj" in name or "down_proj" in name for name in names)
    with pytest.raises(
        BadInput, match=r"no layer is named q_prj; model tiny has down_proj, .*v_proj; or write auto"
    ):
        lora.add(make("llama"), from_mapping({"adapter": "lora", "lora_targets": "q_prj,k_proj"}))
    assert "lm_head" not in lora.linear_names(make("llama"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "phi3"])
def test_an_architecture_that_peft_does_not_know_gets_no_adapter_for_each_expert(kind):
    """Nor for their router; where there are none all layers get one, as with all-linear."""
    wrapped = lora.add(make(kind), from_mapping({"adapter": "lora", "lora_dropout": 0.1}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    if kind == "phi3":
        assert {name.rsplit(".", 1)[-1] for name in adapted} == lora.linear_names(make(kind))
        return
    assert len(adapted) == 8 and all("self_attn" in name for name in adapted)
    with pytest.raises(
        BadInput, match=r"all-linear: .*lora_dropout is 0.1: where experts .* set it to 0; or"
    ):
        everywhere = {"adapter": "lora", "lora_dropout": 0.1, "lora_targets": "all-linear"}
        lora.add(make(kind), from_mapping(everywhere))


def test_a_gate_of_attention_gets_an_adapter_where_peft_takes_it_for_none_of_experts():
    own = {"n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    own |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hy_v4", **{**SMALL, **EXPERTS, **own}))
    wrapped = lora.add(load.in_training(model), from_mapping({"adapter": "lora"}))
    assert any("self_attn.gate_proj.lora_A" in name for name, _ in wrapped.named_parameters())


def test_a_layer_that_is_asked_for_and_would_be_without_use_is_refused(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "mamba", {"state_size": 4})
    asked = from_mapping({"adapter": "lora", "lora_targets": "in_proj,out_proj"})
    with pytest.raises(
        BadInput, match=r"out_proj: in model tiny .* without use; it has in_proj; or write auto"
    ):
        lora.add(make("mamba"), asked)


def test_a_gate_of_attention_is_not_taken_for_an_expert_s():
    """peft does, of whatever is called so, and refuses it for want of the other half."""
    wrapped = lora.add(make("afmoe"), from_mapping({"adapter": "lora"}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_where_attention_has_experts_the_layers_beside_them_get_adapters(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "jetmoe", {**EXPERTS, "kv_channels": 8})
    wrapped = lora.add(make("jetmoe"), from_mapping({"adapter": "lora"}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert adapted and not any("experts" in name or "router" in name for name in adapted)


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_what_multiplies_in_a_way_of_its_own_gets_no_adapter(targets):
    class Grouped(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight).unflatten(-1, (4, -1))

    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Grouped(32, 32, bias=False)
    config = from_mapping({"adapter": "lora", "lora_targets": targets})
    wrapped = lora.add(model, config)
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert adapted and not any("o_proj" in name for name in adapted)
    assert "o_proj" not in lora.linear_names(model)
    # Falcon's multiply by themselves, and as others do.
    assert any("lora_A" in name for name, _ in lora.add(make("falcon"), config).named_parameters())


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
@pytest.mark.parametrize("kind", ["mamba", "bamba", "falcon_h1", "jamba"])
def test_what_a_kernel_reads_by_itself_gets_no_adapter(kind, targets, monkeypatch):
    """It would be trained, and change nothing, on a GPU; peft refuses that of some of these alone."""
    sizes = {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    }
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "state_size": 4}
    own = {"attn_layer_indices": [1]} if kind == "bamba" else {}
    monkeypatch.setitem(ARCHITECTURES, kind, {**sizes, **periods, **own, "num_experts": 1})
    wrapped = lora.add(make(kind), from_mapping({"adapter": "lora", "lora_targets": targets}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    mixers = {name.rsplit(".", 1)[-1] for name in adapted if "mamba" in name or "mixer" in name}
    assert "in_proj" in mixers and not mixers & {"out_proj", "dt_proj", "x_proj", "conv1d"}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_weights_that_quantize_leaves_whole_are_told_of(kind, in_parts, world, tmp_path, capsys):
    """The experts', which are no linear layers; they lie in the format of the computation."""
    model = make(kind, moe_intermediate_size=64)
    model.save_pretrained(tmp_path)
    config = from_mapping(
        {"model": str(tmp_path), "adapter": "lora", "quantize": "4bit", "dtype": "bfloat16"}
        | {"strategy": "fsdp" if in_parts else "ddp"}
    )
    built = load.build(config, load.Source(model.config, None, str(tmp_path), {}), world, in_parts)
    said = capsys.readouterr().out
    if kind == "llama":
        assert quantize.left_whole(built) == 0 and "warning" not in said
        return
    experts = sum(
        one.numel() for name, one in model.named_parameters() if ".experts." in name or ".gate." in name
    )
    share = quantize.left_whole(built)
    assert share == pytest.approx(experts / sum(one.numel() for one in model.parameters()))
    assert f"warning: quantised are linear layers alone: {share:.0%} of this model's weights" in said
    assert said.count("warning") == 1


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_weights_that_a_model_clamps_in_place_stay_whole(bits, world, tmp_path, monkeypatch):
    """Gemma 3n's, as it trains: a quantised one cannot be clamped."""
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0}
    sizes = {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 2, "sliding_window": 6}
    monkeypatch.setitem(
        ARCHITECTURES, "gemma3n_text", {**own, **sizes, "layer_types": ["full_attention"] * 2}
    )
    model = make("gemma3n_text")
    model.save_pretrained(tmp_path)
    config = from_mapping({"model": str(tmp_path), "adapter": "lora", "quantize": bits})
    built = load.build(config, load.Source(model.config, None, str(tmp_path), {}), world, False)
    kept = [one.weight.dtype for name, one in built.named_modules() if name.endswith("_coefs")]
    assert len(kept) == 4 and all(one.is_floating_point for one in kept)
    assert any(
        quantize.is_quantised(one.weight) for one in built.modules() if isinstance(one, torch.nn.Linear)
    )
    inputs = torch.randint(2, 96, (1, 8))
    TokenLoss(built)(inputs, inputs, torch.arange(8)[None]).backward()


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_weights_that_a_kernel_reads_stay_whole(bits, world, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "mamba", {"state_size": 4})
    model = make("mamba")
    model.save_pretrained(tmp_path)
    config = from_mapping({"model": str(tmp_path), "adapter": "lora", "quantize": bits})
    built = load.build(config, load.Source(model.config, None, str(tmp_path), {}), world, False)
    names = [name for name, one in built.named_parameters() if quantize.is_quantised(one)]
    assert {lora.original_name(name).split(".")[-2] for name in names} == {"in_proj"}
    inputs = torch.randint(2, 96, (1, 8))
    TokenLoss(built, packed=False)(inputs, inputs, torch.arange(8)[None]).backward()


def test_layers_within_layers_are_one(monkeypatch):
    """transformers names Mamba's mixers beside the layers that they are in; FSDP shares a weight out once."""
    from trainer.strategies import sharded

    monkeypatch.setitem(ARCHITECTURES, "mamba", {"state_size": 4})
    model = make("mamba")
    assert sharded.blocks(model) == list(model.backbone.layers)


@pytest.mark.parametrize("strategy", ["ddp", "split"])
def test_weights_that_are_quantised_on_disk_go_where_they_are_wanted(strategy, world, tmp_path, monkeypatch):
    """Left to bitsandbytes they all go to the first GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    make("llama").save_pretrained(tmp_path / "whole")
    settings = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=settings, device_map="cpu"
    ).save_pretrained(tmp_path / "packed")
    read, given = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **more: given.append(more["device_map"]) or read(*args, **more),
    )
    folder = str(tmp_path / "packed")
    config = from_mapping({"model": folder, "adapter": "lora", "strategy": strategy})
    built = load.build(config, load.Source(AutoConfig.from_pretrained(folder), None, folder, {}), world)
    assert given == [{"": torch.device("cpu")}] and quantize.left_whole(built) == 0


def test_all_ranks_have_the_scales_of_one(tmp_path):
    """By a mean that another card adds up in another order, one of them may come out otherwise, and no byte with it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make("llama").save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu")
        for _ in range(2)
    ]
    states = [model.model.layers[0].self_attn.q_proj.weight.quant_state for model in models]
    states[1].offset += 0.5
    states[1].absmax[0] ^= 1
    sent, digests = [], []

    def copied(values, source):
        values.copy_(sent.pop(0))

    first = {"first": True, "broadcast": lambda values, source: sent.append(values.clone())}
    for model, more in zip(models, (first, {"first": False, "broadcast": copied}), strict=True):
        told = types.SimpleNamespace(
            size=2,
            hosts=["a", "b"],
            gather=lambda one: digests.append(one) or [digests[0], "another"],
            **more,
        )
        load._equalise(model, told)
    assert len(set(digests)) == 2 and not sent
    assert torch.equal(states[0].absmax, states[1].absmax) and torch.equal(states[0].offset, states[1].offset)


def test_experts_that_are_layers_have_no_dropout():
    """What an expert sees depends on the whole micro-batch: its mask would, too."""
    wanted = {"adapter": "lora", "lora_targets": "all-linear"}
    for dropout in (0.0, 0.1):
        model = make("llama")
        model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(2)])
        config = from_mapping({**wanted, "lora_dropout": dropout})
        if dropout:
            with pytest.raises(BadInput, match=r"lora_dropout: found 0\.1, and adapters within experts"):
                lora.add(model, config)
        else:
            lora.add(model, config)


def test_what_a_parameter_under_adapters_was_called_before():
    """Also where one parameter of a module after the other has an adapter, as those of experts."""
    before = {name for name, _ in make("qwen3_moe").named_parameters()}
    wrapped = lora.add(make("qwen3_moe"), from_mapping({"adapter": "lora", "lora_targets": "all-linear"}))
    assert {
        lora.original_name(name) for name, _ in wrapped.named_parameters() if "lora_" not in name
    } == before


def test_what_is_dropped_does_not_depend_on_the_pieces_that_it_is_drawn_in(monkeypatch):
    dropout, x = lora.KeyedDropout(0.5, 3), torch.ones(2, 10, 4)
    dropout.keys = [7, 8]
    whole = dropout(x)
    monkeypatch.setattr(lora, "PIECE", 7)
    assert torch.equal(dropout(x), whole) and 10 < whole.count_nonzero() < 70
    assert dropout(x.bfloat16()).dtype == torch.bfloat16


def test_dropout_of_tokens_in_one_row_after_the_other():
    """Shared experts see (B x S, D): what is dropped is the same."""
    dropout = lora.KeyedDropout(0.5, 3)
    dropout.keys = [7, 8]
    x = torch.randn(2, 10, 4)
    assert torch.equal(dropout(x.flatten(0, 1)), dropout(x).flatten(0, 1))
    assert torch.equal(dropout(x.flatten(0, 1)[None])[0], dropout(x).flatten(0, 1))


def drawn(place, seed):
    """As `lora.draws` has it, in whole numbers without end."""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    found = (place * (mixed >> 32 | 1) + mixed) % 2**32
    found = (found ^ found >> 16) * 0x7FEB352D % 2**32
    found = (found ^ found >> 15) * 0x846CA68B % 2**32
    return (found ^ found >> 16) % 2**31


@pytest.mark.parametrize("seed", [0, 7, 8, 123456789012345678, 2**63 + 5])
def test_dropout_is_by_numbers_that_every_device_has(seed):
    """A device's own depend on how many processors it has: cards of two kinds would drop different values."""
    found = lora.draws(5000, seed, torch.device("cpu"))
    assert found.tolist() == [drawn(place, seed) for place in range(5000)]
    assert lora.draws(9, seed, torch.device("cpu"), 4990).tolist() == [
        drawn(place, seed) for place in range(4990, 4999)
    ]
    dropped = (lora.draws(1 << 18, seed, torch.device("cpu")) < 0.1 * 2**31).float()
    assert dropped.mean() == pytest.approx(0.1, abs=0.003)
    other = (lora.draws(1 << 18, seed + 1, torch.device("cpu")) < 0.1 * 2**31).float()
    for one, two in ((dropped, other), (dropped[1:], dropped[:-1]), (dropped[1:], other[:-1])):
        assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.01


def test_the_adapter_s_dropout_does_not_depend_on_who_computes():
    """A sequence's loss is the same alone and beside another; another key or layer drops others; without keys, none."""
    config = from_mapping({"adapter": "lora", "lora_dropout": 0.5, "lora_targets": "all-linear"})
    wrapped = lora.add(make("llama"), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    module = TokenLoss(wrapped)
    inputs, labels = torch.randint(2, 96, (2, 2, 24), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(24).expand(2, 24)

    def loss(rows, keys):
        lora.key_dropout(module, keys)
        return module(inputs[rows], labels[rows], positions[rows]).item()

    both = loss([0, 1], [7, 8])
    assert loss([0], [7]) + loss([1], [8]) == pytest.approx(both, rel=1e-5)
    assert loss([1, 0], [8, 7]) == pytest.approx(both, rel=1e-5)
    assert abs(loss([0, 1], [9, 8]) - both) > 1e-3
    assert loss([0, 1], None) == loss([0, 1], None)
    parts = [part for part in module.modules() if isinstance(part, lora.KeyedDropout)]
    assert len({part.layer for part in parts}) == len(parts) == 14
    x = torch.ones(1, 50, 40)
    parts[0].keys = parts[1].keys = [3]
    masks = [parts[n](x) for n in (0, 1)]
    assert not torch.equal(*masks) and 0.4 < (masks[0] == 0).float().mean() < 0.6 and masks[0].max() == 2


def packed(*names, dtype="F32", cut=0):
    """A safetensors file of one value by each name, without its last `cut` bytes."""
    tensors = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(4 * len(names))
    return whole[: len(whole) - cut]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
MODEL = {"config.json": b"{}", "tokenizer.json": b"{}"}
WHOLE = MODEL | {"model.safetensors": packed("a.weight")}
INDEX = {
    "model.safetensors.index.json": b'{"weight_map": {"a.weight": "m-1.safetensors", "b": "m-2.safetensors"}}'
}
PARTS = MODEL | INDEX | {"m-1.safetensors": packed("a.weight"), "m-2.safetensors": packed("b")}
NF4, GPTQ = (
    {"config.json": b'{"quantization_config": {"quant_method": "%s"}}' % by}
    for by in (b"bitsandbytes", b"gptq")
)
FLOAT8 = packed("a.weight", "a.weight_scale_inv", dtype="F8_E4M3")
# What lies in a directory, as it is found in downloads, caches and others' output, and what is said of it; None: good.
DIRECTORIES = {
    "nothing": ({}, "config.json, found nothing; export the model"),
    "an adapter": ({"adapter_config.json": b"{}"}, "this is an adapter: merge it"),
    "an adapter with its model's configuration": (
        MODEL | {"adapter_config.json": b"{}"},
        "an adapter and no weights",
    ),
    "a model and an adapter": (
        WHOLE | {"adapter_config.json": b"{}"},
        "a whole model and an adapter in one directory",
    ),
    "pickled": (MODEL | {"pytorch_model.bin": b""}, r"its weights are pickled, .*found pytorch_model\.bin"),
    "no tokenizer": ({"config.json": b"{}", "model.safetensors": packed()}, "no tokenizer.json"),
    "pickled and no tokenizer": ({"config.json": b"{}", "a.pth": b""}, "(?s)pickled.*no tokenizer.json"),
    "a model's cache": ({"snapshots/0a1b/config.json": b"{}"}, "did you mean .*/snapshots/0a1b?"),
    "a directory too high": ({"checkpoint-9/config.json": b"{}"}, "did you mean .*/checkpoint-9?"),
    "GGUF": ({"a.Q4_K_M.gguf": b"GGUF"}, "GGUF is for inference"),
    "Llama's own format": (
        {"params.json": b"{}", "consolidated.00.pth": b""},
        "this is its maker's own format",
    ),
    "half a download": (
        MODEL | {"model.safetensors.incomplete": b""},
        "it is half downloaded: go on with that",
    ),
    "half a download of hf": (
        MODEL | {".cache/huggingface/download/a.1.incomplete": b""},
        "it is half downloaded",
    ),
    "GGUF with a configuration": (
        MODEL | {"a.gguf": b"GGUF"},
        "expected its weights as model.safetensors or .*, found a.gg",
    ),
    "TensorFlow's": (MODEL | {"tf_model.h5": b""}, "found tf_model.h5"),
    "Flax's": (MODEL | {"flax_model.msgpack": b""}, "found flax_model.msgpack"),
    "ONNX": (MODEL | {"onnx/model.onnx": b""}, "found onnx/model.onnx"),
    "Mistral's own": (MODEL | {"consolidated.safetensors": packed("a")}, "found consolidated.safetensors"),
    "a variant": (MODEL | {"model.fp16.safetensors": packed("a")}, "found model.fp16.safetensors"),
    "Llama's own beside it": (
        MODEL | {"original/consolidated.00.pth": b""},
        "found original/consolidated.00.pth",
    ),
    "no index": (
        MODEL | {"model-00001-of-00002.safetensors": packed("a")},
        "a model in parts needs model.safetensors.index",
    ),
    "a part less": (
        {**PARTS, "m-2.safetensors": None},
        "m-2.safetensors: expected a file of the model's weights, found none",
    ),
    "a part cut off": (
        PARTS | {"m-2.safetensors": packed("b", cut=1)},
        r"m-2\.safetensors: expected 107 bytes by its header, found 106",
    ),
    "no bytes": (
        MODEL | {"model.safetensors": b""},
        "expected safetensors, found 0 bytes that begin otherwise",
    ),
    "a page of the web": (
        MODEL | {"model.safetensors": b"<!DOCTYPE html>" * 9},
        "expected safetensors, found 135 bytes",
    ),
    "git's pointer": (
        MODEL | {"model.safetensors": LFS},
        "model.safetensors is what git has in place of the file; .*git lfs",
    ),
    "git's pointer to the index": (
        MODEL | {"model.safetensors.index.json": LFS},
        "index.json is what git has in place",
    ),
    "git's pointer to the tokenizer": (
        WHOLE | {"tokenizer.json": LFS},
        "tokenizer.json is what git has in place",
    ),
    "an index of nothing": (
        MODEL | {"model.safetensors.index.json": b"{}"},
        "index.json is no list of the files",
    ),
    "an index of no weights": (
        MODEL | {"model.safetensors.index.json": b'{"weight_map": {}}'},
        "index.json is no list of the files",
    ),
    "an index that is too deep": (
        MODEL | {"model.safetensors.index.json": b"[" * 200_000},
        "index.json is no list of the files",
    ),
    "a header that is too deep": (
        MODEL | {"model.safetensors": (200_000).to_bytes(8, "little") + b"[" * 200_000},
        "expected safetensors, found 200,008 bytes that begin otherwise",
    ),
    "a configuration that is too deep": (
        WHOLE | {"config.json": b"[" * 200_000},
        None,
    ),  # transformers says it
    "GPTQ's weights": (
        MODEL | {"model.safetensors": packed("a.qweight", dtype="I32")},
        "a.qweight is quantised .I32",
    ),
    "integers": (
        MODEL | {"model.safetensors": packed("a.weight", dtype="I8")},
        "a.weight is quantised .I8., and config",
    ),
    "float8 with scales": (
        MODEL | {"model.safetensors": FLOAT8},
        "a.weight is quantised .F8_E4M3., and config.json has no",
    ),
    "whole, and said to be packed": (
        WHOLE | NF4,
        "bitsandbytes has quantised the weights, and they are whole; remove",
    ),
    "whole, and said to be packed, as of old": (
        WHOLE | {"config.json": b'{"quantization_config": {"load_in_8bit": true}}'},
        "bitsandbytes has quantised the weights, and they are whole",
    ),
    "packed by bitsandbytes": (
        MODEL | NF4 | {"model.safetensors": packed("a.weight.absmax", "a.weight", dtype="U8")},
        None,
    ),
    "what GPTQ is said to have made": (
        MODEL | GPTQ | {"model.safetensors": packed("a.qweight", dtype="I32")},
        None,
    ),
    "float8 without scales": (MODEL | {"model.safetensors": packed("a.weight", dtype="F8_E4M3")}, None),
    "a mask of bytes": (MODEL | {"model.safetensors": packed("h.0.attn.bias", dtype="U8")}, None),
    "in parts": (PARTS, None),
    "others beside it": (
        WHOLE | {"pytorch_model.bin": b"", "consolidated.safetensors": b"", "a.gguf": b""},
        None,
    ),
    "HF Trainer's": (WHOLE | {"training_args.bin": b"", "optimizer.pt": b"", "rng_state.pth": b""}, None),
}


def lay(folder, contents):
    for name, content in contents.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("what", DIRECTORIES)
def test_directories_as_they_are_found(tmp_path, what):
    contents, message = DIRECTORIES[what]
    lay(tmp_path, contents)
    if message is None:
        assert files.weights_of(str(tmp_path)) == (str(tmp_path), str(tmp_path))
        return
    with pytest.raises(BadInput, match=message) as refused:
        files.weights_of(str(tmp_path))
    assert str(refused.value).startswith(f"model: {tmp_path}: ")


def test_a_model_in_the_hubs_cache(tmp_path):
    """Its files are links to where their contents lie; a copy of the links alone is none."""
    folder = tmp_path / "snapshots/0a1b"
    folder.mkdir(parents=True)
    for name, content in WHOLE.items():
        lay(tmp_path, {f"blobs/{name}": content})
        (folder / name).symlink_to(f"../../blobs/{name}")
    assert files.weights_of(str(folder))[0] == str(folder)
    (tmp_path / "blobs/model.safetensors").rename(tmp_path / "blobs/0123.incomplete")
    with pytest.raises(
        BadInput, match=r"model.safetensors: expected a file .*, found none, a link to what is not there"
    ):
        files.weights_of(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"found 0123\.incomplete; it is half downloaded"):
        files.weights_of(str(folder))
    (tmp_path / "blobs/config.json").unlink()
    with pytest.raises(
        BadInput, match=r"config.json is a link to what is not there: download or copy it again, with what"
    ):
        files.weights_of(str(folder))


def test_where_weights_come_from(tmp_path):
    lay(tmp_path, MODEL)
    assert files.weights_of(str(tmp_path)) == (None, str(tmp_path))  # random weights
    lay(tmp_path, WHOLE)
    assert files.weights_of(str(tmp_path)) == (str(tmp_path), str(tmp_path))
    assert files.weights_of("org/model") == ("org/model", "org/model")
    for wrong in ("a/b/c", "/no/such", str(tmp_path / "config.json")):
        with pytest.raises(BadInput, match="directory"):
            files.weights_of(wrong)
    with pytest.raises(
        BadInput, match=r"alone; give the directory of: hf download org/a --revision v2 --local-dir DIR"
    ):
        files.weights_of("org/a@v2")
    with pytest.raises(BadInput, match="no such directory; give tiny, a model's directory"):
        files.weights_of("/models/a@v2")  # which is no name
    with pytest.raises(BadInput, match=r"did you mean org/a\?"):
        files.weights_of("https://huggingface.co/org/a/tree/main")


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


def test_an_adapter_that_is_pickled_is_not_opened(tmp_path):
    """peft takes adapter_model.bin where there is no other."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(
        BadInput, match=r"found no adapter_model\.safetensors; expected the adapter in that format"
    ):
        saved.open_model(saved.find(tmp_path))


def test_a_model_that_cannot_checkpoint_its_activations_is_refused():
    from transformers import CTRLConfig, CTRLLMHeadModel

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=20, n_positions=8, n_embd=8, dff=8, n_layer=1, n_head=1))
    load._check_trained(from_mapping({}), model)
    with pytest.raises(
        BadInput, match="gradient_checkpointing: model tiny does not support it; set it to false"
    ):
        load._check_trained(from_mapping({"gradient_checkpointing": True}), model)


def test_of_a_layer_in_8_bits_no_inputs_are_kept():
    """Else those of every layer would outlast what gradient_checkpointing drops; nobody plans for them."""
    import gc
    import weakref

    state = types.SimpleNamespace(CB=torch.randint(-127, 127, (8, 16), dtype=torch.int8), SCB=torch.rand(8))
    start = torch.randn(2, 3, 16, requires_grad=True)
    inputs = start * 2
    gone = weakref.ref(inputs)
    found = quantize._as_whole(inputs, None, state=state)
    del inputs
    gc.collect()
    assert gone() is None
    found.sum().backward()
    whole = state.CB.float() * (state.SCB / 127)[:, None]
    assert torch.allclose(found, (2 * start) @ whole.T) and torch.allclose(
        start.grad, 2 * whole.sum(0).expand(2, 3, 16)
    )


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


def small(folder, **changes):
    """A Llama's directory, its configuration changed after it was saved."""
    make("llama").save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | changes))
    found = load.Source(load.configuration(str(folder), False), None, str(folder), {})
    return from_mapping({"model": str(folder)}), found


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


@pytest.mark.parametrize(
    ("told", "by"),
    [
        ({"load_in_4bit": True}, None),
        ({"load_in_8bit": True}, None),
        ({"quant_method": "bitsandbytes_4bit"}, None),
        ({"quant_method": "gptq"}, "gptq"),
        ({"group_size": 64, "bits": 4}, "what its config.json does not name"),
    ],
)
def test_who_quantised_weights_on_disk(told, by):
    """Old configurations do not name bitsandbytes; and once a model is made the dictionary is an object."""
    from transformers import BitsAndBytesConfig

    config = from_mapping({"adapter": "lora"})
    if by:
        with pytest.raises(BadInput, match=f"its weights are quantised by {by}; of quantised"):
            quantize.settings(config, types.SimpleNamespace(quantization_config=told))
        return
    for one in (told, BitsAndBytesConfig(load_in_4bit=True)):
        assert quantize.settings(config, types.SimpleNamespace(quantization_config=one)) is None


def test_quantised_weights_whose_files_have_other_names_are_read_as_a_whole(world, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    small(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
    ).save_pretrained(tmp_path / "packed")
    folder = str(tmp_path / "packed")
    config = from_mapping({"model": folder, "adapter": "lora", "lora_rank": 2})
    found = load.Source(load.configuration(folder, False), None, folder, {})
    monkeypatch.setattr(stored, "find", lambda *_: None)
    model = load.build(config, found, world, in_parts=True)
    assert getattr(model, "stored", None) is None and quantize.is_quantised(
        model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    )


def an_adapter(folder, config=None, tied=False):
    """(the directory of an adapter beside a Llama that lies beside it, what that gives with it)."""
    from peft import LoraConfig, get_peft_model

    small(folder / "base", tie_word_embeddings=tied)
    if tied:
        there = load_file(folder / "base" / "model.safetensors")
        del there["lm_head.weight"]
        save_file(there, folder / "base" / "model.safetensors", {"format": "pt"})
    base = saved._weights(str(folder / "base"), "auto", False)
    model = get_peft_model(
        base, config or LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.02 if one.requires_grad else 0)
    model.save_pretrained(folder / "adapter")
    for place in ("adapter", "base"):
        vocabulary = {chr(97 + n): n for n in range(26)} | {"[UNK]": 26}
        text = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        text.save(str(folder / place / "tokenizer.json"))
    return folder / "adapter", model.eval()(input_ids=torch.arange(9)[None]).logits.detach()


def rewrite(change):
    def do(folder):
        there = load_file(folder / "adapter_model.safetensors")
        save_file(change(there), folder / "adapter_model.safetensors")

    return do


def retarget(*names):
    def do(folder):
        told = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(told | {"target_modules": names}))

    return do


ADAPTERS = {
    "as it is": (lambda folder: None, None),
    "without a tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), None),
    "of some layers": (
        rewrite(lambda there: {k: v for k, v in there.items() if "layers.1" not in k}),
        "lacks .*and 3 more",
    ),
    "of nothing": (rewrite(lambda there: {}), "lacks .* and 7 more, by adapter_config.json and its base"),
    "wrapped by FSDP": (
        rewrite(lambda there: {k.replace(".0.", ".0._fsdp_wrapped_module."): v for k, v in there.items()}),
        "has .*_fsdp_wrapped_module.* and 3 more, for which there is no place in its base",
    ),
    "without peft's prefix": (
        rewrite(lambda there: {k.removeprefix("base_model.model."): v for k, v in there.items()}),
        "has model.layers.0.self_attn.q_proj.lora_A.weight and 7 more, for which",
    ),
    "with fewer targets": (retarget("q_proj"), "v_proj.* and 3 more, for which there is no place"),
    "with more targets": (retarget("q_proj", "v_proj", "k_proj"), "lacks .*k_proj.* and 3 more, by"),
    "cut off": (
        lambda folder: lay(folder, {"adapter_model.safetensors": packed("a", cut=1)}),
        "adapter_model.safetensors: expected [0-9]+ bytes by its header",
    ),
    "git's pointer": (
        lambda folder: lay(folder, {"adapter_model.safetensors": LFS}),
        "fetch that by: git lfs pull",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_does_not_fit_its_base_is_refused(name, tmp_path):
    """peft warns at most, and the base alone would speak, or be exported as merged."""
    change, said = ADAPTERS[name]
    folder, logits = an_adapter(tmp_path)
    change(folder)
    if said is None:
        model, _ = saved.open_model(saved.find(folder))
        assert torch.allclose(model(input_ids=torch.arange(9)[None]).logits, logits, atol=1e-6)
        return
    with pytest.raises(BadInput, match=said):
        saved.open_model(saved.find(folder))


def test_without_a_tokenizer_and_a_base_the_base_is_asked_for(tmp_path):
    folder, _ = an_adapter(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        BadInput, match=r"the adapter's base: model: /no/such: no such directory; .* by --base DIR"
    ):
        saved.open_model(saved.find(folder), "/no/such")


@pytest.mark.parametrize("kind", ["prompt", "bias", "replication", "tied"])
def test_an_adapter_that_cannot_be_merged_speaks_and_is_refused_as_a_model(kind, tmp_path):
    from peft import LoraConfig, PromptTuningConfig

    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config, why = {
        "prompt": (
            PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            r"it goes before the text \(PROMPT_T",
        ),
        "bias": (
            LoraConfig(lora_bias=True, **lora),
            "the base layer has no bias; without --merge it is written as it is",
        ),
        "replication": (
            LoraConfig(layer_replication=[[0, 2], [1, 2]], **lora),
            "it repeats layers of its base",
        ),
        "tied": (  # embeddings and head are one tensor, and either adapter would go into both
            LoraConfig(**{**lora, "target_modules": ["q_proj", "lm_head"]}),
            r"it is beside lm_head, whose weights its base has in another place, too \(tied\): both would",
        ),
    }[kind]
    folder, logits = an_adapter(tmp_path, config, tied=kind == "tied")
    model, _ = saved.open_model(saved.find(folder))
    assert torch.allclose(model(input_ids=torch.arange(9)[None]).logits, logits, atol=1e-6)
    with pytest.raises(BadInput, match=f"the adapter cannot go into its base: .*{why}"):
        export.main(folder, tmp_path / "out", True, None, "auto", False)
    assert not (tmp_path / "out").exists()


def test_others_output_directory_is_told_by_what_is_in_it(tmp_path):
    lay(tmp_path, {"checkpoint-9/adapter_config.json": b"{}"})
    with pytest.raises(BadInput, match=r"nor a run .*; did you mean .*/checkpoint-9\?"):
        saved.find(tmp_path)
    with pytest.raises(BadInput, match=r"adapter_config.json: not a directory"):
        saved.find(tmp_path / "checkpoint-9/adapter_config.json")
    lay(tmp_path, MODEL)
    with pytest.raises(BadInput, match=r"found no weights in it; expected model.safetensors"):
        saved.open_model(saved.find(tmp_path))


def test_of_a_run_that_goes_on_the_newest_checkpoint_is_taken(tmp_path, monkeypatch):
    """Until it ends again its model is of the step at which it had ended."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"steps": 200}')
    monkeypatch.setattr(saved.checkpoint, "validate", lambda path: {"step": int(path.name[5:])})
    for step, chosen in ((200, "model"), (250, "step-00000250")):
        place = tmp_path / f"checkpoints/step-{step:08d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
        assert saved.find(tmp_path).path.name == chosen


def test_a_layer_that_shares_a_weight_with_the_head_is_no_block():
    """FSDP gathers a weight in one place; BERT's embeddings are among what transformers does not split."""
    from transformers import BertConfig, BertLMHeadModel

    from trainer.strategies.sharded import blocks

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = BertLMHeadModel(BertConfig(vocab_size=96, is_decoder=True, **sizes))
    assert {type(one).__name__ for one in blocks(model)} == {"BertLayer"}
    assert len(blocks(make("llama"))) == 2


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


def test_a_frozen_base_of_random_weights_keeps_the_frequencies_of_positions():
    """As a base that is read does: rounded to 16 bits, far positions would turn by other angles."""
    from transformers import LlamaConfig

    config = from_mapping({"adapter": "lora", "dtype": "bfloat16"})
    found = load.Source(LlamaConfig(**SMALL), None, None, {})
    model = load._weights(config, found, None)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_layers_in_four_bits_compute_as_the_run_does():
    """Whatever the one who packed them had: a card without bfloat16 shall not compute in it."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(8, 8, compute_dtype=torch.bfloat16)
    quantize.prepared(torch.nn.Sequential(layer), torch.float16)
    assert layer.compute_dtype == torch.float16


@pytest.mark.parametrize(
    ("kind", "keys"), [("Linear4bit", {}), ("Linear8bitLt", {"has_fp16_weights": False})]
)
def test_packed_layers_take_float32_as_a_matrix_under_autocast_does(kind, keys):
    """On cards LayerNorm gives float32, and all after it would be."""
    import bitsandbytes

    layer = getattr(bitsandbytes.nn, kind)(64, 64, bias=False, **keys)
    packed = quantize.prepared(torch.nn.Sequential(layer.to("cpu")), torch.bfloat16)
    inputs = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = packed(inputs)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert inputs.grad.dtype == torch.float32 and packed(inputs).dtype == torch.float32


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
