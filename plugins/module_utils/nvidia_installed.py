"""The NVIDIA driver that is on a host already: its version and branch, its modules, and whether it is whole.

Given: the answers of the module nvidia_survey, or the packages among them. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

OPEN, PROPRIETARY = "open", "proprietary"
# Packages whose version is the driver's; one of them is in every installation.
# From 590 on those of NVIDIA's repository for Ubuntu have no branch in their names.
DRIVER = re.compile(
    r"libcuda1|libnvidia-compute(-\d+(-server)?)?|nvidia-smi|nvidia-utils(-\d+(-server)?)?"
    r"|libnvidia-tesla(-\d+)?-cuda1"  # Debian's for servers, which may stand beside the others
)
SIGNED = "linux-modules-nvidia-"  # modules that Ubuntu has built and signed, a package for each kernel
FLAVOUR = re.compile(rf"{SIGNED}(\d+(?:-server)?(?:-open)?)-")
FABRIC = re.compile(r"nvidia-fabricmanager(-\d+)?")
FABRIC_UNIT = "nvidia-fabricmanager.service"


def has_driver(survey: Mapping[str, Any]) -> bool:
    """Whether the installed branch has modules, too.

    Its libraries come without them as nvidia-smi's package, or along with other programs.
    """
    installed = installed_branch(survey["packages"])
    return bool(
        installed and (is_built(survey, installed) or dkms_packages(survey) or signed_packages(survey))
    )


def is_whole(survey: Mapping[str, Any]) -> bool:
    """Whether no package of the driver's is half installed; a toolkit's, say, or a container's, is none."""
    installed, signed = installed_branch(survey["packages"]), signed_packages(survey)
    return all(
        item["whole"]
        for item in survey["packages"]
        if branch_of(item["version"]) == installed or item["name"] in signed
    )


# ---- versions ----


def installed_branch(packages: Iterable[Mapping[str, Any]]) -> int | None:
    """The branch of the installed driver; None without one."""
    return branch_of(installed_version(packages))


def installed_version(packages: Iterable[Mapping[str, Any]]) -> str:
    """The version of the installed driver's packages; empty without one.

    The newest: of a branch that Ubuntu has given up, empty packages stay beside the ones that they brought.
    """
    found = [item["version"] for item in packages if DRIVER.fullmatch(item["name"])]
    return max(found, key=lambda version: numbers(version.rpartition(":")[2]), default="")


def of_branch(packages: Iterable[Mapping[str, Any]], branch: int | None) -> list[Mapping[str, Any]]:
    """Those of the packages that are a driver's of this branch."""
    return [item for item in packages if branch and branch_of(item["version"]) == branch]


def branch_of(version: str) -> int | None:
    """580 of 580.95.05-0ubuntu1, or of 1:580.95.05."""
    found = re.match(r"(?:\d+:)?(\d{3})\.", version)
    return int(found[1]) if found else None


def plain_version(version: str) -> str:
    """580.95.05 of 580.95.05-0ubuntu1, or of 1:580.95.05."""
    return re.match(r"[\d.]*", version.rpartition(":")[2])[0]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that `version` begins with, to compare: 6.12.117 of 6.12.117+deb13-amd64."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)


# ---- modules ----


def is_built(survey: Mapping[str, Any], branch: int | None, kind: str = "") -> bool:
    """Whether the running kernel has a module of the branch; of that kind, if one is given."""
    return any(kind in ("", kind_of(module)) for module in built_modules(survey, branch))


def built_modules(survey: Mapping[str, Any], branch: int | None) -> list[Mapping[str, Any]]:
    """The branch's modules for the running kernel."""
    return [module for module in survey["modules"] if branch_of(module["version"]) == branch]


def kind_of(module: Mapping[str, Any]) -> str:
    return OPEN if module["open"] else PROPRIETARY


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
    found = of_branch(survey["packages"], installed_branch(survey["packages"]))
    return [item["name"] for item in found if by_dkms(item["name"])]


def by_dkms(name: str) -> bool:
    """Whether it is modules' source, which DKMS builds; nvidia-headless-no-dkms-580 is what goes without."""
    return "dkms" in name and "no-dkms" not in name


# ---- what stands beside it ----


def fabric_managers(survey: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The packages of a fabric manager that are there, whole."""
    return [item for item in survey["packages"] if FABRIC.fullmatch(item["name"]) and item["whole"]]


def installed_fabric(survey: Mapping[str, Any], branch: int) -> str:
    """The fabric manager that is there and of the driver's very release, by whichever name; "" without one."""
    driver = plain_version(installed_version(survey["packages"]))
    managers = fabric_managers(survey)
    found = [item["name"] for item in managers if plain_version(item["version"]) == driver]
    return found[-1] if found and branch_of(driver) == branch else ""
