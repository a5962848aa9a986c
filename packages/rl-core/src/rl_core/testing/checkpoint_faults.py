"""Damage to a backend's own transport, which only the backend knows how to do."""

import re
from dataclasses import dataclass
from enum import StrEnum

from rl_core.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    MiniRLError,
    TransferTimeoutError,
)


class CheckpointFault(StrEnum):
    """Kinds of damage between the trainer's tensor and loading.

    Each value says what happens; `errors` are those that the receiver may end with. Each must name
    the tensor, or what carried it: that time is up says nothing about what is damaged.
    """

    MISCOPIED = "a byte of the tensor changes while it is packed or written"
    CORRUPTED = "a byte of the tensor is flipped after its digest was taken"
    TRUNCATED = "the data that carry the tensor end too early"
    MISSING = "the bucket or file that carries the tensor never arrives"

    @property
    def errors(self) -> tuple[type[MiniRLError], ...]:
        """What the receiver may end with; only what never comes may be waited for in vain."""
        found: tuple[type[MiniRLError], ...] = (DigestMismatchError,)
        if self in (CheckpointFault.TRUNCATED, CheckpointFault.MISSING):
            found = (*found, ManifestMismatchError)
        return (*found, TransferTimeoutError) if self is CheckpointFault.MISSING else found


@dataclass(frozen=True)
class FaultHook:
    """Where a kind of damage is done.

    Attributes:
        member: whose process and engine: `sender 0` or `receiver 0`.
        function: `module:name` or `/path/of/file.py:name` of a function called there with the
            connected engine and the name of the tensor to harm, once, before the transfer; it
            arranges that the damage happens during the transfer.
        carrier: regular expression for what carries the tensor, such as the name of a file, if an
            error may name that instead of the tensor.
    """

    member: str
    function: str
    carrier: str | None = None

    def named_in(self, error: BaseException, tensor: str) -> bool:
        """Whether an error names the tensor that was harmed, or what carried it."""
        carried = self.carrier is not None and re.search(self.carrier, str(error)) is not None
        return carried or repr(tensor) in str(error)
