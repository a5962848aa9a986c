"""One process of the transfer benchmark: engines and baselines of one rank."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from bench_baselines import Baselines
from bench_weights import RUN_ID, SHAPES, Weights

from rl_core.deadlines import CancelToken, Deadline
from rl_core.digests import XXH3_128, check
from rl_core.interfaces import CheckpointEngine, Endpoint, LeasedTensor, TransferRole
from rl_core.metadata import TensorMeta
from rl_core.plugins import CHECKPOINT_ENGINES, build_config, load_backend, load_object
from rl_core.torch import as_bytes, content_digest

SECONDS = 120.0


class BenchRank(Baselines):
    """Rank 0 sends, the others receive into memory of their own."""

    def __init__(self, megabytes: int, bucket_megabytes: int, rank: int) -> None:
        torch.set_num_threads(1)
        self._bucket = bucket_megabytes
        self._engines: dict[tuple[str, str | None], CheckpointEngine] = {}
        data = torch.empty(megabytes << 20, dtype=torch.uint8)
        data.view(torch.int64).random_()
        weights = {shape: Weights(shape, data, bucket_megabytes) for shape in SHAPES}
        super().__init__(rank, bucket_megabytes << 20, weights)

    def free_port(self) -> int:
        """A port that nobody uses at the moment."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def construct(self, name: str, kind: str | None, key: bytes, options: dict[str, Any]) -> None:
        """Make an engine."""
        backend = load_backend(CHECKPOINT_ENGINES, name)
        role = TransferRole(
            "receiver" if self._rank else "sender",
            max(0, self._rank - 1),
            key=key,
            run_id=RUN_ID,
            bucket_megabytes=self._bucket,
            digest_kind=kind,
        )
        config = build_config(load_object(backend.config_cls), options, "options")
        self._engines[name, kind] = load_object(backend.engine)(config, role)

    def prepare(self, name: str, kind: str | None) -> Endpoint:
        """The engine's own."""
        return self._engines[name, kind].prepare()

    def build(self, name: str, kind: str | None, ends: list[Endpoint]) -> None:
        """The engine's own, with the topology of these endpoints."""
        engine = self._engines[name, kind]
        places = engine.build_topology(ends[:1], ends[1:])
        place = places["receiver"][self._rank - 1] if self._rank else places["sender"][0]
        engine.build_process_group(place, Deadline.after(SECONDS))

    def finalize(self, name: str, kind: str | None) -> None:
        """The engine's own."""
        self._engines[name, kind].finalize(success=True)

    def move(self, case: tuple[str, str, str], step: int) -> float:
        """One sync; when the first tensor was asked for, or when the last one was handed over."""
        what, mode, shape = case
        kind = XXH3_128 if mode == "verify" else None
        engine, weights = self._engines[what, kind], self._weights[shape]
        call = (weights.manifest(step), Deadline.after(SECONDS), CancelToken())
        if self._rank == 0:
            started: list[float] = []
            engine.send_weights(_stamped(iter(weights), started), *call)
            return started[0]
        position, handed_over = 0, 0.0
        for lease in engine.receive_weights(*call):
            with lease as entries:
                if mode != "lend":
                    position = self._take(entries, position)
                handed_over = time.monotonic()
        return handed_over

    def _take(self, entries: Any, position: int) -> int:
        for entry in entries:
            _verify(entry)
            data = as_bytes(entry.tensor)
            end = position + data.numel()
            self._data.numpy()[position:end] = data.numpy()
            position = end
        return position


def _verify(entry: LeasedTensor) -> None:
    if entry.digest is not None:
        check(entry.meta.name, entry.digest, content_digest(entry.meta, entry.tensor))


def _stamped(
    weights: Iterator[tuple[TensorMeta, torch.Tensor]], started: list[float]
) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    started.append(time.monotonic())
    yield from weights
