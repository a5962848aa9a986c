"""Which calls of a checkpoint engine may follow each other."""

from enum import StrEnum

from rl_core.errors import LifecycleError


class Stage(StrEnum):
    """Where an engine is within a sync."""

    IDLE = "idle"
    PREPARED = "prepared"
    CONNECTED = "connected"
    MOVING = "moving"
    MOVED = "moved"
    FAILED = "failed"
    SHUT_DOWN = "shut down"


_REMEDIES = {
    Stage.IDLE: "call prepare first",
    Stage.PREPARED: "call build_process_group first",
    Stage.CONNECTED: "send or receive, or finalize",
    Stage.MOVING: "a version is being moved; abort it, or let it end, then finalize",
    Stage.MOVED: "finalize first",
    Stage.FAILED: "the sync failed; finalize first",
    Stage.SHUT_DOWN: "make a new engine",
}


class Lifecycle:
    """The stage of one engine.

    Attributes:
        stage: the current one.
    """

    def __init__(self) -> None:
        self.stage = Stage.IDLE

    def require(self, call: str, *allowed: Stage) -> None:
        """LifecycleError saying what to do, unless the stage is one of `allowed`."""
        if self.stage not in allowed:
            raise LifecycleError(f"{call} while {self.stage}: {_REMEDIES[self.stage]}")
