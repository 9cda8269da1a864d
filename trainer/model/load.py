"""The model and tokenizer that `model` names, with equal weights on every rank."""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.config import Config
from trainer.data import tokenizer as own_tokenizer
from trainer.errors import BadInput
from trainer.world import World, log


@dataclass(frozen=True)
class Source:
    """Where a model comes from: its transformers configuration, its tokenizer, and its weights, if any."""

    config: object
    tokenizer: object
    weights: str | None  # a directory or hub name; None: random weights


def source(config: Config, world: World) -> Source:
    """Find model and tokenizer; no weights are read yet.

    All ranks must call. Raises BadInput with the cure.
    """
    if config.model == "tiny":
        text = world.together(lambda: own_tokenizer.train(config) if world.first else None)
        tokenizer = own_tokenizer.wrap(world.share(text))
        found = Source(_tiny(config, len(tokenizer), tokenizer.eos_token_id), tokenizer, None)
    else:
        found = world.together(lambda: _pretrained(config))
        digests = world.gather(tokenizer_digest(found.tokenizer)[:12])
        world.same("tokenizer", digests, "give every host the same files of the model")
    world.together(lambda: _check(config, found))
    _without_dropout(found.config, world)
    return found


def build(config: Config, found: Source, world: World) -> torch.nn.Module:
    """The model, float32, on the rank's device, in training mode; equal weights on all ranks.

    All ranks must call.
    """
    model = world.together(lambda: _weights(config, found))
    model.to(dtype=torch.float32)
    _equalise(model, world)
    return model.to(world.device).train()


def _tiny(config: Config, vocabulary: int, end_id: int):
    """A GPT-2 of about a million parameters: two CPU cores teach it something to see in minutes."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=config.sequence_length,
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
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path)
        if not (path / "config.json").exists():
            raise BadInput(
                f"model: {name}: no config.json in this directory; give a model in transformers' format"
            )
        if list(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
            weights = name
        elif list(path.glob("pytorch_model*")) or list(path.glob("*.ckpt")):
            raise BadInput(
                f"model: {name}: its weights are pickled, which can run code when loaded; "
                "save them as safetensors: model.save_pretrained(directory)"
            )
        else:
            weights = None
    elif path.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        kind = "not a directory" if path.exists() else "no such directory"
        raise BadInput(
            f"model: {name}: {kind}; give tiny, a model's directory or a name on the Hugging Face hub"
        )
    else:
        weights = name

    from transformers import AutoConfig, AutoTokenizer

    with _explained(config, "configuration"):
        model_config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    with _explained(config, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, use_fast=True)
    return Source(model_config, tokenizer, weights)


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
        if "trust_remote_code" in text:
            cure = "this model brings its own Python code: if you trust it, set trust_remote_code to true"
        elif not Path(config.model).expanduser().is_dir():
            offline = (
                " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
            )
            cure = (
                f"it is neither a directory here nor to be had from the Hugging Face hub.{offline} Check the name; "
                "on hosts without internet, download it elsewhere and give its directory"
            )
        else:
            cure = "the directory must hold config.json, tokenizer.json and safetensors that belong together"
        raise BadInput(f"model: {config.model}: its {part} cannot be loaded: {text[:300]}. {cure}") from None


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
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding carries no loss and no other token attends to it
    text_config = model_config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest and config.sequence_length > longest:
        raise BadInput(
            f"sequence_length {config.sequence_length} is more than the {longest} positions of model {name}; "
            f"set it to {longest} or less"
        )


def check_vocabulary(found: Source, largest_id: int) -> None:
    """Refuse data whose token ids the model has no embedding for."""
    size = found.config.get_text_config().vocab_size
    if largest_id >= size:
        raise BadInput(
            f"the tokenizer gives token id {largest_id}, the model's vocabulary has {size}: they do not belong "
            "together; give the model its own tokenizer's files"
        )


def _without_dropout(model_config, world: World) -> None:
    """Switch dropout off: it would tie the loss curve to the number of ranks."""
    wanted = []
    for part in {id(one): one for one in (model_config, model_config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float | int) and value > 0:
                setattr(part, name, 0.0)
                wanted.append(f"{name} {value}")
    if wanted and world.first:
        log(f"dropout is off in this version; the model's configuration wanted {', '.join(wanted)}")


def _weights(config: Config, found: Source) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    with _explained(config, "weights"):
        if found.weights is None:
            return AutoModelForCausalLM.from_config(
                found.config, attn_implementation="sdpa", trust_remote_code=config.trust_remote_code
            )
        return AutoModelForCausalLM.from_pretrained(
            found.weights,
            config=found.config,
            use_safetensors=True,
            attn_implementation="sdpa",
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
        )


def _equalise(model: torch.nn.Module, world: World) -> None:
    """Compare the ranks' weights; where they differ (another CPU, another file), all take rank 0's."""
    if world.size == 1:
        return
    tensors = [*model.parameters(), *model.buffers()]
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    digests = world.gather(total.hexdigest())
    if len(set(digests)) > 1:
        others = sorted({world.hosts[rank] for rank, one in enumerate(digests) if one != digests[0]})
        if world.first:
            log(f"the weights on {', '.join(others)} differ from rank 0's; all ranks take rank 0's")
        for tensor in tensors:
            world.broadcast(tensor.data, source=0)


def architecture(model: torch.nn.Module) -> str:
    """A hash of the names and shapes of the model's parameters."""
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def tokenizer_digest(tokenizer) -> str:
    """A hash of all that the tokenizer does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return hashlib.sha256((backend.to_str() if backend else repr(tokenizer)).encode()).hexdigest()
