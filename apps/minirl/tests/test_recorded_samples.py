"""Samples that a run recorded: read back as they were, in the same order, or refused."""

from dataclasses import asdict
from itertools import islice

import msgspec
import pytest

from minirl.config import load_config
from minirl.prompts import Prompt
from minirl.recorded_samples import RecordedSamples, vocab_size
from minirl.sampling import Sample, sampling_params
from minirl.step_metrics import sample_metrics
from minirl.trajectories import to_trajectory
from minirl.value_checks import check_values
from rl_core.errors import ConfigError
from rl_core.trajectory import Completion, VersionSpan
from rl_core.versions import PolicyVersion


def sample(index):
    """The sample of that number in a run with two samples a prompt."""
    spans = [VersionSpan(PolicyVersion(1, index // 4), 0, 2)]
    completion = Completion(f"s{index}", [index, 5], [-0.5, -1.5], "stop", spans)
    return Sample(
        Prompt(index // 2, [{"role": "user", "content": "hi"}], "hi", [1, 2], {}),
        index // 2,
        completion,
        "text",
        sampling_params(load_config([]).rollout, seed=index),
        raw_reward=None if index == 1 else index / 10,
        reward=None if index == 1 else index / 20,
        rewards={"a": index / 10},
    )


@pytest.fixture
def recording(tmp_path):
    rows = [to_trajectory(sample(at), at, at // 2, None) for at in range(10)]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    (tmp_path / "trajectories.jsonl").write_bytes(lines)
    return tmp_path


def test_samples_come_back_as_they_were(recording):
    samples = RecordedSamples(recording, 4, vocab_size=16)
    assert len(samples) == 2
    batches = list(islice(samples.batches(), 3))
    assert batches[:2] == [[sample(at) for at in range(4)], [sample(at) for at in range(4, 8)]]
    assert batches[2] == batches[0]
    assert sample_metrics(batches[0])["reward/mean"] == pytest.approx((0 + 0.2 + 0.3) / 3)
    assert sample_metrics(batches[0])["reward/a/mean"] == pytest.approx(0.15)


def test_a_recording_of_before_there_were_several_rewards(recording):
    path = recording / "trajectories.jsonl"
    old = msgspec.json.decode(path.read_bytes().splitlines()[0])
    del old["rewards"]
    path.write_bytes(msgspec.json.encode(old))
    assert next(RecordedSamples(path, 1, 16).batches())[0].rewards == {}


@pytest.mark.parametrize(
    ("size", "vocabulary", "message"),
    [
        (11, 16, r"10 samples, a step takes 11 \(data\.train_batch_size x"),
        (4, 9, r":10: token 9, the model has 9; it was recorded with another model"),
    ],
)
def test_a_recording_that_does_not_fit(recording, size, vocabulary, message):
    with pytest.raises(ConfigError, match=message):
        RecordedSamples(recording, size, vocabulary)


@pytest.mark.parametrize("line", ["{", "{}", '{"index": "x"}', "\xff"])
def test_a_line_that_is_no_trajectory(recording, line):
    with (recording / "trajectories.jsonl").open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=r"trajectories\.jsonl:11: no trajectory: ") as caught:
        RecordedSamples(recording, 4, 16)
    assert "\n" not in str(caught.value)


def test_a_recording_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"debug\.train_only: .*trajectories\.jsonl: No such"):
        RecordedSamples(tmp_path, 4, 16)


def test_only_one_half_can_be_left_out():
    config = load_config(["debug.rollout_only=true", "debug.train_only=runs/x"])
    assert asdict(config)["debug"] == {"rollout_only": True, "train_only": "runs/x"}
    with pytest.raises(ConfigError, match=r"debug\.rollout_only and debug\.train_only exclude"):
        check_values(config)


def test_the_size_of_the_vocabulary_is_read_or_missed(tmp_path):
    for content in ('{"vocab_size": 80}', '{"text_config": {"vocab_size": 80}}'):
        (tmp_path / "config.json").write_text(content)
        assert vocab_size(tmp_path) == 80
    (tmp_path / "config.json").write_text('{"text_config": []}')
    with pytest.raises(ConfigError, match="has no vocab_size"):
        vocab_size(tmp_path)
