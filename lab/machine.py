"""What this machine already knows about packages and the network, so that its lab hosts can be told the same.

Everything is read at run time: apt's sources and settings, pip's configuration, name servers, certificates. Nothing is
assumed about where any of it points.
"""

import ast
import ipaddress
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lab.shell import LabError, run

CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")

# Nothing in a lab may reach these beyond the lab's own network, unless this machine's own set-up names the very
# address and port (its name server, its package proxy).
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16")

# Ubuntu's releases that a Debian machine can have hosts of, and where these keep the archive's keys.
UBUNTU = ("jammy", "noble")
UBUNTU_KEYRING = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"

ONE_LINE_OPTIONS = {
    "arch": "Architectures",
    "lang": "Languages",
    "target": "Targets",
    "pdiffs": "PDiffs",
    "by-hash": "By-Hash",
    "signed-by": "Signed-By",
    "trusted": "Trusted",
    "check-valid-until": "Check-Valid-Until",
    "allow-insecure": "Allow-Insecure",
}


# --- the distribution ------------------------------------------------------------------------------------------------


def os_release() -> dict[str, str]:
    """/etc/os-release as a mapping."""
    pairs = (line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {key: value.strip("\"'") for key, value in pairs}


def parse_sources(text: str, one_line: bool) -> list[dict[str, str]]:
    """apt sources in either format, as deb822 stanzas of key and value."""
    return _parse_one_line(text) if one_line else _parse_deb822(text)


def _parse_one_line(text: str) -> list[dict[str, str]]:
    stanzas = []
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not found:
            continue
        options, uri, suite, components = found.groups()
        stanza = {"Types": "deb", "URIs": uri, "Suites": suite, "Components": components.strip()}
        for option in (options or "").split():
            key, _, value = option.partition("=")
            stanza[ONE_LINE_OPTIONS.get(key.lower(), key.title())] = value.replace(",", " ")
        stanzas.append(stanza)
    return stanzas


def _parse_deb822(text: str) -> list[dict[str, str]]:
    stanzas = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        stanza: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line[:1].isspace() and key:  # continued: an embedded key, or a long list
                stanza[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                stanza[key] = value.strip()
        enabled = stanza.get("Enabled", "yes").lower() not in ("no", "false", "0")
        if enabled and "deb" in stanza.get("Types", "").split():
            stanzas.append(stanza | {"Types": "deb"})
    return stanzas


def distribution_sources(suite: str) -> list[dict[str, str]]:
    """This machine's sources of its own distribution, for SUITE; other vendors' sources are no part of a stock host.

    Where SUITE is not the machine's own, its name takes the place of the machine's in every suite (bookworm-security
    becomes trixie-security). Ubuntu's, on a Debian machine, come from the mirror's own Ubuntu.
    """
    own = os_release().get("VERSION_CODENAME", "")
    if suite in UBUNTU and own not in UBUNTU:
        suites = " ".join(suite + pocket for pocket in ("", "-updates", "-security"))
        components = "main restricted universe multiverse"
        stanza = {"Types": "deb", "URIs": ubuntu_mirror(), "Suites": suites, "Components": components}
        return [stanza | {"Signed-By": UBUNTU_KEYRING}]
    stanzas = []
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if file.suffix in (".list", ".sources") and file.is_file():
            stanzas += parse_sources(file.read_text(), one_line=file.suffix == ".list")
    ours = []
    for stanza in stanzas:
        suites = [
            s
            for s in stanza["Suites"].split()
            if s == own or s.startswith(f"{own}-") or s.startswith(f"{own}/")
        ]
        if suites:
            renamed = [suite + s.removeprefix(own) for s in suites]
            ours.append(stanza | {"Suites": " ".join(renamed)})
    if not ours:
        raise LabError(
            f"/etc/apt/sources.list and sources.list.d name no source for this machine's own suite {own!r}: "
            "the lab builds its hosts from them. Add your distribution's sources and run it again"
        )
    return ours


def ubuntu_mirror() -> str:
    """Where a Debian machine has Ubuntu from: TRAINYARD_LAB_UBUNTU, or beside the Debian that its own apt asks."""
    if named := os.environ.get("TRAINYARD_LAB_UBUNTU"):
        return named
    stanzas = distribution_sources(os_release().get("VERSION_CODENAME", ""))
    for uri in (word for stanza in stanzas for word in stanza["URIs"].split()):
        beside, name = re.fullmatch(r"(.*?)([^/]*)/*", uri).groups()
        if name in ("debian", "ubuntu"):
            return f"{beside}ubuntu"
    raise LabError(
        "this machine's apt names no mirror with a folder debian, beside which Ubuntu might be: name a mirror of "
        "Ubuntu by the environment variable TRAINYARD_LAB_UBUNTU=URI"
    )


def sources_text(stanzas: list[dict[str, str]]) -> str:
    """deb822 text of the stanzas."""
    return "\n".join("".join(f"{key}: {value}\n" for key, value in s.items() if value) for s in stanzas)


def keyrings(stanzas: list[dict[str, str]]) -> list[Path]:
    """Key files that the sources name."""
    named = (word for s in stanzas for word in s.get("Signed-By", "").split() if word.startswith("/"))
    return sorted({Path(word) for word in named})


def acquire_settings() -> str:
    """apt's own settings for fetching (proxies, certificates, time-outs) that differ from what it is built with."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as no_files:
        no_files.write('Dir::Etc::parts "/dev/null"; Dir::Etc::main "/dev/null";')
        no_files.flush()
        built_in = set(run("env", f"APT_CONFIG={no_files.name}", "apt-config", "dump").splitlines())
    skipped = ("Acquire::IndexTargets", "Acquire::Changelogs", "Acquire::cdrom", "Acquire::CompressionTypes")
    lines = [
        line
        for line in run("apt-config", "dump").splitlines()
        if line.startswith("Acquire::") and not line.startswith(skipped) and not line.endswith(' "";')
    ]
    return "".join(f"{line}\n" for line in lines if line not in built_in)


def apt_urls(stanzas: list[dict[str, str]]) -> list[str]:
    """Where apt fetches from: mirrors, and the proxies in its settings."""
    mirrors = [uri for s in stanzas for uri in s["URIs"].split()]
    proxies = re.findall(
        r'^Acquire::[^ ]*Proxy[^ ]* "(https?://[^"]+)";', acquire_settings(), re.MULTILINE | re.IGNORECASE
    )
    return mirrors + proxies


def apt_folders(stanzas: list[dict[str, str]]) -> list[Path]:
    """Folders of this machine that are sources themselves (file: and copy:)."""
    uris = (urlsplit(uri) for s in stanzas for uri in s["URIs"].split())
    return sorted({Path(unquote(uri.path)) for uri in uris if uri.scheme in ("file", "copy")})


def apt_credentials() -> list[Path]:
    """Where apt keeps passwords for its sources."""
    return [Path("/etc/apt/auth.conf"), *sorted(Path("/etc/apt/auth.conf.d").glob("*.conf"))]


# --- pip ------------------------------------------------------------------------------------------------------------


@dataclass
class Pip:
    """pip's configuration for a host: the text of /etc/pip.conf, and the folders and files of this machine it names."""

    text: str = ""
    folders: list[Path] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


def pip_configuration() -> Pip:
    """Everything that pip is set up with here, by files or by PIP_ variables, as one file for the hosts."""
    return render_pip(_pip_settings())


def _pip_settings() -> dict[str, str]:
    """`pip config list` as pip resolves it, the user's own file included when he came by sudo."""
    environment = dict(os.environ)
    if os.environ.get("SUDO_USER"):
        environment["HOME"] = os.path.expanduser("~" + os.environ["SUDO_USER"])
    here = Path(__file__).resolve().parent.parent / ".venv/bin/python"
    for python in (sys.executable, str(here), "/usr/bin/python3"):
        if not Path(python).exists():
            continue
        done = subprocess.run(
            [python, "-m", "pip", "config", "list"], capture_output=True, text=True, env=environment
        )
        if done.returncode == 0:
            pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
            return {key: str(ast.literal_eval(value)) for key, value in pairs}
    return {
        f":env:.{k[4:].lower().replace('_', '-')}": v for k, v in os.environ.items() if k.startswith("PIP_")
    }


def render_pip(settings: dict[str, str]) -> Pip:
    """SETTINGS (`section.key` or `:env:.key`, the latter winning) as a pip.conf, and the local folders in it."""
    sections: dict[str, dict[str, str]] = {}
    for name in sorted(settings, key=lambda n: n.startswith(":env:")):  # the environment last: it wins
        section, _, key = name.rpartition(".")
        sections.setdefault("global" if section == ":env:" else section, {})[key] = settings[name]
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        if os.environ.get(variable):
            sections.setdefault("global", {}).setdefault("cert", os.environ[variable])
    pip = Pip()
    for section, keys in sections.items():
        pip.text += f"[{section}]\n"
        for key, value in keys.items():
            words = value.split()
            pip.text += f"{key} = " + "\n    ".join(words) + "\n"
            if key in (
                "find-links",
                "index-url",
                "extra-index-url",
                "cert",
                "client-cert",
                "constraint",
                "proxy",
            ):
                for word in words:
                    folder = _local_folder(word)
                    if folder:
                        pip.folders.append(folder)
                    elif "://" in word:
                        pip.urls.append(word)
    pip.folders = sorted({f for f in pip.folders if f.exists() and f != CA_BUNDLE})
    return pip


def _local_folder(word: str) -> Path | None:
    """The folder behind a path or a file: URL; of an index its parent, for its pages link to files beside `simple`."""
    if word.startswith("file:"):
        path = Path(unquote(urlsplit(word).path))
    elif word.startswith("/"):
        path = Path(word)
    else:
        return None
    return path.parent if path.name == "simple" and path.parent != Path("/") else path


# --- the network ----------------------------------------------------------------------------------------------------


def name_servers() -> list[str]:
    """The machine's name servers that another namespace can reach (IPv4, no loopback stub)."""
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        if file.exists():
            found = re.findall(r"^\s*nameserver\s+([0-9.]+)\s*$", file.read_text(), re.MULTILINE)
            usable = [address for address in found if not ipaddress.ip_address(address).is_loopback]
            if usable:
                return usable
    raise LabError(
        "/etc/resolv.conf names no IPv4 name server but a loopback one, which lab hosts cannot reach: "
        "add one to /etc/resolv.conf, or build the lab with --offline"
    )


def is_private(address: str) -> bool:
    """In one of the ranges that a lab must not reach."""
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(net) for net in PRIVATE)


def private_endpoints(urls: list[str]) -> list[tuple[str, int]]:
    """The (address, port) pairs in private ranges among URLS: this machine's own package proxies, mirrors, indexes."""
    found = set()
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        if not parts.hostname or not port:
            continue
        try:
            answers = socket.getaddrinfo(parts.hostname, port, socket.AF_INET, socket.SOCK_STREAM)
        except socket.gaierror:
            continue
        found |= {(answer[4][0], port) for answer in answers if is_private(answer[4][0])}
    return sorted(found)


def uplinks() -> list[str]:
    """Interfaces of the machine's default routes."""
    found = re.findall(r"^default .*?\bdev (\S+)", run("ip", "-4", "route", "show", "default"), re.MULTILINE)
    if not found:
        raise LabError(
            "this machine has no default route, so lab hosts can have no internet: build the lab with --offline"
        )
    return sorted(set(found))
