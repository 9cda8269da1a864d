"""What a rank computes on: its host's card or CPU, kernel, driver and packages, as a report names them; its memory."""

import os
import platform
import resource
from pathlib import Path

import torch

from trainer.environment import resident_bytes
from trainer.world import World, versions


def memory(devices: list[torch.device]) -> dict:
    """This rank's memory in bytes: its accelerators', or the process's where it computes on the CPU."""
    if devices[0].type == "cuda":
        return {
            "memory_allocated_bytes": sum(map(torch.cuda.memory_allocated, devices)),
            "memory_reserved_bytes": sum(map(torch.cuda.memory_reserved, devices)),
            "memory_peak_bytes": peak_bytes(devices),
        }
    return {
        "memory_allocated_bytes": resident_bytes(),
        "memory_reserved_bytes": None,
        "memory_peak_bytes": peak_bytes(devices),
    }


def peak_bytes(devices: list[torch.device]) -> int:
    """The most memory that this rank has had: of its cards, since `forget_peak`, or of the process on the CPU."""
    if devices[0].type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, devices))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak(devices: list[torch.device]) -> None:
    """Have the cards' peak count from now on."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)


def machines(world: World) -> list[dict]:
    """The run's machines, those that are alike as one: {hosts, cards, …facts}; all ranks must call.

    cards: the names of the cards that its ranks use, by rank; empty where they compute on the CPU.
    """
    card = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    told = world.gather({"card": card, **(facts(world.device) if world.first_on_host else {})})
    alike: dict[str, dict] = {}
    for first in world.firsts:
        ranks = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[first]]
        found = {**told[first], "cards": [told[rank]["card"] for rank in ranks if told[rank]["card"]]}
        del found["card"]
        alike.setdefault(repr(sorted(found.items())), {"hosts": [], **found})["hosts"].append(
            world.hosts[first]
        )
    return list(alike.values())


def facts(device: torch.device) -> dict:
    """What one host says of itself: system, kernel, cpu, cores, memory_bytes, driver, cuda, python, and the packages.

    driver and cuda are null where no card computes; what the machine does not tell is null.
    """
    on_card = device.type == "cuda"
    return {
        "system": _named("/etc/os-release", "PRETTY_NAME", "=").strip('"') or None,
        "kernel": platform.release(),
        "cpu": _named("/proc/cpuinfo", "model name", ":") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": _read("/sys/module/nvidia/version").strip() or None if on_card else None,
        "cuda": torch.version.cuda if on_card else None,
        "python": platform.python_version(),
        **versions(),
    }


def _named(path: str, name: str, mark: str) -> str:
    """The value of the first line `name mark value` of a file; "" where there is none."""
    lines = (line.partition(mark) for line in _read(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
