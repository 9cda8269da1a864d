"""A lab that is like the cluster of an inventory: its hosts' own names, addresses and interfaces."""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.shell import LabError

CHECKOUT = Path(__file__).resolve().parent.parent
# Variables that say how Ansible gets to a host.
LEADS = [
    f"ansible_{name}"
    for name in [
        "become_method",
        "become_user",
        "connection",
        "control_path",
        "host_key_checking",
        "port",
        "private_key_file",
        "ssh_args",
        "ssh_common_args",
        "ssh_executable",
        "ssh_extra_args",
        "ssh_host",
        "ssh_pass",
        "ssh_port",
        "ssh_private_key_file",
        "ssh_user",
    ]
]


def like(inventory: str | Path, network: str = "") -> dict[str, Any]:
    """The fields of lab.lab.Options for INVENTORY's groups head and workers; raises LabError with what does not fit.

    NETWORK is where Ansible reaches them (192.168.48.0/22); without it, the inventory's `cluster_network`. Where
    `cluster_address` is another than `ansible_host`, it is the roles' task: the host gets a second interface,
    `cluster_interface`, and no address there. The first interface has the name that the inventory gives it, if any.
    """
    path = Path(inventory).resolve()
    groups = listed(path)
    names = [name for group in ("head", "workers") for name in _members(groups, group)]
    if not names:
        raise LabError(f"--like {inventory}: it has no host in the groups head and workers")
    found = {name: groups["_meta"]["hostvars"].get(name, {}) for name in names}
    addresses = [_address(inventory, name, variables) for name, variables in found.items()]
    subnet = network or str(next(iter(found.values())).get("cluster_network", ""))
    outside = [address for address in addresses if not within(address, subnet)]
    if outside:
        raise LabError(
            f"--like {inventory}: {', '.join(outside)} {'is' if len(outside) == 1 else 'are'} not in "
            f"{subnet or 'any network that it names'}: say by --network ADDRESS/PREFIX which network that is"
        )
    first, second = {}, set()
    for (name, variables), address in zip(found.items(), addresses, strict=True):
        interface = variables.get("cluster_interface")
        if interface and variables.get("cluster_address", address) == address:
            first[name] = interface
        elif interface:
            second.add(interface)
        if name not in first and (holder := _holder(variables, address)):
            first[name] = holder
    if len(second) > 1:
        raise LabError(
            f"--like {inventory}: second interfaces {', '.join(sorted(second))}: expected one name"
        )
    return {
        "like": str(path),
        "hosts": len(names),
        "names": names,
        "addresses": addresses,
        "subnet": subnet,
        "interfaces": first,
        "second": next(iter(second), ""),
    }


def _holder(variables: dict[str, Any], address: str) -> str:
    """The interface that the inventory's `network_interfaces` gives the address to, or ""."""
    for one in variables.get("network_interfaces") or ():
        if address in [str(held).split("/")[0] for held in one.get("addresses", [])]:
            return str(one.get("name", ""))
    return ""


def way_in_holds(inventory: Path, way_in: dict[str, str], names: list[str]) -> None:
    """Raises LabError where anything in the inventory would lead Ansible elsewhere than WAY_IN: to real machines."""
    found = listed(inventory)["_meta"]["hostvars"]
    for name in names:
        variables = found.get(name, {})
        others = [key for key in LEADS if key in variables and key not in way_in]
        others += [key for key, value in way_in.items() if variables.get(key) != value]
        if others:
            raise LabError(
                f"--like: {', '.join(others)} of {name} would lead elsewhere than into the lab: take "
                f"{'it' if len(others) == 1 else 'them'} out of a copy of the inventory, and use that"
            )


def _members(groups: dict[str, Any], group: str) -> list[str]:
    """The hosts of a group, and of those below it."""
    found = groups.get(group, {})
    below = [name for child in found.get("children", []) for name in _members(groups, child)]
    return list(dict.fromkeys([*found.get("hosts", []), *below]))


def listed(path: Path) -> dict[str, Any]:
    """What ansible-inventory makes of it."""
    places = [CHECKOUT / ".venv/bin", Path(sys.executable).parent]
    program = shutil.which("ansible-inventory", path=os.pathsep.join([*map(str, places), os.environ["PATH"]]))
    if not program:
        raise LabError("--like needs ansible-inventory, which this checkout's .venv lacks. Type: make venv")
    if not path.exists():
        raise LabError(f"--like {path}: there is no such inventory")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    # A file that is no inventory is a warning to Ansible, and an empty inventory.
    environment |= {"ANSIBLE_INVENTORY_UNPARSED_FAILED": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [program, "-i", str(path), "--list"], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise LabError(f"--like {path}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _address(inventory: str | Path, name: str, variables: dict[str, Any]) -> str:
    found = str(variables.get("ansible_host", "no address"))
    try:
        return str(ipaddress.IPv4Address(found))
    except ValueError:
        raise LabError(
            f"--like {inventory}: ansible_host of {name} is {found}: expected an IPv4 address"
        ) from None


def within(address: str, subnet: str) -> bool:
    """Whether the address is one of the subnet; not where either is none."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(subnet)
    except ValueError:
        return False
