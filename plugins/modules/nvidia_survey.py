#!/usr/bin/python
"""What a host says of its NVIDIA cards, their driver and what stands around it: the input of the filter nvidia_plan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_survey
short_description: Read which NVIDIA cards a host has, and which driver
description:
  - Reads PCI devices, the loaded and the installed kernel modules, packages, apt's sources, secure boot and free space.
  - Reads only, and needs none of NVIDIA's programs, nor lspci or mokutil.
options:
  sys_root: {type: str, default: "", description: "A directory with the C(/sys) and C(/proc) to read; for tests."}
  kernel: {type: str, default: "", description: The kernel release that modules are for; the running one if empty.}
  state_dir: {type: path, default: /var/lib/trainyard, description: "Where runs are, those of Slurm, too."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Look at the cards
  nvidia_survey:
  become: true
"""

RETURN = r"""
survey:
  description: The answers; their keys stand in the module's function survey.
  type: dict
  returned: always
"""

import glob
import os
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import active_runs
from ansible.module_utils.host_survey import (
    from_elsewhere,
    in_container,
    nearest,
    service,
    ssh_session,
    stale,
)
from ansible.module_utils.pci_cards import DISPLAY, NVIDIA

BRIDGE = "0680"  # PCI class of an NVSwitch, and of bridges of old chipsets
OLDEST_NVSWITCH = 0x1AC0  # device ids of bridges below belong to chipsets
SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # the EFI variable with its vendor's GUID
OURS = re.compile(r"nvidia|cuda|^libnv|^libxnvctrl", re.IGNORECASE)
KERNEL_PACKAGE = re.compile(
    r"linux-image-(?!unsigned|dbg|extra)[a-z]\S*(?<!-dbg)"
)  # one that pulls in the newest of a kind
# nvidia.ko, as Debian (-current, -current-open) and others name it; not its companions such as nvidia-uvm.ko.
MODULE = re.compile(r"nvidia(-(current|open|tesla|legacy)[a-z0-9-]*)?\.ko(\.(gz|xz|zst))?")
COMPANION = re.compile(r"-(uvm|drm|modeset|peermem)\.ko")
SOURCE_PARTS = "/etc/apt/sources.list.d"
OWN_SOURCES = "trainyard-nvidia.sources"  # this and BLACKLIST as in roles/nvidia/vars/main/paths.yml
MOK = "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"  # the keys that the machine's owner has enrolled
KNOWN = "db-d719b2cb-3d3a-4596-a3bc-dad00e67656f"  # and those of the firmware itself
DKMS = "/etc/dkms/framework.conf"
KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")  # DKMS' own: Debian's, Ubuntu's
BLACKLIST = "/etc/modprobe.d/trainyard-nvidia.conf"
UNITS = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")
DAEMON_FILE = "/etc/systemd/system/nvidia-persistenced.service.d/trainyard.conf"
UNIT_PATHS = ("/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system")
THERE = ("installed", "half-configured", "half-installed", "unpacked", "triggers-awaited", "triggers-pending")
# It works; with triggers a file of links, say, is still to be made.
CONFIGURED = ("installed", "triggers-awaited", "triggers-pending")
CLEVIS = "/usr/share/initramfs-tools/hooks/clevis"
UNASKED = re.compile(r"(^|,)(noauto|tpm2-device=)")  # of crypttab: opened later, or by the machine itself
OPTIONS = {"signed-by": "Signed-By", "trusted": "Trusted", "arch": "Architectures"}  # of a one-line source


def read(path: str) -> str:
    """The text of a file, stripped; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def devices(root: str) -> list[dict]:
    """NVIDIA's PCI devices: {address, device (4 hexadecimal digits), class (4), driver or None}, in PCI's order."""
    found = []
    for path in sorted(glob.glob(f"{root}/sys/bus/pci/devices/*")):
        device = read(f"{path}/device").removeprefix("0x").lower()
        if read(f"{path}/vendor").removeprefix("0x") != NVIDIA or not device:  # or just unplugged
            continue
        driver = f"{path}/driver"
        found.append(
            {
                "address": os.path.basename(path),
                "device": device,
                "class": read(f"{path}/class").removeprefix("0x")[:4],
                "driver": os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else None,
            }
        )
    return found


def is_nvswitch(device: dict) -> bool:
    return device["class"] == BRIDGE and int(device["device"] or "0", 16) >= OLDEST_NVSWITCH


def loaded_module(root: str) -> dict | None:
    """{version, open} of the nvidia module in the running kernel; None without one."""
    version = read(f"{root}/sys/module/nvidia/version")
    line = read(f"{root}/proc/driver/nvidia/version").split("\n")[0]
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", line)
    version = version or (found[0] if found else "")
    return {"version": version, "open": "Open Kernel Module" in line} if version else None


def built_modules(kernel: str) -> list[dict]:
    """{path, version, open} of each nvidia.ko that is installed for `kernel`."""
    found = []
    for folder, _, names in os.walk(f"/lib/modules/{kernel}"):
        for name in sorted(names):
            if MODULE.fullmatch(name) and not COMPANION.search(name):
                path = os.path.join(folder, name)
                version, terms = modinfo(path, "version"), modinfo(path, "license")
                if version:
                    found.append({"path": path, "version": version, "open": "GPL" in terms})
    return sorted(found, key=lambda module: module["path"])


def modinfo(path: str, field: str) -> str:
    try:
        done = subprocess.run(["/sbin/modinfo", "-F", field, path], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def secure_boot(root: str) -> bool | None:
    """Whether the firmware lets only signed modules in; None on a machine that did not start by EFI."""
    try:
        with open(f"{root}/sys/firmware/efi/efivars/{SECURE_BOOT}", "rb") as file:
            content = file.read()
    except OSError:
        return None
    return content[4:5] == b"\1"  # four bytes of attributes stand before the value


def enrolled(root: str) -> bool | None:
    """Whether a key by which DKMS signs is among those that the owner has enrolled; None where that is not told."""
    if re.search(rb"^\s*mok_(certificate|signing_key)=", content_of(DKMS), re.MULTILINE):
        return None  # by a key somewhere else
    keys = [content for path in KEYS if (content := content_of(path))]
    places = f"{root}/sys/firmware/efi/efivars"
    parts = sorted(glob.glob(f"{places}/{MOK[:9]}*{MOK[9:]}"))
    known = b"".join(map(content_of, [*parts, f"{places}/{KNOWN}"]))
    return any(key in known for key in keys) if keys and known else None


def content_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def packages() -> tuple[list[dict], list[str], list[str]]:
    """NVIDIA's packages, {name, version, source, held, whole}, the kernel packages that follow the newest, and which of
    those come from backports.

    Names are as apt has them: a 32-bit library of games is libcuda1:i386, held by that name and taken for no other.
    A package is not whole where its installation broke off, such as at a module that does not compile.
    """
    form = (
        "${Package}:${Architecture}\t${Version}\t${source:Package}\t${db:Status-Want}\t${db:Status-Status}\n"
    )
    done = subprocess.run(["dpkg-query", "--show", f"--showformat={form}"], capture_output=True, text=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    # Not by ${binary:Package}, which has a library's own architecture, too.
    native = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True).stdout.strip()
    rows = [
        [row[0].removesuffix(f":{native}").removesuffix(":all"), *row[1:]]
        for row in rows
        if len(row) == 5 and row[4] in THERE
    ]
    ours = [
        {
            **{"name": row[0], "version": row[1], "source": row[2]},
            "held": row[3] == "hold",
            "whole": row[4] in CONFIGURED,
        }
        for row in rows
        if OURS.search(row[0]) or OURS.search(row[2])
    ]
    kernels = [row for row in rows if KERNEL_PACKAGE.fullmatch(row[0])]
    return ours, [row[0] for row in kernels], [row[0] for row in kernels if "~bpo" in row[1]]


def sources(paths: list[str]) -> list[dict]:
    """apt's sources of packages in the files `paths`: {uris, suites, components (lists), options (deb822's)}."""
    found = []
    for path in paths:
        found += stanzas(read(path)) if path.endswith(".sources") else lines(read(path))
    return found


def lines(text: str) -> list[dict]:
    """The sources of a file of one-line sources."""
    found = []
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line.strip())
        if match:
            settings, uri, suite, components = match.groups()
            pairs = [word.partition("=") for word in (settings or "").split()]
            options = {OPTIONS[key]: value.replace(",", " ") for key, _, value in pairs if key in OPTIONS}
            found.append(
                {"uris": [uri], "suites": [suite], "components": components.split(), "options": options}
            )
    return found


def stanzas(text: str) -> list[dict]:
    """The sources of a deb822 file that are enabled."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:  # a key in the file itself goes on over lines
                fields[last] += "\n" + line
            elif ":" in line:
                last, _, value = line.partition(":")
                last = last.lower()
                fields[last] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in (
            "no",
            "false",
        ):
            options = {name: fields[name.lower()] for name in OPTIONS.values() if name.lower() in fields}
            found.append(
                {
                    **{key: fields.get(key, "").split() for key in ("uris", "suites", "components")},
                    "options": options,
                }
            )
    return found


def source_files() -> list[str]:
    """The files of apt's sources, but for the role's own."""
    found = sorted(glob.glob(f"{SOURCE_PARTS}/*.list") + glob.glob(f"{SOURCE_PARTS}/*.sources"))
    return ["/etc/apt/sources.list", *(path for path in found if os.path.basename(path) != OWN_SOURCES)]


def initramfs_stale(kernel: str) -> bool:
    """Whether the initramfs is older than the file that keeps nouveau out, so that it would still load it."""
    image = f"/boot/initrd.img-{kernel}"
    if not all(map(os.path.exists, ("/usr/sbin/update-initramfs", image, BLACKLIST))):
        return False
    return os.path.getmtime(image) < os.path.getmtime(BLACKLIST)


def daemon_stale(run_command, path: str = DAEMON_FILE) -> bool:
    """Whether the daemon has not got the role's settings: a run may have ended between the file and the restart.

    Packages that were installed since may have had systemd read it, which restarts nothing.
    """
    daemon = service(run_command, UNITS[0])
    return daemon["unread"] or stale(daemon["started"], path)


def passphrases(path: str = "/etc/crypttab") -> list[str]:
    """The encrypted volumes of which the machine asks somebody at its keyboard when it starts.

    Where clevis is there, it is taken for what opens them.
    """
    if os.path.exists(CLEVIS):
        return []
    rows = [line.split() for line in read(path).splitlines() if not line.lstrip().startswith("#")]
    rows = [[*row, "none", ""][:4] if len(row) == 2 else [*row, ""][:4] for row in rows if len(row) >= 2]
    return [name for name, _, key, options in rows if key in ("none", "-") and not UNASKED.search(options)]


def free_bytes(path: str) -> int:
    """Bytes that are free where `path` lies, or its nearest parent that exists."""
    stat = os.statvfs(nearest(path))
    return stat.f_bavail * stat.f_frsize


def survey(root: str, kernel: str) -> dict:
    """All of it. `root`: where /sys and /proc are, empty for the host's own. `kernel`: a release."""
    found = devices(root)
    ours, kernels, backported = packages()
    return {
        "cards": [device for device in found if device["class"] in DISPLAY],
        "nvswitches": sum(map(is_nvswitch, found)),
        "loaded": loaded_module(root),
        "nouveau": os.path.isdir(f"{root}/sys/module/nouveau"),
        "secure_boot": secure_boot(root),
        "enrolled": enrolled(root),
        "container": in_container(),
        "kernel": kernel,
        "headers": os.path.isdir(f"/lib/modules/{kernel}/build/"),
        "modules": built_modules(kernel),
        "packages": ours,
        "kernel_packages": kernels,
        "kernels_backported": backported,
        "runfile": os.path.exists("/usr/bin/nvidia-uninstall"),
        # What nvidia-prime says of a laptop with two GPUs: off, on-demand or on; "" elsewhere.
        "prime": read("/etc/prime-discrete"),
        "passphrases": passphrases(),
        "desktop": os.path.exists("/etc/systemd/system/display-manager.service"),
        "initramfs_stale": initramfs_stale(kernel),
        "units": [name for name in UNITS if any(os.path.exists(f"{path}/{name}") for path in UNIT_PATHS)],
        "device_nodes": len(glob.glob(f"{root}/dev/nvidia[0-9]*")),
        "sources": sources(source_files()),
        "own_sources": os.path.exists(f"{SOURCE_PARTS}/{OWN_SOURCES}"),
        "free_bytes": {path: free_bytes(path) for path in ("/usr", "/var/lib/dkms", "/boot")},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sys_root": {"type": "str", "default": ""},
            "kernel": {"type": "str", "default": ""},
            "state_dir": {"type": "path", "default": "/var/lib/trainyard"},
        },
        supports_check_mode=True,
    )
    kernel = module.params["kernel"] or os.uname().release
    try:
        answers = survey(module.params["sys_root"].rstrip("/"), kernel)
        answers["runs"] = active_runs(module.run_command, "systemd", module.params["state_dir"])
        answers["daemon_stale"] = daemon_stale(module.run_command)
        session = ssh_session()
        answers["from_itself"] = not session or not from_elsewhere(session["client"], session["address"])
    except (OSError, ValueError) as error:
        module.fail_json(
            msg=f"this host cannot be read: {error}. Trainyard serves Debian and Ubuntu, as root."
        )
    module.exit_json(changed=False, survey=answers)


if __name__ == "__main__":
    main()
