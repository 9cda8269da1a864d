"""What configures the network of a host now: the input of the filter network_plan."""

import glob
import os
import re
import stat

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import active, interfaces, routes, ssh_session

DOCUMENTATION = r"""
module: network_survey
short_description: Read what configures this host's network
description: Reads only. Configuration files may hold keys of wireless networks, so register it under no_log.
options: {}
"""

GUARD = "/var/lib/trainyard-guard"  # where the guard keeps what is not confirmed yet
PLACES = {
    "netplan": [
        "/usr/lib/netplan/*.yaml",
        "/lib/netplan/*.yaml",
        "/etc/netplan/*.yaml",
        "/run/netplan/*.yaml",
    ],
    "networkd": ["/etc/systemd/network/*.network"],
    "ifupdown": ["/etc/network/interfaces", "/etc/network/interfaces.d/*"],
    "networkmanager": [
        "/etc/NetworkManager/system-connections/*",
        "/run/NetworkManager/system-connections/*",
        "/usr/lib/NetworkManager/system-connections/*",
    ],
    "resolved": [
        "/etc/systemd/resolved.conf",
        *(f"/{place}/systemd/resolved.conf.d/*.conf" for place in ("usr/lib", "run", "etc")),
    ],
    "kept": [
        *(f"/etc/{place}/*.before-trainyard*" for place in ("netplan", "systemd/network", "NetworkManager")),
        "/run/NetworkManager/*.before-trainyard*",
        "/etc/resolv.conf.before-trainyard*",
    ],
}


def read(patterns):
    """{path: {text, mode}} of the files that match; a file that two patterns reach through links counts once."""
    files = {}
    for path in [path for pattern in patterns for path in sorted(glob.glob(pattern))]:
        real = os.path.realpath(path)
        if os.path.isfile(real) and real not in (os.path.realpath(known) for known in files):
            with open(real, encoding="utf-8", errors="surrogateescape") as source:
                files[path] = {"text": source.read(), "mode": f"{stat.S_IMODE(os.stat(real).st_mode):04o}"}
            if os.path.islink(path):
                files[path]["link"] = os.readlink(path)
    return files


def with_drop_ins(files, root="/"):
    """systemd-networkd's files, each with `more`: what it reads of *.network.d beside it, the first of one name."""
    places = [
        os.path.join(root, place, "systemd/network") for place in ("etc", "run", "usr/local/lib", "usr/lib")
    ]
    for path, file in files.items():
        found = {}
        for place in places:
            for drop_in in glob.glob(f"{place}/{os.path.basename(path)}.d/*.conf"):
                found.setdefault(os.path.basename(drop_in), drop_in)
        texts = [read([found[base]]) for base in sorted(found)]
        file["more"] = "".join(f"{one['text']}\n" for text in texts for one in text.values())
    return files


def networkd_elsewhere(root="/"):
    """systemd-networkd's files that are no owner's: of a package, or of whatever writes them at each boot.

    One of the same name in /etc, or a link to /dev/null there, hides them; netplan's own are not among them.
    """
    found = {}
    for place in ("etc", "run", "usr/local/lib", "usr/lib"):
        for path in glob.glob(os.path.join(root, place, "systemd/network/*.network")):
            found.setdefault(os.path.basename(path), path)
    owners = os.path.join(root, "etc/")
    mine = [path for base, path in found.items() if path.startswith(owners) or base.startswith("10-netplan-")]
    return with_drop_ins(read(sorted(set(found.values()) - set(mine))), root)


SOURCE = re.compile(r"(?m)^[ \t]*(source|source-directory)[ \t]+(\S+)")


def with_sources(files):
    """ifupdown's files, with those that they have it read besides, wherever these lie (interfaces(5))."""
    files, look = dict(files), list(files)
    while look:
        path = look.pop(0)
        for word, named in SOURCE.findall(files[path]["text"]):
            pattern = os.path.join(os.path.dirname(path), named, *["*"] * (word == "source-directory"))
            known = {os.path.realpath(one) for one in files}
            for one, file in read([pattern]).items():
                by_name = word == "source" or re.fullmatch(r"[\w-]+", os.path.basename(one))
                if by_name and os.path.realpath(one) not in known:
                    files[one] = file
                    look.append(one)
    return files


def configuration(ifupdown):
    """{kind: {path: {text, mode}}} of all that may configure the network; `ifupdown`: whether that is installed.

    Its files outlast it, as on a host that has gone over to another manager.
    """
    files = {kind: read(patterns) for kind, patterns in PLACES.items()}
    return {
        **files,
        "networkd": with_drop_ins(files["networkd"]),
        "networkd_elsewhere": networkd_elsewhere(),
        "ifupdown": with_sources(files["ifupdown"]) if ifupdown else {},
    }


def properties(name, root="/"):
    """{key: value} of what the kernel and udev know of an interface, as systemd-networkd's [Match] has it."""
    found = {}
    device = os.path.join(root, "sys/class/net", name)
    try:
        with open(f"{device}/ifindex") as source:
            index = source.read().strip()
        for path, mark in ((f"{device}/uevent", ""), (os.path.join(root, f"run/udev/data/n{index}"), "E:")):
            with open(path, errors="replace") as source:
                lines = [line.rstrip("\n") for line in source if line.startswith(mark)]
            found.update(line[len(mark) :].split("=", 1) for line in lines if "=" in line)
    except OSError:  # gone by now, or a host without udev
        pass
    return found


def hidden_profiles():
    """The uuids of the profiles that links to /dev/null hide from NetworkManager."""
    found = glob.glob("/etc/NetworkManager/system-connections/*.nmmeta")
    return [
        os.path.basename(path)[: -len(".nmmeta")] for path in found if os.path.realpath(path) == os.devnull
    ]


def resolver(path="/etc/resolv.conf"):
    """(text, target) of resolv.conf where it is a plain file, or resolvconf's by a link to `target`; else None twice.

    systemd-networkd tells nothing to resolvconf, which leaves a plain file alone.
    """
    target = os.readlink(path) if os.path.islink(path) else None
    if not os.path.isfile(path) or (target and "/resolvconf/" not in target):
        return None, None
    with open(path, errors="replace") as source:
        return source.read(), target


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    resolv_conf, resolv_link = resolver()
    try:
        survey = {
            "interfaces": [
                {**link, "properties": properties(link["name"])} for link in interfaces(module.run_command)
            ],
            "routes": routes(module.run_command),
            "session": ssh_session(),
            "files": configuration(bool(module.get_bin_path("ifup"))),
            "asides": sorted(
                glob.glob("/etc/**/*.before-trainyard*", recursive=True)
                + glob.glob("/run/NetworkManager/*.before-trainyard*")
            ),
            "hidden_profiles": hidden_profiles(),
            "active": active(
                module.run_command, ["systemd-networkd", "NetworkManager", "systemd-resolved", "networking"]
            ),
            "armed": sorted(glob.glob(f"{GUARD}/[a-z]*/manifest.json")),
            "cloud_init": os.path.isdir("/etc/cloud/cloud.cfg.d"),
            "resolv_conf": resolv_conf,
            "resolv_link": resolv_link,
            "netplan": bool(module.get_bin_path("netplan")),
        }
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"the network of this host cannot be read: {error}")
    module.exit_json(changed=False, survey=survey)


if __name__ == "__main__":
    main()
