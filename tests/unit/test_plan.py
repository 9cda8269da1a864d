"""Ranks, the hosts' environment files, and what stands against a run."""

import base64
import json
import re
import shlex

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from plugins.filter import plan
from trainer import link
from trainer.data import read

COMMANDS = {
    "follow": "ansible-playbook train.yml -e run=first -e follow=true",
    "resume": "ansible-playbook train.yml -e run=first -e resume=true",
    "stop": "ansible-playbook playbooks/stop.yml -e run=first",
    "ansible": "ansible -i home",
    "site": "ansible-playbook site.yml",
    "limit": "",
    "resume_on": "ansible-playbook train.yml -e run=first -e resume=true",
}


def fact(number=1, **changes):
    """What run_host says of node `number`: nothing stands against a run there."""
    return {
        "release": "0.1.0-abc",
        "environment": {"torch": "2.9.9+cpu", "digest": "0123456789"},
        "active": [],
        "jobs": {},
        "at_work": [],
        "run_dir": "/var/lib/trainyard/runs/first",
        "run_state": None,
        "run_config": None,
        "address": f"10.77.0.1{number}",
        "interface": f"eth{number}",
        "interfaces": {"lo": ["127.0.0.1"], f"eth{number}": [f"10.77.0.1{number}"]},
        "processes": 1,
        "port_holder": None,
        "free_bytes": 50_000_000_000,
        "brought_bytes": 0,
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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"batch_size": 4}, "batch_size: found 4; expected 5 or more"),
        (
            {"batch_size": 24, "balance": "12,6,6"},
            r"found 3 shares \(12,6,6\); expected one for each of the 5 ranks",
        ),
        ({"min_nodes": 3}, "min_nodes: found 3; expected at most 2"),
        ({"min_nodes": 2}, None),
        ({"batch_size": 5, "balance": "even"}, None),
        ({"batch_size": 8, "balance": "2,2,2,1,1"}, None),
    ],
)
def test_steps_that_all_ranks_cannot_share_are_refused_before_a_host_is_touched(config, said):
    """Ranks would refuse that, too, once they are all there: with a late host in the middle of the run."""
    found = problems(facts({"processes": 2}, {"processes": 3}), config=config)
    assert len(found) == (said is not None)
    assert not said or (re.search(said, found[0]) and "node1, node2" in found[0])


def test_shares_that_are_none_are_refused_where_nobody_has_looked_at_them_yet():
    """As of a run that is to be resumed, and is not there."""
    found = problems(facts({"processes": 2}), config={"batch_size": 8, "balance": "8,x"})
    assert found == ["balance: found 8,x; expected auto, even, or whole numbers from 1 on, by commas"]


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
    "a release of another checkout": (  # of which RUN.yaml may have a key that it does not know
        [{}, {}],
        {"version": "0.1.0+g5e2ab9f1"},
        [
            "node1, node2: found the release 0.1.0-abc of the trainer; expected 0.1.0+g5e2ab9f1, this checkout's",
            "have this one there: " + COMMANDS["site"],
            "git pull",
        ],
    ),
    "and a run that is resumed": (
        [{"run_state": "failed"}, {"run_state": "failed"}],
        {"version": "0.1.0+g5e2ab9f1", "resume": True},
        ["found the release 0.1.0-abc"],
    ),
    "that of this checkout": ([{"release": "0.1.0+g5e2ab9f1-3c4d"}], {"version": "0.1.0+g5e2ab9f1"}, []),
    "another checkout's, and followed": (
        [{"active": ["first"], "run_state": "running"}],
        {"version": "0.1.0+g5e2ab9f1", "follow": True},
        [],
    ),
    "another checkout's, and active": (
        [{"active": ["first"], "run_state": "running"}],
        {"version": "0.1.0+g5e2ab9f1"},
        ["already active on node1"],
    ),
    "two builds of torch": (  # site.yml -l node2 compares node2 with nobody
        [{}, {"environment": {"torch": "2.9.9+cu999", "digest": "abcdef0123"}}],
        {},
        [
            "node1 has torch 2.9.9+cpu",
            "node2 has torch 2.9.9+cu999 (digest abcdef01)",
            "without -l",
            "python_env_python: bring",
        ],
    ),
    "an empty environment": ([{}, {"environment": None}], {}, ["node2 has none"]),
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
    "a resume that was interrupted is resumed": (
        [{"run_state": "starting", "run_status": {"last_checkpoint": 40}}, {"run_state": "starting"}],
        {"resume": True},
        [],
    ),
    "and is no new run": (
        [{"run_state": "starting", "run_status": {"last_checkpoint": 40}}, {}],
        {},
        ["exists on node1 (state: starting)", "-e resume=true"],
    ),
    "resumed, though there is nothing": (
        [{"run_state": "starting", "run_status": {}}, {}],
        {"resume": True},
        ["there is nothing to resume on node1, node2"],
    ),
    "resumed with a new head": ([{}, {"run_state": "failed"}], {"resume": True}, []),
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
    "preflight's burn": (
        [
            {"at_work": ["trainyard-work-burn-0a1b2c3d.service"]},
            {"at_work": ["trainyard-work-burn-4e5f6a7b.service"]},
        ],
        {},
        [
            "node1, node2: found trainyard-work-burn-0a1b2c3d.service at work",
            "or stop it: ansible -i home node1,node2 -b -a 'systemctl stop trainyard-work-burn-*'\n",
            "-e beside=true",
        ],
    ),
    "a bench, and a resume": (
        [
            {"run_state": "failed"},
            {"at_work": ["trainyard-bench.service", "trainyard-work-bench-0a1b2c3d.service"]},
        ],
        {"resume": True},
        ["node2: found trainyard-bench", "systemctl stop trainyard-bench.service trainyard-work-bench-*'"],
    ),
    "a text that is written, beside": (
        [{"at_work": ["trainyard-work-generate-0a1b2c3d.service"]}],
        {"beside": True},
        [],
    ),
    "a text that is written, and a run that has nothing to wait for": (
        [{"at_work": ["trainyard-work-generate-0a1b2c3d.service"]}],
        {"queue": True},
        ["found trainyard-work-generate-0a1b2c3d.service at work"],
    ),
    "and one that waits for another run": (
        [{"at_work": ["trainyard-work-generate-0a1b2c3d.service"], "active": ["other"]}],
        {"queue": True},
        [],
    ),
    "a burn, and a run that is followed": (
        [{"at_work": ["trainyard-work-burn-0a1b2c3d.service"], "active": ["first"]}],
        {"follow": True},
        [],
    ),
    "its own trial, left by a kill": (
        [{"active": ["smoke-first"], "port_holder": "process 77"}, {"active": ["smoke-first"]}],
        {},
        [],
    ),
    "another run's trial": (
        [{"active": ["smoke-other"]}, {}],
        {},
        ["run smoke-other, a trial, whose run starts", "stop.yml -e run=smoke-other"],
    ),
    "preflight's": (
        [{"active": ["smoke-preflight"]}, {}],
        {},
        ["a trial, preflight.yml's, is active on node1"],
    ),
    "another run's trial, queued behind": (
        [{"active": ["smoke-other"]}, {}],
        {"queue": True},
        [
            "run smoke-other, a trial, whose run starts once it has ended, is active on node1; wait for its end"
        ],
    ),
    "beside another run's trial": ([{"active": ["smoke-other"]}, {}], {"beside": True}, []),
    "its configuration lost": (
        [{"run_state": "stopped"}, {}],
        {"resume": True, "unstored": "/etc/first.yaml and /run/config.yaml"},
        ["its configuration is lost: found neither of /etc/first.yaml and /run/config.yaml on node1, node2"],
    ),
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
    "an address of lo's": (
        [{}, {"interface": "lo", "interfaces": {"lo": ["127.0.0.1", "10.77.0.12"]}}],
        {},
        ["node2: lo holds its cluster address 10.77.0.12", "127.0.0.1", "network_interfaces"],
    ),
    "an address of lo's, of a host alone": ([{"interface": "lo"}], {}, []),
    "disk full": (
        [{}, {"free_bytes": 10**9}],
        {},
        ["node2: 1.0 GB free below /var/lib/trainyard, 5.0 GB wanted", "trainer_min_free_gb"],
    ),
    "what was brought is there": ([{}, {"free_bytes": 10**9, "brought_bytes": 4 * 10**9}], {}, []),
    "half of it was brought": (
        [{}, {"free_bytes": 10**9, "brought_bytes": 2 * 10**9}],
        {},
        ["node2: 1.0 GB free below /var/lib/trainyard, 3.0 GB wanted"],
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
        ([{"active": ["first"], "run_config": f"{STORED}bucket_mb: 2\n"}], True),  # by the link
        ([{"active": ["first"], "run_config": None}], False),
        ([{"active": ["first"], "run_config": "a: [b"}], False),
        ([{"active": ["first"], "run_config": "a"}], False),
    ],
)
def test_an_active_run_with_the_asked_settings_is_the_one_that_was_asked_for(changes, same):
    assert plan.run_is_same(facts(*changes), "first", CONFIG) is same


def test_another_bucket_than_was_asked_for_is_another_run():
    stored = facts({"active": ["first"], "run_config": f"{STORED}bucket_mb: 2\n"})
    assert plan.run_is_same(stored, "first", {**CONFIG, "bucket_mb": 2})
    assert not plan.run_is_same(stored, "first", {**CONFIG, "bucket_mb": 4})


def test_what_the_hosts_have_by_content_is_known_by_its_name():
    """As long as nobody has asked them for its place again."""
    place = "/var/lib/trainyard/{}/" + "0a" * 32 + "/{}"
    glm, mine = place.format("models", "glm"), place.format("data", "a.jsonl")
    stored = facts({"active": ["first"], "run_config": f"model: {glm}\ndataset: austen,{mine}\n"})
    for model, dataset, same in (
        ("/mine/glm/", "austen,/mine/a.jsonl", True),
        (glm, f"austen,{mine}", True),
        ("/mine/gml", f"austen,{mine}", False),
        ("/mine/glm", f"austen,{mine.replace('0a', '0b')}", False),  # the controller's has another content
        ("/mine/glm", "/mine/a.jsonl,austen", False),
    ):
        assert plan.run_is_same(stored, "first", {"model": model, "dataset": dataset}) is same
    org = place.format("models", "org--name")
    called = json.dumps({org: "org/name"})
    hub = facts({"active": ["first"], "run_config": f"model: {org}\norigins: '{called}'\n"})
    assert plan.run_is_same(hub, "first", {"model": "org/name"})
    assert not plan.run_is_same(hub, "first", {"model": "org/other"})


# ---- what travels at once ----


def baseline(runs, hosts, place="preflight", day=1, **figures):
    """A result between `hosts`: 1 Gbit/s, and 0.2 ms there and back."""
    found = {"mbit": {"a>b": 941.0, "b>a": 999.0}, "rtt_ms": {"a>b": 0.2, "b>a": 0.1}, **figures}
    (runs / place).mkdir(parents=True, exist_ok=True)
    name = f"baseline-{day}{len(list((runs / place).iterdir()))}.json"
    (runs / place / name).write_text(json.dumps({"hosts": hosts, "time": 86400.0 * day, "figures": found}))


def test_a_run_has_the_buckets_of_the_link_between_its_hosts(tmp_path):
    def chosen(config=CONFIG, hosts=("a", "b", "c"), rdma=()):
        return plan.run_by_link(config, list(hosts), str(tmp_path), list(rdma)).get("bucket_mb")

    assert chosen() is None
    baseline(tmp_path, ["c", "b", "a"], day=3)
    # 40 x 3 hosts x 0.1 ms x 117.6 MB/s are 1.35 MiB.
    assert chosen() == 2
    assert chosen(hosts="ab") is chosen(hosts="abd") is chosen(rdma="c") is None
    for other in ({"comm": "8bit"}, {"strategy": "zero2"}):
        assert chosen({**CONFIG, **other}) is None
    assert chosen({**CONFIG, "comm": "exact", "strategy": "split"}) == 2
    assert chosen({**CONFIG, "bucket_mb": 7}) == 7
    baseline(tmp_path, ["a", "b", "c"], day=2, rtt_ms={"a>b": 9.0})  # an older one
    assert chosen() == 2
    baseline(tmp_path, ["a", "b", "c"], "bench", day=4, rtt_ms={"a>b": 0.6})
    assert chosen() == 8
    baseline(tmp_path, ["a", "b", "c"], "bench", day=5, rtt_ms={})  # which says nothing of it
    baseline(tmp_path, ["a", "b", "c"], "bench", day=6, gbit={"a>b": 90.0})  # by RDMA
    assert chosen() == 8


def test_a_run_whose_frozen_weights_would_travel_is_told_what_was_measured(tmp_path):
    lora = {**CONFIG, "adapter": "lora", "strategy": "fsdp"}

    def told(config=lora, hosts="ab", rdma=""):
        return plan.run_by_link(config, list(hosts), str(tmp_path), list(rdma)).get("link_gbit")

    assert told() is None
    baseline(tmp_path, ["a", "b"], gbit={}, rtt_ms={})
    assert told() == pytest.approx(1.0, abs=0.01)  # 941 Mbit/s of a stream
    assert told(hosts="abc") is told(rdma="a") is None
    assert told({**lora, "adapter": "none"}) is told({**lora, "strategy": "zero2"}) is None
    assert told({**lora, "link_gbit": 7.0}) == 7.0
    baseline(tmp_path, ["a", "b"], day=9, mbit={"a>b": 0.2, "b>a": 0.2}, rtt_ms={})
    assert told() == 0.001  # 0 would be no speed, which the trainer refuses
    stored = facts({"active": ["first"], "run_config": "strategy: fsdp\nlink_gbit: 1.001\n"})
    assert plan.run_is_same(stored, "first", {"strategy": "fsdp"})


@pytest.mark.parametrize(
    ("megabits", "hop", "hosts", "mb"),
    [
        (941, 1e-4, 2, 1),
        (941, 1e-4, 16, 8),
        (941, 1e-4, 64, 25),
        (9400, 5e-5, 2, 8),
        (94, 1e-2, 2, 16),
        (94, 1e-2, 8, 25),  # never more: what travels waits for the last of it
        (941, None, 3, 25),
        (941, 1e-4, 1, 25),
        (941, 0.0, 3, 1),
    ],
)
def test_a_bucket_is_as_small_as_its_hops_allow(megabits, hop, hosts, mb):
    assert link.bucket_mb(megabits * 1e6, hop, hosts) == mb


# ---- stopping ----


def test_a_run_that_no_host_knows_cannot_be_stopped():
    assert plan.run_unknown(facts({"active": ["other"]}, {}), "first") == (
        "run first: none of node1, node2 knows it (active: other); correct the name after -e run="
    )
    assert "(none is active)" in plan.run_unknown(facts({}), "first")
    silent = plan.run_unknown(facts({}, {}), "first", ["node3"])
    assert "it may be active on node3: no word of that host. See to that host, or correct the name" in silent
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
    goes_on = plan.run_goes_on(facts(ended, {"active": ["first"]}), "first")
    assert goes_on.startswith("run first: found it still active on node2 ") and "stop.yml again" in goes_on
    assert plan.run_goes_on(facts(ended, {"active": ["second"]}), "first") == ""
    told, missed = plan.run_end(facts(ended), "first", ["node2"]).split("\n")
    assert told.startswith(
        "run first: stopped on node1; not asked, since there was no answer: node2; its newest"
    )
    assert missed.startswith(
        "Nothing was stopped on node2: the run may go on there, or begin again at the next boot"
    )
    assert missed.endswith("Else stop it again then: playbooks/stop.yml -e run=first")
    alive = {"active": ["first"], "run_state": "running", "run_status": {"last_checkpoint": 20}}
    assert plan.run_end(facts(alive, ended), "first", ["node3"], check=True) == (
        "run first: would be stopped on node1; stopped on node2; not asked, since there was no answer: node3; its "
        "newest checkpoint so far is of step 30; nothing was changed"
    )
    done = {"run_state": "finished", "run_status": {"last_checkpoint": 30}}
    assert plan.run_end(facts(done), "first") == (
        "run first: finished on node1; there was nothing to stop; its results: train.yml -e run=first -e follow=true"
    )


def test_a_host_that_does_not_take_part_has_no_word_in_a_run_that_is_followed():
    nodes = ["node1", "node2", "node3"]
    on, off = {"active": ["first", "other"]}, {"active": ["other"]}
    assert plan.run_followed(facts(on, on, off), nodes, "first") == ["node1", "node2"]
    assert plan.run_followed(facts(on, off), nodes, "first") == ["node1", "node3"]  # node3 is silent
    assert plan.run_followed(facts(off, off, off), nodes, "first") == nodes  # it is over


def test_a_run_goes_on_as_it_was_started_last():
    def slurped(text):
        return {"content": base64.b64encode(text.encode()).decode()} if text else {"msg": "file not found"}

    def answer(config, start, copy=""):
        variables = start and f"A=b\nTRAINYARD_LAUNCH={start}\nB=c\n"
        return {"results": [slurped(config), slurped(variables), slurped(copy)]}

    old, new = answer("lr: 1\n", "20261101T000000000000"), answer("lr: 2\n", "20261102T000000000000")
    assert plan.run_stored([old, new, answer("lr: 0\n", "20261031T230000000000")]) == "lr: 2\n"
    assert plan.run_stored([{"unreachable": True}, answer("", "20261103T000000000000"), old]) == "lr: 1\n"
    assert plan.run_stored([answer("lr: 3\n", "")]) == "lr: 3\n"
    assert plan.run_stored([{}, answer("", "")]) == ""
    # The system's disk was lost, and the one of the runs is there.
    assert plan.run_stored([answer("", "", "lr: 4\n")]) == "lr: 4\n"
    assert (
        plan.run_stored([answer("", "", "lr: 4\n"), answer("lr: 2\n", "20261102T0", "lr: 0\n")]) == "lr: 2\n"
    )


# ---- what is brought ----


def test_what_one_host_lost_of_a_resumed_run_comes_from_the_others():
    state = "/var/lib/trainyard"
    config = {
        "model": f"{state}/models/1/m",
        "dataset": f"{state}/data/2/a, {state}/data/3/b",
        "validation": "/srv/v",
    }
    asked = {"config": config, "elsewhere": [], "resume": True}
    lost = [f"{state}/models/1/m", f"{state}/data/3/b", f"{state}/data/9/gone", "/srv/v"]
    found = plan.run_regained(
        facts({"missing_paths": lost}, {"missing_paths": [f"{state}/data/9/gone"]}), asked, state
    )
    assert found["elsewhere"] == [
        {"key": "model", "name": f"{state}/models/1/m"},
        {"key": "dataset", "name": f"{state}/data/3/b"},
    ]
    assert plan.run_regained({}, asked, state) == asked
    both = facts({"missing_paths": lost}, {"missing_paths": lost})
    assert plan.run_regained(both, asked, state) == asked  # nobody has it


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


def test_what_was_brought_keeps_the_names_that_it_has_elsewhere():
    """A run's configuration has places; its model card is read where these are none."""
    state = "/var/lib/trainyard"
    uploads = [
        {"key": "model", "name": "org/name", "path": "models/1/org--name"},  # of the hub
        {
            "key": "dataset",
            "name": "texts/a.jsonl",
            "path": "data/2/a.jsonl",
            "source": "/home/me/texts/a.jsonl",
        },
        {"key": "validation", "name": "/srv/b.jsonl", "path": "data/3/b.jsonl", "source": "/srv/b.jsonl"},
    ]
    asked = {"model": "org/name", "dataset": "texts/a.jsonl,austen", "validation": "/srv/b.jsonl", "seed": 1}
    config = plan.run_brought(asked, uploads, state)
    told = plan.run_origins(config, uploads, state)
    assert {**told, "origins": None} == {**config, "origins": None}
    assert json.loads(told["origins"]) == {
        f"{state}/models/1/org--name": "org/name",
        f"{state}/data/2/a.jsonl": "./texts/a.jsonl",  # no name on the hub
        f"{state}/data/3/b.jsonl": "/srv/b.jsonl",
    }
    assert read.named(told) == {**asked, "dataset": "./texts/a.jsonl,austen"}
    # Resumed, with something new, and what another host had to give.
    again = [
        {"key": "dataset", "name": "c.txt", "path": "data/4/c.txt", "source": "/home/me/c.txt"},
        {"key": "model", "name": config["model"], "path": "models/1/org--name", "source": config["model"]},
    ]
    resumed = plan.run_brought({**told, "dataset": "c.txt"}, again, state)
    resumed = plan.run_origins(resumed, again, state)
    assert read.named(resumed) == {**asked, "dataset": "./c.txt"}
    assert plan.run_origins(asked, [], state) == asked


def test_a_resumed_runs_paths_must_lie_on_the_hosts():
    config = {"model": "/m/a", "dataset": "/d/a.jsonl,austen,org/set", "validation": "/d/v.jsonl"}
    uploads = [{"key": "validation", "name": "/d/v.jsonl"}]
    assert plan.run_kept_paths(config, uploads) == ["/m/a", "/d/a.jsonl"]
    assert plan.run_kept_paths({"model": "tiny", "dataset": "austen"}, []) == []


# ---- files that all hosts share ----


def asked():
    uploads = [
        {"key": "model", "name": "./glm", "source": "/net/glm", "mark": "m"},
        {"key": "dataset", "name": "a.jsonl", "source": "/net/a.jsonl", "mark": "a"},
        {"key": "validation", "name": "b.jsonl", "source": "/net/b.jsonl", "mark": "b"},
    ]
    config = {"model": "./glm", "dataset": "a.jsonl,austen", "validation": "b.jsonl"}
    return {"uploads": uploads, "config": config, "run": "first", "elsewhere": []}


def test_what_all_hosts_see_at_one_path_is_not_brought():
    marks = {"/net/glm": "m", "/net/a.jsonl": "a", "/net/b.jsonl": "other"}
    them = facts({"shared": marks}, {"shared": marks})
    assert plan.run_shared_names(them, asked()) == ["/net/glm", "/net/a.jsonl"]
    answer = plan.run_shared(them, asked())
    assert answer["config"] == {
        "model": "/net/glm",
        "dataset": "/net/a.jsonl,austen",
        "validation": "b.jsonl",
    }
    assert [one["key"] for one in answer["uploads"]] == ["validation"] and answer["run"] == "first"


def test_what_one_host_does_not_see_is_brought_to_all():
    them = facts({"shared": {"/net/glm": "m", "/net/a.jsonl": "a"}}, {"shared": {"/net/a.jsonl": "b"}})
    assert plan.run_shared_names(them, asked()) == []
    assert plan.run_shared(them, asked()) == asked()


def test_what_the_controller_has_not_comes_from_the_first_host_that_has_it():
    names = [{"key": "model", "name": "/mine/glm"}, {"key": "dataset", "name": "/mine/a.jsonl"}]
    both = [one["name"] for one in names]
    them = facts({"missing_paths": both}, {"missing_paths": both[1:]}, {"missing_paths": both[1:]})
    assert plan.run_offerer(them, "/mine/glm") == "node2"
    problems = plan.run_problems(them, "first", port=1, commands={}, elsewhere=names)
    (said,) = [one for one in problems if "/mine" in one]
    assert said.startswith(
        "dataset: /mine/a.jsonl: found nothing there, on this controller as on node1, node2"
    )
    # A disk of the network that the hosts alone have.
    them = facts({"shared": {"/mine/glm": "m"}}, {"shared": {"/mine/glm": "m", "/mine/a.jsonl": "a"}})
    answer = plan.run_shared(them, {**asked(), "elsewhere": names})
    assert plan.run_shared_names(them, {**asked(), "elsewhere": names}) == ["/mine/glm"]
    assert answer["elsewhere"] == names[1:] and answer["config"] == asked()["config"]


# ---- hosts that do not answer ----


def answers(**dead):
    """What the task run_host registered on three hosts; dead: why one did not answer."""
    said = {
        "node1": {"host_facts": fact(1)},
        "node2": {"host_facts": fact(2)},
        "node3": {"host_facts": fact(3)},
    }
    return {**said, **{host: {"unreachable": True, "msg": f"ssh:\n{why}"} for host, why in dead.items()}}


def words(limit="", **given):
    return {
        "run": "first",
        "follow": False,
        "resume": False,
        **given,
        "commands": {**COMMANDS, "limit": limit},
    }


def test_hosts_that_all_answer_stand_against_nothing():
    for given in ({}, {"resume": True}, {"follow": True}):
        assert plan.run_unanswered(answers(), words(**given)) == []
    assert plan.run_silent(answers()) == ""
    assert list(plan.run_facts(answers())) == ["node1", "node2", "node3"]


def test_a_run_is_followed_past_a_dead_host_which_is_named():
    them = answers(node1="Connection timed out")
    assert plan.run_unanswered(them, words(follow=True)) == []
    assert plan.run_silent(them).startswith("node1: no answer: Connection timed out\n")
    assert list(plan.run_facts(them)) == ["node2", "node3"]


def test_a_run_is_not_resumed_without_a_host_unless_that_is_asked_for():
    fault, told = plan.run_unanswered(answers(node2="Connection timed out"), words(resume=True))
    assert fault == "node2: no answer: Connection timed out"
    assert told.startswith(
        "run first: found 1 of its 3 hosts silent; expected an answer of each. Resumed without node2, the run"
    )
    assert "See to power and network there, and start it again:" in told
    assert told.endswith(f"\n  or without, if it is off: {COMMANDS['resume_on']} -l '!node2'")
    *faults, told = plan.run_unanswered(answers(node1="gone", node3="gone"), words("all,!node9"))
    assert len(faults) == 2 and "expected an answer of each. See to power" in told  # nothing is under way
    assert told.endswith("\n  or without, if they are off: add -l 'all,!node9,!node1,!node3' to the command")


def test_what_is_to_be_left_out_is_understood_by_ansible():
    from ansible.inventory.manager import split_host_pattern

    for limit, patterns in (
        ("", ["!node2"]),
        ("node1,node2", ["node1", "node2", "!node2"]),
        ("node1:node2", ["node1", "node2", "!node2"]),
        ("@some.retry", ["@some.retry", "!node2"]),
    ):
        (word,) = shlex.split(plan.without(limit, ["node2"]))
        assert split_host_pattern(word) == patterns


@pytest.mark.parametrize("given", [{"follow": True}, {"resume": True}])
def test_what_no_host_answers_or_one_answers_wrongly_is_told(given):
    dead = dict.fromkeys(("node1", "node2", "node3"), "gone")
    assert len(plan.run_unanswered(answers(**dead), words(**given))) == 3
    assert not plan.run_is_same({}, "first", {})
    broken = {**answers(node1="gone"), "node2": {"failed": True, "msg": "no Python"}}
    assert "node2: no answer: no Python" in plan.run_unanswered(broken, words(**given))


def test_what_ends_at_a_dead_host_ends_nothing_else_of_a_run(repository):
    """With any_errors_fatal, as in train.yml, a host that is unreachable ends the play also where that is ignored."""
    found = 0
    for name in ("plan", "collect", "samples"):
        pending = yaml.safe_load((repository / f"roles/trainer/tasks/{name}.yml").read_text())
        while pending:
            task = pending.pop()
            pending += task.get("block", [])
            included = task.get("ansible.builtin.include_tasks")
            for one in (task, (included or {}).get("apply", {}) if isinstance(included, dict) else {}):
                if one.get("ignore_unreachable"):
                    found += 1
                    assert one.get("any_errors_fatal") is False and not one.get("run_once"), task["name"]
    assert found == 8
    for name, file in (("collect", "rest.yml"), ("follow", "stop.yml")):
        tasks = yaml.safe_load((repository / f"roles/trainer/tasks/{name}.yml").read_text())
        includes = [
            one["ansible.builtin.include_tasks"] for one in tasks if "ansible.builtin.include_tasks" in one
        ]
        assert {"file": file, "apply": {"any_errors_fatal": False}} in includes


def test_a_trial_has_a_run_directory_of_its_own():
    """The hosts were asked of the run; what the trial wrote there, the run would go on from."""
    told = facts({}, {})
    for found in (
        plan.run_plan(told, "smoke-first", 29500),
        plan.run_alone(told, "smoke-first", 29500, True),
    ):
        assert {one["TRAINYARD_RUN_DIR"] for one in found.values()} == {"/var/lib/trainyard/runs/smoke-first"}
    assert (
        plan.run_plan(told, "first", 29500)["node1"]["TRAINYARD_RUN_DIR"] == "/var/lib/trainyard/runs/first"
    )
