"""Messages that are well framed and not what they should be, made inside one member's process.

For engines whose control plane is `rl_core.transfer`. Each function gets the connected engine and
changes what it says once; `FORGERIES` tells what its peers must make of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rl_core.digests import XXH3_128
from rl_core.errors import (
    ManifestMismatchError,
    MessageError,
    MiniRLError,
    StaleVersionError,
    VerificationError,
)
from rl_core.transfer.messages import Begin, End, Go
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.channel import Channel
    from rl_core.interfaces import CheckpointEngine

T = TypeVar("T")

BOTH = ("sender 0", "receiver 0")
SENDER = ("sender 0",)


@dataclass(frozen=True)
class Forgery:
    """One way to lie.

    Attributes:
        function: `module:name`, called in the member's process with the engine and a text.
        members: who can tell this lie.
        error: what the member that hears it must end with.
        says: text that this error must contain.
    """

    function: str
    members: tuple[str, ...]
    error: type[MiniRLError]
    says: str


def wrongly_signed(engine: CheckpointEngine, _: str) -> None:
    """The second message from now on is signed with another key."""
    _signed_otherwise(engine, lambda mac, out, number, data: mac(out, number, data)[::-1])


def out_of_sequence(engine: CheckpointEngine, _: str) -> None:
    """It has the number of the message after it, as if one had been left out."""
    _signed_otherwise(engine, lambda mac, out, number, data: mac(out, number + 1, data))


def replayed(engine: CheckpointEngine, _: str) -> None:
    """The next message comes twice, byte for byte; not the last one, which ends the listening."""
    channel: Any = channel_of(engine)
    due, send_all = channel._sent + 1, channel._send_all

    def twice(data: bytes, *arguments: Any) -> None:
        send_all(data, *arguments)
        if channel._sent == due:
            send_all(data, *arguments)

    channel._send_all = twice


def malformed(engine: CheckpointEngine, _: str) -> None:
    """It is signed and numbered well, and what it says is no message at all."""
    channel = channel_of(engine)
    channel._encoder = _Babble()  # type: ignore[assignment]


def other_epoch(engine: CheckpointEngine, _: str) -> None:
    """The announcement is signed well, and is of an epoch that is over."""

    def older(message: Begin) -> list[Any]:
        manifest = msgspec.structs.replace(message.manifest, version=PolicyVersion(0, 0))
        return [msgspec.structs.replace(message, manifest=manifest)]

    said_otherwise(engine, Begin, older)


def other_structure(engine: CheckpointEngine, _: str) -> None:
    """The announcement has a tensor of another shape, under the hash of the right ones."""

    def reshaped(message: Begin) -> list[Any]:
        first, *others = message.manifest.tensors
        tensors = (msgspec.structs.replace(first, shape=(1, *first.shape)), *others)
        manifest = msgspec.structs.replace(message.manifest, tensors=tensors)
        return [msgspec.structs.replace(message, manifest=manifest)]

    said_otherwise(engine, Begin, reshaped)


def no_digests(engine: CheckpointEngine, _: str) -> None:
    """The announcement says that nothing can be verified, to members who insist on it."""
    said_otherwise(
        engine, Begin, lambda message: [msgspec.structs.replace(message, digest_kind=None)]
    )


def other_version_at_the_end(engine: CheckpointEngine, _: str) -> None:
    """The trailer is signed well, and closes another version than the one announced."""
    _closed_otherwise(engine, version=PolicyVersion(0, 0))


def other_digest_at_the_end(engine: CheckpointEngine, _: str) -> None:
    """The trailer's digest of digests is not that of the digests that came."""
    _closed_otherwise(engine, weights_digest=f"{XXH3_128}:{0:032x}")


def announced_twice(engine: CheckpointEngine, _: str) -> None:
    """Once all have agreed, the version is announced again, as a second sender would."""
    announced: list[Begin] = []

    def kept(message: Begin) -> list[Any]:
        announced.append(message)
        return [message]

    said_otherwise(engine, Begin, kept)
    said_otherwise(engine, Go, lambda message: [message, *announced])


_UNAUTHENTIC = "not authentic or out of order"
FORGERIES = {
    forgery.function.rpartition(":")[2]: forgery
    for forgery in (
        Forgery(f"{__name__}:wrongly_signed", BOTH, MessageError, _UNAUTHENTIC),
        Forgery(f"{__name__}:out_of_sequence", BOTH, MessageError, _UNAUTHENTIC),
        Forgery(f"{__name__}:replayed", BOTH, MessageError, _UNAUTHENTIC),
        Forgery(f"{__name__}:malformed", BOTH, MessageError, "is malformed"),
        Forgery(f"{__name__}:other_epoch", SENDER, StaleVersionError, "e0.s0"),
        Forgery(f"{__name__}:other_structure", SENDER, ManifestMismatchError, "'embed.weight'"),
        Forgery(f"{__name__}:no_digests", SENDER, VerificationError, "insists on"),
        Forgery(f"{__name__}:other_version_at_the_end", SENDER, ManifestMismatchError, "e0.s0"),
        Forgery(f"{__name__}:other_digest_at_the_end", SENDER, MiniRLError, f"{0:032x}"),
        Forgery(f"{__name__}:announced_twice", SENDER, MessageError, "sent Begin"),
    )
}
"""All lies by name."""


def channel_of(engine: Any) -> Channel:
    """A receiver's connection to the sender, or the sender's to the first receiver."""
    end = engine._link._end if engine._link else engine._peers._ends[1]
    channel: Channel = end._channel
    return channel


def _signed_otherwise(engine: CheckpointEngine, sign: Callable[..., bytes]) -> None:
    channel = channel_of(engine)
    due, mac = channel._sent + 1, channel._mac

    def signed(direction: bytes, number: int, payload: bytes) -> bytes:
        if direction == channel._out and number == due:
            return sign(mac, direction, number, payload)
        return mac(direction, number, payload)

    channel._mac = signed  # type: ignore[method-assign]


def said_otherwise(
    engine: CheckpointEngine, kind: type[T], change: Callable[[T], list[Any]]
) -> None:
    """Let every message of `kind` be what `change` makes of it."""
    channel: Any = channel_of(engine)
    send = channel.send

    def sending(message: Any, *arguments: Any) -> None:
        for said in change(message) if isinstance(message, kind) else [message]:
            send(said, *arguments)

    channel.send = sending


def _closed_otherwise(engine: CheckpointEngine, **changes: Any) -> None:
    said_otherwise(
        engine, End, lambda message: [End(msgspec.structs.replace(message.trailer, **changes))]
    )


class _Babble:
    """Encodes every message as a byte that no MessagePack value begins with."""

    def encode(self, message: object) -> bytes:
        del message
        return b"\xc1"
