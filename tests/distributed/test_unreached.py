"""Weights that not every micro-batch reaches, under the strategies that keep gradients whole until the last one."""

import pytest
import ranks
import torch

pytestmark = pytest.mark.distributed


class Model(torch.nn.Module):
    """As much of a TokenLoss as a strategy asks for; of its weights a micro-batch reaches those that it is told."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.ParameterDict({name: torch.ones(8, 4) for name in "abcd"})

    def forward(self, names):
        return sum(self.model[name].sum() for name in names)


def _gradients(world, config):
    from trainer import strategies

    strategy, found = strategies.make(config, Model(), world), []
    for _ in range(2):
        strategy.zero_grad()
        for names, last in (("ab", False), ("b", False), ("bc", True)):
            with strategy.micro_batch(last=last):
                strategy.module(names).backward()
        strategy.finish()
        found.append({name: part.grad.clone() for name, part in strategy.trainable.items()})
    return found


def test_one_rank_by_itself_has_zeros_for_what_was_not_reached(tmp_path):
    """There is no gradient before backward makes one; the optimizer goes by all of them."""
    (found,) = ranks.together(tmp_path, _gradients, [0], strategy="ddp")
    for gradients in found:
        for (name, one), times in zip(gradients.items(), (1, 3, 1, 0), strict=True):
            assert (one == times).all(), name


FULL = pytest.mark.full


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=FULL)])
@pytest.mark.parametrize(
    "strategy", ["zero1", *(pytest.param(one, marks=FULL) for one in ("ddp", "zero2", "fsdp"))]
)
def test_gradients_are_the_sums_of_what_was_reached(tmp_path, strategy, dtype):
    for found in ranks.together(tmp_path, _gradients, [0, 1], strategy=strategy, dtype=dtype):
        for gradients in found:
            for (name, one), times in zip(gradients.items(), (1, 3, 1, 0), strict=True):
                assert one.dtype == torch.float32 and (one == 2 * times).all(), name
