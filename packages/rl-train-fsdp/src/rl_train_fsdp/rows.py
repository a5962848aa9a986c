"""Rows of a forward pass: a prompt once, and behind it the responses of samples that share it.

Samples of one group have their prompt in common, and under causal attention its hidden states do
not depend on what follows. So they are computed once for all of them: each response continues the
prompt's positions and sees the prompt and itself, not its neighbours. Log-probabilities and
gradients are those of the samples computed apart; the sums run in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample


@dataclass(frozen=True)
class Row:
    """Samples with the same prompt, as one sequence of P + sum(`lengths`) tokens.

    Attributes:
        prompt: P token ids.
        samples: indices of the samples, in the order of their responses.
        lengths: for each of them, how many response tokens enter the model. The last one asked
            about does not: nothing is predicted from it.
    """

    prompt: tuple[int, ...]
    samples: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, without padding."""
        return len(self.prompt) + sum(self.lengths)

    def joined(self, other: Row) -> Row:
        """Both rows' samples behind the one prompt."""
        return Row(self.prompt, self.samples + other.samples, self.lengths + other.lengths)

    def cost(self, width: int) -> int:
        """Relative work: linear layers grow with the tokens, attention with their square.

        A decoder layer of hidden size D has about 12 D^2 parameters, 24 D^2 operations a token,
        and its attention 4 D operations a pair of tokens; in units of 4 D.
        """
        return self.num_tokens * (self.num_tokens + 6 * width)


def response_offsets(sample: TrainSample, *, loss_only: bool) -> list[int]:
    """Offsets within the response that are asked about: all, or those with loss mask 1."""
    if loss_only:
        return [offset for offset, mask in enumerate(sample.loss_mask) if mask]
    return list(range(len(sample.response_ids)))


def plan_rows(
    samples: Sequence[TrainSample], *, loss_only: bool, max_tokens: int, width: int | None
) -> list[Row]:
    """Every sample in one row.

    Args:
        samples: of one rank.
        loss_only: ask about the loss tokens only.
        max_tokens: longest row that more than one sample may form.
        width: hidden size of a model whose prompts may be shared, or None for a row per sample.
    """
    rows: dict[tuple[int, ...], list[Row]] = {}
    for index, sample in enumerate(samples):
        asked = response_offsets(sample, loss_only=loss_only)
        row = Row(tuple(sample.prompt_ids), (index,), (asked[-1] if asked else 0,))
        _add(rows.setdefault(row.prompt, []), row, max_tokens, width)
    return [row for shared in rows.values() for row in shared]


def _add(rows: list[Row], row: Row, max_tokens: int, width: int | None) -> None:
    """Join the last row of this prompt, if that is allowed and less work than a row apart."""
    if rows and width is not None:
        both = rows[-1].joined(row)
        cheaper = both.cost(width) <= rows[-1].cost(width) + row.cost(width)
        if cheaper and both.num_tokens <= max_tokens:
            rows[-1] = both
            return
    rows.append(row)
