"""From a host's cards and its driver (module nvidia_survey) to what the role nvidia does there.

Pure functions: nothing here reads a file or talks to a host. The tables (which card, driver, package) are data, in
roles/nvidia/vars/main/, and come as one mapping, `tables`; the role's variables come as another, `options`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from nvidia_apt import KEY_FILE, preferences, repository_key, sources_text
from nvidia_choice import WORDS, Driver, choose, offered
from nvidia_host import Host, Refused, usable_cards
from nvidia_installed import has_driver, installed_branch, installed_version
from nvidia_packages import Packages, check_room, headers_of, needed, passed_over
from nvidia_torch import refuse_cards_without_code, refuse_old_driver


def nvidia_plan(
    survey: Mapping[str, Any], facts: Mapping[str, Any], options: Mapping[str, Any], tables: Mapping[str, Any]
) -> dict:
    """What the role is to do on a host.

    `survey` is nvidia_survey's; of `facts`, distribution, distribution_version and architecture count. `options`:
    required, source, modules, branch, driver, upgrade, cuda_toolkit, repository, rdma, torch (its requirement, as the
    role python_env installs it), kernel (a release to build for, although this is a container), and, once it is known,
    common (the function nvidia_common's choice for all hosts). Returns
    {skip: why nothing is done, or ""; problems: [str]; notes: [str]} alone, or with what the function plan returns.
    """
    notes: list[str] = []
    try:
        if survey["cards"] and survey["container"] and not options["kernel"]:
            return {"skip": in_container(survey, options["required"]), "problems": [], "notes": notes}
        if survey["prime"] == "off" and not survey["loaded"]:
            return {"skip": switched_off(options["required"]), "problems": [], "notes": notes}
        cards = usable_cards(survey, options, tables, notes)
        if not cards:
            return {"skip": no_card(options["required"], survey), "problems": [], "notes": notes}
        host = Host(survey, facts, options, tables, cards)
        return {"skip": "", "problems": [], "notes": notes, **plan(host)}
    except Refused as refusal:
        return {"skip": "", "problems": [str(refusal)], "notes": notes}


# ---- hosts that are passed over ----


def in_container(survey: Mapping[str, Any], required: bool) -> str:
    """Why a container with cards is left alone; with `required`, it must have been given at least one."""
    if required and not survey["device_nodes"]:
        raise Refused(
            "nvidia_required is true, but this host is a container that was given no card (no /dev/nvidia0). "
            "Install the driver on the machine that it runs on, and hand the container its cards."
        )
    return "a container: the driver is the business of the machine that it runs on. Nothing is installed."


def switched_off(required: bool) -> str:
    """Why a laptop's card, which nvidia-prime keeps from the kernel and from sight, is left alone."""
    cure = "To train on it: sudo prime-select on-demand, reboot, and run site.yml again."
    if required:
        raise Refused(
            f"nvidia_required is true, but prime-select has switched this host's NVIDIA card off. {cure}"
        )
    return f"prime-select has switched this host's NVIDIA card off: no driver is installed. {cure}"


def no_card(required: bool, survey: Mapping[str, Any]) -> str:
    if required:
        found = "none that can be used" if survey["cards"] else "none on its PCI bus"
        raise Refused(
            f"nvidia_required is true, but of NVIDIA's cards this host has {found}. Look with `lspci -nn -d "
            "10de:` whether it is seated, powered and not switched off in the firmware; or remove "
            "nvidia_required."
        )
    return "no NVIDIA card that trains: no driver is installed."


# ---- the others ----


def plan(host: Host) -> dict:
    """What a host with cards gets; raises Refused.

    {cards: [{address, device, name}], modules, source, branch, kernel; family: the distributions'; offers: the
    function offered's; stays: whether it is a driver that is there, and that nobody asked to give way; headers,
    packages: to have; remove: modules of the other kind or another branch; move: whether installed packages give way
    to others; upgrade: installed packages of the branch; missing: packages that are not there; sources: text of our
    file for apt, "" for none; key: {url, fingerprint, path} or None; preferences: text; unattended: what unattended
    upgrades pass over, as beginnings of names; prebuilt, fabric, umad, peermem: bool; cuda: {from, to}; says: a
    line}.
    """
    survey = host.survey
    refuse_what_packages_cannot_serve(host)
    refuse_cards_without_code(host)
    offers = offered(host)
    refuse_old_driver(host, offers)
    driver = choose(host, offers)
    packages = needed(host, driver)
    refuse_under_a_run(host, packages)
    if packages.missing:
        check_room(host)
    # Else sources would be added for nothing.
    takes = packages.missing or packages.replaces or survey["own_sources"]
    sources = sources_text(host, driver.source) if takes and not driver.kept else ""
    follow = headers_of(survey["kernels_backported"]) if packages.headers else []
    return {
        "cards": [
            {"address": card["address"], "device": card["device"], "name": card["generation"]["name"]}
            for card in host.cards
        ],
        "modules": driver.modules,
        "source": driver.source,
        "branch": driver.branch,
        "family": host.family,
        "offers": offers,
        "stays": driver.stays,
        "headers": packages.headers,
        "packages": packages.wanted,
        "remove": packages.remove,
        "move": packages.move,
        "upgrade": packages.upgrade,
        "missing": packages.missing,
        "sources": sources,
        "key": repository_key(host) if KEY_FILE in sources else None,
        "preferences": preferences(driver.branch, follow),
        "unattended": passed_over(host, packages.prebuilt),
        "prebuilt": packages.prebuilt,
        "fabric": host.fabric,
        # By which the fabric manager speaks to the switches of the fifth NVLink.
        "umad": host.fifth_nvlink,
        "peermem": bool(host.options["rdma"]),
        "kernel": survey["kernel"],
        "cuda": host.cuda,
        "says": says(host, driver, packages),
    }


def refuse_what_packages_cannot_serve(host: Host) -> None:
    """Raise Refused on a release that is not in the tables, and of a driver that is of none of its packages."""
    survey, known = host.survey, host.tables["distributions"]
    if host.release not in known:
        raise Refused(
            f"found {host.release}; Trainyard knows NVIDIA's drivers on {', '.join(known)}. Install the driver "
            "yourself, if it is not there, and add --skip-tags nvidia to each site.yml."
        )
    if survey["runfile"]:
        raise Refused(
            "this host's driver came from NVIDIA's .run file, which packages cannot replace. Remove it (sudo "
            "nvidia-uninstall), reboot, and run again; or keep it, and add --skip-tags nvidia to each site.yml."
        )
    if survey["loaded"] and not has_driver(survey) and not host.options["kernel"]:
        raise Refused(
            f"this host's kernel runs NVIDIA's driver {survey['loaded']['version']}, which is of no package that "
            "Trainyard knows, so that it would be installed over. If it works, keep it, and add --skip-tags nvidia to "
            "each site.yml; if it was removed, reboot, and run again."
        )


def refuse_under_a_run(host: Host, packages: Packages) -> None:
    """Raise Refused where the driver would be replaced by which a run lives."""
    survey = host.survey
    if packages.replaces and survey["runs"] and survey["loaded"]:
        raise Refused(
            f"{', '.join(survey['runs'])} is training here, and another driver would take the place of "
            f"{survey['loaded']['version']}, which the kernel runs: no rank that is started anew would find its card. "
            "Nothing was changed. Stop the run first (playbooks/stop.yml), or run site.yml when it has ended."
        )


def says(host: Host, driver: Driver, packages: Packages) -> str:
    """One line: which cards, which driver."""
    counts = Counter(card["generation"]["name"] for card in host.cards)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    found = host.survey["packages"]
    origin = "already installed" if driver.kept else f"from {WORDS[driver.source]}"
    if packages.remove or installed_branch(found) not in (None, driver.branch):
        origin += f", in place of {installed_version(found)}"
    has_toolkit = any("cuda-toolkit" in item["name"] for item in found)
    if driver.kept and host.options["cuda_toolkit"] and not has_toolkit:
        origin += "; no CUDA toolkit, which comes with a source's driver alone (nvidia_source), and training needs none"
    return f"{listed}: driver {driver.branch}, {driver.modules} kernel modules, {origin}"


class FilterModule:
    def filters(self):
        return {"nvidia_plan": nvidia_plan}
