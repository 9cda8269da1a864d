"""A run's logs from one host: its ranks' and its launcher's, each line with its time and where it comes from.

Once, it returns the last lines for the play to merge with the other hosts'. With `follow` it prints what comes, while
the task runs, until the run ends on the host; one that falls silent is asked until it answers. Ranks' lines begin with
the time of day, a launcher's in its file with the date, too; one without has the time of the line before. A launcher
that systemd keeps speaks into the journal; where Slurm keeps it, or no systemd is, into logs/launch.log, beside which
Slurm's own words stand in job.log.
"""

from __future__ import annotations

import calendar
import math
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path += [str(Path(__file__).parents[1] / "module_utils"), str(Path(__file__).parents[2])]

from host_runs import JOB_SCRIPT
from live_frame import clean
from run_keeper import STAMP, UNREAD, journal_command, read_state, shown, state_command
from telling import silence

from plugins.action.run_follow import PATIENCE, Spool, in_thread

display = Display()

WINDOW = 1 << 20  # bytes of a log that are read at most in one look
WINDOWS = 32 << 20  # of all logs of a host: a rank may have made any number of them
JOURNAL = 1000  # lines of the journal, likewise
OTHERS = {
    "launch.log": "launch",
    "job.log": "job",
}  # the logs that are no rank's, and what their lines are marked with
ASIDE = ".1"  # what the name of a log ends with that has gone aside (trainer/environment.py)
REFRESH = 1.0  # seconds between two looks
BOOT = 20.0  # seconds in which a host that answers again may not have started the run's unit yet
DAY = 86400
OF_DAY = re.compile(r"(\d\d):(\d\d):(\d\d) ")
# Of a part of a look: a log, when it was changed (s since the epoch), and from which byte on it is.
TITLE = re.compile(r"(.+) (\d{1,15}) (\d{1,15})\n")
BEGUN = re.compile(
    r"^=== run .*, (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)$"
)  # an attempt's first line: commands/train.py


@dataclass(frozen=True)
class Line:
    """time: seconds since the epoch. source: HOST/rN of rank N, HOST/launch of the launcher, HOST/job of Slurm's."""

    time: float
    source: str
    text: str
    journal: bool = False

    def __str__(self) -> str:
        """As it is shown, with the controller's time of day."""
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))} {self.source} | {self.text}"


def look_command(
    keeper: str, run: str, run_dir: str, rank: str, offsets: dict[str, int], cursor: float
) -> str:
    """The shell command of one look: the keeper's state, the host's time zone, and each log's new bytes.

    offsets: bytes of each log that were read. cursor: the launcher's lines are those after it, s since the epoch.
    """
    logs = f"rank-{rank}.log" if rank else " ".join(["rank-*.log", *OTHERS])
    read = shown('"$1"', WINDOW, "$from")
    show = (
        f'show() {{ size=$(stat -c %s "$1"); [ "$from" -gt $((size - {WINDOW})) ] || from=$((size - {WINDOW})); '
        '[ "$from" -gt 0 ] || from=0; [ "$from" -ge "$size" ] || '
        f'{{ echo; echo "::log $1 $(stat -c %Y "$1") $from"; {read}; }}; }}'
    )
    seen = " ".join(f"{shlex.quote(name)}) from={offset};;" for name, offset in offsets.items())
    command = (
        f'for log in {logs}; do [ -f "$log" ] || continue; '
        f'from=0; case "$log" in {seen} esac; [ "$from" -le $(stat -c %s "$log") ] || {{ '
        f'[ ! -f "$log{ASIDE}" ] || show "$log{ASIDE}"; from=0; }}; show "$log"; done'
    )
    if keeper == "systemd" and not rank:
        options = f"--since=@{int(cursor)} --lines={JOURNAL} --output=short-unix"
        journal = journal_command(run, options, "echo ::unread")
        command += f"; [ -e ../{JOB_SCRIPT} ] || {{ echo; echo '::log journal 0 0'; {journal}; }}"
    return (
        f"{show}; cd {shlex.quote(run_dir)} || exit 3; echo ::keeper; {state_command(keeper, run, run_dir)}; "
        f'echo "::zone $(date +%z)"; cd logs 2>/dev/null || exit 0; {{ {command}; }} | head -c {WINDOWS}'
    )


def zone(text: str) -> int:
    """Seconds east of UTC of a zone such as +0530."""
    seconds = int(text[1:3]) * 3600 + int(text[3:5]) * 60
    return -seconds if text[0] == "-" else seconds


def timed(lines: list[str], changed: float, east: int) -> list[tuple[float, str]]:
    """(s since the epoch, text without its time) of each line of a rank's, the last of which was written at `changed`.

    An attempt's first line has its date, from which on days are counted; lines before the first such line are dated
    backwards. east: the host's time zone, s east of UTC.
    """
    times: list[float | None] = []
    attempt = None  # the first line of an attempt, as an index
    for index, line in enumerate(lines):
        if begun := BEGUN.search(line):
            attempt = index if attempt is None else attempt
            times.append(calendar.timegm(time.strptime(begun[1], "%Y-%m-%d %H:%M:%S")) - east)
        elif (seconds := of_day(line)) is None:
            times.append(None)
        elif attempt is None:
            times.append(float(seconds))  # still without its day
        else:
            last = next(moment for moment in reversed(times) if moment is not None)
            moment = midnight(last, east) + seconds
            times.append(moment + DAY if moment < last - 1 else moment)
    # The file's time may be a fraction earlier than the second that its last line names.
    after = changed + 1 if attempt is None else times[attempt]
    for index in reversed(range(len(lines) if attempt is None else attempt)):
        if times[index] is not None:
            moment = midnight(after, east) + times[index]
            after = times[index] = moment - DAY if moment > after else moment
    told, last = [], next((moment for moment in times if moment is not None), changed)
    for line, moment in zip(lines, times, strict=True):
        last = last if moment is None else moment
        told.append((last, line if of_day(line) is None else line[9:]))
    return told


def stamped(lines: list[str], changed: float, east: int) -> list[tuple[float, str]]:
    """As `timed`, of a log whose lines begin with their date; those before the first such line have its time."""
    found = [STAMP.match(line) for line in lines]
    times = [mark and calendar.timegm(time.strptime(mark[1], "%Y-%m-%d %H:%M:%S")) - east for mark in found]
    told, last = [], next((moment for moment in times if moment is not None), changed)
    for line, moment in zip(lines, times, strict=True):
        last = last if moment is None else moment
        told.append((last, STAMP.sub("", line)))
    return told


def of_day(line: str) -> int | None:
    """The seconds since midnight that a line begins with."""
    found = OF_DAY.match(line)
    return None if not found else int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])


def midnight(moment: float, east: int) -> float:
    """The midnight before `moment`, in the zone `east`."""
    return (moment + east) // DAY * DAY - east


def read_look(
    output: str, host: str, known: dict[str, int] | None = None, cursor: float = 0
) -> tuple[str, list[Line], dict[str, int], dict[str, float]]:
    """The answer to `look_command`: the keeper's state, the lines, each log's new offset, and which logs were cut.

    A line that is not whole yet is left for the next look. known, cursor: how far was read before. Cut is a log of
    which a look has not read all since then: {its name (journal: the journal): the time of the first line after that,
    infinite for a journal that may not be read}.
    """
    head, *parts = output.split("\n::log ")
    keeper, _, rest = head.partition("::zone ")
    east = zone(rest.split()[0]) if rest.split() else 0
    lines, offsets, cut = [], {}, {}
    for part in parts:
        if not (title := TITLE.match(part)):  # cut short, or a rank's own words
            continue
        (name, changed, start), text = title.groups(), part[title.end() :]
        if name == "journal" and text.strip() == "::unread":
            cut[name] = math.inf
            continue
        if name == "journal":
            said = [moment_and_words(line) for line in text.splitlines()]
            told = [one for one in said if one and one[0] > cursor]
            lines += [Line(moment, f"{host}/launch", words, journal=True) for moment, words in told]
            if told and len(said) >= JOURNAL and len(told) == sum(map(bool, said)):
                cut[name] = min(moment for moment, _ in told)
            continue
        whole = text[: text.rfind("\n") + 1]
        end = int(start) + len(whole.encode("utf-8", "surrogateescape"))
        # The file that went aside comes first, and what is new then begins anew.
        before = offsets.get(name, (known or {}).get(name.removesuffix(ASIDE), 0))
        aside, name = name.endswith(ASIDE), name.removesuffix(ASIDE)
        offsets[name] = 0 if aside else end
        skipped = int(start) > before
        if skipped:
            whole = whole.partition("\n")[2]  # from the middle of a line
        source = OTHERS.get(name) or f"r{name.removeprefix('rank-').removesuffix('.log')}"
        dated = stamped if name in OTHERS else timed
        told = dated(whole.splitlines(), float(changed), east)
        lines += [Line(moment, f"{host}/{source}", said) for moment, said in told if said]
        if skipped:
            cut[name] = told[0][0] if told else float(changed)
    return read_state(keeper)["state"], lines, offsets, cut


def moment_and_words(line: str) -> tuple[float, str] | None:
    """(s since the epoch, what was said) of a line of the journal: "MOMENT HOST trainer[PID]: text"; else None."""
    moment, _, said = line.partition(" ")
    if not re.fullmatch(r"\d+\.\d+", moment) or ": " not in said:
        return None
    return float(moment), said.split(": ", 1)[1]


def over(states: list[str]) -> bool:
    """Whether a silent host need not be asked any more, by all hosts' `states` (active, ended, silent, "" of others):

    the run has ended on one of them, and goes on on none that answers.
    """
    return "ended" in states and "active" not in states


def asked_rank(args) -> str:
    """The rank whose log is asked for, "" for all: the number 0, as JSON has it, is one, too, and 03 is 3."""
    rank = args.get("rank")
    return "" if rank in (None, "") else str(int(rank))


class Late(AnsibleError):
    """A call has not come back in time."""


class Patient:
    """A `call` that may not come back for hours, as over SSH to a host whose disk hangs: it has a thread of its own."""

    def __init__(self, call: Callable):
        self._call = call
        self._thread: threading.Thread | None = None
        self._found: list = []

    def __call__(self, seconds: float):
        """What the call returns or raises; Late if it does not within `seconds`: the next time, it is waited for on."""
        if self._thread is None:
            self._found = []
            self._thread = in_thread(self._make)
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise Late(f"Timed out after {seconds:.0f} seconds")
        self._thread = None
        error, result = self._found
        if error:
            raise error
        return result

    def _make(self) -> None:
        try:
            self._found = [None, self._call()]
        except Exception as error:
            self._found = [error, None]


class ActionModule(ActionBase):
    """Arguments: run, run_dir, keeper, rank (all with ""), offsets and cursor (of an earlier look); follow, with hosts.

    Returns lines, and what was left out, with the time up to which it was said ([time, text] each); offsets and cursor.
    hosts: those of the run. One that falls silent, or is silent from the first, is asked until it answers.
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = self._task.args
        self.host = task_vars["inventory_hostname"]
        self.about = (
            str(args["keeper"]),
            str(args["run"]),
            str(args["run_dir"]),
            asked_rank(args),
        )
        self.offsets = dict(args.get("offsets") or {})
        self.cursor = float(args.get("cursor") or 0)
        self.told_unread = "offsets" in args  # by that look
        if args.get("follow"):
            self._follow([str(host) for host in args["hosts"]], 0 if "offsets" in args else int(time.time()))
            return {**result, "changed": False}
        _, lines, left_out = self._look()
        told = [[line.time, str(line)] for line in lines]
        looked = {"lines": told, "left_out": left_out, "offsets": self.offsets, "cursor": self.cursor}
        return {**result, "changed": False, **looked}

    def _follow(self, hosts: list[str], begin: float) -> None:
        """Show what comes after `begin` (s since the epoch), until the run ends here; while this host is silent, until
        it ends elsewhere.
        """
        spool = Spool(self._task._uuid)
        # What was silent when all were looked at was told then. back: when it last answered again.
        back, silent = 0.0, begin > 0
        look = Patient(self._look)
        self.cursor = max(self.cursor, begin)
        spool.put(self.host, {"state": "active"})
        while True:
            spool.end_if_alone()
            try:
                state, lines, left_out = look(REFRESH if silent else PATIENCE)
            except AnsibleError as error:
                state, lines, left_out = "silent", [], []
                if not silent:
                    display.display(clean(silence(self.host, {"msg": str(error)})))
                if isinstance(error, AnsibleConnectionFailure):
                    self._connection.reset()
            now = time.time()
            if silent and state != "silent":
                display.display(f"{self.host} answers")
                back = now
            silent = state == "silent"
            if state == "ended" and now - back < BOOT:
                state = "active"
            for moment, words in left_out:
                if moment > begin:
                    display.display(clean(words))
            for line in sorted(lines, key=lambda line: line.time):
                if line.time >= begin:
                    display.display(clean(line))
            spool.put(self.host, {"state": state})
            if state == "ended" or (silent and over([spool.get(host).get("state", "") for host in hosts])):
                return
            time.sleep(REFRESH)

    def _look(self) -> tuple[str, list[Line], list[list]]:
        answer = self._low_level_execute_command(
            look_command(*self.about, self.offsets, self.cursor), sudoable=False
        )
        if answer["rc"] != 0:
            said = (answer["stderr"] or answer["stdout"]).strip()[-200:]
            raise AnsibleActionFail(f"cannot read the logs in {self.about[2]}: {said}")
        state, lines, offsets, cut = read_look(answer["stdout"], self.host, self.offsets, self.cursor)
        self.offsets.update(offsets)
        self.cursor = max([self.cursor, *(line.time for line in lines if line.journal)])
        _, run, run_dir, _ = self.about
        left_out = []
        for name, moment in cut.items():
            if moment == math.inf:
                words = f"{self.host}: what its launcher said is missing: {UNREAD}"
                left_out += [] if self.told_unread else [[moment, words]]
                self.told_unread = True
                continue
            place = f"`journalctl --unit trainyard@{run}`" if name == "journal" else f"{run_dir}/logs/{name}"
            clock = time.strftime("%H:%M:%S", time.localtime(moment))
            words = (
                f"{self.host}: what {place} has before {clock} is too much, and was left out; read it there"
            )
            left_out.append([moment, words])
        return state, lines, left_out
