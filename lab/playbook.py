"""Playbooks on a lab, for tests: what Ansible did as events and counts instead of text. Needs ansible-runner."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.lab import CHECKOUT, Lab


@dataclass
class Play:
    """What a run of ansible-playbook came to.

    `stats` is by host: the counts ok, changed, failures, unreachable, skipped. `events` are ansible-runner's.
    """

    rc: int
    text: str
    stats: dict[str, dict[str, int]]
    events: list[dict[str, Any]] = field(repr=False)

    def results(self, task: str) -> dict[str, dict[str, Any]]:
        """The result of the task of that name on each host that ran it."""
        return {
            event["event_data"]["host"]: event["event_data"]["res"]
            for event in self.events
            if event["event"].startswith("runner_on_")
            and "res" in event["event_data"]
            and event["event_data"].get("task") == task
        }

    def failures(self) -> list[tuple[str, str, str]]:
        """(host, task, message) of whatever failed or could not be reached."""
        return [
            (
                event["event_data"]["host"],
                event["event_data"]["task"],
                str(event["event_data"]["res"].get("msg", "")),
            )
            for event in self.events
            if event["event"] in ("runner_on_failed", "runner_on_unreachable")
            and not event["event_data"].get("ignore_errors")
        ]


def run(
    lab: Lab,
    playbook: str | Path | list[dict],
    *arguments: str,
    extravars: Mapping[str, Any] | None = None,
    limit: str | None = None,
    environment: Mapping[str, str] | None = None,
    project: Path = CHECKOUT,
) -> Play:
    """Run PLAYBOOK (a file of PROJECT, or plays) on LAB's inventory with ansible-playbook's further ARGUMENTS."""
    import ansible_runner

    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    settings = {
        "ANSIBLE_CONFIG": str(project / "ansible.cfg"),
        # In the lab's own directory: what is left of its connections goes with it.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(lab.state / "connections"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
    }
    scratch = Path(tempfile.mkdtemp(prefix="lab-play-"))
    try:
        runner = ansible_runner.run(
            private_data_dir=str(scratch),
            project_dir=str(project),
            playbook=playbook if isinstance(playbook, list) else str(playbook),
            inventory=str(lab.inventory),
            extravars=dict(extravars or {}),
            cmdline=" ".join(arguments) or None,
            limit=limit,
            envvars={**kept, **settings, **(environment or {})},
            quiet=True,
        )
        counts = {
            "ok": "ok",
            "changed": "changed",
            "failures": "failures",
            "dark": "unreachable",
            "skipped": "skipped",
        }
        stats = runner.stats or {}
        hosts = sorted({host for key in counts for host in stats.get(key, {})})
        return Play(
            rc=runner.rc,
            text=runner.stdout.read(),
            stats={
                host: {name: stats.get(key, {}).get(host, 0) for key, name in counts.items()}
                for host in hosts
            },
            events=list(runner.events),
        )
    finally:
        shutil.rmtree(scratch)
