"""Frozen weights in 8 or 4 bits, by bitsandbytes."""

import torch
import torch.nn as nn

from trainer.config import Config
from trainer.errors import BadInput


def settings(config: Config, model_config):
    """transformers' quantization settings for `config`, or None: whole weights, or a checkpoint that is quantised."""
    there = getattr(model_config, "quantization_config", None)
    if there is not None:
        method = (
            there.get("quant_method") if isinstance(there, dict) else getattr(there, "quant_method", None)
        )
        if "bitsandbytes" not in str(method):
            raise BadInput(
                f"model: {config.model}: its weights are quantised by {method}; of quantised checkpoints those of "
                "bitsandbytes can be trained beside. Give the whole model, and set quantize"
            )
        return None
    if config.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    if config.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )


def prepared(model: nn.Module) -> nn.Module:
    """`model` with the one thing undone that bitsandbytes would do at an evaluation on some CPUs.

    With avx512_bf16 a pass in evaluation mode packs the weights anew in place, and training goes on with others.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model
