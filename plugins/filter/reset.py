"""What reset.yml says before it removes anything, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence


def reset_needs(hosts: list[str], server: str, members: list[str]) -> list[str]:
    """What runs on other hosts live by that these have: the shared directory; etcd's memory, where too few are left.

    server: the host whose directory all share, or ""; members: those of etcd.
    """
    lost = [host for host in members if host in hosts]
    few = lost and 2 * len(lost) >= len(members)
    shared = [f"the directory that {server} shares"] if server in hosts else []
    return [*shared, *([f"the memory of runs, which {', '.join(lost)} must not lose"] if few else [])]


def reset_fault(
    seen: dict[str, dict],
    made: dict[str, dict],
    stop: str,
    needs: Sequence[str] = (),
    elsewhere: Iterable[dict] = (),
) -> str:
    """Why the hosts cannot be reset now; "" where they can.

    seen: host_status of each host; made: host_made's answer of each. stop: the command that stops a run, but its name.
    needs: reset_needs'; elsewhere: host_status of the hosts that are left, each with its `item`.
    """
    runs: dict[str, list[str]] = {}
    for host, result in seen.items():
        for run in (result.get("host_status") or {}).get("active", []):
            runs.setdefault(run, []).append(host)
    problems = [
        f"run {run}: found it active on {', '.join(hosts)}; expected no run there. "
        f"Stop it first: {stop} -e run={shlex.quote(run)}"
        for run, hosts in runs.items()
    ]
    others: dict[str, list[str]] = {}
    for result in elsewhere if needs else ():
        for run in result.get("host_status", {}).get("active", []):
            others.setdefault(run, []).append(result["item"])
    problems += [
        f"run {run}: found it active on {', '.join(hosts)}, where it may need {' and '.join(needs)}; expected no run "
        f"that does. Stop it first: {stop} -e run={shlex.quote(run)}"
        for run, hosts in others.items()
        if run not in runs
    ]
    problems += [
        f"{host}: found mounted: {', '.join(result['mounts'])}; expected nothing there, since what is on it may be "
        "other hosts', too. Unmount it first."
        for host, result in made.items()
        if result.get("mounts")
    ]
    return "\n".join(problems)


def reset_text(made: dict[str, dict], needs: Sequence[str] = (), elsewhere: Iterable[dict] = ()) -> str:
    """What would go, host by host; hosts of which the same would go are told of once.

    needs, elsewhere: as above; who was asked there for its runs, and did not answer, is named.
    """
    told: dict[tuple, list[str]] = {}
    for host, result in made.items():
        rows = tuple((one["path"], one["bytes"], one["what"]) for one in result["found"])
        left = tuple(result["left"])
        told.setdefault((tuple((path, what) for path, _, what in rows), left), []).append(host)
    parts = []
    for (rows, left), hosts in told.items():
        if not rows:
            parts.append(f"{', '.join(hosts)}: nothing of Trainyard's is there.")
            continue
        # A directory that goes because nothing is left in it needs no line.
        rows = [row for row in rows if not any(other.startswith(f"{row[0]}/") for other, _ in rows)]
        sizes = {path: [_bytes_of(made[host], path) for host in hosts] for path, _ in rows}
        width = max(len(path) for path, _ in rows)
        span = max(len(_sizes(one)) for one in sizes.values())
        lines = [f"  {path:{width}}  {_sizes(sizes[path]):>{span}}  {what}".rstrip() for path, what in rows]
        stays = [f"  {path} stays: more is in it" for path in left]
        parts.append("\n".join([f"{', '.join(hosts)}:", *lines, *stays]))
    if needs and (silent := [one["item"] for one in elsewhere if "item" in one and "host_status" not in one]):
        parts.append(
            f"No answer: {', '.join(silent)}. A run that is active there may need {' and '.join(needs)}."
        )
    return "\n\n".join(parts)


def reset_stays(made: dict[str, dict], why: dict[str, str]) -> str:
    """The files of static addresses that stay, why, and how they go, a line each with its line break; "" if none.

    made: host_made's answer of each host, or that of a task that was skipped. why: what the role network said of it.
    """
    told: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for host, result in made.items():
        if paths := tuple(one["path"] for one in result.get("found", [])):
            told.setdefault((paths, why.get(host, "")), []).append(host)
    return "".join(
        f"\n{', '.join(hosts)}: {' and '.join(paths)} {'stays' if len(paths) == 1 else 'stay'}. {reason} At its "
        "console: remove that, put back what lies beside as *.before-trainyard, and run netplan apply."
        for (paths, reason), hosts in told.items()
    )


def _bytes_of(result: dict, path: str) -> int:
    return next(one["bytes"] for one in result["found"] if one["path"] == path)


def _sizes(sizes: list[int]) -> str:
    """A size, or the least and the most of several."""
    shown = list(dict.fromkeys([_size(min(sizes)), _size(max(sizes))]))
    return " to ".join(shown) if max(sizes) else ""


def _size(count: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"


class FilterModule:
    def filters(self):
        return {
            "reset_fault": reset_fault,
            "reset_needs": reset_needs,
            "reset_text": reset_text,
            "reset_stays": reset_stays,
        }
