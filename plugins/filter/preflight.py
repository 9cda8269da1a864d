"""What preflight asks of the hosts: whom each measures, how long, and which steps they try."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from ansible.errors import AnsibleFilterError

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))
sys.path.append(str(Path(__file__).parents[2]))

from host_runs import busy
from perftest import RDMA_SECONDS
from preflight_room import run_material
from rdma_ports import fastest

from trainer import config as trainer_config
from trainer.errors import BadInput

DEPTHS = ("quick", "full", "burn")
MATRIX_HOSTS = 4  # up to which the quick preflight measures every pair; beyond, each host its next
PACKETS = {"quick": 200, "full": 1000, "burn": 1000}
SECONDS = {"quick": 1.0, "full": 3.0, "burn": 10.0}
ROUND_MORE = 1.5  # seconds that a round takes besides its stream
FAST = 10_000  # Mbit/s, beyond which one connection does not fill a link
STREAMS = 4
PATIENCE = 15.0  # seconds that a host waits for a peer to begin
START_SPREAD = 0.1  # of those for each host: the controller starts so many one after the other
RUN = "smoke-preflight"  # names that begin so are those of trials, which nobody's run has
# What a run is about; the rest of trainer_config (threads, device, strategy, …) is about the machines.
TRIAL = {
    "model": "tiny",
    "dataset": "austen",
    "max_samples": 40,
    "vocab_size": 300,
    "sequence_length": 32,
    "checkpoint_every": 0,
    "restarts": 0,
    "timeout_seconds": 45.0,
    "tensorboard": False,
}
OF_MACHINES = ("device", "dtype", "threads", "strategy", "offload_dir", "compile")


def preflight_fault(depth: object, steps: object) -> str:
    """What is wrong with what was asked for; "" where nothing is."""
    if str(depth) not in DEPTHS:
        return f"depth: found {depth}; expected one of {', '.join(DEPTHS)}. Correct it: -e depth=quick"
    if not str(steps).isdigit():
        return f"preflight_steps: found {steps}; expected a whole number, 0 for none. Correct it."
    return ""


def preflight_takers(
    hosts: list[dict], seen: dict[str, dict], asked: dict[str, dict], local: bool
) -> list[dict]:
    """Who measures the network: {name, address, port, rdma (a device)} of those that can; none without peers.

    `seen`, `asked`: what the tasks preflight_survey and run_host registered on each. What is active is not disturbed.
    """
    surveys = {name: result["survey"] for name, result in seen.items() if result and "survey" in result}
    active = busy([(result or {}).get("host_facts", {}) for result in asked.values()])
    takers = [
        {
            **{"name": host["name"], "address": host["address"]},
            "port": surveys[host["name"]]["free_port"],
            "rdma": fastest(surveys[host["name"]]["rdma"]),
        }
        for host in hosts
        if surveys.get(host["name"], {}).get("free_port")
    ]
    return [] if local or active or len(takers) < 2 else takers


def preflight_measure(survey: dict, hosts: list[dict], depth: str, burn_minutes: float) -> dict:
    """How a host with this `survey` measures the ways: arguments of preflight_pair. `hosts`: those that take part."""
    link = survey.get("link") or {}
    count = len(hosts)
    every = count <= MATRIX_HOSTS or depth != "quick"
    rounds = list(range(1, count)) if every else [1]
    passes = 1
    if depth == "burn":
        once = SECONDS[depth] + ROUND_MORE
        if all(host["rdma"] for host in hosts):
            once += RDMA_SECONDS + ROUND_MORE
        passes = max(1, round(float(burn_minutes) * 30 / (once * max(len(rounds), 1))))
    return {
        # RDMA takes its time, and a program that nobody needs else.
        "hosts": [{**host, "rdma": host["rdma"] if depth != "quick" else ""} for host in hosts],
        "rounds": rounds,
        "mtu": link.get("mtu") or 1500,
        "streams": STREAMS if (link.get("speed") or 0) > FAST and link.get("physical") else 1,
        "packets": PACKETS[depth],
        "seconds": SECONDS[depth],
        "passes": passes,
        "patience": max(PATIENCE, START_SPREAD * count),
    }


def preflight_trial(inventory_keys: dict, processes: int = 1, steps: int = 1) -> dict:
    """What the trainer's tasks take for what was asked for (`__trainer_asked`): a few steps of a tiny model."""
    plain = json.loads(json.dumps(inventory_keys))  # without Ansible's marks
    about = {key: value for key, value in plain.items() if key in OF_MACHINES}
    size = max(4, int(processes))
    keys = {**TRIAL, **about, "run": RUN, "steps": int(steps), "batch_size": size}
    try:
        config = dataclasses.asdict(trainer_config.from_mapping({**keys, "resume": "auto"}))
    except BadInput as error:
        raise AnsibleFilterError(f"trainer_config in the inventory, or -e: {error}") from None
    return {
        "run": RUN,
        "config": {name: value for name, value in config.items() if value is not None},
        "uploads": [],
        "elsewhere": [],
        "commands": {},
        "launcher": "systemd",
        **dict.fromkeys(("beside", "detach", "follow", "plan", "queue", "resume", "smoke"), False),
    }


def preflight_steps_said(
    hindrance: dict, followed: dict, faults: dict[str, str], steps: int, check_mode: bool
) -> dict:
    """What became of the training steps: {result (pass, fail or skip), message, hosts}.

    hindrance: what preflight_verdict said before them; followed: what run_follow returned; faults: where a task failed,
    why it did, of each host that was in the trial ("" of those that are well).
    """
    if int(steps) == 0 or check_mode:
        return {"result": "skip", "message": "they were not asked for"}
    if hindrance.get("active"):
        return {"result": "skip", "message": f"{hindrance['active'][0]} is active, and is not disturbed"}
    if hindrance.get("failed_checks"):
        return {
            "result": "skip",
            "message": f"not tried, since this failed: {', '.join(hindrance['failed_checks'])}",
        }
    outcome = followed.get("outcome") or {}
    if faults or outcome.get("result") != "finished":
        own = {host: fault for host, fault in faults.items() if fault}
        end = "a host does not answer any more" if faults else "they came to no end"
        return {
            "result": "fail",
            "message": outcome.get("message") or next(iter(own.values()), end),
            "hosts": [outcome["host"]] if outcome.get("host") else list(own)[:1],
        }
    last = followed.get("last") or {}
    return {
        "result": "pass",
        "message": f"{last.get('step', steps)} steps on {last.get('world_size', '?')} ranks, "
        f"{float(last.get('step_seconds') or 0):.2f} s the last one",
    }


class FilterModule:
    def filters(self):
        return {
            "preflight_fault": preflight_fault,
            "preflight_material": run_material,
            "preflight_measure": preflight_measure,
            "preflight_steps_said": preflight_steps_said,
            "preflight_takers": preflight_takers,
            "preflight_trial": preflight_trial,
        }
