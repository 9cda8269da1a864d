"""Whether a value is one for its variable: types and choices as the argument specs have them, and what they cannot say.

Ranges, patterns and places of directories stand here; `value_fault`, given one value and its option, answers with what
was found, what was expected and the cure.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import BOOLEANS, BOOLEANS_TRUE
from network_entries import shown
from run_variables import RUNS_OWN

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
# Words that go into units and commands as they stand: variable to the pattern, and the same in words.
USER_NAME = (r"[a-z_][a-z0-9_-]{0,30}", "a user's name: lower case letters, digits, hyphens and underscores")
SLURM_NAME = (r"[A-Za-z0-9_.-]*", "a name that Slurm has: letters, digits, . _ and -")
# What a run under Slurm stands on.
SLURM_OWN = (
    "array",
    "chdir",
    "clusters",
    "job-name",
    "nodefile",
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
        # Ranks save at SIGTERM; another signal, such as the USR1 of many a script, would kill them.
        rf"(?!--({'|'.join(SLURM_OWN)})(=|$))(?!--signal=(?!(R:)?((SIG)?TERM|15)(@\d+)?$))--[a-z][a-z-]*(=.+)?",
        "an option of sbatch's as --NAME=VALUE, none that Trainyard sets by itself "
        f"({', '.join(SLURM_OWN)}), and --signal as TERM@SECONDS",
    ),
    "trainer_slurm_partition": SLURM_NAME,
    "trainer_user": USER_NAME,
    "trainer_stop_timeout": (
        r"(\d+ ?(ms|s|sec|seconds?|min|minutes?|h|hours?)? ?)+",
        "a time span of systemd such as 90s or 10min",
    ),
}
READ_AS_WORDS = ("accept_new_host_keys",)  # typed after -e as key=value; its one reader converts it
KINDS = {"bool": bool, "list": (list, tuple), "dict": Mapping}
SAMPLES = {"bool": False, "list": ["…"], "dict": {"…": "…"}}  # what a value of a type looks like, for a cure

# ---- directories ----

SAFE_PATH = re.compile(r"(/[A-Za-z0-9._+@-]+)+")
# These go into no unit, and checkouts may have a space in their path.
ON_THE_CONTROLLER = ("nvidia_repository_key", "trainer_results_dir")
# Directories that the service user comes to own; the machine's own must stay root's.
SERVICE_HOMES = ("trainer_state_dir", "identity_service_home")
OF_THE_SYSTEM = re.compile(
    "/(bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var"
    "|usr/(lib|local|share)|var/(cache|lib|log|tmp))"
)
SEEN_BY_RUNS = (
    "trainer_state_dir",
    "trainer_opt_dir",
    "trainer_etc_dir",
    "python_env_dir",
    "identity_service_home",
)
UNSEEN = re.compile("/(home|root|tmp|var/tmp)(/|$)")


def value_fault(key: str, value: Any, spec: Mapping[str, Any], local: bool) -> tuple[str, str, str] | None:
    """(what was found, what was expected, the cure) where `value` is none for the variable `key`; None if it is one."""
    option = {name: item for name, item in spec.items() if name not in ("required", "default")}
    if value is None:
        return "nothing", expected_by(option), "Give it a value, or leave the key out"
    if key not in READ_AS_WORDS and (odd := odd_kind(value, option)):
        return _kind_fault(key, option, *odd)
    if errors := ArgumentSpecValidator({key: option}).validate({key: value}).error_messages:
        return _spec_fault(value, option, errors)
    if fault := _range_fault(key, value) or _pattern_fault(key, value):
        return fault
    return path_fault(key, str(value), local) if option.get("type") == "path" else None


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


def _kind_fault(
    key: str, option: Mapping[str, Any], place: str, found: Any, wanted: Mapping[str, Any]
) -> tuple[str, str, str]:
    """The fault that odd_kind has found in a value for `option`."""
    example = SAMPLES.get(option.get("type", "str")) if place else meant(found, wanted)
    typed = shlex.quote(json.dumps({key: example}, ensure_ascii=False))
    return (
        shown(found) + (f" in {place}" if place else ""),
        expected_by(wanted),
        f"Write it as YAML; in an INI inventory {key}={example!r}, after -e: -e {typed}",
    )


def meant(word: Any, option: Mapping[str, Any]) -> Any:
    """What a word for a boolean or for a list of words was to be; else a sample."""
    kind, text = option.get("type"), str(word)
    if kind == "bool" and text.lower() in BOOLEANS:
        return text.lower() in BOOLEANS_TRUE
    if kind == "list" and option.get("elements") == "str" and re.fullmatch(r"[\w\[\]'\" ,.:/-]+", text):
        return [part.strip("[]'\" ") for part in text.split(",")]
    return SAMPLES.get(kind)


def _spec_fault(value: Any, option: Mapping[str, Any], errors: list[str]) -> tuple[str, str, str]:
    if not isinstance(value, (list, tuple, Mapping)):
        return shown(value), expected_by(option), "Correct it"
    reasons = "; ".join(error.rstrip(".") for error in errors)
    return "a fault in it", expected_by(option), f"Correct it ({reasons})"


def _range_fault(key: str, value: Any) -> tuple[str, str, str] | None:
    if key not in LIMITS:
        return None
    least, most = LIMITS[key]
    if math.isfinite(number := float(value)) and least <= number <= most:
        return None
    return str(value), f"{least} or more" if number < least else f"{least} to {most}", "Correct it"


def _pattern_fault(key: str, value: Any) -> tuple[str, str, str] | None:
    if key not in PATTERNS:
        return None
    pattern, words = PATTERNS[key]
    parts = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, Mapping):
        parts = [f"{name}={item}" for name, item in value.items()]
    odd = [part for part in parts if not re.fullmatch(pattern, str(part))]
    return (f"{odd[0]!r:.100}", words, "Correct it") if odd else None


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
