"""What a run is told that would be better set otherwise: before its first step, and by what its steps have taken.

Each answers the words for it, or nothing where there is none to say.
"""

from trainer import ways
from trainer.compress import factor_bytes
from trainer.config import cut_rounds, early, few_steps, idle_keys
from trainer.loop import Run, epoch_steps
from trainer.pace import Pace
from trainer.words import span

FAR_APART = 3600.0  # seconds between checkpoints that are worth a warning


def at_the_start(run: Run) -> dict[str, str]:
    """Warnings by what they are about; "" where there is none."""
    warmup = ""
    if run.config.warmup_steps > run.steps:
        warmup = (
            f"warmup_steps is {run.config.warmup_steps} of {run.steps} steps, so that lr never comes to "
            f"{run.peak_lr:g}: set it lower, 5 % of the steps or less"
        )
    return {
        "cards": run.world.idle_cards,
        "rdma": run.world.idle_rdma,
        "idle": idle_keys(run.config),
        "rounds": cut_rounds(run.config, run.steps, epoch_steps(run)) if run.world.size > 1 else "",
        "few": few_steps(run.config, run.index.sequences, run.steps),
        "warmup": warmup,
    }


def far_apart(pace: Pace) -> str | None:
    """What a fault would cost where checkpoints are far apart; None where that is bearable."""
    run = pace.run
    config, left = run.config, run.steps - run.progress.step
    most = epoch_steps(run) if config.checkpoint_epochs else left
    seconds = min(config.checkpoint_every or left, most, left) * pace.seconds()
    if config.checkpoint_minutes or seconds <= FAR_APART:
        return None
    half, cure = FAR_APART / 2, "checkpoint_minutes=30"
    if config.comm == "diloco":  # whose rounds it ends, and the curve is not to go by the clock
        round_seconds = config.sync_every * pace.seconds()
        cure = f"checkpoint_every={config.sync_every * max(1, round(half / round_seconds))}"
        half = max(half, round_seconds)
    return (
        f"checkpoints are {span(seconds)} apart, and a fault costs the steps since the last one: "
        f"{cure} makes one every {'half hour' if half == FAR_APART / 2 else span(half)}"
    )


def larger_micro_batches(run: Run) -> str | None:
    """What keeps a faster rank from computing as much as its speed is worth, where ranks keep step."""
    config, wants = run.config, run.balance.wants
    if not wants:
        return None
    return (
        f"these ranks' speeds differ, and with {config.strategy} all ranks go through as many micro-batches: "
        f"by speed, one would compute {wants} sequences at once, and "
        + (
            f"compile: true keeps all at {config.micro_batch_size}; with micro_batch_size: {wants} it would"
            if config.compile
            else "has no memory for so many; gradient_checkpointing: true needs less"
        )
        + " (docs/slow-networks.md)"
    )


def another_way(pace: Pace, parts: dict) -> str | None:
    """Whether gradients had better travel another way, of steps whose time went as `parts` tells (metrics.Went)."""
    run = pace.run
    if run.config.strategy == "ddp":
        return _of_ddp(pace, parts)
    passes = run.balance.passes if run.strategy.lockstep else 1
    return ways.proposal_of_others(parts, run.config.strategy, passes)


def _of_ddp(pace: Pace, parts: dict) -> str | None:
    """As ways.proposal."""
    run = pace.run
    trained = list(run.strategy.trainable.values())
    sizes = [4 * one.numel() for one in trained]
    gradients = sum(sizes)
    factors = factor_bytes(trained, run.config.powersgd_rank)
    size, every, hosts = run.world.size, run.config.sync_every, len(run.world.firsts)
    row = run.world.layers() is None
    meeting = early(run.config, epoch_steps(run), 60 / pace.seconds())
    meets, saves = ways.rhythm(every, *meeting, last=run.steps)
    slowest = max(range(size), key=parts["compute"].__getitem__)
    # A rank that is short of memory computes fewer at once.
    at_once = min(run.config.micro_batch_size, run.balance.at_once[slowest])
    passes = -(-run.balance.split[slowest] // at_once)
    return ways.proposal(
        parts,
        ways.sent(gradients, factors, size, meets, hosts, row),
        meets,
        ways.saved(gradients, size, saves, hosts, row),
        ways.advised(run.config.dtype, bool(run.router_coef), run.from_random),
        ways.behind_backward(parts["compute"][slowest] / passes, len(run.strategy.buckets)),
        run.world.device.type,
        sizes,
    )
