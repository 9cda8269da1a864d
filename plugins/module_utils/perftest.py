"""perftest's ib_write_bw and ib_send_lat: how they are called, and what their tables say."""

from __future__ import annotations

import contextlib
import os
import resource

RDMA_SECONDS = 3
AT_ONCE = (
    8  # messages of 64 KiB, told of together: of 100, its own, a slow port may end none while it is measured
)
MESSAGES = 2000  # whose times make a latency
MESSAGE_BYTES = 64
NOBODY = 65534


def unprivileged() -> dict:
    """subprocess' options for perftest, which reads what another machine sends: nobody's rights.

    Raises this process's limit of locked memory, which they inherit.
    """
    if os.geteuid():
        return {}
    with contextlib.suppress(
        OSError, ValueError
    ):  # root of a container may not: then the limit is what there is
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def rdma_command(device: str, port: int, address: str = "", traffic_class: int = 0) -> list[str]:
    """ib_write_bw's command line: of the listening end, or with an `address` of the asking one.

    device: with its port behind a colon, where that is not the first. port: of TCP.
    traffic_class: of its packets, as NCCL_IB_TC has it: DSCP and the two bits for ECN; 0: none.
    """
    seconds = ["-D", str(RDMA_SECONDS)]
    command = [
        "ib_write_bw",
        *_by(device),
        "-p",
        str(port),
        *seconds,
        "-Q",
        str(AT_ONCE),
        "-F",
        "--report_gbits",
    ]
    return _ended(command, address, traffic_class)


def latency_command(device: str, port: int, address: str = "", traffic_class: int = 0) -> list[str]:
    """ib_send_lat's command line, likewise."""
    messages = ["-n", str(MESSAGES), "-s", str(MESSAGE_BYTES)]
    return _ended(["ib_send_lat", *_by(device), "-p", str(port), *messages, "-F"], address, traffic_class)


def _by(device: str) -> list[str]:
    name, _, port = device.partition(":")
    return ["-d", name, *(["-i", port] if port else [])]


def _ended(command: list[str], address: str, traffic_class: int) -> list[str]:
    marked = [f"--tclass={traffic_class}"] if traffic_class else []
    return [*command, *marked, *([address] if address else [])]


def rdma_gbit(output: str) -> float | None:
    """The average of ib_write_bw's table: its line is bytes, iterations, peak, average, rate of messages."""
    for line in output.splitlines():
        words = line.split()
        if len(words) == 5 and words[0].isdigit() and words[1].isdigit():
            return float(words[3])
    return None


def rdma_latency(output: str) -> dict[str, float] | None:
    """{us, us_99, us_jitter (the deviation)} of ib_send_lat's table.

    Its line is bytes, iterations, least, most, typical, mean, deviation, 99 %, 99.9 %.
    """
    for line in output.splitlines():
        words = line.split()
        if len(words) == 9 and words[0].isdigit() and words[1].isdigit():
            return {"us": float(words[4]), "us_99": float(words[7]), "us_jitter": float(words[6])}
    return None
