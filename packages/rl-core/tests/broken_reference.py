"""The reference engine, broken in one way at a time, as real engines and adapters were.

Each class is one kind of failure; `test_contract_bites.py` says which test must notice it.
"""

import asyncio
import contextlib

import torch
from msgspec.structs import replace

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MiniRLError, RolloutError, TransferTimeoutError
from rl_core.gate import ServingGate
from rl_core.interfaces import LoadReport
from rl_core.publish import Failed
from rl_core.rollout.early_completions import EarlyCompletions
from rl_core.rollout.live_digests import digests_of
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.reference_engine import ReferenceEngine
from rl_core.testing.reference_kv import KVRows
from rl_core.testing.reference_model import RankModel
from rl_core.testing.reference_server import ReferenceServer
from rl_core.testing.reference_update import Update
from rl_core.versions import PolicyVersion

# -- the model: right bytes, wrong place


class TiedHeadLeftBehind(RankModel):
    """The head was packed once and never follows the embedding."""

    def packed_head(self):
        if "head_packed" not in self.derived:
            return super().packed_head()
        return self.derived["head_packed"]


class DerivedBufferStale(RankModel):
    """The rotary table is computed at start-up only."""

    def rotary_table(self):
        known = self.derived.get("rotary")
        return super().rotary_table() if known is None else known


class SecondLoadDoesNothing(RankModel):
    """The first load works, later ones find nothing to do."""

    def place(self, target, part):
        if not self.derived:
            super().place(target, part)


class WrittenToCopies(RankModel):
    """After start-up, weights go to a copy of the state dict."""

    def place(self, target, part):
        if not self.derived:
            super().place(target, part)
            return
        live = self.parameters
        self.parameters = {name: tensor.clone() for name, tensor in live.items()}
        super().place(target, part)
        self.parameters = live


class PrecisionLost(RankModel):
    """Float32 weights are cast to bfloat16 on their way."""

    def place(self, target, part):
        super().place(target, part.to(torch.bfloat16).float())


class PoisonBlended(RankModel):
    """Old values are scaled by zero instead of overwritten: NaN stays NaN."""

    def place(self, target, part):
        rows = slice(target.row, target.row + part.shape[0]) if part.dim() else ...
        self.parameters[target.parameter][rows].nan_to_num_(0.0) if not self.derived else None
        self.parameters[target.parameter][rows].mul_(0).add_(part)


class ProcessedTwice(RankModel):
    """Post-processing works in place, on top of what it did the last time."""

    gain = 1.0

    def place(self, target, part):
        super().place(target, part * self.gain if target.parameter == "norm" else part)

    def post_process(self):
        self.gain *= 1.01
        super().post_process()


class UnknownIgnored(RankModel):
    """A tensor that the model does not have is skipped."""

    def check(self, manifest):
        known = tuple(meta for meta in manifest.tensors if meta.name in self.layout.full)
        super().check(type(manifest)(manifest.version, known))

    def load(self, name, tensor):
        if name in self.layout.targets:
            super().load(name, tensor)


class PartialSetAccepted(RankModel):
    """Whatever was not sent stays as it was."""

    def check(self, manifest):
        try:
            super().check(manifest)
        except MiniRLError as error:
            if "lacks" not in str(error):
                raise

    def finish(self):
        self.post_process()


class OneTensorSkipped(RankModel):
    """A tensor is counted as loaded, and was not."""

    def load(self, name, tensor):
        if name.endswith("layers.1.mlp.up_proj.weight") and self.derived:
            tensor = torch.zeros_like(tensor)
        super().load(name, tensor)


class WrongSlice(RankModel):
    """Every rank takes the slice of rank 0."""

    def _slice(self, target, tensor):
        return tensor if target.dim is None else tensor.chunk(self.tp_size, target.dim)[0]


class FusedHalfDropped(RankModel):
    """Parts of a fused projection count only if the whole of it is in one bucket."""

    bucket = frozenset()

    def load(self, name, tensor):
        parameter = self.layout.targets[name].parameter
        parts = {
            part for part, place in self.layout.targets.items() if place.parameter == parameter
        }
        if self.derived and not parts <= self.bucket:
            self._pending.discard(name)
            return
        super().load(name, tensor)


class FusedHalfDroppedServer(ReferenceServer):
    rank_model = FusedHalfDropped

    def load(self, rank, attempt, parts):
        self._ranks[rank].bucket = {meta.name for meta, _ in parts}
        super().load(rank, attempt, parts)


class StaticDigests(RankModel):
    """Digests are taken of something that never changes."""

    def live_digests(self):
        return dict.fromkeys(self.parameters, "wsum64:0")


class DigestsOfACopy(RankModel):
    """Digests are taken of what arrived first, not of what is computed with."""

    copy = None

    def live_digests(self):
        self.copy = self.copy or super().live_digests()
        return self.copy


class TiedHeadReported(RankModel):
    """The ranks report a tensor that no row of the table describes."""

    def live_digests(self):
        found = super().live_digests()
        return {**found, "tied_head": found["embed"]}


class FirstRankDigests(ReferenceServer):
    """The digests of rank 0 are reported for all ranks."""

    def live_digests(self):
        return [self._ranks[0].live_digests() for _ in self._ranks]


class ContentOfACopy(RankModel):
    """What is shown is what arrived first, not what is computed with."""

    copy = None

    def live_digests(self):
        return digests_of(super().live_tensors())

    def live_tensors(self):
        if self.copy is None:
            self.copy = [
                live._replace(tensor=live.tensor.clone()) for live in super().live_tensors()
            ]
        return iter(self.copy)


class FirstRankContent(ReferenceServer):
    """The content of rank 0 is shown for all ranks."""

    def live_content(self, tp_rank, name, start):
        return super().live_content(0, name, start)


class ResumedWithoutDerived(RankModel):
    """After memory was released, derived buffers come back zeroed and stay so."""

    was_released = False

    def release(self):
        self.was_released = True
        return super().release()

    def rotary_table(self):
        table = super().rotary_table()
        return torch.zeros_like(table) if self.was_released else table


# -- the KV cache


class CacheNotFlushed(KVRows):
    """Flushing reports success and does nothing."""

    def flush(self, keep=()):
        pass


class KeptRequestsKeepTheirKV(KVRows):
    """A flush spares the rows in use: kept requests go on with keys of the old version."""

    def flush(self, keep=()):
        for row in self._idle:
            self._tokens[row] = []


class KeptKVShared(KVRows):
    """Others with the same prompt take over what a request that was paused in place keeps."""

    def flush(self, keep=()):
        super().flush(keep)
        self._private = set()


class NothingKeptInPlace(KVRows):
    """A request that was paused in place computes its keys again."""

    def flush(self, keep=()):
        super().flush()


class CacheSurvivesRelease(KVRows):
    """The memory is zeroed, the index of cached prefixes is not."""

    def release(self):
        tokens = [list(row) for row in self._tokens]
        freed = super().release()
        self._tokens = tokens
        return freed


class FreesNothing(KVRows):
    """Sleep is a no-op."""

    def release(self):
        return 0


# -- the engine: what is said about tokens


class VersionReadAfterwards(ReferenceEngine):
    """Tokens are labelled with the version that is served when the answer is ready."""

    def _end(self, queued, reason):
        if self.version is not None:
            queued.versions = [self.version] * len(queued.tokens)
        super()._end(queued, reason)


class VersionNeverChanges(ReferenceEngine):
    """Tokens carry the version that was served first."""

    first = None

    def label(self, queued):
        self.first = self.first or super().label(queued)
        return self.first


class TemperatureIgnored(ReferenceEngine):
    """Log-probabilities are those of temperature 1, whatever was sampled from."""

    def _extend(self, queued, scores):
        super()._extend(queued, scores)
        log_probs = torch.log_softmax(scores.float(), -1)
        queued.log_probs[-1] = float(log_probs[queued.tokens[-1]])


class SeedIgnored(ReferenceEngine):
    def _generator(self, seed):
        return super()._generator(None)


class EndTokenDropped(ReferenceEngine):
    """A completion that ended by itself comes without its end token."""

    def _end(self, queued, reason):
        if reason == "stop":
            for values in (queued.tokens, queued.log_probs, queued.versions):
                values.pop()
        super()._end(queued, reason)


class PauseIgnored(ReferenceEngine):
    async def pause(self, mode, limit_s):
        pass


class AbortedAsLength(ReferenceEngine):
    """Aborted requests run on to the end after the pause."""

    def abort(self):
        if not self.paused:
            super().abort()


class WaitAborts(ReferenceEngine):
    """Pausing with `wait` cuts requests off, marked as complete."""

    async def pause(self, mode, limit_s):
        for queued in list(self._queue):
            self._end(queued, "abort")
        await super().pause(mode, limit_s)


class KeepAborts(ReferenceEngine):
    """An update ends what it was told to keep."""

    async def quieten(self, mode, limit_s):
        self.close()


class CommitForgetsFlush(ReferenceEngine):
    """The cache can be flushed, but nobody does it."""

    async def serve(self, version):
        self.version = version
        await self._wake()


class RunsIntoUpdates(ReferenceEngine):
    """Requests in flight are not stopped while weights change."""

    def close(self):
        pass


# -- the server


class GateIgnored(ReferenceServer):
    """Answers whatever its state is."""

    async def generate(self, requests):
        if self._engine.version is None:
            self._engine.version = PolicyVersion(1, 0)
        for model in self._ranks:
            if not model.derived:
                model.post_process()
        for model in self._ranks:
            for tensor in (*model.parameters.values(), *model.derived.values()):
                tensor.nan_to_num_(0.1) if not tensor.is_complex() else None
        return await self._engine.generate(requests)


class VersionsForgotten(ReferenceServer):
    """Every update starts with a fresh state: old versions are welcome."""

    async def begin_update(self, rank, manifest, *requests_in_flight):
        if self._update is None:
            fresh = ServingGate(self._name)
            fresh.apply(Failed("fresh"))
            self._gate._state = fresh.state
        return await super().begin_update(rank, manifest, *requests_in_flight)


class AnyCommit(ReferenceServer):
    """Commits whatever version it is told."""

    async def commit(self, version):
        await super().commit(self._gate.state.target or version)


class LateCommitStamps(ReferenceServer):
    """A commit stamps tokens before anybody looks whether it comes too late."""

    async def commit(self, version):
        if self._engine.version is not None:
            self._engine.version = version
        await super().commit(version)


class AcknowledgedWhenEnqueued(ReferenceServer):
    """A bucket is acknowledged when it is queued; it is loaded some time later."""

    def load(self, rank, attempt, parts):
        update = self._current()
        for meta, data in parts:
            update._checks[rank].see(meta)
            self._ranks[rank]._pending.discard(meta.name)
            if self._gate.state.committed is None:
                self._later(rank, meta, data)
            else:
                asyncio.get_running_loop().call_later(0.2, self._later, rank, meta, data)

    def _later(self, rank, meta, data):
        raw = torch.frombuffer(bytearray(data), dtype=torch.float32)
        self._ranks[rank].load(meta.name, raw.view(meta.shape))


class FirstRankAcknowledges(ReferenceServer):
    """The replica counts as loaded when its first rank is."""

    class update(Update):  # noqa: N801
        def close(self, rank):
            self._checks[rank].close()
            for model in self._ranks:
                model.post_process()
            self._loaded.set()
            return len(self._closed) == 0 and (self._closed.add(rank) or True)


class AnySender(ReferenceServer):
    """A second sender takes over in the middle."""

    class update(Update):  # noqa: N801
        def admit(self, rank, manifest):
            self._checks.pop(rank, None)

        def join(self, rank, manifest):
            super().join(rank, self.manifest)


class ErrorsNotFenced(ReferenceServer):
    """An update that failed leaves the old state in place, half-loaded."""

    def fence(self, reason):
        if self._gate.state.committed is None or "test" in reason or "stopped" in reason:
            super().fence(reason)
            return
        if self._update is not None:
            self._update.fail(reason)
            self._update = None
        version = self._gate.state.committed
        self._gate._state = type(self._gate.state)(type(self._gate.state.phase).COMMITTED, version)
        self._engine.version = version


class ReasonLost(ReferenceServer):
    def fence(self, reason):
        super().fence("something went wrong")


class NeverRepaired(ReferenceServer):
    """Once fenced, always fenced."""

    fences = 0

    def fence(self, reason):
        self.fences += 1
        super().fence(reason)

    async def commit(self, version):
        if self.fences:
            raise RolloutError("the engine is dead")
        await super().commit(version)


class ServesEmptyWeights(ReferenceServer):
    """Woken up without weights, it answers."""

    def release(self, tags):
        freed = {}
        if "kv_cache" in tags:
            freed["kv_cache"] = self._kv.release()
        if "weights" in tags:
            freed["weights"] = sum(model.release() for model in self._ranks)
        return freed

    def resume(self, tags):
        super().resume(tags)
        for model in self._ranks:
            for tensor in model.parameters.values():
                tensor.nan_to_num_(0.1)
            model.post_process()


class OneSampleOnly(ReferenceServer):
    """Answers every request once, whatever `n` says."""

    async def generate(self, requests):
        with self._gate.admit():
            return await self._engine.generate(requests)


class SameSampleAgain(ReferenceServer):
    """All samples of a request have its seed."""

    async def generate(self, requests):
        samples = [
            replace(sample, sampling=replace(sample.sampling, seed=request.sampling.seed))
            for request in requests
            for sample in request.samples()
        ]
        return await super().generate(samples)


class OnlySaysThatItFrees(ReferenceServer):
    """Counts bytes, and keeps them."""

    def release(self, tags):
        return super().release([]) | dict.fromkeys(tags, 64 << 20)


class ReleaseNotNoticed(ReferenceServer):
    """What was loaded still counts as loaded when its memory was given away."""

    def release(self, tags):
        if "weights" in tags and not self._gate.state.serving:
            return {"weights": sum(model.release() for model in self._ranks)}
        return super().release(tags)


class ReleasedButAnswering(ReferenceServer):
    """Released memory is quietly allocated again when a request comes."""

    async def generate(self, requests):
        if not self._kv.allocated:
            self._kv.resume()
        for model in self._ranks:
            if not model.derived:
                model.resume()
                for tensor in model.parameters.values():
                    tensor.fill_(0.1)
                model.post_process()
                self._engine.version = PolicyVersion(1, 0)
        return await self._engine.generate(requests)


class TagsIgnored(ReferenceServer):
    def release(self, tags):
        return super().release([tag for tag in tags if tag in {"kv_cache", "weights"}])


class DirectoryIgnored(ReferenceServer):
    """Reloads what it has instead of what it was given."""

    async def load_directory(self, path, manifest, *requests_in_flight):
        for model in self._ranks:
            await self.begin_update(model.tp_rank, manifest, *requests_in_flight)
        update = self._current()
        for model in self._ranks:
            for meta in manifest.tensors:
                update._checks[model.tp_rank].see(meta)
            model._pending = set()
            self._close(update, model.tp_rank)


class ClearForgetsToSay(ReferenceServer):
    """Clearing the cache corrupts it instead."""

    def clear_kv_cache(self):
        self._kv._memory += 1


# -- early completions


class NothingToldEarly(EarlyCompletions):
    """Whoever asks is told nothing; all comes with the call."""

    async def finished(self, request_ids, wait):
        while self._any(request_ids):
            await self._news.wait()
        return []


class EverybodyTold(EarlyCompletions):
    """Whoever asks is told all that has ended."""

    def _found(self, request_ids):
        return super()._found([name for call in self._calls for name in call])


class EndedCallsKept(EarlyCompletions):
    """What was noted stays."""

    @contextlib.contextmanager
    def opened(self, samples):
        with super().opened(samples) as ended:
            call = self._calls[-1]
            yield ended
        self._calls.append(call)


# -- the adapter


class BufferReusedTooEarly(ReferenceAdapter):
    """A bucket is sent when the next one comes: its buffer belongs to somebody else by then."""

    held = ()
    updates = 0

    def update_weights(self, leases, manifest, deadline):
        self.updates += 1
        return super().update_weights(leases, manifest, deadline)

    def send(self, entries, attempt, deadline):
        if self.updates <= 3:
            super().send(entries, attempt, deadline)
            return
        held, self.held = self.held, list(entries)
        if held:
            super().send(held, attempt, deadline)

    def _call(self, method, *args, timeout):
        if method == "finish_update" and self.held:
            held, self.held = self.held, ()
            super().send(held, args[1], Deadline.after(timeout))
        return super()._call(method, *args, timeout=timeout)


class DigestsUnchecked(ReferenceAdapter):
    """Digests are passed on as they came."""

    def _stream(self, leases, manifest, attempt, deadline):
        digests = {}

        def plain():
            for lease in leases:
                digests.update((entry.meta.name, entry.digest) for entry in lease.entries)
                lease.entries = [type(entry)(entry.meta, entry.tensor) for entry in lease.entries]
                yield lease

        report = super()._stream(plain(), manifest, attempt, deadline)
        return LoadReport(report.version, report.tensors, report.nbytes, {}, len(digests))


class StreamLeft(ReferenceAdapter):
    """A rank that failed asks for no further weights, so that the others get none either."""

    def drain(self, leases):
        pass


class DeadlineIgnored(ReferenceAdapter):
    def update_weights(self, leases, manifest, deadline):
        return super().update_weights(leases, manifest, Deadline.after(10))


class SourceErrorsNotFenced(ReferenceAdapter):
    """Only errors of the server are taken seriously."""

    def _stream(self, leases, manifest, attempt, deadline):
        self.quiet = True
        report = super()._stream(leases, manifest, attempt, deadline)
        self.quiet = False
        return report

    quiet = False

    def fence(self, reason, timeout):
        if self.quiet:
            self.quiet = False
            return
        super().fence(reason, timeout)


class OrderAssumed(ReferenceAdapter):
    """Takes tensors as if they came in the order of the manifest's names."""

    def send(self, entries, attempt, deadline):
        ordered = sorted(entries, key=lambda entry: entry.meta.name)
        moved = [
            type(entry)(entry.meta, other.tensor)
            if entry.tensor.shape == other.tensor.shape
            else entry
            for entry, other in zip(entries, ordered, strict=True)
        ]
        super().send(moved, attempt, deadline)


# -- how a test starts them

_PARTS = {
    RankModel: "rank_model",
    KVRows: "kv_rows",
    ReferenceEngine: "engine",
    EarlyCompletions: "early",
}


def server_of(cls):
    """`module:Class` of a server with the broken part `cls` in it."""
    if issubclass(cls, ReferenceAdapter):
        cls = ReferenceServer
    for base, part in _PARTS.items():
        if issubclass(cls, base):
            name = f"{cls.__name__}Server"
            globals().setdefault(name, type(name, (ReferenceServer,), {part: cls}))
            cls = globals()[name]
    return f"{cls.__module__}:{cls.__name__}"


class KeptAreWaitedFor(ReferenceEngine):
    """Pausing with `wait` lets requests go on that were to be kept."""

    def _check_none_kept(self):
        pass


class FailedPauseHolds(ReferenceEngine):
    """A pause that has failed is there all the same."""

    async def pause(self, mode, limit_s):
        try:
            await super().pause(mode, limit_s)
        except TransferTimeoutError:
            self._paused = mode
            raise


class OvertakenPauseSaysNothing(ReferenceEngine):
    """Whoever waits for a pause is told that it is there, whatever came meanwhile."""

    async def pause(self, mode, limit_s):
        with contextlib.suppress(LifecycleError):
            await super().pause(mode, limit_s)
