"""What happens to machines in a cupboard: the run goes on by itself, and its losses are those of one that nothing met.

Each test does something to a run without an end, waits until it has gone on, stops it, and holds its losses against
those of one process.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import ranks
from processes import kill_all
from test_launch import rank_pids

from trainer import cli
from trainer.cluster import store

pytestmark = pytest.mark.distributed

# The curve of a run with a constant rate does not depend on where it ends.
ENDLESS = ("steps=100000", "lr_schedule=constant", "lr=0.001", "checkpoint_every=5")
COMPARED = 300  # steps


@pytest.fixture(scope="module")
def curve(material, tmp_path_factory):
    """The losses of one process."""
    return ranks.run(
        tmp_path_factory.mktemp("curve"), 1, material / "run.yaml", *ENDLESS[1:3], f"steps={COMPARED}"
    )


@pytest.fixture
def launch(material, tmp_path):
    """Starts a run on some nodes of one rank each; ends whatever is left of it."""
    started = []

    def start(count, *overrides, environment=None):
        words = (*ENDLESS, *overrides)
        started.append(
            ranks.Launch(tmp_path, [1] * count, material / "run.yaml", *words, **environment or {})
        )
        return started[0]

    yield start
    for node in started[0].nodes:
        kill_all(node)
        node.communicate()


def wait(condition, seconds=120):
    """Until `condition()`; returns how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not come to pass"
        time.sleep(0.05)
    return time.monotonic() - begin


def state(run, node):
    try:
        return ranks.status(run.root / f"node{node}")
    except (OSError, ValueError):
        return {}


def step(run, node):
    return state(run, node).get("step") or 0


def running(run, node, attempt, size):
    """Whether attempt `attempt`, of `size` ranks, has made steps on the node."""
    known = state(run, node)
    return (known.get("attempt"), known.get("world_size"), known.get("state")) == (
        attempt,
        size,
        "running",
    ) and known.get("slowest")


def power_cut(run, node):
    """All of a node's processes end at once."""
    kill_all(run.nodes[node])


def stop(run, *nodes):
    """Stop the run, once it has steps enough to compare, by a signal to the first of `nodes`; all end with 75."""
    wait(lambda: step(run, nodes[0]) > 25)
    run.nodes[nodes[0]].send_signal(signal.SIGTERM)
    for node in nodes:
        assert run.nodes[node].wait(timeout=120) == 75, run.nodes[node].stderr.read()


def events(run, node):
    told = ranks.records(run.root / f"node{node}", "event")
    return [event for event in told if event["event"] == "restart"]


def same(run, node, curve):
    found = ranks.losses(run.root / f"node{node}")  # every step once
    count = min(len(found), COMPARED)
    assert count > 20
    assert found[:count] == pytest.approx(curve[:count], rel=1e-5)


@pytest.mark.full
def test_a_queued_run_waits_for_the_end_of_the_one_before(launch, tmp_path):
    """The one before is a directory whose status says what it will; stopped while it waits, the run ends at once."""
    before = tmp_path / "before"
    before.mkdir()
    (before / "status.json").write_text('{"state": "running"}')
    run = launch(2, environment={"TRAINYARD_AFTER": "before,gone"})
    wait(lambda: all(state(run, node).get("state") == "queued" for node in (0, 1)))
    assert state(run, 0)["reason"] == "it waits for the end of before"
    time.sleep(2)
    assert not list((tmp_path / "node0/logs").iterdir())
    (before / "status.json").write_text('{"state": "failed"}')
    wait(lambda: running(run, 0, 1, 2) and running(run, 1, 1, 2))
    stop(run, 0, 1)


def test_a_queued_run_is_stopped(launch, tmp_path):
    (tmp_path / "before").mkdir()
    run = launch(1, environment={"TRAINYARD_AFTER": "before"})
    wait(lambda: state(run, 0).get("state") == "queued")
    run.nodes[0].send_signal(signal.SIGTERM)
    assert run.nodes[0].wait(timeout=30) == 75
    assert (state(run, 0)["state"], state(run, 0)["reason"]) == (
        "stopped",
        "stopped on request while it was queued",
    )


@pytest.mark.full
def test_a_stop_between_two_attempts_is_not_lost(launch):
    """The ranks have ended to take a host in, and the launcher has not seen it yet: the run is no ended one."""
    run = launch(1)
    wait(lambda: step(run, 0) > 5)
    run_dir, launcher = run.root / "node0", run.nodes[0].pid
    os.kill(launcher, signal.SIGSTOP)
    try:
        (run_dir / "yield").touch()
        wait(lambda: state(run, 0)["reason"])
        assert state(run, 0)["state"] == "ending"
        assert cli.main(["stop", str(run_dir)]) == 0
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert run.nodes[0].wait(timeout=60) == 75
    assert state(run, 0)["state"] == "stopped"


@pytest.mark.full
def test_a_stop_while_the_launcher_comes_up_is_not_lost(launch):
    """At boot it waits for its address; what is asked meanwhile is heard."""
    run = launch(1)
    wait(lambda: step(run, 0) > 5)
    power_cut(run, 0)
    run_dir = run.root / "node0"
    (run_dir / "stop").touch()  # left over from before
    run.environment["CLUSTER_ADDRESS"] = "192.0.2.1"  # documentation's, and nobody's: it does not come
    run.nodes[0] = run.start(0)
    wait(lambda: state(run, 0)["state"] == "stalled")
    assert "its cluster address 192.0.2.1 is not there yet" in state(run, 0)["reason"]
    assert not (run_dir / "stop").exists()
    assert cli.main(["stop", str(run_dir)]) == 0
    assert run.nodes[0].wait(timeout=30) == 75
    assert state(run, 0)["state"] == "stopped"


def test_a_killed_rank(launch, curve):
    run = launch(2)
    wait(lambda: step(run, 0) > 12)
    os.kill(rank_pids(run.nodes[1].pid)["1"], signal.SIGKILL)
    print("seconds", wait(lambda: running(run, 0, 2, 2) and running(run, 1, 2, 2)))
    stop(run, 0, 1)
    for node in (0, 1):
        same(run, node, curve)
        (event,) = events(run, node)
        assert event["attempt"] == 2 and "rank 1 on node1 was killed by SIGKILL" in event["reason"]
        assert event["step"] >= 10


@pytest.mark.full
@pytest.mark.parametrize("keys", [("comm=8bit",), ("comm=diloco", "sync_every=6", "diloco_overlap=2")])
def test_a_killed_rank_where_gradients_travel_otherwise(launch, keys):
    """Also while what it sends is on its way beside its steps. The curve is another one, and one curve."""
    run = launch(2, *keys)
    wait(lambda: step(run, 0) > 12)
    os.kill(rank_pids(run.nodes[1].pid)["1"], signal.SIGKILL)
    wait(lambda: running(run, 0, 2, 2) and running(run, 1, 2, 2))
    last = step(run, 0)
    wait(lambda: step(run, 0) > last + 15)
    stop(run, 0, 1)
    one, other = (ranks.losses(run.root / f"node{node}") for node in (0, 1))
    assert one == other and sum(one[-5:]) / 5 < 0.8 * one[0]
    for node in (0, 1):
        (event,) = events(run, node)
        assert event["step"] >= 10 and "rank 1 on node1 was killed by SIGKILL" in event["reason"]
    saved = [sorted((run.root / f"node{node}/checkpoints").iterdir())[-1] for node in (0, 1)]
    weights = [(path / "model.safetensors").read_bytes() for path in saved]
    assert saved[0].name == saved[1].name and weights[0] == weights[1]


@pytest.mark.full
def test_a_host_is_cut_off_and_comes_back(launch, curve):
    run = launch(3)
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 1)
    print("seconds", wait(lambda: running(run, 0, 2, 2) and running(run, 2, 2, 2)))
    assert state(run, 2)["note"] == "node1 is gone"
    run.nodes[1] = run.start(1)
    print("seconds", wait(lambda: all(running(run, node, 3, 3) for node in range(3))))
    stop(run, 2, 1, 0)
    for node in range(3):
        same(run, node, curve)
        assert [one["reason"] for one in events(run, node)] == ["node1 is gone", "node1 takes part"]


@pytest.mark.full
def test_a_host_is_cut_off_and_comes_back_where_ranks_seldom_meet(launch):
    """Two hosts go on from the last meeting of three, and three from that of two: the curve is one curve."""
    run = launch(3, "comm=diloco", "sync_every=4", "diloco_fragments=2")
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 1)
    wait(lambda: running(run, 0, 2, 2) and running(run, 2, 2, 2))
    last = step(run, 0)
    wait(lambda: step(run, 0) > last + 8)
    run.nodes[1] = run.start(1)
    wait(lambda: all(running(run, node, 3, 3) for node in range(3)))
    last = step(run, 0)
    wait(lambda: step(run, 0) > last + 8)
    stop(run, 2, 1, 0)
    found = [ranks.losses(run.root / f"node{node}") for node in range(3)]
    assert found[0] == found[1] == found[2] and sum(found[0][-5:]) / 5 < 0.8 * found[0][0]
    for node in range(3):
        assert [one["reason"] for one in events(run, node)] == ["node1 is gone", "node1 takes part"]
    saved = [sorted((run.root / f"node{node}/checkpoints").glob("step-*"))[-1:] for node in range(3)]
    assert sum(map(len, saved)) == 2  # copies on two of the hosts
    assert (
        len({(path.name, (path / "model.safetensors").read_bytes()) for (path,) in filter(None, saved)}) == 1
    )


@pytest.mark.full
def test_a_run_that_was_stopped_while_its_store_was_silent_does_not_begin_again(material, tmp_path):
    """The head's power fails, and the store goes with it; the other host is stopped, and tells it later."""
    root, untold = tmp_path / "runs", tmp_path / "untold"
    untold.mkdir()
    run = ranks.Launch(root, [1, 1], material / "run.yaml", *ENDLESS)
    try:
        wait(lambda: step(run, 0) > 6)
        power_cut(run, 0)
        (root / "store").rename(root / "off")
        (root / "store").touch()  # no directory: nobody makes a new one
        wait(lambda: state(run, 1).get("state") == "stalled")
        run.nodes[1].send_signal(signal.SIGTERM)
        assert run.nodes[1].wait(timeout=60) == 75
        (root / "store").unlink()
        (root / "off").rename(root / "store")

        run.nodes[0] = run.start(0)
        wait(lambda: "node1 may know what became of the run" in (state(run, 0).get("reason") or ""))
        assert len(list(untold.iterdir())) == 1
        assert cli.main(["tell", str(untold)]) == 0
        assert run.nodes[0].wait(timeout=60) == 75
        assert "stopped on request on node1, while the store" in state(run, 0)["reason"]
        assert state(run, 0)["attempt"] == 1 and not list(untold.iterdir())
    finally:
        for node in run.nodes:
            kill_all(node)
            node.communicate()


@pytest.mark.full
def test_the_head_is_gone_for_good(launch, curve):
    run = launch(3)
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 0)
    wait(lambda: running(run, 1, 2, 2) and running(run, 2, 2, 2))
    stop(run, 1, 2)
    same(run, 1, curve)
    same(run, 2, curve)


@pytest.mark.full
def test_a_rank_that_hangs(launch, curve):
    run = launch(2, "timeout_seconds=15")
    wait(lambda: step(run, 0) > 12)
    os.kill(rank_pids(run.nodes[0].pid)["0"], signal.SIGSTOP)
    wait(lambda: running(run, 0, 2, 2) and running(run, 1, 2, 2))
    assert "node0: a rank hung" in state(run, 1)["note"]
    stop(run, 1, 0)
    same(run, 1, curve)


@pytest.mark.full
def test_a_rank_that_hangs_alone(launch, curve):
    """No other rank misses it. Nothing is saved: a rank may take its time for that, and is found stopped later."""
    run = launch(1, "timeout_seconds=5", "checkpoint_every=100000")
    wait(lambda: step(run, 0) > 12)
    is_ended(run, curve, signal.SIGSTOP, "it did nothing for 5 s")


def is_ended(run, curve, number, why):
    """The one rank, to which a signal makes something happen, is ended for that, and the run goes on."""
    os.kill(rank_pids(run.nodes[0].pid)["0"], number)
    wait(lambda: running(run, 0, 2, 1))
    assert f"node0: a rank hung: {why}" in state(run, 0)["note"]
    stop(run, 0)
    same(run, 0, curve)


# What a rank does whose GPU has hung in a kernel: it asks in a loop whether that is over.
SPINS = """import os, signal
def spin(*_):
    while True: pass
if 'RANK' in os.environ: signal.signal(signal.SIGUSR1, spin)
"""


@pytest.mark.full
def test_a_rank_that_spins_alone(launch, curve, tmp_path):
    (tmp_path / "spins").mkdir()
    (tmp_path / "spins/sitecustomize.py").write_text(SPINS)
    path = f"{tmp_path / 'spins'}{os.pathsep}{ranks.ROOT}"
    run = launch(1, "timeout_seconds=5", environment={"PYTHONPATH": path})
    wait(lambda: step(run, 0) > 12)
    is_ended(run, curve, signal.SIGUSR1, "it computed for")


# A rank that waits for what never comes before its first step, once; its launcher has less patience than it would.
HANGS = """import os, sys, threading
if os.environ.get('RANK') == '0' and os.path.exists({flag!r}):
    os.remove({flag!r})
    from trainer.data import read
    read.digests = lambda config: threading.Event().wait()
elif 'launch' in sys.orig_argv:
    from trainer.cluster import hang
    hang.SLOW = 10
"""


@pytest.mark.full
def test_a_rank_that_hangs_before_its_first_step(launch, curve, tmp_path):
    """The other one, which waits for it, is not taken for one that hangs."""
    (tmp_path / "hangs").mkdir()
    (tmp_path / "flag").touch()
    (tmp_path / "hangs/sitecustomize.py").write_text(HANGS.format(flag=str(tmp_path / "flag")))
    path = f"{tmp_path / 'hangs'}{os.pathsep}{ranks.ROOT}"
    run = launch(2, "timeout_seconds=5", environment={"PYTHONPATH": path})
    wait(lambda: running(run, 0, 2, 2) and running(run, 1, 2, 2), 300)
    assert "node0: a rank hung: it gave no sign of life for 1" in state(run, 1)["note"]
    stop(run, 1, 0)
    same(run, 0, curve)


@pytest.mark.full
def test_a_host_that_shuts_down_leaves_the_run_to_the_others(launch, curve, monkeypatch):
    run = launch(2)
    wait(lambda: step(run, 0) > 12)
    monkeypatch.setenv("TRAINYARD_HOST", "node1")  # as RUN.env tells its unit
    assert cli.main(["stop", "--leave", str(run.root / "node1")]) == 0
    assert run.nodes[1].wait(timeout=120) == 75
    wait(lambda: running(run, 0, 2, 1))
    run.nodes[1] = run.start(1)
    wait(lambda: running(run, 0, 3, 2) and running(run, 1, 3, 2))
    stop(run, 0, 1)
    same(run, 0, curve)
    same(run, 1, curve)


@pytest.mark.full
def test_all_at_once_as_in_a_power_cut(launch, curve):
    run = launch(2)
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 0)
    power_cut(run, 1)
    run.nodes[:] = [run.start(0), run.start(1)]
    wait(lambda: state(run, 0).get("attempt", 0) >= 2 and state(run, 0).get("world_size") == 2)
    attempt = state(run, 0)["attempt"]
    wait(lambda: running(run, 0, attempt, 2) and running(run, 1, attempt, 2))
    stop(run, 1, 0)
    same(run, 0, curve)
    same(run, 1, curve)


@pytest.mark.full
def test_both_hosts_with_the_newest_checkpoint_are_gone(launch, curve):
    """The third one does not begin anew: it waits, says for whom, and goes on where they were."""
    run = launch(3)
    wait(lambda: step(run, 2) > 12)
    power_cut(run, 0)
    power_cut(run, 1)
    wait(lambda: state(run, 2).get("state") == "stalled")
    reason, known = state(run, 2)["reason"], len(ranks.losses(run.root / "node2"))
    assert "is on node0 and node1, and on no host that takes part" in reason
    attempt = state(run, 2)["attempt"]
    time.sleep(5)
    assert (state(run, 2)["state"], state(run, 2)["attempt"]) == ("stalled", attempt)
    assert len(ranks.losses(run.root / "node2")) == known > 12
    run.nodes[1] = run.start(1)
    print("seconds", wait(lambda: running(run, 1, attempt + 1, 2) and running(run, 2, attempt + 1, 2)))
    (event,) = (one for one in events(run, 2) if one["attempt"] == attempt + 1)
    # Why the attempt in between was made had nobody told yet: it came to no step.
    assert event["step"] >= 10
    assert re.fullmatch(r"(node[01](, node1)? (is|are) gone; )+node1 takes part", event["reason"])
    stop(run, 1, 2)
    same(run, 1, curve)
    same(run, 2, curve)


@pytest.mark.full
def test_a_run_that_waits_for_its_newest_checkpoint_is_stopped(launch):
    run = launch(3)
    wait(lambda: step(run, 2) > 12)
    power_cut(run, 0)
    power_cut(run, 1)
    wait(lambda: state(run, 2).get("state") == "stalled")
    run.nodes[2].send_signal(signal.SIGTERM)
    assert run.nodes[2].wait(timeout=60) == 75
    assert state(run, 2)["state"] == "stopped" and "node0 and node1" in state(run, 2)["reason"]


@pytest.mark.full
def test_a_launcher_that_stands_still_is_left_behind_and_taken_in_again(launch, curve):
    """Its lease runs out. Its rank, which has nobody left to make a step with, is ended without it."""
    run = launch(2)
    wait(lambda: step(run, 0) > 12)
    os.kill(run.nodes[1].pid, signal.SIGSTOP)
    wait(lambda: running(run, 0, 2, 1))
    os.kill(run.nodes[1].pid, signal.SIGCONT)
    wait(lambda: running(run, 0, 3, 2) and running(run, 1, 3, 2))
    stop(run, 0, 1)
    same(run, 0, curve)


@pytest.mark.full
@pytest.mark.parametrize("others", [True, False], ids=["others have gone on", "nobody else is there"])
def test_a_lone_rank_ends_without_its_launcher_before_others_begin(launch, curve, others):
    """It has nobody to lose, and would train on beside those for whom its host's lease has run out."""
    run = launch(2)
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 1)
    wait(lambda: running(run, 0, 2, 1))
    rank = Path(f"/proc/{rank_pids(run.nodes[0].pid)['0']}/stat")
    os.kill(run.nodes[0].pid, signal.SIGSTOP)
    lasted = wait(lambda: not rank.exists() or rank.read_text().rpartition(") ")[2][0] == "Z", 30)
    assert store.OUT_OF_TOUCH - 1 < lasted < store.LEASE
    if others:
        run.nodes[1] = run.start(1)
        wait(lambda: running(run, 1, 3, 1))
        assert "node0 is gone" in events(run, 1)[-1]["reason"]
    os.kill(run.nodes[0].pid, signal.SIGCONT)
    wait(lambda: running(run, 0, 3 + others, 1 + others))
    if not others:
        assert "node0 was cut off: its launcher stood still for 9 s" in events(run, 0)[1]["reason"]
    stop(run, *range(1 + others))
    same(run, 0, curve)


@pytest.mark.full
def test_what_fails_each_time_is_given_up(launch):
    """A rank dies at once, again and again."""
    run = launch(1, "restarts=1", "checkpoint_every=0")
    for attempt in (1, 2):
        wait(lambda attempt=attempt: running(run, 0, attempt, 1))
        os.kill(rank_pids(run.nodes[0].pid)["0"], signal.SIGKILL)
    assert run.nodes[0].wait(timeout=120) == 1
    reason = state(run, 0)["reason"]
    assert "2 attempts in a row failed without a new checkpoint" in reason and "SIGKILL" in reason


@pytest.mark.full
def test_a_host_that_fails_again_and_again_is_left_out_and_named(launch, curve):
    """Its rank dies twice without a checkpoint between; the other two hosts go on, and say why."""
    run, attempt = launch(3, "checkpoint_every=0"), 0

    def train(after, *nodes):
        """Whether an attempt after that one, of these nodes, makes steps."""
        now = state(run, nodes[0]).get("attempt") or 0
        return now > after and all(running(run, node, now, len(nodes)) for node in nodes)

    for _ in range(2):
        wait(lambda after=attempt: train(after, 0, 1, 2), 400)
        attempt = state(run, 0)["attempt"]
        os.kill(rank_pids(run.nodes[1].pid)["1"], signal.SIGKILL)
    wait(lambda: train(attempt, 0, 2), 400)
    attempt = state(run, 0)["attempt"]
    for node in (0, 2):
        assert "node1 failed again and again and is left out" in state(run, node)["note"]
        assert "SIGKILL" in state(run, node)["note"]
    wait(lambda: state(run, 1)["state"] == "stalled")
    said = "node1 is left out of the run: it failed again and again, or not all of the others reach it"
    assert state(run, 1)["reason"].startswith(said)
    assert not rank_pids(run.nodes[1].pid)
    # It lives, and is not taken in again.
    wait(lambda: step(run, 0) > 25)
    assert state(run, 0)["attempt"] == attempt
    stop(run, 0, 1, 2)
    assert "is left out" in events(run, 0)[-1]["reason"]
    same(run, 0, curve)


@pytest.mark.full
def test_with_fewer_hosts_than_min_nodes_the_run_waits(launch, curve):
    run = launch(2, "min_nodes=2")
    wait(lambda: step(run, 0) > 12)
    power_cut(run, 1)
    wait(lambda: state(run, 0).get("state") == "stalled")
    said = "node1 is gone; 1 of the 2 hosts that the run must have (min_nodes) are there: node0"
    assert state(run, 0)["reason"] == said
    assert not rank_pids(run.nodes[0].pid)
    before = step(run, 0)
    time.sleep(3)
    assert (step(run, 0), state(run, 0)["state"]) == (before, "stalled")
    run.nodes[1] = run.start(1)
    wait(lambda: any(running(run, 0, attempt, 2) and running(run, 1, attempt, 2) for attempt in (2, 3)))
    stop(run, 0, 1)
    same(run, 0, curve)
    same(run, 1, curve)
