"""Which card gets which driver: the tables over real PCI ids, the plan that follows, and what is said of bad input."""

import base64
import copy
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import jinja2
import pytest
import yaml

from plugins.filter.nvidia_plan import (
    generation_of,
    nvidia_answer,
    nvidia_branches,
    nvidia_common,
    nvidia_held,
    nvidia_outcome,
    nvidia_plan,
    nvidia_versions,
)

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {}
for file in sorted((ROOT / "roles/nvidia/vars/main").glob("*.yml")):
    VARIABLES |= yaml.safe_load(file.read_text())
TABLES = {name: VARIABLES[f"_nvidia_{name}"] for name in VARIABLES["_nvidia_tables"]}
DEFAULTS = yaml.safe_load((ROOT / "roles/nvidia/defaults/main.yml").read_text())
PIN = "{{ _nvidia_preferences_file }}"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Ids and names as pci.ids of 2026-10-24 has them; the first branch that serves them by Debian's lists of 535 and 550.
CARDS = [
    ("1380", "GTX 750 Ti", "Maxwell", "proprietary", 470),
    ("13c2", "GTX 970", "Maxwell", "proprietary", 470),
    ("17c2", "GTX TITAN X", "Maxwell", "proprietary", 470),
    ("17fd", "Tesla M40", "Maxwell", "proprietary", 470),
    ("15f8", "Tesla P100 PCIe 16GB", "Pascal", "proprietary", 470),
    ("1b06", "GTX 1080 Ti", "Pascal", "proprietary", 470),
    ("1b38", "Tesla P40", "Pascal", "proprietary", 470),
    ("1c82", "GTX 1050 Ti", "Pascal", "proprietary", 470),
    ("1d10", "MX150", "Pascal", "proprietary", 470),
    ("1d81", "TITAN V", "Volta", "proprietary", 470),
    ("1db6", "Tesla V100 PCIe 32GB", "Volta", "proprietary", 470),
    ("1dba", "Quadro GV100", "Volta", "proprietary", 470),
    ("1e04", "RTX 2080 Ti", "Turing", "both", 470),
    ("1eb8", "Tesla T4", "Turing", "both", 470),
    ("2182", "GTX 1660 Ti", "Turing", "both", 470),
    ("1ff9", "Quadro T1000 Mobile", "Turing", "both", 470),
    ("20b0", "A100 SXM4 40GB", "Ampere", "both", 470),
    ("20b5", "A100 PCIe 80GB", "Ampere", "both", 470),
    ("2204", "RTX 3090", "Ampere", "both", 470),
    ("2235", "A40", "Ampere", "both", 470),
    ("2482", "RTX 3070 Ti", "Ampere", "both", 470),
    ("2520", "RTX 3060 Mobile", "Ampere", "both", 470),
    ("25b0", "RTX A1000", "Ampere", "both", 550),
    ("2684", "RTX 4090", "Ada", "both", 525),
    ("2705", "RTX 4070 Ti SUPER", "Ada", "both", 550),
    ("2757", "RTX 4090 Laptop GPU", "Ada", "both", 525),
    ("2820", "RTX 4070 Mobile", "Ada", "both", 525),
    ("2860", "RTX 4070 Mobile", "Ada", "both", 525),
    ("26b9", "L40S", "Ada", "both", 525),
    ("27b8", "L4", "Ada", "both", 525),
    ("2330", "H100 SXM5 80GB", "Hopper", "both", 525),
    ("2331", "H100 PCIe", "Hopper", "both", 525),
    ("2335", "H200 SXM 141GB", "Hopper", "both", 550),
    ("233b", "H200 NVL", "Hopper", "both", 570),
    ("2901", "B200", "Blackwell", "open", 570),
    ("2b85", "RTX 5090", "Blackwell", "open", 570),
    ("2bb1", "RTX PRO 6000 Blackwell Workstation", "Blackwell", "open", 570),
    ("2c02", "RTX 5080", "Blackwell", "open", 570),
    ("2c05", "RTX 5070 Ti", "Blackwell", "open", 570),
    ("2c58", "RTX 5090 Mobile", "Blackwell", "open", 570),
    ("2d04", "RTX 5060 Ti", "Blackwell", "open", 570),
    ("2f04", "RTX 5070", "Blackwell", "open", 570),
    ("2e12", "GB10", "Blackwell", "open", 580),
    ("3182", "B300 SXM6", "Blackwell", "open", 580),
]
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


# ---- the tables ----


@pytest.mark.parametrize(("device", "name", "generation", "modules", "branch"), CARDS)
def test_a_card_is_known_by_its_id(device, name, generation, modules, branch):
    row = generation_of(device, TABLES)
    assert row["name"] == generation
    assert set(row["modules"]) == ({"open", "proprietary"} if modules == "both" else {modules})
    assert row["branch"]["from"] == branch
    assert row["branch"]["to"] == (580 if generation in ("Maxwell", "Pascal", "Volta") else None)


@pytest.mark.parametrize("device", ["128b", "0fc6", "1180"])
def test_kepler_and_before_are_left_out_by_name(device):
    found = nvidia_plan(look(DEBIAN_12, device), DEBIAN_12, options(), TABLES)
    assert "no driver is installed" in found["skip"]
    assert f"10de:{device}" in found["notes"][0]
    both = nvidia_plan(look(DEBIAN_12, device, "2204"), DEBIAN_12, options(), TABLES)
    assert [card["device"] for card in both["cards"]] == ["2204"]


def test_no_id_is_in_two_rows():
    rows = [(row, ends.split("-")) for row in TABLES["generations"] for ends in row["devices"]]
    spans = sorted((int(first, 16), int(last, 16)) for _, (first, last) in rows)
    assert all(first <= last for first, last in spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    assert max(int(span.split("-")[1], 16) for span in TABLES["too_old"]) < spans[0][0]


def test_later_cards_are_of_generations_that_their_branch_serves():
    for branch, devices in TABLES["later_cards"].items():
        for device in devices:
            assert generation_of(device, TABLES)["branch"]["from"] == branch


# ---- each release's packages ----


@pytest.mark.parametrize(
    ("facts", "device", "source", "branch", "packages"),
    [
        (
            DEBIAN_12,
            "2204",
            "distribution",
            535,
            ["nvidia-kernel-dkms", "libcuda1", "nvidia-smi", "nvidia-persistenced"],
        ),
        (
            DEBIAN_13,
            "1b06",
            "distribution",
            550,
            ["nvidia-kernel-dkms", "libcuda1", "nvidia-smi", "nvidia-persistenced"],
        ),
        (
            DEBIAN_12,
            "2705",
            "nvidia",
            580,
            ["nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced"],
        ),
        (
            DEBIAN_13,
            "2c05",
            "nvidia",
            590,
            ["nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced"],
        ),
        (
            UBUNTU_22,
            "1b06",
            "distribution",
            580,
            ["nvidia-dkms-580-server", "nvidia-headless-no-dkms-580-server", "nvidia-utils-580-server"],
        ),
        (
            UBUNTU_24,
            "2c05",
            "distribution",
            580,
            [
                "nvidia-dkms-580-server-open",
                "nvidia-headless-no-dkms-580-server-open",
                "nvidia-utils-580-server",
            ],
        ),
    ],
)
def test_each_release_has_its_packages(facts, device, source, branch, packages):
    plan = plan_for(facts, device)
    assert (plan["source"], plan["branch"], plan["packages"]) == (source, branch, packages)
    kernel, kind = (
        KERNELS[facts["distribution"]],
        {"Debian": "amd64", "Ubuntu": "generic"}[facts["distribution"]],
    )
    assert plan["headers"] == [f"linux-headers-{kernel}", f"linux-headers-{kind}"]
    assert plan["missing"] == packages
    assert not plan["move"]


def test_nvidias_own_packages_on_ubuntu():
    plan = plan_for(UBUNTU_24, "2204", source="nvidia")
    assert plan["packages"][0] == "nvidia-dkms-580-open"
    assert "libnvidia-compute-580" in plan["packages"]
    assert plan["key"]["url"].endswith("/ubuntu2404/x86_64/3bf863cc.pub")
    arm = plan_for({**UBUNTU_24, "architecture": "aarch64"}, "2204", source="nvidia")
    assert "/ubuntu2404/sbsa/" in arm["sources"]


def test_a_host_with_a_screen_gets_the_desktops_packages():
    assert "nvidia-driver" in plan_for(DEBIAN_12, "2204", survey={"desktop": True})["packages"]
    assert (
        "nvidia-driver"
        not in plan_for(DEBIAN_12, "2204", survey={"desktop": True}, driver="compute")["packages"]
    )
    assert "nvidia-driver-580-server-open" in plan_for(UBUNTU_24, "2204", driver="desktop")["packages"]


def test_headers_follow_the_kernels_that_are_installed():
    kernels = {"kernel_packages": ["linux-image-generic-hwe-24.04"], "headers": True}
    assert plan_for(UBUNTU_24, "2204", survey=kernels)["headers"] == ["linux-headers-generic-hwe-24.04"]
    cloud = {"kernel": "6.1.0-50-cloud-amd64"}
    assert plan_for(DEBIAN_12, "2204", survey=cloud)["headers"][1] == "linux-headers-cloud-amd64"


def test_a_kernel_of_ones_own_needs_its_headers():
    assert "its headers are not at" in refused(DEBIAN_12, "2204", survey={"kernel": "6.9.1-mine"})
    assert plan_for(DEBIAN_12, "2204", survey={"kernel": "6.9.1-mine", "headers": True})["headers"] == []


def test_with_secure_boot_ubuntu_has_signed_modules():
    plan = plan_for(UBUNTU_24, "2204", survey={"secure_boot": True})
    assert plan["prebuilt"]
    assert plan["packages"][:2] == [
        "linux-modules-nvidia-580-server-open-6.8.0-49-generic",
        "linux-modules-nvidia-580-server-open-generic",
    ]
    assert plan["headers"] == []
    newer = {"secure_boot": True, "kernel_packages": ["linux-image-generic", "linux-image-generic-hwe-24.04"]}
    packages = plan_for(UBUNTU_24, "2204", survey=newer)["packages"]
    assert packages[1] == "linux-modules-nvidia-580-server-open-generic-hwe-24.04"
    assert not plan_for(DEBIAN_12, "2204", survey={"secure_boot": True})["prebuilt"]


@pytest.mark.parametrize("secure_boot", [True, False])
@pytest.mark.parametrize("loaded", [{"version": "580.95.05", "open": True}, None])
def test_signed_modules_stay_at_the_next_run(secure_boot, loaded):
    """What goes without DKMS has it in its name; modules that DKMS built would take the place of the signed ones."""
    names = plan_for(UBUNTU_24, "2204", survey={"secure_boot": True})["packages"]
    assert "nvidia-headless-no-dkms-580-server-open" in names
    there = {
        "packages": [
            package(name, "6.8.0-49.49" if name.startswith("linux-") else UBUNTUS) for name in names
        ],
        "modules": [{"path": "nvidia.ko", "version": "580.95.05", "open": True}],
    }
    again = plan_for(UBUNTU_24, "2204", survey={**there, "secure_boot": secure_boot, "loaded": loaded})
    assert (again["packages"], again["missing"], again["headers"]) == (names, [], [])
    assert again["prebuilt"] and not again["move"]


def test_nvswitches_need_the_fabric_manager():
    eight = ["2330"] * 8
    plan = plan_for(UBUNTU_22, *eight, survey={"nvswitches": 4})
    assert plan["fabric"] and "nvidia-fabricmanager-580" in plan["packages"]
    assert plan["says"].startswith("8 Hopper: driver 580, open kernel modules")
    assert plan_for(DEBIAN_12, *eight, survey={"nvswitches": 4})["source"] == "nvidia"
    b200 = plan_for(UBUNTU_24, *["2901"] * 8)
    # There nvidia-fabricmanager-580 is no package, so that dpkg would never have it.
    assert b200["source"] == "nvidia" and {"nvidia-fabricmanager", "nvlsm"} <= set(b200["packages"])
    older = plan_for(UBUNTU_24, *["2901"] * 8, branch="570")
    assert older["source"] == "nvidia" and "nvidia-fabricmanager-570" in older["packages"]
    assert not plan_for(UBUNTU_22, "2330")["fabric"]


def test_a_fabric_manager_of_the_drivers_release_stays_by_whichever_name():
    """Ubuntu's own came beside NVIDIA's driver, is held, and another is not installed in its place without a move."""
    names = [name for name in plan_for(UBUNTU_24, *["2901"] * 8)["packages"] if "fabric" not in name]
    there = {"packages": [package(name, "580.95.05-1ubuntu1") for name in names]}
    there["packages"].append(package("nvidia-fabricmanager-580", UBUNTUS, held=True))
    there["modules"] = [{"path": "nvidia.ko", "version": "580.95.05", "open": True}]
    there["units"] = ["nvidia-fabricmanager.service"]
    plan = plan_for(UBUNTU_24, *["2901"] * 8, survey=there)
    assert (plan["source"], plan["missing"], plan["move"]) == ("nvidia", [], False)
    there["packages"][-1]["version"] = UBUNTUS.replace("95.05", "82.07")  # with which it does not start
    assert plan_for(UBUNTU_24, *["2901"] * 8, survey=there)["missing"] == ["nvidia-fabricmanager"]


def test_peermem_where_the_host_is_in_the_group_rdma():
    assert plan_for(UBUNTU_22, "2330", rdma=True)["peermem"]
    assert not plan_for(UBUNTU_22, "2330")["peermem"]


# ---- open or proprietary ----


def test_open_modules_are_preferred_once_nvidia_calls_them_ready():
    assert plan_for(UBUNTU_24, "2204")["modules"] == "open"
    assert plan_for(DEBIAN_12, "2204")["modules"] == "proprietary"  # branch 535
    assert plan_for(DEBIAN_13, "2204", modules="open")["packages"][0] == "nvidia-open-kernel-dkms"
    assert (
        plan_for(DEBIAN_12, "2204", modules="open")["source"] == "nvidia"
    )  # Debian 12's own do not fit its driver


def test_several_generations_on_a_host_get_what_serves_all():
    assert plan_for(UBUNTU_24, "2204", "1b06")["modules"] == "proprietary"
    assert plan_for(UBUNTU_24, "2204", "2c05")["modules"] == "open"
    assert plan_for(DEBIAN_13, "2204", "2684", "2b85")["source"] == "nvidia"


def test_what_nothing_serves_is_refused_with_the_cards():
    problem = refused(UBUNTU_24, "2c05", "1b06")
    assert "Blackwell card at 0000:01:00.0 (PCI id 10de:2c05) works with open kernel modules alone" in problem
    assert "Pascal card at 0000:02:00.0 (PCI id 10de:1b06) with proprietary ones alone" in problem


@pytest.mark.parametrize(
    ("facts", "devices", "given", "words"),
    [
        (
            UBUNTU_24,
            ["2c05"],
            {"modules": "proprietary"},
            "Blackwell card at 0000:01:00.0 (PCI id 10de:2c05) works with open",
        ),
        (
            UBUNTU_24,
            ["1b06"],
            {"modules": "open"},
            "Pascal card at 0000:01:00.0 (PCI id 10de:1b06) works with proprietary",
        ),
        (
            UBUNTU_24,
            ["1db6"],
            {"branch": "590"},
            "Volta card at 0000:01:00.0 (PCI id 10de:1db6) is served up to 580",
        ),
        (UBUNTU_24, ["2b85"], {"branch": "550"}, "needs 570 or newer"),
        (DEBIAN_12, ["2b85"], {"source": "distribution"}, "the distribution, branch 535: the Blackwell card"),
        (DEBIAN_12, ["2204"], {"source": "distribution", "branch": "580"}, "it has 535 alone"),
        (DEBIAN_12, ["2204"], {"source": "distribution", "modules": "open"}, "cannot be installed together"),
        (
            DEBIAN_12,
            ["2204"],
            {"branch": "470", "source": "nvidia", "modules": "open"},
            "branch 470 has none",
        ),
        (UBUNTU_24, ["2204"], {"branch": "590", "source": "nvidia"}, "have other names"),
        ({**DEBIAN_12, "architecture": "aarch64"}, ["2c05"], {}, "there is none for aarch64"),
        (DEBIAN_12, ["2330"], {"source": "distribution", "switches": 4}, "no fabric manager"),
        (DEBIAN_13, ["2204"], {"runfile": True}, "sudo nvidia-uninstall"),
        ({**DEBIAN_12, "distribution_version": "11.9"}, ["2204"], {}, "found Debian 11; Trainyard knows"),
    ],
)
def test_contradictions_are_refused_with_their_reason(facts, devices, given, words):
    given = dict(given)
    survey = {"nvswitches": given.pop("switches", 0), "runfile": given.pop("runfile", False)}
    known = {**facts, "distribution_version": "12.15"} if facts["distribution_version"] == "11.9" else facts
    found = nvidia_plan(look(known, *devices, **survey), facts, options(**given), TABLES)
    assert len(found["problems"]) == 1
    assert words in found["problems"][0]


def test_an_unknown_card_is_refused_until_the_inventory_says_both():
    problem = refused(UBUNTU_24, "3f01")
    assert "10de:3f01" in problem and "nvidia_modules" in problem and "nvidia_branch" in problem
    assert "10de:3f01" in refused(UBUNTU_24, "3f01", modules="open")
    assert "10de:3f01" in refused(UBUNTU_24, "3f01", branch="595")
    plan = plan_for(UBUNTU_24, "3f01", modules="open", branch="595")
    assert plan["packages"][0] == "nvidia-dkms-595-server-open"


# ---- hosts without a card, containers ----


def test_a_host_without_a_card_is_passed_over_or_refused():
    assert "no driver is installed" in nvidia_plan(look(DEBIAN_12), DEBIAN_12, options(), TABLES)["skip"]
    assert "nvidia_required is true" in refused(DEBIAN_12, required=True)


@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace-gpu-vfio-pci", "pci-stub", "pciback"])
def test_a_card_of_a_virtual_machine_is_not_ours(driver):
    survey = look(DEBIAN_12, "2204")
    survey["cards"][0]["driver"] = driver
    found = nvidia_plan(survey, DEBIAN_12, options(), TABLES)
    assert found["skip"] and driver in found["notes"][0]


def test_the_screen_of_an_old_card_that_loses_nouveau_is_told():
    survey = look(DEBIAN_12, "128b", "2204", nouveau=True)
    for card in survey["cards"]:
        card["driver"] = "nouveau"
    found = nvidia_plan(survey, DEBIAN_12, options(), TABLES)
    assert len(found["notes"]) == 2 and "nouveau, which drives the card at 0000:01:00.0" in found["notes"][1]
    alone = {**survey, "cards": survey["cards"][:1]}  # which stays as it is
    assert len(nvidia_plan(alone, DEBIAN_12, options(), TABLES)["notes"]) == 1


def test_a_container_is_left_to_its_machine():
    inside = look(DEBIAN_12, "3f01", container=True)
    assert "a container" in nvidia_plan(inside, DEBIAN_12, options(), TABLES)["skip"]
    assert "no /dev/nvidia0" in refused(DEBIAN_12, "2204", survey={"container": True}, required=True)
    given = {"container": True, "device_nodes": 1}
    assert nvidia_plan(look(DEBIAN_12, "2204", **given), DEBIAN_12, options(required=True), TABLES)["skip"]
    assert plan_for(DEBIAN_12, "2204", survey={"container": True}, kernel="6.1.0-50-amd64")["packages"]


def test_no_room_is_refused_before_anything_is_installed():
    problem = refused(
        DEBIAN_12, "2204", survey={"free_bytes": {"/usr": 10**9, "/var/lib/dkms": 10**11, "/boot": 10**11}}
    )
    assert problem.startswith("/usr has 1.00 GB free")
    there = [package(name, "535.261.03-1") for name in plan_for(DEBIAN_12, "2204")["packages"]]
    full = {"free_bytes": {"/usr": 0, "/var/lib/dkms": 0, "/boot": 0}, "packages": there}
    assert plan_for(DEBIAN_12, "2204", survey=full)["missing"] == []


# ---- apt ----


def test_debians_mirror_gets_the_components_that_it_lacks():
    assert plan_for(DEBIAN_12, "2204")["sources"] == (
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
        f"Components: contrib non-free\nSigned-By: {KEYRING}\n"
    )
    assert plan_for(UBUNTU_24, "2204")["sources"] == ""


def test_a_mirror_is_known_by_the_end_of_its_path():
    uri = "https://mirror.hetzner.com/ubuntu/packages"
    mirror = {"uris": [uri], "suites": ["noble"], "components": ["main", "restricted"], "options": {}}
    assert f"URIs: {uri}" in plan_for(UBUNTU_24, "2204", survey={"sources": [mirror]})["sources"]
    other = {**mirror, "uris": ["https://packages.microsoft.com/ubuntu/24.04/prod"], "components": ["main"]}
    assert "is Ubuntu's own noble" in refused(UBUNTU_24, "2204", survey={"sources": [other]})


@pytest.mark.parametrize(
    "uri", ["mirror://mirrors.example/mirrors.txt", "https://nexus.example/repository/apt-proxy/"]
)
def test_a_mirror_of_any_address_is_known_by_its_components(uri):
    ubuntu = {"uris": [uri], "suites": ["noble"], "components": ["main", "universe"], "options": {}}
    assert (
        f"URIs: {uri}\nSuites: noble\nComponents: restricted multiverse"
        in (plan_for(UBUNTU_24, "2204", survey={"sources": [ubuntu]})["sources"])
    )
    debian = {**ubuntu, "suites": ["bookworm"], "components": ["main", "non-free-firmware"]}
    assert (
        "Components: contrib non-free\n"
        in (plan_for(DEBIAN_12, "2204", survey={"sources": [debian]})["sources"])
    )
    multimedia = {**debian, "components": ["main", "non-free"]}  # as somebody else's has them
    assert "is Debian's own bookworm" in refused(DEBIAN_12, "2204", survey={"sources": [multimedia]})


@pytest.mark.parametrize(
    "uri",
    [
        "https://ppa.example/graphics-drivers/ppa/ubuntu/",
        "https://private-ppa.launchpadcontent.net/example/builds/ubuntu",
    ],
)
def test_a_persons_archive_is_not_the_distributions(uri):
    own = {**look(UBUNTU_24)["sources"][0], "components": ["main", "universe"]}
    person = {"uris": [uri], "suites": ["noble"], "components": ["main"], "options": {}}
    added = plan_for(UBUNTU_24, "2204", survey={"sources": [own, person]})["sources"]
    assert "Components: restricted multiverse" in added and "ppa" not in added
    assert "is Ubuntu's own noble" in refused(UBUNTU_24, "2204", survey={"sources": [person]})


def test_other_peoples_sources_are_no_place_for_components():
    survey = look(DEBIAN_12, "2204")
    other = {
        "uris": ["https://apt.example/tools"],
        "suites": ["bookworm"],
        "components": ["main"],
        "options": {"Signed-By": "/etc/apt/keyrings/tools.asc"},
    }
    assert (
        "apt.example"
        not in plan_for(DEBIAN_12, "2204", survey={"sources": [*survey["sources"], other]})["sources"]
    )
    problem = refused(DEBIAN_12, "2204", survey={"sources": [other]})
    assert "none of this host's apt sources is Debian's own bookworm" in problem


def test_a_component_on_a_line_of_its_own_counts():
    line = {"uris": ["http://mirror.example/debian"], "suites": ["bookworm"], "options": {}}
    lines = [
        {**line, "components": ["main"]},
        {**line, "components": ["contrib", "non-free", "non-free-firmware"]},
    ]
    assert plan_for(DEBIAN_12, "2204", survey={"sources": lines})["sources"] == ""


CLOUD = {"uris": ["mirror+file:///etc/apt/mirrors/debian.list"], "components": ["main"], "options": {}}
BACKPORTS = {**CLOUD, "suites": ["bookworm-backports"]}
SECURITY = {**CLOUD, "uris": ["http://mirror.example/debian-security"], "suites": ["bookworm-security"]}


def test_backports_beside_the_release_in_one_stanza_are_passed_over():
    """As Debian's cloud images have them, and many an Ubuntu."""
    debian = {**CLOUD, "suites": ["bookworm", "bookworm-updates", *BACKPORTS["suites"]]}
    assert plan_for(DEBIAN_12, "2204", survey={"sources": [debian, SECURITY]})["sources"] == (
        "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm bookworm-updates\n"
        "Components: contrib non-free non-free-firmware\n\n"
        "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\n"
        "Components: contrib non-free non-free-firmware\n"
    )
    suites = ["noble", "noble-updates", "noble-security", "noble-backports", "noble-proposed"]
    ubuntu = {**look(UBUNTU_24)["sources"][0], "suites": suites}
    assert plan_for(UBUNTU_24, "2204", survey={"sources": [ubuntu]})["sources"] == ""
    bare = {**ubuntu, "components": ["main", "universe"]}
    added = plan_for(UBUNTU_24, "2204", survey={"sources": [bare]})["sources"]
    assert "Suites: noble noble-updates noble-security\nComponents: restricted multiverse\n" in added


@pytest.mark.parametrize("sources", [[BACKPORTS], [SECURITY], [BACKPORTS, SECURITY]])
def test_what_comes_after_the_release_is_no_place_for_components_without_it(sources):
    problem = refused(DEBIAN_12, "2204", survey={"sources": sources})
    assert "none of this host's apt sources is Debian's own bookworm" in problem


def test_nvidias_repository_comes_with_its_key_unless_the_host_has_it():
    plan = plan_for(DEBIAN_13, "2c05")
    assert (
        "URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/\nSuites: /\n"
        in plan["sources"]
    )
    assert "Components: contrib\n" in plan["sources"]  # of Debian's own
    assert plan["key"]["fingerprint"] == "02182E60104FCDC26EAE1B8597A5D4CB8793F200"
    mirror = plan_for(DEBIAN_13, "2c05", repository="https://mirror.example/cuda/")
    assert "URIs: https://mirror.example/cuda/debian13/x86_64/\n" in mirror["sources"]
    there = {
        "uris": ["https://mirror.example/x/debian13/x86_64/"],
        "suites": ["/"],
        "components": [],
        "options": {},
    }
    sources = [*look(DEBIAN_13)["sources"], there]
    own = plan_for(DEBIAN_13, "2c05", survey={"sources": sources})
    assert own["key"] is None and "Suites: /" not in own["sources"]


def test_headers_follow_a_kernel_to_backports():
    """Else the next kernel comes without them, and so without the driver."""
    kernels = {"kernel_packages": ["linux-image-amd64"], "kernel": "6.12.38+deb12-amd64"}
    written = plan_for(DEBIAN_12, "2204", survey={**kernels, "kernels_backported": ["linux-image-amd64"]})
    pin = "\nPackage: linux-headers-amd64\nPin: release n=*-backports\nPin-Priority: 500\n"
    assert written["preferences"].endswith(pin) and "linux-headers-amd64" in written["headers"]
    assert "backports" not in plan_for(DEBIAN_12, "2204", survey=kernels)["preferences"]


def test_the_pin_names_the_branch():
    written = plan_for(UBUNTU_24, "2204")["preferences"]
    assert "Pin: version 580.*\nPin-Priority: 1001\n" in written
    (names,) = re.findall("^Package: (.*)$", written, re.MULTILINE)
    assert all(name.endswith(":any") for name in names.split())  # 32-bit ones, too


# ---- a driver that is there already ----


def test_a_driver_that_serves_the_cards_stays():
    there = {
        "packages": [
            package(name, "570.133.20-0ubuntu1")
            for name in ("libnvidia-compute-570", "nvidia-dkms-570-open", "nvidia-utils-570")
        ],
        "modules": [{"path": "nvidia.ko", "version": "570.133.20", "open": True}],
    }
    plan = plan_for(UBUNTU_24, "2c05", survey=there)
    assert (plan["source"], plan["branch"], plan["packages"], plan["move"]) == ("installed", 570, [], False)
    assert plan["says"].endswith("already installed")
    assert plan["upgrade"] == ["libnvidia-compute-570", "nvidia-dkms-570-open", "nvidia-utils-570"]
    asked = plan_for(UBUNTU_24, "2c05", survey=there, branch="580")
    assert asked["move"] and asked["packages"][0] == "nvidia-dkms-580-server-open"


def test_a_driver_that_does_not_serve_them_gives_way():
    old = {"packages": [package("libcuda1", "535.261.03-1"), package("nvidia-kernel-dkms", "535.261.03-1")]}
    plan = plan_for(DEBIAN_12, "2c05", survey=old)
    assert plan["move"] and plan["branch"] == 580 and plan["remove"] == ["nvidia-kernel-dkms"]
    new = {"packages": [package("libcuda1", "550.163.01-2"), package("nvidia-kernel-dkms", "550.163.01-2")]}
    kinds = plan_for(DEBIAN_13, "2204", survey=new, modules="open")
    assert kinds["move"] and kinds["branch"] == 550 and kinds["remove"] == ["nvidia-kernel-dkms"]


def test_a_driver_whose_modules_did_not_compile_gives_way_to_another_source():
    broken = {**package("nvidia-kernel-dkms", "550.163.01-2"), "whole": False}
    there = {"packages": [package("libcuda1", "550.163.01-2"), broken]}
    assert plan_for(DEBIAN_13, "2204", survey=there)["missing"][0] == "nvidia-kernel-dkms"
    other = plan_for(DEBIAN_13, "2204", survey=there, source="nvidia")
    assert other["move"] and other["remove"] == ["nvidia-kernel-dkms"]


def test_nvidias_repository_for_debian_13_began_with_a_later_branch():
    """Its 580 would not be found there, and apt would take the newest of all instead."""
    plan = plan_for(DEBIAN_13, "2c05", cuda_toolkit=True)
    assert "Pin: version 590.*" in plan["preferences"] and "cuda-toolkit-13-1" in plan["packages"]
    asked = refused(DEBIAN_13, "2204", branch="580")
    assert "NVIDIA's repository, branch 580: for Debian 13 it has 590 and later alone" in asked
    new = {"kernel": "6.12.117+deb13-amd64"}
    old_card = refused(DEBIAN_13, "1b06", survey=new)
    assert (
        "NVIDIA's repository, branch 590: the Pascal card" in old_card and "is served up to 580" in old_card
    )
    assert "install the driver yourself and add --skip-tags nvidia" in old_card
    installed = refused(DEBIAN_13, "2204", survey=WHOLE_535, torch="torch==2.13.0")
    assert "a driver of 535 is installed. Set nvidia_branch: 590" in installed


@pytest.mark.parametrize("given", [{"branch": "580"}, {}])
def test_nvidias_580_that_is_on_a_debian_13_already_stays_where_it_is_asked_for(given):
    """From its directory for Debian 12, or a mirror: what docs/gpus.md has one set for all hosts was refused there."""
    there = {**WHOLE_580, "kernel": "6.12.117+deb13-amd64"}
    plan = plan_for(DEBIAN_13, "2204", survey=there, torch="torch==2.13.0", source="nvidia", **given)
    assert (plan["branch"], plan["missing"], plan["move"], plan["sources"]) == (580, [], False, "")
    there["packages"] = there["packages"][:2] + there["packages"][3:]  # what is not there would not be found
    assert "590 and later alone" in refused(DEBIAN_13, "2204", survey=there, source="nvidia", branch="580")


def test_a_branch_to_set_is_one_that_the_host_can_have():
    old = {"packages": [package("libnvidia-compute-470", UBUNTUS.replace("580", "470"))]}
    old["modules"] = [{"path": "nvidia.ko", "version": "470.95.05", "open": False}]
    assert "Set nvidia_branch: 580" in refused(UBUNTU_24, "1b80", survey=old, torch="torch==2.13.0+cu126")


def test_debians_own_driver_from_backports_is_not_taken_for_nvidias():
    names = ("libcuda1", "nvidia-smi", "nvidia-persistenced", "nvidia-kernel-dkms")
    there = {"packages": [package(name, "580.142-1~bpo12+1") for name in names]}
    plan = plan_for(DEBIAN_12, "2204", survey=there, torch="torch==2.13.0")
    assert (plan["source"], plan["branch"], plan["packages"], plan["sources"]) == ("installed", 580, [], "")


def test_a_driver_that_cannot_be_built_for_the_running_kernel_gives_way():
    names = ("libcuda1", "nvidia-smi", "nvidia-persistenced", "nvidia-kernel-dkms")
    there = {"packages": [package(name, "550.163.01-2") for name in names], "kernel": "6.12.117+deb13-amd64"}
    plan = plan_for(DEBIAN_13, "2204", survey=there)
    assert (plan["source"], plan["branch"], plan["move"]) == ("nvidia", 590, True)
    assert plan["remove"] == ["nvidia-kernel-dkms"]
    assert plan["says"].endswith("from NVIDIA's repository, in place of 550.163.01-2")
    built = {**there, "modules": [{"path": "nvidia.ko", "version": "550.163.01", "open": False}]}
    assert plan_for(DEBIAN_13, "2204", survey=built)["source"] == "installed"  # by whichever patch


@pytest.mark.parametrize(
    ("version", "more"),
    [
        ("580.95.05-1", ["nvidia-driver-cuda", "nvidia-persistenced"]),  # of NVIDIA's directory for Debian 12
        ("580.142-1~bpo13+1", ["nvidia-smi"]),
        ("550.163.01-2", ["nvidia-smi", "nvidia-driver"]),  # by whichever patch
    ],
)
def test_a_driver_that_no_source_has_gets_no_packages_of_another(version, more):
    """Their names are those of Debian's own, whose nvidia-smi, say, would take the libraries of 550 along."""
    there = {"packages": [package(name, version) for name in ("libcuda1", "nvidia-kernel-dkms", *more)]}
    module = {"path": "nvidia.ko", "version": version.partition("-")[0], "open": False}
    there = {**there, "modules": [module], "kernel": "6.12.117+deb13-amd64"}
    plan = plan_for(DEBIAN_13, "1b06", survey=there, torch="torch==2.13.0+cu126" if version > "58" else "")
    assert (plan["missing"], plan["move"], plan["sources"], plan["stays"]) == ([], False, "", True)


@pytest.mark.parametrize(
    ("dkms", "compute", "version"),
    [
        ("nvidia-dkms-565", "libnvidia-compute-565", "565.57.01-0ubuntu1"),
        ("nvidia-dkms-open", "libnvidia-compute", "615.71.09-1ubuntu1"),
    ],
)
def test_modules_of_another_branch_go_with_it_and_it_is_told(dkms, compute, version):
    there = {
        "packages": [package(compute, version), package(dkms, version), package("nvidia-fs-dkms", "2.26")]
    }
    plan = plan_for(UBUNTU_24, "2204", survey=there, branch="580")
    assert plan["move"] and plan["remove"] == [dkms]
    assert plan["says"].endswith(f"from the distribution, in place of {version}")
    assert "in place of" not in plan_for(UBUNTU_24, "2204", survey=SIGNED)["says"]


def test_a_kernel_that_is_too_new_for_the_distributions_driver():
    new = {"kernel": "6.12.117+deb13-amd64"}
    assert plan_for(DEBIAN_13, "2204", survey=new)["source"] == "nvidia"
    assert plan_for(DEBIAN_13, "2204", survey={"kernel": "6.12.94+deb13-amd64"})["source"] == "distribution"
    assert plan_for(DEBIAN_13, "2204", survey={"kernel": "6.12.97+deb13-amd64"})["source"] == "nvidia"
    problem = refused(DEBIAN_13, "2204", survey=new, source="distribution")
    assert "cannot be built for kernels from 6.12.97 on; this host runs 6.12.117+deb13-amd64" in problem


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


def test_ubuntus_own_signed_driver_stays():
    plan = plan_for(UBUNTU_24, "2684", survey=SIGNED)
    assert (plan["source"], plan["branch"], plan["modules"]) == ("installed", 580, "open")
    assert plan["stays"] and plan["prebuilt"] and not plan["move"]
    assert (plan["packages"], plan["remove"], plan["headers"], plan["sources"]) == ([], [], [], "")
    there = look(UBUNTU_24, "2684", **SIGNED)
    found = nvidia_outcome(there, plan, False)
    assert (found["build"], found["load"], found["says"], found["problems"]) == (False, True, [], [])
    assert SIGNED_KERNEL not in found["hold"]


def test_the_empty_packages_of_a_branch_that_ubuntu_has_given_up_are_not_the_driver():
    """They bring 580's, and keep the version that they were emptied with."""
    there = copy.deepcopy(SIGNED)
    names = ("libnvidia-compute-570", "nvidia-driver-570-open", "nvidia-utils-570", "nvidia-dkms-570-open")
    there["packages"][:0] = [package(name, "570.211.01-0ubuntu1.24.04.1") for name in names]
    plan = plan_for(UBUNTU_24, "2684", survey=there, torch="torch==2.13.0")
    assert (plan["source"], plan["branch"], plan["packages"], plan["move"]) == ("installed", 580, [], False)
    assert plan["prebuilt"] and "Pin: version 580.*" in plan["preferences"]


@pytest.mark.parametrize(
    ("facts", "names", "version"),
    [
        (UBUNTU_24, ("libnvidia-compute-535", "nvidia-utils-535"), "535.288.01-0ubuntu0.24.04.1"),
        (DEBIAN_12, ("libcuda1", "nvidia-smi"), "535.261.03-1"),
    ],
)
def test_libraries_without_modules_are_no_driver(facts, names, version):
    """As `apt install nvidia-utils-535` leaves them, which a shell advises for nvidia-smi."""
    there = {"packages": [package(name, version) for name in names], "nouveau": True}
    plan = plan_for(facts, "2684", survey=there, torch="torch==2.13.0")
    assert plan["branch"] == 580 and plan["move"] and plan["missing"]
    grid = {**there, "loaded": {"version": "550.127.05", "open": False}}  # a provider's own, beside them
    assert "driver 550.127.05, which is of no package" in refused(facts, "2684", survey=grid)


@pytest.mark.parametrize("is_open", [True, False])
def test_of_both_kinds_of_modules_the_loaded_one_counts(is_open):
    """As they stay when somebody goes over from one to the other: no boot would bring the other one."""
    there = copy.deepcopy(SIGNED)
    there["packages"].append(package(SIGNED_KERNEL.replace("-open", ""), "6.8.0-49.49"))
    there["modules"] = [{"path": "nvidia.ko", "version": "580.95.05", "open": kind} for kind in (True, False)]
    there["loaded"] = {"version": "580.95.05", "open": is_open}
    plan = plan_for(UBUNTU_24, "2684", survey=there)
    assert plan["modules"] == ("open" if is_open else "proprietary") and plan["packages"] == []
    assert nvidia_outcome(look(UBUNTU_24, "2684", **there), plan, False)["running"]


def test_what_is_broken_beside_a_driver_does_not_cost_it_its_place():
    there = copy.deepcopy(SIGNED)
    there["packages"].append({**package("nvidia-container-toolkit", "1.17.8-1"), "whole": False})
    assert plan_for(UBUNTU_24, "2684", survey=there)["source"] == "installed"
    there["packages"][-2]["whole"] = False  # but its modules do
    assert there["packages"][-2]["name"] == SIGNED_KERNEL
    assert plan_for(UBUNTU_24, "2684", survey=there)["source"] == "distribution"


def test_a_whole_driver_needs_no_sources():
    """Nor the key of NVIDIA's, which a host that had its packages from a local repository may not reach."""
    plan = plan_for(DEBIAN_12, "2482", survey=WHOLE_580)
    assert (plan["source"], plan["missing"], plan["sources"], plan["key"]) == ("nvidia", [], "", None)
    stable = {**look(DEBIAN_12)["sources"][0], "suites": ["stable"]}  # where contrib could not be added
    assert plan_for(DEBIAN_12, "2482", survey={**WHOLE_535, "sources": [stable]})["sources"] == ""
    own = plan_for(DEBIAN_12, "2482", survey={**WHOLE_580, "own_sources": True})  # as the role wrote them
    assert own["sources"] and own["key"]
    assert plan_for(DEBIAN_12, "2482", survey=WHOLE_580, upgrade=True)["key"]
    assert plan_for(DEBIAN_12, "2482", survey=WHOLE_580, cuda_toolkit=True)["key"]


@pytest.mark.parametrize(
    "names",
    [
        ["nvidia-dkms-580-server"],
        [f"linux-modules-nvidia-580-server-{kernel}" for kernel in ("6.8.0-49-generic", "generic")],
    ],
)
def test_ubuntus_server_driver_with_its_screens_packages_is_whole_without_a_screen(names):
    """As `apt install nvidia-driver-580-server` leaves it on a machine that nobody logs in to by a screen."""
    more = ["nvidia-driver-580-server", "nvidia-utils-580-server", "libnvidia-compute-580-server"]
    there = {"packages": [package(name, UBUNTUS) for name in [*names, *more]]}
    there["modules"] = [{"path": "nvidia.ko", "version": "580.95.05", "open": False}]
    plan = plan_for(UBUNTU_24, "2482", survey=there)
    assert (plan["source"], plan["missing"], plan["move"], plan["stays"]) == ("distribution", [], False, True)


def test_no_headers_for_a_kernel_that_has_its_module():
    """apt may not know them any more, or never did."""
    gone = {**BY_DKMS, "headers": False, "kernel_packages": ["linux-image-generic"]}
    assert plan_for(UBUNTU_24, "2482", survey=gone)["headers"] == ["linux-headers-generic"]
    exact = "linux-headers-6.8.0-49-generic"
    signed = {
        **SIGNED,
        "kernel_packages": ["linux-image-generic"],
        "secure_boot": False,
    }  # which DKMS' replace
    assert plan_for(UBUNTU_24, "2482", survey=signed, source="nvidia")["headers"][0] == exact
    own = {**gone, "kernel": "6.12.8-x64v3-xanmod1"}
    assert plan_for(UBUNTU_24, "2482", survey=own)["headers"] == ["linux-headers-generic"]
    assert plan_for(UBUNTU_24, "2482", survey=gone, upgrade=True)["headers"][0] == exact
    assert plan_for(UBUNTU_24, "2482", survey=gone, modules="open")["headers"][0] == exact
    assert plan_for(UBUNTU_24, "2482", survey={**gone, "modules": []})["headers"][0] == exact


LATER = {  # NVIDIA's repository for Ubuntu, with names that the role does not know how to install
    "packages": [package(name, "615.71.09-1ubuntu1") for name in ("libnvidia-compute", "nvidia-dkms-open")],
    "modules": [{"path": "nvidia.ko", "version": "615.71.09", "open": True}],
}


def test_an_unknown_cards_driver_of_a_later_branch_stays_once_the_inventory_says_both():
    told = plan_for(UBUNTU_24, "3f01", survey=LATER, modules="open", branch="615", torch="torch==2.13.0")
    assert (told["source"], told["branch"], told["packages"], told["stays"]) == ("installed", 615, [], True)
    assert plan_for(UBUNTU_24, "2204", survey=LATER, branch="615")["source"] == "installed"
    assert "from 590 on its packages" in refused(UBUNTU_24, "2204", survey=LATER, branch="620")
    old = {"packages": [package("libcuda1", "535.261.03-1")], "modules": INSTALLED["modules"]}
    # What does not run torch's build is not kept for want of another.
    given = {"survey": old, "branch": "535", "torch": "torch==2.13.0"}
    assert "is for CUDA 13.0, which 535 does not run" in refused(DEBIAN_12, "2204", **given)


@pytest.mark.parametrize(("branch", "facts"), [("470", DEBIAN_12), ("535", DEBIAN_13)])
def test_debians_drivers_for_servers_stay(branch, facts):
    """They have names of their own, and may stand beside the others, which would be installed over them."""
    version = f"{branch}.256.02-2"
    names = (f"libnvidia-tesla-{branch}-cuda1", f"nvidia-tesla-{branch}-kernel-dkms")
    there = {
        "packages": [package(name, version) for name in names],
        "modules": [{"path": f"nvidia-tesla-{branch}.ko", "version": f"{branch}.256.02", "open": False}],
        "loaded": {"version": f"{branch}.256.02", "open": False},
    }
    plan = plan_for(facts, "1db6", survey=there)
    assert (plan["source"], plan["branch"], plan["packages"]) == ("installed", int(branch), [])
    if facts is DEBIAN_12:
        assert plan_for(facts, "1db6", survey=there, branch="580")["remove"] == [names[1]]
        torch = refused(facts, "1db6", survey=there, torch="torch==2.13.0+cu126")
        assert "a driver of 470 is installed" in torch


def test_a_driver_without_nvidia_smi_gets_it():
    """As `ubuntu-drivers install --gpgpu` leaves it; of the driver nothing else changes."""
    names = ("libnvidia-compute-570-server", "libnvidia-compute-570-server:i386", "nvidia-dkms-570-server")
    there = {"packages": [package(name, "570.172.08-0ubuntu0.24.04.1") for name in names]}
    plan = plan_for(UBUNTU_24, "2204", survey=there)
    assert (plan["source"], plan["packages"], plan["move"]) == (
        "installed",
        ["nvidia-utils-570-server"],
        False,
    )
    there["packages"].append(package("nvidia-utils-570-server", "570.172.08-0ubuntu0.24.04.1"))
    plan = plan_for(UBUNTU_24, "2204", survey=there)
    assert (plan["packages"], plan["move"]) == ([], False)


def test_ubuntus_own_proprietary_driver_stays_where_it_serves():
    plan = plan_for(UBUNTU_24, "2482", survey=BY_DKMS)
    assert (plan["source"], plan["modules"]) == ("installed", "proprietary")
    assert (plan["packages"], plan["remove"], plan["move"], plan["sources"]) == ([], [], False, "")
    assert plan["headers"][-1] == "linux-headers-generic"  # for the kernels that updates bring
    blackwell = plan_for(UBUNTU_24, "2c05", survey=BY_DKMS)
    assert (blackwell["source"], blackwell["modules"]) == ("distribution", "open")
    assert blackwell["move"] and blackwell["remove"] == ["nvidia-dkms-580"]


@pytest.mark.parametrize(
    ("wish", "source", "modules"),
    [
        ({"branch": "580"}, "installed", "proprietary"),  # which it is
        ({"modules": "proprietary"}, "installed", "proprietary"),
        ({"modules": "open"}, "distribution", "open"),
        ({"source": "distribution"}, "distribution", "open"),
        ({"source": "nvidia"}, "nvidia", "open"),
        ({"branch": "595"}, "distribution", "open"),
    ],
)
def test_what_the_inventory_asks_for_replaces_a_driver_that_is_another(wish, source, modules):
    plan = plan_for(UBUNTU_24, "2482", survey=BY_DKMS, **wish)
    assert (plan["source"], plan["modules"]) == (source, modules)
    assert plan["move"] is (source != "installed")


@pytest.mark.parametrize(
    ("version", "source"),
    [
        ("580.95.05-0ubuntu1", "nvidia"),
        ("580.95.05-1ubuntu1", "nvidia"),
        ("580.95.05-1", "nvidia"),
        (UBUNTUS, "installed"),
        ("580.95.05-0ubuntu1.24.04.1", "installed"),
        ("580.95.05-0ubuntu0~gpu24.04.1", "installed"),  # somebody's own archive
    ],
)
def test_nvidias_packages_on_ubuntu_are_known_by_their_version(version, source):
    there = stock("nvidia-dkms-580-open", is_open=True, version=version)
    assert plan_for(UBUNTU_24, "2482", survey=there)["source"] == source


def test_a_driver_of_the_roles_own_sources_keeps_its_kind_of_modules():
    names = ["nvidia-dkms-580-server", "nvidia-headless-no-dkms-580-server", "nvidia-utils-580-server"]
    there = {
        "packages": [package(name, UBUNTUS) for name in (*names, "libnvidia-compute-580-server")],
        "modules": [{"path": "nvidia.ko", "version": "580.95.05", "open": False}],
    }
    plan = plan_for(UBUNTU_24, "2482", survey=there)
    assert (plan["source"], plan["modules"]) == ("distribution", "proprietary")
    assert (plan["packages"], plan["missing"], plan["move"]) == (names, [], False)
    enrolled = {"secure_boot": True, "loaded": {"version": "580.95.05", "open": False}}
    assert plan_for(UBUNTU_24, "2482", survey={**there, **enrolled})["missing"] == []


def test_a_laptops_card_that_is_switched_off_is_not_served():
    """nvidia-prime keeps the module from the kernel by a name that there is not, and the card from the PCI bus."""
    for devices in ([], ["2820"]):
        found = nvidia_plan(look(UBUNTU_24, *devices, prime="off"), UBUNTU_24, options(), TABLES)
        assert "sudo prime-select on-demand" in found["skip"] and found["problems"] == []
        assert "prime-select on-demand" in refused(
            UBUNTU_24, *devices, survey={"prime": "off"}, required=True
        )
    plan_for(UBUNTU_24, "2820", survey={"prime": "on-demand"})


def test_the_fabric_manager_comes_with_a_driver_of_its_version():
    """The archive has a newer one by now, and the installed driver is held."""
    switches = plan_for(UBUNTU_22, "2330", survey={**SIGNED, "nvswitches": 4})
    assert switches["move"]
    has = {**SIGNED, "nvswitches": 4, "units": ["nvidia-fabricmanager.service"]}
    assert not plan_for(UBUNTU_22, "2330", survey=has)["move"]


@pytest.mark.parametrize(("device", "loaded"), [("2901", True), ("2330", False)])
def test_the_fifth_nvlink_wants_a_module(device, loaded):
    assert plan_for(UBUNTU_24, device)["umad"] is loaded
    tasks = yaml.safe_load((ROOT / "roles/nvidia/tasks/services.yml").read_text())
    names = [str(task) for task in tasks]
    place = next(i for i, one in enumerate(names) if "modprobe ib_umad" in one)
    assert place < next(i for i, one in enumerate(names) if "nvidia-fabricmanager.service" in one)


def test_half_a_driver_is_completed_or_replaced():
    broken = copy.deepcopy(BY_DKMS)
    broken["packages"][-1]["whole"] = False
    assert plan_for(UBUNTU_24, "2482", survey=broken)["source"] == "distribution"
    some = {"packages": [package(name, "535.261.03-1") for name in ("libcuda1", "nvidia-kernel-dkms")]}
    plan = plan_for(DEBIAN_12, "2204", survey=some)
    assert (plan["source"], plan["missing"]) == ("distribution", ["nvidia-smi", "nvidia-persistenced"])
    switches = plan_for(UBUNTU_22, "2330", survey={**SIGNED, "nvswitches": 4})
    assert "nvidia-fabricmanager-580" in switches["packages"]


@pytest.mark.parametrize("secure_boot", [True, False])
def test_the_owners_signed_driver_gets_the_modules_of_a_new_kernel(secure_boot):
    """As after a boot into one: they may need a newer driver of the branch, whose packages are held."""
    there = copy.deepcopy({**SIGNED, "modules": [], "secure_boot": secure_boot})
    for flavour in ("570-open", "535", "fs"):  # the last is no driver at all
        old = f"linux-modules-nvidia-{flavour}-6.8.0-40-generic"
        there["packages"].insert(0, package(old, "6.8.0-40.40"))
    plan = plan_for(UBUNTU_24, "2684", survey=there)
    assert (plan["source"], plan["branch"], plan["prebuilt"], plan["move"]) == ("installed", 580, True, True)
    assert plan["missing"] == ["linux-modules-nvidia-580-open-6.8.0-49-generic"] and plan["remove"] == []
    assert plan["modules"] == "open"


@pytest.mark.parametrize(("dkms", "kind"), [("nvidia-dkms-open", "open"), ("nvidia-dkms", "proprietary")])
def test_a_driver_of_nvidias_repository_with_its_later_names_stays(dkms, kind):
    names = ("libnvidia-compute", dkms, "nvidia-driver-open", "nvidia-persistenced")
    there = {"packages": [package(name, "615.71.09-1ubuntu1") for name in names]}
    plan = plan_for(UBUNTU_24, "2204", survey=there)
    assert (plan["source"], plan["branch"], plan["modules"]) == ("installed", 615, kind)
    assert (plan["packages"], plan["remove"], plan["move"]) == ([], [], False)
    assert "Pin: version 615.*" in plan["preferences"]


def test_a_driver_that_runs_and_is_of_no_known_package_is_not_installed_over():
    runs = {"loaded": {"version": "605.10.02", "open": True}}
    problem = refused(UBUNTU_24, "2204", survey=runs)
    assert "605.10.02" in problem and "--skip-tags nvidia" in problem and "reboot" in problem
    assert plan_for(UBUNTU_24, "2204", survey=runs, kernel="6.8.0-49-generic")["packages"]  # a made-up one's


# ---- and torch's build ----

TORCH = {"torch": "torch==2.13.0"}
OLDER = {"torch": "torch==2.13.0+cu126"}


@pytest.mark.parametrize("facts", [DEBIAN_12, DEBIAN_13])
def test_a_fresh_host_has_a_driver_that_runs_torchs_build(facts):
    plan = plan_for(facts, "2204", **TORCH)
    assert (plan["source"], plan["branch"]) == ("nvidia", 590 if facts is DEBIAN_13 else 580)
    assert plan_for(facts, "2204", **OLDER)["source"] == "distribution"
    for unknown in ("torch==2.13.0+cpu", "torch==2.13.0+rocm7.1", ""):
        assert plan_for(facts, "2204", torch=unknown)["source"] == "distribution"
    said = refused(facts, "2204", source="distribution", **TORCH)
    assert "torch's build (torch==2.13.0) is for CUDA 13.0, which" in said and "580 does" in said


def test_a_driver_that_is_there_and_does_not_run_torchs_build_is_not_replaced_unasked():
    names = ("libcuda1", "nvidia-kernel-dkms", "nvidia-smi", "nvidia-persistenced")
    there = {"packages": [package(name, "535.261.03-1") for name in names]}
    said = refused(DEBIAN_12, "2204", survey=there, **TORCH)
    assert "a driver of 535 is installed" in said and "nvidia_branch: 580" in said
    assert "such as torch==2.13.0+cu126" in said
    assert plan_for(DEBIAN_12, "2204", survey=there, **OLDER)["branch"] == 535
    asked = plan_for(DEBIAN_12, "2204", survey=there, branch="580", **TORCH)
    assert (asked["source"], asked["branch"], asked["move"]) == ("nvidia", 580, True)


@pytest.mark.parametrize(
    ("device", "torch", "words"),
    [
        (
            "1b06",
            TORCH,
            "the Pascal card at 0000:01:00.0 (PCI id 10de:1b06) is served by builds for 8.0 to 12.9",
        ),
        ("1db6", TORCH, "(such as torch==2.13.0+cu126, from an index"),
        ("2b85", OLDER, "is served by builds for 12.8 or later"),
        ("2b85", OLDER, "(such as torch==2.13.0, as the public index has it)"),
    ],
)
def test_a_card_for_which_torchs_build_has_no_code_is_refused(device, torch, words):
    assert words in refused(UBUNTU_24, device, **torch)
    plan_for(UBUNTU_24, device, **(OLDER if torch is TORCH else TORCH))


def test_what_the_public_index_has_is_of_the_version_that_is_locked():
    """Another version may be built for another CUDA: see what its build says (torch.version.cuda), and correct both."""
    assert (ROOT / "requirements/torch.txt").read_text().strip() == TORCH["torch"]
    assert TABLES["torch_cuda"] == "13.0"


def test_a_new_kernels_signed_modules_may_bring_a_newer_driver_of_the_branch():
    plan = plan_for(UBUNTU_24, "2684", survey={"secure_boot": True})
    assert not plan["move"]  # nothing is there
    old = [name.replace("6.8.0-49", "6.8.0-40") for name in plan["packages"]]
    there = [package(name, "6.8.0-40.40" if name.startswith("linux-") else UBUNTUS) for name in old]
    there += [package("libnvidia-compute-580-server", UBUNTUS, held=True)]
    rebooted = plan_for(UBUNTU_24, "2684", survey={"secure_boot": True, "packages": there})
    assert rebooted["missing"] == ["linux-modules-nvidia-580-server-open-6.8.0-49-generic"]
    assert rebooted["move"] and rebooted["remove"] == []
    same = {"secure_boot": True, "packages": there, "kernel": "6.8.0-40-generic"}
    assert not plan_for(UBUNTU_24, "2684", survey=same, cuda_toolkit=True)["move"]


def test_a_kernel_without_signed_modules_has_its_cure_in_the_message():
    (block,) = [
        task
        for task in yaml.safe_load((ROOT / "roles/nvidia/tasks/install.yml").read_text())
        if task["name"] == "Have the driver's packages"
    ]
    (said,) = [task for task in block["rescue"] if task["name"] == "Say what is the matter with the driver"]
    given = {"inventory_hostname": "node1", "__nvidia_compiler": {"stdout_lines": []}}
    given["__nvidia_plan"] = plan_for(UBUNTU_24, "2684", survey={"secure_boot": True})
    name = "linux-modules-nvidia-580-server-open-6.8.0-49-generic"
    given["ansible_failed_result"] = {"msg": f"E: Unable to locate package {name}"}
    words = jinja2.Template(said["vars"]["__nvidia_words"]).render(given)
    given["__nvidia_words"] = words
    asked = jinja2.Template(said["vars"]["__nvidia_unsigned"]).render(given)
    cure = jinja2.Template(VARIABLES["_nvidia_no_signed"]).render(given)
    text = jinja2.Template(said["ansible.builtin.fail"]["msg"])
    message = text.render(given, __nvidia_unsigned=asked == "True", _nvidia_no_signed=cure)
    assert "no signed modules of branch 580 for the kernel 6.8.0-49-generic, which runs" in message
    assert "Upgrade to the newest (sudo apt update && sudo apt full-upgrade), reboot" in message
    assert message.endswith(f"apt said: E: Unable to locate package {name}")


def test_the_compilers_words_are_of_this_installation(tmp_path):
    *_, block = tasks = yaml.safe_load((ROOT / "roles/nvidia/tasks/install.yml").read_text())
    (clock,) = [task["ansible.builtin.command"] for task in tasks if task.get("register") == "__nvidia_begun"]
    begun = subprocess.run(clock.split(), capture_output=True, text=True, check=True).stdout.strip()
    for name, age in (("nvidia/580.82.07", 5), ("iwlwifi/9", -1), ("nvidia-current/580.95.05", -1)):
        log = tmp_path / name / "build/make.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"CC nv.o\n{name}: error: too few arguments\n{name}: error: another\n")
        os.utime(log, (int(begun) - age,) * 2)
    argv = jinja2.Template("\n".join(block["rescue"][0]["ansible.builtin.command"]["argv"]))
    command = argv.render(__nvidia_begun={"stdout": begun}).replace("/var/lib/dkms", str(tmp_path))
    found = subprocess.run(command.splitlines(), capture_output=True, text=True)
    assert found.stdout == "nvidia-current/580.95.05: error: too few arguments\n", found.stderr


# ---- unattended upgrades ----


def passed_over(plan):
    """The expressions of the file for unattended-upgrades, which matches them from a name's first letter."""
    text = (ROOT / "roles/nvidia/templates/unattended.j2").read_text()
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    written = environment.from_string(text).render(__nvidia_plan=plan)
    return re.findall(r'^  "(.+)";$', written, re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "linux-generic",
        "linux-generic-hwe-24.04",
        "linux-image-generic",
        "linux-image-6.8.0-60-generic",
        "linux-headers-generic-hwe-24.04",
        "linux-modules-extra-6.8.0-60-generic",
        "linux-modules-nvidia-580-server-open-generic",
    ],
)
def test_unattended_upgrades_bring_no_kernel_without_its_signed_modules(name):
    signed, kept = (plan_for(UBUNTU_24, "2684", survey=one) for one in ({"secure_boot": True}, SIGNED))
    assert signed["prebuilt"] and kept["prebuilt"]
    for plan in (signed, kept):
        assert any(re.match(one, name) for one in passed_over(plan))
        assert not any(re.match(one, "linux-firmware") for one in passed_over(plan))
    by_dkms = passed_over(plan_for(UBUNTU_24, "2684"))  # which builds for each new kernel
    assert any(re.match(one, name) for one in by_dkms) is ("nvidia" in name)
    assert any(re.match(one, "libnvidia-compute-580-server") for one in by_dkms)


# ---- Ubuntu's branches ----


@pytest.mark.parametrize("facts", [UBUNTU_22, UBUNTU_24])
def test_a_branch_that_ubuntu_does_not_have_comes_from_nvidia_or_is_refused(facts):
    assert plan_for(facts, "2204", branch="580")["source"] == "distribution"
    assert plan_for(facts, "2204", branch="595")["source"] == "distribution"
    assert plan_for(facts, "2204", branch="570")["source"] == "nvidia"
    problem = refused(facts, "2204", branch="999")
    assert "the distribution, branch 999: it has 470, 580, 595 alone" in problem
    assert "NVIDIA's repository, branch 999: from 590 on its packages have other names" in problem
    assert "it has 470, 580, 595 alone" in refused(facts, "2204", branch="570", source="distribution")


# ---- CUDA's toolkit ----


@pytest.mark.parametrize(
    ("facts", "devices", "given", "package_name"),
    [
        (DEBIAN_13, ["2204"], {}, "nvidia-cuda-toolkit"),
        (UBUNTU_24, ["2c05"], {"source": "nvidia"}, "cuda-toolkit-13-0"),
        (UBUNTU_24, ["2c05"], {"source": "nvidia", "branch": "570"}, "cuda-toolkit-12-8"),
        (UBUNTU_24, ["1b06"], {"source": "nvidia"}, "cuda-toolkit-12-9"),
    ],
)
def test_the_toolkit_fits_driver_and_cards(facts, devices, given, package_name):
    assert package_name in plan_for(facts, *devices, cuda_toolkit=True, **given)["packages"]


def test_a_toolkit_that_is_too_old_for_a_card_is_refused():
    problem = refused(UBUNTU_24, "2c05", cuda_toolkit=True)
    assert "CUDA 12.0 cannot build for this host's cards, which need 12.8 or newer" in problem


def test_the_plan_says_which_cuda_builds_serve_all_cards():
    assert plan_for(UBUNTU_24, "2204", "2c05")["cuda"] == {"from": "12.8", "to": None}
    assert plan_for(UBUNTU_24, "1db6", "2684")["cuda"] == {"from": "11.8", "to": "12.9"}


# ---- what came of it ----

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


def test_the_drivers_packages_are_held_and_no_others():
    assert outcome()["hold"] == ["libcuda1"]


def test_reset_lets_go_of_what_the_role_itself_holds():
    driver = [package("libcuda1", "580.95.05-1", held=True), package("nvidia-smi", "580.95.05-1", held=True)]
    packages = [*driver, package("nvidia-settings", "580.95.05-1"), package("cuda-13", "13.0.1-1", held=True)]
    noted = "libcuda1\nnvidia-settings\nnvidia-gone\n"
    assert nvidia_held(packages, noted) == ["libcuda1"]  # nvidia-smi: the owner held it before
    assert nvidia_held(packages, "") == []
    # An older release has noted nothing, and has held the driver's branch.
    assert nvidia_held(packages, None) == ["libcuda1", "nvidia-smi"]
    assert nvidia_held([package("cuda-13", "13.0.1-1", held=True)], None) == []


def marking(tasks):
    """The task of a file of the role's that calls apt-mark, and the names of all."""
    items = yaml.safe_load((ROOT / "roles/nvidia/tasks" / tasks).read_text())
    items = [one for item in items for one in item.get("block", [item])]
    (mark,) = [item for item in items if "apt-mark" in str(item.get("ansible.builtin.command"))]
    return mark, [item["name"] for item in items]


def test_what_is_held_is_noted_before_and_a_host_of_an_older_release_has_no_note():
    _, names = marking("settle.yml")
    assert names.index("Note the others") < names.index(marking("settle.yml")[0]["name"])
    begin = yaml.safe_load((ROOT / "roles/nvidia/tasks/apt.yml").read_text())
    (note,) = [item for item in begin if "_nvidia_held_file" in str(item)]
    (pin,) = [item for item in begin if item.get("ansible.builtin.copy", {}).get("dest") == PIN]
    assert note["when"] == "not __nvidia_pin.stat.exists" and begin.index(note) < begin.index(pin)
    assert note["ansible.builtin.copy"]["force"] is False
    made = yaml.safe_load((ROOT / "roles/nvidia/vars/main/paths.yml").read_text())["_nvidia_made"]
    assert [one["path"] for one in made].index(PIN) < len(made) - 1
    assert made[-1]["path"] == "{{ _nvidia_held_file }}"


@pytest.mark.parametrize("tasks", ["settle.yml", "remove.yml"])
@pytest.mark.parametrize(
    ("failed", "words", "ends"),
    [
        (False, "", True),
        (True, "dpkg: error: dpkg frontend lock was locked by another process with pid 7", False),
        (True, "dpkg: error: dpkg frontend is locked by another process", False),  # Ubuntu 22.04's
        (True, "E: Unable to locate package libcuda1", True),
    ],
)
def test_apt_mark_waits_for_dpkgs_lock_alone(tasks, failed, words, ends):
    task, _ = marking(tasks)
    environment = jinja2.Environment()
    environment.tests["succeeded"] = lambda result: not result["failed"]
    until = environment.compile_expression(task["until"])
    assert until(**{task["register"]: {"failed": failed, "stderr": words}}) is ends
    assert task["retries"] * task["delay"] == 600 and task["environment"] == {"LC_ALL": "C.UTF-8"}


def test_a_fresh_driver_is_loaded_without_a_reboot():
    found = outcome()
    assert (found["load"], found["pending"], found["reboot"], found["build"]) == (True, "", False, False)
    assert found["version"] == "535.261.03" and found["says"] == []


@pytest.mark.parametrize(("enrolled", "comes"), [(False, False), (True, True), (None, True)])
def test_no_reboot_into_a_kernel_that_would_not_take_the_module(enrolled, comes):
    plan = plan_for(DEBIAN_12, "2204", survey={"secure_boot": True})
    made = {"modules": [{"path": "nvidia.ko", "version": "535.261.03", "open": False}], "nouveau": True}
    made["packages"] = [package("libcuda1", "535.261.03-1")]
    now = look(DEBIAN_12, "2204", **made, secure_boot=True, enrolled=enrolled)
    found = nvidia_outcome(now, plan, True)
    assert found["reboot"] is comes and any("mokutil" in one for one in found["says"])
    assert any("not rebooted, because the key that signed" in one for one in found["says"]) is not comes


def test_a_driver_that_runs_needs_nothing():
    found = outcome(reboot=True, loaded={"version": "535.261.03", "open": False})
    assert (found["running"], found["load"], found["reboot"], found["says"]) == (True, False, False, [])


@pytest.mark.parametrize(
    ("survey", "words"),
    [
        (
            {"loaded": {"version": "535.216.03", "open": False}},
            "runs the proprietary module 535.216.03, installed is",
        ),
        ({"loaded": {"version": "535.261.03", "open": True}}, "runs the open module 535.261.03"),
        ({"nouveau": True}, "runs nouveau"),
    ],
)
def test_a_reboot_comes_by_consent_alone_and_never_during_a_run(survey, words):
    told = outcome(**survey)
    assert words in told["pending"] and not told["reboot"] and not told["running"]
    assert (
        len(told["says"]) == 1
        and "nvidia_reboot" in told["says"][0]
        and "sudo systemctl reboot" in told["says"][0]
    )
    # nvidia-peermem, say, is loaded, and noted for each boot, only where the driver runs.
    assert "(sudo systemctl reboot), and then run site.yml again" in told["says"][0]
    agreed = outcome(reboot=True, **survey)
    assert agreed["reboot"] and agreed["says"] == []
    here = outcome(reboot=True, from_itself=True, **survey)
    assert not here["reboot"] and "this playbook runs on it: sudo systemctl reboot" in here["says"][0]
    local = nvidia_outcome(
        look(DEBIAN_12, "2204", **{**INSTALLED, **survey}), plan_for(DEBIAN_12, "2204"), True, True
    )
    assert not local["reboot"] and local["says"] == here["says"]
    busy = outcome(reboot=True, runs=["first"], **survey)
    assert not busy["reboot"] and "first is training here" in busy["says"][0]
    asks = outcome(reboot=True, passphrases=["root_crypt"], **survey)
    assert (
        not asks["reboot"] and "wait for the passphrase of root_crypt at its own keyboard" in asks["says"][0]
    )
    assert "not rebooted" not in outcome(passphrases=["root_crypt"], **survey)["says"][0]


@pytest.mark.parametrize(
    ("given", "refuses"), [({"branch": "580"}, True), ({"upgrade": True}, True), ({}, False)]
)
def test_no_driver_takes_the_place_of_the_one_that_a_run_lives_by(given, refuses):
    """A rank that is started anew would not find its card, and the host is not rebooted under a run."""
    there = {
        "packages": [
            package("libnvidia-compute-570", "570.133.20-0ubuntu1"),
            package("nvidia-dkms-570-open", "570.133.20-0ubuntu1"),
        ],
        "modules": [{"path": "nvidia.ko", "version": "570.133.20", "open": True}],
        "loaded": {"version": "570.133.20", "open": True},
    }
    plan_for(UBUNTU_24, "2c05", survey=there, **given)
    there["runs"] = ["first"]
    if not refuses:
        plan_for(UBUNTU_24, "2c05", survey=there, **given)
        return
    said = refused(UBUNTU_24, "2c05", survey=there, **given)
    assert "first is training here" in said and "playbooks/stop.yml" in said


def test_the_kernels_newer_driver_is_in_the_way_as_nouveau_is():
    """NVIDIA's module would not load while it has the card: "already bound to NovaCore"."""
    card = {"address": "0000:01:00.0", "device": "2204", "class": "0300", "driver": "NovaCore"}
    found = outcome(cards=[card])
    assert "runs nova_core, which gives way" in found["pending"] and not found["load"]
    settle = yaml.safe_load((ROOT / "roles/nvidia/tasks/settle.yml").read_text())[0]
    assert "\nblacklist nova_core\n" in settle["ansible.builtin.copy"]["content"]


def test_secure_boot_is_told_until_the_module_runs():
    found = outcome(secure_boot=True)
    assert "mokutil --import" in found["says"][0]
    assert outcome(secure_boot=True, loaded={"version": "535.261.03", "open": False})["says"] == []


def test_modules_that_the_packages_have_not_built_are_built():
    assert outcome(modules=[])["build"]
    other = [{"path": "nvidia.ko", "version": "535.261.03", "open": True}]
    assert outcome(modules=other)["build"]


def test_another_branch_than_planned_is_a_problem():
    found = outcome(packages=[package("libcuda1", "550.163.01-2")], modules=[])
    assert "of branch 550 after the installation; planned was 535" in found["problems"][0]


def test_switches_without_a_fabric_manager_are_a_problem():
    plan = {**plan_for(DEBIAN_12, "2204"), "fabric": True}
    assert "no fabric manager" in outcome(plan=plan)["problems"][0]
    assert outcome(plan=plan, units=["nvidia-fabricmanager.service"])["problems"] == []


@pytest.mark.parametrize(
    ("manager", "version", "fits"),
    [
        ("nvidia-fabricmanager-580", "580.95.05-0ubuntu0.22.04.1", True),
        ("nvidia-fabricmanager", "580.95.05-1", True),
        ("nvidia-fabricmanager-580", "580.126.09-1", False),  # of NVIDIA's repository, beside Ubuntu's driver
        ("nvidia-fabricmanager", "590.48.01-1", False),
    ],
)
def test_a_fabric_manager_of_another_release_is_told(manager, version, fits):
    names = ("libnvidia-compute-580-server", "nvidia-utils-580-server", "nvidia-dkms-580-server-open")
    there = {
        "packages": [package(name, UBUNTUS) for name in names] + [package(manager, version)],
        "modules": [{"path": "nvidia.ko", "version": "580.95.05", "open": True}],
        "nvswitches": 4,
        "units": ["nvidia-fabricmanager.service"],
    }
    found = nvidia_outcome(look(UBUNTU_22, "2330", **there), plan_for(UBUNTU_22, "2330", survey=there), False)
    assert (found["problems"] == []) is fits
    if not fits:
        assert version.split("-")[0] in found["problems"][0] and "nvidia_upgrade" in found["problems"][0]


def test_signed_modules_that_are_not_there_are_told():
    plan = plan_for(UBUNTU_24, "2684", survey={"secure_boot": True})
    other = [{"path": "/lib/modules/x/nvidia.ko", "version": "580.95.05", "open": False}]
    survey = look(UBUNTU_24, "2684", packages=SIGNED["packages"], modules=other, secure_boot=True)
    (problem,) = nvidia_outcome(survey, plan, False)["problems"]
    assert "has no open module of branch 580" in problem and "found 580.95.05 at /lib/modules/x" in problem
    assert nvidia_outcome({**survey, "container": True}, plan, False)["problems"] == []


def test_a_container_loads_nothing_and_says_so():
    found = outcome(container=True, nouveau=True)
    assert (found["load"], found["pending"]) == (False, "")
    assert "none can be loaded" in found["says"][0]


def test_the_host_that_differs_is_named():
    hostvars = {
        name: {"__nvidia_outcome": {"version": version}}
        for name, version in (("node1", "580.95.05"), ("node2", "580.82.07"), ("node3", "580.95.05"))
    }
    hostvars["node4"] = {}
    hosts = list(hostvars)
    assert nvidia_versions(hostvars, hosts) == ["node2 has 580.82.07 (most have 580.95.05, such as node1)"]
    assert nvidia_branches(hostvars, hosts) == [580]
    other = {"node5": {"__nvidia_outcome": {"version": "570.172.08"}}}
    assert nvidia_branches({**hostvars, **other}, [*hosts, "node5"]) == [570, 580]
    hostvars["node2"] = copy.deepcopy(hostvars["node1"])
    assert nvidia_versions(hostvars, hosts) == []
    assert nvidia_versions({"node4": {}}, ["node4"]) == nvidia_branches({"node4": {}}, ["node4"]) == []


# ---- all hosts together ----

REPOSITORY, DEBIANS = ("nvidia", 580), ("distribution", 535)
OWN_570 = {
    "packages": [package("libcuda1", "570.133.20-1"), package("nvidia-kernel-open-dkms", "570.133.20-1")],
    "modules": [{"path": "nvidia.ko", "version": "570.133.20", "open": True}],
}
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


def together(**hosts):
    """(nvidia_common, {host: (source, branch) of its plan with that}) of hosts: (facts, device, survey, options)."""

    def plans(common):
        return {
            name: {
                "__nvidia_plan": plan_for(facts, device, survey=survey, **asked, common=common),
            }
            for name, (facts, device, survey, asked) in hosts.items()
        }

    common = nvidia_common(plans({}), list(hosts))
    found = {name: variables["__nvidia_plan"] for name, variables in plans(common).items()}
    return common, {name: (plan["source"], plan["branch"]) for name, plan in found.items()}


def test_one_driver_serves_every_card_of_all_hosts():
    """The home LAN on Debian 12: for itself, only the first would have NVIDIA's 580."""
    common, chosen = together(
        desktop=(DEBIAN_12, "2c05", {}, {}),
        laptop=(DEBIAN_12, "2820", {}, {}),
        oldie=(DEBIAN_12, "2482", {}, {}),
    )
    assert set(chosen.values()) == {REPOSITORY}
    assert (
        "one driver for all hosts, 580 of NVIDIA's repository: 535 of Debian does not serve" in common["says"]
    )
    assert "desktop (the Blackwell card at 0000:01:00.0 (PCI id 10de:2c05) needs 570" in common["says"]
    assert common["apart"] == []


def test_hosts_of_several_distributions_get_the_one_that_is_the_same_for_all():
    common, chosen = together(a=(DEBIAN_12, "2c05", {}, {}), b=(UBUNTU_24, "2204", {}, {}))
    assert set(chosen.values()) == {REPOSITORY}
    common, chosen = together(a=(UBUNTU_22, "2c05", {}, {}), b=(UBUNTU_24, "1b06", {}, {}))
    assert set(chosen.values()) == {("distribution", 580)} and common["says"] == ""


def test_hosts_that_their_distribution_serves_keep_to_it():
    common, chosen = together(a=(DEBIAN_12, "2204", {}, {}), b=(DEBIAN_12, "1b06", {}, {}))
    assert set(chosen.values()) == {DEBIANS} and common["says"] == ""


def test_a_host_without_a_card_and_one_alone_have_nothing_to_agree_on():
    plan = plan_for(DEBIAN_12, "2204")
    nothing = {"source": "", "branch": None, "says": "", "apart": []}
    assert nvidia_common({"a": {"__nvidia_plan": plan}}, ["a"]) == nothing
    without = nvidia_plan(look(DEBIAN_12), DEBIAN_12, options(), TABLES)
    assert (
        nvidia_common({"a": {"__nvidia_plan": plan}, "b": {"__nvidia_plan": without}}, ["a", "b"]) == nothing
    )


def test_where_none_serves_all_each_host_has_its_own_and_who_rules_it_out_is_named():
    arm = {**DEBIAN_12, "architecture": "aarch64"}  # for which NVIDIA's repository has nothing on Debian
    common, chosen = together(a=(DEBIAN_12, "2c05", {}, {}), b=(arm, "2204", {}, {}))
    assert chosen == {"a": REPOSITORY, "b": DEBIANS} and common["source"] == ""
    assert "580 of NVIDIA's repository not b (there is none for aarch64)" in common["says"]
    assert "535 of Debian not a (the Blackwell card at" in common["says"]
    common, chosen = together(
        a=(DEBIAN_12, "2c05", {}, {}), b=(UBUNTU_24, "2204", {}, {"source": "distribution"})
    )
    assert chosen == {"a": REPOSITORY, "b": ("distribution", 580)} and common["source"] == ""
    assert "580 of NVIDIA's repository not b (which has 580 of Ubuntu)" in common["says"]


def test_a_branch_that_ends_before_another_begins_serves_not_all():
    """What will be once NVIDIA's repository has, for new cards, a branch that old ones are not served by."""
    tables = {**TABLES, "branch": 585}
    hosts = {"volta": "1db6", "blackwell": "2c05"}
    plans = {
        name: {"__nvidia_plan": nvidia_plan(look(DEBIAN_12, device), DEBIAN_12, options(), tables)}
        for name, device in hosts.items()
    }
    says = nvidia_common(plans, list(plans))["says"]
    assert "585 of NVIDIA's repository not volta (the Volta card" in says and "is served up to 580" in says


def test_a_driver_that_is_there_gives_way_only_when_somebody_asks():
    hosts = {"a": (DEBIAN_12, "2c05", {}, {}), "b": (DEBIAN_12, "2482", OWN_570, {})}
    common, chosen = together(**hosts)
    assert chosen == {"a": REPOSITORY, "b": ("installed", 570)}
    assert (common["branch"], common["apart"]) == (580, ["b has 570"])
    common, chosen = together(
        a=(DEBIAN_12, "2c05", {}, {}), b=(DEBIAN_12, "2482", WHOLE_535, {})
    )  # Debian's own, such as of a host that was there before the first
    assert chosen == {"a": REPOSITORY, "b": DEBIANS} and common["apart"] == ["b has 535"]
    asked = {name: (*host[:3], {"branch": "580"}) for name, host in hosts.items()}
    common, chosen = together(**asked)
    assert set(chosen.values()) == {REPOSITORY} and common["apart"] == []


def test_what_most_hosts_have_already_is_what_a_fresh_one_gets():
    common, chosen = together(
        a=(DEBIAN_12, "2482", WHOLE_580, {}), b=(DEBIAN_12, "2204", {}, {}), c=(DEBIAN_12, "2204", {}, {})
    )
    assert set(chosen.values()) == {REPOSITORY} and common["apart"] == []
    common, chosen = together(a=(DEBIAN_12, "2c05", OWN_570, {}), b=(DEBIAN_12, "2482", OWN_570, {}))
    assert set(chosen.values()) == {("installed", 570)} and common["apart"] == []


def test_a_host_that_is_played_alone_keeps_what_all_had_chosen():
    """As with -l: nvidia_common has nobody to agree with, and the distribution's own would serve it, too."""
    plan = plan_for(DEBIAN_12, "2482", survey=WHOLE_580)
    assert (plan["source"], plan["branch"], plan["missing"], plan["move"]) == ("nvidia", 580, [], False)
    ubuntus = [
        package(name, "580.95.05-0ubuntu1")
        for name in (
            *("libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580"),
            "nvidia-dkms-580-open",
        )
    ]
    plan = plan_for(UBUNTU_24, "2482", survey={"packages": ubuntus})
    assert (plan["source"], plan["missing"], plan["move"]) == ("nvidia", [], False)


def test_a_fresh_ubuntu_beside_one_with_ubuntus_own_driver_has_the_distributions():
    for there in (SIGNED, BY_DKMS):
        common, chosen = together(a=(UBUNTU_24, "2482", there, {}), b=(UBUNTU_24, "2684", {}, {}))
        assert chosen == {"a": ("installed", 580), "b": ("distribution", 580)}
        assert (common["says"], common["apart"]) == ("", [])


def answer(*lines, rc=0, cards=2, **more):
    smi = {"rc": rc, "stdout_lines": list(lines), "stderr_lines": [], **more}
    return nvidia_answer(smi, {"cards": [{}] * cards, "branch": 580}, {"version": "580.95.05"})


def test_nvidia_smi_answers_for_every_card_with_the_installed_version():
    good, other = "00000000:01:00.0, 580.95.05", "00000000:02:00.0, 580.82.07"
    assert answer(good, good.replace(":01:", ":02:")) == ""
    assert "names 1 cards, 2 are on the PCI bus" in answer(good)
    assert "Failed to initialize NVML" in answer("Failed to initialize NVML: Unknown Error", rc=255, cards=1)
    mismatch = answer("Failed to initialize NVML: Driver/library version mismatch", rc=18, cards=1)
    assert "another release than the kernel module 580.95.05" in mismatch and "nvidia_upgrade" in mismatch
    nothing = answer(rc=2, msg="Error executing command.")
    assert "nvidia-smi is not there" in nothing and "nvidia-utils-580" in nothing
    warning = "WARNING: infoROM is corrupted at gpu 0000:01:00.0"  # whose card trains all the same
    assert answer(good, warning, cards=1) == answer(good, warning, cards=1, rc=14) == ""
    fault = answer(good, other)
    assert "says that driver 580.82.07 runs the card at 00000000:02:00.0" in fault and "580.95.05" in fault


def test_cuda_has_its_device_at_boot_and_no_run_is_promised_a_card_without_it():
    """A run can neither load nvidia-uvm nor make its device (roles/trainer)."""
    written = (ROOT / "roles/nvidia/templates/persistenced.conf.j2").read_text()
    steps = re.findall("^ExecStartPost=(.*)$", written, re.MULTILINE)
    assert steps[-2:] == ["-/sbin/modprobe nvidia-uvm", "-/usr/bin/nvidia-modprobe -u -c 0"]
    look_at = yaml.safe_load((ROOT / "roles/nvidia/tasks/verify.yml").read_text())[-1]
    wait = look_at["ansible.builtin.wait_for"]
    assert jinja2.Template(wait["path"]).render(_nvidia_sys_root="") == "/dev/nvidia-uvm"
    assert look_at["when"] == "not __nvidia_outcome.container"
    said = jinja2.Template(wait["msg"]).render(inventory_hostname="node1")
    assert said.startswith("node1: found no /dev/nvidia-uvm; expected it")
    assert "sudo systemctl restart nvidia-persistenced" in said


@pytest.mark.parametrize(
    ("stale", "running", "state"), [(True, True, "restarted"), (False, True, "started"), (True, False, "")]
)
def test_a_daemon_that_runs_already_heeds_new_settings(stale, running, state):
    daemon = yaml.safe_load((ROOT / "roles/nvidia/tasks/services.yml").read_text())[0]
    written = daemon["ansible.builtin.systemd_service"]
    now = {"survey": {"daemon_stale": stale}}
    given = {"__nvidia_now": now, "__nvidia_outcome": {"running": running}, "omit": ""}
    assert jinja2.Template(written["state"]).render(given) == state
    assert jinja2.Template(written["daemon_reload"]).render(given) == str(stale)


# ---- the survey ----


@pytest.fixture(scope="module")
def survey(load_module):
    return load_module("nvidia_survey")


@pytest.mark.parametrize(
    ("state", "started", "read", "stale"),
    [
        ("active", 20, "no", False),
        ("active", 20, "yes", True),  # a run failed before systemd was told
        ("active", -20, "no", True),  # another package's installation told it
        ("inactive", 0, "no", False),
        ("inactive", 0, "yes", True),
    ],
)
def test_a_run_that_failed_leaves_a_daemon_without_its_settings(
    survey, tmp_path, state, started, read, stale
):
    """`started`: so many seconds after the file was written."""
    (tmp_path / "trainyard.conf").write_text("")
    os.utime(tmp_path / "trainyard.conf", (time.time() - 50, time.time() - 50))
    since_boot = (time.monotonic() - 50 + started) * 1e6
    said = f"ActiveState={state}\nActiveEnterTimestampMonotonic={since_boot:.0f}\nNeedDaemonReload={read}\n"
    asked = []

    def run_command(command):
        asked.append(command[:3])
        return 0, said, ""

    assert survey.daemon_stale(run_command, str(tmp_path / "trainyard.conf")) is stale
    assert asked == [["systemctl", "show", "nvidia-persistenced.service"]]
    (_, template) = yaml.safe_load((ROOT / "roles/nvidia/tasks/daemon.yml").read_text())
    assert template["ansible.builtin.template"]["dest"] == survey.DAEMON_FILE


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("root_crypt UUID=1234 none luks,discard", True),
        ("root_crypt UUID=1234", True),
        ("root_crypt UUID=1234 none luks,tpm2-device=auto", False),
        ("root_crypt UUID=1234 /etc/keys/root luks", False),
        ("swap /dev/sda3 /dev/urandom swap", False),
        ("later UUID=1234 - luks,noauto", False),
        ("# root_crypt UUID=1234 none luks", False),
        ("", False),
    ],
)
def test_who_asks_for_a_passphrase_at_boot(survey, tmp_path, monkeypatch, line, asks):
    (tmp_path / "crypttab").write_text(f"# <name> <device> <key> <options>\n{line}\n")
    assert survey.passphrases(str(tmp_path / "crypttab")) == (["root_crypt"] if asks else [])
    assert survey.passphrases(str(tmp_path / "none")) == []
    monkeypatch.setattr(survey, "CLEVIS", str(tmp_path))
    assert survey.passphrases(str(tmp_path / "crypttab")) == []


@pytest.fixture
def machine(tmp_path):
    """A tree with /sys and /proc of a machine with two cards, their sound, an NVSwitch, and an old chipset's bridge."""
    pci = tmp_path / "sys/bus/pci/devices"
    for address, vendor, device, kind in [
        ("0000:00:02.0", "0x8086", "0x46a6", "0x030000"),
        ("0000:01:00.0", "0x10de", "0x2684", "0x030000"),
        ("0000:01:00.1", "0x10de", "0x22ba", "0x040300"),
        ("0000:02:00.0", "0x10de", "0x20B0", "0x030200"),
        ("0000:03:00.0", "0x10de", "0x1af1", "0x068000"),
        ("0000:04:00.0", "0x10de", "0x0057", "0x068000"),
    ]:
        place = pci / address
        place.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            (place / name).write_text(f"{value}\n")
    driver = tmp_path / "sys/bus/pci/drivers/vfio-pci"
    driver.mkdir(parents=True)
    (pci / "0000:01:00.0/driver").symlink_to(driver)
    (pci / "0000:05:00.0").mkdir()  # one that is being unplugged
    (pci / "0000:05:00.0/vendor").write_text("0x10de\n")
    (pci / "0000:05:00.0/class").write_text("0x030000\n")
    return tmp_path


def test_cards_are_told_from_their_sound_and_from_switches(survey, machine):
    found = survey.devices(str(machine))
    cards = [
        (item["address"], item["device"], item["driver"]) for item in found if item["class"] in survey.DISPLAY
    ]
    assert cards == [("0000:01:00.0", "2684", "vfio-pci"), ("0000:02:00.0", "20b0", None)]
    assert [item["device"] for item in found if survey.is_nvswitch(item)] == ["1af1"]


@pytest.mark.parametrize(
    ("line", "is_open", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@x)",
            True,
            "580.95.05",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun 24 20:54:22 UTC 2025",
            False,
            "535.261.03",
        ),
    ],
)
def test_the_loaded_module_and_its_kind(survey, machine, line, is_open, version):
    assert survey.loaded_module(str(machine)) is None
    place = machine / "proc/driver/nvidia"
    place.mkdir(parents=True)
    (place / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
    assert survey.loaded_module(str(machine)) == {"version": version, "open": is_open}


def test_secure_boot_is_read_from_the_firmwares_variable(survey, machine):
    assert survey.secure_boot(str(machine)) is None
    place = machine / "sys/firmware/efi/efivars"
    place.mkdir(parents=True)
    for value, expected in ((b"\0", False), (b"\1", True)):
        (place / survey.SECURE_BOOT).write_bytes(b"\x06\0\0\0" + value)
        assert survey.secure_boot(str(machine)) is expected


def test_whether_the_owner_has_enrolled_dkms_key(survey, machine, monkeypatch):
    key = machine / "mok.pub"
    monkeypatch.setattr(survey, "KEYS", (str(key),))
    monkeypatch.setattr(survey, "DKMS", str(machine / "framework.conf"))
    place = machine / "sys/firmware/efi/efivars"
    place.mkdir(parents=True, exist_ok=True)
    (place / survey.MOK).write_bytes(b"\x06\0\0\0" + b"distribution's")
    assert survey.enrolled(str(machine)) is None  # there is no key yet
    key.write_bytes(b"\x30\x82ours")
    assert survey.enrolled(str(machine)) is False
    second = survey.MOK.replace("MokListRT-", "MokListRT1-")  # what is long is told in parts
    (place / second).write_bytes(b"\x06\0\0\0" + b"head\x30\x82ours")
    assert survey.enrolled(str(machine)) is True
    (place / second).unlink()
    (place / survey.KNOWN).write_bytes(b"\x06\0\0\0\x30\x82ours")
    assert survey.enrolled(str(machine)) is True
    (machine / "framework.conf").write_text("# …\nmok_certificate=/root/mine.der\n")
    assert survey.enrolled(str(machine)) is None


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("nvidia.ko", True),
        ("nvidia.ko.zst", True),
        ("nvidia-current.ko", True),
        ("nvidia-current-open.ko.xz", True),
        ("nvidia-uvm.ko", False),
        ("nvidia-current-drm.ko", False),
        ("nvidia-current-open-peermem.ko", False),
        ("nvidia-wmi-ec-backlight.ko", False),
        ("nvidiafb.ko", False),
    ],
)
def test_the_driver_is_told_from_its_companions(survey, name, counts):
    assert bool(survey.MODULE.fullmatch(name) and not survey.COMPANION.search(name)) is counts


def test_apts_sources_of_both_forms_are_read(survey, tmp_path):
    one = tmp_path / "sources.list"
    one.write_text(
        "# deb http://off.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main contrib # ours\n"
        "deb-src http://a.example/debian bookworm main\n"
        "deb http://c.example/cuda/debian12/x86_64/ /\n"
    )
    two = tmp_path / "debian.sources"
    two.write_text(
        "Types: deb deb-src\n# a comment\nURIs: http://b.example/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"
    )
    first, flat, stanza = survey.sources([str(one), str(two), str(tmp_path / "none.list")])
    assert first["options"] == {"Signed-By": "/k.gpg", "Architectures": "amd64"}
    assert (first["uris"], first["components"]) == (["http://a.example/debian"], ["main", "contrib"])
    assert (flat["suites"], flat["components"]) == (["/"], [])
    assert stanza["suites"] == ["bookworm", "bookworm-updates"]
    assert stanza["options"]["Signed-By"].startswith("\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==")


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs dpkg")
def test_a_32_bit_library_is_held_by_its_own_name_once(survey, tmp_path, monkeypatch):
    """As Steam and Wine bring it: `apt-mark hold libcuda1` would hold the other one alone, at each run anew."""
    native = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True).stdout.strip()
    installed = {
        ("libcuda1", native, "same"): "install",
        ("libcuda1", "i386", "same"): "install",
        ("nvidia-kernel-dkms", native, "no"): "hold",
        ("nvidia-driver-libs-i386", "i386", "no"): "hold",
        ("nvidia-alternative", "all", "no"): "install",
        ("linux-image-amd64", native, "no"): "install",
    }
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path))
    (tmp_path / "arch").write_text(f"{native}\ni386\n")

    def names_to_hold():
        stanzas = (
            f"Package: {name}\nStatus: {want} ok installed\nArchitecture: {architecture}\nMulti-Arch: {kind}\n"
            "Maintainer: x <x@localhost>\nVersion: 535.261.03-1\nDescription: x\n"
            for (name, architecture, kind), want in installed.items()
        )
        (tmp_path / "status").write_text("\n".join(stanzas))
        found, kernels, backported = survey.packages()
        assert kernels == ["linux-image-amd64"] and backported == []
        return outcome(packages=found)["hold"]

    assert names_to_hold() == ["libcuda1", "libcuda1:i386", "nvidia-alternative"]
    whole = (tmp_path / "status").read_text()
    image = "Package: linux-image-amd64\n"
    before, _, after = whole.partition(image)
    (tmp_path / "status").write_text(before + image + after.replace("-1\n", "-1~bpo12+1\n", 1))
    assert survey.packages()[1:] == (["linux-image-amd64"], ["linux-image-amd64"])
    installed.update(dict.fromkeys(installed, "hold"))
    assert names_to_hold() == []


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs dpkg")
@pytest.mark.parametrize(
    ("status", "more", "whole"),
    [
        ("installed", "", True),
        ("triggers-pending", "Triggers-Pending: ldconfig\n", True),  # as a power cut leaves it
        ("triggers-awaited", "Triggers-Awaited: libc-bin\n", True),
        ("half-configured", "", False),
        ("unpacked", "", False),
        ("config-files", "Config-Version: 580.95.05-1\n", None),  # removed, which dpkg lists as rc
    ],
)
def test_a_package_whose_triggers_have_not_run_is_whole(survey, tmp_path, monkeypatch, status, more, whole):
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path))
    (tmp_path / "status").write_text(
        f"Package: nvidia-utils-580\nStatus: install ok {status}\nArchitecture: all\n"
        f"Maintainer: x <x@localhost>\nVersion: 580.95.05-1\n{more}Description: x\n"
    )
    found, _, _ = survey.packages()
    assert [item["whole"] for item in found] == ([] if whole is None else [whole])


def test_kernel_packages_are_those_that_follow_the_newest(survey):
    for name, follows in [
        ("linux-image-amd64", True),
        ("linux-image-generic-hwe-24.04", True),
        ("linux-image-6.1.0-50-amd64", False),
        ("linux-image-unsigned-6.8.0-49-generic", False),
        ("linux-image-extra-virtual", False),  # nor of this, which brings linux-image-generic
        ("linux-headers-amd64", False),
        ("linux-image-amd64-dbg", False),  # of which there are no headers
    ]:
        assert bool(survey.KERNEL_PACKAGE.fullmatch(name)) is follows, name


def test_the_modules_paths_are_the_roles(survey):
    assert VARIABLES["_nvidia_sources_file"].endswith(f"/{survey.OWN_SOURCES}")
    assert VARIABLES["_nvidia_modprobe_file"] == survey.BLACKLIST


# ---- the repository's key ----


@pytest.fixture(scope="module")
def keys(load_module):
    return load_module("repository_key")


def armoured(*packets):
    body = base64.b64encode(b"".join(packets)).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\n{lines}\n=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n"


def key_packet(fill, new=False):
    """A version 4 RSA key's packet, as long as a real one, and its fingerprint."""
    body = b"\x04\x60\x00\x00\x00\x01" + bytes([fill]) * 520
    head = b"\xc6\xc1\x4e" if new else b"\x99" + len(body).to_bytes(2, "big")
    return head + body, hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


@pytest.mark.parametrize("new", [False, True])
def test_a_key_is_known_by_its_fingerprint(keys, new):
    packet, expected = key_packet(7, new)
    user = b"\xb4\x04anna"
    assert keys.fingerprints(armoured(packet, user)) == [expected]
    assert keys.fault(armoured(packet, user), expected.lower()) == ""


def test_a_second_key_in_the_file_is_refused(keys):
    (good, expected), (bad, other) = key_packet(7), key_packet(8)
    assert other in keys.fault(armoured(good, bad), expected)
    assert other in keys.fault(armoured(good) + armoured(bad), expected)


@pytest.mark.parametrize(
    "text", ["", "<html>not found</html>", armoured(b"\x99\xff\xff\x04"), armoured(b"\x00")]
)
def test_what_is_no_key_is_said_in_words(keys, text):
    assert keys.fault(text, "A" * 40)


def test_a_wrong_key_is_not_written(run_module, tmp_path):
    packet, expected = key_packet(7)
    path = tmp_path / "keys/nvidia.asc"
    given = {"path": str(path), "url": "https://mirror.example/key.pub", "text": armoured(packet)}
    wrong = run_module("repository_key", **given, fingerprint="A" * 40)
    assert "expected AAAA" in wrong["msg"] and expected in wrong["msg"]
    assert not path.exists()
    assert run_module("repository_key", check=True, **given, fingerprint=expected)["changed"]
    assert not path.exists()
    assert run_module("repository_key", **given, fingerprint=expected)["changed"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert not run_module("repository_key", **given, fingerprint=expected)["changed"]
