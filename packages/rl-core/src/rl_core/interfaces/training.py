"""What an engine that trains the policy promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rl_core.interfaces.version import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rl_core.interfaces.leases import TensorStream
    from rl_core.metadata import Manifest
    from rl_core.trajectory import LogProbs, TrainSample
    from rl_core.versions import PolicyVersion


class TrainEngine(ABC):
    """Holds and updates the policy; one instance in each actor rank's process.

    Every method is collective unless it says otherwise: all ranks call it, in the same order.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Join the process group, load and shard the model, create the optimizer."""

    @abstractmethod
    def compute_log_prob(self, samples: Sequence[TrainSample]) -> list[LogProbs]:
        """Log-probabilities and entropies of this rank's samples under the current policy."""

    @abstractmethod
    def update_policy(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One iteration (all epochs and mini-batches) on this rank's samples; its metrics.

        Metrics are already reduced over the ranks: `loss`, `grad_norm`, `lr`, `kl`,
        `entropy`, `clip_fraction`, and `optimizer_steps`.
        """

    @abstractmethod
    def manifest(self, version: PolicyVersion, run_id: str) -> Manifest:
        """Structure of what `get_per_tensor_param` will yield. Local, and equal on all ranks."""

    @abstractmethod
    def get_per_tensor_param(self) -> TensorStream:
        """Full tensors under their Hugging Face names, one gathered at a time.

        Every rank iterates to the end, also after a failure elsewhere (drain): each step is a
        collective. A tensor is valid until the next step.
        """

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Training state for resuming under `path`, in whatever files; none if it failed.

        Parameters, optimizer, scheduler, and the random generators of every rank.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote, also on another number of ranks."""

    @abstractmethod
    def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face directory (weights, config, tokenizer); rank 0 writes."""

    @abstractmethod
    def offload(self) -> None:
        """Move parameters and optimizer state off the device, where configured. Local."""

    @abstractmethod
    def onload(self) -> None:
        """Bring them back. Local."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the process group and free everything. Idempotent."""


@dataclass(frozen=True)
class TrainBackend:
    """What a package announces under the entry-point group `minirl.train_engines`.

    Attributes:
        name: value of `actor.engine_config.backend` that selects it.
        config_cls: `module:Class` of its dataclass, constructed from the `actor` and
            `algorithm` sections of the configuration.
        engine: `module:Class` of the `TrainEngine`, called with (config, RankPlace).
        api_version: `API_VERSION` it was written for.
    """

    name: str
    config_cls: str
    engine: str
    api_version: int = API_VERSION


@runtime_checkable
class SupportsReference(Protocol):
    """A train engine that keeps the policy as it was loaded, for a KL term."""

    def compute_ref_log_prob(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probabilities of this rank's samples under the frozen reference. Collective."""
        ...


@runtime_checkable
class SupportsUpdateScores(Protocol):
    """A train engine that tells what it computed on its way through an update."""

    def update_scores(self) -> list[LogProbs] | None:
        """What the policy before the last `update_policy` says of that update's samples. Local.

        Of each sample's tokens with loss mask 1, and without a pass of its own. None if the update
        took several optimizer steps (the later ones saw another policy), or there was none.
        """
        ...


@runtime_checkable
class SupportsCheckpointBehind(Protocol):
    """A train engine that writes checkpoints while the training goes on."""

    def begin_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, but return when the state was copied to host memory. Collective.

        LifecycleError before the one begun last is finished.
        """
        ...

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would not wait. Local."""
        ...

    def finish_checkpoint(self, timeout_s: float) -> None:
        """Wait until what `begin_checkpoint` began is there; nothing to do if nothing was. Local.

        TransferTimeoutError after `timeout_s` seconds, TrainError on every rank if it could not
        be written.
        """
        ...


@runtime_checkable
class SupportsPerturbation(Protocol):
    """A train engine that can change what it publishes for a while, to prove that it arrives."""

    def perturb(self, delta: float) -> None:
        """Keep a copy of the weights and add `delta` to every element that is published.

        Where the published dtype would round that away, one step of the dtype is added, so that no
        element stays what it was. Local. LifecycleError if they are perturbed already.
        """
        ...

    def restore(self) -> None:
        """Put back what `perturb` kept, bit for bit. Local; nothing to do without it."""
        ...


@runtime_checkable
class SupportsFileCheck(Protocol):
    """A backend configuration that can tell early whether its files are usable."""

    def check_files(self) -> object:
        """Read headers and sizes only; ConfigError names what is wrong with which file.

        Returns what was found. Of a train engine that is a `SupportsParameterCount`, if the program
        is to estimate before the start whether the model fits into memory.
        """
        ...


@runtime_checkable
class SupportsParameterCount(Protocol):
    """A model whose files were looked at."""

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors that would be loaded."""
        ...
