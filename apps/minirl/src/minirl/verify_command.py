"""`minirl verify`: whether a running engine holds the weights of a Hugging Face directory.

The engine may be one of ours or anybody's that has our worker extension or plugin. Nothing is
started, and nothing in the engine changes: it is asked for digests of what it holds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minirl.config import MiniRLConfig, load_config
from minirl.live_comparison import BadTensor, RankComparison, compare_replica, counts_of
from minirl.live_plan import layout_of
from minirl.model_check import read_model_config
from minirl.models import resolve_model
from minirl.stored_weights import StoredWeights
from rl_core import plugins
from rl_core.errors import ConfigError, RolloutError, VerificationError, in_one_line
from rl_core.interfaces import LiveWeights, RolloutBackend
from rl_core.logs import kv
from rl_core.rollout.expected_digests import expected_digests
from rl_core.tensor_counts import TensorCounts

SETTINGS = ("dtype", "tensor_model_parallel_size")
"""Keys of `rollout` that may be given: the engine must have them so."""

STRICT = "checkpoint_engine.debug.strict"
"""Given as false, it lets tensors that cannot be verified pass."""

KEYS = (
    "rollout.name",
    *(f"rollout.{key}" for key in SETTINGS),
    "checkpoint_engine.timeout_s",
    STRICT,
)
_SIZE = "tensor_model_parallel_size"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[\w.-]+):[0-9]{1,5}")


def verify_lines(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The report, and whether the engine passes: every tensor on every rank is right.

    Args:
        arguments: the directory, `HOST:PORT` of the engine, then `key=value`s of `KEYS`.

    Errors: ConfigError if nothing could be compared: wrong arguments, a directory that cannot be
    read, an engine that does not answer or runs otherwise than given, a model without a table.
    """
    directory, address, config, given = _parsed(arguments)
    path, _ = resolve_model(directory, "DIR")
    read_model_config(path, "DIR")
    weights = StoredWeights(path)
    backend, live = _asked(address, config, given)
    _check_settings(live, given, address)
    ranks = _compared(path, weights, backend, live)
    title = (
        f"{backend.engine_name or backend.name} at {address} against {path}: "
        f"{kv(device=live.device, **{key: live.settings.get(key) for key in SETTINGS})}"
    )
    verdict, passes = _verdict(counts_of(ranks), lenient=given.get("strict") is False)
    lines = [title, *(line for rank in ranks for line in _rank_lines(rank)), verdict]
    return [_shown(line) for line in lines], passes


def _parsed(arguments: Sequence[str]) -> tuple[str, str, MiniRLConfig, dict[str, Any]]:
    """Directory, address, configuration, and the settings that were given, by their last name."""
    places = [item for item in arguments if "=" not in item]
    overrides = [item for item in arguments if "=" in item]
    if len(places) != 2:
        raise ConfigError(f"verify takes a directory and HOST:PORT, not {' '.join(places)!r}")
    directory, address = places
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"verify: {address!r} is no HOST:PORT, such as 127.0.0.1:8000")
    keys = [item.partition("=")[0] for item in overrides]
    for key in keys:
        if key not in KEYS:
            raise ConfigError(f"verify: {key} has no meaning here; there are {', '.join(KEYS)}")
    config = load_config(overrides)
    known = {**vars(config.rollout), **vars(config.checkpoint_engine.debug)}
    names = [key.rpartition(".")[2] for key in keys]
    return directory, address, config, {name: known[name] for name in names if name in known}


def _asked(
    address: str, config: MiniRLConfig, given: Mapping[str, Any]
) -> tuple[RolloutBackend, LiveWeights]:
    """The backend whose engine is at the address, and what that holds."""
    names = [given["name"]] if "name" in given else plugins.installed(plugins.ROLLOUT_BACKENDS)
    tried = []
    for name in names:
        backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, name)
        if backend.probe is None:
            continue
        tried.append(backend.engine_name or name)
        try:
            found = plugins.load_object(backend.probe)(address, config.checkpoint_engine.timeout_s)
        except RolloutError as error:
            raise ConfigError(f"verify: {_shown(in_one_line(error))}") from error
        if found is not None:
            return backend, found
    if not tried:
        raise ConfigError(f"verify: no backend of {', '.join(names)} can ask a running engine")
    raise ConfigError(f"verify: what answers at {address} is not {' or '.join(tried)}")


def _check_settings(live: LiveWeights, given: Mapping[str, Any], address: str) -> None:
    for key in SETTINGS:
        if key in given and given[key] != live.settings.get(key):
            msg = f"rollout.{key}={given[key]}: the engine at {address} has "
            raise ConfigError(f"{msg}{live.settings.get(key)}; leave it out to take that")
    if live.split:
        msg = f"verify: the engine at {address} runs with {kv(**live.split)}, which layout tables "
        raise ConfigError(f"{msg}do not know; they know tensor parallelism")
    if len(live.ranks) != live.settings.get(_SIZE):
        msg = f"{len(live.ranks)} ranks answer at {address}, which has {_SIZE}="
        raise ConfigError(f"verify: {msg}{live.settings.get(_SIZE)}")


def _compared(
    path: Path, weights: StoredWeights, backend: RolloutBackend, live: LiveWeights
) -> list[RankComparison]:
    spec = layout_of(backend, path, live.settings, live.device)
    size = len(live.ranks)
    expected = expected_digests(iter(weights), weights.manifest, spec, range(size), size)
    try:
        return compare_replica(spec, expected, live.ranks)
    except VerificationError as error:
        raise ConfigError(f"verify: {_shown(in_one_line(error))}") from error


def _verdict(counts: TensorCounts, *, lenient: bool) -> tuple[str, bool]:
    wrong = counts.mismatched + counts.missing + counts.unexpected
    if wrong:
        return f"the engine does not hold these weights: {wrong} tensors are wrong", False
    if not counts.matched:
        return "nothing could be compared", False
    if counts.unverifiable:
        words = f"nothing is wrong, and {counts.unverifiable} tensors could not be verified"
        return words if lenient else f"{words} ({STRICT}=false lets that pass)", lenient
    return "every rank holds these weights", True


def _rank_lines(rank: RankComparison) -> Iterator[str]:
    counts = rank.check.counts
    yield (
        f"rank {rank.check.tp_rank}: matched={counts.matched} mismatched={counts.mismatched} "
        f"missing={counts.missing} unexpected={counts.unexpected} "
        f"unverifiable={counts.unverifiable}"
    )
    yield from (f"  {_described(bad)}" for bad in rank.bad)
    for name, why in rank.check.unverifiable.items():
        yield f"  unverifiable {name}: {why}"


def _described(bad: BadTensor) -> str:
    made = f" <- {' + '.join(bad.slices)}" if bad.slices else ""
    digests = f"expected {bad.expected or 'nothing'}, holds {bad.live or 'nothing'}"
    return f"{bad.kind} {bad.name}{made}: {digests}"


def _shown(text: str) -> str:
    """Text with something that another machine sent, fit for a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]
