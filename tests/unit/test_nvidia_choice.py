"""Which driver a host gets: open or proprietary, of which branch and source, and when the one that is there stays."""

import copy

import pytest
from nvidia_made_up import (
    BY_DKMS,
    DEBIAN_12,
    DEBIAN_13,
    INSTALLED,
    SIGNED,
    SIGNED_KERNEL,
    TABLES,
    UBUNTU_22,
    UBUNTU_24,
    UBUNTUS,
    WHOLE_535,
    WHOLE_580,
    look,
    options,
    package,
    plan_for,
    refused,
    stock,
)

from plugins.filter.nvidia_outcome import nvidia_outcome
from plugins.filter.nvidia_plan import nvidia_plan

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
    # Nothing is fetched, so no source's toolkit is judged; what was asked for and does not come is told.
    plan = plan_for(UBUNTU_24, "2c05", survey=there, cuda_toolkit=True)
    assert (plan["source"], plan["packages"], plan["sources"]) == ("installed", [], "")
    assert "already installed; no CUDA toolkit, which comes with a source's driver alone" in plan["says"]
    for name in ("nvidia-cuda-toolkit", "cuda-toolkit-12-8"):  # the owner's own
        own = {**there, "packages": [*there["packages"], package(name, "12.8.1-1", "cuda")]}
        assert plan_for(UBUNTU_24, "2c05", survey=own, cuda_toolkit=True)["says"].endswith(
            "already installed"
        )
    assert plan["upgrade"] == ["libnvidia-compute-570", "nvidia-dkms-570-open", "nvidia-utils-570"]
    asked = plan_for(UBUNTU_24, "2c05", survey=there, branch="580")
    assert asked["move"] and asked["packages"][0] == "nvidia-dkms-580-server-open"


def test_a_package_that_is_no_driver_s_is_not_taken_for_one_where_there_is_none():
    plan = plan_for(UBUNTU_24, "2c05", survey={"packages": [package("nvidia-fs-dkms", "2.26.6-1")]})
    assert (plan["remove"], plan["move"], plan["upgrade"]) == ([], False, [])
    assert "in place of" not in plan["says"]


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


def test_a_kernel_that_is_too_new_for_the_distributions_driver():
    new = {"kernel": "6.12.117+deb13-amd64"}
    assert plan_for(DEBIAN_13, "2204", survey=new)["source"] == "nvidia"
    assert plan_for(DEBIAN_13, "2204", survey={"kernel": "6.12.94+deb13-amd64"})["source"] == "distribution"
    assert plan_for(DEBIAN_13, "2204", survey={"kernel": "6.12.97+deb13-amd64"})["source"] == "nvidia"
    problem = refused(DEBIAN_13, "2204", survey=new, source="distribution")
    assert "cannot be built for kernels from 6.12.97 on; this host runs 6.12.117+deb13-amd64" in problem


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


def test_half_a_driver_is_completed_or_replaced():
    broken = copy.deepcopy(BY_DKMS)
    broken["packages"][-1]["whole"] = False
    assert plan_for(UBUNTU_24, "2482", survey=broken)["source"] == "distribution"
    some = {"packages": [package(name, "535.261.03-1") for name in ("libcuda1", "nvidia-kernel-dkms")]}
    plan = plan_for(DEBIAN_12, "2204", survey=some)
    assert (plan["source"], plan["missing"]) == ("distribution", ["nvidia-smi", "nvidia-persistenced"])
    switches = plan_for(UBUNTU_22, "2330", survey={**SIGNED, "nvswitches": 4})
    assert "nvidia-fabricmanager-580" in switches["packages"]


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
