#!/usr/bin/python
"""Install one release of the trainer beside the others, test it, and only then switch to it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_release
short_description: One directory per release of the trainer, and a symlink to the one in use
description:
  - A release is I(dir)/releases/VERSION-ENVIRONMENT with C(lib), the package, C(bin/trainer), which names its own
    Python environment and its own C(lib), and C(environment), the path of that environment.
  - The symlink I(dir)/current is switched, in one step, once the new release has passed its self-test. If anything
    fails before, the release in use stays in use.
  - The action plugin of the same name builds the wheel on the controller and brings it.
options:
  dir:
    description: Directory that holds C(releases) and C(current).
    type: path
    required: true
  env_dir:
    description: Directory of the Python environments; its C(current) is the one that a new release uses.
    type: path
    required: true
  user:
    description: User that runs the self-test, as it will run the trainer. This module's own when not given.
    type: str
  keep:
    description: Releases to keep, the current one included. One that a process runs from, or that an active run was
      started with, is kept besides.
    type: int
    default: 3
  keeper:
    description: What keeps runs alive on this host, C(systemd) or C(process); with I(etc_dir) and I(state_dir) it says
      which are active.
    type: str
  etc_dir:
    description: Directory of C(runs/RUN.env), which names the release that a run was started with.
    type: path
  state_dir:
    description: Directory of C(runs/RUN), which says how a run is.
    type: path
  version:
    description: Filled by the action plugin. Version of the wheel.
    type: str
    required: true
  wheels:
    description: Filled by the action plugin. Name and SHA-256 of the wheel in I(archive).
    type: dict
  archive:
    description: Filled by the action plugin. Tar file on the host that holds the wheel.
    type: path
"""

EXAMPLES = r"""
- name: Have the trainer
  trainer_release:
    dir: /opt/trainyard
    env_dir: /opt/trainyard/env
    user: trainyard
    keeper: systemd
    etc_dir: /etc/trainyard
    state_dir: /var/lib/trainyard
"""

import contextlib
import fcntl
import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import kept_releases
from ansible.module_utils.received_files import Damaged, unpack

COMMAND = """\
#!/bin/sh
# One release of the trainer in its own environment, wherever it is called from. Its ranks inherit the same.
export PYTHONPATH={lib} PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
exec {python} -m trainer "$@"
"""


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


def environment_in_use(env_dir: str) -> str:
    """Path of the Python environment that a new release uses."""
    path = os.path.realpath(os.path.join(env_dir, "current"))
    if not os.path.exists(os.path.join(path, ".complete")):
        raise Failure(
            f"no Python environment at {env_dir}/current. Run site.yml, whose role python_env makes it."
        )
    return path


def run(command: list[str], **options) -> None:
    """Run a command that must succeed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    environment.update(PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, cwd="/", **options
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"`{shlex.join(command)}` did not end within 300 s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise Failure(f"`{shlex.join(command)}` ended with {done.returncode}:\n{last}")


def install(release: str, environment: str, archive: str, wheels: dict[str, str]) -> None:
    """Make a release of a wheel: under another name first, so that it is there whole or not at all."""
    new = os.path.join(os.path.dirname(release), f".{os.path.basename(release)}.new")
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(os.path.join(new, "bin"))
    python = os.path.join(environment, "bin", "python")
    lib = os.path.join(new, "lib")
    pip = [
        python,
        "-I",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    unpack(archive, new, wheels)
    for wheel in wheels:
        run([*pip, "--no-cache-dir", "--target", lib, os.path.join(new, wheel)])
        os.unlink(os.path.join(new, wheel))
    # The names in compiled files are those that tracebacks show.
    final_lib = os.path.join(release, "lib")
    run([python, "-I", "-m", "compileall", "-q", "-s", lib, "-p", final_lib, lib])
    with open(os.path.join(new, "bin", "trainer"), "w", encoding="utf-8") as stream:
        stream.write(COMMAND.format(lib=shlex.quote(final_lib), python=shlex.quote(python)))
    os.chmod(os.path.join(new, "bin", "trainer"), 0o755)
    with open(os.path.join(new, "environment"), "w", encoding="utf-8") as stream:
        stream.write(f"{environment}\n")
    subprocess.run(["sync", "-f", new], check=True)
    os.rename(new, release)


def self_test(release: str, user: str | None) -> None:
    """The release must run, as the user that will run it."""
    account = {"user": user, "group": user, "extra_groups": []} if user else {}
    run([os.path.join(release, "bin", "trainer"), "--help"], **account)


def switch(directory: str, name: str) -> None:
    """Let `current` point to a release, in one step."""
    new = os.path.join(directory, "current.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(os.path.join("releases", name), new)
    os.rename(new, os.path.join(directory, "current"))


def current(directory: str) -> str | None:
    """Name of the release in use."""
    try:
        return os.path.basename(os.readlink(os.path.join(directory, "current")))
    except OSError:
        return None


def in_use(releases: str) -> set[str]:
    """Names of the releases that processes run from: bin/trainer puts the release's path into their environment."""
    used = set()
    pattern = re.compile(re.escape(os.fsencode(releases)) + rb"/([^/\0]+)/lib")
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            used |= {os.fsdecode(name) for name in pattern.findall(stream.read())}
    return used


def prune(directory: str, keep: int, kept: Callable[[], set[str]]) -> list[str]:
    """Remove all but the newest `keep` releases, the current one and those in use; their names.

    kept: asked for the paths of releases that runs go on with, be there a process of theirs just now or not.
    """
    releases = os.path.join(directory, "releases")
    names = [name for name in os.listdir(releases) if not name.startswith(".")]
    names.sort(key=lambda name: os.stat(os.path.join(releases, name)).st_mtime, reverse=True)
    spared = {current(directory), *names[: max(keep, 1)]}
    pruned = [name for name in names if name not in spared]
    if pruned:
        used, paths = in_use(releases), kept()
        pruned = [
            name
            for name in pruned
            if name not in used and os.path.realpath(os.path.join(releases, name)) not in paths
        ]
    for name in pruned:
        shutil.rmtree(os.path.join(releases, name))
    return pruned


def have(options: dict, check_mode: bool, kept: Callable[[], set[str]] = set) -> dict:
    """Have the release, or say that the wheel is wanted; the module's result. kept: as in `prune`."""
    directory = options["dir"]
    before = current(directory)
    if check_mode and not os.path.exists(os.path.join(options["env_dir"], "current")):
        return {"changed": True, "version": options["version"]}
    environment = environment_in_use(options["env_dir"])
    name = f"{options['version']}-{os.path.basename(environment)[:8]}"
    release = os.path.join(directory, "releases", name)
    result = {"version": options["version"], "release": name, "path": release, "before": before}
    if before == name and os.path.isdir(release):
        return {"changed": False, **result}
    if check_mode:
        return {"changed": True, **result}
    os.makedirs(os.path.dirname(release), mode=0o755, exist_ok=True)
    with open(os.path.join(directory, "releases", ".lock"), "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        made = not os.path.isdir(release)
        if made:
            if not options["wheels"]:
                return {"changed": False, "wanted": True}
            install(release, environment, options["archive"], options["wheels"])
        try:
            self_test(release, options["user"])
        except Failure as failure:
            # One that was there before, a run may go on with.
            if made or (
                name not in in_use(os.path.dirname(release)) and os.path.realpath(release) not in kept()
            ):
                shutil.rmtree(release, ignore_errors=True)
            stays = f"{before} stays in use" if before else "none is in use"
            raise Failure(f"the release {name} does not run, so {stays}.\n{failure}") from None
        os.utime(release)
        switch(directory, name)
        return {"changed": True, "pruned": prune(directory, options["keep"], kept), **result}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "env_dir": {"type": "path", "required": True},
            "user": {"type": "str"},
            "keep": {"type": "int", "default": 3},
            "keeper": {"type": "str", "choices": ["systemd", "process"]},
            "etc_dir": {"type": "path"},
            "state_dir": {"type": "path"},
            "version": {"type": "str", "required": True},
            "wheels": {"type": "dict"},
            "archive": {"type": "path"},
        },
        required_together=[["wheels", "archive"], ["keeper", "etc_dir", "state_dir"]],
        supports_check_mode=True,
    )
    # The service user reads what root installs, whatever umask root has.
    os.umask(0o022)
    p = module.params

    def kept() -> set[str]:
        places = p["keeper"], p["etc_dir"], p["state_dir"]
        return kept_releases(module.run_command, *places) if p["keeper"] else set()

    try:
        result = have(p, module.check_mode, kept)
    except (Failure, Damaged) as failure:
        module.fail_json(msg=str(failure))
    except OSError as failure:
        module.fail_json(msg=f"{failure.filename or p['dir']}: {failure.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
