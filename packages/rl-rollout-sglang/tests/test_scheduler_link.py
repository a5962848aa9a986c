"""Calls reach every scheduler and come back in rank order; a failure or a death is named."""

import contextlib
import threading

import msgspec
import pytest

from rl_core.channel import connect
from rl_core.deadlines import Deadline
from rl_core.errors import RolloutError, TransferError
from rl_rollout_sglang.scheduler_link import SchedulerLink
from rl_rollout_sglang.scheduler_protocol import Answer, Command, Hello

LIMIT_S = 10.0


class Scheduler(threading.Thread):
    """Stands for one rank: answers each command by its rank and arguments."""

    def __init__(self, link, rank, answer=None):
        super().__init__(daemon=True)
        self.link, self.rank = link, rank
        self.answer = answer or (lambda command: [rank, *msgspec.msgpack.decode(command.arguments)])
        self.start()

    def run(self):
        channel = connect(self.link.address, self.link.key, Command, Deadline.after(LIMIT_S))
        with channel, contextlib.suppress(TransferError):
            channel.send(Hello(self.rank, 100 + self.rank, 1), Deadline.after(LIMIT_S))
            while True:
                command = channel.receive(Deadline.after(LIMIT_S))
                value = self.answer(command)
                if isinstance(value, str):
                    answer = Answer(command.number, failure=value)
                elif value is None:
                    return
                else:
                    answer = Answer(command.number, msgspec.msgpack.encode(value))
                channel.send(answer, Deadline.after(LIMIT_S))


@pytest.fixture
def link():
    link = SchedulerLink(2)
    yield link
    link.close()


def test_results_come_in_rank_order_whoever_connects_first(link):
    Scheduler(link, 1)
    Scheduler(link, 0)
    assert link.call("m", [["a"], ["b"]], lambda: None) == [[0, "a"], [1, "b"]]
    assert link.call("m", [["c"], ["d"]], lambda: None) == [[0, "c"], [1, "d"]]
    assert [peer.pid for peer in link.peers] == [100, 101]


def test_a_failure_names_the_rank_and_leaves_the_link_usable(link):
    failing = [True]
    Scheduler(link, 0)
    Scheduler(link, 1, lambda command: "ValueError: no" if failing.pop() else [1])
    with pytest.raises(RolloutError, match="'m' failed on rank 1: ValueError: no"):
        link.call("m", [[], []], lambda: None)
    failing.append(False)
    assert link.call("m", [[], []], lambda: None) == [[0], [1]]


def test_a_death_is_told_at_once(link):
    Scheduler(link, 0)
    Scheduler(link, 1, lambda command: None)
    with pytest.raises(RolloutError, match="does not answer 'm'"):
        link.call("m", [[], []], lambda: None)
