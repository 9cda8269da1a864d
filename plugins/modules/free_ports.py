#!/usr/bin/python
"""Refuse a host on which somebody else's program has a port that a service of ours is to have."""

from __future__ import annotations

DOCUMENTATION = r"""
module: free_ports
short_description: See that nobody else's program listens at the ports that services of Trainyard are to have
description:
  - Reads only. Units named C(trainyard-…) may have them, so that a second run finds nothing wrong.
  - Needs root, to know whose a port is.
options:
  wanted:
    description: The ports, each with the address at which it is to be listened, and the variable that names it.
    type: list
    elements: dict
    required: true
    options:
      variable: {type: str, required: true, description: What sets another port}
      address: {type: str, required: true, description: An address of the host's}
      port: {type: int, required: true, description: TCP's}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Refuse a host on which another etcd is
  free_ports:
    wanted: [{variable: etcd_port, address: 192.168.1.100, port: 2389}]
  become: true
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_survey import sockets

EVERYWHERE = ("0.0.0.0", "*")  # ss writes * for what takes IPv4 by a socket of IPv6


def units(run_command) -> dict[int, str]:
    """The service that each main process is of, by its id."""
    _, out, _ = run_command(["systemctl", "show", "--property=Id,MainPID", "*.service"])
    found = {}
    for block in out.split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if unit.get("MainPID", "0") != "0":
            found[int(unit["MainPID"])] = unit["Id"]
    return found


def unit_of(one: dict, services: dict[int, str]) -> str:
    """The service whose main process has the socket; "" for a child's, a container's and the kernel's."""
    return next((services[pid] for _, pid in one["owners"] if pid in services), "")


def strangers(want: dict, found: list[dict], services: dict[int, str]) -> list[dict]:
    """Those of the host's sockets() that have a wanted port. services: units()."""
    return [
        one
        for one in found
        if (one["proto"], one["state"], one["port"]) == ("tcp", "LISTEN", want["port"])
        and one["address"] in (want["address"], *EVERYWHERE)
        and not unit_of(one, services).startswith("trainyard-")
    ]


def fault(want: dict, one: dict, unit: str) -> str:
    """What is said of a socket that is in the way, which `unit` has."""
    name, pid = one["owners"][0] if one["owners"] else ("the kernel", 0)
    whose = f"{name} (process {pid}{', ' if unit else ''}{unit})" if pid else name
    end = f"systemctl disable --now {unit}" if unit else f"ss -ltnp 'sport = :{want['port']}' shows it"
    if name == "docker-proxy":
        end = f"docker ps --filter publish={want['port']} names the container of it, which docker stop ends"
    # systemd listens for a service that it starts when somebody comes, as for Cockpit's; while that runs both do.
    if 1 in (owner for _, owner in one["owners"]):
        end = f"systemctl list-sockets shows the unit of {want['port']}, which systemctl disable --now ends"
    return (
        f"{want['variable']}: found {whose} listening at {one['address']}:{want['port']}; expected that port of "
        f"{want['address']} to be free for Trainyard's own. Set {want['variable']} to another one, or end that program "
        f"(sudo {end})."
    )


def faults(wanted: list[dict], found: list[dict], services: dict[int, str]) -> list[str]:
    """A sentence for each wanted port that is another's."""
    return [
        fault(want, others[0], unit_of(others[0], services))
        for want in wanted
        if (others := strangers(want, found, services))
    ]


def main() -> None:
    want = {
        "variable": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
    }
    module = AnsibleModule(
        argument_spec={"wanted": {"type": "list", "elements": "dict", "options": want, "required": True}},
        supports_check_mode=True,
    )
    try:
        found = sockets(module.run_command)
    except OSError as error:
        module.fail_json(msg=f"this host's sockets cannot be read: {error}")
    if said := faults(module.params["wanted"], found, units(module.run_command)):
        module.fail_json(msg=" ".join([*said, "Nothing was changed."]))
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
