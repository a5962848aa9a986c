"""Requests, completions and errors keep their meaning on the way through the engine."""

from types import SimpleNamespace

import pytest
import torch

from rl_core import errors
from rl_core.digests import WSUM64, XXH3_128
from rl_core.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    MiniRLError,
    RolloutError,
    VerificationError,
)
from rl_core.metadata import Manifest, TensorMeta
from rl_core.torch import content_digest, meta_of
from rl_core.trajectory import GenerateRequest, SamplingParams, VersionSpan
from rl_core.versions import PolicyVersion
from rl_rollout_vllm.bucket_receiver import Arrival
from rl_rollout_vllm.protocol import WorkerError
from rl_rollout_vllm.trajectories import completion_of, sampling_arguments
from rl_rollout_vllm.weight_checks import ArrivalChecks, check_supported, finite

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def all_errors(kind=MiniRLError):
    for child in kind.__subclasses__():
        yield child
        yield from all_errors(child)


@pytest.mark.parametrize("kind", sorted(all_errors(), key=lambda kind: kind.__name__))
def test_every_error_survives_the_way_from_the_worker(kind):
    again = WorkerError.of(kind("what happened")).rebuild()
    assert type(again) is kind
    assert str(again) == "what happened"


def test_a_digest_mismatch_keeps_its_tensors():
    error = DigestMismatchError("differs", ["a", "b"])
    assert WorkerError.of(error).rebuild().tensors == ("a", "b")


def test_a_foreign_kind_becomes_a_sync_error():
    assert type(WorkerError("os", "x").rebuild()) is errors.WeightSyncError


def output(tokens, logprobs=None, reason="length", versions=None):
    entries = [{token: SimpleNamespace(logprob=value)} for token, value in logprobs or []]
    return SimpleNamespace(
        token_ids=tokens, logprobs=entries, finish_reason=reason, weight_versions=versions
    )


def test_a_completion_has_its_tokens_log_probs_and_spans():
    spans = [
        SimpleNamespace(version="e1.s1", start=0, end=1),
        SimpleNamespace(version="e1.s2", start=1, end=2),
    ]
    got = completion_of("r", output([4, 5], [(4, -0.5), (5, -1.5)], "stop", spans), V2)
    assert got.token_ids == [4, 5]
    assert got.log_probs == [-0.5, -1.5]
    assert got.finish_reason == "stop"
    assert got.version_spans == [VersionSpan(V1, 0, 1), VersionSpan(V2, 1, 2)]


def test_without_spans_the_committed_version_stands_for_all_tokens():
    got = completion_of("r", output([4, 5], [(4, -0.5), (5, -1.5)]), V1)
    assert got.version_spans == [VersionSpan(V1, 0, 2)]


def test_an_aborted_request_without_tokens_has_no_spans():
    got = completion_of("r", output([], reason="abort"), V1)
    assert (got.token_ids, got.version_spans, got.finish_reason) == ([], [], "abort")


def test_an_unknown_end_or_version_is_an_error():
    with pytest.raises(RolloutError, match="'error'"):
        completion_of("r", output([], reason="error"), V1)
    with pytest.raises(RolloutError, match="without a version"):
        completion_of("r", output([4], [(4, -0.5)]), None)


def test_sampling_parameters_reach_the_engine_unchanged():
    sampling = SamplingParams(0.7, 0.9, 40, 17, 123, ignore_eos=True)
    arguments = sampling_arguments(GenerateRequest("r", [1], sampling))
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 17, "seed": 123}
    assert wanted.items() <= arguments.items()
    assert arguments["ignore_eos"] is True
    assert arguments["n"] == 1


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
    checks = ArrivalChecks(check_finite=True)
    checks.see(Arrival(meta, tensor, content_digest(meta, tensor, kind), lent=True))
    assert checks.matched == 1
    assert checks.weights_digest is not None
    wrong = content_digest(meta, tensor + 1, kind)
    with pytest.raises(DigestMismatchError, match=r"layer\.weight") as caught:
        checks.see(Arrival(meta, tensor, wrong, lent=True))
    assert caught.value.tensors == ("layer.weight",)


def test_a_nan_names_the_tensor_and_can_be_let_through():
    tensor = torch.tensor([1.0, float("nan")])
    arrival = Arrival(meta_of("w", tensor), tensor, None, lent=True)
    with pytest.raises(VerificationError, match="'w'"):
        ArrivalChecks(check_finite=True).see(arrival)
    ArrivalChecks(check_finite=False).see(arrival)


@pytest.mark.parametrize("extra", [{"target": "draft"}, {"quantisation": "fp8"}])
def test_what_cannot_be_loaded_is_refused_before_the_stream(extra):
    manifest = Manifest(V1, (TensorMeta("w", (2,), "float32", **extra),))
    with pytest.raises(ManifestMismatchError, match="'w'"):
        check_supported(manifest)
