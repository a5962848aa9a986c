"""When the engine has died, who waits is told so, and so is whoever comes."""

import asyncio

import pytest

from rl_core.rollout.endable_app import EndableApp


class Client:
    """One connection to an application that runs until its `go` is set."""

    def __init__(self, app, kind="http"):
        self.sent = []
        self.task = asyncio.create_task(app({"type": kind, "path": "/health"}, None, self.send))

    async def send(self, message):
        self.sent.append(message)

    async def status(self):
        await asyncio.wait_for(self.task, 5)
        return self.sent[0]["status"]


def served(begins=False):
    """An application that never ends its answers, and what it saw of their ends."""
    ends = []

    async def app(scope, receive, send):
        if begins:
            await send({"type": "http.response.start", "status": 200})
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(scope["path"])

    return EndableApp(app), ends


def test_who_waits_and_who_comes_gets_503_with_the_first_reason():
    async def run():
        app, ends = served()
        waiting = Client(app)
        await asyncio.sleep(0)
        app.end("it died of a test")
        app.end("something else")
        late = Client(app)
        assert [await waiting.status(), await late.status()] == [503, 503]
        for client in (waiting, late):
            assert "it died of a test" in client.sent[1]["body"].decode()
        assert ends == ["/health"]

    asyncio.run(run())


def test_an_answer_that_has_begun_is_cut_off():
    async def run():
        app, ends = served(begins=True)
        client = Client(app)
        await asyncio.sleep(0)
        app.end("it died")
        assert await client.status() == 200
        assert len(client.sent) == 1
        assert ends == ["/health"]

    asyncio.run(run())


def test_until_then_everything_is_the_applications_own():
    async def fails(scope, receive, send):
        raise ValueError("its own")

    async def run():
        with pytest.raises(ValueError, match="its own"):
            await Client(EndableApp(fails)).status()
        app, _ = served()
        client = Client(app)
        await asyncio.sleep(0)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.status()
        assert client.sent == []

    asyncio.run(run())


def test_what_an_application_makes_of_its_end_is_the_refusal_too():
    async def confused(scope, receive, send):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise RuntimeError("who did that?") from error

    async def run():
        app = EndableApp(confused)
        client = Client(app)
        await asyncio.sleep(0)
        app.end("it died")
        assert await client.status() == 503

    asyncio.run(run())


def test_websockets_are_closed():
    async def run():
        app, _ = served()
        app.end("it died")
        client = Client(app, "websocket")
        await client.task
        assert client.sent == [{"type": "websocket.close", "code": 1013}]

    asyncio.run(run())
