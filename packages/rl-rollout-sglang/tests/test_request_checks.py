"""What a scheduler would die of is refused by the name of its field; the rest is left alone."""

import math
from types import SimpleNamespace

import pytest

from rl_rollout_sglang.request_checks import (
    MAX_SAMPLES,
    WHOLE_VOCABULARY,
    RefusedRequestError,
    check_request,
    check_samples,
)

VOCABULARY = 80


def request(**changes):
    """A request as SGLang makes it of the plainest one, with changes to it or its sampling."""
    sampling = {
        "top_k": WHOLE_VOCABULARY,
        "min_p": 0.0,
        "stop_token_ids": None,
        "stop_regex_strs": [],
        "logit_bias": None,
        "beam_width": None,
    }
    fields = {
        "input_ids": [5, 79],
        "top_logprobs_num": 0,
        "logprob_start_len": -1,
        "token_indices_to_pool": None,
    }
    for name, value in changes.items():
        (sampling if name in sampling else fields)[name] = value
    return SimpleNamespace(**fields, sampling_params=SimpleNamespace(**sampling))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", [5, VOCABULARY]),
        ("input_ids", [-1, 5]),
        ("input_ids", []),
        ("top_logprobs_num", VOCABULARY + 1),
        ("top_logprobs_num", -1),
        ("top_logprobs_num", [3]),
        ("logprob_start_len", -2),
        ("logprob_start_len", 3),
        ("top_k", VOCABULARY + 1),
        ("top_k", 0),
        ("stop_token_ids", {7, VOCABULARY}),
        ("stop_token_ids", {-1}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", {"5": math.inf}),
        ("min_p", 0.1),
        ("beam_width", 2),
        ("token_indices_to_pool", [0, 1]),
        ("token_indices_to_pool", []),
    ],
)
def test_what_ends_an_engine_is_refused_by_name(name, value):
    with pytest.raises(RefusedRequestError, match=rf"^{name}\b.*: "):
        check_request(request(**{name: value}), VOCABULARY, seeded=True)


def test_a_stop_pattern_is_refused():
    with pytest.raises(RefusedRequestError, match=r"^stop_regex: "):
        check_request(request(stop_regex_strs=["(a+)+!"]), VOCABULARY, seeded=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", [0, VOCABULARY - 1]),
        ("top_logprobs_num", VOCABULARY),
        ("logprob_start_len", 2),
        ("top_k", VOCABULARY),
        ("stop_token_ids", {0, VOCABULARY - 1}),
        ("logit_bias", {"5": -3.5}),
        ("min_p", 0.1),
        ("beam_width", 1),
    ],
)
def test_what_it_can_do_is_let_through(name, value):
    check_request(request(**{name: value}), VOCABULARY, seeded=False)


@pytest.mark.parametrize("count", [0, -1, 1.5, None, "2", MAX_SAMPLES + 1])
def test_a_number_of_samples_that_cannot_be_is_refused(count):
    for sampling in ({"n": count}, [{"n": 1}, {"n": count}]):
        with pytest.raises(RefusedRequestError, match=r"^n: "):
            check_samples(sampling)


@pytest.mark.parametrize("sampling", [None, {}, [], {"n": 1}, [{"n": MAX_SAMPLES}]])
def test_other_numbers_are_let_through(sampling):
    check_samples(sampling)
