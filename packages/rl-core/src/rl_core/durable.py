"""What is written survives a power cut."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Write a file, or a directory's names (after a rename in it), through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
