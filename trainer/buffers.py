"""Memory on the CPU for what collectives gather and exchange, which is lent again as soon as nobody has it any more.

Such tensors are large and short-lived. From the C library's heap, which keeps what is freed (environment.py), they
would leave holes that smaller and longer-lived ones then break up, so that it grew to twice of what was ever in use;
and to give each back to the kernel costs a third of a step.
"""

import weakref

import numpy
import torch

_free: list[numpy.ndarray] = []


def lend(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor (count,) on the CPU, of any values; its memory comes back when the last tensor that has it is gone."""
    size = count * dtype.itemsize
    fitting = [block for block in _free if len(block) >= size]
    block = min(fitting, key=len, default=None)
    if block is None:
        block = numpy.empty(size, numpy.uint8)
    else:
        _free[:] = [one for one in _free if one is not block]
    # A tensor's memory keeps the array that it was made from, which is not `block` itself.
    view = block[:size]
    weakref.finalize(view, _free.append, block).atexit = False
    return torch.from_numpy(view).view(dtype)
