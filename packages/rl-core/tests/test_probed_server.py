"""Whatever answers at an address, asking it ends in an answer or in one kind of error."""

import socket

import pytest

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_route import PATH
from rl_core.rollout.probed_server import API_KEY, ProbedServer, said
from rl_core.testing.answering_server import answering

HELD = {"engine": "vllm", "device": "cpu", "settings": {}, "ranks": [{"w": "wsum64:01"}]}


def asked(content, status=200):
    with answering({f"GET {PATH}": (status, content)}) as server:
        return ProbedServer(server.address, 10).live_weights()


def test_live_weights_are_read():
    assert asked(HELD) == LiveWeights("vllm", "cpu", {}, [{"w": "wsum64:01"}])


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_server_without_the_route_is_no_error(status):
    assert asked({}, status) is None


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ({"error": {"message": "the weights are released"}}, 503, "the weights are released"),
        (b"<html>", 500, "HTTP status 500"),
        (b"<html>", 200, "LiveWeights|Expected"),
        ({**HELD, "ranks": [{"w": 5}]}, 200, "ranks"),
        ({**HELD, "more": 5}, 200, "more"),
    ],
)
def test_everything_else_is_an_error_that_says_what(content, status, words):
    with pytest.raises(RolloutError, match=words):
        asked(content, status)


def test_a_body_is_posted_as_json():
    with answering({"POST /x": (200, [1])}) as server:
        assert ProbedServer(server.address, 10).ask("/x", {"a": "b"}) == (200, [1])
        assert server.asked == [("POST /x", {"a": "b"})]


def test_nobody_is_named_with_the_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RolloutError, match=f"no answer from http://{address}/version"):
        ProbedServer(address, 10).ask("/version")


def test_one_who_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = ProbedServer(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)
        with pytest.raises(RolloutError, match="timed out"):
            server.ask("/version")


def test_the_environments_proxy_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert asked(HELD) is not None


@pytest.mark.parametrize(("key", "shown"), [("", None), ("secret", "Bearer secret")])
def test_the_servers_key_is_shown(monkeypatch, key, shown):
    monkeypatch.setenv(API_KEY, key)
    with answering({}) as server:
        ProbedServer(server.address, 10).ask("/version")
        assert server.authorization == shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"error": "no"}, "no"),
        ({"error": {"message": "no"}}, "no"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "no"}, "no"),
        ([], "HTTP status 400"),
        ({"error": {"message": 5}}, "HTTP status 400"),
    ],
)
def test_servers_say_what_is_wrong_in_many_ways(content, words):
    assert said(400, content) == words
