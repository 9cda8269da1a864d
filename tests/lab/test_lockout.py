"""The lock-out matrix: however a change of the way in goes wrong, the host answers as before within a minute.

Each row is timed from when the change is applied to the first login after it was undone, with the guard's own time; the
play says what was undone and why, and the next correct run passes and changes nothing more.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from plays import NFTABLES, playground, wait_for

from lab import machine

pytestmark = pytest.mark.full
HOST = "node2"
TABLE = []


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-out", 2, tmp_path_factory.mktemp("lockout")) as plays:
        plays.sh(
            HOST,
            "ip link add spare0 type veth peer name spare1; ip link set spare0 up; ip link set spare1 up",
        )
        yield plays
        print()
        for row, seconds in TABLE:
            print(f"{row:<60} {seconds:5.1f} s")


@pytest.fixture(scope="module")
def prefix(plays):
    """The first three numbers of the lab's addresses."""
    return plays.lab.host(HOST).address.rsplit(".", 1)[0]


def network(*entries):
    """Of HOST alone: another host with its addresses would be refused."""
    mine = "{{ mine[inventory_hostname] | default([]) }}"
    lost = {"gateway": "none", "nameservers": machine.name_servers()}  # unless an entry says of them
    entries = [{**lost, **entry} for entry in entries]
    return "network", {"network_interfaces": mine, "mine": {HOST: entries}}


def right(prefix):
    return network({"name": "eth0", "addresses": [f"{prefix}.12/24"], "gateway": f"{prefix}.1"})


def guarded(name, files, apply, undo=(), check=()):
    """A change under the guard, as the roles make theirs."""
    change = {"name": name, "why": f"a change of {name}", "files": files, "apply": apply, "undo": list(undo)}
    return [
        {"name": "The guard", "ansible.builtin.include_role": {"name": "guard", "public": True}},
        {
            "name": "Change it",
            "become": True,
            "guarded_change": {**change, "check": list(check), "timeout": "{{ guard_timeout }}"},
        },
    ], None


def sshd(settings):
    reload = [["systemctl", "reload", "ssh"]]
    files = [{"path": "/etc/ssh/sshd_config.d/10-out.conf", "content": settings}]
    return guarded("sshd", files, reload, undo=reload, check=[["/usr/sbin/sshd", "-t"]])


def armed(plays):
    """The states of the host's unconfirmed changes, by name."""
    shown = json.loads(plays.sh(HOST, "/usr/local/lib/trainyard/guard status 2>/dev/null || echo '{}'"))
    return {name: one["state"] for name, one in shown.get("armed", {}).items()}


def row(prefix, case):
    """What is run, and all that the play says."""
    rules = (
        "table inet out {\n chain input {\n  type filter hook input priority 0\n  tcp dport 22 drop\n }\n}\n"
    )
    undone = "no new connection from the controller confirmed it", "Undone: "
    return {
        "wrong address": (network({"name": "eth0", "addresses": ["192.0.2.7/24"]}), undone),
        "wrong gateway": (
            network({"name": "eth0", "addresses": [f"{prefix}.12/24"], "gateway": f"{prefix}.99"}),
            (f"nobody answers at {prefix}.99 on eth0", "Undone: "),
        ),
        "wrong interface": (
            network(
                {"name": "eth0", "addresses": ["192.0.2.7/24"]},
                {"name": "spare0", "addresses": [f"{prefix}.12/24"]},
            ),
            undone,
        ),
        "a key that netplan does not know": (
            network({"name": "eth0", "addresses": [f"{prefix}.12/24"], "options": {"bogus": 1}}),
            ("netplan refuses the configuration; nothing was changed",),
        ),
        "invalid YAML": (
            guarded(
                "network",
                [{"path": "/etc/netplan/95-out.yaml", "content": "network: [\n", "mode": "0600"}],
                [["netplan", "apply"]],
                check=[["netplan", "generate"]],
            ),
            ("Nothing was applied. ", "/etc/netplan/95-out.yaml", "Undone: "),
        ),
        "a firewall that drops SSH": (
            guarded(
                "firewall",
                [{"path": "/etc/out.nft", "content": rules}],
                [["nft", "-f", "/etc/out.nft"]],
                undo=[["nft", "delete", "table", "inet", "out"]],
            ),
            undone,
        ),
        "an sshd that refuses the user": (sshd("AllowUsers nobody\n"), undone),
        "an sshd that refuses key and password": (
            sshd("PubkeyAuthentication no\nPasswordAuthentication no\n"),
            undone,
        ),
    }[case]


CASES = (
    "wrong address",
    "wrong gateway",
    "wrong interface",
    "a key that netplan does not know",
    "invalid YAML",
    "a firewall that drops SSH",
    "an sshd that refuses the user",
    "an sshd that refuses key and password",
)


def back(plays, begin):
    """Wait until nothing is unconfirmed and the host lets its user in; seconds since `begin`."""
    wait_for(lambda: not armed(plays) and plays.answers(HOST), 90)
    return time.monotonic() - begin


def mended(plays, prefix):
    """The next correct run passes, and the one after it changes nothing."""
    for changed in (None, 0):
        play = plays.run(right(prefix)[0], HOST, right(prefix)[1])
        assert play.rc == 0, play.text
        assert changed is None or play.changed[HOST] == changed, play.text


@pytest.mark.parametrize("case", CASES)
def test_what_goes_wrong_is_undone(plays, prefix, case):
    (tasks, variables), said = row(prefix, case)
    plays.sh(HOST, NFTABLES)
    mended(plays, prefix)
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()  # of the play, where it is refused before the host is touched
        future = pool.submit(plays.run, tasks, HOST, variables)
        while not future.done():
            if armed(plays):
                begin = time.monotonic()
                break
            time.sleep(0.2)
        seconds = back(plays, begin)
        play = future.result()
    TABLE.append((case, seconds))
    assert play.rc != 0 and all(words in play.words for words in said), play.text
    assert seconds < 60
    mended(plays, prefix)


@pytest.mark.parametrize("power", [False, True])
def test_the_controller_is_killed_between_apply_and_confirm(plays, prefix, power):
    """Alone, or with a power cut of the host in the same moment."""
    mended(plays, prefix)
    tasks, variables = row(prefix, "wrong address")[0]
    plays.kill_when(lambda: "applied" in armed(plays).values(), tasks, HOST, variables)
    begin = time.monotonic()
    if power:
        plays.lab.power(HOST, on=False)
        begin = time.monotonic()
        plays.lab.power(HOST, on=True)
    seconds = back(plays, begin)
    TABLE.append(("the controller is killed" + " and the host reboots" * power, seconds))
    assert seconds < 60
    play = plays.run(right(prefix)[0], HOST, right(prefix)[1])
    assert play.rc == 0, play.text
    # Nobody could say it then.
    assert "of an earlier run, 20" in play.words and "Undone: " in play.words, play.text
    assert ("restarted before" if power else "no new connection") in play.words, play.text
