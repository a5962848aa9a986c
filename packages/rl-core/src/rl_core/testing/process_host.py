"""The program of a launched process: one object, an event loop, connections from its handles.

Started as `python -m rl_core.testing.process_host PARENT_PID READY_FD` by `ProcessLauncher`.
Async methods of the object run concurrently, sync ones in order, all on the loop's thread.
"""

import asyncio
import inspect
import os
import queue
import sys
import threading
from typing import Any

import msgspec

from rl_core.channel import Channel, Listener
from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, TransferError, TransferTimeoutError
from rl_core.plugins import load_object
from rl_core.testing.process_tree import supervise
from rl_core.testing.process_wire import Call, HostSpec, Reply, Result, failure, pack, unpack

ACCEPT_S = 10.0
"""Seconds given to a peer for its handshake."""

IDLE_S = 7 * 24 * 3600.0
"""Seconds that a connection may be silent; the peer's death closes it at once."""


class Host:
    """Creates the object, then runs its methods as calls arrive."""

    def __init__(self, spec: HostSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self._loop = loop
        self._object: Any = None
        self._broken: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self) -> None:
        """Create the object on the loop's thread; calls that came earlier wait for it."""
        try:
            self._object = load_object(self._spec.cls)(**unpack(self._spec.kwargs))
        except Exception as error:  # noqa: BLE001 - edge of the process: told to every caller
            self._broken = error

    def accept(self, listener: Listener) -> None:
        """Serve every handle that connects; runs in a thread for the life of the process."""
        while True:
            # The deadline of a handshake begins when somebody is there, not while nobody is.
            if not listener.poll(ACCEPT_S):
                continue
            try:
                channel = listener.accept(self._spec.key, Call, Deadline.after(ACCEPT_S))
            except (TransferTimeoutError, MessageError, TransferError):
                continue
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        threading.Thread(target=_write, args=(channel, replies), daemon=True).start()
        try:
            while True:
                call = channel.receive(Deadline.after(IDLE_S))
                self._loop.call_soon_threadsafe(self._dispatch, call, replies)
        except (TransferError, MessageError):
            replies.put(None)

    def _dispatch(self, call: Call, replies: "queue.SimpleQueue[Reply | None]") -> None:
        try:
            value = self._invoke(call)
        except Exception as error:  # noqa: BLE001 - edge of the process: crosses to the caller
            replies.put(failure(call.number, error))
            return
        if inspect.isawaitable(value):
            task = self._loop.create_task(_finish(call.number, value, replies))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            replies.put(_result(call.number, value))

    def _invoke(self, call: Call) -> Any:
        if self._broken is not None:
            raise self._broken
        args, kwargs = unpack(call.arguments)
        return getattr(self._object, call.method)(*args, **kwargs)


async def _finish(number: int, value: Any, replies: "queue.SimpleQueue[Reply | None]") -> None:
    try:
        replies.put(_result(number, await value))
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - edge of the process
        replies.put(failure(number, error))


def _result(number: int, value: Any) -> Reply:
    try:
        return Result(number, pack(value))
    except Exception as error:  # noqa: BLE001 - pickling runs foreign code
        return failure(number, error)


def _write(channel: Channel, replies: "queue.SimpleQueue[Reply | None]") -> None:
    with channel:
        while (reply := replies.get()) is not None:
            try:
                channel.send(reply, Deadline.after(IDLE_S))
            except MessageError as error:  # too long
                channel.send(failure(reply.number, error), Deadline.after(IDLE_S))
            except TransferError:
                return


def serve(spec: HostSpec, parent: int, ready: int) -> None:
    """Split off the supervisor, announce the address, run.

    Args:
        spec: the object.
        parent: pid of the process whose death ends this one.
        ready: descriptor to write the address to, closed then.
    """
    supervise(parent)
    sys.path.extend(path for path in spec.import_path if path not in sys.path)
    with Listener() as listener:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        host = Host(spec, loop)
        loop.call_soon(host.create)
        threading.Thread(target=host.accept, args=(listener,), daemon=True).start()
        os.write(ready, listener.address.encode())
        os.close(ready)
        loop.run_forever()


def main() -> None:
    """Read the spec and serve it."""
    parent, ready = int(sys.argv[1]), int(sys.argv[2])
    serve(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=HostSpec), parent, ready)


if __name__ == "__main__":
    main()
