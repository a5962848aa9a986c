"""Problems of any reasoning-gym data set, and their scorer as a reward function."""

import functools
import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.prompt_file import RawPrompt
from rl_core.errors import ComponentNotFoundError, ConfigError
from rl_core.metadata import nearest
from rl_core.plugins import build_config

logger = logging.getLogger(__name__)

KEY = "data.reasoning_gym"
_MOST = 10_000_000
DEFAULT_SIZE = 500
"""Problems to train on where `size` is not given; reasoning-gym's own default."""

_FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What configuration checks, generators and scorers of reasoning-gym were seen to raise."""


@dataclass(frozen=True)
class Problems:
    """A data set of problems to be generated.

    Attributes:
        name: in reasoning-gym's registry.
        options: of that data set, without `seed` and `size`.
        seed: from which the seeds of both parts are derived.
        size: number of problems to train on.
        extract: which part of a completion is scored, one of `EXTRACTORS`.
        question: how to ask instead, with the entry's metadata in braces, such as
            `What is {expression}?`; None asks as the data set does.
    """

    name: str
    seed: int
    size: int = DEFAULT_SIZE
    options: Mapping[str, Any] = field(default_factory=dict)
    extract: str = "whole"
    question: str | None = None

    @classmethod
    def from_config(cls, value: str | Mapping[str, Any], seed: int) -> "Problems":
        """Read `data.reasoning_gym`: a name, or a mapping of `name` and options.

        Args:
            value: `chain_sum`, or `{name: chain_sum, min_terms: 2, size: 1000}`. The keys
                `name`, `seed`, `size`, `extract` and `question` are ours, all others the data
                set's.
            seed: of the run, used where the mapping has no `seed`.

        Errors: ConfigError for an unknown name or option (with the nearest) or a value that the
        data set refuses; ComponentNotFoundError without reasoning-gym.
        """
        given: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{KEY}: give a name or a mapping with a key name")
        own_seed, size = given.pop("seed", seed), given.pop("size", DEFAULT_SIZE)
        if not isinstance(size, int) or size < 1 or not isinstance(own_seed, int):
            raise ConfigError(f"{KEY}: size must be a positive integer, seed an integer")
        if size > _MOST:
            msg = f"{KEY}: size={size}: all are made before the run begins, {_MOST} at most"
            raise ConfigError(msg)
        extract = given.pop("extract", "whole")
        if extract not in EXTRACTORS:
            raise ConfigError(f"{KEY}: extract={extract} is none of {', '.join(EXTRACTORS)}")
        question = given.pop("question", None)
        if not (question is None or isinstance(question, str)):
            raise ConfigError(f"{KEY}: question must be a text")
        problems = cls(name, own_seed, size, given, extract, question)
        problems.asked(problems.dataset("check", 1)[0])
        return problems

    def dataset(self, part: str, size: int) -> Any:
        """reasoning-gym's object; `part` (train, eval) decides the seed of its problems."""
        registry = _registry()
        if self.name not in registry:
            hint = nearest(self.name, registry)
            raise ConfigError(f"{KEY}: no data set named {self.name!r}; the nearest is {hint!r}")
        dataset_class, config_class = registry[self.name]
        values = {**self.options, "seed": self._seed_of(part), "size": size}
        config = build_config(config_class, values, KEY)
        try:
            return dataset_class(config=config)
        except _FOREIGN as error:
            raise ConfigError(f"{KEY} ({self.name}): {error}") from error

    def asked(self, entry: Mapping[str, Any]) -> str:
        """The question of an entry, as the model gets it.

        Errors: ConfigError if the template names what the entry's metadata lacks.
        """
        if self.question is None:
            return str(entry["question"])
        try:
            return self.question.format(**entry["metadata"])
        except (LookupError, ValueError) as error:
            known = ", ".join(entry["metadata"])
            msg = f"{KEY}: question={self.question!r} cannot be filled; there is {known}"
            raise ConfigError(msg) from error

    def split(self, eval_size: int) -> tuple[list[RawPrompt], list[RawPrompt]]:
        """Problems to train on and `eval_size` different held-out ones; no question is in both.

        Errors: ConfigError if the options allow too few different questions.
        """
        questions: set[str] = set()
        held_out = self._draw("eval", eval_size, questions, distinct=True)
        return self._draw("train", self.size, questions, distinct=False), held_out

    def _draw(self, part: str, wanted: int, taken: set[str], *, distinct: bool) -> list[RawPrompt]:
        """The first `wanted` problems whose question is not `taken`.

        The pool grows when it proves too small: some data sets allocate for their whole size.
        """
        for factor in (1, 2, 4, 8, 16) if wanted else ():
            seen = set(taken)
            found: list[RawPrompt] = []
            for index, entry in enumerate(self._entries(part, wanted * factor)):
                if entry["question"] in seen:
                    continue
                if distinct:
                    seen.add(entry["question"])
                found.append(self._prompt(part, index, entry))
                if len(found) == wanted:
                    taken.update(seen)
                    return found
        if not wanted:
            return []
        msg = f"{KEY} ({self.name}): too few different questions for {wanted} prompts to {part}"
        raise ConfigError(msg)

    def _entries(self, part: str, size: int) -> Any:
        dataset = self.dataset(part, size)
        for index in range(size):
            try:
                yield _plain(dataset[index])
            except _FOREIGN as error:
                raise ConfigError(f"{KEY} ({self.name}): problem {index}: {error}") from error

    def _prompt(self, part: str, index: int, entry: dict[str, Any]) -> RawPrompt:
        origin = f"{self.name} {part} problem {index}"
        columns = {"entry": entry, "answer": entry["answer"]}
        return RawPrompt.of_text(index, self.asked(entry), origin, columns)

    def _seed_of(self, part: str) -> int:
        digest = hashlib.sha256(f"{self.seed} {self.name} {part}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def whole(completion: str) -> str:
    """The completion without white space around it."""
    return completion.strip()


def last_number(completion: str) -> str:
    """The last decimal number of the completion; empty if there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion)
    return found[-1].rstrip(",") if found else ""


EXTRACTORS: Mapping[str, Callable[[str], str]] = {"whole": whole, "last_number": last_number}


def make_reward(
    name: str, options: Mapping[str, Any], extract: str = "whole"
) -> Callable[..., list[float]]:
    """The data set's own scorer as a reward function; runs in the reward process.

    An answer that makes the scorer fail (many parse it without checks) gets 0. Many scorers give
    a part of the reward where the right answer is only a part of what they are given.

    Args:
        name: of the data set.
        options: that it was made with; the scorers of some depend on them.
        extract: which part of a completion they are given, one of `EXTRACTORS`.
    """
    answer_of = EXTRACTORS[extract]
    dataset = Problems(name, 0, 1, options).dataset("score", 1)

    def score(answer: str, entry: Any) -> float:
        try:
            return float(dataset.score_answer(answer, entry))
        except _FOREIGN as error:
            logger.info("scored 0, since %s's scorer failed on %r: %s", name, answer, error)
            return 0.0

    def reward(completions: Sequence[str], entry: Sequence[Any]) -> list[float]:
        """One reward a completion."""
        pairs = zip(completions, entry, strict=True)
        return [score(answer_of(text), untagged(item)) for text, item in pairs]

    return reward


def tagged(value: Any) -> Any:
    """`value` with its tuples marked: some scorers tell them from lists, msgpack does not."""
    if isinstance(value, Mapping):
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [tagged(item) for item in value]}
    return [tagged(item) for item in value] if isinstance(value, list) else value


def untagged(value: Any) -> Any:
    """The inverse of `tagged`."""
    if isinstance(value, Mapping):
        if set(value) == {"__tuple__"}:
            return tuple(untagged(item) for item in value["__tuple__"])
        return {key: untagged(item) for key, item in value.items()}
    return [untagged(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """The same data in Python's own types; entries hold numpy scalars and str subclasses."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


@functools.cache
def _registry() -> dict[str, tuple[Any, Any]]:
    """Names and classes; importing takes seconds and compiles files that Python warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            msg = f"{KEY}: {error}; install it: pip install 'rl-minirl[reasoning-gym]'"
            raise ComponentNotFoundError(msg) from error
    return dict(DATASETS)
