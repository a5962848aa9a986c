"""The two ways of putting tensors into an SGLang model, in a scheduler process.

`BracketedSession` opens SGLang's weight-update session, in which packed weights are unpacked
first and packed again at the end. `PlainSession` calls the model's loader alone; it is for engines
without that session, and sound only where parameters are served as they were loaded.

SGLang's loaders pass over names that they do not know, cut tensors short and convert dtypes, all
without an error, and nobody notices when a part of the model got nothing: `Loader` looks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel

from rl_core.errors import ManifestMismatchError, WeightSyncError
from rl_core.rollout.copy_ledger import Copy, CopyLedger, Shares
from rl_core.rollout.named_tensors import Named, owned
from rl_core.torch import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from rl_core.rollout.bucket_receiver import Arrival

logger = logging.getLogger(__name__)

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What fused layers are made of, until a complete update has shown it."""


class Loader:
    """Loads batches into one rank's model, and keeps account of what they filled.

    One object for the life of the process: it remembers which tensors fill which parameter, so
    that a part that did not come can be named.
    """

    def __init__(self, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        self._model: nn.Module = runner.model
        tied = getattr(runner.model_config.hf_text_config, "tie_word_embeddings", False)
        self._skipped = ["lm_head.weight"] if tied else []
        self._known_parts: dict[str, set[str]] = {}

    def begin(self) -> None:
        """Forget what came before."""
        layers = self._model.modules()
        vocabularies = [layer for layer in layers if isinstance(layer, VocabParallelEmbedding)]
        self._padding: dict[int, int] = {
            id(layer.weight): int(layer.weight.numel() - _own_rows(layer) * layer.weight.shape[1])
            for layer in vocabularies
            if getattr(layer, "weight", None) is not None and layer.weight.ndim == 2
        }
        self._shares = Shares(vocabularies, int(get_parallel().tp_size), self._skipped)
        self._names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in self._model.named_parameters()
        }
        self._filled: dict[str, int] = defaultdict(int)
        self._parts: dict[str, set[str]] = defaultdict(set)
        self._seen: set[str] = set()

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Load some tensors.

        Errors: ManifestMismatchError naming a tensor that does not fit the model.
        """
        batch = [(arrival.meta.name, owned(arrival)) for arrival in arrivals]
        self._seen.update(name for name, _ in batch)
        named = Named(batch)
        with CopyLedger(batch, meta_only=False) as ledger:
            try:
                self._model.load_weights(named)
            except Exception as error:
                # Edge of the engine: loaders raise whatever a misfit makes them stumble over.
                near = [name for name, _ in self._model.named_parameters()]
                raise named.refusal(error, near) from error
        self._shares.check(batch, ledger)
        for copy in ledger.copies:
            self._note(copy)

    def finish(self) -> None:
        """ManifestMismatchError naming a parameter that did not get all of its elements."""
        missing = [
            (name, self._filled[name], expected)
            for name, parameter in self._model.named_parameters()
            if self._filled[name] < (expected := self._expected(parameter))
        ]
        if not missing:
            self._known_parts = dict(self._parts)
            return
        name, loaded, expected = missing[0]
        absent = sorted(self._never_came(name))
        hint = f"; never came: {', '.join(map(repr, absent))}" if absent else ""
        raise ManifestMismatchError(
            f"{len(missing)} parameters of the engine got too few weights; the first is {name!r} "
            f"with {loaded} of {expected} elements{hint}"
        )

    def _note(self, copy: Copy) -> None:
        name = self._names.get(copy.target)
        if name is None:
            return
        if copy.source_dtype != copy.target_dtype:
            msg = (
                f"tensor {copy.source!r} is {dtype_name(copy.source_dtype)}, the engine's "
                f"parameter {name!r} is {dtype_name(copy.target_dtype)}; publish it in that dtype"
            )
            raise ManifestMismatchError(msg)
        self._filled[name] += copy.count
        self._parts[name].add(copy.source)

    def _expected(self, parameter: Tensor) -> int:
        """Elements that a checkpoint brings for a parameter on this rank, without padding."""
        return int(parameter.numel() - self._padding.get(id(parameter), 0))

    def _never_came(self, name: str) -> Iterable[str]:
        known = self._known_parts.get(name)
        if known is None:
            path, _, kind = name.rpartition(".")
            parent, _, leaf = path.rpartition(".")
            known = {f"{parent}.{part}.{kind}" for part in PARTS.get(leaf, (leaf,))}
        return known - self._seen


class PlainSession:
    """Writes into the parameters in place."""

    def __init__(self, scheduler: Any, loader: Loader) -> None:
        self._scheduler = scheduler
        self._loader = loader

    def begin(self) -> None:
        """Nothing to prepare."""
        self._loader.begin()

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Load some tensors."""
        self._loader.load(arrivals)

    def finish(self) -> None:
        """ManifestMismatchError naming a parameter that got too little."""
        self._loader.finish()

    def abandon(self) -> None:
        """Nothing to undo: parameters keep what was written."""


class BracketedSession(PlainSession):
    """One SGLang weight-update session."""

    _open = False

    def begin(self) -> None:
        """Open the session; WeightSyncError if SGLang refuses."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._said(self._updater.begin_weight_update(BeginWeightUpdateReqInput()))
        self._open = True
        super().begin()

    def finish(self) -> None:
        """Close the session, once every parameter has got all of its elements.

        Errors: ManifestMismatchError naming one that did not.
        """
        super().finish()
        self._close()

    def abandon(self) -> None:
        """Close the session, so that a complete update can begin another one."""
        if not self._open:
            return
        try:
            self._close()
        except Exception:  # edge of the engine: half-loaded layers may not be processed
            logger.exception("SGLang could not close an abandoned update")

    @property
    def _updater(self) -> Any:
        return self._scheduler.weight_updater

    def _close(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._open = False
        try:
            # Loaders were called directly, so that SGLang has to do what follows a load itself.
            self._said(self._updater.end_weight_update(EndWeightUpdateReqInput()))
        finally:
            # Where a layer made it fail, it would take the session for open, and refuse all others.
            self._updater._session = None

    def _said(self, output: Any) -> None:
        if not output.success:
            raise WeightSyncError(f"SGLang refuses the update: {output.message}")


def _own_rows(layer: Any) -> int:
    return int(layer.shard_indices.num_org_elements)
