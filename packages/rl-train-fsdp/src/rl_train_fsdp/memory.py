"""How much memory a rank uses: of its accelerator, or of the process where there is none."""

from dataclasses import dataclass
from pathlib import Path

import torch

from rl_train_fsdp.devices import accelerator

_GB = 1024**3


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use.

    Attributes:
        allocated: by tensors; on cpu the resident set of this process.
        reserved: by torch's allocator; on cpu the peak resident set.
        used: on the device (or machine) by everybody.
        total: capacity of the device (or machine).
    """

    allocated: int
    reserved: int
    used: int
    total: int

    @classmethod
    def measure(cls, device: torch.device) -> "MemoryUse":
        """Ask torch, or /proc where the device is the cpu."""
        if device.type == "cpu":
            return _of_process()
        module = accelerator(device.type)
        free, total = module.mem_get_info()
        allocated, reserved = module.memory_allocated(), module.memory_reserved()
        return cls(allocated, reserved, total - free, total)

    def line(self, head: str) -> str:
        """`head` and the numbers, in GB of 2**30 bytes, as the log shows them."""
        return (
            f"{head}, memory allocated (GB): {self.allocated / _GB:.2f}, "
            f"memory reserved (GB): {self.reserved / _GB:.2f}, "
            f"device memory used/total (GB): {self.used / _GB:.2f}/{self.total / _GB:.2f}"
        )


def _of_process() -> MemoryUse:
    status = _read_kilobytes(Path("/proc/self/status"))
    system = _read_kilobytes(Path("/proc/meminfo"))
    total = system["MemTotal"]
    return MemoryUse(status["VmRSS"], status["VmHWM"], total - system["MemAvailable"], total)


def _read_kilobytes(file: Path) -> dict[str, int]:
    """The `Key: 123 kB` lines of a /proc file, in bytes."""
    values = {}
    for line in file.read_text().splitlines():
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB":
            values[key] = int(number) * 1024
    return values


def parameter_count_line(architecture: str, count: int) -> str:
    """`Qwen3ForCausalLM contains 30.53B parameters`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{architecture} contains {count / size:.2f}{unit} parameters"
    return f"{architecture} contains {count} parameters"
