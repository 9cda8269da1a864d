"""From what the role network has made of a host (module network_survey) to the change that leads back.

Pure functions: nothing here reads a file or talks to a host.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from network_entries import plain
from network_files import (
    AFTER_NETPLAN,
    ASIDE,
    CLOUD_INIT_OFF,
    GUARD,
    HEADER,
    IFUPDOWN_MARK,
    IFUPDOWN_RECORD,
    MADE,
    OUR_FILE,
    PROFILES,
    READ_BY,
    RESOLV_CONF,
    keyed,
    read_at,
)
from network_networkmanager import profile_for
from network_yaml import bare, is_a_packages, made_by, narrowed, netplan_after, network_of

# ifupdown: address 192.168.1.5/24 · networkd: Address= · NetworkManager: address1= or addresses1=
ADDRESS_LINE = re.compile(r"(?mi)^\s*(?:address\s+|address(?:es)?\d*\s*=\s*)([0-9a-f.:]+)")


def network_back(survey: dict) -> dict:
    """The change after which a host's network is configured by what gave way to `network_interfaces`.

    Returns {fault: str}, "" if it can be done; then also {files, apply, undo, addresses}, arguments of guarded_change,
    and `left`, the paths of what gave way and stays aside, since there is something else in its place by now.
    """
    survey = plain(survey)
    files = survey["files"]
    ours = network_of(files["netplan"].get(OUR_FILE, {}).get("text", ""))
    returning = Returning(survey)
    returning.laid_aside()
    returning.hidden(ours)
    stanzas = returning.ifupdown()
    gone = [{"path": path, "state": "absent"} for path in (OUR_FILE, CLOUD_INIT_OFF, IFUPDOWN_RECORD)]
    changes = [*gone, *returning.changes]
    after = [network_of(text) for text in netplan_after(files["netplan"], changes, files["kept"]).values()]
    if lost := sorted(names_set(ours) - names_set(*after)):
        return {
            "fault": f"{' and '.join(lost)} {'has its' if len(lost) == 1 else 'have their'} present name from "
            f"{OUR_FILE}: after the next start it would be another, and what is set up for it might be nothing"
        }
    return {
        "fault": "",
        "files": changes,
        "left": returning.left,
        "addresses": addresses(survey["session"], returning.texts, after),
        **commands(survey, ours, after, stanzas, returning.changes),
    }


class Returning:
    """The changes that bring back what gave way, gathered one kind after another."""

    def __init__(self, survey: dict):
        self.files, self.links = survey["files"], survey["interfaces"]
        self.asides, self.resolv_conf = survey["asides"], survey["resolv_conf"]
        self.hidden_profiles = survey["hidden_profiles"]
        self.changes: list[dict] = []
        self.left: list[str] = []
        self.texts: list[str] = []  # of ifupdown's, networkd's and NetworkManager's files that come back

    def laid_aside(self) -> None:
        """Files that were moved. Of several that had one name, the last is what the host was set up with.

        Where that is but what was left of the one before, which gave way in steps, the one before counts.
        """
        moved: dict[str, list[tuple[int, str]]] = {}
        for path in self.asides:
            place, _, number = path.rpartition(ASIDE)
            known = place == RESOLV_CONF or os.path.dirname(place) in READ_BY
            if path == IFUPDOWN_RECORD or not known or not re.fullmatch(r"(\.\d+)?", number):
                continue
            moved.setdefault(place, []).append((int(number[1:] or 1), path))
        for place, ranked in moved.items():
            paths = [path for _, path in sorted(ranked)]
            path, parts = paths.pop(), []
            while paths and narrowed(self._kept(path), self._kept(paths[-1])):
                parts.append(path)
                path = paths.pop()
            self._put_back(path, place)
            if path in self.left:
                paths += reversed(parts)
            else:
                self.changes += [{"path": part, "state": "absent"} for part in parts]
            self.left += paths
        for path, file in self.files["networkd"].items():
            folder, base = os.path.split(path)
            if base.startswith(AFTER_NETPLAN):
                self._move(path, os.path.join(folder, base[len(AFTER_NETPLAN) :]), file["text"])

    def _kept(self, path: str) -> str:
        return self.files["kept"].get(path, {}).get("text", "")

    def _put_back(self, path: str, place: str) -> None:
        there, kept = self.files["kept"].get(path, {}), self._kept(path)
        if place == RESOLV_CONF:
            if path in self.files["kept"] and (self.resolv_conf or "").startswith(HEADER):
                before = {"link_to": there["link"]} if "link" in there else {"content": kept, "mode": "0644"}
                self.changes += [{"path": RESOLV_CONF, **before}, {"path": path, "state": "absent"}]
            else:
                self.left.append(path)
            return
        target = read_at(place)
        standing = self.files["netplan"].get(target)
        if standing is not None and narrowed(standing["text"], kept):
            self.changes += [
                {"path": target, "content": kept, "mode": standing["mode"]},
                {"path": path, "state": "absent"},
            ]
        else:
            self._move(path, target, kept)

    def _move(self, path: str, target: str, text: str) -> None:
        if any(target in found for found in self.files.values()):
            self.left.append(path)
            return
        self.changes.append({"path": path, "move_to": target})
        self.texts.append(text)

    def hidden(self, ours: dict) -> None:
        """Packages' files that a file or a link of ours keeps from being read."""
        netplan = self.files["netplan"]
        back = {change["path"] for change in self.changes}  # what its owner had there
        for path, file in netplan.items():
            if path.startswith("/etc/") and path not in back and is_a_packages(path, file["text"], netplan):
                self.changes.append({"path": path, "state": "absent"})
        names = {name for definitions in ours.values() for name in definitions}
        for path, file in self.files["networkmanager"].items():
            said = keyed(file["text"])
            uuid = said.get(("connection", "uuid"))
            if not path.startswith("/usr/lib/") or uuid not in self.hidden_profiles:
                continue
            if names & set(profile_for(said, self.links)):
                self.changes.append({"path": f"{PROFILES}/{uuid}.nmmeta", "state": "absent"})

    def ifupdown(self) -> list[str]:
        """Stanzas that were commented out; returns the names of their interfaces."""
        names: list[str] = []
        for path, file in self.files["ifupdown"].items():
            text, found = with_stanzas(file["text"])
            if text != file["text"]:
                self.changes.append({"path": path, "content": text, "mode": file["mode"]})
                self.texts.append(text)
            names += [name for name in found if name not in names]
        return names


def with_stanzas(text: str) -> tuple[str, list[str]]:
    """A file of ifupdown's as it was before lines of it were commented out, and the interfaces of those lines."""
    lines: list[str] = []
    names: list[str] = []
    shared: list[str] = []  # the words of an auto line that named others' interfaces, too
    for line in text.splitlines():
        marked = line.startswith(IFUPDOWN_MARK)
        line = line.removeprefix(IFUPDOWN_MARK)
        words = line.split()
        rest = shared and words[:1] == shared[:1] and set(words) < set(shared)
        shared = words if marked and words and (words[0] == "auto" or words[0].startswith("allow-")) else []
        if rest:
            continue  # what was left of it, and perhaps gave way later
        if marked and words[:1] == ["iface"] and words[1:2] and words[1] not in names:
            names.append(words[1])
        lines.append(line)
    return "\n".join(lines) + "\n" * (not text or text.endswith("\n")), names


def names_set(*networks: dict) -> set[str]:
    """The names that netplan's definitions give to cards."""
    return {
        str(one["set-name"])
        for network in networks
        for kind, definitions in network.items()
        for one in definitions.values()
        if kind not in MADE and one.get("set-name")
    }


def addresses(session: dict | None, texts: list[str], networks: list[dict]) -> list[str]:
    """Where to reach the host afterwards, most likely first; [] where it is at the address that is in use now.

    A lease's address is not known before, and may be the present one. texts, networks: what comes back, of netplan all
    that will be.
    """
    if session is None:
        return []
    now = ipaddress.ip_address(session["address"])
    words = [word for text in texts for word in ADDRESS_LINE.findall(text)]
    words += [
        str(word).split("/")[0]
        for network in networks
        for definitions in network.values()
        for one in definitions.values()
        for word in one.get("addresses") or []
        if isinstance(word, str)
    ]
    found = []
    for word in words:
        try:
            address = ipaddress.ip_address(word)
        except ValueError:
            continue
        if address.version == now.version and not address.is_loopback and address not in found:
            found.append(address)
    if now in found or not found:
        return []
    near = ipaddress.ip_network((now, 24 if now.version == 4 else 64), strict=False)
    return [str(address) for address in [*sorted(found, key=lambda address: address not in near), now]]


def commands(survey: dict, ours: dict, networks: list[dict], stanzas: list[str], changes: list[dict]) -> dict:
    """{apply, undo}: lists of commands. networks: netplan's, as they will be; stanzas: interfaces that are ifupdown's.

    The present addresses go first, so that a connection that comes through afterwards owes nothing to them.
    """
    coming = [change.get("move_to", change["path"]) for change in changes]
    made, made_after = made_by(ours), set().union(*map(made_by, networks))
    there = {link["name"] for link in survey["interfaces"]}
    stay = [
        name
        for kind, definitions in ours.items()
        for name, one in definitions.items()
        if one != bare(kind, one) and name in there and not (kind in MADE and name not in made_after)
    ]
    profiles = any("/NetworkManager/" in path for path in coming)
    reload = [["nmcli", "connection", "reload"]] if profiles and survey["active"]["NetworkManager"] else []
    apply = [
        *([GUARD, "remove", name] for name in sorted((made - made_after) & there)),
        *reload,
        *(["ip", "address", "flush", "dev", name, "scope", "global"] for name in stay),
        ["netplan", "apply"],
    ]
    undo = [
        *([GUARD, "remove", name] for name in sorted(made_after - made - there)),
        *reload,
        ["netplan", "apply"],
    ]
    anew = []
    if survey["active"]["systemd-networkd"]:
        anew = [["networkctl", "reload"], *(["networkctl", "reconfigure", name] for name in stay)]
    if stanzas:
        others = any(networks) or any(
            "/systemd/network/" in path for path in [*survey["files"]["networkd"], *coming]
        )
        if survey["active"]["systemd-networkd"] and not others:
            apply.append(["systemctl", "stop", "systemd-networkd.socket", "systemd-networkd.service"])
        apply.append(["ifup", "--force", *stanzas])
        undo = [["ifdown", "--force", f"--interfaces={IFUPDOWN_RECORD}", *stanzas], *undo]
    else:
        apply += anew
    return {"apply": apply, "undo": undo + anew}


class FilterModule:
    def filters(self):
        return {"network_back": network_back}
