"""The loss of a causal language model, without ever holding all its logits.

The logits of a batch are its largest tensor by far: tokens times vocabulary. Here the head and the cross-entropy
go over the tokens in chunks, each chunk's gradient taken at once (torch's linear_cross_entropy).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from trainer.data.pack import IGNORE
from trainer.model import router
from trainer.model.lora import without_adapter

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # formats narrower than the weights
CHUNK_ELEMENTS = 1 << 25  # logits computed at once: 128 MiB of float32; smaller chunks are slower
# What some architectures do to their logits after the head; these take the whole way.
TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


class TokenLoss(nn.Module):
    """`model` with its loss in one forward, so that a strategy can wrap both as one module.

    chunk: tokens whose logits are computed at once; 0: all; None: as many as make CHUNK_ELEMENTS logits.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None):
        super().__init__()
        self.model = model
        vocabulary = model.config.get_text_config().vocab_size
        self.chunk = max(256, CHUNK_ELEMENTS // vocabulary) if chunk is None else chunk
        if not _plain_head(without_adapter(model)):
            self.chunk = 0

    def forward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        routed: router.Ask | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The summed cross-entropy (nats, float32 scalar) of tokens (B, S) with a label other than IGNORE.

        labels[b, s] is the token after inputs[b, s]; attention stays within each document, told by positions.
        routed: what is asked of a mixture of experts' routers besides; then (cross-entropy, its answer).
        """
        # No mask and no cache: transformers then takes the document borders from the positions.
        asked = {"input_ids": inputs, "position_ids": positions, "use_cache": False}
        if routed is not None:
            asked["output_router_logits"] = True
        labels = labels.flatten()
        if not self.chunk or len(labels) <= self.chunk:
            output = self.model(**asked)
            logits = output.logits.float().flatten(0, 1)
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        else:
            base = without_adapter(self.model)
            output = getattr(base, base.base_model_prefix)(**asked)
            loss = self._in_chunks(
                base.get_output_embeddings(), output.last_hidden_state.flatten(0, 1), labels
            )
        return loss if routed is None else (loss, routed(output.router_logits))

    def _in_chunks(self, head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `forward`, of hidden (B x S, D) and labels (B x S,)."""
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk)
        return F.linear_cross_entropy(
            hidden,
            head.weight.to(hidden.dtype),
            labels,
            linear_bias=None if head.bias is None else head.bias.to(hidden.dtype),
            ignore_index=IGNORE,
            reduction="sum",
            options=options,
        )


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """The context in which a model computes in `dtype`, as the configuration names it."""
    half = HALF.get(dtype)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def _plain_head(base: nn.Module) -> bool:
    """Whether the logits are the head's output, and the head one matrix."""
    config = base.config.get_text_config()
    scaled = any(getattr(config, name, None) not in (None, 0, 1) for name in TRANSFORMS)
    return (
        not scaled
        and type(base.get_output_embeddings()) is nn.Linear
        and hasattr(base, base.base_model_prefix)
    )
