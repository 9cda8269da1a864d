"""A run that Slurm keeps: its job's script, and what of Slurm stands against it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from host_runs import JOB, JOB_SCRIPT
from telling import names

# Seconds before the time limit, or less than a minute more, in which the ranks save and end; a short limit's part.
WARNING, WARNING_SHARE = 300, 1 / 3

WAIT = 60  # seconds after the first host's end in which the others end, too, or are taken for lost

# Options of sbatch's that have to do with GPUs, and those by which each node gets so many.
GPU_OPTIONS = re.compile(r"--(gres|gpus|gpus-per-node|gpus-per-socket|gpus-per-task|tres-per-task)(=|$)")
GPUS_A_NODE = re.compile(r"--(?:gres=(?:gres/|gres:)?gpu|gpus-per-node=)(?::?[A-Za-z][\w.-]*)?(?::?(\d+))?$")

SCRIPT = """\
#!/bin/sh
# Written by train.yml -e launcher=slurm; docs/operations.md has what it does.
{options}

run_dir={run_dir}
cd "$run_dir" || exit 1

if [ "${{1:-}}" = host ]; then
    # One host's part in the run. Its exit code is left in `exit`; srun hears of a trainer alone that was killed, and
    # then ends the others, too. A signal, which the trainer takes for a stop, is Slurm's word that the job must end.
    umask 027
    exec >>logs/launch.log 2>&1
    rm -f exit signalled
    # What outlived an earlier start of the job, whose own keeper was killed, must not write here beside this one.
    grep -lszxF -- "TRAINYARD_RUN_DIR=$run_dir" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3 | xargs -r kill -s KILL
    set -a
    . {env}
    # After a requeue the hosts meet as at a new start: what they agreed on before does not count.
    TRAINYARD_LAUNCH=$TRAINYARD_LAUNCH-${{SLURM_RESTART_COUNT:-0}}
    set +a
    trap 'touch signalled; again=yes' TERM
    {trainer} launch {config} &
    launcher=$!
    code=127
    again=yes
    while [ "$again" ]; do # a signal ends the wait, not the trainer
        again=
        wait "$launcher"
        now=$?
        [ "$now" = 127 ] || code=$now # 127: the shell has told its end already
    done
    [ "$code" -lt 128 ] || exit "$code"
    echo "$code" >.exit && mv .exit exit
    exit 0
fi

rm -f exit signalled
srun --kill-on-bad-exit=1 --wait={wait} --cpu-bind=none /bin/sh "$run_dir/{script}" host
ended=$?
code=$(cat exit 2>/dev/null)
[ "$code" != 0 ] || exit 0
if [ "$ended" = 0 ] && {{ [ "$code" != 75 ] || ! [ -e signalled ]; }}; then
    [ "$code" != 75 ] || code=0 # stopped on request
    exit "${{code:-1}}"
fi

# Cut short: into the queue again, but not for ever where no start brings a new checkpoint.
saved="$SLURM_JOB_ID step $(sed -n 's/.*"last_checkpoint": *\\([0-9]*\\).*/\\1/p' status.json 2>/dev/null)"
echo "$saved" >>requeued
if [ "$(grep -cxF -- "$saved" requeued)" -gt {restarts} ]; then
    echo "$(date '+%F %T') given up: begun anew {restarts} times without a new checkpoint (job and step: $saved)" >&2
    exit 1
fi
exec scontrol requeue "$SLURM_JOB_ID"
"""


def slurm_nodes(facts: dict[str, dict]) -> dict[str, str]:
    """Slurm's name of each host, "" where it has none. `facts`: run_host's, with what it asked Slurm."""
    return {host: next((one["name"] for one in rows_of(host, fact)), "") for host, fact in facts.items()}


def rows_of(host: str, fact: dict) -> list[dict]:
    """What Slurm says of a host as one of its nodes: by the very name, by its address, then by a name's first part."""
    known, nodes = {host, fact["slurm"]["hostname"]}, fact["slurm"]["nodes"]
    by_name = [one for one in nodes if known & {one["name"], one["hostname"]}]
    by_address = [one for one in nodes if one["address"] == fact["address"]]
    short = {name.partition(".")[0] for name in known if name[:1].isalpha()}
    by_first_part = [
        one for one in nodes if {one[key].partition(".")[0] for key in ("name", "hostname")} & short
    ]
    return [*by_name, *by_address, *by_first_part]


def slurm_gpus(facts: dict[str, dict]) -> dict[str, int]:
    """How many GPUs Slurm gives out on each host. `facts`: as above."""
    return {
        host: gpus(next((one["gres"] for one in rows_of(host, fact)), "")) for host, fact in facts.items()
    }


def gpus(gres: str) -> int:
    """GPUs of what sinfo says of a node: gpu:4, or gpu:a100:4(S:0-1),gpu:1g.5gb:7(S:0,2),shard:16, or (null)."""
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [one.rpartition(":")[2] for one in words if one.partition(":")[0] == "gpu"]
    return sum(int(one) if one.isdecimal() else 1 for one in counts)


def gpu_option(facts: dict[str, dict], options: list[str], device: str = "auto") -> dict[str, str]:
    """The option by which the job gets its nodes' GPUs, where Slurm gives them out and none of `options` is about that.

    Whole nodes come with their GPUs; what runs there has those alone that were asked for.
    """
    counts = [*slurm_gpus(facts).values()]
    if device == "cpu" or 0 in counts or any(GPU_OPTIONS.match(one) for one in options):
        return {}
    # A number a node is one for all. Of nodes that are given whole, the sum is all that each has.
    return {"gres": f"gpu:{counts[0]}"} if len({*counts}) == 1 else {"gpus": str(sum(counts))}


def gpu_problems(facts: dict[str, dict], options: list[str], device: str = "auto") -> list[str]:
    """Hosts whose processes are more than the GPUs that the job is to have there."""
    if device == "cpu":
        return []
    asked = next((GPUS_A_NODE.match(one) for one in reversed(options) if GPU_OPTIONS.match(one)), None)
    if not asked and any(GPU_OPTIONS.match(one) for one in options):
        return []  # --gpus=8, or another gres: how many a node gets, Slurm alone knows
    counts = slurm_gpus(facts)
    given = {host: int(asked[1] or 1) if asked else count for host, count in counts.items() if count}
    few = [host for host, count in given.items() if facts[host].get("processes", 0) > count]
    if not few:
        return []
    host = few[0]
    return [
        f"{names(few)}: found {facts[host]['processes']} processes, and {given[host]} of Slurm's GPUs for them "
        f"({asked[0] if asked else 'gres.conf'}); expected a GPU for each. Ask for more in trainer_slurm_options, or "
        f"set nproc_per_node: {given[host]} there, or device: cpu for the run"
    ]


def slurm_problems(
    facts: dict[str, dict], partition: str = "", options: Iterable[str] = (), device: str = "auto"
) -> list[str]:
    """What of Slurm stands against a run there, each with its host and its cure. `facts`: as above.

    options: those of sbatch's that the user has set. device: the run's.
    """
    asked = {host: fact["slurm"] for host, fact in facts.items()}
    if lacking := [host for host, one in asked.items() if one["lacking"]]:
        return [
            f"{names(lacking)}: found no {', '.join(asked[lacking[0]]['lacking'])} there; launcher=slurm wants Slurm's "
            "commands on every host of the run, since its job may begin on any: apt install slurm-client; where Slurm "
            "is one's own build (/opt/slurm/bin), link its commands into /usr/local/bin; or leave launcher=slurm out"
        ]
    if silent := [host for host, one in asked.items() if one["fault"]]:
        return [
            f"{names(silent)}: Slurm does not answer: {asked[silent[0]]['fault']}. See there systemctl status munge "
            "slurmd, and systemctl status slurmctld where that runs; or leave launcher=slurm out"
        ]
    problems = []
    if len({one["uid"] for one in asked.values()}) > 1:
        shown = ", ".join(f"{host} has {one['uid']}" for host, one in asked.items())
        problems.append(
            f"the service user has another number on each host ({shown}), and Slurm knows users by their numbers; give "
            "it one: usermod -u and groupmod -g, then site.yml"
        )
    nodes = slurm_nodes(facts)
    there = sorted({one["name"] for one in next(iter(asked.values()))["nodes"]})
    if strange := [host for host, node in nodes.items() if not node]:
        problems.append(
            f"{names(strange)}: not among Slurm's nodes (there are: {names(there) or 'none'}); name the host as "
            "slurm.conf does (NodeName, NodeHostname or NodeAddr), or start the run without it (-l)"
        )
    problems += gpu_problems(facts, list(options), device)
    if partition and not strange:
        known = sorted({one["partition"] for one in next(iter(asked.values()))["nodes"]})
        within = {
            one["name"] for fact in asked.values() for one in fact["nodes"] if one["partition"] == partition
        }
        if partition not in known:
            problems.append(
                f"trainer_slurm_partition: found {partition}; expected one of Slurm's: {', '.join(known)}"
            )
        elif outside := [host for host, node in nodes.items() if node not in within]:
            problems.append(
                f"trainer_slurm_partition: {names(outside)} of the run is not in {partition}; choose another "
                f"partition ({', '.join(known)}), or start the run without it (-l)"
            )
    return problems


def slurm_script(
    facts: dict[str, dict],
    run: str,
    *,
    run_dir: str,
    chosen: dict[str, str],
    options: list[str],
    restarts: int,
    places: dict[str, str],
    device: str = "auto",
) -> str:
    """The text of job.sbatch. `facts`, `device`: as above.

    chosen: partition and account, "" where Slurm chooses. options: further ones of sbatch's, which win. restarts: how
    often the job is begun again without a new checkpoint. places: of the trainer, of RUN.env and RUN.yaml.
    """
    nodes = list(slurm_nodes(facts).values())
    asked = {
        "job-name": JOB + run,
        "nodes": len(nodes),
        "nodelist": ",".join(nodes),
        "ntasks-per-node": 1,
        # All that a node has. sbatch takes no two kinds of memory.
        **({} if any(one.startswith("--mem-per-") for one in options) else {"mem": 0}),
        **gpu_option(facts, options, device),
        "chdir": run_dir,
        "output": f"{run_dir}/logs/job.log".replace("%", "%%"),
        "open-mode": "append",
        "propagate": "NONE",  # limits are slurmd's, not those of whoever ran Ansible
        "signal": f"TERM@{warning(options)}",
        **{name: value for name, value in chosen.items() if value},
    }
    lines = ["--exclusive", "--requeue", *(f"--{name}={value}" for name, value in asked.items()), *options]
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {quoted(line)}" for line in lines),
        run_dir=shlex.quote(run_dir),
        script=JOB_SCRIPT,
        restarts=restarts,
        wait=WAIT,
        **{name: shlex.quote(place) for name, place in places.items()},
    )


def warning(options: list[str]) -> int:
    """Seconds before the time limit at which the ranks are to save, where `options` have one; else WARNING.

    At a limit of less than that, each start of the job would be told to end as it begins.
    """
    limit = next((one.partition("=")[2] for one in reversed(options) if one.startswith("--time=")), "")
    seconds = time_limit(limit)
    return min(WARNING, int(seconds * WARNING_SHARE)) if seconds else WARNING


def time_limit(text: str) -> int:
    """Seconds of one of sbatch's time limits: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0 for none, or another text."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return 0
    numbers = [int(part) for part in parts]
    if dash or len(parts) == 3:  # from hours on; else from minutes on
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def quoted(option: str) -> str:
    """An option --NAME=VALUE as sbatch reads it in a script: by a shell's rules, near enough."""
    name, equals, value = option.partition("=")
    return name + equals + shlex.quote(value) if equals else name


class FilterModule:
    def filters(self):
        return {"slurm_problems": slurm_problems, "slurm_script": slurm_script}
