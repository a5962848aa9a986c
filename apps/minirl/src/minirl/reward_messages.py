"""What travels between the run and the process that computes rewards."""

from typing import Any

import msgspec


class Target(msgspec.Struct, frozen=True, tag=True):
    """The function to load: from a file, or from the factory of a module.

    Attributes:
        name: of the function (`path` given) or of its factory (`module` given).
        path: absolute path of a Python file.
        module: importable module; its `name` is called with `arguments` and returns the function.
        arguments: keyword arguments of the factory.
    """

    name: str
    path: str | None = None
    module: str | None = None
    arguments: dict[str, Any] = {}


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The function is there.

    Attributes:
        parameters: arguments that it takes by name.
        required: those of them without a default.
        takes_any: whether it takes any keyword argument (`**kwargs`).
    """

    parameters: list[str]
    required: list[str]
    takes_any: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The function could not be loaded.

    Attributes:
        error: one line.
        functions: names of the functions that the file defines.
    """

    error: str
    functions: list[str]


class Part(msgspec.Struct, frozen=True, tag=True):
    """A piece of a batch that is larger than one message may be."""

    data: bytes


class Batch(msgspec.Struct, frozen=True, tag=True):
    """One call.

    Attributes:
        data: keyword arguments in msgpack, after those of the `Part`s sent before.
        limit_s: after this time the process ends itself.
    """

    data: bytes
    limit_s: float


class Rewards(msgspec.Struct, frozen=True, tag=True):
    """What the function returned: numbers, None, or the `repr` of what is neither."""

    values: list[float | str | None]


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised, or returned no list; one line says what and where."""

    error: str


ToWorker = Target | Part | Batch
FromWorker = Loaded | Refused | Rewards | Raised
