"""What is told of a long command on a host: read off what it shows, left in a file, and fetched beside it."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ansible.errors import AnsibleActionFail

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "plugins/module_utils"), str(ROOT)]

import how_far  # noqa: E402
import live_frame  # noqa: E402
import meanwhile  # noqa: E402
import part_files  # noqa: E402

from plugins.action import fetch_told, run_aside, trainer_command  # noqa: E402
from plugins.module_utils.host_runs import NO_ANSWER, within  # noqa: E402

APT = """\
Reading package lists...
The following NEW packages will be installed:
  hello libhello
0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.
Need to get 41.5 MB of archives.
"""


def heard(stream, text):
    """`now()` after each line of `text` that changed it."""
    said = [stream.now()]
    for line in text.splitlines():
        stream.hear(line)
        said += [stream.now()] if stream.now() != said[-1] else []
    return said


# ---- apt ----


def test_of_apt_bytes_are_told_and_then_the_share_that_is_installed(tmp_path):
    status = """\
dlstatus:1:20.4819:Retrieving file 1 of 2 (3s remaining)
dlstatus:2:100:Retrieving file 2 of 2
pmstatus:dpkg-exec:0.0000:Running dpkg
pmstatus:hello:33.3333:Unpacking hello (amd64)
pmstatus:hello:77.7778:Setting up hello: a word (amd64)
"""
    assert heard(how_far.Apt("working it out", str(tmp_path)), APT + status) == [
        "working it out",
        "downloading, 8 of 42 MB",
        "downloading, 42 of 42 MB",
        "0 %, running dpkg",
        "33 %, unpacking hello (amd64)",
        "78 %, setting up hello: a word (amd64)",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Need to get 1,041 kB/41.5 MB of archives.\ndlstatus:1:50:x", "downloading, 1 of 1 MB"),
        ("Need to get 0 B of archives.\ndlstatus:1:50:x", "first"),
        ("dlstatus:1:50:x", "first"),
        ("pmstatus:a:lots:x", "first"),
        ("pmstatus:a", "first"),
        (
            "Waiting for cache lock: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (dpkg)...",
            "waiting for process 7 (dpkg), which holds apt's lock",
        ),
    ],
)
def test_what_apt_says_otherwise_is_understood_or_left_alone(tmp_path, line, words):
    assert heard(how_far.Apt("first", str(tmp_path)), line)[-1] == words


def test_of_dkms_the_compiled_files_are_counted_while_it_is_at_work(tmp_path):
    build = tmp_path / "nvidia-current/535.261.03/build"
    (build / "nvidia").mkdir(parents=True)
    for name in ("nvidia/nv.c", "nvidia/os.c", "nvidia.mod.c", "nvidia.o", "nvidia/nv.h", "other.o"):
        (build / name).touch()
    apt = how_far.Apt("", str(tmp_path))
    apt.hear("pmstatus:nvidia-kernel-dkms:50:Setting up nvidia-kernel-dkms (amd64)")
    assert apt.now() == "50 %, setting up nvidia-kernel-dkms (amd64)"
    (build / "make.log").touch()
    assert apt.now() == "compiling nvidia-current 535.261.03"
    (build / "nvidia/nv.o").touch()
    assert apt.now() == "compiling nvidia-current 535.261.03, 1 of 2 files"
    os.utime(build / "make.log", (apt.began - 9, apt.began - 9))  # what an earlier build left that failed
    assert apt.now().startswith("50 %")


# ---- pip ----


def test_of_pip_the_packages_are_told_and_the_bytes_of_a_large_one(tmp_path):
    there = []
    pip = how_far.Pip(str(tmp_path), lambda: there, wanted=4)
    text = """\
Ignoring colorama: markers 'sys_platform == "win32"' don't match your environment
Collecting alpha==1.0 (from -r /x/requirements.txt (line 1))
  Downloading https://index/packages/alpha-1.0-py3-none-any.whl (131 kB)
  Downloading https://index/packages/alpha-1.0-py3-none-any.whl.metadata (13 kB)
  Using cached beta_b-2.0-py3-none-any.whl (11.5 MB)
"""
    assert heard(pip, text) == [
        "asking the package index",
        "0 of 3 packages, downloading alpha",
        "1 of 3 packages, taking beta-b",
    ]
    pip.hear("  Downloading https://index/torch-2.13.0%2Bcu128-cp311-cp311-linux_x86_64.whl (821.2 MB)")
    assert pip.now() == "2 of 3 packages, downloading torch"  # not begun
    (tmp_path / "pip-unpack-a1").mkdir()
    with open(tmp_path / "pip-unpack-a1/torch-2.13.0+cu128-cp311-cp311-linux_x86_64.whl", "wb") as file:
        file.truncate(312_000_000)
    assert pip.now() == "torch: 312 of 821 MB"
    pip.hear("Installing collected packages: alpha, Beta_B, torch")
    assert pip.now() == "0 of 3 packages, installing alpha"
    there += ["alpha", "beta-b"]
    assert pip.now() == "2 of 3 packages, installing torch"
    there.append("torch")
    assert pip.now() == "3 of 3 packages, installed"
    pip.list, there[:] = ["torch"], []  # of one alone a bar would stand at its begin
    assert pip.now() == "installing torch"


def test_where_nobody_knows_how_many_packages_there_will_be_there_is_no_share(tmp_path):
    pip = how_far.Pip(str(tmp_path), list)
    assert (
        heard(pip, "Processing ./my wheels/alpha-1.0-py3-none-any.whl (from -r x (line 1))")[-1]
        == "taking alpha"
    )


# ---- the command and its file ----


def test_a_command_is_heard_line_by_line_and_looked_at_meanwhile():
    reading, writing = os.pipe()
    script = f"echo one; printf 'two\\r\\n' >&2; echo status >&{writing}; sleep 2.3; printf three; exit 7"
    heard, looks = [], []
    with open(reading, "rb") as status:
        process = subprocess.Popen(
            ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[writing]
        )
        os.close(writing)
        code, output = how_far.followed(process, heard.append, lambda: looks.append(1), [status.fileno()])
    assert (code, output) == (7, "one\ntwo\nthree")
    assert {"one", "two", "status"} <= set(heard) and len(looks) == 2


def test_a_daemon_that_a_command_leaves_behind_is_not_waited_for():
    begun = time.monotonic()
    process = subprocess.Popen(["sh", "-c", "sleep 30 & echo $!"], stdout=subprocess.PIPE)
    code, output = how_far.followed(process, lambda line: None, lambda: None)
    os.kill(int(output), signal.SIGKILL)
    assert code == 0 and time.monotonic() - begun < 10


def test_a_note_is_one_that_everybody_may_read_and_is_gone_in_the_end(tmp_path):
    note = how_far.Note(str(tmp_path / "note"))
    old = os.umask(0o077)
    try:
        note.say("half way")
    finally:
        os.umask(old)
    assert (tmp_path / "note").read_text() == "half way"
    assert stat.S_IMODE((tmp_path / "note").stat().st_mode) == 0o644
    before = (tmp_path / "note").stat().st_ino
    note.say("half way")
    assert (tmp_path / "note").stat().st_ino == before
    (tmp_path / "note.new").symlink_to(tmp_path / "elsewhere")  # left, or laid there
    note.say("")
    note.say("further")
    assert (tmp_path / "note").read_text() == "further" and not (tmp_path / "elsewhere").exists()
    note.close()
    assert list(tmp_path.iterdir()) == []
    note.close()


def test_bytes_that_come_are_told_once_a_second(monkeypatch, tmp_path):
    counted = how_far.Counted(how_far.Note(str(tmp_path / "note")), int(100e6), int(400e6))
    said = []
    for look in (1, 60, 0):
        monkeypatch.setattr(how_far, "LOOK", look)
        counted.came(int(50e6))
        said.append((tmp_path / "note").read_text())
    assert said == ["150 of 400 MB have come", "150 of 400 MB have come", "250 of 400 MB have come"]


def test_a_note_that_cannot_be_written_is_no_fault(tmp_path):
    for path in ("", str(tmp_path / "nowhere/note")):
        note = how_far.Note(path)
        note.say("half way")
        note.close()


# An apt-get that says how far it is, and waits until somebody has read that.
FAKE_APT = """\
#!/bin/bash
for one; do [[ $one == APT::Status-Fd=* ]] && fd=${one#*=}; done
echo "Need to get 100 MB of archives."
echo "dlstatus:1:25:Retrieving" >&$fd
for n in {1..100}; do [ -e "$0.read" ] && exit 0; sleep 0.1; done
exit 1
"""


def test_what_apt_does_stands_in_the_note_while_it_does_it(load_module, tmp_path, monkeypatch):
    packages = load_module("packages")
    program = tmp_path / "apt-get"
    program.write_text(FAKE_APT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(packages, "NOTE", how_far.Note(str(tmp_path / "note")))
    seen = []

    def reader():
        deadline = time.monotonic() + 8
        while "MB" not in "".join(seen) and time.monotonic() < deadline:
            time.sleep(0.1)
            seen.append((tmp_path / "note").read_text() if (tmp_path / "note").exists() else "")
        (tmp_path / "apt-get.read").touch()

    thread = threading.Thread(target=reader)
    thread.start()
    packages.apt_install(["hello"], 60)
    thread.join()
    assert seen[-1] == "downloading, 25 of 100 MB"


FAKE_DKMS = """\
#!/bin/bash
[ "$*" = "autoinstall -k 6.1" ] || exit 9
mkdir -p "$0.d/nvidia/535/build" && cd "$0.d/nvidia/535/build" && touch make.log a.c b.c a.o
sleep 1.5
echo "Error! Bad return status" >&2
exit 10
"""


def test_what_dkms_compiles_stands_in_the_note_while_it_does_it(load_module, tmp_path, monkeypatch):
    program = tmp_path / "dkms"
    program.write_text(FAKE_DKMS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    note = how_far.Note(str(tmp_path / "note"))
    code, output = load_module("dkms_build").build("6.1", note, f"{program}.d")
    assert (code, output) == (10, "Error! Bad return status\n")
    assert (tmp_path / "note").read_text() == "compiling nvidia 535, 1 of 2 files"


# ---- the controller's side ----


def test_of_what_comes_here_the_file_that_grows_counts_too(tmp_path):
    coming = meanwhile.Coming(int(400e6))
    coming.done, coming.growing = int(100e6), tmp_path / "part"
    assert coming.words() == "100 of 400 MB have come"
    with open(tmp_path / "part", "wb") as file:
        file.truncate(50_000_000)
    assert coming.words() == "150 of 400 MB have come"
    coming.total = int(1e6)  # which is here at once
    assert coming.words() == ""


def test_a_fetch_says_how_much_of_its_file_is_here(tmp_path, monkeypatch):
    def run(action, tmp, task_vars):
        action._execute_remote_stat("/there/model", all_vars=task_vars)
        action._connection.fetch_file("/there/model", str(tmp_path / "model"))
        return action.words

    def fetch(source, dest):
        assert (tmp_path / "model").read_text() == "the one before"
        Path(dest).touch()
        os.truncate(dest, 100_000_000)
        action.words = action.coming.words()
        if cut:
            raise OSError("the wire is cut")

    monkeypatch.setattr(fetch_told.Fetch, "run", run)
    monkeypatch.setattr(
        fetch_told.Fetch, "_execute_remote_stat", lambda *args, **options: {"size": 400_000_000}
    )
    action = object.__new__(fetch_told.ActionModule)
    action._task = SimpleNamespace(args={"dest": "model"})
    action._loader = SimpleNamespace(path_dwim=lambda path: str(tmp_path / path))
    action._connection = SimpleNamespace(fetch_file=fetch)
    (tmp_path / "model").write_text("the one before")
    cut = True
    with pytest.raises(OSError, match="cut"):
        action.run(task_vars={"inventory_hostname": "node1"})
    assert (tmp_path / "model").read_text() == "the one before" and action._connection.fetch_file is fetch
    cut = False
    assert action.run(task_vars={"inventory_hostname": "node1"}) == "100 of 400 MB have come"
    assert (tmp_path / "model").stat().st_size == 100_000_000 and os.listdir(tmp_path) == ["model"]


def test_what_this_machine_has_no_room_for_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_told.Fetch, "_execute_remote_stat", lambda *args, **options: {"size": 1 << 60})
    action = object.__new__(fetch_told.ActionModule)
    action.coming = fetch_told.Coming()
    action._task = SimpleNamespace(args={"dest": "runs/r/model"})
    action._loader = SimpleNamespace(path_dwim=lambda path: str(tmp_path / path))
    with pytest.raises(AnsibleActionFail) as refused:
        action._execute_remote_stat("/there/model")
    words = (
        "/there/model: found 1152921504.6 GB, and ",
        f"B free on this machine, in {tmp_path}; expected room",
    )
    assert all(one in str(refused.value) for one in words) and not (tmp_path / "runs").exists()
    # What is here already is not fetched again.
    (tmp_path / "runs/r").mkdir(parents=True)
    (tmp_path / "runs/r/model").write_text("words")
    here = {"size": 1 << 60, "checksum": fetch_told.checksum(str(tmp_path / "runs/r/model"))}
    monkeypatch.setattr(fetch_told.Fetch, "_execute_remote_stat", lambda *args, **options: here)
    assert action._execute_remote_stat("/there/model") == here


def test_two_that_bring_the_same_file_at_once_do_not_spoil_it_for_each_other(tmp_path, monkeypatch):
    """As two terminals that follow a run do at its end."""
    dest, pid = tmp_path / "rank-0.log", os.getpid()
    monkeypatch.setattr(
        fetch_told.Fetch, "run", lambda action, *_: action._connection.fetch_file("/x", str(dest))
    )

    def bring(fetch):
        action = object.__new__(fetch_told.ActionModule)
        action._connection = SimpleNamespace(fetch_file=fetch)
        action.run(task_vars={"inventory_hostname": "node1"})

    def other(source, part):
        Path(part).write_text("whole")

    def slow(source, part):
        Path(part).write_text("wh")
        monkeypatch.setattr(os, "getpid", os.getppid)  # another process, which lives
        bring(other)
        assert dest.read_text() == "whole" and Path(part).read_text() == "wh"
        monkeypatch.setattr(os, "getpid", lambda: pid)
        Path(part).write_text("whole")

    bring(slow)
    assert dest.read_text() == "whole" and os.listdir(tmp_path) == ["rank-0.log"]


def test_what_was_killed_leaves_no_part_for_ever(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    here, old = os.uname().nodename, time.time() - 100_000
    kept = {
        f".model.{here}-{os.getppid()}.part": None,  # its process lives
        ".model.elsewhere-7.part": None,  # another machine's, on a disk of the network, that grows
        f".model.bin.{here}-{dead.pid}.part": None,  # another file's
        "model": None,
    }
    gone = {
        f".model.{here}-{dead.pid}.part": None,
        ".model.elsewhere-8.part": old,
        ".model.part": old,  # of a release before
    }
    for name, changed in {**kept, **gone}.items():
        (tmp_path / name).touch()
        if changed:
            os.utime(tmp_path / name, (changed, changed))
    part_files.sweep(str(tmp_path / "model"))
    assert set(os.listdir(tmp_path)) == set(kept)
    part_files.sweep(str(tmp_path / "none/model"))


def test_all_that_a_run_left_is_brought_so():
    tasks = yaml.safe_load((ROOT / "roles/trainer/tasks/collect.yml").read_text())
    names = {task["name"] for task in tasks if "fetch_told" in task}
    assert names == {"Bring the logs", "Bring the metrics and the model"}
    assert not any("ansible.builtin.fetch" in task for task in tasks)
    # With the file itself for `dest`, of which it tells how much is here.
    assert not any(task["fetch_told"]["dest"].endswith("/") for task in tasks if "fetch_told" in task)


def test_how_a_runs_metrics_begin_is_read_from_no_link_and_waits_at_no_pipe(tmp_path):
    tasks = yaml.safe_load((ROOT / "roles/trainer/tasks/collect.yml").read_text())
    (asked,) = (
        task["ansible.builtin.command"]["argv"] for task in tasks if "ansible.builtin.command" in task
    )
    command = [word.replace("{{ _trainer_run_dir }}", str(tmp_path)) for word in asked]
    path = tmp_path / "metrics.jsonl"

    def said():
        code, out, _ = within(20, command)
        assert code != NO_ANSWER
        return out

    path.write_text('{"launch": "L1"}\n')
    assert said() == '{"launch": "L1"}\n'
    path.rename(tmp_path / "another's")
    path.symlink_to(tmp_path / "another's")
    assert said() == ""
    path.unlink()
    os.mkfifo(path)
    assert said() == ""
    path.unlink()
    with path.open("w") as file:
        file.truncate(1 << 40)
    assert len(said()) == 1 << 16


def test_how_far_a_command_is_is_asked_at_no_pipe(tmp_path, monkeypatch):
    """The service user keeps that file, and who runs as it may put another in its place."""
    action = trainer_command.ActionModule.__new__(trainer_command.ActionModule)
    action._task = SimpleNamespace(args={"arguments": ["fetch"], "progress": str(tmp_path / "fetching")})
    monkeypatch.setattr(trainer_command.ActionBase, "run", lambda self, tmp, variables: {})
    asked = []
    monkeypatch.setattr(action, "_tell", lambda read, host, over: asked.append(read), raising=False)
    monkeypatch.setattr(action, "_execute_module", lambda **how: {}, raising=False)
    action.run(task_vars={"inventory_hostname": "node1"})
    (tmp_path / "fetching").write_text("3 5")
    assert within(20, ["sh", "-c", asked[0]])[:2] == (0, "3 5")
    (tmp_path / "fetching").unlink()
    os.mkfifo(tmp_path / "fetching")
    assert within(20, ["sh", "-c", asked[0]])[:2] == (0, "")


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, as (text, how); the clock of the telling is quick."""
    texts = []
    monkeypatch.setattr(meanwhile.display, "display", lambda text, **how: texts.append((text, how)))
    monkeypatch.setattr(meanwhile.display, "led_by_region", True, raising=False)
    monkeypatch.setattr(meanwhile, "SHOWN", 0.05)
    monkeypatch.setattr(meanwhile, "TOLD", 0.3)
    return texts


def wait_for(what):
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_region_has_each_look_and_a_log_the_seldom_ones(shown):
    answers = iter(["", "1 of 3 MB\nnode9\tforged", "2 of 3\tMB"])
    with meanwhile.told("node1", lambda: next(answers, "2 of 3 MB")):
        wait_for(lambda: any("log_only" in how for _, how in shown))
    rows = [text for text, how in shown if how == {"newline": False, "screen_only": True}]
    assert rows[0] == "\r\nnode1\t1 of 3 MB node9   forged"
    assert rows[-1] == "\r\nnode1\t2 of 3 MB"
    assert next(text for text, how in shown if "log_only" in how).startswith("node1: 2 of 3")
    board = live_frame.Board()
    board.begin("A play", 0, 0.0)
    board.start("node1", "Task", "uuid", 0.0)
    assert board.takes(rows[-1], False, 5.0)
    assert board.lines((80, 24), 5.0)[1] == "  node1  Task  [#############-------] 2 of 3 MB  5 s"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("compiling nvidia 535, 50 of 200 files", "compiling nvidia 535, 100 of 200 files"), "20 s"),
        (("1 of 9 packages, downloading a", "5 of 9 packages, downloading e"), "10 s"),
    ],
)
def test_of_files_and_packages_the_time_left_is_told_at_the_rate_so_far(words, left):
    board = live_frame.Board()
    board.begin("A play", 0, 0.0)
    board.start("node1", "Build", "uuid", 0.0)
    for number, one in enumerate(words):
        assert board.takes(f"\r\nnode1\t{one}", False, 10.0 * number)
    assert board.lines((120, 24), 10.0)[1].endswith(f"] {words[-1]}, {left} left  10 s")


def test_elsewhere_there_is_a_line_now_and_then_where_it_is_news(shown, monkeypatch):
    monkeypatch.setattr(meanwhile.display, "led_by_region", False)
    looks = []
    with meanwhile.told("node1", lambda: looks.append(1) or "installing"):
        wait_for(lambda: len(looks) > 2)
    assert shown == [("node1: installing", {"log_only": False})]


def test_what_is_done_at_once_is_never_looked_at(shown, monkeypatch):
    monkeypatch.setattr(meanwhile, "SHOWN", 5.0)
    looks = []
    with meanwhile.told("node1", lambda: looks.append(1) or "x"):
        pass
    assert not looks and not shown


def test_a_host_that_does_not_answer_now_is_asked_again(shown):
    answers = iter([OSError("x"), meanwhile.AnsibleError("y"), "half"])

    def read():
        if isinstance(one := next(answers, "half"), Exception):
            raise one
        return one

    with meanwhile.told("node1", read):
        wait_for(lambda: shown)


def test_a_signal_waits_until_the_line_is_printed(shown, monkeypatch):
    """Ansible ends a worker by one; it must not hold the queue to the main process then."""
    order, printing = [], threading.Event()

    def display(text, **how):
        printing.set()
        time.sleep(0.3)
        order.append("printed")

    monkeypatch.setattr(meanwhile.display, "display", display)
    before = signal.signal(signal.SIGTERM, lambda number, frame: order.append("ended"))
    try:
        with meanwhile.told("node1", lambda: "half"):
            assert printing.wait(10)
            os.kill(os.getpid(), signal.SIGTERM)
            assert order[:2] == ["printed", "ended"]
        assert signal.getsignal(signal.SIGTERM)(0, None) is None and order[-1] == "ended"
    finally:
        signal.signal(signal.SIGTERM, before)


class Connection:
    def __init__(self, transport, persistent, answer):
        self.transport, self._persistent, self.answer, self.asked = transport, persistent, answer, []

    def exec_command(self, command, sudoable):
        self.asked.append((command, sudoable))
        return self.answer


@pytest.mark.parametrize(
    ("transport", "persistent", "answer", "words"),
    [
        ("ssh", True, (0, b"half \xff", b""), "half \ufffd"),
        ("local", False, (0, b"half", b""), "half"),
        ("ssh", True, (1, b"cat: no such", b""), ""),
        ("ssh", False, None, ""),  # each look would be a login
    ],
)
def test_a_look_never_costs_a_login(transport, persistent, answer, words):
    class Action:
        _connection = Connection(transport, persistent, answer)

    assert meanwhile.file_on_host(Action, "/run/a b")() == words
    assert all(one == ("cat '/run/a b' 2>/dev/null", False) for one in Action._connection.asked)
    assert bool(Action._connection.asked) == (answer is not None)


def test_another_runs_results_are_kept_aside_and_told(tmp_path, monkeypatch):
    """And of a start that came to nothing there is nothing to keep."""
    said = []
    monkeypatch.setattr(run_aside.display, "display", said.append)
    monkeypatch.setattr(run_aside.ActionBase, "run", lambda self, tmp, task_vars: {})

    def act(check=False, **more):
        action = object.__new__(run_aside.ActionModule)
        action._task = SimpleNamespace(
            args={"results": str(tmp_path / "runs/first"), **more}, check_mode=check
        )
        return action.run(task_vars={})

    assert act() == {"changed": False, "kept": ""}
    (tmp_path / "runs/first/model").mkdir(parents=True)
    (tmp_path / "runs/first/logs").mkdir()
    assert act(check=True)["changed"] and (tmp_path / "runs/first/model").exists()
    kept = act()["kept"]
    assert re.fullmatch(rf"{tmp_path}/runs/first\.before-\d{{8}}-\d{{6}}", kept)
    assert (Path(kept) / "model").exists() and not (tmp_path / "runs/first").exists()
    assert len(said) == 2 and "would be kept as" in said[0]
    assert all("holds another run of this name" in text and "kept as" in text for text in said)
    (tmp_path / "runs/first/logs").mkdir(parents=True)
    assert act() == {"changed": False, "kept": ""}
    # One that goes on or is followed again: what is here of it stays, and what is of another's does not.
    (tmp_path / "runs/first/model").mkdir()
    assert not act(begins="a")["changed"]
    (tmp_path / "runs/first/metrics.jsonl").write_text('{"launch": "L1", "time": 1.5}\n{"launch": "L2"}\n')
    for line in (
        '{"launch": "L1", "time": 1.7}',
        '{"time": 1.7}',
        "",
        "[1]",
        "{cut",
    ):  # another host's, and none
        assert not act(begins=line)["changed"]
    assert act(begins='{"launch": "L2", "time": 1.5}', check=True)["changed"]
