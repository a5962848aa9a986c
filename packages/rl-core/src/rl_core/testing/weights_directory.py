"""A Hugging Face weights directory: one file in the safetensors format (length, header, bytes).

Written by hand, so that the kit needs no safetensors.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.metadata import TensorMeta
from rl_core.torch import as_bytes, from_bytes, meta_of

WEIGHTS_FILE = "model.safetensors"

_FORMAT_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}
_DTYPE_NAMES = {text: name for name, text in _FORMAT_NAMES.items()}


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a directory with one weights file."""
    header, offset, blobs = {}, 0, []
    for name, tensor in tensors.items():
        meta = meta_of(name, tensor)
        header[name] = {
            "dtype": _FORMAT_NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
        blobs.append(as_bytes(tensor).numpy().tobytes())
    text = json.dumps(header).encode()
    path.mkdir(parents=True, exist_ok=True)
    content = struct.pack("<Q", len(text)) + text + b"".join(blobs)
    (path / WEIGHTS_FILE).write_bytes(content)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read all weights files of a directory, in any number of shards.

    Errors: ManifestMismatchError if there is none, or one is damaged.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ManifestMismatchError(f"no weights file in {path}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= _read(file.read_bytes())
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise ManifestMismatchError(f"cannot read {file}: {error}") from error
    return tensors


def _read(content: bytes) -> dict[str, torch.Tensor]:
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        meta = TensorMeta(name, tuple(entry["shape"]), _DTYPE_NAMES[entry["dtype"]])
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        data = bytearray(content[start:end])
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        tensors[name] = from_bytes(flat, meta)
    return tensors
