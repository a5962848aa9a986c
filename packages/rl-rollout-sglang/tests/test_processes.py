"""Nothing is left behind: processes, sockets, shared memory, however a replica ends.

The engines that end here are not used by later tests.
"""

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, RolloutError, TransferError
from rl_core.testing.replica_remains import GONE_S, ReplicaRemains
from rl_core.testing.weight_set import leases
from rl_core.trajectory import SamplingParams

pytestmark = pytest.mark.engine


def test_a_server_killed_in_the_middle_of_an_update_takes_everything_with_it(engines, weight_sets):
    """The schedulers and the detokenizer end, and so does the adapter, with a named error."""
    started = engines("tied")
    started.sync(weight_sets["tied"][0])
    remains = ReplicaRemains(started.state())
    assert len(remains.processes) >= 4  # server, two schedulers, detokenizer
    weights = weight_sets["tied"][1]
    pid = started.state()["pid"]

    def deadly():
        stream = leases(weights.entries(), 2)
        yield next(stream)
        with contextlib.suppress(ProcessLookupError):  # the other rank's stream was faster
            os.kill(pid, signal.SIGKILL)
        yield from stream

    manifest = weights.manifest(started.next_version())
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        updates = [
            threads.submit(adapter.update_weights, deadly(), manifest, Deadline.after(60))
            for adapter in started.adapters
        ]
        errors = [update.exception(60) for update in updates]
    assert time.monotonic() - begun < 30
    assert all(isinstance(error, TransferError) for error in errors), errors
    remains.assert_gone()
    engines.end("tied")


def test_a_dead_engine_fences_the_replica_and_its_last_words_are_told(engines, weight_sets, ask):
    """SGLang means to take the server down with it; ours survives and says what happened.

    HTTP clients are told at once, before anybody has asked the server for its state.
    """
    started = engines("moe")
    started.sync(weight_sets["moe"][0])
    long = {"max_new_tokens": 900, "ignore_eos": True}
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(ask, started, SamplingParams(0.0, max_tokens=900, ignore_eos=True))
        waiting = threads.submit(http, started, "/generate", [5], long)
        time.sleep(0.3)
        started.server.submit("worker_call", "fail")
        error = running.exception(60)
        answers = [waiting.result(GONE_S)]
    answers += [http(started, "/health"), http(started, "/generate", [5], long)]
    for status, words in answers:
        assert status == 503
        assert "a test asked the scheduler to fail" in words
    assert isinstance(error, RolloutError)
    assert "a test asked the scheduler to fail" in str(error).splitlines()[0]
    end = time.monotonic() + GONE_S
    while started.state()["phase"] != "fenced" and time.monotonic() < end:
        time.sleep(0.1)
    assert "a test asked the scheduler to fail" in started.state()["reason"]
    assert started.adapters[0].committed_version(10) is None
    engines.end("moe")


def http(started, path, input_ids=None, sampling=None):
    """Status and content of an answer."""
    body = {"input_ids": input_ids, "sampling_params": sampling}
    request = urllib.request.Request(
        f"http://{started.replica.address}{path}",
        data=json.dumps(body).encode() if input_ids else None,
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_an_orderly_end_leaves_nothing(engines):
    started = engines("dense")
    remains = ReplicaRemains(started.state())
    assert set(remains.workers) <= {process.pid for process in remains.processes}
    started.replica.shutdown(30)
    remains.assert_gone()
    started.replica.shutdown(30)  # idempotent
    with pytest.raises(LifecycleError):
        _ = started.replica.address
    engines.end("dense")
