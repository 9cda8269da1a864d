"""Judge what all hosts said, tell it, and keep it: as JSON, and as the baseline of later results where it is good."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ansible import constants as C
from ansible import context
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from host_runs import busy
from live_frame import clean
from preflight_base import FAIL, PASS, SKIP, WARN, Cluster, Limits, findings
from preflight_report import (
    MARKS,
    baseline_name,
    is_good,
    last_json,
    read_result,
    renewed,
    report,
    text,
    write_result,
)
from preflight_room import CHECKOUT, run_room
from telling import same_hosts
from trainer_wheel import content_version

# What preflight.yml takes of a run to come.
RUN = ("run", "model", "dataset", "validation", "adapter", "device")

COLOURS = {MARKS[FAIL]: C.COLOR_ERROR, MARKS[WARN]: C.COLOR_WARN, MARKS[PASS]: C.COLOR_OK}

display = Display()


def plain(value):
    """`value` without Ansible's marks, as JSON takes it."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def reason(result: dict) -> str:
    """Why a registered result holds no answer; "" where it may."""
    if result.get("unreachable") or result.get("failed") or "survey" not in result:
        lines = str(result.get("msg") or "it was not asked").strip().splitlines()
        return lines[-1][:300] if lines else "no reason given"
    return ""


def burned(result: dict) -> list[dict] | None:
    """What `trainer burn` said of each device of a host, of the task's result; None where it was not asked."""
    if "text" in result:
        return last_json(result["text"], "[{") or [{"device": "", "error": "it said nothing of its devices"}]
    if result.get("unreachable") or "rc" in result or "msg" in result:
        lines = str(result.get("msg") or "").strip().splitlines()
        return [{"device": "", "error": lines[-1][-300:] if lines else "no reason given"}]
    return None


def fact_of(variables, host: dict, rdma: bool, device: str) -> dict:
    """What is known of one host: `Cluster.facts`' value. variables: the host's. device: where runs are to compute."""
    seen, asked, pair = (
        plain(variables.get(name) or {})
        for name in ("__preflight_seen", "__trainer_host", "__preflight_pair")
    )
    error = reason(seen)
    if not error and "host_facts" not in asked:
        error = str(asked.get("msg") or "it was not asked for its runs")[-300:]
    return {
        "expected": {
            "hostname": host["names"][0],
            "address": host["address"],
            "rdma": rdma,
            "firewall": bool(plain(variables.get("firewall_manage", True))),
            "processes": int(plain(variables.get("nproc_per_node") or 0)),
            "device": device,
        },
        "survey": seen.get("survey"),
        "run": asked.get("host_facts"),
        "error": error,
        "pairs": pair.get("pairs"),
        "unmeasured": "" if "pairs" in pair else str(pair.get("msg") or "")[-300:],
        "outside": pair.get("outside") or str(pair.get("msg") or "")[-200:] or None,
        "clock": pair.get("clock"),
        "burn": burned(plain(variables.get("__preflight_burned") or {})),
    }


def commands() -> dict[str, str]:
    """How ansible, site.yml and train.yml are called with this inventory; train_all: the last, to get its own -l."""
    hosts = same_hosts(context.CLIARGS, C.DEFAULT_HOST_LIST)
    words = same_hosts(context.CLIARGS, C.DEFAULT_HOST_LIST, subset=False)
    place = {name: os.path.relpath(CHECKOUT / name) for name in ("site.yml", "train.yml")}
    return {
        "ansible": shlex.join(["ansible", *words]),
        "site": shlex.join(["ansible-playbook", *words, place["site.yml"]]),
        "train": shlex.join(["ansible-playbook", *hosts, place["train.yml"]]),
        "train_all": shlex.join(["ansible-playbook", *words, place["train.yml"]]),
        "subset": str(context.CLIARGS.get("subset") or ""),
    }


def asked(extra: Mapping) -> str:
    """What train.yml needs after it for the run that preflight.yml was asked about, in its words after -e."""
    given = {"run": "NAME", **{key: str(extra[key]) for key in RUN if key in extra}}
    # Ansible splits key=value at spaces.
    words = [
        json.dumps({key: value}) if value.split() != [value] else f"{key}={value}"
        for key, value in given.items()
    ]
    return " ".join(f"-e {shlex.quote(word)}" for word in words)


class ActionModule(ActionBase):
    """Arguments: hosts (as cluster_hosts has them, in node order), members (the same of the whole inventory), limits
    (fields of Limits), steps, local, device (where runs are to compute), words
    (model, dataset, validation and adapter of the run to come, or ""), copies
    (checkpoints that it has at a time), shared (the directory that all hosts share, or ""), results (directory), began
    (s since the epoch), quiet.

    quiet: nothing is told or written; returns failed_checks (names) and active (as `busy` has it) alone.

    Returns the report's counts and exit_status (0, 1 or 2; the callback exit_status heeds 1).
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = plain(self._task.args)
        rdma = set(task_vars["groups"].get("rdma", ()))
        facts = {
            host["name"]: fact_of(
                task_vars["hostvars"][host["name"]], host, host["name"] in rdma, str(args["device"])
            )
            for host in args["hosts"]
        }
        there: dict[str, int] = {}
        for fact in facts.values():
            for name, size in ((fact["survey"] or {}).get("held") or {}).get("paths", {}).items():
                there[name] = max(size, there.get(name, 0))
        needed, unknown = run_room(args["words"], int(args["copies"]), there, str(args.get("shared") or ""))
        limits = Limits.of(
            {
                **args["limits"],
                **commands(),
                "run_gb": needed,
                "run_unknown": unknown,
                "version": content_version(CHECKOUT),
            }
        )
        steps = args.get("steps") or {"result": SKIP, "message": "they were not asked for"}
        members = {host["address"]: host["name"] for host in args["members"]}
        cluster = Cluster(facts, limits, steps, bool(args.get("local")), members)
        if args.get("quiet"):
            failed = dict.fromkeys(one.check for one in findings(cluster) if one.result == FAIL)
            found = busy([facts[host]["run"] for host in cluster.alive])
            return {**result, "changed": False, "failed_checks": list(failed), "active": found}
        path = os.path.join(args["results"], baseline_name(facts))
        before = read_result(path)
        found = report(cluster, before, time.time() - float(args["began"]), os.path.relpath(path))
        try:
            write_result(os.path.join(args["results"], "last.json"), found)
            if is_good(found) and not self._task.check_mode:
                write_result(path, renewed(found, before))
        except OSError as error:
            display.warning(f"{error.filename}: {error.strerror}; the result was not written")
        for line in f"\n{clean(text(found))}".split("\n"):  # with hosts' own words
            display.display(line, color=COLOURS.get(line.partition(" ")[0]))
        counts = found["counts"]
        answer = {**result, "changed": False, "exit_status": found["exit_status"], "counts": counts}
        if found["result"] == FAIL:
            names = ", ".join(dict.fromkeys(one["check"] for one in found["checks"] if one["result"] == FAIL))
            return {**answer, "failed": True, "msg": f"Preflight failed: {names}. What to do stands above."}
        display.display(f"\nNext: {limits.train} {asked(load_extra_vars(self._loader))}")
        if found["result"] == WARN:
            answer["msg"] = f"Preflight warned {counts[WARN]} times"
        return answer
