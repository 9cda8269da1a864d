"""Which packages a host's driver takes: what apt has to bring, and what gives way to it.

Given: a Host (nvidia_host) and its Driver (nvidia_choice). Answers: Packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_choice import Driver, lacks_fabric
from nvidia_host import Host, Refused
from nvidia_installed import (
    FLAVOUR,
    OPEN,
    SIGNED,
    by_dkms,
    dkms_packages,
    has_signed,
    installed_branch,
    installed_fabric,
    is_built,
    of_branch,
    signed_packages,
)

KERNEL_KIND = {
    "Debian": r"-((?:cloud-|rt-)?(?:amd64|arm64))$",  # 6.1.0-50-cloud-amd64
    "Ubuntu": r"-\d+-([a-z][a-z0-9-]*)$",  # 6.8.0-49-generic
}
# What unattended upgrades pass over: the driver; and, where each kernel's modules are packages, the kernels.
DRIVERS = ["nvidia", "libnvidia", "linux-modules-nvidia", "libcuda", "libcudadebugger", "cuda-drivers"]
KERNELS = ["linux-image", "linux-headers", "linux-modules"]
GB = 10**9


@dataclass(frozen=True)
class Packages:
    """What apt is to do.

    wanted: to have; missing: those that are not there, whole; headers: what DKMS builds against; remove: modules of
    the other kind or another branch; move: whether installed packages give way to others; upgrade: installed packages
    of the branch; replaces: whether the driver that is there is another one then; prebuilt: whether the modules are
    Ubuntu's signed ones.
    """

    wanted: list[str]
    missing: list[str]
    headers: list[str]
    remove: list[str]
    move: bool
    upgrade: list[str]
    replaces: bool
    prebuilt: bool


def needed(host: Host, driver: Driver) -> Packages:
    """The packages of a host that is to have this driver. Raises Refused."""
    survey, found = host.survey, host.survey["packages"]
    prebuilt = is_prebuilt(host, driver)
    wanted = lacking(host, driver) if driver.kept else of_source(host, driver, prebuilt)
    there, whole = {item["name"] for item in found}, {item["name"] for item in found if item["whole"]}
    missing = [package for package in wanted if package not in whole]
    upgrade = [item["name"] for item in of_branch(found, driver.branch)]
    rivals, others = set(), set()
    if not driver.kept:
        rivals = there & all_modules(host, driver) - set(wanted)
        others = set(dkms_packages(survey)) - set(wanted)  # of another branch, too: both would be built
    # Modules for another kernel may need a newer driver of the branch, whose packages are held, and the fabric manager
    # wants one of its very version.
    installed, lacks_signed = installed_branch(found), any(name.startswith(SIGNED) for name in missing)
    another = installed and (installed != driver.branch or lacks_signed or lacks_fabric(host))
    move = bool(another or rivals)
    headers: list[str] = []
    if not prebuilt and any(map(by_dkms, [*wanted, *there])):
        # What is upgraded, or gives way to packages that are yet to come, is built anew.
        lasts = not host.options["upgrade"] and whole.issuperset(filter(by_dkms, wanted))
        headers = header_packages(host, made=lasts and is_built(survey, driver.branch, driver.modules))
    return Packages(
        wanted=wanted,
        missing=missing,
        headers=headers,
        remove=sorted(rivals | others),
        move=move,
        upgrade=upgrade,
        replaces=move or bool(host.options["upgrade"] and upgrade),
        prebuilt=prebuilt,
    )


def is_prebuilt(host: Host, driver: Driver) -> bool:
    """Whether the driver's modules are, or are to be, the distribution's signed ones.

    Its signature lets them in where the firmware asks for one. What runs stays as it is.
    """
    survey, signed = host.survey, has_signed(host.survey)
    if driver.kept:
        return signed
    asks = survey["secure_boot"] and not (driver.there and survey["loaded"])
    has = kernel_kind(survey["kernel"], host.family) and "prebuilt" in host.scheme(driver.source)
    return bool(has and (asks or (driver.there and signed)))


def kernel_kind(kernel: str, family: str) -> str:
    """The kind of a kernel release, such as amd64 or generic; empty for one of the host's own making."""
    found = re.search(KERNEL_KIND.get(family, "$^"), kernel)
    return found[1] if found else ""


# ---- a driver of a source's ----


def of_source(host: Host, driver: Driver, prebuilt: bool) -> list[str]:
    """The names of the packages that a source's driver has on this host."""
    survey, scheme = host.survey, host.scheme(driver.source)
    kind = kernel_kind(survey["kernel"], host.family)
    words = {
        "branch": driver.branch,
        "open": "-open" if driver.modules == OPEN else "",
        "kernel": survey["kernel"],
        "kind": followed_kind(survey["kernel_packages"], kind) if prebuilt else kind,
        "cuda": driver.toolkit.replace(".", "-"),
        "fabric": installed_fabric(survey, driver.branch) or fabric_name(host, driver),
    }
    there = {item["name"] for item in survey["packages"]}
    has = {
        use: there.issuperset(text.format(**words) for text in scheme[use]) for use in ("compute", "desktop")
    }
    screen = host.options["driver"] == "desktop" or (host.options["driver"] == "auto" and survey["desktop"])
    names = [*(scheme["prebuilt"] if prebuilt else scheme["modules"][driver.modules])]
    names += scheme["desktop" if screen or (has["desktop"] and not has["compute"]) else "compute"]
    names += scheme.get("fabric", []) if host.fabric else []
    names += scheme.get("subnet", []) if host.fifth_nvlink else []
    names += scheme["toolkit"] if driver.toolkit else []
    return [text.format(**words) for text in names]


def followed_kind(kernel_packages: Iterable[str], kind: str) -> str:
    """The kind of the package that brings the newest kernel: generic, or generic-hwe-24.04 where that is there."""
    found = [name.removeprefix("linux-image-") for name in kernel_packages]
    return max((name for name in found if name.startswith(kind)), key=len, default=kind)


def fabric_name(host: Host, driver: Driver) -> str:
    """The fabric manager's package: NVIDIA's repository has the branch in its name no more, or as a virtual one's."""
    plain = driver.source == "nvidia" and driver.branch >= host.tables["fabric_renamed_since"]
    return "nvidia-fabricmanager" if plain else f"nvidia-fabricmanager-{driver.branch}"


def all_modules(host: Host, driver: Driver) -> set[str]:
    """The packages from which any source's modules of the branch are built, of either kind."""
    return {
        text.format(branch=driver.branch)
        for source in host.tables["packages"]
        for names in host.scheme(source)["modules"].values()
        for text in names
    }


# ---- a driver that is kept ----


def lacking(host: Host, driver: Driver) -> list[str]:
    """What a driver that is left as it is lacks all the same: signed modules for this kernel, nvidia-smi."""
    survey = host.survey
    signed = has_signed(survey) and not is_built(survey, driver.branch)
    return [*(signed_of_kernel(survey, driver.modules) if signed else []), *lacking_tools(survey)]


def signed_of_kernel(survey: Mapping[str, Any], kind: str) -> list[str]:
    """The package of signed modules for the running kernel, of the flavour that the owner has chosen."""
    flavours = {FLAVOUR.match(name)[1] for name in signed_packages(survey)}
    chosen = sorted(one for one in flavours if one.endswith("-open") == (kind == OPEN))
    return [f"{SIGNED}{flavour}-{survey['kernel']}" for flavour in chosen]


def lacking_tools(survey: Mapping[str, Any]) -> list[str]:
    """The package with nvidia-smi for Ubuntu's installed driver, where it is not there.

    `ubuntu-drivers install --gpgpu` leaves it out.
    """
    names = [item["name"] for item in survey["packages"]]
    driver = of_branch(survey["packages"], installed_branch(survey["packages"]))
    libraries = [
        item["name"] for item in driver if re.fullmatch(r"libnvidia-compute-\d+(-server)?", item["name"])
    ]
    if not libraries or any(name.startswith("nvidia-utils") for name in names):
        return []
    return [libraries[-1].replace("libnvidia-compute", "nvidia-utils")]


# ---- what a build takes ----


def header_packages(host: Host, made: bool) -> list[str]:
    """What DKMS builds against: headers of the kernel that runs, and of those that updates will bring.

    made: whether the running kernel has its module already; apt may not know the headers of an older kernel any more.
    """
    survey, kind = host.survey, kernel_kind(host.survey["kernel"], host.family)
    lacks = not survey["headers"] and not made
    if lacks and not kind:
        raise Refused(
            f"the kernel {survey['kernel']} is not the distribution's own, and its headers are not at "
            f"/lib/modules/{survey['kernel']}/build. Install them, or boot a kernel of the distribution."
        )
    exact = [f"linux-headers-{survey['kernel']}"] if lacks else []
    follow = headers_of(survey["kernel_packages"]) or ([f"linux-headers-{kind}"] if kind else [])
    return [*exact, *follow]


def headers_of(kernel_packages: Iterable[str]) -> list[str]:
    return [name.replace("linux-image-", "linux-headers-", 1) for name in kernel_packages]


def check_room(host: Host) -> None:
    """Raise Refused where the driver and the build of its modules have no room."""
    for path, need in host.tables["room"].items():
        free = host.survey["free_bytes"][path]
        if free < need:
            raise Refused(
                f"{path} has {free / GB:.2f} GB free; the driver and the build of its modules need "
                f"{need / GB:.2f} GB. Free some (apt-get clean; old kernels: apt-get autoremove) and run again."
            )


# ---- from then on ----


def passed_over(host: Host, prebuilt: bool) -> list[str]:
    """What unattended upgrades are to pass over, as beginnings of names."""
    if not prebuilt:
        return [*DRIVERS]
    kind = kernel_kind(host.survey["kernel"], host.family)
    return [*DRIVERS, *KERNELS, *([f"linux-{kind}"] if kind else [])]
