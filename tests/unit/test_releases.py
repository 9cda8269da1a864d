"""What differs between the releases that Trainyard serves, but for drivers (test_nvidia_packages.py): names of
packages, and which Python comes with each."""

import itertools
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SUITES = {"Debian": ("bookworm", "trixie"), "Ubuntu": ("jammy", "noble")}
# Packages that all four releases have by this name, by their own package lists. Ubuntu's are in main and universe.
EVERYWHERE = {
    "chrony",
    "etcd-server",
    "ibverbs-providers",
    "ibverbs-utils",
    "infiniband-diags",
    "iperf3",
    "netplan.io",
    "nfs-common",
    "nfs-kernel-server",
    "nftables",
    "opensm",
    "perftest",
    "prometheus",
    "prometheus-node-exporter",
    "python3",
    "python3-venv",
    "rdma-core",
    "systemd-timesyncd",
}
# Packages that none of them has, and that a role has installed only where apt knows them.
ELSEWHERE = {"grafana", "datacenter-gpu-manager-exporter"}


def strings(value):
    """Every string of a YAML document, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from (((key, *keys), text) for keys, text in strings(one))
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, str):
        yield (), value


def names_of_packages():
    """(file, name) of every package that a role has installed by name."""
    for path in sorted(ROOT.glob("roles/*/[tv]a*/*.yml")):
        for keys, text in strings(yaml.safe_load(path.read_text())):
            asked = {"packages_names", "package"} & set(keys) or (
                keys[-1:] and keys[-1].endswith("_packages")
            )
            if (asked or keys[-2:] == ("packages", "names")) and "{{" not in text:
                yield path.relative_to(ROOT), text


def test_each_package_has_its_name_in_every_release():
    found = list(names_of_packages())
    unknown = [f"{path}: {name}" for path, name in found if name not in EVERYWHERE | ELSEWHERE]
    assert not unknown, "not known to be in Debian 12 and 13, Ubuntu 22.04 and 24.04:\n" + "\n".join(unknown)
    assert EVERYWHERE - {name for _, name in found} <= {"iperf3"}, "no role installs it any more"


def test_apt_of_this_release_agrees():
    """The lists above, held against what they are of: apt's, of whichever of the four releases this machine runs."""
    tool = shutil.which("apt-cache")
    known = (
        tool and subprocess.run([tool, "dumpavail"], capture_output=True, text=True, errors="replace").stdout
    )
    offered = set(re.findall(r"(?m)^Package: (\S+)$", known or ""))
    if not any(name.startswith("linux-image-") for name in offered):
        pytest.skip("no apt here that has a distribution's packages listed")
    release = platform.freedesktop_os_release()
    if release.get("VERSION_CODENAME") not in itertools.chain(*SUITES.values()):
        pytest.skip("a release that is none of the four")
    if release["ID"] == "ubuntu" and "Section: universe/" not in known:
        pytest.skip("an apt without universe")
    assert offered >= EVERYWHERE
    policy = subprocess.run([tool, "policy"], capture_output=True, text=True, errors="replace").stdout
    if set(re.findall(r"\bo=([^,\n]+)", policy)) <= set(
        SUITES
    ):  # nobody else's repository, who may have them
        assert not ELSEWHERE & offered


@pytest.mark.parametrize(
    "role", sorted(path.parent.parent.name for path in ROOT.glob("roles/*/meta/main.yml"))
)
def test_a_role_says_which_releases_it_serves(role):
    info = yaml.safe_load((ROOT / f"roles/{role}/meta/main.yml").read_text())["galaxy_info"]
    served = {(one["name"], version) for one in info["platforms"] for version in one["versions"]}
    assert served == {(name, suite) for name, suites in SUITES.items() for suite in suites}
