"""Samples that a run has recorded, to train on again (`debug.train_only`)."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from minirl.model_check import read_model_config
from minirl.prompts import Prompt
from minirl.sampling import Sample
from minirl.trajectories import Trajectory
from rl_core.errors import ConfigError
from rl_core.trajectory import Completion, FinishReason, VersionSpan
from rl_core.versions import PolicyVersion

KEY = "debug.train_only"
_FILE = "trajectories.jsonl"


class RecordedSamples:
    """Batches in the order of the recording, from the beginning again when they are used up."""

    def __init__(self, path: Path, batch_size: int, vocab_size: int) -> None:
        """Look at the whole recording.

        Args:
            path: the directory of a run, or a file of trajectories.
            batch_size: samples per step.
            vocab_size: of the model that is trained.

        Errors: ConfigError if there is no such file, a line is none of a trajectory or of another
        model's, or there are not enough samples for one step.
        """
        self._path = path / _FILE if path.is_dir() else path
        self._batch_size = batch_size
        self._rows = 0
        for number, sample in enumerate(self._read(), start=1):
            largest = max([*sample.prompt.prompt_ids, *sample.completion.token_ids], default=0)
            if largest >= vocab_size:
                msg = f"{self._path}:{number}: token {largest}, the model has {vocab_size}"
                raise ConfigError(f"{KEY}={path}: {msg}; it was recorded with another model")
            self._rows = number
        if self._rows < batch_size:
            msg = f"{KEY}={path}: {self._rows} samples, a step takes {batch_size}"
            raise ConfigError(f"{msg} (data.train_batch_size x data.num_generations)")

    def __len__(self) -> int:
        """Complete batches."""
        return self._rows // self._batch_size

    def batches(self) -> Iterator[list[Sample]]:
        """Batches without end; what is left over at the end of the recording is left out."""
        while True:
            samples = self._read()
            for _ in range(len(self)):
                yield list(islice(samples, self._batch_size))

    def _read(self) -> Iterator[Sample]:
        decoder = msgspec.json.Decoder(Trajectory)
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield self._decode(decoder, number, line)
        except OSError as error:
            raise ConfigError(f"{KEY}: {self._path}: {error.strerror}") from error

    def _decode(
        self, decoder: msgspec.json.Decoder[Trajectory], number: int, line: bytes
    ) -> Sample:
        try:
            return _sample(decoder.decode(line))
        except ValueError as error:  # msgspec's, of bad UTF-8, and of a version
            raise ConfigError(f"{KEY}: {self._path}:{number}: no trajectory: {error}") from error


def vocab_size(model: Path) -> int:
    """Of the model in a Hugging Face directory; ConfigError if its `config.json` does not say."""
    config = read_model_config(model)
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(size, int):
        raise ConfigError(f"{KEY}: {model / 'config.json'} has no vocab_size")
    return size


def _sample(row: Trajectory) -> Sample:
    """As it was before its advantage was estimated."""
    messages = [{"role": "user", "content": row.prompt}]
    spans = [VersionSpan(PolicyVersion.parse(v), a, b) for v, a, b in row.policy_version_spans]
    reason: FinishReason = msgspec.convert(row.finish_reason, FinishReason)
    completion = Completion(row.rollout_id, row.response_ids, row.rollout_log_probs, reason, spans)
    prompt = Prompt(row.group_index, messages, row.prompt, row.prompt_ids, {})
    return Sample(
        prompt,
        row.group_index,
        completion,
        row.response,
        row.sampling_params,
        raw_reward=row.raw_reward,
        reward=row.reward,
        rewards=row.rewards,
    )
