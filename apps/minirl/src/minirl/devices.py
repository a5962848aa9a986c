"""Which kind of device a run uses."""

from pathlib import Path

from rl_core.errors import ConfigError

_NODES = {"npu": "/dev/davinci_manager", "cuda": "/dev/nvidiactl"}


def detect_device(configured: str) -> str:
    """cpu, cuda or npu; ConfigError if the configured kind is not usable here.

    Looks for the vendor's device node before importing torch, which takes seconds.
    """
    if configured == "cpu":
        return "cpu"
    for device in _NODES if configured == "auto" else (configured,):
        if Path(_NODES[device]).exists() and _usable(device):
            return device
    if configured == "auto":
        return "cpu"
    msg = f"cluster.device={configured}: torch finds no such device here; use cluster.device=cpu"
    raise ConfigError(msg)


def _usable(device: str) -> bool:
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_available())
    try:
        import torch_npu  # noqa: F401  (registers torch.npu)
    except (ImportError, OSError, RuntimeError):
        return False
    return bool(torch.npu.is_available())
