"""A task of one's own: a Python file with the prompts and their reward (`data.task=FILE.py`)."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from minirl.prompt_file import RawPrompt, parse_records
from minirl.task_worker import LIMIT_S, TaskPrompts, TaskRefused
from rl_core.errors import ConfigError

_GRACE_S = 5.0


def is_task_file(task: str) -> bool:
    """Whether `data.task` names a file, not one of our tasks."""
    return task.endswith(".py")


def read_task_file(
    path: Path, prompt_key: str, log_path: Path | None = None
) -> tuple[list[RawPrompt], list[RawPrompt] | None]:
    """What to train and to evaluate on; None where the file has no `eval_prompts`.

    Args:
        path: Python file that defines `prompts`, and may define `eval_prompts`: lists, or
            functions that return them, of texts, lists of chat messages, or mappings.
        prompt_key: key of the prompt in a mapping.
        log_path: file that gets what the file prints; None is stderr.

    Errors: ConfigError if there is no such file, it fails or ends its process, takes longer than
    `LIMIT_S`, or has a bad prompt (`file prompts[n]: what is wrong`).
    """
    if not path.is_file():
        raise ConfigError(f"data.task={path}: no such file")
    answer = _asked(path.resolve(), log_path)
    train = _parse(answer.prompts, prompt_key, path, "prompts")
    if answer.eval_prompts is None:
        return train, None
    return train, _parse(answer.eval_prompts, prompt_key, path, "eval_prompts")


def _asked(path: Path, log_path: Path | None) -> TaskPrompts:
    with tempfile.TemporaryDirectory(prefix="minirl-task-") as directory:
        out = Path(directory) / "prompts"
        _run(path, out, log_path)
        message = out.read_bytes()
    answer = msgspec.msgpack.decode(message, type=TaskPrompts | TaskRefused)
    if isinstance(answer, TaskRefused):
        raise ConfigError(f"data.task={path}: {answer.error}")
    return answer


def _run(path: Path, out: Path, log_path: Path | None) -> None:
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_path.open("ab")) if log_path is not None else None
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minirl.task_worker", str(path), str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S + _GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it, or what it has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_GRACE_S)
    if code == -signal.SIGALRM:
        raise ConfigError(f"data.task={path}: its prompts take longer than {LIMIT_S} s")
    if not out.exists():
        raise ConfigError(f"data.task={path}: it ended its process (exit code {code})")


def _parse(values: Sequence[Any], prompt_key: str, path: Path, name: str) -> list[RawPrompt]:
    records = (
        (f"{path} {name}[{at}]", value if isinstance(value, dict) else {prompt_key: value})
        for at, value in enumerate(values)
    )
    return parse_records(records, prompt_key, f"{path} {name}")
