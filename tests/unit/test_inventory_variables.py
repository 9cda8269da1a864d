"""The variables of an inventory, their names and values: each kind of bad input, and what is allowed."""

import inventory_values
import pytest
from inventories import GOOD, SPECS, everywhere, inventory, is_one_problem

from plugins.action import inventory_check as ic

# What is wrong: (inventory, where, key, words of the message). Exactly this problem, and no other, must be found.
BAD = {
    "a configuration of runs that one host has of its own": (
        inventory(node2={"trainer_config": {"device": "cpu"}}),
        "hosts.yml",
        "trainer_config",
        ['several values: {} (node1, node3); {"device": "cpu"} (node2)', "a run has one configuration"],
    ),
    "another place for runs on one host": (
        inventory(node2={"trainer_state_dir": "/data/trainyard"}),
        "hosts.yml",
        "trainer_state_dir",
        ["/var/lib/trainyard (node1, node3); /data/trainyard (node2)", "a bind mount makes it so"],
    ),
    "a slip in the prefix": (
        inventory(**everywhere(cluser_network="192.168.1.0/24")),
        "hosts.yml",
        "cluser_network",
        ["no role has", "Write cluster_network"],
    ),
    "an unknown one of ours": (
        inventory(node2={"cluster_adress_v4": "x"}),
        "node2",
        "cluster_adress_v4",
        ["no role has", "cluster_address"],
    ),
    "a role's unknown one": (
        inventory(node2={"tuning_sysctls": {}}),
        "node2",
        "tuning_sysctls",
        ["Write tuning_sysctl "],
    ),
    "far from all": (inventory(node2={"trainyard_xyz": 1}), "node2", "trainyard_xyz", ["no role has"]),
    "neighbours swapped": (
        inventory(node2={"nproc_pre_node": 1}),
        "node2",
        "nproc_pre_node",
        ["nproc_per_node"],
    ),
    "no number": (
        inventory(node2={"nproc_per_node": "four"}),
        "node2",
        "nproc_per_node",
        ["'four'", "an integer"],
    ),
    "zero processes": (
        inventory(node2={"nproc_per_node": 0}),
        "node2",
        "nproc_per_node",
        ["found 0", "1 or more"],
    ),
    "fewer than none": (inventory(node2={"nproc_per_node": "-2"}), "node2", "nproc_per_node", ["found -2"]),
    "no choice": (
        inventory(node2={"network_renderer": "ifupdown"}),
        "node2",
        "network_renderer",
        ["one of auto, networkd"],
    ),
    "no mapping": (inventory(node2={"tuning_sysctl": "a"}), "node2", "tuning_sysctl", ["'a'", "a mapping"]),
    "a mapping's unknown key": (
        inventory(node2={"network_interfaces": [{"name": "eth0", "adresses": []}]}),
        "node2",
        "network_interfaces",
        ["adresses"],
    ),
    "a word for the other boolean": (
        inventory(node2={"firewall_manage": "Yes"}),
        "node2",
        "firewall_manage",
        ["found 'Yes'", "in an INI inventory firewall_manage=True", """-e '{"firewall_manage": true}'"""],
    ),
    "a list by commas": (
        inventory(node2={"time_sync_servers": "a.org, b.org"}),
        "node2",
        "time_sync_servers",
        ["time_sync_servers=['a.org', 'b.org'], after -e", """'{"time_sync_servers": ["a.org", "b.org"]}'"""],
    ),
    "a word for a boolean": (
        inventory(node2={"firewall_manage": "false"}),
        "node2",
        "firewall_manage",
        ["found 'false'", "expected true or false", """-e '{"firewall_manage": false}'"""],
    ),
    "a word for local_mode": (
        inventory(node2={"local_mode": "false"}),
        "node2",
        "local_mode",
        ["'false'", "true or false"],
    ),
    "a word for a list": (
        inventory(node2={"firewall_ssh_from": "10.0.0.0/8"}),
        "node2",
        "firewall_ssh_from",
        ["'10.0.0.0/8'", "expected a list", '{"firewall_ssh_from": ['],
    ),
    "a word for a mapping": (
        inventory(node2={"trainer_config": "threads=2"}),
        "node2",
        "trainer_config",
        ["'threads=2'", "a mapping"],
    ),
    "a word for an item": (
        inventory(node2={"network_interfaces": ["name=eth0"]}),
        "node2",
        "network_interfaces",
        ["found 'name=eth0' in [0]", "expected a mapping"],
    ),
    "a word for another item": (
        inventory(node2={"firewall_allow": [{"port": "80"}, "port=9100"]}),
        "node2",
        "firewall_allow",
        ["found 'port=9100' in [1]", "a mapping"],
    ),
    "a word for a list in an item": (
        inventory(node2={"firewall_allow": [{"port": "80", "from": "10.0.0.0/8"}]}),
        "node2",
        "firewall_allow",
        ["'10.0.0.0/8' in [0].from", "a list"],
    ),
    "nothing": (
        inventory({**GOOD, "node2": {**GOOD["node2"], "firewall_allow": None}}),
        "node2",
        "firewall_allow",
        ["found nothing", "a list", "leave the key out"],
    ),
    "a port too great": (
        inventory(node2={"trainer_port": "70000"}),
        "node2",
        "trainer_port",
        ["70000", "1024 to 65535"],
    ),
    "a port of root's": (inventory(node2={"trainer_port": 0}), "node2", "trainer_port", ["1024 or more"]),
    "a time before now": (
        inventory(node2={"trainer_refresh_seconds": "-1"}),
        "node2",
        "trainer_refresh_seconds",
        ["-1", "0.1 or more"],
    ),
    "no finite number": (
        inventory(node2={"trainer_min_free_gb": "nan"}),
        "node2",
        "trainer_min_free_gb",
        ["nan", "0 to"],
    ),
    "a guard too quick": (inventory(node2={"guard_timeout": 5}), "node2", "guard_timeout", ["20 or more"]),
    "a relative path": (
        inventory(node2={"trainer_state_dir": "mydir"}),
        "node2",
        "trainer_state_dir",
        ["mydir", "an absolute path"],
    ),
    "a path with a way up": (
        inventory(node2={"trainer_opt_dir": "/opt/../etc"}),
        "node2",
        "trainer_opt_dir",
        ["/opt/../etc", "without .."],
    ),
    "a path that a unit would split": (
        inventory(node2={"trainer_state_dir": "/srv/my runs"}),
        "node2",
        "trainer_state_dir",
        ["/srv/my runs", "plainer path"],
    ),
    "a directory of the system's": (
        inventory(node2={"trainer_state_dir": "/var/lib"}),
        "node2",
        "trainer_state_dir",
        ["found /var/lib", "/var/lib/trainyard"],
    ),
    "a directory that runs do not see": (
        inventory(node2={"trainer_state_dir": "/var/tmp/runs"}),
        "node2",
        "trainer_state_dir",
        ["found /var/tmp/runs", "ProtectHome and PrivateTmp", "/srv/trainyard"],
    ),
    "the directory of homes": (
        inventory(node2={"trainer_state_dir": "/home"}),
        "node2",
        "trainer_state_dir",
        ["found /home;", "ProtectHome and PrivateTmp", "/srv/trainyard"],
    ),
    "an environment that runs do not see": (
        inventory(node2={"python_env_dir": "/tmp/env"}),
        "node2",
        "python_env_dir",
        ["found /tmp/env", "ProtectHome and PrivateTmp"],
    ),
    "a cluster's name that Prometheus would fill in": (
        inventory(node2={"cluster_name": "lab $1"}),
        "node2",
        "cluster_name",
        ["found 'lab $1'", "letters, digits, spaces"],
    ),
    "a user that is no name": (
        inventory(node2={"trainer_user": "anna smith"}),
        "node2",
        "trainer_user",
        ["anna smith", "lower case letters"],
    ),
    "a time server with an option": (
        inventory(node2={"time_sync_servers": ["ntp.example.org", "10.0.0.1 trust"]}),
        "node2",
        "time_sync_servers",
        ["found '10.0.0.1 trust'", "names or addresses"],
    ),
    "a time span that is none": (
        inventory(node2={"trainer_stop_timeout": "a while"}),
        "node2",
        "trainer_stop_timeout",
        ["a while", "90s or 10min"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_problem_with_its_place_and_its_cure(what):
    is_one_problem(*BAD[what])


def test_a_number_with_its_unit_is_told_without_words_of_ansibles_inside():
    (problem,) = ic.check(inventory(node2={"trainer_min_free_gb": "10GB"}))
    assert str(problem) == "node2: trainer_min_free_gb: found '10GB'; expected a number. Correct it"


@pytest.mark.parametrize(
    "name", ["", " a", "a ", 'a"', "a\\", "a%b", "a;b", "a #b", "a\nb", "{{ a }}", "x" * 64]
)
def test_a_clusters_name_that_a_file_would_not_take_as_it_is(name):
    (problem,) = ic.check(inventory(node2={"cluster_name": name}))
    assert problem.key == "cluster_name" and problem.found == repr(name)


def test_every_number_of_the_roles_has_its_limits():
    numbers = {name for name, option in SPECS.items() if option.get("type") in ("int", "float")}
    assert numbers == set(inventory_values.LIMITS), (
        "plugins/module_utils/inventory_values.py: LIMITS must name every number"
    )
    for name in numbers & {name for name in SPECS if "default" in SPECS[name]}:
        assert inventory_values.LIMITS[name][0] <= SPECS[name]["default"] <= inventory_values.LIMITS[name][1]


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("NCCL_DEBUG", "INFO", True),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", True),
        ("NCCL_P2P_DISABLE", 1, True),
        ("TORCH_LOGS", "", True),
        ("no_proxy", "localhost,10.0.0.0/8", True),
        ("NCCL_DEBUG", True, False),  # which would be the word True
        ("NCCL_DEBUG", None, False),
        ("NCCL_DEBUG", "IN\nRANK=3", False),
        ("NCCL_DEBUG", "it's", False),
        ("NCCL_DEBUG", "INFO\r", False),
        ("NCCL_DEBUG", "a\tb 100% $x ü", True),
        ("GRÖSSE", "1", False),
        ("NCCL-DEBUG", "INFO", False),
        ("1X", "INFO", False),
        ("RANK", "0", False),
        ("RANKS", "0", True),
        ("GLOO_SOCKET_IFNAME", "eth1", False),
        ("TRAINYARD_STORE", "http://10.0.0.1:1", False),
        ("PYTHONPATH", "/tmp", False),
    ],
)
def test_a_runs_environment_is_given_what_trainyard_does_not_set(name, value, fits):
    fault = inventory_values.value_fault("trainer_environment", {name: value}, {"type": "dict"}, False)
    assert (fault is None) == fits, fault
