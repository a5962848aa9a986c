"""The Ray actor on each actor rank."""

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minirl.live_member import Expected, LiveMember, LiveName
from minirl.rollout_member import RolloutMember
from minirl.transfer_member import TransferMember, never
from minirl.worker_process import ProcessSettings, prepare_process
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.errors import ConfigError
from rl_core.interfaces import (
    BucketLease,
    LeasedTensor,
    LoadReport,
    RankPlace,
    SupportsCheckpointBehind,
    SupportsPerturbation,
    SupportsReference,
    SupportsUpdateScores,
    TensorStream,
    TrainEngine,
    TransferReport,
)
from rl_core.metadata import Manifest
from rl_core.trajectory import LogProbs, TrainSample
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)


class ActorWorker(TransferMember, LiveMember):
    """One rank of the policy: builds the train engine and runs it. Every method is collective."""

    def __init__(self, settings: ProcessSettings) -> None:
        prepare_process(settings)
        self._engine: TrainEngine | None = None

    @property
    def engine(self) -> TrainEngine:
        """The train engine, after `init_model`."""
        if self._engine is None:
            msg = "init_model was not called"
            raise RuntimeError(msg)
        return self._engine

    def free_port(self) -> int:
        """A TCP port that is free on this node, for the process group. Rank 0."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def init_model(self, backend: str, config: Mapping[str, Any], place: RankPlace) -> None:
        """Create the train engine and load the policy into it."""
        entry, typed = plugins.load_configured(plugins.TRAIN_ENGINES, backend, config, "actor")
        engine = plugins.load_object(entry.engine)(typed, place)
        engine.initialize()
        self._engine = engine

    def compute_log_prob(self, samples: Sequence[TrainSample]) -> list[LogProbs]:
        """Log-probabilities of this rank's samples under the current policy."""
        self.engine.onload()
        return self.engine.compute_log_prob(samples)

    def compute_ref_log_prob(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probabilities of this rank's samples under the frozen reference."""
        engine = self.engine
        if not isinstance(engine, SupportsReference):
            msg = f"algorithm.kl_coef: {type(engine).__name__} keeps no reference policy"
            raise ConfigError(msg)
        engine.onload()
        return engine.compute_ref_log_prob(samples)

    def update_policy(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One iteration on this rank's samples."""
        self.engine.onload()
        metrics = self.engine.update_policy(samples)
        self.engine.offload()
        return metrics

    def tells_update_scores(self) -> bool:
        """Whether the train engine has `update_scores`."""
        return isinstance(self.engine, SupportsUpdateScores)

    def update_scores(self) -> list[LogProbs] | None:
        """What the policy before the last update says of its loss tokens; see the interface."""
        engine = self.engine
        return engine.update_scores() if isinstance(engine, SupportsUpdateScores) else None

    def manifest(self, version: PolicyVersion, run_id: str) -> Manifest:
        """Structure of the weights as they would be sent. Local."""
        return self.engine.manifest(version, run_id)

    def send_weights(
        self, manifest: Manifest, seconds: float, live: bool
    ) -> tuple[TransferReport, Expected]:
        """Send this version to the rollout ranks; ranks other than 0 only take part in gathering.

        Gathering is collective, so a rank whose transfer failed reads its stream to the end.
        With `live` also what the engines must then hold, as far as it is this rank's to say.
        """
        with _drained(self.engine.get_per_tensor_param()) as full:
            tap = self.live_tap(full, manifest, wanted=live)
            deadline = Deadline.after(seconds)
            report = self.transfer.send_weights(tap.stream, manifest, deadline, never())
            return report, tap.expected()

    def expect_weights(self, version: PolicyVersion, run_id: str) -> Expected:
        """What the engines would hold of the present weights; nothing is sent."""
        manifest = self.engine.manifest(version, run_id)
        with _drained(self.engine.get_per_tensor_param()) as full:
            tap = self.live_tap(full, manifest, wanted=True)
            _exhaust(tap.stream)
            return tap.expected()

    def expected_content(
        self, version: PolicyVersion, run_id: str, wanted: Sequence[LiveName]
    ) -> dict[LiveName, bytes]:
        """What some tensors of the engines would hold of the present weights; nothing is sent."""
        manifest = self.engine.manifest(version, run_id)
        with _drained(self.engine.get_per_tensor_param()) as full:
            return self.assemble_live(full, manifest, wanted)

    def perturb(self, delta: float) -> None:
        """Change every published element, until `restore`."""
        self._perturbable().perturb(delta)

    def restore(self) -> None:
        """Undo `perturb`, bit for bit."""
        self._perturbable().restore()

    def begin_checkpoint(self, path: str) -> None:
        """Begin to save the training state of this moment; write it at once if need be."""
        engine = self.engine
        engine.onload()
        if isinstance(engine, SupportsCheckpointBehind):
            engine.begin_checkpoint(Path(path))
        else:
            engine.save_checkpoint(Path(path))
        engine.offload()

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would not wait. Local."""
        engine = self.engine
        return not isinstance(engine, SupportsCheckpointBehind) or engine.checkpoint_written()

    def finish_checkpoint(self, timeout_s: float) -> None:
        """Wait until what was begun is there. Local."""
        if isinstance(self.engine, SupportsCheckpointBehind):
            self.engine.finish_checkpoint(timeout_s)

    def load_checkpoint(self, path: str) -> None:
        """Go on from training state that any number of ranks saved."""
        self.engine.onload()
        self.engine.load_checkpoint(Path(path))
        self.engine.offload()

    def save_pretrained(self, path: str) -> None:
        """Hugging Face directory."""
        self.engine.save_pretrained(Path(path))

    def shutdown(self) -> None:
        """Leave the groups."""
        self.close_transfer()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _perturbable(self) -> SupportsPerturbation:
        engine = self.engine
        if not isinstance(engine, SupportsPerturbation):
            msg = f"perturb_before_sync: {type(engine).__name__} cannot change and restore weights"
            raise ConfigError(msg)
        return engine


class FusedActorRolloutWorker(ActorWorker, RolloutMember):
    """An actor rank that feeds the rollout rank on the same device, if there is one."""

    def sync_weights(
        self, version: PolicyVersion, run_id: str, seconds: float, light: bool, live: bool
    ) -> tuple[LoadReport | None, Expected]:
        """Stream this version into the engine rank beside this rank; None if there is none.

        Gathering is collective, so a rank without an engine rank, or whose engine failed, reads
        the stream to its end all the same. With `live` as in `send_weights`.
        """
        manifest = self.engine.manifest(version, run_id)
        with _drained(self.engine.get_per_tensor_param()) as full:
            tap = self.live_tap(full, manifest, wanted=live)
            report = None
            if self._adapter is None:
                _exhaust(tap.stream)
            else:
                leases = _as_leases(tap.stream, verify=light)
                report = self._adapter.update_weights(leases, manifest, Deadline.after(seconds))
            return report, tap.expected()


def _exhaust(stream: TensorStream) -> None:
    for _ in stream:
        pass


@contextmanager
def _drained(stream: TensorStream) -> Iterator[TensorStream]:
    """Read the stream to its end however the block ends: each step is a collective."""
    try:
        yield stream
    finally:
        _exhaust(stream)


def _as_leases(stream: TensorStream, *, verify: bool) -> Iterator[BucketLease]:
    """Each gathered tensor as a lease of its own, with a digest taken before anything else."""
    from rl_core.torch import content_digest

    for meta, tensor in stream:
        digest = content_digest(meta, tensor) if verify else None
        yield BucketLease([LeasedTensor(meta, tensor, digest)])
