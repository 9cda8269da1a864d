"""Load all filters before the first task.

Every task runs in a process of its own, forked for each host, which would load all filters anew: a third of what a
playbook costs the controller.
"""

from __future__ import annotations

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

DOCUMENTATION = """
name: preload
type: aggregate
short_description: Load all filters before the first task
description: Shows nothing.
"""


class CallbackModule(CallbackBase):
    """Loaded by the process that forks all others, before it does."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "preload"
    CALLBACK_NEEDS_ENABLED = False

    def v2_playbook_on_start(self, playbook) -> None:
        for loader, name in ((filter_loader, "bool"), (test_loader, "defined")):
            loader.get(name)  # any one: it has them load all
