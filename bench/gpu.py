"""One NVIDIA GPU and a model of a billion weights, trained by every way that one GPU has: speed, MFU and memory."""

import statistics
import subprocess
from pathlib import Path

from bench.measure import Case, Options, launch, markdown, prepared, speed_of, tell

# A billion weights, as Llama shapes them.
CASE = Case("text", 32768, 8, 2048, steps=14, untimed=6, width=2048, layers=20, lr=1e-5, device="auto")
QUICK = Case("text", 2048, 2, 64, steps=3, untimed=1, threads=1, device="auto")
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
        rows = [_row(name, words, case, folder) for name, words in WAYS.items()]
    return f"""\
### GPU

{found or "no GPU: on the CPU"}; {case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}; \
{case.batch_size} sequences of {case.sequence_length:,} tokens a step; bfloat16.

{markdown(("way", "tokens/s", "MFU", "peak MiB"), rows)}

MFU counts 6 operations a trained weight and token, 4 a frozen one (trainer/model/flops.py), and no attention. The \
targets are 45 % for all weights, and 50 % for LoRA."""


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
        said = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        tell(f"{name}: {said[-1]}")
        return [name, "failed", "", ""]
    speed, shares = speed_of(steps, case), [one["mfu"] for one in steps[case.untimed :]]
    tell(f"{name}: {speed:,.0f} tokens/s")
    mfu = "unknown" if None in shares else f"{statistics.median(shares):.1%}"
    return [name, f"{speed:,.0f}", mfu, f"{steps[-1]['memory_peak_bytes'] >> 20:,}"]
