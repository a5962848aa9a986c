"""The process that asks a task file for its prompts (`python -m minirl.task_worker FILE OUT`).

The file is the user's: it may print, hang or end the process, so it is imported here and not in the
run's own process. What it prints goes to the standard error of this process.
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from minirl.reward_messages import Target
from minirl.reward_worker import describe, import_target

LIMIT_S = 120
"""After this time the process ends itself."""


class TaskPrompts(msgspec.Struct, tag=True):
    """What the file defines: texts, lists of messages, or mappings with further columns.

    Attributes:
        prompts: to train on.
        eval_prompts: to evaluate on; None if the file does not say.
    """

    prompts: list[Any]
    eval_prompts: list[Any] | None


class TaskRefused(msgspec.Struct, tag=True):
    """The file has no prompts; one line says why."""

    error: str


def main() -> None:
    """Write a message for the prompts of `argv[1]` to the file `argv[2]`."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    os.dup2(2, 1)
    path, out = sys.argv[1:]
    Path(out).write_bytes(_message(path))


def _message(path: str) -> bytes:
    try:
        module = import_target(Target(name="prompts", path=path))
        if not hasattr(module, "prompts"):
            return _refused("it defines no prompts (a list, or a function that returns one)")
        answer = TaskPrompts(_listed(module, "prompts"), _listed(module, "eval_prompts"))
        return msgspec.msgpack.encode(answer)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file is the user's: the edge
        return _refused(describe(error, path))


def _refused(error: str) -> bytes:
    return msgspec.msgpack.encode(TaskRefused(error))


def _listed(module: Any, name: str) -> Any:
    value = getattr(module, name, None)
    value = value() if callable(value) else value
    if value is None and name == "eval_prompts":
        return None
    if isinstance(value, str | dict) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {type(value).__name__}, not a list")
    return list(value)


if __name__ == "__main__":
    main()
