"""Which byte of which file holds which tensor. Pure, and the same on every side.

The format is safetensors (length of the header, header, bytes); the header says where each tensor
lies and comes first, so that a library which writes a file wants all tensors at once. The manifest
tells everything a header needs before the first tensor exists, so files can be written as the
stream comes, in any order, without ever holding the model.

Within a file tensors are sorted by element size, as the safetensors library sorts them: each one
is then aligned for its dtype and can be mapped.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_core.metadata import DTYPE_BYTES, TensorMeta

FORMAT_NAMES: Mapping[str, str] = {
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
"""Names of dtypes in the safetensors format, by wire name."""

MAIN_TARGET = "policy"
INDEX_FILE = "model.safetensors.index.json"

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies.

    Attributes:
        file: path of its file, relative to the checkpoint.
        offset: first byte in that file.
    """

    file: str
    offset: int


@dataclass(frozen=True)
class Shard:
    """One weights file.

    Attributes:
        file: path relative to the checkpoint.
        head: length of the header and header.
        extents: places of its tensors by name.
        nbytes: size of the file.
        ends: the first byte after each tensor, by name.
    """

    file: str
    head: bytes
    extents: Mapping[str, Extent]
    nbytes: int
    ends: Mapping[str, int]

    @classmethod
    def of(cls, file: str, tensors: Sequence[TensorMeta]) -> "Shard":
        """Lay out `tensors` in one file."""
        entries: dict[str, object] = {}
        starts, offset = {}, 0
        for meta in sorted(tensors, key=lambda meta: -DTYPE_BYTES[meta.dtype]):
            entries[meta.name] = {
                "dtype": FORMAT_NAMES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [offset, offset + meta.nbytes],
            }
            starts[meta.name] = offset
            offset += meta.nbytes
        head = _head({"__metadata__": {"format": "pt"}, **entries})
        extents = {name: Extent(file, len(head) + start) for name, start in starts.items()}
        ends = {meta.name: len(head) + starts[meta.name] + meta.nbytes for meta in tensors}
        return cls(file, head, extents, len(head) + offset, ends)


@dataclass(frozen=True)
class CheckpointLayout:
    """All weights files of one version.

    Attributes:
        shards: in the order in which a stream fills them.
        indexes: contents of the index files by path relative to the checkpoint.
    """

    shards: tuple[Shard, ...]
    indexes: Mapping[str, bytes]

    @classmethod
    def of(cls, tensors: Iterable[TensorMeta], max_shard_bytes: int) -> "CheckpointLayout":
        """Lay out a whole version.

        Tied names have no bytes of their own and are left out, as usual in such directories.
        Tensors of another target than the policy (a draft model) go into a subdirectory of its
        name, so that a loader of the policy does not meet them.

        Args:
            tensors: everything, in stream order.
            max_shard_bytes: largest sum of tensors in one file.
        """
        targets: dict[str, list[TensorMeta]] = {MAIN_TARGET: []}
        for meta in tensors:
            targets.setdefault(meta.target, []).append(meta)
        shards: list[Shard] = []
        indexes = {}
        for target, metas in targets.items():
            prefix = "" if target == MAIN_TARGET else f"{target}/"
            mine = _shards(prefix, metas, max_shard_bytes)
            indexes[prefix + INDEX_FILE] = _index(mine, sum(meta.nbytes for meta in metas))
            shards += mine
        return cls(tuple(shards), indexes)

    @cached_property
    def extents(self) -> Mapping[str, Extent]:
        """Place of every tensor, by name."""
        return {name: extent for shard in self.shards for name, extent in shard.extents.items()}

    @property
    def nbytes(self) -> int:
        """Size of all weights files."""
        return sum(shard.nbytes for shard in self.shards)


def _shards(prefix: str, metas: Sequence[TensorMeta], max_bytes: int) -> list[Shard]:
    groups: list[list[TensorMeta]] = [[]]
    used = 0
    for meta in metas:
        if groups[-1] and used + meta.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(meta)
        used += meta.nbytes
    return [
        Shard.of(f"{prefix}model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _index(shards: Sequence[Shard], total: int) -> bytes:
    places = {name: shard.file for shard in shards for name in shard.extents}
    weight_map = {name: file.rpartition("/")[2] for name, file in sorted(places.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode()


def _head(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text
