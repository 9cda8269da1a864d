"""A run that was interrupted has the curve of one that was not."""

import json
import os
import re
import shutil
import signal

import pytest
import ranks

pytestmark = pytest.mark.distributed


def checkpoints(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_a_signal_saves_and_resume_is_exact_to_the_last_bit(material, whole, tmp_path):
    ranks.run(tmp_path, 1, material / "run.yaml", codes=[75], stop_in=5)
    directory = tmp_path / "node0"
    assert ranks.losses(directory) == whole[:5]
    state = ranks.status(directory)
    assert (state["state"], state["last_checkpoint"]) == ("stopped", 5)
    assert "step 5 of 12" in state["reason"]
    assert checkpoints(directory) == ["step-00000004", "step-00000005"]

    assert ranks.run(tmp_path, 1, material / "run.yaml") == whole
    assert ranks.status(directory)["state"] == "finished"
    log = directory / "logs" / "rank-0.log"
    assert "resuming after step 5" in log.read_text() and "no step is left" not in log.read_text()

    assert ranks.run(tmp_path, 1, material / "run.yaml", "steps=3") == whole
    said = "resuming after step 12, from node0\\n.*no step is left: steps and epochs ask for 3 of them; raise these"
    assert re.search(said, log.read_text())


def _asked_in_evaluation(run, packed, sequences, routed=None):
    """Rank 0 gets a signal in its second micro-batch of the first evaluation."""
    from trainer.evaluate import summed_loss_really

    calls = vars(run).setdefault("calls", [])
    calls.append(sequences)
    if len(calls) == 2 and run.world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return summed_loss_really(run, packed, sequences, routed)


@pytest.mark.parametrize(
    ("size", "strategy"), [(1, "ddp"), (2, "ddp"), pytest.param(2, "zero2", marks=pytest.mark.full)]
)
def test_a_stop_in_an_evaluation_is_seen_before_its_end(material, tmp_path, size, strategy):
    words = (
        material / "run.yaml",
        "validation_split=0.5",
        "eval_every=6",
        "checkpoint_every=0",
        f"strategy={strategy}",
    )
    straight = ranks.run(tmp_path / "straight", size, *words)
    patch = {("trainer.evaluate", "summed_loss"): _asked_in_evaluation}
    ranks.run(tmp_path / "asked", size, *words, patch=patch, codes=[75] * size)
    asked = tmp_path / "asked/node0"
    state = ranks.status(asked)
    assert (state["state"], state["last_checkpoint"]) == ("stopped", 6)
    assert "in the evaluation after step 6 of 12" in state["reason"]
    assert ranks.records(asked, "eval") == []
    assert ranks.run(tmp_path / "asked", size, *words) == straight
    evaluated = [
        [(one["step"], one["loss"]) for one in ranks.records(tmp_path / name / "node0", "eval")]
        for name in ("straight", "asked")
    ]
    assert evaluated[0] == evaluated[1] and [step for step, _ in evaluated[0]] == [6, 12]


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "fsdp"),
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("zero1", "zero2", "zero3", "offload", "infinity")
        ),
    ],
)
def test_resume_of_three_ranks_is_exact(material, tmp_path, strategy):
    """A ring adds three values in an order that depends on their place: buckets must lie as they did."""
    small = {("trainer.strategies.ddp", "BUCKET_BYTES"): 4096}
    run = (material / "run.yaml", f"strategy={strategy}")
    straight = ranks.run(tmp_path / "straight", 3, *run, patch=small)
    ranks.run(tmp_path / "resumed", 3, *run, patch=small, stop_in=5, codes=[75] * 3)
    assert ranks.run(tmp_path / "resumed", 3, *run, patch=small) == straight


@pytest.mark.parametrize(
    "strategies",
    [
        ("ddp", "ddp", "ddp"),
        ("zero1", "fsdp", "infinity"),
        pytest.param(("zero2", "offload", "zero3"), marks=pytest.mark.full),
        pytest.param(("offload", "zero3", "zero2"), marks=pytest.mark.full),
        pytest.param(("fsdp", "zero1", "ddp"), marks=pytest.mark.full),
        pytest.param(("ddp", "infinity", "zero1"), marks=pytest.mark.full),
    ],
)
def test_resume_on_other_numbers_of_ranks(material, whole, tmp_path, strategies):
    """2, then 3, then 1; the third host has no copy and receives one, the last attempt runs on the host of a copy."""
    first, second, third = (f"strategy={strategy}" for strategy in strategies)
    ranks.run(tmp_path, 2, material / "run.yaml", first, codes=[75] * 2, stop_in=3)
    ranks.run(tmp_path, 3, material / "run.yaml", second, codes=[75] * 3, stop_in=8)
    assert not (tmp_path / "node2" / "checkpoints").exists()
    assert ranks.run(tmp_path, 1, material / "run.yaml", third) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_resume_with_other_shares(material, whole, tmp_path, strategy):
    """Of the same ranks; the steps before and after have shares that differ, as what they say of themselves tells."""
    run = material / "run.yaml", f"strategy={strategy}"
    ranks.run(tmp_path, 2, *run, "balance=6,1", codes=[75] * 2, stop_in=5)
    assert ranks.run(tmp_path, 2, *run, "balance=1,6") == pytest.approx(whole, rel=1e-5)
    told = [one["shares"] for one in ranks.records(tmp_path / "node0", "train")]
    assert told == [[6, 1]] * 5 + [[1, 6]] * 7


def test_of_two_starts_that_went_on_apart_the_later_one_counts(material, whole, tmp_path):
    """The head came back while the run had been resumed without it, and could be told by nobody: it was further."""
    run = material / "run.yaml"
    ranks.run(tmp_path, 2, run, launch="1", codes=[75] * 2, stop_in=3)
    ranks.run(tmp_path, 1, run, "lr=0.1", launch="1", codes=[75], stop_in=9)
    ranks.run(tmp_path, 1, run, absent=1, launch="2", codes=[75], stop_in=6)
    assert ranks.run(tmp_path, 2, run, launch="3") == pytest.approx(whole, rel=1e-5)
    head = tmp_path / "node0"
    assert "resuming after step 6" in (head / "logs" / "rank-0.log").read_text()
    told = [one["reason"] for one in ranks.records(head, "event") if one["event"] == "damaged checkpoint"]
    assert told == [
        f"node0: the checkpoint of step {step} is of an earlier start of the run, and the later one has come to step 6"
        for step in (8, 9)
    ]
    assert checkpoints(head) == checkpoints(tmp_path / "node1") == ["step-00000008", "step-00000012"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategies", "last"),
    [(("fsdp", "ddp", "zero2"), 2), (("fsdp", "ddp", "zero2"), 1), (("zero3", "offload", "infinity"), 1)],
)
def test_resume_of_an_adapter(material, tmp_path, strategies, last):
    """Its checkpoint is what peft writes and reads, without the frozen weights."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    lora = (material / "run.yaml", "adapter=lora", "lora_rank=4", "lora_dropout=0.1")
    straight = ranks.run(tmp_path / "straight", 1, *lora)
    first, second, third = (f"strategy={strategy}" for strategy in strategies)
    ranks.run(tmp_path, 2, *lora, first, codes=[75] * 2, stop_in=3)
    ranks.run(tmp_path, 3, *lora, second, codes=[75] * 3, stop_in=8)
    assert ranks.run(tmp_path, last, *lora, third) == pytest.approx(straight, rel=1e-5)

    checkpoint = tmp_path / f"node{last - 1}" / "checkpoints" / "step-00000012"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} <= names
    assert not {"model.safetensors", "config.json"} & names
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(material / "model"))
    adapted = dict(PeftModel.from_pretrained(base, checkpoint).named_parameters())
    for key, value in load_file(checkpoint / "adapter_model.safetensors").items():
        assert value.abs().max() > 0
        assert adapted[key.replace(".weight", ".default.weight")].equal(value)
    exported = load_file(tmp_path / "node0" / "model" / "adapter_model.safetensors")
    assert exported.keys() == load_file(checkpoint / "adapter_model.safetensors").keys()


def test_a_killed_rank_ends_all_and_a_restart_has_the_same_curve(material, whole, tmp_path):
    long = (material / "run.yaml", "steps=4000", "checkpoint_every=4")
    attempt = ranks.Ranks(tmp_path, 2, *long)
    attempt.wait_for_step(6)
    os.kill(attempt.processes[1].pid, signal.SIGKILL)
    assert attempt.codes(120) == [5, -signal.SIGKILL]
    assert "lost a peer" in ranks.status(tmp_path / "node0")["reason"]
    # The schedule depends on the number of steps: an uninterrupted run of as many is what to compare with.
    reached = len(ranks.losses(tmp_path / "node0")) + 6
    straight = ranks.Ranks(tmp_path / "straight", 2, *long)
    again = ranks.Ranks(tmp_path, 2, *long)
    for attempt in (straight, again):
        attempt.wait_for_step(reached)
        os.kill(attempt.processes[0].pid, signal.SIGTERM)
    assert straight.codes(120) == again.codes(30) == [75, 75]
    curves = (
        ranks.losses(tmp_path / "straight" / "node0")[:reached],
        ranks.losses(tmp_path / "node0")[:reached],
    )
    assert curves[0] == curves[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest", "half written", "another cursor", "empty"])
def test_a_damaged_newest_checkpoint_is_passed_over(material, whole, tmp_path, damage):
    ranks.run(tmp_path, 1, material / "run.yaml", codes=[75], stop_in=9)
    newest = tmp_path / "node0" / "checkpoints" / "step-00000009"
    weights = newest / "model.safetensors"
    content = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "cut":
        weights.write_bytes(content[:-100])
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "another cursor":
        text = (newest / "manifest.json").read_text()
        assert text.count('"cursor": 63') == 1
        (newest / "manifest.json").write_text(text.replace('"cursor": 63', '"cursor": 62'))
    elif damage == "empty":
        (newest / "manifest.json").write_text('{"format": 1, "files": {}}')
    else:
        (newest / "manifest.json").write_text('{"step": 9, "fi')

    assert ranks.run(tmp_path, 1, material / "run.yaml") == whole
    log = (tmp_path / "node0" / "logs" / "rank-0.log").read_text()
    assert (
        "passed over a damaged checkpoint" in log
        and "step-00000009" in log
        and "resuming after step 8" in log
    )
    (told,) = (
        one for one in ranks.records(tmp_path / "node0", "event") if one["event"] == "damaged checkpoint"
    )
    assert told["step"] == 8 and told["reason"].startswith("node0: ") and "step-00000009" in told["reason"]
    assert checkpoints(tmp_path / "node0") == ["step-00000008", "step-00000012"]  # 9 is gone: it never was


def test_no_valid_checkpoint_at_all_is_refused(material, tmp_path):
    """To begin anew, unasked, would throw away what might be repaired."""
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=2")
    (tmp_path / "node0" / "checkpoints" / "step-00000002" / "optimizer.safetensors").unlink()
    ranks.run(tmp_path, 1, material / "run.yaml", codes=[2])
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "none of the run's checkpoints is valid" in reason and "optimizer.safetensors: missing" in reason


def test_the_copy_on_another_host_is_enough(material, whole, tmp_path):
    ranks.run(tmp_path, 2, material / "run.yaml", codes=[75] * 2, stop_in=6)
    for node in ("node0", "node1"):
        manifest = json.loads(
            (tmp_path / node / "checkpoints" / "step-00000006" / "manifest.json").read_text()
        )
        assert [copy["host"] for copy in manifest["copies"]] == ["node0", "node1"]
    shutil.rmtree(tmp_path / "node0")
    ranks.Ranks(tmp_path, 2, material / "run.yaml").codes()
    manifest = json.loads(
        (tmp_path / "node0" / "checkpoints" / "step-00000012" / "manifest.json").read_text()
    )
    assert manifest["progress"]["step"] == 12
    # A release from before it was there takes all of the rest for its own.
    assert "launch" in manifest and "launch" not in manifest["progress"]
    for node in ("node0", "node1"):  # the history, too
        assert ranks.losses(tmp_path / node) == pytest.approx(whole, rel=1e-5)


def test_a_run_does_not_begin_anew_where_the_newest_checkpoint_is_elsewhere(material, whole, tmp_path):
    """The third host knows that step 6 was saved, and by whom; its losses stay until somebody gives that up."""
    ranks.run(tmp_path, 3, material / "run.yaml", codes=[75] * 3, stop_in=6)
    before = ranks.losses(tmp_path / "node2")
    assert ranks.Ranks(tmp_path, 1, material / "run.yaml", absent=2).codes() == [2]
    reason = ranks.status(tmp_path / "node2")["reason"]
    assert "newest checkpoint, of step 6, is on node0 and node1, and on no host that takes part" in reason
    assert "-e lost_step=6 begins anew" in reason
    assert ranks.losses(tmp_path / "node2") == before == pytest.approx(whole[:6], rel=1e-5)
    assert ranks.Ranks(tmp_path, 1, material / "run.yaml", "lost_step=6", absent=2).codes() == [0]
    assert ranks.losses(tmp_path / "node2") == whole
    ranks.run(tmp_path, 3, material / "run.yaml", "lost_step=6")  # what was lost is back, and behind


def test_a_good_copy_on_an_absent_host_is_named(material, tmp_path):
    alone = (material / "run.yaml", "checkpoint_keep=1")
    ranks.run(tmp_path, 2, *alone, codes=[75] * 2, stop_in=6)
    (tmp_path / "node1/checkpoints/step-00000006/optimizer.safetensors").unlink()
    assert ranks.Ranks(tmp_path, 1, *alone, absent=1).codes() == [2]
    reason = ranks.status(tmp_path / "node1")["reason"]
    assert "optimizer.safetensors: missing" in reason and "choose another run name" in reason
    assert "none of the run's checkpoints is valid on the hosts that take part" in reason
    assert "node0 had a copy of step 6, too" in reason and "switch it on" in reason


def test_another_dataset_is_refused(material, tmp_path):
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=2")
    other = tmp_path / "other.txt"
    other.write_text("a calm sea and nobody on board knows\n" * 50)
    ranks.run(tmp_path, 1, material / "run.yaml", f"dataset={other}", codes=[2])
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert (
        "dataset" in reason
        and "data.jsonl then" in reason
        and "other.txt now" in reason
        and "run name" in reason
    )
    ranks.run(tmp_path, 1, material / "run.yaml", "resume=never", codes=[2])
    assert "resume is never" in ranks.status(tmp_path / "node0")["reason"]


def test_a_run_that_is_not_to_resume_recovers_all_the_same(material, tmp_path):
    """`resume: never` refuses what an earlier start has left, not what this one goes on from after a failure."""
    never = (material / "run.yaml", "resume=never")
    ranks.run(tmp_path, 1, *never, codes=[75], stop_in=6, launch="20261129T100000")
    ranks.run(tmp_path, 1, *never, codes=[2], launch="20261129T110000")
    assert "resume is never" in ranks.status(tmp_path / "node0")["reason"]
    ranks.run(tmp_path, 1, *never, launch="20261129T100000")
    whole = ranks.run(tmp_path / "whole", 1, material / "run.yaml")
    assert ranks.losses(tmp_path / "node0") == whole


def test_a_model_that_computes_otherwise_with_equal_shapes_is_refused(material, tmp_path):
    """What differs is named; a checkpoint that does not tell, of an earlier version, is gone on from."""
    other = tmp_path / "other"
    shutil.copytree(material / "model", other)
    content = json.loads((other / "config.json").read_text())
    changes = {"activation_function": "relu", "layer_norm_epsilon": 0.01}
    (other / "config.json").write_text(
        json.dumps(content | changes | {"use_cache": False, "pad_token_id": 3})
    )
    run = (material / "run.yaml", f"model={other}")
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=2")
    ranks.run(tmp_path, 1, *run, codes=[2])
    said = ranks.status(tmp_path / "node0")["reason"]
    assert "made from something else: config.activation_function: gelu_new then, relu now; " in said
    assert "config.layer_norm_epsilon: 1e-05 then, 0.01 now. Cure" in said

    manifest = tmp_path / "node0" / "checkpoints" / "step-00000002" / "manifest.json"
    facts = json.loads(manifest.read_text())
    kept = {what: one for what, one in facts["identity"].items() if not what.startswith("config.")}
    assert len(kept) < len(facts["identity"])
    del facts["sha256"]  # nor had an earlier version that
    manifest.write_text(json.dumps({**facts, "identity": kept}))
    assert len(ranks.run(tmp_path, 1, *run, "steps=3")) == 3


def test_a_finished_run_started_again_only_says_so(material, tmp_path):
    first = ranks.run(tmp_path, 1, material / "run.yaml", "steps=3")
    assert ranks.run(tmp_path, 1, material / "run.yaml", "steps=3") == first
    assert ranks.status(tmp_path / "node0")["state"] == "finished"


def test_an_adapter_goes_on_only_with_the_weights_and_the_scale_it_was_trained_for(material, tmp_path):
    """Another base of the same shape fits its checkpoint just as well, and would give nonsense."""
    from safetensors.torch import load_file, save_file

    base, other = tmp_path / "base", tmp_path / "other"
    weights = tmp_path / "weights"
    ranks.run(weights, 1, material / "run.yaml", "steps=1")
    shutil.copytree(weights / "node0" / "model", base)
    shutil.copytree(base, other)
    changed = load_file(other / "model.safetensors")
    name = next(name for name in changed if name.endswith("weight"))
    changed[name] = changed[name] + 0.5
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})

    lora = (material / "run.yaml", "adapter=lora", "lora_rank=4")
    ranks.run(tmp_path, 1, *lora, f"model={base}", codes=[75], stop_in=3)
    log = tmp_path / "node0" / "logs" / "rank-0.log"
    for setting, word in (
        (f"model={other}", "frozen weights: "),
        ("lora_alpha=8", "lora_alpha: 32.0 then, 8.0 now"),
    ):
        words = (setting,) if setting.startswith("model") else (f"model={base}", setting)
        ranks.run(tmp_path, 1, *lora, *words, codes=[2])
        said = log.read_text()
        assert (
            "was made from something else" in said.rsplit("=== ", 1)[1] and word in said.rsplit("=== ", 1)[1]
        )
    ranks.run(tmp_path, 1, *lora, f"model={shutil.copytree(base, tmp_path / 'moved')}")
