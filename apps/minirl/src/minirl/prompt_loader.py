"""Batches of prompts in an order that depends on the seed and the epoch only."""

import random
from collections.abc import Mapping
from typing import Any

from minirl.prompts import Prompt, PromptSet
from rl_core.errors import ConfigError


class PromptLoader:
    """Hands out batches without end.

    Each epoch visits every prompt once, in an order of its own. A batch may begin in one epoch and
    end in the next, so that all batches are equally large and no prompt is dropped.
    """

    def __init__(self, prompts: PromptSet, batch_size: int, *, shuffle: bool, seed: int) -> None:
        """Start at the first epoch.

        Args:
            prompts: at least one.
            batch_size: prompts in a batch; may exceed the number of prompts.
            shuffle: another order in each epoch; False keeps that of the data set.
            seed: of the order.
        """
        if not prompts or batch_size < 1:
            raise ConfigError("data.train_batch_size must be positive and there must be prompts")
        self._prompts = prompts
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    def next_batch(self) -> list[Prompt]:
        """The next `batch_size` prompts."""
        return [self._prompts[self._next_index()] for _ in range(self._batch_size)]

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as plain values for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "prompts": len(self._prompts),
            "digest": self._prompts.digest,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken.

        Errors: ConfigError if it was taken with another data set, seed or order, since the
        position would then mean other prompts.
        """
        mine = self.state()
        for key in ("prompts", "seed", "shuffle", "digest"):
            if state[key] != mine[key]:
                msg = (
                    f"data: the checkpoint was written with {key}={state[key]} of the training "
                    f"prompts, this run has {key}={mine[key]}"
                )
                raise ConfigError(msg)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _next_index(self) -> int:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        index = self._order[self._position]
        self._position += 1
        return index

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"order {self._seed} {epoch}").shuffle(order)
        return order
