"""Ranks, the hosts' environment files, and what stands against a run."""

import shlex

import pytest
from ansible.errors import AnsibleFilterError

from plugins.filter import plan

COMMANDS = {
    "follow": "ansible-playbook train.yml -e run=first -e follow=true",
    "resume": "ansible-playbook train.yml -e run=first -e resume=true",
    "stop": "ansible-playbook playbooks/stop.yml -e run=first",
}


def fact(number=1, **changes):
    """What run_host says of node `number`: nothing stands against a run there."""
    return {
        "release": "0.1.0-abc",
        "environment": {"torch": "2.9.9+cpu", "digest": "0123456789"},
        "active": [],
        "run_dir": "/var/lib/trainyard/runs/first",
        "run_state": None,
        "run_config": None,
        "address": f"10.77.0.1{number}",
        "interface": f"eth{number}",
        "interfaces": {"lo": ["127.0.0.1"], f"eth{number}": [f"10.77.0.1{number}"]},
        "processes": 1,
        "port_holder": None,
        "free_bytes": 50_000_000_000,
        "missing_paths": [],
        **changes,
    }


def facts(*changes):
    return {f"node{n}": fact(n, **change) for n, change in enumerate(changes, 1)}


def problems(them, **changes):
    return plan.run_problems(
        them, "first", port=29500, commands=COMMANDS, trial="smoke-first", need_bytes=5 * 10**9, **changes
    )


# ---- order and ranks ----


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        (["node1", "node2", "node3"], ["node1", "node2", "node3"]),
        (["node2", "node3", "node1"], ["node1", "node2", "node3"]),  # workers stand first in the inventory
        (["node3", "node2"], ["node3", "node2"]),  # -l without the head
    ],
)
def test_the_head_is_node_0_and_the_others_keep_their_order(hosts, order):
    assert plan.run_nodes(hosts, ["node1"]) == order


def test_unequal_counts_give_every_rank_once():
    them = facts({"processes": 2}, {"processes": 1}, {"processes": 4})
    made = plan.run_plan(them, "first", 29500)
    ranks = [
        int(env["RANK_OFFSET"]) + local
        for env in made.values()
        for local in range(int(env["NPROC_PER_NODE"]))
    ]
    assert ranks == list(range(7))
    assert {env["WORLD_SIZE"] for env in made.values()} == {"7"}
    assert [env["NODE_RANK"] for env in made.values()] == ["0", "1", "2"]
    assert {env["MASTER_ADDR"] for env in made.values()} == {"10.77.0.11"}


@pytest.mark.parametrize("way", ["queue", "beside"])
def test_another_run_may_be_waited_for_or_be_company(way):
    them = facts({"active": ["other"], "port_holder": "other's rank"}, {"active": ["other"]})
    assert problems(them, **{way: True}) == []
    them["node2"]["active"] = ["first", "other"]
    assert "run first is already active" in problems({"node2": them["node2"]}, **{way: True})[0]


def test_a_queued_run_waits_on_each_host_for_those_that_are_active_there():
    them = facts({"active": ["b", "a", "first", "smoke-b"]}, {"active": []})
    waits = [env["TRAINYARD_AFTER"] for env in plan.run_plan(them, "first", 29500, queue=True).values()]
    assert waits == ["a,b", ""]
    assert {env["TRAINYARD_AFTER"] for env in plan.run_plan(them, "first", 29500).values()} == {""}


def test_the_second_of_three_hosts_gets_what_the_architecture_says():
    made = plan.run_plan(facts({}, {}, {}), "first", 29500, "http://10.77.0.11:2389", "now")
    assert made["node2"] == {
        "TRAINYARD_RUN": "first",
        "TRAINYARD_RUN_DIR": "/var/lib/trainyard/runs/first",
        "TRAINYARD_HOST": "node2",
        "NNODES": "3",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "1",
        "RANK_OFFSET": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "10.77.0.11",
        "MASTER_PORT": "29500",
        "CLUSTER_ADDRESS": "10.77.0.12",
        "TRAINYARD_STORE": "http://10.77.0.11:2389",
        "TRAINYARD_LAUNCH": "now",
        "TRAINYARD_AFTER": "",
        "NCCL_SOCKET_IFNAME": "=eth2",
        "GLOO_SOCKET_IFNAME": "eth2",
    }


def test_alone_every_host_is_its_own_master():
    made = plan.run_alone(facts({}, {}), "smoke", 29500, False)
    assert [(e["MASTER_ADDR"], e["MASTER_PORT"], e["WORLD_SIZE"], e["NODE_RANK"]) for e in made.values()] == [
        ("10.77.0.11", "29500", "1", "0"),
        ("10.77.0.12", "29500", "1", "0"),
    ]
    assert {env["TRAINYARD_STORE"] for env in made.values()} == {""}  # a host alone needs nobody's word
    ports = [env["MASTER_PORT"] for env in plan.run_alone(facts({}, {}), "smoke", 29500, True).values()]
    assert ports == ["29500", "29501"]


def test_a_run_without_hosts_is_refused():
    with pytest.raises(AnsibleFilterError, match="at least one host"):
        plan.run_plan({}, "first", 29500)


@pytest.mark.parametrize("value", ["plain", "=eth0", "/a path/with 'quotes' and \"more\"", "a$b`c\\d", ""])
def test_an_environment_file_reads_back_as_it_was(value):
    text = plan.run_env({"KEY": value, "NEXT": "1"})
    assert shlex.split(text) == [f"KEY={value}", "NEXT=1"]


def test_a_line_break_in_a_value_is_refused():
    with pytest.raises(AnsibleFilterError, match="KEY: a line break"):
        plan.run_env({"KEY": "a\nb"})


# ---- what stands against a run ----

TABLE = {
    "nothing": ([{}, {}], {}, []),
    "no trainer": ([{}, {"release": None}], {}, ["node2: the trainer is not deployed", "run site.yml first"]),
    "two releases": (
        [{}, {"release": "0.2.0-def"}],
        {},
        ["node1 has 0.1.0-abc, node2 has 0.2.0-def", "site.yml"],
    ),
    "two builds of torch": (  # site.yml -l node2 compares node2 with nobody
        [{}, {"environment": {"torch": "2.9.9+cu999", "digest": "abcdef0123"}}],
        {},
        ["node1 has torch 2.9.9+cpu", "node2 has torch 2.9.9+cu999 (digest abcdef01)", "without -l"],
    ),
    "no record of the environment": ([{}, {"environment": None}], {}, ["node2 has no record of them"]),
    "finished before": (
        [{"run_state": "finished"}, {"run_state": "finished"}],
        {},
        [
            "run first exists on node1, node2 (state: finished)",
            "fetch its results: " + COMMANDS["follow"],
            COMMANDS["resume"],
            "another name",
        ],
    ),
    "failed on one host": ([{"run_state": "failed"}, {}], {}, ["exists on node1 (state: failed)"]),
    "resumed": ([{"run_state": "failed"}, {"run_state": "failed"}], {"resume": True}, []),
    "nothing to resume": ([{}, {}], {"resume": True}, ["nothing to resume on node1, node2"]),
    "resumed with another head": (
        [{}, {"run_state": "failed"}],
        {"resume": True},
        ["nothing to resume on node1"],
    ),
    "active": (
        [{"active": ["first"], "run_state": "running"}, {"active": ["first"], "run_state": "running"}],
        {},
        ["already active on node1, node2", COMMANDS["follow"], COMMANDS["stop"]],
    ),
    "active, and followed": ([{"active": ["first"], "run_state": "running"}, {}], {"follow": True}, []),
    "unknown, and followed": ([{}, {}], {"follow": True}, ["no host knows it"]),
    "another is active": (
        [{"active": ["other"]}, {}],
        {},
        [
            "run other is already active on node1",
            COMMANDS["stop"].replace("first", "other"),
            "-e queue=true",
            "-e beside=true",
        ],
    ),
    "its own trial, left by a kill": (
        [{"active": ["smoke-first"], "port_holder": "process 77"}, {"active": ["smoke-first"]}],
        {},
        [],
    ),
    "another run's trial": ([{"active": ["smoke-other"]}, {}], {}, ["run smoke-other is already active"]),
    "an interrupted start": (
        [{"active": ["first"], "run_state": "starting"}, {"run_state": "unknown"}],
        {},
        [],
    ),
    "an interrupted copy": ([{"run_state": "unknown"}, {}], {}, []),
    "port in use": (
        [{"port_holder": "process 77 (nc -l 29500)"}, {}],
        {},
        ["node1: port 29500", "process 77 (nc -l 29500)", "-e trainer_port=29501"],
    ),
    "port in use on a worker": ([{}, {"port_holder": "process 77"}], {}, []),
    "no interface": (
        [{}, {"interface": None}],
        {},
        ["node2: no interface holds its cluster address 10.77.0.12", "lo 127.0.0.1", "cluster_address"],
    ),
    "disk full": (
        [{}, {"free_bytes": 10**9}],
        {},
        ["node2: 1.0 GB free below /var/lib/trainyard, 5.0 GB wanted", "trainer_min_free_gb"],
    ),
    "data gone": (
        [{"run_state": "failed", "missing_paths": ["/var/lib/trainyard/data/x"]}, {"run_state": "failed"}],
        {"resume": True},
        ["node1: /var/lib/trainyard/data/x"],
    ),
    "nothing in the shared directory": (
        [{}, {"missing_paths": ["/srv/trainyard/shared/glm"]}],
        {},
        ["node2: /srv/trainyard/shared/glm: found nothing there", "Copy it there, on any of them"],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_stands_against_a_run(case):
    changes, asked, words = TABLE[case]
    found = problems(facts(*changes), **asked)
    assert len(found) == bool(words), found
    for word in words:
        assert word in found[0]


def test_all_problems_are_told_at_once():
    found = problems(
        facts({"port_holder": "process 1", "free_bytes": 0}, {"interface": None, "free_bytes": 0})
    )
    assert len(found) == 4


CONFIG = {"run": "first", "steps": 5, "lr": 1e-05, "resume": "auto"}
STORED = "run: first\nsteps: 5\nlr: 1.0e-05\nresume: auto\n"


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ([{"active": ["first"], "run_config": STORED}, {"active": ["first"]}], True),
        ([{"active": ["first"], "run_config": STORED}, {}], False),  # a start that was interrupted
        ([{"run_config": STORED}, {}], False),
        ([{"active": ["first"], "run_config": STORED.replace("5", "6")}], False),
        ([{"active": ["first"], "run_config": None}], False),
        ([{"active": ["first"], "run_config": "a: [b"}], False),
    ],
)
def test_an_active_run_with_the_asked_settings_is_the_one_that_was_asked_for(changes, same):
    assert plan.run_is_same(facts(*changes), "first", CONFIG) is same


# ---- stopping ----


def test_a_run_that_no_host_knows_cannot_be_stopped():
    assert plan.run_unknown(facts({"active": ["other"]}, {}), "first") == (
        "run first: none of node1, node2 knows it (active: other); correct the name after -e run="
    )
    assert "(none is active)" in plan.run_unknown(facts({}), "first")
    for known in ({"run_state": "unknown"}, {"active": ["first"]}):
        assert plan.run_unknown(facts({}, known), "first") == ""


def test_how_a_stopped_run_ended():
    ended = {"run_state": "stopped", "run_status": {"last_checkpoint": 30}}
    assert plan.run_end(facts(ended, ended), "first") == (
        "run first: stopped on node1, node2; its newest checkpoint is of step 30; to go on: train.yml -e run=first "
        "-e resume=true"
    )
    hanging = plan.run_end(
        facts(ended, {"active": ["first"], "run_state": "saving", "run_status": None}), "first"
    )
    assert hanging.startswith("run first: stopped on node1; still active on node2; ")
    done = {"run_state": "finished", "run_status": {"last_checkpoint": 30}}
    assert plan.run_end(facts(done), "first") == (
        "run first: finished on node1; there was nothing to stop; its results: train.yml -e run=first -e follow=true"
    )


# ---- what is brought ----


def test_names_become_the_places_where_they_were_brought():
    config = {"model": "m", "dataset": "a.jsonl, austen", "validation": "a.jsonl", "seed": 1}
    uploads = [
        {"key": "model", "name": "m", "path": "models/1/m"},
        {"key": "dataset", "name": "a.jsonl", "path": "data/2/a.jsonl"},
    ]
    assert plan.run_brought(config, uploads, "/var/lib/trainyard") == {
        "model": "/var/lib/trainyard/models/1/m",
        "dataset": "/var/lib/trainyard/data/2/a.jsonl,austen",
        "validation": "a.jsonl",
        "seed": 1,
    }
    assert plan.run_brought(config, [], "/x") == config


def test_a_resumed_runs_paths_must_lie_on_the_hosts():
    config = {"model": "/m/a", "dataset": "/d/a.jsonl,austen,org/set", "validation": "/d/v.jsonl"}
    uploads = [{"key": "validation", "name": "/d/v.jsonl"}]
    assert plan.run_kept_paths(config, uploads) == ["/m/a", "/d/a.jsonl"]
    assert plan.run_kept_paths({"model": "tiny", "dataset": "austen"}, []) == []
