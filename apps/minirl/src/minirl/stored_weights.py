"""The weights in a Hugging Face directory, read one tensor at a time."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rl_core.errors import ConfigError, ManifestMismatchError
from rl_core.metadata import Manifest, TensorMeta
from rl_core.torch import meta_of
from rl_core.versions import PolicyVersion

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredWeights:
    """What `model.safetensors` holds, or the files that its index names.

    Attributes:
        manifest: of all tensors, in the order of the files.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers; no weights yet.

        Errors: ConfigError naming the file that is missing or damaged.
        """
        self._path = path
        self._files = self._named_files()
        metas = [meta for file in self._files for meta in self._metas(file)]
        self.manifest = Manifest(PolicyVersion(0, 0), tuple(metas))

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Every tensor in turn; ConfigError as above."""
        for file in self._files:
            with self._opened(file) as stored:
                for name in self._names(file, stored):
                    yield self.manifest.by_name[name], stored.get_tensor(name)

    def _named_files(self) -> dict[str, set[str] | None]:
        """Files, and which of their tensors count: None for all."""
        index = self._path / INDEX_FILE
        if not index.is_file():
            return {SINGLE_FILE: None}
        try:
            places = dict(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is no index of weights: {error}") from error
        files: dict[str, set[str] | None] = {}
        for name, file in sorted(places.items(), key=lambda item: str(item[1])):
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{index}: {name!r} is in {file!r}, which is no file beside it")
            names = files.setdefault(file, set())
            assert names is not None
            names.add(name)
        return files

    def _metas(self, file: str) -> Iterator[TensorMeta]:
        with self._opened(file) as stored:
            for name in self._names(file, stored):
                try:
                    yield meta_of(name, stored.get_tensor(name))  # mapped, not read
                except ManifestMismatchError as error:
                    raise ConfigError(f"{self._path / file}: {name!r}: {error}") from error

    def _names(self, file: str, stored: Any) -> list[str]:
        wanted, held = self._files[file], list(stored.keys())
        missing = (wanted or set()) - set(held)
        if missing:
            msg = f"{self._path / file} lacks {min(missing)!r}, which {INDEX_FILE} places there"
            raise ConfigError(msg)
        return [name for name in held if wanted is None or name in wanted]

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self._path / file
        try:
            with safe_open(path, framework="pt") as stored:
                yield stored
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
