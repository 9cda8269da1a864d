"""What a host tells Prometheus, without Prometheus: runs, cards, RDMA ports; rules and page; the way to the page."""

import configparser
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jinja2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from plugins.filter import grafana
from plugins.module_utils.preflight_gpus import THROTTLES
from trainer import metrics

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/monitoring/files"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hm = load(FILES / "host_metrics.py")
dashboard = load(ROOT / "scripts/dashboard.py")


def collect(state_dir, smi, xids, root):
    return hm.collect(hm.statuses(state_dir, time.time()), smi, xids, root)


class Nothing:
    """No card, and no log."""

    counts, last = Counter(), {}

    def rows(self):
        return []

    def look(self):
        pass


def told(text):
    """{(name, labels as sorted pairs): value}, read as Prometheus reads it."""
    return {
        (sample.name.removeprefix("trainyard_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(run, name, **labels):
    return (f"run_{name}", *sorted({"run": run, **labels}.items()))


@pytest.fixture
def look(tmp_path, monkeypatch):
    """`look()`: what is told of the state directory tmp_path, with tmp_path/root for /sys, of a host without cards."""
    monkeypatch.setattr(hm.shutil, "which", lambda name: None)
    return lambda: told(collect(tmp_path, Nothing(), Nothing(), str(tmp_path / "root")))


# ---- runs ----


def step(number):
    return {
        "step_seconds": 2.0,
        "compute_seconds": 0.5,
        "comm_seconds": 1.2,
        "rank_seconds": [0.5, 1.0],
        "rank_compression_seconds": [0.0, 0.1],
        "rank_optimizer_seconds": [0.3, 0.2],
        "loss": 2.0,
    }


def test_what_the_trainer_writes_is_told(tmp_path, look):
    """By the trainer's own writer, so that a key of another name is found out here."""
    directory = tmp_path / "runs/first"
    directory.mkdir(parents=True)
    metrics.Status(directory, run="first").update(
        state="running",
        step=7,
        steps=100,
        loss=2.5,
        tokens_per_second=1234.5,
        eta_seconds=60,
        attempt=2,
        world_size=2,
        warning='a "full"\ndisk',
        parts={**metrics.parts([step(1), step(2)]), "ranks": ["node1", "node2"]},
    )
    found = look()
    assert found[of("first", "state", state="running")] == 1
    assert found[of("first", "warning", warning='a "full" disk')] == 1
    figures = {
        "step": 7,
        "steps": 100,
        "loss": 2.5,
        "tokens_per_second": 1234.5,
        "attempt": 2,
        "world_size": 2,
    }
    for name, value in figures.items():
        assert found[of("first", name)] == value
    assert abs(found[of("first", "updated_timestamp_seconds")] - time.time()) < 60
    assert found[of("first", "step_seconds")] == pytest.approx(2.0)
    assert found[of("first", "network_seconds")] == pytest.approx(0.7)
    assert found[of("first", "rank_compute_seconds", rank="1", host="node2")] == 1.0
    assert found[of("first", "rank_waiting_seconds", rank="0", host="node1")] == pytest.approx(0.5)
    assert found[of("first", "rank_compression_seconds", rank="1", host="node2")] == 0.1
    assert found[of("first", "rank_optimizer_seconds", rank="0", host="node1")] == 0.3
    assert not [key for key in found if key[0] in ("run_reason", "run_eval_loss")]


RUNNING = {
    "state": "running",
    "run": "r",
    "metrics_port": 9200,
    "parts": {"ranks": ["node1", "node1", "node2"]},
}


def test_prometheus_is_told_where_ranks_answer(tmp_path):
    """Of what the trainer writes into its status: each rank has the port and its number on its host."""
    directory = tmp_path / "runs/r"
    directory.mkdir(parents=True)
    metrics.Status(directory, **RUNNING).update(at_once=True)
    found = hm.trainer_targets(hm.statuses(tmp_path, time.time()))
    assert [one["targets"] for one in found] == [["node1:9200"], ["node1:9201"], ["node2:9200"]]
    assert [one["labels"] for one in found] == [{"run": "r", "rank": str(rank)} for rank in range(3)]


@pytest.mark.parametrize(
    "other",
    [
        {"state": "finished"},
        {"metrics_port": None},
        {"metrics_port": "9200"},
        {"metrics_port": 80},
        {"metrics_port": 1 << 16},
        {"parts": None},
        {"parts": {"ranks": "node1"}},
        {"parts": {"ranks": [["node1"], "a:1/x?", "", "-o", 7]}},
    ],
)
def test_nobody_else_is_asked(other):
    assert hm.trainer_targets([{**RUNNING, **other}]) == []


def write(directory, **status):
    directory.mkdir(parents=True)
    (directory / "status.json").write_text(json.dumps({"state": "running", "updated": time.time(), **status}))


def test_a_run_that_has_long_been_silent_is_told_of_no_more(tmp_path, look):
    write(tmp_path / "runs/old", updated=time.time() - hm.A_DAY - 60)
    write(tmp_path / "runs/new", loss=math.nan, reason="diverged at step 3")
    write(tmp_path / "runs/waits", state="stalled", updated=time.time() - 9 * hm.A_DAY)
    found = look()
    assert {dict(key[1:])["run"] for key in found} == {"new", "waits"}
    assert math.isnan(found[of("new", "loss")])
    assert found[of("new", "reason", reason="diverged at step 3")] == 1


def test_nothing_that_training_code_may_write_stops_it(tmp_path, look):
    """The runs' directories are the service user's: it may put there what it wants."""
    runs = tmp_path / "runs"
    write(runs / "good", loss=1)
    for name in ("pipe", "link", "large", "list", "text", "deep"):
        (runs / name).mkdir()
    os.mkfifo(runs / "pipe/status.json")
    (runs / "link/status.json").symlink_to(runs / "good/status.json")
    (runs / "large/status.json").write_text(
        '{"state": "running", "updated": 9e9, "x": "' + "x" * (1 << 20) + '"}'
    )
    (runs / "list/status.json").write_text("[1]")
    (runs / "text/status.json").write_text("{")
    (runs / "deep/status.json").write_text("[" * 100_000)
    write(
        runs / "odd",
        step=10**400,
        loss="low",
        parts={"compute": [], "waiting": 3},
        reason="\ud800",
        steps=True,
    )
    write(runs / "word", updated="soon")
    write(runs / "ranks", parts={"compute": [1] * 5000, "waiting": [0], "wire": 0, "rest": 0, "ranks": "x"})
    write(runs / "many", parts={"compute": [1.23456789] * 50_000})  # of hundreds of hosts
    assert (runs / "many/status.json").stat().st_size > 1 << 19
    text = collect(tmp_path, Nothing(), Nothing(), str(tmp_path))
    hm.write(tmp_path / "a.prom", text)
    found = told((tmp_path / "a.prom").read_text())
    assert {dict(key[1:])["run"] for key in found} == {"good", "odd", "ranks", "many"}
    assert not [key for key in found if key[0] in ("run_step", "run_steps") and ("run", "odd") in key]
    assert sum(key[0] == "run_rank_compute_seconds" for key in found) == hm.RANKS


# ---- cards ----

# As two drivers answered, of a data centre's card and of two GeForces.
H100 = (
    "0, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, GPU-6c, 570.86.15, 0x0000000000000004, "
    "45, 118.32, 700.00, 3, 1024, 81559, 1980, 0, 2"
)
RTX = (
    "1, 00000000:41:00.0, NVIDIA GeForce RTX 3070 Ti, GPU-7d, 570.86.15, 0x0000000000000068, "
    "86, 241.07, 290.00, 98, 7011, 8192, 1290, [N/A], [N/A]"
)
LAPTOP = (
    "2, 00000000:01:00.0, NVIDIA GeForce RTX 4070 Laptop GPU, GPU-8e, 570.86.15, 0x0000000000000001, "
    "41, 9.81, [N/A], 0, 12, 8188, 210, [Not Supported], [N/A]"
)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`smi(script)`: nvidia-smi is that shell script; it notes each call in tmp_path/calls."""

    def have(script):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return hm.Smi()

    return have


def cards(tmp_path, *places):
    for place in places:
        path = tmp_path / "root/sys/bus/pci/devices" / place
        path.mkdir(parents=True)
        (path / "vendor").write_text("0x10de\n")
        (path / "class").write_text("0x030000\n")
    sound = tmp_path / "root/sys/bus/pci/devices/0000:41:00.1"
    sound.mkdir(parents=True)
    (sound / "vendor").write_text("0x10de\n")
    (sound / "class").write_text("0x040300\n")


def test_cards_tell_what_they_know(tmp_path, smi):
    cards(tmp_path, "0000:1b:00.0", "0000:41:00.0", "0000:01:00.0")
    reader = smi("cat <<'X'\n" + "\n".join((H100, RTX, LAPTOP)) + "\nX")
    found = told(collect(tmp_path, reader, Nothing(), str(tmp_path / "root")))

    def card(fact, gpu, bus, **labels):
        return found.get((f"gpu_{fact}", *sorted({"gpu": gpu, "bus": bus, **labels}.items())))

    h100, rtx, laptop = ("0", "0000:1b:00"), ("1", "0000:41:00"), ("2", "0000:01:00")
    assert found[("nvidia_smi_up",)] == 1
    assert card("info", *h100, name="NVIDIA H100 80GB HBM3", uuid="GPU-6c", driver="570.86.15") == 1
    assert card("temperature_celsius", *rtx) == 86 and card("utilization_ratio", *rtx) == pytest.approx(0.98)
    assert card("memory_total_bytes", *rtx) == 8192 * 2**20 and card("sm_clock_hertz", *rtx) == 1290e6
    assert card("power_limit_watts", *laptop) is None and card("power_watts", *laptop) == 9.81
    assert card("ecc_errors_total", *h100, kind="uncorrected") == 2
    assert card("ecc_errors_total", *rtx, kind="uncorrected") is None
    slowed = {reason for reason in hm.THROTTLES.values() if card("throttled", *rtx, reason=reason)}
    assert slowed == {"hardware", "heat", "heat, by hardware"}
    assert card("throttled", *h100, reason="power limit") == 1
    for bus in ("0000:1b:00", "0000:41:00", "0000:01:00"):
        assert found[("gpu_xid_errors_total", ("bus", bus))] == 0
    assert sum(key[0] == "gpu_xid_errors_total" for key in found) == 3


def test_a_field_that_the_driver_does_not_know_is_left_out(tmp_path, smi):
    reader = smi("""
case "$1" in *power.limit*) echo 'Field "power.limit" is not a valid field to query.'; exit 2;; esac
echo '0, 00000000:01:00.0, GeForce, GPU-1, 470.1, 0x0, 50, 99.5, 10, 1, 2, 300, [N/A], [N/A]'""")
    for _ in range(2):
        found = told(collect(tmp_path, reader, Nothing(), str(tmp_path)))
        assert found[("gpu_power_watts", ("bus", "0000:01:00"), ("gpu", "0"))] == 99.5
    # Only the first question was one too many.
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_a_field_that_newer_drivers_call_otherwise_is_asked_for_by_its_new_name(tmp_path, smi):
    reader = smi("""
case "$1" in *clocks_throttle*)
  echo 'Field "clocks_throttle_reasons.active" is not a valid field to query.'; exit 2;;
esac
case "$1" in *,clocks_event_reasons.active,*) ;; *) exit 3;; esac
echo '0, 00000000:01:00.0, GeForce, GPU-1, 600.1, 0x40, 50, 99.5, 10, 1, 2, 300, 450, [N/A], [N/A]'""")
    found = told(collect(tmp_path, reader, Nothing(), str(tmp_path)))
    assert found[("gpu_throttled", ("bus", "0000:01:00"), ("gpu", "0"), ("reason", hm.THROTTLES[0x40]))] == 1


def test_an_nvidia_smi_that_hangs_is_not_started_twice(tmp_path, smi, monkeypatch):
    monkeypatch.setattr(hm, "PATIENCE", 0.3)
    monkeypatch.setattr(
        hm.subprocess.Popen, "kill", lambda process: None
    )  # as in a call that the kernel does not end
    reader = smi("exec sleep 60")
    try:
        for _ in range(3):
            found = told(collect(tmp_path, reader, Nothing(), str(tmp_path)))
            assert found == {("nvidia_smi_up",): 0}
        assert len((tmp_path / "calls").read_text().splitlines()) == 1
    finally:
        reader._hanging.terminate()
        reader._hanging.wait()


@pytest.mark.parametrize("script", ["echo 'Unable to determine the device handle'; exit 15", "exit 9"])
def test_an_nvidia_smi_that_fails_is_told(tmp_path, smi, script):
    assert told(collect(tmp_path, smi(script), Nothing(), str(tmp_path))) == {("nvidia_smi_up",): 0}


def test_xids_are_counted_once_by_card(tmp_path, smi):
    cards(tmp_path, "0000:41:00.0", "0000:1b:00.0")
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1,-;Linux version\n"
        "3,2,9,-;NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=python, Ch 00000008\n"
        "3,3,9,-;NVRM: Xid (PCI:0000:41:00.0): 79, GPU has fallen off the bus.\n"
    )
    xids, reader = hm.Xids(str(log)), smi(f"echo '{RTX}'")
    for _ in range(2):
        found = told(collect(tmp_path, reader, xids, str(tmp_path / "root")))
        assert found[("gpu_xid_errors_total", ("bus", "0000:41:00"))] == 2
        assert found[("gpu_xid_last", ("bus", "0000:41:00"))] == 79
        assert found[("gpu_xid_errors_total", ("bus", "0000:1b:00"))] == 0
    with log.open("a") as file:
        file.write("3,4,9,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=2\n")
        # Of slices of a card (MIG).
        file.write("3,5,9,-;NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 94, pid=3, Contained: CE User Channel\n")
        file.write("3,6,9,-;NVRM: Xid (PCI:0000:1b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a\n")
    found = told(collect(tmp_path, reader, xids, str(tmp_path / "root")))
    assert found[("gpu_xid_errors_total", ("bus", "0000:1b:00"))] == 3
    assert found[("gpu_xid_last", ("bus", "0000:1b:00"))] == 13


def test_a_card_whose_nvidia_smi_is_gone_is_told(tmp_path, look):
    """Not one that nouveau, or a virtual machine, has: nvidia-smi would know nothing of it."""
    cards(tmp_path, "0000:1b:00.0")
    assert look()[("nvidia_smi_up",)] == 1  # Nothing answers for it
    found = told(collect(tmp_path, hm.Smi(), Nothing(), str(tmp_path / "root")))
    assert found[("nvidia_smi_up",)] == 0
    (tmp_path / "root/sys/bus/pci/devices/0000:1b:00.0/driver").symlink_to("../drivers/nvidia")
    assert look()[("nvidia_smi_up",)] == 1
    (tmp_path / "root/sys/bus/pci/devices/0000:1b:00.0/driver").unlink()
    (tmp_path / "root/sys/bus/pci/devices/0000:1b:00.0/driver").symlink_to("../drivers/nouveau")
    assert look() == {}


@pytest.mark.parametrize(
    "second", [None, LAPTOP.replace("9.81", "[GPU is lost]").replace("01:00.0", "41:00.0")]
)
def test_a_card_that_nvidia_smi_does_not_know_of_is_told(tmp_path, smi, second):
    """Seven of eight, and nothing said so: it answers, without the card whose start failed."""
    cards(tmp_path, "0000:1b:00.0", "0000:41:00.0", "0000:01:00.0")
    for place in ("0000:1b:00.0", "0000:41:00.0"):  # the third, an old one, has no driver
        (tmp_path / f"root/sys/bus/pci/devices/{place}/driver").symlink_to("../drivers/nvidia")
    reader = smi("cat <<'X'\n" + "\n".join(filter(None, (H100, second))) + "\nX")
    found = told(collect(tmp_path, reader, Nothing(), str(tmp_path / "root")))
    up = {key[1][1]: value for key, value in found.items() if key[0] == "gpu_up"}
    assert up == {"0000:1b:00": 1, "0000:41:00": 0} and found[("nvidia_smi_up",)] == 1
    found = told(collect(tmp_path, smi("exit 9"), Nothing(), str(tmp_path / "root")))
    assert found[("nvidia_smi_up",)] == 0 and not [key for key in found if key[0] == "gpu_up"]
    # A container sees all of its machine's cards on the bus, and was given some.
    (tmp_path / "root/run/systemd").mkdir(parents=True)
    (tmp_path / "root/run/systemd/container").write_text("lxc")
    found = told(collect(tmp_path, smi(f"echo '{H100}'"), Nothing(), str(tmp_path / "root")))
    assert found[("nvidia_smi_up",)] == 1 and not [key for key in found if key[0] == "gpu_up"]


def test_parts_of_a_card_for_virtual_machines_are_no_cards(tmp_path, smi):
    """NVIDIA's driver has them, too (vGPU); of two at one place node_exporter would refuse the whole file."""
    parts = [f"0000:1b:{place}" for place in ("00.4", "00.5", "01.0")]
    cards(tmp_path, "0000:1b:00.0", *parts)
    for place in ("0000:1b:00.0", *parts):
        (tmp_path / f"root/sys/bus/pci/devices/{place}/driver").symlink_to("../drivers/nvidia")
    for place in parts:
        (tmp_path / f"root/sys/bus/pci/devices/{place}/physfn").symlink_to("../0000:1b:00.0")
    text = collect(tmp_path, smi(f"echo '{H100}'"), Nothing(), str(tmp_path / "root"))
    assert [line for line in text.splitlines() if line.startswith("trainyard_gpu_up")] == [
        'trainyard_gpu_up{bus="0000:1b:00"} 1.0'
    ]


# As NVIDIA's exporter says it: an H100, a slice of it (MIG), a card that is known by its number alone; a pod twice.
def test_dcgm_is_asked_for_what_is_told_of_it():
    rows = (FILES / "dcgm.csv").read_text().splitlines()
    asked = [line.split(", ", 2) for line in rows if not line.startswith("#")]
    assert all(len(row) == 3 and row[1] in ("gauge", "counter") for row in asked)
    assert set(hm.DCGM) <= {row[0] for row in asked}


DCGM_PAGE = """HTTP/1.0 200 OK

# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-6c",pci_bus_id="00000000:1B:00.0",modelName="H100 \\"x\\""} 0.53
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",pci_bus_id="00000000:1B:00.0",GPU_I_ID="1"} 0.9
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",pci_bus_id="00000000:1B:00.0",pod="a"} 0.54
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="1",UUID="GPU-7d"} 0.25
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{gpu="1",UUID="GPU-7d"} 7
DCGM_FI_PROF_DRAM_ACTIVE{gpu="1"} soon
DCGM_FI_PROF_DRAM_ACTIVE{gpu="x"} 1
DCGM_FI_DEV_GPU_TEMP{gpu="0"} 45
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0"} 140737488355328.000000
DCGM_FI_PROF_PCIE_TX_BYTES{gpu="0"} 9223372036854775792
DCGM_FI_PROF_PCIE_RX_BYTES{gpu="0"} NaN
"""


def test_what_dcgm_knows_beyond_nvidia_smi_is_told(tmp_path, smi, monkeypatch):
    monkeypatch.setattr(hm, "dcgm", lambda: DCGM_PAGE)
    reader = smi("cat <<'X'\n" + "\n".join((H100, RTX)) + "\nX")
    found = told(collect(tmp_path, reader, Nothing(), str(tmp_path)))
    h100, rtx = ((("bus", "0000:1b:00"), ("gpu", "0")), (("bus", "0000:41:00"), ("gpu", "1")))
    assert found[("gpu_tensor_active_ratio", *h100)] == 0.53
    assert found[("gpu_tensor_active_ratio", *rtx)] == 0.25
    assert found[("gpu_pcie_replays_total", *rtx)] == 7
    assert (
        sum("active" in key[0] or "_bytes_per" in key[0] for key in found) == 2
    )  # none of what has no value
    assert found[("gpu_temperature_celsius", *h100)] == 45


def serve(answer, pause=0.0):
    """A port at which a program gives each who asks the bytes of `answer`, piece by piece, and ends then."""
    server = socket.create_server(("127.0.0.1", 0))

    def go():
        with contextlib.suppress(OSError), server.accept()[0] as door:
            door.recv(1 << 16)
            for piece in answer:
                door.sendall(piece)
                time.sleep(pause)

    threading.Thread(target=go, daemon=True).start()
    return server


def test_dcgms_exporter_is_asked_and_not_waited_for(monkeypatch):
    with serve([DCGM_PAGE[:40].encode(), DCGM_PAGE[40:].encode()]) as server:
        port = server.getsockname()[1]
        assert hm.dcgm(port) == DCGM_PAGE
    assert hm.dcgm(port) == ""  # nobody is there any more
    monkeypatch.setattr(hm, "DCGM_SECONDS", 0.3)
    begin = time.monotonic()
    with serve([b"x"] * 100, pause=0.1) as server:
        assert hm.dcgm(server.getsockname()[1]).strip("x") == ""
    assert time.monotonic() - begin < 2
    monkeypatch.setattr(hm, "DCGM_BYTES", 1000)
    with serve([b"x" * 5_000_000]) as server:
        assert 1000 <= len(hm.dcgm(server.getsockname()[1])) <= 1000 + (1 << 16)


def test_a_log_that_is_not_ours_to_read_is_no_fault(tmp_path, smi):
    found = told(collect(tmp_path, smi(f"echo '{RTX}'"), hm.Xids(str(tmp_path / "none")), str(tmp_path)))
    assert not [key for key in found if key[0].startswith("gpu_xid")] and found[("nvidia_smi_up",)] == 1


def test_throttling_is_what_preflight_calls_so():
    assert set(THROTTLES) == set(hm.THROTTLES) - {0x4}


# ---- RDMA, PFC ----


def test_the_ports_counters_are_told(tmp_path, look):
    port = tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    port.mkdir(parents=True)
    for name, text in {
        "np_cnp_sent": "12\n",
        "out_of_sequence": "3\n",
        "lifespan": "10\n",
        "odd": "N/A\n",
    }.items():
        (port / name).write_text(text)
    (tmp_path / "root/sys/class/infiniband/mlx5_0/ports/2").mkdir()
    labels = (("device", "mlx5_0"), ("port", "1"))
    assert look() == {
        ("rdma_hw_counter_total", ("counter", "np_cnp_sent"), *labels): 12,
        ("rdma_hw_counter_total", ("counter", "out_of_sequence"), *labels): 3,
    }


def test_a_ports_state_and_whose_it_is_are_told(tmp_path, look):
    """Of RoCE's port, which a network interface shares; of InfiniBand's, without a cable."""
    for device, state, link in (("mlx5_0", "4: ACTIVE", "Ethernet"), ("mlx5_1", "1: DOWN", "InfiniBand")):
        port = tmp_path / "root/sys/class/infiniband" / device / "ports/1"
        (port / "gid_attrs/ndevs").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
    ndevs = tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs"
    (ndevs / "0").mkdir()  # what cannot be read, as an entry without an address
    (ndevs / "1").write_text("ens1np0\n")

    def up(device, link, interface):
        about = {"device": device, "interface": interface, "link": link, "port": "1"}
        return ("rdma_port_up", *sorted(about.items()))

    assert look() == {up("mlx5_0", "Ethernet", "ens1np0"): 1, up("mlx5_1", "InfiniBand", ""): 0}


@pytest.mark.parametrize(
    ("name", "pause"),
    [
        ("rx_prio3_pause", ("rx", "3")),
        ("tx_prio0_pause", ("tx", "0")),
        ("rx_priority_3_xoff", ("rx", "3")),
        ("tx_priority_3_xoff.nic", ("tx", "3")),
        ("rx_pfc_ena_frames_pri3", ("rx", "3")),
        ("rx_prio3_pause_duration", None),
        ("rx_prio3_pause_transition", None),
        ("rx_prio3_bytes", None),
        ("rx_prio3", None),
        ("rx_priority_3_xon", None),
        ("rx_prio3_discards", None),
        ("rx_pause", None),
    ],
)
def test_pauses_are_known_by_their_drivers_names(tmp_path, look, monkeypatch, name, pause):
    (tmp_path / "root/sys/class/net/eth7/device").mkdir(parents=True)
    (tmp_path / "root/sys/class/net/lo").mkdir()
    monkeypatch.setattr(hm, "ethtool_counters", lambda device: {name: 5, "rx_bytes": 9})
    found = look()
    if pause is None:
        assert found == {}
    else:
        labels = (("device", "eth7"), ("direction", pause[0]), ("priority", pause[1]))
        assert found == {("nic_pause_total", *labels): 5}


def test_a_counters_name_that_is_no_text_is_no_fault(monkeypatch):
    """A driver's own string; the service ended by it, each time that it was started."""
    name = b"rx_\xb5s".ljust(32, b"\0")

    def ioctl(door, request, structure):
        _, address = hm.struct.unpack("16sP", structure)
        asked = ctypes.c_uint32.from_address(address).value
        given = {
            hm.GSSET_INFO: (16, b"\1\0\0\0"),
            hm.GSTRINGS: (12, name),
            hm.GSTATS: (8, b"\7".ljust(8, b"\0")),
        }
        at, answer = given[asked]
        ctypes.memmove(address + at, answer, len(answer))

    monkeypatch.setattr(hm.fcntl, "ioctl", ioctl)
    assert hm.ethtool_counters("eth0") == {"rx_\ufffds": 7}


def test_a_card_without_counters_is_no_fault():
    with pytest.raises(OSError):
        hm.ethtool_counters("lo")


# ---- rules and page ----

EVERY = [
    rule for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
RULES = [rule for rule in EVERY if "alert" in rule]
RECORDED = {rule["record"] for rule in EVERY if "record" in rule}
PAGE = (FILES / "page.html").read_text()


def test_rules_and_page_ask_for_metrics_that_there_are():
    for text in ((FILES / "rules.yml").read_text(), PAGE):
        asked = set(re.findall(r"\btrainyard_((?:run|gpu|rdma|nic|nvidia)_\w+)", text)) - {"run_", "gpu_"}
        assert asked and asked <= set(hm.HELP) | {name for name in asked if name.startswith("run_$")}
        assert set(re.findall(r"\btrainyard:\w+", text)) <= RECORDED
    states = set(
        re.findall(r"\w+", " ".join(re.findall(r'state=~?"([\w|]+)"', (FILES / "rules.yml").read_text())))
    )
    active = json.loads(re.search(r"const ACTIVE = (\[.*\]);", PAGE)[1])
    assert states <= set(metrics.STATES)
    assert set(active) == set(metrics.STATES) - set(metrics.FINAL)


DASHBOARDS = yaml.safe_load((FILES / "dashboards.yml").read_text())
# What the trainer gives Prometheus itself (trainer/sinks.py): the numbers of a line of metrics.jsonl.
TRAIN = re.search(r"^  train  ([a-z_\s]+)\(", metrics.__doc__, re.MULTILINE)[1].split()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_are_grafanas_and_ask_for_metrics_that_there_are(name):
    """Of node_exporter's names, tests/playbooks/test_alerts.py asks it itself."""
    board = json.loads(grafana.grafana_dashboard(DASHBOARDS, name))
    assert board["uid"] == f"trainyard-{name}" and board["templating"]["list"][0]["name"] in ("host", "run")
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    taken = Counter((place["x"] + n, place["y"]) for place in places for n in range(place["w"]))
    assert max(taken.values()) == 1 and max(x for x, _ in taken) < 24
    known = {f"trainyard_{one}" for one in hm.HELP} | {f"trainyard_train_{one}" for one in TRAIN}
    for panel in panels:
        assert panel["datasource"]["uid"] == "trainyard"
        for target in panel["targets"]:
            plain = re.sub(r"\{[^}]*\}|\[\w+\]|\b(by|unless on) \([^)]*\)", "", target["expr"])
            words = set(re.findall(r"[a-zA-Z_][\w:]*", plain))
            words -= {"sum", "count", "max", "avg", "rate", "increase", "timestamp", "unless", "up", "ALERTS"}
            assert {word for word in words if not word.startswith("node_")} <= known | RECORDED
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {
                one["name"] for one in board["templating"]["list"]
            }


def rendered(name, **variables):
    """A template of the role, as on a host with the role's defaults."""
    given = yaml.safe_load((FILES.parent / "defaults/main.yml").read_text())
    given |= {"_monitoring_etc": "/etc/trainyard-monitoring", **variables}
    jinja = jinja2.Environment(trim_blocks=True)
    jinja.filters["to_json"] = json.dumps  # Ansible's
    return jinja.from_string((FILES.parent / "templates" / name).read_text()).render(given)


@pytest.mark.parametrize(
    ("there", "wanted", "package"),
    [
        ({}, "auto", ""),
        ({}, "always", "grafana"),  # and apt says that it has none
        ({"grafana": ("(none)", "(none)")}, "auto", ""),
        ({"grafana": ("(none)", "11.2.0")}, "auto", "grafana"),
        ({"grafana": ("(none)", "11.2.0")}, "never", ""),
        ({"grafana": ("(none)", "11.2.0"), "grafana-enterprise": ("(none)", "11.2.0")}, "auto", "grafana"),
        ({"grafana-enterprise": ("(none)", "11.2.0")}, "auto", ""),
        ({"grafana": ("11.0.0", "11.2.0"), "grafana-enterprise": ("(none)", "11.2.0")}, "auto", "grafana"),
        # The owner's edition stays: apt would take it away for the other.
        (
            {"grafana": ("(none)", "11.2"), "grafana-enterprise": ("11.0", "11.2")},
            "auto",
            "grafana-enterprise",
        ),
        (
            {"grafana": ("(none)", "11.2"), "grafana-enterprise": ("11.0", "11.2")},
            "always",
            "grafana-enterprise",
        ),
        ({"grafana-enterprise": ("11.0", "11.0")}, "auto", "grafana-enterprise"),
        ({"grafana-enterprise": ("11.0", "11.0")}, "never", ""),
    ],
)
def test_the_edition_of_grafana_that_is_there_stays(there, wanted, package):
    policy = "".join(
        f"{name}:\n  Installed: {installed}\n  Candidate: {candidate}\n  Version table:\n     {candidate} 500\n"
        "        500 https://apt.example stable/main amd64 Packages\n"
        for name, (installed, candidate) in there.items()
    )
    assert grafana.grafana_package(policy, wanted) == package
    for name in ("main", "precheck"):
        tasks = yaml.safe_load((ROOT / f"roles/monitoring/tasks/{name}.yml").read_text())
        (task,) = [task for task in tasks if task.get("register") == "__monitoring_apt"]
        assert task["ansible.builtin.command"] == "apt-cache policy grafana grafana-enterprise"


def test_grafana_is_for_who_is_on_the_host_and_lets_nobody_log_in():
    ini = configparser.ConfigParser(interpolation=None, default_section="none")
    ini.read_string(rendered("grafana.ini.j2", cluster_name="home"))
    assert dict(ini["server"]) == {"http_addr": "127.0.0.1", "http_port": "3001"}
    assert ini["auth.anonymous"]["org_role"] == "Viewer"
    assert ini["security"].getboolean("disable_initial_admin_creation")
    assert ini["auth"].getboolean("disable_login_form") and not ini["auth.basic"].getboolean("enabled")
    assert not [key for section in ini.values() for key in section if "password" in key]
    source = yaml.safe_load(rendered("grafana-source.yml.j2"))["datasources"][0]
    assert (source["uid"], source["url"]) == ("trainyard", "http://127.0.0.1:9090")
    (provider,) = yaml.safe_load(rendered("grafana-dashboards.yml.j2"))["providers"]
    assert ini["dashboards"]["default_home_dashboard_path"] == f"{provider['options']['path']}/cluster.json"


@pytest.mark.parametrize("name", ['Anna\'s lab (2): "a", \\d', "7", 7, "on", None])
def test_prometheus_has_the_clusters_name_as_it_is(name):
    host = {"node1": {"ansible_host": "192.168.1.100"}}
    given = {} if name is None else {"cluster_name": name}
    said = yaml.safe_load(rendered("prometheus.yml.j2", _monitoring_hosts=host, **given))
    hosts, trainer = said["scrape_configs"]
    wanted = "cluster" if name is None else str(name)
    assert hosts["static_configs"][0]["labels"] == {"instance": "node1", "cluster": wanted}
    assert trainer["relabel_configs"][1] == {"target_label": "cluster", "replacement": wanted}


@pytest.mark.parametrize("port", [9090, 9191])
def test_prometheus_lets_no_page_of_another_origin_read(port):
    """By default it lets all of them; of an expression that is anchored, as it has it, nothing may be special."""
    (command,) = re.findall(
        r"^ExecStart=((?:.*\\\n)*.*)$",
        rendered("trainyard-prometheus.service.j2", monitoring_port=port),
        re.M,
    )
    words = command.replace("\\\n", " ").split()
    assert f"--web.listen-address=127.0.0.1:{port}" in words
    (allowed,) = (word.partition("=")[2] for word in words if word.startswith("--web.cors.origin="))
    assert not set(allowed) & set("\\$%\"' ")  # systemd would take these otherwise
    for origin in ("null", "http://127.0.0.1:9090", "http://127.0.0.1", "https://example.com", ""):
        assert not re.fullmatch(allowed, origin)


def test_each_alert_says_what_is_and_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule
        assert set(rule["annotations"]) == {"summary", "cure"}, rule
        for playbook in re.findall(
            r"playbooks/(\w+\.yml)|(\bdiagnose\.yml|\blogs\.yml)", str(rule["annotations"])
        ):
            assert (ROOT / "playbooks" / "".join(playbook)).exists()


def test_each_alert_is_caused_for_real():
    causes = "".join(
        (ROOT / "tests/lab" / name).read_text() for name in ("test_monitoring.py", "test_dashboard.py")
    )
    assert [rule["alert"] for rule in RULES if f'"{rule["alert"]}"' not in causes] == []


def test_what_diverged_says_so_first():
    """RunDiverged goes by that word."""
    text = (ROOT / "trainer/recorder.py").read_text()
    assert set(re.findall(r'raise Diverged\(\s*f?"(\w+)', text)) == {"diverged"}


def test_the_page_takes_nothing_from_elsewhere():
    assert "http" not in PAGE.replace("http://www.w3.org/2000/svg", "")


# ---- the way to the page ----


@pytest.fixture
def inventory(tmp_path):
    """A file of an inventory whose head has `variables`, with or without the group monitoring."""

    def make(group=True, **variables):
        head = {"hosts": {"node1": {"ansible_host": "{{ net }}.7", "net": "192.0.2", **variables}}}
        children = {
            "cluster": {"children": {"head": head}},
            "monitoring": {"hosts": {"node1": {}} if group else {}},
        }
        file = tmp_path / "hosts.yml"
        file.write_text(yaml.safe_dump({"all": {"children": children}}))
        return str(file)

    return make


def test_the_tunnel_goes_as_ansible_logs_in(inventory):
    (host,) = dashboard.ask(
        inventory(
            ansible_user="anna",
            ansible_port=2222,
            ansible_ssh_private_key_file="/keys/a",
            ansible_ssh_common_args="-o 'ProxyCommand=relay %h %p' -J jump",
            monitoring_port=9191,
        )
    )
    words = dashboard.tunnel(host, 9090, 3002)
    assert words[:4] == ["ssh", "-N", "-L", "127.0.0.1:9090:127.0.0.1:9191"]
    assert words[4:6] == ["-L", "127.0.0.1:3002:127.0.0.1:3001"]
    assert words[-11:] == [
        *("-o", "ProxyCommand=relay %h %p", "-J", "jump"),
        *("-p", "2222", "-l", "anna", "-i", "/keys/a", "192.0.2.7"),
    ]
    assert not [word for word in words if "HostKeyChecking" in word]


def test_without_the_group_the_cure_is_named(inventory, capsys):
    assert dashboard.main(["-i", inventory(group=False)]) == 2
    assert "monitoring: {hosts: {HEAD: {}}}" in capsys.readouterr().err


def test_on_the_host_itself_no_tunnel_is_needed(inventory, capsys):
    assert dashboard.main(["-i", inventory(ansible_connection="local")]) == 0
    assert "http://127.0.0.1:9090/user/" in capsys.readouterr().out


def test_a_grafana_that_answers_is_told_of(inventory, capsys):
    with serve([b"HTTP/1.0 200 OK\r\n\r\n{}"]) as server:
        port = server.getsockname()[1]
        where = inventory(ansible_connection="local", monitoring_grafana_port=port)
        assert dashboard.main(["-i", where]) == 0
    assert f"http://127.0.0.1:{port}/dashboards shows it in Grafana" in capsys.readouterr().out
    assert dashboard.main(["-i", where]) == 0
    assert "Grafana" not in capsys.readouterr().out


def test_a_port_that_is_taken_is_not_insisted_on():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert dashboard.free(port) != port
    assert dashboard.free(port) == port
    assert dashboard.free(port, port) != port


def test_an_ssh_that_ends_is_told(inventory, capfd, monkeypatch, tmp_path):
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\necho 'no route' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert dashboard.main(["-i", inventory()]) == 2
    said = capfd.readouterr().err
    assert "no route" in said and "node1 (192.0.2.7): SSH ended" in said


def test_where_the_first_host_is_gone_the_next_one_shows_the_page(tmp_path, capfd, monkeypatch):
    """node3 stands before node1 in the group: its SSH ends, and node1 is this machine."""
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\necho 'no route' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    group = {"node3": {"ansible_host": "192.0.2.3"}, "node1": {"ansible_connection": "local"}}
    file = tmp_path / "hosts.yml"
    file.write_text(yaml.safe_dump({"all": {"children": {"monitoring": {"hosts": group}}}}, sort_keys=False))
    assert dashboard.main(["-i", str(file)]) == 0
    said = capfd.readouterr()
    assert "node3 (192.0.2.3): SSH ended" in said.err and "the next host of the group" in said.err
    assert "http://127.0.0.1:9090/user/" in said.out
