"""The model card: README.md beside a trained model, in the form that the Hugging Face hub reads."""

import re
from pathlib import Path

import yaml

from trainer import config as configuration
from trainer.data.read import named
from trainer.words import count

HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
LOSSES = 10  # rows of the table of losses, at most

MERGE = "merge both (`trainer export RUN DIRECTORY --merge`)"
LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{path}")
model = AutoModelForCausalLM.from_pretrained("{path}")
"""
LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{path}")
base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{path}")
"""


def write(directory: Path, facts: dict, adapter: dict | None = None, merged: str = "") -> None:
    """Write README.md into `directory`; what `facts` (the keys of a run's summary.json) lack is left out.

    adapter: its adapter_config.json, if `directory` holds one; merged: the number format in which an adapter was merged
    into these weights, if one was.
    """
    chats = (directory / "chat_template.jinja").is_file()
    (directory / "README.md").write_text(
        text(facts, directory.name, adapter, merged, chats), encoding="utf-8"
    )


def text(facts: dict, name: str, adapter: dict | None = None, merged: str = "", chats: bool = False) -> str:
    """The card; `name`: the directory's. chats: its tokenizer has a chat template."""
    settings = named(facts.get("settings", {}))
    base = settings.get("model") or (adapter or {}).get("base_model_name_or_path") or "unknown"
    title = facts.get("run") or settings.get("run") or name
    parts = [
        _front_matter(base, adapter),
        f"# {title}\n\n{_what(base, adapter, merged, settings)}",
        f"## How to load it\n\n{_load(adapter, base)}"
        + ("\n\nIts tokenizer has a chat template: `tokenizer.apply_chat_template`." if chats else ""),
        _data(facts, settings),
        _losses(facts),
        _settings(settings),
        _made(facts),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front_matter(base: str, adapter: dict | None) -> str:
    head = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["trainyard", *(["lora"] if adapter else [])],
    }
    if re.fullmatch(HUB_NAME, base) and not Path(base).is_dir():
        head["base_model"] = base
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def _what(base: str, adapter: dict | None, merged: str, settings: dict) -> str:
    start = "a small GPT-2 from random weights" if base == "tiny" else f"`{base}`"
    if adapter or merged:
        rank, alpha = (adapter or {}).get("r"), (adapter or {}).get("lora_alpha")
        rank, alpha = rank or settings.get("lora_rank"), alpha or settings.get("lora_alpha")
        how = f"A LoRA adapter (rank {rank}, alpha {alpha:g})" if rank and alpha else "A LoRA adapter"
        bits = {"4bit": ", which was held in 4 bits", "8bit": ", which was held in 8 bits"}
        line = f"{how} for {start}{bits.get(settings.get('quantize'), '')}."
        return line + (f" It is merged into these weights, in {merged}." if merged else "")
    return f"All weights trained, beginning with {start}."


def _load(adapter: dict | None, base: str) -> str:
    if adapter and base == "tiny":
        return (
            f"Its base has weights that its run has made at random: {MERGE} first, and load what that writes."
        )
    return f"```python\n{(LOAD_ADAPTER if adapter else LOAD_MODEL).format(path='.', base=base)}```"


def _data(facts: dict, settings: dict) -> str:
    if not settings:
        return ""
    lines = [f"- training: `{settings.get('dataset')}`"]
    if facts.get("dataset_tokens"):
        lines[0] += f", {facts['dataset_tokens']:,} tokens"
        if facts.get("sequences"):
            each = f"{settings.get('sequence_length'):,}"
            if settings.get("packing") is False:
                each = f"one document each, or a part of it, of up to {each} tokens"
            lines[0] += f" in {facts['sequences']:,} sequences of {each}"
    lines += _cut(facts, settings)
    if settings.get("dataset_weights"):
        lines.append(f"- shares of a batch: {settings['dataset_weights']}")
    if settings.get("loss_on") == "answers":
        lines.append("- the loss is on the answers alone")
    if settings.get("validation"):
        lines.append(f"- held out: `{settings['validation']}`")
    elif settings.get("validation_split"):
        lines.append(f"- held out: {settings['validation_split']:.1%} of the documents")
    lines += _cut(facts, settings, "held_out_")
    return "## Data\n\n" + "\n".join(lines)


def _cut(facts: dict, settings: dict, part: str = "") -> list[str]:
    """What was left out of the training data's documents, or of those of another part; a line or none."""
    if not facts.get(f"{part}documents_cut"):
        return []
    cut, lost = count(facts[f"{part}documents_cut"], "document"), count(facts[f"{part}tokens_cut"], "token")
    whose = "of the held-out data, " if part else ""
    return [f"- {whose}cut to {settings.get('sequence_length'):,} tokens: {cut}; {lost} left out"]


def _losses(facts: dict) -> str:
    """Losses of training, at most LOSSES of them, and of the evaluations."""
    losses, evals = facts.get("losses") or [], facts.get("evals") or []
    if not losses:
        return ""
    rows = [losses[round(n * (len(losses) - 1) / (LOSSES - 1))] for n in range(LOSSES)]
    table = ["| step | loss |", "| --- | --- |"]
    table += [f"| {step:,} | {loss:.4f} |" for step, loss in dict(rows).items()]
    lines = ["## Losses", "In nats a token.", "\n".join(table)]
    if facts.get("unigram_entropy"):
        lines.append(
            f"Knowing the tokens' frequencies alone would reach {facts['unigram_entropy']:.4f} on the training data."
        )
    if evals:
        step, loss = min(evals, key=lambda pair: pair[1])
        last = f"{evals[-1][1]:.4f} at step {evals[-1][0]:,}"
        lines.append(f"On the held-out data: {last}; the best was {loss:.4f}, at step {step:,}.")
    if facts.get("model_step", losses[-1][0]) != losses[-1][0]:
        lines.append(f"These weights are those of step {facts['model_step']:,}.")
    return "\n\n".join(lines)


def _settings(settings: dict) -> str:
    """What differs from the defaults of the trainer."""
    rows = [
        f"{name}: {value}"
        for name, value in settings.items()
        if name not in configuration.FIELDS or value != configuration.FIELDS[name].default
    ]
    if not settings:
        return ""
    listing = "```yaml\n" + "\n".join(rows) + "\n```" if rows else "The trainer's defaults."
    return f"## Settings\n\n{listing}" + ("\n\nEverything else is the trainer's default." if rows else "")


def _made(facts: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    lines = [f"Made with {versions}."] if versions else []
    world = facts.get("world", {})
    if world.get("size"):
        steps, tokens, seconds = (facts.get(name) or 0 for name in ("steps", "tokens", "train_seconds"))
        lines.append(
            f"{steps:,} steps, {tokens:,} tokens, {seconds:,.0f} s on {world['size']} ranks ({world.get('device')})."
        )
    return "\n".join(lines)
