"""What ranks tell of their machines when an attempt begins."""

import platform
import types

import torch

from trainer import machine

CARD = torch.device("cuda", 0)


def test_machines_that_are_alike_are_one_and_cards_are_by_rank(monkeypatch):
    monkeypatch.setattr(machine, "facts", lambda device: {"kernel": "6.1", "driver": "570.86"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    mine = []

    def gather(message):
        mine.append(message)
        big = {"card": "RTX 3090", "kernel": "6.1", "driver": "570.86"}
        return [big, {"card": "RTX 3090"}, big, {"card": "RTX 3090"}, {**big, "card": "GTX 1080"}]

    world = types.SimpleNamespace(
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
