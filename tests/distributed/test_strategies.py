"""Every strategy on models of many kinds: in one pair of ranks, one after the other, each against ddp."""

import os

import pytest
import ranks

pytestmark = pytest.mark.distributed

STEPS, TOKENS = 3, 64  # of 4 sequences; three on the first rank, one on the second


def test_models_of_many_kinds(tmp_path):
    port = ranks.free_port()
    ranks.side_by_side(_all_kinds, 2, port, tmp_path)


def _all_kinds(rank, port, folder):
    import torch

    from trainer import config, environment
    from trainer.world import World

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TRAINYARD_RUN_DIR=str(folder / str(rank)),
        TRAINYARD_HOST=f"node{rank}",
    )
    torch.set_num_threads(1)
    world = World(config.from_mapping({"device": "cpu"}), environment.read("test"))
    for name, (make, settings, exact) in KINDS.items():
        expected = None
        for strategy in ("ddp", "zero1", "zero2", "fsdp", "infinity"):
            if strategy == "infinity" and settings.get("optimizer"):
                continue
            found = _curve(world, make, {**settings, "strategy": strategy})
            expected = expected or found
            message = f"{name}, {strategy}: {found} and not {expected}"
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5 if exact else 1e-2), message
            if exact:
                assert found["norm"] == pytest.approx(expected["norm"], rel=1e-2), message
            frozen_travels = strategy in ("fsdp", "infinity")
            if name == "lora" and not frozen_travels:
                assert found["wire"] <= 3 * expected["wire"], message
    world.close()


def _curve(world, make, settings):
    """Losses, the last gradient's norm and the bytes on the wire of some steps, by a loop as plain as can be."""
    import torch

    from trainer import config, optim, strategies
    from trainer.data.pack import IGNORE
    from trainer.model.loss import TokenLoss

    torch.manual_seed(0)
    chosen = config.from_mapping({"device": "cpu", **settings})
    strategy = strategies.make(chosen, TokenLoss(make().train(), chunk=16), world)
    optimizer = optim.adamw(strategy.trainable, chosen)
    strategy.adopt(optimizer)
    chance = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(0, 97, (4, 17), generator=chance)
        mine = [batch[:2], batch[2:3]] if world.rank == 0 else [batch[3:]]
        if strategy.lockstep and world.rank == 1:
            mine.append(None)
        total = torch.zeros(1, dtype=torch.float64)
        strategy.zero_grad()
        for number, tokens in enumerate(mine, 1):
            counts = tokens is not None
            tokens = tokens if counts else batch[:1]
            labels = tokens[:, 1:] if counts else torch.full_like(tokens[:, 1:], IGNORE)
            positions = torch.arange(16).expand(len(tokens), -1)
            with strategy.micro_batch(last=number == len(mine)):
                with torch.autocast("cpu", torch.bfloat16, enabled=chosen.dtype == "bfloat16"):
                    loss = strategy.module(tokens[:, :-1], labels, positions) / TOKENS
                loss.backward()
            total += loss.detach()
        strategy.finish()
        norm = strategy.clip(0.5)
        losses.append(strategy.sum(total).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    if settings["strategy"] == "infinity":
        _lies_in_files(strategy, optimizer, world.environment.run_dir / "offload")
    if "8bit" in chosen.optimizer:
        kinds = {one.dtype for state in optimizer.state.values() for one in map(_local, state.values())}
        assert torch.uint8 in kinds, kinds
    return {"losses": losses, "norm": norm, "wire": strategy.wire_bytes}


def _lies_in_files(strategy, optimizer, folder):
    """A rank's parts of weights and moments, in files in that directory that nobody else can find."""
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if f"{folder}/rank-{strategy.world.rank}-" in line]
    assert len(mapped) > 1 and all(line.endswith("(deleted)\n") for line in mapped)
    assert not list(folder.iterdir())
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    state = [one for part in optimizer.state.values() for name, one in part.items() if name != "step"]
    weights = [one.to_local() for one in strategy.parameters().values() if hasattr(one, "to_local")]
    assert len(state) == 2 * len(strategy.trainable) and len(weights) >= len(strategy.trainable)
    for one in (*strategy.trainable.values(), *state, *weights):
        assert any(begin <= one.data_ptr() < end for begin, end in spans) or not one.numel()


def _local(value):
    """A rank's part of what is sharded; of numbers a tensor, too."""
    import torch

    return value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)


def _llama(**settings):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**sizes, **heads, **settings}))


def _wide():
    """bitsandbytes has moments of 8 bits from 4,096 values on, and scales of 256: so many are in each rank's parts."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 128)
    return _llama(**sizes, num_key_value_heads=2)


def _recomputing():
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _experts():
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, num_local_experts=4))


def _adapter(model=None, frozen=None):
    from peft import LoraConfig, get_peft_model

    targets = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model((model or _recomputing()).to(frozen), targets)


def _quantised():
    """A head stays whole, the layers are in 4 bits."""
    import bitsandbytes as bnb
    import torch.nn as nn

    model = _llama()
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    packed = bnb.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, quant_type="nf4"
                    )
                    packed.weight = bnb.nn.Params4bit(
                        linear.weight.data, requires_grad=False, quant_type="nf4", module=packed
                    )
                    setattr(part, name, packed.to("cpu"))
    return _adapter(model)


def _mixed():
    import torch

    return _adapter(_llama(), torch.bfloat16)


KINDS = {  # name: (model, settings, whether float32 throughout)
    "untied": (_llama, {}, True),
    "tied": (lambda: _llama(tie_word_embeddings=True), {}, True),
    "gradient checkpointing": (_recomputing, {}, True),
    "mixture of experts": (_experts, {}, True),
    "lora": (_adapter, {}, True),
    "4 bits": (_quantised, {}, True),
    "8-bit optimizer": (_wide, {"optimizer": "adamw_8bit"}, True),
    "bfloat16": (_llama, {"dtype": "bfloat16"}, False),
    "lora on bfloat16": (_mixed, {"dtype": "bfloat16"}, False),
}
