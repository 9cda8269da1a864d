"""What came of the role nvidia on a host: what is left to do, what is wrong, and whether nvidia-smi agrees.

Pure functions, of what the filter nvidia_plan returned and of a second look by the module nvidia_survey.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from errno import ENOENT
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from nvidia_host import GUIDE
from nvidia_installed import (
    FABRIC_UNIT,
    built_modules,
    fabric_managers,
    installed_branch,
    installed_version,
    kind_of,
    of_branch,
    plain_version,
)

CORRUPTED = 14  # nvidia-smi's status where a card's infoROM is


def nvidia_outcome(
    survey: Mapping[str, Any], plan: Mapping[str, Any], reboot: bool, local: bool = False
) -> dict:
    """What is left to do once packages are installed, from a second look (`survey`); local: on this very machine.

    Returns {hold: packages to hold; build: whether DKMS must build; load: whether the module can be loaded now;
    running: whether the installed one is; container: whether the host is one; pending: why a reboot is needed, or "";
    reboot: whether it comes now; version: of the installed module, or ""; initramfs: whether it must be made anew;
    problems: [str]; says: [str]}.
    """
    branch, container, loaded = plan["branch"], survey["container"], survey["loaded"]
    modules = [one for one in built_modules(survey, branch) if kind_of(one) == plan["modules"]]
    signing = bool(survey["secure_boot"]) and not plan["prebuilt"]
    why = "" if container or not modules else awaits_reboot(survey, modules[-1])
    hindered = no_reboot(survey, signing, local)
    problems = [
        another_branch(survey, branch),
        *fabric_problems(survey, plan, modules),
        "" if container or modules else no_signed_module(survey, plan),
    ]
    told = [
        secure_boot_words() if signing and (why or not loaded) else "",
        about_reboot(why, reboot, hindered),
        in_container() if container else "",
    ]
    return {
        # Signed modules have their kernel's version and are not held: they come along with a kernel that is asked for.
        "hold": sorted(item["name"] for item in of_branch(survey["packages"], branch) if not item["held"]),
        "build": not modules and not plan["prebuilt"],
        "load": bool(modules and not loaded and not why and not container),
        "pending": why,
        "reboot": bool(why and reboot and not hindered),
        "running": bool(loaded and not why),
        "container": container,
        "version": modules[-1]["version"] if modules else "",
        "initramfs": survey["initramfs_stale"],
        "problems": [one for one in problems if one],
        "says": [one for one in told if one],
    }


# ---- a reboot ----


def awaits_reboot(survey: Mapping[str, Any], module: Mapping[str, Any]) -> str:
    """Why the installed `module` runs only after a reboot; "" if it runs, or can be loaded."""
    loaded = survey["loaded"]
    if loaded and (loaded["version"], loaded["open"]) != (module["version"], module["open"]):
        return (
            f"the kernel runs the {kind_of(loaded)} module {loaded['version']}, installed is the "
            f"{kind_of(module)} {module['version']}"
        )
    if not loaded and (other := kernels_own(survey)):
        return f"the kernel runs {other}, which gives way to the installed driver at a boot"
    return ""


def kernels_own(survey: Mapping[str, Any]) -> str:
    """The kernel's own driver that is in the way: nouveau, or nova_core, which comes after it; "" without one."""
    if survey["nouveau"]:
        return "nouveau"
    names = [(card["driver"] or "").lower().replace("_", "") for card in survey["cards"]]
    return "nova_core" if "novacore" in names else ""  # PCI has it as NovaCore


def no_reboot(survey: Mapping[str, Any], signing: bool, local: bool) -> str:
    """Why no reboot may come, although it is allowed; "" if it may. signing: whether a key of the host's signs."""
    if signing and survey["enrolled"] is False:  # which a reboot would not help
        return "the key that signed the module is none that the firmware knows yet"
    if survey["runs"]:
        return f"{', '.join(survey['runs'])} is training here: run again when it has ended"
    if local or survey.get("from_itself"):  # whose end would be the playbook's
        return "this playbook runs on it: sudo systemctl reboot, and then run site.yml again"
    if survey["passphrases"]:
        return (
            f"it would wait for the passphrase of {', '.join(survey['passphrases'])} at its own keyboard: reboot it "
            "there, and then run site.yml again"
        )
    return ""


def about_reboot(why: str, reboot: bool, hindered: str) -> str:
    """What the user is told of a reboot that is needed and does not come by itself."""
    if not why:
        return ""
    if not reboot:
        return (
            f"{why}: reboot this host when it suits (sudo systemctl reboot), and then run site.yml again, which "
            "does what wants the driver running; or run it now with -e '{\"nvidia_reboot\": true}'"
        )
    return f"{why}; not rebooted, because {hindered}" if hindered else ""


def secure_boot_words() -> str:
    return (
        "secure boot is on, so the kernel takes the modules that DKMS builds only once their key is enrolled. If "
        "it is not yet: sudo mokutil --import /var/lib/dkms/mok.pub (on Ubuntu "
        "/var/lib/shim-signed/mok/MOK.der), choose a password, reboot, and at the console choose Enroll MOK, "
        f"Continue, Yes, and type it. Or switch secure boot off in the firmware. See {GUIDE}."
    )


def in_container() -> str:
    return "a container: modules are built for the kernel that was named, and none can be loaded or rebooted into"


# ---- what is wrong ----


def another_branch(survey: Mapping[str, Any], branch: int) -> str:
    installed = installed_branch(survey["packages"])
    if installed == branch:
        return ""
    return (
        f"the driver is of branch {installed or 'none'} after the installation; planned was {branch}. What "
        "apt was offered lacks it: see `apt-cache policy libcuda1 nvidia-smi`, and set nvidia_branch or "
        "nvidia_source."
    )


def fabric_problems(
    survey: Mapping[str, Any], plan: Mapping[str, Any], modules: list[Mapping[str, Any]]
) -> list[str]:
    """What is wrong with the fabric manager of a host that needs one; modules: the installed driver's."""
    if not plan["fabric"]:
        return []
    problems = []
    if FABRIC_UNIT not in survey["units"]:
        problems.append(
            "this host has NVSwitches, but no fabric manager, without which its cards do not start CUDA. Set "
            "nvidia_branch for this host, so that the driver and the fabric manager are installed together."
        )
    managers = fabric_managers(survey)
    drivers = {
        plain_version(installed_version(survey["packages"])),
        *(module["version"] for module in modules),
    }
    if managers and not drivers & {plain_version(item["version"]) for item in managers}:
        name, version = managers[-1]["name"], plain_version(managers[-1]["version"])
        problems.append(
            f"the fabric manager is {version} ({name}), the driver {' and '.join(sorted(drivers))}; expected the same, "
            "for it starts with a driver of its very version alone. Run again with -e '{\"nvidia_upgrade\": true}' for "
            f"the newest of both; if they differ then, too, see `apt-cache policy {name}`, and install the version "
            "that is the driver's."
        )
    return problems


def no_signed_module(survey: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """What is said of a kernel that has no module of the planned ones, where no other than signed ones may come."""
    if not plan["prebuilt"]:
        return ""
    there = ", ".join(f"{module['version']} at {module['path']}" for module in survey["modules"])
    return (
        f"the kernel {plan['kernel']} has no {plan['modules']} module of branch {plan['branch']}, although the "
        f"driver's are signed ones of Ubuntu's (found {there or 'none'}). See `dpkg -l 'linux-modules-nvidia-*'`: "
        "install the package for this kernel, or boot a kernel that has it."
    )


# ---- whether nvidia-smi agrees ----


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


# ---- what is on hold ----


def nvidia_held(packages: Iterable[Mapping[str, Any]], note: str | None) -> list[str]:
    """The names of the packages that the role has put on hold, of those that are held; the owner's own stay so.

    `note`: what the role noted of them; None where a release that noted nothing has held the driver's branch.
    """
    held = [item for item in packages if item["held"]]
    if note is not None:
        return sorted(item["name"] for item in held if item["name"] in note.split())
    branch = installed_branch(packages)
    return sorted(item["name"] for item in of_branch(held, branch)) if branch else []


class FilterModule:
    def filters(self):
        return {
            "nvidia_answer": nvidia_answer,
            "nvidia_held": nvidia_held,
            "nvidia_outcome": nvidia_outcome,
        }
