import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rl_core.errors import ManifestMismatchError
from rl_core.metadata import DTYPE_BYTES, Manifest, ManifestCheck, TensorMeta, Trailer, nearest
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion

VERSION = PolicyVersion(1, 0)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
metas = st.builds(
    TensorMeta,
    name=names,
    shape=shapes,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    source_dtype=st.none() | st.just("float32"),
    target=st.sampled_from(["policy", "draft"]),
    quantisation=st.none() | st.just("fp8"),
)
tensor_lists = st.lists(metas, max_size=6, unique_by=lambda meta: meta.name)
manifests = st.builds(
    Manifest, st.just(VERSION), tensor_lists.map(tuple), st.sampled_from(["", "run"])
)


def some(count=3):
    return [TensorMeta(f"layers.{index}.weight", (2, index), "float32") for index in range(count)]


@given(metas)
def test_sizes(meta):
    count = 1
    for size in meta.shape:
        count *= size
    assert meta.numel == count
    assert meta.nbytes == count * DTYPE_BYTES[meta.dtype]


def test_a_scalar_has_one_element():
    assert TensorMeta("scale", (), "bfloat16").nbytes == 2


@pytest.mark.parametrize(("shape", "dtype"), [((1,), "complex64"), ((2, -1), "int8")])
def test_what_cannot_travel_is_refused_by_name(shape, dtype):
    with pytest.raises(ManifestMismatchError, match="'odd'"):
        TensorMeta("odd", shape, dtype)


@given(manifests)
def test_a_manifest_crosses_the_wire(manifest):
    data = msgspec.msgpack.encode(manifest)
    copy = msgspec.msgpack.decode(data, type=Manifest)
    assert copy == manifest
    assert copy.structure_hash == manifest.structure_hash
    copy.check_same_structure(manifest)


@given(tensor_lists, st.data())
def test_every_field_is_part_of_the_structure(tensors, data):
    assume(tensors)
    index = data.draw(st.integers(0, len(tensors) - 1))
    changed = data.draw(metas.filter(lambda meta: meta != tensors[index]))
    others = [*tensors[:index], changed, *tensors[index + 1 :]]
    assume(len({meta.name for meta in others}) == len(others))
    left, right = Manifest(VERSION, tuple(tensors)), Manifest(VERSION, tuple(others))
    assert left.structure_hash != right.structure_hash
    with pytest.raises(ManifestMismatchError) as caught:
        left.check_same_structure(right)
    assert repr(tensors[index].name) in str(caught.value)


@given(manifests)
def test_version_and_run_are_no_part_of_the_structure(manifest):
    other = Manifest(PolicyVersion(2, 3), manifest.tensors, "another run")
    assert other.structure_hash == manifest.structure_hash


@given(tensor_lists)
def test_order_is_part_of_the_structure(tensors):
    assume(len(tensors) > 1)
    left, right = Manifest(VERSION, tuple(tensors)), Manifest(VERSION, tuple(tensors[::-1]))
    with pytest.raises(ManifestMismatchError, match="differ at tensor"):
        left.check_same_structure(right)


def test_a_longer_manifest_differs_in_length():
    left, right = Manifest(VERSION, tuple(some(2))), Manifest(VERSION, tuple(some(3)))
    with pytest.raises(ManifestMismatchError, match="2 against 3 tensors"):
        left.check_same_structure(right)


def test_a_name_appears_once_as_a_name_or_as_an_alias():
    embed = TensorMeta("embed", (2,), "int8", aliases=("head",))
    with pytest.raises(ManifestMismatchError, match="'head' appears twice"):
        Manifest(VERSION, (embed, TensorMeta("head", (2,), "int8")))
    assert set(Manifest(VERSION, (embed,)).by_name) == {"embed"}


@given(tensor_lists, st.randoms())
def test_a_complete_stream_in_any_order_passes(tensors, rng):
    manifest = Manifest(VERSION, tuple(tensors))
    check = ManifestCheck(manifest)
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    for meta in shuffled:
        check.see(meta)
    trailer = check.close()
    assert trailer == Trailer(VERSION, len(tensors), manifest.nbytes)
    trailer.check(manifest)


@given(tensor_lists, st.data())
def test_whatever_is_missing_is_named(tensors, data):
    assume(tensors)
    missing = data.draw(st.sampled_from(tensors))
    check = ManifestCheck(Manifest(VERSION, tuple(tensors)))
    for meta in tensors:
        if meta != missing:
            check.see(meta)
    with pytest.raises(ManifestMismatchError) as caught:
        check.close()
    assert repr(missing.name) in str(caught.value)
    assert caught.value.counts == TensorCounts(missing=1)


@given(tensor_lists, st.data())
def test_whatever_is_repeated_is_named(tensors, data):
    assume(tensors)
    check = ManifestCheck(Manifest(VERSION, tuple(tensors)))
    for meta in tensors:
        check.see(meta)
    repeated = data.draw(st.sampled_from(tensors))
    with pytest.raises(ManifestMismatchError, match="twice") as caught:
        check.see(repeated)
    assert repr(repeated.name) in str(caught.value)
    assert caught.value.counts == TensorCounts(unexpected=1)


def test_an_unknown_name_is_told_with_the_nearest():
    check = ManifestCheck(Manifest(VERSION, tuple(some())))
    with pytest.raises(ManifestMismatchError, match=r"'layer\.1\.weight'.*'layers\.1\.weight'"):
        check.see(TensorMeta("layer.1.weight", (2, 1), "float32"))
    with pytest.raises(ManifestMismatchError, match="None"):
        ManifestCheck(Manifest(VERSION, ())).see(some()[0])


@pytest.mark.parametrize(("shape", "dtype"), [((1, 2), "float32"), ((2, 1), "float16")])
def test_another_shape_or_dtype_is_told_with_the_name(shape, dtype):
    check = ManifestCheck(Manifest(VERSION, tuple(some())))
    with pytest.raises(ManifestMismatchError, match=r"layers\.1\.weight") as caught:
        check.see(TensorMeta("layers.1.weight", shape, dtype))
    assert caught.value.counts == TensorCounts(mismatched=1)


@pytest.mark.parametrize(
    "trailer",
    [Trailer(PolicyVersion(1, 1), 3, 24), Trailer(VERSION, 2, 24), Trailer(VERSION, 3, 23)],
)
def test_a_short_or_foreign_stream_is_refused(trailer):
    manifest = Manifest(VERSION, tuple(some()))
    assert manifest.nbytes == 24
    with pytest.raises(ManifestMismatchError, match="announced"):
        trailer.check(manifest)


def test_unknown_fields_are_refused():
    with pytest.raises(msgspec.ValidationError, match="extra"):
        msgspec.convert({"name": "a", "shape": [1], "dtype": "int8", "extra": 1}, TensorMeta)


@given(names, st.lists(names, min_size=1))
def test_nearest_is_one_of_the_known(name, known):
    assert nearest(name, known) in known
    assert nearest(name, [*known, name]) == name
    assert nearest(name, []) is None
