"""Which cards are served: the tables over real PCI ids, cards that are left out, and hosts that are passed over."""

import itertools

import pytest
from nvidia_host import generation_of
from nvidia_made_up import DEBIAN_12, TABLES, UBUNTU_24, look, options, plan_for, refused

from plugins.filter.nvidia_plan import nvidia_plan

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


def test_a_laptops_card_that_is_switched_off_is_not_served():
    """nvidia-prime keeps the module from the kernel by a name that there is not, and the card from the PCI bus."""
    for devices in ([], ["2820"]):
        found = nvidia_plan(look(UBUNTU_24, *devices, prime="off"), UBUNTU_24, options(), TABLES)
        assert "sudo prime-select on-demand" in found["skip"] and found["problems"] == []
        assert "prime-select on-demand" in refused(
            UBUNTU_24, *devices, survey={"prime": "off"}, required=True
        )
    plan_for(UBUNTU_24, "2820", survey={"prime": "on-demand"})
