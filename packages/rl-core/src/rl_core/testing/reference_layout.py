"""Where each Hugging Face tensor goes in the reference engine's run-time layout.

Data, not code in the loader: fused projections (`qkv`, `gate_up`), tensor-parallel slices (rows
of what is fused, columns of what is summed), everything else whole on every rank.
"""

from dataclasses import dataclass

from rl_core.layout import Cut, LayoutSpec, Parameter, Part
from rl_core.testing.reference_weights import (
    EMBEDDING,
    HEAD,
    INV_FREQ,
    SCALE,
    ReferenceModelConfig,
    shapes,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """Where (a slice of) one tensor goes.

    Attributes:
        parameter: name of the run-time parameter.
        row: its first row there.
        dim: dimension that is sliced over the ranks, or None.
    """

    parameter: str
    row: int = 0
    dim: int | None = None


@dataclass(frozen=True)
class RankLayout:
    """The layout of one tensor-parallel rank.

    Attributes:
        parameters: shapes of the run-time parameters.
        targets: by Hugging Face name.
        full: full shapes, by Hugging Face name.
    """

    parameters: dict[str, Shape]
    targets: dict[str, Target]
    full: dict[str, Shape]


def layout(config: ReferenceModelConfig, tp_size: int) -> RankLayout:
    """The layout of every rank of `tp_size` (ranks differ only in which slice they take)."""
    hidden, mlp = config.hidden, config.intermediate // tp_size
    mine = hidden // tp_size
    parameters: dict[str, Shape] = {"embed": (config.vocab, hidden), "norm": (hidden,)}
    parameters |= {"inv_freq": (config.head_dim // 2,), "scale": ()}
    targets = {
        EMBEDDING: Target("embed"),
        "model.norm.weight": Target("norm"),
        INV_FREQ: Target("inv_freq"),
        SCALE: Target("scale"),
    }
    if not config.tied:
        parameters["head"] = (config.vocab, hidden)
        targets[HEAD] = Target("head")
    for layer in range(config.layers):
        source, own = f"model.layers.{layer}.", f"layers.{layer}."
        parameters |= {
            own + "norm_1": (hidden,),
            own + "qkv": (3 * mine, hidden),
            own + "o": (hidden, mine),
            own + "norm_2": (hidden,),
            own + "gate_up": (2 * mlp, hidden),
            own + "down": (hidden, mlp),
        }
        targets |= {
            source + "input_layernorm.weight": Target(own + "norm_1"),
            source + "self_attn.q_proj.weight": Target(own + "qkv", 0, 0),
            source + "self_attn.k_proj.weight": Target(own + "qkv", mine, 0),
            source + "self_attn.v_proj.weight": Target(own + "qkv", 2 * mine, 0),
            source + "self_attn.o_proj.weight": Target(own + "o", 0, 1),
            source + "post_attention_layernorm.weight": Target(own + "norm_2"),
            source + "mlp.gate_proj.weight": Target(own + "gate_up", 0, 0),
            source + "mlp.up_proj.weight": Target(own + "gate_up", mlp, 0),
            source + "mlp.down_proj.weight": Target(own + "down", 0, 1),
        }
    return RankLayout(parameters, targets, shapes(config))


def layout_spec(config: ReferenceModelConfig) -> LayoutSpec:
    """The same as a layout spec, which the loader does not use.

    What `post_process` derives is in no row: it is declared unknown.
    """
    layer = "layers.{layer}."
    source = f"model.{layer}"
    fused = {
        "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    }
    kept: dict[str, tuple[str, Cut]] = {
        "embed": (EMBEDDING, "whole"),
        "norm": ("model.norm.weight", "whole"),
        "inv_freq": (INV_FREQ, "whole"),
        "scale": (SCALE, "whole"),
        f"{layer}norm_1": (f"{source}input_layernorm.weight", "whole"),
        f"{layer}norm_2": (f"{source}post_attention_layernorm.weight", "whole"),
        f"{layer}o": (f"{source}self_attn.o_proj.weight", "columns"),
        f"{layer}down": (f"{source}mlp.down_proj.weight", "columns"),
    }
    if not config.tied:
        kept["head"] = (HEAD, "whole")
    rows = [Parameter(name, (Part(*part),)) for name, part in kept.items()]
    for name, parts in fused.items():
        sources = tuple(Part(f"{source}{part}.weight", "rows") for part in parts)
        rows.append(Parameter(layer + name, sources))
    return LayoutSpec(
        engine="reference",
        family="Reference",
        device="cpu",
        dtype="float32",
        layers=config.layers,
        kv_heads=config.heads,
        parameters=tuple(rows),
        unknown=("head_packed", "rotary"),
    )
