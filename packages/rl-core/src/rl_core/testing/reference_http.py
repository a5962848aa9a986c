"""The reference server's HTTP address: it says whether requests are answered, nothing else."""

import asyncio
import contextlib
from collections.abc import Callable


class Health:
    """Answers every HTTP request with 200, or with 503 and the reason for refusing."""

    def __init__(self, refusal: Callable[[], str | None]) -> None:
        self._refusal = refusal
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`; the address, `host:port`."""
        self._server = await asyncio.start_server(self._answer, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
            refusal = self._refusal()
            status = "200 OK" if refusal is None else "503 Service Unavailable"
            body = (refusal or "ok").encode()
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()
