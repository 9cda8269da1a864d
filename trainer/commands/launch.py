"""`trainer launch`: this host's part in a run, from its first attempt to its end.

The launcher agrees with those of the other hosts, by a store that they share (cluster/store.py), on who takes part in
the next attempt (cluster/membership.py), and runs this host's ranks of it (cluster/attempt.py). It looks at all that
four times a second. Where the store does not answer it ends its ranks before the others may go on without this host.
However the run ends, status.json has the last word, with the reason.
"""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from trainer import metrics
from trainer.cluster import membership, store
from trainer.cluster.attempt import Attempt, Outcome, prepare
from trainer.cluster.membership import LOST, STOPPED, End, Host, Plan, Wait
from trainer.config import Config
from trainer.environment import Environment, number
from trainer.errors import BadInput

LOOK = 0.25  # seconds between two looks
OUT_OF_TOUCH = (
    store.LEASE - 4
)  # seconds without the store after which ranks are ended: before the lease runs out
GRACE = 5.0  # seconds for ranks to end by themselves once another host's have failed
ALL_HERE = 30.0  # seconds at least that the first attempt waits for the hosts that it was started on
JOIN_AFTER = 10.0  # seconds that an attempt runs before it is interrupted to take a host in
BOOTING = 60.0  # seconds that a host's address may take to come after a boot
PORTS = 100  # that are tried, from MASTER_PORT on
IDLE = 0.01  # of a processor, or less: what a rank uses that makes no progress
BACK_OFF = 5.0  # seconds before the next attempt, more with each failure in a row


def main(config: Config, environment: Environment, arguments: list) -> int:
    """Take part in the run to its end; returns the exit code (docs/architecture.md)."""
    # First of all, since what is asked from now on is meant for this launcher, which may wait a minute for its address.
    for file in (environment.stop_file, environment.yield_file, environment.leave_file):
        file.unlink(missing_ok=True)
    (environment.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    launcher = Launcher(config, environment, arguments)
    if (code := launcher.ended_before()) is not None:
        return code
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, launcher.ask_to_stop)
    prepare()
    launcher.begin = launcher.touched = time.monotonic()  # on a busy machine torch takes its time to load
    try:
        while (code := launcher.look()) is None:
            time.sleep(LOOK)
    finally:
        launcher.leave()
    return code


class Launcher:
    """What one host knows and does. `look` is one turn; it returns the exit code when the run is over."""

    def __init__(self, config: Config, environment: Environment, arguments: list):
        self.config, self.environment, self.arguments = config, environment, arguments
        self.expected = number("NNODES", 1)
        place = os.environ.get("TRAINYARD_STORE", "")
        self.launch = os.environ.get("TRAINYARD_LAUNCH", "")
        if self.expected > 1 and not (place and self.launch):
            raise BadInput(
                "NNODES is more than 1, and TRAINYARD_STORE or TRAINYARD_LAUNCH is not set: where the hosts agree on "
                "who takes part (http://ADDRESS:PORT,… of etcd, or a directory if the nodes share a machine), and a "
                "name of this start of the run, the same on all hosts and new each time; train.yml sets both"
            )
        address = os.environ.get("CLUSTER_ADDRESS") or "127.0.0.1"
        self.store = store.connect(
            place, f"{config.run}.{self.launch}" if self.launch else config.run, address
        )
        known = _status(environment)
        self.me = Host(
            node=number("NODE_RANK", 0),
            name=environment.host,
            address=address,
            port=_port_at_boot(address) if known.get("attempt") else _port(address),
            processes=number("NPROC_PER_NODE", 1),
            done=known.get("attempt") or 0,
            saved=known.get("last_checkpoint") or 0,
        )
        self.key = f"hosts/{self.me.node}"
        # The runs that it waits for on this host.
        self.after = [name for name in os.environ.get("TRAINYARD_AFTER", "").split(",") if name]
        self.begin = self.touched = time.monotonic()
        self.asked = False  # to stop the run
        self.leaving = False  # this host shuts down
        self.attempt: Attempt | None = None
        self.troubled: float | None = None  # when it was first seen that the attempt cannot go on
        # When its ranks were first seen to do nothing, and what they had used of processors by then.
        self.idle_since: tuple[float, float] | None = None
        self.idle_looked = 0.0  # for that, which takes longer than all the rest of a look
        self.word_since: tuple[int, float] | None = None  # attempt that has failed, and when that was seen
        self.entries: dict = {}
        self.met = False  # the store has answered, and knows this host as it is now
        self.status = metrics.Status(environment.run_dir, run=config.run, host=environment.host)
        self.shown: tuple = ()

    def ended_before(self) -> int | None:
        """The exit code where this very start of the run has ended here already: the machine was booted anew."""
        known = _status(self.environment)
        if self.launch and known.get("launch") == self.launch and known.get("state") in metrics.FINAL:
            _print(f"run {self.config.run} has {known['state']} here; nothing is to be done")
            return 0
        return None

    def ask_to_stop(self, *_) -> None:
        """A signal: note it, as the stop file is noted."""
        self.asked = True

    def look(self) -> int | None:
        """One turn."""
        # Only ever set: a signal that came between reading and writing a mark would be lost.
        if self.environment.stop_file.exists():
            self.asked = True
        if self.environment.leave_file.exists():
            self.leaving = True
        if self.leaving and not self.attempt:
            self._say("restarting", f"{self.me.name} shuts down; it takes part again when it is back")
            return STOPPED
        if self.after:
            return self._queue()
        try:
            self._touch()
        except store.Unreachable as error:
            return self._out_of_touch(str(error))
        end = self.entries.get("end")
        plan = self.entries.get("plan")
        plan = membership.unpack_plan(plan.value) if plan else None
        hosts = [Host(**one.value) for key, one in self.entries.items() if key.startswith("hosts/")]
        if self.attempt:
            self._watch(plan, hosts, End(**end.value) if end else None)
            return None
        if end:
            return self._conclude(End(**end.value))
        if self.asked:
            self._end(self._own_end())
        elif plan and plan.has(self.me.node) and plan.attempt > self.me.done:
            self._start(plan)
        elif all(host.node >= self.me.node for host in hosts):
            self._decide(plan, hosts)
        elif plan and self.me.name in plan.left_out:
            self._say("stalled", f"{self.me.name} is left out of the run: it failed again and again")
        else:
            self._say("starting" if plan is None else "restarting", self.shown[1] if self.shown else None)
        return None

    def _queue(self) -> int | None:
        """Wait until the runs before this one have ended here; what was cut short may yet come back."""
        runs = self.environment.run_dir.parent
        self.after = [name for name in self.after if not _has_ended(runs / name)]
        if self.asked:
            return self._conclude(End(STOPPED, "stopped on request while it was queued"))
        if self.after:
            self._say("queued", f"it waits for the end of {', '.join(self.after)}")
        else:
            self._say("starting", None)
        self.begin = self.touched = time.monotonic()
        return None

    def leave(self) -> None:
        """Whatever happens to this launcher, no rank outlives it; the others need not wait for the lease."""
        if self.attempt:
            self.attempt.kill()
        with contextlib.suppress(OSError):
            self.store.leave(self.key)

    # --- the store ---

    def _touch(self) -> None:
        """Renew this host's record, and read the others'."""
        if not self.met:
            # A launcher that comes back knows nothing of an attempt that is under way: it is over here.
            self.entries = self.store.read()
            if "plan" in self.entries:
                back = "its launcher was started anew (a reboot, or somebody killed it)"
                attempt = self.entries["plan"].value["attempt"]
                self.me = dataclasses.replace(self.me, done=attempt, reason=back, ended=time.time())
            self.met = True
        self.store.live(self.key, membership.pack(self.me))
        self.entries = self.store.read()
        self.touched = time.monotonic()

    def _out_of_touch(self, why: str) -> int | None:
        """The store does not answer: wait for it; end the ranks before others may take this host for dead."""
        silent = time.monotonic() - self.touched
        if self.attempt:
            if self.asked or self.leaving:
                self.environment.yield_file.touch()
            if silent > OUT_OF_TOUCH:
                self.attempt.kill()
                self._over(Outcome(LOST, f"{self.me.name} was cut off: {why}"))
            elif (outcome := self.attempt.poll()) is not None:
                self._over(outcome)
            return None
        if self.asked:
            return self._conclude(End(STOPPED, "stopped on request, while the store could not be asked"))
        if not self.met and not self.me.done and silent > self.config.timeout_seconds:
            cure = "see there `systemctl status trainyard-etcd`, and the firewall; site.yml sets both up"
            return self._conclude(End(LOST, f"{why}; {cure}"))
        if silent > GRACE:
            self._say("stalled", f"paused: {why}; the run goes on here when it does")
        return None

    def _end(self, end: End) -> None:
        self.store.put_if("end", membership.pack(end), 0)

    def _own_end(self) -> End:
        """The end of a run that was stopped here, unless its ranks failed over it."""
        if self.me.code not in (None, 0, LOST, STOPPED):
            return End(max(self.me.code, 1), self.me.reason)
        when = "" if self.me.code is not None else " before the hosts had met"
        return End(STOPPED, f"stopped on request on {self.me.name}{when}")

    def _decide(self, plan: Plan | None, hosts: list[Host]) -> None:
        """Speak for all: the next attempt, or the end."""
        patience = max(ALL_HERE, self.config.timeout_seconds)
        late = time.monotonic() - self.begin > patience
        word = membership.next_word(
            plan,
            hosts,
            expected=self.expected,
            late=late,
            least=self.config.min_nodes,
            restarts=self.config.restarts,
            now=time.time(),
        )
        if isinstance(word, Wait):
            if word.reason and plan is None and late:
                self._end(
                    End(
                        LOST,
                        f"{word.reason}; the others did not come within {patience:.0f} s: "
                        "see their logs, and the firewall between the hosts",
                    )
                )
            elif word.reason:
                self._say("starting" if plan is None else "stalled", word.reason)
        elif isinstance(word, End):
            self._end(word)
        else:
            now = time.monotonic()
            if self.word_since is None or self.word_since[0] != word.attempt:
                self.word_since = (word.attempt, now)
            if now - self.word_since[1] >= BACK_OFF * max(0, word.failures - 1):
                entry = self.entries.get("plan")
                self.store.put_if("plan", membership.pack(word), entry.revision if entry else 0)

    # --- an attempt ---

    def _start(self, plan: Plan) -> None:
        size = sum(member.processes for member in plan.members)
        self.status.facts.update(attempt=plan.attempt, world_size=size, note=plan.reason or None)
        self._say("starting", plan.reason or None)
        if plan.reason:
            _print(f"attempt {plan.attempt}: {plan.reason}")
        self.troubled = self.idle_since = None
        self.environment.yield_file.unlink(missing_ok=True)
        self.attempt = Attempt(plan, self.me.node, self.config, self.environment, self.arguments)

    def _watch(self, plan: Plan, hosts: list[Host], end: End | None) -> None:
        """See whether the attempt has ended here, must end, or should make room for another one."""
        attempt, mine = self.attempt, self.attempt.plan
        if (outcome := attempt.poll()) is not None:
            return self._over(outcome)
        now = time.monotonic()
        living = {host.node: host for host in hosts}
        others = [living[one.node] for one in mine.members if one.node in living and one.node != self.me.node]
        gone = [one.name for one in mine.members if one.node not in living]
        if plan is None or plan.attempt > mine.attempt:
            return self._kill("the others go on without this host", LOST)
        if gone:
            return self._kill(f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone", LOST)
        ended = [host for host in others if host.done >= mine.attempt]
        if self.asked and not attempt.has_started:
            return self._kill("stopped on request before the hosts had met", STOPPED)
        if self.asked or self.leaving or (end and end.code == STOPPED):
            self.environment.yield_file.touch()
        if ended or end:
            self.troubled = self.troubled or now
            failed = [host for host in ended if host.code not in (0, STOPPED)]
            # Those that save or finish together may take their time, by as much as a step may.
            patience = GRACE if failed else max(GRACE, self.config.timeout_seconds)
            if now - self.troubled > patience:
                if all(host.code == LOST for host in failed):
                    self._kill(f"{self.me.name}: a rank hung: the others lost it, and it did not end")
                else:
                    self._kill(f"{failed[0].name} failed", LOST)
        elif self._may_take_in(hosts, now):
            self.environment.yield_file.touch()
        elif sum(member.processes for member in mine.members) == 1 and self._idles(now):
            self._kill(f"{self.me.name}: a rank hung: it did nothing for {self.config.timeout_seconds:.0f} s")

    def _idles(self, now: float) -> bool:
        """Whether a rank that trains alone, and so is missed by no other, has hung: it waits, and does not compute."""
        if now - self.idle_looked < self.config.timeout_seconds / 20:
            return False
        self.idle_looked = now
        known = _status(self.environment)
        if (known.get("state"), known.get("attempt")) != ("running", self.attempt.plan.attempt):
            self.idle_since = None  # who makes data or a model ready may wait for a disk or the network
            return False
        used, waits = self.attempt.work()
        since, before = self.idle_since or (now, used)
        # Its compiler's processes may have ended, with what they had used.
        if not self.idle_since or waits or used < before or used - before > IDLE * max(1.0, now - since):
            self.idle_since = now, used
        return now - self.idle_since[0] > self.config.timeout_seconds

    def _may_take_in(self, hosts: list[Host], now: float) -> bool:
        """Whether this is the host to interrupt the attempt for one that has come (back), and the time to."""
        plan = self.attempt.plan
        new = [one for one in hosts if not plan.has(one.node) and one.name not in plan.left_out]
        if not new or plan.members[0].node != self.me.node or now - self.attempt.begin < JOIN_AFTER:
            return False
        known = _status(self.environment)
        return (
            known.get("state") == "running"
            and known.get("attempt") == plan.attempt
            and bool(known.get("slowest"))
        )

    def _kill(self, why: str, code: int = 1) -> None:
        self.attempt.kill()
        self._over(Outcome(code, why))

    def _over(self, outcome: Outcome) -> None:
        """Note how the attempt ended here, for the others to see."""
        attempt, self.attempt = self.attempt.plan.attempt, None
        known = _status(self.environment)
        if self.asked and outcome.code in (-signal.SIGTERM, LOST):
            reason = "stopped on request before the ranks could save; they go on from the last checkpoint"
            outcome = Outcome(STOPPED, reason)
        self.me = dataclasses.replace(
            self.me,
            done=attempt,
            code=outcome.code,
            reason=outcome.reason,
            ended=time.time(),
            saved=known.get("last_checkpoint") or 0,
        )
        with contextlib.suppress(
            BadInput
        ):  # without its wire a host may have lost its address; it comes back
            self.me = dataclasses.replace(self.me, port=_port(self.me.address))
        if self.asked and outcome.code:
            # Before the others see that it is over here, and plan the next one.
            with contextlib.suppress(store.Unreachable):
                self._end(self._own_end())
        if outcome.code:
            self._say("restarting", outcome.reason)
            _print(f"attempt {attempt} ended: {outcome.reason}")

    # --- words ---

    def _conclude(self, end: End) -> int:
        """Write the final status.json; returns the exit code."""
        code, reason = end.code, end.reason
        if code not in (0, STOPPED) and self.me.code in (LOST, STOPPED):
            # The host that is at fault has the code; here it was a lost peer.
            code, reason = LOST, self.me.reason if self.me.code == LOST else end.reason
        elif code == STOPPED and self.me.code == STOPPED:
            reason = self.me.reason
        code = code if code >= 0 else 1
        for file in (self.environment.stop_file, self.environment.yield_file):
            file.unlink(missing_ok=True)
        state = {0: "finished", STOPPED: "stopped"}.get(code, "failed")
        if code:
            _print(f"{state}: {reason}")
        self.status.facts["launch"] = self.launch or None
        self._say(state, reason if code else None)
        return code

    def _say(self, state: str, reason: str | None) -> None:
        """Bring status.json up to date, the ranks' last word on steps and losses kept."""
        if (state, reason) == self.shown and self.attempt is None:
            return
        self.shown = (state, reason)
        own = ("attempt", "world_size", "launch", "note")
        kept = {name: self.status.facts[name] for name in own if self.status.facts.get(name) is not None}
        self.status.facts.update({**_status(self.environment), **kept})
        self.status.facts["state"] = None
        with contextlib.suppress(OSError):  # a full disk must not take the reason with it
            self.status.update(state=state, reason=reason)


def _print(line: str) -> None:
    """For the journal; a launcher does not end for want of one."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _port_at_boot(address: str) -> int:
    """As `_port`, but the address may be a while in coming."""
    deadline = time.monotonic() + BOOTING
    while time.monotonic() < deadline:
        with contextlib.suppress(BadInput):
            return _port(address)
        time.sleep(1)
    return _port(address)


def _port(address: str) -> int:
    """A port from MASTER_PORT on that is free at `address`; raises BadInput where there is none, or no such address."""
    wanted = number("MASTER_PORT", 29500)
    if not 1 <= wanted <= 65535:
        raise BadInput(f"MASTER_PORT {wanted} is no port; choose one from 1024 to 65535")
    for port in range(wanted, min(wanted + PORTS, 65536)):
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((address, port), family=family).close()
            return port
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise BadInput(f"CLUSTER_ADDRESS {address} is no address of this host; correct it") from None
            raise BadInput(
                f"MASTER_PORT {port} cannot be used: {error.strerror}; choose one from 1024 to 65535"
            ) from None
    raise BadInput(
        f"MASTER_PORT {wanted} and the {PORTS} ports after it are in use at {address}; choose another"
    )


def _has_ended(run_dir: Path) -> bool:
    """Whether a run has ended on this host, or is not there any more."""
    return not run_dir.exists() or _read(run_dir).get("state") in metrics.FINAL


def _status(environment: Environment) -> dict:
    return _read(environment.run_dir)


def _read(run_dir: Path) -> dict:
    try:
        known = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
