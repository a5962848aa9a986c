"""An HTTP server with fixed answers: stands for a running engine in tests of who asks it."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

T = TypeVar("T")

Answers = Mapping[str, tuple[int, Any]]
"""Status and content by `METHOD PATH`; content is sent as JSON, bytes as they are."""


@dataclass
class AnsweringServer:
    """A running server.

    Attributes:
        address: `host:port`.
        answers: may be changed.
        asked: what came, in order: `METHOD PATH`, and the parsed body of a POST.
        authorization: the header of the last request.
    """

    address: str
    answers: dict[str, tuple[int, Any]]
    asked: list[tuple[str, Any]] = field(default_factory=list)
    authorization: str | None = None


@contextmanager
def answering(answers: Answers) -> Iterator[AnsweringServer]:
    """Serve on a free port of the loopback; what has no answer is 404, as FastAPI says it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _reply(self, body: Any) -> None:
            what = f"{self.command} {self.path}"
            server.asked.append((what, body))
            server.authorization = self.headers["authorization"]
            status, content = server.answers.get(what, (404, {"detail": "Not Found"}))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = AnsweringServer(f"127.0.0.1:{http.server_port}", dict(answers))
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def asked(probe: Callable[[str, float], T], answers: Answers) -> tuple[T, list[tuple[str, Any]]]:
    """What a backend's `probe` makes of a server with these answers, and what it asked for."""
    with answering(answers) as server:
        return probe(server.address, 10.0), server.asked


def rank_answer(number: int) -> dict[str, Any]:
    """What rank `number` of an engine says of itself: a `RankWeights` as plain data."""
    digests = {"w": f"wsum64:{number:02x}"}
    facts = {"device": "cpu", "settings": {"dtype": "float32"}, "split": {}}
    return {"rank": number, "digests": digests, **facts}
