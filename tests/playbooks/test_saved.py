"""generate.yml and export.yml on two nodes of this machine: text and a model from a run, and what is refused."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time

import pytest
from yard import SMALL, Yard, changed, failures, said

PROMPT = """'a' $H {{ 1+1 }};"""  # the model has 32 positions


@pytest.fixture(scope="module")
def yard(tmp_path_factory):
    """A yard in which the run `first` has finished."""
    yard = Yard(tmp_path_factory.mktemp("a yard"))
    run = yard.play(run="first", **SMALL, checkpoint_every=2)
    assert run.rc == 0, said(run)
    yield yard
    yard.clear()


def shown(run):
    """What the play shows by itself."""
    return said(run).split("TASK [trainer : Generate]")[-1]


@pytest.mark.full
def test_a_prompt_goes_on_as_it_was_typed_and_the_same_seed_writes_the_same(yard):
    texts = []
    for seed in (1, 1):
        run = yard.play("playbooks/generate.yml", run="first", prompt=PROMPT, tokens=8, seed=seed)
        assert run.rc == 0 and changed(run) == 0, said(run)
        assert f"\n{PROMPT}" in shown(run)
        texts.append(re.search(rf"^{re.escape(PROMPT)}.*", shown(run), re.M)[0])
    assert texts[0] == texts[1] and len(texts[0]) > len(PROMPT)


@pytest.mark.full
def test_without_a_name_the_newest_run_speaks_and_a_file_holds_what_no_command_line_does(yard):
    (yard.path / "prompt.txt").write_text("It's late,\nshe said")
    run = yard.play("playbooks/generate.yml", prompt_file=yard.path / "prompt.txt", tokens=2)
    assert run.rc == 0, said(run)
    assert "It's late,\nshe said" in shown(run)
    *_, kept = (yard.results / "first/samples.jsonl").read_text().splitlines()
    assert json.loads(kept)["prompt"] == "It's late,\nshe said"
    assert kept[-20:-3] in (yard.results / "first/report.html").read_text()
    silent = yard.play("playbooks/generate.yml", chat="true")
    assert silent.rc and "expected what is to be answered. Add -e prompt=" in failures(silent)[0], said(
        silent
    )


@pytest.mark.full
def test_the_prompts_of_the_inventory_are_in_the_report_and_one_that_cannot_be_gone_on_with_is_named(yard):
    prompts = json.dumps({"trainer_sample_prompts": ["She had 'a' $H;", "She " * 40]})
    run = yard.play(run="texts", arguments=f"-e {shlex.quote(prompts)}", **SMALL)
    assert run.rc == 0, said(run)
    (kept,) = map(json.loads, (yard.results / "texts/samples.jsonl").read_text().splitlines())
    assert kept["prompt"] == "She had 'a' $H;"
    assert kept["text"].startswith(kept["prompt"]) and len(kept["text"]) > len(kept["prompt"])
    assert (
        json.dumps(kept["text"])[1:-1].replace("<", "\\u003c")
        in (yard.results / "texts/report.html").read_text()
    )
    words = " ".join(said(run).split())
    assert "The report has no text of the model: the prompt has" in words and "shorten it" in words
    assert "Run texts finished" in words
    for node in ("node1", "node2"):
        shutil.rmtree(yard.node(node) / "var/runs/texts")


@pytest.mark.full
@pytest.mark.parametrize(("other", "threads"), [(True, "1"), (False, "")])
def test_a_text_for_the_report_stands_back_where_another_run_has_begun(yard, other, threads):
    """One that was queued begins as soon as the first has ended, and wants its card."""
    seen = yard.path / "seen"
    for node in ("node1", "node2"):
        program = (yard.node(node) / "opt/current/bin/trainer").read_text()
        note = f'[ "$1" != generate ] || echo "threads $OMP_NUM_THREADS" > {shlex.quote(str(seen))}\nexec '
        yard.deploy(node, script=program.replace("exec ", note))
    environment = {**os.environ, "TRAINYARD_RUN_DIR": str(yard.node("node1") / "var/runs/other")}
    words = ["sleep", "600"]
    process = subprocess.Popen(words, env=environment) if other else None
    try:
        prompts = json.dumps({"trainer_sample_prompts": ["She"]})
        run = yard.play(run="texts", beside="true", arguments=f"-e {shlex.quote(prompts)}", **SMALL)
        assert run.rc == 0, said(run)
        assert seen.read_text() == f"threads {threads}\n"
    finally:
        if process:
            process.kill()
            process.wait()
        for node in ("node1", "node2"):
            yard.deploy(node)
            shutil.rmtree(yard.node(node) / "var/runs/texts", ignore_errors=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"run": "frist"}, "run: found frist, which none of node1, node2 knows; expected one of first."),
        ({"tokens": "few"}, "tokens: found 'few'; expected a whole number, 1 or more."),
        ({"tokes": 3}, "-e tokes: found an unknown word; expected tokens?"),
        ({"prompt": "She " * 40}, "the model 32 positions; shorten it"),
        ({"checkpoint": 7}, "checkpoint: found no valid one of step 7 in run first; expected one of"),
    ],
)
def test_what_is_wrong_is_refused_with_its_cure(yard, words, message):
    run = yard.play("playbooks/generate.yml", **{"run": "first", "prompt": "She", **words})
    assert run.rc != 0
    (said_,) = failures(run)
    assert message in said_ and "Traceback" not in said(run)


def test_a_run_without_a_model_yet_says_what_to_do(yard):
    early = yard.node("node1") / "var/runs/early"
    early.mkdir()
    (early / "status.json").write_text(json.dumps({"run": "early", "state": "starting", "updated": 1}))
    run = yard.play("playbooks/generate.yml", run="early", prompt="She")
    shutil.rmtree(early)
    (message,) = failures(run)
    assert message.startswith(
        "run early: found neither a finished model nor a valid checkpoint; expected one."
    )


@pytest.mark.full
def test_a_model_is_brought_once_and_what_is_anothers_stays(yard):
    told = yard.play("playbooks/export.yml", arguments="--check", run="first")
    to = yard.results / "first/export"
    assert told.rc == 0 and changed(told) == 1 and not to.exists(), said(told)

    for name, days in (("export-0123456789ab", 2), (".export-0123456789ac.tmp", 2), ("export-young", 0)):
        left = yard.node("node1") / "var/runs/first" / name
        left.mkdir()
        os.utime(left, (time.time() - days * 86400,) * 2)
    run = yard.play("playbooks/export.yml", run="first")
    assert run.rc == 0, said(run)
    assert "run first after step 4, the finished model on node1." in said(run)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        one.name for one in to.iterdir()
    }
    model = yard.node("node1") / "var/runs/first/model/model.safetensors"
    assert (to / "model.safetensors").stat().st_size == model.stat().st_size
    left = list((yard.node("node1") / "var/runs/first").glob("*export*"))
    assert [one.name for one in left] == ["export-young"]  # another controller may be bringing it
    left[0].rmdir()

    again = yard.play("playbooks/export.yml", run="first")
    assert again.rc == 0 and changed(again) == 0 and "There is already" in said(again)

    (to / "README.md").write_text("mine")
    refused = yard.play("playbooks/export.yml", run="first", checkpoint=2)
    (message,) = failures(refused)
    assert "(README.md)" in message and "-e to=DIR" in message
    assert (to / "README.md").read_text() == "mine"


@pytest.mark.full
def test_a_checkpoint_becomes_a_model_elsewhere(yard):
    to = yard.path / "of step 2"
    run = yard.play("playbooks/export.yml", run="first", checkpoint=2, to=to)
    assert run.rc == 0, said(run)
    assert "run first after step 2, the checkpoint on node1." in said(run)
    assert (to / "model.safetensors").exists() and not (to / "optimizer.safetensors").exists()


@pytest.mark.full
def test_a_damaged_copy_is_passed_over(yard):
    """Of the step's two copies, node1's has lost a byte."""
    for path in (yard.node("node1") / "var/runs/first/checkpoints/step-00000002").glob("model.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run = yard.play("playbooks/export.yml", run="first", checkpoint=2, to=yard.path / "whole")
    assert run.rc == 0, said(run)
    assert "the checkpoint on node2." in said(run)


@pytest.mark.full
def test_an_adapter_is_exported_as_it_is_and_merged(yard):
    run = yard.play(run="thin", adapter="lora", lora_rank=2, **SMALL)
    assert run.rc == 0, said(run)
    plain = yard.play("playbooks/export.yml", run="thin")
    assert plain.rc == 0, said(plain)
    assert (yard.results / "thin/export/adapter_model.safetensors").exists()
    merged = yard.play("playbooks/export.yml", run="thin", merge="true", to=yard.path / "merged")
    assert merged.rc == 0, said(merged)
    assert (yard.path / "merged/model.safetensors").exists()
    assert not (yard.path / "merged/adapter_config.json").exists()


@pytest.mark.full  # of the runs before it
def test_old_runs_go_when_a_new_one_comes_where_that_is_asked_for(yard):
    run = yard.play(run="last", trainer_runs_kept=1, **SMALL)
    assert run.rc == 0, said(run)
    assert (
        "old runs were removed, as trainer_runs_kept and trainer_runs_kept_days ask: first from node1, node2"
        in said(run)
    )
    for node in ("node1", "node2"):
        assert {path.name for path in (yard.node(node) / "var/runs").iterdir()} == {"thin", "last"}
        assert not list((yard.node(node) / "etc/runs").glob("first.*"))
    assert (yard.results / "first/summary.json").exists()
