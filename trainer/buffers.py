"""Memory on the CPU for what collectives gather and exchange, which is lent again as soon as nobody has it any more.

Such tensors are large and short-lived. From the C library's heap, which keeps what is freed (environment.py), they
would leave holes that smaller and longer-lived ones then break up, so that it grew to twice of what was ever in use;
and to give each back to the kernel costs a third of a step.
"""

import weakref

import numpy
import torch

SMALL = 1 << 20  # bytes of what is not worth it
_free: dict[int, numpy.ndarray] = {}  # by id; threads lend and give back at the same time


def lend(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor (count,) on the CPU, of any values; its memory comes back when the last tensor that has it is gone."""
    size = count * dtype.itemsize
    if size < SMALL:
        return torch.empty(count, dtype=dtype)
    fitting = [block for block in list(_free.values()) if len(block) >= size]
    block = min(fitting, key=len, default=None)
    if block is None or _free.pop(id(block), None) is None:
        block = numpy.empty(size, numpy.uint8)
    # A tensor's memory keeps the array that it was made from, which is not `block` itself.
    view = block[:size]
    weakref.finalize(view, _free.__setitem__, id(block), block).atexit = False
    return torch.from_numpy(view).view(dtype)
