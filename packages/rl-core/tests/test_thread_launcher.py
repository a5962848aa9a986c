import pytest

from rl_core.errors import ComponentLoadError, TransferError
from rl_core.interfaces import Handle, Placement
from rl_core.testing.thread_launcher import ThreadLauncher


@pytest.fixture
def counter():
    handle = ThreadLauncher().launch("launched:Counter", {"start": 5}, {}, Placement())
    yield handle
    handle.kill()


def test_calls_run_in_order_and_async_ones_beside_them(counter: Handle):
    waiting = counter.submit("wait")
    pending = [counter.submit("add", 1) for _ in range(3)]
    assert [call.result(10) for call in pending] == [6, 7, 8]
    counter.call("open", timeout=10)
    assert waiting.result(10) == "opened"


def test_errors_and_timeouts(counter: Handle):
    with pytest.raises(KeyError, match="inside"):
        counter.call("fail", KeyError("inside"), timeout=10)
    with pytest.raises(TimeoutError):
        counter.call("forever", timeout=0.02)
    with pytest.raises(ValueError, match="cannot be built"):
        ThreadLauncher().launch("launched:Broken", {}, {}, Placement())
    with pytest.raises(ComponentLoadError):
        ThreadLauncher().launch("launched:Missing", {}, {}, Placement())


def test_kill_ends_waiting_calls_and_is_idempotent(counter: Handle):
    waiting = counter.submit("forever")
    counter.kill()
    counter.kill()
    with pytest.raises(TransferError, match="ended"):
        waiting.result(10)
    with pytest.raises(TransferError, match="ended"):
        counter.submit("add", 1)
