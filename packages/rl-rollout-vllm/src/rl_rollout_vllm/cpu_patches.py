"""What is silently wrong in vLLM's CPU build when weights change, and what is done about it.

`unpacked_linear`
    Without it linear layers are served from oneDNN-packed copies, which nobody can inspect, free
    or update in place.
`tied_head_repack`
    Without it a tied output head stays packed with the *first* weights; the only sign is a
    warning "ParallelLMHead: Failed to load weights". Needed where heads are packed.
`moe_repack`
    Without it the second update of a MoE layer skips the packing, so that the kernel reads plain
    weights as packed ones.

`PATCHES` says for which versions each was made: it is applied to no others, and a line says so.
Each can be turned off at run time (`switch`), which is how its test shows that it is still
needed: the test fails when vLLM has fixed the cause. All do nothing outside the CPU build.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from rl_core.rollout.patch_switch import PatchSwitch
from rl_core.rollout.version_range import VersionRange
from rl_rollout_vllm.installed_engine import ENGINE

logger = logging.getLogger(__name__)

SEEN = VersionRange("0.32", "0.32")
PATCHES = {"unpacked_linear": SEEN, "tied_head_repack": SEEN, "moe_repack": SEEN}
"""Each patch, with the versions of vLLM in which its cause was seen."""

SETTINGS_KEY = "rl_rollout_vllm"
"""Key of this package's settings in vLLM's `additional_config`."""

ONEDNN_MIN_ELEMENTS = 1 << 18
"""From this size on, oneDNN's float32 matrix product on the live weight beats torch's own (MKL):
1.3 to 2 times on an AMD EPYC, measured; below it, its overhead costs more."""

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

switch = PatchSwitch(PATCHES, ENGINE.version())
"""Which of them are on in this process."""


def active(name: str) -> bool:
    """Whether a patch does its work in this process."""
    return bool(current_platform.is_cpu()) and switch.on(name)


def install() -> None:
    """Replace vLLM's choice of a linear kernel; before the model is loaded."""
    if current_platform.is_cpu() and switch.remark:
        logger.warning("vLLM %s; not applied", switch.remark)
    if current_platform.is_cpu() and not hasattr(layer_utils, "_rl_dispatch"):
        layer_utils._rl_dispatch = layer_utils.dispatch_cpu_unquantized_gemm
        layer_utils.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: nn.Module, remove_weight: bool) -> None:
    """Let `layer` compute with its live weight, unless packing was asked for."""
    settings = get_current_vllm_config().additional_config.get(SETTINGS_KEY, {})
    if settings.get("packed") or not active("unpacked_linear"):
        layer_utils._rl_dispatch(layer, remove_weight)
    else:
        layer.cpu_linear = _linear_kernel(layer.weight)


def _linear_kernel(weight: torch.Tensor) -> Linear:
    large = weight.ndim == 2 and weight.numel() >= ONEDNN_MIN_ELEMENTS
    if large and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        return _onednn_linear
    return functional.linear


def _onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def before_update(model: nn.Module) -> None:
    """Make MoE layers pack again: they do so only while they have no kernel."""
    if not active("moe_repack"):
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def after_update(model: nn.Module) -> None:
    """Pack embeddings that serve as output heads again: vLLM's update passes them over."""
    if not active("tied_head_repack"):
        return
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


def packed_layers(model: nn.Module) -> list[str]:
    """Names of layers that are not served from parameters as a checkpoint fills them."""
    if not current_platform.is_cpu():
        return []
    return [name for name, layer in model.named_modules() if _packed_moe(layer) or _packed(layer)]


def packed_copy(layer: nn.Module) -> bool:
    """Whether `layer` computes its linear product from a copy that is no parameter."""
    return bool(current_platform.is_cpu()) and _packed(layer)


def packed_width(layer: nn.Module) -> tuple[int, torch.dtype]:
    """Inputs and dtype of a packed linear layer, whose weight may have been removed."""
    weight: Any = layer.weight
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    return int(weight.shape[1] if weight.ndim == 2 else inputs), weight.dtype


def pack_again(layer: nn.Module, weight: torch.Tensor) -> None:
    """Have a packed linear layer compute with `weight` (tests only)."""
    kept = layer.weight
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer_utils._rl_dispatch(layer, remove_weight=False)
    layer.weight = kept


def packed_experts(layer: nn.Module) -> str | None:
    """The instruction set for which the experts of `layer` are packed; None if it has none."""
    if not (current_platform.is_cpu() and _packed_moe(layer) and hasattr(layer, "w13_weight")):
        return None
    method: Any = layer.quant_method
    experts = method.moe_kernel.impl.fused_experts
    return None if experts._use_zentorch else str(experts.isa)


def pack_experts(stack: torch.Tensor, isa: str) -> torch.Tensor:
    """A stack of experts as the kernel for `isa` wants it."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed: torch.Tensor = cpu_prepack_moe_weight(stack.contiguous(), isa)
    return packed


def packed_linear(model: nn.Module) -> bool:
    """Whether some layer computes from a copy that is no parameter."""
    return bool(current_platform.is_cpu()) and any(map(_packed, model.modules()))


def _packed_moe(layer: nn.Module) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    return getattr(method, "moe_kernel", None) is not None


def _packed(layer: nn.Module) -> bool:
    kernel = getattr(layer, "cpu_linear", None)
    return kernel is not None and kernel not in (functional.linear, _onednn_linear)
