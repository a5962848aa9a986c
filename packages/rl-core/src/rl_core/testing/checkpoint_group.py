"""Groups of ranks under test, and how their syncs end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from rl_core.digests import XXH3_128
from rl_core.errors import MiniRLError, TransferError
from rl_core.interfaces import Endpoint, Handle, Place
from rl_core.testing.checkpoint_orders import Options, Received, ReceiveOrder, SendOrder, Sent
from rl_core.testing.checkpoint_recipe import RUN_ID, WeightSource
from rl_core.testing.checkpoint_samples import BUCKET_MEGABYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from rl_core.metadata import Manifest
    from rl_core.testing.checkpoint_case import CheckpointCase


@dataclass(frozen=True)
class Terms:
    """What all members of a group agree on.

    Attributes:
        bucket_megabytes: see `TransferRole`.
        digest_kind: see `TransferRole`.
        run_id: see `TransferRole`.
        options: the backend's own.
    """

    bucket_megabytes: float = BUCKET_MEGABYTES
    digest_kind: str | None = XXH3_128
    run_id: str = RUN_ID
    options: Options = field(default_factory=dict)


@dataclass
class Member:
    """One rank in a process of its own.

    Attributes:
        role: `sender` or `receiver`.
        rank: within its role.
        handle: its `CheckpointDriver`.
        terms: of the engine it holds; None if that is to be replaced.
        lost: whether the process died or did not answer in time.
    """

    role: str
    rank: int
    handle: Handle
    terms: Terms | None = None
    lost: bool = False

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass
class Outcome:
    """How a sync ended on every side; None for a rank that is gone.

    Attributes:
        manifest: what was announced.
        sent: by sender rank.
        received: by receiver rank.
        failed: errors of `build_process_group`, by member; the transfer was then
            not begun.
    """

    manifest: Manifest
    sent: dict[int, Sent | None] = field(default_factory=dict)
    received: dict[int, Received | None] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, Exception]:
        """Errors by member."""
        found = dict(self.failed)
        for role, ends in (("sender", self.sent), ("receiver", self.received)):
            for rank, end in cast("Mapping[int, Sent | Received | None]", ends).items():
                if end is None:
                    found[f"{role} {rank}"] = TransferError("the process is gone")
                elif end.error is not None:
                    found[f"{role} {rank}"] = end.error
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing failed anywhere."""
        return not self.errors


class TransferGroup:
    """Some members, and the syncs among them."""

    def __init__(self, members: Sequence[Member], case: CheckpointCase) -> None:
        self.members = list(members)
        self._case = case

    @property
    def senders(self) -> list[Member]:
        """In rank order."""
        return [member for member in self.members if member.role == "sender"]

    @property
    def receivers(self) -> list[Member]:
        """In rank order."""
        return [member for member in self.members if member.role == "receiver"]

    def without(self, *names: str) -> TransferGroup:
        """The group of the others, by name such as `receiver 1`."""
        kept = [member for member in self.members if str(member) not in names]
        return TransferGroup(kept, self._case)

    def survivors(self) -> TransferGroup:
        """The members whose processes still answer."""
        return TransferGroup([member for member in self.members if not member.lost], self._case)

    def member(self, name: str) -> Member:
        """By name, such as `sender 0`."""
        return next(member for member in self.members if str(member) == name)

    # -------------------------------------------------------------- steps of a sync

    def prepare(self) -> dict[str, Endpoint]:
        """`prepare` on every member; fails the test if one of them cannot."""
        prepared = self._all("prepare", lambda _: (), self._case.deadline_s)
        failed = {name: end for name, end in prepared.items() if not isinstance(end, Endpoint)}
        assert not failed, f"prepare failed: {failed}"
        return prepared

    def build(self, places: Mapping[str, Place], seconds: float) -> dict[str, Exception]:
        """`build_process_group` on every member; errors by member."""
        done = self._all("build", lambda member: (places[str(member)], seconds), seconds)
        return {name: error for name, error in done.items() if isinstance(error, Exception)}

    def places(self, endpoints: Mapping[str, Endpoint]) -> dict[str, Place]:
        """What `build_topology` says, by member."""
        topology = self._case.engine_cls.build_topology(
            [endpoints[str(member)] for member in self.senders],
            [endpoints[str(member)] for member in self.receivers],
        )
        places = {}
        for role, members in (("sender", self.senders), ("receiver", self.receivers)):
            for member, place in zip(members, topology[role], strict=True):
                places[str(member)] = place
        return places

    def connect(self, seconds: float | None = None) -> dict[str, Exception]:
        """`prepare` and `build_process_group`; errors by member."""
        return self.build(self.places(self.prepare()), seconds or self._case.deadline_s)

    def transfer(
        self,
        weights: WeightSource,
        manifest: Manifest,
        orders: Mapping[str, Mapping[str, Any]] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        """Send and receive on every member.

        Args:
            weights: what the senders' streams yield.
            manifest: what is announced on all sides.
            orders: changes of single members' orders, by member.
            deadline_s: for all members; the case's own without it.
        """
        pending = self.begin(weights, manifest, orders, deadline_s)
        return self.end(pending, manifest, deadline_s)

    def begin(
        self,
        weights: WeightSource,
        manifest: Manifest,
        orders: Mapping[str, Mapping[str, Any]] | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, Future[Any]]:
        """Start `transfer` without waiting for its end."""
        seconds = deadline_s or self._case.deadline_s
        pending = {}
        for member in self.members:
            changes = (orders or {}).get(str(member), {})
            order: SendOrder | ReceiveOrder
            if member.role == "sender":
                order = replace(SendOrder(weights, manifest, seconds), **changes)
                pending[str(member)] = member.handle.submit("send", order)
            else:
                order = replace(ReceiveOrder(manifest, seconds), **changes)
                pending[str(member)] = member.handle.submit("receive", order)
        return cast("dict[str, Future[Any]]", pending)

    def end(
        self,
        pending: Mapping[str, Future[Any]],
        manifest: Manifest,
        deadline_s: float | None = None,
    ) -> Outcome:
        """Wait for what `begin` started; fails the test if a member does not end in time."""
        seconds = deadline_s or self._case.deadline_s
        outcome = Outcome(manifest)
        for member in self.members:
            end = self._settled(member, pending[str(member)], seconds)
            ends = outcome.sent if member.role == "sender" else outcome.received
            ends[member.rank] = None if isinstance(end, Exception) else end
        return outcome

    def finalize(self, success: bool) -> dict[str, Exception]:
        """`finalize` on every member that is left; errors by member."""
        done = self.survivors()._all("finalize", lambda _: (success,), self._case.deadline_s)
        return {name: error for name, error in done.items() if isinstance(error, Exception)}

    def sync(
        self,
        weights: WeightSource,
        manifest: Manifest | None = None,
        orders: Mapping[str, Mapping[str, Any]] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        """A whole sync, as a manager runs it."""
        self._case.dirty = True
        manifest = manifest or weights.manifest(self._case.version())
        outcome = Outcome(manifest, failed=self.connect(deadline_s))
        if not outcome.failed:
            outcome = self.transfer(weights, manifest, orders, deadline_s)
        unclosed = self.finalize(outcome.ok)
        assert not unclosed, f"finalize raised: {unclosed}"
        self._case.dirty = not outcome.ok
        return outcome

    # -------------------------------------------------------------- calls

    def _all(
        self, method: str, arguments: Callable[[Member], tuple[Any, ...]], seconds: float
    ) -> dict[str, Any]:
        """Call a method on all members at once; results or errors by member."""
        pending = {
            str(member): member.handle.submit(method, *arguments(member)) for member in self.members
        }
        return {
            str(member): self._settled(member, pending[str(member)], seconds)
            for member in self.members
        }

    def _settled(self, member: Member, pending: Any, seconds: float) -> Any:
        try:
            return pending.result(seconds + self._case.grace_s)
        except MiniRLError as error:
            member.lost = member.lost or not self._case.answers(member)
            return error
        except TimeoutError:
            member.lost = True
            pytest.fail(f"{member} did not end within its deadline of {seconds:g} s")
