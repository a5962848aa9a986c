"""The embedded model: Qwen3 architecture, about 1M parameters, made from a seed.

`ensure_tiny_model` keeps it in the user's cache directory. The weights are random: the model knows
nothing until it is trained, which is the point of the default run.
"""

import json
import os
import secrets
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from minirl.char_tokenizer import END, FILES, PAD, VOCABULARY, write_tokenizer
from rl_core.errors import ConfigError

Kind = Literal["dense", "tied", "moe"]

MAX_LENGTH = 1024
_DIGESTS = "recipe.json"
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
        initial_scale: standard deviation of every matrix but the embedding.
        embedding_scale: standard deviation of the embedding; with a tied head it takes
            `initial_scale`, or the first logits would be far from flat.
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
    initial_scale: float = 0.02
    embedding_scale: float = 1.0

    @property
    def directory_name(self) -> str:
        """Name of the cached directory."""
        text = json.dumps([asdict(self), VOCABULARY, MAX_LENGTH], sort_keys=True)
        return f"tiny-qwen3-{xxhash.xxh3_64_hexdigest(text.encode())}"


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/minirl`, or `~/.cache/minirl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirl"


def ensure_tiny_model(recipe: Recipe | None = None) -> Path:
    """The embedded model as a Hugging Face directory; built at the first call.

    Several processes may call this at once: each stages a directory of its own, the first rename
    wins. A directory with a missing or damaged file is replaced.

    Errors: ConfigError if the cache cannot be written.
    """
    recipe = recipe or Recipe()
    target = cache_directory() / recipe.directory_name
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        msg = f"cannot write the embedded model to {target.parent}: {error}; set XDG_CACHE_HOME"
        raise ConfigError(msg) from error
    try:
        _build(stage, recipe)
        _move_into_place(stage, target)
    except OSError as error:
        raise ConfigError(f"cannot write the embedded model to {target}: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return target


def build_tiny_model(path: Path, kind: Kind = "dense", seed: int = 1) -> Path:
    """Write a model like the embedded one into `path` (made if missing) and return it."""
    path.mkdir(parents=True, exist_ok=True)
    _build(path, Recipe(kind=kind, seed=seed))
    return path


def is_complete(directory: Path) -> bool:
    """Whether all files are there with the bytes that were written."""
    try:
        expected = json.loads((directory / _DIGESTS).read_text())["files"]
        return all(_digest(directory / name) == expected[name] for name in _MODEL_FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
    model.save_pretrained(directory)
    write_tokenizer(directory, MAX_LENGTH)
    files = {name: _digest(directory / name) for name in _MODEL_FILES}
    record = json.dumps({"recipe": asdict(recipe), "files": files}, indent=1)
    (directory / _DIGESTS).write_text(record)


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
            scale = recipe.embedding_scale if wide else recipe.initial_scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def _move_into_place(stage: Path, target: Path) -> None:
    """Rename `stage` to `target`, unless another process has just finished the same."""
    stage.chmod(0o755)
    for _ in range(8):
        try:
            stage.rename(target)
        except OSError:
            if is_complete(target):
                return
            _remove_damaged(target)
        else:
            return
    raise OSError("the directory reappears incomplete; is another version writing there?")


def _remove_damaged(target: Path) -> None:
    """Move away before deleting: no reader sees a directory that is being emptied."""
    away = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        target.rename(away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
