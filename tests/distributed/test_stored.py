"""Under strategies that share the weights each rank reads its own part of them: the same losses, less memory."""

import json
import os
import re
import weakref
from pathlib import Path

import pytest
import ranks
import torch

from trainer.model import quantize, stored

pytestmark = pytest.mark.distributed


def whole(config, world) -> bool:
    return False


def two(config, environment, everyone):
    return [torch.device("cpu")] * 2


AS_A_WHOLE = {("trainer.strategies", "reads_weights"): whole}


@pytest.fixture(scope="module")
def weighty(material, tmp_path_factory):
    """run.yaml of a model with weights, in two files, its head tied to its embeddings, and with biases."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("weighty")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(material / "model"))
    model.save_pretrained(folder / "model", max_shard_size="80KB")
    AutoTokenizer.from_pretrained(material / "model").save_pretrained(folder / "model")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    text = (material / "run.yaml").read_text().replace(f"{material}/model", f"{folder}/model")
    (folder / "run.yaml").write_text(text.replace("steps: 12", "steps: 3"))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (3, ["strategy=fsdp"]),
        (2, ["strategy=infinity", "adapter=lora", "dtype=bfloat16"]),
        (
            2,
            [
                "strategy=fsdp",
                "adapter=lora",
                "quantize=4bit",
                "dtype=bfloat16",
                "gradient_checkpointing=true",
            ],
        ),
        pytest.param(2, ["strategy=fsdp", "adapter=lora", "quantize=8bit"], marks=pytest.mark.full),
        (2, ["strategy=fsdp", "adapter=lora", "quantize=8bit", "dtype=bfloat16"]),
        pytest.param(1, ["strategy=offload"], marks=pytest.mark.full),
        pytest.param(2, ["strategy=fsdp", "adapter=lora", "lora_targets=all-linear"], marks=pytest.mark.full),
    ],
)
def test_losses_are_those_of_weights_that_are_read_as_a_whole(weighty, tmp_path, size, chosen):
    expected = ranks.run(tmp_path / "whole", size, weighty, *chosen, patch=AS_A_WHOLE)
    found = ranks.run(tmp_path / "parts", size, weighty, *chosen)
    assert found == expected
    logs = [(tmp_path / name / "node0/logs/rank-0.log").read_text() for name in ("whole", "parts")]
    assert ["reads its own part" in log for log in logs] == [False, True]
    kept = "adapter_model" if "adapter=lora" in chosen else "model"
    results = [(tmp_path / name / "node0/model" / f"{kept}.safetensors") for name in ("whole", "parts")]
    assert results[0].read_bytes() == results[1].read_bytes()


@pytest.fixture(scope="module")
def multimodal(material, tmp_path_factory):
    """run.yaml of a Gemma 3 that could see pictures: its files name a text layer language_model.model.layers.0."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config

    folder = tmp_path_factory.mktemp("multimodal")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **heads}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(3)
    chosen = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    AutoModelForCausalLM.from_config(chosen).save_pretrained(folder / "model", max_shard_size="40KB")
    (first, *_) = sorted((folder / "model").glob("*.safetensors"))
    with safe_open(first, "pt") as file:
        assert all(key.startswith(("language_model.model.", "vision_tower.")) for key in file.keys())  # noqa: SIM118
    AutoTokenizer.from_pretrained(material / "model").save_pretrained(folder / "model")
    text = (material / "run.yaml").read_text().replace(f"{material}/model", f"{folder}/model")
    (folder / "run.yaml").write_text(text.replace("steps: 12", "steps: 3"))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["adapter=lora"], marks=pytest.mark.full),
        ["adapter=lora", "quantize=4bit", "dtype=bfloat16"],
    ],
)
def test_files_that_name_the_weights_as_transformers_once_did(multimodal, tmp_path, chosen):
    """It renames them, and says how."""
    chosen = ["strategy=fsdp", *chosen]
    expected = ranks.run(tmp_path / "whole", 2, multimodal, *chosen, patch=AS_A_WHOLE)
    assert ranks.run(tmp_path / "parts", 2, multimodal, *chosen) == expected
    assert "reads its own part" in (tmp_path / "parts/node0/logs/rank-0.log").read_text()


@pytest.mark.parametrize(
    "chosen",
    [
        ["strategy=zero1", "dtype=bfloat16"],
        ["strategy=zero1", "dtype=bfloat16", "adapter=lora", "lora_targets=all-linear"],
        ["strategy=fsdp"],
        pytest.param(["strategy=ddp"], marks=pytest.mark.full),
        pytest.param(["strategy=fsdp", "adapter=lora"], marks=pytest.mark.full),
    ],
)
def test_what_no_text_reaches_stays_as_it_is(multimodal, tmp_path, chosen):
    """No decay shrinks it, no adapter is for it, and no gradient that it has not is waited for."""
    from safetensors import safe_open

    def weights(folder):
        tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors

    words = ("micro_batch_size=2", "lr=0.01", "weight_decay=0.5", *chosen)
    losses = ranks.run(tmp_path, 2, multimodal, *words)
    assert losses[-1] < losses[0]
    assert (
        "no text reaches stay as they are: model.vision_tower, model.multi_modal_projector"
        in (tmp_path / "node0/logs/rank-0.log").read_text()
    )
    before, after = weights(multimodal.parent / "model"), weights(tmp_path / "node0/model")
    senses = [name for name in after if "vision_tower" in name or "multi_modal" in name]
    if "adapter=lora" in chosen:
        assert after and not senses
        return
    assert senses and set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in senses)
    assert not any(
        torch.equal(after[name], before[name]) for name in after if "q_proj" in name and name not in senses
    )


PACKED = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    # As what FSDP is to share out is made ready elsewhere: scales packed, too, bytes called floats.
    "4bit for FSDP": {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "8bit": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def packed(weighty, tmp_path_factory):
    """`packed(kind)`: run.yaml of the model as bitsandbytes has saved it, in several files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    def save(kind):
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        model = AutoModelForCausalLM.from_pretrained(
            weighty.parent / "model",
            quantization_config=BitsAndBytesConfig(**PACKED[kind]),
            device_map="cpu",
            dtype=torch.float32,
        )
        model.save_pretrained(folder / "model", max_shard_size="20KB")
        assert len(list((folder / "model").glob("*.safetensors"))) > 1
        AutoTokenizer.from_pretrained(weighty.parent / "model").save_pretrained(folder / "model")
        text = weighty.read_text().replace(f"{weighty.parent}/model", f"{folder}/model")
        (folder / "run.yaml").write_text(text)
        return folder / "run.yaml"

    return save


@pytest.mark.parametrize(
    ("kind", "strategy", "size"),
    [
        ("4bit", "fsdp", 2),
        pytest.param("4bit for FSDP", "fsdp", 2, marks=pytest.mark.full),
        ("8bit", "fsdp", 2),
        ("4bit", "split", 1),
        pytest.param("8bit", "split", 1, marks=pytest.mark.full),
        pytest.param("4bit for FSDP", "infinity", 3, marks=pytest.mark.full),
    ],
)
def test_weights_that_are_quantised_on_disk(packed, tmp_path, kind, strategy, size):
    chosen = [f"strategy={strategy}", "adapter=lora", "lora_targets=all-linear", "lr=0.01"]
    config, patch = packed(kind), {("trainer.world", "_devices"): two} if strategy == "split" else {}
    expected = ranks.run(tmp_path / "whole", size, config, *chosen, patch=AS_A_WHOLE | patch)
    found = ranks.run(tmp_path / "parts", size, config, *chosen, patch=patch)
    assert found == expected and found[-1] != found[0]
    counts = [
        json.loads((tmp_path / name / "node0/summary.json").read_text())["parameters"]
        for name in ("whole", "parts")
    ]
    assert counts[0] == counts[1] > 37120  # the model's, not its bytes
    logs = [(tmp_path / name / "node0/logs/rank-0.log").read_text() for name in ("whole", "parts")]
    assert [" to where they belong" in log for log in logs] == [False, True]


def routed(kind, material, folder, dtype=torch.float32):
    """run.yaml of a model of that kind, whose routers' corrections bfloat16 would round to one; of files in `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    size = AutoConfig.from_pretrained(material / "model").vocab_size
    more = {
        "max_position_embeddings": 64,
        "moe_k": 1,
        "moe_num_experts": 4,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    }
    torch.manual_seed(3)
    heads = dict.fromkeys(
        ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 8
    )
    sizes = SIZES | EXPERTS | more | heads | {"num_key_value_heads": 2, "vocab_size": size}
    sizes["moe_intermediate_size"] = 16  # in 16 bits experts are multiplied in blocks of eight
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    corrections = [
        one
        for name, one in (*model.named_buffers(), *model.named_parameters())
        if "e_score_correction_bias" in name
    ]
    for one in corrections:
        one.data.copy_(1 + torch.linspace(0, 3e-3, one.numel()).view_as(one))
    assert corrections
    model.to(dtype).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(material / "model").save_pretrained(folder / "model")
    text = (material / "run.yaml").read_text().replace(f"{material}/model", f"{folder}/model")
    (folder / "run.yaml").write_text(text.replace("steps: 12", "steps: 3"))
    return folder / "run.yaml"


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("ernie4_5_moe", marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("split", marks=pytest.mark.full)])
def test_what_stays_in_float32_of_a_model_in_16_bits(material, tmp_path, kind, strategy):
    """Corrections of a router, which send tokens to other experts."""
    dtype = torch.float16 if kind == "ernie4_5_moe" else torch.float32  # finer there than bfloat16
    config = routed(kind, material, tmp_path, dtype)
    chosen = (f"strategy={strategy}", "adapter=lora", "dtype=bfloat16", "lr=0.01", "lora_targets=all-linear")
    number = 1 if strategy == "split" else 2
    devices = {("trainer.world", "_devices"): two} if strategy == "split" else {}
    expected = ranks.run(tmp_path / "whole", number, config, *chosen, patch=AS_A_WHOLE | devices)
    assert ranks.run(tmp_path / "parts", number, config, *chosen, patch=devices) == expected
    log = (tmp_path / "parts/node0/logs/rank-0.log").read_text()
    assert ("reads its own part" if strategy == "fsdp" else " to where they belong") in log


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.full)])
def test_what_a_model_itself_freezes_is_a_part_of_its_checkpoints(material, tmp_path, strategy):
    from safetensors.torch import load_file

    from trainer import cli

    config = routed("ernie4_5_moe", material, tmp_path)
    ranks.run(tmp_path, 2, config, f"strategy={strategy}", "steps=2", "checkpoint_every=2")
    checkpoint = tmp_path / "node0/checkpoints/step-00000002"
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "model", tmp_path / "out"))
    frozen = [name for name in before if "e_score_correction_bias" in name]
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    assert load_file(tmp_path / "node0/model/model.safetensors").keys() == after.keys() == before.keys()


def test_hosts_with_other_weights_are_refused(weighty, material, tmp_path):
    """A bit of the other host's file differs."""
    other = tmp_path / "model"
    other.mkdir()
    for file in (weighty.parent / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    damaged = next(other.glob("model-00001-*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    pair = ranks.Ranks(tmp_path, 2, weighty, "strategy=fsdp", per_rank=[[], [f"model={other}"]])
    assert pair.codes() == [2, 2]
    assert re.search(r"the hosts differ in their weights: \w+ on node0; \w+ on node1", pair.log())


SIZES = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
EXPERTS |= {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3"]
)
def test_rows_are_those_of_the_model(kind, tmp_path):
    """Experts lie one by one on disk, and are one tensor in the model; GPT-2's names are shorter on the hub."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **(EXPERTS if "mi" in kind or "_" in kind else {}))
    model = AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data.add_(1)
    model.save_pretrained(tmp_path)
    if kind == "gpt2":
        path = tmp_path / "model.safetensors"
        tensors = {name.removeprefix("transformer."): one for name, one in load_file(path).items()}
        save_file(tensors, path)
    with stored.weightless():
        empty = AutoModelForCausalLM.from_config(config)
    assert all(one.is_meta for one in empty.parameters()) and not any(one.is_meta for one in empty.buffers())
    found = stored.find(tmp_path, empty)
    for name, parameter in model.named_parameters():
        half = len(parameter) // 2
        for rows in (slice(0, half), slice(half, len(parameter))):
            assert torch.equal(found.read(name, rows), parameter[rows]), name
    kept = model.state_dict()
    for name, buffer in empty.named_buffers():
        assert name not in kept or torch.equal(buffer, kept[name]), name
    if kind in ("mixtral", "qwen3_moe", "deepseek_v3"):
        assert max(len(place) for place in found.places.values()) == 4


def test_files_that_name_or_shape_tensors_otherwise(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    assert stored.find(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for changed in ({f"{name}_T": tensors[name]}, {name: tensors[name].T.contiguous()}):
        others = {key: one for key, one in tensors.items() if key != name}
        save_file({**others, **changed}, tmp_path / "model.safetensors")
        assert stored.find(tmp_path, model) is None


def test_packed_weights_without_their_scales(tmp_path):
    """Those of a layer that was not packed there, or whose files are damaged, are not read as packed ones."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    layer = model.model.layers[0].mlp.up_proj
    assert stored.find(tmp_path, model, [layer.weight]) is None
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.up_proj.SCB": torch.ones(2)}, tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    found = stored.find(tmp_path, model, [layer.weight])
    assert torch.equal(found.read(name, slice(None)), layer.weight)
    assert found.scales_of(name)["SCB"].tolist() == [1, 1] and not found.scales_of(name.replace("up", "down"))


def test_no_rank_ever_holds_the_whole_model(tmp_path):
    """Growth of the resident memory while a model of 200 MB is loaded and shared by two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=64))
    size = sum(one.nbytes for one in model.parameters())
    assert size > 200e6
    model.save_pretrained(tmp_path / "model", max_shard_size="50MB")
    del model
    growth = {}
    for name, in_parts in (("parts", True), ("whole", False)):
        port = ranks.free_port()
        ranks.side_by_side(_load, 2, port, tmp_path, in_parts, seconds=200)
        growth[name] = [int((tmp_path / f"{rank}-{in_parts}").read_text()) / size for rank in range(2)]
    assert max(growth["parts"]) < 0.8, growth  # a half is its own
    assert min(growth["whole"]) > 1, growth


def test_a_quantised_base_is_never_there_whole(tmp_path):
    """Each rank reads one weight at a time, packs it, and keeps its half of the bytes; at most two are ever whole."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    port = ranks.free_port()
    ranks.side_by_side(_load_packed, 2, port, tmp_path, seconds=200)
    packed = 4 * (4 * 128 * 128 + 3 * 128 * 512) // 2  # bytes of four layers' linear weights in 4 bits
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["reads"] >= 4 * 7 and found["alive"] <= 2, found
        assert found["held"] == packed / 2 and not found["whole"], found


def _load_packed(rank: int, port: int, folder: Path) -> None:
    """Build a rank's part of the model in 4 bits; write how many weights were read, were there at once, and stay."""
    from transformers import AutoConfig

    from trainer import strategies
    from trainer.model import load
    from trainer.model.loss import TokenLoss

    keys = {"strategy": "fsdp", "adapter": "lora", "quantize": "4bit", "dtype": "bfloat16"}
    chosen, world = _meet(rank, port, folder, keys)
    read, seen, alive = stored.Stored.read, [], [0]

    def noted(self, name, rows):
        tensor = read(self, name, rows)
        seen.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in seen))
        return tensor

    fill, packed, whole = quantize.fill, [], []

    def filled(*arguments):
        whole.append(sum(one() is not None for one in packed))  # of the blocks before
        found = fill(*arguments)
        packed.extend(map(weakref.ref, found))
        return found

    stored.Stored.read, quantize.fill = noted, filled
    source = load.Source(AutoConfig.from_pretrained(folder / "model"), None, str(folder / "model"), {})
    model = load.build(chosen, source, world, strategies.reads_weights(chosen, world))
    strategy = strategies.make(chosen, TokenLoss(model), world)
    parts = [one.to_local() for one in strategy.model.parameters() if one.dtype == torch.uint8]
    held = sum(one.nbytes for one in parts)
    facts = {"reads": len(seen), "alive": max(alive), "held": held, "whole": max(whole)}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    world.close()


def _meet(rank: int, port: int, folder: Path, keys: dict):
    """(configuration, world) of one of two ranks."""
    from trainer import config, environment
    from trainer.world import World

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TRAINYARD_RUN_DIR=str(folder / f"run{rank}"),
        TRAINYARD_HOST=f"node{rank}",
    )
    torch.set_num_threads(1)
    chosen = config.from_mapping({"device": "cpu", "model": str(folder / "model"), **keys})
    return chosen, World(chosen, environment.read("test"))


def _load(rank: int, port: int, folder: Path, in_parts: bool) -> None:
    """Build a rank's part of the model, and write by how many bytes the memory grew at most."""
    from transformers import AutoConfig

    from trainer import strategies
    from trainer.model import load
    from trainer.model.loss import TokenLoss

    chosen, world = _meet(rank, port, folder, {"strategy": "fsdp"})
    model_config = AutoConfig.from_pretrained(folder / "model")
    source = load.Source(model_config, None, str(folder / "model"), {})
    load.build(chosen, load.Source(_small(model_config), None, None, {}), world)  # its code is loaded
    before = _peak(reset=True)
    model = load.build(chosen, source, world, in_parts)
    strategy = strategies.make(chosen, TokenLoss(model), world)
    (folder / f"{rank}-{in_parts}").write_text(str(_peak() - before))
    held = sum(part.numel() for part in strategy.trainable.values())
    assert 0.4 < held / sum(one.numel() for one in strategy.model.parameters()) < 0.6
    world.close()


def _small(model_config):
    import copy

    small = copy.deepcopy(model_config)
    small.num_hidden_layers, small.hidden_size, small.vocab_size = 1, 64, 64
    return small


def _peak(reset: bool = False) -> int:
    """This process's peak of resident memory, in bytes, since it was last reset; with `reset`, what it has now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.full
def test_a_checkpoint_of_one_goes_on_as_the_other(weighty, tmp_path):
    expected = ranks.run(tmp_path / "whole", 2, weighty, "strategy=fsdp", "checkpoint_every=2")
    ranks.run(
        tmp_path / "first", 2, weighty, "strategy=fsdp", "checkpoint_every=2", stop_in=2, codes=[75, 75]
    )
    found = ranks.run(tmp_path / "first", 1, weighty, "strategy=ddp", "checkpoint_every=2")
    assert found == pytest.approx(expected, rel=1e-5)
    assert {one["world_size"] for one in ranks.records(tmp_path / "first/node0")} == {1, 2}


def scaled_otherwise(*arguments):
    """As another card adds up the mean by which scales are packed: by another order, here by much; and 8 bits round."""
    filled = quantize.fill_really(*arguments)
    if os.environ["RANK"] == "1":
        for weight in filled:
            if hasattr(weight, "quant_state"):
                weight.quant_state.offset.mul_(1.5)
            else:
                weight.SCB.mul_(1.5)
                weight.data.neg_()
    return filled


@pytest.mark.parametrize("bits", ["4bit", pytest.param("8bit", marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("split", marks=pytest.mark.full)])
def test_all_ranks_have_the_scales_of_one(weighty, tmp_path, bits, strategy):
    chosen = [f"strategy={strategy}", "adapter=lora", f"quantize={bits}", "dtype=bfloat16"]
    devices = {("trainer.world", "_devices"): two} if strategy == "split" else {}
    otherwise = {("trainer.model.quantize", "fill"): scaled_otherwise}
    expected = ranks.run(tmp_path / "alike", 2, weighty, *chosen, patch=devices)
    assert ranks.run(tmp_path / "otherwise", 2, weighty, *chosen, patch=devices | otherwise) == expected
    logs = [(tmp_path / name / "node0/logs/rank-0.log").read_text() for name in ("alike", "otherwise")]
    assert [text.count("differ from rank 0's") for text in logs] == [0, 1]
