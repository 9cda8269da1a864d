"""Follow a run live, while the task runs.

Every host's worker polls its own host over its own connection (one small shell command a poll) and lays what
it saw into a spool directory of this ansible-playbook. The worker of the first host also reads the spool and
draws one line: step, loss, tokens/s, time left, slowest host. Only this file knows how a run looks from
outside; hosts never call back.

The task itself never fails: it returns an `outcome`, so that the play can stop the other hosts and fetch the
logs before it says what went wrong.
"""

from __future__ import annotations

import contextvars
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from host_runs import JOB_SCRIPT, UNIT
from live_frame import clean
from run_keeper import MOST, STAMP, UNREAD, journal_command, read_state, shown, state_command
from telling import with_rows

from trainer.words import span

display = Display()

# Workers have no terminal. This module is first imported by the main process, which looks the action up
# before it forks.
ON_A_TERMINAL = sys.stdout is not None and sys.stdout.isatty()

WINDOW = 65536  # bytes of metrics.jsonl read at most in one poll, and of a failed rank's log
RECENT_STEPS = 20  # steps over which hosts are compared
LOG_LINES = 15  # of a failed rank
BOOT = 180.0  # seconds that a host which shuts down, or has booted, has until systemd is to start its unit
WORD = 15.0  # seconds that a host has to say how a job ended that Slurm holds no more; who stops it tells each host
# Seconds for an answer, after which a host is silent: sshd may let us in where a disk hangs. SSH itself gives up a host
# that is gone after 75 (ServerAliveInterval, ServerAliveCountMax), and a few more for new tries.
PATIENCE = 120.0
ASLEEP = 30.0  # seconds between two turns of what draws, from which the controller itself has stood still
DENIED = 4  # exit code of a poll
FINAL = ("finished", "stopped", "failed")
SIGNALS = (signal.SIGINT, signal.SIGTERM)

# What an exit code of the trainer means, and what to do about it.
EXITS = {
    1: (
        "a fault of the machine or of the trainer",
        "Cure what the log names; report it if that is the trainer.",
    ),
    2: ("bad input, nothing was started", "Correct what the log names."),
    3: ("the loss diverged (not a number)", "Lower the learning rate, or raise warmup_steps."),
    4: ("out of memory", "Lower micro_batch_size or sequence_length."),
    5: (
        "it lost its peers",
        "The peers' logs say why. If none of them failed, look at the network between the hosts.",
    ),
}

AFTERWARDS = (("Then", "resume"), ("All logs", "logs"))  # a trial has neither


# --- one host, polled ---------------------------------------------------------------------------------------


@dataclass
class View:
    """What the controller knows of one host of the run.

    `state` is that of the keeper (systemd, or the process group): active, ended, or unknown before the first
    answer. `code` is the launcher's exit code, `cause` systemd's word for its end (oom-kill, signal, …);
    `seen` is controller time, and so is `moved`: when it last had something new to tell. `due`: its unit is still to
    start, for the host boots, or is about to. `denied`: its user may not read the run directory, and will not be the
    next time.
    """

    host: str
    state: str = "unknown"
    code: int | None = None
    cause: str = ""
    status: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)
    compute_seconds: list[float] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    offset: int = 0
    seen: float = 0.0
    moved: float = 0.0
    silent_since: float | None = None
    due: bool = False
    denied: bool = False
    error: str = ""

    @property
    def result(self) -> str:
        """running, finished, stopped or failed: by the launcher's exit, or by its word where systemd forgot that."""
        if self.state != "ended":
            return "running"
        if self.code:
            return "stopped" if self.code == 75 else "failed"
        if self.status.get("state") in FINAL:
            return self.status["state"]
        return "finished" if self.code == 0 else "failed"

    @property
    def attempt(self) -> int:
        """The attempt that it was in last, 0 before the first."""
        return self.status.get("attempt") or 0

    def has_gone_on(self, attempt: int) -> bool:
        """Whether it takes part, or took, in a later attempt than that.

        What only starts, and not for a reason, may have the number of the attempt before this start of the run.
        """
        state = self.status.get("state")
        begun = bool(self.status.get("note")) if state == "starting" else state not in (None, "queued")
        return begun and self.attempt > attempt


def poll_command(keeper: str, run: str, run_dir: str, offset: int) -> str:
    """The shell command of one poll: keeper's state, status.json, and at most WINDOW new bytes of
    metrics.jsonl.
    """
    state = state_command(keeper, run, run_dir)
    place = shlex.quote(run_dir)
    # A directory that is gone may come back, with a mount or a disk; what the user may not enter stays closed.
    enter = (
        f'cd {place} || {{ at={place}; until [ -e "$at" ]; do at=$(dirname "$at"); done; [ -x "$at" ] && exit 3; '
        f'echo "the user $(id -un) may not enter $at" >&2; exit {DENIED}; }}'
    )
    return (
        f"{enter}; echo ::keeper; {state}; echo ::status; {shown('status.json')}; "
        f"size=$(stat -c %s metrics.jsonl 2>/dev/null || echo 0); from=$((size - {WINDOW})); "
        f'[ "$from" -gt {offset} ] || from={offset}; '
        # A resumed run cuts its metrics back.
        f'[ "$from" -le "$size" ] || from=$((size > {WINDOW} ? size - {WINDOW} : 0)); '
        f'echo; echo "::metrics $from"; {shown("metrics.jsonl", WINDOW, "$from")}; true'
    )


def log_command(keeper: str, run: str, run_dir: str) -> str:
    """The shell command that shows the last lines of every log of the run on a host, the launcher's own too."""
    read = shown('"$log"', WINDOW, "$from")
    command = (
        f'for log in *.log; do [ -s "$log" ] || continue; from=$(($(stat -c %s "$log") - {WINDOW})); '
        f'[ "$from" -gt 0 ] || from=0; echo; echo "::log $log"; {read} | tail -n {LOG_LINES}; done'
    )
    if keeper == "systemd":
        journal = journal_command(run, f"--lines {LOG_LINES} --output cat", f"echo '{UNREAD}'")
        command += f"; [ -e ../{JOB_SCRIPT} ] || {{ echo; echo ::log launch.log; {journal}; }}"
    # A rank may have made any number of logs.
    return f"cd {shlex.quote(run_dir)}/logs || exit 0; {{ {command}; }} | head -c {MOST}"


class Denied(AnsibleError):
    """The user that Ansible logs in as may not read the run directory."""


def unread(run_dir: str, answer: dict) -> AnsibleError:
    """Why a poll (`answer`: its rc, stdout and stderr) could not read `run_dir`."""
    said = (answer["stderr"] or answer["stdout"]).strip()
    if answer["rc"] == DENIED:
        return Denied(said.splitlines()[-1])
    return AnsibleError(f"cannot read {run_dir}: {said[-200:]}")


def read_poll(view: View, output: str, now: float) -> None:
    """Take the answer to `poll_command` into `view`. What is not whole yet (a half-written line) is left for
    the next poll.
    """
    head, _, rest = output.partition("::status\n")
    status, _, metrics = rest.partition("\n::metrics ")
    keeper = read_state(head)
    view.seen, view.silent_since, view.denied, view.error = now, None, False, ""
    view.state = keeper["state"]
    code = keeper.get("ExecMainStatus", "") if view.state == "ended" else ""
    view.code = int(code) if code.isdigit() else None
    view.cause = keeper.get("Result", "")
    with_status = _json_object(status)
    if with_status and with_status != view.status:
        view.moved = now
    if with_status:
        view.status = with_status
    if keeper["queued"]:  # what status.json says is of an earlier start
        view.status = {**view.status, "state": "queued", "reason": keeper["queued"]}
    elif view.status.get("state") == "queued" and not with_status:
        view.status = {**view.status, "state": "starting", "reason": None}
    said = view.status.get("state")
    # A launcher that leaves because its host shuts down ends with 75, too.
    left = view.code == 75 and said == "restarting"
    view.due = keeper["waits"] or left or (keeper["forgotten"] and said not in FINAL)
    start, _, lines = metrics.partition("\n")
    whole = lines[: lines.rfind("\n") + 1]
    view.offset = int(start or view.offset) + len(whole.encode("utf-8", "surrogateescape"))
    for line in whole.splitlines():
        record = _json_object(line)
        if record and record.get("kind", "train") == "train":
            view.last, view.moved = record, now
            if "compute_seconds" in record:
                view.compute_seconds = [*view.compute_seconds, float(record["compute_seconds"])][
                    -RECENT_STEPS:
                ]


def read_logs(output: str) -> dict[str, list[str]]:
    """The answer to `log_command`: {log name: its last lines}. A name has a line to itself, whatever is before."""
    logs: dict[str, list[str]] = {}
    name = None
    for line in output.splitlines():
        if line.startswith("::log "):
            if name is not None and logs[name][-1:] == [""]:
                logs[name].pop()
            name = line.removeprefix("::log ")
            logs[name] = []
        elif name is not None:
            logs[name].append(line)
    return logs


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# --- all hosts, judged --------------------------------------------------------------------------------------


@dataclass
class Limits:
    """Seconds of patience: `settle` for the others to end, or to tell more, after the first ended; `unreachable` for a
    host that is silent. apart: each host is a run of its own, and every result counts.
    """

    settle: float = 20.0
    unreachable: float = 300.0
    apart: bool = False


def verdict(views: list[View], now: float, limits: Limits) -> tuple[str, View | None]:
    """What has become of the run, and the host to blame: (running | finished | stopped | failed |
    unreachable, host or None).

    The launchers of a run end it together, so that once the first has ended, the others get `settle` seconds to do so
    from when they last had something to tell. A host that is silent keeps no run from going on, nor from ending, on
    those that are left; nor does one that ended alone, and that the others have left behind.
    """
    behind = [] if limits.apart else left_behind(views)
    views = [v for v in views if v not in behind]
    ended = [v for v in views if v.state == "ended"]
    stopped = any(v.result == "stopped" for v in ended)
    # A host of a job that was cancelled may not have been told how it ended.
    failed = [v for v in ended if v.result == "failed" and not (stopped and v.code is None)]
    silent = [v for v in views if v.state != "ended" and v.silent_since is not None]
    if any(view.denied for view in silent):
        return "unreachable", next(view for view in silent if view.denied)
    others = [v for v in views if v.state != "ended"]
    told = max((v.moved for v in others if v.silent_since is None), default=0.0)
    if not ended or (
        others and (limits.apart or now - max(told, min(v.seen for v in ended)) < limits.settle)
    ):
        lost = [view for view in silent if now - view.silent_since > limits.unreachable]
        return ("unreachable", lost[0]) if len(lost) == len(others) else ("running", None)
    if failed:
        return "failed", blamed(failed, silent)
    if len(silent) < len(others):
        return "running", None
    return ("stopped" if stopped else "finished"), None


def overdue(view: View, now: float, begun: float, patience: float = PATIENCE) -> View:
    """The host as it is to be seen `now`: as silent, if it has told nothing for long, its poll not having come back.

    begun: since when it is asked. patience: seconds that it may take from one answer to the next.
    """
    heard = max(view.seen, begun)
    if view.state == "ended" or view.silent_since is not None or now - heard < patience:
        return view
    return replace(
        view, silent_since=heard, error="it lets us in, and then does not answer: a disk that hangs?"
    )


def left_behind(views: list[View]) -> list[View]:
    """The hosts that failed by themselves, or stopped in an earlier start: others have gone on without them, in a later
    attempt.
    """
    ended = [v for v in views if v.state == "ended" and v.result in ("failed", "stopped")]
    return [one for one in ended if any(other.has_gone_on(one.attempt) for other in views)]


def under_way(views: list[View]) -> bool:
    """Whether a run that was started has made a step on a host, or waits on all that answer for the runs before it."""
    heard = [view for view in views if view.silent_since is None]
    if heard and all(view.status.get("state") == "queued" for view in heard):
        return True
    return any(view.status.get("state") == "running" and view.status.get("step") for view in views)


def blamed(failed: list[View], silent: list[View]) -> View:
    """The host that failed first: a failure of its own outranks lost peers, and a host that fell silent
    explains those.
    """
    own = [v for v in failed if v.code != 5]
    if not own and silent:
        return silent[0]
    return min(own or failed, key=lambda v: (v.status.get("updated") or 0, v.seen))


def slowest(views: list[View]) -> tuple[str, float] | None:
    """The host whose own share of a step takes longest, and by what part more than the fastest; None if all
    are within 5 %.
    """
    taking_part = [v for v in views if v.compute_seconds and v.silent_since is None]
    means = {v.host: sum(v.compute_seconds) / len(v.compute_seconds) for v in taking_part}
    if len(means) < 2 or min(means.values()) <= 0:
        return None
    host = max(means, key=means.__getitem__)
    lag = means[host] / min(means.values()) - 1
    return (host, lag) if lag > 0.05 else None


# --- words --------------------------------------------------------------------------------------------------


def progress_line(run: str, views: list[View], now: float) -> str:
    """One line on the whole run, from the host that has got furthest."""
    ahead = max(views, key=lambda v: (v.last.get("step") or v.status.get("step") or 0, v.seen))
    status = {
        **ahead.last,
        **{k: v for k, v in ahead.status.items() if v is not None},
    }  # its speed is smoothed
    step, steps = status.get("step") or 0, status.get("steps") or 0
    state = ahead.status.get("state", "starting")
    parts = [run]
    if step and steps:
        parts.append(f"step {step}/{steps} ({100 * step // steps} %)")
    if state != "running" or not step:
        parts.append(state)
    if status.get("loss") is not None:
        parts.append(f"loss {status['loss']:.4f}")
    if status.get("tokens_per_second"):
        parts.append(f"{status['tokens_per_second']:,.0f} tokens/s")
    if ahead.status.get("eta_seconds") is not None and state not in FINAL:
        parts.append(f"{span(ahead.status['eta_seconds'])} left")
    lag = slowest(views)
    if lag:
        parts.append(f"slowest {lag[0]} (+{lag[1]:.0%})")
    if state in ("queued", "starting", "restarting", "stalled") and ahead.status.get("reason"):
        parts.append(str(ahead.status["reason"]).splitlines()[0])
    for view in views:
        if view.silent_since is not None and view.state != "ended":
            parts.append(f"{view.host} unreachable for {span(now - view.silent_since)}")
        elif view.state == "unknown":
            parts.append(f"{view.host} has not answered yet")
        elif view.due and view.state != "ended":
            parts.append(f"{view.host} waits to start again")
        elif view.state == "ended" and view.result != "finished":
            parts.append(f"{view.host} {view.result}")
    return "  ".join(parts)


def host_line(view: View, now: float) -> str:
    """What one host of the run does now."""
    if view.state == "ended":
        return view.result
    if view.silent_since is not None:
        return f"unreachable for {span(now - view.silent_since)}"
    if view.state == "unknown":
        return "has not answered yet"
    if view.due:
        return "waits to start again"
    state = str(view.status.get("state") or "starting")
    if state != "running":
        reason = str(view.status.get("reason") or "").splitlines()
        return ": ".join([state, *reason[:1]])
    parts = [state]
    if view.compute_seconds and view.last.get("step_seconds"):
        own = sum(view.compute_seconds) / len(view.compute_seconds)
        parts.append(f"computes {own:.2g} s of a step's {view.last['step_seconds']:.2g} s")
    if view.last.get("memory_peak_bytes"):
        parts.append(f"{view.last['memory_peak_bytes'] / 2**30:.1f} GiB")
    return ", ".join(parts)


def news(run: str, views: list[View], known: int) -> tuple[int, str]:
    """(attempt, line): the newest attempt, and what it was made for if it is newer than `known`; else an empty line."""
    newest = max(views, key=lambda v: v.status.get("attempt") or 0)
    attempt, note = newest.status.get("attempt") or 0, newest.status.get("note")
    if attempt <= known or not note:
        return max(attempt, known), ""
    step = newest.status.get("last_checkpoint") or 0
    return attempt, f"{run}  attempt {attempt}, from step {step}: {note}"


def warned(run: str, views: list[View], known: str) -> tuple[str, str]:
    """(warning, line): what the run's newest word warns of, and the line that says so if it is not `known` yet."""
    warning = max(views, key=lambda v: v.status.get("updated") or 0).status.get("warning") or ""
    return warning, f"{run}  warning: {warning}" if warning and warning != known else ""


def without(run: str, view: View, keeper: str) -> str:
    """The line on a host that failed while the run goes on without it."""
    reason = view.status.get("reason") if view.status.get("state") == "failed" else ""
    said = [line for tail in guilty_logs(view).values() for line in tail if line.strip()]
    why = STAMP.sub("", (str(reason).splitlines() or said[-1:] or [""])[0].strip())
    back = (
        f"`systemctl start {UNIT}{run}` there, as root, has it take part again, once that is cured"
        if keeper == "systemd"
        else "the next start of the run has it again"
    )
    return (
        f"{run}  warning: {view.host} failed, and the run goes on without it: {meaning(view)[0]}"
        f"{f': {why}' if why else ''}; {back}"
    )


def meaning(view: View) -> tuple[str, str]:
    """(what happened, what to do) for a host that failed."""
    code = view.code
    if view.due and code is None:
        unit = f"{UNIT}{view.status.get('run', 'RUN')}"
        return (
            "its unit does not run, and nothing says that the run has ended: it has not started since the host booted",
            f"See there, as root, what keeps it from starting: systemctl status {unit}; journalctl -b -u {unit}.",
        )
    if view.cause == "oom-kill":
        return (
            "the kernel killed it: the host ran out of memory",
            "Lower micro_batch_size or sequence_length.",
        )
    if code in EXITS:
        return f"{EXITS[code][0]} (exit code {code})", EXITS[code][1]
    if code is None and view.status.get("state") == "failed":
        return (
            "it failed, and systemd does not know its exit code any more",
            "Its reason and the log below say more.",
        )
    if code is None or view.cause == "signal" or code >= 128:
        return (
            "its processes were killed from outside",
            "See who did (memory, a person, a reboot).",
        )
    return f"exit code {code}", "The log below says more."


def explain(run: str, outcome: str, view: View | None, views: list[View], commands: dict[str, str]) -> str:
    """The message for a run that has not finished: where, why, the rank's last lines, what to do."""
    step = max((v.last.get("step") or v.status.get("step") or 0 for v in views), default=0)
    if outcome == "running":
        return f"Run {run} goes on. Watch it: {commands.get('follow')}\nStop it: {commands.get('stop')}"
    if outcome == "stopped":
        return f"Run {run} was stopped at step {step}; it is saved. Resume it: {commands.get('resume')}"
    if outcome == "unreachable" and view.denied:
        return (
            f"Run {run} goes on, but cannot be followed: on {view.host}, {view.error}. Log in as a user of the group "
            "of trainer_user (site.yml puts the user that it logs in as into it), without ansible_become. "
            f"Then follow it: {commands.get('follow')}"
        )
    if outcome == "unreachable":
        return (
            f"Run {run}: {view.host} has not answered for {span(time.time() - view.silent_since)} ({view.error}). "
            f"The run may go on there. Look at the host, then follow it again: {commands.get('follow')}"
        )
    if view.state != "ended":  # it fell silent, and the others lost it
        others = ", ".join(v.host for v in views if v.result == "failed")
        what, cure = (
            f"it fell silent and was lost as a peer by {others}",
            "See whether it has power and network.",
        )
        logs: dict[str, list[str]] = {}
    else:
        what, cure = meaning(view)
        logs = guilty_logs(view)
    reason = view.status.get("reason") if view.status.get("state") == "failed" else ""
    lines = [f"Run {run} failed on {view.host} after step {step}: {what}."]
    if reason:
        lines += ["  It says:", *(f"    {line}" for line in reason.splitlines())]
    for name, tail in logs.items():
        lines += [f"  Last lines of {name} on {view.host}:", *(f"    {line}" for line in tail)]
    for other in views:
        if other is not view:
            lines.append(f"  {other.host}: {meaning(other)[0] if other.result == 'failed' else other.result}")
    lines.append(f"What to do: {cure}")
    lines += [f"  {word}: {commands[key]}" for word, key in AFTERWARDS if key in commands]
    return "\n".join(lines)


def guilty_logs(view: View) -> dict[str, list[str]]:
    """The last lines worth showing: those of the rank that the launcher blames, else of all logs that have
    any.

    A launcher that refused bad input has started no rank, so that the ranks' logs are an earlier attempt's.
    """
    if view.code == 2 and view.logs.get("launch.log"):
        return {"launch.log": view.logs["launch.log"]}
    named = re.search(r"\brank (\d+)\b", str(view.status.get("reason") or ""))
    name = f"rank-{named[1]}.log" if named else ""
    ranks = {log: tail for log, tail in view.logs.items() if tail and log.startswith("rank-")}
    return {name: ranks[name]} if name in ranks else ranks or view.logs


# --- the plugin ---------------------------------------------------------------------------------------------


def in_thread(call: Callable[[], None]) -> threading.Thread:
    """A thread that makes a call, with what Ansible keeps of the current task, and ends with the process.

    Signals belong to the main thread, which knows when one would do harm (Screen.draw).
    """
    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), daemon=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    thread.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return thread


class Spool:
    """A directory of this ansible-playbook, in which each host's worker keeps its view for the one that
    draws.
    """

    def __init__(self, task_id: str) -> None:
        self.ansible = os.getppid()
        self.path = os.path.join(C.DEFAULT_LOCAL_TMP, f"follow-{task_id}")
        os.makedirs(self.path, mode=0o700, exist_ok=True)

    def end_if_alone(self) -> None:
        """End this worker where ansible-playbook itself is gone, as with its terminal: it would look on for ever."""
        if os.getppid() != self.ansible:
            os._exit(1)

    def put(self, name: str, value: dict) -> None:
        path = os.path.join(self.path, name)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(path + ".new", path)

    def get(self, name: str) -> dict:
        try:
            with open(os.path.join(self.path, name), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return {}


class ActionModule(ActionBase):
    """Arguments: run, run_dir, keeper, hosts (of the run, in order), apart, detach, commands, refresh, log_every,
    unreachable.
    """

    TRANSFERS_FILES = False
    _supports_check_mode = False
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = self._task.args
        host = task_vars["inventory_hostname"]
        self.hosts = [str(h) for h in args["hosts"]]
        self.run_name, self.run_dir, self.keeper = str(args["run"]), str(args["run_dir"]), str(args["keeper"])
        self.refresh = float(args.get("refresh", 2))
        self.log_every = float(args.get("log_every", 10))
        self.limits = Limits(unreachable=float(args.get("unreachable", 300)))
        if args.get("apart"):
            self.limits.apart = True
        self.detach = bool(args.get("detach"))
        self.commands = {k: str(v) for k, v in args["commands"].items()}
        self.spool = Spool(self._task._uuid)
        self.view = View(host)
        self.wordless: float | None = (
            None  # since when nothing keeps it, and the host has not said how it ended
        )
        self.over = threading.Event()
        # A thread of its own: a host that stopped answering holds its poll for a minute, or for as long as its disk
        # hangs, and the line must say so meanwhile.
        poller = in_thread(self._poll)
        outcome = self._draw() if host == self.hosts[0] else self._wait()
        self.over.set()
        poller.join(timeout=10)
        # Who does not answer now would hold up whatever is asked of it, too.
        hung = poller.is_alive()
        result.update(changed=False, outcome=outcome, state=self.view.result, last=self.view.last, hung=hung)
        return result

    def _poll(self) -> None:
        """Keep this host's view in the spool fresh until the run is over."""
        while not self.over.is_set():
            self._poll_once()
            self.spool.put(self.view.host, asdict(self.view))
            if self.view.state == "ended":
                return
            self.over.wait(self.refresh)

    def _poll_once(self) -> None:
        now = time.time()
        try:
            answer = self._ask(poll_command(self.keeper, self.run_name, self.run_dir, self.view.offset))
            read_poll(self.view, answer, time.time())
            wordless = self.keeper == "systemd" and self.view.code is None and self.view.result == "failed"
            wordless &= self.view.status.get("state") not in FINAL
            wordless |= self.view.due and self.view.state == "ended"
            self.wordless = (self.wordless or now) if wordless else None
            if wordless and now - self.wordless < (BOOT if self.view.due else WORD):
                self.view.state = "active"
            if self.view.result == "failed":
                self.view.logs = read_logs(self._ask(log_command(self.keeper, self.run_name, self.run_dir)))
        except (AnsibleError, OSError, ValueError) as error:
            # No longer than a poll may take: this machine itself may have been asleep meanwhile.
            self.view.silent_since = self.view.silent_since or max(now, time.time() - PATIENCE)
            self.view.denied = isinstance(error, Denied)
            self.view.error = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            if isinstance(error, AnsibleConnectionFailure):
                self._connection.reset()

    def _ask(self, command: str) -> str:
        answer = self._low_level_execute_command(command, sudoable=False)
        if answer["rc"] != 0:
            raise unread(self.run_dir, answer)
        return answer["stdout"]

    def _wait(self) -> dict:
        """In the workers of all hosts but the first: wait for the outcome that the first one finds."""
        while not (outcome := self.spool.get(".outcome")):
            self.spool.end_if_alone()
            time.sleep(min(1.0, self.refresh))
        return outcome

    def _draw(self) -> dict:
        """In the worker of the first host: draw until the run is over, and find the outcome."""
        screen = Screen(self.log_every)
        attempt, warning = 0, ""
        since = turned = time.time()
        named: set[str] = set()  # hosts of which it is told that the run goes on without them
        while True:
            time.sleep(min(1.0, self.refresh))
            self.spool.end_if_alone()
            now = time.time()
            if now - turned > ASLEEP:  # this machine was, and has heard of no host meanwhile
                since = now
            turned = now
            views = [View(**(self.spool.get(h) or {"host": h})) for h in self.hosts]
            views = [overdue(view, now, since, PATIENCE + self.refresh) for view in views]
            what, culprit = verdict(views, now, self.limits)
            over = what != "running" or (self.detach and under_way(views))
            attempt, line = news(self.run_name, views, attempt)
            if line:
                screen.tell(line)
            warning, line = warned(self.run_name, views, warning)
            if line:
                screen.tell(line)
            behind = [] if self.limits.apart else left_behind(views)
            for view in behind:
                if view.host not in named and view.result == "failed":
                    screen.tell(without(self.run_name, view, self.keeper))
                    named.add(view.host)
            rows = [(view.host, host_line(view, now)) for view in views]
            # The steps of a host that was left behind may be ahead of what the others take anew.
            shown = [replace(view, last={}, status={}) if view in behind else view for view in views]
            screen.draw(progress_line(self.run_name, shown, now), now, last=over, rows=rows)
            if over:
                break
        message = "" if what == "finished" else explain(self.run_name, what, culprit, views, self.commands)
        outcome = {"result": what, "host": culprit.host if culprit else "", "message": message}
        self.spool.put(".outcome", outcome)
        return outcome


class Screen:
    """One line, redrawn on a terminal; in a log, a new line when it changed, at a calm rate.

    Where the callback live has a region at the bottom of the terminal, it shows a line a host, too.
    """

    def __init__(self, log_every: float) -> None:
        self.log_every = log_every
        self.drawn_at = 0.0
        self.drawn = ""

    def draw(self, line: str, now: float, last: bool, rows: Iterable[tuple[str, str]] = ()) -> None:
        """Show `line`, if it is time to; `last` leaves it standing. rows: (host, what it does now)."""
        line, rows = clean(line), [(clean(host), clean(words)) for host, words in rows]
        if ON_A_TERMINAL:
            if getattr(display, "led_by_region", False) and not last:
                line = with_rows(line, rows)
            else:
                line = line[: max(20, display.columns)]
            if line != self.drawn or last:
                self._show(f"\r\x1b[K{line}", screen_only=True, newline=last)
        elif line != self.drawn and (last or now - self.drawn_at >= self.log_every):
            self._show(line)
            self.drawn_at = now
        else:
            return
        self.drawn = line

    def tell(self, line: str) -> None:
        """A line that stays."""
        line = clean(line)
        self._show(f"\r\x1b[K{line}" if ON_A_TERMINAL else line)
        self.drawn = ""

    def _show(self, text: str, **how) -> None:
        # A worker that dies of Ctrl-C while it holds the lock of the queue to the main process would hang
        # that for ever.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            display.display(text, **how)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
