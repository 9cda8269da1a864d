"""Preflight's checks of GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from host_runs import busy
from preflight_base import FAIL, PASS, SKIP, WARN, Cluster, Said, check

# Xids that mean the card or its link (NVIDIA's catalogue); the others are mostly a program's own faults.
HARD_XIDS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 136, 140, 143}
A_DAY = 86400
KEPT_SPEED = 0.9  # of the first minute of a burn
# Bits of clocks_throttle_reasons.active (NVML).
THROTTLES = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}


@check(
    "The driver shows every card that PCI shows, and as many as the run has processes",
    "all cards",
    "PCI; nproc_per_node",
)
def gpus(cluster: Cluster) -> Iterable[Said]:
    well, without = True, []
    on_cpus = {host for host in cluster.alive if cluster.facts[host]["expected"].get("device") == "cpu"}
    for host, survey in cluster.survey().items():
        gpu, wanted = survey["gpu"], cluster.facts[host]["expected"].get("processes") or 0
        # In a container the machine's cards are to be seen, and their driver is not the container's to install.
        if not gpu["gpus"] and (not gpu["cards"] or (survey["container"] and not gpu["driver"])):
            without.append(host)
            continue
        fault = ""
        if gpu["error"]:
            fault = f"nvidia-smi: {gpu['error']}"
        elif not gpu["driver"]:
            fault = f"{gpu['cards']} cards and no driver"
        # One that is too old for a run may have its own driver's; a container may have been given some.
        elif len(gpu["gpus"]) < gpu["cards"] and not survey["container"]:
            fault = f"{len(gpu['gpus'])} of {gpu['cards']} cards"
        elif wanted > len(gpu["gpus"]) and host not in on_cpus:
            fault = f"{len(gpu['gpus'])} GPUs for nproc_per_node {wanted}"
        if fault:
            well = False
            yield Said(WARN if host in on_cpus else FAIL, [host], fault, cluster.site("nvidia", [host]))
    if without and len(without) < len(cluster.alive) and not on_cpus:
        well = False
        text = "no card, while other hosts have one: ranks on CPUs and GPUs do not mix"
        cure = cluster.train_without(without) + "   or have all compute on CPUs: -e device=cpu"
        yield Said(WARN, without, text, cure)
    elif without and len(without) == len(cluster.alive):
        well = False
        yield Said(SKIP, without, "no host has a card of NVIDIA's")
    if well:
        count = {host: len(survey["gpu"]["gpus"]) for host, survey in cluster.survey().items()}
        yield Said(
            PASS, cluster.alive, ", ".join(f"{host} {number}" for host, number in list(count.items())[:8])
        )


def _with_gpus(cluster: Cluster) -> dict[str, dict]:
    return {h: s["gpu"] for h, s in cluster.survey().items() if s["gpu"]["gpus"]}


@check(
    "Nothing but runs holds the cards' memory",
    "{gpu_used_mb:g} MiB a card",
    "preflight_gpu_used_mb; what a desktop holds, a rank runs out of",
)
def gpu_memory(cluster: Cluster) -> Iterable[Said]:
    found, well = _with_gpus(cluster), True
    for host, gpu in found.items():
        foreign = [one for one in gpu["processes"] if not one["run"]]
        desktops = [one for one in foreign if "G" in one["kind"]]
        others = [one for one in foreign if "G" not in one["kind"]]
        used = max(number(row.get("memory.used", "0")) for row in gpu["gpus"])
        if desktops and used > cluster.limits.gpu_used_mb:
            well = False
            text = f"a desktop: {', '.join(dict.fromkeys(one['name'] for one in desktops))}; {used:.0f} MiB in use"
            yield Said(WARN, [host], text, cluster.on([host], "systemctl isolate multi-user.target"))
        if others:
            well = False
            told = ", ".join(f"{one['name']} (process {one['pid']}, GPU {one['gpu']})" for one in others[:4])
            yield Said(WARN, [host], f"{told}; {used:.0f} MiB in use", cluster.on([host], ending(others)))
        if not foreign and used > cluster.limits.gpu_used_mb and not busy([cluster.facts[host]["run"]]):
            well = False
            cure = cluster.on([host], 'sh -c "fuser -v /dev/nvidia*"') + "   and end what it names"
            yield Said(WARN, [host], f"{used:.0f} MiB in use by nobody that the driver shows", cure)
    if not found:
        yield Said(SKIP, cluster.alive, "no host has a GPU")
    elif well:
        yield Said(PASS, list(found), "nobody else's")


def ending(processes: list[dict]) -> str:
    """The command that ends them, and keeps those ended that a service or a container would start again."""
    pids = [str(one["pid"]) for one in processes if not one.get("end")]
    commands = dict.fromkeys(one["end"] for one in processes if one.get("end"))
    each = [*commands, *([f"kill {' '.join(pids)}"] if pids else [])]
    return each[0] if len(each) == 1 else f'sh -c "{"; ".join(each)}"'


@check(
    "The cards report no fault: ECC, Xid, throttling",
    "no uncorrected error, no pending row, no Xid of the card, none of a program within a day, no throttling",
    "Azure's node health checks; NVIDIA's Xid catalogue",
)
def gpu_health(cluster: Cluster) -> Iterable[Said]:
    found, well = _with_gpus(cluster), True
    for host, gpu in found.items():
        for row in gpu["gpus"]:
            name = f"GPU {row.get('index', '?')}"
            errors = row.get("ecc.errors.uncorrected.volatile.total", "0")
            hard = [f"{errors} uncorrected memory errors"] if number(errors) > 0 else []
            # [GPU is lost], [GPU requires reset]: in place of each figure
            hard += list(
                dict.fromkeys(value.strip("[]") for value in row.values() if value.startswith("[GPU "))
            )
            hard += [
                f"row remapping {what}"
                for what in ("pending", "failure")
                if (told := row.get(f"remapped_rows.{what}", "0").lower()) not in ("0", "no", "")
                and told[0] != "["
            ]
            bits = row.get("clocks_throttle_reasons.active") or row.get("clocks_event_reasons.active", "0x0")
            bits = int(bits, 16) if bits.startswith("0x") else 0
            slow = [words for bit, words in THROTTLES.items() if bits & bit]
            if hard:
                well = False
                cure = cluster.on([host], f"nvidia-smi --gpu-reset -i {row.get('index', 0)}")
                yield Said(
                    FAIL, [host], f"{name}: {', '.join(hard)}", cure + "   and replace the card if it returns"
                )
            if slow:
                well = False
                text = f"{name}: slowed down by {', '.join(slow)} at {row.get('temperature.gpu', '?')} °C"
                yield Said(
                    WARN, [host], text, cluster.on([host], "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE")
                )
        # A program's fault is the program's; one of today may come again.
        soft = [one for one in gpu["xids"] if one["xid"] not in HARD_XIDS and (one.get("age") or 0) < A_DAY]
        for result, some, when, cure in (
            (FAIL, [one for one in gpu["xids"] if one["xid"] in HARD_XIDS], "since it booted", "reboot"),
            (WARN, soft, "within a day", 'sh -c "dmesg -T | grep Xid"'),
        ):
            if some:
                well = False
                last = some[-1]
                text = f"{len(some)} Xid {when}, the last {last['xid']} at {last['bus']} ({last['text']})"
                more = "" if result == FAIL else "   and see to the program that it names"
                yield Said(result, [host], text, cluster.on([host], cure) + more)
    if not found:
        yield Said(SKIP, cluster.alive, "no host has a GPU")
    elif well:
        yield Said(PASS, list(found), "no fault")


def number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


@check(
    "The cards have all their PCIe lanes",
    "the width that the card can",
    "PCI Express; half the lanes, half the way to the network",
)
def pcie(cluster: Cluster) -> Iterable[Said]:
    found, well = _with_gpus(cluster), True
    for host, gpu in found.items():
        for row in gpu["gpus"]:
            now, most = row.get("pcie.link.width.current", ""), row.get("pcie.link.width.max", "")
            if now and most and number(now) < number(most):
                well = False
                text = f"GPU {row.get('index', '?')}: {now} of {most} lanes"
                cure = cluster.on([host], "nvidia-smi -q -d PCIE") + "   then seat the card anew, or move it"
                yield Said(WARN, [host], text, cure)
    if not found:
        yield Said(SKIP, cluster.alive, "no host has a GPU")
    elif well:
        yield Said(PASS, list(found), "all lanes")


@check(
    "Cards and processors compute for hours, each time the same, and cards as fast in the last minute as in the first",
    "no other bit; 90 % of the first minute's speed",
    "trainer/commands/burn.py; depth burn",
)
def burn(cluster: Cluster) -> Iterable[Said]:
    burned = {host: cluster.facts[host].get("burn") for host in cluster.alive}
    if not any(burned.values()):
        yield Said(SKIP, cluster.alive, "they were not loaded; depth burn does so")
        return
    well = True
    for host, devices in burned.items():
        for one in devices or []:
            if one["error"]:
                result, text = FAIL, f"{one['device'] or 'trainer burn'}: {one['error']}"
                cure = cluster.on([host], "dmesg --level=err,warn")
            elif one["wrong"]:
                result, text = (
                    FAIL,
                    f"{one['device']}: {one['wrong']} of {one['products']} products were wrong",
                )
                cure = f"{cluster.train_without([host])}   until it is replaced"
            # A processor's time is other programs', too.
            elif one["last"] < KEPT_SPEED * one["first"] and not one["device"].startswith("cpu"):
                result = WARN
                text = f"{one['device']}: {one['last']:.3g} TFLOP/s in the last minute, {one['first']:.3g} in the first"
                cure = cluster.on([host], "nvidia-smi -q -d TEMPERATURE,PERFORMANCE")
            else:
                continue
            well = False
            yield Said(result, [host], text, cure)
    if well:
        speeds = [
            f"{host} {sum(one['last'] for one in devices):.3g}" for host, devices in burned.items() if devices
        ]
        yield Said(
            PASS, [h for h in burned if burned[h]], f"{', '.join(speeds[:8])} TFLOP/s, each product the same"
        )
