"""A run's report in a real browser: what it draws, how fast, on what screens."""

import itertools
import json
import math
import re
import statistics
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
    """A line of kind train; three ranks, the first as fast as the others together. No column is a straight line."""
    speed = 8192 + 900 * math.sin(number / STEPS * 40)
    memory = int(6e9 + 1e9 * number / STEPS + 2e8 * math.sin(number / STEPS * 9))
    return {
        "kind": "train",
        "step": number,
        "epoch": 0,
        "loss": 2 + 5 * math.exp(-number / STEPS * 9) + 0.05 * math.sin(number * 1.7),
        "router_loss": 1 + 0.1 * math.cos(number / STEPS * 30),
        "lr": 1e-3 * (1 + math.cos(number / STEPS * 3)) / 2,
        "grad_norm": 1 + 0.2 * math.sin(number),
        "tokens": 4096,
        "tokens_total": 4096 * number,
        "tokens_per_second": speed,
        "mfu": speed / 20_000,
        "step_seconds": 4096 / speed,
        "compute_seconds": 0.2,
        "comm_seconds": 0.28,
        "rank_seconds": [0.2, 0.4, 0.38],
        "wire_bytes": 5_804_032 + 400_000 * (number // 20_000),
        "world_size": 3,
        "shares": [24, 12, 12],
        "memory_peak_bytes": memory,
        "rank_memory_peak_bytes": [memory, memory + 10**9, memory // 2],
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
    hosts = ["anna", "bert", "cleo"]
    start = {"kind": "event", "event": "start", "step": 0, "ranks": hosts, "time": 1.7e9}
    alike = {"kernel": "6.12.43+deb13-amd64", "driver": "570.133.20", "cuda": "12.8", "python": "3.13.5"}
    start["machines"] = [
        {"hosts": hosts[:2], "cards": ["NVIDIA GeForce RTX 3090"], **alike},
        {"hosts": hosts[2:], "cards": ["NVIDIA GeForce GTX 1080 Ti"] * 2, **alike},
    ]
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
    seconds = time.monotonic() - began
    print(f"{STEPS:,} steps: {page.stat().st_size:,} bytes, open after {seconds:.2f} s")
    assert seconds < 3
    assert browser.value("document.querySelectorAll('.plot svg').length") == len(PLOTS)
    assert browser.value("window.hit") is None
    assert "</script>" in browser.value("document.querySelector('.sample').textContent")
    assert "bert is <gone>" in browser.value("document.body.textContent")
    rows = browser.value(
        "[...document.querySelectorAll('details tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert ["", "anna, bert", "cleo"] in rows and ["driver", "570.133.20", "570.133.20"] in rows
    assert ["cards", "1 x NVIDIA GeForce RTX 3090", "2 x NVIDIA GeForce GTX 1080 Ti"] in rows
    assert browser.errors == []


# What each plot shows, by its title: columns of metrics.jsonl.
PLOTS = {
    "loss": ("loss", "held out"),
    "Tokens a second": ("tokens_per_second",),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("lr",),
    "Seconds a step": ("step_seconds",),
    "Memory of any rank, the most so far": ("memory_peak_bytes",),
    "Sent by the first rank a step": ("wire_bytes",),
    "Model FLOPs utilisation": ("mfu",),
    "Routers' balance loss": ("router_loss",),
    "shares": (0, 1, 2),
}
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "%": 0.01, "B": 1}
UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"))}


def value_of(text):
    """The number that the page means by `text`: 20k, 5.59 GiB, 41 %, 1e-4."""
    number, unit = re.fullmatch(r"(-?[\d.]+(?:e[-+]?\d+)?) ?(\D*)", text).groups()
    return float(number) * UNITS[unit]


@pytest.fixture(scope="module")
def written(long_run):
    """What metrics.jsonl has for each plot's lines, and where a step lies on each axis: {column: {step: value}}."""
    records = [json.loads(line) for line in (long_run / "metrics.jsonl").read_text().splitlines()]
    train = [one for one in records if one["kind"] == "train"]
    names = {column for columns in PLOTS.values() for column in columns if column in train[0]}
    columns = {name: {one["step"]: one[name] for one in train} for name in names | {"tokens_total"}}
    columns["memory_peak_bytes"] = {one["step"]: max(one["rank_memory_peak_bytes"]) for one in train}
    columns["held out"] = {one["step"]: one["loss"] for one in records if one["kind"] == "eval"}
    for rank in range(3):
        columns[rank] = {one["step"]: one["shares"][rank] for one in train}
    columns["shares"] = {
        one["step"]: one["shares"]
        for before, one in itertools.pairwise([{}, *train])
        if one["shares"] != before.get("shares")
    }
    columns["step"] = {one["step"]: one["step"] for one in train}
    seconds = itertools.accumulate(one["step_seconds"] for one in train)
    columns["hours"] = {one["step"]: total / 3600 for one, total in zip(train, seconds, strict=True)}
    return columns


def six_digits(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def calm(browser):
    """No smoothing: lines are the values themselves."""
    browser.value("view.smooth = 0; redraw()")


def test_what_the_page_holds_is_what_metrics_say(browser, long_run, written):
    """Every value of every curve, to the six digits that are kept; first, last and highest among them."""
    browser.open((long_run / "report.html").as_uri())
    held = json.loads(browser.value("JSON.stringify(data.runs[0])"))
    steps = held["series"]["step"]
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (1, STEPS) and len(steps) > 700
    for name in (set(run_page.SERIES) | {"hours"}) - {"step"}:
        assert held["series"][name] == [six_digits(written[name][step]) for step in steps], name
    for name in run_page.SPIKES:
        assert max(held["series"][name]) == six_digits(max(written[name].values())), name
    assert max(held["series"]["loss"]) == 9.5  # the one spike among 100,000 steps
    assert held["evals"] == [list(one) for one in written["held out"].items()]
    assert held["shares"] == [list(one) for one in written["shares"].items()] and len(held["shares"]) == 3
    seconds = sum(written["step_seconds"].values())
    means = {name: statistics.mean(written[name].values()) for name in ("mfu", "wire_bytes")}
    figures = {
        **{"last_loss": written["loss"][STEPS], "best_eval": min(written["held out"].values()), **means},
        **{"steps": STEPS, "tokens": 4096 * STEPS, "train_seconds": seconds, "restarts": 1},
        "tokens_per_second": 4096 * STEPS / seconds,
        "memory_peak_bytes": max(written["memory_peak_bytes"].values()),
    }
    assert held["figures"] == pytest.approx(figures)


def test_what_stands_on_top_and_how_long_the_bars_are(browser, long_run, written):
    """As a person sees them: figures in words, and each part of each rank's bar by its width."""
    browser.open((long_run / "report.html").as_uri(), width=1280)
    told = dict(
        browser.value(
            "[...document.querySelectorAll('.figure')].map(f => [...f.children].reverse().map(c => c.innerText))"
        )
    )
    assert told["loss at the end"] == f"{written['loss'][STEPS]:.4f}" and told["steps"] == f"{STEPS:,}"
    best = min(written["held out"].values())
    assert told["held-out loss, the best"] == f"{best:.4f}" and told["restarts"] == "1"
    assert value_of(told["its perplexity"]) == pytest.approx(math.exp(best), rel=1e-3)
    assert value_of(told["tokens"]) == pytest.approx(4096 * STEPS, rel=1e-3)
    step = statistics.mean(written["step_seconds"].values())
    assert float(told["tokens/s"].replace(",", "")) == pytest.approx(4096 / step, abs=1)
    # Rank by rank: its own work, waiting for the slowest, the network, and the rest; as `step` has them.
    rest = step - 0.2 - 0.28
    wire = step - 0.4 - rest
    wanted = [[own, 0.4 - own, wire, rest] for own in (0.2, 0.4, 0.38)]
    bars = browser.value("""
      [...document.querySelectorAll('.bar')].map(b =>
        [b.clientWidth, ...[...b.children].map(c => c.getBoundingClientRect().width)])""")
    assert len(bars) == 3
    for (room, *widths), seconds in zip(bars, wanted, strict=True):
        assert widths == pytest.approx([room * one / step for one in seconds], abs=1.5)


@pytest.mark.parametrize("axis", ["step", "tokens_total", "hours"])
def test_every_line_is_drawn_where_its_axes_say(browser, long_run, written, axis):
    """Every point of every plot, by the figures at its axes, against metrics.jsonl: to two pixels."""
    browser.open((long_run / "report.html").as_uri(), width=1280)
    calm(browser)
    browser.value(f"view.x = '{axis}'; redraw()")
    steps = json.loads(browser.value("JSON.stringify(data.runs[0].series.step)"))
    plots = browser.value("""
      [...document.querySelectorAll('.plot svg')].map(svg => ({
        title: svg.getAttribute('aria-label'),
        texts: [...svg.querySelectorAll('text')].map(t => [t.textContent, +t.getAttribute('x'), +t.getAttribute('y'),
          t.classList.contains('y')]),
        lines: [...svg.querySelectorAll('g path')].map(p => p.getAttribute('d'))}))""")
    assert [one["title"] for one in plots] == list(PLOTS)
    for one in plots:
        across = scale([(value_of(text), x) for text, x, _, upright in one["texts"] if not upright])
        up = scale([(value_of(text), y - 4) for text, _, y, upright in one["texts"] if upright])
        assert len(one["lines"]) == len(PLOTS[one["title"]]), one["title"]
        for column, line in zip(PLOTS[one["title"]], one["lines"], strict=True):
            drawn = [tuple(map(float, point.split(","))) for point in re.split("[ML]", line)[1:]]
            wanted = points(column, written, steps, written[axis])
            assert len(drawn) == len(wanted), (one["title"], column)
            off = max(
                max(abs(x - across(at)), abs(y - up(value)))
                for (x, y), (at, value) in zip(drawn, wanted, strict=True)
            )
            assert off < 2, (one["title"], column, off)
    assert browser.errors == []


def scale(ticks):
    """Pixel by value, as the outermost two of an axis' figures, (value, pixel), say."""
    (low, at_low), (high, at_high) = min(ticks), max(ticks)
    assert len(ticks) > 1 and high > low
    return lambda value: at_low + (value - low) / (high - low) * (at_high - at_low)


def points(column, written, steps, place):
    """The points (place on the axis, value) that the line of a column goes through."""
    if column == "held out":
        near = [min(steps, key=lambda one: (abs(one - step), one)) for step in written[column]]
        exact = place is written["step"]
        at = [place[step] for step in (written[column] if exact else near)]
        return list(zip(at, written[column].values(), strict=True))
    if not isinstance(column, int):
        return [(place[step], written[column][step]) for step in steps]
    found = []  # shares stay what they are until the next ones
    for step in (*written["shares"], STEPS):
        found += [(place[step], found[-1][1])] if found else []
        found.append((place[step], written[column][step]))
    return found


def test_what_is_under_the_pointer_is_what_metrics_say(browser, long_run, written):
    browser.open((long_run / "report.html").as_uri(), height=1000)  # whose lines are smoothed
    for number, (title, columns) in enumerate(PLOTS.items()):
        frame = browser.value(f"""
          (svg => {{ svg.scrollIntoView({{block: 'center'}}); const b = svg.getBoundingClientRect();
            return [b.x, b.y, b.width, b.height]; }})(document.querySelectorAll('.plot svg')[{number}])""")
        seen = []
        for share in (0.2, 0.33, 0.5, 0.77, 0.99):
            browser.point(frame[0] + share * frame[2], frame[1] + frame[3] / 2)
            tip = browser.value(
                f"document.querySelectorAll('.plot')[{number}].querySelector('.tip').innerText"
            )
            head, *told = tip.split("\n")
            step = int(head.split()[-1])
            for column, line in zip(columns, told, strict=True):
                text = re.search(r"-?[\d.]+(e[-+]?\d+)?( ?(%|[KMGT]?i?B))?$", line)[0]
                exact = {"%": 2e-2, "B": 5e-3}.get(text[-1], 1e-5)  # how much of it is said
                values = written[column]
                near = [values[min(values, key=lambda one: abs(one - step))]]
                near += [values[at] for at in written["shares"] if isinstance(column, int)]
                assert any(value_of(text) == pytest.approx(one, rel=exact) for one in near), (title, line)
            seen.append(step)
        assert len(set(seen)) == 5 or columns == (0, 1, 2), (title, seen)


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
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_overlaps_on_any_screen(browser, long_run, width, dark, tmp_path):
    """All texts of the page, those of every plot too, on each axis, with a logarithm, and from near."""
    browser.open((long_run / "report.html").as_uri(), width=width, height=800, dark=dark)
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    for look in (
        "",
        "view.log = true",
        "view.log = false; view.x = 'tokens_total'",
        "view.x = 'hours'",
        "view.x = 'step'; view.range = [12000, 13500]",
    ):
        browser.value(f"{look}; redraw()")
        seen = browser.value(browsers.TEXTS)
        assert seen["count"] > 400 and seen["plots"] == len(PLOTS), look
        assert (seen["overlap"], seen["outside"], seen["equal"], seen["wide"]) == ([], [], [], 0), look
    browser.value("view.range = null; redraw()")
    ink = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ink[4:-1].split(","))) < 150) is dark
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.errors == []


def test_what_is_under_the_pointer_stays_on_a_phone(browser, long_run):
    browser.open((long_run / "report.html").as_uri(), width=360, height=800)
    for number in range(len(PLOTS)):
        frame = browser.value(f"""
          (svg => {{ svg.scrollIntoView({{block: 'center'}}); const b = svg.getBoundingClientRect();
            return [b.x, b.y, b.width, b.height]; }})(document.querySelectorAll('.plot svg')[{number}])""")
        for share in (0.2, 0.6, 0.98):
            browser.point(frame[0] + share * frame[2], frame[1] + frame[3] / 2)
            left, right = browser.value(f"""
              (b => [b.left, b.right])(
                document.querySelectorAll('.plot')[{number}].querySelector('.tip').getBoundingClientRect())""")
            assert 0 <= left < right <= 360, (number, share)


def test_two_runs_beside_each_other(browser, long_run, tmp_path):
    other = write(tmp_path / "other", [step(n) for n in range(1, 40)], batch_size=96)
    page = tmp_path / "both.html"
    page.write_text(run_page.page([long_run, other]))
    for width in (1400, 400):
        browser.open(page.as_uri(), width=width)
        browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
        seen = browser.value(browsers.TEXTS)
        assert seen["count"] > 200 and (seen["overlap"], seen["outside"], seen["wide"]) == ([], [], 0), width
    text = browser.value("document.body.innerText")
    assert "2 runs compared" in text and "Settings that differ" in text
    rows = browser.value(
        "[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert next(row for row in rows if row[0] == "batch_size") == ["batch_size", "48", "96"]
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []
