"""A transfer needs two buckets and the largest tensor, however large the model is."""

from rl_core.buckets import MEGABYTE
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_group import Terms
from rl_core.testing.checkpoint_recipe import TensorRecipe, WeightRecipe
from rl_core.testing.checkpoint_security_contract import CheckpointCapability
from rl_core.testing.contract import Contract

BUCKET_MB = 8
LARGEST_MB = 12
SLACK_MB = 6
"""What sockets, threads, allocators and a library's first use may take besides."""

_LAYERS = tuple(
    TensorRecipe(f"layer.{number}", (4, MEGABYTE // 2 + number), "bfloat16") for number in range(16)
)
HEAVY = WeightRecipe(
    (
        *_LAYERS[:8],
        TensorRecipe("largest", (LARGEST_MB, MEGABYTE // 2), "bfloat16", "transposed"),
        *_LAYERS[8:],
    )
)
"""76 MiB, of which no side may hold more than 28. The largest must be copied where it is sent."""


class MemoryContract(Contract, contract=True):
    """Peak of the resident memory."""

    def test_peak_memory_is_bounded(self, case: CheckpointCase) -> None:
        """On each side at most two buckets and the largest tensor more than before `prepare`."""
        self.need(CheckpointCapability.BOUNDED_MEMORY)
        terms = Terms(BUCKET_MB, options=case.options)
        group = case.group(terms=terms)
        warm = WeightRecipe(HEAVY.tensors[:1])
        assert group.sync(warm).ok  # what a library takes once, on its first use
        case.construct(group.members, terms)
        for member in group.members:
            member.handle.call("start_meter", HEAVY, timeout=case.deadline_s)
        outcome = group.sync(HEAVY)
        assert outcome.ok, outcome.errors
        allowed = (2 * BUCKET_MB + LARGEST_MB + SLACK_MB) * MEGABYTE
        ends = {**{f"sender {rank}": end for rank, end in outcome.sent.items()}}
        peaks = {name: end.extra_bytes for name, end in ends.items() if end is not None}
        for rank, received in outcome.received.items():
            assert received is not None
            peaks[f"receiver {rank}"] = received.extra_bytes
        over = {name: peak / MEGABYTE for name, peak in peaks.items() if peak > allowed}
        assert not over, f"MiB over the allowed {allowed / MEGABYTE:.0f}: {over}; all: {peaks}"
