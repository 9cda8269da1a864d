"""`trainer train`: one rank of a run, from configuration to finished model."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer import checkpoint, collectives, disk, metrics, optim, recorder, room, sinks, strategies
from trainer.balance import Balance, miscounted
from trainer.balance import shares as even
from trainer.cluster import store
from trainer.config import Config
from trainer.data import pack, read, records
from trainer.data.index import Index, last_step
from trainer.environment import BEGUN, Environment, StopSignal, keep_freed_memory
from trainer.errors import BadInput, Diverged, OutOfMemory, Stopped, TrainerError
from trainer.loop import Progress, Run, train
from trainer.model import card, flops, loss, packing, router, saved
from trainer.model import load as model_load
from trainer.model.loss import TokenLoss
from trainer.snapshot import buffers
from trainer.strategies import sharded, split
from trainer.strategies.base import Strategy
from trainer.tensor_file import TensorFile
from trainer.words import count
from trainer.world import World, log, translated, versions

# Seconds by which the rank that writes status.json comes first to the tokenising, so that it can tell of it.
HEAD_START = 0.2
STAGED, MADE = ".weights.tmp", ".model.tmp"  # beside a run's model, until that is complete
LOOK = 1.0  # seconds between two looks for a host with the checkpoint to go on from


def main(config: Config, environment: Environment, stop_signal: StopSignal) -> int:
    """Train; returns the exit code. Every ending is written to status.json and, as `error: …`, to the log."""
    status, own = None, False
    at_once = Stopped("ended before the first step, at once; start it again to go on")

    def end(failure: TrainerError, own: bool = False) -> int:
        """Write this ending down; own: a failure that the other ranks do not know of."""
        stop_signal.nothing_to_save = False  # no Ctrl-C comes between this ending and its words
        word = "stopped" if failure.code == Stopped.code else "failed"
        with contextlib.suppress(OSError):
            if status:
                status.update(state=_last_state(word), reason=str(failure))
            if not _launched():  # a launcher has to see it, too, and removes it
                environment.stop_file.unlink(missing_ok=True)
        print(f"{'stopped' if word == 'stopped' else 'error'}: {failure}", flush=True)
        if own and not (environment.first_on_host or _launched()):
            # torchrun's terminal does not show this rank's words.
            print(f"error: rank {environment.rank}: {failure}", file=sys.__stderr__, flush=True)
        if environment.world_size > 1 or failure is at_once:  # what others' threads do is not waited for
            _leave(failure.code)
        return failure.code

    stop_signal.leave = lambda: end(at_once)
    try:
        environment.run_dir.mkdir(parents=True, exist_ok=True)
        if environment.first_on_host and not _launched():
            environment.stop_file.unlink(
                missing_ok=True
            )  # of whom asked this run's last start, after its last step
        if environment.first_on_host:
            status = metrics.Status(
                environment.run_dir,
                run=config.run,
                attempt=environment.attempt,
                world_size=environment.world_size,
                host=environment.host,
                note=os.environ.get("TRAINYARD_REASON") or None,
                metrics_port=config.metrics_port or None,
            )
            # While it loads, what may be gone on from stays known.
            status.update(
                state="starting",
                last_checkpoint=metrics.read_status(environment.run_dir).get("last_checkpoint"),
            )
        torch.set_num_threads(
            config.threads or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)
        )
        with translated():
            world = World(config, environment)
            world.find_sharers(environment.run_dir)
        if not world.keeps:
            status = None
        with translated(world):
            _train(config, world, status, stop_signal)
        if environment.world_size > 1:
            _leave(0)
        return 0
    except TrainerError as error:
        failure, own = error, isinstance(error, OutOfMemory) and not error.of_all
    except KeyboardInterrupt:
        failure = at_once
    except OSError as error:
        own = True
        failure = TrainerError(f"{environment.run_dir}: {error}; look at the disk and at who may write there")
    except Exception as error:
        own = True
        traceback.print_exc()
        failure = TrainerError(
            f"a fault of the trainer itself, please report it: {type(error).__name__}: {error}"
        )

    return end(failure, own)


def _train(config: Config, world: World, status, stop_signal) -> None:
    """The whole of a run: data, model, what a checkpoint has kept, steps, results. All ranks go through it together."""
    begin, environment = time.time(), world.environment
    watch = collectives.Watch(environment.run_dir, world.rank)
    if world.size > 1:
        watch.start()
    shares = _shares(config, world)  # refuse early what the ranks cannot share
    split.check(config, world)
    world.together(lambda: loss.check(config, world.device))
    world.together(lambda: sharded.offload_folder(config))
    # Later the first rank may be another host's, and a run is not given up for what only watches it.
    world.together(lambda: sinks.check(config) if world.first and environment.attempt == 1 else None)
    found = _previous(config, world, status, stop_signal)
    if found:
        checkpoint.check_device(found.manifest, config.device, any(world.gather(torch.cuda.is_available())))
    with world.unhurried():
        digests = _data_digests(config, world)
    source = model_load.source(config, world)

    def go_on() -> None:
        if environment.asked_to_stop(stop_signal):
            again = "" if _launched() else "; start it again to go on"
            raise Stopped(f"asked to end before the first step{again}")

    def tell(words: str, at_once: bool = False) -> None:
        go_on()
        if status:
            status.update(at_once, state="starting", reason=words)

    def prepared():
        if not world.keeps:
            time.sleep(HEAD_START)
        return pack.prepare(config, digests, source.tokenizer, environment.cache_dir, tell)

    with world.unhurried():
        packed, held_out = world.together(prepared)
    world.together(lambda: tell("loading the model", at_once=True))
    both = [packed, held_out] if held_out else [packed]
    found_tokens = world.gather(" and ".join(one.digest[:12] for one in both))
    world.same("tokenised data", found_tokens, f"empty {environment.cache_dir} on all hosts")
    model_load.check_vocabulary(source, max(one.largest_id for one in both))
    at_once = room.at_once(dataclasses.replace(config, balance=shares), source.config, world)
    room.refuse_frozen_weights_on_a_slow_wire(config, source.config, world, goes_on=_as_before(found, config))
    in_parts = strategies.reads_weights(config, world)
    model = model_load.build(config, source, world, in_parts)
    world.together(go_on)
    router_coef = world.together(lambda: router.coefficient(config, model))
    identity = {
        "model": model_load.architecture(model),
        **model_load.behaviour(source),
        "dataset": packed.digest,
        "tokenizer": model_load.tokenizer_digest(source.tokenizer),
        "sequence_length": config.sequence_length,
        "seed": config.seed,
        **model_load.frozen(config, source, world),
    }
    module = TokenLoss(model, config.loss_chunk, config.loss_kernel, world.device.type, config.packing)
    strategy = strategies.make(config, module, world)
    world.gather(None)  # who has read its weights waits patiently for slower disks, and not in a step's time
    packing.check(config, strategy.module, world)
    optimizer = optim.adamw(strategy.trainable, config)
    strategy.adopt(optimizer)
    progress = Progress()
    if found:
        checkpoint.check_identity(found.manifest, identity, dataclasses.asdict(config))
        checkpoint.load(found, strategy, optimizer)
        strategy.zero_grad()  # what the check of the packing has left gathered is older than the checkpoint
        progress = recorder.progress_in(found.manifest)
    progress.launch = max(progress.launch, environment.launch)
    run = Run(
        config=config,
        world=world,
        packed=packed,
        held_out=held_out,
        index=Index(config.seed, packed.sizes, packed.weights),
        strategy=strategy,
        optimizer=optimizer,
        progress=progress,
        steps=last_step(config, len(packed), progress.step, progress.cursor),
        peak_lr=config.lr or optim.default_rate(config, bool(source.weights)),
        balance=_balance(config, world, shares, at_once),
        micro_batch_size=_micro_batch_size(config, world, at_once),
        router_coef=router_coef,
        from_random=source.weights is None,
    )
    if world.first:
        _introduce(run, found)

    observer = recorder.Recorder(run, source.tokenizer, identity, status, stop_signal)
    with observer:
        observer.tell_damaged(found)
        observer.judge()
        try:
            if world.device.type == "cpu":
                # Gathered weights come and go among what stays; in one heap, they would leave many holes.
                keep_freed_memory(4 << 20 if strategy.in_parts else 1 << 30)
            if progress.step < run.steps:
                observer.calibrate()
            stop_signal.nothing_to_save = False
            train(run, observer)
        except Diverged:
            with contextlib.suppress(TrainerError):
                observer.settle()  # a checkpoint that is under way is a good one
            raise
        observer.save_last()
    step = _take_best(run)
    results = environment.run_dir / "model"
    if world.keeps:
        before = metrics.read_summary(environment.run_dir)
        if before.get("model_step", before.get("steps")) != step:
            _take_away(results)
        _summarise(run, begin, step)
    _export(strategy, source.tokenizer, results)
    observer.show(state=_last_state("finished"), reason=None, eta_seconds=0)
    if world.first:
        log(f"finished: model in {results}")
    watch.close()
    world.close()


def _launched() -> bool:
    """Whether a launcher watches over these ranks."""
    return "TRAINYARD_LAUNCHER" in os.environ


def _last_state(state: str) -> str:
    """What ranks that end so write down. Under a launcher it is that one's to say: the run may go on without them."""
    return "ending" if _launched() else state


def _shares(config: Config, world: World) -> str:
    """The key `balance` as it holds for these ranks; raises BadInput where they cannot share a step."""
    even(config.batch_size, world.size)
    if fault := miscounted(config.balance, world.size):
        # A reason for the first attempt is that not all hosts came; those that come later have their shares then.
        if world.environment.attempt == 1 and not os.environ.get("TRAINYARD_REASON"):
            raise fault
        log(
            f"warning: balance {config.balance} is not for {world.size} ranks; their shares are found by their times"
        )
        return "auto"
    return config.balance


def _as_before(found: checkpoint.Found | None, config: Config) -> bool:
    """Whether a run goes on, and by the strategy that it has had."""
    return found is not None and found.manifest.get("settings", {}).get("strategy") in (None, config.strategy)


def _micro_batch_size(config: Config, world: World, at_once: list[int]) -> int:
    """Sequences that this rank computes at once; where ranks keep step, the same number on all."""
    least = min(at_once) if strategies.chosen(config, world).lockstep else at_once[world.rank]
    return min(config.micro_batch_size, least)


def _balance(config: Config, world: World, shares: str, at_once: list[int]) -> Balance:
    """The shares to begin with, of ranks that have room for so many sequences at once."""
    kind = strategies.chosen(config, world)
    return Balance(
        config.batch_size,
        world.size,
        shares,
        # Another size of a micro-batch would be compiled anew.
        grain=config.micro_batch_size if config.compile else 1,
        lockstep=config.micro_batch_size if kind.lockstep else 0,
        at_once=at_once,
        # On a GPU a collective is waited for by the stream that computes, so that all ranks seem as slow.
        watched=world.size == 1 or not (kind.lockstep and world.device.type == "cuda"),
    )


def _previous(config: Config, world: World, status, stop_signal: StopSignal) -> checkpoint.Found | None:
    """The checkpoint to go on from, if there is one."""
    try:
        found = checkpoint.find(world.environment.run_dir, world, given_up=config.lost_step)
    except checkpoint.Absent as absent:
        _wait_for_a_copy(absent, config, world, status, stop_signal)
    if found and config.resume == "never" and not _own(found.manifest, world.environment):
        raise BadInput(
            f"run '{config.run}' has a checkpoint of step {found.manifest['step']} and resume is never: "
            "set resume to auto to go on from it, or choose another run name"
        )
    return found


def _own(manifest: dict, environment: Environment) -> bool:
    """Whether this start of the run wrote the checkpoint: then to go on from it is to recover, not to resume."""
    if environment.launch:
        return environment.launch == manifest.get("launch")
    begun = os.environ.get(BEGUN)  # by hand, on one host, whose ranks all know it
    return bool(begun) and manifest["time"] >= float(begun)


def _wait_for_a_copy(
    absent: checkpoint.Absent, config: Config, world: World, status, stop_signal: StopSignal
) -> NoReturn:
    """Wait for a host that has the newest checkpoint; raises Stopped, or `absent` where none can come.

    An attempt's hosts are given: once one has come it ends, as if it had been asked to, and the next one has it.
    """
    environment = world.environment
    wanted = set(absent.hosts) - set(environment.left_out)
    if not wanted or environment.expected <= len(world.firsts) + len(environment.left_out):
        raise absent
    if world.first:
        log(f"waiting: {absent}")
    if status:
        status.update(state="stalled", reason=str(absent))
    run = store.connect(os.environ["TRAINYARD_STORE"], f"{config.run}.{os.environ['TRAINYARD_LAUNCH']}")

    def come() -> list[str]:
        """Those of the wanted hosts whose launchers are there."""
        with contextlib.suppress(store.Unreachable):  # the launcher sees to that
            there = {one.value["name"] for key, one in run.read().items() if key.startswith("hosts/")}
            return sorted(wanted & there)
        return []

    while True:
        asked = environment.asked_to_stop(stop_signal)
        told = world.gather({"asked": asked, "come": come() if world.first else []})
        if any(one["asked"] for one in told):
            raise Stopped(f"asked to end while it waited: {absent}")
        if back := told[0]["come"]:
            raise Stopped(f"{', '.join(back)} has come, with the newest checkpoint")
        time.sleep(LOOK)


def _data_digests(config: Config, world: World) -> list[str]:
    """The hashes of the sets, which must be equal on all hosts; each reads its own once."""
    digests = world.gather(world.together(lambda: read.digests(config) if world.first_on_host else None))
    by_node = {node: one for node, one in zip(world.nodes, digests, strict=True) if one}
    for number in range(len(by_node[0])):
        found = [by_node[node][number][:12] for node in world.nodes]
        world.same("dataset", found, "give every host the same files")
    return by_node[0]


def _introduce(run: Run, found: checkpoint.Found | None) -> None:
    """Say what is about to be trained on what, by whom."""
    config, packed, world = run.config, run.packed, run.world
    log(f"run '{config.run}': {world.size} ranks on {', '.join(dict.fromkeys(world.hosts))}")
    each = f"{config.sequence_length}"
    if not config.packing:
        each = f"a document or a part of one, {packed.kept / len(packed):,.0f} of {each} tokens on average"
    log(
        f"{_parameters(run):,} parameters; {packed.token_count:,} tokens in {count(packed.documents, 'document')}, "
        f"{len(packed):,} sequences of {each}; {run.steps} steps of {config.batch_size} sequences; "
        f"{config.strategy}, {config.dtype}, {', '.join(map(str, world.devices))}, "
        f"{torch.get_num_threads()} threads a rank"
    )
    if packed.unread:
        log(f"not read of the data: {records.listed(packed.unread)}")
    if run.held_out:
        log(f"held out: {run.held_out.token_count:,} tokens in {count(run.held_out.documents, 'document')}")
    for what, one in (("", packed), ("held-out ", run.held_out)):
        if one and one.shortened:
            cut = f"{one.shortened:,} {what}documents were cut to {config.sequence_length} tokens"
            log(f"{cut}; {one.dropped:,} are lost")
        elif one and one.longer:
            then = (
                "go on in the next one"
                if config.packing
                else "are in parts, in each of which the model begins anew"
            )
            log(f"{one.longer:,} {what}documents are longer than a sequence and {then}")
    if found:
        log(f"resuming after step {run.progress.step}, from {world.hosts[found.source]}")
        if run.progress.step >= run.steps:
            log(f"no step is left: steps and epochs ask for {run.steps} of them; raise these to train on")


def _parameters(run: Run) -> int:
    return sum(map(flops.elements, run.strategy.model.parameters()))


def _take_best(run: Run) -> int:
    """The step whose weights the model now has: with early stopping that of the best evaluation.

    All ranks must call.
    """
    world, progress = run.world, run.progress
    best = progress.best_saved
    if not (run.config.patience and run.held_out):
        return progress.step
    if world.first and progress.best_step not in (best, progress.step):
        log(
            f"warning: the best evaluation was that of step {progress.best_step}, whose checkpoint could not be saved: "
            f"the model is that of step {best or progress.step}"
        )
    if best in (0, progress.step):  # 0: none was a number, or could be saved
        return progress.step
    found = checkpoint.find(world.environment.run_dir, world, best)
    if found is None:
        if world.first:
            log(
                f"warning: the checkpoint of step {best}, the best, is gone: the model is that of the last step"
            )
        return run.progress.step
    checkpoint.load(found, run.strategy, run.optimizer)
    if world.first:
        log(f"the model is that of step {best}, the best on the held-out data")
    return best


def _summarise(run: Run, begin: float, model_step: int) -> None:
    """Write summary.json; `begin`: when this attempt started, in seconds since 1970; whose weights the model has."""
    metrics.summarise(
        run.world.environment.run_dir,
        run=run.config.run,
        launch=run.progress.launch,
        state="finished",
        started=begin,
        finished=time.time(),
        parameters=_parameters(run),
        dataset_tokens=run.packed.token_count,
        sequences=len(run.packed),
        documents_cut=run.packed.shortened,
        tokens_cut=run.packed.dropped,
        held_out_documents_cut=run.held_out.shortened if run.held_out else 0,
        held_out_tokens_cut=run.held_out.dropped if run.held_out else 0,
        model_step=model_step,
        unigram_entropy=run.packed.unigram_entropy,
        world=recorder.hosts(run.world),
        versions=versions(),
        settings=dataclasses.asdict(run.config),
    )


def _export(strategy: Strategy, tokenizer, directory: Path) -> None:
    """Write the model in transformers' format into every run directory; all ranks must call."""
    world = strategy.world
    # What an earlier end has left that was cut off.
    world.together(lambda: _sweep(directory) if world.keeps else None)
    try:
        _export_whole(strategy, tokenizer, directory)
    except BaseException:
        with contextlib.suppress(OSError):
            if world.keeps:
                _sweep(directory)
        raise


def _export_whole(strategy: Strategy, tokenizer, directory: Path) -> None:
    world = strategy.world
    writers = sorted(set(world.keepers))
    frozen = not hasattr(strategy.model, "peft_config")  # what an adapter stands beside is not written
    beside = buffers(strategy.model) if frozen else {}
    if not strategy.in_parts:
        every = itertools.chain(strategy.weights(writers, frozen), beside.items())
        weights = {name: one.detach().cpu() for name, one in every}
    else:
        file = directory.with_name(STAGED)
        world.together(lambda: _stage(strategy, writers, frozen, beside, file))
        weights = {}
        if world.keeps:
            weights = load_file(file)  # mapped: no host need have memory for the whole model
            file.unlink()  # it goes when nobody reads it any more
    world.together(lambda: _write(strategy.model, weights, tokenizer, directory) if world.keeps else None)


def _stage(
    strategy: Strategy, writers: list[int], frozen: bool, beside: dict[str, torch.Tensor], file: Path
) -> None:
    """Write the weights, and what goes `beside` them, to `file` on the ranks that write; all ranks must call.

    One after the other, as they come.
    """
    weights = strategy.weights(writers, frozen)
    try:
        if strategy.world.keeps:
            with (
                _explained(file, "the model's weights", OSError),
                TensorFile(file, strategy.parameters(frozen) | beside) as out,
            ):
                for name, one in itertools.chain(weights, beside.items()):
                    out.write(name, one.cpu())
    finally:
        for _ in weights:  # made of this rank's parts, too, whatever its own disk says
            pass


@contextlib.contextmanager
def _explained(path: Path, what: str, kind: type[Exception] | tuple[type[Exception], ...]):
    """Turn what writing to `path` raises into a message."""
    try:
        yield
    except kind as error:
        raise TrainerError(
            f"{path}: {what} cannot be written: {error}; free some space there and start the run again: "
            "it goes on from its last checkpoint"
        ) from None


def _sweep(directory: Path) -> None:
    """Remove what an export into `directory` has beside it until it is complete."""
    staged = directory.with_name(STAGED)
    with _explained(staged, "an earlier end's file, which is in the way,", OSError):
        staged.unlink(missing_ok=True)
    shutil.rmtree(directory.with_name(MADE), ignore_errors=True)


def _take_away(directory: Path) -> None:
    """Remove the model of a run's earlier end, all at once: were the run cut off now, it would pass for this end's."""
    temporary = directory.with_name(MADE)
    shutil.rmtree(temporary, ignore_errors=True)
    with _explained(directory, "the model", OSError), contextlib.suppress(FileNotFoundError):
        directory.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _write(model: torch.nn.Module, weights: dict, tokenizer, directory: Path) -> None:
    """Write the model with `weights`, by parameter name; the directory appears complete."""
    temporary = directory.with_name(MADE)
    # safetensors raises what is its own where the disk does not take the model.
    with _explained(directory, "the model", (OSError, SafetensorError)):
        # transformers would save on rank 0 alone, but hosts have disks of their own.
        model.should_save_on_this_rank = lambda wanted: wanted
        model.save_pretrained(temporary, state_dict=weights)
        saved.name_end_of_turn(temporary, model, tokenizer)
        model_load.restore_dropout(temporary, model.original_dropout)
        tokenizer.save_pretrained(temporary)
        facts = metrics.read_summary(directory.parent)
        saved.name_base(temporary, facts.get("settings", {}))
        card.write(temporary, facts, saved.find(temporary).adapter)
        for file in temporary.rglob("*.safetensors"):
            # safetensors writes for its owner alone, but the operator's user fetches by group.
            file.chmod(0o640)
        shutil.rmtree(directory, ignore_errors=True)
        disk.publish(temporary, directory)


def _leave(code: int) -> None:
    """End at once: torch's own farewell would wait for peers that may be gone, and has aborted after good runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
