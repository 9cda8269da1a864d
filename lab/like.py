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


def like(inventory: str | Path, network: str = "") -> dict[str, Any]:
    """The fields of lab.lab.Options for INVENTORY's groups head and workers; raises LabError with what does not fit.

    NETWORK is where Ansible reaches them (192.168.48.0/22); without it, the inventory's `cluster_network`. Where
    `cluster_address` is another than `ansible_host`, it is the roles' task: the host gets a second interface,
    `cluster_interface`, and no address there.
    """
    path = Path(inventory).resolve()
    groups = _listed(path)
    names = [name for group in ("head", "workers") for name in groups.get(group, {}).get("hosts", [])]
    if not names:
        raise LabError(f"--like {inventory}: it has no host in the groups head and workers")
    found = {name: groups["_meta"]["hostvars"].get(name, {}) for name in names}
    addresses = [_address(inventory, name, variables) for name, variables in found.items()]
    subnet = network or str(next(iter(found.values())).get("cluster_network", ""))
    outside = [address for address in addresses if not _within(address, subnet)]
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


def _listed(path: Path) -> dict[str, Any]:
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


def _within(address: str, subnet: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(subnet)
    except ValueError:
        return False
