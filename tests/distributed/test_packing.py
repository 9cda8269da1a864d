"""A model or an attention that does not keep a packed sequence's documents apart is refused, by every command."""

import shutil

import pytest
import ranks

from trainer import cli


@pytest.fixture(scope="module")
def recurrent(material, tmp_path_factory):
    """run.yaml of a model with recurrent layers beside attention."""
    from transformers import JambaConfig

    folder = tmp_path_factory.mktemp("recurrent")
    shutil.copytree(material / "model", folder / "model")
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    JambaConfig(
        **sizes,
        **periods,
        num_key_value_heads=2,
        vocab_size=300,
        mamba_d_state=4,
        use_mamba_kernels=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ).save_pretrained(folder / "model")
    text = (material / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace(f"model: {material}/model", f"model: {folder}/model"))
    return folder / "run.yaml"


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "zero1")])
def test_a_model_that_mixes_documents_never_takes_a_step(recurrent, tmp_path, size, strategy):
    one = ranks.Ranks(tmp_path, size, recurrent, f"strategy={strategy}")
    assert one.codes() == [2] * size, one.log()
    assert "see other documents in a packed sequence" in one.log()
    assert not ranks.records(one.directory())


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
