"""Requests and completions keep their meaning on the way through the engine."""

from types import SimpleNamespace

import pytest

from rl_core.errors import RolloutError
from rl_core.trajectory import GenerateRequest, SamplingParams, VersionSpan
from rl_core.versions import PolicyVersion
from rl_rollout_vllm.trajectories import completion_of, sampling_arguments

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


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
