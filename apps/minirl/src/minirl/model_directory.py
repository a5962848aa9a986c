"""Model directories that the app makes itself: complete or absent, never half-written."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rl_core.errors import ConfigError, MiniRLError

RECORD = "minirl.json"
"""File with the digests of the others, and how they were made."""

_ATTEMPTS = 8


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/minirl`, or `~/.cache/minirl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirl"


def ensure_directory(target: Path, build: Callable[[Path], None]) -> None:
    """Make `target` complete, unless it is.

    Several processes may call this at once: each builds in a directory of its own beside the
    target, the first rename wins. A target that is not complete is replaced.

    Args:
        target: directory to make.
        build: fills an empty directory and ends with `write_record`.

    Errors: ConfigError if it cannot be written.
    """
    if is_complete(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        build(stage)
        stage.chmod(0o755)
        _move_into_place(stage, target)
    except MiniRLError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_record(directory: Path, files: Sequence[str], recipe: dict[str, Any]) -> None:
    """Write the digests of `files`, without which the directory does not count as complete."""
    digests = {name: _digest(directory / name) for name in files}
    text = json.dumps({"recipe": recipe, "xxh3_128": digests}, indent=1)
    (directory / RECORD).write_text(text)


def is_complete(directory: Path) -> bool:
    """Whether all files that its record lists are there with the bytes that were written."""
    try:
        digests = json.loads((directory / RECORD).read_text())["xxh3_128"]
        return all(_digest(directory / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=1))


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on the terminal while it loads or saves."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _move_into_place(stage: Path, target: Path) -> None:
    """Rename `stage` to `target`, unless another process has just finished the same."""
    for _ in range(_ATTEMPTS):
        try:
            stage.rename(target)
        except OSError:
            if is_complete(target):
                return
            _remove_damaged(target)
        else:
            return
    raise OSError("it reappears incomplete; is another version writing there?")


def _remove_damaged(target: Path) -> None:
    """Move away before deleting: no reader sees a directory that is being emptied."""
    away = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        target.rename(away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
