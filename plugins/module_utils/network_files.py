"""Where the files lie that configure a host's network, how one is called that gave way, and those in sections read.

Pure functions: nothing here reads a file or talks to a host.
"""

import os

GUARD = "/usr/local/lib/trainyard/guard"
OUR_FILE = "/etc/netplan/90-trainyard.yaml"
HEADER = "# Written by Trainyard from network_interfaces in the inventory; a change here is lost at the next run.\n"
CLOUD_INIT_OFF = "/etc/cloud/cloud.cfg.d/99-trainyard-network.cfg"
IFUPDOWN_RECORD = "/etc/network/interfaces.before-trainyard"
IFUPDOWN_MARK = "# trainyard: "  # before a line of ifupdown's that gave way
AFTER_NETPLAN = "20-trainyard-"  # before the name of a .network file that is to come after netplan's
ASIDE = ".before-trainyard"  # behind the name of a file that gave way
RESOLV_CONF = "/etc/resolv.conf"
MADE = ("bonds", "bridges", "vlans")  # devices that are not there before somebody configures them
PROFILES = "/etc/NetworkManager/system-connections"
READ_BY = {  # where a manager reads a file that gave way, by the directory in which it was laid aside
    "/etc/netplan": "/etc/netplan",
    "/etc/systemd/network": "/etc/systemd/network",
    "/etc/NetworkManager": PROFILES,
    "/run/NetworkManager": "/run/NetworkManager/system-connections",
}


def aside(path, taken):
    """A name beside `path` under which no manager reads it."""
    name, number = f"{path}{ASIDE}", 1
    while name in taken:
        number += 1
        name = f"{path}{ASIDE}.{number}"
    return name


def read_at(place):
    """Where a manager reads what was laid aside as `place`, with ASIDE and a number behind it or without."""
    place = place.rpartition(ASIDE)[0] or place
    return os.path.join(READ_BY[os.path.dirname(place)], os.path.basename(place))


def parts(text):
    """[(section, [(key, value)])] of a file as systemd-networkd and NetworkManager have them, in its order."""
    found = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            found.append((line[1:-1], []))
        elif "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found = found or [("", [])]
            found[-1][1].append((key.strip(), value.strip()))
    return found


def settings(text):
    """[(section, key, value)] of such a file."""
    return [(section, key, value) for section, pairs in parts(text) for key, value in pairs]


def keyed(text):
    """{(section, key): value} of such a file, of a key that stands twice the last."""
    return {(section, key): value for section, key, value in settings(text)}
