"""The loss of a causal language model, without ever holding all its logits.

The logits of a batch are its largest tensor by far: tokens times vocabulary. Here the head and the cross-entropy
go over the tokens in chunks, each chunk's gradient taken at once: by torch's linear_cross_entropy, or by AtOnce where
that is not enough.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from trainer.config import Config
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model import router
from trainer.model.lora import without_adapter

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # formats narrower than the weights
# Logits computed at once: on a GPU 128 MiB of float32, for smaller products are slower there; on a CPU 16 MiB, which is
# as fast as more, and leaves the C library's heap without the large holes that make it grow (trainer/environment.py).
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}


@dataclasses.dataclass(frozen=True)
class Transform:
    """What becomes of a head's output before it is the logits: it is scaled, or capped."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, product: torch.Tensor, logits: torch.Tensor) -> None:
        """Fill `logits`; `product` becomes what `slopes` needs."""
        if self.cap is None:
            torch.mul(product, self.scale, out=logits)
        else:
            torch.mul(product.div_(self.cap).tanh_(), self.cap, out=logits)

    def slopes(self, kept: torch.Tensor, of_logits: torch.Tensor) -> torch.Tensor:
        """The gradient of the head's output by that of the logits, in the place of what `apply` has kept."""
        if self.cap is None:
            return torch.mul(of_logits, self.scale, out=kept)
        return kept.square_().neg_().add_(1).mul_(of_logits)


UNCHANGED = Transform()
# Which architectures do just that, by the key of their configuration. Others that have the key take the whole way, for
# it means another thing there, or not all.
TRANSFORMS: dict[str, tuple[tuple[str, ...], Callable[[float], Transform] | None]] = {
    "final_logit_softcapping": (
        ("gemma2", "gemma3", "gemma3_text", "vaultgemma"),
        lambda limit: Transform(cap=limit),
    ),
    "logit_scale": (("cohere", "cohere2"), lambda scale: Transform(scale)),
    "logits_scaling": (("granite", "granitemoe", "granitemoeshared"), lambda scale: Transform(1 / scale)),
    "lm_head_multiplier": ((), None),
    "output_multiplier_scale": ((), None),
}


class TokenLoss(nn.Module):
    """`model` with its loss in one forward, so that a strategy can wrap both as one module.

    chunk: tokens whose logits are computed at once; 0: all; None: as many as make CHUNK_ELEMENTS logits
    of the kind of device that it is to compute on.
    kernel: torch, or liger, which makes chunks of its own; raises BadInput where the head is not one for it.
    packed: whether a row has several documents, whose borders the model is to be told.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: int | None = None,
        kernel: str = "torch",
        device: str = "cpu",
        packed: bool = True,
    ):
        super().__init__()
        self.model, self.packed = model, packed
        vocabulary = model.config.get_text_config().vocab_size
        self.chunk = max(256, CHUNK_ELEMENTS[device] // vocabulary) if chunk is None else chunk
        base = without_adapter(model)
        self.flash = "flash" in (base.config.get_text_config()._attn_implementation or "")
        self.masked = False  # whether masks tell the documents' borders: packing.check finds out
        self.transform = _transform(base)
        # It can be asked without its head, as far as its making tells; packing.check finds out whether that is all.
        self.headless = self.transform is not None and _plain_head(base)
        if not self.headless:
            self.chunk = 0
        self.fused = _fused(base, self.transform) if kernel == "liger" else None

    def whole(self) -> None:
        """From now on the model's own logits count, all at once; raises BadInput with a kernel that has none."""
        if self.fused is not None:
            raise not_for_liger(without_adapter(self.model))
        self.headless, self.chunk = False, 0

    def forward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None,
        positions: torch.Tensor,
        routed: router.Ask | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The summed cross-entropy (nats, float32 scalar) of tokens (B, S) with a label other than IGNORE.

        labels[b, s] is the token after inputs[b, s]; None: the logits (B, S, V) are asked for. Attention stays within
        each document, told by positions where a row has several, which begin at 0 in each, in each row and in the
        padding.
        routed: what is asked of a mixture of experts' routers besides; then (cross-entropy, its answer).
        """
        # A row's only document begins with it; the padding comes after all that counts, and none of that sees it.
        told = self._with_borders(inputs, positions) if self.packed else {"input_ids": inputs}
        asked = {**told, "use_cache": False}
        if labels is None:
            return self.model(**asked).logits.reshape(*inputs.shape, -1)
        if routed is not None:
            asked["output_router_logits"] = True
        real = None if routed is None else router.real(inputs, labels, positions)
        labels = labels.flatten()
        whole = self.fused is None and (not self.chunk or len(labels) <= self.chunk)
        # transformers' own auxiliary loss, which nobody asks for, stumbles over such masks.
        if whole and not (self.masked and routed is not None and self.headless):
            output = self.model(**asked)
            logits = output.logits.float().flatten(0, 1)
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        else:
            base = without_adapter(self.model)
            output = getattr(base, base.base_model_prefix)(**asked)
            loss = self._in_chunks(
                base.get_output_embeddings(), output.last_hidden_state.flatten(0, 1), labels
            )
        if routed is None:
            return loss
        return loss, routed([layer.to(inputs.device) for layer in output.router_logits], real)

    def _with_borders(self, inputs: torch.Tensor, positions: torch.Tensor) -> dict:
        """`inputs` and `positions`, both (B, S), as the model takes them, so that it knows the documents' borders."""
        if not self.flash:
            # Without a mask transformers takes the borders from the positions, of most architectures.
            asked = {"input_ids": inputs, "position_ids": positions}
            return asked | {"attention_mask": _masks(self.model, positions)} if self.masked else asked
        # Of flash attention it does so in a single row alone, and some architectures hand on the borders but not the
        # positions, or the reverse: so both are told, of one row.
        rows, starts = positions.reshape(1, -1), (positions.flatten() == 0).nonzero().flatten()
        borders = F.pad(starts, (0, 1), value=rows.numel()).int()
        asked = {"input_ids": inputs.reshape(1, -1), "position_ids": rows}
        for side in "qk":
            asked |= {f"cu_seq_lens_{side}": borders, f"max_length_{side}": positions.shape[1]}
        return asked

    def _in_chunks(self, head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `forward`, of hidden (B x S, D) and labels (B x S,)."""
        if self.fused is not None:  # its products take part in autocast by themselves
            bias = None if head.bias is None else head.bias.to(hidden.dtype)
            return self.fused(head.weight.to(hidden.dtype), hidden, labels, bias)
        device, size = hidden.device.type, self.chunk or len(labels)
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        narrow = hidden.dtype != torch.float32
        if narrow or self.transform != UNCHANGED:
            weights = [head.weight] if head.bias is None else [head.weight, head.bias]
            if not torch.is_grad_enabled():  # which a function of autograd's own is not told
                weights = [one.detach() for one in weights]
            return AtOnce.apply(self.transform, labels, size, hidden, *weights)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
        return F.linear_cross_entropy(
            hidden,
            head.weight.to(hidden.dtype),
            labels,
            linear_bias=None if head.bias is None else head.bias.to(hidden.dtype),
            ignore_index=IGNORE,
            reduction="sum",
            options=options,
        )


class AtOnce(torch.autograd.Function):
    """Head, what becomes of its output, and cross-entropy in chunks, multiplied in the format of `hidden`, summed in
    float32; with each chunk's gradient, while its logits are there, in their place.

    torch's linear_cross_entropy knows of nothing between head and loss. It takes no part in autocast, and sums the loss
    in the format that it is given: of a few thousand tokens' nats in bfloat16 two digits are left. Autograd would have
    a chunk there seven times over, in blocks whose coming and going leaves the C library's heap with as much in holes.
    """

    @staticmethod
    def forward(
        ctx, transform: Transform, labels: torch.Tensor, chunk: int, hidden: torch.Tensor, *head: torch.Tensor
    ):
        """As TokenLoss, of hidden (T, D) and labels (T,); head: weight (V, D) and, where there is one, bias (V,)."""
        of_hidden, *trained = ctx.needs_input_grad[3:]
        weight, *bias = (one.detach().to(hidden.dtype) for one in head)
        ctx.of_hidden = torch.empty_like(hidden) if of_hidden else None
        ctx.of_head = [
            torch.zeros_like(one, dtype=torch.float32) if grad else None
            for one, grad in zip(head, trained, strict=True)
        ]
        total = hidden.new_zeros((), dtype=torch.float32)
        products = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        wide = torch.empty_like(products, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), chunk):
                rows = slice(begin, begin + chunk)
                part, expected = hidden[rows], labels[rows]
                product, logits = products[: len(part)], wide[: len(part)]
                if bias:
                    torch.addmm(*bias, part, weight.t(), out=product)
                else:
                    torch.mm(part, weight.t(), out=product)
                transform.apply(product, logits)
                total += _into_slopes(logits, expected)
                if not any(ctx.needs_input_grad):  # an evaluation
                    continue
                slopes = transform.slopes(product, logits)
                if of_hidden:
                    torch.mm(slopes, weight, out=ctx.of_hidden[rows])
                of_weight, *of_bias = ctx.of_head
                if of_weight is not None:
                    _add_product(of_weight, slopes.t(), part)
                for summed in of_bias:
                    if summed is not None:
                        summed += slopes.sum(0)
        return total

    @staticmethod
    def backward(ctx, slope: torch.Tensor):
        """The gradients, which are there already, times that of the sum."""
        of_all = (ctx.of_hidden, *ctx.of_head)
        return None, None, None, *(None if one is None else one * slope for one in of_all)


def _add_product(summed: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Add one @ other to `summed`; a product in another format is rounded to that first."""
    if one.dtype == summed.dtype:
        summed.addmm_(one, other)
    else:
        summed += one @ other


def _into_slopes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy of logits (T, V), which become its gradient; labels (T,)."""
    counted = labels != IGNORE
    expected = labels.where(counted, 0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    right = logits.gather(1, expected)
    sums = logits.exp_().sum(-1, keepdim=True)
    loss = (sums.log() - right).squeeze(1).where(counted, 0).sum()
    # A token that does not count has the probability 0 of everything.
    logits /= sums.where(counted[:, None], torch.inf)
    logits.scatter_add_(1, expected, -counted[:, None].float())
    return loss


def check(config: Config, device: torch.device) -> None:
    """Raise BadInput where the kernel that is asked for cannot run here."""
    if config.loss_kernel == "liger" and device.type != "cuda":
        raise BadInput("loss_kernel: liger runs on GPUs alone; set loss_kernel to torch")
    if config.loss_kernel == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput(
            "loss_kernel: liger: the package liger-kernel is not installed beside the trainer; install it (pip install "
            "liger-kernel), or set loss_kernel to torch"
        )


def _fused(base: nn.Module, transform: Transform | None) -> Callable:
    """Liger's head and cross-entropy in one: (weight (V, D), hidden (T, D), labels (T,), bias) to their sum."""
    if transform != UNCHANGED or not _plain_head(base):
        raise not_for_liger(base)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum")


def not_for_liger(base: nn.Module) -> BadInput:
    """What is said of a model whose head Liger's kernel does not know."""
    return BadInput(
        f"loss_kernel: liger takes a head whose output is the logits, which that of {type(base).__name__} is not; "
        "set loss_kernel to torch"
    )


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """The context in which a model computes in `dtype`, as the configuration names it."""
    half = HALF.get(dtype)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def _transform(base: nn.Module) -> Transform | None:
    """What becomes of the head's output before it is the logits; None where that is not known."""
    config = base.config.get_text_config()
    set_ = {name: value for name in TRANSFORMS if (value := getattr(config, name, None)) not in (None, 0, 1)}
    if not set_:
        return UNCHANGED
    (name, value), *others = set_.items()
    architectures, change = TRANSFORMS[name]
    if others or config.model_type not in architectures:
        return None
    return change(value)


def _masks(model: nn.Module, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """What lets tokens see their own documents alone, by positions (B, S): a mask (B, 1, S, S), or one a kind of layer.

    They are transformers' own, in the form that the model's attention takes.
    """
    from transformers.masking_utils import create_masks_for_generate

    base = without_adapter(model)
    shape = torch.empty(*positions.shape, 0, dtype=base.dtype, device=positions.device)
    return create_masks_for_generate(base.config, shape, None, None, positions)


def _plain_head(base: nn.Module) -> bool:
    """Whether the head is one matrix, and what is before it a module of its own."""
    return type(base.get_output_embeddings()) is nn.Linear and hasattr(base, base.base_model_prefix)
