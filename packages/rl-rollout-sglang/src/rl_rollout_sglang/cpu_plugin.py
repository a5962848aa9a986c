"""What SGLang needs, or gets wrong, on cpu, and what is done about it.

SGLang calls `install` in each of its processes (entry point `sglang.srt.plugins`). It does nothing
unless the server's environment says that the engine runs on cpu (`server_env.CPU_PLUGIN`).

`rotary_import`
    Without it a model cannot be built where vLLM is not installed: rotary embeddings import one of
    its kernels for platforms that SGLang does not know, and never call it on cpu. Where vLLM is
    installed, importing it for nothing would cost seconds. Seen in 0.5.23.
`seeded_sampling`
    Without it the seed of a request is ignored: SGLang hands seeds to its sampler only in
    "deterministic inference", which the attention for cpu refuses. Its torch sampler takes them,
    but hashes them with a kernel that is not on PyPI (`rl_rollout_sglang.seeded_sampling` does it
    without). Requests without a seed get one of their id. Seen in 0.5.23.

Each can be turned off (`RL_ROLLOUT_SGLANG_DISABLE`, names separated by commas), which is how its
test shows that it is still needed.
"""

import hashlib
import os
import sys
import types
from typing import Any

from rl_rollout_sglang.server_env import CPU_PLUGIN

DISABLE = "RL_ROLLOUT_SGLANG_DISABLE"

ROTARY_KERNELS = "vllm._custom_ops"


def active(name: str) -> bool:
    """Whether a patch does its work in this process."""
    disabled = os.environ.get(DISABLE, "").split(",")
    return os.environ.get(CPU_PLUGIN) == "1" and name not in disabled


def install() -> None:
    """Apply the patches; before a model is built."""
    if active("rotary_import"):
        _stub_rotary_kernels()
    if active("seeded_sampling"):
        _seed_batches()


def _stub_rotary_kernels() -> None:
    if ROTARY_KERNELS in sys.modules:
        return

    def rotary_embedding(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("vLLM's rotary kernel was called, which SGLang does not do on cpu")

    stub = types.ModuleType(ROTARY_KERNELS, "Stands for a module that is imported, never used.")
    stub.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules[ROTARY_KERNELS] = stub


def _seed_batches() -> None:
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from rl_rollout_sglang.seeded_sampling import multinomial_with_seed

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = [_seed(request) for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.device)
        return info

    if getattr(SamplingBatchInfo, "_rl_seeded", False):
        return
    SamplingBatchInfo._rl_seeded = True
    sampler.multinomial_with_seed = multinomial_with_seed
    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _seed(request: Any) -> int:
    """The request's seed, or one of its id, which is the same on every rank."""
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    digest = hashlib.blake2s(str(request.rid).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
