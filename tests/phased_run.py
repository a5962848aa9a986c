"""`minirl` in three phases of the same length: two negative controls, then a healthy run.

frozen    the learning rate is 0; weights are synced as always
unsynced  the actor is trained; every weight sync is left out, so the engine serves what it served
healthy   trained and synced

Then many syncs in a row; what the processes hold before and after them is in holdings.json. Then it
goes on until somebody ends it.
"""

import itertools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from holdings import holdings
from phases import FROZEN, HOLDINGS, STEPS, SYNCS, UNSYNCED

from minirl import system
from minirl.main import run
from minirl.trainer import Trainer
from rl_core.versions import PolicyVersion

BEGUN = time.time()


class FrozenAtFirst(system.FusedActorRolloutWorker):
    """Its learning rate is 0 at first. This module is `__main__`: Ray ships it by value."""

    def init_model(self, backend, config, place):
        from rl_train_fsdp import update

        super().init_model(backend, config, place)
        scheduled, first = update.learning_rate, FROZEN[-1]
        update.learning_rate = lambda optimizer, iteration: (
            0.0 if iteration < first else scheduled(optimizer, iteration - first)
        )


_is_sync_step = Trainer._is_sync_step


def _unless_left_out(self, step):
    # The sync after the last step of a phase is for the first step of the next.
    return step not in UNSYNCED[:-1] and _is_sync_step(self, step)


_fit = Trainer.fit


def _fit_and_sync_on(self):
    _fit(self)
    held = [holdings(BEGUN)]
    synced = STEPS + SYNCS[self._config.rollout.name]
    for step in range(STEPS + 1, synced + 1):
        self._system.weight_sync.sync(PolicyVersion(1, step), "trained")
    held.append(holdings(BEGUN))
    (self._output.path / HOLDINGS).write_text(json.dumps(held))
    for step in itertools.count(synced + 1):
        self._step(step)


system.FusedActorRolloutWorker = FrozenAtFirst
Trainer._is_sync_step = _unless_left_out
Trainer.fit = _fit_and_sync_on

if __name__ == "__main__":
    run()
