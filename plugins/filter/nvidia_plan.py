"""From a host's cards and its driver (module nvidia_survey) to what the role nvidia does there, and what came of it.

Pure functions: nothing here reads a file or talks to a host. The tables (which card, driver, package) are data, in
roles/nvidia/vars/main/, and come as one mapping, `tables`; the role's variables come as another, `options`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from errno import ENOENT
from typing import Any

OPEN, PROPRIETARY = "open", "proprietary"
# Packages whose version is the driver's; one of them is in every installation.
# From 590 on those of NVIDIA's repository for Ubuntu have no branch in their names.
DRIVER = re.compile(
    r"libcuda1|libnvidia-compute(-\d+(-server)?)?|nvidia-smi|nvidia-utils(-\d+(-server)?)?"
    r"|libnvidia-tesla(-\d+)?-cuda1"  # Debian's for servers, which may stand beside the others
)
KERNEL_KIND = {
    "Debian": r"-((?:cloud-|rt-)?(?:amd64|arm64))$",  # 6.1.0-50-cloud-amd64
    "Ubuntu": r"-\d+-([a-z][a-z0-9-]*)$",  # 6.8.0-49-generic
}
# How NVIDIA's repository numbers its packages. The distributions' own, some of which have the same names, end in their
# release (580.95.05-0ubuntu0.24.04.1, 580.142-1~bpo13+1).
NVIDIAS = r"[\d.]+-\d+(ubuntu\d+)?"
SIGNED = "linux-modules-nvidia-"  # modules that Ubuntu has built and signed, a package for each kernel
FLAVOUR = re.compile(rf"{SIGNED}(\d+(?:-server)?(?:-open)?)-")
FABRIC = re.compile(r"nvidia-fabricmanager(-\d+)?")
# What unattended upgrades pass over: the driver; and, where each kernel's modules are packages, the kernels.
DRIVERS = ["nvidia", "libnvidia", "linux-modules-nvidia", "libcuda", "libcudadebugger", "cuda-drivers"]
KERNELS = ["linux-image", "linux-headers", "linux-modules"]
# The card belongs to a virtual machine: KVM's, Grace Hopper's own (nvgrace-gpu-vfio-pci), Xen's.
UNUSABLE = ("vfio-pci", "pci-stub", "pciback")
CORRUPTED = 14  # nvidia-smi's status where a card's infoROM is
GB = 10**9
GUIDE = "docs/gpus.md"


class Refused(Exception):
    """What stands in the way on this host, and the cure."""


def nvidia_plan(
    survey: Mapping[str, Any], facts: Mapping[str, Any], options: Mapping[str, Any], tables: Mapping[str, Any]
) -> dict:
    """What the role is to do on a host.

    `survey` is nvidia_survey's; of `facts`, distribution, distribution_version and architecture count. `options`:
    required, source, modules, branch, driver, cuda_toolkit, repository, rdma, torch (its requirement, as the role
    python_env installs it), kernel (a release to build for, although this is a container), and, once it is known,
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
        return {"skip": "", "problems": [], "notes": notes, **plan(survey, facts, options, tables, cards)}
    except Refused as refusal:
        return {"skip": "", "problems": [str(refusal)], "notes": notes}


# ---- the cards ----


def within(device: str, ranges: Iterable[str]) -> bool:
    """Whether the PCI device id lies in one of `ranges`, first-last."""
    ends = [text.partition("-") for text in ranges]
    return any(int(first, 16) <= int(device, 16) <= int(last or first, 16) for first, _, last in ends)


def generation_of(device: str, tables: Mapping[str, Any]) -> dict | None:
    """{name, modules, branch {from, to}, cuda {from, to}} of a PCI device id (4 digits); None if unknown."""
    row = next((row for row in tables["generations"] if within(device, row["devices"])), None)
    if not row:
        return None
    later = [int(branch) for branch, ids in tables["later_cards"].items() if device in ids]
    least = max([row["branch"]["from"], *later])
    return {**row, "branch": {"from": least, "to": row["branch"].get("to")}}


def usable_cards(
    survey: Mapping[str, Any], options: Mapping[str, Any], tables: Mapping[str, Any], notes: list[str]
) -> list[dict]:
    """The cards to serve, {address, device, generation}; what is left out, and why, goes to `notes`."""
    cards = []
    for card in survey["cards"]:
        where = f"{card['address']} (PCI id 10de:{card['device']})"
        if (card["driver"] or "").endswith(UNUSABLE):
            notes.append(f"the card at {where} is reserved for virtual machines ({card['driver']}): left out")
        elif within(card["device"], tables["too_old"]):
            notes.append(
                f"the card at {where} is of Kepler or an older generation, which no driver for today's CUDA "
                "serves: left out"
            )
        else:
            generation = generation_of(card["device"], tables)
            if not generation:
                generation = as_told(where, options)
            cards.append({"address": card["address"], "device": card["device"], "generation": generation})
    served = [card["address"] for card in cards]
    for card in survey["cards"]:
        if served and card["driver"] == "nouveau" and card["address"] not in served:
            notes.append(
                f"nouveau, which drives the card at {card['address']}, is kept from loading for the others' sake: a "
                "screen at it has the firmware's plain picture after a reboot; attach it to another card"
            )
    return cards


def as_told(where: str, options: Mapping[str, Any]) -> dict:
    """What stands for the generation of an unknown card: the inventory's word, both of its words."""
    if options["modules"] == "auto" or not options["branch"]:
        raise Refused(
            f"the card at {where} is none that Trainyard knows, perhaps because it is too new, so neither its "
            "kernel modules nor its driver branch can be chosen. Set both for this host, as NVIDIA's list of "
            "supported cards has them: nvidia_modules (open or proprietary) and nvidia_branch (such as 580)."
        )
    return {
        "name": "unknown",
        "modules": [options["modules"]],
        "branch": {"from": int(options["branch"]), "to": None},
        "cuda": {"from": "0"},
    }


def card_name(card: Mapping[str, Any]) -> str:
    return f"{card['generation']['name']} card at {card['address']} (PCI id 10de:{card['device']})"


def no_card(required: bool, survey: Mapping[str, Any]) -> str:
    if required:
        found = "none that can be used" if survey["cards"] else "none on its PCI bus"
        raise Refused(
            f"nvidia_required is true, but of NVIDIA's cards this host has {found}. Look with `lspci -nn -d "
            "10de:` whether it is seated, powered and not switched off in the firmware; or remove "
            "nvidia_required."
        )
    return "no NVIDIA card that trains: no driver is installed."


def switched_off(required: bool) -> str:
    """Why a laptop's card, which nvidia-prime keeps from the kernel and from sight, is left alone."""
    cure = "To train on it: sudo prime-select on-demand, reboot, and run site.yml again."
    if required:
        raise Refused(
            f"nvidia_required is true, but prime-select has switched this host's NVIDIA card off. {cure}"
        )
    return f"prime-select has switched this host's NVIDIA card off: no driver is installed. {cure}"


def in_container(survey: Mapping[str, Any], required: bool) -> str:
    """Why a container with cards is left alone; with `required`, it must have been given at least one."""
    if required and not survey["device_nodes"]:
        raise Refused(
            "nvidia_required is true, but this host is a container that was given no card (no /dev/nvidia0). "
            "Install the driver on the machine that it runs on, and hand the container its cards."
        )
    return "a container: the driver is the business of the machine that it runs on. Nothing is installed."


# ---- the choice ----


def plan(
    survey: Mapping[str, Any],
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    tables: Mapping[str, Any],
    cards: list[dict],
) -> dict:
    """What a host with cards gets; raises Refused.

    {cards: [{address, device, name}], modules, source, branch, kernel; family: the distributions'; offers: the
    function offered's; stays: whether it is a driver that is there, and that nobody asked to give way; headers,
    packages: to have; remove: modules of the other kind or another branch; move: whether installed packages give way
    to others; upgrade: installed packages of the branch; missing: packages that are not there; sources: text of our
    file for apt, "" for none; key: {url, fingerprint, path} or None; preferences: text; unattended: what unattended
    upgrades pass over, as beginnings of names; prebuilt, fabric, umad, peermem: bool; cuda: {from, to}; says: a
    line}.
    """
    name = f"{facts['distribution']} {release(facts)}"
    distribution = tables["distributions"].get(name)
    if not distribution:
        known = ", ".join(tables["distributions"])
        raise Refused(
            f"found {name}; Trainyard knows NVIDIA's drivers on {known}. Install the driver yourself, if "
            "it is not there, and add --skip-tags nvidia to each site.yml."
        )
    if survey["runfile"]:
        raise Refused(
            "this host's driver came from NVIDIA's .run file, which packages cannot replace. Remove it (sudo "
            "nvidia-uninstall), reboot, and run again; or keep it, and add --skip-tags nvidia to each site.yml."
        )
    if survey["loaded"] and not has_driver(survey) and not options["kernel"]:
        raise Refused(
            f"this host's kernel runs NVIDIA's driver {survey['loaded']['version']}, which is of no package that "
            "Trainyard knows, so that it would be installed over. If it works, keep it, and add --skip-tags nvidia to "
            "each site.yml; if it was removed, reboot, and run again."
        )
    family = facts["distribution"]
    refuse_cards_without_code(cards, options, tables)
    offers = offered(options, tables, distribution, cards, survey, facts)
    refuse_old_driver(survey, options, tables, offers)
    there_already = next((one for one in offers if installed_whole(one, family, survey, tables)), None)
    asked = (options["source"], options["modules"], str(options["branch"])) != ("auto", "auto", "")
    installed = installed_branch(survey["packages"])
    fifth_nvlink = any(card["device"] in tables["fifth_nvlink"] for card in cards)
    fabric = bool(survey["nvswitches"]) or fifth_nvlink
    lacks_fabric = fabric and "nvidia-fabricmanager.service" not in survey["units"]
    stuck = (
        installed == distribution["branch"]
        and not is_built(survey, installed)
        and cannot_be_built(distribution, survey)
    )
    may_stay = "" if lacks_fabric or stuck else kept(survey, cards, options, tables)
    alone = bool(may_stay) and all(one["fault"] for one in offers)  # such as of a branch that no source has
    if alone:
        source, branch = offers[0]["source"], installed
    else:
        source, branch = choose_branch(offers, there_already, options.get("common") or {}, asked)
    modules = choose_modules(options, tables, cards, branch)
    ours = comes_from(source, branch, family, survey, tables)
    stays = ours and is_whole(survey)
    if stays and options["modules"] == "auto":
        modules = kept_kind(survey, cards, options) or modules
    tells = [card["generation"]["cuda"] for card in cards]
    cuda = {"from": newest(item["from"] for item in tells), "to": oldest(item.get("to") for item in tells)}
    words = {
        "branch": branch,
        "open": "-open" if modules == OPEN else "",
        "kernel": survey["kernel"],
        "kind": kernel_kind(survey["kernel"], family),
        "cuda": "",
        "fabric": installed_fabric(survey, branch) or fabric_name(source, branch, tables),
    }
    scheme = tables["packages"][source][family]
    desktop = options["driver"] == "desktop" or (options["driver"] == "auto" and survey["desktop"])
    # The distribution's own signature lets its modules in where the firmware asks for one. What runs stays as it is.
    signed = has_signed(survey)
    asks = survey["secure_boot"] and not (stays and survey["loaded"])
    prebuilt = bool((asks or (stays and signed)) and words["kind"] and "prebuilt" in scheme)
    unattended = [*DRIVERS]
    there = {item["name"] for item in survey["packages"]}
    has = {
        use: there.issuperset(text.format(**words) for text in scheme[use]) for use in ("compute", "desktop")
    }
    names = [*(scheme["prebuilt"] if prebuilt else scheme["modules"][modules])]
    names += scheme["desktop" if desktop or (has["desktop"] and not has["compute"]) else "compute"]
    if fabric:
        names += fabric_packages(scheme, tables, source, branch, cards)
    if options["cuda_toolkit"]:
        words["cuda"] = toolkit(source, branch, cuda, distribution, tables).replace(".", "-")
        names += scheme["toolkit"]
    if prebuilt:
        words["kind"] = followed_kind(survey["kernel_packages"], words["kind"])
    wanted = [text.format(**words) for text in names]
    others = {
        other.format(**words)
        for place in tables["packages"].values()
        for found in place[family]["modules"].values()
        for other in found
    } - set(wanted)
    whole = {item["name"] for item in survey["packages"] if item["whole"]}
    # By its packages' names it may look like a source's that cannot serve: nothing is fetched from there.
    keep = may_stay if alone or not (there_already or ours) else ""
    if keep:
        branch, modules, wanted, others, prebuilt = installed, keep, [], set(), signed
        if signed and not is_built(survey, installed):
            wanted = signed_of_kernel(survey, keep)
        wanted = [*wanted, *lacking_tools(survey)]
    if prebuilt:
        kind = kernel_kind(survey["kernel"], family)
        unattended += [*KERNELS, *([f"linux-{kind}"] if kind else [])]
    builds = any(map(by_dkms, [*wanted, *there]))
    # What is upgraded, or gives way to packages that are yet to come, is built anew.
    lasts = not options["upgrade"] and whole.issuperset(filter(by_dkms, wanted))
    made = lasts and is_built(survey, branch, modules)
    headers = header_packages(survey, words["kind"], made) if builds and not prebuilt else []
    missing = [package for package in wanted if package not in whole]
    lacks_signed = any(name.startswith(SIGNED) for name in missing)
    upgrade = [item["name"] for item in survey["packages"] if branch_of(item["version"]) == branch]
    # Modules for another kernel may need a newer driver of the branch, whose packages are held, and the fabric manager
    # wants one of its very version.
    move = bool(installed and (installed != branch or lacks_signed or lacks_fabric)) or bool(there & others)
    if (move or (options["upgrade"] and upgrade)) and survey["runs"] and survey["loaded"]:
        raise Refused(
            f"{', '.join(survey['runs'])} is training here, and another driver would take the place of "
            f"{survey['loaded']['version']}, which the kernel runs: no rank that is started anew would find its card. "
            "Nothing was changed. Stop the run first (playbooks/stop.yml), or run site.yml when it has ended."
        )
    if missing:
        check_room(survey["free_bytes"], tables["room"])
    # Of another branch, too: both would be built.
    remove = (there & others) | (set() if keep else set(dkms_packages(survey)) - set(wanted))
    origin = "already installed" if keep else f"from {WORDS[source]}"
    if remove or installed not in (None, branch):
        origin += f", in place of {installed_version(survey['packages'])}"
    # Else sources would be added for nothing.
    takes = missing or move or (options["upgrade"] and upgrade)
    sources = ""
    if not keep and (takes or survey["own_sources"]):
        sources = sources_text(source, family, distribution, survey, facts, options)
    return {
        "cards": [
            {"address": card["address"], "device": card["device"], "name": card["generation"]["name"]}
            for card in cards
        ],
        "modules": modules,
        "source": "installed" if keep else source,
        "branch": branch,
        "family": family,
        "offers": offers,
        "stays": bool(keep or (there_already and not asked)),
        "headers": headers,
        "packages": wanted,
        "remove": sorted(remove),
        "move": move,
        "upgrade": upgrade,
        "missing": missing,
        "sources": sources,
        "key": repository_key(distribution, facts, options) if KEY_FILE in sources else None,
        "preferences": preferences(branch, headers_of(survey["kernels_backported"]) if headers else []),
        "unattended": unattended,
        "prebuilt": prebuilt,
        "fabric": fabric,
        # By which the fabric manager speaks to the switches of the fifth NVLink.
        "umad": fifth_nvlink,
        "peermem": bool(options["rdma"]),
        "kernel": survey["kernel"],
        "cuda": cuda,
        "says": says(cards, modules, branch, origin),
    }


WORDS = {"distribution": "the distribution", "nvidia": "NVIDIA's repository"}


def release(facts: Mapping[str, Any]) -> str:
    """The release as the tables name it: 12 of Debian 12.5, 24.04 of Ubuntu."""
    version = str(facts["distribution_version"])
    return version.split(".")[0] if facts["distribution"] == "Debian" else version


def kernel_kind(kernel: str, family: str) -> str:
    """The kind of a kernel release, such as amd64 or generic; empty for one of the host's own making."""
    found = re.search(KERNEL_KIND.get(family, "$^"), kernel)
    return found[1] if found else ""


def followed_kind(kernel_packages: Iterable[str], kind: str) -> str:
    """The kind of the package that brings the newest kernel: generic, or generic-hwe-24.04 where that is there."""
    found = [name.removeprefix("linux-image-") for name in kernel_packages]
    return max((name for name in found if name.startswith(kind)), key=len, default=kind)


def offered(
    options: Mapping[str, Any],
    tables: Mapping[str, Any],
    distribution: Mapping[str, Any],
    cards: list[dict],
    survey: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> list[dict]:
    """What the allowed sources have for this host, the first choice first: {source, branch, fault: why not, or ""}."""
    asked = int(options["branch"]) if options["branch"] else None
    offers = []
    if options["source"] in ("auto", "distribution"):
        offers.append(("distribution", asked or distribution["branch"]))
    if options["source"] in ("auto", "nvidia"):
        usual = max(tables["branch"], distribution["repository"].get("first", 0))
        if is_there("nvidia", tables["branch"], facts["distribution"], survey, tables):
            usual = tables["branch"]
        offers.append(("nvidia", asked or usual))
    return [
        {
            "source": source,
            "branch": branch,
            "fault": branch_fault(source, branch, options, tables, distribution, cards, survey, facts),
        }
        for source, branch in offers
    ]


def installed_whole(
    offer: Mapping[str, Any], family: str, survey: Mapping[str, Any], tables: Mapping[str, Any]
) -> bool:
    """Whether the driver of an offer that serves the host is the one that is there, and nothing of it is broken."""
    return not offer["fault"] and is_there(offer["source"], offer["branch"], family, survey, tables)


def is_there(
    source: str, branch: int, family: str, survey: Mapping[str, Any], tables: Mapping[str, Any]
) -> bool:
    """Whether a source's driver is the one that is there, with all of its packages."""
    names, scheme = {one["name"] for one in survey["packages"]}, tables["packages"][source][family]
    return (
        is_whole(survey)
        and comes_from(source, branch, family, survey, tables)
        and any(
            names.issuperset(text.format(branch=branch, open=kind) for text in scheme[use])
            for use in ("compute", "desktop")
            for kind in ("-open", "")
        )
    )


def comes_from(
    source: str, branch: int, family: str, survey: Mapping[str, Any], tables: Mapping[str, Any]
) -> bool:
    """Whether the installed driver is a source's: its branch, the packages of its modules, and how it is numbered."""
    found, scheme = survey["packages"], tables["packages"][source][family]
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


def choose_branch(
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


def branch_fault(
    source: str,
    branch: int,
    options: Mapping[str, Any],
    tables: Mapping[str, Any],
    distribution: Mapping[str, Any],
    cards: list[dict],
    survey: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> str:
    """Why a source's branch cannot serve the host; empty if it can."""
    for card in cards:
        limits = card["generation"]["branch"]
        if branch < limits["from"]:
            return f"the {card_name(card)} needs {limits['from']} or newer"
        if limits["to"] and branch > limits["to"]:
            return f"the {card_name(card)} is served up to {limits['to']}"
    if branch < (least := least_branch(options, tables)):
        return too_old_for_torch(branch, least, options, tables)
    switches = survey["nvswitches"] or any(card["device"] in tables["fifth_nvlink"] for card in cards)
    if source == "distribution":
        offered = distribution.get("branches")
        if offered and branch not in offered:
            return f"it has {', '.join(map(str, offered))} alone"
        if options["modules"] not in ("auto", *distribution.get("modules", (OPEN, PROPRIETARY))):
            return f"its {options['modules']} kernel modules cannot be installed together with its driver"
        if cannot_be_built(distribution, survey):
            return (
                f"its modules cannot be built for kernels from {distribution['kernel_below']} on; this host runs "
                f"{survey['kernel']}"
            )
        scheme = tables["packages"][source][facts["distribution"]]
        if survey["nvswitches"] and "fabric" not in scheme:
            return "it has no fabric manager for this host's NVSwitches"
        if switches and not survey["nvswitches"] and "subnet" not in scheme:
            return "it has no subnet manager (nvlsm) for the NVLinks of this host's cards"
        return ""
    if facts["architecture"] not in distribution["repository"]["directories"]:
        return f"there is none for {facts['architecture']}"
    first = distribution["repository"].get("first", 0)
    if branch < first and not is_there(source, branch, facts["distribution"], survey, tables):
        return f"for {facts['distribution']} {release(facts)} it has {first} and later alone"
    if branch >= tables["renamed_since"] and (facts["distribution"] == "Ubuntu" or switches):
        return (
            f"from {tables['renamed_since']} on its packages have other names, which this role does not know"
        )
    return ""


def cannot_be_built(distribution: Mapping[str, Any], survey: Mapping[str, Any]) -> bool:
    """Whether the running kernel is too new for the distribution's modules."""
    first = distribution.get("kernel_below")
    return bool(first) and numbers(survey["kernel"]) >= numbers(first)


def torch_cuda(options: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """The CUDA that torch's build is for, 12.6 of one tagged +cu126; "" for a build for none, or one unknown.

    Without a tag it is what the public index has.
    """
    version, _, tag = options.get("torch", "").partition("+")
    if not version or not tag:
        return tables["torch_cuda"] if version else ""
    found = re.fullmatch(r"cu(\d+)(\d)", tag)
    return f"{found[1]}.{found[2]}" if found else ""


def least_branch(options: Mapping[str, Any], tables: Mapping[str, Any]) -> int:
    """The first branch that runs torch's build; 0 where that is not known. Of one major number a branch runs all."""
    cuda = torch_cuda(options, tables)
    known = {int(major): branch for major, branch in tables["branch_of_cuda"].items()}
    return known.get(numbers(cuda)[0], 0) if cuda else 0


def too_old_for_torch(branch: int, least: int, options: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    return (
        f"torch's build ({options['torch']}) is for CUDA {torch_cuda(options, tables)}, which {branch} does not run, "
        f"and {least} does"
    )


def refuse_old_driver(
    survey: Mapping[str, Any], options: Mapping[str, Any], tables: Mapping[str, Any], offers: list[dict]
) -> None:
    """Raise Refused where a driver that is there, and that nobody asked to give way, does not run torch's build."""
    installed, least = installed_branch(survey["packages"]), least_branch(options, tables)
    if not has_driver(survey):
        return
    if installed < least and options["source"] == "auto" and not options["branch"]:
        to_have = next((one["branch"] for one in offers if not one["fault"]), least)
        raise Refused(
            f"{too_old_for_torch(installed, least, options, tables)}; a driver of {installed} is installed. Set "
            f"nvidia_branch: {to_have} to have it replaced, or python_env_torch to a build that it runs "
            f"({other_build(options, tables)}), for all hosts; {GUIDE} has the table."
        )


def refuse_cards_without_code(
    cards: list[dict], options: Mapping[str, Any], tables: Mapping[str, Any]
) -> None:
    """Raise Refused where torch's build is for a CUDA that makes no code for one of the cards."""
    cuda = torch_cuda(options, tables)
    for card in cards if cuda else ():
        serves = card["generation"]["cuda"]
        if numbers(cuda) < numbers(serves["from"]) or (
            serves.get("to") and numbers(cuda) > numbers(serves["to"])
        ):
            until = f" to {serves['to']}" if serves.get("to") else " or later"
            newer = numbers(cuda) < numbers(serves["from"])
            raise Refused(
                f"torch's build ({options['torch']}) is for CUDA {cuda}; the {card_name(card)} is served by builds for "
                f"{serves['from']}{until}. Set python_env_torch to such a build for all hosts "
                f"({other_build(options, tables, newer)}), or leave this host out of the run; {GUIDE} has the table."
            )


def other_build(options: Mapping[str, Any], tables: Mapping[str, Any], newer: bool = False) -> str:
    version = options["torch"].partition("+")[0]
    if newer:
        return f"such as {version}, as the public index has it"
    return f"such as {version}+{tables['torch_older']}, from an index or a folder that has it"


def signed_of_kernel(survey: Mapping[str, Any], kind: str) -> list[str]:
    """The package of signed modules for the running kernel, of the flavour that the owner has chosen."""
    flavours = {FLAVOUR.match(name)[1] for name in signed_packages(survey)}
    chosen = sorted(one for one in flavours if one.endswith("-open") == (kind == OPEN))
    return [f"{SIGNED}{flavour}-{survey['kernel']}" for flavour in chosen]


def choose_modules(
    options: Mapping[str, Any], tables: Mapping[str, Any], cards: list[dict], branch: int
) -> str:
    """The kind of kernel modules that serves every card. Raises Refused, naming the card that rules it out."""
    asked = options["modules"]
    common = [
        kind for kind in (OPEN, PROPRIETARY) if all(kind in card["generation"]["modules"] for card in cards)
    ]
    if asked != "auto":
        for card in cards:
            if asked not in card["generation"]["modules"]:
                raise Refused(
                    f"nvidia_modules is {asked}, but the {card_name(card)} works with "
                    f"{card['generation']['modules'][0]} modules alone. Remove nvidia_modules, or take the card "
                    "out."
                )
        if asked == OPEN and branch < tables["open_from"]:
            raise Refused(
                f"nvidia_modules is open, but branch {branch} has none; they began with {tables['open_from']}."
            )
        return asked
    if not common:
        first, second = (
            next(card for card in cards if card["generation"]["modules"] == [kind])
            for kind in (OPEN, PROPRIETARY)
        )
        raise Refused(
            f"the {card_name(first)} works with open kernel modules alone, the {card_name(second)} with "
            "proprietary ones alone, and a host has one kind. Put one of the two into another host."
        )
    if OPEN in common and PROPRIETARY in common:
        return OPEN if branch >= tables["open_since"] else PROPRIETARY
    return common[0]


def installed_version(packages: Iterable[Mapping[str, Any]]) -> str:
    """The version of the installed driver's packages; empty without one.

    The newest: of a branch that Ubuntu has given up, empty packages stay beside the ones that they brought.
    """
    found = [item["version"] for item in packages if DRIVER.fullmatch(item["name"])]
    return max(found, key=lambda version: numbers(version.rpartition(":")[2]), default="")


def plain_version(version: str) -> str:
    """580.95.05 of 580.95.05-0ubuntu1, or of 1:580.95.05."""
    return re.match(r"[\d.]*", version.rpartition(":")[2])[0]


def installed_branch(packages: Iterable[Mapping[str, Any]]) -> int | None:
    """The branch of the installed driver; None without one."""
    return branch_of(installed_version(packages))


def branch_of(version: str) -> int | None:
    """580 of 580.95.05-0ubuntu1, or of 1:580.95.05."""
    found = re.match(r"(?:\d+:)?(\d{3})\.", version)
    return int(found[1]) if found else None


def is_built(survey: Mapping[str, Any], branch: int, kind: str = "") -> bool:
    """Whether the running kernel has a module of the branch; of that kind, if one is given."""
    found = [module for module in survey["modules"] if branch_of(module["version"]) == branch]
    return any(kind in ("", OPEN if module["open"] else PROPRIETARY) for module in found)


def is_whole(survey: Mapping[str, Any]) -> bool:
    """Whether no package of the driver's is half installed; a toolkit's, say, or a container's, is none."""
    installed, signed = installed_branch(survey["packages"]), signed_packages(survey)
    return all(
        item["whole"]
        for item in survey["packages"]
        if branch_of(item["version"]) == installed or item["name"] in signed
    )


def lacking_tools(survey: Mapping[str, Any]) -> list[str]:
    """The package with nvidia-smi for Ubuntu's installed driver, where it is not there.

    `ubuntu-drivers install --gpgpu` leaves it out.
    """
    installed, names = installed_branch(survey["packages"]), [item["name"] for item in survey["packages"]]
    libraries = [
        item["name"]
        for item in survey["packages"]
        if re.fullmatch(r"libnvidia-compute-\d+(-server)?", item["name"])
        and branch_of(item["version"]) == installed
    ]
    if not libraries or any(name.startswith("nvidia-utils") for name in names):
        return []
    return [libraries[-1].replace("libnvidia-compute", "nvidia-utils")]


def has_driver(survey: Mapping[str, Any]) -> bool:
    """Whether the installed branch has modules, too.

    Its libraries come without them as nvidia-smi's package, or along with other programs.
    """
    installed = installed_branch(survey["packages"])
    return bool(
        installed and (is_built(survey, installed) or dkms_packages(survey) or signed_packages(survey))
    )


def has_signed(survey: Mapping[str, Any]) -> bool:
    """Whether the driver's modules are Ubuntu's signed ones, and none that DKMS builds."""
    return bool(signed_packages(survey)) and not dkms_packages(survey)


def signed_packages(survey: Mapping[str, Any]) -> list[str]:
    """The packages of signed modules that are of the installed branch; those of branches before may be there still."""
    installed = str(installed_branch(survey["packages"]))
    found = [FLAVOUR.match(item["name"]) for item in survey["packages"]]
    return [one.string for one in found if one and one[1].split("-")[0] == installed]


def dkms_packages(survey: Mapping[str, Any]) -> list[str]:
    """The packages of which DKMS builds the installed driver's modules."""
    installed = installed_branch(survey["packages"])
    found = [item["name"] for item in survey["packages"] if branch_of(item["version"]) == installed]
    return list(filter(by_dkms, found))


def by_dkms(name: str) -> bool:
    """Whether it is modules' source, which DKMS builds; nvidia-headless-no-dkms-580 is what goes without."""
    return "dkms" in name and "no-dkms" not in name


def kept(
    survey: Mapping[str, Any], cards: list[dict], options: Mapping[str, Any], tables: Mapping[str, Any]
) -> str:
    """The kind of modules of an installed driver that works, and that nobody asked to give way; "" for none.

    Whoever installed it: its packages are whole, its modules are there, or DKMS can build them, or they come signed
    with another kernel, and it is what the inventory asks for. Where it came from is not known, so that a wish for a
    source replaces it.
    """
    installed = installed_branch(survey["packages"])
    if not installed or not is_whole(survey) or options["source"] != "auto":
        return ""
    if str(options["branch"]) not in ("", str(installed)) or installed < least_branch(options, tables):
        return ""
    return kept_kind(survey, cards, options) if has_driver(survey) else ""


def kept_kind(survey: Mapping[str, Any], cards: list[dict], options: Mapping[str, Any]) -> str:
    """The kind of the installed driver's modules, where it serves every card and is the one asked for; or ""."""
    installed = installed_branch(survey["packages"])
    kinds = [
        OPEN if module["open"] else PROPRIETARY
        for module in survey["modules"]
        if branch_of(module["version"]) == installed
    ]
    sources = dkms_packages(survey) or signed_packages(survey)
    kinds = kinds or [OPEN if "open" in name else PROPRIETARY for name in sources]
    # Where both are there, the one that the kernel has taken.
    loaded = bool(survey["loaded"] and survey["loaded"]["open"])
    for kind in sorted(kinds, key=lambda kind: (kind == OPEN) != loaded) if survey["loaded"] else kinds:
        fits = all(
            kind in card["generation"]["modules"]
            and card["generation"]["branch"]["from"]
            <= installed
            <= (card["generation"]["branch"]["to"] or installed)
            for card in cards
        )
        if fits and options["modules"] in ("auto", kind):
            return kind
    return ""


# ---- what it takes ----


def fabric_name(source: str, branch: int, tables: Mapping[str, Any]) -> str:
    """The fabric manager's package: NVIDIA's repository has the branch in its name no more, or as a virtual one's."""
    plain = source == "nvidia" and branch >= tables["fabric_renamed_since"]
    return "nvidia-fabricmanager" if plain else f"nvidia-fabricmanager-{branch}"


def fabric_managers(survey: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The packages of a fabric manager that are there, whole."""
    return [item for item in survey["packages"] if FABRIC.fullmatch(item["name"]) and item["whole"]]


def installed_fabric(survey: Mapping[str, Any], branch: int) -> str:
    """The fabric manager that is there and of the driver's very release, by whichever name; "" without one."""
    driver = plain_version(installed_version(survey["packages"]))
    managers = fabric_managers(survey)
    found = [item["name"] for item in managers if plain_version(item["version"]) == driver]
    return found[-1] if found and branch_of(driver) == branch else ""


def fabric_packages(
    scheme: Mapping[str, Any], tables: Mapping[str, Any], source: str, branch: int, cards: list[dict]
) -> list[str]:
    subnet = any(card["device"] in tables["fifth_nvlink"] for card in cards)
    return [*scheme.get("fabric", []), *(scheme.get("subnet", []) if subnet else [])]


def toolkit(
    source: str,
    branch: int,
    cuda: Mapping[str, str | None],
    distribution: Mapping[str, Any],
    tables: Mapping[str, Any],
) -> str:
    """The toolkit's CUDA version, such as 12.9. Raises Refused where it cannot build for a card."""
    if source == "distribution":
        version, whose = distribution["cuda"], "the distribution's"
    else:
        known = {int(number): text for number, text in tables["cuda_of_branch"].items()}
        runs = known[max((number for number in known if number <= branch), default=min(known))]
        version, whose = (
            oldest([runs, cuda["to"]]) or runs,
            "the newest that this driver runs and every card is built for,",
        )
    if numbers(version) < numbers(cuda["from"] or "0"):
        raise Refused(
            f"nvidia_cuda_toolkit: {whose} CUDA {version} cannot build for this host's cards, which need "
            f"{cuda['from']} or newer. Set nvidia_source: nvidia, or leave nvidia_cuda_toolkit out: training "
            "needs no toolkit."
        )
    return version


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that `version` begins with, to compare: 6.12.117 of 6.12.117+deb13-amd64."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)


def newest(versions: Iterable[str | None]) -> str | None:
    return max(filter(None, versions), key=numbers, default=None)


def oldest(versions: Iterable[str | None]) -> str | None:
    return min(filter(None, versions), key=numbers, default=None)


def header_packages(survey: Mapping[str, Any], kind: str, made: bool) -> list[str]:
    """What DKMS builds against: headers of the kernel that runs, and of those that updates will bring.

    made: whether the running kernel has its module already; apt may not know the headers of an older kernel any more.
    """
    if not kind and not survey["headers"] and not made:
        raise Refused(
            f"the kernel {survey['kernel']} is not the distribution's own, and its headers are not at "
            f"/lib/modules/{survey['kernel']}/build. Install them, or boot a kernel of the distribution."
        )
    follow = headers_of(survey["kernel_packages"])
    if not follow and kind:
        follow = [f"linux-headers-{kind}"]
    exact = [f"linux-headers-{survey['kernel']}"] if kind and not survey["headers"] and not made else []
    return [*exact, *follow]


def headers_of(kernel_packages: Iterable[str]) -> list[str]:
    return [name.replace("linux-image-", "linux-headers-", 1) for name in kernel_packages]


def check_room(free: Mapping[str, int], room: Mapping[str, int]) -> None:
    for path, need in room.items():
        if free[path] < need:
            raise Refused(
                f"{path} has {free[path] / GB:.2f} GB free; the driver and the build of its modules need "
                f"{need / GB:.2f} GB. Free some (apt-get clean; old kernels: apt-get autoremove) and run again."
            )


# ---- apt ----


def sources_text(
    source: str,
    family: str,
    distribution: Mapping[str, Any],
    survey: Mapping[str, Any],
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """The text of our file of apt sources; empty where the host's own sources have what is needed.

    The host's mirrors stay in use: what is added has their addresses and keys.
    """
    repository = distribution["repository"]
    if source == "distribution":
        return more_components(distribution["components"], family, distribution["suite"], survey["sources"])
    path = repository["directories"][facts["architecture"]]
    text = more_components(repository["components"], family, distribution["suite"], survey["sources"])
    if any(f"/{path}" in uri for item in survey["sources"] for uri in item["uris"]):
        return text
    uri = f"{options['repository'].rstrip('/')}/{path}/"
    return "\n".join(filter(None, [text, stanza([uri], ["/"], [], {"Signed-By": KEY_FILE})]))


def more_components(needed: list[str], family: str, suite: str, sources: Iterable[Mapping[str, Any]]) -> str:
    """The stanzas that add the components `needed` to the distribution's own sources; empty if they are there."""
    # These may stand beside the release in one stanza; the driver is taken from the release.
    aside = re.compile(rf"{suite}-(backports|proposed)")
    sources = [
        {**item, "suites": [one for one in item["suites"] if not aside.match(one)]} for item in sources
    ]
    own = [item for item in sources if belongs(item, family, suite)]
    lacking = [part for part in needed if not any(part in item["components"] for item in own)]
    if not lacking:
        return ""
    main = [item for item in own if "main" in item["components"]]
    if not any(suite in item["suites"] for item in main):  # updates alone lack most packages
        raise Refused(
            f"none of this host's apt sources is {family}'s own {suite}, so its component {lacking[0]} cannot be "
            f"added. Add a source of it with the components {' '.join(needed)}, and run again."
        )
    return "\n".join(stanza(item["uris"], item["suites"], lacking, item["options"]) for item in main)


# Components that others do not have: a mirror of any address is known by them, a list of mirrors or a proxy.
MARKS = {"Ubuntu": {"restricted", "universe", "multiverse"}, "Debian": {"non-free-firmware"}}
PERSONAL = re.compile(r"//(private-)?ppa\.|/ppa/")
KEY_FILE = "/etc/apt/keyrings/trainyard-nvidia.asc"


def belongs(item: Mapping[str, Any], family: str, suite: str) -> bool:
    """Whether a source is the distribution's own, of its release: by suite, and by key, address or components."""
    suites = all(re.fullmatch(rf"{suite}(-updates|-security)?(/updates)?/?", one) for one in item["suites"])
    keys = f"{family.lower()}-archive-keyring" in item["options"].get("Signed-By", "")
    ends = [
        uri.rstrip("/").removesuffix("/packages").rpartition("/")[2] for uri in item["uris"]
    ]  # as Hetzner's
    # A person's archive ends as the distribution's does.
    names = all(end.startswith(family.lower()) for end in ends) and not any(
        map(PERSONAL.search, item["uris"])
    )
    parts = not MARKS[family].isdisjoint(item["components"])
    return bool(item["suites"]) and suites and (keys or names or parts)


def stanza(uris: list[str], suites: list[str], components: list[str], options: Mapping[str, str]) -> str:
    lines = ["Types: deb", f"URIs: {' '.join(uris)}", f"Suites: {' '.join(suites)}"]
    lines += [f"Components: {' '.join(components)}"] if components else []
    return "".join(f"{line}\n" for line in [*lines, *(f"{key}: {value}" for key, value in options.items())])


def repository_key(
    distribution: Mapping[str, Any], facts: Mapping[str, Any], options: Mapping[str, Any]
) -> dict:
    """{url, fingerprint, path} of the key of NVIDIA's repository."""
    found = distribution["repository"]
    base = f"{options['repository'].rstrip('/')}/{found['directories'][facts['architecture']]}"
    return {"url": f"{base}/{found['key']}", "fingerprint": found["fingerprint"], "path": KEY_FILE}


def preferences(branch: int, backported: Iterable[str] = ()) -> str:
    """apt's preferences that keep the driver on its branch; of other packages with such names, no version matches.

    backported: names of the headers whose kernels come from backports. Of what apt has installed from there it takes
    the next from there, too, and of nothing else: kernels would follow backports, and their headers would not.
    """
    # Without :any, apt would not pin the 32-bit libraries of games.
    names = " ".join(backported)
    follow = f"\nPackage: {names}\nPin: release n=*-backports\nPin-Priority: 500\n" if names else ""
    return (
        f"# Written by Trainyard's role nvidia: the driver stays on branch {branch}. nvidia_branch chooses "
        "another.\nPackage: *nvidia*:any libcuda1:any libcudadebugger1:any libnvcuvid1:any libnvoptix1:any "
        f"libxnvctrl0:any cuda-drivers*:any\nPin: version {branch}.*\nPin-Priority: 1001\n{follow}"
    )


def says(cards: list[dict], modules: str, branch: int, origin: str) -> str:
    """One line: which cards, which driver."""
    counts = Counter(card["generation"]["name"] for card in cards)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{listed}: driver {branch}, {modules} kernel modules, {origin}"


# ---- what came of it ----


def nvidia_outcome(
    survey: Mapping[str, Any], plan: Mapping[str, Any], reboot: bool, local: bool = False
) -> dict:
    """What is left to do once packages are installed, from a second look (`survey`); local: on this very machine.

    Returns {hold: packages to hold; build: whether DKMS must build; load: whether the module can be loaded now;
    running: whether the installed one is; container: whether the host is one; pending: why a reboot is needed, or "";
    reboot: whether it comes now; version: of the installed module, or ""; initramfs: whether it must be made anew;
    problems: [str]; says: [str]}.
    """
    branch, problems, told = plan["branch"], [], []
    ours = [item for item in survey["packages"] if branch_of(item["version"]) == branch]
    installed = installed_branch(survey["packages"])
    if installed != branch:
        problems.append(
            f"the driver is of branch {installed or 'none'} after the installation; planned was {branch}. What "
            "apt was offered lacks it: see `apt-cache policy libcuda1 nvidia-smi`, and set nvidia_branch or "
            "nvidia_source."
        )
    wanted = [module for module in survey["modules"] if module["open"] == (plan["modules"] == OPEN)]
    wanted = [module for module in wanted if branch_of(module["version"]) == branch]
    container, loaded = survey["container"], survey["loaded"]
    signing = bool(survey["secure_boot"]) and not plan["prebuilt"]
    rejected = signing and survey["enrolled"] is False  # which a reboot would not help
    why, runs = "", survey["runs"]
    here = local or survey.get("from_itself")  # whose end would be the playbook's
    if wanted and not container:
        module = wanted[-1]
        if loaded and (loaded["version"], loaded["open"]) != (module["version"], module["open"]):
            kinds = {True: OPEN, False: PROPRIETARY}
            why = (
                f"the kernel runs the {kinds[loaded['open']]} module {loaded['version']}, installed is the "
                f"{kinds[module['open']]} {module['version']}"
            )
        elif not loaded and (other := kernels_own(survey)):
            why = f"the kernel runs {other}, which gives way to the installed driver at a boot"
    if signing and not (loaded and not why):
        told.append(secure_boot_words())
    if why and reboot and rejected:
        told.append(
            f"{why}; not rebooted, because the key that signed the module is none that the firmware knows yet"
        )
    elif why and reboot and runs:
        told.append(
            f"{why}; not rebooted, because {', '.join(runs)} is training here: run again when it has ended"
        )
    elif why and reboot and here:
        told.append(
            f"{why}; not rebooted, because this playbook runs on it: sudo systemctl reboot, and then run site.yml again"
        )
    elif why and reboot and survey["passphrases"]:
        told.append(
            f"{why}; not rebooted, because it would wait for the passphrase of {', '.join(survey['passphrases'])} at "
            "its own keyboard: reboot it there, and then run site.yml again"
        )
    elif why and not reboot:
        told.append(
            f"{why}: reboot this host when it suits (sudo systemctl reboot), and then run site.yml again, which "
            "does what wants the driver running; or run it now with -e '{\"nvidia_reboot\": true}'"
        )
    if plan["fabric"] and "nvidia-fabricmanager.service" not in survey["units"]:
        problems.append(
            "this host has NVSwitches, but no fabric manager, without which its cards do not start CUDA. Set "
            "nvidia_branch for this host, so that the driver and the fabric manager are installed together."
        )
    managers = fabric_managers(survey)
    drivers = {
        plain_version(installed_version(survey["packages"])),
        *(module["version"] for module in wanted),
    }
    if plan["fabric"] and managers and not drivers & {plain_version(item["version"]) for item in managers}:
        name, version = managers[-1]["name"], plain_version(managers[-1]["version"])
        problems.append(
            f"the fabric manager is {version} ({name}), the driver {' and '.join(sorted(drivers))}; expected the same, "
            "for it starts with a driver of its very version alone. Run again with -e '{\"nvidia_upgrade\": true}' for "
            f"the newest of both; if they differ then, too, see `apt-cache policy {name}`, and install the version "
            "that is the driver's."
        )
    if plan["prebuilt"] and not wanted and not container:
        there = ", ".join(f"{module['version']} at {module['path']}" for module in survey["modules"])
        problems.append(
            f"the kernel {plan['kernel']} has no {plan['modules']} module of branch {branch}, although the driver's "
            f"are signed ones of Ubuntu's (found {there or 'none'}). See `dpkg -l 'linux-modules-nvidia-*'`: install "
            "the package for this kernel, or boot a kernel that has it."
        )
    if container:
        told.append(
            "a container: modules are built for the kernel that was named, and none can be loaded or rebooted into"
        )
    return {
        # Signed modules have their kernel's version and are not held: they come along with a kernel that is asked for.
        "hold": sorted(item["name"] for item in ours if not item["held"]),
        "build": not wanted and not plan["prebuilt"],
        "load": bool(wanted and not loaded and not why and not container),
        "pending": why,
        "reboot": bool(why and reboot and not (runs or rejected or here or survey["passphrases"])),
        "running": bool(loaded and not why),
        "container": container,
        "version": wanted[-1]["version"] if wanted else "",
        "initramfs": survey["initramfs_stale"],
        "problems": problems,
        "says": told,
    }


def kernels_own(survey: Mapping[str, Any]) -> str:
    """The kernel's own driver that is in the way: nouveau, or nova_core, which comes after it; "" without one."""
    if survey["nouveau"]:
        return "nouveau"
    names = [(card["driver"] or "").lower().replace("_", "") for card in survey["cards"]]
    return "nova_core" if "novacore" in names else ""  # PCI has it as NovaCore


def nvidia_held(packages: Iterable[Mapping[str, Any]], note: str | None) -> list[str]:
    """The names of the packages that the role has put on hold, of those that are held; the owner's own stay so.

    `note`: what the role noted of them; None where a release that noted nothing has held the driver's branch.
    """
    held = [item for item in packages if item["held"]]
    if note is not None:
        return sorted(item["name"] for item in held if item["name"] in note.split())
    branch = installed_branch(packages)
    return sorted(item["name"] for item in held if branch and branch_of(item["version"]) == branch)


def secure_boot_words() -> str:
    return (
        "secure boot is on, so the kernel takes the modules that DKMS builds only once their key is enrolled. If "
        "it is not yet: sudo mokutil --import /var/lib/dkms/mok.pub (on Ubuntu "
        "/var/lib/shim-signed/mok/MOK.der), choose a password, reboot, and at the console choose Enroll MOK, "
        f"Continue, Yes, and type it. Or switch secure boot off in the firmware. See {GUIDE}."
    )


def nvidia_answer(smi: Mapping[str, Any], plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    """What is wrong with nvidia-smi's answer; "" if nothing is.

    `smi`: rc, stdout_lines (bus id, version) and stderr_lines of its task; `plan` and `outcome`: what the functions of
    these names returned.
    """
    written = smi.get("stdout_lines", [])
    lines = [line for line in written if re.match(r"[0-9A-Fa-f]{8}:", line)]
    # Warnings stand below the cards, such as of an infoROM that is corrupted, by which they work.
    errors = [line for line in written if line not in lines] + smi.get("stderr_lines", [])
    cards = plan["cards"]
    if smi["rc"] == ENOENT and not (lines or errors):  # as Ansible has it, in whose msg nothing tells
        return (
            "the program nvidia-smi is not there, so that nobody can say whether the driver serves the cards. Install "
            f"the package that has it: nvidia-utils-{plan['branch']} on Ubuntu (with -server where the driver's have "
            "it), nvidia-smi or nvidia-driver-cuda on Debian; and run again."
        )
    if any("library version mismatch" in line for line in errors):
        return (
            f"the driver's libraries are of another release than the kernel module {outcome['version']} "
            f"({' '.join(errors[:2])}). Run again with -e '{{\"nvidia_upgrade\": true}}', which brings the newest of "
            "both, and reboot."
        )
    if smi["rc"] not in (0, CORRUPTED) or len(lines) < len(cards):
        return (
            f"nvidia-smi names {len(lines)} cards, {len(cards)} are on the PCI bus "
            f"({' '.join((lines + errors)[:2])}). `dmesg | grep -i -e nvrm -e xid` on the host says what "
            "became of the others. A virtual machine that has a share of a card (vGPU) wants its provider's own driver."
        )
    for line in lines:
        address, _, version = (part.strip() for part in line.partition(","))
        if version != outcome["version"]:
            return (
                f"nvidia-smi says that driver {version} runs the card at {address}, but the installed kernel module is "
                f"{outcome['version']}. Two drivers are on this host: `modinfo -n nvidia` and `command -v nvidia-smi` "
                "say where. Remove the one that apt has not installed, reboot, and run again."
            )
    return ""


# ---- all hosts together ----


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


def driver_key(plan: Mapping[str, Any], offer: Mapping[str, Any]) -> tuple[str, int, str]:
    """(source, branch, family): two hosts with the same get the same versions. NVIDIA's repository has them for all."""
    return offer["source"], offer["branch"], "" if offer["source"] == "nvidia" else plan["family"]


def driver_words(key: tuple[str, int, str]) -> str:
    source, branch, family = key
    return f"{branch} of {WORDS[source] if source == 'nvidia' else family}"


def ruled_out(key: tuple[str, int, str], plans: Mapping[str, Mapping[str, Any]]) -> str:
    """The first host that a driver does not serve, with the reason in parentheses; "" if it serves all."""
    for host, plan in plans.items():
        offers = {driver_key(plan, one): one["fault"] for one in plan["offers"]}
        fault = offers.get(key, f"which has {' or '.join(map(driver_words, offers))}")
        if fault:
            return f"{host} ({fault})"
    return ""


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
            "nvidia_answer": nvidia_answer,
            "nvidia_branches": nvidia_branches,
            "nvidia_common": nvidia_common,
            "nvidia_held": nvidia_held,
            "nvidia_outcome": nvidia_outcome,
            "nvidia_plan": nvidia_plan,
            "nvidia_versions": nvidia_versions,
        }
