"""What /sys says of a host's RDMA ports: InfiniBand's, and those of network cards that speak RoCE."""

from __future__ import annotations

import glob
import ipaddress
import os
import re

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
RATE = re.compile(r"[\d.]+")
# Counters of a bad cable or a full buffer, as InfiniBand's standard names them; and of packets that RDMA sent again, by
# the names of several drivers (mlx5, bnxt_re, rxe, …): some of those say nothing.
CABLE = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
SENT_AGAIN = (
    "out_of_sequence",
    "out_of_seq_request",
    "packet_seq_err",
    "rcvd_seq_err",
    "local_ack_timeout_err",
    "to_retransmits",
    "seq_err_naks_rcvd",
)


def rdma_ports(root: str = "") -> list[dict]:
    """Every RDMA port below `root`/sys, by device and number.

    {device, port, state (ACTIVE, INIT, DOWN, …), gbit, layer (InfiniBand, Ethernet), guid (of the port, 16 hexadecimal
    digits), sm_lid (of the subnet manager that set it up; 0: none, and none is needed on Ethernet), interface (whose
    port it is on Ethernet, or ""), mtu (that interface's, bytes, or None), gids: [{index, type (RoCE v2, …), address
    (IPv4 or "")}], cards: [{interface, driver}] (below that interface, which may be a bond's or a VLAN's)}
    """
    found = []
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        rate, lid = RATE.match(_read(f"{path}/rate")), _read(f"{path}/sm_lid")
        gids, interface = _gids(path)
        first = _read(f"{path}/gids/0").replace(":", "")
        found.append(
            {
                "device": path.split("/")[-3],
                "port": int(os.path.basename(path)),
                "state": _read(f"{path}/state").partition(":")[2].strip(),
                "gbit": float(rate[0]) if rate else 0.0,
                "layer": _read(f"{path}/link_layer"),
                "guid": first[16:],
                "sm_lid": int(lid, 0) if lid else 0,
                "interface": interface,
                "mtu": int(_read(f"{root}/sys/class/net/{interface}/mtu") or 0) or None
                if interface
                else None,
                "gids": gids,
                "cards": [
                    {"interface": card, "driver": _driver(root, card)} for card in _cards(root, interface)
                ],
            }
        )
    return found


def _cards(root: str, interface: str) -> list[str]:
    """The interfaces below one that is made of others; itself where it is none."""
    below = sorted(glob.glob(f"{root}/sys/class/net/{interface}/lower_*")) if interface else []
    names = [path.rpartition("/lower_")[2] for path in below]
    found = [card for name in names for card in _cards(root, name)]
    return list(dict.fromkeys(found)) or ([interface] if interface else [])


def _driver(root: str, interface: str) -> str:
    path = f"{root}/sys/class/net/{interface}/device/driver"
    return os.path.basename(os.path.realpath(path)) if os.path.exists(path) else ""


def rdma_counters(root: str = "") -> dict[str, dict[str, int]]:
    """By "DEVICE port NUMBER" what a port has counted, as far as it does: rx_bytes, tx_bytes, CABLE, SENT_AGAIN."""
    found = {}
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        told = {name: _read(f"{path}/counters/{name}") for name in CABLE}
        told |= {name: _read(f"{path}/hw_counters/{name}") for name in SENT_AGAIN}
        # In words of four bytes, whatever the port's width.
        for name, data in (("rx_bytes", "port_rcv_data"), ("tx_bytes", "port_xmit_data")):
            words = _read(f"{path}/counters/{data}")
            told[name] = str(4 * int(words)) if words.isdigit() else ""
        name = f"{path.split('/')[-3]} port {os.path.basename(path)}"
        found[name] = {key: int(value) for key, value in told.items() if value.isdigit()}
    return found


def fastest(ports: list[dict]) -> str:
    """The device whose port is up at the highest rate, the first of equals, to measure with; "" where none is up.

    With its port, as in mlx4_0:2, where that is not the first, which programs take by themselves.
    """
    up = [one for one in ports if one["state"] == "ACTIVE"]
    best = max(up, key=lambda one: one["gbit"]) if up else {"device": "", "port": 1}
    return best["device"] if best["port"] == 1 else f"{best['device']}:{best['port']}"


def _gids(port: str) -> tuple[list[dict], str]:
    """The addresses of a port that are in use, and the interface that the first of them belongs to."""
    found, interface = [], ""
    for path in sorted(glob.glob(f"{port}/gids/*"), key=lambda path: int(os.path.basename(path))):
        text = _read(path)
        if not text.replace(":", "").strip("0"):
            continue
        index = os.path.basename(path)
        mapped = ipaddress.IPv6Address(text).ipv4_mapped
        interface = interface or _read(f"{port}/gid_attrs/ndevs/{index}")
        kind = _read(f"{port}/gid_attrs/types/{index}")
        found.append({"index": int(index), "type": kind, "address": str(mapped or "")})
    return found, interface


def _read(path: str) -> str:
    """The text of a file, stripped; empty if it cannot be read, as the attributes of unused GIDs cannot."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
