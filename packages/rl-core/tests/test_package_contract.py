"""The package contract, held by a made-up distribution and broken one way at a time."""

import importlib
import sys

import pytest

from rl_core.plugins import ROLLOUT_BACKENDS
from rl_core.testing.package_contract import PackageContract

INIT = """
from rl_core.interfaces import RolloutBackend

BACKEND = RolloutBackend(
    "madeup", "madeup.config:Config", "madeup.parts:Replica", "madeup.parts:Adapter"
)
"""

CONFIG = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    """Settings of nothing."""

    path: str
    size: int = 1
'''

PARTS = """
class Replica:
    def start(self):
        import madeup_engine

class Adapter:
    pass
"""

METADATA = """Metadata-Version: 2.1
Name: rl-madeup
Version: 0.1.0
Requires-Dist: rl-core{pin}
"""

FILES = {
    "madeup/__init__.py": INIT,
    "madeup/config.py": CONFIG,
    "madeup/parts.py": PARTS,
    "madeup/py.typed": "",
    "rl_madeup-0.1.0.dist-info/METADATA": METADATA.format(pin="<0.2,>=0.1.0"),
    "rl_madeup-0.1.0.dist-info/entry_points.txt": (
        "[minirl.rollout_backends]\nmadeup = madeup:BACKEND\n"
    ),
}


class Described:
    distribution = "rl-madeup"
    module = "madeup"
    entry = (ROLLOUT_BACKENDS, "madeup")
    blocked = ("madeup_engine", "ray", "omegaconf")
    config = {"path": "/models/tiny"}  # noqa: RUF012


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write the distribution, with changes, to where it can be imported."""

    def write(changes):
        for name, text in {**FILES, **changes}.items():
            if text is not None:
                path = tmp_path / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "madeup"]:
        del sys.modules[name]


class TestMadeUp(Described, PackageContract):
    @pytest.fixture(autouse=True)
    def _installed(self, install):
        install({})


class Held(Described, PackageContract):
    """The contract, to be called test by test."""


@pytest.mark.parametrize(
    ("test", "changes"),
    [
        (
            "test_imports_without_its_engine",
            {"madeup/__init__.py": f"import madeup_engine\n{INIT}"},
        ),
        ("test_import_is_light", {"madeup/__init__.py": f"import torch\n{INIT}", "torch.py": ""}),
        (
            "test_entry_point_loads_without_its_engine",
            {"madeup/parts.py": f"import madeup_engine\n{PARTS}"},
        ),
        (
            "test_entry_point_is_of_this_package",
            {"madeup/__init__.py": INIT.replace('"madeup",', '"other",', 1)},
        ),
        ("test_is_typed", {"madeup/py.typed": None}),
        (
            "test_imports_neither_siblings_nor_the_application",
            {"madeup/parts.py": f"{PARTS}\ndef late():\n    from rl_ckpt_disk import engine\n"},
        ),
        (
            "test_imports_neither_siblings_nor_the_application",
            {"madeup/parts.py": f"{PARTS}\ndef late():\n    import ray.util\n"},
        ),
        (
            "test_imports_neither_siblings_nor_the_application",
            {"madeup/parts.py": f"from rl_core.testing import launcher\n{PARTS}"},
        ),
        (
            "test_depends_on_one_minor_version_of_rl_core",
            {"rl_madeup-0.1.0.dist-info/METADATA": METADATA.format(pin=">=0.1.0")},
        ),
        (
            "test_depends_on_one_minor_version_of_rl_core",
            {"rl_madeup-0.1.0.dist-info/METADATA": METADATA.format(pin="<0.3,>=0.1.0")},
        ),
        (
            "test_config_is_built_and_documented",
            {"madeup/config.py": CONFIG.replace("    size: int = 1", "    size: int")},
        ),
        (
            "test_config_refuses_what_it_does_not_know",
            {"madeup/config.py": f"{CONFIG}\n    pathx: int = 0\n"},
        ),
        (
            "test_config_refuses_wrong_types",
            {"madeup/config.py": CONFIG.replace("size: int", "size: object")},
        ),
    ],
)
def test_broken_package_is_noticed(test, changes, install):
    install(changes)
    with pytest.raises((Exception, pytest.fail.Exception)):
        getattr(Held(), test)()


def test_every_test_of_the_contract_bites():
    marks = test_broken_package_is_noticed.pytestmark[0].args[1]
    assert {test for test, _ in marks} == Held.promised_tests()
