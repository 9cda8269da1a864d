"""After a run: its model and adapter go to plain transformers and peft, merged or not, and speak."""

import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from ranks import run, status
from safetensors.torch import load_file, save_file

from trainer import cli
from trainer.config import from_mapping
from trainer.data import tokenizer as own_tokenizer
from trainer.model import saved

LORA = ("adapter=lora", "lora_rank=4", "lr=0.05")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small Llama with a tokenizer, a chat template, and a dropout in its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "base"
    tokenizer = own_tokenizer.wrap(own_tokenizer.train(from_mapping({"vocab_size": 300})))
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE}
    torch.manual_seed(1)
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=96,
            bos_token_id=end,
            eos_token_id=end,
            attention_dropout=0.1,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """Run directories by what was trained: all weights, an adapter, one beside 4 bits, one beside random weights."""
    root = tmp_path_factory.mktemp("runs")
    config = root / "run.yaml"
    config.write_text(
        "sequence_length: 32\nbatch_size: 2\nsteps: 3\nmax_samples: 40\nthreads: 1\nlr: 0.01\nvocab_size: 300\n"
    )
    wanted = {
        "full": [f"model={base}"],
        "lora": [f"model={base}", *LORA],
        "4bit": [f"model={base}", *LORA, "quantize=4bit"],
        "tiny": [*LORA],
    }
    for name, overrides in wanted.items():
        run(root / name, 1, config, *overrides)
    return {name: root / name / "node0" for name in wanted}


@pytest.fixture(scope="module")
def exported(runs, base, tmp_path_factory):
    """What `trainer export` makes of the runs, by name."""
    root = tmp_path_factory.mktemp("exported")
    wanted = {
        "adapter": [runs["lora"]],
        "named": [runs["lora"], "--base", "org/name"],
        "merged": [runs["lora"] / "checkpoints/step-00000003", "--merge"],
        "4bit": [runs["4bit"], "--merge"],
        "full": [runs["full"], "--dtype", "bfloat16"],
        "tiny": [runs["tiny"], "--merge"],
        "tiny16": [runs["tiny"], "--merge", "--dtype", "bfloat16"],
    }
    for name, (directory, *options) in wanted.items():
        assert cli.main(["export", str(directory), str(root / name), *options]) == 0
    assert sorted(path.name for path in root.iterdir()) == sorted(wanted)  # nothing temporary is left
    return {name: root / name for name in wanted}


PLAIN = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
logits = {}
for name, (directory, base) in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(base or directory, dtype=torch.float32)
    if base:
        model = PeftModel.from_pretrained(model, directory)
    AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits[name] = model.eval()(torch.arange(8)[None]).logits[0, -1].tolist()
assert not any(name.split(".")[0] == "trainer" for name in sys.modules)
print("\\n" + json.dumps(logits))
"""


@pytest.fixture(scope="module")
def logits(exported, runs, base):
    """The logits of each in a Python without this project's packages."""
    wanted = {name: (str(path), None) for name, path in exported.items() if name != "named"}
    wanted |= {"adapter": (str(exported["adapter"]), str(base)), "base": (str(base), None)}
    wanted["full, from the run"] = (str(runs["full"] / "model"), None)
    command = [sys.executable, "-I", "-c", PLAIN, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_adapter_and_its_merged_model_are_alike_in_plain_peft_and_transformers(exported, logits, base):
    assert logits["merged"] == pytest.approx(logits["adapter"], abs=1e-4)
    moved = [abs(a - b) for a, b in zip(logits["base"], logits["adapter"], strict=True)]
    assert max(moved) > 0.01  # it has learnt something
    adapter, merged = exported["adapter"], exported["merged"]
    assert json.loads((merged / "config.json").read_text())["attention_dropout"] == 0.1
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    card = (adapter / "README.md").read_text()
    assert "library_name: peft" in card and "rank 4" in card and "| 3 | " in card
    named = exported["named"]
    assert "base_model: org/name" in (named / "README.md").read_text() and str(base) not in (
        (named / "README.md").read_text() + (named / "adapter_config.json").read_text()
    )
    assert (named / "additional_chat_templates/tool_use.jinja").is_file()
    assert "merged into these weights, in float32." in (merged / "README.md").read_text()
    assert "merged into these weights, in bfloat16." in (exported["tiny16"] / "README.md").read_text()


def test_a_whole_model_goes_out_with_its_makers_dropout(exported, runs, logits):
    out = exported["full"]
    for folder in (out, runs["full"] / "model", runs["full"] / "checkpoints/step-00000003"):
        assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.1
    weights = load_file(out / "model.safetensors")
    assert {one.dtype for one in weights.values()} == {torch.bfloat16}
    assert logits["full"] == pytest.approx(logits["full, from the run"], abs=0.05)
    assert "All weights trained" in (runs["full"] / "model/README.md").read_text()


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "fsdp")])
def test_what_is_no_parameter_goes_out_too(base, tmp_path, size, strategy):
    """GLM's routers choose by a bias that no gradient moves, and that a model without it would choose otherwise by."""
    from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **sizes, **experts, num_key_value_heads=1, head_dim=16, first_k_dense_replace=1, vocab_size=300
        )
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([3.0, -3.0, 2.0, -2.0]))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "model")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tmp_path}/model\nsequence_length: 32\nbatch_size: 2\nsteps: 1\nmax_samples: 40\nthreads: 1\n"
    )
    run(tmp_path / "run", size, config, f"strategy={strategy}")
    for node in range(size):
        weights = load_file(tmp_path / f"run/node{node}/model/model.safetensors")
        assert weights[name].tolist() == [3, -3, 2, -2]


def test_an_adapter_beside_four_bits_is_merged_into_whole_weights(exported, base):
    out = exported["4bit"]
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("_proj" in name for name in changed)  # all else is as precise as it was
    assert "held in 4 bits" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("gpt2", 4),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("llama", 4), ("llama", 8), ("gpt2", 8))),
    ],
)
def test_an_adapter_beside_a_base_that_lies_in_few_bits_is_merged_into_whole_weights(
    base, tmp_path, kind, bits
):
    """As published, ready to train on: transformers makes it whole, and leaves it in a form that it cannot write."""
    from peft import PeftModel
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        GPT2Config,
        GPT2LMHeadModel,
    )

    whole, packed = base, tmp_path / "packed"
    tokenizer = AutoTokenizer.from_pretrained(base)
    if kind == "gpt2":
        whole, end = tmp_path / "whole", tokenizer.eos_token_id
        sizes = {"n_positions": 96, "n_embd": 32, "n_layer": 1, "n_head": 2}
        config = GPT2Config(vocab_size=len(tokenizer), **sizes, bos_token_id=end, eos_token_id=end)
        GPT2LMHeadModel(config).save_pretrained(whole)
    settings = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    AutoModelForCausalLM.from_pretrained(whole, quantization_config=settings).save_pretrained(packed)
    tokenizer.save_pretrained(packed)
    config = tmp_path / "run.yaml"
    config.write_text("sequence_length: 32\nbatch_size: 2\nsteps: 3\nmax_samples: 40\nthreads: 1\nlr: 0.01\n")
    run(tmp_path / "run", 1, config, f"model={packed}", *LORA)
    adapter, out = tmp_path / "run/node0", tmp_path / "out"
    assert cli.main(["export", str(adapter), str(out), "--merge"]) == 0
    assert not (json.loads((out / "config.json").read_text())).get("quantization_config")
    assert load_file(out / "model.safetensors").keys() == load_file(whole / "model.safetensors").keys()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(ids).logits
        beside = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32).dequantize()
        plain = beside.eval()(ids).logits
        beside = PeftModel.from_pretrained(beside, adapter / "model").eval()(ids).logits
    assert torch.allclose(merged, beside, atol=0.02) and not torch.allclose(merged, plain, atol=0.1)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.full)])
def test_weights_in_few_bits_are_read_on_the_cpu(base, tmp_path, monkeypatch, bits):
    """Left to transformers they go to the first GPU, where a run may need the memory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers.quantizers import quantizer_bnb_4bit, quantizer_bnb_8bit

    from trainer.model import saved

    settings = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=settings).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    kind = quantizer_bnb_4bit.Bnb4BitHfQuantizer if bits == 4 else quantizer_bnb_8bit.Bnb8BitHfQuantizer
    really, given = kind.update_device_map, []
    monkeypatch.setattr(
        kind, "update_device_map", lambda self, where: given.append(where) or really(self, where)
    )
    model, _ = saved.open_model(saved.find(tmp_path))
    assert given == [{"": "cpu"}] and not hasattr(model, "hf_device_map")


def test_a_base_of_random_weights_is_made_again(runs, exported, logits):
    from trainer.model import saved

    kinds = {one.dtype for one in load_file(exported["tiny16"] / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    assert logits["tiny16"] == pytest.approx(logits["tiny"], abs=0.05)
    beside, _ = saved.open_model(saved.find(runs["tiny"]))
    with torch.no_grad():
        assert logits["tiny"] == pytest.approx(beside(torch.arange(8)[None]).logits[0, -1].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_generate_speaks(runs, capsys, name):
    asked = ["--prompt", "Captain", "--max-new-tokens", "8", "--temperature", "0"]
    texts = []
    for directory in (runs[name], runs[name] / "checkpoints/step-00000003"):
        assert cli.main(["generate", str(directory), *asked]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("Captain") and len(texts[0]) > len("Captain\n")
    assert texts[0] == texts[1]
    assert cli.main(["generate", str(runs[name]), "--chat", *asked]) == 0
    assert not capsys.readouterr().out.startswith(("Captain", "<user>"))  # the answer alone


def test_text_is_printed_as_it_comes(runs, capsys, monkeypatch):
    """Between the passes of the model more and more has been printed; a word waits for its end, nothing else does."""
    from trainer.model import saved

    really, before = saved.open_model, []

    def opened(*args, **options):
        model, tokenizer = really(*args, **options)
        model.register_forward_pre_hook(
            lambda *_: before.append("".join(before[-1:]) + capsys.readouterr().out)
        )
        return model, tokenizer

    monkeypatch.setattr(saved, "open_model", opened)
    asked = ["--prompt", "Captain", "--max-new-tokens", "40", "--seed", "3"]
    assert cli.main(["generate", str(runs["full"]), *asked]) == 0
    text = "".join(before[-1:]) + capsys.readouterr().out
    assert len(before) == 40 and text.startswith("Captain")
    assert all(text.startswith(one) for one in before)
    assert len(set(before)) > 4 and 0 < len(before[20]) < len(text)


def test_a_conversation_is_remembered_as_far_as_there_is_room(runs, capsys, monkeypatch):
    from trainer.commands import generate

    seen = []
    really = generate._answer
    monkeypatch.setattr(
        generate,
        "_answer",
        lambda *args: (seen.append([one["content"] for one in args[2]]), really(*args))[1],
    )
    # A turn is 20 tokens or more and the model has 96 positions, so that the oldest are forgotten.
    lines = ["who is Anne", "", "and the captain", *["where is the house"] * 4]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["generate", str(runs["full"]), "--chat", "--max-new-tokens", "4"]) == 0
    assert [len(one) for one in seen[:2]] == [1, 3]
    assert seen[1][0] == "who is Anne" and seen[1][2] == "and the captain"
    assert seen[-1][0] != "who is Anne" and len(seen) == 6


OWN_CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
"""
OWN_CODE = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_its_own_code(base, tmp_path, capsys):
    """It is run only where that is asked for; what was trained has the code beside it, and speaks."""
    own = tmp_path / "own"
    shutil.copytree(base, own)
    content = json.loads((own / "config.json").read_text())
    places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    changed = {**content, "model_type": "own", "architectures": ["OwnModel"], "auto_map": places}
    (own / "config.json").write_text(json.dumps(changed))
    (own / "modeling_own.py").write_text(OWN_CODE)
    (own / "configuration_own.py").write_text(OWN_CONFIGURATION)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {own}\nsequence_length: 32\nbatch_size: 2\nsteps: 1\nmax_samples: 40\nthreads: 1\n"
    )
    modules = {("transformers.dynamic_module_utils", "HF_MODULES_CACHE"): str(tmp_path / "modules")}
    run(tmp_path / "not", 1, config, patch=modules, codes=[2])
    log = (tmp_path / "not/node0/logs/rank-0.log").read_text()
    assert "brings its own Python code: if you trust it, set trust_remote_code to true" in log
    assert not (tmp_path / "modules").exists()
    run(tmp_path / "asked", 1, config, "trust_remote_code=true", patch=modules)
    model = tmp_path / "asked/node0/model"
    assert (model / "modeling_own.py").read_text() == OWN_CODE
    # That the run trusted it is what its directory says, which may have come from anywhere.
    speak = ["generate", tmp_path / "asked/node0", "--prompt", "Captain", "--max-new-tokens", "2"]
    write = ["export", tmp_path / "asked/node0", tmp_path / "out"]
    earlier = ["export", tmp_path / "asked/node0/checkpoints/step-00000001", tmp_path / "of-checkpoint"]
    told = []
    for command in (speak, write, earlier):
        assert "brings its own Python code: if you trust it, add --code" in refused(capsys, *command)
        assert cli.main([str(one) for one in (*command, "--code")]) == 0
        told.append(capsys.readouterr().out)
    assert told[0].startswith("Captain")
    for out in ("out", "of-checkpoint"):
        assert (tmp_path / out / "modeling_own.py").read_text() == OWN_CODE


def test_what_could_not_be_written_at_a_later_end_is_not_taken_for_it(tmp_path, capsys):
    """A run that went on beyond its end has its checkpoint, then, and no model of the end before."""
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny\nsequence_length: 32\nbatch_size: 2\nmax_samples: 40\nthreads: 1\n")
    run(tmp_path / "run", 1, config, "steps=1")
    where = tmp_path / "run/node0"
    assert saved.find(where).path == where / "model"
    fails = {("trainer.model.card", "write"): None}
    run(tmp_path / "run", 1, config, "steps=1", patch=fails, codes=[1])
    assert saved.find(where).path == where / "model"  # which is this very end's
    run(tmp_path / "run", 1, config, "steps=2", patch=fails, codes=[1])
    found = saved.find(where)
    assert found.path == where / "checkpoints/step-00000002" and found.facts["steps"] == 2
    run(tmp_path / "run", 1, config, "steps=2")
    assert saved.find(where).path == where / "model"


def refused(capsys, *arguments) -> str:
    assert cli.main([str(one) for one in arguments]) == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return output.err


def test_bad_input_is_one_message(runs, base, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    adapter = tmp_path / "alone"
    assert cli.main(["export", str(runs["lora"]), str(adapter)]) == 0
    assert "is there already" in refused(capsys, "export", runs["lora"], tmp_path / "there")
    assert "no such directory" in refused(capsys, "export", tmp_path / "none", tmp_path / "out")
    assert "neither a model" in refused(capsys, "export", tmp_path / "there", tmp_path / "out")
    assert "no such directory" in refused(capsys, "export", runs["lora"], tmp_path / "a/b")
    assert "a whole model has no base" in refused(capsys, "generate", runs["full"], "--base", base)
    (tmp_path / ".out.tmp").mkdir()
    handle = os.open(tmp_path / ".out.tmp", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as one does whose controller had a Ctrl-C
    assert "another export writes it just now" in refused(capsys, "export", runs["lora"], tmp_path / "out")
    os.close(handle)
    (tmp_path / ".out.tmp/left").touch()  # by one that was killed
    assert cli.main(["export", str(runs["lora"]), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out/left").exists() and (tmp_path / "out/adapter_config.json").exists()
    assert not (tmp_path / ".out.tmp").exists()
    shutil.rmtree(tmp_path / "out")
    missing = refused(capsys, "export", adapter, tmp_path / "out", "--merge", "--base", tmp_path / "none")
    assert "say where it lies by --base" in missing
    assert "has no chat template" in refused(capsys, "generate", runs["tiny"], "--chat", "--prompt", "x")
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    assert "expected safetensors, found 7 bytes that begin otherwise" in refused(capsys, "generate", adapter)
    (adapter / "adapter_config.json").write_text("{")
    assert "not JSON" in refused(capsys, "generate", adapter)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_what_cannot_be_said_is_one_message(runs, tmp_path, capsys, monkeypatch):
    """A word that the model has no number for, input in another encoding, no likeliest word, nothing to begin with."""
    from transformers import AutoTokenizer

    model = shutil.copytree(runs["full"] / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<unheard>"])
    tokenizer.save_pretrained(model)
    said = refused(capsys, "generate", model, "--prompt", "so <unheard>")
    assert "token '<unheard>' has the number 300, and the model has 300 tokens" in said
    for errors in ("strict", "surrogateescape"):  # as in the locale C
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
        assert "the input is no UTF-8: byte 0xe9" in refused(capsys, "generate", model, "--chat")
    for words in ([], ["--chat"]):
        said = refused(capsys, "generate", model, *words, "--prompt", os.fsdecode(b"caf\xe9"))
        assert "--prompt is no UTF-8: byte 0xe9; convert it by iconv" in said
    for little in ("1e-40", "1e-50"):  # the second is none in float32
        said = refused(capsys, "generate", model, "--prompt", "so", "--temperature", little)
        assert f"--temperature {little}: found so little" in said and "expected 0, which takes" in said
    weights = {name: one * float("nan") for name, one in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for temperature in ("0", "0.8"):
        said = refused(capsys, "generate", model, "--prompt", "so", "--temperature", temperature)
        assert (
            "the model's logits: found nan; expected finite numbers" in said and "earlier checkpoint" in said
        )
    config = json.loads((model / "tokenizer_config.json").read_text())
    ends = {name: None for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    (model / "tokenizer_config.json").write_text(json.dumps(config | ends))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | {"eos_token_id": None}))
    assert "no token that begins or ends a text; give a --prompt" in refused(capsys, "generate", model)


def test_an_adapter_names_its_base_as_the_hub_does_and_here_finds_its_copy(base, tmp_path, capsys):
    """As on a cluster, where the base lies at a place that is named by its content."""
    config = tmp_path / "run.yaml"
    config.write_text("sequence_length: 32\nbatch_size: 2\nmax_samples: 40\nthreads: 1\ncheckpoint_keep: 1\n")
    asked = [f"model={base}", *LORA, "origins=" + json.dumps({str(base): "org/name"})]
    run(tmp_path, 1, config, *asked[:-1], "steps=1")  # as by an earlier release
    node, out = tmp_path / "node0", tmp_path / "out"

    def called(directory):
        return json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]

    assert called(node / "model") == str(base)
    run(tmp_path, 1, config, *asked, "steps=2")
    assert "resuming after step 1" in (node / "logs/rank-0.log").read_text()
    assert called(node / "model") == "org/name"
    saved = node / "checkpoints/step-00000002"
    for directory in (node / "model", saved):
        assert cli.main(["generate", str(directory), "--prompt", "so", "--max-new-tokens", "1"]) == 0
    for directory, options, name in (
        (node, [], "org/name"),
        (saved, [], "org/name"),
        (saved, ["--base", "/mine"], "/mine"),
        (node, ["--merge"], None),
    ):
        assert cli.main(["export", str(directory), str(out), *options]) == 0
        card = (out / "README.md").read_text()
        assert str(base) not in card and ("base_model: org/name\n" in card) is (name != "/mine")
        assert not name or called(out) == name
        shutil.rmtree(out)


def _no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_for_the_model_keeps_nothing_of_it(base, tmp_path):
    """The weights are staged when the model does not fit: both go, and the next start has the room."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "sequence_length: 32\nbatch_size: 2\nsteps: 2\nmax_samples: 40\nthreads: 1\nstrategy: fsdp\n"
    )
    patch = {("trainer.model.card", "write"): _no_room}
    run(tmp_path, 2, config, f"model={base}", codes=[1, 1], patch=patch)
    assert "free some space there and start the run again" in status(tmp_path / "node0")["reason"]
    assert not [*tmp_path.glob("node*/.*.tmp"), *tmp_path.glob("node*/model")]
    (tmp_path / "node0/.weights.tmp").write_bytes(b"of one that was cut off")
    run(tmp_path, 2, config, f"model={base}")
    assert (tmp_path / "node0/model/model.safetensors").is_file() and not list(tmp_path.glob("node*/.*.tmp"))


@pytest.mark.full
def test_no_host_has_all_of_a_sharded_model_in_memory_to_write_it(base, tmp_path):
    """Growth of each writer's own memory; what is mapped from a file does not count, for the kernel takes it back."""
    from transformers import AutoTokenizer, LlamaConfig

    model = tmp_path / "model"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 8}
    LlamaConfig(vocab_size=300, max_position_embeddings=96, **sizes).save_pretrained(model)
    AutoTokenizer.from_pretrained(base).save_pretrained(model)
    config = tmp_path / "run.yaml"
    config.write_text(
        "sequence_length: 32\nbatch_size: 2\nsteps: 1\nmax_samples: 40\nthreads: 1\ndevice: cpu\n"
    )
    patch = {("trainer.commands.train", "_export"): _weighed}
    run(tmp_path, 2, config, f"model={model}", "strategy=fsdp", patch=patch)
    for node in ("node0", "node1"):
        file = tmp_path / node / "model/model.safetensors"
        grown = int((tmp_path / node / "grown").read_text())
        assert file.stat().st_size > 80e6 and grown < 0.6 * file.stat().st_size, grown
        last = tmp_path / node / "checkpoints/step-00000001/model.safetensors"
        ours, saved = load_file(file), load_file(last)
        assert ours.keys() == saved.keys()
        assert all(torch.equal(one, saved[name]) for name, one in ours.items())
        assert not list((tmp_path / node).glob(".*.tmp"))


def _weighed(strategy, tokenizer, directory):
    """As what it stands for; notes by how many bytes the process's own memory grew meanwhile."""
    import ctypes
    import threading
    from pathlib import Path

    from trainer.commands import train

    def own():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be taken again, unnoticed
    before, most, done = own(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train._export_really(strategy, tokenizer, directory)
    finally:
        done.set()
        watcher.join()
    (directory.parent / "grown").write_text(str(most[0] - before))
