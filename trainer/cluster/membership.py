"""Who takes part in the next attempt of a run, and when a run is over. Decisions only: no I/O, no clock, no torch.

A run is a row of attempts. Each host keeps a record (`Host`) in the store for as long as it lives; the newest `Plan`
there says who takes part in which attempt. When an attempt is over on all of its hosts that still live, the first of
the hosts writes the next plan, or the run's `End`. The store takes the first such word and no other.
"""

import dataclasses
from dataclasses import dataclass, field

FORGOTTEN = 3600.0  # seconds after which a fault is not held against its host any more
ALLOWED = 2  # faults of one host within that time that are forgiven beyond `restarts`
SHARED = (
    2  # hosts left out in a row for faults of their own; one more such fault is not a host's, but the run's
)
OVER = (0, 3)  # exit codes that no other attempt would change: finished, diverged
BAD_INPUT, STOPPED, LOST = 2, 75, 5


@dataclass(frozen=True)
class Host:
    """What a host says of itself."""

    node: int  # its place in the inventory
    name: str
    address: str
    port: int  # free there, for the ranks to meet at
    processes: int
    done: int = 0  # the last attempt that is over here, or that this host's launcher does not know
    code: int | None = None  # how that ended: exit code of the rank that failed first, -signal, or None
    reason: str = ""
    ended: float = 0.0  # seconds since 1970
    saved: int = 0  # step of the newest checkpoint that it knows of


@dataclass(frozen=True)
class Plan:
    """An attempt, and who takes part; `members` are hosts as they were, in the order of their node ranks."""

    attempt: int
    members: list[Host]
    reason: str = ""  # why there is another attempt
    failures: int = 0  # attempts in a row that failed without a new checkpoint
    saved: int = 0  # step of the newest checkpoint when this was written
    blamed: dict[str, list[float]] = field(default_factory=dict)  # host -> when it was at fault, lately
    suspect: str = ""  # the host at fault for the last failure, if it brought no new checkpoint
    first: int = 1  # the first attempt of this start of the run; 0: it was under way before
    left_out: list[str] = field(default_factory=list)
    dropped: int = 0  # of these, how many for faults of their own and without a new checkpoint since

    def has(self, node: int) -> bool:
        """Whether the host takes part."""
        return any(member.node == node for member in self.members)


@dataclass(frozen=True)
class End:
    """How the run ended, for good."""

    code: int
    reason: str = ""


@dataclass(frozen=True)
class Wait:
    """Nothing to be done yet; `reason` is for a person, where it is worth saying."""

    reason: str = ""


def pack(value: Plan | End | Host) -> dict:
    """As JSON holds it."""
    return dataclasses.asdict(value)


def unpack_plan(value: dict) -> Plan:
    """The inverse of `pack`."""
    return Plan(**{**value, "members": [Host(**one) for one in value["members"]]})


def next_word(
    plan: Plan | None,
    hosts: list[Host],
    *,
    expected: int,
    late: bool,
    least: int,
    restarts: int,
    now: float,
    new: bool = True,
) -> Plan | End | Wait:
    """What the first host has to say when it runs no ranks: another attempt, the end, or nothing yet.

    hosts: those that live. expected: how many the run was started on. late: they had time enough to come. least: hosts
    that an attempt must have (min_nodes). restarts: failures in a row without a new checkpoint that are tried again.
    now: seconds since 1970. new: the run has not been under way before: a store of one host's own forgets its plans.
    """
    hosts = sorted(hosts, key=lambda host: host.node)
    if plan is None:
        if len(hosts) < expected and not (late and len(hosts) >= least):
            return Wait(f"{len(hosts)} of {expected} hosts are ready: {_names(hosts)}")
        attempt = 1 + max(host.done for host in hosts)
        reason = f"started on {_names(hosts)} alone" if len(hosts) < expected else ""
        return Plan(
            attempt, hosts, reason, saved=max(host.saved for host in hosts), first=attempt if new else 0
        )

    members = [host for host in hosts if plan.has(host.node)]
    if any(host.done < plan.attempt for host in members):
        return Wait()
    gone = [one for one in plan.members if all(one.node != host.node for host in hosts)]
    # What was good when the run began is a fault of a host's later: its memory, its card, its disk, a server of files.
    for code in (*OVER, *([BAD_INPUT] if plan.attempt == plan.first or _is_all_alike(members) else [])):
        for host in members:
            if host.code == code and host.done == plan.attempt:
                return End(code, host.reason)
    planned = not gone and all(host.code == STOPPED for host in members)
    saved = max([plan.saved, *(host.saved for host in hosts)])
    if planned:
        dropped = plan.dropped if saved == plan.saved else 0
        word = dataclasses.replace(plan, failures=0, saved=saved, suspect="", reason="", dropped=dropped)
    else:
        may_drop = expected - len(plan.left_out) > least
        culprit = _culprit(members, gone)
        if culprit and culprit.code == BAD_INPUT and len(plan.members) < expected:
            may_drop = False  # what fits no more on fewer hosts is the fault of none of them
        word = _after_failure(plan, members, gone, saved, restarts, now, may_drop)
        shared = saved == plan.saved and plan.dropped >= SHARED and _culprit(members, gone) in members
        if word.failures > restarts or shared:
            return End(*_last_fault(plan, members, gone, 0 if shared else word.failures))
    chosen = [host for host in hosts if host.name not in word.left_out]
    if len(chosen) < least or not chosen:
        short = f"{len(chosen)} of the {least} hosts that the run must have (min_nodes) are there"
        return Wait(f"{word.reason + '; ' if word.reason else ''}{short}: {_names(chosen) or 'none'}")
    return dataclasses.replace(
        word,
        attempt=max([plan.attempt, *(host.done for host in hosts)]) + 1,
        members=chosen,
        reason=word.reason + _changes(plan, chosen, word),
    )


def _after_failure(
    plan: Plan, members: list[Host], gone: list[Host], saved: int, restarts: int, now: float, may_drop: bool
) -> Plan:
    """The plan's book-keeping after a failed attempt; the members are chosen elsewhere.

    A host is left out that failed twice in a row without a new checkpoint between, or again and again of late; not the
    last one, and none without which the run would wait for ever (may_drop: the others are enough).
    """
    culprit = _culprit(members, gone)
    name = culprit.name if culprit else ""
    progress = saved > plan.saved
    blamed = {one: [at for at in times if now - at < FORGOTTEN] for one, times in plan.blamed.items()}
    if name:
        blamed[name] = [*blamed.get(name, []), now]
    again = bool(name) and not progress and plan.suspect == name
    remaining = {host.name for host in members} - {name, *plan.left_out}
    out = bool(name) and remaining and may_drop and (again or len(blamed[name]) >= ALLOWED + restarts)
    return dataclasses.replace(
        plan,
        failures=0 if out else 1 if progress else plan.failures + 1,
        saved=saved,
        blamed=blamed,
        suspect=name,
        left_out=[*plan.left_out, name] if out else plan.left_out,
        dropped=(0 if progress else plan.dropped) + bool(out and culprit in members),
        reason=_fault(members, gone),
    )


def _is_all_alike(members: list[Host]) -> bool:
    """Whether several hosts refuse what none of them is at fault for: settings, or what all of them have."""
    named = any(host.reason.startswith(f"{other.name}: ") for host in members for other in members)
    return len(members) > 1 and all(host.code == BAD_INPUT for host in members) and not named


def _culprit(members: list[Host], gone: list[Host]) -> Host | None:
    """The host at fault: the first that failed by itself, else one that is gone; None where it cannot be told.

    Where ranks agreed to fail, all of them give the same reason, which begins with the host at fault.
    """
    own = [host for host in members if host.code not in (0, LOST, STOPPED)]
    if not own:
        return gone[0] if gone else None
    return min(own, key=lambda host: (not host.reason.startswith(f"{host.name}: "), host.ended))


def _fault(members: list[Host], gone: list[Host]) -> str:
    """What happened, in a line."""
    if gone and all(host.code in (0, LOST, STOPPED) for host in members):
        return f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    culprit = _culprit(members, gone) or min(members, key=lambda host: host.ended)
    said = (culprit.reason or "its ranks ended").splitlines()[0]
    return said if culprit.name in said else f"{culprit.name}: {said}"


def _last_fault(plan: Plan, members: list[Host], gone: list[Host], failures: int) -> tuple[int, str]:
    """Exit code and reason of a run that is given up; failures: 0 where it is a fault of one host after the other."""
    culprit = _culprit(members, gone) or min(members, key=lambda host: host.ended)
    code = culprit.code if (culprit.code or 0) > 0 else LOST if culprit in gone else 1
    reason = culprit.reason if culprit not in gone else f"{_names(gone)} fell silent and did not come back"
    if not failures:
        reason = (
            f"{plan.dropped + 1} hosts failed one after the other without a new checkpoint, so that it seems to be a "
            f"fault that they share; the last one: {reason}"
        )
    elif failures > 1:
        reason = f"{failures} attempts in a row failed without a new checkpoint; the last one: {reason}"
    return code, reason


def _changes(plan: Plan, chosen: list[Host], word: Plan) -> str:
    """Who is left out and who is new."""
    said = ""
    for name in word.left_out[len(plan.left_out) :]:
        said += f"; {name} failed again and again and is left out"
    new = [host for host in chosen if not plan.has(host.node)]
    if new:
        said += f"{'; ' if word.reason else ''}{_names(new)} {'takes' if len(new) == 1 else 'take'} part"
    return said


def _names(hosts: list[Host]) -> str:
    names = [host.name for host in hosts]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
