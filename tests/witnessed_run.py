"""`minirl`, with questions to the running system at its end; the answers are in served.json.

1. What does the engine serve? (the witnesses' questions)
2. What if a byte changes on the way, between packing and loading? The sync must fail, no request
   may be answered after it, and a following sync must bring everything in order again.
3. What if a bit of the engine's own weights flips after they were loaded, before they are served?
   The same.
4. Where one replica is enough at first: does one that comes late serve what is published?
5. With `--abort-a-member=true`: what if native code ends one in the middle of a sync? That ends the
   run.
"""

import ctypes
import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from witnesses import ABORT, FLIPPED, ONE_AT_FIRST, SERVED, requests

from minirl import system
from minirl.main import run
from minirl.trainer import Trainer
from rl_core.errors import MiniRLError, ReplicaFencedError
from rl_core.versions import PolicyVersion

ABORTING = ABORT in sys.argv
if ABORTING:
    sys.argv.remove(ABORT)


class _Tampering:
    """Mixed into workers that feed an engine. This module is `__main__`: Ray ships it by value."""

    def tamper_once(self):
        """Change one byte of what the next sync brings here."""
        if "Disk" in type(getattr(self, "_transfer", None)).__name__:
            self._tamper_with_file()
            return
        adapter, update_weights = self._adapter, self._adapter.update_weights

        def tampering(leases, manifest, deadline):
            adapter.update_weights = update_weights
            return update_weights(self._with_a_flipped_byte(leases), manifest, deadline)

        adapter.update_weights = tampering

    def abort_once(self):
        """In the next sync the C library finds that memory is freed which was never allocated."""
        update_weights = self._adapter.update_weights

        def aborting(leases, manifest, deadline):
            return update_weights(self._then_none(leases), manifest, deadline)

        self._adapter.update_weights = aborting

    def _then_none(self, leases):
        for lease in leases:
            yield lease
            inside = ctypes.addressof(ctypes.create_string_buffer(64)) + 24
            ctypes.CDLL(None).free(ctypes.c_void_p(inside))

    def tampered_tensor(self):
        """Name of the tensor that was changed here."""
        return self._changed

    def _with_a_flipped_byte(self, leases):
        import torch

        for number, lease in enumerate(leases):
            if number == 0:
                *others, last = lease.entries
                changed = last.tensor.clone()
                changed.view(-1).view(torch.uint8)[3] ^= 1
                lease.entries = [*others, dataclasses.replace(last, tensor=changed)]
                self._changed = last.meta.name
            yield lease

    def _tamper_with_file(self):
        """The file changes after the receiver has looked at it, before it reads the tensors."""
        from rl_ckpt_disk.checkpoint import Checkpoint

        check = Checkpoint.check

        def tampering(checkpoint, *arguments):
            Checkpoint.check = check
            check(checkpoint, *arguments)
            file = next(checkpoint.path.glob("*.safetensors"))
            content = file.read_bytes()
            with file.open("r+b") as opened:  # one byte: others are reading the file meanwhile
                opened.seek(-1, os.SEEK_END)
                opened.write(bytes([content[-1] ^ 1]))
            self._changed = _last_tensor(content)

        Checkpoint.check = tampering


def _last_tensor(content):
    """Name of the tensor that a file in the safetensors format ends with."""
    length = int.from_bytes(content[:8], "little")
    places = json.loads(content[8 : 8 + length])
    places.pop("__metadata__", None)
    return max(places, key=lambda name: places[name]["data_offsets"][1])


class TamperingCheckpointWorker(_Tampering, system.CheckpointWorker):
    """In separate mode."""


class TamperingFusedWorker(_Tampering, system.FusedActorRolloutWorker):
    """In fused mode."""


system.CheckpointWorker = TamperingCheckpointWorker
system.FusedActorRolloutWorker = TamperingFusedWorker


def answers(trainer):
    completions = trainer._system.rollout.generate(requests())
    return [(completion.token_ids, completion.log_probs) for completion in completions]


def feeders(trainer):
    """The workers that feed the engine."""
    return getattr(trainer._system, "_receivers", trainer._system.workers)


def tampered_sync(trainer, version):
    """How a sync with a changed byte ends, and what a request gets after it."""
    feeding = feeders(trainer)
    feeding.call_rank(0, "tamper_once", timeout_s=20)
    found = failed_sync(trainer, version)
    return found | {"tensor": feeding.call_rank(0, "tampered_tensor", timeout_s=20)}


def flipped_sync(trainer, version):
    """The same, with one bit flipped in the engine between loading and looking."""
    rollout = trainer._system.rollout
    rank = rollout.tp_size - 1

    def flipping(replica, timeout_s):
        del rollout.live_digests  # that of the class again
        flip = {"vllm": "rl_flip", "sglang": "flip"}[rollout.name]
        server = rollout._replicas[replica].server
        server.call("worker_call", flip, rank, FLIPPED, 0.5, timeout=timeout_s)
        return rollout.live_digests(replica, timeout_s)

    rollout.live_digests = flipping
    return failed_sync(trainer, version) | {"rank": rank}


def failed_sync(trainer, version):
    """The error that ends a sync, and what a request gets after it."""
    found = {"error": None, "refusal": None}
    try:
        trainer._system.weight_sync.sync(version, "trained")
    except MiniRLError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    try:
        answers(trainer)
    except ReplicaFencedError as error:
        found["refusal"] = str(error)
    return found


_fit = Trainer.fit


def _fit_and_ask(self):
    _fit(self)
    pools = {"actor": self._system._actor_pool, "rollout": self._system._rollout_pool}
    nodes = {name: [bundle.node_id for bundle in pool.bundles] for name, pool in pools.items()}
    found = {"nodes": nodes, "served": answers(self)}
    sync = self._system.weight_sync
    sync.perturbation = None
    step = PolicyVersion.parse(sync.records[-1].version).step
    found["tampered"] = tampered_sync(self, PolicyVersion(1, step + 1))
    found["flipped"] = flipped_sync(self, PolicyVersion(1, step + 2))
    sync.sync(PolicyVersion(1, step + 3), "trained")
    found["repaired"] = answers(self)
    (self._output.path / SERVED).write_text(json.dumps(found))
    if ABORTING:
        feeders(self).call_rank(0, "abort_once", timeout_s=20)
        sync.sync(PolicyVersion(1, step + 4), "trained")


Trainer.fit = _fit_and_ask

if __name__ == "__main__":
    if ONE_AT_FIRST in sys.argv:
        import late_replica

        late_replica.install()
    run()
