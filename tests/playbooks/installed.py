"""Programs of the distribution that tests want; `make test` as root installs what lacks."""

import os
import shutil
import subprocess

import pytest

APT = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]


def have(program, *packages):
    """Skips, with the reason, where `program` is not there and may not be installed from `packages`."""
    if shutil.which(program):
        return
    if os.geteuid() != 0 or os.environ.get("TRAINYARD_INSTALL") != "1":
        pytest.skip(f"no {program} here: apt install {packages[0]}, or make test as root")
    subprocess.run([*APT, "update"], check=True)
    subprocess.run(
        [*APT, "install", "-y", "--no-install-recommends", *packages],
        check=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.DEVNULL,
    )


def unpacked(package, folder):
    """The files of a package, below `folder` and nowhere else: no service of it starts. Skips as `have` does."""
    if shutil.which("apt-get") is None or os.geteuid() != 0 or os.environ.get("TRAINYARD_INSTALL") != "1":
        pytest.skip(f"{package} is unpacked by make test as root, with apt")
    subprocess.run([*APT, "update"], check=True)
    # As root, for apt's own user does not get into a test's folder.
    words = [*APT, "-o", "APT::Sandbox::User=root", "download", package]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg", "-x", archive, folder], check=True)
    return folder
