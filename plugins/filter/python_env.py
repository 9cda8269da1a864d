"""Whether all hosts can have and have the same environment; which Python is brought, and who gets what from whom."""

from __future__ import annotations

import re
from collections import Counter
from urllib.parse import quote


def python_env_differences(environments: dict[str, dict], lock: str) -> list[str]:
    """One line for each host and package that differs from most hosts; empty if the environments are equal.

    `environments`: host -> {"python": "3.11.2", "versions": {name: version}}, torch's with its build tag.
    A package that the lock itself pins by Python version is compared among the hosts of one Python only.
    """
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)]
    by_python = {name for name, count in Counter(names).items() if count > 1}

    def group(host: str, package: str) -> str:
        return ".".join(environments[host]["python"].split(".")[:2]) if package in by_python else "all"

    differences = []
    for package in sorted({name for one in environments.values() for name in one["versions"]}):
        found: dict[str, dict[str, str]] = {}
        for host, one in environments.items():
            version = one["versions"].get(package, "nothing")
            found.setdefault(group(host, package), {})[host] = version
        for versions in found.values():
            usual, _ = Counter(versions.values()).most_common(1)[0]
            others = next(host for host, version in versions.items() if version == usual)
            differences += [
                f"{host}: {package} {version} (most have {usual}, such as {others})"
                for host, version in versions.items()
                if version != usual
            ]
    return differences


def python_env_mix(answers: dict[str, dict], brought: dict[str, dict]) -> str:
    """What is wrong where hosts would have environments of different Pythons (X.Y), with the cure; "" where not.

    answers: each host's result of the module python_env in check mode. brought: as of python_env_brought.
    """

    def minor(version: str) -> str:
        return ".".join(version.split(".")[:2])

    ours = re.search(r"cpython-([\d.]+)", next(iter(brought.values()))["name"])[1]
    # One without a version has ours brought.
    found = {host: one.get("interpreter", ours) for host, one in answers.items()}
    if len({minor(version) for version in found.values()}) < 2:
        return ""
    shown = "; ".join(
        f"{version} on {', '.join(host for host in found if found[host] == version)}"
        for version in sorted(set(found.values()), key=lambda text: [int(part) for part in text.split(".")])
    )
    odd = [host for host, version in found.items() if minor(version) != minor(ours)]
    return (
        f"The hosts' Pythons differ: {shown}; expected one X.Y on all, for packages are compiled for it. "
        f"Put `python_env_python: bring` into the inventory, as a variable of {', '.join(odd)}: the controller then "
        f"brings Python {minor(ours)} there, for the trainer's environment alone; the distribution's stays as it is. "
        "Or have one X.Y on all hosts, and name it in python_env_python."
    )


def python_env_chain(hosts: list[str], answers: dict[str, dict], host: str, alone: bool) -> list[str]:
    """Of `hosts`, those that want the same files as `host`, in their order: a chain for the action bring.

    answers: each host's result of the module python_env. alone: hosts that do not talk to each other, so that each has
    a chain of its own.
    """
    if alone:
        return [host]
    return [
        one
        for one in hosts
        if "files" in answers.get(one, {}) and answers[one]["key"] == answers[host]["key"]
    ]


def python_env_hashes(files: list[dict]) -> dict[str, str]:
    """SHA-256 by name of what was brought."""
    return {one["path"].rpartition("/")[2]: one["sha256"] for one in files}


def python_env_brought(lock: str, folder: str) -> dict[str, dict]:
    """For each machine (`x86_64`) its Python: name, URL and SHA-256 of an archive.

    lock: lines of `sha256sum`'s form, of archives named as python-build-standalone names them. folder: their URL.
    """
    found = re.findall(r"^([0-9a-f]{64})  (cpython-[\d.]+\+\d+-(\w+)-\S+)$", lock, re.MULTILINE)
    return {
        machine: {"name": name, "url": f"{folder}/{quote(name)}", "sha256": digest}
        for digest, name, machine in found
    }


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict:
        """Name -> function."""
        return {
            "python_env_brought": python_env_brought,
            "python_env_chain": python_env_chain,
            "python_env_differences": python_env_differences,
            "python_env_hashes": python_env_hashes,
            "python_env_mix": python_env_mix,
        }
