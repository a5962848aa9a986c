"""What may go wrong at one replica in a publish; called with (fleet, victim, monkeypatch)."""

import time
from dataclasses import replace

import msgspec
import torch
from two_replicas import FINALIZE_S, LIMIT_S, QKV

from rl_core.errors import (
    ManifestMismatchError,
    RolloutError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.testing.reference_adapter import ReferenceAdapter

HANG_S = FINALIZE_S + 1.0


def dies(point):
    def harm(fleet, victim, monkeypatch):
        receiver = fleet.receivers[victim]
        receiver.reach = lambda reached: receiver.die() if reached == point else None

    return harm


def raises(kind, message, point="midway"):
    def harm(fleet, victim, monkeypatch):
        def fail(reached):
            if reached == point:
                raise kind(message)

        fleet.receivers[victim].reach = fail

    return harm


def fails_to_load(kind, message):
    """Handing a bucket to the engine fails."""

    def harm(fleet, victim, monkeypatch):
        load = ReferenceAdapter.send

        def send(adapter, entries, *rest):
            if adapter is fleet.receivers[victim]._adapter:
                raise kind(message)
            load(adapter, entries, *rest)

        monkeypatch.setattr(ReferenceAdapter, "send", send)

    return harm


def damaged(fleet, victim, monkeypatch):
    """A byte changes after it has arrived."""

    def flipped(entries):
        tensor = entries[0].tensor.clone()
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        return [replace(entries[0], tensor=tensor), *entries[1:]]

    fleet.receivers[victim].alter = flipped


def reports(**changes):
    def harm(fleet, victim, monkeypatch):
        receiver = fleet.receivers[victim]
        receiver.report = lambda report: msgspec.structs.replace(report, **changes)

    return harm


def flipped(fleet, victim, monkeypatch):
    """One bit changes in the engine after the load."""

    def flip(point):
        if point == "loaded":
            fleet.servers[victim].call("flip", 0, QKV, 0.5, timeout=LIMIT_S)

    fleet.receivers[victim].reach = flip


def at_call(method, before=lambda server: None, after=lambda server: None):
    """Something happens when an adapter calls this of the victim's server."""

    def harm(fleet, victim, monkeypatch):
        call = ReferenceAdapter._call

        def harmed(adapter, name, *args, timeout):
            hit = name == method and adapter._server is fleet.servers[victim]
            if hit:
                before(adapter._server)
            answer = call(adapter, name, *args, timeout=timeout)
            if hit:
                after(adapter._server)
            return answer

        monkeypatch.setattr(ReferenceAdapter, "_call", harmed)

    return harm


def failing(message):
    def fail(server):
        raise RolloutError(message)

    return fail


def refuses(method, message):
    """The server fails at a call of the adapter."""
    return at_call(method, before=failing(message))


def server_dies(method):
    """The server is gone when it is called for this."""
    return at_call(method, before=lambda server: server.kill())


def unanswered(method):
    """The server does what it is told, and its answer is lost."""
    return at_call(method, after=failing(f"the rollout server did not answer {method!r}"))


def hangs(who):
    """A deadline passes, which blames nobody, but this member does not answer then, either."""

    def harm(fleet, victim, monkeypatch):
        fails_to_load(TransferTimeoutError, "deadline passed")(fleet, victim, monkeypatch)
        if who == "server":
            refuses("clear_kv_cache", "no answer")(fleet, victim, monkeypatch)
            return

        def reach(point):
            if point == "finalize":
                time.sleep(HANG_S)

        fleet.receivers[victim].reach = reach

    return harm


FAULTS = {
    "begin: the worker dies": dies("prepare"),
    "begin: the worker dies while connecting": dies("connect"),
    "begin: the server dies": server_dies("begin_update"),
    "transfer: the worker dies": dies("midway"),
    "transfer: the worker dies at the end": dies("end"),
    "transfer: the server dies": server_dies("load"),
    "transfer: the worker hangs": hangs("worker"),
    "transfer: the server hangs": hangs("server"),
    "transfer: a message is damaged": damaged,
    "load: refused": raises(ManifestMismatchError, "a tensor has another shape"),
    "load: fails": fails_to_load(TransferError, "the engine failed: out of memory"),
    "load: the server dies": server_dies("finish_update"),
    "light: a difference is reported": reports(matched=0, mismatched=1),
    "light: another digest": reports(weights_digest="xxh3-128:0"),
    "live: a bit differs": flipped,
    "live: the server dies": server_dies("live_digests"),
    "commit: refused": refuses("commit", "the flush was not confirmed"),
    "commit: no answer": unanswered("commit"),
    "commit: the server dies": server_dies("commit"),
}
