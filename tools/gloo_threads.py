"""Does torch's gloo still corrupt memory with two threads a group, and not with one?

    uv run tools/gloo_threads.py [seconds]

Runs collectives of a group of one rank, eight at a time, for 20 seconds in each of three processes,
and says how these ended. `rl_train_fsdp.gloo_backend`, which tells the story, is not needed any
more once the first of them survives minutes on busy cores.
"""

import re
import subprocess
import sys

CASES = {
    "torch's own, ALLGATHER_COALESCED": ("gloo", "gather"),
    "torch's own, ALLREDUCE": ("gloo", "reduce"),
    "one thread, ALLGATHER_COALESCED": ("one_thread_gloo", "gather"),
}

_TOLD = re.compile(r"survived|free|corrupt|malloc")

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from rl_train_fsdp import gloo_backend

backend, kind, seconds = sys.argv[1:]
gloo_backend.register()
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
name, tensor, count = dist.group.WORLD.group_name, torch.ones(4), 0
end = time.monotonic() + float(seconds)
while time.monotonic() < end:
    if kind == "gather":
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        for each in [gather(tensor, 1, name) for _ in range(8)]:
            torch.ops._c10d_functional.wait_tensor(each)
    else:
        for each in [dist.all_reduce(tensor, async_op=True) for _ in range(8)]:
            each.wait()
    count += 8
print("survived", count, "collectives")
"""


def main() -> None:
    """Print a line for each case."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "20"
    for name, case in CASES.items():
        command = [sys.executable, "-c", PROGRAM, *case, seconds]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        words = next(
            (line for line in (done.stdout + done.stderr).splitlines() if _TOLD.search(line)), ""
        )
        sys.stdout.write(f"{name}: exit code {done.returncode}, {words}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
