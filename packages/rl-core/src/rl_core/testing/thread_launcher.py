"""`ThreadLauncher`: objects on event loops in threads of this process, for fast tests."""

import asyncio
import inspect
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.errors import TransferError
from rl_core.interfaces import Placement
from rl_core.plugins import load_object

if TYPE_CHECKING:
    from concurrent.futures import Future


class ThreadLauncher:
    """Like `ProcessLauncher`, without processes: `env` is ignored, handles do not pickle.

    Arguments and results are shared, not copied. For doubles that are known to be well-behaved;
    what is to be seen in a process of its own goes through `ProcessLauncher`.
    """

    def launch(
        self, cls: str, kwargs: Mapping[str, Any], env: Mapping[str, str], placement: Placement
    ) -> "ThreadHandle":
        """Create `cls` on a loop of its own; an error of its constructor is raised here."""
        del env, placement
        handle = ThreadHandle(cls)
        handle.create(dict(kwargs))
        return handle


class ThreadHandle:
    """An object on another thread's loop; implements `rl_core.interfaces.Handle`."""

    def __init__(self, cls: str) -> None:
        self._cls = cls
        self._object: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=cls)
        self._thread.start()

    def create(self, kwargs: Mapping[str, Any]) -> None:
        """Create the object, on the loop's thread."""

        async def create() -> Any:
            return load_object(self._cls)(**kwargs)

        self._object = asyncio.run_coroutine_threadsafe(create(), self._loop).result(60)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start `method` there."""

        async def run() -> Any:
            value = getattr(self._object, method)(*args, **kwargs)
            try:
                return await value if inspect.isawaitable(value) else value
            except asyncio.CancelledError:
                msg = f"the thread of {self._cls} ended during {method}"
                raise TransferError(msg) from None

        if not self._thread.is_alive():
            raise TransferError(f"the thread of {self._cls} has ended")
        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """`submit` and wait."""
        return self.submit(method, *args, **kwargs).result(timeout)

    def kill(self) -> None:
        """End the loop and its thread; calls under way raise TransferError. Idempotent."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)
