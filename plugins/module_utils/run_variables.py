"""The variables that a run's processes go by: what RUN.env has of each host, and the names that are nobody else's."""

from __future__ import annotations

import os

from ansible.errors import AnsibleFilterError


def run_plan(
    facts: dict[str, dict], run: str, port: int, store: str = "", launch: str = "", queue: bool = False
) -> dict[str, dict[str, str]]:
    """Each host's rank variables, in node order: {host: {variable: value}}; those of the first attempt.

    `facts` are those of the module run_host, in node order; of each, `address`, `interface`, `processes` and
    `run_dir` count. store: where the launchers agree on the attempts. launch: this start of the run, no other.
    queue: let it wait on each host for the runs that are active there.
    """
    if not facts:
        raise AnsibleFilterError("run_plan: a run needs at least one host")
    world = sum(fact["processes"] for fact in facts.values())
    master = next(iter(facts.values()))["address"]
    plan, offset = {}, 0
    for rank, (host, fact) in enumerate(facts.items()):
        plan[host] = {
            "TRAINYARD_RUN": run,
            # Not the run that the host was asked of: a trial has a directory of its own.
            "TRAINYARD_RUN_DIR": os.path.join(os.path.dirname(fact["run_dir"]), run),
            "TRAINYARD_HOST": host,
            "NNODES": str(len(facts)),
            "NODE_RANK": str(rank),
            "NPROC_PER_NODE": str(fact["processes"]),
            "RANK_OFFSET": str(offset),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "CLUSTER_ADDRESS": fact["address"],
            "TRAINYARD_STORE": store if len(facts) > 1 else "",
            "TRAINYARD_LAUNCH": launch,
            "TRAINYARD_AFTER": ",".join(_others(fact, run)) if queue else "",
            # NCCL takes the name for a prefix (eth1 would match eth10, too) unless `=` stands before it.
            "NCCL_SOCKET_IFNAME": f"={fact['interface']}",
            "GLOO_SOCKET_IFNAME": fact["interface"],
        }
        offset += fact["processes"]
    return plan


def run_alone(
    facts: dict[str, dict], run: str, port: int, one_machine: bool, launch: str = ""
) -> dict[str, dict[str, str]]:
    """As `run_plan`, but every host for itself, a run of one node; on `one_machine` each needs a port of its own."""
    return {
        host: run_plan({host: fact}, run, port + number * one_machine, launch=launch)[host]
        for number, (host, fact) in enumerate(facts.items())
    }


def _others(fact: dict, run: str) -> list[str]:
    """The other runs that are active on a host; a trial ends by itself or with its run."""
    return sorted(name for name in fact["active"] if name != run and not name.startswith("smoke-"))


# What a run's processes go by, and Trainyard sets: for a host (as above, whatever host that is), by torchrun for each
# rank, and by the unit; all that begin with TRAINYARD_ or PYTHON besides.
ANY_HOST = {"processes": 1, "address": "", "interface": "", "run_dir": ""}
RUNS_OWN = sorted(
    {
        *(name for name in run_plan({"": ANY_HOST}, "", 0)[""] if not name.startswith("TRAINYARD_")),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK"),
        *("HOME", "PATH"),
    }
)
