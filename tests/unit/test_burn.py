"""trainer burn, on this machine's processors: the same code that loads cards."""

import json

import pytest
import torch

from trainer.commands import burn
from trainer.errors import BadInput

CPU = torch.device("cpu")


def test_a_device_that_computes_right_has_a_speed_and_no_fault(capsys, monkeypatch):
    monkeypatch.setitem(burn.SIDE, "cpu", 64)
    assert burn.main("cpu", "auto", 0.1 / 60) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["device"], found["dtype"], found["wrong"], found["error"]) == (
        *("cpu (processors)", "float32"),
        *(0, ""),
    )
    assert found["products"] >= burn.ON_CPU and found["products"] % burn.ON_CPU == 0
    assert found["first"] > 0 and found["last"] > 0


@pytest.mark.parametrize(("bad_call", "wrong"), [(6, 1), (1, None)])
def test_one_wrong_bit_is_found(monkeypatch, bad_call, wrong):
    """Of a later product that one; of the first one all that come after it."""
    monkeypatch.setitem(burn.SIDE, "cpu", 64)
    calls, true_product = [], torch.matmul

    def product(one, other, out):
        calls.append(1)
        true_product(one, other, out=out)
        if len(calls) == bad_call:
            out.view(torch.int32)[3, 5] ^= 1
        return out

    monkeypatch.setattr(torch, "matmul", product)
    found = burn.burn(CPU, "float32", 0.05)
    assert found["wrong"] == (wrong or found["products"])


def test_what_a_card_answers_that_fails_is_kept_with_what_came_before(monkeypatch):
    monkeypatch.setitem(burn.SIDE, "cpu", 64)
    calls, true_product = [], torch.matmul

    def product(one, other, out):
        calls.append(1)
        if len(calls) == burn.ON_CPU + 5:
            raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")
        return true_product(one, other, out=out)

    monkeypatch.setattr(torch, "matmul", product)
    found = burn.burn(CPU, "bfloat16", 60)
    assert found["error"] == "CUDA error: an illegal instruction was encountered"
    assert (found["products"], found["wrong"], found["dtype"]) == (burn.ON_CPU, 0, "bfloat16")


def test_speeds_are_those_of_the_first_and_the_last_turns():
    ends = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]  # a second each, and then two
    assert burn.turns(ends, 0.0, 4.0) == 1.0
    assert burn.turns(ends, 4.0, 10.0) == 0.5
    assert burn.turns([90.0], 45.0, 90.0) == burn.turns([90.0], 0.0, 90.0) == 1 / 90


def test_a_card_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match=r"sees no GPU; set device to cpu"):
        burn.main("cuda", "auto", 1)
