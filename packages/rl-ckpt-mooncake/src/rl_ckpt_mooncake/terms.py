"""What the sides of one version agree on, beyond what every checkpoint engine does."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_ckpt_mooncake.config import LEAST_PIECE_BYTES
from rl_ckpt_mooncake.parts import check_kind
from rl_core.errors import MessageError


@dataclass(frozen=True)
class VersionTerms:
    """Set by the sender, sent in the handshake.

    Attributes:
        epoch: counts the versions that this sender has begun; part of every counter.
        piece_bytes: size of a piece.
        digest_kind: of the digests of parts.
    """

    epoch: int
    piece_bytes: int
    digest_kind: str

    def properties(self) -> dict[str, str]:
        """As they travel."""
        return {
            "epoch": str(self.epoch),
            "piece_bytes": str(self.piece_bytes),
            "parts": self.digest_kind,
        }

    @classmethod
    def parse(cls, properties: Mapping[str, str]) -> "VersionTerms":
        """What the sender has sent; MessageError if it makes no sense."""
        epoch = _number(properties, "epoch", 1)
        piece_bytes = _number(properties, "piece_bytes", LEAST_PIECE_BYTES)
        return cls(epoch, piece_bytes, check_kind(properties.get("parts", "")))


def _number(properties: Mapping[str, str], name: str, least: int) -> int:
    text = properties.get(name, "")
    if not (text.isascii() and text.isdecimal() and least <= int(text) < 1 << 63):
        raise MessageError(f"{name} of the sender makes no sense: {text!r}")
    return int(text)
