"""What bench.yml measured: as text, as a picture, and as figures that a later result is held against."""

from __future__ import annotations

import math
from html import escape

from preflight_report import day
from telling import table

MIB = 1 << 20
SHOWN_HOSTS = 16  # for which whole tables are shown; of more the slowest ways
SLOWEST = 12
FLOODED = 10.0  # times as long under load, and so many ms more: small packets wait behind large ones
FLOODED_MS = 5.0
APART = 1.5  # times as long in the class that is loaded as outside of it: they do not wait in one queue
STRAY = 0.02  # of the bytes that left a host, by another interface than the cluster's
LAYER = 0.2  # part by which a layer's bytes may differ from those of the one above, by its headers


def figures_of(pairs: dict[str, dict], collectives: dict) -> dict[str, dict]:
    """What a later result is compared by: {figure: {FROM>TO, or a collective: value}}."""
    ways = {f"{a}>{b}": one for a, found in pairs.items() for b, one in found.items()}
    largest = {
        row["collective"]: row for row in collectives.get("rows", ())
    }  # the last of each is the largest
    return {
        "mbit": {key: one["mbit"] for key, one in ways.items() if "mbit" in one},
        "gbit": {key: one["rdma"]["gbit"] for key, one in ways.items() if one.get("rdma")},
        "rtt_ms": {key: one["idle"]["ms"] for key, one in ways.items() if (one.get("idle") or {}).get("ms")},
        "loaded_ms": {
            key: one["loaded"]["ms"] for key, one in ways.items() if (one.get("loaded") or {}).get("ms")
        },
        "bus": {
            f"{name} of {size(row['bytes'])}": round(row["bus"] * 8 / 1e6, 1) for name, row in largest.items()
        },
    }


def size(count: int) -> str:
    """Bytes as a person writes them, rounded: the last part of a buffer may lack some for equal parts."""
    for unit, one in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= one * 0.99:
            return f"{count / one:.0f} {unit}"
    return f"{count} B"


# ---- in words ----


def text(result: dict) -> str:
    """The report: the ways as tables, the collectives, what that means, and what got worse."""
    hosts, pairs = result["hosts"], result["pairs"]
    parts = [f"Bench of {len(hosts)} hosts, {result['seconds']:.0f} s"]
    if pairs:
        parts += _ways(pairs, hosts)
    if result["collectives"]:
        parts += _collectives(result["collectives"])
    parts += remarks(result)
    return "\n\n".join(parts)


def _ways(pairs: dict[str, dict], hosts: list[str]) -> list[str]:
    cells = {(a, b): one for a, found in pairs.items() for b, one in found.items()}
    tables = [
        ("Mbit/s by TCP (iperf3), each way while the other way is full, too", _mbit),
        ("Delay in ms, idle > under that load: half of the packets (99 %)", _delay),
        ("Jitter in ms, idle > under that load: by how much two packets in a row differ", _jitter),
    ]
    if any(one.get("rdma") for one in cells.values()):
        tables.append(
            ("RDMA (perftest): Gbit/s, and delay in us, idle > under load: typical (99 %) ± jitter", _rdma)
        )
    if len(hosts) > SHOWN_HOSTS:
        slow = sorted(cells, key=lambda way: cells[way].get("mbit", 0.0))[:SLOWEST]
        return [f"{title}, the slowest:\n" + "\n".join(f"{a} to {b}: {cell(cells[a, b])}" for a, b in slow)
                for title, cell in tables]  # fmt: skip
    return [f"{title}\n{_table(hosts, cells, cell)}" for title, cell in tables]


def _table(hosts: list[str], cells: dict, cell) -> str:
    rows = [("from \\ to", *hosts)]
    rows += [
        (a, *("-" if a == b else cell(cells[a, b]) if (a, b) in cells else "" for b in hosts)) for a in hosts
    ]
    return table(rows)


def _mbit(one: dict) -> str:
    if "mbit" not in one:
        return "failed"
    again = one.get("retransmits")
    return f"{one['mbit']:.0f}" + (f" ({again} sent again)" if again else "")


def _delay(one: dict) -> str:
    return " > ".join(_times(one.get(name) or {}) for name in ("idle", "loaded"))


def _times(one: dict) -> str:
    if one.get("ms") is None:
        return "no echo"
    return f"{one['ms']:.2f} ({one['ms_99']:.2f})" + (f", {one['lost']:.1f} % lost" if one["lost"] else "")


def _jitter(one: dict) -> str:
    found = [(one.get(name) or {}).get("jitter_ms") for name in ("idle", "loaded")]
    return " > ".join("no echo" if value is None else f"{value:.3f}" for value in found)


def _rdma(one: dict) -> str:
    found = one.get("rdma")
    if not found:
        return "none"
    return f"{found['gbit']:.1f}, " + " > ".join(
        f"{found[name]['us']:.1f} ({found[name]['us_99']:.1f}) ± {found[name]['us_jitter']:.2f}"
        for name in ("idle", "loaded")
    )


def _collectives(found: dict) -> list[str]:
    names = list(dict.fromkeys(row["collective"] for row in found["rows"]))
    cells = {(row["bytes"], row["collective"]): row for row in found["rows"]}
    rows = [("buffer", *names)]
    for count in sorted({row["bytes"] for row in found["rows"]}):
        there = [cells.get((count, name)) for name in names]
        rows.append(
            (
                size(count),
                *(f"{_seconds(row['seconds'])}, {row['bus'] * 8 / 1e6:.0f}" if row else "" for row in there),
            )
        )
    return [
        f"Collectives over {found['backend']}, {found['ranks']} ranks on {found['device']}: "
        f"time, bus bandwidth in Mbit/s\n{table(rows)}"
    ]


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.0f} us"


# ---- what it means ----


def remarks(result: dict) -> list[str]:
    """Sentences: by which way collectives went, whether small packets suffer, what failed, what got worse."""
    told = [*_went_by(result), *_suffers(result["pairs"]), *_rdma_suffers(result["pairs"])]
    for a, found in result["pairs"].items():
        told += [f"{a} to {b}: {one['note']}" for b, one in found.items() if one.get("note")]
    told += [f"{host}: {why}" for host, why in result.get("failed", {}).items()]
    if result["worse"]:
        told.append("Worse than the best so far: " + "; ".join(text for _, text in result["worse"]))
    return told


def _went_by(result: dict) -> list[str]:
    """Which interface carried the collectives' bytes; a warning where it was not the cluster's."""
    told, stray = {}, []
    for host, carried in result["collectives"].get("ways", {}).items():
        if host in result["layered"]:
            carried = _once(carried, result["interfaces"].get(host))
        total = sum(count for name, count in carried.items() if name != "lo") or 1
        shares = {
            name: count / total for name, count in carried.items() if count / total > STRAY and name != "lo"
        }
        told[host] = " and ".join(f"{name} ({share:.0%})" for name, share in sorted(shares.items())) or "lo"
        wanted = result["interfaces"].get(host)
        wrong = [name for name in shares if name != wanted and not name.endswith("(RDMA)")]
        if wanted and wrong:
            stray.append(
                f"{host}: {', '.join(wrong)} carried what belongs on {wanted}. Two networks that overlap, or a route: "
                "preflight.yml says which"
            )
    if not told:
        return []
    same = set(told.values())
    where = (
        f"on all hosts by {same.pop()}"
        if len(same) == 1
        else "; ".join(f"on {h} by {t}" for h, t in told.items())
    )
    return [f"They went {where}, as the interfaces' counters say.", *stray]


def _once(carried: dict[str, int], wanted: str | None) -> dict[str, int]:
    """`carried` without what is below the interface `wanted`, which goes over others.

    Each byte of a bond, a VLAN, a bridge or a tunnel is counted by what it goes over, too, in one layer or in two.
    """
    others = {name for name in carried if name not in (wanted, "lo") and not name.endswith("(RDMA)")}
    layers = sum(carried[name] for name in others) / (carried.get(wanted or "") or 1)
    if not any(abs(layers - depth) <= LAYER * depth for depth in (1, 2)):
        return carried
    return {name: count for name, count in carried.items() if name not in others}


def _suffers(pairs: dict[str, dict]) -> list[str]:
    """Whether a full link holds small packets up: what a QoS class would cure."""
    ways = [
        (a, b, one["idle"]["ms"], one["loaded"]["ms"])
        for a, found in pairs.items()
        for b, one in found.items()
        if (one.get("idle") or {}).get("ms") and (one.get("loaded") or {}).get("ms")
    ]
    if not ways:
        return []
    a, b, idle, loaded = max(ways, key=lambda way: way[3] / way[2])
    shaken = _shaken(pairs, "jitter_ms", "ms", lambda one: one)
    if loaded <= idle:
        return ["The delay of small packets does not grow under load: QoS would change nothing.", *shaken]
    grown = f"Under load the delay grows at most {loaded / idle:.1f} times ({a} to {b}: {idle:.2f} to {loaded:.2f} ms)"
    if loaded / idle > FLOODED and loaded - idle > FLOODED_MS:
        return [
            f"{grown}: whatever else crosses these links waits behind a run's gradients. A class of its own for it "
            "(QoS), or a shorter queue (fq_codel on the interface), would help; it is no matter for the run itself.",
            *shaken,
        ]
    return [f"{grown}: QoS would change little.", *shaken]


def _rdma_suffers(pairs: dict[str, dict]) -> list[str]:
    """Whether RDMA's small messages wait behind a run's stream, and what the class of roce_qos is worth to them."""
    ways = [(a, b, one["rdma"]) for a, found in pairs.items() for b, one in found.items() if one.get("rdma")]
    if not ways:
        return []
    shaken = _shaken(pairs, "us_jitter", "us", lambda one: one.get("rdma") or {})
    a, b, way = max(ways, key=lambda one: one[2]["loaded"]["us"] / one[2]["idle"]["us"])
    idle, loaded, marked = way["idle"]["us"], way["loaded"]["us"], (way.get("marked") or {}).get("us")
    grown = (
        f"Under RDMA's load the delay of its small messages grows at most {loaded / idle:.1f} times ({a} to {b}: "
        f"{idle:.1f} to {loaded:.1f} us"
    )
    if marked is not None:
        worth = (
            "keeps the others apart from it"
            if marked > APART * loaded
            else "makes no difference to the others"
        )
        return [
            f"{grown}, {marked:.1f} us in the class of roce_qos, as the load): that class {worth}.",
            *shaken,
        ]
    if loaded / idle > FLOODED:
        return [f"{grown}): a class of its own for it (roce_qos_mode) may help what else uses RDMA.", *shaken]
    return [f"{grown}): QoS would change little.", *shaken]


def _shaken(pairs: dict[str, dict], name: str, unit: str, part) -> list[str]:
    """The way whose jitter grows most under load. part: where a way's idle and loaded stand."""
    ways = [
        (a, b, *(((part(one).get(when) or {}).get(name)) for when in ("idle", "loaded")))
        for a, found in pairs.items()
        for b, one in found.items()
    ]
    ways = [way for way in ways if None not in way]
    if not ways:
        return []
    a, b, idle, loaded = max(ways, key=lambda way: way[3] - way[2])
    what = "Jitter" if unit == "ms" else "RDMA's jitter"
    return [f"{what} at most: {idle:.3g} {unit} idle, {loaded:.3g} {unit} under load ({a} to {b})."]


# ---- as a picture ----

STYLE = """
 .page{fill:#fff} text{font:13px system-ui,sans-serif;fill:#1b1f24} .dim{fill:#57606a} .title{font-weight:600}
 .axis{stroke:#8c959f;fill:none} .line{fill:none;stroke-width:2}
 @media (prefers-color-scheme:dark){.page{fill:#0d1117} text{fill:#e6edf3} .dim{fill:#9aa4ae}}
"""
# Told apart by people who see colours otherwise, too: Okabe and Ito's, without yellow and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
CELL, LABEL, TOP = 76, 110, 70


def picture(result: dict) -> str:
    """An SVG: the ways as a matrix of Mbit/s, darker where less comes through, and bus bandwidth by size."""
    hosts = result["hosts"]
    matrix = CELL * len(hosts)
    width, height = max(720, LABEL + matrix + 40), TOP + matrix + 420
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="20" y="28">Mbit/s by TCP, {escape(day(result))}</text>',
        *_heat(result["pairs"], hosts),
    ]
    if result["collectives"]:
        parts += _curves(result["collectives"], TOP + matrix + 50, width)
    return "\n".join([*parts, "</svg>\n"])


def _heat(pairs: dict[str, dict], hosts: list[str]) -> list[str]:
    most = max((one.get("mbit", 0) for found in pairs.values() for one in found.values()), default=0) or 1
    parts = []
    for row, a in enumerate(hosts):
        y = TOP + row * CELL
        parts.append(f'<text x="20" y="{y + CELL / 2 + 5}">{escape(a)}</text>')
        parts.append(f'<text x="{LABEL + row * CELL + 8}" y="{TOP - 12}">{escape(a)}</text>')
        for column, b in enumerate(hosts):
            one = pairs.get(a, {}).get(b)
            if one is None:
                continue
            share = one.get("mbit", 0) / most
            x = LABEL + column * CELL
            told = f"{one['mbit']:.0f}" if "mbit" in one else "failed"
            # Light where all is well; the number is dark on light and light on dark.
            shade = f"hsl(205 70% {25 + 60 * share:.0f}%)"
            ink = "#0d1117" if share > 0.5 else "#ffffff"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}" rx="4" fill="{shade}">'
                f"<title>{escape(a)} to {escape(b)}: {told} Mbit/s; delay {escape(_delay(one))} ms</title></rect>"
                f'<text x="{x + (CELL - 3) / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle" style="fill:{ink}">'
                f"{told}</text>"
            )
    return parts


def _curves(found: dict, top: float, width: float) -> list[str]:
    """Bus bandwidth over the buffer's size, both logarithmic."""
    rows = found["rows"]
    left, right, bottom = LABEL, width - 150, top + 290
    sizes = [math.log2(row["bytes"]) for row in rows]
    rates = [math.log10(max(row["bus"] * 8 / 1e6, 0.01)) for row in rows]
    low, high = math.floor(min(rates)), math.ceil(max(rates) + 1e-9)
    first, last = min(sizes), max(max(sizes), min(sizes) + 1)

    def place(count: float, rate: float) -> tuple[float, float]:
        across = (math.log2(count) - first) / (last - first)
        up = (math.log10(max(rate, 0.01)) - low) / max(high - low, 1)
        return left + across * (right - left), bottom - up * (bottom - top - 30)

    parts = [
        f'<text class="title" x="20" y="{top}">Bus bandwidth over {escape(found["backend"])}, Mbit/s</text>',
        f'<path class="axis" d="M{left} {top + 30}V{bottom}H{right}"/>',
    ]
    for power in range(low, high + 1):
        _, y = place(2**first, 10**power)
        parts.append(
            f'<text class="dim" x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for count in sorted({row["bytes"] for row in rows})[::2]:
        x, _ = place(count, 10**low)
        parts.append(
            f'<text class="dim" x="{x:.0f}" y="{bottom + 20}" text-anchor="middle">{size(count)}</text>'
        )
    labels: list[float] = []
    for number, name in enumerate(dict.fromkeys(row["collective"] for row in rows)):
        colour = COLOURS[number % len(COLOURS)]
        points = [place(row["bytes"], row["bus"] * 8 / 1e6) for row in rows if row["collective"] == name]
        parts.append(
            f'<polyline class="line" stroke="{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )
        y = points[-1][1] + 4
        while any(abs(y - other) < 16 for other in labels):  # names do not lie on each other
            y += 16
        labels.append(y)
        parts.append(
            f'<text x="{points[-1][0] + 8:.0f}" y="{y:.0f}" style="fill:{colour}">{escape(name)}</text>'
        )
    return parts
