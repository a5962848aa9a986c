import plain_train_engine as plain
import pytest

from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.testing.train_contract import TrainEngineContract, TrainUnderTest
from rl_core.testing.train_rank import RankPool
from rl_core.trajectory import TrainSample

SAMPLES = [
    TrainSample(
        [1, 2],
        [3 + index, 4, 5, 6],
        loss_mask=[1, 0, 1, 1],
        advantages=[1.0, 0.5, -1.0, 0.3 * index],
        temperature=1.0 + 0.1 * index,
    )
    for index in range(4)
]


def make_config(rate, world_size):
    del world_size
    return plain.PlainConfig(rate)


def under_test(cls, world_size, launcher):
    engine = f"{cls.__module__}:{cls.__name__}"
    return TrainUnderTest(engine, make_config, SAMPLES, world_size, launcher, timeout_s=60)


class TestOneRank(TrainEngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def train(cls):
        return under_test(plain.PlainTrainEngine, 1, ThreadLauncher())


class TestTwoRanks(TrainEngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def train(cls, tmp_path_factory):
        launcher = ProcessLauncher(tmp_path_factory.mktemp("logs"))
        return under_test(plain.PlainTrainEngine, 2, launcher)


BEHIND = "test_checkpoint_written_behind_is_of_the_moment_it_was_begun"
PERTURBED = "test_perturbed_weights_differ_everywhere_and_come_back"


class Held(TrainEngineContract):
    """The contract, to be called test by test."""


@pytest.mark.parametrize(
    ("cls", "test", "fixtures"),
    [
        (
            plain.DriftsWithoutRate,
            "test_update_without_learning_rate_changes_nothing",
            "train pool",
        ),
        (plain.StreamsOldCopy, "test_update_changes_the_published_weights", "train ranks"),
        (
            plain.ForgetsOptimizer,
            "test_checkpoint_restores_weights_and_optimizer",
            "train ranks pool tmp_path",
        ),
        (plain.LearnsFromMaskedTokens, "test_masked_tokens_do_not_matter", "train ranks tmp_path"),
        (plain.SavesSomethingElse, "test_stream_equals_the_saved_directory", "ranks tmp_path"),
        (
            plain.StreamsInAnotherOrder,
            "test_stream_is_what_the_manifest_says_on_every_rank",
            "ranks",
        ),
        (plain.WritesWhatCameLater, BEHIND, "train ranks tmp_path"),
        (plain.PerturbsOneTensor, PERTURBED, "ranks"),
        (plain.RestoresRounded, PERTURBED, "ranks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_engine_is_noticed(cls, test, fixtures, tmp_path):
    train = under_test(cls, 1, ThreadLauncher())
    pools = [RankPool(train.launcher, 10), RankPool(train.launcher, 10)]
    given = {"train": train, "tmp_path": tmp_path, "pool": pools[0]}
    if "ranks" in fixtures:
        given["ranks"] = train.start(pools[1], 1e-2)
    with pytest.raises(AssertionError):
        getattr(Held(), test)(**{name: given[name] for name in fixtures.split()})
    for pool in pools:
        pool.close()
