"""`minirl show`: one run in a terminal: reward curve, weight syncs, last samples."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from minirl.reward_chart import chart
from minirl.run_files import RunFiles, latest_run
from rl_core.errors import ConfigError

SAMPLES = 8
_HEIGHT = 8
_CURVE_MARGIN = 10
_MEGA = 1e6


def show(arguments: Sequence[str], console: Console) -> None:
    """Print a run.

    Args:
        arguments: its directory; none for the newest one below `runs/`.
        console: where to print.

    Errors: ConfigError if there is no such run, or its files are none of a run's.
    """
    if len(arguments) > 1:
        raise ConfigError(f"show takes the directory of a run: {' '.join(arguments)}")
    run = RunFiles(Path(arguments[0]) if arguments else latest_run(Path("runs")))
    try:
        parts = list(_parts(run, max(20, console.width - _CURVE_MARGIN)))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        msg = f"{run.path}: not as a run of this version writes it: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    for part in parts:
        console.print(part)


def _parts(run: RunFiles, width: int) -> Iterator[RenderableType]:
    metrics, summary = run.metrics(), run.summary()
    yield Text(str(run.path), style="bold", overflow="fold")
    yield Text(_status(summary, metrics))
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    if rewards:
        yield Text(f"\nreward, {len(rewards)} steps: {_from_to(rewards)}", style="bold")
        yield Text("\n".join(chart(rewards, min(width, max(len(rewards), 20)), _HEIGHT)))
        yield from _parts_of_reward(metrics[-1])
    yield from _evaluations(summary)
    syncs = summary.get("syncs", []) if summary is not None else []
    if syncs:
        yield Text("\nweight syncs (seconds: medians)", style="bold")
        yield _sync_table(syncs)
    samples = run.last_samples(SAMPLES)
    if samples:
        yield Text(f"\nlast {len(samples)} samples", style="bold")
        yield _sample_table(samples)


def _status(summary: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]) -> str:
    if summary is None:
        return f"no summary yet (it still runs, or was killed), {len(metrics)} steps"
    memory = (summary.get("peak_memory_pss_bytes") or 0) / 1e9
    return (
        f"{summary['status']}, {summary['mode']}, {summary['rollout']}, {summary['steps']} steps "
        f"in {summary['seconds']:.0f} s, peak memory {memory:.1f} GB"
    )


def _from_to(values: Sequence[float]) -> str:
    last = values[-5:]
    return f"first {values[0]:.3f}, mean of the last {len(last)} {sum(last) / len(last):.3f}"


def _parts_of_reward(line: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What each reward function gave in the last step, if there are several."""
    means = {
        name.split("/")[1]: value
        for name, value in line.items()
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2
    }
    if len(means) > 1:
        yield Text("last step: " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))


def _evaluations(summary: Mapping[str, Any] | None) -> Iterator[RenderableType]:
    found = (summary or {}).get("eval")
    if found:
        words = (f"{name} {found[name]['reward']:.3f}" for name in ("first", "last"))
        yield Text(f"held-out reward: {', '.join(words)}")


def _sync_table(syncs: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each kind of sync, a row for each of its phases."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for sync in syncs:
        kinds[str(sync["phase"])].append(sync)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    rows = {"syncs": [str(len(members)) for members in kinds.values()]}
    failed = [sum(1 for sync in members if sync.get("error")) for members in kinds.values()]
    if any(failed):
        rows["failed"] = [str(count) for count in failed]
    rows["payload, MB"] = [
        f"{max(sync['payload_bytes'] for sync in members) / _MEGA:.1f}"
        for members in kinds.values()
    ]
    rows["seconds"] = [_median(sync["seconds"] for sync in members) for members in kinds.values()]
    for phase in dict.fromkeys(name for sync in syncs for name in sync["phases"]):
        rows[f"  {phase}"] = [
            _median(sync["phases"].get(phase, 0.0) for sync in members)
            for members in kinds.values()
        ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _median(values: Iterator[float] | Any) -> str:
    return f"{median(values):.4f}"


def _sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("sample", "version", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prompt", "response"):
        table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis")
    for sample in samples:
        versions = [span[0] for span in sample["policy_version_spans"]]
        reward = sample["reward"]
        table.add_row(
            str(sample["index"]),
            "+".join(dict.fromkeys(versions)),
            "none" if reward is None else f"{reward:.3f}",
            Text(_shown(sample["prompt"])),
            Text(_shown(sample["response"])),
        )
    return table


def _shown(text: str) -> str:
    """One line, without anything that a terminal obeys."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in escaped)
