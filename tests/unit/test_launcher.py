"""What a launcher does, turn by turn, when its machine, its network or its ranks do not do what they should.

The launcher, its store and its files are real; the clock, what the kernel says of addresses, and ranks are not.
"""

import ctypes
import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import config, environment
from trainer.cluster import attempt, membership, store
from trainer.cluster.membership import LOST, STOPPED
from trainer.commands import launch, tell
from trainer.errors import TrainerError

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "192.0.2.7"  # documentation's, and nobody's


class Ranks:
    """Stands in for an Attempt: ranks that go on until they are killed, or `outcome` says how they ended."""

    def __init__(self, plan, *_):
        self.plan, self.begin, self.outcome, self.killed = plan, launch.time.monotonic(), None, False
        self.has_started = True
        self.used, self.disk, self.signs, self.waiting, self.stands = 0.0, False, 0, False, False
        self.held = ""

    def is_renewed(self, at):
        """Nothing to end without its launcher."""

    def work(self):
        return attempt.Work(self.used, self.disk, self.signs, self.waiting)

    def stopped(self):
        return self.stands

    def poll(self, meanwhile=None):
        return self.outcome

    def kill(self, meanwhile=None):
        self.killed = True
        if meanwhile:
            self.while_killed(meanwhile)
        return self.held

    def while_killed(self, meanwhile):
        """As long as it takes."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what it is moved on by, in seconds: `clock[0] += 60`."""
    moved, begin = (
        [0.0],
        round(launch.time.monotonic()),
    )  # whole, so that five seconds three times are fifteen
    monkeypatch.setattr(launch.time, "monotonic", lambda: begin + moved[0])
    return moved


@pytest.fixture
def start(monkeypatch, tmp_path, clock):
    """Starts a launcher in a run directory of its own: start(variable=value, overrides=[…], known=status.json)."""

    def make(overrides=(), known=None, node=0, folder=True, made=launch.Launcher, **variables):
        run_dir = tmp_path / f"node{node}" / "runs" / "a"
        if folder:
            run_dir.mkdir(parents=True, exist_ok=True)
        if known is not None:
            (run_dir / "status.json").write_text(json.dumps(known))
        names = ("STORE", "LAUNCH", "AFTER")
        unset = {f"TRAINYARD_{name}": "" for name in names} | {"NNODES": "", "CLUSTER_ADDRESS": ""}
        own = {"TRAINYARD_RUN_DIR": run_dir, "TRAINYARD_HOST": f"node{node}", "NODE_RANK": node}
        for name, value in (unset | own | variables).items():
            monkeypatch.setenv(name, str(value))
        loaded = config.load(overrides=["run=a", *overrides])
        return made(loaded, environment.read("a"), [])

    monkeypatch.setattr(launch, "Attempt", Ranks)
    return make


@pytest.fixture
def network(monkeypatch):
    """Whether ADDRESS is this host's: `network[0] = True`; ports there are always free."""
    there, really = [False], socket.create_server

    def create_server(place, **options):
        if place[0] != ADDRESS:
            return really(place, **options)
        if not there[0]:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return socket.socket()

    monkeypatch.setattr(launch.socket, "create_server", create_server)
    return there


def status(launcher):
    return json.loads((launcher.environment.run_dir / "status.json").read_text())


# ---- an address that comes late ----


@pytest.mark.parametrize("known", [{"state": "running", "attempt": 3}, {"state": "queued"}])
def test_a_host_that_boots_before_its_network_waits_for_its_address(start, network, clock, known):
    """A power cut of the whole cupboard: the switch, or the router that gives addresses, is up long after the hosts."""
    launcher = start(known=known, CLUSTER_ADDRESS=ADDRESS)
    for _ in range(10):
        assert launcher.look() is None
        clock[0] += 3600
    told = status(launcher)
    assert told["state"] == "stalled" and f"its cluster address {ADDRESS} is not there yet" in told["reason"]
    network[0] = True
    launcher.look()
    launcher.look()
    (member,) = launcher.attempt.plan.members
    assert (member.address, member.port >= 29500) == (ADDRESS, True)


@pytest.mark.parametrize("how", ["file", "signal"])
def test_a_stop_while_the_address_is_not_there(start, network, how):
    launcher = start(known={"state": "restarting", "attempt": 1}, CLUSTER_ADDRESS=ADDRESS)
    assert launcher.look() is None
    if how == "file":
        launcher.environment.stop_file.touch()
    else:
        launcher.ask_to_stop()
    assert launcher.look() == STOPPED
    assert (status(launcher)["state"], status(launcher)["attempt"]) == ("stopped", 1)
    assert "before its address was there" in status(launcher)["reason"]
    assert not launcher.environment.stop_file.exists()


@pytest.mark.parametrize("known", [None, {"state": "finished", "attempt": 1}])
def test_a_run_that_begins_on_an_address_that_is_not_there_is_refused(start, network, known):
    with pytest.raises(launch.BadInput, match=f"CLUSTER_ADDRESS {ADDRESS} is no address of this host"):
        start(known=known, CLUSTER_ADDRESS=ADDRESS)


def test_a_host_that_boots_after_the_end_has_nothing_to_wait_for(start, network):
    known = {"state": "finished", "attempt": 1, "launch": "now"}
    assert start(known=known, CLUSTER_ADDRESS=ADDRESS, TRAINYARD_LAUNCH="now").ended_before() == 0


# ---- what the machine refuses ----


def refuse(number):
    """Stands in for a call that the system refuses."""

    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_a_host_that_cannot_start_its_ranks_has_failed_and_its_launcher_lives(start, monkeypatch, clock):
    """No memory for a process: tried as often as any other fault, and then the run's end, with the reason."""
    launcher = start(["restarts=2"])
    monkeypatch.setattr(launch, "Attempt", refuse(errno.ENOMEM))
    code, turns = None, 0
    while code is None:
        code, turns = launcher.turn(), turns + 1
        clock[0] += 30
        assert turns < 30
    assert (code, launcher.me.done, status(launcher)["state"]) == (1, 3, "failed")
    reason = status(launcher)["reason"]
    assert "3 attempts in a row" in reason and "node0: the system refused" in reason
    assert "Cannot allocate memory" in reason


def test_a_process_that_is_refused_leaves_no_pipe_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(attempt.os, "fork", refuse(errno.EAGAIN))
    member = membership.Host(0, "node0", "127.0.0.1", 29500, 1)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setenv("TRAINYARD_RUN_DIR", str(tmp_path))
    with pytest.raises(BlockingIOError):
        attempt.Attempt(membership.Plan(1, [member]), 0, config.load(), environment.read("a"), [])
    assert os.listdir("/proc/self/fd") == before


# An agent with a rank that hears no signal, and a launcher that does not renew its host's record any more.
UNWATCHED = """
import dataclasses, json, os, subprocess, sys, time
from pathlib import Path
from trainer import config, environment
from trainer.cluster import attempt, membership

def agent(*_):
    rank = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(60)"]
    with subprocess.Popen(rank, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        Path("rank").write_text(str(process.pid))
    time.sleep(60)

attempt._run_agent, attempt.UNWATCHED = agent, 1.0
plan = membership.Plan(1, [membership.Host(0, "node0", "127.0.0.1", 29500, 1)])
mine = attempt.Attempt(plan, 0, config.load(), environment.read("a"), [], time.monotonic())
watched = time.monotonic() + 3
while not Path("rank").exists() or time.monotonic() < watched:
    mine.is_renewed(time.monotonic())
    assert mine.poll() is None
    time.sleep(0.1)
begin, rank = time.monotonic(), Path("/proc", Path("rank").read_text(), "stat")
while rank.exists() and rank.read_text().rpartition(") ")[2][0] != "Z":
    assert time.monotonic() - begin < 20
    time.sleep(0.1)
lasted = time.monotonic() - begin
while (outcome := mine.poll()) is None:
    time.sleep(0.1)
print(json.dumps([lasted, dataclasses.asdict(outcome)]))
"""


def test_ranks_end_without_a_launcher_that_stands_still(tmp_path, monkeypatch):
    for name, value in {"RUN_DIR": tmp_path, "HOST": "node0"}.items():
        monkeypatch.setenv(f"TRAINYARD_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", UNWATCHED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lasted, outcome = json.loads(done.stdout)
    assert 0.5 < lasted < 10
    assert (outcome["code"], outcome["cut_off"]) == (LOST, True)
    assert re.match("node0 was cut off: its launcher stood still for 1 s", outcome["reason"]), outcome


def running(launcher):
    """The launcher, once its ranks are up."""
    for _ in range(2):
        assert launcher.turn() is None
    assert launcher.attempt
    return launcher


def test_a_stop_that_cannot_be_passed_on_ends_the_ranks(start, monkeypatch):
    """On a disk that has become read-only no file can ask them, and no checkpoint be saved."""
    launcher = running(start())
    ranks = launcher.attempt
    monkeypatch.setattr(launch.Path, "touch", refuse(errno.EROFS))
    launcher.ask_to_stop()
    codes = [launcher.turn() for _ in range(3)]
    assert ranks.killed and codes[-1] == 1
    assert "Read-only file system" in status(launcher)["reason"]


def test_a_stop_that_a_full_disk_does_not_take_is_passed_on_once_there_is_room(start, monkeypatch):
    launcher = running(start())
    launcher.ask_to_stop()
    with monkeypatch.context() as full:
        full.setattr(launch.Path, "touch", refuse(errno.ENOSPC))
        assert launcher.turn() is None and not launcher.attempt.killed
    assert launcher.turn() is None and launcher.environment.yield_file.exists()


def test_what_the_system_refuses_while_the_store_is_silent_ends_no_launcher(start, monkeypatch):
    launcher = running(start())
    ranks = launcher.attempt
    launcher.ask_to_stop()
    monkeypatch.setattr(launcher.store, "read", refuse_store)
    monkeypatch.setattr(launch.Path, "touch", refuse(errno.EROFS))
    assert launcher.turn() is None
    assert ranks.killed and "Read-only file system" in launcher.me.reason


def test_a_host_that_never_reached_the_store_takes_part_when_it_is_started_again(start, monkeypatch, clock):
    """Its run may go on without it: what is over there is no end of this start of the run."""
    both = {"NNODES": 2, "TRAINYARD_STORE": "http://127.0.0.1:1", "TRAINYARD_LAUNCH": "now"}
    launcher = start(**both)
    monkeypatch.setattr(launcher.store, "read", refuse_store)
    assert launcher.turn() is None
    clock[0] += launcher.config.timeout_seconds + 1
    assert launcher.turn() == launch.LOST and status(launcher)["state"] == "failed"
    assert launcher.ended_before() is None


def test_a_host_that_cannot_be_taken_in_is_no_reason_to_end_ranks_that_train(start, monkeypatch):
    launcher = running(start())
    monkeypatch.setattr(launch.Path, "touch", refuse(errno.EROFS))
    monkeypatch.setattr(launcher, "_may_take_in", lambda *_: True)
    assert launcher.turn() is None and launcher.attempt and not launcher.attempt.killed


def test_a_store_that_falls_silent_between_a_look_and_a_word(start, monkeypatch, clock):
    launcher = start()
    with monkeypatch.context() as silent:
        silent.setattr(launcher.store, "put_if", refuse_store)
        assert launcher.turn() is None and launcher.turn() is None
        clock[0] += 10
        silent.setattr(launcher.store, "read", refuse_store)
        assert launcher.turn() is None
        assert status(launcher)["state"] == "stalled" and "no majority" in status(launcher)["reason"]
    running(launcher)


def refuse_store(*_):
    raise store.Unreachable("no majority")


def test_a_run_that_begins_on_a_disk_that_cannot_be_written_is_refused(start, monkeypatch):
    monkeypatch.setattr(launch.Path, "mkdir", refuse(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        start(folder=False)


def test_a_host_that_boots_with_a_disk_that_cannot_be_written_waits(start, monkeypatch):
    """Its launcher would otherwise hear a stop file of old, which it could not remove."""
    known = {"state": "running", "attempt": 1}
    stop = start(known=known).environment.stop_file
    stop.touch()
    with monkeypatch.context() as broken:
        broken.setattr(launch.Path, "unlink", refuse(errno.EROFS))
        launcher = start(known=known)
        for _ in range(3):
            assert launcher.turn() is None
        assert status(launcher)["state"] == "stalled" and "Read-only" in status(launcher)["reason"]
        assert not launcher.asked
    running(launcher)
    assert not stop.exists()


@pytest.mark.parametrize("trains", [True, False])
def test_a_host_that_shuts_down_with_such_a_disk_leaves_the_run_to_the_others(start, monkeypatch, trains):
    """No file can ask it to leave, and what systemd sends next would end the run for all."""
    launcher = start(known={"state": "running", "attempt": 1})
    if trains:
        running(launcher)
    monkeypatch.setattr(launch.Path, "touch", refuse(errno.EROFS))
    if not trains:
        monkeypatch.setattr(launch.Path, "unlink", refuse(errno.EROFS))
        assert launcher.turn() is None
    launcher.ask_to_leave()
    codes = [launcher.turn() for _ in range(2)]
    assert STOPPED in codes and "end" not in launcher.store.read()
    assert (status(launcher)["state"], status(launcher)["reason"]) == (
        "restarting",
        launch.LEAVES.format("node0"),
    )


def test_an_attempt_that_ends_before_its_ranks_have_written_has_made_no_step(start):
    """status.json still has the attempt before."""
    launcher = start(known={"state": "running", "attempt": 1, "slowest": {"rank": 0}})
    ranks = running(launcher).attempt
    assert ranks.plan.attempt == 2 and status(launcher)["attempt"] == 2
    launcher._over(attempt.Outcome(1, "why"))
    assert not launcher.me.stepped


def test_a_stop_while_the_disk_cannot_be_written(start, monkeypatch):
    monkeypatch.setattr(launch.Path, "unlink", refuse(errno.EROFS))
    launcher = start(known={"state": "running", "attempt": 1})
    launcher.ask_to_stop()
    assert launcher.turn() == STOPPED


# ---- a queue over hosts that do not all have the run before ----


@pytest.fixture
def pair(start, tmp_path):
    """Launchers of a run of two hosts: on the first the run `before` is active, on the second nothing is."""
    both = {"NNODES": 2, "TRAINYARD_STORE": tmp_path / "store", "TRAINYARD_LAUNCH": "now"}
    first = start(node=0, TRAINYARD_AFTER="before", **both)
    before = first.environment.run_dir.with_name("before")
    before.mkdir()
    (before / "status.json").write_text('{"state": "running"}')
    second = start(node=1, **both)
    return first, second, before / "status.json"


def test_a_host_without_the_run_before_waits_for_those_that_have_it(pair, clock):
    first, second, before = pair
    for _ in range(3):
        assert [first.turn(), second.turn()] == [None, None]
        clock[0] += 10  # well within a lease
        first.turn()
    clock[0] += 3600
    for _ in range(3):
        first.turn()
        second.turn()
    assert not second.attempt
    assert (status(first)["state"], status(first)["reason"]) == ("queued", "it waits for the end of before")
    assert (status(second)["state"], status(second)["reason"]) == (
        "queued",
        "node0 waits for the end of before",
    )
    before.write_text('{"state": "finished"}')
    for _ in range(3):
        first.turn()
        second.turn()
    assert [member.name for member in second.attempt.plan.members] == ["node0", "node1"]
    assert first.attempt.plan == second.attempt.plan


def test_who_is_queued_and_dies_is_not_waited_for(pair, clock):
    first, second, _ = pair
    first.turn()
    second.turn()
    clock[0] += launch.store.LEASE + 1  # its power is cut
    second.turn()
    assert status(second)["state"] == "starting"
    clock[0] += second.config.timeout_seconds + 1
    for _ in range(2):
        second.turn()
    assert [member.name for member in second.attempt.plan.members] == ["node1"]


def test_a_store_that_is_silent_when_the_wait_is_over_is_told_later(pair, monkeypatch):
    first, second, before = pair
    first.turn()
    before.write_text('{"state": "finished"}')
    with monkeypatch.context() as silent:
        silent.setattr(first.store, "leave", refuse_store)
        first.turn()
    assert "queued/0" in second.store.read()
    first.turn()
    assert "queued/0" not in second.store.read()


@pytest.mark.parametrize(("again", "waits"), [("now", False), ("later", True)])
def test_whose_turn_it_was_does_not_wait_again_after_a_reboot(pair, start, again, waits):
    """Not for a run that was stopped, and resumed to wait for this one; another start of it does."""
    first, _, before = pair
    first.turn()
    before.write_text('{"state": "finished"}')
    first.turn()
    before.write_text('{"state": "queued"}')
    store = first.environment.run_dir.parents[2] / "store"
    back = start(NNODES=2, TRAINYARD_STORE=store, TRAINYARD_LAUNCH=again, TRAINYARD_AFTER="before")
    back.turn()
    assert bool(back.after) is waits
    assert (status(back)["state"] == "queued") is waits


def test_a_run_that_has_ended_is_not_waited_for_again(pair, start):
    """Three in a row: the second was stopped, and resumed behind the third, which then waits for the first alone."""
    first, _, before = pair
    second = before.parent.with_name("second")
    second.mkdir()
    (second / "status.json").write_text('{"state": "queued"}')
    store = first.environment.run_dir.parents[2] / "store"
    words = {
        "NNODES": 2,
        "TRAINYARD_STORE": store,
        "TRAINYARD_LAUNCH": "x",
        "TRAINYARD_AFTER": "before,second",
    }
    third = start(**words)
    third.turn()
    assert status(third)["reason"] == "it waits for the end of before, second"
    (second / "status.json").write_text('{"state": "stopped"}')
    third.turn()
    (second / "status.json").write_text('{"state": "queued"}')
    third.turn()
    assert status(third)["reason"] == "it waits for the end of before"
    back = start(**words)  # its host has booted
    back.turn()
    assert status(back)["reason"] == "it waits for the end of before"
    before.write_text('{"state": "finished"}')
    back.turn()
    assert not back.after


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_on_any_host_of_a_queued_run_is_for_all(pair, asked):
    for launcher in pair[:2]:
        launcher.turn()
    pair[asked].ask_to_stop()
    codes = [[launcher.turn() for launcher in pair[:2]] for _ in range(3)]
    assert all(STOPPED in [one[node] for one in codes] for node in (0, 1))
    assert [status(launcher)["state"] for launcher in pair[:2]] == ["stopped", "stopped"]


# ---- a rank that trains alone, and hangs ----


def lives(launcher, clock, seconds, state="running", step=True, used=1.0, signs=0, every=10.0):
    """Seconds that a rank is let live, at most `seconds`: of a processor it uses `used`, and it gives `signs` each."""
    if not launcher.attempt:
        running(launcher)
    ranks, begin = launcher.attempt, clock[0]
    slowest = {"rank": 0} if step else None
    told = {"state": state, "attempt": ranks.plan.attempt, "slowest": slowest}
    (launcher.environment.run_dir / "status.json").write_text(json.dumps(told))
    while clock[0] < begin + seconds and not ranks.killed:
        clock[0] += every
        ranks.used += used * every
        ranks.signs += signs
        launcher.turn()
    return clock[0] - begin


@pytest.mark.parametrize("state", ["running", "evaluating"])
def test_a_rank_that_spins_on_a_gpu_that_does_not_answer_is_ended(start, clock, state):
    launcher = start(["timeout_seconds=300"])
    assert lives(launcher, clock, 1000, signs=1, every=5.0) == 1000
    assert 450 < lives(launcher, clock, 1000, state, every=5.0) < 500
    assert "node0: a rank hung: it computed for 450 s without a step" in launcher.me.reason


def test_a_rank_is_left_to_silences_like_those_that_it_came_back_from(start, clock):
    """Steps of 50 s: a quarter of an hour without one is much, and no more."""
    launcher = start(["timeout_seconds=300"])
    for _ in range(5):
        assert lives(launcher, clock, 50) == 50
        lives(launcher, clock, 10, signs=1)
    assert lives(launcher, clock, 1400) == 1400
    assert lives(launcher, clock, 2000) < 700


@pytest.mark.parametrize(
    ("overrides", "how", "least"),
    [
        ([], {"state": "starting"}, 1800),  # data, a model
        ([], {"step": False}, 9000),  # the first step
        ([], {"state": "saving"}, 1800),
        (["compile=true"], {}, 1800),
        (["profile_steps=3"], {}, 9000),
    ],
    ids=["starting", "first step", "saving", "compile", "profile"],
)
def test_a_rank_may_be_silent_for_long_where_that_is_its_work(start, clock, overrides, how, least):
    launcher = start(["timeout_seconds=300", *overrides])
    assert lives(launcher, clock, 9000, **how) >= least


@pytest.mark.parametrize("what", ["disk", "unknown"])
def test_a_rank_that_cannot_be_judged_is_left_alone(start, clock, what):
    launcher = running(start(["timeout_seconds=300"]))
    signs = None if what == "unknown" else 5
    launcher.attempt.work = lambda: attempt.Work(clock[0], what == "disk", signs, False)
    assert lives(launcher, clock, 9000) == 9000


@pytest.mark.parametrize("used", [0.0, 1.0])
def test_a_machine_that_slept_has_no_hung_rank(start, clock, used):
    launcher = start(["timeout_seconds=300"])
    lives(launcher, clock, 100, signs=1)
    clock[0] += 30000
    assert lives(launcher, clock, 250, used=used) == 250


@pytest.mark.parametrize(
    ("state", "least"), [("starting", 1800), ("running", 300), ("evaluating", 300), ("saving", 1800)]
)
def test_a_rank_that_does_nothing_is_ended_whatever_it_was_at(start, clock, state, least):
    launcher = start(["timeout_seconds=300"])
    lives(launcher, clock, 100, signs=1)
    assert least < lives(launcher, clock, 9000, state, used=0.0) < least + 60
    assert f"node0: a rank hung: it did nothing for {least} s" in launcher.me.reason


def test_a_file_that_goes_slowly_to_a_server_is_work(start, clock):
    launcher = start(["timeout_seconds=300"])
    lives(launcher, clock, 100, signs=1)
    assert lives(launcher, clock, 9000, "saving", used=0.0, signs=1) == 9000


def test_what_a_rank_writes_is_a_sign_of_life_and_what_its_agent_does_is_none(tmp_path):
    """An agent that writes all the time, and below it a rank that does so when it is told to."""
    rank = f"while read -r word; do echo x > {tmp_path}/rank; done; sleep 60"
    agent = f"mkfifo {tmp_path}/ask; sh -c '{rank}' < {tmp_path}/ask & exec 3> {tmp_path}/ask; " + (
        "while read -r word; do for i in 1 2 3 4 5; do echo x; done; [ $word = rank ] && echo >&3; echo done; done"
    )
    with subprocess.Popen(
        ["sh", "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        seen = attempt.Attempt.__new__(attempt.Attempt)
        seen._pid, seen.ranks = process.pid, range(1)

        def ask(word):
            process.stdin.write(word + "\n")
            process.stdin.flush()
            while process.stdout.readline() != "done\n":
                pass
            return seen.work().signs

        try:
            before = ask("agent")
            assert ask("agent") == before
            ask("rank")
            end = time.perf_counter() + 30
            while seen.work().signs == before:
                assert time.perf_counter() < end
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_that_was_stopped_while_it_starts_is_ended(start, clock, processes):
    """Where the others wait for it for hours, as for one that fetches what it needs."""
    launcher = running(start(["timeout_seconds=300"], NPROC_PER_NODE=processes))
    ranks, begin = launcher.attempt, clock[0]
    told = {"state": "starting", "attempt": ranks.plan.attempt}
    (launcher.environment.run_dir / "status.json").write_text(json.dumps(told))

    def live(seconds):
        until = clock[0] + seconds
        while clock[0] < until and not ranks.killed:
            clock[0] += 5
            launcher.turn()

    live(600)
    ranks.stands = True
    live(200)
    ranks.stands = False  # somebody lets it go on
    live(200)
    assert not ranks.killed
    ranks.stands, begin = True, clock[0]
    live(1000)
    assert 300 <= clock[0] - begin < 320
    assert "a rank hung: it was stopped (SIGSTOP)" in launcher.me.reason


def test_a_process_that_is_stopped_is_told_from_one_that_sleeps():
    process = subprocess.Popen(["sleep", "60"])
    try:
        looked = object.__new__(attempt.Attempt)
        looked._pid = process.pid
        assert not looked.stopped()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert looked.stopped()
    finally:
        process.kill()
        process.wait()


def test_the_head_says_that_it_is_left_out_or_waits_to_be_taken_in(pair):
    first, second, before = pair
    before.write_text('{"state": "finished"}')
    for _ in range(3):
        first.turn()
        second.turn()
    assert second.attempt and first.attempt
    plan = membership.unpack_plan(first.store.read()["plan"].value)
    first.attempt = None
    for left_out, said in (([], "node0 takes part in the next attempt"), (["node0"], "node0 is left out")):
        word = dataclasses.replace(
            plan, attempt=plan.attempt + 1, members=plan.members[-1:], left_out=left_out
        )
        revision = first.store.read()["plan"].revision
        assert first.store.put_if("plan", membership.pack(word), revision)
        first.turn()
        assert said in status(first)["reason"]
        plan = word


# ---- hosts that lose each other ----


def over(launcher, code, reason="lost a peer"):
    """Has the launcher's ranks end so, and the launcher see it."""
    launcher.attempt.outcome = attempt.Outcome(code, reason)
    launcher.turn()
    return launcher.me


@pytest.fixture
def trains(pair):
    """Both launchers, and their attempt is under way."""
    first, second, before = pair
    before.write_text('{"state": "finished"}')
    for _ in range(3):
        first.turn()
        second.turn()
    assert first.attempt and second.attempt
    return first, second


def test_who_has_lost_a_peer_tells_whom_it_does_not_reach(trains, monkeypatch):
    asked = []
    monkeypatch.setattr(launch.reach, "unreached", lambda hosts: asked.extend(hosts) or [1])
    first, second = trains
    me = over(first, LOST)
    assert ([one.node for one in asked], me.unreached) == ([1], [1])
    first.turn()
    assert first.store.read()["hosts/0"].value["unreached"] == [1]
    assert over(second, -9, "killed").unreached == [] and len(asked) == 1


@pytest.mark.parametrize(
    ("facts", "code"),
    [({"unreached": [2]}, LOST), ({"cut_off": True}, LOST), ({}, 1)],
    ids=["apart", "cut", "hung"],
)
def test_who_waits_for_peers_that_lost_each_other_has_not_hung(trains, clock, facts, code):
    """Two hosts reach the head, and not each other: its ranks still wait for theirs."""
    first, second = trains
    second.attempt.outcome = attempt.Outcome(LOST, "lost a peer")
    second.turn()
    second.me = dataclasses.replace(second.me, **facts)
    for _ in range(4):
        second.turn()
        first.turn()
        clock[0] += launch.GRACE / 2
    assert first.me.code == code
    assert ("a rank hung" in first.me.reason) == (code == 1)


def test_who_computes_for_longer_than_others_wait_is_told_so(trains, clock):
    first, second = trains
    second.attempt.outcome = attempt.Outcome(LOST, "lost a peer")
    second.turn()
    for _ in range(4):
        second.turn()
        first.turn()
        clock[0] += launch.GRACE / 2
        if first.attempt:
            first.attempt.used += launch.GRACE / 2
    assert first.me.code == 1
    assert "a rank was still busy when the others had waited 300 s for it" in first.me.reason


def test_a_peer_that_is_lost_while_the_store_is_silent_is_a_network_that_is_cut(start, monkeypatch):
    launcher = running(start())
    monkeypatch.setattr(launcher.store, "read", refuse_store)
    assert over(launcher, LOST).cut_off


def test_the_next_attempt_is_judged_by_itself(start, monkeypatch, clock):
    launcher = running(start())
    with monkeypatch.context() as silent:
        silent.setattr(launcher.store, "read", refuse_store)
        over(launcher, LOST)
    for _ in range(3):
        launcher.turn()
        clock[0] += 5
    assert launcher.attempt
    assert not over(launcher, -9, "killed").cut_off


def test_a_closed_port_is_an_answer_and_silence_is_none():
    """Silent as behind a firewall: a socket whose queue is full drops what comes."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_server(("127.0.0.1", 0)) as open_,
    ):
        place = full.getsockname()
        with socket.create_connection(place), socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = {0: place[1], 1: open_.getsockname()[1], 2: free.getsockname()[1]}
            hosts = [
                membership.Host(node, f"node{node}", "127.0.0.1", port, 1) for node, port in ports.items()
            ]
            begin = time.perf_counter()
            assert launch.reach.unreached(hosts) == [0]
            assert time.perf_counter() - begin >= launch.reach.PATIENCE
            assert launch.reach.unreached(hosts[1:]) == []


@pytest.mark.parametrize(
    ("number", "found"), [(errno.EHOSTUNREACH, [7]), (errno.ENETUNREACH, [7]), (errno.EMFILE, [])]
)
def test_a_way_that_is_not_there_is_told_from_a_socket_that_is_not(monkeypatch, number, found):
    host = membership.Host(7, "node7", "127.0.0.1", 9, 1)
    if number == errno.EMFILE:
        monkeypatch.setattr(launch.reach.socket, "socket", refuse(number))
    else:
        monkeypatch.setattr(launch.reach.socket.socket, "connect_ex", lambda *_: number)
    assert launch.reach.unreached([host]) == found


# ---- a store that has forgotten the run ----


def test_a_host_that_boots_into_an_empty_store_does_not_train_alone(start, clock, tmp_path):
    """The others have ended the run, or train it under another launch; this one's unit is still enabled."""
    place = {"NNODES": 3, "TRAINYARD_STORE": tmp_path / "store", "TRAINYARD_LAUNCH": "old"}
    known = {"state": "running", "attempt": 4, "last_checkpoint": 40}
    launcher = start(known=known, node=2, **place)
    launcher.environment.turn_file.write_text(json.dumps({"launch": "old", "after": [], "begun": True}))
    launcher = start(node=2, **place)
    for _ in range(50):
        assert launcher.turn() is None
        clock[0] += 8
    assert not launcher.attempt
    assert (
        status(launcher)["state"] == "stalled" and "fewer than 2 do not begin" in status(launcher)["reason"]
    )
    launcher.environment.stop_file.touch()
    assert [launcher.turn() for _ in range(2)][-1] == STOPPED


# ---- a stop that the others cannot be told ----


@pytest.fixture
def head_is_off(start):
    """A launcher of two whose store is the other's, and does not answer; it is asked to stop, and ends."""

    def stopped(untold=True):
        place = {"NNODES": 2, "TRAINYARD_STORE": "http://127.0.0.1:1", "TRAINYARD_LAUNCH": "now"}
        launcher = start(node=1, known={"state": "running", "attempt": 4, "last_checkpoint": 40}, **place)
        if untold:
            launcher.environment.untold_dir.mkdir()
        launcher.ask_to_stop()
        assert launcher.turn() == STOPPED
        return launcher

    return stopped


def test_a_stop_that_the_others_cannot_be_told_is_told_once_the_store_is_back(
    head_is_off, start, clock, monkeypatch, tmp_path
):
    """The head, which alone has the store, boots: it does not begin the run again by itself."""
    launcher = head_is_off()
    (note,) = launcher.environment.untold_dir.iterdir()
    assert note.name == "a.now.json" and not (launcher.environment.run_dir / "untold").exists()
    tell.tell(note)
    assert note.exists()  # it still does not answer

    place, was = str(tmp_path / "store"), {"state": "running", "attempt": 4, "last_checkpoint": 40}
    variables = {"NNODES": 2, "TRAINYARD_STORE": place, "TRAINYARD_LAUNCH": "now"}
    members = [launch.Host(node, f"node{node}", "127.0.0.1", 29500, 1) for node in (0, 1)]
    memory = store.connect(place, "a.now")
    memory.put_if("plan", membership.pack(launch.Plan(4, members)), 0)
    head = start(known=was, **variables)
    for _ in range(5):
        assert head.turn() is None and not head.attempt
        clock[0] += 4
    assert "node1 may know what became of the run meanwhile" in status(head)["reason"]
    note.write_text(note.read_text().replace('"http://127.0.0.1:1"', json.dumps(place)))
    assert tell.main(note.parent) == 0 and not note.exists()
    assert head.turn() == STOPPED and status(head)["state"] == "stopped"
    assert status(head)["reason"].startswith(
        "stopped on request on node1, while the store could not be asked"
    )
    assert start(known=status(head), **variables).ended_before() == 0


def test_the_head_goes_on_alone_where_the_other_has_nothing_to_say(start, clock, tmp_path):
    place = str(tmp_path / "store")
    members = [launch.Host(node, f"node{node}", "127.0.0.1", 29500, 1) for node in (0, 1)]
    store.connect(place, "a.now").put_if("plan", membership.pack(launch.Plan(4, members)), 0)
    variables = {"NNODES": 2, "TRAINYARD_STORE": place, "TRAINYARD_LAUNCH": "now"}
    head = start(known={"state": "running", "attempt": 4}, **variables)
    for _ in range(10):
        head.turn()
        clock[0] += 4
    assert [one.name for one in head.attempt.plan.members] == ["node0"]


def test_no_note_is_left_where_nobody_would_tell_it(head_is_off):
    launcher = head_is_off(untold=False)
    assert status(launcher)["state"] == "stopped"
    assert (
        not launcher.environment.untold_dir.exists()
        and not (launcher.environment.run_dir / "untold").exists()
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"store": ["", "a", ""]}', '{"store": ["", "a"], "end": {"cod": 1}}']
)
def test_what_is_no_note_goes(tmp_path, text, capsys):
    note = tmp_path / "a.now.json"
    note.write_text(text)
    tell.tell(note)
    assert not note.exists() and "a.now: not a note of how a run ended" in capsys.readouterr().err


def test_a_note_whose_store_never_answers_is_given_up_in_the_end(head_is_off, capsys):
    (note,) = head_is_off().environment.untold_dir.iterdir()
    os.utime(note, (0, 0))
    tell.tell(note)
    assert not note.exists()
    assert "a.now: given up: etcd at 127.0.0.1:1 does not answer" in capsys.readouterr().err


# ---- faults of the launcher itself ----


def test_a_fault_of_the_launcher_is_one_of_its_host_and_its_ranks_do_not_go_on(
    start, monkeypatch, clock, capsys
):
    launcher = running(start())
    ranks = launcher.attempt
    with monkeypatch.context() as broken:
        broken.setattr(launcher, "_watch", lambda *_: {}["what is not there"])
        assert launcher.turn() is None
    assert ranks.killed and launcher.me.code == 1
    assert "node0: a fault of the launcher itself" in launcher.me.reason
    assert "Traceback" in capsys.readouterr().err
    for _ in range(3):
        assert launcher.turn() is None
        clock[0] += 5
    assert launcher.attempt and launcher.attempt is not ranks


def test_a_fault_of_the_launcher_that_does_not_pass_ends_its_part_with_the_reason(start, monkeypatch):
    launcher = start(TRAINYARD_LAUNCH="now")
    monkeypatch.setattr(launcher, "_decide", lambda *_: int("no number"))
    codes = [launcher.turn() for _ in range(launch.FAULTS)]
    assert codes == [None] * (launch.FAULTS - 1) + [1]
    assert (
        status(launcher)["state"] == "failed" and "ValueError: invalid literal" in status(launcher)["reason"]
    )
    assert launcher.ended_before() is None  # its unit, started again, takes part again


def test_faults_of_the_launcher_that_pass_are_not_counted_together(start, monkeypatch):
    launcher = start()
    monkeypatch.setattr(launcher, "_decide", lambda *_: None)
    for number in range(3 * launch.FAULTS):
        with monkeypatch.context() as broken:
            if number % 3:
                broken.setattr(launcher, "_decide", lambda *_: {}["what is not there"])
            assert launcher.turn() is None


def test_memory_that_the_launcher_lacks_is_waited_for(start, monkeypatch):
    launcher = start()

    def lacks(*_):
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(launcher, "_decide", lacks)
        for _ in range(2 * launch.FAULTS):
            assert launcher.turn() is None
        assert status(launcher)["state"] == "stalled" and "MemoryError" in status(launcher)["reason"]
    running(launcher)


# ---- torch that cannot be loaded ----


def fails_to_load(launcher, monkeypatch):
    """Runs `launch.main` with this launcher and a torch that is not whole; what it becomes then, or returns."""

    def become(program, words):
        raise InterruptedError(program, *words)

    def prepare():
        raise ImportError("libtorch_cpu.so: cannot allocate memory")

    monkeypatch.setattr(launch, "Launcher", lambda *_: launcher)
    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch.os, "execv", become)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    return launch.main(launcher.config, launcher.environment, [])


def test_torch_that_cannot_be_loaded_is_tried_again_where_the_run_has_begun(start, monkeypatch, clock):
    running(start(TRAINYARD_LAUNCH="now"))
    again = start(TRAINYARD_LAUNCH="now")
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    with pytest.raises(InterruptedError) as became:
        fails_to_load(again, monkeypatch)
    assert became.value.args == (sys.executable, *sys.orig_argv)
    assert clock[0] >= launch.ANEW
    assert status(again)["state"] == "stalled"
    assert "node0: torch cannot be loaded: ImportError: libtorch_cpu.so" in status(again)["reason"]


def test_torch_that_cannot_be_loaded_is_not_tried_again_after_a_stop(start, monkeypatch):
    running(start(TRAINYARD_LAUNCH="now"))
    again = start(TRAINYARD_LAUNCH="now")
    again.environment.stop_file.touch()
    assert fails_to_load(again, monkeypatch) == STOPPED and status(again)["state"] == "stopped"


def test_who_leaves_while_torch_cannot_be_loaded_stops_nobody_else(start, monkeypatch):
    """A reboot is the natural cure."""
    running(start(TRAINYARD_LAUNCH="now"))
    again = start(TRAINYARD_LAUNCH="now")
    again.environment.leave_file.touch()
    assert fails_to_load(again, monkeypatch) == STOPPED and status(again)["state"] == "restarting"
    assert "end" not in again.store.read()


def test_what_is_asked_between_two_tries_is_meant_for_the_next(start, monkeypatch, clock):
    running(start(TRAINYARD_LAUNCH="now"))
    again = start(TRAINYARD_LAUNCH="now")
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    with pytest.raises(InterruptedError):
        fails_to_load(again, monkeypatch)
    again.environment.stop_file.touch()
    monkeypatch.undo()
    monkeypatch.setenv(launch.ANEW_MARK, "1")
    assert launch.Launcher(again.config, again.environment, []).environment.stop_file.exists()
    launch.Launcher(again.config, again.environment, [])
    assert not again.environment.stop_file.exists()


def test_a_run_does_not_begin_with_torch_that_cannot_be_loaded(start, monkeypatch):
    launcher = start(TRAINYARD_LAUNCH="now")
    with pytest.raises(TrainerError, match="node0: torch cannot be loaded: ImportError"):
        fails_to_load(launcher, monkeypatch)
    assert status(launcher)["state"] == "failed" and "torch cannot be loaded" in status(launcher)["reason"]
    assert start(TRAINYARD_LAUNCH="now").ended_before() is None  # once that is cured


@pytest.mark.parametrize("known", [None, {"state": "starting", "step": 7, "launch": "before"}])
def test_a_run_that_cannot_begin_says_so_to_who_waits_for_its_end(start, tmp_path, known):
    with pytest.raises(launch.BadInput, match="NNODES is more than 1"):
        start(known=known, NNODES=2, TRAINYARD_LAUNCH="now", made=launch.main)
    run_dir = tmp_path / "node0/runs/a"
    told = json.loads((run_dir / "status.json").read_text())
    assert told["state"] == "failed" and "NNODES is more than 1" in told["reason"]
    assert told["step"] == (known or {}).get("step") and launch._has_ended(run_dir)
    assert start(TRAINYARD_LAUNCH="now").ended_before() is None


# ---- a host alone, whose launcher is killed again and again ----


def test_a_host_alone_whose_launchers_do_not_live_is_given_up(start):
    """Its store is its memory's, and goes with it."""
    for number in range(11):
        launcher = running(start(["restarts=1"], TRAINYARD_LAUNCH="now"))
        assert launcher.starts == number + 1
    last = start(["restarts=1"], TRAINYARD_LAUNCH="now")
    assert [last.turn(), last.turn()] == [None, 1]
    assert "11 times in a row without a new checkpoint" in status(last)["reason"]


def test_a_new_checkpoint_begins_that_count_anew(start):
    for _ in range(5):
        running(start(TRAINYARD_LAUNCH="now"))
    known = {"state": "running", "last_checkpoint": 5}
    assert running(start(known=known, TRAINYARD_LAUNCH="now")).starts == 1
    assert running(start(TRAINYARD_LAUNCH="now")).starts == 2
    assert running(start(TRAINYARD_LAUNCH="later")).starts == 1


# ---- processes that do not end ----


def test_a_process_that_does_not_end_keeps_no_launcher(monkeypatch):
    """As one in a driver that does not answer: what kills it does nothing."""
    monkeypatch.setattr(attempt, "ENDS", 0.3)
    with subprocess.Popen(["sleep", "60"]) as hung:
        others = {*attempt._children(os.getpid())} - {hung.pid}
        monkeypatch.setattr(attempt, "_held", others)
        really = os.kill
        monkeypatch.setattr(attempt.os, "kill", lambda *_: None)
        begin = time.monotonic()
        said = attempt._kill_children()
        assert f"process {hung.pid} was killed and does not end" in said
        assert attempt._kill_children() == "" and 0.3 <= time.monotonic() - begin < 5
        really(hung.pid, signal.SIGKILL)


def test_while_the_kernel_ends_a_process_something_else_is_done(monkeypatch):
    monkeypatch.setattr(attempt, "ENDS", 2.5)
    with subprocess.Popen(["sleep", "60"]) as hung:
        monkeypatch.setattr(attempt, "_held", {*attempt._children(os.getpid())} - {hung.pid})
        really = os.kill
        monkeypatch.setattr(attempt.os, "kill", lambda *_: None)
        called = []
        assert attempt._kill_children(lambda: called.append(time.monotonic()))
        assert len(called) == 2 and called[1] - called[0] > 0.9
        really(hung.pid, signal.SIGKILL)


def test_a_host_whose_ranks_are_slow_to_end_is_not_gone(start, clock, tmp_path):
    """Those of a checkpoint of many GB on a slow disk, say; the others see its record all the while."""
    common = {"NNODES": 2, "TRAINYARD_STORE": tmp_path / "store", "TRAINYARD_LAUNCH": "now"}
    first, second = (start(node=node, **common) for node in (0, 1))
    for _ in range(4):
        assert (first.turn(), second.turn()) == (None, None)
    assert first.attempt and second.attempt
    seen = []

    def ends_slowly(meanwhile):
        for _ in range(25):
            clock[0] += 1
            meanwhile()
            first.turn()
            seen.append((first.attempt is not None, "hosts/1" in first.entries))

    second.attempt.while_killed = ends_slowly
    second._kill("node1: a rank hung")
    assert set(seen) == {(True, True)}
    second.turn()
    assert first.turn() is None and not first.attempt.killed
    clock[0] += 6
    second.turn()
    first.turn()
    assert first.attempt is None and "node1: a rank hung" in second.me.reason


def test_what_does_not_end_is_told_with_the_reason(start, monkeypatch):
    launcher = running(start())
    launcher.attempt.held = "; process 7 does not end"
    launcher._kill("node0: a rank hung")
    assert launcher.me.reason == "node0: a rank hung; process 7 does not end"


# ---- a stop that comes when all is done ----


@pytest.mark.parametrize("asked", [0, 1])
def test_a_run_that_has_finished_is_not_stopped_any_more(trains, asked):
    """The stop comes between the ranks' end, of one host or of both, and the word on it."""
    trains[0].attempt.outcome = attempt.Outcome(0, "finished")
    trains[0].turn()
    trains[0].turn()
    trains[asked].ask_to_stop()
    codes = [None, None]
    for _ in range(4):
        for node, launcher in enumerate(trains):
            if codes[node] is None:
                codes[node] = launcher.turn()
            if launcher.attempt:
                launcher.attempt.outcome = attempt.Outcome(0, "finished")
    assert codes == [0, 0]
    assert [status(launcher)["state"] for launcher in trains] == ["finished", "finished"]


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_stop_between_two_attempts_is_no_failure(trains, asked_first):
    """The ranks failed before it; where they had been asked to save and end, that is what failed."""
    first, second = trains
    if asked_first:
        first.ask_to_stop()
    over(first, -9, "rank 0 was killed")
    first.ask_to_stop()
    for _ in range(3):
        second.attempt and over(second, LOST)
        codes = [first.turn(), second.turn()]
    assert codes == ([1, LOST] if asked_first else [STOPPED, STOPPED])


SAVED = attempt.Outcome(STOPPED, "asked to save and end")


def turns(launcher, count=4):
    """The code that it ends with within some looks, or None."""
    return next((code for code in (launcher.turn() for _ in range(count)) if code is not None), None)


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_shuts_down_stays_until_the_others_have_ended_too(trains, clock, leaver):
    """All have saved together; a card, eight ranks or a sink take their time to end."""
    leaves, stays = trains[leaver], trains[1 - leaver]
    leaves.environment.leave_file.touch()
    leaves.turn()
    leaves.attempt.outcome = SAVED
    for _ in range(10):
        assert (leaves.turn(), stays.turn()) == (None, None)
        clock[0] += launch.FAREWELL / 12
    assert not leaves.attempt and not stays.attempt.killed
    stays.attempt.outcome = SAVED
    assert turns(stays) is None  # no attempt begins with who is about to go
    assert turns(leaves) == STOPPED
    leaves.leave()
    assert turns(stays, 2) is None
    plan = stays.attempt.plan
    assert [one.node for one in plan.members] == [stays.me.node] and plan.attempt == 2
    assert (plan.blamed, plan.outages, plan.failures) == ({}, 0, 0)


def test_who_shuts_down_does_not_wait_for_ever(trains, clock):
    first, second = trains
    second.leaving = True
    second.attempt.outcome = SAVED
    assert turns(second) is None
    clock[0] += launch.FAREWELL + 1
    first.turn()
    assert turns(second) == STOPPED


@pytest.mark.parametrize("how", ["leave_file", "stop_file"])
def test_two_that_end_together_do_not_wait_for_each_other(trains, how):
    for launcher in trains:
        getattr(launcher.environment, how).touch()
        launcher.attempt.outcome = SAVED
    assert [launcher.turn() for launcher in trains] == [None, None]
    codes = [[launcher.turn() for launcher in trains] for _ in range(3)]
    assert STOPPED in [row[0] for row in codes] and STOPPED in [row[1] for row in codes]


def test_who_shuts_down_while_the_store_is_silent_does_not_wait(trains, monkeypatch):
    _, second = trains
    second.leaving = True
    second.attempt.outcome = SAVED
    assert turns(second) is None
    monkeypatch.setattr(second.store, "read", refuse_store)
    assert turns(second, 2) == STOPPED


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stop_does_not_cut_off_who_has_saved_and_is_slower_to_end(trains, clock, slow):
    quick, other = trains[1 - slow], trains[slow]
    for launcher in trains:
        launcher.ask_to_stop()
        launcher.turn()
    quick.attempt.outcome = SAVED
    for _ in range(10):
        assert (quick.turn(), other.turn()) == (None, None)
        clock[0] += launch.FAREWELL / 12
    assert not other.attempt.killed
    other.attempt.outcome = SAVED
    assert [turns(other), turns(quick)] == [STOPPED, STOPPED]
    assert {status(launcher)["reason"] for launcher in trains} == {SAVED.reason}


def test_who_does_not_end_though_all_have_saved_hangs(trains, clock):
    first, second = trains
    second.attempt.outcome = SAVED
    for _ in range(100):
        clock[0] += 4
        second.turn()
        first.turn()
        if not first.attempt:
            break
    assert "node0: a rank hung: the others' have ended, and it did not" in first.me.reason


@pytest.mark.parametrize(("leaves", "word"), [(False, "stopped"), (True, "restarting")])
def test_who_is_asked_again_ends_its_ranks_and_has_the_last_word(start, clock, leaves, word):
    """What comes next is SIGKILL, which leaves `running` behind; a queued run would wait for its end for ever."""
    launcher = running(start())
    (launcher.environment.leave_file if leaves else launcher.environment.stop_file).touch()
    launcher.turn()
    ranks = launcher.attempt
    clock[0] += 600
    launcher.turn()
    launcher.ask_to_stop()
    clock[0] += launch.LAST_CALL
    assert launcher.turn() is None and not ranks.killed
    clock[0] += 1
    codes = [launcher.turn() for _ in range(3)]
    assert ranks.killed and STOPPED in codes and status(launcher)["state"] == word
    assert leaves or "did not save in time" in status(launcher)["reason"]
    assert launcher.asked != leaves


@pytest.mark.parametrize(
    ("asked", "again", "presses"),
    [("signal", 0.1, False), ("signal", 5, True), ("file", 5, False), ("file", 30, True)],
)
def test_one_request_that_comes_twice_is_no_second_one(start, clock, asked, again, presses):
    """Of `timeout`, by itself and to its group; of `trainer stop`, and of stop.yml after it."""
    launcher = running(start())
    ranks = launcher.attempt
    if asked == "file":
        launcher.environment.stop_file.touch()
    else:
        launcher.ask_to_stop()
    launcher.turn()
    clock[0] += again
    launcher.ask_to_stop()
    clock[0] += launch.LAST_CALL + 1
    launcher.turn()
    assert ranks.killed == presses and launcher.asked


@pytest.mark.parametrize("how", ["store", "disk"])
def test_a_run_that_has_finished_is_not_stopped_where_nobody_can_be_told(start, monkeypatch, how):
    launcher = running(start())
    over(launcher, 0, "finished")
    if how == "store":
        monkeypatch.setattr(launcher.store, "read", refuse_store)
    else:
        monkeypatch.setattr(launcher.store, "read", refuse(errno.EIO))
    launcher.ask_to_stop()
    assert launcher.turn() == 0 and status(launcher)["state"] == "finished"


# ---- one of several ranks, and a disk that does not answer ----


@pytest.mark.parametrize(
    ("state", "disk", "signs", "least"),
    [
        ("saving", True, 0, 1800),
        ("running", True, 0, 1800),
        ("starting", True, 0, 1800),
        ("saving", True, 1, 9000),
    ],
    ids=["saves", "saves beside training", "reads a model", "a slow disk"],
)
def test_one_of_several_ranks_whose_disk_does_not_answer_is_ended(start, clock, state, disk, signs, least):
    """The others wait for it for hours, since a save may take long."""
    launcher = running(start(["timeout_seconds=300"], NPROC_PER_NODE=2))
    lives(launcher, clock, 100, signs=1)
    launcher.attempt.disk = disk
    found = lives(launcher, clock, 9000, state, used=0.0, signs=signs)
    assert least <= found <= least + 100
    found = "node0: a rank hung: it gave no sign of life for 1" in launcher.me.reason
    assert found == (least == 1800) and found == ("waits for a disk" in launcher.me.reason)


@pytest.mark.parametrize(("compiles", "least"), [(False, 600), (True, 1800)])
def test_one_of_several_that_hangs_in_its_part_of_an_evaluation_is_ended(start, clock, compiles, least):
    """The others wait for it at the end, and miss it nowhere else; each micro-batch is a sign of life."""
    launcher = running(start(["timeout_seconds=300", f"compile={str(compiles).lower()}"], NPROC_PER_NODE=2))
    lives(launcher, clock, 100, signs=1)
    assert least <= lives(launcher, clock, 9000, "evaluating", signs=0) <= least + 100
    assert "it gave no sign of life" in launcher.me.reason


@pytest.mark.parametrize("used", [0.0, 1.0])
@pytest.mark.parametrize("state", ["starting", "running", "saving"])
def test_one_of_several_that_hangs_where_the_others_wait_for_hours_is_ended(start, clock, state, used):
    """However busy. One that waits itself is not, nor one that reads or writes."""
    launcher = running(start(["timeout_seconds=300"], NPROC_PER_NODE=2))
    ranks = launcher.attempt
    for ranks.waiting, signs in ((True, 0), (False, 1)):
        assert lives(launcher, clock, 9000, state, used=used, signs=signs) == 9000
    assert 1800 <= lives(launcher, clock, 9000, state, used=used) < 1900
    assert "node0: a rank hung: it gave no sign of life for 18" in launcher.me.reason


def test_what_it_was_allowed_to_wait_for_before_its_steps_does_not_count_in_them(start, clock):
    launcher = start(["timeout_seconds=300"])
    lives(launcher, clock, 100, "starting", signs=1)
    lives(launcher, clock, 1700, "starting", used=0.0)
    assert 300 < lives(launcher, clock, 9000, used=0.0) < 350


def test_who_waits_for_others_says_so_by_its_name_while_it_does():
    """A thread of a rank, as saving in the background has one; and not for longer."""
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]); from trainer import waiting\n"
        "def wait():\n"
        "    before = open('/proc/thread-self/comm', 'rb').read()\n"
        "    with waiting.for_others():\n"
        "        threading.Thread(target=threading.Event().wait, daemon=True).start()  # which has its name\n"
        "        print(flush=True); sys.stdin.readline()\n"
        "    open('/proc/thread-self/comm', 'rb').read() == before or sys.exit('it has another name then')\n"
        "one = threading.Thread(target=wait); one.start(); one.join(); print(flush=True); sys.stdin.readline()"
    )
    # The agent, and below it the rank; the shell must not become the rank.
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code, str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        seen = attempt.Attempt.__new__(attempt.Attempt)
        seen._pid, seen.ranks = process.pid, range(1)
        process.stdout.readline()
        assert seen.work().waiting
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert not seen.work().waiting
        process.communicate("\n")


# ---- how ranks say that they ended ----

ABORTED = """=== run a, attempt 1
=== run a, attempt 2, rank 0 of 4 on node0
[E] [PG ID 0 PG GUID 0 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)
[E] Exception: {said}
terminate called after throwing an instance of 'c10::DistBackendError'
"""


@pytest.mark.parametrize(
    ("status", "reason"),
    [(-9, "was killed by SIGKILL; the kernel does so when memory runs out"), (0, "ended without a word")],
)
def test_an_agent_that_says_nothing_is_said_to_have_ended_as_it_did(status, reason):
    ended = object.__new__(attempt.Attempt)._outcome({}, status)
    assert ended.code == 1 and ended.reason.startswith(f"torchrun's agent {reason}")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ABORTED, LOST),
        (
            ABORTED.replace("Watchdog caught collective operation timeout", "CUDA error: an illegal access"),
            -6,
        ),
        (f"{ABORTED}\n=== run a, attempt 3, rank 0 of 4 on node0\nerror: an assertion", -6),  # an old word
    ],
)
def test_who_is_aborted_for_anothers_fault_over_nccl_is_not_to_blame(start, text, code):
    launcher = start()
    (launcher.environment.run_dir / "logs" / "rank-0.log").write_text(text)
    ended = object.__new__(attempt.Attempt)
    ended._environment = launcher.environment
    assert ended._outcome({"failures": [[0, -6, 0]]}, 0).code == code


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([[1, STOPPED, 50], [0, -9, 80]], (1, STOPPED)),  # it was still closing what it reports to
        ([[0, LOST, 50], [1, -9, 55]], (0, LOST)),  # it waited on a GPU, or computed
        ([[0, LOST, 50], [1, -9, 50]], (1, -9)),  # somebody killed it: that is why the other has lost a peer
        ([[0, LOST, 50], [1, -15, 51]], (0, LOST)),
        ([[0, LOST, 50], [1, 4, 51]], (1, 4)),
        ([[0, -9, 50]], (0, -9)),
    ],
)
def test_whom_the_agent_killed_is_not_the_cause(failures, cause):
    assert attempt._root_cause(failures) == cause


def test_of_a_ranks_last_words_no_more_is_passed_on_than_a_variable_takes():
    """`Missing key(s) in state_dict` names all of a large model's in one line."""
    long = "\n".join(["=== begin", "error: " + "x" * 200_000, *map(str, range(200))])
    for said in (long, long.replace("error: ", "")):
        words = attempt._last_words(said)
        assert len(words) < 100_000 and max(map(len, words.splitlines())) < 3000
    assert attempt._last_words("=== begin\nerror: a\nb") == "a\nb"
    assert attempt._last_words(long).startswith("xxx") and attempt._last_words(long).splitlines()[0].endswith(
        "…"
    )


@pytest.mark.parametrize(
    ("codes", "seconds"), [([], 30), ([STOPPED], 30), ([LOST], 5.0), ([STOPPED, -9], 5.0)]
)
def test_ranks_that_were_asked_to_end_have_their_time(codes, seconds):
    given = []
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    attempt._close(SimpleNamespace(_failures=failures), lambda _, signal, timeout: given.append(timeout))
    assert given == [seconds]


def test_where_memory_runs_out_a_rank_goes_before_its_launcher():
    """The kernel takes the highest score."""
    code = "from trainer import environment as e; e.follow_launcher(); print(open('/proc/self/oom_score_adj').read())"
    own = {**os.environ, "TRAINYARD_LAUNCHER": str(os.getpid())}
    rank = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert int(rank.stdout) == 500 > int(Path("/proc/self/oom_score_adj").read_text())


WITHIN = """
import ctypes, os, subprocess, sys
from trainer import environment
if sys.argv[2] == "unit":
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # as systemd's NoNewPrivileges
kept = environment.keep_to_its_own()
os.makedirs("a"), os.makedirs("b")
open("a/x", "w").close()
os.rename("a/x", "b/x"), os.link("b/x", "a/y")
with subprocess.Popen(["sleep", "60"]) as child:
    own = os.listdir(f"/proc/{child.pid}/root")
    child.kill()
try:
    other = os.listdir(f"/proc/{sys.argv[1]}/root")
except PermissionError:
    other = []
print(kept, bool(own), bool(other))
"""


@pytest.mark.parametrize(
    ("where", "launcher", "seen"),
    [
        ("unit", {}, "True True False"),
        ("unit", {"TRAINYARD_LAUNCHER": "1"}, "None True True"),
        ("unit", {"TRAINYARD_KEPT": "1"}, "None True True"),
        ("shell", {}, "None True True"),
    ],
)
def test_what_a_units_other_processes_see_a_run_does_not(where, launcher, seen, tmp_path):
    """By /proc/PID/root it would: the key for its peers, as `trainer fetch` its token. A rank is as its launcher is."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 2:
        pytest.skip("this machine's kernel has no Landlock that knows of moves between directories")
    if where == "shell" and ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1:
        pytest.skip("the tests themselves run where nobody gains rights, as in a unit")
    own = {**os.environ, "PYTHONPATH": str(ROOT), **launcher}
    with subprocess.Popen(["sleep", "60"]) as other:
        words = [sys.executable, "-c", WITHIN, str(other.pid), where]
        done = subprocess.run(words, env=own, cwd=tmp_path, capture_output=True, text=True, check=False)
        other.kill()
    assert done.stdout.strip() == seen, done.stderr


def test_what_was_known_before_an_attempt_that_only_loaded_is_none_of_its_checkpoints(start):
    """Its status keeps it, for who looks; it may be of steps that the run has given up."""
    launcher = start(known={"attempt": 1, "last_checkpoint": 900, "step": None})
    launcher._note(1, attempt.Outcome(1, "why"))
    assert launcher.me.saved == 0
    (launcher.environment.run_dir / "status.json").write_text(
        '{"attempt": 2, "last_checkpoint": 900, "step": 905}'
    )
    launcher._note(2, attempt.Outcome(1, "why"))
    assert launcher.me.saved == 900
