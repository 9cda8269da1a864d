"""How a cluster and its runs are, in words: what playbooks/status.yml shows."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from host_runs import chosen_run
from telling import names, not_asked, silence, table, unasked

from trainer.metrics import step_seconds
from trainer.words import span

ENDED = ("finished", "stopped", "failed")
ENDED_RUNS = 5  # that are shown
SHOWN_SHARES = 16
SHOWN_RANKS = 8
BARS = "▁▂▃▄▅▆▇█"
SPAN = re.compile(r"(\d+)([smhd])")


def run_views(results: dict[str, dict]) -> dict[str, dict]:
    """Every run of the cluster, the newest first: {run: {state, active, hosts, …}} with its newest status.json's keys.

    Newest is a word from where the run is alive, then one of the latest start: a host that comes back may have learned
    just now how an earlier one ended. `results`: what the task host_status registered on each host; it has no
    `host_status` where there was no answer.
    active, hosts: names of hosts, where it is alive and where it is known. state: the status's, `interrupted` if that
    was cut short and it is alive nowhere. age: seconds since the status was written, by the clock of its host.
    """
    views: dict[str, dict] = {}
    for host, result in results.items():
        answer = result.get("host_status") or {"runs": {}, "active": []}
        for run in dict.fromkeys([*answer["runs"], *answer["active"]]):
            status = answer["runs"].get(run, {"state": "starting"})
            age = answer["time"] - (status.get("updated") or 0)
            view = views.setdefault(run, {"active": [], "hosts": [], "age": float("inf")})
            view["hosts"].append(host)
            if run in answer["active"]:
                view["active"].append(host)
            one = {
                **status,
                "active": view["active"],
                "hosts": view["hosts"],
                "age": age,
                "here": run in answer["active"],
            }
            if "state" not in view or _is_newer(one, view):
                views[run] = one
    for view in views.values():
        view.pop("here")
        if not view["active"] and view["state"] not in ENDED:
            view["state"] = "interrupted" if view["state"] != "unknown" else "unknown"
    return dict(sorted(views.items(), key=lambda item: (not item[1]["active"], item[1]["age"])))


def _is_newer(one: dict, other: dict) -> bool:
    """Whether a host's word on a run is to be believed before another's."""
    if one["here"] != other["here"]:
        return one["here"]
    launches = one.get("launch"), other.get("launch")  # which an ended one has
    return (
        launches[0] > launches[1] if all(launches) and len(set(launches)) > 1 else one["age"] < other["age"]
    )


def run_chosen(results: dict[str, dict], asked: str) -> str:
    """The run that is meant, as host_runs.chosen_run has it, of the whole cluster's. `results`: as above."""
    views = run_views(results)
    return chosen_run(asked, [run for run, view in views.items() if view["active"]], list(views))


def run_choice_fault(results: dict[str, dict], asked: str, cluster: Iterable[str] = ()) -> str:
    """Why `run_chosen` chooses none; "" where it does. cluster: all its hosts, of which -l may leave some out."""
    if run_chosen(results, asked):
        return ""
    views = run_views(results)
    if not asked and views:
        active = ", ".join(run for run, view in views.items() if view["active"])
        return f"run: several are active; expected the name of one of {active}. Name it: -e run=NAME"
    answered, mute, left_out = _answered(results), _mute(results), not_asked(cluster, results)
    if not answered:
        text = "No host has answered, so that nothing is known of their runs."
    elif not views:
        text = f"None of {names(answered)} knows a run{f' {asked}' if asked else ''}"
        # One that a silent host has may be under way there.
        more = "; train.yml starts one." if not left_out else ", and not every host was asked."
        text += ", and not every host has answered." if mute else more
    else:
        text = (
            f"run: found {asked}, which none of {names(answered)} knows; "
            f"expected one of {', '.join(list(views)[:10])}. "
            f"Correct the name after -e run={', or see to the hosts that are silent.' if mute else ''}"
        )
    return "\n".join([text, *mute, *([unasked(left_out)] if left_out else [])])


def _answered(results: dict[str, dict]) -> list[str]:
    return [host for host, result in results.items() if "host_status" in result]


def _mute(results: dict[str, dict]) -> list[str]:
    """Why the others have not answered, a line each."""
    return [silence(host, result) for host, result in results.items() if "host_status" not in result]


def runs_to_retire(
    results: dict[str, dict],
    kept: int | str,
    days: int | str,
    pinned: list[str],
    run: str,
    cluster: Iterable[str] = (),
    used: Iterable[str] = (),
) -> list[str]:
    """The ended runs that need not be kept: those beyond the newest `kept`, and those older than `days`; 0 is no limit.

    None that is alive anywhere, pinned, `run` itself, or the newest that a checkpoint goes on with; nor a directory
    that says nothing of itself. `results`: as above. `cluster`: all of its hosts: where one has not told (-l), a run
    that has not finished may be alive there. `used`: paths of what `run` reads, which may be of an earlier one.
    """
    kept, days, answered = int(kept), int(days), _answered(results)
    all_told = all(host in answered for host in cluster)
    ended = {
        name: view
        for name, view in run_views(results).items()
        if not view["active"] and view["state"] != "unknown" and name != run
    }
    unfinished = [name for name, view in ended.items() if view["state"] != "finished"]
    # One that failed before its first checkpoint could but begin anew.
    saved = [name for name in unfinished if ended[name].get("last_checkpoint")]
    resumable = next(iter(saved or unfinished), None)
    return [
        name
        for place, (name, view) in enumerate(ended.items())
        if name not in (*pinned, resumable)
        and not any(f"/runs/{name}/" in f"{path}/" for path in used)
        and (all_told or view["state"] == "finished")
        and ((kept and place >= kept) or (days and view["age"] > days * 86400))
    ]


def retired_text(results: dict[str, dict], run: str, check: bool = False) -> str:
    """What was removed for run `run`; check: would be. `results`: what the task run_retire registered on each host."""
    gone: dict[str, list[str]] = {}
    freed = 0
    for host, result in results.items():
        for name, count in (result.get("removed") or {}).items():
            gone.setdefault(name, []).append(host)
            freed += count
    were = "would be" if check else "were"
    told = "; ".join(f"{name} from {names(hosts)}" for name, hosts in gone.items())
    return (
        f"Before {run}, old runs {were} removed, as trainer_runs_kept and trainer_runs_kept_days ask: {told} "
        f"({freed / 1e9:.1f} GB). Results that were brought to this controller stay."
        if gone
        else "No run was removed."
    )


def _memory(members: list[str], silent: list[str]) -> str:
    """What it means for runs that some of etcd's members are silent; "" where none is, or there are not several."""
    lost = [host for host in members if host in silent]
    if len(members) < 3 or not lost:
        return ""
    spare = (len(members) - 1) // 2 - len(lost)
    gone = f"{names(lost)} {'is' if len(lost) == 1 else 'are'} silent"
    told = f"Of the hosts that remember who takes part in runs ({names(members)}) {gone}: "
    if spare < 0:
        return told + "too few are left, and every run pauses until one of them is back."
    return told + (
        f"runs outlive the loss of {spare} more of them."
        if spare
        else "if one more of them goes, every run pauses."
    )


def cluster_status(
    results: dict[str, dict], run: str = "", cluster: Iterable[str] = (), members: Iterable[str] = ()
) -> str:
    """The text: a table of runs (of `run` alone if it is given), what they say of themselves, a table of hosts.

    `results`, cluster: as above. members: of etcd.
    """
    views = run_views(results)
    older = [name for name, view in views.items() if not view["active"]][ENDED_RUNS:]
    shown = {name: view for name, view in views.items() if (name == run if run else name not in older)}
    answered, mute, left_out = _answered(results), _mute(results), not_asked(cluster, results)
    where = names(answered) if mute or left_out else "these hosts; train.yml starts one"
    none = f"No run is known on {where}."
    parts = [_run_table(shown) if shown else none if answered else "No host has answered."]
    if not run and older:
        parts[0] += f"\n… and {len(older)} older ones"
    elsewhere = "is silent" if mute else "was not asked" if left_out else ""
    if notes := [line for name, view in shown.items() for line in _notes(name, view, elsewhere)]:
        parts.append("\n".join(notes))
    parts.append(_host_table(results))
    if mute:
        memory = _memory(list(members), [host for host in results if host not in answered])
        parts.append("\n".join(filter(None, [*mute, memory])))
    if left_out:
        parts.append(unasked(left_out))
    releases: dict[str, list[str]] = {}
    for host in answered:
        releases.setdefault(results[host]["host_status"]["release"] or "none", []).append(host)
    if len(releases) > 1:
        there = "; ".join(f"{release} on {names(hosts)}" for release, hosts in releases.items())
        parts.append(
            f"The hosts have different releases of the trainer ({there}): run site.yml on all of them."
        )
    return "\n\n".join(parts)


def _run_table(views: dict[str, dict]) -> str:
    rows = [("RUN", "STATE", "STEP", "LOSS", "TOKENS/S", "LEFT", "ATTEMPT", "SAVED", "SEEN", "HOSTS")]
    for run, view in views.items():
        step, steps = view.get("step"), view.get("steps")
        alive = bool(view["active"])
        rows.append(
            (
                run,
                view["state"],
                f"{step}/{steps} ({100 * step // steps} %)" if step and steps else "-",
                _number(view.get("loss"), ".4f"),
                _number(view.get("tokens_per_second"), ",.0f") if alive else "-",
                span(view["eta_seconds"]) if alive and view.get("eta_seconds") is not None else "-",
                str(view.get("attempt") or "-"),
                f"step {view['last_checkpoint']}" if view.get("last_checkpoint") else "-",
                f"{span(view['age'])} ago" if view["age"] < time.time() / 2 else "-",
                names(view["active"] or view["hosts"]),
            )
        )
    return table(rows)


def _notes(run: str, view: dict, elsewhere: str) -> list[str]:
    """What a run says of itself, and what to do about it. elsewhere: why what other hosts have is unknown, or ""."""
    if view["state"] == "interrupted" and elsewhere:
        return [f"{run} was cut short on {names(view['hosts'])}; it may go on on a host that {elsewhere}"]
    if view["state"] == "interrupted":
        return [f"{run} was cut short and runs nowhere; go on with it: train.yml -e run={run} -e resume=true"]
    warning = view.get("warning") and f"warning: {view['warning']}"
    said = [view.get("reason")]
    if view["active"]:
        of_steps = [_trend(view), _times(view), _shares(view), view.get("advice")]
        said = [view.get("job"), view.get("note"), warning, *of_steps, *said]
    return [f"{run}: {str(text).splitlines()[0]}" for text in dict.fromkeys(said) if text]


def _trend(view: dict) -> str:
    """The losses so far as a line of bars."""
    losses = [one for one in view.get("losses") or [] if one is not None and math.isfinite(one)]
    if len(losses) < 2:
        return ""
    low, high = min(losses), max(losses)
    bars = "".join(BARS[round((one - low) / ((high - low) or 1) * (len(BARS) - 1))] for one in losses)
    return f"loss {losses[0]:.4g} {bars} {losses[-1]:.4g}"


def _times(view: dict) -> str:
    """Where the time of the last steps went, by rank, where there are several."""
    went = view.get("parts") or {}
    compute, waiting, hosts = went.get("compute") or [], went.get("waiting") or [], went.get("ranks") or []
    if len(compute) < 2 or not len(compute) == len(waiting) == len(hosts):
        return ""
    others = {name: went.get(name) or [0.0] for name in ("compression", "optimizer")}
    step = step_seconds(went)
    order = sorted(range(len(compute)), key=lambda rank: -compute[rank])
    shown = order if len(order) <= SHOWN_RANKS else [*order[: SHOWN_RANKS // 2], *order[-SHOWN_RANKS // 2 :]]
    ranks = [
        f"{hosts[rank]}{f' (rank {rank})' if hosts.count(hosts[rank]) > 1 else ''} {compute[rank] / step:.0%}"
        + (f" and waits {waiting[rank] / step:.0%}" if waiting[rank] / step >= 0.05 else "")
        for rank in shown
    ]
    left = f" ({len(order) - len(shown)} between them)" if len(shown) < len(order) else ""
    # A sharded strategy's ranks on GPUs wait within what counts as computing.
    what, least = ("computing", "") if went.get("watched", True) else ("computing or waiting", "at least ")
    more = "".join(
        f"; {name}: up to {max(own) / step:.0%}" for name, own in others.items() if max(own) / step >= 0.05
    )
    return (
        f"of a step's {step:.2g} s, {what}: {', '.join(ranks)}{left}{more}; the network: "
        f"{least}{went['wire'] / step:.0%}"
    )


def _shares(view: dict) -> str:
    """The ranks' shares of a step where they are not alike, and what that is good for; "" where they are."""
    shares = view.get("shares") or []
    gain = view.get("speed_up") or {}
    if not shares or (max(shares) - min(shares) <= 1 and not gain):
        return ""
    shown = ":".join(map(str, shares[:SHOWN_SHARES])) + (":…" if len(shares) > SHOWN_SHARES else "")
    speeds = gain.get("speeds") or []
    told = f" by speeds {':'.join(f'{one:.2f}' for one in speeds[:SHOWN_SHARES])}" if speeds else ""
    if len(speeds) > SHOWN_SHARES:
        told += ":…"
    if gain.get("got"):
        told += f"; {gain['got']:.2f} times as fast as with even ones ({gain['expected']:.2f} of computing expected)"
    elif gain:
        told += f"; they compute {gain['expected']:.2f} times as fast as even ones, as expected by these"
    return f"shares of a step {shown}{told}"


def _host_table(results: dict[str, dict]) -> str:
    rows = [("HOST", "STATE", "RUNS", "LOAD", "MEMORY FREE", "DISK FREE", "GPUS")]
    for host, result in results.items():
        if "host_status" not in result:
            rows.append((host, "no answer", "-", "-", "-", "-", "-"))
            continue
        answer = result["host_status"]
        gpus = answer["gpus"]
        rows.append(
            (
                host,
                "ready" if answer["release"] else "no trainer: run site.yml",
                ", ".join(answer["active"]) or "-",
                f"{answer['load']:.1f} of {answer['cpus']}",
                f"{answer['memory_free_bytes'] / 1e9:.1f} of {answer['memory_bytes'] / 1e9:.1f} GB",
                f"{answer['free_bytes'] / 1e9:.1f} GB",
                "no answer: nvidia-smi" if gpus is None else "; ".join(_gpu(*row) for row in gpus) or "none",
            )
        )
    return table(rows)


def _gpu(name: str, busy: str, used: str, total: str, celsius: str) -> str:
    held = (
        f"{float(used) / 1024:.0f} of {float(total) / 1024:.0f} GiB"
        if _is_number(used, total)
        else f"{used} MiB"
    )
    return f"{name.removeprefix('NVIDIA ')} {busy} %, {held}, {celsius} °C"


def _is_number(*texts: str) -> bool:
    return all(text.replace(".", "", 1).isdigit() for text in texts)


def _number(value, form: str) -> str:
    return "-" if value is None else format(value, form)


def rank_fault(logs: dict[str, dict], seen: dict[str, dict], run: str, rank: str | int) -> str:
    """That run `run` has no rank `rank`; "" where it has, and where that is not known: a silent host may have its log.

    logs: what the task run_logs registered on each host; seen: as above. An earlier attempt may have had more ranks.
    """
    if (
        rank == ""
        or _mute(seen)
        or any(result.get("lines") or result.get("unreachable") for result in logs.values())
    ):
        return ""
    statuses = [result["host_status"]["runs"].get(run, {}) for result in seen.values()]
    world = max((status.get("world_size") or 0 for status in statuses), default=0)
    if not world or int(rank) < world:
        return ""
    ranks = ", ".join(map(str, range(world))) if world <= SHOWN_RANKS else f"0 to {world - 1}"
    return f"rank: found {rank}; expected one of run {run}'s ranks: {ranks}. Correct it."


def merged_logs(
    results: dict[str, dict], lines: str | int, since: str, seen: dict[str, dict] | None = None
) -> str:
    """The last `lines` lines of all hosts in the order of their times, or all ("") of them; and since a while ago.

    since: the while, such as 90s, 10m, 2h, 1d, or "". `results`: what the task run_logs registered on each host. seen:
    as above; who was silent then has not been asked for lines.
    """
    found = sorted(
        (line for result in results.values() for line in result.get("lines", [])), key=lambda line: line[0]
    )
    if since:
        count, unit = SPAN.fullmatch(since).groups()
        begin = time.time() - int(count) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
        found = [line for line in found if line[0] >= begin]
    else:
        begin = 0
    if lines != "":
        count = int(lines)
        if count <= len(found):
            begin = found[-count][0] if count else float("inf")
        found = found[max(0, len(found) - count) :]
    # What was too much to be read is told where it would have been among what is shown.
    left_out = [
        words for result in results.values() for at, words in result.get("left_out", []) if at > begin
    ]
    silent = _mute(seen or {})
    silent += [silence(host, result) for host, result in results.items() if result.get("unreachable")]
    return "\n".join([*left_out, *(text for _, text in found), *silent]) or "There is no line yet."


class FilterModule:
    def filters(self):
        return {
            "cluster_status": cluster_status,
            "merged_logs": merged_logs,
            "rank_fault": rank_fault,
            "retired_text": retired_text,
            "run_choice_fault": run_choice_fault,
            "run_chosen": run_chosen,
            "runs_to_retire": runs_to_retire,
        }
