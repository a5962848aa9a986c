"""Requests and completions keep their meaning on the way through the engine."""

import pytest

from rl_core.errors import RolloutError
from rl_core.trajectory import GenerateRequest, SamplingParams, VersionSpan
from rl_core.versions import PolicyVersion
from rl_rollout_sglang.trajectories import completion_of, request_arguments

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
PLAIN = GenerateRequest("r", [1], SamplingParams())


def output(tokens, log_probs=(), reason="length", versions=None, **meta):
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [(value, token, None) for token, value in log_probs],
            "weight_versions": versions,
            **meta,
        },
    }


def test_a_completion_has_its_tokens_log_probs_and_spans():
    spans = [
        {"version": "e1.s1", "start": 0, "end": 1},
        {"version": "e1.s2", "start": 1, "end": 2},
    ]
    got = completion_of(PLAIN, output([4, 5], [(4, -0.5), (5, -1.5)], "stop", spans), V2)
    assert got.token_ids == [4, 5]
    assert got.log_probs == [-0.5, -1.5]
    assert got.finish_reason == "stop"
    assert got.version_spans == [VersionSpan(V1, 0, 1), VersionSpan(V2, 1, 2)]


def test_without_spans_the_committed_version_stands_for_all_tokens():
    got = completion_of(PLAIN, output([4, 5], [(4, -0.5), (5, -1.5)]), V1)
    assert got.version_spans == [VersionSpan(V1, 0, 2)]


def test_an_aborted_request_without_tokens_has_no_spans():
    got = completion_of(PLAIN, output([], reason="abort"), V1)
    assert (got.token_ids, got.version_spans, got.finish_reason) == ([], [], "abort")


def test_what_is_missing_or_unknown_is_an_error():
    with pytest.raises(RolloutError, match="'error'"):
        completion_of(PLAIN, output([], reason="error"), V1)
    with pytest.raises(RolloutError, match="without a version"):
        completion_of(PLAIN, output([4], [(4, -0.5)]), None)
    with pytest.raises(RolloutError, match="2 tokens, 1 log-prob"):
        completion_of(PLAIN, output([4, 5], [(4, -0.5)]), V1)


def test_sampling_parameters_reach_the_engine_unchanged():
    sampling = SamplingParams(0.7, 0.9, 40, 17, 123, ignore_eos=True)
    arguments = request_arguments(GenerateRequest("r", [1, 2], sampling), 80)
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_new_tokens": 17}
    assert wanted.items() <= arguments["sampling_params"].items()
    assert arguments["sampling_params"]["sampling_seed"] == 123
    assert arguments["sampling_params"]["ignore_eos"] is True
    assert arguments["input_ids"] == [1, 2]
    assert arguments["rid"] == "r"


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        (SamplingParams(0.7), False),
        (SamplingParams(0.0, top_p=0.5), False),
        (SamplingParams(0.7, top_p=0.5), True),
        (SamplingParams(0.7, top_k=5), True),
    ],
)
def test_truncated_sampling_takes_the_log_probs_of_what_was_left(sampling, asked):
    request = GenerateRequest("r", [1], sampling)
    arguments = request_arguments(request, 80)
    assert arguments["return_sampling_mask"] is asked
    assert not asked or 0 < arguments["sampling_params"]["top_k"] <= 80
    answer = output([4], [(4, -2.0)], output_token_sampling_logprobs=[-0.5])
    assert completion_of(request, answer, V1).log_probs == [-0.5 if asked else -2.0]
