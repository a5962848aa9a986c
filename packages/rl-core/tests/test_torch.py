import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import digests
from rl_core.errors import ManifestMismatchError
from rl_core.metadata import DTYPE_BYTES, TensorMeta
from rl_core.torch import (
    _CHUNK,
    _HORNER,
    _weights,
    as_bytes,
    content_digest,
    dtype_name,
    dtype_of,
    from_bytes,
    meta_of,
    wsum64,
)

KINDS = digests.KINDS
DTYPES = sorted(DTYPE_BYTES)
SHAPES = [(), (0,), (1,), (3,), (8,), (5, 7), (2, 0, 3), (2, 3, 5)]


def filled(shape, dtype, seed=0):
    """A tensor of any dtype with random bytes (booleans stay 0 or 1)."""
    meta = TensorMeta("x", shape, dtype)
    high = 2 if dtype == "bool" else 256
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(high, (meta.nbytes,), dtype=torch.uint8, generator=generator)
    return from_bytes(data, meta)


def data_of(content):
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names_round_trip(dtype):
    assert dtype_name(dtype_of(dtype)) == dtype
    assert torch.empty(0, dtype=dtype_of(dtype)).element_size() == DTYPE_BYTES[dtype]


def test_unknown_dtypes_are_refused():
    with pytest.raises(ManifestMismatchError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ManifestMismatchError, match="float7"):
        dtype_of("float7")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_round_trip(shape, dtype):
    tensor = filled(shape, dtype)
    meta = meta_of("x", tensor)
    assert meta == TensorMeta("x", shape, dtype)
    data = as_bytes(tensor)
    assert (data.dtype, data.shape) == (torch.uint8, (meta.nbytes,))
    copy = from_bytes(data.clone(), meta)
    assert (copy.dtype, tuple(copy.shape)) == (tensor.dtype, shape)
    assert torch.equal(as_bytes(copy), data)


def test_contiguous_tensors_share_their_bytes():
    tensor = torch.zeros(4)
    as_bytes(tensor)[:] = 255
    assert tensor.isnan().all()


def test_strided_tensors_are_taken_in_row_major_order():
    tensor = torch.arange(12.0).view(3, 4)
    assert torch.equal(as_bytes(tensor.t()), as_bytes(tensor.t().contiguous()))
    assert torch.equal(as_bytes(tensor[:, 1::2]), as_bytes(tensor[:, 1::2].contiguous()))


@pytest.mark.parametrize("size", [7, 9])
def test_a_slot_of_another_size_is_refused(size):
    with pytest.raises(ManifestMismatchError, match="'x' needs 8 bytes"):
        from_bytes(torch.zeros(size, dtype=torch.uint8), TensorMeta("x", (2,), "float32"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_content_has_equal_digests(kind, shape, dtype):
    tensor = filled(shape, dtype)
    meta = meta_of("x", tensor)
    digest = content_digest(meta, tensor, kind)
    assert digests.kind_of(digest) == kind
    assert content_digest(meta, tensor.clone(), kind) == digest
    unaligned = torch.empty(meta.nbytes + 9, dtype=torch.uint8)[1 : 1 + meta.nbytes]
    unaligned.copy_(as_bytes(tensor))
    if DTYPE_BYTES[dtype] == 1:
        assert content_digest(meta, from_bytes(unaligned, meta), kind) == digest


@pytest.mark.parametrize("kind", KINDS)
def test_digest_of_a_strided_tensor_is_that_of_its_values(kind):
    tensor = torch.randn(6, 8)
    for view in (tensor.t(), tensor[:, ::2], tensor[1:4, 3:], tensor.expand(2, 6, 8)):
        meta = meta_of("x", view)
        assert content_digest(meta, view, kind) == content_digest(meta, view.contiguous(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_bound_to_name_shape_and_dtype(kind):
    data = torch.arange(64, dtype=torch.uint8)
    found = {
        content_digest(meta, from_bytes(data, meta), kind)
        for meta in [
            TensorMeta("a", (16,), "float32"),
            TensorMeta("b", (16,), "float32"),
            TensorMeta("a", (4, 4), "float32"),
            TensorMeta("a", (16,), "int32"),
            TensorMeta("a", (1, 16), "float32"),
        ]
    }
    assert len(found) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_two_tensors_of_one_shape_swapped_are_noticed(kind):
    first, second = torch.randn(8), torch.randn(8)
    good = {"a": first, "b": second}
    bad = {"a": second, "b": first}
    left, right = (
        {name: content_digest(meta_of(name, value), value, kind) for name, value in values.items()}
        for values in (good, bad)
    )
    left, right = digests.digest_of_digests(left), digests.digest_of_digests(right)
    assert left != right


def test_metadata_must_be_the_tensors_own():
    with pytest.raises(ManifestMismatchError, match="'x'"):
        content_digest(TensorMeta("x", (2, 2), "float32"), torch.zeros(4))
    with pytest.raises(ManifestMismatchError, match="'x'"):
        content_digest(TensorMeta("x", (4,), "int32"), torch.zeros(4))


# -- wsum64


@given(st.binary(min_size=1, max_size=80), st.data())
def test_every_single_bit_flip_is_found(content, data):
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert wsum64(data_of(flipped)) != wsum64(data_of(content))


@given(st.binary(max_size=40), st.integers(1, 20))
def test_trailing_zeros_count(content, zeros):
    assert wsum64(data_of(content + bytes(zeros))) != wsum64(data_of(content))


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=8, unique=True), st.data())
def test_swapped_words_are_found(words, data):
    left, right = data.draw(
        st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True)
    )
    swapped = list(words)
    swapped[left], swapped[right] = words[right], words[left]
    assert wsum64(data_of(b"".join(swapped))) != wsum64(data_of(b"".join(words)))


@given(st.binary(max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_seeds_tell_names_apart(content, left, right):
    same = wsum64(data_of(content), left) == wsum64(data_of(content), right)
    assert same == (left == right)


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=100), st.integers(0, 15))
def test_position_in_memory_does_not_matter(content, offset):
    buffer = torch.zeros(len(content) + 16, dtype=torch.uint8)
    view = buffer[offset : offset + len(content)]
    view.copy_(data_of(content))
    assert wsum64(view) == wsum64(data_of(content))


WEIGHTS = _weights("cpu").tolist()


def plain_wsum64(data, seed=0):
    """The definition, in Python's integers."""
    content = bytes(data.tolist()) + bytes(-data.numel() % 8)
    total = seed
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
    for start in range(0, max(1, len(words)), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total = total * _HORNER + sum(w * c for w, c in zip(WEIGHTS, chunk, strict=False))
    return (total * _HORNER + data.numel()) % 2**64


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_wsum64_is_what_its_docstring_says(content, seed):
    assert wsum64(data_of(content), seed) == plain_wsum64(data_of(content), seed)


@pytest.fixture(scope="module")
def several_chunks():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        256, (2 * _CHUNK * 8 + 8 * 1000 + 3,), dtype=torch.uint8, generator=generator
    )


def test_swapped_chunks_are_found(several_chunks):
    size = _CHUNK * 8
    swapped = several_chunks.clone()
    swapped[:size], swapped[size : 2 * size] = (
        several_chunks[size : 2 * size],
        several_chunks[:size],
    )
    assert wsum64(swapped) != wsum64(several_chunks)


@pytest.mark.parametrize("place", [0, 1, -1, _CHUNK * 8, _CHUNK * 8 - 1, 2 * _CHUNK * 8 + 5])
def test_bit_flips_are_found_in_every_chunk(several_chunks, place):
    flipped = several_chunks.clone()
    flipped[place] ^= 128
    assert wsum64(flipped) != wsum64(several_chunks)


def test_the_number_of_threads_does_not_matter(several_chunks):
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.add(wsum64(several_chunks))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_wsum64_never_changes():
    """Both ends of a transfer may run different versions of this package."""
    assert wsum64(torch.arange(100, dtype=torch.uint8), 7) == WSUM64_OF_100_BYTES


WSUM64_OF_100_BYTES = 17703896560265773107
