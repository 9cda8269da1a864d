"""What a checkpoint's tensors are at its step, in the CPU's memory, while training goes on."""

from collections.abc import Iterator

import torch

from trainer import optim
from trainer.strategies.base import Strategy

OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


class Snapshot:
    """The tensors of the checkpoint that is begun when this is made.

    Where each rank has a part of every tensor it keeps its own, and the writers get whole ones one after the other,
    while they write: nobody ever holds all. Else the writers have whole ones from the start.
    """

    def __init__(self, strategy: Strategy, optimizer, writers: list[int], apart: bool, group):
        """All ranks must call. apart: the tensors share no memory with what is trained; group: parts travel in it."""
        self._strategy, self._optimizer, self._writers, self._group = strategy, optimizer, writers, group
        weights, keys = weights_file(strategy.model)
        self._places = {
            name: [(weights, keys[name]), *((OPTIMIZER, f"{kind}.{name}") for kind in MOMENTS[1:])]
            for name in strategy.trainable
        }
        # By file and key, on the writers; those that come later are on the meta device.
        self.files: dict[str, dict[str, torch.Tensor]] = {weights: {}, OPTIMIZER: {}}
        self._parts: dict[str, list[torch.Tensor]] = {}  # this rank's own of what comes later
        writes = strategy.world.rank in writers
        for name, part in strategy.trainable.items():
            step, own = self._own(name)
            if strategy.in_parts:
                self._parts[name] = [_kept(one, copy=True) for one in own] if apart else []
                strategy.will_send(name, len(own), writers)
                later = torch.empty(strategy.shape(name), dtype=part.dtype, device="meta")
                wholes = [later] * len(self._places[name]) if writes else []
            else:
                pairs = list(zip(strategy.whole(name, own, writers) or (), own, strict=False))
                alike = [whole.data_ptr() == one.data_ptr() for whole, one in pairs]
                if pairs and not apart and all(alike):
                    # They come to the CPU's memory one after the other, as those of parts do.
                    self._parts[name] = []
                    wholes = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one, _ in pairs]
                else:
                    wholes = [
                        _kept(one, copy=apart and same) for (one, _), same in zip(pairs, alike, strict=True)
                    ]
                if strategy.averages:  # of moments in 8 bits or paged ones `own` is a copy
                    optim.restore(optimizer, part, float(step), *own[1:])
            for (file, key), whole in zip(self._places[name], wholes, strict=False):
                self.files[file][key] = whole
            if writes:
                self.files[OPTIMIZER][f"step.{name}"] = step.float().cpu().clone()
        for key, value in strategy.kept():
            if writes:
                self.files[OPTIMIZER][key] = value.cpu().contiguous()
        if writes and weights == "model.safetensors":
            frozen = {name: one for name, one in strategy.model.named_parameters() if not one.requires_grad}
            for name, one in (frozen | buffers(strategy.model)).items():
                self.files[weights][name] = _kept(one, copy=apart)

    def __iter__(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(file, key, tensor) of each, on the writers; all ranks must go through them, once."""
        for file, tensors in self.files.items():
            for key, one in tensors.items():
                if not one.is_meta:
                    yield file, key, one
        for name in list(self._parts):
            parts = self._parts.pop(name) or [_kept(one) for one in self._own(name)[1]]
            wholes = self._strategy.whole(name, parts, self._writers, self._group)
            for (file, key), whole in zip(self._places[name], wholes or (), strict=False):
                yield file, key, whole

    def _own(self, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """How many steps a parameter has taken; this rank's part of it and of its moments."""
        part = self._strategy.trainable[name]
        state = optim.state(self._optimizer, part)
        return state["step"], [part.detach(), *(state[kind] for kind in MOMENTS[1:])]


def _kept(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """It, in the CPU's memory; copy: in memory of its own."""
    return tensor.detach().to("cpu", copy=copy).contiguous()


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a model's file has beside its parameters, by name: a mixture's routing may be part of it."""
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def weights_file(model: torch.nn.Module) -> tuple[str, dict[str, str]]:
    """The name of the file of weights, and the key in it of every trainable parameter."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not hasattr(model, "peft_config"):
        return "model.safetensors", {name: name for name in names}
    from peft import get_peft_model_state_dict

    numbers = {name: torch.tensor(number) for number, name in enumerate(names)}
    kept = get_peft_model_state_dict(model, state_dict=numbers, save_embedding_layers=False)
    return "adapter_model.safetensors", {names[int(number)]: key for key, number in kept.items()}
