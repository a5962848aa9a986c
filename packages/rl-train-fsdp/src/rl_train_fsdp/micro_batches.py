"""Forward passes of bounded size: which rows go together, and their padded tensors."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_train_fsdp.rows import Row, plan_rows, response_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample


BATCH_TOKENS = 256
"""What one more micro-batch costs, in tokens: its parameters are gathered once more.

On two cores (50 GFLOP/s, 5 GB/s) that is the work of some ten tokens, on accelerators (300 TFLOP/s,
200 GB/s) of a thousand. It need not be exact: rows of 20 to 532 tokens, cut as for 64 or 1024, cost
at most a tenth more by this measure.
"""


@dataclass(frozen=True)
class MicroBatch:
    """B rows padded on the right to L tokens, and the N response tokens asked about.

    Attributes:
        indices: which samples, in the order of their tokens; empty for a batch that only keeps
            ranks in step.
        counts: for each sample, how many of the N tokens are its own.
        input_ids: (B, L) int64; padding is 0.
        positions: (N,) int64 index into the B * L hidden states: of the state that predicts the
            token, which is the one before it in its sample.
        targets: (N,) int64 token ids.
        temperature: (N,) float32.
        position_ids: (B, L) int64 position of each token in its sample; None where they count up
            along the row, because no row holds more than one sample.
        mask: (B, 1, L, L) bool, true where a token (third dimension) sees another (fourth); None
            where causal order says it all.
    """

    indices: tuple[int, ...]
    counts: tuple[int, ...]
    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    temperature: Tensor
    position_ids: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def pack(
        cls, samples: Sequence[TrainSample], rows: Sequence[Row], *, loss_only: bool
    ) -> MicroBatch:
        """Pad the rows; ask about all response tokens of their samples or those of the loss."""
        length = max(row.num_tokens for row in rows)
        packing = _Packing()
        for number, row in enumerate(rows):
            packing.add(samples, row, number * length, loss_only=loss_only)
        batch = cls(
            tuple(index for row in rows for index in row.samples),
            tuple(packing.counts),
            _padded(packing.ids, length, 0),
            torch.tensor(packing.positions, dtype=torch.int64),
            torch.tensor(packing.targets, dtype=torch.int64),
            torch.tensor(packing.temperature, dtype=torch.float32),
        )
        if all(len(row.samples) == 1 for row in rows):
            return batch
        places, segments = _padded(packing.places, length, 0), _padded(packing.segments, length, -1)
        return dataclasses.replace(batch, position_ids=places, mask=_visible(segments))

    @classmethod
    def empty(cls) -> MicroBatch:
        """One token of no sample: takes part in the collectives and adds nothing."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls((), (), torch.zeros(1, 1, dtype=torch.int64), none, none, torch.zeros(0))

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            self.indices,
            self.counts,
            self.input_ids.to(device),
            self.positions.to(device),
            self.targets.to(device),
            self.temperature.to(device),
            None if self.position_ids is None else self.position_ids.to(device),
            None if self.mask is None else self.mask.to(device),
        )


class _Packing:
    """The columns of a micro-batch while rows are added."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.places: list[list[int]] = []
        self.segments: list[list[int]] = []
        self.counts: list[int] = []
        self.positions: list[int] = []
        self.targets: list[int] = []
        self.temperature: list[float] = []

    def add(self, samples: Sequence[TrainSample], row: Row, start: int, *, loss_only: bool) -> None:
        """Append `row`, whose first token is number `start` of the flattened batch."""
        width = len(row.prompt)
        ids, places, segments = list(row.prompt), list(range(width)), [0] * width
        for segment, (index, count) in enumerate(zip(row.samples, row.lengths, strict=True), 1):
            self._ask(samples[index], start + width - 1, start + len(ids), loss_only=loss_only)
            ids += samples[index].response_ids[:count]
            places += range(width, width + count)
            segments += [segment] * count
        self.ids.append(ids)
        self.places.append(places)
        self.segments.append(segments)

    def _ask(self, sample: TrainSample, prompt_end: int, first: int, *, loss_only: bool) -> None:
        """Ask about a response behind the token `prompt_end`, whose tokens begin at `first`."""
        chosen = response_offsets(sample, loss_only=loss_only)
        self.positions += [first + offset - 1 if offset else prompt_end for offset in chosen]
        self.targets += [sample.response_ids[offset] for offset in chosen]
        self.temperature += [sample.temperature] * len(chosen)
        self.counts.append(len(chosen))


def _padded(rows: Sequence[list[int]], length: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def _visible(segments: Tensor) -> Tensor:
    """(B, 1, L, L): each token sees what is before it in its own segment and in the prompt (0).

    Padding sees itself, since a softmax over nothing is not a number.
    """
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :]
    return ((own | prompt).tril())[:, None]


@dataclass(frozen=True)
class Batching:
    """What goes into one forward pass of one rank.

    Attributes:
        max_tokens: upper bound of tokens, padding included; a single longer row is run alone.
        width: hidden size of a model whose prompts may be shared, or None to share nothing.
    """

    max_tokens: int
    width: int | None = None

    def plan(self, samples: Sequence[TrainSample], *, loss_only: bool) -> list[list[Row]]:
        """Every sample in one row of one micro-batch."""
        rows = plan_rows(samples, loss_only=loss_only, max_tokens=self.max_tokens, width=self.width)
        batches = plan_micro_batches([row.num_tokens for row in rows], self.max_tokens)
        return [[rows[index] for index in batch] for batch in batches]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `max_tokens` tokens, padding included.

    The cheapest way to cut the rows, longest first, into batches, where a batch costs its padded
    tokens and `BATCH_TOKENS`. Rows of one length stay together as far as they fit. A single longer
    row makes a batch of its own.
    """
    full, rest = _equal_rows(lengths, max_tokens)
    groups = [lengths[rows[0]] for rows in rest], [len(rows) for rows in rest]
    cuts = _cheapest_cuts(*groups, max_tokens)
    mixed = [[*chain(*rest[start:stop])] for start, stop in pairwise(cuts)]
    return sorted([*full, *mixed], key=lambda batch: -lengths[batch[0]])


def _equal_rows(lengths: Sequence[int], max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of equal length, longest first: full batches, and for each length what is left."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    full: list[list[int]] = []
    rest: list[list[int]] = []
    for length in sorted(by_length, reverse=True):
        rows, size = by_length[length], max(1, max_tokens // length)
        whole = len(rows) // size * size
        full += [rows[start : start + size] for start in range(0, whole, size)]
        if rows[whole:]:
            rest.append(rows[whole:])
    return full, rest


def _cheapest_cuts(lengths: Sequence[int], counts: Sequence[int], max_tokens: int) -> list[int]:
    """Where to cut groups of rows, longest first: from 0 to their number.

    Dynamic programming over the end of the last batch; `counts` rows of `lengths` tokens each.
    """
    costs = [0] + [sys.maxsize] * len(lengths)
    starts = [0] * (len(lengths) + 1)
    for start, longest in enumerate(lengths):
        rows = 0
        for stop in range(start + 1, len(lengths) + 1):
            rows += counts[stop - 1]
            # The first group of a batch is its longest: it decides what every further row costs.
            if rows * longest > max_tokens and stop > start + 1:
                break
            cost = costs[start] + rows * longest + BATCH_TOKENS
            if cost < costs[stop]:
                costs[stop], starts[stop] = cost, start
    cuts = [len(lengths)]
    while cuts[0] > 0:
        cuts.insert(0, starts[cuts[0]])
    return cuts
