"""Where an engine is installed already, our distributions change none of its packages.

Asks the resolver and so the package index, as installing does; nothing is installed.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import resolve_beside
from resolve_beside import ResolutionError, beside


@pytest.mark.parametrize("engine", ["vllm==0.13.0", "sglang==0.5.23"])
def test_nothing_that_the_engine_brought_changes(engine):
    there, added = beside(engine)
    assert len(there) > 100
    names = {line.partition("==")[0] for line in added}
    assert "omegaconf" in names
    assert not names & {"torch", "transformers", "triton", "numpy", "vllm", "sglang"}


def test_a_change_would_be_noticed(monkeypatch, tmp_path):
    project = tmp_path / "pinned"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "pinned"\nversion = "1"\ndependencies = ["msgspec<0.19"]\n'
    )
    monkeypatch.setattr(resolve_beside, "OURS", [project])
    with pytest.raises(ResolutionError, match="msgspec"):
        beside("msgspec==0.19.0")
