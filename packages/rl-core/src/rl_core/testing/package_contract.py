"""`PackageContract`: what every distribution that announces a backend must do.

```python
class TestPackage(PackageContract):
    distribution = "rl-rollout-mine"
    module = "rl_rollout_mine"
    entry = (ROLLOUT_BACKENDS, "mine")
    blocked = ("mine_engine", "ray", "omegaconf")
    config = {"local_path": "/models/tiny"}
```

Imports are tried in fresh interpreters in which the blocked modules cannot be imported.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import API_VERSION
from rl_core.plugins import build_config, load_backend, load_object
from rl_core.testing.contract import Contract

FOREIGN = ("ray", "omegaconf")
"""Modules that belong to an application, never to a package."""

_BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the package contract", name=name)

sys.meta_path.insert(0, Blocked())
"""


class PackageContract(Contract, contract=True):
    """Subclass it and say what the package is.

    Attributes:
        distribution: name on the index.
        module: import name.
        entry: entry-point group and name that it provides.
        blocked: modules that must not be needed for importing it: its engine, and what
            belongs to applications.
        config: values from which its configuration can be built, as few as possible.
    """

    distribution: ClassVar[str]
    module: ClassVar[str]
    entry: ClassVar[tuple[str, str]]
    blocked: ClassVar[tuple[str, ...]] = FOREIGN
    config: ClassVar[Mapping[str, Any]] = {}

    def test_imports_without_its_engine(self) -> None:
        """`import` works where the engine, ray and omegaconf are not installed."""
        self._run(f"import {self.module}")

    def test_import_is_light(self) -> None:
        """Importing the package imports no torch: an entry point is loaded by every process."""
        self._run(f"import {self.module}\nassert 'torch' not in sys.modules, 'torch was imported'")

    def test_entry_point_loads_without_its_engine(self) -> None:
        """So do the classes that it names, as far as they run in the controller."""
        group, name = self.entry
        self._run(
            "from rl_core.plugins import load_backend, load_object\n"
            f"backend = load_backend({group!r}, {name!r})\n"
            "for part in ('config_cls', 'replica', 'adapter', 'engine', 'sender', 'receiver'):\n"
            "    if getattr(backend, part, None): load_object(getattr(backend, part))"
        )

    def test_entry_point_is_of_this_package(self) -> None:
        """Announced once, by this distribution, for the interfaces that are installed."""
        group, name = self.entry
        found = [entry for entry in metadata.entry_points(group=group) if entry.name == name]
        owners = {entry.dist.name for entry in found if entry.dist is not None}
        assert owners == {self.distribution}
        backend = load_backend(group, name)
        assert backend.name == name
        assert backend.api_version == API_VERSION

    def test_is_typed(self) -> None:
        """`py.typed` is shipped."""
        assert (self._root() / "py.typed").is_file()

    def test_imports_neither_siblings_nor_the_application(self) -> None:
        """Packages meet in rl-core only; doubles stay in tests."""
        foreign = [
            f"{path.name}: {name}"
            for path in self._root().rglob("*.py")
            for name in _imported(path)
            if self._is_foreign(name)
        ]
        assert not foreign, foreign

    def test_depends_on_one_minor_version_of_rl_core(self) -> None:
        """`rl-core>=0.y,<0.(y+1)`, so that interfaces cannot drift apart."""
        needed = [
            line
            for line in metadata.requires(self.distribution) or []
            if re.match(r"rl-core\b(?!.*extra ==)", line)
        ]
        assert len(needed) == 1, needed
        lower = re.search(r">=0\.(\d+)", needed[0])
        upper = re.search(r"<0\.(\d+)", needed[0])
        assert lower is not None, needed
        assert upper is not None, needed
        assert int(upper[1]) == int(lower[1]) + 1, needed

    def test_config_is_built_and_documented(self) -> None:
        """From the few values given; every field has a type that is checked."""
        config = build_config(self._config_cls(), self.config, "options")
        assert dataclasses.is_dataclass(config)
        for section in (config, *vars(config).values()):
            if dataclasses.is_dataclass(section):
                assert type(section).__doc__, f"{type(section).__name__} has no docstring"

    def test_config_refuses_what_it_does_not_know(self) -> None:
        """An unknown key is told with the nearest one."""
        known = dataclasses.fields(self._config_cls())[0].name
        with pytest.raises(ConfigError, match=rf"options\.{known}x.*options\.{known}\b"):
            build_config(self._config_cls(), {**self.config, f"{known}x": 1}, "options")

    def test_config_refuses_wrong_types(self) -> None:
        """No field takes an object of a class that it does not know."""
        for field in dataclasses.fields(self._config_cls()):
            if field.init and field.type not in {Any, "Any"}:
                with pytest.raises(ConfigError, match="options"):
                    build_config(
                        self._config_cls(), {**self.config, field.name: Unexpected()}, "options"
                    )

    def _config_cls(self) -> type[Any]:
        cls: type[Any] = load_object(load_backend(*self.entry).config_cls)
        return cls

    def _root(self) -> Path:
        spec = find_spec(self.module)
        assert spec is not None, f"{self.module} is not installed"
        assert spec.origin is not None
        return Path(spec.origin).parent

    def _is_foreign(self, name: str) -> bool:
        top = name.partition(".")[0]
        if name.startswith("rl_core.testing"):
            return True
        sibling = top.startswith(("rl_train_", "rl_rollout_", "rl_ckpt_", "minirl"))
        return top in FOREIGN or (sibling and top != self.module)

    def _run(self, code: str) -> None:
        program = _BLOCK.format(blocked=set(self.blocked)) + code
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


class Unexpected:
    """A value that no configuration expects."""


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
