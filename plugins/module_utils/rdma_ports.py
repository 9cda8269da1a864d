"""What /sys says of a host's RDMA ports, InfiniBand's and those of network cards, and which can carry a run."""

from __future__ import annotations

import glob
import ipaddress
import os
import re

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
ROCE_V2 = "RoCE v2"
OMNI_PATH = "hfi1"  # whose ports call themselves InfiniBand's
IFF_UP = 1  # linux/if.h
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
    digits), sm_lid (of the subnet manager that set it up; 0: none, and none is needed on Ethernet), driver (the
    card's, or ""), guests (whether it is a virtual function's, which mostly is a guest's), iwarp (whether it speaks
    that, and not RoCE), interface (on Ethernet that of its RoCE v2 address,
    else of its first, or ""), enabled (whether somebody set that up; None: not known), mtu (that interface's, bytes,
    or None), gids: [{index, type (RoCE v2, …), address (IPv4 or "")}], cards: [{interface, driver}] (below that
    interface, which may be a bond's or a VLAN's)}
    """
    found = []
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        rate, lid = RATE.match(_read(f"{path}/rate")), _read(f"{path}/sm_lid")
        gids, interface = _gids(path)
        device = path.rpartition("/ports/")[0]
        first = _read(f"{path}/gids/0").replace(":", "")
        flags = _read(f"{root}/sys/class/net/{interface}/flags") if interface else ""
        found.append(
            {
                "device": os.path.basename(device),
                "port": int(os.path.basename(path)),
                "state": _read(f"{path}/state").partition(":")[2].strip(),
                "gbit": float(rate[0]) if rate else 0.0,
                "layer": _read(f"{path}/link_layer"),
                "guid": first[16:],
                "sm_lid": int(lid, 0) if lid else 0,
                "driver": _driver(device),
                "guests": os.path.exists(f"{device}/device/physfn"),
                "iwarp": "RNIC" in _read(f"{device}/node_type"),
                "interface": interface,
                "enabled": bool(int(flags, 0) & IFF_UP) if flags else None,
                "mtu": int(_read(f"{root}/sys/class/net/{interface}/mtu") or 0) or None
                if interface
                else None,
                "gids": gids,
                "cards": [
                    {"interface": card, "driver": _driver(f"{root}/sys/class/net/{card}")}
                    for card in _cards(root, interface)
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


def _driver(place: str) -> str:
    path = f"{place}/device/driver"
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


def roce_gid(port: dict) -> dict | None:
    """The GID by which RoCE v2 is routed: the one of an IPv4 address."""
    return next((gid for gid in port["gids"] if gid["type"] == ROCE_V2 and gid["address"]), None)


def port_fault(port: dict) -> str:
    """Why a port of rdma_ports' cannot carry a run, with the cure; "" if it can."""
    found, expected = found_and_expected(port)
    return f"{found}; expected {expected}" if found else ""


def found_and_expected(port: dict) -> tuple[str, str]:
    """port_fault in two: what was found of the port, and what was expected, with the cure; two "" if it can."""
    found, expected = _link_fault(port) or _kind_fault(port) or ("", "")
    return (f"{port['device']}/{port['port']}: found {found}", expected) if found else ("", "")


def _link_fault(port: dict) -> tuple[str, str] | None:
    """(found, expected) of a port whose link is not up; None where it is."""
    interface = port["interface"]
    if port["layer"] == INFINIBAND and port["state"] in ("INIT", "ARMED"):
        if port["driver"] == OMNI_PATH:
            return port["state"], "ACTIVE. Omni-Path's own fabric manager (opafm) sets it up"
        return (
            f"{port['state']}, no subnet manager",
            "ACTIVE. A switch runs one, or a host of the group opensm: put one or two hosts that have InfiniBand ports "
            "there",
        )
    if port["state"] == "ACTIVE":
        return None
    state = port["state"] or "no state"
    if port["enabled"] is False:
        return (
            f"{state}, since nobody set up its interface {interface}",
            f"ACTIVE. Give {interface} an address by network_interfaces, which sets it up",
        )
    on = f" of {interface}" if interface else ""
    return state, f"ACTIVE. Look at the cable{on} and the switch's port"


def _kind_fault(port: dict) -> tuple[str, str] | None:
    """(found, expected) of a port that is up, and that NCCL cannot use; None where it can."""
    if port["layer"] == INFINIBAND:
        if port["sm_lid"]:
            return None
        return "sm_lid 0", f"that of a subnet manager. See there `sminfo -C {port['device']}`"
    if port["layer"] != ETHERNET:
        return (
            f"a link layer of {port['layer'] or 'no name'}",
            "InfiniBand or Ethernet, the ones that NCCL drives here",
        )
    if port["iwarp"]:
        cure = ""
        if port["driver"] == "ice":
            cure = (
                ". There set enable_iwarp to false and then enable_roce to true (devlink dev param set pci/0000:… name "
                "enable_iwarp value false cmode runtime)"
            )
        return "iWARP", f"RoCE, the way that NCCL goes on Ethernet{cure}"
    if roce_gid(port):
        return None
    if old := next((gid for gid in port["gids"] if gid["address"]), None):
        return f"{old['address']} by RoCE v1 alone", f"{ROCE_V2}, which a ConnectX-3 has only as Pro"
    return (
        f"no GID of type {ROCE_V2} with an IPv4 address",
        f"one, which comes with the address of {port['interface'] or 'its interface'}. Give it one by "
        "network_interfaces",
    )


def fastest(ports: list[dict]) -> str:
    """The device whose port carries most, the first of equals, to measure with; "" where none carries anything.

    With its port, as in mlx4_0:2, where that is not the first, which programs take by themselves.
    """
    up = [one for one in ports if not port_fault(one)]
    best = max(up, key=lambda one: one["gbit"]) if up else {"device": "", "port": 1}
    return best["device"] if best["port"] == 1 else f"{best['device']}:{best['port']}"


def _gids(port: str) -> tuple[list[dict], str]:
    """The addresses of a port that are in use, and the interface of the one that NCCL takes, else of the first."""
    found, first, taken = [], "", ""
    for path in sorted(glob.glob(f"{port}/gids/*"), key=lambda path: int(os.path.basename(path))):
        text = _read(path)
        if not text.replace(":", "").strip("0"):
            continue
        index = os.path.basename(path)
        mapped = ipaddress.IPv6Address(text).ipv4_mapped
        interface = _read(f"{port}/gid_attrs/ndevs/{index}")
        kind = _read(f"{port}/gid_attrs/types/{index}")
        first = first or interface
        if mapped and kind == ROCE_V2:  # of a VLAN, where only that has an address
            taken = taken or interface
        found.append({"index": int(index), "type": kind, "address": str(mapped or "")})
    return found, taken or first


def _read(path: str) -> str:
    """The text of a file, stripped; empty if it cannot be read, as the attributes of unused GIDs cannot."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
