"""Hosts as module nvidia_survey tells of them, and their plans, for the tests of what is made of that."""

from pathlib import Path

import yaml

from plugins.filter.nvidia_outcome import nvidia_outcome
from plugins.filter.nvidia_plan import nvidia_plan

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {}
for file in sorted((ROOT / "roles/nvidia/vars/main").glob("*.yml")):
    VARIABLES |= yaml.safe_load(file.read_text())
TABLES = {name: VARIABLES[f"_nvidia_{name}"] for name in VARIABLES["_nvidia_tables"]}
DEFAULTS = yaml.safe_load((ROOT / "roles/nvidia/defaults/main.yml").read_text())
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEBIAN_12 = {"distribution": "Debian", "distribution_version": "12.15", "architecture": "x86_64"}
DEBIAN_13 = {**DEBIAN_12, "distribution_version": "13.1"}
UBUNTU_22 = {**DEBIAN_12, "distribution": "Ubuntu", "distribution_version": "22.04"}
UBUNTU_24 = {**UBUNTU_22, "distribution_version": "24.04"}
SUITES = {"12.15": "bookworm", "13.1": "trixie", "22.04": "jammy", "24.04": "noble"}
KERNELS = {"Debian": "6.1.0-50-amd64", "Ubuntu": "6.8.0-49-generic"}


def look(facts, *devices, **more):
    """What nvidia_survey says of a fresh host with cards of these ids."""
    suite, family = SUITES[facts["distribution_version"]], facts["distribution"]
    stock = {
        "Debian": ["main", "non-free-firmware"],
        "Ubuntu": ["main", "restricted", "universe", "multiverse"],
    }
    mirror = {
        "uris": [f"http://mirror.example/{family.lower()}"],
        "suites": [suite, f"{suite}-updates"],
        "components": stock[family],
        "options": {"Signed-By": KEYRING},
    }
    cards = [
        {"address": f"0000:{number:02x}:00.0", "device": device, "class": "0300", "driver": None}
        for number, device in enumerate(devices, 1)
    ]
    fresh = {
        **dict.fromkeys(("nouveau", "container", "headers", "runfile", "desktop", "initramfs_stale"), False),
        **{
            name: []
            for name in ("modules", "packages", "kernel_packages", "kernels_backported", "runs", "units")
        },
        **dict.fromkeys(("loaded", "secure_boot", "enrolled", "own_sources")),
        "nvswitches": 0,
        "device_nodes": 0,
        "prime": "",
        "passphrases": [],
        "kernel": KERNELS[family],
        "sources": [mirror],
        "free_bytes": {"/usr": 10**11, "/var/lib/dkms": 10**11, "/boot": 10**11},
    }
    return {**fresh, "cards": cards, **more}


def options(**given):
    names = ("required", "source", "modules", "branch", "driver", "upgrade", "cuda_toolkit", "repository")
    return {**{name: DEFAULTS[f"nvidia_{name}"] for name in names}, "kernel": "", "rdma": False, **given}


def plan_for(facts, *devices, survey=None, **given):
    found = nvidia_plan(look(facts, *devices, **(survey or {})), facts, options(**given), TABLES)
    assert found["problems"] == [], found["problems"]
    assert found["skip"] == ""
    return found


def refused(facts, *devices, survey=None, **given):
    """The one problem that stands in the way."""
    found = nvidia_plan(look(facts, *devices, **(survey or {})), facts, options(**given), TABLES)
    (problem,) = found["problems"]
    assert "packages" not in found
    return problem


def package(name, version, source="nvidia-graphics-drivers", held=False):
    return {"name": name, "version": version, "source": source, "held": held, "whole": True}


# Ubuntu's own packages of branch 580 that are not the server ones: what its "additional drivers" installs.
STOCK = ("libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580")
UBUNTUS = "580.95.05-0ubuntu0.24.04.1"
SIGNED_KERNEL = "linux-modules-nvidia-580-open-generic-hwe-24.04"


def stock(*more, is_open, version=UBUNTUS, **survey):
    """A host with that driver, its modules built or signed for the running kernel."""
    return {
        "packages": [
            package(name, "6.8.0-49.49" if name.startswith("linux-") else version) for name in (*STOCK, *more)
        ],
        "modules": [{"path": "nvidia.ko", "version": "580.95.05", "open": is_open}],
        **survey,
    }


SIGNED = stock("nvidia-driver-580-open", SIGNED_KERNEL, is_open=True, secure_boot=True)
BY_DKMS = stock("nvidia-driver-580", "nvidia-dkms-580", is_open=False)
WHOLE_535 = {
    "packages": [
        package(name, "535.261.03-1")
        for name in ("libcuda1", "nvidia-smi", "nvidia-persistenced", "nvidia-kernel-dkms")
    ],
    "modules": [{"path": "nvidia.ko", "version": "535.261.03", "open": False}],
}
WHOLE_580 = {
    "packages": [
        package(name, "580.95.05-1")
        for name in ("libcuda1", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms")
    ],
    "modules": [{"path": "nvidia.ko", "version": "580.95.05", "open": True}],
}
INSTALLED = {
    "packages": [
        package("libcuda1", "535.261.03-1"),
        package("nvidia-kernel-dkms", "535.261.03-1", held=True),
        package("nvidia-cuda-toolkit", "11.8.89~11.8.0-5", "nvidia-cuda-toolkit"),
    ],
    "modules": [{"path": "/lib/modules/x/nvidia-current.ko", "version": "535.261.03", "open": False}],
}


def outcome(reboot=False, plan=None, **survey):
    there = look(DEBIAN_12, "2204", **{**INSTALLED, **survey})
    return nvidia_outcome(there, plan or plan_for(DEBIAN_12, "2204"), reboot)
