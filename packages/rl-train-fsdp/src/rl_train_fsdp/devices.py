"""The device of a rank: `cpu`, `cuda` or `npu`, chosen by its `RankPlace`, never guessed."""

import importlib
import os

import torch

from rl_core.errors import ComponentLoadError, ConfigError
from rl_train_fsdp.gloo_backend import ONE_THREAD_GLOO

BACKENDS = {"cpu": ONE_THREAD_GLOO, "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""Process-group backend of each device type; host tensors always travel over gloo.

On an accelerator these are a few numbers, by collectives with short names: see `gloo_backend`.
"""


def select_device(device: str, local_rank: int) -> torch.device:
    """Make this rank's device current and return it.

    Args:
        device: `cpu`, `cuda` or `npu`.
        local_rank: rank on this node. With one visible device per process it is device 0.

    ConfigError for another name, ComponentLoadError where the device cannot be used.
    """
    if device not in BACKENDS:
        raise ConfigError(f"device {device!r} is none of {', '.join(BACKENDS)}")
    if device == "cpu":
        return torch.device("cpu")
    if device == "npu":
        _import_torch_npu()
    module = accelerator(device)
    if not module.is_available():
        raise ComponentLoadError(f"this process sees no {device} device; check its visibility")
    index = local_rank % module.device_count()
    module.set_device(index)
    return torch.device(device, index)


def accelerator(device: str) -> "torch.cuda":
    """Torch's module of an accelerator (`torch.cuda`, `torch.npu`: they have the same names)."""
    return getattr(torch, device)


def set_threads(ranks_on_node: int) -> int:
    """Share this process's cores among the ranks of its node; the number of threads set."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_on_node)
    torch.set_num_threads(threads)
    return threads


def _import_torch_npu() -> None:
    # With torch_npu installed but its libraries missing, plain `import torch` fails as well
    # unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set before it: so it is imported here, on demand.
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        msg = f"device npu needs torch_npu and CANN; importing torch_npu failed: {error}"
        raise ComponentLoadError(msg) from error
