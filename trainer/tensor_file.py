"""A file in the format of safetensors that is written tensor by tensor, so that they need never be in memory together.

The library's own `save_file` wants all of them at once. The format (https://huggingface.co/docs/safetensors): 8 bytes
with the header's length, little-endian, the header in JSON (type, shape and place of each tensor), and the tensors one
after the other, without gaps. The widest types come first, so that each lies at a multiple of its width.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# Bytes that may wait for the disk at once: who syncs next there, as etcd does, waits for all of them.
SETTLE = 64 << 20


class TensorFile:
    """See the module. `with` it, `write` each tensor once, in any order. All raise OSError where a disk does."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]):
        """tensors: what will be written; of these only type and shape matter, they may be on the meta device."""
        header, end, self._places = {"__metadata__": {"format": "pt"}}, 0, {}
        for key in sorted(tensors, key=lambda key: (-tensors[key].itemsize, key)):
            one = tensors[key]
            place = [end, end := end + one.numel() * one.itemsize]
            header[key] = {"dtype": TYPES[one.dtype], "shape": list(one.shape), "data_offsets": place}
            self._places[key] = place
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        self._begin = 8 + len(words)
        self._waiting = 0  # bytes written and not settled
        self._file = open(path, "wb")  # noqa: SIM115 - for as long as this object
        self._file.write(len(words).to_bytes(8, "little") + words)

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Put `tensor`, on the CPU, in its place; it has the type and shape that was told."""
        begin, end = self._places.pop(key)
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        if len(data) != end - begin:
            raise ValueError(f"{key}: {len(data)} bytes, told were {end - begin}")
        self._file.seek(self._begin + begin)
        for first in range(0, len(data), SETTLE):
            piece = data[first : first + SETTLE]
            self._file.write(piece)
            self._waiting += len(piece)
            if self._waiting >= SETTLE:
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._waiting = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, *_) -> None:
        self._file.close()
        if kind is None and self._places:
            raise ValueError(f"not written: {', '.join(self._places)}")
