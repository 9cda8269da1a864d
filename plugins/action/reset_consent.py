"""Ask for the hosts' names before they are reset: typed at the terminal, or after -e reset=."""

from __future__ import annotations

import re

from ansible.errors import AnsiblePromptInterrupt, AnsiblePromptNoninteractive
from ansible.module_utils.common.text.converters import to_text
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


class ActionModule(ActionBase):
    """Arguments: hosts (names), typed (what stands after -e reset=, or nothing)."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        hosts = [str(host) for host in self._task.args["hosts"]]
        typed, how = self._task.args.get("typed"), "reset"
        if self._task.check_mode and typed is None:
            return {**result, "changed": False}
        if typed is None:
            how, names = "your answer", ",".join(hosts)
            try:
                typed = to_text(
                    Display().prompt_until(
                        f"This cannot be undone. To go on, type the names of the hosts ({names}): "
                    )
                )
            except AnsiblePromptInterrupt:
                typed = ""
            except AnsiblePromptNoninteractive:
                msg = f"There is no terminal to ask at. To remove what is listed: -e reset={names}. {NOTHING}"
                return {**result, "failed": True, "msg": msg}
        fault = consent_fault(str(typed), hosts, how)
        if fault:
            return {**result, "failed": True, "msg": fault}
        return {**result, "changed": False}
