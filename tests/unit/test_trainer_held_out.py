"""Evaluations: which of them is the best one, after a resume on other data and where a loss is no number."""

import types

import pytest

from trainer import checkpoint, loop, recorder
from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.loop import Progress
from trainer.pace import Pace


@pytest.fixture
def evaluated(monkeypatch):
    """`evaluated(progress, loss, digest)`: whether a checkpoint was made, and what was told.

    saver: where the step's checkpoint was begun before the evaluation, (whether it was told, whether it is under way);
    then the step of the best that has one is told, too.
    """

    def evaluate(progress, loss, digest="a", saver=None):
        told, saved = {}, []
        run = types.SimpleNamespace(
            progress=progress,
            held_out=types.SimpleNamespace(digest=digest),
            strategy=types.SimpleNamespace(settle=lambda: None),
            world=types.SimpleNamespace(first=True),
        )
        one = types.SimpleNamespace(
            run=run,
            show=lambda **words: told.update(words),
            _tell=lambda kind, **words: told.update(words),
            _say=lambda line: told.setdefault("said", []).append(line),
            save=lambda: saved.append(progress.step),
            asked_to_stop=lambda: False,
            saved_step=progress.step + 1 if saver else -1,
            saver=types.SimpleNamespace(
                **dict(zip(("told", "under_way"), saver or (True, False), strict=True))
            ),
            pace=types.SimpleNamespace(),
        )
        monkeypatch.setattr(recorder, "evaluate", lambda *_: loss)
        recorder.Recorder.judge(one)
        progress.step += 1
        recorder.Recorder.evaluate(one)
        return bool(saved), told | ({"best_saved": progress.best_saved} if saver else {})

    return evaluate


def test_the_best_is_of_the_same_data(evaluated):
    progress = Progress()
    assert evaluated(progress, 2.0)[0] and not evaluated(progress, 3.0)[0]
    assert (progress.best_loss, progress.best_step, progress.no_better) == (2.0, 1, 1)
    again = recorder.progress_in({"step": 2, **recorder.facts(from_mapping({}), progress, {})})
    assert again == progress
    saved, told = evaluated(again, 3.0, "b")
    assert saved and (again.best_loss, again.best_step, again.no_better) == (3.0, 3, 0)
    assert told["said"][0] == "what is held out has changed: the best evaluation so far is forgotten"
    # An earlier release did not note what the best loss was measured on.
    before = Progress(step=2, best_loss=2.0, best_step=1, no_better=1)
    assert not evaluated(before, 3.0, "b")[0] and before.no_better == 2


@pytest.mark.parametrize(
    ("saver", "there"),
    [((True, True), True), ((True, False), True), ((False, False), True), ((False, True), False)],
)
def test_a_checkpoint_that_came_to_be_before_its_evaluation_is_the_bests(evaluated, saver, there):
    """Told already, while nobody has waited for its thread yet, it is told no second time; else it will be."""
    progress = Progress(step=6)
    _, told = evaluated(progress, 2.0, saver=saver)
    assert progress.best_step == 7 and (told["best_saved"] == 7) is there


@pytest.mark.parametrize(("step", "saved"), [(7, 4), (6, 6)])
def test_a_manifest_tells_which_of_the_best_there_is_a_checkpoint_of(step, saved):
    """That of step 6 could not be saved; its own manifest is there where it could."""
    told = recorder.facts(from_mapping({}), Progress(step=step, best_step=6, best_saved=4), {})
    assert recorder.progress_in(told).best_saved == saved
    del told["best_saved"]  # as an earlier release has it
    assert recorder.progress_in(told).best_saved == 6


def test_a_loss_that_is_no_number_is_never_the_best(evaluated):
    progress = Progress()
    saved, told = evaluated(progress, float("nan"))
    assert not saved and progress.best_loss is None and progress.no_better == 1
    assert told["loss"] is told["eval_loss"] is None and told["best"] is False
    assert told["said"] == ["step 1: loss nan on the held-out data, which is no number"]
    assert evaluated(progress, 2.0)[0] and progress.best_step == 2
    _, told = evaluated(progress, float("inf"))
    assert told["said"][0].endswith("which is no number; the best is 2.0000, of step 2")


@pytest.mark.parametrize("every", [0, 1, 3, 4, 100])
@pytest.mark.parametrize(("batch", "sequences"), [(2, 7), (2, 8), (9, 8)])
def test_the_evaluations_that_are_left_count_for_the_time_to_the_end(every, batch, sequences):
    """As many as `evaluation_is_due` then finds."""
    run = types.SimpleNamespace(
        progress=Progress(),
        held_out=None,
        config=types.SimpleNamespace(eval_every=every, batch_size=batch),
        index=types.SimpleNamespace(sequences=sequences),
        steps=11,
    )
    assert loop.evaluations_left(run) == 0
    run.held_out, left = object(), []
    for _ in range(run.steps):
        run.progress.step += 1
        run.progress.cursor += batch
        left.append((loop.evaluations_left(run), loop.evaluation_is_due(run)))
    for number, (count, _) in enumerate(left):
        assert count == sum(due for _, due in left[number + 1 :])
    assert left[-1] == (0, True)
    run.progress.step, run.progress.cursor = 1, batch
    one = types.SimpleNamespace(run=run, seconds=lambda: 2.0, evaluation_seconds=30.0)
    assert Pace.left(one) == 20 + 30 * left[0][0]


def test_what_makes_other_tokens_of_the_same_data_is_named():
    then, now = {"dataset": "a.jsonl", "loss_on": "all", "steps": 3}, {"loss_on": "answers", "steps": 9}
    manifest = {"step": 4, "identity": {"dataset": "1" * 64}, "settings": then}
    with pytest.raises(BadInput) as refused:
        checkpoint.check_identity(manifest, {"dataset": "2" * 64}, {**then, **now})
    assert "something else: loss_on: all then, answers now. Cure" in str(refused.value)
    with pytest.raises(
        BadInput, match=r"dataset: a\.jsonl then, a\.jsonl now \(the same name, another content\)"
    ):
        checkpoint.check_identity(manifest, {"dataset": "2" * 64}, then)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"packing": True}, r"something else: dataset: a\.jsonl then, a\.jsonl now \(the same name"),
        ({"packing": False}, "something else: packing: True then, False now. Cure"),
    ],
)
def test_a_run_that_knew_no_packing_is_not_told_that_this_was_another(now, said):
    manifest = {"step": 4, "identity": {"dataset": "1" * 64}, "settings": {"dataset": "a.jsonl"}}
    with pytest.raises(BadInput, match=said):
        checkpoint.check_identity(manifest, {"dataset": "2" * 64}, {"dataset": "a.jsonl", **now})
