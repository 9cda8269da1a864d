"""One NVIDIA GPU and a model of a billion weights: beside the peers, and by every way that one GPU has."""

import statistics
import subprocess
from pathlib import Path

from bench.measure import (
    HEAD,
    Case,
    Measured,
    Options,
    against,
    fault,
    launch,
    markdown,
    prepared,
    same_losses,
    speed_of,
    tell,
    turns,
)

# A billion weights, as Llama shapes them.
CASE = Case(
    "text",
    32768,
    8,
    2048,
    steps=14,
    untimed=6,
    width=2048,
    layers=20,
    lr=1e-5,
    device="auto",
    dtype="bfloat16",
)
QUICK = Case("text", 2048, 2, 64, steps=3, untimed=1, threads=1, device="auto", dtype="bfloat16")
ROUNDS = 3
WITHIN = 1e-2  # of each other, losses: bfloat16 has three digits
# Who trains all weights on the same packed sequences, with activations kept.
PEERS = {
    "bare loop": "bare",
    "bare loop, compiled": "bare-compiled",
    "Trainyard": "ours",
    "Trainyard, compiled": "ours-compiled",
    "HF Trainer": "hf",
    "HF Trainer, compiled": "hf-compiled",
    "TRL SFTTrainer": "sft-kept",
}
LORA = ("adapter=lora", "lora_targets=all-linear")
WAYS = {
    "all weights": (),
    "all weights, compiled": ("compile=true",),
    "all weights, activations computed again": ("gradient_checkpointing=true",),
    "LoRA": LORA,
    "LoRA, compiled": (*LORA, "compile=true"),
    "QLoRA, 8 bits": (*LORA, "quantize=8bit"),
    "QLoRA, 4 bits": (*LORA, "quantize=4bit"),
    "offload": ("strategy=offload",),
    "infinity": ("strategy=infinity",),
}


def table(options: Options) -> str:
    case, found = options.fitted(CASE, QUICK), devices()
    if not found and not options.quick:
        return "### GPU\n\nNo NVIDIA GPU here: not measured."
    with prepared(case) as folder:
        peers = turns(folder, PEERS, options.rounds(ROUNDS), may_fail=True)
        rows = [_row(name, words, case, folder) for name, words in WAYS.items()]
    return f"""\
### GPU

{found or "no GPU: on the CPU"}; {case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; \
{case.batch_size} sequences of {case.sequence_length:,} tokens a step; bfloat16.

{_beside(peers)}

{markdown(("way", "tokens/s", "MFU", "peak MiB"), rows)}

MFU counts 6 operations a trained weight and token, 4 a frozen one (trainer/model/flops.py), and no attention. The \
targets are 45 % for all weights, and 50 % for LoRA."""


def _beside(peers: dict[str, Measured]) -> str:
    """The peers' table; what did not fit is not in it."""
    base = next((title for title in ("HF Trainer", *peers) if title in peers), "")
    if not base:
        return "No contender trains all weights here."
    alike = [title for title in ("bare loop", "Trainyard") if title in peers]
    losses = f" {same_losses(peers, *alike, within=WITHIN)}" if len(alike) > 1 else ""
    left_out = [title for title in PEERS if title not in peers]
    failed = f" Failed: {', '.join(left_out)}." if left_out else ""
    return f"{markdown(HEAD, against(peers, base))}\n\n`of it`: of {base}'s.{losses}{failed}"


def devices() -> str:
    """The first NVIDIA GPU here, by its name and driver; "" where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    name, _, driver = done.stdout.partition("\n")[0].partition(", ")
    return f"{name}, driver {driver}" if driver else ""


def _row(name: str, words: tuple[str, ...], case: Case, folder: Path) -> list[str]:
    try:
        steps = launch(folder, name.replace(" ", "-"), 1, *words, "dtype=bfloat16", "checkpoint_async=false")
    except RuntimeError as error:  # one that does not fit leaves the others their figures
        tell(f"{name}: {fault(error)}")
        return [name, "failed", "", ""]
    speed, shares = speed_of(steps, case), [one["mfu"] for one in steps[case.untimed :]]
    tell(f"{name}: {speed:,.0f} tokens/s")
    mfu = "unknown" if None in shares else f"{statistics.median(shares):.1%}"
    return [name, f"{speed:,.0f}", mfu, f"{steps[-1]['memory_peak_bytes'] >> 20:,}"]
