"""What status.yml and logs.yml show: runs chosen and told, and the lines of many hosts in one order."""

import calendar
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible.errors import AnsibleConnectionFailure

from plugins.action import run_follow, run_logs
from plugins.filter.cluster_status import (
    cluster_status,
    merged_logs,
    rank_fault,
    retired_text,
    run_choice_fault,
    run_chosen,
    run_views,
    runs_to_retire,
)
from plugins.module_utils.run_keeper import JOURNALS, STAMP, UNREAD
from trainer import environment

ROOT = Path(__file__).resolve().parents[2]
NOW = 2_000_000_000.0
SILENT = {
    "unreachable": True,
    "msg": "Failed to connect to the host via ssh: \nssh: connect to host: timed out",
}


def host(active=(), clock=NOW, **runs):
    """What the module host_status says; `runs`: name -> status.json, of which `age` is how old it is."""
    found = {
        name: {
            "state": "running",
            **{k: v for k, v in status.items() if k != "age"},
            "updated": clock - status["age"],
        }
        for name, status in runs.items()
    }
    facts = {
        "time": clock,
        "release": "0.1-aa",
        "active": list(active),
        "runs": found,
        "load": 0.5,
        "cpus": 4,
        "memory_bytes": 16e9,
        "memory_free_bytes": 12e9,
        "free_bytes": 60e9,
        "gpus": [["NVIDIA GeForce RTX 3090", "98", "20480", "24576", "71"]],
    }
    return {"changed": False, "host_status": facts}


# ---- runs ----


def test_the_newest_word_counts_whatever_the_hosts_clocks_say():
    """node2's clock is an hour ahead, and its word is the older one."""
    views = run_views(
        {
            "node1": host(["a"], a={"age": 1, "step": 9, "steps": 10}),
            "node2": host(["a"], clock=NOW + 3600, a={"age": 30, "step": 7, "steps": 10}),
        }
    )
    assert (views["a"]["step"], views["a"]["active"]) == (9, ["node1", "node2"])


def test_a_host_that_was_left_out_of_the_last_start_has_no_say_though_its_word_is_the_newest():
    """node2 was off, and learns now how the start before ended."""
    old = host(a={"age": 1, "state": "stopped", "step": 7, "launch": "L1"})
    known = {"age": 90, "step": 9, "steps": 10}
    for node1 in (host(["a"], a=known), host(a={**known, "state": "finished", "launch": "L2"})):
        for results in ({"node1": node1, "node2": old}, {"node2": old, "node1": node1}):
            assert run_views(results)["a"]["step"] == 9
    # Of a word without its start's name, the newer one counts.
    view = run_views({"node1": host(a={**known, "launch": None}), "node2": old})["a"]
    assert (view["state"], view["step"]) == ("stopped", 7)


@pytest.mark.parametrize(
    ("state", "active", "shown"),
    [
        ("running", ["a"], "running"),
        ("running", [], "interrupted"),
        ("restarting", [], "interrupted"),
        ("finished", [], "finished"),
        ("unknown", [], "unknown"),
    ],
)
def test_a_run_that_is_alive_nowhere_is_not_called_running(state, active, shown):
    assert run_views({"node1": host(active, a={"age": 5, "state": state})})["a"]["state"] == shown


def test_a_unit_that_has_not_written_a_word_yet_is_starting():
    view = run_views({"node1": host(["a"])})["a"]
    assert (view["state"], view["active"]) == ("starting", ["node1"])


def test_the_run_that_is_meant():
    two = {"node1": host(["b"], a={"age": 1, "state": "finished"}, b={"age": 9}), "node2": SILENT}
    assert run_chosen(two, "") == "b"  # the only one that is active, though a's word is newer
    assert run_chosen(two, "a") == "a"
    assert run_choice_fault(two, "a") == run_choice_fault(two, "") == ""


@pytest.mark.parametrize(
    ("result", "asked", "words"),
    [
        (host(["b"], a={"age": 1}), "c", "found c, which none of node1 knows; expected one of b, a."),
        (host(["a", "b"]), "", "several are active; expected the name of one of a, b."),
        (host(), "", "None of node1 knows a run; train.yml starts one."),
        (host(), "c", "None of node1 knows a run c; train.yml starts one."),
    ],
)
def test_no_run_is_meant(result, asked, words):
    assert run_chosen({"node1": result}, asked) == ""
    assert words in run_choice_fault({"node1": result}, asked)


SILENT_WORDS = "no answer: ssh: connect to host: timed out"


@pytest.mark.parametrize(
    ("results", "asked", "words"),
    [
        ([SILENT, SILENT], "", "No host has answered, so that nothing is known of their runs."),
        ([SILENT, SILENT], "c", "No host has answered, so that nothing is known of their runs."),
        ([host(), SILENT], "", "None of node1 knows a run, and not every host has answered."),
        ([host(), SILENT], "c", "None of node1 knows a run c, and not every host has answered."),
        (
            [host(["b"], a={"age": 1}), SILENT],
            "c",
            "run: found c, which none of node1 knows; expected one of b, a. "
            "Correct the name after -e run=, or see to the hosts that are silent.",
        ),
    ],
)
def test_a_silent_host_is_not_said_to_know_no_run(results, asked, words):
    """A run may be on it, so that nothing advises to start another."""
    silent = [f"node{place}: {SILENT_WORDS}" for place, one in enumerate(results, 1) if one is SILENT]
    fault = run_choice_fault({f"node{place}": one for place, one in enumerate(results, 1)}, asked)
    assert fault.splitlines() == [words, *silent]


@pytest.mark.parametrize(
    ("result", "asked", "words"),
    [
        (host(), "", "None of node1 knows a run, and not every host was asked."),
        (host(), "c", "None of node1 knows a run c, and not every host was asked."),
        (host(["b"], a={"age": 1}), "c", "run: found c, which none of node1 knows; expected one of b, a. "),
    ],
)
def test_a_host_that_l_leaves_out_is_not_said_to_know_no_run(result, asked, words):
    fault = run_choice_fault({"node1": result}, asked, ["node1", "node2", "node3"])
    first, left_out = fault.splitlines()
    assert first.startswith(words) and left_out == "node2, node3: not asked (-l)"
    assert run_choice_fault({"node1": result}, asked, ["node1"]) == run_choice_fault({"node1": result}, asked)


def test_the_status_of_a_run_on_two_hosts_and_a_silent_one():
    status = {
        "age": 2,
        "step": 120,
        "steps": 400,
        "loss": 3.21,
        "tokens_per_second": 6305.4,
        "eta_seconds": 250,
        "attempt": 2,
        "last_checkpoint": 100,
        "note": "node3 does not answer",
        "warning": "node2: no space left",
        "shares": [24, 12, 12],
        "speed_up": {"expected": 1.33, "got": 1.3149},
        "losses": [7.66, 5.2, 4.0, 3.3],
        "parts": {"compute": [0.4, 0.3, 0.1], "waiting": [0.0, 0.1, 0.3], "wire": 0.08, "rest": 0.02}
        | {"ranks": ["node1", "node2", "node2"]},
    }
    text = cluster_status(
        {
            "node1": host(["first"], first=status, old={"age": 9e4, "state": "finished"}),
            "node2": host(["first"], first=status),
            "node3": SILENT,
        }
    )
    runs, notes, hosts, silent = text.split("\n\n")
    assert [line.split()[:2] for line in runs.splitlines()[1:]] == [["first", "running"], ["old", "finished"]]
    for words in (
        "120/400 (30 %)",
        "3.2100",
        "6,305",
        "4 min 10 s",
        "step 100",
        "2 s ago",
        "node1, node2",
        "1 d 1 h ago",
    ):
        assert words in runs, (words, runs)
    assert notes == "first: node3 does not answer\nfirst: warning: node2: no space left\n" + (
        "first: loss 7.66 █▄▂▁ 3.3\n"
        "first: of a step's 0.5 s, computing: node1 80%, node2 (rank 1) 60% and waits 20%, node2 (rank 2) 20% and "
        "waits 60%; the network: 16%\n"
        "first: shares of a step 24:12:12; 1.31 times as fast as with even ones (1.33 of computing expected)"
    )
    assert "RTX 3090 98 %, 20 of 24 GiB, 71 °C" in hosts and "12.0 of 16.0 GB" in hosts
    assert [line.split()[0] for line in hosts.splitlines()] == ["HOST", "node1", "node2", "node3"]
    assert silent == "node3: no answer: ssh: connect to host: timed out"


def test_shares_that_a_run_began_with_are_told_with_the_speeds_that_were_tried():
    told = {"age": 1, "shares": [12, 4], "speed_up": {"expected": 2.0, "got": None, "speeds": [1.0, 1 / 3]}}
    text = cluster_status({"node1": host(["a"], a=told)}, "a")
    assert (
        "12:4 by speeds 1.00:0.33; they compute 2.00 times as fast as even ones, as expected by these" in text
    )
    few = {"node1": host(["a"], a={**told, "shares": [1, 2]})}  # of three: even ones are 2:1, half as fast
    assert "shares of a step 1:2 by speeds 1.00:0.33" in cluster_status(few, "a")


def test_what_steps_do_not_tell_of_is_not_called_computing():
    parts = {"compute": [0.4, 0.4], "waiting": [0.0, 0.0], "wire": 0.08, "rest": 0.02, "ranks": ["a", "b"]}
    told = cluster_status({"node1": host(["a"], a={"age": 1, "parts": {**parts, "watched": False}})}, "a")
    assert "of a step's 0.5 s, computing or waiting: a 80%, b 80%; the network: at least 16%" in told


def test_what_is_coded_is_told_where_it_is_much():
    parts = {
        "compute": [0.4, 0.4],
        "compression": [0.1, 0.2],
        "optimizer": [0.01, 0.01],
        "waiting": [0.1, 0.0],
    }
    parts |= {"wire": 0.39, "ranks": ["a", "b"]}
    told = cluster_status({"node1": host(["a"], a={"age": 1, "parts": parts})}, "a")
    assert (
        "of a step's 1 s, computing: a 40% and waits 10%, b 40%; compression: up to 20%; the network: 39%"
        in told
    )


def test_even_shares_are_not_worth_a_word():
    even = {"shares": [16, 16, 15], "speed_up": None, "age": 1}
    assert "shares" not in cluster_status({"node1": host(["a"], a=even)}, "a")


def test_what_was_cut_short_is_told_with_its_cure():
    text = cluster_status({"node1": host(a={"age": 60})}, "a")
    assert "a was cut short and runs nowhere; go on with it: train.yml -e run=a -e resume=true" in text


@pytest.mark.parametrize(
    ("members", "silent", "words"),
    [
        (3, 1, "(node1, node2, node3) node1 is silent: if one more of them goes, every run pauses."),
        (3, 2, "node1, node2 are silent: too few are left, and every run pauses until one of them is back."),
        (5, 1, "node1 is silent: runs outlive the loss of 1 more of them."),
        (5, 2, "node1, node2 are silent: if one more of them goes, every run pauses."),
        (3, 0, ""),
        (1, 1, ""),  # of two hosts each goes on, or pauses, by other rules
    ],
)
def test_how_many_more_hosts_a_run_can_lose(members, silent, words):
    everyone = [f"node{number}" for number in range(1, 7)]
    results = {name: SILENT if place < silent else host() for place, name in enumerate(everyone)}
    text = cluster_status(results, "", everyone, everyone[:members])
    assert words in text and ("Of the hosts that remember" in text) == bool(words)
    others = {name: SILENT if name == "node6" else host() for name in everyone}
    assert "remember" not in cluster_status(others, "", everyone, everyone[:members])


def test_what_may_run_on_a_silent_host_is_not_called_cut_short_nor_is_it_advised_to_go_on_with_it():
    text = cluster_status({"node1": host(a={"age": 60}), "node2": SILENT})
    assert "a was cut short on node1; it may go on on a host that is silent" in text
    assert "train.yml" not in text


def test_what_may_run_on_a_host_that_l_leaves_out_is_not_called_cut_short():
    everybody = ["node1", "node2", "node3"]
    results = {"node3": host(a={"age": 60})}
    text = cluster_status(results, "", everybody)
    assert "a was cut short on node3; it may go on on a host that was not asked" in text
    assert text.endswith("node1, node2: not asked (-l)") and "train.yml" not in text
    text = cluster_status({"node3": host()}, "", everybody)
    assert text.startswith("No run is known on node3.\n") and "train.yml" not in text
    assert cluster_status(results, "", ["node3"]) == cluster_status(results)


@pytest.mark.parametrize("name", ["chosen", "diagnose", "status"])
def test_who_tells_of_runs_knows_of_the_hosts_that_l_leaves_out(name):
    tasks = (ROOT / f"roles/trainer/tasks/{name}.yml").read_text()
    told = re.findall(r"_trainer_seen \| (?:run_choice_fault|diagnosis|cluster_status)\((.*)\)[ |}]", tasks)
    assert told and all(re.search(r", groups\['cluster'\](, _trainer_etcd .*)?$", words) for words in told)


def test_cards_whose_driver_gives_no_answer_are_not_called_none():
    broken, bare = host(), host()
    broken["host_status"]["gpus"], bare["host_status"]["gpus"] = None, []
    table = cluster_status({"node1": broken, "node2": bare}).split("\n\n")[-1].splitlines()
    assert table[1].endswith("  no answer: nvidia-smi") and table[2].endswith("  none")


@pytest.mark.parametrize("name", ["quick", "preflight"])
def test_connections_of_their_own_keep_what_the_user_says_of_ssh(name, tmp_path):
    """By what Ansible calls: an ssh that writes down how."""
    program, called = tmp_path / "ssh", tmp_path / "called"
    # both hosts are called at once, and one write is one line
    program.write_text(f'#!/bin/sh\nline=$(printf "%s|" "$@")\necho "$line" >> {called}\n')
    program.chmod(0o755)
    own = "-F 'my lab.conf' -o ConnectTimeout=60"
    hosts = {"node1": {"lab": own, "ansible_ssh_args": "{{ lab }}"}, "node2": {}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.raw": "true"}]}
    play["vars_files"] = [str(ROOT / f"playbooks/vars/{name}.yml")]
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_SSH_ARGS": "-F env.conf"}
    settings |= {"ANSIBLE_SSH_EXECUTABLE": str(program), "ANSIBLE_STDOUT_CALLBACK": "default"}
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **settings}, check=True, capture_output=True)
    node1, node2 = sorted(called.read_text().splitlines(), key=lambda line: "node2" in line)
    patience = re.findall(r"ConnectTimeout=(\d+)", node1)
    assert "|-F|my lab.conf|" in node1 and "|-F|env.conf|" in node2
    assert patience[0] in ("4", "5") and patience[1] == "60"  # ssh takes the first


def test_no_host_answers():
    text = cluster_status({"node1": SILENT, "node2": {}})
    assert text.startswith("No host has answered.\n") and "node2: no answer: it was not asked" in text
    assert "train.yml" not in text


def test_no_run_is_known_on_the_hosts_that_answer():
    assert cluster_status({"node1": host(), "node2": host()}).startswith(
        "No run is known on these hosts; train.yml starts one.\n"
    )
    text = cluster_status({"node1": host(), "node2": SILENT})
    assert text.startswith("No run is known on node1.\n") and f"node2: {SILENT_WORDS}" in text


def test_hosts_of_different_releases_are_told():
    other = host()
    other["host_status"]["release"] = "0.2-bb"
    assert "different releases of the trainer (0.1-aa on node1; 0.2-bb on node2)" in cluster_status(
        {"node1": host(), "node2": other}
    )


# ---- lines and their times ----


def moment(text, east=0):
    return calendar.timegm(time.strptime(text, "%Y-%m-%d %H:%M:%S")) - east


def test_an_attempts_date_holds_for_its_lines_over_midnight_and_those_without_a_time():
    lines = [
        "23:59:58 from before",
        "=== run a, attempt 2, rank 0 of 1 on node1, 2026-11-21 23:59:59",
        "23:59:59 one",
        "Traceback:",
        "00:00:01 two",
    ]
    east = 3600
    told = run_logs.timed(lines, moment("2027-01-01 00:00:00"), east)
    assert [text for _, text in told] == ["from before", lines[1], "one", "Traceback:", "two"]
    begin = moment("2026-11-21 23:59:59", east)
    assert [at - begin for at, _ in told] == [-1, 0, 0, 0, 2]


def test_lines_whose_attempt_is_out_of_sight_are_dated_backwards_from_the_last_change():
    lines = ["no time yet", "23:59:50 a", "00:00:10 b", "00:00:10 c"]
    told = run_logs.timed(lines, moment("2026-11-22 00:00:10"), 0)
    assert [at - moment("2026-11-22 00:00:10") for at, _ in told] == [-20, -20, 0, 0]


@pytest.mark.parametrize(("text", "east"), [("+0000", 0), ("+0530", 19800), ("-0800", -28800)])
def test_zones(text, east):
    assert run_logs.zone(text) == east


def look(tmp_path, offsets=None, rank=""):
    """One look at logs on this machine, by the very command."""
    command = run_logs.look_command("process", "a", str(tmp_path), rank, offsets or {}, 0)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    return run_logs.read_look(done.stdout, "node1", offsets)[:3]


def test_a_look_reads_whole_lines_and_the_next_look_the_rest(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("10:00:00 one\n10:00:01 tw")
    (logs / "rank-11.log").write_text("10:00:02 three\n")
    state, lines, offsets = look(tmp_path)
    assert state == "ended"
    assert [(line.source, line.text) for line in lines] == [("node1/r0", "one"), ("node1/r11", "three")]
    assert offsets == {"rank-0.log": 13, "rank-11.log": 15}
    (logs / "rank-0.log").write_text("10:00:00 one\n10:00:01 two\n")
    _, lines, more = look(tmp_path, offsets)
    offsets |= more
    assert [(line.source, line.text) for line in lines] == [("node1/r0", "two")]
    assert look(tmp_path, offsets)[1] == []
    assert [line.source for line in look(tmp_path, rank="11")[1]] == ["node1/r11"]
    (logs / "rank-0.log").write_text("new\n")  # shorter than what was read
    assert [line.text for line in look(tmp_path, offsets={"rank-0.log": 26}, rank="0")[1]] == ["new"]


def test_who_follows_a_log_that_goes_aside_misses_no_line_and_sees_none_twice(tmp_path):
    """What was written between the last look and that moment stands in the file that went aside."""
    logs, offsets = tmp_path / "logs", {}
    logs.mkdir()
    log, aside = logs / "rank-0.log", logs / "rank-0.log.1"

    def said():
        _, lines, more = look(tmp_path, offsets)
        offsets.update(more)
        return [(line.source, line.text) for line in lines]

    log.write_text("10:00:00 one\n10:00:01 two\n")
    assert said() == [("node1/r0", "one"), ("node1/r0", "two")]
    with log.open("a") as file:
        file.write("10:00:02 three\n")
    log.rename(aside)
    log.touch()  # nothing is in the new one yet
    assert said() == [("node1/r0", "three")]
    log.write_text("10:00:03 four\n")
    assert said() == [("node1/r0", "four")] and said() == []
    assert offsets == {"rank-0.log": 14}
    with log.open("a") as file:
        file.write(f"10:00:04 {'x' * run_logs.WINDOW}\n10:00:05 five\n")
    log.rename(aside)
    log.write_text("10:00:06 six\n")
    done = run_logs.look_command("process", "a", str(tmp_path), "", offsets, 0)
    output = subprocess.run(["sh", "-c", done], capture_output=True, text=True, check=True).stdout
    _, lines, _, cut = run_logs.read_look(output, "node1", offsets)
    assert [line.text for line in lines] == ["five", "six"] and list(cut) == ["rank-0.log"]


def test_a_look_takes_so_much_and_from_a_ranks_own_files_alone(tmp_path, monkeypatch):
    """A rank may write to its run's directory as it likes."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "another's").write_text("10:00:00 SECRET\n")
    (logs / "rank-0.log").symlink_to(tmp_path / "another's")
    os.mkfifo(logs / "rank-1.log")
    with (logs / "rank-2.log").open("w") as file:
        file.truncate(1 << 40)
    (logs / "rank-3.log").write_text("10:00:00 three\n\n::log rank-4.log of mine\n")
    assert [line.text for line in look(tmp_path)[1]] == ["three"]
    for rank in range(10, 20):
        (logs / f"rank-{rank}.log").write_text("10:00:00 a line\n" * 100)
    monkeypatch.setattr(run_logs, "WINDOWS", 5 * run_logs.WINDOW // 4)
    command = run_logs.look_command("process", "a", str(tmp_path), "", {}, 0)
    out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert len(out) < run_logs.WINDOWS + 1000


def test_a_look_that_was_cut_short_anywhere_has_whole_lines_alone(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for rank in range(3):
        (logs / f"rank-{rank}.log").write_text("10:00:00 one\n10:00:01 two\n")
    command = run_logs.look_command("process", "a", str(tmp_path), "", {}, 0)
    out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    whole = run_logs.read_look(out, "node1")[1]
    for end in range(out.index("\n::log "), len(out)):
        lines = run_logs.read_look(out[:end], "node1")[1]
        assert lines == whole[: len(lines)] and len(lines) >= out[:end].count(" one\n")


def test_the_launchers_lines_come_from_the_journal():
    output = (
        "::keeper\nActiveState=active\n::zone +0000\n\n::log journal 0 0\n"
        "1795313688.123456 node1 trainer[7]: attempt 2: node3 does not answer: yes\n-- Boot 1 --\n"
    )
    state, (line,), offsets, cut = run_logs.read_look(output, "node1")
    assert cut == {} and run_logs.read_look(output, "node1", cursor=line.time)[1] == []
    assert (state, offsets) == ("active", {})
    assert (line.time, line.source, line.text) == (
        1795313688.123456,
        "node1/launch",
        "attempt 2: node3 does not answer: yes",
    )


def test_a_journal_that_may_not_be_read_is_said_to_be_and_one_that_may_is_read(tmp_path, monkeypatch):
    """journalctl itself shows who may not read it nothing, and ends well."""
    (tmp_path / "logs").mkdir()
    program, journal = tmp_path / "journalctl", tmp_path / "system.journal"
    program.write_text("#!/bin/sh\necho '5.5 node1 trainer[7]: attempt 2:' $4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def looked(rank=""):
        command = run_logs.look_command("systemd", "a", str(tmp_path), rank, {}, 0)
        command = command.replace(JOURNALS, f"{tmp_path}/none/system.journal {journal}")
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        return run_logs.read_look(done.stdout, "node1")

    assert looked()[1:] == ([], {}, {"journal": float("inf")})
    journal.touch()
    _, (line,), _, cut = looked()
    assert (line.source, line.text, cut) == ("node1/launch", "attempt 2: --since=@0", {})
    assert looked(rank="0")[1:] == ([], {}, {})
    # It is told once, whatever lines are asked for.
    results = {"node1": {"lines": [[1.0, "a"], [2.0, "b"]], "left_out": [[float("inf"), "UNREAD"]]}}
    assert merged_logs(results, "1", "") == "UNREAD\nb"
    assert merged_logs(results, "1", "5s") == "UNREAD"


def test_the_followers_last_words_say_it_too(tmp_path):
    (tmp_path / "logs").mkdir()
    command = run_follow.log_command("systemd", "a", str(tmp_path)).replace(JOURNALS, "/none/system.journal")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert run_follow.read_logs(done.stdout) == {"launch.log": [UNREAD]}


class Hosts:
    """A follower of node1, each look of which is one of `looks`: (state, (time, text), …) or an error; its clock."""

    def __init__(self, monkeypatch, looks):
        self.shown, self.clock, self.looks, self.spool, self.resets = [], NOW, list(looks), {}, 0
        monkeypatch.setattr(run_logs, "Spool", lambda task: self)
        monkeypatch.setattr(run_logs.display, "display", self.shown.append)
        monkeypatch.setattr(run_logs.time, "time", lambda: self.clock)
        monkeypatch.setattr(run_logs.time, "sleep", self.sleep)
        self.plugin = run_logs.ActionModule.__new__(run_logs.ActionModule)
        self.plugin.host, self.plugin.cursor = "node1", 0
        self.plugin._task = self.plugin._connection = self
        self.plugin._look = self.look
        self._uuid = "x"

    def put(self, host, value):
        self.spool[host] = value

    def end_if_alone(self):
        pass

    def get(self, host):
        return self.spool.get(host, {})

    def reset(self):
        self.resets += 1

    def sleep(self, seconds):
        self.clock += seconds

    def look(self):
        one = self.looks.pop(0)
        if isinstance(one, Exception):
            raise one
        state, *lines = one
        return state, [run_logs.Line(at, "node1/r0", text) for at, text in lines], []

    def follow(self, begin=0):
        self.plugin._follow(["node1", "node2"], begin)
        return [text.split(" ", 1)[1] if "|" in text else text for text in self.shown]


GONE = AnsibleConnectionFailure("Failed to connect to the host via ssh: \nssh: timed out")


def test_a_host_that_falls_silent_is_asked_until_it_answers(monkeypatch):
    one, two, three = ((NOW + second, str(second)) for second in range(3))
    # Back from a reboot, it may not have started the unit yet.
    looks = [("active", one), GONE, GONE, ("ended", two), ("active", three), *[("active",)] * 30, ("ended",)]
    hosts = Hosts(monkeypatch, looks)
    words = ["node1: no answer: ssh: timed out", "node1 answers"]
    assert hosts.follow() == ["node1/r0 | 0", *words, "node1/r0 | 1", "node1/r0 | 2"]
    assert not hosts.looks and hosts.resets == 2


def test_a_host_that_lets_in_and_does_not_answer_is_silent_too_and_is_asked_once(monkeypatch):
    """As where its disk hangs: the look comes back when that does, if it ever does."""
    monkeypatch.setattr(run_logs, "PATIENCE", 0.2)
    monkeypatch.setattr(run_logs, "REFRESH", 0.01)
    hosts = Hosts(monkeypatch, [("active", (NOW, "0")), *[("active",)] * 30, ("ended",)])
    answers, asked, look = threading.Event(), [], hosts.look

    def hang():
        asked.append(1)
        if len(asked) == 1:
            answers.wait(60)
        return look()

    hosts.plugin._look = hang
    turns = hosts.sleep
    monkeypatch.setattr(
        run_logs.time, "sleep", lambda seconds: (turns(1), len(hosts.shown) and answers.set())
    )
    silent = "node1: no answer within 0 s, though it lets us in: a disk or a mount that hangs? (`dmesg`)"
    assert hosts.follow() == [silent, "node1 answers", "node1/r0 | 0"]
    assert not hosts.looks and hosts.resets == 0 and len(asked) == 32
    # Where the run has ended elsewhere meanwhile, nobody waits for it.
    answers.clear()
    asked.clear()
    hosts.looks = [("active",)]
    hosts.put("node2", {"state": "ended"})
    monkeypatch.setattr(run_logs.time, "sleep", turns)
    hosts.follow()
    assert len(asked) == 1
    answers.set()


def test_lines_that_end_with_a_carriage_return_are_shown_once(tmp_path):
    """As by a Windows tool, or a progress bar's: what was read is counted in bytes."""
    log = tmp_path / "logs/rank-0.log"
    log.parent.mkdir()
    plugin = run_logs.ActionModule.__new__(run_logs.ActionModule)
    plugin.host, plugin.about, plugin.offsets, plugin.cursor = (
        "a",
        ("process", "a", str(tmp_path), "0"),
        {},
        0,
    )

    def execute(command, sudoable):
        done = subprocess.run(["sh", "-c", command], capture_output=True)
        return {"rc": done.returncode, "stdout": done.stdout.decode(), "stderr": ""}

    plugin._low_level_execute_command = execute
    for text in ("10:00:01 one\r\n" * 20, "10:00:03 three\r\n"):
        with log.open("a", newline="") as file:
            file.write(text)
        _, lines, _ = plugin._look()
        assert [line.text for line in lines] == [line[9:] for line in text.splitlines()]


def test_of_a_host_that_was_silent_at_the_start_only_what_comes_is_shown(monkeypatch):
    hosts = Hosts(monkeypatch, [GONE, ("active", (NOW - 9, "old"), (NOW + 9, "new")), *[("ended",)] * 30])
    assert hosts.follow(NOW) == ["node1 answers", "node1/r0 | new"]
    assert 0 < len(hosts.looks) < 15 and hosts.plugin.cursor == NOW


@pytest.mark.parametrize(
    ("other", "waits"), [("ended", False), ("active", True), ("", True), ("silent", True)]
)
def test_a_silent_host_is_waited_for_as_long_as_the_run_may_go_on(monkeypatch, other, waits):
    hosts = Hosts(monkeypatch, [GONE, *[("active",)] * 30, ("ended",)])
    hosts.put("node2", {"state": other})
    hosts.follow()
    assert (hosts.looks == []) is waits


@pytest.mark.parametrize("keeper", ["process", "systemd"])
def test_a_launcher_without_a_journal_is_heard_too_and_so_is_the_job_it_is_in(tmp_path, keeper):
    """On the nodes of one machine, and under Slurm; what begins with no time has that of the line before."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("=== run a, attempt 1, rank 0 of 1 on node1, 2026-11-21 10:00:05\n")
    stamps = [f"2026-11-{day} 10:00:07" for day in (20, 21)]
    (logs / "launch.log").write_text(f"old\n{stamps[0]} error: no port\n{stamps[1]} attempt 2: one\n  two\n")
    (logs / "job.log").write_text("2026-11-21 10:00:09 given up\n")
    if keeper == "systemd":
        (tmp_path / "job.sbatch").touch()
    command = run_logs.look_command(keeper, "a", str(tmp_path), "", {}, 0)
    shell = {**os.environ, "TZ": "UTC-1"}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env=shell)
    _, lines, offsets, cut = run_logs.read_look(done.stdout, "node1")
    assert [(line.source, line.text) for line in sorted(lines, key=lambda line: line.time)] == [
        ("node1/launch", "old"),
        ("node1/launch", "error: no port"),
        ("node1/r0", "=== run a, attempt 1, rank 0 of 1 on node1, 2026-11-21 10:00:05"),
        ("node1/launch", "attempt 2: one"),
        ("node1/launch", "  two"),
        ("node1/job", "given up"),
    ]
    assert {line.time for line in lines if "two" in line.text} == {moment(stamps[1], 3600)}
    assert set(offsets) == {"rank-0.log", "launch.log", "job.log"} and not cut
    # Who asks for one rank gets that alone.
    assert [line.source for line in look(tmp_path, rank="0")[1]] == ["node1/r0"]


def test_the_launchers_lines_in_a_file_have_their_times_and_those_at_a_terminal_or_in_the_journal_none(
    tmp_path,
):
    command = [sys.executable, "-m", "trainer", "launch", str(tmp_path / "none.yaml")]
    with (tmp_path / "launch.log").open("wb") as log:
        subprocess.run(command, stderr=log, cwd=ROOT)
    (line,) = (tmp_path / "launch.log").read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d error: ", line)
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT).stderr
    assert said.startswith("error: ")


def test_each_line_is_stamped_once_however_it_is_written(capsys):
    stream = environment.Stamped(sys.stderr)
    print("one", "two", file=stream)
    stream.write("a\nb")
    stream.write("c\n")
    stream.flush()
    lines = capsys.readouterr().err.splitlines()
    assert [STAMP.sub("", line) for line in lines] == ["one two", "a", "bc"]
    assert all(STAMP.match(line) for line in lines)


def test_what_a_look_leaves_out_is_known_with_its_time(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    line = "10:00:%02d 12345678901234567890\n"
    many = run_logs.WINDOW // len(line % 0) + 5000
    head = "=== run a, attempt 1, rank 0 of 1 on node1, 2026-11-21 10:00:00\n"
    (logs / "rank-0.log").write_text(head + "".join(line % (number * 60 // many) for number in range(many)))
    os.utime(logs / "rank-0.log", (moment("2026-11-21 10:01:00"),) * 2)

    def looked(known=None):
        command = run_logs.look_command("process", "a", str(tmp_path), "", known or {}, 0)
        shell = {**os.environ, "TZ": "UTC"}
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env=shell)
        return run_logs.read_look(done.stdout, "node1", known)

    _, lines, offsets, cut = looked()
    assert cut == {"rank-0.log": lines[0].time} and 5 < lines[0].time - moment("2026-11-21 10:00:00") < 10
    assert {one.text for one in lines} == {"12345678901234567890"}  # none is half a line
    assert looked(offsets)[1:] == ([], {}, {})
    journal = "".join(
        f"17953136{number // 100}.{number % 100:02d} node1 trainer[7]: x\n" for number in range(1000, 2000)
    )
    output = f"::keeper\nActiveState=active\n::zone +0000\n\n::log journal 0 0\n{journal}"
    assert run_logs.read_look(output, "node1")[3] == {"journal": 1795313610.0}
    # Not all of them are new: what is missing before was shown then.
    assert run_logs.read_look(output, "node1", cursor=1795313612.0)[3] == {}


def test_what_was_left_out_is_told_where_it_would_have_been_shown():
    now = time.time()
    lines = [[now - 50, "a"], [now - 40, "b"], [now - 30, "c"]]
    results = {"node1": {"lines": lines, "left_out": [[now - 45, "CUT"]]}}
    assert merged_logs(results, "2", "") == "b\nc"
    assert merged_logs(results, "3", "") == "CUT\na\nb\nc"
    assert merged_logs(results, "9", "") == "CUT\na\nb\nc"
    assert merged_logs(results, "9", "42s") == merged_logs(results, "", "42s") == "b\nc"
    assert merged_logs(results, "1", "42s") == "c" and merged_logs(results, "", "") == "CUT\na\nb\nc"
    assert merged_logs(results, "9", "1m") == "CUT\na\nb\nc"


def test_lines_of_many_hosts_stand_in_the_order_of_their_times():
    now = time.time()
    results = {
        "node1": {"lines": [[now - 700, "a"], [now - 30, "c"]]},
        "node2": {"lines": [[now - 60, "b"], [now - 1, "d"]]},
        "node3": SILENT,
    }
    silence = "node3: no answer: ssh: connect to host: timed out"
    assert merged_logs(results, "100", "") == f"a\nb\nc\nd\n{silence}"
    assert merged_logs(results, "2", "") == f"c\nd\n{silence}"
    assert merged_logs(results, "0", "") == silence
    assert merged_logs(results, "", "10m") == f"b\nc\nd\n{silence}"
    assert merged_logs({"node1": {"lines": []}}, "2", "1s") == "There is no line yet."
    # Silent when all were looked at, it was not asked for lines.
    seen = {"node1": host(), "node3": SILENT}
    assert merged_logs({"node1": {"lines": []}, "node3": {"skipped": True}}, "2", "", seen) == silence


NONE = {"lines": []}


@pytest.mark.parametrize(
    ("seen", "logs", "rank", "words"),
    [
        ([2, 2], [NONE, NONE], 99, "rank: found 99; expected one of run a's ranks: 0, 1. Correct it."),
        ([16], [NONE], "16", "rank: found 16; expected one of run a's ranks: 0 to 15. Correct it."),
        ([2, 2], [NONE, NONE], "1", ""),
        ([2, 2], [NONE, NONE], "", ""),
        # An attempt before had more of them; it has none yet; a host is silent, which may have it.
        ([2, 3], [NONE, NONE], "2", ""),
        ([2, 2], [NONE, {"lines": [[1.0, "x"]]}], "2", ""),
        ([None], [NONE], "7", ""),
        ([2, SILENT], [NONE, {"skipped": True}], "7", ""),
        ([2, 2], [NONE, SILENT], "7", ""),
    ],
)
def test_a_rank_that_a_run_has_not_is_refused_where_that_is_known(seen, logs, rank, words):
    answers = [one if one is SILENT else host(a={"age": 1, "world_size": one}) for one in seen]
    assert rank_fault(dict(enumerate(logs)), dict(enumerate(answers)), "a", rank) == words


def test_rank_0_is_one_as_a_number_too():
    asked = [run_logs.asked_rank({"rank": rank}) for rank in (0, "0", 7, "03", "", None)]
    assert asked == ["0", "0", "7", "3", "", ""] and run_logs.asked_rank({}) == ""


# ---- runs that need not be kept ----


def ended(**ages):
    """A host on which these runs have finished so many days ago."""
    return {
        "node1": host(**{name: {"age": days * 86400, "state": "finished"} for name, days in ages.items()})
    }


@pytest.mark.parametrize(
    ("kept", "days", "pinned", "gone"),
    [
        (0, 0, [], []),
        (2, 0, [], ["c", "d"]),
        ("2", "0", ["c"], ["d"]),
        (0, 5, [], ["c", "d"]),
        (3, 5, [], ["c", "d"]),
        (9, 90, [], []),
    ],
)
def test_the_newest_stay_and_the_pinned(kept, days, pinned, gone):
    results = ended(a=1, b=2, c=7, d=9)
    assert runs_to_retire(results, kept, days, pinned, "new") == gone


@pytest.mark.parametrize("path", ["/var/lib/trainyard/runs/c/model", "/srv/runs/c"])
def test_a_run_whose_model_or_data_the_new_one_reads_stays(path):
    results = ended(a=1, b=2, c=7, cc=8, d=9)
    gone = runs_to_retire(results, 1, 0, [], "new", used=["austen", path])
    assert gone == ["b", "cc", "d"]


def test_a_run_that_lives_somewhere_or_is_the_one_or_the_newest_to_resume_stays():
    results = {
        "node1": host(
            old={"age": 9e6, "state": "finished"},
            stopped={"age": 8e6, "state": "stopped"},
            failed={"age": 9e6, "state": "failed"},
            cut={"age": 9.5e6, "state": "running"},
            odd={"age": 9e6, "state": "unknown"},
            this={"age": 9e6, "state": "stopped"},
            alive={"age": 9e6, "state": "finished"},
        ),
        "node2": host(["alive"], alive={"age": 9e6, "state": "running"}),
    }
    assert sorted(runs_to_retire(results, 1, 1, [], "this")) == ["cut", "failed", "old"]
    assert sorted(runs_to_retire(results, 1, 1, [], "this", results)) == ["cut", "failed", "old"]
    # What has a checkpoint is more than what failed at its first step since.
    runs = results["node1"]["host_status"]["runs"]
    runs["failed"]["last_checkpoint"] = 5
    assert sorted(runs_to_retire(results, 1, 1, [], "this")) == ["cut", "old", "stopped"]
    del runs["failed"]["last_checkpoint"]
    # The others may go on without this host, which -l alone asks, or where one says nothing.
    for told in (results, {**results, "node3": SILENT}):
        assert runs_to_retire(told, 1, 1, [], "this", ["node1", "node2", "node3"]) == ["old"]


def test_what_was_removed_is_told():
    text = retired_text({"node1": {"removed": {"a": 2e9}}, "node2": {"removed": {"a": 1e9, "b": 0}}}, "new")
    assert "a from node1, node2; b from node2 (3.0 GB)." in text
    would = retired_text({"node1": {"removed": {"a": 2e9}}}, "new", check=True)
    assert "old runs would be removed" in would and "old runs were removed" in text
    assert retired_text({"node1": {"skipped": True}}, "new") == "No run was removed."


def test_runs_go_with_what_they_were_told_and_links_lead_nowhere(run_module, tmp_path):
    state, etc = tmp_path / "var", tmp_path / "etc"
    for name in ("a", "b"):
        (state / "runs" / name / "logs").mkdir(parents=True)
        (state / "runs" / name / "logs/x").write_text("12345")
    (etc / "runs").mkdir(parents=True)
    for name in ("a.env", "a.yaml", "b.env"):
        (etc / "runs" / name).write_text("x")
    (state / "runs/link").symlink_to(etc)
    runs = ["a", "link", "none", "..", "../runs"]
    options = {"runs": runs, "keeper": "process", "etc_dir": str(etc), "state_dir": str(state)}
    told = run_module("run_retire", check=True, **options)
    assert told["changed"] and told["removed"] == {"a": 5} and (state / "runs/a").exists()
    assert run_module("run_retire", **options)["removed"] == {"a": 5}
    assert sorted(path.name for path in (state / "runs").iterdir()) == ["b", "link"]
    assert [path.name for path in (etc / "runs").iterdir()] == ["b.env"]
    assert not run_module("run_retire", **options)["changed"]


def test_a_run_that_another_host_removes_at_the_same_time_is_no_fault(load_module, monkeypatch, tmp_path):
    """Where they share a directory."""
    retire = load_module("run_retire")
    (tmp_path / "runs/a/logs").mkdir(parents=True)
    for name in ("x", "y"):
        (tmp_path / "runs/a/logs" / name).write_text("12345")
    lstat, unlink = os.lstat, os.unlink

    def gone(path, **at):
        if str(path).endswith("/x"):
            raise FileNotFoundError(path)
        return lstat(path, **at)

    def removed(path, **at):
        unlink(path, **at)
        raise FileNotFoundError(path)

    with monkeypatch.context() as other:
        other.setattr(retire.os, "lstat", gone)
        assert retire.size(str(tmp_path / "runs/a")) == 5
    with monkeypatch.context() as other:
        other.setattr(retire.os, "unlink", removed)
        assert retire.retire(["a"], str(tmp_path), remove=True) == {"a": 10}
    assert not (tmp_path / "runs/a").exists()


def test_a_run_that_goes_starts_at_no_boot_any_more(load_module, monkeypatch, tmp_path):
    """One that ended while nobody followed it is enabled still; without its files its unit would fail at each boot."""
    retire = load_module("run_retire")
    for run in ("a", "b.c", "kept"):
        (tmp_path / f"trainyard@{run}.service").symlink_to("nowhere")
    monkeypatch.setitem(retire.runs_at_boot.__globals__, "AT_BOOT", f"{tmp_path}/trainyard@*.service")
    asked = []

    def systemctl(command):
        asked.append(command)
        return 0, "", ""

    assert retire.disable(systemctl, "systemd", ["a", "b.c", "rested", "../x"]) == ""
    assert asked.pop() == ["systemctl", "disable", "trainyard@a.service", "trainyard@b.c.service"]
    assert retire.disable(systemctl, "systemd", ["rested"]) == ""
    assert retire.disable(systemctl, "process", ["a"]) == ""
    assert asked == []
    refused = retire.disable(lambda command: (1, "", "Access denied\n"), "systemd", ["a"])
    assert refused == "systemctl disable trainyard@a.service: Access denied"


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("fault", ["", "systemctl disable a: no"])
def test_no_run_goes_whose_unit_stays(load_module, monkeypatch, tmp_path, check, fault):
    retire, order = load_module("run_retire"), []

    class Module:
        params = {
            "runs": ["a"],
            "keeper": "systemd",
            "etc_dir": str(tmp_path),
            "state_dir": str(tmp_path),
            "user": None,
        }
        check_mode, run_command = check, None

        def fail_json(self, msg):
            raise SystemExit(msg)

        def exit_json(self, **result):
            order.append("done")

    monkeypatch.setattr(retire, "AnsibleModule", lambda **options: Module())
    monkeypatch.setattr(retire, "active_runs", lambda *_: [])
    monkeypatch.setattr(retire, "disable", lambda *_: order.append("disabled") or fault)
    monkeypatch.setattr(retire, "retire", lambda *_: order.append("removed") or {"a": 1})
    if fault and not check:
        with pytest.raises(SystemExit, match=r"a: no\. No run was removed"):
            retire.main()
    else:
        retire.main()
    assert order == (
        ["removed", "done"] if check else ["disabled"] if fault else ["disabled", "removed", "done"]
    )
