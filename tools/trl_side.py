"""TRL's side of `beside_trl.py`: GRPOTrainer as it comes, in the environment made for it.

The first argument is the shape of a step as JSON (`beside_trl.Shape`); standard input says when to
do one. Generation is TRL's own default, transformers' `generate`. Two of TRL's defaults are not
taken, both in its favour: activations are kept instead of computed twice (as MiniRL does), and
nothing is shown while it goes on.
"""

import json
import sys
import time
from typing import Any

from turns import Turns, reward

turns = Turns()  # before the libraries below print

from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class CountingTrainer(GRPOTrainer):
    """Notes what the step generated, and how long that took with scoring."""

    def __init__(self, **arguments: Any) -> None:
        self.report: dict[str, Any] = {}
        self.generated = 0.0
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.generated = time.perf_counter()
        self.report = {
            "prompt_tokens": int(batch["prompt_mask"].sum()),
            "new_tokens": int(batch["completion_mask"].sum()),
            "phases": {"generate": self.generated - begun},
        }
        return batch

    def finished_step(self) -> dict[str, Any]:
        """What there is to tell of the step that ends now, if there was one."""
        if self.report:
            self.report["phases"]["update"] = time.perf_counter() - self.generated
        return self.report


class OnCommand(TrainerCallback):
    """A step ends where the next one is about to begin, or the training ends."""

    def __init__(self) -> None:
        self.trainer: CountingTrainer | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Tell of the step before, if there was one, and wait for the order."""
        self._tell()
        turns.wait()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Tell of the last step."""
        self._tell()

    def _tell(self) -> None:
        turns.say(**self.trainer.finished_step() if self.trainer else {})


def configuration(shape: dict[str, Any]) -> GRPOConfig:
    """One AdamW step on all samples of a step, which are generated at once."""
    samples = shape["prompts"] * shape["group"]
    return GRPOConfig(
        output_dir=shape["directory"],
        use_cpu=True,
        bf16=shape["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": shape["trl_weights"]},
        per_device_train_batch_size=shape["trl_batch"],
        gradient_accumulation_steps=samples // shape["trl_batch"],
        num_generations=shape["group"],
        max_completion_length=shape["new_tokens"],
        generation_kwargs={"min_new_tokens": shape["new_tokens"]},
        learning_rate=shape["lr"],
        lr_scheduler_type="constant",
        max_steps=shape["steps"],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train, step by step."""
    shape = json.loads(sys.argv[1])
    with open(shape["path"], encoding="utf-8") as file:
        prompts = Dataset.from_list([json.loads(line) for line in file])
    callback = OnCommand()
    trainer = CountingTrainer(
        model=shape["model"],
        reward_funcs=reward,
        args=configuration(shape),
        train_dataset=prompts,
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
