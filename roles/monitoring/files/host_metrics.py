#!/usr/bin/python3
"""What this host knows of its runs, NVIDIA cards and RDMA ports, for Prometheus.

    host_metrics.py FILE.prom STATE_DIR

Every 15 seconds FILE.prom is written anew, which node_exporter reads (its textfile collector). Runs are told by the
status.json that the trainer writes (trainer/metrics.py), cards by nvidia-smi, of which a GeForce knows less than a data
centre's card does, and by DCGM's exporter where one answers, their Xids by the kernel's log. What there is not is left
out. Beside FILE.prom lies trainer.json: where the ranks of runs with a metrics_port answer, for Prometheus to ask them.
Standard library alone, no root.
"""

import argparse
import array
import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path

EVERY = 15.0  # seconds
PATIENCE = 10.0  # seconds for nvidia-smi
A_DAY = 86400.0  # how long a run that says nothing more is told of
# The most that is told, whatever training code may write into a run's directory.
RUNS, RANKS, STATUS_BYTES, TEXT = 50, 1024, 1 << 20, 200
ENDED = ("stopped", "failed", "finished")  # states of a run that has no ranks any more
WAITING = ("queued", "stalled")  # of one that may wait for days, and says so once
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")

HELP = {
    "run_state": "1 for the state that the run is in on this host",
    "run_reason": "1, and why the run is in its state",
    "run_warning": "1, and what the run warns of",
    "run_updated_timestamp_seconds": "When the run last said something",
    "run_step": "Optimizer steps taken",
    "run_steps": "Optimizer steps that there will be",
    "run_loss": "Loss of the last step, nats a token",
    "run_eval_loss": "Loss on the held-out data, the last time",
    "run_tokens_per_second": "Tokens a second, of the whole run",
    "run_eta_seconds": "Seconds until the run ends",
    "run_attempt": "Which attempt of the run this is",
    "run_world_size": "Ranks",
    "run_step_seconds": "A step's time, the mean of the last ones",
    "run_network_seconds": "What the network takes of a step",
    "run_rank_compute_seconds": "What a rank computes in a step, the mean of the last ones",
    "run_rank_compression_seconds": "What a rank codes in a step of what travels, the mean of the last ones",
    "run_rank_optimizer_seconds": "What a rank's optimizer and loop need in a step, the mean of the last ones",
    "run_rank_waiting_seconds": "What a rank waits for slower ones in a step, the mean of the last ones",
    "nvidia_smi_up": "Whether nvidia-smi answers",
    "gpu_up": "Whether nvidia-smi knows of the card that its driver has",
    "gpu_info": "1, and what the card is",
    "gpu_temperature_celsius": "Temperature",
    "gpu_power_watts": "Power drawn",
    "gpu_power_limit_watts": "Power that the card is held to",
    "gpu_utilization_ratio": "Share of the last moments in which a kernel ran",
    "gpu_memory_used_bytes": "Memory in use",
    "gpu_memory_total_bytes": "Memory",
    "gpu_sm_clock_hertz": "Clock of the processors",
    "gpu_throttled": "Whether the card is slowed down, by reason",
    "gpu_ecc_errors_total": "Memory errors since the driver was loaded",
    "gpu_xid_errors_total": "Xids in the kernel's log",
    "gpu_xid_last": "The last Xid's number",
    "gpu_memory_temperature_celsius": "Temperature of the card's memory",
    "gpu_pcie_replays_total": "Packets that PCIe sent again",
    "gpu_sm_active_ratio": "Share of the processors that had work",
    "gpu_tensor_active_ratio": "Share of the time in which tensor cores worked",
    "gpu_memory_active_ratio": "Share of the time in which the card's memory was read or written",
    "gpu_pcie_sent_bytes_per_second": "What the card sends by PCIe",
    "gpu_pcie_received_bytes_per_second": "What the card receives by PCIe",
    "gpu_nvlink_sent_bytes_per_second": "What the card sends by NVLink",
    "gpu_nvlink_received_bytes_per_second": "What the card receives by NVLink",
    "rdma_port_up": "Whether the RDMA port is active; interface: whose port it is, too",
    "rdma_hw_counter_total": "A counter of the RDMA port's driver",
    "nic_pause_total": "Pauses of a priority (PFC) that the card received and sent",
}
# Of status.json, as they stand.
OF_A_RUN = (
    *("step", "steps", "loss", "eval_loss", "tokens_per_second", "eta_seconds", "attempt", "world_size"),
)

GPU_LABELS = {"name": "name", "uuid": "uuid", "driver_version": "driver"}
# nvidia-smi's fields, each with its metric and what its unit is to that metric's.
GPU_VALUES = {
    "temperature.gpu": ("temperature_celsius", 1),
    "power.draw": ("power_watts", 1),
    "power.limit": ("power_limit_watts", 1),
    "utilization.gpu": ("utilization_ratio", 0.01),
    "memory.used": ("memory_used_bytes", 1 << 20),
    "memory.total": ("memory_total_bytes", 1 << 20),
    "clocks.sm": ("sm_clock_hertz", 1e6),
}
GPU_ECC = {
    "ecc.errors.corrected.volatile.total": "corrected",
    "ecc.errors.uncorrected.volatile.total": "uncorrected",
}
# Bits of clocks_throttle_reasons.active (NVML). That a card is held to its power limit is usual; the rest is not.
THROTTLES = {
    0x4: "power limit",
    0x8: "hardware",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "power brake",
}
ACTIVE = "clocks_throttle_reasons.active"
RENAMED = {ACTIVE: "clocks_event_reasons.active"}  # by newer drivers
GPU_FIELDS = ("index", "pci.bus_id", *GPU_LABELS, ACTIVE, *GPU_VALUES, *GPU_ECC)
# What DCGM knows beyond nvidia-smi, by the names of NVIDIA's exporter; its profiling fields are a data centre card's.
DCGM = {
    "DCGM_FI_DEV_MEMORY_TEMP": "memory_temperature_celsius",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "pcie_replays_total",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_active_ratio",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active_ratio",
    "DCGM_FI_PROF_DRAM_ACTIVE": "memory_active_ratio",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "pcie_sent_bytes_per_second",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "pcie_received_bytes_per_second",
    "DCGM_FI_PROF_NVLINK_TX_BYTES": "nvlink_sent_bytes_per_second",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "nvlink_received_bytes_per_second",
}
DCGM_PORT, DCGM_SECONDS, DCGM_BYTES = 9400, 3.0, 1 << 21  # where its exporter answers; our patience with it
DCGM_BLANK = 2.0**47  # and above: its words for "no value", as while somebody profiles the card
DCGM_LINE = re.compile(r"^(DCGM_FI_\w+)\{(.*)\} (\S+)", re.MULTILINE)
DCGM_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
UNKNOWN_FIELD = re.compile(r'[Ff]ield "([\w.]+)" is not a valid')
# After the card's place, that of a slice of it (MIG).
XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")
# ethtool's names for pauses of a priority: mlx5 and others, ice, bnxt_en.
PAUSE = re.compile(r"(rx|tx)_(?:prio([0-7])_pause|priority_([0-7])_xoff(?:\.nic)?|pfc_ena_frames_pri([0-7]))")
SIOCETHTOOL, GSSET_INFO, GSTRINGS, GSTATS, STATS = 0x8946, 0x37, 0x1B, 0x1D, 1  # linux/ethtool.h
NVIDIA, DISPLAY = "0x10de", ("0x0300", "0x0302")  # PCI's vendor, and classes of graphics cards
OURS = (
    "nvidia",
    "",
)  # drivers of cards that nvidia-smi should know; nouveau's, or a virtual machine's, are others


class Page:
    """Metrics by name, as Prometheus reads them."""

    def __init__(self):
        self._lines: dict[str, list[str]] = {name: [] for name in HELP}

    def add(self, name: str, value, /, **labels) -> None:
        """Add a value, unless it is no number. Python's nan and inf are Prometheus', too."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        told = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
        with contextlib.suppress(OverflowError):
            self._lines[name].append(f"trainyard_{name}{{{told}}} {float(value)!r}")

    def text(self) -> str:
        """All of them, whole families together."""
        blocks = []
        for name, lines in self._lines.items():
            if lines:
                kind = "counter" if name.endswith("_total") else "gauge"
                head = f"# HELP trainyard_{name} {HELP[name]}.\n# TYPE trainyard_{name} {kind}\n"
                blocks.append(head + "\n".join(lines) + "\n")
        return "".join(blocks)


def escaped(text) -> str:
    """A label's value: one line of it, not too long."""
    short = " ".join(str(text).split())[:TEXT]
    return short.replace("\\", r"\\").replace('"', r"\"")


def read(path) -> str:
    """The text of a file of the kernel's, stripped; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- runs ----


def statuses(state_dir: Path, now: float) -> list[dict]:
    """The status.json of the runs that wait, or have said something within a day, the newest first."""
    found = []
    for path in glob.glob(f"{glob.escape(str(state_dir))}/runs/*/status.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            status = json.loads(of_a_run(path))
            updated, run = float(status["updated"]), os.path.basename(os.path.dirname(path))
            state = status["state"]
            if isinstance(state, str) and (now - updated < A_DAY or state in WAITING):
                found.append({**status, "updated": updated, "run": run})
    return sorted(found, key=lambda one: (one["state"] in ENDED, -one["updated"]))[:RUNS]


def of_a_run(path: str) -> bytes:
    """What is in a plain file that the service user may have made: no link, no pipe to wait at, not too much."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(path)
        return file.read(STATUS_BYTES)


def tell_run(page: Page, status: dict) -> None:
    """What a status.json says."""
    run = status["run"]
    page.add("run_state", 1, run=run, state=status["state"])
    page.add("run_updated_timestamp_seconds", status["updated"], run=run)
    for name in ("reason", "warning"):
        if status.get(name):
            page.add(f"run_{name}", 1, run=run, **{name: status[name]})
    for name in OF_A_RUN:
        page.add(f"run_{name}", status.get(name), run=run)
    parts = status.get("parts")
    if not isinstance(parts, dict):
        return
    hosts = parts.get("ranks") or []
    with contextlib.suppress(LookupError, TypeError):  # another version's, or not the trainer's
        by_rank = [name for name in ("compute", "compression", "optimizer", "waiting") if name in parts]
        # rest: as releases before told of the optimizer
        step = parts["wire"] + parts.get("rest", 0.0) + sum(parts[name][0] for name in by_rank)
        page.add("run_step_seconds", step, run=run)
        page.add("run_network_seconds", parts["wire"], run=run)
        for name in by_rank:
            for rank, seconds in enumerate(parts[name][:RANKS]):
                host = hosts[rank] if rank < len(hosts) else ""
                page.add(f"run_rank_{name}_seconds", seconds, run=run, rank=rank, host=host)


def trainer_targets(found: list[dict]) -> list[dict]:
    """Where ranks answer Prometheus, as it reads targets from a file; `found`: as `statuses` tells.

    A rank's port is the run's metrics_port plus its number on its host. Hosts are known by name: /etc/hosts has them.
    """
    targets = []
    for status in found:
        port, parts = status.get("metrics_port"), status.get("parts")
        ranks = parts.get("ranks") if isinstance(parts, dict) else None
        if status["state"] in ENDED or type(port) is not int or not isinstance(ranks, list):
            continue
        on_host: Counter = Counter()
        for rank, host in enumerate(ranks[:RANKS]):
            if isinstance(host, str) and HOST_NAME.fullmatch(host) and 1024 <= port + on_host[host] < 1 << 16:
                labels = {"run": escaped(status["run"]), "rank": str(rank)}
                targets.append({"targets": [f"{host}:{port + on_host[host]}"], "labels": labels})
                on_host[host] += 1
    return targets


# ---- NVIDIA's cards ----


def bus(text: str) -> str:
    """A card's place, alike by PCI (0000:01:00.0), the kernel's log (0000:01:00) and nvidia-smi (00000000:01:00.0)."""
    return text.split(".")[0][-10:].lower()


def cards(root: str, drivers: tuple[str, ...] = OURS) -> list[str]:
    """Where PCI shows NVIDIA's graphics cards that one of the drivers has, by default its own or none.

    A part of a card that is there for a virtual machine (vGPU by SR-IOV) has its driver, too, and is none.
    """
    return sorted(
        bus(os.path.basename(path))
        for path in glob.glob(f"{root}/sys/bus/pci/devices/*")
        if read(f"{path}/vendor") == NVIDIA
        and read(f"{path}/class")[:6] in DISPLAY
        and driver(path) in drivers
        and not os.path.exists(f"{path}/physfn")
    )


def driver(path: str) -> str:
    """The name of the kernel's driver that has a device; "" where none has."""
    link = f"{path}/driver"
    return os.path.basename(os.readlink(link)) if os.path.islink(link) else ""


class Smi:
    """nvidia-smi, which hangs where a card does: one that does not end is left, and no other is started meanwhile."""

    def __init__(self):
        self._fields = list(GPU_FIELDS)
        self._hanging: subprocess.Popen | None = None

    def rows(self) -> list[dict[str, str]] | None:
        """{field: value} of each card, without what the card does not know; None where there is no answer."""
        if self._hanging and self._hanging.poll() is None:
            return None
        while True:
            query = ["nvidia-smi", f"--query-gpu={','.join(self._fields)}", "--format=csv,noheader,nounits"]
            try:
                self._hanging = subprocess.Popen(
                    query,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                out, _ = self._hanging.communicate(timeout=PATIENCE)
            except OSError:
                return None
            except subprocess.TimeoutExpired:
                self._hanging.kill()  # which one that waits in the kernel does not heed
                return None
            unknown = UNKNOWN_FIELD.search(out)
            if unknown and unknown[1] in self._fields:  # a driver too old or too new for it
                place = self._fields.index(unknown[1])
                self._fields[place : place + 1] = filter(None, [RENAMED.get(unknown[1])])
            else:
                return self._parsed(out) if self._hanging.returncode == 0 else None

    def _parsed(self, out: str) -> list[dict[str, str]]:
        lines = [[value.strip() for value in line.split(",")] for line in out.splitlines()]
        # Of a card that is lost, or wants a reset, it says that in the place of figures.
        lines = [line for line in lines if not any(value.startswith("[GPU ") for value in line)]
        rows = [zip(self._fields, line, strict=True) for line in lines if len(line) == len(self._fields)]
        return [{name: value for name, value in row if not value.startswith(("[", "N/A"))} for row in rows]


class Xids:
    """The driver's faults in the kernel's log, which says each once: since the boot, as far back as it reaches."""

    def __init__(self, path: str = "/dev/kmsg"):
        self._path, self._file = path, None
        self.counts: Counter = Counter()
        self.last: dict[str, int] = {}

    def look(self) -> None:
        """Take in what is new."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            while True:
                try:
                    record = os.read(self._file, 1 << 16)
                except BrokenPipeError:  # what we had not read yet was overwritten
                    continue
                if not record:
                    return
                for found in XID.finditer(record):
                    place = bus(found[1].decode())
                    self.counts[place] += 1
                    self.last[place] = int(found[2])
        except OSError:  # nothing more, or not ours to read
            return


def tell_gpus(
    page: Page, there: list[str], driven: list[str], rows: list[dict[str, str]] | None, xids: Xids
) -> None:
    """What is known of the cards that PCI shows at `there`; `driven`: those of them that NVIDIA's driver has, and that
    nvidia-smi should know; `rows`: its answer.
    """
    page.add("nvidia_smi_up", int(rows is not None))
    if rows is not None:
        known = {bus(row.get("pci.bus_id", "")) for row in rows}
        for place in driven:
            page.add("gpu_up", int(place in known), bus=place)
    for place in sorted({*there, *xids.counts}):
        page.add("gpu_xid_errors_total", xids.counts[place], bus=place)
        page.add("gpu_xid_last", xids.last.get(place), bus=place)
    for row in rows or []:
        card = {"gpu": row.get("index", ""), "bus": bus(row.get("pci.bus_id", ""))}
        about = {label: row.get(field, "") for field, label in GPU_LABELS.items()}
        page.add("gpu_info", 1, **card, **about)
        for field, (name, unit) in GPU_VALUES.items():
            page.add(f"gpu_{name}", number(row.get(field), unit), **card)
        for field, kind in GPU_ECC.items():
            page.add("gpu_ecc_errors_total", number(row.get(field)), **card, kind=kind)
        with contextlib.suppress(ValueError, KeyError):
            bits = int(row.get(ACTIVE) or row[RENAMED[ACTIVE]], 16)
            for bit, reason in THROTTLES.items():
                page.add("gpu_throttled", int(bool(bits & bit)), **card, reason=reason)


def dcgm(port: int = DCGM_PORT) -> str:
    """What DCGM's exporter on this host says; "" where there is none. Whoever has its port may be slow, or talk on."""
    end, got = time.monotonic() + DCGM_SECONDS, b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), DCGM_SECONDS) as door:
        door.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        while len(got) < DCGM_BYTES and (left := end - time.monotonic()) > 0:
            door.settimeout(left)
            if not (part := door.recv(1 << 16)):
                break
            got += part
    return got.decode(errors="replace")


def tell_dcgm(page: Page, text: str, rows: list[dict[str, str]] | None) -> None:
    """What DCGM's exporter, which said `text`, knows beyond nvidia-smi (`rows`); not of slices of a card (MIG)."""
    places = {
        row["index"]: bus(row["pci.bus_id"]) for row in rows or [] if {"index", "pci.bus_id"} <= set(row)
    }
    told: dict[
        tuple, float | None
    ] = {}  # the exporter of another's making may say a thing twice; a page must not
    for field, labels, value in DCGM_LINE.findall(text):
        about = dict(DCGM_LABEL.findall(labels))
        gpu = about.get("gpu", "")
        if field in DCGM and gpu.isdigit() and not about.get("GPU_I_ID"):
            place = bus(about["pci_bus_id"]) if about.get("pci_bus_id") else places.get(gpu, "")
            told.setdefault((DCGM[field], gpu, place), number(value))
    for (name, gpu, place), value in told.items():
        if value is not None and value < DCGM_BLANK:
            page.add(f"gpu_{name}", value, gpu=gpu, bus=place)


def number(text: str | None, unit: float = 1) -> float | None:
    """A value of nvidia-smi's; None where it is none."""
    try:
        return float(text) * unit
    except (TypeError, ValueError):
        return None


# ---- RDMA ----


def tell_rdma(page: Page, root: str) -> None:
    """Each port's state, and the counters of its driver: congestion notices sent and handled, packets sent again."""
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        *_, device, _, port = path.split("/")
        if state := read(f"{path}/state"):  # such as "4: ACTIVE"
            about = {"link": read(f"{path}/link_layer"), "interface": interface_of(path)}
            page.add("rdma_port_up", int(state.endswith("ACTIVE")), device=device, port=port, **about)
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*/hw_counters/*")):
        *_, device, _, port, _, name = path.split("/")
        text = read(path)
        if name != "lifespan" and text.isdigit():  # the one setting among them
            page.add("rdma_hw_counter_total", int(text), device=device, port=port, counter=name)


def interface_of(path: str) -> str:
    """The network interface that shares an RDMA port, as that of RoCE does; "" where none is known."""
    for file in sorted(glob.glob(f"{path}/gid_attrs/ndevs/*")):
        if name := read(file):
            return name
    return ""


def ethtool_counters(device: str) -> dict[str, int]:
    """What `ethtool -S` shows of a network card, without ethtool."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:

        def ask(head: bytes, room: int) -> bytes:
            answer = array.array("B", head + bytes(room))
            fcntl.ioctl(door, SIOCETHTOOL, struct.pack("16sP", device.encode(), answer.buffer_info()[0]))
            return answer.tobytes()[len(head) :]

        (count,) = struct.unpack("I", ask(struct.pack("IIQ", GSSET_INFO, 0, 1 << STATS), 4))
        names = ask(struct.pack("III", GSTRINGS, STATS, count), 32 * count)
        values = struct.unpack(f"{count}Q", ask(struct.pack("II", GSTATS, count), 8 * count))
    named = [names[at : at + 32].split(b"\0")[0].decode(errors="replace") for at in range(0, 32 * count, 32)]
    return dict(zip(named, values, strict=True))


def tell_pauses(page: Page, root: str) -> None:
    """How often a switch or a peer has told this host's cards to pause, and they it."""
    for path in sorted(glob.glob(f"{root}/sys/class/net/*/device")):
        device = path.split("/")[-2]
        with contextlib.suppress(OSError, struct.error):  # a driver without counters
            for name, value in ethtool_counters(device).items():
                if found := PAUSE.fullmatch(name):
                    page.add(
                        "nic_pause_total",
                        value,
                        device=device,
                        direction=found[1],
                        priority=found[found.lastindex],
                    )


# ---- all ----


def collect(found: list[dict], smi: Smi, xids: Xids, root: str = "") -> str:
    """The file's text; `found`: as `statuses` tells. root: where /sys is looked for, in tests."""
    page = Page()
    for status in found:
        tell_run(page, status)
    there = cards(root)
    if there or shutil.which("nvidia-smi"):  # which a card that our driver has, or none, should have
        xids.look()
        rows = smi.rows()
        # A container sees all of its machine's cards on the bus, and may have been given some.
        contained = os.path.exists(f"{root}/run/systemd/container")
        driven = [] if contained else cards(root, ("nvidia",))
        tell_gpus(page, there, driven, rows, xids)
        tell_dcgm(page, dcgm(), rows)
    tell_rdma(page, root)
    tell_pauses(page, root)
    return page.text()


def write(path: Path, text: str) -> None:
    """Write it whole: a reader sees the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("state_dir", type=Path)
    asked = parser.parse_args()
    smi, xids, known = Smi(), Xids(), None
    while True:
        begin = time.monotonic()
        found = statuses(asked.state_dir, time.time())
        write(asked.file, collect(found, smi, xids))
        targets = trainer_targets(found)
        if targets != known:  # Prometheus looks at it anew whenever it is written
            write(asked.file.with_name("trainer.json"), json.dumps(targets))
            known = targets
        time.sleep(max(1.0, EVERY - (time.monotonic() - begin)))


if __name__ == "__main__":
    main()
