"""The model from its directory to sharded parameters: meta device, FSDP2, then the bytes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from rl_train_fsdp.policy import Policy


def build_on_meta(path: Path) -> PreTrainedModel:
    """The model of a directory in float32, its parameters on the meta device.

    Buffers (rotary frequencies) are computed for real on the host. No code of the directory is
    run. ConfigError where transformers does not know the architecture.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        with _parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=False, **{_dtype_argument(): torch.float32}
            )
    except Exception as error:  # whatever a configuration class or a model makes of its values
        reason = " ".join(str(error).split())[:300]
        msg = (
            f"{path} is no causal language model known to transformers "
            f"{transformers.__version__}: {reason}"
        )
        raise ConfigError(msg) from error
    model.tie_weights()
    return model.eval()


def _dtype_argument() -> str:
    """Name of from_config's dtype argument, which changed in transformers 4.56."""
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered meanwhile keep their shape and lose their bytes.

    `torch.device("meta")` would take the buffers as well, and nothing can recompute those.
    """

    def without_bytes(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(without_bytes)
    try:
        yield
    finally:
        handle.remove()


def check_experts(model: nn.Module, world_size: int) -> None:
    """ConfigError where ranks could disagree about which parameters have a gradient.

    That is so when experts are modules of their own, as in transformers 4: a rank whose tokens
    reach an expert reduces its gradient, another does not, and the collective never matches.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    apart = [name for name in names if name.rpartition(".")[2] == "experts"]
    if apart and world_size > 1:
        msg = (
            f"{type(model).__name__} holds its experts as separate modules ({apart[0]}); install "
            "transformers 5 or newer to train it on several ranks"
        )
        raise ConfigError(msg)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass.

    transformers recomputes only in modules in training mode, and dropout must stay off (log-probs
    of two passes have to agree): so the flag is set on the recomputing modules alone.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool) -> list[str]:
    """Apply FSDP2 to each decoder layer and to the rest as one more group, in place.

    Args:
        policy: module with its parameters on meta; they become `DTensor`s over `mesh`.
        mesh: (shard) or (replicate, shard).
        dtype: of forward and backward; gradients are reduced in float32.
        reshard: free gathered parameters after each layer's forward.

    Returns:
        Names of the layer classes that became groups of their own.
    """
    mixed = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Advantages and temperatures are inputs, too, and stay float32.
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed}
    layers = _layers(policy.model)
    wrapped = {type(layer).__name__ for layer in layers}  # before FSDP2 gives them other classes
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    # The head and the embedding may be one tied tensor, so they stay in one group.
    fully_shard(policy, reshard_after_forward=False, **options)
    return sorted(wrapped)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that transformers keeps whole; the outer one where it names one inside another.

    (Mamba's block and the mixer in it: a group's parameters cannot be in another group as well.)
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # an outer one comes before what is in it
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def allocate(policy: nn.Module, device: torch.device) -> None:
    """Give meta parameters uninitialised memory for this rank's shard; buffers keep their values.

    Buffers move to `device`.
    """
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])


def fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    """Every group that FSDP2 gathers and frees as a unit."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def reshard(policy: nn.Module) -> None:
    """Free whatever full parameters are still held. Local."""
    for module in fsdp_modules(policy):
        module.reshard()
