"""What needs a tensor: dtype names, bytes of a tensor, digests of its content.

The only module of rl-core that imports torch; install `rl-core[torch]`.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash

from rl_core import digests
from rl_core.errors import ComponentNotFoundError, ManifestMismatchError
from rl_core.metadata import DTYPE_BYTES, TensorMeta

try:
    import torch
except ModuleNotFoundError as error:
    msg = f"rl_core.torch needs torch ({error}): pip install 'rl-core[torch]'"
    raise ComponentNotFoundError(msg) from error

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_CHUNK = 1 << 18
_HORNER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: 2**64 divided by the golden ratio


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a wire name such as `bfloat16`; ManifestMismatchError if unknown."""
    try:
        return _DTYPES[name]
    except KeyError:
        msg = f"unknown dtype {name!r}; known: {', '.join(_DTYPES)}"
        raise ManifestMismatchError(msg) from None


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype; ManifestMismatchError if it does not travel."""
    try:
        return _NAMES[dtype]
    except KeyError:
        msg = f"{dtype} does not travel; supported: {', '.join(_DTYPES)}"
        raise ManifestMismatchError(msg) from None


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Metadata of a tensor as it is."""
    return TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in row-major order, as a flat uint8 tensor on the same device.

    Shares storage if `tensor` is contiguous, else copies.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A view of flat uint8 `data` (exactly `meta.nbytes` long, aligned) as the tensor of `meta`."""
    if data.dtype is not torch.uint8 or data.numel() != meta.nbytes:
        msg = f"tensor {meta.name!r} needs {meta.nbytes} bytes, the slot has {data.numel()}"
        raise ManifestMismatchError(msg)
    return data.view(dtype_of(meta.dtype)).view(meta.shape)


def content_digest(meta: TensorMeta, tensor: torch.Tensor, kind: str = digests.XXH3_128) -> str:
    """Digest of a tensor's content, bound to the name, shape and dtype of `meta`.

    Args:
        meta: what the tensor is called; shape and dtype must be the tensor's.
        tensor: on any device; `xxh3-128` copies it to the host, `wsum64` reduces it in place.
        kind: `xxh3-128` or `wsum64`.
    """
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (meta.shape, meta.dtype):
        msg = f"tensor {meta.name!r} is {tuple(tensor.shape)} {tensor.dtype}, not {meta}"
        raise ManifestMismatchError(msg)
    data = as_bytes(tensor)
    if kind == digests.XXH3_128:
        return digests.xxh3_128(meta, data.cpu().numpy().data)
    return f"{digests.WSUM64}:{wsum64(data, _seed(meta)):016x}"


def wsum64(data: torch.Tensor, seed: int = 0) -> int:
    """Weighted sum modulo 2**64 of flat uint8 `data`, read as little-endian 64-bit words.

    Words are multiplied by fixed odd pseudo-random weights within chunks of 2**18 words, and the
    chunk sums are combined by Horner's rule (Knuth, TAOCP vol. 2, 4.6.4) with an odd constant, so
    that swapped words and swapped chunks change the result. Integer arithmetic wraps exactly, so
    the value depends neither on the number of threads nor on the order of the reduction. The
    length in bytes is folded in last, so that trailing zeros count. Without any bytes there is one
    empty chunk.

    Args:
        data: on any device; read where it is, only the result is copied to the host.
        seed: 64-bit start value, such as a hash of what the data is called.
    """
    weights = _weights(str(data.device))
    product = torch.empty_like(weights)
    total = torch.tensor(_signed(seed), dtype=torch.int64, device=data.device)
    for piece in data.split(8 * _CHUNK):
        chunk = _padded(piece).view(torch.int64)
        size = chunk.numel()
        total = total * _HORNER + torch.mul(chunk, weights[:size], out=product[:size]).sum()
    value: int = (int(total) * _HORNER + data.numel()) % (1 << 64)
    return value


class WordSum:
    """The `wsum64` of bytes that come in pieces, in any order, each with its offset.

    `wsum64` is linear in its words, so that pieces need not be put together: what is held is one
    number for each chunk of 2 MiB. Pieces must cover all bytes once; what no piece brings counts
    as zero.
    """

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def add(self, offset: int, data: torch.Tensor) -> None:
        """Account for flat uint8 `data`, on any device, that begins at byte `offset`."""
        lead = offset % 8
        words = _padded(torch.nn.functional.pad(data, (lead, 0)) if lead else data)
        words = words.view(torch.int64)
        weights, position = _weights(str(data.device)), offset // 8
        while words.numel():
            chunk, start = divmod(position, _CHUNK)
            size = min(_CHUNK - start, words.numel())
            part = int((words[:size] * weights[start : start + size]).sum())
            self._sums[chunk] = (self._sums.get(chunk, 0) + part) % (1 << 64)
            words, position = words[size:], position + size

    def digest(self, meta: TensorMeta) -> str:
        """`content_digest` of kind `wsum64` of the tensor `meta`, whose bytes these are."""
        count = max(1, -(-meta.nbytes // (8 * _CHUNK)))
        value = _seed(meta)
        for chunk in range(count):
            value = (value * _HORNER + self._sums.get(chunk, 0)) % (1 << 64)
        return f"{digests.WSUM64}:{(value * _HORNER + meta.nbytes) % (1 << 64):016x}"


def _seed(meta: TensorMeta) -> int:
    return xxhash.xxh3_64_intdigest(digests.header(meta))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _padded(data: torch.Tensor) -> torch.Tensor:
    """`data` with zeros up to a multiple of 8 bytes, aligned for a 64-bit view."""
    missing = -data.numel() % 8
    if missing:
        return torch.nn.functional.pad(data, (0, missing))
    return data if data.storage_offset() % 8 == 0 else data.clone()


@lru_cache(maxsize=8)
def _weights(device: str) -> torch.Tensor:
    # Made on the host, so that every device uses the same ones.
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**62), 2**62
    weights = torch.randint(low, high, (_CHUNK,), dtype=torch.int64, generator=generator)
    return (weights | 1).to(device)
