"""Damage to a backend's own transport, which only the backend knows how to do."""

from dataclasses import dataclass
from enum import StrEnum

from rl_core.errors import DigestMismatchError, MiniRLError


class CheckpointFault(StrEnum):
    """Kinds of damage between packing and loading.

    Each value says what happens; `error` is what the receiver must end with.
    """

    CORRUPTED = "a byte of the tensor is flipped after its digest was taken"
    TRUNCATED = "the data that carry the tensor end too early"
    MISSING = "the bucket or file that carries the tensor never arrives"

    @property
    def error(self) -> type[MiniRLError]:
        """What the receiver must end with."""
        return DigestMismatchError if self is CheckpointFault.CORRUPTED else MiniRLError


@dataclass(frozen=True)
class FaultHook:
    """Where a kind of damage is done.

    Attributes:
        member: whose process and engine: `sender 0` or `receiver 0`.
        function: `module:name` or `/path/of/file.py:name` of a function called there with the
            connected engine and the name of the tensor to harm, once, before the transfer; it
            arranges that the damage happens during the transfer.
    """

    member: str
    function: str
