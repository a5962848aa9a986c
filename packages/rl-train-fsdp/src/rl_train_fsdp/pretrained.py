"""A Hugging Face directory of the current weights, loadable by transformers and vLLM."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from rl_train_fsdp.model_directory import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rl_train_fsdp.model_directory import ModelDirectory

SHARD_BYTES = 4 * 1024**3
"""A safetensors file is closed before it would grow beyond this."""

_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "LICENSE*",
)


class PretrainedWriter:
    """Writes the directory as the tensors come by, one file's worth in host memory at a time.

    An error in `add` is kept and raised by `finish`, because whoever feeds it takes part in a
    collective stream that has to be drained.
    """

    def __init__(
        self, target: Path, source: ModelDirectory, dtype: str, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Nothing is written yet.

        Args:
            target: existing empty directory, by the time of the first `add`.
            source: directory whose configuration and tokenizer come along.
            dtype: what config.json shall name.
            shard_bytes: bound of one safetensors file.
        """
        self._target = target
        self._source = source
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0
        self._failure: OSError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor to the host; write a file when enough have come."""
        if self._failure is not None:
            return
        size = tensor.numel() * tensor.element_size()
        if self._open and self._open_bytes + size > self._shard_bytes:
            self._flush()
        # The stream reuses its memory, so keep a copy even where it is on the host already.
        self._open[name] = tensor.detach().to("cpu", copy=True)
        self._open_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Write what is left, the index, config.json, and the files that come along; OSError."""
        self._flush()
        if self._failure is not None:
            raise self._failure
        self._name_files()
        # Older transformers call it torch_dtype; whoever wrote the source wrote its name.
        key = "torch_dtype" if "torch_dtype" in self._source.config else "dtype"
        text = json.dumps({**self._source.config, key: self._dtype}, indent=2, sort_keys=True)
        (self._target / CONFIG_FILE).write_text(text + "\n")
        for pattern in _COMPANIONS:
            for file in self._source.path.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, self._target / file.name)

    def _flush(self) -> None:
        file = self._target / f"part-{len(self._files)}.safetensors"
        try:
            save_file(self._open, file, metadata={"format": "pt"})
        except SafetensorError as error:
            self._failure = OSError(f"{file}: {error}")
        except OSError as error:
            self._failure = error
        self._files.append((file, list(self._open)))
        self._open, self._open_bytes = {}, 0

    def _name_files(self) -> None:
        """The names that loaders expect need the number of files, known only now."""
        count = len(self._files)
        if count == 1:
            self._files[0][0].rename(self._target / WEIGHTS_FILE)
            return
        weight_map = {}
        for number, (file, names) in enumerate(self._files, start=1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            file.rename(self._target / name)
            weight_map.update(dict.fromkeys(names, name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
