"""The section `data` of a configuration, for tests that need no other."""

from types import SimpleNamespace


def settings_with(**changes):
    values = {
        "task": "repeat",
        "path": None,
        "reasoning_gym": None,
        "prompt_key": "prompt",
        "eval_path": None,
        "eval_size": 0,
        "max_prompt_length": 512,
        "on_long_prompt": "error",
    }
    return SimpleNamespace(**{**values, **changes})
