"""What a playbook warned of and what failed, kept while it runs and told together in the end: by then it has scrolled
away. As preflight's report has it, the worst stands last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from live_frame import clean, cut
from telling import names

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
HOUSE = "WARNING: "  # what a task's words to the user begin with where they are a warning
KEPT_LINES = 4  # of the words on one failure
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def warning(words: str) -> str:
    """The warning in what a task says to the user; empty where it is none."""
    return words[len(HOUSE) :].strip() if words.startswith(HOUSE) else ""


def without(host: str, words: str) -> str:
    """Words without the name of the host that they begin with, so that those of many hosts can be equal."""
    return re.sub(rf"{re.escape(host)}(: | )", "", words, count=1) if words.startswith(host) else words


def short(words: str, stands: bool) -> str:
    """Words on a failure. stands: they are the last on the screen anyway, so that one sentence says which it was."""
    lines = words.split("\n")
    if stands:
        return SENTENCE.split(lines[0])[0]
    if len(lines) > KEPT_LINES:  # a command's last line says why, and a refusal's what to do
        lines = [*lines[: KEPT_LINES - 2], "…", lines[-1]]
    return "\n".join(lines)


class Found:
    """By kind and words, the hosts of which these are said."""

    def __init__(self) -> None:
        self.warned: dict[str, list[str]] = {}
        self.failed: dict[tuple[str, str, str], list[str]] = {}  # (uuid of a task, its name, words)
        self.cut_short = False  # the hosts that did not fail were stopped, too

    def warn(self, host: str, words: str) -> None:
        self._add(self.warned, without(host, clean(words).strip()), host)

    def fail(self, host: str, uuid: str, task: str, words: str) -> None:
        self._add(self.failed, (uuid, task, words), host)

    @staticmethod
    def _add(kept: dict, key, host: str) -> None:
        hosts = kept.setdefault(key, [])
        if host not in hosts:
            hosts.append(host)

    def lines(
        self, hosts: Iterable[str], sort: Callable[[list[str]], list[str]], last: str = ""
    ) -> list[tuple[str, str]]:
        """(kind, text) each, none where nothing was found.

        hosts: those that are well unless something was found on them. last: the uuid of the task whose failures are
        the last on the screen.
        """
        rows = [(WARN, on, words) for words, on in self.warned.items()]
        rows += [
            (FAIL, on, f"{task}: {short(words, uuid == last)}")
            for (uuid, task, words), on in self.failed.items()
        ]
        told = [(kind, f"{kind}  {self._named(sort(on))}: {_hanging(words)}") for kind, on, words in rows]
        bad = {host for _, on, _ in rows for host in on}
        if rows and (well := len(set(hosts) - bad)):
            so_far = ", as far as they came" if self.cut_short else ""
            told.insert(0, (PASS, f"{PASS}  {well} host{'s' * (well > 1)}{so_far}"))
        return told

    @staticmethod
    def _named(hosts: list[str]) -> str:
        return names(cut(host, 60) for host in hosts)


def _hanging(words: str) -> str:
    """Words of several lines, with those after the first below the first."""
    return words.replace("\n", "\n      ")
