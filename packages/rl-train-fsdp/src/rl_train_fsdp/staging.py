"""Directories that appear under their name complete or not at all."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from rl_core.durable import sync_path

if TYPE_CHECKING:
    from pathlib import Path


def staged_path(path: Path) -> Path:
    """Where the contents of `path` are written before it exists; on the same file system."""
    return path.with_name(f".{path.name}.staged")


def begin(path: Path) -> Path:
    """An empty staging directory for `path`, without remains of an interrupted earlier try."""
    staged = staged_path(path)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    return staged


def publish(path: Path) -> None:
    """Give the staged directory its name, durably; a directory of that name is replaced."""
    staged, old = staged_path(path), path.with_name(f".{path.name}.old")
    for item in sorted(staged.rglob("*")):
        sync_path(item)
    sync_path(staged)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    staged.rename(path)
    sync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)
