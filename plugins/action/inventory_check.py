"""Hold the whole inventory against what Trainyard needs, and report every problem at once.

It runs on the controller and contacts no host. Each problem names the host or file, the key, what was found,
what was expected and the cure. The checks are plain functions from an `Inventory` to problems
(module_utils/inventory_*.py); only `ActionModule`, at the end, knows Ansible.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible import context
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from inventory_addresses import (
    check_addresses,
    check_connections,
    check_given_addresses,
    check_network,
    check_network_interfaces,
)
from inventory_base import Inventory, Problem
from inventory_facts import check_facts
from inventory_groups import check_groups, check_left_out, check_names
from inventory_reading import read_inventory
from inventory_roles import (
    check_controller_files,
    check_monitoring,
    check_nofile,
    check_ports,
    check_rdma,
    check_storage,
    check_switch,
)
from inventory_variables import check_alike, check_known_variables, check_types
from telling import limit_fault


def check(inventory: Inventory, left_out: Iterable[Callable] = ()) -> list[Problem]:
    """All problems that are visible without contacting a host, each once, in a stable order.

    left_out: checks that are not made.
    """
    checks = (
        check_left_out,
        check_groups,
        check_names,
        check_network,
        check_alike,
        check_addresses,
        check_connections,
        check_known_variables,
        check_types,
        check_network_interfaces,
        check_given_addresses,
        check_controller_files,
        check_rdma,
        check_switch,
        check_nofile,
        check_storage,
        check_monitoring,
        check_ports,
    )
    problems = [problem for each in checks if each not in left_out for problem in each(inventory)]
    return list(dict.fromkeys(problems))


def report(problems: list[Problem], contacted: bool) -> str:
    """The message that the user reads."""
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    untouched = "nothing was changed" if contacted else "no host was contacted"
    return "\n".join(
        [f"The inventory has {count}; {untouched}.", *(f"  - {problem}" for problem in problems)]
    )


def tags_of(playbook: Any) -> set[str]:
    """The tags of a playbook, as it is read from its file."""
    parts = playbook.items() if isinstance(playbook, Mapping) else enumerate(playbook)
    found = set()
    for key, value in parts:
        if key == "tags":
            found |= {value} if isinstance(value, str) else set(value)
        elif isinstance(value, (list, Mapping)):
            found |= tags_of(value)
    return found


def tag_faults(cli: Mapping[str, Any], known: set[str]) -> list[str]:
    """What is wrong with the tags that were asked for, or to be left out: Ansible would do nothing, or all, silently.

    cli: context.CLIARGS. known: the tags of site.yml, the one playbook that has some.
    """
    books = {os.path.basename(book) for book in cli.get("args") or ()}
    if "train.yml" in books and not {"all", "untagged"} & {*(cli.get("tags") or ("all",))}:
        return [f"--tags {','.join(cli['tags'])}: train.yml has no tags, and would do nothing. Leave it out."]
    faults = []
    for option, key in (("--tags", "tags"), ("--skip-tags", "skip_tags")):
        for tag in cli.get(key) or () if books & {"site.yml", "train.yml"} else ():
            # molecule leaves out notest and its like in whatever it plays
            if tag not in {*known, "all", "tagged", "untagged", "never"} and not tag.endswith("notest"):
                near = difflib.get_close_matches(tag, known, 1, 0.6)
                cure = f"Write {near[0]} if that is meant" if near else "Correct it, or leave it out"
                faults.append(
                    f"{option} {tag}: found a tag that no task has; expected one of {', '.join(sorted(known))}. {cure}."
                )
    return faults


class ActionModule(ActionBase):
    """`roles`: the roles' directory. `facts`: check what only facts tell, instead of all the rest."""

    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            {"roles": {"type": "path", "required": True}, "facts": {"type": "bool", "default": False}}
        )
        site = yaml.safe_load(Path(__file__).parents[2].joinpath("playbooks/site.yml").read_text())
        faults = [*tag_faults(context.CLIARGS, tags_of(site)), *filter(None, [limit_fault(task_vars)])]
        if faults:
            return {"failed": True, "msg": "\n".join([*faults, "No host was contacted."])}
        inventory = read_inventory(task_vars, arguments["roles"], self._loader)
        books = {os.path.basename(book) for book in context.CLIARGS.get("args") or ()}
        # By a reset, hosts that an earlier release deployed so can be put right.
        left_out = [check_alike] if "reset.yml" in books else []
        if books == {"switch.yml"}:  # which tells what that check asks for
            left_out.append(check_switch)
        problems = check_facts(inventory) if arguments["facts"] else check(inventory, left_out)
        if problems:
            return {"failed": True, "msg": report(problems, contacted=arguments["facts"])}
        return {"changed": False}
