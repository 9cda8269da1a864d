"""A sum of a flat tensor over all ranks, which goes inside hosts first: what crosses the wire does not grow with them.

A ring of n ranks sends 2 (n-1)/n of a tensor over each host's wire, however many of them a host has. Where all of the h
hosts have several, and as many, the ranks of a host sum, each a slice; those of all hosts that have the same slice sum
it over the wire, with as many streams a host as it has ranks, and cards; and each host gathers the slices: 2 (h-1)/h.
Where hosts have unequal numbers, the first rank of each gets its host's sum, sums with the other first ones, and gives
its host the result: as many bytes, in one stream a host.

All ranks end with the same bits. With one rank a host, and on one host alone, it is a plain all-reduce.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from trainer import buffers
from trainer.ways import BUCKET_BYTES
from trainer.world import Layers, World


class Sum:
    """See the module. All ranks must call, in the same order; `start` and a call are not to be mixed."""

    def __init__(self, world: World, layers: Layers | None):
        """layers: as `World.layers` gives them; None: a plain all-reduce."""
        self.world, self.layers = world, layers
        self._thread = self._stream = None
        if layers and world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device)
        elif layers:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums")

    def __call__(self, flat: torch.Tensor) -> None:
        """`flat` (contiguous, any number type) becomes the sum over ranks, in place."""
        if self.layers is None:
            dist.all_reduce(flat, group=self.world.training)
        else:
            for piece in flat.split(BUCKET_BYTES // flat.element_size()):  # which bounds what is copied
                self._sum(piece)

    def start(self, flat: torch.Tensor):
        """As a call, but it goes on beside what the rank computes until `wait()` of what is returned.

        The sums that were started travel one after the other, in their order.
        """
        if self.layers is None:
            return dist.all_reduce(flat, group=self.world.training, async_op=True)
        if self._thread:
            return _Begun(self._thread.submit(self, flat))
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            self(flat)
        return _Queued(self._stream)

    def sent(self, count: int) -> int:
        """Bytes that cross the wire for a sum of `count`: those that leave this rank's host.

        None where another rank sends for its host. On one host alone, those that a rank sends to the others.
        """
        if self.layers and self.layers.between.rank is None:
            return 0
        among = self.layers.between.size if self.layers else self.world.size
        return 2 * (among - 1) * count // among

    def _sum(self, piece: torch.Tensor) -> None:
        within, between = self.layers.within, self.layers.between
        if self.layers.even:
            part = -(-len(piece) // within.size)
            short = part * within.size - len(piece)
            padded = torch.nn.functional.pad(piece, (0, short)) if short else piece
            mine = piece.new_empty(part)
            reduce_scatter(mine, padded, within.group)
            dist.all_reduce(mine, group=between.group)
            dist.all_gather_into_tensor(padded, mine, group=within.group)
            if short:
                piece.copy_(padded[: len(piece)])
            return
        first = within.ranks[0]
        if within.size > 1:
            dist.reduce(piece, first, group=within.group)
        if between.rank is not None:
            dist.all_reduce(piece, group=between.group)
        if within.size > 1:
            dist.broadcast(piece, first, group=within.group)


class _Begun:
    """A sum in a thread."""

    def __init__(self, future):
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Queued:
    """A sum on a stream of its own."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, async_op=False):
    """`output` (N,) becomes the sum over the group's ranks of this one's part of `whole` (ranks x N,).

    Returns what to wait for where `async_op` holds and the backend is NCCL, else None. gloo's own sends twice what it
    must: it is an all-reduce of which all but one part is thrown away. There each rank gets the others' versions of its
    part and adds them up in the ranks' order.
    """
    if whole.device.type == "cuda":
        return dist.reduce_scatter_single(output=output, input=whole, group=group, async_op=async_op)
    versions = buffers.lend(whole.numel(), whole.dtype)
    exchange(versions, whole, group)
    torch.sum(versions.view(group.size(), -1), dim=0, out=output)
    return None


def exchange(came: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`came` becomes, by rank of the group, what that rank's `parts` has for this one; both (ranks x N,) or (ranks, N).

    gloo's own all-to-all has each rank send to all others at once, so that several streams meet in front of each host,
    and where its link is the limit their packets are lost there and sent again. Here they take turns: in each, a
    rank sends to one other and hears from one other, and every link is used in both directions.
    """
    if parts.device.type == "cuda":
        dist.all_to_all_single(came, parts, group=group)
        return
    size, rank = group.size(), group.rank()
    into, out = came.view(size, -1), parts.view(size, -1)
    into[rank] = out[rank]
    for turn in range(1, size):
        to, of = (rank + turn) % size, (rank - turn) % size
        sent = dist.isend(out[to], group=group, group_dst=to)
        dist.irecv(into[of], group=group, group_src=of).wait()
        sent.wait()
