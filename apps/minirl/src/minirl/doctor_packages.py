"""Backends, their libraries and versions, as `minirl doctor` sees them.

What a backend needs is read from its distribution's own metadata: an extra that names a library
counts as there when all that it asks for is installed.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from minirl.findings import MISSING, NOTE, OK, Finding
from rl_core import plugins
from rl_core.errors import ComponentError, in_one_line
from rl_core.rollout.installed_engine import InstalledEngine

_GROUPS = {
    plugins.TRAIN_ENGINES: "train engine",
    plugins.ROLLOUT_BACKENDS: "rollout engine",
    plugins.CHECKPOINT_ENGINES: "checkpoint engine",
}
_NEEDED = (plugins.TRAIN_ENGINES, plugins.ROLLOUT_BACKENDS)
"""Without one of these there is no run."""
_APP = "rl-minirl"
_LIBRARIES = ("torch", "ray", "transformers")


def look_at_packages() -> Iterator[Finding]:
    """One finding after the other."""
    for name in _LIBRARIES:
        yield _library(name)
    for group, kind in _GROUPS.items():
        found = {entry.name: entry for entry in entry_points(group=group)}
        findings = [_backend(kind, entry) for _, entry in sorted(found.items())]
        if group in _NEEDED and not any(finding.state == OK for finding in findings):
            findings = [Finding(MISSING, item.what, item.remedy) for item in findings]
        yield from findings
        for (owner, name), provider in plugins.KNOWN_PROVIDERS.items():
            if owner == group and name not in found:
                state = MISSING if group in _NEEDED and not found else NOTE
                yield Finding(state, f"{kind}: {name} is not installed", f"pip install {provider}")
    for name, needs in _extras(distribution(_APP)).items():
        yield _optional(name, needs)


def _optional(name: str, needs: Sequence[Requirement]) -> Finding:
    """An extra of the application itself."""
    lacks = [lack for need in needs if (lack := _lacks(need))]
    if lacks:
        remedy = f"only if you want it: pip install '{_APP}[{name}]' ({', '.join(lacks)})"
        return Finding(NOTE, f"optional: {name}", remedy)
    versions = (f"{need.name} {distribution(need.name).version}" for need in needs)
    return Finding(OK, f"optional: {name} ({', '.join(versions)})")


def _library(name: str) -> Finding:
    try:
        return Finding(OK, f"{name} {distribution(name).version}")
    except PackageNotFoundError:
        return Finding(MISSING, f"{name} is not installed", f"pip install {name}")


def _backend(kind: str, entry: EntryPoint) -> Finding:
    owner = entry.dist
    origin = f"{owner.name} {owner.version}" if owner is not None else entry.value
    words = f"{kind}: {entry.name} ({origin})"
    try:
        engine = _engine(plugins.load_backend(entry.group, entry.name))
    except ComponentError as error:
        return Finding(NOTE, words, in_one_line(error))
    if owner is None:
        return Finding(OK, words)
    extras = _extras(owner)
    complete = [name for name, needs in extras.items() if not any(map(_lacks, needs))]
    if extras and not complete:
        wanted = " or ".join(f"'{owner.name}[{name}]'" for name in extras)
        lacks = ", ".join(
            lack for needs in extras.values() for need in needs if (lack := _lacks(need))
        )
        return Finding(NOTE, f"{words}: its library is not here", f"pip install {wanted} ({lacks})")
    there = [need for name in complete for need in extras[name]]
    versions = dict.fromkeys(f"{need.name} {distribution(need.name).version}" for need in there)
    words += f" with {', '.join(versions)}" if versions else ""
    if engine is None:
        return Finding(OK, words)
    words += f", supported: {engine.supported}"
    remark = engine.remark()
    return Finding(NOTE if remark else OK, words, remark)


def _engine(backend: Any) -> InstalledEngine | None:
    """What a backend says of its engine; IncompatibleVersionError if that is too old here."""
    path = getattr(backend, "config_cls", None)
    engine = getattr(plugins.load_object(path), "engine", None) if path else None
    if not isinstance(engine, InstalledEngine):
        return None
    engine.check_version()
    return engine


def _extras(owner: Distribution) -> dict[str, list[Requirement]]:
    """What each extra of a distribution asks for."""
    extras: dict[str, list[Requirement]] = defaultdict(list)
    for text in owner.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        for name in owner.metadata.get_all("Provides-Extra") or ():
            marker = requirement.marker
            if marker is not None and _only_with(marker, name):
                extras[name].append(requirement)
    return extras


def _only_with(marker: object, extra: str) -> bool:
    from packaging.markers import Marker

    checked = marker if isinstance(marker, Marker) else Marker(str(marker))
    return checked.evaluate({"extra": extra}) and not checked.evaluate({"extra": ""})


def _lacks(requirement: Requirement) -> str:
    """What is wrong with a requirement here; empty if it is met."""
    try:
        version = distribution(requirement.name).version
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, wanted {requirement.specifier}"
