"""What a run asks, how it reads the answers, and who scores them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.plan import RunPlan
from minirl.prompt_loader import PromptLoader
from minirl.prompts import PromptSet, load_prompts
from minirl.reward_mix import RewardMix, load_rewards
from rl_core.errors import ConfigError, in_one_line


@dataclass(frozen=True)
class TaskData:
    """Prompts, decoder and scorer of a run.

    Attributes:
        loader: training prompts, in batches.
        held_out: evaluation prompts; may be empty.
        decode: texts of many token sequences, special tokens left out.
        scorer: rewards; to be closed.
        model_path: directory of the model whose tokenizer it is.
    """

    loader: PromptLoader
    held_out: PromptSet
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    scorer: RewardMix
    model_path: Path


def load_task_data(plan: RunPlan, reward_log: Path | None = None) -> TaskData:
    """Read and check everything that the `data` and `reward` sections name.

    Args:
        plan: of the run.
        reward_log: file for what a reward function prints; None is stderr.
    """
    config = plan.config
    tokenizer = _load_tokenizer(plan.model_path)
    sets = load_prompts(config.data, tokenizer, config.trainer.seed, reward_log)
    loader = PromptLoader(
        sets.train,
        config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=config.trainer.seed,
    )

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    held_out = sets.held_out.columns if sets.held_out else None
    scorer = load_rewards(config.reward, config.data, sets.train.columns, reward_log, held_out)
    return TaskData(loader, sets.held_out, decode, scorer, plan.model_path)


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = _tokenizer(path)
        tokenizer("a", verbose=False)  # some wrong settings show only then
    except Exception as error:  # a library of native code reads files of anybody's: the edge
        msg = f"{path}: the tokenizer cannot be loaded: {in_one_line(error)}"
        raise ConfigError(msg) from error
    return tokenizer


def _tokenizer(path: Path) -> Any:
    if (path / "tokenizer.json").is_file():
        # Complete in itself; AutoTokenizer would import torch and all model code first,
        # which costs this process 8 s and 300 MB.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)
