"""Does each algorithm learn the default task? One whole run of the app after the other.

    uv run tools/learn_each.py
    uv run tools/learn_each.py rloo gspo trainer.seed=2

Names pick algorithms (all of them without any), arguments with `=` are handed to every run. Prints
a line as soon as a run is done and the whole as a Markdown table at the end: rewards of the first
step and of the last five, those of the held-out prompts before and after, and seconds from start to
end. Exit code 1 if a run failed or did not learn (last reward or held-out reward below 0.8). What
the runs wrote is under the directory that is printed first. A run takes 1 to 2 minutes on 2 cores.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APP = ROOT / "apps" / "minirl"
TIMEOUT_S = 1800.0
LEARNED = 0.8

ALGORITHMS = {
    "grpo": [],
    "reference": ["algorithm.kl_coef=0.01"],
    "dr_grpo": ["config=dr_grpo", "algorithm.entropy_coef=0.005"],
    "rloo": ["algorithm.adv_estimator=rloo", "algorithm.entropy_coef=0.005"],
    "reinforce_plus_plus": [
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.entropy_coef=0.05",
        "trainer.total_training_steps=150",
    ],
    "dapo": ["config=dapo"],
    "gspo": ["config=gspo", "algorithm.entropy_coef=0.01"],
    "ppo": ["algorithm.adv_estimator=ppo", "algorithm.entropy_coef=0.05"],
    "rollout_is": ["algorithm.rollout_correction.rollout_is=token"],
}
"""What each is called with.

Without a bonus for the entropy some settle on a part of the ten digits before they have seen the
others: their advantages are small (dr_grpo, rloo), or compare a prompt with all others.
"""

HEADER = "| algorithm | `uv run apps/minirl` with | first | last five | held out | seconds |"


@dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
        code: exit code of the app.
        first: mean reward of the first step.
        last: mean reward of the last five steps.
        held_out: mean rewards of the held-out prompts, before and after.
        seconds: from start to end.
    """

    code: int
    first: float = 0.0
    last: float = 0.0
    held_out: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    @property
    def learned(self) -> bool:
        """Did it end well, and know the task in the end?"""
        return self.code == 0 and min(self.last, self.held_out[1]) >= LEARNED


def run(name: str, extra: list[str], directory: Path) -> Outcome:
    """One run of the app; its log is `<name>.log` in `directory`, its results beside it."""
    run_dir = directory / name
    command = [sys.executable, str(APP), *ALGORITHMS[name], *extra, f"trainer.run_dir={run_dir}"]
    begun = time.monotonic()
    with run_dir.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            # The app ends everything that it started when it is told to.
            process.terminate()
            process.wait()
    seconds = time.monotonic() - begun
    if code != 0:
        return Outcome(code, seconds=seconds)
    summary = json.loads((run_dir / "summary.json").read_text())
    reward, held_out = summary["reward"], summary["eval"]
    before, after = (held_out[at]["reward"] for at in ("first", "last"))
    return Outcome(0, reward["first"], reward["last"], (before, after), seconds)


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    arguments = " ".join(ALGORITHMS[name]) or "nothing"
    shown = f"`{arguments}`" if ALGORITHMS[name] else arguments
    if outcome.code != 0:
        return f"| {name} | {shown} | exit code {outcome.code} | | | {outcome.seconds:.0f} |"
    before, after = outcome.held_out
    return (
        f"| {name} | {shown} | {outcome.first:.3f} | {outcome.last:.3f} | "
        f"{before:.2f} → {after:.2f} | {outcome.seconds:.0f} |"
    )


def main() -> int:
    """Run what was asked for; 1 if something did not learn."""
    parser = argparse.ArgumentParser(description="Does each algorithm learn the default task?")
    parser.add_argument("arguments", nargs="*", help=f"{', '.join(ALGORITHMS)}, or key=value")
    given = parser.parse_args().arguments
    # So that a run is not left behind: SIGTERM alone would end this program at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [item for item in given if item in ALGORITHMS]
    extra = [item for item in given if item not in ALGORITHMS]
    if unknown := [item for item in extra if "=" not in item]:
        parser.error(f"{unknown[0]} is none of {', '.join(ALGORITHMS)}")
    directory = Path(tempfile.mkdtemp(prefix="learn-"))
    say(f"runs in {directory}")
    outcomes = {}
    for name in names or ALGORITHMS:
        outcomes[name] = run(name, extra, directory)
        say(row(name, outcomes[name]))
    say("", HEADER, "|---" * (HEADER.count("|") - 1) + "|")
    say(*(row(name, outcome) for name, outcome in outcomes.items()))
    return 0 if all(outcome.learned for outcome in outcomes.values()) else 1


def say(*lines: str) -> None:
    """Print at once, also into a pipe."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
