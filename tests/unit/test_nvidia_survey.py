"""The module nvidia_survey, over made-up /sys and /proc."""

import os
import shutil
import subprocess
import time

import pytest
import yaml
from nvidia_made_up import ROOT, VARIABLES, outcome


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
