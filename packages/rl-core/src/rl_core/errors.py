"""The error tree of MiniRL.

```
MiniRLError
├── ConfigError (ValueError)              a setting is wrong; nothing was started
├── ComponentError (RuntimeError)         a plug-in or its library cannot be used
│   ├── ComponentNotFoundError (LookupError)   not installed: carries what to install
│   ├── ComponentLoadError (ImportError)       installed, but importing it failed
│   └── IncompatibleVersionError               installed in a version that we do not support
├── LifecycleError (RuntimeError)         a call in the wrong state or order
├── TrainError (RuntimeError)             the update of the policy failed
│   └── NonFiniteError (ArithmeticError)       a loss, gradient or weight is NaN or infinite
├── WeightSyncError (RuntimeError)        weights did not arrive
│   ├── TransferError (ConnectionError)        the transport failed or the peer went away
│   │   ├── TransferTimeoutError (TimeoutError)  a deadline passed
│   │   └── PeerLostError                        a connection broke: the peer knows why
│   ├── MessageError (ValueError)              a message was malformed, forged or out of order
│   ├── ManifestMismatchError (ValueError)     names, shapes, dtypes or counts differ
│   └── StaleVersionError (ValueError)         an older, repeated or foreign version
├── VerificationError (RuntimeError)      weights arrived, but are not the expected ones
│   └── DigestMismatchError                    carries the names of the tensors that differ
└── RolloutError (RuntimeError)           the rollout engine refused or failed a request
    └── ReplicaFencedError                     the replica answers nothing until it is synced
```

Every error also inherits the standard exception that it specialises, so that callers who know
nothing of MiniRL can still catch it. A message says what happened, to which tensor, rank or
version, and what to do. Foreign exceptions are translated once, at a package's edge, with
`raise ... from`.
"""

from collections.abc import Sequence
from typing import Self

from rl_core.tensor_counts import TensorCounts


def in_one_line(error: BaseException) -> str:
    """The first line of what an error says, with the next one if it only announces that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"{type(error).__name__} without a message"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class MiniRLError(Exception):
    """Base of every error that MiniRL raises on purpose.

    Attributes:
        counts: where a check of weights failed, the tensors that had been looked at until then.
        origin: the member that failed, such as `receiver 1`, where that is known: it said so of
            itself, or its connection broke; empty where this is only how somebody noticed.
    """

    counts: TensorCounts | None = None
    origin: str = ""

    def counting(self, counts: TensorCounts | None) -> Self:
        """This error, with counts added to those that it has."""
        if counts is not None:
            self.counts = counts | (self.counts or TensorCounts())
        return self

    def blaming(self, member: str) -> Self:
        """This error, with `member` as its origin unless it has one."""
        self.origin = self.origin or member
        return self


class ConfigError(MiniRLError, ValueError):
    """A setting is wrong. Raised before anything is started."""


class ComponentError(MiniRLError, RuntimeError):
    """A plug-in, or the library behind it, cannot be used."""


class ComponentNotFoundError(ComponentError, LookupError):
    """No such component is installed; the message names what to install."""


class ComponentLoadError(ComponentError, ImportError):
    """The component is installed, but importing it failed."""


class IncompatibleVersionError(ComponentError):
    """The component or its library has a version that is not supported."""


class LifecycleError(MiniRLError, RuntimeError):
    """A call was made in the wrong state or in the wrong order."""


class TrainError(MiniRLError, RuntimeError):
    """The policy could not be updated, scored or saved."""


class NonFiniteError(TrainError, ArithmeticError):
    """A loss, gradient or weight is NaN or infinite."""


class WeightSyncError(MiniRLError, RuntimeError):
    """Weights did not arrive where they should."""


class TransferError(WeightSyncError, ConnectionError):
    """The transport failed, or the peer went away."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A deadline passed while waiting for a peer."""


class PeerLostError(TransferError):
    """A connection broke. Seldom the cause: that is what the peer reports, or its death."""


class MessageError(WeightSyncError, ValueError):
    """A message was malformed, not authentic, or out of order."""


class ManifestMismatchError(WeightSyncError, ValueError):
    """Names, shapes, dtypes or counts differ from what was announced."""


class StaleVersionError(WeightSyncError, ValueError):
    """A version is older than, equal to, or foreign to the one already held."""


class VerificationError(MiniRLError, RuntimeError):
    """Weights arrived but could not be shown to be the right ones."""


class DigestMismatchError(VerificationError):
    """Contents differ from what was sent.

    Attributes:
        tensors: names of the tensors whose digests differ, in stream order.
    """

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)
        self.counts = TensorCounts(mismatched=len(self.tensors))

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]], dict[str, object]]:
        return type(self), (str(self), self.tensors), self.__dict__


class RolloutError(MiniRLError, RuntimeError):
    """The rollout engine refused or failed a request."""


class ReplicaFencedError(RolloutError):
    """The replica answers no request until a complete sync has been committed."""
