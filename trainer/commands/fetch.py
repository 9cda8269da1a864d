"""`trainer fetch`: a model or data set of the Hugging Face hub, once, laid out for all hosts of a cluster.

What comes lies in huggingface_hub's cache, which goes on where it was interrupted, and is linked to `incoming/` of the
state directory under the name of its content, where bring.yml's chain finds it (plugins/modules/bring_host.py).
"""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from trainer import disk
from trainer.errors import BadInput
from trainer.model.files import instead_of_a_model

CREDENTIAL = "hub_token"  # systemd's, if the hub wants to know who asks
CACHE = "cache/hub"
PROGRESS = "cache/fetching"  # how far it is, for whoever waits
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
CODE = ("*.py",)


def main(kind: str, name: str, state_dir: Path, code: bool, cached: bool) -> int:
    """Fetch it, and print {path, directory, bytes, files: [{path, bytes, sha256}], cached}, as JSON.

    kind: model, dataset or validation. Paths are below state_dir. With `cached` the hub is not asked: what this host
    fetched before is taken, and `cached` of what is printed is its commit, else "".
    """
    os.environ["HF_HUB_CACHE"] = str(state_dir / CACHE)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.pop("HF_HUB_OFFLINE", None)
    token = _token()
    if token:
        os.environ["HF_TOKEN"] = token  # of this process alone; hub.py's library reads it there
    progress = state_dir / PROGRESS
    progress.parent.mkdir(parents=True, exist_ok=True)
    if kind == "model":
        folder, files = _model(name, code, progress, cached)
    else:
        folder, files = _dataset(kind, name, progress, cached)
    hashes = {file.relative_to(folder).as_posix(): disk.sha256(file) for file in sorted(files)}
    listing = "".join(f"{below}\0{digest}\n" for below, digest in hashes.items())
    directory = f"{'models' if kind == 'model' else 'data'}/{hashlib.sha256(listing.encode()).hexdigest()}"
    path = f"{directory}/{name.split('@')[0].split(':')[0].replace('/', '--')}"
    answer = []
    for below, digest in hashes.items():
        source = (folder / below).resolve()
        one = {"path": f"{path}/{below}", "bytes": source.stat().st_size, "sha256": digest}
        _lay_out(source, state_dir, one)
        answer.append(one)
    total = sum(one["bytes"] for one in answer)
    found = {"path": path, "directory": directory, "bytes": total, "files": answer}
    print(json.dumps({**found, "cached": folder.name if cached else ""}))  # …/snapshots/COMMIT
    return 0


def _token() -> str:
    """The token that systemd gave this unit, or "" without one."""
    try:
        return Path(os.environ["CREDENTIALS_DIRECTORY"], CREDENTIAL).read_text(encoding="utf-8").strip()
    except (KeyError, FileNotFoundError):
        return ""


def _model(name: str, code: bool, progress: Path, cached: bool = False) -> tuple[Path, list[Path]]:
    from trainer.data import hub

    options = {
        "allow_patterns": [*MODEL_FILES, *(CODE if code else ())],
        "ignore_patterns": list(hub.NOT_OURS),
    }
    try:
        folder = hub.snapshot(name, progress, local_files_only=cached, **options)
    except BadInput:
        raise
    except Exception as error:  # whatever a network and a library may raise
        raise BadInput(f"model: {name}: {_reason(error)}") from None
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not any(path.name == "config.json" for path in files):
        raise BadInput(
            f"model: {name}: the hub's repository has no config.json; it is no model of transformers': "
            + instead_of_a_model(folder)
        )
    if not any(path.parent == folder and path.suffix == ".safetensors" for path in files):
        raise BadInput(
            f"model: {name}: the hub's repository has no weights as safetensors; pickled ones, which can run code when "
            "loaded, are not fetched. Save them so elsewhere "
            "(AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIR), the tokenizer likewise) and give that "
            "directory"
        )
    return folder, files


def _dataset(key: str, name: str, progress: Path, cached: bool) -> tuple[Path, list[Path]]:
    from trainer.data import hub

    files = list(hub.fetch(name, progress, cached, key))
    # Of huggingface_hub's layout: …/snapshots/COMMIT/ and then the repository's own paths.
    folder = next(parent for parent in files[0].parents if parent.parent.name == "snapshots")
    return folder, files


def _reason(error: Exception) -> str:
    """Why nothing came, with the cure."""
    text = " ".join(str(error).split())[:200]
    kind = type(error).__name__
    if kind in ("GatedRepoError", "RepositoryNotFoundError") or "401" in text or "403" in text:
        return (
            f"the hub does not give it to this host: {kind}: {text}. Check the name; where it is gated, accept its "
            "terms on the hub, and put a token into trainer_hub_token (ansible-vault encrypt_string --prompt)"
        )
    return (
        f"it could not be fetched: {kind}: {text}. What has come stays: run train.yml again. Or download it elsewhere "
        "(hf download NAME --local-dir DIR) and give that directory"
    )


def _lay_out(source: Path, state_dir: Path, one: dict) -> None:
    """Link a file to incoming/, unless it has its place already; what has become root's for another place is copied."""
    with contextlib.suppress(OSError):
        if (state_dir / one["path"]).stat().st_size == one["bytes"]:
            return
    target = state_dir / "incoming" / one["path"]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        try:
            os.link(source, target)
        except PermissionError:  # protected_hardlinks: nobody links what is another's
            shutil.copyfile(source, target)
    except OSError as error:
        if disk.is_full(error):
            target.unlink(missing_ok=True)
            raise BadInput(f"{target}: {error.strerror}; free some space there") from None
        raise BadInput(
            f"{target}: {error.strerror}; {source.parent} and it must lie on one file system"
        ) from None
