"""Programs of the distribution that tests want; `make test` as root installs what lacks."""

import os
import shutil
import subprocess

import pytest


def have(program, *packages):
    """Skips, with the reason, where `program` is not there and may not be installed from `packages`."""
    if shutil.which(program):
        return
    if os.geteuid() != 0 or os.environ.get("TRAINYARD_INSTALL") != "1":
        pytest.skip(f"no {program} here: apt install {packages[0]}, or make test as root")
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run(
        [*apt, "install", "-y", "--no-install-recommends", *packages],
        check=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.DEVNULL,
    )
