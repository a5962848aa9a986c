"""Processors, memory, devices, shared libraries and ports, as `minirl doctor` sees them."""

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from minirl import socket_room
from minirl.devices import REMEDY, accelerator, unused_accelerator
from minirl.findings import MISSING, NOTE, OK, Finding
from minirl.machine_memory import group_limit

_GB = 1 << 30
_RUN_BYTES = 4 * _GB
"""The default run peaks at 3.3 GB (PSS of all processes)."""
_SHM_BYTES = 1 * _GB
_DISK_BYTES = 2 * _GB
_OPEN_FILES = 4096
_PORTS = 32
_NVIDIA = Path("/proc/driver/nvidia")
"""Where NVIDIA's kernel module tells of itself and of its devices."""

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "libnuma.so.1": ("libnuma1", "vLLM's CPU build, Mooncake"),
    "libibverbs.so.1": ("libibverbs1", "Mooncake"),
    "libcurl.so.4": ("libcurl4", "Mooncake"),
    "libstdc++.so.6": ("libstdc++6", "PyTorch and every engine"),
}
"""Debian packages of shared libraries that wheels link against and do not bring, and whose."""


def look_at_machine() -> Iterator[Finding]:
    """One finding after the other."""
    yield _system()
    yield _memory()
    yield from _devices()
    yield _shared_memory(Path("/dev/shm"))
    yield from _directories()
    yield _open_files()
    yield _ports()
    for soname, (package, whose) in LIBRARIES.items():
        yield _library(soname, package, whose)


def _system() -> Finding:
    cores = len(os.sched_getaffinity(0))
    words = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
    words += f"{cores} cores"
    if sys.platform != "linux":
        return Finding(MISSING, words, "the engines and Ray's actors need Linux")
    if cores < 2:
        return Finding(
            NOTE, words, "with two cores training and serving do not wait for each other"
        )
    return Finding(OK, words)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    group = group_limit()
    words = f"memory: {free / _GB:.1f} GB of {total / _GB:.1f} GB free"
    if group is not None:
        limit, left = group
        total, free = min(total, limit), min(free, left)
        words += f", {left / _GB:.1f} GB left of this container's {limit / _GB:.1f} GB"
    if total < _RUN_BYTES:
        return Finding(MISSING, words, f"the default run needs {_RUN_BYTES // _GB} GB")
    if free < _RUN_BYTES:
        remedy = f"the default run needs {_RUN_BYTES // _GB} GB: end other programs"
        return Finding(NOTE, words, remedy)
    return Finding(OK, words)


def _devices() -> Iterator[Finding]:
    found = accelerator()
    if found is None:
        yield Finding(OK, "devices: no accelerator, everything runs on the CPU")
        return
    names = ", ".join(_names(found)) or "no names"
    unused = unused_accelerator()
    if unused is not None:
        yield Finding(NOTE, f"devices: {unused}: everything runs on the CPU ({names})", REMEDY)
    else:
        yield Finding(OK, f"devices: {found} ({names})")


def _names(device: str) -> list[str]:
    if device == "npu":
        return sorted(path.name for path in Path("/dev").glob("davinci[0-9]*"))
    models = []
    for file in sorted(_NVIDIA.glob("gpus/*/information")):
        lines = file.read_text(errors="replace").splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models + _driver()


def _driver() -> list[str]:
    """The version of NVIDIA's kernel module."""
    try:
        text = (_NVIDIA / "version").read_text(errors="replace")
    except OSError:
        return []
    found = re.search(r"\b\d{3,}\.\d[\d.]*", text)
    return [f"driver {found[0]}"] if found else []


def _shared_memory(path: Path) -> Finding:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        remedy = "mount a tmpfs there: Ray and engines with several ranks use it"
        return Finding(MISSING, f"shared memory: {path}: {error.strerror}", remedy)
    words = f"shared memory: {free / _GB:.2f} GB free in {path} (our own buffers need none there)"
    if free < _SHM_BYTES:
        remedy = (
            "Ray and engines with several ranks use it; in Docker: --shm-size=4g, or --ipc=host"
        )
        return Finding(NOTE, words, remedy)
    return Finding(OK, words)


def _directories() -> Iterator[Finding]:
    temporary = tempfile.gettempdir()
    if not socket_room.fits(temporary):
        words = f"temporary directory: {temporary} is a long name"
        yield Finding(MISSING, words, socket_room.REMEDY)
    for name, path in (("temporary directory", temporary), ("working directory", str(Path.cwd()))):
        free = shutil.disk_usage(path).free
        words = f"{name}: {path}, {free / _GB:.1f} GB free"
        if not os.access(path, os.W_OK):
            yield Finding(MISSING, words, "it cannot be written to")
        elif free < _DISK_BYTES:
            yield Finding(NOTE, words, "runs, checkpoints and Ray's files may not fit")
        else:
            yield Finding(OK, words)


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"open files: {soft} for a process, {hard} at most"
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        return Finding(NOTE, words, "with many workers Ray needs more: ulimit -n 65536")
    return Finding(OK, words)


def _ports() -> Finding:
    """Servers listen on the loopback interface, on ports that the system chooses."""
    words = f"ports: {_PORTS} free ones on 127.0.0.1"
    sockets = []
    try:
        for _ in range(_PORTS):
            sockets.append(socket.create_server(("127.0.0.1", 0)))  # noqa: PERF401
    except OSError as error:
        remedy = f"{error.strerror}: bring up the loopback interface, or end what holds the ports"
        return Finding(MISSING, f"ports: only {len(sockets)} free ones on 127.0.0.1", remedy)
    finally:
        for opened in sockets:
            opened.close()
    return Finding(OK, words)


def _library(soname: str, package: str, whose: str) -> Finding:
    try:
        ctypes.CDLL(soname)
    except OSError:
        remedy = f"for {whose}: apt-get install {package}"
        return Finding(NOTE, f"library: {soname} is not there", remedy)
    return Finding(OK, f"library: {soname} (Debian's {package}; {whose})")
