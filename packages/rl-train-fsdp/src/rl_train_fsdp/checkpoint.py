"""Sharded training state for resuming, through torch.distributed.checkpoint.

A directory holds the shards of every rank, the state of its random generators, `.metadata` (torch's
own) and `train_state.json`. It can be loaded by another number of ranks; a rank that did not exist
when it was written then keeps its generators as they are. It is trusted: torch reads `.metadata` by
unpickling.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from rl_core.errors import ConfigError
from rl_train_fsdp.conversions import module_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from rl_core.interfaces import RankPlace
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


def state_tensors(
    model: nn.Module, optimizer: ShardedAdamW, rank: int, device: torch.device
) -> dict[str, Any]:
    """All that `load_state` restores, under flat names; of parameters and moments the live ones."""
    generators = {_generator(rank, kind): state for kind, state in _random_states(device).items()}
    return {**_tensors(model, optimizer), **generators}


def load_state(
    model: nn.Module,
    optimizer: ShardedAdamW,
    place: RankPlace,
    device: torch.device,
    directory: Path,
) -> None:
    """Read this rank's shards in place, however many ranks wrote them. Collective.

    The random generators are restored where a rank of this number wrote theirs.
    """
    tensors = _tensors(model, optimizer)
    try:
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        states = {
            kind: torch.empty_like(state)
            for kind, state in _random_states(device).items()
            if _generator(place.rank, kind) in stored
        }
        tensors.update({_generator(place.rank, kind): state for kind, state in states.items()})
        dcp.load(tensors, checkpoint_id=directory)
    except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        msg = f"checkpoint {directory} cannot be loaded ({reason}); resume from another one"
        raise ConfigError(msg) from error
    for kind, state in states.items():
        _generators(device)[kind].set_rng_state(state)


def _generator(rank: int, kind: str) -> str:
    return f"rng.{rank}.{kind}"


def _generators(device: torch.device) -> dict[str, Any]:
    """What torch draws random numbers from in this process: the host, and the rank's device."""
    if device.type == "cpu":
        return {"host": torch.random}
    return {"host": torch.random, "device": getattr(torch, device.type)}


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    return {kind: module.get_rng_state() for kind, module in _generators(device).items()}


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
