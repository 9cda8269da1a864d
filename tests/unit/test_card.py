"""The model card: what the hub reads, and whether its way to load the model is one."""

import json
import re

import pytest
import yaml

from trainer.model import card

ADAPTER = {"r": 8, "lora_alpha": 16}


def written(folder, settings, adapter=None):
    card.write(folder, {"settings": settings}, adapter)
    text = (folder / "README.md").read_text()
    return yaml.safe_load(text.split("---")[1]), text


@pytest.mark.parametrize("template", [False, True])
def test_a_chat_template_is_told_where_there_is_one(tmp_path, template):
    if template:
        (tmp_path / "chat_template.jinja").touch()
    _, text = written(tmp_path, {"model": "org/name", "data_format": "auto"})
    assert ("chat template" in text) is template


def test_a_directory_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert written(tmp_path, {"model": "models/llama"})[0]["base_model"] == "models/llama"
    (tmp_path / "models/llama").mkdir(parents=True)
    assert "base_model" not in written(tmp_path, {"model": "models/llama"})[0]


def test_what_was_brought_has_the_name_that_it_has_elsewhere(tmp_path):
    """On the hosts a run's model and data lie at places that are named by their content."""
    place = "/var/lib/trainyard/{}/0a/{}"
    model, data = place.format("models", "org--name"), place.format("data", "a.jsonl")
    held_out = place.format("data", "b.jsonl")
    settings = {"model": model, "dataset": f"{data},austen", "validation": held_out, "validation_split": None}
    settings["origins"] = json.dumps({model: "org/name", data: "org/set@main:a.jsonl", held_out: "~/b.jsonl"})
    head, text = written(tmp_path, settings, ADAPTER)
    assert head["base_model"] == "org/name" and 'from_pretrained("org/name")' in text
    assert "training: `org/set@main:a.jsonl,austen`" in text and "held out: `~/b.jsonl`" in text
    assert "/var/lib/trainyard" not in text and "origins" not in text
    for damaged in ("{", "[1]", 7, None):
        assert f"`{model}`" in written(tmp_path, {**settings, "origins": damaged})[1]


@pytest.mark.parametrize(
    ("packing", "words"), [({}, "of 64"), ({"packing": False}, "of one document each, .* of up to 64 tokens")]
)
def test_what_a_sequence_was_is_told(tmp_path, packing, words):
    facts = {"dataset_tokens": 500, "sequences": 9, "settings": {"sequence_length": 64, **packing}}
    card.write(tmp_path, facts, None)
    assert re.search(f"500 tokens in 9 sequences {words}\n", (tmp_path / "README.md").read_text())


def test_beside_random_weights_nobody_is_told_to_load_them(tmp_path):
    head, text = written(tmp_path, {"model": "tiny"}, ADAPTER)
    assert head["library_name"] == "peft" and "from_pretrained" not in text and "--merge" in text
    assert 'from_pretrained("org/name")' in written(tmp_path, {"model": "org/name"}, ADAPTER)[1]
    assert 'from_pretrained(".")' in written(tmp_path, {"model": "tiny"})[1]
