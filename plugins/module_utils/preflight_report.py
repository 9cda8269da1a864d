"""What preflight found, as text, as JSON, and against the best of earlier good results (the baseline)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict

# The checks stand in the order of these three.
# isort: off
import preflight_hosts  # noqa: F401
import preflight_gpus  # noqa: F401
import preflight_network  # noqa: F401

# isort: on
import telling
from preflight_base import CHECKS, FAIL, PASS, SKIP, WARN, Cluster, Finding, Limits, findings, named
from preflight_network import SLOWEST_FULL_TCP

EXIT = {PASS: 0, SKIP: 0, WARN: 1, FAIL: 2}
KEPT_SHARE = 0.9  # of the best figure so far, for one that is not worse
# Of a link without a speed of its own (a virtual machine's, a wireless one): what others do changes it more than that.
KEPT_SHARE_VIRTUAL = 0.25
KEPT_LATENCY = (2.0, 1.0)  # times the best one, and ms on top: short times are mostly chance
LESS_IS_BETTER = ("rtt_ms", "loaded_ms")
MATRIX_HOSTS = 8  # that a table of pairs is shown for
UNITS = {
    "mbit": "Mbit/s",
    "bus": "Mbit/s",
    "gbit": "Gbit/s by RDMA",
    "speed": "Mbit/s of the link",
    "gpus": "GPUs",
    "rtt_ms": "ms",
    "loaded_ms": "ms under load",
}
MARKS = {FAIL: "FAIL", WARN: "WARN", PASS: "pass", SKIP: "skip"}
BASELINE = (
    "Nothing is worse than the best of earlier good results",
    "bandwidth (of TCP up to 10 Gbit/s) and link speed 90 % (bandwidth of a virtual or wireless link 25 %), latency "
    "twice and 1 ms, as many GPUs",
    "baseline-….json beside last.json, which each result renews that has no failure and got no worse",
)


def report(cluster: Cluster, before: dict | None, seconds: float, baseline_path: str = "") -> dict:
    """The whole result. `before`: the baseline; `seconds`: since the playbook began."""
    found = findings(cluster)
    figures = figures_of(cluster)
    found += against(figures, before, cluster, baseline_path)
    result = max((one.result for one in found), key=lambda name: (EXIT[name], name == PASS), default=PASS)
    return {
        "result": result,
        "exit_status": EXIT[result],
        "depth": cluster.limits.depth,
        "time": time.time(),
        "seconds": round(seconds, 1),
        "hosts": list(cluster.facts),
        "counts": {name: sum(one.result == name for one in found) for name in (PASS, WARN, FAIL, SKIP)},
        "checks": [asdict(one) for one in found],
        "figures": figures,
        "pairs": {host: fact["pairs"] for host, fact in cluster.facts.items() if fact["pairs"]},
    }


# ---- the baseline ----


def figures_of(cluster: Cluster) -> dict[str, dict]:
    """What a later result is compared by: {figure: {host, or FROM>TO: value}}."""
    pairs, surveys = cluster.pairs(), cluster.survey()
    return {
        "mbit": {f"{a}>{b}": found["mbit"] for (a, b), found in pairs.items() if "mbit" in found},
        "rtt_ms": {f"{a}>{b}": f["rtt_ms"] for (a, b), f in pairs.items() if f.get("rtt_ms") is not None},
        "gbit": {f"{a}>{b}": f["rdma_gbit"] for (a, b), f in pairs.items() if f.get("rdma_gbit") is not None},
        "speed": {h: s["link"]["speed"] for h, s in surveys.items() if s["link"] and s["link"]["speed"]},
        "gpus": {host: len(survey["gpu"]["gpus"]) for host, survey in surveys.items()},
    }


def against(figures: dict, before: dict | None, cluster: Cluster, path: str) -> list[Finding]:
    """What is worse than in `before`, a baseline, one finding a host or pair."""
    _, limit, source = BASELINE
    if not before:
        return [
            Finding("baseline", SKIP, cluster.alive, "there is no result to compare with yet", limit, source)
        ]
    links = {host: survey["link"] or {} for host, survey in cluster.survey().items()}
    worse = worse_than(figures, before, steady_hosts(links), SLOWEST_FULL_TCP)
    if not worse:
        return [Finding("baseline", PASS, cluster.alive, f"as on {day(before)}", limit, source)]
    hosts = list(dict.fromkeys(host for key, _ in worse for host in key.split(">")))
    told = "; ".join(text for _, text in worse[:4]) + (
        f"; and {len(worse) - 4} more" if len(worse) > 4 else ""
    )
    return [
        Finding("baseline", WARN, hosts, told, limit, source, f"rm {path}   if it shall be so from now on")
    ]


def day(result: dict) -> str:
    return _day(result["time"])


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))


def best_of(before: dict | None) -> dict[str, dict[str, tuple[float, float]]]:
    """The best that a baseline knows: {figure: {key: (value, when it was measured)}}."""
    if not before:
        return {}
    last = {
        name: {key: (value, before["time"]) for key, value in found.items()}
        for name, found in before["figures"].items()
    }
    best = before.get("best", {})
    return {name: {**last.get(name, {}), **best.get(name, {})} for name in {**last, **best}}


def steady_hosts(links: dict[str, dict]) -> set[str]:
    """The hosts whose link is neither a virtual nor a wireless one: it carries today what it carried yesterday."""
    return {host for host, link in links.items() if link.get("physical") and not link.get("wireless")}


def worse_than(
    figures: dict, before: dict, steady: Collection[str], full_mbit: float = float("inf")
) -> list[tuple[str, str]]:
    """(figure's key, in words) of each that is worse than the best of `before`, a baseline.

    steady: as `steady_hosts` has it. full_mbit: Mbit/s of TCP beyond which more says nothing of the wire.
    """
    worse, known_best = [], best_of(before)
    for figure, unit in UNITS.items():
        for key, value in figures.get(figure, {}).items():
            if key not in known_best.get(figure, {}):
                continue
            best, when = known_best[figure][key]
            if figure in ("mbit", "bus", "gbit"):
                known = set(before["hosts"] if figure == "bus" else key.split(">"))
                share = KEPT_SHARE if known <= set(steady) else KEPT_SHARE_VIRTUAL
                bad = value < share * (min(best, full_mbit) if figure == "mbit" else best)
            elif figure == "speed":
                bad = value < best * KEPT_SHARE
            elif figure == "gpus":
                bad = value < best
            else:
                bad = value > best * KEPT_LATENCY[0] + KEPT_LATENCY[1]
            if bad:
                worse.append((key, f"{key.replace('>', ' to ')}: {value} {unit}, {best} on {_day(when)}"))
    return worse


def is_good(result: dict) -> bool:
    """Whether later results are to be compared with this one."""
    worse = any(one["check"] == "baseline" and one["result"] == WARN for one in result["checks"])
    return result["result"] != FAIL and not worse


def renewed(result: dict, before: dict | None) -> dict:
    """The new baseline: `result`, and the figures of `before` for what was not measured now (a ring of pairs).

    best: of each figure the best so far. Held against the last one alone, what gets worse little by little would
    never be told.
    """
    old, best = (before or {}).get("figures", {}), best_of(before)
    for name, figures in result["figures"].items():
        known = best.setdefault(name, {})
        for key, value in figures.items():
            sign = -1 if name in LESS_IS_BETTER else 1
            if key not in known or sign * value > sign * known[key][0]:
                known[key] = (value, result["time"])
    return {
        **result,
        "figures": {name: {**old.get(name, {}), **new} for name, new in result["figures"].items()},
        "best": best,
    }


def baseline_name(hosts: Iterable[str]) -> str:
    """The file of the baseline of just these hosts."""
    return f"baseline-{hashlib.sha256(' '.join(sorted(hosts)).encode()).hexdigest()[:8]}.json"


def last_json(text: str, begins: str):
    """What the last line that begins so says, as JSON; None without one. Libraries print to a program's output, too."""
    lines = [line for line in text.splitlines() if line.startswith(begins)]
    return json.loads(lines[-1]) if lines else None


def read_result(path: str) -> dict | None:
    """A result as it was written; None without one, or where it is no more to be read."""
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        return result if isinstance(result["figures"], dict) and isinstance(result["time"], float) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_result(path: str, result: dict) -> None:
    """Whole or not at all. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.new", path)


# ---- in words ----


def text(result: dict) -> str:
    """The report: what is wrong with its cure, what was passed over, what is well, and the pairs as a table."""
    counts, hosts = result["counts"], result["hosts"]
    seconds = f", {result['seconds']:.0f} s" if result["seconds"] else ""
    parts = [
        f"Preflight ({result['depth']}) of {len(hosts)} hosts{seconds}: {counts[PASS]} passed, "
        f"{counts[WARN]} warned, {counts[FAIL]} failed, {counts[SKIP]} skipped"
    ]
    rows = {name: [one for one in result["checks"] if one["result"] == name] for name in MARKS}
    if rows[PASS]:
        parts.append("\n".join(_line(one, hosts) for one in rows[PASS]))
    if rows[SKIP]:
        parts.append("\n".join(_line(one, hosts) for one in rows[SKIP]))
    if table := _matrix(result["pairs"], hosts):
        parts.append(table)
    for one in rows[WARN] + rows[FAIL]:  # the worst stands last, where the eye is
        parts.append(
            f"{MARKS[one['result']]}  {one['check']}: {named(one['hosts'])}: {one['found']}\n"
            f"      limit: {one['limit']} ({one['source']})\n"
            f"      cure:  {one['cure']}"
        )
    return "\n\n".join(parts)


def _line(one: dict, hosts: list[str]) -> str:
    where = "" if one["hosts"] in (hosts, []) else f" on {named(one['hosts'])}"
    limit = f"  (limit: {one['limit']}; {one['source']})" if one["result"] == PASS else ""
    return f"{MARKS[one['result']]}  {one['check']:<14} {one['found']}{where}{limit}"


def _matrix(pairs: dict[str, dict], hosts: list[str]) -> str:
    """Mbit/s and ms of each way; of the slowest ways alone where the hosts are many."""
    cells = {
        (a, b): (found.get("mbit"), found.get("rtt_ms"), _percent(found))
        for a, ways in pairs.items()
        for b, found in ways.items()
    }
    if not cells:
        return ""
    if len(hosts) > MATRIX_HOSTS:
        slow = sorted(cells, key=lambda pair: cells[pair][0] or 0)[:MATRIX_HOSTS]
        return "The slowest ways: " + "; ".join(f"{a} to {b}: {_cell(cells[a, b])}" for a, b in slow)
    rows = [("from \\ to", *hosts)]
    rows += [(a, *("-" if a == b else _cell(cells.get((a, b))) for b in hosts)) for a in hosts]
    return telling.table(rows)


def _percent(found: dict) -> float | None:
    return 100 * found["lost"] / found["sent"] if found.get("sent") else None


def _cell(values: tuple | None) -> str:
    if values is None:
        return "not measured"
    mbit, rtt, lost = values
    told = [
        f"{mbit:.0f} Mbit/s" if mbit is not None else "no stream",
        f"{rtt:.2f} ms" if rtt is not None else "no echo",
    ]
    return ", ".join([*told, *([f"{lost:.1f} % lost"] if lost else [])])


def table() -> str:
    """The checks as docs/preflight.md shows them."""
    limits = vars(Limits())
    rows = [(name, one.what, one.limit.format(**limits), one.source) for name, one in CHECKS.items()]
    rows.append(("baseline", *BASELINE))
    lines = ["| Check | What is right | Limit | Where that comes from |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {what} | {limit} | {source} |" for name, what, limit, source in rows)]
    )
