"""Weights in 8 and 4 bits: which stay whole, and how those on disk are read."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_models import ARCHITECTURES, make, small

from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model import equal, load, lora, quantize, stored
from trainer.model.loss import TokenLoss

torch.set_num_threads(1)


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
    sent, places, barrier = [], [None, None], threading.Barrier(2)

    def meet(rank, one):
        places[rank] = one
        barrier.wait()
        found = list(places)
        barrier.wait()
        return found

    def equalised(rank):
        world = types.SimpleNamespace(
            size=2,
            first=rank == 0,
            hosts=["a", "b"],
            gather=lambda one: meet(rank, one),
            broadcast=lambda values, source: sent.append(values) or values.copy_(meet(rank, values)[source]),
        )
        return equal.equalise(equal.held(models[rank]), world)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(equalised, range(2))) == [{"b"}] * 2
        assert len(sent) == 2 * 2  # what differs alone
        assert list(pool.map(equalised, range(2))) == [set()] * 2
    assert len(sent) == 2 * 2
    assert torch.equal(states[0].absmax, states[1].absmax) and torch.equal(states[0].offset, states[1].offset)


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
