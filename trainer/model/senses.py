"""The parts of a multimodal model that see or hear. Data is text here, of which none reaches them."""

import re

import torch.nn as nn

# As transformers names them (`PreTrainedModel.get_encoder`), and what brings their words to the decoder.
NAMES = (
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "image_tower",
    "audio_tower",
    "audio_encoder",
    "speech_encoder",
    "image_encoder",
    "image_embed",
    "audio_embed",
    "vision_embed_tokens",
    "multi_modal_projector",
    "visual_projection",
    "embed_vision",
    "embed_audio",
)
WITHIN = rf"(.*\.)?({'|'.join(map(re.escape, NAMES))})(\..*)?"  # a module in one of them, or one itself


def found(model: nn.Module) -> list[str]:
    """The names of these parts, the outermost ones; none in a model of text alone."""
    within = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in NAMES]
    return [name for name in within if not any(name.startswith(f"{other}.") for other in within)]


def freeze(model: nn.Module) -> nn.Module:
    """`model`, whose decay would shrink these parts at each step, and whose optimizer would hold moments of them."""
    for name in found(model):
        model.get_submodule(name).requires_grad_(False)
    return model
