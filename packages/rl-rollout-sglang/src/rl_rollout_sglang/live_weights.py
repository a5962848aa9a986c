"""What one SGLang rank holds and how it runs, for whoever compares it with a layout."""

from typing import Any

from msgspec.structs import asdict
from sglang.srt.runtime_context import get_parallel

from rl_core.rollout.live_ranks import RankWeights, split_of
from rl_rollout_sglang import live_digests

SPLITS = {
    "pp_size": "pipeline_parallel_size",
    "attn_dp_size": "attention_data_parallel_size",
    "moe_ep_size": "expert_parallel_size",
    "attn_cp_size": "context_parallel_size",
}
"""SGLang's names for ways of spreading a model, and how they are reported."""


def of_runner(runner: Any) -> dict[str, Any]:
    """A `RankWeights` of SGLang's model runner, as plain data; errors as `live_digests`."""
    parallel, model_config = get_parallel(), runner.model_config
    settings = {
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "tensor_model_parallel_size": int(parallel.tp_size),
        "max_model_len": int(model_config.context_len),
    }
    split = {name: int(getattr(parallel, key, 1)) for key, name in SPLITS.items()}
    return asdict(
        RankWeights(
            int(parallel.tp_rank),
            str(runner.device),
            settings,
            split_of(**split),
            live_digests.live_digests(runner.model),
        )
    )
