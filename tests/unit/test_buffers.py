"""Memory that is lent: nobody has it twice, and it comes back when the last tensor that has it is gone."""

import pytest
import torch

from trainer import buffers

COUNT = buffers.SMALL // 4


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(buffers, "_free", {})


def test_it_is_lent_again_once_no_view_of_it_is_left():
    first = buffers.lend(2 * COUNT, torch.float32)
    place, view = first.data_ptr(), first[5:7]
    view.fill_(3)
    del first
    second = buffers.lend(2 * COUNT, torch.float32)
    assert second.data_ptr() != place
    second.fill_(4)
    assert view.tolist() == [3, 3]
    del view
    assert buffers.lend(COUNT, torch.int32).data_ptr() == place  # of what fits


def test_the_smallest_that_fits_is_lent():
    large, small = buffers.lend(4 * COUNT, torch.float32), buffers.lend(2 * COUNT, torch.float32)
    places = large.data_ptr(), small.data_ptr()
    del large, small
    kept = [buffers.lend(count, torch.bfloat16) for count in (3 * COUNT, 3 * COUNT, 3 * COUNT)]
    assert [one.data_ptr() for one in kept[:2]] == [places[1], places[0]]
    assert (
        kept[2].data_ptr() not in places and kept[2].shape == (3 * COUNT,) and kept[2].dtype == torch.bfloat16
    )


def test_what_is_small_is_nobodys_to_keep():
    assert buffers.lend(0, torch.float32).shape == (0,)
    del (small := [buffers.lend(COUNT - 1, torch.float32)])[:]
    assert not buffers._free and not small
