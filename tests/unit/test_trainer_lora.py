"""Which layers get an adapter, and its dropout, which is the same whoever computes."""

import pytest
import torch
from small_models import ARCHITECTURES, EXPERTS, SMALL, make

from trainer.config import from_mapping
from trainer.errors import BadInput
from trainer.model import load, lora
from trainer.model.loss import TokenLoss

torch.set_num_threads(1)


def test_adapters_go_where_they_are_wanted():
    config = from_mapping({"adapter": "lora", "lora_targets": "q_proj, down_proj"})
    names = [name for name, _ in lora.add(make("llama"), config).named_parameters() if "lora_A" in name]
    assert len(names) == 4 and all("q_proj" in name or "down_proj" in name for name in names)
    with pytest.raises(
        BadInput, match=r"no layer is named q_prj; model tiny has down_proj, .*v_proj; or write auto"
    ):
        lora.add(make("llama"), from_mapping({"adapter": "lora", "lora_targets": "q_prj,k_proj"}))
    assert "lm_head" not in lora.linear_names(make("llama"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "phi3"])
def test_an_architecture_that_peft_does_not_know_gets_no_adapter_for_each_expert(kind):
    """Nor for their router; where there are none all layers get one, as with all-linear."""
    wrapped = lora.add(make(kind), from_mapping({"adapter": "lora", "lora_dropout": 0.1}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    if kind == "phi3":
        assert {name.rsplit(".", 1)[-1] for name in adapted} == lora.linear_names(make(kind))
        return
    assert len(adapted) == 8 and all("self_attn" in name for name in adapted)
    with pytest.raises(
        BadInput, match=r"all-linear: .*lora_dropout is 0.1: where experts .* set it to 0; or"
    ):
        everywhere = {"adapter": "lora", "lora_dropout": 0.1, "lora_targets": "all-linear"}
        lora.add(make(kind), from_mapping(everywhere))


def test_a_gate_of_attention_gets_an_adapter_where_peft_takes_it_for_none_of_experts():
    own = {"n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    own |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hy_v4", **{**SMALL, **EXPERTS, **own}))
    wrapped = lora.add(load.in_training(model), from_mapping({"adapter": "lora"}))
    assert any("self_attn.gate_proj.lora_A" in name for name, _ in wrapped.named_parameters())


def test_a_layer_that_is_asked_for_and_would_be_without_use_is_refused(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "mamba", {"state_size": 4})
    asked = from_mapping({"adapter": "lora", "lora_targets": "in_proj,out_proj"})
    with pytest.raises(
        BadInput, match=r"out_proj: in model tiny .* without use; it has in_proj; or write auto"
    ):
        lora.add(make("mamba"), asked)


def test_a_gate_of_attention_is_not_taken_for_an_expert_s():
    """peft does, of whatever is called so, and refuses it for want of the other half."""
    wrapped = lora.add(make("afmoe"), from_mapping({"adapter": "lora"}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_where_attention_has_experts_the_layers_beside_them_get_adapters(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "jetmoe", {**EXPERTS, "kv_channels": 8})
    wrapped = lora.add(make("jetmoe"), from_mapping({"adapter": "lora"}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert adapted and not any("experts" in name or "router" in name for name in adapted)


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_what_multiplies_in_a_way_of_its_own_gets_no_adapter(targets):
    class Grouped(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight).unflatten(-1, (4, -1))

    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Grouped(32, 32, bias=False)
    config = from_mapping({"adapter": "lora", "lora_targets": targets})
    wrapped = lora.add(model, config)
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert adapted and not any("o_proj" in name for name in adapted)
    assert "o_proj" not in lora.linear_names(model)
    # Falcon's multiply by themselves, and as others do.
    assert any("lora_A" in name for name, _ in lora.add(make("falcon"), config).named_parameters())


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
@pytest.mark.parametrize("kind", ["mamba", "bamba", "falcon_h1", "jamba"])
def test_what_a_kernel_reads_by_itself_gets_no_adapter(kind, targets, monkeypatch):
    """It would be trained, and change nothing, on a GPU; peft refuses that of some of these alone."""
    sizes = {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    }
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "state_size": 4}
    own = {"attn_layer_indices": [1]} if kind == "bamba" else {}
    monkeypatch.setitem(ARCHITECTURES, kind, {**sizes, **periods, **own, "num_experts": 1})
    wrapped = lora.add(make(kind), from_mapping({"adapter": "lora", "lora_targets": targets}))
    adapted = {name.split(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    mixers = {name.rsplit(".", 1)[-1] for name in adapted if "mamba" in name or "mixer" in name}
    assert "in_proj" in mixers and not mixers & {"out_proj", "dt_proj", "x_proj", "conv1d"}


def test_experts_that_are_layers_have_no_dropout():
    """What an expert sees depends on the whole micro-batch: its mask would, too."""
    wanted = {"adapter": "lora", "lora_targets": "all-linear"}
    for dropout in (0.0, 0.1):
        model = make("llama")
        model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(2)])
        config = from_mapping({**wanted, "lora_dropout": dropout})
        if dropout:
            with pytest.raises(BadInput, match=r"lora_dropout: found 0\.1, and adapters within experts"):
                lora.add(model, config)
        else:
            lora.add(model, config)


def test_what_a_parameter_under_adapters_was_called_before():
    """Also where one parameter of a module after the other has an adapter, as those of experts."""
    before = {name for name, _ in make("qwen3_moe").named_parameters()}
    wrapped = lora.add(make("qwen3_moe"), from_mapping({"adapter": "lora", "lora_targets": "all-linear"}))
    assert {
        lora.original_name(name) for name, _ in wrapped.named_parameters() if "lora_" not in name
    } == before


def test_what_is_dropped_does_not_depend_on_the_pieces_that_it_is_drawn_in(monkeypatch):
    dropout, x = lora.KeyedDropout(0.5, 3), torch.ones(2, 10, 4)
    dropout.keys = [7, 8]
    whole = dropout(x)
    monkeypatch.setattr(lora, "PIECE", 7)
    assert torch.equal(dropout(x), whole) and 10 < whole.count_nonzero() < 70
    assert dropout(x.bfloat16()).dtype == torch.bfloat16


def test_dropout_of_tokens_in_one_row_after_the_other():
    """Shared experts see (B x S, D): what is dropped is the same."""
    dropout = lora.KeyedDropout(0.5, 3)
    dropout.keys = [7, 8]
    x = torch.randn(2, 10, 4)
    assert torch.equal(dropout(x.flatten(0, 1)), dropout(x).flatten(0, 1))
    assert torch.equal(dropout(x.flatten(0, 1)[None])[0], dropout(x).flatten(0, 1))


def drawn(place, seed):
    """As `lora.draws` has it, in whole numbers without end."""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    found = (place * (mixed >> 32 | 1) + mixed) % 2**32
    found = (found ^ found >> 16) * 0x7FEB352D % 2**32
    found = (found ^ found >> 15) * 0x846CA68B % 2**32
    return (found ^ found >> 16) % 2**31


@pytest.mark.parametrize("seed", [0, 7, 8, 123456789012345678, 2**63 + 5])
def test_dropout_is_by_numbers_that_every_device_has(seed):
    """A device's own depend on how many processors it has: cards of two kinds would drop different values."""
    found = lora.draws(5000, seed, torch.device("cpu"))
    assert found.tolist() == [drawn(place, seed) for place in range(5000)]
    assert lora.draws(9, seed, torch.device("cpu"), 4990).tolist() == [
        drawn(place, seed) for place in range(4990, 4999)
    ]
    dropped = (lora.draws(1 << 18, seed, torch.device("cpu")) < 0.1 * 2**31).float()
    assert dropped.mean() == pytest.approx(0.1, abs=0.003)
    other = (lora.draws(1 << 18, seed + 1, torch.device("cpu")) < 0.1 * 2**31).float()
    for one, two in ((dropped, other), (dropped[1:], dropped[:-1]), (dropped[1:], other[:-1])):
        assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.01


def test_the_adapter_s_dropout_does_not_depend_on_who_computes():
    """A sequence's loss is the same alone and beside another; another key or layer drops others; without keys, none."""
    config = from_mapping({"adapter": "lora", "lora_dropout": 0.5, "lora_targets": "all-linear"})
    wrapped = lora.add(make("llama"), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    module = TokenLoss(wrapped)
    inputs, labels = torch.randint(2, 96, (2, 2, 24), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(24).expand(2, 24)

    def loss(rows, keys):
        lora.key_dropout(module, keys)
        return module(inputs[rows], labels[rows], positions[rows]).item()

    both = loss([0, 1], [7, 8])
    assert loss([0], [7]) + loss([1], [8]) == pytest.approx(both, rel=1e-5)
    assert loss([1, 0], [8, 7]) == pytest.approx(both, rel=1e-5)
    assert abs(loss([0, 1], [9, 8]) - both) > 1e-3
    assert loss([0, 1], None) == loss([0, 1], None)
    parts = [part for part in module.modules() if isinstance(part, lora.KeyedDropout)]
    assert len({part.layer for part in parts}) == len(parts) == 14
    x = torch.ones(1, 50, 40)
    parts[0].keys = parts[1].keys = [3]
    masks = [parts[n](x) for n in (0, 1)]
    assert not torch.equal(*masks) and 0.4 < (masks[0] == 0).float().mean() < 0.6 and masks[0].max() == 2
