"""The inventory as the checks want it, from Ansible's variables, the roles' argument specs and the inventory's files.

Of the files it reads but what Ansible passes over in them; all else has been read by Ansible itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml
from ansible.errors import AnsibleError
from inventory_base import GROUP_KEYS, GROUPS, Inventory, Undefined, is_slip, prefixes
from network_entries import shown

# Variables of Ansible's that are read here, besides the roles' own.
ANSIBLES = (
    *("ansible_host", "ansible_port", "ansible_ssh_common_args", "ansible_connection", "ansible_facts"),
    *("ansible_ssh_host", "ansible_ssh_port", "ansible_become", "ansible_become_user"),
)


def read_inventory(task_vars: Mapping[str, Any], roles: str, loader: Any) -> Inventory:
    """task_vars: of a task's action. roles: their directory. loader: Ansible's, of files."""
    names, specs = read_specs(roles)
    wanted = _wanted(names, specs)
    groups = {name: list(hosts) for name, hosts in task_vars["groups"].items()}
    hosts: dict[str, dict[str, Any]] = {}
    origins: dict[tuple[str, str], str] = {}
    for host in {host for name in ("cluster", "head", "workers") for host in groups.get(name, [])}:
        variables = task_vars["hostvars"][host]
        hosts[host] = {}
        for key in filter(wanted, variables):
            origins[host, key] = origin_of(key)
            try:
                hosts[host][key] = value = variables[key]
                origins[host, key] = origin_of(value) or origins[host, key]
            except AnsibleError as error:
                hosts[host][key] = Undefined(f"a template that fails: {error.message}")
    sources = list(task_vars.get("ansible_inventory_sources") or [])
    named = ", ".join(map(short_path, sources)) or "the inventory"
    left_out = [found for source in sources for found in _left_out(source, loader)]
    return Inventory(groups, hosts, specs, names, named, origins, left_out)


def read_specs(roles: str) -> tuple[list[str], dict[str, dict]]:
    """The roles in the directory `roles`, and the options of all entry points in their argument specs."""
    names = sorted(entry.name for entry in os.scandir(roles) if entry.is_dir())
    specs: dict[str, dict] = {}
    for name in names:
        path = os.path.join(roles, name, "meta", "argument_specs.yml")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for entry in (yaml.safe_load(file) or {}).get("argument_specs", {}).values():
                    specs.update(entry.get("options") or {})
    return names, specs


def _wanted(roles: list[str], specs: Mapping[str, Mapping]) -> Callable[[str], bool]:
    """Whether a variable is looked at: one of ours, one that may be meant for it, or one of Ansible's."""
    ours = prefixes(roles)
    return lambda key: (
        key.startswith(ours) or key in specs or key in ANSIBLES or any(is_slip(key, name) for name in specs)
    )


def _left_out(source: str, loader: Any) -> Iterable[tuple[str, str, str]]:
    """("file:line", group, key) of what Ansible passes over in the files of a source of the inventory."""
    for path in yaml_files(source):
        try:
            data = loader.load_from_file(path, cache="none")
        except AnsibleError:  # no YAML: Ansible has read it otherwise
            continue
        for place, group, key in passed_over(data):
            yield origin_of(place) or short_path(path), group, key


def yaml_files(source: str) -> Iterable[str]:
    """The files of an inventory that Ansible would read as YAML, those of a directory included."""
    if os.path.isdir(source):
        for name in sorted(os.listdir(source)):
            if not name.startswith(".") and name not in ("group_vars", "host_vars"):
                yield from yaml_files(os.path.join(source, name))
    elif os.path.splitext(source)[1] in ("", ".json", ".yaml", ".yml") and os.path.isfile(source):
        yield source


def passed_over(groups: Any, below: bool = False) -> Iterable[tuple[Any, str, str]]:
    """(what has its place, group, key) of what Ansible passes over in groups of ours. below: all of them are."""
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if not below and name not in GROUPS:
            continue  # a file of something else
        if isinstance(group, Mapping):
            yield from ((key, str(name), str(key)) for key in group if key not in GROUP_KEYS)
            yield from passed_over(group.get("children"), below=True)
        elif group is not None:
            yield name, str(name), shown(group)


def origin_of(value: Any) -> str:
    """The "file:line" where Ansible read a value, or nothing: it does not promise to know."""
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:
        return ""
    origin = Origin.get_tag(value)
    if not origin or not origin.path:
        return (origin.description or "") if origin else ""
    path = short_path(origin.path)
    return f"{path}:{origin.line_num}" if origin.line_num else path


def short_path(path: str) -> str:
    """`path` relative to the working directory if it lies below it."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
