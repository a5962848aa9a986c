"""What each rank of an engine says of itself and of its weights, and what they say together."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights


class RankWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's answer; plain data, since every engine carries it in a way of its own.

    Attributes:
        rank: its number among the tensor-parallel ranks.
        device: `cpu`, or an accelerator.
        settings: fields of the backend's configuration that the layout depends on.
        split: see `LiveWeights`.
        digests: by run-time tensor name.
    """

    rank: int
    device: str
    settings: dict[str, Any]
    split: dict[str, int]
    digests: dict[str, str]


def together(engine: str, answers: Sequence[Any]) -> LiveWeights:
    """The engine, from the answers of all of its ranks as plain data.

    Errors: RolloutError if they are none, or do not belong to one engine.
    """
    try:
        ranks = msgspec.convert(answers, list[RankWeights])
    except msgspec.ValidationError as error:
        raise RolloutError(f"not what the ranks of {engine} answer: {error}") from error
    ranks.sort(key=lambda answer: answer.rank)
    facts = [(answer.device, answer.settings, answer.split) for answer in ranks]
    if not facts or any(other != facts[0] for other in facts):
        raise RolloutError(f"{len(facts)} ranks of {engine} that do not agree how they run")
    device, settings, split = facts[0]
    return LiveWeights(engine, device, settings, [answer.digests for answer in ranks], split)


def split_of(**sizes: int) -> dict[str, int]:
    """The `split` of these sizes: what is spread over one only, is not."""
    return {name: size for name, size in sizes.items() if size > 1}
