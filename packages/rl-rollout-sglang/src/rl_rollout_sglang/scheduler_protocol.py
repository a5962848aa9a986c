"""What the server and the engine's schedulers say to each other, beside SGLang's own messages.

SGLang can ring every scheduler at a well-defined point of its loop (`RpcReqInput`), but carries
neither lists nor results. It is the bell; the call itself and its result go over an authenticated
channel of ours, one for each rank.
"""

import msgspec

BELL = "rl_serve"
"""Name of the method that the extension adds to SGLang's `Scheduler`."""

SEGMENTS = "sglang_loads_|sgl_shm_mq_|psm_"
"""Names of the shared memory of SGLang's load reports and message queues, which it leaves."""


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """First message of a scheduler.

    Attributes:
        rank: its tensor-parallel rank.
        pid: its process.
        threads: its compute threads.
    """

    rank: int
    pid: int
    threads: int


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Call `method` of the scheduler extension with msgpack-encoded positional arguments."""

    number: int
    method: str
    arguments: bytes


class Answer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The msgpack-encoded result of command `number`, or what went wrong."""

    number: int
    value: bytes = b""
    failure: str | None = None
