"""What roles' variables and groups say together: what contradicts, and what does not."""

import dataclasses
from pathlib import Path

import inventory_base
import inventory_roles
import pytest
from inventories import GOOD, SPECS, everywhere, inventory, with_groups

from plugins.action import inventory_check as ic
from plugins.filter import roce_switch

ROOT = Path(__file__).resolve().parents[2]


def test_files_of_the_controllers_are_looked_at_before_any_host_is(tmp_path):
    good, private = tmp_path / "id.pub", tmp_path / "id"
    good.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@here\n")
    private.write_text("----- a key that is nobody else's\n")

    def found(**variables):
        return [str(one) for one in ic.check(inventory(**everywhere(**variables)))]

    assert found(ssh_mesh_controller_key=str(good), nvidia_repository_key=str(private)) == []
    (said,) = found(ssh_mesh_controller_key=str(private))  # once, of all hosts
    assert (
        "no public key in its first line" in said
        and "ssh-keygen -t ed25519" in said
        and "nobody else" not in said
    )
    (said,) = found(ssh_mesh_controller_key="~/.ssh/there-is-no-such-key.pub")
    assert "cannot be read: No such file" in said and said.startswith("node1: ssh_mesh_controller_key")
    (said,) = found(nvidia_repository_key=str(tmp_path / "gone"))
    assert "nvidia_repository_key" in said and "Correct the path" in said


# ---- RDMA's groups ----

LOSSLESS = everywhere(roce_qos_mode="lossless")


@pytest.mark.parametrize(
    ("made", "where", "key", "words"),
    [
        (with_groups(inventory(), rdma=["node4"]), "node4", "rdma", ["in rdma, but not in cluster"]),
        (with_groups(inventory(), opensm=["node1"]), "node1", "opensm", ["not in rdma", "Put it into rdma"]),
        (
            with_groups(inventory(), rdma=list(GOOD), opensm=list(GOOD)),
            "hosts.yml",
            "opensm",
            ["3 hosts", "a master and its standby"],
        ),
        (
            with_groups(inventory(node1={"roce_qos_mode": "lossless"}), rdma=["node1"]),
            "node1",
            "roce_qos_mode",
            ["without roce_qos_switch_confirmed", "playbooks/switch.yml"],
        ),
        (
            with_groups(inventory(node1={"roce_qos_priority": 6}), rdma=["node1"]),
            "node1",
            "roce_qos_priority",
            ["6"],
        ),
        (
            with_groups(inventory(node2={"roce_qos_mode": "lossy", "roce_qos_dscp": 48}), rdma=list(GOOD)),
            "node2",
            "roce_qos_dscp",
            ["48", "congestion notices", "26"],
        ),
        (
            with_groups(
                inventory(
                    node1={"roce_qos_mode": "lossy"}, node3={"roce_qos_mode": "lossy", "roce_qos_dscp": 34}
                ),
                rdma=list(GOOD),
            ),
            "node3",
            "roce_qos_dscp",
            ["34, where node1 has 26", "a switch serves one class"],
        ),
    ],
)
def test_what_rdma_needs(made, where, key, words):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key)
    assert all(word in str(problem) for word in words), problem


def test_prometheus_runs_on_hosts_of_the_cluster():
    (problem,) = ic.check(with_groups(inventory(), monitoring=["node1", "nas"]))
    assert (problem.where, problem.key) == (
        "nas",
        "monitoring",
    ) and "Put the head into the group" in problem.cure
    assert ic.check(with_groups(inventory(), monitoring=["node1", "node3"])) == []
    (problem,) = ic.check(inventory(node1={"monitoring_port": 80}))
    assert problem.key == "monitoring_port" and problem.expected == "1024 or more"


def watched(group=("node1",), **variables):
    return with_groups(inventory(**variables), monitoring=list(group))


@pytest.mark.parametrize(
    ("made", "where", "key", "found"),
    [
        (inventory(**everywhere(etcd_port=2390)), "hosts.yml", "etcd_port", "2390, which etcd_peer_port has on node1,"),
        (inventory(node2={"etcd_peer_port": 2389}), "node2", "etcd_peer_port", "2389, which etcd_port has on node2,"),
        (inventory(node2={"etcd_port": 4000, "etcd_peer_port": "4000"}), "node2", "etcd_peer_port", "4000, which"),
        (watched(node1={"monitoring_grafana_port": 9090}), "node1", "monitoring_grafana_port", "9090, which"),
        (watched(node1={"monitoring_port": 3001}), "node1", "monitoring_port", "3001, which monitoring_grafana_port"),
        (watched(node3={"monitoring_exporter_port": 2389}), "node3", "monitoring_exporter_port", "2389, which etcd"),
        (watched(node1={"monitoring_port": 29500}), "node1", "monitoring_port", "29500, which trainer_port"),
        (watched(node1={"monitoring_port": 9400}), "node1", "monitoring_port", "9400, which DCGM's exporter"),
        (inventory(node2={"bench_port": 2386}), "node2", "bench_port", "2389, which etcd_port has on node2, too"),
        (inventory(node2={"ansible_port": 2390}), "node2", "etcd_peer_port", "2390, which SSH has on node2, too"),
        (inventory(**everywhere(trainer_config={"metrics_port": 29500})), "hosts.yml", "trainer_config.metrics_port",
         "29500, which trainer_port has on node1, node2, node3, too"),
        (watched(**everywhere(trainer_config={"metrics_port": 9098}, nproc_per_node="4")), "hosts.yml",
         "trainer_config.metrics_port", "9100, which monitoring_exporter_port has"),
        (with_groups(inventory(node2={"trainer_port": 2049}), storage_server=["node2"]), "node2", "trainer_port",
         "2049, which NFS has on node2, too"),
    ],
)  # fmt: skip
def test_two_services_of_a_host_have_no_port_together(made, where, key, found):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key) and problem.found.startswith(found), problem
    assert problem.cure == f"Set {key} to another one"


@pytest.mark.parametrize(
    "made",
    [
        # What a host has not: no group, no peers, no gateway's port.
        inventory(**everywhere(monitoring_exporter_port=2389, monitoring_grafana_port=9090)),
        watched(node2={"monitoring_port": 2389, "monitoring_grafana_port": 9090}),
        watched(node1={"monitoring_grafana_port": 9090, "monitoring_grafana": "never"}),
        watched(node1={"monitoring_port": 9400, "monitoring_dcgm": "never"}),
        inventory({"node1": {**GOOD["node1"], "etcd_port": 2390}}),
        inventory(
            node2={"ansible_host": "192.168.1.9", "ansible_port": 2390, "cluster_address": "192.168.1.101"}
        ),
        inventory(node2={"trainer_port": 2049}),
        # At other addresses of its: the loopback, and the cluster's.
        watched(node1={"monitoring_port": 9100}),
        watched(node1={"monitoring_exporter_port": 9400}),
        watched(**everywhere(trainer_config={"metrics_port": 9097}, nproc_per_node=3)),
        inventory(**everywhere(trainer_config={"metrics_port": 0})),
        inventory(node2={"etcd_port": inventory_base.Undefined("a template over facts")}),
    ],
)
def test_ports_that_do_not_meet(made):
    assert ic.check(made) == []


def test_a_port_that_is_none_is_told_once():
    assert [one.key for one in ic.check(inventory(node2={"etcd_port": "many"}))] == ["etcd_port"]


def test_the_ports_that_no_variable_has_are_the_roles():
    role = (ROOT / "roles/monitoring/vars/main.yml").read_text()
    assert f"http://127.0.0.1:{inventory_roles.DCGM_PORT}/metrics" in role
    ports = {name for name in SPECS if name.endswith("_port")} - {"roce_qos_switch_port"}  # of a switch
    named = {name for name, _, _ in inventory_roles.ports_of(watched(), "node1")}
    assert ports <= named


def test_the_mark_of_congestion_notices_is_the_switchs():
    assert int(inventory_roles.CNP_DSCP) == roce_switch.CNP_DSCP


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"tuning_nofile": 2_000_000}, True),
        ({"tuning_nofile": 2_000_000, "tuning_sysctl": {"fs.nr_open": "1500000"}}, True),
        ({"tuning_nofile": 2_000_000, "tuning_sysctl": {"fs.nr_open": "2000000"}}, False),
        ({"tuning_nofile": 1_048_576, "tuning_sysctl": {"fs.nr_open": ""}}, False),
        ({"tuning_nofile": 4096}, False),
        ({"tuning_sysctl": {"fs.nr_open": "65536"}}, True),  # the role's own is more
        ({"tuning_nofile": 65536, "tuning_sysctl": {"fs.nr_open": "65536"}}, False),
    ],
)
def test_more_files_than_the_kernel_grants(settings, refused):
    found = [problem for problem in ic.check(inventory(node2=settings)) if problem.key == "tuning_nofile"]
    assert len(found) == refused
    assert not refused or ("fs.nr_open" in found[0].cure and found[0].where.startswith("node2"))
    assert not refused or found[0].found.endswith(", its default") == ("tuning_nofile" not in settings)


def test_where_the_kernels_setting_alone_is_given_that_is_the_place():
    origins = {("node2", "tuning_sysctl"): "hosts.yml:7"}
    given = dataclasses.replace(inventory(node2={"tuning_sysctl": {"fs.nr_open": "65536"}}), origins=origins)
    (problem,) = ic.check(given)
    assert (problem.where, problem.key) == ("node2 (hosts.yml:7)", "tuning_nofile")


def test_rdma_with_its_managers_and_a_confirmed_switch_is_well():
    confirmed = {"roce_qos_mode": "lossless", "roce_qos_switch_confirmed": True}
    assert ic.check(with_groups(inventory(node1=confirmed), rdma=list(GOOD), opensm=["node1", "node2"])) == []
    assert ic.check(inventory(**LOSSLESS)) == []  # without RDMA it says nothing


# ---- the shared directory ----


@pytest.mark.parametrize(
    ("made", "where", "key", "words"),
    [
        (
            with_groups(inventory(), storage_server=["node1", "node3"]),
            "hosts.yml",
            "storage_server",
            ["2 hosts (node1, node3)", "at most one", "Leave one of them"],
        ),
        (
            with_groups(inventory(), storage_server=["nas"]),
            "nas",
            "storage_server",
            ["not in cluster", "leave the group empty"],
        ),
        (
            with_groups(inventory(node2={"storage_path": "/data"}), storage_server=["node1"]),
            "hosts.yml",
            "storage_path",
            ["/srv/trainyard/shared (node1, node3); /data (node2)", "Set it once"],
        ),
        *(
            (inventory(**everywhere(storage_path=path)), "node1", "storage_path", [f"found {path}, {words}"])
            for path, words in {
                "/srv": "which is the system's",
                "/usr/share/models": "which is the system's",
                "/home": "where runs see nothing",
                "/home/me/models": "where runs see nothing",
                "/tmp/shared": "where runs see nothing",
                "/var/lib/trainyard/shared": "which overlaps /var/lib/trainyard (trainer_state_dir)",
                "/opt/trainyard": "which overlaps /opt/trainyard (trainer_opt_dir)",
            }.items()
        ),
    ],
)
def test_what_is_not_shared(made, where, key, words):
    (problem,) = ic.check(made)
    assert (problem.where, problem.key) == (where, key)
    assert all(word in str(problem) for word in words), problem


def test_the_root_and_a_relative_path_are_not_shared_either():
    said = " ".join(map(str, ic.check(inventory(**everywhere(storage_path="/")))))
    assert "found /, which is the system's" in said
    (problem, *_) = ic.check(inventory(**everywhere(storage_path="srv/shared")))
    assert "an absolute path" in str(problem)


@pytest.mark.parametrize("path", ["/srv/trainyard/shared", "/data", "/mnt/big", "/var/lib/models"])
def test_a_directory_of_its_own_is_shared_by_one_host(path):
    made = inventory(**everywhere(storage_path=path))
    assert ic.check(with_groups(made, storage_server=["node2"])) == []
    assert ic.check(with_groups(made, storage_server=[])) == []
