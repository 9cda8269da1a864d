"""What a run has to compute with: its ranks, the memory that is free for one of them here, the link to other hosts."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import link as network
from trainer.config import Config
from trainer.environment import number, rdma
from trainer.errors import BadInput


@dataclass(frozen=True)
class Place:
    """What there is: the run's ranks, this host's memory in bytes, the data."""

    ranks: int
    nodes: int
    here: int  # ranks on this host
    device: torch.device
    memory: int  # for a rank: the GPU's, or its share of the host's
    host_memory: int  # for a rank, on the host
    link: float  # bits a second, as a link is named: ways.USED of them carry what is sent
    link_source: str = ""  # what says so; "": it was asked for
    hop: float | None = None  # seconds from host to host, where that was measured
    row: bool = False  # all ranks sum as one: NCCL by RDMA (World.layers)
    cards: tuple[int, ...] = ()  # bytes free on each GPU that a rank has under strategy split
    epoch: int = 0  # steps through all of the data; 0: not known

    @property
    def slow(self) -> bool:
        """Whether a model takes long from host to host."""
        return self.nodes > 1 and self.link <= network.SLOW


def of_environment(config: Config, device: torch.device, link: str | None) -> Place:
    """As `of_rank`, of the ranks that torchrun's variables tell."""
    ranks = number("WORLD_SIZE", 1)
    nodes = number("NNODES", 1)
    here = number("NPROC_PER_NODE", max(1, -(-ranks // nodes)))
    if not ranks or not nodes or not here:
        raise BadInput("WORLD_SIZE, NNODES and NPROC_PER_NODE must be 1 or more")
    return of_rank(config, device, ranks, nodes, here, link)


def of_rank(
    config: Config,
    device: torch.device,
    ranks: int,
    nodes: int,
    here: int,
    link: str | None = None,
    own: list[torch.device] | None = None,
) -> Place:
    """What there is now, for one of `here` ranks of this host.

    own: the rank's devices, of which `device` is the first. Without them all GPUs of the host are looked at, and each
    look leaves a context there: so ranks that train give theirs.
    """
    host = _host_memory() // here
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    row = device.type == "cuda" and rdma()
    free = _free(own) if own else _cards(device)
    cards = free[: len(free) // here] if config.strategy == "split" and not own else free
    return Place(
        ranks, nodes, here, device, memory, host, *network.of_run(link, nodes), cards=tuple(cards), row=row
    )


def _cards(device: torch.device) -> list[int]:
    """Bytes that are free on each of this host's GPUs; none where a run computes on the CPU."""
    if device.type != "cuda":
        return []
    return _free([torch.device("cuda", number) for number in range(torch.cuda.device_count())])


def _free(devices: list[torch.device]) -> list[int]:
    """Bytes that are free on each of these GPUs."""
    return [torch.cuda.mem_get_info(one)[0] for one in devices if one.type == "cuda"]


def _host_memory() -> int:
    """Bytes that this host has left, or that this control group may still take."""
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        of = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read or written count as used until somebody needs the memory.
        given_back = sum(
            int(of.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable")
        )
        free = min(free, limit - used + given_back)
    except (OSError, ValueError):  # no such group, or `max`
        pass
    return max(0, free)
