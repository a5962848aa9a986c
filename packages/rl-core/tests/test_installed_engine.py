"""An engine is looked at without being imported."""

import re
import sys

import pytest

from rl_core.errors import ConfigError, IncompatibleVersionError
from rl_core.rollout.installed_engine import InstalledEngine
from rl_core.rollout.patch_switch import PatchSwitch
from rl_core.rollout.version_range import VersionRange

SOURCE = """
raise RuntimeError("this module was imported")

class Args:
    max_seqs: int | None = None
    share: A[Optional[float], "of the memory"] = None
    eager: bool = False
    mode: "Mode | str" = "fast"
    layers: list[int] | None = None
    path: str = ""
    _hidden: int = 0
    table: ClassVar[int] = 0

class Other:
    unrelated: int = 0
"""
BOUNDS = """
class Scheduler:
    max_seqs: int = Field(default=8, ge=1)
    share: float = Field(default=0.5, gt=0, le=1)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine of version 3.4.1 whose modules cannot be imported."""
    package = tmp_path / "made_up_engine"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (package / "args.py").write_text(SOURCE)
    (package / "config" / "scheduler.py").write_text(BOUNDS)
    info = tmp_path / "made_up_engine_cpu-3.4.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: made-up-engine-cpu\nVersion: 3.4.1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def engine(oldest="3.0", newest="3.4", **fields):
        given = {"arguments": ("args.py",), "classes": ("Args",), "bounds": ("config/*.py",)}
        return InstalledEngine(
            name="Made Up",
            **{"module": "made_up_engine"} | given | fields,
            distributions=("made-up-engine", "made-up-engine-cpu"),
            supported=VersionRange(oldest, newest),
            remedy="pip install a-newer-one",
        )

    return engine


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("0.4.9", "older"),
        ("0.5", "within"),
        ("0.5.0rc1", "within"),
        ("0.12.7+cpu", "within"),
        ("0.13", "newer"),
        ("1.0", "newer"),
        ("0.1.dev1+g0abc", "unknown"),
        ("main", "unknown"),
        (None, "unknown"),
    ],
)
def test_versions_are_ordered_by_number(version, place):
    versions = VersionRange("0.5", "0.12")
    assert versions.place(version) == place
    assert (version in versions) == (place in {"within", "unknown"})


def test_the_version_is_found_under_any_of_its_names(engine):
    assert engine().version() == "3.4.1"
    engine(oldest="3.4.1").check_version()
    assert engine().remark() == ""


def test_an_engine_that_is_too_old_is_refused_with_what_to_install(engine):
    with pytest.raises(IncompatibleVersionError, match=r"Made Up 3\.4\.1 .*3\.5 to 4.*a-newer-one"):
        engine(oldest="3.5", newest="4").check_version()


def test_of_an_engine_that_nobody_tried_it_is_said(engine):
    newer = engine(newest="3.3")
    newer.check_version()
    assert "Made Up 3.4.1 is newer" in newer.remark()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_seq": 4}, "unknown engine argument rollout.engine_kwargs.max_seq; did you mean"),
        ({"_hidden": 4}, "unknown"),
        ({"table": 4}, "unknown"),
        ({"unrelated": 4}, "unknown"),
        ({"max_seqs": "abc"}, "max_seqs='abc': the engine wants int or null"),
        ({"max_seqs": True}, "max_seqs=True"),
        ({"max_seqs": -4}, "max_seqs=-4: the engine wants at least 1"),
        ({"share": "half"}, "share='half': the engine wants float or null"),
        ({"share": 0}, "more than 0"),
        ({"share": 1.5}, "at most 1"),
        ({"eager": None}, "eager=None: the engine wants bool"),
        ({"path": 3}, "path=3: the engine wants str"),
    ],
)
def test_an_argument_that_cannot_work_is_named(engine, kwargs, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        engine().check_arguments(kwargs)


def test_what_the_engine_may_take_is_left_to_it(engine):
    given = {"max_seqs": 1, "share": 1, "eager": True, "mode": object(), "layers": "all"}
    engine().check_arguments(given)
    engine().check_arguments({"max_seqs": None, "share": None})


def test_where_nothing_is_declared_nothing_is_refused(engine):
    engine(arguments=("moved.py",)).check_arguments({"max_seq": 4})
    engine(module="made_up_and_gone").check_arguments({"max_seq": 4})


def test_patches_are_for_the_versions_that_they_were_made_for():
    patches = {"old": VersionRange("3.3", "3.3"), "recent": VersionRange("3.4", "3.4")}
    switch = PatchSwitch(patches, "3.4.1")
    assert (switch.on("old"), switch.on("recent")) == (False, True)
    assert "3.4.1" in switch.remark
    assert "old (3.3)" in switch.remark
    assert "recent" not in switch.remark
    switch.disable(["recent"])
    assert not switch.on("recent")
    assert PatchSwitch({"recent": patches["recent"]}, "3.4.1").remark == ""
