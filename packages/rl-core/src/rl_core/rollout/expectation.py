"""What each rank must hold: the result, which travels to whoever compares. Imports no torch."""

import msgspec


class ExpectedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run-time tensor of one rank must be.

    Attributes:
        shape: its shape on the rank.
        dtype: its dtype there.
        digest: `wsum64`, bound to run-time name, shape and dtype.
        sources: Hugging Face tensors that it is made of; empty for buffers, and on a rank that has
            nothing of a vocabulary but padding.
        slices: what the rank takes of each part, in order, such as `x.weight[0:64]`.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    sources: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank must hold.

    Attributes:
        tp_rank: the rank.
        tensors: by run-time name.
        unverifiable: why, by the name of what the table does not cover: a Hugging Face tensor, or
            a run-time tensor of which the manifest has only some parts.
    """

    tp_rank: int
    tensors: dict[str, ExpectedTensor]
    unverifiable: dict[str, str] = {}
