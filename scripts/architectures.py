"""What the trainer makes of transformers' causal architectures: architectures.py [KIND ...], of all by default.

Each is made small, with random weights, and goes through check, plan, train, export and generate, with all weights and
with an adapter. Its first loss must be that of its own code, one document after the other. A line each: packed, or
unpacked (packing: false), and what failed; or why it is refused, or could not be made small. An hour on a core.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer import cli

LENGTH = 16  # tokens of each document, two of which fill a sequence
LARGEST = 30_000_000  # parameters
SECONDS = 240  # of a command
SIZES = {
    32: "hidden_size d_model n_embd dim embedding_size lru_width word_embed_proj_dim embed_dim out_hidden_size",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads num_buckets",
    64: "max_position_embeddings n_positions n_ctx max_seq_len mamba_d_ssm",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner",
    2: "num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_k moe_topk encoder_layers "
    "linear_num_key_heads index_n_heads attn_layer_period expert_layer_period",
    8: "head_dim attention_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state "
    "mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim mamba_headdim ssm_state_size state_size rotary_dim "
    "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input index_head_dim index_topk",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim expert_dim "
    "expert_ffn_hidden_size",
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_dense_layers moe_num_shared_experts "
    "mamba_n_groups n_groups mamba_ngroups depth attn_layer_offset",
    6: "sliding_window attention_window_size",
    0: "num_kv_shared_layers zero_expert_num eos_token_id decoder_start_token_id",
    384: "vocab_size vocab_size_per_layer_input",
    28: "image_size",
    14: "patch_size",
    None: "bos_token_id pad_token_id mlp_layer_types",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# What some configurations do not take, so that their own is left; tried one after the other.
OWN = (
    "",
    "head_dim",
    "bos_token_id pad_token_id",
    "head_dim bos_token_id pad_token_id",
    "num_hidden_layers num_layers n_layer",
    "head_dim num_hidden_layers",
    "head_dim num_attention_heads num_key_value_heads",
    "head_dim mamba_headdim mamba_num_heads mamba_head_dim num_heads",
    "head_dim global_head_dim num_global_key_value_heads hidden_size_per_layer_input vocab_size_per_layer_input",
)
RUN = """\
run: full
model: model
dataset: data.jsonl
sequence_length: 32
batch_size: 16
micro_batch_size: 2
steps: 2
lr: 0.003
threads: 1
device: cpu
"""
WORDS = "the ship sails over a calm sea and nobody on board knows where it will land".split()  # noqa: SIM905


def main(kinds: list[str]) -> None:
    tallies: dict[str, int] = {}
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            what, *failed = tried(kind, Path(folder))
        what = "fails" if failed else what
        tallies[what.partition(":")[0]] = tallies.get(what.partition(":")[0], 0) + 1
        print(f"{kind:24} {what}", *failed, sep="\n    ", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(tallies.items())))


def tried(kind: str, folder: Path) -> list[str]:
    """What becomes of an architecture, and, a line each, what of it fails."""
    if (problem := apart(make, kind, folder)) is not None:
        return [f"not made: {problem}"]
    what = "packed"
    problem = apart(command, folder, "check", "run.yaml")
    if problem and "packing to false" in problem:
        what = "unpacked"
        (folder / "run.yaml").write_text(RUN.replace("batch_size: 16", "batch_size: 32") + "packing: false\n")
        problem = apart(command, folder, "check", "run.yaml")
    if problem:
        return [f"refused: {problem}"]
    lora = ("run=lora", "adapter=lora", "lora_rank=4")
    problems = {
        "plan": apart(command, folder, "plan", "run.yaml"),
        "train": apart(command, folder, "train", "run.yaml") or apart(begins, folder, "full"),
        "adapter": apart(command, folder, "train", "run.yaml", *lora) or apart(begins, folder, "lora"),
        "export": apart(command, folder, "export", "runs/full", "out") or apart(loads, folder),
        "generate": apart(command, folder, "generate", "runs/full", "--max-new-tokens", "4"),
    }
    return [what, *(f"{name}: {problem}" for name, problem in problems.items() if problem)]


def apart(action, *arguments) -> str | None:
    """What `action` returns, in a process of its own; what it raises, or that it does not end, in words."""
    ours, its = multiprocessing.Pipe(duplex=False)

    def act() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            its.send(action(*arguments))
        except Exception as error:
            its.send(" ".join(f"{type(error).__name__}: {error}".split())[:200])

    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    its.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else f"no end within {SECONDS} s"
    except EOFError:
        return f"its process died ({process.exitcode})"
    finally:
        process.kill()
        process.join()


def make(kind: str, folder: Path) -> None:
    """Write model, data and run.yaml into `folder`, and the loss that the model's own code has of the data."""
    faults = []
    for own in OWN:
        try:
            config = smaller(AutoConfig.for_model(kind), own.split())
            with torch.device("meta"):
                size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
            expected = mean_loss(model, folder)
            break
        except Exception as error:  # whatever its code raises
            faults.append(error)
    else:
        raise faults[0]
    model.save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(RUN)
    (folder / "expected.json").write_text(json.dumps(expected))


def smaller(config, own: list[str]):
    """`config` of a model with small layers, but for its `own` keys; of one that sees, in each of its parts."""
    parts = {}
    for name in ("text_config", "vision_config", "audio_config"):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            parts[name] = smaller(part, own).to_dict()
    if parts:
        return type(config)(**parts)
    there = config.to_dict().keys() | getattr(config, "attribute_map", {}).keys()
    return type(config)(**{name: size for name, size in SMALL.items() if name in there and name not in own})


def mean_loss(model, folder: Path) -> float:
    """The loss of the data's tokens, each document for itself; data and tokenizer are made besides."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(7)
    some = [" ".join(chance.choices(WORDS, k=chance.randint(8, 14))) for _ in range(500)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["</s>"]
    backend.train_from_iterator(
        some, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    ids = {text: [*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in some}
    texts = [text for text in ids if len(ids[text]) == LENGTH][:32]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with torch.no_grad():
        rows = [torch.tensor([ids[text]]) for text in texts]
        logits = [model(input_ids=row, use_cache=False).logits[0, :-1].float() for row in rows]
    following = torch.cat([row[0, 1:] for row in rows])
    return torch.nn.functional.cross_entropy(torch.cat(logits), following).item()


def command(folder: Path, *words: str) -> str | None:
    """Run a command of the trainer's; its error, or None."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(list(words))
    errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    return None if code == 0 else (errors or said.getvalue().splitlines() or [f"exit code {code}"])[-1][:300]


def begins(folder: Path, run: str) -> str | None:
    """Whether a run's first loss is the expected one."""
    expected = json.loads((folder / "expected.json").read_text())
    lines = map(json.loads, (folder / f"runs/{run}/metrics.jsonl").read_text().splitlines())
    found = next(line["loss"] for line in lines if line["kind"] == "train")
    return (
        None
        if abs(found - expected) < 1e-5 * expected
        else f"loss {found:.6f}, and by its own code {expected:.6f}"
    )


def loads(folder: Path) -> str | None:
    """What of an exported model transformers misses, or has no place for."""
    _, told = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    left = {name: sorted(map(str, some))[:2] for name, some in told.items() if some}
    return str(left) if left else None


if __name__ == "__main__":
    main(sys.argv[1:])
