"""`trainer burn`: load on all of this host's cards, or on its processors, whose results must stay the same.

Each device multiplies the same two matrices again and again, over a large part of its memory, and holds every product
against the first one, bit for bit: a card that computes wrong, or whose memory forgets, is found. Its speed in the
first minute and in the last tells whether heat slows it.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.errors import BadInput

SIDE = {"cuda": 8192, "cpu": 512}  # of the matrices
FILLED = 0.8  # of a card's free memory
ON_CPU = 8  # products at a time
MINUTE = 60.0


def main(device: str, dtype: str, minutes: float) -> int:
    """Compute for so many minutes, on all devices at once; prints a list of `burn`'s answers as JSON."""
    cards = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not cards:
        raise BadInput(f"device cuda, and torch {torch.__version__} sees no GPU; set device to cpu")
    devices = [torch.device("cuda", number) for number in range(cards)] or [torch.device("cpu")]
    with ThreadPoolExecutor(len(devices)) as pool:
        found = list(pool.map(lambda one: burn(one, dtype, minutes * 60), devices))
    print(json.dumps(found), flush=True)
    return 0


def burn(device: torch.device, dtype: str, seconds: float) -> dict:
    """What became of one device: {device, dtype, products, wrong, first, last, error}.

    dtype: as a configuration has it, or auto. wrong: of the products, those that had not the first one's bits. first,
    last: TFLOP/s of the first and the last minute. error: "" where it ended well.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processors"
    found = {
        "device": f"{device} ({name})",
        "products": 0,
        "wrong": 0,
        "first": 0.0,
        "last": 0.0,
        "error": "",
    }
    kind, side, ends = number_format(device, dtype), SIDE[device.type], []
    try:
        chance = torch.Generator(device).manual_seed(0)
        one, other = (torch.randn(side, side, device=device, dtype=kind, generator=chance) for _ in range(2))
        products = one.new_empty(room(one), side, side)
        first = torch.matmul(one, other, out=products[0]).clone()
        torch.equal(first, products[0])  # waits until the device is warm
        begin = time.perf_counter()
        while not ends or ends[-1] < seconds:
            for product in products:
                torch.matmul(one, other, out=product)
            found["wrong"] += int(torch.stack([(product != first).any() for product in products]).sum())
            found["products"] += len(products)
            ends.append(time.perf_counter() - begin)
    except RuntimeError as error:  # what a card answers that fails, or has too little memory
        found["error"] = str(error).strip().splitlines()[0]
    if ends:
        each = 2 * side**3 * len(products) / 1e12
        window = min(MINUTE, ends[-1] / 2)
        found["first"] = each * turns(ends, 0.0, max(window, ends[0]))
        found["last"] = each * turns(ends, ends[-1] - window, ends[-1])
    return {**found, "dtype": str(kind).removeprefix("torch.")}


def number_format(device: torch.device, dtype: str) -> torch.dtype:
    """What loads the device most, unless a dtype is named: 16 bits on cards, in the format that they have."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def room(matrix: torch.Tensor) -> int:
    """How many more of `matrix` are computed at a time."""
    if matrix.device.type == "cpu":
        return ON_CPU
    free, _ = torch.cuda.mem_get_info(matrix.device)
    return max(1, int(free * FILLED) // matrix.nbytes)


def turns(ends: list[float], since: float, until: float) -> float:
    """Turns a second between two times, of those that ended there. ends: of all turns, s."""
    inside = [end for end in ends if since < end <= until]
    return len(inside) / (inside[-1] - max((end for end in ends if end <= since), default=0.0))
