"""Why a run does not go on, or goes slowly: what playbooks/diagnose.yml says, from what diagnose_host found."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))
sys.path.append(str(Path(__file__).parents[2]))

from rdma_ports import CABLE, SENT_AGAIN
from telling import names, not_asked, silence, table, timed_out, unasked

from trainer.metrics import step_seconds

HUNG_AFTER = 10.0  # seconds without a word at least, and
HUNG_STEPS = 5  # times a step, after which a run is not only slow
BUSY = 0.1  # of a host's cores, from which a program that takes them may slow down one whose cards compute
UNEVEN = 1.2  # times the fastest rank's own work of a step, from which the slowest is worth naming
MUCH = 1e5  # bytes a second that a host gets or sends, by which its connections are there
NETWORK = 0.4  # a share of a step that the network takes, from which a run is slow by it
SEE_STACK = "see its stack above"
LOOK_AGAIN = "look again, for its stack had no answer"
MOST_TOLD = 10  # lines of NCCL's
# Packets between two looks, and their part of all, up to which it says nothing that they were dropped.
MANY_DROPPED, PART_DROPPED = 20, 0.001
STATES = {"T": "stopped", "t": "traced", "D": "waiting for a disk", "Z": "dead", "X": "dead", "gone": "gone"}
# The innermost frame of a rank that waits for the others: in torch's collectives, or where the trainer waits for them.
COLLECTIVE = re.compile(
    r"\bdistributed_c10d\.py:|\bwait_tensor\b|\bfinish \(trainer/|\b(wait|exchange) \(trainer/sums"
)
# Over gloo each turn of an exchange counts for itself: who waits in another turn than others is not behind them.
IN_TURNS = re.compile(r"\bexchange \(trainer/sums")
ON_CARD = re.compile(r"\bsynchronize \((torch/)?cuda/")  # the frame of a wait for what a GPU was given
ASLEEP = re.compile(r"\((threading|concurrent/futures/_base)\.py:")  # frames of a wait for another thread


def diagnosis(results: dict[str, dict], run: str, cluster: Iterable[str] = ()) -> str:
    """What was found, and in the end one sentence: which rank, on which host, why, what to do.

    `results`: what the task diagnose_host registered on each host; without `diagnosis` where there was no answer.
    cluster: all its hosts, of which -l may leave some out.
    """
    found, ranks = _of_run(results, run)
    silent = [host for host in results if host not in found]
    left_out = not_asked(cluster, results)
    # A host that is off, or left out, is not what ranks wait for of which none is missing.
    whole = bool(ranks) and [rank["rank"] for rank in ranks] == list(range(_world(found, ranks)))
    sentence = (
        _over(found, run, silent, left_out)
        or _stopped(ranks)
        or (
            ""
            if whole
            else _silent(silent, found, results) or _launchers(found) or _missing(found, ranks, left_out)
        )
        or _going(found, ranks, silent)
        or ("" if whole else _unseen(left_out))
        or _behind(found, ranks)
        or _nccl(found)
        or _each_alone(found, ranks)
        or _network(found, ranks)
    )
    mute = "\n".join(silence(host, result) for host, result in results.items() if host in silent)
    parts = (
        _rank_table(ranks),
        _stacks(ranks, sentence),
        _machines(found),
        mute,
        unasked(left_out),
        sentence,
    )
    return "\n\n".join(part for part in parts if part)


def whole_stacks(results: dict[str, dict], run: str) -> str:
    """Every rank's stacks, each frame a line; "" where there is no rank. `results`: as above."""
    return "\n\n".join(_whole(rank) for rank in _of_run(results, run)[1])


def _of_run(results: dict[str, dict], run: str) -> tuple[dict[str, dict], list[dict]]:
    """What each host that answered found of `run`, and its ranks in their order, each with its `host`."""
    found = {host: _found(result, run) for host, result in results.items() if "diagnosis" in result}
    ranks = [{**rank, "host": host} for host, one in found.items() for rank in one["ranks"]]
    return found, sorted(ranks, key=lambda rank: rank["rank"])


def _found(result: dict, run: str) -> dict:
    """A host's answer. One that took another run for the one that is meant, where none was named, has no rank in it."""
    one, known = result["diagnosis"], result["host_status"]
    if one["run"] == run:
        return one
    status = known["runs"].get(run, {})
    age, step = known["time"] - (status.get("updated") or 0), status.get("step")
    return {
        **one,
        "active": False,
        "status": status,
        "age": age,
        "steps": [step, step],
        "ranks": [],
        "flights": [],
    }


# --- the sentence, by the first of these that has one -------------------------------------------------------


def _over(found: dict, run: str, silent: list[str], left_out: list[str]) -> str:
    if not found or any(one["active"] or one["ranks"] for one in found.values()):
        return ""
    newest = min(found.values(), key=lambda one: one["age"])["status"]
    if not newest:
        return f"Run {run} is not known on {names(found)}: correct the name after -e run= (playbooks/status.yml)."
    reason = str(newest.get("reason") or "").splitlines()
    why = f": {reason[0]}" if reason else ""
    if silent and newest["state"] != "finished":
        return (
            f"Run {run} is not active on {names(found)}, where its last word is {newest['state']}{why}; it may go on "
            f"on {names(silent)}: see whether {'that machine is' if len(silent) == 1 else 'those machines are'} on."
        )
    if left_out and newest["state"] != "finished":
        return (
            f"Run {run} is not active on {names(found)}, where its last word is {newest['state']}{why}; it may go on "
            f"on {names(left_out)}: ask there, too, without -l."
        )
    go_on = "" if newest["state"] == "finished" else f" Go on with it: train.yml -e run={run} -e resume=true"
    return f"Run {run} is not active; its last word is {newest['state']}{why}.{go_on}"


def _stopped(ranks: list[dict]) -> str:
    stopped = [rank for rank in ranks if rank["state"] in "Tt"]
    if not stopped:
        return ""
    one = stopped[0]
    others = f" (and {len(stopped) - 1} more)" if stopped[1:] else ""
    lag = behind(ranks).get(one["rank"])
    known = f" ({_how_far(lag)})" if lag else ""
    return (
        f"Rank {one['rank']} on {one['host']}{others} was stopped by a signal or a debugger, and the others wait "
        f"for it{known}: let it go on there, `kill -CONT {one['pid']}`, or leave it to its launcher, which ends it "
        "after timeout_seconds."
    )


def _silent(silent: list[str], found: dict, results: dict[str, dict]) -> str:
    if not silent:
        return ""
    if not found:
        return f"None of {names(silent)} answers: see whether this machine has a way to them, and whether they are on."
    goes_on = [host for host, one in found.items() if one["steps"][1] != one["steps"][0]]
    paused = [
        f"{host} has paused ({said})" for host, one in found.items() if (said := _waits_for(one, "stalled"))
    ]
    rest = f"the others go on without {'it' if len(silent) == 1 else 'them'} once a lease of 10 s has run out"
    if goes_on:
        rest = f"the run goes on on {', '.join(goes_on)}"
    elif paused and not any(one["ranks"] for one in found.values()):
        rest = paused[0]
    cure = "see whether the machine is on, and its cable; when it is back, it takes part again by itself"
    if all(timed_out(results[host]) for host in silent):
        cure = "it lets us in, and nothing comes of it: see its disks and its mounts there, `dmesg`"
    return f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer, {rest}: {cure}."


def _waits_for(one: dict, *states: str) -> str:
    """What the launcher of a host without ranks says that it waits for, where it is in one of these states."""
    state, reason = one["status"].get("state"), str(one["status"].get("reason") or "")
    return reason.splitlines()[0] if one["active"] and not one["ranks"] and state in states and reason else ""


def _launchers(found: dict) -> str:
    """Where the launchers themselves say what they wait for."""
    for host, one in found.items():
        if said := _waits_for(one, "queued", "stalled", "restarting", "starting"):
            what = {"queued": "is queued", "stalled": "has paused"}
            return f"{host} {what.get(one['status']['state'], 'is between two attempts')}: {said}."
    return ""


def _newest(found: dict, ranks: list[dict]) -> dict:
    """The host with the newest word of these ranks; one without any may tell of an attempt long over."""
    return min((found[rank["host"]] for rank in ranks), key=lambda one: one["age"])


def _world(found: dict, ranks: list[dict]) -> int:
    """How many ranks there must be; 0 where they have yet to say."""
    return (_newest(found, ranks)["status"].get("world_size") or 0) if ranks else 0


def _missing(found: dict, ranks: list[dict], left_out: list[str]) -> str:
    if not ranks:
        return "The launchers are up and no rank is: the hosts meet, or torch is being loaded. Look again in 20 s."
    if left_out:  # ranks may be where nobody looked
        return ""
    world = _world(found, ranks)
    if missing := sorted(set(range(world)) - {rank["rank"] for rank in ranks}):
        listed = ", ".join(map(str, missing))
        return (
            f"Rank {listed} of {world} is not there: its launcher sees that at once and begins a new attempt."
        )
    return ""


def _unseen(left_out: list[str]) -> str:
    """Where ranks were not looked at, those that were say too little of whom they wait for."""
    if not left_out:
        return ""
    return (
        f"The run stands, and whom it waits for is not to be seen without {names(left_out)}, where nobody looked: "
        "ask there, too, without -l."
    )


def _without(found: dict, ranks: list[dict], silent: list[str]) -> str:
    """Whom the run goes on without, and why."""
    taking = {rank["host"] for rank in ranks}
    why = {host: "does not answer" for host in silent}
    for host, one in found.items():
        if one["active"] and host not in taking:
            why[host] = str(one["status"].get("reason") or "has no rank").splitlines()[0]
    return f" without {'; '.join(f'{host} ({reason})' for host, reason in why.items())}" if why else ""


def _going(found: dict, ranks: list[dict], silent: list[str]) -> str:
    """The run makes steps, or may yet: who is slow, and why."""
    newest = _newest(found, ranks)
    status = newest["status"]
    own = _own_work(status)
    stands = newest["steps"][1] == newest["steps"][0]
    mute = stands and newest["age"] > max(
        HUNG_AFTER, HUNG_STEPS * max([step_seconds(status.get("parts") or {}), *own])
    )
    # Its reason is written once, and what it tells of may take minutes.
    if status.get("state") == "starting" and status.get("reason") and not (mute and any(map(_waits, ranks))):
        disk = next((rank for rank in ranks if mute and rank["state"] == "D"), None)
        waits = f"; rank {disk['rank']} on {disk['host']} is {STATES['D']}{_at(disk)}" if disk else ""
        ago = f" (said {newest['age']:.0f} s ago)" if mute else ""
        return f"The run makes ready for its first step: {status['reason'].splitlines()[0]}{ago}{waits}."
    if mute:
        return ""
    at = f"(step {status.get('step')} of {status.get('steps')}){_without(found, ranks, silent)}"
    if said := _slow_network(_taking(found, ranks), status):
        return f"The run goes on {at}; {said}."
    if not (status.get("parts") or {}).get("watched", True):
        return (
            f"The run goes on {at}; whether a rank is slower than another is not known: on GPUs, those of a sharded "
            "strategy wait for each other within what counts as computing."
        )
    if len(own) > 1 and min(own) > 0 and max(own) > UNEVEN * min(own):
        slow = own.index(max(own))
        host = next((rank["host"] for rank in ranks if rank["rank"] == slow), "a host that was not asked")
        return (
            f"The run goes on {at}; rank {slow} on {host} is the slowest, {max(own):.2f} s of own work a step where "
            f"the fastest takes {min(own):.2f} s{_why_slow(found.get(host))}."
        )
    return f"The run goes on {at}, and no rank is much slower than another."


def _taking(found: dict, ranks: list[dict]) -> dict:
    """The hosts that have ranks: what a host's network or kernel has to say that takes no part is nobody's reason."""
    taking = {rank["host"] for rank in ranks}
    return {host: one for host, one in found.items() if host in taking}


def _own_work(status: dict) -> list[float]:
    """Seconds of each rank's own work in the last step, by which shares go: with what it codes, and its optimizer."""
    own = [float(seconds) for seconds in status.get("compute_seconds") or []]
    parts = status.get("parts") or {}
    hosts = parts.get("ranks") or []
    # Where a host has several ranks, one codes for all while they wait (trainer/loop.py).
    for name in ("compression", "optimizer") if len(set(hosts)) == len(hosts) else ("optimizer",):
        more = parts.get(name) or []
        if len(more) == len(own):
            own = [sum(both) for both in zip(own, more, strict=True)]
    return own


def _slow_network(found: dict, status: dict) -> str:
    """What the network takes of a step, where that is much, whose link is slower than the others', and what helps."""
    parts = status.get("parts") or {}
    wire, step = parts.get("wire") or 0.0, step_seconds(parts)
    if wire <= NETWORK * step:
        return ""
    links = {host: one["interface"] for host, one in found.items() if one["interface"].get("speed")}
    slow = min(links, key=lambda host: links[host]["speed"], default=None)
    most = max((link["speed"] for link in links.values()), default=0)
    advice = str(status.get("advice") or "")
    if "the network takes" not in advice:
        advice = f"the network takes {wire:.2f} s of a step's {step:.2f} s: docs/slow-networks.md says what sends less"
    if lost := _loses_packets(found):
        return f"{lost}: see its cable and port; {advice}"
    if slow and links[slow]["speed"] < most:
        name, speed = links[slow]["name"], links[slow]["speed"]
        return f"{slow}'s {name} is at {speed:,} Mbit/s, others at {most:,}: see its cable and port; {advice}"
    return f"{advice}; playbooks/bench.yml, once no run is active, measures every way"


def _loses_packets(found: dict) -> str:
    """The first host whose interface or RDMA port had errors, or lost more than a few packets, between the looks."""
    for host, one in found.items():
        for link in _links(one):
            if errors := _errors(link):
                return f"{host}'s {link['name']} loses packets ({errors})"
    return ""


def _port_down(found: dict) -> str:
    """The first host whose RDMA ports are all down where another's is up."""
    ports = {host: one["rdma"] for host, one in found.items() if one.get("rdma")}
    down = [host for host, own in ports.items() if all(port["state"] != "ACTIVE" for port in own)]
    if not down or len(down) == len(ports):
        return ""
    first = ports[down[0]][0]
    return f"{down[0]}'s {first['name']} is {first['state']}, where others' are ACTIVE"


def _links(one: dict) -> list[dict]:
    """The interface that holds a host's cluster address, and the host's RDMA ports."""
    return [one["interface"], *(one.get("rdma") or [])]


def _errors(interface: dict) -> str:
    errors = {name: interface.get(name) or 0 for name in ("rx_errors", "tx_errors")}
    for way in ("rx", "tx"):  # a switch's own packets, which nobody takes, count there, too
        dropped, packets = (interface.get(f"{way}_{what}") or 0 for what in ("dropped", "packets"))
        if dropped > max(MANY_DROPPED, PART_DROPPED * packets):
            errors[f"{way}_dropped"] = dropped
    errors |= {name: interface.get(name) or 0 for name in CABLE}
    # A few are sent again on a good network, too.
    errors |= {name: interface[name] for name in SENT_AGAIN if interface.get(name, 0) > MANY_DROPPED}
    return ", ".join(f"{name} {count}" for name, count in errors.items() if count)


def _why_slow(one: dict | None) -> str:
    if not one:
        return ""
    if one.get("on_cards"):
        first = one["on_cards"][0]
        does = f"computes on a GPU there, too, with {first['memory']}"
        return f", because {_program(first, does)}"
    if one.get("slowed"):
        return (
            f", because a GPU there is slowed down ({', '.join(one['slowed'])}): see its fan, its dust, its power "
            "(`nvidia-smi -q -d PERFORMANCE`)"
        )
    busy = one["busy"][0] if one["busy"] else None
    # Of a host whose cards compute, a part of one core among many is no matter.
    if busy and (not one["gpus"] or busy["cpu"] > BUSY * one["cpus"]):
        does = f"takes {busy['cpu']:.0%} of a core there"
        return f", because {_program(busy, does)}"
    if one["load"] > 2 * one["cpus"]:
        return f", because its load is {one['load']:.0f} on {one['cpus']} cores: see there what runs, `top`"
    else_ = "little" if busy else "nothing"
    return f"; {else_} else runs there, so its processor or card is the slower one, or it is throttled"


def _program(one: dict, does: str) -> str:
    """What a program does beside a run, and what to do about it."""
    if other := one.get("run"):
        return f"run {other} (process {one['pid']}) {does}: stop it (playbooks/stop.yml -e run={other}), or wait for it"
    return f"`{one['name']}` (process {one['pid']}) {does}: end it, or let it run elsewhere"


def behind(ranks: list[dict]) -> dict[int, dict]:
    """The ranks that others wait for, by how many collectives each has begun in its groups.

    Of each: its own `group`, `furthest` (that of a rank which has begun the most) and `waiting` (the ranks which have
    begun more). A rank that is itself ahead of others in another group waits there, and is none of them.
    """
    lags: dict[int, dict] = {}
    ahead: set[int] = set()
    reports: dict[str, dict[int, dict]] = {}
    for rank in ranks:
        for group in rank.get("groups") or []:
            if rank["rank"] in group["ranks"]:
                reports.setdefault(f"{group['name']} {group['ranks']}", {})[rank["rank"]] = group
    for group in reports.values():
        # Over NCCL a rank begins them long before its card does.
        by_card = all(one["started"] >= 0 for one in group.values())
        come = {rank: (one["sequence"], one["started"] if by_card else 0) for rank, one in group.items()}
        least, most = min(come.values()), max(come.values())
        if least == most:
            continue
        waiting = [rank for rank in come if come[rank] > least]
        ahead.update(waiting)
        furthest = next(group[rank] for rank in waiting if come[rank] == most)
        for rank in come:
            if come[rank] == least:
                lags.setdefault(rank, {"group": group[rank], "furthest": furthest, "waiting": waiting})
    return {rank: lag for rank, lag in lags.items() if rank not in ahead} or lags


def _how_far(lag: dict) -> str:
    """Which collective a rank has come to, and which the others."""
    own, furthest = lag["group"], lag["furthest"]
    whose = {"default_pg": "all ranks", "undefined": f"group {own['name']}"}.get(
        own["desc"], f"group {own['desc']}"
    )
    come, most, begun = own["sequence"], furthest["sequence"], "begun"
    if come == most:
        come, most, begun = own["started"], furthest["started"], "started on its card"
    numbers = [str(number) for number in lag["waiting"]]
    others = f"{', '.join(numbers[:8])}{' and more' if numbers[8:] else ''}"
    sizes = " and ".join("x".join(map(str, size)) for size in furthest["sizes"]) or "no"
    what = f", {furthest['op']} of {sizes} elements" if furthest["op"] else ""
    return (
        f"of the collectives of {whose} it has {begun} {come}, where rank{'s' if numbers[1:] else ''} {others} "
        f"came to {most}{what}"
    )


def _behind(found: dict, ranks: list[dict]) -> str:
    taking_turns = {rank["rank"] for rank in ranks if rank["stack"] and IN_TURNS.search(rank["stack"][0])}
    lags = {rank: lag for rank, lag in behind(ranks).items() if rank not in taking_turns}
    waiting = [rank for rank in ranks if (rank["rank"] not in lags if lags else _waits(rank))]
    busy = [rank for rank in ranks if rank not in waiting]
    if not waiting or not busy:
        return ""
    one = next((rank for rank in busy if lags or rank["stack"]), busy[0])
    lag = lags.get(one["rank"])
    known = f" ({_how_far(lag)})" if lag else ""
    others = f" (and {len(busy) - 1} more)" if busy[1:] else ""
    return (
        f"Rank {one['rank']} on {one['host']}{others} has not come to where {len(waiting)} wait for it{known}; "
        f"{_hangs(one, found)}"
    )


def _each_alone(found: dict, ranks: list[dict]) -> str:
    """Where no rank waits for another: there is but one, or all are at what takes long, as reading a dead share is."""
    # Over NCCL the main thread waits for its card, which may wait for others; of what has no stack nothing is known.
    known = [rank for rank in ranks if (rank["stack"] or rank["state"] == "D") and not _waits_for_card(rank)]
    if any(map(_waits, ranks)) or (ranks[1:] and not known):
        return ""
    one = min(ranks, key=lambda rank: (rank["state"] != "D", not rank["stack"]))
    others = f" (and {len(ranks) - 1} more)" if ranks[1:] else ""
    return f"Rank {one['rank']} on {one['host']}{others} waits for no other rank; {_hangs(one, found)}"


def _hangs(rank: dict, found: dict) -> str:
    """What a rank is at that makes no progress, and what becomes of it."""
    doing = STATES.get(rank["state"]) or ("computing" if rank["cpu"] > 0.5 else "waiting")
    cure = SEE_STACK if rank["stack"] else LOOK_AGAIN
    if rank["state"] == "D":
        cure = "look at the disk or the share that it reads, `dmesg`"
    return (
        f"it is {doing}{_at(rank) or ' at a place that cannot be read'}: {cure}; {_ended_after(found[rank['host']])} "
        "its launcher ends it, and the run goes on from its last checkpoint."
    )


def _at(rank: dict) -> str:
    return f" in {rank['stack'][0]}" if rank["stack"] else ""


def _ended_after(one: dict) -> str:
    """When a rank of that host is ended that hangs (trainer/cluster/hang.py)."""
    if one["status"].get("state") in ("running", "evaluating"):
        return "after timeout_seconds"
    return "after half an hour (or twice timeout_seconds) without a sign of life"


def _nccl(found: dict) -> str:
    """What NCCL's RAS holds for an error; every host's has all ranks'."""
    for one in found.values():
        if errors := ras_complaints(one.get("ras") or [])["Errors"]:
            return (
                f"NCCL says: {'; '.join(errors[:3])}. All it says stands above; a rank that it misses hangs."
            )
    return ""


def ras_complaints(lines: list[str]) -> dict[str, list[str]]:
    """The lines below RAS's titles Errors and Warnings: a title is a line with one of === below it."""
    found: dict[str, list[str]] = {"Errors": [], "Warnings": []}
    title = ""
    for line, after in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if after.strip() and not after.strip("= "):
            title = line.strip()
        elif line.strip("= ") and title in found:
            found[title].append(line.strip())
    return found


def _network(found: dict, ranks: list[dict]) -> str:
    """All wait in a collective, or for cards that do: what is between them."""
    found = _taking(found, ranks)
    if lost := _loses_packets(found):
        return f"All ranks wait in a collective, and {lost}: see its cable and port."
    if down := _port_down(found):
        return f"All ranks wait in a collective, and {down}: see its cable, and of InfiniBand the subnet manager."
    came, went = (
        {host: sum(link.get(f"{way}_bytes") or 0 for link in _links(one)) for host, one in found.items()}
        for way in ("rx", "tx")
    )
    if len(found) > 1 and all(max(came[one], went[one]) > MUCH * found[one]["seconds"] for one in found):
        return (
            f"All {len(ranks)} ranks wait in a collective, and much goes over each host's network meanwhile: it seems "
            "to go on, as what takes long there (a sum, a meeting, a checkpoint's state). Look again; "
            "docs/slow-networks.md says what sends less."
        )
    for host, one in found.items():
        if one["kernel"]:
            return f"All ranks wait in a collective; {host}'s kernel says: {one['kernel'][-1]}."
    quiet = [host for host, count in came.items() if count < 2000]
    where = f" Nothing arrives at {', '.join(quiet)}." if quiet else ""
    return (
        f"All {len(ranks)} ranks wait in a collective, and none is behind: a connection between them is lost.{where} "
        "playbooks/preflight.yml tries every pair; after timeout_seconds the launchers begin a new attempt."
    )


def _waits_for_card(rank: dict) -> bool:
    return bool(rank["stack"] and ON_CARD.search(rank["stack"][0]))


def _waits(rank: dict) -> bool:
    awake = next((frame for frame in rank["stack"] if not ASLEEP.search(frame)), "")
    return bool(COLLECTIVE.search(awake))


# --- what it rests on ---------------------------------------------------------------------------------------


def _rank_table(ranks: list[dict]) -> str:
    if not ranks:
        return ""
    rows = [("RANK", "HOST", "STATE", "CPU", "SILENT", "WHERE")]
    for rank in ranks:
        silent = rank["silent_seconds"]
        rows.append(
            (
                str(rank["rank"]),
                rank["host"],
                STATES.get(rank["state"]) or ("running" if rank["state"] == "R" else "waiting"),
                f"{rank['cpu']:.0%}",
                "-" if silent is None else f"{silent:.0f} s",
                " < ".join(rank["stack"][:3]) or "(no stack)",
            )
        )
    return table(rows)


def _stacks(ranks: list[dict], sentence: str) -> str:
    """Whole stacks of the rank that the sentence sends its reader to, other threads' too: a save hangs in one."""
    named = next((one for one in ranks if sentence.startswith(f"Rank {one['rank']} on {one['host']}")), None)
    if not named or SEE_STACK not in sentence:
        return ""
    return _whole(named)


def _whole(rank: dict) -> str:
    lines = [f"Rank {rank['rank']} on {rank['host']}, innermost first:"]
    for name, frames in {"MainThread": rank["stack"], **(rank.get("threads") or {})}.items():
        lines += [f"  {name}", *(f"    {frame}" for frame in frames or ["(no stack)"])]
    return "\n".join(lines)


def _machines(found: dict) -> str:
    lines = []
    for host, one in found.items():
        link, ports = one["interface"], one.get("rdma") or []
        newest = f"step {one['steps'][1]}, {one['age']:.0f} s ago" if one["status"] else "no status"
        name = (link["name"] or "no interface") + _rate(link, one["seconds"])
        lines.append(f"{host}: {newest}; {name}; load {one['load']:.1f} of {one['cpus']}")
        lines += [f"  {port['name']} {port['state']}{_rate(port, one['seconds'])}" for port in ports]
        lines += [
            f"  {each['name']}: {errors} meanwhile" for each in _links(one) if (errors := _errors(each))
        ]
        if one["late"]:
            lines.append(f"  no answer within {one['budget']:g} s: {', '.join(one['late'])}")
        lines += [
            f"  `{busy['name']}` (process {busy['pid']}) takes {busy['cpu']:.0%} of a core"
            for busy in one["busy"]
        ]
        lines += [f"  {' '.join(card)}" for card in one["gpus"]]
        lines += [f"  a GPU: {why}" for why in one.get("slowed") or []]
        lines += [
            f"  `{other['name']}` (process {other['pid']}) is on a GPU, too, with {other['memory']}"
            for other in one.get("on_cards") or []
        ]
        lines += [f"  kernel: {line}" for line in one["kernel"]]
        for title, told in ras_complaints(one.get("ras") or []).items():
            lines += [f"  NCCL's {title.lower()}: {line}" for line in told[:MOST_TOLD]]
        if flights := one.get("flights"):
            lines.append(
                f"  flight recorder: {len(flights)} dumps like {flights[-1]}; of a run of your own (they are pickled) "
                "`torchfrtrace --prefix flight- DIRECTORY` says which collective each rank came to"
            )
    return "\n".join(lines)


def _rate(link: dict, seconds: float) -> str:
    """What came and went, of a link that counts it; behind its name."""
    ways = [(way, link[f"{way}_bytes"]) for way in ("rx", "tx") if f"{way}_bytes" in link]
    told = "  ".join(f"{way} {count * 8 / 1e6 / seconds:.1f} Mbit/s" for way, count in ways)
    return told and f" {told}"


class FilterModule:
    def filters(self):
        return {"diagnosis": diagnosis, "whole_stacks": whole_stacks}
