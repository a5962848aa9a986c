"""Prompts to train on and to evaluate on, from any of the sources that `data` can name.

Reading a data set checks every line, so that a bad one stops the run before anything starts.
Token ids are made when a prompt is asked for: a large file costs no start-up time for them.
"""

import heapq
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import msgspec
import xxhash

from minirl import repeat_task
from minirl.prompt_encoder import PromptEncoder, num_bytes, plain_text
from minirl.prompt_file import RawPrompt, read_prompt_file
from minirl.prompt_length import LengthLimit
from minirl.task_file import is_task_file, read_task_file
from rl_core.errors import ConfigError
from rl_core.metadata import nearest

logger = logging.getLogger(__name__)

TASKS = ("repeat",)
Fit = Callable[[list[RawPrompt], str], list[RawPrompt]]
"""Applies the length limit to the prompts of a source."""
_CHECKED_AT_START = 2000


class DataSettings(Protocol):
    """The part of the configuration that says where prompts come from (`data.*`)."""

    task: str
    path: str | None
    reasoning_gym: str | Mapping[str, Any] | None
    prompt_key: str
    eval_path: str | None
    eval_size: int
    max_prompt_length: int
    on_long_prompt: str


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, ready to be generated from.

    Attributes:
        index: stable position in its data set (for a file: the n-th prompt, from 0).
        messages: the chat, a list of `{"role": ..., "content": ...}`.
        text: what the user says; the last user message of a chat.
        prompt_ids: token ids of the messages under the model's chat template, generation prompt
            included.
        columns: everything else that the data set says about it, for the reward function.
        is_chat: whether the data set gave a list of messages instead of a text; reward functions
            get prompts and completions in the same form.
    """

    index: int
    messages: list[dict[str, str]]
    text: str
    prompt_ids: list[int]
    columns: dict[str, Any]
    is_chat: bool = False


class PromptSets(NamedTuple):
    """What a run trains on and what it is evaluated on (`held_out` may be empty)."""

    train: "PromptSet"
    held_out: "PromptSet"


class PromptSet(Sequence[Prompt]):
    """Checked prompts that get their token ids when they are asked for."""

    def __init__(
        self,
        raw: Sequence[RawPrompt],
        encoder: PromptEncoder,
        max_length: int,
        *,
        columns: Iterable[str] = (),
        look: bool = True,
    ) -> None:
        """Look at some for what the model cannot read.

        Args:
            raw: at least one, or none for an empty set; `LengthLimit` has seen to their lengths.
            encoder: of the model.
            max_length: tokens allowed, chat template included.
            columns: names of their columns.
            look: False for a part of a set that was looked at.

        Errors: ConfigError names a prompt that the chat template refuses.
        """
        self._raw = raw
        self._encoder = encoder
        self._max_length = max_length
        self.columns = tuple(columns)
        """Names that any prompt of their source has a column for; some prompts may lack some."""
        if look:
            self._look()

    @cached_property
    def digest(self) -> str:
        """Of all texts, or chats with their roles, in order: equal digests mean equal prompts."""
        state = xxhash.xxh3_64()
        for raw in self._raw:
            state.update(msgspec.json.encode(raw.messages) if raw.is_chat else raw.text.encode())
            state.update(b"\0")
        return state.hexdigest()

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, position: int) -> Prompt: ...
    @overload
    def __getitem__(self, position: slice) -> "PromptSet": ...
    def __getitem__(self, position: int | slice) -> "Prompt | PromptSet":
        if isinstance(position, slice):
            part, names = self._raw[position], self.columns
            return PromptSet(part, self._encoder, self._max_length, columns=names, look=False)
        raw = self._raw[position]
        ids = self._encoder.encode([raw])[0]
        if len(ids) > self._max_length:
            msg = f"{raw.origin}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
            raise ConfigError(f"{msg}{self._max_length}")
        return Prompt(
            index=raw.index,
            messages=raw.messages,
            text=raw.text,
            prompt_ids=ids,
            columns=raw.columns,
            is_chat=raw.is_chat,
        )

    def _look(self) -> None:
        """Warn of characters without a token; of many suspects, look at the longest."""
        suspects = [raw for raw in self._raw if raw.is_chat or not raw.text.isascii()]
        if len(suspects) > _CHECKED_AT_START:
            suspects = heapq.nlargest(_CHECKED_AT_START, suspects, key=num_bytes)
        encoded = zip(suspects, self._encoder.encode(suspects), strict=True)
        unreadable = [raw for raw, ids in encoded if self._encoder.has_unknown(ids)]
        if unreadable:
            logger.warning(
                "%s and %d more prompts have characters that the model's tokenizer lacks",
                unreadable[0].origin,
                len(unreadable) - 1,
            )


def load_prompts(
    data: DataSettings, tokenizer: Any, seed: int, log_path: Path | None = None
) -> PromptSets:
    """The data sets that the configuration names.

    `data.path`, `data.reasoning_gym` and a file as `data.task` exclude each other; the first two
    take precedence over a task of ours.
    Held-out prompts never occur in training. Where fewer of them exist than `data.eval_size`
    (the task `repeat` has 8), they are repeated up to that number.

    Args:
        data: `data` of the configuration.
        tokenizer: of the model, as `transformers.AutoTokenizer` loads it.
        seed: of the run; decides what is held out and which problems are generated.

        log_path: file that gets what a task file prints; None is stderr.

    Errors: ConfigError names the file and line, or the key, that is wrong.
    """
    if data.max_prompt_length < 1 or data.eval_size < 0:
        raise ConfigError("data.max_prompt_length must be positive, data.eval_size not negative")
    _check_one_source(data)
    encoder = PromptEncoder(tokenizer)
    limit = LengthLimit(encoder, data.max_prompt_length, data.on_long_prompt)
    raw = _load_raw(data, seed, limit.apply, log_path)
    if data.eval_size and not raw.held_out:
        raise ConfigError("data.eval_size: there is no prompt to hold out")
    wanted = [raw.held_out[index % len(raw.held_out)] for index in range(data.eval_size)]
    longest = data.max_prompt_length
    return PromptSets(
        PromptSet(raw.train, encoder, longest, columns=_columns(raw.source)),
        PromptSet(wanted, encoder, longest, columns=_columns(raw.held_out_source)),
    )


def _check_one_source(data: DataSettings) -> None:
    sources = {
        "data.path": data.path is not None,
        "data.reasoning_gym": data.reasoning_gym is not None,
        f"data.task={data.task}": is_task_file(data.task),
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        msg = f"{' and '.join(given)} exclude each other; give one"
        raise ConfigError(f"{msg} (a preset's is taken back by data.reasoning_gym=null)")


class _Raw(NamedTuple):
    """Prompts to train and to evaluate on, and all of the sources that they are from."""

    train: list[RawPrompt]
    held_out: list[RawPrompt]
    source: Sequence[RawPrompt]
    held_out_source: Sequence[RawPrompt]

    @classmethod
    def of(cls, train: list[RawPrompt], held_out: list[RawPrompt]) -> "_Raw":
        """All that their sources have."""
        return cls(train, held_out, train, held_out)


def _columns(raw: Iterable[RawPrompt]) -> dict[str, None]:
    """Names in order of appearance."""
    return dict.fromkeys(name for item in raw for name in item.columns)


def _load_raw(data: DataSettings, seed: int, fit: Fit, log_path: Path | None) -> _Raw:
    if data.path is not None:
        train = fit(read_prompt_file(Path(data.path), data.prompt_key), data.path)
        held_out = None
        if data.eval_size and data.eval_path is not None:
            held_out = fit(read_prompt_file(Path(data.eval_path), data.prompt_key), data.eval_path)
        return _hold_out(train, held_out, data, seed)
    if data.eval_path is not None:
        raise ConfigError("data.eval_path goes with data.path, which is null")
    if data.reasoning_gym is not None:
        from minirl.reasoning_gym_task import Problems

        problems = Problems.from_config(data.reasoning_gym, seed)
        train, held_out = problems.split(data.eval_size)
        return _Raw.of(fit(train, problems.name), fit(held_out, f"{problems.name} (held out)"))
    if is_task_file(data.task):
        train, held_out = read_task_file(Path(data.task), data.prompt_key, log_path)
        held_out = None if held_out is None else fit(held_out, data.task)
        return _hold_out(fit(train, data.task), held_out, data, seed)
    if data.task not in TASKS:
        hint = nearest(data.task, TASKS)
        raise ConfigError(f"data.task={data.task}: no such task; the nearest is {hint}")
    texts = (repeat_task.train_prompts(), repeat_task.held_out_prompts())
    train, held_out = (
        [
            RawPrompt.of_text(index, text, f"repeat prompt {index}")
            for index, text in enumerate(part)
        ]
        for part in texts
    )
    return _Raw.of(fit(train, "repeat"), fit(held_out, "repeat (held out)"))


def _hold_out(
    raw: list[RawPrompt], own: list[RawPrompt] | None, data: DataSettings, seed: int
) -> _Raw:
    """Take `eval_size` prompts from an evaluation set of its own, or random ones of all."""
    source = data.path or data.task
    if data.eval_size == 0:
        return _Raw.of(raw, [])
    if own is not None:
        held_out = own[: data.eval_size]
        if len(held_out) < len(own):
            which = data.eval_path or f"{source} eval_prompts"
            logger.info("%s: the first %d of %d prompts", which, len(held_out), len(own))
    else:
        if data.eval_size >= len(raw):
            msg = f"data.eval_size={data.eval_size}: {source} has only {len(raw)} prompts"
            raise ConfigError(msg)
        held_out = random.Random(f"held-out {seed}").sample(raw, data.eval_size)
    seen = {plain_text(item) for item in held_out}
    train = [item for item in raw if plain_text(item) not in seen]
    if not train:
        raise ConfigError(f"{source}: every prompt is in the evaluation set too")
    return _Raw(train, held_out, raw, raw if own is None else own)
