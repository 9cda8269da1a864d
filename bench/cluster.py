"""`python -m bench.cluster [TABLE …]`: mismatched hosts and slow links, on three hosts of a lab. As root.

Hosts differ by their share of CPU and the rate of their wires (`make lab` has the same). What is compared runs in one
go, on hosts that site.yml has made. Ranks are started by hand, so that nothing but them computes.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from bench.measure import WAYS, markdown
from lab.lab import Lab, Options, obstacles

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
}
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
            script = f"mkdir -p {FOLDER}; cat > {place}; exec env {' '.join(words)} {TRAINER} train {place}"
            command = lab.host(host).enter("sh", "-c", script)
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            process.stdin.write(text.encode())
            process.stdin.close()
            process.stdin = None  # communicate would close it again
            self.ranks.append(process)

    def ended(self) -> "Group":
        """Wait for all of them; exits with what they said where one failed."""
        said = [process.communicate()[0].decode(errors="replace") for process in self.ranks]
        for host, process, text in zip(self.hosts, self.ranks, said, strict=True):
            if process.returncode:
                sys.exit(f"{self.name} on {host} ended with {process.returncode}:\n{text[-2000:]}")
        return self

    def rows(self, host: str | None = None) -> list[dict]:
        text = self.lab.exec(host or self.hosts[0], "cat", f"{FOLDER}/{self.name}/metrics.jsonl")
        return [row for row in map(json.loads, text.splitlines()) if row["kind"] == "train"]


def speed(rows: list[dict]) -> float:
    """Tokens a second over these steps."""
    return sum(row["tokens"] for row in rows) / sum(row["step_seconds"] for row in rows)


def paces(rows: list[dict]) -> list[dict[str, float]]:
    """By rank: tokens a second of forward and backward alone, and the other seconds of rank 0's steps."""
    rest = statistics.mean(row["step_seconds"] - row["compute_seconds"] - row["comm_seconds"] for row in rows)
    ranks = range(rows[0]["world_size"])
    return [
        {
            "speed": sum(row["tokens"] * row["shares"][rank] / sum(row["shares"]) for row in rows)
            / sum(row["rank_seconds"][rank] for row in rows),
            "rest": rest,
        }
        for rank in ranks
    ]


def record(name: str, rows: list[dict], alone: list[dict], cpus, rate: float | None = None, **config) -> None:
    """Note a run's steps, beside what its hosts do for themselves. rate: bits a second of their wires."""
    RECORDED.append(
        {
            "name": name,
            "hosts": [
                {"name": host, **own, "cpus": share, "rate": rate}
                for host, own, share in zip(HOSTS, alone, cpus, strict=True)
            ],
            "comm": config.get("comm", "exact"),
            "sync_every": 50,
            "shares": config.get("balance", "auto"),
            "sequence_length": COMMON["sequence_length"],
            "batch_size": config["batch_size"],
            "micro_batch_size": config.get("micro_batch_size", COMMON["micro_batch_size"]),
            "wire_bytes": statistics.mean(row["wire_bytes"] for row in rows),
            "tokens_a_second": speed(rows),
        }
    )


def apart(lab: Lab, name: str, steps: dict[str, int]) -> dict[str, list[dict]]:
    """The steps of each host for itself, all at the same time, while all of them compute."""
    groups = {
        host: Group(lab, f"{name}-{host}", [host], batch_size=4, steps=count) for host, count in steps.items()
    }
    rows = {host: group.ended().rows() for host, group in groups.items()}
    begin = max(found[2]["time"] for found in rows.values())
    end = min(found[-1]["time"] for found in rows.values())
    return {host: [row for row in found if begin < row["time"] <= end] for host, found in rows.items()}


@contextlib.contextmanager
def cpus(lab: Lab, shares) -> Iterator[None]:
    for host, share in zip(HOSTS, shares, strict=True):
        lab.set_cpus(host, share)
    try:
        yield
    finally:
        for host in HOSTS:
            lab.set_cpus(host, None)


def balance(lab: Lab, quick: bool) -> str:
    """Even shares, learnt ones, and the hosts each for itself, at quotas of 2:1:1 and 4:2:1."""
    rows = []
    steps = 20 if quick else 60
    for shares in ((0.8, 0.4, 0.4), (0.8, 0.4, 0.2)):
        name = ":".join(f"{share / min(shares):.0f}" for share in shares)
        label = name.replace(":", "")
        with cpus(lab, shares):
            alone_rows = apart(
                lab, f"apart{label}", {h: round(steps * s / 0.4) for h, s in zip(HOSTS, shares, strict=True)}
            )
            even = Group(
                lab, f"even{label}", HOSTS, batch_size=48, balance="even", steps=LEARNT // 2 + steps // 3
            )
            even_rows = even.ended().rows()
            auto = Group(lab, f"auto{label}", HOSTS, batch_size=48, steps=LEARNT + steps)
            auto_rows = auto.ended().rows()
        alone = {host: speed(found) for host, found in alone_rows.items()}
        own = [paces(alone_rows[host])[0] for host in HOSTS]
        record(f"{name}, even", even_rows[3:], own, shares, batch_size=48, balance="even")
        record(f"{name}, auto", auto_rows[LEARNT:], own, shares, batch_size=48)
        total, before, after = sum(alone.values()), speed(even_rows[3:]), speed(auto_rows[LEARNT:])
        far = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(auto_rows, even_rows, strict=False))
        rows.append(
            (
                name,
                *(f"{alone[host]:,.0f}" for host in HOSTS),
                f"{total:,.0f}",
                f"{before:,.0f}",
                f"{after:,.0f}",
                ":".join(map(str, auto_rows[-1]["shares"])),
                f"{after / before:.2f}",
                f"{after / total:.2f}",
                f"{far:.1e}",
            )
        )
    head = ("quotas", *(f"{host} alone" for host in HOSTS), "their sum", "even", "auto", "shares", "auto/even",
            "auto/sum", "losses differ by")  # fmt: skip
    what = "Tokens/s on three hosts with a share of CPU each, 48 sequences of 128 tokens a step"
    return f"{what}:\n\n{markdown(head, rows)}"


def slowed(lab: Lab, quick: bool) -> str:
    """A host that loses half of its speed in mid-run, and how soon the run is where it can be."""
    shares, later = (0.8, 0.4, 0.4), (0.4, 0.4, 0.4)
    with cpus(lab, later):
        new = sum(map(speed, apart(lab, "apartslow", dict.fromkeys(HOSTS, 15 if quick else 40)).values()))
    with cpus(lab, shares):
        group = Group(lab, "slowed", HOSTS, batch_size=48, steps=LEARNT + (30 if quick else 80))
        while not _step(group) >= LEARNT:
            time.sleep(0.5)
        lab.set_cpus(HOSTS[0], later[0])
        at = _step(group)
        rows = group.ended().rows()
    after = [row for row in rows if row["step"] > at]
    windows = [(after[i]["step"] - at, speed(after[i : i + 5]) / new) for i in range(len(after) - 4)]
    reached = next((f"{steps} steps" for steps, share in windows if share >= 0.88), "never")
    last = speed(after[-10:]) / new
    return (
        f"node1 of 2:1:1 loses half of its speed in step {at}: five steps in a row reach 0.88 of the new sum "
        f"({new:,.0f} tokens/s) from {reached} on; the last ten have {last:.2f} of it, with shares "
        f"{':'.join(map(str, rows[-1]['shares']))}."
    )


def _step(group: Group) -> int:
    text = group.lab.exec(group.hosts[0], "cat", f"{FOLDER}/{group.name}/status.json", check=False)
    try:
        return json.loads(text).get("step") or 0
    except ValueError:
        return 0


def wire(lab: Lab, quick: bool) -> str:
    """Bytes at the interfaces and tokens a second, by what crosses the wire, where plain ddp mostly waits."""
    steps, megabits = 20 if quick else 100, 20
    rate, quotas = f"{megabits}mbit", (0.5, 0.5, 0.5)
    settings = {"batch_size": 24, "steps": steps, "balance": "even", "micro_batch_size": 4}
    with cpus(lab, quotas):
        fast = Group(lab, "fast", HOSTS, **settings).ended().rows()
        best, alone = speed(fast[3:]), paces(fast[3:])
        record("no limit, exact", fast[3:], alone, quotas, **settings)
        for host in HOSTS:
            lab.set_rate(host, rate)
        found = {}
        try:
            for name, keys in WAYS.items():
                # The meeting before the first step costs, too, and is no part of training.
                short, _ = _counted(lab, f"{name}-2", {**settings, **keys, "steps": 2})
                whole, rows = _counted(lab, f"{name}-all", {**settings, **keys})
                record(f"{rate}, {name}", rows[3:], alone, quotas, megabits * 1e6, **settings, **keys)
                found[name] = ((whole - short) / sum(row["tokens"] for row in rows[2:]), rows)
        finally:
            for host in HOSTS:
                lab.set_rate(host, None)
    plain, plain_rows = found["exact"]
    waits = 1 - speed(plain_rows[3:]) / best
    rows = [
        (
            name,
            f"{bytes_a_token:,.0f}",
            f"{plain / bytes_a_token:.1f}",
            f"{speed(own[3:]):,.0f}",
            f"{speed(own[3:]) / best:.2f}",
            f"{statistics.mean(row['loss'] for row in own[-10:]):.3f}",
        )
        for name, (bytes_a_token, own) in found.items()
    ]
    head = ("comm", "bytes a token", "less by", "tokens/s", "of no network", "loss, last 10 steps")
    return (
        f"Three hosts behind {rate}/s each way, where exact ddp has {best:,.0f} tokens/s without a limit and waits "
        f"{waits:.0%} of its time with one; {steps} steps. Bytes are those that the interfaces counted.\n\n"
        f"{markdown(head, rows)}"
    )


def _counted(lab: Lab, name: str, config: dict) -> tuple[int, list[dict]]:
    """Bytes that left all hosts while a run went on, by their interfaces' counters; and its steps."""

    def now() -> int:
        files = {host: f"/sys/class/net/{lab.host(host).interface}/statistics/tx_bytes" for host in HOSTS}
        return sum(int(lab.exec(host, "cat", file)) for host, file in files.items())

    before = now()
    group = Group(lab, name, HOSTS, **config).ended()
    return now() - before, group.rows()


TABLES = {"balance": balance, "slowed": slowed, "wire": wire}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__.split(": ", 1)[1])
    listing = ", ".join(TABLES)
    parser.add_argument("tables", metavar="TABLE", nargs="*", help=f"of {listing}; default: all")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, no more")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "runs" / "bench-cluster.json", help="where figures go, too"
    )
    options = parser.parse_args()
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
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(RECORDED, indent=1))
    finally:
        lab.down()


if __name__ == "__main__":
    main()
