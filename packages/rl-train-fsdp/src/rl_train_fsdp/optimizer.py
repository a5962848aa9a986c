"""AdamW over this rank's shards, with the global gradient norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_train_fsdp.config import OptimizerConfig


CRITIC = "value_head"
"""Name of the critic's module, the first part of its parameters' names."""


class ShardedAdamW:
    """AdamW on sharded parameters; nothing but the gradient norm needs communication."""

    def __init__(self, params: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self._config = config
        self._params = dict(params)
        device_type = next(iter(self._params.values())).device.type
        self._adamw = torch.optim.AdamW(
            self._params.values(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=device_type in ("cpu", "cuda"),
        )

    @property
    def critic(self) -> dict[str, nn.Parameter]:
        """The critic's parameters by name; empty without one."""
        return {k: param for k, param in self._params.items() if k.startswith(f"{CRITIC}.")}

    def zero_grad(self) -> None:
        """Drop all gradients. Local."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient. Local."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def clip(self) -> float:
        """Scale gradients down to `max_grad_norm`; the L2 norm that they had. Collective.

        Gradients that are not finite are left as they are, and so is the norm returned.
        """
        grads = [local(param.grad) for param in self._params.values() if param.grad is not None]
        squares = torch.stack([norm.double() ** 2 for norm in torch._foreach_norm(grads)]).sum()
        norm = float(self._sum_over_shards(squares).sqrt())
        if self._config.max_grad_norm < norm < float("inf"):
            torch._foreach_mul_(grads, self._config.max_grad_norm / norm)
        return norm

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum over the ranks that hold different shards (not over equal copies)."""
        first = next(iter(self._params.values()))
        if isinstance(first, DTensor):
            mesh = first.device_mesh
            dist.all_reduce(value, group=mesh.get_group(mesh.ndim - 1))
        return value

    def to(self, device: torch.device) -> None:
        """Move the moments (not the step counts) to `device`. Local."""
        for state in self._adamw.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(device)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """Moments and step count of each parameter by name; allocated if there are none yet."""
        return {name: self._state_of(param) for name, param in self._params.items()}

    def _state_of(self, param: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._adamw.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(param).device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
