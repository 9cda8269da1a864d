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
import traceback
from pathlib import Path

from trainer import disk, metrics
from trainer.cluster import membership, reach, store
from trainer.cluster.attempt import GRACE, MEMORY, Attempt, Outcome, prepare, with_held
from trainer.cluster.hang import Pulse
from trainer.cluster.membership import LOST, OUTAGES, STOPPED, End, Host, Plan, Wait
from trainer.config import Config
from trainer.environment import BEGUN, Environment, number
from trainer.errors import BadInput, TrainerError

LOOK = 0.25  # seconds between two looks
ALL_HERE = 30.0  # seconds at least that the first attempt waits for the hosts that it was started on
COME_BACK = 30.0  # seconds that hosts which were started anew give the others, before they go on without them
JOIN_AFTER = 10.0  # seconds that an attempt runs before it is interrupted to take a host in
QUEUED = "queued/"  # keys in the store of hosts that wait for the runs before
PORTS = 100  # that are tried, from MASTER_PORT on
LEAVES = "{} shuts down; it takes part again when it is back"
LEFT_OUT = (
    "{} is left out of the run: it failed again and again, or not all of the others reach it; once that is cured, the "
    "run, stopped and resumed, has it take part again"
)
FAULTS = 40  # looks in a row that a fault of the launcher itself may spoil
ANEW = 10.0  # seconds before a launcher that could not load torch is another process
ANEW_MARK = "TRAINYARD_ANEW"  # and that is one: what was asked meanwhile is meant for it
# Seconds after which a signal is another request to end: some who pass one on send it twice, and after a file it is
# what comes before SIGKILL.
ANOTHER, AFTER_FILE = 2.0, 20.0
LAST_CALL = 20.0  # seconds that ranks then have
BACK_OFF = 5.0  # seconds before the next attempt, more with each failure in a row
FAREWELL = (
    30.0  # seconds that others' ranks have to end, once this host's have ended in order: as one host's own
)


def main(config: Config, environment: Environment, arguments: list) -> int:
    """Take part in the run to its end; returns the exit code (docs/design/recovery.md)."""
    os.environ.setdefault(BEGUN, str(time.time()))  # it stays where the launcher begins anew
    try:
        launcher = Launcher(config, environment, arguments)
    except (TrainerError, OSError) as error:
        _failed_at_once(config, environment, str(error))
        raise
    if (code := launcher.ended_before()) is not None:
        return code
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, launcher.ask_to_stop)
    signal.signal(signal.SIGUSR1, launcher.ask_to_leave)
    try:
        prepare()
    except Exception as error:
        return launcher.begin_anew(error)
    launcher.begin = launcher.touched = time.monotonic()  # on a busy machine torch takes its time to load
    try:
        while (code := launcher.turn()) is None:
            time.sleep(LOOK)
    finally:
        launcher.leave()
    return code


class Launcher:
    """What one host knows and does. `turn` is to be called again and again; it returns the exit code at the run's end.

    Raises BadInput where the environment is wrong. In a run that this host has never been part of, also where it lacks
    the address that it was given, and OSError where the run's directory cannot be written; who was part of it has
    booted before its network did, or has lost a disk: it waits.
    """

    def __init__(self, config: Config, environment: Environment, arguments: list):
        self.config, self.environment, self.arguments = config, environment, arguments
        known = metrics.read_status(environment.run_dir)
        new = not (environment.run_dir / "status.json").exists()
        new |= known.get("state") in metrics.FINAL and known.get("launch") != os.environ.get(
            "TRAINYARD_LAUNCH", ""
        )
        # First of all, since what is asked from now on is meant for this launcher, which may wait long for its address.
        self.tidy = False
        with contextlib.nullcontext() if new else contextlib.suppress(OSError):
            self._tidy()
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
        self.place = (place, f"{config.run}.{self.launch}" if self.launch else config.run, address)
        self.store = store.connect(*self.place)
        self.status = metrics.Status(environment.run_dir, run=config.run, host=environment.host)
        self.shown: tuple = ()
        self.port = Port(address)
        self.me = Host(
            node=number("NODE_RANK", 0),
            name=environment.host,
            address=address,
            port=self.port.choose() if new else 0,  # 0: `_has_come_up` is still to look
            processes=number("NPROC_PER_NODE", 1),
            done=known.get("attempt") or 0,
            saved=known.get("last_checkpoint") or 0,
        )
        self.key = f"hosts/{self.me.node}"
        # The runs that it waits for on this host; once: by a reboot one of them may have been resumed to wait for this.
        self.after = [name for name in os.environ.get("TRAINYARD_AFTER", "").split(",") if name]
        self.begun = False  # this start of the run has had an attempt here
        self.starts = (
            0  # launchers of this start of the run, in a row, that had attempts and made no checkpoint
        )
        self.counted = False  # this launcher is one of them
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            turn = json.loads(environment.turn_file.read_text())
            if self.launch and turn["launch"] == self.launch:
                self.after = [name for name in self.after if name in turn["after"]]
                self.begun = turn["begun"]
                self.starts = turn["starts"] if turn["saved"] == self.me.saved else 0
        self.queued = bool(self.after)  # also once all of them have ended, until the store knows
        self.begin = self.touched = time.monotonic()
        self.asked = False  # to stop the run
        self.asked_at: float | None = None  # or to leave, when that was first seen
        self.by_file = False  # and how
        self.pressed: float | None = None  # when it was asked to end once more
        self.failed_over_stop = False  # its ranks were asked to save and end, and failed
        self.leaving = False  # this host shuts down
        self.attempt: Attempt | None = None
        self.pulse = Pulse(config)  # of that attempt's ranks
        self.parted: float | None = (
            None  # when its ranks ended in order; None: they did not, or nobody is waited for
        )
        self.troubled: float | None = None  # when it was first seen that the attempt cannot go on
        self.used = 0.0  # seconds of processors that its ranks had used by then
        self.word_since: tuple[int, float] | None = None  # attempt that has failed, and when that was seen
        self.entries: dict = {}
        self.faults = 0  # of the launcher itself, in a row
        self.met = False  # the store has answered, and knows this host as it is now

    def ended_before(self) -> int | None:
        """The exit code where this very start of the run has ended here already: the machine was booted anew."""
        known = metrics.read_status(self.environment.run_dir)
        if self.launch and known.get("launch") == self.launch and known.get("state") in metrics.FINAL:
            _print(f"run {self.config.run} has {known['state']} here; nothing is to be done")
            return 0
        return None

    def ask_to_stop(self, *_) -> None:
        """A signal: note it, as the stop file is noted. After that, or in a shutdown, SIGKILL is what comes next."""
        now = time.monotonic()
        if self.asked_at is None:
            self.asked, self.asked_at = True, now
        elif now - self.asked_at >= (AFTER_FILE if self.by_file else ANOTHER):
            self.pressed = self.pressed or now

    def ask_to_leave(self, *_) -> None:
        """A signal, where the file that asks for it cannot be written (the unit's ExecStop): this host shuts down."""
        self.leaving = True

    def begin_anew(self, error: Exception) -> int:
        """What torch is made of could not be loaded, for want of memory maybe: try it in a new process, after a while.

        Half loaded, torch is of no use to this one. Raises TrainerError where this start of the run has not begun.
        """
        cure = "look at its memory and its disk; site.yml tests its environment"
        why = f"{self.me.name}: torch cannot be loaded: {type(error).__name__}: {error}; {cure}"
        if not self.begun:
            self._say("failed", why)  # the run behind this one in the queue waits for a word
            raise TrainerError(why)
        self._say("stalled", f"{why}; it is tried again")
        until = time.monotonic() + ANEW
        while time.monotonic() < until:
            if self.leaving or self.environment.leave_file.exists():
                self._say("restarting", LEAVES.format(self.me.name))
                return STOPPED
            if self.asked or self.environment.stop_file.exists():
                return self._conclude(self._stopped(f"stopped on request; {why}"))
            time.sleep(LOOK)
        os.environ[ANEW_MARK] = "1"
        os.execv(sys.executable, sys.orig_argv)

    def turn(self) -> int | None:
        """One look; what the store or the machine refuses (memory for a process, a disk) ends no launcher.

        Nor does a fault of its own, unless it comes at each look.
        """
        try:
            try:
                code = self.look()
            except store.Unreachable as error:
                code = self._out_of_touch(str(error))
        except (OSError, MemoryError) as error:
            return self._refused(error)
        except Exception as error:
            return self._faulty(error)
        self.faults = 0
        return code

    def look(self) -> int | None:
        """One look at what is asked, at the others and at the ranks. Raises OSError."""
        if not self.tidy:
            self._tidy()
        # Only ever set: a signal that came between reading and writing a mark would be lost.
        if self.environment.stop_file.exists():
            self.asked = True
        if self.environment.leave_file.exists():
            self.leaving = True
        if (self.asked or self.leaving) and self.asked_at is None:
            self.asked_at, self.by_file = time.monotonic(), True
        if self.leaving and not self.attempt:
            if not self.parted:
                self._say("restarting", LEAVES.format(self.me.name))
                return STOPPED
            self.me = dataclasses.replace(self.me, leaves=True)
        if self.queued:
            return self._queue()
        if not self.me.port and not self._has_come_up():
            before = End(STOPPED, f"stopped on request on {self.me.name}, before its address was there")
            return self._conclude(before) if self.asked else None
        self._touch()
        end = self.entries.get("end")
        plan = self.entries.get("plan")
        plan = membership.unpack_plan(plan.value) if plan else None
        hosts = [Host(**one.value) for key, one in self.entries.items() if key.startswith("hosts/")]
        if self.attempt:
            self._watch(plan, hosts, End(**end.value) if end else None)
            return None
        if self.parted and (self.leaving or end):
            if self._others_end(plan, hosts):
                return None
            self.parted = None
        if self.leaving:
            return None  # at the next look it does
        if end:
            return self._conclude(End(**end.value))
        if self.asked:
            self._end(self._own_end())
        elif plan and plan.has(self.me.node) and plan.attempt > self.me.done:
            self._start(plan)
        elif plan is None and (
            queued := [one.value for key, one in self.entries.items() if key.startswith(QUEUED)]
        ):
            self._wait_for(queued)
        elif all(host.node >= self.me.node for host in hosts):
            self._decide(plan, hosts)
        elif plan and self.me.name in plan.left_out:
            self._say("stalled", LEFT_OUT.format(self.me.name))
        else:
            self._say("starting" if plan is None else "restarting", self.shown[1] if self.shown else None)
        return None

    def _others_end(self, plan: Plan | None, hosts: list[Host]) -> bool:
        """Whether ranks that ended in order with this host's are still at it elsewhere: they are not to miss it yet."""
        late = self.pressed or time.monotonic() - self.parted > FAREWELL
        return (
            bool(plan)
            and not late
            and any(plan.has(host.node) and host.done < self.me.done for host in hosts)
        )

    def _queue(self) -> int | None:
        """Wait until the runs before this one have ended here; what was cut short may yet come back.

        The store knows of it, for the hosts of this run on which there was none before it.
        """
        runs, key = self.environment.run_dir.parent, f"{QUEUED}{self.me.node}"
        after = [name for name in self.after if not _has_ended(runs / name)]
        if after != self.after:
            self.after = after
            self._note_turn()  # one that has ended may be resumed, to wait for this run
        self.begin = self.touched = time.monotonic()
        end = None
        with contextlib.suppress(store.Unreachable):
            if self.asked:
                self._end(End(STOPPED, f"stopped on request on {self.me.name} while it was queued"))
            elif after:
                self.store.live(key, {"name": self.me.name, "after": after})
                end = self.store.read().get("end")
            else:
                self.store.leave(key)
                self.queued = (
                    False  # and not before: the others wait for as long as the store has this host as queued
                )
        if self.asked:
            return self._conclude(End(STOPPED, "stopped on request while it was queued"))
        if end:
            return self._conclude(End(**end.value))
        if after:
            self._say("queued", f"it waits for the end of {', '.join(after)}")
        else:
            self._say("starting", None)
        return None

    def _note_turn(self) -> None:
        with contextlib.suppress(OSError):  # a full disk
            turn = {"launch": self.launch, "after": self.after, "begun": self.begun, "starts": self.starts}
            turn["saved"] = self.me.saved
            metrics.write_json(self.environment.turn_file, turn)

    def _wait_for(self, queued: list[dict]) -> None:
        """Hosts of this run still wait for the runs before it: none of those that are here are to begin alone."""
        self.begin = time.monotonic()
        names = ", ".join(sorted(one["name"] for one in queued))
        runs = ", ".join(sorted({run for one in queued for run in one["after"]}))
        self._say("queued", f"{names} {'waits' if len(queued) == 1 else 'wait'} for the end of {runs}")

    def _tidy(self) -> None:
        """Forget what an earlier launcher was asked, and have a place for the logs."""
        if not os.environ.pop(ANEW_MARK, ""):
            for file in (
                self.environment.stop_file,
                self.environment.yield_file,
                self.environment.leave_file,
            ):
                file.unlink(missing_ok=True)
        (self.environment.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self.tidy = True

    def _refused(self, error: OSError | MemoryError) -> int | None:
        """The machine refused something: in an attempt a fault of this host's; else it waits, or stops if asked."""
        reason = self._refusal(error)
        if self.attempt:
            with contextlib.suppress(OSError):
                reason = with_held(reason, self.attempt.kill(self._renew))
            self._over(Outcome(1, reason))
        elif self.leaving:
            self._say("restarting", LEAVES.format(self.me.name))
            return STOPPED
        elif self.asked:
            return self._conclude(self._stopped(f"stopped on request; {reason}"))
        else:
            self._say("stalled", f"{reason}; the run goes on here once that is cured")
        return None

    def _refusal(self, error: OSError | MemoryError) -> str:
        where = f"look at the disk of {self.environment.run_dir}, and at this host's memory"
        said = str(error) or type(error).__name__
        return f"{self.me.name}: the system refused the launcher something: {said}; {where}"

    def _faulty(self, error: Exception) -> int | None:
        """A fault of the launcher itself: no rank goes on unwatched, and where it does not pass, this host's part ends.

        The others go on; its unit, started again, takes part again.
        """
        self.faults += 1
        if self.faults == 1:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
        kind = f"{type(error).__name__}: {error}"
        reason = f"{self.me.name}: a fault of the launcher itself, please report it: {kind}"
        if self.attempt:
            with contextlib.suppress(Exception):
                reason = with_held(reason, self.attempt.kill())
            with contextlib.suppress(Exception):
                self._over(Outcome(1, reason))
        elif self.faults >= FAULTS:
            return self._conclude(End(1, reason), own=True)
        return None

    def _stopped(self, reason: str) -> End:
        """The end of a run that was stopped here while the others cannot be told, unless it has finished."""
        return End(0) if self.me.code == 0 else End(STOPPED, reason)

    def _has_come_up(self) -> bool:
        """Whether a host that was booted has its address: a switch, or who gives addresses, may be up long after it."""
        try:
            self.me = dataclasses.replace(self.me, port=self.port.choose())
            return True
        except NoAddress:
            why = f"its cluster address {self.me.address} is not there yet (a cable, a switch, or who gives addresses)"
        except BadInput as error:
            why = str(error)
        self._say("stalled", f"{why}; the run goes on here once that is cured")
        self.begin = self.touched = time.monotonic()  # nobody else has kept it waiting
        return False

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
                back = f"its launcher was started anew: a reboot, or it was killed{MEMORY}"
                attempt = self.entries["plan"].value["attempt"]
                self.me = dataclasses.replace(self.me, done=attempt, reason=back, ended=time.time())
            self.met = True
            self.begin = time.monotonic()  # until now nobody could have told it anything
        self._live()
        self.entries = self.store.read()
        self.touched = time.monotonic()

    def _live(self) -> None:
        self.store.live(self.key, membership.pack(self.me))
        if self.attempt:
            self.attempt.is_renewed(self.store.renewed)

    def _renew(self) -> None:
        """Renew this host's record as it is: who gives back much memory is slow to end, and its host is not gone."""
        with contextlib.suppress(OSError, MemoryError):
            self._live()

    def _out_of_touch(self, why: str) -> int | None:
        """The store does not answer: wait for it; end the ranks before others may take this host for dead."""
        silent = time.monotonic() - self.touched
        self.parted = None  # nobody would learn of it
        if self.attempt:
            if self.asked or self.leaving:
                self._ask_to_yield()
            # What stands in the store as its sign of life is older than its last look there.
            if time.monotonic() - self.store.renewed > store.OUT_OF_TOUCH - LOOK:
                held = self.attempt.kill()
                self._over(Outcome(LOST, with_held(f"{self.me.name} was cut off: {why}", held), cut_off=True))
            elif (outcome := self.attempt.poll()) is not None:
                self._over(dataclasses.replace(outcome, cut_off=outcome.code == LOST))
            return None
        if self.asked:
            where = f"stopped on request on {self.me.name}, while the store could not be asked"
            return self._conclude(self._stopped(where))
        if not self.met and not self.me.done and silent > self.config.timeout_seconds:
            cure = "see there `systemctl status trainyard-etcd`, and the firewall; site.yml sets both up"
            return self._conclude(End(LOST, f"{why}; {cure}"), own=True)
        if silent > GRACE:
            self._say("stalled", f"paused: {why}; the run goes on here when it does")
        return None

    def _ask_to_yield(self) -> None:
        """Have the ranks save and end. A full disk may have room for the mark at the next look. Raises OSError."""
        try:
            self.environment.yield_file.touch()
        except OSError as error:
            if not disk.is_full(error):
                raise

    def _end(self, end: End) -> None:
        self.store.put_if("end", membership.pack(end), 0)

    def _tell(self, end: End) -> None:
        """Have the store know the end, for hosts that come back; where it is silent, `trainer tell` does it later."""
        try:
            self._end(end)
        except store.Unreachable:
            folder = self.environment.untold_dir
            with contextlib.suppress(OSError):
                if folder.is_dir():  # where nobody would tell it there is none
                    note = {"store": self.place, "end": membership.pack(end)}
                    metrics.write_json(folder / f"{self.place[1]}.json", note)

    def _own_end(self) -> End:
        """The end of a run that was stopped here, unless it has finished, or its ranks failed over it."""
        plan = self.entries.get("plan")
        hosts = [
            self.me,
            *(Host(**one.value) for key, one in self.entries.items() if key.startswith("hosts/")),
        ]
        if plan and any(host.code == 0 and host.done == plan.value["attempt"] for host in hosts):
            return End(0)
        if self.failed_over_stop and self.me.code not in (None, 0, LOST, STOPPED):
            return End(max(self.me.code, 1), self.me.reason)
        when = "" if self.me.code is not None else " before the hosts had met"
        return End(STOPPED, f"stopped on request on {self.me.name}{when}")

    def _decide(self, plan: Plan | None, hosts: list[Host]) -> None:
        """Speak for all: the next attempt, or the end."""
        if plan is None and self.expected == 1 and self.starts > OUTAGES * max(1, self.config.restarts):
            reason = (
                f"{self.me.name}: its launcher was killed, or its host was booted anew, {self.starts} times in a row "
                f"without a new checkpoint; see `journalctl -k` and `journalctl -u trainyard@{self.config.run}`"
            )
            return self._end(End(1, reason))
        patience = COME_BACK if plan else max(ALL_HERE, self.config.timeout_seconds)
        late = time.monotonic() - self.begin > patience
        word = membership.next_word(
            plan,
            hosts,
            expected=self.expected,
            late=late,
            least=self.config.min_nodes,
            restarts=self.config.restarts,
            now=time.time(),
            new=not self.begun,
        )
        if isinstance(word, Wait):
            begins = plan is None and not (late and self.begun)
            if word.reason and late and begins:
                self._end(
                    End(
                        LOST,
                        f"{word.reason}; the others did not come within {patience:.0f} s: "
                        "see their logs, and the firewall between the hosts",
                    )
                )
            elif word.reason:
                self._say("starting" if begins else "stalled", word.reason)
            elif plan and self.me.name in plan.left_out:
                self._say("stalled", LEFT_OUT.format(self.me.name))
            elif plan and not plan.has(self.me.node):
                self._say("restarting", f"{self.me.name} takes part in the next attempt; the others train")
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
        if not self.counted:
            self.begun = self.counted = True
            self.starts += 1
            self._note_turn()
        self.troubled, self.parted, self.pulse = None, None, Pulse(self.config)
        try:
            self.environment.yield_file.unlink(missing_ok=True)
            renewed = self.store.renewed if self.expected > 1 else None
            place = (self.config, self.environment, self.arguments)
            self.attempt = Attempt(plan, self.me.node, *place, renewed)
        except OSError as error:
            self._note(plan.attempt, Outcome(1, self._refusal(error)))

    def _watch(self, plan: Plan, hosts: list[Host], end: End | None) -> None:
        """See whether the attempt has ended here, must end, or should make room for another one."""
        attempt, mine = self.attempt, self.attempt.plan
        if (outcome := attempt.poll(self._renew)) is not None:
            if outcome.code == LOST:
                others = [one for one in mine.members if one.node != self.me.node]
                return self._over(outcome, reach.unreached(others))
            if outcome.code in (0, STOPPED):
                self.parted = time.monotonic()
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
        if self.pressed and now - self.pressed > LAST_CALL:
            return self._kill("its ranks did not save in time; they go on from the last checkpoint", STOPPED)
        if self.asked or self.leaving or (end and end.code == STOPPED):
            self._ask_to_yield()
        if ended or end:
            if self.troubled is None:
                self.troubled, self.used = now, attempt.work().used
            failed = [host for host in ended if host.code not in (0, STOPPED)]
            # Those that save or finish together may take their time, by as much as a step may.
            patience = GRACE if failed else max(GRACE, self.config.timeout_seconds)
            if now - self.troubled > patience:
                if any(host.unreached or host.cut_off for host in failed):
                    # Its ranks have nobody left to wait for, and need not know yet.
                    self._kill(f"{failed[0].name} lost its peers", LOST)
                elif not failed:
                    self._kill(f"{self.me.name}: a rank hung: the others' have ended, and it did not")
                elif all(host.code == LOST for host in failed):
                    self._kill(
                        f"{self.me.name}: {self._why_lost(attempt.work().used - self.used, now - self.troubled)}"
                    )
                else:
                    self._kill(f"{failed[0].name} failed", LOST)
        elif why := self.pulse.hangs(attempt, metrics.read_status(self.environment.run_dir), now):
            self._kill(f"{self.me.name}: a rank hung: {why}")
        elif self._may_take_in(hosts, now):
            with contextlib.suppress(OSError):  # no reason to end ranks that train
                self.environment.yield_file.touch()

    def _why_lost(self, used: float, seconds: float) -> str:
        """What a rank is at that the others have lost though they reach its host; used: processor seconds of these."""
        if used < seconds / 2:
            return "a rank hung: the others lost it, and it did not end"
        return (
            f"a rank was still busy when the others had waited {self.config.timeout_seconds:g} s for it: see what "
            "slows this host down, and whether its card answers (nvidia-smi, `journalctl -k`); where its part of a "
            "step takes that long, raise timeout_seconds"
        )

    def _may_take_in(self, hosts: list[Host], now: float) -> bool:
        """Whether this is the host to interrupt the attempt for one that has come (back), and the time to."""
        plan = self.attempt.plan
        new = [one for one in hosts if not plan.has(one.node) and one.name not in plan.left_out]
        if not new or plan.members[0].node != self.me.node or now - self.attempt.begin < JOIN_AFTER:
            return False
        known = metrics.read_status(self.environment.run_dir)
        return (
            known.get("state") == "running"
            and known.get("attempt") == plan.attempt
            and bool(known.get("slowest"))
        )

    def _kill(self, why: str, code: int = 1) -> None:
        self._over(Outcome(code, with_held(why, self.attempt.kill(self._renew))))

    def _over(self, outcome: Outcome, unreached: list[int] | None = None) -> None:
        attempt, self.attempt = self.attempt.plan.attempt, None
        self._note(attempt, outcome, unreached)

    def _note(self, attempt: int, outcome: Outcome, unreached: list[int] | None = None) -> None:
        """Note how an attempt ended here, for the others to see; unreached: its nodes that did not answer then."""
        known = metrics.read_status(self.environment.run_dir)
        if self.asked and outcome.code in (-signal.SIGTERM, LOST):
            reason = "stopped on request before the ranks could save; they go on from the last checkpoint"
            outcome = Outcome(STOPPED, reason)
        self.me = dataclasses.replace(
            self.me,
            done=attempt,
            code=outcome.code,
            reason=outcome.reason,
            ended=time.time(),
            # While it loads, a rank leaves there what was known before, which may be of steps that were given up.
            saved=known.get("last_checkpoint") or 0 if known.get("step") is not None else 0,
            cut_off=outcome.cut_off,
            stepped=known.get("attempt") == attempt and bool(known.get("slowest")),
            unreached=unreached or [],
        )
        # Without its wire a host may have lost its address; it comes back.
        with contextlib.suppress(BadInput, OSError):
            self.me = dataclasses.replace(self.me, port=self.port.choose())
        if self.asked and outcome.code:
            self.failed_over_stop = True
            # Before the others see that it is over here, and plan the next one.
            with contextlib.suppress(store.Unreachable):
                self._end(self._own_end())
        if outcome.code:
            self._say("restarting", outcome.reason)
            _print(f"attempt {attempt} ended: {outcome.reason}")

    # --- words ---

    def _conclude(self, end: End, own: bool = False) -> int:
        """Write the final status.json; returns the exit code.

        own: the end is this host's alone. The run may go on, and this very start of it have this host take part again.
        """
        if not own and "end" not in self.entries:
            self._tell(end)
        code, reason = end.code, end.reason
        if code not in (0, STOPPED) and self.me.code in (LOST, STOPPED):
            # The host that is at fault has the code; here it was a lost peer.
            code, reason = LOST, self.me.reason if self.me.code == LOST else end.reason
        elif code == STOPPED and self.me.code == STOPPED:
            reason = self.me.reason
        code = code if code >= 0 else 1
        for file in (self.environment.stop_file, self.environment.yield_file):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        state = {0: "finished", STOPPED: "stopped"}.get(code, "failed")
        if code:
            _print(f"{state}: {reason}")
        self.status.facts["launch"] = None if own else self.launch or None
        self._say(state, reason if code else None)
        return code

    def _say(self, state: str, reason: str | None) -> None:
        """Bring status.json up to date, the ranks' last word on steps and losses kept."""
        if (state, reason) == self.shown and self.attempt is None:
            return
        own = ("attempt", "world_size", "launch", "note")
        kept = {name: self.status.facts[name] for name in own if self.status.facts.get(name) is not None}
        known = metrics.read_status(self.environment.run_dir)
        if known.get("attempt") != self.status.facts.get("attempt"):
            known["slowest"] = None  # was another attempt's
        self.status.facts.update({**known, **kept})
        self.status.facts["state"] = None
        with contextlib.suppress(OSError):  # what a disk does not take is tried again at the next look
            if self.status.update(state=state, reason=reason):
                self.shown = (state, reason)


def _failed_at_once(config: Config, environment: Environment, why: str) -> None:
    """Have status.json say that no launcher came to be, for who follows the run, and the run behind it in the queue."""
    # Another one of this very start may yet come to be.
    facts = {
        "run": config.run,
        "host": environment.host,
        **metrics.read_status(environment.run_dir),
        "launch": None,
    }
    with contextlib.suppress(OSError):
        metrics.Status(environment.run_dir, **facts).update(at_once=True, state="failed", reason=why)


def _print(line: str) -> None:
    """For the journal; a launcher does not end for want of one."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class NoAddress(BadInput):
    """The host does not have the address that it was given."""


class Port:
    """The port at `address` where ranks would meet if this host came first: free, and no other run's on this machine.

    Between two attempts nothing listens there, so that the next run would find it free, too. So its number is held by a
    name that only one process of the machine (of its network namespace) can have, and that goes with the process.
    """

    def __init__(self, address: str):
        self.address, self.number = address, 0
        self._held: socket.socket | None = None

    def choose(self) -> int:
        """The number held, or where somebody listens there by now, a free one from MASTER_PORT on; raises BadInput."""
        if self._held and self._is_free(self.number):
            return self.number
        if self._held:
            self._held.close()
            self._held = None
        wanted = number("MASTER_PORT", 29500)
        if not 1 <= wanted <= 65535:
            raise BadInput(f"MASTER_PORT {wanted} is no port; choose one from 1024 to 65535")
        for port in range(wanted, min(wanted + PORTS, 65536)):
            if self._hold(port):
                self.number = port
                return port
        raise BadInput(
            f"MASTER_PORT {wanted} and the {PORTS} ports after it are in use at {self.address}; choose another"
        )

    def _hold(self, port: int) -> bool:
        """Take the number before looking: of two that look at once, one has it."""
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                held.bind(f"\0trainyard {self.address} {port}")
            except OSError:
                return False
            if not self._is_free(port):
                return False
            self._held = held
            stack.pop_all()
            return True

    def _is_free(self, port: int) -> bool:
        """Whether nobody listens there; raises BadInput where there is no such address."""
        try:
            family = socket.getaddrinfo(self.address, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((self.address, port), family=family).close()
            return True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise NoAddress(
                    f"CLUSTER_ADDRESS {self.address} is no address of this host; correct it"
                ) from None
            raise BadInput(
                f"MASTER_PORT {port} cannot be used: {error.strerror}; choose one from 1024 to 65535"
            ) from None


def _has_ended(run_dir: Path) -> bool:
    """Whether a run has ended on this host, or is not there any more."""
    return not run_dir.exists() or metrics.read_status(run_dir).get("state") in metrics.FINAL
