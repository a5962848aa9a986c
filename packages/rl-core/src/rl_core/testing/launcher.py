"""`ProcessLauncher`: objects in subprocesses of their own, without Ray (Linux, one host)."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from rl_core.channel import Channel, connect, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MessageError, TransferError
from rl_core.interfaces import Placement
from rl_core.testing.process_host import IDLE_S
from rl_core.testing.process_template import ForkOrder
from rl_core.testing.process_tree import start_time
from rl_core.testing.process_wire import Call, Failure, HostSpec, Reply, pack, rebuilt, unpack

START_S = 60.0
"""Seconds given to a new interpreter for coming up (the object itself may take longer)."""

KILL_S = 20.0
"""Seconds given to a process tree for ending."""

_CHILDREN: dict[int, "subprocess.Popen[bytes]"] = {}


class ProcessLauncher:
    """Starts objects in processes of their own; implements `rl_core.interfaces.Launcher`.

    A launched process ends, with everything it started, when its handle is killed or the
    launching process dies.
    """

    def __init__(self, log_dir: Path | None = None, preload: Sequence[str] = ()) -> None:
        """Outputs go to one file per process under `log_dir`, or are inherited without it.

        Modules to `preload` are imported once, in a process of which the launched ones are forks
        (`process_template`); not those with an environment of their own, which an import may read.
        """
        self._log_dir = log_dir
        self._preload = tuple(preload)
        self._numbers = count()

    def launch(
        self, cls: str, kwargs: Mapping[str, Any], env: Mapping[str, str], placement: Placement
    ) -> "ProcessHandle":
        """Start a process and return while its object is being created.

        Args:
            cls: `module:Class`; an error of its constructor is raised by every later call.
            kwargs: keyword arguments of the constructor; pickled.
            env: set before the new interpreter imports anything.
            placement: ignored, all processes run on this host.

        Errors: LifecycleError if the interpreter does not come up.
        """
        del placement
        spec = HostSpec(new_key(), cls, pack(dict(kwargs)), sys.path)
        log = self._log_path(cls)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            forking = self._preload and not env
            job = (_fork, spec, self._preload, output) if forking else (_spawn, spec, env, output)
            pid, address = _spawner(os.getpid()).submit(*job).result()
        if not address:
            _end(pid)
            where = f"; see {log}" if log else ""
            raise LifecycleError(f"the process for {cls} did not come up{where}")
        return ProcessHandle(cls, pid, address, spec.key)

    def _log_path(self, cls: str) -> Path | None:
        if self._log_dir is None:
            return None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        name = f"{cls.rpartition(':')[2]}-{os.getpid()}-{next(self._numbers)}.log"
        return self._log_dir / name


class ProcessHandle:
    """An object in another process; implements `rl_core.interfaces.Handle`.

    Picklable: a copy in another process of this host opens a connection of its own.
    """

    def __init__(self, cls: str, pid: int, address: str, key: bytes) -> None:
        self.pid = pid
        self._cls = cls
        self._address = address
        self._key = key
        self._started = start_time(pid)
        self._line: _Line | None = None
        self._lock = threading.Lock()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start `method` there. The future's `result(timeout)` is its value or its error."""
        with self._lock:
            if self._line is None or self._line.broken:
                self._line = _Line(self._connect(), f"the process of {self._cls} ({self.pid})")
            return self._line.submit(method, pack((args, kwargs)))

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """`submit` and wait; TimeoutError after `timeout` seconds, the call itself goes on."""
        return self.submit(method, *args, **kwargs).result(timeout)

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._started is not None and start_time(self.pid) == self._started

    def kill(self) -> None:
        """End the process and everything it started. Idempotent."""
        if self.alive:
            _end(self.pid)
        process = _CHILDREN.pop(self.pid, None)
        if process is not None:
            process.wait(KILL_S)

    def _connect(self) -> Channel:
        try:
            return connect(self._address, self._key, Reply, Deadline.after(START_S))
        except TransferError as error:
            msg = f"the process of {self._cls} ({self.pid}) is gone: {error}"
            raise TransferError(msg) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_line": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


class _Line:
    """One connection: sends calls, and matches replies to them in a thread of its own."""

    def __init__(self, channel: Channel, peer: str) -> None:
        self.broken = False
        self._channel = channel
        self._peer = peer
        self._numbers = count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, method: str, arguments: bytes) -> "Future[Any]":
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self.broken:
                raise TransferError(f"{self._peer} has ended")
            self._waiting[number] = future
        try:
            self._channel.send(Call(number, method, arguments), Deadline.after(IDLE_S))
        except (TransferError, MessageError) as error:
            self._waiting.pop(number, None)
            future.set_exception(error)
        return future

    def _receive(self) -> None:
        try:
            while True:
                self._settle(self._channel.receive(Deadline.after(IDLE_S)))
        except (TransferError, MessageError) as error:
            self._break(error)

    def _settle(self, reply: Reply) -> None:
        future = self._waiting.pop(reply.number, None)
        if future is None:
            return
        if isinstance(reply, Failure):
            future.set_exception(rebuilt(reply))
            return
        try:
            future.set_result(unpack(reply.value))
        except Exception as error:  # noqa: BLE001 - unpickling runs foreign code
            future.set_exception(error)

    def _break(self, error: Exception) -> None:
        with self._lock:
            self.broken = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            lost = TransferError(f"{self._peer} ended during a call: {error}")
            future.set_exception(lost)
        self._channel.close()


@lru_cache(maxsize=1)
def _spawner(pid: int) -> ThreadPoolExecutor:
    # The kernel ties a child to the *thread* that started it, so one that lives as long as the
    # process starts them all. Keyed by pid: a forked process has no threads of its parent.
    del pid
    return ThreadPoolExecutor(1, "process-launcher")


@lru_cache(maxsize=8)
def _template(pid: int, modules: tuple[str, ...]) -> socket.socket:
    """The line to the process that has imported these modules; `pid` as for `_spawner`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = [sys.executable, "-m", "rl_core.testing.process_template"]
        process = subprocess.Popen(
            [*program, str(pid), str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    _CHILDREN[process.pid] = process
    ours.settimeout(START_S)
    return ours


def _fork(spec: HostSpec, modules: tuple[str, ...], output: IO[bytes] | None) -> tuple[int, str]:
    """A fork of the template; its pid, and its address if it came up."""
    line = _template(os.getpid(), modules)
    order = msgspec.msgpack.encode(ForkOrder(spec, dict(os.environ), os.getcwd()))
    ready, announce = os.pipe()
    with os.fdopen(ready, "rb") as reading, os.fdopen(announce, "wb") as announcing:
        descriptors = [announcing.fileno(), output.fileno() if output else 2]
        socket.send_fds(line, [order], descriptors)
        pid = int(line.recv(64))
        announcing.close()
        return pid, _announced(reading.fileno())


def _announced(ready: int) -> str:
    readable, _, _ = select.select([ready], [], [], START_S)
    return os.read(ready, 4096).decode() if readable else ""


def _spawn(spec: HostSpec, env: Mapping[str, str], output: IO[bytes] | None) -> tuple[int, str]:
    """A new interpreter; its pid, and its address if it came up."""
    ready, announce = os.pipe()
    program = [sys.executable, "-m", "rl_core.testing.process_host"]
    try:
        process = subprocess.Popen(
            [*program, str(os.getpid()), str(announce)],
            env={**os.environ, **env},
            pass_fds=[announce],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
    finally:
        os.close(announce)
    try:
        if process.stdin is not None:
            with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
                stdin.write(msgspec.msgpack.encode(spec))
        _CHILDREN[process.pid] = process
        return process.pid, _announced(ready)
    finally:
        os.close(ready)


def _end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not select.select([fd], [], [], KILL_S)[0]:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)
