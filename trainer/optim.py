"""The optimizer and its learning rate."""

import math
from collections.abc import Mapping

import torch

from trainer.config import Config

BLOCK = 256  # values that share a scale in bitsandbytes' 8-bit state
FRESH, TRAINED, ADAPTER = 1e-3, 5e-5, 2e-4  # peak learning rates by what is trained


def adamw(trainable: Mapping[str, torch.nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """AdamW of parameters by name; weight decay on matrices only, not on biases (experts' are stacked) and norms."""
    decays = {name: p.ndim >= 2 and not name.endswith("bias") for name, p in trainable.items()}
    groups = [
        {"params": [p for name, p in trainable.items() if decays[name]], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trainable.items() if not decays[name]], "weight_decay": 0.0},
    ]
    settings = {"lr": 1.0, "betas": (config.beta1, config.beta2), "eps": 1e-8}
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    import bitsandbytes.optim as bnb

    # A rank may have no row of a small one, for which bitsandbytes' kernels end the process.
    groups = [{**group, "params": [p for p in group["params"] if p.numel()]} for group in groups]
    groups = [group for group in groups if group["params"]]
    kinds = {
        "adamw_8bit": bnb.AdamW8bit,
        "paged_adamw": bnb.PagedAdamW,
        "paged_adamw_8bit": bnb.PagedAdamW8bit,
    }
    return kinds[config.optimizer](groups, **settings)


def state(optimizer: torch.optim.Optimizer, part: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter (or a rank's part of it) as torch's AdamW has it, whatever AdamW it is.

    step: scalar; exp_avg, exp_avg_sq: float32, shaped like `part` and where it is. Zeros where it has taken no step.
    """
    kept = optimizer.state.get(part)
    if not kept:
        # A part without rows takes no step with bitsandbytes, and is as far as the others.
        others = (one["step"] for one in optimizer.state.values() if not part.numel() and "step" in one)
        return {
            "step": torch.tensor(float(next(others, 0))),
            "exp_avg": torch.zeros_like(part),
            "exp_avg_sq": torch.zeros_like(part),
        }
    if isinstance(optimizer, torch.optim.AdamW):
        return kept
    from bitsandbytes.functional import dequantize_blockwise

    def whole(number):
        moment = kept[f"state{number}"].to(part.device)  # a paged one says that it is on the CPU
        if moment.dtype != torch.uint8:
            return moment
        scales = {"absmax": kept[f"absmax{number}"], "code": kept[f"qmap{number}"], "blocksize": BLOCK}
        return dequantize_blockwise(moment, **scales).view_as(part)

    return {"step": torch.tensor(float(kept["step"])), "exp_avg": whole(1), "exp_avg_sq": whole(2)}


def restore(
    optimizer: torch.optim.Optimizer,
    part: torch.Tensor,
    step: float,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> None:
    """Set the state of a parameter (or a rank's part of it) to what `state` once gave."""
    if not part.numel() and not isinstance(optimizer, torch.optim.AdamW):
        return
    kept = optimizer.state[part]
    if isinstance(optimizer, torch.optim.AdamW):  # which counts the steps of a part without rows, too
        if not kept:
            kept["step"] = torch.zeros((), device=part.device)
            kept["exp_avg"], kept["exp_avg_sq"] = torch.zeros_like(part), torch.zeros_like(part)
        kept["step"].fill_(step)
        kept["exp_avg"].copy_(exp_avg)
        kept["exp_avg_sq"].copy_(exp_avg_sq)
        return
    from bitsandbytes.functional import quantize_blockwise

    if not kept:
        for g, group in enumerate(optimizer.param_groups):
            for p, one in enumerate(group["params"]):
                if one is part:
                    optimizer.init_state(group, part, g, p)
    kept["step"] = int(step)
    for number, value in ((1, exp_avg), (2, exp_avg_sq)):
        moment, value = kept[f"state{number}"], value.to(part.device)
        if moment.dtype == torch.uint8:
            scales = {"absmax": kept[f"absmax{number}"], "code": kept[f"qmap{number}"], "blocksize": BLOCK}
            quantize_blockwise(value, out=moment, **scales)
        else:
            moment.copy_(value)


def default_rate(config: Config, trained: bool) -> float:
    """The peak learning rate where the configuration gives none; `trained`: the model came with weights."""
    if config.adapter != "none":
        return ADAPTER
    return TRAINED if trained else FRESH


def learning_rate(config: Config, peak: float, step: int, steps: int) -> float:
    """The learning rate of step number `step` (1 is the first) of `steps`."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps)
    match config.lr_schedule:
        case "cosine":
            return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1))))
        case "linear":
            return peak * max(0.0, 1 - progress)
    return peak
