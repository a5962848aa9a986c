"""Kill runs at random steps, resume them, and compare with one that nobody killed.

    uv run tools/kill_and_resume.py [--rounds 3] [--steps 8] [--save-freq 2] [--seed 1] [KEY=VALUE]

Each round starts the same run, kills all its processes with SIGKILL at a random moment of a random
step, and resumes it by `trainer.resume=auto`. A line says at which step it was killed, where it
went on, and how long that took. In the first round nothing may have been saved by then, in the
others something has. Exit code 1 unless it ends with the same rows in `trajectories.jsonl` (tokens,
log-probabilities, rewards, advantages, digest of the weights that sampled them; only the run epoch
may differ), the same losses, and the same trained model, byte for byte.

The last round resumes on one actor rank what two have saved. Everything until the checkpoint must
be the same there, and the weights that are served first must have the digest that was published
before. So must the samples of the next step, except that one engine completes what two have
shared: it makes larger batches, whose log-probabilities may be rounded otherwise. The loss of that
step may, too: one rank adds up in another order. From there on the runs drift apart; the line says
how far.
"""

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from safetensors.torch import load_file
from whole_runs import ONE_ACTOR, Run, Runner

LIMIT_S = 600
STEP_S = 1.0
"""A run is killed within so many seconds of the end of a step."""
LOG_PROBS = "rollout_log_probs"
ROUNDING = 1e-5
"""How far log-probabilities may be apart that were computed in other batches, and losses."""

Step = tuple[list[dict[str, Any]], float, float]


def steps_of(run: Run) -> list[Step]:
    """Of each step: its samples, without run epochs, its loss and its gradient norm."""
    samples: dict[int, list[dict[str, Any]]] = {}
    for sample in run.trajectories:
        spans = sample["policy_version_spans"]
        step = int(spans[0][0].partition(".s")[2])
        sample["policy_version_spans"] = [[step, *rest] for _, *rest in spans]
        samples.setdefault(step, []).append(sample)
    lines = run.metrics
    assert list(samples) == list(range(len(lines)))
    return [(samples[step], line["loss"], line["grad_norm"]) for step, line in enumerate(lines)]


def killed(run: Run, steps: int, drawn: random.Random, *, saved: bool) -> int:
    """Kill everything of a run, when something is `saved` or before; the last step it told of."""
    if saved:
        run.wait_for("Checkpoint saved", LIMIT_S)
    run.wait_for(f"[Step {drawn.randint(1, steps - 2)}/", LIMIT_S)
    time.sleep(drawn.uniform(0, STEP_S))
    while found := run.processes():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    run.process.wait()
    told = [line for line in run.lines if "[Step " in line]
    return int(told[-1].partition("[Step ")[2].partition("/")[0])


def problems(whole: Run, resumed: Run, begun: int, *, same: bool) -> list[str]:
    """What differs between a run that was killed, and one that was not."""
    if resumed.code != 0:
        return [f"exit code {resumed.code}: {resumed.log[-3000:]}"]
    found = resumed.left()
    expected, got = steps_of(whole), steps_of(resumed)
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True), start=1):
        exact = same or step <= begun
        if exact or step == begun + 1:
            differing = differences(mine, theirs, 0.0 if exact else ROUNDING)
            found += [f"step {step} differs: {differing}"] if differing else []
    published = {one["version"].partition(".")[2]: one for one in whole.summary["syncs"]}
    for sync in resumed.summary["syncs"] if same else resumed.summary["syncs"][:1]:
        step = sync["version"].partition(".")[2]
        if sync["weights_digest"] != published[step]["weights_digest"]:
            found.append(f"the weights of {sync['version']} differ")
    if same and final(whole).read_bytes() != final(resumed).read_bytes():
        found.append("the trained models differ")
    return found


def differences(mine: Step, theirs: Step, rounding: float) -> str:
    """Which fields of how many samples, and the losses; empty if nothing differs.

    With `rounding` log-probabilities and losses may be that far apart; the norm of the gradient is
    then not compared.
    """
    fields = [unequal(*pair, rounding) for pair in zip(mine[0], theirs[0], strict=True)]
    close = abs(mine[1] - theirs[1]) <= rounding
    if not any(fields) and (close if rounding else mine[1:] == theirs[1:]):
        return ""
    named = sorted(set().union(*fields))
    numbers = f"loss {mine[1]} and {theirs[1]}, norm of the gradient {mine[2]} and {theirs[2]}"
    return f"{sum(map(bool, fields))} samples in {named}, {numbers}"


def unequal(mine: dict[str, Any], theirs: dict[str, Any], rounding: float) -> set[str]:
    """Fields of a sample that differ; log-probabilities by more than `rounding`."""
    fields = {name for name in mine if mine[name] != theirs[name]}
    if farthest(mine[LOG_PROBS], theirs[LOG_PROBS]) <= rounding:
        fields.discard(LOG_PROBS)
    return fields


def farthest(mine: list[float], theirs: list[float]) -> float:
    """The greatest distance between numbers at the same place; infinite for other lengths."""
    if len(mine) != len(theirs):
        return math.inf
    return max((abs(one - other) for one, other in zip(mine, theirs, strict=True)), default=0.0)


def final(run: Run) -> Path:
    """The file of the trained weights."""
    return run.run_dir / "checkpoints" / "final" / "model.safetensors"


def closeness(whole: Run, resumed: Run, begun: int) -> str:
    """How far a run on another number of ranks is from the one that it follows."""
    steps = list(zip(steps_of(resumed), steps_of(whole), strict=True))[begun:]
    samples = [pair for mine, theirs in steps for pair in zip(mine[0], theirs[0], strict=True)]
    others = sum(one["response_ids"] != two["response_ids"] for one, two in samples)
    mine, theirs = steps[0]
    first = max(farthest(*map(itemgetter(LOG_PROBS), pair)) for pair in samples[: len(mine[0])])
    trained = [load_file(final(run)) for run in (resumed, whole)]
    weight = max(float((trained[0][name] - trained[1][name]).abs().max()) for name in trained[1])
    return (
        f"step {begun + 1} differs by {first:.1e} at most in log-probabilities and by "
        f"{abs(mine[1] - theirs[1]):.1e} in the loss; {others} of {len(samples)} samples from it "
        f"on have other tokens, trained weights differ by {weight:.1e} at most"
    )


def told_step(run: Run) -> int:
    """The step that a resumed run says it goes on after."""
    return int(run.log.partition("Run resumed: ")[2].partition("step=")[2].partition(",")[0])


def killed_and_resumed(
    runner: Runner, whole: Run, drawn: random.Random, *, saved: bool, same: bool
) -> tuple[list[str], str]:
    """One round: what is wrong, and what happened."""
    victim = runner.start(*whole.arguments)
    last = killed(victim, len(whole.metrics), drawn, saved=saved)
    ranks = () if same else ONE_ACTOR
    given = (*whole.arguments, *ranks, "trainer.resume=auto")
    resumed = runner.complete(*given, run_dir=victim.run_dir, timeout=LIMIT_S)
    begun = told_step(resumed)
    wrong = problems(whole, resumed, begun, same=same)
    line = f"killed after step {last}, went on after step {begun}"
    line += f", {resumed.seconds:.0f} s of {whole.seconds:.0f} s"
    skipped = sum("Checkpoint skipped" in one for one in resumed.lines)
    line += f", half-written checkpoints skipped: {skipped}"
    if not (same or wrong):
        line += f"; on one rank {closeness(whole, resumed, begun)}"
    return wrong, line


def main() -> int:
    """Exit code 1 if a run did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extra", nargs="*", metavar="KEY=VALUE")
    for name, value in (("rounds", 3), ("steps", 8), ("save-freq", 2), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    arguments = (
        f"trainer.total_training_steps={options.steps}",
        f"trainer.save_freq={options.save_freq}",
        "checkpoint_engine.debug.verify_light_transfer=true",
        "data.eval_size=0",
        *options.extra,
    )
    good = True
    with tempfile.TemporaryDirectory(prefix="kr-") as directory:
        runner = Runner(Path(directory))
        try:
            whole = runner.complete(*arguments, timeout=LIMIT_S)
            if whole.code != 0:
                sys.stdout.write(f"BAD the run that nobody kills failed:\n{whole.log[-3000:]}\n")
                return 1
            for number in range(options.rounds):
                same = number < options.rounds - 1
                saved = number > 0
                wrong, line = killed_and_resumed(runner, whole, drawn, saved=saved, same=same)
                good = good and not wrong
                sys.stdout.write(f"{'BAD' if wrong else 'ok '} {line}\n")
                sys.stdout.write("".join(f"    {one}\n" for one in wrong[:10]))
                sys.stdout.flush()
        finally:
            runner.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
