"""Arguments of an engine, read from the source of its classes: names, plain types, bounds.

The source is parsed, nothing is imported. What is not plain there is left to the engine.
"""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.metadata import nearest

_PLAIN: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_WRAPPERS = ("A", "Annotated", "Optional")
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_PREFIX = "rollout.engine_kwargs."


@dataclass(frozen=True)
class _Kind:
    """Plain types that an annotation allows; none of them if it allows other things too."""

    names: frozenset[str] = frozenset()
    nullable: bool = False

    def allows(self, value: Any) -> bool:
        if not self.names or (value is None and self.nullable):
            return True
        if isinstance(value, int) and not isinstance(value, bool) and "float" in self.names:
            return True
        return any(type(value) is _PLAIN[name] for name in self.names)

    def __str__(self) -> str:
        return " or ".join([*sorted(self.names), *(["null"] if self.nullable else [])])


def check_arguments(
    kwargs: Mapping[str, Any],
    declared: Iterable[Path],
    classes: Collection[str],
    bounded: Iterable[Path],
) -> None:
    """ConfigError in one line for an argument that is not declared, or not as it is given.

    Args:
        kwargs: what is to be passed to the engine.
        declared: files whose classes have the arguments as annotated attributes.
        classes: names of those classes; empty for all.
        bounded: files whose classes say `Field(ge=...)` of attributes of the same names.
    """
    kinds = _kinds(declared, classes)
    if not kinds:
        return
    check_known(kwargs, kinds)
    bounds = _bounds(bounded, kwargs)
    for key, value in kwargs.items():
        if not kinds[key].allows(value):
            raise ConfigError(f"{_PREFIX}{key}={value!r}: the engine wants {kinds[key]}")
        for word, limit in bounds.get(key, {}).items():
            if isinstance(value, int | float) and not _holds(word, value, limit):
                msg = f"{_PREFIX}{key}={value!r}: the engine wants {_BOUNDS[word]} {limit}"
                raise ConfigError(msg)


def check_known(kwargs: Mapping[str, Any], known: Iterable[str]) -> None:
    """ConfigError for an engine argument that the installed engine does not have."""
    names = list(known)
    for key in kwargs:
        if key not in names:
            msg = f"unknown engine argument {_PREFIX}{key}; did you mean {nearest(key, names)!r}?"
            raise ConfigError(msg)


def _kinds(files: Iterable[Path], classes: Collection[str]) -> dict[str, _Kind]:
    return {
        name: _kind(item.annotation)
        for path in files
        for owner, name, item in _attributes(path.read_text())
        if not classes or owner in classes
    }


def _bounds(files: Iterable[Path], keys: Collection[str]) -> dict[str, dict[str, float]]:
    """Of each key: the bounds in which all declarations agree."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in files:
        text = path.read_text()
        if any(key in text for key in keys):
            for _, name, item in _attributes(text):
                if name in keys:
                    found.setdefault(name, []).append(dict(_limits(item.value)))
    return {
        name: several[0]
        for name, several in found.items()
        if several.count(several[0]) == len(several)
    }


def _attributes(text: str) -> Iterator[tuple[str, str, ast.AnnAssign]]:
    owners = [item for item in ast.parse(text).body if isinstance(item, ast.ClassDef)]
    for owner, item in ((found, item) for found in owners for item in found.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name = item.target.id
            if not name.startswith("_") and "ClassVar" not in ast.dump(item.annotation):
                yield owner.name, name, item


def _kind(node: ast.expr) -> _Kind:
    """Unions of plain types are understood, and types with remarks; all else is `anything`."""
    if isinstance(node, ast.Name) and node.id in _PLAIN:
        return _Kind(frozenset({node.id}))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right])
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Union":
            return _union(inner)
        if node.value.id in _WRAPPERS:
            kind = _kind(inner[0])
            return _Kind(kind.names, kind.nullable or node.value.id == "Optional")
    return _Kind()


def _union(nodes: Sequence[ast.expr]) -> _Kind:
    null = [node for node in nodes if isinstance(node, ast.Constant) and node.value is None]
    kinds = [_kind(node) for node in nodes if node not in null]
    if not all(kind.names for kind in kinds):
        return _Kind()
    names = frozenset(name for kind in kinds for name in kind.names)
    return _Kind(names, bool(null) or any(kind.nullable for kind in kinds))


def _limits(node: ast.expr | None) -> Iterator[tuple[str, float]]:
    """Of `Field(default=..., ge=1)`: ("ge", 1)."""
    for item in node.keywords if isinstance(node, ast.Call) else ():
        if item.arg in _BOUNDS and isinstance(item.value, ast.Constant):
            yield item.arg, item.value.value  # type: ignore[misc]


def _holds(word: str, value: float, limit: float) -> bool:
    inside = {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}
    return inside[word]
