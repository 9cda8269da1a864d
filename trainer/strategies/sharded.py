"""Sharded data parallel, on torch's FSDP2: every rank holds a part of each weight, gradient and optimizer moment.

          between steps a rank holds    in a step it holds, beside its part       sent in a step of m micro-batches,
          its part of                                                             in units of all weights
    zero1   weights and moments         all weights, all gradients                1 + 1
    zero2   weights and moments         all weights, one block's gradients        1 + m
    fsdp    weights and moments         one block's weights and gradients         2m + m

(each unit times (n-1)/n, with n ranks, or on CPUs n hosts that have as many each and exchange inside first; ddp sends
2. Where hosts have not, a host on whose CPUs a of the n ranks are sends a(n-a)/n of each unit of gradients). For a
checkpoint each rank sends its part of weights and moments to every host that writes a copy, and for an evaluation
weights are gathered as for a forward pass: both count with the next step.
fsdp is also called zero3. `offload` is fsdp with the parts and the optimizer in the CPU's memory, `infinity` is offload
with the parts of weights and moments in memory-mapped files: of what is there between steps, only gradients are not.

A block is a layer of the transformer; what is outside of the blocks (embeddings, the last norm, the head) is gathered
for the whole of a micro-batch, so that tied weights stay one tensor.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # nothing public says where a part lies
from torch.distributed.tensor import DTensor

from trainer import buffers, waiting
from trainer.config import Config
from trainer.data.files import expanded
from trainer.errors import BadInput, TrainerError
from trainer.model import equal, quantize
from trainer.model.load import frozen_dtype
from trainer.model.lora import without_adapter
from trainer.model.loss import HALF, TokenLoss
from trainer.model.stored import Stored, replace
from trainer.strategies.base import Strategy, clipping
from trainer.sums import reduce_scatter
from trainer.world import Layers, World, log

ALIGNED = 64  # bytes, as torch aligns memory


class Sharded(Strategy):
    """See the module. Subclasses say what is shared beside the optimizer's moments."""

    lockstep = True
    shares_gradients = True  # gradients travel after each micro-batch, not once a step
    shares_weights = True  # weights are given up after each use, and frozen ones are shared too

    def __init__(self, module: TokenLoss, world: World, config: Config):
        self.module, self.world, self.config = module, world, config
        self.mesh = world.mesh()
        self.wire = Wire()
        self._between = False  # whether a step is over, and the next one has not begun
        self._sent = 0  # bytes, in the last step and for what came before it
        self._saved = 0  # of a checkpoint or an evaluation, and not counted by a step yet
        self._stored: Stored | None = getattr(self.model, "stored", None)
        self._shard()
        if self._stored:
            self._read(self._stored)
        self._parameters = dict(self.model.named_parameters())
        sharded = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._sharded: dict[str, DTensor] = sharded
        self.trainable = {name: torch.nn.Parameter(p.detach().to_local()) for name, p in sharded.items()}

    def _shard(self) -> None:
        if self._stored:
            self._read_those_that_stay(self._stored)
        names = {id(p): name for name, p in self.model.named_parameters()}
        frozen = frozen_dtype(self.config)
        half = HALF.get(self.config.dtype)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        # Of what the whole is given, floats are the weights of experts (router.Ask) alone: float32, as with ddp.
        whole = dataclasses.replace(policy, cast_forward_inputs=False)
        inner = blocks(self.model)
        if self.shares_weights and not inner and self.world.first:
            log(
                f"warning: transformers names no layers of model {self.config.model}: with strategy "
                f"{self.config.strategy} each rank gathers all its weights in a step, as with zero2"
            )
        kept: list[torch.Tensor] = []  # of quantised weights what each rank has whole
        for part in (*inner, self.module):
            # A block at a time: of its weights in 4 bits this rank keeps its part alone, before the next is read.
            filled = quantize.fill(part, self._stored, names, frozen, self.world.device)
            kept += [one for weight in filled for one in quantize.kept_whole(weight)]
            del filled
            if self.shares_weights:
                quantize.bared(part)
            ignored = {p for p in part.parameters() if not self._is_shared(p)}
            for parameter in ignored:
                parameter.data = parameter.data.to(self.world.device)
            fully_shard(
                part,
                mesh=self.mesh,
                reshard_after_forward=self.shares_weights and part is not self.module,
                mp_policy=whole if part is self.module else policy,
                offload_policy=self._offload(),
                ignored_params=ignored,
            )
            self._place(part)
        equal.equalise(kept, self.world)  # by its own scales each rank makes the others' parts whole
        layers = _layers(self.world)
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        here = self.world.nodes.count(self.world.nodes[self.world.rank])
        self._comms = Gather(self.wire, layers, here), Scatter(self.wire, layers, here)
        self._talk(*self._comms)
        self.module.set_reduce_scatter_unused_params(True)  # an expert that one rank's tokens did not reach

    def _read(self, stored: Stored) -> None:
        """Give the weights that are still on the meta device memory for this rank's rows, and read these."""
        names = {id(p): name for name, p in self.model.named_parameters() if p.is_meta}

        def filled(tensor):
            name = names.pop(id(tensor), None)  # a tied one is met twice
            if name is None:
                return tensor
            made = self._memory(tensor)
            rows = self._span(len(tensor))
            if rows.start < rows.stop:
                made.to_local().copy_(stored.read(name, rows))
            return made

        self.module._apply(filled)

    @property
    def home(self) -> torch.device:
        """Where a rank's parts are."""
        return self.world.device

    def _place(self, part: FSDPModule) -> None:
        """Have this rank's parts of the weights of a module that was just shared out where they are to be."""

    def _memory(self, weight: DTensor) -> DTensor:
        """One like `weight`, which is on the meta device, with memory for this rank's part."""
        return torch.empty_like(weight, device=self.home)

    def _is_shared(self, parameter: torch.nn.Parameter) -> bool:
        """Whether each rank holds a part; those in 8 bits are whole, and under zero1 and zero2 all frozen ones."""
        whole = quantize.is_quantised(parameter) or self._stays(parameter)
        return parameter.requires_grad or (self.shares_weights and not whole)

    def _stays(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it is one of the few that a model itself freezes, as routers' corrections; or in float32 where the
        computation is in 16 bits, in which FSDP would give it out."""
        if parameter.requires_grad or quantize.is_quantised(parameter):
            return False
        return self.config.adapter == "none" or (
            parameter.dtype == torch.float32 and self.config.dtype in HALF
        )

    def _read_those_that_stay(self, stored: Stored) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}

        def read(one):
            if not (one.is_meta and self._stays(one)):
                return None
            return stored.read(names[id(one)], slice(None)).to(one.dtype)

        replace(self.model, read)

    def _offload(self) -> OffloadPolicy:
        return OffloadPolicy()

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def zero_grad(self) -> None:
        for name, part in self.trainable.items():
            part.grad = self._sharded[name].grad = None
        for part in self._parts():
            part.reshard()  # what an evaluation has left gathered may be older than the weights
        if self._between:  # and not a pass that comes to nothing, nor a step that is tried again
            self._saved += self.wire.bytes
            self._between = False
        self.wire.reset()

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        self.module.set_requires_gradient_sync(last or self.shares_gradients)
        self.module.set_reshard_after_backward(last or self.shares_weights)
        if last and not self.shares_gradients:
            self._fill_in()
        yield

    def _fill_in(self) -> None:
        """Where earlier micro-batches have reached some of what is summed together, have zeros of what they have not.

        FSDP keeps what was reached in the format of the sum, and cannot sum it with what is in 16 bits.
        """
        for part in self._parts():
            for group in part._get_fsdp_state()._fsdp_param_groups:
                ones = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
                if any(one.unsharded_accumulated_grad is not None for one in ones):
                    for one in ones:
                        if one.unsharded_accumulated_grad is None and one._unsharded_param.requires_grad:
                            like = one._unsharded_param
                            one.unsharded_accumulated_grad = torch.zeros_like(like, dtype=one.reduce_dtype)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self._talk(Alone(), Alone())
        try:
            with self.micro_batch(last=True):
                yield
        finally:
            self._talk(*self._comms)

    def _talk(self, gather, scatter) -> None:
        """Have weights gathered and gradients scattered so."""
        for part in self._parts():
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(scatter)

    def abandon(self) -> None:
        self.module.reset_iter_state()
        # torch says that this discards what was summed of gradients, and keeps it on the gathered weights (2.13).
        for part in self._parts():
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    one.unsharded_accumulated_grad = None
                    if hasattr(one, "_unsharded_param"):  # gathered once
                        one._unsharded_param.grad = None
        self.zero_grad()

    def finish(self) -> None:
        for name, sharded in self._sharded.items():
            part = self.trainable[name]
            part.data = sharded.detach().to_local()
            part.grad = torch.zeros_like(part) if sharded.grad is None else sharded.grad.to_local()

    def clip(self, limit: float, scale: float = 1.0) -> float:
        gradients = [part.grad for part in self.trainable.values()]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        square = torch.linalg.vector_norm(norms.double()).square().to(self.world.device)
        square.item()  # its own part is done before it waits for the others'
        norm = self._of_all(lambda: self.sum(square.reshape(1)).sqrt().item()) / scale
        factor = clipping(norm, limit) / scale
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    def stepped(self, tokens: int, last: bool) -> None:
        self._sent, self._saved = self.wire.bytes + self._saved, 0
        self.wire.reset()
        self._between = True

    @property
    def wire_bytes(self) -> int:
        return self._sent if self._between else self.wire.bytes

    @property
    def uncounted_bytes(self) -> int:
        return self._saved + (self.wire.bytes if self._between else 0)

    @property
    def waited_seconds(self) -> float:
        return self.wire.seconds

    def shape(self, name: str) -> torch.Size:
        return self._sharded[name].shape

    def rows(self, name: str) -> slice:
        return self._span(len(self._sharded[name]))

    def _span(self, rows: int) -> slice:
        """This rank's share of so many rows."""
        share = -(-rows // self.world.size)
        first = min(self.world.rank * share, rows)
        return slice(first, min(first + share, rows))

    @property
    def in_parts(self) -> bool:
        return self.world.size > 1

    def whole(
        self, name: str, parts: list[torch.Tensor], ranks: list[int], group=None
    ) -> Sequence[torch.Tensor] | None:
        like, size = self._parameters[name], self.world.size
        if size == 1 or not isinstance(like, DTensor):
            return super().whole(name, parts, ranks)
        share = -(-len(like) // size)
        device = parts[0].device if group else self.world.device
        wholes = []
        for part in parts:
            mine = torch.zeros(share, *like.shape[1:], dtype=part.dtype, device=device)
            mine[: len(part)] = part
            for rank in ranks:
                whole = mine.new_empty(size * share, *like.shape[1:]) if rank == self.world.rank else None
                every = None if whole is None else list(whole.chunk(size))
                with waiting.for_others():
                    dist.gather(mine, every, dst=rank, group=group or self.world.training)
                if whole is not None:
                    wholes.append(whole[: len(like)])
        return wholes or None

    def will_send(self, name: str, count: int, ranks: list[int]) -> None:
        like, world = self._parameters[name], self.world
        if world.size == 1 or not isinstance(like, DTensor):
            return
        part = -(-len(like) // world.size) * math.prod(like.shape[1:]) * self.trainable[name].element_size()
        node = world.nodes[world.rank]
        senders, others = 1, [rank for rank in ranks if rank != world.rank]
        if len(world.firsts) > 1:  # of all this host's ranks, to other hosts
            senders, others = world.nodes.count(node), [rank for rank in ranks if world.nodes[rank] != node]
        self._saved += count * part * senders * len(others)

    def parameters(self, frozen: bool = True) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self._parameters.items() if frozen or one.requires_grad}

    def weights(self, ranks: list[int], frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters(frozen).items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            # Patiently, and on the CPU: the others wait for whoever writes, to a slow disk maybe.
            wholes = self.whole(name, [local.detach().cpu()], ranks, self.world.control)
            if wholes:
                yield name, wholes[0]


class FSDP(Sharded):
    """ZeRO stage 3: all is shared."""


class Zero1(Sharded):
    """ZeRO stage 1: the optimizer's moments are shared."""

    shares_gradients = shares_weights = False


class Zero2(Sharded):
    """ZeRO stage 2: moments and gradients are shared."""

    shares_weights = False


class Offload(Sharded):
    """FSDP with the parts, their gradients and the optimizer in the CPU's memory."""

    @property
    def home(self) -> torch.device:
        return torch.device("cpu")

    def _offload(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")


class Infinity(Offload):
    """Offload with weights and moments in memory-mapped files; the kernel moves their pages to the disk and back.

    A file loses its name as soon as it is mapped, so that nothing is left of it however the process ends. A copy for a
    checkpoint would want the memory that this saves: the step waits until it is written.
    """

    copies = False

    def __init__(self, module: TokenLoss, world: World, config: Config):
        self._places: dict[
            int, tuple[FSDPParam, torch.Tensor]
        ] = {}  # by the id of weights on the meta device
        ones = module.parameters()
        held = sum(one.numel() * (one.itemsize + 8 * one.requires_grad) for one in ones)
        self._needs = held // world.size  # bytes on the disk, about
        super().__init__(module, world, config)
        self._places.clear()

    def _offload(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=False)  # which is memory that no disk can take over

    def _place(self, part: FSDPModule) -> None:
        ones = [one for group in part._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params]
        sizes = [one.padded_sharded_param_size.numel() * one.sharded_param.dtype.itemsize for one in ones]
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        for one, size, piece in zip(ones, sizes, self._mapped(sum(room)).split(room), strict=True):
            place = piece[:size].view(one.sharded_param.dtype)
            if one.sharded_param.is_meta:  # to be read
                self._places[id(one.sharded_param)] = one, place
                continue
            place.copy_(one._sharded_param_data)
            own = one.sharded_param._local_tensor
            one._sharded_param_data = place
            one.sharded_param._local_tensor = place[: own.numel()].view_as(own)

    def _memory(self, weight: DTensor) -> DTensor:
        made = super()._memory(weight)
        one, place = self._places.pop(id(weight))
        own = made._local_tensor
        one._sharded_param_data = place
        made._local_tensor = place[: own.numel()].view_as(own)
        return made

    def _mapped(self, size: int) -> torch.Tensor:
        """Zeros (size,) uint8 in a file of their own where the configuration says."""
        folder = offload_folder(self.config) or self.world.environment.run_dir / "offload"
        return self.world.together(lambda: _mapped(folder, f"rank-{self.world.rank}-", size, self._needs))

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) is not torch.optim.AdamW:
            raise BadInput(
                f"strategy infinity keeps AdamW's moments in files, in 32 bits; set optimizer to adamw, "
                f"found {self.config.optimizer}"
            )
        count = sum(part.numel() for part in self.trainable.values())
        moments = self._mapped(2 * 4 * count).view(torch.float32)
        pieces = iter(moments.split([p.numel() for p in self.trainable.values() for _ in range(2)]))
        for part in self.trainable.values():
            optimizer.state[part] = {
                "step": torch.zeros(()),
                "exp_avg": next(pieces).view_as(part),
                "exp_avg_sq": next(pieces).view_as(part),
            }


def offload_folder(config: Config) -> Path | None:
    """The directory that offload_dir names, where the strategy asks for it; raises BadInput where it cannot be one."""
    if config.strategy != "infinity" or not config.offload_dir:
        return None
    return expanded(config.offload_dir, "offload_dir: ")


def _mapped(folder: Path, prefix: str, size: int, needs: int) -> torch.Tensor:
    """Zeros (size,) uint8 in a file of its own in `folder`, whose name is gone; all of its space is taken now.

    needs: bytes of all such files of this rank, which an error tells.
    """
    if not size:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=prefix) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise TrainerError(
            f"offload_dir: {folder}: {error.strerror}; weights and moments of this rank need {-(-needs >> 20)} MiB "
            "there: free some space, or set offload_dir to a disk that has it"
        ) from None


def _layers(world: World) -> Layers | None:
    """How weights are gathered and gradients scattered inside hosts first; None: over all ranks as one row.

    Over gloo alone: on a card FSDP gathers on one stream and scatters on another, each over the groups within and
    between in the other's reverse order, and NCCL's communicators may then wait for each other. Untried on cards.
    """
    if world.device.type != "cpu" or world.nodes != sorted(world.nodes):
        return None
    layers = world.layers()
    return layers if layers and layers.even else None


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer's layers: the modules that transformers says not to split, the outermost ones.

    But for those of which a weight is another module's, too, as are BERT's embeddings with a head that is tied to them:
    FSDP gathers a weight in one place.
    """
    base = without_adapter(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    at: dict[int, list[str]] = {}
    for name, one in base.named_parameters(remove_duplicate=False):
        at.setdefault(id(one), []).append(name)

    def whole(place: str, part: torch.nn.Module) -> bool:
        return all(name.startswith(f"{place}.") for one in part.parameters() for name in at[id(one)])

    found: dict[str, torch.nn.Module] = {}
    for place, part in base.named_modules():
        within = any(place.startswith(f"{outer}.") for outer in found)  # as Mamba's mixer in its layer
        if type(part).__name__ in names and not within and whole(place, part):
            found[place] = part
    return [*found.values()]


class Wire:
    """What FSDP's collectives have sent since `reset`, in bytes, and on the CPU how long they took."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def __call__(self, whole: torch.Tensor, part: Fraction):
        """Around a collective over `whole`, of which `part` leaves a host, or of one host alone a rank."""
        begin = time.perf_counter()
        yield
        self.bytes += int(whole.nbytes * part)
        if whole.device.type == "cpu":
            self.seconds += time.perf_counter() - begin


class Comm:
    """What FSDP asks for flat tensors to gather into, and to scatter from and into."""

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return buffers.lend(math.prod(size), dtype)


class Counted(Comm):
    """A collective of which it is counted what it sends."""

    def __init__(self, wire: Wire, layers: Layers | None, here: int):
        """layers: of hosts that have as many ranks each, in the ranks' order; None: all ranks by one collective.

        here: ranks of this host.
        """
        self.wire, self.layers, self.here = wire, layers, here

    def ring(self, group) -> Fraction:
        """What leaves a host where each of all ranks, or hosts, sends all but its own part to the next one."""
        among = self.layers.between.size if self.layers else group.size()
        return Fraction(among - 1, among)


class Gather(Counted):
    """FSDP's all-gather, counted: a rank's part crosses the wire once for each host, to the one that hands it on."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        with self.wire(output_tensor, self.ring(group)):
            if self.layers is None:
                return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            within, between = self.layers.within, self.layers.between
            parts = input_tensor.new_empty(between.size, len(input_tensor))  # of this place's ranks
            dist.all_gather_single(parts.view(-1), input_tensor, group=between.group)
            for part, whole in zip(parts, output_tensor.view(between.size, -1), strict=True):
                dist.all_gather_single(whole, part, group=within.group)
            return None


class Scatter(Counted):
    """FSDP's reduce-scatter, counted: inside each host first, as the sums of ddp (trainer/sums.py)."""

    def part(self, group, device: str) -> Fraction:
        """What leaves a host: on CPUs, and in one row, each rank sends its part to each rank of other hosts itself."""
        if self.layers or device != "cpu" or self.here == group.size():
            return self.ring(group)
        return Fraction(self.here * (group.size() - self.here), group.size())

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        with self.wire(input_tensor, self.part(group, input_tensor.device.type)):
            if self.layers is None:
                return reduce_scatter(output_tensor, input_tensor, group, async_op)
            within, between = self.layers.within, self.layers.between
            parts = input_tensor.new_empty(between.size, len(output_tensor))
            for part, whole in zip(parts, input_tensor.view(between.size, -1), strict=True):
                reduce_scatter(part, whole, within.group)
            reduce_scatter(output_tensor, parts.view(-1), between.group)
            return None


class Alone(Comm):
    """What stands in for FSDP's all-gather and reduce-scatter where a rank tries its speed: nothing is sent.

    Its own part of a weight stands in for all others', so that values are sound ones; of a gradient it keeps its part.
    """

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if op is not None:
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
            return
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # where its own part lies already
                part.copy_(input_tensor)
