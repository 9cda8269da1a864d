"""The whole way on real hosts, from bare machines to a model, from a checkout whose path has spaces.

The tests follow one lab through its life, in this order: looked at, provisioned (and killed in the middle),
provisioned again, trained on, scanned. What train.yml holds to in full is test_train's.
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
SETTINGS = {
    "model": "tiny",
    "dataset": "austen",
    "max_samples": 100,
    "vocab_size": 300,
    "sequence_length": 32,
    "batch_size": 4,
    "steps": 3,
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
def controller(checkout, cluster):
    yield Controller(checkout, cluster)
    # Ansible's workers have sessions of their own, and those of a killed ansible-playbook wait for it for ever.
    subprocess.run(["pkill", "-KILL", "-f", str(cluster.inventory)], check=False)


def changed(text):
    """How many tasks changed something, by host."""
    return {found[1]: int(found[3]) for found in RECAP.finditer(text) if found[1] != "localhost"}


def train_arguments(**settings):
    return [part for key, value in settings.items() for part in ("-e", f"{key}={value}")]


def test_check_mode_runs_clean_on_untouched_hosts_and_changes_nothing(controller, cluster):
    places = "/etc /usr/local /opt /var/lib/trainyard"
    look = f"find {places} -xdev -type f 2>/dev/null | sort | xargs -d '\\n' sha256sum | sha256sum"
    before = [cluster.exec(host, "sh", "-c", look) for host in HOSTS]
    status, text, _ = controller.run("site.yml", "--check", "--diff")
    assert status == 0, text
    assert all(changed(text)[host] > 0 for host in HOSTS), "check mode saw nothing to do on a bare host"
    assert [cluster.exec(host, "sh", "-c", look) for host in HOSTS] == before


def test_site_killed_in_the_middle_is_simply_run_again(controller):
    begin = time.monotonic()
    controller.kill_at("building the locked environment", "site.yml")
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


def test_a_model_comes_back_from_a_path_with_spaces(controller, checkout):
    status, text, _ = controller.run("train.yml", *train_arguments(**SETTINGS, run="spaces"))
    assert status == 0, text
    summary = json.loads((checkout / "runs/spaces/summary.json").read_text())
    assert summary["world"]["hosts"] == list(HOSTS)
    assert (checkout / "runs/spaces/model/model.safetensors").is_file()


def test_only_ssh_answers_a_stranger_and_the_unit_is_hardened(cluster):
    scan = (
        "import socket,sys\n"
        "for host in sys.argv[1:]:\n"
        "    for port in [*range(1, 1024), 29500, 29501, 28028, 9100, 9090]:\n"
        "        with socket.socket() as s:\n"
        "            s.settimeout(0.02)\n"
        "            if s.connect_ex((host, port)) == 0: print(host, port)\n"
    )
    address = cluster.host("node1").address
    done = cluster.stranger(sys.executable, "-c", scan, address)
    assert done.stdout.split("\n")[:-1] == [f"{address} 22"], done.stdout + done.stderr
    report = cluster.exec("node1", "systemd-analyze", "security", "trainyard@spaces.service", "--no-pager")
    assert float(report.split("Overall exposure level for trainyard@spaces.service: ")[1].split()[0]) <= 3


def test_hosts_without_internet_and_without_any_of_the_packages(make_lab, checkout):
    lab = make_lab("island", hosts=2, offline=True)
    island = Controller(checkout, lab)
    status, text, _ = island.run("site.yml")
    assert status == 0, text
    status, text, _ = island.run("site.yml")
    assert changed(text) == {"node1": 0, "node2": 0}, text
    status, text, _ = island.run("train.yml", *train_arguments(**SETTINGS, run="island"))
    assert status == 0, text
