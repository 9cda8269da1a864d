"""The packages that a host lacks, worked out and downloaded by the controller's apt on the host's behalf.

Runs on the controller, as any user. apt gets a root of its own: the host's dpkg status, sources, keyrings and
preferences, and of the controller's configuration only how it reaches the network. The controller's own apt stays
as it is.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from how_far import apt_get

# A host says both, and one that is in other hands might say words that mean more to the controller's apt.
ARCHITECTURE = re.compile(r"[a-z0-9-]+")
PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+)?")


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


def run(
    command: list[str],
    environment: dict[str, str] | None = None,
    words: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Run a command that must succeed; its output.

    words: what an apt-get begins with, whose progress goes to `say`; its output has its errors among it.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})}
    if words:
        code, output = apt_get(command, words, say, env=environment)
        errors = ""
    else:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        code, output, errors = done.returncode, done.stdout, done.stderr
    if code:
        last = "\n".join((output + errors).strip().splitlines()[-10:])
        raise Failure(f"on the controller, `{' '.join(command)}` ended with {code}:\n{last}")
    return output


def network_settings() -> str:
    """How the controller's apt reaches the network: proxies, certificates, time-outs. Nothing that relaxes a check."""
    kept = []
    for line in run(["apt-config", "dump"]).splitlines():
        relaxed = re.match(
            r"Acquire::(Allow\S*|\S*Insecure\S*|IndexTargets\b|Languages\b|GzipIndexes\b)",
            line,
            re.IGNORECASE,
        )
        if line.startswith("Acquire::") and not relaxed:
            kept.append(line)
    return "\n".join(kept) + "\n"


def without_media(text: str) -> str:
    """Sources without those on a CD or a local disk of the host, which the controller does not have."""
    if re.search(r"^URIs:", text, re.MULTILINE | re.IGNORECASE):
        stanzas = re.split(r"\n\s*\n", text)
        return "\n\n".join(
            one for one in stanzas if not re.search(r"^URIs:\s*(cdrom|file|copy):", one, re.M | re.I)
        )
    return (
        "\n".join(line for line in text.splitlines() if not re.match(r"\s*deb.*\s(cdrom|file|copy):", line))
        + "\n"
    )


class HostsApt:
    """apt on the controller, answering for one host.

    `shared`, the index and the downloaded packages, is common to all hosts with the same sources, keyrings,
    preferences and architecture. `named` holds the keyrings that sources name: apt takes no such name with a space in
    it, and the checkout's path may have one.
    """

    def __init__(
        self,
        state: dict,
        directory: Path,
        host: str,
        named: Path,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        for word in (state["architecture"], *state["foreign"]):
            if not ARCHITECTURE.fullmatch(word):
                raise Failure(f"{host} says that its architecture is {word!r}: expected a word such as amd64")
        self.state, self.named, self.say = state, named, say
        same = json.dumps(
            [state[key] for key in ("architecture", "foreign", "sources", "keyrings", "preferences")]
        )
        self.shared = directory / hashlib.sha256(same.encode()).hexdigest()[:16]
        self.own = directory / f"host-{host}"
        self.config = self.own / "apt.conf"
        self.archives = self.shared / "archives"

    def write(self) -> None:
        """Lay out the root that apt works in."""
        shutil.rmtree(self.own, ignore_errors=True)
        etc = self.own / "etc"
        for path in (
            *(etc / name for name in ("sources.list.d", "preferences.d", "trusted.gpg.d", "apt.conf.d")),
            self.shared / "lists" / "partial",
            self.archives / "partial",
        ):
            path.mkdir(parents=True, exist_ok=True)
        (self.own / "status").write_bytes(gzip.decompress(base64.b64decode(self.state["status"])))
        (self.own / "extended_states").touch()
        keyrings = {}
        for path, content in self.state["keyrings"].items():
            if path.startswith("/etc/apt/trusted.gpg"):
                copy = etc / "trusted.gpg.d" / os.path.basename(path)
            else:
                copy = self.named / path.strip("/").replace("/", "_")
            copy.write_bytes(base64.b64decode(content))
            keyrings[path] = copy
        for path, content in self.state["sources"].items():
            text = without_media(base64.b64decode(content).decode(errors="replace"))
            # The longest first: one path may begin another.
            for named in sorted(keyrings, key=len, reverse=True):
                text = text.replace(named, str(keyrings[named]))
            folder = etc / "sources.list.d" if "sources.list.d" in path else etc
            (folder / os.path.basename(path)).write_text(text)
        for path, content in self.state["preferences"].items():
            folder = etc / "preferences.d" if "preferences.d" in path else etc
            (folder / os.path.basename(path)).write_bytes(base64.b64decode(content))
        self.config.write_text(network_settings() + self.settings(etc))

    def settings(self, etc: Path) -> str:
        """apt's configuration: every place its own, every signature checked."""
        places = {
            "Dir::Etc": etc,
            "Dir::Etc::parts": etc / "apt.conf.d",
            "Dir::Etc::main": etc / "none",
            "Dir::Etc::netrc": "/etc/apt/auth.conf",
            "Dir::Etc::netrcparts": "/etc/apt/auth.conf.d",
            "Dir::Etc::trusted": etc / "none",
            "Dir::State": self.shared,
            "Dir::State::lists": self.shared / "lists",
            "Dir::State::status": self.own / "status",
            "Dir::State::extended_states": self.own / "extended_states",
            "Dir::Cache": self.own,
            "Dir::Cache::archives": self.archives,
            "Dir::Log": self.own,
            "APT::Architecture": self.state["architecture"],
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowWeakRepositories": "false",
            "Acquire::AllowDowngradeToInsecureRepositories": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            # In the controller's name, or from its disks, nothing is fetched for a host.
            **{f"Dir::Bin::Methods::{name}": "false" for name in ("cdrom", "copy", "file", "rsh", "ssh")},
            "Debug::NoLocking": "true",
        }
        lines = [f'{name} "{value}";' for name, value in places.items()]
        architectures = [self.state["architecture"], *self.state["foreign"]]
        lines += [
            "#clear APT::Architectures;",
            *(f'APT::Architectures:: "{name}";' for name in architectures),
        ]
        return "\n".join(lines) + "\n"

    def apt(self, *arguments: str, words: str = "") -> str:
        """Run apt-get in the host's stead."""
        return run(["apt-get", *arguments], {"APT_CONFIG": str(self.config)}, words, self.say)

    def update(self, valid_seconds: int) -> None:
        """Refresh the index of the host's sources if the last refresh is too old."""
        stamp = self.shared / "updated"
        if stamp.exists() and time.time() - stamp.stat().st_mtime < valid_seconds:
            return
        # Without --error-on=any apt takes a source that it cannot reach, or whose signature is wrong, for a warning.
        self.apt("update", "--quiet", "--error-on=any", words="the controller refreshes its package index")
        stamp.touch()

    def lacking(self, names: list[str]) -> dict[str, str]:
        """File name -> SHA-256 of each package that the host needs for `names`; downloaded into `archives`."""
        install = ("install", "--yes", "--quiet", "--no-install-recommends")
        self.apt(*install, "--download-only", *names, words="the controller works out what it lacks")
        simulated = self.apt(*install, "--simulate", *names)
        found = {}
        for name, version, architecture in parse_simulated(simulated):
            record = self.record(name, version, architecture)
            file = f"{name}_{version.replace(':', '%3a')}_{architecture}.deb"
            digest = sha256(self.archives / file)
            if record != digest:
                raise Failure(
                    f"{self.archives / file} is damaged: SHA-256 {digest}, expected {record}. Remove it, run again."
                )
            found[file] = digest
        return found

    def record(self, name: str, version: str, architecture: str) -> str:
        """SHA-256 of a package, from the signed index."""
        shown = run(
            ["apt-cache", "show", "--no-all-versions", "--", f"{name}:{architecture}={version}"],
            {"APT_CONFIG": str(self.config)},
        )
        (digest,) = set(re.findall(r"^SHA256: ([0-9a-f]{64})$", shown, re.MULTILINE))
        return digest


def parse_simulated(output: str) -> list[tuple[str, str, str]]:
    """(name, version, architecture) of each package that `apt-get --simulate` would install.

    A line is `Inst NAME [OLD VERSION] (NEW VERSION ORIGIN [ARCHITECTURE])`, with more in brackets behind it.
    """
    return re.findall(
        r"^Inst (\S+?)(?::\S+)? (?:\[[^\]]*\] )?\((\S+) .*?\[(\w[\w-]*)\]\)", output, re.MULTILINE
    )


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def bring(
    state: dict,
    names: list[str],
    directory: Path,
    host: str,
    valid_seconds: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Path, dict[str, str]]:
    """(directory, file name -> SHA-256) of what a host lacks for `names`; several hosts may ask at once.

    say: gets, each second, how far it is.
    """
    if not (shutil.which("apt-get") and shutil.which("apt-config")):
        raise Failure(
            f"{host} reaches no package index and lacks {', '.join(names)}; the controller cannot bring them, "
            "because it has no apt. Run from a Debian or Ubuntu controller (a container of one will do), or install "
            "them on the host by hand."
        )
    for name in names:
        if not PACKAGE.fullmatch(name):
            raise Failure(f"{host} asks for a package {name!r}: expected a name such as nftables")
    if not state["sources"]:
        raise Failure(
            f"{host} has no package sources in /etc/apt, so its packages are unknown. Add its distribution's."
        )
    with tempfile.TemporaryDirectory(prefix="trainyard-keyrings-") as named:
        apt = HostsApt(state, directory, host, Path(named), say)
        apt.shared.mkdir(parents=True, exist_ok=True)
        say("the controller has another host's packages first")
        with (apt.shared / ".lock").open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            apt.write()
            stale = ""
            try:
                try:
                    apt.update(valid_seconds)
                except Failure as failure:  # one of several that is gone: what the others have, they have
                    stale = f"\nBefore that, not all package sources answered:\n{failure}"
                try:
                    return apt.archives, apt.lacking(names)
                except Failure as failure:
                    raise Failure(f"{failure}{stale}") from None
            finally:
                shutil.rmtree(apt.own, ignore_errors=True)
