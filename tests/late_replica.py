"""Imported by a run, replica 1 comes up between steps 1 and 2, and servers tell what they answer.

`served.jsonl` in the working directory gets a line for each completion: the replica that made it,
the request, and the versions of its tokens.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from ray import cloudpickle

from minirl import ray_launcher
from minirl.trainer import Trainer

SERVED = Path.cwd() / "served.jsonl"
GATE = Path.cwd() / "gate"
LATE = 1
FIRST_STEP_OF_BOTH = 2
WAIT_S = 380.0
"""Less than a whole run is given, so that the one that waits says so."""
POLL_S = 0.05


class WitnessingHost(ray_launcher.ObjectHost):
    """Holds the late replica back, and writes down what a replica answers."""

    def __init__(self, cls, kwargs, settings):
        super().__init__(cls, kwargs, settings)
        self._replica = kwargs["placement"].replica_rank

    async def invoke(self, method, args, kwargs):
        if method == "start" and self._replica == LATE:
            await asyncio.to_thread(_wait_for, GATE.exists)
        answer = await super().invoke(method, args, kwargs)
        if method == "generate":
            self._note(answer)
        return answer

    def _note(self, completions):
        with SERVED.open("a") as file:
            for completion in completions:
                versions = [str(span.version) for span in completion.version_spans]
                line = [self._replica, completion.request_id, versions]
                file.write(json.dumps(line) + "\n")


def _wait_for(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the late replica did not come up"
        time.sleep(POLL_S)


_step = Trainer._step


def _step_when_due(self, step):
    if step == FIRST_STEP_OF_BOTH:
        GATE.touch()
        _wait_for(self._system.rollout.newcomers)
    _step(self, step)


def install():
    """In the driver, before the run."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this
    ray_launcher.ObjectHost = WitnessingHost
    Trainer._step = _step_when_due
