"""An actor rank's part in live verification: what the engine's ranks must hold, as it passes by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from rl_core.errors import LifecycleError
from rl_core.rollout.expectation import Expectation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces import TensorStream
    from rl_core.layout import LayoutSpec
    from rl_core.metadata import Manifest
    from rl_core.rollout.expected_digests import ExpectedDigests, RankLayouts


LiveName: TypeAlias = tuple[int, str]
"""A tensor of an engine: tensor-parallel rank and run-time name."""

SHOWN_BYTES = 1 << 28
"""So many bytes of tensors that differ, and of each of them, are looked at to find where."""


class Expected(msgspec.Struct, frozen=True):
    """What some ranks of every replica must hold once they have loaded a version.

    Attributes:
        ranks: by tensor-parallel rank, of those that this actor rank computes.
        seconds: that it took.
    """

    ranks: tuple[Expectation, ...] = ()
    seconds: float = 0.0


def in_rank_order(answers: Sequence[Expected]) -> list[Expectation]:
    """What all actor ranks say together, by tensor-parallel rank."""
    return sorted((one for answer in answers for one in answer.ranks), key=lambda one: one.tp_rank)


def share(actor: int, actors: int, tp_size: int) -> tuple[int, ...]:
    """Tensor-parallel ranks that actor rank `actor` of `actors` derives the digests of.

    The last ones first, since the first ones are busy with sending.
    """
    return tuple(range(actors - 1 - actor, tp_size, actors))


class LiveMember:
    """Mixed into actor workers: derives expected digests from the full tensors they stream."""

    _spec: LayoutSpec | None = None
    _ranks: Sequence[int] = ()
    _tp_size: int = 1
    _layouts: RankLayouts | None = None

    def init_live(self, spec: LayoutSpec, ranks: Sequence[int], tp_size: int) -> None:
        """Say which ranks of the `tp_size` of a replica are this actor rank's."""
        self._spec, self._ranks, self._tp_size = spec, ranks, tp_size

    def live_tap(self, stream: TensorStream, manifest: Manifest, *, wanted: bool) -> LiveTap:
        """Look on as `stream` passes, if that is `wanted` and some rank is this actor rank's."""
        if not wanted or not self._ranks:
            return LiveTap(stream, None)
        from rl_core.rollout.expected_digests import ExpectedDigests

        return LiveTap(stream, ExpectedDigests(self._layouts_of(manifest), manifest))

    def assemble_live(
        self, stream: TensorStream, manifest: Manifest, wanted: Sequence[LiveName]
    ) -> dict[LiveName, bytes]:
        """The first bytes of what ranks must hold: of those `wanted` that are this actor rank's.

        Reads the stream to its end.
        """
        from rl_core.rollout.expected_content import ExpectedContent

        mine = [name for name in wanted if name[0] in self._ranks]
        content = ExpectedContent(self._layouts_of(manifest), mine, SHOWN_BYTES)
        for meta, tensor in stream:
            content.see(meta.name, tensor)
        return content.finish()

    def _layouts_of(self, manifest: Manifest) -> RankLayouts:
        """Made once for each structure."""
        from rl_core.rollout.expected_digests import RankLayouts

        if self._spec is None:
            raise LifecycleError("init_live was not called")
        if self._layouts is None or not self._layouts.fit(manifest):
            self._layouts = RankLayouts(self._spec, manifest, self._ranks, self._tp_size)
        return self._layouts


class LiveTap:
    """Looks on as the trainer's tensors pass.

    Attributes:
        stream: what was given, each tensor accounted for before anybody else has it.
    """

    def __init__(self, stream: TensorStream, digests: ExpectedDigests | None) -> None:
        self.stream = stream if digests is None else self._watched(stream, digests)
        self._digests = digests
        self._seconds = 0.0

    def expected(self) -> Expected:
        """What the ranks must hold; ManifestMismatchError unless all tensors have passed."""
        if self._digests is None:
            return Expected()
        begin = time.perf_counter()
        ranks = tuple(self._digests.finish())
        return Expected(ranks, self._seconds + time.perf_counter() - begin)

    def _watched(self, stream: TensorStream, digests: ExpectedDigests) -> TensorStream:
        for meta, tensor in stream:
            begin = time.perf_counter()
            digests.see(meta, tensor)
            self._seconds += time.perf_counter() - begin
            yield meta, tensor
