"""The figures of `make bench-cluster`, from steps made up as they would be: what is compared, and what is counted."""

import json
import re

import pytest

from bench import cluster
from bench.measure import WAYS
from trainer import config, optim, ways


def steps(count, seconds, begin=0.0, **keys):
    """So many steps of so many seconds, one after the other."""
    return [
        {
            **{"step": number, "time": begin + number * seconds, "step_seconds": seconds, "tokens": 100},
            **{"loss": 2.0, "wire_bytes": 0, "compute_seconds": seconds, "comm_seconds": 0.0, "shares": [1]},
            **{"rank_seconds": [seconds], "world_size": 1, **keys},
        }
        for number in range(1, count + 1)
    ]


def test_runs_of_other_lengths_have_the_same_learning_rates():
    """Else the losses of even shares and of learnt ones could not be compared."""
    found = config.from_mapping({**cluster.COMMON, "steps": 84})
    for step in (1, 7, 32):
        rates = [optim.learning_rate(found, found.lr, step, steps) for steps in (32, 84)]
        assert rates[0] == rates[1] == cluster.COMMON["lr"]


def test_a_host_alone_has_the_batch_that_it_has_of_the_coupled_step():
    assert cluster.parts((0.8, 0.4, 0.4)) == {"node1": 96, "node2": 48, "node3": 48}
    assert sum(cluster.parts((0.8, 0.4, 0.2)).values()) == cluster.SEQUENCES
    assert cluster.parts((0.8, 0.4, 0.2))["node1"] in (109, 110)


def test_only_steps_in_which_all_computed_count():
    rows = {"a": steps(100, 1.0), "b": steps(20, 1.0, begin=40.5)}
    found = cluster.together(rows)
    assert [row["step"] for row in found["b"]] == list(range(4, 21))
    assert [row["step"] for row in found["a"]] == list(range(45, 61))  # 43.5 to 60.5
    assert cluster.together({"a": steps(100, 1.0), "b": steps(3, 1.0, begin=300)}) == {"a": [], "b": []}
    assert cluster.together({"a": steps(9, 1.0), "b": steps(9, 1.0, begin=300)}) == {"a": [], "b": []}


class Fake:
    """A Group whose steps grow each time they are asked for; the slow one starts a hundred looks later."""

    started: list = []

    def __init__(self, lab, name, hosts, **keys):
        self.name, self.keys, self.stopped, self.looks = name, keys, False, 0
        self.started.append(self)

    def rows(self):
        self.looks += 1
        late = 100 if self.name.endswith("node3") else 0
        return steps(max(0, self.looks - late), 1.0, begin=float(late))

    def running(self):
        return True

    def stop(self):
        self.stopped = True
        return self


def test_hosts_apart_go_on_until_the_slowest_has_its_steps(monkeypatch):
    monkeypatch.setattr(cluster, "Group", Fake)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    Fake.started = []
    found = cluster.apart(None, "apart", {"node1": 24, "node2": 12, "node3": 12}, 20)
    assert all(20 <= len(rows) <= 21 for rows in found.values())
    assert all(group.stopped for group in Fake.started)
    assert [group.keys["batch_size"] for group in Fake.started] == [24, 12, 12]


def test_recovery_is_told_by_the_end_of_five_steps_in_a_row():
    rows = steps(40, 1.0) + [{**row, "step": row["step"] + 40} for row in steps(12, 2.0) + steps(30, 1.1)]
    rows = [{**row, "step": number} for number, row in enumerate(rows, 1)]
    after, last = cluster.recovery(rows, 40, 100.0)
    assert after == 17 and last == pytest.approx(1 / 1.1)
    assert cluster.recovery(rows, 40, 150.0)[0] is None
    rows[55]["step_seconds"] = 1.2  # of the five it is their mean that counts
    assert cluster.recovery(rows, 40, 100.0)[0] == 17


def test_steps_that_hosts_made_at_the_same_time_lie_side_by_side():
    def rows(*seconds):
        return [{**steps(1, one)[0], "tokens": 100} for one in seconds]

    before = {"node1": rows(1.0, 2.0, 9.0), "node2": rows(1.0, 1.0), "node3": rows(4.0, 2.0)}
    after = {host: rows(3.0) for host in before}
    one, other, third = cluster._around(before, after)
    assert one["steps"] == [0.5, 1.0, 1.5] and other["steps"] == pytest.approx([0.6, 0.6, 1.8])
    assert len(third["steps"]) == 3 and one["speed"] == pytest.approx(400 / 15)


class Lab:
    def set_cpus(self, host, share): ...

    def set_rate(self, host, rate):
        if rate:
            self.rate = rate


def test_bytes_of_a_way_are_those_of_its_steps_alone(monkeypatch):
    """Interfaces count 5 MB before the first step, too, and of diloco its meetings alone, the last one included."""
    exact, rate = 4_000_000, 0.5

    def counted(lab, name, keys):
        every = ways.sent(exact * 3 // 4, exact // 27, 3, 1)
        comm = keys.get("comm", "exact")
        count, sent = keys["steps"], every[comm]
        if comm == "diloco":
            meetings = len({n for n in range(1, count + 1) if n % keys["sync_every"] == 0 or n == count})
            return 3 * 5_000_000 + 3 * sent * meetings, steps(count, rate, wire_bytes=sent), 1.0
        rows = steps(count, rate, wire_bytes=sent)
        # Importing takes 9 s of a processor, a token as long as by itself on half of one, and a byte 10 ns; 5 ns where
        # nothing limits it.
        alone = 0.5 / (100 / 3 / rate) * sum(row["tokens"] for row in rows)
        byte = 1e-8 if name.startswith("exact") else 5e-9
        return 3 * 5_000_000 + 3 * sent * count, rows, 9.0 + alone + 3 * byte * sent * count

    class Fast(Fake):
        def ended(self):
            return self

        def rows(self):
            return steps(90, rate, wire_bytes=exact, world_size=3, shares=[1] * 3, rank_seconds=[rate] * 3)

    monkeypatch.setattr(cluster, "Group", Fast)
    monkeypatch.setattr(cluster, "_counted", counted)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(cluster, "RECORDED", [])
    lab = Lab()
    told = cluster.wire(lab, quick=False)
    less = {line.split(" | ")[0][2:]: line.split(" | ")[2] for line in told.splitlines() if line[:1] == "|"}
    assert less["16bit"] == "2.000 (asked 2: met)"
    assert less["8bit"] == "3.984 (asked 4: missed)"
    assert less["powersgd"] == "20.250 (asked 20: met)"
    assert less["diloco"] == "239.066 (asked 200: met)"
    assert {run["sync_every"] for run in cluster.RECORDED if run["comm"] == "diloco"} == {60}
    assert [round(run["sending"] * 1e9, 6) for run in cluster.RECORDED] == [5, *[10] * 6]
    assert [bool(run["hosts"][0]["rate"]) for run in cluster.RECORDED] == [False, *[True] * 6]
    # 4 MB at 0.94 of the wire take 2 s, four times the steps' half second.
    assert lab.rate == f"{round(32 / 0.94 / 2)}mbit"


def test_a_tables_runs_take_the_place_of_their_own_alone(tmp_path):
    file = tmp_path / "runs/a.json"
    cluster.keep(file, [{"name": "2:1:1, even", "n": 1}, {"name": "exact", "n": 1}])
    cluster.keep(file, [])
    cluster.keep(file, [{"name": "exact", "n": 2}])
    assert [(one["name"], one["n"]) for one in json.loads(file.read_text())] == [
        ("2:1:1, even", 1),
        ("exact", 2),
    ]


def test_each_way_but_exact_has_what_is_asked_of_it():
    assert set(cluster.FEWER) | {"exact"} == set(WAYS)


def test_tables_name_what_was_asked(monkeypatch):
    """Runs whose steps take what their shares do: even ones as long as the slowest needs."""

    class Timed(Fake):
        def ended(self):
            return self

        def rows(self):
            count = self.keys["steps"]
            own = {"rank_seconds": [2.75, 2.2, 1.8], "world_size": 3, "compute_seconds": 2.75}
            if self.name.startswith("even"):
                return steps(count, 4.0, tokens=48, **own | {"rank_seconds": [2, 4, 4], "shares": [16] * 3})
            return steps(count, 3.0, tokens=48, shares=[24, 12, 12], **own)

    def apart(lab, name, batches, count):
        return {host: steps(count, 2.75, tokens=batch, shares=[1]) for host, batch in batches.items()}

    monkeypatch.setattr(cluster, "Group", Timed)
    monkeypatch.setattr(cluster, "apart", apart)
    monkeypatch.setattr(cluster, "RECORDED", [])
    monkeypatch.setattr(cluster, "SEQUENCES", 48)
    told = cluster.balance(Lab(), quick=True)
    assert "1.333 (asked 1.25: met)" in told and "0.917 (asked 0.9: met)" in told
    assert len(re.findall(r"0\.0e\+00 \(asked at most 1e-05: met\)", told)) == 2
    assert "0.917 (asked 0.92: missed)" in told
    # Of 24, 12 and 12 sequences in as many seconds; by itself a host takes 2.75 for its own.
    assert "they computed at 1.000, 1.250, 1.528 of their speeds by themselves; " in told
    # 16 tokens a second, of 8.73, 5.45 and 6.67; and 12, of 8, 4 and 4.
    assert "2:1:1, auto: 0.767 of what the hosts computed at in the same steps" in told
    assert "Even shares had 0.750 of it: auto/even is 1.023 (asked 1.25: missed) by that, whatever" in told
    assert (
        "Even shares had 0.750 of it: auto/even is 1.023 by that, whatever" in told
    )  # of 4:2:1, for which it is not asked
    assert "16.7% of a step the last one was waited for, 8.3% were sums and what follows them." in told
