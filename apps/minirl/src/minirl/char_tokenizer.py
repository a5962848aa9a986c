"""The tokenizer of the embedded model: one token per printable ASCII character.

The files are written by hand instead of with `save_pretrained`, so that they are the same bytes
under every version of transformers, and load with `AutoTokenizer` of versions 4 and 5 alike.
"""

import json
from pathlib import Path

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
VOCABULARY = (PAD, END, UNKNOWN, *ROLES, *CHARACTERS)
"""Tokens in the order of their ids; characters outside of it become `UNKNOWN`."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Write the tokenizer's `FILES`.

    Args:
        directory: exists already.
        max_length: tokens that the model can attend to.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in VOCABULARY[:6]]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
