"""The trainer's wheel and its releases: built once, tested before the switch, the old one untouched when that fails."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))

from ansible.module_utils.received_files import sha256  # noqa: E402

from plugins.module_utils import trainer_wheel  # noqa: E402
from plugins.modules import trainer_release  # noqa: E402

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "trainyard"
version = "0.1.0"
readme = "README.md"
[tool.setuptools.packages.find]
include = ["trainer*"]
[tool.ruff]
line-length = 100
"""
GOOD = "import sys\nprint('usage:', sys.argv[1:])\n"


def checkout(root, main=GOOD):
    """A checkout with a trainer of one file."""
    (root / "trainer" / "__pycache__").mkdir(parents=True)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "README.md").write_text("Read me.\n")
    (root / "trainer" / "__init__.py").write_text("")
    (root / "trainer" / "__main__.py").write_text(main)
    (root / "trainer" / "__pycache__" / "x.pyc").write_text("compiled")
    return root


def test_the_version_follows_what_the_wheel_is_made_of_and_nothing_else(tmp_path):
    root = checkout(tmp_path)
    version = trainer_wheel.content_version(root)
    assert version.startswith("0.1.0+g")
    (root / "README.md").write_text("Read me more.\n")
    (root / "trainer" / "__pycache__" / "x.pyc").write_text("compiled anew")
    (root / "pyproject.toml").write_text(PROJECT.replace("100", "110"))
    assert trainer_wheel.content_version(root) == version
    (root / "trainer" / "__main__.py").write_text(GOOD + "#\n")
    changed = trainer_wheel.content_version(root)
    assert changed != version
    (root / "trainer" / "__main__.py").rename(root / "trainer" / "other.py")
    assert trainer_wheel.content_version(root) not in (version, changed)


def test_what_editors_leave_beside_the_modules_makes_no_other_version(tmp_path):
    """A run is refused where the hosts have another one."""
    root = checkout(tmp_path)
    data = root / "trainer/texts"
    data.mkdir()
    (data / "austen.txt").write_text("Emma")
    named = PROJECT + '[tool.setuptools.package-data]\n"trainer" = ["texts/*"]\n'
    (root / "pyproject.toml").write_text(named)
    version = trainer_wheel.content_version(root)
    for left in (
        "__main__.py~",
        ".__main__.py.swp",
        "__main__.py.orig",
        ".#other.py",
        "texts/.austen.txt.swp",
    ):
        (root / "trainer" / left).write_text("left")
    assert trainer_wheel.content_version(root) == version
    (data / "austen.txt").write_text("Emma Woodhouse")
    assert trainer_wheel.content_version(root) != version


def test_the_wheel_is_built_once_for_the_same_content(tmp_path):
    root = checkout(tmp_path / "source dir")
    version, wheel, built = trainer_wheel.trainer_wheel(root, tmp_path / "dist")
    assert built
    assert wheel.name == f"trainyard-{version}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "trainer/__main__.py" in names
    assert not any("pyc" in name for name in names)
    first = sha256(str(wheel))
    assert trainer_wheel.trainer_wheel(root, tmp_path / "dist") == (version, wheel, False)
    wheel.unlink()
    assert trainer_wheel.trainer_wheel(root, tmp_path / "dist")[2]
    assert sha256(str(wheel)) == first, "the same content makes the same wheel"
    assert sorted(path.name for path in root.iterdir()) == ["README.md", "pyproject.toml", "trainer"]


def test_a_source_that_does_not_build_is_said_with_the_cure(tmp_path):
    root = checkout(tmp_path / "source")
    (root / "pyproject.toml").write_text(PROJECT.replace("setuptools.build_meta", "no.such.backend"))
    with pytest.raises(trainer_wheel.Failure, match="make venv"):
        trainer_wheel.trainer_wheel(root, tmp_path / "dist")


# ---- releases ----


class Host:
    """A host with an environment, and a way to deploy a trainer whose __main__ is `main`."""

    def __init__(self, root):
        self.root = root
        self.opt = root / "opt dir"
        environment = root / "env" / ("e" * 16)
        (environment / "bin").mkdir(parents=True)
        (environment / ".complete").write_text("{}")
        (environment / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (environment / "bin" / "python").chmod(0o755)
        (root / "env" / "current").symlink_to(environment.name)
        self.environment = environment

    def options(self, version, **options):
        given = {
            "dir": str(self.opt),
            "env_dir": str(self.root / "env"),
            "user": None,
            "keep": 3,
            "version": version,
        }
        return {**given, "wheels": None, "archive": None, **options}

    def deploy(self, version, main=GOOD, **options):
        wheel = self.root / f"trainyard-{version}-py3-none-any.whl"
        info = f"trainyard-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("trainer/__init__.py", f"version = {version!r}\n")
            archive.writestr("trainer/__main__.py", main)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: trainyard\nVersion: {version}\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "trainer/__init__.py,,\ntrainer/__main__.py,,\n")
        with tarfile.open(self.root / "files.tar", "w") as archive:
            archive.add(wheel, arcname=wheel.name)
        brought = {"wheels": {wheel.name: sha256(str(wheel))}, "archive": str(self.root / "files.tar")}
        return trainer_release.have(self.options(version, **brought, **options), check_mode=False)

    def run(self, **options):
        command = [self.opt / "current" / "bin" / "trainer", "a b"]
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout

    def releases(self):
        return sorted(path.name for path in (self.opt / "releases").iterdir() if path.is_dir())


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_a_release_is_deployed_once_and_names_its_own_places(host, tmp_path):
    assert trainer_release.have(host.options("1.0"), check_mode=False) == {"changed": False, "wanted": True}
    first = host.deploy("1.0")
    assert first["changed"]
    assert first["release"] == "1.0-eeeeeeee"
    assert Path(first["path"], "environment").read_text().strip() == str(host.environment)
    again = trainer_release.have(host.options("1.0"), check_mode=False)
    assert not again["changed"]
    # Neither the directory that one is in, nor the caller's variables, put another trainer in its place.
    shadow = tmp_path / "shadow" / "trainer"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise SystemExit('shadowed')")
    environment = {**os.environ, "PYTHONPATH": str(shadow.parent)}
    assert host.run(cwd=shadow.parent, env=environment) == "usage: ['a b']\n"


def test_a_release_that_does_not_run_leaves_the_old_one_in_use(host):
    old = host.deploy("1.0")
    with pytest.raises(
        trainer_release.Failure, match=r"(?s)1\.0-eeeeeeee stays in use.*ImportError: no such thing"
    ):
        host.deploy("2.0", main="raise ImportError('no such thing')")
    assert os.path.realpath(host.opt / "current") == old["path"]
    assert host.releases() == ["1.0-eeeeeeee"]
    assert host.run()
    assert host.deploy("2.0")["before"] == "1.0-eeeeeeee"


def test_a_deploy_that_was_killed_is_finished_by_the_next(host):
    (host.opt / "releases" / ".1.0-eeeeeeee.new" / "lib" / "half").mkdir(parents=True)
    host.deploy("1.0")
    # Killed after the release was there and before it was in use: it is tested again.
    (host.opt / "current").unlink()
    result = trainer_release.have(host.options("1.0"), check_mode=False)
    assert result["changed"]
    assert host.run()
    assert host.releases() == ["1.0-eeeeeeee"]


def test_old_releases_go_but_not_one_that_runs(host):
    host.deploy("1.0", main="import sys\n'--help' in sys.argv or input()\n")
    process = subprocess.Popen([host.opt / "current" / "bin" / "trainer"], stdin=subprocess.PIPE)
    try:
        for version in ("2.0", "3.0", "4.0"):
            host.deploy(version, keep=2)
        assert host.releases() == ["1.0-eeeeeeee", "3.0-eeeeeeee", "4.0-eeeeeeee"]
    finally:
        process.communicate(b"\n")
    host.deploy("5.0", keep=2)
    assert "1.0-eeeeeeee" not in host.releases()


def test_without_an_environment_it_says_what_to_run(host):
    shutil.rmtree(host.environment)
    with pytest.raises(trainer_release.Failure, match=r"site\.yml"):
        host.deploy("1.0")


def test_check_mode_tells_what_would_change(host):
    (host.root / "env" / "current").unlink()
    assert trainer_release.have(host.options("1.0"), check_mode=True)["changed"]
    (host.root / "env" / "current").symlink_to(host.environment.name)
    assert trainer_release.have(host.options("1.0"), check_mode=True)["changed"]
    assert not host.opt.exists()
