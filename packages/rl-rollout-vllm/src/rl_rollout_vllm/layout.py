"""vLLM's layout of models, as tables: what each engine rank holds. Imports nothing of vLLM.

Compared with the live tensors of vLLM 0.32 on cpu. The tables for other devices say what is known
to differ there from vLLM's source and have never been compared.

To add a family whose layers are of the usual kind, give it a row in `FAMILIES`; nothing else has to
change. `minirl layout MODEL rollout.name=vllm` prints a model's table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from rl_core.layout import Buffer, Constant, LayoutSpec, Parameter, Part
from rl_core.rollout.decoder_rows import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    LAYER,
    ModelFacts,
    experts,
    facts_of,
    rotary,
    vocabulary,
)
from rl_rollout_vllm.config import VllmConfig

EXPERTS = "experts.routed_experts"
"""Below a layer's `mlp`, the module that holds the stacks of experts."""

CPU_EXPERT_PAD = 32
"""Multiple to which vLLM's CPU kernels fill up the width of an expert on each rank."""

HEADLESS = ("Gemma2ForCausalLM",)
"""Families without a head of their own."""

SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu")
"""Scales of the attention: 1, since neither the cache nor the queries are quantised."""

SECOND_GATE = Parameter(f"{LAYER}mlp.experts.gate.weight", (Part(f"{LAYER}mlp.gate.weight"),))
"""The experts know the router under a name of their own."""

PACKED = ".packed"
"""Ends the name of what a packed linear kernel computes with."""


def layout(model_config: Mapping[str, Any], config: VllmConfig, device: str = "cpu") -> LayoutSpec:
    """The layout of a model.

    Args:
        model_config: its `config.json`.
        config: how the replica is started.
        device: `cpu`, or an accelerator.

    Errors: ConfigError for an architecture without a table.
    """
    facts = facts_of(model_config, FAMILIES)
    rows = (*vocabulary(facts, HEADLESS), *FAMILIES[facts.family])
    stacks: tuple[Parameter, ...] = ()
    if facts.family == "Qwen3MoeForCausalLM":
        rows, stacks = (*rows, SECOND_GATE), experts(EXPERTS, CPU_EXPERT_PAD)
    if device == "cpu" and config.cpu_packed_weights:
        rows = tuple(_packed(rows))
    # On accelerators the kernel that vLLM chooses may swap the halves of the stacks or block them.
    known, unknown = (stacks, ()) if device == "cpu" else ((), tuple(row.name for row in stacks))
    buffers = _buffers(facts, config.dtype, device)
    return facts.laid_out("vllm", device, config.dtype, (*rows, *known), buffers, unknown)


def _packed(rows: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """The rows of a replica whose linear layers are packed: kernels hold the weights instead."""
    for row in rows:
        linear = row.name.endswith(("_proj.weight", ".gate.weight"))
        if row.name in (EMBEDDING, HEAD):  # served from both
            yield row
        if linear or row.name in (EMBEDDING, HEAD):
            yield replace(row, name=row.name + PACKED, change="unsigned_zeros")
        else:
            yield row


def _buffers(facts: ModelFacts, dtype: str, device: str) -> Iterator[Buffer]:
    if device == "cpu":  # elsewhere the device computes them, with other last bits
        name = f"{LAYER}self_attn.rotary_emb.cos_sin_cache"
        yield from rotary(facts, name, facts.positions, dtype)
    for name in SCALES:
        yield Constant(f"{LAYER}self_attn.attn.{name}", 1.0, (), "float32")
    if facts.family.startswith("Gemma"):
        yield Constant("model.normalizer", facts.hidden**0.5, (), dtype)
