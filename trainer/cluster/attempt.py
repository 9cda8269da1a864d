"""One attempt on this host: torchrun's agent in a process of its own, members and ranks given, and its ranks below it.

The agent is forked from the launcher, which has imported torch once: an attempt begins without that wait. Whatever it
leaves behind becomes the launcher's own child (PR_SET_CHILD_SUBREAPER), so that `Attempt.kill` finds every process.
"""

import contextlib
import ctypes
import functools
import json
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainer import waiting
from trainer.cluster.membership import LOST, STOPPED, Plan
from trainer.cluster.store import LEASE
from trainer.config import Config
from trainer.environment import Environment, number

MARKS = ("error: ", "stopped: ")
LINES, LONG = 50, 2000  # of a rank's last words at most: lines, and characters of each
MEMORY = "; the kernel does so when memory runs out: see `journalctl -k`"  # of who was killed
MEETING_PLACE = "trainyard"
MEETING = {"DistError", "RendezvousError", "TimeoutError"}  # what torch raises where hosts do not meet
# What NCCL's watchdog says in a rank that it then aborts for another one's fault.
NCCL_LOST = re.compile(r"Watchdog caught collective operation timeout|ncclRemoteError[^\n]*")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds since the launcher renewed this host's record, after which its agent ends the ranks, where the launcher itself
# stands still (SIGSTOP, a machine that swaps) and does not: before the others begin without this host.
UNWATCHED = LEASE - 1
GRACE = 5.0  # seconds for ranks to end by themselves once another one has failed
ENDS = 30.0  # seconds that the kernel may take to end a killed process: it may have much memory to give back
HELD = "; process {} was killed and does not end (a driver or a disk holds it): see `journalctl -k`; a reboot helps"
_held: set[int] = set()  # processes that were killed and do not end

# torch's flight recorder: which collectives each rank on NCCL has begun and ended, written when one takes too long.
FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its older name
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "{}/flight-",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{}/flight-",
}
RAS_PORT, RAS_PORTS = (
    28028,
    1000,
)  # NCCL's own, where it tells how its ranks are; each run of a host needs another


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended on this host: the exit code of the rank that failed first (-signal), and why.

    cut_off: the store was silent then.
    """

    code: int
    reason: str
    cut_off: bool = False


class Work(NamedTuple):
    """What an attempt's processes have done until now, of those that are alive: the figures fall when one ends.

    used: seconds of processors. disk: a thread waits for one. signs: how often ranks have written, and MiB and pages
    that they have read; None where the system does not say. waiting: all ranks wait for others (trainer/waiting.py).
    """

    used: float
    disk: bool
    signs: int | None
    waiting: bool


def prepare() -> None:
    """Import what agents need, before any is forked, and become the parent of what they leave behind."""
    # An agent that ends a moment before the others would otherwise be reported at length; the outcome says what counts.
    # Its loggers take their level when they are imported.
    before = os.environ.get("LOGLEVEL")
    os.environ["LOGLEVEL"] = "CRITICAL"
    try:
        import torch.distributed.elastic.multiprocessing
        import torch.distributed.elastic.rendezvous.static_tcp_rendezvous
        import torch.distributed.launcher.api  # noqa: F401
    finally:
        os.environ.pop("LOGLEVEL")
        if before is not None:
            os.environ["LOGLEVEL"] = before
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class Attempt:
    """The ranks of `plan` on host number `node`, under way from the moment that this is made.

    renewed: when this host's record in the store was renewed (time.monotonic), from then on told by `is_renewed`; None
    where there are no other hosts. Raises OSError where the system has no process for them.
    """

    def __init__(
        self,
        plan: Plan,
        node: int,
        config: Config,
        environment: Environment,
        arguments: list,
        renewed: float | None = None,
    ):
        self.plan, self.begin = plan, time.monotonic()
        self._renewed = memoryview(mmap.mmap(-1, 8)).cast("d")  # shared with the agent
        self._renewed[0] = renewed or 0.0
        self._environment = environment
        me = next(number for number, member in enumerate(plan.members) if member.node == node)
        ranks = [member.processes for member in plan.members]
        self.ranks = range(sum(ranks[:me]), sum(ranks[: me + 1]))
        head = plan.members[0]
        variables = {
            "NNODES": len(plan.members),
            "NODE_RANK": me,
            "NPROC_PER_NODE": ranks[me],
            "RANK_OFFSET": self.ranks.start,
            "WORLD_SIZE": sum(ranks),
            "MASTER_ADDR": head.address,
            "MASTER_PORT": head.port,
            "TRAINYARD_RUN_DIR": environment.run_dir,
            "TRAINYARD_CACHE_DIR": environment.cache_dir,
            "TRAINYARD_ATTEMPT": plan.attempt,
            "TRAINYARD_REASON": plan.reason,
            "TRAINYARD_EXPECTED": number("NNODES", 1),  # hosts that the run was started on
            "TRAINYARD_LEFT_OUT": ",".join(plan.left_out),
        }
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // ranks[me])
        launcher = os.getpid()
        self._answer, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._answer)
            os.close(write)
            raise
        if self._pid == 0:
            try:
                os.close(self._answer)
                for asks in (signal.SIGTERM, signal.SIGINT):
                    # The launcher's to hear. Not SIG_IGN, which ranks would inherit.
                    signal.signal(asks, lambda *_: None)
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == launcher:
                    os.environ.update({name: str(value) for name, value in variables.items()})
                    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
                    for name, value in FLIGHT_RECORDER.items():
                        os.environ.setdefault(name, value.format(environment.run_dir / "logs"))
                    port = RAS_PORT + zlib.crc32(config.run.encode()) % RAS_PORTS
                    os.environ.setdefault("NCCL_RAS_ADDR", f"127.0.0.1:{port}")
                    os.environ["TRAINYARD_LAUNCHER"] = str(os.getpid())
                    if renewed is not None:
                        told = (self._renewed, environment.host, write)
                        threading.Thread(target=_end_unwatched, args=told, daemon=True).start()
                    _tell(write, _run_agent(config, arguments, variables))
            except RuntimeError as error:  # no thread for it
                cure = "look at this host's memory, and at how many processes it allows"
                _tell(write, {"code": 1, "reason": f"the ranks could not be started: {error}; {cure}"})
            finally:
                os._exit(0)
        os.close(write)

    def is_renewed(self, at: float) -> None:
        """The launcher has renewed this host's record, at `at`: its ranks may go on."""
        self._renewed[0] = at

    @property
    def has_started(self) -> bool:
        """Whether a rank of this attempt, on this host, has come to life."""
        mark = f"attempt {self.plan.attempt}, rank "
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                if mark in self._log(rank).read_text(errors="replace"):
                    return True
        return False

    def work(self) -> Work:
        """What its processes have done by now."""
        ticks, disk, signs, waits = 0, False, 0, 0
        for pid, _ in _family(self._pid):
            is_waiting = False
            for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
                with contextlib.suppress(OSError):
                    # The 2nd field, a name in brackets, may hold anything. State, major faults, user and system time
                    # are the 3rd, 12th, 14th and 15th.
                    name, _, more = stat.read_bytes().partition(b"(")[2].rpartition(b")")
                    fields = more.split()
                    ticks += int(fields[11]) + int(fields[12])
                    disk = disk or fields[0] == b"D"
                    is_waiting |= name.decode(errors="replace") == waiting.NAME.format(stat.parent.name)
                    if signs is not None and pid != self._pid:
                        signs += int(fields[9])  # a mapped file is read without a call
            waits += is_waiting
            if pid != self._pid and signs is not None:  # the agent has nothing to do but look, and does
                try:
                    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                    told = {name: int(value) for name, value in (line.split(": ") for line in lines)}
                    # Calls, and not bytes: what a full disk refuses is a sign of life, too.
                    signs += told["syscw"] + (told["rchar"] >> 20)
                except (FileNotFoundError, ProcessLookupError):
                    pass
                except (OSError, KeyError, ValueError):
                    signs = None
        return Work(ticks / os.sysconf("SC_CLK_TCK"), disk, signs, waits >= len(self.ranks))

    def stopped(self) -> bool:
        """Whether one of its processes stands still, by SIGSTOP, until somebody lets it go on."""
        return any(state == b"T" for _, state in _family(self._pid))

    def poll(self, meanwhile: Callable[[], None] | None = None) -> Outcome | None:
        """How it ended, or None while it goes on. meanwhile: see `kill`."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            return None
        with os.fdopen(self._answer) as answer:
            text = answer.read()
        held = _kill_children(meanwhile)
        outcome = self._outcome(
            json.loads(text.splitlines()[0]) if text else {}, os.waitstatus_to_exitcode(status)
        )
        return replace(outcome, reason=with_held(outcome.reason, held))

    def kill(self, meanwhile: Callable[[], None] | None = None) -> str:
        """End all of its processes at once; what they were saving stays invisible. Says which do not end.

        meanwhile: called once a second while the kernel ends them.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._answer)
        return _kill_children(meanwhile)

    def _outcome(self, told: dict, status: int) -> Outcome:
        """status: the agent's exit code, or minus the signal that ended it."""
        if "failures" not in told:
            ended = f"was killed by {_signal(status)}" if status < 0 else "ended without a word"
            reason = told.get("reason") or f"torchrun's agent {ended}"
            return Outcome(told.get("code", 1), reason, told.get("cut_off", False))
        host = self._environment.host
        rank, code = _root_cause(told["failures"])
        words = _words(self._log(rank))
        tail = _last_words(words)
        if code == -signal.SIGABRT and (found := NCCL_LOST.search(words)):
            return Outcome(LOST, f"rank {rank} on {host} lost a peer: {found[0]}")
        if code < 0:
            # Elsewhere the first line stands alone.
            killed = f"rank {rank} on {host} was killed by {_signal(code)}"
            return Outcome(code, f"{killed}\nIts last lines:\n{tail}")
        return Outcome(code, tail or f"rank {rank} on {host} ended with exit code {code} and without a word")

    def _log(self, rank: int) -> Path:
        return self._environment.run_dir / "logs" / f"rank-{rank}.log"


def _signal(code: int) -> str:
    name = signal.Signals(-code).name
    return name + (MEMORY if name == "SIGKILL" else "")


def _run_agent(config: Config, arguments: list, variables: dict) -> dict:
    """Run torchrun's agent to its end, in the forked process; what `Attempt._outcome` takes:

    {code, reason, cut_off}, or {failures: [[rank, code, seconds since 1970], …]}, the first one first.
    """
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        PContext.close = functools.partialmethod(_close, PContext.close)
        rendezvous_handler_registry.register(MEETING_PLACE, _meeting_place)
        place = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        launch = LaunchConfig(
            min_nodes=variables["NNODES"],
            max_nodes=variables["NNODES"],
            nproc_per_node=variables["NPROC_PER_NODE"],
            run_id=config.run,
            rdzv_backend=MEETING_PLACE,
            rdzv_endpoint=place,
            rdzv_configs={"rank": variables["NODE_RANK"], "timeout": int(config.timeout_seconds)},
            local_addr=os.environ.get("CLUSTER_ADDRESS") or None,
            max_restarts=0,
            monitor_interval=0.2,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # each rank writes its own: commands/train.py
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(launch, sys.executable)("-m", "trainer", "train", *map(str, arguments))
            return {"code": 0, "reason": "finished"}
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
            return {"failures": [[rank, failure.exitcode, failure.timestamp] for rank, failure in failures]}
    except Exception as error:
        lines = str(error).strip().splitlines()
        said = lines[0] if lines else type(error).__name__
        if MEETING & {kind.__name__ for kind in type(error).__mro__}:
            waited = f"the hosts did not meet at {place} within {config.timeout_seconds:.0f} s"
            cure = "check the network between the hosts, and the firewall"
            return {"code": LOST, "reason": f"{waited}: {said}; {cure}"}
        cure = "if this names a library or a module, the environment is damaged: run site.yml, which tests it"
        return {
            "code": 1,
            "reason": f"the ranks could not be started: {type(error).__name__}: {said}; {cure}",
        }


def _tell(write: int, outcome: dict) -> None:
    """The agent's word for the launcher, which takes the first one."""
    os.write(write, f"{json.dumps(outcome)}\n".encode())


def _end_unwatched(renewed: memoryview, host: str, write: int) -> None:
    """The agent's thread: end ranks and agent once `renewed[0]` is UNWATCHED seconds ago.

    On a machine that may be short of anything; what is left of ranks then hears from the kernel that the agent is gone.
    """
    while (silent := time.monotonic() - renewed[0]) < UNWATCHED:
        time.sleep(0.25)
    try:
        why = f"{host} was cut off: its launcher stood still for {silent:.0f} s, and its ranks were ended without it"
        with contextlib.suppress(OSError):
            _tell(write, {"code": LOST, "reason": why, "cut_off": True})
        for _ in range(20):  # one may be missed by a look at all processes
            living = [pid for pid, state in _family(os.getpid())[1:] if state != b"Z"]
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not living:
                break
            time.sleep(0.05)
    finally:
        os._exit(0)


def _close(context, close, death_sig=None, timeout: float = 30) -> None:
    """The agent's end of the other ranks, once one has ended: soon where that one has failed.

    A rank that waits on a GPU for one that is gone hears no signal. Where all were asked to end, each has its time.
    """
    asked = all(failure.exitcode == STOPPED for failure in context._failures.values())
    close(context, death_sig, timeout if asked else GRACE)


def _meeting_place(parameters):
    """torch's static rendezvous, whose store listens on the head's own address alone instead of on every one."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    handler = static_tcp_rendezvous.create_rdzv_handler(parameters)
    handler.get_backend = lambda: MEETING_PLACE
    if handler.rank == 0:
        place = (handler.master_addr, handler.master_port)
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(place, family=family)
        handler._store = TCPStore(
            *place,
            handler.world_size,
            True,
            handler.timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    return handler


def _root_cause(failures: list) -> tuple[int, int]:
    """The rank that failed first and its code, of (rank, code, seconds since 1970), in the order of these.

    Whoever lost a peer, or was ended by the agent, came later: by SIGTERM, or after GRACE by SIGKILL.
    """
    begin = failures[0][2]
    own = [
        (rank, code)
        for rank, code, at in failures
        if code not in (LOST, STOPPED, -signal.SIGTERM)
        and (code != -signal.SIGKILL or at < begin + GRACE - 1)
    ]
    return own[0] if own else tuple(failures[0][:2])


def _words(path: Path) -> str:
    """What a rank's log has of the last attempt."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text[max(text.rfind("\n=== "), 0) :].strip()


def _last_words(attempt: str) -> str:
    """What a rank's words end with: its `error:` message, or its last lines; of what is long, the beginning.

    A reason goes into a variable of the next attempt and into the store, which both take no line of megabytes.
    """
    for mark in MARKS:
        at = attempt.rfind(f"\n{mark}")
        if at >= 0:
            lines = attempt[at + 1 + len(mark) :].strip().splitlines()
            break
    else:
        lines = attempt.splitlines()[-5:]
    return "\n".join(line if len(line) <= LONG else f"{line[:LONG]}…" for line in lines[:LINES])


def with_held(reason: str, held: str) -> str:
    """A reason with what `Attempt.kill` says, in its first line, which alone is shown elsewhere."""
    first, mark, rest = reason.partition("\n")
    return first + held + mark + rest


def _kill_children(meanwhile: Callable[[], None] | None = None) -> str:
    """Kill this process's children, and those that become its own by that, until none is left.

    Says which do not end; they are not waited for again. meanwhile: called once a second.
    """
    called = time.monotonic()
    until = called + ENDS
    while pids := [pid for pid in _children(os.getpid()) if pid not in _held]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not any([_has_ended(pid) for pid in pids]):
            if time.monotonic() > until:
                _held.update(pids)
                return HELD.format(", ".join(map(str, pids)))
            if meanwhile and time.monotonic() - called > 1:
                meanwhile()
                called = time.monotonic()
            time.sleep(0.05)
    return ""


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children(parent: int) -> list[int]:
    return [pid for pid, _, above in _processes() if above == parent]


def _family(pid: int) -> list[tuple[int, bytes]]:
    """A process and all below it, with their states, by one look at this machine's processes, which may be many."""
    below: dict[int, list[tuple[int, bytes]]] = {}
    states = {}
    for one, state, parent in _processes():
        below.setdefault(parent, []).append((one, state))
        states[one] = state
    found = [(pid, states.get(pid, b""))]
    for one, _ in found:
        found += below.get(one, [])
    return found


def _processes() -> Iterator[tuple[int, bytes, int]]:
    """(pid, state, parent) of each; their names, before these in /proc, may hold anything, in any encoding."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            yield int(stat.parent.name), state, int(parent)
