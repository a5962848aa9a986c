"""One way to render what happened: `key=value, key=value`, units in the names."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


def kv(**fields: Any) -> str:
    """Fields as `key=value` joined by commas, in the order given; for log lines.

    Booleans read `true`/`false`, floats keep four significant digits, None reads `none`.
    """
    return ", ".join(f"{key}={render(value)}" for key, value in fields.items())


def render(value: Any) -> str:
    """One value as `kv` shows it."""
    match value:
        case bool():
            text = "true" if value else "false"
        case None:
            text = "none"
        case Enum():
            text = str(value.value)
        case float():
            text = f"{value:.4g}"
        case Mapping():
            text = "{" + ", ".join(f"{key}: {render(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            text = "[" + ", ".join(render(item) for item in value) + "]"
        case _:
            text = str(value)
    return text
