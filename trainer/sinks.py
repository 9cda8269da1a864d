"""Where a run's metrics go besides metrics.jsonl: TensorBoard, Prometheus, Weights & Biases, MLflow.

Each sink is a function that takes the records of metrics.jsonl (trainer/metrics.py). A sink that fails is said so once
and left out from then on: watching never ends a run.
"""

import contextlib
import importlib.util
import io
import os
import queue
import threading
import types
from collections.abc import Callable
from pathlib import Path

from trainer import disk
from trainer.config import Config
from trainer.environment import Environment
from trainer.errors import BadInput

SENT_LATER = (
    ", or set report_to to none: what a cluster's run has told is sent from its results, by `trainer send`"
)
REPORTS = {"wandb": "wandb", "mlflow": "mlflow"}  # report_to, by the package that must be there

BEGUN = "trainyard_begun"  # MLflow's tag
WAITING = 10_000  # records that a slow sink may be behind
PATIENCE = 10.0  # seconds at the end

Sink = Callable[[dict], None]
Closer = Callable[[str], None]  # told how the run ended: finished, stopped, failed


class Sinks:
    """All sinks of one rank, served by a thread of their own: a service that is slow holds up no step.

    say: tells the operator a line. begun: the run's first start, by which it is another run than an earlier one of this
    name, and the same one after a restart.
    """

    def __init__(
        self,
        config: Config,
        environment: Environment,
        settings: dict,
        say: Callable[[str], None],
        begun: str = "",
    ):
        self.say = say
        self._closers: dict[str, Closer] = {}
        self._ended = ""
        self._records: queue.Queue = queue.Queue(WAITING)
        first = environment.rank == 0
        wanted = {
            "TensorBoard": (config.tensorboard and first, lambda: tensorboard(environment.run_dir)),
            "Prometheus": (config.metrics_port, lambda: prometheus(config, environment)),
            "Weights & Biases": (
                config.report_to == "wandb" and first,
                lambda: wandb(config.run, environment.run_dir, settings, begun),
            ),
            "MLflow": (config.report_to == "mlflow" and first, lambda: mlflow(config.run, settings, begun)),
        }
        makers = {name: make for name, (want, make) in wanted.items() if want}
        self._thread = threading.Thread(target=self._serve, args=(makers,), daemon=True)
        if makers:
            self._thread.start()

    def write(self, record: dict) -> None:
        """Give `record`, a line of metrics.jsonl, to all; where they are far behind, they miss it."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._records.put_nowait(record)

    def close(self, ended: str) -> None:
        """Write what is held back, and end them all; a service that does not answer is not waited for.

        ended: how the run did, as a Closer has it.
        """
        self._ended = ended
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._records.put_nowait(None)
            self._thread.join(PATIENCE)

    def _serve(self, makers: dict) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in makers.items():
            with self._left_out(name):
                sinks[name], self._closers[name] = make()
        while (record := self._records.get()) is not None:
            for name, sink in list(sinks.items()):
                kept = sinks.pop(name)
                with self._left_out(name):
                    sink(record)
                    sinks[name] = kept
        for name, closer in self._closers.items():
            with self._left_out(name):
                closer(self._ended)

    @contextlib.contextmanager
    def _left_out(self, name: str):
        try:
            yield
        except Exception as error:  # whatever another's package may raise
            text = " ".join(str(error).split())[:200]
            self.say(f"warning: {name} gets no metrics: {type(error).__name__}: {text}; the run goes on")


def check(config: Config) -> None:
    """Raise BadInput where report_to names a service whose package is not here."""
    if config.report_to in REPORTS:
        need(REPORTS[config.report_to], f"report_to: {config.report_to}: ", SENT_LATER)


def need(package: str, of: str, otherwise: str = "") -> None:
    """Raise BadInput, which begins with `of`, where a package is not here."""
    if importlib.util.find_spec(package) is None:
        raise BadInput(
            f"{of}the package {package} is not installed beside the trainer; install it (pip install {package})"
            f"{otherwise}"
        )


def numbers(record: dict) -> dict[str, float]:
    """The numbers of a record by name, `train/loss` and so on; lists and what is not known are left out."""
    return {
        f"{record['kind']}/{name}": float(value)
        for name, value in record.items()
        if name not in ("step", "time", "kind")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


class _Files:
    """Opens tensorboardX's files, whose own way of writing ends for good at the first word that a full disk refuses."""

    SCHEME = "growing"

    @staticmethod
    def directory_check(path: str) -> None:
        Path(path.partition("://")[2]).mkdir(parents=True, exist_ok=True)

    @staticmethod
    def open(path: str) -> types.SimpleNamespace:
        file = disk.Growing(io.FileIO(path.partition("://")[2], "a"))
        # Without a descriptor, which it would have synced: that, too, a full disk may refuse.
        return types.SimpleNamespace(write=file.write, flush=file.flush, close=file.close)


def tensorboard(run_dir: Path) -> tuple[Sink, Closer]:
    """Event files in the run directory's tensorboard/. What steps past a resume's were, the new file replaces."""
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import register_writer_factory

    register_writer_factory(_Files.SCHEME, _Files)
    writer, step, begun = None, 0, 0

    def write(record: dict) -> None:
        nonlocal writer, step, begun
        # A checkpoint is told of some steps after its own, and an evaluation with its own.
        trained = record["kind"] == "train"
        if writer and trained and record["step"] <= step:  # the run went back to a checkpoint
            writer.close()
            writer = None
        # Only now is it known at which step this attempt begins; what was said of that one stays.
        if writer is None:
            suffix = f".{begun}" if begun else ""
            writer = SummaryWriter(
                f"{_Files.SCHEME}://{run_dir / 'tensorboard'}",
                purge_step=record["step"] + (not trained),
                flush_secs=10,
                filename_suffix=suffix,
            )
            begun += 1
        step = record["step"] if trained else step
        # One event for all of them: add_scalar makes one each, which took seven times as long, a millisecond a step.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()]
        if values:
            writer.file_writer.add_summary(Summary(value=values), record["step"], record["time"])

    return write, lambda _: writer and writer.close()


def prometheus(config: Config, environment: Environment) -> tuple[Sink, Closer]:
    """A page that Prometheus reads, on metrics_port plus the rank's number on its host; on the cluster's address."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()
    labels = {"run": config.run, "rank": str(environment.rank), "host": environment.host}
    gauges: dict[str, Gauge] = {}
    address = os.environ.get("CLUSTER_ADDRESS") or "127.0.0.1"
    server, thread = start_http_server(
        config.metrics_port + environment.local_rank, addr=address, registry=registry
    )

    def write(record: dict) -> None:
        for name, value in {**numbers(record), "step": record["step"]}.items():
            name = "trainyard_" + name.replace("/", "_")
            if name not in gauges:
                gauges[name] = Gauge(name, name.replace("_", " "), list(labels), registry=registry)
            gauges[name].labels(**labels).set(value)

    def close(ended: str) -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return write, close


def wandb(name: str, run_dir: Path, settings: dict, begun: str) -> tuple[Sink, Closer]:
    """A run of Weights & Biases, named as this one; who and where is that package's own matter (WANDB_*)."""
    import wandb as package

    run = package.init(
        name=name,
        id=f"{name}-{begun}",
        resume="allow",
        config=settings,
        dir=str(run_dir),
    )
    # Its own count of steps never goes back, and a run that goes on from a checkpoint does.
    run.define_metric("*", step_metric="step")
    # A code other than 0 is a crash there; one that was stopped may go on.
    return (
        lambda record: run.log({**numbers(record), "step": record["step"]}),
        lambda ended: run.finish(exit_code=int(ended == "failed")),
    )


def mlflow(name: str, settings: dict, begun: str) -> tuple[Sink, Closer]:
    """A run of MLflow, named as this one; where to is that package's own matter (MLFLOW_*).

    MLflow gives a run its id, so one that goes on, on whichever host, is found by a tag.
    """
    import mlflow as package

    wanted = f"attributes.run_name = '{name}' and tags.{BEGUN} = '{begun}'"
    there = package.search_runs(filter_string=wanted, max_results=1, output_format="list")
    if there:
        package.start_run(run_id=there[0].info.run_id)
    else:
        package.start_run(run_name=name, tags={BEGUN: begun})
        package.log_params(settings)  # once: MLflow refuses other values, such as of more steps
    status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    return (
        lambda record: package.log_metrics(numbers(record), step=record["step"]),
        lambda ended: package.end_run(status[ended]),
    )
