"""Errors keep their meaning on the way from a worker; what is wrong with a tensor is found."""

import pytest
import torch

from rl_core import errors
from rl_core.digests import WSUM64, XXH3_128
from rl_core.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    MiniRLError,
    VerificationError,
)
from rl_core.metadata import Manifest, TensorMeta
from rl_core.remote_errors import from_wire, to_wire
from rl_core.rollout.bucket_receiver import Arrival
from rl_core.rollout.protocol import WorkerError
from rl_core.rollout.weight_checks import ArrivalChecks, check_supported, finite
from rl_core.tensor_counts import TensorCounts
from rl_core.torch import content_digest, meta_of
from rl_core.versions import PolicyVersion

V1 = PolicyVersion(1, 1)

ERRORS = [
    kind
    for _, kind in sorted(vars(errors).items())
    if isinstance(kind, type) and issubclass(kind, MiniRLError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_the_way_from_the_worker(kind):
    again = WorkerError.of(kind("what happened")).rebuild()
    assert type(again) is kind
    assert str(again) == "what happened"


def test_a_digest_mismatch_keeps_its_tensors():
    error = DigestMismatchError("differs", ["a", "b"])
    error.counting(TensorCounts(matched=5))
    again = WorkerError.of(error).rebuild()
    assert again.tensors == ("a", "b")
    assert again.counts == TensorCounts(matched=5, mismatched=2)
    assert from_wire(to_wire(error)).counts == again.counts


def test_a_foreign_kind_becomes_a_sync_error():
    assert type(WorkerError("os", "x").rebuild()) is errors.WeightSyncError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_are_not_finite_are_found(dtype):
    tensor = torch.zeros(1000, dtype=dtype)
    assert finite(tensor)
    for bad in ("nan", "inf", "-inf"):
        tensor[617] = float(bad)
        assert not finite(tensor)


def test_a_sum_that_overflows_is_not_taken_for_infinity():
    assert finite(torch.full((4,), 3e38))


def test_empty_and_integer_tensors_are_finite():
    assert finite(torch.empty(0))
    assert finite(torch.tensor([1, 2]))
    assert finite(torch.zeros(3).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("kind", [XXH3_128, WSUM64])
def test_digests_are_recomputed_and_a_difference_names_the_tensor(kind):
    tensor = torch.arange(6.0)
    meta = meta_of("layer.weight", tensor)
    checks = ArrivalChecks(Manifest(V1, (meta,)), check_finite=True)
    checks.see(Arrival(meta, tensor, content_digest(meta, tensor, kind), lent=True))
    assert checks.matched == 1
    assert checks.weights_digest is not None
    wrong = content_digest(meta, tensor + 1, kind)
    with pytest.raises(DigestMismatchError, match=r"layer\.weight") as caught:
        checks.see(Arrival(meta, tensor, wrong, lent=True))
    assert caught.value.tensors == ("layer.weight",)
    # Twice the same tensor: one time too many, and that one differs.
    assert checks.so_far == TensorCounts(matched=1, mismatched=1, unexpected=1)


def test_every_tensor_is_counted_as_what_it_was():
    metas = [TensorMeta(name, (2,), "float32") for name in ("a", "b", "c", "d")]
    checks = ArrivalChecks(Manifest(V1, tuple(metas)), check_finite=False)
    tensor = torch.ones(2)
    checks.see(Arrival(metas[0], tensor, content_digest(metas[0], tensor), lent=False))
    checks.see(Arrival(metas[1], tensor, None, lent=False))
    stranger = TensorMeta("x", (2,), "float32")
    checks.see(Arrival(stranger, tensor, content_digest(stranger, tensor), lent=False))
    with pytest.raises(DigestMismatchError):
        checks.see(Arrival(metas[2], tensor, content_digest(metas[0], tensor), lent=False))
    report = checks.report({})
    assert report.counts == TensorCounts(2, 1, missing=1, unexpected=1, unverifiable=1)
    assert not report.counts.clean
    assert report.weights_digest is None
    assert checks.so_far.missing == 0


def test_a_nan_names_the_tensor_and_can_be_let_through():
    tensor = torch.tensor([1.0, float("nan")])
    arrival = Arrival(meta_of("w", tensor), tensor, None, lent=True)
    manifest = Manifest(V1, (arrival.meta,))
    with pytest.raises(VerificationError, match="'w'"):
        ArrivalChecks(manifest, check_finite=True).see(arrival)
    ArrivalChecks(manifest, check_finite=False).see(arrival)


@pytest.mark.parametrize("extra", [{"target": "draft"}, {"quantisation": "fp8"}])
def test_what_cannot_be_loaded_is_refused_before_the_stream(extra):
    manifest = Manifest(V1, (TensorMeta("w", (2,), "float32", **extra),))
    with pytest.raises(ManifestMismatchError, match="'w'"):
        check_supported(manifest)
