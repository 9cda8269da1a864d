"""Who takes part in a run's next attempt: the rules, and the stores that hold them."""

import base64
import contextlib
import dataclasses
import errno
import gc
import http.server
import json
import random
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from trainer import config, environment, errors
from trainer.cluster import membership, store
from trainer.cluster.attempt import Work
from trainer.cluster.membership import LOST, STOPPED, End, Host, Plan, Wait
from trainer.commands import launch


def host(node, done=0, code=None, reason="", saved=0, ended=0.0, **facts):
    return Host(node, f"node{node}", f"10.0.0.{node}", 29500, 1, done, code, reason, ended, saved, **facts)


NOW = 2e9


def word(plan, hosts, *, expected=3, late=False, least=1, restarts=3, now=NOW, new=True):
    return membership.next_word(
        plan, hosts, expected=expected, late=late, least=least, restarts=restarts, now=now, new=new
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
    comes = [host(0, 1, LOST), host(1, 1, LOST), host(2, done=9)]  # which has been in another start of it
    assert word(plan(0, 1), comes).attempt == 10


def test_the_newest_checkpoint_that_any_host_knows_of_is_where_a_run_begins():
    assert word(None, [host(0, saved=10), host(1, saved=30), host(2)]).saved == 30


def test_nothing_is_decided_while_a_host_runs_its_ranks():
    assert word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, 1), host(2, 0)]) == Wait()


def test_a_host_that_is_gone_is_left_behind_and_a_returned_one_taken_in():
    lost = [host(0, 1, LOST, "lost a peer", saved=10), host(1, 1, LOST, "lost a peer", saved=10)]
    second = word(plan(0, 1, 2), lost)
    assert names(second) == ["node0", "node1"] and second.attempt == 2 and second.reason == "node2 is gone"
    assert second.blamed == {"node2": [NOW]} and second.saved == 10

    yielded = [host(0, 2, STOPPED, saved=15, stepped=True), host(1, 2, STOPPED), host(2, done=2)]
    third = word(second, yielded)
    assert names(third) == ["node0", "node1", "node2"] and third.failures == 0
    assert third.reason == "node2 takes part"


def test_where_one_fails_and_another_has_saved_and_ended_it_is_a_failure():
    ended = [host(0, 1, STOPPED), host(1, 1, 4, "out of memory"), host(2, 1, LOST)]
    found = word(plan(0, 1, 2), ended)
    assert (found.failures, found.suspect, found.reason) == (1, "node1", "node1: out of memory")


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_host_that_leaves_in_order_is_no_outage(restarts):
    """It shuts down: its ranks and the others' have saved and ended together, and it is gone when it is counted."""
    current = dataclasses.replace(plan(0, 1, 2), outages=2)
    for attempt in range(1, 12, 2):
        left = [host(node, attempt, STOPPED, saved=10, stepped=True) for node in (0, 1)]
        without = word(current, left, restarts=restarts)
        assert names(without) == ["node0", "node1"] and without.reason == "node2 is gone"
        assert not without.blamed and not without.left_out
        back = [host(0, attempt + 1, STOPPED, stepped=True), host(1, attempt + 1, STOPPED), host(2, attempt)]
        current = word(without, back, restarts=restarts)
        assert names(current) == ["node0", "node1", "node2"] and not current.blamed


def test_who_is_about_to_leave_takes_part_no_more():
    """Its record is there until the others' ranks have ended."""
    hosts = [host(node, 1, STOPPED, stepped=True, leaves=node == 2) for node in (0, 1, 2)]
    found = word(plan(0, 1, 2), hosts)
    assert names(found) == ["node0", "node1"] and found.reason == "node2 is gone" and not found.blamed
    assert isinstance(word(plan(0, 1, 2), [host(0), *hosts[1:]]), Wait)


def test_a_reason_that_no_rank_came_to_tell_is_told_with_the_next_and_once():
    """A host is back, or another is lost, before those that went on without the first have made a step."""
    second = plan(0, 1, attempt=2, reason="node2 is gone")
    yielded = [host(0, 2, STOPPED), host(1, 2, STOPPED), host(2, done=2)]
    third = word(second, yielded)
    assert third.reason == "node2 is gone; node2 takes part"
    again = word(third, [host(node, 3, LOST, "lost a peer") for node in (0, 1)])
    assert again.reason == "node2 is gone; node2 takes part"
    killed = [host(0, 2, -9, "node0: rank 0 was killed by SIGKILL"), host(1, 2, LOST, "lost a peer")]
    assert word(second, killed).reason == "node2 is gone; node0: rank 0 was killed by SIGKILL"
    stepped = [dataclasses.replace(one, stepped=True) for one in killed]
    assert word(second, stepped).reason == "node0: rank 0 was killed by SIGKILL"
    anew = [host(node, 2, None, "its launcher was started anew") for node in (0, 1)]
    assert "node2" not in word(second, anew).reason
    # Whoever knows is gone, and has told it there.
    assert word(second, [host(2, done=2)]).reason == "node0, node1 are gone; node2 takes part"


def test_the_head_for_good():
    found = word(plan(0, 1, 2), [host(1, 1, LOST), host(2, 1, LOST)])
    assert names(found) == ["node1", "node2"] and found.reason == "node0 is gone"


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_no_other_attempt_would_change_ends_the_run(code):
    hosts = [host(0, 1, code, "why"), host(1, 1, LOST, "lost a peer"), host(2, 1, code, "why")]
    assert word(plan(0, 1, 2), hosts) == End(code, "why")


def test_what_was_good_when_the_run_began_is_one_hosts_fault_later():
    """Somebody's process has the memory, a card is gone, a server of files is dead: no end for the others."""
    why = "node1: memory: a step needs about 900 MiB, 300 are free"
    first = word(None, [host(node, done=6) for node in (0, 1, 2)])
    assert word(first, [host(node, 7, 2, why) for node in (0, 1, 2)]) == End(2, why)
    second = word(first, [host(0, 7, LOST), host(1, 7, -9, "node1: killed"), host(2, 7, LOST)])
    third = word(second, [host(node, 8, 2, why, ended=node) for node in (0, 1, 2)])
    assert names(third) == ["node0", "node2"] and third.left_out == ["node1"] and third.first == 7
    # Of one host alone it is tried again, and then given up for what it is.
    current = word(None, [host(0)], expected=1)
    current = word(current, [host(0, 1, -9, "killed")], expected=1)
    for attempt in (2, 3):
        current = word(current, [host(0, attempt, 2, "no data")], expected=1)
    said = "4 attempts in a row failed without a new checkpoint; the last one: no data"
    assert word(current, [host(0, 4, 2, "no data")], expected=1) == End(2, said)


def test_what_fits_no_more_on_fewer_hosts_is_nobodys_fault():
    why = "node0: memory: a step needs about 900 MiB, 300 are free"
    current = word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, LOST)])
    for attempt in (2, 3, 4, 5):
        assert (names(current), current.left_out) == (["node0", "node1"], [])
        current = word(current, [host(node, attempt, 2, why) for node in (0, 1)])
    assert current.code == 2 and why in current.reason


def test_what_all_refuse_alike_ends_the_run_later_too():
    second = word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, -9, "killed"), host(2, 1, LOST)])
    why = "none of the run's checkpoints is valid"
    assert word(second, [host(node, 2, 2, why) for node in (0, 1, 2)]) == End(2, why)


def test_one_host_that_was_under_way_has_no_first_attempt_after_a_reboot():
    """Its store is its memory, and the plan is forgotten."""
    back = word(None, [host(0, done=4)], expected=1, new=False)
    assert isinstance(word(back, [host(0, 5, 2, "the card is gone")], expected=1), Plan)


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


def test_a_step_that_a_host_remembers_and_the_run_has_given_up_is_no_progress_made():
    """Two hosts begin at step 300, one of which knows of step 900 of a line that is left."""
    current = word(None, [host(0, saved=300), host(1, saved=900)], expected=2)
    for attempt in range(1, 30):
        step = 300 + 20 * attempt
        ended = [host(0, attempt, -9, "killed", saved=step), host(1, attempt, LOST, saved=step)]
        current = word(current, ended, expected=2, restarts=1, now=NOW + 4000 * attempt)
        assert isinstance(current, Plan) and not current.left_out


def test_a_fault_of_a_clock_that_was_ahead_is_not_held_for_hours():
    ended = [host(0, 1, LOST), host(1, 1, -9, "killed")]
    found = word(plan(0, 1, blamed={"node1": [NOW + 7200, NOW - 60]}), ended)
    assert found.blamed["node1"] == [NOW - 60, NOW]


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


def test_a_host_without_which_the_run_could_not_go_on_is_not_left_out():
    """It would wait for ever for a host that takes part no more; so its faults are the run's."""
    current = plan(0, 1, saved=5)
    for attempt in (1, 2, 3):
        ended = [host(0, attempt, LOST, saved=5), host(1, attempt, 4, "out of memory")]
        current = word(current, ended, expected=2, least=2)
        assert (names(current), current.left_out) == (["node0", "node1"], [])
    ended = [host(0, 4, LOST, saved=5), host(1, 4, 4, "out of memory")]
    end = word(current, ended, expected=2, least=2)
    assert end.code == 4 and "4 attempts in a row failed" in end.reason and "out of memory" in end.reason


def test_no_more_are_left_out_than_the_run_can_do_without():
    """One of four may be missing, and is."""
    current = plan(0, 1, 2, left_out=["node3"], suspect="node2")
    ended = [host(0, 1, LOST), host(1, 1, LOST), host(2, 1, 4, "out of memory")]
    found = word(current, ended, expected=4, least=3)
    assert (names(found), found.left_out, found.failures) == (["node0", "node1", "node2"], ["node3"], 1)
    assert word(current, ended, expected=4, least=2).left_out == ["node3", "node2"]


def test_a_host_is_left_out_while_those_that_are_away_would_do():
    """node2 may come back: then the run has its two hosts again."""
    second = word(plan(0, 1), [host(0, 1, LOST), host(1, 1, 4)], least=2)
    assert isinstance(word(second, [host(0, 2, LOST), host(1, 2, 4)], least=2), Wait)
    third = word(second, [host(0, 2, LOST), host(1, 2, 4), host(2, 2)], least=2)
    assert (names(third), third.left_out) == (["node0", "node2"], ["node1"])


def crash_loop(count, at_fault):
    """Attempts until the run is given up, its end, and who was left out; at_fault(plan): the node that fails."""
    current = word(None, [host(node) for node in range(count)], expected=count)
    for attempt in range(1, 100):
        ended = [
            host(one.node, attempt, 1 if one.node == at_fault(current) else LOST, "IndexError in step 5")
            for one in current.members
        ]
        found = word(current, ended, expected=count, now=NOW + 30 * attempt)
        if isinstance(found, End):
            return attempt, found, current.left_out
        current = found
    raise AssertionError(f"still no end: {current}")


@pytest.mark.parametrize(("count", "attempts"), [(1, 4), (2, 6), (3, 5), (16, 5), (64, 5)])
def test_a_fault_that_all_hosts_share_ends_the_run_soon(count, attempts):
    """Each host whose turn it is to be the first falls over the same batch."""
    found, end, left_out = crash_loop(count, lambda plan: plan.members[0].node)
    assert (found, end.code, len(left_out)) == (attempts, 1, min(count - 1, 2))
    assert "IndexError in step 5" in end.reason and "without a new checkpoint" in end.reason
    assert ("3 hosts failed one after the other" in end.reason) == (count > 2)


def test_bad_hosts_do_not_end_a_run_that_gets_on():
    """Four of eight: left out one after the other, each after a new checkpoint."""
    current = plan(*range(8))
    for attempt in range(1, 9):
        bad, saved = current.members[0].node, (attempt + 1) // 2 * 10
        ended = [
            host(one.node, attempt, 1 if one.node == bad else LOST, "x", saved) for one in current.members
        ]
        current = word(current, ended, expected=8, now=NOW + 3600 * attempt)
    assert len(current.left_out) >= 3 and isinstance(current, Plan)


def test_a_power_cut_after_two_bad_hosts_is_no_fault_that_they_share():
    current = plan(*range(2, 6), left_out=["node0", "node1"], dropped=2)
    found = word(current, [host(node, 1, LOST) for node in (2, 3, 4)], expected=6)
    assert names(found) == ["node2", "node3", "node4"] and found.reason == "node5 is gone"


def test_fewer_hosts_than_the_run_must_have():
    found = word(plan(0, 1, 2), [host(1, 1, LOST)], least=2)
    assert isinstance(found, Wait) and "node0, node2 are gone" in found.reason and "min_nodes" in found.reason


def test_all_launchers_started_anew_after_a_power_cut():
    back = "its launcher was started anew"
    found = word(plan(0, 1, 2), [host(node, 1, None, back, saved=20) for node in (0, 1, 2)])
    assert names(found) == ["node0", "node1", "node2"] and back in found.reason


def test_hosts_that_all_booted_anew_give_the_others_time_to_say_what_became_of_the_run():
    """Of two the head, which alone has the store: a stop on the other one is told there, but not at once."""
    back = [host(0, 1, None, "its launcher was started anew")]
    waits = word(plan(0, 1), back, expected=2)
    assert waits == Wait("node0 started anew, and node1 may know what became of the run meanwhile")
    assert names(word(plan(0, 1), back, expected=2, late=True)) == ["node0"]
    # Where one has been there all along, it knows; and who trained alone has nobody to hear from.
    assert names(word(plan(0, 1, 2), [*back, host(2, 1, LOST)])) == ["node0", "node2"]
    assert names(word(plan(0), back, expected=2)) == ["node0"]


# --- power and network ---


def failing(current, at_end, *, expected, least=1, restarts=3, attempts=20):
    """Attempts one after the other, each of which ends as at_end(plan) says; until the End, a Wait, or so many."""
    for _ in range(attempts):
        found = word(current, at_end(current), expected=expected, least=least, restarts=restarts)
        if not isinstance(found, Plan):
            return found
        current = found
    return current


def lost(reason="the hosts did not meet", silent=None):
    """How attempts end in which all lose each other, until none is among them whom another one does not reach.

    silent: node -> the nodes that do not answer it.
    """

    def at_end(current):
        at, nodes = current.attempt, [one.node for one in current.members]
        apart = [(node, other) for node in nodes for other in (silent or {}).get(node, ()) if other in nodes]
        if (silent is not None and not apart) or len(nodes) == 1:
            return [host(node, at, -9, "the ranks meet") for node in nodes]
        return [
            host(node, at, LOST, reason, unreached=[other for one, other in apart if one == node])
            for node in nodes
        ]

    return at_end


def test_who_has_come_since_the_newest_checkpoint_is_left_out_where_all_lose_each_other():
    """node2 is back, and etcd's port works; those of its ranks do not, or large packets get lost."""
    second = word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, LOST)])
    third = word(second, [host(0, 2, STOPPED, saved=15), host(1, 2, STOPPED), host(2, 2)])
    assert names(third) == ["node0", "node1", "node2"]
    ended = [host(node, 3, LOST, "the hosts did not meet", saved=15) for node in (0, 1, 2)]
    fourth = word(third, ended)
    assert (names(fourth), fourth.left_out) == (["node0", "node1", "node2"], [])  # a switch may have booted
    ended = [host(node, 4, LOST, "the hosts did not meet", saved=15) for node in (0, 1, 2)]
    fifth = word(fourth, ended)
    assert (names(fifth), fifth.left_out, fifth.failures) == (["node0", "node1"], ["node2"], 0)
    assert "with node2 the hosts lost each other again and again, and it is left out" in fifth.reason


def test_a_checkpoint_between_two_losses_forgives():
    current = plan(0, 1, 2, proven=["node0", "node1"])
    for attempt in range(1, 9):
        ended = [host(node, attempt, LOST, saved=attempt) for node in (0, 1, 2)]
        current = word(current, ended)
        assert names(current) == ["node0", "node1", "node2"]


@pytest.mark.parametrize(
    ("nodes", "silent", "proven", "stay"),
    [
        (3, {1: [2], 2: [1]}, "", [0, 1]),  # one link; both reach the head
        (3, {0: [1]}, "", [0, 2]),  # one direction of it
        (3, {0: [2], 1: [2], 2: [0, 1]}, "012", [0, 1]),  # a firewall
        (5, {0: [1, 2, 3, 4]}, "01234", [1, 2, 3, 4]),
        (5, {node: [3, 4] for node in (0, 1, 2)}, "012", [0, 1, 2]),  # two came back behind a bad switch
        (5, {node: [3, 4] for node in (0, 1, 2)}, "34", [3, 4]),  # who came is more, and has no checkpoint
        (2, {0: [1], 1: [0]}, "", [0]),
    ],
)
def test_the_fewest_are_left_out_without_whom_the_others_reach_each_other(nodes, silent, proven, stay):
    """At once, the second time: each attempt costs `timeout_seconds`."""
    first = plan(*range(nodes), proven=[f"node{node}" for node in proven])
    second = word(first, lost(silent=silent)(first), expected=nodes)
    assert (len(second.members), second.left_out) == (nodes, [])
    third = word(second, lost(silent=silent)(second), expected=nodes)
    assert names(third) == [f"node{node}" for node in stay]
    assert "does not reach" in third.reason


def test_a_thousand_hosts_that_a_switch_cuts_in_halves_are_told_in_one_word_and_at_once():
    """etcd takes 1.5 MB at once, and a decider's lease is 10 s: it renews that between its looks."""
    hosts = list(range(1000))
    current = plan(*hosts, proven=[f"node{node}" for node in hosts])

    def ended(attempt):
        others = [hosts[500:], hosts[:500]]
        return [host(one, attempt, LOST, 200 * "x", unreached=others[one // 500]) for one in hosts]

    second = word(current, ended(1), expected=1000)
    assert len(membership.pack(second)) < 1 << 20
    apart = ended(2)
    begin = time.process_time()
    third = word(second, apart, expected=1000)
    assert names(third) == [f"node{node}" for node in range(500)]
    assert time.process_time() - begin < 5  # a second or less, and minutes where each pair is counted anew


def test_none_is_left_out_for_the_network_without_whom_the_run_must_not_go_on():
    end = failing(plan(0, 1, 2), lost(silent={1: [2]}), expected=3, least=3)
    assert end.code == LOST and "4 attempts in a row failed" in end.reason
    assert "node1 does not reach node2" in end.reason


def test_who_is_named_most_is_left_out_where_nothing_else_tells_and_only_so_often():
    """All of them answer each other, and none has come lately."""
    said = "lost a peer: rank 0 on node0: Connection closed by peer (that is node1)"
    third = failing(plan(0, 1, 2), lost(said), expected=3, attempts=2)
    assert (names(third), third.left_out, third.dropped) == (["node0", "node2"], ["node1"], 1)

    def each_names_the_last(current):
        said = f"lost a peer (that is {current.members[-1].name})"
        return [host(one.node, current.attempt, LOST, said) for one in current.members]

    end = failing(plan(*range(8)), each_names_the_last, expected=8)
    assert isinstance(end, End) and "4 attempts in a row" in end.reason
    assert failing(plan(*range(8)), each_names_the_last, expected=8, attempts=6).left_out == [
        "node7",
        "node6",
    ]
    # Of two that are named as often it is the last: the first ones have the copies of checkpoints.
    names_other = {0: "(that is node1)", 1: "(that is node0)", 2: ""}
    twice = lambda current: [host(n, current.attempt, LOST, said) for n, said in names_other.items()]  # noqa: E731
    assert failing(plan(0, 1, 2), twice, expected=3, attempts=2).left_out == ["node1"]
    # Where they name nobody it is none of them.
    assert failing(plan(0, 1, 2), lost(), expected=3, attempts=3).left_out == []


def boots(attempt, *nodes):
    return [host(node, attempt, None, "its launcher was started anew", ended=node) for node in nodes]


@pytest.mark.parametrize(
    "up", [(0, 1, 2), (0,), (2,), (0, 2)], ids=["all at once", "one is first", "the last is first", "two are"]
)
def test_power_cuts_of_the_cupboard_are_no_hosts_fault_and_not_the_runs(up):
    """Five flickers between two checkpoints, whoever boots first each time."""
    current = plan(0, 1, 2, saved=10)
    for _ in range(5):
        current = word(current, boots(current.attempt, *up), late=True)
        current = dataclasses.replace(current, members=[host(node) for node in (0, 1, 2)])
        assert (current.left_out, current.blamed, current.failures) == ([], {}, 0)
    assert current.outages == 5


def test_a_machine_that_boots_by_itself_again_and_again_is_left_out():
    """Its power supply does not bear the load. Twice is nothing: somebody pulled the plug, and put it back."""

    def at_end(current):
        return [host(0, current.attempt, LOST), host(1, current.attempt, LOST), *boots(current.attempt, 2)]

    assert failing(plan(0, 1, 2), at_end, expected=3, attempts=4).left_out == []
    last = failing(plan(0, 1, 2), at_end, expected=3, attempts=5)
    assert (names(last), last.left_out, last.dropped) == (["node0", "node1"], ["node2"], 0)


def test_a_host_that_fails_and_then_loses_its_power_has_not_failed_twice():
    """Two things that happened to it, within seconds."""
    second = word(plan(0, 1, 2), [host(0, 1, LOST), host(1, 1, LOST), host(2, 1, 1, "killed", ended=1)])
    third = word(second, [host(0, 2, LOST), host(1, 2, LOST)])
    assert (third.left_out, names(third)) == ([], ["node0", "node1"])
    fourth = word(third, [host(0, 3, STOPPED), host(1, 3, STOPPED), host(2, 2)])
    assert names(fourth) == ["node0", "node1", "node2"]


def test_a_host_that_fails_while_another_loses_its_power_has_failed():
    """A run that fails each time is given up, whatever else is cut; and who booted first is at fault."""
    fails = host(1, 1, 4, "out of memory", ended=5)
    found = word(plan(0, 1, 2), [host(0, 1, LOST), fails])  # node2 is gone
    assert (found.failures, found.outages, list(found.blamed)) == (1, 0, ["node1"])
    found = word(plan(0, 1, 2), [host(0, 1, LOST), fails, host(2, 1, None, "started anew", ended=1)])
    assert list(found.blamed) == ["node2"]


def test_hosts_that_are_gone_are_no_fault_of_the_network_between_the_others():
    """A switch takes two of four with it, twice: the other two, which lost them, are not kept apart."""
    current = plan(0, 1, 2, 3)
    for attempt in (1, 2):
        current = word(current, [host(node, attempt, LOST, "(that is node1)") for node in (0, 1)], expected=4)
        assert (names(current), current.suspect, current.left_out) == (["node0", "node1"], "", [])
        current = dataclasses.replace(current, members=[host(node) for node in range(4)])


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_cuts_of_power_in_a_row_end_the_run_in_the_end(restarts):
    """The run itself may be what trips the fuse."""
    allowed = 10 * restarts
    at_end = lambda current: boots(current.attempt, 0, 1)  # noqa: E731
    last = failing(plan(0, 1), at_end, expected=2, restarts=restarts, attempts=allowed)
    assert isinstance(last, Plan) and last.outages == allowed
    end = word(last, at_end(last), expected=2, restarts=restarts)
    assert isinstance(end, End) and end.code == 1
    assert (f"power or network was cut {allowed + 1} times in a row" in end.reason) == (restarts > 0)


def test_cuts_of_power_between_checkpoints_never_end_the_run():
    current = plan(0, 1)
    for attempt in range(1, 99):
        ended = [dataclasses.replace(one, saved=attempt) for one in boots(attempt, 0, 1)]
        current = word(current, ended, expected=2, restarts=1)
        assert names(current) == ["node0", "node1"]


def cut_off(attempt, *nodes):
    return [host(node, attempt, LOST, f"node{node} was cut off", cut_off=True) for node in nodes]


def test_a_switch_that_reboots_between_two_checkpoints_is_no_fault_of_the_run():
    """Also where some are back, and decide, before the others are."""
    current = plan(0, 1, 2)
    for up in ((0, 1, 2), (0, 1), (0, 2), (0, 1, 2), (1, 2), (0, 1, 2), (0, 1, 2)):
        current = word(current, cut_off(current.attempt, *up))
        current = dataclasses.replace(current, members=[host(node) for node in (0, 1, 2)])
        assert (current.left_out, current.blamed, current.failures) == ([], {}, 0)


def test_a_wire_that_is_out_for_seconds_twice_leaves_no_host_out_and_one_that_always_is_does():
    def at_end(current):
        at = current.attempt
        return [host(0, at, LOST, "node1 is gone"), *cut_off(at, 1), host(2, at, LOST, "node1 is gone")]

    assert names(failing(plan(0, 1, 2), at_end, expected=3, attempts=4)) == ["node0", "node1", "node2"]
    assert names(failing(plan(0, 1, 2), at_end, expected=3, attempts=5)) == ["node0", "node2"]


def test_who_boots_and_had_the_store_is_at_fault_and_not_who_was_cut_off_from_it():
    current = word(plan(0, 1), [*boots(1, 0), *cut_off(1, 1)], expected=2)
    assert (current.suspect, list(current.blamed)) == ("", ["node0"])


def test_all_that_were_struck_are_named():
    """A wire that is out takes etcd's leader from the others, who are cut off until there is another."""
    said = [
        host(0, 1, LOST, "lost a peer", ended=1),
        host(1, 1, LOST, "node1 was cut off: etcd does not answer", ended=3, cut_off=True),
        host(2, 1, LOST, "node2 was cut off: etcd does not answer", ended=2, cut_off=True),
    ]
    assert word(plan(0, 1, 2), said).reason == "node1, node2 were cut off: etcd does not answer"
    gone = "node2 is gone; node1 was cut off: etcd does not answer"
    assert word(plan(0, 1, 2), said[:2]).reason == gone
    assert word(plan(0, 1, 2), [said[0], said[1], host(2, 1, LOST)]).reason == said[1].reason


def test_hosts_that_die_one_after_the_other_do_not_end_a_run_that_others_go_on_with():
    current = plan(*range(8))
    for dead in range(6):
        rest = [host(node, current.attempt, LOST) for node in range(dead + 1, 8)]
        current = word(current, rest, expected=8)
    assert names(current) == ["node6", "node7"]


def test_when_all_of_an_attempt_are_gone_others_go_on():
    """Two at once, each time: and in the end that is said, too."""
    found = word(plan(0, 1), [host(2, 0)])
    assert names(found) == ["node2"] and "node0, node1 are gone" in found.reason
    end = word(plan(0, 1), [host(2, 0)], restarts=0)
    assert end == End(LOST, "node0, node1 fell silent and did not come back")


# --- hosts that were left out, while others die ---


def test_who_was_left_out_takes_part_again_where_the_run_would_have_too_few_hosts():
    current = plan(2, 3, left_out=["node1"], blamed={"node1": [NOW - 60, NOW - 30]})
    found = word(current, [host(1, 1), host(2, 1, LOST)], least=2)
    assert (names(found), found.left_out) == (["node1", "node2"], [])
    assert found.blamed["node1"] == [NOW - 60, NOW - 30] and "node1 takes part" in found.reason


def test_the_only_host_that_lives_was_left_out():
    found = word(plan(0, 2, left_out=["node1"]), [host(1, 1)])
    assert (names(found), found.left_out) == (["node1"], [])


def test_who_was_left_out_stays_so_where_the_others_are_enough():
    found = word(
        plan(0, 2, 3, left_out=["node1"]), [host(0, 1, LOST), host(1, 1), host(2, 1, LOST)], expected=4
    )
    assert (names(found), found.left_out) == (["node0", "node2"], ["node1"])


def test_who_takes_part_again_and_fails_again_is_waited_without():
    """Rather than that its faults end the run: node3 may come back."""

    def at_end(current):
        at = current.attempt
        return [host(1, at, 4, "out of memory"), host(2, at, LOST)]

    again = word(plan(2, 3, left_out=["node1"]), [host(1, 1), host(2, 1, LOST)], least=2)
    wait = failing(again, at_end, expected=3, least=2)
    assert isinstance(wait, Wait) and "node1 failed again and again and is left out" in wait.reason
    assert "1 of the 2 hosts" in wait.reason
    second = word(again, at_end(again), least=2)
    third = word(second, [*at_end(second), host(3, 0)], least=2)
    assert (names(third), third.left_out) == (["node2", "node3"], ["node1"])


# --- a store that has forgotten the run ---


@pytest.mark.parametrize(
    ("nodes", "expected", "new", "begins"),
    [
        ([2], 3, False, False),
        ([1, 2], 3, False, True),
        ([0, 3], 4, False, False),
        ([0, 1, 3], 4, False, True),
        ([0], 2, False, True),  # its etcd is the store: nobody has gone on without it
        ([1], 2, False, False),
        ([0], 1, False, True),
        ([2], 3, True, True),  # a first start, by min_nodes
    ],
)
def test_a_run_that_was_under_way_is_begun_again_by_a_majority_alone(nodes, expected, new, begins):
    """Its etcd's members changed while a host was off, and the others ended it, or train it elsewhere."""
    hosts = [host(node, done=3, saved=40) for node in nodes]
    found = word(None, hosts, expected=expected, late=True, new=new)
    assert isinstance(found, Plan) == begins
    if not begins:
        assert f"{len(nodes)} of {expected} hosts are ready" in found.reason
        assert f"fewer than {expected // 2 + 1} do not begin it again" in found.reason
        assert "playbooks/stop.yml" in found.reason


def test_more_hosts_than_the_run_has_are_not_waited_for():
    first = word(None, [host(0), host(1)], expected=2, least=3)
    assert isinstance(first, Plan)
    failed = [host(0, done=1, code=1), host(1, done=1, code=1)]
    assert isinstance(word(first, failed, expected=2, least=3), Plan)


def test_a_run_that_was_under_way_needs_its_least_hosts_too():
    assert isinstance(word(None, [host(0), host(1)], late=True, least=3, new=False), Wait)


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


def test_a_directory_on_a_full_disk_still_has_its_say(tmp_path, monkeypatch):
    def full(self, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    one = store.connect(str(tmp_path), "run")
    one.live("hosts/0", {"name": "a much longer name than the next"})
    monkeypatch.setattr(store.Path, "write_text", full)
    one.live("hosts/0", {"name": "short"})
    assert one.read()["hosts/0"].value == {"name": "short"}


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


class Etcd:
    """An etcd of one process and several members, as far as launchers ask it; `mute` ones take what comes, silently.

    renewed: when it last renewed a lease (time.monotonic).
    """

    def __init__(self, members):
        self.mute, self.renewed, self.sent = set(), 0.0, 0
        self.begin_anew("14841639068965178418")
        self.servers = []
        for number in range(members):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler(number))
            server.handle_error = lambda *_: None  # who asked has gone
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            self.servers.append(server)
        self.place = ",".join(f"http://127.0.0.1:{one.server_address[1]}" for one in self.servers)

    def begin_anew(self, cluster):
        self.cluster, self.keys, self.revision = cluster, {}, 1

    def handler(self, number):
        etcd = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.say({"etcdserver": "3.5.0"})

            def do_POST(self):
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.say(etcd.answer(self.path.partition("/v3/")[2], told) if number not in etcd.mute else {})

            def say(self, message):
                while number in etcd.mute:
                    time.sleep(0.05)
                body = json.dumps(message).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler

    def answer(self, path, told):
        if path == "kv/range":
            least = int(told.get("min_mod_revision", 0))
            kvs = [
                {"key": key, "value": value, "mod_revision": str(revision)}
                for key, (value, revision) in self.keys.items()
                if revision >= least
            ]
            self.sent += len(kvs)
            header = {"cluster_id": self.cluster, "revision": str(self.revision)}
            return {"header": header, "count": str(len(self.keys)), **({"kvs": kvs} if kvs else {})}
        if path == "kv/deleterange":
            self.revision += self.keys.pop(told["key"], None) is not None
            return {}
        if path == "lease/keepalive":
            self.renewed = time.monotonic()
            return {"result": {"TTL": str(store.LEASE)[0]}}
        if path == "lease/grant":
            self.renewed = time.monotonic()
            return {"ID": "7"}
        put = told if path == "kv/put" else told["success"][0]["request_put"]
        self.revision += 1
        self.keys[put["key"]] = put["value"], self.revision
        return {"succeeded": True}

    def close(self):
        self.mute.clear()
        for server in self.servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def etcd(monkeypatch):
    """Three members, and all times of the store a quarter of what they are."""
    for name in ("LEASE", "OUT_OF_TOUCH", "ANSWER", "PATIENCE", "HASTE"):
        monkeypatch.setattr(store, name, getattr(store, name) / 4)
    made = Etcd(3)
    yield made
    made.close()


@pytest.fixture
def starved():
    """Seconds that this process was kept waiting for a processor so far; they are nobody's fault here."""
    lost, over = [0.0], threading.Event()

    def watch():
        while not over.is_set():
            begin = time.monotonic()
            time.sleep(0.02)
            lost[0] += time.monotonic() - begin - 0.02

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield lost
    over.set()
    thread.join()


def test_however_many_members_are_mute_an_answer_is_waited_for_once(etcd, starved):
    one = store.connect(etcd.place, "run")
    until_answered(lambda: one.live("hosts/0", {"node": 0}))
    etcd.mute |= {0, 1, 2}
    one.renewed = 0.0  # long ago
    begin, before = time.monotonic(), starved[0]
    with pytest.raises(store.Unreachable, match="does not answer"):
        one.read()
    assert time.monotonic() - begin < 1.5 * store.ANSWER + 4 * (starved[0] - before)
    etcd.mute -= {0, 1, 2}
    assert set(until_answered(one.read)) == {"hosts/0"}


def until_answered(ask):
    """The answer; on a busy machine the first one may be late, and where members are mute, one may not be asked yet."""
    for _ in range(9):
        with contextlib.suppress(store.Unreachable):
            return ask()
    raise AssertionError("no answer")


def test_what_has_changed_is_all_that_is_sent(etcd):
    one = store.connect(etcd.place, "run")
    for node in range(30):
        etcd.answer("kv/put", kept(f"hosts/{node}", {"node": node}))
    assert len(until_answered(one.read)) == 30 and etcd.sent >= 30
    etcd.sent = 0
    assert len(until_answered(one.read)) == 30 and etcd.sent == 0
    etcd.answer("kv/put", kept("hosts/7", {"node": 7, "done": 1}))
    found = until_answered(one.read)
    assert etcd.sent == 1 and len(found) == 30 and found["hosts/7"].value == {"node": 7, "done": 1}
    found.clear()  # which is the caller's own
    assert len(until_answered(one.read)) == 30


def test_members_whose_disks_have_lost_what_they_said_are_read_anew(etcd):
    one = store.connect(etcd.place, "run")
    for turn in range(30):
        etcd.answer("kv/put", kept(f"hosts/{turn % 3}", {"turn": turn}))
    assert len(until_answered(one.read)) == 3
    etcd.begin_anew(etcd.cluster)
    for node in range(3):
        etcd.answer("kv/put", kept(f"hosts/{node}", {"turn": "new"}))
    assert [one.value for one in until_answered(one.read).values()] == [{"turn": "new"}] * 3


def kept(key, value):
    return {"key": store._packed(f"/trainyard/run/{key}"), "value": store._packed(json.dumps(value))}


def test_whatever_happens_there_a_look_sees_all_there_is(etcd):
    """Also where as many keys have gone as are new, and where members begin anew and come to as many keys."""
    chance = random.Random(1)
    one = store.connect(etcd.place, "run")
    for turn in range(300):
        for _ in range(chance.randrange(4)):
            key = f"hosts/{chance.randrange(6)}"
            what = chance.randrange(12)
            if what == 0:
                etcd.begin_anew(str(turn))
            if what < 5:
                etcd.answer("kv/deleterange", kept(key, {}))
            else:
                etcd.answer("kv/put", kept(key, {"turn": turn}))
        found = {
            store._packed(f"/trainyard/run/{key}"): entry for key, entry in until_answered(one.read).items()
        }
        there = {
            key: (json.loads(base64.b64decode(value)), revision)
            for key, (value, revision) in etcd.keys.items()
        }
        assert {key: (entry.value, entry.revision) for key, entry in found.items()} == there


def test_who_is_no_member_asks_another_one_than_the_next():
    members = [(f"10.0.0.{number}", 2389) for number in range(1, 6)]
    place = ",".join(f"http://{address}:{port}" for address, port in members)
    hosts = [store.connect(place, "run", f"10.0.0.{number}").members for number in range(1, 106)]
    assert all(sorted(asked) == members for asked in hosts)
    assert [asked[0] for asked in hosts[:5]] == members
    counts = [sum(asked[0] == member for asked in hosts[5:]) for member in members]
    assert min(counts) > 5 and max(counts) < 40  # of 100


def test_one_member_of_three_that_answers_will_do(etcd):
    one = store.connect(etcd.place, "run")
    until_answered(lambda: one.live("hosts/0", {"node": 0}))
    for alive in range(3):
        etcd.mute = {0, 1, 2} - {alive}
        assert set(until_answered(one.read)) == {"hosts/0"}


def test_who_loses_the_store_ends_its_ranks_before_its_lease_runs_out(etcd, monkeypatch, tmp_path, starved):
    """As by a cut network, all members fall silent at once, and take what they are sent. No two halves train a run."""
    killed = []

    class Ranks:
        def __init__(self, plan, *_):
            self.plan, self.begin, self.has_started = plan, time.monotonic(), True

        def stopped(self):
            return False

        def is_renewed(self, at):
            """Nothing to end without its launcher."""

        def poll(self, meanwhile=None):
            return None

        def work(self):
            return Work(time.process_time(), False, None, False)

        def kill(self, meanwhile=None):
            killed.append(time.monotonic())
            return ""

    monkeypatch.setattr(launch, "Attempt", Ranks)
    monkeypatch.setattr(launch, "LOOK", launch.LOOK / 4)
    for name, value in {"STORE": etcd.place, "LAUNCH": "now", "AFTER": "", "RUN_DIR": tmp_path}.items():
        monkeypatch.setenv(f"TRAINYARD_{name}", str(value))
    monkeypatch.setenv("CLUSTER_ADDRESS", "")
    monkeypatch.setenv("NNODES", "")
    launcher = launch.Launcher(config.load(), environment.read("run"), [])
    end = time.monotonic() + 1.5
    while time.monotonic() < end or not launcher.attempt or time.monotonic() - etcd.renewed > store.LEASE / 4:
        launcher.turn()
        time.sleep(launch.LOOK)
    etcd.mute |= {0, 1, 2}
    last, before = etcd.renewed, starved[0]
    killed.clear()
    while not killed:
        launcher.turn()
        time.sleep(launch.LOOK)
    assert killed[0] - last < 0.9 * store.LEASE + 4 * (starved[0] - before)
    assert launcher.me.code == LOST and "was cut off" in launcher.me.reason and launcher.me.cut_off


def test_a_directory_that_is_gone_does_not_answer(tmp_path):
    one = store.connect(str(tmp_path / "s"), "run")
    one.live("hosts/0", {"node": 0})
    shutil.rmtree(tmp_path / "s")
    for ask in (one.read, lambda: one.live("hosts/0", {}), lambda: one.put_if("plan", {}, 0)):
        with pytest.raises(store.Unreachable, match=r"run\.json"):
            ask()


@pytest.mark.parametrize("place", ["https://10.0.0.1:2379", "http://10.0.0.1", "somewhere"])
def test_a_place_that_is_none(place):
    with pytest.raises(store.BadInput, match="TRAINYARD_STORE"):
        store.connect(place, "run")


def test_records_hold_what_a_host_says():
    record = host(1, 3, -9, "killed", 40, 12.5, cut_off=True, unreached=[2])
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


# ---- the port ----


@pytest.fixture
def wanted(monkeypatch):
    """A port that is free, and asked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(wanted))
    return wanted


def test_two_runs_side_by_side_never_have_one_port(wanted):
    """Also while nobody listens there: they look long before their ranks meet, and again after each attempt."""
    first, second = launch.Port("127.0.0.1"), launch.Port("127.0.0.1")
    assert first.choose() == wanted
    assert second.choose() > wanted
    mine = second.number
    assert (first.choose(), second.choose()) == (wanted, mine)
    with socket.create_server(("127.0.0.1", wanted)):  # its ranks meet there
        assert launch.Port("127.0.0.1").choose() not in (wanted, mine)
    del first
    gc.collect()
    assert launch.Port("127.0.0.1").choose() == wanted  # it goes with its process


def test_a_port_that_a_stranger_took_between_two_attempts_is_given_up(wanted):
    port = launch.Port("127.0.0.1")
    assert port.choose() == wanted
    with socket.create_server(("127.0.0.1", wanted)):
        assert port.choose() > wanted
    mine = port.number
    assert port.choose() == mine
    assert launch.Port("127.0.0.1").choose() == wanted


def test_launchers_that_look_at_once_find_different_ports(wanted):
    found = []
    ports = [launch.Port("127.0.0.1") for _ in range(8)]
    threads = [threading.Thread(target=lambda port=port: found.append(port.choose())) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8


def test_an_address_that_is_not_there_is_said(wanted):
    with pytest.raises(errors.BadInput, match="is no address of this host"):
        launch.Port("192.0.2.7").choose()
