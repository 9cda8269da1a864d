"""Whether a model keeps documents apart, be they in one sequence or computed at once: measured, and masks given to one
that needs them in a packed sequence.

And whether its logits are its head's product with what its layers give, and nothing else: measured, too.
"""

import contextlib
import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F

from trainer.config import Config
from trainer.errors import BadInput
from trainer.model import load, stored
from trainer.model.loss import TokenLoss, autocast, not_for_liger
from trainer.world import World, log

UNPACKED = "set packing to false, which gives each document a sequence of its own"


def check(config: Config, module: TokenLoss, world: World) -> None:
    """Refuse a model whose tokens see other documents of their packed sequence, as those with recurrent layers do.

    Measured, with a strategy's TokenLoss and where it computes. A model that does not take the borders from the
    positions gets masks from now on, where these keep the documents apart. Of sequences of one document each (packing:
    false) a model is refused which computes one otherwise beside others. All ranks must call.
    """
    if any(world.gather(world.together(lambda: _mixes(config, module, world.device)))):
        world.together(lambda: _mask(config, module, world.device))
    if not module.headless:
        return
    if any(world.gather(world.together(lambda: _head_is_not_all(config, module, world.device)))):
        module.whole()
        if world.first:
            log("the model has more for a head than a matrix: all logits of a micro-batch are there at once")


def _head_is_not_all(config: Config, module: TokenLoss, device: torch.device) -> bool:
    """Whether the loss of a few tokens in chunks, which asks the model without its head, is not that of its logits.

    As of models with a layer or a norm between the two. The likeliest tokens are asked for, whose loss tells most.
    """
    length = 8
    vocabulary = module.model.config.get_text_config().vocab_size
    inputs = torch.arange(length, device=device).remainder(vocabulary)[None]
    positions = torch.arange(length, device=device)[None]
    with torch.no_grad(), autocast(device, config.dtype), _eager(config):
        logits = module(inputs, None, positions).float()
        labels = logits.argmax(-1)
        chunk, module.chunk = module.chunk, length - 1
        try:
            found = module(inputs, labels, positions).float()
        except (AttributeError, TypeError):  # a model's own code may have its layers answer otherwise
            return True
        finally:
            module.chunk = chunk
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return bool((found - expected).abs() > length * _near(config, logits))


def _near(config: Config, logits: torch.Tensor) -> torch.Tensor:
    """How far logits may be from others that are meant to be the same.

    A mixture-of-experts layer groups tokens by expert, so that sums may differ in the last bits.
    """
    return (1e-4 if config.dtype == "float32" else 2e-2) * logits.abs().max()


def _eager(config: Config) -> contextlib.AbstractContextManager:
    """Nothing is compiled for the shape of a trial."""
    compiled = config.compile or config.attention == "flex_attention"
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _mask(config: Config, module: TokenLoss, device: torch.device) -> None:
    """Have masks tell `module` the documents' borders; raises BadInput where that does not help."""
    if not module.packed:
        raise BadInput(
            f"model: {config.model}: what it makes of a sequence depends on the others that are computed at once with "
            "it, and so on who computes which; choose another model"
        )
    module.masked = not module.flash
    try:
        mixes = module.flash or _mixes(config, module, device)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # what architectures that take no such mask stumble over has no type of its own
        mixes = True
    if mixes:
        raise BadInput(
            f"model: {config.model}: its tokens see other documents in a packed sequence (recurrent layers, or an "
            f"attention that takes neither positions nor masks); {UNPACKED}, or choose another model or attention"
        )


def _mixes(config: Config, module: TokenLoss, device: torch.device) -> bool:
    """Whether what comes out for a document depends on the others of its sequence, or on its place there.

    Of two rows of two documents the first one is changed; the second one is the first of the other row, too. A third
    row is one document, whose last token is changed: raises BadInput where earlier ones see it. Where a row is never
    more than one document, it is only asked whether a row depends on the others.
    """
    length, half = 8, 4
    vocabulary = module.model.config.get_text_config().vocab_size
    row = torch.arange(length, device=device) % (vocabulary - 1)
    one = torch.stack([row, row.roll(half), row])
    positions = torch.arange(length, device=device).repeat(3, 1)
    positions[:2] %= half
    other = one.clone()
    other[0, :half] += 1
    other[2, -1] += 1
    try:
        with torch.no_grad(), autocast(device, config.dtype), _eager(config):
            before, after = (module(inputs, None, positions).float() for inputs in (one, other))
    except TypeError as error:
        raise BadInput(
            f"model: {config.model}: it does not take what tells documents apart in a packed sequence ({error}); "
            f"{UNPACKED}, or choose another model or attention"
            if module.packed
            else f"model: {config.model}: it does not take what this trainer gives to models ({error}); choose another"
        ) from None
    except (
        ImportError,
        NotImplementedError,
        ValueError,
    ) as error:  # transformers' and the kernels' own refusals
        raise BadInput(
            f"model: {config.model}: it cannot compute {'packed ' if module.packed else ''}sequences here: "
            f"{' '.join(str(error).split())[:300]}; choose another model or attention"
        ) from None
    near = _near(config, before)

    def differ(some: torch.Tensor, others: torch.Tensor) -> bool:
        return bool((some - others).abs().max() > near)

    rows = differ(before[1], after[1])
    if not rows and differ(before[2, :-1], after[2, :-1]):
        raise BadInput(
            f"model: {config.model}: its tokens see those that come after them, as an encoder's do; this trainer "
            "teaches to foretell these, so choose a model that is made to generate text"
        )
    if not module.packed:
        return rows
    second = before[0, half:]
    return rows or differ(second, after[0, half:]) or differ(second, before[1, :half])


def _foreseen(config: Config, model_config) -> tuple[Config, TokenLoss | None]:
    """How a model can be tried without its weights, on the CPU; None where it cannot be made (load.rehearse)."""
    plain = dataclasses.replace(config, dtype="float32", compile=False)
    try:
        return plain, TokenLoss(_stand_in(plain, model_config), packed=config.packing)
    except Exception:  # whatever a model's own code raises
        return plain, None


def head_is_not_all(config: Config, model_config) -> bool:
    """As `check` finds out before the first step, without the model's weights; for the room that all logits take."""
    return _foreseen_head(*_foreseen(config, model_config))


def _foreseen_head(plain: Config, module: TokenLoss | None) -> bool:
    """As `head_is_not_all`, of what `_foreseen` has made."""
    try:
        return bool(module and module.headless) and _head_is_not_all(plain, module, torch.device("cpu"))
    except Exception:  # as there
        return False


def foresee(config: Config, model_config) -> None:
    """As `check`, without the model's weights and before any rank has them: quick, and of the CPU.

    model_config: transformers' own. What a GPU's own attention makes of it, training alone can tell.
    """
    if config.attention not in ("auto", "eager", "sdpa"):
        return
    plain, module = _foreseen(config, model_config)
    if module is None:
        return
    if config.loss_kernel == "liger" and _foreseen_head(plain, module):
        raise not_for_liger(module.model)
    try:
        mixes = _mixes(plain, module, torch.device("cpu"))
    except BadInput:
        raise
    except Exception:  # what a model's own code stumbles over here is not what it will have
        return
    if mixes:
        _mask(plain, module, torch.device("cpu"))


def _stand_in(config: Config, model_config) -> nn.Module:
    """The model with its first layers, until there is one of each kind, without a head; weights that need no memory."""
    from trainer.strategies.sharded import blocks

    with stored.weightless():
        model = load.in_training(load.unloaded(config, model_config))
    layers = {id(one) for one in blocks(model)}
    kinds = getattr(model_config.get_text_config(), "layer_types", None) or [None] * len(layers)
    for part in list(model.modules()):
        if isinstance(part, nn.ModuleList) and {id(one) for one in part} & layers:
            seen = [(kind, str(layer)) for kind, layer in zip(kinds, part, strict=False)]
            del part[max(map(seen.index, seen)) + 1 :]
    load.one_by_one(model)  # others want experts that follow each other in memory
    generator = torch.Generator().manual_seed(0)

    def weight(parameter: nn.Parameter) -> torch.Tensor:
        """Random numbers of which each serves in many places: no row, column or expert is another's."""
        if parameter.ndim < 2:
            return torch.randn(parameter.shape, generator=generator) * 0.1 + 1
        numbers = torch.randn(sum(parameter.shape), generator=generator) * parameter.shape[-1] ** -0.5
        return numbers.as_strided(parameter.shape, [1] * parameter.ndim)

    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(nn.Linear(head.in_features, 16))  # a whole vocabulary takes its time
    stored.replace(model, weight)
    return model
