"""SGLang's layout of models, as tables: what each engine rank holds. Imports nothing of SGLang.

Compared with the live tensors of SGLang 0.5.23 on cpu. The tables for other devices say what is
known to differ there from SGLang's source and have never been compared.

To add a family whose layers are of the usual kind, give it a row in `TABLES`; nothing else has to
change. `minirl layout MODEL rollout.name=sglang` prints a model's table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rl_core.layout import Buffer, Constant, Frequencies, LayoutSpec, Parameter, Part
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
from rl_rollout_sglang.config import SglangConfig

HEADLESS = ("GemmaForCausalLM", "Gemma2ForCausalLM")
"""Families without a head of their own."""

ROTARY_MARGIN, ROTARY_ALIGN = 256, 128
"""SGLang reserves this many positions more than the context, up to a multiple."""


def _gemma(rows: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Gemma: norms are stored with 1 added."""
    return tuple(replace(row, change="plus_one") if _norm(row) else row for row in rows)


def _gemma2(rows: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Gemma 2: norms are stored as they are, and once more with 1 added, which is what is used."""
    added = [
        replace(row, name=row.name.replace("norm.weight", "norm.gemma_weight"), change="plus_one")
        for row in rows
        if _norm(row)
    ]
    return (*rows, *added)


def _norm(row: Parameter) -> bool:
    return row.name.endswith("norm.weight")


TABLES: Mapping[str, Sequence[Parameter]] = {
    **FAMILIES,
    "Qwen3MoeForCausalLM": (*FAMILIES["Qwen3MoeForCausalLM"], *experts("experts", pad=1)),
    "GemmaForCausalLM": _gemma(FAMILIES["GemmaForCausalLM"]),
    "Gemma2ForCausalLM": _gemma2(FAMILIES["Gemma2ForCausalLM"]),
}
"""By architecture, without embedding and head."""

WHOLE_VOCABULARY = (
    Parameter(EMBEDDING, (Part(EMBEDDING),)),
    Parameter(HEAD, (Part(EMBEDDING),)),
)
"""Gemma 3: embedding and head are on every rank, without padding."""


def layout(
    model_config: Mapping[str, Any], config: SglangConfig, device: str = "cpu"
) -> LayoutSpec:
    """The layout of a model.

    Args:
        model_config: its `config.json`.
        config: how the replica is started.
        device: `cpu`, or an accelerator.

    Errors: ConfigError for an architecture without a table.
    """
    facts = facts_of(model_config, TABLES)
    gemma3 = facts.family == "Gemma3ForCausalLM"
    ends = WHOLE_VOCABULARY if gemma3 else vocabulary(facts, HEADLESS)
    rows = (*ends, *TABLES[facts.family])
    unknown: tuple[str, ...] = ()
    if device != "cpu":
        # MoE kernels for accelerators may swap or block the stacks (the choice is SGLang's).
        stacks = {row.name for row in experts("experts", pad=1)}
        rows, unknown = tuple(row for row in rows if row.name not in stacks), tuple(stacks)
    buffers = _buffers(facts, config, device)
    return facts.laid_out("sglang", device, config.dtype, rows, buffers, unknown)


def _buffers(facts: ModelFacts, config: SglangConfig, device: str) -> Iterator[Buffer]:
    if facts.family == "Gemma2ForCausalLM":
        yield Constant("model.normalizer", facts.hidden**0.5, (), config.dtype)
    if device != "cpu":  # there the device computes rotary tables, with other last bits
        return
    context = config.max_model_len or facts.positions
    reserved = -(-(context + ROTARY_MARGIN) // ROTARY_ALIGN) * ROTARY_ALIGN
    positions = max(facts.positions, reserved)
    name = f"{LAYER}self_attn.rotary_emb.cos_sin_cache"
    yield from rotary(facts, name, positions, config.dtype)
    if facts.family == "Gemma3ForCausalLM":
        yield from _gemma3_frequencies(facts)


def _gemma3_frequencies(facts: ModelFacts) -> Iterator[Frequencies]:
    """Gemma 3 computes its angles from these, whatever the tables of its layers say."""
    rope = facts.raw.get("rope_parameters") or {}
    for module, kind in (
        ("rotary_emb", "full_attention"),
        ("rotary_emb_local", "sliding_attention"),
    ):
        settings = rope.get(kind, {})
        if settings.get("rope_type", "default") == "default" and "rope_theta" in settings:
            for name in ("inv_freq", "original_inv_freq"):
                base = float(settings["rope_theta"])
                yield Frequencies(f"model.{module}.{name}", facts.head_dim, base)
