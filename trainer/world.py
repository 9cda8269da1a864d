"""The ranks of a run, and how they talk. Messages are JSON and tensors: nothing is pickled.

Two process groups: `control` (gloo, patient: data preparation and saving may take long on one host) and
`training` (gloo or NCCL, with the configured time-out: in a step, a silent peer is a lost peer).
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer import __version__, cards, errors, waiting
from trainer.config import Config
from trainer.environment import Environment, keep_nccl_to, rdma, rdma_ports

FEWER_CARDS = (
    "hosts of this run are one machine with fewer GPUs than they have processes, so that all compute on the CPU; with "
    "one of these hosts (-l) it would be on the GPU"
)
MARK = "host-"  # in a run directory: of `find_sharers`
# Ranks that connect each to each as they meet, which shows at once who does not reach whom; later they need no store.
# What they tell each other for that grows with the cube of their number; of more, two connect as they first talk.
ALL_TO_ALL = 512
PATIENCE = datetime.timedelta(hours=2)
# For data, which one host may read and tokenise for hours after the others. Launchers see who dies or hangs meanwhile;
# under plain torchrun a rank that ends is noticed, too, and only a host without power or wire is waited for in vain.
LONG_PATIENCE = datetime.timedelta(days=7)
ALONE_PATIENCE = datetime.timedelta(days=1)
# What may differ by host: paths (their content is compared) and how a host computes.
OWN_SETTINGS = ("model", "dataset", "validation", "origins", "device", "threads", "offload_dir")


@dataclasses.dataclass(frozen=True)
class Circle:
    """Some of the ranks, who sum among themselves."""

    ranks: list[int]
    rank: int | None  # this one's place among them; None: it is none of them
    group: dist.ProcessGroup | None  # None where there is nobody to talk to
    device: torch.device  # where what is summed has to be

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Layers:
    """How the ranks of several hosts sum inside hosts first (trainer/sums.py)."""

    within: Circle  # this rank's host
    between: Circle  # of each host the rank with this one's place there, or where not `even` the first one
    even: bool  # all hosts have as many ranks


class World:
    """All ranks of the run, and this one's place among them.

    hosts, nodes: the host's name and number of every rank. firsts: each host's first rank.
    keepers: of every rank, which rank writes what its run directory has once; `find_sharers`.
    addresses: host's name by its cluster address, where known.
    """

    def __init__(self, config: Config, environment: Environment, trains: bool = True):
        """trains: whether a run is to be; else cards are not held against what it would take."""
        self.environment = environment
        self.rank, self.size = environment.rank, environment.world_size
        self.device = torch.device("cpu")  # until all have met
        self.devices = [self.device]  # of which the first is `device`; several under strategy split
        self.control = self.training = self._layers = None
        self.hosts = [environment.host]
        self._timeout = timeout = datetime.timedelta(seconds=config.timeout_seconds)
        if self.size > 1:
            with translated(self):
                if self.size > ALL_TO_ALL:
                    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
                dist.init_process_group("gloo", timeout=timeout)
                self.training = dist.group.WORLD
                self.control = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="control")
        mine = {
            "host": environment.host,
            "node": environment.node_rank,
            "address": os.environ.get("CLUSTER_ADDRESS", ""),
            "versions": versions(),
            "cards": cards.seen(config),
            "settings": {k: v for k, v in dataclasses.asdict(config).items() if k not in OWN_SETTINGS},
        }
        # All have only just met, and are at nothing that takes long: who does not get through has a network to blame.
        everyone = self.gather(mine, self.training)
        self.hosts = [one["host"] for one in everyone]
        self.nodes = [one["node"] for one in everyone]
        self.firsts = [self.nodes.index(node) for node in sorted(set(self.nodes))]
        self.keepers = [self.nodes.index(node) for node in self.nodes]
        self.addresses = {one["address"]: one["host"] for one in everyone if one["address"]}
        for name in mine["versions"]:
            values = [one["versions"].get(name) for one in everyone]
            cure = "run site.yml on all of them, which makes them equal; then start the run again, with -e resume=true"
            self.same(f"version of {name}", values, cure)
        for key in mine["settings"]:
            values = [json.dumps(one["settings"].get(key)) for one in everyone]
            self.same(f"setting {key}", values, "give every host the same configuration")
        self.idle_cards = self.together(lambda: _idle_cards(config, trains))  # why, for the run's warning
        self.idle_rdma = ""  # likewise, of ports
        found = [(one["node"], *one["cards"]) for one in everyone]
        self.devices = self.together(lambda: _devices(config, environment, found))
        self.device = self.devices[0]
        if mine["cards"] and self.device.type == "cpu" and config.device == "auto":
            self.idle_cards = FEWER_CARDS
        if trains:
            self.together(lambda: cards.check(config, self.devices))
        # Ranks on CPUs and ranks on GPUs would wait for each other over different backends.
        cure = "see there why torch finds no GPU (nvidia-smi), or set device to cpu for all"
        told = self.gather([self.device.type, *map(_kind, self.devices)])
        self.same("kind of device", [one for one, *_ in told], cure)
        self.alike = all(kinds == told[0] for kinds in told)
        if self.size > 1 and self.device.type == "cuda":
            self.idle_rdma = self._choose_rdma()
            with translated(self):
                self.training = dist.new_group(backend="nccl", timeout=timeout, group_desc="training")
                self._meet(self.training)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def first_on_host(self) -> bool:
        return self.environment.first_on_host

    @property
    def keeps(self) -> bool:
        """Whether this rank writes what its run directory has once: metrics, status, checkpoints, model."""
        return self.keepers[self.rank] == self.rank

    def find_sharers(self, run_dir: Path) -> None:
        """Find out which hosts have one and the same run directory, over NFS for example; all ranks must call.

        Each host's first rank leaves a mark there, and looks for those of the ranks before it. The marks have new names
        each time: what a host remembers of a directory on a server is at most that such a name was not there.
        """
        if len(self.firsts) == 1:
            return
        nonce = self.share(secrets.token_hex(8))
        begins = sorted(self.firsts)

        def mark(rank: int) -> Path:
            return run_dir / f".{MARK}{nonce}-{rank}"

        def leave_mark() -> None:
            try:
                mark(self.rank).touch()
            except OSError as error:
                raise errors.TrainerError(
                    f"{run_dir}: {error.strerror}; look at the disk and at who may write there"
                ) from None

        is_first = self.rank in self.firsts
        self.together(lambda: leave_mark() if is_first else None)
        found = self.gather(next(filter(lambda one: mark(one).exists(), begins)) if is_first else None)
        self.keepers = [found[self.nodes.index(node)] for node in self.nodes]
        if self.keeps:  # all have looked; of starts that were cut short, too
            for old in run_dir.glob(f".{MARK}*"):
                old.unlink(missing_ok=True)

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Within it ranks wait for each other for LONG_PATIENCE, or without launchers for ALONE_PATIENCE, and not for
        PATIENCE; all ranks must call.
        """
        if self.size == 1:
            yield
            return
        # torch's own, for a group of its own would be as many connections again.
        set_timeout = dist.distributed_c10d._set_pg_timeout
        watched = "TRAINYARD_LAUNCHER" in os.environ
        set_timeout(LONG_PATIENCE if watched else ALONE_PATIENCE, self.control)
        try:
            yield
        finally:
            set_timeout(PATIENCE, self.control)

    def new_control_group(self):
        """A group like `control`, for another thread; all ranks must call."""
        if self.size == 1:
            return None
        with translated(self), waiting.for_others():
            group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="background")
        # Where ranks connect late, it is to work without the first launcher's store, too.
        self.gather(None, group)
        return group

    def _choose_rdma(self) -> str:
        """Have NCCL go by the ports of one kind that all hosts have, and else by TCP.

        Returns why by TCP, where some have ports, or are in the group rdma.
        It chooses for each rank by itself, and between two ways there is none. All ranks must call.
        """
        asked = "TRAINYARD_RDMA" in os.environ and os.environ.get("NCCL_IB_DISABLE", "0") != "1"
        have: list[dict[str, float]] = []
        found = self.gather([list(rdma_ports().values()), asked])
        for ports, _ in found:
            have.append({})
            for kind, rate in ports:
                have[-1][kind] = have[-1].get(kind, 0.0) + rate
        common = sorted(set.intersection(*map(set, have)))
        keep_nccl_to(max(common, key=lambda kind: min(rates[kind] for rates in have), default=""))
        if common or not (any(have) or any(asked for _, asked in found)):
            return ""
        where: dict[str, dict[str, None]] = {}
        for host, rates in zip(self.hosts, have, strict=True):
            where.setdefault(" and ".join(sorted(rates)) or "none", {})[host] = None
        told = "; ".join(f"{kinds} on {', '.join(hosts)}" for kinds, hosts in where.items())
        return (
            f"RDMA is not used: found of ports that can carry a run {told}; expected one kind that all hosts have. See "
            "docs/rdma.md, and what playbooks/preflight.yml says of rdma"
        )

    def layers(self) -> Layers | None:
        """How to sum inside hosts first; None where all ranks are one row: each alone on its host, or all on one.

        They are that, too, where all hosts have RDMA for their GPUs: NCCL uses every card and port at once by itself.
        All ranks must call.
        """
        if self._layers is None:
            self._layers = self._laid(self._by_host()) if 1 < len(self.firsts) < self.size else ()
        return self._layers or None

    def _laid(self, hosts: list[list[int]]) -> Layers | tuple[()]:
        """As `layers`; hosts: the ranks of each."""
        if self.device.type == "cuda" and all(self.gather(rdma())):
            return ()
        even = len({len(ranks) for ranks in hosts}) == 1
        within = [self._circle(ranks) for ranks in hosts]
        across = [list(ranks) for ranks in zip(*hosts, strict=True)] if even else [sorted(self.firsts)]
        between = [self._circle(ranks) for ranks in across]
        mine = next(one for one in within if one.rank is not None)
        own = next((one for one in between if one.rank is not None), between[0])
        return Layers(mine, own, even)

    def _by_host(self) -> list[list[int]]:
        """The ranks of each host, by its first."""
        return sorted(
            [rank for rank, node in enumerate(self.nodes) if node == one] for one in set(self.nodes)
        )

    def circles(self, apart: bool = False) -> tuple[Circle, Circle]:
        """The ranks of this one's host, and the first ranks of all hosts; all ranks must call.

        apart: over groups of their own (gloo, on the CPU), for another thread.
        """
        within = [self._circle(ranks, apart) for ranks in self._by_host()]
        mine = next(one for one in within if one.rank is not None)
        return mine, self._circle(sorted(self.firsts), apart)

    def _circle(self, ranks: list[int], apart: bool = False) -> Circle:
        device = torch.device("cpu") if apart else self.device
        group = None
        if len(ranks) == self.size and not apart:
            group = self.training
        elif len(ranks) > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            with translated(self):
                group = dist.new_group(ranks, backend=backend, timeout=self._timeout, group_desc="circle")
                if backend == "nccl" and self.rank in ranks:
                    self._meet(group)
        return Circle(ranks, ranks.index(self.rank) if self.rank in ranks else None, group, device)

    def _meet(self, group) -> None:
        """Have NCCL connect the ranks of `group` now: the memory of cards that it takes is to be there before steps.

        NCCL itself waits for ever for a rank that it does not reach.
        """

        def give_up() -> None:
            where = os.environ.get("NCCL_SOCKET_IFNAME") or "NCCL's own choice"
            waited = f"NCCL did not connect the ranks within {patience:.0f} s (interface: {where})"
            print(f"error: {_peer_message(self, waited)}", flush=True)
            os._exit(errors.LostPeers.code)

        patience = self._timeout.total_seconds()
        timer = threading.Timer(patience, give_up)
        timer.daemon = True
        timer.start()
        try:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        finally:
            timer.cancel()

    def as_first(self, number: float) -> float:
        """Rank 0's `number`, where what ranks compute of equal values may differ in the last bit; all ranks must call.

        Sums are added up in another order by another card, or by another number of threads.
        """
        if self.alike or self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        with translated(self):
            dist.broadcast(told, 0, group=self.training)
        return told.item()

    def gather(self, message, group=None) -> list:
        """Every rank's `message` (anything that JSON holds), by rank; all ranks must call.

        group: `control` unless given.
        """
        if self.size == 1:
            return [message]
        group = group or self.control
        data = json.dumps(message).encode()
        with translated(self), waiting.for_others():
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = len(data)
            dist.all_reduce(lengths, group=group)
            padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=group)
        return [
            json.loads(bytes(part[:length].numpy()))
            for part, length in zip(parts, lengths.tolist(), strict=True)
        ]

    def share(self, message, source: int = 0):
        """Rank `source`'s `message` (anything that JSON holds) on every rank; all ranks must call."""
        return self.gather(message if self.rank == source else None)[source]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` (any shape, contiguous, on the CPU) on every rank with rank `source`'s values."""
        if self.size > 1:
            with translated(self), waiting.for_others():
                dist.broadcast(tensor, source, group=self.control)

    def together(self, action, group=None):
        """`action()` on every rank; what fails on one fails on all, with the one's message and host."""
        result, failure = None, None
        try:
            with translated(self):
                result = action()
        except errors.TrainerError as error:
            failure = error
        except Exception as error:
            if group is None:
                raise  # which ends this process, and so is noticed by the others
            failure = errors.TrainerError(
                f"a fault of the trainer itself, please report it: {type(error).__name__}: {error}"
            )
        self.agree(failure, group)
        return result

    def agree(self, failure: errors.TrainerError | None, group=None, named: bool = True) -> None:
        """Raise on all ranks the first rank's `failure` that has one; `named`: with its host."""
        mine = {"code": failure.code, "message": str(failure)} if failure else None
        failures = [(rank, one) for rank, one in enumerate(self.gather(mine, group)) if one]
        if failures:
            rank, one = failures[0]
            prefix = f"{self.hosts[rank]}: " if named and len(set(self.hosts)) > 1 else ""
            raised = errors.KINDS[one["code"]](prefix + one["message"])
            raised.of_all = True
            raise raised

    def same(self, what: str, values: list[str], cure: str) -> None:
        """Raise BadInput on every rank where `values` (one a rank) differ between hosts, naming the hosts.

        It begins with one that differs from most: in a later attempt that is the one at fault (cluster/membership.py).
        """
        if len(set(values)) == 1:
            return
        groups: dict[str, list[str]] = {}
        for host, value in zip(self.hosts, values, strict=True):
            if host not in groups.setdefault(value, []):
                groups[value].append(host)
        listing = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in groups.items())
        odd = min(reversed(groups.values()), key=len)[0]
        raise errors.BadInput(f"{odd}: the hosts differ in their {what}: {listing}. Cure: {cure}")

    def mesh(self) -> DeviceMesh:
        """All ranks in a row, as torch's sharding wants them; a single rank gets a group of its own."""
        if self.training is None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up this host's name
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self.training = dist.group.WORLD
        return DeviceMesh.from_group(self.training, self.device.type)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def versions() -> dict:
    """What must be equal on all hosts for one run."""
    import transformers

    return {
        "trainer": release(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def release() -> str:
    """The trainer's version: of a release on a host with the hash of its content, of a checkout without."""
    try:
        return importlib.metadata.version("trainyard")
    except importlib.metadata.PackageNotFoundError:
        return __version__


def _idle_cards(config: Config, trains: bool) -> str:
    """Why this host's cards do nothing.

    Raises BadInput for a run on a cluster's hosts (their store is no directory): nobody has cards there to compute on
    processors.
    """
    why = cards.unseen(config)
    if why and trains and os.environ.get("TRAINYARD_STORE", "").startswith("http"):
        switches = (
            "systemctl status nvidia-fabricmanager, which sets up NVSwitches, "
            if "initialized" in why
            else ""
        )
        raise errors.BadInput(
            f"device: {why}. See there {switches}nvidia-smi, and docs/gpus.md for the builds of torch that a driver "
            "runs; site.yml installs both. To train on processors all the same, set device to cpu"
        )
    return f"{why}, so that all compute on the CPU" if why else ""


def _kind(device: torch.device) -> str:
    """What decides in which order a device adds up."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _devices(config: Config, environment: Environment, everyone: list[tuple]) -> list[torch.device]:
    """Where this rank computes: its GPU, under strategy split its part of the host's; or the CPU.

    everyone: each rank's node, and the ids of the GPUs that it sees. Hosts of a run may be one machine, as make demo's
    are: then they share its GPUs, and with too few of these compute on the CPU.
    """
    _, *mine = everyone[environment.rank]
    if config.device == "cpu" or (config.device == "auto" and not mine):
        return [torch.device("cpu")]
    sharing = [rank for rank, (_, *cards) in enumerate(everyone) if cards == mine] if mine else []
    nodes, found, processes = {everyone[rank][0] for rank in sharing}, len(mine), len(sharing)
    if found < max(1, processes):
        if len(nodes) > 1 and config.device == "auto":
            if environment.rank == sharing[0]:
                log(
                    f"{len(nodes)} hosts are one machine, with {found} GPU{'s' * (found > 1)} for {processes} "
                    "processes, so all compute on the CPU; with one host of them (-l) it would be on the GPU"
                )
            return [torch.device("cpu")]
        raise errors.BadInput(
            f"{processes or environment.local_world_size} processes want a GPU each, torch {torch.__version__} sees "
            f"{found}; set nproc_per_node to {max(found, 1)} for this host, or device to cpu"
        )
    each = found // processes if config.strategy == "split" else 1
    first = sharing.index(environment.rank) * each
    torch.cuda.set_device(first)
    return [torch.device("cuda", number) for number in range(first, first + each)]


@contextlib.contextmanager
def translated(world: World | None = None):
    """Turn torch's exceptions into those that end a run with a reason: out of memory, lost peers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise errors.OutOfMemory(_memory_message(world, str(error))) from error
    except MemoryError as error:
        raise errors.OutOfMemory(_memory_message(world, "host memory is used up")) from error
    except dist.DistError as error:
        if lacks_memory(error):  # of a card, for NCCL's own buffers
            raise errors.OutOfMemory(_memory_message(world, str(error))) from error
        raise errors.LostPeers(_peer_message(world, str(error))) from error
    except RuntimeError as error:
        text = str(error)
        if lacks_memory(error):
            raise errors.OutOfMemory(_memory_message(world, text)) from error
        if isinstance(error, torch.AcceleratorError):
            cure = "the card or its driver has failed: see there `journalctl -k` (Xid) and nvidia-smi"
            raise errors.TrainerError(f"{_where(world)}: {text.strip().splitlines()[0]}; {cure}") from error
        if re.search(r"gloo|nccl|connection (closed|reset)|broken pipe|timed out", text, re.IGNORECASE):
            raise errors.LostPeers(_peer_message(world, text)) from error
        raise


def lacks_memory(error: RuntimeError) -> bool:
    """Whether torch's error says that there is no memory: beside its own kind, cuBLAS', cuDNN's and the driver's."""
    text = str(error).lower()
    words = ("can't allocate memory", "out of memory", "status_alloc_failed")
    return isinstance(error, torch.OutOfMemoryError) or any(word in text for word in words)


def _where(world: World | None) -> str:
    return f"rank {world.rank} on {world.environment.host} ({world.device})" if world else "this process"


def _memory_message(world: World | None, text: str) -> str:
    first = text.strip().splitlines()[0]
    cure = "a smaller micro_batch_size, sequence_length or model, or dtype bfloat16"
    return f"out of memory: {_where(world)}: {first}. Cure: {cure}"


def _peer_message(world: World | None, text: str) -> str:
    first = text.strip().splitlines()[-1] if text.strip() else "no reason given"
    host = world.environment.host if world else "this host"
    named = {
        other
        for address, other in getattr(world, "addresses", {}).items()
        if other != host and re.search(rf"(?<![\d.]){re.escape(address)}(?![\d.])", text)
    }
    peer = f" (that is {named.pop()})" if len(named) == 1 else ""
    return (
        f"lost a peer: rank {world.rank if world else '?'} on {host}: {first}{peer}. "
        "The peer's own log says why it ended; start the run again to resume it from its last checkpoint"
    )


def log(message: str) -> None:
    """One line for the operator, at once."""
    print(time.strftime("%H:%M:%S"), message, flush=True)
