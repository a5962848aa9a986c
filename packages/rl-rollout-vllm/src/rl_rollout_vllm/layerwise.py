"""What this package needs to know of vLLM's layer-wise reloading, which is not public.

During an update every layer's parameters stand on the meta device until all of the layer's
weights have come; then they are processed and copied into the tensors that the engine serves from.
A layer that got nothing keeps its old weights, one that got a part is finalised with garbage, and
neither is an error to vLLM: hence `unfinished`. A failed update leaves layers on the meta device:
hence `roll_back`.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


@dataclass(frozen=True)
class Unfinished:
    """A layer that did not get all of its weights."""

    name: str
    loaded: int
    expected: int


def begin(model: nn.Module) -> None:
    """Put every layer's parameters on the meta device, waiting for weights."""
    initialize_layerwise_reload(model)


def finish(model: nn.Module, model_config: Any) -> None:
    """Process the layers that wait to the end (attention, padded ones)."""
    finalize_layerwise_reload(model, model_config)


def unfinished(model: nn.Module) -> list[Unfinished]:
    """Layers that have not received all their elements, in an update that is about to finish.

    A layer whose only parameters belong to another layer (tied embeddings) expects nothing.
    Quantised layers are left out: what their checkpoint brings cannot be told from their
    parameters.
    """
    owners = _owners(model)
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or _quantised(layer):
            continue
        expected = _expected(layer, owners)
        if info.load_numel < expected:
            found.append(Unfinished(name, info.load_numel, expected))
    return found


def never_came(model: nn.Module, layer: Unfinished, seen: Container[str]) -> list[str]:
    """Checkpoint names that the layer would have needed and that were not seen, as far as known.

    Args:
        model: the engine's model, which says what its fused layers are made of.
        layer: one that was not finished.
        seen: names that came.
    """
    parent, _, leaf = layer.name.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    parameters = model.get_submodule(layer.name)._parameters
    wanted = [f"{parent}.{part}.{name}" for part in parts for name in parameters]
    return [name for name in wanted if name.removeprefix(".") not in seen]


def never_on_meta(model: nn.Module) -> frozenset[int]:
    """Addresses of the parameters that vLLM leaves where they are: biases.

    They are written as soon as their weights come, and once more when their layer is complete.
    """
    return frozenset(
        parameter.untyped_storage().data_ptr()
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] == "bias"
    )


def roll_back(model: nn.Module) -> int:
    """Give layers that are still waiting for weights their old tensors; how many there were.

    Layers that were complete keep the new weights, so the model is a mixture: only a complete
    update repairs it.
    """
    restored = 0
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            restored += 1
        info.reset()
    return restored


def _quantised(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def _owners(model: nn.Module) -> dict[int, nn.Module]:
    """The first layer that holds each of the parameters served from, by the tensor's identity."""
    owners: dict[int, nn.Module] = {}
    for layer in model.modules():
        for tensor in _served(layer).values():
            owners.setdefault(id(tensor), layer)
    return owners


def _served(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that the engine serves from, also while they are being replaced."""
    kernel = get_layerwise_info(layer).kernel_tensors
    if kernel is not None:
        return dict(kernel[0])
    return {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}


def _expected(layer: nn.Module, owners: dict[int, nn.Module]) -> int:
    """Elements that a checkpoint brings for `layer` on this rank, without padding."""
    served = _served(layer)
    total = 0
    for name, tensor in layer._parameters.items():
        if tensor is None or owners.get(id(served.get(name)), layer) is not layer:
            continue
        if isinstance(layer, VocabParallelEmbedding) and tensor.ndim == 2:
            total += int(layer.shard_indices.num_org_elements) * tensor.shape[1]
        else:
            total += int(get_tensor_load_numel(tensor))
    return total
