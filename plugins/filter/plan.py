"""Who takes part in a run, with which ranks, and what stands against it."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import sys
from pathlib import Path

import yaml
from ansible.errors import AnsibleFilterError

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from host_runs import kinds_of, of_version
from run_variables import run_alone, run_plan
from telling import silence, without

from trainer import link
from trainer.balance import given
from trainer.data.read import names, origins, placed
from trainer.ways import EXACT

BROUGHT = re.compile(r"/(models|data)/[0-9a-f]{64}/([^/]*)$")  # a place by content
FROZEN_TRAVEL = ("fsdp", "zero3", "offload", "infinity")  # strategies that send an adapter's frozen weights
PREFLIGHT = "smoke-preflight"  # the trial of preflight.yml
PLAIN = r"[A-Za-z0-9_./:=@%+,-]*"  # what needs no quotes in a shell's or systemd's file of variables


def run_nodes(hosts: list[str], head: list[str]) -> list[str]:
    """The hosts of a run in the order of their node ranks: the inventory's head first, then as they are
    given.

    A subset of the cluster (`-l`) may lack the head; then its first host takes that place.
    """
    return [h for h in hosts if h in head] + [h for h in hosts if h not in head]


def run_facts(answers: dict[str, dict]) -> dict[str, dict]:
    """What run_host says of each host that answered. answers: what its task registered on every one, in node order."""
    return {host: answer["host_facts"] for host, answer in answers.items() if "host_facts" in answer}


def run_silent(answers: dict[str, dict]) -> str:
    """The words on hosts that did not answer while a run is followed on the others; "" where all did."""
    silent = [silence(host, answer) for host, answer in answers.items() if "host_facts" not in answer]
    rest = ["The run is followed on the others; whoever answers again is seen again."] if silent else []
    return "\n".join([*silent, *rest])


def run_unanswered(answers: dict[str, dict], asked: dict) -> list[str]:
    """What stands against a run since hosts did not answer; nothing where it is but followed, and one did.

    asked: run_config's answer. A run never begins without some of its hosts unless that is asked for: those may be at
    work on it, and only this controller cannot reach them.
    """
    silent = [host for host, answer in answers.items() if "host_facts" not in answer]
    faults = [silence(host, answers[host]) for host in silent]
    dead = all(answers[host].get("unreachable") for host in silent)
    if not dead or len(silent) in (0, len(answers)):
        return faults
    if asked["follow"]:
        return []
    commands, them = asked["commands"], "it is" if len(silent) == 1 else "they are"
    it = "it" if len(silent) == 1 else "them"
    limit = without(commands["limit"], silent)
    how = f"{commands['resume_on']} -l {limit}" if asked["resume"] else f"add -l {limit} to the command"
    later = (
        f"Resumed without {_hosts(silent)}, the run goes on as another start, whose steps are those that count: the "
        f"others tell {it} so once they reach {it} again. "
    )
    return [
        *faults,
        f"run {asked['run']}: found {len(silent)} of its {len(answers)} hosts silent; expected an answer of each. "
        + (later if asked["resume"] else "")
        + "See to power and network there, and start it again:"
        + _ways({f"or without, if {them} off": how}),
    ]


def run_stored(answers: list[dict]) -> str:
    """The configuration, as YAML, that a run had at its newest start; "" where no host has one.

    answers: what the task slurp registered on each host, of RUN.yaml, of RUN.env, and of the copy beside the run, which
    is there yet where the system's disk was lost.
    """

    def text(answer: dict) -> str:
        return base64.b64decode(answer.get("content") or "").decode()

    newest, found = "", ""
    for config, variables, copy in ([*one.get("results", []), {}, {}, {}][:3] for one in answers):
        config = config if config.get("content") else copy
        told = re.search(r'^TRAINYARD_LAUNCH="?(\w*)', text(variables), re.MULTILINE)
        start = told[1] if told else ""
        if config.get("content") and (not found or start > newest):
            newest, found = start, text(config)
    return found


def run_followed(facts: dict[str, dict], nodes: list[str], run: str) -> list[str]:
    """Those of the hosts whose word counts in a run that is followed: while it is active somewhere, where it is not, it
    has ended in an earlier start, or been left behind. facts: of the hosts that answered.
    """
    active = [host for host, fact in facts.items() if run in fact["active"]]
    return [host for host in nodes if not active or host in active or host not in facts]


def run_env(variables: dict[str, str]) -> str:
    """The text of RUN.env: KEY=VALUE lines in the format that systemd's EnvironmentFile and a shell read
    alike.
    """
    lines = []
    for key, value in variables.items():
        text = str(value)
        if "\n" in text:
            raise AnsibleFilterError(f"run_env: {key}: a line break in the value")
        lines.append(f"{key}={text if re.fullmatch(PLAIN, text) else shlex.quote(text)}\n")
    return "".join(lines)


def run_brought(config: dict, uploads: list[dict[str, str]], state_dir: str) -> dict:
    """`config` with the places on the hosts, below `state_dir`, of what was brought there for it."""
    return placed(config, [{**one, "place": f"{state_dir}/{one['path']}"} for one in uploads])


def run_origins(config: dict, uploads: list[dict[str, str]], state_dir: str) -> dict:
    """`config`, as run_brought has made it, with its key `origins`: what the places are called where it comes from.

    A path of the controller's that looks like a name of the hub gets ./ before it. What comes anew from another host of
    a resumed run has a place for a name.
    """
    known = origins(config)
    for one in uploads:
        name = one["name"]
        path = "source" not in one or name.startswith(("/", "./", "../", "~"))
        known[f"{state_dir}/{one['path']}"] = known.get(name, name if path else f"./{name}")
    return {**config, "origins": json.dumps(known)} if known else config


def run_shared_names(facts: dict[str, dict], asked: dict) -> list[str]:
    """The sources among the uploads that every host sees as the controller does, on a disk of the network.

    And the paths that are not on the controller which all hosts see alike.
    """
    wanted = {one["source"]: one["mark"] for one in asked["uploads"] if one.get("mark")}
    first = next(iter(facts.values()))["shared"] if facts else {}
    names = [one["name"] for one in asked["elsewhere"]]
    wanted |= {name: first[name] for name in names if name in first}
    return [
        path
        for path, mark in wanted.items()
        if all(fact["shared"].get(path) == mark for fact in facts.values())
    ]


def run_shared(facts: dict[str, dict], asked: dict) -> dict:
    """run_config's answer without the uploads that all hosts see where they lie; they are named by that."""
    there = run_shared_names(facts, asked)
    places = [{**one, "place": one["source"]} for one in asked["uploads"] if one["source"] in there]
    rest = [one for one in asked["uploads"] if one["source"] not in there]
    elsewhere = [one for one in asked["elsewhere"] if one["name"] not in there]
    return {**asked, "config": placed(asked["config"], places), "uploads": rest, "elsewhere": elsewhere}


def run_offerer(facts: dict[str, dict], path: str) -> str:
    """The first host that has a path that is not on the controller; run_problems has refused one that none has."""
    return next(host for host, fact in facts.items() if path not in fact["missing_paths"])


def run_regained(facts: dict[str, dict], asked: dict, state_dir: str) -> dict:
    """run_config's answer for a resumed run, with what was brought for it and some hosts lack: others have it still.

    As a machine does that takes a dead one's place.
    """
    lacking = [set(fact["missing_paths"]) for fact in facts.values()]
    some = set().union(*lacking) - set.intersection(*lacking) if lacking else set()
    kept = [
        {"key": key, "name": name}
        for key, name in _named(asked["config"])
        if name in some and name.startswith(f"{state_dir}/")
    ]
    return {**asked, "elsewhere": [*asked["elsewhere"], *kept]}


def run_kept_paths(config: dict, uploads: list[dict[str, str]]) -> list[str]:
    """The paths of a run's model and data that must lie on the hosts already."""
    brought = {(one["key"], one["name"]) for one in uploads}
    return [name for key, name in _named(config) if name.startswith("/") and (key, name) not in brought]


def _named(config: dict) -> list[tuple[str, str]]:
    """(key, name) of a run's model and of each of its sets of data."""
    data = [(key, name) for key in ("dataset", "validation") for name in names(config.get(key) or "")]
    return [("model", config["model"]), *data]


def run_problems(
    facts: dict[str, dict],
    run: str,
    *,
    port: int,
    commands: dict[str, str],
    trial: str = "",
    resume: bool = False,
    follow: bool = False,
    queue: bool = False,
    beside: bool = False,
    need_bytes: int = 0,
    launcher: str = "systemd",
    config: dict | None = None,
    elsewhere: list[dict] = (),
    unstored: str = "",
    version: str = "",
) -> list[str]:
    """What stands against a run of `config`, each with its host and its cure; an empty list if it can start.

    `facts` are those of the module run_host, in node order. `need_bytes` must be free on every host, but for what it
    has of them. The run's own `trial` is no other run: what is left of it ends before the run starts. With `queue` or
    `beside` others may be active, but with `queue` none that Slurm keeps; where the `launcher` is slurm, those that
    Slurm keeps may, for it has a queue.
    `elsewhere`: paths of which one host must have each, with the `key` that names it. `unstored`: where each host was
    asked for the configuration of the run that is resumed, and has none. `version`: of the checkout's trainer; "" where
    it does not count.
    """
    problems = []
    brought = {one["name"] for one in elsewhere}
    without = [h for h, f in facts.items() if not f["release"]]
    if without:
        return [f"{_hosts(without)}: the trainer is not deployed there; run site.yml first"]
    releases = {f["release"] for f in facts.values()}
    if len(releases) > 1:
        shown = ", ".join(f"{h} has {f['release']}" for h, f in facts.items())
        return [f"the hosts have different releases of the trainer ({shown}); run site.yml on all of them"]
    if len({(f["environment"] or {}).get("digest") for f in facts.values()}) > 1:
        shown = ", ".join(f"{h} has {_environment(f['environment'])}" for h, f in facts.items())
        return [
            f"the hosts have different packages in their Python environments ({shown}), and ranks on different "
            "versions train wrongly or hang; run site.yml on all of them at once (without -l): it names each "
            "difference or, where Pythons differ, the hosts that need python_env_python: bring"
        ]

    active = [h for h, f in facts.items() if run in f["active"]]
    # A directory without a status, or one that only says "starting", is what an interrupted start left.
    # With a checkpoint it is a resume that was interrupted.
    left = (None, "unknown", "starting")
    known = [
        h
        for h, f in facts.items()
        if f["run_state"] not in left or (f.get("run_status") or {}).get("last_checkpoint")
    ]
    if follow:
        if not known and not active:
            problems.append(
                f"run {run}: no host knows it; its name may be misspelt, or it was started on other hosts"
            )
        return problems
    if len(active) == len(facts) or (active and known and not resume):
        problems.append(
            f"run {run} is already active on {_hosts(active)}:"
            + _ways({"follow it": commands["follow"], "or stop it": commands["stop"]})
        )
        return problems
    jobs = {name for f in facts.values() for name in f["jobs"]}
    queued = jobs if launcher == "slurm" else set()
    others = sorted({name for f in facts.values() for name in f["active"]} - {run, trial} - queued)
    trials = [name for name in others if name.startswith("smoke-")]
    if trials and not beside:
        where = _hosts([h for h, f in facts.items() if trials[0] in f["active"]])
        stop = commands["stop"].replace(f"run={run}", f"run={trials[0]}")
        what = "preflight.yml's" if trials[0] == PREFLIGHT else "whose run starts once it has ended"
        problems.append(
            f"run {trials[0]}, a trial, {what}, is active on {where}; wait for its end, and type the command again:"
            + _ways({"or stop it": stop, "or share the hosts with it": "-e beside=true"})
        )
        return problems
    # A job that is cancelled before it begins leaves no word by which a run that waits here would know.
    slurms = sorted(jobs & set(others))
    if others and not beside and (slurms or not queue):
        name = (slurms or others)[0]
        where = _hosts([h for h, f in facts.items() if name in f["active"]])
        other = commands["stop"].replace(f"run={run}", f"run={name}")
        seen = commands["follow"].replace(f"run={run}", f"run={name}")
        waits = (
            {"or have Slurm, who alone knows of its job's end, start this one after it": "-e launcher=slurm"}
            if slurms
            else {"or let this one wait for its end": "-e queue=true"}
        )
        problems.append(
            f"run {name} is already active on {where}:"
            + _ways(
                {
                    "follow it": seen,
                    "or stop it": other,
                    **waits,
                    "or share the hosts with it": "-e beside=true",
                }
            )
        )
        return problems
    # One that waits for a run starts once that has ended: what works there now is no company of its.
    if not beside and not (queue and others) and (found := _at_work(facts, commands)):
        return [found]
    if resume:
        if not known:
            lacking = list(facts)
            problems.append(
                f"run {run}: there is nothing to resume on {_hosts(lacking)}; start it without -e resume=true, "
                "or on the hosts that it had (-l)"
            )
        elif unstored:
            problems.append(
                f"run {run}: its configuration is lost: found neither of {unstored} on {_hosts(list(facts))}; expected "
                "one. Have the host that has one take part, or start a new run, of another name"
            )
    elif known:
        states = sorted({facts[h]["run_state"] for h in known})
        fetch = {"fetch its results": commands["follow"]} if states == ["finished"] else {}
        problems.append(
            f"run {run} exists on {_hosts(known)} (state: {', '.join(states)}):"
            + _ways(
                {
                    **fetch,
                    "go on with it": commands["resume"],
                    "or give the new one another name": "-e run=NAME",
                }
            )
        )
    problems += _other_version(facts, version, commands)
    head = next(iter(facts))
    # What an interrupted start left is ended first; beside another run, the launcher looks for a port that is free.
    left = active or others or queued or trial in facts[head]["active"]
    if facts[head]["port_holder"] and not left:
        problems.append(
            f"{head}: port {port}, where the ranks meet, is held by {facts[head]['port_holder']}; "
            f"end that, or choose another port: -e trainer_port={port + 1}"
        )
    for host, fact in facts.items():
        if not fact["interface"]:
            links = ", ".join(f"{name} {'/'.join(held)}" for name, held in fact["interfaces"].items())
            problems.append(
                f"{host}: no interface holds its cluster address {fact['address']} (there are: {links}); "
                "correct cluster_address in the inventory, or run site.yml to set the address"
            )
        elif len(facts) > 1 and fact["interface"] == "lo" and not fact["address"].startswith("127."):
            problems.append(
                f"{host}: lo holds its cluster address {fact['address']}; expected another interface, since gloo and "
                "NCCL would listen on the first address of lo, 127.0.0.1. Give it to one, such as a bridge without "
                "members (network_interfaces), or set cluster_address to one that a card has"
            )
        if fact["free_bytes"] < need_bytes - fact["brought_bytes"]:
            problems.append(
                f"{host}: {_gigabytes(fact['free_bytes'])} free below {fact['run_dir'].rsplit('/runs/', 1)[0]}, "
                f"{_gigabytes(need_bytes - fact['brought_bytes'])} wanted; remove old runs there, or set "
                "trainer_min_free_gb lower"
            )
        for path in (path for path in fact["missing_paths"] if path not in brought):
            problems.append(
                f"{host}: {path} of the run is not there any more; start a new run with the file given anew"
                if resume
                else f"{host}: {path}: found nothing there; expected it in the directory that all hosts share. "
                "Copy it there, on any of them"
            )
    problems += [
        f"{one['key']}: {one['name']}: found nothing there, on this controller as on {_hosts(list(facts))}; expected "
        "it on one of them. Correct the path"
        for one in elsewhere
        if all(one["name"] in fact["missing_paths"] for fact in facts.values())
    ]
    return problems + _shares(facts, config or {}) + _least(facts, config or {})


def _at_work(facts: dict[str, dict], commands: dict[str, str]) -> str:
    """What of ours, that is no run, has hosts' cards, cores or wire, and the cures; "" where nothing has."""
    there = {host: fact["at_work"] for host, fact in facts.items() if fact["at_work"]}
    if not there:
        return ""
    kinds = kinds_of(unit for units in there.values() for unit in units)
    first = next(iter(there.values()))[0]
    return (
        f"{_hosts(list(there))}: found {first} at work, which has the cards, the cores or the wire that the run wants; "
        "expected nothing of ours there. Wait for its end, and type the command again:"
        + _ways(
            {
                "or stop it": f"{commands['ansible']} {','.join(there)} -b -a 'systemctl stop {' '.join(kinds)}'",
                "or share the hosts with it": "-e beside=true",
            }
        )
    )


def _other_version(facts: dict[str, dict], version: str, commands: dict[str, str]) -> list[str]:
    """Where the hosts' release, the same on all, is not of the `version` by which the run was checked here.

    It may not know a key that RUN.yaml has, or mean another thing by it: hosts would say so once all data has come.
    """
    release = next(iter(facts.values()))["release"]
    if of_version(release, version):
        return []
    return [
        f"{_hosts(list(facts))}: found the release {release} of the trainer; expected {version}, this checkout's, by "
        "which the run was checked. Runs that are active keep theirs:"
        + _ways(
            {
                "have this one there": commands["site"],
                "or, where site.yml was last run from a newer checkout, bring this one up to it": "git pull",
            }
        )
    ]


def _shares(facts: dict[str, dict], config: dict) -> list[str]:
    """What keeps a step of `config` from being shared by all ranks of these hosts, however late some of them come."""
    ranks = sum(fact["processes"] for fact in facts.values())
    batch = config.get("batch_size", ranks)
    try:
        listed = given(config.get("balance", "auto"))
    except ValueError:  # of a run to be resumed that is not there: else it was refused before
        return [
            f"balance: found {config['balance']}; expected auto, even, or whole numbers from 1 on, by commas"
        ]
    if batch < ranks:
        return [
            f"batch_size: found {batch}; expected {ranks} or more, a sequence of each step for each of the {ranks} "
            f"ranks on {_hosts(list(facts))}; set batch_size to {ranks} or more, or start fewer processes "
            "(nproc_per_node) or hosts (-l)"
        ]
    if listed and len(listed) != ranks:
        return [
            f"balance: found {len(listed)} shares ({config['balance']}); expected one for each of the {ranks} ranks "
            f"on {_hosts(list(facts))}; correct them, or write auto"
        ]
    return []


def _least(facts: dict[str, dict], config: dict) -> list[str]:
    """What keeps a run of these hosts from ever going on, however many of them are there."""
    least = config.get("min_nodes", 1)
    if least <= len(facts):
        return []
    return [
        f"min_nodes: found {least}; expected at most {len(facts)}, as many hosts as the run has "
        f"({_hosts(list(facts))}); correct it, or have the run on more hosts"
    ]


def run_is_same(facts: dict[str, dict], run: str, config: dict, launcher: str = "systemd") -> bool:
    """Whether run `run` is active on all hosts (`facts` as above), with just the settings in `config`.

    One that is asked of Slurm, which does not keep it, is another.
    Then whoever asks for it was interrupted after the start, and wants to go on watching it.
    What the hub or a host alone has is known by its name: its place on the hosts is asked for later.
    """
    if not all(run in f["active"] for f in facts.values()):
        return False
    if launcher == "slurm" and not all(run in f["jobs"] for f in facts.values()):
        return False
    if not facts:
        return False
    try:
        stored = yaml.safe_load(next(iter(facts.values()))["run_config"] or "")
        if not isinstance(stored, dict):
            return False
        for key in {"bucket_mb", "link_gbit", "origins"} - set(config):
            stored.pop(key, None)  # run_by_link and run_origins wrote it
        return stored == _as_stored(config, stored)
    except yaml.YAMLError:
        return False


def _as_stored(config: dict, stored: dict) -> dict:
    """`config` with the places of what the `stored` one has by its name; what has been brought by content stays."""
    places = []
    for key in ("model", "dataset", "validation"):
        asked, had = (
            [one.get(key) or ""] if key == "model" else names(one.get(key) or "") for one in (config, stored)
        )
        for name, place in zip(asked, had, strict=False):
            brought = BROUGHT.search(place)
            below = os.path.basename(name.rstrip("/"))
            own = below if name.startswith("/") else re.split("[@:]", name)[0].replace("/", "--")
            if brought and brought[2] == own and not BROUGHT.search(name):
                places.append({"key": key, "name": name, "place": place})
    return placed(config, places)


def run_by_link(config: dict, hosts: list[str], results: str, rdma: list[str]) -> dict:
    """`config` with the bucket_mb of the link that was measured between just these hosts, unless it says one; or with
    its link_gbit, where an adapter's frozen weights would go over it.

    results: where the playbooks keep what they have measured, by TCP. rdma: the hosts that have more than that.
    The run keeps its bucket_mb when it is resumed: another one would change the last bits of its curve. What goes
    another way than by exact sums has nothing of small buckets.
    """
    strategy, measured = config.get("strategy", "ddp"), link.between(Path(results), hosts, rdma)
    if strategy in FROZEN_TRAVEL and config.get("adapter", "none") != "none" and measured:
        return {"link_gbit": max(0.001, round(measured[0].bits / 1e9, 3)), **config}  # 0 would be refused
    wanted = config.get("comm", "auto") in EXACT and strategy in ("ddp", "split")
    if "bucket_mb" in config or not wanted:
        return config
    for found in measured:
        if found.hop is not None:
            return {**config, "bucket_mb": link.bucket_mb(found.stream, found.hop, len(hosts))}
    return config


def run_unknown(facts: dict[str, dict], run: str, silent: list[str] = ()) -> str:
    """Why run `run` cannot be stopped: no host (`facts` as above) has it; "" where one has.

    silent: hosts that did not answer, or that -l left out.
    """
    if any(f["run_state"] is not None or run in f["active"] for f in facts.values()):
        return ""
    active = sorted({name for f in facts.values() for name in f["active"]})
    there = f"active: {', '.join(active)}" if active else "none is active"
    text = f"run {run}: none of {_hosts(list(facts))} knows it ({there}); "
    if silent:
        them = "that host" if len(silent) == 1 else "those hosts"
        return (
            f"{text}it may be active on {_hosts(silent)}: no word of {them}. See to {them}, or correct the name after "
            "-e run="
        )
    return f"{text}correct the name after -e run="


def run_end(facts: dict[str, dict], run: str, silent: list[str] = (), check: bool = False) -> str:
    """How run `run` stands on its hosts (`facts` as above), in a line; and what of those that did not answer.

    check: nothing was to be stopped.
    """
    alive = "would be stopped" if check else "still active"
    states: dict[str, list[str]] = {}
    for host, fact in facts.items():
        states.setdefault(alive if run in fact["active"] else fact["run_state"] or "unknown", []).append(host)
    step = max(((f["run_status"] or {}).get("last_checkpoint") or 0 for f in facts.values()), default=0)
    saved = f"its newest checkpoint is of step {step}; to go on: train.yml -e run={run} -e resume=true"
    if list(states) == ["finished"]:
        saved = f"there was nothing to stop; its results: train.yml -e run={run} -e follow=true"
    elif check:
        saved = f"its newest checkpoint so far is of step {step}; nothing was changed"
    there = "; ".join(f"{state} on {_hosts(hosts)}" for state, hosts in states.items())
    there += f"; not asked, since there was no answer: {_hosts(silent)}" if silent else ""
    missed = (
        f"\nNothing was stopped on {_hosts(silent)}: the run may go on there, or begin again at the next boot, until "
        "the others say that it was stopped. They do so by themselves, once they reach it. Else stop it again "
        f"then: playbooks/stop.yml -e run={run}"
    )
    return f"run {run}: {there}; {saved}" + (missed if silent and not check else "")


def run_goes_on(facts: dict[str, dict], run: str) -> str:
    """What to do where a run that was to be stopped is active still; "" where it is nowhere."""
    hosts = [host for host, fact in facts.items() if run in fact["active"]]
    if not hosts:
        return ""
    return (
        f"run {run}: found it still active on {_hosts(hosts)} after it was told twice to stop; expected it to end. "
        "Run playbooks/stop.yml again; playbooks/logs.yml says what it is at"
    )


def _ways(commands: dict[str, str]) -> str:
    """What one may do, each with its command on a line of its own, which a shell takes as it is pasted."""
    return "".join(f"\n  {what}: {command}" for what, command in commands.items())


def _environment(found: dict[str, str] | None) -> str:
    return f"torch {found['torch']} (digest {found['digest'][:8]})" if found else "none"


def _hosts(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


class FilterModule:
    def filters(self):
        return {
            "run_nodes": run_nodes,
            "run_facts": run_facts,
            "run_silent": run_silent,
            "run_unanswered": run_unanswered,
            "run_shared": run_shared,
            "run_shared_names": run_shared_names,
            "run_followed": run_followed,
            "run_plan": run_plan,
            "run_alone": run_alone,
            "run_env": run_env,
            "run_brought": run_brought,
            "run_origins": run_origins,
            "run_kept_paths": run_kept_paths,
            "run_regained": run_regained,
            "run_offerer": run_offerer,
            "run_problems": run_problems,
            "run_is_same": run_is_same,
            "run_by_link": run_by_link,
            "run_stored": run_stored,
            "run_unknown": run_unknown,
            "run_end": run_end,
            "run_goes_on": run_goes_on,
        }
