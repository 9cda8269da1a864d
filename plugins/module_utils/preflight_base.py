"""What preflight holds against what the hosts say: each check with its limit, where that comes from, and a cure.

Pure functions: nothing reads a file or talks to a host. The checks stand in preflight_hosts, preflight_gpus and
preflight_network, whose import makes CHECKS whole (preflight_report does so); docs/preflight.md is written from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from telling import without

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
SHOWN_HOSTS = 8
GB = 1e9


@dataclass(frozen=True)
class Limits:
    """The numbers that checks go by; the role's defaults say what each is for."""

    depth: str = "quick"
    link_mbit: float = 100
    bandwidth_percent: float = 80
    latency_ms: float = 10
    loss_percent: float = 0.5
    loss_fail_percent: float = 5
    clock_warn_seconds: float = 0.1
    clock_fail_seconds: float = 1
    memory_gb: float = 1
    gpu_used_mb: float = 500
    rdma_warn_percent: float = 90
    rdma_fail_percent: float = 85
    min_free_gb: float = 5
    run_gb: float = 0  # data, model and checkpoints of the run to come; 0: it was not named
    run_unknown: str = ""  # what of it has a size that nobody knows yet, by name
    port: int = 29500
    ansible: str = "ansible"  # these with the inventory, to be pasted into a shell
    site: str = "ansible-playbook site.yml"
    train: str = "ansible-playbook train.yml"
    train_all: str = "ansible-playbook train.yml"  # without -l
    subset: str = ""  # what -l says
    version: str = ""  # of the checkout's trainer

    @classmethod
    def of(cls, given: dict[str, object]) -> Limits:
        """With `given`, whose numbers may be words, as -e has them."""
        words = {"str": str, "int": int, "float": float}
        kinds = {one.name: words[one.type] for one in fields(cls)}
        return cls(**{name: kinds[name](value) for name, value in given.items()})


@dataclass(frozen=True)
class Said:
    """What a check says of some hosts: a complaint with its cure, or how it is well with them."""

    result: str
    hosts: list[str]
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Finding:
    """`Said` with the check's name, limit, and the limit's source: a line of the report."""

    check: str
    result: str
    hosts: list[str]
    found: str
    limit: str
    source: str
    cure: str = ""


@dataclass
class Cluster:
    """What all hosts said. `facts`: host (in node order) to a dict with

    expected: {hostname, address, rdma, firewall, processes, device}, of the inventory and -e;
    survey, run: the answers of preflight_survey and run_host, None where there is none; error: why;
    pairs: what preflight_pair found of each peer, None where it did not run; unmeasured: why it came to nothing, or "";
    outside: {port: open | closed} as seen from the controller, or a text: why it was not tried;
    clock: (s that the host is ahead of the controller, uncertainty), None where unknown;
    burn: what `trainer burn` said of its devices, None where it was not asked.
    steps: {result, message, seconds} of the training steps; local: the hosts are directories of one machine.
    members: {address: host} of the whole inventory, of which -l may leave hosts out.
    """

    facts: dict[str, dict]
    limits: Limits = field(default_factory=Limits)
    steps: dict = field(default_factory=lambda: {"result": SKIP, "message": "they were not asked for"})
    local: bool = False
    members: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.alive = [host for host, fact in self.facts.items() if fact["survey"] and fact["run"]]

    def survey(self) -> dict[str, dict]:
        return {host: self.facts[host]["survey"] for host in self.alive}

    def pairs(self) -> dict[tuple[str, str], dict]:
        """{(from, to): what was measured}."""
        return {
            (host, peer): found
            for host in self.alive
            for peer, found in (self.facts[host]["pairs"] or {}).items()
            if peer in self.alive
        }

    def site(self, tag: str, hosts: Iterable[str] = ()) -> str:
        """The command that has site.yml see to a role on some hosts."""
        return f"{self.limits.site} --tags {tag}" + (f" -l {','.join(hosts)}" if hosts else "")

    def train_without(self, hosts: Iterable[str]) -> str:
        """The command that has a run go without some hosts."""
        return f"{self.limits.train_all} -l {without(self.limits.subset or 'all', hosts)}"

    def on(self, hosts: Iterable[str], command: str) -> str:
        """The command that has root run another on some hosts."""
        return f"{self.limits.ansible} {','.join(hosts)} -b -a '{command}'"

    def opening(self, host: str) -> str:
        """What has a host's firewall let its peers in."""
        if host not in self.facts or self.facts[host]["expected"]["firewall"]:  # -l leaves it out
            return self.site("firewall", [host])
        return (
            f"{self.on([host], 'nft list ruleset')}   and open all ports between the peers in the firewall that you "
            "keep there (firewall_manage is false)"
        )


@dataclass(frozen=True)
class Check:
    """`what`: what is right, in words. `limit` may name fields of Limits in braces."""

    what: str
    limit: str
    source: str
    function: Callable[[Cluster], Iterable[Said]]
    machines: bool = False  # of no sense where the hosts are one machine


CHECKS: dict[str, Check] = {}


def check(what: str, limit: str, source: str, machines: bool = False):
    """Take a function for the check of its name."""

    def take(function):
        CHECKS[function.__name__] = Check(what, limit, source, function, machines)
        return function

    return take


def findings(cluster: Cluster) -> list[Finding]:
    """What every check says, in the checks' order; where the hosts are one machine, a note for those of machines."""
    found = []
    for name, one in CHECKS.items():
        limit = one.limit.format(**vars(cluster.limits))
        if one.machines and cluster.local:
            continue
        if cluster.alive or name == "answer":
            said = list(one.function(cluster))
        else:
            said = [Said(SKIP, [], "no host answered")]
        found += [Finding(name, s.result, s.hosts, s.found, limit, one.source, s.cure) for s in said]
    if cluster.local:
        hosts, skipped = list(cluster.facts), ", ".join(name for name, one in CHECKS.items() if one.machines)
        note = f"the hosts are directories of one machine, so there is nothing to see to in: {skipped}"
        found.append(Finding("machines", SKIP, hosts, note, "", ""))
    return found


# ---- what checks have in common ----


def named(hosts: list[str]) -> str:
    rest = len(hosts) - SHOWN_HOSTS
    return ", ".join(hosts[:SHOWN_HOSTS]) + (f" and {rest} more" if rest > 0 else "")


def odd(values: dict[str, object]) -> tuple[list[str], object]:
    """The hosts whose value is not the commonest (of equally common ones, the first host's), and that value."""
    common = Counter(values.values()).most_common(1)[0][0]
    return [host for host, value in values.items() if value != common], common


def blamed(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, ...], list[tuple[str, str]]]:
    """Bad pairs by whom to blame: a host that most of them have in common, or both where nothing tells them apart."""
    left, found = list(dict.fromkeys(pairs)), {}
    while left:
        count = Counter(host for pair in left for host in pair)
        worst, times = count.most_common(1)[0]
        others = [host for host, number in count.items() if number == times and host != worst]
        mine = [pair for pair in left if worst in pair]
        apart = len({host for pair in mine for host in pair}) > 2 and not any(
            all(other in pair for pair in mine) for other in others
        )
        found[(worst,) if apart else tuple(sorted({host for pair in mine for host in pair}))] = mine
        left = [pair for pair in left if pair not in mine]
    return found


def shown_pairs(pairs: Iterable[tuple[str, str]], values: dict, unit: str) -> str:
    """`node1 to node2: 12 ms, …`, the first few."""
    texts = [f"{a} to {b}: {values[a, b]}{unit}" for a, b in pairs]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def equal(cluster: Cluster, values: dict[str, str], what: str, result: str, cure) -> Iterable[Said]:
    """Whether all hosts have the same; `cure`: a function of the odd ones."""
    values = {host: value or "none" for host, value in values.items()}
    hosts, common = odd(values)
    if not hosts:
        yield Said(PASS, list(values), f"{what} {common}")
        return
    told = "; ".join(
        f"{value} on {named([h for h in hosts if values[h] == value])}"
        for value in sorted({values[h] for h in hosts})
    )
    rest = named([host for host in values if host not in hosts])
    yield Said(result, hosts, f"{what} {told}; {common} on {rest}", cure(hosts))


def unique(cluster: Cluster, values: dict[str, str], what: str, tag: str) -> Iterable[Said]:
    """Whether no two hosts have the same."""
    owners: dict[str, list[str]] = {}
    for host, value in values.items():
        owners.setdefault(value, []).append(host)
    shared = {value: hosts for value, hosts in owners.items() if len(hosts) > 1 and value}
    for value, hosts in shared.items():
        yield Said(FAIL, hosts, f"{what} {value[:40]} on {named(hosts)}", cluster.site(tag))
    if not shared:
        yield Said(PASS, list(values), f"{len(values)} {what}s")
