"""What lies in a model's directory. No torch here: the controller looks before it brings a model to the hosts."""

from pathlib import Path

from trainer.data.files import expanded
from trainer.errors import BadInput

SHIPPED = ("tiny",)  # names of ours, before the hub's


def weights_of(name: str) -> tuple[str | None, str]:
    """(where the weights of model `name` come from, or None for random ones; the path or hub name of the rest).

    Raises BadInput for what cannot be a path, for a directory that is no model, or whose weights are pickled.
    """
    path = expanded(name, "model: ")
    if path.is_dir():
        check_directory(path, name)
        return (str(path) if _has(path, "*.safetensors", "model.safetensors.index.json") else None), str(path)
    if path.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        kind = "not a directory" if path.exists() else "no such directory"
        raise BadInput(
            f"model: {name}: {kind}; give tiny, a model's directory or a name on the Hugging Face hub"
        )
    return name, name


def check_directory(path: Path, name: str) -> None:
    """Raise BadInput where the directory `path`, called `name` by the user, holds no model that can be loaded."""
    if not (path / "config.json").is_file():
        there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        cure = "export the model with save_pretrained"
        if (path / "adapter_config.json").is_file():
            cure = "this is an adapter: merge it into its model first (trainer export)"
        raise BadInput(
            f"model: {name}: expected a directory in transformers' format with a config.json, found {there}; {cure}"
        )
    pickled = _has(path, "pytorch_model*", "*.ckpt", "*.pt", "*.bin")
    if pickled and not _has(path, "*.safetensors", "model.safetensors.index.json"):
        raise BadInput(
            f"model: {name}: its weights are pickled, which can run code when loaded; "
            "save them as safetensors: model.save_pretrained(directory)"
        )
    if not _has(path, "tokenizer.json"):
        raise BadInput(
            f"model: {name}: no tokenizer.json in it; put the model's own there: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(directory)"
        )


def _has(path: Path, *patterns: str) -> bool:
    return any(next(path.glob(pattern), None) for pattern in patterns)
