"""`trainer check`: configuration, data and model validated, or checkpoints; nothing trained."""

import contextlib
import os
import tempfile
from pathlib import Path

from trainer.config import Config
from trainer.data import read
from trainer.environment import Environment
from trainer.errors import BadInput


def main(config: Config, environment: Environment, config_only: bool) -> int:
    """Print what was found; raises BadInput that lists every problem at once.

    `config_only` needs no torch.
    """
    if config_only:
        print(f"configuration of run '{config.run}': good")
        return 0
    problems, samples, letters = [], 0, 0
    taken: list[read.Taken] = []
    try:
        samples, letters = read.check(config, tell=taken.append)
    except BadInput as error:
        problems.append(str(error))
    good_data = not problems

    from trainer import sinks
    from trainer.model import load
    from trainer.world import World

    try:
        sinks.check(config)
    except BadInput as error:
        problems.append(str(error))
    world = World(config, environment, trains=False)
    if good_data or config.model != "tiny":  # its tokenizer needs the data
        try:
            problems += refused(
                config, load.source(config, world), environment.cache_dir, world.device.type, good_data
            )
        except BadInput as error:
            problems.append(str(error))
    if problems:
        raise BadInput("\n".join(problems))
    print(*taken, sep="\n")
    print(
        f"run '{config.run}': configuration, data ({samples:,} samples, {letters:,} characters) and model are good"
    )
    return 0


def refused(config: Config, found, cache_dir: Path, device: str, good_data: bool = True) -> list[str]:
    """What training would refuse of `found`, a load.Source, only once it has tokenised the data or built the model.

    No weights are read. cache_dir: where training keeps tokenised data. device: cpu, cuda. good_data: the data can be
    read, so that what its tokens are has a say.
    """
    import torch

    from trainer.model import load, loss, packing, router
    from trainer.strategies import sharded

    problems = []

    def build():
        if model := load.rehearse(config, found):
            router.coefficient(config, model)

    for look in (
        build,
        lambda: loss.check(config, torch.device(device)),
        lambda: sharded.offload_folder(config),
        lambda: packing.foresee(config, found.config),
        lambda: good_data and _check_samples(config, found, cache_dir),
    ):
        try:
            look()
        except BadInput as error:
            problems.append(str(error))
    return problems


def _check_samples(config: Config, found, cache_dir: Path) -> None:
    """Refuse what training would: exchanges that the template does not take, or whose answers cannot be told; what is
    too long, and may not be cut; ids that the model has no embedding for.

    The data is tokenised, as training does it, only where one of these may be: the tokenizer has such ids (of many it
    is padding alone), or a single sample may be refused. Then training finds it done, where this is its host.
    """
    from trainer.data import chat, pack, read
    from trainer.model import load

    everything = read.everything(config)
    chat.settle_template(found.tokenizer, {read.kind(one, config) for one in everything}, config.model)
    beyond = max(found.tokenizer.get_vocab().values()) >= found.config.get_text_config().vocab_size
    chats = any(next(read.samples(one, config)).messages for one in everything)
    if not (beyond or chats or config.overlong == "refuse" or config.loss_on == "answers"):
        return
    with contextlib.ExitStack() as stack:
        if not os.access(cache_dir, os.W_OK):
            cache_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        both = pack.prepare(config, read.digests(config), found.tokenizer, cache_dir)
        load.check_vocabulary(found, max(one.largest_id for one in both if one))


def checkpoints(directory: Path) -> int:
    """Print what is in the checkpoint `directory`, or in those of a run; raises BadInput that names every damage."""
    from trainer import checkpoint

    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    single = (directory / "manifest.json").exists() or directory.name.startswith("step-")
    paths = [directory] if single else sorted(directory.glob("step-*"))
    if not paths:
        raise BadInput(
            f"{directory}: neither a checkpoint (step-…, with a manifest.json) nor a run with checkpoints"
        )
    problems = []
    for path in paths:
        try:
            manifest = checkpoint.validate(path)
        except BadInput as error:
            problems.append(str(error))
            continue
        size = sum(one["bytes"] for one in manifest["files"].values())
        copies = " and ".join(one["host"] for one in manifest.get("copies", [])) or "this host"
        print(f"{path}: good; step {manifest['step']}, {size / 2**20:,.1f} MiB, written on {copies}")
    if problems:
        raise BadInput("\n".join(problems))
    return 0
