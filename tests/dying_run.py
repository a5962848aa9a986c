"""`minirl`, in which a member is killed at a chosen point of the second sync.

    python tests/dying_run.py MEMBER:POINT FILE [arguments of minirl]

Members: actor, checkpoint_worker, engine. Points: prepare, midway (after the first tensors), end
(everything is handed over, nothing acknowledged), loading (a moment later). The time of the death
goes into FILE.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from minirl import system
from minirl.main import run

MEMBER, POINT = sys.argv.pop(1).split(":")
FILE = str(Path(sys.argv.pop(1)).resolve())
FUSED = "config=separate" not in sys.argv
FATAL_SYNC = 2
LATER_S = 0.02


def _die(pid):
    Path(FILE).write_text(str(time.time()))
    os.kill(pid, signal.SIGKILL)


class _Mortal:
    """Mixed into workers. This module is `__main__`: Ray ships it by value."""

    _syncs = 0

    def init_rollout(self, backend, config, server, tp_rank):
        super().init_rollout(backend, config, server, tp_rank)
        state = server.call("live_state", timeout=20)
        self._engine_pid = state["workers"][tp_rank]["pid"]

    def reach(self, point):
        """Kill what is to be killed here, if this is the sync and the point."""
        if point == POINT and self._syncs == FATAL_SYNC:
            _die(self._engine_pid if MEMBER == "engine" else os.getpid())

    def begin(self):
        self._syncs += 1
        self.reach("prepare")

    def count(self, items):
        for number, item in enumerate(items):
            if number == 1:
                self.reach("midway")
            yield item
        self.reach("end")
        if POINT == "loading":
            threading.Timer(LATER_S, self.reach, ["loading"]).start()


class MortalCheckpointWorker(_Mortal, system.CheckpointWorker):
    def prepare_transfer(self):
        if MEMBER != "actor":
            self.begin()
        return super().prepare_transfer()

    def receive_weights(self, manifest, seconds):
        if MEMBER != "actor":
            adapter, load = self._adapter, self._adapter.update_weights
            adapter.update_weights = lambda leases, *rest: load(self.count(leases), *rest)
            if hasattr(self.transfer, "get_checkpoint_path"):
                return self._receive_directory(manifest, seconds)
        return super().receive_weights(manifest, seconds)

    def _receive_directory(self, manifest, seconds):
        load, find = self._adapter.update_weights_from_disk, self.transfer.get_checkpoint_path
        points = self.count(iter(["asked", "found"]))
        next(points)

        def finding(*arguments):
            found = find(*arguments)
            next(points)
            return found

        def loading(*arguments):
            next(points, None)
            return load(*arguments)

        self.transfer.get_checkpoint_path = finding
        self._adapter.update_weights_from_disk = loading
        try:
            return super().receive_weights(manifest, seconds)
        finally:
            self.transfer.get_checkpoint_path = find
            self._adapter.update_weights_from_disk = load


class _MortalActor(_Mortal):
    def init_model(self, backend, config, place):
        super().init_model(backend, config, place)
        self._fatal = place.rank == 0
        stream = self._engine.get_per_tensor_param
        if self._fatal and (MEMBER == "actor" or FUSED):
            self._engine.get_per_tensor_param = lambda: self.count(stream())


class MortalActor(_MortalActor, system.ActorWorker):
    def prepare_transfer(self):
        if MEMBER == "actor" and self._fatal:
            self.begin()
        return super().prepare_transfer()


class MortalFusedWorker(_MortalActor, system.FusedActorRolloutWorker):
    def sync_weights(self, *arguments):
        if self._fatal:
            self.begin()
        return super().sync_weights(*arguments)


system.CheckpointWorker = MortalCheckpointWorker
system.ActorWorker = MortalActor
system.FusedActorRolloutWorker = MortalFusedWorker

if __name__ == "__main__":
    run()
