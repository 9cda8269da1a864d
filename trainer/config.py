"""A run's configuration: one flat, frozen dataclass, read from YAML and `key=value` overrides.

The controller imports this file to check a run before any host is touched, so it needs PyYAML alone.
"""

import contextlib
import dataclasses
import datetime
import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer import others
from trainer.balance import given
from trainer.errors import BadInput
from trainer.ways import EXACT

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "offload", "infinity", "split")


def key(default, doc, *, least=None, above=None, most=None, choices=None, pattern=None):
    """A key of the configuration: its default, one line of documentation (with the unit), and its range."""
    rules = {"least": least, "above": above, "most": most, "choices": choices, "pattern": pattern}
    return dataclasses.field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True)
class Config:
    """Every key of a run. Keys are flat: each is one word that an operator types after `-e`."""

    run: str = key("run", "name of the run", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

    model: str = key(
        "tiny",
        "`tiny` (a small GPT-2 from random weights with its own tokenizer), a directory in transformers' format "
        "(with only a config.json: random weights), or a name on the Hugging Face hub",
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model; only for a model you trust"
    )

    adapter: str = key(
        "none",
        "train all weights, or a LoRA adapter beside frozen ones: less memory, and far less on the wire",
        choices=("none", "lora"),
    )
    lora_rank: int = key(16, "rank of the adapter's matrices", least=1, most=4096)
    lora_alpha: float = key(32.0, "the adapter's output is scaled by lora_alpha / lora_rank", above=0)
    lora_dropout: float = key(
        0.0, "share of the adapter's input that is dropped in training", least=0, most=0.9
    )
    lora_targets: str = key(
        "auto",
        "layers that get an adapter: auto (by architecture), all-linear, or names such as q_proj,v_proj",
    )
    quantize: str = key(
        "none",
        "hold the frozen weights in 8 or 4 bits (NF4, bitsandbytes); needs adapter: lora",
        choices=("none", "8bit", "4bit"),
    )
    attention: str = key(
        "auto",
        "transformers' attention implementation; auto: the best that the model has on any device. flex and flash run "
        "on GPUs alone, flash with its package beside the trainer, and in 16 bits",
        choices=(
            *("auto", "sdpa", "eager", "flex_attention"),
            *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
        ),
    )
    gradient_checkpointing: bool = key(
        False,
        "compute activations again in backward instead of keeping them: much less memory, a third slower",
    )
    compile: bool = key(False, "torch.compile the model; the first steps take minutes, later ones less time")

    dataset: str = key(
        "austen",
        "name of a text that ships with the trainer, a .txt, .jsonl or .parquet file, a directory of those, a name of "
        "the Hugging Face hub (org/name, org/name@revision, org/name@revision:pattern), or several, by commas",
    )
    dataset_weights: str | None = key(
        None,
        "the sets' shares of a batch, such as 3,1; default: all sets are one, each sequence once an epoch",
    )
    data_format: str = key(
        "auto",
        "what a record is. text: text_field; instruction: instruction, input, output, or as Dolly or "
        "TRL call them; chat: messages, or ShareGPT's conversations, and tools; auto: what the set's first record has",
        choices=("auto", "text", "instruction", "chat"),
    )
    text_field: str = key("text", "the field of a plain record that holds the text")
    max_samples: int | None = key(
        None,
        "use only the first so many samples (records, paragraphs of a text) of each set; default: all",
        least=1,
    )
    validation: str | None = key(None, "what evaluations are made on: a file or set, named as in dataset")
    validation_split: float | None = key(
        None,
        "or this share of the documents (of a text: paragraphs), held out of training by seed and number",
        above=0,
        most=0.5,
    )
    loss_on: str = key(
        "all",
        "tokens that are learnt: all, or of instructions and chats the answers' alone, with their end-of-turn tokens",
        choices=("all", "answers"),
    )
    overlong: str = key(
        "split",
        "documents are packed one after the other and go on in the next sequence (split), or each record stays whole, "
        "and one that is longer than sequence_length is cut (cut) or refused (refuse)",
        choices=("split", "cut", "refuse"),
    )
    packing: bool = key(
        True,
        "fill sequences with documents that do not see each other; false: a sequence is one document, or a part of "
        "one, and padding, which models with recurrent layers want",
    )
    vocab_size: int = key(
        2048, "tokens in the tokenizer that `model: tiny` trains on the dataset", least=257, most=1_000_000
    )
    sequence_length: int = key(256, "tokens in a sequence", least=2, most=1 << 24)

    batch_size: int = key(16, "sequences in an optimizer step, over all ranks", least=1, most=1 << 20)
    micro_batch_size: int = key(
        4,
        "sequences that a rank computes at once, at most; less needs less memory. Under a sharded strategy with "
        "balance: auto a faster rank computes more, if it has room",
        least=1,
        most=1 << 20,
    )
    balance: str = key(
        "auto",
        "each rank's share of a step: auto, by its speed, which is tried first, and changed when that changes; even; "
        "or the sequences of each rank, such as 8,4,4",
    )
    loss_chunk: int | None = key(
        None,
        "tokens whose logits are computed at once: fewer need less memory, many fewer are slower; 0: all; "
        "default: as many as make 128 MiB of logits, on a CPU 16 MiB, and 256 at least",
        least=0,
    )
    loss_kernel: str = key(
        "torch",
        "what computes the head and the loss in chunks: torch, or on GPUs Liger's fused kernel, if the package "
        "liger-kernel is installed beside the trainer",
        choices=("torch", "liger"),
    )
    router_aux_loss_coef: float | None = key(
        None,
        "weight of the loss that keeps a mixture of experts' routers balanced, over the whole batch; costs a forward "
        "pass; default: the model's own where its config.json sets output_router_logits (few do), else 0",
        least=0,
        most=1e6,
    )
    steps: int | None = key(
        None, "optimizer steps; with epochs too, whichever ends first", least=1, most=10**12
    )
    epochs: float | None = key(
        None, "passes over the data; default: 1 where steps are not given", above=0, most=1e6
    )

    optimizer: str = key(
        "adamw",
        "AdamW with its state in 32 or 8 bits; paged: moved to host memory when the GPU's runs out (bitsandbytes)",
        choices=("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    )
    lr: float | None = key(
        None,
        "peak learning rate; default: 1e-3 from random weights, 5e-5 for a trained model, 2e-4 for an adapter",
        above=0,
        most=1e6,
    )
    lr_schedule: str = key(
        "cosine",
        "after the warm-up: down to a tenth, down to zero, or level",
        choices=("cosine", "linear", "constant"),
    )
    warmup_steps: int = key(0, "steps of linear warm-up", least=0)
    weight_decay: float = key(0.01, "AdamW's weight decay, on matrices only", least=0)
    beta1: float = key(0.9, "AdamW's decay of the mean of gradients", least=0, most=0.9999)
    beta2: float = key(0.95, "AdamW's decay of the mean of squared gradients", least=0, most=0.99999)
    grad_clip: float = key(1.0, "largest norm of the gradient; 0: no clipping", least=0)
    eval_every: int = key(
        0, "steps between evaluations on the held-out data; 0: at the end of every epoch", least=0
    )
    patience: int = key(
        0,
        "end the run when so many evaluations in a row were no better than the best, whose weights it keeps; 0: never",
        least=0,
    )
    on_nan: str = key(
        "stop",
        "when a loss or gradient is not finite: end the run, pass the batch over, or go back to the last checkpoint "
        "and pass over all batches since",
        choices=("stop", "skip", "rollback"),
    )
    spike_factor: float = key(
        0.0, "a loss above so many times its recent mean is a spike, treated as on_nan says; 0: none", least=0
    )
    seed: int = key(0, "seed of the random weights and of the order of the data", least=0, most=2**63 - 1)

    force_strategy: bool = key(
        False,
        "let a sharded strategy send an adapter's frozen weights over interfaces of 2.5 Gbit/s and less",
    )
    link_gbit: float | None = key(
        None,
        "Gbit/s of the slowest link between the run's hosts, where frozen weights would go over it (force_strategy): "
        "an interface that says more, or like those of virtual machines and tunnels nothing, is not believed; default: "
        "what preflight.yml or bench.yml has measured between them",
        above=0,
    )
    bucket_mb: int | None = key(
        None,
        "MB of gradients that travel together under ddp with comm exact: with fewer the first leave earlier, in more "
        "messages; a model whose gradients are less than that sends nothing before backward is over; default: by the "
        "link that "
        "preflight.yml or bench.yml has measured between the run's hosts, else 25",
        least=1,
        most=25,
    )
    comm: str = key(
        "auto",
        "how gradients travel, with strategy ddp. exact; auto: exact, and after some steps it says whether another way "
        "would be worth its price; 16bit, 8bit: in fewer bits; powersgd: as factors of a low "
        "rank; diloco: each rank for itself, and every sync_every steps all meet. These four change the curve a bit",
        choices=("auto", "exact", "16bit", "8bit", "powersgd", "diloco"),
    )
    powersgd_rank: int = key(
        0,
        "comm powersgd: columns of a matrix's two factors; 0: as many as leave a 25th of its gradient's bytes, "
        "64 at most",
        least=0,
        most=1024,
    )
    sync_every: int = key(50, "comm diloco: steps between two meetings", least=1, most=1_000_000)
    outer_lr: float = key(
        0.7, "comm diloco: what part of their mean way all go at a meeting", above=0, most=10
    )
    outer_momentum: float = key(0.8, "comm diloco: Nesterov's momentum of those ways", least=0, most=0.999)
    diloco_fragments: int = key(
        1,
        "comm diloco: parts of the weights, of neighbouring layers, that meet one after the other, each once in "
        "sync_every steps, so that less travels at a time; 1: all at once",
        least=1,
        most=1_000_000,
    )
    diloco_overlap: int = key(
        0,
        "comm diloco: steps that go on while a part's way travels; it is taken after so many, however fast the network "
        "is, and the weights are then half those that all have and half a rank's own; 0: all wait for it",
        least=0,
        most=1_000_000,
    )

    strategy: str = key(
        "ddp",
        "what a rank holds. ddp: everything; zero1: its part of the optimizer's state; zero2: of the gradients, too; "
        "fsdp (or zero3): of the weights, too; offload: that part in the CPU's memory; infinity: weights and "
        "AdamW's state on disk; split: everything, its layers on one of the host's GPUs after the other",
        choices=STRATEGIES,
    )
    offload_dir: str | None = key(
        None, "strategy infinity: a directory on a fast disk; default: `offload` in the run's directory"
    )
    dtype: str = key(
        "float32",
        "number format of the computation; weights and AdamW stay float32. float16, for GPUs without bfloat16, scales "
        "the loss, and tries a step whose gradients overflow again with half the scale",
        choices=("float32", "bfloat16", "float16"),
    )
    device: str = key(
        "auto", "where to compute; auto: the GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = key(
        None, "CPU threads a rank; default: the host's cores shared by its ranks", least=1, most=1024
    )
    timeout_seconds: float = key(
        300.0, "seconds to wait for another rank in a step before giving up", least=1, most=1e6
    )
    restarts: int = key(
        3,
        "after a fault the run goes on from its newest checkpoint by itself; it is given up when so many new attempts "
        "in a row bring no new checkpoint (ten times as many where power or network was cut); 0: at the first fault",
        least=0,
        most=1000,
    )
    min_nodes: int = key(
        1, "hosts that the run goes on with, at least; with fewer it waits", least=1, most=10_000
    )

    checkpoint_every: int = key(500, "steps between checkpoints; 0: only at the end and at a stop", least=0)
    checkpoint_minutes: float = key(0.0, "minutes between checkpoints, besides; 0: none", least=0, most=1e6)
    checkpoint_epochs: bool = key(False, "a checkpoint at the end of every epoch, too")
    checkpoint_async: bool = key(
        True,
        "write checkpoints while training goes on: a step waits only for a copy of weights and optimizer state in the "
        "CPU's memory; false: it waits for the disk, and that memory is saved; strategy infinity has it so",
    )
    checkpoint_keep: int = key(2, "checkpoints kept on a host", least=1)
    tensorboard: bool = key(True, "write event files for TensorBoard into the run's directory")
    metrics_port: int = key(
        0,
        "a port on the cluster's address that Prometheus reads, plus the rank's number on its host; 0: none",
        least=0,
        most=65000,
    )
    report_to: str = key(
        "none",
        "tell Weights & Biases or MLflow, too, by their own packages and their own settings in the environment",
        choices=("none", "wandb", "mlflow"),
    )
    profile_steps: int = key(
        0, "trace so many steps, from the third on, by torch's profiler; 0: none", least=0, most=1000
    )
    resume: str = key(
        "auto",
        "auto: from the newest valid checkpoint of the run; never: refuse to start where there is one",
        choices=("auto", "never"),
    )
    lost_step: int = key(
        0,
        "the step of a checkpoint that is lost for good with the hosts that had it: go on from an older one, or anew, "
        "instead of waiting for them; 0: none",
        least=0,
    )

    origins: str | None = key(
        None,
        "names of the model and data that train.yml has brought, by their places on the hosts (a JSON object), for "
        "model cards and reports; train.yml writes it",
    )


FEW = 20  # steps of a run by epochs, which hardly move the weights
# What PyYAML raises for values that look like something they are not, besides its own errors.
UNREADABLE = (ValueError, LookupError, OverflowError, AttributeError, RecursionError)
BY_COMMAS = ("balance", "dataset", "dataset_weights", "lora_targets")  # keys of several values
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def describe() -> list[dict]:
    """The schema, in order, for documentation and key checks: `{name, type, default, doc, choices}` a key."""
    return [
        {
            "name": field.name,
            "type": "/".join(_kinds(field)) + ("" if field.default is not None else " (optional)"),
            "default": field.default,
            "doc": field.metadata["doc"],
            "choices": list(field.metadata["choices"] or []),
        }
        for field in FIELDS.values()
    ]


def load(path: str | Path | None = None, overrides: typing.Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, then `key=value` overrides.

    Raises BadInput that lists every problem at once, each with its file and line (or the override), what was
    found, what was expected and the nearest name.
    """
    problems: list[str] = []
    return _build(_values(path, overrides, problems), problems)


def read(path: str | Path) -> dict[str, object]:
    """The keys that a YAML file sets, as they stand there; raises BadInput as `load` does."""
    problems: list[str] = []
    values = _values(path, (), problems)
    _build(values, problems)
    return {name: value for name, (value, _) in values.items()}


def load_whole(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """As `load`, of a configuration to which no other keys are to come: all must go together."""
    problems: list[str] = []
    values = _values(path, overrides, problems)
    return check_together(_build(values, problems), {name: where for name, (_, where) in values.items()})


def _values(
    path: str | Path | None, overrides: typing.Sequence[str], problems: list[str]
) -> dict[str, tuple[object, str]]:
    """Key -> (value, where it stands); what is wrong goes to `problems`."""
    values: dict[str, tuple[object, str]] = {}
    for name, value, where in _read_yaml(Path(path), problems) if path is not None else ():
        if name in values:
            problems.append(f"{where}: '{name}' stands twice (first at {values[name][1]}); remove one")
        values[name] = (value, where)
    for override in overrides:
        name, equals, text = override.partition("=")
        # The value of what is no key of ours may be a secret.
        where = f"override '{override}'" if name in FIELDS or not equals else f"override '{name}=…'"
        if equals:
            values[name] = (text, where)
        else:
            problems.append(f"{where}: expected key=value")
    return values


def instead(name: str, known: typing.Iterable[str], others_are: str) -> str:
    """What to write instead of a key that is none; known: those there are. others_are: what comes before ours."""
    if own := others.here(name):
        return own
    if near := difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.7):
        return f"did you mean '{near[0]}'?"
    if near := difflib.get_close_matches(name, others.KEYS, n=1, cutoff=0.9):
        return f"did you mean '{near[0]}'? {others.here(near[0])}"
    return f"{others_are}: {', '.join(FIELDS)}"


def from_mapping(mapping: dict, where: str = "configuration") -> Config:
    """A configuration from key-value pairs that are in memory; raises BadInput as `load` does."""
    return _build({str(name): (value, where) for name, value in mapping.items()}, [])


def _build(values: dict[str, tuple[object, str]], problems: list[str]) -> Config:
    settings, listed = {}, False
    for name, (value, where) in values.items():
        if name not in FIELDS:
            cure = instead(name, FIELDS, "the keys are")
            if cure.startswith("the keys are"):  # once: a file of another trainer's has many of these
                cure, listed = "no key here is like it" if listed else cure, True
            ours = cure.removeprefix("here it is ").partition(",")[0]
            problems.append(f"{where}: unknown key '{name}'; {cure}{_by_commas(ours, value)}")
            continue
        try:
            settings[name] = _checked(FIELDS[name], value)
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}")
    if problems:
        raise BadInput("\n".join(problems))
    return Config(**settings)


def check_together(config: Config, places: typing.Mapping[str, str] | None = None) -> Config:
    """`config`, whole; raises BadInput for settings that do not go together, with the places of keys."""
    problems = []
    if config.quantize != "none" and config.adapter == "none":
        problems.append(
            f"quantize: {config.quantize} freezes the weights; set adapter to lora, or quantize to none"
        )
    if 0 < config.spike_factor <= 1:
        problems.append(
            f"spike_factor: found {config.spike_factor:g}, and a loss as usual would be a spike; expected above 1, "
            "such as 3, or 0 for none"
        )
    if config.strategy == "infinity" and config.optimizer != "adamw":
        problems.append(
            f"optimizer: strategy infinity keeps AdamW's state in 32 bits on disk; set optimizer to adamw, "
            f"found {config.optimizer}"
        )
    if config.strategy == "split" and config.compile:
        problems.append("compile: strategy split moves tensors between layers; set compile to false")
    if config.strategy == "split" and config.attention == "flex_attention":
        problems.append(
            "attention: flex_attention's masks stay on one GPU, and strategy split has layers on several; set "
            "attention to auto or sdpa"
        )
    if "flash" in config.attention and config.dtype == "float32":
        problems.append(
            f"attention: {config.attention} computes in 16 bits alone; set dtype to bfloat16, or attention to auto"
        )
    try:
        listed = given(config.balance)
    except ValueError:
        listed = []
    if listed is not None and sum(listed) != config.batch_size:
        problems.append(
            f"balance: found {config.balance}; expected auto, even, or whole numbers from 1 on, by commas, which add "
            f"up to batch_size, {config.batch_size}; correct one of the two"
        )
    if config.comm not in EXACT:
        if config.strategy != "ddp":
            problems.append(
                f"comm: {config.comm} works with strategy ddp, found {config.strategy}; "
                "set strategy to ddp, or comm to exact"
            )
        if config.dtype == "float16":
            problems.append(
                f"comm: {config.comm} keeps what it left out, and float16 scales each step anew; set dtype to bfloat16 "
                "or float32, or comm to exact"
            )
        if config.comm == "diloco" and config.router_aux_loss_coef:
            problems.append(
                "comm: diloco has no global batch to balance routers over; set router_aux_loss_coef to 0, or comm to "
                "exact"
            )
    problems += _check_fragments(config)
    if not (config.validation or config.validation_split):
        problems += [
            f"{name}: found {getattr(config, name)}, and nothing is held out to evaluate on; give validation or "
            f"validation_split, or set {name} to 0"
            for name in ("eval_every", "patience")
            if getattr(config, name)
        ]
    if config.validation and config.validation_split:
        problems.append("validation, validation_split: both say what is held out; give one of them")
    if problems:
        raise BadInput("\n".join(_placed(one, places or {}) for one in problems))
    return config


def _placed(problem: str, places: typing.Mapping[str, str]) -> str:
    """The problem with the place of the first of the keys that it begins with that stands somewhere."""
    keys = problem.partition(":")[0].split(", ")
    where = next((places[key] for key in keys if key in places), "")
    return f"{where}: {problem}" if where else problem


def idle_keys(config: Config) -> str:
    """Which keys are set, and say nothing beside the others; "" if none. A run that goes on otherwise may keep them."""
    lora = tuple(name for name in FIELDS if name.startswith("lora_"))
    outer = "outer_lr", "outer_momentum", "diloco_fragments", "diloco_overlap"
    of = (
        (config.adapter == "none", "adapter is none: all weights are trained", lora),
        (config.comm != "diloco", f"comm is {config.comm}", outer),
        (config.comm not in ("diloco", "auto"), f"comm is {config.comm}", ("sync_every",)),
        (config.comm not in ("powersgd", "auto"), f"comm is {config.comm}", ("powersgd_rank",)),
        (config.strategy != "infinity", f"strategy is {config.strategy}", ("offload_dir",)),
    )
    found = []
    for idle, why, keys in of:
        if idle and (there := [name for name in keys if getattr(config, name) != FIELDS[name].default]):
            found.append(f"{', '.join(there)} says nothing while {why}")
    return "; ".join(found)


def few_steps(config: Config, sequences: int, steps: int) -> str:
    """What makes so few steps of the data's sequences, where nobody has set how many; "" if they are enough."""
    if config.steps is not None or (steps >= FEW and sequences >= config.batch_size):
        return ""
    each = "" if sequences >= config.batch_size else ", each of which stands more than once in a batch"
    epochs = f"{config.epochs or 1:g} epochs"
    up_to, smaller = ("", "batch_size or sequence_length") if config.packing else ("up to ", "batch_size")
    return (
        f"the data is {sequences} sequences of {up_to}{config.sequence_length} tokens{each}, and {epochs} are "
        f"{steps} steps of {config.batch_size}, too few to learn by: a smaller {smaller} makes more"
    )


def early(config: Config, epoch: int = 0, minute: float = 0.0) -> tuple[int, ...]:
    """Every how many steps a checkpoint or an evaluation has all ranks of diloco meet; 0: never.

    epoch, minute: how many steps these take; 0: not known, and left out.
    """
    evaluates = config.eval_every or (epoch if config.validation or config.validation_split else 0)
    by_the_clock = (
        max(1, round(config.checkpoint_minutes * minute)) if config.checkpoint_minutes * minute else 0
    )
    return config.checkpoint_every, evaluates, epoch * config.checkpoint_epochs, by_the_clock


def cut_rounds(config: Config, last: int, epoch: int) -> str:
    """Which keys end diloco's rounds early, so that more meetings send more; "" if none.

    last: the run's last step. epoch: the steps of an epoch.
    """
    if config.comm != "diloco":
        return ""
    every, found = config.sync_every, []
    for name in ("checkpoint_every", "eval_every"):
        steps = getattr(config, name)
        if steps % every and steps < last:
            near = " or ".join(
                str(one) for one in (steps // every * every, -(-steps // every) * every) if one
            )
            found.append(f"{name} is {steps}, no multiple of sync_every, {every}: {near} would be")
    if config.checkpoint_minutes:
        found.append("checkpoint_minutes goes by the clock, and so does the curve: checkpoint_every does not")
    if config.checkpoint_epochs and epoch < last:
        found.append("checkpoint_epochs, by the data's length: checkpoint_every does not")
    if (config.validation or config.validation_split) and not config.eval_every and epoch < last:
        found.append(
            f"eval_every is 0, for an evaluation at each epoch's end: a multiple of {every} does not"
        )
    return f"all meet early, and begin a round anew: {'; '.join(found)}" if found else ""


def _check_fragments(config: Config) -> list[str]:
    """What is wrong with the keys of diloco's schedule, a line each."""
    parts, overlap, every = config.diloco_fragments, config.diloco_overlap, config.sync_every
    if config.comm != "diloco":
        return []
    if parts > every:
        return [
            f"diloco_fragments: found {parts}; expected no more than sync_every, {every}, for each meets in a step "
            f"of its own; set diloco_fragments to {every} or less, or sync_every to {parts} or more"
        ]
    if overlap and overlap * parts >= every:
        return [
            f"diloco_overlap: found {overlap}; expected less than sync_every / diloco_fragments, {every} / {parts}, "
            f"for one travels at a time; set diloco_overlap to {(every - 1) // parts} or less, diloco_fragments to "
            f"fewer, or sync_every to {overlap * parts + 1} or more"
        ]
    return []


def _read_yaml(path: Path, problems: list[str]):
    """Yield (key, value, 'file:line') of the top level of a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; give the path of a configuration (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise BadInput(
                f"{path}:{root.start_mark.line + 1}: expected lines 'key: value', found {_what(root)}"
            )
        loader = yaml.SafeLoader("")
        for name, node in root.value:
            where = f"{path}:{name.start_mark.line + 1}"
            if isinstance(node, yaml.ScalarNode):
                try:
                    value = _as_written(str(name.value), node, loader.construct_object(node))
                    yield str(name.value), value, where
                except ValueError as error:
                    problems.append(f"{where}: {name.value}: {error}")
                continue
            plain = all(isinstance(one, yaml.ScalarNode) for one in node.value)
            listed = [one.value for one in node.value] if plain else []
            if name.value in FIELDS:
                alone = f"; write it alone, {name.value}: {listed[0]}" if len(listed) == 1 else ""
                problems.append(
                    f"{where}: {name.value}: expected one value, found {_what(node)}; keys are flat"
                    + (_by_commas(str(name.value), listed) or alone)
                )
            else:
                yield str(name.value), listed, where
            if not others.here(str(name.value)):
                problems += _nested(path, node, str(name.value), set())
    except (yaml.MarkedYAMLError, *UNREADABLE) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise BadInput(f"{place}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML: {error}") from None


def _nested(path: Path, node: yaml.Node, above: str, met: set[int]) -> Iterator[str]:
    """What the keys within the mapping of the key `above` are here, as far as that is known.

    met: mappings that were looked into, by id: an alias leads to one again, and may lead into itself.
    """
    if not isinstance(node, yaml.MappingNode) or id(node) in met:
        return
    met.add(id(node))
    for key, below in node.value:
        name = str(key.value)
        full = f"{above}.{name}"
        if cure := f"here it is {name}" if name in FIELDS else others.here(name):
            yield f"{path}:{key.start_mark.line + 1}: '{full}': keys are flat; {cure}"
        yield from _nested(path, below, full, met)


def _as_written(name: str, node: yaml.ScalarNode, value: object):
    """A value as it stands in a file, and would after `-e`: YAML 1.1 makes 8 of 010, 90 of 1:30, a date of 2024-01-01.

    Raises ValueError where it makes something else of what is a text here.
    """
    if value is None or isinstance(value, str) or name not in FIELDS:
        return value
    if _kinds(FIELDS[name]) == ["str"] and not FIELDS[name].metadata["choices"]:
        raise ValueError(f"expected a text, found {node.value}; quote it: '{node.value}'")
    return value if _kinds(FIELDS[name]) != ["str"] and isinstance(value, bool) else node.value


def _by_commas(name: str, values: object) -> str:
    """The cure where a key of several values has them as a list."""
    if name not in BY_COMMAS or not isinstance(values, list) or not values:
        return ""
    return f'; write them by commas, {name}: "{",".join(map(str, values))}"'


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding, in an argument
        return False
    return True


def _what(node: yaml.Node) -> str:
    return {"MappingNode": "a mapping", "SequenceNode": "a list"}.get(type(node).__name__, f"'{node.value}'")


def _kinds(field: dataclasses.Field) -> list[str]:
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else [field.type]
    return [kind.__name__ for kind in kinds if kind is not types.NoneType]


def _checked(field: dataclasses.Field, value: object):
    """`value` as the field's type and in its range; raises ValueError: what was found, what is expected."""
    (kind,) = _kinds(field)
    rules = field.metadata
    wanted = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
    if (
        kind == "str" and field.default is None and value == "null"
    ):  # as of the others, by which YAML means none
        return None
    if kind != "str" and value == "":  # mostly a shell's variable that is not set: not what it was to say
        raise ValueError(f"expected {wanted}, found an empty text; give one, or leave the key out")
    if kind != "str" and isinstance(value, str):
        # An override, or a number that Ansible quoted. Read as YAML would, but for what YAML 1.1 makes of 1:30
        # (90), 010 (8) and 1e-3 (a word).
        if kind in ("int", "float") and re.fullmatch(r"[-+]?\d+", value):
            value = int(value) if len(value) < 30 else float("inf")
        elif kind == "float" and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
            value = float(value)
        elif ":" not in value:
            with contextlib.suppress(yaml.YAMLError, *UNREADABLE):
                value = yaml.safe_load(value)
    if value is None and field.default is None:
        return None
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 10**300 else float("inf")
    if type(value).__name__ != kind:
        cure = _by_commas(field.name, value)
        if kind == "str" and isinstance(value, bool):
            cure = "; to YAML the words yes, no, on and off are such: quote the one that is meant"
        elif kind == "str" and isinstance(value, int | float | datetime.date):
            cure = f"; quote it: '{value}'"
        found = str(value) if isinstance(value, datetime.date) else repr(value)
        raise ValueError(f"expected {wanted}, found {'nothing' if value is None else found}{cure}")
    if kind == "str" and not value:
        raise ValueError("expected a text, found an empty one")
    if kind == "str" and not _is_unicode(value):
        raise ValueError(f"expected UTF-8, found {value!a}; give what is called so another name")
    if rules["choices"] and value not in rules["choices"]:
        near = difflib.get_close_matches(value.lower(), rules["choices"], n=1)
        meant = others.VALUES.get(field.name, {}).get(value.lower()) or next(iter(near), "")
        hint = f"; did you mean '{meant}'?" if meant else ""
        raise ValueError(f"expected {' or '.join(rules['choices'])}, found '{value}'{hint}")
    if rules["pattern"] and not re.fullmatch(rules["pattern"], value):
        raise ValueError(
            f"'{value}' must begin with a letter or digit, then letters, digits, '.', '_' or '-', 63 at most"
        )
    if kind == "float" and not (float("-inf") < value < float("inf")):
        raise ValueError(f"expected a finite number, found {value}")
    for rule, holds, words in (
        ("least", lambda limit: value >= limit, "at least"),
        ("above", lambda limit: value > limit, "more than"),
        ("most", lambda limit: value <= limit, "at most"),
    ):
        if rules[rule] is not None and not holds(rules[rule]):
            raise ValueError(f"expected {words} {rules[rule]}, found {value}")
    return value
