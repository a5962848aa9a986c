"""Says, where seeds of requests do not count, that they do not."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class SeedNotice:
    """One line at the first seed, and no more."""

    def __init__(self, honoured: Callable[[], bool]) -> None:
        """Args: honoured: whether seeds count in this engine."""
        self._honoured = honoured
        self._said = False

    def see(self, seed: int | None) -> None:
        """Look at the seed of a request, None if it has none."""
        if not (seed is None or self._said or self._honoured()):
            self._said = True
            logger.warning(
                "SGLang ignores the seeds of requests here; on an accelerator "
                "rollout.engine_kwargs.enable_deterministic_inference=true makes them count"
            )
