"""The whole way on real hosts, from bare machines to a model, from a checkout whose path has spaces.

The tests follow one lab through its life, in this order: looked at, provisioned (and killed in the middle),
provisioned again, trained on (and the controller killed), and compared with a run of one process here.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plays import RECAP, ROOT

HOSTS = ("node1", "node2", "node3")
PROGRAM = Path(sys.executable).with_name("ansible-playbook")
# Small, but with several batches a step for each of three ranks, of different sizes.
SETTINGS = {
    "model": "tiny",
    "dataset": "austen",
    "max_samples": 200,
    "vocab_size": 512,
    "sequence_length": 64,
    "batch_size": 8,
    "micro_batch_size": 2,
    "steps": 30,
    "checkpoint_every": 10,
    "seed": 7,
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """This checkout as git would clone it, uncommitted changes included, below a path with a space."""
    copy = tmp_path_factory.mktemp("main") / "a path with spaces"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def lab(make_lab):
    return make_lab("job", hosts=3)


class Controller:
    """ansible-playbook in the checkout, on a lab's inventory."""

    def __init__(self, checkout, lab):
        self.checkout, self.lab = checkout, lab
        self.seconds = {}

    def start(self, playbook, *arguments):
        """Start it with its output in a file; returns (process, file)."""
        output = self.checkout / f"{playbook}.{len(list(self.checkout.glob('*.log')))}.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        # As `make` would: the virtual environment's programs are found first.
        kept["PATH"] = f"{PROGRAM.parent}{os.pathsep}{kept['PATH']}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [str(PROGRAM), "-i", str(self.lab.inventory), playbook, *arguments],
                cwd=self.checkout,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, output

    def run(self, playbook, *arguments):
        """Run it to its end; returns (exit status, text, seconds)."""
        begin = time.monotonic()
        process, output = self.start(playbook, *arguments)
        try:
            status = process.wait(timeout=1200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return status, output.read_text(), time.monotonic() - begin

    def kill_at(self, words, playbook, *arguments, patience=600):
        """Run it and kill -9 all of it once its output has `words`; returns the text so far."""
        process, output = self.start(playbook, *arguments)
        deadline = time.monotonic() + patience
        while words not in output.read_text():
            assert process.poll() is None, f"it ended before '{words}':\n{output.read_text()}"
            assert time.monotonic() < deadline, f"'{words}' did not come:\n{output.read_text()}"
            time.sleep(0.2)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return output.read_text()


@pytest.fixture(scope="module")
def controller(checkout, lab):
    return Controller(checkout, lab)


def changed(text):
    """How many tasks changed something, by host."""
    return {found[1]: int(found[3]) for found in RECAP.finditer(text) if found[1] != "localhost"}


def train_arguments(**settings):
    return [part for key, value in settings.items() for part in ("-e", f"{key}={value}")]


def test_check_mode_runs_clean_on_untouched_hosts_and_changes_nothing(controller, lab):
    places = "/etc /usr/local /opt /var/lib/trainyard"
    look = f"find {places} -xdev -type f 2>/dev/null | sort | xargs -d '\\n' sha256sum | sha256sum"
    before = [lab.exec(host, "sh", "-c", look) for host in HOSTS]
    status, text, _ = controller.run("site.yml", "--check", "--diff")
    assert status == 0, text
    assert all(changed(text)[host] > 0 for host in HOSTS), "check mode saw nothing to do on a bare host"
    assert [lab.exec(host, "sh", "-c", look) for host in HOSTS] == before


def test_site_killed_in_the_middle_is_simply_run_again(controller):
    begin = time.monotonic()
    controller.kill_at("Have the locked environment", "site.yml")
    status, text, _ = controller.run("site.yml")
    controller.seconds["first"] = time.monotonic() - begin
    assert status == 0, text
    assert all(changed(text)[host] > 0 for host in HOSTS)


def test_a_second_run_changes_nothing_and_is_quick(controller):
    status, text, seconds = controller.run("site.yml")
    assert status == 0, text
    assert changed(text) == dict.fromkeys(HOSTS, 0), text
    print(f"first {controller.seconds['first']:.0f} s, second {seconds:.0f} s")
    assert seconds < 45
    assert seconds < controller.seconds["first"] / 4


def test_one_host_alone(controller):
    status, text, _ = controller.run("site.yml", "-l", "node2")
    assert status == 0, text
    assert changed(text) == {"node2": 0}, text


def losses(metrics):
    """The loss of each step."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {one["step"]: one["loss"] for one in records if one["kind"] == "train"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the same configuration in one process on this machine."""
    directory = tmp_path_factory.mktemp("alone")
    (directory / "alone.yaml").write_text("".join(f"{key}: {value}\n" for key, value in SETTINGS.items()))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRAINYARD_RUN_DIR": str(directory / "run"),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "trainer", "train", str(directory / "alone.yaml")],
        cwd=directory,
        env=environment,
        check=True,
        timeout=600,
    )
    return losses(directory / "run" / "metrics.jsonl")


def test_three_hosts_train_as_one_process_does_though_the_controller_is_killed(
    controller, checkout, lab, alone
):
    settings = {**SETTINGS, "run": "first"}
    controller.kill_at("Follow the run", "train.yml", *train_arguments(**settings))
    # The run does not need the controller: it goes on, or has ended well by now.
    status, text, _ = controller.run("train.yml", "-e", "run=first", "-e", "follow=true")
    assert status == 0, text

    together = losses(checkout / "runs/first/metrics.jsonl")
    assert sorted(together) == list(range(1, SETTINGS["steps"] + 1))
    worst = max(abs(together[step] - alone[step]) / abs(alone[step]) for step in alone)
    print(f"largest relative difference of a step's loss: {worst:.1e}")
    assert worst < 1e-5
    assert together[30] < together[1] - 0.5

    summary = json.loads((checkout / "runs/first/summary.json").read_text())
    assert summary["world"]["hosts"] == list(HOSTS)
    for host in HOSTS:
        assert list((checkout / "runs/first/logs" / host).glob("rank-*.log")), f"no log of {host}"
    assert (checkout / "runs/first/model/model.safetensors").is_file()


def test_a_name_that_is_taken_is_refused_with_both_cures(controller):
    status, text, _ = controller.run("train.yml", *train_arguments(**{**SETTINGS, "run": "first"}))
    assert status != 0
    assert "resume=true" in text and "Traceback" not in text


def test_only_ssh_answers_a_stranger_and_the_unit_is_hardened(lab):
    scan = (
        "import socket,sys\n"
        "for host in sys.argv[1:]:\n"
        "    for port in [*range(1, 1024), 29500, 29501, 28028, 9100, 9090]:\n"
        "        with socket.socket() as s:\n"
        "            s.settimeout(0.02)\n"
        "            if s.connect_ex((host, port)) == 0: print(host, port)\n"
    )
    address = lab.host("node1").address
    done = lab.stranger(sys.executable, "-c", scan, address)
    assert done.stdout.split("\n")[:-1] == [f"{address} 22"], done.stdout + done.stderr
    report = lab.exec("node1", "systemd-analyze", "security", "trainyard@first.service", "--no-pager")
    assert float(report.split("Overall exposure level for trainyard@first.service: ")[1].split()[0]) <= 3


def test_hosts_without_internet_and_without_any_of_the_packages(make_lab, checkout):
    lab = make_lab("island", hosts=2, offline=True)
    island = Controller(checkout, lab)
    sources = ("-e", "python_env_source=controller", "-e", "packages_source=controller")
    status, text, _ = island.run("site.yml", *sources)
    assert status == 0, text
    status, text, _ = island.run("site.yml", *sources)
    assert changed(text) == {"node1": 0, "node2": 0}, text
    settings = {**SETTINGS, "run": "island", "steps": 3}
    status, text, _ = island.run("train.yml", *train_arguments(**settings))
    assert status == 0, text
