"""Dropped pages read as zeros, whatever the alignment."""

import pytest
import torch

from rl_core.rollout.zero_pages import zero


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 70_001, 1 << 26])
def test_every_byte_is_zero_and_neighbours_are_not(nbytes):
    others = [torch.full((100,), 7, dtype=torch.uint8) for _ in range(20)]
    tensor = torch.full((nbytes,), 255, dtype=torch.uint8)
    zero(tensor.untyped_storage())
    assert not tensor.any()
    assert all(bool((other == 7).all()) for other in others)
    tensor.fill_(1)
    assert tensor.all()


def test_an_empty_storage_is_left_alone():
    zero(torch.empty(0).untyped_storage())
