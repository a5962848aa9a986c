"""Whatever goes wrong ends in a named error, a fenced replica, and is repaired by a full sync."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rl_core.errors import (
    DigestMismatchError,
    LifecycleError,
    ReplicaFencedError,
    StaleVersionError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.interfaces import BucketLease, LoadReport
from rl_core.testing.contract import SKIP_PREFIX, Contract
from rl_core.testing.rollout_case import GREEDY, RolloutCapability, RolloutCase, ended
from rl_core.testing.rollout_faults import FAULTS, Fault
from rl_core.testing.weight_set import leases
from rl_core.versions import PolicyVersion


class FailureContract(Contract, contract=True):
    """Refused loudly, never half-loaded and serving, repairable."""

    def test_refuses_requests_before_the_first_commit(self, case: RolloutCase) -> None:
        """A replica that was just started answers nothing."""
        assert isinstance(case.first_refusal, ReplicaFencedError), case.first_refusal

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
    def test_wrong_update_is_refused_and_repaired(self, case: RolloutCase, fault: Fault) -> None:
        """The error names the tensor; the replica is fenced with it; a full sync repairs all."""
        if fault.partial_set:
            self.need(RolloutCapability.PARTIAL_SETS)
        case.sync(case.given.weights_a)
        entries, manifest, named = fault.make(case.given.weights_b, case.version())
        errors = case.rejected(entries, manifest)
        assert any(isinstance(error, fault.error) and named in str(error) for error in errors), (
            f"expected {fault.error.__name__} naming {named!r}, got {errors!r}"
        )
        case.assert_fenced(named)
        case.assert_repaired_by_sync()

    def test_old_and_repeated_versions_are_refused(self, case: RolloutCase) -> None:
        """A late or doubled update or commit is refused before it touches anything."""
        old = case.sync(case.given.weights_b)
        served = case.sync(case.given.weights_a)
        for version in (old, served, PolicyVersion(0, served.step + 1)):
            manifest = case.given.weights_b.manifest(version)
            for error in case.rejected(case.given.weights_b.entries(), manifest):
                assert isinstance(error, StaleVersionError), repr(error)
                assert str(version) in str(error)
        for version in (served, old):
            with pytest.raises((StaleVersionError, LifecycleError)):
                case.first.commit(version, case.given.timeout_s)
        assert case.first.committed_version(case.given.timeout_s) == served
        for completion in case.generate(case.requests(GREEDY)):
            assert {span.version for span in completion.version_spans} == {served}
        case.assert_same(case.fingerprint(), case.base_a)

    def test_commit_of_another_version_is_refused(self, case: RolloutCase) -> None:
        """Only the version that was loaded can be committed."""
        case.sync(case.given.weights_a)
        manifest = case.given.weights_b.manifest(case.version())
        case.update(case.given.weights_b, manifest=manifest)
        with pytest.raises((StaleVersionError, LifecycleError)):
            case.first.commit(case.version(), case.given.timeout_s)
        case.first.fence("a commit went wrong", case.given.timeout_s)
        case.assert_fenced("a commit went wrong")
        case.assert_repaired_by_sync()

    def test_nothing_is_served_between_load_and_commit(self, case: RolloutCase) -> None:
        """Loaded is not published."""
        case.sync(case.given.weights_a)
        manifest = case.given.weights_b.manifest(case.version())
        case.update(case.given.weights_b, manifest=manifest)
        case.assert_fenced()
        case.first.commit(manifest.version, case.given.timeout_s)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_fence_refuses_with_its_reason(self, case: RolloutCase) -> None:
        """The same version can then be published again."""
        version = case.sync(case.given.weights_a)
        case.first.fence("out of order", case.given.timeout_s)
        case.assert_fenced("out of order")
        manifest = case.given.weights_a.manifest(version)
        case.update(case.given.weights_a, manifest=manifest)
        case.first.commit(version, case.given.timeout_s)
        case.assert_same(case.fingerprint(), case.base_a)

    @pytest.mark.parametrize("error", [TransferError("the peer went away"), OSError("disk gone")])
    def test_failing_source_fences(self, case: RolloutCase, error: Exception) -> None:
        """An error of the stream itself, ours or not, comes through and fences."""
        case.sync(case.given.weights_a)
        weights = case.given.weights_b

        def stream() -> Iterator[BucketLease]:
            buckets = leases(weights.entries(), 2)
            yield next(buckets)
            yield next(buckets)
            raise error

        outcomes = case.outcomes(stream, weights.manifest(case.version()))
        assert any(type(outcome) is type(error) for outcome in outcomes), outcomes
        assert not any(isinstance(outcome, LoadReport) for outcome in outcomes)
        case.assert_fenced(str(error))
        case.assert_repaired_by_sync()

    def test_stalled_source_ends_by_the_deadline(self, case: RolloutCase) -> None:
        """A stream that comes too late is a timeout on every rank."""
        case.sync(case.given.weights_a)
        weights, stall = case.given.weights_b, case.given.stall_s

        def stream() -> Iterator[BucketLease]:
            buckets = leases(weights.entries(), 2)
            yield next(buckets)
            time.sleep(1.2 * stall)
            yield from buckets

        outcomes = case.outcomes(stream, weights.manifest(case.version()), stall)
        assert any(isinstance(outcome, TransferTimeoutError) for outcome in outcomes), outcomes
        assert not any(isinstance(outcome, LoadReport) for outcome in outcomes)
        case.assert_fenced()
        case.assert_repaired_by_sync()

    def test_missing_rank_ends_by_the_deadline(self, case: RolloutCase) -> None:
        """One tensor-parallel rank is never fed: the others end, nothing is served."""
        if len(case.given.adapters) == 1:
            pytest.skip(f"{SKIP_PREFIX}the replica under test has one rank")
        case.sync(case.given.weights_a)
        weights = case.given.weights_b
        manifest = weights.manifest(case.version())
        present = case.given.adapters[:-1]
        outcomes = case.outcomes(
            lambda: leases(weights.entries()), manifest, case.given.stall_s, present
        )
        assert all(isinstance(outcome, TransferTimeoutError) for outcome in outcomes), outcomes
        case.assert_fenced()
        case.assert_repaired_by_sync()

    def test_a_rank_that_fails_lets_the_others_end(self, case: RolloutCase) -> None:
        """Producing weights is a collective, in which a rank that failed still takes part."""
        ranks = len(case.given.adapters)
        if ranks == 1:
            pytest.skip(f"{SKIP_PREFIX}the replica under test has one rank")
        case.sync(case.given.weights_a)
        weights, within = case.given.weights_b, case.given.timeout_s
        together, number = threading.Barrier(ranks), itertools.count()

        def stream() -> Iterator[BucketLease]:
            entries = weights.entries()
            if next(number) == 0:
                entries[0] = replace(entries[0], digest=entries[1].digest)
            return _in_step(leases(entries, 1), together, within / 2)

        begun = time.monotonic()
        outcomes = case.outcomes(stream, weights.manifest(case.version()))
        assert time.monotonic() - begun < within / 2, "the others waited for the one that failed"
        assert any(isinstance(outcome, DigestMismatchError) for outcome in outcomes), outcomes
        assert not any(isinstance(outcome, LoadReport) for outcome in outcomes)
        case.assert_fenced()
        case.assert_repaired_by_sync()

    def test_second_sender_never_mixes(self, case: RolloutCase) -> None:
        """An update in the middle of another one is refused; what is served is one version."""
        case.sync(case.given.weights_a)
        weights = case.given.weights_b
        manifest = weights.manifest(case.version())
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[BucketLease]:
            buckets = leases(weights.entries(), 2)
            yield next(buckets)
            begun.set()
            go_on.wait(case.given.timeout_s)
            yield from buckets

        first = case.in_background(case.outcomes, slow, manifest)
        assert begun.wait(case.given.timeout_s)
        intruder = case.given.weights_a.manifest(case.version())
        for error in case.rejected(case.given.weights_a.entries(), intruder):
            assert isinstance(error, LifecycleError | StaleVersionError), repr(error)
        go_on.set()
        outcomes = ended(first, case.given.timeout_s)
        if all(isinstance(outcome, LoadReport) for outcome in outcomes):
            case.first.commit(manifest.version, case.given.timeout_s)
            case.assert_same(case.fingerprint(), case.base_b)
        else:
            case.assert_fenced()
        case.assert_repaired_by_sync()


def _in_step(
    buckets: Iterator[BucketLease], ranks: threading.Barrier, seconds: float
) -> Iterator[BucketLease]:
    """Leases that every rank must ask for before any of them gets one."""
    for bucket in buckets:
        ranks.wait(seconds)
        yield bucket
