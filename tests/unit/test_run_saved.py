"""What generate.yml and export.yml do before and after the trainer: words, hosts, files."""

import fnmatch
import hashlib
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from plugins.action import run_export
from plugins.action.run_config import role_variables
from plugins.action.run_words import as_typed, read_words
from plugins.filter.run_saved import (
    export_about,
    export_arguments,
    export_place,
    found_below,
    generate_arguments,
    run_results,
    run_source,
    run_unbrought,
    saved_choice,
    saved_fault,
)
from plugins.module_utils import host_runs

ROOT = Path(__file__).resolve().parents[2]
TAKES = {
    "run": "name",
    "prompt": "text",
    "tokens": "count",
    "temperature": "number",
    "chat": "yes",
    "to": "path",
    "rank": "whole",
    "since": "span",
}


# ---- words ----


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [
        ("prompt=She had", "She had"),
        ("prompt='She had'", "She had"),
        ('prompt="She", he said, "had"', '"She", he said, "had"'),
        ("prompt={{ 1 + 1 }} $HOME `id` tokens=3", "{{ 1 + 1 }} $HOME `id` tokens=3"),
        ("prompt=", ""),
        ("prompt=-x", "-x"),
    ],
)
def test_a_prompt_is_taken_as_it_was_typed(typed, prompt):
    extra = {"run": "a", "prompt": "She", "_raw_params": "had", "tokens": "3"}
    values, problems = read_words(TAKES, extra, ("run=a", typed), set())
    inside = "tokens=" in typed
    assert (values["prompt"], values["run"], problems) == (prompt, "a", [])
    assert values["tokens"] == (None if inside else 3)


def test_words_in_a_prompt_change_nothing_or_are_refused():
    """Ansible reads them, too, and takes the last."""
    options = ("run=first tokens=4", "prompt=set run=fast tokens=9 and go")
    extra = {"run": "fast", "tokens": "9", "prompt": "set", "_raw_params": "and go"}
    values, problems = read_words(TAKES, extra, options, {"trainer_port"})
    assert (values["run"], values["tokens"], problems) == ("first", 4, [])
    for more in ("@vars.yml", '{"trainer_results_dir": "/srv/my results"}'):
        assert read_words(TAKES, extra, (*options, more), {"trainer_port"})[1] == []
    values, problems = read_words(TAKES, extra, options[1:], {"trainer_port"})
    assert (values["run"], values["prompt"], problems) == (None, "set run=fast tokens=9 and go", [])
    for word in ("trainer_port", "ansible_user"):
        typed = f"prompt=set {word}=1 now"
        _, (problem,) = read_words(TAKES, {"prompt": "set", word: "1"}, ("run=a", typed), {"trainer_port"})
        assert f"prompt: found {word}= in it" in problem and "-e prompt_file=FILE" in problem


def test_the_last_one_counts_and_what_is_in_json_is_left_to_ansible():
    assert as_typed("prompt", ("prompt=a", "prompt=b")) == "b"
    assert as_typed("prompt", ('{"prompt": "a"}', "@file.yml", "run=a prompt=b")) is None
    assert read_words(TAKES, {"prompt": "it's"}, ('{"prompt": "it\'s"}',), set())[0]["prompt"] == "it's"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tokens": "few"}, "tokens: found 'few'; expected a whole number, 1 or more."),
        ({"tokens": "0"}, "tokens: found '0'"),
        ({"temperature": "-1"}, "temperature: found '-1'; expected a number, 0 or more."),
        ({"temperature": "nan"}, "temperature: found 'nan'"),
        ({"chat": "maybe"}, "chat: found 'maybe'; expected true or false."),
        ({"run": "../etc"}, "run: found '../etc'; expected a run's name"),
        ({"rank": "0.log; reboot"}, "rank: found '0.log; reboot'; expected a whole number, 0 or more."),
        ({"rank": "-1"}, "rank: found '-1'; expected a whole number, 0 or more."),
        ({"since": "soon"}, "since: found 'soon'; expected a time span such as 90s, 10m, 2h or 1d."),
        ({"since": "10"}, "since: found '10'"),
        ({"tokes": "3"}, "-e tokes: found an unknown word; expected tokens?"),
        ({"_raw_params": "b"}, "-e … b: found words that are no key=value"),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(extra, said):
    _, (problem,) = read_words(TAKES, extra, (), set())
    assert problem.startswith(said)


@pytest.mark.parametrize("content", ["a" * 131_000, "a\0b"])
def test_a_file_that_no_command_line_takes_is_refused_here(tmp_path, content):
    (tmp_path / "long").write_text(content)
    _, (problem,) = read_words({"prompt_file": "file"}, {"prompt_file": str(tmp_path / "long")}, (), set())
    assert "expected a text of 130,000 bytes at most, without null characters" in problem
    (tmp_path / "long").write_text(content[:1000].replace("\0", ""))
    assert read_words({"prompt_file": "file"}, {"prompt_file": str(tmp_path / "long")}, (), set())[1] == []


def test_what_a_playbook_takes_that_takes_one_word():
    _, (problem,) = read_words({"run": "name"}, {"depth": "full"}, (), set())
    assert problem == "-e depth: found an unknown word; expected run. Correct it, or leave it out."
    assert read_words(
        {"run": "name", "rank": "whole", "since": "span"}, {"rank": 0, "since": "10m"}, (), set()
    ) == (
        {"run": None, "rank": 0, "since": "10m"},
        [],
    )


@pytest.mark.parametrize("book", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda book: book.stem)
def test_a_playbook_takes_the_words_that_its_head_names_and_no_other(book):
    """site.yml and switch.yml take none but variables; train.yml has its own check."""
    head = re.match(r"---\n(#.*\n)*", book.read_text())[0]
    named = set(re.findall(r"-e (\w+)=", head))
    tasks = [task for play in yaml.safe_load(book.read_text()) for task in play.get("tasks", [])]
    taken = [set(task["run_words"]["takes"]) for task in tasks if "run_words" in task]
    if book.stem in ("site", "switch", "train"):
        assert not taken
    else:
        assert taken[0] == named - (role_variables(str(ROOT / "roles")) - taken[0]) and len(taken) == 1


def test_variables_of_roles_and_of_ansible_are_no_slips():
    assert read_words(TAKES, {"trainer_user": "x", "ansible_user": "y"}, (), {"trainer_user"})[1] == []


# ---- which copy ----


def model(step, launch=""):
    return {"path": "/v/runs/a/model", "step": step, "launch": launch, "bytes": 5, "digest": "d" * 64}


def checkpoint(step, launch=""):
    path = f"/v/runs/a/checkpoints/step-{step:08d}"
    return {"path": path, "step": step, "launch": launch, "bytes": 9, "digest": "e" * 64}


def answer(model=None, checkpoint=None, damaged=()):
    steps = [checkpoint["step"]] if checkpoint else []
    return {"saved": {"model": model, "checkpoint": checkpoint, "steps": steps, "damaged": list(damaged)}}


def seen(**active):
    return {host: {"host_status": {"active": runs}} for host, runs in active.items()}


def test_the_newest_step_counts_then_the_finished_model_then_an_idle_host():
    both = {"n1": answer(model(4), checkpoint(4)), "n2": answer(model(4), checkpoint(6))}
    assert saved_choice(both, {})["path"].endswith("step-00000006")
    equal = {"n1": answer(None, checkpoint(4)), "n2": answer(model(4), checkpoint(4))}
    assert saved_choice(equal, {})["kind"] == "model"
    same = {"n1": answer(model(4)), "n2": answer(model(4))}
    assert saved_choice(same, seen(n1=["b"], n2=[]))["host"] == "n2"
    busy = saved_choice(same, seen(n1=["b"], n2=["b"]))
    assert (busy["host"], busy["busy"]) == ("n1", True)


def test_what_the_later_start_of_a_run_made_comes_before_later_steps_of_the_one_before():
    results = {"n1": answer(model(40, "20261101T1"), checkpoint(40, "20261101T1"))}
    results["n2"] = answer(None, checkpoint(9, "20261102T1"))
    assert (saved_choice(results, {})["host"], saved_choice(results, {}, 40)["host"]) == ("n2", "n1")


def test_a_step_that_is_asked_for_is_taken_and_no_other():
    results = {"n1": answer(model(6), checkpoint(4))}
    assert saved_choice(results, {}, 4)["kind"] == "checkpoint"
    assert saved_choice(results, {}, 5) == {}
    fault = saved_fault(results, {}, "a", 5)
    assert fault == "checkpoint: found no valid one of step 5 in run a; expected one of 4. Correct it."


def test_a_host_without_an_answer_hides_nothing_and_is_named_where_nothing_is_found():
    gone = {"unreachable": True, "msg": "Failed to connect:\nssh: timed out"}
    assert saved_choice({"n1": gone, "n2": answer(model(4))}, {})["host"] == "n2"
    fault = saved_fault({"n1": gone, "n2": answer(damaged=["x: missing or cut short"])}, {}, "a")
    first, *others = fault.splitlines()
    assert first.startswith(
        "run a: found neither a finished model nor a valid checkpoint; expected one. Wait for"
    )
    assert others == ["n2: x: missing or cut short", "n1: no answer: ssh: timed out"]
    assert saved_fault({"n2": answer(model(4))}, {}, "a") == ""
    # Silent when all were looked at, it was not asked what it has.
    fault = saved_fault({"n1": {"skipped": True}, "n2": answer()}, {"n1": gone, **seen(n2=[])}, "a")
    assert fault.splitlines()[1:] == ["n1: no answer: ssh: timed out"]
    assert (
        len(saved_fault({"n1": {"skipped": True}, "n2": answer()}, seen(n1=[], n2=[]), "a").splitlines()) == 1
    )


def test_the_trainers_words():
    words = {"prompt": "-x $HOME", "tokens": 3, "temperature": 0.0, "chat": True, "trust_remote_code": True}
    assert generate_arguments(words, model(4)) == [
        *(
            "generate",
            "/v/runs/a/model",
            "--prompt=-x $HOME",
            "--max-new-tokens=3",
            "--temperature=0.0",
            "--chat",
            "--code",
        )
    ]
    asked = export_arguments(
        {"merge": True, "base": "x", "trust_remote_code": True}, {**model(4), "kind": "model"}
    )
    assert asked[3:] == ["--merge", "--code", "--base=x"]
    choice = {**checkpoint(4), "kind": "checkpoint"}
    assert export_place({"merge": True}, choice) == f"/v/runs/a/export-{'e' * 12}-merged"
    assert export_place({}, {**model(4), "kind": "model"}) == f"/v/runs/a/export-{'d' * 12}"
    # One that was broken off is not taken for one on another base.
    bases = ("", "/srv/llama", "meta/llama")
    assert len({export_place({"base": base}, choice) for base in bases}) == len(bases)
    assert export_about({}, choice, "a") == export_about({"merge": False}, {**choice, "host": "other"}, "a")


# ---- on a host ----


@pytest.fixture
def saved(load_module):
    return load_module("run_saved")


def write_checkpoint(run_dir, step, content=b"weights", **facts):
    path = run_dir / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    files = {
        "model.safetensors": content,
        "optimizer.safetensors": b"state of " + content,
        "config.json": b"{}",
    }
    for name, data in files.items():
        (path / name).write_bytes(data)
    hashes = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": hashes, **facts}))
    return path


def test_the_newest_whole_checkpoint_is_found_and_damage_is_named(saved, tmp_path):
    write_checkpoint(tmp_path, 4)
    newer = write_checkpoint(tmp_path, 8)
    (newer / "model.safetensors").write_bytes(b"Weights")
    unread = saved.saved(str(tmp_path), 0, verify=False)
    assert (unread["checkpoint"]["step"], unread["model"], unread["steps"]) == (8, None, [8, 4])
    read = saved.saved(str(tmp_path), 0, verify=True)
    assert read["checkpoint"]["step"] == 4
    (damage,) = read["damaged"]
    assert damage.startswith(f"{newer}/model.safetensors: its content has changed")
    assert saved.saved(str(tmp_path), 8, verify=True)["checkpoint"] is None
    (newer / "manifest.json").write_text("[")
    assert "manifest.json: missing or damaged" in saved.saved(str(tmp_path), 0, verify=False)["damaged"][0]


def test_a_manifest_is_read_that_is_a_file_of_some_length_alone(saved, tmp_path):
    """A rank may put a link, or a pipe at which one would wait for ever, in its place."""
    for step in (4, 5, 6, 7):
        write_checkpoint(tmp_path, step)
    link, pipe, long = (tmp_path / f"checkpoints/step-{step:08d}/manifest.json" for step in (5, 6, 7))
    link.rename(tmp_path / "another's")
    link.symlink_to(tmp_path / "another's")
    pipe.unlink()
    os.mkfifo(pipe)
    long.write_text(" " * saved.MANIFEST_BYTES + long.read_text())
    found = []
    reader = threading.Thread(target=lambda: found.append(saved.saved(str(tmp_path), 0, False)), daemon=True)
    reader.start()
    reader.join(30)
    assert found and (found[0]["checkpoint"]["step"], len(found[0]["damaged"])) == (4, 3)


def test_a_finished_model_has_its_step_and_the_digest_of_its_weights_alone(saved, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    assert saved.saved(str(tmp_path), 0, verify=True)["model"] is None
    (tmp_path / "model/config.json").write_text('{"host": 1}')
    (tmp_path / "summary.json").write_text('{"steps": 4}')
    write_checkpoint(tmp_path, 4)
    found = saved.saved(str(tmp_path), 0, verify=True)
    assert found["model"]["step"] == 4 and found["model"]["digest"] == found["checkpoint"]["digest"]


def test_of_two_starts_on_a_host_the_later_ones_is_the_newest(saved, tmp_path):
    for step, launch in ((4, ""), (40, "20261101T1"), (9, "20261102T1")):
        write_checkpoint(tmp_path, step, launch=launch)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"steps": 40, "launch": "20261101T1"}')
    found = saved.saved(str(tmp_path), 0, verify=False)
    assert (found["checkpoint"]["step"], found["checkpoint"]["launch"]) == (9, "20261102T1")
    assert (found["model"]["launch"], found["steps"]) == ("20261101T1", [40, 9, 4])
    assert saved.saved(str(tmp_path), 40, verify=False)["checkpoint"]["step"] == 40
    # What is damaged may be of the later start, and is named where it stands above the newest.
    for step, named in ((8, 0), (41, 1)):
        (write_checkpoint(tmp_path, step) / "manifest.json").write_text("")
        found = saved.saved(str(tmp_path), 0, verify=False)
        assert found["checkpoint"]["step"] == 9 and len(found["damaged"]) == named
    (tmp_path / "summary.json").write_text('{"steps": 40}')  # an older release's
    assert saved.saved(str(tmp_path), 0, verify=False)["model"]["launch"] == "20261102T1"


def test_no_run_at_all_is_nothing(saved, tmp_path):
    nothing = {"model": None, "checkpoint": None, "steps": [], "damaged": []}
    assert saved.saved(str(tmp_path / "none"), 0, True) == nothing


# ---- the command ----


def test_a_command_runs_and_fails_with_the_trainers_own_words(run_module, tmp_path):
    program = tmp_path / "trainer"
    fail = '[ "$1" = bad ] && { echo "error: no such thing" >&2; exit 2; }'
    program.write_text(f'#!/bin/sh\n{fail}\necho "$1:$OMP_NUM_THREADS"')
    program.chmod(0o755)
    options = {"program": str(program), "state_dir": str(tmp_path)}
    assert (
        run_module("trainer_command", arguments=["a $HOME;b"], behind=True, **options)["text"]
        == "a $HOME;b:1\n"
    )
    assert run_module("trainer_command", arguments=["bad"], **options)["msg"] == "no such thing"
    assert run_module("trainer_command", arguments=["a"], check=True, **options)["changed"] is False
    missing = {**options, "program": str(tmp_path / "none")}
    assert "run site.yml first" in run_module("trainer_command", arguments=["a"], **missing)["msg"]


def test_as_a_unit_no_variable_is_put_into_a_word_and_a_run_comes_first(load_module):
    module = load_module("trainer_command")
    words = module.as_unit(["/t", "generate", "--prompt=$HOME 5$"], "u", "/v", True, {}, {})
    assert words[words.index("--") + 1 :] == ["/t", "generate", "--prompt=$$HOME 5$$"]
    assert "--property=CPUWeight=1" in words and "--setenv=CUDA_VISIBLE_DEVICES=" in words
    assert (
        "--property=LimitMEMLOCK=infinity" in words
        and "--property=OOMScoreAdjust=1000" in words
        and "--property=ReadWritePaths=-/v/runs -/v/cache" in words
    )
    assert "--property=InaccessiblePaths=-/v/.ssh" in words and "--setenv=HOME=/v/cache" in words
    assert "--property=ReadWritePaths=/v" in module.as_unit(
        ["/t", "fetch", "model"], "u", "/v", False, {}, {}
    )
    assert "--property=CPUWeight=1" not in module.as_unit(["/t", "generate"], "u", "/v", False, {}, {})


@pytest.mark.parametrize(
    ("verb", "behind", "seen"),
    [
        *[("burn", False, True), ("bench", False, True), ("generate", False, True), ("plan", False, True)],
        # One that stands back takes no card and one core; the others never take a card.
        *[
            ("generate", True, False),
            ("export", True, False),
            ("export", False, False),
            ("fetch", False, False),
        ],
    ],
)
def test_by_its_units_name_a_start_of_a_run_knows_what_would_be_in_its_way(load_module, verb, behind, seen):
    module = load_module("trainer_command")
    names = {
        word.removeprefix("--unit=")
        for _ in range(2)
        for word in module.as_unit(["/t", verb], "u", "/v", behind, {}, {})
        if word.startswith("--unit=")
    }
    assert len(names) == 2  # two may be at work at once
    for name in names:
        assert fnmatch.fnmatch(name, f"trainyard-*-{verb}-????????")
        assert any(fnmatch.fnmatch(f"{name}.service", one) for one in host_runs.WORKING) == seen
        assert not name.startswith(host_runs.UNIT)


def test_a_unit_that_is_to_end_is_ended_and_that_is_said(load_module, monkeypatch, call_main):
    module = load_module("trainer_command")
    words = module.as_unit(["/t", "burn"], "u", "/v", False, {}, {}, most=4200)
    assert "--property=RuntimeMaxSec=4200" in words
    assert not any(
        "RuntimeMaxSec" in word for word in module.as_unit(["/t", "burn"], "u", "/v", False, {}, {})
    )
    now = iter([100.0, 4301.0, 100.0, 200.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(
        module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, b"", b"")
    )
    asked = {"program": "/bin/true", "arguments": ["burn"], "user": "u", "state_dir": "/v", "most": 4200}
    assert "had not ended after 4200 s" in call_main(module, **asked)["msg"]
    assert "had not ended" not in call_main(module, **asked)["msg"]


def test_what_is_fetched_comes_by_the_hosts_proxy(load_module, monkeypatch, tmp_path):
    module = load_module("trainer_command")
    settings = tmp_path / "environment"
    proxy = 'http://me:se"cr\\et@10.0.0.9:3128'
    settings.write_text(
        f"PATH=/bin\nexport HTTPS_PROXY='{proxy}'\nall_proxy=socks5://10.0.0.9\nno_proxy=lan\n# x=y\n"
    )
    monkeypatch.setitem(module.way_out.__globals__, "SETTINGS", str(settings))
    monkeypatch.setattr(module.os, "environ", {"no_proxy": "house", "HF_TOKEN": "t"})
    told = module.way_out()
    assert told == {"HTTPS_PROXY": proxy, "no_proxy": "house"}
    assert (
        module.environment_file(told)
        == 'HTTPS_PROXY="http://me:se\\"cr\\\\et@10.0.0.9:3128"\nno_proxy="house"\n'
    )
    settings.unlink()
    assert module.way_out() == {"no_proxy": "house"}
    words = module.as_unit(["/t", "fetch"], "u", "/v", False, {}, {}, "/run/x/way-out")
    assert "--property=EnvironmentFile=/run/x/way-out" in words
    assert not any(
        "EnvironmentFile" in word for word in module.as_unit(["/t", "fetch"], "u", "/v", False, {}, {})
    )


@pytest.mark.parametrize("verb", ["fetch", "generate"])
def test_the_way_out_is_a_file_of_roots_and_gone_afterwards(load_module, monkeypatch, tmp_path, verb):
    module = load_module("trainer_command")
    monkeypatch.setattr(module, "way_out", lambda: {"https_proxy": "http://me:secret@10.0.0.9"})
    seen = []

    def run(command, **options):
        files = [word.partition("EnvironmentFile=")[2] for word in command if "EnvironmentFile=" in word]
        seen.append([(Path(file).read_text(), Path(file).stat().st_mode & 0o777) for file in files])
        seen.append(files)
        assert "secret" not in str(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    class Ended(Exception):
        pass

    def end(*_, **told):
        raise Ended(told)

    params = {"program": "/bin/true", "arguments": [verb], "user": "u", "state_dir": "/v", "behind": False}
    params |= {"most": 0, "creates": None, "variables": {}, "credentials": {}}
    fake = SimpleNamespace(params=params, check_mode=False, exit_json=end, fail_json=end)
    monkeypatch.setattr(module, "AnsibleModule", lambda **_: fake)
    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(Ended):
        module.main()
    assert seen[0] == ([('https_proxy="http://me:secret@10.0.0.9"\n', 0o600)] if verb == "fetch" else [])
    assert not any(Path(file).exists() for file in seen[1])


# ---- the files that come ----


class Bringer(run_export.ActionModule):
    """With a host that is a directory here; `cut`: bytes after which the way is cut."""

    def __init__(self, cut=None):
        self.left, self.fetched, self.here = cut, 0, []

    def _append(self, source, part, have):
        assert self.coming.growing == part.with_name(f"{part.name}.piece")
        self.here.append(self.coming.done)
        with open(source, "rb") as file:
            file.seek(have)
            piece = file.read(4)
        if self.left is not None and self.fetched + len(piece) > self.left:
            raise run_export.Refused("cut")
        self.fetched += len(piece)
        with part.open("ab") as whole:
            whole.write(piece)


def listed(source):
    return [
        {"path": str(path), "size": path.stat().st_size, "checksum": run_export.sha256(path)}
        for path in source.rglob("*")
        if path.is_file()
    ]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    (path / "below").mkdir(parents=True)
    (path / "a.bin").write_bytes(b"0123456789")
    (path / "below/b.txt").write_bytes(b"text")
    return path


def bring(bringer, to, source, about):
    found = run_export.look(to, about)
    return bringer._bring(to, about, source, listed(source), found["own"])


def test_it_comes_whole_and_a_second_look_finds_nothing_to_do(tmp_path, source):
    to, about = tmp_path / "a/to", {"step": 4}
    assert run_export.look(to, about) == {"stands": False, "own": {}}
    bring(Bringer(), to, source, about)
    assert run_export.present(to) == run_export.present(source)
    assert run_export.look(to, about)["stands"]
    assert not run_export.look(to, {"step": 5})["stands"]


def test_cut_off_it_goes_on_where_it_was(tmp_path, source):
    to, about = tmp_path / "to", {"step": 4}
    with pytest.raises(run_export.Refused):
        bring(Bringer(cut=8), to, source, about)
    assert not run_export.look(to, about)["stands"]
    again = Bringer()
    bring(again, to, source, about)
    assert again.fetched == 14 - 8
    # What is here already counts, as far as it is not whole.
    assert again.here[0] == again.coming.total - (14 - 8) and again.coming.done == again.coming.total
    assert run_export.look(to, about)["stands"]
    assert not [path for path in to.rglob("*") if run_export.is_part(path)]


def test_room_is_asked_for_what_has_not_come_yet(tmp_path, source, monkeypatch):
    """With the piece that comes beside what is there; a first run that filled the disk is none against the second."""
    to, about = tmp_path / "to", {"step": 4}
    monkeypatch.setattr(run_export, "PIECE", 4)
    free = SimpleNamespace(free=17)
    monkeypatch.setattr(run_export.shutil, "disk_usage", lambda _: free)
    with pytest.raises(run_export.Refused, match="GB free"):
        bring(Bringer(), to, source, about)
    free.free = 18
    with pytest.raises(run_export.Refused, match="cut"):
        bring(Bringer(cut=8), to, source, about)
    free.free = 10
    bring(Bringer(), to, source, about)
    assert run_export.look(to, about)["stands"]


def test_a_newer_export_takes_the_place_of_an_older_and_brings_what_differs_alone(tmp_path, source):
    to = tmp_path / "to"
    bring(Bringer(), to, source, {"step": 4})
    (source / "a.bin").write_bytes(b"9876543210")
    (source / "below/b.txt").rename(source / "c.txt")
    with pytest.raises(run_export.Refused):
        bring(Bringer(cut=4), to, source, {"step": 8})
    bring(Bringer(), to, source, {"step": 8})
    assert run_export.present(to) == run_export.present(source)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda to: (to / "mine.txt").write_text("x"), "changed since the export before (mine.txt)"),
        (lambda to: (to / "a.bin").write_text("x"), "changed since the export before (a.bin)"),
        (lambda to: (to / "link").symlink_to("a.bin"), "(link)"),
        (lambda to: os.mkfifo(to / "pipe"), "(pipe)"),
        (lambda to: ((to / "a.bin").unlink(), os.mkfifo(to / "a.bin")), "(a.bin)"),
        (lambda to: (to / run_export.RECORD).write_text("{"), "which cannot be read"),
        (lambda to: (to / run_export.RECORD).unlink(), "that no export has put there (a.bin, below/b.txt)"),
    ],
)
def test_what_is_another_s_is_never_overwritten(tmp_path, source, spoil, said):
    to = tmp_path / "to"
    bring(Bringer(), to, source, {"step": 4})
    spoil(to)
    before = run_export.present(to)
    with pytest.raises(run_export.Refused) as refused:
        run_export.look(to, {"step": 8})
    assert said in str(refused.value) and "-e to=DIR" in str(refused.value)
    assert run_export.present(to) == before


def test_what_no_export_has_put_there_is_not_read(tmp_path, monkeypatch):
    """It may be all models of a house."""
    (tmp_path / "llama.safetensors").write_text("x")
    monkeypatch.setattr(run_export, "sha256", lambda path: pytest.fail(f"{path} is read"))
    with pytest.raises(run_export.Refused, match=r"llama\.safetensors"):
        run_export.look(tmp_path, {"step": 4})


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "to").write_text("x")
    with pytest.raises(run_export.Refused, match="no directory"):
        run_export.look(tmp_path / "to", {})


def test_what_came_damaged_is_not_kept(tmp_path, source):
    files = listed(source)
    for one in files:
        one["checksum"] = "0" * 64
    with pytest.raises(run_export.Refused, match="SHA-256"):
        Bringer()._bring(tmp_path / "to", {}, source, files, {})
    assert run_export.present(tmp_path / "to") == {}


@pytest.mark.parametrize("name", ["../.bashrc", "../../root/.ssh/authorized_keys", "a/../../b"])
def test_a_host_puts_no_file_outside_of_the_export(tmp_path, source, name):
    forged = [*listed(source), {"path": f"{source}/{name}", "checksum": "0" * 64, "size": 3}]
    with pytest.raises(run_export.Refused, match="which is outside of it"):
        Bringer()._bring(tmp_path / "to", {}, source, forged, {})
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("run_dir", ["/var/lib/trainyard/runs/a", "/mnt/cache//checkpoints/runs/stop"])
def test_what_is_a_result_is_told_by_its_place_in_the_run(run_dir):
    results = ["model/stop/x", "metrics.jsonl", "logs/rank-0.log", "tensorboard/cache"]
    others = [
        "checkpoints/step-00000004/model.safetensors",
        "cache/x",
        "compiled/node1/a/b.so",
        "offload/rank-0",
        "export-0123456789ab-merged/config.json",
        ".model.tmp/config.json",
        "logs/collectives-0.json",
        "logs/node2/rank-0.log",
        "launch.pid",
        "leave-node2",
        "turn-node2",
        "yield",
        ".export-0123456789ab.tmp/model-00001-of-00002.safetensors",
        "stop",
    ]
    found = run_results([f"{run_dir}/{name}" for name in [*results, *others]] + ["/etc/passwd"], run_dir)
    assert found == sorted(f"{run_dir}/{name}" for name in results)


def test_what_the_controller_keeps_beside_the_results_comes_from_no_host():
    run_dir = "/var/lib/trainyard/runs/a"
    own = (
        "report.html",
        "sample.txt",
        "samples.jsonl",
        "diagnosis.txt",
        "export/config.json",
        "export",
        "sample.txt/x",
    )
    others = ("model/sample.txt", "model/export/x", "exported.txt", "logs/report.html")
    found = run_results([f"{run_dir}/{name}" for name in (*own, *others)], run_dir)
    assert found == sorted(f"{run_dir}/{name}" for name in others)


def test_the_results_are_those_of_who_came_furthest_of_those_that_saw_the_end():
    left_behind = {"state": "failed", "last": {"step": 100}}
    last = {"state": "failed", "last": {"step": 5000}}
    followed = {"node1": left_behind, "node2": last, "node3": last, "node4": {}}
    assert run_source(followed, "failed", {}) == "node2"
    assert run_source({**followed, "node4": {"state": "finished", "last": {}}}, "finished", {}) == "node4"
    assert run_source({"node1": {}, "node2": {"last": {"step": 3}}}, "unreachable", {}) == "node2"
    assert run_source({"node1": {}, "node2": {}}, "finished", {}) == "node1"


def test_of_what_a_host_says_a_run_left_only_what_is_below_its_directory_is_brought():
    run_dir = "/var/lib/trainyard/runs/a"
    named = [
        f"{run_dir}/summary.json",
        f"{run_dir}/../b/x",
        "/etc/passwd",
        f"{run_dir}/logs/../../../x",
        f"{run_dir}-b/x",
    ]
    assert found_below(named, run_dir) == named[:1]
    assert found_below(["/v//runs/a/x"], "/v//runs/a") == [
        "/v//runs/a/x"
    ]  # as an inventory's trailing slash has it


def test_results_come_from_another_where_the_one_that_came_furthest_is_silent_by_then():
    followed = {"node1": {"state": "finished"}, "node2": {"state": "finished"}}
    gone, there = {"unreachable": True, "msg": "timed out"}, {"files": [{"path": "x"}]}
    assert run_source(followed, "finished", {"node1": gone, "node2": there}) == "node2"
    assert run_source(followed, "finished", {"node1": gone, "node2": gone}) == "node1"
    again = "ansible-playbook train.yml -e run=a -e follow=true"
    assert run_unbrought("a", "node1", there, {"results": [{"changed": True}]}, again) == ""
    assert run_unbrought("a", "node1", {"files": []}, {"skipped": True}, again) == ""
    cut = {"results": [{"changed": True}, {"unreachable": True, "msg": "ssh: timed out\nmore"}]}
    for found, brought, why in (
        (gone, {}, "does not answer"),
        (there, cut, "ssh: timed out"),
        (there, {}, "does not answer"),  # a task before it failed there
        ({}, {}, "answer"),
    ):
        text = run_unbrought("a", "node1", found, brought, again)
        assert "found node1 silent, or unable to send them (" in text and why in text and text.endswith(again)
