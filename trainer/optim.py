"""The optimizer and its learning rate."""

import math

import torch

from trainer.config import Config

FRESH, TRAINED, ADAPTER = 1e-3, 5e-5, 2e-4  # peak learning rates by what is trained


def adamw(model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, not on biases and norms."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    settings = {"lr": 1.0, "betas": (config.beta1, config.beta2), "eps": 1e-8}
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    import bitsandbytes.optim as bnb

    kinds = {
        "adamw_8bit": bnb.AdamW8bit,
        "paged_adamw": bnb.PagedAdamW,
        "paged_adamw_8bit": bnb.PagedAdamW8bit,
    }
    return kinds[config.optimizer](groups, **settings)


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
