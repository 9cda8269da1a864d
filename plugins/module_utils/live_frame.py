"""What a terminal shows of a playbook that runs, as plain text: bars, a line a host, messages. Touches no terminal.

Text of hosts is cleaned here of whatever a terminal would obey. Widths are columns: some characters take two, some
none.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, fields, is_dataclass, replace

from telling import SHOWN_HOSTS, rows_of

from trainer.words import span

BAD = (("failures", "failed"), ("unreachable", "unreachable"))
BAR = 20  # columns between a bar's brackets
NAMED = 12  # columns in which a task's name says something
KEPT_ROWS = 4  # of the terminal, for what scrolls above
TAIL = 15  # lines of a failed command's words
NO_PYTHON = re.compile(r"module interpreter '.+' was not found")  # by Ansible
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -~]?)")
SHARE = re.compile(r"\b(\d[\d,]*)(?:/| of )(\d[\d,]*)\b")
PERCENT = re.compile(r"(?:^|: )(\d{1,3}) %")
COUNTED = re.compile(r"(\S+): (\d[\d,]* of \d[\d,]* MB .*)")


def clean(text: str) -> str:
    """`text` as a terminal may have it: no control characters nor marks of direction; its lines stay lines."""
    text = SEQUENCE.sub("", str(text)).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else "?"
        for one in text
    )


def cleaned(value):
    """A structure of a host's, as a diff or a warning of Ansible's is one, with all of its texts clean."""
    if isinstance(value, dict):
        return {key: cleaned(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [cleaned(one) for one in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if is_dataclass(value):
        return replace(value, **{one.name: cleaned(getattr(value, one.name)) for one in fields(value)})
    return clean(value) if isinstance(value, str) else value


def columns_of(text: str) -> int:
    """The columns that a terminal gives to a cleaned line."""
    return sum(
        0
        if unicodedata.category(one) in ("Mn", "Me")
        else 1 + (unicodedata.east_asian_width(one) in ("W", "F"))
        for one in text
    )


def cut(text: str, columns: int) -> str:
    """One line of `text` in at most so many columns; … where it was longer."""
    text = " ".join(clean(text).expandtabs(4).split("\n"))
    if columns_of(text) <= columns:
        return text
    while text and columns_of(text) >= columns:
        text = text[:-1]
    return f"{text}…"


def bar(done: float, total: float, columns: int = BAR) -> str:
    full = int(columns * min(1.0, max(0.0, done / total))) if total else 0
    return f"[{'#' * full}{'-' * (columns - full)}]"


def share(text: str) -> tuple[int, int] | None:
    """(done, total) where `text` says so, as "3/24" or "12 of 2,000"; None where it does not."""
    found = SHARE.search(text)
    done, total = (int(number.replace(",", "")) for number in found.groups()) if found else (0, 0)
    return (done, total) if 0 <= done <= total and total else None


def percent(text: str) -> tuple[int, int] | None:
    """(done, 100) where `text`, or what comes after a colon in it, begins with a percentage."""
    found = PERCENT.search(text)
    return (int(found[1]), 100) if found else None


def counted(text: str) -> tuple[str, str] | None:
    """(host, how far it is) of a line by telling.brought; None of any other."""
    found = COUNTED.fullmatch(text)
    return (found[1], found[2]) if found else None


@dataclass
class Doing:
    """What a host does since `since` (seconds of a clock): a task, and its uuid.

    `note` is how far it is; `first` when a note first had a share of such a total, and which; `last` the latest share.
    """

    task: str
    uuid: str
    since: float
    note: str = ""
    first: tuple[float, int, int] | None = None
    last: tuple[int, int] = (0, 0)

    def tell(self, note: str, now: float) -> None:
        self.note = note
        if found := share(note):
            if self.first is None or found[1] != self.last[1] or found[0] < self.last[0]:
                self.first = (now, *found)
            self.last = found

    def words(self, now: float, columns: int = BAR) -> str:
        """The note, with a bar and the time left where it has a share; with a bar where it has a percentage.

        Percentages are of parts that differ too much for a time, or say it themselves.
        """
        if done := percent(self.note):
            return f"{bar(*done, columns)} {self.note}"
        found = share(self.note)
        if not found:
            return self.note
        words = f"{bar(*found, columns)} {self.note}"
        if self.first and found[0] > self.first[1]:
            left = (found[1] - found[0]) * (now - self.first[0]) / (found[0] - self.first[1])
            words += f", {span(left)} left"
        return words


class Board:
    """What all hosts do in a play. `note` is a line on all of them together, which its writer keeps writing over.

    Below a note stand the hosts of which its writer tells something.
    """

    def __init__(self) -> None:
        self.play, self.began, self.note = "", 0.0, ""
        self.at, self.tasks = 0, 0  # the play's task by its number, and how many are known
        self.doing: dict[str, Doing] = {}
        self.order: dict[str, int] = {}  # of hosts, as they first came

    def begin(self, play: str, tasks: int, now: float) -> None:
        self.play, self.tasks, self.began = play, tasks, now
        self.at, self.note, self.doing = 0, "", {}

    def start(self, host: str, task: str, uuid: str, now: float) -> None:
        self.order.setdefault(host, len(self.order))
        self.doing[host] = Doing(task, uuid, now)

    def end(self, host: str) -> None:
        self.doing.pop(host, None)

    def sorted(self, hosts) -> list[str]:
        return sorted(hosts, key=lambda host: self.order.get(host, 0))

    def takes(self, text: str, newline: bool, now: float) -> bool:
        """Whether `text`, about to be printed, is progress and belongs here: what is written over, or counted."""
        found = counted(text)
        doing = found and self.doing.get(found[0])
        if not newline:
            line, rows = rows_of(clean(text.removeprefix("\r")))
            self.note = line.strip()
            for host, words in rows:
                if doing := self.doing.get(host):
                    doing.tell(words, now)
        elif doing:
            doing.tell(found[1], now)
        elif text.startswith("\r"):  # the last word of such a line stays
            self.note = ""
        return not newline or bool(doing)

    def lines(self, size: tuple[int, int], now: float) -> list[str]:
        """The board for a terminal of `size`, columns and rows; nothing while no host is busy.

        Where the hosts are more than the rows, those longest at it are shown, and the others counted.
        """
        doing = dict(self.doing)  # other threads change it
        columns, rows = size[0] - 1, max(2, size[1] - KEPT_ROWS)  # the last column would wrap
        if self.note:
            done = share(self.note) or percent(self.note)
            lines = ([bar(*done)] if done else []) + [self.note]
            doing = {host: one for host, one in doing.items() if one.note}
        elif doing:
            far = f"{bar(self.at - 1, self.tasks)} task {self.at} of {self.tasks}  " if self.at else ""
            spent = span(now - self.began)
            lines = [f"{far}{cut(self.play, max(8, columns - len(far) - len(spent) - 2))}  {spent}"]
        else:
            return []
        left = max(0, rows - len(lines))
        shown = self.sorted(doing)
        if len(doing) > left:
            shown = sorted(doing, key=lambda host: doing[host].since)[: max(0, left - 1)]
        names = {host: cut(host, max(8, columns // 3)) for host in shown}
        wide = max(map(columns_of, names.values()), default=0)
        for host in shown:
            name = names[host] + " " * (wide - columns_of(names[host]))
            spent, note = span(now - doing[host].since), doing[host].words(now)
            if self.note:  # of the same task on all
                lines.append(f"  {name}  {note}")
                continue
            room = columns - wide - len(spent) - 6
            task = doing[host].task
            if note:  # which says more than the task's name
                note = note if columns_of(note) <= room else doing[host].words(now, BAR // 2)
                named = room - columns_of(note) - 2
                task = f"{cut(task, named)}  {note}" if named >= NAMED else note
            lines.append(f"  {name}  {cut(task, room)}  {spent}")
        if len(shown) < len(doing) and left:
            lines.append(f"  … and {len(doing) - len(shown)} more hosts, not so long at it")
        return [cut(line, columns) for line in lines]


def failure_text(result: dict) -> str:
    """Why a task failed: its message in full, and the last words of a command or a module that broke."""
    message = result.get("msg") or result.get("censored") or "it failed, and says nothing of why"
    lines = [str(one) for one in message] if isinstance(message, list) else [str(message)]
    said = [
        str(result[key]) for key in ("stderr", "stdout", "module_stderr", "module_stdout") if result.get(key)
    ]
    for words in said[:1]:
        if words.strip() not in lines[0]:
            lines += words.strip().splitlines()[-TAIL:]
    if NO_PYTHON.search(lines[0]):  # as on the smallest Debian
        lines.append(
            "Ansible needs a Python there. As root on that host: apt-get install python3; or from here, with your -i "
            "and -K: ansible HOST -b -m raw -a 'apt-get update && apt-get -y install python3'"
        )
    return clean("\n".join(lines)).strip()


def failures(result: dict) -> list[str]:
    """`failure_text` of a task's result; of a loop, that of each item that failed, after the item's name.

    Of facts, that of each module which should have gathered them: the task's own says no more than that module's name.
    """
    if gathering := result.get("failed_modules"):
        return [failure_text(one) for one in gathering.values()]
    items = [one for one in result.get("results") or () if isinstance(one, dict)]
    failed = [one for one in items if one.get("failed") or one.get("unreachable")]
    return [
        f"{clean(one.get('_ansible_item_label', one.get('item', 'an item')))}: {failure_text(one)}"
        for one in failed
    ] or [failure_text(result)]


def folded(hosts: list[str]) -> str:
    """Hosts of one line, not too many of them."""
    rest = len(hosts) - SHOWN_HOSTS
    words = [cut(host, 60) for host in hosts[:SHOWN_HOSTS]]
    return " ".join(words + ([f"and {rest} more"] if rest > 0 else []))


def indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


def recap(counts: dict[str, dict[str, int]]) -> list[str]:
    """A line a host: what it did. counts: by host, Ansible's (ok, changed, failures, unreachable, …)."""
    wide = max((columns_of(cut(host, 60)) for host in counts), default=0)
    lines = []
    for host, count in counts.items():
        name = cut(host, 60)
        words = [f"{count['ok']} ok", f"{count['changed']} changed"]
        words += [f"{count[key]} {word}" for key, word in BAD if count[key]]
        lines.append(f"{name}{' ' * (wide - columns_of(name))}  {', '.join(words)}")
    return lines
