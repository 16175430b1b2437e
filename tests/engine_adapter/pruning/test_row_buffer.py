"""Rows picked into memory that is kept."""

import torch

from faser.engine_adapter.pruning.forward import RowBuffer


def test_batches_that_grow_shrink_and_change_their_width_get_their_own_rows() -> None:
    buffer = RowBuffer()
    for rows, width in ((4, 3), (2, 3), (9, 3), (5, 8)):
        states = torch.randn(rows, width)
        index = torch.arange(rows - 1, -1, -1)
        assert torch.equal(buffer.picked(states, index), states[index])


def test_memory_is_kept_while_it_is_large_enough() -> None:
    buffer = RowBuffer()
    first = buffer.picked(torch.randn(6, 3), torch.tensor([5, 1, 2]))
    assert buffer.picked(torch.randn(4, 3), torch.tensor([0, 3])).data_ptr() == first.data_ptr()
