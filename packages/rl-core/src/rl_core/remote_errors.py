"""Errors that cross a process border: their kind and text, never a pickled exception."""

from collections.abc import Iterator

import msgspec

from rl_core.errors import DigestMismatchError, MiniRLError, TransferError
from rl_core.tensor_counts import TensorCounts


class RemoteError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of this project, as a peer is told it.

    Attributes:
        kind: name of a class in `rl_core.errors`.
        text: its message.
        tensors: names carried by a `DigestMismatchError`.
        counts: the error's, if it has some.
    """

    kind: str
    text: str
    tensors: tuple[str, ...] = ()
    counts: TensorCounts | None = None


def to_wire(error: BaseException, where: str = "") -> RemoteError:
    """`error` as a message; a foreign one becomes a `TransferError` that names its class.

    Args:
        error: what happened here.
        where: the side that it happened on, such as `receiver 1`; put before the text.
    """
    text = f"{where}: {error}" if where else str(error)
    if isinstance(error, DigestMismatchError):
        return RemoteError(DigestMismatchError.__name__, text, error.tensors, error.counts)
    known = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    if known:
        return RemoteError(known[0], text, counts=getattr(error, "counts", None))
    return RemoteError(TransferError.__name__, f"{text} ({type(error).__name__})")


def from_wire(message: RemoteError) -> MiniRLError:
    """The error that a peer reported; an unknown kind becomes a `TransferError`."""
    kind = _KINDS.get(message.kind, TransferError)
    if kind is DigestMismatchError:
        return DigestMismatchError(message.text, message.tensors).counting(message.counts)
    return kind(message.text).counting(message.counts)


def _tree(root: type[MiniRLError]) -> Iterator[type[MiniRLError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == MiniRLError.__module__:
            yield from _tree(child)


_KINDS = {kind.__name__: kind for kind in _tree(MiniRLError)}
