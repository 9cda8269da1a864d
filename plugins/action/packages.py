"""Install distribution packages on a host; the controller brings them where the host reaches no package index."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "plugins" / "module_utils"))

from how_far import PACKAGES
from meanwhile import Said, file_on_host, told
from offline_apt import Failure, bring
from offline_ship import shipped

display = Display()


class ActionModule(ActionBase):
    """Calls the module; where it asks for packages, has them downloaded here, sends them, and calls it again.

    What it does meanwhile is told.
    """

    def run(self, tmp=None, task_vars=None):
        """The module's result."""
        super().run(tmp, task_vars)
        host = task_vars["inventory_hostname"]
        with told(host, file_on_host(self, PACKAGES)):
            result = self._execute_module("packages", task_vars=task_vars)
        if result.get("failed") or "apt_state" not in result:
            return result
        valid_seconds = int(self._task.args.get("cache_valid_time", 3600))
        said = Said()
        try:
            with told(host, said.read):
                archives, files = bring(
                    result["apt_state"],
                    result["wanted"],
                    ROOT / ".trainyard" / "packages",
                    host,
                    valid_seconds,
                    said.say,
                )
        except Failure as failure:
            raise AnsibleActionFail(str(failure)) from None
        paths = [archives / name for name in files]
        size = sum(path.stat().st_size for path in paths)
        display.display(
            f"{host}: reaches no package index; bringing {len(paths)} packages, {size / 1e6:,.1f} MB"
        )
        with shipped(self, paths, archives) as archive:
            arguments = {**self._task.args, "files": files, "archive": archive}
            with told(host, file_on_host(self, PACKAGES)):
                return self._execute_module("packages", module_args=arguments, task_vars=task_vars)
