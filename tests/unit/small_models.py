"""Small models of many architectures, and the files of one."""

import json

import torch

from trainer.config import from_mapping
from trainer.model import load

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


ARCHITECTURES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 0.05, "sliding_window": 6},
    "gemma3_text": {"final_logit_softcapping": 0.05, "sliding_window": 6},
    "phi3": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "phimoe": EXPERTS,
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": EXPERTS | {"sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mpt": {"max_seq_len": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
}


CORRECTED = {  # for their routers alone
    "afmoe": EXPERTS | {"num_dense_layers": 1},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 8},
}


# These do not take a packed sequence's borders from its positions: masks tell them.
MASKED = ("gpt_oss", "opt", "mpt", "falcon")


def make(kind, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = (ARCHITECTURES | CORRECTED)[kind]
    settings = chosen if "vocab_size" in chosen else {**SMALL, **chosen}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**settings, **changes})
    return load.in_training(AutoModelForCausalLM.from_config(config))


def packed(*names, dtype="F32", cut=0):
    """A safetensors file of one value by each name, without its last `cut` bytes."""
    tensors = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(4 * len(names))
    return whole[: len(whole) - cut]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def lay(folder, contents):
    for name, content in contents.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


def small(folder, **changes):
    """A Llama's directory, its configuration changed after it was saved."""
    make("llama").save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | changes))
    found = load.Source(load.configuration(str(folder), False), None, str(folder), {})
    return from_mapping({"model": str(folder)}), found
