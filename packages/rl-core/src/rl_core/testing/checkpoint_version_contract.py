"""Versions go one way, and both sides mean the same structure."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from rl_core.digests import XXH3_128
from rl_core.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    MiniRLError,
    StaleVersionError,
    WeightSyncError,
)
from rl_core.metadata import Manifest
from rl_core.testing.checkpoint_assertions import (
    assert_arrived,
    assert_drained,
    assert_ended,
    assert_no_foreign,
    describe,
)
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_group import Terms, TransferGroup
from rl_core.testing.checkpoint_recipe import WeightRecipe
from rl_core.testing.checkpoint_samples import SMALL, many_buckets
from rl_core.testing.contract import Contract
from rl_core.versions import PolicyVersion

PLENTY = many_buckets(4)
HARMED = PLENTY.tensors[6]


def _missing() -> WeightRecipe:
    return replace(PLENTY, tensors=(*PLENTY.tensors[:6], *PLENTY.tensors[7:]))


def _short() -> WeightRecipe:
    return replace(PLENTY, tensors=PLENTY.tensors[:6])


def _unknown() -> WeightRecipe:
    named = replace(HARMED, name=f"{HARMED.name}.typo")
    return replace(PLENTY, tensors=(*PLENTY.tensors[:6], named, *PLENTY.tensors[7:]))


def _doubled() -> WeightRecipe:
    return replace(PLENTY, tensors=(*PLENTY.tensors[:7], HARMED, *PLENTY.tensors[7:]))


def _reshaped() -> WeightRecipe:
    other = replace(HARMED, shape=(HARMED.shape[0] - 1,))
    return replace(PLENTY, tensors=(*PLENTY.tensors[:6], other, *PLENTY.tensors[7:]))


def _retyped() -> WeightRecipe:
    other = replace(HARMED, dtype="int32")
    return replace(PLENTY, tensors=(*PLENTY.tensors[:6], other, *PLENTY.tensors[7:]))


WRONG_STREAMS = {
    "missing": _missing(),
    "short": _short(),
    "unknown": _unknown(),
    "doubled": _doubled(),
    "reshaped": _reshaped(),
    "retyped": _retyped(),
}
"""Streams that do not fit the manifest of `PLENTY`; all errors name `HARMED`."""

ACTIVE = ("sender 0", "receiver 0", "receiver 1")


def everywhere(kind: type[MiniRLError]) -> dict[str, type[MiniRLError]]:
    """The same error on the sender and both receivers."""
    return dict.fromkeys(ACTIVE, kind)


class VersionContract(Contract, contract=True):
    """Manifests and versions."""

    @pytest.fixture
    def unversioned(self, case: CheckpointCase) -> Iterator[TransferGroup]:
        """A group to which nothing was sent yet, and which is not used again."""
        case.dirty = True
        yield case.group()
        case.dirty = True

    def test_versions_move_on(self, unversioned: TransferGroup) -> None:
        """A step or an epoch more is newer, however small the step of the new epoch."""
        group = unversioned
        for version in (PolicyVersion(1, 5), PolicyVersion(1, 9), PolicyVersion(2, 0)):
            assert_arrived(group.sync(SMALL, SMALL.manifest(version)), SMALL, XXH3_128)

    def test_old_and_repeated_versions_are_refused(
        self, case: CheckpointCase, unversioned: TransferGroup
    ) -> None:
        """On both sides, with the version named; nothing is handed over, and newer ones work."""
        group = unversioned
        newest = PolicyVersion(2, 5)
        assert_arrived(group.sync(SMALL, SMALL.manifest(newest)), SMALL, XXH3_128)
        for version in (newest, PolicyVersion(2, 4), PolicyVersion(1, 9)):
            outcome = group.sync(PLENTY, PLENTY.manifest(version), deadline_s=case.fault_deadline_s)
            assert_ended(outcome, everywhere(StaleVersionError), str(version))
            assert all(end is not None and not end.leases for end in outcome.received.values())
            assert_drained(outcome, PLENTY, (0, 1))
        _assert_works(group, PolicyVersion(2, 6))

    def test_second_sender_of_a_version_is_refused(self, case: CheckpointCase) -> None:
        """Another process in the sender's place cannot publish the same version once more."""
        group = case.group()
        manifest = SMALL.manifest(case.version())
        assert_arrived(group.sync(SMALL, manifest), SMALL, XXH3_128)
        second = case.stranger("sender", 0)
        try:
            case.construct([second], Terms(options=case.options))
            usurped = TransferGroup([second, *group.receivers], case)
            outcome = usurped.sync(PLENTY, PLENTY.manifest(manifest.version), None, 10.0)
            assert_ended(outcome, everywhere(StaleVersionError), str(manifest.version))
            assert all(end is not None and not end.leases for end in outcome.received.values())
        finally:
            case.dismiss(second)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_version_of_another_run_is_refused(self, case: CheckpointCase) -> None:
        """A manifest with a foreign run id is stale by definition."""
        group = case.group()
        manifest = SMALL.manifest(case.version(), "another-run")
        outcome = group.sync(SMALL, manifest, deadline_s=case.fault_deadline_s)
        assert_ended(outcome, everywhere(StaleVersionError), "another-run")
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_sides_with_different_versions_refuse(self, case: CheckpointCase) -> None:
        """A receiver that waits for another version than the one that is sent takes nothing."""
        group = case.group()
        older, newer = case.version(), case.version()
        orders = {"receiver 1": {"manifest": SMALL.manifest(newer)}}
        seconds = case.fault_deadline_s
        outcome = group.sync(SMALL, SMALL.manifest(older), orders, seconds)
        expected: dict[str, type[MiniRLError]] = {
            "sender 0": WeightSyncError,
            "receiver 1": StaleVersionError,
        }
        assert_ended(outcome, expected)
        assert outcome.received[1] is not None
        assert not outcome.received[1].leases
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_failed_version_may_be_tried_again(self, case: CheckpointCase) -> None:
        """Only a version that was finalized with success is used up."""
        group = case.group()
        manifest = PLENTY.manifest(case.version())
        flip = {"receiver 0": {"flip": HARMED.name}}
        outcome = group.sync(PLENTY, manifest, flip, case.fault_deadline_s)
        assert not outcome.ok
        assert_arrived(group.sync(PLENTY, manifest), PLENTY, XXH3_128)

    def test_late_receiver_gets_the_current_version(self, case: CheckpointCase) -> None:
        """The same version again, to a receiver that does not hold it."""
        group = case.group()
        early = group.without("receiver 1")
        manifest = SMALL.manifest(case.version())
        assert_arrived(early.sync(SMALL, manifest), SMALL, XXH3_128)
        late = group.without("receiver 0")
        assert_arrived(late.sync(SMALL, manifest), SMALL, XXH3_128)
        assert_arrived(group.sync(PLENTY), PLENTY, XXH3_128)

    @pytest.mark.parametrize("name", WRONG_STREAMS)
    def test_stream_against_the_manifest(self, case: CheckpointCase, name: str) -> None:
        """A stream that is not what was announced: ManifestMismatchError on both sides."""
        group = case.group()
        stream = WRONG_STREAMS[name]
        manifest = PLENTY.manifest(case.version())
        outcome = group.sync(stream, manifest, deadline_s=case.fault_deadline_s)
        assert_ended(outcome, everywhere(ManifestMismatchError), HARMED.name)
        assert_drained(outcome, stream, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    @pytest.mark.parametrize("change", ["shape", "dtype", "alias", "order", "fewer"])
    def test_receiver_expects_another_structure(self, case: CheckpointCase, change: str) -> None:
        """Noticed before the bytes, by the sender and the receiver concerned."""
        group = case.group()
        manifest = PLENTY.manifest(case.version())
        orders = {"receiver 0": {"manifest": _changed(manifest, change)}}
        outcome = group.sync(PLENTY, manifest, orders, case.fault_deadline_s)
        both = dict.fromkeys(("sender 0", "receiver 0"), ManifestMismatchError)
        assert_ended(outcome, dict(both))
        assert outcome.received[0] is not None
        assert not outcome.received[0].leases, "tensors came under a wrong manifest"
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_byte_flipped_before_loading(self, case: CheckpointCase) -> None:
        """The digest that came along tells, and the sender hears which tensor it was."""
        group = case.group()
        orders = {"receiver 1": {"flip": HARMED.name}}
        outcome = group.sync(PLENTY, None, orders, case.fault_deadline_s)
        expected: dict[str, type[MiniRLError]] = {
            "sender 0": MiniRLError,
            "receiver 0": MiniRLError,
            "receiver 1": DigestMismatchError,
        }
        assert_ended(outcome, expected, HARMED.name)
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_bucket_sizes_that_differ(self, case: CheckpointCase) -> None:
        """Sides configured differently agree on one size, or say that they do not."""
        group = case.group()
        other = Terms(bucket_megabytes=1 / 1024, options=case.options)
        case.construct([group.member("receiver 1")], other)
        outcome = group.sync(PLENTY, deadline_s=case.fault_deadline_s)
        if outcome.ok:
            assert_arrived(outcome, PLENTY, XXH3_128)
        assert_no_foreign(outcome)


def _assert_works(group: TransferGroup, version: PolicyVersion) -> None:
    outcome = group.sync(SMALL, SMALL.manifest(version))
    assert outcome.ok, describe(outcome)


def _changed(manifest: Manifest, change: str) -> Manifest:
    metas = list(manifest.tensors)
    match change:
        case "shape":
            metas[6] = msgspec.structs.replace(metas[6], shape=(1, *metas[6].shape))
        case "dtype":
            metas[6] = msgspec.structs.replace(metas[6], dtype="int32")
        case "alias":
            metas[6] = msgspec.structs.replace(metas[6], aliases=("tied",))
        case "order":
            metas[6], metas[7] = metas[7], metas[6]
        case _:
            metas.pop()
    return msgspec.structs.replace(manifest, tensors=tuple(metas))
