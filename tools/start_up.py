"""Time from the command to the first training step, and where it goes.

    uv run tools/start_up.py
    uv run tools/start_up.py sglang --rounds 3 --uv
    uv run tools/start_up.py --imports

Starts `minirl` for one step, engine after engine in every round, and notes when each milestone of
its log comes; prints medians of the seconds since the command, with the range of the last one that
counts. `--uv` starts it as `uv run apps/minirl`, otherwise this interpreter runs it. `--imports`
measures what the processes of a run import, each in a process of its own that does nothing else.
Arguments with `=` are handed to `minirl`. Needs a machine that does nothing else: its load is
printed with each round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("vllm", "sglang")
TIMEOUT_S = 600.0

FIRST_STEP = "first step begins"
MILESTONES = {
    "[MiniRL] Ray initialized.": "Ray is up",
    "[MiniRL] [Init] Initializing actor models.": "actors are asked to load",
    "[MiniRL] Applied FSDP wrapping.": "policy is loaded and sharded",
    "[MiniRL] [Init] Starting rollout servers.": "actors are ready",
    "[MiniRL] Rollout servers ready:": "engine answers",
    "[MiniRL] Weight sync finished: sync_index=1,": FIRST_STEP,
    "[MiniRL] [Step 1/1]": "first step is done",
}
"""What each line of the log tells."""

IMPORTS = {
    "driver": "minirl.task_runner, minirl.trainer",
    "actor": "minirl.workers, rl_train_fsdp.engine, torch.distributed.fsdp, transformers",
    "vLLM": "rl_rollout_vllm.engine_api, rl_rollout_vllm.http_server",
    "SGLang": "rl_rollout_sglang.engine_api, rl_rollout_sglang.http_server",
}


def start(engine: str, under_uv: bool, extra: list[str]) -> dict[str, float]:
    """Seconds from the command to each milestone of one run.

    Errors: RuntimeError if the run fails, takes longer than `TIMEOUT_S`, or misses a milestone.
    """
    runner = ["uv", "run"] if under_uv else [sys.executable]
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *runner,
            "apps/minirl",
            f"rollout.name={engine}",
            f"trainer.run_dir={directory}/r",
        ]
        command += ["trainer.total_training_steps=1", "data.eval_size=0", *extra]
        begun, found, lines = time.monotonic(), {}, []
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            # The app ends everything that it started when it is told to.
            watch = threading.Timer(TIMEOUT_S, process.terminate)
            watch.start()
            for line in process.stdout or ():
                lines.append(line)
                for beginning, name in MILESTONES.items():
                    if line.startswith(beginning):
                        found.setdefault(name, time.monotonic() - begun)
            watch.cancel()
    if process.returncode != 0 or len(found) != len(MILESTONES):
        msg = f"{' '.join(command)}: exit code {process.returncode}, {''.join(lines[-5:])}"
        raise RuntimeError(msg)
    return found


def import_seconds(modules: str) -> float:
    """Seconds that a process takes to import them, its own start included."""
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", f"import {modules}"],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        # As in a run: without it SGLang looks for kernels of the GPU.
        env={**os.environ, "RL_ROLLOUT_SGLANG_CPU": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    return time.monotonic() - begun


def report(engine: str, rounds: list[dict[str, float]]) -> None:
    """Medians of all milestones, and the range of the one that counts."""
    sys.stdout.write(f"{engine}, median of {len(rounds)}\n")
    for name in MILESTONES.values():
        times = [found[name] for found in rounds]
        spread = f"  ({min(times):.1f}-{max(times):.1f})" if name == FIRST_STEP else ""
        sys.stdout.write(f"  {statistics.median(times):6.1f} s  {name}{spread}\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="ENGINE|KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uv", action="store_true", help="start with `uv run`")
    parser.add_argument("--imports", action="store_true", help="measure imports instead")
    arguments = parser.parse_args()
    extra = [word for word in arguments.words if "=" in word]
    engines = [word for word in arguments.words if "=" not in word] or list(ENGINES)
    if arguments.imports:
        for name, modules in IMPORTS.items():
            times = [import_seconds(modules) for _ in range(arguments.rounds)]
            sys.stdout.write(f"  {statistics.median(times):6.1f} s  {name}: {modules}\n")
        return
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for _ in range(arguments.rounds):
        for engine in engines:
            load = os.getloadavg()[0]
            found[engine].append(start(engine, arguments.uv, extra))
            seconds = found[engine][-1][FIRST_STEP]
            sys.stdout.write(f"{engine:6}  {seconds:5.1f} s  (load before: {load:.1f})\n")
            sys.stdout.flush()
    for engine, rounds in found.items():
        report(engine, rounds)


if __name__ == "__main__":
    main()
