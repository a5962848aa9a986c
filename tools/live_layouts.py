"""Compares the layout tables with what real engines hold, for every family and number of ranks.

    python tools/live_layouts.py --engine vllm sglang --tp 1 2 --family llama qwen3_moe

For each of them a replica on a tiny random model is started, synced twice, and checked: every rank
holds what the table says and nothing else; stale and swapped tensors are named; so is one flipped
bit in any live tensor of any rank. Prints one line each; exit code 1 if one of them fails. Takes
half a minute each: it is not part of the test run, which covers one engine of every kind.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from rl_core import plugins
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.rollout_case import RolloutCase, RolloutUnderTest
from rl_core.testing.rollout_contract import RolloutAdapterContract
from rl_core.testing.started_replica import StartedReplica
from rl_core.testing.weight_set import WeightSet

SHAPE = {
    "vocab_size": 80,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {"tie_word_embeddings": False, **EXPERTS}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {}),
    "gemma3": ("Gemma3", {}),
}
"""Name in transformers and what differs from the shape above."""

TESTS = (
    "test_every_rank_holds_what_the_layout_says",
    "test_a_stale_or_swapped_tensor_is_named",
    "test_a_flipped_bit_is_named",
)
FLIP = {"vllm": "rl_flip", "sglang": "flip"}


class Held(RolloutAdapterContract):
    """The contract, to be called test by test."""


def make_weights(family: str, path: Path, seed: int) -> WeightSet:
    """Save a random model; its weights as a trainer publishes them."""
    torch.manual_seed(seed)
    name, more = FAMILIES[family]
    config_cls = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config_cls(**SHAPE | more)).float()
    for key, parameter in model.named_parameters():
        if "norm" in key or "bias" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tied = "lm_head.weight" not in tensors
    return WeightSet(tensors, {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {})


def check(engine: str, family: str, tp_size: int, directory: Path) -> str:
    """Start one replica and check it; what the table says of it."""
    paths = [directory / "a", directory / "b"]
    weights = [make_weights(family, path, seed) for seed, path in enumerate(paths)]
    backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, engine)
    config = plugins.load_object(backend.config_cls)(
        local_path=str(paths[0]),
        dtype="float32",
        tensor_model_parallel_size=tp_size,
        kv_cache_memory_gb=0.0625,
        log_dir=str(directory / "logs"),
    )
    launcher = ProcessLauncher(directory / "logs")
    replica = plugins.load_object(backend.replica)(config, launcher, Placement(tp_size=tp_size))
    try:
        started = StartedReplica(backend, replica, config)
        given = RolloutUnderTest(
            started.adapters,
            *weights,
            prompts=[[5, 6, 7, 8], [40, 41]],
            layout=plugins.load_object(backend.layout)(
                json.loads((paths[0] / "config.json").read_text()), config
            ),
            flip=lambda *what: started.worker(FLIP[engine], *what),
            steps=started.steps,
        )
        case = RolloutCase(given)
        for test in TESTS:
            getattr(Held(), test)(case)
        held = started.adapters[0].live_digests(60)
        case.threads.shutdown(wait=False)
        return f"ok: {', '.join(str(len(rank)) for rank in held)} live tensors a rank"
    finally:
        replica.shutdown(30)


def main() -> int:
    """Run the chosen part of the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=sorted(FLIP), default=sorted(FLIP))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    options = parser.parse_args()
    cells = [(e, f, tp) for e in options.engine for f in options.family for tp in options.tp]
    failed = 0
    for cell in cells:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                outcome = check(*cell, Path(directory))
            except Exception as error:  # noqa: BLE001 - one line each; the next may be sound
                failed += 1
                outcome = f"FAILED: {type(error).__name__}: {error}"[:2000]
        engine, family, tp = cell
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{engine:7} {family:18} tp {tp}  {seconds:5.0f} s  {outcome}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
