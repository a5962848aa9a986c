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
        origin: the error's; the teller, for what happened to itself.
    """

    kind: str
    text: str
    tensors: tuple[str, ...] = ()
    counts: TensorCounts | None = None
    origin: str = ""


def to_wire(error: BaseException, where: str = "") -> RemoteError:
    """`error` as a message; a foreign one becomes a `TransferError` that names its class.

    Trouble with a transfer blames nobody: it is how each side notices what happened to the other.

    Args:
        error: what happened here.
        where: the side that it happened on, such as `receiver 1`; put before the text.
    """
    text = f"{where}: {error}" if where else str(error)
    own = "" if isinstance(error, TransferError) else where
    origin = getattr(error, "origin", "") or own
    if isinstance(error, DigestMismatchError):
        return RemoteError(DigestMismatchError.__name__, text, error.tensors, error.counts, origin)
    known = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    if known:
        counts = getattr(error, "counts", None)
        return RemoteError(known[0], text, counts=counts, origin=origin)
    return RemoteError(TransferError.__name__, f"{text} ({type(error).__name__})", origin=origin)


def from_wire(message: RemoteError) -> MiniRLError:
    """The error that a peer reported; an unknown kind becomes a `TransferError`."""
    kind = _KINDS.get(message.kind, TransferError)
    if kind is DigestMismatchError:
        error: MiniRLError = DigestMismatchError(message.text, message.tensors)
    else:
        error = kind(message.text)
    return error.counting(message.counts).blaming(message.origin)


def _tree(root: type[MiniRLError]) -> Iterator[type[MiniRLError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == MiniRLError.__module__:
            yield from _tree(child)


_KINDS = {kind.__name__: kind for kind in _tree(MiniRLError)}
