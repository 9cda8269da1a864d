"""Whether the variables that are set are ours, have values that their roles take, and are alike where they must be.

Given an `Inventory`; each check answers with what is wrong. What a variable's value may be is in inventory_values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from inventory_base import Inventory, Problem, Undefined, hosts_by_value, is_slip, prefixes, several_values
from inventory_values import value_fault

# What is read of one host for all, and why.
ALIKE = {
    "trainer_config": "a run has one configuration",
    "trainer_state_dir": "a run's data and model lie at one path on all hosts (a bind mount makes it so where their "
    "disks are elsewhere)",
    "trainer_user": "hosts log in to each other by that name",
}
CHECKED_ELSEWHERE = ("cluster_address", "cluster_network")  # better, in inventory_addresses


def check_known_variables(inventory: Inventory) -> Iterable[Problem]:
    """A variable that begins like one of ours, or differs from one of ours by a slip, must be one of ours."""
    ours = prefixes(inventory.roles)
    for key, hosts in inventory.hosts_by_variable().items():
        if key in inventory.specs:
            continue
        slip = next((name for name in inventory.specs if is_slip(key, name)), None)
        if not key.startswith(ours) and not slip:
            continue
        near = slip or next(iter(difflib.get_close_matches(key, inventory.specs, 1, 0.6)), None)
        yield Problem(
            inventory.place_of_all(hosts, key),
            key,
            "a variable that no role has",
            near or f"a variable of the role {key.split('_')[0]}",
            f"Write {near} if that is meant, or remove it"
            if near
            else "Remove it; docs/variables.md lists them all",
        )


def check_types(inventory: Inventory) -> Iterable[Problem]:
    """The variables that are set have the types, choices, elements and ranges that their roles take."""
    local = inventory.local()
    for key, hosts in inventory.hosts_by_variable().items():
        if key not in inventory.specs or key in CHECKED_ELSEWHERE:
            continue
        for host in hosts:
            value, where = inventory.hosts[host][key], inventory.place(host, key)
            if not isinstance(value, Undefined):
                # Equal ones, from a variable of a group, count once.
                if fault := value_fault(key, value, inventory.specs[key], local):
                    yield Problem(where, key, *fault)
            elif key.startswith(
                "cluster_"
            ):  # else perhaps a template over facts; the role will see its value
                yield Problem(
                    where,
                    key,
                    str(value),
                    "a value that is known before any host is contacted",
                    "Write it out, or correct the template",
                )


def check_alike(inventory: Inventory) -> Iterable[Problem]:
    """One value for all hosts of what is read of one of them for all."""
    for key, why in ALIKE.items():
        if inventory.local() and key == "trainer_state_dir":
            continue
        spec = inventory.specs.get(key, {})
        said = {host: inventory.hosts[host].get(key, spec.get("default")) for host in inventory.members()}
        found = hosts_by_value({host: _text(value) for host, value in said.items()})
        # One that is none at all is told by check_types.
        odd = any(isinstance(v, Undefined) or value_fault(key, v, spec, False) for v in said.values())
        if len(found) > 1 and not odd:
            yield Problem(
                inventory.source,
                key,
                several_values(found),
                f"one for the whole cluster: {why}",
                "Set it once, under all: vars: (where hosts have been deployed with several, after reset.yml)",
            )


def _text(value: Any) -> str:
    """`value` so that equal mappings are equal texts."""
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else str(value)
