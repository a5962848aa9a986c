"""The embedded model: Qwen3 architecture, about 1M parameters, made from a seed.

`ensure_tiny_model` keeps it in the user's cache directory. The weights are random: the model knows
nothing until it is trained, which is the point of the default run. Its output head is a matrix of
its own (untied), so that the default run has no two names for one tensor; the tied and the MoE
variants exist for tests of exactly that.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from minirl.char_tokenizer import END, FILES, PAD, VOCABULARY, write_tokenizer
from minirl.model_directory import (
    cache_directory,
    edit_json,
    ensure_directory,
    no_progress_bars,
    write_record,
)

Kind = Literal["dense", "tied", "moe"]

MAX_LENGTH = 1024
"""Tokens that the model can attend to."""
_ROPE_THETA = 10000.0
_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", *FILES)


@dataclass(frozen=True)
class Recipe:
    """What determines the files; its hash is part of the directory's name.

    Attributes:
        kind: `dense` (default model), `tied` (output head shares the embedding) or `moe`
            (Qwen3-MoE, four experts of which two are active).
        seed: of the weights.
        revision: raised whenever the code below makes other files from the same values.
        hidden: width of the model; `layers`, `heads`, `kv_heads`, `head_dim`, `intermediate`
            likewise. vLLM's CPU attention has kernels for head_dim 32, 64, 80, ... only; 6 and 2
            heads split over two tensor-parallel ranks.
        matrix_scale: standard deviation of every matrix but the embedding. 0.05 instead
            of the usual 0.02: the default task is learned sooner.
        embedding_scale: standard deviation of the embedding; with a tied head it is
            `matrix_scale`, or the first logits would be far from flat.
    """

    kind: Kind = "dense"
    seed: int = 1
    revision: int = 1
    hidden: int = 192
    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 640
    matrix_scale: float = 0.05
    embedding_scale: float = 0.2

    @property
    def directory_name(self) -> str:
        """Name of the cached directory."""
        text = json.dumps([asdict(self), VOCABULARY, MAX_LENGTH], sort_keys=True)
        return f"tiny-qwen3-{xxhash.xxh3_64_hexdigest(text.encode())}"


def ensure_tiny_model(recipe: Recipe | None = None) -> Path:
    """The embedded model as a Hugging Face directory; built at the first call.

    Safe to be called by several processes at once.

    Errors: ConfigError if the cache cannot be written.
    """
    recipe = recipe or Recipe()
    target = cache_directory() / recipe.directory_name
    ensure_directory(target, lambda stage: _build(stage, recipe))
    return target


def build_tiny_model(path: Path, kind: Kind = "dense", seed: int = 1) -> Path:
    """Write a model like the embedded one into `path` (made if missing) and return it."""
    path.mkdir(parents=True, exist_ok=True)
    _build(path, Recipe(kind=kind, seed=seed))
    return path


def _build(directory: Path, recipe: Recipe) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(recipe), dtype=torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()
    _initialise(model, recipe)
    model.generation_config = GenerationConfig(
        eos_token_id=VOCABULARY.index(END), pad_token_id=VOCABULARY.index(PAD), do_sample=True
    )
    with no_progress_bars():
        model.save_pretrained(directory)
    # Where transformers 4 looks for it; version 5 writes it elsewhere and reads both.
    edit_json(directory / "config.json", rope_theta=_ROPE_THETA)
    write_tokenizer(directory, MAX_LENGTH)
    write_record(directory, _MODEL_FILES, asdict(recipe))


def _config(recipe: Recipe) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": _ROPE_THETA,
        "tie_word_embeddings": recipe.kind == "tied",
        "eos_token_id": VOCABULARY.index(END),
        "pad_token_id": VOCABULARY.index(PAD),
        "bos_token_id": None,
    }
    if recipe.kind != "moe":
        return Qwen3Config(**shape)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**shape, **experts, moe_intermediate_size=256, norm_topk_prob=True)


def _initialise(model: Any, recipe: Recipe) -> None:
    """Fill the parameters in the order of their names, so that only the recipe decides them."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            wide = "embed_tokens" in name and recipe.kind != "tied"
            scale = recipe.embedding_scale if wide else recipe.matrix_scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
