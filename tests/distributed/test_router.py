"""The routers' auxiliary loss is the whole batch's, however it is split: against transformers' own over one batch."""

import re

import pytest
import ranks
import torch

pytestmark = pytest.mark.distributed

STEPS, COEFFICIENT = 5, 0.5  # so much that it matters


@pytest.fixture(scope="module")
def experts(material, tmp_path_factory):
    """run.yaml of a mixture of experts from random weights."""
    from transformers import AutoTokenizer, MixtralConfig

    folder = tmp_path_factory.mktemp("experts")
    AutoTokenizer.from_pretrained(material / "model").save_pretrained(folder / "model")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    MixtralConfig(**sizes, **heads, num_local_experts=4, bos_token_id=0, eos_token_id=0).save_pretrained(
        folder / "model"
    )
    text = (material / "run.yaml").read_text().replace(f"{material}/model", f"{folder}/model")
    text = text.replace(
        "steps: 12", f"steps: {STEPS}\nlr_schedule: constant\nrouter_aux_loss_coef: {COEFFICIENT}"
    )
    (folder / "run.yaml").write_text(text.replace("warmup_steps: 3", "warmup_steps: 0"))
    return folder / "run.yaml"


def plain_loop(config_path, cache, *overrides):
    """Losses of tokens and of routers: whole batches, and the auxiliary loss as transformers computes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from trainer import config
    from trainer.data import index, pack, read

    chosen = config.load(config_path, overrides)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    tokenizer.pad_token = tokenizer.eos_token
    packed, _ = pack.prepare(chosen, read.digests(chosen), tokenizer, cache)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(chosen.model)).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    curve = []
    for step in range(STEPS):
        batch = list(index.Index(0, len(packed)).batch(7 * step, 7))
        rows = [packed[k] for k in batch]
        lengths = [sum(end - begin for begin, end in packed._sets[0]._pieces_of(k)) for k in batch]
        if packed.layout == "alone":
            lengths = packed.lengths(batch)
        real = torch.arange(packed.length) < torch.tensor(lengths)[:, None]
        inputs, labels, positions = (
            torch.stack([*map(torch.from_numpy, one)]) for one in zip(*rows, strict=True)
        )
        output = model(input_ids=inputs, position_ids=positions, use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        balance = load_balancing_loss_func(output.router_logits, 4, 2, real.float())
        optimizer.zero_grad()
        (loss + COEFFICIENT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        curve.append((loss.item(), balance.item()))
    return curve


@pytest.fixture(scope="module")
def reference(experts, tmp_path_factory):
    return plain_loop(experts, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (1, ["micro_batch_size=7"]),
        (2, ["micro_batch_size=1"]),
        (3, ["micro_batch_size=2", "strategy=zero1"]),
        (2, ["micro_batch_size=3", "strategy=fsdp"]),
    ],
)
def test_any_split_of_the_batch(experts, reference, tmp_path, size, chosen):
    losses = ranks.run(tmp_path, size, experts, *chosen)
    balances = [record["router_loss"] for record in ranks.records(tmp_path / "node0")]
    assert losses == pytest.approx([loss for loss, _ in reference], rel=1e-5)
    assert balances == pytest.approx([balance for _, balance in reference], rel=1e-5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_padding_is_nobodys_choice(experts, tmp_path, size, packing):
    """Sequences of whole documents have much of it, which is one token over and over; of one alone most."""
    chosen = ("overlong=cut", "sequence_length=48", f"packing={packing}")
    expected = plain_loop(experts, tmp_path / "cache", *chosen)
    losses = ranks.run(tmp_path, size, experts, "micro_batch_size=2", *chosen)
    balances = [record["router_loss"] for record in ranks.records(tmp_path / "node0")]
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert balances == pytest.approx([balance for _, balance in expected], rel=1e-5)


def _noted(run, micro_batches):
    from trainer.loop import expert_weights_really
    from trainer.model import router
    from trainer.world import log

    class Noted(router.Ask):
        def __call__(self, logits, real):
            if self.weights is not None:
                log(f"experts' weights are {self.weights.dtype}")
            return super().__call__(logits, real)

    asked, seconds = expert_weights_really(run, micro_batches)
    return Noted(asked.chosen, asked.weights), seconds


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_what_experts_count_is_not_rounded(experts, tmp_path, strategy):
    """FSDP gives modules their inputs in 16 bits, those within a dataclass, too."""
    words = ("dtype=bfloat16", f"strategy={strategy}", "steps=1")
    attempt = ranks.Ranks(tmp_path, 2, experts, *words, patch={("trainer.loop", "expert_weights"): _noted})
    assert attempt.codes() == [0, 0], attempt.log()
    assert set(re.findall(r"experts' weights are (\S+)", attempt.log())) == {"torch.float32"}


def _slow(run, packed, sequences):
    """Rank 1 takes half a second for every micro-batch."""
    import time

    from trainer.loop import tensors_really

    time.sleep(0.5 * run.world.rank)
    return tensors_really(run, packed, sequences)


def test_waiting_for_the_others_choices_is_no_computing(experts, tmp_path):
    """Else a fast rank would seem slower than it is, and shares would come to its speed the later."""
    ranks.run(tmp_path, 2, experts, "micro_batch_size=4", patch={("trainer.loop", "tensors"): _slow})
    fast, slow = zip(*(step["rank_seconds"] for step in ranks.records(tmp_path / "node0")), strict=True)
    assert min(slow) >= 1.0 and min(fast) < 0.4


def test_without_it_other_weights_come_out(experts, reference, tmp_path):
    """transformers' models have it off unless their config.json says otherwise; so it is here."""
    config = experts.with_name("without.yaml")
    config.write_text("\n".join(line for line in experts.read_text().splitlines() if "router" not in line))
    losses = ranks.run(tmp_path, 1, config)
    assert losses[0] == pytest.approx(reference[0][0], rel=1e-5)
    assert abs(losses[-1] - reference[-1][0]) > 1e-4
    record = ranks.records(tmp_path / "node0")[0]
    assert record["router_loss"] is None


def test_a_model_without_experts_is_refused(material, tmp_path):
    one = ranks.Ranks(tmp_path, 1, material / "run.yaml", "router_aux_loss_coef=0.01")
    assert one.codes() == [2] and "has no experts whose routers" in one.log()


def test_diloco_is_refused_to_a_model_that_asks_for_it_by_check_and_plan_too(experts, tmp_path, capsys):
    """By its own config.json alone."""
    import json
    import shutil

    from trainer import cli, config

    shutil.copytree(config.load(experts).model, tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "output_router_logits": True}))
    words = [f"model={tmp_path}/model", "router_aux_loss_coef=null"]
    for command in ("check", "plan"):
        assert cli.main([command, str(experts), *words]) == 0
        assert cli.main([command, str(experts), *words, "comm=diloco"]) == 2
        assert (
            "and the model's config.json asks for that; set router_aux_loss_coef to 0"
            in capsys.readouterr().err
        )
    one = ranks.Ranks(tmp_path, 1, experts, *words, "comm=diloco")
    assert one.codes() == [2] and "and the model's config.json asks for that" in one.log()
