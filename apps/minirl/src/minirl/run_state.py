"""What a training checkpoint says of the run beside the actor's own state, and whether it is whole.

A checkpoint is a directory `step_<n>` with `actor/`, which the train engine writes and reads, and
`run.json`. It gets its name when all of it is there; `run.json` lists the files, so that one which
was damaged or copied in part later is noticed, too.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import ConfigError, in_one_line
from rl_core.versions import PolicyVersion

ACTOR = "actor"
RUN_FILE = "run.json"
VERSION_FILE = "version.json"
"""In the run directory: the last version that was published."""

FORMAT = 1


class RunState(msgspec.Struct, kw_only=True):
    """Where a run stood when a step was done: its rows written, its version published.

    Attributes:
        step: training steps done.
        version: of the weights, `e<epoch>.s<n>`.
        weights_digest: digest of digests with which the version was published, if it was verified.
        samples: rows of `trajectories.jsonl` so far.
        rewards: mean reward of each step.
        evaluations: those made so far, as plain values.
        data: position in the prompts, as `PromptLoader.state` gives it.
        settings: those that a resumed run must share.
        model: path of the model's directory, and `model_digest` what it was recognised by.
        model_digest: see `model`.
        reference_digest: what the weights of `model` are recognised by, if a term of the loss keeps
            the policy near them; else empty.
        world_size: actor ranks.
        files: sizes in bytes of the other files of the checkpoint, by relative path.
        format: of this record.
    """

    step: int
    version: str
    weights_digest: str | None = None
    samples: int = 0
    rewards: list[float] = []
    evaluations: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    model: str = ""
    model_digest: str = ""
    reference_digest: str = ""
    world_size: int = 1
    files: dict[str, int] = {}
    format: int = FORMAT

    @property
    def epoch(self) -> int:
        """Of the incarnation of the run that wrote it."""
        return PolicyVersion.parse(self.version).epoch

    def write(self, directory: Path) -> None:
        """Write `run.json` into a staged checkpoint, durably, with the sizes of what is there."""
        self.files = _sizes(directory)
        with (directory / RUN_FILE).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
            file.flush()
            os.fsync(file.fileno())


NOTHING_DONE = RunState(step=0, version="e0.s0")
"""Of a run that has no checkpoint."""


def read_state(directory: Path) -> RunState:
    """The record of a whole checkpoint; ConfigError says why `directory` is none."""
    try:
        state = msgspec.json.decode((directory / RUN_FILE).read_bytes(), type=RunState)
        PolicyVersion.parse(state.version)
    except FileNotFoundError:
        raise ConfigError(f"{directory} is half-written: it has no {RUN_FILE}") from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{directory / RUN_FILE} cannot be read: {in_one_line(error)}") from error
    if state.format != FORMAT:
        msg = f"{directory} is of format {state.format}; this version of minirl reads {FORMAT}"
        raise ConfigError(msg)
    found = _sizes(directory)
    for name, size in state.files.items():
        if found.get(name) != size:
            msg = f"{directory} is damaged: {name} has {found.get(name, 'no')} of {size} bytes"
            raise ConfigError(msg)
    return state


def _sizes(directory: Path) -> dict[str, int]:
    return {
        str(item.relative_to(directory)): item.stat().st_size
        for item in sorted(directory.rglob("*"))
        if item.is_file() and item.name != RUN_FILE
    }
