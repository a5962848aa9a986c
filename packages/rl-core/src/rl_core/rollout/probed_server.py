"""A running engine's HTTP server, asked from outside what it is and what it holds."""

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_route import PATH

MAX_BYTES = 1 << 28
"""Of an answer; a thousand digests take 100 KB."""


API_KEY = "MINIRL_API_KEY"
"""Variable with the key that is shown to the server, as bearer token, for those that want one."""


class ProbedServer:
    """One server, which answers JSON.

    It is asked directly, also where the environment names a proxy.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """Ask `address` (`host:port`), for `timeout` seconds altogether."""
        self._address = address
        self._deadline = Deadline.after(timeout)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and content of an answer: None if it is no JSON.

        Args:
            path: of the URL.
            body: to be sent as JSON; None for a GET.

        Errors: RolloutError if no answer comes.
        """
        data = None if body is None else json.dumps(body).encode()
        timeout = max(0.001, self._deadline.remaining())
        request = urllib.request.Request(f"http://{self._address}{path}", data, _headers())
        try:
            with self._opener.open(request, timeout=timeout) as reply:
                return reply.status, _parsed(reply.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read(MAX_BYTES))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise RolloutError(f"no answer from http://{self._address}{path}: {reason}") from error

    def live_weights(self) -> LiveWeights | None:
        """What `LiveRoute` answers; None if the server does not have it.

        Errors: RolloutError with what the server says is wrong.
        """
        status, content = self.ask(PATH)
        if status in {403, 404, 405}:
            return None
        if status != 200:
            raise RolloutError(f"{self._address}: {said(status, content)}")
        try:
            return msgspec.convert(content, LiveWeights)
        except msgspec.ValidationError as error:
            raise RolloutError(f"{self._address}{PATH}: {error}") from error


def said(status: int, content: Any) -> str:
    """What is wrong, in a server's own words as far as there are any."""
    if isinstance(content, dict):
        problem = content.get("error") or content.get("detail") or content
        words = problem.get("message") if isinstance(problem, dict) else problem
        if isinstance(words, str) and words:
            return words
    return f"HTTP status {status}"


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY)
    shown = {"authorization": f"Bearer {key}"} if key else {}
    return {"content-type": "application/json", **shown}


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
