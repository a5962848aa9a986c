"""Sharded training state for resuming, through torch.distributed.checkpoint.

A directory holds the shards of every rank, `.metadata` (torch's own) and `train_state.json`. It
can be loaded by another number of ranks. It is trusted: torch reads `.metadata` by unpickling.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from rl_core.errors import ConfigError
from rl_train_fsdp.conversions import module_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from rl_train_fsdp.optimizer import ShardedAdamW

STATE_FILE = "train_state.json"
FORMAT = 1


@dataclass(frozen=True)
class TrainState:
    """What is not a tensor.

    Attributes:
        iteration: updates done: the step of the learning-rate schedule.
        architecture: class of the model.
        format: version of this layout.
    """

    iteration: int
    architecture: str
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Write `train_state.json`."""
        (directory / STATE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path, architecture: str) -> TrainState:
        """Read it back; ConfigError if it is missing, damaged or of another model."""
        file = directory / STATE_FILE
        try:
            state = cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            msg = f"{directory} is no training checkpoint ({error}); resume from another one"
            raise ConfigError(msg) from error
        if (state.format, state.architecture) != (FORMAT, architecture):
            msg = (
                f"{directory} is a checkpoint of {state.architecture} in format {state.format}, "
                f"not of {architecture} in format {FORMAT}"
            )
            raise ConfigError(msg)
        return state


def save_shards(model: nn.Module, optimizer: ShardedAdamW, directory: Path) -> None:
    """Write this rank's shards of parameters and moments. Collective."""
    dcp.save(_tensors(model, optimizer), checkpoint_id=directory)


def load_shards(model: nn.Module, optimizer: ShardedAdamW, directory: Path) -> None:
    """Read this rank's shards in place, however many ranks wrote them. Collective."""
    try:
        dcp.load(_tensors(model, optimizer), checkpoint_id=directory)
    except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        msg = f"checkpoint {directory} cannot be loaded ({reason}); resume from another one"
        raise ConfigError(msg) from error


def _tensors(model: nn.Module, optimizer: ShardedAdamW) -> dict[str, Any]:
    """All sharded state under flat names; the values are the live tensors."""
    flat: dict[str, Any] = {}
    _add(flat, "model", module_tensors(model))
    _add(flat, "model", optimizer.critic)
    for name, state in optimizer.state.items():
        _add(flat, f"optimizer.{name}", state)
    return flat


def _add(flat: dict[str, Any], prefix: str, tensors: Mapping[str, Any]) -> None:
    flat.update({f"{prefix}.{name}": tensor.detach() for name, tensor in tensors.items()})
