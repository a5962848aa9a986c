"""Digests of parts of tensors: taken as the sender packs, compared after the receiver has read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.digests import WSUM64, XXH3_128, ByteDigest
from rl_core.errors import MessageError
from rl_core.torch import wsum64
from rl_core.transfer.buffers import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CHUNK_BYTES = 1 << 20
"""Copied and digested in runs of this size, so that each byte is fetched from memory once."""


def kind_for(device: str) -> str:
    """The kind that is cheap where the buckets are."""
    return XXH3_128 if device == "cpu" else WSUM64


def copy_part(
    target: torch.Tensor, source: torch.Tensor, kind: str, progress: Callable[[int], None]
) -> bytes:
    """Copy flat uint8 `source` to `target`, of equal length; the digest of `source`.

    Args:
        target: in a bucket.
        source: on the same device.
        kind: of the digest.
        progress: told, now and then, how many bytes have been copied.
    """
    if kind == WSUM64:
        copy_bytes(target, source)
        return digest_part(source, kind)
    state, size = ByteDigest(), source.numel()
    for start in range(0, size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, size)
        chunk = source[start:end]
        copy_bytes(target[start:end], chunk)
        state.update(chunk.numpy().data)
        if end < size:
            progress(end)
    return state.digest()


def digest_part(data: torch.Tensor, kind: str) -> bytes:
    """Digest of flat uint8 `data`, 8 or 16 bytes. On a device it waits for the device."""
    if kind == WSUM64:
        return wsum64(data).to_bytes(8, "little")
    state = ByteDigest()
    state.update(data.cpu().numpy().data)
    return state.digest()


def check_kind(kind: str) -> str:
    """`kind`; MessageError if it is unknown."""
    if kind not in (XXH3_128, WSUM64):
        raise MessageError(f"unknown kind of digest for parts: {kind!r}")
    return kind
