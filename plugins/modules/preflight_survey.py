#!/usr/bin/python
"""What one host says of itself before a run: all that preflight holds against the other hosts and against limits."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_survey
short_description: Read what preflight wants to know of a host alone
description:
  - Reads, in one trip, identity, names, routes, interfaces, versions, memory, the unit's limits, the launchers' store,
    GPUs and RDMA ports. Changes nothing. Needs root where O(keeper=systemd).
options:
  hosts: {type: list, elements: dict, required: true, description: "All hosts of the cluster: name, address, names."}
  address: {type: str, required: true, description: This host's address on the cluster network.}
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  opt_dir: {type: path, required: true, description: Where releases are deployed.}
  state_dir: {type: path, required: true, description: "Where runs, data and models are kept."}
  user: {type: str, default: "", description: The user that runs are started as.}
  stores: {type: list, elements: str, default: [], description: URLs of the launchers' store.}
  files:
    description: What a run to come needs and the controller has, as C([NAME, BYTES]); it may have been brought before.
    type: list
    elements: list
    default: []
  paths: {type: list, elements: str, default: [], description: What it needs that is not on the controller.}
  run: {type: str, default: "", description: "The run's name, whose checkpoints may be here."}
  sys_root: {type: str, default: "", description: "A directory with the C(/sys) and C(/proc) to read; for tests."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Ask the host
  preflight_survey:
    hosts: "{{ groups['cluster'] | cluster_hosts(hostvars) }}"
    address: 10.77.0.11
    keeper: systemd
    opt_dir: /opt/trainyard
    state_dir: /var/lib/trainyard
  become: true
"""

RETURN = r"""
survey:
  description: The answers; their keys stand in the module's function main.
  type: dict
  returned: always
"""

import glob
import hashlib
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.address_probe import others_with
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_identity import LOOPBACK
from ansible.module_utils.host_runs import UNIT, at_work, environment_dir, run_processes
from ansible.module_utils.host_survey import in_container, interfaces, nearest, ssh_session
from ansible.module_utils.installed_packages import installed_torch, installed_versions
from ansible.module_utils.managed_block import BEGIN, END
from ansible.module_utils.pci_cards import DISPLAY, NVIDIA, UNUSABLE
from ansible.module_utils.rdma_ports import rdma_ports
from ansible.module_utils.same_files import sizes

# What keeps a process, by its control group, and the command that ends that.
KEEPERS = ((r"/job_(\d+)\b", "scancel"),)
CONTAINERS = (
    (r"docker[-/]([0-9a-f]{12})[0-9a-f]{52}", "docker stop"),
    (r"libpod-([0-9a-f]{12})[0-9a-f]{52}", "podman stop"),
)
# What another daemon than the host's own keeps: containers of a user's, and whatever is in a guest (LXC, nspawn).
ELSEWHERE = re.compile(r"/user-\d+\.slice/|:/lxc|/systemd-nspawn@|:/machine\.slice/machine-")
# Services in which anybody's processes are, and which start none again.
OF_MANY = (
    "atd.service",
    "cron.service",
    "jupyterhub.service",
    "rstudio-server.service",
    "slurmd.service",
    "ssh.service",
    "sshd.service",
    "xrdp-sesman.service",
)
GPU_FIELDS = (
    "index",
    "name",
    "pci.bus_id",
    "driver_version",
    "memory.total",  # MiB
    "memory.used",  # MiB
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_throttle_reasons.active",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
)
RENAMED = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}  # by newer drivers
TOO_OLD = range(0x0000, 0x1340)  # device ids of Kepler and before, which the role nvidia leaves out
XID = re.compile(r"(?:^\[ *(\d+\.\d+)\] )?NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)(?:, (.*))?")
STORE_SECONDS = 4.0
NAME_SECONDS = 5.0  # after which a name counts as one that nobody knows


def read(path: str) -> str:
    """The text of a file, stripped; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


# ---- who it is ----


def host_keys(folder: str = "/etc/ssh") -> list[str]:
    """SHA-256 of each of sshd's public keys, without their comments."""
    keys = [read(path).split()[1:2] for path in sorted(glob.glob(f"{folder}/ssh_host_*_key.pub"))]
    return [hashlib.sha256(key[0].encode()).hexdigest() for key in keys if key]


def resolved(names: list[str]) -> dict[str, list[str]]:
    """The IPv4 addresses that this host's programs get for each name, in their order; empty for an unknown one."""
    found: dict[str, list[str]] = {name: [] for name in names}

    def ask(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return
        found[name] = list(dict.fromkeys(answer[4][0] for answer in answers))

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + NAME_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def hosts_text() -> str:
    """/etc/hosts as it is, so that its lines have their numbers."""
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return ""


def owners_lines(text: str, hosts: list[dict]) -> list[dict]:
    """[{number, text, names}], the lines of /etc/hosts outside ours that lead a host's name elsewhere.

    Only what the role identity leaves as it is: from LOOPBACK it takes the names away, and IPv6 is not looked at.
    """
    found, ours = [], False
    for number, line in enumerate(text.split("\n"), 1):
        ours = line.startswith(BEGIN) or (ours and not line.startswith(END))
        # In small letters: NODE1 is found by who asks for node1.
        address, *names = line.partition("#")[0].lower().split() or [""]
        wrong = [
            name
            for host in hosts
            if host["address"] != address
            for name in host["names"]
            if name.lower() in names
        ]
        if wrong and not ours and "." in address and not LOOPBACK.fullmatch(address):
            found.append({"number": number, "text": line.strip(), "names": wrong})
    return found


def routes(run_command, addresses: list[str]) -> dict[str, dict]:
    """{address: {dev, source}} by which packets to each leave, with what sender."""
    found = {}
    for address in addresses:
        rc, out, err = run_command(["ip", "-json", "route", "get", address])
        try:
            route = json.loads(out)[0] if not rc else {}
        except (ValueError, IndexError):
            route = {}
        found[address] = {
            "dev": route.get("dev", ""),
            "source": route.get("prefsrc", ""),
            "via": route.get("gateway", ""),
            "error": err.strip() if rc else "",
        }
    return found


def link(interface: str, root: str = "") -> dict:
    """mtu, speed (Mbit/s; None where none is known), duplex, whether it is a piece of hardware, and whether it goes
    over another interface (layered), as a bond, a VLAN, a bridge and a tunnel do.
    """
    place = f"{root}/sys/class/net/{interface}"
    speed = read(f"{place}/speed")
    driver = os.path.basename(os.path.realpath(f"{place}/device/driver"))
    return {
        "name": interface,
        "mtu": int(read(f"{place}/mtu") or 0),
        "speed": int(speed) if speed.isdigit() and int(speed) > 0 else None,
        "duplex": read(f"{place}/duplex"),
        # A virtual machine's card names a speed that nobody promised.
        "physical": os.path.exists(f"{place}/device") and not driver.startswith("virtio"),
        "layered": bool(glob.glob(f"{glob.escape(place)}/lower_*"))
        or os.path.exists(f"{place}/tun_flags")
        or "DEVTYPE=wireguard" in read(f"{place}/uevent"),
        "wireless": os.path.isdir(f"{place}/wireless") or os.path.isdir(f"{place}/phy80211"),
    }


# ---- what runs on it ----


def versions(run_command, opt_dir: str, root: str = "") -> dict[str, str]:
    """Of what must be equal on all hosts, as it is now, whatever was once installed; "" where it is not there."""
    path = environment_dir(opt_dir)
    packages = installed_versions(path) if path else {}
    python = f"{path}/bin/python"
    # An upgrade of the distribution changes the interpreter below an environment, which knows nothing of it.
    _, told, _ = run_command([python, "-V"]) if path and os.access(python, os.X_OK) else (1, "", "")
    nccl = [version for name, version in packages.items() if name.startswith("nvidia-nccl")]
    return {
        "kernel": platform.release(),
        "python": told.strip().removeprefix("Python "),
        "torch": installed_torch(path) if path else "",
        "nccl": nccl[0] if nccl else "",
        "driver": read(f"{root}/sys/module/nvidia/version"),
    }


def memory(root: str = "") -> dict[str, int | None]:
    """Bytes: of memory in all, available, and in use of swap; of /dev/shm in all.

    promised: what programs may still be given, where the kernel gives no more than it has (vm.overcommit_memory); else
    None.
    """
    lines = dict(line.split(":", 1) for line in read(f"{root}/proc/meminfo").splitlines() if ":" in line)
    size = {name: int(value.split()[0]) * 1024 for name, value in lines.items() if value.split()[0].isdigit()}
    try:
        stat = os.statvfs("/dev/shm")
        shared = stat.f_blocks * stat.f_frsize
    except OSError:
        shared = 0
    strict = read(f"{root}/proc/sys/vm/overcommit_memory") == "2"
    return {
        "promised": size.get("CommitLimit", 0) - size.get("Committed_AS", 0) if strict else None,
        "total": size.get("MemTotal", 0),
        "available": size.get("MemAvailable", 0),
        "swapped": size.get("SwapTotal", 0) - size.get("SwapFree", 0),
        "shared": shared,
    }


def disk(state_dir: str) -> dict:
    """Where runs are kept: bytes and inodes that are free, and whether it is mounted for reading alone."""
    stat = os.statvfs(nearest(state_dir))
    return {
        "free": stat.f_bavail * stat.f_frsize,
        "total": stat.f_blocks * stat.f_frsize,
        "inodes": stat.f_favail if stat.f_files else None,
        "read_only": bool(stat.f_flag & os.ST_RDONLY),
    }


def held(state_dir: str, files: list, paths: list[str], run: str) -> dict:
    """Bytes of a run that are here: `brought`, of `files` by name and size; its `checkpoints`; of `paths`, each."""
    kept = [os.path.join(state_dir, name) for name in ("models", "data")] if files else []
    there = Counter((os.path.basename(one), size) for folder in kept for one, size in sizes(folder))
    wanted = Counter((str(name), int(size)) for name, size in files)
    found = {path: sizes(path) for path in paths if os.path.exists(path)}
    checkpoints = sizes(os.path.join(state_dir, "runs", run, "checkpoints")) if run else []
    return {
        "brought": sum(size * count for (_, size), count in (wanted & there).items()),
        "checkpoints": sum(size for _, size in checkpoints),
        "paths": {path: sum(size for _, size in below) for path, below in found.items()},
    }


def system(root: str = "") -> str:
    """The distribution and its release, as ID-VERSION_ID."""
    words = dict(line.split("=", 1) for line in read(f"{root}/etc/os-release").splitlines() if "=" in line)
    return "-".join(words.get(name, "").strip("\"'") for name in ("ID", "VERSION_ID"))


def unit_limit(run_command, user: str) -> dict:
    """Locked memory that a run's unit may have, in bytes (None: no limit): as it is set, drop-ins and all, and as a
    process in such a unit finds it. `drop_ins`: the files that change it for the unit.
    """
    unit = f"{UNIT}preflight.service"
    _, out, _ = run_command(["systemctl", "show", unit, "--property=LoadState,LimitMEMLOCK,DropInPaths"])
    shown = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    if shown.get("LoadState") != "loaded":
        return {"loaded": False, "set": 0, "found": 0, "drop_ins": []}
    limit = shown.get("LimitMEMLOCK", "0")
    command = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect", f"--property=LimitMEMLOCK={limit}"]
    if user:
        command.append(f"--property=User={user}")
    rc, out, _ = run_command(["timeout", "10", *command, "cat", "/proc/self/limits"])
    told = re.search(r"Max locked memory\s+(\S+)", out) if not rc else None
    return {
        "loaded": True,
        "set": as_bytes(limit),
        "found": as_bytes(told[1]) if told else as_bytes(limit),
        "drop_ins": [path for path in shown.get("DropInPaths", "").split() if "LimitMEMLOCK" in read(path)],
    }


def as_bytes(limit: str) -> int | None:
    """A limit as systemd or the kernel writes it; None for infinity."""
    return int(limit) if limit.isdigit() else None


def stores(urls: list[str]) -> dict[str, str]:
    """{url: "" where that member of etcd is well, else why not}. An election of theirs is given some time."""
    found = dict.fromkeys(urls, f"no answer within {STORE_SECONDS:g} s")
    end = time.monotonic() + STORE_SECONDS

    def ask(url: str) -> None:
        while True:
            found[url] = health(url)
            if not found[url] or time.monotonic() > end - 1:
                return
            time.sleep(0.5)

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + 1 - time.monotonic()))
    return dict(found)


def health(url: str) -> str:
    """What a member of etcd says against itself, or who keeps it from answering."""
    try:
        # The host's proxy is for the internet.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{url}/health", timeout=2) as answer:
            text = answer.read(1000).decode(errors="replace")
    except OSError as error:
        return str(getattr(error, "reason", error))
    return "" if "true" in text else text.strip()


# ---- GPUs ----


def cards(root: str = "") -> int:
    """NVIDIA's graphics cards that PCI shows and a run may have, driver or not."""
    return sum(
        read(f"{path}/vendor").removeprefix("0x") == NVIDIA
        and read(f"{path}/class").removeprefix("0x")[:4] in DISPLAY
        and not os.path.basename(os.path.realpath(f"{path}/driver")).endswith(UNUSABLE)
        and int(read(f"{path}/device") or "ffff", 16) not in TOO_OLD
        for path in glob.glob(f"{root}/sys/bus/pci/devices/*")
    )


def gpu_rows(text: str, fields: list[str]) -> list[dict[str, str]]:
    """nvidia-smi's CSV (noheader, nounits) as {field: value}; values that a card does not have are left out.

    So are those that the driver does not tell ([Unknown Error]), but for what it says of a card that is lost.
    """
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            pairs = zip(fields, values, strict=True)
            rows.append(
                {name: value for name, value in pairs if not re.match(r"\[(?!GPU )|N/A|Not Supp", value)}
            )
    return rows


def gpus(run_command) -> tuple[list[dict[str, str]], str]:
    """The cards that the driver shows, and why there is no answer ("" where there is one)."""
    fields = list(GPU_FIELDS)
    while fields:
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        rc, out, err = run_command(["timeout", "20", *query])
        unknown = re.search(r'[Ff]ield "([\w.]+)" is not a valid', out + err)
        if rc and unknown and unknown[1] in fields:  # a driver too old or too new for it
            place = fields.index(unknown[1])
            fields[place : place + 1] = filter(None, [RENAMED.get(unknown[1])])
            continue
        if rc:
            said = "no answer within 20 s" if rc == 124 else (out + err).strip()[-200:]
            return [], said or f"nvidia-smi ended with {rc}"
        return gpu_rows(out, fields), ""
    return [], "nvidia-smi knows none of the fields"


def gpu_processes(text: str) -> list[dict]:
    """{gpu, pid, kind (C, G or C+G), name} of `nvidia-smi pmon -c 1`."""
    found, last = [], -1  # the name's column, and what is cut of its own words after it: chrome --type=g
    for line in text.splitlines():
        words = line.split()
        if words[:2] == ["#", "gpu"]:
            last = len(words) - 2
        elif len(words) >= 4 and words[0].isdigit() and words[1].isdigit():
            found.append({"gpu": int(words[0]), "pid": int(words[1]), "kind": words[2], "name": words[last]})
    return found


def keeper(pid: int, proc: str = "/proc") -> str:
    """The command that ends what started a process, by its control group; "" where nothing would start it again."""
    text = read(f"{proc}/{pid}/cgroup")
    for pattern, command in KEEPERS if ELSEWHERE.search(text) else KEEPERS + CONTAINERS:
        if kept := re.search(pattern, text):
            return f"{command} {kept[1]}"
    unit = re.search(r":/system\.slice/(?:\S+/)?([^/\s]+\.service)", text)
    return f"systemctl stop {unit[1]}" if unit and unit[1] not in OF_MANY else ""


def xids(text: str, uptime: float) -> list[dict]:
    """{bus, xid, text, age} of the driver's faults in the kernel's log; age: s, None where lines have no time."""
    return [
        {
            "bus": found[2],
            "xid": int(found[3]),
            "text": (found[4] or "").strip()[:120],
            "age": uptime - float(found[1]) if found[1] else None,
        }
        for found in map(XID.search, text.splitlines())
        if found
    ]


def gpu_survey(run_command, root: str = "") -> dict:
    there = cards(root)
    if not shutil.which("nvidia-smi") or not os.path.exists(f"{root}/proc/driver/nvidia/version"):
        return {"cards": there, "gpus": [], "error": "", "processes": [], "xids": [], "driver": False}
    rows, error = gpus(run_command)
    processes = []
    if not error:
        _, out, _ = run_command(["timeout", "10", "nvidia-smi", "pmon", "-c", "1"])
        ours = set(run_processes())
        processes = [
            {**one, "run": one["pid"] in ours or at_work(one["pid"]), "end": keeper(one["pid"])}
            for one in gpu_processes(out)
        ]
    _, out, _ = run_command(["timeout", "5", "dmesg"])
    return {
        "cards": there,
        "gpus": rows,
        "error": error,
        "processes": processes,
        "xids": xids(out, time.monotonic()),  # the clock of the kernel's log, which stands still in a sleep
        "driver": True,
    }


# ---- all ----


def free_port(address: str) -> int:
    """A TCP port of this host that nobody has, where peers may find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return 0
        return probe.getsockname()[1]


def links(run_command) -> list[dict]:
    try:
        return interfaces(run_command, link_local=True)
    except OSError:  # where there is no `ip`
        return []


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "hosts": {"type": "list", "elements": "dict", "required": True},
            "address": {"type": "str", "required": True},
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "opt_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "stores": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "list", "default": []},
            "paths": {"type": "list", "elements": "str", "default": []},
            "run": {"type": "str", "default": ""},
            "sys_root": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p, root = module.params, module.params["sys_root"]
    real = p["keeper"] == "systemd"
    found = links(module.run_command) if real else []
    own = ipaddress.ip_address(p["address"])
    holder = next(
        (one["name"] for one in found for held in one["addresses"] if ipaddress.ip_interface(held).ip == own),
        None,
    )
    peers = [host["address"] for host in p["hosts"] if host["address"] != p["address"]]
    session = ssh_session()
    # It listens while the rest is read.
    strangers = ThreadPoolExecutor(1).submit(others_with, holder, p["address"]) if holder else None
    module.exit_json(
        changed=False,
        survey={
            "hostname": socket.gethostname(),
            "machine_id": read("/etc/machine-id"),
            "host_keys": host_keys() if real else [],
            "names": resolved([host["names"][0] for host in p["hosts"]]) if real else {},
            "lines": owners_lines(hosts_text(), p["hosts"]) if real else [],
            "interfaces": [{key: one[key] for key in ("name", "enabled", "addresses")} for one in found],
            "routes": routes(module.run_command, peers) if real else {},
            "link": link(holder, root) if holder else None,
            "versions": versions(module.run_command, p["opt_dir"], root),
            "memory": memory(root),
            "disk": disk(p["state_dir"]),
            "held": held(p["state_dir"], p["files"], p["paths"], p["run"]),
            "memlock": unit_limit(module.run_command, p["user"]) if real else None,
            "container": in_container() if real else False,
            "system": system(root),
            "stores": stores(p["stores"]),
            "gpu": gpu_survey(module.run_command, root),
            "rdma": rdma_ports(root),
            "client": session["client"] if session else "",
            "door": session["address"] if session else "",
            "free_port": free_port(p["address"]),
            "strangers": strangers.result() if strangers else None,
            "time": time.time(),
        },
    )


if __name__ == "__main__":
    main()
