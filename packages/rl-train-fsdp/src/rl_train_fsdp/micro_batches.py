"""Forward passes of bounded size: which samples go together, and their padded tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample


@dataclass(frozen=True)
class MicroBatch:
    """B samples padded on the right to L tokens, and the N response tokens asked about.

    Attributes:
        indices: which samples, in row order; empty for a batch that only keeps ranks in step.
        counts: for each row, how many of the N tokens are its own.
        input_ids: (B, L) int64; padding is 0.
        positions: (N,) int64 index into the B * L hidden states: of the state that predicts the
            token, which is the one before it.
        targets: (N,) int64 token ids.
        temperature: (N,) float32.
    """

    indices: tuple[int, ...]
    counts: tuple[int, ...]
    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    temperature: Tensor

    @classmethod
    def pack(
        cls, samples: Sequence[TrainSample], indices: Sequence[int], *, loss_only: bool
    ) -> MicroBatch:
        """Pad the samples at `indices`; ask about all response tokens or those of the loss."""
        length = max(samples[index].num_tokens for index in indices)
        rows: list[list[int]] = []
        positions: list[int] = []
        targets: list[int] = []
        temperature: list[float] = []
        counts: list[int] = []
        for row, index in enumerate(indices):
            sample = samples[index]
            tokens = sample.prompt_ids + sample.response_ids
            rows.append(tokens + [0] * (length - len(tokens)))
            before = row * length + len(sample.prompt_ids) - 1
            chosen = response_offsets(sample, loss_only=loss_only)
            positions.extend(before + offset for offset in chosen)
            targets.extend(sample.response_ids[offset] for offset in chosen)
            temperature.extend([sample.temperature] * len(chosen))
            counts.append(len(chosen))
        return cls(
            tuple(indices),
            tuple(counts),
            torch.tensor(rows),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
            torch.tensor(temperature, dtype=torch.float32),
        )

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
        )


def response_offsets(sample: TrainSample, *, loss_only: bool) -> list[int]:
    """Offsets within the response: all of them, or those with loss mask 1."""
    if loss_only:
        return [offset for offset, mask in enumerate(sample.loss_mask) if mask]
    return list(range(len(sample.response_ids)))


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `max_tokens` tokens, padding included.

    Longest first, so that neighbours are of nearly equal length. A single longer sequence makes a
    batch of its own.
    """
    batches: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in order:
        # The first of a batch is its longest: it decides what every further row costs.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
