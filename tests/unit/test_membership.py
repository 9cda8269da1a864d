"""Who takes part in a run's next attempt: the rules, and the stores that hold them."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from trainer import config, environment
from trainer.cluster import membership, store
from trainer.cluster.membership import LOST, STOPPED, End, Host, Plan, Wait
from trainer.commands import launch


def host(node, done=0, code=None, reason="", saved=0, ended=0.0):
    return Host(node, f"node{node}", f"10.0.0.{node}", 29500, 1, done, code, reason, ended, saved)


NOW = 2e9


def word(plan, hosts, *, expected=3, late=False, least=1, restarts=3, now=NOW):
    return membership.next_word(
        plan, hosts, expected=expected, late=late, least=least, restarts=restarts, now=now
    )


def plan(*nodes, attempt=1, **facts):
    return Plan(attempt, [host(node) for node in nodes], **facts)


def test_where_all_ranks_agreed_to_fail_the_host_that_is_named_is_at_fault():
    """A checkpoint that node2's disk refused: node1's ranks ended first, with the very same words."""
    said = "node2: /runs/a/checkpoints: the checkpoint cannot be saved: no space left"
    hosts = [host(node, done=1, code=1, reason=said, ended=float(node)) for node in (1, 2)]
    first = word(plan(1, 2, saved=5), [*hosts])
    assert first.suspect == "node2"
    hosts = [host(node, done=2, code=1, reason=said, ended=float(node)) for node in (1, 2)]
    second = word(first, hosts)
    assert (second.left_out, names(second)) == (["node2"], ["node1"])


def names(plan):
    return [member.name for member in plan.members]


def test_the_first_attempt_waits_for_all():
    assert word(None, [host(0), host(2)]) == Wait("2 of 3 hosts are ready: node0, node2")
    assert names(word(None, [host(2), host(0), host(1)])) == ["node0", "node1", "node2"]


def test_the_first_attempt_is_made_without_those_that_do_not_come():
    found = word(None, [host(0), host(2)], late=True, least=2)
    assert names(found) == ["node0", "node2"] and "alone" in found.reason
    assert isinstance(word(None, [host(0)], late=True, least=2), Wait)


def test_attempts_are_numbered_over_every_start_of_a_run():
    assert word(None, [host(0, done=4), host(1, done=6), host(2)]).attempt == 7


def test_nothing_is_decided_while_a_host_runs_its_ranks():
    assert word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, 1), host(2, 0)]) == Wait()


def test_a_host_that_is_gone_is_left_behind_and_a_returned_one_taken_in():
    lost = [host(0, 1, LOST, "lost a peer", saved=10), host(1, 1, LOST, "lost a peer", saved=10)]
    second = word(plan(0, 1, 2), lost)
    assert names(second) == ["node0", "node1"] and second.attempt == 2 and second.reason == "node2 is gone"
    assert second.blamed == {"node2": [NOW]} and second.saved == 10

    yielded = [host(0, 2, STOPPED, saved=15), host(1, 2, STOPPED), host(2, done=2)]
    third = word(second, yielded)
    assert names(third) == ["node0", "node1", "node2"] and third.failures == 0
    assert third.reason == "node2 takes part"


def test_the_head_for_good():
    found = word(plan(0, 1, 2), [host(1, 1, LOST), host(2, 1, LOST)])
    assert names(found) == ["node1", "node2"] and found.reason == "node0 is gone"


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_no_other_attempt_would_change_ends_the_run(code):
    hosts = [host(0, 1, code, "why"), host(1, 1, LOST, "lost a peer"), host(2, 1, code, "why")]
    assert word(plan(0, 1, 2), hosts) == End(code, "why")


def test_an_old_ending_counts_for_nothing():
    """What a host said of the attempt before."""
    hosts = [host(0, 2, LOST), host(1, 2, 1, "broken"), host(2, 2, LOST)]
    assert isinstance(word(plan(0, 1, attempt=2), [*hosts[:2], host(2, 1, 3)]), Plan)


def test_failures_without_progress_are_given_up_with_the_reason():
    current = plan(0, attempt=1)
    for attempt in (1, 2, 3):  # the first brought a checkpoint
        current = word(current, [host(0, attempt, 1, "the disk is full", saved=5)], restarts=3)
        assert current.attempt == attempt + 1
    end = word(current, [host(0, 4, 1, "the disk is full", saved=5)], restarts=3)
    assert end == End(
        1, "4 attempts in a row failed without a new checkpoint; the last one: the disk is full"
    )


def test_progress_forgives():
    current = plan(0, attempt=1)
    for attempt in range(1, 30):
        current = word(current, [host(0, attempt, -9, "killed", saved=attempt)], restarts=1)
        assert isinstance(current, Plan)


def test_no_restart_where_none_is_wanted():
    end = word(plan(0, 1), [host(0, 1, LOST, "lost"), host(1, 1, -9, "killed by SIGKILL")], restarts=0)
    assert end == End(1, "killed by SIGKILL")


def test_a_host_that_fails_again_and_again_is_left_out_by_name():
    def failed(attempt):
        return [
            host(0, attempt, LOST, "lost", ended=2),
            host(1, attempt, 4, "out of memory", ended=1),
            host(2, attempt, LOST),
        ]

    second = word(plan(0, 1, 2), failed(1))
    assert names(second) == ["node0", "node1", "node2"] and second.suspect == "node1"
    third = word(second, failed(2))
    assert names(third) == ["node0", "node2"] and third.left_out == ["node1"]
    assert "out of memory" in third.reason and "node1 failed again and again and is left out" in third.reason
    fourth = word(third, [host(0, 3, STOPPED), host(1, 2), host(2, 3, STOPPED)])
    assert names(fourth) == ["node0", "node2"]


@pytest.mark.parametrize(("between", "count"), [(600, 5), (1000, None)])
def test_a_host_that_fails_often_is_left_out_however_the_run_gets_on(between, count):
    """Every ten minutes, five times within the hour; or every quarter of an hour, for days."""
    current = plan(0, 1, 2)
    for attempt in range(1, 50):
        ended = [
            host(0, attempt, LOST, saved=attempt),
            host(1, attempt, -9, "killed"),
            host(2, attempt, LOST),
        ]
        current = word(current, ended, now=NOW + attempt * between)
        if current.left_out:
            assert (attempt, current.left_out) == (count, ["node1"])
            return
    assert count is None


def test_the_last_host_is_never_left_out():
    second = word(plan(0), [host(0, 1, 1, "x")], expected=1)
    third = word(second, [host(0, 2, 1, "x")], expected=1)
    assert names(third) == ["node0"] and third.left_out == []


def test_fewer_hosts_than_the_run_must_have():
    found = word(plan(0, 1, 2), [host(1, 1, LOST)], least=2)
    assert isinstance(found, Wait) and "node0, node2 are gone" in found.reason and "min_nodes" in found.reason


def test_all_launchers_started_anew_after_a_power_cut():
    back = "its launcher was started anew"
    found = word(plan(0, 1, 2), [host(node, 1, None, back, saved=20) for node in (0, 1, 2)])
    assert names(found) == ["node0", "node1", "node2"] and back in found.reason


def test_plans_survive_json():
    made = plan(0, 1, blamed={"node1": [NOW]}, left_out=["node2"], reason="x")
    assert membership.unpack_plan(json.loads(json.dumps(membership.pack(made)))) == made


# --- the stores ---


@pytest.fixture(params=["memory", "directory"])
def shared(request, tmp_path):
    """Two hosts' views of one store."""
    if request.param == "memory":
        one = store.connect("", "run")
        return one, one
    return store.connect(str(tmp_path / "s"), "run"), store.connect(str(tmp_path / "s"), "run")


def test_only_who_knows_the_newest_revision_changes_a_value(shared):
    one, other = shared
    assert one.put_if("plan", {"attempt": 1}, 0)
    assert not other.put_if("plan", {"attempt": 7}, 0)
    entry = other.read()["plan"]
    assert entry.value == {"attempt": 1}
    assert other.put_if("plan", {"attempt": 2}, entry.revision)
    assert not one.put_if("plan", {"attempt": 3}, entry.revision)
    assert one.read()["plan"].value == {"attempt": 2}


def test_of_many_at_once_one_wins(tmp_path):
    stores = [store.connect(str(tmp_path), "run") for _ in range(8)]
    won = []
    threads = [
        threading.Thread(target=lambda n=n, s=s: won.append(n) if s.put_if("plan", {"by": n}, 0) else None)
        for n, s in enumerate(stores)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(won) == 1 and stores[0].read()["plan"].value == {"by": won[0]}


def test_a_record_is_gone_when_its_lease_is(tmp_path, monkeypatch):
    one, other = (store.connect(str(tmp_path), "run") for _ in range(2))
    now = [1000.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    one.live("hosts/0", {"node": 0})
    other.live("hosts/1", {"node": 1})
    assert one.put_if("plan", {"attempt": 1}, 0)
    now[0] += store.LEASE - 1
    one.live("hosts/0", {"node": 0})
    now[0] += 2
    assert set(other.read()) == {"hosts/0", "plan"}
    one.leave("hosts/0")
    assert set(other.read()) == {"plan"}


def test_runs_do_not_see_each_other(tmp_path):
    one, other = store.connect(str(tmp_path), "a"), store.connect(str(tmp_path), "b")
    one.live("hosts/0", {"node": 0})
    assert other.read() == {}


@pytest.mark.parametrize("place", ["https://10.0.0.1:2379", "http://10.0.0.1", "somewhere"])
def test_a_place_that_is_none(place):
    with pytest.raises(store.BadInput, match="TRAINYARD_STORE"):
        store.connect(place, "run")


def test_records_hold_what_a_host_says():
    record = host(1, 3, -9, "killed", 40, 12.5)
    assert Host(**json.loads(json.dumps(membership.pack(record)))) == record
    assert dataclasses.replace(record, done=4).done == 4


def test_a_signal_in_the_middle_of_a_look_is_not_lost(monkeypatch, tmp_path):
    """One that comes just when the launcher has found no stop file; it would go on waiting for the others."""
    for name in ("TRAINYARD_STORE", "TRAINYARD_LAUNCH", "TRAINYARD_AFTER", "NNODES", "CLUSTER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINYARD_RUN_DIR", str(tmp_path))
    launcher = launch.Launcher(config.load(), environment.read("a"), [])
    there = Path.exists

    def exists(path):
        if path.name == "stop":
            launcher.ask_to_stop()
        return there(path)

    monkeypatch.setattr(Path, "exists", exists)
    assert launcher.look() is None
    assert launcher.asked
    assert launcher.look() == STOPPED
