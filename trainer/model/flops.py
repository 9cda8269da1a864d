"""Floating-point operations of a step, and what GPUs can do.

The convention: a token costs 6 operations for each trained weight that it meets in a matrix product (2 forward, 2 for
the gradient of the input, 2 for the weight's own) and 4 for each frozen one, which has no gradient of its own: 6N for
full fine-tuning, 4N for LoRA. Of experts those count that a token is sent to. Left out are embeddings that are only
looked up, of positions, too, the parts of pictures and sounds, which no text reaches, attention's products of tokens
with tokens, and what activation checkpointing computes again. So MFU, the share of the GPU's peak that this makes, is
of the model's work and not of the hardware's.
"""

import re

import torch
import torch.nn as nn

from trainer.model import senses
from trainer.model.lora import without_adapter

# Words after a card's name that make it another one, of other units or power, or a part of it.
OTHERS = {"ti", "super", "laptop", "mobile", "max", "d", "ada", "mig"}
# Dense peak by what stands in the device's name, in TFLOP/s: (bfloat16 or float16, float32 without TF32).
PEAKS = {
    "B200": (2250, 75),
    "B100": (1800, 60),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "H800 PCIe": (756, 51),
    "H800": (989, 67),
    "H20": (148, 44),
    "GH200": (989, 67),
    "A100": (312, 19.5),
    "A800": (312, 19.5),
    "A40": (150, 37.4),
    "A30": (165, 10.3),
    "A10G": (70, 31.2),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L40": (181, 90.5),
    "L4": (121, 30.3),
    "V100S": (130, 16.4),
    "V100-PCIE": (112, 14),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
    "RTX A6000": (155, 38.7),
    "RTX A5000": (111, 27.8),
    "RTX 6000 Ada": (364, 91.1),
    "RTX 5090": (209, 104.8),
    "RTX 5080": (113, 56.3),
    "RTX 5070 Ti": (87.9, 43.9),
    "RTX 5070": (61.7, 30.9),
    "RTX 4090": (165, 82.6),
    "RTX 4080 SUPER": (104, 52.2),
    "RTX 4080": (97.5, 48.7),
    "RTX 4070 Ti SUPER": (88.2, 44.1),
    "RTX 4070 Ti": (80.2, 40.1),
    "RTX 4070 SUPER": (71, 35.5),
    "RTX 4070": (58, 29.1),
    "RTX 4060 Ti": (44.1, 22.1),
    "RTX 4060": (30.2, 15.1),
    "RTX 3090 Ti": (80, 40),
    "RTX 3090": (71, 35.6),
    "RTX 3080 Ti": (68, 34.1),
    "RTX 3080": (59.5, 29.8),
    "RTX 3070 Ti": (43.5, 21.7),
    "RTX 3070": (40.6, 20.3),
    "RTX 3060 Ti": (32.4, 16.2),
    "RTX 3060": (25.5, 12.7),
}


def peak(devices: list[torch.device], dtype: str) -> float | None:
    """The devices' peak in FLOP/s for a computation in `dtype`; None for a CPU, and where a GPU is not known."""
    if devices[0].type != "cuda":
        return None
    peaks = [peak_of(torch.cuda.get_device_name(device), dtype) for device in devices]
    return sum(peaks) if all(peaks) else None


def peak_of(name: str, dtype: str) -> float | None:
    """As `peak`, by the device's name."""
    found = max((one for one in PEAKS if _stands_in(one, name)), key=len, default=None)
    return PEAKS[found][dtype == "float32"] * 1e12 if found else None


def _stands_in(one: str, name: str) -> bool:
    """Whether the words `one` stand in `name`, as all of a card's name: A10 is no A100, RTX 4090 no RTX 4090 D."""
    before, found, after = name.partition(one)
    whole = found and not after[:1].isalnum() and not before[-1:].isalnum()
    return bool(whole) and OTHERS.isdisjoint(re.split(r"[\s-]+", after.lower()))


def per_token(model: nn.Module) -> float:
    """FLOPs of a token's forward and backward pass, by the convention above."""
    base = without_adapter(model)
    head = base.get_output_embeddings()
    tables = (one for one in base.modules() if isinstance(one, nn.Embedding))
    skipped = {id(one.weight) for one in tables} - {id(getattr(head, "weight", None))}
    reached = _share_of_experts(base.config.get_text_config())
    total = 0.0
    for name, one in model.named_parameters():
        if one.ndim >= 2 and id(one) not in skipped and not re.fullmatch(senses.WITHIN, name):
            share = reached if ".experts." in name else 1.0
            total += (6 if one.requires_grad else 4) * share * elements(one)
    return total


def elements(parameter: nn.Parameter) -> int:
    """How many weights are in a parameter; bitsandbytes holds two of 4 bits in a byte, and may know the shape."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return state.shape.numel()
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


def _share_of_experts(config) -> float:
    """The share of a layer's experts that a token is sent to; 1 where there are none."""
    sent = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    there = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return sent / there if sent and there else 1.0
