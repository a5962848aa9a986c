"""Names in the module tree and names in the checkpoint, and tensors between the two.

From version 5 on, transformers builds some modules differently from their checkpoints: a
mixture-of-experts layer holds one fused 3-D parameter, its checkpoint one matrix per expert and
projection. The tables that say how belong to transformers (`core_model_loading`); this module is
the only one that touches them. Earlier versions have no such tables: there, names are the same.
"""

from __future__ import annotations

import importlib
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_core.errors import ConfigError, IncompatibleVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class ImportRule:
    """Checkpoint tensors that together make up one or more tensors of the module tree.

    Attributes:
        sources: names in the checkpoint, in the order in which they are joined.
        target: name in the module tree; the first one, where there are several.
        patterns: for each source, the pattern of the converter that takes it.
        converter: transformers' converter, or None where the tensor is taken as it is.
    """

    sources: tuple[str, ...]
    target: str
    patterns: tuple[str, ...] = ()
    converter: Any = None


class Conversions:
    """Both directions for one model; built from the names that its checkpoint really has."""

    def __init__(self, model: nn.Module, checkpoint_names: Iterable[str]) -> None:
        self._model = model
        self._library = _library()
        self.rules = self._plan_import(sorted(checkpoint_names))
        self.groups = self._plan_export()

    def to_module(self, rule: ImportRule, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors of the module tree made of a rule's source tensors (in the rule's order)."""
        if rule.converter is None:
            return {rule.target: tensors[0]}
        converter = deepcopy(rule.converter)
        for source, pattern, tensor in zip(rule.sources, rule.patterns, tensors, strict=True):
            converter.add_tensor(rule.target, source, pattern, tensor)
        config = self._model.config
        return _unlisted(converter.convert(rule.target, model=self._model, config=config))

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoint tensors of one of `groups`, in stream order. May be views of the input."""
        if self._library is None:
            return dict(tensors)
        revert = self._library.revert_weight_conversion
        return _unlisted(revert(self._model, dict(tensors)))

    def _plan_import(self, names: Sequence[str]) -> list[ImportRule]:
        if self._library is None:
            return [ImportRule((name,), name) for name in names]
        try:
            return _TransformersPlan(self._library, self._model).rules(names)
        except (AttributeError, TypeError) as error:
            msg = f"this version of transformers converts checkpoints in an unknown way: {error}"
            raise IncompatibleVersionError(msg) from error

    def _plan_export(self) -> list[tuple[str, ...]]:
        """Smallest sets of module tensors that can be converted back without the others.

        Nearly always each tensor alone. Whatever comes out different on its own from what comes
        out of the whole (on meta tensors) is converted together.
        """
        tensors = module_tensors(self._model)
        meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        whole = _shapes(self.to_checkpoint(meta))
        alone: list[str] = []
        together: list[str] = []
        for name, tensor in meta.items():
            shapes = _shapes(self.to_checkpoint({name: tensor}))
            agrees = all(whole.get(key) == shape for key, shape in shapes.items())
            (alone if agrees else together).append(name)
        groups: list[tuple[str, ...]] = [(name,) for name in alone]
        groups += [tuple(together)] if together else []
        self._check_export(meta, groups, whole)
        return groups

    def _check_export(
        self,
        meta: Mapping[str, Tensor],
        groups: Sequence[tuple[str, ...]],
        whole: Mapping[str, torch.Size],
    ) -> None:
        seen: dict[str, torch.Size] = {}
        count = 0
        for group in groups:
            part = _shapes(self.to_checkpoint({name: meta[name] for name in group}))
            seen.update(part)
            count += len(part)
        if count != len(whole) or seen != dict(whole):
            kind = type(self._model).__name__
            raise ConfigError(f"the weights of {kind} cannot be converted tensor by tensor")


class _TransformersPlan:
    """How transformers would load the model, by name only."""

    def __init__(self, library: Any, model: nn.Module) -> None:
        mapping = importlib.import_module("transformers.conversion_mapping")
        self._library = library
        self._model = model
        self._transforms = mapping.get_model_conversion_mapping(model)
        renaming, converter = library.WeightRenaming, library.WeightConverter
        self._renamings = [item for item in self._transforms if isinstance(item, renaming)]
        self._converters = [item for item in self._transforms if isinstance(item, converter)]
        self._by_pattern = {key: item for item in self._converters for key in item.source_patterns}
        self._known = model.state_dict()

    def rules(self, names: Sequence[str]) -> list[ImportRule]:
        rules: dict[str, ImportRule] = {}
        for name in sorted(names, key=self._library.dot_natural_key):
            target, pattern = self._rename(name)
            converter = self._by_pattern[pattern] if pattern is not None else None
            old = rules.get(target, ImportRule((), target, (), converter))
            rules[target] = ImportRule(
                (*old.sources, name), target, (*old.patterns, pattern or name), old.converter
            )
        # What was used is what saving has to undo; transformers keeps it on the model, too.
        used = [item for item in self._transforms if item.was_used()]
        self._model._weight_conversions = used
        return list(rules.values())

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        rename = self._library.rename_source_key
        target, pattern = rename(name, self._renamings, self._converters, prefix, self._known)
        if target not in self._known and name in self._known:
            target, pattern = rename(name, [], [], prefix, self._known)
        return target, pattern


def module_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each storage once (the first of its names)."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of `module_tensors`, the further names of the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _unlisted(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Transformers' converters return some tensors wrapped in lists of one."""
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def _library() -> Any:
    """Transformers' conversion tables, or None in versions that have none."""
    try:
        return importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:
        return None
