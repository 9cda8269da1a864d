"""scripts/show_run.py: the picture at the end of a run."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/show_run.py"
spec = importlib.util.spec_from_file_location("show_run", SCRIPT)
show_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(show_run)

UNIGRAM = 6.2


@pytest.fixture
def run(tmp_path):
    """A run's directory of 200 steps, from 7.6 down to 4.2 nats."""
    run = tmp_path / "runs/first"
    run.mkdir(parents=True)
    rows = [
        {"kind": "train", "step": step, "loss": 4.2 + 3.4 * math.exp(-step / 30)} for step in range(1, 201)
    ]
    rows.insert(50, {"kind": "event", "step": 50, "event": "checkpoint"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"world": {"size": 2}, "unigram_entropy": UNIGRAM, "steps": 200, "tokens": 204_800}
    summary |= {"tokens_per_second": 7345.2, "train_seconds": 125.0}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def show(*arguments, cwd=None, **environ):
    """Runs the script as a person would; no terminal, and only the given environment."""
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, encoding="utf-8")


def test_shows_loss_speed_entropy_and_files(run):
    (run / "sample.txt").write_text("It was Annés opinion.")
    shown = show(run, LANG="C.UTF-8")
    assert shown.returncode == 0
    assert "Loss        7.49 → 4.21" in shown.stdout
    assert "Unigram     6.20" in shown.stdout
    assert "7,345 tokens/s over 2 ranks; 200 steps, 204,800 tokens in 2 min 5 s" in shown.stdout
    assert "Sample      It was Annés opinion." in shown.stdout
    assert re.search(r"sample\.txt +text that the model wrote", shown.stdout)
    assert "model " not in shown.stdout.split("Files")[1].replace("the model", "")  # there is no model/ here


def test_no_escape_codes_without_a_terminal(run):
    assert "\033" not in show(run, LANG="C.UTF-8", TERM="xterm").stdout


def test_what_a_model_or_a_rank_wrote_moves_no_terminal(run):
    evil = "\033]0;title\007\033[2J\x9b31m\u202e"
    (run / "sample.txt").write_text(f"{evil}It was\r\n\nAnne's opinion.{evil}")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "world": {"size": f"2{evil}"}}))
    shown = show(run, LANG="C.UTF-8").stdout
    assert "It was\n            Anne's opinion." in shown
    (run / "metrics.jsonl").write_text(evil)
    faulty = show(run, LANG="C.UTF-8")
    assert faulty.returncode == 2 and "is no row of metrics" in faulty.stderr
    assert not set("\033\007\x9b\u202e\r") & set(shown + faulty.stderr)


@pytest.mark.parametrize(
    "environ", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "C", "LANG": "en_US.UTF-8"}]
)
def test_plain_ascii_where_the_locale_is_not_utf8(run, environ):
    (run / "sample.txt").write_text("Annés — opinion")
    shown = show(run, **environ)
    assert shown.returncode == 0
    assert shown.stdout.isascii()
    assert "*" in shown.stdout


@pytest.mark.parametrize(
    ("environ", "terminal", "colored"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
    ],
)
def test_colors(environ, terminal, colored):
    assert show_run.wants_color(environ, SimpleNamespace(isatty=lambda: terminal)) == colored


def test_the_loss_must_fall_below_the_unigram_entropy(run):
    assert show(run, "--below-unigram", "1.9", LANG="C.UTF-8").returncode == 0
    missed = show(run, "--below-unigram", "2.1", LANG="C.UTF-8")
    assert missed.returncode == 1
    assert "1.99 nats below the unigram entropy; at least 2.10 were expected" in missed.stderr


def test_the_newest_run_is_the_default(run):
    shown = show(cwd=run.parent.parent, LANG="C.UTF-8")
    assert shown.stdout.startswith("first: loss by step")
    assert "Files       runs/first/" in shown.stdout


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n', "line 1 is no row of metrics"),
        (
            "metrics.jsonl",
            '{"kind": "train", "step": 1, "loss": 5}\nnot JSON\n',
            "line 2 is no row of metrics",
        ),
        ("metrics.jsonl", "", "holds no step yet"),
        ("summary.json", "{", "cannot show the run"),
    ],
)
def test_bad_files_are_named(run, file, text, message):
    (run / file).write_text(text)
    shown = show(run)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_no_run_at_all(tmp_path):
    shown = show(cwd=tmp_path)
    assert shown.returncode == 2
    assert "there is no run yet" in shown.stderr


def test_a_repeated_step_counts_once(tmp_path):
    rows = [
        {"kind": "train", "step": step, "loss": loss}
        for step, loss in [(1, 9.0), (2, 8.0), (2, 7.0), (3, 6.0)]
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert show_run.read_losses(tmp_path / "metrics.jsonl") == [(1, 9.0), (2, 7.0), (3, 6.0)]


@pytest.mark.parametrize("unicode", [True, False])
def test_the_curve_falls_and_the_level_is_where_it_belongs(unicode):
    losses = [(step, 8.0 - step / 25) for step in range(1, 101)]  # 8 to 4 nats, a straight line
    rows = [curve for _, curve in show_run.plot(losses, 6.0, width=40, height=9, unicode=unicode)[:9]]
    ends = [len(re.sub(r"[┈-]+$", "", row).rstrip()) for row in rows]
    assert ends[0] < ends[3] < ends[5] < ends[8] == 40  # lower rows are reached later
    level = [number for number, row in enumerate(rows) if re.search(r"[┈-]{3}", row)]
    assert level == [4]  # 6 is the middle of 8 and 4


@pytest.mark.parametrize("losses", [[(1, 5.0)], [(1, 5.0), (2, 5.0)], [(1, 5.0), (2, math.nan), (3, 4.0)]])
def test_short_flat_and_broken_curves_are_drawn(losses):
    lines = show_run.plot(losses, 6.0)
    assert any(0x2801 <= ord(character) < 0x2900 for _, curve in lines for character in curve)


def test_final_loss_is_a_mean_of_the_last_steps():
    losses = [(step, float(step)) for step in range(1, 31)]
    assert show_run.final_loss(losses) == pytest.approx(sum(range(21, 31)) / 10)
    assert show_run.final_loss([(1, 3.0)]) == 3.0
