"""The commands, `trainer train` and so on; docs/architecture.md lists them."""

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

from trainer import config as configuration
from trainer import environment
from trainer.errors import BadInput, TrainerError

NOT_KEPT = (
    "other processes of this user are open to this run: the kernel's Landlock is off, older than Linux 5.19, or kept "
    "from here by a container (docs/security.md)"
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Bad input is one message, never a traceback."""
    options = _parser().parse_args(arguments)
    if options.command == "launch":
        environment.stamp_errors()
    if environment.keep_to_its_own() is False and options.command == "launch":
        print(NOT_KEPT, file=sys.stderr)
    _quiet()
    for stream in (sys.stdout, sys.stderr):  # a file's name may be no UTF-8, and a terminal's letters few
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(options)
    except TrainerError as error:
        failure = error
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # a path that the user gave, or a disk that is full
        failure = TrainerError(str(error))
    if options.command == "train":
        environment.let_the_first_speak()
    print(f"error: {failure}", file=sys.stderr)
    return failure.code


def _run(options: argparse.Namespace) -> int:
    if options.command == "stop":
        from trainer.commands import stop

        return stop.main(options.run_dir, options.leave)
    if options.command == "tell":
        from trainer.commands import tell

        return tell.main(options.directory)
    if options.command == "generate":
        from trainer.commands import generate

        sampling = generate.Sampling(options.max_new_tokens, options.temperature, options.top_k, options.seed)
        return generate.main(
            options.directory, options.prompt, options.chat, options.base, options.code, sampling
        )
    if options.command == "export":
        from trainer.commands import export

        return export.main(
            options.directory, options.out, options.merge, options.base, options.dtype, options.code
        )

    if options.command == "send":
        from trainer.commands import send

        return send.main(options.directory, options.service)

    if options.command == "fetch":
        from trainer.commands import fetch

        return fetch.main(options.kind, options.name, options.state_dir, options.code, options.cached)

    if options.command == "bench":
        environment.follow_launcher()
        from trainer.commands import bench

        return bench.main(options.device, options.largest << 20, options.seconds)

    if options.command == "burn":
        from trainer.commands import burn

        return burn.main(options.device, options.dtype, options.minutes)

    if options.command == "check" and options.config.is_dir():
        from trainer.commands import check

        return check.checkpoints(options.config)

    config = configuration.load_whole(options.config, options.overrides)
    place = environment.read(config.run)
    if options.command == "launch":
        from trainer.commands import launch

        return launch.main(config, place, [options.config, *options.overrides])
    if options.command == "check":
        from trainer.commands import check

        return check.main(config, place, options.config_only)

    if options.command == "plan":
        from trainer.commands import plan

        return plan.main(config, place, options.link, options.json, options.speeds)

    if "RANK" not in os.environ and environment.number("WORLD_SIZE", 1) > 1:
        raise BadInput(
            "WORLD_SIZE is more than 1 and RANK is not set: start the ranks by `trainer launch CONFIG`"
        )
    launched = environment.follow_launcher()
    with contextlib.nullcontext() if launched or place.rank else environment.claimed(place, config.run):
        if launched:
            environment.log_to(place, config.run)
        else:
            try:
                environment.log_beside(place, config.run)
            except OSError as error:
                raise TrainerError(f"{error}; look at the disk and at who may write there") from None
        stop_signal = environment.StopSignal()  # before torch, which takes its time to load
        from trainer.commands import train

        return train.main(config, place, stop_signal)


def _quiet() -> None:
    """Silence what other libraries say about themselves; errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # nothing forks here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # On CPUs with bfloat16 bitsandbytes misses a kernel that it would fetch from the hub, and does without.
    kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
    kernels.addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer", description="Train a language model on one or many hosts."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("train", "one rank of a run (or a whole run of one process)"),
        ("launch", "this host's ranks of a run, as the environment says"),
        ("check", "validate configuration, data and model, or a checkpoint; nothing is trained"),
        ("plan", "memory, traffic and time of a run, before it is started"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        what = "CONFIG.yaml or a checkpoint's or run's directory" if name == "check" else "CONFIG.yaml"
        command.add_argument("config", metavar="CONFIG", type=Path, help=what)
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="settings that override the file's"
        )
        if name == "check":
            command.add_argument(
                "--config-only", action="store_true", help="only the configuration; needs no torch"
            )

        if name == "plan":
            command.add_argument(
                "--link",
                metavar="SPEED",
                help="between the hosts, such as 1gbit, or a result of bench.yml or preflight.yml; default: the newest "
                "result below runs/ for as many hosts, else the interface's",
            )
            command.add_argument(
                "--speeds",
                metavar="LIST",
                help="of the ranks, in any unit, such as 2,1,1: what shares they will have",
            )
            command.add_argument("--json", action="store_true", help="bytes and seconds, as JSON")

    text = "text from a run, a checkpoint, an adapter or a model"
    generate = commands.add_parser("generate", help=text, description=text)
    generate.add_argument("directory", metavar="DIR", type=Path)
    generate.add_argument("--prompt", help="what the text begins with; default: the start of a document")
    generate.add_argument(
        "--chat",
        action="store_true",
        help="by the model's chat template: an answer to --prompt, or a conversation",
    )
    generate.add_argument("--base", metavar="DIR", help="an adapter's base, if not where it lay in training")
    generate.add_argument("--max-new-tokens", type=_positive, default=200)
    generate.add_argument("--temperature", type=_from_zero, default=0.8, help="0: always the likeliest token")
    generate.add_argument("--top-k", type=_positive, default=50, help="choose among so many likeliest tokens")
    generate.add_argument("--seed", type=_seed, default=0)
    generate.add_argument("--code", action="store_true", help="run the model's own Python code")

    text = "write a run's adapter or model in the format of peft or transformers"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument(
        "directory", metavar="DIR", type=Path, help="a run, a checkpoint, an adapter or a model"
    )
    export.add_argument("out", metavar="OUT", type=Path, help="a new directory")
    export.add_argument(
        "--merge", action="store_true", help="put the adapter into its base: a whole model comes out"
    )
    export.add_argument("--base", metavar="DIR", help="the adapter's base, if not where it lay in training")
    export.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number format of a whole model's weights; auto: as they are on disk",
    )
    export.add_argument("--code", action="store_true", help="run the model's own Python code")

    text = "send what a run has told, as its losses, to Weights & Biases or MLflow"
    send = commands.add_parser("send", help=text, description=text)
    send.add_argument("directory", metavar="DIR", type=Path, help="a run's, such as runs/RUN of the checkout")
    send.add_argument("service", metavar="SERVICE", choices=("wandb", "mlflow"))

    text = "fetch a model or a data set from the Hugging Face hub, for all hosts of a cluster"
    fetch = commands.add_parser("fetch", help=text, description=text)
    fetch.add_argument("kind", choices=("model", "dataset", "validation"))
    fetch.add_argument("name", metavar="NAME", help="on the hub: org/name")
    fetch.add_argument("state_dir", metavar="DIR", type=Path, help="where the host keeps models and data")
    fetch.add_argument("--code", action="store_true", help="the model's own Python code, too")
    text = "what this host fetched before, where the hub does not answer"
    fetch.add_argument("--cached", action="store_true", help=text)

    text = "what collectives carry between the ranks that the environment names; all hosts at once"
    bench = commands.add_parser("bench", help=text, description=text)
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    bench.add_argument("--largest", type=_positive, default=64, help="MiB of the largest buffer (64)")
    bench.add_argument(
        "--seconds", type=_from_zero, default=1.0, help="for each collective and size, about (1)"
    )

    text = "load on this host's cards or processors, whose results must stay the same; preflight.yml's depth=burn"
    burn = commands.add_parser("burn", help=text, description=text)
    burn.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    burn.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    burn.add_argument("--minutes", type=_from_zero, default=60.0, help="how long (60)")

    stop = commands.add_parser("stop", help="ask a run to save and end")
    stop.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    stop.add_argument(
        "--leave", action="store_true", help="this host alone, as when it shuts down: the others go on"
    )

    text = "tell the others how runs ended here while they could not be told (the unit trainyard-tell)"
    tell = commands.add_parser("tell", help=text, description=text)
    tell.add_argument("directory", metavar="DIR", type=Path)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, found {text}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, found {text}")
    return int(text)


def _from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, found {text}")
    return value
