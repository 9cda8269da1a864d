"""The role network on real hosts: addresses change in one run, and a wrong setting never costs the host."""

import pytest
from plays import include, playground

NETWORK_STATE = (
    "ip -brief address show dev eth0; ip route; "
    "cd /etc; find netplan systemd/network -type f 2>/dev/null | xargs sha256sum"
)


@pytest.fixture(scope="module")
def plays(able, tmp_path_factory):
    with playground("t-net", 2, tmp_path_factory.mktemp("network")) as plays:
        yield plays


@pytest.fixture(scope="module")
def prefix(plays):
    """The first three numbers of the lab's addresses."""
    return plays.lab.host("node1").address.rsplit(".", 1)[0]


def interfaces(*entries, **more):
    return {"network_interfaces": list(entries), **more}


def static(address, name="eth0", **more):
    return {"name": name, "addresses": [address], **more}


def test_check_mode_on_an_untouched_host_changes_nothing(plays, prefix):
    before = plays.sh("node1", NETWORK_STATE)
    play = plays.role("network", "node1", interfaces(static(f"{prefix}.111/24")), "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0
    assert plays.sh("node1", NETWORK_STATE) == before
    assert plays.sh("node1", "ls -d /usr/local/lib/trainyard /etc/netplan 2>/dev/null || true") == ""


def test_an_unknown_interface_is_refused_with_those_that_there_are(plays, prefix):
    before = plays.sh("node2", NETWORK_STATE)
    play = plays.role("network", "node2", interfaces(static(f"{prefix}.112/24", "enp9s0")))
    assert play.rc != 0
    assert "the host has no interface 'enp9s0'" in play.words and "eth0 (" in play.words
    assert play.changed["node2"] == 0
    assert plays.sh("node2", NETWORK_STATE) == before


def test_the_address_in_use_changes_in_one_run_and_the_second_run_changes_nothing(plays, prefix):
    new = f"{prefix}.111"
    wanted = interfaces(static(f"{new}/24", gateway=f"{prefix}.1"))
    where = {
        "name": "Where",
        "ansible.builtin.command": "hostname -I",
        "register": "where",
        "changed_when": False,
    }
    show = {
        "name": "Show",
        "ansible.builtin.debug": {"msg": "went on at {{ ansible_host }}, {{ where.stdout }}"},
    }
    play = plays.run([include("network"), where, show], "node1", wanted)
    assert play.rc == 0, play.text
    assert f"went on at {new}, {new}" in play.words
    assert f"ansible_host: {new}" in play.words
    assert plays.sh("node1", "ls /etc/systemd/network").split() == ["10-eth0.network.before-trainyard"]
    assert plays.sh("node1", "stat -c %a /etc/netplan/90-trainyard.yaml").strip() == "600"
    assert plays.answers("node1", new) and not plays.answers("node1")
    assert plays.sh("node1", "/usr/local/lib/trainyard/guard status").startswith('{"armed": {}')

    again = plays.role("network", "node1", wanted, "-e", f"ansible_host={new}")
    assert again.rc == 0, again.text
    assert again.changed == {"node1": 0}


@pytest.mark.parametrize(
    "case", ["address of another network", "gateway that nobody has", "key that netplan refuses"]
)
def test_a_wrong_setting_is_undone_and_the_host_answers_as_before(plays, prefix, case):
    entry, said, limit = {
        "address of another network": (static("192.0.2.7/24"), "no new connection from the controller", 60),
        "gateway that nobody has": (
            static(f"{prefix}.12/24", gateway=f"{prefix}.99"),
            f"nobody answers at {prefix}.99 on eth0",
            45,
        ),
        "key that netplan refuses": (
            static(f"{prefix}.12/24", options={"bogus": 1}),
            "netplan refuses the configuration; nothing was changed",
            45,
        ),
    }[case]
    before = plays.sh("node2", NETWORK_STATE)
    play = plays.role("network", "node2", interfaces(entry, guard_timeout=20))
    assert play.rc != 0
    assert said in play.words, play.text
    assert plays.sh("node2", NETWORK_STATE) == before
    assert plays.answers("node2")
    assert play.seconds < limit + 60  # the rest is ansible's own time on a busy machine
