"""What came of the role nvidia: holds, loading, reboots, faults, and nvidia-smi's answer."""

import re

import jinja2
import pytest
import yaml
from nvidia_made_up import (
    DEBIAN_12,
    INSTALLED,
    ROOT,
    SIGNED,
    UBUNTU_22,
    UBUNTU_24,
    UBUNTUS,
    look,
    outcome,
    package,
    plan_for,
)

from plugins.filter.nvidia_outcome import nvidia_answer, nvidia_held, nvidia_outcome

# ---- what is held ----

PIN = "{{ _nvidia_preferences_file }}"


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


# ---- loading, or a reboot ----


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


def test_a_container_loads_nothing_and_says_so():
    found = outcome(container=True, nouveau=True)
    assert (found["load"], found["pending"]) == (False, "")
    assert "none can be loaded" in found["says"][0]


# ---- what is wrong ----


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


# ---- what runs then ----


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
