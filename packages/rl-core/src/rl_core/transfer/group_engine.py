"""A checkpoint engine, but for the moving of weights: group, order of calls, versions, errors."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from rl_core.channel import Listener
from rl_core.deadlines import CancelToken
from rl_core.errors import (
    ConfigError,
    LifecycleError,
    MessageError,
    PeerLostError,
    StaleVersionError,
    WeightSyncError,
)
from rl_core.interfaces import CheckpointEngine, Endpoint, TransferReport
from rl_core.metadata import ManifestCheck
from rl_core.transfer.causes import known_cause
from rl_core.transfer.groups import RECEIVER, SENDER, group_name, star
from rl_core.transfer.lifecycle import Lifecycle, Stage
from rl_core.transfer.link import Link
from rl_core.transfer.messages import PROTOCOL, Join, Joined
from rl_core.transfer.peers import Peers
from rl_core.transfer.transport import TransportError
from rl_core.transfer.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_core.deadlines import Deadline
    from rl_core.interfaces import BucketLease, Place, TensorStream, TransferRole
    from rl_core.metadata import Manifest
    from rl_core.transfer.lending import Lending
    from rl_core.transfer.mover import Mover
    from rl_core.versions import PolicyVersion

logger = logging.getLogger(__name__)

KEY_BYTES = 16
"""Shortest key of a run that is accepted."""


class GroupEngine(CheckpointEngine):
    """Sender 0 and all receivers, connected by a control channel; further senders drain."""

    def __init__(self, role: TransferRole, mover: Mover) -> None:
        check_role(role)
        self._role = role
        self._mover = mover
        self._life = Lifecycle()
        self._abort = CancelToken()
        self._peers = Peers()
        self._link: Link | None = None
        self._listener: Listener | None = None
        self._endpoint: Endpoint | None = None
        self._place: Place | None = None
        self._leases: Iterator[BucketLease] | None = None
        self._moving: Manifest | None = None
        self._received: dict[str, PolicyVersion] = {}

    def prepare(self) -> Endpoint:
        """Open the control channel (senders). Buffers follow once the payload is known."""
        self._life.require("prepare", Stage.IDLE, Stage.PREPARED, Stage.CONNECTED)
        if self._endpoint is None:
            if self._role.role == SENDER:
                self._listener = Listener(self._role.host)
            address = self._listener.address if self._listener else ""
            properties = {"incarnation": secrets.token_hex(8), **self._mover.properties()}
            self._endpoint = Endpoint(self._role.role, self._role.rank, address, properties)
        if self._life.stage is Stage.IDLE:
            self._life.stage = Stage.PREPARED
        return self._endpoint

    @classmethod
    def build_topology(
        cls, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
    ) -> dict[str, list[Place]]:
        """Places by role: sender 0, then the receivers in order; see `rl_core.transfer.groups`."""
        return star(senders, receivers)

    def build_process_group(self, place: Place, deadline: Deadline) -> None:
        """Connect to the others; nothing to do if the members are those of the last sync."""
        self._life.require("build_process_group", Stage.PREPARED, Stage.CONNECTED)
        if place.rank >= 0 and place.endpoints[place.rank] != self._endpoint:
            msg = f"place {place.rank} of the group is not this {self._role.role}'s"
            raise LifecycleError(f"{msg}; build it from the endpoints that prepare returned last")
        watch = Watch(deadline, (self._abort,))
        if place.rank >= 0 and not self._stands(place, watch):
            self._leave()
            try:
                self._connect(place, watch)
            except BaseException as error:
                self.fail(error)
                raise
        self._place = place
        self._life.stage = Stage.CONNECTED

    def send_weights(
        self, weights: TensorStream, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> TransferReport:
        """Stream every tensor; returns once every receiver has handed over the last one."""
        try:
            self._require_role("send_weights", SENDER)
            report = self._send(weights, manifest, Watch(deadline, (cancel, self._abort)))
        except BaseException:
            _drain(weights)
            raise
        self._life.stage = Stage.MOVED
        return report

    def receive_weights(
        self, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> Iterator[BucketLease]:
        """Leases in stream order. Complete, on every receiver, when the iteration ends."""
        lending = self.start_receiving("receive_weights", manifest, Watch(deadline, (cancel,)))
        self._leases = self._lent(lending)
        return self._leases

    def start_receiving(self, call: str, manifest: Manifest, watch: Watch) -> Lending:
        """For `receive_weights` and its like: check the order of calls and the version.

        Args:
            call: its name, for messages.
            manifest: what is expected.
            watch: of the caller; aborts are added to it.
        """
        self._require_role(call, RECEIVER)
        link = self._link
        if link is None:
            raise LifecycleError(f"{call} without a group; call build_process_group first")
        self._life.stage = Stage.MOVING
        try:
            self._check_version(manifest)
        except StaleVersionError as error:
            self.fail(error)
            raise
        self._moving = manifest
        return self._mover.receive(manifest, link, watch.also(self._abort))

    def received(self) -> None:
        """What `start_receiving` began has ended well on all receivers."""
        self._life.stage = Stage.MOVED

    def abort(self, reason: str) -> None:
        """End the sync from another thread; the peers are told at once, by this thread.

        One that comes when the sync is over ends nothing, and not the next one either.
        """
        if self._life.stage is Stage.IDLE:
            return
        self._abort.cancel(reason)
        if self._life.stage in (Stage.CONNECTED, Stage.MOVING):
            self._report(LifecycleError(f"aborted: {reason}"))

    def finalize(self, success: bool) -> None:
        """Close this sync; the group is kept if it succeeded."""
        if self._life.stage is Stage.SHUT_DOWN:
            return
        if self._life.stage is Stage.MOVING:
            self._stop_receiving()
        success = success and self._life.stage is not Stage.FAILED
        self._mover.conclude(success=success)
        if not success:
            self._reset()
        elif self._life.stage is Stage.MOVED and self._moving is not None:
            self._received[self._moving.run_id] = self._moving.version
        self._leases = self._moving = None
        self._abort = CancelToken()
        self._life.stage = Stage.IDLE

    def shutdown(self) -> None:
        """Give back buffers, sockets and groups."""
        if self._life.stage is Stage.SHUT_DOWN:
            return
        self._life.stage = Stage.SHUT_DOWN
        self._reset()
        self._mover.close()

    def _require_role(self, call: str, role: str) -> None:
        if self._role.role != role:
            raise LifecycleError(f"{call} is not for a {self._role.role}")
        self._life.require(call, Stage.CONNECTED)

    def _stands(self, place: Place, watch: Watch) -> bool:
        """Whether the group of the last sync is this one, and nobody has left it meanwhile.

        Errors: what a member reports that has failed in this sync already.
        """
        if place != self._place:
            return False
        try:
            self._hear(watch)()
        except (PeerLostError, MessageError):
            return False
        except WeightSyncError as error:
            self.fail(error)
            raise
        return True

    def _connect(self, place: Place, watch: Watch) -> None:
        join = Join(PROTOCOL, self._role.run_id, place.rank, group_name(self._role.run_id, place))
        if self._listener is not None:
            self._peers.accept(self._listener, self._role.key, join, place, watch)
            properties = self._mover.offer(place, watch)
            self._peers.tell(Joined(properties), watch)
        else:
            self._link = Link.join(place.endpoints[0].address, self._role.key, join, watch)
            properties = self._link.expect(Joined, watch).properties
        try:
            self._mover.join(place, properties, watch.hearing(self._hear(watch)))
        except TransportError as error:
            raise known_cause(error, self._hear(watch)) from error

    def _send(self, weights: TensorStream, manifest: Manifest, watch: Watch) -> TransferReport:
        self._life.stage = Stage.MOVING
        try:
            self._check_run(manifest)
            if self._place is not None and self._place.rank < 0:
                return _drained(weights, manifest)
            return self._mover.send(weights, manifest, self._peers, watch)
        except BaseException as error:
            self.fail(error)
            raise

    def _lent(self, lending: Lending) -> Iterator[BucketLease]:
        yield from lending.leases(self.fail)
        self.received()

    def _check_run(self, manifest: Manifest) -> None:
        if self._role.run_id and manifest.run_id != self._role.run_id:
            msg = f"a manifest of run {manifest.run_id!r} in an engine of run {self._role.run_id!r}"
            raise StaleVersionError(msg)

    def _check_version(self, manifest: Manifest) -> None:
        self._check_run(manifest)
        last = self._received.get(manifest.run_id)
        if last is not None and manifest.version <= last:
            raise StaleVersionError(
                f"version {manifest.version} is not newer than {last}, held here"
            )

    def _stop_receiving(self) -> None:
        """Leave leases that its consumer left; one that another thread runs is an error."""
        if self._leases is None:
            self._life.require("finalize", Stage.IDLE)
        try:
            self._leases.close()  # type: ignore[union-attr]
        except ValueError as error:
            self.abort("finalized")
            raise LifecycleError(
                "finalize while another thread receives; it was aborted"
            ) from error
        self._life.stage = Stage.FAILED

    def fail(self, error: BaseException) -> None:
        """The sync has failed here: tell the peers and let go of the group."""
        self._life.stage = Stage.FAILED
        self._report(error)
        self._mover.leave()

    def _report(self, error: BaseException) -> None:
        where = f"{self._role.role} {self._role.rank}"
        self._peers.report(error, where)
        if self._link is not None:
            self._link.report(error, where)

    def _hear(self, watch: Watch) -> Callable[[], None]:
        """Reads what the others have said."""
        link = self._link
        return (
            (lambda: self._peers.pump(watch)) if link is None else lambda: link.pump(watch.deadline)
        )

    def _leave(self) -> None:
        self._mover.leave()
        self._peers.close()
        if self._link is not None:
            self._link.close()
        self._link = self._place = None

    def _reset(self) -> None:
        """Forget the group and the endpoint, so that every member builds anew."""
        self._leave()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._endpoint = None


def check_role(role: TransferRole) -> None:
    """ConfigError for a role that cannot work, or that would be open to everybody."""
    if role.role not in (SENDER, RECEIVER):
        raise ConfigError(f"role must be {SENDER!r} or {RECEIVER!r}, not {role.role!r}")
    if role.host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"host {role.host!r} is every interface; give the address of one")
    if len(role.key) < KEY_BYTES:
        msg = f"a run's key has at least {KEY_BYTES} bytes; rl_core.channel.new_key makes one"
        raise ConfigError(msg)


def _drained(weights: TensorStream, manifest: Manifest) -> TransferReport:
    """The part of a sender that takes no part in the bytes: each of its steps is a collective."""
    check = ManifestCheck(manifest)
    for meta, _ in weights:
        check.see(meta)
    check.close()
    return TransferReport(0, 0, {})


def _drain(weights: TensorStream) -> None:
    try:
        for _ in weights:
            pass
    except Exception:  # foreign code; the failure before it is the one to raise
        logger.warning("the stream of weights failed while it was drained", exc_info=True)
