"""The run's end of the process that computes rewards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from minirl.reward_messages import Batch, FromWorker, Loaded, Part, Raised, Refused, Rewards, Target
from rl_core.channel import Channel, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import ConfigError, TransferError, TransferTimeoutError

START_S = 120.0
"""Time for importing the function's module; such modules may import large libraries."""
PART_BYTES = 16 << 20
_STOP_S = 5.0
_GRACE_S = 5.0


class RewardProcess:
    """A process that holds one loaded reward function and runs it when asked.

    Blocking and not thread-safe. The process ends at `close()`, and with this process in any case.
    """

    def __init__(self, target: Target, log_path: Path | None = None) -> None:
        """Start the process and load the function.

        Args:
            target: what to load.
            log_path: file that gets what the function prints; None is this process's stderr.

        Errors: ConfigError if the function cannot be loaded.
        """
        mine, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            log = stack.enter_context(log_path.open("ab")) if log_path is not None else None
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minirl.reward_worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = mine
        self._killing = threading.Lock()
        try:
            self.signature = self._load(target)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process; it leads a process group of its own."""
        return self._process.pid

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Rewards | Raised:
        """Run the function with keyword `arguments`.

        Errors: TransferTimeoutError if it does not return in time, TransferError if it ended the
        process. Either way the process is of no more use: `close()` it.
        """
        deadline = Deadline.after(timeout_s)
        data = msgspec.msgpack.encode(arguments)
        while len(data) > PART_BYTES:
            self._channel.send(Part(data[:PART_BYTES]), deadline)
            data = data[PART_BYTES:]
        self._channel.send(Batch(data, timeout_s + _GRACE_S), deadline)
        answer: Rewards | Raised = self._channel.receive(deadline)
        return answer

    @property
    def exit_code(self) -> int | None:
        """After `close()`: that of a process that had ended by itself, else that of its killing."""
        return self._process.returncode

    def close(self) -> None:
        """End the process and whatever it started, without waiting for the function. Idempotent."""
        self._connection.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.kill()

    def kill(self) -> None:
        """End the process, so that a call in another thread fails. From any thread; idempotent."""
        with self._killing:
            if self._process.returncode is None:
                # Not waited for yet, so the group's number cannot belong to anybody else.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(_STOP_S)

    def _load(self, target: Target) -> Loaded:
        deadline = Deadline.after(START_S)
        where = target.path or target.module
        key = new_key()
        try:
            stdin = self._process.stdin
            if stdin is not None:
                stdin.write(key)
                stdin.flush()
            self._channel = Channel(self._connection, key, FromWorker, deadline, accepted=True)
            self._channel.send(target, deadline)
            answer = self._channel.receive(deadline)
        except TransferTimeoutError as error:
            msg = f"reward function {where}: importing it takes longer than {START_S:.0f} s"
            raise ConfigError(msg) from error
        except (TransferError, BrokenPipeError) as error:
            self.close()
            code = self.exit_code
            msg = f"reward function {where}: importing it ended the process (exit code {code})"
            raise ConfigError(msg) from error
        if isinstance(answer, Refused):
            known = f"; functions there: {', '.join(answer.functions)}" if answer.functions else ""
            raise ConfigError(f"reward function {where}: {answer.error}{known}")
        loaded: Loaded = answer
        return loaded
