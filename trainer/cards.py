"""The GPUs of a host: what torch sees of them, and whether its build and a configuration can compute on them."""

import os
import re
from pathlib import Path

import torch

from trainer.config import Config
from trainer.errors import BadInput

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each card that NVIDIA's driver has
NODES = Path("/dev")  # where a container has those that it was given
CONTAINER = (Path("/run/systemd/container"), Path("/.dockerenv"))  # one of which is in a container
BFLOAT16 = (8, 0)  # the compute capability from which on a card has it; torch emulates it on others


def seen(config: Config) -> list[str]:
    """The ids of the GPUs that this rank sees; none where it is to compute on the CPU."""
    if config.device == "cpu" or not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def unseen(config: Config) -> str:
    """Why torch sees none of the cards that the driver has; "" where it sees some, there are none, or none is wanted.

    torch itself says it in a warning, and computes on the CPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # A container shows its machine's driver, whatever it was given.
    place, pattern = (NODES, "nvidia[0-9]*") if any(one.exists() for one in CONTAINER) else (DRIVER, "*")
    count = 0 if hidden or config.device == "cpu" else len(list(place.glob(pattern)))
    if not count or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        why = "it does not say why"
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    which = "an NVIDIA card" if count == 1 else f"{count} NVIDIA cards"
    return f"there is {which}, of which torch {torch.__version__} sees none: {why}"


def check(config: Config, devices: list[torch.device]) -> None:
    """Raise BadInput where torch's build has no kernels for one of these devices, or the card lacks the dtype."""
    for device in devices:
        if device.type != "cuda":
            continue
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        card = f"the {name} (compute capability {capability[0]}.{capability[1]})"
        if not has_code(device):
            raise BadInput(
                f"device: torch {torch.__version__} has no kernels for {card}; its build is for "
                f"{' '.join(torch.cuda.get_arch_list())}. Set python_env_torch to one that has them, and run site.yml "
                "(docs/gpus.md); or leave the host out, or its card (CUDA_VISIBLE_DEVICES)"
            )
        if config.dtype == "bfloat16" and capability < BFLOAT16:
            raise BadInput(
                f"dtype: {card} has no bfloat16, and computes it many times slower and with more memory than is "
                "counted. Set dtype to float16 (on all hosts), or leave the card out"
            )


def has_code(device: torch.device) -> bool:
    """Whether torch's build has kernels for the card."""
    built = torch.cuda.get_arch_list()
    return bool(torch.version.hip) or _is_built_for(torch.cuda.get_device_capability(device), built)


def _is_built_for(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether code of one of `built` (sm_86, compute_90, …) runs on a card of this compute capability.

    CUDA's rules: machine code on cards of its major number and of no smaller minor one, portable code on later ones,
    code with a letter (sm_90a) on that one alone; torch builds such beside the plain.
    """
    for one in built:
        kind, _, number = one.partition("_")
        if not re.fullmatch(r"\d{2,}", number):
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and capability[0] == major and capability[1] >= minor:
            return True
        if kind == "compute" and capability >= (major, minor):
            return True
    return not built
