"""The object in the process of one rank: it owns a checkpoint engine and carries out orders.

As the app does it, every blocking call runs in one worker thread, while aborts and cancellation
come from the event loop's thread.
"""

import asyncio
import importlib.util
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import LifecycleError, MiniRLError
from rl_core.interfaces import (
    BucketLease,
    CheckpointBackend,
    CheckpointEngine,
    Endpoint,
    Place,
    SupportsCheckpointPath,
    TransferRole,
)
from rl_core.plugins import CHECKPOINT_ENGINES, build_config, load_backend, load_object
from rl_core.testing.checkpoint_consumer import Consumer, StreamError
from rl_core.testing.checkpoint_orders import (
    ForeignError,
    Held,
    Mishap,
    Options,
    Received,
    ReceiveOrder,
    SendOrder,
    Sent,
)
from rl_core.testing.checkpoint_recipe import WeightRecipe
from rl_core.testing.process_holdings import MemoryMeter, held

if TYPE_CHECKING:
    from rl_core.interfaces import TensorStream

T = TypeVar("T")


def find_backend(name: str) -> CheckpointBackend:
    """An installed backend by name, or one by `module:ATTRIBUTE`."""
    if ":" in name:
        found: CheckpointBackend = load_object(name)
        return found
    installed: CheckpointBackend = load_backend(CHECKPOINT_ENGINES, name)
    return installed


def build_engine(name: str, options: Options, role: TransferRole) -> CheckpointEngine:
    """An engine of a backend, made as the app makes it."""
    backend = find_backend(name)
    config = build_config(load_object(backend.config_cls), options, "checkpoint_engine.options")
    engine: CheckpointEngine = load_object(backend.engine)(config, role)
    return engine


class CheckpointDriver:
    """One rank of the transfer under test."""

    def __init__(self, backend: str) -> None:
        """Load what the backend needs; `construct` makes the engine itself."""
        torch.set_num_threads(1)
        self._backend = backend
        load_object(find_backend(backend).engine)
        self._worker = ThreadPoolExecutor(1, "engine")
        self._engine: CheckpointEngine | None = None
        self._cancel = CancelToken()
        self._meter = MemoryMeter()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # -------------------------------------------------------------- the engine's own calls

    async def construct(self, options: Options, role: TransferRole) -> None:
        """Replace the engine by a new one."""
        await self.shutdown()
        self._engine = await self._call(lambda: build_engine(self._backend, options, role))

    async def prepare(self) -> Endpoint:
        """The engine's `prepare`."""
        return await self._call(self.engine.prepare)

    async def build(self, place: Place, seconds: float) -> None:
        """The engine's `build_process_group`."""
        deadline = Deadline.after(seconds)
        await self._call(lambda: self.engine.build_process_group(place, deadline))

    async def send(self, order: SendOrder) -> Sent:
        """The engine's `send_weights`; errors are part of the answer."""
        self._cancel = CancelToken()
        return await self._call(lambda: self._send(order, Deadline.after(order.deadline_s)))

    async def receive(self, order: ReceiveOrder) -> Received:
        """The engine's `receive_weights`, consumed as an adapter would."""
        self._cancel = CancelToken()
        return await self._call(lambda: self._receive(order, Deadline.after(order.deadline_s)))

    async def checkpoint_path(self, order: ReceiveOrder) -> str:
        """The engine's `get_checkpoint_path`, where it has one."""
        engine = self.engine
        if not isinstance(engine, SupportsCheckpointPath):
            raise LifecycleError("this engine has no checkpoint path")
        deadline = Deadline.after(order.deadline_s)
        found = await self._call(lambda: engine.get_checkpoint_path(order.manifest, deadline))
        return str(found.path)

    def gives_path(self) -> bool:
        """Whether this engine's receivers may ask for a directory."""
        return isinstance(self.engine, SupportsCheckpointPath)

    async def finalize(self, success: bool) -> None:
        """The engine's `finalize`."""
        await self._call(lambda: self.engine.finalize(success))

    async def shutdown(self) -> None:
        """The engine's `shutdown`; the process stays for the next `construct`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await self._call(engine.shutdown)

    async def abort(self, reason: str) -> None:
        """The engine's `abort`, beside whatever its worker thread is doing."""
        await asyncio.get_running_loop().run_in_executor(None, self.engine.abort, reason)

    def cancel(self, reason: str) -> None:
        """Cancel the token of the call under way."""
        self._cancel.cancel(reason)

    # -------------------------------------------------------------- for tests only

    async def arm(self, function: str, tensor: str) -> None:
        """Have `function(engine, tensor)` prepare a fault of the backend's own transport."""
        await self._call(lambda: _function(function)(self.engine, tensor))

    async def start_meter(self, weights: WeightRecipe) -> None:
        """Measure memory from here on; what the stream of `weights` needs is not counted."""
        self._scratch = weights.scratch().fill_(0)
        await self._call(self._meter.start)

    def held(self) -> Held:
        """What this process holds now."""
        return held()

    @property
    def engine(self) -> CheckpointEngine:
        """The engine; LifecycleError before `construct`."""
        if self._engine is None:
            raise LifecycleError("no engine was constructed in this process")
        return self._engine

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _send(self, order: SendOrder, deadline: Deadline) -> Sent:
        sent = Sent()
        if self._scratch.numel() < order.weights.scratch_bytes:
            self._scratch = order.weights.scratch()
        stream = self._stream(order, sent)
        try:
            sent.report = self.engine.send_weights(stream, order.manifest, deadline, self._cancel)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            sent.error = reported(error)
        sent.ended_at = time.monotonic()
        sent.extra_bytes = self._meter.peak()
        return sent

    def _stream(self, order: SendOrder, sent: Sent) -> "TensorStream":
        for number, item in enumerate(order.weights.stream(self._scratch)):
            sent.drawn += 1
            if order.mishap is not None and order.mishap.at == number:
                sent.exhausted = order.mishap.kind == "raise"
                self._befall(order.mishap)
            yield item
        sent.exhausted = True

    def _receive(self, order: ReceiveOrder, deadline: Deadline) -> Received:
        consumer = Consumer(order, self._befall)
        leases: Iterator[BucketLease] | None = None
        try:
            leases = iter(self.engine.receive_weights(order.manifest, deadline, self._cancel))
            consumer.consume(leases)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            consumer.received.error = reported(error)
            self.engine.abort(str(error))
        finally:
            _close(leases)
        consumer.received.ended_at = time.monotonic()
        consumer.received.extra_bytes = self._meter.peak()
        return consumer.received

    def _befall(self, mishap: Mishap) -> None:
        match mishap.kind:
            case "die":
                os._exit(9)
            case "raise":
                raise StreamError("the test's own mishap")
            case "stall":
                time.sleep(mishap.seconds)
            case "cancel":
                self._cancel.cancel("the test cancelled")
            case "abort":
                thread = threading.Thread(target=self.engine.abort, args=("the test aborted",))
                thread.start()
                thread.join(mishap.seconds)
            case _:
                raise ValueError(f"unknown mishap {mishap.kind!r}")


def _close(leases: Any) -> None:
    close = getattr(leases, "close", None)
    if close is not None:
        close()


def reported(error: Exception) -> MiniRLError | ForeignError:
    """An error as it crosses to the test."""
    if isinstance(error, MiniRLError):
        return error
    return ForeignError("".join(traceback.format_exception(error)))


def _function(path: str) -> Callable[[CheckpointEngine, str], None]:
    """A function by `module:name`, or by `/path/of/file.py:name`."""
    where, _, name = path.rpartition(":")
    if not where.endswith(".py"):
        found: Callable[[CheckpointEngine, str], None] = load_object(path)
        return found
    spec = importlib.util.spec_from_file_location(f"faults_{abs(hash(where))}", where)
    if spec is None or spec.loader is None:
        raise LifecycleError(f"cannot load {where}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[CheckpointEngine, str], None] = vars(module)[name]
    return function
