"""A run's report in a real browser: what it draws, how fast, on what screens."""

import json
import math
import time

import browser as browsers
import pytest
import run_page

STEPS = 100_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browsers.have()
    with browsers.Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def step(number, **facts):
    """A line of kind train; three ranks, the first as fast as the others together."""
    return {
        "kind": "train",
        "step": number,
        "epoch": 0,
        "loss": 2 + 5 * math.exp(-number / STEPS * 9) + 0.05 * math.sin(number * 1.7),
        "router_loss": None,
        "lr": 1e-3 * (1 - number / STEPS),
        "grad_norm": 1 + 0.2 * math.sin(number),
        "tokens": 4096,
        "tokens_total": 4096 * number,
        "tokens_per_second": 8192.0,
        "mfu": 0.41,
        "step_seconds": 0.5,
        "compute_seconds": 0.2,
        "comm_seconds": 0.28,
        "rank_seconds": [0.2, 0.4, 0.38],
        "wire_bytes": 5_804_032,
        "world_size": 3,
        "shares": [24, 12, 12],
        "memory_peak_bytes": 6e9,
        "time": 1.7e9 + number / 2,
        **facts,
    }


def write(directory, records, **summary):
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    settings = {"model": "tiny", "dataset": "austen", "batch_size": 48, "lr": 1e-3, **summary}
    (directory / "summary.json").write_text(
        json.dumps(
            {
                "state": "finished",
                "unigram_entropy": 6.24,
                "parameters": 1_088_256,
                "world": {"size": 3, "hosts": ["anna", "bert", "cleo"], "device": "cpu"},
                "versions": {"torch": "2.13.0"},
                "settings": settings,
            }
        )
    )
    return directory


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """100,000 steps with all that a report can show."""
    start = {"kind": "event", "event": "start", "step": 0, "ranks": ["anna", "bert", "cleo"], "time": 1.7e9}
    records = [start, *(step(number) for number in range(1, STEPS + 1))]
    records[5:5] = [
        {"kind": "event", "event": "restart", "reason": "bert is <gone>", "step": 4, "time": 1.7e9 + 2}
    ]
    records[40_001]["loss"] = 9.5
    records[50_000]["shares"] = [16, 16, 16]
    for at in range(1000, STEPS + 1, 1000):
        records.append(
            {"kind": "eval", "step": at, "loss": 2.1 + 5 * math.exp(-at / STEPS * 9), "time": 1.7e9}
        )
        records.append({"kind": "event", "event": "checkpoint", "step": at, "seconds": 0.2, "time": 1.7e9})
    directory = write(tmp_path_factory.mktemp("runs") / "long", records)
    sample = {"prompt": "She had", "text": "She had</script><script>window.hit = 1</script> none."}
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    run_page.write(directory)
    return directory


def test_a_long_runs_report_is_small_and_opens_at_once(browser, long_run):
    page = long_run / "report.html"
    assert page.stat().st_size < 3e6
    began = time.monotonic()
    browser.open(page.as_uri())
    assert time.monotonic() - began < 3
    assert browser.value("document.querySelectorAll('.plot svg').length") == 9
    assert browser.value("window.hit") is None
    assert "</script>" in browser.value("document.querySelector('.sample').textContent")
    assert "bert is <gone>" in browser.value("document.body.textContent")
    assert browser.errors == []


def test_what_is_under_the_pointer_is_what_metrics_say(browser, long_run):
    browser.open((long_run / "report.html").as_uri(), height=1000)
    browser.value(
        "(s => {s.value = 0; s.dispatchEvent(new Event('input'))})(document.querySelector('[type=range]'))"
    )
    losses = {}
    for line in (long_run / "metrics.jsonl").read_text().splitlines():
        one = json.loads(line)
        losses.setdefault(one["kind"], {})[one["step"]] = one.get("loss")
    frame = browser.value(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('.plot svg').getBoundingClientRect())"
    )
    seen = []
    for share in (0.1, 0.33, 0.5, 0.77, 0.99):
        browser.point(frame[0] + share * frame[2], frame[1] + frame[3] / 2)
        tip = browser.value("document.querySelector('.plot .tip').innerText").split("\n")
        number = int(tip[0].split()[-1])
        train = float(tip[1].split()[-1])
        assert train == pytest.approx(losses["train"][number], rel=1e-5)
        held_out = float(tip[2].split()[-1])
        assert held_out in [float(f"{one:.6g}") for one in losses["eval"].values()]
        seen.append(number)
    assert len(set(seen)) == 5
    # The one spike among 100,000 steps is drawn.
    assert max(json.loads(browser.value("JSON.stringify(data.runs[0].series.loss)"))) == 9.5


def test_a_closer_look_and_other_axes(browser, long_run):
    browser.open((long_run / "report.html").as_uri())
    frame = browser.value(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('.plot svg').getBoundingClientRect())"
    )
    y = frame[1] + frame[3] / 2
    browser.point(frame[0] + 0.4 * frame[2], y)
    browser.point(frame[0] + 0.4 * frame[2], y, "mousePressed", button="left", clickCount=1)
    browser.point(frame[0] + 0.6 * frame[2], y, buttons=1)
    browser.point(frame[0] + 0.6 * frame[2], y, "mouseReleased", button="left", clickCount=1)
    low, high = browser.value("view.range")
    assert 0.3 * STEPS < low < 0.42 * STEPS and 0.55 * STEPS < high < 0.65 * STEPS
    browser.value("[...document.querySelectorAll('button')].find(b => b.textContent == 'tokens').click()")
    assert browser.value("view.range") is None
    browser.value("document.querySelector('[type=checkbox]').click()")
    assert browser.errors == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overlaps_on_any_screen(browser, long_run, width, dark, tmp_path):
    browser.open((long_run / "report.html").as_uri(), width=width, height=800, dark=dark)
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    overlapping = browser.value("""
      [...document.querySelectorAll('.plot svg')].flatMap(svg => {
        const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], n) => boxes.slice(n + 1).filter(([b, q]) =>
          p.left < q.right && q.left < p.right && p.top < q.bottom - 1 && q.top < p.bottom - 1).map(([b]) => [a, b]));
      })""")
    assert overlapping == []
    outside = browser.value("""
      [...document.querySelectorAll('.plot text')].filter(t => {
        const card = t.closest('.card').getBoundingClientRect(), box = t.getBoundingClientRect();
        return box.left < card.left || box.right > card.right;
      }).map(t => t.textContent)""")
    assert outside == []
    ink = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ink[4:-1].split(","))) < 150) is dark
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.errors == []


def test_two_runs_beside_each_other(browser, long_run, tmp_path):
    other = write(tmp_path / "other", [step(n) for n in range(1, 40)], batch_size=96)
    page = tmp_path / "both.html"
    page.write_text(run_page.page([long_run, other]))
    browser.open(page.as_uri(), width=400)
    text = browser.value("document.body.innerText")
    assert "2 runs compared" in text and "Settings that differ" in text
    rows = browser.value(
        "[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert next(row for row in rows if row[0] == "batch_size") == ["batch_size", "48", "96"]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []
