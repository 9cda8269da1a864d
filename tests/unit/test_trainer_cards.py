"""What torch sees of a host's GPUs, and which of them a build and a configuration can compute on. No card is here."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from trainer import cards, config, errors, optim, world

# As torch's builds for CUDA 12.6, 12.8 and 13.0 name what they are for.
OLD = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
NEW = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def card(monkeypatch):
    """`card(capability, built)`: what torch says of the one card that there is."""

    def make(capability, built):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080 Ti")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
        return [torch.device("cuda", 0)]

    return make


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((6, 1), OLD, True),  # by sm_60
        ((6, 1), NEW, False),
        ((7, 0), NEW, False),
        ((8, 9), NEW, True),  # an RTX 4090, by sm_86
        ((12, 0), OLD, False),
        ((12, 1), NEW, True),
        ((13, 0), NEW, True),  # by portable code
        ((9, 0), ["sm_90a"], False),
        ((9, 0), [], True),  # nothing is known
    ],
)
def test_a_card_without_kernels_in_the_build_is_refused_by_name(card, capability, built, runs):
    devices, settings = card(capability, built), config.load()
    if runs:
        return cards.check(settings, devices)
    with pytest.raises(errors.BadInput, match=r"no kernels for the GTX 1080 Ti \(compute capability"):
        cards.check(settings, devices)
    cards.check(settings, [torch.device("cpu")])


def test_bfloat16_is_refused_where_it_would_be_emulated(card):
    wanted = config.load(overrides=["dtype=bfloat16"])
    with pytest.raises(errors.BadInput, match=r"has no bfloat16.*Set dtype to float16"):
        cards.check(wanted, card((7, 5), NEW))
    cards.check(wanted, card((8, 0), NEW))
    cards.check(config.load(overrides=["dtype=float16"]), card((7, 5), NEW))


def test_cards_that_the_driver_has_and_torch_does_not_see(monkeypatch, tmp_path):
    """torch says why in a warning, which nobody reads, and computes on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cards, "DRIVER", tmp_path)
    monkeypatch.setattr(cards, "CONTAINER", ())

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nSee there")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    auto = config.load()
    assert cards.unseen(auto) == ""
    (tmp_path / "0000:01:00.0").mkdir()
    why = cards.unseen(auto)
    assert "an NVIDIA card, of which torch" in why and why.endswith("too old (found version 12020).")
    assert cards.unseen(config.load(overrides=["device=cpu"])) == ""
    monkeypatch.setenv("TRAINYARD_STORE", "http://10.0.0.1:2389")
    with pytest.raises(errors.BadInput, match=r"too old.*set device to cpu"):
        world._idle_cards(auto, True)
    assert "too old" in world._idle_cards(auto, False)  # for who plans
    why = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    with monkeypatch.context() as patch:
        patch.setattr(cards, "unseen", lambda _: why)
        with pytest.raises(errors.BadInput, match=r"802.*systemctl status nvidia-fabricmanager"):
            world._idle_cards(auto, True)
    monkeypatch.setenv("TRAINYARD_STORE", "/tmp/store")  # nodes of one machine, as make demo's
    assert "too old" in world._idle_cards(auto, True)
    inside = tmp_path / "container"
    inside.touch()
    monkeypatch.setattr(cards, "CONTAINER", (inside,))
    monkeypatch.setattr(cards, "NODES", tmp_path)
    assert world._idle_cards(auto, True) == ""  # which was given none
    (tmp_path / "nvidia0").touch()
    assert "an NVIDIA card" in world._idle_cards(auto, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert world._idle_cards(auto, True) == ""


def ranks():
    return SimpleNamespace(rank=1, device="cuda:1", environment=SimpleNamespace(host="node2"), addresses={})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            torch.distributed.DistBackendError(
                "NCCL error: ncclUnhandledCudaError … Cuda failure 2 'out of memory'"
            ),
            errors.OutOfMemory,
            "rank 1 on node2",
        ),
        (
            torch.distributed.DistBackendError("NCCL error: remote process exited"),
            errors.LostPeers,
            "lost a peer",
        ),
        (
            torch.AcceleratorError("CUDA error: the launch timed out and was terminated\nmore"),
            errors.TrainerError,
            r"rank 1 on node2 \(cuda:1\): CUDA error: the launch timed out and was terminated; the card or its driver",
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), errors.OutOfMemory, "out of memory"),
    ],
)
def test_what_a_card_says_is_told_from_a_lost_peer(error, kind, words):
    with pytest.raises(kind, match=words) as told, world.translated(ranks()):
        raise error
    assert type(told.value) is kind


def test_ranks_that_nccl_does_not_connect_end_in_time(monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(world.os, "_exit", lambda code: ended.set() or codes.append(code))
    codes = []
    monkeypatch.setattr(world.dist, "all_reduce", lambda *_, **__: ended.wait(20))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    waits = SimpleNamespace(**vars(ranks()), _timeout=world.datetime.timedelta(seconds=0.2))
    waits.device = "cpu"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth1")
    world.World._meet(waits, None)
    assert codes == [errors.LostPeers.code]
    assert "did not connect the ranks within 0 s (interface: =eth1)" in capsys.readouterr().out
    codes.clear()
    monkeypatch.setattr(world.dist, "all_reduce", lambda *_, **__: None)
    world.World._meet(waits, None)
    assert not ended.wait(0) or codes == []


def test_a_part_without_rows_is_no_business_of_bitsandbytes():
    """Its kernels for cards end the process at it."""
    parts = [torch.nn.Parameter(torch.ones(4, 8)), torch.nn.Parameter(torch.ones(0, 8))]
    made = optim.adamw(dict(zip("ab", parts, strict=True)), config.load(overrides=["optimizer=adamw_8bit"]))
    assert [list(map(len, group["params"])) for group in made.param_groups] == [[4]]
    parts[0].grad = torch.ones(4, 8)
    made.step()
    told = optim.state(made, parts[1])
    assert told["step"] == optim.state(made, parts[0])["step"] == 1
    optim.restore(made, parts[1], 3.0, told["exp_avg"], told["exp_avg_sq"])
    assert parts[1] not in made.state


def test_hidden_cards_are_not_missed(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "-1")
    assert cards.unseen(config.load()) == ""
