"""Have the locked environment on a host; the controller brings the wheels where the host reaches no index."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins" / "module_utils"))

from offline_ship import in_batches, shipped
from offline_wheels import Failure, wheelhouse
from telling import brought

BATCH_BYTES = 512 * 2**20
QUIET_SECONDS = 5  # longer than an environment that is there takes to be recognised

display = Display()


class ActionModule(ActionBase):
    """Calls the module; where it asks for wheels, collects them here, sends them, and calls it again."""

    def run(self, tmp=None, task_vars=None):
        """The module's result."""
        super().run(tmp, task_vars)
        host = task_vars["inventory_hostname"]

        def module(**options) -> dict:
            arguments = {**self._task.args, **options}
            return self._execute_module("python_env", module_args=arguments, task_vars=task_vars)

        def say(text: str) -> None:
            display.display(f"{host}: {text}")

        # Ansible shows a task when its first host is done, and this one takes minutes.
        notice = threading.Timer(QUIET_SECONDS, say, ["building the locked environment, which takes minutes"])
        notice.daemon = True
        notice.start()
        try:
            result = module()
        finally:
            notice.cancel()
        if result.get("failed") or "target" not in result:
            return result
        directory = ROOT / ".trainyard" / "wheelhouse" / result["key"]
        lock, torch = self._task.args["lock"], self._task.args["torch"]
        try:
            wheels = wheelhouse(lock, torch, result["target"], directory, say)
        except Failure as failure:
            raise AnsibleActionFail(str(failure)) from None
        lacking = [directory / name for name in wheels if result["staged"].get(name) != wheels[name]]
        size = sum(path.stat().st_size for path in lacking)
        say(f"reaches no package index; bringing {len(lacking)} wheels, {size / 1e6:,.0f} MB")
        sent = 0
        for batch in in_batches(lacking, BATCH_BYTES):
            with shipped(self, batch, directory) as archive:
                received = module(wheels=wheels, archive=archive, receive_only=True)
            if received.get("failed"):
                return received
            sent += sum(path.stat().st_size for path in batch)
            if sent < size:
                display.display(brought(host, sent, size))
        return module(wheels=wheels)
