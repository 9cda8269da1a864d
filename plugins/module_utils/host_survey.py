"""What a host's live state says: its interfaces, the SSH session that a module runs in, whether it is a container."""

import json
import os
import subprocess


def interfaces(run_command):
    """[{name, mac, kind, up, addresses: [CIDR]}] without loopback; kind is None for what is not a virtual device."""
    rc, out, err = run_command(["ip", "-json", "-details", "address", "show"])
    if rc:
        raise OSError(f"`ip address show` failed: {err.strip()}")
    found = []
    for link in json.loads(out):
        if not link or "LOOPBACK" in link["flags"]:
            continue
        found.append(
            {
                "name": link["ifname"],
                "mac": (link.get("permaddr") or link.get("address") or "").lower(),
                "kind": link.get("linkinfo", {}).get("info_kind"),
                "up": "LOWER_UP" in link["flags"],
                "addresses": [
                    f"{address['local']}/{address['prefixlen']}"
                    for address in link["addr_info"]
                    if address["scope"] == "global"
                ],
            }
        )
    return found


def in_container():
    """True where the kernel is another's, and refuses even root some of its settings."""
    return subprocess.run(["systemd-detect-virt", "--container", "--quiet"], check=False).returncode == 0


def ssh_session(proc="/proc"):
    """{client, address, port} of the SSH session above this process (address and port: this host's end), or None.

    sudo strips SSH_CONNECTION from the environment, so the ancestors are asked, nearest first.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"{proc}/{pid}/environ", "rb") as source:
                environment = source.read().split(b"\0")
            with open(f"{proc}/{pid}/stat") as source:
                parent = int(source.read().rpartition(")")[2].split()[1])
        except OSError:
            return None
        for variable in environment:
            if variable.startswith(b"SSH_CONNECTION="):
                client, _, address, port = variable.decode().split("=", 1)[1].split()
                return {"client": client, "address": address.removeprefix("::ffff:"), "port": int(port)}
        pid = parent
    return None


def active(run_command, units):
    """{unit: whether systemd has it running} for `units`, names without .service."""
    _, out, _ = run_command(["systemctl", "is-active", *units])
    states = out.split()
    return (
        {unit: state == "active" for unit, state in zip(units, states, strict=True)}
        if states
        else dict.fromkeys(units, False)
    )
