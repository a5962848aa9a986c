"""Ranks of a chain as threads of the test, over the real TransferEngine."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_ckpt_mooncake.config import MooncakeConfig
from rl_ckpt_mooncake.engine import MooncakeCheckpointEngine
from rl_core.channel import new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import MiniRLError
from rl_core.interfaces import TransferRole
from rl_core.testing.property_tests import no_time_limits
from rl_core.testing.weight_set import WeightSet
from rl_core.versions import PolicyVersion

no_time_limits()

SECONDS = 30.0


class Chain:
    """A sender and receivers; each call in a thread of its rank."""

    def __init__(self, receivers: int):
        key, config = new_key(), MooncakeConfig(piece_megabytes=1 / 64, stall_timeout_s=5)
        roles = [("sender", 0), *(("receiver", rank) for rank in range(receivers))]
        self.engines = [
            MooncakeCheckpointEngine(config, TransferRole(*role, key=key, bucket_megabytes=1 / 16))
            for role in roles
        ]
        self.threads = ThreadPoolExecutor(len(roles))
        self.steps = itertools.count()

    @property
    def transports(self):
        return [engine._mover._transport for engine in self.engines]

    def stations(self):
        return [transport._station for transport in self.transports]

    def connect(self, seconds=SECONDS):
        ends = [engine.prepare() for engine in self.engines]
        places = MooncakeCheckpointEngine.build_topology(ends[:1], ends[1:])
        deadline = Deadline.after(seconds)
        list(
            self.threads.map(
                lambda pair: pair[0].build_process_group(pair[1], deadline),
                zip(self.engines, [places["sender"][0], *places["receiver"]], strict=True),
            )
        )

    def move(self, weights, consume=lambda rank, entries: None, seconds=SECONDS):
        """What each rank ended with: a report, tensors by name, or an error."""
        manifest = weights.manifest(PolicyVersion(1, next(self.steps)))
        call = manifest, Deadline.after(seconds), CancelToken()
        stream = iter(list(zip(weights.metas, weights.tensors.values(), strict=True)))
        pending = [self.threads.submit(self.engines[0].send_weights, stream, *call)]
        pending += [
            self.threads.submit(self._receive, rank, consume, call)
            for rank in range(1, len(self.engines))
        ]
        return [_ended(future) for future in pending]

    def sync(self, weights, **kwargs):
        self.connect()
        ok = False
        try:
            ends = self.move(weights, **kwargs)
            ok = not any(isinstance(end, Exception) for end in ends)
        finally:
            for engine in self.engines:
                engine.finalize(success=ok)
        return ends

    def shutdown(self):
        list(self.threads.map(lambda engine: engine.shutdown(), self.engines))
        self.threads.shutdown()

    def _receive(self, rank, consume, call):
        got = {}
        for lease in self.engines[rank].receive_weights(*call):
            with lease as entries:
                consume(rank, entries)
                got.update({entry.meta.name: entry.tensor.clone() for entry in entries})
        return got


def _ended(future):
    try:
        return future.result(SECONDS + 10)
    except MiniRLError as error:
        return error


@pytest.fixture(scope="module")
def chain():
    """Three receivers."""
    made = Chain(3)
    yield made
    made.shutdown()


@pytest.fixture
def weights():
    """Twelve buckets of 64 KiB or so, of four pieces each, and a tensor larger than a bucket."""
    tensors = {f"layer.{number}": torch.randn(5000 + 7 * number) for number in range(30)}
    return WeightSet({**tensors, "large": torch.randn(40_000), "empty": torch.zeros(0)})
