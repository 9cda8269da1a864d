"""site.yml on bad inventories: one clear message, a failing exit code, and no host is contacted."""

import os
import socket
import sys
import threading
from pathlib import Path

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


class Door:
    """A port on loopback that every host of the test's inventory is reached at; it counts who knocks."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.knocks = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                visitor, _ = self.server.accept()
            except OSError:
                return
            self.knocks += 1
            visitor.close()


@pytest.fixture
def door():
    door = Door()
    yield door
    door.server.close()


def inventory(door, head=("node1",), workers=("node2", "node3"), groups=None, **variables):
    """An inventory whose hosts are reached at the door: good, but for `variables` of all hosts, and more `groups`."""

    def hosts(names):
        return {
            name: {"cluster_address": f"192.168.1.{100 + int(name[-1])}", "ansible_port": door.port}
            for name in names
        }

    shared = {"cluster_network": "192.168.1.0/24", "ansible_host": "127.0.0.1"}
    # One door for all: they are told apart by what is a no-op for ssh.
    parts = {"head": {"hosts": hosts(head)}, "workers": {"hosts": hosts(workers)}}
    for group in parts.values():
        for name, host in group["hosts"].items():
            host["ansible_ssh_common_args"] = f"-o ConnectTimeout=3 -o SetEnv=NAME={name}"
    more = {name: {"hosts": {host: {} for host in names}} for name, names in (groups or {}).items()}
    return {"all": {"vars": {**shared, **variables}, "children": {"cluster": {"children": parts}, **more}}}


def play(tmp_path, text, arguments="", playbook="site.yml"):
    """Run site.yml, or another playbook, on the inventory `text`; returns the run and all its output."""
    file = tmp_path / "hosts.yml"
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
    (tmp_path / "runner").mkdir()
    run = ansible_runner.run(
        private_data_dir=str(tmp_path / "runner"),
        project_dir=str(ROOT),
        playbook=playbook,
        inventory=str(file),
        cmdline=arguments or None,
        envvars={
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(tmp_path),
        },
        quiet=True,
    )
    return run, run.stdout.read()


def failures(run):
    """(host, message) of every failed task."""
    return [
        (event["event_data"]["host"], event["event_data"]["res"]["msg"])
        for event in run.events
        if event["event"] in ("runner_on_failed", "runner_on_unreachable")
    ]


BAD = {
    "two heads": ({"head": ("node1", "node2"), "workers": ("node3",)}, "head: found 2 hosts (node1, node2)"),
    "no head": ({"head": ()}, "head: found no host"),
    "an unknown variable": ({"cluster_netwrok": "192.168.1.0/24"}, "Write cluster_network"),
    "a wrong type": ({"nproc_per_node": "four"}, "an integer"),
    "a template that fails": ({"cluster_interface": "{{ nowhere }}"}, "nowhere"),
    "a network with host bits": (
        {"cluster_network": "192.168.1.7/24"},
        "Write cluster_network: 192.168.1.0/24",
    ),
    "two storage servers": (
        {"groups": {"storage_server": ("node1", "node2")}},
        "storage_server: found 2 hosts (node1, node2)",
    ),
    "a shared directory that is relative": ({"storage_path": "srv/shared"}, "Write it out from / on"),
    "the root shared": ({"storage_path": "/"}, "found /, which is the system's"),
    "a home shared": ({"storage_path": "/home"}, "found /home, where runs see nothing"),
    "a system directory shared": (
        {"storage_path": "/etc/models"},
        "found /etc/models, which is the system's",
    ),
}


@pytest.mark.parametrize(
    ("what", "arguments"),
    [*((what, "") for what in BAD), ("two heads", "-l node2"), ("two heads", "--check")],
)
def test_bad_inventories_are_refused_before_any_host_is_contacted(tmp_path, door, what, arguments):
    changes, words = BAD[what]
    run, output = play(tmp_path, inventory(door, **changes), arguments)
    assert run.rc != 0
    ((_, message),) = failures(run)
    assert words in message, message
    assert "no host was contacted" in message
    assert str(tmp_path / "hosts.yml") in message
    assert "Traceback" not in output
    assert door.knocks == 0


@pytest.mark.parametrize(
    ("playbook", "words", "what"),
    [
        ("train.yml", "-e run=a", "are followed"),
        ("playbooks/logs.yml", "-e follow=true", "are followed"),
        ("playbooks/preflight.yml", "", "measure each other"),
        ("playbooks/bench.yml", "", "measure each other"),
    ],
)
def test_what_needs_all_hosts_at_once_refuses_fewer_forks(tmp_path, door, playbook, words, what):
    run, _ = play(tmp_path, inventory(door), f"-f 2 {words}", playbook)
    assert run.rc != 0 and door.knocks == 0
    ((_, message),) = failures(run)
    assert message.startswith(f"forks: 2, but there are 3 hosts, which {what} all at once"), message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "-l nas",
            "-l: found no host of the group cluster in it; expected one or more of node1, node2, node3",
        ),
        ("--tags nvidai", "--tags nvidai: found a tag that no task has"),
    ],
)
def test_what_would_leave_nothing_to_do_is_refused(tmp_path, door, arguments, words):
    """Ansible itself says that all is done."""
    run, _ = play(tmp_path, inventory(door, groups={"files": ("nas",)}), arguments)
    assert run.rc != 0 and door.knocks == 0
    ((_, message),) = failures(run)
    assert message.startswith(words), message


def test_a_good_inventory_does_come_to_the_door(tmp_path, door):
    """The counter-proof: the hosts of these inventories would be reached, and a dead one is named in seconds."""
    run, output = play(tmp_path, inventory(door))
    assert run.rc != 0
    ((_, message),) = failures(run)
    assert door.knocks >= 3
    for name in ("node1", "node2", "node3"):
        assert f"{name} (127.0.0.1) does not answer" in message
    assert "Traceback" not in output


BEGUN = """all: {vars: {cluster_network: 10.0.0.0/24}, children: {cluster: {children: {
    head: {hosts: {a: {ansible_host: 127.0.0.1, ansible_port: 1, cluster_address: 10.0.0.1}}},"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host"),
        ("all: {hosts: {a: {}}}", "no host in it"),
        (
            "all: {children: {cluster: {children: {heads: {hosts: {a: {}}}}}}}",
            "neither in head nor in workers",
        ),
        ("all: {children: {cluster: [", "Completely failed to parse inventory source"),
        # The hosts before the fault would be a smaller cluster.
        (BEGUN + " workers: {hosts: [b, c]}}}}}", "Completely failed to parse inventory source"),
        (BEGUN + " workers: {b: }}}}}", "hosts.yml:2: workers: found b, which Ansible leaves out"),
        (
            "all: {children: {cluster: {children: {head: {hosts: {\n  a: {ansible_host: 192.168.1.1},\n  a: {}}}}}}}",
            "duplicate mapping key 'a'",
        ),
    ],
    ids=["empty", "no cluster", "another group", "no YAML", "a list", "no hosts", "a host twice"],
)
def test_inventories_without_a_cluster_are_refused_too(tmp_path, text, words):
    run, output = play(tmp_path, text)
    assert run.rc != 0
    assert words in "".join(message for _, message in failures(run)) + output
    assert "Traceback" not in output
