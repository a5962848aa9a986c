"""Prompts that are longer than `data.max_prompt_length`: refused, left out or cut."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from minirl.prompt_encoder import PromptEncoder, num_bytes
from minirl.prompt_file import RawPrompt
from rl_core.errors import ConfigError

_logger = logging.getLogger(__name__)

ERROR, DROP, TRUNCATE = "error", "drop", "truncate"
POLICIES = (ERROR, DROP, TRUNCATE)
_CHUNK = 4000
_MANY = 20000
"""From so many on (about 5 s) it is said what takes the time."""


class LengthLimit:
    """Makes sure that no prompt has more tokens than allowed, before a run begins."""

    def __init__(self, encoder: PromptEncoder, max_length: int, policy: str) -> None:
        """Apply `policy` (one of `POLICIES`) above `max_length` tokens, template included."""
        self._encoder = encoder
        self._max_length = max_length
        self._policy = policy

    def apply(self, prompts: list[RawPrompt], source: str) -> list[RawPrompt]:
        """The prompts that fit, in their order; what was done to how many of them is logged.

        With `truncate` the last user message loses its beginning; the template stays whole.

        Args:
            prompts: of one source.
            source: how messages call it.

        Errors: ConfigError names the first one that is too long (`error`), one that cannot be cut
        so far, or says that none is left.
        """
        long = self._too_long(prompts)
        if not long:
            return prompts
        if self._policy == DROP:
            self._tell("left out", prompts, long, source)
            kept = [raw for at, raw in enumerate(prompts) if at not in long]
            if kept:
                return kept
            msg = f"{source}: every prompt is longer than data.max_prompt_length={self._max_length}"
            raise ConfigError(msg)
        self._tell("cut", prompts, long, source)
        return [self._cut(raw) if at in long else raw for at, raw in enumerate(prompts)]

    def _too_long(self, prompts: Sequence[RawPrompt]) -> dict[int, int]:
        """Lengths in tokens by position, of those only that exceed the limit."""
        if not prompts:
            return {}
        suspects = self._suspects(prompts)
        if len(suspects) > _MANY:
            _logger.info("Counting the tokens of %d long prompts.", len(suspects))
        found: dict[int, int] = {}
        for start in range(0, len(suspects), _CHUNK):
            chunk = suspects[start : start + _CHUNK]
            encoded = self._encoder.encode([prompts[at] for at in chunk])
            lengths = {at: len(ids) for at, ids in zip(chunk, encoded, strict=True)}
            found |= {at: size for at, size in lengths.items() if size > self._max_length}
            if found and self._policy == ERROR:
                self._refuse(prompts, found)
        return found

    def _suspects(self, prompts: Sequence[RawPrompt]) -> list[int]:
        """Positions of those that may be too long.

        What a template adds for a message depends on the roles in the chat: many put a system
        message in front of one that has none. The first prompt with the same roles has all that.
        """
        added: dict[tuple[str, ...], int] = {}
        suspects = []
        for at, raw in enumerate(prompts):
            roles = tuple(message["role"] for message in raw.messages)
            if roles not in added:
                added[roles] = len(self._encoder.encode([raw])[0])
            if num_bytes(raw) + added[roles] * len(roles) > self._max_length:
                suspects.append(at)
        return suspects

    def _refuse(self, prompts: Sequence[RawPrompt], long: dict[int, int]) -> None:
        at, size = next(iter(long.items()))
        msg = (
            f"{prompts[at].origin}: the prompt has {size} tokens, data.max_prompt_length is "
            f"{self._max_length}; raise it, or choose data.on_long_prompt=drop or truncate"
        )
        raise ConfigError(msg)

    def _tell(
        self, done: str, prompts: Sequence[RawPrompt], long: dict[int, int], source: str
    ) -> None:
        at = next(iter(long))
        _logger.warning(
            "%s: %d of %d prompts have more than %d tokens and were %s (the first: %s)",
            source,
            len(long),
            len(prompts),
            self._max_length,
            done,
            prompts[at].origin,
        )

    def _cut(self, raw: RawPrompt) -> RawPrompt:
        """The end of the text that fits; a question usually stands at the end."""
        cuts = range(1, len(raw.text))
        first = bisect_left(cuts, 1, key=lambda cut: int(self._fits(_without_beginning(raw, cut))))
        if first == len(cuts):
            msg = f"{raw.origin}: cannot be cut to data.max_prompt_length={self._max_length}"
            raise ConfigError(f"{msg}: the other messages or the template are too long")
        return _without_beginning(raw, cuts[first])

    def _fits(self, raw: RawPrompt) -> bool:
        return len(self._encoder.encode([raw])[0]) <= self._max_length


def _without_beginning(raw: RawPrompt, cut: int) -> RawPrompt:
    at = max(at for at, message in enumerate(raw.messages) if message["role"] == "user")
    text = raw.text[cut:]
    messages = [*raw.messages]
    messages[at] = {**messages[at], "content": text}
    return replace(raw, messages=messages, text=text)
