"""The model and tokenizer that `model` names, with equal weights on every rank."""

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from trainer.config import Config
from trainer.data import hub
from trainer.data import tokenizer as own_tokenizer
from trainer.errors import BadInput
from trainer.model import equal, lora, quantize, senses, stored
from trainer.model.files import files_of, weights_of
from trainer.model.loss import HALF
from trainer.words import some
from trainer.world import World, log

COMPILED = (7, 0)  # the compute capability from which on torch.compile writes code for a card


@dataclass(frozen=True)
class Source:
    """Where a model comes from: its transformers configuration, its tokenizer, and its weights, if any."""

    config: object
    tokenizer: object
    weights: str | None  # a directory or hub name; None: random weights
    dropout: dict  # what the model's configuration said of dropout, which is off in training


def source(config: Config, world: World) -> Source:
    """Find model and tokenizer; no weights are read yet.

    All ranks must call. Raises BadInput with the cure.
    """
    if config.model == "tiny":
        text = world.together(lambda: own_tokenizer.train(config) if world.first else None)
        tokenizer = own_tokenizer.wrap(world.share(text))
        found = Source(_tiny(config, len(tokenizer), tokenizer.eos_token_id), tokenizer, None, {})
    else:
        found = world.together(lambda: _pretrained(config))
        digests = world.gather(tokenizer_digest(found.tokenizer)[:12])
        world.same("tokenizer", digests, "give every host the same files of the model")
        if found.weights is None and world.first:
            log(f"no weights are in {config.model}: they begin as random ones, by seed")
    world.together(lambda: _check(config, found))
    world.together(lambda: _check_attention(config, found, world.device))
    if config.compile:
        world.together(lambda: _check_compiler("compile", "set compile to false", world.device))
    # What its maker once cut or padded texts to stands in tokenizer.json, and would silently do so here.
    found.tokenizer.backend_tokenizer.no_truncation()
    found.tokenizer.backend_tokenizer.no_padding()
    _without_dropout(found, world)
    return found


def build(config: Config, found: Source, world: World, in_parts: bool = False) -> torch.nn.Module:
    """The model in training mode, with its adapter if it gets one; equal weights on all ranks.

    It lies in the CPU's memory, where strategies take it from; quantised, on the rank's device. Trainable weights are
    float32. Frozen ones have the computation's format, or are quantised. All ranks must call.

    in_parts: the strategy may read the weights itself, its part of each or each to its device. Where that can be done,
    they are on the meta device and `model.stored` tells where they lie. The caller checks the packing, once a strategy
    has brought them to where they compute.
    """

    def load():
        model = _without_weights(config, found) if in_parts else None
        if model is None:
            model = _weights(config, found, world)
            if config.adapter == "lora":
                model = lora.add(model, config)
        _check_trained(config, model)
        return model

    model = world.together(load)
    model.original_dropout = found.dropout
    files = getattr(model, "stored", None)
    if in_parts:
        digests = world.gather(files.digest()[:12] if files else "read as a whole")
        world.same("weights", digests, "give every host the same files of the model")
        if world.first and found.weights:
            whole = "every rank reads the weights as a whole: their files name or tie them otherwise than the model"
            part = "the weights" if config.strategy == "split" else "its own part of the weights"
            log(f"each rank reads {part} to where they belong" if files else whole)
    if world.first and getattr(lora.without_adapter(model), "is_quantized", False):
        share = quantize.left_whole(model)
        if share > quantize.MUCH:
            log(
                f"warning: quantised are linear layers alone: {share:.0%} of this model's weights (experts that are no "
                f"linear layers) stay in {config.dtype}, and need the memory of that"
            )
    left = getattr(lora.without_adapter(model), "left_out", ())
    left = [name for name in left if not stored.COMPUTED.search(name)]
    if world.first and left:
        log(
            f"warning: weights in the model's files that the model has no place for are left out: {some(left, 3)}: "
            "they are for images or sound, or its config.json is another model's"
        )
    if world.first and (kept := senses.found(lora.without_adapter(model))):
        log(f"parts of the model that no text reaches stay as they are: {', '.join(kept)}")
    equal.equalise(equal.held(model), world)
    settle_experts(config, model, world.size)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        world.together(lambda: _compile(model, world))
    return in_training(model)


def settle_experts(config: Config, model: torch.nn.Module, ranks: int) -> None:
    """Have a mixture's experts, where they are trained whole, compute in 16 bits as all else does, one after the other.

    The product of all of them at once knows no autocast: it goes by its weights, which are float32 unless FSDP, of
    several ranks, gives them out in 16 bits.
    """
    held = config.strategy in ("ddp", "split") or ranks == 1
    if held and config.adapter == "none" and config.dtype in HALF:
        one_by_one(model)


def one_by_one(model: torch.nn.Module) -> None:
    """Have a mixture's experts compute one after the other; without any, nothing changes."""
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def in_training(model: torch.nn.Module) -> torch.nn.Module:
    """The model in training mode, but for routers that would draw experts by lot: they choose as in use."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.eval()
            module.train = lambda mode=True, module=module: module  # and stays so
    return model.train()


def rehearse(config: Config, found: Source) -> torch.nn.Module | None:
    """The model with its adapter, all on the meta device. Raises BadInput as `build` does; no weights are read.

    None where the model's own code wants to see numbers while it is made: training alone can tell.
    """
    if found.weights is None and config.quantize != "none":
        raise _nothing_to_quantise(config)
    quantize.settings(config, found.config)
    try:
        with torch.device("meta"):
            model = unloaded(config, found.config)
    except BadInput as error:
        if re.search(r"\bmeta (device|tensor)", str(error)):
            return None
        raise
    on_disk = getattr(found.config, "quantization_config", None)
    if found.weights and on_disk is None and Path(found.weights).is_dir():
        check_fit(type(model).__name__, found.weights, *stored.misfits(Path(found.weights), model))
    if config.adapter == "lora":
        model = lora.add(model, config)
    _check_trained(config, model)
    return model


def unloaded(config: Config, model_config) -> torch.nn.Module:
    """The model as `model_config` has it, made without weights: to be called where these take no memory."""
    from transformers import AutoModelForCausalLM

    common = {"trust_remote_code": config.trust_remote_code}
    # Flash and flex attention run on GPUs alone; what `auto` takes needs as little.
    if config.attention in ("eager", "sdpa"):
        common["attn_implementation"] = config.attention
    with _explained(config, "weights"):
        return senses.freeze(AutoModelForCausalLM.from_config(copy.deepcopy(model_config), **common))


def _check_trained(config: Config, model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(f"model: {config.model}: it has no weights that can be trained")
    if config.gradient_checkpointing and not getattr(
        lora.without_adapter(model), "supports_gradient_checkpointing", True
    ):
        raise BadInput(f"gradient_checkpointing: model {config.model} does not support it; set it to false")


def _tiny(config: Config, vocabulary: int, end_id: int):
    """A GPT-2 of about a million parameters: two CPU cores teach it something to see in minutes."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(8, config.sequence_length),  # packing.py tries it on eight
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )


def _pretrained(config: Config) -> Source:
    name, trust = config.model, config.trust_remote_code
    try:
        weights, name = weights_of(name)
    except OSError as error:  # a name too long, a directory that may not be entered
        raise BadInput(f"model: {name}: {error}; give a directory that the run's user can read") from None

    from transformers import AutoTokenizer

    with _explained(config, "configuration"):
        model_config = configuration(name, trust)
    with _explained(config, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, use_fast=True)
    return Source(model_config, tokenizer, weights, {})


def configuration(name: str, trust: bool):
    """The transformers configuration of the model `name`, without the attention that its maker trained it by.

    That may want a package and a card that are not here, and is no part of what the model is.
    """
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    for part in _parts(found):
        if "flash" in str(part._attn_implementation):
            part._attn_implementation = None
    return found


@contextlib.contextmanager
def _explained(config: Config, part: str):
    """Turn transformers' many exceptions into one message with the cure."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # whatever a model's files may raise
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        text = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and (
            "can't allocate memory" in text or "out of memory" in text.lower()
        ):
            raise  # World.together says so
        # A kind of positions, or of activation.
        if isinstance(error, KeyError) and re.fullmatch(r"'[\w.-]+'", text):
            text = f"transformers does not know {text}, which its config.json names"
        text = text.partition(" Model type should be one of ")[0]  # more than a hundred
        cure = _cure(error, text, here=Path(config.model).expanduser().is_dir())
        raise BadInput(
            f"model: {config.model}: its {part} cannot be loaded: {text[:300].rstrip('.')}. {cure}"
        ) from None


def _cure(error: Exception, text: str, here: bool) -> str:
    """What helps against transformers' `error`, which says `text`; here: whether the model is a directory's."""
    if "attention implementation" in text or "attn_implementation" in text:
        return "set attention to auto"
    if "does not recognize this architecture" in text:
        return (
            f"transformers {metadata.version('transformers')}, which this release of Trainyard has, does not know that "
            "kind of model: choose another, or wait for a release that has a newer one"
        )
    if "trust_remote_code" in text:
        return "this model brings its own Python code: if you trust it, set trust_remote_code to true"
    if "for this kind of AutoModel" in text:
        return "it does not write text token by token (a causal language model), and no other is trained here"
    if "module 'torch' has no attribute" in text:
        return "set dtype in its config.json to float32, bfloat16 or float16"
    if "untagged enum" in text:
        return f"its tokenizer.json is damaged, or of newer than tokenizers {metadata.version('tokenizers')}, as here"
    if cure := hub.cure(error, text):
        return cure
    if isinstance(error, ImportError):
        return "install what it names beside the trainer, in the same environment"
    # Of weights in parts, one may be missing from what is there.
    whole = not re.search(r"-\d{5}-of-\d{5}", text)
    if whole and "safetensors" in text and ("does not appear to have" in text or "no file named" in text):
        return (
            "weights must be safetensors; pickled ones, which can run code when they are read, are not: convert them "
            "elsewhere, or choose another repository of this model"
        )
    if here:
        return "the directory must hold config.json, tokenizer.json and safetensors that belong together"
    return (
        f"it is neither a directory here nor to be had from the Hugging Face hub. {hub.offline()}Check the name; "
        "on hosts without internet, download it elsewhere and give its directory"
    )


def _check(config: Config, found: Source) -> None:
    """Refuse a model that cannot be trained as configured."""
    name, tokenizer, model_config = config.model, found.tokenizer, found.config
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput(
            f"model: {name}: its tokenizer has no tokenizer.json; convert it with AutoTokenizer and save it"
        )
    if len(tokenizer) <= len(
        tokenizer.all_special_ids
    ):  # transformers makes an empty one where there is no file
        raise BadInput(f"model: {name}: no tokenizer in it; put its tokenizer.json beside config.json")
    if tokenizer.eos_token_id is None:
        raise BadInput(
            f"model: {name}: its tokenizer has no end-of-text token; set eos_token in its tokenizer_config.json"
        )
    text_config = model_config.get_text_config()
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id >= text_config.vocab_size:  # added to the tokenizer, and never embedded
        tokenizer.pad_token = tokenizer.eos_token  # padding carries no loss and no other token attends to it
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest and config.sequence_length > longest:
        raise BadInput(
            f"sequence_length {config.sequence_length} is more than the {longest} positions of model {name}; "
            f"set it to {longest} or less"
        )
    short = _short_positions(text_config)
    if short and config.sequence_length > short:
        raise BadInput(
            f"model: {name}: its positions (longrope) are other ones for all sequences of a micro-batch once one "
            f"document is longer than {short} tokens, so that the loss would hang on how sequences are shared out; set "
            f"sequence_length to {short} or less"
        )


def _short_positions(text_config) -> int | None:
    """Up to how many tokens a model with two kinds of positions has the first; None where it has one kind."""
    told = getattr(text_config, "rope_parameters", None) or {}
    of = getattr(text_config, "original_max_position_embeddings", None)
    kinds = [told, *(one for one in told.values() if isinstance(one, dict))]  # by the kind of layer
    found = [
        one.get("original_max_position_embeddings") or of
        for one in kinds
        if one.get("rope_type") == "longrope"
    ]
    return min(filter(None, found), default=None)


def _check_attention(config: Config, found: Source, device: torch.device) -> None:
    """Refuse an attention that is asked for and that model, environment or device do not have."""
    if config.attention == "auto":
        return
    from transformers import AutoModelForCausalLM

    common = {"attn_implementation": config.attention, "trust_remote_code": config.trust_remote_code}
    cure, flash = "set attention to auto", "flash" in config.attention
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(found.config), **common)
    except (ImportError, ValueError) as error:
        if flash and isinstance(error, ImportError):
            cure = f"install it beside the trainer, on hosts whose GPUs it knows, or {cure}"
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise BadInput(
            f"attention: model {config.model} cannot have {config.attention}: {text}; {cure}"
        ) from None
    if device.type == "cpu" and (flash or config.attention == "flex_attention"):
        lacking = "no form" if flash else "no backward pass"
        raise BadInput(
            f"attention: {config.attention} has {lacking} for a CPU, and this run computes on one; {cure}"
        )
    if config.attention == "flex_attention":
        _check_compiler("attention: flex_attention", cure, device)


def check_vocabulary(found: Source, largest_id: int) -> None:
    """Refuse data whose token ids the model has no embedding for."""
    size = found.config.get_text_config().vocab_size
    if largest_id >= size:
        raise BadInput(
            f"the tokenizer gives token id {largest_id}, the model's vocabulary has {size}: they do not belong "
            "together; give the model its own tokenizer's files"
        )


def _without_dropout(found: Source, world: World) -> None:
    """Switch dropout and the noise of routers off: they would tie the loss curve to the number of ranks."""
    for part in _parts(found.config):
        for name, value in list(vars(part).items()):
            random = any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter"))
            if (part.model_type, name) == ("phimoe", "router_jitter_noise"):
                random = False  # how near to the best expert another one must come, in use, too
            if random and isinstance(value, float | int) and value > 0:
                setattr(part, name, type(value)(0))
                found.dropout[name] = value
    if found.dropout and world.first:
        wanted = ", ".join(f"{name} {value}" for name, value in found.dropout.items())
        log(f"dropout of the model is off; its configuration has {wanted}")


def _parts(model_config) -> Iterator:
    """A model's configuration and those in it: of its text, its attention, its experts."""
    from transformers import PretrainedConfig

    yield model_config
    for one in list(vars(model_config).values()):
        if isinstance(one, PretrainedConfig):
            yield from _parts(one)


def _weights(config: Config, found: Source, world: World) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    common = {"trust_remote_code": config.trust_remote_code}
    if config.attention != "auto":
        common["attn_implementation"] = config.attention
    frozen = frozen_dtype(config)
    with _explained(config, "weights"):
        if found.weights is None:
            if config.quantize != "none":
                raise _nothing_to_quantise(config)
            model = AutoModelForCausalLM.from_config(found.config, **common)
            stored.replace(
                model, lambda one: one.to(frozen)
            )  # no buffers, such as the frequencies of positions
            for part in _parts(model.config):  # as it was made, its checkpoints would tell, and be read so
                if getattr(part, "dtype", None) is not None:
                    part.dtype = frozen
            return senses.freeze(model)
        quantised = quantize.settings(config, found.config)
        if quantised is not None:
            common["quantization_config"] = quantised
        if quantised is not None or getattr(found.config, "quantization_config", None) is not None:
            # Strategy split takes layers from the CPU's memory to several devices.
            place = torch.device("cpu") if config.strategy == "split" else world.device
            common["device_map"] = {"": place}
        model = whole(
            *AutoModelForCausalLM.from_pretrained(
                found.weights,
                config=found.config,
                use_safetensors=True,
                dtype=frozen,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **common,
            ),
            found.weights,
        )
        if getattr(model, "is_quantized", False):
            return quantize.prepared(model, getattr(torch, config.dtype))
        return senses.freeze(model)


def whole(model, told: dict, name: str):
    """`model`, with `left_out`: the names of weights in its files that it has no place for.

    told: what from_pretrained tells with output_loading_info. Raises BadInput as `check_fit` does.
    """
    missing = set(told["missing_keys"]) & {key for key, _ in model.named_parameters()}
    check_fit(type(model).__name__, name, missing, told["mismatched_keys"])
    model.left_out = sorted(told["unexpected_keys"])
    return model


def check_fit(kind: str, name: str, missing: Iterable[str], other: Iterable[tuple]) -> None:
    """Raise BadInput where files of `name` lack weights of a model of this kind, which transformers makes up then.

    other: those of another shape there: (weight, shape there, shape here).
    """
    for key, there, here in sorted(other)[:1]:
        raise BadInput(
            f"{name}: {key} is {tuple(there)} in its safetensors, and {tuple(here)} by its config.json; expected the "
            "same: its config.json is another model's, or was left as it was when the weights were changed "
            "(vocab_size); correct it"
        )
    if missing := sorted(missing):
        raise BadInput(
            f"{name}: found no {some(missing, 3)} in its safetensors; expected all weights of {kind}, for what is "
            "missing would be random. It was saved without its head (AutoModel), names weights otherwise, or a file of "
            "it is not here: save it anew (AutoModelForCausalLM), or copy it whole"
        )


def _nothing_to_quantise(config: Config) -> BadInput:
    return BadInput(
        f"model: {config.model} starts from random weights; quantised ones cannot be trained from nothing: "
        "give a model with weights, or set quantize to none"
    )


def frozen_dtype(config: Config) -> torch.dtype:
    """The format of weights that are not trained; of all, where there is no adapter."""
    return HALF.get(config.dtype, torch.float32) if config.adapter != "none" else torch.float32


def _without_weights(config: Config, found: Source) -> torch.nn.Module | None:
    """The model with its weights on the meta device, its adapter and buffers in memory, and `stored`.

    None where its weights must be read as a whole: random ones, and files that name or shape tensors otherwise than
    the model does.
    """
    quantised = quantize.settings(config, found.config)
    on_disk = getattr(found.config, "quantization_config", None)
    if found.weights is None:
        return None
    from transformers import AutoModelForCausalLM, GenerationConfig

    common = {"trust_remote_code": config.trust_remote_code, "dtype": frozen_dtype(config)}
    if config.attention != "auto":
        common["attn_implementation"] = config.attention
    with _explained(config, "weights"):
        directory = _fetched(found.weights)
        with stored.weightless():
            # Its own configuration: made empty, it would be another one to who then reads the weights as a whole.
            model = senses.freeze(AutoModelForCausalLM.from_config(copy.deepcopy(found.config), **common))
        _keep_wide(model, common["dtype"])
        if on_disk is not None:
            model = quantize.emptied(model, on_disk, on_disk=True, dtype=getattr(torch, config.dtype))
        files = stored.find(directory, model, quantize.empty(model))
        if files is None:
            return None
        if quantised is not None:
            model = quantize.emptied(model, quantised, on_disk=False, dtype=getattr(torch, config.dtype))
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        if config.adapter == "lora":
            # The adapter is made where its layer is: for that moment on the CPU, in no memory.
            with quantize.standing_in(model):
                stored.replace(
                    model,
                    lambda one: torch.zeros((), dtype=one.dtype).expand(one.shape) if one.is_meta else None,
                )
                whole = {id(one) for one in model.parameters() if one.is_floating_point()}
                model = lora.add(model, config)
            stored.replace(model, lambda one: one.to("meta") if id(one) in whole else None)
            names = [name for name, one in model.named_parameters() if one.is_meta]
            files = files.renamed({name: lora.original_name(name) for name in names})
    model.stored = files
    return model


def _keep_wide(model, dtype: torch.dtype) -> None:
    """Have float32 what transformers keeps so when it reads a model in 16 bits itself, as routers' corrections are."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    wide = re.compile("|".join(name.replace("*", ".*") for name in plan))
    for name, part in model.named_modules():
        for own, buffer in part.named_buffers(recurse=False):
            if wide.search(f"{name}.{own}"):
                part._buffers[own] = buffer.float()
    kept = {id(one) for name, one in model.named_parameters() if wide.search(name)}
    stored.replace(model, lambda one: one.float() if id(one) in kept else None)


def _fetched(weights: str) -> Path:
    """The directory of a model's files; those of the hub are downloaded to its cache unless they are there."""
    if Path(weights).is_dir():
        return Path(weights)
    return hub.snapshot(
        weights, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=list(hub.NOT_OURS)
    )


def _loaded(weights: str) -> list[Path]:
    """The files of a model's weights that have been loaded; none where that cannot be told."""
    if Path(weights).is_dir():
        return files_of(Path(weights))
    import huggingface_hub

    path = huggingface_hub.try_to_load_from_cache(weights, "config.json")
    return files_of(Path(path).parent) if isinstance(path, str) else []


def remake(config: Config, tokenizer) -> torch.nn.Module:
    """The random weights that a run with `config` and `tokenizer` started from: the base of its adapter.

    As in the run: equal where torch and the kind of CPU are. Dropout stays as the model's configuration has it.
    """
    if config.model == "tiny":
        found = Source(_tiny(config, len(tokenizer), tokenizer.eos_token_id), tokenizer, None, {})
    else:
        found = _pretrained(config)
    return _weights(config, found, None)


def restore_dropout(directory: Path, dropout: dict) -> None:
    """Write into a saved model's config.json what the model's maker said of dropout; in training it was off."""

    def settle(part):
        for name, value in part.items():
            if isinstance(value, dict):
                settle(value)
            elif name in dropout and value == 0:
                part[name] = dropout[name]

    path = directory / "config.json"
    if dropout and path.is_file():  # an adapter has none
        content = json.loads(path.read_text())
        settle(content)
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _check_compiler(what: str, cure: str, device: torch.device) -> None:
    """Refuse `what`, which is by torch.compile, where that lacks a compiler or Python's headers; or else `cure`."""
    compilers = ("g++", "clang++") if device.type == "cpu" else ("gcc", "clang", "cc")
    if not any(map(shutil.which, compilers)):
        raise BadInput(
            f"{what}: there is no compiler here, which torch.compile needs ({' or '.join(compilers)}); install one "
            f"(apt install g++), or {cure}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise BadInput(
            f"{what}: torch.compile needs Python's headers, and {header} is not there; install them "
            f"(apt install python{sysconfig.get_python_version()}-dev), or {cure}"
        )
    on_card = device.type == "cuda" and torch.cuda.is_available()
    if on_card and torch.cuda.get_device_capability(device) < COMPILED:
        raise BadInput(
            f"{what}: torch.compile writes no code for the {torch.cuda.get_device_name(device)} (compute capability "
            f"below {COMPILED[0]}.{COMPILED[1]}); {cure}"
        )


def _compile(model: torch.nn.Module, world: World) -> None:
    """Have each layer compiled at its first pass: layers are alike, so that one compilation serves them all."""
    from trainer.strategies.sharded import blocks

    if world.device.type == "cpu":
        # A C++ compiler that is killed leaves half a library behind, which every later start would stumble over.
        # A host's own: it is for its CPU, also where hosts share the directory.
        place = world.environment.run_dir / "compiled" / world.environment.host
        if world.environment.first_on_host:
            shutil.rmtree(place, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)
    layers = blocks(model)
    for block in layers:
        block.compile()
    if not layers and world.first:
        log(
            "warning: compile: transformers names no layers of this model, so that nothing is compiled; set compile to "
            "false"
        )


def architecture(model: torch.nn.Module) -> str:
    """A hash of the names and shapes of the parameters that are trained."""
    shapes = [
        (name, list(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def behaviour(found: Source) -> dict[str, object]:
    """How the model computes, by its configuration's keys, `config.KEY`: equal shapes may be of another model."""
    from transformers import PreTrainedConfig

    beside = {*PreTrainedConfig().to_dict(), "use_cache", "auto_map", "quantization_config"} - {"model_type"}

    def flat(name: str, value):
        if isinstance(value, dict):
            for key, one in value.items():
                yield from flat(f"{name}.{key}", one)
        else:
            yield name, json.dumps(value) if isinstance(value, list) else value

    said = json.loads(found.config.get_text_config().to_json_string(use_diff=False))
    kept = {
        key: one
        for key, one in said.items()
        if not (key in beside or key.startswith("_") or key.endswith("_token_id"))
    }
    return dict(flat("config", kept))


def frozen(config: Config, found: Source, world: World) -> dict:
    """What an adapter was trained for and no checkpoint of it holds, by name: the model's own weights, its scale.

    Of the weights each host's digest: hosts may have them in other files. Once the model is built; all ranks must call.
    """
    if config.adapter != "lora":
        return {}

    def digest():
        with _explained(config, "weights"):
            files = _loaded(found.weights) if found.weights else []
        return stored.digest(files) if files else None

    digests = sorted(set(filter(None, world.gather(world.together(digest)))))
    return {"lora_alpha": config.lora_alpha, **({"frozen weights": digests} if digests else {})}


def tokenizer_digest(tokenizer) -> str:
    """A hash of all that the tokenizer does to a text, and of the token that ends one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = f"{tokenizer.eos_token_id} {backend.to_str() if backend else tokenizer!r}"
    return hashlib.sha256(text.encode()).hexdigest()
