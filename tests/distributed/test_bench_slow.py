"""bench.slow: two ways of a tiny model, interrupted and gone on with, and what it makes of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT, records

from bench import slow

TINY = {
    **{"width": 64, "layers": 1, "vocabulary": 300, "sequence_length": 16, "steps": 300, "sync_every": 30},
    **{"letters": 80_000, "held_out": 2_000, "base_steps": 20},
}


def bench(folder, *arguments, **sizes):
    options = [f"--{key.replace('_', '-')}={value}" for key, value in {**TINY, **sizes}.items()]
    words = [sys.executable, "-m", "bench.slow", "exact", "8bit", "--seeds=1", f"--folder={folder}"]
    return subprocess.Popen(
        [*words, *options, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_it_goes_on_where_it_was_interrupted_and_compares(tmp_path):
    first = bench(tmp_path)
    deadline = time.monotonic() + 600
    while len(records(tmp_path / "8bit-0")) < 3:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.02)
    other = bench(tmp_path)
    assert "another bench.slow is at work" in other.communicate(timeout=120)[1] and other.returncode == 1
    first.send_signal(signal.SIGINT)
    said, errors = first.communicate(timeout=300)
    assert first.returncode == 1 and "the same command goes on from here" in errors, said + errors
    reached = records(tmp_path / "8bit-0")[-1]["step"]
    assert 3 <= reached < TINY["steps"]
    assert [one["way"] for one in slow.results(tmp_path)] == ["exact"]

    changed = bench(tmp_path, steps=301)
    assert (
        "was begun with steps 300, now 301" in changed.communicate(timeout=120)[1] and changed.returncode == 1
    )

    base = records(tmp_path / "base")
    assert len(base) == TINY["base_steps"] and not (tmp_path / "base/model").exists()
    # Where the fine-tune begins is where the steps before have ended.
    assert (
        abs(records(tmp_path / "exact-0")[0]["loss"] - base[-1]["loss"])
        < 0.3
        < base[0]["loss"] - base[-1]["loss"]
    )
    before = (tmp_path / "exact-0/metrics.jsonl").stat().st_mtime_ns
    second = bench(tmp_path)
    said, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    assert (tmp_path / "exact-0/metrics.jsonl").stat().st_mtime_ns == before
    assert f"resuming after step {reached}" in (tmp_path / "8bit-0/logs/rank-0.log").read_text()
    exact, coded = slow.results(tmp_path)
    assert exact["tokens"] == coded["tokens"] == sum(row["tokens"] for row in records(tmp_path / "exact-0"))
    assert exact["loss"] != coded["loss"] and abs(exact["loss"] - coded["loss"]) < 0.1 < exact["loss"] < 6
    assert exact["bytes"] == 2 * sum(row["wire_bytes"] for row in records(tmp_path / "exact-0"))
    assert 3.5 < exact["bytes"] / coded["bytes"] < 4
    assert exact["saving"] == 0 < coded["saving"] and exact["begins"] == coded["begins"]
    assert (tmp_path / "base/metrics.jsonl").stat().st_mtime_ns < before
    assert "from weights after 20 steps of exact" in said
    before = [row["loss"] for row in records(tmp_path / "base", "eval")][-1]
    assert f"held out, {before:.4f} before" in said and before > exact["loss"]
    assert (exact["stops"], coded["stops"]) == (0, 1) and "gone on with, for which diloco meets" in said
    assert "once more: 8bit of seed 0 (1)." in said
    assert "| 8bit | 0 |" in said and "diloco meets 10 times" in said
    assert not list(tmp_path.glob("*/checkpoints"))

    shown = bench(tmp_path, "--table").communicate(timeout=120)[0]
    assert shown == said
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "another text"}) + "\n")
    other = bench(tmp_path)
    assert "began from other weights or another text" in other.communicate(timeout=120)[1]
    assert other.returncode == 1
