import logging
import subprocess
import sys

import pytest

from minirl.business_log import ConsoleHandler, ForwardingHandler, LogServer, attach, our_loggers
from rl_core.channel import new_key

WORKER = """
import sys, logging
from minirl.business_log import ForwardingHandler, LogAddress, attach
attach(ForwardingHandler(LogAddress(sys.argv[1], bytes.fromhex(sys.argv[2]))))
for number in range(50):
    logging.getLogger("rl_core.somewhere").info("worker line %d", number)
logging.getLogger("rl_core.somewhere").info("two\\nlines")
logging.getLogger("somebody.else").warning("not ours")
"""


@pytest.fixture
def console(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as stream:
        attach(ConsoleHandler(stream))
        yield path
    for logger in our_loggers():
        logger.handlers.clear()
        logger.propagate = True


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_workers_lines_arrive_in_order_before_what_the_driver_says_next(console, host):
    server = LogServer(new_key(), host)
    target = server.address
    subprocess.run(
        [sys.executable, "-c", WORKER, target.address, target.key.hex()],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    logging.getLogger("minirl.driver").info("driver line")
    server.close()
    expected = [f"[MiniRL] worker line {number}" for number in range(50)]
    expected += ["[MiniRL] two", "[MiniRL] lines", "[MiniRL] driver line"]
    assert console.read_text().splitlines() == expected


def test_a_worker_with_another_key_is_not_printed(console):
    server = LogServer(new_key(), None)
    subprocess.run(
        [sys.executable, "-c", WORKER, server.address.address, new_key().hex()],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    server.close()
    assert console.read_text() == ""


def test_a_worker_goes_on_without_the_driver():
    server = LogServer(new_key(), None)
    handler = ForwardingHandler(server.address)
    server.close()
    handler.emit(logging.LogRecord("minirl", logging.INFO, "", 0, "text", (), None))


def test_the_root_logger_is_left_alone(console):
    before = list(logging.getLogger().handlers)
    logging.getLogger("somebody").warning("text")
    assert logging.getLogger().handlers == before
    assert "text" not in console.read_text()


def test_a_line_for_a_full_disk_ends_no_run():
    with open("/dev/full", "w", buffering=1) as stream:
        handler = ConsoleHandler(stream)
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
        with pytest.raises(OSError, match="space"):
            stream.flush()
        with pytest.raises(OSError, match="space"):
            stream.close()
