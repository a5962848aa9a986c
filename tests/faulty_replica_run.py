"""`minirl`, in which replica 1 has a fault at a chosen step of the second publish.

    python tests/faulty_replica_run.py POINT [arguments of minirl]

`POINTS` says which there are. Meant for separate mode with two replicas of vLLM or SGLang, of one
rank or more: what happens at a rank then happens at the last one of the replica.
"""

import os
import signal
import sys
import threading
from dataclasses import replace

from minirl import system
from minirl.main import run
from minirl.rollout_manager import RolloutManager
from minirl.trainer import Trainer
from rl_core.errors import ManifestMismatchError, RolloutError

POINTS = {
    "prepare": "the checkpoint worker dies before it prepares",
    "connect": "the checkpoint worker dies before it connects",
    "midway": "the checkpoint worker dies after the first tensors",
    "end": "the checkpoint worker dies when all is handed over",
    "engine-midway": "the engine dies after the first tensors",
    "engine-end": "the engine dies when all is handed over",
    "server-midway": "the server dies after the first tensors",
    "load": "loading is refused after the first tensors",
    "damage": "a byte changes on the way from the transfer to the engine",
    "flip": "a bit changes in the engine after the load",
    "engine-verify": "the engine dies before it is looked into",
    "engine-commit": "the engine dies before the commit",
    "lost-commit": "the answer to the commit is lost",
    "closing": "the checkpoint worker dies after the commit",
    "generate": "the engine dies while it generates",
    "trainer": "the trainer fails after the first tensors: no replica's fault",
    "hang": "the engine stops while it generates, and its processes stay",
}
POINT = sys.argv.pop(1) if __name__ == "__main__" else ""
VICTIM, FATAL_SYNC, FATAL_STEP = 1, 2, 2
LATER_S = 0.1
FLIPPED = "model.layers.1.self_attn.qkv_proj.weight"
CALL_S = 30
FLIP = {"vllm": "rl_flip", "sglang": "flip"}


class FaultyCheckpointWorker(system.CheckpointWorker):
    """This module is `__main__`: Ray ships it by value."""

    _syncs = 0

    def init_rollout(self, backend, config, server, tp_rank):
        super().init_rollout(backend, config, server, tp_rank)
        state = server.call("live_state", timeout=CALL_S)
        self._pids = {"engine": state["workers"][-1]["pid"], "server": state["pid"]}
        tp_size = len(state["workers"])
        self._is_victim = self._rank == (VICTIM + 1) * tp_size - 1

    @property
    def fatal(self):
        return self._is_victim and self._syncs == FATAL_SYNC

    def reach(self, point):
        if not self.fatal:
            return
        who, _, where = POINT.rpartition("-")
        if where == point:
            os.kill(self._pids.get(who, os.getpid()), signal.SIGKILL)
        if point == "midway" and POINT == "load":
            raise ManifestMismatchError("the engine was told to refuse this")

    def prepare_transfer(self):
        self._syncs += 1
        self.reach("prepare")
        return super().prepare_transfer()

    def connect_transfer(self, place, seconds):
        self.reach("connect")
        super().connect_transfer(place, seconds)

    def receive_weights(self, manifest, seconds):
        adapter = self._adapter
        load = type(adapter).update_weights
        adapter.update_weights = lambda leases, *rest: load(adapter, self.passing(leases), *rest)
        return super().receive_weights(manifest, seconds)

    def passing(self, leases):
        for number, lease in enumerate(leases):
            if number == 1:
                self.reach("midway")
            if POINT == "damage" and self.fatal:
                lease.entries = [damaged(lease.entries[0]), *lease.entries[1:]]
            yield lease
        self.reach("end")

    def finalize_transfer(self, success):
        if success:
            self.reach("closing")
        super().finalize_transfer(success)


class FaultyActorWorker(system.ActorWorker):
    _syncs = 0

    def send_weights(self, manifest, seconds, live):
        self._syncs += 1
        gather = self._engine.get_per_tensor_param
        if POINT == "trainer" and self._syncs == FATAL_SYNC:
            self._engine.get_per_tensor_param = lambda: failing(gather())
        try:
            return super().send_weights(manifest, seconds, live)
        finally:
            self._engine.get_per_tensor_param = gather


def failing(stream):
    yield next(stream)
    for _ in stream:  # gathering is collective
        pass
    raise RolloutError("the trainer was told to fail")


def damaged(entry):
    import torch

    tensor = entry.tensor.clone()
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return replace(entry, tensor=tensor)


class Harm:
    """What the controller does to the victim."""

    def __init__(self, manager):
        self.manager = manager
        self.version = None

    @property
    def server(self):
        return self.manager._replicas[VICTIM].server

    def fatal(self, replica=VICTIM):
        return replica == VICTIM and str(self.version) == "e1.s1" and not self.manager.given_up

    def kill_engine(self, number=signal.SIGKILL):
        state = self.server.call("live_state", timeout=CALL_S)
        os.kill(state["workers"][-1]["pid"], number)

    def stop_engine(self):
        self.kill_engine(signal.SIGSTOP)

    def begin(self, version, replicas):
        self.version = version
        RolloutManager.begin(self.manager, version, replicas)

    def live_digests(self, replica, timeout_s):
        if self.fatal(replica) and POINT == "flip":
            flip = FLIP[self.manager.name], self.manager.tp_size - 1, FLIPPED, 0.5
            self.server.call("worker_call", *flip, timeout=CALL_S)
        if self.fatal(replica) and POINT == "engine-verify":
            self.kill_engine()
        return RolloutManager.live_digests(self.manager, replica, timeout_s)

    def commit(self, version, timeout_s):
        if self.fatal() and POINT == "engine-commit":
            self.kill_engine()
        if self.fatal() and POINT == "lost-commit":
            leader = self.manager._leaders[VICTIM]
            leader.commit = self.lost
        RolloutManager.commit(self.manager, version, timeout_s)

    def lost(self, version, timeout):
        leader = self.manager._leaders[VICTIM]
        type(leader).commit(leader, version, timeout)
        raise RolloutError("the rollout server did not answer 'commit'")


_step, _fit = Trainer._step, Trainer.fit


def _step_with_a_death(self, step):
    if POINT in ("generate", "hang") and step == FATAL_STEP:
        harm = Harm(self._system.rollout)
        harming = harm.kill_engine if POINT == "generate" else harm.stop_engine
        threading.Timer(LATER_S, harming).start()
    _step(self, step)


def _fit_with_harm(self):
    rollout = self._system.rollout
    harm = Harm(rollout)
    rollout.begin, rollout.commit = harm.begin, harm.commit
    rollout.live_digests = harm.live_digests
    _fit(self)


if __name__ == "__main__":
    system.CheckpointWorker = FaultyCheckpointWorker
    system.ActorWorker = FaultyActorWorker
    Trainer._step, Trainer.fit = _step_with_a_death, _fit_with_harm
    run()
