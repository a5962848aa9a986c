"""Single tensors of single ranks, byte by byte: the same that the digests are of."""

import pytest
import torch

from rl_core.layout import Constant, LayoutSpec, Parameter, Part, Rotary
from rl_core.metadata import Manifest, TensorMeta
from rl_core.rollout.expected_content import ExpectedContent
from rl_core.rollout.expected_digests import RankLayouts, expected_digests
from rl_core.torch import content_digest, from_bytes, meta_of
from rl_core.versions import PolicyVersion

SPEC = LayoutSpec(
    "test",
    "Test",
    "cpu",
    "bfloat16",
    2,
    2,
    (
        Parameter("embed", (Part("embed", "vocabulary"),), pad=8),
        Parameter(
            "l.{layer}.qkv",
            (Part("l.{layer}.q", "rows"), Part("l.{layer}.k", "kv_heads")),
        ),
        Parameter("l.{layer}.o", (Part("l.{layer}.o", "columns"),)),
        Parameter("norm", (Part("norm"),)),
    ),
    (
        Constant("l.{layer}.scale", 1.0, (), "float32"),
        Rotary("l.{layer}.rope", 4, 6, 10000.0, "float32", layers=(1,)),
    ),
)
SHAPES = {"embed": (10, 4), "norm": (4,)} | {
    f"l.{layer}.{part}": shape
    for layer in range(2)
    for part, shape in (("q", (16, 4)), ("k", (8, 4)), ("o", (4, 16)))
}
TENSORS = {name: torch.randn(shape) for name, shape in SHAPES.items()}
MANIFEST = Manifest(PolicyVersion(1, 0), tuple(meta_of(n, t) for n, t in TENSORS.items()))


def contents(tp_size, limit=1 << 20):
    layouts = RankLayouts(SPEC, MANIFEST, range(tp_size), tp_size)
    stream = ((meta, TENSORS[meta.name]) for meta in MANIFEST.tensors)
    expected = expected_digests(stream, MANIFEST, SPEC, range(tp_size), tp_size)
    wanted = [(one.tp_rank, name) for one in expected for name in one.tensors]
    content = ExpectedContent(layouts, [*wanted, (0, "unknown")], limit)
    for name, tensor in TENSORS.items():
        content.see(name, scratch := tensor.clone())
        scratch.zero_()  # a tensor is valid until the next one only
    return expected, content.finish()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_bytes_are_those_of_the_digests(tp_size):
    expected, found = contents(tp_size)
    assert found.keys() == {(one.tp_rank, name) for one in expected for name in one.tensors}
    for one in expected:
        for name, held in one.tensors.items():
            meta = TensorMeta(name, held.shape, held.dtype)
            data = torch.frombuffer(bytearray(found[one.tp_rank, name]), dtype=torch.uint8)
            assert held.digest == content_digest(meta, from_bytes(data, meta), "wsum64")


def test_no_more_is_given_than_was_asked_for():
    _, found = contents(1, limit=7)
    assert {len(data) for data in found.values()} == {7, 4}


def test_what_a_rank_takes_of_each_part_is_said_as_an_index():
    expected, _ = contents(2)
    slices = [
        {name: held.slices for name, held in one.tensors.items() if held.slices} for one in expected
    ]
    assert slices[1] == {
        "embed": ("embed[8:10]",),
        "l.0.qkv": ("l.0.q[8:16]", "l.0.k[4:8]"),
        "l.1.qkv": ("l.1.q[8:16]", "l.1.k[4:8]"),
        "l.0.o": ("l.0.o[:, 8:16]",),
        "l.1.o": ("l.1.o[:, 8:16]",),
        "norm": ("norm",),
    }
    assert slices[0]["embed"] == ("embed[0:8]",)
    assert slices[0]["l.1.o"] == ("l.1.o[:, 0:8]",)


def test_layouts_are_made_for_one_structure():
    layouts = RankLayouts(SPEC, MANIFEST, [0], 1)
    later = Manifest(PolicyVersion(1, 5), MANIFEST.tensors, "another run")
    assert layouts.fit(later)
    assert not layouts.fit(Manifest(PolicyVersion(1, 5), MANIFEST.tensors[:-1]))
