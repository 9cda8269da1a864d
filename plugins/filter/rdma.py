"""What a host's RDMA ports (module rdma_survey) are good for, and what their subnet managers and QoS shall be.

Pure functions: nothing here reads a file or talks to a host.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from rdma_ports import ETHERNET, INFINIBAND, OMNI_PATH, port_fault, roce_gid

LARGEST = 4096  # bytes that RDMA sends at a time, at most
JUMBO = 4200  # bytes of an interface's MTU that hold them with their headers


def rdma_faults(survey: Mapping[str, Any], host: str) -> list[str]:
    """Why no port of a host can carry RDMA, with the cure; empty where one can.

    A port that is down beside one that is up is none: cards with two ports often have one cable.
    """
    ports = survey["ports"]
    if not ports:
        return [
            f"{host}: found no RDMA device; expected at least one, since the host is in the group rdma. See there "
            "`lspci -nn | grep -iE 'mellanox|infiniband|ethernet'` and `dmesg | grep -iE 'mlx|bnxt|irdma'`; or take "
            "the host out of the group"
        ]
    faults = [port_fault(port) for port in ports]
    if "" in faults:
        return []
    return [
        *(f"{host}: {fault}" for fault in faults),
        f"{host}: or take it out of the group rdma, to train over TCP",
    ]


def rdma_told(survey: Mapping[str, Any]) -> list[str]:
    """A line for each port that carries RDMA, and what would make it faster; of one that only seems to, why not."""
    seen = [(port, port_fault(port)) for port in survey["ports"]]
    shown = [
        (port, fault)
        for port, fault in seen
        if not fault or (port["state"] == "ACTIVE" and not port["guests"])
    ]
    return [fault or _told(port) for port, fault in shown]


def _name(port: Mapping[str, Any]) -> str:
    return f"{port['device']}/{port['port']}"


def _told(port: Mapping[str, Any]) -> str:
    if port["layer"] == INFINIBAND:
        return f"{_name(port)}: InfiniBand, ACTIVE at {port['gbit']:g} Gbit/s"
    gid = roce_gid(port)
    where = f"{port['interface']} ({gid['address']}, GID {gid['index']})"
    text = f"{_name(port)}: RoCE v2 over {where}, {port['gbit']:g} Gbit/s"
    if port["mtu"] and port["mtu"] < JUMBO:
        text += (
            f"; with its MTU of {port['mtu']} it sends less than {LARGEST} bytes at a time: mtu: 9000 in "
            "network_interfaces, and on the switch, makes it faster"
        )
    return text


# ---- opensm ----


def opensm_plan(
    surveys: Mapping[str, Mapping[str, Any]], hosts: list[str], group: list[str]
) -> dict[str, dict]:
    """What each of `hosts` does about subnet managers: {guids, ports, priority, skip, problem}.

    guids: of its ports, to manage. ports: "device port" by these.

    surveys: rdma_survey's of all hosts of the group, with managers. hosts: those whose plans are asked for. group: the
    group opensm in the inventory's order; its first host is the master, its second the standby. Where somebody else's
    manager reigns, a switch's say, ours stays away: two that do not know each other set up the fabric in turn.
    """
    own = {port["guid"] for survey in surveys.values() for port in survey["ports"]}
    foreign = {
        port["manager"]["guid"]
        for survey in surveys.values()
        for port in survey["ports"]
        if port.get("manager") and port["manager"]["guid"] not in own
    }
    return {host: _opensm(host, surveys[host], group.index(host), foreign) for host in hosts}


def _opensm(host: str, survey: Mapping[str, Any], place: int, foreign: set[str]) -> dict:
    plan: dict[str, Any] = {"guids": [], "ports": {}, "priority": 15 - place, "skip": "", "problem": ""}
    ports = [port for port in survey["ports"] if port["layer"] == INFINIBAND and port["driver"] != OMNI_PATH]
    if not ports:
        kinds = [
            (_name(one), "Omni-Path" if one["driver"] == OMNI_PATH else one["layer"])
            for one in survey["ports"]
        ]
        found = ", ".join(f"{name} is {kind}" for name, kind in kinds) or "no RDMA device"
        plan["problem"] = (
            f"{host}: opensm: found {found}; expected an InfiniBand port. OpenSM manages InfiniBand; RoCE has no "
            "subnet manager, and needs none, and Omni-Path has its own. Take the host out of the group opensm"
        )
    elif foreign:
        plan["skip"] = (
            f"a subnet manager reigns here already (GUID {', '.join(sorted(foreign))}): OpenSM is left out"
        )
    else:
        plan["ports"] = {port["guid"]: f"{port['device']} {port['port']}" for port in ports}
        plan["guids"] = list(plan["ports"])
    return plan


# ---- roce_qos ----


def roce_ports(survey: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> list[dict]:
    """The ports on Ethernet, as the program roce-qos takes them: {device, port, interface}, one a card of a bond.

    asked: as `roce_silent` has it; those that it names are left out, and those of `roce_deaf`.
    """
    without = {*roce_silent(asked or {}), *roce_deaf(survey)}
    return [
        {"device": port["device"], "port": port["port"], "interface": card["interface"]}
        for port in survey["ports"]
        if port["layer"] == ETHERNET
        for card in port["cards"]
        if card["interface"] not in without
    ]


def roce_silent(asked: Mapping[str, Any]) -> dict[str, str]:
    """The interfaces whose drivers know no classes, as those of a card's virtual functions do not, and what they said.

    asked: what `dcb app show` said of them, as a loop's register has it.
    """
    told = [one for one in asked.get("results", []) if one.get("rc") and one.get("stderr")]
    return {one["item"]["interface"]: one["stderr"] for one in told}


def roce_deaf(survey: Mapping[str, Any]) -> list[str]:
    """The interfaces whose driver takes a DSCP's class, and tells the card nothing of it: those of ConnectX-3."""
    cards = [card for port in survey["ports"] if port["layer"] == ETHERNET for card in port["cards"]]
    return sorted({card["interface"] for card in cards if card["driver"] == "mlx4_core"})


def traffic_class(dscp: int) -> int:
    """The IP header's byte for a DSCP, with the bit that says that ECN is understood (RFC 3168: ECT(0))."""
    return dscp * 4 + 2


class FilterModule:
    def filters(self) -> dict:
        """The filters, by name."""
        return {
            "rdma_faults": rdma_faults,
            "rdma_told": rdma_told,
            "opensm_plan": opensm_plan,
            "roce_ports": roce_ports,
            "roce_silent": roce_silent,
            "roce_deaf": roce_deaf,
            "traffic_class": traffic_class,
        }
