"""The process that runs a reward function (`python -m minirl.reward_worker`).

The function is the user's: it may print, hang, crash or end the process, so it runs here and not
in the run's own process. It runs in the main thread, where signal handlers work (some answer
checkers set alarms). What it prints goes to the standard error of this process.

The process ends with the run: its standard input is a pipe from the run, and its end of file
means that the run is gone. For a function that hangs without letting other threads run, each call
also arms an alarm of the kernel.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from minirl.reward_messages import Batch, Loaded, Part, Raised, Refused, Rewards, Target, ToWorker
from rl_core.channel import KEY_BYTES, Channel
from rl_core.deadlines import Deadline
from rl_core.errors import TransferError

_USER_MODULE = "minirl_user_reward"
_ANSWER_S = 30.0
_IDLE_S = 30 * 86400.0
"""Longest time between two calls; a run that ends or dies is noticed at once by the pipe."""


def main() -> None:
    """Serve one run: `argv[1]` is the number of an inherited socket, the key comes on stdin."""
    key = os.read(0, KEY_BYTES)
    _watch_parent(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO)
    connection = socket.socket(fileno=int(sys.argv[1]))
    deadline = Deadline.after(_ANSWER_S)
    with Channel(connection, key, ToWorker, deadline, accepted=False) as channel:
        target: Target = channel.receive(deadline)
        loaded = _load(target)
        if isinstance(loaded, Refused):
            channel.send(loaded, Deadline.after(_ANSWER_S))
            return
        channel.send(_signature(loaded), Deadline.after(_ANSWER_S))
        with asyncio.Runner() as runner, contextlib.suppress(TransferError):  # the run is gone
            while True:
                arguments, limit_s = _receive(channel)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                answer = _call(loaded, arguments, runner, target.path)
                signal.setitimer(signal.ITIMER_REAL, 0)
                channel.send(answer, Deadline.after(_ANSWER_S))


def _watch_parent(pipe: int) -> None:
    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


def _load(target: Target) -> Callable[..., Any] | Refused:
    module: Any = None
    try:
        module = import_target(target)
        function = getattr(module, target.name, None)
        if target.module is not None and function is not None:
            function = function(**target.arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file is the user's: the edge
        return Refused(f"importing it failed: {describe(error, target.path)}", [])
    if inspect.isclass(function):
        return Refused(f"{target.name!r} is a class, not a function", _functions(module))
    if callable(function):
        nameless = _nameless(function)
        if nameless is None:
            return function  # type: ignore[no-any-return]
        how = "a reward is called with arguments by name"
        return Refused(f"{target.name!r} takes {nameless!r} by position only; {how}", [])
    return Refused(f"it defines no function {target.name!r}", _functions(module))


def import_target(target: Target) -> Any:
    """The module that a function is in, with the file's directory on the path."""
    if target.module is not None:
        return importlib.import_module(target.module)
    path = Path(target.path or "")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(_USER_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_USER_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _functions(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _nameless(function: Callable[..., Any]) -> str | None:
    """A parameter that has to be given and cannot be given by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    only = inspect.Parameter.POSITIONAL_ONLY
    empty = inspect.Parameter.empty
    return next((p.name for p in parameters if p.kind is only and p.default is empty), None)


def _signature(function: Callable[..., Any]) -> Loaded:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Loaded(parameters=[], required=[], takes_any=True)
    return Loaded(
        parameters=[item.name for item in parameters if item.kind in named],
        required=[
            item.name
            for item in parameters
            if item.kind in named and item.default is inspect.Parameter.empty
        ],
        takes_any=any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters),
    )


def _receive(channel: Channel) -> tuple[dict[str, Any], float]:
    data = b""
    while isinstance(message := channel.receive(Deadline.after(_IDLE_S)), Part):
        data += message.data
    batch: Batch = message
    return msgspec.msgpack.decode(data + batch.data), batch.limit_s


def _call(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    runner: asyncio.Runner,
    path: str | None,
) -> Rewards | Raised:
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_await(result))
        return _rewards(result)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's: the edge
        return Raised(describe(error, path))
    finally:
        sys.stdout.flush()


async def _await(result: Any) -> Any:
    return await result


def _rewards(result: Any) -> Rewards | Raised:
    # A mapping would give its keys, a set its values in any order.
    no_list = isinstance(result, str | bytes | Mapping | Set)
    if no_list or not isinstance(result, Iterable):
        return Raised(f"it returned {type(result).__name__}, not a list of numbers")
    return Rewards([_number(value) for value in result])


def _number(value: Any) -> float | str | None:
    """Numbers of any library as float; the text of what is no number."""
    if value is None or isinstance(value, str | bytes):
        return None if value is None else repr(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)


def describe(error: BaseException, path: str | None) -> str:
    """One line: the error's type and text, and the innermost line of the user's file."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path is not None and frame.filename == path]
    where = f" ({Path(path or '').name}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {text}{where}"


if __name__ == "__main__":
    main()
