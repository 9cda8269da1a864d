"""Which profiles of NetworkManager speak for our interfaces, and the changes by which these give way.

Given {path: {text}} and the host's interfaces (links). `ours` maps a present name to the one that it shall have.
"""

import fnmatch
import os

from network_claims import check_made, check_taken_in, others, own_cards
from network_entries import Refused
from network_files import PROFILES, aside, keyed

PROFILE_KINDS = {  # NetworkManager's words for a profile's kind of card
    "ethernet": "ether",
    "802-3-ethernet": "ether",
    "infiniband": "infiniband",
    "wifi": "wlan",
    "802-11-wireless": "wlan",
}
PORT_TYPES = {"bond": "bonds", "bridge": "bridges"}  # for what a port belongs to
DEVICE_TYPES = {  # for what it makes
    **PORT_TYPES,
    "vlan": "vlans",
    **dict.fromkeys(("dummy", "ip-tunnel", "macvlan", "team", "tun", "veth", "vrf", "vxlan", "wireguard")),
}
UUID = ("connection", "uuid")


def networkmanager_claims(files, ours, links, taken, hidden, made):
    """Changes after which NetworkManager reads no profile for a name in `ours`.

    A package's profile stays where it is, and is hidden by its uuid: `hidden` has those that are. A port of what is not
    `made` is refused.
    """
    changes = []
    profiles = [keyed(file["text"]) for file in files.values()]
    for (path, _), said in zip(files.items(), profiles, strict=True):
        if not is_read(path, said, hidden):
            continue
        meant = profile_for(said, links)
        hit = [name for name in meant if name in ours or name in ours.values()]
        if hit:
            check_devices(path, said, hit, profiles, made)
            check_for_ours_alone(path, said, meant, hit, ours, links)
            changes.append(out_of_sight(path, said, hit, taken))
    return changes


def is_read(path, said, hidden):
    """Whether a profile is somebody's own that NetworkManager reads.

    Not netplan's; not NetworkManager's picture of what others set up; not what is out of sight already.
    """
    generated = os.path.basename(path).startswith("netplan-") or (".nmmeta", "nm-generated") in said
    return not generated and said.get(UUID, "") not in hidden


def check_devices(path, said, hit, profiles, made):
    """Refuse a profile that makes a device which nobody else would, or `hit` a port of one."""
    type_ = said.get(("connection", "type"))
    if type_ in DEVICE_TYPES:
        check_made(path, hit[0], DEVICE_TYPES[type_], made)
    device, kind = port_of(said, profiles)
    if device and device not in made:
        check_taken_in(path, device, kind, hit)


def port_of(said, profiles):
    """(device, netplan's kind of it) that a profile makes its interface a port of; (None, None) where of none.

    A profile names the device, or the uuid of the device's own one among `profiles`.
    """
    device, kind = (
        next((said[("connection", key)] for key in keys if ("connection", key) in said), None)
        for keys in (("controller", "master"), ("port-type", "slave-type"))
    )
    named = (one.get(("connection", "interface-name")) for one in profiles if one.get(UUID) == device)
    return (next(filter(None, named), device), PORT_TYPES.get(kind)) if device else (None, None)


def check_for_ours_alone(path, said, meant, hit, ours, links):
    """Refuse a profile that is for others' cards, too."""
    rest = others(meant, ours, links)
    if not rest:
        return
    theirs = own_cards(rest, hit, links)
    wish = f"put {', '.join(theirs)} into network_interfaces too, or tie it to one by " if theirs else ""
    name = said.get(("connection", "id"), os.path.basename(path))
    raise Refused(
        f"{path}: the profile '{name}' names no interface, so it is for {', '.join(hit)} as well as for "
        f"{', '.join(rest)}: {wish or 'tie it to the card that is meant by '}"
        f'`nmcli connection modify "{name}" connection.interface-name {(theirs or hit)[0]}`'
    )


def out_of_sight(path, said, hit, taken):
    """The change after which NetworkManager does not read a profile: a package's is hidden, another moved."""
    if not path.startswith("/usr/lib/"):  # into the directory above, which is not read for profiles
        beside = os.path.join(os.path.dirname(os.path.dirname(path)), os.path.basename(path))
        return {"path": path, "move_to": aside(beside, taken)}
    uuid = said.get(UUID)
    if not uuid:
        raise Refused(
            f"{path} is a package's profile for {', '.join(hit)}, and without a uuid it cannot be hidden: take the "
            "package off, or give its profile a line uuid= (`uuidgen` prints one) under [connection]"
        )
    return {"path": f"{PROFILES}/{uuid}.nmmeta", "link_to": "/dev/null"}


# What a profile is for.


def profile_for(said, links):
    """The names of the interfaces that a profile of NetworkManager is for; `said`: {(section, key): value}."""
    if name := said.get(("connection", "interface-name")):
        return [name]
    if mac := next((value.lower() for (_, key), value in said.items() if key == "mac-address"), None):
        return [link["name"] for link in links if link["mac"] == mac]
    kind = PROFILE_KINDS.get(said.get(("connection", "type")))
    by_hand = said.get(("connection", "autoconnect")) in ("false", "0", "no")
    gives_way = said.get(("connection", "autoconnect-priority"), "0").startswith("-")  # netplan's have 0
    if kind is None or by_hand or gives_way:
        return []
    denied = [
        mac.strip().lower()
        for (_, key), value in said.items()
        if key in ("mac-address-blacklist", "mac-address-denylist")
        for mac in value.split(";")
    ]
    return [
        link["name"]
        for link in links
        if ("wlan" if link["kind"] == "wlan" else link["link_type"]) == kind
        and link["mac"] not in denied
        and all(
            fits_elements(said.get(("match", key), ""), word)
            for key, word in (
                ("interface-name", link["name"]),
                ("driver", link["driver"] or ""),
                ("path", link["properties"].get("ID_PATH", "")),
            )
        )
    ]


def fits_elements(value, word):
    """Whether a word fits a list under a profile's [match] (nm-settings(5)): all that begin with & or !, and one of the
    others.
    """
    optional = []
    for element in value.split(";"):
        pattern = element.strip().lstrip("|&")
        fits = fnmatch.fnmatchcase(word, pattern.removeprefix("!")) is not pattern.startswith("!")
        if not pattern:
            continue
        if not element.strip().startswith(("&", "!")):
            optional.append(fits)
        elif not fits:
            return False
    return not optional or any(optional)
