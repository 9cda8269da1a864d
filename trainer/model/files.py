"""What lies in a model's directory. No torch here: the controller looks before it brings a model to the hosts."""

import json
from collections.abc import Iterable
from pathlib import Path

from trainer.config import UNREADABLE
from trainer.data.files import expanded
from trainer.errors import BadInput

SHIPPED = ("tiny",)  # names of ours, before the hub's
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Other weights, by the end of their names: where these are, nobody means to begin with random ones.
UNREAD = (".safetensors", ".incomplete", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".part", *PICKLED)
POINTER = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000  # bytes; safetensors itself reads no longer one
PACKED = ("I8", "U8", "I32", "U32")  # what quantised weights are kept in, as safetensors calls it; and
NARROW = ("F8", "F4")  # these, with scales beside them
NAMES = "give tiny, a model's directory or a name on the Hugging Face hub"
COPY = "download or copy it again"
POINTS = "is what git has in place of the file; fetch that by: git lfs pull"


def weights_of(name: str) -> tuple[str | None, str]:
    """(where the weights of model `name` come from, or None for random ones; the path or hub name of the rest).

    Raises BadInput for what cannot be a path, or as `check_directory` does.
    """
    path = expanded(name, "model: ")
    if path.is_dir():
        return (str(path) if check_directory(path, name) else None), str(path)
    if path.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        kind = "not a directory" if path.exists() else "no such directory"
        raise BadInput(f"model: {name}: {kind}; {instead_of_a_name(name) or NAMES}")
    if cure := instead_of_a_name(name):
        raise BadInput(f"model: {name}: expected a name on the Hugging Face hub alone; {cure}")
    return name, name


def instead_of_a_name(name: str) -> str:
    """What to give instead of what is an address on the hub, or has a revision, as names of data sets may; else ""."""
    if below := name.partition("huggingface.co/")[2]:
        return f"did you mean {'/'.join(below.split('/')[:2])}?"
    bare, _, revision = name.partition("@")
    if bare.startswith(("/", ".", "~")):  # a path
        return ""
    return (
        f"give the directory of: hf download {bare} --revision {revision} --local-dir DIR" if revision else ""
    )


def check_directory(path: Path, name: str) -> bool:
    """Whether the directory `path`, called `name` to the user, has weights; without any they are to be random.

    Raises BadInput where it holds no model that can be loaded.
    """
    name = f"model: {name}"
    if not (path / "config.json").is_file():
        there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        raise BadInput(
            f"{name}: expected a directory in transformers' format with a config.json, found {there}; "
            f"{instead_of_a_model(path)}"
        )
    found, problems = [], []
    try:
        found = weights(path, name)
    except BadInput as error:
        problems.append(str(error))
    problems += [
        f"{name}: {one} {POINTS}" for one in ("config.json", "tokenizer.json") if _is_pointer(path / one)
    ]
    if found and (path / "adapter_config.json").is_file():
        problems.append(
            f"{name}: found a whole model and an adapter in one directory; expected the model alone: keep "
            "adapter_config.json and its weights in another, and if they are not merged into the model yet, do that "
            "first (trainer export --merge)"
        )
    if not (path / "tokenizer.json").is_file():
        problems.append(
            f"{name}: no tokenizer.json in it; put the model's own there: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(directory)"
        )
    if problems:
        raise BadInput("\n".join(problems))
    return bool(found)


def weights(path: Path, name: str) -> list[Path]:
    """The files of a model's weights in its directory `path`, called `name` to the user; none where it has no weights.

    Raises BadInput for weights that are incomplete, damaged or of a kind that is not read.
    """
    found = files_of(path, name)
    if not found:
        _refuse_others(path, name)
    tensors = {}
    for file in found:
        tensors |= header(file, name)
    _check_packed(path, name, tensors)
    return found


def files_of(path: Path, name: str = "") -> list[Path]:
    """The files that the weights in the directory `path` are said to be in; none where nothing is said."""
    whole, index = path / SINGLE, path / INDEX
    if whole.is_symlink() or whole.is_file() or not index.is_file():  # transformers, too, looks for it first
        return [whole] if whole.is_symlink() or whole.is_file() else []
    try:
        found = sorted({path / one for one in json.loads(index.read_bytes())["weight_map"].values()})
    except (TypeError, *UNREADABLE):
        found = []
    if not found:
        raise BadInput(
            f"{name or path}: {INDEX} {POINTS if _is_pointer(index) else f'is no list of the files of weights; {COPY}'}"
        )
    return found


def _is_pointer(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def instead_of_a_model(path: Path) -> str:
    """What to do about a directory without a config.json."""
    if (path / "config.json").is_symlink():
        return (
            f"config.json is a link to what is not there: {COPY}, with what links lead to (cp -rL, rsync -L)"
        )
    if (path / "adapter_config.json").is_file():
        return "this is an adapter: merge it into its model first (trainer export --merge)"
    if below := models_below(path):
        return f"did you mean {below[0]}?"
    if any(path.glob("*.gguf")):
        return "GGUF is for inference: give the model that it was made of"
    if (path / "params.json").is_file():
        return "this is its maker's own format: give what is published in that of transformers, or convert it"
    return "export the model with save_pretrained"


def models_below(path: Path, names: Iterable[str] = ("config.json",)) -> list[Path]:
    """The directories that hold one of the files `names` within `path`, or in its snapshots, as in the hub's cache."""
    found = (path.glob(f"{below}/{name}") for name in names for below in ("*", "snapshots/*"))
    return [file.parent for files in found for file in sorted(files)]


def _refuse_others(path: Path, name: str) -> None:
    """Raise BadInput where there are weights, or some half of them, that are not read: none are to be random then."""
    if (path / "adapter_config.json").is_file():
        raise BadInput(
            f"{name}: found an adapter and no weights of a model; merge it into its model first "
            "(trainer export --merge)"
        )
    cached = path.parent.parent / "blobs" if path.parent.name == "snapshots" else None
    there = [
        file
        for place in (path, cached)
        if place and place.is_dir()
        for file in sorted(place.rglob("*"))
        if file.name.endswith(UNREAD)
    ]
    if not there:
        return
    pickled = [file for file in there if file.parent == path and file.name.endswith(PICKLED)]
    if pickled:
        raise BadInput(
            f"{name}: its weights are pickled, which can run code when loaded (found {pickled[0].name}); "
            "save them as safetensors: model.save_pretrained(directory)"
        )
    first = there[0].relative_to(path if there[0].is_relative_to(path) else cached)
    cure = "give the model in transformers' format (save_pretrained)"
    if any(file.name.endswith((".incomplete", ".part")) for file in there):
        cure = "it is half downloaded: go on with that"
    elif any("-of-0" in file.name for file in there):
        cure = f"a model in parts needs {INDEX}, too: {COPY}"
    raise BadInput(
        f"{name}: expected its weights as {SINGLE} or {INDEX}, found {first}; {cure}. Without any weights in it they "
        "would be random"
    )


def header(file: Path, name: str) -> dict[str, dict]:
    """What a safetensors file says of its tensors, by their names. Raises BadInput where it is none, or not whole."""
    where = f"{name}: {file.name}"
    if not file.is_file():
        link = ", a link to what is not there" if file.is_symlink() else ""
        raise BadInput(f"{where}: expected a file of the model's weights, found none{link}; {COPY}")
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if POINTER.startswith(first) and _is_pointer(file):
            raise BadInput(f"{where} {POINTS}")
        text = opened.read(length) if len(first) == 8 and length <= min(size, LONGEST_HEADER) else b""
    try:
        told = json.loads(text)
        told.pop("__metadata__", None)
        whole = 8 + length + max((one["data_offsets"][1] for one in told.values()), default=0)
    except (TypeError, *UNREADABLE):
        raise BadInput(
            f"{where}: expected safetensors, found {size:,} bytes that begin otherwise; {COPY}"
        ) from None
    if size != whole:
        raise BadInput(f"{where}: expected {whole:,} bytes by its header, found {size:,}; {COPY}")
    return told


def quantised_by(told: dict) -> str:
    """Who quantised a model's weights, by its config.json's quantization_config; "" where that does not say."""
    if by := told.get("quant_method"):
        return str(getattr(by, "value", by))
    return "bitsandbytes" if told.get("load_in_4bit") or told.get("load_in_8bit") else ""  # silent until 2023


def _check_packed(path: Path, name: str, tensors: dict[str, dict]) -> None:
    """Raise BadInput for quantised weights of which config.json says nothing, for they would be taken as they are.

    And for whole ones where it says that bitsandbytes has packed them.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
        told = config.get("quantization_config") or (config.get("text_config") or {}).get(
            "quantization_config"
        )
    except (OSError, *UNREADABLE):
        return  # transformers will say it
    by_bitsandbytes = isinstance(told, dict) and "bitsandbytes" in quantised_by(told)
    if by_bitsandbytes and tensors and not any(one.endswith((".absmax", ".SCB")) for one in tensors):
        raise BadInput(
            f"{name}: config.json says that bitsandbytes has quantised the weights, and they are whole; remove its "
            "quantization_config"
        )
    if told is not None:
        return
    scaled = {one.rpartition(".")[0] for one in tensors if "scale" in one.rpartition(".")[2]}
    for key, one in tensors.items():
        layer, _, part = key.rpartition(".")
        kind = str(one.get("dtype"))
        packed = kind in PACKED or (layer in scaled and kind.startswith(NARROW))
        if part in ("qweight", "weight_packed") or (part == "weight" and packed):
            raise BadInput(
                f"{name}: {key} is quantised ({kind}), and config.json has no quantization_config that says "
                "how; give the model with whole weights"
            )
