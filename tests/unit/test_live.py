"""The lines that site.yml and train.yml show while they work: what fits, what is cleaned away, and how it is drawn."""

import io
import json
import re
import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible import constants as C
from ansible.module_utils._internal._messages import DeprecationSummary, Event, EventChain, WarningSummary

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins/module_utils"))

import live_frame as live  # noqa: E402
from live_found import Found, short, warning  # noqa: E402
from live_plan import after_site  # noqa: E402
from live_region import Region  # noqa: E402
from telling import brought, row, same_hosts, with_rows  # noqa: E402

from plugins.action import bench_verdict, preflight_verdict, run_report  # noqa: E402
from plugins.callback.live import CallbackModule  # noqa: E402

NOW = 1000.0


def board(*hosts, play="Every host", tasks=10, at=4):
    """A board on which each of `hosts`, (name, task, seconds since), is busy."""
    made = live.Board()
    made.begin(play, tasks, NOW - 90)
    made.at = at
    for name, task, since in hosts:
        made.start(name, task, f"uuid of {task}", NOW - since)
    return made


# ---- what a terminal may have ----


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 漢字, 🙂", "plain, größer, 漢字, 🙂"),
        ("red \x1b[31mred\x1b[0m", "red red"),
        ("title \x1b]0;owned\x07 gone", "title  gone"),
        ("bell\x07 back\x08 \x9b2J", "bell? back? ?2J"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("exe\u202etxt.sh \u2066x", "exe?txt.sh ?x"),
        ("half \udc80", "half ?"),
        ("lone \x1b", "lone "),
    ],
)
def test_what_a_terminal_would_obey_is_cleaned_away(text, shown):
    assert live.clean(text) == shown
    assert live.cleaned({"before": [text], "n": 1}) == {"before": [shown], "n": 1}


EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\rpass  "


@pytest.fixture
def printed(monkeypatch):
    """What actions display: (text, colour) each."""
    found = []
    for action in (bench_verdict, preflight_verdict, run_report):
        show = lambda text, color=None, **how: found.append((text, color))  # noqa: E731
        monkeypatch.setattr(action, "display", SimpleNamespace(display=show, warning=show))
        monkeypatch.setattr(action.ActionBase, "run", lambda self, tmp, variables: {})
    return found


def act(module, variables=None, **args):
    """An action's answer, in check mode."""
    action = object.__new__(module.ActionModule)
    action._task, action._loader = SimpleNamespace(args=args, check_mode=True), None
    return action.run(task_vars=variables or {})


def test_what_hosts_say_in_a_report_moves_no_terminal(printed, monkeypatch, tmp_path):
    where = {"results": str(tmp_path), "began": 0}
    seen = {"__preflight_seen": {"survey": {"link": None}}, "__bench_collectives": {"msg": f"no room{EVIL}"}}
    act(bench_verdict, {"hostvars": {"a": seen}}, hosts=["a"], **where)
    assert "a: collectives: no room" in printed[0][0]
    found = {"result": preflight_verdict.FAIL, "exit_status": 2, "counts": {}, "checks": []}
    monkeypatch.setattr(preflight_verdict, "report", lambda *facts: found)
    monkeypatch.setattr(
        preflight_verdict, "text", lambda found: f"pass  disk  well\nFAIL  link: a: lost{EVIL}"
    )
    monkeypatch.setattr(preflight_verdict, "run_room", lambda *words: (0, []))
    asked = {"hosts": [], "members": [], "limits": {}, "words": {}, "copies": 1, "device": "auto", **where}
    act(preflight_verdict, {"groups": {}}, **asked)
    ours = preflight_verdict.COLOURS
    assert ("pass  disk  well", ours["pass"]) in printed and ours["FAIL"] in dict(printed).values()
    (tmp_path / "summary.json").write_text(json.dumps({"steps": f"3{EVIL}"}))
    more = {"generate": "g", "export": "e", "local": False}
    act(run_report, run="first", results=str(tmp_path), **more)
    assert "Run first finished: 3" in printed[-1][0]
    assert not set("\x1b\x07\x9b\u202e\r") & set("".join(text for text, _ in printed))


def test_a_warning_of_ansibles_about_a_host_moves_no_terminal():
    """As it comes, and as it stands in the end; whatever a module of a host has put into it."""
    chain = EventChain(msg_reason="", traceback_reason="", event=Event(msg=f"because{EVIL}"))
    event = Event(msg=f"its disk{EVIL}", help_text=f"Remove{EVIL}", chain=chain, events=(Event(msg=EVIL),))
    shown = []
    display = SimpleNamespace(_warning=shown.append, _deprecated=shown.append)
    result = SimpleNamespace(
        warnings=[WarningSummary(event=event)],
        deprecations=[DeprecationSummary(event=event, version=f"3{EVIL}")],
        result={"warnings": ["x"], "deprecations": ["x"]},
        host=SimpleNamespace(get_name=lambda: "a"),
    )
    callback = SimpleNamespace(_display=display, found=Found(), _handle_warnings=lambda result: None)
    CallbackModule.warn(callback, result)
    assert [type(one) for one in shown] == [WarningSummary, DeprecationSummary] and not result.result
    assert shown[0].event.msg.startswith("its disk?") and shown[0].event.chain.event.msg.startswith(
        "because?"
    )
    told = "\n".join([*map(repr, shown), *map(str, callback.found.lines([], list))])
    assert not re.search(r"\\x1b|\\x07|\\x9b|\\u202e|\\r", told)


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("漢字漢字", 8, "漢字漢字"),
        ("漢字漢字", 7, "漢字漢…"),
        ("漢字漢字", 6, "漢字…"),
        ("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301"),
        ("two\nlines\tand", 40, "two lines   and"),
        ("abc", 1, "…"),
    ],
)
def test_lines_are_cut_by_columns_not_characters(text, columns, shown):
    assert live.cut(text, columns) == shown
    assert live.columns_of(live.cut(text, columns)) <= columns


# ---- the board ----


def test_each_host_has_a_line_of_what_it_does_and_since_when():
    shown = board(("node1", "network : Write netplan", 5), ("node10", "network : Write netplan", 125))
    assert shown.lines((80, 24), NOW) == [
        "[######--------------] task 4 of 10  Every host  1 min 30 s",
        "  node1   network : Write netplan  5 s",
        "  node10  network : Write netplan  2 min 5 s",
    ]


def test_hosts_keep_their_order_and_leave_when_they_are_done():
    shown = board(("b", "x", 1), ("a", "x", 1))
    shown.start("b", "y", "uuid", NOW)
    assert [line.split()[0] for line in shown.lines((80, 24), NOW)[1:]] == ["b", "a"]
    shown.end("b")
    shown.end("b")
    assert [line.split()[0] for line in shown.lines((80, 24), NOW)[1:]] == ["a"]
    shown.end("a")
    assert shown.lines((80, 24), NOW) == []


@pytest.mark.parametrize("size", [(80, 24), (20, 5), (200, 60), (5, 1), (1, 1)])
def test_every_line_fits_and_so_do_all(size):
    names = [f"host-{n}-of-a-long-name.漢字.example" for n in range(100)]
    lines = board(*((name, "role : " + "a long task " * 20, n) for n, name in enumerate(names))).lines(
        size, NOW
    )
    assert len(lines) <= max(3, size[1] - live.KEPT_ROWS)
    assert all(live.columns_of(line) <= max(1, size[0] - 1) for line in lines)
    assert not any("\n" in line for line in lines)


def test_of_many_hosts_the_longest_at_it_are_shown_and_the_rest_counted():
    lines = board(*((f"h{n}", "x", n) for n in range(100))).lines((80, 24), NOW)
    assert len(lines) == 24 - live.KEPT_ROWS
    assert [line.split()[0] for line in lines[1:3]] == ["h99", "h98"]
    assert lines[-1] == f"  … and {100 - len(lines) + 2} more hosts, not so long at it"
    few = board(*((f"h{n}", "x", n) for n in range(19))).lines((80, 24), NOW)
    assert len(few) == 20 and "more hosts" not in few[-1]


def test_a_name_can_write_no_line_of_its_own():
    (_, line) = board(("evil\x1b[2J\nfatal", "t\x1b[1Aask\r\nx", 1)).lines((80, 24), NOW)
    assert line == "  evil fatal  task x  1 s"


def test_a_long_name_of_a_play_leaves_room_for_the_time():
    (line, _) = board(("a", "x", 1), play="A long name of a play, and on").lines((60, 24), NOW)
    assert line == "[######--------------] task 4 of 10  A long na…  1 min 30 s"


def test_a_play_without_known_tasks_has_no_bar():
    assert board(("a", "x", 1), tasks=0, at=0).lines((80, 24), NOW)[0] == "Every host  1 min 30 s"


# ---- how far it is ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("first  step 3/24 (12 %)  loss 3.2", (3, 24)),
        ("1,500 of 2,000 MB have come", (1500, 2000)),
        ("loss 3.2", None),
        ("step 5/0", None),
        ("9 of 3", None),
    ],
)
def test_a_share_is_read_where_there_is_one(text, found):
    assert live.share(text) == found


@pytest.mark.parametrize(("done", "total", "full"), [(0, 4, 0), (1, 4, 5), (4, 4, 20), (9, 4, 20), (1, 0, 0)])
def test_a_bar_is_as_full_as_the_share(done, total, full):
    assert live.bar(done, total) == f"[{'#' * full}{'-' * (20 - full)}]"


def test_bytes_that_come_to_a_host_are_a_bar_with_the_time_left_at_the_rate_so_far():
    shown = board(("node1", "Bring it", 60), ("node2", "Bring it", 60))
    assert shown.takes(brought("node1", 500e6, 2000e6), True, NOW - 50)
    assert shown.lines((99, 24), NOW - 50)[1].endswith(
        "[#####---------------] 500 of 2,000 MB have come  10 s"
    )
    assert shown.takes(brought("node1", 1000e6, 2000e6), True, NOW)
    assert (
        "[##########----------] 1,000 of 2,000 MB have come, 1 min 40 s left  1 min 0 s"
        in (
            shown.lines((120, 24), NOW)[1]  # 500 MB in 50 s, and 1,000 are left
        )
    )
    assert "MB" not in shown.lines((120, 24), NOW)[2]
    assert not shown.takes(brought("node3", 1, 2e6), True, NOW)  # not busy: a line like any other
    assert not shown.takes("node1: reaches no package index; bringing 3 wheels, 500 MB", True, NOW)


def test_a_percentage_is_a_bar_without_a_time():
    shown = board(("node1", "Install", 60))
    for percent, since in ((10, 50), (40, 0)):
        shown.takes(row("node1", f"{percent} %, setting up 3 of 4"), False, NOW - since)
    assert shown.lines((99, 24), NOW)[1] == (
        "  node1  Install  [########------------] 40 %, setting up 3 of 4  1 min 0 s"
    )
    shown.takes(row("node1", "at 40 %"), False, NOW)
    assert shown.lines((99, 24), NOW)[1] == "  node1  Install  at 40 %  1 min 0 s"


def test_how_far_the_tokenising_is_is_a_bar_for_all_and_for_a_host():
    """As train.yml's follower tells it: the run's line, and those of hosts that say something else."""
    shown = board(("node1", "Follow", 60), ("node2", "Follow", 60))
    words = "tokenising x.jsonl: 35 %, 5 min 0 s left"
    shown.takes(f"first  starting  {words}", False, NOW)
    assert shown.lines((99, 24), NOW)[0] == "[#######-------------]"
    shown.takes(f"first  starting{row('node1', f'starting  {words}')}", False, NOW)
    assert f"[#######-------------] starting  {words}" in shown.lines((99, 24), NOW)[1]


def test_each_total_has_a_time_of_its_own():
    shown = board(("node1", "Install", 60))

    def told(words, since):
        shown.takes(row("node1", words), False, NOW - since)
        return shown.lines((120, 24), NOW - since)[1]

    assert "left" not in told("a, 5 of 10 MB", 50)
    assert "10 MB, 5 s left" in told("a, 9 of 10 MB", 30)
    assert "left" not in told("b, 100 of 400 MB", 20)
    assert "400 MB, 20 s left" in told("b, 200 of 400 MB", 10)
    assert "left" not in told("c, 10 of 400 MB", 5)
    assert "400 MB, 3 s left" in told("c, 250 of 400 MB", 0)
    # As many packages are downloaded, and then installed, faster.
    told("0 of 9 packages, downloading a", 50)
    told("8 of 9 packages, downloading i", 30)
    assert "left" not in told("0 of 9 packages, installing a", 20)
    assert "5 of 9 packages, installing e, 8 s left" in told("5 of 9 packages, installing e", 10)


def test_how_far_a_task_is_goes_before_its_name():
    shown = board(("node1", "python_env : Have the locked environment (it takes minutes)", 60))
    shown.takes(row("node1", "50 %, installing a"), False, NOW)
    for columns, line in (
        (80, "  node1  python_env : Ha…  [##########----------] 50 %, installing a  1 min 0 s"),
        (70, "  node1  [##########----------] 50 %, installing a  1 min 0 s"),
        (60, "  node1  [#####-----] 50 %, installing a  1 min 0 s"),
        (40, "  node1  [#####-----] 50 %,…  1 min 0 s"),
    ):
        assert shown.lines((columns, 24), NOW)[1] == line, columns


def test_a_line_that_is_written_over_takes_the_boards_place_until_its_last():
    shown = board(("node1", "Follow", 1))
    assert shown.takes("\r\x1b[Kfirst  step 12/24 (50 %)  3 s left", False, NOW)
    assert shown.lines((80, 24), NOW) == ["[##########----------]", "first  step 12/24 (50 %)  3 s left"]
    assert all(live.columns_of(line) < 20 for line in shown.lines((20, 24), NOW))
    assert not shown.takes("something else is told", True, NOW)
    assert shown.note
    assert not shown.takes("\r\x1b[Kfirst  finished", True, NOW)
    assert not shown.note


def test_below_a_line_that_is_written_over_stand_the_hosts_that_it_tells_of():
    shown = board(("node1", "Follow", 60), ("node2", "Follow", 60), ("node3", "Follow", 60))
    far = with_rows("\r\x1b[Kfirst  step 12/24", [("node2", "loading\x1b[2J it"), ("node1", "3 of 12 files")])
    assert shown.takes(far, False, NOW)
    assert shown.lines((80, 24), NOW) == [
        "[##########----------]",
        "first  step 12/24",
        "  node1  [#####---------------] 3 of 12 files",
        "  node2  loading it",
    ]
    shown.takes(with_rows("\rfirst  step 13/24", [("node1", "running"), ("stranger", "x")]), False, NOW)
    assert shown.lines((80, 24), NOW)[2:] == ["  node1  running", "  node2  loading it"]
    assert len(shown.lines((80, 8), NOW)) == 4  # there is room for four, and for three:
    assert shown.lines((80, 7), NOW)[2:] == ["  … and 2 more hosts, not so long at it"]
    assert not shown.takes("\r\x1b[Kfirst  finished", True, NOW)
    assert "Follow" in shown.lines((80, 24), NOW)[1]


# ---- what stays ----


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"msg": "Nothing was changed.\n  - node1"}, "Nothing was changed.\n  - node1"),
        (
            {"msg": "non-zero return code", "stderr": "no\nroom\n", "stdout": "x"},
            "non-zero return code\nno\nroom",
        ),
        ({"msg": "it says: no room", "stderr": "no room"}, "it says: no room"),
        ({"msg": ["a", "b"]}, "a\nb"),
        ({"censored": "hidden"}, "hidden"),
        ({}, "it failed, and says nothing of why"),
        (
            {"msg": "x\x1b[31m", "stdout": "\n".join(map(str, range(40)))},
            "x\n" + "\n".join(map(str, range(25, 40))),
        ),
    ],
)
def test_why_a_task_failed_is_said_in_full(result, text):
    assert live.failure_text(result) == text


def test_of_a_loop_the_items_that_failed_are_named():
    items = [
        {"item": "a"},
        {"item": "b", "failed": True, "msg": "no"},
        {"_ansible_item_label": "c", "failed": True},
    ]
    assert live.failures({"msg": "One or more items failed", "results": items}) == [
        "b: no",
        "c: it failed, and says nothing of why",
    ]
    assert live.failures({"msg": "no such list", "results": []}) == ["no such list"]


def test_of_facts_the_module_says_why_and_a_host_without_python_has_its_cure():
    def gathered(**words):
        name = "ansible.legacy.setup"
        told = {"msg": f"The following modules failed to execute: {name}.", "failed_modules": {name: words}}
        return "\n".join(live.failures(told))

    missing = "The module interpreter '/usr/bin/python3' was not found."
    assert gathered(msg="no room on /home", rc=1) == "no room on /home"
    assert gathered(msg=missing, module_stderr="/bin/sh: 1: /usr/bin/python3: not found").splitlines()[
        :2
    ] == [
        missing,
        "/bin/sh: 1: /usr/bin/python3: not found",
    ]
    assert "apt-get install python3" in gathered(msg=missing)


def test_hosts_are_folded_and_the_recap_has_a_line_each():
    assert live.folded([f"h{n}" for n in range(11)]) == "h0 h1 h2 h3 h4 h5 h6 h7 and 3 more"
    none = {"ok": 1, "changed": 0, "failures": 0, "unreachable": 0}
    assert live.recap({"a": none, "漢字": {**none, "failures": 2, "unreachable": 1}}) == [
        "a     1 ok, 0 changed",
        "漢字  1 ok, 0 changed, 2 failed, 1 unreachable",
    ]
    assert live.recap({}) == []


# ---- what was found, in the end ----


def told(found, *hosts, last=""):
    """What is told of `found`, where these hosts are well but for that."""
    return [line for _, line in found.lines(hosts, sorted, last)]


def test_warnings_and_failures_are_told_together_the_worst_last():
    found = Found()
    assert told(found, "a", "b") == []
    for host in ("b", "a", "a"):
        found.warn(host, f"{host}: its clock is off.\nSet it.")
    found.warn("a", "another\x1b[2J")
    found.fail("c", "1", "Try", "found x; expected y. Write y.")
    assert told(found, "a", "b", "d") == [
        "PASS  1 host",
        "WARN  a, b: its clock is off.\n      Set it.",
        "WARN  a: another",
        "FAIL  c: Try: found x; expected y. Write y.",
    ]
    assert [kind for kind, _ in found.lines([], sorted)] == ["WARN", "WARN", "FAIL"]
    found.cut_short = True
    assert told(found, "d", "e")[0] == "PASS  2 hosts, as far as they came"


def test_of_a_failure_that_stands_on_the_screen_one_sentence_is_told_again():
    found = Found()
    words = "to: found x.y; expected z. Write `z`.\n  Like this."
    for uuid in ("1", "2"):
        found.fail("a", uuid, "Try", words)
    assert told(found, last="2") == [
        "FAIL  a: Try: to: found x.y; expected z. Write `z`.\n        Like this.",
        "FAIL  a: Try: to: found x.y; expected z.",
    ]


def test_of_a_long_failure_the_begin_and_the_end_are_told():
    assert short("1\n2\n3\n4", False) == "1\n2\n3\n4"
    assert short("1\n2\n3\n4\n5", False) == "1\n2\n…\n5"


def test_what_a_role_says_is_a_warning_where_it_begins_so():
    assert warning("WARNING: node1: its clock is off") == "node1: its clock is off"
    assert warning("it said WARNING: no") == ""


def test_many_hosts_of_one_warning_are_counted():
    found = Found()
    for number in range(12):
        found.warn(f"h{number:02}", "x")
    assert told(found) == ["WARN  h00, h01, h02, h03, h04, h05, h06, h07 and 4 more: x"]


def test_the_next_commands_mean_the_same_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = {"inventory": [str(tmp_path / "inventory/my lab"), "a,"], "become_ask_pass": True, "tags": ["all"]}
    assert same_hosts(cli) == ["-i", "inventory/my lab", "-i", "a,", "-K"]
    assert same_hosts({"inventory": ["/elsewhere"], "subset": "a"}) == ["-i", "/elsewhere", "-l", "a"]
    assert same_hosts({"inventory": ["/elsewhere"]}, ["/elsewhere"]) == []
    # What lets it in: as typed, and nothing that ansible.cfg or the environment says anyhow.
    asked = {
        "inventory": [],
        "remote_user": "ops",
        "private_key_file": str(tmp_path / "keys/lab"),
        "ask_vault_pass": True,
        "vault_password_files": [str(tmp_path / "vault.sh")],
        "vault_ids": ["dev@prompt", "lab@/etc/lab.key"],
    }
    assert same_hosts(asked) == [
        *(
            "-u",
            "ops",
            "--private-key",
            "keys/lab",
            "--vault-id",
            "dev@prompt",
            "--vault-id",
            "lab@/etc/lab.key",
        ),
        *("--vault-password-file", "vault.sh", "-J"),
    ]
    by_a_bastion = {
        "connection": "ssh",
        "ssh_common_args": "-J anna@bastion",
        "become_method": "su",
        "become_password_file": str(tmp_path / "su.txt"),
        "extra_vars": (
            "ansible_user=anna steps=3",
            "ansible_become_password=secret",
            "ansible_private_key=secret ansible_ssh_private_key=secret ansible_ssh_private_key_file=keys/lab",
            '{"ansible_ssh_pass": "secret", "ansible_port": 2222}',
            "@vault.yml",
            "prompt=it's",
        ),
    }
    assert shlex.join(same_hosts(by_a_bastion)) == (
        "'--ssh-common-args=-J anna@bastion' --become-method su --become-password-file su.txt "
        "-e ansible_user=anna -e ansible_ssh_private_key_file=keys/lab -e '{\"ansible_port\": 2222}'"
    )
    usual = {"remote_user": C.DEFAULT_REMOTE_USER, "private_key_file": C.DEFAULT_PRIVATE_KEY_FILE}
    assert same_hosts({"inventory": [], "vault_ids": [], **usual}) == []
    lines = after_site(cli, tmp_path)
    assert lines[0] == "Next:"
    assert lines[2].startswith("  ansible-playbook -i 'inventory/my lab' -i a, -K train.yml -e run=first  ")
    for part in ({"subset": "a"}, {"tags": ["network"]}, {"check": True}, {"skip_tags": ["x"]}):
        assert after_site({**cli, **part}, tmp_path) == []


# ---- the region ----


class Terminal(io.StringIO):
    """Knows just what the region writes; `rows` is what it shows."""

    @property
    def rows(self):
        rows, at, column = [""], 0, 0
        text = self.getvalue()
        while text:
            if text[0] == "\r":
                column, text = 0, text[1:]
            elif text[0] == "\n":
                at, column, text = at + 1, 0, text[1:]
                rows += [""] * (at + 1 - len(rows))
            elif text.startswith("\x1b["):
                end = next(n for n, one in enumerate(text) if one.isalpha())
                number, letter, text = text[2:end], text[end], text[end + 1 :]
                if letter == "A":
                    at -= int(number)
                    assert at >= 0, "above the screen"
                elif letter == "K":
                    rows[at] = rows[at][:column]
                elif letter == "J":
                    rows[at:] = [rows[at][:column]]
                else:
                    raise AssertionError(f"a sequence that restores nothing by itself: {letter}")
            else:
                rows[at] = rows[at][:column] + text[0] + rows[at][column + 1 :]
                column, text = column + 1, text[1:]
        return rows


@pytest.fixture
def region():
    """A region on a terminal of its own, without its clock; `shown` is what it is to show."""
    made = Region(Terminal(), threading.RLock(), lambda: made.given)
    made.given = []
    return made


def test_what_is_printed_goes_above_the_region_which_shrinks_and_ends(region):
    out = region.out
    region.given = ["far", "a", "b"]
    region.draw()
    with region.aside(), region.aside():
        out.write("one\n")
    assert out.rows == ["one", "far", "a", "b"]
    region.given = ["f"]
    region.draw()
    assert out.rows == ["one", "f"]
    region.given = ["f", "c"]
    with region.aside():
        out.write("two\n")
    assert out.rows == ["one", "two", "f", "c"]
    region.end()
    assert out.rows == ["one", "two", ""]
    region.draw()
    with region.aside():
        out.write("three\n")
    assert out.rows == ["one", "two", "three", ""]


def test_nothing_is_written_where_nothing_changed(region):
    region.given = ["a"]
    region.draw()
    before = region.out.getvalue()
    region.draw()
    assert region.out.getvalue() == before


def test_a_fault_ends_the_drawing_and_nothing_else(region):
    region.given = ["a", "b"]
    region.draw()
    region.lines = lambda: 1 / 0
    with region.aside():
        region.out.write("one\n")
    assert region.over.is_set() and region.out.rows == ["one", ""]
    with region.aside():
        region.out.write("two\n")
    assert region.out.rows == ["one", "two", ""]


def test_a_terminal_that_is_gone_ends_the_drawing(region):
    region.out.close()
    region.given = ["a"]
    region.draw()
    assert region.over.is_set()
    region.end()


class Display:
    """What the region needs of Ansible's."""

    def __init__(self, out):
        self.out, self.log = out, []

    def display(self, msg, newline=True, screen_only=False, log_only=False):
        if not log_only:
            self.out.write(msg + "\n" * newline)
        if not screen_only:
            self.log.append(msg)

    def prompt_until(self, msg):
        self.display(msg)
        return list(self.out.rows)

    def do_var_prompt(self, msg):
        return self.prompt_until(msg)


def test_ansibles_display_is_led_through_the_region(region):
    display = Display(region.out)
    region.lead(display, lambda text, newline: not newline or text.startswith("progress"))
    region.given = ["far"]
    display.display("one")
    display.display("\rstep 1", newline=False, screen_only=True)
    display.display("progress")
    display.display(msg="two")
    assert region.out.rows == ["one", "two", "far"]
    assert display.log == ["one", "progress", "two"]
    assert display.prompt_until("Sure?") == ["one", "two", "Sure?", ""]  # no region while it asks
    assert region.out.rows[-1] == "far" and display.led_by_region
    region.end()  # Ansible's own goes on: one line can be written over there
    display.display("\r\x1b[Kfirst\nnode1\trunning", newline=False, screen_only=True)
    display.display(msg="\r\x1b[Ksecond\nnode1\trunning", newline=False, screen_only=True)
    assert region.out.rows[-1] == "second" and "node1" not in region.out.getvalue()
