"""The inventory examples as they stand, each on hosts of its own names, addresses, interfaces and networks."""

import json

import pytest
from plays import Plays, changed_tasks

from lab.like import like

pytestmark = pytest.mark.full  # each is a whole site.yml, those of virtual machines an emulated one
EXAMPLES = "inventory/examples"
SMALL = {"model": "tiny", "dataset": "austen", "max_samples": 100, "vocab_size": 300, "sequence_length": 32}
SHORT = {"batch_size": 4, "steps": 3}
# The card of scenario 4, over whatever the second interface is.
SOFT_ROCE = """
modprobe rdma_rxe
ip link set ens192 up
rdma link add rocep11s0 type rxe netdev ens192
"""


@pytest.fixture
def cluster(make_lab, tmp_path):
    """`cluster(example, network, **options)`: the Plays of a lab that is like the example."""
    labs = []

    def up(example, network="", **options):
        lab = make_lab("like", **{**like(f"{EXAMPLES}/{example}", network), **options})
        labs.append(lab)
        return Plays(lab, tmp_path)

    yield up
    for lab in labs:
        lab.down()


def provision(plays, seconds=1200):
    """site.yml twice: everything, and then nothing."""
    hosts = set(plays.lab.hosts)
    for second in (False, True):
        done = plays.book("site.yml", seconds=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        changed = changed_tasks(done.stdout)
        assert hosts <= set(changed)
        assert {host for host in hosts if changed[host]} == (set() if second else hosts)
    for host in hosts:
        assert plays.sh(host, "hostname").strip() == host
        assert plays.answers(host)


def train(plays, results, seconds=900):
    """A few steps on all hosts; the run's summary."""
    settings = {**SMALL, **SHORT, "run": "like", "trainer_results_dir": results}
    done = plays.book("train.yml", seconds=seconds, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((results / "like/summary.json").read_text())


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("example", ["home-lan", "single-gpu", "two-by-eight"])
def test_it_becomes_a_cluster_and_trains(cluster, example, tmp_path):
    # The name servers of home-lan's addresses are not there: so all is brought.
    plays = cluster(example, offline=example == "home-lan")
    provision(plays)
    hosts = plays.lab.hosts
    if example == "home-lan":
        for host in hosts.values():
            interface = plays.sh(host.name, f"ip -brief address | grep {host.address}/24").split("@")[0]
            assert interface in plays.sh(host.name, "cat /etc/netplan/90-trainyard.yaml")
    for host in hosts:
        for peer in hosts.values():
            assert plays.sh(host, f"getent ahostsv4 {peer.name}").split()[0] == peer.address
    summary = train(plays, tmp_path / "runs")
    assert summary["state"] == "finished" and summary["steps"] == 3
    assert summary["world"]["size"] == len(hosts)


@pytest.mark.timeout(3 * 3600)
def test_two_servers_with_roce(cluster, able_to_emulate, tmp_path):
    plays = cluster("rdma-pair", "192.168.48.0/22", vms=True, memory=3072)
    for host in plays.lab.hosts:
        plays.sh(host, SOFT_ROCE)
    provision(plays, seconds=4800)
    for host, address in (("ubunturdma1", "192.168.250.201"), ("ubunturdma2", "192.168.250.202")):
        assert f"inet {address}/24" in plays.sh(host, "ip -4 address show dev ens192")
        assert "192.168.251.0/24 via 192.168.250.10 dev ens192" in plays.sh(host, "ip route")
        assert "inet 192.168.48.17" in plays.sh(host, "ip -4 address show dev eth0")
        assert "PORT_ACTIVE" in plays.sh(host, "ibv_devinfo -d rocep11s0")
        assert plays.sh(host, "systemctl list-units --plain --no-legend 'trainyard-opensm*'").strip() == ""
    summary = train(plays, tmp_path / "runs", seconds=3600)
    assert summary["world"]["size"] == 2
