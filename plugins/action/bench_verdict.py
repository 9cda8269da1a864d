"""Tell what bench.yml measured; keep it as JSON and as a picture, and as the baseline unless something got worse."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from bench_report import figures_of, picture, text
from live_frame import clean
from preflight_report import (
    SLOWEST_FULL_TCP,
    baseline_name,
    last_json,
    read_result,
    renewed,
    steady_hosts,
    worse_than,
    write_result,
)

display = Display()


def collectives_fault(said: dict) -> str:
    """Why a host has no answer, of what its task registered; "" where it has, or was not asked.

    Whether it failed does not say so: with failed_when, as the task has it, nothing that is registered has failed.
    """
    if not said or "text" in said or said.get("skipped"):
        return ""
    return str(said.get("msg") or "no reason given").strip()


class ActionModule(ActionBase):
    """Arguments: hosts (names, in node order), results (directory), began (s since the epoch).

    Reads what the role's tasks registered on each host. Returns worse (what is worse than the baseline).
    """

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = self._task.args
        hosts = [str(name) for name in args["hosts"]]
        of = {name: task_vars["hostvars"][name] for name in hosts}
        pairs, failed = {}, {}
        for name in hosts:
            rounds = json.loads(json.dumps(of[name].get("__bench_rounds") or []))
            pairs[name] = {one["peer"]: one for one in rounds if one}
            if fault := collectives_fault(of[name].get("__bench_collectives") or {}):
                failed[name] = f"collectives: {fault}"
        first = str((of[hosts[0]].get("__bench_collectives") or {}).get("text") or "")
        collectives = last_json(first, '{"backend"') or {}
        links = {name: of[name]["__preflight_seen"]["survey"]["link"] or {} for name in hosts}
        found = {
            "time": time.time(),
            "seconds": round(time.time() - float(args["began"]), 1),
            "hosts": hosts,
            "interfaces": {name: str(link.get("name") or "") for name, link in links.items()},
            "layered": [name for name, link in links.items() if link.get("layered")],
            "pairs": pairs,
            "collectives": collectives,
            "failed": failed,
            "figures": figures_of(pairs, collectives),
        }
        path = os.path.join(args["results"], baseline_name(hosts))
        before = read_result(path)
        found["worse"] = (
            worse_than(found["figures"], before, steady_hosts(links), SLOWEST_FULL_TCP) if before else []
        )
        display.display(f"\n{clean(text({**found, 'before': before}))}\n")  # with hosts' own words
        if self._task.check_mode:
            return {**result, "changed": False}
        last, plot = (os.path.join(args["results"], name) for name in ("last.json", "last.svg"))
        try:
            write_result(last, found)
            with open(plot, "w", encoding="utf-8") as file:
                file.write(picture(found))
            if not found["worse"] and not failed:
                write_result(path, renewed(found, before))
        except OSError as error:
            display.warning(f"{error.filename}: {error.strerror}; the result was not written")
        told = [f"As a picture: {os.path.relpath(plot)}; all figures: {os.path.relpath(last)}"]
        if found["worse"]:
            told.append(f"If it shall be so from now on: rm {os.path.relpath(path)}")
        display.display("\n".join(told) + "\n")
        if failed or any(one.get("note") for ways in pairs.values() for one in ways.values()):
            return {
                **result,
                "changed": False,
                "failed": True,
                "msg": "Not all could be measured; why stands above.",
            }
        return {**result, "changed": False, "worse": found["worse"]}
