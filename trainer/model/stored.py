"""Weights that lie in safetensors files, read a rank's rows at a time: no rank ever holds the whole model.

The model is made without memory for its weights (on torch's meta device). Once a strategy has shared it out, each rank
reads the rows that it holds (strategies/sharded.py).
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import safe_open

from trainer.model.files import files_of

SAMPLES, SAMPLE = 16, 1 << 16  # how many places of a file, and bytes of each, its digest is made of
# Experts that are one tensor in the model: what they are on disk, one by one.
EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
COMPUTED = re.compile(r"\.(masked_bias|inv_freq|position_ids)$")  # what files once held, and models compute
ROWS = 1 << 12  # of two tensors, compared at once
Key = tuple[Path, str]  # a file and the tensor's name in it


@dataclass(frozen=True)
class Stored:
    """Where a model's parameters lie, by their names.

    A parameter is one tensor, `((key,),)`; or experts, one after the other along its first dimension, each of one or
    more tensors, which follow each other along the second: `((key, key), (key, key), …)`.

    scales: of a weight that bitsandbytes has packed, what lies beside it, by its name there from the layer's on.
    """

    places: dict[str, tuple[tuple[Key, ...], ...]]
    scales: dict[str, dict[str, Key]] = field(default_factory=dict)

    def read(self, name: str, rows: slice) -> torch.Tensor:
        """Some rows of a parameter, as they are on disk."""
        place = self.places[name]
        if len(place) == 1:
            file, key = place[0][0]
            with safe_open(file, "pt") as opened:
                return opened.get_slice(key)[rows]
        return torch.stack([torch.cat([_tensor(*key) for key in expert]) for expert in place[rows]])

    def scales_of(self, name: str) -> dict[str, torch.Tensor]:
        """What lies beside a packed weight; nothing where it is not packed."""
        return {part: _tensor(*key) for part, key in self.scales.get(name, {}).items()}

    def renamed(self, names: dict[str, str]) -> "Stored":
        """The same under other names: {new: old}."""
        places, scales = (
            {new: there[old] for new, old in names.items() if old in there}
            for there in (self.places, self.scales)
        )
        return Stored(places, scales)

    @property
    def keys(self) -> set[Key]:
        """All of them."""
        packed = {key for parts in self.scales.values() for key in parts.values()}
        return packed.union(*(expert for place in self.places.values() for expert in place))

    def digest(self) -> str:
        """As `digest`, of the files that these lie in."""
        return digest({path for path, _ in self.keys})


def digest(paths: Iterable[Path]) -> str:
    """A hash of the files' headers and sizes and of a sample of their content: other weights give another one."""
    total = hashlib.sha256()
    for path in sorted(paths):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            total.update(f"{path.name} {size} ".encode() + file.read(header))
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE) * number // (SAMPLES - 1))
                total.update(file.read(SAMPLE))
    return total.hexdigest()


def find(directory: Path, model: nn.Module, packed: Collection[nn.Parameter] = ()) -> Stored | None:
    """Where the parameters of `model` lie in the files of `directory`; None where names or shapes differ.

    packed: those that bitsandbytes has packed there, so that they have another shape, and scales. Buffers that are
    there are read at once.
    """
    there, names = _tensors(directory, model), _names(model)
    beside = _beside(there)
    places, scales, bits = {}, {}, {id(one) for one in packed}
    for name, parameter in model.named_parameters():
        shape = None if id(parameter) in bits else list(parameter.shape)
        place = _place(names[id(parameter)], shape, there, model.base_model_prefix)
        if place is None or not _tied(names[id(parameter)], there):
            return None
        places[name] = place
        if shape is None:
            scales[name] = beside.get(place[0][0][1])
            if scales[name] is None:
                return None
    for name, buffer in model.named_buffers():
        if place := _place([name], list(buffer.shape), there, model.base_model_prefix):
            buffer.copy_(_tensor(*place[0][0]))
    model.left_out = _left_out(Stored(places, scales), model, there, names)
    return Stored(places, scales)


def misfits(directory: Path, model: nn.Module) -> tuple[list[str], list[tuple[str, list[int], list[int]]]]:
    """(parameters of `model` that the files of `directory` lack, those of another shape there), as far as names tell.

    Of the latter (name, shape there, shape in the model). What transformers makes of several tensors, as of experts,
    is passed over.
    """
    there, lacking, other = _tensors(directory, model), [], []
    if _converters(model)[0]:
        return [], []
    spare = model._keys_to_ignore_on_load_missing or ()
    for names in _names(model).values():
        shape = list(model.get_parameter(names[0]).shape)
        found = [there[one][1] for one in _spellings(names, model.base_model_prefix) if one in there]
        if not found and not any(re.search(one, name) for one in spare for name in names):
            lacking.append(names[0])
        if found and shape not in found:
            other.append((names[0], found[0], shape))
    return lacking, other


def _left_out(found: Stored, model: nn.Module, there: dict, names: dict[int, list[str]]) -> list[str]:
    """The tensors `there` that the model has no place for; of tied ones one is read."""
    known = {one for several in names.values() for one in _spellings(several, model.base_model_prefix)}
    known |= {name for name, _ in model.named_buffers()}
    known |= {name for name, (key, _) in there.items() if key in found.keys}
    known = {there[name][0] for name in known if name in there}
    spare = model._keys_to_ignore_on_load_unexpected or ()
    left = {name for (_, name), _ in there.values() if not any(re.search(one, name) for one in spare)}
    return sorted(left - {name for _, name in known})


def _tensors(directory: Path, model: nn.Module) -> dict[str, tuple[Key, list[int]]]:
    """The tensors in the files of `directory`, where they lie and their shapes: by their names there and in `model`."""
    there: dict[str, tuple[Key, list[int]]] = {}
    for file in files_of(directory):
        with safe_open(file, "pt") as opened:
            there |= {key: ((file, key), opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    for key, name in _renamed(there, model).items():
        there.setdefault(name, there[key])
    return there


def _names(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, by its id: more than one where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _tied(names: list[str], there: dict) -> bool:
    """Whether what the files have by these names of one parameter is the same; transformers else ties them not."""
    keys = list({there[one][0] for one in names if one in there})
    return all(_equal(keys[0], other) for other in keys[1:])


def _equal(one: Key, other: Key) -> bool:
    with safe_open(one[0], "pt") as here, safe_open(other[0], "pt") as there:
        first, second = here.get_slice(one[1]), there.get_slice(other[1])
        if first.get_shape() != second.get_shape():
            return False
        places = range(0, first.get_shape()[0], ROWS)
        return all(torch.equal(first[n : n + ROWS], second[n : n + ROWS]) for n in places)


def _beside(there: dict) -> dict[str, dict[str, Key]]:
    """What bitsandbytes has put beside each weight that it packed: `weight.absmax` and the like, or `SCB`."""
    found: dict[str, dict[str, Key]] = {}
    for name, (key, _) in there.items():
        layer, dot, part = name.rpartition(".weight.")
        if not dot and name.endswith(".SCB"):
            layer, dot, part = name.rpartition(".")
        if dot:
            found.setdefault(f"{layer}.weight", {})[part] = key
    return found


def _renamed(keys: Collection[str], model: nn.Module) -> dict[str, str]:
    """What transformers calls the tensors of these names when it reads them, as where they lie in a larger model.

    Those that it makes others of, as it does of experts, are left out.
    """
    from transformers.core_model_loading import rename_source_key

    converters, others = _converters(model)
    prefix = model.base_model_prefix
    state = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    found = {key: rename_source_key(key, others, converters, prefix, state) for key in keys}
    return {key: name for key, (name, converter) in found.items() if converter is None and name != key}


def _converters(model: nn.Module) -> tuple[list, list]:
    """(how transformers makes weights of `model` of others on disk, what it renames)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    changes = get_model_conversion_mapping(model)
    kinds = {True: [], False: []}
    for one in changes:
        kinds[isinstance(one, WeightConverter)].append(one)
    return kinds[True], kinds[False]


def _place(
    names: list[str], shape: list[int] | None, there: dict, prefix: str
) -> tuple[tuple[Key, ...], ...] | None:
    """Where a parameter of this shape (None: any), called by one of `names`, lies among the tensors `there`."""
    for name in _spellings(names, prefix):
        if name in there:
            key, found = there[name]
            return ((key,),) if shape in (None, found) else None
        if shape is None:
            continue
        layer, _, part = name.partition(".experts.")
        for pieces in EXPERTS.get(part, ()):
            experts = [[f"{layer}.experts.{n}.{piece}.weight" for piece in pieces] for n in range(shape[0])]
            if all(key in there for expert in experts for key in expert):
                lengths = {sum(there[key][1][0] for key in expert) for expert in experts}
                widths = {there[key][1][1] for expert in experts for key in expert}
                good = len(shape) == 3 and (lengths, widths) == ({shape[1]}, {shape[2]})
                return tuple(tuple(there[key][0] for key in one) for one in experts) if good else None
    return None


def _spellings(names: list[str], prefix: str) -> Iterator[str]:
    """What a parameter may be called on disk: without the prefix of the model around the head, as Mixtral once was."""
    for name in names:
        for one in (name, name.removeprefix(f"{prefix}.")):
            yield one
            yield one.replace(".mlp.", ".block_sparse_moe.")


def _tensor(file: Path, key: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(key)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Parameters of modules that are made in here are on the meta device; buffers, which no file has, are computed."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def replace(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Put `make(parameter)` in each parameter's place, unless it is None; tied ones stay tied."""
    made: dict[
        int, tuple[nn.Parameter, nn.Parameter]
    ] = {}  # the old ones are held, so that no id comes twice
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is None:
                continue
            if id(one) not in made:
                new = make(one)
                made[id(one)] = (
                    one,
                    one if new is None else nn.Parameter(new, requires_grad=one.requires_grad),
                )
            module._parameters[name] = made[id(one)][1]
