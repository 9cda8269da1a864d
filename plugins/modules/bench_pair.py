#!/usr/bin/python
"""What one host measures of the way to one peer, for bench.yml: bandwidth, and delay with and without load."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_pair
short_description: Measure the way to a peer by iperf3 and perftest
description:
  - C(listen) starts iperf3, and perftest where there is O(device), on O(address), in a unit that ends by itself
    after O(most) seconds; C(done) ends it before.
  - C(measure) times echo requests to O(peer) first with nothing under way, then while iperf3 sends there, and does
    the same with RDMA.
  - Each host must listen before any measures, and all must measure the same distance at once, so that a link
    carries one stream a way.
options:
  step: {type: str, choices: [listen, measure, done], required: true, description: See above.}
  address: {type: str, description: This host's address on the cluster network.}
  device: {type: str, default: "", description: "This host's RDMA device, or none."}
  peer: {type: dict, description: "The measured one: name, address, device."}
  port: {type: int, default: 5201, description: "iperf3's; the next three are perftest's."}
  seconds: {type: float, default: 3, description: How long the stream lasts.}
  packets: {type: int, default: 200, description: "Echo requests, with and without load each."}
  most: {type: int, default: 600, description: Seconds after which what listens ends whatever happens.}
  traffic_class:
    type: int
    default: 0
    description: "Of a run's packets by RDMA, as NCCL_IB_TC has it; small messages are then timed in it, too. 0: none."
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Measure the way to the next host
  bench_pair:
    step: measure
    address: 10.77.0.11
    peer: {name: node2, address: 10.77.0.12, device: ""}
  become: true
"""

RETURN = r"""
measured:
  description: >-
    Of C(measure): C(peer), C(mbit), C(retransmits), C(idle) and C(loaded) ({ms, ms_99, jitter_ms, lost (percent)}),
    C(rdma) ({gbit, idle, loaded, marked (in O(traffic_class)) ({us, us_99, us_jitter})}), C(note) where something
    came to nothing.
  type: dict
  returned: with C(measure)
"""

import json
import shlex
import socket
import subprocess
import threading
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.echo import ECHO_INTERVAL, echoes, jitter, median
from ansible.module_utils.host_runs import BENCH as UNIT
from ansible.module_utils.perftest import (
    latency_command,
    rdma_command,
    rdma_gbit,
    rdma_latency,
    unprivileged,
)

PING_BYTES = 84
START = 0.5  # seconds that a stream takes to fill the link
LISTEN_SECONDS = 10.0
NINETY_NINE = 0.99


class Failure(Exception):
    """What the user is told."""


def servers(address: str, device: str, port: int, traffic_class: int = 0) -> str:
    """The shell command that listens: iperf3, and perftest's programs, which serve one peer each, again and again."""
    commands = [["iperf3", "-s", "-B", address, "-p", str(port)]]
    if device:
        commands += [rdma_command(device, port + 1), latency_command(device, port + 2)]
    if device and traffic_class:  # who answers marks its own packets
        commands.append(latency_command(device, port + 3, traffic_class=traffic_class))
    loops = [f"while :; do {shlex.join(command)}; sleep 0.1; done &" for command in commands]
    return " ".join([*loops, "wait"])


def listen(run, address: str, device: str, port: int, most: int, traffic_class: int) -> None:
    """Start what listens, and wait until it does. Raises Failure."""
    run(["systemctl", "stop", UNIT])  # what an interrupted bench left
    words = [
        "systemd-run",
        "--quiet",
        f"--unit={UNIT}",
        "--collect",
        f"--property=RuntimeMaxSec={most}",
        "--property=DynamicUser=yes",
        "--property=CapabilityBoundingSet=",
        "--property=LimitMEMLOCK=infinity",  # for perftest, without a right to more
        "--property=NoNewPrivileges=yes",
        "--property=ProtectSystem=strict",
        "--property=ProtectHome=yes",
        "--property=PrivateTmp=yes",  # where iperf3 has its buffers
    ]
    shell = servers(address, device, port, traffic_class)
    code, _, said = run([*words, "--", "/bin/sh", "-c", shell.replace("$", "$$")])
    if code:
        raise Failure(f"systemd-run: {said.strip()[-300:]}")
    end = time.monotonic() + LISTEN_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise Failure(
                    f"{address}:{port}: iperf3 does not listen there ({error}). Is another program on that port? "
                    f"Choose one: -e bench_port=PORT; see `journalctl -u {UNIT}`"
                ) from None
            time.sleep(0.1)


def delays(address: str, own: str, packets: int) -> dict:
    """{ms, ms_99, jitter_ms, lost (percent)} of echo requests to a peer; the times are None where none came back."""
    identity = int(time.monotonic() * 1000) & 0xFFFF
    count, times = echoes(address, own, packets, PING_BYTES, identity)
    if not times:
        return {"ms": None, "ms_99": None, "jitter_ms": None, "lost": 100.0}
    slowest = sorted(times)[min(len(times) - 1, int(NINETY_NINE * len(times)))]
    return {
        "ms": round(median(times) * 1000, 3),
        "ms_99": round(slowest * 1000, 3),
        "jitter_ms": round(jitter(times) * 1000, 4),
        "lost": round(100 * (count - len(times)) / count, 2),
    }


def sent(output: str) -> dict:
    """{mbit, retransmits} in iperf3's JSON: what arrived, and what was sent again. Raises Failure."""
    try:
        answer = json.loads(output)
        if "error" in answer:
            raise Failure(f"iperf3: {answer['error']}")
        end = answer["end"]
        return {
            "mbit": round(end["sum_received"]["bits_per_second"] / 1e6, 1),
            "retransmits": end["sum_sent"].get("retransmits"),
        }
    except (ValueError, KeyError, TypeError):
        raise Failure(f"iperf3 answered: {output.strip()[-200:]}") from None


def tcp(own: str, peer: dict, port: int, seconds: float, packets: int) -> dict:
    """Bandwidth to a peer, and delay before and during it. Raises Failure."""
    found = {"idle": delays(peer["address"], own, packets)}
    for last in (False, False, True):
        try:
            return {**found, **stream(own, peer, port, seconds, packets)}
        except Failure as failure:
            # Whoever connects while the one before is let go is let go with it, such as after the look at the port.
            if last or "control socket" not in str(failure):
                raise
            time.sleep(1)


def stream(own: str, peer: dict, port: int, seconds: float, packets: int) -> dict:
    """What iperf3 carries to a peer, and the delay meanwhile. Raises Failure."""
    least = START + packets * ECHO_INTERVAL + 1
    words = [
        "iperf3",
        "-c",
        peer["address"],
        "-B",
        own,
        "-p",
        str(port),
        "-J",
        "-t",
        str(max(seconds, least)),
    ]
    words += ["-O", str(START), "--connect-timeout", "5000"]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    loaded: dict = {}

    def time_echoes() -> None:
        time.sleep(START)
        loaded.update(delays(peer["address"], own, packets))

    thread = threading.Thread(target=time_echoes, daemon=True)
    thread.start()
    try:
        output, _ = process.communicate(timeout=max(seconds, least) + 30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Failure("iperf3 came to no end") from None
    thread.join(30)
    return {**sent(output.decode(errors="replace")), "loaded": loaded}


def rdma(device: str, peer: dict, port: int, traffic_class: int = 0) -> dict:
    """What RDMA carries, and its delay before and during that. Raises Failure.

    traffic_class: of what a run sends, and so of what is sent here. Of messages, `idle` and `loaded` are the delays of
    those without one, and `marked` of those in it, under the same load.
    """

    def ask(command: list[str]) -> subprocess.Popen:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, **output, **unprivileged())

    def under_load(latency: list[str]) -> tuple[str, str]:
        stream = ask(rdma_command(device, port + 1, peer["address"], traffic_class))
        time.sleep(START)
        said, _ = ask(latency).communicate(timeout=30)
        carried, _ = stream.communicate(timeout=30)
        return carried, said

    latency = latency_command(device, port + 2, peer["address"])
    try:
        idle, _ = ask(latency).communicate(timeout=30)
        carried, loaded = under_load(latency)
        found = {"gbit": rdma_gbit(carried), "idle": rdma_latency(idle), "loaded": rdma_latency(loaded)}
        if traffic_class:
            _, said = under_load(latency_command(device, port + 3, peer["address"], traffic_class))
            if (marked := rdma_latency(said)) is not None:  # what came before is not lost for that
                found["marked"] = marked
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"perftest: {error}") from None
    if None in found.values():
        raise Failure(f"perftest: {(carried or idle).strip()[-200:]}")
    return found


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "choices": ["listen", "measure", "done"], "required": True},
            "address": {"type": "str"},
            "device": {"type": "str", "default": ""},
            "peer": {"type": "dict"},
            "port": {"type": "int", "default": 5201},
            "seconds": {"type": "float", "default": 3},
            "packets": {"type": "int", "default": 200},
            "most": {"type": "int", "default": 600},
            "traffic_class": {"type": "int", "default": 0},
        },
        required_if=[("step", "listen", ["address"]), ("step", "measure", ["address", "peer"])],
        supports_check_mode=True,
    )
    p = module.params
    if module.check_mode:
        module.exit_json(changed=False)
    if p["step"] == "done":
        module.run_command(["systemctl", "stop", UNIT])
        module.exit_json(changed=False)
    if p["step"] == "listen":
        try:
            listen(module.run_command, p["address"], p["device"], p["port"], p["most"], p["traffic_class"])
        except Failure as error:
            module.fail_json(msg=str(error))
        module.exit_json(changed=False)
    peer = p["peer"]
    measured = {"peer": peer["name"], "note": ""}
    try:
        measured.update(tcp(p["address"], peer, p["port"], p["seconds"], p["packets"]))
        if p["device"] and peer.get("device"):
            measured["rdma"] = rdma(p["device"], peer, p["port"], p["traffic_class"])
    except (Failure, OSError) as error:
        measured["note"] = str(error)
    module.exit_json(changed=False, measured=measured)


if __name__ == "__main__":
    main()
