"""A fault at each step of a publish, at one replica of two: what the run makes of it.

    uv run tools/fault_in_publish.py [POLICY] [TRANSPORT] [ENGINE] [tp2] [POINT ...]

POLICY: continue (default) or abort. TRANSPORT: hccl (default), mooncake or disk. ENGINE: vllm
(default) or sglang. With `tp2` each replica has two ranks, of which the last one is harmed.

For each point of `tests/faulty_replica_run.py`: how the run ended, who was given up, the syncs, and
the versions in `trajectories.jsonl`. Exit code 1 unless every token there is of a version that was
committed and verified, by the digest that was sent; with `continue` the run also has to end well,
with every sample once and without that replica (or, where the fault is nobody's, with the version
before put back, if the disk keeps it), and with `abort` by itself, with the cause.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import pytest
from faulty_replica_run import POINTS, VICTIM
from whole_runs import VERIFIED, Run, Runner

from minirl.sync_record import RESTORED

PROGRAM = Path(__file__).resolve().parent.parent / "tests" / "faulty_replica_run.py"
STEPS, PROMPTS, COPIES = 3, 32, 4
LIMIT_S = 400
STALL_S = 15
UNBLAMED = "trainer"
CLOSE = 1e-4
"""Largest difference of log-probabilities between the engine and the trainer, for one version."""


def problems(run: Run, *, goes_on: bool, blamed: bool) -> list[str]:
    """What is wrong with a run that ended; `blamed` says whether the fault is a replica's."""
    found = []
    syncs = run.summary["syncs"]
    committed = {one["version"]: one["weights_digest"] for one in syncs if one["error"] is None}
    for sync in syncs:
        counts = [sync[kind] or {"no": 1} for kind in ("light", "live")]
        bad = any(count for one in counts for kind, count in one.items() if kind != "matched")
        if sync["error"] is None and bad:
            found.append(f"sync {sync['sync_index']} committed without verification")
    for item in run.trajectories:
        for version, _, _ in item["policy_version_spans"]:
            if version not in committed or item["weights_digest"] != committed[version]:
                found.append(f"{item['rollout_id']} has tokens of {version}")
    stale = any(sync["phase"] == RESTORED for sync in syncs)
    far = any(line["rollout_train_logprob_diff/max"] > CLOSE for line in run.metrics)
    if far != stale:  # samples of a version put back are the only ones that lag behind
        found.append("log-probabilities differ from the trainer's")
    doubled = [
        name for name, n in Counter(i["rollout_id"] for i in run.trajectories).items() if n > 1
    ]
    found += [f"{name} is there more than once" for name in doubled]
    return found + run.left() + (_ended_badly(run, blamed) if goes_on else _went_on(run))


def _ended_badly(run: Run, blamed: bool) -> list[str]:
    found = [] if run.code == 0 else [f"exit code {run.code}"]
    samples = STEPS * PROMPTS * COPIES
    if len(run.trajectories) != samples:
        found.append(f"{len(run.trajectories)} samples of {samples}")
    if given_up(run) != ([f"replica={VICTIM},"] if blamed else []):
        found.append(f"given up: {given_up(run)}")
    if run.code == 0 and blamed and run.summary["syncs"][-1]["replicas"] == [0, VICTIM]:
        found.append("the replica still took part in the last sync")
    return found


def _went_on(run: Run) -> list[str]:
    causes = [line for line in run.lines if "Run failed: " in line]
    return [] if run.code == 1 and len(causes) == 1 else [f"exit code {run.code}, {causes}"]


def given_up(run: Run) -> list[str]:
    """Replicas, as the log names them."""
    lines = [line for line in run.lines if "Rollout replica given up: " in line]
    return [line.partition("given up: ")[2].split()[0] for line in lines]


def row(run: Run) -> str:
    """What happened, in a line."""
    syncs = " ".join(
        f"{one['version']}{one['replicas']}{'' if one['error'] is None else '!'}"
        for one in run.summary["syncs"]
    )
    served = Counter(
        version for item in run.trajectories for version, _, _ in item["policy_version_spans"]
    )
    tokens = " ".join(f"{version}:{count}" for version, count in sorted(served.items()))
    lost = sum(one["seconds"] for one in run.summary["syncs"] if one["error"] is not None)
    took = f"{run.seconds:3.0f} s, {lost:.1f} s in failed syncs"
    return f"code {run.code}, {took}; syncs {syncs}; samples {tokens}"


def main() -> int:
    """Exit code 1 if anything was wrong."""
    words = sys.argv[1:]
    policy = "abort" if "abort" in words else "continue"
    transport = next((word for word in words if word in ("mooncake", "disk")), "hccl")
    engine = "sglang" if "sglang" in words else "vllm"
    tp_size = 2 if "tp2" in words else 1
    good = True
    for point in [word for word in words if word in POINTS] or POINTS:
        with tempfile.TemporaryDirectory(prefix="fp-") as directory:
            runner = Runner(Path(directory))
            try:
                given = arguments(policy, transport, directory)
                given += replicas(engine, tp_size)
                run = runner.complete(point, *given, program=PROGRAM, timeout=LIMIT_S)
                # Without blame the run goes on only where the version before is kept.
                goes_on = policy == "continue" and (point != UNBLAMED or transport == "disk")
                wrong = problems(run, goes_on=goes_on, blamed=point != UNBLAMED)
                line = row(run)
                if wrong:
                    line += f"\n{'':4}" + "; ".join(wrong[:5]) + "\n" + run.log[-6000:]
            except pytest.fail.Exception as hang:
                wrong, line = ["hang"], str(hang)[-6000:]
            runner.close()
        good = good and not wrong
        sys.stdout.write(f"{'BAD' if wrong else 'ok '} {point:13} {line}\n")
        sys.stdout.flush()
    return 0 if good else 1


def arguments(policy: str, transport: str, directory: str) -> tuple[str, ...]:
    """Of a short run with two replicas, in which everything is verified."""
    return (
        "config=separate",
        f"checkpoint_engine.backend={transport}",
        f"checkpoint_engine.root_dir={directory}/exchange",
        f"rollout.on_replica_failure={policy}",
        "cluster.actor.n_gpus_per_node=1",
        "actor.engine_config.fsdp_size=1",
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        f"data.num_generations={COPIES}",
        "data.eval_size=0",
        "checkpoint_engine.update_weights_bucket_megabytes=1",
        "checkpoint_engine.debug.verify_replicas=all",
        *VERIFIED,
    )


def replicas(engine: str, tp_size: int) -> tuple[str, ...]:
    """Of two replicas, one of which may be silent for a while only."""
    return (
        f"rollout.name={engine}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        f"cluster.rollout.n_gpus_per_node={2 * tp_size}",
        f"rollout.stall_timeout_s={STALL_S}",
    )


if __name__ == "__main__":
    sys.exit(main())
