"""What holds for a file that speaks for our interfaces, whichever manager's it is, before it gives way to them.

Given names and links (the host's interfaces), it answers which of the names are others' cards, or refuses.
"""

from network_entries import Refused


def others(meant, ours, links):
    """What of the names `meant` is a card and not in `ours`.

    Devices that software makes do not count: their makers set them up. The end of a wire is a container's card, unless
    a bridge has it: then its other end is.
    """
    cards = [link for link in links if link["kind"] in (None, "wlan") or is_wire(link)]
    return [link["name"] for link in cards if link["name"] in meant and link["name"] not in ours]


def own_cards(rest, hit, links):
    """Of the names `rest` those of the host's own cards: no ends of wires, which are its pods' (Calico, Cilium) unless
    it is a container itself, whose cards in `hit` are such, too.
    """
    wires = {link["name"] for link in links if is_wire(link)}
    return rest if wires & {*hit} else [name for name in rest if name not in wires]


def is_wire(link):
    return link["kind"] == "veth" and not link["master"]


def check_taken_in(path, name, kind, ours):
    """Refuse a bond or a bridge that stays and has some of ours in."""
    if ours:
        wish = f"put {name} into network_interfaces too (kind: {kind}), or " if kind else ""
        raise Refused(f"{path}: '{name}' takes in {', '.join(ours)}: {wish}take {', '.join(ours)} out there")


def check_made(path, name, kind, made):
    """Refuse to have a device's maker give way to an entry that makes none: it would be gone at the next boot.

    kind: netplan's for it, or None. made: the devices that network_interfaces makes.
    """
    if name not in made:
        cure = (
            f"write kind: {kind} in its entry, and what it says of {name} under options"
            if kind
            else "leave it out"
        )
        raise Refused(
            f"{path} makes {name}, and would give way to network_interfaces, in which {name} is no device that is "
            f"made, so that the next boot would be without it: {cure}"
        )
