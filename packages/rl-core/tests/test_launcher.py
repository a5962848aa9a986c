import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, DigestMismatchError, TransferError
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.process_tree import start_time
from rl_core.testing.process_wire import RemoteError

HERE = str(Path(__file__).parent)
CALL_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def _importable():
    sys.path.append(HERE)
    yield
    sys.path.remove(HERE)


PRELOADS = {"new": (), "forked": ("rl_core.testing.process_wire",)}


@pytest.fixture(params=PRELOADS)
def launch(request, tmp_path):
    handles = []

    def start(cls="launched:Counter", kwargs=None, env=None):
        launcher = ProcessLauncher(tmp_path, PRELOADS[request.param])
        handles.append(launcher.launch(cls, kwargs or {}, env or {}, Placement()))
        return handles[-1]

    yield start
    for handle in handles:
        handle.kill()


def gone(pid, within=10.0):
    end = time.monotonic() + within
    while start_time(pid) is not None and time.monotonic() < end:
        time.sleep(0.01)
    return start_time(pid) is None


def test_calls_results_and_order(launch):
    counter = launch(kwargs={"start": 5})
    pending = [counter.submit("add", 1) for _ in range(5)]
    assert [call.result(CALL_S) for call in pending] == [6, 7, 8, 9, 10]


def test_async_methods_run_concurrently_and_beside_sync_ones(launch):
    counter = launch()
    waiting = counter.submit("wait")
    assert counter.call("add", 1, timeout=CALL_S) == 1
    counter.call("open", timeout=CALL_S)
    assert waiting.result(CALL_S) == "opened"


def test_environment_is_set_before_anything_and_imports_are_light(launch):
    counter = launch(env={"FLAG": "up"})
    assert counter.call("environment", timeout=CALL_S) == "up"
    for name in ("torch", "pytest", "hypothesis", "numpy"):
        assert not counter.call("imported", name, timeout=CALL_S)


@pytest.mark.parametrize(
    "error",
    [ConfigError("bad key"), DigestMismatchError("differs", ["a", "b"]), ValueError("plain")],
)
def test_exceptions_cross_with_type_and_message(launch, error):
    with pytest.raises(type(error), match=str(error)) as caught:
        launch().call("fail", error, timeout=CALL_S)
    assert type(caught.value) is type(error)
    assert getattr(caught.value, "tensors", ()) == getattr(error, "tensors", ())


def test_an_exception_that_does_not_pickle_keeps_its_text(launch):
    counter = launch()
    with pytest.raises(RemoteError, match="LocalError: seen here only"):
        counter.call("unpicklable", timeout=CALL_S)
    with pytest.raises((RemoteError, AttributeError, pickle.PicklingError)):
        counter.call("returns_unpicklable", timeout=CALL_S)
    with pytest.raises(AttributeError, match="missing"):
        counter.call("missing", timeout=CALL_S)
    assert counter.call("add", 1, timeout=CALL_S) == 1


def test_an_error_of_the_constructor_is_raised_by_every_call(launch):
    broken = launch("launched:Broken")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be built"):
            broken.call("anything", timeout=CALL_S)


def test_a_timeout_leaves_the_process_usable(launch):
    counter = launch()
    with pytest.raises(TimeoutError):
        counter.call("forever", timeout=0.05)
    assert counter.call("add", 2, timeout=CALL_S) == 2


def test_kill_ends_daemonised_grandchildren_and_is_idempotent(launch):
    counter = launch()
    daemon = counter.call("start_daemon", timeout=CALL_S)
    assert start_time(daemon) is not None
    waiting = counter.submit("forever")
    counter.kill()
    counter.kill()
    assert not counter.alive
    assert gone(daemon)
    with pytest.raises(TransferError, match="ended"):
        waiting.result(CALL_S)
    with pytest.raises(TransferError, match="gone"):
        counter.submit("add", 1)


def test_a_crash_is_told_to_the_caller_and_leaves_nothing(launch):
    counter = launch()
    daemon = counter.call("start_daemon", timeout=CALL_S)
    with pytest.raises(TransferError, match="Counter"):
        counter.call("exit", timeout=CALL_S)
    assert gone(daemon)
    assert gone(counter.pid)


def test_output_goes_to_a_file(launch, tmp_path):
    launch().call("say", "hello from there", timeout=CALL_S)
    texts = [path.read_text() for path in tmp_path.glob("*.log")]
    assert any("hello from there" in text for text in texts)


def test_a_handle_can_be_used_from_another_process(launch, tmp_path):
    counter = launch(kwargs={"start": 1})
    counter.call("add", 1, timeout=CALL_S)
    (tmp_path / "handle").write_bytes(pickle.dumps(counter))
    code = (
        "import pickle, sys; handle = pickle.loads(open(sys.argv[1], 'rb').read());"
        "handle.call('add', 40, timeout=30)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "handle")], check=True, timeout=60)
    assert counter.call("add", 0, timeout=CALL_S) == 42


def test_what_was_preloaded_is_there_and_the_rest_is_of_the_moment(tmp_path, monkeypatch):
    """The template imports once; environment and directory are those at the launch."""
    launcher = ProcessLauncher(tmp_path, ["fractions"])
    first = launcher.launch("launched:Counter", {}, {}, Placement())
    monkeypatch.setenv("FLAG", "raised since")
    monkeypatch.chdir(tmp_path)
    second = launcher.launch("launched:Counter", {}, {}, Placement())
    try:
        assert first.call("environment", timeout=CALL_S) is None
        assert second.call("environment", timeout=CALL_S) == "raised since"
        assert second.call("directory", timeout=CALL_S) == str(tmp_path)
        assert second.call("imported", "fractions", timeout=CALL_S)
    finally:
        first.kill()
        second.kill()


@pytest.mark.parametrize("preload", PRELOADS.values(), ids=PRELOADS)
def test_the_process_dies_with_its_launcher(preload):
    code = f"""
import sys, threading, time
sys.path.append({HERE!r})
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
handles = []
def start():
    launcher = ProcessLauncher(preload={preload})
    handles.append(launcher.launch("launched:Counter", {{}}, {{}}, Placement()))
thread = threading.Thread(target=start); thread.start(); thread.join()
time.sleep(0.2)  # outlives the thread that launched it
print(handles[0].pid, handles[0].call("start_daemon", timeout=30), flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    host, daemon = map(int, parent.stdout.readline().split())
    assert start_time(host) is not None
    parent.kill()
    parent.communicate(timeout=30)
    assert gone(host)
    assert gone(daemon)


def test_many_processes_leave_no_files_open(launch):
    launch().kill()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        counter = launch()
        counter.call("add", 1, timeout=CALL_S)
        counter.kill()
    time.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
