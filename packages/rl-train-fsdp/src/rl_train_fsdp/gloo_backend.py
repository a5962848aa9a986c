"""Torch's gloo, with one thread for each group instead of two.

A thread of `ProcessGroupGloo` that has completed a collective notes its name in a `std::string` of
the group, without a lock (`pgStatus_->lastCompletedWorkName` in `runLoop`, torch 2.13). Two threads
that do so at the same time free the old text twice, if it is longer than the 15 characters that a
string holds itself; `ALLGATHER_COALESCED`, with which FSDP2 gathers, is. Then the C library aborts
the process, at once or at a later allocation ("double free or corruption", "free(): invalid
pointer", "unaligned tcache chunk"): twice in 1,500 weight syncs on two busy cores, and within
seconds in `tools/gloo_threads.py`, which also tells whether the torch at hand still does it.

One thread has nobody to race with. Collectives that were started together run one after the other
then, which on the host they had to share the cores for anyway.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

ONE_THREAD_GLOO = "one_thread_gloo"
"""Name of the backend, once `register` was called."""


def register() -> None:
    """Make the backend known to torch.distributed. Idempotent."""
    if ONE_THREAD_GLOO.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(ONE_THREAD_GLOO, _create, extended_api=True, devices=["cpu"])


def _create(group: Any, _: object) -> ProcessGroupGloo:
    """What torch itself makes of "gloo", but for the number of threads."""
    options = dist.ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = group.timeout
    options._devices = _devices()
    for name, value in (
        ("group_name", group.group_id),
        ("global_ranks_in_group", group.global_ranks_in_group),
    ):
        if hasattr(options, name):  # not in all versions
            setattr(options, name, value)
    backend = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)
    backend._set_sequence_number_for_group()
    return backend


def _devices() -> list[Any]:
    """Of the interfaces that GLOO_SOCKET_IFNAME names, else of the one that has the host's name."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
