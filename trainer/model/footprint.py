"""What a model needs in memory for a step, found by going through the step with tensors that have no data.

The model's own code runs, forward and backward, on torch's fake tensors, and each storage that comes and goes is
counted. So architecture, attention, adapter, activation checkpointing and the chunked loss are as in training.
"""

import contextlib
import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainer import ways
from trainer.compress import factor_bytes
from trainer.config import Config
from trainer.errors import BadInput
from trainer.model import flops, load, lora, packing
from trainer.model.loss import HALF, TokenLoss

# Bytes a weight: bitsandbytes' NF4 with its scales quantised again, a float32 scale to 64 x 256 of them; 8 bits with a
# scale a row.
QUANTISED = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}


@dataclass(frozen=True)
class Footprint:
    """Counts of parameters, and bytes, of one rank that shares nothing with others."""

    parameters: int
    trainable: int
    small: int  # those of the trainable ones that are in tensors too small for 8-bit moments
    weights: int  # bytes of the model's own weights and buffers, as they are held
    adapter: int
    gradients: int
    factors: int  # bytes of the gradients as powersgd sends them
    fragment: int  # bytes of the gradients of diloco's largest fragment
    largest: (
        int  # bytes of the largest frozen matrix that is made whole for its use; 0 where none is quantised
    )
    block: int  # bytes of the largest layer
    blocks: int  # bytes of all layers
    layers: tuple[
        tuple[int, int], ...
    ]  # of each layer, in order: bytes of its weights, and how many are trained
    packs: int  # bytes of the weights that quantize: 4bit would save
    shared: int  # bytes of the weights that fsdp shares out: all but those in 8 bits, and the scales of those in 4
    # (bytes, how many of so many) of the tensors that it shares out, those in 4 bits apart; and of the trained ones.
    tensors: tuple[tuple[int, int], ...]
    trained: tuple[tuple[int, int], ...]
    activations: int  # what the layers keep for the backward pass of a micro-batch
    working: int  # what comes on top at the worst moment: the loss, or a layer's backward pass
    growing: int  # the same and the gradients, where there are none before the backward pass
    given_activations: (
        int  # both, where a sharded strategy gives weights out in the format that is computed in:
    )
    given_working: int  # autocast then makes, and keeps, no copies of them
    flops: float  # of a token (model/flops.py)
    converted: bool  # what is read is not as its files have it, whose pages all ranks of a host would share


def measure(config: Config, model_config, device: str = "cpu") -> Footprint:
    """The footprint of one micro-batch under `config` on a kind of device; `model_config` is transformers' own.

    Raises BadInput where the model's code cannot be gone through without data.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    config = _as_on_disk(config, model_config)
    try:
        with torch.device("meta"):
            model = _model(config, model_config)
        whole = packing.head_is_not_all(config, model_config)
        try:
            step = given = _step(config, model, device, whole)
        except Exception as first:
            # Some kernels know no float32 without data (grouped matrix products): half of it then, twice.
            try:
                step = given = [2 * one for one in _step(config, model.to(torch.bfloat16), device, whole)]
            except Exception:
                raise first from None
        if config.adapter == "none" and config.dtype in HALF:
            given = _step(config, model.to(HALF[config.dtype]), device, whole)
    except BadInput:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"model: {config.model}: its memory cannot be told without running it: {type(error).__name__}: {reason}"
        ) from None
    on_disk = getattr(model_config, "dtype", None)
    alike = config.quantize != "none" or on_disk in (None, load.frozen_dtype(config))
    converted = config.adapter == "none" or not alike
    return _sums(config, model, step, given, converted)


def _as_on_disk(config: Config, model_config) -> Config:
    """`config`, with `quantize` as it is where the model's weights are quantised on disk already."""
    there = getattr(model_config, "quantization_config", None)
    if there is None:
        return config
    settings = there if isinstance(there, dict) else there.to_dict()
    return dataclasses.replace(config, quantize="4bit" if settings.get("load_in_4bit") else "8bit")


def _model(config: Config, model_config) -> nn.Module:
    model = load.unloaded(config, model_config).to(load.frozen_dtype(config))
    if config.adapter == "lora":
        model = lora.add(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return load.in_training(model)


def _step(config: Config, model: nn.Module, device: str, whole: bool) -> tuple[int, int, int]:
    """Bytes of a micro-batch: (what its forward pass leaves, what is on top at the peak, the same with gradients).

    Beside the weights, and but for the last beside gradients that are there already.
    """
    with FakeTensorMode() as mode, contextlib.ExitStack() as stack:
        stack.callback(_swap(model, mode))
        module = TokenLoss(model, config.loss_chunk, device=device, packed=config.packing)
        if whole:
            module.whole()
        tracker = Tracker(model)
        hooks = [
            parameter.register_post_accumulate_grad_hook(tracker.take_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        kept = []
        base = lora.without_adapter(model)
        decoder = getattr(base, base.base_model_prefix, base)
        for one in {decoder, getattr(decoder, "decoder", decoder)}:  # OPT asks the inner one itself
            hooks.append(one.register_forward_hook(lambda *_: kept.append(tracker.now)))
        rows = min(config.micro_batch_size, config.batch_size)
        ids = torch.zeros(rows, config.sequence_length, dtype=torch.long)
        positions = torch.arange(config.sequence_length).repeat(rows, 1)
        half = HALF.get(config.dtype)
        with tracker:
            with torch.autocast("cpu", dtype=half, enabled=half is not None):
                loss = module(ids, ids, positions)
            loss.backward()
        for hook in hooks:
            hook.remove()
    return kept[-1], max(0, tracker.peak - kept[-1]), max(0, tracker.growing_peak - kept[-1])


def _swap(model: nn.Module, mode: FakeTensorMode):
    """Give `model`, on the meta device, fake tensors on the CPU; returns what undoes it. Ties stay ties."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor):
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    for module, parameters, buffers in before:
        for name, one in parameters.items():
            module._parameters[name] = fake(one)
        for name, one in buffers.items():
            module._buffers[name] = fake(one)

    def undo():
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    return undo


class Tracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, less those that are gone; `model`'s own are left out.

    peak: without gradients, which are added to those that are there already; growing_peak: with them, from when each
    comes to be.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.peak = self.growing_peak = self._gradients = 0
        self.seen = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self.seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        if storage in self.seen:
            return
        size = storage.nbytes()
        self.seen[storage] = True
        self.now += size
        self._rise()
        weakref.finalize(storage, self._gone, size)

    def _rise(self) -> None:
        self.peak = max(self.peak, self.now)
        self.growing_peak = max(self.growing_peak, self.now + self._gradients)

    def _gone(self, size: int) -> None:
        self.now -= size

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Count a parameter's gradient, which there is now, as one."""
        size = parameter.grad.nbytes
        parameter.grad = None
        self._gradients += size
        self._rise()


def _sums(
    config: Config, model: nn.Module, step: Sequence[int], given: Sequence[int], converted: bool
) -> Footprint:
    """The counts, from the shapes; step, given: as `_step` counts them."""
    from trainer.strategies.sharded import blocks
    from trainer.strategies.split import outermost

    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    linear = _linear(model)
    quantised = linear if config.quantize != "none" else set()
    frozen_width = 2 if config.adapter != "none" and config.dtype in HALF else 4

    def size(one: torch.Tensor) -> int:
        if id(one) in quantised:
            return int(one.numel() * QUANTISED[config.quantize])
        width = 4 if one.requires_grad else frozen_width
        return one.numel() * (width if one.is_floating_point() else one.element_size())

    own = {id(one) for one in trained} if config.adapter != "none" else set()
    # What is frozen without an adapter, each rank has whole (Sharded._stays).
    out = [one for one in parameters if one.requires_grad or config.adapter != "none"]
    spread = {id(one) for one in out}
    floats = [one for one in out if id(one) not in quantised]
    buffers = sum(one.numel() * one.element_size() for one in model.buffers())
    of_blocks = [
        sum(size(one) for one in block.parameters() if id(one) in spread) for block in blocks(model)
    ] or [0]
    layers = [list(layer.parameters()) for layer in outermost(blocks(model))]
    sizes = [4 * one.numel() for one in trained]
    parts = config.diloco_fragments if config.comm == "diloco" else min(config.diloco_fragments, len(sizes))
    whole = max((one.numel() * frozen_width for one in parameters if id(one) in quantised), default=0)
    return Footprint(
        parameters=sum(one.numel() for one in parameters),
        trainable=sum(one.numel() for one in trained),
        small=sum(one.numel() for one in trained if one.numel() < 4096),
        weights=sum(size(one) for one in parameters if id(one) not in own) + buffers,
        adapter=sum(size(one) for one in trained) if own else 0,
        gradients=4 * sum(one.numel() for one in trained),
        factors=factor_bytes(trained, config.powersgd_rank),
        fragment=max(sum(sizes[piece]) for piece in ways.fragments(sizes, parts)),
        largest=whole,
        block=max(of_blocks),
        blocks=sum(of_blocks),
        layers=tuple(
            (sum(map(size, layer)), sum(one.numel() for one in layer if one.requires_grad))
            for layer in layers
        ),
        packs=sum(
            int(one.numel() * (frozen_width - QUANTISED["4bit"]))
            for one in (parameters if config.quantize == "none" else ())
            if id(one) in linear and id(one) in spread
        ),
        shared=sum(size(one) for one in floats)
        + sum(one.numel() // 2 for one in parameters if id(one) in quantised and config.quantize == "4bit"),
        tensors=tuple(Counter(map(size, floats)).items()),
        trained=tuple(Counter(sizes).items()),
        activations=step[0],
        working=step[1],
        growing=step[2],
        given_activations=given[0],
        given_working=given[1],
        flops=flops.per_token(model),
        converted=converted,
    )


def _linear(model: nn.Module) -> set[int]:
    """The frozen matrices (by id) that bitsandbytes can hold in fewer bits: the linear layers' but the head's."""
    from transformers.pytorch_utils import Conv1D

    base = lora.without_adapter(model)
    head = base.get_output_embeddings()
    found = {
        id(module.weight)
        for module in base.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not module.weight.requires_grad
    }
    return found - {id(base.get_input_embeddings().weight)}
