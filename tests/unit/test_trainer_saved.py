"""Adapters as they were saved: what fits a base, what can be merged."""

import json

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from small_models import LFS, lay, packed, small

from trainer.commands import export
from trainer.errors import BadInput
from trainer.model import saved

torch.set_num_threads(1)


def test_an_adapter_that_is_pickled_is_not_opened(tmp_path):
    """peft takes adapter_model.bin where there is no other."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(
        BadInput, match=r"found no adapter_model\.safetensors; expected the adapter in that format"
    ):
        saved.open_model(saved.find(tmp_path))


def an_adapter(folder, config=None, tied=False):
    """(the directory of an adapter beside a Llama that lies beside it, what that gives with it)."""
    from peft import LoraConfig, get_peft_model

    small(folder / "base", tie_word_embeddings=tied)
    if tied:
        there = load_file(folder / "base" / "model.safetensors")
        del there["lm_head.weight"]
        save_file(there, folder / "base" / "model.safetensors", {"format": "pt"})
    base = saved._weights(str(folder / "base"), "auto", False)
    model = get_peft_model(
        base, config or LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.02 if one.requires_grad else 0)
    model.save_pretrained(folder / "adapter")
    for place in ("adapter", "base"):
        vocabulary = {chr(97 + n): n for n in range(26)} | {"[UNK]": 26}
        text = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        text.save(str(folder / place / "tokenizer.json"))
    return folder / "adapter", model.eval()(input_ids=torch.arange(9)[None]).logits.detach()


def rewrite(change):
    def do(folder):
        there = load_file(folder / "adapter_model.safetensors")
        save_file(change(there), folder / "adapter_model.safetensors")

    return do


def retarget(*names):
    def do(folder):
        told = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(told | {"target_modules": names}))

    return do


ADAPTERS = {
    "as it is": (lambda folder: None, None),
    "without a tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), None),
    "of some layers": (
        rewrite(lambda there: {k: v for k, v in there.items() if "layers.1" not in k}),
        "lacks .*and 3 more",
    ),
    "of nothing": (rewrite(lambda there: {}), "lacks .* and 7 more, by adapter_config.json and its base"),
    "wrapped by FSDP": (
        rewrite(lambda there: {k.replace(".0.", ".0._fsdp_wrapped_module."): v for k, v in there.items()}),
        "has .*_fsdp_wrapped_module.* and 3 more, for which there is no place in its base",
    ),
    "without peft's prefix": (
        rewrite(lambda there: {k.removeprefix("base_model.model."): v for k, v in there.items()}),
        "has model.layers.0.self_attn.q_proj.lora_A.weight and 7 more, for which",
    ),
    "with fewer targets": (retarget("q_proj"), "v_proj.* and 3 more, for which there is no place"),
    "with more targets": (retarget("q_proj", "v_proj", "k_proj"), "lacks .*k_proj.* and 3 more, by"),
    "cut off": (
        lambda folder: lay(folder, {"adapter_model.safetensors": packed("a", cut=1)}),
        "adapter_model.safetensors: expected [0-9]+ bytes by its header",
    ),
    "git's pointer": (
        lambda folder: lay(folder, {"adapter_model.safetensors": LFS}),
        "fetch that by: git lfs pull",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_does_not_fit_its_base_is_refused(name, tmp_path):
    """peft warns at most, and the base alone would speak, or be exported as merged."""
    change, said = ADAPTERS[name]
    folder, logits = an_adapter(tmp_path)
    change(folder)
    if said is None:
        model, _ = saved.open_model(saved.find(folder))
        assert torch.allclose(model(input_ids=torch.arange(9)[None]).logits, logits, atol=1e-6)
        return
    with pytest.raises(BadInput, match=said):
        saved.open_model(saved.find(folder))


def test_without_a_tokenizer_and_a_base_the_base_is_asked_for(tmp_path):
    folder, _ = an_adapter(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        BadInput, match=r"the adapter's base: model: /no/such: no such directory; .* by --base DIR"
    ):
        saved.open_model(saved.find(folder), "/no/such")


@pytest.mark.parametrize("kind", ["prompt", "bias", "replication", "tied"])
def test_an_adapter_that_cannot_be_merged_speaks_and_is_refused_as_a_model(kind, tmp_path):
    from peft import LoraConfig, PromptTuningConfig

    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config, why = {
        "prompt": (
            PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            r"it goes before the text \(PROMPT_T",
        ),
        "bias": (
            LoraConfig(lora_bias=True, **lora),
            "the base layer has no bias; without --merge it is written as it is",
        ),
        "replication": (
            LoraConfig(layer_replication=[[0, 2], [1, 2]], **lora),
            "it repeats layers of its base",
        ),
        "tied": (  # embeddings and head are one tensor, and either adapter would go into both
            LoraConfig(**{**lora, "target_modules": ["q_proj", "lm_head"]}),
            r"it is beside lm_head, whose weights its base has in another place, too \(tied\): both would",
        ),
    }[kind]
    folder, logits = an_adapter(tmp_path, config, tied=kind == "tied")
    model, _ = saved.open_model(saved.find(folder))
    assert torch.allclose(model(input_ids=torch.arange(9)[None]).logits, logits, atol=1e-6)
    with pytest.raises(BadInput, match=f"the adapter cannot go into its base: .*{why}"):
        export.main(folder, tmp_path / "out", True, None, "auto", False)
    assert not (tmp_path / "out").exists()
