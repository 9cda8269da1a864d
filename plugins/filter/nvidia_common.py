"""All hosts' drivers together: the one that serves every card, and what differs in the end.

Pure functions, of what the filters nvidia_plan and nvidia_outcome found on each host (hostvars).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from nvidia_choice import WORDS
from nvidia_installed import branch_of


def nvidia_common(hostvars: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> dict:
    """The one driver that serves every card of `hosts`, chosen from what nvidia_plan found on each (__nvidia_plan).

    {source, branch: that driver, "" and None where none is or one host alone has cards; says: why not what a host
    would have for itself, or which host rules out each, "" where nobody need know; apart: each host that stays with
    another branch, which it has already, [str]}.
    """
    plans = {host: hostvars[host].get("__nvidia_plan") or {} for host in hosts}
    plans = {host: plan for host, plan in plans.items() if plan.get("offers")}
    none = {"source": "", "branch": None, "says": "", "apart": []}
    if len(plans) < 2:
        return none
    found = {driver_key(plan, one): None for plan in plans.values() for one in plan["offers"]}
    faults = {key: ruled_out(key, plans) for key in found}
    common = [key for key in found if not faults[key]]
    if not common:
        listed = "; ".join(f"{driver_words(key)} not {faults[key]}" for key in found)
        return {**none, "says": f"no one driver serves all hosts: {listed}. Each host has what serves it"}
    own = {host: driver_key(plan, plan) for host, plan in plans.items()}
    stay = [host for host, plan in plans.items() if plan["stays"]]
    key = min(common, key=lambda one: sum(own[host] != one for host in stay))
    branches = {host: own[host][1] if host in stay else key[1] for host in plans}
    apart = [f"{host} has {branch}" for host, branch in branches.items() if branch != key[1]]
    others = dict.fromkeys(own[host] for host in plans if own[host] != key and host not in stay)
    says = "; ".join(f"{driver_words(one)} does not serve {faults[one]}" for one in others if faults[one])
    return {
        **{"source": key[0], "branch": key[1], "apart": apart if len(set(branches.values())) > 1 else []},
        "says": f"one driver for all hosts, {driver_words(key)}: {says}" if says else "",
    }


def ruled_out(key: tuple[str, int, str], plans: Mapping[str, Mapping[str, Any]]) -> str:
    """The first host that a driver does not serve, with the reason in parentheses; "" if it serves all."""
    for host, plan in plans.items():
        offers = {driver_key(plan, one): one["fault"] for one in plan["offers"]}
        fault = offers.get(key, f"which has {' or '.join(map(driver_words, offers))}")
        if fault:
            return f"{host} ({fault})"
    return ""


def driver_key(plan: Mapping[str, Any], offer: Mapping[str, Any]) -> tuple[str, int, str]:
    """(source, branch, family): two hosts with the same get the same versions. NVIDIA's repository has them for all."""
    return offer["source"], offer["branch"], "" if offer["source"] == "nvidia" else plan["family"]


def driver_words(key: tuple[str, int, str]) -> str:
    source, branch, family = key
    return f"{branch} of {WORDS['nvidia'] if source == 'nvidia' else family}"


# ---- what differs in the end ----


def nvidia_versions(hostvars: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> list[str]:
    """What differs between the driver versions that nvidia_outcome found on `hosts`, each with what most have."""
    outcomes = {host: hostvars[host].get("__nvidia_outcome") or {} for host in hosts}
    found = {host: outcome["version"] for host, outcome in outcomes.items() if outcome.get("version")}
    if len(set(found.values())) < 2:
        return []
    common, _ = Counter(found.values()).most_common(1)[0]
    like = next(host for host, version in found.items() if version == common)
    return [
        f"{host} has {version} (most have {common}, such as {like})"
        for host, version in found.items()
        if version != common
    ]


def nvidia_branches(hostvars: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> list[int]:
    """The branches of those versions, without repeats: within one, hosts train together."""
    outcomes = [hostvars[host].get("__nvidia_outcome") or {} for host in hosts]
    return sorted({branch_of(one["version"]) or 0 for one in outcomes if one.get("version")})


class FilterModule:
    def filters(self):
        return {
            "nvidia_branches": nvidia_branches,
            "nvidia_common": nvidia_common,
            "nvidia_versions": nvidia_versions,
        }
