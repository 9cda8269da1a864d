"""What listens on a host, and which firewall it has: the input of the filter firewall_plan."""

import glob
import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import (
    active,
    from_elsewhere,
    interfaces,
    sockets,
    ssh_logins,
    ssh_ports,
    ssh_session,
)

DOCUMENTATION = r"""
module: firewall_survey
short_description: Read what listens on this host and which firewalls are active
description: Reads only.
options: {}
"""


GUARD = "/var/lib/trainyard-guard"  # where the guard keeps what is not confirmed yet
OTHERS_OF_THE_KERNEL = {4789, 4791, 8472}  # VXLAN, RoCE, Linux' older VXLAN
# iptables-save: -p tcp … --dport 80 -j DNAT --to-destination 172.17.0.2:80; nft: tcp dport 80 … dnat to 172.17.0.2:80
PASSED_ON = re.compile(
    r"\b(tcp|udp)\b[^\n]*?\bdport (\d+)\b[^\n]*?(?:--to-destination|dnat (?:ip6? )?to) (\S+)"
)
# What firewall_allow has opened, as `nft list` writes the rules of firewall_plan.
OPENED = re.compile(
    r"^\s*(?:ip6? saddr (?:\{[^}]*\}|\S+) )?(tcp|udp) dport (\d+)(?:-(\d+))? accept$", re.MULTILINE
)


def listening(found):
    """[{proto, port, address, process}] of those of the host's sockets() that other machines could reach."""
    return [
        {
            **{key: item[key] for key in ("proto", "port", "address")},
            "process": item["owners"][0][0] if item["owners"] else "an unknown process",
        }
        for item in found
        if item["state"] in ("LISTEN", "UNCONN")
        and not item["address"].startswith("127.")
        and item["address"] != "::1"
    ]


def published(module):
    """[{proto, port, process}] of the ports that are passed on to containers, as iptables or nftables have them."""
    found = {}
    for command in ("iptables-save -t nat", "ip6tables-save -t nat", "nft list ruleset"):
        if module.get_bin_path(command.split()[0]):
            _, out, _ = module.run_command(command.split())
            for proto, port, target in PASSED_ON.findall(out):
                found.setdefault((proto, int(port)), f"passed on to {target}")
    return [{"proto": proto, "port": port, "process": name} for (proto, port), name in sorted(found.items())]


def loaded(module):
    """Our rules in the kernel: {table, unit (active, so that they come again with a restart of nftables), opened}.

    opened: [{proto, first, last}], the ports that they open to others than the peers, besides SSH's.
    """
    if not module.get_bin_path("nft"):
        return {"table": False, "unit": False, "opened": []}
    rc, out, _ = module.run_command(["nft", "list", "table", "inet", "trainyard"])
    unit = active(module.run_command, ["trainyard-firewall"])["trainyard-firewall"]
    opened = [
        {"proto": proto, "first": int(first), "last": int(last or first)}
        for proto, first, last in OPENED.findall(out)
    ]
    return {"table": rc == 0 and "policy drop" in out, "unit": unit, "opened": opened}


def tunnels(module, session, found):
    """The UDP port of the WireGuard interface by which the controller came, in a list; an empty one where it came
    another way, and None where the port is not known.

    The way to it would be shut with that port: at first unnoticed, as long as what was said before is remembered.
    """
    if not session:
        return []
    link = next(
        (
            one["name"]
            for one in interfaces(module.run_command)
            if one["kind"] == "wireguard"
            and session["address"] in [address.partition("/")[0] for address in one["addresses"]]
        ),
        None,
    )
    if link and module.get_bin_path("wg"):
        rc, out, _ = module.run_command(["wg", "show", link, "listen-port"])
        if rc == 0 and out.strip().isdigit():
            return [int(out)]
    # networkd and NetworkManager do without that program: the kernel's own sockets belong to no process.
    kernels = {
        one["port"] for one in found if one["proto"] == "udp" and not one["owners"]
    } - OTHERS_OF_THE_KERNEL
    if not link:
        return []
    return list(kernels) if len(kernels) == 1 else None


def ufw_enabled():
    """Whether ufw is set to be on: its unit is active on machines where it does nothing, too."""
    try:
        with open("/etc/ufw/ufw.conf") as source:
            return any(line.strip().lower() == "enabled=yes" for line in source)
    except OSError:
        return False


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        found = sockets(module.run_command)
        ports = ssh_ports(module.run_command, found)
        session = ssh_session()
        # Who must not be shut out: the controller; where that is this machine itself, whoever is logged in to it.
        outside = session and from_elsewhere(session["client"], session["address"])
        survey = {
            "listening": listening(found),
            "published": published(module),
            "ssh_ports": ports,
            "session": session,
            "tunnels": tunnels(module, session, found),
            "clients": [session["client"]] if outside else ssh_logins(found, ports),
            "ufw": ufw_enabled(),
            "firewalld": active(module.run_command, ["firewalld"])["firewalld"],
            "bridges": sorted(name for name in os.listdir("/sys/class/net") if name.startswith("br-")),
            "nft": bool(module.get_bin_path("nft")),
            "loaded": loaded(module),
            "armed": sorted(glob.glob(f"{GUARD}/[a-z]*/manifest.json")),
        }
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"this host's sockets cannot be read: {error}")
    module.exit_json(changed=False, survey=survey)


if __name__ == "__main__":
    main()
