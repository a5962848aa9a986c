"""What live verification costs with a real model: SmolLM2-135M, sixteen steps of almost no work.

    uv run tools/live_cost.py [VERIFY_EVERY] [arguments of minirl]

VERIFY_EVERY is 8 unless given. Needs the directory that `minirl fetch smollm2` makes. For all syncs
together: seconds for asking and comparing (`verify_live`) and for the derivation of what is
expected (`expect_live`, a part of `transfer`), and their share of everything else. Exit code 1 if
that is more than a quarter.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from whole_runs import Run, Runner

MOST = 0.25
LIMIT_S = 400
ALMOST_NO_WORK = (
    "config=smollm2",
    "trainer.total_training_steps=16",
    "data.eval_size=0",
    "data.train_batch_size=1",
    "data.num_generations=2",
    "rollout.max_completion_length=2",
    "algorithm.ppo_mini_batch_size=2",
    "checkpoint_engine.debug.verify_live_weights=true",
)


def share(run: Run) -> float:
    """Tell of the syncs of a run; the seconds of live verification by those of all else."""
    syncs = run.summary["syncs"]
    spent = {
        name: sum(sync["phases"].get(name, 0.0) for sync in syncs)
        for name in ("verify_live", "expect_live")
    }
    total = sum(sync["seconds"] for sync in syncs)
    found = sum(spent.values()) / (total - sum(spent.values()))
    for sync in syncs:
        mark = "verified" if sync["live"] else ""
        sys.stdout.write(f"sync {sync['sync_index']:2} {sync['seconds']:5.2f} s {mark}\n")
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
    sys.stdout.write(f"{len(syncs)} syncs, {total:.2f} s; {told}: {found:.1%} of the rest\n")
    return found


def main() -> int:
    """Exit code 1 if it costs too much, or the run failed."""
    every = next((word for word in sys.argv[1:] if word.isdigit()), "8")
    further = [word for word in sys.argv[1:] if "=" in word]
    with tempfile.TemporaryDirectory(prefix="lc-") as directory:
        runner = Runner(Path(directory))
        try:
            run = runner.complete(
                *ALMOST_NO_WORK,
                f"checkpoint_engine.debug.verify_every={every}",
                f"checkpoint_engine.root_dir={directory}/exchange",
                *further,
                timeout=LIMIT_S,
            )
        finally:
            runner.close()
        if run.code != 0:
            sys.stdout.write(run.log[-6000:])
            return 1
        return 0 if share(run) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
