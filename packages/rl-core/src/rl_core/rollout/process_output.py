"""Where the output of an engine's processes goes."""

import os


def redirect_output(log_dir: str, name: str) -> None:
    """Send this process's stdout and stderr to a file."""
    os.makedirs(log_dir, exist_ok=True)
    descriptor = os.open(os.path.join(log_dir, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
