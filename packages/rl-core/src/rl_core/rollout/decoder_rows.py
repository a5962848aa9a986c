"""Rows that the layouts of decoder models have in common, whichever engine runs them.

An engine's `layout` module puts its tables together from these and its own. What is here was
compared with the live tensors of vLLM 0.32 and SGLang 0.5.23.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ConfigError
from rl_core.layout import Buffer, Cut, LayoutSpec, Parameter, Part, Rotary
from rl_core.metadata import nearest

LAYER = "model.layers.{layer}."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY_PAD = 64
TIED = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Families whose head is tied where `config.json` does not say."""


def same(name: str, cut: Cut = "whole") -> Parameter:
    """A tensor that keeps its name."""
    return Parameter(name, (Part(name, cut),))


ATTENTION: tuple[Parameter, ...] = (
    *(
        Parameter(
            f"{LAYER}self_attn.qkv_proj.{kind}",
            (
                Part(f"{LAYER}self_attn.q_proj.{kind}", "rows"),
                Part(f"{LAYER}self_attn.k_proj.{kind}", "kv_heads"),
                Part(f"{LAYER}self_attn.v_proj.{kind}", "kv_heads"),
            ),
        )
        for kind in ("weight", "bias")
    ),
    same(f"{LAYER}self_attn.o_proj.weight", "columns"),
    same(f"{LAYER}self_attn.o_proj.bias"),
)
"""Query, key and value in one; the output projection is summed over the ranks."""

HEAD_NORMS = tuple(same(f"{LAYER}self_attn.{part}_norm.weight") for part in "qk")

MLP: tuple[Parameter, ...] = (
    *(
        Parameter(
            f"{LAYER}mlp.gate_up_proj.{kind}",
            (
                Part(f"{LAYER}mlp.gate_proj.{kind}", "rows"),
                Part(f"{LAYER}mlp.up_proj.{kind}", "rows"),
            ),
        )
        for kind in ("weight", "bias")
    ),
    same(f"{LAYER}mlp.down_proj.weight", "columns"),
    same(f"{LAYER}mlp.down_proj.bias"),
)

NORMS = (
    same(f"{LAYER}input_layernorm.weight"),
    same(f"{LAYER}post_attention_layernorm.weight"),
    same("model.norm.weight"),
)

GEMMA_NORMS = (
    *NORMS,
    same(f"{LAYER}pre_feedforward_layernorm.weight"),
    same(f"{LAYER}post_feedforward_layernorm.weight"),
)
"""Stored as in the checkpoint: 1 is added in the computation."""

DECODER = (*ATTENTION, *MLP, *NORMS)

FAMILIES: Mapping[str, Sequence[Parameter]] = {
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": (*DECODER, *HEAD_NORMS),
    "Qwen3MoeForCausalLM": (*DECODER, *HEAD_NORMS, same(f"{LAYER}mlp.gate.weight")),
    "GemmaForCausalLM": (*ATTENTION, *MLP, *GEMMA_NORMS),
    "Gemma2ForCausalLM": (*ATTENTION, *MLP, *GEMMA_NORMS),
    "Gemma3ForCausalLM": (*ATTENTION, *MLP, *GEMMA_NORMS, *HEAD_NORMS),
}
"""By architecture, without embedding, head and experts, whose layout is the engine's own."""


def experts(module: str, pad: int) -> tuple[Parameter, Parameter]:
    """Stacks of experts: gate over up, and down.

    Args:
        module: run-time name of the module that holds them, below `mlp.`.
        pad: multiple to which the width of an expert is filled up on each rank.
    """
    source = f"{LAYER}mlp.experts.{{expert}}."
    gate_up = (Part(f"{source}gate_proj.weight", "rows"), Part(f"{source}up_proj.weight", "rows"))
    down = (Part(f"{source}down_proj.weight", "columns"),)
    return (
        Parameter(f"{LAYER}mlp.{module}.w13_weight", gate_up, pad),
        Parameter(f"{LAYER}mlp.{module}.w2_weight", down, pad),
    )


def vocabulary(facts: "ModelFacts", headless: Container[str]) -> tuple[Parameter, ...]:
    """Embedding and head; a tied head is made of the embedding.

    Args:
        facts: of the model.
        headless: families in which the engine takes the embedding itself for the head.
    """
    embedding = Parameter(EMBEDDING, (Part(EMBEDDING, "vocabulary"),), VOCABULARY_PAD)
    if facts.family in headless:
        return (embedding,)
    source = EMBEDDING if facts.tied else HEAD
    return embedding, Parameter(HEAD, (Part(source, "vocabulary"),), VOCABULARY_PAD)


@dataclass(frozen=True)
class ModelFacts:
    """What a layout needs of a model's `config.json`.

    Attributes:
        family: its architecture.
        layers: decoder layers.
        hidden: width.
        kv_heads: key-value heads.
        head_dim: elements of a head.
        tied: whether the head is the embedding.
        positions: `max_position_embeddings`.
        raw: the whole `config.json`.
    """

    family: str
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    tied: bool
    positions: int
    raw: Mapping[str, Any]

    def laid_out(
        self,
        engine: str,
        device: str,
        dtype: str,
        rows: Iterable[Parameter],
        buffers: Iterable[Buffer],
        unknown: Iterable[str],
    ) -> LayoutSpec:
        """The layout that consists of these rows; a tied head in the checkpoint is not used."""
        return LayoutSpec(
            engine=engine,
            family=self.family,
            device=device,
            dtype=dtype,
            layers=self.layers,
            kv_heads=self.kv_heads,
            parameters=tuple(rows),
            buffers=tuple(buffers),
            unused=(HEAD,) if self.tied else (),
            unknown=tuple(unknown),
        )


def facts_of(config: Mapping[str, Any], known: Mapping[str, Any]) -> ModelFacts:
    """The facts; ConfigError for an architecture that is not in the table `known`, or no sizes."""
    family = (config.get("architectures") or ["?"])[0]
    if family not in known:
        hint = nearest(family, known)
        raise ConfigError(f"no layout table for {family}; the nearest that there is: {hint}")
    try:
        return _facts(family, config)
    except KeyError as error:
        raise ConfigError(f"config.json of this {family} lacks {error}") from error


def _facts(family: str, config: Mapping[str, Any]) -> ModelFacts:
    heads = config["num_attention_heads"]
    return ModelFacts(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tied=config.get("tie_word_embeddings", family in TIED),
        positions=config["max_position_embeddings"],
        raw=config,
    )


def rotary(facts: ModelFacts, name: str, positions: int, dtype: str) -> list[Rotary]:
    """The rotary tables of all layers; none where positions are scaled in some way."""
    rope = facts.raw.get("rope_parameters") or {}
    kinds = facts.raw.get("layer_types") or []
    groups: list[tuple[Mapping[str, Any], tuple[int, ...] | None]]
    if any(isinstance(value, Mapping) for value in rope.values()):  # one for each kind of layer
        groups = [(rope[kind], _where(kinds, kind)) for kind in dict.fromkeys(kinds)]
    else:
        groups = [({**facts.raw, **rope}, None)]
    found = []
    for settings, layers in groups:
        scaling = settings.get("rope_scaling") or settings
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            continue
        dim = int(facts.head_dim * settings.get("partial_rotary_factor", 1.0))
        base = float(settings.get("rope_theta", 10000.0))
        found.append(Rotary(name, dim, positions, base, dtype, layers))
    return found


def _where(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(index for index, each in enumerate(kinds) if each == kind)
