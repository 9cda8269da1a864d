"""The root that every host starts from: a stock minimal machine, built once and kept.

Roles must install what they need, so nothing is here that a fresh installation would not have.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from lab import machine
from lab.shell import LabError, locked, run

CACHE = Path("/var/cache/trainyard-lab")
PACKAGES = (
    "systemd-sysv",
    "dbus",
    "libpam-systemd",
    "udev",
    "openssh-server",
    "python3",
    "sudo",
    "iproute2",
    "ca-certificates",
)
# What Ubuntu's server has besides. Its network is netplan's, its resolver systemd-resolved.
SERVER = ("ubuntu-minimal", "cloud-init", "systemd-timesyncd", "ufw", "unattended-upgrades")
UBUNTU_PACKAGES = {"jammy": SERVER, "noble": (*SERVER, "systemd-resolved")}
# Of the archive's package of its own keys: the one thing that is trusted before they are known.
UBUNTU_KEYS = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
UBUNTU_KEYS_SHA256 = "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f"

# What an installer would have done. Host keys and the machine's id are each host's own.
CUSTOMIZE = """
set -eu
cd "$1"
chroot . useradd --create-home --shell /bin/bash --groups sudo ops
if grep -q ^ID=ubuntu etc/os-release; then
  ln -sf ../run/systemd/resolve/stub-resolv.conf etc/resolv.conf
else
  chroot . systemctl enable --quiet systemd-networkd ssh
fi
rm -f etc/ssh/ssh_host_* etc/apt/sources.list.d/* etc/apt/sources.list etc/apt/apt.conf.d/99mmdebstrap
cp -- "$LAB_FILES/machine.sources" etc/apt/sources.list.d/
test ! -s "$LAB_FILES/apt.conf" || cp -- "$LAB_FILES/apt.conf" etc/apt/apt.conf.d/90machine
if test -s "$LAB_FILES/ca.crt"; then
  mkdir -p usr/local/share/ca-certificates
  csplit --quiet --elide-empty-files --prefix=usr/local/share/ca-certificates/machine- --suffix-format=%03d.crt \
    "$LAB_FILES/ca.crt" '/-----BEGIN CERTIFICATE-----/' '{*}'
  chroot . update-ca-certificates >/dev/null
fi
: > etc/machine-id
rm -f var/lib/dbus/machine-id
"""


def ready(suite: str, *more: str) -> Path:
    """The cached root for SUITE, with MORE packages; built now if it is not there, or if apt's sources or certificates
    have changed.
    """
    packages = (*PACKAGES, *UBUNTU_PACKAGES.get(suite, ()), *more)
    stanzas = machine.distribution_sources(suite)
    files = {
        "machine.sources": machine.sources_text(stanzas),
        "apt.conf": machine.acquire_settings(),
        "ca.crt": _local_certificates(),
    }
    key = hashlib.sha256(
        repr((packages, CUSTOMIZE, suite, os.uname().machine, sorted(files.items()))).encode()
    ).hexdigest()
    root = CACHE / f"{suite}-{key[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    CACHE.chmod(0o700)  # its setuid programs get no security updates, and its pip.conf may hold a password
    if not root.exists():
        with locked(CACHE / ".lock", waiting="Waiting for another build of a root …"):
            for broken in CACHE.glob(".building-*"):  # nobody builds now: its builder was killed
                shutil.rmtree(broken)
            if not root.exists():
                _build(root, suite, packages, stanzas, files)
    return root


def _local_certificates() -> str:
    """Certificates that this machine trusts beyond the distribution's own: a company's, a proxy's."""
    shipped = set()
    for file in Path("/usr/share/ca-certificates").rglob("*.crt"):
        shipped |= set(_certificates(file))
    return "".join(text for text in _certificates(machine.CA_BUNDLE) if text not in shipped)


def _certificates(file: Path) -> list[str]:
    if not file.exists():
        return []
    return [
        f"{text}\n"
        for text in re.findall(r"-----BEGIN CERT.*?-----END CERTIFICATE-----", file.read_text(), re.DOTALL)
    ]


def _keys_here(work: Path, stanzas: list[dict[str, str]], sources: str) -> str:
    """SOURCES, with Ubuntu's keys where this machine lacks them: from the mirror, known by its package's hash."""
    if machine.UBUNTU_KEYRING not in sources or Path(machine.UBUNTU_KEYRING).exists():
        return sources
    package, unpacked = work / "keys.deb", work / "keys"
    uri = f"{stanzas[0]['URIs'].rstrip('/')}/{UBUNTU_KEYS}"
    try:
        run("/usr/lib/apt/apt-helper", "download-file", uri, package, f"SHA256:{UBUNTU_KEYS_SHA256}")
    except LabError as error:
        raise LabError(
            f"{error}. Name another mirror of Ubuntu by the environment variable TRAINYARD_LAB_UBUNTU=URI"
        ) from None
    run("dpkg-deb", "--extract", package, unpacked)
    return sources.replace(machine.UBUNTU_KEYRING, f"{unpacked}{machine.UBUNTU_KEYRING}")


def _build(
    root: Path, suite: str, packages: tuple[str, ...], stanzas: list[dict[str, str]], files: dict[str, str]
) -> None:
    """Under a temporary name, in mount and process namespaces that die with this process; the name comes last."""
    print(f"Building a stock {suite} root, once (about a minute) …", flush=True)
    work = CACHE / f".building-{root.name}"
    work.mkdir(mode=0o700)
    for name, text in files.items():
        (work / name).write_text(text)
    (work / "customize").write_text(CUSTOMIZE)
    (work / "build.sources").write_text(_keys_here(work, stanzas, files["machine.sources"]))
    options = [f"--aptopt={line}" for line in files["apt.conf"].splitlines()]
    own_namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    try:
        run(
            *["setpriv", "--pdeathsig", "KILL", *own_namespaces, "env", f"LAB_FILES={work}"],
            *[
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                f"--include={','.join(packages)}",
                *options,
            ],
            *[f'--customize-hook=sh {work}/customize "$1"', suite, work / "root", work / "build.sources"],
        )
    except LabError as error:
        raise LabError(f"building the {suite} root failed. {error}") from None
    for file in machine.keyrings(stanzas):
        there = work / "root" / file.relative_to("/")
        if file.exists() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, there)
    (work / "root").rename(root)
    shutil.rmtree(work)
