"""Which .network files of systemd-networkd speak for our interfaces, and the changes by which these give way.

Given {path: {text, more (of its drop-ins)}} and the host's interfaces (links). `ours` maps an interface's present name
to netplan's for it.
"""

import fnmatch
import os
import re
import shlex

from network_claims import others
from network_entries import Refused
from network_files import AFTER_NETPLAN, aside, settings
from network_settings import NETWORKD_DEVICES

# What a .network file can ask of a wireless card alone.
OF_WIRELESS = {"SSID", "BSSID", "WLANInterfaceType"}


def networkd_claims(files, ours, links, taken):
    """Changes to .network files that systemd-networkd would prefer to netplan's for a name in `ours`."""
    changes = []
    for path, file in files.items():
        base = os.path.basename(path)
        meant = meant_by(file, links)
        hit = [name for name in meant if name in ours]
        if not any(base < netplans_unit(ours[name]) for name in hit):
            continue
        if set(meant) - set(ours):  # it configures others too: let it come after netplan's
            if file["more"].strip():
                raise Refused(
                    f"{path} is for {', '.join(name for name in meant if name not in ours)} as well as for "
                    f"{', '.join(hit)}, so that it would get a name that comes after netplan's, and what is in "
                    f"{path}.d would count for none of them: write that into {path} itself, or have its [Match] fit "
                    f"{', '.join(hit)} no more"
                )
            changes.append({"path": path, "move_to": f"{os.path.dirname(path)}/{AFTER_NETPLAN}{base}"})
        else:
            changes.append({"path": path, "move_to": aside(path, taken)})
    return changes


def check_networkd_devices(files, ours, links, made):
    """Refuse files that have systemd-networkd join one of `ours` to a device, or make one on it, that is not `made`.

    Also those that netplan's files hide, while the device is there: what networkd made before is so until the next
    boot, and not after it.
    """
    there = {link["name"] for link in links}
    for path, file in files.items():
        meant = meant_by(file, links)
        hit = [name for name in meant if name in ours]
        hidden = all(os.path.basename(path) > netplans_unit(ours[name]) for name in hit)
        for place, key, device in devices(path, file) if hit else []:
            kind = NETWORKD_DEVICES[key]
            if (kind and device in made) or (hidden and device not in there):
                continue
            out = (
                f"have its [Match] fit {', '.join(hit)} no more"
                if others(meant, ours, links)
                else "take that line out there"
            )
            cure = (
                f"put {device} into network_interfaces too (kind: {kind}), or {out}"
                if kind
                else f"move that line, below a line [Network], into {drop_in(ours[hit[0]], device)}, which is read "
                "besides"
            )
            raise Refused(
                f"{place}: {key}={device} would be lost at the next boot, since network_interfaces has "
                f"{', '.join(hit)} and this file counts no more for that: {cure}"
            )


def devices(path, file):
    """[(where it stands, key, device)] of what a .network file joins its interfaces to, or makes on them."""
    return [
        (place, key, value)
        for place, text in ((path, file["text"]), (f"{path}.d", file["more"]))
        for section, key, value in settings(text)
        if section == "Network" and key in NETWORKD_DEVICES and value
    ]


def check_networkd_elsewhere(files, ours, links):
    """Refuse files outside /etc that systemd-networkd would prefer to netplan's for a name in `ours`."""
    for path, file in files.items():
        base = os.path.basename(path)
        hit = [name for name in meant_by(file, links) if name in ours and base < netplans_unit(ours[name])]
        if hit:
            raise Refused(
                f"{path} sets {', '.join(hit)} up, and systemd-networkd reads it before netplan's; it is a package's, "
                f"or written at each boot: hide it by `ln -s /dev/null /etc/systemd/network/{base}`, or put a copy of "
                f"your own there that fits {', '.join(hit)} no more"
            )


def netplans_unit(name):
    """The .network file that netplan writes for its definition `name`; networkd goes by the first that fits."""
    return f"10-netplan-{name}.network"


def drop_in(name, base):
    """Where systemd-networkd reads what netplan has no word for besides that file."""
    return f"/etc/systemd/network/{netplans_unit(name)}.d/{base}.conf"


# What a file is for.


def meant_by(file, links):
    """The names of `links` that a .network file speaks for, its drop-ins read."""
    return networkd_matches(settings(whole(file)), links)


def whole(file):
    """A .network file's text, with that of its drop-ins."""
    return f"{file['text']}\n{file['more']}"


def networkd_matches(said, links):
    """The names of `links` that a .network file of systemd-networkd speaks for; `said`: its settings.

    What it asks of the host (Host=, KernelVersion=, …) counts as given: no harm comes to a file that is for another.
    """
    asked = {}
    for section, key, value in said:
        if section == "Match":  # an empty word takes back what stood there before
            asked[key] = [*asked.get(key, []), *patterns(value)] if value else []
    asked = {key: found for key, found in asked.items() if found}
    macs = {mac_address(word) for key in ("MACAddress", "PermanentMACAddress") for word in asked.get(key, [])}
    return [
        link["name"]
        for link in links
        if asked
        and any(fits(asked.get("Name"), name) for name in (link["name"], *link["altnames"]))
        and (not macs or link["mac"] in macs)
        and fits(asked.get("Driver"), link["driver"] or "")
        and fits(asked.get("Type"), networkd_type(link))
        and fits(asked.get("Kind"), kernel_kind(link) or "")
        and fits(asked.get("Path"), link["properties"].get("ID_PATH", ""))
        and all(has_property(word, link["properties"]) for word in asked.get("Property", []))
        and (link["kind"] == "wlan" or not asked.keys() & OF_WIRELESS)
    ]


def patterns(value):
    """The words of a setting under [Match]; a ! before the first is before each."""
    but = "!" * value.startswith("!")
    try:
        words = shlex.split(value.removeprefix("!"), comments=False)
    except ValueError:  # a quote that nothing ends
        words = value.removeprefix("!").split()
    return [but + word for word in words]


def fits(wanted, word):
    """Whether a word is one of systemd's patterns, and none of those after a !; any where there are none."""
    unwanted = [pattern[1:] for pattern in wanted or () if pattern.startswith("!")]
    rest = [pattern for pattern in wanted or () if not pattern.startswith("!")] or ["*"]
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in rest) and not any(
        fnmatch.fnmatchcase(word, pattern) for pattern in unwanted
    )


def has_property(wanted, properties):
    """Whether udev says KEY=PATTERN of an interface, or does not, where a ! comes first."""
    key, _, pattern = wanted.removeprefix("!").partition("=")
    return wanted.startswith("!") is not (key in properties and fnmatch.fnmatchcase(properties[key], pattern))


def kernel_kind(link):
    """The kernel's word for what software makes; None for a card."""
    return None if link["kind"] == "wlan" else link["kind"]


def networkd_type(link):
    """systemd-networkd's word for what an interface is (`networkctl`)."""
    known = link["properties"] or link["kind"] is None  # the kernel tells the type of all that have one
    return link["properties"].get("DEVTYPE") or (link["link_type"] if known else link["kind"])


def mac_address(word):
    """A hardware address of systemd's as we have it: 525400123456 by twos, whatever stands between them."""
    digits = re.sub(r"[-:.]", "", word.lower())
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))
