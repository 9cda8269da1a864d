#!/usr/bin/python3
"""A repository as NVIDIA's is for this release, whose packages hold next to nothing: a driver of 580, old and new."""

import hashlib
import pathlib
import re
import struct
import subprocess

RELEASE = re.search(r'VERSION_ID="?(\d+)', pathlib.Path("/etc/os-release").read_text())[1]
PLACE = pathlib.Path(f"/opt/nvidia/debian{RELEASE}/x86_64")
UNIT = "[Service]\nExecStart=/bin/sleep infinity\n"


def module(version):
    """A kernel module that says what it is, and can do nothing: an ELF file with a section .modinfo."""
    names = b"\0.modinfo\0.shstrtab\0"
    info = f"version={version}\0license=Dual MIT/GPL\0".encode()
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(b"\x7fELF\2\1\1", 1, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 2),
    )
    place = 64 + 3 * 64  # behind the header and the table of sections
    table = bytes(64)
    for name, kind, start, size in ((1, 1, place, len(info)), (10, 3, place + len(info), len(names))):
        table += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, start, size, 0, 0, 1, 0)
    return header + table + info + names


def build(name, version, depends="", files=None):
    """One package; returns its stanza of the index."""
    root = PLACE / "build"
    said = {"Package": name, "Version": f"{version}-1", "Architecture": "amd64", "Source": "nvidia"}
    said |= {"Maintainer": "nobody <nobody@localhost>", "Description": "made up"}
    said |= {"Depends": depends} if depends else {}
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text("".join(f"{key}: {value}\n" for key, value in said.items()))
    for path, content in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
        (root / path).chmod(0o755)
    package = PLACE / f"{name}_{version}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, package], check=True)
    subprocess.run(["rm", "-r", root], check=True)
    content = package.read_bytes()
    said |= {"Filename": package.name, "Size": len(content), "SHA256": hashlib.sha256(content).hexdigest()}
    return "".join(f"{key}: {value}\n" for key, value in said.items())


index = []
for version in ("580.82.07", "580.95.05"):
    same = f"(= {version}-1)"
    smi = f"#!/bin/sh\necho '00000000:01:00.0, {version}'\n"
    kernel = "lib/modules/6.1.0-molecule/updates/dkms/nvidia.ko"
    index += [
        build("libcuda1", version),
        build("nvidia-smi", version, files={"usr/bin/nvidia-smi": smi}),
        build("nvidia-driver-cuda", version, f"libcuda1 {same}, nvidia-smi {same}"),
        build("nvidia-persistenced", version, files={"lib/systemd/system/nvidia-persistenced.service": UNIT}),
        build("nvidia-kernel-open-dkms", version, files={kernel: module(version)}),
    ]
(PLACE / "Packages").write_text("\n".join(index))
# One of the host's own, as somebody has it who installed CUDA by hand: it needs no key of NVIDIA's.
source = f"deb [trusted=yes] file:{PLACE} ./\n"
pathlib.Path("/etc/apt/sources.list.d/nvidia.list").write_text(source)
