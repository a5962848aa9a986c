"""Prompts to train on and to evaluate on, from any of the sources that `data` can name.

Reading a data set checks every line, so that a bad one stops the run before anything starts.
Token ids are made when a prompt is asked for: a large file costs no start-up time for them.
"""

import heapq
import logging
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import msgspec
import xxhash

from minirl import repeat_task
from minirl.prompt_file import RawPrompt, read_prompt_file
from rl_core.errors import ConfigError
from rl_core.metadata import nearest

logger = logging.getLogger(__name__)

TASKS = ("repeat",)
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

    def __init__(self, raw: Sequence[RawPrompt], tokenizer: Any, max_length: int) -> None:
        """Check the lengths.

        Args:
            raw: at least one, or none for an empty set.
            tokenizer: of the model, as `transformers.AutoTokenizer` loads it.
            max_length: tokens allowed, chat template included.

        Errors: ConfigError names a prompt that is too long or that the chat template
        refuses.
        """
        self._raw = raw
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._check()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names that any of the prompts has a column for, in order of appearance."""
        return tuple(dict.fromkeys(name for raw in self._raw for name in raw.columns))

    @cached_property
    def digest(self) -> str:
        """Of all texts in their order: equal digests mean equal prompts."""
        state = xxhash.xxh3_64()
        for raw in self._raw:
            state.update(_plain_text(raw).encode() + b"\0")
        return state.hexdigest()

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, position: int) -> Prompt: ...
    @overload
    def __getitem__(self, position: slice) -> "PromptSet": ...
    def __getitem__(self, position: int | slice) -> "Prompt | PromptSet":
        if isinstance(position, slice):
            return PromptSet(self._raw[position], self._tokenizer, self._max_length)
        raw = self._raw[position]
        return Prompt(
            index=raw.index,
            messages=raw.messages,
            text=raw.text,
            prompt_ids=self._encode([raw])[0],
            columns=raw.columns,
            is_chat=raw.is_chat,
        )

    def _check(self) -> None:
        """Tokenise those that might be too long or unreadable, the longest if they are many.

        A tokenizer makes at most one token of a byte, so a short text needs no look. Tokenising
        100,000 long prompts would take a minute; what is left out is checked when it is drawn.
        """
        if not self._raw:
            return
        room = self._max_length - len(self._encode([self._raw[0]])[0])
        suspects = [
            raw
            for raw in self._raw
            if raw.is_chat or not raw.text.isascii() or _num_bytes(raw) > room
        ]
        if len(suspects) > _CHECKED_AT_START:
            suspects = heapq.nlargest(_CHECKED_AT_START, suspects, key=_num_bytes)
        unknown = self._tokenizer.unk_token_id
        unreadable = [
            raw
            for raw, ids in zip(suspects, self._encode(suspects), strict=True)
            if unknown is not None and unknown in ids
        ]
        if unreadable:
            logger.warning(
                "%s and %d more prompts have characters that the model's tokenizer lacks",
                unreadable[0].origin,
                len(unreadable) - 1,
            )

    def _encode(self, batch: Sequence[RawPrompt]) -> list[list[int]]:
        if not batch:
            return []
        templated = self._tokenizer.chat_template is not None
        texts = [self._render(raw) if templated else _plain_text(raw) for raw in batch]
        encoded = self._tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        for raw, ids in zip(batch, encoded, strict=True):
            if len(ids) > self._max_length:
                msg = (
                    f"{raw.origin}: the prompt has {len(ids)} tokens, "
                    f"data.max_prompt_length is {self._max_length}"
                )
                raise ConfigError(msg)
        return [list(ids) for ids in encoded]

    def _render(self, raw: RawPrompt) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                raw.messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ConfigError(f"{raw.origin}: refused by the chat template: {error}") from error
        return str(text)


def load_prompts(data: DataSettings, tokenizer: Any, seed: int) -> PromptSets:
    """The data sets that the configuration names.

    `data.path` and `data.reasoning_gym` exclude each other and take precedence over `data.task`.
    Held-out prompts never occur in training. Where fewer of them exist than `data.eval_size`
    (the task `repeat` has 8), they are repeated up to that number.

    Args:
        data: `data` of the configuration.
        tokenizer: of the model, as `transformers.AutoTokenizer` loads it.
        seed: of the run; decides what is held out and which problems are generated.

    Errors: ConfigError names the file and line, or the key, that is wrong.
    """
    if data.max_prompt_length < 1 or data.eval_size < 0:
        raise ConfigError("data.max_prompt_length must be positive, data.eval_size not negative")
    if data.path is not None and data.reasoning_gym is not None:
        raise ConfigError("data.path and data.reasoning_gym exclude each other; give one")
    train, held_out = _load_raw(data, seed)
    if data.eval_size and not held_out:
        raise ConfigError("data.eval_size: there is no prompt to hold out")
    wanted = [held_out[index % len(held_out)] for index in range(data.eval_size)]
    return PromptSets(
        PromptSet(train, tokenizer, data.max_prompt_length),
        PromptSet(wanted, tokenizer, data.max_prompt_length),
    )


def _load_raw(data: DataSettings, seed: int) -> tuple[list[RawPrompt], list[RawPrompt]]:
    if data.path is not None:
        train = read_prompt_file(Path(data.path), data.prompt_key)
        return _hold_out(train, data, seed)
    if data.eval_path is not None:
        raise ConfigError("data.eval_path goes with data.path, which is null")
    if data.reasoning_gym is not None:
        from minirl.reasoning_gym_task import Problems

        return Problems.from_config(data.reasoning_gym, seed).split(data.eval_size)
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
    return train, held_out


def _hold_out(
    raw: list[RawPrompt], data: DataSettings, seed: int
) -> tuple[list[RawPrompt], list[RawPrompt]]:
    """Take the evaluation set from `eval_path`, or `eval_size` random lines of the file itself."""
    if data.eval_size == 0:
        return raw, []
    if data.eval_path is not None:
        held_out = read_prompt_file(Path(data.eval_path), data.prompt_key)[: data.eval_size]
    else:
        if data.eval_size >= len(raw):
            msg = f"data.eval_size={data.eval_size}: {data.path} has only {len(raw)} prompts"
            raise ConfigError(msg)
        held_out = random.Random(f"held-out {seed}").sample(raw, data.eval_size)
    seen = {_plain_text(item) for item in held_out}
    train = [item for item in raw if _plain_text(item) not in seen]
    if not train:
        raise ConfigError(f"{data.path}: every prompt is in the evaluation set too")
    return train, held_out


def _plain_text(raw: RawPrompt) -> str:
    return "\n".join(message["content"] for message in raw.messages)


def _num_bytes(raw: RawPrompt) -> int:
    return sum(len(message["content"].encode()) for message in raw.messages)
