"""What single tensors of single ranks must hold, byte by byte: to tell where a live one differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.rollout.expected_digests import assemble
from rl_core.torch import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rl_core.rollout.expected_digests import RankLayouts
    from rl_core.rollout.rank_plan import RankPlan

Name = tuple[int, str]


class ExpectedContent:
    """Keeps, of a version that passes, what a few run-time tensors are made of."""

    def __init__(self, layouts: RankLayouts, wanted: Sequence[Name], limit: int) -> None:
        """For `wanted` (rank, run-time name); what the layouts do not know is left out.

        Args:
            layouts: of the ranks.
            wanted: what is asked for.
            limit: bytes to give of each.
        """
        plans = {plan.tp_rank: plan for plan in layouts.plans}
        self._layouts = layouts
        self._buffers = [(rank, name) for rank, name in wanted if name in layouts.buffers]
        self._wanted: list[tuple[RankPlan, str]] = [
            (plans[rank], name) for rank, name in wanted if name in plans[rank].parameters
        ]
        self._sources = {s for plan, name in self._wanted for s in plan.parameters[name].sources}
        self._tensors: dict[str, torch.Tensor] = {}
        self._limit = limit

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """A copy is kept of what is needed."""
        if name in self._sources:
            self._tensors[name] = tensor.detach().to("cpu", copy=True)

    def finish(self) -> dict[Name, bytes]:
        """The bytes, in row-major order."""
        found = {key: self._shown(self._layouts.buffer(key[1])) for key in self._buffers}
        for plan, name in self._wanted:
            found[plan.tp_rank, name] = self._shown(assemble(plan, name, self._tensors))
        return found

    def _shown(self, tensor: torch.Tensor) -> bytes:
        data: bytes = as_bytes(tensor)[: self._limit].numpy().tobytes()
        return data
