"""A Hugging Face directory of the current weights, loadable by transformers and vLLM."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from rl_train_fsdp.model_directory import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rl_core.interfaces import TensorStream
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
    """Writes the directory as the tensors come by, one file's worth in host memory at a time."""

    def __init__(self, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._target = target
        self._shard_bytes = shard_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor to the host; write a file when enough have come."""
        size = tensor.numel() * tensor.element_size()
        if self._open and self._open_bytes + size > self._shard_bytes:
            self._flush()
        # The stream reuses its memory, so keep a copy even where it is on the host already.
        self._open[name] = tensor.detach().to("cpu", copy=True)
        self._open_bytes += size
        self._total_bytes += size

    def finish(self, source: ModelDirectory, dtype: str) -> None:
        """Write what is left, the index, config.json, and the files that come along."""
        self._flush()
        self._name_files()
        config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
        text = json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True)
        (self._target / CONFIG_FILE).write_text(text + "\n")
        for pattern in _COMPANIONS:
            for file in source.path.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, self._target / file.name)

    def _flush(self) -> None:
        file = self._target / f"part-{len(self._files)}.safetensors"
        save_file(self._open, file, metadata={"format": "pt"})
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


def write_stream(stream: TensorStream, writer: PretrainedWriter | None) -> OSError | None:
    """Drain a collective stream, writing on the rank that has a writer.

    The stream is drained to its end also after a write failed, since the other ranks wait in it;
    the error is returned, not raised.
    """
    failure: OSError | None = None
    for meta, tensor in stream:
        if writer is None or failure is not None:
            continue
        try:
            writer.add(meta.name, tensor)
        except OSError as error:
            failure = error
    return failure
