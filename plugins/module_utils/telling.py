"""Words that several of the playbooks' texts share."""

from __future__ import annotations

SHOWN_HOSTS = 8


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they must be, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def silence(host: str, result: dict) -> str:
    """Why a host has nothing to show; `result`: what its task registered."""
    lines = str(result.get("msg") or "it was not asked").strip().splitlines()
    return f"{host}: no answer: {lines[-1][:200]}"


def names(hosts) -> str:
    """Hosts, not too many of them."""
    hosts = list(hosts)
    rest = len(hosts) - SHOWN_HOSTS
    return ", ".join(hosts[:SHOWN_HOSTS]) + (f" and {rest} more" if rest > 0 else "")
