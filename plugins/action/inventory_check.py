"""Hold the whole inventory against what Trainyard needs, and report every problem at once.

It runs on the controller and contacts no host. Each problem names the host or file, the key, what was found,
what was expected and the cure. The checks are plain functions from an `Inventory` to problems; only
`ActionModule`, at the end, knows Ansible.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import ipaddress
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ansible import context
from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import BOOLEANS, BOOLEANS_TRUE
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from network_entries import gateway_of, refusals, shown
from telling import limit_fault

HOST_NAME_MAX = 64  # Linux; each label between dots has at most 63 characters (RFC 1123)
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
SHARED_PREFIXES = ("cluster", "trainyard")  # ours, though no role has that name

# What argument specs cannot say of numbers: variable to the least and the greatest that work. None is left out.
LIMITS = {
    "bench_largest_mib": (1, 1 << 16),
    "bench_port": (1024, 65532),  # and the three after it
    "bench_seconds": (0.5, 3600),
    "etcd_peer_port": (1024, 65535),
    "etcd_port": (1024, 65535),
    "guard_timeout": (20, 600),  # seconds; a new connection takes a few of them
    "monitoring_days": (1, 10**4),
    "monitoring_exporter_port": (1024, 65535),
    "monitoring_gb": (1, 10**6),
    "monitoring_grafana_port": (1024, 65535),
    "monitoring_port": (1024, 65535),
    "nproc_per_node": (1, 1024),
    "packages_cache_valid_time": (0, 10**9),
    "packages_lock_timeout": (0, 10**6),
    "preflight_bandwidth_percent": (0, 100),
    "preflight_burn_minutes": (1, 10**6),
    "preflight_clock_fail_seconds": (0, 10**9),
    "preflight_clock_warn_seconds": (0, 10**9),
    "preflight_gpu_used_mb": (0, 10**9),
    "preflight_latency_ms": (0, 10**9),
    "preflight_link_mbit": (0, 10**9),
    "preflight_loss_fail_percent": (0, 100),
    "preflight_loss_percent": (0, 100),
    "preflight_memory_gb": (0, 10**9),
    "preflight_rdma_fail_percent": (0, 100),
    "preflight_rdma_warn_percent": (0, 100),
    "preflight_steps": (0, 10**6),
    "roce_qos_dscp": (1, 63),
    "roce_qos_priority": (1, 5),  # 0 is everybody's, 6 congestion notifications', 7 the switches' own
    "trainer_log_seconds": (0, 10**6),
    "trainer_min_free_gb": (0, 10**9),
    "trainer_port": (1024, 65535),  # below, root alone may listen
    "trainer_refresh_seconds": (0.1, 3600),
    "trainer_releases_kept": (1, 10**6),
    "trainer_runs_kept": (0, 10**6),
    "trainer_runs_kept_days": (0, 10**6),
    "trainer_smoke_steps": (1, 10**6),
    "trainer_stop_seconds": (1, 10**6),
    "trainer_unreachable_seconds": (1, 10**9),
    "tuning_nofile": (1024, 2**30),  # with fewer, logins of the group's members begin to fail
}
NR_OPEN = 1048576  # fs.nr_open of Debian's and Ubuntu's kernels
CNP_DSCP = "48"  # of congestion notices: roles/roce_qos and the switch's text have it, too
# Words that go into units and commands as they stand: variable to the pattern, and the same in words.
USER_NAME = (r"[a-z_][a-z0-9_-]{0,30}", "a user's name: lower case letters, digits, hyphens and underscores")
SLURM_NAME = (r"[A-Za-z0-9_.-]*", "a name that Slurm has: letters, digits, . _ and -")
# What a run under Slurm stands on.
SLURM_OWN = (
    "array",
    "chdir",
    "job-name",
    "nodelist",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "test-only",
    "uid",
    "wait",
    "wrap",
)
# What a run's processes go by, and Trainyard sets.
RUNS_OWN = (
    *("CLUSTER_ADDRESS", "GLOO_SOCKET_IFNAME", "GROUP_RANK", "GROUP_WORLD_SIZE", "HOME", "LOCAL_RANK"),
    *("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME", "NNODES", "NODE_RANK"),
    *("NPROC_PER_NODE", "PATH", "RANK", "RANK_OFFSET", "WORLD_SIZE"),
)
PATTERNS = {
    # A label of Prometheus', which takes $ for a group's, and a value of Grafana's, to which % and ; are not plain.
    "cluster_name": (
        r"\w([\w .,:&'()+@/-]{0,61}[\w)])?",
        "a name of at most 63 characters: letters, digits, spaces and . , : & ' ( ) + @ / - _",
    ),
    "nvidia_branch": (r"(\d{3})?", "the first number of a driver's version, such as 580"),
    "nvidia_repository": (r"https?://[^\s/]+(/\S*)?", "an address that begins with https:// or http://"),
    "identity_service_user": USER_NAME,
    "time_sync_servers": (r"[A-Za-z0-9][A-Za-z0-9.:-]*", "names or addresses, without options"),
    "trainer_environment": (
        rf"(?!({'|'.join(RUNS_OWN)}|(PYTHON|TRAINYARD_)\w*)=)[A-Za-z_][A-Za-z0-9_]*=(?!(None|True|False)$)"
        # systemd leaves out a value with a control character, and a name that a shell would not take.
        r"[^\x00-\x08\n-\x1f\x7f']*",
        "names of A to Z, digits and _ with plain texts or numbers on one line, without ' (true in quotes, too), and "
        f"none that Trainyard sets by itself ({', '.join(RUNS_OWN)}, PYTHON…, TRAINYARD_…)",
    ),
    "trainer_slurm_account": SLURM_NAME,
    "trainer_slurm_options": (
        rf"(?!--({'|'.join(SLURM_OWN)})(=|$))--[a-z][a-z-]*(=.+)?",
        "an option of sbatch's as --NAME=VALUE, and none that Trainyard sets by itself "
        f"({', '.join(SLURM_OWN)})",
    ),
    "trainer_slurm_partition": SLURM_NAME,
    "trainer_user": USER_NAME,
    "trainer_stop_timeout": (
        r"(\d+ ?(ms|s|sec|seconds?|min|minutes?|h|hours?)? ?)+",
        "a time span of systemd such as 90s or 10min",
    ),
}
# What is read of one host for all, and why.
ALIKE = {
    "trainer_config": "a run has one configuration",
    "trainer_state_dir": "a run's data and model lie at one path on all hosts (a bind mount makes it so where their "
    "disks are elsewhere)",
    "trainer_user": "hosts log in to each other by that name",
}
SAFE_PATH = re.compile(r"(/[A-Za-z0-9._+@-]+)+")
ON_THE_CONTROLLER = (
    "nvidia_repository_key",
    "trainer_results_dir",
)  # goes into no unit, and checkouts may have a space in their path
# Directories that the service user comes to own; the machine's own must stay root's.
SERVICE_HOMES = ("trainer_state_dir", "identity_service_home")
SEEN_BY_RUNS = (
    "trainer_state_dir",
    "trainer_opt_dir",
    "trainer_etc_dir",
    "python_env_dir",
    "identity_service_home",
)
OF_THE_SYSTEM = re.compile(
    "/(bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var"
    "|usr/(lib|local|share)|var/(cache|lib|log|tmp))"
)
# Directories that are not to be shared: the machine's own, and those in which its own lie.
NOT_SHARED = re.compile(
    "/|/(media|mnt|opt|srv|var|var/lib)"
    "|/(bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|run|sbin|sys|usr|var/(cache|lock|log|mail|run|spool))(/.*)?"
)
UNSEEN = re.compile("/(home|root|tmp|var/tmp)(/|$)")
PUBLIC_KEY = r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( .*)?$"
# Groups that mean something here, and the keys that a group of a YAML inventory has.
GROUPS = ("all", "cluster", "head", "workers", "monitoring", "opensm", "rdma", "storage_server")
GROUP_KEYS = ("children", "hosts", "vars")
# Variables of Ansible's that are read here, besides the roles' own.
ANSIBLES = (
    *("ansible_host", "ansible_port", "ansible_ssh_common_args", "ansible_connection", "ansible_facts"),
    *("ansible_ssh_host", "ansible_ssh_port", "ansible_become", "ansible_become_user"),
)
READ_AS_WORDS = ("accept_new_host_keys",)  # typed after -e as key=value; its one reader converts it


class Undefined:
    """A value that cannot be worked out, such as a template over facts not gathered yet; `str` says why."""

    def __init__(self, reason: str):
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `where` is a host, group or file; `key` the variable, or empty.

    `found` alone, without `expected` and `cure`, is a sentence that says all three.
    """

    where: str
    key: str
    found: str
    expected: str
    cure: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        if not self.expected:
            return f"{self.where}: {self.found}"
        return f"{self.where}: {key}found {self.found}; expected {self.expected}. {self.cure}"


@dataclass(frozen=True)
class Inventory:
    """What the checks look at.

    `groups`: group to hosts, in inventory order. `hosts`: host to its variables, templates resolved.
    `specs`: variable to its option in a role's argument spec. `roles`: names of the roles. `source`: the
    inventory as the user named it. `origins`: (host, variable) to "file:line", where it is known. `left_out`:
    ("file:line", group, key) of what Ansible passes over in YAML files.
    """

    groups: Mapping[str, list[str]]
    hosts: Mapping[str, Mapping[str, Any]]
    specs: Mapping[str, Mapping[str, Any]]
    roles: Iterable[str] = ()
    source: str = "the inventory"
    origins: Mapping[tuple[str, str], str] = ()
    left_out: Iterable[tuple[str, str, str]] = ()

    def members(self) -> list[str]:
        """The cluster's hosts; the group's name is the contract with the playbooks."""
        return list(self.groups.get("cluster", []))

    def where(self, host: str, key: str = "") -> str:
        origin = dict(self.origins).get((host, key))
        return f"{host} ({origin})" if origin else host

    def local(self) -> bool:
        """True if the hosts are directories of this machine: they share its name and its addresses."""
        return bool(self.members()) and all(
            str(self.hosts[host].get("local_mode")).lower() in ("true", "yes") for host in self.members()
        )


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
        check_nofile,
        check_storage,
        check_monitoring,
        check_ports,
    )
    problems = [problem for each in checks if each not in left_out for problem in each(inventory)]
    return list(dict.fromkeys(problems))


def check_left_out(inventory: Inventory) -> Iterable[Problem]:
    """Nothing stands where Ansible passes over it: a host would be none of the cluster's, a feature be off."""
    for where, group, key in inventory.left_out:
        yield Problem(
            where,
            group,
            f"{key}, which Ansible leaves out",
            f"{', '.join(GROUP_KEYS[:-1])} or {GROUP_KEYS[-1]} alone below a group",
            "Put a host below hosts:, a variable below vars:, a group, with its own hosts:, below children:",
        )
    for name in inventory.groups:
        plain = name.replace("-", "_")
        known = next((one for one in GROUPS if plain == one or is_slip(plain, one)), name)
        if known != name and inventory.groups[name]:
            yield Problem(
                inventory.source, name, "a group that nothing here reads", known, f"Rename it to {known}"
            )


def check_groups(inventory: Inventory) -> Iterable[Problem]:
    """Exactly one head; every host of the cluster is the head or a worker, never both."""
    groups, source = inventory.groups, inventory.source
    head, workers, members = (list(groups.get(name, [])) for name in ("head", "workers", "cluster"))
    if not members and not head and not workers:
        near = [name for name in groups if name not in ("all", "ungrouped") and groups[name]]
        found = "no host in it" if not near else f"no host in it, but in: {', '.join(sorted(near))}"
        yield Problem(
            source,
            "cluster",
            found,
            "at least one host, in the group head below the group cluster",
            "Begin with a copy of one of inventory/examples, and name it with -i",
        )
        return
    if len(head) != 1:
        yield Problem(
            source,
            "head",
            f"{len(head)} hosts ({', '.join(head)})" if head else "no host",
            "exactly one host: it is node 0, where a run's ranks meet",
            f"Move {'all but one of them' if head else 'one of the workers'} to the group "
            f"{'workers' if head else 'head'}",
        )
    for host in sorted(set(head) & set(workers)):
        yield Problem(
            inventory.where(host),
            "head, workers",
            "the host in both groups",
            "each host in one of them",
            "Remove it from workers",
        )
    for host in [host for host in [*head, *workers] if host not in members]:
        yield Problem(
            inventory.where(host),
            "cluster",
            "the host in head or workers, but not in cluster",
            "head and workers to be children of the group cluster",
            "Write cluster: {children: {head: …, workers: …}}",
        )
    for host in [host for host in members if host not in head and host not in workers]:
        yield Problem(
            inventory.where(host),
            "cluster",
            "the host in cluster, but neither in head nor in workers",
            "it to have its place in the order of the ranks",
            "Put it into head or workers",
        )
    apart = [name for name, hosts in groups.items() if name != "workers" and set(hosts) - set(members)]
    for name in difflib.get_close_matches("workers", apart, 1, 0.85) if not workers else ():
        yield Problem(
            source,
            name,
            f"{', '.join(groups[name])} in it, and no host in workers",
            "the other hosts of the cluster in the group workers",
            f"Rename {name} to workers, and have it below cluster, as head is",
        )


def check_names(inventory: Inventory) -> Iterable[Problem]:
    """Every name can be a machine's host name, and no two machines share one."""
    if inventory.local():
        return
    taken: dict[str, str] = {}
    for host in inventory.members():
        own = inventory.hosts[host].get("identity_hostname") or host
        for key, name in ({"": host} | ({"identity_hostname": own} if own != host else {})).items():
            if fault := name_fault(str(name)):
                cure = f"Rename it, for instance to {proper_name(str(name), len(taken) + 1)}"
                if not key and is_ipv4(host):
                    cure += f", and give it ansible_host: {host}"
                yield Problem(
                    inventory.where(host, key),
                    key or "host name",
                    f"{name!s:.80} ({fault})",
                    "letters, digits and hyphens, as RFC 1123 has it",
                    cure,
                )
        other = taken.setdefault(str(own).lower(), host)
        if other != host:
            yield Problem(
                inventory.where(host, "identity_hostname"),
                "host name",
                f"{own}, which {other} has, too",
                "one name a machine: ranks with equal names believe that they share a machine",
                "Give one of them another name",
            )


def name_fault(name: str) -> str:
    """What makes `name` unfit as a host name; empty if nothing does."""
    if name.lower().split(".")[0] == "localhost":
        return "this name means every machine itself"
    if is_ipv4(name) or name.rpartition(".")[2].isdigit():
        return "it reads as an address"
    if len(name) > HOST_NAME_MAX:
        return f"{len(name)} characters, {HOST_NAME_MAX} are allowed"
    if "_" in name:
        return "an underscore"
    for label in name.split("."):
        if len(label) > 63:
            return f"a part of {len(label)} characters, 63 are allowed"
        if not LABEL.fullmatch(label):
            return f"the part {label!r}"
    return ""


def proper_name(name: str, number: int) -> str:
    """A fit name near `name`, to propose."""
    near = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63].strip("-")
    return near if near and not name_fault(near) and near != name else f"node{number}"


def check_network(inventory: Inventory) -> Iterable[Problem]:
    """One cluster_network for all, a real IPv4 network with room for the hosts."""
    if inventory.local():
        return
    found = {host: inventory.hosts[host].get("cluster_network") for host in inventory.members()}
    by_value: dict[str, list[str]] = {}
    for host, value in found.items():
        by_value.setdefault(str(value), []).append(host)
    if len(by_value) > 1:
        listed = "; ".join(f"{value} ({', '.join(hosts)})" for value, hosts in by_value.items())
        yield Problem(
            inventory.source,
            "cluster_network",
            f"several values: {listed}",
            "one for the whole cluster",
            "Set it once, under all: vars:",
        )
    for hosts in by_value.values():
        host = hosts[0]
        value = found[host]
        if fault := network_fault(value):
            yield Problem(
                inventory.where(host, "cluster_network") if value is not None else inventory.source,
                "cluster_network",
                "nothing" if value is None else f"{value} ({fault})",
                "the hosts' IPv4 network in CIDR form, such as 192.168.1.0/24",
                network_cure(value),
            )


def check_alike(inventory: Inventory) -> Iterable[Problem]:
    """One value for all hosts of what is read of one of them for all."""
    for key, why in ALIKE.items():
        if inventory.local() and key == "trainer_state_dir":
            continue
        spec = inventory.specs.get(key, {})
        said = {host: inventory.hosts[host].get(key, spec.get("default")) for host in inventory.members()}
        found: dict[str, list[str]] = {}
        for host, value in said.items():
            text = json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else str(value)
            found.setdefault(text, []).append(host)
        # One that is none at all is told by check_types.
        odd = any(isinstance(v, Undefined) or value_fault(key, v, spec, False) for v in said.values())
        if len(found) > 1 and not odd:
            yield Problem(
                inventory.source,
                key,
                "several values: "
                + "; ".join(f"{value} ({', '.join(hosts)})" for value, hosts in found.items()),
                f"one for the whole cluster: {why}",
                "Set it once, under all: vars: (where hosts have been deployed with several, after reset.yml)",
            )


def network_of(value: Any) -> ipaddress.IPv4Network | None:
    return None if network_fault(value) else ipaddress.IPv4Network(value)


def network_fault(value: Any) -> str:
    """What is wrong with a cluster_network; empty if nothing is."""
    if value is None:
        return "not set"
    if not isinstance(value, str) or "/" not in value:
        return str(value) if isinstance(value, Undefined) else "no prefix length such as /24"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        return str(error)
    if network.is_loopback or network.is_multicast or network.network_address.is_unspecified:
        return "no network between machines"
    if network.prefixlen == 32:
        return "a single address"
    return ""


def network_cure(value: Any) -> str:
    with contextlib.suppress(ValueError):
        near = str(ipaddress.IPv4Network(value, strict=False))
        if not network_fault(near):
            return f"Write cluster_network: {near}"
    return "Set it under all: vars:"


def check_addresses(inventory: Inventory) -> Iterable[Problem]:
    """Each host has an address of its own in the cluster's network, and is reached at a place of its own."""
    if inventory.local():
        return
    owners: dict[str, str] = {}
    reached: dict[tuple, str] = {}
    for host in inventory.members():
        variables = inventory.hosts[host]
        key = "cluster_address" if variables.get("cluster_address") is not None else "ansible_host"
        value = variables.get(key)
        network = network_of(variables.get("cluster_network"))
        where = inventory.where(host, key)
        if value is None and variables.get("ansible_ssh_host"):
            pass  # check_connections tells its name of today
        elif fault := address_fault(value, network):
            expected = f"an IPv4 address of a host in {network}" if network else "an IPv4 address"
            cure = "Correct it, or cluster_network" if network else "Write it in the form 192.168.1.101"
            if value is None:
                cure = "Write its address; or, where the host is reached by its name, set cluster_address"
            elif key == "ansible_host":
                cure = "Correct it; or, if the controller does reach the host by it, set cluster_address"
            yield Problem(where, key, fault, expected, cure)
        elif (other := owners.setdefault(str(value), host)) != host:
            yield Problem(
                where,
                key,
                f"{value}, which {other} has, too",
                "an address of its own for every host",
                "Correct one of the two",
            )
        place = tuple(
            str(variables.get(name, default))
            for name, default in (
                ("ansible_host", host),
                ("ansible_port", 22),
                ("ansible_ssh_common_args", ""),
            )
        )
        here = str(variables.get("ansible_connection")).rpartition(".")[2] == "local"
        other = reached.setdefault(("here",) if here else place, host)
        if other != host and here:
            yield Problem(
                inventory.where(host, "ansible_connection"),
                "ansible_connection",
                f"local, which {other} has, too",
                "one host at most that is this controller itself",
                "Remove it where the host is another machine",
            )
        elif other != host and key != "ansible_host":
            yield Problem(
                inventory.where(host, "ansible_host"),
                "ansible_host",
                f"{place[0]} port {place[1]}, where {other} is reached, too",
                "every host at a place of its own",
                "Correct one of the two, or tell them apart by ansible_port",
            )


def address_fault(value: Any, network: ipaddress.IPv4Network | None) -> str:
    """What was found where a host's address in `network` should be; empty if it is one."""
    if value is None:
        return "nothing"
    if not is_ipv4(value):
        return f"{value!s:.80}, which is not an IPv4 address"
    address = ipaddress.IPv4Address(value)
    if network is None:
        return ""
    if address not in network:
        return f"{value}, which is outside of cluster_network {network}"
    if network.prefixlen < 31 and address == network.network_address:
        return f"{value}, which is the address of the network itself"
    if network.prefixlen < 31 and address == network.broadcast_address:
        return f"{value}, which is the network's broadcast address"
    return ""


def is_ipv4(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


def check_known_variables(inventory: Inventory) -> Iterable[Problem]:
    """A variable that begins like one of ours, or differs from one of ours by a slip, must be one of ours."""
    prefixes = tuple(f"{name}_" for name in {*SHARED_PREFIXES, *inventory.roles})
    for key, hosts in variables_of_hosts(inventory).items():
        if key in inventory.specs:
            continue
        slip = next((name for name in inventory.specs if is_slip(key, name)), None)
        if not key.startswith(prefixes) and not slip:
            continue
        near = slip or next(iter(difflib.get_close_matches(key, inventory.specs, 1, 0.6)), None)
        yield Problem(
            origin_of_first(inventory, hosts, key),
            key,
            "a variable that no role has",
            f"{near}" if near else f"a variable of the role {key.split('_')[0]}",
            f"Write {near} if that is meant, or remove it"
            if near
            else "Remove it; docs/variables.md lists them all",
        )


def is_slip(name: str, known: str) -> bool:
    """True if `name` is `known` with one character missing, doubled, changed, or two neighbours swapped."""
    if name == known or abs(len(name) - len(known)) > 1 or len(known) < 8:
        return False
    common = 0
    while name[common : common + 1] == known[common : common + 1]:
        common += 1
    rest, known_rest = name[common:], known[common:]
    return (
        rest[1:] == known_rest[1:]
        or rest[1:] == known_rest
        or rest == known_rest[1:]
        or (rest[:2] == known_rest[:2][::-1] and rest[2:] == known_rest[2:])
    )


def check_connections(inventory: Inventory) -> Iterable[Problem]:
    """Of what says how Ansible gets in, nothing overrules the roles, and nothing has a name that is not read here."""
    for host in inventory.members():
        values = inventory.hosts[host]
        for key, (fault, expected, cure) in CONNECTIONS.items():
            if key in values and fault(values[key]):
                where = dict(inventory.origins).get((host, key)) or host
                yield Problem(where, key, f"{values[key]!s:.80}", expected, cure)


def no_port(value: Any) -> bool:
    return not re.fullmatch(r"\d{1,5}(\.0)?", str(value)) or not 0 < float(value) < 65536


# Variable to what is wrong with a value, what is expected, and the cure. ansible_become and ansible_become_user would
# overrule the roles, task by task.
CONNECTIONS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "ansible_become": (
        lambda value: value is not None,
        "nothing: Trainyard becomes root itself where it must, and only there",
        "Remove it; ansible_become_password, or -K, is enough",
    ),
    "ansible_become_user": (
        lambda value: value not in (None, "root"),
        "nothing, or root, who tasks become: who logs in is ansible_user",
        "Remove it",
    ),
    "ansible_port": (
        lambda value: value is not None and no_port(value),
        "a port, 1 to 65535",
        "Correct it, or leave it out: SSH's own is 22",
    ),
    "ansible_ssh_host": (lambda _: True, "its name of today, ansible_host", "Rename it, or remove it"),
    "ansible_ssh_port": (lambda _: True, "its name of today, ansible_port", "Rename it, or remove it"),
}


def check_types(inventory: Inventory) -> Iterable[Problem]:
    """The variables that are set have the types, choices, elements and ranges that their roles take."""
    for key, hosts in variables_of_hosts(inventory).items():
        if key not in inventory.specs or key in (
            "cluster_address",
            "cluster_network",
        ):  # they have better checks
            continue
        for host in hosts:
            value = inventory.hosts[host][key]
            where = dict(inventory.origins).get((host, key)) or host
            if isinstance(value, Undefined):
                if not key.startswith("cluster_"):
                    continue  # perhaps a template over facts; the role will see its value
                yield Problem(
                    where,
                    key,
                    str(value),
                    "a value that is known before any host is contacted",
                    "Write it out, or correct the template",
                )
                continue
            # Equal ones, from a variable of a group, count once.
            fault = value_fault(key, value, inventory.specs[key], inventory.local())
            if fault:
                yield Problem(where, key, *fault)


def value_fault(key: str, value: Any, spec: Mapping[str, Any], local: bool) -> tuple[str, str, str] | None:
    """(what was found, what was expected, the cure) where `value` is none for the variable `key`; None if it is one."""
    option = {name: item for name, item in spec.items() if name not in ("required", "default")}
    if value is None:
        return "nothing", expected_by(option), "Give it a value, or leave the key out"
    if key not in READ_AS_WORDS and (odd := odd_kind(value, option)):
        place, found, wanted = odd
        example = SAMPLES.get(option.get("type", "str")) if place else meant(found, wanted)
        typed = shlex.quote(json.dumps({key: example}, ensure_ascii=False))
        return (
            shown(found) + (f" in {place}" if place else ""),
            expected_by(wanted),
            f"Write it as YAML; in an INI inventory {key}={example!r}, after -e: -e {typed}",
        )
    if errors := ArgumentSpecValidator({key: option}).validate({key: value}).error_messages:
        if not isinstance(value, (list, tuple, Mapping)):
            return shown(value), expected_by(option), "Correct it"
        reasons = "; ".join(error.rstrip(".") for error in errors)
        return "a fault in it", expected_by(option), f"Correct it ({reasons})"
    if key in LIMITS:
        least, most = LIMITS[key]
        if not (math.isfinite(number := float(value)) and least <= number <= most):
            return str(value), f"{least} or more" if number < least else f"{least} to {most}", "Correct it"
    if key in PATTERNS:
        pattern, words = PATTERNS[key]
        parts = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, Mapping):
            parts = [f"{name}={item}" for name, item in value.items()]
        if odd := [part for part in parts if not re.fullmatch(pattern, str(part))]:
            return f"{odd[0]!r:.100}", words, "Correct it"
    if option.get("type") == "path":
        return path_fault(key, str(value), local)
    return None


# What a value of a type looks like, for a cure.
SAMPLES = {"bool": False, "list": ["…"], "dict": {"…": "…"}}
KINDS = {"bool": bool, "list": (list, tuple), "dict": Mapping}


def meant(word: Any, option: Mapping[str, Any]) -> Any:
    """What a word for a boolean or for a list of words was to be; else a sample."""
    kind, text = option.get("type"), str(word)
    if kind == "bool" and text.lower() in BOOLEANS:
        return text.lower() in BOOLEANS_TRUE
    if kind == "list" and option.get("elements") == "str" and re.fullmatch(r"[\w\[\]'\" ,.:/-]+", text):
        return [part.strip("[]'\" ") for part in text.split(",")]
    return SAMPLES.get(kind)


def odd_kind(value: Any, option: Mapping[str, Any], place: str = "") -> tuple[str, Any, Mapping] | None:
    """(place, value, option) of the first part of `value` that is no boolean, list or mapping where `option` wants one.

    An argument spec would convert it, false from `false` and a list from `a,b`; but roles take the value as it stands,
    and there the word `false` is true.
    """
    kind = option.get("type", "str")
    if kind in KINDS and not isinstance(value, KINDS[kind]):
        return place, value, option
    if kind == "list" and option.get("elements"):
        element = {"type": option["elements"], "options": option.get("options")}
        parts = [(f"[{number}]", item, element) for number, item in enumerate(value)]
    elif kind == "dict":
        known = option.get("options") or {}
        parts = [(f".{name}", item, known[name]) for name, item in value.items() if name in known]
    else:
        parts = []
    return next((odd for name, item, inner in parts if (odd := odd_kind(item, inner, place + name))), None)


def path_fault(key: str, value: str, local: bool) -> tuple[str, str, str] | None:
    """What is wrong with a directory: it must be absolute, and plain where it goes into units and commands."""
    if not value.startswith("/") or os.path.normpath(value) != value:
        return value, "an absolute path, without .. and without a slash at its end", "Write it out from / on"
    if not local and key not in ON_THE_CONTROLLER and not SAFE_PATH.fullmatch(value):
        return value, "a path of letters, digits, . _ + @ and -", "Choose a plainer path on the hosts"
    if not local and key in SEEN_BY_RUNS and UNSEEN.match(value):
        return (
            value,
            "a directory that runs see, outside of /home, /root and /tmp (their unit has ProtectHome and PrivateTmp)",
            "Choose one such as /srv/trainyard, which may be on a disk of its own",
        )
    if key in SERVICE_HOMES and OF_THE_SYSTEM.fullmatch(value):
        return (
            value,
            "a directory that the trainer's user may own",
            f"Choose one in it, such as {value}/trainyard",
        )
    return None


def expected_by(option: Mapping[str, Any]) -> str:
    """An argument spec's option in words."""
    words = {
        "str": "a string",
        "int": "an integer",
        "float": "a number",
        "path": "an absolute path",
        "bool": "true or false",
        "list": "a list",
        "dict": "a mapping",
    }
    kind = option.get("type", "str")
    text = words.get(kind, f"a value of the type {kind}")
    if option.get("choices"):
        text = f"one of {', '.join(map(str, option['choices']))}"
    elif kind == "list" and option.get("elements"):
        text = f"a list, each of its items {words.get(option['elements'], option['elements'])}"
    return text


def check_network_interfaces(inventory: Inventory) -> Iterable[Problem]:
    """What the role network would refuse whatever the host is like; what its interfaces decide, it tells itself."""
    key = "network_interfaces"
    if inventory.local():
        return
    for host in inventory.members():
        value = inventory.hosts[host].get(key)
        # What has not even its types, check_types has told.
        if not value or isinstance(value, Undefined) or value_fault(key, value, inventory.specs[key], False):
            continue
        for refusal in refusals(value):
            yield Problem(inventory.where(host, key), key, refusal, "", "")


def check_given_addresses(inventory: Inventory) -> Iterable[Problem]:
    """No address that the role network is to give is another host's, and peers are within what it makes reachable."""
    key = "network_interfaces"
    if inventory.local():
        return
    peers = {host: _ip(inventory.hosts[host].get("cluster_address")) for host in inventory.members()}
    # Another port than SSH's may be a gateway's, which forwards to a host that has a cluster_address.
    reached = {
        host: _ip(inventory.hosts[host].get("ansible_host"))
        for host in inventory.members()
        if str(inventory.hosts[host].get("ansible_port", 22)) == "22" or not peers[host]
    }
    shared = [one for one, count in collections.Counter(reached.values()).items() if count > 1]  # a gateway's
    owners = {one: host for host, one in reached.items() if one not in shared} | {
        one: host for host, one in peers.items()
    }
    for host in inventory.members():
        made = list(_given(inventory.hosts[host].get(key)))
        leads_on = any(_leads_on(item) for item, _ in made)
        for _, given in made:
            other = owners.setdefault(given.ip, host)
            if other != host:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{given}, an address that {other} has, too",
                    "an address of its own for every host",
                    "Correct one of the two",
                )
            same = [one for one in peers.values() if one and one.version == given.version]
            beyond = [one for one in same if not any(one in other.network for _, other in made)]
            if given.ip == peers[host] and beyond and not leads_on:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{given}, and {beyond[0]}, {owners[beyond[0]]}'s address, is not in that network",
                    "a prefix length with which the host reaches its peers",
                    "Correct it, or give a gateway or routes",
                )


def _ip(value: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(str(value))
    except ValueError:
        return None


def _given(value: Any) -> Iterable[tuple[Mapping, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """(entry, address) of network_interfaces, of those that others on the wire see."""
    for item in _list_of(value):
        if not isinstance(item, Mapping):
            continue
        within = item.get("kind") == "bridges" and not _options(item).get("interfaces")
        for text in [] if within else _list_of(item.get("addresses")):
            with contextlib.suppress(ValueError):
                found = ipaddress.ip_interface(str(text))
                if not (found.is_link_local or found.is_loopback):
                    yield item, found


def _options(item: Mapping) -> Mapping:
    """The further keys of an entry of network_interfaces; none where they are no mapping, which is told elsewhere."""
    options = item.get("options")
    return options if isinstance(options, Mapping) else {}


def _leads_on(item: Mapping) -> bool:
    """Whether an entry of network_interfaces makes more reachable than the networks of its addresses."""
    more = _options(item)
    keys = ("routes", "gateway4", "gateway6", "dhcp4", "dhcp6")
    return bool(gateway_of(item) or item.get("routes") or any(more.get(key) for key in keys))


def check_controller_files(inventory: Inventory) -> Iterable[Problem]:
    """Files of the controller's that a role reads are there: it would find that out when much is changed already."""
    wanted = {
        "nvidia_repository_key": ("", "a key of a repository, as gpg exports it"),
        "ssh_mesh_controller_key": (
            PUBLIC_KEY,
            "a file with a public key in its first line, such as ~/.ssh/id_ed25519.pub",
        ),
    }
    seen = set()
    for host in inventory.members():
        for key, (pattern, expected) in wanted.items():
            text = str(inventory.hosts[host].get(key) or "")
            if (key, text) in seen:
                continue
            seen.add((key, text))
            if not text.startswith(("/", "~")):
                continue  # beside a playbook, where Ansible looks for it
            try:
                with open(os.path.expanduser(text), encoding="utf-8", errors="replace") as file:
                    first = file.readline()
                fault = "" if re.match(pattern, first) else "which holds no public key in its first line"
            except OSError as error:
                fault = f"which cannot be read: {error.strerror}"
            if fault:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{text}, {fault}",
                    expected,
                    "Correct the path; make a key with ssh-keygen -t ed25519, and never name the file without .pub"
                    if pattern
                    else "Correct the path",
                )


def check_rdma(inventory: Inventory) -> Iterable[Problem]:
    """RDMA's groups are the cluster's hosts, at most two manage InfiniBand, a lossless class is the switch's, too."""
    group, managers = (list(inventory.groups.get(name, [])) for name in ("rdma", "opensm"))
    for name, hosts, of in (("rdma", group, inventory.members()), ("opensm", managers, group)):
        whole = "cluster" if name == "rdma" else "rdma"
        for host in [host for host in hosts if host not in of]:
            yield Problem(
                inventory.where(host),
                name,
                f"the host in {name}, but not in {whole}",
                f"hosts of {whole} alone",
                f"Put it into {whole}, too, or take it out of {name}",
            )
    if len(managers) > 2:
        yield Problem(
            inventory.source,
            "opensm",
            f"{len(managers)} hosts ({', '.join(managers)})",
            "one, or two: a master and its standby",
            "Take the others out of the group",
        )
    for host in group:
        values = inventory.hosts.get(host, {})
        confirmed = str(values.get("roce_qos_switch_confirmed", False)).lower() in ("true", "yes")
        if values.get("roce_qos_mode") == "lossless" and not confirmed:
            yield Problem(
                inventory.where(host, "roce_qos_mode"),
                "roce_qos_mode",
                "lossless, without roce_qos_switch_confirmed",
                "a switch that pauses the same class: without that, packets are lost where nobody looks",
                "Run playbooks/switch.yml, apply what it writes, and set roce_qos_switch_confirmed: true",
            )
    yield from check_roce_class(inventory, group)


def check_nofile(inventory: Inventory) -> Iterable[Problem]:
    """The kernel grants no process more files than fs.nr_open says, root neither."""
    key = "tuning_nofile"
    for host, values in inventory.hosts.items():
        asked, settings = values.get(key, inventory.specs[key]["default"]), values.get("tuning_sysctl")
        granted = (settings if isinstance(settings, Mapping) else {}).get("fs.nr_open") or NR_OPEN
        with contextlib.suppress(ValueError, TypeError):  # no number: `check_types` says so
            if int(asked) > int(granted):
                yield Problem(
                    inventory.where(host, key if key in values else "tuning_sysctl"),
                    key,
                    str(asked) if key in values else f"{asked}, its default",
                    f"at most {granted}, fs.nr_open: the kernel grants nobody more",
                    f'Lower it, or raise that, too: tuning_sysctl: {{fs.nr_open: "{asked}"}}',
                )


def check_roce_class(inventory: Inventory, group: list[str]) -> Iterable[Problem]:
    """One switch serves all hosts that mark RoCE's packets: they mark alike, and not as congestion notices are."""

    def said(host, key):
        value = inventory.hosts.get(host, {}).get(key)
        return str(inventory.specs.get(key, {}).get("default") if value is None else value)

    marking = [host for host in group if said(host, "roce_qos_mode") != "none"]
    for host in marking:
        if said(host, "roce_qos_dscp") == CNP_DSCP:
            yield Problem(
                inventory.where(host, "roce_qos_dscp"),
                "roce_qos_dscp",
                CNP_DSCP,
                "another mark: cards give this one to congestion notices, which go by a priority of their own",
                "Set another one, 26 say, on all hosts",
            )
    for key in ("roce_qos_mode", "roce_qos_dscp", "roce_qos_priority"):
        for host in marking[1:]:
            if said(host, key) != said(marking[0], key):
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{said(host, key)}, where {marking[0]} has {said(marking[0], key)}",
                    "one value on all hosts of rdma: a switch serves one class",
                    "Set it in the group's variables instead",
                )
                break


def check_storage(inventory: Inventory) -> Iterable[Problem]:
    """At most one host shares a directory, one of the cluster's; it lies at one path, where nothing else does."""
    servers = list(inventory.groups.get("storage_server", []))
    if len(servers) > 1:
        yield Problem(
            inventory.source,
            "storage_server",
            f"{len(servers)} hosts ({', '.join(servers)})",
            "at most one: the host whose directory the others mount",
            "Leave one of them in the group",
        )
    for host in [host for host in servers if host not in inventory.members()]:
        yield Problem(
            inventory.where(host),
            "storage_server",
            "a host that is not in cluster",
            "one of the cluster's hosts",
            "Put it into workers, too; or, if it is a file server that trains nothing, leave the group empty, and "
            "mount it on every host at the same path yourself",
        )
    default = inventory.specs["storage_path"]["default"]
    found: dict[str, list[str]] = {}
    for host in inventory.members():
        found.setdefault(str(inventory.hosts[host].get("storage_path", default)), []).append(host)
    if servers and len(found) > 1:
        listed = "; ".join(f"{path} ({', '.join(hosts)})" for path, hosts in found.items())
        yield Problem(
            inventory.source,
            "storage_path",
            f"several values: {listed}",
            "one for the whole cluster: a run's model lies at one path on all hosts",
            "Set it once, under all: vars:",
        )
    for path, hosts in found.items():
        if fault := storage_fault(path, inventory.hosts[hosts[0]], inventory.specs):
            yield Problem(
                inventory.where(hosts[0], "storage_path"),
                "storage_path",
                f"{path}, {fault}",
                "a directory of its own, such as /srv/trainyard/shared",
                "Choose another",
            )


def storage_fault(path: str, variables: Mapping[str, Any], specs: Mapping[str, Mapping]) -> str:
    """Why `path` cannot be shared; "" if it can, or is none at all, which the check of types tells."""
    if not path.startswith("/"):
        return ""
    if NOT_SHARED.fullmatch(path):
        return "which is the system's"
    if UNSEEN.match(path):
        return "where runs see nothing (their unit has ProtectHome and PrivateTmp)"
    for key in ("trainer_state_dir", "trainer_opt_dir", "trainer_etc_dir", "python_env_dir"):
        own = str(variables.get(key) or specs[key].get("default", ""))
        if own.startswith("/") and (f"{path}/".startswith(f"{own}/") or f"{own}/".startswith(f"{path}/")):
            return f"which overlaps {own} ({key})"
    return ""


def check_monitoring(inventory: Inventory) -> Iterable[Problem]:
    """Prometheus runs on hosts of the cluster: to the others their firewalls let nobody else."""
    for host in [host for host in inventory.groups.get("monitoring", []) if host not in inventory.members()]:
        yield Problem(
            inventory.where(host),
            "monitoring",
            "a host that is not in cluster",
            "hosts of the cluster, mostly the head alone",
            "Put the head into the group instead; the metrics of a machine that trains nothing are not collected",
        )


NFS_PORT, DCGM_PORT = 2049, 9400  # roles/monitoring has the latter, and its host_metrics.py asks there


def check_ports(inventory: Inventory) -> Iterable[Problem]:
    """No two services of a host listen at one port."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for host in [] if inventory.local() else inventory.members():
        for pair in itertools.combinations(ports_of(inventory, host), 2):
            (one, ports, place), (two, others, beside) = pair
            both = range(max(ports.start, others.start), min(ports.stop, others.stop))
            if not both or (place and beside and place != beside):
                continue
            # What was set is at fault, not a default.
            told = [name.partition(".")[0] in inventory.hosts[host] for name in (one, two)]
            key, other = (one, two) if told == [True, False] else (two, one)
            found.setdefault((key, other, both.start), []).append(host)
    for (key, other, port), hosts in found.items():
        yield Problem(
            origin_of_first(inventory, hosts, key.partition(".")[0]),
            key,
            f"{port}, which {other} has on {', '.join(hosts)}, too",
            "a port of its own for every service of a host",
            f"Set {key} to another one",
        )


def ports_of(inventory: Inventory, host: str) -> list[tuple[str, range, str]]:
    """(its variable, or words; ports; where it listens, "" for everywhere) of each service that the host has."""
    values, several = inventory.hosts[host], len(inventory.members()) > 1
    watching = inventory.groups.get("monitoring", [])
    runs = values.get("trainer_config")
    metrics = runs.get("metrics_port") if isinstance(runs, Mapping) else 0
    # Another port than SSH's own may be a gateway's, which forwards to a host that has a cluster_address.
    direct = values.get("cluster_address") in (None, values.get("ansible_host"))
    served = host in inventory.groups.get("storage_server", [])
    dcgm = watching and values.get("monitoring_dcgm") != "never"
    grafana = host in watching and values.get("monitoring_grafana") != "never"
    services = (  # whether it is there, its name, where it listens, and its port where no variable of a role's has that
        (direct, "SSH", "", values.get("ansible_port")),
        (served, "NFS", "", NFS_PORT),
        (dcgm, "DCGM's exporter", "loopback", DCGM_PORT),
        (metrics, "trainer_config.metrics_port", "cluster", metrics),
        (True, "trainer_port", ""),
        (True, "bench_port", "cluster"),
        (several, "etcd_port", "cluster"),
        (several, "etcd_peer_port", "cluster"),
        (watching, "monitoring_exporter_port", "cluster"),
        (host in watching, "monitoring_port", "loopback"),
        (grafana, "monitoring_grafana_port", "loopback"),
    )
    count = {"bench_port": 4, "trainer_config.metrics_port": values.get("nproc_per_node", 1)}
    found = []
    for there, name, place, *port in services:
        if not there:
            continue
        with contextlib.suppress(TypeError, ValueError):  # no number: `check_types` says so
            first = int(str(port[0] if port else values.get(name, inventory.specs[name]["default"])))
            found.append((name, range(first, first + int(str(count.get(name, 1)))), place))
    return found


def check_facts(inventory: Inventory) -> list[Problem]:
    """What only the hosts' facts tell; hosts whose facts are not known are left out."""
    if inventory.local():
        return []
    checks = (check_interfaces, check_own_addresses, check_cluster_interface, check_clones)
    return [problem for one in checks for problem in one(inventory)]


def check_interfaces(inventory: Inventory) -> Iterable[Problem]:
    """The interfaces that the inventory names exist."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        there = (variables.get("ansible_facts") or {}).get("interfaces")
        if not there:
            continue
        made, wanted = interfaces_of(variables)
        for key, name in wanted:
            if name not in there and name not in made:
                yield Problem(
                    inventory.where(host, key),
                    key,
                    f"{name}, which the host has not got",
                    f"one of {', '.join(sorted(there))}",
                    "Correct the name; `ip -brief link` on the host lists them",
                )


def _list_of(value) -> list:
    """It, where it is a list: of a host that -l leaves out a template over its facts has no value."""
    return list(value) if isinstance(value, list | tuple) else []


def interfaces_of(variables: Mapping[str, Any]) -> tuple[set[str], list[tuple[str, str]]]:
    """The interfaces that the role network makes or names, and (variable, interface) for those that must exist."""
    made: set[str] = set()
    wanted = (
        [("cluster_interface", str(variables["cluster_interface"]))]
        if variables.get("cluster_interface")
        else []
    )
    for item in _list_of(variables.get("network_interfaces")):
        name = item.get("name")
        virtual = item.get("kind") in ("bonds", "bridges", "vlans")
        if name and (virtual or item.get("macaddress")):
            made.add(str(name))
        elif name:
            wanted.append(("network_interfaces", str(name)))
    return made, wanted


def check_own_addresses(inventory: Inventory) -> Iterable[Problem]:
    """Every host has the address that its peers will use, or gets it from the role network."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        there = (variables.get("ansible_facts") or {}).get("all_ipv4_addresses")
        key = "cluster_address" if variables.get("cluster_address") is not None else "ansible_host"
        address = str(variables.get(key))
        given = {
            str(text).partition("/")[0]
            for item in _list_of(variables.get("network_interfaces"))
            for text in _list_of(item.get("addresses") if isinstance(item, Mapping) else ())
        }
        if there and address not in there and address not in given:
            yield Problem(
                inventory.where(host, key),
                key,
                f"{address}, which no interface of the host has",
                f"one of {', '.join(map(str, there))}",
                "Set cluster_address to the one that its peers reach, or give it this one in network_interfaces",
            )
        about, instead = _given_up(address, variables) if key == "ansible_host" else ("", "")
        if about and address in (there or ()) and address not in given:
            yield Problem(
                inventory.where(host, "ansible_host"),
                "ansible_host",
                f"{address}, which {about} will not have any more, for network_interfaces gives it others",
                "the address by which its peers are to know it",
                f"Set cluster_address: {instead}; it is still reached at {address}, this once",
            )


def check_cluster_interface(inventory: Inventory) -> Iterable[Problem]:
    """Where the interface of the training is named, it is the one that holds the address, for that one is used."""
    for host in inventory.members():
        variables = inventory.hosts[host]
        facts, named = variables.get("ansible_facts") or {}, variables.get("cluster_interface")
        address = str(variables.get("cluster_address") or variables.get("ansible_host"))
        given = [
            item.get("name")
            for item in _list_of(variables.get("network_interfaces"))
            if isinstance(item, Mapping)
            and address in [str(text).partition("/")[0] for text in _list_of(item.get("addresses"))]
        ]
        holders = given or [
            name for name in facts.get("interfaces") or () if address in _addresses_of(facts, name)
        ]
        # One that network_interfaces knows by its hardware address has a name that only the host knows.
        if named and holders and not {named, None} & set(holders):
            yield Problem(
                inventory.where(host, "cluster_interface"),
                "cluster_interface",
                f"{named}, where {holders[0]} {'gets' if given else 'has'} {address}",
                "the interface that holds the host's cluster address",
                f"Set cluster_address to one of {named}'s, over which the training is to go; or name {holders[0]}",
            )


def _addresses_of(facts: Mapping[str, Any], name: str) -> list[str]:
    """The IPv4 addresses of an interface, by the host's facts."""
    link = _about(facts, name)
    return [
        str(one.get("address")) for one in (link.get("ipv4") or {}, *(link.get("ipv4_secondaries") or ()))
    ]


def _about(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What the host's facts say of an interface."""
    return facts.get(str(name).replace("-", "_").replace(".", "_")) or {}


def _given_up(address: str, variables: Mapping[str, Any]) -> tuple[str, str]:
    """The interface that has the address now and gets static ones instead, and the first of these; else two "".

    Known by its name; by its hardware address alone where it is no VLAN's, bridge's or bond's, which have it, too.
    """
    facts = variables.get("ansible_facts") or {}
    for item in _list_of(variables.get("network_interfaces")):
        if not isinstance(item, Mapping) or _options(item).get("dhcp4"):
            continue
        static = [str(text).partition("/")[0] for text in _list_of(item.get("addresses"))]
        static = [text for text in static if ":" not in text]
        for name in facts.get("interfaces") or () if static else ():
            link = _about(facts, name)
            means = item.get("name") == name or (
                str(item.get("macaddress")).lower() == link.get("macaddress")
                and link.get("type", "ether") == "ether"
                and "." not in str(name)
            )
            if means and address in _addresses_of(facts, name):
                return str(name), static[0]
    return "", ""


def check_clones(inventory: Inventory) -> Iterable[Problem]:
    """Every host has an SSH host key of its own: equal keys are one machine named twice, or clones of one disk."""
    owners: dict[str, str] = {}
    for host in inventory.members():
        key = (inventory.hosts[host].get("ansible_facts") or {}).get("ssh_host_key_ed25519_public")
        if key and (other := owners.setdefault(key, host)) != host:
            yield Problem(
                inventory.where(host, "ansible_host"),
                "SSH host key",
                f"the one that {other} has, too",
                "a key of its own for every machine",
                "If both names lead to one machine, remove one. If one was cloned from the other, give it new keys: "
                "rm /etc/ssh/ssh_host_*, dpkg-reconfigure openssh-server, and then ssh-keygen -R for it here",
            )


def variables_of_hosts(inventory: Inventory) -> dict[str, list[str]]:
    """Variable to the hosts that have it, hosts outside of the cluster left out."""
    found: dict[str, list[str]] = {}
    for host in inventory.members():
        for key in inventory.hosts[host]:
            found.setdefault(str(key), []).append(host)
    return found


def origin_of_first(inventory: Inventory, hosts: list[str], key: str) -> str:
    """Where `key` is set: its file and line if known, else the host."""
    origin = dict(inventory.origins).get((hosts[0], key))
    return origin or (hosts[0] if len(hosts) == 1 else inventory.source)


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
        inventory = self._inventory(task_vars, arguments["roles"])
        # By a reset, hosts that an earlier release deployed so can be put right.
        resets = any(os.path.basename(book) == "reset.yml" for book in context.CLIARGS.get("args") or ())
        left_out = [check_alike] if resets else []
        problems = check_facts(inventory) if arguments["facts"] else check(inventory, left_out)
        if problems:
            return {"failed": True, "msg": report(problems, contacted=arguments["facts"])}
        return {"changed": False}

    def _inventory(self, task_vars: Mapping[str, Any], roles: str) -> Inventory:
        names, specs = read_specs(roles)
        groups = {name: list(hosts) for name, hosts in task_vars["groups"].items()}
        wanted = tuple(f"{name}_" for name in {*SHARED_PREFIXES, *names})
        hosts: dict[str, dict[str, Any]] = {}
        origins: dict[tuple[str, str], str] = {}
        for host in {host for name in ("cluster", "head", "workers") for host in groups.get(name, [])}:
            variables = task_vars["hostvars"][host]
            hosts[host] = {}
            for key in variables:
                ours = key.startswith(wanted) or key in specs or any(is_slip(key, name) for name in specs)
                if not ours and key not in ANSIBLES:
                    continue
                origins[host, key] = origin_of(key)
                try:
                    hosts[host][key] = value = variables[key]
                    origins[host, key] = origin_of(value) or origins[host, key]
                except AnsibleError as error:
                    hosts[host][key] = Undefined(f"a template that fails: {error.message}")
        sources = list(task_vars.get("ansible_inventory_sources") or [])
        named = ", ".join(map(short_path, sources)) or "the inventory"
        left_out = [found for source in sources for found in self._left_out(source)]
        return Inventory(groups, hosts, specs, names, named, origins, left_out)

    def _left_out(self, source: str) -> Iterable[tuple[str, str, str]]:
        for path in yaml_files(source):
            try:
                data = self._loader.load_from_file(path, cache="none")
            except AnsibleError:  # no YAML: Ansible has read it otherwise
                continue
            for place, group, key in passed_over(data):
                yield origin_of(place) or short_path(path), group, key
