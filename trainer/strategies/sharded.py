"""Sharded data parallel, on torch's FSDP2: every rank holds a part of each weight, gradient and optimizer moment.

          between steps a rank holds    in a step it holds, beside its part       sent in a step of m micro-batches,
          its part of                                                             in units of all weights
    zero1   weights and moments         all weights, all gradients                1 + 1
    zero2   weights and moments         all weights, one block's gradients        1 + m
    fsdp    weights and moments         one block's weights and gradients         2m + m

(each unit times (n-1)/n; ddp sends 2). fsdp is also called zero3. `offload` is fsdp with the parts and the optimizer in
the CPU's memory, `infinity` is offload with the optimizer's moments in memory-mapped files.

A block is a layer of the transformer; what is outside of the blocks (embeddings, the last norm, the head) is gathered
for the whole of a micro-batch, so that tied weights stay one tensor.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from torch.distributed.tensor import DTensor

from trainer.config import Config
from trainer.errors import BadInput, TrainerError
from trainer.model.lora import without_adapter
from trainer.model.loss import HALF, TokenLoss
from trainer.model.stored import Stored
from trainer.strategies.base import Strategy, clipping
from trainer.world import World


class Sharded(Strategy):
    """See the module. Subclasses say what is shared beside the optimizer's moments."""

    lockstep = True
    shares_gradients = True  # gradients travel after each micro-batch, not once a step
    shares_weights = True  # weights are given up after each use, and frozen ones are shared too

    def __init__(self, module: TokenLoss, world: World, config: Config):
        self.module, self.world, self.config = module, world, config
        self.mesh = world.mesh()
        self.wire = Wire()
        self._shard()
        if stored := getattr(self.model, "stored", None):
            self._read(stored)
        self._parameters = dict(self.model.named_parameters())
        sharded = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._sharded: dict[str, DTensor] = sharded
        self.trainable = {name: torch.nn.Parameter(p.detach().to_local()) for name, p in sharded.items()}

    def _shard(self) -> None:
        ignored = {p for p in self.module.parameters() if not self._is_shared(p)}
        for parameter in ignored:
            parameter.data = parameter.data.to(self.world.device)
        half = HALF.get(self.config.dtype)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        for part in (*blocks(self.model), self.module):
            fully_shard(
                part,
                mesh=self.mesh,
                reshard_after_forward=self.shares_weights and part is not self.module,
                mp_policy=policy,
                offload_policy=self._offload(),
                ignored_params=ignored,
            )
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(Gather(self.wire))
            part.set_custom_reduce_scatter(Scatter(self.wire))
        self.module.set_reduce_scatter_unused_params(True)  # an expert that one rank's tokens did not reach

    def _read(self, stored: Stored) -> None:
        """Give the weights that are still on the meta device memory for this rank's rows, and read these."""
        names = {id(p): name for name, p in self.model.named_parameters() if p.is_meta}

        def filled(tensor):
            name = names.pop(id(tensor), None)  # a tied one is met twice
            if name is None:
                return tensor
            made = torch.empty_like(tensor, device=self.home)
            rows = self._span(len(tensor))
            if rows.start < rows.stop:
                made.to_local().copy_(stored.read(name, rows))
            return made

        self.module._apply(filled)

    @property
    def home(self) -> torch.device:
        """Where a rank's parts are."""
        return self.world.device

    def _is_shared(self, parameter: torch.nn.Parameter) -> bool:
        """Whether each rank holds a part; quantised ones are whole, and under zero1 and zero2 all frozen ones."""
        quantised = hasattr(parameter, "quant_state") or not parameter.is_floating_point()
        return parameter.requires_grad or (self.shares_weights and not quantised)

    def _offload(self) -> OffloadPolicy:
        return OffloadPolicy()

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def zero_grad(self) -> None:
        for name, part in self.trainable.items():
            part.grad = self._sharded[name].grad = None
        for part in self._parts():
            part.reshard()  # what an evaluation has left gathered may be older than the weights
        self.wire.reset()

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        self.module.set_requires_gradient_sync(last or self.shares_gradients)
        self.module.set_reshard_after_backward(last or self.shares_weights)
        yield

    def finish(self) -> None:
        for name, sharded in self._sharded.items():
            part = self.trainable[name]
            part.data = sharded.detach().to_local()
            part.grad = torch.zeros_like(part) if sharded.grad is None else sharded.grad.to_local()

    def clip(self, limit: float, scale: float = 1.0) -> float:
        gradients = [part.grad for part in self.trainable.values()]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        square = torch.linalg.vector_norm(norms.double()).square().to(self.world.device)
        norm = self.sum(square.reshape(1)).sqrt().item() / scale
        factor = clipping(norm, limit) / scale
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    @property
    def wire_bytes(self) -> int:
        return self.wire.bytes

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

    def whole(self, name: str, parts: list[torch.Tensor], ranks: list[int]) -> Sequence[torch.Tensor] | None:
        like, size = self._parameters[name], self.world.size
        if size == 1 or not isinstance(like, DTensor):
            return super().whole(name, parts, ranks)
        share = -(-len(like) // size)
        mine = parts[0].new_zeros(len(parts), share, *like.shape[1:], device=self.world.device)
        mine[:, : len(parts[0])] = torch.stack(parts)
        wholes = None
        for rank in ranks:
            every = [torch.empty_like(mine) for _ in range(size)] if rank == self.world.rank else None
            dist.gather(mine, every, dst=rank, group=self.world.training)
            if every:
                wholes = torch.cat(every, dim=1)[:, : len(like)].unbind()
        return wholes

    def weights(self, ranks: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            wholes = self.whole(name, [local.detach()], ranks)
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
    """Offload with AdamW's moments in a memory-mapped file; the kernel moves its pages between memory and disk.

    The file loses its name as soon as it is mapped, so that nothing is left of it however the process ends.
    """

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) is not torch.optim.AdamW:
            raise BadInput(
                f"strategy infinity keeps AdamW's moments in files, in 32 bits; set optimizer to adamw, "
                f"found {self.config.optimizer}"
            )
        default = self.world.environment.run_dir / "offload"
        folder = Path(self.config.offload_dir).expanduser() if self.config.offload_dir else default
        count = sum(part.numel() for part in self.trainable.values())
        moments = self.world.together(lambda: _mapped(folder, f"rank-{self.world.rank}-", 2 * count))
        pieces = iter(moments.split([p.numel() for p in self.trainable.values() for _ in range(2)]))
        for part in self.trainable.values():
            optimizer.state[part] = {
                "step": torch.zeros(()),
                "exp_avg": next(pieces).view_as(part),
                "exp_avg_sq": next(pieces).view_as(part),
            }


def _mapped(folder: Path, prefix: str, count: int) -> torch.Tensor:
    """Zeros (count,) float32 in a file of its own in `folder`, whose name is gone; all of its space is taken now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=prefix) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * count)
            return torch.from_file(file.name, shared=True, size=count)
    except OSError as error:
        raise TrainerError(
            f"offload_dir: {folder}: {error.strerror}; this rank's moments need {4 * count >> 20} MiB there: "
            "free some space, or set offload_dir to a disk that has it"
        ) from None


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer's layers: the modules that transformers says not to split."""
    base = without_adapter(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [part for part in base.modules() if type(part).__name__ in names]


class Wire:
    """What FSDP's collectives have sent since `reset`, in bytes a rank, and on the CPU how long they took."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def __call__(self, whole: torch.Tensor, group):
        """Around a collective over `whole`, of which each rank sends all but its own part."""
        begin = time.perf_counter()
        yield
        self.bytes += whole.nbytes * (group.size() - 1) // group.size()
        if whole.device.type == "cpu":
            self.seconds += time.perf_counter() - begin


class Gather:
    """FSDP's all-gather, counted."""

    def __init__(self, wire: Wire):
        self.wire = wire

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        with self.wire(output_tensor, group):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter:
    """FSDP's reduce-scatter, counted.

    gloo's own sends twice what it must: it is an all-reduce of which all but one part is thrown away. Here each rank
    gets the others' versions of its part and adds them up in the ranks' order.
    """

    def __init__(self, wire: Wire):
        self.wire = wire

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        with self.wire(input_tensor, group):
            if input_tensor.device.type == "cuda":
                return dist.reduce_scatter_single(
                    output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
                )
            versions = torch.empty_like(input_tensor)
            dist.all_to_all_single(versions, input_tensor, group=group)
            torch.sum(versions.view(group.size(), -1), dim=0, out=output_tensor)
