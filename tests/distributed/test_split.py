"""Layers split over several devices: the losses of one, checkpoints for everybody, and what is counted and refused.

There is no GPU here. Runs have the CPU for two or three devices, so that all but the moving itself is as on GPUs; that
the tensors are moved, a pass with tensors that have a device and no data shows.
"""

import dataclasses
import json

import pytest
import ranks
import torch
from torch.utils._pytree import tree_map_only

from trainer import cli
from trainer.config import check_together, from_mapping
from trainer.errors import BadInput
from trainer.model.footprint import Footprint
from trainer.plan import memory, proposal, resources
from trainer.plan.resources import Place
from trainer.strategies import split

pytestmark = pytest.mark.distributed


def two(config, environment, everyone):
    return [torch.device("cpu")] * 2


def three_on_the_first(config, environment, everyone):
    return [torch.device("cpu")] * (1 if environment.rank else 3)


TWO = {("trainer.world", "_devices"): two}
THREE = {("trainer.world", "_devices"): three_on_the_first}


@pytest.mark.parametrize(
    ("size", "devices", "chosen"),
    [
        (1, TWO, ["micro_batch_size=3"]),
        (2, THREE, ["gradient_checkpointing=true"]),
        pytest.param(3, TWO, [], marks=pytest.mark.full),
    ],
)
def test_the_losses_are_those_of_one_device(material, whole, tmp_path, size, devices, chosen):
    """On any number of hosts, of which some may have one device alone."""
    found = ranks.run(tmp_path, size, material / "run.yaml", "strategy=split", *chosen, patch=devices)
    assert found == pytest.approx(whole, rel=1e-5)
    assert "layers on cpu, cpu" in (tmp_path / "node0/logs/rank-0.log").read_text()
    record = ranks.records(tmp_path / "node0")[0]
    assert record["wire_bytes"] == 2 * 4 * 37120 * (size - 1) // size


@pytest.fixture(scope="module")
def weighty(material, tmp_path_factory):
    """run.yaml of a model with weights, its head tied to its embeddings."""
    folder = tmp_path_factory.mktemp("weighty")
    ranks.run(folder, 1, material / "run.yaml", "steps=2")
    text = (material / "run.yaml").read_text().replace(f"{material}/model", f"{folder}/node0/model")
    (folder / "run.yaml").write_text(text.replace("steps: 12", "steps: 6"))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    "chosen",
    [
        ["adapter=lora", "lora_dropout=0.2"],
        pytest.param(["adapter=lora", "quantize=4bit", "dtype=bfloat16"], marks=pytest.mark.full),
        pytest.param(["adapter=lora", "quantize=8bit"], marks=pytest.mark.full),
        pytest.param(["optimizer=adamw_8bit"], marks=pytest.mark.full),
    ],
)
def test_weights_come_from_the_disk_and_a_run_goes_on_by_another_strategy(weighty, tmp_path, chosen):
    """Weights are read to where they belong; a checkpoint of split goes on under ddp, and one of ddp under split."""
    expected = ranks.run(tmp_path / "ddp", 1, weighty, *chosen)
    extra = (*chosen, "checkpoint_every=2")
    near = 1e-2 if "dtype=bfloat16" in chosen or "optimizer=adamw_8bit" in chosen else 1e-5
    ranks.run(tmp_path / "first", 1, weighty, *extra, "strategy=split", patch=TWO, stop_in=2, codes=[75])
    ranks.run(tmp_path / "first", 1, weighty, *extra, stop_in=4, codes=[75])
    found = ranks.run(tmp_path / "first", 1, weighty, *extra, "strategy=split", patch=TWO)
    assert found == pytest.approx(expected, rel=near)
    assert "reads the weights to where they belong" in (tmp_path / "first/node0/logs/rank-0.log").read_text()


def test_a_resumed_run_is_equal_to_the_last_bit(material, tmp_path):
    extra = ("strategy=split", "steps=6", "checkpoint_every=3")
    straight = ranks.run(tmp_path / "whole", 1, material / "run.yaml", *extra, patch=TWO)
    ranks.run(tmp_path / "cut", 1, material / "run.yaml", *extra, patch=TWO, stop_in=3, codes=[75])
    assert ranks.run(tmp_path / "cut", 1, material / "run.yaml", *extra, patch=TWO) == straight


def test_without_several_devices_it_is_refused(material, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", "strategy=split", codes=[2, 2])
    assert (
        "no rank has more than one here; set strategy to another"
        in ranks.status(tmp_path / "node0")["reason"]
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"compile": True}, "compile: strategy split .* set compile to false"),
        ({"attention": "flex_attention"}, "attention: flex_attention's masks stay on one GPU"),
        ({"comm": "8bit"}, "comm: 8bit works with strategy ddp, found split"),
    ],
)
def test_what_does_not_go_together_is_refused(keys, words):
    with pytest.raises(BadInput, match=words):
        check_together(from_mapping({"strategy": "split", **keys}))


@pytest.mark.parametrize(
    ("sizes", "outside", "room", "expected"),
    [
        ([1] * 8, 0, [1, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([1] * 8, 4, [1, 1], [0, 0, 1, 1, 1, 1, 1, 1]),  # 2 layers beside what is no layer, and 6
        ([1] * 8, 0, [3, 1], [0, 0, 0, 0, 0, 0, 1, 1]),
        ([1] * 4, 0, [24, 12, 12], [0, 0, 1, 2]),
        ([4, 1, 1, 1, 1], 0, [1, 1], [0, 1, 1, 1, 1]),
        ([1, 1], 100, [1, 1], [1, 1]),  # the first has enough to hold
        ([1, 1], 0, [0, 0], [0, 1]),
        ([1] * 3, 0, [5], [0, 0, 0]),
    ],
)
def test_layers_lie_where_there_is_room(sizes, outside, room, expected):
    assert split.places(sizes, outside, room) == expected


def _small(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    if kind == "gpt2":
        sizes, heads = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 96}, {}
    if (
        kind == "gemma4_text"
    ):  # its last two layers take keys and values of the second, and of the one before it
        sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
        sizes |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
    config = AutoConfig.for_model(kind, **sizes, **heads, eos_token_id=1, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("connected", [True, False])
def test_the_tensors_of_a_pass_are_moved(kind, connected, monkeypatch):
    """The second of two devices is `meta`, which has no data: what comes back from it is zeros here.

    No operation takes tensors of both, so that a layer's states, positions and mask must all have come to it.
    """
    from trainer.model.loss import TokenLoss

    moved = split.moved
    devices = [torch.device("cpu"), torch.device("meta")]

    def with_zeros(value, device):
        if device.type == "cpu":
            value = tree_map_only(torch.Tensor, lambda one: torch.zeros(one.shape, dtype=one.dtype), value)
        return moved(value, device)

    monkeypatch.setattr(split, "moved", with_zeros)
    monkeypatch.setattr(split, "places", lambda sizes, outside, room: [0, 1, 1, 1])
    if not connected:
        monkeypatch.setattr(split.Split, "_connect", lambda self: None)
    world = type(
        "World", (), {"devices": devices, "device": devices[0], "size": 1, "rank": 0, "alike": True}
    )()
    strategy = split.Split(TokenLoss(_small(kind), chunk=16), world, from_mapping({"strategy": "split"}))
    held = [{one.device.type for one in layer.parameters()} for layer, _ in strategy.layers]
    assert held == [{"cpu"}, {"meta"}, {"meta"}, {"meta"}]
    ids = torch.zeros(2, 24, dtype=torch.long)
    positions = torch.arange(24).remainder(10).expand(2, 24)
    with torch.no_grad():
        if connected:
            assert strategy.module(ids, ids, positions).isfinite()
        else:
            with pytest.raises((RuntimeError, NotImplementedError), match=r"device|meta"):
                strategy.module(ids, ids, positions)


# ---- the plan ----


def place(*cards: int, host: int = 1 << 40, nodes: int = 1) -> Place:
    """Hosts whose GPUs have so many MiB each, a rank a GPU under other strategies."""
    room = tuple(one << 20 for one in cards)
    return Place(len(cards) * nodes, nodes, len(cards), torch.device("cuda"), room[0], host, 1e9, cards=room)


def model(layers: int, mib: int) -> Footprint:
    """What an adapter is trained beside: so many layers of so many MiB, quantised, so that fsdp does not share them."""
    found = Footprint(
        **{field.name: 0 for field in dataclasses.fields(Footprint)} | {"tensors": (), "trained": ()}
    )
    return dataclasses.replace(
        found, weights=layers * mib << 20, layers=((mib << 20, 0),) * layers, activations=layers << 20
    )


def proposed(found: Footprint, there: Place) -> str | None:
    config = from_mapping({"adapter": "lora", "quantize": "8bit"})
    budgets = {name: memory.budget(name, config, found, there, 0) for name in memory.ORDER}
    budgets["split"] = memory.split_budget(config, found, there, 0)
    return proposal.propose(budgets, there)


def test_it_is_planned_where_nothing_else_fits():
    """600 MiB of each GPU are CUDA's; 20 layers of 500 MiB fit one of 12,000, three of 4,500, and no two of these."""
    found = model(20, 500)
    assert proposed(found, place(12000, 12000)) == "ddp"
    assert proposed(found, place(4500, 4500, 4500)) == "split"
    assert proposed(found, place(4500, 4500)) is None


def test_every_card_is_counted():
    there = place(8000, 4000, nodes=2)
    budget = memory.split_budget(from_mapping({"adapter": "lora"}), model(12, 500), there, 7)
    assert [card["weights"] >> 20 for card in budget.cards] == [4000, 2000]
    assert [card["activations"] >> 20 for card in budget.cards] == [8, 4]
    assert all(card["overhead"] == memory.CONTEXT for card in budget.cards) and budget.host["overhead"] == 7
    assert budget.fits(there) and not budget.fits(place(8000, 2000, nodes=2))
    assert budget.device == budget.cards[1]  # 4,608 of 8,000 MiB, and 2,604 of 4,000
    trained = dataclasses.replace(model(12, 500), trainable=12, gradients=48, layers=((500 << 20, 1),) * 12)
    budget = memory.split_budget(from_mapping({}), trained, there, 0)
    assert [(card["gradients"], card["optimizer"]) for card in budget.cards] == [(32, 64), (16, 32)]
    assert budget.wire_bytes == 48


def test_the_plan_s_text_has_a_table_for_each_card(material, capsys, monkeypatch):
    monkeypatch.setattr(resources, "_cards", lambda device: [1 << 30, 2 << 30])
    assert cli.main(["plan", str(material / "run.yaml"), "strategy=split"]) == 0
    out = capsys.readouterr().out
    assert "of 1,024 MiB of the GPU 0: fits" in out and "of 2,048 MiB of the GPU 1: fits" in out
    assert cli.main(["plan", str(material / "run.yaml"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["strategies"]["split"]["cards"]) == 2 and answer["proposed"] == "ddp"
    monkeypatch.setattr(resources, "_cards", lambda device: [])
    assert cli.main(["plan", str(material / "run.yaml"), "strategy=split"]) == 2
    assert "no rank has more than one" in capsys.readouterr().err
