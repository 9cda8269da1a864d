"""The trainer's wheel, built once on the controller and named by what is in it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

KEPT = 3


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


def package_files(root: Path) -> list[Path]:
    """The files that the wheel is made of: modules, and the data that pyproject.toml names.

    What an editor or a tool leaves beside them is none: a run is refused where the hosts have another version.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    found = set((root / "trainer").rglob("*.py"))
    for package, patterns in project["tool"]["setuptools"].get("package-data", {}).items():
        found |= {path for pattern in patterns for path in root.joinpath(*package.split(".")).glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def content_version(root: Path) -> str:
    """The project's version with a hash of all that its wheel is made of."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    digest = hashlib.sha256()
    built_by = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    digest.update(json.dumps(built_by, sort_keys=True).encode())
    for path in package_files(root):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    return f"{project['project']['version']}+g{digest.hexdigest()[:8]}"


def build(root: Path, version: str, directory: Path) -> Path:
    """The wheel of this version in `directory`, built from a copy, without a network."""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        copy = Path(temporary) / "source"
        for path in package_files(root):
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        project = (root / "pyproject.toml").read_text()
        project = re.sub(r'^version = ".*"$', f'version = "{version}"', project, count=1, flags=re.MULTILINE)
        # The wheel goes to hosts, not to an index.
        project = re.sub(r"^readme = .*\n", "", project, count=1, flags=re.MULTILINE)
        (copy / "pyproject.toml").write_text(project)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--no-build-isolation", "--no-index", "--wheel-dir", temporary, str(copy)]
        # The time stamps in the wheel: those of its source, not of this moment.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=temporary)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
            raise Failure(
                f"the trainer's wheel could not be built by {sys.executable}:\n{last}\n"
                "It needs pip, setuptools and wheel, which Trainyard's own environment has: make venv."
            )
        (built,) = Path(temporary).glob("*.whl")
        return built.rename(directory / built.name)


def trainer_wheel(root: Path, directory: Path) -> tuple[str, Path, bool]:
    """(version, wheel, whether it was built now) of the checkout `root`'s trainer; several hosts may ask at once."""
    directory.mkdir(parents=True, exist_ok=True)
    version = content_version(root)
    with (directory / ".lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        wheel = directory / f"trainyard-{version}-py3-none-any.whl"
        if zipfile.is_zipfile(wheel):  # of one that a power cut emptied there is but the name
            return version, wheel, False
        wheel = build(root, version, directory)
        for old in sorted(directory.glob("trainyard-*.whl"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        return version, wheel, True
