"""Ask twice before hosts are reset: whether, and by their names. At the terminal, or by -e sure=true and -e reset=."""

from __future__ import annotations

import re

from ansible.errors import AnsiblePromptInterrupt, AnsiblePromptNoninteractive
from ansible.module_utils.common.text.converters import to_text
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

NOTHING = "Nothing was changed."


def consent_fault(typed: str, hosts: list[str], how: str) -> str:
    """Why `typed` does not name just the `hosts`; "" where it does. how: where it was typed."""
    named = [name for name in re.split(r"[\s,]+", typed.strip()) if name]
    if sorted(named) == sorted(hosts):
        return ""
    return (
        f"{how}: found {', '.join(named) or 'nothing'}; expected just the hosts of this play: {','.join(hosts)}. "
        f"Choose them by -l, and name them all. {NOTHING}"
    )


def ask(question: str) -> str:
    """What is typed; "" after Ctrl-C. Raises AnsiblePromptNoninteractive where there is no terminal."""
    try:
        return to_text(Display().prompt_until(question))
    except AnsiblePromptInterrupt:
        return ""


def fault(hosts: list[str], sure: bool | None, typed: object) -> str:
    """Why the hosts are not reset; "" where both answers are the right ones. What is not given yet is asked for."""
    how, names = "reset", ",".join(hosts)
    # What was given and is wrong needs no question.
    if typed is not None and (why := consent_fault(str(typed), hosts, how)):
        return why
    try:
        if sure is None:
            count = f"{len(hosts)} hosts" if len(hosts) > 1 else "one host"
            sure = ask(f"Remove what is listed above from {count}? (yes or no): ").strip().lower() == "yes"
        if not sure:
            return f"Not asked for by yes, or -e sure=true. {NOTHING}"
        if typed is None:
            how = "your answer"
            typed = ask(f"This cannot be undone. To go on, type the names of the hosts ({names}): ")
    except AnsiblePromptNoninteractive:
        return f"There is no terminal to ask at. To remove what is listed: -e reset={names} -e sure=true. {NOTHING}"
    return consent_fault(str(typed), hosts, how)


class ActionModule(ActionBase):
    """Arguments: hosts (names), sure and typed (what stands after -e sure= and -e reset=, or nothing)."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        hosts = [str(host) for host in self._task.args["hosts"]]
        sure, typed = self._task.args.get("sure"), self._task.args.get("typed")
        if self._task.check_mode and sure is None and typed is None:
            return {**result, "changed": False}
        why = fault(hosts, None if sure is None else boolean(sure), typed)
        if why:
            return {**result, "failed": True, "msg": why}
        return {**result, "changed": False}
