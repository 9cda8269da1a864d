"""A model or an attention that does not keep a packed sequence's documents apart is refused, by every command."""

import shutil

import pytest
import ranks
import torch

from trainer import cli


def _run_yaml(material, folder, model_config):
    """run.yaml of a model of this configuration."""
    shutil.copytree(material / "model", folder / "model")
    model_config.save_pretrained(folder / "model")
    text = (material / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace(f"model: {material}/model", f"model: {folder}/model"))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def recurrent(material, tmp_path_factory):
    """run.yaml of a model with recurrent layers beside attention."""
    from transformers import JambaConfig

    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    own = {"num_key_value_heads": 2, "mamba_d_state": 4, "use_mamba_kernels": False}
    chosen = JambaConfig(**sizes, **periods, **own, **ids, vocab_size=300)
    return _run_yaml(material, tmp_path_factory.mktemp("recurrent"), chosen)


@pytest.fixture(scope="module")
def gpt_oss(material, tmp_path_factory):
    """run.yaml of a model that gets masks for its documents, with windows shorter than these."""
    from transformers import GptOssConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    own = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return _run_yaml(
        material,
        tmp_path_factory.mktemp("gpt_oss"),
        GptOssConfig(**sizes, **own, **ids, vocab_size=300, sliding_window=6),
    )


@pytest.fixture(scope="module")
def alone(gpt_oss, tmp_path_factory):
    """Its losses, of one process."""
    return ranks.run(tmp_path_factory.mktemp("alone"), 1, gpt_oss, "steps=4")


def two(config, environment, everyone):
    return [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("size", "strategy"), [pytest.param(2, "ddp", marks=pytest.mark.full), (2, "fsdp"), (1, "split")]
)
def test_a_model_that_gets_masks_has_one_loss_curve(gpt_oss, alone, tmp_path, size, strategy):
    chosen = (f"strategy={strategy}", "gradient_checkpointing=true")
    patch = {("trainer.world", "_devices"): two} if strategy == "split" else {}
    found = ranks.run(tmp_path, size, gpt_oss, "steps=4", *chosen, patch=patch)
    assert found == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 4 and alone[-1] < alone[0]


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), pytest.param(2, "zero1", marks=pytest.mark.full)])
def test_a_model_that_mixes_documents_never_takes_a_step(recurrent, tmp_path, size, strategy):
    one = ranks.Ranks(tmp_path, size, recurrent, f"strategy={strategy}")
    assert one.codes() == [2] * size, one.log()
    assert "see other documents in a packed sequence" in one.log()
    assert not ranks.records(one.directory())


def test_it_is_trained_and_resumed_where_nothing_is_packed(recurrent, tmp_path, capsys):
    """At another world size and other shares, too; check and plan take it, and what is written generates."""
    chosen = (recurrent, "packing=false", "steps=4", "checkpoint_every=2")
    whole = ranks.run(tmp_path / "whole", 1, *chosen)
    assert whole[-1] < whole[0]
    other = ranks.Ranks(tmp_path / "other", 2, *chosen, stop_in=2)
    assert set(other.codes()) == {75}, other.log()
    assert ranks.run(tmp_path / "other", 1, *chosen) == pytest.approx(whole, rel=1e-5)
    for command in (["check"], ["plan"]):
        assert cli.main([*command, *map(str, chosen)]) == 0, capsys.readouterr()
    assert cli.main(["generate", str(tmp_path / "whole" / "node0"), "--max-new-tokens", "3"]) == 0


def test_a_model_that_transformers_cannot_have_generate_is_refused_in_its_words(
    recurrent, tmp_path, capsys, monkeypatch
):
    """As one of recurrent layers alone, whose length its cache cannot tell."""
    from transformers import AutoConfig, AutoModelForCausalLM, JambaForCausalLM

    def generate(*_, **__):
        raise ValueError("the cache has\nno length")

    monkeypatch.setattr(JambaForCausalLM, "generate", generate)
    folder = tmp_path / "model"
    shutil.copytree(recurrent.parent / "model", folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    assert cli.main(["generate", str(folder)]) == 2
    assert capsys.readouterr().err.endswith(
        "error: JambaForCausalLM cannot generate with this configuration: the cache has no length\n"
    )


def test_check_and_plan_refuse_it_in_the_same_words(recurrent, gpt_oss, tmp_path, capsys):
    one = ranks.Ranks(tmp_path, 1, recurrent)
    assert one.codes() == [2]
    said = one.log().partition("error: ")[2].splitlines()[0]
    assert "see other documents" in said
    for command in ("check", "plan"):
        assert cli.main([command, str(recurrent)]) == 2
        assert said in "".join(capsys.readouterr())
        assert cli.main([command, str(gpt_oss)]) == 0


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("flash_attention_2", "doesn't seem to be installed; install it beside the trainer"),
        ("flex_attention", "does not support an attention implementation through torch's flex_attention"),
    ],
)
def test_an_attention_that_is_not_to_be_had_is_told_before_anything_is_loaded(
    material, tmp_path, capsys, attention, said
):
    chosen = [str(material / "run.yaml"), f"attention={attention}", "dtype=bfloat16"]
    for command in ("check", "plan"):
        assert cli.main([command, *chosen]) == 2
        output = "".join(capsys.readouterr())
        assert f"attention: model {material}/model cannot have {attention}" in output and said in output
        assert "set attention to auto" in output
    one = ranks.Ranks(tmp_path, 1, *chosen)
    assert one.codes() == [2]
    assert said in one.log() and "Traceback" not in one.log()
