"""A run's report: what is chosen for it out of what a run leaves."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import run_page

from trainer import metrics

ROOT = Path(__file__).resolve().parents[2]


def step(number, **facts):
    return {
        "kind": "train",
        "step": number,
        "loss": 1.0 / number,
        "step_seconds": 2.0,
        "tokens": 10,
        "world_size": 1,
    } | facts


def write(directory, *records, **files):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_a_run_that_failed_has_a_report_of_what_there_is(tmp_path):
    write(
        tmp_path,
        step(1),
        step(2, loss=float("nan")),
        status={"state": "failed", "reason": "diverged at step 3"},
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    (tmp_path / "config.yaml").write_text("batch_size: 16\n")
    found = run_page.found(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", "diverged at step 3")
    assert found["series"]["loss"] == [1.0, None] and found["settings"] == {"batch_size": 16}
    assert found["parts"] is None and found["figures"]["tokens_per_second"] == 5.0
    assert "NaN" not in run_page.page([tmp_path])


def test_what_was_brought_to_the_hosts_is_called_as_elsewhere(tmp_path):
    settings = {"model": "/var/lib/trainyard/models/0a/org--name", "dataset": "austen"}
    settings["origins"] = json.dumps({settings["model"]: "org/name"})
    found = run_page.found(write(tmp_path, step(1), summary={"settings": settings}))
    assert "model org/name · data austen" in found["about"]
    assert found["settings"] == {"model": "org/name", "dataset": "austen"}


@pytest.mark.parametrize("content", ["", '{"kind": "event", "step": 0, "event": "start"}\n', "\0\xff{"])
def test_without_a_step_there_is_none(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match="holds no step"):
        run_page.page([tmp_path])


def test_what_a_model_wrote_cannot_end_the_script(tmp_path):
    write(tmp_path, step(1))
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"prompt": "a", "text": "a</script><!--"}) + "\n[1]\n{cut"
    )
    page = run_page.page([tmp_path])
    assert page.count("</script>") == 2 and "a\\u003c/script>" in page
    assert run_page.found(tmp_path)["samples"] == [{"prompt": "a", "text": "a</script><!--"}]


def test_no_spike_is_thinned_away():
    steps = [step(n) for n in range(1, 50_001)]
    for name in run_page.SPIKES:
        steps[31_234][name] = 77.0
    columns = run_page.series(steps)
    assert all(77.0 in columns[name] for name in run_page.SPIKES)
    assert run_page.POINTS * 0.4 <= len(columns["loss"]) <= run_page.POINTS + 1
    assert columns["step"][0] == 1 and columns["step"][-1] == 50_000
    assert columns["hours"][-1] == pytest.approx((49_999 * 2 + 77) / 3600, rel=1e-5)
    assert sorted(columns["step"]) == columns["step"]


def test_where_the_time_goes():
    """Rank 1 computes for 3 s of 5, rank 0 for 1; the loop needs half a second, so the network took the rest.

    By a release from before ranks told of their optimizers: all count as rank 0's.
    """
    one = {"rank_seconds": [1.0, 3.0], "step_seconds": 5.0, "compute_seconds": 1.0, "comm_seconds": 3.5}
    steps = [step(n, world_size=2, **one) for n in (1, 2)]
    found = run_page.parts(steps, ["a", "b"])
    assert found["step"] == 5.0
    assert [(r["compute"], r["waiting"], r["wire"], r["optimizer"]) for r in found["ranks"]] == [
        (1, 2, 1.5, 0.5),
        (3, 0, 1.5, 0.5),
    ]
    assert all(r["compression"] == 0 for r in found["ranks"])
    assert "wait for b, and its share is balanced: of a larger batch_size" in found["advice"]
    even = run_page.parts(steps, ["a", "b"], balanced=False)
    assert "wait for b: balance: auto gives" in even["advice"]
    slow = run_page.parts([{**one, "step_seconds": 15.0, "comm_seconds": 13.5} for one in steps], ["a", "b"])
    assert "slow-networks" in slow["advice"]


def test_where_the_time_goes_is_the_last_attempts_alone(tmp_path):
    """Of as many ranks, but other ones, that send otherwise; an attempt without a step tells nothing."""
    one = {"rank_seconds": [1.0, 1.0], "compute_seconds": 1.0, "comm_seconds": 8.0, "step_seconds": 9.0}
    before, after = step(1, world_size=2, **one), step(2, world_size=2, **one)
    after |= {"step_seconds": 1.5, "comm_seconds": 0.5, "rank_seconds": [1.0, 0.9]}
    begins = {"kind": "event", "step": 1, "event": "resume", "ranks": ["a", "c"], "watched": True}
    saved = {"kind": "event", "step": 2, "event": "checkpoint"}
    empty = {**begins, "step": 2, "event": "restart", "ranks": ["a", "d"]}
    write(tmp_path, {**begins, "event": "start", "ranks": ["a", "b"]}, before, begins, after, saved, empty)
    found = run_page.found(tmp_path)["parts"]
    assert found["step"] == 1.5 and [one["name"] for one in found["ranks"]] == ["a", "c"]
    assert metrics.curve(tmp_path)["parts"]["wire"] == 0.5


def test_what_a_rank_codes_and_its_optimizer_are_not_the_networks():
    """Of 10 s both compute 1; rank 0 codes for 2 s, and its optimizer takes 0.5 s, rank 1's 6 s: the network took 1."""
    one = {"rank_seconds": [1.0, 1.0], "step_seconds": 10.0, "compute_seconds": 1.0, "comm_seconds": 8.5}
    one |= {"rank_compression_seconds": [2.0, 2.0], "rank_optimizer_seconds": [0.5, 6.0]}
    found = run_page.parts([step(n, world_size=2, **one) for n in (1, 2)], ["a", "b"])
    names = ("compute", "compression", "optimizer", "waiting", "wire")
    assert [[r[name] for name in names] for r in found["ranks"]] == [[1, 2, 0.5, 5.5, 1], [1, 2, 6, 0, 1]]
    assert found["step"] == 10 and "wait for b" in found["advice"]


def test_what_steps_do_not_tell_of_is_not_called_computing(tmp_path):
    """Of a sharded strategy's ranks on GPUs, which all seem to compute as long as the slowest one."""
    told = {"rank_seconds": [4.0, 4.0], "step_seconds": 5.0, "compute_seconds": 4.0, "comm_seconds": 0.5}
    steps = [step(n, world_size=2, **told) for n in (1, 2)]
    start = {"kind": "event", "event": "start", "step": 0, "ranks": ["a", "b"]}
    found = {}
    for watched in (True, False):
        write(tmp_path, {**start, "watched": not watched}, {**start, "watched": watched}, *steps)
        found[watched] = run_page.found(tmp_path)["parts"]
    assert found[True]["advice"] == "Most of the time is spent computing."
    assert found[True]["computing"] == "computing"
    assert "is not known" in found[False]["advice"] and found[False]["computing"] == "computing or waiting"


def test_the_last_attempts_ranks_are_named(tmp_path):
    events = [
        {"kind": "event", "event": "start", "step": 0, "ranks": ["a", "b", "c"]},
        {"kind": "event", "event": "restart", "step": 1, "ranks": ["a", "a", "c"], "reason": "b is gone"},
    ]
    found = run_page.found(write(tmp_path, *events, step(1, world_size=3)))
    assert found["rank_names"] == ["a, rank 0", "a, rank 1", "c"]
    assert found["events"][1]["text"] == "b is gone; 3 ranks on a, c"
    assert found["figures"]["restarts"] == 1


def test_whose_memory_is_shown(tmp_path):
    start = {"kind": "event", "event": "start", "step": 0, "ranks": ["a", "b"]}
    own = {"memory_peak_bytes": 700, "world_size": 2}
    found = run_page.found(write(tmp_path, start, step(1, **own), step(2, **own)))
    assert found["memory"] == {"whose": "the first rank", "ranks": [], "ranks_left": 0}
    assert found["figures"]["memory_peak_bytes"] == 700
    told = own | {"rank_memory_peak_bytes": [600, 900]}
    found = run_page.found(
        write(tmp_path, start, step(1, **own | {"rank_memory_peak_bytes": [600, 800]}), step(2, **told))
    )
    assert found["memory"]["whose"] == "any rank"
    assert found["memory"]["ranks"] == [{"name": "b", "bytes": 900}, {"name": "a", "bytes": 600}]
    assert found["figures"]["memory_peak_bytes"] == 900
    assert found["series"]["memory_peak_bytes"] == [800, 900]


def test_of_many_ranks_some_steps_tell_and_the_others_go_by_these(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "TOLD_RANKS", 1)
    start = {"kind": "event", "event": "start", "step": 0, "ranks": ["a", "b"]}
    steps = []
    for number in range(1, 8):
        figures = {
            "rank_seconds": [1.0, 1.0 + number],
            "rank_compression_seconds": [0.0, 0.0],
            "rank_optimizer_seconds": [0.5, 0.5],
            "rank_memory_peak_bytes": [700, 800 + number],
            "shares": [4, 4],
        }
        told = metrics.by_rank(number, number in (2, 4, 6), **figures)
        told = told if number in (2, 4, 6) else {}
        times = {"step_seconds": 2.0 + number, "compute_seconds": 1.0, "comm_seconds": 1.0}
        steps.append(step(number, world_size=2, memory_peak_bytes=700, **times, **told))
    again = {**start, "event": "restart", "step": 7}
    found = run_page.found(write(tmp_path, start, *steps, again, {**steps[0], "step": 8}, *steps[1:3]))
    assert found["memory"]["whose"] == "any rank" and found["memory"]["ranks"][0]["bytes"] == 802
    peaks = [700, 802, 802, 804, 804, 806, 806, 700, 802, 802]
    assert found["series"]["memory_peak_bytes"] == peaks
    found = run_page.found(write(tmp_path, start, *steps))
    means = {"a": (1.0, 4.0), "b": (5.0, 0.0)}
    assert {one["name"]: (one["compute"], one["waiting"]) for one in found["parts"]["ranks"]} == means
    parts = metrics.curve(tmp_path)["parts"]
    assert (parts["compute"], parts["wire"]) == ([1.0, 5.0], 0.5)


def test_a_steps_figures_of_ranks_are_as_long_as_they_must():
    found = metrics.by_rank(3, rank_seconds=[0.12345678901] * 64, rank_memory_peak_bytes=[2**40] * 64)
    assert found == {"rank_seconds": [0.123457] * 64, "rank_memory_peak_bytes": [2**40] * 64}
    for size in (65, 1000, 8000):
        some = [0.5] * size
        told = [number for number in range(1, 10_001) if metrics.by_rank(number, rank_seconds=some)]
        assert 0.8 < len(told) * size / 64 / 10_000 < 1.2
        for every in (
            (2, 16) if size < 8000 else (2,)
        ):  # what comes in every 16th step is seen as often as it comes
            assert 0.7 < sum(number % every == 0 for number in told) * every / len(told) < 1.4
        assert metrics.by_rank(told[0] + 1, True, rank_seconds=some)


def test_what_the_machines_were_is_told_of_the_last_attempt(tmp_path):
    card = {"cards": ["RTX 3090", "RTX 3090", "GTX 1080"], "driver": "570.86", "cuda": "12.8"}
    one = {"kernel": "6.12", "cpu": "a CPU", "cores": 16, "memory_bytes": 64 << 30, "python": "3.13.5"}
    bare = {"cards": [], "driver": None, "cuda": None, **one}
    events = [
        {"kind": "event", "event": "start", "step": 0, "machines": [{"hosts": ["a"], **bare}]},
        {"kind": "event", "event": "restart", "step": 1,
         "machines": [{"hosts": ["a", "b"], **one, **card}, {"hosts": ["c"], **bare}]},
        {"kind": "event", "event": "shares", "step": 1},
    ]  # fmt: skip
    known = run_page.found(write(tmp_path, *events, step(1), summary={"versions": {"torch": "2"}}))
    rows = {row[0]: row[1:] for row in known["machines"]["rows"]}
    assert known["machines"]["hosts"] == ["a, b", "c"] and known["machines"]["left"] == 0
    assert rows["cards"] == ["2 x RTX 3090, 1 x GTX 1080", ""] and rows["driver"] == ["570.86", ""]
    assert rows["CPU"] == ["a CPU, 16 cores"] * 2 and rows["memory"] == ["64 GiB"] * 2
    assert "system" not in rows  # no machine has told its own
    assert not any("torch" in row[0] for row in known["environment"])
    # No card anywhere, and a run from before: what there is.
    alone = run_page.found(write(tmp_path, events[0], step(1)))
    assert "cards" not in {row[0] for row in alone["machines"]["rows"]}
    before = run_page.found(write(tmp_path, step(1), summary={"versions": {"torch": "2"}}))
    assert before["machines"] is None and ["version of torch", "2"] in before["environment"]


def test_of_many_events_checkpoints_give_way():
    saved = [{"event": "checkpoint", "step": n} for n in range(1000)]
    rows, left = run_page._events([{"event": "start", "step": 0}, *saved])
    assert len(rows) == run_page.SHOWN_EVENTS and left == 1001 - run_page.SHOWN_EVENTS
    assert rows[0]["event"] == "start" and rows[-1]["step"] == 999


def test_the_names_of_the_figures_when_several_are_compared(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("write_report", ROOT / "scripts/write_report.py")
    write_report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_report)
    for name, loss in (("a", 2.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, step(1, loss=loss))
    assert write_report.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "2.0000  1.5000" in said and (tmp_path / "a-b.html").exists()
    assert write_report.main([str(tmp_path)]) == 2
    assert "holds no step" in capsys.readouterr().err


def test_it_takes_nothing_from_elsewhere(tmp_path):
    """It is read where there is no internet, and tells no site that it is."""
    start = {"kind": "event", "event": "start", "step": 0, "ranks": ["a", "b"]}
    write(tmp_path, start, step(1, world_size=2), step(2, world_size=2), summary={"versions": {"torch": "2"}})
    page = run_page.write(tmp_path).read_text()
    assert set(re.findall(r"\bhttps?:[^\s\"'`<>)]*", page)) == {"http://www.w3.org/2000/svg"}
    leads = re.findall(r"\b(?:src|srcset|href|action|poster)\s*=\s*[\"'`]?([^\s\"'`>]+)", page)
    leads += re.findall(r"\burl\(\s*[\"'`]?([^\s\"'`)]+)", page)
    assert leads and [one for one in leads if not one.startswith(("#", "data:"))] == []
    asks = r"@import|\b(?:import|fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|Worker)\s*\("
    assert re.findall(asks, page) == []
