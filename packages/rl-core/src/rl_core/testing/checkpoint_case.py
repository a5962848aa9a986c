"""The processes that all tests of one backend share, and the groups made of them."""

import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from rl_core.channel import new_key
from rl_core.errors import MiniRLError
from rl_core.interfaces import CheckpointEngine, Handle, Launcher, Placement, TransferRole
from rl_core.plugins import load_object
from rl_core.testing.checkpoint_driver import find_backend
from rl_core.testing.checkpoint_group import Member, Terms, TransferGroup
from rl_core.testing.checkpoint_orders import Options
from rl_core.versions import PolicyVersion

DRIVER = "rl_core.testing.checkpoint_driver:CheckpointDriver"
START_S = 90.0
"""Seconds for a new process, or a new engine, on a busy machine."""

GRACE_S = 5.0
"""Seconds after a deadline within which a call must have ended."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds given to a sync that should succeed, and to one that should fail."""

    normal_s: float = 30.0
    fault_s: float = 4.0


class CheckpointCase:
    """Everything that the contract's tests of one backend share.

    Attributes:
        deadline_s: seconds for what is expected to succeed.
        fault_deadline_s: seconds for what is expected to fail.
        grace_s: seconds after a deadline within which a call must have ended.
        dirty: whether the last sync failed, so that the next test gets new engines.
        driver: `module:Class` of the object in the process of each rank.
    """

    driver: ClassVar[str] = DRIVER

    def __init__(
        self,
        backend: str,
        options: Options,
        launcher: Launcher,
        environment: Mapping[str, str],
        deadlines: Deadlines,
    ) -> None:
        self.deadline_s = deadlines.normal_s
        self.fault_deadline_s = deadlines.fault_s
        self.grace_s = GRACE_S
        self.dirty = False
        self.key = new_key()
        self.backend = backend
        self.options = options
        self._launcher = launcher
        self._environment = environment
        self._members: dict[str, Member] = {}
        self._steps = itertools.count(1)
        self._threads = ThreadPoolExecutor(4, "launch")
        self._spares: list[Future[Handle]] = []

    @property
    def engine_cls(self) -> type[CheckpointEngine]:
        """The class under test."""
        found: type[CheckpointEngine] = load_object(find_backend(self.backend).engine)
        return found

    def version(self) -> PolicyVersion:
        """One newer than all before."""
        return PolicyVersion(1, next(self._steps))

    def group(
        self, senders: int = 2, receivers: int = 2, terms: Terms | None = None
    ) -> TransferGroup:
        """A group in working order; members and engines of earlier tests are used again.

        Args:
            senders: number of sender ranks; rank 0 sends.
            receivers: number of receiver ranks.
            terms: what they agree on.
        """
        terms = terms or Terms(options=self.options)
        if self.dirty:
            for member in self._members.values():
                member.terms = None
        self.dirty = False
        names = [("sender", rank) for rank in range(senders)]
        names += [("receiver", rank) for rank in range(receivers)]
        missing = [name for name in names if self._gone(*name)]
        self._prelaunch(len(missing))
        group = TransferGroup([self._member(*name) for name in names], self)
        self.construct([member for member in group.members if member.terms != terms], terms)
        return group

    def construct(self, members: Iterable[Member], terms: Terms, key: bytes | None = None) -> None:
        """Give the members new engines."""
        pending = []
        for member in members:
            role = TransferRole(
                member.role,
                member.rank,
                key=self.key if key is None else key,
                run_id=terms.run_id,
                bucket_megabytes=terms.bucket_megabytes,
                digest_kind=terms.digest_kind,
            )
            member.terms = terms if key is None else None
            pending.append(member.handle.submit("construct", dict(terms.options), role))
        for construction in pending:
            construction.result(START_S)

    def stranger(self, role: str, rank: int) -> Member:
        """A further process that plays a rank, in no group yet; end it with `dismiss`."""
        self._prelaunch(1)
        return Member(role, rank, self._spares.pop(0).result(START_S))

    def dismiss(self, member: Member) -> None:
        """End a process."""
        member.lost = True
        member.handle.kill()

    def answers(self, member: Member) -> bool:
        """Whether the process of a member still answers."""
        try:
            member.handle.call("held", timeout=START_S)
        except (MiniRLError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        """End every process."""
        for member in self._members.values():
            member.handle.kill()
        for spare in self._spares:
            spare.result(START_S).kill()
        self._threads.shutdown()

    def _gone(self, role: str, rank: int) -> bool:
        member = self._members.get(f"{role} {rank}")
        return member is None or member.lost

    def _member(self, role: str, rank: int) -> Member:
        name = f"{role} {rank}"
        if self._gone(role, rank):
            old = self._members.get(name)
            if old is not None:
                old.handle.kill()
            self._members[name] = self.stranger(role, rank)
        return self._members[name]

    def _prelaunch(self, needed: int) -> None:
        # One more than needed, so that a rank that dies is replaced without waiting.
        while len(self._spares) < needed + 1:
            self._spares.append(self._threads.submit(self._launch))

    def _launch(self) -> Handle:
        kwargs = {"backend": self.backend}
        return self._launcher.launch(self.driver, kwargs, self._environment, Placement())
