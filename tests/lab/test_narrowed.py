"""SSH for the controller alone, and peers: hosts that come later, or move, are peers at once; old addresses are not."""

import json

import pytest
from plays import Plays

from lab import machine

pytestmark = pytest.mark.full
TAGS = "identity,network,ssh_mesh,firewall"


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    return Plays(make_lab("narrowed", hosts=3), tmp_path_factory.mktemp("narrowed"))


def inventory(plays, change):
    file = plays.lab.inventory / "hosts.yml"
    groups = json.loads(file.read_text().split("\n", 1)[1])
    change(groups["all"]["children"]["cluster"]["children"]["workers"]["hosts"])
    file.write_text(f"# changed by a test\n{json.dumps(groups)}")


def peers(plays, host):
    """The addresses that it lets in everywhere, by its loaded rules."""
    sets = json.loads(plays.sh(host, "nft -j list set inet trainyard peers_ipv4"))["nftables"]
    (found,) = [one["set"]["elem"] for one in sets if "set" in one]
    return set(found)


def test_hosts_that_come_later_and_that_move_get_in(plays):
    narrowed = {"firewall_ssh_from": [plays.lab.network.gateway]}
    at = {host: plays.lab.host(host).address for host in plays.lab.hosts}
    taken = {}
    inventory(plays, lambda workers: taken.update(node3=workers.pop("node3")))
    play = plays.run(TAGS, "cluster", narrowed)
    assert play.rc == 0, play.text
    assert peers(plays, "node1") == {at["node2"]}

    inventory(plays, lambda workers: workers.update(taken))
    play = plays.run(TAGS, "cluster", narrowed)
    assert play.rc == 0, play.text
    assert peers(plays, "node1") == {at["node2"], at["node3"]}

    # Reached at an address that it gives up in the same run.
    new = at["node3"].rsplit(".", 1)[0] + ".111"
    entry = {"name": "eth0", "addresses": [f"{new}/24"], "gateway": plays.lab.network.gateway}
    entry["nameservers"] = machine.name_servers()
    moved = {"cluster_address": new, "network_interfaces": [entry]}
    inventory(plays, lambda workers: workers["node3"].update(moved))
    play = plays.run(TAGS, "cluster", narrowed)
    assert play.rc == 0, play.text
    assert peers(plays, "node1") == {at["node2"], new} and peers(plays, "node2") == {at["node1"], new}
    inventory(plays, lambda workers: workers["node3"].update(ansible_host=new))
    play = plays.run(TAGS, "cluster", narrowed)
    assert play.rc == 0 and not any(play.changed.values()), play.text
