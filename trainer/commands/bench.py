"""`trainer bench`: what collectives carry between the ranks of a run that would be started here, and by which way.

It takes the place that RUN.env's variables give it, starts this host's ranks, and lets them meet as a run's do
(world.py): same backend, same interface. All hosts must start it at about the same time.

Sizes are of the whole buffer, and bus bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): bytes a second,
times 2(n-1)/n for a reduction that all get and (n-1)/n where parts are exchanged, so that the link's speed is what to
expect whatever the number of ranks n.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from trainer import config as configuration
from trainer import environment
from trainer.errors import BadInput

SMALLEST, STEP = 4 << 10, 4  # bytes, and by what each size is greater than the last
MOST_TURNS = 50
SYS = Path("/sys/class")
WORD = 4  # bytes that an InfiniBand port counts as one


def main(device: str, largest: int, seconds: float) -> int:
    """Measure; the first rank prints the result as JSON. largest: bytes. seconds: for each collective and size."""
    if "RANK" not in os.environ:
        return _start()
    config = configuration.from_mapping({"run": "bench", "device": device, "timeout_seconds": 60.0})
    place = environment.read("bench")
    answer = _measure(config, place, largest, seconds)
    if place.rank == 0:
        print(json.dumps(answer), flush=True)
    return 0


def _start() -> int:
    """Start this host's ranks; the exit code of the first that fails, whose fellows are ended."""
    here, offset = environment.number("NPROC_PER_NODE", 1), environment.number("RANK_OFFSET", 0)
    if environment.number("WORLD_SIZE", 1) < 2:
        raise BadInput("a bench of collectives needs two ranks or more; a host alone has nobody to talk to")
    ranks = []
    for local in range(here):
        variables = {
            "RANK": str(offset + local),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(here),
            "OMP_NUM_THREADS": "1",
            "TRAINYARD_LAUNCHER": str(os.getpid()),
        }
        ranks.append(
            subprocess.Popen([sys.executable, "-m", "trainer", *sys.argv[1:]], env=os.environ | variables)
        )
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.terminate() if rank.poll() is None else None
    return next((abs(code) for code in codes if code), 0)


def _measure(config, place, largest: int, seconds: float) -> dict:
    """{backend, device, ranks, hosts, rows, ways}; see the first rank's print."""
    import torch
    import torch.distributed as dist

    from trainer.world import World, translated

    world = World(config, place)
    group, on_gpu = world.training, world.device.type == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(world.device)

    def buffers(count: int):
        return torch.ones(count, device=world.device), torch.empty(count, device=world.device)

    # Each: the share of the buffer that crosses a link (see above), and the call; buffers are of `size` bytes.
    part = (world.size - 1) / world.size
    collectives = {
        "all_reduce": (2 * part, lambda one, other: dist.all_reduce(one, group=group)),
        "all_gather": (
            part,
            lambda one, other: dist.all_gather_into_tensor(other, one[: len(one) // world.size], group=group),
        ),
        "all_to_all": (part, lambda one, other: dist.all_to_all_single(other, one, group=group)),
        "broadcast": (1.0, lambda one, other: dist.broadcast(one, 0, group=group)),
    }
    if on_gpu:  # gloo's own is an all-reduce that throws the rest away; no strategy calls it
        collectives["reduce_scatter"] = (
            part,
            lambda one, other: dist.reduce_scatter_tensor(other[: len(one) // world.size], one, group=group),
        )

    def slowest(own: float) -> float:
        return max(world.gather(own))

    rows, carried = [], {}
    for name, (share, call) in collectives.items():
        size = SMALLEST
        while size <= largest:
            count = size // WORD // world.size * world.size  # whole parts for every rank
            one, other = buffers(count)

            def timed(turns: int, call=call, one=one, other=other) -> float:
                with translated(world):
                    dist.barrier(group=world.control)
                    begin = time.perf_counter()
                    for _ in range(turns):
                        call(one, other)
                    wait()
                return slowest((time.perf_counter() - begin) / turns)

            timed(1)  # connections are made, memory is found
            first = timed(1)
            turns = max(1, min(MOST_TURNS, int(seconds / max(first, 1e-6))))
            before = _counters() if place.first_on_host else {}
            taken = timed(turns)
            if name == "all_reduce":
                carried = {key: value - before.get(key, 0) for key, value in _counters().items() if before}
            bytes_there = count * WORD
            rows.append(
                {
                    "collective": name,
                    "bytes": bytes_there,
                    "seconds": taken,
                    "bus": bytes_there / taken * share,
                }
            )
            if first > 4 * seconds:
                break  # the next would take longer still, and say the same
            size *= STEP
    ways = world.gather({"host": place.host, "carried": carried})
    backend = dist.get_backend(group)
    world.close()
    return {
        "backend": backend,
        "device": world.device.type,
        "ranks": world.size,
        "hosts": list(dict.fromkeys(world.hosts)),
        "rows": rows,
        # Of the last all_reduce: bytes that left by each way, so that nobody has to believe a setting.
        "ways": {one["host"]: one["carried"] for one in ways if one["carried"]},
    }


def _counters() -> dict[str, int]:
    """Bytes sent so far by each network interface, and by each port of an RDMA device."""
    found = {}
    for file in SYS.glob("net/*/statistics/tx_bytes"):
        found[file.parts[-3]] = int(file.read_text())
    for file in SYS.glob("infiniband/*/ports/*/counters/port_xmit_data"):
        found[f"{file.parts[-5]} port {file.parts[-3]} (RDMA)"] = WORD * int(file.read_text())
    return found
