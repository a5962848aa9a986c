"""Wrong updates, one of each kind, and the error that each must end with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from rl_core.errors import DigestMismatchError, ManifestMismatchError, MiniRLError
from rl_core.interfaces import LeasedTensor
from rl_core.metadata import Manifest
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import content_digest, meta_of
from rl_core.versions import PolicyVersion

WrongUpdate = tuple[Sequence[LeasedTensor], Manifest, str]
"""What is streamed, what was announced, and the name that the error must contain."""


@dataclass(frozen=True)
class Fault:
    """One way in which an update can be wrong.

    Attributes:
        name: what is wrong.
        error: the error it must end with.
        make: builds it from a good set and a fresh version.
        partial_set: only an engine that notices partial sets can find it.
    """

    name: str
    error: type[MiniRLError]
    make: Callable[[WeightSet, PolicyVersion], WrongUpdate]
    partial_set: bool = False


def _unknown_to_the_engine(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    wrong = weights.changed({f"{name}_typo": weights.tensors[name]})
    return wrong.entries(), wrong.manifest(version), f"{name}_typo"


def _unknown_to_the_manifest(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    wrong = weights.changed({f"{name}_typo": weights.tensors[name]})
    return wrong.entries(), weights.manifest(version), f"{name}_typo"


def _shape_of_another_model(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    tensor = weights.tensors[name]
    wrong = weights.changed({name: torch.cat([tensor, tensor[:1]])})
    return wrong.entries(), wrong.manifest(version), name


def _shape_against_the_manifest(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    wrong = weights.changed({name: weights.tensors[name].reshape(-1)})
    return wrong.entries(), weights.manifest(version), name


def _dtype_against_the_manifest(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    tensor = weights.tensors[name]
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    wrong = weights.changed({name: tensor.to(other)})
    return wrong.entries(), weights.manifest(version), name


def _missing_in_the_manifest(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    wrong = weights.without(name)
    return wrong.entries(), wrong.manifest(version), name


def _for_another_target(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    """A tensor of a draft model, which no replica has."""
    name = _matrix(weights)
    entries = [
        replace(entry, meta=structs.replace(entry.meta, target="draft"))
        if entry.meta.name == name
        else entry
        for entry in weights.entries()
    ]
    return entries, Manifest(version, tuple(entry.meta for entry in entries)), name


def _short_stream(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = list(weights.tensors)[-1]
    return weights.entries()[:-1], weights.manifest(version), name


def _repeated_tensor(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    entries = weights.entries()
    return [*entries, entries[0]], weights.manifest(version), entries[0].meta.name


def _corrupted_tensor(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    name = _matrix(weights)
    damaged = weights.tensors[name].clone()
    damaged.view(-1).view(torch.uint8)[-1] ^= 1
    entries = [
        replace(entry, tensor=damaged) if entry.meta.name == name else entry
        for entry in weights.entries()
    ]
    return entries, weights.manifest(version), name


def _swapped_tensors(weights: WeightSet, version: PolicyVersion) -> WrongUpdate:
    """Two tensors of one shape under each other's name, each with its own true digest."""
    first, second = _pair(weights)
    swapped = {first: second, second: first}
    entries = []
    for entry in weights.entries():
        source = swapped.get(entry.meta.name)
        if source is not None:
            tensor = weights.tensors[source]
            digest = content_digest(meta_of(source, tensor), tensor)
            entry = replace(entry, tensor=tensor, digest=digest)  # noqa: PLW2901
        entries.append(entry)
    return entries, weights.manifest(version), first


FAULTS = (
    Fault("unknown_to_the_engine", ManifestMismatchError, _unknown_to_the_engine),
    Fault("unknown_to_the_manifest", ManifestMismatchError, _unknown_to_the_manifest),
    Fault("shape_of_another_model", ManifestMismatchError, _shape_of_another_model),
    Fault("shape_against_the_manifest", ManifestMismatchError, _shape_against_the_manifest),
    Fault("dtype_against_the_manifest", ManifestMismatchError, _dtype_against_the_manifest),
    Fault("missing_in_the_manifest", ManifestMismatchError, _missing_in_the_manifest, True),
    Fault("for_another_target", ManifestMismatchError, _for_another_target),
    Fault("short_stream", ManifestMismatchError, _short_stream),
    Fault("repeated_tensor", ManifestMismatchError, _repeated_tensor),
    Fault("corrupted_tensor", DigestMismatchError, _corrupted_tensor),
    Fault("swapped_tensors", DigestMismatchError, _swapped_tensors),
)


def _matrix(weights: WeightSet) -> str:
    """A matrix in the middle of the stream."""
    names = [name for name, tensor in weights.tensors.items() if tensor.dim() == 2]
    return names[len(names) // 2]


def _pair(weights: WeightSet) -> tuple[str, str]:
    """Two tensors of one shape and dtype."""
    name = _matrix(weights)
    like = weights.tensors[name]
    for other, tensor in weights.tensors.items():
        if other != name and (tensor.shape, tensor.dtype) == (like.shape, like.dtype):
            return tuple(sorted((name, other)))  # type: ignore[return-value]
    return name, name
