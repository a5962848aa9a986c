"""Nothing is left behind: processes, sockets, shared memory, however a replica ends.

The engines that end here are not used by later tests.
"""

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MiniRLError, TransferError
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.replica_remains import GONE_S, ReplicaRemains, is_zombie
from rl_core.testing.weight_set import leases
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica

pytestmark = pytest.mark.engine


def test_a_server_killed_in_the_middle_of_an_update_takes_everything_with_it(engines, weight_sets):
    """Both ranks and the engine's core end, and so do the adapters, with a named error."""
    started = engines("tied")
    started.sync(weight_sets["tied"][0])
    remains = ReplicaRemains(started.state())
    assert len(remains.processes) >= 4  # server, engine core, two workers
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


def test_a_dead_engine_fences_the_replica(engines):
    """The server survives its engine, ends calls under way, refuses requests, says what to do."""
    started = engines("moe")
    pid = started.state()["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)  # so that it owes an answer when it dies
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(started.adapters[0].clear_kv_cache, 60.0)
        with pytest.raises(TimeoutError):
            call.result(0.5)
        os.kill(pid, signal.SIGKILL)
        assert "died" in str(call.exception(GONE_S))
    end = time.monotonic() + GONE_S
    status, told = health(started)  # before anybody asks for the state
    while "restart the replica" not in told and time.monotonic() < end:
        time.sleep(0.1)
        status, told = health(started)  # a moment long vLLM's own 503, which says nothing
    assert (status, "restart the replica" in told) == (503, True)
    while started.state()["phase"] != "fenced" and time.monotonic() < end:
        time.sleep(0.1)
    assert "died" in started.state()["reason"]
    assert started.adapters[0].committed_version(10) is None
    engines.end("moe")


def health(started):
    """Status and content of the answer to a health check."""
    try:
        with urllib.request.urlopen(f"http://{started.replica.address}/health", timeout=30) as ok:
            return ok.status, ok.read().decode()
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


def test_a_replica_that_was_shut_down_starts_nothing(model_dirs, tmp_path):
    config = VllmConfig(local_path=str(model_dirs["dense"][0]))
    replica = VllmReplica(config, ProcessLauncher(tmp_path), Placement())
    replica.shutdown(1.0)
    replica.warm_up()
    with pytest.raises(LifecycleError, match="was shut down"):
        replica.start(Deadline.after(60))
    assert list(tmp_path.iterdir()) == []


def test_a_shutdown_ends_a_start_under_way(model_dirs, tmp_path):
    """Also when the engine's own processes have just come up."""
    config = VllmConfig(
        local_path=str(model_dirs["dense"][0]), dtype="float32", kv_cache_memory_gb=0.0625
    )
    replica = VllmReplica(config, ProcessLauncher(tmp_path), Placement())
    replica.warm_up()
    server = psutil.Process(replica._process.pid)
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(replica.start, Deadline.after(60))
        while not server.children() and not start.done():
            time.sleep(0.01)
        processes = [server, *server.children(recursive=True)]
        assert not start.done()
        replica.shutdown(10)
        assert isinstance(start.exception(20), MiniRLError)
    _, alive = psutil.wait_procs(processes, GONE_S)
    assert not [process for process in alive if not is_zombie(process)]
    with pytest.raises(LifecycleError):
        _ = replica.server
