"""What the tests of the checkpoint contract assert about the ends of a sync."""

from collections.abc import Iterable

from rl_core.digests import kind_of
from rl_core.errors import MiniRLError
from rl_core.testing.checkpoint_group import Outcome
from rl_core.testing.checkpoint_orders import Received, Sent
from rl_core.testing.checkpoint_recipe import WeightRecipe


def assert_arrived(outcome: Outcome, weights: WeightRecipe, digest_kind: str | None) -> None:
    """Everything arrived everywhere, bit for bit, and the senders' books agree."""
    assert outcome.ok, describe(outcome)
    for rank, received in outcome.received.items():
        assert received is not None
        _assert_received(f"receiver {rank}", received, weights, digest_kind)
    for rank, sent in outcome.sent.items():
        assert sent is not None
        _assert_drained(f"sender {rank}", sent, weights)
    _assert_report(outcome, weights, digest_kind)


def assert_ended(outcome: Outcome, expected: dict[str, type[MiniRLError]], *named: str) -> None:
    """The given members ended with these errors, each naming all of `named`; nothing was foreign.

    Args:
        outcome: how the sync ended.
        expected: class of the error by member.
        named: text that each of these errors must contain.
    """
    assert_no_foreign(outcome)
    errors = outcome.errors
    for member, kind in expected.items():
        error = errors.get(member)
        assert isinstance(error, kind), (
            f"{member} should have ended with {kind.__name__}; {describe(outcome)}"
        )
        for text in named:
            assert text in str(error), f"{member}: {text!r} is not named in: {error}"


def assert_no_foreign(outcome: Outcome) -> None:
    """Every error is one of `rl_core.errors`."""
    for member, error in outcome.errors.items():
        assert isinstance(error, MiniRLError), f"{member} raised a foreign error:\n{error}"


def assert_drained(outcome: Outcome, weights: WeightRecipe, ranks: Iterable[int]) -> None:
    """These senders iterated their streams to the end."""
    for rank in ranks:
        sent = outcome.sent[rank]
        assert sent is not None
        _assert_drained(f"sender {rank}", sent, weights)


def describe(outcome: Outcome) -> str:
    """The errors of an outcome, for messages."""
    errors = [
        f"{member}: {type(error).__name__}: {error}" for member, error in outcome.errors.items()
    ]
    return "the sync ended with: " + ("; ".join(errors) if errors else "no error")


def _assert_received(
    member: str, received: Received, weights: WeightRecipe, digest_kind: str | None
) -> None:
    names = [meta.name for meta in received.metas]
    expected = [tensor.meta for tensor in weights.tensors]
    assert names == [meta.name for meta in expected], f"{member}: wrong order, doubles or gaps"
    assert received.metas == expected, f"{member}: metadata differs from the manifest's"
    assert not received.touched, f"{member}: {received.touched} changed inside an open lease"
    wrong = {
        name: digest
        for name, digest in received.digests.items()
        if digest != weights.content_digests(kind_of(digest))[name]
    }
    assert not wrong, f"{member}: contents differ in {sorted(wrong)}"
    carried = received.carried
    if digest_kind is None:
        assert not any(carried.values()), f"{member}: digests came although none were asked for"
    else:
        assert carried == dict(weights.content_digests(digest_kind)), (
            f"{member}: wrong digests came along"
        )


def _assert_drained(member: str, sent: Sent, weights: WeightRecipe) -> None:
    assert sent.exhausted, f"{member} left its stream after {sent.drawn} tensors; others then hang"
    assert sent.drawn == len(weights.tensors)


def _assert_report(outcome: Outcome, weights: WeightRecipe, digest_kind: str | None) -> None:
    first = outcome.sent[0]
    assert first is not None
    report = first.report
    assert report is not None, "sender 0 returned no report"
    assert report.payload_bytes == outcome.manifest.nbytes
    expected = weights.weights_digest(digest_kind) if digest_kind else None
    assert report.weights_digest == expected
    assert all(seconds >= 0 for seconds in report.seconds.values())
    exits = {
        rank: received.last_exit_at
        for rank, received in outcome.received.items()
        if received is not None and received.leases
    }
    early = [rank for rank, exit_at in exits.items() if first.ended_at < exit_at]
    assert not early, f"sender 0 reported success while receivers {early} were still reading"
