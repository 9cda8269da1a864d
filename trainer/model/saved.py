"""What a directory holds of a trained model (a run, a checkpoint, an adapter, a whole model), and how to open it."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from trainer import checkpoint, metrics
from trainer import config as configuration
from trainer.data import chat, read
from trainer.data.files import expanded
from trainer.errors import BadInput
from trainer.model import files as model_files
from trainer.model import load as model_load
from trainer.words import some

ADAPTER = "adapter_model.safetensors"  # peft's name for an adapter's weights


@dataclass(frozen=True)
class Saved:
    """A trained model on disk: an adapter, or all weights."""

    path: Path
    adapter: dict | None  # what adapter_config.json says; None: all weights are here
    facts: dict = field(
        default_factory=dict
    )  # what is known of its training: the keys of a run's summary.json

    @property
    def settings(self) -> dict:
        """The configuration of the run that made it; empty where that is not known."""
        return self.facts.get("settings", {})

    @property
    def base(self) -> str | None:
        """The model that an adapter was trained beside: a directory, a hub name, or `tiny`."""
        return self.settings.get("model") or (self.adapter or {}).get("base_model_name_or_path")

    @property
    def base_elsewhere(self) -> str | None:
        """The same for others' tools: its name on the hub, if that is where it came from."""
        return name_on_hub(self.settings) or self.base


def find(directory: Path) -> Saved:
    """What `directory` is: a model, an adapter, a checkpoint, or a run: its model/, or the newest checkpoint where that
    is later, as of a run that goes on beyond its end, or where there is no model yet.

    Raises BadInput where it is none of them, cannot be a path, or is a damaged checkpoint.
    """
    directory = expanded(directory)
    if (directory / "manifest.json").exists():
        return _checkpoint(directory, checkpoint.validate(directory))
    if _holds_model(directory):
        whole = directory.resolve()
        facts = metrics.read_summary(whole.parent) if whole.name == "model" else {}
        return Saved(directory, _adapter(directory), facts)
    problems = None
    made = _holds_model(directory / "model")
    if (directory / "checkpoints").is_dir():
        ended = metrics.read_summary(directory).get("steps") or 0
        manifest, path, problems = checkpoint.newest(directory / "checkpoints", beyond=ended if made else -1)
        if path:
            return _checkpoint(path, manifest)
    if made:
        return find(directory / "model")
    if problems is not None:
        raise BadInput("\n".join([f"{directory}: no valid checkpoint in it", *problems.values()]))
    kind = (
        "neither a model (config.json), an adapter (adapter_config.json), a checkpoint (manifest.json) nor a run "
        "(model/ or checkpoints/)"
    )
    if not directory.is_dir():
        raise BadInput(f"{directory}: {'not a' if directory.exists() else 'no such'} directory")
    below = model_files.models_below(directory, ("config.json", "adapter_config.json"))
    raise BadInput(f"{directory}: {kind}" + (f"; did you mean {below[0]}?" if below else ""))


def open_model(saved: Saved, base: str | None = None, dtype: str = "auto", trust: bool = False):
    """(model, tokenizer), the model in evaluation mode on the CPU; an adapter as a peft model around its base.

    base: where an adapter's base lies, if not where it lay in training. dtype: auto (as on disk) or a torch type.
    trust: whether a model's own Python code is run, whatever the directory says of its training.
    Raises BadInput with the cure.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    if saved.adapter is not None and not (saved.path / ADAPTER).is_file():
        raise BadInput(
            f"{saved.path}: found no {ADAPTER}; expected the adapter in that format, for what is "
            "pickled runs code as it is read: save it anew, by peft's save_pretrained"
        )
    if saved.adapter is not None:
        model_files.header(saved.path / ADAPTER, str(saved.path))
    elif not model_files.weights(saved.path, str(saved.path)):
        raise BadInput(f"{saved.path}: found no weights in it; expected {model_files.SINGLE}, or it in parts")
    logging.disable_progress_bar()
    tokens = str(saved.path)
    if saved.adapter is not None and not (saved.path / "tokenizer.json").is_file():  # peft saves none
        tokens, _ = _base_of(saved, base)
        print(f"note: no tokenizer.json beside the adapter: that of {tokens} is taken", file=sys.stderr)
    with _explained(Path(tokens), "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            tokens, local_files_only=Path(tokens).is_dir(), trust_remote_code=trust
        )
    if saved.adapter is None:
        if base:
            raise BadInput(f"{saved.path}: a whole model has no base; leave --base away")
        with _explained(saved.path, "the model"):
            return _weights(str(saved.path), dtype, trust).eval(), tokenizer
    whole = _base(saved, base, dtype, trust, tokenizer)
    with _explained(saved.path, "the adapter"):
        return _adapted(whole, saved, base).eval(), tokenizer


def _adapted(whole, saved: Saved, base: str | None):
    """The model with the adapter; raises BadInput where the two do not fit, of which peft warns at most."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(whole, str(saved.path))
    if model.active_peft_config.is_prompt_learning:  # of which peft tells nothing
        return model
    told = model.load_adapter(str(saved.path), "default")  # the same once more, for it tells what was amiss
    if told.unexpected_keys:
        raise BadInput(
            f"{saved.path}: {ADAPTER} has {some(sorted(told.unexpected_keys), 1)}, for which there is no place in its "
            f"base, {base or saved.base}; expected an adapter of that model, as peft saves it: its base is another one "
            "(--base DIR), adapter_config.json is not its own, or it was saved from within what FSDP or torch.compile "
            "had wrapped"
        )
    if told.missing_keys and model.active_peft_config.peft_type == "LORA":
        raise BadInput(
            f"{saved.path}: {ADAPTER} lacks {some(sorted(told.missing_keys), 1)}, by adapter_config.json and its base, "
            f"{base or saved.base}; expected all of the adapter: its base is another one (--base DIR), or it was saved "
            "in part, as where ZeRO-3 or FSDP had its weights in parts: save it anew, or copy it whole"
        )
    return model


def ends(model, tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those that the model names besides."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}


def name_end_of_turn(directory: Path, model, tokenizer) -> None:
    """Have the model's files, just written, name what ends an answer in its template, so that others' tools stop there.

    In the file, for transformers refuses to write a configuration that differs from the one it has read where that had
    sampling's settings without sampling, as published ones have.
    """
    file, token = directory / "generation_config.json", chat.end_of_turn(tokenizer)
    if token in (None, *ends(model, tokenizer)) or not file.is_file():
        return
    told = json.loads(file.read_text()) | {"eos_token_id": sorted({*ends(model, tokenizer), token})}
    file.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def name_on_hub(settings: dict) -> str | None:
    """What the hub calls the model that train.yml has brought from there to a place on the hosts; else None."""
    name = read.origins(settings).get(settings.get("model"))
    return name if name and not name.startswith(("/", ".", "~")) else None


def name_base(directory: Path, settings: dict) -> None:
    """Have an adapter's files, just written, name its base as the hub does; here it is found by the run's settings.

    Afterwards, for peft would ask the hub for that name as it writes.
    """
    adapter, name = _adapter(directory), name_on_hub(settings)
    if adapter and name:
        write_adapter(directory, {**adapter, "base_model_name_or_path": name})


def write_adapter(directory: Path, adapter: dict) -> None:
    """Write adapter_config.json, as peft does."""
    (directory / "adapter_config.json").write_text(json.dumps(adapter, indent=2, sort_keys=True) + "\n")


def _base_of(saved: Saved, base: str | None) -> tuple[str, bool]:
    """(the adapter's base, a directory or a name, and whether its weights were random)."""
    name = base or saved.base
    if not name:
        raise BadInput(f"{saved.path}: the adapter does not say what its base is; give it by --base DIR")
    try:
        return name, name == "tiny" or model_files.weights_of(name)[0] is None
    except BadInput as error:
        raise BadInput(
            f"{saved.path}: the adapter's base: {error}; say where it lies by --base DIR"
        ) from None


def _base(saved: Saved, base: str | None, dtype: str, trust: bool, tokenizer):
    """The model beside which the adapter was trained, whole; quantised weights are made whole again."""
    import torch

    name, random = _base_of(saved, base)
    if random:
        if not saved.settings:
            raise BadInput(
                f"{saved.path}: its base, {name}, had random weights, made by its run's settings, which are not here; "
                "give the run's directory, or one of its checkpoints"
            )
        known = {**_known(saved.settings), "model": name, "trust_remote_code": trust}
        with _explained(Path(name), "the adapter's base"):
            remade = model_load.remake(configuration.from_mapping(known), tokenizer)
            return remade if dtype == "auto" else remade.to(getattr(torch, dtype))
    cure = "" if Path(name).is_dir() else "; say where it lies by --base DIR"
    with _explained(Path(name), "the adapter's base", cure):
        return _weights(name, dtype, trust)


def _weights(name: str, dtype: str, trust: bool):
    from transformers import AutoModelForCausalLM

    model = model_load.whole(
        *AutoModelForCausalLM.from_pretrained(
            name,
            config=model_load.configuration(name, trust),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=Path(name).is_dir(),
            trust_remote_code=trust,
            # Else weights that are packed go to the first GPU, whatever is free there.
            device_map={"": "cpu"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        ),
        name,
    )
    return _dequantised(model) if getattr(model, "is_quantized", False) else model


def _dequantised(model):
    """The model with whole weights, to be saved as any other one.

    transformers leaves two things of the quantised one: conversions of weights that have no way back, and nn.Linear in
    place of GPT-2's Conv1D, whose weight is the other way round.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    model = model.dequantize()
    model._weight_conversions = [
        one for one in getattr(model, "_weight_conversions", None) or () if _returns(one)
    ]
    with torch.device("meta"):
        shape = type(model)(model.config)
    for name, wanted in shape.named_modules():
        found = model.get_submodule(name)
        if isinstance(wanted, Conv1D) and isinstance(found, torch.nn.Linear):
            with torch.device("meta"):
                mended = Conv1D(found.out_features, found.in_features)
            mended.weight, mended.bias = torch.nn.Parameter(found.weight.detach().T.contiguous()), found.bias
            model.set_submodule(name, mended)
    return model


def _returns(conversion) -> bool:
    """Whether what it makes of a file's weights can be made those again."""
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _known(settings: dict) -> dict:
    """The settings that this trainer still has."""
    return {name: value for name, value in settings.items() if name in configuration.FIELDS}


class _explained:
    """Turn the many exceptions of transformers, peft and safetensors into one message."""

    def __init__(self, path: Path, what: str, cure: str = ""):
        self.path, self.what, self.cure = path, what, cure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception) and "trust_remote_code" in str(error):
            raise BadInput(
                f"{self.path}: {self.what} brings its own Python code: if you trust it, add --code (of the playbooks: "
                "-e trust_remote_code=true)"
            ) from None
        if isinstance(error, Exception) and not isinstance(error, BadInput | MemoryError):
            text = " ".join(str(error).split())[:300]
            raise BadInput(
                f"{self.path}: {self.what} cannot be loaded: {type(error).__name__}: {text}{self.cure}"
            ) from None


def _holds_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def _adapter(directory: Path) -> dict | None:
    path = directory / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected an object of settings, found {type(found).__name__}")
    return found


def _checkpoint(path: Path, manifest: dict) -> Saved:
    """A checkpoint, with what the run's metrics tell up to its step."""
    run_dir = path.resolve().parent.parent
    facts = {name: manifest[name] for name in ("settings", "versions") if name in manifest}
    if (run_dir / "metrics.jsonl").is_file():
        facts |= metrics.curve(run_dir, manifest["step"])
    return Saved(path, _adapter(path), {"run": facts.get("settings", {}).get("run"), **facts})
