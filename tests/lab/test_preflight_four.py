"""preflight.yml on four hosts: a minute before a run, minutes with depth=full, as asked with burn; and on six."""

import time

import pytest
from plays import Plays
from test_preflight import book, complaints, patience, preflight

pytestmark = pytest.mark.full
HOSTS = [f"node{number}" for number in range(1, 5)]


@pytest.fixture(scope="module")
def plays(make_lab, tmp_path_factory):
    plays = Plays(make_lab("four", hosts=len(HOSTS)), tmp_path_factory.mktemp("four"))
    done = book(plays, "site.yml", seconds=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    yield plays
    plays.lab.down()


def timed(plays, results, **extra):
    """(seconds, its result), of a preflight that complains of nothing and has measured every pair."""
    begin = time.monotonic()
    status, said, result = preflight(plays, results, **extra)
    seconds = time.monotonic() - begin
    print(f"preflight {extra or 'before a run'}: {seconds:.0f} s")
    assert (status, complaints(result)) == (0, []), said
    pairs = {(a, b) for a, ways in result["pairs"].items() for b in ways}
    assert pairs == {(a, b) for a in HOSTS for b in HOSTS if a != b}
    return seconds, result


def test_before_a_run_it_takes_less_than_a_minute(plays, tmp_path):
    seconds, _ = timed(plays, tmp_path)
    assert seconds < patience()


def test_the_full_one_takes_minutes(plays, tmp_path):
    seconds, _ = timed(plays, tmp_path, depth="full")
    assert seconds < 5 * patience()


def test_a_burn_takes_as_long_as_it_was_asked_to(plays, tmp_path):
    timed(plays, tmp_path)  # which says how long a step takes
    seconds, _ = timed(plays, tmp_path, depth="burn", preflight_burn_minutes=2)
    assert 100 < seconds < 120 + 2 * patience()


def test_of_more_than_four_hosts_each_measures_its_next(make_lab, tmp_path):
    """Bare ones, which the network is measured of, too: a ring before a run, every pair in full."""
    plays = Plays(make_lab("six", hosts=6), tmp_path)
    names = [f"node{number}" for number in range(1, 7)]
    try:
        for extra, peers in (({}, 1), ({"depth": "full"}, 5)):
            begin = time.monotonic()
            _, said, result = preflight(plays, tmp_path, **extra)
            print(f"preflight of six {extra or 'before a run'}: {time.monotonic() - begin:.0f} s")
            places = {
                name: [names[(at + n) % 6] for n in range(1, peers + 1)] for at, name in enumerate(names)
            }
            assert {a: sorted(ways) for a, ways in result["pairs"].items()} == {
                a: sorted(found) for a, found in places.items()
            }, said
            assert all(
                "mbit" in way and "offset" in way
                for ways in result["pairs"].values()
                for way in ways.values()
            )
            found = {one["check"]: one["result"] for one in result["checks"]}
            network = ("address", "clock", "mtu", "ways", "loss", "latency", "bandwidth")
            assert {found[check] for check in network} == {"pass"}, said
    finally:
        plays.lab.down()
