"""Who takes part in the next attempt of a run, and when a run is over. Decisions only: no I/O, no clock, no torch.

A run is a row of attempts. Each host keeps a record (`Host`) in the store for as long as it lives; the newest `Plan`
there says who takes part in which attempt. When an attempt is over on all of its hosts that still live, the first of
the hosts writes the next plan, or the run's `End`. The store takes the first such word and no other.
"""

import dataclasses
from dataclasses import dataclass, field

from trainer.words import some

FORGOTTEN = 3600.0  # seconds after which a fault is not held against its host any more
ALLOWED = 2  # faults of one host within that time that are forgiven beyond `restarts`
SHARED = (
    2  # hosts left out in a row for faults of their own; one more such fault is not a host's, but the run's
)
OUTAGES = 10  # times `restarts`: cuts of power or network in a row that are tried again; the run itself may cause them
UNKNOWN = (
    "what became of the run meanwhile is not known here, so that fewer than {} do not begin it again: start the "
    "others, or end it here (playbooks/stop.yml)"
)
NETWORK = "the network"  # a suspect that is no host: all have lost each other
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
    code: int | None = None  # how that ended: exit code of the rank that failed first, -signal; None: unknown
    reason: str = ""
    ended: float = 0.0  # seconds since 1970
    saved: int = 0  # step of the newest checkpoint that it knows of
    cut_off: bool = False  # the store was silent to it when that ended
    stepped: bool = False  # that made a step as far as this host knows
    unreached: list[int] = field(
        default_factory=list
    )  # nodes that gave no answer once its ranks had lost them
    leaves: bool = False  # it shuts down, and stays until the others' ranks have ended, too


@dataclass(frozen=True)
class Plan:
    """An attempt, and who takes part; `members` are hosts as they were, in the order of their node ranks."""

    attempt: int
    members: list[Host]
    reason: str = ""  # why there is another attempt
    failures: int = 0  # attempts in a row that failed without a new checkpoint
    saved: int = 0  # step of the newest checkpoint when this was written
    blamed: dict[str, list[float]] = field(default_factory=dict)  # host -> when it was at fault, lately
    suspect: str = ""  # the host at fault for the last failure, or NETWORK
    first: int = 1  # the first attempt of this start of the run; 0: it was under way before
    left_out: list[str] = field(default_factory=list)
    dropped: int = 0  # of these, how many for faults of their own and without a new checkpoint since
    outages: int = 0  # attempts in a row without a new checkpoint that a cut of power or network ended
    proven: list[str] = field(default_factory=list)  # who made the newest checkpoint of this start of the run

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
    hosts = sorted((host for host in hosts if not host.leaves), key=lambda host: host.node)
    least = min(least, expected)  # with more than there are, nothing would ever go on
    if plan is None:
        # One that was under way may have gone on elsewhere, or ended there. Of two, the first has the store.
        enough = 1 if new or (expected == 2 and hosts and hosts[0].node == 0) else expected // 2 + 1
        if len(hosts) < expected and not (late and len(hosts) >= max(least, enough)):
            few = f"{len(hosts)} of {expected} hosts are ready: {_names(hosts)}"
            return Wait(few if len(hosts) >= enough else f"{few}; {UNKNOWN.format(enough)}")
        attempt = 1 + max(host.done for host in hosts)
        reason = f"started on {_names(hosts)} alone" if len(hosts) < expected else ""
        return Plan(
            attempt, hosts, reason, saved=max(host.saved for host in hosts), first=attempt if new else 0
        )

    members = [host for host in hosts if plan.has(host.node)]
    if any(host.done < plan.attempt for host in members):
        return Wait()
    gone = [one for one in plan.members if all(one.node != host.node for host in hosts)]
    if gone and members and not late and all(host.code is None for host in members):
        return Wait(
            f"{_names(members)} started anew, and {_names(gone)} may know what became of the run meanwhile"
        )
    # What was good when the run began is a fault of a host's later: its memory, its card, its disk, a server of files.
    for code in (*OVER, *([BAD_INPUT] if plan.attempt == plan.first or _is_all_alike(members) else [])):
        for host in members:
            if host.code == code and host.done == plan.attempt:
                return End(code, host.reason)
    # Where one left them, as a host does that shuts down, the others' ranks have saved and ended with its own.
    planned = bool(members) and all(host.code == STOPPED for host in members)
    # At first a host may remember a later step than the run goes on from: it was given up, or of another line.
    saved = max([plan.saved if plan.attempt > plan.first else 0, *(host.saved for host in members)])
    if saved > plan.saved:
        proven = [member.name for member in plan.members]
        plan = dataclasses.replace(plan, failures=0, outages=0, suspect="", dropped=0, proven=proven)
    if planned:
        word = dataclasses.replace(
            plan, failures=0, saved=saved, suspect="", reason=_fault(members, gone) if gone else ""
        )
    else:
        culprit = _culprit(members, gone)
        # What fits no more on fewer hosts is the fault of none of them.
        too_few = bool(culprit) and culprit.code == BAD_INPUT and len(plan.members) < expected
        room = 0 if too_few else expected - least
        word = _after_failure(plan, members, gone, saved, restarts, now, room)
        if end := _given_up(plan, word, members, gone, restarts):
            return end
    chosen = [host for host in hosts if host.name not in word.left_out]
    if len(chosen) < max(least, 1):
        # Rather with those that failed at another time than not at all.
        last = _newly_out(plan, word)
        chosen = [host for host in hosts if host.name not in last]
        back = {host.name for host in chosen}
        word = dataclasses.replace(word, left_out=[name for name in word.left_out if name not in back])
        if len(chosen) < max(least, 1):
            short = f"{len(chosen)} of the {least} hosts that the run must have (min_nodes) are there"
            said = word.reason + _changes(plan, [], word)
            return Wait(f"{said + '; ' if said else ''}{short}: {_names(chosen) or 'none'}")
    return dataclasses.replace(
        word,
        attempt=max([plan.attempt, *(host.done for host in hosts)]) + 1,
        # Without what they say of themselves and of others, which a large cluster's store would not take in one word.
        members=[dataclasses.replace(host, reason="", unreached=[]) for host in chosen],
        reason=_with_untold(plan, members, word.reason + _changes(plan, chosen, word)),
    )


def _after_failure(
    plan: Plan, members: list[Host], gone: list[Host], saved: int, restarts: int, now: float, room: int
) -> Plan:
    """The plan's book-keeping after a failed attempt; the members are chosen elsewhere.

    A host is left out that failed by itself twice in a row without a new checkpoint between, or that failed or was
    struck again and again of late; and where all lost each other twice in a row, who keeps them apart. Not the last
    one, and none without which the run would wait for ever (room: how many it can do without). A cut of power or
    network is no failure of the run.
    """
    culprit = _culprit(members, gone)
    blamed = {one: [at for at in times if 0 <= now - at < FORGOTTEN] for one, times in plan.blamed.items()}
    suspect, out, own = "", [], False
    if culprit:
        name = culprit.name
        blamed[name] = [*blamed.get(name, []), now]
        own = culprit in members and _is_own(culprit)  # who is gone is known as it was before
        suspect = name if own else ""  # a wire may be out for ten seconds twice, a plug be pulled
        if (suspect and plan.suspect == suspect) or len(blamed[name]) >= ALLOWED + restarts:
            out = [name]
    elif len(members) > 1 and not _struck(members, gone) and all(host.code == LOST for host in members):
        suspect = NETWORK
        if plan.suspect == suspect:
            out, own = _apart(plan, members)
    if not {host.name for host in members} - set(out) or len(plan.left_out) + len(out) > room:
        out = []
    outage = bool(_struck(members, gone)) and not any(_is_own(host) for host in members)
    return dataclasses.replace(
        plan,
        failures=0 if out else plan.failures + (not outage),
        outages=plan.outages + outage,
        saved=saved,
        blamed=blamed,
        suspect=suspect,
        left_out=[*plan.left_out, *out],
        dropped=plan.dropped + bool(out and own),
        reason=_fault(members, gone),
    )


def _is_all_alike(members: list[Host]) -> bool:
    """Whether several hosts refuse what none of them is at fault for: settings, or what all of them have."""
    named = any(host.reason.startswith(f"{other.name}: ") for host in members for other in members)
    return len(members) > 1 and all(host.code == BAD_INPUT for host in members) and not named


def _is_own(host: Host) -> bool:
    """Whether its ranks, or its launcher, failed by themselves."""
    return host.code not in (None, 0, LOST, STOPPED)


def _struck(members: list[Host], gone: list[Host]) -> list[Host]:
    """Whose power or network was cut: they booted anew, are gone, or the store was silent to them.

    Who has booted anew may have had the store: then it is not counted who was cut off from that.
    """
    return (
        [host for host in members if host.code is None] or [host for host in members if host.cut_off]
    ) + gone


def _culprit(members: list[Host], gone: list[Host]) -> Host | None:
    """The host at fault: the first that failed by itself, else the one that was struck; None where it cannot be told.

    Several that are struck at once have one thing in common, which is none of them: the mains, a switch.
    Where ranks agreed to fail, all of them give the same reason, which begins with the host at fault.
    """
    if not any(_is_own(host) for host in members):
        struck = _struck(members, gone)
        return struck[0] if len(struck) == 1 else None
    own = [host for host in members if host.code is None or _is_own(host)]
    return min(own, key=lambda host: (not host.reason.startswith(f"{host.name}: "), host.ended))


def _apart(plan: Plan, members: list[Host]) -> tuple[list[str], bool]:
    """Whom to leave out where all lost each other, and whether that is a guess.

    The fewest without whom all the others reach each other, those that have come since the newest checkpoint first.
    Where all seem to reach each other (large packets may not come through), all of these; and where there are none,
    whom most of the others say that they have lost, unless such guesses have not helped before. Of as many, the last:
    the first ones have the copies of checkpoints.
    """
    came = {host.name for host in members} - set(plan.proven)
    if len(came) == len(members):
        came = set()
    names = {host.node: host.name for host in members}
    apart: dict[str, set[str]] = {host.name: set() for host in members}  # from whom, both ways
    for host in members:
        for other in {names[node] for node in host.unreached if node in names} - {host.name}:
            apart[host.name].add(other)
            apart[other].add(host.name)
    out = []
    while any(apart.values()):
        worst = max(
            (host for host in members if apart.get(host.name)),
            key=lambda host: (host.name in came, len(apart[host.name]), host.node),
        )
        out.append(worst.name)
        for other in apart.pop(worst.name):
            apart[other].discard(worst.name)
    if out or came:
        return out or sorted(came), False
    told = {one.name: sum(f"(that is {one.name})" in host.reason for host in members) for one in members}
    worst = max(members, key=lambda host: (told[host.name], host.node)).name
    return [worst] if told[worst] and plan.dropped < SHARED else [], True


def _fault(members: list[Host], gone: list[Host]) -> str:
    """What happened, in a line."""
    cut = [host for host in members if host.cut_off]
    if (gone or len(cut) > 1) and all(host.code in (0, LOST, STOPPED) for host in members):
        told = [f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"] if gone else []
        if cut:
            why = cut[0].reason.partition(" was cut off: ")[2].splitlines()
            told.append(
                f"{_names(cut)} {'was' if len(cut) == 1 else 'were'} cut off" + (f": {why[0]}" if why else "")
            )
        return "; ".join(told)
    culprit = _culprit(members, gone) or min(members, key=lambda host: host.ended)
    said = (culprit.reason or "its ranks ended").splitlines()[0]
    return (said if culprit.name in said else f"{culprit.name}: {said}") + _unreached(members)


def _unreached(members: list[Host]) -> str:
    """Whom the host that reaches fewest of the others does not."""
    worst = max(members, key=lambda host: len(host.unreached))
    names = _names([host for host in members if host.node in worst.unreached])
    return f"; {worst.name} does not reach {names}" if names else ""


def _given_up(plan: Plan, word: Plan, members: list[Host], gone: list[Host], restarts: int) -> End | None:
    """The end of a run that has failed often enough; None where it is tried again. word: what is known by now."""
    culprit = _culprit(members, gone)
    if plan.dropped >= SHARED and culprit in members and _is_own(culprit):
        said = (
            f"{plan.dropped + 1} hosts failed one after the other without a new checkpoint, so that it seems to be a "
            "fault that they share; the last one: "
        )
    elif (count := word.failures) > restarts:
        said = (
            f"{count} attempts in a row failed without a new checkpoint; the last one: " if count > 1 else ""
        )
    elif (count := word.outages) > OUTAGES * restarts:
        cut = f"power or network was cut {count} times in a row without a new checkpoint; the last time: "
        said = cut if count > 1 else ""
    else:
        return None
    culprit = culprit or min(members or gone, key=lambda host: host.ended)
    code = culprit.code if (culprit.code or 0) > 0 else LOST if culprit in gone else 1
    if culprit in gone:
        return End(code, f"{said}{_names(gone)} fell silent and did not come back")
    return End(code, said + culprit.reason + _unreached(members))


def _with_untold(plan: Plan, members: list[Host], reason: str) -> str:
    """The reason for the next attempt, after that of one which ended before its first step: no rank has told that."""
    if not members or any(host.stepped or host.code is None for host in members):
        return reason  # who was started anew does not know
    return "; ".join(dict.fromkeys(filter(None, f"{plan.reason}; {reason}".split("; "))))


def _newly_out(plan: Plan, word: Plan) -> list[str]:
    return [name for name in word.left_out if name not in plan.left_out]


def _changes(plan: Plan, chosen: list[Host], word: Plan) -> str:
    """Who is left out and who is new."""
    said = ""
    for name in _newly_out(plan, word):
        if word.suspect == NETWORK:
            said += f"; with {name} the hosts lost each other again and again, and it is left out"
        else:
            said += f"; {name} failed again and again and is left out"
    new = [host for host in chosen if not plan.has(host.node)]
    if new:
        said += f"{'; ' if word.reason else ''}{_names(new)} {'takes' if len(new) == 1 else 'take'} part"
    return said


def _names(hosts: list[Host]) -> str:
    names = [host.name for host in hosts]
    return some(names, 8)
