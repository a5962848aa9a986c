"""What both sides of `beside_trl.py` share: doing a step when told to, and the reward.

Needs nothing but Python: TRL's environment knows none of our packages.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any


class Turns:
    """This process's end of the pipes that it was started with.

    It says one line of JSON when it is ready, and one after each step; it is told one line before
    each. Standard input and output are taken away from whatever else reads or prints here.
    """

    def __init__(self) -> None:
        self._orders = os.fdopen(os.dup(0), encoding="utf-8")
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def say(self, **report: Any) -> None:
        """What there is to tell of the step that was done, or of the start."""
        self._answers.write(json.dumps(report) + "\n")
        self._answers.flush()

    def wait(self) -> None:
        """Return when the next step is wanted; SystemExit if none will ever be."""
        if not self._orders.readline():
            sys.exit("nobody wants a step any more")


def reward(completions: Sequence[Any], **_columns: Any) -> list[float]:
    """Share of different characters in what the model said: all that matters is that it varies."""
    texts = [messages[-1]["content"] for messages in completions]
    return [len(set(text)) / max(1, len(text)) for text in texts]
