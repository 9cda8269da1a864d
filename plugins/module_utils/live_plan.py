"""What a playbook has before it: the tasks that Ansible knows of before they run, and what comes after site.yml."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ansible import constants as C
from ansible.playbook.block import Block
from telling import same_hosts, table

NEXT = (  # after site.yml
    (("playbooks/preflight.yml",), "what would stop or slow a run"),
    (("train.yml", "-e", "run=first"), "a run of the tiny model; docs/variables.md says what -e takes"),
    (("playbooks/status.yml",), "how the hosts and their runs are"),
)


def planned(play) -> dict[str, int]:
    """The uuids of the tasks that a play is known to have before it starts, numbered from 1 in their order."""
    variables = play.get_variable_manager().get_vars(play=play)
    uuids = []

    def walk(block):
        for one in [*block.block, *block.always]:
            if isinstance(one, Block):
                walk(one)
            elif not one.implicit:
                uuids.append(one._uuid)

    for block in play.compile():
        walk(block.filter_tagged_tasks(variables))
    return {uuid: number for number, uuid in enumerate(uuids, 1)}


def rescued(task) -> bool:
    """Whether a block around `task` has a rescue for its failure."""
    child, parent = task, task._parent
    while parent is not None:
        saves = isinstance(parent, Block) and parent.rescue
        if saves and any(one._uuid == child._uuid for one in parent.block):
            return True
        child, parent = parent, parent._parent
    return False


def after_site(cli, checkout: Path) -> list[str]:
    """The commands that come after site.yml, to be pasted into this shell; none where it did a part of its work.

    cli: context.CLIARGS.
    """
    part = any(cli.get(name) for name in ("check", "subset", "skip_tags", "start_at_task"))
    if part or list(cli.get("tags") or ["all"]) != ["all"]:
        return []
    hosts = same_hosts(cli, C.DEFAULT_HOST_LIST)
    rows = [
        (shlex.join(["ansible-playbook", *hosts, os.path.relpath(checkout / book), *words]), f"# {what}")
        for (book, *words), what in NEXT
    ]
    return ["Next:", *(f"  {line}" for line in table(rows).split("\n"))]
