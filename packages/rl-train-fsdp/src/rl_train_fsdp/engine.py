"""The train engine: what the rest of the system calls; every method delegates to one module."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from rl_core.errors import LifecycleError
from rl_core.interfaces import RankPlace, TrainEngine
from rl_train_fsdp import checkpoint, staging
from rl_train_fsdp.checkpoint_writer import CheckpointWriter
from rl_train_fsdp.conversions import Conversions
from rl_train_fsdp.devices import select_device, set_threads
from rl_train_fsdp.full_tensors import FullTensors
from rl_train_fsdp.memory import MemoryUse, parameter_count_line
from rl_train_fsdp.micro_batches import Batching
from rl_train_fsdp.offload import Offload
from rl_train_fsdp.optimizer import CRITIC, ShardedAdamW
from rl_train_fsdp.perturbation import Perturbation
from rl_train_fsdp.policy import Policy
from rl_train_fsdp.prefix_sharing import sharing_width
from rl_train_fsdp.pretrained import PretrainedWriter
from rl_train_fsdp.process_group import ProcessGroup, collective
from rl_train_fsdp.reference import Reference
from rl_train_fsdp.samples import check_columns, check_sequences
from rl_train_fsdp.scoring import score
from rl_train_fsdp.shard_loading import check_complete, load_shards, unused_names
from rl_train_fsdp.update import PolicyUpdate
from rl_train_fsdp.wrapping import (
    allocate,
    build_on_meta,
    check_experts,
    enable_gradient_checkpointing,
    reshard,
    shard,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from rl_core.interfaces import TensorStream
    from rl_core.metadata import Manifest
    from rl_core.trajectory import LogProbs, TrainSample
    from rl_core.versions import PolicyVersion
    from rl_train_fsdp.config import FsdpConfig

logger = logging.getLogger(__name__)


class FsdpTrainEngine(TrainEngine):
    """The policy on one FSDP rank. Construction does nothing; `initialize` is collective."""

    def __init__(self, config: FsdpConfig, place: RankPlace) -> None:
        config.check_world(place.world_size)
        self._config = config
        self._place = place
        self._parts: _Parts | None = None

    def initialize(self) -> None:
        """Join the process group, load and shard the model, create the optimizer. Collective.

        ConfigError for a model directory that cannot be used, before the other ranks are waited
        for; TransferError if they do not come.
        """
        if self._parts is not None:
            raise LifecycleError("the engine is initialized already")
        with collective("initialize"):
            self._parts = _Parts(self._config, self._place)

    def compute_log_prob(self, samples: Sequence[TrainSample]) -> list[LogProbs]:
        """Log-probabilities and entropies of this rank's samples. Collective.

        TrainError for a sample that the model cannot take.
        """
        parts = self._ready()
        check_sequences(samples, parts.vocab_size)
        with collective("compute_log_prob"):
            return score(parts.policy, parts.group, samples, parts.batching, parts.device)

    def compute_ref_log_prob(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probabilities under the policy as it was loaded. Collective.

        LifecycleError unless `loss.kl_coef` is above 0: no reference is kept otherwise.
        """
        parts = self._ready()
        if parts.reference is None:
            raise LifecycleError("there is no reference policy; set loss.kl_coef above 0")
        with parts.reference.in_place():
            return [scored.log_probs for scored in self.compute_log_prob(samples)]

    def update_policy(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One iteration on this rank's samples; metrics over all ranks. Collective.

        Beside the metrics that `TrainEngine` names: `ppo_kl`, the mean of old minus new
        log-probabilities. `kl` is 0 where samples carry no reference.
        """
        parts = self._ready()
        check_sequences(samples, parts.vocab_size)
        check_columns(samples, self._config.loss)
        with collective("update_policy"):
            return parts.update.run(samples)

    def update_scores(self) -> list[LogProbs] | None:
        """What the policy before the last `update_policy` says of its loss tokens. Local.

        A list for each of this rank's samples, or None after several optimizer steps.
        """
        return self._initialized().update.scores

    def manifest(self, version: PolicyVersion, run_id: str) -> Manifest:
        """Structure of what `get_per_tensor_param` yields. Local, equal on all ranks."""
        return self._ready().full_tensors.manifest(version, run_id)

    def get_per_tensor_param(self) -> TensorStream:
        """Full tensors under their checkpoint names. Collective at each step; iterate to the end.

        A tensor is on the rank's device and valid until the next step.
        """
        parts = self._ready()
        reshard(parts.policy)
        return parts.full_tensors.stream()

    def save_checkpoint(self, path: Path) -> None:
        """Sharded parameters, moments, schedule and random generators under `path`. Collective.

        It appears whole or not at all; an existing checkpoint of that name is replaced.
        """
        self.begin_checkpoint(path)
        self.finish_checkpoint(self._config.engine.timeout_s)

    def begin_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, but only copy the state to host memory; a thread writes it.

        Collective. LifecycleError before the one begun last is finished.
        """
        parts = self._ready()
        reshard(parts.policy)
        state = checkpoint.TrainState(parts.update.iteration, parts.architecture)
        with collective("begin_checkpoint"):
            tensors = checkpoint.state_tensors(
                parts.policy.model, parts.optimizer, self._place.rank, parts.device
            )
            parts.writer.begin(path, tensors, state)

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would not wait. Local."""
        return self._initialized().writer.written()

    def finish_checkpoint(self, timeout_s: float) -> None:
        """Wait until what `begin_checkpoint` began is there. Local.

        Errors: TransferTimeoutError, TrainError on every rank if it could not be written.
        """
        self._initialized().writer.finish(timeout_s)

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote, on any number of ranks. Collective."""
        parts = self._ready()
        reshard(parts.policy)
        state = checkpoint.TrainState.read(path, parts.architecture)
        with collective("load_checkpoint"):
            checkpoint.load_state(
                parts.policy.model, parts.optimizer, self._place, parts.device, path
            )
        parts.update.iteration = state.iteration

    def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face directory, in the wire dtype. Collective; rank 0 writes.

        It appears under its name complete or not at all, and replaces an existing one.
        TrainError on every rank if it cannot be written.
        """
        parts = self._ready()
        reshard(parts.policy)
        dtype = self._config.engine.wire_dtype or "float32"
        writer = PretrainedWriter(staging.staged_path(path), parts.directory, dtype)

        def publish() -> None:
            writer.finish()
            staging.publish(path)

        with collective("save_pretrained"):
            parts.group.on_main(f"creating {path}", lambda: staging.begin(path))
            # Drained on every rank before any write error is raised.
            for meta, tensor in parts.full_tensors.stream():
                if parts.group.is_main:
                    writer.add(meta.name, tensor)
            parts.group.on_main(f"writing {path}", publish)

    def perturb(self, delta: float) -> None:
        """Change every published element by `delta` or more, until `restore`. Local.

        LifecycleError if they are perturbed already.
        """
        self._ready().perturbation.apply(delta)

    def restore(self) -> None:
        """Put back what `perturb` changed, bit for bit. Local; nothing to do without it."""
        self._ready().perturbation.undo()

    def offload(self) -> None:
        """Move parameters and optimizer state off the device, where configured. Local."""
        self._initialized().offload.offload()

    def onload(self) -> None:
        """Bring them back. Local."""
        self._initialized().offload.onload()

    def shutdown(self) -> None:
        """Leave the process group and free everything. Idempotent."""
        if self._parts is not None:
            self._parts.writer.abandon()
            self._parts.group.leave()
        self._parts = None

    def _ready(self) -> _Parts:
        parts = self._initialized()
        if parts.offload.active:
            raise LifecycleError("the policy is offloaded; call onload first")
        return parts

    def _initialized(self) -> _Parts:
        if self._parts is None:
            raise LifecycleError("the engine is not initialized, or was shut down")
        return self._parts


class _Parts:
    """Everything that exists between `initialize` and `shutdown`."""

    def __init__(self, config: FsdpConfig, place: RankPlace) -> None:
        self.directory = config.check_files()
        self.device = select_device(place.device, place.local_rank)
        model = build_on_meta(self.directory.path)
        self.architecture = type(model).__name__
        conversions = Conversions(model, self.directory.tensors)
        check_complete(model, conversions, self.directory)
        check_experts(model, place.world_size)
        self.policy = Policy(model, critic=config.loss.critic)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.group = ProcessGroup(place, config.engine.timeout_s)
        self.writer = CheckpointWriter(self.group)
        set_threads(self.group.ranks_on_node())
        if config.engine.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self._shard(config, conversions)
        self.optimizer = ShardedAdamW(self._trained(), config.optimizer)
        self.reference = Reference(self.policy) if config.loss.kl_coef > 0 else None
        self.policy.check_head(self.device)
        self.batching = self._batching(config)
        reshard(self.policy)
        wire = config.engine.wire_dtype
        self.full_tensors = FullTensors(model, conversions, self.directory, wire)
        self.perturbation = Perturbation(self.policy, wire)
        self.offload = Offload(self.policy, self.optimizer, config.engine, self.device, self._say)
        self.update = PolicyUpdate(
            self.policy,
            self.optimizer,
            self.group,
            config,
            self.device,
            self.batching,
            accumulate=not self._reshard(config),
        )

    def _trained(self) -> dict[str, nn.Parameter]:
        """Parameters by the names under which checkpoints know their moments."""
        critic = self.policy.value_head
        named = {} if critic is None else dict(critic.named_parameters(prefix=CRITIC))
        return {**dict(self.policy.model.named_parameters()), **named}

    def _batching(self, config: FsdpConfig) -> Batching:
        """Collective."""
        width = None
        if config.engine.share_prefixes:
            width, line = sharing_width(self.policy, self.group, self.device)
            self._say(line)
        return Batching(config.engine.ppo_max_token_len_per_gpu, width)

    def _reshard(self, config: FsdpConfig) -> bool:
        chosen = config.engine.reshard_after_forward
        return self.device.type != "cpu" if chosen is None else chosen

    def _shard(self, config: FsdpConfig, conversions: Conversions) -> None:
        """Wrap, allocate and load, with the lines that the log shows of it."""
        model = self.policy.model
        count = sum(param.numel() for param in model.parameters())
        self._say(parameter_count_line(self.architecture, count))
        self._say(MemoryUse.measure(self.device).line("Before FSDP"))
        mesh = self.group.mesh(config.engine.fsdp_size)
        dtype = getattr(torch, config.engine.dtype)
        wrapped = shard(self.policy, mesh, dtype, reshard=self._reshard(config))
        allocate(self.policy, self.device)
        load_shards(model, conversions, self.directory)
        self.policy.reset_critic()
        self._say(
            f"Applied FSDP wrapping. mesh={tuple(mesh.shape)}, dtype={config.engine.dtype}, "
            f"layers={'|'.join(wrapped) or 'none'}, device={self.device}"
        )
        self._say(MemoryUse.measure(self.device).line("After FSDP"))
        unused = unused_names(model, conversions)
        if unused:
            self._say(
                f"{len(unused)} tensors of {self.directory.path} have no place in "
                f"{self.architecture} and are left out, the first is {unused[0]!r}"
            )

    def _say(self, line: str) -> None:
        if self.group.is_main:
            logger.info(line)
