"""What a user sees of a playbook: at a terminal, through a pipe, in a log; and how it ends."""

import importlib.util
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("take_pictures", ROOT / "scripts/take_pictures.py")
take_pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take_pictures)

PROGRAM = str(Path(sys.executable).with_name("ansible-playbook"))
COLOUR = re.compile(r"\x1b\[[\d;]*m")
SECRET, REFUSAL = "hunter2", "node9: found nothing; expected a host.\n  Write one."
WARNING = "its disk is nearly full. Remove a run."
WARNER = f"""
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({{}})
module.warn({WARNING!r})
module.exit_json()
"""
TASKS = [
    {"name": "Begin", "ansible.builtin.command": "true"},
    {"name": "Warn", "warner": {}, "when": "inventory_hostname != 'node3'"},
    {"name": "Warn as roles do", "ansible.builtin.debug": {"msg": "WARNING: its clock is off."}},
    {"name": "Nothing to do", "ansible.builtin.command": "true", "changed_when": False},
    {"name": "Left out", "ansible.builtin.command": "true", "when": False},
    {"name": "Ignored", "ansible.builtin.command": "false", "ignore_errors": True},
    {
        "name": "Tried",
        "block": [{"name": "Rescued", "ansible.builtin.fail": {"msg": "it was rescued"}}],
        "rescue": [{"name": "Come to the rescue", "ansible.builtin.debug": {"msg": "saved"}}],
    },
    {"name": "A table", "tell": {"text": "a  b\n1  2"}, "run_once": True},
    {"name": "A secret", "ansible.builtin.command": f"echo {SECRET}", "no_log": True},
    {
        "name": "On one alone",
        "ansible.builtin.command": "sleep {{ pause }}",
        "when": "inventory_hostname == 'node2'",
    },
    {
        "name": "A loop",
        "ansible.builtin.command": "{{ item }}",
        "loop": ["true", "false"],
        "when": "inventory_hostname == 'node3'",
    },
    {"name": "Refuse", "ansible.builtin.fail": {"msg": REFUSAL}},
]


@pytest.fixture
def place(tmp_path):
    """A directory with three hosts, which are this machine, in `hosts`, and TASKS in `play.yml`."""
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    variables["pause"] = 0
    hosts = {"all": {"hosts": {f"node{n}": {} for n in (1, 2, 3)}, "vars": variables}}
    (tmp_path / "hosts").write_text(yaml.safe_dump(hosts))
    (tmp_path / "made").mkdir()
    (tmp_path / "library").mkdir()
    (tmp_path / "library/warner.py").write_text(WARNER)
    write(tmp_path, TASKS)
    return tmp_path


def write(place, tasks):
    play = {"name": "A play", "hosts": "all", "gather_facts": False, "tasks": tasks}
    (place / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))


def environment(place, **more):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ANSIBLE_") and name != "NO_COLOR"
    }
    settings = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_HOME": str(place / "ansible"),
        "LANG": "C.UTF-8",
    }
    return {**kept, **settings, "TERM": "xterm-256color", **more}


def command(place, *arguments):
    return [PROGRAM, "-i", str(place / "hosts"), str(place / "play.yml"), *arguments]


def piped(place, *arguments, **more):
    return subprocess.run(
        command(place, *arguments),
        cwd=place,
        env=environment(place, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )


def at_a_terminal(place, *arguments, when=None, type_=b"", silent=False, **more):
    """(exit status, text) at a terminal of 80 x 24; `type_` is typed once it has shown `when`.

    silent: after each two seconds in which it shows nothing more, which is how long it may take until it listens.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.chdir(place)
        os.execvpe(PROGRAM, command(place, *arguments), environment(place, **more))
    text, deadline, typed = b"", time.monotonic() + 400, False
    while True:
        assert time.monotonic() < deadline, text.decode()
        if select.select([terminal], [], [], 2.0)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # the terminal's other end is closed
                break
            quiet = False
        else:
            quiet = True
        if when and when in text and (quiet if silent else not typed):
            os.write(terminal, type_)
            typed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


def screen(text):
    """The rows that are left at such a terminal, in the end."""
    cast = [{"version": 2, "width": 80, "height": 24}, [0, "o", text]]
    rows, *_ = take_pictures.rows_of("\n".join(map(json.dumps, cast)))
    return ["".join(words for _, words in row[-1][1]) for row in rows]


EXPECTED = """
== A play
changed  node1 node2 node3: Begin
node1 node2 node3: WARNING: its clock is off.
node1 node2 node3: saved

a  b
1  2
changed  node1 node2 node3: A secret
changed  node2: On one alone
failed   node3: A loop
    false: non-zero return code
failed   node1: Refuse
    node9: found nothing; expected a host.
      Write one.
failed   node2: Refuse: the same

WARN  node1, node2: its disk is nearly full. Remove a run.
WARN  node1, node2, node3: its clock is off.
FAIL  node3: A loop: false: non-zero return code
FAIL  node1, node2: Refuse: node9: found nothing; expected a host.

node1  8 ok, 3 changed, 1 failed
node2  8 ok, 4 changed, 1 failed
node3  6 ok, 3 changed, 1 failed
Failed after TIME
More words: the same command with -v
"""


def settled(rows):
    """Rows without what differs from one run to the next: which host comes first to a task, and the time it took; and
    without Ansible's own of a warning, which goes to standard error.
    """
    text = re.sub(r"(failed   )node\d(: Refuse\n)", r"\1node1\2", "\n".join(rows))
    text = re.sub(r"(failed   )node\d(: Refuse: the same)", r"\1node2\2", text)
    text = text.replace(f"[WARNING]: {WARNING}\n", "")
    return re.sub(r"Failed after .*", "Failed after TIME", text)


def test_through_a_pipe_it_is_plain_lines_and_each_once(place):
    log = place / "log"
    done = piped(place, ANSIBLE_LOG_PATH=str(log))
    assert done.returncode == 2, done.stdout + done.stderr
    assert settled(done.stdout.split("\n")) == EXPECTED
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", done.stdout), "control characters in a pipe"
    assert done.stderr == f"[WARNING]: {WARNING}\n" and SECRET not in done.stdout
    logged = log.read_text()
    assert "| changed  node1 node2 node3: Begin\n" in logged and "\x1b" not in logged
    assert logged.count("found nothing; expected a host.\n") == 2 and SECRET not in logged
    assert f"| WARN  node1, node2: {WARNING}\n" in logged


def test_at_a_terminal_the_same_stays_and_the_region_leaves_nothing(place):
    code, text = at_a_terminal(place, "-e", "pause=3")
    assert code == 2
    assert settled([*screen(text), ""]) == EXPECTED
    frames = COLOUR.sub("", text)
    assert re.search(
        r"\[#+-+\] task \d+ of 12  A play  \d+ s\x1b\[K\r\n  node2  On one alone  [2-9] s", frames
    )
    assert "\x1b[0;33mchanged  node1" in text and "\x1b[0;31mfailed " in text
    assert "\x1b[1;35mWARN  node1, node2: " in text and "\x1b[0;31mFAIL  node3" in text
    assert set(re.findall(r"\x1b\[[^A-Za-z]*([A-Za-z])", text)) <= set("mKJA"), (
        "something that must be restored"
    )
    assert SECRET not in text


@pytest.mark.parametrize(
    ("setting", "coloured"),
    [
        ({"NO_COLOR": "1"}, False),
        ({"ANSIBLE_NOCOLOR": "1"}, False),
        ({"TERM": "dumb", "NO_COLOR": "1"}, False),
    ],
)
def test_without_colour_there_is_none(place, setting, coloured):
    write(place, TASKS[:1])
    code, text = at_a_terminal(place, **setting)
    assert code == 0 and bool(COLOUR.search(text)) == coloured
    assert ("\x1b" in text) == ("TERM" not in setting)  # a dumb terminal gets lines
    assert "changed  node1 node2 node3: Begin" in screen(text)


def test_of_a_host_that_failed_early_the_end_says_why_and_how_many_are_well(place):
    fail = {"name": "Try", "ansible.builtin.fail": {"msg": "found a; expected b.\nWrite b."}}
    ignored = {"name": "Ignore", "ansible.builtin.fail": {"msg": "no"}, "ignore_errors": True}
    tasks = [ignored, {**fail, "when": "inventory_hostname == 'node2'"}, TASKS[0]]
    write(place, tasks)
    end = "\n\nPASS  2 hosts\nFAIL  node2: Try: found a; expected b.\n      Write b.\n\nnode1  2 ok"
    assert end in piped(place, NO_COLOR="1").stdout
    write(place, [ignored, {**TASKS[0], "changed_when": False}])
    quiet = piped(place).stdout
    assert quiet.startswith("\n== A play\n\nnode1  2 ok, 0 changed\n"), quiet


def test_the_others_of_a_play_that_was_cut_short_are_not_said_to_have_passed(place):
    fail = {"name": "Try", "ansible.builtin.fail": {"msg": "no"}, "when": "inventory_hostname == 'node2'"}
    write(place, [{**fail, "any_errors_fatal": True}, TASKS[0]])
    assert "PASS  2 hosts, as far as they came\nFAIL  node2: Try: no\n" in piped(place).stdout


TEMPORARY = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({})
made = module.tmpdir
module.warn("a second one")
module.exit_json(made=made)
"""


def test_that_ansible_makes_a_directory_for_root_s_modules_is_no_news(place):
    (place / "library/warner.py").write_text(TEMPORARY)
    write(place, [{**TASKS[1], "when": "inventory_hostname == 'node1'"}])
    own = {"ANSIBLE_REMOTE_TMP": str(place / "made/anew"), "ANSIBLE_PIPELINING": "1"}
    said = piped(place, **own)
    assert said.stdout.count("WARN") == said.stderr.count("WARN") == 1, said
    assert "did not exist" not in said.stdout + said.stderr and (place / "made/anew").is_dir()
    own |= {"ANSIBLE_REMOTE_TMP": str(place / "another"), "ANSIBLE_STDOUT_CALLBACK": "default"}
    assert "did not exist" in piped(place, **own).stderr


VERDICT = """
from ansible.plugins.action import ActionBase
class ActionModule(ActionBase):
    _requires_connection = False
    def run(self, tmp=None, task_vars=None):
        return {"failed": True, "exit_status": 2, "msg": "What to do stands above.", "warnings": ["a full disk"]}
"""


def test_what_preflight_found_is_not_told_again(place):
    (place / "preflight_verdict.py").write_text(VERDICT)
    write(place, [{"name": "Judge", "preflight_verdict": {}, "run_once": True}])
    said = piped(place, ANSIBLE_ACTION_PLUGINS=str(place)).stdout
    assert (
        "failed   node1: Judge\n    What to do stands above.\n\nWARN  node1: a full disk\n\nnode1  0 ok"
        in said
    )


def test_colour_can_be_forced_into_a_pipe(place):
    write(place, TASKS[:1])
    done = piped(place, ANSIBLE_FORCE_COLOR="1")
    assert "\x1b[0;33mchanged  node1 node2 node3: Begin\x1b[0m" in done.stdout and "\x1b[K" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "setting"), [(["-v"], {}), ([], {"ANSIBLE_STDOUT_CALLBACK": "default"})]
)
def test_ansibles_own_output_is_one_setting_away(place, arguments, setting):
    write(place, TASKS[:1])
    code, text = at_a_terminal(place, *arguments, **setting)
    text = COLOUR.sub("", text)
    assert code == 0 and "PLAY RECAP" in text and "changed: [node1]" in text and "\x1b" not in text


def test_ctrl_c_wipes_the_region_and_ends_as_ansible_does(place):
    code, text = at_a_terminal(place, "-e", "pause=300", when=b"On one alone  3 s", type_=b"\x03")
    assert code == 99
    rows = screen(text)
    assert "changed  node1 node2 node3: A secret" in rows and "User interrupted execution" in rows[-1]
    assert not any("task " in row or "On one alone" in row for row in rows)


def test_a_question_stands_alone_until_it_is_answered(place):
    """Nothing is drawn meanwhile: else there would be no silence. The host is called like the first answer."""
    ask = {"name": "Ask", "reset_consent": {"hosts": ["yes"]}, "run_once": True}
    write(place, [ask, {"name": "Wait", "ansible.builtin.command": "sleep 2"}])
    code, text = at_a_terminal(place, when=b"from one host? (yes or no): ", type_=b"yes\r", silent=True)
    assert code == 0, text
    assert "type the names of the hosts (yes): " in text
    assert "task 2 of 2" in text


def test_a_fault_in_it_brings_ansibles_own_and_the_playbook_goes_on(place):
    broken = place / "plugins/callback"
    broken.mkdir(parents=True)
    (place / "plugins/module_utils").symlink_to(ROOT / "plugins/module_utils")
    (place / "trainer").symlink_to(ROOT / "trainer")
    text = (ROOT / "plugins/callback/live.py").read_text()
    head = "def spoken(self, result) -> None:\n"
    assert head in text
    (broken / "live.py").write_text(text.replace(head, f"{head}        raise KeyError('x')\n"))
    shutil.copy(ROOT / "plugins/callback/exit_status.py", broken)
    done = piped(place, ANSIBLE_CALLBACK_PLUGINS=str(broken))
    assert done.returncode == 2
    assert "changed  node1 node2 node3: Begin" in done.stdout
    assert "the callback live stops" in done.stderr and "KeyError" in done.stderr
    assert "changed: [node2]" in done.stdout and "PLAY RECAP" in done.stdout


@pytest.mark.full
def test_check_mode_handlers_retries_and_the_free_strategy(place):
    tasks = [
        {"name": "Notify", "ansible.builtin.command": "true", "notify": "Handle"},
        {"name": "Retry", "ansible.builtin.command": "false", "register": "r", "until": "r.rc == 0", "retries": 1,
         "delay": 0, "failed_when": False},
        {"name": "In the background", "ansible.builtin.command": "true", "async": 30, "poll": 1},
        {"name": "Included", "ansible.builtin.include_tasks": str(place / "more.yml")},
        {"ansible.builtin.meta": "flush_handlers"},
        {"name": "Write", "diff": True, "ansible.builtin.copy":
            {"content": "new\x1b[2J\n", "dest": str(place / "made/{{ inventory_hostname }}")}},
    ]  # fmt: skip
    (place / "more.yml").write_text(
        yaml.safe_dump([{"name": "More", "ansible.builtin.debug": {"msg": "more"}}])
    )
    play = {"name": "A play", "hosts": "all", "gather_facts": False, "strategy": "free", "tasks": tasks}
    play["handlers"] = [{"name": "Handle", "ansible.builtin.command": "true"}]
    (place / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))
    done = piped(place)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    for what in ("changed  {}: Notify", "changed  {}: In the background", "changed  {}: Handle", "{}: more"):
        told = re.findall("^" + re.escape(what).replace(r"\{\}", "([^:]*)") + "$", done.stdout, re.M)
        assert sorted(" ".join(told).split()) == ["node1", "node2", "node3"], (what, done.stdout)
    assert not re.search("RETRYING|ASYNC|included:|skipping|\x1b", done.stdout)
    for node in ("node1", "node2", "node3"):
        head = f"differs  {node}: Write\n--- before\n+++ after: {place}/made/{node}\n"
        assert f"{head}@@ -0,0 +1 @@\n+new\n" in done.stdout
    checked = piped(place, "--check")
    assert "Check mode: it says what would change" in checked.stdout and checked.returncode == 0
    listed = piped(place, "--list-tasks")
    assert listed.returncode == 0 and "Retry" in listed.stdout and "== A play" not in listed.stdout


# An interpreter whose pip takes its time: a large wheel comes, and is installed.
SLOW_PYTHON = """\
#!{real} -I
import json, os, shutil, sys, time
words = sys.argv[2:]
if words[:2] == ["-m", "venv"]:
    os.makedirs(words[2] + "/bin")
    os.makedirs(words[2] + "/lib/python3/site-packages/")
    shutil.copy(sys.argv[0], words[2] + "/bin/python")
elif words[:3] == ["-m", "pip", "install"] and "--requirement" not in words:
    print("  Downloading torch-2.0-py3-none-any.whl (400.0 MB)", flush=True)
    os.makedirs(os.environ["TMPDIR"] + "/pip-unpack-x", exist_ok=True)
    for part in range(1, 5):
        with open(os.environ["TMPDIR"] + "/pip-unpack-x/torch-2.0-py3-none-any.whl", "wb") as file:
            file.truncate(part * 100_000_000)
        time.sleep({pause})
    print("Installing collected packages: torch", flush=True)
elif words[:1] == ["-c"]:
    markers = {{"python_version": "3.11", "platform_machine": "x86_64", "python_full_version": "3.11.0"}}
    print(json.dumps({{"executable": sys.argv[0], "venv": True, "glibc": "2.36", "markers": markers}}))
"""
BUILD = {
    "name": "Build it",
    "python_env": {
        "dir": "{{ place }}/env/{{ inventory_hostname }}",
        "lock": "alpha==1.0",
        "torch": "torch==2.0",
        "python": "{{ place }}/slow python",
        "source": "index",
    },
}


@pytest.fixture
def building(place):
    """`building(pause)`: each host builds an environment, for four times that many seconds."""

    def prepare(pause):
        (place / "slow python").write_text(SLOW_PYTHON.format(real=sys.executable, pause=pause))
        (place / "slow python").chmod(0o755)
        write(place, [BUILD])
        return "-e", json.dumps({"place": str(place)})

    return prepare


@pytest.mark.full
def test_at_a_terminal_a_long_task_says_how_far_it_is_and_in_a_log_hardly(place, building):
    log = place / "log"
    arguments = building(2)
    code, text = at_a_terminal(place, *arguments, ANSIBLE_LOG_PATH=str(log))
    assert code == 0, text
    for host in ("node1", "node2", "node3"):
        assert re.search(
            rf"  {host}  (Build it  )?\[[#-]+\] torch: \d00 of 400 MB(, \d+ s left)?  \d+ s\x1b\[K",
            COLOUR.sub("", text),
        )
    assert re.search(r"torch: [34]00 of 400 MB, \d+ s left", text)
    assert "changed  node1 node2 node3: Build it" in screen(text) and "torch:" not in "".join(screen(text))
    assert "torch:" not in log.read_text()
    assert not list((place / "env").glob("*/.progress*"))
    done = piped(place, *arguments)
    assert done.returncode == 0 and "node1  1 ok, 0 changed" in done.stdout, done.stdout + done.stderr
    assert "MB" not in done.stdout and "building" not in done.stdout


@pytest.mark.full
def test_ctrl_c_ends_a_long_task_that_says_how_far_it_is_and_the_next_run_completes_it(place, building):
    arguments = building(3)
    begun = time.monotonic()
    code, text = at_a_terminal(place, *arguments, when=b"of 400 MB", type_=b"\x03")
    assert code == 99 and time.monotonic() - begun < 11
    assert "of 400 MB" not in "".join(screen(text))
    done = piped(place, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 ok, 1 changed" in done.stdout and "1 failed" not in done.stdout
