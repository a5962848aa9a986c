"""A started replica under test, and what the rollout contract does with it."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import ReplicaFencedError
from rl_core.interfaces import (
    BucketLease,
    LeasedTensor,
    LoadReport,
    RolloutAdapter,
    SupportsProgress,
)
from rl_core.layout import LayoutSpec
from rl_core.metadata import Manifest
from rl_core.testing.weight_set import WeightSet, leases
from rl_core.trajectory import Completion, GenerateRequest, SamplingParams
from rl_core.versions import PolicyVersion


class RolloutCapability(StrEnum):
    """What a rollout backend may lack, if it says why."""

    COLD_START = "a fresh engine can be started on given weights"
    DISK = "loads a Hugging Face directory"
    PARTIAL_SETS = "notices that a manifest lacks tensors of the model"
    FREES_KV_CACHE = "gives KV memory back"
    FREES_WEIGHTS = "gives weight memory back"
    PAUSE_ABORT = "pause mode abort"
    PAUSE_WAIT = "pause mode wait"
    PAUSE_KEEP = "pause mode keep"
    PAUSE_IN_PLACE = "pause mode in_place"
    KEEP_RECOMPUTES = "kept requests compute their KV again under the new version"
    PREFIX_CACHE = "caches prefixes"
    SEEDS = "per-request seeds reproduce"
    EARLY_COMPLETIONS = "tells what has ended before the whole call has"
    LIVE_DIGESTS = "digests what the engine really holds"
    LIVE_CONTENT = "shows what the engine really holds"
    LAYOUT = "says in a layout spec what the engine's ranks hold"


Fingerprint = list[tuple[list[int], list[float]]]
"""Greedy tokens and their log-probabilities, for each prompt."""

Stream = Callable[[], Iterator[BucketLease]]
"""Makes the leases for one rank."""


@dataclass(frozen=True)
class ColdStart:
    """What a replica held and answered that had never been given other weights.

    For engines that take long to start: the replica under test is itself started on weights, and
    looked at before it is given any, where another one would have to be started for comparison.

    Attributes:
        weights: what it was started on, read by the engine's own loader.
        refusal: what it answered to requests before the first commit.
        answers: greedy answers (`RolloutCase.GREEDY`) to the prompts, after a first commit.
        digests: of the ranks' live tensors before that, or None if it cannot tell.
    """

    weights: WeightSet
    refusal: Exception | list[Completion]
    answers: Fingerprint
    digests: list[dict[str, str]] | None = None


@dataclass
class RolloutUnderTest:
    """What a backend gives to `RolloutAdapterContract`.

    Attributes:
        adapters: one for each tensor-parallel rank of one started replica, never synced before
            (or with `cold_start` from before it was).
        weights_a: a complete set of weights under Hugging Face names.
        weights_b: another one of the same structure, with other greedy tokens.
        prompts: at least two prompts of some tokens.
        cold: context manager starting a second replica on the given weights, in whatever way
            does not use `update_weights`; its adapters must be serving.
        cold_start: in place of `cold`: what this replica itself was when it was started.
        save: writes weights as the directory that `update_weights_from_disk` reads.
        eos_id: token that ends a completion, if samples of `weights_a` may well contain it.
        layout: the backend's layout spec of this model.
        flip: flips one bit of a live tensor of one rank: (rank, run-time name, where from 0 to 1);
            a second call puts it back.
        may_be_deaf: tensors that need not matter to these prompts (experts never chosen).
        long_tokens: length of a completion that takes long enough to be caught in the middle.
        tolerance: largest difference between log-probabilities that counts as equal.
        timeout_s: upper bound of any one call, in seconds.
        stall_s: deadline of an update that is made to stall, in seconds.
        resident: bytes of memory that the engine ranks' processes have allocated and touched, as
            the operating system counts them (`process_holdings.private_bytes`).
        filling: prompts that together write into most of the KV memory.
    """

    adapters: Sequence[RolloutAdapter]
    weights_a: WeightSet
    weights_b: WeightSet
    prompts: Sequence[Sequence[int]]
    cold: Callable[[WeightSet], AbstractContextManager[Sequence[RolloutAdapter]]] | None = None
    cold_start: ColdStart | None = None
    save: Callable[[WeightSet, Path], None] | None = None
    eos_id: int | None = None
    layout: LayoutSpec | None = None
    flip: Callable[[int, str, float], None] | None = None
    may_be_deaf: frozenset[str] = frozenset()
    long_tokens: int = 256
    tolerance: float = 1e-4
    timeout_s: float = 60.0
    stall_s: float = 1.0
    resident: Callable[[], int] | None = None
    filling: Sequence[Sequence[int]] = ()
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(0))


class RolloutCase:
    """One replica through its tests: syncs it, asks it, compares its answers."""

    def __init__(self, rollout: RolloutUnderTest) -> None:
        self.given = rollout
        self.first = rollout.adapters[0]
        self.threads = ThreadPoolExecutor(2 * len(rollout.adapters) + 4, "rollout-case")
        cold = rollout.cold_start
        self.first_refusal = cold.refusal if cold else self._first_answer()
        self.sync(rollout.weights_b)
        self.base_b = self.fingerprint()
        self.sync(rollout.weights_a)
        self.first.clear_kv_cache(rollout.timeout_s)
        self.base_a = self.fingerprint()

    # -- syncing

    def version(self) -> PolicyVersion:
        """A version newer than all before."""
        return PolicyVersion(1, next(self.given.steps))

    def update(
        self, weights: WeightSet, *, per_bucket: int | None = 3, manifest: Manifest | None = None
    ) -> list[LoadReport]:
        """Load `weights` into all ranks at the same time, without commit."""
        manifest = manifest or weights.manifest(self.version())
        entries = weights.entries()
        outcomes = self.outcomes(lambda: leases(entries, per_bucket), manifest)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, LoadReport)]

    def outcomes(
        self,
        stream: Stream,
        manifest: Manifest,
        within_s: float | None = None,
        adapters: Sequence[RolloutAdapter] | None = None,
    ) -> list[LoadReport | BaseException]:
        """What `update_weights` gave or raised on each rank (or on those given)."""
        allowed = self.given.timeout_s
        futures = [
            self.threads.submit(
                adapter.update_weights, stream(), manifest, Deadline.after(within_s or allowed)
            )
            for adapter in adapters or self.given.adapters
        ]
        return [ended(future, (within_s or 0) + allowed) for future in futures]

    def rejected(self, entries: Sequence[LeasedTensor], manifest: Manifest) -> list[BaseException]:
        """The errors of an update that must fail on every rank."""
        outcomes = self.outcomes(lambda: leases(entries, 3), manifest)
        accepted = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert not accepted, f"a wrong update was accepted: {accepted}"
        return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    def sync(self, weights: WeightSet, *, per_bucket: int | None = 3) -> PolicyVersion:
        """Load, commit; the version that is served now."""
        version = self.version()
        self.update(weights, per_bucket=per_bucket, manifest=weights.manifest(version))
        self.first.commit(version, self.given.timeout_s)
        return version

    # -- asking

    def requests(
        self, sampling: SamplingParams, prompts: Sequence[Sequence[int]] | None = None
    ) -> list[GenerateRequest]:
        """One request for each prompt."""
        return [
            GenerateRequest(f"request-{next(_NUMBERS)}", list(prompt), sampling)
            for prompt in prompts or self.given.prompts
        ]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Completions, checked for what must hold of every one."""
        completions = self.first.generate(requests, self.given.timeout_s)
        assert [item.request_id for item in completions] == [item.request_id for item in requests]
        for completion in completions:
            check_completion(completion)
        return completions

    def fingerprint(self, adapters: Sequence[RolloutAdapter] | None = None) -> Fingerprint:
        """Greedy answers to the prompts."""
        adapter = (adapters or self.given.adapters)[0]
        completions = adapter.generate(self.requests(GREEDY), self.given.timeout_s)
        return [(item.token_ids, item.log_probs) for item in completions]

    def in_background(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run something in a thread."""
        return self.threads.submit(function, *args)

    def let_run(self, running: "Future[Any]", delay_s: float | None) -> None:
        """Let requests run for so long; None: until the engine tells of a token more, if it can."""
        adapter = self.first
        if delay_s is not None:
            time.sleep(delay_s)
        elif isinstance(adapter, SupportsProgress):
            before = adapter.tokens_made(self.given.timeout_s)
            while not running.done() and adapter.tokens_made(self.given.timeout_s) == before:
                time.sleep(0.001)

    # -- comparing

    def assert_same(self, found: Fingerprint, expected: Fingerprint) -> None:
        """The same tokens, and log-probabilities within the tolerance."""
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, mine), (_, theirs) in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=self.given.tolerance)

    def assert_fenced(self, fragment: str = "") -> None:
        """Nothing is served, and a request is refused with a reason."""
        assert self.first.committed_version(self.given.timeout_s) is None
        with pytest.raises(ReplicaFencedError) as caught:
            self.first.generate(self.requests(GREEDY), self.given.timeout_s)
        assert fragment in str(caught.value)

    def assert_repaired_by_sync(self) -> None:
        """A complete sync of A makes the replica what it was."""
        version = self.sync(self.given.weights_a)
        assert self.first.committed_version(self.given.timeout_s) == version
        self.assert_same(self.fingerprint(), self.base_a)

    def _first_answer(self) -> Exception | list[Completion]:
        try:
            return self.first.generate(self.requests(GREEDY), self.given.timeout_s)
        except Exception as error:  # noqa: BLE001 - kept for the test that looks at it
            return error


_NUMBERS = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
"""How fingerprints are taken."""


def ended(future: "Future[Any]", within_s: float) -> Any:
    """The value of a future, or its exception as a value; fails the test if it does not end."""
    try:
        error = future.exception(within_s)
    except TimeoutError:
        pytest.fail(f"an update did not end within {within_s:.0f} s")
    return future.result() if error is None else error


def check_completion(completion: Completion) -> None:
    """What holds of every completion: lengths, signs, spans without gaps."""
    count = len(completion.token_ids)
    assert len(completion.log_probs) == count
    assert all(value <= 1e-6 for value in completion.log_probs)
    edges = [0]
    for span in completion.version_spans:
        assert span.start == edges[-1], f"gap before {span}"
        assert span.end > span.start, f"empty {span}"
        edges.append(span.end)
    assert edges[-1] == count, f"spans {completion.version_spans} do not cover {count} tokens"
    versions = [span.version for span in completion.version_spans]
    assert versions == sorted(versions), f"versions go back: {versions}"
