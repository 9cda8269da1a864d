"""The benchmarks: what sums up, and (make test FULL=1) that the tables which need no peer's package are made."""

import re
import subprocess
import sys

import pytest

from bench import measure
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


def test_contenders_that_did_not_compute_the_same_are_not_compared():
    found = {"A": Measured(1, 1, 1, 2.0), "B": Measured(1, 1, 1, 2.0001), "C": Measured(1, 1, 1, 2.01)}
    assert measure.same_losses(found, "A", "B").startswith("Last step's loss: 2.0000")
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


@pytest.mark.full
def test_the_tables_are_made(repository):
    command = [sys.executable, "-m", "bench", "--quick", "equal", "strategies"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for name in (
        "bare loop",
        "Trainyard",
        "HF Trainer",
        "ddp",
        "zero1",
        "zero2",
        "fsdp",
        "offload",
        "infinity",
    ):
        assert re.search(rf"^\| {name} \| [\d,]+ \|", done.stdout, re.M), name
