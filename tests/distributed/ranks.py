"""Real ranks on this machine: processes that run `trainer train` over gloo on loopback, or `trainer launch` itself.

Ranks are forked from a server that has torch loaded already, so that a run of three starts in a second.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "transformers.models.gpt2.modeling_gpt2", "trainer.commands.train"])

MANAGED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A free one below those that the kernel gives to whoever asks for any: until a rank listens it stays free."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rank(environment: dict, arguments: list[str], patch: dict) -> None:
    os.environ.update(environment)
    for (module, name), value in patch.items():
        owner = importlib.import_module(module)
        setattr(owner, f"{name}_really", getattr(owner, name))
        setattr(owner, name, value)
    if "SIGTERM_IN_STEP" in environment:
        _signal_in_step(int(environment["SIGTERM_IN_STEP"]))
    from trainer import cli
    from trainer import environment as place

    place.log_to(place.read("run"), "run")
    place.log_beside = lambda environment, run: None  # it is all there already
    sys.exit(cli.main(["train", *arguments]))


def _signal_in_step(step: int) -> None:
    """Send this process a SIGTERM while it computes step number `step`, whatever the machine's speed."""
    from trainer import loop

    compute = loop.token_loss

    def token_loss(run, *rest):
        if run.progress.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(run, *rest)

    loop.token_loss = token_loss


def place(nodes: list[int], rank: int) -> dict[str, str]:
    """What torchrun and RUN.env tell a rank of where it is; nodes: each rank's host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        "GROUP_RANK": str(nodes[rank]),
        "TRAINYARD_HOST": f"node{nodes[rank]}",
    }


class Ranks:
    """A run's processes. Every rank is its own host (run directory `root`/nodeN) unless `one_host`, or `nodes` says.

    nodes: each rank's host, one host's ranks side by side. absent: so many hosts, the first ones, do not take part.
    shared: of each host, the one whose run directory it has, too, as over NFS.
    patch: {(module, name): value}, set in every rank before it starts.
    stop_in: the last rank gets a SIGTERM in this step. per_rank: overrides of each rank's own. launch: which start of
    the run by train.yml this is.
    """

    def __init__(
        self,
        root: Path,
        size: int,
        config: Path,
        *overrides: str,
        one_host: bool = False,
        nodes: list[int] | None = None,
        absent: int = 0,
        shared: list[int] | None = None,
        patch: dict | None = None,
        stop_in: int | None = None,
        per_rank: list[list[str]] | None = None,
        launch: str = "",
    ):
        self.root, self.size, self.absent = root, size, absent
        self.nodes = nodes or ([0] * size if one_host else list(range(size)))
        self.shared = shared or list(range(max(self.nodes) + 1))
        port = free_port()
        self.processes = []
        for rank in range(size):
            environment = {
                **place(self.nodes, rank),
                "TRAINYARD_HOST": f"node{self.nodes[rank] + absent}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CLUSTER_ADDRESS": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TRAINYARD_RUN_DIR": str(self.directory(rank)),
                "TRAINYARD_CACHE_DIR": str(root / "cache"),
                "TRAINYARD_LAUNCH": launch,
            }
            if stop_in and rank == size - 1:
                environment["SIGTERM_IN_STEP"] = str(stop_in)
            own = per_rank[rank] if per_rank else []
            process = context.Process(
                target=_rank, args=(environment, [str(config), *overrides, *own], patch or {})
            )
            process.start()
            self.processes.append(process)

    def directory(self, rank: int = 0) -> Path:
        return self.root / f"node{self.shared[self.nodes[rank]] + self.absent}"

    def codes(self, timeout: float = 300) -> list[int]:
        """Exit codes by rank; what has not ended in time is killed and shown as None."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        return codes

    def wait_for_step(self, step: int, timeout: float = 240) -> None:
        """Return once rank 0's metrics have reached `step`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if len(losses(self.directory())) >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"no step {step} within {timeout} s: {self.log()}")

    def log(self, rank: int = 0) -> str:
        path = self.directory(rank) / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""


def run(root: Path, size: int, config: Path, *overrides: str, codes=None, **options) -> list[float]:
    """Run to the end, and return the losses, a step each; `codes`: the exit codes to expect (default: all 0)."""
    ranks = Ranks(root, size, config, *overrides, **options)
    found = ranks.codes()
    assert found == (codes or [0] * size), "\n".join(ranks.log(rank) for rank in range(size))
    return losses(ranks.directory())


def records(directory: Path, kind: str = "train") -> list[dict]:
    """The lines of that kind in a run directory's metrics.jsonl; none where it has none yet."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        one for one in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if one["kind"] == kind
    ]


def losses(directory: Path) -> list[float]:
    """The losses in a run directory's metrics.jsonl, which must have every step once."""
    train = records(directory)
    assert [record["step"] for record in train] == list(range(1, len(train) + 1))
    return [record["loss"] for record in train]


def shown(folder: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of all scalars in TensorBoard's files: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
            data = data[16 + length :]
    return found


def status(directory: Path) -> dict:
    return json.loads((directory / "status.json").read_text())


# ---- ranks that have no more to do than to meet ----


def _process(rank, function, nodes, port, folder, keys):
    os.environ.update(
        **place(nodes, rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    import torch

    from trainer import config as configuration
    from trainer import environment
    from trainer.world import World

    torch.set_num_threads(1)
    config = configuration.from_mapping({"device": "cpu", **keys})
    world = World(config, environment.read("run"))
    torch.save(function(world, config), folder / f"{rank}.pt")
    world.close()


def side_by_side(function, size, *words, seconds=240):
    """function(rank, *words) in as many processes, each of which must end well."""
    processes = [context.Process(target=function, args=(rank, *words)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [0] * size


def together(folder, function, nodes, **keys) -> list:
    """What `function(world, config)` returns on each rank; nodes: each rank's host."""
    import torch

    port, folder = free_port(), folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    side_by_side(_process, len(nodes), function, nodes, port, folder, keys, seconds=200)
    files = [folder / f"{rank}.pt" for rank in range(len(nodes))]
    return [torch.load(file) for file in files]


class Launch:
    """`trainer launch` processes, one a node, with the environment that RUN.env gives."""

    def __init__(self, root: Path, processes: list[int], config: Path, *overrides: str, **environment: str):
        self.root, self.processes = root, processes
        self.shared = environment.pop("shared", False)
        self.arguments = [str(config), *overrides]
        self.environment = {
            "TRAINYARD_STORE": str(root / "store"),
            "TRAINYARD_LAUNCH": str(time.time_ns()),
            "MASTER_PORT": str(free_port()),
            "CLUSTER_ADDRESS": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        self.nodes = [self.start(node) for node in range(len(processes))]

    def start(self, node: int) -> subprocess.Popen:
        """The launcher of a node, as its unit starts it."""
        own = {
            "TRAINYARD_RUN_DIR": str(self.root / f"node{0 if self.shared else node}"),
            "TRAINYARD_CACHE_DIR": str(self.root / "cache"),
            "TRAINYARD_HOST": f"node{node}",
            "NNODES": str(len(self.processes)),
            "NODE_RANK": str(node),
            "NPROC_PER_NODE": str(self.processes[node]),
        }
        kept = {name: value for name, value in os.environ.items() if name not in MANAGED}
        return subprocess.Popen(
            [sys.executable, "-m", "trainer", "launch", *self.arguments],
            env={**kept, **self.environment, **own},
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self, timeout: float = 300) -> list[tuple[int, str]]:
        """(exit code, what it said) of every node's launcher."""
        results = []
        for node in self.nodes:
            try:
                _, said = node.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                node.kill()
                _, said = node.communicate()
            results.append((node.returncode, said))
        return results
