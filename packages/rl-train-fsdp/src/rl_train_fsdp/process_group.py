"""The default process group of the actor ranks, and the few numbers they exchange over it."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_core.errors import LifecycleError, PeerLostError, TrainError, TransferError
from rl_core.interfaces import RankPlace
from rl_train_fsdp import gloo_backend
from rl_train_fsdp.devices import BACKENDS

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProcessGroup:
    """This rank's membership.

    A process that is already in a group of the same ranks (a second engine holding the frozen
    reference, say) shares it; whoever created the group leaves it.
    """

    def __init__(self, place: RankPlace, timeout_s: float) -> None:
        """Join; returns when every rank has.

        Raises:
            LifecycleError: the process is in a group of other ranks.
            TransferError: the others did not come within `timeout_s` seconds.
        """
        self.place = place
        self._timeout_s = timeout_s
        self._owner = not dist.is_initialized()
        if self._owner:
            _join(place, timeout_s)
        elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
            msg = (
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, and "
                f"cannot become rank {place.rank} of {place.world_size}"
            )
            raise LifecycleError(msg)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.place.rank == 0

    def mesh(self, fsdp_size: int) -> DeviceMesh:
        """Ranks as (shard), or (replicate, shard) where `fsdp_size` is below the world size."""
        world, device = self.place.world_size, self.place.device
        if fsdp_size == world:
            return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
        shape = (world // fsdp_size, fsdp_size)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def side_group(self) -> dist.ProcessGroup:
        """Another group of the same ranks, for a thread of each beside the training. Collective."""
        gloo_backend.register()
        limit = timedelta(seconds=self._timeout_s)
        return dist.new_group(backend=gloo_backend.ONE_THREAD_GLOO, timeout=limit)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks of a host tensor, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def max(self, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Element-wise maximum over the ranks of a host tensor, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum(torch.zeros(1))

    def on_main(
        self, what: str, action: Callable[[], object], group: dist.ProcessGroup | None = None
    ) -> None:
        """Run `action` on rank 0 and return on every rank when it is done. Collective.

        Over `group`, if the caller is a thread beside the training.

        TrainError on every rank if it fails with an OSError there, so that none is left waiting.
        """
        failure: OSError | None = None
        if self.is_main:
            try:
                action()
            except OSError as error:
                failure = error
        if self.max(torch.tensor([int(failure is not None)]), group)[0]:
            reason = f": {failure}" if failure is not None else " on rank 0"
            raise TrainError(f"{what} failed{reason}") from failure

    def ranks_on_node(self) -> int:
        """How many ranks run on this host."""
        digest = hashlib.sha256(socket.gethostname().encode()).digest()
        mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
        hosts = [torch.empty_like(mine) for _ in range(self.place.world_size)]
        dist.all_gather(hosts, mine)
        return sum(bool(host == mine) for host in hosts)

    def leave(self) -> None:
        """Leave the group if this object joined it. Idempotent."""
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()
        self._owner = False


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Translate the failure of another rank, or of the way to it, into a PeerLostError.

    gloo reports both as plain RuntimeErrors, which only their text tells from others.
    """
    try:
        yield
    except dist.DistError as error:
        raise PeerLostError(_lost(what, error)) from error
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise PeerLostError(_lost(what, error)) from error


def _lost(what: str, error: BaseException) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"{what}: another actor rank failed, left or came too late ({reason})"


def _join(place: RankPlace, timeout_s: float) -> None:
    if place.master_address in _LOOPBACK:
        # gloo would otherwise look up the host's name, and use whichever interface has it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = f"[{place.master_address}]" if ":" in place.master_address else place.master_address
    backend = BACKENDS[place.device]
    if backend == gloo_backend.ONE_THREAD_GLOO:
        gloo_backend.register()
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{place.master_port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        msg = (
            f"rank {place.rank} of {place.world_size} could not join the process group at "
            f"{host}:{place.master_port} within {timeout_s:.0f} s: {error}"
        )
        raise TransferError(msg) from error
