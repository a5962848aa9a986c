from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core import digests
from rl_core.errors import DigestMismatchError, VerificationError
from rl_core.metadata import TensorMeta

META = TensorMeta("a", (4,), "uint8")


@given(st.binary(), st.lists(st.integers(0, 50), max_size=5))
def test_chunks_do_not_matter(data, cuts):
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[start:end] for start, end in pairwise(edges)]
    assert digests.xxh3_128(META, *chunks) == digests.xxh3_128(META, data)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_every_single_bit_counts(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digests.xxh3_128(META, bytes(flipped)) != digests.xxh3_128(META, data)


@pytest.mark.parametrize(
    "other",
    [
        TensorMeta("b", (4,), "uint8"),
        TensorMeta("a", (2, 2), "uint8"),
        TensorMeta("a", (4,), "int8"),
    ],
)
def test_bound_to_name_shape_and_dtype(other):
    assert digests.xxh3_128(META, b"1234") != digests.xxh3_128(other, b"1234")


@pytest.mark.parametrize("text", ["", "xxh3-128", "xxh3-128:", "md5:abc", "wsum64"])
def test_what_is_not_a_digest_is_refused(text):
    with pytest.raises(VerificationError, match="not a digest"):
        digests.kind_of(text)


def test_kinds_are_never_compared():
    with pytest.raises(VerificationError, match="different kinds"):
        digests.same("xxh3-128:00", "wsum64:00")
    with pytest.raises(VerificationError, match="different kinds"):
        digests.check("a", "xxh3-128:00", "wsum64:00")
    with pytest.raises(VerificationError, match="different kinds"):
        digests.digest_of_digests({"a": "xxh3-128:00", "b": "wsum64:00"})


def test_a_difference_names_the_tensor():
    digests.check("a", "wsum64:00", "wsum64:00")
    with pytest.raises(DigestMismatchError, match="'a'") as caught:
        digests.check("a", "wsum64:00", "wsum64:01")
    assert caught.value.tensors == ("a",)


values = st.dictionaries(st.text(max_size=8), st.integers(0, 9).map("wsum64:{}".format))


@given(values, values)
def test_digest_of_digests_tells_sets_apart(left, right):
    same = digests.digest_of_digests(left) == digests.digest_of_digests(right)
    assert same == (left == right)


@given(values)
def test_digest_of_digests_ignores_the_order_of_the_stream(found):
    backward = dict(reversed(found.items()))
    assert digests.digest_of_digests(backward) == digests.digest_of_digests(found)
