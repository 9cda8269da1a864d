"""What ranks tell of their machines when an attempt begins."""

import platform
from types import SimpleNamespace

import torch

from trainer import machine, world
from trainer.errors import BadInput

CARD = torch.device("cuda", 0)


def test_machines_that_are_alike_are_one_and_cards_are_by_rank(monkeypatch):
    monkeypatch.setattr(machine, "facts", lambda device: {"kernel": "6.1", "driver": "570.86"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    mine = []

    def gather(message):
        mine.append(message)
        big = {"card": "RTX 3090", "kernel": "6.1", "driver": "570.86"}
        return [big, {"card": "RTX 3090"}, big, {"card": "RTX 3090"}, {**big, "card": "GTX 1080"}]

    world = SimpleNamespace(
        device=CARD,
        first_on_host=True,
        gather=gather,
        firsts=[0, 2, 4],
        nodes=[0, 0, 1, 1, 2],
        hosts=["anna", "anna", "bert", "bert", "cleo"],
    )
    assert machine.machines(world) == [
        {"hosts": ["anna", "bert"], "kernel": "6.1", "driver": "570.86", "cards": ["RTX 3090"] * 2},
        {"hosts": ["cleo"], "kernel": "6.1", "driver": "570.86", "cards": ["GTX 1080"]},
    ]
    world.first_on_host = False
    machine.machines(world)
    assert mine == [{"card": "RTX 3090", "kernel": "6.1", "driver": "570.86"}, {"card": "RTX 3090"}]


def test_a_host_tells_what_it_knows_and_null_of_the_rest(monkeypatch, tmp_path):
    files = {
        "/etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n',
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nmodel name\t: AMD EPYC 7B13\n",
        "/sys/module/nvidia/version": "570.133.20\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    found = machine.facts(CARD)
    assert (found["system"], found["cpu"]) == ("Debian GNU/Linux 13 (trixie)", "AMD EPYC 7B13")
    assert found["driver"] == "570.133.20" and found["kernel"] == platform.release()
    assert machine.facts(torch.device("cpu"))["driver"] is None  # there may be one; nobody uses it
    files.clear()
    bare = machine.facts(CARD)
    assert (bare["system"], bare["driver"], bare["cpu"]) == (None, None, platform.machine())
    assert set(bare) == set(found) and bare["torch"] == torch.__version__
    monkeypatch.undo()
    assert machine._read(str(tmp_path / "none")) == ""
    assert machine.peak_bytes([torch.device("cpu")]) > 50e6


def _chosen(monkeypatch, everyone, device="auto", strategy="ddp"):
    """Each rank's devices, or what it is refused with; everyone: (node, ids of the GPUs that it sees) of each."""
    nodes, found = [node for node, *_ in everyone], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    for rank, node in enumerate(nodes):
        environment = SimpleNamespace(rank=rank, local_world_size=nodes.count(node))
        try:
            devices = world._devices(SimpleNamespace(device=device, strategy=strategy), environment, everyone)
            found.append(" ".join(map(str, devices)))
        except BadInput as error:
            found.append(str(error))
    return found


def test_each_rank_has_a_gpu_of_its_own(monkeypatch, capsys):
    a, b, c, d = "abcd"
    assert _chosen(monkeypatch, [(0, a), (1, b)]) == ["cuda:0", "cuda:0"]  # two machines
    assert _chosen(monkeypatch, [(0, a, b), (0, a, b), (1, c)]) == ["cuda:0", "cuda:1", "cuda:0"]
    assert _chosen(monkeypatch, [(0, a), (0, b)]) == ["cuda:0", "cuda:0"]  # CUDA_VISIBLE_DEVICES of each rank
    assert _chosen(monkeypatch, [(0, a, b, c, d), (0, a, b, c, d)], strategy="split") == [
        "cuda:0 cuda:1",
        "cuda:2 cuda:3",
    ]
    assert _chosen(monkeypatch, [(0,), (1,)]) == ["cpu", "cpu"]
    assert _chosen(monkeypatch, [(0, a), (1, b)], device="cpu") == ["cpu", "cpu"]
    assert capsys.readouterr().out == ""


def test_hosts_that_are_one_machine_share_its_gpus(monkeypatch, capsys):
    """As make demo's two are, which NCCL refuses on one GPU ("Duplicate GPU detected")."""
    assert _chosen(monkeypatch, [(0, "a", "b"), (1, "a", "b")]) == ["cuda:0", "cuda:1"]
    assert _chosen(monkeypatch, [(0, "a"), (1, "a")]) == ["cpu", "cpu"]
    assert "2 hosts are one machine, with 1 GPU for 2 processes" in capsys.readouterr().out
    (first, second) = _chosen(monkeypatch, [(0, "a"), (1, "a")], device="cuda")
    assert first == second and "2 processes want a GPU each" in first


def test_more_processes_than_gpus_are_refused(monkeypatch):
    assert "set nproc_per_node to 1" in _chosen(monkeypatch, [(0, "a"), (0, "a")])[1]
    assert "sees 0" in _chosen(monkeypatch, [(0,)], device="cuda")[0]
