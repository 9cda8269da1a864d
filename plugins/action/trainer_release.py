"""Have the checkout's trainer on a host: build its wheel here if it is new, and bring it where it is not yet."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins" / "module_utils"))

from offline_ship import shipped
from trainer_wheel import Failure, content_version, trainer_wheel


class ActionModule(ActionBase):
    """Calls the module with the version; where it asks for the wheel, sends that and calls it again."""

    def run(self, tmp=None, task_vars=None):
        """The module's result."""
        super().run(tmp, task_vars)

        def module(**options) -> dict:
            arguments = {**self._task.args, "version": content_version(ROOT), **options}
            return self._execute_module("trainer_release", module_args=arguments, task_vars=task_vars)

        result = module()
        if result.get("failed") or not result.get("wanted"):
            return result
        try:
            version, wheel, _ = trainer_wheel(ROOT, ROOT / ".trainyard" / "dist")
        except Failure as failure:
            raise AnsibleActionFail(str(failure)) from None
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with shipped(self, [wheel], wheel.parent) as archive:
            return module(version=version, wheels={wheel.name: digest}, archive=archive)
