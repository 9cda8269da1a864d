"""`trainer export`: a run's adapter or model, for everyone's tools."""

import collections
import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer import disk
from trainer.errors import BadInput, TrainerError
from trainer.model import card, saved


def main(directory: Path, out: Path, merge: bool, base: str | None, dtype: str, trust: bool) -> int:
    """Write the adapter or the model in `directory` to `out`, which appears complete.

    merge: an adapter goes into its base, so that a transformers model comes out. trust: a model's own code may run.
    Raises BadInput for what cannot be opened, and where `out` is there already.
    """
    found = saved.find(directory)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out}: is there already; name a new directory")
    if not out.parent.is_dir():
        raise BadInput(f"{out.parent}: no such directory")
    if dtype != "auto" and found.adapter and not merge:
        raise BadInput("--dtype is for whole models; with an adapter, add --merge")

    try:
        with _place(out) as temporary:
            _write(found, temporary, merge, base, dtype, trust)
            disk.publish(temporary, out)
    except OSError as error:
        raise TrainerError(f"{out}: cannot be written: {error}") from None
    kind = "adapter" if found.adapter and not merge else "model"
    print(f"{kind} of {found.path} written to {out}")
    return 0


@contextlib.contextmanager
def _place(out: Path) -> Iterator[Path]:
    """The directory where `out` grows, empty, for as long as within; this process's alone. Raises OSError.

    One that was interrupted may still be at work there, as a host's is whose controller had a Ctrl-C: BadInput.
    """
    place = out.with_name(f".{out.name}.tmp")
    place.mkdir(exist_ok=True)
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # NFS has no such lock on a directory
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"{out}: another export writes it just now; wait for its end") from None
        try:
            for left in place.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield place
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _write(
    found: saved.Saved, temporary: Path, merge: bool, base: str | None, dtype: str, trust: bool
) -> None:
    """All of an export."""
    merged = ""
    if found.adapter and not merge:
        found = _beside(found, base or found.base_elsewhere)
        _copy_adapter(found, temporary)
    else:
        written = _write_model(found, base, dtype, trust, temporary)
        merged = written if found.adapter else ""
    card.write(
        temporary,
        found.facts,
        adapter=None if merge else found.adapter,
        merged=merged,
    )
    for file in temporary.rglob("*.safetensors"):
        file.chmod(0o644 & ~_umask())  # safetensors writes for its owner alone


def _beside(found: saved.Saved, base: str | None) -> saved.Saved:
    """An adapter with the name of its base: the place of one that was brought means nothing elsewhere."""
    facts = found.facts
    if found.settings:
        facts = {**facts, "settings": {**found.settings, "model": base}}
    return dataclasses.replace(found, adapter={**found.adapter, "base_model_name_or_path": base}, facts=facts)


def _copy_adapter(found: saved.Saved, directory: Path) -> None:
    """The adapter as peft has written it, with its tokenizer, and the name of its base."""
    for file in found.path.iterdir():
        if file.is_file() and file.name not in ("optimizer.safetensors", "manifest.json", "README.md"):
            shutil.copyfile(file, directory / file.name)
        elif file.name == "additional_chat_templates":
            shutil.copytree(file, directory / file.name, copy_function=shutil.copyfile)
    saved.write_adapter(directory, found.adapter)
    if found.base == "tiny":
        print("note: its base has random weights, which no other tool can make: --merge writes a whole model")


def _write_model(found: saved.Saved, base: str | None, dtype: str, trust: bool, directory: Path) -> str:
    """All weights, in transformers' format, with the tokenizer; returns the weights' number format."""
    model, tokenizer = saved.open_model(found, base, dtype, trust)
    if found.adapter:
        model = _merged(model, found)
    # A checkpoint names weights as the model does, and others' tools want them as published: experts one by one, say.
    if not getattr(model, "_weight_conversions", None):
        model._weight_conversions = None  # transformers' own for this kind of model
    model.save_pretrained(directory)
    saved.name_end_of_turn(directory, model, tokenizer)
    tokenizer.save_pretrained(directory)
    return str(model.dtype).removeprefix("torch.")


def _merged(model, found: saved.Saved):
    """The model in peft's `model`, the adapter a part of its weights."""
    from trainer.world import lacks_memory

    why = ""
    if model.active_peft_config.is_prompt_learning:
        why = f"it goes before the text ({model.active_peft_config.peft_type.value}) and changes no weights"
    elif found.adapter.get("layer_replication"):
        why = "it repeats layers of its base, which share their weights, and no file of a whole model can say so"
    elif tied := _tied(model):
        why = f"it is beside {tied}, whose weights its base has in another place, too (tied): both would be changed"
    try:  # peft's methods each have errors of their own
        merged = None if why else model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        if lacks_memory(error):
            raise
        why = " ".join(str(error).split())[:300].rstrip(".")
    if why:
        raise BadInput(
            f"{found.path}: the adapter cannot go into its base: {why}; without --merge it is written as it is"
        )
    return merged


def _tied(model) -> str:
    """A layer that the adapter in peft's `model` is beside, and of whose weights another layer's are the same."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # which has both changed
    from peft.tuners.tuners_utils import BaseTunerLayer

    places = collections.Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        beside = isinstance(layer, BaseTunerLayer) and not isinstance(layer, TrainableTokensLayer)
        if beside and any(places[id(one)] > 1 for one in layer.get_base_layer().parameters()):
            return name.rpartition(".")[2]
    return ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
