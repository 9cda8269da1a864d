"""The auxiliary loss that keeps a mixture of experts' routers balanced, over the whole global batch.

transformers' formula, after the Switch Transformer: E times the sum over the E experts of f x P, where f is the share
of the tokens that choose the expert and P the mean of the probabilities that they give it, over all layers and tokens.
As a product of two means it is no sum over micro-batches: taken of each of them, as is usual, it would depend on how
the batch is split. But f has no gradient. So it is counted first, in a pass without gradients over the batch; what is
left then is a sum over tokens, like the loss itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.config import Config
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model.lora import without_adapter

# What transformers' models call what corrects the choice: most of them, AFMoE and LFM2, ZAYA.
CORRECTIONS = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@dataclass(frozen=True)
class Ask:
    """What a forward pass tells of its routers.

    Without `weights`: (E,) float64, how many tokens chose each expert, over all layers. With them, (E,): the scalar sum
    over layers and tokens of probability times weight.
    """

    chosen: int  # experts a token
    weights: torch.Tensor | None = None

    def __call__(self, logits: Sequence[torch.Tensor], real: torch.Tensor) -> torch.Tensor:
        """logits: (tokens, E) a layer; real: (tokens,) bool, which are no padding, of which nothing counts."""
        total, counts = 0, real.double()
        for layer in logits:
            probabilities = layer.flatten(0, -2).float().softmax(-1)
            if self.weights is None:
                experts = probabilities.topk(self.chosen).indices.flatten()
                each = counts.repeat_interleave(self.chosen)
                total = total + torch.bincount(experts, each, minlength=probabilities.shape[-1])
            else:
                total = total + ((probabilities * real[:, None]).sum(0) * self.weights).sum()
        return total


def real(inputs: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Which tokens of packed sequences, (B, S) each, are no padding: (B * S,) bool.

    Padding is a row's last document, of one token over and over, and without a label (data/pack.py). One of a single
    token is taken for it, too, wherever its row is computed.
    """
    begins = inputs.shape[1] - 1 - positions[:, -1:]
    last = torch.arange(inputs.shape[1], device=inputs.device) >= begins
    alike = (inputs == inputs[:, -1:]) & (labels == IGNORE)
    return ~(last & (alike | ~last).all(1, keepdim=True)).flatten()


def weights(counts: torch.Tensor, chosen: int) -> torch.Tensor:
    """What each expert's probability of a token counts in the auxiliary loss, (E,) float32, by the batch's `counts`."""
    rows = counts.sum() / chosen  # tokens times layers
    return (len(counts) * counts / rows / rows).float()


def coefficient(config: Config, model: torch.nn.Module) -> float:
    """The weight of the auxiliary loss beside the tokens' mean loss; 0: there is none.

    Raises BadInput where one is wanted of a model whose routers cannot be asked, or with diloco.
    """
    base = without_adapter(model)
    text = base.config.get_text_config()
    decoder = getattr(base, base.base_model_prefix, base)
    records = "router_logits" in (getattr(decoder, "_can_record_outputs", None) or {}) and chosen(model)
    otherwise = _choose_otherwise(base)
    wanted = config.router_aux_loss_coef
    if wanted is None:
        asked = getattr(text, "output_router_logits", False) and records and not otherwise
        own = float(getattr(text, "router_aux_loss_coef", None) or 0.0) if asked else 0.0
        if own and config.comm == "diloco":
            raise BadInput(
                "comm: diloco has no global batch to balance routers over, and the model's config.json asks for that; "
                "set router_aux_loss_coef to 0, or comm to exact"
            )
        return own
    if wanted and otherwise:
        raise BadInput(
            f"router_aux_loss_coef: the routers of model {config.model} choose experts by a correction of their own, "
            "or in groups, and not by the probabilities that this loss would balance; set it to 0, "
            "after -e, too, where the run goes on"
        )
    if wanted and not records:
        raise BadInput(
            f"router_aux_loss_coef: model {config.model} has no experts whose routers transformers can tell of; set it "
            "to 0, or leave it away"
        )
    return wanted


def _choose_otherwise(base: torch.nn.Module) -> bool:
    """Whether a token's experts are others than those of the largest logits, as DeepSeek-V3's and GLM-4's."""
    tensors = itertools.chain(base.named_parameters(), base.named_buffers())
    corrected = any(name.endswith(CORRECTIONS) for name, _ in tensors)
    return corrected or (getattr(base.config.get_text_config(), "n_group", None) or 1) > 1


def chosen(model: torch.nn.Module) -> int:
    """How many experts a token is sent to; 0 where that is not said."""
    return getattr(without_adapter(model).config.get_text_config(), "num_experts_per_tok", None) or 0
