"""Which driver a host is to have: what the sources offer it, which of that it takes, or whether it keeps its own.

Given: a Host (nvidia_host). Answers: its offers, and a Driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_host import GUIDE, Host, Refused, card_name, oldest
from nvidia_installed import (
    FABRIC_UNIT,
    OPEN,
    PROPRIETARY,
    built_modules,
    dkms_packages,
    has_driver,
    installed_branch,
    installed_version,
    is_built,
    is_whole,
    kind_of,
    numbers,
    signed_packages,
)
from nvidia_torch import least_branch, too_old_for_torch

WORDS = {"distribution": "the distribution", "nvidia": "NVIDIA's repository"}
# How NVIDIA's repository numbers its packages. The distributions' own, some of which have the same names, end in their
# release (580.95.05-0ubuntu0.24.04.1, 580.142-1~bpo13+1).
NVIDIAS = r"[\d.]+-\d+(ubuntu\d+)?"


@dataclass(frozen=True)
class Driver:
    """The driver of a host.

    source: distribution or nvidia, or installed of one that is left as it is, wherever it came from; modules: open or
    proprietary; toolkit: the version of CUDA's that goes with it, "" for none; there: whether the host has this very
    driver already, whole; stays: whether that is so without anybody's asking for it.
    """

    source: str
    branch: int
    modules: str
    toolkit: str
    there: bool
    stays: bool

    @property
    def kept(self) -> bool:
        return self.source == "installed"


def choose(host: Host, offers: list[dict]) -> Driver:
    """The driver that the host is to have. Raises Refused."""
    options, installed = host.options, installed_branch(host.survey["packages"])
    may_stay = kept(host)
    serving = [one for one in offers if not one["fault"]]
    found = next((one for one in serving if is_there(host, one["source"], one["branch"])), None)
    asked = (options["source"], options["modules"], str(options["branch"])) != ("auto", "auto", "")
    alone = bool(may_stay) and not serving  # such as of a branch that no source has
    if alone:
        source, branch = offers[0]["source"], installed
    else:
        source, branch = choose_offer(offers, found, options.get("common") or {}, asked)
    modules = choose_modules(host, branch)
    ours = comes_from(host, source, branch)
    there = ours and is_whole(host.survey)
    if there and options["modules"] == "auto":
        modules = kept_modules(host) or modules
    # By its packages' names it may look like a source's that cannot serve: nothing is fetched from there.
    if may_stay and (alone or not (found or ours)):
        return Driver("installed", installed, may_stay, toolkit="", there=True, stays=True)
    cuda = toolkit(host, source, branch) if options["cuda_toolkit"] else ""
    return Driver(source, branch, modules, cuda, there, stays=bool(found and not asked))


# ---- what the sources offer ----


def offered(host: Host) -> list[dict]:
    """What the allowed sources have for this host, the first choice first: {source, branch, fault: why not, or ""}."""
    options, usual = host.options, host.tables["branch"]
    asked = int(options["branch"]) if options["branch"] else None
    found = []
    if options["source"] in ("auto", "distribution"):
        found.append(("distribution", asked or host.distribution["branch"]))
    if options["source"] in ("auto", "nvidia"):
        if not is_there(host, "nvidia", usual):
            usual = max(usual, host.distribution["repository"].get("first", 0))
        found.append(("nvidia", asked or usual))
    return [
        {"source": source, "branch": branch, "fault": branch_fault(host, source, branch)}
        for source, branch in found
    ]


def branch_fault(host: Host, source: str, branch: int) -> str:
    """Why a source's branch cannot serve the host; empty if it can."""
    for card in host.cards:
        limits = card["generation"]["branch"]
        if branch < limits["from"]:
            return f"the {card_name(card)} needs {limits['from']} or newer"
        if limits["to"] and branch > limits["to"]:
            return f"the {card_name(card)} is served up to {limits['to']}"
    if branch < least_branch(host):
        return too_old_for_torch(host, branch)
    return distributions_fault(host, branch) if source == "distribution" else repositorys_fault(host, branch)


def distributions_fault(host: Host, branch: int) -> str:
    """Why the distribution cannot give this host a branch that would serve it."""
    distribution, scheme = host.distribution, host.scheme("distribution")
    branches = distribution.get("branches")
    if branches and branch not in branches:
        return f"it has {', '.join(map(str, branches))} alone"
    if host.options["modules"] not in ("auto", *distribution.get("modules", (OPEN, PROPRIETARY))):
        return f"its {host.options['modules']} kernel modules cannot be installed together with its driver"
    if cannot_be_built(host):
        return (
            f"its modules cannot be built for kernels from {distribution['kernel_below']} on; this host runs "
            f"{host.survey['kernel']}"
        )
    if host.survey["nvswitches"] and "fabric" not in scheme:
        return "it has no fabric manager for this host's NVSwitches"
    if host.fifth_nvlink and not host.survey["nvswitches"] and "subnet" not in scheme:
        return "it has no subnet manager (nvlsm) for the NVLinks of this host's cards"
    return ""


def repositorys_fault(host: Host, branch: int) -> str:
    """Why NVIDIA's repository cannot give this host a branch that would serve it."""
    repository, renamed = host.distribution["repository"], host.tables["renamed_since"]
    if host.facts["architecture"] not in repository["directories"]:
        return f"there is none for {host.facts['architecture']}"
    first = repository.get("first", 0)
    if branch < first and not is_there(host, "nvidia", branch):
        return f"for {host.release} it has {first} and later alone"
    if branch >= renamed and (host.family == "Ubuntu" or host.fabric):
        return f"from {renamed} on its packages have other names, which this role does not know"
    return ""


def cannot_be_built(host: Host) -> bool:
    """Whether the running kernel is too new for the distribution's modules."""
    first = host.distribution.get("kernel_below")
    return bool(first) and numbers(host.survey["kernel"]) >= numbers(first)


# ---- what is there ----


def is_there(host: Host, source: str, branch: int) -> bool:
    """Whether a source's driver is the one that is there, with all of its packages."""
    names, scheme = {one["name"] for one in host.survey["packages"]}, host.scheme(source)
    return (
        is_whole(host.survey)
        and comes_from(host, source, branch)
        and any(
            names.issuperset(text.format(branch=branch, open=kind) for text in scheme[use])
            for use in ("compute", "desktop")
            for kind in ("-open", "")
        )
    )


def comes_from(host: Host, source: str, branch: int) -> bool:
    """Whether the installed driver is a source's: its branch, the packages of its modules, and how it is numbered."""
    found, scheme = host.survey["packages"], host.scheme(source)
    if installed_branch(found) != branch:
        return False
    if source == "nvidia" and not re.fullmatch(NVIDIAS, installed_version(found)):
        return False
    built = {text.format(branch=branch) for kind in scheme["modules"].values() for text in kind}
    signed = tuple(
        text.partition("{kernel}")[0].format(branch=branch, open=kind)
        for text in scheme.get("prebuilt", [])
        if "{kernel}" in text
        for kind in ("-open", "")
    )
    return any(one["name"] in built or one["name"].startswith(signed) for one in found)


def kept(host: Host) -> str:
    """The kind of modules of an installed driver that works, and that nobody asked to give way; "" for none.

    Whoever installed it: its packages are whole, its modules are there, or DKMS can build them, or they come signed
    with another kernel, and it is what the inventory asks for. Where it came from is not known, so that a wish for a
    source replaces it.
    """
    survey, options = host.survey, host.options
    installed = installed_branch(survey["packages"])
    if not has_driver(survey) or not is_whole(survey) or options["source"] != "auto":
        return ""
    if str(options["branch"]) not in ("", str(installed)) or installed < least_branch(host):
        return ""
    stuck = installed == host.distribution["branch"] and not is_built(survey, installed)
    if lacks_fabric(host) or (stuck and cannot_be_built(host)):
        return ""
    return kept_modules(host)


def kept_modules(host: Host) -> str:
    """The kind of the installed driver's modules, where it serves every card and is the one asked for; or ""."""
    survey, installed = host.survey, installed_branch(host.survey["packages"])
    kinds = [kind_of(module) for module in built_modules(survey, installed)]
    sources = dkms_packages(survey) or signed_packages(survey)
    kinds = kinds or [OPEN if "open" in name else PROPRIETARY for name in sources]
    if survey["loaded"]:  # where both are there, the one that the kernel has taken
        kinds.sort(key=lambda kind: kind != kind_of(survey["loaded"]))
    for kind in kinds:
        if host.options["modules"] in ("auto", kind) and serves_all(host, installed, kind):
            return kind
    return ""


def serves_all(host: Host, branch: int, kind: str) -> bool:
    """Whether modules of this kind and branch serve every card."""
    generations = [card["generation"] for card in host.cards]
    return all(
        kind in one["modules"] and one["branch"]["from"] <= branch <= (one["branch"]["to"] or branch)
        for one in generations
    )


def lacks_fabric(host: Host) -> bool:
    return host.fabric and FABRIC_UNIT not in host.survey["units"]


# ---- which of that ----


def choose_offer(
    offers: list[dict], there: Mapping[str, Any] | None, common: Mapping[str, Any], asked: bool
) -> tuple[str, int]:
    """(source, branch) of the offers that serve every card of the host. Raises Refused.

    What is `there` comes before the choice that is `common` to all hosts, unless the inventory has `asked`.
    """
    serving = [(one["source"], one["branch"]) for one in offers if not one["fault"]]
    if not serving:
        faults = [f"{WORDS[one['source']]}, branch {one['branch']}: {one['fault']}" for one in offers]
        raise Refused(
            f"no driver serves this host. {'; '.join(faults)}. Change nvidia_branch or nvidia_source, take the card "
            "out, or install the driver yourself and add --skip-tags nvidia to each site.yml; "
            f"{GUIDE} has the table."
        )
    first = [(one.get("source"), one.get("branch")) for one in (there or {}, common)]
    return next((one for one in (reversed(first) if asked else first) if one in serving), serving[0])


def choose_modules(host: Host, branch: int) -> str:
    """The kind of kernel modules that serves every card. Raises Refused, naming the card that rules it out."""
    asked = host.options["modules"]
    if asked != "auto":
        refuse_modules(host, branch, asked)
        return asked
    common = [
        kind
        for kind in (OPEN, PROPRIETARY)
        if all(kind in card["generation"]["modules"] for card in host.cards)
    ]
    if not common:
        first, second = (
            next(card for card in host.cards if card["generation"]["modules"] == [kind])
            for kind in (OPEN, PROPRIETARY)
        )
        raise Refused(
            f"the {card_name(first)} works with open kernel modules alone, the {card_name(second)} with "
            "proprietary ones alone, and a host has one kind. Put one of the two into another host."
        )
    if len(common) == 2:
        return OPEN if branch >= host.tables["open_since"] else PROPRIETARY
    return common[0]


def refuse_modules(host: Host, branch: int, asked: str) -> None:
    """Raise Refused where the modules that the inventory asks for serve not every card, or are not of the branch."""
    for card in host.cards:
        works = card["generation"]["modules"]
        if asked not in works:
            raise Refused(
                f"nvidia_modules is {asked}, but the {card_name(card)} works with {works[0]} modules alone. Remove "
                "nvidia_modules, or take the card out."
            )
    if asked == OPEN and branch < host.tables["open_from"]:
        raise Refused(
            f"nvidia_modules is open, but branch {branch} has none; they began with {host.tables['open_from']}."
        )


def toolkit(host: Host, source: str, branch: int) -> str:
    """The toolkit's CUDA version, such as 12.9. Raises Refused where it cannot build for a card."""
    cuda = host.cuda
    if source == "distribution":
        version, whose = host.distribution["cuda"], "the distribution's"
    else:
        known = {int(number): text for number, text in host.tables["cuda_of_branch"].items()}
        runs = known[max((number for number in known if number <= branch), default=min(known))]
        version = oldest([runs, cuda["to"]])
        whose = "the newest that this driver runs and every card is built for,"
    if numbers(version) < numbers(cuda["from"]):
        raise Refused(
            f"nvidia_cuda_toolkit: {whose} CUDA {version} cannot build for this host's cards, which need "
            f"{cuda['from']} or newer. Set nvidia_source: nvidia, or leave nvidia_cuda_toolkit out: training "
            "needs no toolkit."
        )
    return version
