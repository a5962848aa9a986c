"""The reference engine's model: shards with fused projections and derived buffers.

Small and slow on purpose, but shaped like the real thing: what is loaded is not what is computed
with. Projections are fused and sliced over ranks; the head is *packed* (a transposed copy) and the
rotary table is computed, both in `post_process`. A loader that forgets any of it is wrong here as
it would be in a real engine.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling

from rl_core.errors import ManifestMismatchError
from rl_core.metadata import Manifest, nearest
from rl_core.rollout.live_digests import Live, digests_of, flip_bit
from rl_core.testing.reference_layout import Target, layout
from rl_core.testing.reference_weights import ReferenceModelConfig

MAX_TOKENS = 1024
"""Positions in the rotary table, and so the longest sequence."""


class RankModel:
    """The parameters and derived buffers of one tensor-parallel rank."""

    def __init__(self, config: ReferenceModelConfig, tp_rank: int, tp_size: int) -> None:
        self.config = config
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.layout = layout(config, tp_size)
        self.parameters = {
            name: torch.full(shape, math.nan) for name, shape in self.layout.parameters.items()
        }
        self.derived: dict[str, torch.Tensor] = {}
        self._pending: set[str] = set()

    def check(self, manifest: Manifest) -> None:
        """ManifestMismatchError unless the manifest names exactly this model's tensors."""
        known = self.layout.full
        for meta in manifest.tensors:
            if meta.name not in known:
                near = nearest(meta.name, known)
                msg = f"tensor {meta.name!r} is not in this model; the nearest name is {near!r}"
                raise ManifestMismatchError(msg)
            if meta.shape != known[meta.name]:
                msg = f"tensor {meta.name!r} is {meta.shape}, this model has {known[meta.name]}"
                raise ManifestMismatchError(msg)
        missing = [name for name in known if name not in manifest.by_name]
        if missing:
            msg = f"the manifest lacks {len(missing)} tensors of this model, first {missing[0]!r}"
            raise ManifestMismatchError(msg)

    def begin(self) -> None:
        """Expect a complete set of tensors."""
        self._pending = set(self.layout.full)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's slice of a full tensor to where it belongs."""
        target = self.layout.targets.get(name)
        if target is None:
            near = nearest(name, self.layout.targets)
            msg = f"tensor {name!r} is not in this model; the nearest name is {near!r}"
            raise ManifestMismatchError(msg)
        self.place(target, self._slice(target, tensor))
        self._pending.discard(name)

    def place(self, target: Target, part: torch.Tensor) -> None:
        """Write one part into its parameter's live storage, cast to its dtype."""
        parameter = self.parameters[target.parameter]
        if part.dim():
            parameter[target.row : target.row + part.shape[0]].copy_(part)
        else:
            parameter.copy_(part)

    def finish(self) -> None:
        """Close a load; ManifestMismatchError names what is missing."""
        if self._pending:
            msg = f"{len(self._pending)} tensors were not loaded: {min(self._pending)!r}, ..."
            raise ManifestMismatchError(msg)
        self.post_process()

    def post_process(self) -> None:
        """Compute what the forward pass uses instead of the parameters themselves."""
        self.derived = {"head_packed": self.packed_head(), "rotary": self.rotary_table()}

    def packed_head(self) -> torch.Tensor:
        """The head as the matrix product wants it: (hidden, vocab), contiguous."""
        source = "embed" if self.config.tied else "head"
        return self.parameters[source].t().contiguous()

    def rotary_table(self) -> torch.Tensor:
        """Complex rotations, (MAX_TOKENS, head_dim / 2)."""
        angles = torch.outer(torch.arange(MAX_TOKENS).float(), self.parameters["inv_freq"])
        return torch.polar(torch.ones_like(angles), angles)

    def live_digests(self) -> dict[str, str]:
        """Digests of what is really computed with, derived buffers included."""
        return digests_of(self.live_tensors())

    def live_tensors(self) -> Iterator[Live]:
        """What is computed with, by run-time name."""
        for name, tensor in {**self.parameters, **self.derived}.items():
            yield Live(name, torch.view_as_real(tensor) if tensor.is_complex() else tensor)

    def flip(self, name: str, position: float) -> None:
        """Flip one bit of a live tensor; as `rl_core.rollout.live_digests.flip_bit`."""
        flip_bit({**self.parameters, **self.derived}[name], position)

    def release(self) -> int:
        """Free the storages; the bytes freed. Idempotent."""
        freed = 0
        for tensor in (*self.parameters.values(), *self.derived.values()):
            freed += tensor.untyped_storage().nbytes()
            tensor.untyped_storage().resize_(0)
        self.derived = {}
        return freed

    def resume(self) -> None:
        """Allocate again; the values are NaN until loaded."""
        for tensor in self.parameters.values():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                storage.resize_(tensor.numel() * tensor.element_size())
                tensor.fill_(math.nan)

    def _slice(self, target: Target, tensor: torch.Tensor) -> torch.Tensor:
        if target.dim is None:
            return tensor
        return tensor.chunk(self.tp_size, target.dim)[self.tp_rank]


def logits(ranks: Sequence[RankModel], token: int, position: int, kv: torch.Tensor) -> torch.Tensor:
    """One decoding step over all ranks.

    Args:
        ranks: the shards, in rank order; partial results are summed.
        token: input token.
        position: its position.
        kv: (layers, 2, positions, hidden); row `position` is written, rows up to it are read.

    Returns:
        Float32 logits, (vocab,).
    """
    first = ranks[0]
    hidden = first.parameters["embed"][token].float()
    for layer in range(first.config.layers):
        own = f"layers.{layer}."
        normed = _norm(hidden, first.parameters[own + "norm_1"])
        parts = _attention(ranks, own, normed, position, kv[layer])
        hidden = hidden + torch.stack(list(parts)).sum(0)
        normed = _norm(hidden, first.parameters[own + "norm_2"])
        hidden = hidden + torch.stack([_mlp(rank, own, normed) for rank in ranks]).sum(0)
    final = _norm(hidden, first.parameters["norm"]) @ first.derived["head_packed"].float()
    return final * first.parameters["scale"].float()


def _attention(
    ranks: Sequence[RankModel], own: str, normed: torch.Tensor, position: int, kv: torch.Tensor
) -> Iterator[torch.Tensor]:
    config = ranks[0].config
    width, dim = config.hidden // len(ranks), config.head_dim
    for index, rank in enumerate(ranks):
        mine = slice(index * width, (index + 1) * width)
        query, key, value = (rank.parameters[own + "qkv"].float() @ normed).chunk(3)
        turn = rank.derived["rotary"][position]
        kv[0, position, mine] = _rotate(key.view(-1, dim), turn).flatten()
        kv[1, position, mine] = value
        keys = kv[0, : position + 1, mine].view(position + 1, -1, dim)
        values = kv[1, : position + 1, mine].view(position + 1, -1, dim)
        scores = torch.einsum("hd,phd->hp", _rotate(query.view(-1, dim), turn), keys)
        mixed = torch.einsum("hp,phd->hd", F.softmax(scores / math.sqrt(dim), -1), values)
        yield rank.parameters[own + "o"].float() @ mixed.flatten()


def _mlp(rank: RankModel, own: str, normed: torch.Tensor) -> torch.Tensor:
    gate, up = (rank.parameters[own + "gate_up"].float() @ normed).chunk(2)
    return rank.parameters[own + "down"].float() @ (F.silu(gate) * up)


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean() + 1e-6) * weight.float()


def _rotate(rows: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(rows.float().reshape(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)
