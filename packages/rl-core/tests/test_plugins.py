import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from rl_core import plugins
from rl_core.errors import (
    ComponentLoadError,
    ComponentNotFoundError,
    ConfigError,
    IncompatibleVersionError,
)
from rl_core.interfaces import API_VERSION, RolloutBackend
from rl_core.plugins import ROLLOUT_BACKENDS, build_config, load_backend, load_object

GOOD = RolloutBackend("good", "a:A", "b:B", "c:C")
OLD = RolloutBackend("old", "a:A", "b:B", "c:C", api_version=API_VERSION + 1)


@dataclass
class Section:
    depth: int = 1


@dataclass
class Settings:
    size: int
    name: str = "x"
    rate: float = 1.0
    section: Section = field(default_factory=Section)
    derived: int = field(default=0, init=False)

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError(f"size={self.size} is negative")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these entry points are installed."""

    def install(*values):
        entries = [EntryPoint(name, value, ROLLOUT_BACKENDS) for name, value in values]
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries)

    return install


def here(name):
    return f"plugin_under_test:{name}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path):
    module = ModuleType("plugin_under_test")
    module.GOOD, module.OLD = GOOD, OLD
    monkeypatch.setitem(sys.modules, "plugin_under_test", module)
    (tmp_path / "plugin_that_raises.py").write_text("raise RuntimeError('no device')")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_installed_backend_is_found(installed):
    installed(("good", here("GOOD")))
    assert load_backend(ROLLOUT_BACKENDS, "good") is GOOD
    assert plugins.installed(ROLLOUT_BACKENDS) == ["good"]


def test_a_known_name_that_is_missing_says_what_to_install(installed):
    installed()
    with pytest.raises(ComponentNotFoundError, match=r"pip install rl-rollout-vllm .*none"):
        load_backend(ROLLOUT_BACKENDS, "vllm")


def test_an_unknown_name_is_told_with_the_nearest(installed):
    installed(("good", here("GOOD")))
    with pytest.raises(ComponentNotFoundError, match="nearest is 'good'"):
        load_backend(ROLLOUT_BACKENDS, "goood")


def test_two_providers_of_one_name_are_an_error(installed):
    installed(("good", here("GOOD")), ("good", here("OLD")))
    with pytest.raises(ComponentLoadError, match="two distributions provide 'good'"):
        load_backend(ROLLOUT_BACKENDS, "good")


@pytest.mark.parametrize(
    "value", ["rl_core_nowhere:X", "rl_core.errors:Nothing", "plugin_that_raises:X"]
)
def test_a_broken_import_is_an_error_naming_the_entry(installed, value):
    installed(("broken", value))
    with pytest.raises(ComponentLoadError, match="'broken'") as caught:
        load_backend(ROLLOUT_BACKENDS, "broken")
    assert caught.value.__cause__ is not None


def test_another_interface_version_is_refused(installed):
    installed(("old", here("OLD")), ("no", "rl_core.errors:MiniRLError"))
    with pytest.raises(IncompatibleVersionError, match=f"this rl-core has {API_VERSION}"):
        load_backend(ROLLOUT_BACKENDS, "old")
    with pytest.raises(IncompatibleVersionError, match="version None"):
        load_backend(ROLLOUT_BACKENDS, "no")


def test_load_object():
    assert load_object("rl_core.errors:ConfigError") is ConfigError
    for path in (
        "rl_core.errors:Missing",
        "rl_core_nowhere:X",
        "rl_core.errors",
        "",
        ":x",
        "plugin_that_raises:X",
    ):
        with pytest.raises(ComponentLoadError, match="cannot load"):
            load_object(path)


def test_a_config_is_built():
    config = build_config(Settings, {"size": 3, "section": {"depth": 2}}, "rollout")
    assert config == Settings(3, section=Section(2))
    assert build_config(Settings, {"size": 3, "rate": 2}, "rollout").rate == 2.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 1, "nmae": "y"}, r"unknown key rollout\.nmae; did you mean rollout\.name\?"),
        ({"size": 1, "derived": 2}, r"unknown key rollout\.derived"),
        ({"size": 1, "section": {"dpeth": 2}}, r"rollout\.section\.dpeth.*rollout\.section\.depth"),
        ({"size": "1"}, r"rollout.*int.*str.*size"),
        ({"size": True}, r"rollout.*size"),
        ({"size": 1.5}, r"rollout.*size"),
        ({"size": 1, "section": 3}, r"rollout.*section"),
        ({"size": 1, "name": None}, r"rollout.*name"),
        ({}, r"rollout.*size"),
        ({"size": -1}, r"size=-1 is negative"),
    ],
)
def test_a_wrong_config_names_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        build_config(Settings, values, "rollout")
