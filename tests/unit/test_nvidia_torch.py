"""What torch's build asks of a host's driver and cards."""

import pytest
from nvidia_made_up import DEBIAN_12, DEBIAN_13, ROOT, TABLES, UBUNTU_24, package, plan_for, refused

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
            "the Pascal card at 0000:01:00.0 (PCI id 10de:1b06) is served by builds for 8.0 to 12.6",
        ),
        *((device, {"torch": "torch==2.13.0+cu128"}, "to 12.6") for device in ("1380", "1b06", "1db6")),
        ("1db6", TORCH, "(such as torch==2.13.0+cu126, from an index"),
        ("2b85", OLDER, "is served by builds for 12.8 or later"),
        ("2b85", OLDER, "(such as torch==2.13.0, as the public index has it)"),
    ],
)
def test_a_card_for_which_torchs_build_has_no_code_is_refused(device, torch, words):
    assert words in refused(UBUNTU_24, device, **torch)
    plan_for(UBUNTU_24, device, **(TORCH if torch is OLDER else OLDER))
    plan_for(UBUNTU_24, device, torch="torch==2.13.0+cu128.own")  # of one's own: only its ranks can tell


def test_what_the_public_index_has_is_of_the_version_that_is_locked():
    """Another version may be built for another CUDA: see what its build says (torch.version.cuda), and correct both."""
    assert (ROOT / "requirements/torch.txt").read_text().strip() == TORCH["torch"]
    assert TABLES["torch_cuda"] == "13.0"
