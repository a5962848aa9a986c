"""The engine's own HTTP interfaces, behind the gate."""

import json
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import RolloutError
from rl_core.interfaces import PauseMode
from rl_core.testing.rollout_case import GREEDY
from rl_rollout_sglang.probe import probe

pytestmark = pytest.mark.engine


def answers(ask, started):
    return [completion.token_ids for completion in ask(started, GREEDY)]


def post(started, body, path="/v1/completions"):
    request = urllib.request.Request(
        f"http://{started.replica.address}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


DEADLY = [
    ({"input_ids": [5, 80]}, {}, "input_ids"),
    ({"input_ids": [[5], [-1]]}, {}, "input_ids"),
    ({"input_ids": [[5], []]}, {}, "input_ids"),
    ({"return_logprob": True, "top_logprobs_num": 81}, {}, "top_logprobs_num"),
    ({}, {"top_k": 81}, "top_k"),
    ({}, {"stop_token_ids": [80], "min_new_tokens": 2}, "stop_token_ids"),
    ({"return_logprob": [True]}, {}, "return_logprob"),
    ({"return_logprob": True, "logprob_start_len": -5}, {}, "logprob_start_len"),
    ({"token_indices_to_pool": [1]}, {"max_new_tokens": 0}, "token_indices_to_pool"),
    ({}, {"min_p": 0.5}, "min_p"),
    ({}, {"beam_width": 2}, "beam_width"),
    ({}, {"n": 10**9}, "n:"),
]
"""Fields, sampling parameters, the name that the refusal has to tell."""


def test_http_requests_that_would_end_the_engine_are_refused_by_name(dense):
    """Before a scheduler sees them, streamed or not, native or OpenAI-compatible."""
    for fields, sampling, named in DEADLY:
        params = {"max_new_tokens": 3, **sampling}
        body = {"input_ids": [5, 6], **fields, "sampling_params": params}
        assert named in refused(dense, body, "/generate")
    for fields in ({"prompt": [5, 80]}, {"prompt": [[5], [80]]}, {"logprobs": 81}):
        told = refused(dense, {"model": "m", "prompt": [5, 6], "max_tokens": 3, **fields})
        assert next(iter(fields)) in told
    assert dense.state()["phase"] == "committed"
    assert post(dense, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}, "/generate")


def refused(started, body, path="/v1/completions"):
    """What the client is told."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(started, body, path)
    assert caught.value.code == 400, body
    return caught.value.read().decode()


def test_http_answers_as_the_handle_does(dense, prompts, ask):
    expected = answers(ask, dense)[0]
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    native = post(dense, {"input_ids": prompts[0], "sampling_params": sampling}, "/generate")
    assert native["output_ids"] == expected
    body = {"model": "m", "prompt": prompts[0], "max_tokens": 12, "temperature": 0}
    answer = post(dense, {**body, "ignore_eos": True})
    assert answer["choices"][0]["text"].split() == [f"t{token}" for token in expected]


def test_http_gives_several_samples(dense, prompts):
    """Native and OpenAI-compatible."""
    sampling = {"max_new_tokens": 12, "temperature": 1, "ignore_eos": True, "n": 3}
    native = post(dense, {"input_ids": prompts[0], "sampling_params": sampling}, "/generate")
    assert len({tuple(item["output_ids"]) for item in native}) == 3
    body = {"model": "m", "prompt": prompts[0], "max_tokens": 12, "temperature": 1, "n": 3}
    choices = post(dense, {**body, "ignore_eos": True})["choices"]
    assert len({choice["text"] for choice in choices}) == 3


def test_http_tells_what_the_engine_holds_and_how_it_runs(engines, weight_sets):
    """Whatever the gate says; but for released weights, of which there is nothing to tell."""
    started = engines("tied")
    started.sync(weight_sets["tied"][0])
    adapter, address = started.adapters[0], started.replica.address
    found = probe(address, 60)
    assert found.ranks == adapter.live_digests(60)
    assert (found.engine, found.device, found.split) == ("sglang", "cpu", {})
    assert found.settings == {
        "dtype": "float32",
        "tensor_model_parallel_size": 2,
        "max_model_len": 1024,  # the model's own: the configuration says nothing
    }
    adapter.fence("a test", 30)
    assert probe(address, 60) == found
    adapter.release(["weights"], 30)
    with pytest.raises(RolloutError, match="released"):
        probe(address, 60)
    adapter.resume(["weights"], 30)
    started.sync(weight_sets["tied"][0])
    assert probe(address, 60) == found


def test_http_requests_that_a_pause_has_queued_end_with_the_reason_of_a_fence(dense, prompts):
    """They are not in a scheduler, where SGLang's abort would find them."""
    body = {"model": "m", "prompt": prompts[0], "max_tokens": 3}
    dense.adapters[0].pause(PauseMode.KEEP, 30)
    try:
        with ThreadPoolExecutor(2) as threads:
            native = threads.submit(post, dense, {"input_ids": prompts[0]}, "/generate")
            waiting = [native, threads.submit(post, dense, body)]
            time.sleep(0.3)
            assert not any(answer.done() for answer in waiting)
            dense.adapters[0].fence("a test says so", 30)
            errors = [answer.exception(10) for answer in waiting]
    finally:
        dense.adapters[0].continue_(30)
    for error in errors:
        assert error.code == 503
        assert "a test says so" in error.read().decode()


def test_a_client_that_reads_nothing_holds_up_no_update(dense, weight_sets, ask):
    """Its request has ended in the engine, whether or not it takes the answer."""
    sampling = {"max_new_tokens": 150, "ignore_eos": True}
    large = {"stream": True, "return_logprob": True, "top_logprobs_num": 80}
    body = json.dumps({"input_ids": [5, 6], "sampling_params": sampling, **large}).encode()
    kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /generate HTTP/1.1\r\nhost: a\r\n{kind}\r\n\r\n".encode()
    host, _, port = dense.replica.address.partition(":")
    before, end = dense.adapters[0].tokens_made(30), Deadline.after(30)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head + body)
        for begun in (True, False):
            while (dense.adapters[0].tokens_made(30) > before) != begun:
                end.check("the request to begin and to end in the engine")
        dense.sync(weight_sets["dense"][0])
        assert dense.state()["in_flight"] == 1, "the answer was taken: ask for a larger one"
        assert ask(dense, GREEDY)


def test_http_refuses_with_the_reason_while_fenced(dense, prompts):
    dense.adapters[0].fence("a test says so", 30)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(dense, {"input_ids": prompts[0]}, "/generate")
    assert caught.value.code == 503
    assert "a test says so" in caught.value.read().decode()
    with urllib.request.urlopen(f"http://{dense.replica.address}/health", timeout=30) as health:
        assert health.status == 200


@pytest.mark.parametrize(
    "path", ["/release_memory_occupation", "/update_weights_from_tensor", "/pause_generation"]
)
def test_http_does_not_control_the_engine(dense, path):
    """Some of these would end it; all of them would change it behind the adapter's back."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(dense, {}, path)
    assert caught.value.code == 403
