"""A model's directory as it is found, and where weights come from."""

import pytest
from small_models import LFS, lay, packed

from trainer.errors import BadInput
from trainer.model import files, saved

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}"}


WHOLE = MODEL | {"model.safetensors": packed("a.weight")}


INDEX = {
    "model.safetensors.index.json": b'{"weight_map": {"a.weight": "m-1.safetensors", "b": "m-2.safetensors"}}'
}


PARTS = MODEL | INDEX | {"m-1.safetensors": packed("a.weight"), "m-2.safetensors": packed("b")}


NF4, GPTQ = (
    {"config.json": b'{"quantization_config": {"quant_method": "%s"}}' % by}
    for by in (b"bitsandbytes", b"gptq")
)


FLOAT8 = packed("a.weight", "a.weight_scale_inv", dtype="F8_E4M3")


# What lies in a directory, as it is found in downloads, caches and others' output, and what is said of it; None: good.
DIRECTORIES = {
    "nothing": ({}, "config.json, found nothing; export the model"),
    "an adapter": ({"adapter_config.json": b"{}"}, "this is an adapter: merge it"),
    "an adapter with its model's configuration": (
        MODEL | {"adapter_config.json": b"{}"},
        "an adapter and no weights",
    ),
    "a model and an adapter": (
        WHOLE | {"adapter_config.json": b"{}"},
        "a whole model and an adapter in one directory",
    ),
    "pickled": (MODEL | {"pytorch_model.bin": b""}, r"its weights are pickled, .*found pytorch_model\.bin"),
    "no tokenizer": ({"config.json": b"{}", "model.safetensors": packed()}, "no tokenizer.json"),
    "pickled and no tokenizer": ({"config.json": b"{}", "a.pth": b""}, "(?s)pickled.*no tokenizer.json"),
    "a model's cache": ({"snapshots/0a1b/config.json": b"{}"}, "did you mean .*/snapshots/0a1b?"),
    "a directory too high": ({"checkpoint-9/config.json": b"{}"}, "did you mean .*/checkpoint-9?"),
    "GGUF": ({"a.Q4_K_M.gguf": b"GGUF"}, "GGUF is for inference"),
    "Llama's own format": (
        {"params.json": b"{}", "consolidated.00.pth": b""},
        "this is its maker's own format",
    ),
    "half a download": (
        MODEL | {"model.safetensors.incomplete": b""},
        "it is half downloaded: go on with that",
    ),
    "half a download of hf": (
        MODEL | {".cache/huggingface/download/a.1.incomplete": b""},
        "it is half downloaded",
    ),
    "GGUF with a configuration": (
        MODEL | {"a.gguf": b"GGUF"},
        "expected its weights as model.safetensors or .*, found a.gg",
    ),
    "TensorFlow's": (MODEL | {"tf_model.h5": b""}, "found tf_model.h5"),
    "Flax's": (MODEL | {"flax_model.msgpack": b""}, "found flax_model.msgpack"),
    "ONNX": (MODEL | {"onnx/model.onnx": b""}, "found onnx/model.onnx"),
    "Mistral's own": (MODEL | {"consolidated.safetensors": packed("a")}, "found consolidated.safetensors"),
    "a variant": (MODEL | {"model.fp16.safetensors": packed("a")}, "found model.fp16.safetensors"),
    "Llama's own beside it": (
        MODEL | {"original/consolidated.00.pth": b""},
        "found original/consolidated.00.pth",
    ),
    "no index": (
        MODEL | {"model-00001-of-00002.safetensors": packed("a")},
        "a model in parts needs model.safetensors.index",
    ),
    "a part less": (
        {**PARTS, "m-2.safetensors": None},
        "m-2.safetensors: expected a file of the model's weights, found none",
    ),
    "a part cut off": (
        PARTS | {"m-2.safetensors": packed("b", cut=1)},
        r"m-2\.safetensors: expected 107 bytes by its header, found 106",
    ),
    "no bytes": (
        MODEL | {"model.safetensors": b""},
        "expected safetensors, found 0 bytes that begin otherwise",
    ),
    "a page of the web": (
        MODEL | {"model.safetensors": b"<!DOCTYPE html>" * 9},
        "expected safetensors, found 135 bytes",
    ),
    "git's pointer": (
        MODEL | {"model.safetensors": LFS},
        "model.safetensors is what git has in place of the file; .*git lfs",
    ),
    "git's pointer to the index": (
        MODEL | {"model.safetensors.index.json": LFS},
        "index.json is what git has in place",
    ),
    "git's pointer to the tokenizer": (
        WHOLE | {"tokenizer.json": LFS},
        "tokenizer.json is what git has in place",
    ),
    "an index of nothing": (
        MODEL | {"model.safetensors.index.json": b"{}"},
        "index.json is no list of the files",
    ),
    "an index of no weights": (
        MODEL | {"model.safetensors.index.json": b'{"weight_map": {}}'},
        "index.json is no list of the files",
    ),
    "an index that is too deep": (
        MODEL | {"model.safetensors.index.json": b"[" * 200_000},
        "index.json is no list of the files",
    ),
    "a header that is too deep": (
        MODEL | {"model.safetensors": (200_000).to_bytes(8, "little") + b"[" * 200_000},
        "expected safetensors, found 200,008 bytes that begin otherwise",
    ),
    "a configuration that is too deep": (
        WHOLE | {"config.json": b"[" * 200_000},
        None,
    ),  # transformers says it
    "GPTQ's weights": (
        MODEL | {"model.safetensors": packed("a.qweight", dtype="I32")},
        "a.qweight is quantised .I32",
    ),
    "integers": (
        MODEL | {"model.safetensors": packed("a.weight", dtype="I8")},
        "a.weight is quantised .I8., and config",
    ),
    "float8 with scales": (
        MODEL | {"model.safetensors": FLOAT8},
        "a.weight is quantised .F8_E4M3., and config.json has no",
    ),
    "whole, and said to be packed": (
        WHOLE | NF4,
        "bitsandbytes has quantised the weights, and they are whole; remove",
    ),
    "whole, and said to be packed, as of old": (
        WHOLE | {"config.json": b'{"quantization_config": {"load_in_8bit": true}}'},
        "bitsandbytes has quantised the weights, and they are whole",
    ),
    "packed by bitsandbytes": (
        MODEL | NF4 | {"model.safetensors": packed("a.weight.absmax", "a.weight", dtype="U8")},
        None,
    ),
    "what GPTQ is said to have made": (
        MODEL | GPTQ | {"model.safetensors": packed("a.qweight", dtype="I32")},
        None,
    ),
    "float8 without scales": (MODEL | {"model.safetensors": packed("a.weight", dtype="F8_E4M3")}, None),
    "a mask of bytes": (MODEL | {"model.safetensors": packed("h.0.attn.bias", dtype="U8")}, None),
    "in parts": (PARTS, None),
    "others beside it": (
        WHOLE | {"pytorch_model.bin": b"", "consolidated.safetensors": b"", "a.gguf": b""},
        None,
    ),
    "HF Trainer's": (WHOLE | {"training_args.bin": b"", "optimizer.pt": b"", "rng_state.pth": b""}, None),
}


@pytest.mark.parametrize("what", DIRECTORIES)
def test_directories_as_they_are_found(tmp_path, what):
    contents, message = DIRECTORIES[what]
    lay(tmp_path, contents)
    if message is None:
        assert files.weights_of(str(tmp_path)) == (str(tmp_path), str(tmp_path))
        return
    with pytest.raises(BadInput, match=message) as refused:
        files.weights_of(str(tmp_path))
    assert str(refused.value).startswith(f"model: {tmp_path}: ")


def test_a_model_in_the_hubs_cache(tmp_path):
    """Its files are links to where their contents lie; a copy of the links alone is none."""
    folder = tmp_path / "snapshots/0a1b"
    folder.mkdir(parents=True)
    for name, content in WHOLE.items():
        lay(tmp_path, {f"blobs/{name}": content})
        (folder / name).symlink_to(f"../../blobs/{name}")
    assert files.weights_of(str(folder))[0] == str(folder)
    (tmp_path / "blobs/model.safetensors").rename(tmp_path / "blobs/0123.incomplete")
    with pytest.raises(
        BadInput, match=r"model.safetensors: expected a file .*, found none, a link to what is not there"
    ):
        files.weights_of(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"found 0123\.incomplete; it is half downloaded"):
        files.weights_of(str(folder))
    (tmp_path / "blobs/config.json").unlink()
    with pytest.raises(
        BadInput, match=r"config.json is a link to what is not there: download or copy it again, with what"
    ):
        files.weights_of(str(folder))


def test_where_weights_come_from(tmp_path):
    lay(tmp_path, MODEL)
    assert files.weights_of(str(tmp_path)) == (None, str(tmp_path))  # random weights
    lay(tmp_path, WHOLE)
    assert files.weights_of(str(tmp_path)) == (str(tmp_path), str(tmp_path))
    assert files.weights_of("org/model") == ("org/model", "org/model")
    for wrong in ("a/b/c", "/no/such", str(tmp_path / "config.json")):
        with pytest.raises(BadInput, match="directory"):
            files.weights_of(wrong)
    with pytest.raises(
        BadInput, match=r"alone; give the directory of: hf download org/a --revision v2 --local-dir DIR"
    ):
        files.weights_of("org/a@v2")
    with pytest.raises(BadInput, match="no such directory; give tiny, a model's directory"):
        files.weights_of("/models/a@v2")  # which is no name
    with pytest.raises(BadInput, match=r"did you mean org/a\?"):
        files.weights_of("https://huggingface.co/org/a/tree/main")


def test_others_output_directory_is_told_by_what_is_in_it(tmp_path):
    lay(tmp_path, {"checkpoint-9/adapter_config.json": b"{}"})
    with pytest.raises(BadInput, match=r"nor a run .*; did you mean .*/checkpoint-9\?"):
        saved.find(tmp_path)
    with pytest.raises(BadInput, match=r"adapter_config.json: not a directory"):
        saved.find(tmp_path / "checkpoint-9/adapter_config.json")
    lay(tmp_path, MODEL)
    with pytest.raises(BadInput, match=r"found no weights in it; expected model.safetensors"):
        saved.open_model(saved.find(tmp_path))


def test_of_a_run_that_goes_on_the_newest_checkpoint_is_taken(tmp_path, monkeypatch):
    """Until it ends again its model is of the step at which it had ended."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"steps": 200}')
    monkeypatch.setattr(saved.checkpoint, "validate", lambda path: {"step": int(path.name[5:])})
    for step, chosen in ((200, "model"), (250, "step-00000250")):
        place = tmp_path / f"checkpoints/step-{step:08d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
        assert saved.find(tmp_path).path.name == chosen
