"""`minirl`, in which a member is killed at a chosen point of the second sync.

    python tools/dying_run.py MEMBER:POINT FILE [arguments of minirl]

Members: the ranks actor_0 (it sends) and actor_1 (it takes part in gathering), checkpoint_worker,
engine (the process of the engine's rank 0), server (that of the replica's server).

Points, for an actor rank, and for every member in fused mode:

    prepare   it is asked to prepare (fused: for its part of the sync)
    midway    the second tensor is about to be gathered
    end       the last tensor was handed over, no end was announced and none acknowledged
    loading   a moment later

For the others in separate mode:

    prepare   the checkpoint worker is asked to prepare
    midway    the second lease is about to be lent; a directory was found and not yet checked
    end       in the last lease, before its acknowledgement; a directory was checked and nobody told
    loading   a moment after the last lease came back, or the engine was told to load a directory

So that the last point comes before the replica has loaded, or has said so, however fast it is, its
load takes half a second longer there. The time of the death goes into FILE, that at which the sync
was published all the same, if it was, into FILE.published.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from minirl import system, weight_sync
from minirl.main import run
from minirl.sync_log import tell_finished
from minirl.sync_record import SyncRecord
from rl_core.interfaces import (
    BucketLease,
    Handle,
    LoadReport,
    RankPlace,
    SupportsCheckpointPath,
    TensorStream,
)
from rl_core.metadata import Manifest

MEMBER, POINT = sys.argv.pop(1).split(":")
FILE = str(Path(sys.argv.pop(1)).resolve())
FUSED = "config=separate" not in sys.argv
ACTORS = ("actor_0", "actor_1")
FATAL_RANK = 1 if MEMBER == "actor_1" else 0
FATAL_SYNC = 2
LATER_S, LONGER_S = 0.02, 0.5
CALL_S = 20


class _Mortal:
    """Mixed into workers. This module is `__main__`: Ray ships it by value."""

    _syncs = 0

    def init_rollout(
        self, backend: str, config: Mapping[str, Any], server: Handle, tp_rank: int
    ) -> None:
        """Find the processes of the replica, too."""
        super().init_rollout(backend, config, server, tp_rank)
        state = server.call("live_state", timeout=CALL_S)
        self._pids = {"engine": state["workers"][tp_rank]["pid"], "server": state["pid"]}
        if POINT == "loading":
            for name in ("update_weights", "update_weights_from_disk"):
                setattr(self._adapter, name, _longer(getattr(self._adapter, name)))

    def begin(self) -> None:
        """Another sync."""
        self._syncs += 1
        self.reach("prepare")

    def reach(self, point: str) -> None:
        """Kill what is to be killed here, if this is the sync and the point."""
        if point == POINT and self._syncs == FATAL_SYNC:
            Path(FILE).write_text(str(time.time()))
            own = MEMBER not in ("engine", "server")
            os.kill(os.getpid() if own else self._pids[MEMBER], signal.SIGKILL)

    def reach_later(self) -> None:
        """The last point, in a moment."""
        threading.Timer(LATER_S, self.reach, ["loading"]).start()


def _longer(load: Callable[..., LoadReport]) -> Callable[..., LoadReport]:
    def loading(*arguments: Any) -> LoadReport:
        report = load(*arguments)
        time.sleep(LONGER_S)
        return report

    return loading


class MortalCheckpointWorker(_Mortal, system.CheckpointWorker):
    """Kills itself or its replica."""

    def prepare_transfer(self) -> Any:
        """As always."""
        if MEMBER not in ACTORS:
            self.begin()
        return super().prepare_transfer()

    def receive_weights(self, manifest: Manifest, seconds: float) -> LoadReport | None:
        """With the points in its way: of leases, or of a directory."""
        if MEMBER in ACTORS:
            return super().receive_weights(manifest, seconds)
        if isinstance(self.transfer, SupportsCheckpointPath):
            return self._receive_directory(manifest, seconds)
        load = self._adapter.update_weights

        def loading(leases: Iterator[BucketLease], *rest: Any) -> LoadReport:
            return load(self._counted(leases, len(manifest.tensors)), *rest)

        with patch.object(self._adapter, "update_weights", loading):
            return super().receive_weights(manifest, seconds)

    def _counted(self, leases: Iterator[BucketLease], tensors: int) -> Iterator[BucketLease]:
        for number, lease in enumerate(leases):
            if number == 1:
                self.reach("midway")
            tensors -= len(lease.entries)
            if tensors == 0:
                lease.on_exit = self._before(lease.on_exit)
            yield lease
        self.reach_later()

    def _before(self, on_exit: Callable[[], None]) -> Callable[[], None]:
        def reach_and_exit() -> None:
            self.reach("end")
            on_exit()

        return reach_and_exit

    def _receive_directory(self, manifest: Manifest, seconds: float) -> LoadReport | None:
        from rl_ckpt_disk.checkpoint import Checkpoint

        load, check = self._adapter.update_weights_from_disk, Checkpoint.check

        def checking(checkpoint: Checkpoint, *arguments: Any) -> None:
            self.reach("midway")
            check(checkpoint, *arguments)
            self.reach("end")

        def loading(*arguments: Any) -> LoadReport:
            self.reach_later()
            return load(*arguments)

        with (
            patch.object(Checkpoint, "check", checking),
            patch.object(self._adapter, "update_weights_from_disk", loading),
        ):
            return super().receive_weights(manifest, seconds)


class _MortalActor(_Mortal):
    """Kills its rank or, where it feeds the engine, the replica."""

    def init_model(self, backend: str, config: Mapping[str, Any], place: RankPlace) -> None:
        """The rank that kills has the points in its stream."""
        super().init_model(backend, config, place)
        self._fatal = place.rank == FATAL_RANK and (FUSED or MEMBER in ACTORS)
        stream = self._engine.get_per_tensor_param
        if self._fatal:
            self._engine.get_per_tensor_param = lambda: self._counted(stream())

    def _counted(self, stream: TensorStream) -> TensorStream:
        for number, item in enumerate(stream):
            if number == 1:
                self.reach("midway")
            yield item
        self.reach("end")
        self.reach_later()


class MortalActor(_MortalActor, system.ActorWorker):
    """An actor rank of separate mode."""

    def prepare_transfer(self) -> Any:
        """As always."""
        if self._fatal:
            self.begin()
        return super().prepare_transfer()


class MortalFusedWorker(_MortalActor, system.FusedActorRolloutWorker):
    """An actor rank of fused mode."""

    def sync_weights(self, *arguments: Any) -> Any:
        """As always."""
        if self._fatal:
            self.begin()
        return super().sync_weights(*arguments)


def _tell_finished(record: SyncRecord) -> None:
    if record.sync_index == FATAL_SYNC:
        Path(f"{FILE}.published").write_text(str(time.time()))
    tell_finished(record)


weight_sync.tell_finished = _tell_finished
system.CheckpointWorker = MortalCheckpointWorker
system.ActorWorker = MortalActor
system.FusedActorRolloutWorker = MortalFusedWorker

if __name__ == "__main__":
    run()
