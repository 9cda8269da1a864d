"""A run keeps the release that it was started with, on each host, to its end; by whatever keeps it."""

import functools
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import jinja2
import pytest
import yaml

from plugins.filter import plan, slurm
from plugins.module_utils import host_runs
from trainer import errors, world

ROLE = Path(__file__).resolve().parents[2] / "roles/trainer"


@pytest.fixture
def host(tmp_path):
    """A host's places, with the releases `old` and `new`, whose trainer says which it is; `new` is in use."""
    places = types.SimpleNamespace(opt=tmp_path / "opt", etc=tmp_path / "etc", var=tmp_path / "var")
    for name in ("old", "new"):
        program = places.opt / "releases" / name / "bin/trainer"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    (places.opt / "current").symlink_to("releases/new")
    (places.etc / "runs").mkdir(parents=True)
    return places


def started(host, run, release="old", state="running"):
    """A run as train.yml has left it on the host."""
    variables = {"TRAINYARD_RUN": run}
    if release:
        variables[host_runs.RELEASE] = str(host.opt / "releases" / release)
    (host.etc / f"runs/{run}.env").write_text(plan.run_env(variables))
    (host.var / "runs" / run).mkdir(parents=True)
    (host.var / "runs" / run / "status.json").write_text(f'{{"state": "{state}"}}')


def unit(host, name):
    """The command lines under `name` in the unit of run `first`, as systemd would execute them."""
    text = jinja2.Template((ROLE / "templates/trainyard@.service.j2").read_text()).render(
        trainer_opt_dir=str(host.opt),
        trainer_etc_dir=str(host.etc),
        trainer_state_dir=str(host.var),
        trainer_user="trainyard",
        trainer_stop_timeout=120,
    )
    (line,) = re.findall(rf"^{name}=-?(.*)$", text.replace("\\\n", ""), re.MULTILINE)
    return line.replace("%i", "first").replace("$$", "$")


@pytest.mark.parametrize(("named", "runs"), [("old", "old"), ("", "new")])
def test_the_unit_runs_what_its_run_was_started_with(host, named, runs):
    """A launcher that a reboot or a restart starts anew is of the release of before; without one, of the current."""
    started(host, "first", named)
    variables = {**host_runs.run_variables(host.etc / "runs/first.env"), "TRAINYARD_RUN_DIR": "/run-dir"}
    done = subprocess.run(
        ["sh", "-c", unit(host, "ExecStart")], env=variables, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"{runs} launch {host.etc}/runs/first.yaml\n", "")
    # What asks the ranks to save is of the same release; here the launcher is an end that is there already.
    variables["MAINPID"] = "1"
    stop = unit(host, "ExecStop").replace("exec tail", "echo tail")
    done = subprocess.run(["sh", "-c", stop], env=variables, capture_output=True, text=True)
    assert f"{runs} stop" in done.stdout and "/run-dir\n" in done.stdout and "tail" in done.stdout, (
        done.stderr
    )


@pytest.mark.parametrize(("system", "ended_by"), [("stopping", -signal.SIGUSR1), ("running", 0)])
def test_where_no_file_can_ask_a_host_that_shuts_down_to_leave_a_signal_does(
    host, tmp_path, system, ended_by
):
    """Its disk is read-only, say. What is not a shutdown is a stop, of which systemd's own signal tells."""
    started(host, "first")
    (host.opt / "releases/old/bin/trainer").write_text("#!/bin/sh\nexit 2\n")
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f"#!/bin/sh\n[ $1 = list-jobs ] || echo {system}\n")
    systemctl.chmod(0o755)
    launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    variables = {
        **host_runs.run_variables(host.etc / "runs/first.env"),
        **{"TRAINYARD_RUN_DIR": "/run-dir", "MAINPID": str(launcher.pid)},
        "PATH": f"{systemctl.parent}:/usr/bin:/bin",
    }
    stop = unit(host, "ExecStop").replace("exec tail", "echo tail")
    done = subprocess.run(["sh", "-c", stop], env=variables, capture_output=True, text=True)
    launcher.communicate(timeout=10)
    assert (launcher.returncode, "tail" in done.stdout) == (ended_by, bool(ended_by)), done.stderr


def test_every_keeper_is_told_the_release_by_its_path(repository):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    def templated(words, **more):
        found = {
            "trainer_opt_dir": "/opt/trainyard",
            "trainer_etc_dir": "/etc/trainyard",
            "__trainer_host": {"host_facts": {"release": "0.1.0+gabc-1234"}},
            "_trainer_release": trust_as_template(variables["_trainer_release"]),
            **more,
        }
        return Templar(loader=DataLoader(), variables=found).template(trust_as_template(words))

    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    release = "/opt/trainyard/releases/0.1.0+gabc-1234"
    assert templated(variables["_trainer_release"]) == release
    tasks = yaml.safe_load((ROLE / "tasks/start.yml").read_text())
    (env,) = [one["ansible.builtin.copy"]["content"] for one in tasks if "rank variables" in one["name"]]
    asked = re.search(r"combine\((\{'TRAINYARD_RELEASE.*?\})", env)[1]
    assert templated(f"{{{{ {asked} }}}}") == {host_runs.RELEASE: release}
    block = [task for one in tasks for outer in one.get("block", ()) for task in outer.get("block", ())]
    (command,) = [one["run_process"]["command"] for one in block if "run_process" in one]
    assert templated(command[0]) == f"{release}/bin/trainer"
    places = re.search(r"places=(\{.*?\})\)", variables["_trainer_job"], re.DOTALL)[1]
    told = templated(f"{{{{ {places} }}}}", _trainer_run="first")
    assert told["trainer"] == f"{release}/bin/trainer"
    nodes = {"node1": {"address": "a", "slurm": {"hostname": "node1", "nodes": []}}}
    script = slurm.slurm_script(nodes, "first", run_dir="/r", chosen={}, options=[], restarts=1, places=told)
    assert f"    {release}/bin/trainer launch /etc/trainyard/runs/first.yaml &\n" in script


# ---- what is kept ----


def test_a_release_that_an_active_run_goes_on_with_stays(load_module, host, monkeypatch):
    release = load_module("trainer_release")
    links = host.var / "wants"
    links.mkdir(parents=True)
    monkeypatch.setattr(host_runs, "AT_BOOT", f"{links}/trainyard@*.service")
    monkeypatch.setattr(release, "in_use", lambda releases: set())
    active = ["first"]

    def systemctl(command, check_rc=False):
        assert check_rc  # without an answer, nothing would seem to go on with it
        if command[1] == "list-jobs":
            return 0, "", ""
        assert command[:2] == ["systemctl", "list-units"]
        return 0, "".join(f"trainyard@{run}.service loaded activating auto-restart\n" for run in active), ""

    kept = functools.partial(host_runs.kept_releases, systemctl, "systemd", str(host.etc), str(host.var))
    started(host, "first")
    started(host, "older", release="")  # of before runs named theirs
    assert release.prune(str(host.opt), 1, kept) == []
    # It is not there just now, and comes back at the next boot.
    (links / "trainyard@first.service").symlink_to("nowhere")
    active[:] = ["older", "gone"]
    assert release.prune(str(host.opt), 1, kept) == []
    # It has ended, and nobody has put its unit to rest: at the next boot that runs this release, and must not fail.
    for state in host_runs.ENDED:
        (host.var / "runs/first/status.json").write_text(f'{{"state": "{state}"}}')
        assert release.prune(str(host.opt), 1, kept) == []
    (links / "trainyard@first.service").unlink()
    assert release.prune(str(host.opt), 1, kept) == ["old"]


def test_a_run_whose_unit_waits_for_the_network_at_boot_is_active():
    said = {
        "list-units": "trainyard@one.service loaded active running\n",
        "list-jobs": "  1 multi-user.target start waiting\n  7 trainyard@two.service start waiting\n"
        "  8 trainyard@three.service stop running\n 9 trainyard-etcd.service start waiting\n",
    }
    assert host_runs.active_runs(lambda words, check_rc: (0, said[words[1]], ""), "systemd", "/", {}) == [
        "one",
        "two",
    ]


def test_what_is_at_work_besides_runs_is_known_where_there_are_units():
    asked = []

    def run(words, check_rc):
        asked.append(words)
        return (
            0,
            "trainyard-work-burn-0a1b2c3d.service loaded active running /opt\ntrainyard-bench.service x\n\n",
            "",
        )

    assert host_runs.work_units(run, "systemd") == [
        "trainyard-bench.service",
        "trainyard-work-burn-0a1b2c3d.service",
    ]
    assert {"trainyard-work-*", "trainyard-bench.service"} <= set(asked[0])
    assert host_runs.work_units(run, "process") == [] and len(asked) == 1


# ---- what ranks tell each other ----


def test_another_release_is_another_version_and_is_refused(tmp_path, monkeypatch):
    about = tmp_path / "trainyard-0.1.0+gabc.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trainyard\nVersion: 0.1.0+gabc\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    mine = world.versions()
    assert mine["trainer"] == "0.1.0+gabc"

    def gather(self, message, group=None):
        other = {**message, "host": "node2", "node": 1}
        if "versions" in message:
            other["versions"] = {**mine, "trainer": "0.1.0+gdef"}
        return [message, other]

    monkeypatch.setattr(world.World, "gather", gather)
    place = types.SimpleNamespace(rank=0, world_size=1, host="node1", node_rank=0)
    with pytest.raises(errors.BadInput) as refused:
        world.World(world.Config(), place)
    assert str(refused.value) == (
        "node2: the hosts differ in their version of trainer: 0.1.0+gabc on node1; 0.1.0+gdef on node2. Cure: run "
        "site.yml on all of them, which makes them equal; then start the run again, with -e resume=true"
    )
