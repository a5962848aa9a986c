"""Importing Mooncake, and saying what to install where that fails."""

import importlib
import os
import re
from typing import Any

from rl_core.errors import ComponentLoadError, ComponentNotFoundError, IncompatibleVersionError

NEEDED = (
    "initialize",
    "get_rpc_port",
    "register_memory",
    "unregister_memory",
    "batch_transfer_async_read",
    "transfer_submit_write",
    "transfer_check_status",
)
"""Methods of Mooncake's TransferEngine that are called here."""

_EXTRAS = {"cpu": "cpu", "cuda": "cuda] or rl-ckpt-mooncake[cuda13", "npu": "npu"}

_PACKAGES = {
    "libibverbs": "the Debian package libibverbs1 (apt-get install libibverbs1)",
    "libnuma": "the Debian package libnuma1 (apt-get install libnuma1)",
    "libcurl": "the Debian package libcurl4 (apt-get install libcurl4)",
    "libcud": "a CUDA runtime of the wheel's version, or the extra that fits: [cpu], [cuda], "
    "[cuda13]",
    "libascend": "CANN of Ascend, or the extra that fits: [cpu], [cuda], [cuda13]",
}


def load_library(device: str) -> Any:
    """Mooncake's `TransferEngine` class.

    Args:
        device: `cpu`, `cuda` or `npu`; names the extra in the message.

    Errors: ComponentNotFoundError (not installed), ComponentLoadError naming the missing shared
    library and its Debian package, IncompatibleVersionError.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # looked at when it is imported
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(device, "cpu")
        msg = f"Mooncake is not installed ({error}); pip install 'rl-ckpt-mooncake[{extra}]'"
        raise ComponentNotFoundError(msg) from error
    except ImportError as error:
        raise ComponentLoadError(_cannot_load(str(error))) from error
    engine = getattr(module, "TransferEngine", None)
    lacking = [name for name in NEEDED if not hasattr(engine, name)]
    if lacking:
        msg = f"this Mooncake's TransferEngine has no {', '.join(lacking)}; install 0.3.9 or newer"
        raise IncompatibleVersionError(msg)
    return engine


def _cannot_load(text: str) -> str:
    found = re.search(r"lib[\w+-]+(\.[\w.]+)?", text)
    missing = found.group() if found else ""
    for prefix, remedy in _PACKAGES.items():
        if missing.startswith(prefix):
            return f"Mooncake needs {missing}; install {remedy}"
    return f"Mooncake is installed but cannot be loaded: {text}"
