import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.first_difference import first_difference
from rl_core.interfaces import LiveContent
from rl_core.torch import as_bytes, dtype_name

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def shown(tensor, piece):
    """The tensor in pieces, as an engine shows it."""
    data = bytes(as_bytes(tensor).tolist())
    kind = tuple(tensor.shape), dtype_name(tensor.dtype)
    return lambda start: LiveContent(*kind, data[start : start + piece])


@given(
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.floats(0, 0.999),
    st.integers(0, 7),
)
def test_it_is_the_element_of_the_first_byte_that_differs(shape, dtype, piece, position, bit):
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape)
    data = as_bytes(tensor)
    found = first_difference(
        bytes(data.tolist()), tuple(shape), dtype_name(dtype), shown(tensor, piece)
    )
    assert found is None
    changed = tensor.clone()
    place = int(position * data.numel())
    for byte in {place, data.numel() - 1}:  # a later one changes nothing
        as_bytes(changed)[byte] ^= 1 << bit
    args = tuple(shape), dtype_name(dtype), shown(changed, piece)
    expected = torch.unravel_index(torch.tensor(place // tensor.element_size()), tensor.shape)
    assert first_difference(bytes(data.tolist()), *args) == tuple(int(i) for i in expected)


def test_tensors_of_another_kind_are_not_compared():
    tensor = torch.zeros(2, 3)
    data = bytes(as_bytes(tensor).tolist())
    assert first_difference(data, (3, 2), "float32", shown(tensor + 1, 99)) is None
    assert first_difference(data, (2, 3), "int32", shown(tensor + 1, 99)) is None
    assert first_difference(data, (2, 3), "float32", shown(tensor + 1, 99)) == (0, 0)
