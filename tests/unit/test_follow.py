"""How a run looks from outside: polls, verdicts, and the words for them."""

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plugins.action import run_follow as follow
from plugins.module_utils import run_keeper
from plugins.module_utils.host_runs import run_status, within

START = "roles/trainer/tasks/start.yml"
COMMANDS = {"resume": "RESUME", "follow": "FOLLOW", "stop": "STOP", "logs": "runs/first/logs"}
NOW = 1000.0


def view(host, state="active", **facts):
    return follow.View(host, state=state, seen=facts.pop("seen", NOW), **facts)


def answer(state="active", status=None, metrics="", start=0, **keeper):
    """What a host answers to a poll."""
    lines = [f"ActiveState={state}", *(f"{key}={value}" for key, value in keeper.items())]
    status = json.dumps(status, indent=1) if status else ""
    return "\n".join(["::keeper", *lines, "::status", status, f"::metrics {start}", metrics])


# ---- a poll ----


def test_only_whole_lines_of_metrics_are_taken_and_the_rest_comes_with_the_next_poll():
    seen = view("node1")
    follow.read_poll(seen, answer(metrics='{"step": 1, "loss": 5.0}\n{"step": 2, "lo'), NOW)
    assert (seen.last["step"], seen.offset) == (1, 25)
    follow.read_poll(seen, answer(metrics='{"step": 2, "loss": 4.0}\n', start=25), NOW)
    assert (seen.last["loss"], seen.offset) == (4.0, 50)


def test_lines_that_are_no_step_or_no_json_are_passed_over():
    seen = view("node1")
    text = '{"step": 3, "loss": 5.0}\nhalf a line}\n{"kind": "event", "step": 9}\n'
    follow.read_poll(seen, answer(metrics=text), NOW)
    assert seen.last["step"] == 3


def test_a_half_written_status_does_not_hide_the_last_one():
    seen = view("node1")
    follow.read_poll(seen, answer(status={"state": "running", "step": 4}), NOW)
    follow.read_poll(seen, answer().replace("::status\n", '::status\n{"state": "runn'), NOW)
    assert seen.status["step"] == 4


@pytest.mark.parametrize(
    ("keeper", "status", "result"),
    [
        ({"state": "active"}, "running", "running"),
        ({"state": "deactivating"}, "running", "running"),
        ({"state": "inactive", "ExecMainStatus": 0}, "finished", "finished"),
        ({"state": "inactive", "ExecMainStatus": 0}, "stopped", "stopped"),  # systemd unloads a unit after 75
        ({"state": "inactive", "ExecMainStatus": 75}, "running", "stopped"),
        ({"state": "failed", "ExecMainStatus": 4}, "failed", "failed"),
        ({"state": "failed", "ExecMainStatus": 2}, "stopped", "failed"),  # the status is an earlier attempt's
        ({"state": "inactive", "ExecMainStatus": ""}, "running", "failed"),  # killed without a word
        ({"state": "failed", "ExecMainStatus": 9, "Result": "signal"}, "running", "failed"),
        # systemd shows 0 of a unit that it has unloaded, and of one that has not run since the boot.
        ({"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 0}, "finished", "finished"),
        ({"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 0}, "stopped", "stopped"),
        ({"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 0}, "running", "failed"),
        ({"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 0, "Job": 7}, "running", "running"),
        ({"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 88, "Job": ""}, "running", "finished"),
        ({"state": "failed", "ExecMainStatus": 0, run_keeper.RAN: 0}, "running", "failed"),  # no RUN.env
    ],
)
def test_how_a_host_ended(keeper, status, result):
    seen = view("node1")
    follow.read_poll(seen, answer(status={"state": status}, **keeper), NOW)
    assert seen.result == result


def test_a_run_that_failed_before_the_boot_is_told_as_it_was():
    """systemd knows of it no more; its launcher had said why."""
    seen = view("node1")
    gone = {"state": "inactive", "ExecMainStatus": 0, run_keeper.RAN: 0}
    follow.read_poll(seen, answer(status={"state": "failed", "reason": "bad input"}, **gone), NOW)
    assert (seen.result, seen.due) == ("failed", False)
    assert follow.meaning(seen)[0] == "it failed, and systemd does not know its exit code any more"


def test_systemd_is_asked_what_it_has_yet_to_start(run_dir, tmp_path):
    """The fake shows what is asked for alone, as the real one does."""
    said = f"ActiveState=inactive\nResult=success\nExecMainStatus=0\n{run_keeper.RAN}=0\nJob=7\nMainPID=0\n"
    (tmp_path / "said").write_text(said)
    show = (
        "#!/bin/sh\nfor word; do case $word in --property=*) asked=${word#*=};; esac; done\n"
        f'grep -E "^($(echo $asked | tr , "|"))=" {tmp_path}/said\n'
    )
    (tmp_path / "systemctl").write_text(show)
    (tmp_path / "systemctl").chmod(0o755)
    found = []
    for text in (said, said.replace("Job=7", "Job="), said.replace("Job=7", "Job=0")):
        (tmp_path / "said").write_text(text)
        command = run_keeper.state_command("systemd", "first", str(run_dir))
        path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-c", command], cwd=run_dir, env=path, capture_output=True, text=True)
        state = run_keeper.read_state(done.stdout)
        found.append((state["state"], state["waits"], state["forgotten"], state["ExecMainStatus"]))
    assert found == [("active", True, True, ""), ("ended", False, True, ""), ("ended", False, True, "")]


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run, with a space and a quote in its path."""
    path = tmp_path / "it's a run"
    (path / "logs").mkdir(parents=True)
    return path


def said(run_dir, offset=0):
    command = follow.poll_command("process", "first", str(run_dir), offset)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def poll(run_dir, offset=0):
    seen = view("node1", offset=offset)
    follow.read_poll(seen, said(run_dir, offset), NOW)
    return seen


def test_the_command_of_a_poll_tells_a_live_run_from_a_dead_one(run_dir):
    (run_dir / "status.json").write_text('{"state": "running", "step": 7}')
    (run_dir / "metrics.jsonl").write_text('{"kind": "train", "step": 7, "loss": 1.5}\n')
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "TRAINYARD_RUN_DIR": str(run_dir)})
    try:
        seen = poll(run_dir)
        assert (seen.state, seen.status["step"], seen.last["loss"]) == ("active", 7, 1.5)
    finally:
        sleeper.kill()
        sleeper.wait()
    (run_dir / "exit").write_text("4\n")
    seen = poll(run_dir)
    assert (seen.state, seen.code) == ("ended", 4)


def test_the_command_of_a_poll_reads_on_where_it_was_and_of_long_metrics_the_end_alone(run_dir):
    line = '{"kind": "train", "step": %6d, "loss": 1.0}\n'
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(line % step for step in range(1, 5001)))
    assert path.stat().st_size > 2 * follow.WINDOW
    seen = poll(run_dir)
    assert (seen.last["step"], seen.offset) == (5000, path.stat().st_size)
    with path.open("a") as file:
        file.write(line % 5001)
    assert poll(run_dir, seen.offset).last["step"] == 5001
    for steps in (12, 4900):  # a resumed run cuts its metrics back
        path.write_text("".join(line % step for step in range(1, steps + 1)))
        cut = poll(run_dir, seen.offset)
        assert (cut.last["step"], cut.offset) == (steps, path.stat().st_size)
        assert len(said(run_dir, seen.offset)) < follow.WINDOW + 1000


IN_PLACE = (
    "a link to what has no end",
    "a link to another's file",
    "a pipe",
    "a pipe that is open",
    "a huge file",
)


@pytest.fixture
def put(tmp_path):
    """Puts what a rank may put in the place of a file of its run, which it may write to as it likes."""
    (tmp_path / "another's").write_text('{"state": "running", "reason": "SECRET"}\n')
    held = []

    def put(path, what):
        if what.startswith("a link"):
            path.symlink_to("/dev/zero" if what.endswith("no end") else tmp_path / "another's")
        elif what == "a huge file":
            with path.open("w") as file:
                file.truncate(1 << 40)
        else:
            os.mkfifo(path)
            held.extend([os.open(path, os.O_RDWR)] if what.endswith("open") else [])

    yield put
    for descriptor in held:
        os.close(descriptor)


def most_of(command):
    """What a shell command says, of which this process takes no more than a few MiB."""
    code, out, errors = within(20, ["sh", "-c", f"{{ {command}; }} | head -c {4 * run_keeper.MOST}"])
    assert code == 0, errors
    return out


@pytest.mark.parametrize("what", IN_PLACE)
def test_what_a_rank_puts_in_the_place_of_a_file_neither_holds_a_poll_up_nor_fills_the_memory(
    run_dir, put, what
):
    (run_dir / "exit").write_text("4\n")
    good = poll(run_dir)
    for name in ("status.json", "metrics.jsonl"):
        put(run_dir / name, what)
    out = most_of(follow.poll_command("process", "first", str(run_dir), 0))
    assert len(out) < run_keeper.MOST + 2 * follow.WINDOW and "SECRET" not in out
    seen = view("node1")
    follow.read_poll(seen, out, NOW)
    assert (seen.state, seen.code, seen.status, seen.last) == (good.state, 4, {}, {})
    assert run_status(str(run_dir)) == {"state": "unknown"}
    (run_dir / "exit").unlink()
    put(run_dir / "exit", what)
    state = run_keeper.state_command("process", "first", str(run_dir))
    assert len(most_of(f"cd {shlex.quote(str(run_dir))}; {state}")) < 100


@pytest.mark.parametrize(
    "text", ['{"state": "running", "reason": "%s"}' % ("x" * run_keeper.MOST), "[" * 200000]
)
def test_a_status_that_is_too_long_or_too_deep_is_none(run_dir, text):
    (run_dir / "status.json").write_text(text)
    assert poll(run_dir).status == {} and run_status(str(run_dir)) == {"state": "unknown"}


@pytest.fixture
def open_dir():
    """A directory that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_a_directory_that_the_user_may_not_enter_is_told_from_one_that_is_gone(open_dir):
    """A directory of mode 0 stops everyone but root, so the poll runs as nobody where root runs the tests."""
    run_dir = open_dir / "runs" / "it's a run"
    run_dir.mkdir(parents=True)

    def answer():
        command = follow.poll_command("process", "first", str(run_dir), 0)
        account = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd="/", **account)
        return {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    for place in (run_dir, run_dir.parent):
        place.chmod(0)
        closed = follow.unread(str(run_dir), answer())
        place.chmod(0o755)
        assert isinstance(closed, follow.Denied) and str(closed).endswith(f"may not enter {place}")
    run_dir.rename(run_dir.with_name("away"))
    gone = follow.unread(str(run_dir), answer())
    assert not isinstance(gone, follow.Denied) and "cannot read" in str(gone)


def test_who_may_not_read_a_run_is_told_at_once_and_whom_to_log_in_as():
    closed = view("b", silent_since=NOW - 1, denied=True, error="the user anna may not enter /x")
    assert follow.verdict([view("a"), closed], NOW, LIMITS) == ("unreachable", closed)
    text = follow.explain("first", "unreachable", closed, [closed], COMMANDS)
    assert "on b, the user anna may not enter /x" in text
    assert "a user of the group" in text and "FOLLOW" in text


def test_the_end_of_every_log_is_read(run_dir):
    (run_dir / "logs/rank-0.log").write_text("".join(f"line {n}\n" for n in range(100)))
    (run_dir / "logs/rank-1.log").write_text("only this\n")
    (run_dir / "logs/rank-00.log").write_text("cut o")  # a full disk's last word
    command = follow.log_command("process", "first", str(run_dir))
    logs = follow.read_logs(subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout)
    assert logs["rank-1.log"] == ["only this"] and logs["rank-00.log"] == ["cut o"]
    assert logs["rank-0.log"] == [f"line {n}" for n in range(100 - follow.LOG_LINES, 100)]


@pytest.mark.parametrize("what", IN_PLACE)
def test_the_end_of_a_log_is_short_and_so_is_that_of_many_whatever_a_rank_makes_of_them(run_dir, put, what):
    put(run_dir / "logs/rank-0.log", what)
    (run_dir / "logs/rank-1.log").write_text("x" * (2 * follow.WINDOW))
    out = most_of(follow.log_command("process", "first", str(run_dir)))
    assert len(out) < 3 * follow.WINDOW and "SECRET" not in out
    assert out.endswith("x" * follow.WINDOW)
    for rank in range(2, 40):
        (run_dir / f"logs/rank-{rank}.log").write_text("x" * (2 * follow.WINDOW))
    assert len(most_of(follow.log_command("process", "first", str(run_dir)))) == run_keeper.MOST


# ---- the verdict ----

LIMITS = follow.Limits(settle=20, unreachable=300)


def test_a_host_whose_poll_does_not_come_back_is_silent(monkeypatch):
    """As where sshd lets in and a disk hangs: no error ever comes."""
    late = NOW - follow.PATIENCE
    for known, begun, since in (
        (view("a", seen=late), 0, late),
        (follow.View("a"), late, late),  # it has never answered
        (follow.View("a"), late + 1, None),
        (view("a", seen=late + 1), 0, None),
        (ended("a", 0, seen=late), 0, None),
        (view("a", seen=late, silent_since=late - 9), 0, late - 9),
    ):
        assert follow.overdue(known, NOW, begun).silent_since == since
    gone = follow.overdue(view("a", seen=NOW - 301), NOW, 0)
    assert follow.verdict([gone], NOW, LIMITS) == ("unreachable", gone)
    assert "a disk that hangs?" in follow.explain("first", "unreachable", gone, [gone], COMMANDS)


def ended(host, code, **facts):
    return view(host, "ended", code=code, **facts)


def left(host, status=None):
    """A host that failed a while ago, in the second attempt unless `status` says otherwise."""
    return ended(host, 1, seen=NOW - 99, status={"attempt": 2} if status is None else status)


def went(host, status=(), state="active", **facts):
    """A host that was in the third attempt when it last told something, a while ago."""
    status = {"state": "running", "attempt": 3, "step": 50, **dict(status)}
    return view(host, state, moved=NOW - 99, status=status, **facts)


@pytest.mark.parametrize(
    ("views", "result", "host"),
    [
        ([view("a"), view("b")], "running", None),
        ([ended("a", 0), view("b")], "running", None),
        ([ended("a", 0), ended("b", 0)], "finished", None),
        ([ended("a", 75), ended("b", 75)], "stopped", None),
        ([ended("a", 5), ended("b", 4)], "failed", "b"),
        ([ended("a", 5), ended("b", None)], "failed", "b"),  # killed without a word
        ([ended("a", 4, seen=NOW - 1), view("b")], "running", None),  # the other may yet tell more
        # It has nothing to tell any more, and has begun no attempt without the first: it hangs.
        ([ended("a", 4, seen=NOW - 21), view("b", moved=NOW - 21)], "failed", "a"),
        ([ended("a", 4, seen=NOW - 21), view("b", moved=NOW - 19)], "running", None),
        # A host that failed alone ends nothing: the others are in a later attempt, however slow that is.
        ([left("a"), went("b")], "running", None),
        ([left("a", {}), went("b", {"attempt": 1})], "running", None),  # it never came to take part
        ([left("a"), went("b", {"state": "starting", "note": "a is gone"})], "running", None),
        ([left("a"), went("b", {"state": "stalled"})], "running", None),
        ([left("a"), went("b", silent_since=NOW - 9)], "running", None),
        ([left("a"), went("b", silent_since=NOW - 301)], "unreachable", "b"),
        ([left("a"), went("b", {"state": "finished"}, state="ended", code=0)], "finished", None),
        ([left("a"), went("b", {"state": "stopped"}, state="ended", code=75)], "stopped", None),
        ([left("a"), went("b", {"state": "failed"}, state="ended", code=3)], "failed", "b"),
        ([left("a"), left("b", {"attempt": 3}), went("c", {"attempt": 4})], "running", None),
        # It was left out of the start that the others have ended, and knows of the one before alone.
        (
            [ended("a", 75, status={"attempt": 1}), went("b", {"state": "finished"}, state="ended", code=0)],
            "finished",
            None,
        ),
        (
            [ended("a", 75, status={"attempt": 1}), went("b", {"state": "failed"}, state="ended", code=3)],
            "failed",
            "b",
        ),
        ([ended("a", 75, status={"attempt": 1}, seen=NOW - 99), went("b")], "running", None),
        # The attempt of b is one of before this start of the run: both wait for each other to begin.
        ([left("a"), went("b", {"state": "starting"})], "failed", "a"),
        ([left("a"), went("b", {"state": "queued"})], "failed", "a"),
        ([ended("a", 5, seen=NOW - 21), view("b", silent_since=NOW - 60)], "failed", "b"),
        ([view("a"), view("b", silent_since=NOW - 299)], "running", None),
        ([view("a"), view("b", silent_since=NOW - 301)], "running", None),  # it goes on without it
        ([view("a", silent_since=NOW - 301), view("b", silent_since=NOW - 301)], "unreachable", "a"),
        ([view("a", silent_since=NOW - 301), view("b", silent_since=NOW - 9)], "running", None),
        ([ended("a", 0, seen=NOW - 9), view("b", silent_since=NOW - 60)], "running", None),
        ([ended("a", 0, seen=NOW - 21), view("b", silent_since=NOW - 60)], "finished", None),
        ([ended("a", 75, seen=NOW - 21), view("b", silent_since=NOW - 60)], "stopped", None),
        ([ended("a", 0, seen=NOW - 21), view("b")], "running", None),
    ],
)
def test_the_verdict(views, result, host):
    what, culprit = follow.verdict(views, NOW, LIMITS)
    assert (what, culprit and culprit.host) == (result, host)


def test_what_a_start_leaves_of_the_attempts_before_is_no_attempt_of_its_own(repository):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    (book,) = re.findall(r'__trainer_closed: "(\{\{.*?\}\})"', (repository / START).read_text())
    known = {"state": "failed", "attempt": 5, "note": "node3 is gone", "reason": "no space left"}
    facts = {"__trainer_host": {"host_facts": {"run_status": known}}}
    status = Templar(loader=DataLoader(), variables=facts).template(trust_as_template(book))
    assert status["attempt"] == 5 and not view("b", status=status).has_gone_on(2)
    assert view("b", status=known).has_gone_on(2)


def test_hosts_that_each_try_alone_leave_nobody_behind():
    views = [ended("a", 1, seen=NOW - 99), view("b", status={"state": "running", "attempt": 1})]
    apart = follow.Limits(settle=20, unreachable=300, apart=True)
    assert follow.verdict(views, NOW, apart) == ("running", None)  # until each has its result
    views[1] = ended("b", 0, status={"state": "finished", "attempt": 1})
    what, culprit = follow.verdict(views, NOW, apart)
    assert (what, culprit.host) == ("failed", "a")


def test_a_host_tells_something_new_or_does_not():
    seen = view("node1")
    follow.read_poll(seen, answer(status={"state": "running", "step": 4}), NOW)
    follow.read_poll(seen, answer(status={"state": "running", "step": 4}), NOW + 5)
    assert (seen.seen, seen.moved) == (NOW + 5, NOW)
    follow.read_poll(seen, answer(metrics='{"step": 5, "loss": 5.0}\n'), NOW + 6)
    assert seen.moved == NOW + 6
    follow.read_poll(seen, answer(status={"state": "saving", "step": 5}), NOW + 7)
    assert seen.moved == NOW + 7


@pytest.mark.parametrize(
    ("keeper", "cure"),
    [("systemd", "`systemctl start trainyard@first` there"), ("process", "the next start")],
)
def test_a_host_that_the_run_goes_on_without_is_named_once_with_its_reason(keeper, cure):
    bad = ended("b", 2, logs={"launch.log": ["old", "error: port 1 is no port"]})
    line = follow.without("first", bad, keeper)
    assert line.startswith(
        "first  warning: b failed, and the run goes on without it: bad input, nothing was started (exit code 2): "
        "error: port 1 is no port; "
    )
    assert cure in line and "\n" not in line
    told = ended("b", 1, status={"state": "failed", "reason": "no space left\nmore"})
    assert ": no space left; " in follow.without("first", told, keeper)
    assert "exit code 1)" not in follow.without("first", ended("b", None), keeper)


def test_the_line_is_of_those_who_go_on_and_the_one_left_behind_is_told_once(monkeypatch, tmp_path):
    views = {
        "a": left("a", {"attempt": 1, "state": "running", "step": 50, "steps": 100}),
        "b": went("b", {"attempt": 2, "step": 41, "steps": 100}),
        "c": ended(
            "c", 75, status={"attempt": 1, "state": "stopped", "step": 60}
        ),  # in the start before this one
    }
    shown = []
    monkeypatch.setattr(follow, "ON_A_TERMINAL", False)
    monkeypatch.setattr(follow.display, "display", lambda text, **how: shown.append(text))
    task = follow.ActionModule.__new__(follow.ActionModule)
    task.run_name, task.keeper, task.hosts = "first", "process", ["a", "b", "c"]
    task.refresh = task.log_every = 0
    task.detach, task.limits, task.commands = False, follow.Limits(), COMMANDS
    rounds = []

    def get(host):
        if host == "b" and rounds.append(host) is None and len(rounds) == 3:
            views["b"] = went("b", {"attempt": 2, "step": 100, "state": "finished"}, state="ended", code=0)
        return follow.asdict(views[host])

    task.spool = SimpleNamespace(get=get, put=lambda *_: None, end_if_alone=lambda: None)
    assert task._draw() == {"result": "finished", "host": "", "message": ""}
    warnings = [line for line in shown if "warning: " in line]
    assert len(warnings) == 1 and "warning: a failed" in warnings[0]
    assert "first  step 41/100 (41 %)  a failed  c stopped" in shown


def test_of_two_failures_the_earlier_is_to_blame():
    views = [ended("a", 1, status={"updated": 20.0}), ended("b", 1, status={"updated": 10.0})]
    assert follow.verdict(views, NOW, LIMITS)[1].host == "b"


def test_the_slowest_host_is_named_only_where_it_matters():
    def hosts(*seconds):
        return [view(f"node{n}", compute_seconds=[s] * 3) for n, s in enumerate(seconds, 1)]

    assert follow.slowest(hosts(1.0, 1.04)) is None
    assert follow.slowest(hosts(1.0, 1.5, 1.2)) == ("node2", 0.5)
    assert follow.slowest(hosts(1.0)) is None


# ---- words ----


def test_a_line_of_progress_says_all():
    running = view(
        "node1",
        status={
            "state": "running",
            "step": 30,
            "steps": 120,
            "eta_seconds": 3725,
            "tokens_per_second": 1234.5,
        },
        last={"step": 30, "loss": 3.25},
        compute_seconds=[1.0],
    )
    slow = view("node2", compute_seconds=[1.5])
    silent = view("node3", silent_since=NOW - 75, compute_seconds=[2.5])  # what it was, counts no more
    assert follow.progress_line("first", [running, slow, silent], NOW) == (
        "first  step 30/120 (25 %)  loss 3.2500  1,234 tokens/s  1 h 2 min left  slowest node2 (+50%)  "
        "node3 unreachable for 1 min 15 s"
    )


def test_a_line_of_progress_says_why_a_run_waits():
    paused = view("a", status={"state": "stalled", "step": 3, "steps": 9, "reason": "paused: no etcd\nmore"})
    assert follow.progress_line("first", [paused], NOW) == "first  step 3/9 (33 %)  stalled  paused: no etcd"
    prepares = view("a", status={"state": "starting", "reason": "tokenising x.jsonl: 34 %, 5 min 0 s left"})
    assert (
        follow.progress_line("first", [prepares], NOW)
        == "first  starting  tokenising x.jsonl: 34 %, 5 min 0 s left"
    )


def test_a_new_attempt_is_news_once():
    views = [
        view("a", status={"attempt": 2, "note": "node3 is gone", "last_checkpoint": 40}),
        view("b", status={"attempt": 1}),
    ]
    attempt, line = follow.news("first", views, 1)
    assert (attempt, line) == (2, "first  attempt 2, from step 40: node3 is gone")
    assert follow.news("first", views, 2) == (2, "")
    assert follow.news("first", [view("a", status={"attempt": 1, "note": None})], 0) == (1, "")


def test_a_line_of_progress_before_the_first_answer():
    line = follow.progress_line("first", [follow.View("node1"), follow.View("node2")], NOW)
    assert line == "first  starting  node1 has not answered yet  node2 has not answered yet"


def test_a_failure_names_host_rank_reason_and_cure():
    bad = ended(
        "node2",
        4,
        status={"state": "failed", "step": 7, "reason": "out of memory: rank 3 on node2 (cuda:1)"},
        logs={
            "rank-2.log": ["lost a peer"],
            "rank-3.log": ["one", "CUDA out of memory"],
            "launch.log": ["x"],
        },
    )
    text = follow.explain("first", "failed", bad, [ended("node1", 5), bad], COMMANDS)
    assert "failed on node2 after step 7: out of memory (exit code 4)" in text
    assert "Last lines of rank-3.log on node2:\n    one\n    CUDA out of memory" in text
    assert "lost a peer" not in text
    assert "node1: it lost its peers (exit code 5)" in text
    assert "Lower micro_batch_size" in text and "RESUME" in text and "runs/first/logs" in text


def test_bad_input_shows_the_launchers_words_and_not_an_old_ranks():
    bad = ended(
        "node1", 2, status={"state": "stopped"}, logs={"rank-0.log": ["old"], "launch.log": ["error: port"]}
    )
    text = follow.explain("first", "failed", bad, [bad], COMMANDS)
    assert "error: port" in text and "old" not in text


def test_a_silent_host_is_blamed_with_those_who_lost_it():
    silent = view("node3", silent_since=NOW - 60)
    text = follow.explain("first", "failed", silent, [ended("node1", 5), silent], COMMANDS)
    assert "failed on node3" in text and "lost as a peer by node1" in text


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (None, "", "killed from outside"),
        (137, "", "killed from outside"),
        (1, "oom-kill", "ran out of memory"),
    ],
)
def test_an_end_without_a_word(code, cause, words):
    assert words in follow.meaning(ended("a", code, cause=cause))[0]


def test_a_log_gets_a_line_now_and_then_and_always_the_last(monkeypatch):
    shown = []
    monkeypatch.setattr(follow, "ON_A_TERMINAL", False)
    monkeypatch.setattr(follow.display, "display", lambda text, **how: shown.append(text))
    screen = follow.Screen(log_every=10)
    for second in range(25):
        screen.draw(f"step {second}", NOW + second, last=second == 24)
    assert shown == ["step 0", "step 10", "step 20", "step 24"]


def test_a_terminal_gets_one_line_that_is_redrawn(monkeypatch):
    shown = []
    monkeypatch.setattr(follow, "ON_A_TERMINAL", True)
    monkeypatch.setattr(follow.display, "columns", 30)
    monkeypatch.setattr(follow.display, "display", lambda text, **how: shown.append((text, how["newline"])))
    screen = follow.Screen(log_every=10)
    for line, last in (("step 1", False), ("step 1", False), ("step 2" + " " * 99, False), ("done", True)):
        screen.draw(line, NOW, last)
    assert [(text[:10], end) for text, end in shown] == [
        ("\r\x1b[Kstep 1", False),
        ("\r\x1b[Kstep 2", False),
        ("\r\x1b[Kdone", True),
    ]
    assert all(len(text) <= 30 + 4 for text, _ in shown)


def test_where_a_region_shows_it_each_host_has_a_line_too(monkeypatch):
    shown = []
    monkeypatch.setattr(follow, "ON_A_TERMINAL", True)
    monkeypatch.setattr(follow.display, "columns", 30)
    monkeypatch.setattr(follow.display, "led_by_region", True, raising=False)
    monkeypatch.setattr(follow.display, "display", lambda text, **how: shown.append((text, how["newline"])))
    screen = follow.Screen(log_every=10)
    for words, last in (("running", False), ("running", False), ("saving", False), ("finished", True)):
        screen.draw("step 1", NOW, last, rows=[("a", words), ("b", "running")])
    assert shown == [
        ("\r\x1b[Kstep 1\na\trunning\nb\trunning", False),
        ("\r\x1b[Kstep 1\na\tsaving\nb\trunning", False),
        ("\r\x1b[Kstep 1", True),
    ]


def test_what_a_host_does_now():
    status = {"state": "running", "step": 3}
    last = {"step": 3, "step_seconds": 0.5, "memory_peak_bytes": 3 << 30}
    at_work = view("a", status=status, last=last, compute_seconds=[0.2, 0.3])
    assert follow.host_line(at_work, NOW) == "running, computes 0.25 s of a step's 0.5 s, 3.0 GiB"
    assert follow.host_line(view("a", status=status), NOW) == "running"
    loads = {"state": "starting", "reason": "loading the model\nand more"}
    assert follow.host_line(view("a", status=loads), NOW) == "starting: loading the model"
    assert follow.host_line(view("a"), NOW) == "starting"
    assert follow.host_line(view("a", state="unknown"), NOW) == "has not answered yet"
    assert follow.host_line(view("a", silent_since=NOW - 65), NOW) == "unreachable for 1 min 5 s"
    assert follow.host_line(ended("a", 4), NOW) == "failed"


def test_a_run_is_left_to_itself_once_it_has_made_a_step_or_waits_for_others():
    """The status of an earlier attempt, which a run that is resumed still has, is not taken for this one's."""
    view = follow.View("node1")
    for status, expected in (
        ({}, False),
        ({"state": "starting", "step": 7}, False),
        ({"state": "running", "step": 0}, False),
        ({"state": "running", "step": 1}, True),
        ({"state": "stopped", "step": 9}, False),
        ({"state": "queued"}, False),  # the other has not said so yet
    ):
        view.status = status
        assert bool(follow.under_way([follow.View("node2"), view])) is expected
    dead = follow.View("node3", silent_since=NOW)
    assert follow.under_way([follow.View("node2", status={"state": "queued"}), view, dead])
    view.state = "ended"
    assert follow.explain("first", "running", None, [view], COMMANDS).startswith(
        "Run first goes on. Watch it: "
    )


def test_a_host_whose_job_was_cancelled_has_time_to_say_so(monkeypatch):
    """stop.yml cancels it once, and writes the end on each host, at its own pace."""
    clock = [1000.0]
    monkeypatch.setattr(follow.time, "time", lambda: clock[0])
    one = object.__new__(follow.ActionModule)
    one.keeper, one.run_name, one.run_dir, one.view, one.wordless = (
        "systemd",
        "r",
        "/r",
        follow.View("a"),
        None,
    )
    said = {"code": "", "status": {"state": "queued"}}

    def ask(command):
        head = f"ActiveState=inactive\nExecMainStatus={said['code']}\n"
        return f"{head}::status\n{json.dumps(said['status'])}\n::metrics 0\n"

    one._ask = ask
    one._poll_once()
    assert one.view.result == "running"
    clock[0] += 5
    said.update(code="75", status={"state": "stopped"})
    one._poll_once()
    assert one.view.result == "stopped"
    said.update(code="", status={"state": "queued"})
    one.view, one.wordless = follow.View("a"), None
    for seconds, result in ((0, "running"), (10, "running"), (10, "failed")):
        clock[0] += seconds
        monkeypatch.setattr(follow, "read_logs", lambda answer: {})
        one._poll_once()
        assert one.view.result == result


@pytest.fixture
def polled(monkeypatch):
    """`polled(seconds, status, **keeper)`: what the follower knows of a host after a poll, so much later."""
    clock = [NOW]
    monkeypatch.setattr(follow.time, "time", lambda: clock[0])
    one = object.__new__(follow.ActionModule)
    one.keeper, one.run_name, one.run_dir, one.wordless = "systemd", "first", "/r", None
    one.view = follow.View("a")

    def poll(seconds, status, **keeper):
        clock[0] += seconds
        said = answer(status=status, **{"ExecMainStatus": 0, run_keeper.RAN: 0, **keeper})
        one._ask = lambda command: said if "::keeper" in command else ""
        one._poll_once()
        return one.view

    return poll


def test_a_host_that_reboots_is_followed_on(polled):
    running = {"state": "running", "step": 5, "steps": 9}
    leaves = {**running, "state": "restarting", "reason": "a shuts down; it takes part again when it is back"}
    polled(0, running, state="active")
    for seconds, status, keeper in (
        (2, leaves, {"ExecMainStatus": 75, run_keeper.RAN: 88}),  # it shuts down; SSH still answers
        (2, leaves, {}),  # systemd has unloaded its unit
        (90, leaves, {"Job": 7}),  # SSH is up; the unit waits for the network
        (200, leaves, {"Job": 7}),
        (2, running, {"Job": 7}),  # a power cut: nobody has written anything
        (2, {}, {"Job": 7}),  # nor can its status be read
        (2, running, {"Job": ""}),
        (100, running, {}),
    ):
        seen = polled(seconds, status, **{"state": "inactive", **keeper})
        assert (seen.state, seen.result) == ("active", "running")
        assert follow.verdict([seen], follow.time.time(), LIMITS) == ("running", None)
        assert follow.host_line(seen, NOW) == "waits to start again"
        assert follow.progress_line("first", [seen], NOW).endswith("  a waits to start again")
    seen = polled(2, running, state="active")
    assert follow.host_line(seen, NOW) == "running" and not seen.due
    assert polled(2, {**running, "state": "finished"}, state="inactive").result == "finished"


def test_a_unit_that_never_starts_ends_the_patience_with_what_to_look_at(polled):
    status = {"run": "first", "state": "running", "step": 5}
    for seconds in (0, follow.BOOT - 1):
        assert polled(seconds, status, state="inactive").result == "running"
    seen = polled(2, status, state="inactive")
    assert follow.verdict([seen], follow.time.time(), LIMITS) == ("failed", seen)
    text = follow.explain("first", "failed", seen, [seen], COMMANDS)
    assert "failed on a after step 5: its unit does not run, and nothing says that the run has ended" in text
    assert "systemctl status trainyard@first; journalctl -b -u trainyard@first." in text and "RESUME" in text
    assert follow.host_line(seen, NOW) == "failed"


def test_an_exit_that_was_seen_is_believed_at_once_whatever_the_status_says(polled):
    """The disk is full, or this is a process group, whose exit code is its own word."""
    assert polled(0, {"state": "running"}, state="inactive", **{run_keeper.RAN: 88}).result == "finished"
    assert polled(1, {}, state="failed", ExecMainStatus=4, **{run_keeper.RAN: 88}).result == "failed"
    seen = view("node1")
    follow.read_poll(seen, answer("inactive", {"state": "running"}, ExecMainStatus=0), NOW)
    assert (seen.result, seen.due) == ("finished", False)


def test_what_a_run_says_moves_no_terminal(monkeypatch):
    """A log may hold anything: a clipboard's new content, a prompt for a password."""
    told = []
    monkeypatch.setattr(follow.display, "display", lambda text, **_: told.append(text))
    screen = follow.Screen(log_every=10)
    screen.tell("rank 0: \x1b]52;c;cm0gLXJm\x07\x1b[2JBECOME password: ")
    screen.draw("step 1\x1b[8m", 0.0, True, [("node1\x1b[1A", "runs")])
    assert len(told) == 2 and all("\x1b" not in one.removeprefix("\r\x1b[K") for one in told)
    assert "rank 0: BECOME password: " in told[0]


def test_who_breaks_off_a_smoke_test_is_not_told_that_the_run_goes_on():
    from plugins.callback import run_interrupt

    def task(*files):
        """One that these files lead to, the innermost first."""
        found = SimpleNamespace(args={"run": "x"}, _parent=None)
        inner = found
        for file in files:
            inner._parent = SimpleNamespace(args={"_raw_params": file}, _parent=None)
            inner = inner._parent
        return found

    assert run_interrupt.is_trial(task("follow.yml", "trial.yml"))
    assert not run_interrupt.is_trial(task("follow.yml"))
    preflight = task("follow.yml")
    preflight._parent._parent = SimpleNamespace(args={"name": "trainer", "tasks_from": "trial"}, _parent=None)
    assert run_interrupt.is_trial(preflight)


@pytest.mark.parametrize("smoke", [True, False])
def test_what_ctrl_c_says_at_each_moment(smoke, monkeypatch):
    from plugins.callback import run_interrupt

    stand_in = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda *_: signal.default_int_handler)
    monkeypatch.setattr(run_interrupt, "signal", stand_in)
    told = []
    callback = run_interrupt.CallbackModule()
    callback._display = SimpleNamespace(display=told.append)

    def at(action, *files):
        above = None
        for file in reversed(files):
            above = SimpleNamespace(args={"_raw_params": file}, _parent=above)
        callback.v2_playbook_on_task_start(SimpleNamespace(action=action, args={}, _parent=above), False)
        told.clear()
        with pytest.raises(KeyboardInterrupt):
            callback._interrupted(signal.SIGINT, None)
        return "".join(told)

    trial = ("follow.yml", "trial.yml")
    assert "The trial ends by itself. Type" in at("run_follow", *trial)  # preflight's, of no run
    assert at("preflight_verdict") == ""
    callback = run_interrupt.CallbackModule()
    callback._display = SimpleNamespace(display=told.append)
    commands = {"follow": "FOLLOW", "stop": "STOP", "resume": "RESUME"}
    asked = SimpleNamespace(action="run_config")
    callback.v2_runner_on_ok(SimpleNamespace(task=asked, result={"run": "first", "commands": commands}))
    if smoke:
        assert "run first was not started" in at("run_follow", *trial)
        assert "run first was not started" in at("file", "trial.yml")
        assert "Run first may have been started" in at("run_host", "start.yml")
    for action in ("run_follow", "run_report"):  # it goes on while its results come, too
        assert "Run first goes on" in at(action) and "RESUME" in told[0]


def test_a_worker_whose_ansible_is_gone_with_its_terminal_ends(tmp_path, monkeypatch):
    """It polls for as long as a run lasts, and nobody would see what it says."""
    monkeypatch.setattr(follow.C, "DEFAULT_LOCAL_TMP", str(tmp_path))

    def worker():
        spool = follow.Spool("task")
        (tmp_path / "worker").write_text(str(os.getpid()))
        while True:
            spool.end_if_alone()
            (tmp_path / "looks").open("a").write(".")
            time.sleep(0.02)

    def ansible():
        multiprocessing.get_context("fork").Process(target=worker).start()
        time.sleep(60)

    parent = multiprocessing.get_context("fork").Process(target=ansible)
    parent.start()
    looks = tmp_path / "looks"
    wait_until(lambda: looks.exists() and looks.stat().st_size > 3)
    pid = int((tmp_path / "worker").read_text())
    parent.kill()
    parent.join()
    wait_until(lambda: not alive(pid))


def wait_until(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
