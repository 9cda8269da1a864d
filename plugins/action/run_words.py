"""What was typed after -e for a playbook, each word checked: names, values, and that there is no other.

A text (a prompt) is taken as it was typed. Ansible itself would cut it at its first space, and fill in what stands in
braces.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ansible import context
from ansible.errors import AnsibleError
from ansible.parsing.splitter import parse_kv
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

CHECKOUT = str(Path(__file__).resolve().parents[2])
if CHECKOUT not in sys.path:
    sys.path.append(CHECKOUT)

sys.path.append(os.path.join(CHECKOUT, "plugins/module_utils"))

from telling import limit_fault

from plugins.action.run_config import OTHERS, SWITCHES, plain, role_variables
from trainer.config import FIELDS

RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
LONGEST = 130_000  # bytes, a little less than Linux takes for one word of a command
YES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Odd(Exception):
    """What was expected of a value."""


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,20}", text) or not least <= int(text) <= most:
            raise Odd(f"a whole number, {least} or more")
        return int(text)

    return read


def number(text: str) -> float:
    try:
        if 0 <= (found := float(text)) < float("inf"):
            return found
    except ValueError:
        pass
    raise Odd("a number, 0 or more")


def yes(text: str) -> bool:
    if text.lower() not in YES:
        raise Odd("true or false")
    return YES[text.lower()]


def name(text: str) -> str:
    if not re.fullmatch(RUN, text):
        raise Odd("a run's name: letters, digits, dots, hyphens and underscores")
    return text


def span(text: str) -> str:
    if not re.fullmatch(r"\d+[smhd]", text):
        raise Odd("a time span such as 90s, 10m, 2h or 1d")
    return text


def path(text: str) -> str:
    if not text:
        raise Odd("a path")
    return os.path.abspath(os.path.expanduser(text))


def file(text: str) -> str:
    """A file's text, for what no command line takes well: quotes, several lines."""
    try:
        found = Path(text).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        raise Odd(f"a text file that can be read ({getattr(error, 'strerror', None) or error})") from None
    if "\0" in found or len(found.encode()) + found.count("$") > LONGEST:  # systemd takes them doubled
        raise Odd(
            f"a text of {LONGEST:,} bytes at most, without null characters: it becomes one word of a command"
        )
    return found


KINDS: dict[str, Callable] = {
    **{"name": name, "text": str, "plain": str, "number": number, "yes": yes, "path": path, "file": file},
    **{
        "whole": whole(0),
        "count": whole(1),
        "seed": whole(0, 2**63 - 1),
        "step": whole(1, 10**12),
        "span": span,
    },
}


def as_typed(word: str, options: tuple[str, ...]) -> str | None:
    """What follows `word=` in the last -e that begins with it, quotes around the whole taken off; None without one."""
    for option in reversed(options):
        head, mark, text = option.lstrip().partition("=")
        if mark and head.strip() == word:
            quote = text[:1]
            whole_quoted = quote in ("'", '"') and len(text) > 1 and text.find(quote, 1) == len(text) - 1
            return text[1:-1] if whole_quoted else text
    return None


def read_words(takes: Mapping[str, str], extra: Mapping, options: tuple[str, ...], known: set[str]) -> tuple:
    """({word: value or None}, [what is wrong]). takes: word -> kind. known: variables that are the roles'."""
    values, problems = dict.fromkeys(takes), []
    texts = {
        word: text
        for word, kind in takes.items()
        if kind == "text" and (text := as_typed(word, options)) is not None
    }
    # What Ansible has read from inside a text was not said.
    inside = {one for text in texts.values() for one in (*re.findall(r"(\w+)=", text), "_raw_params")}
    said = [one for one in options if one.lstrip().partition("=")[0].strip() not in texts]
    again = {}
    for one in said if inside else ():
        if not one.lstrip().startswith(("@", "{", "[")):  # a file's name, or JSON
            with contextlib.suppress(AnsibleError):
                again |= parse_kv(one)
    outside = {
        word: again.get(word, value) for word, value in extra.items() if word not in inside or word in again
    }
    # A playbook has these by the name, whatever was meant.
    for word in sorted(one for one in inside & {*extra} if one in known or one.startswith("ansible_")):
        problems.append(
            f"{', '.join(texts)}: found {word}= in it, which Ansible takes for a variable; expected a text without. "
            "Give it by a file: -e prompt_file=FILE"
        )
    for word, value in {**outside, **texts}.items():
        if word == "_raw_params":
            problems.append(
                f"-e … {value}: found words that are no key=value; expected every value with a space to be quoted "
                "twice: -e \"key='a value'\". Quote it."
            )
        elif word in takes:
            try:
                values[word] = KINDS[takes[word]](str(value))
            except Odd as odd:
                problems.append(f"{word}: found {str(value)[:80]!r}; expected {odd}. Correct it.")
        elif word not in known and not word.startswith(OTHERS):
            near = difflib.get_close_matches(word, takes, n=1, cutoff=0.6)
            expected = f"{near[0]}?" if near else f"{'one of ' if len(takes) > 1 else ''}{', '.join(takes)}"
            problems.append(
                f"-e {word}: found an unknown word; expected {expected}. Correct it, or leave it out."
            )
    return values, problems


class ActionModule(ActionBase):
    """Arguments: takes (word -> one of KINDS), needs (words that must be given, each with why). Returns `words`."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = plain(self._task.args)
        extra = plain(load_extra_vars(self._loader))
        known = role_variables(os.path.join(CHECKOUT, "roles"))
        if any(os.path.basename(book) == "train.yml" for book in context.CLIARGS.get("args") or ()):
            known |= {*SWITCHES, *FIELDS}  # preflight.yml train.yml: it checks its own
        words, problems = read_words(
            args["takes"], extra, tuple(context.CLIARGS.get("extra_vars") or ()), known
        )
        problems += [why for word, why in (args.get("needs") or {}).items() if words[word] is None]
        problems += [fault] if (fault := limit_fault(task_vars)) else []
        if problems:
            return {**result, "failed": True, "changed": False, "msg": "\n".join(problems)}
        return {**result, "changed": False, "words": words}
