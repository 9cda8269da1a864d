"""The role network on real hosts: addresses change in one run, and a wrong setting never costs the host."""

import json

import pytest
from plays import include, playground, wait_for

from lab import machine

NETWORK_STATE = (
    "ip -brief address show dev eth0; ip route; "
    "cd /etc; find netplan systemd/network -type f 2>/dev/null | xargs sha256sum"
)

MADE = "ls -d /usr/local/lib/trainyard /etc/netplan /etc/netplan/* 2>/dev/null || true"


def stock(plays):
    """The file of the host's address, as its release's installer leaves it."""
    return "50-cloud-init.yaml" if plays.lab.options.suite in machine.UBUNTU else "10-eth0.network"


def theirs(plays, host):
    """All files that say what the host's network is, but for the role's own."""
    found = plays.sh(
        host, "cd /etc; find systemd/network netplan -type f -printf '%f\\n' 2>/dev/null || true"
    )
    return sorted({*found.split()} - {"90-trainyard.yaml"})


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
    lost = {"gateway": "none", "nameservers": machine.name_servers()}  # unless an entry says of them
    return {"name": name, "addresses": [address], **lost, **more}


def test_check_mode_on_an_untouched_host_changes_nothing(plays, prefix):
    before, made = plays.sh("node1", NETWORK_STATE), plays.sh("node1", MADE)
    assert "trainyard" not in made and ("netplan" in made) is (plays.lab.options.suite in machine.UBUNTU)
    play = plays.role("network", "node1", interfaces(static(f"{prefix}.111/24")), "--check", "--diff")
    assert play.rc == 0, play.text
    assert play.changed["node1"] > 0
    assert plays.sh("node1", NETWORK_STATE) == before
    assert plays.sh("node1", MADE) == made


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
    assert f"inventory: ansible_host: {new}" in play.words
    # netplan's check has the whole configuration as its argument; modules' arguments go to the journal.
    assert "netplan_check" in plays.sh("node1", "journalctl --no-pager")
    assert "dhcp4:" not in plays.sh("node1", "journalctl --no-pager")
    assert theirs(plays, "node1") == [f"{stock(plays)}.before-trainyard"]
    assert plays.sh("node1", "stat -c %a /etc/netplan/90-trainyard.yaml").strip() == "600"
    assert plays.answers("node1", new) and not plays.answers("node1")
    assert plays.sh("node1", "/usr/local/lib/trainyard/guard status").startswith('{"armed": {}')

    again = plays.role("network", "node1", wanted, "-e", f"ansible_host={new}")
    assert again.rc == 0, again.text
    assert again.changed == {"node1": 0}


def guard_state(plays, host):
    """The state of the armed change of the network, or ''."""
    shown = json.loads(plays.sh(host, "/usr/local/lib/trainyard/guard status 2>/dev/null || echo '{}'"))
    return shown.get("armed", {}).get("network", {}).get("state", "")


@pytest.mark.parametrize(
    "case",
    [
        "address of another network",
        pytest.param("gateway that nobody has", marks=pytest.mark.full),
        "key that netplan refuses",
    ],
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


@pytest.mark.full
def test_one_host_is_told_its_new_address_though_another_one_fails(plays, prefix):
    """As in site.yml, where one host's fault ends the play for all."""
    wanted = {
        "network_interfaces": "{{ mine[inventory_hostname] }}",
        "mine": {
            "node1": [static(f"{prefix}.11/24", gateway=f"{prefix}.1")],  # back to the inventory's
            "node2": [static(f"{prefix}.12/24", gateway=f"{prefix}.99")],
        },
        "ansible_host": prefix + ".{{ {'node1': 111, 'node2': 12}[inventory_hostname] }}",
        "guard_timeout": 60,
    }
    play = plays.run([include("network")], "cluster", wanted, fatal=True)
    assert play.rc != 0
    assert f"nobody answers at {prefix}.99 on eth0" in play.words
    assert f"node1 is at {prefix}.11 now. Before the next run, write" in play.words
    assert plays.answers("node1") and plays.answers("node2")


@pytest.mark.full
def test_killed_before_it_was_confirmed_the_next_run_leaves_one_manager(plays, prefix):
    """The second run's plan must not come from a state that is about to be undone: the old file would come back."""
    assert theirs(plays, "node2") == [stock(plays)]
    # Of node2 alone: the whole of site.yml refuses another host with its address.
    mine = "{{ mine[inventory_hostname] | default([]) }}"
    entries = [static(f"{prefix}.12/24", gateway=f"{prefix}.1")]
    wanted = {"network_interfaces": mine, "mine": {"node2": entries}, "guard_timeout": 300}
    plays.kill_when(lambda: guard_state(plays, "node2"), "network", "node2", wanted)
    wait_for(lambda: guard_state(plays, "node2") == "applied", 30)
    assert theirs(plays, "node2") == [f"{stock(plays)}.before-trainyard"]

    play = plays.run("network", "node2", wanted)
    assert play.rc == 0, play.text
    assert "this was put back first: eth0" in play.words
    assert theirs(plays, "node2") == [f"{stock(plays)}.before-trainyard"]
    assert "10-netplan-eth0.network" in plays.sh("node2", "networkctl status eth0")
    assert guard_state(plays, "node2") == "" and plays.answers("node2")
    assert plays.run("network", "node2", wanted).changed["node2"] == 0


@pytest.mark.full
def test_what_somebody_changed_by_hand_is_put_right(plays, prefix):
    """An address, the MTU, a route."""
    route = {"to": "198.51.100.0/24", "via": f"{prefix}.11"}
    entry = static(f"{prefix}.12/24", gateway=f"{prefix}.1", mtu=1400, routes=[route])
    wanted = interfaces({**entry, "addresses": [f"{prefix}.12/24", "192.0.2.7/24"]})
    assert plays.role("network", "node2", wanted).rc == 0
    assert plays.role("network", "node2", wanted).changed["node2"] == 0
    before = plays.sh(
        "node2", "ip -brief address show dev eth0; ip route show dev eth0; cat /sys/class/net/eth0/mtu"
    )
    assert "192.0.2.7/24" in before and "198.51.100.0/24 via" in before and before.endswith("\n1400\n")
    for change in (
        "ip address del 192.0.2.7/24 dev eth0",
        "ip link set eth0 mtu 1500",
        "ip route del 198.51.100.0/24",
    ):
        plays.sh("node2", change)
        play = plays.role("network", "node2", wanted)
        assert play.rc == 0 and play.changed["node2"] > 0, (change, play.text)
        after = "ip -brief address show dev eth0; ip route show dev eth0; cat /sys/class/net/eth0/mtu"
        assert plays.sh("node2", after) == before, change
    assert plays.role("network", "node2", wanted).changed["node2"] == 0


@pytest.mark.full
def test_a_new_name_with_which_the_host_cannot_be_reached_is_taken_back(plays, prefix):
    """networkd knows a renamed interface by its permanent address alone, and these have none: so it drops lan0."""
    mac = plays.sh("node2", "cat /sys/class/net/eth0/address").strip()
    entry = static(f"{prefix}.12/24", "lan0", macaddress=mac)
    play = plays.role("network", "node2", interfaces(entry, guard_timeout=60))
    assert play.rc != 0
    assert "lan0 is down" in play.words, play.text
    assert "Commands that failed while undoing" not in play.words
    assert plays.answers("node2")
    assert f"{prefix}.12/24" in plays.sh("node2", "ip -brief address show dev eth0")


def bridged(address, **more):
    """eth0 as the only port of br0, which has `address`."""
    return [
        {"name": "eth0"},
        {
            **static(address, "br0", **more),
            "kind": "bridges",
            "options": {"interfaces": ["eth0"]},
        },
    ]


DEVICES = "ls /sys/class/net; ip -brief link show master br0 2>/dev/null || true"


@pytest.mark.full
@pytest.mark.parametrize("case", ["address", "gateway"])
def test_a_bridge_over_the_interface_in_use_that_cuts_the_host_off_is_undone_and_gone(plays, prefix, case):
    entries, said = {
        "address": (
            bridged("192.0.2.7/24"),
            "no new connection from the controller confirmed it within 20 s",
        ),
        "gateway": (
            bridged(f"{prefix}.11/24", gateway=f"{prefix}.99"),
            f"nobody answers at {prefix}.99 on br0",
        ),
    }[case]
    before = plays.sh("node1", f"{NETWORK_STATE}; {DEVICES}")
    play = plays.role("network", "node1", interfaces(*entries, guard_timeout=20))
    assert play.rc != 0 and said in play.words, play.text
    assert "Commands that failed while undoing" not in play.words
    assert plays.answers("node1")
    assert plays.sh("node1", f"{NETWORK_STATE}; {DEVICES}") == before
    assert play.seconds < 120  # 60, and ansible's own time on a busy machine


@pytest.mark.full
def test_the_interface_in_use_goes_into_a_bridge_with_the_address_that_it_has(plays, prefix):
    wanted = interfaces(*bridged(f"{prefix}.11/24", gateway=f"{prefix}.1"))
    play = plays.role("network", "node1", wanted)
    assert play.rc == 0, play.text
    assert f"{prefix}.11/24" in plays.sh("node1", "ip -brief address show dev br0")
    assert plays.sh("node1", "ip -brief -4 address show dev eth0") == ""
    assert "eth0" in plays.sh("node1", DEVICES).split()
    assert plays.answers("node1")
    assert plays.role("network", "node1", wanted).changed == {"node1": 0}


@pytest.mark.full
def test_the_interface_in_use_goes_into_a_bridge_with_a_new_address_and_comes_out_again(plays, prefix):
    new = f"{prefix}.122"
    wanted = interfaces(*bridged(f"{new}/24", gateway=f"{prefix}.1"))
    play = plays.role("network", "node2", wanted)
    assert play.rc == 0 and f"node2 is at {new} now" in play.words, play.text
    assert plays.answers("node2", new) and not plays.answers("node2")
    assert plays.role("network", "node2", wanted, "-e", f"ansible_host={new}").changed == {"node2": 0}

    alone = interfaces(static(f"{prefix}.12/24", gateway=f"{prefix}.1"))
    play = plays.role("network", "node2", alone, "-e", f"ansible_host={new}")
    assert play.rc == 0 and f"node2 is at {prefix}.12 now" in play.words, play.text
    assert plays.answers("node2") and not plays.answers("node2", new)
    assert plays.sh("node2", DEVICES).split() == ["eth0", "lo"]
    assert plays.role("network", "node2", alone).changed == {"node2": 0}
