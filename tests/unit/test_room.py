"""A rank's memory before a run: told from the model's shape, refused or made do with. Sizes of memory are made up."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from trainer import config as configuration
from trainer import link, room, ways
from trainer.commands import train
from trainer.errors import BadInput
from trainer.model import footprint
from trainer.plan import proposal, report, resources, wire, work
from trainer.plan.memory import KERNELS, Budget, budget, every
from trainer.plan.resources import Place

WIDE = LlamaConfig(
    vocab_size=500, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
LONG = GPT2Config(vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=512)


class World(SimpleNamespace):
    """Ranks that do all at once; `memory`: what each finds free."""

    size, rank, firsts, hosts = 2, 0, [0, 1], ["desktop", "laptop"]
    device, first = torch.device("cpu"), True
    devices = [device]
    environment = SimpleNamespace(local_world_size=1, attempt=1)

    def together(self, action):
        return action()

    def gather(self, own):
        return [own, 9 if self.other is None else self.other]


def asked(**keys):
    return configuration.from_mapping(
        {"batch_size": 16, "micro_batch_size": 8, "sequence_length": 256, **keys}
    )


def needs(config, model, rows, strategy="ddp"):
    """Bytes by plan's own count."""
    config = dataclasses.replace(config, micro_batch_size=rows)
    place = Place(2, 2, 1, torch.device("cpu"), 1, 1, 1e9)
    return sum(budget(strategy, config, footprint.measure(config, model), place, KERNELS).device.values())


@pytest.mark.parametrize("model", [WIDE, LONG], ids=["llama", "gpt2"])
@pytest.mark.parametrize("keys", [{}, {"comm": "diloco"}, {"attention": "eager"}, {"loss_chunk": 0}])
def test_what_is_told_without_counting_is_never_too_little(model, keys):
    config = asked(**keys)
    assert room.at_most(config, model, 8) + KERNELS > needs(config, model, 8)


def test_a_model_of_unknown_shape_is_counted():
    unknown = SimpleNamespace(to_dict=dict)
    assert room.at_most(asked(), SimpleNamespace(get_text_config=lambda: unknown), 8) is None


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("gpt2", True),
        ("llama", True),
        ("gemma3_text", True),
        ("gemma3n_text", False),  # embeddings in each layer, whose widths are a list
        (
            "gemma4_text",
            False,
        ),  # its layers differ, and transformers raises where they are asked for one number
        ("falcon_h1", False),
        ("qwen3_5_text", False),
        ("lfm2", False),
        ("deepseek_v3", False),
        ("dbrx", False),  # its experts are in a part of the configuration
        ("blenderbot", False),  # of whose layers the configuration counts the encoder's alone
        ("gemma3", False),  # it sees, too
        ("seed_oss", True),
    ],
)
def test_a_model_whose_layers_are_not_a_dense_transformers_is_counted(kind, known):
    from transformers import AutoConfig, AutoModelForCausalLM

    told = room.at_most(asked(sequence_length=2), AutoConfig.for_model(kind), 1)
    assert (told is not None) == known
    if kind == "seed_oss":  # whose heads are wider, together, than its layers
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        assert told >= 40 * sum(one.numel() for one in model.parameters())


def test_of_a_model_whose_inner_decoder_is_asked_the_memory_is_told():
    from transformers import OPTConfig

    sizes = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
    model = OPTConfig(**sizes, num_attention_heads=4, vocab_size=96, max_position_embeddings=64)
    found = footprint.measure(asked(sequence_length=32), model)
    assert found.activations > 2 * 32 * 32 * 4


def test_a_rank_with_room_computes_as_many_as_it_was_told_to(monkeypatch):
    monkeypatch.setattr(resources, "_host_memory", lambda: 4 << 30)
    monkeypatch.setattr(footprint, "measure", None)  # nobody counts
    assert room.at_once(asked(), LONG, World(other=8)) == [8, 8]


def test_a_rank_without_room_for_one_sequence_is_refused_and_told_what_would_do(monkeypatch):
    config = asked()
    one = needs(config, LONG, 1)
    monkeypatch.setattr(resources, "_host_memory", lambda: int(one / 1.2))
    with pytest.raises(BadInput) as refused:
        room.at_once(config, LONG, World(other=8))
    text = str(refused.value)
    assert f"rank 0: a step of a single sequence needs about {one >> 20:,} MiB of the memory" in text
    assert "gradient_checkpointing: true" in text and "adapter: lora" in text and "no step was made" in text
    assert "micro_batch_size" not in text  # it is one already


def test_fewer_bits_are_advised_where_they_save_something():
    """Experts are no linear layers, and those of a model are most of it."""
    config = asked(adapter="lora", dtype="bfloat16", sequence_length=16)
    experts = Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 64, "num_experts": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    )
    for model, advised in ((WIDE, True), (experts, False)):
        assert ("quantize: 4bit" in proposal.cures(config, footprint.measure(config, model))) == advised
    for keys in ({"adapter": "none"}, {"quantize": "4bit"}):
        other = dataclasses.replace(config, **keys)
        assert "quantize: 4bit" not in proposal.cures(other, footprint.measure(other, WIDE))


def test_a_strategy_that_would_fit_is_named(monkeypatch):
    """Where weights are much of it, a part of them is less."""
    config = asked(sequence_length=16)
    model = LlamaConfig(
        vocab_size=500, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    between = (needs(config, model, 1) + 1.15 * needs(config, model, 1, "fsdp")) / 2
    monkeypatch.setattr(resources, "_host_memory", lambda: int(between / 1.15))
    with pytest.raises(BadInput, match=r"What would help: strategy: (zero1|zero2|fsdp)"):
        room.at_once(config, model, World(other=8))


HEAVY = LlamaConfig(
    vocab_size=500, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8
)


@pytest.mark.parametrize(
    ("comm", "fits", "cure"),
    [
        ("diloco", "exact", r"comm: exact, "),
        ("16bit", "fsdp", r"comm: exact and strategy: (zero1|zero2|fsdp), "),
        ("16bit", None, r"comm: exact, "),  # which needs less, if not little enough
    ],
)
def test_what_a_lossy_comm_keeps_is_the_first_to_go_and_no_strategy_goes_with_it(
    monkeypatch, comm, fits, cure
):
    config = asked(sequence_length=16, comm=comm)
    exact, least = needs(asked(sequence_length=16), HEAVY, 1), needs(config, HEAVY, 1, "fsdp")
    assert needs(config, HEAVY, 1) > 1.2 * exact
    memory = {"exact": exact, "fsdp": (exact + least) // 2, None: least // 8}[fits]
    monkeypatch.setattr(resources, "_host_memory", lambda: memory)
    with pytest.raises(BadInput, match=f"What would help: {cure}"):
        room.at_once(config, HEAVY, World(other=8))


def test_one_rank_whose_single_micro_batch_fits_is_not_refused_for_that_several_would_not(monkeypatch):
    config = asked(sequence_length=96, batch_size=2, micro_batch_size=2)
    place = Place(1, 1, 1, torch.device("cpu"), 1, 1, 1e9)

    def takes(rows):
        one = dataclasses.replace(config, micro_batch_size=rows)
        return sum(budget("ddp", one, footprint.measure(one, HEAVY), place, KERNELS).device.values())

    several, single = takes(1), takes(2)
    assert several > 1.02 * single
    monkeypatch.setattr(resources, "_host_memory", lambda: int((several + single) / 2 / room.DOUBT))
    alone = World(other=2, size=1, firsts=[0], hosts=["desktop"], gather=lambda own: [own])
    assert room.at_once(config, HEAVY, alone) == [2]
    monkeypatch.setattr(resources, "_host_memory", lambda: int(0.98 * single / room.DOUBT))
    with pytest.raises(BadInput, match="a step of a single sequence needs about"):
        room.at_once(config, HEAVY, alone)


def budgets(**sizes):
    return {name: Budget(name, {"all": size}, {}, 0, 1.0) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (130, "proposed: strategy ddp (as configured)"),
        (110, "proposed: strategy ddp with comm: exact (the configuration has ddp with comm: 8bit)"),
        (90, "proposed: strategy zero1 with comm: exact (the configuration has ddp with comm: 8bit)"),
        (50, "proposed: none of the strategies fits. Cure: comm: exact, "),
    ],
)
def test_a_plan_proposes_no_strategy_with_a_lossy_comm_that_refuses_it(memory, said):
    config = asked(comm="8bit")
    place = Place(2, 2, 1, torch.device("cpu"), memory, memory, 1e9)
    proposed, comm = proposal.propose_both(config, budgets(ddp=120, zero1=80), budgets(ddp=100)["ddp"], place)
    answer = {
        "proposed": proposed,
        "proposed_comm": comm,
        "strategy": "ddp",
        "proposed_micro_batch_size": None,
    }
    assert report._proposal(config, footprint.measure(config, WIDE), answer).startswith(said)


def test_a_plan_marks_the_ways_that_have_no_room():
    way = {"wire_bytes": 1 << 20, "most_bytes": 1 << 20, "wire_seconds": 9.0, "waiting_seconds": 9.0}
    way |= {"coding_seconds": 0.0}
    answer = {
        "estimate": {"compute_seconds": 1.0},
        "strategy": "ddp",
        "comm": "auto",
        "from_random": False,
        "ways": {"exact": {**way, "fits": True}, "diloco": {**way, "fits": False}},
    }
    *_, exact, diloco = report._less(answer)
    assert "does not fit" not in exact and diloco.endswith("; does not fit")
    *_, diloco = report._less(answer | {"from_random": True})
    assert ways.FROM_RANDOM in diloco and ways.PRICE["diloco"] not in diloco
    assert "10% of the step computes" in diloco
    codes = {"exact": {**way, "fits": True}, "8bit": {**way, "coding_seconds": 10.0, "fits": True}}
    assert "5% of the step computes" in report._less(answer | {"ways": codes})[-1]


def test_a_plan_of_shards_says_what_makes_sending_less():
    sends = {"strategies": {"fsdp": {"wire_seconds": 9.0}}, "strategy": "fsdp", "passes": 4, "ranks": 2}
    *_, said = report._less(sends | {"estimate": {"compute_seconds": 1.0}})
    assert said == f"sending takes long: {ways.less('fsdp', 4)}"
    assert report._less(sends | {"estimate": {"compute_seconds": 20.0}}) == []


@pytest.mark.parametrize(("device", "nodes", "codes"), [("cpu", 2, 10.0), ("cpu", 1, 0.0), ("cuda", 2, 2.0)])
def test_a_plan_counts_what_coding_takes(device, nodes, codes):
    """An optimizer of a second; one host alone codes nothing but diloco's meetings."""
    place = Place(2, nodes, 2 // nodes, torch.device(device), 1, 1, 1e9)
    found = wire.coding(asked(sync_every=50, checkpoint_every=0), place, 1.0)
    assert found["powersgd"] == codes and found["exact"] == 0
    assert found["diloco"] == pytest.approx(ways.CODING[device]["diloco"] / 50)


def test_offloaded_weights_and_gradients_take_powers_of_two_of_a_host_with_gpus():
    """torch's pinned memory comes so: 1,000 MiB of small layers may take 1,400."""
    found = footprint.measure(asked(), LONG)
    place = Place(2, 2, 1, torch.device("cuda"), 1 << 40, 1 << 40, 1e9)
    parts = [-(-size // 2) for size, count in found.tensors for _ in range(count)]
    taken = sum(2 ** math.ceil(math.log2(one)) for one in parts)
    host = budget("offload", asked(), found, place, 0).host
    assert sum(parts) == pytest.approx(found.weights / 2, rel=0.01) and found.trained == found.tensors
    assert host["weights"] + host["gradients"] + host["pinned"] == pytest.approx(2 * taken, rel=0.01)
    assert host["pinned"] > 0.1 * host["weights"]
    there = dataclasses.replace(place, device=torch.device("cpu"))
    assert "pinned" not in budget("offload", asked(), found, there, 0).host
    assert "pinned" not in budget("fsdp", asked(), found, place, 0).host


def test_gradients_that_come_as_activations_go_count_by_what_they_add():
    """Of one rank's single micro-batch; with several, or ranks, or hardly any activations, there is room for all."""

    def counted(ranks=1, **keys):
        config = asked(**{"batch_size": 8, **keys})
        place = Place(ranks, ranks, 1, torch.device("cpu"), 1, 1, 1e9)
        found = footprint.measure(config, LONG)
        return budget("ddp", config, found, place, 0).device["gradients"] / found.gradients

    assert counted() == 0
    assert counted(micro_batch_size=4) == counted(ranks=2) == 1
    assert 0.7 < counted(batch_size=1, sequence_length=2) <= 1


def test_a_way_is_counted_without_what_diloco_alone_has():
    """A run that leaves diloco may keep its keys: more fragments than parameters are no fault of it."""
    place = Place(2, 2, 1, torch.device("cpu"), 1, 1, 1e9)

    def counted(**keys):
        config = asked(comm="8bit", **keys)
        return budget("ddp", config, footprint.measure(config, LONG), place, 0)

    keys = {"diloco_fragments": 400, "diloco_overlap": 5, "sync_every": 5000}
    assert counted(**keys) == counted()
    configuration.check_together(asked(comm="8bit", **keys))
    said = configuration.idle_keys(asked(comm="8bit", **keys))
    nothing = "says nothing while comm is 8bit"
    assert said == f"diloco_fragments, diloco_overlap {nothing}; sync_every {nothing}"
    assert configuration.idle_keys(asked(comm="auto", sync_every=5000)) == ""  # diloco is proposed by it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ddp_is_proposed_wherever_it_fits(dtype):
    """In 16 bits zero1 sends a quarter less, and has another curve."""
    config = asked(dtype=dtype)
    place = Place(2, 2, 1, torch.device("cpu"), 1 << 40, 1 << 40, 1e9)
    all_of_them = every(config, footprint.measure(config, LONG), place, 0)
    assert (all_of_them["zero1"].wire_bytes < all_of_them["ddp"].wire_bytes) == (dtype == "bfloat16")
    assert proposal.propose(all_of_them, place) == "ddp"


@pytest.mark.parametrize(
    ("keys", "there", "rows"),
    [
        ({}, {}, 3),
        ({"adapter": "none"}, {}, None),  # of which ddp sends all, too
        ({}, {"link": 10e9}, None),
        ({}, {"nodes": 1}, None),
        ({"micro_batch_size": 2}, {}, 1),  # ddp fits with no more than one less
        ({"comm": "8bit"}, {}, None),
    ],
)
def test_ddp_with_fewer_sequences_is_proposed_where_else_frozen_weights_would_travel(keys, there, rows):
    place = dataclasses.replace(Place(2, 2, 1, torch.device("cpu"), 350, 350, 1e9), **there)
    config = asked(**{"adapter": "lora", **keys})

    def ddp(rows):
        return Budget("ddp", {"all": 100 * rows}, {}, 0, 0.0)

    for proposed in ("fsdp", "offload", None):
        assert proposal.ddp_with_fewer(config, place, proposed, ddp) == rows
    assert proposal.ddp_with_fewer(config, place, "zero1", ddp) is None
    tiny = dataclasses.replace(place, memory=50)
    assert proposal.ddp_with_fewer(config, tiny, "fsdp", ddp) is None  # not even with one
    answer = {
        "proposed": "ddp",
        "proposed_comm": config.comm,
        "strategy": "fsdp",
        "proposed_micro_batch_size": rows,
    }
    if rows:
        said = report._proposal(
            dataclasses.replace(config, strategy="fsdp"), footprint.measure(config, WIDE), answer
        )
        assert said.startswith(
            f"proposed: strategy ddp with micro_batch_size: {rows} (the configuration has fsdp with "
        )


@pytest.mark.parametrize(
    ("device", "seconds", "keys", "said"),
    [
        (
            "cuda",
            318.0,
            {},
            "318 s, and ranks give each other up after timeout_seconds, 300: set it to 1,272 or",
        ),
        ("cuda", 318.0, {"timeout_seconds": 1200.0}, None),
        ("cpu", 318.0, {}, None),  # gloo counts a sum's time from when it begins
        ("cuda", 100.0, {}, None),
    ],
)
def test_a_step_that_sends_for_longer_than_ranks_wait(device, seconds, keys, said):
    sends = {"wire_seconds": seconds}
    answer = {"strategy": "ddp", "strategies": {"ddp": sends}, "ways": {"exact": sends}}
    place = Place(3, 3, 1, torch.device(device), 1, 1, 1e9)
    found = report._patience(asked(**keys), place, answer)
    assert bool(found) == bool(said) and (not said or said in found[-1])


def test_a_step_in_which_all_meet_sends_more_than_the_mean():
    way = {"wire_seconds": 8.0, "wire_bytes": 100, "most_bytes": 6000}
    answer = {"strategy": "ddp", "strategies": {"ddp": way}, "ways": {"diloco": way}}
    place = Place(3, 3, 1, torch.device("cuda"), 1, 1, 1e9)
    (_, said) = report._patience(asked(comm="diloco", sync_every=60), place, answer)
    assert "a step sends for 480 s" in said


def test_a_plan_says_that_frozen_weights_want_to_be_forced_over_a_slow_link(monkeypatch):
    answer = {
        "strategy": "fsdp",
        "strategies": {"fsdp": {"wire_seconds": 26.0}, "ddp": {"wire_seconds": 1.0}},
    }
    slow, fast = (Place(3, 3, 1, torch.device("cpu"), 1, 1, speed) for speed in (1e9, 10e9))

    def forced(config, place, **other):
        wants = [name for name in answer["strategies"] if proposal.wants_force(name, config, place)]
        return report._forced({**answer, "proposed": None, "want_force": wants, **other})

    (said,) = forced(asked(**LORA), slow)
    assert "26.0 s a step over this link" in said and "force_strategy: true" in said
    assert forced(asked(**LORA), fast) == []
    assert forced(asked(**LORA, force_strategy=True), slow) == []
    assert forced(asked(strategy="fsdp"), slow) == []
    ddp = asked(**{**LORA, "strategy": "ddp"})
    assert forced(ddp, slow, strategy="ddp") == []
    assert forced(asked(**LORA), dataclasses.replace(slow, row=True)) == []
    # One that is proposed wants it no less, and what would help says so.
    assert forced(ddp, slow, strategy="ddp", proposed="fsdp") == [said]
    assert proposal.switch(ddp, "fsdp", "auto", slow) == ["strategy: fsdp and force_strategy: true"]
    assert proposal.switch(ddp, "fsdp", "auto", fast) == ["strategy: fsdp"]
    assert proposal.switch(asked(**LORA), "fsdp", "auto", slow) == []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert forced(asked(**LORA), slow) == []


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        ({}, 3, ""),
        ({"comm": "exact", "optimizer": "paged_adamw", "dtype": "bfloat16"}, 3, ""),
        ({"comm": "8bit"}, 3, "at a price for the loss curve: comm: 8bit (the curve moves a little)"),
        ({"comm": "diloco"}, 3, "comm: diloco (from random weights a loss far higher"),
        ({"comm": "diloco"}, 1, ""),
        ({"comm": "powersgd"}, 1, ""),
        ({"optimizer": "paged_adamw_8bit"}, 1, "loss curve: optimizer: paged_adamw_8bit (moments in 8 bits)"),
        ({"dtype": "float16"}, 1, "loss curve: dtype: float16 ("),
        ({"comm": "16bit", "optimizer": "adamw_8bit"}, 2, "(next to none), optimizer: adamw_8bit ("),
    ],
)
def test_a_plan_says_what_makes_another_curve_on_whatever_link(keys, ranks, said):
    place = Place(ranks, ranks, 1, torch.device("cpu"), 1, 1, 1e9)
    found = report._curve(asked(**keys), place, {"from_random": True})
    assert len(found) == bool(said) and said in "".join(found)


def test_one_host_codes_nothing_and_pays_nothing_but_for_diloco():
    here, answer = Place(2, 1, 2, torch.device("cpu"), 1, 1, 1e9), {"from_random": False}
    assert report._curve(asked(comm="8bit"), here, answer) == []
    (said,) = report._curve(asked(comm="diloco"), here, answer)
    assert "comm: diloco (another curve" in said


LORA = {"adapter": "lora", "lora_targets": "all-linear", "strategy": "fsdp"}


@pytest.mark.parametrize(
    ("keys", "gigabits", "memory", "refused"),
    [
        ({}, 1, 1 << 40, True),
        ({}, 10, 1 << 40, False),
        ({}, None, 1 << 40, True),  # nobody knows: taken for gigabit Ethernet, as plan takes it
        ({"link_gbit": 1.0}, None, 1 << 40, True),  # the interface says nothing
        ({"link_gbit": 1.0}, 10, 1 << 40, True),  # or more than was measured
        ({"link_gbit": 20.0}, 1, 1 << 40, True),
        ({"link_gbit": 9.4}, None, 1 << 40, False),
        ({}, 1, 1 << 10, True),  # ddp has no room
        ({"force_strategy": True}, 1, 1 << 10, False),
        ({"micro_batch_size": 16}, 1, "of one sequence", True),  # ddp has, with fewer at once
        ({"force_strategy": True}, 1, 1 << 40, False),
        ({"adapter": "none"}, 1, 1 << 40, False),
        ({"strategy": "zero2"}, 1, 1 << 40, False),  # of which frozen weights stay where they are
    ],
)
def test_frozen_weights_stay_off_a_slow_wire_where_they_can(monkeypatch, keys, gigabits, memory, refused):
    config = asked(**{**LORA, **keys})
    if memory == "of one sequence":
        memory = needs(config, WIDE, 2)
        assert memory < needs(config, WIDE, config.micro_batch_size)
    monkeypatch.setattr(resources, "_host_memory", lambda: memory)
    monkeypatch.setattr(link, "interface_speed", lambda: gigabits and gigabits * 1e9)
    world = World(gather=lambda own: [own, own])
    told = []
    monkeypatch.setattr(room, "log", told.append)
    if not refused:
        room.refuse_frozen_weights_on_a_slow_wire(config, WIDE, world, goes_on=False)
        assert told == []
        return
    said = r"strategy: fsdp sends the frozen weights, too: about .* at 1 Gbit/s"
    with pytest.raises(BadInput, match=said) as refusal:
        room.refuse_frozen_weights_on_a_slow_wire(config, WIDE, world, goes_on=False)
    crowded = "ddp, which would not, has no room" in str(refusal.value)
    assert crowded == (memory == 1 << 10) and "force_strategy to true" in str(refusal.value)
    nobody_knows = gigabits is None and "link_gbit" not in keys
    assert ("until playbooks/preflight.yml has measured it" in str(refusal.value)) == nobody_knows


@pytest.mark.parametrize(
    ("speeds", "unknown"),
    [
        ((10e9, None), "laptop"),
        ((None, None), "desktop, laptop"),
        ((10e9, 10e9), ""),
        ((0.3e9, None), "slow"),
    ],
)
def test_a_host_whose_speed_nobody_knows_is_not_taken_for_a_fast_one(monkeypatch, speeds, unknown):
    monkeypatch.setattr(resources, "_host_memory", lambda: 1 << 40)
    monkeypatch.setattr(link, "interface_speed", lambda: speeds[0])
    other = iter([False, speeds[1] or 0.0, True])  # RDMA, its speed, whether ddp has room
    told = []
    monkeypatch.setattr(room, "log", told.append)
    world = World(gather=lambda own: [own, next(other)])
    if unknown:
        of = "Gbit/s. ddp" if unknown == "slow" else f"which is assumed of {unknown} until"
        with pytest.raises(BadInput, match=f"sends the frozen weights.*{of}"):
            room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=False)
        return
    room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=False)
    assert told == []


def test_hosts_by_name_alone_have_no_slow_wire(monkeypatch):
    monkeypatch.setattr(resources, "_host_memory", lambda: 1 << 40)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    room.refuse_frozen_weights_on_a_slow_wire(
        asked(**LORA), WIDE, World(gather=lambda own: [own, own]), goes_on=False
    )


def test_a_wireless_interface_tells_no_speed_and_is_a_slow_one(monkeypatch, tmp_path):
    for name, more in (("wlan0", "phy80211"), ("eth0", ""), ("tun0", "")):
        (tmp_path / name / more).mkdir(parents=True)
    (tmp_path / "eth0/speed").write_text("10000\n")
    (tmp_path / "tun0/speed").write_text("-1\n")
    told = {}
    for name in ("wlan0", "eth0", "tun0", "gone", ""):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        told[name] = link.interface_speed(tmp_path)
    assert told == {"wlan0": link.WIRELESS, "eth0": 10e9, "tun0": None, "gone": None, "": None}
    assert link.WIRELESS < link.SLOW


def test_a_run_that_goes_on_with_other_hosts_is_warned(monkeypatch, capsys):
    monkeypatch.setattr(resources, "_host_memory", lambda: 1 << 40)
    monkeypatch.setattr(link, "interface_speed", lambda: 1e9)
    for attempt in (1, 2):
        later = SimpleNamespace(local_world_size=1, attempt=attempt)
        world = World(gather=lambda own: [own, own], environment=later)
        room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=True)
        assert "warning: strategy: fsdp sends the frozen weights" in capsys.readouterr().out
        # One that was refused has nothing to go on from, however often it is started.
        with pytest.raises(BadInput, match="fsdp sends the frozen weights"):
            room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=False)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_model_that_cannot_be_counted_wants_to_be_forced_on_a_slow_wire(monkeypatch, capsys, goes_on):
    monkeypatch.setattr(resources, "_host_memory", lambda: 1 << 40)
    monkeypatch.setattr(link, "interface_speed", lambda: 1e9)
    here = SimpleNamespace(local_world_size=1, attempt=1)
    world = World(gather=lambda own: [own, own], environment=here)

    def measure(*_):
        raise RuntimeError("its code wants numbers")

    monkeypatch.setattr(footprint, "measure", measure)
    if not goes_on:
        with pytest.raises(BadInput) as refusal:
            room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=False)
        said = str(refusal.value)
    else:
        room.refuse_frozen_weights_on_a_slow_wire(asked(**LORA), WIDE, world, goes_on=True)
        said = capsys.readouterr().out
    assert (
        "in every step, at 1 Gbit/s; whether ddp, which would not, has room cannot be told: its code" in said
    )


def test_more_fragments_than_parameters_are_refused_before_weights_are_loaded(monkeypatch):
    monkeypatch.setattr(resources, "_host_memory", lambda: 1)  # so little that all is counted
    keys = {"comm": "diloco", "sync_every": 500, "diloco_fragments": 400}
    with pytest.raises(BadInput, match="diloco_fragments: found 400; expected no more than"):
        room.at_once(asked(**keys), LONG, World(other=8))


def test_another_strategy_of_a_run_that_goes_on_is_asked_as_a_new_one():
    """It shall not get by a resume what it is refused at the start."""
    for settings, as_before in (({"strategy": "fsdp"}, True), ({"strategy": "ddp"}, False), ({}, True)):
        found = SimpleNamespace(manifest={"settings": settings})
        assert train._as_before(found, asked(strategy="fsdp")) == as_before
    assert not train._as_before(None, asked())


def test_a_rank_with_room_for_some_computes_so_many_at_once(monkeypatch, capsys):
    config = asked()
    monkeypatch.setattr(resources, "_host_memory", lambda: needs(config, LONG, 3) + (1 << 20))
    assert room.at_once(config, LONG, World(other=8)) == [3, 8]
    said = capsys.readouterr().out
    assert "micro_batch_size 8 needs more memory" in said and "rank 0 on desktop 3" in said
    # Where ranks must keep step, all pass evaluations as the one that can least; their shares may differ.
    world = World(other=2)
    shared = dataclasses.replace(config, strategy="zero1")
    assert train._micro_batch_size(shared, world, [3, 2]) == 2
    assert train._micro_batch_size(config, world, [3, 2]) == 3


def test_a_rank_that_keeps_step_may_compute_more_at_once_as_far_as_it_has_room(monkeypatch):
    """Of 16 sequences the other rank has one at least; 8 are set, and what nobody set must have room to spare."""
    keys = {"strategy": "zero1", "micro_batch_size": 2}
    config = asked(**keys)
    assert room._most(config, World()) == 4  # 15 in four micro-batches
    for other in ({"balance": "even"}, {"compile": True}, {"strategy": "ddp"}, {"balance": "4,12"}):
        assert room._most(asked(**{**keys, **other}), World()) == 2
    assert room._most(asked(**keys, balance="12,4"), World()) == 3  # in four micro-batches, too
    shares = work.share(asked(**keys, balance="12,4"), 2, None)
    assert shares["split"] == [12, 4] and shares["at_once"] == 3
    there = Place(2, 2, 1, torch.device("cpu"), 1, 1, 1e9)
    assert wire.passes(asked(**keys, balance="12,4"), there) == 4
    assert wire.passes(asked(**keys, balance="12,4", compile=True), there) == 6
    monkeypatch.setattr(resources, "_host_memory", lambda: 1 << 40)
    assert room.at_once(config, LONG, World(other=4)) == [4, 4]
    four = needs(config, LONG, 4, "zero1")
    for memory, size in ((1.1 * four, 3), (1.2 * four, 4)):
        monkeypatch.setattr(resources, "_host_memory", lambda memory=memory: int(memory))
        assert room.at_once(config, LONG, World(other=2)) == [size, 2]


def test_what_there_is_room_for_is_found_between_two_doublings(monkeypatch):
    """15 are asked for: 8, and not 15, have room, and so have 12, with which 12 and 4 are shares of one pass."""
    keys = {"strategy": "zero1", "micro_batch_size": 8}
    config = asked(**keys)
    assert room._most(config, World()) == 15
    for rows in (8, 11, 12, 14, 15):
        memory = int(needs(config, LONG, rows, "zero1") * room.DOUBT) + (1 << 20)
        monkeypatch.setattr(resources, "_host_memory", lambda memory=memory: memory)
        assert room.at_once(config, LONG, World(other=8)) == [rows, 8]


def test_a_model_that_cannot_be_counted_is_tried(monkeypatch):
    def refused(*_):
        raise ImportError("no such kernel here")

    monkeypatch.setattr(footprint, "measure", refused)
    monkeypatch.setattr(room, "at_most", lambda *_: None)
    assert room.at_once(asked(), LONG, World(other=None)) == [8, 9]


@pytest.mark.parametrize(
    ("strategy", "keys", "loads"),
    [
        ("ddp", {}, False),  # the copy of a checkpoint is larger
        ("ddp", {"checkpoint_async": False}, True),
        ("ddp", {"checkpoint_async": False, "comm": "diloco"}, False),
        ("zero2", {"checkpoint_async": False}, True),
        (
            "ddp",
            {"adapter": "lora", "checkpoint_async": False, "dtype": "bfloat16"},
            False,
        ),  # files that are mapped
        ("ddp", {"adapter": "lora", "checkpoint_async": False, "dtype": "float16"}, True),  # and others
        ("fsdp", {"checkpoint_async": False}, False),  # reads its part
    ],
)
def test_what_a_host_has_in_memory_before_its_gpus_have_the_model(strategy, keys, loads):
    """Eight ranks of a host read a model eight times."""
    config = asked(**keys)
    stored = copy.deepcopy(WIDE)
    stored.dtype = torch.bfloat16
    found = footprint.measure(config, stored, "cuda")
    place = Place(2, 2, 1, torch.device("cuda"), 1 << 40, 1 << 40, 1e9)
    host = budget(strategy, config, found, place, 0).host
    assert (sum(host.values()) == found.weights) == loads, host
    assert host.get("while loading", 0) == (found.weights - host["checkpoint"] if loads else 0)
