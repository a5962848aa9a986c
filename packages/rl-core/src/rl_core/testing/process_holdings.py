"""What this process holds: memory, files, threads, listening sockets (Linux)."""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from rl_core.testing.checkpoint_orders import Held

_LISTEN = "0A"
_KIB = 1024


class MemoryMeter:
    """Peak of resident memory over the level at the last `start`."""

    def __init__(self) -> None:
        self._base = 0

    def start(self) -> None:
        """Take the present level as zero and forget the peak."""
        Path("/proc/self/clear_refs").write_text("5")
        self._base = _status("VmRSS")

    def peak(self) -> int:
        """Bytes by which the process has grown at most."""
        return max(0, _status("VmHWM") - self._base)


def held() -> Held:
    """A census of this process."""
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        listening=tuple(sorted(_listening())),
        shared=_status("RssShmem"),
        resident=_status("VmRSS"),
    )


def private_bytes(pids: Iterable[int]) -> int:
    """Resident anonymous memory of processes: what they have allocated and touched."""
    return sum(_status("RssAnon", pid) for pid in pids)


def _status(key: str, pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * _KIB
    return 0


def _listening() -> Iterator[str]:
    mine = set(_inodes())
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            host, port = fields[1].split(":")
            if fields[3] == _LISTEN and fields[9] in mine:
                yield f"{_host(host[:width])}:{int(port, 16)}"


def _host(text: str) -> str:
    """An address of /proc/net/tcp; only IPv4 and the IPv6 wildcard are told apart."""
    if set(text) == {"0"}:
        return "*"
    if len(text) == 8:
        return ".".join(str(int(text[at : at + 2], 16)) for at in (6, 4, 2, 0))
    return text


def _inodes() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = Path(f"/proc/self/fd/{name}").readlink().name
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:["):
            yield target[8:-1]
