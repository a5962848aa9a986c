"""`TrainEngineContract`: what every train engine must do, on any number of ranks.

```python
class TestMyEngine(TrainEngineContract):
    @pytest.fixture(scope="class", params=[1, 2])
    @classmethod
    def train(cls, request, tmp_path_factory):
        launcher = ProcessLauncher(tmp_path_factory.mktemp("logs"))
        return TrainUnderTest("mine.engine:MyEngine", make_config, samples, request.param, launcher)
```
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rl_core.errors import LifecycleError
from rl_core.interfaces import Launcher
from rl_core.testing.contract import SKIP_PREFIX, Contract
from rl_core.testing.train_rank import RankGroup, RankPool, Streamed
from rl_core.testing.weights_directory import load_weights
from rl_core.trajectory import LogProbs, TrainSample
from rl_core.versions import PolicyVersion

METRICS = {"loss", "grad_norm", "lr", "kl", "entropy", "clip_fraction", "optimizer_steps"}
"""What `update_policy` reports at least."""

VERSION = PolicyVersion(1, 0)
RATE = 1e-2
"""Learning rate of engines that are to learn something."""


class TrainCapability(StrEnum):
    """What a train engine may lack, if it says why."""

    RESHARDS = "loads a checkpoint on another number of ranks"
    DETERMINISTIC = "the same update from the same state gives the same bits"
    WRITES_BEHIND = "writes a checkpoint while the training goes on"
    PERTURBS = "changes its published weights for a while, and puts them back bit for bit"


@dataclass(frozen=True)
class TrainUnderTest:
    """What a backend gives to `TrainEngineContract`.

    Attributes:
        engine: `module:Class`, called with (config, RankPlace).
        make_config: its configuration for a learning rate and a number of ranks; what it returns
            is pickled.
        samples: at least two for each rank; each with some masked and some unmasked tokens.
        world_size: ranks.
        launcher: starts them.
        tolerance: largest difference between log-probabilities that counts as equal.
        timeout_s: upper bound of any one call, in seconds.
    """

    engine: str
    make_config: Callable[[float, int], Any]
    samples: Sequence[TrainSample]
    world_size: int
    launcher: Launcher
    tolerance: float = 1e-5
    timeout_s: float = 120.0

    def create(self, pool: RankPool, rate: float, world_size: int | None = None) -> RankGroup:
        """A group of ranks in `pool` with this learning rate, not initialized yet."""
        size = world_size or self.world_size
        return pool.create(self.engine, self.make_config(rate, size), size)

    def start(self, pool: RankPool, rate: float, world_size: int | None = None) -> RankGroup:
        """As `create`, and initialized."""
        group = self.create(pool, rate, world_size)
        group.run("initialize")
        return group

    def shares(self, size: int, samples: Sequence[TrainSample] = ()) -> list[tuple[Any, ...]]:
        """Each rank's samples, as the arguments of a call."""
        return [(list((samples or self.samples)[rank::size]),) for rank in range(size)]


class TrainEngineContract(Contract, contract=True):
    """Subclass it and give the fixture `train`."""

    @pytest.fixture(scope="class")
    @classmethod
    def train(cls) -> TrainUnderTest:
        """The engine under test."""
        raise NotImplementedError("give a fixture `train` that returns a TrainUnderTest")

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, train: TrainUnderTest) -> Iterator[RankGroup]:
        """A group that really learns."""
        pool = RankPool(train.launcher, train.timeout_s)
        yield train.start(pool, RATE)
        pool.close()

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, train: TrainUnderTest) -> Iterator[RankPool]:
        """Processes for further groups, one after the other."""
        pool = RankPool(train.launcher, train.timeout_s)
        yield pool
        pool.close()

    def test_refuses_work_before_initialize(self, train: TrainUnderTest, pool: RankPool) -> None:
        """A call in the wrong order is an error, not a crash."""
        group = train.create(pool, RATE, world_size=1)
        with pytest.raises(LifecycleError):
            group.each("compute_log_prob", train.shares(1))

    def test_stream_is_what_the_manifest_says_on_every_rank(self, ranks: RankGroup) -> None:
        """Names, order, shapes, dtypes, contents."""
        streams: list[Streamed] = ranks.stream(VERSION, "a-run")
        first = streams[0]
        assert first.manifest.version == VERSION
        assert first.manifest.run_id == "a-run"
        assert first.manifest.tensors
        for streamed in streams:
            streamed.manifest.check_same_structure(first.manifest)
            assert list(streamed.tensors) == [meta.name for meta in streamed.manifest.tensors]
            assert streamed.digests == first.digests
            for meta in streamed.manifest.tensors:
                assert meta.shape == tuple(streamed.tensors[meta.name].shape), meta.name

    def test_streaming_twice_gives_the_same(self, ranks: RankGroup) -> None:
        """Nothing is consumed or changed by it."""
        assert ranks.stream(VERSION)[0].digests == ranks.stream(VERSION)[0].digests

    def test_stream_equals_the_saved_directory(self, ranks: RankGroup, tmp_path: Path) -> None:
        """Every tensor, alias or not, under its name and with its values."""
        ranks.run("save_pretrained", tmp_path)
        saved = load_weights(tmp_path)
        streamed = ranks.stream(VERSION)[0]
        aliases = {alias for meta in streamed.manifest.tensors for alias in meta.aliases}
        assert streamed.tensors.keys() - saved.keys() == set()
        assert saved.keys() - streamed.tensors.keys() <= aliases
        for name, tensor in streamed.tensors.items():
            assert torch.equal(saved[name].to(tensor.dtype), tensor), name

    def test_log_probs_fit_their_samples(self, train: TrainUnderTest, ranks: RankGroup) -> None:
        """One value for each response token, finite and of the right sign; twice the same."""
        shares = train.shares(ranks.size)
        found: list[list[LogProbs]] = ranks.each("compute_log_prob", shares)
        for (samples,), scores in zip(shares, found, strict=True):
            for sample, score in zip(samples, scores, strict=True):
                assert len(score.log_probs) == len(score.entropy) == len(sample.response_ids)
                assert all(math.isfinite(value) and value <= 0 for value in score.log_probs)
                assert all(value >= 0 for value in score.entropy)
        self.assert_close(train, found, ranks.each("compute_log_prob", shares))

    def test_log_probs_do_not_depend_on_the_company(
        self, train: TrainUnderTest, ranks: RankGroup
    ) -> None:
        """Other samples in the batch, padding and order change no value."""
        shares = train.shares(ranks.size)
        together = ranks.each("compute_log_prob", shares)
        backward = ranks.each("compute_log_prob", [(samples[::-1],) for (samples,) in shares])
        self.assert_close(train, together, [scores[::-1] for scores in backward])

    def test_update_without_learning_rate_changes_nothing(
        self, train: TrainUnderTest, pool: RankPool
    ) -> None:
        """Not a bit of the published weights."""
        group = train.start(pool, 0.0)
        before = group.stream(VERSION)[0].digests
        group.each("update_policy", train.shares(group.size))
        assert group.stream(VERSION)[0].digests == before

    def test_update_changes_the_published_weights(
        self, train: TrainUnderTest, ranks: RankGroup
    ) -> None:
        """And reports the same reduced metrics on every rank."""
        before = ranks.stream(VERSION)[0].digests
        metrics: list[dict[str, float]] = ranks.each("update_policy", train.shares(ranks.size))
        for found in metrics:
            assert found.keys() >= METRICS
            assert all(math.isfinite(value) for value in found.values()), found
            assert found == pytest.approx(metrics[0], rel=1e-5, abs=1e-7)
        assert metrics[0]["optimizer_steps"] >= 1
        streams = ranks.stream(VERSION)
        assert streams[0].digests != before
        assert all(streamed.digests == streams[0].digests for streamed in streams)

    def test_masked_tokens_do_not_matter(
        self, train: TrainUnderTest, ranks: RankGroup, tmp_path: Path
    ) -> None:
        """The advantages of tokens with mask 0 change no bit of an update."""
        self.need(TrainCapability.DETERMINISTIC)
        ranks.run("save_checkpoint", tmp_path)
        found = []
        for value in (0.0, 1e3):
            ranks.run("load_checkpoint", tmp_path)
            changed = [_with_masked_advantage(sample, value) for sample in train.samples]
            ranks.each("update_policy", train.shares(ranks.size, changed))
            found.append(ranks.stream(VERSION)[0].digests)
        assert found[0] == found[1]

    def test_checkpoint_restores_weights_and_optimizer(
        self, train: TrainUnderTest, ranks: RankGroup, pool: RankPool, tmp_path: Path
    ) -> None:
        """The same log-probabilities, the same bits, and the same next update."""
        shares = train.shares(ranks.size)
        ranks.each("update_policy", shares)
        ranks.run("save_checkpoint", tmp_path)
        scores = ranks.each("compute_log_prob", shares)
        digests = ranks.stream(VERSION)[0].digests
        ranks.each("update_policy", shares)
        following = ranks.stream(VERSION)[0].digests
        fresh = train.start(pool, RATE)
        fresh.run("load_checkpoint", tmp_path)
        assert fresh.stream(VERSION)[0].digests == digests
        self.assert_close(train, fresh.each("compute_log_prob", shares), scores)
        if TrainCapability.DETERMINISTIC not in self.lacks:
            fresh.each("update_policy", shares)
            assert fresh.stream(VERSION)[0].digests == following

    def test_checkpoint_loads_on_another_number_of_ranks(
        self, train: TrainUnderTest, ranks: RankGroup, pool: RankPool, tmp_path: Path
    ) -> None:
        """The weights are the same whoever holds which part."""
        self.need(TrainCapability.RESHARDS)
        if ranks.size == 1:
            pytest.skip(f"{SKIP_PREFIX}the engine under test has one rank")
        ranks.run("save_checkpoint", tmp_path)
        digests = ranks.stream(VERSION)[0].digests
        fresh = train.start(pool, RATE, world_size=1)
        fresh.run("load_checkpoint", tmp_path)
        assert fresh.stream(VERSION)[0].digests == digests

    def test_checkpoint_written_behind_is_of_the_moment_it_was_begun(
        self, train: TrainUnderTest, ranks: RankGroup, tmp_path: Path
    ) -> None:
        """An update in the meantime does not get into it; a second one has to wait."""
        self.need(TrainCapability.WRITES_BEHIND)
        shares = train.shares(ranks.size)
        ranks.each("update_policy", shares)
        digests = ranks.stream(VERSION)[0].digests
        ranks.run("begin_checkpoint", tmp_path / "first")
        with pytest.raises(LifecycleError):
            ranks.run("begin_checkpoint", tmp_path / "second")
        ranks.each("update_policy", shares)
        ranks.run("finish_checkpoint", train.timeout_s)
        assert all(ranks.run("checkpoint_written"))
        ranks.run("finish_checkpoint", train.timeout_s)
        ranks.run("load_checkpoint", tmp_path / "first")
        assert ranks.stream(VERSION)[0].digests == digests

    def test_perturbed_weights_differ_everywhere_and_come_back(self, ranks: RankGroup) -> None:
        """Every element that is published, on every rank; a second change is refused."""
        self.need(TrainCapability.PERTURBS)
        before = ranks.stream(VERSION)[0]
        ranks.run("perturb", 1e-3)
        for changed in ranks.stream(VERSION):
            for name, tensor in changed.tensors.items():
                assert (tensor != before.tensors[name]).all(), name
        with pytest.raises(LifecycleError):
            ranks.run("perturb", 1e-3)
        ranks.run("restore")
        assert ranks.stream(VERSION)[0].digests == before.digests
        ranks.run("restore")
        assert ranks.stream(VERSION)[0].digests == before.digests

    def test_offload_and_onload_change_nothing(self, ranks: RankGroup) -> None:
        """Whether or not there is a device to leave; the second call does no harm."""
        before = ranks.stream(VERSION)[0].digests
        for method in ("offload", "offload", "onload", "onload"):
            ranks.run(method)
        assert ranks.stream(VERSION)[0].digests == before

    def test_shutdown_is_idempotent(self, train: TrainUnderTest, pool: RankPool) -> None:
        """A second call is no error, and the process can host another engine afterwards."""
        group = train.start(pool, RATE)
        group.run("shutdown")
        group.run("shutdown")
        train.start(pool, RATE).run("shutdown")

    def assert_close(
        self,
        train: TrainUnderTest,
        found: Sequence[Sequence[LogProbs]],
        expected: Sequence[Sequence[LogProbs]],
    ) -> None:
        """Log-probabilities and entropies within the tolerance, on every rank."""
        for mine, theirs in zip(found, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=train.tolerance)
                assert one.entropy == pytest.approx(other.entropy, abs=10 * train.tolerance)


def _with_masked_advantage(sample: TrainSample, value: float) -> TrainSample:
    advantages = [
        advantage if mask else value
        for advantage, mask in zip(sample.advantages, sample.loss_mask, strict=True)
    ]
    return msgspec.structs.replace(sample, advantages=advantages)
