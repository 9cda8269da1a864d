"""Frozen weights in 8 or 4 bits, by bitsandbytes.

Where a strategy takes the weights from the disk itself, layers are `emptied` first: they are there without memory, an
adapter is put beside them, and `fill` quantises one weight after the other: never more than one of them is whole.
"""

import contextlib
import re
from collections.abc import Iterator

import torch
import torch.nn as nn

from trainer.config import Config
from trainer.errors import BadInput
from trainer.model import flops, lora
from trainer.model.files import quantised_by
from trainer.model.stored import Stored

# Part of the weights from which on it is told what bitsandbytes leaves whole, and offered what it saves.
MUCH = 0.1
# Layers, by the end of their names, whose weights an architecture's code reads by itself, as if they were whole:
# Gemma 3n clamps them in place, and Mamba's mixers (lora.py) give them to a kernel.
READ = {
    "gemma3n": ("prediction_coefs", "correction_coefs"),
    "[mbjz]amba|falcon_h1|granitemoehybrid|nemotron_h": (
        "mixer.out_proj",
        "mamba.out_proj",
        "dt_proj",
        "x_proj",
    ),
}
LOOKED_AT = ("compress_statistics", "quant_type")  # by peft, of a weight that it puts an adapter beside


def settings(config: Config, model_config):
    """transformers' quantization settings for `config`, or None: whole weights, or a checkpoint that is quantised."""
    there = getattr(model_config, "quantization_config", None)
    if there is not None:
        method = quantised_by(there if isinstance(there, dict) else there.to_dict())
        if "bitsandbytes" not in method:
            by = method or "what its config.json does not name"
            raise BadInput(
                f"model: {config.model}: its weights are quantised by {by}; of quantised checkpoints those of "
                "bitsandbytes can be trained beside. Give the whole model, and set quantize"
            )
        if config.adapter == "none":
            raise BadInput(
                f"model: {config.model}: its weights are quantised, so that they cannot be trained; set adapter to lora"
            )
        return None
    if config.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    text = model_config.get_text_config()
    whole = [name for kind, names in READ.items() if re.search(kind, text.model_type) for name in names]
    whole = ["lm_head", *whole] if whole else None  # the head, as of all models
    if config.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=whole,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )


def emptied(model: nn.Module, wanted, on_disk: bool, dtype: torch.dtype) -> nn.Module:
    """`model`, whose weights are on the meta device, with bitsandbytes' layers in place of those that are quantised.

    wanted: as `settings` gives it, or as the model's configuration has it, where they are so `on_disk`. The layers'
    weights stay on the meta device until `fill`. dtype: as `prepared` has it.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=on_disk)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return prepared(model, dtype)


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """While an adapter is made: empty weights are bytes on the CPU, in no memory, so that it is made there, float32."""
    empty = [(layer, layer.weight) for layer in model.modules() if _is_empty(layer)]
    for layer, weight in empty:
        bytes_ = torch.zeros((), dtype=torch.uint8).expand(weight.shape)
        layer._parameters["weight"] = nn.Parameter(bytes_, requires_grad=False)
        vars(layer.weight).update({k: v for k, v in vars(weight).items() if k in LOOKED_AT})
    yield
    for layer, weight in empty:
        layer._parameters["weight"] = weight


def empty(model: nn.Module) -> list[nn.Parameter]:
    """The weights below `model` that are still to be filled."""
    return [layer.weight for layer in model.modules() if _is_empty(layer)]


def fill(
    model: nn.Module, files: Stored | None, names: dict[int, str], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    """Give the empty weights below `model` their values on `device`, one after the other; these weights.

    names: theirs in `files`, by id. One that is not packed there is quantised, from `dtype`.
    """
    from transformers.pytorch_utils import Conv1D

    filled = []
    for layer in model.modules():
        if not _is_empty(layer):
            continue
        weight, name = layer.weight, names[id(layer.weight)]
        content, scales = files.read(name, slice(None)), files.scales_of(name)
        known = {key: value for key, value in vars(weight).items() if key != "SCB"}
        if "SCB" in scales:
            layer.weight = type(weight)(content, requires_grad=False, SCB=scales["SCB"], **known).to(device)
        elif scales:
            layer.weight = type(weight).from_prequantized(content, scales, device=device, module=layer)
        else:
            turned = issubclass(layer.source_cls, Conv1D)
            content = (content.T.contiguous() if turned else content).to(dtype)
            layer.weight = type(weight)(content, requires_grad=False, **known).to(device)
        filled.append(layer.weight)
    return filled


def bared(model: nn.Module) -> None:
    """Make plain parameters of the weights in 4 bits below `model`, as bytes, so that they can be shared out.

    Each layer keeps the scales, and finds its weight by them (bitsandbytes does so for FSDP).
    """
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        if state is not None:
            layer.quant_state = state
            # Where a checkpoint calls its bytes floats, they are as many bytes all the same.
            plain = weight.detach().as_subclass(torch.Tensor).view(torch.uint8).view(-1, 1)
            layer._parameters["weight"] = nn.Parameter(plain, requires_grad=False)


def is_quantised(weight: nn.Parameter | None) -> bool:
    """Whether it is one of bitsandbytes', which are no plain parameters."""
    return hasattr(weight, "quant_state") or hasattr(weight, "SCB")


def scales(weight: nn.Parameter) -> list[torch.Tensor]:
    """By which a quantised weight is made whole: no parameters, and as its bytes rounded by the card that made them."""
    state = getattr(weight, "quant_state", None)
    inner = getattr(state, "state2", None)
    found = (getattr(weight, "SCB", None), *(getattr(one, "absmax", None) for one in (state, inner)))
    return [one for one in (*found, getattr(state, "offset", None)) if isinstance(one, torch.Tensor)]


def kept_whole(weight: nn.Parameter) -> list[torch.Tensor]:
    """What each rank holds of a quantised weight that the ranks share: its scales, and itself where it has 8 bits."""
    return [*([weight] if hasattr(weight, "SCB") else []), *scales(weight)]


def left_whole(model: nn.Module) -> float:
    """The share of the frozen weights that are no linear layer's, and so keep all their bits: those of experts.

    Embeddings and head, which are never quantised, do not count as left.
    """
    base = lora.without_adapter(model)
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    apart = {id(one) for end in ends if end is not None for one in end.parameters()}
    frozen = [one for one in model.parameters() if not one.requires_grad]
    left = [one for one in frozen if not is_quantised(one) and one.ndim >= 2 and id(one) not in apart]
    return sum(map(flops.elements, left)) / max(1, sum(map(flops.elements, frozen)))


def _is_empty(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return is_quantised(weight) and weight.is_meta


def move(layer: nn.Module, device: torch.device) -> None:
    """Bring the quantised weight of `layer`, if it has one, to `device` with its scales, which Module.to may leave."""
    for name, weight in layer._parameters.items():
        if is_quantised(weight) and not weight.is_meta:
            layer._parameters[name] = weight.to(device)


def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model`, whose layers by bitsandbytes compute in `dtype`, alike on all devices, and leave their weights alone.

    With avx512_bf16 a pass in evaluation mode packs weights in 4 bits anew in place, and training goes on with others.
    Those in 8 bits are multiplied as whole ones by whole inputs, as bitsandbytes trains them on CPUs. On cards it would
    round the inputs, too, all but columns in which any token of the micro-batch stands out: a token's output would
    depend on others. Inputs come in the format of autocast, as those of other matrices do: on cards a LayerNorm's are
    float32, and so would be the products, or what the layers after them hold.
    """
    import bitsandbytes

    bitsandbytes.matmul = _as_whole
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.compute_dtype = dtype  # a file has the one that it was made with
        if isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            module.register_forward_pre_hook(_as_autocast)
    return model


def _as_autocast(_, arguments: tuple) -> tuple:
    """What a layer is called with, its inputs as autocast has those of a matrix."""
    inputs, *rest = arguments
    if not torch.is_autocast_enabled(inputs.device.type):
        return arguments
    return inputs.to(torch.get_autocast_dtype(inputs.device.type)), *rest


def _as_whole(inputs, weight, out=None, state=None, threshold=0.0, bias=None):
    """Stands in for bitsandbytes.matmul: of inputs (…, K), and a weight (N, K) in 8 bits of a layer with that state."""
    return _Whole.apply(inputs, bias, state)


class _Whole(torch.autograd.Function):
    """Inputs (…, K) by a frozen weight (N, K) in 8 bits, which is whole for as long as that takes.

    As bitsandbytes' MatMul8bitFp, which keeps the inputs, too, for the weight's gradient: of checkpointed activations
    all would stay.
    """

    @staticmethod
    def forward(ctx, inputs, bias, state):
        ctx.state, ctx.dtype, ctx.bias = state, inputs.dtype, None if bias is None else bias.dtype
        return nn.functional.linear(inputs, _whole(state, inputs.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = bias = None
        if ctx.needs_input_grad[0]:
            inputs = rows.to(ctx.dtype) @ _whole(ctx.state, ctx.dtype)
            inputs = inputs.view(*gradient.shape[:-1], inputs.shape[-1])
        if ctx.needs_input_grad[1]:
            bias = rows.sum(0, dtype=ctx.bias)
        return inputs, bias, None


def _whole(state, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight (N, K), of its codes (N, K) and the largest value of each row (N)."""
    return state.CB.to(dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
