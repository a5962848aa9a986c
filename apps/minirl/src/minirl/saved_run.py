"""What of a run is saved for the case that it dies, and restored when it goes on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from minirl.actor_state import ActorState
from minirl.checkpoints import Checkpoints
from minirl.config import MiniRLConfig
from minirl.resume import Beginning
from minirl.resume_settings import model_digest, reference_digest, shared_settings
from minirl.run_output import RunOutput
from minirl.run_state import RunState
from minirl.system import RLSystem
from minirl.task_data import TaskData
from rl_core.versions import PolicyVersion


class SavedRun:
    """Restores the checkpoint that a run begins with, and saves new ones.

    Attributes:
        done: what was done before this incarnation.
    """

    def __init__(
        self,
        config: MiniRLConfig,
        data: TaskData,
        output: RunOutput,
        system: RLSystem,
        beginning: Beginning,
    ) -> None:
        self.done = beginning.state
        self._config = config
        self._data = data
        self._output = output
        self._system = system
        self._world_size = system.workers.world_size
        self._epoch = beginning.epoch
        self._begun_with = beginning.actor
        self._reference = reference_digest(config, data.model_path)
        self._actor = ActorState(system.workers)
        self._checkpoints = Checkpoints(
            output.path / "checkpoints", config.trainer.keep_last, self._actor
        )

    def restore(self) -> PolicyVersion:
        """Let the actor train from where the run stood, and the engines serve that version."""
        version = self._system.weight_sync.version_of(self._epoch, self.done.step)
        if self._begun_with is not None:
            self._actor.load(self._begun_with)
            self._system.weight_sync.expect(version, self.done.weights_digest)
        self._system.weight_sync.sync(version, "initial")
        return version

    def save(self, step: int, samples: int, evaluations: Sequence[Any]) -> None:
        """Begin to save what there is after `step`, if that is due.

        By then its rows are written: a checkpoint must not know of a step that they lack.

        Args:
            step: training steps done.
            samples: rows of `trajectories.jsonl`.
            evaluations: made so far.
        """
        self._checkpoints.settle()
        frequency = self._config.trainer.save_freq
        if frequency and step % frequency == 0 and step > self.done.step:
            plain = msgspec.to_builtins(list(evaluations))
            self._checkpoints.begin(self._state(step, samples, plain))

    def save_final(self, write: Callable[[Path], object]) -> None:
        """Let `write` save the trained model as a Hugging Face directory."""
        self._checkpoints.save_final(write)

    def settle(self, timeout_s: float) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        self._checkpoints.finish(timeout_s)

    def _state(self, step: int, samples: int, evaluations: list[dict[str, Any]]) -> RunState:
        version = self._system.weight_sync.version_of(self._epoch, step)
        return RunState(
            step=step,
            version=str(version),
            weights_digest=self._system.weight_sync.digest_of(version),
            samples=samples,
            rewards=list(self._output.rewards),
            evaluations=evaluations,
            data=self._data.loader.state(),
            settings=shared_settings(self._config),
            model=str(self._data.model_path),
            model_digest=model_digest(self._data.model_path),
            reference_digest=self._reference,
            world_size=self._world_size,
        )
