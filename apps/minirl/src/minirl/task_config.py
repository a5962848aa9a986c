"""The sections `data` and `reward`: what is asked, and who scores the answers."""

from dataclasses import dataclass, field
from typing import Any

from minirl.algorithm_config import OverlongBufferConfig


@dataclass
class DataConfig:
    """Prompts."""

    task: str = "repeat"
    """repeat, or FILE.py with prompts and their reward."""
    path: str | None = None
    """Prompts: a JSONL or parquet file, or the directory of a saved Hugging Face dataset."""
    reasoning_gym: Any = None
    """Name of a reasoning-gym dataset, or a mapping of `name` and its options."""
    prompt_key: str = "prompt"
    """Key or column of the prompt; all others are arguments of the reward functions."""
    eval_path: str | None = None
    eval_size: int = 0
    """Held-out samples generated before and after the training; 0 is no evaluation."""
    train_batch_size: int = 32
    """Prompts per step."""
    num_generations: int = 8
    """Completions per prompt."""
    max_prompt_length: int = 512
    """Tokens, chat template included."""
    on_long_prompt: str = "error"
    """error | drop | truncate: what to do about prompts that are longer."""
    shuffle: bool = True


@dataclass
class RewardConfig:
    """Who scores completions."""

    path: Any = None
    """FILE.py or FILE.py:NAME, or a list of them; null takes the task's own reward."""
    weights: list[float] | None = None
    """One for each function of `path`; null is 1 for all."""
    timeout_s: float = 60.0
    """Longest call of one function."""
    per_group: bool = False
    """Call the functions for each prompt's samples as soon as these are there, beside generation;
    else once for the whole batch."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
