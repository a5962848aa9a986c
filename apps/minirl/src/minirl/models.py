"""Where the policy's Hugging Face directory is."""

from pathlib import Path

from minirl.smollm2 import default_directory
from minirl.tiny_model import ensure_tiny_model
from rl_core.errors import ConfigError


def resolve_model(
    local_path: str | None, key: str = "actor.model_config.local_path"
) -> tuple[Path, bool]:
    """The model directory, and whether it is the embedded model.

    Args:
        local_path: a directory; `smollm2` for the fetched one; None for the embedded model.
        key: that it was given for, for messages.
    """
    if local_path is None:
        return ensure_tiny_model(), True
    if local_path == "smollm2" and not Path(local_path).exists():
        directory = default_directory()
        if not (directory / "config.json").exists():
            msg = "SmolLM2-135M-Instruct is not on this machine yet; run: minirl fetch smollm2"
            raise ConfigError(msg)
        return directory, False
    path = Path(local_path)
    if not (path / "config.json").is_file():
        msg = (
            f"{key}={local_path}: no config.json there; give the directory of a Hugging Face "
            "causal language model"
        )
        raise ConfigError(msg)
    return path.resolve(), False
