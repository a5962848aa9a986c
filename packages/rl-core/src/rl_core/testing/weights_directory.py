"""A Hugging Face weights directory: one file in the safetensors format (length, header, bytes).

Written by hand, so that the kit needs no safetensors.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.torch import as_bytes, dtype_of, from_bytes, meta_of

WEIGHTS_FILE = "model.safetensors"

_FORMAT_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a directory with one weights file; tied names are left out, as usual."""
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
    """Read what `save_weights` wrote; ManifestMismatchError if it is missing or truncated."""
    names = {text: name for name, text in _FORMAT_NAMES.items()}
    try:
        content = (path / WEIGHTS_FILE).read_bytes()
        (size,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + size])
        tensors = {}
        for name, entry in header.items():
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            data = torch.frombuffer(bytearray(content[start:end]), dtype=torch.uint8)
            empty = torch.empty(entry["shape"], dtype=dtype_of(names[entry["dtype"]]))
            tensors[name] = from_bytes(data, meta_of(name, empty))
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ManifestMismatchError(f"cannot read {path / WEIGHTS_FILE}: {error}") from error
    return tensors
