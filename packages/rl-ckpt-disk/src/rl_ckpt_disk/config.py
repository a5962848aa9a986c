"""Options of the disk engine (`checkpoint_engine.options`)."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import ConfigError


@dataclass(frozen=True)
class DiskConfig:
    """Where checkpoints go and how many stay."""

    root_dir: str = "/tmp/minirl_checkpoint"
    """Directory on a file system that senders and receivers share; each run gets one inside."""

    model_dir: str | None = None
    """Hugging Face directory whose config, tokenizer and other small files are put beside the
    weights of every version, so that an engine can load the directory itself. None: weights only.
    """

    keep_last: int = 2
    """Versions finalized with success that stay, the newest included; older ones go once nobody
    reads them."""

    max_shard_megabytes: float = 4096.0
    """Largest weights file, in MiB; a larger tensor gets a file of its own."""

    def __post_init__(self) -> None:
        if not Path(self.root_dir).is_absolute():
            raise ConfigError(f"root_dir must be an absolute path, not {self.root_dir!r}")
        if self.model_dir is not None and not Path(self.model_dir).is_dir():
            raise ConfigError(f"model_dir {self.model_dir!r} is not a directory")
        if self.keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, not {self.keep_last}")
        if not 0 < self.max_shard_megabytes < math.inf:
            msg = f"max_shard_megabytes must be positive and finite, not {self.max_shard_megabytes}"
            raise ConfigError(msg)

    def check_files(self) -> Path:
        """Directory, `root_dir` or the nearest above it that exists, in which one can write.

        ConfigError if one cannot. For the program that starts senders on its own host.
        """
        root = Path(self.root_dir)
        existing = next(path for path in (root, *root.parents) if path.exists())
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            msg = f"root_dir={self.root_dir}: cannot write to {existing}: {error.strerror}"
            raise ConfigError(msg) from error
        return existing
