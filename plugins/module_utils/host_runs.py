"""What a host's files and its keeper (systemd, Slurm, or the processes themselves) say of runs. Reads only."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping

UNIT = "trainyard@"
# Units besides runs that take a host's cards, cores or wire: the modules trainer_command and bench_pair name them.
WORK = "trainyard-work-"
BENCH = "trainyard-bench"
WORKING = (WORK + "*", BENCH + ".service")
ALIVE = "--state=active,activating,deactivating,reloading"
# Without systemd: torchrun starts every rank in a session of its own, so neither a pid file nor a process group holds
# the whole run. What all of them inherit is this variable of their environment, which serves as a control group would.
VARIABLE = "TRAINYARD_RUN_DIR"
# A run that Slurm keeps has its job's script in its directory. The job's name ends with the run's.
JOB_SCRIPT = "job.sbatch"
JOB = "trainyard-"
JOB_QUESTION = (
    "timeout",
    "20",
    "squeue",
    "--all",  # a partition may be hidden, or shut to the user that looks
    "--noheader",
    "--format=%i|%T|%j|%r",
)  # `read_jobs` reads the answer
# In other states it waits.
JOB_AT_WORK = (
    *("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "UNKNOWN"),
    *("RESIZING", "SIGNALING", "STAGE_OUT"),
)
# Reasons for which a job waits until somebody does something. PartitionNodeLimit is none of them: it may tell of a node
# that is drained, or down.
HELD = re.compile(r"held|^JobHoldMaxRequeue", re.IGNORECASE)
NEVER = re.compile(
    r"^(PartitionTimeLimit|BadConstraints|Invalid(Account|QOS)|DependencyNeverSatisfied|\w+PerJob)"
)
HIDDEN = "it shows users their own jobs alone (PrivateData)"
ENDED = ("finished", "stopped", "failed")
RELEASE = "TRAINYARD_RELEASE"  # what RUN.env calls the directory of the release that the run keeps
AT_BOOT = "/etc/systemd/system/*.wants/" + UNIT + "*.service"  # links of enabled units
GPU_FIELDS = ("name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu")  # %, MiB, MiB, °C
PATIENCE = 5.0  # seconds that a card's driver, and Slurm, have to answer
NO_ANSWER = 124  # the exit status of a command that had none in its time, as timeout(1) has it
MOST = 1 << 20  # bytes that are read at most of a file of a run's directory
NOT_THERE = 127  # that of one that is not there, as a shell has it


def within(seconds: float, command) -> tuple[int, str, str]:
    """As AnsibleModule.run_command, (exit status, output, errors), of a command that has so long: else NO_ANSWER.

    Then it is killed with its children, and not waited for: one that hangs in the kernel, as nvidia-smi may, cannot be.
    Threads may call this at once.
    """
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        return NOT_THERE, "", str(error)
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return NO_ANSWER, "", f"no answer within {seconds:.0f} s"
    return process.returncode, out, errors


def release(opt_dir: str) -> str | None:
    """Name of the release that `current` points to, if it is whole."""
    current = os.path.join(opt_dir, "current")
    if not os.access(os.path.join(current, "bin", "trainer"), os.X_OK):
        return None
    return os.path.basename(os.path.realpath(current))


def of_version(release: str, version: str) -> bool:
    """Whether a release, by its name, is the trainer of this version; "" is any."""
    return (
        not version or release.rpartition("-")[0] == version
    )  # VERSION-ENVIRONMENT: the module trainer_release


def environment_dir(opt_dir: str) -> str:
    """Where the release's Python environment lies; "" if that is not known."""
    try:
        with open(os.path.join(opt_dir, "current", "environment"), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def run_processes(run_dir: str | None = None) -> dict[int, str]:
    """Live processes of this user that belong to a run, as {pid: run directory}; of one run if `run_dir` is
    given.

    A process that ended and was not waited for has an empty environment, so it does not count.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # another user's, or gone since the listing
            continue
        for entry in environment.split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key == VARIABLE.encode():
                directory = os.fsdecode(value)
                if run_dir is None or directory == run_dir:
                    found[int(name)] = directory
    return found


def read_jobs(output: str) -> dict[str, dict[str, str]]:
    """The answer to JOB_QUESTION: {run: {id, state, reason}}, of jobs that are ours by their names."""
    found = {}
    for line in output.splitlines():
        number, state, name, reason = (line.split("|", 3) + [""] * 3)[:4]
        if name.startswith(JOB):
            reason = "" if reason in ("None", "(null)") else reason
            found[name.removeprefix(JOB)] = {"id": number, "state": state, "reason": reason}
    return found


def job_words(job: dict[str, str]) -> str:
    """How a job is, for a person."""
    if job["state"] == "UNKNOWN":
        return f"Slurm cannot be asked about it: {job['reason']}"
    said = f"Slurm's job {job['id']} is {job['state'].lower()}" + (
        f": {job['reason']}" if job["reason"] else ""
    )
    if job["state"] in JOB_AT_WORK:
        return said
    if HELD.search(job["reason"]):
        return f"{said}; mend that, then scontrol release {job['id']}"
    if NEVER.search(job["reason"]):
        return f"{said}; so it never begins: stop the run, and correct trainer_slurm_…"
    return said


def slurm_jobs(run_command, state_dir: str) -> dict[str, dict[str, str]]:
    """The jobs of this host's runs that Slurm holds, by run: {id, state, reason}; nothing is asked where it keeps none.

    Where Slurm does not answer, or not this user, the state of each run that has not ended by its own word is UNKNOWN.
    """
    runs_dir = os.path.join(state_dir, "runs")
    try:
        kept = [
            run for run in os.listdir(runs_dir) if os.path.exists(os.path.join(runs_dir, run, JOB_SCRIPT))
        ]
    except FileNotFoundError:
        return {}
    if not kept:
        return {}
    uid = os.stat(runs_dir).st_uid
    rc, out, error = run_command([*JOB_QUESTION, f"--user={pwd.getpwuid(uid).pw_name}"])
    found = {run: job for run, job in read_jobs(out).items() if run in kept} if rc == 0 else {}
    if rc == 0 and (os.geteuid() in (0, uid) or not hides_jobs(run_command)):
        return found
    reason = HIDDEN if rc == 0 else (error.strip().splitlines() or ["squeue does not answer"])[-1]
    going_on = [
        run for run in kept if (run_status(os.path.join(runs_dir, run)) or {}).get("state") not in ENDED
    ]
    return {**{run: {"id": "", "state": "UNKNOWN", "reason": reason} for run in going_on}, **found}


def hides_jobs(run_command) -> bool:
    """Whether Slurm shows users their own jobs alone."""
    _, out, _ = run_command(["timeout", "20", "scontrol", "show", "config"])
    return re.search(r"(?m)^PrivateData .*jobs", out) is not None


def known_runs(run_command, keeper: str, state_dir: str, patience: float = PATIENCE) -> dict:
    """The host's runs: time (s since the epoch), active (names), runs ({name: status.json, or that of its job}).

    patience: seconds that Slurm has to answer. Raises OSError where the user that looks may not.
    """
    runs_dir = os.path.join(state_dir, "runs")
    try:
        names = sorted(os.listdir(runs_dir))
    except FileNotFoundError:
        names = []
    found = {name: run_status(os.path.join(runs_dir, name)) for name in names}
    runs = {name: status for name, status in found.items() if status}
    jobs = slurm_jobs(functools.partial(within, patience), state_dir) if keeper == "systemd" else {}
    runs.update({run: with_job(runs[run], job) for run, job in jobs.items() if run in runs})
    return {
        "time": time.time(),
        "active": active_runs(run_command, keeper, state_dir, jobs),
        "runs": runs,
    }


def chosen_run(asked: str, active: list[str], known: list[str]) -> str:
    """The run that is meant: the `asked` one; with "", the only one that is active, or the newest; "" where none is.

    known: all runs, those that are active first, then the newest first.
    """
    if asked or len(active) > 1:
        return asked if asked in known else ""
    return next(iter(known), "")


def with_job(status: dict, job: dict[str, str]) -> dict:
    """A run's status with what Slurm says of its job."""
    waits = {} if job["state"] in JOB_AT_WORK else {"state": "queued", "reason": None}
    return {**status, **waits, "job": job_words(job)}


def active_runs(run_command, keeper: str, state_dir: str, jobs: dict | None = None) -> list[str]:
    """Names of the runs that are alive here, or wait in Slurm's queue; jobs: `slurm_jobs`, if asked already."""
    if keeper == "process":
        runs_dir = os.path.join(state_dir, "runs")
        return sorted(
            {os.path.basename(d) for d in run_processes().values() if os.path.dirname(d) == runs_dir}
        )
    units = _units(run_command, UNIT + "*")
    # A host that boots may be reached before its network is as whole as a unit waits for.
    _, out, _ = run_command(["systemctl", "list-jobs", "--plain", "--no-legend", "--full"], check_rc=True)
    units += [words[1] for words in map(str.split, out.splitlines()) if words[2:3] == ["start"]]
    by_unit = {unit.removeprefix(UNIT).removesuffix(".service") for unit in units if unit.startswith(UNIT)}
    return sorted({*by_unit, *(slurm_jobs(run_command, state_dir) if jobs is None else jobs)})


def busy(said: list[Mapping]) -> list[str]:
    """What has hosts' cards, cores or wire, in words: runs, then units of ours that are none. said: `host_facts`."""
    runs = {f"run {name}" for one in said for name in one.get("active", ())}
    return sorted(runs) + sorted({unit for one in said for unit in one.get("at_work", ())})


def kinds_of(units: Iterable[str]) -> list[str]:
    """Patterns of these units' names for systemctl: on each host one has a name of its own, whose end is by chance."""
    return list(dict.fromkeys(re.sub(r"-[0-9a-f]{8}\.service$", "-*", unit) for unit in units))


def at_work(pid: int, proc: str = "/proc") -> bool:
    """Whether a process is of such a unit, by its control group."""
    try:
        with open(f"{proc}/{pid}/cgroup") as file:
            return f"/{WORK}" in file.read()
    except OSError:  # gone
        return False


def work_units(run_command, keeper: str) -> list[str]:
    """Names of the units of ours that would be in a run's way here. Without systemd there are none."""
    return sorted(_units(run_command, *WORKING)) if keeper == "systemd" else []


def _units(run_command, *patterns: str) -> list[str]:
    """The units of these names that are alive; ends the module where systemd does not say: none would seem to be."""
    command = ["systemctl", "list-units", *patterns, ALIVE, "--plain", "--no-legend", "--full"]
    _, out, _ = run_command(command, check_rc=True)
    return [line.split()[0] for line in out.splitlines() if line.split()]


def runs_at_boot(keeper: str) -> set[str]:
    """Names of the runs whose unit is started at boot, ended or not."""
    links = glob.glob(AT_BOOT) if keeper == "systemd" else ()
    return {os.path.basename(link).removeprefix(UNIT).removesuffix(".service") for link in links}


def kept_releases(run_command, keeper: str, etc_dir: str, state_dir: str) -> set[str]:
    """Paths of the releases that runs go on with here: of those alive, and those whose unit is started at boot.

    A run that ended while nobody followed it is one of these, until its unit is put to rest: its launcher, which sees
    that nothing is to be done, must be there, or the unit fails.
    """
    runs = set(active_runs(run_command, keeper, state_dir)) | runs_at_boot(keeper)
    named = set()
    for run in runs:
        with contextlib.suppress(FileNotFoundError):
            named.add(run_variables(os.path.join(etc_dir, "runs", f"{run}.env")).get(RELEASE, ""))
    return {os.path.realpath(path) for path in named if path}


def run_variables(path: str) -> dict[str, str]:
    """The variables of RUN.env, a file in systemd's EnvironmentFile format: KEY=VALUE, quoted where needed."""
    variables = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in shlex.split(line, comments=True):
                key, _, value = word.partition("=")
                variables[key] = value
    return variables


def opened(path: str):
    """A file of a run's directory, open for its bytes. Raises OSError.

    The directory is the service user's: neither a link nor a pipe there shall hold this up.
    """
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def run_status(run_dir: str) -> dict | None:
    """The run's status.json; with the state `unknown` alone if there is none to read; None without a
    directory.
    """
    if not os.path.isdir(run_dir):
        return None
    try:
        with opened(os.path.join(run_dir, "status.json")) as file:
            status = json.loads(file.read(MOST))
        return {**status, "state": str(status["state"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {"state": "unknown"}


def interfaces(module) -> dict[str, list[str]]:
    """IPv4 addresses of every interface: {name: [address, …]}; `module` runs commands."""
    found: dict[str, list[str]] = {"lo": ["127.0.0.1"]}  # also where there is no `ip`
    ip = module.get_bin_path("ip", opt_dirs=["/usr/sbin", "/sbin"])
    if ip:
        _, out, _ = module.run_command([ip, "-json", "-4", "address", "show"])
        try:
            links = json.loads(out or "[]")
        except ValueError:
            links = []
        for link in links:
            addresses = [a["local"] for a in link.get("addr_info", []) if "local" in a]
            if addresses:
                found[link["ifname"]] = addresses
    return found


def free_bytes(path: str) -> int:
    """Bytes that an unprivileged user may still write below `path` (or its nearest parent that exists)."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def cards() -> bool:
    """Whether the host has NVIDIA's driver loaded."""
    return os.path.exists("/proc/driver/nvidia/version")


def gpus(seconds: float = PATIENCE) -> list[list[str]] | None:
    """The host's NVIDIA GPUs, each with its GPU_FIELDS; none without a driver or nvidia-smi; None without its answer.

    It may hang, or fail: where the driver was upgraded below it, or has lost its cards.
    """
    if not cards():
        return []
    query = ["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"]
    status, out, _ = within(seconds, query)
    if status not in (0, NOT_THERE):
        return None
    rows = [[value.strip() for value in line.split(",")] for line in out.splitlines()]
    return [row for row in rows if len(row) == len(GPU_FIELDS)]
