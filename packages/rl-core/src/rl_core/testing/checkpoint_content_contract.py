"""Every tensor arrives on every receiver, whole, in order and bit for bit."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.buckets import MEGABYTE
from rl_core.digests import WSUM64, XXH3_128
from rl_core.metadata import DTYPE_BYTES
from rl_core.testing.checkpoint_assertions import assert_arrived
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_group import Terms, TransferGroup
from rl_core.testing.checkpoint_orders import ReceiveOrder
from rl_core.testing.checkpoint_recipe import TensorRecipe, WeightRecipe
from rl_core.testing.checkpoint_samples import (
    LAYOUTS,
    SMALL,
    bucket_edges,
    every_dtype,
    every_layout,
    larger_than_a_bucket,
    many_buckets,
    without_elements,
)
from rl_core.testing.contract import SKIP_PREFIX, Contract

SAMPLES = {
    "every_dtype": every_dtype(),
    "every_layout": every_layout(),
    "without_elements": without_elements(),
    "bucket_edges": bucket_edges(),
    "larger_than_a_bucket": larger_than_a_bucket(),
    "many_buckets": many_buckets(),
    "nothing": WeightRecipe(()),
}

_SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def recipes(draw: st.DrawFn) -> WeightRecipe:
    """Any mixture of tensors: sizes from nothing to several buckets, all dtypes and layouts."""
    tensors = []
    for number in range(draw(st.integers(1, 12))):
        shape = draw(st.one_of(_SHAPES, st.tuples(st.integers(1, 150_000))))
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        layout = draw(st.sampled_from(LAYOUTS))
        aliases = (f"alias.{number}",) if draw(st.booleans()) else ()
        tensors.append(TensorRecipe(f"t.{number}", shape, dtype, layout, aliases))
    return WeightRecipe(tuple(tensors), draw(st.integers(0, 2**32)))


class ContentContract(Contract, contract=True):
    """Bytes, names, shapes, dtypes, digests."""

    @pytest.mark.parametrize("name", SAMPLES)
    def test_weights_arrive_bit_exact(self, case: CheckpointCase, name: str) -> None:
        """All dtypes, layouts and sizes, from a stream that overwrites each tensor at once."""
        weights = SAMPLES[name]
        assert_arrived(case.group().sync(weights), weights, XXH3_128)

    def test_any_weights_arrive_bit_exact(self, case: CheckpointCase) -> None:
        """Random mixtures, one after the other through the same group."""
        group = case.group()

        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(weights=recipes())
        def run(weights: WeightRecipe) -> None:
            assert_arrived(group.sync(weights), weights, XXH3_128)

        run()

    @pytest.mark.parametrize("bucket_bytes", [1024, 64 * MEGABYTE])
    def test_bucket_size_makes_no_difference(self, case: CheckpointCase, bucket_bytes: int) -> None:
        """Tiny buckets split nearly everything; large ones shrink to the payload."""
        weights = WeightRecipe((*every_dtype().tensors, *SMALL.tensors))
        group = case.group(terms=Terms(bucket_bytes / MEGABYTE, options=case.options))
        assert_arrived(group.sync(weights), weights, XXH3_128)

    @pytest.mark.parametrize("kind", [None, WSUM64])
    def test_digests_travel_as_asked_for(self, case: CheckpointCase, kind: str | None) -> None:
        """The kind that the role names, computed at the source, or none at all."""
        weights = WeightRecipe((*every_dtype().tensors, *larger_than_a_bucket().tensors))
        group = case.group(terms=Terms(digest_kind=kind, options=case.options))
        assert_arrived(group.sync(weights), weights, kind)

    @pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 2), (2, 1)])
    def test_any_number_of_ranks(self, case: CheckpointCase, senders: int, receivers: int) -> None:
        """The numbers of senders and receivers make no difference."""
        group = case.group(senders, receivers)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_next_syncs_over_the_same_group(self, case: CheckpointCase) -> None:
        """New contents, then a new structure, then another order: nothing of before is left."""
        group = case.group()
        endpoints = group.prepare()
        for weights in (
            SMALL,
            SMALL.reseeded(1),
            many_buckets(),
            WeightRecipe(tuple(reversed(many_buckets().tensors)), seed=2),
        ):
            assert_arrived(group.sync(weights), weights, XXH3_128)
            assert group.prepare() == endpoints, "the group was not kept"

    def test_source_dtype_is_carried(self, case: CheckpointCase) -> None:
        """A lossy cast at the source stays visible to the receiver."""
        cast = TensorRecipe("router.weight", (8, 8), "bfloat16", source_dtype="float32")
        weights = WeightRecipe((cast,))
        assert_arrived(case.group().sync(weights), weights, XXH3_128)

    def test_checkpoint_path(self, case: CheckpointCase) -> None:
        """Where receivers may ask for a directory: complete, once for all of them, and again."""
        group = case.group(terms=Terms(digest_kind=None, options=case.options))
        if not group.receivers[0].handle.call("gives_path", timeout=case.deadline_s):
            pytest.skip(f"{SKIP_PREFIX}the engine has no checkpoint path")
        for weights in (SMALL, every_dtype()):
            manifest = weights.manifest(case.version())
            assert not group.connect()
            senders = TransferGroup(group.senders, case)
            pending = senders.begin(weights, manifest)
            order = ReceiveOrder(manifest, case.deadline_s)
            paths = [member.handle.submit("checkpoint_path", order) for member in group.receivers]
            found = {asked.result(case.deadline_s) for asked in paths}
            assert senders.end(pending, manifest).ok
            assert not group.finalize(True)
            assert len(found) == 1
            assert str(manifest.version) in found.pop()
        assert_arrived(group.sync(SMALL), SMALL, None)

    def test_lease_is_untouched_until_left(self, case: CheckpointCase) -> None:
        """One receiver is slow with every bucket while the other one runs ahead."""
        weights = many_buckets(6)
        outcome = case.group().sync(weights, orders={"receiver 0": {"hold_s": 0.05}})
        assert_arrived(outcome, weights, XXH3_128)

    def test_second_lease_leaves_an_open_one_alone(self, case: CheckpointCase) -> None:
        """Asking for the next lease inside an open one is refused, or does not touch it."""
        weights = many_buckets(4)
        group = case.group()
        outcome = group.sync(weights, orders={"receiver 1": {"keep_open": True}})
        received: Any = outcome.received[1]
        assert not received.touched, f"{received.touched} changed inside an open lease"
        assert_arrived(group.sync(weights), weights, XXH3_128)

    def test_sender_ends_after_the_last_reader(self, case: CheckpointCase) -> None:
        """Success is reported only when no receiver reads any more."""
        group = case.group()
        for slow in ("receiver 0", "receiver 1"):
            outcome = group.sync(SMALL, orders={slow: {"hold_s": 0.3}})
            assert_arrived(outcome, SMALL, XXH3_128)
