"""What SGLang needs, or gets wrong, on cpu, and what is done about it.

SGLang calls `install` in each of its processes (entry point `sglang.srt.plugins`). It does nothing
unless the server's environment says that the engine runs on cpu (`server_env.CPU_PLUGIN`).

`nccl_path`
    Without it an engine of more ranks than one dies at its start: with a CUDA build of torch SGLang
    opens NCCL for tensors on cpu too. A library that cannot be opened makes it use gloo alone.
`thread_binding`
    Without it an engine of more ranks than the machine has NUMA nodes dies at its start: SGLang
    gives rank N the cores of node N. Each rank gets a share of the cores that the process may use,
    unless the environment says something else.
`rotary_import`
    Without it a model cannot be built where vLLM is not installed: rotary embeddings import one of
    its kernels for platforms that SGLang does not know, and never call it on cpu. Where vLLM is
    installed, importing it for nothing would cost seconds.
`seeded_sampling`
    Without it the seed of a request is ignored: SGLang hands seeds to its sampler only in
    "deterministic inference", which the attention for cpu refuses. Its torch sampler takes them,
    but hashes them with a kernel that is not on PyPI (`rl_rollout_sglang.seeded_sampling` does it
    without). Requests without a seed get one of the configuration's and of their id.
`batched_attention`
    Without it generation is several times slower, and collapses where other processes use the same
    cores: the torch attention computes one request after the other. Cross attention, sliding
    windows and single prompts stay with SGLang.

Each can be turned off (`switch`), the last two at run time. Its test shows that it is still needed:
it fails once SGLang does without. `PATCHES` says for which versions each was made: it is applied to
no others, and a line says so.

What has to be there before a process starts is in `server_env`, since it is read before SGLang
calls its plugins: `OMP_NUM_THREADS` as the OpenMP library is loaded, and `TORCHDYNAMO_DISABLE` as
SGLang is imported, which decorates functions of its vocabulary, its experts and its penalties
with torch.compile: for many seconds at the first request.

The device module needs no patch: SGLang asks torch for it (and gets CUDA's on a CUDA build) where
it releases memory, which on cpu our scheduler extension does in its place.
"""

import hashlib
import inspect
import logging
import os
import sys
import types
from typing import Any

from rl_core.rollout.patch_switch import PatchSwitch
from rl_core.rollout.version_range import VersionRange
from rl_rollout_sglang.installed_engine import ENGINE
from rl_rollout_sglang.server_env import CPU_PLUGIN, ENGINE_SEED

logger = logging.getLogger(__name__)

SEEN = VersionRange("0.5.23", "0.5.23")
PATCHES = {
    "nccl_path": SEEN,
    "thread_binding": SEEN,
    "rotary_import": SEEN,
    "seeded_sampling": SEEN,
    "batched_attention": SEEN,
}
"""Each patch, with the versions of SGLang in which its cause was seen."""

NCCL_PATH, NO_LIBRARY = "SGLANG_NCCL_SO_PATH", "/nonexistent/libnccl.so"
THREAD_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"

ROTARY_KERNELS = "vllm._custom_ops"


switch = PatchSwitch(PATCHES, ENGINE.version())
"""Which of them are on in this process."""


def active(name: str) -> bool:
    """Whether a patch does its work in this process."""
    return CPU_PLUGIN in os.environ and switch.on(name)


def install() -> None:
    """Apply the patches; before a model is built."""
    if CPU_PLUGIN in os.environ and switch.remark:
        logger.warning("SGLang %s; not applied", switch.remark)
    if active("nccl_path"):
        os.environ[NCCL_PATH] = NO_LIBRARY
    if active("thread_binding"):
        _bind_threads(int(os.environ[CPU_PLUGIN]))
    if active("rotary_import"):
        _stub_rotary_kernels()
    if active("seeded_sampling"):
        _seed_batches()
    if active("batched_attention"):
        _batch_attention()


def core_lists(cores: list[int], ranks: int) -> str:
    """Cores of each rank as SGLang takes them (`0,1|2,3`); shared where there are too few."""
    share = max(1, len(cores) // ranks)
    starts = [rank * share % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def _bind_threads(ranks: int) -> None:
    if ranks > 1:
        os.environ.setdefault(THREAD_BINDING, core_lists(sorted(os.sched_getaffinity(0)), ranks))


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
        if info.sampling_seed is None and active("seeded_sampling"):
            seeds = [_seed(request) for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.device)
        return info

    if getattr(SamplingBatchInfo, "_rl_seeded", False):
        return
    SamplingBatchInfo._rl_seeded = True
    sampler.multinomial_with_seed = multinomial_with_seed
    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _seed(request: Any) -> int:
    """The request's seed, or one of the engine's and its id: the same on every rank."""
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    name = f"{os.environ.get(ENGINE_SEED, '')}:{request.rid}"
    digest = hashlib.blake2s(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


attention_groups = 0
"""Groups of sequences that were computed together in this process."""


def _batch_attention() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if getattr(TorchNativeAttnBackend, "_rl_batched", False):
        return
    TorchNativeAttnBackend._rl_batched = True
    for name, lengths in (("extend", "extend_seq_lens"), ("decode", None)):
        method = f"_run_sdpa_forward_{name}"
        original = getattr(TorchNativeAttnBackend, method)
        setattr(TorchNativeAttnBackend, method, _batched(original, lengths))


def _batched(original: Any, queries_argument: str | None) -> Any:
    """SGLang's method for all requests of a batch, computed in groups where that is possible."""
    signature = inspect.signature(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        special = ("encoder_lens", "is_cross_attn", "sliding_window_size")
        causal = given["causal"] or queries_argument is None
        simple = causal and not any(given[name] for name in special)
        if not (simple and active("batched_attention")):
            return original(*args, **kwargs)
        _run_in_groups(original, given, queries_argument)
        return given["output"]

    return run


def _run_in_groups(original: Any, given: dict[str, Any], queries_argument: str | None) -> None:
    global attention_groups  # noqa: PLW0603 - a counter for tests
    from rl_rollout_sglang.batched_attention import Cache, Span, attend, spans_of

    lengths = given["seq_lens"].tolist()
    counts = given[queries_argument].tolist() if queries_argument else [1] * len(lengths)
    cache = Cache(
        given["k_cache"], given["v_cache"], given["req_to_token"], given["req_pool_indices"]
    )

    def alone(span: Span) -> None:
        rows, one = slice(span.start, span.start + span.queries), slice(span.index, span.index + 1)
        part = dict(given, query=given["query"][rows], output=given["output"][rows])
        for name in ("req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens"):
            if name in part:
                part[name] = part[name][one]
        original(**part)

    spans = spans_of(lengths, counts)
    attention_groups += attend(
        given["query"], given["output"], cache, spans, given["scaling"], alone
    )
