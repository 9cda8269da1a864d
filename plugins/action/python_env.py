"""Have the locked environment on a host; where it reaches no index, the controller collects the wheels for it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins" / "module_utils"))

from how_far import ENVIRONMENT
from meanwhile import Said, file_on_host, told
from offline_wheels import Failure, wheelhouse

QUIET_SECONDS = 5  # longer than an environment that is there takes to be recognised

display = Display()


class ActionModule(ActionBase):
    """Calls the module. Where that asks for wheels, `wheels` are these files, as the action bring takes them."""

    def run(self, tmp=None, task_vars=None):
        """The module's result."""
        super().run(tmp, task_vars)
        host = task_vars["inventory_hostname"]

        def say(text: str) -> None:
            display.display(f"{host}: {text}")

        # Where no region shows a row of each host, nothing would be seen of this task for a minute.
        notice = threading.Timer(QUIET_SECONDS, say, ["building the locked environment, which takes minutes"])
        notice.daemon = True
        if not getattr(display, "led_by_region", False):
            notice.start()
        try:
            with told(host, file_on_host(self, f"{self._task.args['dir']}/{ENVIRONMENT}")):
                result = self._execute_module(task_vars=task_vars)
        finally:
            notice.cancel()
        if result.get("failed") or "target" not in result:
            return result
        key = result["key"]
        directory = ROOT / ".trainyard" / "wheelhouse" / key
        try:
            args = self._task.args
            said = Said()
            with told(host, said.read):
                found = wheelhouse(args["lock"], args["torch"], result["target"], directory, say, said.say)
        except Failure as failure:
            raise AnsibleActionFail(str(failure)) from None
        sizes = {name: (directory / name).stat().st_size for name in found}
        say(f"reaches no package index; bringing {len(sizes)} wheels, {sum(sizes.values()) / 1e6:,.0f} MB")
        wheels = [
            {
                "source": str(directory / name),
                "path": f"wheels/{key}/{name}",
                "bytes": size,
                "sha256": found[name],
            }
            for name, size in sizes.items()
        ]
        return {**result, "wheels": wheels}
