"""A Hugging Face model directory on disk, read by its headers only. No torch is imported here.

The safetensors format: 8 bytes little-endian length of a JSON header, the header (name to dtype,
shape and byte range), then the bytes (github.com/huggingface/safetensors, "Format").
"""

import importlib.util
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.metadata import DTYPE_BYTES

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_TRAINABLE = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the directory.

    Attributes:
        file: safetensors file that holds it.
        dtype: torch's name of its dtype.
        shape: its shape.
        nbytes: its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ModelDirectory:
    """A checked directory.

    Attributes:
        path: the directory.
        config: parsed config.json.
        tensors: every tensor stored, by its name.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> "ModelDirectory":
        """Read config.json and all safetensors headers; ConfigError says what is wrong."""
        if not path.is_dir():
            raise ConfigError(f"model directory {path} does not exist; give an existing one")
        directory = cls(path, _read_config(path), _read_tensors(path))
        directory._check()
        return directory

    @property
    def architecture(self) -> str:
        """Class named by config.json, such as `Qwen3ForCausalLM`, else its model type."""
        architectures = self.config.get("architectures") or []
        return str(architectures[0] if architectures else self.config["model_type"])

    @property
    def main_dtype(self) -> str:
        """The floating dtype that most bytes are stored in: what the model is meant to run in."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype in _TRAINABLE:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors stored."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def _check(self) -> None:
        if self.config.get("quantization_config"):
            msg = f"{self.path} holds a quantised model; train its unquantised original"
            raise ConfigError(msg)
        if not any(tensor.dtype in _TRAINABLE for tensor in self.tensors.values()):
            raise ConfigError(f"{self.path} holds no floating-point tensors to train")
        self._check_numbers()
        self._check_type()
        self._check_layers()
        self._check_embedding()

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            value = self.config.get(name)
            if value is not None and (type(value) is not int or value < 1):
                msg = f"{self.path / CONFIG_FILE}: {name}={value!r} is no positive integer"
                raise ConfigError(msg)

    def _check_type(self) -> None:
        """Look the type up in the tables of transformers, as text: importing them takes seconds."""
        spec = importlib.util.find_spec("transformers")
        roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
        tables = [path for root in roots for path in root.glob("models/auto/*.py")]
        kind = self.config["model_type"]
        if tables and not any(f'"{kind}"' in path.read_text("utf-8") for path in tables):
            msg = (
                f"{self.path / CONFIG_FILE}: model_type {kind!r} is no causal language model known "
                "to the transformers that is installed"
            )
            raise ConfigError(msg)

    def _check_layers(self) -> None:
        """Every layer that config.json counts must be stored, and be described once."""
        count, types = (self.config.get(name) for name in ("num_hidden_layers", "layer_types"))
        if types is not None and not _is_names(types):
            raise ConfigError(f"{self.path / CONFIG_FILE}: layer_types is no list of names")
        stored = {int(match[1]) for name in self.tensors if (match := _LAYER.search(name))}
        if not isinstance(count, int) or not stored:
            return
        lacking = sorted(set(range(count)) - stored)
        if lacking:
            msg = (
                f"{self.path}: {CONFIG_FILE} says num_hidden_layers={count}, the safetensors files "
                f"hold no tensor of layer {lacking[0]}; weights and configuration do not belong "
                "together"
            )
            raise ConfigError(msg)
        if types is not None and len(types) != count:
            msg = (
                f"{self.path / CONFIG_FILE}: num_hidden_layers={count}, but layer_types has "
                f"{len(types)} entries; make them agree"
            )
            raise ConfigError(msg)

    def _check_embedding(self) -> None:
        """The token embedding's shape is the one thing that all architectures agree on."""
        expected = (self.config.get("vocab_size"), self.config.get("hidden_size"))
        for name, tensor in self.tensors.items():
            if _EMBEDDING.search(name) and None not in expected and tensor.shape != expected:
                msg = (
                    f"{self.path}: {name!r} has shape {tensor.shape}, {CONFIG_FILE} makes it "
                    f"{expected} (vocab_size, hidden_size); weights and configuration do not "
                    "belong together"
                )
                raise ConfigError(msg)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / CONFIG_FILE
    if not file.is_file():
        msg = f"{path} has no {CONFIG_FILE}; give a Hugging Face model directory"
        raise ConfigError(msg)
    config = _read_json(file)
    if not config.get("model_type"):
        msg = f"{file} names no model_type; it is not the configuration of a transformers model"
        raise ConfigError(msg)
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds no JSON object; fetch it again")
    return value


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(path):
        tensors.update(_read_header(file))
    missing = [name for name in _indexed_names(path) if name not in tensors]
    if missing:
        msg = (
            f"{path / INDEX_FILE} lists {len(missing)} tensors that no file holds, the first is "
            f"{missing[0]!r}; fetch the model again"
        )
        raise ConfigError(msg)
    return tensors


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    if index.is_file():
        return [path / name for name in sorted(set(_weight_map(index).values()))]
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    msg = f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; convert its weights to safetensors"
    raise ConfigError(msg)


def _indexed_names(path: Path) -> list[str]:
    index = path / INDEX_FILE
    return list(_weight_map(index)) if index.is_file() else []


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map; fetch it again")
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The file's tensors, which must fill it to the last byte, as the format says."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing; fetch the model again")
    size = file.stat().st_size
    header, start = _header(file, size)
    header.pop("__metadata__", None)
    found, places = {}, []
    for name, entry in header.items():
        found[name], place = _entry(file, name, entry)
        places.append((*place, name))
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise ConfigError(f"{file} has a damaged header at {name!r}; fetch it again")
        if start + end > size:
            msg = (
                f"{file} is truncated: {name!r} ends at byte {start + end}, the file at byte "
                f"{size}; fetch it again"
            )
            raise ConfigError(msg)
        at = end
    if start + at < size:
        msg = f"{file} has {size - start - at} bytes after its last tensor; fetch it again"
        raise ConfigError(msg)
    return found


def _entry(file: Path, name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    """A tensor, and its first byte and the one after its last, counted from the header's end."""
    try:
        begin, end = entry["data_offsets"]
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        known = _DTYPES.get(dtype, dtype)
        counts = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
        size = math.prod(shape) * DTYPE_BYTES[known] if known in DTYPE_BYTES else end - begin
        sound = counts and end - begin == size
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{file} has a damaged header at {name!r}; fetch it again"
        raise ConfigError(msg) from error
    if not sound:
        raise ConfigError(f"{file} has a damaged header at {name!r}; fetch it again")
    return StoredTensor(file, known, shape, end - begin), (begin, end)


def _header(file: Path, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header, and the offset of the first byte after it."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise ConfigError(f"{file} is truncated or no safetensors file; fetch it again")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} has a damaged header ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} has a damaged header; fetch it again")
    return header, 8 + length
