"""`minirl show`: what it tells of a run, whatever state that is in."""

import io
import json

import pytest
from rich.console import Console

from minirl.reward_chart import chart
from minirl.run_files import latest_run
from minirl.show_command import show
from rl_core.errors import ConfigError


def sample(index, **changes):
    return {
        "index": index,
        "group_index": index // 2,
        "prompt": f"say {index}:",
        "response": "7\n\x1b[31m\u00fc",
        "policy_version_spans": [["e1.s3", 0, 2]],
        "reward": 0.25,
        **changes,
    }


def sync(phase, seconds, **changes):
    record = {
        "phase": phase,
        "seconds": seconds,
        "payload_bytes": 4_000_000,
        "phases": {"transfer": seconds / 2},
        "error": None,
    }
    return {**record, **changes}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("{}")
    lines = [
        {"step": at + 1, "reward/mean": at / 10, "reward/a/mean": 0.5, "reward/b/mean": 1}
        for at in range(10)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [sample(at) for at in range(40)] + [sample(40, reward=None)]
    text = "".join(json.dumps(item) + "\n" for item in samples)
    (path / "trajectories.jsonl").write_text(text + '{"index": 41, "cut o')
    return path


def finish(path):
    summary = {
        "status": "ok",
        "mode": "fused",
        "rollout": "vllm",
        "steps": 10,
        "seconds": 99.6,
        "peak_memory_pss_bytes": 3.3e9,
        "eval": {"first": {"reward": 0.1}, "last": {"reward": 0.875}},
        "syncs": [
            sync("initial", 1.0),
            *(sync("trained", at / 10) for at in (1, 2, 9)),
            sync("trained", 0.2, error="the engine died", phases={"transfer": 0.1, "commit": 0.2}),
        ],
    }
    (path / "summary.json").write_text(json.dumps(summary))


def shown(*arguments, width=100):
    out = io.StringIO()
    show([str(item) for item in arguments], Console(file=out, width=width))
    return out.getvalue()


def test_a_run_that_has_ended(run):
    finish(run)
    text = shown(run)
    assert "ok, fused, vllm, 10 steps in 100 s, peak memory 3.3 GB" in text
    assert "reward, 10 steps: first 0.000, mean of the last 5 0.700" in text
    assert "last step: a 0.500, b 1.000" in text
    assert "held-out reward: first 0.100, last 0.875" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["syncs", "1", "4"] in rows
    assert ["failed", "0", "1"] in rows
    assert ["seconds", "1.0000", "0.2000"] in rows
    assert ["transfer", "0.5000", "0.1000"] in rows


def test_samples_are_of_the_last_prompts_and_harmless(run):
    text = shown(run, width=120)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if "e1.s3" in line]
    assert [line.split()[0] for line in lines] == ["27", "29", "31", "33", "35", "37", "39", "40"]
    assert "none" in lines[-1]
    assert "7\\n\\u001b[31m\u00fc" in lines[0]


def test_a_run_that_goes_on(run):
    assert "no summary yet (it still runs, or was killed), 10 steps" in shown(run)
    (run / "metrics.jsonl").unlink()
    (run / "trajectories.jsonl").unlink()
    assert "0 steps" in shown(run)


def test_without_an_argument_it_is_the_newest(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown().startswith("runs/one\n")
    with pytest.raises(ConfigError, match="no run in"):
        latest_run(tmp_path)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="not the directory of a run"):
        shown(tmp_path)
    with pytest.raises(ConfigError, match="show takes the directory of a run: a b"):
        shown("a", "b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "[]"),
        ("summary.json", '{"status": "ok"}'),
        ("metrics.jsonl", '{"reward/mean": "high"}'),
        ("trajectories.jsonl", "{}"),
    ],
)
def test_files_that_are_none_of_a_run(run, name, content):
    (run / name).write_text(content)
    with pytest.raises(ConfigError, match="not as a run of this version writes it"):
        shown(run)


def test_the_chart_is_as_high_as_its_values():
    assert chart([0.0, 0.5, 1.0], 10, 2) == ["       1   \u2588", "     0.5  \u2588\u2588"]
    assert len(chart([float(at) for at in range(1000)], 50, 4)[-1]) == 9 + 50
    assert chart([2.0], 10, 1) == ["       2 \u2588"]
    assert chart([0.0, 0.0], 10, 1) == ["       1"]
    assert chart([-1.0, 1.0], 10, 2)[0].endswith(" \u2588")
