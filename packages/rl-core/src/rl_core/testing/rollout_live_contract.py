"""The engine's ranks hold what the layout spec says, and whatever else they hold is noticed."""

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from rl_core.errors import VerificationError
from rl_core.interfaces import LiveContent, SupportsLiveContent, SupportsLiveDigests
from rl_core.layout import match
from rl_core.metadata import TensorMeta
from rl_core.rollout.expected_digests import Expectation, expected_digests
from rl_core.rollout.live_check import LiveCheck, check_live
from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import RolloutCapability, RolloutCase
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import WordSum


class LiveDigestContract(Contract, contract=True):
    """Live digests, against expectations that know nothing of the engine but its layout."""

    def test_live_digests_follow_the_weights(self, case: RolloutCase) -> None:
        """They change with the weights, come back with them, and with nothing else."""
        self.need(RolloutCapability.LIVE_DIGESTS)
        found = []
        for weights in (case.given.weights_a, case.given.weights_b, case.given.weights_a):
            case.sync(weights)
            found.append(live_digests(case))
        assert len(found[0]) == len(case.given.adapters)
        assert found[0] == found[2]
        for before, after in zip(found[0], found[1], strict=True):
            assert before.keys() == after.keys()
            assert before != after

    def test_live_content_is_what_the_digests_are_of(self, case: RolloutCase) -> None:
        """Every byte of every tensor of every rank; a tensor that is not there is an error.

        To look at an engine takes nothing from it: it can be synced again.
        """
        self.need(RolloutCapability.LIVE_DIGESTS)
        self.need(RolloutCapability.LIVE_CONTENT)
        for weights in (case.given.weights_a, case.given.weights_b):
            case.sync(weights)
            for rank, found in enumerate(live_digests(case)):
                assert found
                for name, digest in found.items():
                    assert content_digest_of(case, rank, name) == digest, (rank, name)
        with pytest.raises(VerificationError, match="no_such_tensor"):
            piece_of(case, 0, "no_such_tensor", 0)
        if RolloutCapability.FREES_WEIGHTS not in self.lacks:
            case.first.release(("weights",), case.given.timeout_s)
            case.first.resume(("weights",), case.given.timeout_s)
        case.assert_repaired_by_sync()

    def test_every_rank_holds_what_the_layout_says(self, case: RolloutCase) -> None:
        """After a warm update everything that it holds is expected, and nothing else is there.

        Served once before, so that what a first request computes is included.
        """
        self._need_layout()
        case.sync(case.given.weights_a)
        case.fingerprint()
        case.sync(case.given.weights_b)
        for check in checks(case, case.given.weights_b):
            assert clean(case, check), check
            assert check.matched
        for check in checks(case, case.given.weights_a):
            assert check.mismatched

    def test_a_stale_or_swapped_tensor_is_named(self, case: RolloutCase) -> None:
        """Fused parts left behind; layers or experts swapped; all cut, or rounded, wrongly."""
        self._need_layout()
        first, second = case.given.weights_a, case.given.weights_b
        expected = expectations(case, second)
        fused = [held.sources for held in expected[0].tensors.values() if len(held.sources) > 1]
        for stale in {name for sources in fused[:2] for name in (*sources[:2], sources[-1])}:
            case.sync(second.changed({stale: first.tensors[stale]}))
            assert_named(case, expected, {stale})
        for swap in swaps(second.tensors):
            case.sync(second.changed(swap))
            assert_named(case, expected, set(swap))
        for harmed in (shifted(second.tensors), rounded(second.tensors)):
            case.sync(second.changed(harmed))
            assert_named(case, expected, set(harmed))

    def test_a_flipped_bit_is_named(self, case: RolloutCase) -> None:
        """One bit of any one live tensor or buffer of any one rank, and nothing else is named."""
        self._need_layout()
        assert case.given.flip is not None, "give `flip`, or declare that LAYOUT is lacking"
        case.sync(case.given.weights_a)
        expected = expectations(case, case.given.weights_a)
        for rank, expectation in enumerate(expected):
            for number, name in enumerate(expectation.tensors):
                position = number * 0.37 % 1
                case.given.flip(rank, name, position)
                found = compared(case, expected)
                case.given.flip(rank, name, position)
                assert name in found[rank].mismatched, f"rank {rank}: {name} was not noticed"
                assert_aliases(expectation, name, found[rank].mismatched)
                others = [check for check in found if check.tp_rank != rank]
                assert all(clean(case, check) for check in others), others
        assert all(clean(case, check) for check in compared(case, expected))

    def _need_layout(self) -> None:
        self.need(RolloutCapability.LIVE_DIGESTS)
        self.need(RolloutCapability.LAYOUT)


def live_digests(case: RolloutCase) -> list[dict[str, str]]:
    """What the replica's ranks hold."""
    adapter = case.first
    assert isinstance(adapter, SupportsLiveDigests), "declare that LIVE_DIGESTS is lacking"
    return adapter.live_digests(case.given.timeout_s)


def piece_of(case: RolloutCase, rank: int, name: str, start: int) -> LiveContent:
    """A piece of a live tensor."""
    adapter = case.first
    assert isinstance(adapter, SupportsLiveContent), "declare that LIVE_CONTENT is lacking"
    return adapter.live_content(rank, name, start, case.given.timeout_s)


def content_digest_of(case: RolloutCase, rank: int, name: str) -> str:
    """Digest of a live tensor, from its pieces."""
    total, start = WordSum(), 0
    while True:
        piece = piece_of(case, rank, name, start)
        meta = TensorMeta(name, piece.shape, piece.dtype)
        if piece.data:
            total.add(start, torch.frombuffer(bytearray(piece.data), dtype=torch.uint8))
        start += len(piece.data)
        if start >= meta.nbytes or not piece.data:
            return total.digest(meta)


def expectations(case: RolloutCase, weights: WeightSet) -> list[Expectation]:
    """What they must hold after a sync of `weights`."""
    assert case.given.layout is not None, "give `layout`, or declare that LAYOUT is lacking"
    size = len(case.given.adapters)
    stream = zip(weights.metas, weights.tensors.values(), strict=True)
    manifest = weights.manifest(case.version())
    return expected_digests(stream, manifest, case.given.layout, range(size), size)


def compared(case: RolloutCase, expected: Sequence[Expectation]) -> list[LiveCheck]:
    """The ranks against their expectations."""
    assert case.given.layout is not None
    return [
        check_live(case.given.layout, expectation, live)
        for expectation, live in zip(expected, live_digests(case), strict=True)
    ]


def checks(case: RolloutCase, weights: WeightSet) -> list[LiveCheck]:
    """The ranks against `weights`."""
    return compared(case, expectations(case, weights))


def clean(case: RolloutCase, check: LiveCheck) -> bool:
    """Whether nothing differs, and nothing is unverifiable but what the table declares."""
    spec = case.given.layout
    assert spec is not None
    declared = all(
        any(match(pattern, name) is not None for pattern in spec.unknown)
        for name in check.unverifiable
    )
    return declared and not (check.mismatched or check.missing or check.unexpected)


def assert_named(case: RolloutCase, expected: Sequence[Expectation], sources: set[str]) -> None:
    """All that is made of `sources` differs, on every rank, and nothing else does."""
    for expectation, check in zip(expected, compared(case, expected), strict=True):
        wanted = {name for name, held in expectation.tensors.items() if sources & set(held.sources)}
        assert wanted
        assert set(check.mismatched) == wanted
        assert not check.missing
        assert not check.unexpected


def assert_aliases(expectation: Expectation, name: str, found: Sequence[str]) -> None:
    """Everything in `found` has the shape and sources of `name`: it can be the same storage."""
    held = expectation.tensors[name]
    for other in (expectation.tensors[item] for item in found):
        assert (other.shape, other.sources) == (held.shape, held.sources), (name, found)


def swaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Everything of layer 0 exchanged with layer 1; of expert 0 with expert 1."""
    for zero, one in ((".layers.0.", ".layers.1."), (".experts.0.", ".experts.1.")):
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            other = tensors.get(name.replace(zero, one))
            if zero in name and other is not None and other.shape == tensor.shape:
                found |= {name: other, name.replace(zero, one): tensor}
        if found:
            yield found


def shifted(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything from one row, or one column, too far: each rank gets a slice that is not its."""
    return {
        name: tensor.roll(1, 0 if number % 2 else -1)
        for number, (name, tensor) in enumerate(tensors.items())
        if tensor.dim() and tensor.numel()
    }


def rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything in float32 as if it had travelled in bfloat16."""
    return {
        name: tensor.bfloat16().float()
        for name, tensor in tensors.items()
        if tensor.dtype is torch.float32
    }
