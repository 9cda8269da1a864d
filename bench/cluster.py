"""`python -m bench.cluster [TABLE …]`: mismatched hosts and slow links, on three hosts of a lab. As root.

Hosts differ by their share of CPU and the rate of their wires (`make lab` has the same). What is compared runs in one
go, on hosts that site.yml has made. Ranks are started by hand, so that nothing but them computes.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.measure import WAYS, markdown, speed, tell, together
from lab.lab import Lab, Options, obstacles
from lab.network import BURST
from trainer.balance import solve
from trainer.ways import BLOCK, USED

ROOT = Path(__file__).resolve().parent.parent
HOSTS = ("node1", "node2", "node3")
TRAINER = "/opt/trainyard/current/bin/trainer"
FOLDER = "/root/bench"
PORTS = itertools.count(29900)
COMMON = {
    "model": "tiny",
    "dataset": "austen",
    "sequence_length": 128,
    "micro_batch_size": 1,
    "checkpoint_every": 0,
    "checkpoint_async": False,
    "tensorboard": False,
    "threads": 1,
    "lr": 0.001,
    "lr_schedule": "constant",  # another would give runs of other lengths other rates, and so other losses
}
# Of a step of the tables on balance: seconds, as steps over gigabit Ethernet take. In shorter ones the cores themselves
# become faster and slower by a tenth and more, each host's at another moment, and the slowest of each step counts.
SEQUENCES = 192
WAITS = 0.8  # of a step's time, by exact ddp behind the links of the table on ways
STOPPED = 75  # how a trainer ends that was asked to
# What is asked of each: times fewer bytes than exact.
FEWER = {"16bit": 2, "8bit": 4, "powersgd": 20, "diloco": 200}
RECORDED: list[dict] = []  # what was measured, as `python -m bench.simulate --check` takes it
LEARNT = 24  # steps in which shares are learnt, and which do not count


class Group:
    """Ranks that train together, one on each of `hosts`; rows() are rank 0's steps."""

    def __init__(self, lab: Lab, name: str, hosts, **config):
        self.lab, self.name, self.hosts = lab, name, list(hosts)
        port = next(PORTS)
        text = yaml.safe_dump({**COMMON, **config, "run": name})
        self.ranks = []
        for rank, host in enumerate(self.hosts):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(self.hosts),
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": rank,
                "MASTER_ADDR": lab.host(self.hosts[0]).address,
                "MASTER_PORT": port,
                "CLUSTER_ADDRESS": lab.host(host).address,
                "GLOO_SOCKET_IFNAME": lab.host(host).interface,
                "TRAINYARD_HOST": host,
                "TRAINYARD_RUN_DIR": f"{FOLDER}/{name}",
                "TRAINYARD_CACHE_DIR": f"{FOLDER}/cache",
                "OMP_NUM_THREADS": 1,
            }
            words = [f"{key}={value}" for key, value in variables.items()]
            place = f"{FOLDER}/{name}.yaml"
            script = (
                f"mkdir -p {FOLDER}; cat > {place}; echo $$ > {FOLDER}/{name}.pid; "
                f"exec env {' '.join(words)} {TRAINER} train {place}"
            )
            command = lab.host(host).enter("sh", "-c", script)
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            process.stdin.write(text.encode())
            process.stdin.close()
            process.stdin = None  # communicate would close it again
            self.ranks.append(process)

    def running(self) -> bool:
        return all(process.poll() is None for process in self.ranks)

    def stop(self) -> "Group":
        """Ask all of them to end, and wait until they have."""
        for host in self.hosts:
            self.lab.exec(host, "sh", "-c", f"kill $(cat {FOLDER}/{self.name}.pid)", check=False)
        return self.ended(0, STOPPED)

    def ended(self, *codes: int) -> "Group":
        """Wait for all of them; exits with what they said where one ended with none of `codes`, of 0 unless given."""
        said = [process.communicate()[0].decode(errors="replace") for process in self.ranks]
        for host, process, text in zip(self.hosts, self.ranks, said, strict=True):
            if process.returncode not in (codes or (0,)):
                sys.exit(f"{self.name} on {host} ended with {process.returncode}:\n{text[-2000:]}")
        return self

    def rows(self, host: str | None = None) -> list[dict]:
        """Of the steps that are done; of a run that goes on, too."""
        text = self.lab.exec(host or self.hosts[0], "cat", f"{FOLDER}/{self.name}/metrics.jsonl", check=False)
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def paces(rows: list[dict]) -> list[dict[str, float]]:
    """By rank: tokens a second of forward and backward alone, and the other seconds of rank 0's steps."""
    rest = statistics.mean(row["step_seconds"] - row["compute_seconds"] - row["comm_seconds"] for row in rows)
    found = []
    for rank in range(rows[0]["world_size"]):
        tokens = sum(row["tokens"] * row["shares"][rank] / sum(row["shares"]) for row in rows)
        found.append({"speed": tokens / sum(row["rank_seconds"][rank] for row in rows), "rest": rest})
    return found


def record(name: str, rows: list[dict], alone: list[dict], cpus, rate: float | None = None, **config) -> None:
    """Note a run's steps, beside what its hosts do for themselves. rate: bits a second of their wires.

    config: the run's, and `sending`, seconds of a processor for a byte that is sent, where that was measured.
    """
    RECORDED.append(
        {
            "name": name,
            "hosts": [
                {"name": host, **own, "cpus": share, "rate": rate, "burst": BURST if rate else 0}
                for host, own, share in zip(HOSTS, alone, cpus, strict=True)
            ],
            "comm": config.get("comm", "exact"),
            "sync_every": config.get("sync_every", 50),
            "fragments": config.get("diloco_fragments", 1),
            "overlap": config.get("diloco_overlap", 0),
            "shares": config.get("balance", "auto"),
            "sequence_length": COMMON["sequence_length"],
            "batch_size": config["batch_size"],
            "micro_batch_size": config.get("micro_batch_size", COMMON["micro_batch_size"]),
            "sending": config.get("sending"),
            "wire_bytes": statistics.mean(row["wire_bytes"] for row in rows),
            "tokens_a_second": speed(rows),
        }
    )


def apart(lab: Lab, name: str, batches: dict[str, int], count: int, **config) -> dict[str, list[dict]]:
    """`count` steps or more of each host for itself, of its own batch, all at the same time, while all of them compute.

    A host's batch is to be what it has of the coupled step: an optimizer's step is then as rare, and all steps are
    about as long. They begin at very different times, the slowest last, so that none ends by itself.
    """
    groups = {
        host: Group(lab, f"{name}-{host}", [host], batch_size=batch, steps=100_000, **config)
        for host, batch in batches.items()
    }
    late = time.monotonic() + 1800
    while True:
        time.sleep(2)
        rows = together({host: group.rows() for host, group in groups.items()})
        if min(map(len, rows.values())) >= count:
            break
        for group in groups.values():
            if not group.running():
                group.ended()
        if time.monotonic() > late:
            had = {host: len(found) for host, found in rows.items()}
            sys.exit(f"{name}: in half an hour the hosts had {had} steps at the same time, of {count}")
    for group in groups.values():
        group.stop()
    return rows


def _around(before: dict[str, list[dict]], after: dict[str, list[dict]]) -> list[dict]:
    """What each host did for itself, by `apart`, before a run and after it: as `paces`, and `steps`.

    Those are its steps' seconds over their mean, side by side with the other hosts' of the same time.
    """
    found = []
    for host in HOSTS:
        rows = [row for part in (before, after) for row in part[host][: min(map(len, part.values()))]]
        seconds = [row["step_seconds"] for row in rows]
        mean = statistics.mean(seconds)
        found.append({**paces(before[host] + after[host])[0], "steps": [one / mean for one in seconds]})
    return found


def asked(figure: float, least: float, form: str = ".3f") -> str:
    """A table's cell: a figure, what it is to be at least, and whether it is."""
    return f"{figure:{form}} (asked {least:g}: {'met' if figure >= least else 'missed'})"


@contextlib.contextmanager
def cpus(lab: Lab, shares) -> Iterator[None]:
    for host, share in zip(HOSTS, shares, strict=True):
        lab.set_cpus(host, share)
    try:
        yield
    finally:
        for host in HOSTS:
            lab.set_cpus(host, None)


def parts(shares) -> dict[str, int]:
    """What each host gets of SEQUENCES where its speed is its share of a CPU."""
    return dict(zip(HOSTS, solve(SEQUENCES, [1 / share for share in shares]), strict=True))


def kept(rows: list[dict]) -> float:
    """These steps' tokens/s, of the sum of what each host computed at in the very same steps.

    A machine that becomes slower or faster from one run to the next is not in it.
    """
    return speed(rows) / sum(one["speed"] for one in paces(rows))


def lost(rows: list[dict], alone: list[dict]) -> str:
    """Where these steps' time went that hosts by themselves, as `paces` has them, would not have needed."""
    seconds = sum(row["step_seconds"] for row in rows)
    last = sum(max(row["rank_seconds"]) for row in rows)
    mean = sum(statistics.mean(row["rank_seconds"]) for row in rows)
    beside = [one["speed"] / own["speed"] for one, own in zip(paces(rows), alone, strict=True)]
    return (
        f"{kept(rows):.3f} of what the hosts computed at in the same steps; they computed at "
        f"{', '.join(f'{one:.3f}' for one in beside)} of their speeds by themselves; {(last - mean) / seconds:.1%} of "
        f"a step the last one was waited for, {1 - last / seconds:.1%} were sums and what follows them"
    )


def balance(lab: Lab, quick: bool) -> str:
    """Even shares, learnt ones, and the hosts each for itself, at quotas of 2:1:1 and 4:2:1."""
    rows, notes = [], []
    steps = 12 if quick else 36
    # What is asked: auto over even, where something is, and auto over the sum.
    for shares, faster, of_sum in (((0.8, 0.4, 0.4), 1.25, 0.92), ((0.8, 0.4, 0.2), None, 0.90)):
        name = ":".join(f"{share / min(shares):.0f}" for share in shares)
        label = name.replace(":", "")
        with cpus(lab, shares):
            # The machine below all hosts may become faster or slower meanwhile: before and after what they are held to.
            first = apart(lab, f"first{label}", parts(shares), steps // 2)
            even = Group(
                lab,
                f"even{label}",
                HOSTS,
                batch_size=SEQUENCES,
                balance="even",
                steps=LEARNT // 2 + steps // 3,
            )
            even_rows = even.ended().rows()
            before = apart(lab, f"before{label}", parts(shares), steps // 2)
            auto = Group(lab, f"auto{label}", HOSTS, batch_size=SEQUENCES, steps=LEARNT + steps)
            auto_rows = auto.ended().rows()
            after = apart(lab, f"after{label}", parts(shares), steps // 2)
            alone_rows = {host: before[host] + after[host] for host in HOSTS}
        alone = {host: speed(found) for host, found in alone_rows.items()}
        around = _around(first, before)
        record(f"{name}, even", even_rows[3:], around, shares, batch_size=SEQUENCES, balance="even")
        own = _around(before, after)
        record(f"{name}, auto", auto_rows[LEARNT:], own, shares, batch_size=SEQUENCES)
        learnt_kept, even_kept = kept(auto_rows[LEARNT:]), kept(even_rows[3:])
        by_steps = asked(learnt_kept / even_kept, faster) if faster else f"{learnt_kept / even_kept:.3f}"
        notes.append(
            f"{name}, auto: {lost(auto_rows[LEARNT:], own)}. Even shares had {even_kept:.3f} of it: auto/even is "
            f"{by_steps} by that, whatever became of the machine between the two runs."
        )
        tell(notes[-1])
        total, evenly, learnt = sum(alone.values()), speed(even_rows[3:]), speed(auto_rows[LEARNT:])
        far = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(auto_rows, even_rows, strict=False))
        rows.append(
            (
                name,
                *(f"{alone[host]:,.0f}" for host in HOSTS),
                f"{total:,.0f} ({', '.join(f'{sum(map(speed, one.values())):,.0f}' for one in (before, after))})",
                f"{evenly:,.0f}",
                f"{learnt:,.0f}",
                ":".join(map(str, auto_rows[-1]["shares"])),
                asked(learnt / evenly, faster) if faster else f"{learnt / evenly:.2f}",
                asked(learnt / total, of_sum),
                f"{far:.1e} (asked at most 1e-05: {'met' if far <= 1e-5 else 'missed'})",
            )
        )
    head = ("quotas", *(f"{host} alone" for host in HOSTS), "their sum (before, after)", "even", "auto", "shares",
            "auto/even", "auto/sum", "losses differ by")  # fmt: skip
    what = f"Tokens/s on three hosts with a share of CPU each, {SEQUENCES} sequences of 128 tokens a step"
    return "\n\n".join([f"{what}:", markdown(head, rows), *notes])


def slowed(lab: Lab, quick: bool) -> str:
    """A host that loses half of its speed in mid-run, and how soon the run is where it can be."""
    shares, later = (0.8, 0.4, 0.4), (0.4, 0.4, 0.4)
    count = 8 if quick else 20
    with cpus(lab, later):
        before = apart(lab, "beforeslow", parts(later), count)
    with cpus(lab, shares):
        group = Group(lab, "slowed", HOSTS, batch_size=SEQUENCES, steps=LEARNT + (30 if quick else 80))
        while not _step(group) >= LEARNT and group.running():
            time.sleep(0.5)
        lab.set_cpus(HOSTS[0], later[0])
        at = _step(group)
        rows = group.ended().rows()
    with cpus(lab, later):
        after = apart(lab, "afterslow", parts(later), count)
    sums = [sum(map(speed, one.values())) for one in (before, after)]
    new = sum(speed(before[host] + after[host]) for host in HOSTS)
    reached, last = recovery(rows, at, new)
    return (
        f"node1 of 2:1:1 loses half of its speed in step {at}. Five steps in a row have, on average, 0.88 of "
        f"the new sum ({new:,.0f} tokens/s; before {sums[0]:,.0f}, after {sums[1]:,.0f}) "
        f"{f'by the end of step {reached} after it' if reached else 'never'} "
        f"(asked: within 30 steps: {'met' if reached and reached <= 30 else 'missed'}); the last ten have {last:.2f} "
        f"of it, with shares {':'.join(map(str, rows[-1]['shares']))}."
    )


def recovery(rows: list[dict], at: int, new: float) -> tuple[int | None, float]:
    """By which step after `at` five in a row, taken together, have had 0.88 of `new` tokens/s, and what the last ten
    have of it.
    """
    after = [row for row in rows if row["step"] > at]
    windows = [(after[i + 4]["step"] - at, speed(after[i : i + 5]) / new) for i in range(len(after) - 4)]
    return next((steps for steps, share in windows if share >= 0.88), None), speed(after[-10:]) / new


def _step(group: Group) -> int:
    text = group.lab.exec(group.hosts[0], "cat", f"{FOLDER}/{group.name}/status.json", check=False)
    try:
        return json.loads(text).get("step") or 0
    except ValueError:
        return 0


def lengths(keys: dict, steps: int) -> tuple[int, int]:
    """Steps of two runs by one way, whose difference in bytes is what the steps between them send.

    What is sent before the first step is in both, and is no part of training. A run ends with a meeting, as each round
    of diloco does: the shorter run is one round, the longer one three.
    """
    return (keys["sync_every"], 3 * keys["sync_every"]) if "sync_every" in keys else (2, steps)


def slow_link(rows: list[dict]) -> int:
    """Mbit/s at which ranks with these steps, of a link without limit, would spend WAITS of their time waiting."""
    step = statistics.median(row["step_seconds"] for row in rows)
    sent = statistics.mean(row["wire_bytes"] for row in rows)
    return max(1, round(8 * sent / USED / (step * WAITS / (1 - WAITS)) / 1e6))


@dataclass
class Measured:
    """Steps of a run, without its first ones, and what a token of them took."""

    rows: list[dict]
    loss: float  # near the step that all runs reach
    sent: float  # bytes, by the interfaces
    processor: float  # seconds of all hosts' processors
    uncoupled: float = 0.0  # tokens a second of all hosts, each for itself, right before and after

    def sending(self, alone: list[dict], quotas, tokens: int) -> float:
        """Seconds of a processor for a byte that a host sends: what its rank takes beyond what it takes by itself.

        alone: by host, as `paces` has it; all of that time is computing. tokens: of a host's step.
        """
        busy = statistics.mean(
            share * (1 / own["speed"] + own["rest"] / tokens)
            for share, own in zip(quotas, alone, strict=True)
        )
        sent = sum(row["wire_bytes"] for row in self.rows) / sum(row["tokens"] for row in self.rows)
        return max(0.0, self.processor - busy) / (len(HOSTS) * sent)


def wire(lab: Lab, quick: bool) -> str:
    """Bytes at the interfaces and tokens a second, by what crosses the wire, where plain ddp mostly waits."""
    quotas = (0.5, 0.5, 0.5)
    settings = {"batch_size": 24, "balance": "even", "micro_batch_size": 4}
    steps = 20 if quick else 60
    # A round of 50 steps, the key's default, sends 4 x 50 times less than exact at most, before any header.
    meets = {**WAYS["diloco"], "sync_every": 6 if quick else 60}
    hidden = {"diloco_fragments": 4, "diloco_overlap": 1 if quick else 2}
    ways = {**WAYS, "diloco": meets, "diloco, hidden": {**meets, **hidden}}
    # What a host does for itself: where it hands nothing to a wire, which is what the simulator adds.
    third = dict.fromkeys(HOSTS, settings["batch_size"] // len(HOSTS))
    micro = {"micro_batch_size": settings["micro_batch_size"]}
    tokens = third[HOSTS[0]] * COMMON["sequence_length"]
    found, megabits, sending = {}, None, 0.0
    with cpus(lab, quotas):
        try:
            before = apart(lab, "apart", third, steps, **micro)
            for name, keys in {"no limit": {}, **ways}.items():
                called = re.sub(r"\W", "", name)
                run = found[name] = _measured(lab, called, {**settings, **keys}, steps)
                # The machine below becomes faster and slower: a run is held to what hosts had before and after it.
                after = apart(lab, f"apart-{called}", third, steps, **micro)
                alone, before = _around(before, after), after
                run.uncoupled = sum(tokens / (tokens / own["speed"] + own["rest"]) for own in alone)
                if name in ("no limit", "exact"):  # a limit makes many small pieces of what is sent
                    sending = run.sending(alone, quotas, tokens)
                label = f"{megabits} Mbit/s, {name}" if megabits else f"{name}, exact"
                rate = megabits and megabits * 1e6
                record(label, run.rows, alone, quotas, rate, **settings, **keys, sending=sending)
                if not megabits:
                    megabits = slow_link(run.rows)
                    for host in HOSTS:
                        lab.set_rate(host, f"{megabits}mbit")
        finally:
            for host in HOSTS:
                lab.set_rate(host, None)
    best = speed(found.pop("no limit").rows)
    plain = found["exact"]
    waits = 1 - speed(plain.rows) / best
    rows = [
        (
            name,
            f"{run.sent:,.0f}",
            asked(plain.sent / run.sent, FEWER[name]) if name in FEWER else f"{plain.sent / run.sent:.2f}",
            f"{speed(run.rows):,.0f}",
            f"{speed(run.rows) / best:.2f}",
            _of_uncoupled(name, speed(run.rows) / run.uncoupled),
            f"{run.loss:.3f}",
        )
        for name, run in found.items()
    ]
    head = ("comm", "bytes a token", "less by", "tokens/s", "of exact without a limit", "of the hosts by themselves",
            f"loss near step {steps}")  # fmt: skip
    return (
        f"Three hosts behind {megabits} Mbit/s each way, where exact ddp has {best:,.0f} tokens/s without a limit and "
        f"waits {waits:.0%} of its time with one (asked: {WAITS:.0%}); {steps} steps, of diloco three rounds of "
        f"{meets['sync_every']}, hidden with {hidden['diloco_fragments']} fragments that travel while "
        f"{hidden['diloco_overlap']} steps are computed. Bytes are those that the interfaces counted. With a scale of "
        f"4 bytes for each {BLOCK} values, 8bit sends {4 * BLOCK / (BLOCK + 4):.2f} times less than float32, and "
        "never 4.\n\n"
        f"{markdown(head, rows)}"
    )


def _of_uncoupled(name: str, share: float) -> str:
    """What no network would give is what hosts do for themselves, which was measured at that very time."""
    return asked(share, 0.9) if name.startswith("diloco") else f"{share:.2f}"


def _measured(lab: Lab, name: str, config: dict, steps: int) -> Measured:
    """Two runs, one of them longer, and what the steps between took. The loss is that of ten steps up to `steps`."""
    short, long = lengths(config, steps)
    few, _, least = _counted(lab, f"{name}-few", {**config, "steps": short})
    many, rows, most = _counted(lab, f"{name}-many", {**config, "steps": long})
    loss = statistics.mean(row["loss"] for row in rows[:steps][-10:])
    tokens = sum(row["tokens"] for row in rows[short:])
    return Measured(rows[short:], loss, (many - few) / tokens, (most - least) / tokens)


def _counted(lab: Lab, name: str, config: dict) -> tuple[int, list[dict], float]:
    """Bytes that left all hosts while a run went on, by their interfaces' counters; its steps; and the seconds that it
    took of processors.
    """

    def now() -> int:
        files = {host: f"/sys/class/net/{lab.host(host).interface}/statistics/tx_bytes" for host in HOSTS}
        return sum(int(lab.exec(host, "cat", file)) for host, file in files.items())

    def processors() -> float:
        found = os.times()  # of the ranks, once they have ended
        return found.children_user + found.children_system

    before, began = now(), processors()
    group = Group(lab, name, HOSTS, **config).ended()
    took = processors() - began
    return now() - before, group.rows(), took


def keep(file: Path, runs: list[dict]) -> None:
    """Write runs into `file`, in the place of those of their names; what other tables have measured stays."""
    there = json.loads(file.read_text()) if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    by_name = {run["name"]: run for run in [*there, *runs]}
    file.write_text(json.dumps(list(by_name.values()), indent=1))


TABLES = {"balance": balance, "slowed": slowed, "wire": wire}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__.split(": ", 1)[1])
    listing = ", ".join(TABLES)
    parser.add_argument("tables", metavar="TABLE", nargs="*", help=f"of {listing}; default: all")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, no more")
    parser.add_argument(
        "--json",
        type=Path,
        help="where figures go, too: runs/bench-cluster.json, or -quick.json, unless given",
    )
    options = parser.parse_args()
    options.json = options.json or ROOT / f"runs/bench-cluster{'-quick' if options.quick else ''}.json"
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table is named {', '.join(sorted(unknown))}; there are {listing}")
    if reasons := obstacles():
        sys.exit(f"no lab on this machine: {'; '.join(reasons)}")
    lab = Lab("bench")
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before\n"
    )
    try:
        lab.up(Options(name="bench", hosts=len(HOSTS)), replace=True)
        play = Path(sys.executable).with_name("ansible-playbook")
        command = [str(play), "-i", str(lab.inventory), "site.yml"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-3000:] + done.stderr)
        for name in options.tables or TABLES:
            print(TABLES[name](lab, options.quick), end="\n\n", flush=True)
            keep(options.json, RECORDED)
    finally:
        lab.down()


if __name__ == "__main__":
    main()
