"""Two nodes of this machine in a directory of their own, and what playbooks say there."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import ansible_runner
import yaml

from plugins.module_utils.trainer_wheel import content_version

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"steps": 4, "sequence_length": 32, "batch_size": 4, "vocab_size": 300, "max_samples": 40}
LONG = {**SMALL, "steps": 100_000}
RUN_VARIABLE = "TRAINYARD_RUN_DIR="


class Yard:
    """Two nodes in a directory of their own, with a trainer deployed on each."""

    checkout = ROOT  # whose playbooks are played

    def __init__(self, path):
        self.path, self.results = path, path / "runs"
        local = yaml.safe_load((ROOT / "inventory/local/hosts.yml").read_text())
        variables = local["all"]["children"]["cluster"]["vars"]
        variables["local_root"] = str(path / "nodes")
        variables["trainer_results_dir"] = str(self.results)
        variables["trainer_port"] = free_port()
        variables["trainer_refresh_seconds"] = 0.5
        variables["trainer_log_seconds"] = 1
        self.port = variables["trainer_port"]
        self.inventory = path / "hosts.yml"
        self.inventory.write_text(yaml.safe_dump(local, sort_keys=False))
        for node in ("node1", "node2"):
            self.deploy(node)

    def node(self, name):
        return self.path / "nodes" / name

    def deploy(self, node, release=None, script=None):
        """Give a node a release, named as site.yml would, whose `trainer` is the checkout's, or `script`."""
        release = release or f"{content_version(ROOT)}-test"
        opt = self.node(node) / "opt"
        program = opt / "releases" / release / "bin/trainer"
        program.parent.mkdir(parents=True, exist_ok=True)
        python = shlex.quote(sys.executable)
        program.write_text(
            script
            or f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\nexec {python} -m trainer "$@"\n'
        )
        program.chmod(0o755)
        with contextlib.suppress(FileNotFoundError):
            (opt / "current").unlink()
        (opt / "current").symlink_to(f"releases/{release}")

    def environment(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return {
            **kept,
            "ANSIBLE_CONFIG": str(self.checkout / "ansible.cfg"),
            "ANSIBLE_HOME": str(self.path / "ansible"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def play(self, playbook="train.yml", arguments="", **extra):
        """Run a playbook by ansible-runner, extra variables as an operator types them; returns the run."""
        # Ansible splits what follows -e at spaces, as a shell does.
        words = [
            "-e " + shlex.quote(f"{key}={shlex.quote(str(value)) if isinstance(value, Path) else value}")
            for key, value in extra.items()
        ]
        runner = self.path / f"runner-{time.monotonic_ns()}"
        runner.mkdir()
        return ansible_runner.run(
            private_data_dir=str(runner),
            project_dir=str(self.checkout),
            playbook=playbook,
            inventory=str(self.inventory),
            cmdline=" ".join([*words, arguments]).strip() or None,
            envvars=self.environment(),
            quiet=True,
        )

    def command(self, **extra):
        words = ["ansible-playbook", "-i", str(self.inventory), "train.yml"]
        return words + [word for key, value in extra.items() for word in ("-e", f"{key}={value}")]

    def processes(self, node=None):
        """Pids of all that runs for this yard, or for one node of it."""
        place = self.node(node) if node else self.path
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{RUN_VARIABLE}{place}".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found

    def status(self, run, node="node1"):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.node(node) / "var/runs" / run / "status.json").read_text())
        return {}

    def clear(self, node=None):
        while pids := self.processes(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def failures(run):
    """The message of every failed task."""
    return [
        event["event_data"]["res"]["msg"]
        for event in run.events
        if event["event"] in ("runner_on_failed", "runner_on_unreachable")
    ]


def task_names(run):
    return [e["event_data"]["task"] for e in run.events if e["event"] == "playbook_on_task_start"]


def changed(run):
    return sum(run.stats["changed"].values())


def said(run):
    return re.sub(r"\x1b\[[0-9;]*m", "", run.stdout.read())


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.2)
