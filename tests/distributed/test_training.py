"""Adapters, quantised weights and optimizers on any number of ranks; evaluation; batches that do harm."""

import functools
import gzip
import json
import os
import pty
import select
import shutil
import sys
import termios
import time

import pytest
import ranks
import torch
from safetensors.torch import load_file

from trainer import metrics

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(material, tmp_path_factory):
    """The model directory of a run that has ended, and left something to learn."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(folder, 1, material / "run.yaml", "steps=2")
    return folder / "node0" / "model"


WAYS = {
    "lora": ["adapter=lora", "lora_rank=4"],
    "lora with dropout": ["adapter=lora", "lora_rank=4", "lora_dropout=0.2", "lora_targets=all-linear"],
    "lora, activations computed again": ["adapter=lora", "lora_dropout=0.2", "gradient_checkpointing=true"],
    "lora beside 4 bits": ["adapter=lora", "quantize=4bit"],
}


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_on_any_number_of_ranks(material, trained, tmp_path, way):
    """One loss curve, and the base stays as it was: the adapter alone is written."""
    extra = (f"model={trained}", "steps=8", "lr=0.02", *WAYS[way])
    one = ranks.run(tmp_path / "one", 1, material / "run.yaml", *extra)
    two = ranks.run(tmp_path / "two", 2, material / "run.yaml", *extra, "micro_batch_size=1")
    assert two == pytest.approx(one, rel=1e-5)
    results = tmp_path / "two/node0/model"
    adapter = load_file(results / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for tensor in adapter.values())  # lora_B begins as zeros
    files = {path.name for path in results.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files and "model.safetensors" not in files


@pytest.fixture(scope="module")
def quantised(trained, tmp_path_factory):
    """`quantised(bits)`: the model as bitsandbytes has saved it."""

    def save(bits):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

        wanted = {
            "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "8bit": {"load_in_8bit": True},
        }
        folder = tmp_path_factory.mktemp(bits)
        settings = BitsAndBytesConfig(**wanted[bits])
        model = AutoModelForCausalLM.from_pretrained(
            trained, quantization_config=settings, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
        return folder

    return save


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("ready", [False, True], ids=["quantised here", "quantised before"])
def test_an_adapter_beside_quantised_weights(material, trained, quantised, tmp_path, strategy, bits, ready):
    """It learns, and on two ranks as on one."""
    base = (f"model={quantised(bits)}",) if ready else (f"model={trained}", f"quantize={bits}")
    extra = (*base, f"strategy={strategy}", "adapter=lora", "lora_targets=all-linear", "steps=12", "lr=0.01")
    one = ranks.run(tmp_path / "one", 1, material / "run.yaml", *extra)
    assert one[-1] < one[0] - 0.02
    assert ranks.run(tmp_path / "two", 2, material / "run.yaml", *extra) == pytest.approx(one, rel=1e-5)


def _by_hand(terminal: str, folder, arguments: list[str], launched: bool):
    """`trainer train` as it is typed at a terminal, or as a launcher starts it there."""
    handle = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.update(TRAINYARD_RUN_DIR=str(folder / "run"), TRAINYARD_CACHE_DIR=str(folder / "cache"))
    if launched:
        os.environ["TRAINYARD_LAUNCHER"] = str(os.getppid())
    from trainer import cli

    sys.exit(cli.main(["train", *arguments]))


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_by_hand_has_a_bar(material, tmp_path, launched):
    """At a terminal, with loss and speed; under a launcher there is none, and what is said is in the log."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    words = (os.ttyname(theirs), tmp_path, [str(material / "run.yaml"), "steps=3"], launched)
    process = ranks.context.Process(target=_by_hand, args=words)
    process.start()
    said = b""
    while process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.2)[0]:
            said += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert process.exitcode == 0, said
    bars = [line for line in said.decode().split("\r") if "3/3" in line]
    assert bool(bars) != launched
    if bars:
        assert "loss " in bars[-1] and "tokens/s" in bars[-1] and "100%" in bars[-1]
        assert b"finished: model in" in said


def test_an_adapter_is_resumed_to_the_last_bit(material, trained, tmp_path):
    extra = (f"model={trained}", "lr=0.02", "adapter=lora", "lora_dropout=0.2")
    whole = ranks.run(tmp_path / "whole", 1, material / "run.yaml", *extra, "steps=8")
    attempt = ranks.Ranks(tmp_path / "cut", 1, material / "run.yaml", *extra, "steps=8", stop_in=5)
    assert attempt.codes() == [75]
    assert ranks.run(tmp_path / "cut", 1, material / "run.yaml", *extra, "steps=8") == whole


@pytest.mark.parametrize(
    "optimizer", ["adamw_8bit", "paged_adamw", pytest.param("paged_adamw_8bit", marks=pytest.mark.full)]
)
def test_other_optimizers_learn_and_resume(material, tmp_path, optimizer):
    extra = (f"optimizer={optimizer}", "steps=8")
    whole = ranks.run(tmp_path / "whole", 1, material / "run.yaml", *extra)
    assert whole[-1] < whole[0] - 1
    attempt = ranks.Ranks(tmp_path / "cut", 1, material / "run.yaml", *extra, stop_in=5)
    assert attempt.codes() == [75]
    # In 8 bits the state is rounded once more on its way through a checkpoint.
    near = 1e-3 if "8bit" in optimizer else 1e-5
    assert ranks.run(tmp_path / "cut", 1, material / "run.yaml", *extra) == pytest.approx(whole, rel=near)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluation_is_the_same_on_any_number_of_ranks(material, tmp_path, strategy):
    extra = ("validation_split=0.2", "eval_every=4", f"strategy={strategy}")
    for name, size in (("one", 1), ("three", 3)):
        ranks.run(tmp_path / name, size, material / "run.yaml", *extra)
    one, three = (ranks.records(tmp_path / name / "node0", "eval") for name in ("one", "three"))
    assert [record["step"] for record in one] == [4, 8, 12]
    losses = [record["loss"] for record in one]
    assert [record["loss"] for record in three] == pytest.approx(losses, rel=1e-5)
    assert losses[2] < losses[0]
    summary = json.loads((tmp_path / "one/node0/summary.json").read_text())
    assert summary["evals"] == [[4, losses[0]], [8, losses[1]], [12, losses[2]]]


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_evaluated_without_packing_is_each_document_by_itself(material, tmp_path, size):
    """With the weights that the run has in the end, as transformers loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = (material / "data.jsonl").read_text().splitlines()[:30]
    (tmp_path / "held.jsonl").write_text("".join(f"{line}\n" for line in lines))
    extra = ("packing=false", "sequence_length=64", f"validation={tmp_path}/held.jsonl", "eval_every=12")
    patch = {("trainer.data.pack", "STRIDE"): 8}
    ranks.run(tmp_path, size, material / "run.yaml", *extra, patch=patch)
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "node0/model", attn_implementation="eager").eval()
    total = count = 0
    for line in lines:
        ids = [*tokenizer(json.loads(line)["text"]).input_ids, tokenizer.eos_token_id]
        for at in range(0, len(ids) - 1, 64):
            part = torch.tensor(ids[at : at + 65])
            logits = model(part[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
            count += len(part) - 1
    (record,) = ranks.records(tmp_path / "node0", "eval")
    assert record["loss"] == pytest.approx(total / count, rel=1e-5)


def _counted(run, packed, sequences):
    from trainer import evaluate

    with (run.world.environment.run_dir / "evaluated").open("a") as file:
        file.write(f"{len(sequences)}\n")
    return evaluate.summed_loss_really(run, packed, sequences)


def _slow_on_one_rank(run, packed, sequences):
    from trainer import evaluate

    if run.world.rank == 1 and not hasattr(run, "slept"):
        run.slept = True
        time.sleep(6)
    return evaluate.summed_loss_really(run, packed, sequences)


def test_whose_part_of_an_evaluation_takes_longer_than_a_step_may_has_not_hung(material, tmp_path):
    """Shares that cannot follow the hosts' speeds, or a busy host: the others wait for it, as long as that takes."""
    extra = ("validation_split=0.2", "eval_every=4", "steps=4", "timeout_seconds=3")
    patch = {("trainer.evaluate", "summed_loss"): _slow_on_one_rank}
    ranks.run(tmp_path, 2, material / "run.yaml", *extra, patch=patch)
    assert len(ranks.records(tmp_path / "node0", "eval")) == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fast_rank_evaluates_more(material, tmp_path, strategy):
    """By the shares of a step: as many micro-batches on each where ranks keep step, larger ones on the fast rank."""
    extra = ("validation_split=0.5", "eval_every=12", f"strategy={strategy}", "batch_size=8")
    losses = {}
    for balance in ("even", "6,1,1"):
        ranks.run(
            tmp_path / balance,
            3,
            material / "run.yaml",
            *extra,
            f"balance={balance}",
            patch={("trainer.evaluate", "summed_loss"): _counted},
        )
        losses[balance] = [one["loss"] for one in ranks.records(tmp_path / balance / "node0", "eval")]
    assert len(losses["even"]) == 1 and losses["6,1,1"] == pytest.approx(losses["even"], rel=1e-5)
    folders = [tmp_path / "6,1,1" / f"node{rank}" for rank in range(3)]
    counts = [list(map(int, (one / "evaluated").read_text().split())) for one in folders]
    fast, *slow = map(sum, counts)
    assert fast >= 20 and all(abs(one - fast / 6) <= 1 for one in slow)
    if strategy == "fsdp":
        assert len({len(one) for one in counts}) == 1
        assert max(counts[0]) > max(counts[1])
    else:
        assert max(counts[0]) <= 2  # micro_batch_size


def test_a_run_that_no_longer_gets_better_ends_early(material, tmp_path):
    extra = ("validation_split=0.2", "eval_every=2", "patience=2", "lr=1e-15", "steps=40")
    ranks.run(tmp_path, 2, material / "run.yaml", *extra)
    assert [record["best"] for record in ranks.records(tmp_path / "node0", "eval")] == [True, False, False]
    status = ranks.status(tmp_path / "node0")
    assert (status["state"], status["step"]) == ("finished", 6)
    assert status["best_eval"]["step"] == 2


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_with_early_stopping_the_model_is_the_best_one(material, tmp_path, strategy):
    """It learns the few sequences by heart: on others it gets better, and then worse."""
    extra = (
        "validation_split=0.5",
        "eval_every=2",
        "patience=3",
        "lr=0.02",
        "steps=200",
        f"strategy={strategy}",
    )
    ranks.run(tmp_path, 2, material / "run.yaml", *extra, "checkpoint_keep=1", "checkpoint_every=1")
    node = tmp_path / "node0"
    evals = ranks.records(node, "eval")
    best = min(evals, key=lambda one: one["loss"])["step"]
    last = ranks.status(node)["step"]
    assert last == best + 6 < 200
    kept = sorted(int(path.name.removeprefix("step-")) for path in (node / "checkpoints").iterdir())
    assert kept == [best, last]
    for node in (tmp_path / "node0", tmp_path / "node1"):
        model = load_file(node / "model" / "model.safetensors")
        for step in kept:
            there = load_file(node / f"checkpoints/step-{step:08d}" / "model.safetensors")
            assert all(model[name].equal(there[name]) for name in model) == (step == best)
    assert json.loads((node / "summary.json").read_text())["model_step"] == best
    assert f"These weights are those of step {best}." in (node / "model/README.md").read_text()
    # Started again, there is nothing to do, and the model is not taken away first: its disk may be full by now.
    taken = {("trainer.commands.train", "_take_away"): _not_again}
    ranks.run(
        tmp_path, 2, material / "run.yaml", *extra, "checkpoint_keep=1", "checkpoint_every=1", patch=taken
    )
    assert (node / "model/model.safetensors").exists()


def _not_again(directory):
    raise AssertionError(f"{directory} was taken away")


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_batch_that_does_harm_is_passed_over(material, tmp_path, action):
    """Not a number in the batch after step 6, on one rank of two: the run goes on without it."""
    patch = {("trainer.loop", "token_loss"): _harmful}
    losses = ranks.run(tmp_path, 2, material / "run.yaml", f"on_nan={action}", patch=patch)
    assert len(losses) == 12
    (event,) = [one for one in ranks.records(tmp_path / "node1", "event") if one["event"] == "passed over"]
    assert event["step"] == {"skip": 6, "rollback": 4}[action] and "step 7: loss nan" in event["reason"]


def test_a_way_back_keeps_the_evaluation_of_an_epochs_end(material, tmp_path):
    """Its checkpoint was there before; what comes after the way back is behind the bad batch, and at no end."""
    few = "".join((material / "data.jsonl").read_text().splitlines(keepends=True)[:20])
    (tmp_path / "few.jsonl").write_text(few)
    chosen = (
        f"dataset={tmp_path}/few.jsonl",
        f"validation={material}/data.jsonl",
        "batch_size=2",
        "steps=16",
    )
    chosen += ("checkpoint_epochs=true", "checkpoint_every=0", "eval_every=0")
    ranks.run(tmp_path / "well", 1, material / "run.yaml", *chosen)
    well = [one["step"] for one in ranks.records(tmp_path / "well/node0", "eval")]
    assert well[0] < 15, well
    harm = {("trainer.loop", "token_loss"): functools.partial(_harmful_once, after=well[0] + 1)}
    ranks.run(tmp_path / "ill", 1, material / "run.yaml", *chosen, "on_nan=rollback", patch=harm)
    assert f"back to step {well[0]}" in (tmp_path / "ill/node0/logs/rank-0.log").read_text()
    ill = [one["step"] for one in ranks.records(tmp_path / "ill/node0", "eval")]
    assert ill[0] == well[0] and len(set(ill)) == len(ill)


def _harmful_once(run, sequences, after):
    from trainer import loop

    loss = loop.token_loss_really(run, sequences)
    if run.progress.step == after and not getattr(loop, "harmed", False):
        loop.harmed = True
        return loss * float("nan")
    return loss


def test_harm_after_each_way_back_ends_the_run(material, tmp_path):
    """It would come back to the same checkpoint for ever: good steps in between are no way out."""
    patch = {("trainer.loop", "token_loss"): _harmful_after_step_6}
    ranks.run(tmp_path, 1, material / "run.yaml", "on_nan=rollback", patch=patch, codes=[3])
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "went back to step 4 10 times and came to no newer checkpoint. Cure: a lower lr" in reason


def test_a_step_whose_checkpoint_was_damaged_before_a_way_back_is_saved_anew(material, tmp_path):
    patch = {("trainer.loop", "token_loss"): _harmful_after_damage}
    chosen = ("on_nan=rollback", "checkpoint_every=3", "checkpoint_async=false")
    ranks.run(tmp_path, 1, material / "run.yaml", *chosen, patch=patch)
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert "back to step 3" in log and log.count("step-00000006 in ") == 2, log


def test_a_batch_without_a_token_that_counts_is_no_step(material, tmp_path):
    """Answers alone do, and some sequences hold none."""
    data = tmp_path / "data.jsonl"
    asked = [
        {"instruction": "what is the captain to say " * (n % 3 * 20 + 1), "output": "no"} for n in range(40)
    ]
    data.write_text("".join(json.dumps(one) + "\n" for one in asked))
    chosen = (f"dataset={data}", "loss_on=answers", "batch_size=1", "micro_batch_size=1", "balance=even")
    for folder, size in (("one", 1), ("two", 2)):
        losses = ranks.run(tmp_path / folder, size, material / "run.yaml", *chosen, f"batch_size={size}")
        rows = ranks.records(tmp_path / folder / "node0", "event")
        passed = [one for one in rows if one["event"] == "passed over"]
        assert len(losses) == 12 and min(losses) > 0.1
        assert passed and all("none of the batch's tokens counts" in one["reason"] for one in passed)
    ranks.run(tmp_path / "epoch", 1, material / "run.yaml", *chosen, "steps=99", "epochs=1", "max_samples=6")
    known = ranks.status(tmp_path / "epoch/node0")
    assert known["steps"] == known["step"] > 0  # as few as there were


def _harmful_after_damage(run, sequences):
    """Once, after step 7: the checkpoint of step 6 is damaged, and so is the batch."""
    import shutil

    from trainer import loop

    root = run.world.environment.run_dir
    harm = run.progress.step == 7 and not (root / "done").exists()
    if harm:
        (root / "done").touch()
        newest = root / "checkpoints/step-00000006"
        shutil.copy(newest / "manifest.json", newest / "model.safetensors")
    return loop.token_loss_really(run, sequences) * (float("nan") if harm else 1)


def _harmful_after_step_6(run, sequences):
    from trainer import loop

    return loop.token_loss_really(run, sequences) * (float("nan") if run.progress.step == 6 else 1)


@pytest.mark.parametrize("batch", ["_last_of_the_first_epoch", "_last"])
def test_an_epoch_whose_last_batch_is_passed_over_ends_all_the_same(material, tmp_path, batch):
    patch = {("trainer.loop", "token_loss"): globals()[batch]}
    extra = ("steps=null", "epochs=2", "on_nan=skip", "validation_split=0.2", "checkpoint_epochs=true")
    ranks.run(tmp_path, 1, material / "run.yaml", *extra, "checkpoint_every=0", patch=patch)
    node = tmp_path / "node0"
    (harm,) = [one for one in ranks.records(node, "event") if one["event"] == "passed over"]
    ends = [one["step"] for one in ranks.records(node, "epoch")]
    assert [one["epoch"] for one in ranks.records(node, "epoch")] == [0, 1]
    assert harm["step"] == ends[batch == "_last"] and ends[1] == len(ranks.losses(node))
    assert [one["step"] for one in ranks.records(node, "eval")] == ends
    saved = [one["step"] for one in ranks.records(node, "event") if one["event"] == "checkpoint"]
    assert saved == ends


def _last_of_the_first_epoch(run, sequences):
    from trainer import loop

    cursor, all_of_them = run.progress.cursor, run.index.sequences
    last = cursor < all_of_them <= cursor + run.config.batch_size
    return loop.token_loss_really(run, sequences) * (float("nan") if last else 1)


def _last(run, sequences):
    from trainer import loop

    last = run.progress.step + 1 == run.steps and not run.progress.passed_over
    return loop.token_loss_really(run, sequences) * (float("nan") if last else 1)


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 1), ("zero1", 2), ("fsdp", 2)])
def test_an_evaluation_that_a_stop_came_before_is_made_by_whoever_goes_on(material, tmp_path, strategy, size):
    """By the checkpoint's weights, although sharded ones were gathered before it was read."""
    extra = (material / "run.yaml", "validation_split=0.2", "eval_every=4", f"strategy={strategy}")
    for name, stop in (("whole", None), ("cut", 8)):
        ranks.run(tmp_path / name, size, *extra, stop_in=stop, codes=[75 if stop else 0] * size)
    assert [one["step"] for one in ranks.records(tmp_path / "cut/node0", "eval")] == [4]
    ranks.run(tmp_path / "cut", size, *extra)
    evals = [
        [(one["step"], one["loss"]) for one in ranks.records(tmp_path / name / "node0", "eval")]
        for name in ("whole", "cut")
    ]
    assert evals[0] == evals[1] and [step for step, _ in evals[0]] == [4, 8, 12]


def test_the_best_one_may_be_an_evaluation_that_a_stop_came_before(material, tmp_path):
    """Its checkpoint was there before it was known to be the best; and a second start finds no line twice."""
    extra = ("validation_split=0.2", "eval_every=4", "patience=9", "checkpoint_keep=1")
    patch = {("trainer.recorder", "evaluate"): _best_at_step_8}
    ranks.run(tmp_path, 1, material / "run.yaml", *extra, stop_in=8, codes=[75], patch=patch)
    dies = {**patch, ("trainer.recorder", "evaluate"): _dies_after_step_8}
    ranks.run(tmp_path, 1, material / "run.yaml", *extra, codes=[1], patch=dies)
    ranks.run(tmp_path, 1, material / "run.yaml", *extra, patch=patch)
    node = tmp_path / "node0"
    evals = [(one["step"], one["loss"]) for one in ranks.records(node, "eval")]
    assert evals == [(4, 3.0), (8, 1.0), (12, 2.0)]
    assert json.loads((node / "summary.json").read_text())["model_step"] == 8
    model, best = (
        load_file(node / at / "model.safetensors") for at in ("model", "checkpoints/step-00000008")
    )
    assert all(model[name].equal(best[name]) for name in best)


@pytest.mark.parametrize("stop", [None, 10], ids=["whole", "stopped and resumed"])
def test_a_best_evaluation_whose_checkpoint_could_not_be_saved_is_told(material, tmp_path, stop):
    extra = ("validation_split=0.2", "eval_every=4", "patience=9", "checkpoint_every=0", "checkpoint_keep=1")
    patch = {
        ("trainer.recorder", "evaluate"): _best_at_step_8,
        ("trainer.checkpoint", "TensorFile"): _no_room_for_step_8,
    }
    if stop:
        ranks.run(tmp_path, 1, material / "run.yaml", *extra, patch=patch, stop_in=stop, codes=[75])
    ranks.run(tmp_path, 1, material / "run.yaml", *extra, patch=patch)
    log = (tmp_path / "node0/logs/rank-0.log").read_text()
    assert (
        "the best evaluation was that of step 8, whose checkpoint could not be saved: the model is that of step 4"
        in log
    )
    assert json.loads((tmp_path / "node0/summary.json").read_text())["model_step"] == 4


def _no_room_for_step_8(path, tensors):
    import errno
    import os

    from trainer import checkpoint

    if "step-00000008" in str(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return checkpoint.TensorFile_really(path, tensors)


def _best_at_step_8(run, packed, *told):
    return {4: 3.0, 8: 1.0, 12: 2.0}[run.progress.step]


def _dies_after_step_8(run, packed, *told):
    if run.progress.step == 12:
        raise OSError("the power is gone")
    return _best_at_step_8(run, packed, *told)


def _harmful(run, sequences):
    from trainer import loop

    loss = loop.token_loss_really(run, sequences)
    return loss * float("nan") if run.progress.cursor == 6 * 7 and run.world.rank == 1 else loss


@pytest.mark.parametrize("harm", ["loss nan", pytest.param("a spike, loss", marks=pytest.mark.full)])
def test_a_roll_back_of_shared_weights_is_that_of_whole_ones(material, tmp_path, harm):
    """Back to the checkpoint of step 4, and on behind the batch that did harm, under each strategy as under ddp."""
    patch = {
        ("trainer.loop", "token_loss"): _harmful if "nan" in harm else _spike_on_one,
        ("trainer.loop", "SETTLED"): 3,
    }
    found = {}
    for strategy in ("ddp", "fsdp", "zero1"):
        chosen = (f"strategy={strategy}", "on_nan=rollback", "spike_factor=1.5")
        found[strategy] = ranks.run(tmp_path / strategy, 2, material / "run.yaml", *chosen, patch=patch)
        node = tmp_path / strategy / "node1"
        (event,) = [one for one in ranks.records(node, "event") if one["event"] == "passed over"]
        assert event["step"] == 4 and f"step 7: {harm}" in event["reason"]
        assert len(found[strategy]) == 12
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-5)
    assert found["zero1"] == pytest.approx(found["ddp"], rel=1e-5)


def _spike_on_one(run, sequences):
    from trainer import loop

    loss = loop.token_loss_really(run, sequences)
    return loss * (9 if run.progress.cursor == 6 * 7 and run.world.rank == 1 else 1)


def test_harm_without_end_ends_the_run(material, tmp_path):
    patch = {("trainer.loop", "token_loss"): _always_harmful}
    ranks.run(tmp_path, 1, material / "run.yaml", "on_nan=skip", patch=patch, codes=[3])
    assert "diverged at step 1: loss nan" in ranks.status(tmp_path / "node0")["reason"]
    passed_over = [one for one in ranks.records(tmp_path / "node0", "event") if one["event"] == "passed over"]
    assert len(passed_over) == 10


def _always_harmful(run, sequences):
    from trainer import loop

    return loop.token_loss_really(run, sequences) * float("nan")


def test_a_spike_is_harm_too(material, tmp_path):
    patch = {("trainer.loop", "token_loss"): _spike}
    extra = ("steps=26", "spike_factor=1.5", "on_nan=skip", "checkpoint_every=0", "max_samples=40")
    losses = ranks.run(tmp_path, 1, material / "run.yaml", *extra, patch=patch)
    (event,) = [one for one in ranks.records(tmp_path / "node0", "event") if one["event"] == "passed over"]
    assert event["step"] == 23 and "a spike, loss" in event["reason"] and max(losses[20:]) < 1.5 * losses[20]


def _spike(run, sequences):
    from trainer import loop

    return loop.token_loss_really(run, sequences) * (5 if run.progress.cursor == 23 * 7 else 1)


def _slow_to_clip(norm, limit):
    import time

    time.sleep(0.2)
    return 1.0


def test_clipping_is_a_ranks_own_work(material, tmp_path):
    """A run of one rank has no network to wait for."""
    patch = {("trainer.strategies.ddp", "clipping"): _slow_to_clip}
    ranks.run(tmp_path, 1, material / "run.yaml", "steps=3", "tensorboard=false", patch=patch)
    rows = ranks.records(tmp_path / "node0")
    assert len(rows) == 3 and all(row["step_seconds"] > 0.2 > row["comm_seconds"] for row in rows)
    assert all(row["rank_optimizer_seconds"][0] > 0.2 for row in rows[1:])  # told with the step after it


def _late_in_the_first(*_):
    """Rank 0 takes 1.5 s for its own part of the norm, which the other rank then waits for."""
    time.sleep(1.5 if os.environ["RANK"] == "0" else 0.2)


def _ddp_norm(gradients):
    _late_in_the_first()
    return torch.nn.utils.get_total_norm_really(gradients)


def _sharded_norm(of, *words, **options):
    if of.dtype == torch.float64:  # that of all of a rank's parts, once in a step
        _late_in_the_first()
    return torch.linalg.vector_norm_really(of, *words, **options)


@pytest.mark.parametrize(
    ("strategy", "patch"),
    [
        ("ddp", {("torch.nn.utils", "get_total_norm"): _ddp_norm}),
        ("zero1", {("torch.linalg", "vector_norm"): _sharded_norm}),
    ],
    ids=["ddp", "zero1"],
)
def test_clipping_is_a_ranks_own_work_where_it_waits_for_others_in_it(material, tmp_path, strategy, patch):
    """Unlike ranks take the first one's norm; ranks with parts add theirs up."""
    chosen = (f"strategy={strategy}", "steps=3", "tensorboard=false")
    threads = [["threads=1"], ["threads=2"]]
    ranks.run(tmp_path, 2, material / "run.yaml", *chosen, patch=patch, per_rank=threads)
    rows = ranks.records(tmp_path / "node0")[1:]
    assert len(rows) == 2
    for first, other in (row["rank_optimizer_seconds"] for row in rows):
        assert first > 1.5 and 0.2 < other < 1


def test_checkpoints_by_epochs_and_by_minutes(material, tmp_path):
    def saved(folder, *extra):
        ranks.run(folder, 2, material / "run.yaml", "checkpoint_every=0", *extra)
        return [
            one["step"] for one in ranks.records(folder / "node0", "event") if one["event"] == "checkpoint"
        ]

    epochs = saved(tmp_path / "epochs", "checkpoint_epochs=true", "max_samples=40")
    ends = [record["step"] for record in ranks.records(tmp_path / "epochs" / "node0", "epoch")]
    assert epochs == ends and len(ends) > 1
    assert saved(tmp_path / "minutes", "checkpoint_minutes=0.00001", "steps=3") == [1, 2, 3]


@pytest.mark.full
def test_the_profiler_traces_some_steps_on_request(material, tmp_path):
    ranks.run(tmp_path, 1, material / "run.yaml", "profile_steps=2", "steps=6")
    with gzip.open(tmp_path / "node0/profile/rank-0.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) >= 2
    assert any("aten::addmm" in name for name in names)


def test_a_model_with_nothing_to_train_is_refused(material, tmp_path):
    patch = {("transformers", "AutoModelForCausalLM"): _Frozen}
    attempt = ranks.Ranks(tmp_path, 1, material / "run.yaml", patch=patch)
    assert attempt.codes() == [2]
    assert f"model: {material}/model: it has no weights that can be trained" in attempt.log(0)
    assert "Traceback" not in attempt.log(0)


class _Frozen:
    """transformers' models, as code of a model's own may make them."""

    @staticmethod
    def from_config(*args, **options):
        import transformers

        return transformers.AutoModelForCausalLM_really.from_config(*args, **options).requires_grad_(False)


def test_a_vocabulary_smaller_than_an_id_is_refused(material, tmp_path):
    """The tokenizer of another model."""
    shutil.copytree(material / "model", tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 100}))
    attempt = ranks.Ranks(tmp_path, 1, material / "run.yaml", f"model={tmp_path}/model")
    assert attempt.codes() == [2]
    assert "the model's vocabulary has 100: they do not belong together" in attempt.log(0)


def test_a_step_that_takes_long_gives_signs_of_life(material, tmp_path):
    """A launcher ends ranks that give none for half an hour (trainer/cluster/hang.py); a step may take longer."""
    patch = {("trainer.recorder", "SIGN_EVERY"): 0.0, ("trainer.metrics", "write_json"): _noted_status}
    patch[("trainer.metrics", "Status")] = _Eager
    ranks.run(tmp_path, 2, material / "run.yaml", "micro_batch_size=1", "steps=3", patch=patch)
    for node, micro_batches in (("node0", 4), ("node1", 3)):
        told = (tmp_path / node / "told").read_text().split()
        assert told.count("running:1") > micro_batches and told.count("running:2") > micro_batches


class _Eager(metrics.Status):
    EVERY = 0.0


def _noted_status(path, content, settle=True):
    with path.with_name("told").open("a") as file:
        file.write(f"{content['state']}:{content.get('step')}\n")
    metrics.write_json_really(path, content, settle)


def test_cards_that_are_too_few_and_idle_are_a_warning(material, tmp_path):
    """As of make demo's two hosts on a machine with one GPU; a line in a rank's log is seen by nobody."""
    patch = {("trainer.cards", "seen"): _one_card}
    ranks.run(tmp_path, 2, material / "run.yaml", "device=auto", "steps=2", patch=patch)
    for node in ("node0", "node1"):
        assert (
            "so that all compute on the CPU; with one of these hosts (-l)"
            in ranks.status(tmp_path / node)["warning"]
        )
    ranks.run(tmp_path / "told", 2, material / "run.yaml", "steps=2", "warmup_steps=2", patch=patch)
    assert ranks.status(tmp_path / "told/node0")["warning"] is None


def test_keys_that_say_nothing_are_a_warning(material, tmp_path):
    words = ("steps=2", "warmup_steps=3", "lora_rank=64", "outer_lr=0.5", "offload_dir=/mnt")
    ranks.run(tmp_path, 1, material / "run.yaml", *words)
    told = ranks.status(tmp_path / "node0")["warning"]
    assert "lora_rank says nothing while adapter is none" in told
    assert "outer_lr says nothing while comm is auto; offload_dir says nothing while strategy is ddp" in told
    assert "warmup_steps is 3 of 2 steps, so that lr never comes to" in told


def _one_card(config):
    return ["GPU-1"] if config.device == "auto" else []
