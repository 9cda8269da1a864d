"""The benchmarks: what sums up, and (make test FULL=1) that the tables which need no peer's package are made."""

import re
import subprocess
import sys

import pytest

from bench import gpu, measure, saving, slow
from bench.measure import Case, Measured, Options

CASE = Case("text", vocabulary=300, batch_size=2, sequence_length=8, steps=2, untimed=1, threads=1)


def test_medians_of_interleaved_rounds(monkeypatch, capsys):
    order = []
    speeds = {"a": iter((10.0, 1000.0, 30.0)), "b": iter((1.0, 2.0, 3.0))}

    def contend(name, folder):
        order.append(name)
        speed = next(speeds[name])
        return Measured(speed, 2 * speed, int(speed) << 20, 1.5)

    monkeypatch.setattr(measure, "contend", contend)
    monkeypatch.setattr(measure, "prepared", lambda case: measure.contextlib.nullcontext())
    found = measure.rounds(CASE, {"A": "a", "B": "b"}, 3)
    assert order == ["a", "b"] * 3
    assert found == {"A": Measured(30, 60, 30 << 20, 1.5), "B": Measured(2, 4, 2 << 20, 1.5)}
    assert measure.against(found, "B")[0] == ["A", "30", "15.00", "60", "15.00", "30", "15.00"]
    assert "round 3: B: 3 tokens/s, 6 a CPU second, 3 MiB" in capsys.readouterr().err


def test_contenders_beside_each_other_have_one_core_and_a_thread_each(monkeypatch, capsys):
    speeds, given = {"a": iter((10.0, 33.0, 20.0)), "b": iter((10.0, 30.0, 16.0))}, []

    def contend(name, folder, core):
        given.append((name, folder.threads, core))
        return Measured(1.0, next(speeds[name]), 1, 1.5)

    monkeypatch.setattr(measure, "contend", contend)
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(measure, "prepared", lambda case: measure.contextlib.nullcontext(case))
    found = measure.beside(measure.replace(CASE, threads=8), {"A": "a", "B": "b"}, 3)
    assert sorted(given) == sorted((name, 1, core) for core in (3, 5, 3) for name in "ab")
    assert found == {"A": [10, 33, 20], "B": [10, 30, 16]}
    assert measure.quotients(found, "A", "B") == "1.100 (1.000 to 1.250)"
    assert "beside, round 2: A 33, B 30" in capsys.readouterr().err


def test_what_does_not_fit_leaves_the_others_their_figures(monkeypatch, capsys):
    def contend(name, folder):
        if name == "hf-compiled":
            raise RuntimeError("exit code 1\nOutOfMemoryError: CUDA out of memory\nbye")
        return Measured(10.0, 20.0, 1 << 20, 2.0 if name != "ours" else 2.01)

    monkeypatch.setattr(measure, "contend", contend)
    found = measure.turns(None, gpu.PEERS, 2, may_fail=True)
    assert list(found) == [title for title in gpu.PEERS if title != "HF Trainer, compiled"]
    assert "HF Trainer, compiled: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().err
    told = gpu._beside(found)
    assert "| Trainyard | 10 | 1.00 |" in told and told.endswith("alike. Failed: HF Trainer, compiled.")
    with pytest.raises(RuntimeError, match="out of memory"):
        measure.turns(None, gpu.PEERS, 1)


def test_contenders_that_did_not_compute_the_same_are_not_compared():
    found = {"A": Measured(1, 1, 1, 2.0), "B": Measured(1, 1, 1, 2.0001), "C": Measured(1, 1, 1, 2.01)}
    assert measure.same_losses(found, "A", "B").startswith(
        "A loss of 2.0000 in step 20 or the last, of A and B alike"
    )
    with pytest.raises(RuntimeError, match="A and C did not compute the same"):
        measure.same_losses(found, "A", "C")


def test_a_process_that_fails_says_why(tmp_path):
    (tmp_path / "case.json").write_text('{"threads": 1}')
    output, peak = measure.process([sys.executable, "-c", "print(1)"], tmp_path)
    assert output == "1\n" and 1 << 20 < peak < 1 << 30
    with pytest.raises(RuntimeError, match=r"exit code 3\n(.|\n)*reason"):
        command = [sys.executable, "-c", "import sys; sys.stderr.write('reason'); sys.exit(3)"]
        measure.process(command, tmp_path)


def test_options():
    assert Options(True, 7, None).rounds(5) == 1 and Options(False, None, None).rounds(5) == 5
    assert Options(False, 7, 3).fitted(CASE, CASE).threads == 3


def test_without_a_gpu_its_table_says_so_and_with_one_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.table(Options(False, None, None)).endswith("not measured.")
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\necho 'NVIDIA H100, 580.95.05'\necho 'NVIDIA A100, 580.95.05'\n")
    stand_in.chmod(0o755)
    assert gpu.devices() == "NVIDIA H100, driver 580.95.05"


@pytest.mark.full
def test_the_tables_are_made(repository):
    own = repository / ".venv-bench/bin/python"  # has the peers' packages; `make bench` makes it
    command = [own if own.exists() else sys.executable, "-m", "bench", "--quick", "strategies", "saving"]
    command += ["equal"] if own.exists() else []
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for name in (
        *(measure.ALIKE if own.exists() else ()),
        "ddp",
        "zero1",
        "zero2",
        "fsdp",
        "offload",
        "infinity",
        *saving.WAYS,
    ):
        assert re.search(rf"^\| {name} \| [\d,]+ \|", done.stdout, re.M), name


def ended(way, seed, loss, sent=100, saving=0):
    return {"way": way, "seed": seed, "loss": loss, "tokens": 10, "bytes": sent, "saving": saving}


def test_lossy_ways_are_compared_with_the_same_seed():
    """Seeds differ by more than ways do; a seed that exact has not ended says nothing yet."""
    found = [
        ended("exact", 0, 4.0),
        ended("exact", 1, 5.0),
        ended("8bit", 0, 4.04, 25, 15),
        ended("8bit", 1, 4.9, 25, 15),
    ]
    found += [ended("diloco", 2, 9.0, 1)]
    rows = slow.table(found, before=6.0).splitlines()[2:]
    assert rows[0] == "| exact | 0, 1 | 4.5000 |  |  |  |  | 10.0 |  |  |"
    # 0.04 more of an improvement by 2, and 0.1 less of one by 1.
    assert rows[1] == "| 8bit | 0, 1 | 4.4700 | -0.50 | -2.00 | 0.5 | -4.0 | 2.5 | 4.0 | 2.5 |"
    assert rows[2] == "| diloco | 2 | 9.0000 |  |  | 2 |  | 0.1 |  |  |"
    rows = slow.table(found).splitlines()[2:]
    assert rows[1] == "| 8bit | 0, 1 | 4.4700 | -0.50 | -2.00 | 0.5 |  | 2.5 | 4.0 | 2.5 |"


def test_what_the_last_checkpoint_of_an_attempt_has_sent_counts_too():
    """Of the first attempt that of step 4, which no step has counted; that of step 2 is told late, and counted."""

    def event(name, step, **more):
        return {"kind": "event", "event": name, "step": step, **more}

    steps = [{"kind": "train", "step": step} for step in range(1, 7)]
    rows = [event("start", 0), *steps[:3], event("checkpoint", 2, wire_bytes=10), steps[3]]
    rows += [event("checkpoint", 4, wire_bytes=20), event("resume", 4), *steps[4:], event("checkpoint", 6)]
    assert slow.uncounted(rows) == 20  # the last one is an older release's, which does not say
    assert slow.uncounted([*rows[:-1], event("checkpoint", 6, wire_bytes=3)]) == 23
    assert slow.uncounted(rows[:5]) == 0


def test_the_text_of_bench_slow_is_the_same_again_and_of_many_modules():
    sizes = slow.Sizes(letters=300_000)
    texts = slow.text(sizes)
    assert texts == slow.text(sizes) and sum(map(len, texts)) == 300_000
    assert len(texts) > 6 and max(map(len, texts)) <= slow.LONGEST


def test_a_text_too_short_to_hold_any_out_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--held-out 5000 leaves nothing of the text's 4000 letters"):
        slow.prepare(tmp_path, slow.Sizes(letters=4000, held_out=5000))
