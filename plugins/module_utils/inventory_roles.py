"""What the roles' variables and groups say together: no role contradicts another, or needs what is not there.

Given an `Inventory`; each check answers with what is wrong. What one variable may be is in inventory_values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from inventory_base import Inventory, Problem, hosts_by_value, is_true, several_values
from inventory_values import UNSEEN

# Variable to what a file's first line is to match, what the file is to be, and the cure.
CONTROLLER_FILES = {
    "nvidia_repository_key": ("", "a key of a repository, as gpg exports it", "Correct the path"),
    "ssh_mesh_controller_key": (
        r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( .*)?$",
        "a file with a public key in its first line, such as ~/.ssh/id_ed25519.pub",
        "Correct the path; make a key with ssh-keygen -t ed25519, and never name the file without .pub",
    ),
}
NR_OPEN = 1048576  # fs.nr_open of Debian's and Ubuntu's kernels
CNP_DSCP = "48"  # of congestion notices: roles/roce_qos and the switch's text have it, too
# Directories that are not to be shared: the machine's own, and those in which its own lie.
NOT_SHARED = re.compile(
    "/|/(media|mnt|opt|srv|var|var/lib)"
    "|/(bin|boot|dev|etc|lib|lib32|lib64|libx32|proc|run|sbin|sys|usr|var/(cache|lock|log|mail|run|spool))(/.*)?"
)
NFS_PORT, DCGM_PORT = 2049, 9400  # roles/monitoring has the latter, and its host_metrics.py asks there


def check_controller_files(inventory: Inventory) -> Iterable[Problem]:
    """Files of the controller's that a role reads are there: it would find that out when much is changed already."""
    seen = set()
    for host in inventory.members():
        for key, (first_line, expected, cure) in CONTROLLER_FILES.items():
            path = str(inventory.hosts[host].get(key) or "")
            if (key, path) in seen:
                continue
            seen.add((key, path))
            if not path.startswith(("/", "~")):
                continue  # beside a playbook, where Ansible looks for it
            if fault := _file_fault(path, first_line):
                yield Problem(inventory.where(host, key), key, f"{path}, {fault}", expected, cure)


def _file_fault(path: str, first_line: str) -> str:
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
            known = re.match(first_line, file.readline())
    except OSError as error:
        return f"which cannot be read: {error.strerror}"
    return "" if known else "which holds no public key in its first line"


def check_rdma(inventory: Inventory) -> Iterable[Problem]:
    """RDMA's groups are the cluster's hosts, at most two manage InfiniBand, and all mark their packets alike."""
    group, managers = (list(inventory.groups.get(name, [])) for name in ("rdma", "opensm"))
    yield from _outside(inventory, "rdma", group, "cluster", inventory.members())
    yield from _outside(inventory, "opensm", managers, "rdma", group)
    if len(managers) > 2:
        yield Problem(
            inventory.source,
            "opensm",
            f"{len(managers)} hosts ({', '.join(managers)})",
            "one, or two: a master and its standby",
            "Take the others out of the group",
        )
    yield from _roce_class(inventory, group)


def _outside(
    inventory: Inventory, name: str, hosts: list[str], whole: str, of: list[str]
) -> Iterable[Problem]:
    """Hosts of the group `name` that are not in the group `whole`, whose hosts are `of`."""
    for host in [host for host in hosts if host not in of]:
        yield Problem(
            inventory.where(host),
            name,
            f"the host in {name}, but not in {whole}",
            f"hosts of {whole} alone",
            f"Put it into {whole}, too, or take it out of {name}",
        )


def check_switch(inventory: Inventory) -> Iterable[Problem]:
    """A lossless class is the switch's, too."""
    for host in inventory.groups.get("rdma", []):
        values = inventory.hosts.get(host, {})
        if values.get("roce_qos_mode") == "lossless" and not is_true(values.get("roce_qos_switch_confirmed")):
            yield Problem(
                inventory.where(host, "roce_qos_mode"),
                "roce_qos_mode",
                "lossless, without roce_qos_switch_confirmed",
                "a switch that pauses the same class: without that, packets are lost where nobody looks",
                "Run playbooks/switch.yml, apply what it writes, and set roce_qos_switch_confirmed: true",
            )


def _roce_class(inventory: Inventory, group: list[str]) -> Iterable[Problem]:
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


def check_storage(inventory: Inventory) -> Iterable[Problem]:
    """At most one host shares a directory, one of the cluster's; it lies at one path, where nothing else does."""
    servers = list(inventory.groups.get("storage_server", []))
    yield from _one_server(inventory, servers)
    default = inventory.specs["storage_path"]["default"]
    found = hosts_by_value(
        {host: str(inventory.hosts[host].get("storage_path", default)) for host in inventory.members()}
    )
    if servers and len(found) > 1:
        yield Problem(
            inventory.source,
            "storage_path",
            several_values(found),
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


def _one_server(inventory: Inventory, servers: list[str]) -> Iterable[Problem]:
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
            inventory.place_of_all(hosts, key.partition(".")[0]),
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
