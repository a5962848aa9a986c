"""Messages between a `ProcessHandle` and the process it stands for.

Arguments and results are pickled, but only inside messages of an `rl_core.channel`: they are
unpickled after their HMAC was checked with a key that only this launcher's processes hold. Good
enough for test doubles on one host, and used nowhere else.
"""

import pickle
from typing import Any, TypeAlias

import msgspec

from rl_core.errors import MiniRLError


class RemoteError(MiniRLError, RuntimeError):
    """An exception of another process that could not be rebuilt here; its text is kept."""


class HostSpec(msgspec.Struct, frozen=True):
    """What a new process is told through its stdin.

    Attributes:
        key: key of its channel.
        cls: `module:Class` of the object to create.
        kwargs: pickled keyword arguments.
        import_path: the launcher's `sys.path`, so that the same modules are found.
    """

    key: bytes
    cls: str
    kwargs: bytes
    import_path: list[str]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call `method` with the pickled `(args, kwargs)`."""

    number: int
    method: str
    arguments: bytes


class Result(msgspec.Struct, frozen=True, tag=True):
    """The pickled value that call `number` returned."""

    number: int
    value: bytes


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Call `number` raised: the exception pickled (empty if it does not pickle), and as text."""

    number: int
    error: bytes
    text: str


Reply: TypeAlias = Result | Failure


def pack(value: Any) -> bytes:
    """Pickled `value`."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; only for data out of an authenticated message."""
    return pickle.loads(data)  # noqa: S301 - authenticated by the channel, see above


def failure(number: int, error: BaseException) -> Failure:
    """`error` as a message."""
    text = f"{type(error).__name__}: {error}"
    try:
        data = pack(error)
        unpack(data)
    except Exception:  # noqa: BLE001 - pickling runs foreign code; the text is kept instead
        data = b""
    return Failure(number, data, text)


def rebuilt(message: Failure) -> BaseException:
    """The exception that a failure stands for, or a RemoteError with its text."""
    if not message.error:
        return RemoteError(message.text)
    try:
        error = unpack(message.error)
    except Exception:  # noqa: BLE001 - its class may not be importable here
        return RemoteError(message.text)
    return error if isinstance(error, BaseException) else RemoteError(message.text)
