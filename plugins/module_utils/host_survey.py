"""What a host's live state says: interfaces, sockets, SSH's ports and logins, whether it is a container."""

import array
import fcntl
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time

SIOCETHTOOL, ETHTOOL_GDRVINFO = 0x8946, 3  # linux/sockios.h, linux/ethtool.h


def interfaces(run_command, link_local=False):
    """[{name, altnames, mac, link_type, kind, master, driver, enabled, up, mtu, mtu_range, addresses: [CIDR],
    dynamic: [CIDR]}] without loopback.

    altnames: by which else it may be called; link_type: of its hardware addresses, such as ether or infiniband;
    kind is None for a wired card, wlan for a wireless one, else the virtual device's; master: the bond or bridge that
    has it in, or None; driver None where none says its name; enabled: somebody set it up; up: there is a carrier, too;
    mtu_range: [least, most] that it takes, 0 where that is not known; dynamic: those of the addresses that a router or
    a lease gave for a while. link_local: with the IPv4 addresses, too, that it gave itself (169.254.…).
    """
    rc, out, err = run_command(["ip", "-json", "-details", "address", "show"])
    if rc:
        raise OSError(f"`ip address show` failed: {err.strip()}")
    found = []
    for link in json.loads(out):
        if not link or "LOOPBACK" in link["flags"]:
            continue
        addresses = {
            f"{address['local']}/{address['prefixlen']}": bool(address.get("dynamic"))
            for address in link["addr_info"]
            if address["scope"] == "global"
            or (link_local and address["scope"] == "link" and ":" not in address["local"])
        }
        wireless = os.path.exists(f"/sys/class/net/{link['ifname']}/phy80211")
        found.append(
            {
                "name": link["ifname"],
                "altnames": link.get("altnames", []),
                "link_type": link.get("link_type", "ether"),
                "mac": (link.get("permaddr") or link.get("address") or "").lower(),
                "kind": link.get("linkinfo", {}).get("info_kind") or ("wlan" if wireless else None),
                "master": link.get("master"),
                "driver": driver(link["ifname"]),
                "enabled": "UP" in link["flags"],
                "up": "LOWER_UP" in link["flags"],
                "mtu": link["mtu"],
                "mtu_range": [link.get("min_mtu", 0), link.get("max_mtu", 0)],
                "addresses": list(addresses),
                "dynamic": [address for address, dynamic in addresses.items() if dynamic],
            }
        )
    return found


def routes(run_command):
    """[{to, via, interface, version, told, beside}] of the kernel's main tables, of each way where a route has several.

    `to` is default or a network, `via` None on the link, version that of IP; told: a router has advertised it; beside:
    the interfaces of its other ways.
    """
    found = []
    for version in (4, 6):
        rc, out, _ = run_command(["ip", f"-{version}", "-json", "route", "show"])
        for one in json.loads(out or "[]") if rc == 0 else []:  # a kernel without IPv6
            ways = [way for way in one.get("nexthops", [one]) if "dev" in way]
            for way in ways:
                via = way.get(
                    "gateway", way.get("via", {}).get("host")
                )  # of IPv6, where the route is of IPv4
                route = {"to": one["dst"], "via": via, "interface": way["dev"], "version": version}
                beside = [other["dev"] for other in ways if other is not way]
                found.append({**route, "told": one.get("protocol") == "ra", "beside": beside})
    return found


def driver(interface):
    """The name of the interface's driver as netplan's and systemd-networkd's matches know it, or None."""
    answer = array.array("B", struct.pack("I", ETHTOOL_GDRVINFO) + bytes(192))
    request = struct.pack("16sP", interface.encode(), answer.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)
    except OSError:
        return None
    return answer.tobytes()[4:36].rstrip(b"\0").decode(errors="replace") or None


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
                words = variable.decode(errors="replace").split("=", 1)[1].split()
                # Of what came by no network, as from a machine to its guest (AF_VSOCK), sshd says UNKNOWN.
                if len(words) != 4 or "UNKNOWN" in words:
                    return None
                client, _, address, port = words
                client, address = client.removeprefix("::ffff:"), address.removeprefix("::ffff:")
                return {
                    "client": client.partition("%")[0],
                    "address": address.partition("%")[0],
                    "port": int(port),
                }
        pid = parent
    return None


def sockets(run_command):
    """[{proto, state, address, link, port, peer, owners: [(process, pid)]}] of all TCP and UDP sockets; needs root.

    Addresses are plain: no brackets, no interface, IPv4 as IPv4. link: the interface that it is bound to, or "". state
    is ss's word: LISTEN, UNCONN, ESTAB, …
    """
    command = ["ss", "--no-header", "--all", "--numeric", "--processes", "--tcp", "--udp"]
    rc, out, err = run_command(command)
    if rc:
        raise OSError(f"`ss` failed: {err.strip()}")
    found = []
    for line in out.splitlines():
        fields = line.split(None, 6)
        if len(fields) < 6:
            continue
        (address, port), (peer, _) = plain(fields[4]), plain(fields[5])
        if port.isdigit():
            owners = re.findall(r'\("([^"]+)",pid=(\d+)', fields[6] if len(fields) > 6 else "")
            found.append(
                {
                    "proto": fields[0],
                    "state": fields[1],
                    "address": address,
                    "link": fields[4].rpartition(":")[0].strip("[]").partition("%")[2],
                    "port": int(port),
                    "peer": peer,
                    "owners": [(name, int(pid)) for name, pid in owners],
                }
            )
    return found


def plain(end):
    """(address, port), words, of an end of a socket as ss writes it."""
    address, _, port = end.rpartition(":")
    return address.partition("%")[0].strip("[]").removeprefix("::ffff:"), port


def sshd_asked(program, user="root", client="127.0.0.1", own="127.0.0.1", port=22):
    """The command by which sshd tells its settings, as they are for `user` who comes from `client` to `own`.

    A file with `Match LocalPort` is told of not at all where anything of the connection is left out.
    """
    return [program, "-T", "-C", f"user={user},host={client},addr={client},laddr={own},lport={port}"]


def ssh_ports(run_command, found, proc="/proc"):
    """The sorted TCP ports on which sshd takes logins, or will after a restart. `found`: the host's sockets().

    What a login holds open (ssh -R, X11) belongs to a process of sshd too, and is none of them.
    """
    ports = {
        item["port"]
        for item in found
        if item["state"] == "LISTEN" and any(takes_logins(name, pid, proc) for name, pid in item["owners"])
    }
    if sshd := shutil.which("sshd", path=f"/usr/sbin:/usr/local/sbin:{os.defpath}"):
        _, out, _ = run_command(sshd_asked(sshd))
        ports |= {int(port) for port in re.findall(r"(?m)^listenaddress \S*:(\d+)(?: rdomain .*)?$", out)}
    # Where systemd listens for it, and sshd has not been started yet.
    _, out, _ = run_command(["systemctl", "show", "--property=ActiveState,Listen", "ssh.socket"])
    if "ActiveState=active" in out.split():
        ports |= {int(port) for port in re.findall(r":(\d+) \(Stream\)", out)}
    return sorted(ports)


def takes_logins(name, pid, proc):
    """Whether a process is an sshd that listens, not one that serves a login: such a one is titled `sshd: USER …`."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as source:
            title = source.read()
        with open(f"{proc}/{pid}/status") as source:
            root = re.search(r"(?m)^Uid:\s+0\s", source.read())
    except OSError:
        return False
    return name == "sshd" and root is not None and (b"[listener]" in title or not title.startswith(b"sshd: "))


def from_elsewhere(client, address):
    """Whether a connection from `client` to this host's `address` comes from another machine."""
    return client != address and not ipaddress.ip_address(client).is_loopback


def ssh_logins(found, ports):
    """The sorted addresses of the other machines from which somebody is logged in by SSH, of the host's sockets()."""
    return sorted(
        {
            item["peer"]
            for item in found
            if (item["proto"], item["state"]) == ("tcp", "ESTAB")
            and item["port"] in ports
            and any(name.startswith("sshd") for name, _ in item["owners"])
            and from_elsewhere(item["peer"], item["address"])
        }
    )


def service(run_command, unit):
    """{started: seconds since boot, None where it does not run; unread: whether systemd has yet to read its files}."""
    names = ("ActiveState", "ActiveEnterTimestampMonotonic", "NeedDaemonReload")
    _, out, _ = run_command(["systemctl", "show", unit, f"--property={','.join(names)}"])
    said = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    started = (
        int(said["ActiveEnterTimestampMonotonic"]) / 1e6 if said.get("ActiveState") == "active" else None
    )
    return {"started": started, "unread": said.get("NeedDaemonReload") == "yes"}


def stale(started, path):
    """Whether a service was `started` before its file was written, as a run that ended in between leaves it."""
    if started is None or not os.path.exists(path):
        return False
    # Not later than now: a file of the future was written while the clock was wrong.
    return time.time() - time.monotonic() + started < os.stat(path).st_mtime <= time.time()


def active(run_command, units):
    """{unit: whether systemd has it running} for `units`, names without .service."""
    _, out, _ = run_command(["systemctl", "is-active", *units])
    states = out.split()
    return (
        {unit: state == "active" for unit, state in zip(units, states, strict=True)}
        if states
        else dict.fromkeys(units, False)
    )


def nearest(path: str) -> str:
    """The directory, of `path` and those above it, that is there."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
