#!/usr/bin/python3
"""Give RoCE's packets a class of their own on this host, as the switch gives them one. Written by Trainyard.

    roce-qos apply|check|clear FILE

FILE is JSON: dscp, priority (that it maps to), pfc (whether that priority is paused instead of dropped), tos (for
connections by RDMA-CM), ports: [{device, port, interface}]. check ends with 1, and says so, where a setting is not as
FILE has it. What was applied, and what was there before, is noted until the next boot, when the card forgets it, too:
clear has the latter again, whatever FILE says by now. By `dcb` of iproute2 and the kernel's own files; ROOT may stand
before those, for tests.
"""

import glob
import json
import os
import subprocess
import sys

ROOT = os.environ.get("ROOT", "")
APPLIED = f"{ROOT}/run/trainyard-roce-qos.json"
CNP = {"dscp": 48, "priority": 6}  # congestion notifications: mlx5's defaults


class Fault(Exception):
    """What could not be done, for a person."""


def main():
    try:
        what, path = sys.argv[1:]
        with open(path) as file:
            wanted = json.load(file)
        differs = {"apply": apply_all, "check": check_all, "clear": clear_all}[what](wanted)
    except (ValueError, KeyError):
        sys.exit(__doc__)
    except (OSError, Fault) as fault:
        sys.exit(f"error: {fault}")
    print("\n".join(differs), end="\n" if differs else "")
    return 1 if differs else 0


def apply_all(wanted):
    for fault in clear_all(wanted):
        print(f"warning: {fault}", file=sys.stderr)
    ours = {name: wanted[name] for name in ("dscp", "priority", "pfc")}
    left = applied().get("ports", [])  # what could not be given back; what was there before that is known
    ports = [{**port, **ours} for port in wanted["ports"]]
    new = [port for port in ports if not any(port.items() <= one.items() for one in left)]
    # First, so that what is cut short is cleared, too.
    ports = [*left, *({**port, "had": had(wanted, port)} for port in new)]
    write(APPLIED, json.dumps({**wanted, "ports": ports}))
    for port in wanted["ports"]:
        apply(wanted, port)
    return []


def check_all(wanted):
    return [line for port in wanted["ports"] for line in check(wanted, port)]


def clear_all(wanted):
    """Have what was there before; whatever else the host has stays. A card that is gone by now has forgotten it.

    Returns what could not be had back. Of such ports it stays noted, and the others are served all the same.
    """
    before, left, faults = applied(), [], {}
    for port in reversed(before.get("ports", [])):  # what was there first comes last
        port = {**{name: before[name] for name in ("dscp", "priority", "pfc")}, **port}
        if os.path.exists(f"{ROOT}/sys/class/net/{port['interface']}"):
            try:
                if port["interface"] not in faults:
                    clear(port)
            except (OSError, Fault) as fault:
                faults[port["interface"]] = f"{port['interface']}: {fault}"
            if port["interface"] in faults:
                left.insert(0, port)
    if left:
        write(APPLIED, json.dumps({**before, "ports": left}))
    elif before:
        os.unlink(APPLIED)
    return list(faults.values())


def applied():
    """What has been applied since the boot, as the file has it, each port with what it had; {} where nothing was."""
    text = read(APPLIED)
    return json.loads(text) if text else {}


def apply(wanted, port):
    interface = port["interface"]
    classes = [f"{one['dscp']}:{one['priority']}" for one in (wanted, CNP)]
    # A card that has such an entry trusts the DSCP of all packets, instead of their VLAN's priority.
    dcb("app", "replace", "dev", interface, "dscp-prio", *classes)
    # Of no other priority: one may be lossless for its owner's storage.
    dcb(
        "pfc", "set", "dev", interface, "prio-pfc", f"{wanted['priority']}:{'on' if wanted['pfc'] else 'off'}"
    )
    for path in ecn(wanted, port):
        write(path, "1")
    write(tos(port), str(wanted["tos"]))


def check(wanted, port):
    interface = port["interface"]
    classes = classes_of(interface)
    for one in (wanted, CNP):
        found = classes.get(one["dscp"])
        if found != one["priority"]:
            yield f"{interface}: DSCP {one['dscp']} has priority {found}; expected {one['priority']}"
    if paused(wanted, port) != wanted["pfc"]:
        expected, found = ("on", "off") if wanted["pfc"] else ("off", "on")
        yield f"{interface}: PFC is {found} for priority {wanted['priority']}; expected {expected}"
    for path in ecn(wanted, port):
        if read(path) != "1":
            yield f"{path}: found {read(path) or 'nothing'}; expected 1"
    found = read(tos(port))
    if found != str(wanted["tos"]):
        where = f"{device_of(port)}/{port['port']}"
        yield f"{where}: RDMA-CM's type of service is {found or 'not set'}; expected {wanted['tos']}"


def had(wanted, port):
    """What the port has of what is to be set: {classes: [[dscp, priority]], pfc, tos, ecn: {file: text}}."""
    there = classes_of(port["interface"])
    classes = [[one["dscp"], there[one["dscp"]]] for one in (wanted, CNP) if one["dscp"] in there]
    switches = {path: read(path) for path in ecn(wanted, port)}
    return {"classes": classes, "pfc": paused(wanted, port), "tos": read(tos(port)), "ecn": switches}


def paused(wanted, port):
    """Whether the port's class is paused instead of dropped."""
    shown = dcb("pfc", "show", "dev", port["interface"]).get("prio_pfc", [])
    return wanted["priority"] < len(shown) and shown[wanted["priority"]] not in (False, 0, "off")


def clear(port):
    interface, before = port["interface"], port.get("had", {})  # an earlier version noted none
    there, classes = classes_of(interface), dict(before.get("classes", []))
    # What somebody has changed since is his.
    ours = [one for one in (port, CNP) if there.get(one["dscp"]) == one["priority"]]
    if gone := [f"{one['dscp']}:{one['priority']}" for one in ours if one["dscp"] not in classes]:
        dcb("app", "del", "dev", interface, "dscp-prio", *gone)
    if back := [f"{one['dscp']}:{classes[one['dscp']]}" for one in ours if one["dscp"] in classes]:
        dcb("app", "replace", "dev", interface, "dscp-prio", *back)
    pfc = "on" if before.get("pfc") else "off"
    dcb("pfc", "set", "dev", interface, "prio-pfc", f"{port['priority']}:{pfc}")
    write(tos(port), before.get("tos") or "0")
    for path, text in before.get("ecn", {}).items():
        if os.path.exists(path):
            write(path, text)


def classes_of(interface):
    """Priority by DSCP, as the card has them."""
    shown = dcb("app", "show", "dev", interface, "dscp-prio").get("dscp_prio", [])
    return {int(dscp): int(priority) for dscp, priority in shown}


def dcb(area, verb, *words):
    """What `dcb` says, read; {} where it says nothing."""
    command = ["dcb", "-j", area, verb, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Fault(f"dcb of the package iproute2 cannot be run: {error.strerror}") from None
    if done.returncode:
        interface = words[words.index("dev") + 1]
        raise Fault(
            f"`{' '.join(command)}`: {done.stderr.strip()}. If {interface}'s driver knows no DCB, the card is none "
            f"for RoCE with quality of service: set roce_qos_mode: none for this host{hint(interface)}"
        )
    return json.loads(done.stdout) if done.stdout.strip() else {}


def hint(interface):
    """What else keeps a card of this driver from taking a class."""
    driver = os.path.basename(os.path.realpath(f"{ROOT}/sys/class/net/{interface}/device/driver"))
    if driver != "ice":
        return ""
    return (
        ". Intel's cards take one only while their firmware's LLDP agent is off: "
        f"`ethtool --set-priv-flags {interface} fw-lldp-agent off`"
    )


def tos(port):
    """The file that marks the connections of RDMA-CM (NCCL marks its own: NCCL_IB_TC)."""
    folder = f"{ROOT}/sys/kernel/config/rdma_cm/{device_of(port)}"
    if not os.path.isdir(os.path.dirname(folder)):
        raise Fault(
            f"there is no {os.path.dirname(folder)}: `modprobe rdma_cm` and `mount -t configfs none /sys/kernel/config`"
        )
    if sys.argv[1] != "check":
        os.makedirs(folder, exist_ok=True)  # configfs makes the files in it
    return f"{folder}/ports/{port['port']}/default_roce_tos"


def device_of(port):
    """The name of the interface's RDMA device now: rdma-core, installed beside it, names it anew at the next boot."""
    there = glob.glob(f"{ROOT}/sys/class/net/{port['interface']}/device/infiniband/*")
    names = sorted(map(os.path.basename, there))
    return port["device"] if port["device"] in names or not names else names[0]


def ecn(wanted, port):
    """The switches of congestion control, where the driver has any; a card without them has it on in its firmware."""
    places = [
        f"{ROOT}/sys/class/net/{port['interface']}/ecn/roce_{end}/enable/{wanted['priority']}"
        for end in ("np", "rp")
    ]
    return [path for path in places if os.path.exists(path)]


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
