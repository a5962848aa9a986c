"""A process group of our own, beside whatever default group the process has.

torch offers no public way to make one: `new_group` takes subsets of the default group's ranks, and
`init_process_group` makes the default group itself. The calls below are private; `check_torch`
tries them when an engine is made, so that a torch release without them is named at the start.
"""

from __future__ import annotations

import importlib
import logging
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _C10dBackend
from torch.distributed import distributed_c10d as c10d

from rl_ckpt_hccl.gloo_sockets import GlooSockets
from rl_core.deadlines import Deadline
from rl_core.errors import ComponentNotFoundError, IncompatibleVersionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Backend, Store, Work

logger = logging.getLogger(__name__)

LEAVE_S = 0.5
"""Seconds that a failure waits, at most, for the end of the group that it has ended."""


class Member:
    """One rank's membership in a group, and how to end it.

    Attributes:
        backend: name of the communication library.
    """

    def __init__(
        self, backend: str, group: dist.ProcessGroup, break_off: Callable[[], None]
    ) -> None:
        self.backend = backend
        self._group: dist.ProcessGroup | None = group
        self._break_off = break_off

    def broadcast(self, data: torch.Tensor, seconds: float) -> Work:
        """Begin to send `data` from rank 0 to all, or to receive it there.

        Args:
            data: contiguous, the same length on every rank.
            seconds: after which the library gives up by itself.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(seconds, 1e-3))
        if self._group is None:
            raise RuntimeError("the group was left")
        return self._group.broadcast([data], options)

    def leave(self) -> None:
        """End it; works that have not begun fail at once, on every rank. Idempotent.

        Returns after `LEAVE_S` at the latest, so that the failure that is to be told is not held
        up; a thread goes on where that is too short: with gloo a message that has begun arrives
        first, and a group's destructor waits for works of it, to their timeouts if nobody ends
        them.
        """
        if self._group is None:
            return
        last, self._group = [self._group], None
        break_off, self._break_off = self._break_off, _nothing
        ending = threading.Thread(
            target=_end, args=(last, break_off), name="leave-group", daemon=True
        )
        del break_off  # with a plug-in it holds the group's backend
        ending.start()
        ending.join(LEAVE_S)


def _end(last: list[dist.ProcessGroup], break_off: Callable[[], None]) -> None:
    try:
        break_off()
    except Exception:  # foreign code, and nobody above
        logger.warning("what is under way in a group ends by its timeout only", exc_info=True)
    last.clear()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Library:
    """A communication library, and where it is used.

    Attributes:
        backend: `gloo`, `nccl`, or the name of a plug-in (`hccl`).
        device: type of the device that the tensors are on.
        host: address of the interface to use; gloo alone is told it, the others choose by their
            own settings (`NCCL_SOCKET_IFNAME`, `HCCL_IF_IP`).
    """

    backend: str
    device: str = "cpu"
    host: str = "127.0.0.1"


def make_group(library: Library, store: Store, place: tuple[int, int], seconds: float) -> Member:
    """Connect to the other ranks; returns when all are there. Collective.

    Args:
        library: what to connect with.
        store: used by these ranks only; give a prefix of its own to each group.
        place: rank and number of ranks.
        seconds: to wait for the others.
    """
    if library.backend == "gloo":
        return _gloo(store, place, library.host, Deadline.after(seconds))
    timeout = timedelta(seconds=seconds)
    if library.backend == "nccl":
        return _nccl(library.device, store, place, timeout)
    return _plugin(library, store, place, timeout)


def _gloo(store: Store, place: tuple[int, int], host: str, deadline: Deadline) -> Member:
    sockets = GlooSockets()
    with sockets.noticing_listener():
        device = dist.ProcessGroupGloo.create_device(hostname=host)
    sockets.exchange(store, *place)
    # Torch's two threads race for the name of the last collective, and free it twice if it has more
    # than the 15 characters that a std::string holds itself. BROADCAST has 9: the default stays.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [device]
    # What the exchange has taken of the time is gone for the connections.
    options._timeout = timedelta(seconds=max(deadline.remaining(), 1e-3))
    backend = dist.ProcessGroupGloo(store, *place, options)
    kind = dist.ProcessGroup.BackendType.GLOO
    return Member("gloo", _group("cpu", store, place, backend, kind), sockets.break_off)


def _nccl(device: str, store: Store, place: tuple[int, int], timeout: timedelta) -> Member:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, *place, options)
    kind = dist.ProcessGroup.BackendType.NCCL
    group = _group(device, store, place, backend, kind)
    return Member("nccl", group, _on_this_device(device, backend.abort))


def _plugin(library: Library, store: Store, place: tuple[int, int], timeout: timedelta) -> Member:
    options = c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = place
    options.timeout = timeout
    options.group_id = "rl-ckpt-hccl"
    options.global_ranks_in_group = list(range(place[1]))
    backend = _plugin_creator(library.backend)(options, None)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = _group(library.device, store, place, backend, kind)
    return Member(library.backend, group, _on_this_device(library.device, _abort_of(backend)))


def _abort_of(backend: Backend) -> Callable[[], None]:
    """What ends the works of a plug-in's group.

    torch_npu has a method of its own, which takes a reason. The `abort` that every backend has from
    torch does nothing unless C++ code overrides it, which Python cannot see: it is tried, but not
    relied upon.
    """
    abort_hccl_comm: Callable[[str], None] | None = getattr(backend, "abort_hccl_comm", None)
    if abort_hccl_comm is not None:
        return partial(abort_hccl_comm, "the group was left")
    abort: Callable[[], None] = getattr(backend, "abort", _nothing)
    if getattr(type(backend), "abort", None) is getattr(_C10dBackend, "abort", None):
        logger.warning(
            "%s has no abort of its own: what a failure finds under way may wait for its timeout",
            type(backend).__name__,
        )
    return abort


def _on_this_device(device: str, abort: Callable[[], None]) -> Callable[[], None]:
    """`abort` for another thread, on the device that is current in this one."""
    module = torch.get_device_module(device)
    index = module.current_device()

    def aborting() -> None:
        module.set_device(index)
        abort()

    return aborting


def _plugin_creator(name: str) -> Callable[..., Backend]:
    if name == "hccl" and name.upper() not in dist.Backend._plugins:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            msg = f"hccl needs torch_npu and CANN, which could not be loaded: {error}"
            raise ComponentNotFoundError(msg) from error
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise ComponentNotFoundError(f"no torch.distributed plug-in provides {name!r}")
    creator: Callable[..., Backend] = plugin.creator_fn
    return creator


def _group(
    device: str, store: Store, place: tuple[int, int], backend: Backend, kind: object
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, *place)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


@lru_cache(maxsize=8)
def check_torch(backend: str) -> None:
    """Try what `make_group` needs of torch, once in a process.

    With gloo a group of one rank is made and used; the others need their device for that, so only
    the presence of what they need is checked.

    Errors: IncompatibleVersionError naming the torch version, ComponentNotFoundError.
    """
    try:
        if backend == "gloo":
            _try_gloo()
        elif backend == "nccl":
            _ = dist.ProcessGroupNCCL.Options, dist.ProcessGroupNCCL.abort
        else:
            _ = c10d._DistributedBackendOptions, _plugin_creator(backend)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        if isinstance(error, ComponentNotFoundError):
            raise
        msg = (
            f"rl-ckpt-hccl cannot make a {backend} group with torch {torch.__version__}: {error}; "
            "it was written for torch 2.6 to 2.14"
        )
        raise IncompatibleVersionError(msg) from error


def _try_gloo() -> None:
    data = torch.arange(4, dtype=torch.uint8)
    member = make_group(Library("gloo"), dist.HashStore(), (0, 1), 10)
    member.broadcast(data, 10).wait()
    member.leave()
    if data.tolist() != [0, 1, 2, 3]:
        raise RuntimeError("a broadcast changed its source")
