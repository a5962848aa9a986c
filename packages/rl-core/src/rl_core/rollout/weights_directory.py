"""The engine worker's way of reading a version from a Hugging Face directory."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rl_core.deadlines import Deadline
from rl_core.errors import TransferError
from rl_core.metadata import Manifest, ManifestCheck
from rl_core.rollout.bucket_receiver import Arrival
from rl_core.torch import meta_of


class DirectoryReader:
    """Reads the safetensors files of a directory, one batch a file."""

    wire_seconds = 0.0

    def __init__(self, path: str, manifest: Manifest, deadline: Deadline) -> None:
        self._path = Path(path)
        self._check = ManifestCheck(manifest)
        self._deadline = deadline
        self._aliases = {alias for meta in manifest.tensors for alias in meta.aliases}

    def batches(self) -> Iterator[Sequence[Arrival]]:
        """The tensors of each file.

        Errors: TransferError (no or damaged file), ManifestMismatchError, TransferTimeoutError.
        """
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise TransferError(f"{self._path} holds no safetensors file")
        for file in files:
            self._deadline.check(f"{file.name} to be read")
            yield self._read(file)
        self._check.close()

    def _read(self, file: Path) -> list[Arrival]:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if name not in self._aliases]  # noqa: SIM118
                return [self._arrival(name, tensors.get_tensor(name)) for name in names]
        except (OSError, SafetensorError) as error:
            raise TransferError(f"cannot read {file}: {error}") from error

    def _arrival(self, name: str, tensor: torch.Tensor) -> Arrival:
        meta = meta_of(name, tensor)
        self._check.see(meta)
        return Arrival(meta, tensor, None, lent=False)
