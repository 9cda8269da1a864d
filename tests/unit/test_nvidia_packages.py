"""The packages that a host's driver takes: each release's, signed modules, headers, the fabric manager, room."""

import copy
import os
import re
import subprocess

import jinja2
import pytest
import yaml
from nvidia_made_up import (
    BY_DKMS,
    DEBIAN_12,
    DEBIAN_13,
    KERNELS,
    ROOT,
    SIGNED,
    UBUNTU_22,
    UBUNTU_24,
    UBUNTUS,
    VARIABLES,
    package,
    plan_for,
    refused,
)

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


def test_no_room_is_refused_before_anything_is_installed():
    problem = refused(
        DEBIAN_12, "2204", survey={"free_bytes": {"/usr": 10**9, "/var/lib/dkms": 10**11, "/boot": 10**11}}
    )
    assert problem.startswith("/usr has 1.00 GB free")
    there = [package(name, "535.261.03-1") for name in plan_for(DEBIAN_12, "2204")["packages"]]
    full = {"free_bytes": {"/usr": 0, "/var/lib/dkms": 0, "/boot": 0}, "packages": there}
    assert plan_for(DEBIAN_12, "2204", survey=full)["missing"] == []


def test_peermem_where_the_host_is_in_the_group_rdma():
    assert plan_for(UBUNTU_22, "2330", rdma=True)["peermem"]
    assert not plan_for(UBUNTU_22, "2330")["peermem"]


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


# ---- signed modules ----


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


# ---- headers, and the build ----


def test_headers_follow_the_kernels_that_are_installed():
    kernels = {"kernel_packages": ["linux-image-generic-hwe-24.04"], "headers": True}
    assert plan_for(UBUNTU_24, "2204", survey=kernels)["headers"] == ["linux-headers-generic-hwe-24.04"]
    cloud = {"kernel": "6.1.0-50-cloud-amd64"}
    assert plan_for(DEBIAN_12, "2204", survey=cloud)["headers"][1] == "linux-headers-cloud-amd64"


def test_a_kernel_of_ones_own_needs_its_headers():
    assert "its headers are not at" in refused(DEBIAN_12, "2204", survey={"kernel": "6.9.1-mine"})
    assert plan_for(DEBIAN_12, "2204", survey={"kernel": "6.9.1-mine", "headers": True})["headers"] == []


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


# ---- the fabric manager ----


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
