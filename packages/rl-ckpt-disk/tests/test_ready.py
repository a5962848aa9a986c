import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_disk.ready import Marker
from rl_core.errors import ManifestMismatchError, MessageError
from rl_core.metadata import Manifest, TensorMeta, Trailer
from rl_core.versions import PolicyVersion

KEY = b"k" * 32
METAS = (TensorMeta("a", (2, 3), "bfloat16", aliases=("b",)), TensorMeta("c", (), "float32"))
MANIFEST = Manifest(PolicyVersion(1, 2), METAS, "run")
TRAILER = Trailer(MANIFEST.version, 2, MANIFEST.nbytes, "xxh3-128:00")
MARKER = Marker(MANIFEST, MANIFEST.structure_hash, TRAILER, 100, {"a": "xxh3-128:01"}, {"f": 3})


def test_a_marker_survives_the_file():
    assert Marker.decode(MARKER.encode(KEY), KEY) == MARKER
    MARKER.check(MANIFEST, TRAILER)


def test_a_marker_of_another_key_is_refused():
    with pytest.raises(MessageError, match="key of this run"):
        Marker.decode(MARKER.encode(KEY), b"x" * 32)


@given(st.data())
def test_no_changed_byte_is_accepted(data):
    content = bytearray(MARKER.encode(KEY))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageError):
        Marker.decode(bytes(content), KEY)


@given(st.binary(max_size=200))
def test_garbage_is_refused(content):
    with pytest.raises(MessageError):
        Marker.decode(content, KEY)


@pytest.mark.parametrize(
    ("expected", "trailer", "said"),
    [
        (msgspec.structs.replace(MANIFEST, version=PolicyVersion(1, 3)), None, "e1.s3"),
        (msgspec.structs.replace(MANIFEST, run_id="other"), None, "other"),
        (msgspec.structs.replace(MANIFEST, tensors=METAS[:1]), None, "length"),
        (MANIFEST, msgspec.structs.replace(TRAILER, weights_digest="xxh3-128:99"), "99"),
        (MANIFEST, msgspec.structs.replace(TRAILER, tensors=1), r"\(e1\.s2, 1, 16\)"),
    ],
)
def test_a_marker_that_is_not_the_expected_one(expected, trailer, said):
    with pytest.raises(ManifestMismatchError, match=said):
        MARKER.check(expected, trailer)


def test_a_marker_of_another_format():
    with pytest.raises(ManifestMismatchError, match="format 2"):
        msgspec.structs.replace(MARKER, format=2).check(MANIFEST)
