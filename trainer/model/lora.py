"""LoRA by peft: where the adapter goes, and a dropout that does not depend on who computes."""

import re

import torch
import torch.nn as nn

from trainer.config import Config
from trainer.errors import BadInput
from trainer.model import senses


def add(model: nn.Module, config: Config) -> nn.Module:
    """`model` in a peft model, all but the adapter frozen; the adapter's weights are float32, made from the seed.

    Raises BadInput where `lora_targets` match nothing, or what peft cannot adapt so.
    """
    from peft import LoraConfig, get_peft_model

    targets = _targets(model, config)
    excluded = [senses.WITHIN] if senses.found(model) else []
    excluded += map(re.escape, _passed_by(model))
    torch.manual_seed(config.seed)
    adapter = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        exclude_modules="|".join(excluded) or None,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(model, adapter)
    except ValueError as error:
        other = "all-linear, or to names of layers" if config.lora_targets == "auto" else "auto"
        cure = f"set lora_targets to {other}"
        if config.lora_dropout:  # peft gives experts that are one parameter an adapter without dropout only
            cure = (
                f"lora_dropout is {config.lora_dropout}: where experts are among them, set it to 0; or {cure}"
            )
        raise BadInput(
            f"lora_targets: {config.lora_targets}: peft cannot adapt these layers of model {config.model}: "
            f"{' '.join(str(error).split()).rstrip('.')}; {cure}"
        ) from None
    number = 0
    for path, module in wrapped.named_modules():
        if isinstance(dropouts := getattr(module, "lora_dropout", None), nn.ModuleDict):
            for name, dropout in dropouts.items():
                if isinstance(dropout, nn.Dropout):
                    if "experts" in path.split("."):  # what an expert sees depends on the whole micro-batch
                        raise BadInput(
                            f"lora_dropout: found {config.lora_dropout}, and adapters within experts, whose tokens "
                            "differ with how the batch is divided; set it to 0, or lora_targets to auto"
                        )
                    dropouts[name] = KeyedDropout(dropout.p, number)
                    number += 1
    return wrapped


def _targets(model: nn.Module, config: Config) -> str | list[str]:
    """The modules that get an adapter, in peft's words."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_ARCHITECTURE

    if config.lora_targets == "all-linear":
        return "all-linear"
    if config.lora_targets == "auto":
        return BY_ARCHITECTURE.get(model.config.get_text_config().model_type) or _beside_experts(model)
    wanted = [word.strip() for word in config.lora_targets.split(",") if word.strip()]
    there = linear_names(model)
    left = {name.rsplit(".", 1)[-1] for name in _passed_by(model)}
    if useless := [word for word in wanted if word in left - there]:
        raise BadInput(
            f"lora_targets: {', '.join(useless)}: in model {config.model} what is called so is read by a kernel of its "
            "own, or multiplies in a way of its own, so that an adapter beside it would be without use; it has "
            f"{', '.join(sorted(there))}; or write auto or all-linear"
        )
    unknown = [word for word in wanted if word not in there]
    if unknown or not wanted:
        raise BadInput(
            f"lora_targets: no layer is named {', '.join(unknown) or 'so'}; model {config.model} has "
            f"{', '.join(sorted(there))}; or write auto or all-linear"
        )
    return wanted


def _beside_experts(model: nn.Module) -> list[str]:
    """The names of all layers that an adapter fits, but for the head and what stands where layers have experts.

    peft takes the names of a dense feed-forward for those of the experts beside it, and all-linear for these and their
    router, too: an adapter for each expert, which is many times the memory.
    """
    holders = {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith(".experts")}
    experts = {"experts", "router"}
    # A number is a whole layer's name.
    left = experts | {one for one in holders if not one.isdigit()}
    names = [name for name in _linear(model) if left.isdisjoint(name.split("."))]
    taken = _of_experts(model)
    names = [name for name in names if name.rsplit(".", 1)[-1] not in taken]
    # Where attention has experts, too, what is beside them is all that there is.
    return names or [name for name in _linear(model) if experts.isdisjoint(name.split("."))]


def _of_experts(model: nn.Module) -> set[str]:
    """The last names that peft takes for those of experts, which became one parameter in this architecture."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, ()))


def _passed_by(model: nn.Module) -> list[str]:
    """The layers that an adapter fits by their kind alone, and beside which it would be without use, or wrong.

    Of Mamba's mixers, known by their parameters (what their state decays by, and what goes past that), a kernel reads
    the weights of these by itself. And what calls itself a linear layer may multiply otherwise, as DeepSeek-V4's in
    groups.
    """
    mixers = [name for name, one in model.named_modules() if hasattr(one, "A_log") and hasattr(one, "D")]
    own = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and not _plain(one)]
    return [
        *own,
        *(f"{mixer}.{layer}" for mixer in mixers for layer in ("out_proj", "dt_proj", "x_proj", "conv1d")),
    ]


def _plain(linear: nn.Linear) -> bool:
    """Whether it gives what a linear layer does: Falcon's do by code of their own, and bitsandbytes' as peft knows."""
    if type(linear).forward is nn.Linear.forward or type(linear).__module__.startswith("bitsandbytes."):
        return True
    weight = linear.weight
    token = torch.zeros(1, 1, linear.in_features, dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            found = linear(token)
    except Exception:  # what its own code raises
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, 1, linear.out_features)


def without_adapter(model: nn.Module) -> nn.Module:
    """The transformers model, taken out of peft's where there is an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def original_name(name: str) -> str:
    """What the parameter that is called `name` beside an adapter was called before there was one."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def linear_names(model: nn.Module) -> set[str]:
    """The last parts of the names of all layers that an adapter fits, the head left out."""
    return {name.rsplit(".", 1)[-1] for name in _linear(model)}


def _linear(model: nn.Module) -> list[str]:
    """The names of all layers that an adapter fits, the head left out."""
    from transformers.pytorch_utils import Conv1D

    head, left = model.get_output_embeddings(), {*_passed_by(model)}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name not in left
    ]


PIECE = 1 << 22  # values that numbers are drawn for at once, which take four times their memory


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the sample's key and the layer: equal on whichever rank computes it, and on
    every kind of device, whose own random numbers depend on how many processors it has.

    `keys`, one number a sequence of the micro-batch, is set before every forward pass by `key_dropout`; without
    keys nothing is dropped. A pass that is computed again (gradient checkpointing) drops the same.
    """

    def __init__(self, p: float, layer: int):
        super().__init__()
        self.p, self.layer = p, layer
        self.keys: list[int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, (B, S, D), (1, B x S, D) or (B x S, D), with a share `p` of its values zero, the others scaled up."""
        if self.keys is None:
            return x
        return x * self._kept(x) / (1 - self.p)

    @torch.compiler.disable  # it would be compiled anew for each key
    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """Which values of `x` stay: bool, shaped like it."""
        kept = torch.empty(len(self.keys), x.numel() // len(self.keys), dtype=torch.bool, device=x.device)
        for row, key in zip(kept, self.keys, strict=True):
            for begin in range(0, len(row), PIECE):
                piece = row[begin : begin + PIECE]
                found = draws(len(piece), key * 1_000_003 + self.layer, x.device, begin)
                torch.ge(found, self.p * 2**31, out=piece)
        return kept.view(x.shape)


def draws(count: int, seed: int, device: torch.device, begin: int = 0) -> torch.Tensor:
    """`count` whole numbers (int32) from 0 to 2**31 - 1, evenly distributed: a hash of their places and of `seed`.

    begin: the first one's place.

    The hash functions are splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
    and lowbias32 (Wellons, "Prospecting for hash functions", 2018), in arithmetic that wraps.
    """
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    found = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(begin))
    found.mul_(_signed(mixed >> 32 | 1)).add_(_signed(mixed))  # each seed has another order of places, too
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # The bits that come in from the left are to be zeros.
        found.bitwise_xor_((found >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return found.bitwise_and_(2**31 - 1)


def _signed(number: int) -> int:
    """The lowest 32 bits of `number`, as an int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


def key_dropout(module: nn.Module, keys: list[int] | None) -> None:
    """Tell every KeyedDropout below `module` whose sequences come next; None: drop nothing."""
    for part in module.modules():
        if isinstance(part, KeyedDropout):
            part.keys = keys
