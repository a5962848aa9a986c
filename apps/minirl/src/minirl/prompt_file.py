"""Reading prompts from a file: every mistake with its line or row.

JSONL, one object a line, is read here; `prompt_tables` has parquet and saved datasets.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from minirl.prompt_tables import Record, is_table, table_records
from rl_core.errors import ConfigError
from rl_core.metadata import nearest

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function; no column may have such a name."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt as its source gives it, before tokenisation.

    Attributes:
        index: position in the source, from 0.
        messages: the chat.
        text: what the user says.
        origin: where it comes from, for messages: `file:line` or the like.
        columns: all other values.
        is_chat: whether the source gave messages instead of a text.
    """

    index: int
    messages: list[dict[str, str]]
    text: str
    origin: str
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False

    @classmethod
    def of_text(
        cls, index: int, text: str, origin: str, columns: dict[str, Any] | None = None
    ) -> "RawPrompt":
        """A prompt that is a single user message."""
        return cls(index, [{"role": "user", "content": text}], text, origin, columns or {})


def read_prompt_file(path: Path, prompt_key: str) -> list[RawPrompt]:
    """The prompts of a file; blank lines are skipped.

    Args:
        path: UTF-8 with one JSON object a line, a parquet file, or the directory of a saved
            Hugging Face dataset.
        prompt_key: key or column of the prompt, a text or a list of chat messages, the same kind
            in all lines. All other keys become columns.

    Errors: ConfigError, `file:line: what is wrong` (`file row N` in tables, from 0);
    ComponentNotFoundError if a table is to be read without its library.
    """
    records = table_records(path, prompt_key) if is_table(path) else _jsonl_records(path)
    return parse_records(records, prompt_key, str(path))


def parse_records(records: Iterator[Record], prompt_key: str, source: str) -> list[RawPrompt]:
    """Prompts from records; `source` names all of them in messages. ConfigError names a bad one."""
    prompts: list[RawPrompt] = []
    for origin, record in records:
        prompt = _parse(record, prompt_key, len(prompts), origin)
        if prompts and prompt.is_chat != prompts[0].is_chat:
            raise ConfigError(f"{origin}: texts and chats are mixed; the first prompt is the other")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{source}: there are no prompts in it")
    return prompts


def _jsonl_records(path: Path) -> Iterator[Record]:
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            yield origin, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{origin}: not a JSON object: {error}") from error


def _parse(record: dict[str, Any], prompt_key: str, index: int, origin: str) -> RawPrompt:
    if prompt_key not in record:
        hint = nearest(prompt_key, record)
        msg = f"{origin}: no key {prompt_key!r} (data.prompt_key)"
        raise ConfigError(msg + (f"; the nearest is {hint!r}" if hint else ""))
    value = record.pop(prompt_key)
    _check_columns(record, origin)
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{origin}: the prompt is empty")
        return RawPrompt.of_text(index, value, origin, record)
    if value is None:
        raise ConfigError(f"{origin}: the prompt is empty")
    messages = _chat(value, origin)
    text = next(item["content"] for item in reversed(messages) if item["role"] == "user")
    return RawPrompt(index, messages, text, origin, record, is_chat=True)


def _check_columns(columns: dict[str, Any], origin: str) -> None:
    """All must be fit for reward functions, which get them by name, in another process."""
    for name, value in columns.items():
        if not isinstance(name, str):  # in a task file
            raise ConfigError(f"{origin}: the key {name!r} is no text")
        if name in RESERVED:
            raise ConfigError(f"{origin}: the key {name!r} is an argument of every reward function")
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, TypeError) as error:  # an integer of more than 64 bits
            msg = f"{origin}: the value of {name!r} cannot go to a reward function: {error}"
            raise ConfigError(f"{msg}; write it as a text") from error


def _chat(value: Any, origin: str) -> list[dict[str, str]]:
    if isinstance(value, list):
        # A table gives every message all fields; those that a message lacks are null.
        value = [_without_nulls(message) for message in value]
    try:
        messages = msgspec.convert(value, list[dict[str, str]])
    except msgspec.ValidationError as error:
        msg = f"{origin}: the prompt is neither a text nor a list of messages: {error}"
        raise ConfigError(msg) from error
    if any("role" not in message or "content" not in message for message in messages):
        raise ConfigError(f"{origin}: a message of the prompt lacks 'role' or 'content'")
    if not any(item["role"] == "user" and item["content"].strip() for item in messages):
        raise ConfigError(f"{origin}: the prompt is empty: no user message has content")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{origin}: the prompt ends with the assistant's message")
    return messages


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None}
