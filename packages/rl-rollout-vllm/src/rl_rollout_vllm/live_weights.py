"""What one vLLM rank holds and how it runs, for whoever compares it with a layout."""

from typing import Any

from msgspec.structs import asdict

from rl_core.rollout.live_ranks import RankWeights, split_of
from rl_rollout_vllm import cpu_patches, live_digests

SPLITS = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


def of_worker(worker: Any) -> dict[str, Any]:
    """A `RankWeights` of a vLLM worker, as plain data; errors as `live_digests`."""
    model, vllm_config = worker.model_runner.model, worker.vllm_config
    parallel = vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    experts = tp_size * parallel.data_parallel_size if parallel.enable_expert_parallel else 1
    settings = {
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "tensor_model_parallel_size": tp_size,
        "max_model_len": vllm_config.model_config.max_model_len,
        "cpu_packed_weights": cpu_patches.packed_linear(model),
    }
    split = {name: getattr(parallel, name, 1) for name in SPLITS}
    return asdict(
        RankWeights(
            worker.rank,
            vllm_config.device_config.device_type,
            settings,
            split_of(expert_parallel_size=experts, **split),
            live_digests.live_digests(model),
        )
    )
