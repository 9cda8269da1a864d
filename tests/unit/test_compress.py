"""What lossy ways hold and how long they code, of one of two hosts whose other one has the same gradients."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from trainer import compress
from trainer import config as configuration
from trainer.model import footprint, load
from trainer.model.loss import TokenLoss
from trainer.plan import memory
from trainer.plan.resources import Place
from trainer.strategies import compressed, ddp
from trainer.world import Circle

MODEL = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4
)
CPU = torch.device("cpu")
SENDING = 0.2  # seconds that a message takes


@pytest.fixture
def world(monkeypatch):
    def exchange(came, parts, group):
        time.sleep(SENDING)
        came.copy_(parts)

    monkeypatch.setattr(compress, "exchange", exchange)
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda out, mine, group: out.view(2, -1).copy_(mine.expand(2, -1))
    )
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: None)
    circles = Circle([0], 0, None, CPU), Circle([0, 1], 0, None, CPU)
    return SimpleNamespace(
        rank=0, size=2, alike=True, device=CPU, training=None, layers=lambda: None, circles=lambda: circles
    )


@pytest.mark.parametrize("comm", ["16bit", "8bit", "powersgd"])
def test_plan_counts_what_a_way_holds_and_what_it_needs_while_it_codes(monkeypatch, world, comm):
    monkeypatch.setattr(compress, "exchange", lambda came, parts, group: came.copy_(parts))
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(memory.ways, "BUCKET_BYTES", 1 << 20)
    config = configuration.from_mapping({"comm": comm, "sequence_length": 16, "micro_batch_size": 1})
    model = load.unloaded(config, MODEL).float()
    with footprint.Tracker(model) as tracker:
        strategy = compressed.Compressed(TokenLoss(model, config.loss_chunk), world, config)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad.normal_()
            strategy.finish()
            strategy.stepped(1, last=False)
            held = tracker.now
    found = footprint.measure(config, MODEL)
    there = Place(2, 2, 1, CPU, 0, 0, 1e9)
    lines = memory.budget("ddp", config, found, there, 0).device
    assert lines["left over"] == pytest.approx(held - found.gradients, rel=0.1)
    most = sum(lines[name] for name in ("left over", "compression", "activations", "loss and backward"))
    assert most == pytest.approx(tracker.peak - found.gradients, rel=0.15)
    # Where backward needs more than that, coding finds room when it is over.
    many = dataclasses.replace(found, activations=1 << 40)
    assert memory.budget("ddp", config, many, there, 0).device["compression"] == 0


@pytest.mark.parametrize("comm", ["8bit", "powersgd"])
def test_sending_is_not_counted_as_compression(world, comm):
    config = configuration.from_mapping({"comm": comm})
    model = torch.nn.Module()
    model.model = torch.nn.Linear(64, 64, bias=False)
    strategy = compressed.Compressed(model, world, config)
    strategy.model.weight.grad.normal_()
    begin = time.perf_counter()
    strategy.finish()
    took = time.perf_counter() - begin
    assert 0 < strategy.compression_seconds() <= took - SENDING
    assert strategy.compression_seconds() == 0


def test_what_a_checkpoint_sends_is_known_before_a_step_counts_it(world):
    config = configuration.from_mapping({"comm": "8bit"})
    model = torch.nn.Module()
    model.model = torch.nn.Linear(64, 64, bias=False)
    strategy = compressed.Compressed(model, world, config)
    strategy.finish()
    strategy.stepped(1, last=False)
    before = strategy.wire_bytes
    assert strategy.uncounted_bytes == 0
    list(strategy.kept())
    assert strategy.uncounted_bytes == 4 * 64 * 64  # of two hosts: all that is left over, once
    strategy.finish()
    strategy.stepped(1, last=False)
    assert strategy.uncounted_bytes == 0 and strategy.wire_bytes == before + 4 * 64 * 64


def test_columns_of_which_nothing_was_left_find_what_comes_later(world):
    chance = torch.Generator().manual_seed(0)
    later = torch.randn(64, 3, generator=chance) @ torch.randn(3, 96, generator=chance)
    alone = Circle([0], 0, None, CPU)
    factors = compress.Factors([later], 3, world, circles=(alone, alone))
    for gradient in (torch.zeros_like(later), *[later] * 4):
        came = gradient.clone()
        factors([came])
        assert torch.equal(came, gradient) or gradient is later
        factors.commit()
    assert (came - later).norm() < 0.05 * later.norm()


def test_experts_of_a_stack_do_not_share_their_whole_matrices(world):
    """As transformers has them, (experts, out, in): as rows of one matrix, all but their sizes would be alike."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 96, generator=chance)  # that all tokens' are made of
    stack = torch.stack([torch.randn(64, 4, generator=chance) @ inputs for _ in range(8)])
    assert compress.columns(stack.shape, 0) == compress.columns((8 * 64, 96), 0) > 4
    assert compress.factor_bytes([stack], 5) == compress.factor_bytes([stack.reshape(-1, 96)], 5)
    alone = Circle([0], 0, None, CPU)
    factors = compress.Factors([stack], 5, world, circles=(alone, alone))
    for _ in range(3):
        came = stack.clone()
        factors([came])
    assert (came - stack).norm() < 0.01 * stack.norm()
