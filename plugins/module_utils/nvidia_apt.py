"""What apt is told of a host's driver: sources beside the host's own, NVIDIA's key, and the branch to keep to.

Given: a Host (nvidia_host) and the source of its driver. Answers: texts of files, and where the key is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nvidia_host import Host, Refused

KEY_FILE = "/etc/apt/keyrings/trainyard-nvidia.asc"
# Components that others do not have: a mirror of any address is known by them, a list of mirrors or a proxy.
MARKS = {"Ubuntu": {"restricted", "universe", "multiverse"}, "Debian": {"non-free-firmware"}}
PERSONAL = re.compile(r"//(private-)?ppa\.|/ppa/")


def sources_text(host: Host, source: str) -> str:
    """The text of our file of apt sources; empty where the host's own sources have what is needed.

    The host's mirrors stay in use: what is added has their addresses and keys.
    """
    if source == "distribution":
        return more_components(host, host.distribution["components"])
    repository = host.distribution["repository"]
    path = repository["directories"][host.facts["architecture"]]
    text = more_components(host, repository["components"])
    if any(f"/{path}" in uri for item in host.survey["sources"] for uri in item["uris"]):
        return text
    uri = f"{host.options['repository'].rstrip('/')}/{path}/"
    return "\n".join(filter(None, [text, stanza([uri], ["/"], [], {"Signed-By": KEY_FILE})]))


def more_components(host: Host, needed: list[str]) -> str:
    """The stanzas that add the components `needed` to the distribution's own sources; empty if they are there."""
    family, suite = host.family, host.distribution["suite"]
    # These may stand beside the release in one stanza; the driver is taken from the release.
    aside = re.compile(rf"{suite}-(backports|proposed)")
    sources = [
        {**item, "suites": [one for one in item["suites"] if not aside.match(one)]}
        for item in host.survey["sources"]
    ]
    own = [item for item in sources if belongs(item, family, suite)]
    lacking = [part for part in needed if not any(part in item["components"] for item in own)]
    if not lacking:
        return ""
    main = [item for item in own if "main" in item["components"]]
    if not any(suite in item["suites"] for item in main):  # updates alone lack most packages
        raise Refused(
            f"none of this host's apt sources is {family}'s own {suite}, so its component {lacking[0]} cannot be "
            f"added. Add a source of it with the components {' '.join(needed)}, and run again."
        )
    return "\n".join(stanza(item["uris"], item["suites"], lacking, item["options"]) for item in main)


def belongs(item: Mapping[str, Any], family: str, suite: str) -> bool:
    """Whether a source is the distribution's own, of its release: by suite, and by key, address or components."""
    suites = all(re.fullmatch(rf"{suite}(-updates|-security)?(/updates)?/?", one) for one in item["suites"])
    keys = f"{family.lower()}-archive-keyring" in item["options"].get("Signed-By", "")
    # As Hetzner's mirror has it, with a folder below.
    ends = [uri.rstrip("/").removesuffix("/packages").rpartition("/")[2] for uri in item["uris"]]
    # A person's archive ends as the distribution's does.
    personal = any(map(PERSONAL.search, item["uris"]))
    names = all(end.startswith(family.lower()) for end in ends) and not personal
    parts = not MARKS[family].isdisjoint(item["components"])
    return bool(item["suites"]) and suites and (keys or names or parts)


def stanza(uris: list[str], suites: list[str], components: list[str], options: Mapping[str, str]) -> str:
    lines = ["Types: deb", f"URIs: {' '.join(uris)}", f"Suites: {' '.join(suites)}"]
    lines += [f"Components: {' '.join(components)}"] if components else []
    return "".join(f"{line}\n" for line in [*lines, *(f"{key}: {value}" for key, value in options.items())])


def repository_key(host: Host) -> dict:
    """{url, fingerprint, path} of the key of NVIDIA's repository."""
    found = host.distribution["repository"]
    base = f"{host.options['repository'].rstrip('/')}/{found['directories'][host.facts['architecture']]}"
    return {"url": f"{base}/{found['key']}", "fingerprint": found["fingerprint"], "path": KEY_FILE}


def preferences(branch: int, backported: Iterable[str] = ()) -> str:
    """apt's preferences that keep the driver on its branch; of other packages with such names, no version matches.

    backported: names of the headers whose kernels come from backports. Of what apt has installed from there it takes
    the next from there, too, and of nothing else: kernels would follow backports, and their headers would not.
    """
    # Without :any, apt would not pin the 32-bit libraries of games.
    names = " ".join(backported)
    follow = f"\nPackage: {names}\nPin: release n=*-backports\nPin-Priority: 500\n" if names else ""
    return (
        f"# Written by Trainyard's role nvidia: the driver stays on branch {branch}. nvidia_branch chooses "
        "another.\nPackage: *nvidia*:any libcuda1:any libcudadebugger1:any libnvcuvid1:any libnvoptix1:any "
        f"libxnvctrl0:any cuda-drivers*:any\nPin: version {branch}.*\nPin-Priority: 1001\n{follow}"
    )
