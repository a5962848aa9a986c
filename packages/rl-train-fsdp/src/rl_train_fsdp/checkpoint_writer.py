"""Writes training checkpoints behind the training: the copies are made first, files come later."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from rl_core.errors import LifecycleError, TrainError, TransferTimeoutError, in_one_line
from rl_train_fsdp import staging
from rl_train_fsdp.process_group import collective

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup as TorchGroup

    from rl_train_fsdp.checkpoint import TrainState
    from rl_train_fsdp.process_group import ProcessGroup

_ENDS_S = 5.0
"""How long `abandon` waits for what is being written."""


class CheckpointWriter:
    """One checkpoint at a time, in a thread of its own, on every rank.

    The thread coordinates with those of the other ranks over a process group of its own: it must
    not get between the collectives of the training.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._side: TorchGroup | None = None
        self._under_way: tuple[Path, Future[None]] | None = None

    def begin(self, path: Path, tensors: Mapping[str, Tensor], state: TrainState) -> None:
        """Begin to write `path`; return once nothing of the training is needed for it. Collective.

        Args:
            path: appears when it is complete; one that exists is replaced.
            tensors: this rank's, by name; copied to host memory.
            state: what is not a tensor.

        Errors: LifecycleError while another one is under way, TrainError on every rank if `path`
        cannot be created.
        """
        if self._under_way is not None:
            msg = f"{self._under_way[0]} is still being written; finish it before {path}"
            raise LifecycleError(msg)
        self._group.on_main(f"creating {path}", lambda: staging.begin(path))
        self._side = self._side or self._group.side_group()
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        future = _in_thread(lambda: self._write(path, copies, state))
        self._under_way = (path, future)

    def written(self) -> bool:
        """Whether `finish` would not wait. Local."""
        return self._under_way is None or self._under_way[1].done()

    def finish(self, timeout_s: float) -> None:
        """Wait for what was begun. Local; nothing to do if nothing was.

        Errors: TransferTimeoutError after `timeout_s` seconds, the writing goes on then;
        TrainError on every rank if it could not be written, PeerLostError if one of them is gone.
        """
        if self._under_way is None:
            return
        path, future = self._under_way
        wait([future], timeout_s)
        if not future.done():
            msg = f"checkpoint {path} was not written within {timeout_s:.0f} s"
            raise TransferTimeoutError(msg)
        self._under_way = None
        future.result()

    def abandon(self) -> None:
        """Give what is being written a moment to end: the process group is about to go. Local."""
        if self._under_way is not None:
            wait([self._under_way[1]], _ENDS_S)
            self._under_way = None

    def _write(self, path: Path, copies: dict[str, Any], state: TrainState) -> None:
        staged = staging.staged_path(path)

        def publish() -> None:
            state.write(staged)
            staging.publish(path)

        with collective("save_checkpoint"):
            try:
                dcp.save(copies, checkpoint_id=staged, process_group=self._side)
            except (dcp.api.CheckpointException, OSError) as error:
                raise TrainError(f"writing {path} failed: {in_one_line(error)}") from error
            self._group.on_main(f"writing {path}", publish, self._side)


def _in_thread(function: Callable[[], None]) -> Future[None]:
    """Run it in a thread that does not hold the process up when that ends."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  (it is raised where somebody waits for it)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
