"""What a switch must be told so that it treats RoCE's packets as the hosts do (the role roce_qos).

NX-OS: "QoS Configuration Guide" of Cisco's Nexus 9000 (classification, network QoS, queuing, priority flow control).
SONiC: config_db.json's tables, as sonic-swss' schema and sonic-yang-models have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

CNP_DSCP, CNP_PRIORITY = 48, 6  # congestion notifications, as cards send them
NXOS_FIRST = 7  # of NX-OS' groups the one that may come first: priority is for the highest number alone
MTU = 9216
ECN_FROM, ECN_TO, ECN_PERCENT = 150, 3000, 7  # KB of a queue from and to which marking grows, to that share


def roce_switch(hosts: list[str], hostvars: Mapping[str, Any], system: str, wanted: Mapping[str, Any]) -> str:
    """The text for the switch's `system`, for the ports that `hosts` are plugged into (roce_qos_switch_port).

    wanted: dscp, priority, pfc (whether that priority is paused instead of dropped).
    """
    if not hosts:
        raise AnsibleFilterError(
            "rdma: found no host in the group; expected those that are plugged into the switch"
        )
    ports = {host: str(hostvars[host].get("roce_qos_switch_port") or "") for host in hosts}
    missing = [host for host, port in ports.items() if not port]
    if missing:
        raise AnsibleFilterError(
            f"roce_qos_switch_port: found none for {', '.join(missing)}; expected the switch's port that the host is "
            "plugged into, such as Ethernet1/7. Write it at the host in the inventory"
        )
    write = {"cisco-nxos": _nxos, "sonic": _sonic}[system]
    return write(ports, wanted["dscp"], wanted["priority"], wanted["pfc"])


def roce_switch_first(system: str, wanted: Mapping[str, Any]) -> str:
    """What must be done on the switch before it is told the text of roce_switch; "" where nothing.

    sonic-swss' buffermgr makes a port's lossless priority group of its cable length, the pool and the vendor's table:
    all of the switch's model, so that only SONiC's own templates know them.
    """
    if system != "sonic" or not wanted["pfc"]:
        return ""
    return (
        "Before it, unless that was done there once: `sudo config qos reload`, which writes SONiC's default buffers, "
        "cable lengths and classes, for all ports; without CABLE_LENGTH and BUFFER_POOL SONiC makes no lossless "
        "priority group, and nothing is paused. In the end `show buffer information` must name a pg_lossless profile "
        "for each of these ports; tried on no switch. "
    )


def _nxos(ports: Mapping[str, str], dscp: int, priority: int, pfc: bool) -> str:
    pause = [f"    pause pfc-cos {priority}"] if pfc else []
    lines = [
        "! Written by Trainyard for RoCE.",
        "! `system qos` is for the whole switch: compare with `show policy-map system` first.",
        "class-map type qos match-all TRAINYARD-ROCE",
        f"  match dscp {dscp}",
        "class-map type qos match-all TRAINYARD-CNP",
        f"  match dscp {CNP_DSCP}",
        "policy-map type qos TRAINYARD-MARK",
        "  class TRAINYARD-ROCE",
        f"    set qos-group {priority}",
        "  class TRAINYARD-CNP",
        f"    set qos-group {NXOS_FIRST}",
        "policy-map type network-qos TRAINYARD-NETWORK",
        f"  class type network-qos c-8q-nq{priority}",
        f"    mtu {MTU}",
        *pause,
        "policy-map type queuing TRAINYARD-QUEUES",
        f"  class type queuing c-out-8q-q{priority}",
        "    bandwidth remaining percent 60",
        f"    random-detect minimum-threshold {ECN_FROM} kbytes maximum-threshold {ECN_TO} kbytes "
        f"drop-probability {ECN_PERCENT} weight 0 ecn",
        "  class type queuing c-out-8q-q-default",
        "    bandwidth remaining percent 40",
        *(
            line
            for group in range(1, NXOS_FIRST)
            if group != priority
            for line in (f"  class type queuing c-out-8q-q{group}", "    bandwidth remaining percent 0")
        ),
        f"  class type queuing c-out-8q-q{NXOS_FIRST}",
        "    priority level 1",
        "system qos",
        "  service-policy type network-qos TRAINYARD-NETWORK",
        "  service-policy type queuing output TRAINYARD-QUEUES",
    ]
    for host, port in ports.items():
        lines += [
            f"interface {port}",
            f"  description {host}",
            f"  mtu {MTU}",
            *(
                ["  priority-flow-control mode on", "  priority-flow-control watch-dog-interval on"]
                if pfc
                else []
            ),
            "  service-policy type qos input TRAINYARD-MARK",
        ]
    return "\n".join(lines) + "\n"


def _sonic(ports: Mapping[str, str], dscp: int, priority: int, pfc: bool) -> str:
    queues = {dscp: priority, CNP_DSCP: CNP_PRIORITY}
    names = list(ports.values())
    name = "TRAINYARD"
    of_port = {"dscp_to_tc_map": name, "tc_to_queue_map": name, "tc_to_pg_map": name}
    if pfc:
        of_port |= {"pfc_to_queue_map": name, "pfc_enable": str(priority), "pfcwd_sw_enable": str(priority)}
    tables = {
        "DSCP_TO_TC_MAP": {name: {str(mark): str(queues.get(mark, 0)) for mark in range(64)}},
        "TC_TO_QUEUE_MAP": {name: {str(number): str(number) for number in range(8)}},
        "TC_TO_PRIORITY_GROUP_MAP": {
            name: {str(number): str(priority if number == priority else 0) for number in range(8)}
        },
        "WRED_PROFILE": {
            name: {
                "ecn": "ecn_all",
                **{f"wred_{color}_enable": "true" for color in ("green", "yellow", "red")},
                **{f"{color}_min_threshold": str(ECN_FROM << 10) for color in ("green", "yellow", "red")},
                **{f"{color}_max_threshold": str(ECN_TO << 10) for color in ("green", "yellow", "red")},
                **{f"{color}_drop_probability": str(ECN_PERCENT) for color in ("green", "yellow", "red")},
            }
        },
        "SCHEDULER": {
            f"{name}_ROCE": {"type": "DWRR", "weight": "60"},
            f"{name}_REST": {"type": "DWRR", "weight": "40"},
            f"{name}_CNP": {"type": "STRICT"},
        },
        "QUEUE": {
            f"{port}|{number}": one
            for port in names
            for number, one in {
                0: {"scheduler": f"{name}_REST"},
                priority: {"scheduler": f"{name}_ROCE", "wred_profile": name},
                CNP_PRIORITY: {"scheduler": f"{name}_CNP"},
            }.items()
        },
        "PORT_QOS_MAP": {port: of_port for port in names},
        "PORT": {port: {"mtu": str(MTU), "description": host} for host, port in ports.items()},
    }
    if pfc:
        tables["MAP_PFC_PRIORITY_TO_QUEUE"] = {name: {str(number): str(number) for number in range(8)}}
        tables["PFC_WD"] = {
            port: {"action": "drop", "detection_time": "400", "restoration_time": "400"} for port in names
        }
    return json.dumps(tables, indent=2) + "\n"


class FilterModule:
    def filters(self) -> dict:
        """The filters, by name."""
        return {"roce_switch": roce_switch, "roce_switch_first": roce_switch_first}
