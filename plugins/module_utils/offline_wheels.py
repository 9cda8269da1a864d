"""The wheels of an environment, downloaded once on the controller for a host that reaches no index.

Runs on the controller. pip is told the host's Python and platform; which packages the host needs is
worked out here, because pip judges a requirement's markers by the Python that it runs on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection
from email.parser import HeaderParser
from pathlib import Path

from how_far import Pip, followed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

COLLECTED = 2  # how wheels are collected: another number is another directory
OLDEST_GLIBC = 35  # of the releases that roles serve: Ubuntu 22.04's is 2.35


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def locked_for(lock: str, markers: dict[str, str]) -> dict[str, str]:
    """Name -> line (version, hashes) of the packages of a lock that a machine with these markers needs."""
    needed = {}
    for line in lock.replace("\\\n", " ").splitlines():
        pinned, *hashes = line.split(" --hash=")
        if pinned.strip() and not pinned.startswith("#"):
            requirement = Requirement(pinned.strip())
            if requirement.marker is None or requirement.marker.evaluate(markers):
                line = f"{requirement.name}{requirement.specifier}"
                needed[canonicalize_name(requirement.name)] = " ".join(
                    [line, *(f"--hash={digest.strip()}" for digest in hashes)]
                )
    return needed


def asked_by(wheel: Path, markers: dict[str, str], extras: Collection[str] = ()) -> dict[str, Requirement]:
    """Name -> requirement of what a wheel asks for on a machine with these markers, with these of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    asked: dict[str, Requirement] = {}
    for text in metadata.get_all("Requires-Dist", []):
        requirement, among = Requirement(text), ("", *extras)
        if requirement.marker is None or any(
            requirement.marker.evaluate({**markers, "extra": extra}) for extra in among
        ):
            name = canonicalize_name(requirement.name)
            asked[name] = joined(asked.get(name), requirement)
    return asked


def joined(one: Requirement | None, other: Requirement) -> Requirement:
    """What serves both: all versions that both allow, the extras of each; without a marker."""
    found = Requirement(other.name)
    found.extras = {*(one.extras if one else ()), *other.extras}
    found.specifier = one.specifier & other.specifier if one else other.specifier
    return found


def platform_options(target: dict) -> list[str]:
    """pip's options that say for which interpreter and platform to choose wheels."""
    markers = target["markers"]
    machine = markers["platform_machine"]
    major, minor = (int(part) for part in target["glibc"].split(".")[:2])
    if markers["sys_platform"] != "linux" or major != 2:
        raise Failure(f"wheels can be brought to Linux with glibc 2 only; this is {markers['sys_platform']}.")
    # Wheels name the oldest glibc that they run with; the names before 2.17 have years in them.
    # What is collected serves all hosts of one Python, whose distributions may differ.
    platforms = [f"manylinux_2_{number}_{machine}" for number in range(min(minor, OLDEST_GLIBC), 4, -1)]
    platforms += [f"manylinux{year}_{machine}" for year in (2014, 2010, 1)] + [f"linux_{machine}"]
    version = markers["python_version"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    for abi in (f"cp{version.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    for platform in platforms:
        options += ["--platform", platform]
    return options


def download(
    requirements: list[str],
    target: dict,
    directory: Path,
    *options: str,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Let the controller's pip, set up as it is, download these wheels for the host, and no dependencies.

    say: gets, each second, how far it is.
    """
    listed, temporary = directory / "requirements.txt", directory / "temporary"
    listed.write_text("".join(f"{line}\n" for line in requirements))
    temporary.mkdir()  # where it is seen to grow; and /tmp may be memory
    command = [sys.executable, "-m", "pip", "download", "--progress-bar=off", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", *platform_options(target), *options]
    command += ["--dest", str(directory), "--requirement", str(listed)]
    pip = Pip(str(temporary), list, len(requirements))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A constraint for all that this machine installs (NVIDIA's containers have one) is not for the lock.
        env={**os.environ, "TMPDIR": str(temporary), "PIP_CONSTRAINT": os.devnull},
    )
    code, output = followed(process, pip.hear, lambda: say(f"the controller: {pip.now()}"))
    listed.unlink()
    shutil.rmtree(temporary)
    if code == 0:
        return
    last = "\n".join([line for line in output.splitlines() if line.strip()][-6:])
    markers = target["markers"]
    if "No module named pip" in last:
        raise Failure(
            f"the controller's Python, {sys.executable}, has no pip. Use Trainyard's own: make venv."
        )
    if "No matching distribution" in last:
        raise Failure(
            "pip on the controller finds no build for the host's Python "
            f"{markers['python_version']} on {markers['platform_machine']}:\n{last}\n"
            "Put the wheel where the controller's pip looks (pip config set global.find-links FOLDER), or set "
            "python_env_torch or the host's python_env_python to what there is a build for."
        )
    raise Failure(f"pip on the controller could not download wheels:\n{last}")


def wheel_of(name: str, directory: Path) -> Path:
    """The wheel of a package in a directory."""
    (found,) = [path for path in directory.glob("*.whl") if parse_wheel_filename(path.name)[0] == name]
    return found


def collect(lock: str, torch: str, target: dict, directory: Path, say: Callable[[str], None]) -> None:
    """Download all wheels for `target`: the lock's, and torch with what it asks for besides."""
    markers = target["markers"]
    locked = locked_for(lock, markers)
    download(list(locked.values()), target, directory, "--require-hashes", say=say)
    # A CUDA build of torch asks for NVIDIA's packages by extras of cuda-toolkit, which pins them, and some of them ask
    # for others in any version: what all allow is taken, whoever asked first.
    there: dict[str, Requirement] = {}
    wanted = {canonicalize_name(Requirement(torch).name): Requirement(torch)}
    while wanted:
        missing = [one for name, one in wanted.items() if not _kept(directory, name, one)]
        if missing:
            download(list(map(str, missing)), target, directory, say=say)
        there |= wanted
        asked: dict[str, Requirement] = {}
        for name, one in wanted.items():
            for other, more in asked_by(wheel_of(name, directory), markers, one.extras).items():
                if other not in locked:
                    asked[other] = joined(asked.get(other) or there.get(other), more)
        wanted = {name: one for name, one in asked.items() if one != there.get(name)}


def _kept(directory: Path, name: str, wanted: Requirement) -> bool:
    """Remove a wheel of that name that does not serve; whether one is there that does."""
    for path in directory.glob("*.whl"):
        found, version, *_ = parse_wheel_filename(path.name)
        if found == name:
            if wanted.specifier.contains(version, prereleases=True):
                return True
            path.unlink()
    return False


def wheelhouse(
    lock: str,
    torch: str,
    target: dict,
    directory: Path,
    tell: Callable[[str], None] = lambda text: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Name -> SHA-256 of the wheels in `directory`, downloaded if need be; several hosts may ask at once.

    tell: gets what everybody should know; say: each second, how far it is.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    say("the controller has the wheels of another host first")
    with open(f"{directory}.lock", "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        manifest = directory / "manifest.json"
        if manifest.exists():
            wheels = json.loads(manifest.read_text())
            if all((directory / name).is_file() for name in wheels):
                return wheels
        tell(f"downloading wheels for Python {target['markers']['python_version']}, once for all such hosts")
        shutil.rmtree(directory, ignore_errors=True)
        partial = Path(f"{directory}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        collect(lock, torch, target, partial, say)
        wheels = {path.name: sha256(path) for path in sorted(partial.glob("*.whl"))}
        os.sync()  # what a power cut would take of them, nobody would miss
        with (partial / "manifest.json").open("w") as stream:
            json.dump(wheels, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(directory)
        return wheels
