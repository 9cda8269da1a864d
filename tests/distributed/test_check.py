"""What training refuses of a model, `check` and `plan` refuse before it, in the same words."""

import json
import shutil

import pytest
import ranks

from trainer import cli

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def fewer(material, tmp_path_factory):
    """run.yaml of a model that has no embedding for the last words of its tokenizer, which the data has."""
    return _with_vocabulary(material, tmp_path_factory.mktemp("fewer"), 280)


def _with_vocabulary(material, folder, size):
    shutil.copytree(material / "model", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
    text = (material / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace(f"model: {material}/model", f"model: {folder}/model"))
    return folder / "run.yaml"


def _refused(config, chosen, capsys, said):
    """Both commands end with code 2, and say so."""
    for command in ("check", "plan"):
        assert cli.main([command, str(config), *chosen]) == 2
        assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("chosen", "begins"),
    [
        (["adapter=lora", "lora_targets=nope"], "lora_targets: no layer is named nope"),
        (["adapter=lora", "quantize=4bit", "dtype=bfloat16"], "model: "),
        (["router_aux_loss_coef=0.01"], "router_aux_loss_coef: "),
    ],
)
def test_a_model_that_cannot_be_built_so(material, tmp_path, capsys, chosen, begins):
    one = ranks.Ranks(tmp_path, 1, material / "run.yaml", *chosen)
    assert one.codes() == [2]
    said = one.log().partition("error: ")[2].splitlines()[0]
    assert said.startswith(begins)
    _refused(material / "run.yaml", chosen, capsys, said)


def test_words_that_a_model_has_no_embedding_for(fewer, tmp_path, capsys):
    one = ranks.Ranks(tmp_path, 1, fewer)
    assert one.codes() == [2]
    said = one.log().partition("error: ")[2].splitlines()[0]
    assert said.startswith("the tokenizer gives token id ") and "the model's vocabulary has 280" in said
    _refused(fewer, [], capsys, said)


def test_check_names_all_that_is_wrong_at_once(fewer, capsys):
    assert cli.main(["check", str(fewer), "adapter=lora", "lora_targets=nope"]) == 2
    said = "".join(capsys.readouterr())
    assert "no layer is named nope" in said and "the model's vocabulary has 280" in said


def test_a_word_that_the_data_never_uses_is_no_fault(material, tmp_path, capsys):
    """As padding that was added to a tokenizer, and that the model was never made larger for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    size = len(tokenizer)
    config = _with_vocabulary(material, tmp_path, size)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id == size
    for command in ("check", "plan"):
        assert cli.main([command, str(config)]) == 0, "".join(capsys.readouterr())


PEEKS = """
from transformers import GPT2Config, GPT2LMHeadModel

class PeeksConfig(GPT2Config):
    model_type = "peeks"

class PeeksModel(GPT2LMHeadModel):
    config_class = PeeksConfig

    def __init__(self, config):
        super().__init__(config)
        self.norm = self.transformer.wte.weight.norm().item()
"""


def test_what_a_models_own_code_cannot_do_without_numbers_is_left_to_training(
    material, tmp_path, capsys, monkeypatch
):
    """check has nothing against it; plan, which cannot count, says so, and what to do instead."""
    config = _with_vocabulary(material, tmp_path, 300)
    (tmp_path / "model/peeks.py").write_text(PEEKS)
    path = tmp_path / "model/config.json"
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 96, "vocab_size": 400}
    auto = {"AutoConfig": "peeks.PeeksConfig", "AutoModelForCausalLM": "peeks.PeeksModel"}
    path.write_text(json.dumps({**sizes, "model_type": "peeks", "auto_map": auto}))
    for file in (tmp_path / "model").glob("*.safetensors*"):
        file.unlink()
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    chosen = ["trust_remote_code=true", f"model={tmp_path}/model"]
    assert cli.main(["check", str(config), *chosen]) == 0, capsys.readouterr()
    assert cli.main(["plan", str(config), *chosen]) == 2
    said = "".join(capsys.readouterr())
    assert "cannot be tried without weights" in said and "smoke=true" in said


@pytest.mark.parametrize("long", [False, True])
def test_a_sample_behind_the_first_one_that_training_would_refuse(
    material, tmp_path, capsys, monkeypatch, long
):
    data = tmp_path / "data.jsonl"
    (tmp_path / "cache").mkdir()  # as on a host: what is tokenised here need not be again
    monkeypatch.setenv("TRAINYARD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TRAINYARD_CACHE_DIR", str(tmp_path / "cache"))
    texts = ["the ship sails", "over a calm sea", "nobody knows " * (40 if long else 2)]
    data.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    chosen = [f"dataset={data}", "overlong=refuse", "steps=2"]
    one = ranks.Ranks(tmp_path / "run", 1, material / "run.yaml", *chosen)
    assert one.codes() == [2 if long else 0]
    known = {path.name for path in (tmp_path / "run/cache").iterdir() if path.is_dir()}
    assert cli.main(["check", str(material / "run.yaml"), *chosen]) == (2 if long else 0)
    said = "".join(capsys.readouterr())
    if long:
        refused = one.log().partition("error: ")[2].splitlines()[0]
        assert refused in said and "data.jsonl:3" in said
    else:
        assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == known and known
