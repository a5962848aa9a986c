"""Token ids of prompts, under the model's chat template where it has one."""

from collections.abc import Sequence
from typing import Any

from minirl.prompt_file import RawPrompt
from rl_core.errors import ConfigError


class PromptEncoder:
    """Encodes prompts with one tokenizer, the generation prompt included."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of the model, as `transformers.AutoTokenizer` loads it."""
        self._tokenizer = tokenizer

    def encode(self, batch: Sequence[RawPrompt]) -> list[list[int]]:
        """Token ids of each; ConfigError names a prompt that the chat template refuses."""
        if not batch:
            return []
        templated = self._tokenizer.chat_template is not None
        texts = [self._render(raw) if templated else plain_text(raw) for raw in batch]
        # Not verbose: that a prompt is too long is for `LengthLimit` to say, in one line.
        encoded = self._tokenizer(texts, add_special_tokens=not templated, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def has_unknown(self, ids: Sequence[int]) -> bool:
        """Whether some characters have no token in this model."""
        unknown = self._tokenizer.unk_token_id
        return unknown is not None and unknown in ids

    def _render(self, raw: RawPrompt) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                raw.messages, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # The last four are of the template's own expressions.
            raise ConfigError(f"{raw.origin}: refused by the chat template: {error}") from error
        return str(text)


def plain_text(raw: RawPrompt) -> str:
    """The contents of all messages."""
    return "\n".join(message["content"] for message in raw.messages)


def num_bytes(raw: RawPrompt) -> int:
    """Bytes of the messages, but for their roles: a tokenizer makes at most one token of each."""
    return sum(
        len(value.encode())
        for message in raw.messages
        for key, value in message.items()
        if key != "role"
    )
